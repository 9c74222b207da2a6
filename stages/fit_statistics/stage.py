"""Stage fit-statistics: a unit is a teacher, its Gaussians and the scores of its own texts.

Wanted where teachers are weighed by how foreign a text is to each (`targets.uncertainty: rmd`, md, msp; stratanet).
All measures are fitted at once, so another one costs targets and student alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.data.keys import text_key
from amalgam.data.parquet import key_list, read_keys, read_table
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit
from amalgam.pipeline.storage.store import Record
from amalgam.stages.common.cached.load import answer_reader, state_of, states_of, statistics_states
from amalgam.stages.common.load import generated_file, reference_part, teachers_of, train_part
from amalgam.stages.common.teachers import ResolvedTeacher
from amalgam.stages.target_methods import COMPARATIVE, Evidence, measure_of

FEW = 5
"""Classes named in a note."""


if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from amalgam.stages.fit_statistics.fit import FitInputs

    Keys = NDArray[np.bytes_]


class FitStatistics(Stage):
    name = "fit-statistics"
    VERSION = 2
    parallelism = "units"
    unit_label = "teachers"
    enabled_by = "choose an uncertainty that compares teachers (rmd, md, msp), or student.method: stratanet"

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        return experiment.student.learns and measure_of(experiment) is not None

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:
        generated = ("generate",) if experiment.generate else ()
        trained = ("train-teachers",) if experiment.train_teachers else ()
        return (*generated, "read-corpus", *trained, "cache-teachers", "cache-features")

    def identity(self, run: Run) -> Identity:
        """Returns the key of the states, which also determines the dropout-off logits."""
        for needed in ("cache-teachers", "cache-features"):
            run.result(needed)
        inputs: dict[str, Any] = {
            "texts": reference_part(run).texts_digest,
            "teachers": {
                teacher.name: {**statistics_states(run, teacher).key, "labels": len(teacher.labels)}
                for teacher in teachers_of(run)
            },
        }
        if run.experiment.generate:
            inputs["written"] = generated_file(run).sha256
        return Identity({"reference_fraction": run.experiment.targets.reference_fraction}, inputs)

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        return [Unit(teacher.name, folder / "units", 1, teacher) for teacher in teachers_of(run)]

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the number of texts, counted once for each teacher."""
        return float(train_part(run).texts * len(teachers_of(run) if units is None else units))

    def run_unit(self, run: Run, unit: Unit) -> None:
        from amalgam.stages.fit_statistics.fit import fit

        statistics, facts = fit(_fit_inputs(run, unit.payload))
        with run.store.draft(unit.folder, unit.name, ".safetensors") as draft:
            statistics.save(draft.folder / "statistics.safetensors")
            draft.facts = dict(facts)

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


def _fit_inputs(run: Run, teacher: ResolvedTeacher) -> FitInputs:
    import numpy as np

    from amalgam.stages.fit_statistics.fit import FitInputs

    buckets = reference_part(run).buckets
    keys = np.concatenate([read_keys(run.store.verified_path(bucket.file)) for bucket in buckets])
    return FitInputs(
        labels=teacher.labels,
        logits=cached_logits(run, teacher.name, [bucket.prefix for bucket in buckets], keys),
        states=state_of(run, teacher, keys, statistics_states),
        generated_for=_generated_for(run, teacher.name, keys),
        teachers=len(teachers_of(run)),
        fraction=run.experiment.targets.reference_fraction,
    )


def _generated_for(run: Run, teacher: str, keys: Keys) -> NDArray[np.bool_]:
    """Returns which texts were generated for the teacher; all False where this is unknown."""
    import numpy as np

    settings = run.experiment.generate
    if settings is None or settings.source == "cross-domain":
        return np.zeros(len(keys), bool)
    table = read_table(run.store.verified_path(generated_file(run)), ["text", "teacher"])
    texts, names = (table.column(name).to_pylist() for name in table.column_names)
    own = {text_key((text,)) for text, name in zip(texts, names, strict=True) if name == teacher}
    return np.array([key in own for key in key_list(keys)], bool)


def cached_logits(run: Run, teacher: str, prefixes: Sequence[str], keys: Keys) -> NDArray[Any]:
    """Returns a teacher's cached logits [n, labels] with dropout off; `prefixes` are the buckets of the keys."""
    import polars as pl

    column = pl.Series("key", key_list(keys), pl.Binary)
    logits: NDArray[Any] = answer_reader(run).logits(teacher, prefixes, column).to_numpy()
    return logits


def domain_confidences(run: Run, keys: Keys, prefixes: Sequence[str]) -> NDArray[np.float64]:
    """Returns [n, blocks, teachers]: each teacher's confidence by the text's distance from its domain."""
    from amalgam.stages.fit_statistics.domain_scores import Statistics
    from amalgam.stages.fit_statistics.fit import confidences

    measure = str(measure_of(run.experiment))
    teachers = teachers_of(run)
    files = {Path(file.path).stem.rsplit("-", 1)[0]: file for file in run.result("fit-statistics").files}
    fitted = [Statistics.load(run.store.verified_path(files[teacher.name])) for teacher in teachers]
    states = states_of(run, keys, statistics_states)
    logits = [cached_logits(run, teacher.name, prefixes, keys) for teacher in teachers] if measure == "msp" else None
    return confidences(fitted, states, logits, measure)


def with_domain_confidence(
    run: Run, evidence: Sequence[Evidence], prefixes: Sequence[str], keys: Keys
) -> list[Evidence]:
    """Returns the evidence with each teacher's confidence from its domain statistics, of the last block of states."""
    import numpy as np
    import polars as pl

    columns = domain_confidences(run, keys, prefixes)[:, -1].T
    return [
        replace(teacher, confidence=pl.Series("confidence", np.ascontiguousarray(column)))
        for teacher, column in zip(evidence, columns, strict=True)
    ]


def notes(teacher: str, facts: dict[str, Any]) -> list[str]:
    absent = facts["absent"]
    messages = []
    if absent:
        more = f" and {len(absent) - FEW} more" if len(absent) > FEW else ""
        messages.append(f"teacher {teacher}: no text of {', '.join(absent[:FEW])}{more}; texts of it will look foreign")
    if facts["texts"] <= facts["width"]:
        shares = " and ".join(f"{share:.2f}" for share in facts["shrinkage"])
        messages.append(
            f"teacher {teacher}: {facts['texts']:,} texts for {facts['width']:,} dimensions; covariance shrinkage is "
            f"{shares} (own texts, all texts); more texts would help"
        )
    same = [measure for measure, flat in zip(COMPARATIVE, facts["same"], strict=True) if flat]
    if same:
        messages.append(f"teacher {teacher}: {', '.join(same)} is the same for all its own texts and has no effect")
    return messages
