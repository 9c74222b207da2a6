"""Stage train-teachers: a unit is one teacher, identified by its encoder, its labels and its training texts.

Co-trained teachers are separate units; the first missing one trains all of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.data.arrays import Array, Keys, held_out_keys
from amalgam.data.keys import cut_in_groups, overlaps, shown_names
from amalgam.data.lazy import np, pa, pc
from amalgam.data.parquet import key_array
from amalgam.pipeline.config.schema import ExperimentConfig, Student
from amalgam.pipeline.config.schema import TrainTeachers as Settings
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import DataError, ExperimentError
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit, once
from amalgam.pipeline.storage.facts import FactTypes
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.store import Record
from amalgam.pipeline.user_paths import check_writable
from amalgam.stages.common import load, load_labels
from amalgam.stages.common.corpus import Part, read_bucket, tables
from amalgam.stages.common.deliveries import TEACHERS, Mark, check_deliverable, check_target, deliver, named
from amalgam.stages.common.input_names import INPUT_NAMES
from amalgam.stages.common.intervals import bounds, interval, percent
from amalgam.stages.common.models.model_folder import full_attention, reads_padding
from amalgam.stages.common.models.resolve import hidden_size, least_bytes_of
from amalgam.stages.common.training import schedule as schedules
from amalgam.stages.common.training.checkpoint_files import CHECKPOINT, resume_point
from amalgam.stages.common.training.schedule import Schedule, TeacherFacts, TeachersFacts

if TYPE_CHECKING:
    from amalgam.stages.train_teachers.training import Encoders


TEACHER_ENCODER = "train_teachers.encoder"
NOT_IDENTITY = {"encoder", "revision", "texts", "limit", "groups", "co_train"}


class TrainTeachers(Stage):
    name = "train-teachers"
    VERSION = 4  # the saved tokenizer gives no token types that were not learned; one pad token
    parallelism = "collective"
    unit_label = "teachers"
    reads = ("read-corpus",)
    sections = ("train_teachers",)
    enabled_by = "add a `train_teachers` section instead of `teachers`; `amalgam init` writes a file with an example"
    facts = FactTypes(TeachersFacts, TeacherFacts)
    input_names = {
        r"groups(\..+)?": r"train_teachers.groups\1",
        r"texts": "labelled texts of the teachers",
    } | INPUT_NAMES

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        return experiment.train_teachers is not None

    def resolve_inputs(self, run: Run) -> None:
        for settings, where in encoders_of(run).values():
            load.encoder_files(run, settings, where)
        check_gold_of_groups(run)

    def check_output(self, run: Run) -> None:
        check_writable(run.base / TEACHERS, "change its permissions")
        for name in groups_of(run):
            check_deliverable(run.base, TEACHERS, name)

    def identity(self, run: Run) -> Identity:
        inputs = {
            "encoder": _encoder_digests(run),
            "texts": _labelled_part(run).labels_digest,
            "groups": groups_of(run),
        }
        settings = settings_of(run).model_dump(exclude=NOT_IDENTITY) | _schedules(run)
        return Identity({"train_teachers": settings}, inputs)

    def chosen(self, run: Run) -> dict[str, object]:
        return schedules.chosen_fields("train_teachers", settings_of(run), _schedules(run))

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        return [
            Unit(name, run.store.folder(self.name, "teacher-" + _teacher_fingerprint(run, name, labels)), 1, labels)
            for name, labels in groups_of(run).items()
        ]

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the number of examples over all epochs."""
        names = groups_of(run) if units is None else [unit.name for unit in units]
        return float(sum(schedule(run, name).epochs * texts_of(run, name) for name in names))

    def least_bytes(self, run: Run, units: Sequence[Unit] | None) -> tuple[int, int]:
        encoders = encoders_of(run)
        _encoder_digests(run)  # raises if the next line would send a request
        size = min(least_bytes_of(load.encoder_files(run, settings, where)) for settings, where in encoders.values())
        count = len(groups_of(run)) if units is None else len(units)
        return count * size, count * size

    def resumes(self, run: Run, unit: Unit) -> tuple[str, float]:
        words, share = resume_point(run.store.root, unit.folder)
        return words and f"{unit.name} {words}", share

    def run_units(self, run: Run, units: Sequence[Unit]) -> None:
        """Trains each teacher; co-trained teachers are all results of the first unit's training."""
        trainings = units[:1] if settings_of(run).co_train else units
        super().run_units(run, trainings)
        run.console.advance(len(units) - len(trainings))

    def run_unit(self, run: Run, unit: Unit) -> None:
        from amalgam.stages.common.models.loading import save_pretrained_folder
        from amalgam.stages.common.training.loop import training_of
        from amalgam.stages.train_teachers.training import co_train, train

        settings, checkpoint = settings_of(run), run.store.own_folder(unit.folder / CHECKPOINT)
        method, units = (co_train, self.units(run, unit.folder)) if settings.co_train else (train, [unit])
        training = training_of(settings, schedule(run, unit.name))
        trained = method(_encoders(run, unit), unit.payload, training, load.training_services(run), checkpoint)
        if run.share.is_leader:
            for trained_unit in units:
                learned, facts = trained[trained_unit.name]
                with run.store.draft(trained_unit.folder, trained_unit.name) as draft:
                    save_pretrained_folder(learned.model, learned.tokenizer, draft.folder, max_tokens=learned.limit)
                    draft.facts = facts
            shutil.rmtree(checkpoint, ignore_errors=True)

    def finish(self, run: Run, records: Sequence[Record]) -> TeachersFacts:
        return {"teachers": {record.name: record.facts for record in records}}

    def summary(self, run: Run, manifest: Record) -> Iterator[str]:
        for name, facts in manifest.facts["teachers"].items():
            yield f"{name}: {shown_names(facts['labels'])} -> teachers/{name}"
            yield f"  {_accuracy(facts)}; {schedules.kept(facts)} ({facts['selected_by']})"

    def publish(self, run: Run, manifest: Record) -> None:
        for name in manifest.facts["teachers"]:
            files = named(load.trained_files(run, name))
            mark = Mark(next(iter(files.values())).path.split("/")[-2], files, {})
            deliver(load.delivery_services(run), check_target(run.base, TEACHERS, name, files), mark)

    def notes(self, run: Run, manifest: Record) -> Iterator[str]:
        yield from ungrouped_labels(run)
        for name, facts in manifest.facts["teachers"].items():
            yield from (f"{name}: {note}" for note in schedules.few_steps(facts, "train_teachers"))

    def recomputed(self, unit: Record | None, teacher: str) -> str:
        return f"trained again: teacher {unit.name}" if unit else "trained again: one teacher"

    def describe(self, manifest: Record) -> str:
        return ", ".join(f"{name} ({_accuracy(facts)})" for name, facts in manifest.facts["teachers"].items())


def _accuracy(facts: Mapping[str, Any]) -> str:
    accuracy, held_out = facts["best_score"], facts["held_out"]
    if not held_out:
        return f"accuracy {percent(accuracy)} on its own training texts, as none are held out"
    measured = f"accuracy {percent(accuracy)} on {counted(held_out, 'held-out text')}"
    if facts["selected_by"] == schedules.HELD_OUT_ACCURACY:  # the interval of a maximum would be too high
        return f"{measured}, the best of the evaluations"
    low, high = interval(accuracy, held_out)
    return f"{measured} (95 % interval {bounds(low, high)})"


def learned_by_teachers(run: Run, prefixes: Sequence[str], keys: Keys) -> Array:
    """Returns which texts of the buckets with these prefixes the trained teachers learned, without held-out ones."""
    if run.experiment.train_teachers is None:
        return np.zeros(len(keys), bool)
    part = _labelled_part(run)
    is_known = np.full(len(keys), part.name == "train")
    for bucket in part.buckets if part.name == "teachers" else ():
        if any(overlaps(bucket.prefix, prefix) for prefix in prefixes):
            is_known |= np.isin(keys, key_array(read_bucket(run.store, bucket, ["key"]).column("key")))
    return is_known & ~held_out_keys(keys, schedules.TEACHER_HELD_OUT)


# ---- inputs


def settings_of(run: Run) -> Settings:
    if run.experiment.train_teachers is None:
        raise AssertionError("train-teachers is not needed")  # is_needed decides
    return run.experiment.train_teachers


def encoders_of(run: Run) -> dict[str, tuple[Settings, str]]:
    """Returns settings with one encoder each and their field; by teacher if teachers are co-trained."""
    settings = settings_of(run)
    return {
        name: (settings.model_copy(update={"encoder": encoder}), f"train_teachers.co_train.{name}")
        for name, encoder in (settings.co_train or {}).items()
    } or {"": (settings, TEACHER_ENCODER)}


def groups_of(run: Run) -> dict[str, list[str]]:
    """Returns each teacher's labels."""
    settings, outside = settings_of(run), run.experiment.corpus.unknown
    known_labels = [label for label in _labelled_part(run).labels if label != outside]
    if len(known_labels) < 2:
        what = f"the training texts of the teachers have {counted(len(known_labels), 'label')}; a teacher needs two"
        fix = "set corpus.label to the column of their labels, or add texts of other labels"
        raise DataError(what, where="corpus.label", fix=fix)
    groups = settings.groups or dict.fromkeys(settings.co_train or {}, known_labels)
    if isinstance(groups, int):
        if groups * 2 > len(known_labels):
            raise ExperimentError(
                f"{counted(len(known_labels), 'label')} cannot be divided into {groups} groups of at least two",
                where="train_teachers.groups",
                fix=f"set at most {len(known_labels) // 2} groups, or name: [labels] for each teacher",
            )
        return {f"teacher-{index}": labels for index, labels in enumerate(cut_in_groups(known_labels, groups), 1)}
    for name, labels in groups.items():
        unknown = sorted(set(labels) - set(known_labels))
        if unknown or len(labels) < 2:
            what = (
                f"{shown_names(unknown)} {'is not a label' if len(unknown) == 1 else 'are not labels'} of the texts"
                if unknown
                else "a teacher needs at least two labels"
            )
            where, fix = f"train_teachers.groups.{name}", f"use these labels: {shown_names(known_labels)}"
            raise ExperimentError(what, where=where, fix=fix)
    return {name: list(labels) for name, labels in groups.items()}


def check_gold_of_groups(run: Run) -> None:
    """Refuses gold labels that no teacher will have, before any teacher is trained."""
    named = load.labels_by_teacher(run)
    if len(named) == len(run.experiment.teachers):
        labels = [label for of_teacher in (*groups_of(run).values(), *named.values()) for label in of_teacher]
        load_labels.gold_notes(run, lambda: labels)  # cache-teachers shows the notes


def ungrouped_labels(run: Run) -> Iterator[str]:
    """Yields a note on the labels that no teacher learns."""
    grouped = {label for labels in groups_of(run).values() for label in labels}
    counts = _labelled_part(run).facts["labels"]
    left = {label: count for label, count in counts.items() if label not in {*grouped, run.experiment.corpus.unknown}}
    if left:
        labels, texts = counted(len(left), "label", "is", "are"), counted(sum(left.values()), "text")
        yield f"{labels} in no group of train_teachers.groups: {shown_names(left)}; no teacher learns their {texts}"


@once
def schedule(run: Run, name: str) -> Schedule:
    """Returns a teacher's epochs and learning rate, chosen by texts, labels and encoder where the file sets none."""
    settings, where = next(iter(encoders_of(run).values()))
    width, labels = hidden_size(load.encoder_files(run, settings, where)), len(groups_of(run)[name])
    keys = partial(_keys_of, run, name)
    texts = schedules.learned_texts(texts_of(run, name), schedules.TEACHER_HELD_OUT, keys)
    return schedules.schedule_of(settings, texts=texts, labels=labels, width=width)


def texts_of(run: Run, name: str) -> int:
    """Returns the number of labelled texts with a label of this teacher."""
    counts = _labelled_part(run).facts["labels"]
    return sum(int(counts[label]) for label in groups_of(run)[name])


def _keys_of(run: Run, name: str) -> Keys:
    """Returns the keys of the labelled texts with a label of this teacher."""
    rows = pa.concat_tables(tables(run.store, _labelled_part(run), ["key", "label"]))
    is_own = pc.is_in(rows.column("label"), value_set=pa.array(groups_of(run)[name], pa.string()))
    return key_array(rows.filter(is_own).column("key"))


def _schedules(run: Run) -> dict[str, object]:
    """Returns each value of the schedules, or one by teacher where they differ."""
    by_teacher = {name: asdict(schedule(run, name)) for name in groups_of(run)}
    fields: dict[str, object] = {}
    for field in next(iter(by_teacher.values())):
        values = {name: values[field] for name, values in by_teacher.items()}
        fields[field] = values if len(set(values.values())) > 1 else next(iter(values.values()))
    return fields


def _encoders(run: Run, unit: Unit) -> Encoders:
    part, encoders = _labelled_part(run), {}
    for name, (settings, where) in encoders_of(run).items():
        new = load.load_new_classifier(run, settings, unit.payload, where)
        encoders[name or unit.name] = new, load.tokenized_buckets(run, part, new, ["key", "label"])
    return encoders


def _labelled_part(run: Run) -> Part:
    part = load.part_of(run, "teachers") or load.part_of(run, "train")
    if part is None or part.labels_digest is None:
        raise DataError(
            "the training texts of the teachers have no labels",
            where="corpus.label",
            fix="set corpus.label to the column of their labels, or name trained teachers instead of train_teachers",
        )
    return part


def _encoder_digests(run: Run) -> Any:
    digests = {name: trained_digest(run, settings, where) for name, (settings, where) in encoders_of(run).items()}
    # Co-trained teachers read padding for longer than single ones did.
    return digests.get("") or {name: digest.replace(" unpadded", " each unpadded") for name, digest in digests.items()}


def trained_digest(run: Run, settings: Student | Settings, where: str) -> str:
    """Returns the encoder's digest for the identity of a training.

    It marks an encoder whose texts are not padded, or whose attention is no longer sparse.
    """
    digest = load.encoder_digest(run, settings, where)
    config = load.encoder_files(run, settings, where).config
    attention = " full attention" if full_attention(config, settings.max_tokens) else ""
    return f"{digest}{' unpadded' if reads_padding(config) else attention}"


def _teacher_fingerprint(run: Run, name: str, labels: Sequence[str]) -> str:
    """Returns a teacher's fingerprint; it includes the name only if teachers are co-trained."""
    settings = settings_of(run).model_dump(exclude=NOT_IDENTITY) | asdict(schedule(run, name))
    content = [_encoder_digests(run), _labelled_part(run).labels_digest]
    names = [name] if settings_of(run).co_train else []
    return fingerprint([TrainTeachers.VERSION, settings, list(labels), content, *names, *run.versions.values()])
