"""Computes intervals of a share and of the difference of two shares, and the number of texts that a test needs."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from statistics import NormalDist
from typing import NamedTuple

from amalgam.data.arrays import Array
from amalgam.data.lazy import np

NORMAL_95 = 1.96
"""Standard errors of a 95 % interval."""

NORMAL_POWER = 0.84
"""Standard errors for a power of 80 %."""

MOST_NEEDED = 20_000
"""Largest number of texts that `texts_needed` returns; a larger number is not practical."""


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def separate(share: float, other: float) -> tuple[str, str]:
    """Formats two shares in percent, with as many digits as show which is larger."""
    for digits in range(1, 16):
        first, second = (f"{100 * value:.{digits}f} %" for value in (share, other))
        if first != second:
            break
    return first, second


def points(difference: float) -> str:
    """Formats a difference of two shares in percentage points; zero has no minus."""
    return f"{round(100 * difference, 1) + 0.0:+.1f}"


def nats(value: float) -> str:
    return f"{value:.2f}"


def bounds(low: float, high: float) -> str:
    """Formats the ends of an interval of a share in percent."""
    return f"{100 * low:.1f} to {100 * high:.1f}"


def difference_bounds(low: float, high: float) -> str:
    """Formats the ends of an interval of a difference; the signs show whether it contains 0, also at -0.0."""
    return f"{100 * low:+.1f} to {100 * high:+.1f}"


class Difference(NamedTuple):
    mean: float
    low: float
    high: float


def errors_of(comparisons: int) -> float:
    """Returns the standard errors of a 95 % interval that holds for several comparisons together (Bonferroni)."""
    return NORMAL_95 if comparisons < 2 else NormalDist().inv_cdf(1 - 0.025 / comparisons)


def interval(share: float, n: float, errors: float = NORMAL_95) -> tuple[float, float]:
    """Returns the Wilson interval of a share; `errors` are the standard errors at its confidence."""
    if not n:
        return 0.0, 1.0
    middle = (share + errors**2 / (2 * n)) / (1 + errors**2 / n)
    reach = errors / (1 + errors**2 / n) * math.sqrt(share * (1 - share) / n + errors**2 / (4 * n * n))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def interval_of_mean(values: Array) -> tuple[float, float]:
    """Returns the 95 % interval of an accuracy from values of that mean, such as corrected ones of -1 to 2.

    It is Wilson's, for so many texts that their right and wrong answers had the variance of the values.
    """
    n, mean = len(values), float(values.mean().clip(0, 1))
    centre = (mean * n + 2) / (n + 4)  # not 0 or 1, where right and wrong answers have no variance
    of_answers = centre * (1 - centre)
    return interval(mean, n * of_answers / max(float(values.var()), of_answers))


def interval_of_auroc(wins: Array, losses: Array) -> tuple[float, float]:
    """Returns the 95 % interval of an AUROC from the shares that each text of one group wins and of the other loses.

    It is Wilson's, for so many texts that a share of them had DeLong's variance. They are at least the smaller group,
    by the largest possible variance, and at most three times as many.
    """
    groups, mean = (wins, losses), float(wins.mean())
    fewest = min(map(len, groups))
    centre = (mean * fewest + 2) / (fewest + 4)  # not 0 or 1, where no text varies
    variance = sum(float(values.var(ddof=1)) / len(values) if len(values) > 1 else 1.0 for values in groups)
    texts = np.clip(centre * (1 - centre) / max(variance, sys.float_info.min), fewest, 3 * fewest)
    return interval(mean, float(texts))


def paired(gained: float, lost: float, n: int, errors: float = NORMAL_95) -> Difference:
    """Returns the difference of two systems on the same n texts: `gained` are right for the first one only.

    The interval excludes 0 exactly if McNemar's test with continuity correction is significant. Its ends combine the
    intervals of the share of texts that differ, and of the share gained among these.
    """
    if not n:
        return Difference(0.0, -1.0, 1.0)
    differing = gained + lost
    fewest, most = interval(differing / n, n, errors)
    low, high = (2 * share - 1 for share in _corrected(gained, differing, errors))
    ends = low * (fewest if low > 0 else most), high * (fewest if high < 0 else most)
    mean = (gained - lost) / n
    return Difference(mean, min(ends[0], mean), max(ends[1], mean))


def _corrected(count: float, n: float, errors: float) -> tuple[float, float]:
    """Returns the Wilson interval of a share with continuity correction."""
    if not n:
        return 0.0, 1.0

    def low_end(count: float) -> float:
        if not count:
            return 0.0
        share = count / n
        root = math.sqrt(max(errors**2 - 2 - 1 / n + 4 * share * (n * (1 - share) + 1), 0.0))
        return max(0.0, (2 * n * share + errors**2 - 1 - errors * root) / (2 * (n + errors**2)))

    return low_end(count), 1 - low_end(n - count)


def unpaired(share: float, other: float, n: int, errors: float = NORMAL_95) -> Difference:
    """Returns the difference of two shares of n texts each that cannot be compared text by text (Newcombe)."""
    (low, high), (other_low, other_high) = interval(share, n, errors), interval(other, n, errors)
    mean = share - other
    down, up = math.hypot(share - low, other_high - other), math.hypot(high - share, other - other_low)
    return Difference(mean, mean - down, mean + up)


def texts_needed(gained: int, lost: int, n: int, margin: float = 0.0) -> int | None:
    """Returns about how many labelled texts would show that the difference is above -margin or below 0, at 80 % power.

    With the same shares gained and lost, the interval of `paired` shows it too. Returns None if more than MOST_NEEDED
    were needed.
    """
    differing, mean = (gained + lost) / max(n, 1), (gained - lost) / max(n, 1)
    effect = max(mean + margin, -mean)
    if effect <= 0:
        return None

    def decides(texts: int) -> bool:
        difference = paired(gained * texts / max(n, 1), lost * texts / max(n, 1), texts)
        return difference.low > -margin or difference.high < 0

    errors = NORMAL_95 * math.sqrt(differing) + NORMAL_POWER * math.sqrt(max(differing - mean**2, 0.0))
    needed = max(math.ceil((errors / effect) ** 2), bisect_left(range(MOST_NEEDED + 1), True, n, key=decides))
    if needed > MOST_NEEDED:
        return None
    step: int = 10 ** max(len(str(int(needed))) - 2, 1)
    return int(math.ceil(max(needed, n + 1) / step) * step)
