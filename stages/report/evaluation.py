"""Every system on the labelled test part, over the union of labels: teachers, ensemble, zero-shot, the student."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from amalgam.data.labels import LabelSpace
from amalgam.data.shards import matrix
from amalgam.pipeline.stage import Run
from amalgam.stages.cache_teachers.stage import families_of, family_in
from amalgam.stages.cache_teachers.statistics import softmax
from amalgam.stages.methods import method_name
from amalgam.stages.metrics import evaluate
from amalgam.stages.models.classifier import Classifier
from amalgam.stages.read_corpus.parts import Part, fields, tables
from amalgam.stages.report.zero_shot import similarities
from amalgam.stages.teachers import label_space

Array = np.ndarray[Any, np.dtype[Any]]

NO_PROBABILITY = {"nll_nats": None, "nll_infinite": 0, "ece": None}
"""A similarity has an order and no scale."""


@dataclass(frozen=True)
class Answered:
    """What every system says of the labelled test texts; rows by key, columns by the union."""

    space: LabelSpace
    keys: list[bytes]
    gold: Array
    own: dict[str, Array]
    """Each teacher's logits, over its own labels."""
    systems: dict[str, Array]
    """Probabilities by the name of a system, in the order of the table."""
    judged: str
    """The system that the report is about."""


def answered(run: Run, test: Part) -> Answered:
    space = label_space(run)
    keys, gold = _gold(run, test, space)
    systems: dict[str, Array] = {}
    logits: dict[str, Array] = {}
    if space.columns:
        logits = {teacher: _cached_logits(run, family, keys) for teacher, family in families_of(run).items()}
        systems |= {f"teacher:{name}": _padded(softmax(logits[name]), space, name) for name in logits}
        systems["ensemble"] = _ensemble(logits, space)
    systems["zero-shot"] = softmax(similarities(run, keys))
    judged = method_name(run.experiment)
    if run.experiment.student.learns:
        judged = f"student ({judged})"
        systems[judged] = _student(run, test, space, keys)
    return Answered(space, keys, gold, logits, systems, judged)


def evaluation_of(run: Run, test: Part, found: Answered) -> dict[str, Any]:
    space, learns = found.space, run.experiment.student.learns
    groups = {teacher: list(columns) for teacher, columns in space.columns.items()}
    bins = run.experiment.report.calibration_bins
    return {
        "n": len(found.gold),
        "left_out": test.texts - len(found.gold),
        "labels": list(space.names),
        "groups": {teacher: [space.names[place] for place in places] for teacher, places in groups.items()},
        "systems": {
            name: evaluate(probabilities, found.gold, list(space.names), groups, bins)
            | (NO_PROBABILITY if name == "zero-shot" else {})
            for name, probabilities in found.systems.items()
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


def _gold(run: Run, test: Part, space: LabelSpace) -> tuple[list[bytes], Array]:
    """Texts whose label no teacher knows were refused, or skipped by the experiment's wish, before."""
    place = {name: index for index, name in enumerate(space.names)}
    rows = [
        (key, place[label])
        for table in tables(run, test)
        for key, label in zip(table.column("key").to_pylist(), table.column("label").to_pylist(), strict=True)
        if label in place
    ]
    return [key for key, _ in rows], np.array([label for _, label in rows], dtype=np.int64)


def _cached_logits(run: Run, family: str, keys: list[bytes]) -> Array:
    import pyarrow.parquet as pq

    found: dict[bytes, Array] = {}
    wanted = set(keys)
    for file in run.result("cache-teachers").files:
        if family_in(file.path) == family:
            path = run.store.checked(file)
            if "logits" not in pq.read_schema(path).names:
                continue
            table = pq.read_table(path, columns=["key", "logits"])
            rows = zip(table.column("key").to_pylist(), matrix(table.column("logits")), strict=True)
            found |= {key: row for key, row in rows if key in wanted}
    return np.stack([found[key] for key in keys]).astype(np.float64)


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


def _student(run: Run, test: Part, space: LabelSpace, keys: list[bytes]) -> Array:
    from amalgam.stages.train_student.stage import student_folder

    student = Classifier.of_run(run, student_folder(run), space.names, where="the student")
    wanted = set(keys)
    texts = [
        text
        for table in tables(run, test)
        for key, text in zip(table.column("key").to_pylist(), fields(table), strict=True)
        if key in wanted
    ]
    return softmax(student.logits(texts))
