"""Every system on the labelled test part, over the union of labels: teachers, ensemble, zero-shot, the student.

The part is gone through a few buckets at a time. Of each text three numbers a system are kept, so that memory does not
grow with texts times labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from amalgam.data.arrays import softmax
from amalgam.data.labels import LabelSpace
from amalgam.data.parquet import key_array, matrix, read_keys, read_table
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.answers.families import families_of
from amalgam.stages.common.answers.read import shelves_of
from amalgam.stages.common.corpus import Bucket, Part, fields, neighbouring_buckets, read_bucket
from amalgam.stages.common.inference.classifier import Classifier
from amalgam.stages.common.load import label_space
from amalgam.stages.common.metrics import Predictions, evaluate
from amalgam.stages.methods import method_name
from amalgam.stages.report.zero_shot import AT_ONCE, similarities
from amalgam.stages.train_student.stage import student_folder

Array = np.ndarray[Any, np.dtype[Any]]
NO_PROBABILITY = {"nll_nats": None, "nll_infinite": 0, "ece": None}
"""A similarity has an order and no scale."""


@dataclass(frozen=True)
class BatchAnswers:
    """What every system says of labelled test texts, in the order of their keys."""

    keys: Array
    gold: Array
    """By position in the union, as all labels here."""
    own: dict[str, Array]
    """What each teacher says, among its own labels."""
    systems: dict[str, Predictions]
    """By the name of a system, in the order of the table."""


@dataclass(frozen=True)
class TestAnswers(BatchAnswers):
    """Of the whole part."""

    space: LabelSpace
    judged: str
    """The system that the report is about."""


def answered(run: Run, test: Part) -> TestAnswers:
    space, student = label_space(run), None
    judged = method_name(run.experiment)
    if run.experiment.student.learns:
        judged = f"student ({judged})"
        student = Classifier.of_run(run, student_folder(run), space.names, where="the student")
    parts, before = [], 0
    for buckets in neighbouring_buckets(test.buckets, AT_ONCE):
        rows = sum(bucket.rows for bucket in buckets)
        similar = similarities(run, before, rows)
        parts.append(_asked(run, buckets, space, similar, (judged, student)))
        before += rows
    return TestAnswers(
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.gold for part in parts]),
        {name: np.concatenate([part.own[name] for part in parts]) for name in parts[0].own},
        {name: Predictions.joined([part.systems[name] for part in parts]) for name in parts[0].systems},
        space,
        judged,
    )


def _asked(
    run: Run, buckets: Sequence[Bucket], space: LabelSpace, similar: Array, student: tuple[str, Classifier | None]
) -> BatchAnswers:
    """Texts whose label no teacher knows were refused, or skipped by the experiment's wish, before."""
    table = pa.concat_tables(read_bucket(run, bucket) for bucket in buckets)
    place = {name: index for index, name in enumerate(space.names)}
    gold = np.array([place.get(label, -1) for label in table.column("label").to_pylist()], dtype=np.int64)
    kept = gold >= 0
    keys, gold = key_array(table.column("key"))[kept], gold[kept]
    own: dict[str, Array] = {}
    systems: dict[str, Predictions] = {}
    if space.columns:
        prefixes = [bucket.prefix for bucket in buckets]
        logits = {name: _cached_logits(run, family, prefixes, keys) for name, family in families_of(run).items()}
        for name, columns in space.columns.items():
            own[name] = np.array(columns)[logits[name].argmax(axis=1)]
            systems[f"teacher:{name}"] = Predictions.of(_padded(softmax(logits[name]), space, name), gold)
        systems["ensemble"] = Predictions.of(_ensemble(logits, space), gold)
    systems["zero-shot"] = Predictions.of(softmax(similar[kept]), gold)
    name, classifier = student
    if classifier is not None:
        systems[name] = Predictions.of(softmax(classifier.logits(_texts(table, kept))), gold)
    return BatchAnswers(keys, gold, own, systems)


def _texts(table: pa.Table, kept: Array) -> list[tuple[str, ...]]:
    return [text for text, wanted in zip(fields(table), kept.tolist(), strict=True) if wanted]


def evaluation_of(run: Run, test: Part, found: TestAnswers) -> dict[str, Any]:
    space, learns = found.space, run.experiment.student.learns
    groups = {teacher: list(columns) for teacher, columns in space.columns.items()}
    bins = run.experiment.report.calibration_bins
    return {
        "n": len(found.gold),
        "left_out": test.texts - len(found.gold),
        "labels": list(space.names),
        "groups": {teacher: [space.names[place] for place in places] for teacher, places in groups.items()},
        "systems": {
            name: evaluate(said, found.gold, list(space.names), groups, bins)
            | (NO_PROBABILITY if name == "zero-shot" else {})
            for name, said in found.systems.items()
        },
        "judged": found.judged,
        "selected_by": run.result("train-student").facts["selected_by"] if learns else "nothing was trained",
        **_adaptive(run),
    }


def _adaptive(run: Run) -> dict[str, Any]:
    """What stage 1's audit found, where texts could stop early."""
    asked = run.experiment.cache.adaptive and "cache-teachers" in run.results
    found = run.result("cache-teachers").facts.get("adaptive") if asked else None
    return {"adaptive": found} if found else {}


def _cached_logits(run: Run, family: str, prefixes: Sequence[str], keys: Array) -> Array:
    """Of files that may be about other texts too, keys are read first: mostly they are about nothing else."""
    found: Array | None = None
    there = np.zeros(len(keys), dtype=bool)
    for file in shelves_of(run)[family].about(prefixes):
        path = run.store.verified_path(file)
        if "logits" not in pq.read_schema(path).names:
            continue
        held = read_keys(path)
        place = np.searchsorted(keys, held)
        wanted = np.flatnonzero((place < len(keys)) & (keys[np.minimum(place, len(keys) - 1)] == held))
        if len(wanted):
            logits = matrix(read_table(path, ["logits"]).column("logits"))
            found = np.empty((len(keys), logits.shape[1])) if found is None else found
            found[place[wanted]], there[place[wanted]] = logits[wanted], True
    if found is None or not there.all():
        raise AssertionError("stage 1 has answered every test text")
    return found


def _padded(probabilities: Array, space: LabelSpace, teacher: str) -> Array:
    """Zeros where the teacher knows no label: its likelihood of those texts is 0, and their NLL infinite."""
    union = np.zeros((len(probabilities), len(space.names)))
    union[:, list(space.columns[teacher])] = probabilities
    return union


def _ensemble(logits: dict[str, Array], space: LabelSpace) -> Array:
    """One softmax over all teachers' logits side by side; entries of a shared label are summed after it."""
    share = softmax(np.concatenate(list(logits.values()), axis=1))
    union = np.zeros((len(share), len(space.names)))
    places = [place for teacher in logits for place in space.columns[teacher]]
    for column, place in enumerate(places):
        union[:, place] += share[:, column]
    return union
