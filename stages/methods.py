"""METHODS: every method on one screen, and the loading of experiments with their names, defaults and checks.

A name sets defaults for the experiment, which the file overrides. Methods that train nothing are rows of every report.
With such a method the report evaluates it, and trains no student.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from amalgam.pipeline.config.load import ON_GENERATED, ExperimentSource, LoadedExperiment, load_experiment
from amalgam.pipeline.config.schema import (
    COMPARISON,
    FROM_CORPUS,
    NO_TEACHERS,
    STATIC,
    TEACHER,
    UNTRAINED,
    Checks,
    ExperimentConfig,
)
from amalgam.stages.objective_inputs import OBJECTIVE_INPUTS, objective_inputs, reads_texts
from amalgam.stages.target_methods import TARGET_METHODS, target_method


@dataclass(frozen=True)
class Method:
    source: str
    needs: str
    """The cached inputs that it reads."""
    defaults: Mapping[str, Mapping[str, Any]]
    trains: bool = True
    on_generated: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Additional defaults for generated texts."""


MUKA = "Li et al. 2021 (MUKA; MUKI, Findings of EMNLP 2022)"

VANILLA_KD = {"mode": "vanilla-kd"}

AMALGAM = {
    "mode": "hard",
    "distribution": "top-label",
    "teacher_weights": "range",
    "weight_signal": "all",
    "neighbours": 10,
}

HEDGED = {"mode": "soft", "distribution": "deterministic"}
"""A generated text may have no topic, so no teacher gets all of the weight."""


STRATA = {"mode": "stratanet", "uncertainty": "rmd", "kd_temperature": 0.75}

STRATA_STUDENT = {"epochs": 10, "batch_size": 16, "warmup": 0.2, "dropout": 0.2}

SETTINGS = {"uncertainty", "kd_temperature"}
"""Fields of `targets` that do not change the name of a method."""


METHODS: Mapping[str, Method] = {
    "amalgam": Method(
        "this project, docs/method.md", "logits, features", {"targets": AMALGAM}, on_generated={"targets": HEDGED}
    ),
    "muka-soft": Method(MUKA, "logits, passes", {"targets": {"mode": "soft", "teacher_weights": "muka"}}),
    "muka-hard": Method(MUKA, "logits, passes", {"targets": {"mode": "hard", "teacher_weights": "muka"}}),
    "uhc": Method("Vongkulbhisal et al. 2019 (UHC)", "logits", {"targets": {"mode": "uhc"}}),
    "vanilla-kd": Method("Hinton et al. 2015, concatenated logits", "logits", {"targets": VANILLA_KD}),
    "layerwise": Method(
        "Shen et al. 2019 (AAAI)",
        "logits, states by token",
        {"targets": {"mode": "scores"}, "objective": {"name": "layerwise", "states": "tokens"}},
    ),
    "dfa": Method(
        "Shen et al. 2019, as MUKA's baseline has it",
        "logits, pooled states",
        {"targets": VANILLA_KD, "objective": {"name": "dfa"}},
    ),
    "cfl": Method(
        "Luo et al. 2019 (CFL, IJCAI)", "logits, pooled states", {"targets": VANILLA_KD, "objective": {"name": "cfl"}}
    ),
    "mt-bert": Method(
        "Wu et al. 2021 (MT-BERT, Findings of ACL)",
        "gold labels, logits, pooled states",
        {"targets": {"mode": "mt-bert"}, "objective": {"name": "mt-bert"}},
    ),
    "stratanet": Method(
        "Vijayaraghavan et al. 2024 (StrataNet, NAACL)",
        "logits, pooled states",
        {"targets": STRATA, "objective": {"name": "stratanet"}, "student": STRATA_STUDENT},
    ),
    "as-dfd": Method(
        "Ma et al. 2020 (AS-DFD, EMNLP)",
        "pseudo embeddings, no text",
        {"targets": VANILLA_KD, "objective": {"name": "as-dfd"}},
    ),
    "supervised": Method(
        "cross-entropy on gold labels, for comparison", "gold labels", {"targets": {"mode": "supervised"}}
    ),
    "teacher:<name>": Method("one teacher alone, zero on labels that it lacks", "logits", {}, trains=False),
    "ensemble": Method("highest probability of one softmax over all teachers' logits", "logits", {}, trains=False),
    "zero-shot": Method("nearest label name in the encoder's space, no teacher", "label names", {}, trains=False),
}


DEFAULT_METHOD = "amalgam"
"""Method of a file that sets neither student.method nor targets.mode nor objective.name."""


def method_of(targets: Mapping[str, Any], objective: str = "targets") -> str:
    """Returns the method with these targets and this objective; weights of no method follow the name of the targets."""
    named: dict[str, str] = {}
    for name, method in METHODS.items():
        if method.trains and _makes(method, targets):
            named.setdefault(objective_in(method), name)
    if objective in named:
        return named[objective]
    mode, weights = targets["mode"], f", {targets['teacher_weights']} weights"
    plain = named.get("targets", f"{mode}{weights if TARGET_METHODS[mode].reads_teacher_weights else ''}")
    return plain if objective == "targets" else f"{plain} and {objective}"


def objective_in(method: Method) -> str:
    return str(method.defaults.get("objective", {}).get("name", "targets"))


def _makes(method: Method, targets: Mapping[str, Any]) -> bool:
    defaults = method.defaults.get("targets", {})
    hedged = {**defaults, **method.on_generated.get("targets", {})}
    return any(
        all(targets.get(name) == value for name, value in settings.items() if name not in SETTINGS)
        for settings in (defaults, hedged)
    )


def method_name(experiment: ExperimentConfig) -> str:
    """Returns the name in the report: the method, and the parts that the experiment leaves out."""
    if not experiment.student.learns:
        return str(experiment.student.method)
    targets = experiment.targets
    method, name = target_method(targets), method_of(targets.model_dump(), experiment.objective.name)
    labels = " with labels" if experiment.labels and method.takes_labels else ""
    return f"{method.full_name(experiment, name)}{labels}"


# ---- loading

NAMES: Mapping[str, Mapping[str, type]] = {"targets.mode": TARGET_METHODS, "objective.name": OBJECTIVE_INPUTS}
"""Tables whose names are the values of a field."""


def load_with_methods(source: ExperimentSource, overrides: Iterable[str] = ()) -> LoadedExperiment:
    """Loads an experiment with the names, defaults and checks of all methods."""
    presets = {name: {**method.defaults, ON_GENERATED: method.on_generated} for name, method in METHODS.items()}
    return load_experiment(
        source, overrides, presets=presets, default=DEFAULT_METHOD, names=NAMES, checks=consistency_checks
    )


def value_texts(table: Mapping[str, type]) -> list[str]:
    """Returns each name with the first sentence of its class."""
    return [f"{name}: {str(value.__doc__).splitlines()[0]}" for name, value in table.items()]


def experiment_schema() -> dict[str, Any]:
    """Returns the JSON Schema of the experiment file, with the names of NAMES as choices and their meanings.

    A teacher may be its model alone, which the loading makes a section.
    """
    schema = ExperimentConfig.model_json_schema()
    teachers = schema["properties"]["teachers"]
    teachers["items"] = {"anyOf": [teachers["items"], {"type": "string"}]}
    for path, table in NAMES.items():
        section, name = path.split(".")
        model = schema["properties"][section]["$ref"].rpartition("/")[2]
        field = schema["$defs"][model]["properties"][name]
        field |= {"enum": list(table), "description": " ".join([field["description"], *value_texts(table)])}
    return schema


# ---- checks of several fields


def consistency_checks(experiment: ExperimentConfig) -> Checks:
    """Yields the checks of fields that can contradict each other; the schema checks one field alone."""
    yield from _teacher_checks(experiment)
    yield from _corpus_checks(experiment)
    yield from _student_checks(experiment)
    targets, method, passes = experiment.targets, target_method(experiment.targets), experiment.cache.passes
    too_many = targets.passes is not None and passes is not None and targets.passes > passes
    yield too_many, "targets.passes", f"{targets.passes} is more than cache.passes, {passes}"
    stops = experiment.cache.adaptive and experiment.cache.last_layer
    message = "saves no time with cache.dropout: last-layer, whose passes cost little; set cache.adaptive: false"
    yield stops, "cache.adaptive", message
    used = passes if targets.passes is None else targets.passes
    runs_none = method.reads_states and not method.reads_passes  # by cache.passes: auto
    too_few = experiment.student.learns and (runs_none if used is None else used < 2)
    message = f"{targets.uncertainty} compares passes of a text: use at least 2 (cache.passes and targets.passes)"
    yield too_few and method.compares_passes, "targets.uncertainty", message
    yield from method.checks()
    yield from objective_inputs(experiment).checks()
    yield from _generate_checks(experiment)


def _teacher_checks(experiment: ExperimentConfig) -> Checks:
    names, section = experiment.teacher_names, experiment.train_teachers
    for name in sorted(set(names)):
        yield names.count(name) > 1, "teachers", f"the name {name!r} is given twice"
        message = f"the name {name!r} is that of another system in reports: choose another name"
        yield name in NO_TEACHERS, "teachers", message
    needs_teacher = section is None and target_method(experiment.targets).reads_teachers
    yield needs_teacher and not names, "teachers", "name at least one, or a train_teachers section that makes them"
    objective = objective_inputs(experiment)
    without = section is None and not names and (objective.states is not None or not objective.reads_texts)
    yield without, "objective.name", f"{experiment.objective.name} needs teachers"
    if section is not None:
        for field in ("encoder", "groups", "revision"):
            absent = getattr(section, field) is None
            message = "is not for teachers that are trained together"
            yield bool(section.co_train) and not absent, f"train_teachers.{field}", message
            yield not section.co_train and absent and field != "revision", f"train_teachers.{field}", "is required"
        message = "needs train_teachers.texts; corpus.limit cuts the training part"
        yield section.limit is not None and section.texts is None, "train_teachers.limit", message
    message = "catch_all needs texts: a method without texts learns each output"
    yield experiment.has_catch_all and not objective.reads_texts, "teachers", message
    message = "is not for teachers with catch_all"
    yield experiment.has_catch_all and experiment.cache.adaptive, "cache.adaptive", message
    for teacher in experiment.teachers:
        pinned = re.fullmatch(r"[0-9a-f]{40}", teacher.revision or "") is not None
        message = f"{teacher.name}: trust_remote_code needs revision to be a full commit hash"
        yield teacher.trust_remote_code and not pinned, "teachers", message


def _corpus_checks(experiment: ExperimentConfig) -> Checks:
    corpus, targets = experiment.corpus, experiment.targets
    readers = {
        "train_teachers": experiment.train_teachers is not None,
        "corpus.validation": corpus.validation is not None,
        "corpus.test": corpus.test is not None,
        f"labels: {FROM_CORPUS}": experiment.labels == FROM_CORPUS,
        f"targets.mode: {targets.mode}": target_method(targets).reads_gold,
    }
    for reader, reads in readers.items():
        yield reads and corpus.label is None, "corpus.label", f"{reader} needs it: write the name of the label column"
    yield len({*corpus.text}) < len(corpus.text), "corpus.text", "names one column twice: name two columns, or one"
    yield corpus.unknown in (corpus.labels or ()), "corpus.unknown", f"{corpus.unknown!r} is also in corpus.labels"


def _student_checks(experiment: ExperimentConfig) -> Checks:
    student, names = experiment.student, experiment.teacher_names
    message = f"reports/{COMPARISON} is the page of compared reports: choose another name"
    yield student.name == COMPARISON, "student.name", message
    taken = student.learns and student.name in {*UNTRAINED, *names} - {"student"}  # that teacher is refused itself
    yield taken, "student.name", "another system of the report has this name: choose another one"
    unmeasured = not student.learns and experiment.corpus.test is None
    yield unmeasured, "student.method", f"{student.method} trains nothing and is only measured, which needs corpus.test"
    for name, model in (("encoder", student.encoder.removeprefix(STATIC)), ("method", student.method or "")):
        teacher = model.removeprefix(TEACHER)
        unknown = model.startswith(TEACHER) and teacher not in names
        yield unknown, f"student.{name}", f"no teacher has the name {teacher!r}; the names are {', '.join(names)}"
    message = "write static:ENCODER, with the encoder of the token vectors; ./static is a folder"
    yield student.encoder in {"static", STATIC}, "student.encoder", message
    objective = objective_inputs(experiment)
    reads_layers = objective.states is not None or not objective.reads_texts
    message = f"{experiment.objective.name} trains the layers of a transformer, which a static student has not"
    yield student.is_static and reads_layers, "student.encoder", message
    yield student.is_static and student.layers is not None, "student.layers", "a static student has no layers: null"
    unselected = student.select == "validation" and experiment.corpus.validation is None
    yield unselected, "student.select", "validation needs corpus.validation"


def _generate_checks(experiment: ExperimentConfig) -> Checks:
    section, corpus, mode = experiment.generate, experiment.corpus, experiment.targets.mode
    if section is None:
        no_texts = not corpus.train and reads_texts(experiment)
        yield no_texts, "corpus.train", "is required, or a generate section that makes texts"
        return
    trains, gold = experiment.train_teachers is not None, target_method(experiment.targets).reads_gold
    no_model = section.writes and section.language_model is None
    no_corpus = section.reads_corpus and section.corpus is None
    yield bool(corpus.train), "corpus.train", "leave it out, or the generate section"
    yield len(corpus.text) > 1, "corpus.text", "generated texts are single, so name one column"
    yield not experiment.teachers, "teachers", "name at least one that is finished, for generate to write texts for"
    yield trains, "train_teachers", "make teachers in an experiment of their own, and name their folders as teachers"
    field = "student.method" if experiment.student.method == mode else "targets.mode"
    yield gold, field, f"{mode} needs gold labels, and generated texts have none"
    message = f"{FROM_CORPUS} needs gold labels, and generated texts have none: name a file of labels"
    yield experiment.labels == FROM_CORPUS, "labels", message
    yield no_model, "generate.language_model", f"{section.source} needs one"
    yield no_corpus, "generate.corpus", f"{section.source} needs texts"
    words, tokens = section.min_words, section.max_tokens
    message = f"{words} is more than generate.max_tokens, {tokens}: a word usually has one or more"
    yield section.writes and words > tokens, "generate.min_words", message
    unread = section.corpus is not None and not section.reads_corpus
    yield unread, "generate.corpus", "only cross-domain and recombined read texts"
