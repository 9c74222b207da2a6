"""Stage cache-teachers: per teacher a family of cached answers; a unit is what one bucket of texts still lacks in it.

Training texts get the dropout-off logits and K passes, test texts the logits alone: the passes weigh teachers, and only
training texts are weighed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from amalgam.data.parquet import key_list, read_keys
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.execution.retry import with_retries
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit
from amalgam.pipeline.storage.store import Record
from amalgam.stages.cache_teachers.adaptive import audit_lines, decide, stopping_rounds, summary
from amalgam.stages.cache_teachers.ask import ask_teachers
from amalgam.stages.common.answers.coverage import UnitRequest, bucket_requests, cached_units, has_answers, units_for
from amalgam.stages.common.answers.families import _family_key, dtype_of, families_of, family_in, family_of
from amalgam.stages.common.corpus import Bucket, Part, part_of, train_part
from amalgam.stages.common.inference.load import load_teacher
from amalgam.stages.common.load import check_gold, prepare_teachers, teachers_of
from amalgam.stages.common.reference_texts import extra_parts
from amalgam.stages.common.teachers import ResolvedTeacher


class CacheTeachers(Stage):
    name = "cache-teachers"
    VERSION = 2
    parallelism = "units"
    unit_label = "text-passes"
    help = "Stage 1: run every teacher on every text, K passes with dropout, and cache the predictions."
    examples = ("amalgam cache-teachers", "amalgam cache-teachers cache.passes=24", "amalgam cache-teachers --part 0/4")
    sections = ("cache",)

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        return bool(experiment.teachers) or experiment.train_teachers is not None

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:
        return ("read-corpus", *(("train-teachers",) if experiment.train_teachers else ()))

    def resolve_inputs(self, run: Run) -> None:
        prepare_teachers(run)
        check_gold(run)
        if run.experiment.cache.dtype == "auto" and run.store.pinned("dtype", "auto") is None:
            _choose_dtype(run)

    def identity(self, run: Run) -> Identity:
        parts = _parts(run)
        return Identity(
            config={"cache": run.experiment.cache.model_dump()},
            inputs={
                "teachers": {teacher.name: teacher.identity for teacher in teachers_of(run)},
                "texts": {part.name: part.texts_digest for part, _ in parts},
                "dtype": dtype_of(run),
            },
        )

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:  # noqa: ARG002 - units stand in the families
        if run.experiment.cache.adaptive and run.experiment.cache.passes and run.experiment.reads_texts:
            return _ladder_units(run)
        return _plain_units(run, _parts(run))

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the number of text-passes."""
        if units is not None:
            return float(sum(unit.size for unit in units))
        passes = run.experiment.cache.passes
        texts = sum(part.texts * (1 + passes * (part.name == "train")) for part, _ in _parts(run))
        return float(texts * len(teachers_of(run)))

    def more_units(self, run: Run, folder: Path) -> Sequence[Unit]:
        """Who goes on after 4 passes is known once all teachers have run them."""
        return self.units(run, folder) if run.experiment.cache.adaptive else ()

    def run_units(self, run: Run, units: Sequence[Unit]) -> None:

        teachers = teachers_of(run)
        _try_new_teachers(run)
        for teacher in teachers:
            _describe(run, teacher)
        ask_teachers(run, teachers, [unit for unit in units if isinstance(unit.payload, UnitRequest)], dtype_of(run))
        verdicts = [unit for unit in units if not isinstance(unit.payload, UnitRequest)]
        if verdicts:
            run.cache["ladder units"] = {family: cached_units(run, family) for family in families_of(run).values()}
        for unit in verdicts:
            with_retries(partial(decide, run, unit), run, f"{self.name} {unit.name}")

    def text_keys(self, run: Run, unit: Unit) -> list[str]:

        ask = unit.payload
        part = part_of(run, ask.part) if isinstance(ask, UnitRequest) else None
        for bucket in part.buckets if part else ():
            if bucket.prefix == ask.prefix:
                keys = read_keys(run.store.verified_path(bucket.file))
                return [key.hex() for key in key_list(keys if ask.rows is None else keys[ask.rows])]
        return []

    def finish(self, run: Run, folder: Path, records: Sequence[Record]) -> dict[str, Any]:  # noqa: ARG002
        families = families_of(run)
        cut: dict[str, int] = dict.fromkeys(families, 0)
        by_family = {family: teacher for teacher, family in families.items()}
        ranges = {}
        verdicts = [record for record in records if "rung" in record.facts]
        for record in (record for record in records if "rung" not in record.facts):
            ranges[record.files[0].path] = [record.facts["first"], record.facts["last"]]
            if record.facts["logits"]:
                cut[by_family[family_in(record.files[0].path)]] += int(record.facts["cut"])
        found = {"families": families, "cut": cut, "dtype": dtype_of(run), "ranges": ranges}
        if verdicts:
            last = {one.facts["prefix"]: one.files[0].path for one in verdicts if one.facts["rung"] == 0}
            found |= {"ladder": last, "adaptive": summary(verdicts)}
        return found

    def publish(self, run: Run, manifest: Record, *, fresh: bool) -> None:
        if not fresh:
            return
        for teacher, count in manifest.facts["cut"].items():
            if count:
                run.console.note(f"teacher {teacher}: {count:,} texts were longer than its limit and were cut")
        if "adaptive" in manifest.facts:
            for line in audit_lines(manifest.facts["adaptive"], run.experiment.cache.passes):
                run.console.say(f"  {line}")

    def describe(self, manifest: Record) -> str:
        passes, dtype = manifest.identity["config"]["cache"]["passes"], manifest.facts["dtype"]
        return f"{', '.join(manifest.facts['families'])}; K = {passes}, {dtype}"


def _try_new_teachers(run: Run) -> None:
    """Before hours of work for the first teacher: does each that was never asked load, fit, and vary?"""
    if run.cache.get("tried"):
        return
    for teacher in teachers_of(run):
        if not has_answers(run, family_of(run, teacher)):
            load_teacher(run, teacher, dtype_of(run), passes=run.experiment.cache.passes)
    run.cache["tried"] = True


def _choose_dtype(run: Run) -> None:
    """Half precision where the hardware computes it and these teachers' uncertainty stays what it is in fp32."""
    from amalgam.stages.cache_teachers.half_precision import check_half_precision
    from amalgam.stages.common.device import dtype_for, pick_device

    dtype, why = dtype_for(pick_device(run.experiment.execution.device)), ""
    if dtype != "fp32":
        finding = check_half_precision(run, teachers_of(run), dtype)
        dtype, why = dtype if finding.holds else "fp32", str(finding)
        run.console.note(f"cache.dtype auto is {dtype} ({why})")
    run.store.pin("dtype", "auto", dtype, why=why)


def _parts(run: Run) -> list[tuple[Part, int]]:
    """What is asked about, and with how many passes."""
    asked = [(train_part(run), run.experiment.cache.passes)] if run.experiment.reads_texts else []
    asked += [(part, 0) for part in extra_parts(run)]
    test = part_of(run, "test")
    return [*asked, (test, 0)] if test else asked


def _ladder_units(run: Run) -> list[Unit]:
    """The test part as ever; the training part round by round."""
    teachers = teachers_of(run)
    part, _ = _parts(run)[0]
    cached = {teacher.name: cached_units(run, family_of(run, teacher)) for teacher in teachers}
    asked = {bucket.prefix: bucket for bucket in bucket_requests(run, part)}
    buckets = [(bucket, asked[bucket.prefix].keys) for bucket in part.buckets]

    def asks(bucket: Bucket, wanted: Any) -> Iterator[Unit]:
        for teacher in teachers:
            family, have = family_of(run, teacher), cached[teacher.name]
            yield from units_for(run, family, teacher.name, asked[bucket.prefix], have, wanted)

    families = [family_of(run, teacher) for teacher in teachers]
    return [*stopping_rounds(run, buckets, families, asks), *_plain_units(run, _parts(run)[1:])]


def _plain_units(run: Run, parts: Sequence[tuple[Part, int]]) -> list[Unit]:
    """Teacher by teacher; found bucket by bucket, so that a bucket's keys are read once for all of them, if at all."""
    families = families_of(run)
    cached = {family: cached_units(run, family) for family in families.values()}
    found: dict[str, list[Unit]] = {teacher: [] for teacher in families}
    for part, passes in parts:
        for bucket in bucket_requests(run, part):
            for teacher, family in families.items():
                found[teacher] += units_for(run, family, teacher, bucket, cached[family], passes)
    return [unit for units in found.values() for unit in units]


def _describe(run: Run, teacher: ResolvedTeacher) -> None:
    """key.json: what the family is, for a person who finds the folder."""
    path = run.store.folder("cache-teachers", family_of(run, teacher)) / "key.json"
    if not run.store.has(path):
        run.store.replace(path, {"teacher": teacher.name, **_family_key(run, teacher), "labels": list(teacher.labels)})
