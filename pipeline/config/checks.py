"""Checks that the fields of an experiment do not contradict each other. One field alone is checked by the schema."""

from __future__ import annotations

import re
from typing import NamedTuple

from amalgam.pipeline.config.schema import COMPARATIVE, TEACHER, ExperimentConfig, Targets


class Problem(NamedTuple):
    field: str
    """Dotted path of the field, such as `corpus.label`."""
    message: str


def check_consistency(experiment: ExperimentConfig) -> list[Problem]:
    return [
        *_teacher_problems(experiment),
        *_method_problems(experiment),
        *_corpus_problems(experiment),
        *_objective_problems(experiment),
        *_generate_problems(experiment),
    ]


def _method_problems(experiment: ExperimentConfig) -> list[Problem]:
    method, encoder, names = str(experiment.student.method), experiment.student.encoder, experiment.teacher_names
    unknown = f"no teacher has this name (known: {', '.join(names)})"
    problems = []
    if encoder.startswith(TEACHER) and encoder.removeprefix(TEACHER) not in names:
        problems.append(Problem("student.encoder", unknown))
    if experiment.student.learns:
        return problems
    if experiment.corpus.test is None:
        message = f"{method} trains nothing and is only measured, which needs corpus.test"
        problems.append(Problem("student.method", message))
    if method.startswith(TEACHER) and method.removeprefix(TEACHER) not in names:
        problems.append(Problem("student.method", unknown))
    return problems


def _teacher_problems(experiment: ExperimentConfig) -> list[Problem]:
    names = experiment.teacher_names
    twice = sorted({name for name in names if names.count(name) > 1})
    problems = [Problem("teachers", f"the name {name!r} is given twice") for name in twice]
    if not names and experiment.train_teachers is None and experiment.targets.mode != "supervised":
        problems.append(Problem("teachers", "name at least one, or a train_teachers section that makes them"))
    problems += _training_problems(experiment)
    problems += [
        Problem("teachers", f"{teacher.name}: trust_remote_code needs revision to be a full commit hash")
        for teacher in experiment.teachers
        if teacher.trust_remote_code and not re.fullmatch(r"[0-9a-f]{40}", teacher.revision or "")
    ]
    return problems


def _training_problems(experiment: ExperimentConfig) -> list[Problem]:
    section = experiment.train_teachers
    if section is None:
        return []
    given = [name for name in ("encoder", "groups", "revision") if getattr(section, name) is not None]
    if section.co_train:
        message = "is not for teachers that are trained together"
        return [Problem(f"train_teachers.{name}", message) for name in given]
    return [Problem(f"train_teachers.{name}", "is required") for name in ("encoder", "groups") if name not in given]


def _generate_problems(experiment: ExperimentConfig) -> list[Problem]:
    section, corpus, mode = experiment.generate, experiment.corpus, experiment.targets.mode
    if section is None:
        if corpus.train or not experiment.reads_texts:
            return []
        return [Problem("corpus.train", "is required, or a generate section that makes texts")]
    trains = experiment.train_teachers is not None
    crosses = section.source == "cross-domain"
    checks = [
        (bool(corpus.train), "corpus.train", "leave it out, or the generate section"),
        (len(corpus.text) > 1, "corpus.text", "generated texts are single, so name one column"),
        (not experiment.teachers, "teachers", "name at least one that is finished, for generate to write texts for"),
        (trains, "train_teachers", "make teachers in an experiment of their own, and name their folders as teachers"),
        (mode == "supervised", "targets.mode", "supervised needs gold labels, and generated texts have none"),
        (section.writes and section.language_model is None, "generate.language_model", f"{section.source} needs one"),
        (crosses and section.corpus is None, "generate.corpus", "cross-domain needs texts"),
        (not crosses and section.corpus is not None, "generate.corpus", "only cross-domain reads texts"),
    ]
    return [Problem(field, message) for wrong, field, message in checks if wrong]


def _corpus_problems(experiment: ExperimentConfig) -> list[Problem]:
    needs_label = {
        "train_teachers": experiment.train_teachers is not None,
        "corpus.validation": experiment.corpus.validation is not None,
        "corpus.test": experiment.corpus.test is not None,
        f"targets.mode: {experiment.targets.mode}": experiment.targets.reads_gold,
    }
    problems = [
        Problem("corpus.label", f"{reader} needs the name of the label column")
        for reader, needed in needs_label.items()
        if needed and experiment.corpus.label is None
    ]
    if experiment.train_teachers and experiment.train_teachers.limit and experiment.train_teachers.texts is None:
        message = "needs train_teachers.texts; corpus.limit cuts the training part"
        problems.append(Problem("train_teachers.limit", message))
    if experiment.student.select == "validation" and experiment.corpus.validation is None:
        problems.append(Problem("student.select", "validation needs corpus.validation"))
    if experiment.targets.passes is not None and experiment.targets.passes > experiment.cache.passes:
        message = f"{experiment.targets.passes} is more than cache.passes, {experiment.cache.passes}"
        problems.append(Problem("targets.passes", message))
    return [*problems, *_uncertainty_problems(experiment.targets)]


def _uncertainty_problems(targets: Targets) -> list[Problem]:
    """The COMPARATIVE measures weigh teachers against each other; the others measure one teacher's confidence."""
    compares, name = targets.uncertainty in COMPARATIVE, targets.uncertainty
    if targets.mode == "stratanet" and not compares:
        message = f"{name} does not measure how far a text is from a teacher's domain, which stratanet needs"
        return [Problem("targets.uncertainty", f"{message}: {', '.join(COMPARATIVE)}")]
    if compares and targets.weighs_together:
        message = f"{name} is a weight of its own, for targets.teacher_weights=muka: not with {targets.teacher_weights}"
        return [Problem("targets.uncertainty", message)]
    return []


def _objective_problems(experiment: ExperimentConfig) -> list[Problem]:
    objective, by_token = experiment.objective, experiment.objective.states == "tokens"
    name = objective.name
    no_teacher = not experiment.teachers and experiment.train_teachers is None
    layerwise = (
        "the student's layers read tokens, so layer-wise learning needs tokens, "
        "or objective.schedule=joint where teachers tokenise otherwise"
    )
    checks = [
        (
            bool(objective.read_states) and no_teacher,
            "objective.name",
            f"{name} reads teachers' states, and has no teacher",
        ),
        (name == "layerwise" and objective.read_states == "pooled", "objective.states", layerwise),
        (name == "as-dfd" and not experiment.teacher_names, "objective.name", f"{name} needs teachers"),
        (
            name == "as-dfd" and experiment.targets.mode != "vanilla-kd",
            "targets.mode",
            "as-dfd runs each teacher on its own embeddings alone: vanilla-kd",
        ),
        (
            name == "cfl" and by_token,
            "objective.states",
            "cfl compares texts, each by the mean of its tokens: pooled",
        ),
        (
            name == "cfl" and experiment.student.accumulate > 1,
            "student.accumulate",
            "cfl compares the texts of a step with each other: 1",
        ),
        (
            name == "stratanet" and by_token,
            "objective.states",
            "stratanet measures a text's distance from a domain by the mean of its tokens: pooled",
        ),
        (
            name == "layerwise" and objective.blocks is not None,
            "objective.blocks",
            "layer-wise learning needs a block for each layer of the student: null",
        ),
    ]
    return [Problem(field, message) for wrong, field, message in checks if wrong]
