"""Checks whether half precision keeps predictions and uncertainty of these teachers, before anything is cached.

Each teacher must predict the same labels as in fp32. With the same masks, passes must vary as much (median over texts),
and the same teacher must be the most confident one. Otherwise fp32 is used, and a note gives the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from amalgam.data.arrays import Array
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import WorkError, first_line
from amalgam.pipeline.execution.faults import is_out_of_memory
from amalgam.stages.common.cached.uncertainty import summarise_passes
from amalgam.stages.common.corpus import fields
from amalgam.stages.common.inference.batches import run_passes
from amalgam.stages.common.inference.teacher import TeacherLoader
from amalgam.stages.common.models.resolve import ResolvedTeacher

TEXTS = 256
"""Most texts of a check."""

FEWEST = 32
SHARE = 20
"""The check runs at most one pass in so many that the corpus needs, yet at least FEWEST texts."""

LONGEST = 128
"""Most tokens of a text in the check, the default of cache.max_tokens; longer texts take longer than a small cache."""

PASSES = 16
RATIO = (0.98, 1.02)
FLIPS = 0.005
"""Largest share of the texts on which the most confident teacher may change."""

LABELS = 0.02
"""The same for each teacher's label; one text may always change. Without its labels, its first two are often near."""


def sample_texts(tables: Iterable[pa.Table], work: int, passes: int | None) -> dict[bytes, tuple[str, ...]]:
    """Returns the texts with the smallest keys, by key: mostly the same ones when the corpus grows.

    `work` is the number of runs of one teacher that the corpus needs, and `passes` as in check_half_precision.
    """
    each = PASSES if passes is None else min(PASSES, max(1, passes))
    wanted = min(TEXTS, max(FEWEST, work // (SHARE * each)))
    sample: dict[bytes, tuple[str, ...]] = {}
    for table in tables:
        rows = table.slice(0, wanted - len(sample))
        sample.update(zip(rows.column("key").to_pylist(), fields(rows), strict=True))
        if len(sample) >= wanted:
            break
    return sample


def check_half_precision(  # noqa: PLR0913  what to compare, on which texts, and how to stop
    loader: TeacherLoader,
    teachers: Sequence[ResolvedTeacher],
    dtype: str,
    sample: Mapping[bytes, tuple[str, ...]],
    *,
    passes: int | None,
    check_interrupt: Callable[[], None],
) -> tuple[bool, str]:
    """Returns whether `dtype` agrees with fp32, and the figures, or the error where a teacher could not be run.

    `passes` None: passes of teachers with dropout are compared, because a later method may run them.
    """

    def logits_of(resolved: ResolvedTeacher, precision: str) -> tuple[Array, Array]:
        """Returns the first label of each text without dropout, and logits [texts, passes, labels].

        Without passes, the logits are those of the run without dropout.
        """
        short = replace(resolved, max_tokens=min(resolved.max_tokens, LONGEST))
        teacher = loader.load(short, precision, passes=passes or 0)
        count = PASSES if passes is None and teacher.keyed_sites else min(PASSES, passes or 0)
        logits, raw = run_passes(
            teacher,
            teacher.tokenise(list(sample.values())),
            list(sample),
            range(count),
            deterministic=True,
            batch_tokens=loader.tokens_at_once(teacher),
            stop=check_interrupt,
        )
        if logits is None:
            raise AssertionError(resolved.name)  # the run without dropout gives them
        return logits.argmax(axis=1), (raw if count else logits[:, None]).astype(np.float64)

    ratios, changed = dict[str, float](), dict[str, float]()
    confidences: dict[str, list[Array]] = {"fp32": [], dtype: []}
    checked = f"{dtype} on {counted(len(sample), 'text')}"
    for resolved in teachers:
        variances, labels = [], []
        for precision in ("fp32", dtype):
            try:
                first, logits = logits_of(resolved, precision)
            except WorkError as error:
                return False, f"{checked}: {error.what}, in {precision}"
            except RuntimeError as error:  # an operation without half precision
                if precision == "fp32" or is_out_of_memory(error):
                    raise
                return False, f"{checked}: teacher {resolved.name} cannot run in it: {first_line(error)}"
            labels.append(first)
            variances.append(logits.var(1).mean(1))
            confidences[precision].append(summarise_passes(logits).confidence)
        ratios[resolved.name] = _ratio(*variances)
        changed[resolved.name] = _share_changed(*labels)
    flips = _share_changed(*(np.stack(values).argmax(0) for values in confidences.values()))
    passed, figures = _judged(ratios, changed, flips, len(sample))
    return passed, f"{checked}: {figures}"


def _judged(ratios: Mapping[str, float], changed: Mapping[str, float], flips: float, texts: int) -> tuple[bool, str]:
    """Returns whether the figures of half precision pass, and their text."""
    most = max(LABELS, 1 / max(texts, 1))
    same_labels = all(share <= most for share in changed.values())
    passed = same_labels and flips <= FLIPS and all(RATIO[0] <= ratio <= RATIO[1] for ratio in ratios.values())
    variance = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    labels = ", ".join(f"{name} {share:.2%}" for name, share in changed.items())
    figures = f"variance of passes against fp32: {variance}; labels that differ: {labels}"
    return passed, f"{figures}; the most confident teacher differs on {flips:.2%}"


def _share_changed(exact: Array, low: Array) -> float:
    return float((exact != low).mean()) if len(exact) else 0.0


def _ratio(exact: Array, low: Array) -> float:
    """Returns the median ratio of variances, 1.0 where nothing varies in fp32 either."""
    varies = exact > 0
    return float(np.median(low[varies] / exact[varies])) if varies.any() else 1.0
