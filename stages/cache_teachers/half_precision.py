"""May the passes be computed in half precision? Asked of these teachers on these texts, before anything is cached.

With the very same masks, passes must vary as much as in fp32 (median over texts), and the same teacher must be the
surest one. Otherwise fp32 is used, and the user is told why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from amalgam.pipeline.errors import WorkError
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.answers.statistics import statistics
from amalgam.stages.common.corpus import fields, part_of, tables, train_part
from amalgam.stages.common.inference.load import launch_budget, load_teacher
from amalgam.stages.common.teachers import ResolvedTeacher

Array = np.ndarray[Any, np.dtype[Any]]
TEXTS = 256

PASSES = 16

SHARE = 20
"""At most one text in so many is asked about, yet at least a few."""

FEWEST = 32

RATIO = (0.98, 1.02)

FLIPS = 0.005


@dataclass(frozen=True)
class PrecisionCheck:
    dtype: str
    texts: int
    ratios: dict[str, float]
    """teacher: the median of (variance between passes in half precision) / (in fp32)."""
    flips: float
    fault: str = ""

    @property
    def holds(self) -> bool:
        return not self.fault and all(RATIO[0] <= r <= RATIO[1] for r in self.ratios.values()) and self.flips <= FLIPS

    def __str__(self) -> str:
        ratios = ", ".join(f"{name} {ratio:.3f}" for name, ratio in self.ratios.items())
        said = (
            self.fault or f"variance of passes against fp32: {ratios}; the surest teacher differs on {self.flips:.2%}"
        )
        return f"{self.dtype} on {self.texts} texts: {said}"


def check_half_precision(run: Run, teachers: Sequence[ResolvedTeacher], dtype: str) -> PrecisionCheck:
    """Both precisions, teacher by teacher."""
    keys, texts = _sample(run)
    variances: dict[str, list[Array]] = {}
    confidences: dict[str, list[Array]] = {"fp32": [], dtype: []}
    for teacher in teachers:
        for one in ("fp32", dtype):
            try:
                passes = _passes(run, teacher, one, keys, texts)
            except WorkError as error:
                return PrecisionCheck(dtype, len(keys), {}, 1.0, f"{error.what}, in {one}")
            variances.setdefault(teacher.name, []).append(passes.var(1).mean(1))
            confidences[one].append(_confidence(passes))
    chosen = {one: np.stack(found).argmax(0) for one, found in confidences.items()}
    flips = float((chosen["fp32"] != chosen[dtype]).mean()) if len(keys) else 0.0
    return PrecisionCheck(dtype, len(keys), {name: _ratio(*both) for name, both in variances.items()}, flips)


def _sample(run: Run) -> tuple[list[bytes], list[tuple[str, ...]]]:
    """The texts with the smallest keys: any texts, and much the same ones when the corpus grows."""
    part = part_of(run, "train") or part_of(run, "test") or train_part(run)
    wanted = min(TEXTS, max(FEWEST, part.texts // SHARE))
    keys: list[bytes] = []
    texts: list[tuple[str, ...]] = []
    for rows in tables(run, part):
        some = rows.slice(0, wanted - len(keys))
        keys += some.column("key").to_pylist()
        texts += fields(some)
        if len(keys) >= wanted:
            break
    return keys, texts


def _passes(run: Run, known: ResolvedTeacher, dtype: str, keys: list[bytes], texts: list[tuple[str, ...]]) -> Array:
    """[texts, passes, labels]; without passes, the dropout-off logits stand for them."""
    from amalgam.stages.common.inference.batches import run_passes

    count = min(PASSES, run.experiment.cache.passes)
    teacher = load_teacher(run, known, dtype, passes=count)
    logits, passes = run_passes(
        teacher,
        teacher.tokenise(texts),
        keys,
        range(count),
        deterministic=not count,
        batch_tokens=launch_budget(run, teacher),
        stop=run.signals.check,
    )
    return passes.astype(np.float64) if logits is None else logits[:, None].astype(np.float64)


def _confidence(passes: Array) -> Array:

    found: Array = statistics(passes).confidence
    return found


def _ratio(exact: Array, low: Array) -> float:
    """1.0 where nothing varies in fp32 either."""
    varies = exact > 0
    return float(np.median(low[varies] / exact[varies])) if varies.any() else 1.0
