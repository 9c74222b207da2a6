"""Checks an experiment's inputs before anything runs: files, columns, models and labels (`plan`, `doctor`).

It reads headers and configurations only, and sends no request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from amalgam.data.keys import label_notes, shown_names
from amalgam.pipeline.config.load import note_on_name
from amalgam.pipeline.config.proposals import as_yaml
from amalgam.pipeline.config.schema import STATIC, TEACHER, ExperimentConfig
from amalgam.pipeline.errors import AmalgamError
from amalgam.pipeline.execution.disk_space import check_disk_space
from amalgam.pipeline.execution.plan import StageState
from amalgam.pipeline.execution.stage import PendingDependencyError, Run, Stage
from amalgam.pipeline.user_paths import check_writable
from amalgam.stages.build_targets.stage import check_train_gold
from amalgam.stages.cache_features.stage import check_states
from amalgam.stages.common import load, load_labels
from amalgam.stages.common.cached.load import ENCODER, adaptive_note, passes_of
from amalgam.stages.common.deliveries import STUDENTS, read_metadata
from amalgam.stages.common.device import check_device, check_libraries
from amalgam.stages.common.models.model_folder import is_predictions, longest_text
from amalgam.stages.common.models.resolve import folders_like, local_model, place_of
from amalgam.stages.common.training.checkpoint_files import TRAINING_STAGES
from amalgam.stages.methods import NAMES, method_of
from amalgam.stages.read_corpus.stage import check_texts
from amalgam.stages.registry import STAGE_NAMED, STAGES
from amalgam.stages.target_methods import target_method
from amalgam.stages.train_teachers.stage import check_gold_of_groups, encoders_of, ungrouped_labels

Check = Callable[[Run], object]

OF_MODELS = {"max_tokens", "base", "dropout", "allow_pickle", "trust_remote_code"}
"""Fields of a teacher that a file of predictions has no use for."""


def problems_of(run: Run, states: Sequence[StageState]) -> list[AmalgamError]:
    """Returns the errors that stages which are not current would end in; without states, those of any stage."""
    current = {state.stage for state in states if state.state == "current"}
    checks = [check for stage, check in CHECKS if stage not in current]
    if not states or any(state.state != "current" for state in states):
        checks += [*execution_checks(states), check_workspace, partial(check_space, states=states)]
    errors = [error for check in checks if (error := error_of(check, run))]
    return list({str(error): error for error in errors}.values())


def error_of(check: Check, run: Run) -> AmalgamError | None:
    """Returns the error of a check, if it has one; none for an input that does not exist yet."""
    try:
        check(run)
    except PendingDependencyError:  # an input that an earlier stage makes or fetches
        return None
    except AmalgamError as error:
        return error
    return None


def check_student_encoder(run: Run) -> None:
    student = run.experiment.student
    if student.learns or run.experiment.corpus.test:
        load.check_encoder(run, student, ENCODER)


def check_teacher_encoders(run: Run) -> None:
    for settings, where in encoders_of(run).values() if run.experiment.train_teachers else ():
        load.check_encoder(run, settings, where)


def check_bases(run: Run) -> None:
    """Refuses a base on this machine that cannot be loaded, where weights read it."""
    for base in load.named_bases(run).values() if STAGE_NAMED["weigh-teachers"].is_needed(run.experiment) else ():
        local_model(load.model_reference(run, base.model, base.revision, where=base.where))


def check_gold(run: Run) -> None:
    """Refuses gold labels outside the union; before the teachers are trained, their groups have the labels."""
    try:
        load_labels.check_gold(run)
    except PendingDependencyError:
        if run.experiment.train_teachers:
            check_gold_of_groups(run)
        raise


def check_public_folder(run: Run, stage: Stage) -> None:
    """Refuses folders of results that cannot be written, public ones as students/ included."""
    if stage.is_needed(run.experiment):
        stage.check_folders(run)


def execution_checks(states: Sequence[StageState], *, force: bool = False) -> list[Check]:
    """Returns the checks of device, engine and trackers that stages which would run need; without states, all."""
    names = {state.stage for state in states if force or state.state != "current"}
    stages = [stage for stage in STAGES if stage.name in names] if states else STAGES
    checks: list[Check] = [check_execution_device] if stages else []
    if any(stage.parallelism != "single" for stage in stages):
        checks.append(check_engine)
    return [*checks, check_trackers] if any(stage.name in TRAINING_STAGES for stage in stages) else checks


def check_execution_device(run: Run) -> str:
    return check_device(run.experiment.execution.device)


def check_engine(run: Run) -> str:
    engine = run.experiment.execution.engine
    if engine == "ray":
        check_libraries(["ray"], "ray", "execution.engine=ray")
    return engine


def check_trackers(run: Run) -> str:
    names = run.experiment.execution.trackers
    if names:
        from amalgam.stages.common.training.run import check_available

        check_available(names)
    return ", ".join(names)


OF_EXECUTION: dict[str, Check] = {"device": check_execution_device, "engine": check_engine, "trackers": check_trackers}


def check_workspace(run: Run) -> None:
    if not run.store.backend.is_remote:
        check_writable(run.store.root, "change its permissions, or set execution.workspace=DIR")


def check_space(run: Run, states: Sequence[StageState]) -> str:
    return check_disk_space(STAGES, run, states)


CHECKS: list[tuple[str, Check]] = [
    *(("read-corpus", partial(check_texts, part=part)) for part in ("train", "validation", "test", "teachers")),
    ("train-teachers", check_teacher_encoders),
    ("report", check_gold),  # another test file runs no earlier stage, and a run checks it before any
    ("cache-teachers", load.labels_by_teacher),  # reads configurations; checks weights, tokenizers and labels
    ("cache-features", check_states),
    ("weigh-teachers", check_bases),
    ("build-targets", load_labels.check_labels),
    ("build-targets", check_train_gold),  # of a corpus that was read when no label was needed
    ("train-student", check_student_encoder),
    ("report", load_labels.check_unknown),
    *((stage.name, partial(check_public_folder, stage=stage)) for stage in STAGES),
]
"""Each check, and the stage that would fail without it."""


# ---- remarks


def remarks_of(run: Run, states: Sequence[StageState]) -> Iterator[str]:
    """Yields remarks on settings that are valid but would surprise a user."""
    yield from _about_gold_labels(run)
    yield from _about_models(run)
    yield from _about_names(run)
    yield from _about_revisions(run)
    yield from _about_predictions(run)
    yield from limit_notes(run)
    yield from _about_teachers(run)
    yield from _about_overrides(run)
    yield from _about_student(run, states)


def _about_gold_labels(run: Run) -> Iterator[str]:
    """Yields labels that nothing reads, and labels that could be used."""
    experiment, method = run.experiment, target_method(run.experiment.targets)
    if experiment.labels and not method.takes_labels:
        yield f"targets.mode={experiment.targets.mode} does not use `labels: {experiment.labels}`"
    train = run.results.get("read-corpus", (None, None))[1]
    facts = train.facts["parts"].get("train") if train else None
    labelled = sum(facts["labels"].values()) if facts else 0
    if facts and not experiment.labels and method.takes_labels and 0 < labelled < facts["texts"] / 2:
        have, them = ("has", "it") if labelled == 1 else ("have", "them")
        yield f"{labelled:,} of {facts['texts']:,} training texts {have} a gold label; `labels: corpus` uses {them}"


def _about_names(run: Run) -> Iterator[str]:
    """Yields teachers whose names lost letters of the model's name."""
    for index, teacher in enumerate(run.experiment.teachers):
        if f"teachers.{index}.name" not in run.places and (note := note_on_name(teacher.model, teacher.name)):
            yield note


def _about_models(run: Run) -> Iterator[str]:
    """Yields names that are no folders here, with similar folders: a misspelt folder looks like a Hub id."""
    try:
        names = load.unfetched_models(run)
    except AmalgamError:  # a problem, not a remark
        return
    for name in names:
        is_teacher = name in run.experiment.teacher_names and name == run.experiment.student.encoder
        own = [TEACHER + name] if is_teacher else []
        close = " or ".join([*own, *folders_like(name, run.base)])
        hint = f"did you mean {close}?" if close else f"write hub:{name} if it is one"
        yield f"{name} is not a folder here; it is taken as a Hub id: {hint}"


def _about_revisions(run: Run) -> Iterator[str]:
    """Yields revisions of folders, which have none; `trust_remote_code` needs one nevertheless."""
    teachers, student = run.experiment.teachers, run.experiment.student
    trained, generate = run.experiment.train_teachers, run.experiment.generate
    named = [(teacher.model, teacher.revision) for teacher in teachers if not teacher.trust_remote_code]
    named += [(student.encoder.removeprefix(STATIC), student.revision)]
    named += [(trained.encoder or "", trained.revision)] if trained else []
    named += [(generate.language_model or "", generate.revision)] if generate else []
    for model, revision in named:
        with suppress(AmalgamError):  # a problem, not a remark
            if revision and isinstance(place_of(model, run.base), Path):
                yield f"revision: {revision} has no effect, because {model} is on this machine"
    if student.revision and (name := load.teacher_in(student)):
        yield f"revision: {student.revision} has no effect, because student.encoder is that of teacher {name}"


def _about_predictions(run: Run) -> Iterator[str]:
    """Yields settings of models that are given for files of predictions."""
    for teacher in run.experiment.teachers:
        unread = sorted(teacher.model_fields_set & OF_MODELS)
        with suppress(AmalgamError):  # a problem, not a remark
            place = place_of(teacher.model, run.base)
            if unread and isinstance(place, Path) and is_predictions(place):
                yield f"{shown_names(unread)} of teacher {teacher.name}: no effect, because {teacher.model} is no model"


def limit_notes(run: Run) -> Iterator[str]:
    """Yields the models on this machine that read fewer tokens than their max_tokens."""
    experiment, student = run.experiment, run.experiment.student
    teachers = {teacher.name: load.teacher_reference(run, teacher) for teacher in experiment.teachers}
    limits = {teacher.name: teacher.max_tokens or experiment.cache.max_tokens for teacher in experiment.teachers}
    models = [(f"teacher {name}", reference, limits[name]) for name, reference in teachers.items()]
    for settings, where in encoders_of(run).values() if experiment.train_teachers else ():
        models.append((where, load.model_reference(run, str(settings.encoder), settings.revision), settings.max_tokens))
    named = load.model_reference(run, student.encoder, student.revision)
    encoder = teachers.get(name) if (name := load.teacher_in(student)) else named
    if student.learns and not student.is_static and encoder:
        models.append((ENCODER, encoder, student.max_tokens))
    alike: dict[tuple[int, int], list[str]] = {}
    for where, reference, max_tokens in models:
        with suppress(AmalgamError, PendingDependencyError):  # a problem, not a remark
            files = local_model(reference)
            is_model = files and not files.are_predictions
            limit = longest_text(files.folder, files.config) if files and is_model else max_tokens
            alike.setdefault((limit, max_tokens), []).append(where)
    for (limit, max_tokens), names in alike.items():
        if limit < max_tokens:
            read = f"{', '.join(names)} {'reads' if len(names) == 1 else 'read'} at most {limit:,} tokens"
            yield f"{read}, fewer than max_tokens {max_tokens:,}: longer texts are truncated there"


def _about_teachers(run: Run) -> Iterator[str]:
    experiment, cache = run.experiment, run.experiment.cache
    if experiment.train_teachers:
        with suppress(AmalgamError, PendingDependencyError):
            yield from ungrouped_labels(run)
    if len(experiment.teacher_names) == 1 and experiment.student.learns and not experiment.train_teachers:
        yield f"{experiment.teacher_names[0]} is the only teacher: nothing is merged, the student imitates it"
    method = target_method(experiment.targets)
    if "MC dropout" in method.full_name(experiment, ""):
        weights = f"targets.mode={experiment.targets.mode} weights the teachers by one prediction each"
        yield f"without dropout passes, {weights}; the papers use cache.passes=16"
    settings = {"cache.dropout=last-layer": cache.last_layer, "cache.adaptive=true": cache.adaptive}
    for setting in (name for name, is_set in settings.items() if is_set and not passes_of(experiment)):
        runs = "this experiment runs none (at most a sample)"
        yield f"{setting} is for dropout passes, and {runs}; set cache.passes=16"
    with suppress(AmalgamError, PendingDependencyError):
        yield from adaptive_note(run)
    try:
        labels = load.labels_by_teacher(run)
    except AmalgamError:  # a problem, not a remark
        return
    yield from label_notes(labels)
    with suppress(PendingDependencyError):
        yield from load.same_model_notes({teacher.name: teacher.files for teacher in load.teachers_of(run)})


def _about_overrides(run: Run) -> Iterator[str]:
    """Yields the stored overrides that `run` leaves out and commands of later stages repeat."""
    for stage in STAGES:
        stored, student = stored_overrides(run, stage)
        for field, value in stored.items():
            if student == run.experiment.student.name and not _has(run, field, value):
                effect = "commands of later stages repeat it, `amalgam run` and this plan do not"
                yield f"the last {stage.name} had {field}={as_yaml(value)}: {effect}"


def stored_overrides(run: Run, stage: Stage) -> tuple[dict[str, object], str]:
    """Returns the overrides of the stage in the last complete command with this file, and the name of its student.

    Fields that the run sets itself are left out.
    """
    entry = run.store.head().get(stage.name)
    stored = entry["overrides"] if entry and entry.get("file") == run.file_name else {}
    fields = {
        field: value
        for field, value in stored.items()
        if field.split(".")[0] in stage.sections and field not in run.overrides
    }
    return fields, stored.get("student.name", run.experiment.student.name)


def _has(run: Run, field: str, value: object) -> bool:
    """Returns whether the experiment has this value, in any form that the schema takes, such as 1e-3 for 0.001."""
    experiment = run.experiment.model_dump()
    section: Any = experiment
    *sections, name = field.split(".")
    try:
        for part in sections:
            section = section[int(part) if isinstance(section, list) else part]
        section[name] = value
        return ExperimentConfig.model_validate(experiment, context=NAMES) == run.experiment
    except (LookupError, TypeError, ValueError):  # the file has no such section, or takes no such value
        return False


def _about_student(run: Run, states: Sequence[StageState]) -> Iterator[str]:
    student, targets = run.experiment.student, run.experiment.targets.model_dump()
    made = method_of(targets, run.experiment.objective.name)
    if student.learns and student.method and student.method not in {made, made.partition(" and ")[0]}:
        yield f"student.method is {student.method}, but fields of targets or objective make it {made}"
    metadata = read_metadata(run.base / STUDENTS / student.name)
    training = next((state for state in states if state.stage == "train-student"), None)
    if metadata and training and training.fingerprint != metadata["fingerprint"]:
        condition = "" if training.fingerprint else ", unless the training is the same"
        yield f"students/{student.name} holds another student; `amalgam run{run.options}` replaces it{condition}"
