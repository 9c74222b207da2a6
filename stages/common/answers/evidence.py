"""What the cache holds about the texts of a unit: for each teacher its distribution, its logits and its confidence.

Read by key, never by position: a text's answers may lie in any file of the family whose bucket overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl

from amalgam.data.arrays import softmax_column, width
from amalgam.pipeline.config.schema import COMPARATIVE, ExperimentConfig
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.answers.pass_statistics import sums_over_raw
from amalgam.stages.common.answers.read import Answers, _aligned, _logits, read_answers
from amalgam.stages.common.answers.uncertainty import COUNT, confidence, counted, mean_probability, sums_over_passes
from amalgam.stages.target_methods import Evidence

if TYPE_CHECKING:
    pass


def gather(run: Run, teacher: str, family: str, prefixes: Sequence[str], keys: pl.Series) -> Evidence:
    """`prefixes`: the buckets that the keys are of."""
    targets = run.experiment.targets
    answers = read_answers(run, family, prefixes, keys)
    logits = _aligned(_logits(answers), keys, teacher)["logits"]
    full = run.experiment.cache.passes if targets.passes is None else targets.passes
    certain = softmax_column(logits)
    among = targets.uncertainty in COMPARATIVE  # what stands for it is replaced: see among_teachers
    measure = "entropy" if among else targets.uncertainty
    if full == 0 or (among and targets.distribution == "deterministic"):
        sums, full = pl.DataFrame(sums_over_passes([logits], measure)), 0
    else:
        found = [
            _summed(answers if some is None else [_of(one, some) for one in answers], take, run.experiment)
            for take, some in _takes(run, prefixes, full)
        ]
        sums = _aligned(pl.concat([frame for frame in found if not frame.is_empty()] or found[:1]), keys, teacher)
    distribution = mean_probability(sums) if targets.distribution == "mc-mean" else certain
    return Evidence(teacher, logits, distribution, confidence(sums, measure, full))


def _of(answers: Answers, some: pl.DataFrame) -> Answers:
    return replace(answers, frame=answers.frame.join(some, on="key", how="semi"))


def _takes(run: Run, prefixes: Sequence[str], full: int) -> list[tuple[int, pl.DataFrame | None]]:
    """How many passes of which texts count: all of them the same, unless stage 1 was adaptive."""
    said = run.result("cache-teachers").facts.get("pass_counts")
    if said is None:
        return [(full, None)]
    wanted = {said[prefix] for prefix in prefixes}
    files = [file for file in run.result("cache-teachers").files if file.path in wanted]
    takes = pl.concat([pl.read_parquet(path) for path in run.store.verified_paths(files)])
    takes = takes.with_columns(pl.col("passes").clip(upper_bound=full))
    return [(int(take), rows.select("key")) for (take,), rows in takes.group_by("passes", maintain_order=True)]


def _summed(answers: Sequence[Answers], take: int, experiment: ExperimentConfig) -> pl.DataFrame:
    """Sums over the first `take` passes of every text. Ranges follow each other: [0, 16), then [16, 24); where they
    overlap, as after a mended loss, each pass counts once.
    """
    total = pl.DataFrame()
    measure, adaptive = experiment.targets.uncertainty, experiment.cache.adaptive
    for first, last, frame in ((one.first, one.last, one.frame) for one in answers):
        if "passes" not in frame.columns or first >= take or frame.is_empty():
            continue
        classes = width(frame["passes"]) // (last - first)
        for count, rows in _by_count(frame, total):
            if first <= count < min(last, take):
                until = min(last, take)
                raw = rows["passes"].to_numpy()[:, (count - first) * classes : (until - first) * classes]
                sums = counted(until - count, len(raw)) | sums_over_raw(raw, classes, measure, squares=adaptive)
                total = _grown(total, pl.DataFrame({"key": rows["key"], **sums}))
    return total if total.is_empty() else total.filter(pl.col(COUNT) == take)


def _by_count(frame: pl.DataFrame, total: pl.DataFrame) -> list[tuple[int, pl.DataFrame]]:
    """The texts of a file by how many passes are summed already."""
    if total.is_empty():
        return [(0, frame)]
    joined = frame.select("key").join(total.select("key", COUNT), on="key", how="left", maintain_order="left")
    counts = joined[COUNT].fill_null(0)
    return [(int(count), frame.filter(counts == count)) for count in counts.unique(maintain_order=True)]


def _grown(total: pl.DataFrame, found: pl.DataFrame) -> pl.DataFrame:
    """Add the sums of texts that are all in `total`, or none of them is."""
    both = total if total.is_empty() else total.join(found, on="key", how="semi")
    if both.is_empty():
        return pl.concat([frame for frame in (total, found) if not frame.is_empty()])
    after = both.select("key").join(found, on="key", how="left", maintain_order="left")
    added = {name: both[name] + after[name] for name in both.columns if name != "key"}
    return pl.concat([total.join(found, on="key", how="anti"), pl.DataFrame({"key": both["key"], **added})])
