"""The sample: a few texts run K passes where the others run none, to audit the choice without passes.

Keys are random and order the texts, so the first texts are a random sample, and few files contain it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from amalgam.data.lazy import np
from amalgam.stages.cache_teachers.adaptive import CachedPasses, RegressionFacts, StopFacts, is_better
from amalgam.stages.common.cached.uncertainty import summarise_passes
from amalgam.stages.common.corpus import Bucket
from amalgam.stages.common.intervals import bounds, interval, percent


class PassAudit(TypedDict):
    """Counts on sampled texts, which run passes that the others do not."""

    texts: int
    sampled: int
    passes: int
    """With dropout, of each sampled text."""
    runs: float
    """Forward passes of a text in the mean, with and without dropout."""
    same: int
    """Sampled texts with the same most confident teacher by fewer passes, or none, and by all of them."""
    halves_same: int
    """Sampled texts with the same most confident teacher in the first and in the second half of the passes."""
    stopped: NotRequired[int]
    """Texts with fewer than all passes, where each text stops by itself; elsewhere others than the sample run none."""


def sampled_rows(buckets: Sequence[Bucket], size: int) -> Iterator[tuple[Bucket, int]]:
    """Yields each bucket with the number of its first texts that are in the sample of `size` texts."""
    for bucket in buckets:
        rows = min(size, bucket.rows)
        yield bucket, rows
        size -= rows


def wanted_passes(rows: int, sampled: int, passes: int) -> Any:
    """Returns the number of passes of all texts of a bucket, or of each where only its first ones are sampled."""
    return passes * (sampled > 0) if sampled in {0, rows} else np.where(np.arange(rows) < sampled, passes, 0)


def audit_passes(
    cached: CachedPasses, families: Sequence[str], sample: Mapping[str, Any], texts: int, passes: int
) -> PassAudit | None:
    """Compares the most confident teacher of sampled texts with and without passes; `sample` is keys by bucket.

    None: no teacher has active dropout, so all passes are the same.
    """
    sampled = same = halves_same = 0
    is_active = False
    parts = slice(None), slice(passes // 2), slice(passes // 2, 2 * (passes // 2))
    for prefix, keys in sample.items():
        off = _most_confident([cached.logits(family, prefix, keys)[:, None] for family in families])
        raw = [cached.read(family, prefix, keys, range(passes)) for family in families]
        is_active = is_active or any(np.ptp(logits, axis=1).any() for logits in raw)
        whole, first, second = (_most_confident([logits[:, part] for logits in raw]) for part in parts)
        sampled += len(keys)
        same += int((off == whole).sum())
        halves_same += int((first == second).sum())
    if not is_active:
        return None
    return {
        "texts": texts,
        "sampled": sampled,
        "passes": passes,
        "runs": 1 + passes * sampled / texts,
        "same": same,
        "halves_same": halves_same,
    }


def _most_confident(logits: Sequence[Any]) -> Any:
    """Returns the teacher of each text that is the most confident by its logits [texts, passes, labels]."""
    return np.stack([summarise_passes(teacher_logits).confidence for teacher_logits in logits]).argmax(0)


def adaptive_audit(regressions: RegressionFacts, decisions: Sequence[StopFacts], passes: int) -> PassAudit:
    texts = sum(facts["rows"] for facts in decisions)
    return {
        "texts": texts,
        "sampled": regressions["sampled"],
        "passes": passes,
        "runs": 1 + sum(facts["passes"] for facts in decisions) / texts,
        "same": regressions["same"],
        "halves_same": regressions["halves_same"],
        "stopped": sum(facts["settled"] for facts in decisions),
    }


def pass_audit_lines(audit: PassAudit) -> Iterator[str]:
    """Formats the audit for the console and the page."""
    sampled, passes, texts = audit["sampled"], audit["passes"], f"{audit['texts']:,} texts"
    same = f"{percent(audit['same'] / sampled)} of"
    within = f"(95 % interval {bounds(*interval(audit['same'] / sampled, sampled))})"
    halves = f"; {passes // 2} passes and {passes // 2} others agree for {percent(audit['halves_same'] / sampled)}"
    if "stopped" not in audit:
        mean = f"{audit['runs']:.2f} passes a text in all"
        yield f"a sample shows the effect of dropout: {passes} passes with it for {sampled:,} of {texts}, {mean}"
        yield f"one pass and {passes} passes have the same most confident teacher for {same} them {within}{halves}"
        return
    if is_better(audit):
        instead = f"{audit['runs']:.2f} passes a text instead of {1 + passes}"
        yield f"{instead}: one without dropout, at most {passes} with it; {audit['stopped']:,} of {texts} stopped early"
    else:
        yield f"all {texts} run {passes} passes: fewer change the most confident teacher more often than another seed"
    what = f"fewer passes and {passes} passes have the same most confident teacher"
    yield f"{what} for {same} {sampled:,} sampled texts {within}{halves}"
