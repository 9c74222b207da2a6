"""Checks whether half precision keeps the uncertainty of these teachers on these texts, before anything is cached.

With the same masks, passes must vary as much as in fp32 (median over texts), and the same teacher must be the most
confident one. Otherwise fp32 is used, and a note gives the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from amalgam.pipeline.errors import WorkError
from amalgam.stages.common.cached.pass_statistics import statistics
from amalgam.stages.common.corpus import fields
from amalgam.stages.common.inference.batches import run_passes
from amalgam.stages.common.inference.load import TeacherLoader
from amalgam.stages.common.teachers import ResolvedTeacher

if TYPE_CHECKING:
    import pyarrow as pa

Array = np.ndarray[Any, np.dtype[Any]]

TEXTS = 256
"""Most texts of a check."""

FEWEST = 32
SHARE = 20
"""At most one text in so many is used, yet at least FEWEST."""

PASSES = 16
RATIO = (0.98, 1.02)
FLIPS = 0.005


@dataclass(frozen=True)
class PrecisionCheck:
    """The figures of a check, and the error where a teacher could not be run."""

    dtype: str
    texts: int
    ratios: dict[str, float]
    """teacher: the median of (variance between passes in half precision) / (in fp32)."""
    flips: float
    error: str = ""

    @property
    def passed(self) -> bool:
        same_variance = all(RATIO[0] <= ratio <= RATIO[1] for ratio in self.ratios.values())
        return not self.error and same_variance and self.flips <= FLIPS

    def __str__(self) -> str:
        ratios = ", ".join(f"{name} {ratio:.3f}" for name, ratio in self.ratios.items())
        figures = f"variance of passes against fp32: {ratios}; the most confident teacher differs on {self.flips:.2%}"
        return f"{self.dtype} on {self.texts} texts: {self.error or figures}"


@dataclass(frozen=True)
class Sample:
    """Texts and their keys."""

    keys: list[bytes]
    texts: list[tuple[str, ...]]


def sample_texts(tables: Iterable[pa.Table], total: int) -> Sample:
    """Returns the texts with the smallest keys: mostly the same ones when the corpus grows."""
    wanted = min(TEXTS, max(FEWEST, total // SHARE))
    sample = Sample([], [])
    for table in tables:
        rows = table.slice(0, wanted - len(sample.keys))
        sample.keys.extend(rows.column("key").to_pylist())
        sample.texts.extend(fields(rows))
        if len(sample.keys) >= wanted:
            break
    return sample


def check_half_precision(  # noqa: PLR0913  what to compare, on which texts, and how to stop
    loader: TeacherLoader,
    teachers: Sequence[ResolvedTeacher],
    dtype: str,
    sample: Sample,
    *,
    passes: int,
    check_interrupt: Callable[[], None],
) -> PrecisionCheck:
    """Runs each teacher in fp32 and in `dtype` on the sample and compares variances and the chosen teacher."""
    variances: dict[str, list[Array]] = {}
    confidences: dict[str, list[Array]] = {"fp32": [], dtype: []}
    for resolved in teachers:
        for precision in ("fp32", dtype):
            try:
                logits = _run_passes(loader, resolved, precision, sample, min(PASSES, passes), check_interrupt)
            except WorkError as error:
                return PrecisionCheck(dtype, len(sample.keys), {}, 1.0, f"{error.what}, in {precision}")
            variances.setdefault(resolved.name, []).append(logits.var(1).mean(1))
            confidences[precision].append(statistics(logits).confidence)
    chosen = {precision: np.stack(values).argmax(0) for precision, values in confidences.items()}
    flips = float((chosen["fp32"] != chosen[dtype]).mean()) if len(sample.keys) else 0.0
    ratios = {name: _ratio(exact, low) for name, (exact, low) in variances.items()}
    return PrecisionCheck(dtype, len(sample.keys), ratios, flips)


def _run_passes(  # noqa: PLR0913  as check_half_precision
    loader: TeacherLoader,
    resolved: ResolvedTeacher,
    dtype: str,
    sample: Sample,
    count: int,
    check_interrupt: Callable[[], None],
) -> Array:
    """Returns logits [texts, passes, labels]; without passes, those of the run without dropout."""
    teacher = loader.load(resolved, dtype, passes=count)
    logits, passes = run_passes(
        teacher,
        teacher.tokenise(sample.texts),
        sample.keys,
        range(count),
        deterministic=not count,
        batch_tokens=loader.tokens_at_once(teacher),
        stop=check_interrupt,
    )
    return passes.astype(np.float64) if logits is None else logits[:, None].astype(np.float64)


def _ratio(exact: Array, low: Array) -> float:
    """Returns the median ratio of variances, 1.0 where nothing varies in fp32 either."""
    varies = exact > 0
    return float(np.median(low[varies] / exact[varies])) if varies.any() else 1.0
