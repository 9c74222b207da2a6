"""Stage build-targets: a unit is a few neighbouring buckets of training texts; memory does not grow with the corpus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.data.parquet import key_array, read_table, write_table
from amalgam.data.schemas import TARGETS, arrow_schema
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.errors import DataError, WorkError
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit
from amalgam.pipeline.storage.store import Record
from amalgam.stages.common.cached.load import answer_reader, dtype_of, families_of, passes_counted
from amalgam.stages.common.corpus import Bucket, neighbouring_buckets, read_bucket
from amalgam.stages.common.load import check_gold, label_space, teachers_of, train_part
from amalgam.stages.fit_statistics.stage import with_domain_confidence
from amalgam.stages.methods import method_of
from amalgam.stages.target_methods import TargetBatch, TargetInputs, target_method, weighs_by_domain, weighs_together
from amalgam.stages.weigh_teachers.stage import weights_of

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa


class BuildTargets(Stage):
    name = "build-targets"
    VERSION = 2
    parallelism = "units"
    unit_label = "texts"
    sections = ("targets",)
    enabled_by = "choose a student.method that trains a student from texts"
    at_once = 2

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        return experiment.student.learns and experiment.reads_texts

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:
        trained = ("train-teachers",) if experiment.train_teachers else ()
        answers = ("cache-teachers",) if target_method(experiment.targets).reads_teachers else ()
        by_domain = ("cache-features", "fit-statistics") if weighs_by_domain(experiment.targets) else ()
        weighed = ("weigh-teachers",) if weighs_together(experiment.targets) else ()
        return ("read-corpus", *trained, *answers, *by_domain, *weighed)

    def resolve_inputs(self, run: Run) -> None:
        if not teachers_of(run):  # with teachers, cache-teachers has checked it
            check_gold(run)

    def identity(self, run: Run) -> Identity:
        """Returns the inputs read from stage 1, not its fingerprint: new test parts or passes change nothing."""
        targets, part = run.experiment.targets, train_part(run)
        method = target_method(targets)
        inputs: dict[str, Any] = {"texts": part.texts_digest, "labels": list(label_space(run).names)}
        if method.reads_gold(targets):
            inputs["gold"] = part.labels_digest
        if method.reads_teachers:
            run.result("cache-teachers")
            inputs["families"] = families_of(run)
            inputs["knows"] = {teacher.name: list(teacher.labels) for teacher in teachers_of(run)}
            inputs["dtype"] = dtype_of(run)
            inputs |= passes_counted(run) if method.reads_passes(targets) else {}
        weighed = {"weigh-teachers": run.fingerprint("weigh-teachers")} if weighs_together(targets) else {}
        weighed |= {"fit-statistics": run.fingerprint("fit-statistics")} if weighs_by_domain(targets) else {}
        return Identity({"targets": targets.model_dump(include=method.fields(targets))}, inputs, weighed)

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        return [
            Unit(_name(buckets), folder / "units", sum(bucket.rows for bucket in buckets), buckets)
            for buckets in neighbouring_buckets(train_part(run).buckets)
        ]

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the number of texts."""
        return float(train_part(run).texts if units is None else sum(unit.size for unit in units))

    def run_unit(self, run: Run, unit: Unit) -> None:
        import pyarrow as pa

        from amalgam.stages.build_targets.summary import summarise

        rows = pa.concat_tables(read_bucket(run.store, bucket, ["key", "label"]) for bucket in unit.payload)
        ruling = _rule(run, unit.payload, rows)
        _check(run, ruling, rows)
        with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
            write_table(_table(rows, ruling), draft.folder / "unit.parquet")
            draft.facts = summarise(ruling, rows, label_space(run))

    def finish(self, run: Run, folder: Path, records: Sequence[Record]) -> dict[str, Any]:  # noqa: ARG002
        from amalgam.stages.build_targets.summary import merge

        targets, space = run.experiment.targets, label_space(run)
        method = target_method(targets)
        summary = merge([record.facts for record in records])
        normalised = targets.text_weights == "margin-normalised" and summary["weight_sum"] > 0
        return {
            "method": method_of(targets.model_dump()),
            "labels": list(space.names),
            "knows": {teacher: [space.names[place] for place in places] for teacher, places in space.columns.items()},
            "objective": method.loss,
            "gold": method.reads_gold(targets),
            "columns": [list(places) for places in space.columns.values()],
            "student_temperature": targets.kd_temperature if method.tempered else 1.0,
            "weight_scale": summary["texts"] / summary["weight_sum"] if normalised else 1.0,
            "summary": summary,
        }

    def publish(self, run: Run, manifest: Record, *, fresh: bool) -> None:
        if fresh:
            from amalgam.stages.build_targets.summary import lines

            for line in lines(manifest.facts["summary"], run.experiment.targets):
                run.console.say(f"  {line}")

    def describe(self, manifest: Record) -> str:
        method = manifest.facts.get("method", manifest.identity["config"]["targets"]["mode"])
        return f"{method}, {manifest.facts['summary']['texts']:,} texts"


def read_targets(run: Run) -> Iterator[pa.Table]:
    """Yields the targets, bucket by bucket of the training texts, in key order."""
    import pyarrow as pa

    files = iter(sorted(run.result("build-targets").files, key=lambda file: Path(file.path).name))
    rest: pa.Table | None = None
    for bucket in train_part(run).buckets:
        while rest is None or rest.num_rows < bucket.rows:
            table = read_table(run.store.verified_path(next(files)))
            rest = table if rest is None or not rest.num_rows else pa.concat_tables([rest, table])
        yield rest.slice(0, bucket.rows).combine_chunks()
        rest = rest.slice(bucket.rows)


def _name(buckets: Sequence[Bucket]) -> str:
    """Names in order are keys in order."""
    return buckets[0].prefix if len(buckets) == 1 else f"{buckets[0].prefix}-{buckets[-1].prefix}"


def _rule(run: Run, buckets: Sequence[Bucket], rows: pa.Table) -> TargetBatch:
    import polars as pl

    space, targets = label_space(run), run.experiment.targets
    method = target_method(targets)
    gold = pl.Series("label", rows.column("label"), dtype=pl.String)
    if method.reads_gold(targets):
        _check_labelled(run, gold)
    if not method.reads_teachers:
        return method.build(TargetInputs(space, targets, gold))
    keys = pl.Series("key", rows.column("key"), dtype=pl.Binary)
    reader, prefixes = answer_reader(run), [bucket.prefix for bucket in buckets]
    evidence = [reader.evidence(name, prefixes, keys) for name in space.columns]
    if weighs_by_domain(targets):
        evidence = with_domain_confidence(run, evidence, prefixes, key_array(rows.column("key")))
    return method.build(TargetInputs(space, targets, gold, evidence, _weights(run, buckets, keys)))


def _check_labelled(run: Run, gold: pl.Series) -> None:
    """A corpus that was read when no label was needed may lack some."""
    if gold.null_count():
        raise DataError(
            f"{gold.null_count():,} training texts have no gold label",
            where=f"targets.mode: {run.experiment.targets.mode} learns from gold labels",
            fix="label them, or leave them out of corpus.train",
        )


def _weights(run: Run, buckets: Sequence[Bucket], keys: pl.Series) -> pl.Series | None:
    """The teachers' weights on these texts, where they were found by looking at all texts."""
    import polars as pl

    if not weighs_together(run.experiment.targets):
        return None
    before = sum(bucket.rows for bucket in train_part(run).buckets if bucket.prefix < buckets[0].prefix)
    table = weights_of(run).slice(before, len(keys))
    if not pl.Series("key", table.column("key"), pl.Binary).equals(keys):
        raise WorkError("weights and texts do not have the same keys", fix="`amalgam verify`, then run again")
    return pl.Series("weight", table.column("weight"))


def _check(run: Run, ruling: TargetBatch, rows: pa.Table) -> None:
    """A weight or target that is not a number, or negative, would silently spoil the student (never written)."""
    bad = (~(ruling.weight.is_finite() & (ruling.weight >= 0)) | ~ruling.target.arr.sum().is_finite()).arg_true()
    if len(bad):
        keys = rows.column("key").to_pylist()
        first_keys = ", ".join(keys[index].hex() for index in bad.to_list()[:5])
        targets = run.experiment.targets
        raise WorkError(
            f"{len(bad)} texts have a weight or target that is not a number >= 0",
            where=f"keys {first_keys}; targets.mode={targets.mode}, targets.uncertainty={targets.uncertainty}, "
            f"targets.text_weights={targets.text_weights}",
            fix="`amalgam verify` checks the cache; a teacher with extreme logits may need cache.dtype=fp32",
        )


def _table(rows: pa.Table, ruling: TargetBatch) -> pa.Table:
    import pyarrow as pa

    from amalgam.data.arrays import width

    sizes = {"target": width(ruling.target), "confidence": width(ruling.confidence)}
    schema = arrow_schema(TARGETS, sizes)
    columns = {
        "key": rows.column("key"),
        "target": _arrays(ruling.target, sizes["target"]),
        "weight": pa.array(ruling.weight.to_numpy(), pa.float32()),
        "teacher": ruling.teacher.to_arrow().cast(pa.string()),
        "margin": ruling.margin.to_arrow().cast(pa.float32()),
        "confidence": _arrays(ruling.confidence, sizes["confidence"]),
    }
    return pa.table(columns, schema=schema)


def _arrays(series: pl.Series, size: int) -> pa.Array:
    import pyarrow as pa

    if series.null_count() == len(series):
        return pa.nulls(len(series), pa.list_(pa.float32(), size))
    return pa.FixedSizeListArray.from_arrays(pa.array(series.explode().to_numpy(), pa.float32()), size)
