"""Stage cache-teachers: a family of cached answers per teacher; a unit is missing answers of one bucket of texts.

Training texts get the logits without dropout and K passes, test texts the logits alone: passes weigh teachers, and only
training texts are weighed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from amalgam.data.arrays import Keys
from amalgam.data.keys import label_notes
from amalgam.data.lazy import np
from amalgam.data.parquet import key_array, key_list, read_keys, read_table
from amalgam.data.tokens import unreadable_note
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.console import counted
from amalgam.pipeline.execution.faults import with_retries
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit, once, pending_units
from amalgam.pipeline.storage.facts import FactTypes
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.store import Record
from amalgam.stages.cache_teachers import adaptive, sample
from amalgam.stages.cache_teachers.adaptive import RegressionFacts, StopFacts
from amalgam.stages.cache_teachers.sample import PassAudit
from amalgam.stages.common import load, load_labels
from amalgam.stages.common.cached import load as cached
from amalgam.stages.common.cached.coverage import (
    AnswerFacts,
    BucketRequest,
    CachedUnit,
    CachedUnits,
    UnitRequest,
    cached_units,
    family_in,
    units_for,
)
from amalgam.stages.common.cached.read import distinct, passes_differ
from amalgam.stages.common.corpus import Part, tables
from amalgam.stages.common.device import dtype_for, pick_device
from amalgam.stages.common.input_names import INPUT_NAMES
from amalgam.stages.common.models.resolve import ResolvedTeacher
from amalgam.stages.common.token_cache import long_texts_error
from amalgam.stages.objective_inputs import reads_texts
from amalgam.stages.target_methods import target_method

if TYPE_CHECKING:
    from amalgam.stages.cache_teachers.ask import StateUnits


class CacheFacts(TypedDict):
    families: dict[str, str]
    cut: dict[str, int]
    """Number of truncated texts by teacher."""
    unreadable: NotRequired[dict[str, int]]
    """Number of texts with mostly unknown tokens by teacher; at least so many, if texts were removed."""
    texts: NotRequired[int]
    dtype: str
    ranges: dict[str, tuple[int, int]]
    """First and last pass of each file."""
    confidences: NotRequired[dict[str, str]]
    """The file of each bucket with the passes and confidences of its texts, where passes are adaptive."""
    audit: NotRequired[PassAudit]


class CacheSettings(TypedDict):
    passes: int
    dropout: float | str | None


class CacheConfig(TypedDict):
    """The settings of a result that `describe` reads."""

    cache: CacheSettings


class CacheTeachers(Stage):
    name = "cache-teachers"
    VERSION = 4  # no audit of passes without active dropout
    parallelism = "units"
    unit_label = "text-passes"
    reads = ("read-corpus", "train-teachers")
    sections = ("cache",)
    facts = FactTypes(CacheFacts, AnswerFacts | RegressionFacts | StopFacts, config=CacheConfig)
    input_names = INPUT_NAMES

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        return bool(experiment.teachers) or experiment.train_teachers is not None

    def resolve_inputs(self, run: Run) -> None:
        load.prepare_teachers(run)
        load_labels.check_gold(run)
        load_labels.check_labels(run)
        _pin_dtype(run)
        if cached.passes_of(run.experiment) and not _may_repeat(run):
            _check_cached_passes(run)

    def identity(self, run: Run) -> Identity:
        parts, sampled, deciding = _parts(run), pass_sample_size(run), cached.adaptive_sample_size(run)
        return Identity(
            config={"cache": run.experiment.cache.model_dump() | {"passes": cached.passes_of(run.experiment)}},
            inputs={
                "teachers": {teacher.name: teacher.identity for teacher in load.teachers_of(run)},
                "texts": {part.name: part.texts_digest for part, _ in parts},
                "dtype": cached.dtype_of(run),
                **({"sample": {"texts": sampled, "passes": cached.AUTO_PASSES}} if sampled and not deciding else {}),
                **({"adaptive": {"texts": deciding, "version": cached.ADAPTIVE_VERSION}} if deciding else {}),
            },
        )

    def chosen(self, run: Run) -> dict[str, object]:
        return {"cache.passes": cached.passes_of(run.experiment)} if run.experiment.cache.passes is None else {}

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        return _adaptive_units(run) if cached.adaptive_sample_size(run) else _plain_units(run, _parts(run))

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the number of forward passes; passes of the last layer alone cost little and are not counted."""
        return _text_passes(run, units, set() if run.experiment.cache.last_layer else _with_dropout(run))

    def later_workload(self, run: Run) -> float:
        """Returns the usual passes of later rounds, whose texts are not known yet."""
        if not cached.adaptive_sample_size(run):
            return 0.0
        return max(0.0, self.workload(run, None) - self.workload(run, _adaptive_units(run)))

    def least_bytes(self, run: Run, units: Sequence[Unit] | None) -> tuple[int, int]:
        """Returns a byte for each logit: half of its size in fp16, because the files are compressed."""
        labels = min(len(teacher.outputs) for teacher in load.teachers_of(run))
        return int(_text_passes(run, units, _with_dropout(run))) * labels, 0

    def more_units(self, run: Run, folder: Path) -> Sequence[Unit]:
        """Lists the next round of adaptive passes, which depends on the answers of the last one."""
        return self.units(run, folder) if cached.adaptive_sample_size(run) else ()

    def run_units(self, run: Run, units: Sequence[Unit]) -> None:
        families = cached.families_of(run)
        if units:
            _check_new_teachers(run)
        if run.experiment.cache.on_long_text == "error":
            _refuse_truncated(run)
        for teacher in load.teachers_of(run):
            key = cached.family_key(run, teacher, cached.dtype_of(run))
            content = {"teacher": teacher.name, **key, "labels": list(teacher.outputs)}
            cached.describe_family(run, self.name, families[teacher.name], content)
        requests = [unit for unit in units if isinstance(unit.payload, UnitRequest)]
        if requests:
            _run_teachers(run, requests)
        decisions = [unit for unit in units if not isinstance(unit.payload, UnitRequest)]
        if decisions:
            passes = adaptive.AdaptivePasses(_cached_passes(run), distinct(families), cached.passes_of(run.experiment))
            for unit in decisions:
                with_retries(partial(passes.run, unit), f"{self.name} {unit.name}", run.store, run.console)

    def text_keys(self, run: Run, unit: Unit) -> list[str]:
        request = unit.payload
        part = load.part_of(run, request.part) if isinstance(request, UnitRequest) else None
        for bucket in part.buckets if part else ():
            if bucket.prefix == request.prefix:
                keys = read_keys(run.store.verified_path(bucket.file))
                return [key.hex() for key in key_list(keys if request.rows is None else keys[request.rows])]
        return []

    def finish(self, run: Run, records: Sequence[Record]) -> CacheFacts:
        families = cached.families_of(run)
        with_logits, ranges = defaultdict[str, list[Record]](list), dict[str, tuple[int, int]]()
        predictions, regressions, decisions = (
            [record for record in records if field in record.facts] for field in ("first", "halves_same", "passes")
        )
        for record in predictions:
            ranges[record.files[0].path] = (record.facts["first"], record.facts["last"])
            if record.facts["logits"]:
                with_logits[family_in(record.files[0].path)].append(record)
        truncated = {teacher: _count_truncated(run, with_logits[family]) for teacher, family in families.items()}
        facts: CacheFacts = {"families": families, "cut": truncated, "dtype": cached.dtype_of(run), "ranges": ranges}
        facts["texts"] = texts = sum(part.texts for part, _ in _parts(run))
        unreadable = {teacher: _count_unreadable(with_logits[family], texts) for teacher, family in families.items()}
        facts["unreadable"] = unreadable
        if decisions:  # the last one of each bucket, which has the sum of the passes
            facts["confidences"] = {record.facts["prefix"]: record.files[0].path for record in decisions}
            decided, passes = [record.facts for record in decisions], cached.passes_of(run.experiment)
            if regressions[0].facts.get("differ", True):  # else no teacher has active dropout
                facts["audit"] = sample.adaptive_audit(regressions[0].facts, decided, passes)
        elif pass_sample_size(run) and (audit := _pass_audit(run)):
            facts["audit"] = audit
        return facts

    def notes(self, run: Run, manifest: Record) -> Iterator[str]:
        yield from label_notes(load.labels_by_teacher(run))
        yield from cached.adaptive_note(run)
        cut: dict[str, int] = manifest.facts["cut"]
        for count in dict.fromkeys(filter(None, cut.values())):  # teachers of one limit often have the same texts
            names = [teacher for teacher, texts in cut.items() if texts == count]
            of, its = ("teachers", "their") if len(names) > 1 else ("teacher", "its")
            were = "was" if count == 1 else "were"
            texts = f"{counted(count, 'text')} {were} longer than {its} limit and {were} truncated"
            yield f"{of} {', '.join(names)}: {texts}"
        for teacher, unreadable in manifest.facts.get("unreadable", {}).items():
            yield from unreadable_note(unreadable, manifest.facts["texts"], f"teacher {teacher}")

    def summary(self, run: Run, manifest: Record) -> Iterator[str]:
        if "audit" in manifest.facts:
            yield from sample.pass_audit_lines(manifest.facts["audit"])

    def recomputed(self, unit: Record | None, teacher: str) -> str:
        texts = counted(unit.facts["rows"], "text") if unit and "rows" in unit.facts else "one unit"
        return f"predicted again: {texts} of teacher {teacher}" if teacher else f"computed again: {texts}"

    def describe(self, manifest: Record) -> str:
        cache, dtype = manifest.identity["config"]["cache"], manifest.facts["dtype"]
        where = " in the last layer" if cache["dropout"] == "last-layer" else ""
        count = "K at most" if "confidences" in manifest.facts else "K ="
        return f"{', '.join(manifest.facts['families'])}; {count} {cache['passes']}{where}, {dtype}"


def _count_unreadable(units: Sequence[Record], texts: int) -> int:
    """Returns the least number of texts with mostly unknown tokens; any removed text may have been one."""
    removed = max(sum(unit.facts["rows"] for unit in units) - texts, 0)
    return max(sum(unit.facts.get("unreadable", 0) for unit in units) - removed, 0)


def _count_truncated(run: Run, units: Sequence[Record]) -> int:
    """Returns how many texts of the corpus were truncated; cached units keep the answers of removed texts."""
    truncated, rows = (sum(int(unit.facts[name]) for unit in units) for name in ("cut", "rows"))
    if not truncated or rows == sum(part.texts for part, _ in _parts(run)):  # no text was removed
        return truncated
    return len(_truncated(run, units))


def _truncated(run: Run, units: Iterable[Record]) -> Keys:
    """Returns the texts of the corpus that are truncated in these units."""
    paths = run.store.verified_paths(unit.files[0] for unit in units if unit.facts["cut"])
    rows = (read_table(path, ["key", "cut"]) for path in paths)
    keys = [key_array(table.filter(table.column("cut")).column("key")) for table in rows]
    return np.concatenate([own[np.isin(own, _keys(run))] for own in keys] or [_keys(run)[:0]])


@once
def _refuse_truncated(run: Run) -> None:
    """Refuses texts that an earlier run with `cache.on_long_text: truncate` truncated."""
    families = cached.families_of(run)
    for teacher in load.models_of(run):
        units = run.store.units(cached.units_folder(run, CacheTeachers.name, families[teacher.name])).values()
        truncated = _truncated(run, [unit for unit in units if unit.facts["logits"]])
        for part, _ in _parts(run) if len(truncated) else ():
            for table in tables(run.store, part, ["key", "text"]):
                is_truncated = np.isin(key_array(table.column("key")), truncated)
                if is_truncated.any():
                    first = table.column("text")[int(is_truncated.argmax())].as_py()
                    raise long_texts_error(teacher, len(truncated), first)


@once
def _keys(run: Run) -> Keys:
    files = [bucket.file for part, _ in _parts(run) for bucket in part.buckets]
    return np.concatenate([read_keys(path) for path in run.store.verified_paths(files)])


def _run_teachers(run: Run, units: Sequence[Unit]) -> None:
    from amalgam.stages.cache_teachers.ask import CacheInputs, ask_teachers
    from amalgam.stages.cache_teachers.from_file import write_predictions

    inputs = CacheInputs(
        teachers=load.models_of(run),
        dtype=cached.dtype_of(run),
        loader=load.teacher_loader(run),
        texts=load.unit_texts(run, [part for part, _ in _parts(run)]),
        store=run.store,
        console=run.console,
        check_interrupt=run.signals.check,
        may_repeat=_may_repeat(run),
        passes=cached.passes_of(run.experiment),
        corpus=run.experiment.corpus,
        states=_state_units(run),
    )
    for teacher in load.teachers_of(run):  # files first: a text without a prediction is an error before hours of work
        own = [unit for unit in units if unit.payload.teacher == teacher.name]
        if own and teacher.files.are_predictions:
            write_predictions(inputs, teacher, own)
    ask_teachers(inputs, units)


def _state_units(run: Run) -> dict[str, StateUnits]:
    """Returns, for each teacher, the units of hidden states that the method reads; those of equal models once."""
    from amalgam.stages.cache_teachers.ask import StateUnits

    states: dict[str, StateUnits] = {}
    for teacher in load.models_of(run) if cached.reads_last_layers(run.experiment) else ():
        family = cached.last_layer_family(run, teacher)
        folder = cached.units_folder(run, "cache-features", family.name)
        if folder not in {units.folder for units in states.values()}:
            parts, present = cached.parts_of(run, family), {path.stem for path in run.store.units_in(folder)}
            states[teacher.name] = StateUnits(folder, [part.name for part in parts], present)
    return states


@once
def _check_new_teachers(run: Run) -> None:
    """Loads every model without cached predictions, or passes, before hours of work for the first.

    So a bad model fails now.
    """
    passes, loader = cached.passes_of(run.experiment), load.teacher_loader(run)
    wanted = passes or pass_sample_size(run)
    for teacher in load.models_of(run):
        if not any(unit.last > unit.first or not wanted for unit in _units_of(run, teacher)):
            loaded = loader.load(teacher, cached.dtype_of(run), passes=0 if _may_repeat(run) else passes)
            if loaded.last_layer and wanted and loaded.keyed_sites != ():
                _ = loaded.early_sites  # refuses a model whose last layer cannot run alone


def _units_of(run: Run, teacher: ResolvedTeacher) -> Iterator[CachedUnit]:
    """Yields the cached units of the teacher's family, one after the other: the first may suffice."""
    folder = cached.units_folder(run, CacheTeachers.name, cached.families_of(run)[teacher.name])
    for path in run.store.units_in(folder):
        yield from cached_units(run.store.units(folder, [path.stem]))


def _may_repeat(run: Run) -> bool:
    """Returns whether passes may be all the same: `auto` chose their number, and no measure compares them."""
    return run.experiment.cache.passes is None and not target_method(run.experiment.targets).compares_passes


@once
def _check_cached_passes(run: Run) -> None:
    """Refuses a teacher without active dropout whose equal passes were cached under `cache.passes: auto`.

    Passes of a model with dropout rates are read only if the method compares them.
    """
    compares = target_method(run.experiment.targets).compares_passes
    for teacher in load.models_of(run):
        if (compares or not teacher.has_dropout) and _has_equal_passes(run, teacher):
            load.teacher_loader(run).load(teacher, cached.dtype_of(run), passes=cached.passes_of(run.experiment))


def _has_equal_passes(run: Run, teacher: ResolvedTeacher) -> bool:
    """Returns whether texts have several passes, and all those of a text are the same; usually reads one unit."""
    is_equal = False
    for unit in _units_of(run, teacher):
        if unit.last - unit.first > 1:
            if passes_differ(run.store.verified_path(unit.file), unit.last - unit.first):
                return False
            is_equal = True
    return is_equal


def _pin_dtype(run: Run) -> None:
    """Pins the dtype of `auto` once for each workspace: that of its results, else the one that a check chooses."""
    if run.experiment.cache.dtype != "auto" or run.store.pinned("dtype", "auto") is not None:
        return
    earlier = cached.pinned_dtype(run)
    if earlier is None:
        _choose_dtype(run)
    else:
        run.store.pin("dtype", "auto", earlier, why="the results that exist")
        run.console.note(f"cache.dtype auto is {earlier}, as in the results that exist")


def _choose_dtype(run: Run) -> None:
    """Pins half precision where the hardware computes it and the teachers' uncertainty equals that of fp32."""
    from amalgam.stages.cache_teachers.half_precision import check_half_precision, sample_texts

    dtype, why = dtype_for(pick_device(run.experiment.execution.device)), ""
    part, passes = load.part_of(run, "train") or load.part_of(run, "test"), run.experiment.cache.passes
    if dtype != "fp32" and part is None and not reads_texts(run.experiment):
        dtype, why = "fp32", "there are no texts to compare it on"
    elif dtype != "fp32" and load.models_of(run):
        texts, work = tables(run.store, part or load.train_part(run)), sum(_texts_and_passes(run))
        sample = sample_texts(texts, work, passes)
        # Printed first, because long texts take minutes on a CPU.
        run.console.say(f"cache.dtype auto: comparing {dtype} with fp32 on {counted(len(sample), 'text')}, once")
        passed, why = check_half_precision(
            load.teacher_loader(run),
            load.models_of(run),
            dtype,
            sample,
            passes=passes,
            check_interrupt=run.signals.check,
        )
        dtype = dtype if passed else "fp32"
    if why:
        run.console.note(f"cache.dtype auto is {dtype} ({why})")
    run.store.pin("dtype", "auto", dtype, why=why)


def _parts(run: Run) -> list[tuple[Part, int]]:
    """Returns the parts that teachers run on, each with its number of passes."""
    parts = [(load.train_part(run), cached.passes_of(run.experiment))] if reads_texts(run.experiment) else []
    parts += [(part, 0) for part in load.extra_parts(run)]
    test = load.part_of(run, "test")
    return [*parts, (test, 0)] if test else parts


def pass_sample_size(run: Run) -> int:
    """Returns the number of training texts that run all passes although others run none or fewer.

    They audit `auto`, which runs no passes for a method that compares teachers by predictions, or decide on the others.
    """
    experiment, method = run.experiment, target_method(run.experiment.targets)
    learns = experiment.student.learns and reads_texts(experiment)
    compares = method.reads_teacher_weights and not method.weighs_by_domain
    chooses_none = experiment.cache.passes is None and not cached.passes_of(experiment)
    if learns and compares and chooses_none and len(load.teachers_of(run)) > 1 and load.models_of(run):
        return cached.sample_size(load.train_part(run).texts, cached.AUTO_PASSES)
    return cached.adaptive_sample_size(run)


def _text_passes(run: Run, units: Sequence[Unit] | None, with_dropout: Collection[str]) -> float:
    """Returns the forward passes of these units, or of all models over all texts.

    A teacher that is not in `with_dropout` counts once for each text.
    """
    if units is None:
        (texts, passes), teachers = _texts_and_passes(run), load.teachers_of(run)
        models = {fingerprint(teacher.identity): teacher.name for teacher in teachers}  # copies share a family
        return float(sum(texts + passes * (name in with_dropout) for name in models.values()))
    counts = 0.0
    for unit in units:
        request = unit.payload
        is_once = isinstance(request, UnitRequest) and request.teacher not in with_dropout
        counts += unit.size / (request.last - request.first + request.logits) if is_once else unit.size
    return counts


def _texts_and_passes(run: Run) -> tuple[int, int]:
    """Returns the number of all texts, and that of the dropout passes of a teacher over them."""
    passes, sampled = cached.passes_of(run.experiment), pass_sample_size(run)
    texts = {part.name: part.texts for part, _ in _parts(run)}
    others = texts.get("train", sampled) - sampled
    of_sample = sampled * (passes or cached.AUTO_PASSES)
    of_others = others * (adaptive.USUAL_PASSES if cached.adaptive_sample_size(run) else passes)
    return sum(texts.values()), of_sample + of_others


def _with_dropout(run: Run) -> set[str]:
    """Returns the teachers whose passes differ; equal passes are not run, and their files are small."""
    return {teacher.name for teacher in load.teachers_of(run) if teacher.has_dropout}


def pass_prices(run: Run) -> tuple[dict[str, int], int]:
    """Returns the forward passes for this corpus by setting: no dropout passes, `auto`, all of them, and adaptive ones.

    Those of `cache.adaptive` are an estimate, and absent where it has no effect. Empty if all settings cost the same.
    The second value is the number of sampled texts that run AUTO_PASSES with `auto`, although the others run none.
    """
    cache = run.experiment.cache
    if cache.last_layer:  # passes of the last layer cost little, so there is nothing to choose
        return {}, 0
    most = cache.passes or cached.AUTO_PASSES

    def priced(passes: int | None, *, adaptive: bool = False) -> Run:
        settings = cache.model_copy(update={"passes": passes, "adaptive": adaptive})
        return replace(run, experiment=run.experiment.model_copy(update={"cache": settings}))

    prices = {"0": priced(0), "auto": priced(None), str(most): priced(most)}
    adapted = priced(most, adaptive=True)
    prices |= {"adaptive": adapted} if cached.adaptive_sample_size(adapted) else {}
    counts = {setting: int(_text_passes(each, None, _with_dropout(run))) for setting, each in prices.items()}
    if len({*counts.values()}) == 1:  # no teacher has dropout
        return {}, 0
    samples = counts["auto"] > counts["0"] and not cached.passes_of(prices["auto"].experiment)
    return counts, pass_sample_size(prices["auto"]) if samples else 0


def _cached_passes(run: Run) -> adaptive.CachedPasses:
    families = cached.families_of(run).values()
    by_family = {family: cached.units_of(run, CacheTeachers.name, family) for family in families}
    return adaptive.CachedPasses(run.store, by_family, cached.unit_keys(run))


def _pass_audit(run: Run) -> PassAudit | None:
    """Compares the choice with and without passes on the sampled texts; None without active dropout."""
    part, families = load.train_part(run), list(cached.families_of(run).values())
    keys = {
        bucket.prefix: read_keys(run.store.verified_path(bucket.file))[:rows]
        for bucket, rows in sample.sampled_rows(part.buckets, pass_sample_size(run))
        if rows
    }
    return sample.audit_passes(_cached_passes(run), families, keys, part.texts, cached.AUTO_PASSES)


def _adaptive_units(run: Run) -> list[Unit]:
    """Returns the units of the training part round by round, and those of the other parts."""
    part, _ = _parts(run)[0]
    present = _cached_units(run)
    sampled = (rows for _, rows in sample.sampled_rows(part.buckets, cached.adaptive_sample_size(run)))
    requests = list(zip(cached.requests_of(run, part), sampled, strict=True))

    def request(bucket: BucketRequest, wanted: Any) -> Iterator[Unit]:
        for teacher, units in present.items():
            yield from units_for(teacher, bucket, units, wanted)

    listed, passes, families = list[Unit](), cached.passes_of(run.experiment), distinct(cached.families_of(run))
    for new, units in adaptive.stopping_rounds(run.store, passes, requests, families, request):
        listed = units
        if pending_units(run, new):
            break
    return [*listed, *_plain_units(run, _parts(run)[1:])]


def _cached_units(run: Run) -> dict[str, CachedUnits]:
    """Returns the cached units by teacher; teachers of the same model share a family, which one of them computes."""
    teachers = {family: teacher for teacher, family in cached.families_of(run).items()}
    return {teacher: cached.units_of(run, CacheTeachers.name, family) for family, teacher in teachers.items()}


def _plain_units(run: Run, parts: Iterable[tuple[Part, int]]) -> list[Unit]:
    """Returns the units teacher by teacher; the keys of a bucket are read at most once for all teachers."""
    present = _cached_units(run)
    by_teacher: dict[str, list[Unit]] = {teacher: [] for teacher in present}
    for part, passes in parts:
        rows = sample.sampled_rows(part.buckets, pass_sample_size(run) if part.name == "train" else 0)
        for bucket, (_, sampled) in zip(cached.requests_of(run, part), rows, strict=True):
            wanted = passes or sample.wanted_passes(bucket.texts, sampled, cached.AUTO_PASSES)
            for teacher, units in present.items():
                by_teacher[teacher] += units_for(teacher, bucket, units, wanted)
    return [unit for units in by_teacher.values() for unit in units]
