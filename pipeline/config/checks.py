"""Checks that the fields of an experiment do not contradict each other. One field alone is checked by the schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from amalgam.pipeline.config.schema import COMPARATIVE, TEACHER, ExperimentConfig


class Problem(NamedTuple):
    field: str
    """Dotted path of the field, such as `corpus.label`."""
    message: str


Checks = Iterator[tuple[bool, str, str]]
"""Whether the fields contradict each other, the field to change, and the message."""


def check_consistency(experiment: ExperimentConfig) -> list[Problem]:
    groups = (_teacher_checks, _corpus_checks, _student_checks, _target_checks, _objective_checks, _generate_checks)
    checks = [check for group in groups for check in group(experiment)]
    return [Problem(field, message) for wrong, field, message in checks if wrong]


def _teacher_checks(experiment: ExperimentConfig) -> Checks:
    names, section = experiment.teacher_names, experiment.train_teachers
    for name in sorted(set(names)):
        yield names.count(name) > 1, "teachers", f"the name {name!r} is given twice"
    needs_teacher = section is None and experiment.targets.mode != "supervised"
    yield needs_teacher and not names, "teachers", "name at least one, or a train_teachers section that makes them"
    if section is not None:
        for field in ("encoder", "groups", "revision"):
            absent = getattr(section, field) is None
            message = "is not for teachers that are trained together"
            yield bool(section.co_train) and not absent, f"train_teachers.{field}", message
            yield not section.co_train and absent and field != "revision", f"train_teachers.{field}", "is required"
        message = "needs train_teachers.texts; corpus.limit cuts the training part"
        yield section.limit is not None and section.texts is None, "train_teachers.limit", message
    for teacher in experiment.teachers:
        pinned = re.fullmatch(r"[0-9a-f]{40}", teacher.revision or "") is not None
        message = f"{teacher.name}: trust_remote_code needs revision to be a full commit hash"
        yield teacher.trust_remote_code and not pinned, "teachers", message


def _student_checks(experiment: ExperimentConfig) -> Checks:
    student, names = experiment.student, experiment.teacher_names
    unmeasured = not student.learns and experiment.corpus.test is None
    message = f"{student.method} trains nothing and is only measured, which needs corpus.test"
    yield unmeasured, "student.method", message
    for field, model in (("encoder", student.encoder), ("method", student.method or "")):
        unknown = model.startswith(TEACHER) and model.removeprefix(TEACHER) not in names
        yield unknown, f"student.{field}", f"no teacher has this name (known: {', '.join(names)})"
    unselected = student.select == "validation" and experiment.corpus.validation is None
    yield unselected, "student.select", "validation needs corpus.validation"


def _corpus_checks(experiment: ExperimentConfig) -> Checks:
    corpus, targets = experiment.corpus, experiment.targets
    readers = {
        "train_teachers": experiment.train_teachers is not None,
        "corpus.validation": corpus.validation is not None,
        "corpus.test": corpus.test is not None,
        f"targets.mode: {targets.mode}": targets.reads_gold,
    }
    for reader, reads in readers.items():
        yield reads and corpus.label is None, "corpus.label", f"{reader} needs the name of the label column"


def _target_checks(experiment: ExperimentConfig) -> Checks:
    """The COMPARATIVE measures weigh teachers against each other; the others measure one teacher's confidence."""
    targets, passes, measure = experiment.targets, experiment.cache.passes, experiment.targets.uncertainty
    too_many = targets.passes is not None and targets.passes > passes
    yield too_many, "targets.passes", f"{targets.passes} is more than cache.passes, {passes}"
    message = f"{measure} does not measure how far a text is from a teacher's domain, which stratanet needs"
    no_distance = targets.mode == "stratanet" and measure not in COMPARATIVE
    yield no_distance, "targets.uncertainty", f"{message}: {', '.join(COMPARATIVE)}"
    message = f"{measure} is a weight of its own, for targets.teacher_weights=muka: not with {targets.teacher_weights}"
    yield measure in COMPARATIVE and targets.weighs_together, "targets.uncertainty", message


def _objective_checks(experiment: ExperimentConfig) -> Checks:
    objective, name, mode = experiment.objective, experiment.objective.name, experiment.targets.mode
    by_token, as_dfd = objective.states == "tokens", name == "as-dfd"
    no_teacher = not experiment.teachers and experiment.train_teachers is None
    message = f"{name} reads teachers' states, and has no teacher"
    yield bool(objective.read_states) and no_teacher, "objective.name", message
    message = (
        "the student's layers read tokens, so layer-wise learning needs tokens, "
        "or objective.schedule=joint where teachers tokenise otherwise"
    )
    yield name == "layerwise" and objective.read_states == "pooled", "objective.states", message
    yield as_dfd and not experiment.teacher_names, "objective.name", f"{name} needs teachers"
    message = "as-dfd runs each teacher on its own embeddings alone: vanilla-kd"
    yield as_dfd and mode != "vanilla-kd", "targets.mode", message
    message = "cfl compares texts, each by the mean of its tokens: pooled"
    yield name == "cfl" and by_token, "objective.states", message
    message = "cfl compares the texts of a step with each other: 1"
    yield name == "cfl" and experiment.student.accumulate > 1, "student.accumulate", message
    message = "stratanet measures a text's distance from a domain by the mean of its tokens: pooled"
    yield name == "stratanet" and by_token, "objective.states", message
    message = "layer-wise learning needs a block for each layer of the student: null"
    yield name == "layerwise" and objective.blocks is not None, "objective.blocks", message


def _generate_checks(experiment: ExperimentConfig) -> Checks:
    section, corpus = experiment.generate, experiment.corpus
    if section is None:
        no_texts = not corpus.train and experiment.reads_texts
        yield no_texts, "corpus.train", "is required, or a generate section that makes texts"
        return
    trains, supervised = experiment.train_teachers is not None, experiment.targets.mode == "supervised"
    crosses, no_model = section.source == "cross-domain", section.writes and section.language_model is None
    yield bool(corpus.train), "corpus.train", "leave it out, or the generate section"
    yield len(corpus.text) > 1, "corpus.text", "generated texts are single, so name one column"
    yield not experiment.teachers, "teachers", "name at least one that is finished, for generate to write texts for"
    yield trains, "train_teachers", "make teachers in an experiment of their own, and name their folders as teachers"
    yield supervised, "targets.mode", "supervised needs gold labels, and generated texts have none"
    yield no_model, "generate.language_model", f"{section.source} needs one"
    yield crosses and section.corpus is None, "generate.corpus", "cross-domain needs texts"
    yield not crosses and section.corpus is not None, "generate.corpus", "only cross-domain reads texts"
