"""Stage build-targets: a unit is a few neighbouring buckets of training texts; memory does not grow with the corpus.

The summary counts how often the chosen teacher has the gold label. It informs; only targets of gold labels depend on
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, TypedDict

from amalgam.data.arrays import Array, RowNumbers, width
from amalgam.data.keys import LabelSpace
from amalgam.data.lazy import np, pa, pl
from amalgam.data.parquet import TARGETS, arrow_schema, key_array, read_table, write_table
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import DamagedError, DataError, WorkError
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit
from amalgam.pipeline.storage.facts import FactTypes
from amalgam.pipeline.storage.store import MANIFEST, Record
from amalgam.stages.common import load, load_labels
from amalgam.stages.common.cached import load as cached
from amalgam.stages.common.corpus import Bucket, even_groups, group_name, read_bucket
from amalgam.stages.common.given_labels import GivenLabels
from amalgam.stages.common.input_names import INPUT_NAMES
from amalgam.stages.common.intervals import percent
from amalgam.stages.fit_statistics.stage import with_domain_confidence
from amalgam.stages.methods import method_of
from amalgam.stages.objective_inputs import reads_texts
from amalgam.stages.target_methods import (
    LossFacts,
    TargetBatch,
    TargetInputs,
    TeacherPredictions,
    gives_label_distributions,
    target_method,
)
from amalgam.stages.weigh_teachers.stage import labelled_weights_of, weights_of

BINS = 10
"""Number of bins of the weights in the summary."""

READ = ("key", "target", "weight", "teacher", "margin")
"""Columns that later stages read; pyarrow before 26 cannot read the null arrays of `confidence`."""


class TargetSummary(TypedDict):
    """Sums over the texts; without teachers or gold labels the last ones are empty."""

    texts: int
    weight_sum: float
    weight_bins: list[int]
    chosen: dict[str, int]
    selection: dict[str, list[int]]


class TargetMeaning(LossFacts):
    """The meaning of the columns of the targets, and the loss that reads them."""

    labels: list[str]
    knows: dict[str, list[str]]
    gold: bool


class TargetFacts(TargetMeaning):
    """The manifest's facts."""

    method: str
    summary: TargetSummary


class BuildTargets(Stage):
    name = "build-targets"
    VERSION = 3
    parallelism = "units"
    unit_label = "texts"
    sections = ("targets", "labels")
    enabled_by = "choose a student.method that trains a student from texts"
    facts = FactTypes(TargetFacts, TargetSummary)
    input_names = {r"labels(\.\d+)?": "label names", r"method_version": "code of targets.mode"} | INPUT_NAMES
    at_once = 2

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        return experiment.student.learns and reads_texts(experiment)

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:
        method = target_method(experiment.targets)
        answers = ("cache-teachers",) if method.reads_teachers else ()
        by_domain = ("cache-features", "fit-statistics") if method.weighs_by_domain else ()
        weighed = ("weigh-teachers",) if method.estimates_weights else ()
        return ("read-corpus", "train-teachers", *answers, *by_domain, *weighed)

    def resolve_inputs(self, run: Run) -> None:
        if not load.teachers_of(run):  # with teachers, cache-teachers has checked it
            load_labels.check_gold(run)

    def identity(self, run: Run) -> Identity:
        """Returns the inputs read from cache-teachers, not its fingerprint: new test parts or passes change nothing."""
        targets, part = run.experiment.targets, load.train_part(run)
        method = target_method(targets)
        inputs: dict[str, object] = {"texts": part.texts_digest, "labels": list(load.label_space(run).names)}
        if method.reads_gold:
            inputs["gold"] = part.labels_digest
        if method.reads_teachers:
            run.result("cache-teachers")
            inputs["families"] = cached.families_of(run)
            inputs["knows"] = load.known_labels(run)
            inputs["dtype"] = cached.dtype_of(run)
            inputs |= cached.passes_identity(run) if method.reads_passes else {}
        inputs |= {"method_version": method.version} if method.version > 1 else {}
        inputs |= load_labels.labels_identity(run)
        upstream = ["weigh-teachers"] * method.estimates_weights + ["fit-statistics"] * method.weighs_by_domain
        fingerprints = {stage: run.fingerprint(stage) for stage in upstream}
        return Identity({"targets": targets.model_dump(include=method.fields)}, inputs, fingerprints)

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        return [
            Unit(group_name(buckets), folder / "units", sum(bucket.rows for bucket in buckets), buckets)
            for buckets in even_groups(load.train_part(run).buckets, self.at_once)
        ]

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        return float(load.train_part(run).texts if units is None else sum(unit.size for unit in units))

    def run_unit(self, run: Run, unit: Unit) -> None:
        rows = pa.concat_tables(read_bucket(run.store, bucket, ["key", "label"]) for bucket in unit.payload)
        batch = _targets(run, unit.payload, rows)
        _check(run, batch, rows)
        with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
            write_table(_table(rows, batch, len(load.label_space(run).columns)), draft.folder / "unit.parquet")
            draft.facts = summarise(batch, _gold_outside_labels(run, rows), load.label_space(run))

    def finish(self, run: Run, records: Sequence[Record]) -> TargetFacts:
        return {
            **_meaning(run),
            "method": method_of(run.experiment.targets.model_dump()),
            "summary": reduce(_added, [record.facts for record in records]),  # in the order of the buckets
        }

    def summary(self, run: Run, manifest: Record) -> list[str]:
        return summary_lines(manifest.facts["summary"], run.experiment.targets.mode)

    def describe(self, manifest: Record) -> str:
        return f"{manifest.facts['method']}, {counted(manifest.facts['summary']['texts'], 'text')}"


def target_facts(run: Run) -> TargetFacts:
    """Returns the manifest's facts; quarantines a manifest of other labels or of another loss."""
    facts: TargetFacts = run.result("build-targets").facts
    for name, value in _meaning(run).items():
        if facts.get(name) != value:
            path = run.store.folder("build-targets", run.fingerprint("build-targets")) / MANIFEST
            run.store.quarantine(path)
            what = f"{run.store.inside(path)} has other {name} than the experiment and was quarantined"
            raise DamagedError(what, path=str(path), where=run.store.where(path))
    return facts


def _meaning(run: Run) -> TargetMeaning:
    targets, space = run.experiment.targets, load.label_space(run)
    method = target_method(targets)
    return {
        "labels": list(space.names),
        "knows": {teacher: [space.names[place] for place in places] for teacher, places in space.columns.items()},
        "objective": method.loss,
        "gold": method.reads_gold,
        "columns": [list(places) for places in space.columns.values()],
        "student_temperature": targets.kd_temperature if method.tempered else 1.0,
    }


def read_targets(run: Run) -> Iterator[pa.Table]:
    """Yields the columns READ of the targets, bucket by bucket of the training texts, in key order."""
    files = sorted(run.result("build-targets").files, key=lambda file: file.name)
    run.store.backend.fetch([file.path for file in files])
    left = iter(files)
    rest: pa.Table | None = None
    for bucket in load.train_part(run).buckets:
        while rest is None or rest.num_rows < bucket.rows:
            table = read_table(run.store.verified_path(next(left)), READ)
            rest = table if rest is None or not rest.num_rows else pa.concat_tables([rest, table])
        yield rest.slice(0, bucket.rows).combine_chunks()
        rest = rest.slice(bucket.rows)


def check_train_gold(run: Run) -> None:
    """Refuses training texts without a gold label if the targets are gold labels."""
    if target_method(run.experiment.targets).reads_gold:
        part = load.train_part(run)
        _refuse_unlabelled(run, part.texts - sum(part.facts["labels"].values()))


def _refuse_unlabelled(run: Run, texts: int) -> None:
    """Raises DataError for this number of training texts without a gold label, if it is not 0."""
    if texts:
        what = f"{counted(texts, 'training text', 'has', 'have')} no gold label"
        fix = "label them, or leave them out of corpus.train"
        raise DataError(what, where=f"targets.mode: {run.experiment.targets.mode} learns from gold labels", fix=fix)


def _targets(run: Run, buckets: Sequence[Bucket], rows: pa.Table) -> TargetBatch:
    space, method = load.label_space(run), target_method(run.experiment.targets)
    gold = pl.Series("label", rows.column("label"), dtype=pl.String)
    if method.reads_gold:  # the corpus may have been read when no label was needed
        _refuse_unlabelled(run, gold.null_count())
    if not method.reads_teachers:
        return method.build(TargetInputs(space, gold))
    weights = _weights(run, buckets, rows) if method.estimates_weights else None
    batch = method.build(TargetInputs(space, gold, _predictions(run, buckets, rows), weights))
    given = load_labels.given_labels(run)
    return _with_labels(batch, space, given, rows, by_teacher=method.loss == "restricted") if given else batch


def _with_labels(
    batch: TargetBatch, space: LabelSpace, given: GivenLabels, texts: pa.Table, *, by_teacher: bool
) -> TargetBatch:
    """Returns the targets with the label of each text that has one, with weight 1. Unknown texts get weight 0.

    `by_teacher`: a target is one distribution for each teacher, over its own labels.
    """
    keys = texts.column("key").to_pylist()
    unknown = [row for row, key in enumerate(keys) if key in given.unknown]
    # A copy, because `scatter` changes the series, which may be the margin too.
    batch = replace(batch, weight=batch.weight.clone().scatter(unknown, 0.0))
    rows = np.array([row for row, key in enumerate(keys) if key in given.by_key], np.int64)
    if not len(rows):
        return batch
    place = {name: index for index, name in enumerate(space.names)}
    gold = np.array([place[given.by_key[keys[row]]] for row in rows], np.int64)
    target = batch.target.to_numpy().copy()
    if by_teacher:
        _set_distributions(target, space, rows, gold)
    else:
        target[rows] = np.eye(len(space.names))[gold]
    batch = replace(batch, target=pl.Series(target), weight=batch.weight.scatter(rows, 1.0))
    if batch.teacher is None or batch.confidence is None or batch.margin is None:
        return batch
    has_label = np.array([[index in columns for columns in space.columns.values()] for index in gold.tolist()])
    best = np.where(has_label, batch.confidence.to_numpy()[rows], -np.inf).argmax(axis=1)
    names = pl.Series(np.array(list(space.columns))[best].tolist(), dtype=pl.String)
    return replace(batch, teacher=batch.teacher.scatter(rows, names), margin=batch.margin.scatter(rows, 1.0))


def _set_distributions(target: Array, space: LabelSpace, rows: RowNumbers, gold: RowNumbers) -> None:
    """Sets the distributions of the teachers that have the label; the others keep theirs."""
    start = 0
    for columns in space.columns.values():
        has_label = np.isin(gold, columns)
        target[rows[has_label], start : start + len(columns)] = gold[has_label, None] == np.array(columns)
        start += len(columns)


def _predictions(run: Run, buckets: Sequence[Bucket], rows: pa.Table) -> list[TeacherPredictions]:
    """Returns the teachers' predictions for some texts of these buckets."""
    keys, prefixes = pl.Series("key", rows.column("key"), dtype=pl.Binary), [bucket.prefix for bucket in buckets]
    reader = cached.cache_reader(run)
    predictions = [reader.predictions(name, prefixes, keys) for name in load.label_space(run).columns]
    if target_method(run.experiment.targets).weighs_by_domain:
        return with_domain_confidence(run, predictions, prefixes, key_array(rows.column("key")))
    return predictions


@dataclass(frozen=True)
class UnsetTargets:
    """The first labels of labelled texts' targets before their gold labels are set, by position in the union."""

    fitted: Array
    """With the weights that all labels corrected."""
    cross_validated: Array
    """With weights by cross-validation, without the labels of the text's fold."""


def unset_targets(run: Run, buckets: Sequence[Bucket], rows: pa.Table) -> UnsetTargets | None:
    """Returns the targets of labelled texts before their labels; None if a target is no distribution over labels."""
    method = target_method(run.experiment.targets)
    if not gives_label_distributions(method.loss):
        return None
    gold, predictions = pl.Series("label", rows.column("label"), dtype=pl.String), _predictions(run, buckets, rows)

    def first_labels(weights: pl.Series | None) -> Array:
        inputs = TargetInputs(load.label_space(run), gold, predictions, weights)
        return method.build(inputs).target.to_numpy().argmax(axis=1)

    if not method.estimates_weights:
        return UnsetTargets(first_labels(None), first_labels(None))
    table = labelled_weights_of(run)
    place = {key: row for row, key in enumerate(table.column("key").to_pylist())}
    weights = table.take([place[key] for key in rows.column("key").to_pylist()])
    columns = (pl.Series("weight", weights.column(name)) for name in ("fitted", "left_out"))
    return UnsetTargets(*map(first_labels, columns))


def _weights(run: Run, buckets: Sequence[Bucket], rows: pa.Table) -> pl.Series:
    """Returns the teachers' weights on these texts from weigh-teachers."""
    keys = pl.Series("key", rows.column("key"), dtype=pl.Binary)
    table = weights_of(run, buckets)
    if not pl.Series("key", table.column("key"), pl.Binary).equals(keys):
        fix = f"run `amalgam verify{run.file_option}`, then the same command again"
        raise WorkError("weights and texts do not have the same keys", fix=fix)
    return pl.Series("weight", table.column("weight"))


def _check(run: Run, batch: TargetBatch, rows: pa.Table) -> None:
    """Refuses a weight or target that is no finite number, or negative: it would silently spoil the student."""
    targets = run.experiment.targets
    bad = (~(batch.weight.is_finite() & (batch.weight >= 0)) | ~batch.target.arr.sum().is_finite()).arg_true()
    if len(bad):
        keys = rows.column("key").to_pylist()
        first_keys = ", ".join(keys[index].hex() for index in bad.to_list()[:5])
        raise WorkError(
            f"{counted(len(bad), 'text', 'has', 'have')} a weight or target that is not a number >= 0",
            where=f"keys {first_keys}; targets.mode={targets.mode}, targets.uncertainty={targets.uncertainty}, "
            f"targets.text_weights={targets.text_weights}",
            fix=f"run `amalgam verify{run.file_option}`, which checks the cache; "
            "for extreme logits set cache.dtype=fp32",
        )


def _table(rows: pa.Table, batch: TargetBatch, teachers: int) -> pa.Table:
    """Returns the rows of the Parquet file; the columns of a method that compares no teachers are null."""
    schema = arrow_schema(TARGETS, {"target": width(batch.target), "confidence": max(teachers, 1)})
    columns = {"key": rows.column("key")}
    for name in schema.names[1:]:
        series, dtype = getattr(batch, name), schema.field(name).type
        if series is None:
            columns[name] = pa.nulls(len(rows), dtype)
        elif pa.types.is_fixed_size_list(dtype):
            # By Arrow: pa.array of NumPy imports pandas, which takes 0.2 s.
            numbers = series.explode(empty_as_null=False).cast(pl.Float32).to_arrow()
            columns[name] = pa.FixedSizeListArray.from_arrays(numbers, dtype.list_size)
        else:
            columns[name] = series.to_arrow().cast(dtype)
    return pa.table(columns, schema=schema)


# ---- the summary: counts and sums alone, so that units can be added up


def _gold_outside_labels(run: Run, rows: pa.Table) -> pl.Series:
    """Returns the gold labels, without those of texts in `labels` of the experiment, which chose their teachers."""
    gold, given = pl.Series("label", rows.column("label"), dtype=pl.String), load_labels.given_labels(run)
    keys = rows.column("key").to_pylist() if given else []
    return gold.scatter([row for row, key in enumerate(keys) if given and key in given.by_key], None)


def summarise(batch: TargetBatch, gold: pl.Series, space: LabelSpace) -> TargetSummary:
    """Returns sums of the weights, the chosen teachers, and with gold labels how often they have the label."""
    weight, chosen = batch.weight, batch.teacher
    bins = (weight.clip(0, 1) * BINS).floor().clip(0, BINS - 1).cast(pl.Int64)
    labelled = gold.null_count() < len(gold)
    return {
        "texts": len(weight),
        "weight_sum": float(weight.sum()),
        "weight_bins": [int((bins == index).sum()) for index in range(BINS)],
        "chosen": {} if chosen is None else {name: int((chosen == name).sum()) for name in space.columns},
        "selection": _selection(chosen, weight, gold, space) if chosen is not None and labelled else {},
    }


def _selection(chosen: pl.Series, weight: pl.Series, gold: pl.Series, space: LabelSpace) -> dict[str, list[int]]:
    """Counts how often the chosen teacher has the gold label: over all texts, and by large and small weight."""
    owners = dict(zip(space.names, space.owners, strict=True))
    labelled, heavy = gold.is_in(list(owners)), weight >= 0.5
    has_label = [teacher in owners.get(label, ()) for teacher, label in zip(chosen, gold, strict=True)]
    right = pl.Series(has_label, dtype=pl.Boolean)
    groups = {"all": labelled, "heavy": labelled & heavy, "light": labelled & ~heavy}
    return {name: [int((right & group).sum()), int(group.sum())] for name, group in groups.items()}


def _added(total: Any, part: Any) -> Any:
    """Returns the sum of two summaries; either may lack an entry."""
    if total is None or part is None:
        return part if total is None else total
    if isinstance(part, dict):
        return {key: _added(total.get(key), part.get(key)) for key in {**part, **total}}
    if isinstance(part, list):
        return [_added(a, b) for a, b in zip(total, part, strict=True)]
    return total + part


def summary_lines(summary: TargetSummary, mode: str) -> list[str]:
    texts = max(summary["texts"], 1)
    lines = [f"{counted(summary['texts'], 'text')}, mode {mode}, mean weight {percent(summary['weight_sum'] / texts)}"]
    if summary["chosen"]:
        shares = (f"{teacher} {percent(count / texts)}" for teacher, count in summary["chosen"].items())
        bins = (f"{100 * count / texts:.0f} %" for count in summary["weight_bins"])
        lines += [f"teachers with the largest weight: {', '.join(shares)}", f"weights 0.0 .. 1.0: {' '.join(bins)}"]
    if summary["selection"] and summary["selection"]["all"][1]:
        counts = summary["selection"].items()
        parts = (f"{name} {percent(right / count)} (n={count:,})" for name, (right, count) in counts if count)
        lines.append(f"right teacher chosen: {', '.join(parts)}")
    return lines
