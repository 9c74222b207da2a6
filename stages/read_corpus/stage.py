"""Stage read-corpus: each part of the corpus is a unit, recognised by the digests of its source files.

Generated texts are filtered as they are read. The student learns from most of them; the rest is held out, to fit
statistics of the teachers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from amalgam.data.corpus import MISSING_VALUES, MOST_REPORTED, SKIPPED_FILE, leaks, missing_notes, places_of, read_part
from amalgam.data.keys import shown, shown_names
from amalgam.data.lazy import np, pa
from amalgam.data.parquet import read_table, write_table
from amalgam.data.remote import check_remote
from amalgam.data.rows import ABSENT, FIXES, listed_reasons, no_rows, read_rows
from amalgam.pipeline.config.schema import Corpus, ExperimentConfig, Generate
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import DataError
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit
from amalgam.pipeline.input_files import unchanged
from amalgam.pipeline.storage.facts import FactTypes
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.store import Record
from amalgam.stages.common.corpus import (
    GENERATED,
    HELD_OUT,
    IN_MEMORY,
    LEARNED,
    MEASURED,
    REMOTE,
    CorpusFacts,
    FetchedFacts,
    Leak,
    Learned,
    Measured,
    PartRecordFacts,
    corpus_for,
    corpus_settings,
    filters_of,
    generated_part,
    read_bucket,
    sources_of,
)
from amalgam.stages.common.input_names import INPUT_NAMES
from amalgam.stages.common.load import fetch, part_files, part_identity, part_of, source_files, text_inputs
from amalgam.stages.objective_inputs import reads_texts
from amalgam.stages.target_methods import target_method

KEPT = "kept.parquet"
"""Temporary file of the generated texts that pass the filters."""

MOST_FILES = 100
"""Number of files of a source whose header is read."""

FEW = 0.1
"""A class with less than this fraction of its texts kept is reported."""


REACH = {
    "steered": "raise generate.steering_strength or generate.texts, or use another language model",
    "prompted": "change generate.prompt, rename the label (teachers: rename) or use another language model",
}
OTHER_REACH = "raise generate.texts"
"""The advice for a class without texts, by source; the second is that of sources without a language model."""

NUMBER = re.compile(r"[\d\s.,:/%+-]+")
"""A number, a date or a time."""


class ReadCorpus(Stage):
    name = "read-corpus"
    VERSION = 6  # equal generated texts have equal words, also where a script has no spaces
    parallelism = "single"
    unit_label = "parts"
    reads = ("generate",)
    sections = ("corpus",)
    facts = FactTypes(CorpusFacts, PartRecordFacts | FetchedFacts)
    input_names = {
        r"corpus\.id_type": "type of corpus.id",
        r"(train|validation|test)(\.\d+)?": r"content of corpus.\1",
        r"teachers(\.\d+)?": "content of train_teachers.texts",
        r"train_teachers": "train_teachers.texts",
        r"held-out(\.\d+)?": "generated texts that are held out",
    } | INPUT_NAMES

    def resolve_inputs(self, run: Run) -> None:
        """Checks local files before anything is downloaded; downloads remote files once and pins their content."""
        parts = sources_of(run.experiment)
        for part, sources in parts.items():
            with unchanged(text_inputs(run, sources)):
                check_texts(run, part=part)
        for sources in parts.values():
            fetch(run, sources)

    def identity(self, run: Run) -> Identity:
        settings: dict[str, object] = {"corpus": corpus_settings(run.experiment.corpus)}
        if run.experiment.generate and reads_texts(run.experiment):
            settings["generate"] = filters_of(run.experiment)
        if "teachers" in sources_of(run.experiment):
            settings["train_teachers"] = {"limit": corpus_for(run.experiment, "teachers").limit}
        return Identity(settings, {part: part_identity(run, part) for part in sources_of(run.experiment)})

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        return [
            Unit(part, run.store.folder(self.name, f"part-{_part_fingerprint(run, part)}"), 1, part)
            for part in sources_of(run.experiment)
        ]

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the bytes of the source files."""
        parts = sources_of(run.experiment) if units is None else [unit.name for unit in units]
        return float(sum(path.stat().st_size for part in parts for path in part_files(run, part)))

    def run_unit(self, run: Run, unit: Unit) -> None:
        files, sources = part_files(run, unit.name), sources_of(run.experiment)[unit.name]
        with run.store.draft(unit.folder, unit.name) as draft, unchanged(text_inputs(run, sources)):
            filters: dict[str, object] = {}
            if GENERATED in sources and run.experiment.generate:
                filters = _write_kept(files[0], run.experiment.generate, unit.name, draft.folder / KEPT)
                files = [draft.folder / KEPT]
            facts = read_part(
                files,
                corpus_for(run.experiment, unit.name),
                part=unit.payload,
                folder=draft.folder,
                require_label=unit.name == "train" and train_needs_label(run.experiment),
            )
            draft.facts = {"part": unit.name, **facts, **filters}
            (draft.folder / KEPT).unlink(missing_ok=True)

    def finish(self, run: Run, records: Sequence[Record]) -> dict[str, object]:
        parts = {record.name: record.facts for record in records}
        folders = {record.name: run.store.written_folder(record.files) for record in records if record.files}
        pairs = [(part, other) for part in MEASURED for other in LEARNED if part != other]
        leaked = [
            _leak(run, part, other, leaks(folders[other], folders[part]))
            for part, other in pairs
            if {part, other} <= folders.keys()
        ]
        return {"parts": parts, "leaks": [leak for leak in leaked if leak["texts"]]}

    def summary(self, run: Run, manifest: Record) -> Iterator[str]:
        corpus: CorpusFacts = manifest.facts
        for part, facts in corpus["parts"].items():
            yield f"{part}: {_counts(facts)}"
            if "accepted" in facts:
                yield f"  {_passed_texts(facts)}"

    def skipped(self, run: Run, manifest: Record) -> Iterator[str]:
        corpus: CorpusFacts = manifest.facts
        for part, facts in corpus["parts"].items():
            if facts["skipped"]:
                file = next(file for file in manifest.files if re.search(f"/{part}-[^/]*/{SKIPPED_FILE}$", file.path))
                rows = counted(sum(facts["skipped"].values()), f"{_shown_part(part)} row")
                where = run.store.where(run.store.root / file.path)
                yield f"{rows} skipped: {listed_reasons(facts['skipped'])}: {where}"

    def notes(self, run: Run, manifest: Record) -> Iterator[str]:
        # A held-out part is small, so its classes without texts get no note.
        corpus: CorpusFacts = manifest.facts
        train = corpus["parts"].get("train")
        source = run.experiment.generate.source if run.experiment.generate else ""
        yield from _poor_classes(train.get("accepted", {}) if train else {}, source)
        for part, facts in corpus["parts"].items():
            name = _shown_part(part)
            yield from _unused_files(name, facts)
            yield from _contradictions(name, facts)
            yield from missing_notes(facts.get("missing_texts", {}), f"{name} row")
            yield from _missing_labels(run.experiment.corpus, name, facts)
            yield from _mendable(run.experiment.corpus, name, facts)
        for leak in corpus["leaks"]:
            yield _leak_note(leak, corpus["parts"][leak["part"]]["texts"])
        learned = part_of(run, "train")
        texts = read_bucket(run.store, learned.buckets[0], ["text"]).column(0).to_pylist() if learned else []
        if texts and all(map(NUMBER.fullmatch, texts)):
            yield f"the train texts are numbers, such as {shown(texts[0])}: if they are no texts, set corpus.text"

    def recomputed(self, unit: Record | None, teacher: str) -> str:
        return f"read again: part {unit.name}" if unit else "read again: one part"

    def describe(self, manifest: Record) -> str:
        corpus: CorpusFacts = manifest.facts
        return ", ".join(f"{part} {counted(facts['texts'], 'text')}" for part, facts in corpus["parts"].items())


def _leak(run: Run, part: Measured, other: Learned, shared: tuple[int, list[bytes]]) -> Leak:
    texts, keys = shared
    places = places_of(keys, part_files(run, part), corpus_for(run.experiment, part)) if keys else []
    return {"part": part, "other": other, "texts": texts, "places": places}


def _leak_note(leak: Leak, texts: int) -> str:
    if leak["other"] == "train" and leak["texts"] == texts > 1:  # such as the texts to label of a report
        return f"all {texts:,} {leak['part']} texts are also in corpus.train: the accuracy on new texts can be lower"
    of, are = counted(texts, f"{leak['part']} text"), "is" if leak["texts"] == 1 else "are"
    also = {
        "train": "in corpus.train",
        "teachers": "in train_teachers.texts, which the teachers learn",
        "validation": "in corpus.validation, which selects the checkpoint unless student.select is held-out",
    }[leak["other"]]
    places = ", ".join([*leak["places"], *(["..."] if leak["texts"] > len(leak["places"]) else [])])
    return (
        f"{leak['texts']:,} of {of} {are} also {also}: {places}; remove them from one of the two, "
        "or their accuracy is too high"
    )


def _shown_part(part: str) -> str:
    """Returns the name of a part before a noun: `teachers` has the texts of train_teachers, not of the teachers."""
    return "train_teachers" if part == "teachers" else part


def _unused_files(part: str, facts: PartRecordFacts) -> Iterator[str]:
    """Yields a note on files of which no row is used: empty ones, and those whose rows are all bad."""
    names = facts.get("unused_files", [])
    if names:
        yield f"no row is used of {counted(len(names), f'{part} file')}: {shown_names(names, MOST_REPORTED)}"


def _contradictions(part: str, facts: PartRecordFacts) -> Iterator[str]:
    """Yields a note on texts whose rows have different labels."""
    if rows := facts.get("contradictions"):
        texts, more = counted(facts["conflicts"], f"{part} text", "has", "have"), "; ..."
        listed = "; ".join(rows) + more * (facts["conflicts"] > len(rows))
        yield f"{texts} different labels: {listed}. The most frequent label counts, else the first by name"


def _missing_labels(corpus: Corpus, part: str, facts: PartRecordFacts) -> Iterator[str]:
    """Yields a note for each label that looks like a missing one, unless the experiment names it."""
    named = {corpus.unknown, *(corpus.labels or ()), *corpus.rename.values()}
    for label in sorted(MISSING_VALUES & facts["labels"].keys() - named):
        texts = counted(facts["labels"][label], f"{part} text", "has", "have")
        yield f"{texts} the label {label}: if it is a missing one, fill it in, or remove these rows"


def _mendable(corpus: Corpus, part: str, facts: PartRecordFacts) -> Iterator[str]:
    """Yields a note for each reason of skipped rows that have a text or a label."""
    for reason, fix in FIXES.items():
        if reason in facts["skipped"] and reason not in ABSENT:
            names = {"unpack": "", "file": "FILE", "copy": "utf8-FILE"}
            command = fix.format(labels=shown_names(corpus.labels or []), **names)
            yield f"{counted(facts['skipped'][reason], f'{part} row')} left out, {reason}: {command}"


def _part_fingerprint(run: Run, part: str) -> str:
    """Paths are left out: a file is known by its content."""
    config = corpus_settings(corpus_for(run.experiment, part))
    return fingerprint([ReadCorpus.VERSION, part, config, part_identity(run, part), *run.versions.values()])


def check_texts(run: Run, *, part: str | None = None) -> None:
    """Refuses addresses of no file, and local files without a row or a needed column; reads their first rows alone."""
    sources = sources_of(run.experiment)
    for name in [part] if part else sources:
        corpus = corpus_for(run.experiment, name)
        needs_label = name != "train" or train_needs_label(run.experiment)
        for source in sources.get(name, []):
            if source.startswith(REMOTE):
                check_remote(source)
        local = [source for source in sources.get(name, []) if not source.startswith((*REMOTE, GENERATED, IN_MEMORY))]
        files = [file for source in local for file in islice(source_files(run, source), MOST_FILES)]
        empty = [
            file for file in files if next(read_rows(file, corpus=corpus, require_label=needs_label), None) is None
        ]
        if empty and (corpus.on_bad_row != "skip" or (len(local) == len(sources[name]) and empty == files)):
            raise no_rows(empty[0])


def train_needs_label(experiment: ExperimentConfig) -> bool:
    trains = experiment.train_teachers is not None and experiment.train_teachers.texts is None
    return trains or target_method(experiment.targets).reads_gold


def _counts(facts: PartRecordFacts) -> str:
    skipped = sum(facts["skipped"].values())
    counts = {
        counted(facts["duplicates"], "duplicate row"): facts["duplicates"],
        f"{counted(facts['conflicts'], 'text')} with contradicting labels": facts["conflicts"],
        f"{counted(skipped, 'row')} skipped": skipped,
        counted(len(facts["labels"]), "label"): facts["labels"],
    }
    return ", ".join([counted(facts["texts"], "text"), *(count for count, occurs in counts.items() if occurs)])


# ---- generated texts


def _write_kept(source: Path, settings: Generate, part: str, target: Path) -> dict[str, object]:
    """Writes the generated texts that pass all filters; returns the counts by filter and by class."""
    generated, filters = generated_part(read_table(source), settings, part)
    if not generated.num_rows:
        what = f"generate.held_out, a random share, leaves no generated text for the {part} part"
        fix = f"{'raise' if part == HELD_OUT else 'lower'} it, or raise generate.texts"
        raise DataError(what, where=f"generate.held_out: {settings.held_out:g}", fix=fix)
    failed = {name: int((~passes).sum()) for name, passes in filters.items()}
    kept = generated.filter(np.logical_and.reduce(list(filters.values())))
    if not kept.num_rows:
        raise DataError(
            f"none of {generated.num_rows:,} generated texts is left for the {part} part",
            where=f"the filters of generate; texts that fail: {_failures(failed) or 'none'}",
            fix=f"relax a filter (no new text is generated), or: {REACH.get(settings.source, OTHER_REACH)}",
        )
    write_table(kept, target)
    good = _by_class(kept)
    return {"failed": failed, "accepted": {name: [good[name], count] for name, count in _by_class(generated).items()}}


def _by_class(table: pa.Table) -> Counter[str]:
    origins = zip(*(table.column(name).to_pylist() for name in ("source", "teacher", "class")), strict=True)
    return Counter(
        source if teacher is None else teacher if label is None else f"{teacher}, {label}"
        for source, teacher, label in origins
    )


def _failures(failed: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in failed.items() if count)


def _passed_texts(facts: PartRecordFacts) -> str:
    kept, total = (sum(counts[place] for counts in facts["accepted"].values()) for place in (0, 1))
    failures = _failures(facts["failed"])
    return f"{kept:,} of {total:,} generated texts pass the filters" + (f" (fail: {failures})" if failures else "")


def _poor_classes(accepted: Mapping[str, Sequence[int]], source: str) -> Iterator[str]:
    """Yields a note for each class with hardly any texts left."""
    for name, (kept, total) in accepted.items():
        if kept < FEW * total:
            yield (
                f"{name}: {kept} of {total} generated texts pass the filters ({100 * kept / total:.0f}%): "
                f"{REACH.get(source, OTHER_REACH)}"
            )
