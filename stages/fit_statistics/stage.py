"""Stage fit-statistics: a unit is a teacher, its Gaussians and the scores of its own texts.

Wanted where teachers are weighed by how foreign a text is to each (`targets.uncertainty: rmd`, md, msp; stratanet).
All measures are fitted at once, so another one costs targets and student alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit
from amalgam.pipeline.storage.store import Record
from amalgam.stages.common.load import generated_file, reference_part, teachers_of, train_part
from amalgam.stages.common.reference_texts import MEASURES, measure_of
from amalgam.stages.common.states.load import statistics_states

FEW = 5
"""Classes named in a note."""


class FitStatistics(Stage):
    name = "fit-statistics"
    VERSION = 2
    parallelism = "units"
    unit_label = "teachers"
    help = "Optional: fit statistics of each teacher's own texts, to score how foreign a text is."
    examples = ("amalgam fit-statistics", "amalgam fit-statistics targets.uncertainty=rmd")
    enabled_by = "choose an uncertainty that compares teachers (rmd, md, msp), or student.method: stratanet"

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        return experiment.student.learns and measure_of(experiment) is not None

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:
        generated = ("generate",) if experiment.generate else ()
        trained = ("train-teachers",) if experiment.train_teachers else ()
        return (*generated, "read-corpus", *trained, "cache-teachers", "cache-features")

    def identity(self, run: Run) -> Identity:
        """Dropout-off logits and states are functions of the same: what the key of the states says."""
        for needed in ("cache-teachers", "cache-features"):
            run.result(needed)
        inputs: dict[str, Any] = {
            "texts": reference_part(run).texts_digest,
            "teachers": {
                known.name: {**statistics_states(run, known).key, "labels": len(known.labels)}
                for known in teachers_of(run)
            },
        }
        if run.experiment.generate:
            inputs["written"] = generated_file(run).sha256
        return Identity({"reference_fraction": run.experiment.targets.reference_fraction}, inputs)

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        return [Unit(known.name, folder / "units", 1, known) for known in teachers_of(run)]

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the number of texts, counted once for each teacher."""
        return float(train_part(run).texts * len(teachers_of(run) if units is None else units))

    def run_unit(self, run: Run, unit: Unit) -> None:
        from amalgam.stages.fit_statistics.fit import fit

        found, facts = fit(run, unit.payload)
        with run.store.draft(unit.folder, unit.name, ".safetensors") as draft:
            found.save(draft.folder / "statistics.safetensors")
            draft.facts = facts

    def finish(self, run: Run, folder: Path, records: Sequence[Record]) -> dict[str, Any]:  # noqa: ARG002
        return {"teachers": {record.name: dict(record.facts) for record in records}}

    def publish(self, run: Run, manifest: Record, *, fresh: bool) -> None:
        if not fresh:
            return
        for teacher, facts in manifest.facts["teachers"].items():
            run.console.say(f"  {teacher}: {facts['texts']:,} of {facts['background']:,} texts, {facts['which']}")
            for note in notes(teacher, facts):
                run.console.note(note)
        if run.experiment.generate and not run.experiment.generate.held_out:
            run.console.note(
                "statistics of the teachers are of the very texts that the student learns from: "
                "generate.held_out=0.1 keeps some apart"
            )

    def describe(self, manifest: Record) -> str:
        return f"statistics of {', '.join(manifest.facts['teachers'])}"


def notes(teacher: str, facts: dict[str, Any]) -> list[str]:
    absent = facts["absent"]
    found = []
    if absent:
        more = f" and {len(absent) - FEW} more" if len(absent) > FEW else ""
        found.append(f"teacher {teacher}: no text of {', '.join(absent[:FEW])}{more}; texts of it will look foreign")
    if facts["texts"] <= facts["width"]:
        shares = " and ".join(f"{share:.2f}" for share in facts["shrinkage"])
        found.append(
            f"teacher {teacher}: {facts['texts']:,} texts for {facts['width']:,} dimensions; covariances are the "
            f"identity to a share of {shares} (its own, all texts); more texts would tell more"
        )
    same = [measure for measure, flat in zip(MEASURES, facts["same"], strict=True) if flat]
    if same:
        found.append(f"teacher {teacher}: {', '.join(same)} does not differ among its own texts, and says nothing")
    return found
