"""Stage train-student: one unit, the student, trained on the targets that build-targets made."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit
from amalgam.pipeline.execution.versions import library_versions
from amalgam.pipeline.storage.store import Record
from amalgam.stages.common.load import encoder_digest, encoder_files, part_of, teachers_of, train_part
from amalgam.stages.common.models.output_folder import check_place, place
from amalgam.stages.common.reference_texts import measure_of

ENCODER = "student.encoder"

NOT_IDENTITY = {"name", "method", "encoder", "revision", "accumulate", "select"}
"""A name is only a place, a method only a preset, an encoder is known by its content, parts of a batch add up, and
what `select: auto` means here stands among the inputs."""

FEW_STEPS = 200
"""Of learning: fine-tuning a pre-trained encoder usually takes some hundreds."""


class TrainStudent(Stage):
    name = "train-student"
    VERSION = 1
    parallelism = "collective"
    unit_label = "students"
    help = "Stage 3: train the student from the cached targets. No teacher runs."
    examples = (
        "amalgam train-student",
        "amalgam train-student student.epochs=5 student.name=longer",
        "amalgam train-student execution.trackers=[tensorboard]",
    )
    sections = ("student", "objective")
    enabled_by = "choose a student.method that trains a student"

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        return experiment.student.learns

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:
        trained = ("train-teachers",) if experiment.train_teachers else ()
        states = ("cache-features",) if experiment.objective.states else ()
        statistics = ("fit-statistics",) if experiment.objective.name == "stratanet" else ()
        taught_by = "build-targets" if experiment.reads_texts else "make-embeddings"
        return ("read-corpus", *trained, *states, *statistics, taught_by)

    def resolve_inputs(self, run: Run) -> None:
        check_place(run.base, "students", run.experiment.student.name)
        encoder_files(run, run.experiment.student, ENCODER)

    def identity(self, run: Run) -> Identity:
        student = run.experiment.student
        inputs: dict[str, Any] = {"encoder": encoder_digest(run, student, ENCODER), "select": _select(run)}
        if inputs["select"] == "validation":
            validation = part_of(run, "validation")
            inputs["validation"] = validation.labels_digest if validation else None
        unsaid = {"dropout"} if student.dropout is None else set()
        config: dict[str, Any] = {"student": student.model_dump(exclude=NOT_IDENTITY | unsaid)}
        taught_by = "build-targets" if run.experiment.reads_texts else "make-embeddings"
        upstream = {taught_by: run.fingerprint(taught_by)}
        said = run.experiment.objective
        if not run.experiment.reads_texts:
            config["targets"] = {"kd_temperature": run.experiment.targets.kd_temperature}
            inputs["knows"] = {teacher.name: list(teacher.labels) for teacher in teachers_of(run)}
        if said.read:
            config["objective"] = said.model_dump(include=said.read)
        if said.read_states:
            upstream["cache-features"] = run.fingerprint("cache-features")
        if said.name == "stratanet":
            upstream["fit-statistics"] = run.fingerprint("fit-statistics")
            config["confidence"] = measure_of(run.experiment)
        return Identity(config, inputs, upstream)

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:  # noqa: ARG002
        return [Unit("student", folder)]

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the number of examples over all epochs."""
        experiment = run.experiment
        if experiment.reads_texts:
            examples = train_part(run).texts
        else:
            examples = experiment.pseudo_embeddings.count * sum(len(teacher.labels) for teacher in teachers_of(run))
        return float(examples * experiment.student.epochs * (1 if units is None else len(units)))

    def run_unit(self, run: Run, unit: Unit) -> None:
        from amalgam.stages.common.models.loading import save_pretrained_folder
        from amalgam.stages.train_student.from_embeddings import train_without_texts
        from amalgam.stages.train_student.training import train

        learned, facts = (train if run.experiment.reads_texts else train_without_texts)(run, unit.folder / "checkpoint")
        if run.share.is_leader:
            with run.store.draft(unit.folder, unit.name) as draft:
                save_pretrained_folder(learned.model, learned.tokenizer, draft.folder)
                draft.facts, draft.made = facts, {"libraries": library_versions()}
            shutil.rmtree(unit.folder / "checkpoint", ignore_errors=True)

    def finish(self, run: Run, folder: Path, records: Sequence[Record]) -> dict[str, Any]:  # noqa: ARG002
        return dict(records[0].facts)

    def publish(self, run: Run, manifest: Record, *, fresh: bool) -> None:
        said = run.experiment.student
        about = {
            "teachers": {teacher.name: list(teacher.labels) for teacher in teachers_of(run)},
            "max_tokens": said.max_tokens,
        }
        placed = place(student_folder(run), run.base, "students", said.name, run.fingerprint(self.name), about)
        if fresh:
            facts = manifest.facts
            run.console.say(f"  best of {facts['steps']:,} steps: {facts['best_step']:,} ({facts['selected_by']})")
            if facts["steps"] < FEW_STEPS:
                run.console.note(
                    f"{facts['steps']:,} steps are few for an encoder to learn in: more texts, more student.epochs "
                    f"(now {said.epochs}) or a higher student.learning_rate (now {said.learning_rate:g}) may help"
                )
        run.console.say(f"  student: {placed.relative_to(run.base)}")

    def describe(self, manifest: Record) -> str:
        facts = manifest.facts
        return f"{len(facts['labels'])} labels, best of {facts['steps']:,} steps by {facts['selected_by']}"


def student_folder(run: Run) -> Path:
    """The Hugging Face folder in the store, every file checked."""
    return run.store.verified_folder(run.result("train-student").files)


def _select(run: Run) -> str:
    wanted = run.experiment.student.select
    return wanted if wanted != "auto" else ("validation" if run.experiment.corpus.validation else "held-out")
