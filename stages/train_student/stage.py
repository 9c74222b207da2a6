"""Stage train-student: one unit, the student, trained on the targets that build-targets made."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from amalgam.data.arrays import Keys
from amalgam.data.lazy import np
from amalgam.data.parquet import key_array
from amalgam.data.tokens import Ragged, unreadable_note, unreadable_texts
from amalgam.pipeline.config.schema import ExperimentConfig, Student
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit, once
from amalgam.pipeline.storage.facts import FactTypes
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.store import Record
from amalgam.stages.build_targets.stage import read_targets, target_facts
from amalgam.stages.common import load, load_labels
from amalgam.stages.common.cached.load import ENCODER, states_of
from amalgam.stages.common.corpus import Part, corpus_for, hub_datasets, sources_of, tables
from amalgam.stages.common.deliveries import (
    STUDENTS,
    Mark,
    check_deliverable,
    check_target,
    deliver,
    named,
    read_metadata,
)
from amalgam.stages.common.input_names import INPUT_NAMES
from amalgam.stages.common.models.model_folder import reads_padding
from amalgam.stages.common.models.read_card import Source, TrainingSummary, model_digests, source_of
from amalgam.stages.common.models.resolve import NewClassifier, hidden_size, least_bytes_of
from amalgam.stages.common.training import schedule as schedules
from amalgam.stages.common.training.checkpoint_files import CHECKPOINT, resume_point
from amalgam.stages.common.training.schedule import Schedule, StudentFacts, StudentRecordFacts
from amalgam.stages.fit_statistics.stage import domain_confidences
from amalgam.stages.methods import method_name
from amalgam.stages.objective_inputs import domain_measure, objective_inputs, reads_texts
from amalgam.stages.target_methods import target_method
from amalgam.stages.train_teachers.stage import encoders_of, trained_digest
from amalgam.stages.weigh_teachers.stage import largest_evidence

if TYPE_CHECKING:
    from amalgam.stages.common.models.unknown import UnknownStates
    from amalgam.stages.common.training.batches import Examples
    from amalgam.stages.common.training.run import Selection
    from amalgam.stages.make_embeddings.stage import EmbeddingFacts
    from amalgam.stages.train_student.training import TeacherEmbeddings

NOT_IDENTITY = {"name", "method", "encoder", "revision", "accumulate", "select"}
"""Fields without influence on the result, or identified in another way: the encoder has its digest."""
STATIC_VERSION = 1
"""Version of static.py. A change of it retrains static students only."""


class TrainStudent(Stage):
    name = "train-student"
    VERSION = 11  # few held-out texts give the threshold by logits a margin
    parallelism = "collective"
    unit_label = "students"
    sections = ("student", "objective")
    enabled_by = "choose a student.method that trains a student"
    facts = FactTypes(StudentRecordFacts, StudentRecordFacts)
    input_names = {
        r"confidence": "targets.uncertainty",
        r"select": "student.select",
        r"static": "static student.encoder",
        r"validation": "content of corpus.validation",
        r"objective_version": "code of objective.name",
        r"excluded texts": "labelled texts that are not learned",
    } | INPUT_NAMES

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        return experiment.student.learns

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:
        objective = objective_inputs(experiment)
        states = ("cache-features",) if objective.states else ()
        statistics = ("fit-statistics",) if objective.weighs_by_domain else ()
        weighed = ("weigh-teachers",) if reads_evidence(experiment) else ()
        return ("read-corpus", "train-teachers", *states, *statistics, *weighed, "build-targets", "make-embeddings")

    def resolve_inputs(self, run: Run) -> None:
        load.encoder_files(run, run.experiment.student, ENCODER)

    def check_output(self, run: Run) -> None:
        check_deliverable(run.base, STUDENTS, run.experiment.student.name)

    def identity(self, run: Run) -> Identity:
        student = run.experiment.student
        inputs: dict[str, object] = {"encoder": trained_digest(run, student, ENCODER), "select": "held-out"}
        inputs |= {"static": STATIC_VERSION} if student.is_static else {}
        validation = validation_part(run)
        if validation:
            inputs |= {"select": "validation", "validation": validation.labels_digest}
        unset = {"dropout"} if student.dropout is None else set()
        config: dict[str, object] = {
            "student": student.model_dump(exclude=NOT_IDENTITY | unset) | asdict(schedule(run))
        }
        targets_stage = "build-targets" if reads_texts(run.experiment) else "make-embeddings"
        upstream = {targets_stage: run.fingerprint(targets_stage)}
        objective = objective_inputs(run.experiment)
        if not reads_texts(run.experiment):
            config["targets"] = {"kd_temperature": run.experiment.targets.kd_temperature}
            inputs["knows"] = load.known_labels(run)
        if run.experiment.objective.name != "targets":
            config["objective"] = run.experiment.objective.model_dump(include={"name", *objective.fields})
        inputs |= {"objective_version": objective.version} if objective.version > 1 else {}
        if objective.states:
            upstream["cache-features"] = run.fingerprint("cache-features")
        excluded = load_labels.excluded_texts(run)
        if excluded:
            inputs["excluded texts"] = fingerprint(sorted(key.hex() for key in excluded))
        if reads_evidence(run.experiment):
            upstream["weigh-teachers"] = run.fingerprint("weigh-teachers")
        if objective.weighs_by_domain:
            upstream["fit-statistics"] = run.fingerprint("fit-statistics")
            config["confidence"] = domain_measure(run.experiment)
        return Identity(config, inputs, upstream)

    def chosen(self, run: Run) -> dict[str, object]:
        return schedules.chosen_fields("student", run.experiment.student, asdict(schedule(run)))

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        return [Unit("student", folder)]

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the number of examples over all epochs."""
        return float(_examples(run) * schedule(run).epochs * (1 if units is None else len(units)))

    def least_bytes(self, run: Run, units: Sequence[Unit] | None) -> tuple[int, int]:
        student = run.experiment.student
        if student.is_static:
            return 0, 0
        load.encoder_digest(run, student, ENCODER)  # raises if the next line would send a request
        size = least_bytes_of(load.encoder_files(run, student, ENCODER), student.layers)
        return size, size

    def resumes(self, run: Run, unit: Unit) -> tuple[str, float]:
        return resume_point(run.store.root, unit.folder)

    def run_unit(self, run: Run, unit: Unit) -> None:
        from amalgam.stages.common.models.loading import save_pretrained_folder

        checkpoint = run.store.own_folder(unit.folder / CHECKPOINT)
        train_student = _train_on_texts if reads_texts(run.experiment) else _train_on_embeddings
        new, facts, unknown = train_student(run, checkpoint)
        if run.share.is_leader:
            with run.store.draft(unit.folder, unit.name) as draft:
                save_pretrained_folder(new.model, new.tokenizer, draft.folder, max_tokens=new.limit)
                if unknown:
                    unknown.save(draft.folder)
                draft.facts = {**facts, "max_tokens": new.limit}
            shutil.rmtree(checkpoint, ignore_errors=True)

    def summary(self, run: Run, manifest: Record) -> Iterator[str]:
        facts: StudentFacts = manifest.facts
        yield f"{schedules.kept(facts)} ({facts['selected_by']})"

    def publish(self, run: Run, manifest: Record) -> None:
        student = run.experiment.student
        about = {
            "teachers": {teacher.name: list(teacher.labels) for teacher in load.teachers_of(run)},
            "max_tokens": manifest.facts["max_tokens"],
            "text": corpus_for(run.experiment, "train").text if reads_texts(run.experiment) else None,
            "sources": [asdict(source) for source in _sources(run)],
            "training": asdict(_training(run, manifest)),
        }
        files = named(manifest.files)
        target = check_target(run.base, STUDENTS, student.name, files)
        present = read_metadata(target)
        deliver(load.delivery_services(run), target, Mark(run.fingerprint(self.name), files, about))
        is_another = present is not None and present["fingerprint"] != run.fingerprint(self.name)
        replaced = ", which replaces another student of this name" if is_another else ""
        run.console.say(f"  student: {target.relative_to(run.base)}{replaced}")

    def notes(self, run: Run, manifest: Record) -> Iterator[str]:
        facts: StudentFacts = manifest.facts
        more = "add texts" if reads_texts(run.experiment) else "raise pseudo_embeddings.count"
        yield from schedules.few_steps(facts, "student", more)
        yield from unreadable_note(facts.get("unreadable", 0), facts["texts"], "student.encoder")
        student = run.experiment.student
        if not student.is_static and reads_padding(load.encoder_files(run, student, ENCODER).config):
            yield (
                "padding changes the student's predictions, because of its encoder: amalgam predicts without padding. "
                "In other programs, predict one text at a time; or choose another student.encoder"
            )

    def recomputed(self, unit: Record | None, teacher: str) -> str:
        return "trained again"

    def describe(self, manifest: Record) -> str:
        facts: StudentFacts = manifest.facts
        return f"{len(facts['labels'])} labels, {schedules.kept(facts)} ({facts['selected_by']})"


def reads_evidence(experiment: ExperimentConfig) -> bool:
    """Returns whether weigh-teachers has the teachers' evidence on the training texts, which fits unknown texts."""
    return reads_texts(experiment) and target_method(experiment.targets).estimates_weights


@once
def schedule(run: Run) -> Schedule:
    """Returns the epochs and the learning rate, chosen by texts, labels and encoder where the file sets none."""
    return _schedule_for(run, run.experiment.student)


@once
def automatic_schedule(run: Run) -> Schedule:
    """Returns the epochs and the learning rate that `auto` would choose."""
    return _schedule_for(run, run.experiment.student.model_copy(update={"epochs": None, "learning_rate": None}))


def _schedule_for(run: Run, student: Student) -> Schedule:
    width = hidden_size(load.encoder_files(run, student, ENCODER))
    return schedules.schedule_of(student, texts=_learned(run), labels=len(load.label_space(run).names), width=width)


def _examples(run: Run) -> int:
    """Returns the number of training texts, or of pseudo embeddings."""
    if reads_texts(run.experiment):
        return load.train_part(run).texts
    return run.experiment.pseudo_embeddings.count * sum(len(teacher.labels) for teacher in load.teachers_of(run))


@once
def _learned(run: Run) -> int:
    """Returns the number of training texts that are neither held out nor excluded, or of such pseudo embeddings."""
    share = held_out_share(run)
    if not reads_texts(run.experiment):
        return int((~schedules.held_out_rows(_examples(run), share)).sum())
    part, excluded = load.train_part(run), load_labels.excluded_texts(run)

    def keys() -> Keys:
        every = np.concatenate([key_array(table.column("key")) for table in tables(run.store, part, ["key"])])
        return every[~np.isin(every, np.array(list(excluded), every.dtype))]

    return schedules.learned_texts(part.texts - len(excluded), share, keys)


def validation_part(run: Run) -> Part | None:
    """Returns the validation texts if they select the checkpoint: the settings choose them, and they have labels."""
    part = load.part_of(run, "validation") if run.experiment.student.select != "held-out" else None
    return part if part and part.facts["labels"] else None


def held_out_share(run: Run) -> float:
    """Returns the share of the training texts on which the checkpoint is selected."""
    return 0.0 if validation_part(run) else run.experiment.student.held_out


def student_folder(run: Run) -> Path:
    """Returns the Hugging Face folder in the store, after verifying every file."""
    return run.store.verified_folder(run.result("train-student").files)


# ---- for the model card

PUBLISHED = {"train_teachers", "cache", "targets", "objective", "pseudo_embeddings", "student"}
"""Sections whose recorded fields are published with the student: none of them has a path."""


def _sources(run: Run) -> list[Source]:
    """Returns the cards of the encoder and of all teachers; a teacher that was trained here has that of its encoder."""
    teachers, encoders = {}, encoders_of(run) if run.experiment.train_teachers else {}
    trained = run.result("train-teachers").facts["teachers"] if encoders else {}
    for teacher in load.teachers_of(run):
        role = f"teacher {teacher.name}"
        if teacher.name in trained:
            settings, where = encoders.get(teacher.name) or encoders[""]
            teachers[teacher.name] = source_of(role, load.encoder_files(run, settings, where), trained=True)
        else:
            teachers[teacher.name] = source_of(role, teacher.files)
    student = run.experiment.student
    name = load.teacher_in(student)
    encoder = teachers[name] if name else source_of("the encoder", load.encoder_files(run, student, ENCODER))
    return [replace(encoder, role="the encoder"), *teachers.values()]


def _training(run: Run, manifest: Record) -> TrainingSummary:
    settings = {
        section: {name: value for name, value in fields.items() if hasattr(getattr(run.experiment, section), name)}
        for _, result in [*run.results.values(), ("", manifest)]
        for section, fields in result.identity["config"].items()
        if section in PUBLISHED
    }
    facts, sources, automatic = manifest.facts, sources_of(run.experiment), automatic_schedule(run)
    return TrainingSummary(
        method=method_name(run.experiment),
        texts=facts["texts"],
        steps=facts["steps"],
        best_step=facts["best_step"],
        selected_by=facts["selected_by"],
        datasets=hub_datasets([*sources.get("train", ()), *sources.get("teachers", ())]),
        settings=settings,
        libraries=manifest.made.get("libraries", {}),
        automatic={"epochs": automatic.epochs, "learning_rate": automatic.learning_rate},
        models=model_digests(run.experiment),
    )


# ---- the two trainings


def _train_on_texts(run: Run, checkpoint: Path) -> tuple[NewClassifier, StudentFacts, UnknownStates | None]:
    from amalgam.stages.common.training.loop import training_of
    from amalgam.stages.common.training.losses import targets_loss
    from amalgam.stages.train_student import training

    student, objective = run.experiment.student, objective_inputs(run.experiment)
    facts, part = target_facts(run), load.train_part(run)
    new = load.load_new_classifier(run, student, facts["labels"], ENCODER)
    validation = _validation(run, new, facts["labels"])
    texts = load.tokenized_buckets(run, part, new, ["key"])
    data = training.targeted(
        texts, read_targets(run), held_out=held_out_share(run), unused=load_labels.excluded_texts(run)
    )
    targets = targets_loss(facts)
    if validation:
        selection = _by_accuracy(validation, new.pad_id)
    else:
        given = load_labels.given_labels(run)
        are_labelled = bool(given and given.by_key)
        selection = training.selection(data, new.pad_id, targets, facts, are_labelled=are_labelled)
    states = states_of(run, data.keys) if objective.states else []
    if objective.states == "tokens":
        training.check_lengths(states, data.learn)
    confidence = None
    if objective.weighs_by_domain:
        prefixes = [bucket.prefix for bucket in part.buckets]
        confidence = domain_confidences(run, data.keys, prefixes).astype("float32")
    config = run.experiment.objective
    phases = training.objective_phases(config, new, states, targets, seed=student.seed, confidence=confidence)
    settings = training_of(student, schedule(run), objective_rate=config.learning_rate)
    results = training.train(load.training_services(run), new, data.learn, phases, settings, selection, checkpoint)
    unknown = training.set_unknown_threshold(new, data, validation)
    evidence = largest_evidence(run, data.keys[: training.UNKNOWN_TEXTS]) if reads_evidence(run.experiment) else None
    new_texts = validation or data.held_out
    fitted = training.fit_unknown_states(new.model, data.learn, pad_id=new.pad_id, new=new_texts, evidence=evidence)
    about: StudentFacts = {
        **results,
        "labels": facts["labels"],
        "cut": data.truncated,
        "unreadable": unreadable_texts(Ragged.of(data.learn.tokens), new.tokenizer),
        "texts": len(data.learn),
        "unknown": unknown,
    }
    return new, about, fitted


def _train_on_embeddings(run: Run, checkpoint: Path) -> tuple[NewClassifier, StudentFacts, None]:
    from amalgam.stages.common.training.loop import training_of
    from amalgam.stages.common.training.losses import WeightedKL
    from amalgam.stages.train_student import training

    experiment, labels = run.experiment, list(load.label_space(run).names)
    student, temperature = experiment.student, experiment.targets.kd_temperature
    new = load.load_new_classifier(run, student, labels, ENCODER)
    validation, targets = _validation(run, new, labels), WeightedKL(temperature)
    teachers, tokens = _teacher_embeddings(run), experiment.pseudo_embeddings.tokens
    learned, selection = training.split_embeddings(
        *training.projected_embeddings(new, teachers, labels=len(labels), tokens=tokens, temperature=temperature),
        targets,
        held_out=held_out_share(run),
    )
    phases, settings = [("", targets)], training_of(student, schedule(run))
    selection = _by_accuracy(validation, new.pad_id) if validation else selection
    results = training.train(load.training_services(run), new, learned, phases, settings, selection, checkpoint)
    return new, {**results, "labels": labels, "cut": 0, "unreadable": 0, "texts": 0, "unknown": None}, None


def _teacher_embeddings(run: Run) -> Iterator[TeacherEmbeddings]:
    """Yields each teacher with its pseudo embeddings; one teacher is in memory at a time."""
    manifest, columns = run.result("make-embeddings"), load.label_space(run).columns
    made: EmbeddingFacts = manifest.facts
    files = {file.path: file for file in manifest.files}
    for teacher in load.teachers_of(run):
        classes = made["teachers"][teacher.name].values()
        paths = [run.store.verified_path(files[facts["file"]]) for facts in classes]
        yield load.teacher_loader(run).load(teacher, "fp32", passes=0), columns[teacher.name], paths


def _validation(run: Run, new: NewClassifier, labels: Sequence[str]) -> Examples | None:
    """Returns the labelled validation texts if they select the checkpoint."""
    from amalgam.stages.common.training.batches import labelled

    part = validation_part(run)
    if part is None:
        return None
    return labelled(load.tokenized_buckets(run, part, new, ["key", "label"]), labels).learn


def _by_accuracy(validation: Examples, pad_id: int) -> Selection:
    from amalgam.stages.common.training.run import Selection, accuracy_on

    return Selection("accuracy on labelled validation", accuracy_on(validation, pad_id))
