"""What the cache holds about one bucket of texts: for each teacher its distribution, its logits and its confidence.

Read by key, never by position: a text's answers may lie in any file of the family whose bucket overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from amalgam.data.keys import overlaps
from amalgam.pipeline.errors import WorkError
from amalgam.pipeline.experiment import Targets
from amalgam.pipeline.stage import Run
from amalgam.pipeline.store import StoredFile
from amalgam.stages.build_targets.probabilities import each_pass, softmax, width
from amalgam.stages.build_targets.uncertainty import COUNT, confidence, mean_probability, sums_over_passes
from amalgam.stages.cache_teachers.stage import family_in, prefix_in


@dataclass(frozen=True)
class Evidence:
    """Of one teacher, a row per text of the bucket, in the bucket's order."""

    teacher: str
    logits: pl.Series
    distribution: pl.Series
    confidence: pl.Series


def gather(run: Run, teacher: str, family: str, prefix: str, keys: pl.Series) -> Evidence:
    targets = run.experiment.targets
    files = [
        file
        for file in run.result("cache-teachers").files
        if family_in(file.path) == family and overlaps(prefix_in(file.path), prefix)
    ]
    frames = [_read(run, file, keys) for file in files]
    logits = _aligned(_logits(frames), keys, teacher)["logits"]
    full = run.experiment.cache.passes if targets.passes is None else targets.passes
    certain = softmax(logits)
    if full == 0:
        sums = pl.DataFrame(sums_over_passes([logits], targets.uncertainty))
    else:
        found = [
            _summed(run, files, frames if some is None else [_of(frame, some) for frame in frames], take, targets)
            for take, some in _takes(run, prefix, full)
        ]
        sums = _aligned(pl.concat([frame for frame in found if not frame.is_empty()] or found[:1]), keys, teacher)
    distribution = mean_probability(sums) if targets.distribution == "mc-mean" else certain
    return Evidence(teacher, logits, distribution, confidence(sums, targets.uncertainty, full))


def _of(frame: pl.DataFrame, some: pl.DataFrame) -> pl.DataFrame:
    return frame.join(some, on="key", how="semi")


def _takes(run: Run, prefix: str, full: int) -> list[tuple[int, pl.DataFrame | None]]:
    """How many passes of which texts count: all of them the same, unless stage 1 was adaptive."""
    said = run.result("cache-teachers").facts.get("ladder")
    if said is None:
        return [(full, None)]
    file = next(file for file in run.result("cache-teachers").files if file.path == said[prefix])
    takes = pl.read_parquet(run.store.checked(file)).with_columns(pl.col("passes").clip(upper_bound=full))
    return [(int(take), rows.select("key")) for (take,), rows in takes.group_by("passes", maintain_order=True)]


def _read(run: Run, file: StoredFile, keys: pl.Series) -> pl.DataFrame:
    frame = pl.read_parquet(run.store.checked(file))
    return frame.filter(pl.col("key").is_in(keys.implode())).unique("key", maintain_order=True)


def _logits(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    with_logits = [frame.select("key", "logits") for frame in frames if "logits" in frame.columns]
    return pl.concat(with_logits).unique("key", keep="first", maintain_order=True) if with_logits else pl.DataFrame()


def _summed(
    run: Run, files: Sequence[StoredFile], frames: Sequence[pl.DataFrame], take: int, targets: Targets
) -> pl.DataFrame:
    """Sums over the first `take` passes of every text. Ranges follow each other: [0, 16), then [16, 24); where they
    overlap, as after a mended loss, each pass counts once.
    """
    total = pl.DataFrame()
    adaptive = run.experiment.cache.adaptive
    for (first, last), frame in sorted(zip(_ranges(run, files), frames, strict=True), key=lambda item: item[0]):
        if "passes" not in frame.columns or first >= take or frame.is_empty():
            continue
        classes = width(frame["mean_probability"])
        for count, rows in _by_count(frame, total):
            if first <= count < min(last, take):
                further = each_pass(rows["passes"], classes, min(last, take) - first)[count - first :]
                sums = sums_over_passes(further, targets.uncertainty, squares=adaptive)
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


def _ranges(run: Run, files: Sequence[StoredFile]) -> list[tuple[int, int]]:
    """The pass range of each file, as the manifest has it: a unit's own record may be lost."""
    ranges = run.result("cache-teachers").facts["ranges"]
    return [(int(first), int(last)) for first, last in (ranges[file.path] for file in files)]


def _aligned(frame: pl.DataFrame, keys: pl.Series, teacher: str) -> pl.DataFrame:
    if frame.is_empty():
        raise _incomplete(teacher, len(keys), len(keys))
    joined = pl.DataFrame({"key": keys}).join(frame, on="key", how="left", maintain_order="left")
    absent = joined[joined.columns[1]].null_count()
    if absent:
        raise _incomplete(teacher, absent, len(keys))
    return joined


def _incomplete(teacher: str, absent: int, total: int) -> WorkError:
    return WorkError(
        f"teacher {teacher}: the cache lacks {absent} of {total} texts",
        fix="`amalgam verify`, then run the same command again",
    )
