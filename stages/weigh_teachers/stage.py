"""Stage weigh-teachers: one unit, the weight of every teacher on every training text, from the cache alone.

Wanted where `targets.teacher_weights` is not MUKA's own, which looks at one text at a time: these look at all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.data.parquet import read_table, write_table
from amalgam.pipeline.config.schema import ExperimentConfig, Targets
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit, once
from amalgam.pipeline.storage.store import Record, StoredFile
from amalgam.stages.common.cached.load import (
    answer_reader,
    dtype_of,
    families_of,
    features_of,
    last_states,
    load_encoder,
    passes_counted,
    states_of,
)
from amalgam.stages.common.corpus import are_written
from amalgam.stages.common.load import generated_file, label_space, train_part
from amalgam.stages.target_methods import target_method

if TYPE_CHECKING:
    import pyarrow as pa

    from amalgam.stages.weigh_teachers.evidence import WeighInputs


class WeighTeachers(Stage):
    name = "weigh-teachers"
    VERSION = 7
    parallelism = "single"
    unit_label = "weighings"
    enabled_by = "choose weights that are estimated from all texts (student.method: amalgam)"

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        return experiment.student.learns and target_method(experiment.targets).weighs_together

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:
        generated = ("generate",) if are_written(experiment) else ()
        trained = ("train-teachers",) if experiment.train_teachers else ()
        features = ("cache-features",) if target_method(experiment.targets).reads_features else ()
        return (*generated, "read-corpus", *trained, "cache-teachers", *features)

    def identity(self, run: Run) -> Identity:
        targets = run.experiment.targets
        run.result("cache-teachers")
        inputs = {"texts": train_part(run).texts_digest, "families": families_of(run), "dtype": dtype_of(run)}
        inputs |= passes_counted(run)
        if targets.weight_signal == "all" and are_written(run.experiment):
            inputs["written"] = generated_file(run).sha256
        upstream = ["cache-features"] if target_method(targets).reads_features else []
        fingerprints = {stage: run.fingerprint(stage) for stage in upstream}
        return Identity({"targets": weight_settings(targets)}, inputs, fingerprints)

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:  # noqa: ARG002
        return [Unit("weights", folder)]

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:  # noqa: ARG002 - the base class's arguments
        """Returns the number of texts."""
        return float(train_part(run).texts)

    def run_unit(self, run: Run, unit: Unit) -> None:
        from amalgam.stages.weigh_teachers.weigh import weigh

        table, facts = weigh(weigh_inputs(run))
        with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
            write_table(table, draft.folder / "weights.parquet")
            draft.facts = facts

    def finish(self, run: Run, folder: Path, records: Sequence[Record]) -> dict[str, Any]:  # noqa: ARG002
        return dict(records[0].facts)

    def publish(self, run: Run, manifest: Record, *, fresh: bool) -> None:
        if not fresh:
            return
        shares = ", ".join(f"{teacher} {100 * share:.0f}%" for teacher, share in manifest.facts["shares"].items())
        run.console.say(f"  estimated shares of the texts: {shares}")
        for note in manifest.facts["notes"]:
            run.console.note(note)

    def describe(self, manifest: Record) -> str:
        weights = manifest.identity["config"]["targets"]["teacher_weights"]
        return f"{weights} weights of {', '.join(manifest.facts['shares'])}"


def weigh_inputs(run: Run) -> WeighInputs:
    """Resolves the inputs of the weights; states are read when they are needed."""
    from amalgam.stages.weigh_teachers.evidence import WeighInputs

    buckets = train_part(run).buckets
    generated = run.store.verified_path(generated_file(run)) if are_written(run.experiment) else None
    return WeighInputs(
        store=run.store,
        buckets=buckets,
        targets=run.experiment.targets,
        labels=label_space(run),
        answers=answer_reader(run),
        generated=generated,
        read_features=lambda: features_of(run, buckets),
        read_states=lambda keys: states_of(run, keys, last_states),
        name_states=lambda names: load_encoder(run).name_states(names),
    )


def weights_of(run: Run) -> pa.Table:
    """Returns the teacher weights in the order of the corpus's buckets and their keys."""
    return _read_weights(run, run.result("weigh-teachers").files[0])


@once
def _read_weights(run: Run, file: StoredFile) -> pa.Table:
    return read_table(run.store.verified_path(file))


def weight_settings(targets: Targets) -> dict[str, Any]:
    """Returns the target settings that weights depend on; the fallback uses confidences and their temperature."""
    settings = targets.model_dump(include={"teacher_weights", "weight_signal", "uncertainty", "temperature"})
    if target_method(targets).reads_neighbours:
        settings["neighbours"] = targets.neighbours
        if targets.weight_signal != "all":
            settings["smoothing_rounds"] = 1  # neighbours' means replace a single signal once
    return settings
