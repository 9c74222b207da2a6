"""The teachers' audit: from the cache alone, in seconds, without labels; where there are some, they are used too.

Answers are read as build-targets reads them, a few buckets at a time. Nothing is stored: it is a look, not a stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from amalgam.data.labels import LabelSpace
from amalgam.data.parquet import key_array, matrix
from amalgam.pipeline.config.schema import COMPARATIVE
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.plan import StageState
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.answers.families import families_of
from amalgam.stages.common.corpus import Bucket, neighbouring_buckets, read_bucket, train_part
from amalgam.stages.common.load import label_space, teachers_of
from amalgam.stages.common.models.resolve import same_models
from amalgam.stages.report.teacher_audit.counts import CONFIDENT, AuditCounts, Block, WeightRule
from amalgam.stages.target_methods import target_method, weighs_by_domain
from amalgam.stages.weigh_teachers.read import weights_of

if TYPE_CHECKING:
    import pyarrow as pa


BLOCK_TEXTS = 4096

ALIKE, NEAR = 0.98, 0.05
"""Duplicates: teachers of the same labels that say the same on so many texts, at so small a mean distance."""

SURE = 2.0
"""Standard errors from which a gain is believed."""


def audit(run: Run, states: list[StageState]) -> dict[str, Any]:
    """`states`: what planning found of this experiment's stages."""
    _check_cached(run, states)
    return looked_over(run, train_part(run).buckets)


def looked_over(run: Run, some: Sequence[Bucket], also: Callable[[Block], None] | None = None) -> dict[str, Any]:
    """The audit of some of the training texts; `also` sees each block of them too, so that none is read twice."""
    space, targets = label_space(run), run.experiment.targets
    tally = AuditCounts(space, WeightRule(targets.temperature, target_method(targets).winner_takes_all))
    weighed = "weigh-teachers" in run.results
    for buckets in neighbouring_buckets(some):
        for block in _blocks(run, buckets, space, weighed=weighed):
            tally.add(block)
            if also:
                also(block)
    return {
        "texts": tally.texts,
        "labelled": tally.labelled,
        "weights": targets.teacher_weights if weighed else "muka",
        "uncertainty": "entropy" if targets.uncertainty in COMPARATIVE and not _measured(run) else targets.uncertainty,
        "accuracy": _share(tally.right, tally.labelled),
        "teachers": list(_teachers(tally, space, weighed=weighed)),
        "conflicts": _conflicts(tally, space),
        "shared_labels": list(_shared(tally, space)),
        "labels": list(_labels(tally, space)),
        "gold": list(_gold(tally, space)),
        "duplicates": list(_duplicates(run, tally, space)),
    }


def _check_cached(run: Run, states: list[StageState]) -> None:
    state = next((state for state in states if state.stage == "cache-teachers"), None)
    if state is None:
        raise ExperimentError("this experiment has no teachers to audit", where="teachers", fix="name at least one")
    if state.state != "current":
        raise ExperimentError(
            f"the teachers' answers are not in the cache ({state.why})",
            where=run.store.where(run.store.root / "cache-teachers"),
            fix="run `amalgam cache-teachers`, then audit again",
        )


def _blocks(run: Run, buckets: tuple[Bucket, ...], space: LabelSpace, *, weighed: bool) -> Iterator[Block]:
    """What the cache holds of these buckets, BLOCK_TEXTS at a time."""
    import polars as pl
    import pyarrow as pa

    from amalgam.stages.build_targets.domain import comparative_confidence
    from amalgam.stages.common.answers.evidence import gather

    rows = pa.concat_tables(read_bucket(run, bucket, ["key", "label"]) for bucket in buckets)
    keys = pl.Series("key", rows.column("key"), pl.Binary)
    families, prefixes = families_of(run), [bucket.prefix for bucket in buckets]
    evidence = [gather(run, name, families[name], prefixes, keys) for name in space.columns]
    if _measured(run):
        evidence = comparative_confidence(run, evidence, prefixes, key_array(rows.column("key")))
    distributions = [one.distribution.to_numpy() for one in evidence]
    confidence = np.stack([one.confidence.to_numpy() for one in evidence], axis=1)
    place = {name: index for index, name in enumerate(space.names)}
    gold = np.array([place.get(label, -1) for label in rows.column("label").to_pylist()], np.int64)
    weights = _weights(run, buckets, rows) if weighed else None
    for start in range(0, len(gold), BLOCK_TEXTS):
        some = slice(start, start + BLOCK_TEXTS)
        given = None if weights is None else weights[some]
        yield Block([one[some] for one in distributions], confidence[some], given, gold[some])


def _measured(run: Run) -> bool:
    """Whether it is known how foreign the texts are to each teacher, and that is what weighs it."""
    return weighs_by_domain(run.experiment.targets) and {"fit-statistics", "cache-features"} <= run.results.keys()


def _weights(run: Run, buckets: tuple[Bucket, ...], rows: pa.Table) -> Any:

    before = sum(bucket.rows for bucket in train_part(run).buckets if bucket.prefix < buckets[0].prefix)
    return matrix(weights_of(run).slice(before, rows.num_rows).column("weight")).astype(np.float64)


# ---- from sums to shares


def _teachers(tally: AuditCounts, space: LabelSpace, *, weighed: bool) -> Iterator[dict[str, Any]]:
    for place, (name, own) in enumerate(space.columns.items()):
        yield {
            "teacher": name,
            "labels": len(own),
            "mean_confidence": _share(tally.confidence[place], tally.texts),
            "wins": _share(tally.wins[place], tally.texts),
            "wins_by_weights": _share(tally.heaviest[place], tally.texts) if weighed else None,
            "left_out": _left_out(tally, place) if len(space.columns) > 1 else None,
        }


def _left_out(tally: AuditCounts, place: int) -> dict[str, Any]:
    """What the amalgamation is without the teacher. `harmful`: None where nothing could tell."""
    by_labels = {
        "accuracy": _share(tally.right + tally.gained[place] - tally.lost[place], tally.labelled),
        "gain": _share(tally.gained[place] - tally.lost[place], tally.labelled),
        "gain_error": _share(math.sqrt(tally.gained[place] + tally.lost[place]), tally.labelled),
    }
    agreement = {
        "texts": int(tally.judged[place]),
        "with": _share(tally.agreed_with[place], tally.judged[place]),
        "without": _share(tally.agreed_without[place], tally.judged[place]),
    }
    harmful = None
    if tally.labelled:
        harmful = _sure(tally.gained[place], tally.lost[place])
    elif tally.judged[place]:
        harmful = _sure(tally.only_without[place], tally.only_with[place])
    changed = _share(tally.changed[place], tally.texts)
    return {"changed": changed, **by_labels, "held_out_agreement": agreement, "harmful": harmful}


def _sure(more: int, less: int) -> bool:
    """Whether texts that became right outnumber those that became wrong by more than chance (McNemar)."""
    return bool(more - less > SURE * math.sqrt(more + less))


def _conflicts(tally: AuditCounts, space: LabelSpace) -> dict[str, Any]:
    shares = (tally.conflicts / max(tally.texts, 1)).tolist()
    return {"teachers": list(space.columns), "confident_from": CONFIDENT, "shares": shares}


def _shared(tally: AuditCounts, space: LabelSpace) -> Iterator[dict[str, Any]]:
    names = list(space.columns)
    for pair, labels in tally.shared.items():
        if labels:
            yield {
                "teachers": [names[place] for place in pair],
                "labels": [space.names[place] for place in sorted(labels)],
                "texts": tally.met[pair],
                "disagree": _share(tally.differed[pair], tally.met[pair]),
            }


def _labels(tally: AuditCounts, space: LabelSpace) -> Iterator[dict[str, Any]]:
    """How often a teacher says a label, and how often it then wins the text."""
    for teacher, (name, own) in enumerate(space.columns.items()):
        for place, label in enumerate(own):
            said = int(tally.said[teacher][place])
            won = _share(tally.said_and_won[teacher][place], said)
            yield {"teacher": name, "label": space.names[label], "says": said, "wins": won}


def _gold(tally: AuditCounts, space: LabelSpace) -> Iterator[dict[str, Any]]:
    for place, texts in enumerate(tally.gold_texts.tolist()):
        if texts:
            won = {name: _share(tally.gold_won[place, i], texts) for i, name in enumerate(space.columns)}
            right = _share(tally.gold_right[place], texts)
            yield {"label": space.names[place], "texts": texts, "won": won, "right": right}


def _duplicates(run: Run, tally: AuditCounts, space: LabelSpace) -> Iterator[dict[str, Any]]:
    names = list(space.columns)
    twins = same_models({teacher.name: teacher.files for teacher in teachers_of(run)})
    for one, other in combinations(range(len(names)), 2):
        pair = one, other
        same = any({names[one], names[other]} <= set(group) for group in twins)
        alike = len(tally.shared[pair]) == len(tally.columns[one]) == len(tally.columns[other])
        agreement = _share(tally.met[pair] - tally.differed[pair], tally.texts) if alike else None
        distance = _share(tally.distance[pair], tally.texts) if alike else None
        nearly = agreement is not None and distance is not None and agreement >= ALIKE and distance <= NEAR
        if same or nearly:
            names_of = [names[one], names[other]]
            yield {"teachers": names_of, "agreement": agreement, "distance": distance, "same_model": same}


def _share(part: Any, whole: Any) -> float | None:
    return float(part) / float(whole) if whole else None
