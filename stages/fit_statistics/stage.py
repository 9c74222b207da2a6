"""Stage fit-statistics: a unit is a teacher, its Gaussians and the scores of its own texts.

Needed if teachers are weighed by out-of-domain scores (`targets.uncertainty: rmd`, md, msp; stratanet).
All measures are fitted at once, so another one costs targets and student alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from amalgam.data.arrays import Array, Keys
from amalgam.data.keys import shown_names, text_key
from amalgam.data.lazy import np, pl
from amalgam.data.parquet import key_list, read_keys
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.console import counted
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit
from amalgam.pipeline.storage.facts import FactTypes
from amalgam.pipeline.storage.store import Record
from amalgam.stages.common.cached.load import cache_reader, states_of, states_of_teacher, statistics_family
from amalgam.stages.common.input_names import INPUT_NAMES
from amalgam.stages.common.load import generated_identity, generated_texts, reference_part, teachers_of
from amalgam.stages.objective_inputs import domain_measure
from amalgam.stages.target_methods import COMPARATIVE, TeacherPredictions

FEW = 5
"""Classes named in a note."""


class StatisticsFacts(TypedDict):
    """The texts that a teacher's statistics are fitted on, and the properties that the notes report."""

    texts: int
    which: str
    background: int
    absent_places: list[int]
    """Places of the labels without a text among the teacher's labels, whose names can change."""
    width: int
    shrinkage: list[float]
    same: list[bool]


class AllStatisticsFacts(TypedDict):
    teachers: dict[str, StatisticsFacts]


class FitStatistics(Stage):
    name = "fit-statistics"
    VERSION = 3  # a teacher's generated texts are those that pass the filters
    parallelism = "units"
    unit_label = "teachers"
    reads = ("generate", "read-corpus", "train-teachers", "cache-teachers", "cache-features")
    enabled_by = "choose an uncertainty that compares teachers (rmd, md, msp), or student.method: stratanet"
    facts = FactTypes(AllStatisticsFacts, StatisticsFacts)
    input_names = {r"reference_fraction": "targets.reference_fraction"} | INPUT_NAMES

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        return experiment.student.learns and domain_measure(experiment) is not None

    def identity(self, run: Run) -> Identity:
        """Returns the key of the states, which also determines the dropout-off logits."""
        for needed in ("cache-teachers", "cache-features"):
            run.result(needed)
        inputs: dict[str, object] = {
            "texts": reference_part(run).texts_digest,
            "teachers": {
                teacher.name: {
                    **statistics_family(run, teacher).key,
                    "labels": teacher.places if teacher.catch_all else len(teacher.labels),
                }
                for teacher in teachers_of(run)
            },
        }
        if run.experiment.has_catch_all:
            inputs["catch_all"] = "lowers the confidence in own texts"
        if run.experiment.generate:
            inputs |= generated_identity(run)
        return Identity({"reference_fraction": run.experiment.targets.reference_fraction}, inputs)

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        return [Unit(teacher.name, folder / "units", 1, teacher) for teacher in teachers_of(run)]

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the number of texts, counted once for each teacher."""
        return float(reference_part(run).texts * len(teachers_of(run) if units is None else units))

    def run_unit(self, run: Run, unit: Unit) -> None:
        from amalgam.stages.fit_statistics.fit import Statistics, most_confident

        teacher, buckets, share = unit.payload, reference_part(run).buckets, run.experiment.targets.reference_fraction
        keys = np.concatenate([read_keys(run.store.verified_path(bucket.file)) for bucket in buckets])
        outputs = cached_outputs(run, teacher.name, [bucket.prefix for bucket in buckets], keys)
        logits, catch_all = outputs[:, teacher.places], outputs[:, sorted(teacher.catch_all)]
        states = states_of_teacher(run, teacher, keys, statistics_family)
        is_own, which = generated_for(run, teacher.name, keys), "the most confident of those generated for it"
        if not is_own.any():
            is_own, which, share = ~is_own, "the most confident", share / len(teachers_of(run))
        groups = most_confident(logits, is_own, share, catch_all)
        statistics = Statistics.of(states, logits, groups)
        with run.store.draft(unit.folder, unit.name, ".safetensors") as draft:
            statistics.save(draft.folder / "statistics.safetensors")
            facts: StatisticsFacts = {
                "texts": int((groups >= 0).sum()),
                "which": which,
                "background": len(logits),
                "absent_places": [index for index in range(len(teacher.labels)) if index not in groups],
                "width": states.width,
                "shrinkage": [
                    round(max(float(gaussians.shrinkage) for gaussians in side), 4)
                    for side in zip(*statistics.pairs, strict=True)
                ],
                "same": (statistics.deviation == 0).all(axis=1).tolist(),
            }
            draft.facts = facts

    def finish(self, run: Run, records: Sequence[Record]) -> AllStatisticsFacts:
        return {"teachers": {record.name: record.facts for record in records}}

    def summary(self, run: Run, manifest: Record) -> Iterator[str]:
        for teacher, facts in manifest.facts["teachers"].items():
            yield f"{teacher}: {facts['texts']:,} of {facts['background']:,} texts, {facts['which']}"

    def notes(self, run: Run, manifest: Record) -> Iterator[str]:
        labels = {teacher.name: teacher.labels for teacher in teachers_of(run)}
        for teacher, facts in manifest.facts["teachers"].items():
            yield from notes(teacher, facts, labels[teacher])
        if run.experiment.generate and not run.experiment.generate.held_out:
            yield (
                "statistics of the teachers are of the very texts that the student learns from: "
                "generate.held_out=0.1 keeps some apart"
            )

    def describe(self, manifest: Record) -> str:
        return f"statistics of {', '.join(manifest.facts['teachers'])}"


def generated_for(run: Run, teacher: str, keys: Keys) -> Array:
    """Returns which texts of the reference part were generated for the teacher; all False where this is unknown."""
    settings = run.experiment.generate
    if settings is None or settings.reads_corpus:
        return np.zeros(len(keys), bool)
    table = generated_texts(run, reference_part(run).name)
    texts, names = (table.column(name).to_pylist() for name in ("text", "teacher"))
    own_keys = {text_key((text,)) for text, name in zip(texts, names, strict=True) if name == teacher}
    return np.array([key in own_keys for key in key_list(keys)], bool)


def cached_outputs(run: Run, teacher: str, prefixes: Sequence[str], keys: Keys) -> Array:
    """Returns a teacher's cached logits [n, outputs] with dropout off; `prefixes` are the buckets of the keys."""
    column = pl.Series("key", key_list(keys), pl.Binary)
    return cache_reader(run).outputs(teacher, prefixes, column).to_numpy()


def domain_confidences(run: Run, keys: Keys, prefixes: Sequence[str]) -> Array:
    """Returns [n, blocks, teachers]: each teacher's confidence by the text's distance from its domain."""
    from amalgam.stages.fit_statistics.fit import Statistics, confidences

    measure = str(domain_measure(run.experiment))
    teachers = teachers_of(run)
    files = {Path(file.path).stem.rsplit("-", 1)[0]: file for file in run.result("fit-statistics").files}
    fitted = [Statistics.load(run.store.verified_path(files[teacher.name])) for teacher in teachers]
    states = states_of(run, keys, statistics_family, prefixes)
    if measure != "msp":
        return confidences(fitted, states, None, measure)
    logits = [cached_outputs(run, teacher.name, prefixes, keys)[:, teacher.places] for teacher in teachers]
    return confidences(fitted, states, logits, measure)


def with_domain_confidence(
    run: Run, predictions: Sequence[TeacherPredictions], prefixes: Sequence[str], keys: Keys
) -> list[TeacherPredictions]:
    """Returns the predictions with confidences from the domain statistics of the last block of states."""
    columns = domain_confidences(run, keys, prefixes)[:, -1].T
    return [
        replace(teacher, confidence=pl.Series("confidence", np.ascontiguousarray(column)))
        for teacher, column in zip(predictions, columns, strict=True)
    ]


def notes(teacher: str, facts: StatisticsFacts, labels: Sequence[str]) -> list[str]:
    absent = [labels[place] for place in facts["absent_places"]]
    messages = []
    if absent:
        messages.append(f"teacher {teacher}: no text of {shown_names(absent, FEW)}; texts of it will look foreign")
    if facts["texts"] <= facts["width"]:
        shares = " and ".join(f"{share:.2f}" for share in facts["shrinkage"])
        messages.append(
            f"teacher {teacher}: {counted(facts['texts'], 'text')} for {facts['width']:,} dimensions; covariance "
            f"shrinkage is {shares} (own texts, all texts); more texts would help"
        )
    same = [measure for measure, flat in zip(COMPARATIVE, facts["same"], strict=True) if flat]
    if same:
        messages.append(
            f"teacher {teacher}: all its own texts have the same {', '.join(same)}: no effect on the weights"
        )
    return messages
