"""Computes a teacher's confidence in [0, 1] from its cached passes, by the measure in `targets.uncertainty`.

Confidence is 1 - u / (the largest u that C labels allow). Every measure is computed from sums over passes, so a text's
passes may be in several files, and K may differ by text. Shapes: K passes, C classes, N texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from amalgam.data.arrays import Array, entropy_column, entropy_nats, softmax, width
from amalgam.data.lazy import np, pl

COUNT = "passes_counted"

BLOCK_TEXTS = 4096
"""Texts that are computed together; a block stays in the processor's cache through all its steps."""


@dataclass(frozen=True)
class Measure:
    uncertainty: Callable[[pl.DataFrame], pl.Series]
    """Function of a frame that has a row per text, with sums over its passes; 0 means certain."""
    largest: Callable[[int], float] = math.log
    """The largest uncertainty that C labels allow."""
    sums: Mapping[str, Callable[[Array, Array], Array]] = field(default_factory=dict)
    """Sums in addition to `passes_counted` and `probability`: name -> function of a block's logits and probabilities,
    both [K, C, N], that returns [N] or [C, N]."""


def mean(sums: pl.DataFrame, name: str) -> pl.Series:
    return sums[name] / sums[COUNT]


def _summed_entropy(_logits: Array, probability_KCN: Array) -> Array:  # noqa: N803
    return entropy_nats(probability_KCN, axis=1).sum(axis=0)


def _votes(_logits: Array, probability_KCN: Array) -> Array:  # noqa: N803
    first_KN = probability_KCN.argmax(axis=1)  # noqa: N806
    return np.stack([(first_KN == label).sum(axis=0) for label in range(probability_KCN.shape[1])]).astype(np.float64)


def _bounded_energy(logits_KCN: Array, _probability: Array) -> Array:  # noqa: N803
    """Sums exp(free energy of the centred logits) x C, in (0, 1]: 1 when all logits are equal.

    Reading: two teachers share no scale of the free energy -logsumexp(z), since softmax does not fix the level of its
    logits. Centring fixes the level, and the exponential bounds the result.
    """
    with np.errstate(invalid="ignore"):
        top = logits_KCN.max(axis=1)
        raised = np.exp(logits_KCN - top[:, None]).astype(np.float64)
        log_sum = np.log(raised.sum(axis=1)) + top - logits_KCN.mean(axis=1, dtype=np.float64)
        energy: Array = np.exp(math.log(logits_KCN.shape[1]) - log_sum).sum(axis=0)
    return energy


def _one_less_share(classes: int) -> float:
    return 1 - 1 / classes


MEASURES = {
    "entropy": Measure(lambda sums: entropy_column(mean(sums, "probability"))),
    "expected-entropy": Measure(lambda sums: mean(sums, "entropy"), sums={"entropy": _summed_entropy}),
    "mutual-information": Measure(
        lambda sums: entropy_column(mean(sums, "probability")) - mean(sums, "entropy"),
        sums={"entropy": _summed_entropy},
    ),
    "variation-ratio": Measure(
        lambda sums: 1 - sums["votes"].arr.max() / sums[COUNT], _one_less_share, {"votes": _votes}
    ),
    "max-probability": Measure(lambda sums: 1 - mean(sums, "probability").arr.max(), _one_less_share),
    "energy": Measure(lambda sums: mean(sums, "energy"), lambda _classes: 1.0, {"energy": _bounded_energy}),
}


def sums_over_passes(raw: Array, passes: int, measure: Measure) -> dict[str, pl.Series]:
    """Returns the measure's sums, which add up over files; `raw` has a row of logits per text, pass after pass."""
    blocks = [
        _block_sums(raw[start : start + BLOCK_TEXTS], passes, measure)
        for start in range(0, max(len(raw), 1), BLOCK_TEXTS)
    ]
    count = pl.Series([float(passes)]).new_from_index(0, len(raw))
    return {COUNT: count, **{name: _series(name, [block[name] for block in blocks]) for name in blocks[0]}}


def _block_sums(raw: Array, passes: int, measure: Measure) -> dict[str, Array]:
    """Passes are fp16, so the rounding of fp32 is far below theirs, and exp is vectorised in fp32.

    All later steps use fp64, so that the entropy of a teacher with a probability of 1 - 1e-9 is not lost in rounding.
    Arrays of this size come with new pages of memory, which cost more than the arithmetic: so exp is in place.
    """
    logits_KCN = np.array(raw.T, np.float32, order="C").reshape(passes, -1, len(raw))  # noqa: N806
    with np.errstate(invalid="ignore"):  # build_targets refuses NaN
        place = None if measure.sums else logits_KCN  # further sums read the logits
        raised = np.subtract(logits_KCN, logits_KCN.max(axis=1, keepdims=True), out=place)
        np.exp(raised, out=raised)
        probability_KCN = raised / raised.sum(axis=1, keepdims=True, dtype=np.float64)  # noqa: N806
    sums: dict[str, Array] = {"probability": probability_KCN.sum(axis=0)}
    return sums | {name: function(logits_KCN, probability_KCN) for name, function in measure.sums.items()}


def _series(name: str, blocks: list[Array]) -> pl.Series:
    numbers = np.concatenate(blocks, axis=-1)
    if numbers.ndim == 1:
        return pl.Series(name, numbers)
    return pl.Series(name, np.ascontiguousarray(numbers.T).reshape(-1)).reshape((-1, len(numbers)))


def confidence(sums: pl.DataFrame, measure: Measure) -> pl.Series:
    return 1 - measure.uncertainty(sums) / measure.largest(width(sums["probability"]))


@dataclass(frozen=True)
class PassSummary:
    """Statistics of each text's passes, as columns of the cache."""

    mean_probability: Array
    entropy_nats: Array
    confidence: Array
    confidence_se: Array
    """NaN for a single pass."""


def summarise_passes(passes_NKC: Array) -> PassSummary:  # noqa: N803
    probability_NKC = softmax(passes_NKC.astype(np.float32))  # noqa: N806
    mean_NC = probability_NKC.mean(axis=1)  # noqa: N806
    entropy = entropy_nats(mean_NC)
    ceiling = np.log(passes_NKC.shape[2])
    return PassSummary(mean_NC, entropy, 1 - entropy / ceiling, _standard_error(probability_NKC) / ceiling)


def _standard_error(probability_NKC: Array) -> Array:  # noqa: N803
    """Returns the standard error of the mean's entropy by the jackknife, which assumes no distribution of passes."""
    count = probability_NKC.shape[1]
    if count < 2:
        return np.full(len(probability_NKC), np.nan)
    total = probability_NKC.sum(axis=1, keepdims=True)
    leave_one_out = entropy_nats((total - probability_NKC) / (count - 1))
    spread = ((leave_one_out - leave_one_out.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    return np.sqrt((count - 1) / count * spread)
