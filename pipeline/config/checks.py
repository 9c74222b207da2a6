"""What a single field cannot say of itself: fields that contradict each other, each told in one sentence.

A sentence has no semicolon: they are told apart by it.
"""

from __future__ import annotations

import re

from amalgam.pipeline.config.schema import COMPARATIVE, TEACHER, ExperimentConfig, Targets


def check_consistency(experiment: ExperimentConfig) -> list[str]:
    return [
        *_teacher_problems(experiment),
        *_method_problems(experiment),
        *_corpus_problems(experiment),
        *_objective_problems(experiment),
        *_generate_problems(experiment),
    ]


def _method_problems(experiment: ExperimentConfig) -> list[str]:
    method, encoder, names = str(experiment.student.method), experiment.student.encoder, experiment.teacher_names
    problems = []
    if encoder.startswith(TEACHER) and encoder.removeprefix(TEACHER) not in names:
        problems.append(f"student.encoder: no teacher has this name (known: {', '.join(names)})")
    if experiment.student.learns:
        return problems
    if experiment.corpus.test is None:
        problems.append(f"student.method: {method} trains nothing and is only measured, which needs corpus.test")
    if method.startswith(TEACHER) and method.removeprefix(TEACHER) not in names:
        problems.append(f"student.method: no teacher has this name (known: {', '.join(names)})")
    return problems


def _teacher_problems(experiment: ExperimentConfig) -> list[str]:
    names = experiment.teacher_names
    problems = [f"teachers: the name {name!r} is given twice" for name in sorted(set(names)) if names.count(name) > 1]
    if not names and experiment.train_teachers is None and experiment.targets.mode != "supervised":
        problems.append("teachers: name at least one, or a train_teachers section that makes them")
    problems += _training_problems(experiment)
    problems += [
        f"teachers: {teacher.name}: trust_remote_code needs revision to be a full commit hash"
        for teacher in experiment.teachers
        if teacher.trust_remote_code and not re.fullmatch(r"[0-9a-f]{40}", teacher.revision or "")
    ]
    return problems


def _training_problems(experiment: ExperimentConfig) -> list[str]:
    said = experiment.train_teachers
    if said is None:
        return []
    given = [name for name in ("encoder", "groups", "revision") if getattr(said, name) is not None]
    if said.together:
        return [f"train_teachers.{name}: is not for teachers that are trained together" for name in given]
    return [f"train_teachers.{name}: is required" for name in ("encoder", "groups") if name not in given]


def _generate_problems(experiment: ExperimentConfig) -> list[str]:
    said = experiment.generate
    if said is None:
        return (
            []
            if experiment.corpus.train or not experiment.reads_texts
            else ["corpus.train: is required, or a generate section that makes texts"]
        )
    wrong = {
        "corpus.train: leave it out, or the generate section": bool(experiment.corpus.train),
        "corpus.text: generated texts are single, so name one column": len(experiment.corpus.text) > 1,
        "teachers: name at least one that is finished, for generate to write texts for": not experiment.teachers,
        "train_teachers: make teachers in an experiment of their own, and name their folders as teachers": (
            experiment.train_teachers is not None
        ),
        "targets.mode: supervised needs gold labels, and generated texts have none": experiment.targets.mode
        == "supervised",
        f"generate.language_model: {said.source} needs one": said.writes and said.language_model is None,
        "generate.corpus: cross-domain needs texts": said.source == "cross-domain" and said.corpus is None,
        "generate.corpus: only cross-domain reads texts": said.source != "cross-domain" and said.corpus is not None,
    }
    return [problem for problem, found in wrong.items() if found]


def _corpus_problems(experiment: ExperimentConfig) -> list[str]:
    needs_label = {
        "train_teachers": experiment.train_teachers is not None,
        "corpus.validation": experiment.corpus.validation is not None,
        "corpus.test": experiment.corpus.test is not None,
        f"targets.mode: {experiment.targets.mode}": experiment.targets.reads_gold,
    }
    problems = [
        f"corpus.label: {who} needs the name of the label column"
        for who, needed in needs_label.items()
        if needed and experiment.corpus.label is None
    ]
    if experiment.train_teachers and experiment.train_teachers.limit and experiment.train_teachers.texts is None:
        problems.append("train_teachers.limit: needs train_teachers.texts; corpus.limit cuts the training part")
    if experiment.student.select == "validation" and experiment.corpus.validation is None:
        problems.append("student.select: validation needs corpus.validation")
    if experiment.targets.passes is not None and experiment.targets.passes > experiment.cache.passes:
        problems.append(
            f"targets.passes: {experiment.targets.passes} is more than cache.passes, {experiment.cache.passes}"
        )
    return [*problems, *_uncertainty_problems(experiment.targets)]


def _uncertainty_problems(targets: Targets) -> list[str]:
    """rmd, md and msp weigh teachers against each other; the rest say how sure one is."""
    among, said = targets.uncertainty in COMPARATIVE, f"targets.uncertainty: {targets.uncertainty}"
    if targets.mode == "stratanet" and not among:
        return [f"{said} does not tell how foreign a text is to a teacher, as stratanet asks: {', '.join(COMPARATIVE)}"]
    if among and targets.weighs_together:
        return [f"{said} is a weight of its own, for targets.weights=muka: not with {targets.weights}"]
    return []


def _objective_problems(experiment: ExperimentConfig) -> list[str]:
    said, who = experiment.objective, f"objective.name: {experiment.objective.name}"
    problems = []
    if said.states and not experiment.teachers and experiment.train_teachers is None:
        problems.append(f"{who} looks at teachers' states, and there is no teacher")
    if said.name == "layerwise" and said.states == "pooled":
        problems.append(
            "objective.grain: the student's layers read tokens, so layer-wise learning needs tokens, "
            "or objective.learning=joint where teachers tokenise otherwise"
        )
    if said.name == "as-dfd" and not experiment.teacher_names:
        problems.append(f"{who} needs teachers")
    if said.name == "as-dfd" and experiment.targets.mode != "vanilla-kd":
        problems.append("targets.mode: as-dfd asks each teacher about its own embeddings alone: vanilla-kd")
    if said.name == "cfl" and said.grain == "tokens":
        problems.append("objective.grain: cfl compares texts, each by the mean of its tokens: pooled")
    if said.name == "cfl" and experiment.student.accumulate > 1:
        problems.append("student.accumulate: cfl compares the texts of a step with each other: 1")
    if said.name == "stratanet" and said.grain == "tokens":
        problems.append("objective.grain: stratanet tells how foreign a text is by the mean of its tokens: pooled")
    if said.name == "layerwise" and said.blocks is not None:
        problems.append("objective.blocks: layer-wise learning needs a block for each layer of the student: null")
    return problems
