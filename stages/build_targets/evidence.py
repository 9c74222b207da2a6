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
    take = run.experiment.cache.passes if targets.passes is None else targets.passes
    certain = softmax(logits)
    if take == 0:
        sums = pl.DataFrame(sums_over_passes([logits], targets.uncertainty))
    else:
        sums = _aligned(_summed(run, files, frames, take, targets), keys, teacher)
    distribution = mean_probability(sums) if targets.distribution == "mc-mean" else certain
    return Evidence(teacher, logits, distribution, confidence(sums, targets.uncertainty))


def _read(run: Run, file: StoredFile, keys: pl.Series) -> pl.DataFrame:
    frame = pl.read_parquet(run.store.checked(file))
    return frame.filter(pl.col("key").is_in(keys.implode())).unique("key", maintain_order=True)


def _logits(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    with_logits = [frame.select("key", "logits") for frame in frames if "logits" in frame.columns]
    return pl.concat(with_logits).unique("key", keep="first", maintain_order=True) if with_logits else pl.DataFrame()


def _summed(
    run: Run, files: Sequence[StoredFile], frames: Sequence[pl.DataFrame], take: int, targets: Targets
) -> pl.DataFrame:
    """Sums over the first `take` passes of every text. Ranges follow each other: [0, 16), then [16, 24)."""
    ranges = _ranges(run, files)
    summed: list[pl.DataFrame] = []
    for (first, last), frame in sorted(zip(ranges, frames, strict=True), key=lambda item: item[0]):
        if "passes" not in frame.columns or first >= take or frame.is_empty():
            continue
        classes = width(frame["mean_probability"])
        sums = sums_over_passes(each_pass(frame["passes"], classes, min(last, take) - first), targets.uncertainty)
        found = pl.DataFrame({"key": frame["key"], **sums}).with_columns(first=pl.lit(first))
        summed = _joined(summed, found)
    return pl.concat(summed) if summed else pl.DataFrame()


def _joined(summed: list[pl.DataFrame], found: pl.DataFrame) -> list[pl.DataFrame]:
    """Add the sums of one file to those before it: a text either continues where it stood, or begins."""
    result, rest = [], found
    for before in summed:
        both = before.join(rest, on="key", how="semi")
        if both.is_empty():
            result.append(before)
            continue
        result.append(before.join(both, on="key", how="anti"))
        after = both.select("key").join(rest, on="key", how="left", maintain_order="left")
        continues = after["first"].cast(pl.Float64) == both[COUNT]
        added = {name: both[name] + after[name] for name in both.columns if name not in ("key", "first")}
        grown = pl.DataFrame({"key": both["key"], **added}).with_columns(first=after["first"])
        result += [both.filter(~continues), grown.filter(continues)]
        rest = rest.join(both, on="key", how="anti")
    return [frame for frame in [*result, rest.filter(pl.col("first") == 0)] if not frame.is_empty()]


def _ranges(run: Run, files: Sequence[StoredFile]) -> list[tuple[int, int]]:
    """The pass range of each file, from the record that stands beside it."""
    found = []
    for file in files:
        path = run.store.path(file)
        record = run.store.record(path.with_name(path.stem.rsplit("-", 1)[0] + ".json"))
        facts = record.facts if record else {"first": 0, "last": 0}
        found.append((int(facts["first"]), int(facts["last"])))
    return found


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
