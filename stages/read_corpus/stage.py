"""Stage read-corpus: each part of the corpus is a unit, recognised by the digests of its source files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from amalgam.pipeline.experiment import Corpus, ExperimentFile
from amalgam.pipeline.fingerprint import fingerprint
from amalgam.pipeline.stage import Identity, NotKnownYetError, Run, Unit, UnitByUnit
from amalgam.pipeline.store import Record
from amalgam.stages.read_corpus.generated import (
    GENERATED,
    gate_lines,
    gates_of,
    generated_file,
    generated_sources,
    write_kept,
)

REMOTE = ("hf://", "s3://")
PATHS = {"train", "validation", "test"}
KEPT = "kept.parquet"
AS_GENERATED: dict[str, Any] = {
    "text": ["text"],
    "id": "auto",
    "label": None,
    "labels": None,
    "rename": {},
    "on_bad_row": "error",
}


class ReadCorpus(UnitByUnit):
    name: ClassVar[str] = "read-corpus"
    VERSION: ClassVar[int] = 2
    spread: ClassVar[Literal["units", "together", "alone"]] = "alone"
    measure: ClassVar[str] = "parts"

    def wanted(self, experiment: ExperimentFile) -> bool:  # noqa: ARG002 - every experiment has texts
        return True

    def prepare(self, run: Run) -> None:
        """Remote files are fetched once; what they held then is pinned."""
        for sources in sources_of(run.experiment).values():
            fetch(run, sources)

    def identity(self, run: Run) -> Identity:
        said: dict[str, Any] = {"corpus": _said(run.experiment.corpus)}
        if run.experiment.generate and run.experiment.reads_texts:
            said["generate"] = gates_of(run.experiment)
        if "teachers" in sources_of(run.experiment):
            said["train_teachers"] = {"limit": corpus_for(run.experiment, "teachers").limit}
        return Identity(said, {part: part_identity(run, part) for part in sources_of(run.experiment)})

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:  # noqa: ARG002 - a part is shared by all experiments
        return [
            Unit(part, run.store.folder(self.name, f"part-{_part_fingerprint(run, part)}"), 1, part)
            for part in sources_of(run.experiment)
        ]

    def run_unit(self, run: Run, unit: Unit) -> None:
        from amalgam.data.corpus import read_part

        with run.store.draft(unit.folder, unit.name) as draft:
            files, gates = _files(run, unit.name, draft.folder)
            needs_label = unit.name == "train" and _train_needs_label(run.experiment)
            facts = read_part(
                files,
                corpus_for(run.experiment, unit.name),
                part=unit.work,
                folder=draft.folder,
                require_label=needs_label,
            )
            draft.facts = {"part": unit.name, **facts.to_json(), **gates}
            (draft.folder / KEPT).unlink(missing_ok=True)

    def finish(self, run: Run, folder: Path, records: Sequence[Record]) -> dict[str, Any]:  # noqa: ARG002
        from amalgam.data.corpus import leaks

        parts = {record.name: record.facts for record in records}
        folders = {record.name: run.store.at_hand(record.files) for record in records if record.files}
        leaked = {
            part: list(leaks(folders["train"], folders[part]))
            for part in ("validation", "test")
            if {part, "train"} <= folders.keys()
        }
        return {"parts": parts, "leaks": leaked}

    def deliver(self, run: Run, manifest: Record, *, fresh: bool) -> None:
        if not fresh:
            return
        for part, facts in manifest.facts["parts"].items():
            run.console.say(f"  {part}: {_counts(facts)}")
            _say_gates(run, part, facts)
        for part, (count, which) in manifest.facts["leaks"].items():
            if count:
                run.console.note(
                    f"{count} {part} texts are also in train: {', '.join(which)}{', ...' if count > len(which) else ''}"
                )


def _say_gates(run: Run, part: str, facts: dict[str, Any]) -> None:
    """Of a few that are held out, none of a class says nothing."""
    if "accepted" in facts:
        said, poor = gate_lines(facts)
        run.console.say(f"    {said}")
        for line in poor if part == "train" else []:
            run.console.note(line)


def _files(run: Run, part: str, folder: Path) -> tuple[list[Path], dict[str, Any]]:
    """The part's files; of generated texts those that pass, laid down for the time of reading, and what did not."""
    sources = sources_of(run.experiment)[part]
    if sources == [GENERATED]:
        return [folder / KEPT], write_kept(run, part, folder / KEPT)
    return [path for source in sources for path in local_files(run, source)], {}


def _counts(facts: dict[str, Any]) -> str:
    said = [f"{facts['texts']:,} text{'' if facts['texts'] == 1 else 's'}"]
    said += [f"{facts['duplicates']:,} duplicate rows"] if facts["duplicates"] else []
    said += [f"{facts['conflicts']:,} texts with contradicting labels"] if facts["conflicts"] else []
    skipped = sum(facts["skipped"].values())
    said += [f"{skipped:,} rows skipped (skipped.parquet)"] if skipped else []
    said += [f"{len(facts['labels'])} labels"] if facts["labels"] else []
    return ", ".join(said)


def corpus_for(experiment: ExperimentFile, part: str) -> Corpus:
    """What is said of one part: a limit cuts the training part, and the teachers' own texts have theirs."""
    own = experiment.train_teachers.limit if experiment.train_teachers else None
    limit = {"train": experiment.corpus.limit, "teachers": own}.get(part)
    if part in generated_sources(experiment):
        return experiment.corpus.model_copy(update={**AS_GENERATED, "limit": limit})
    return experiment.corpus.model_copy(update={"limit": limit})


def _part_fingerprint(run: Run, part: str) -> str:
    """Paths are left out: a file is known by its content."""
    config = _said(corpus_for(run.experiment, part))
    return fingerprint([ReadCorpus.VERSION, part, config, part_identity(run, part)])


def _said(corpus: Corpus) -> dict[str, Any]:
    """What parts depend on. Where nothing is renamed nothing is said of it: older parts stand."""
    return corpus.model_dump(exclude=PATHS if corpus.rename else {*PATHS, "rename"})


def sources_of(experiment: ExperimentFile) -> dict[str, list[str]]:
    corpus = experiment.corpus
    own = experiment.train_teachers.texts if experiment.train_teachers else None
    parts = {"train": corpus.train, "validation": corpus.validation, "test": corpus.test, "teachers": own}
    parts |= generated_sources(experiment)
    return {part: sources for part, sources in parts.items() if sources}


def _train_needs_label(experiment: ExperimentFile) -> bool:
    trains = experiment.train_teachers is not None and experiment.train_teachers.texts is None
    return trains or experiment.targets.reads_gold


def part_identity(run: Run, part: str) -> list[str]:
    found: list[str] = []
    for source in sources_of(run.experiment)[part]:
        if source == GENERATED:
            found += [generated_file(run).sha256, fingerprint(gates_of(run.experiment))]
        elif source.startswith(REMOTE):
            digest = run.store.get("remote", source)
            if digest is None:
                raise NotKnownYetError(source)
            found.append(digest)
        else:
            found += [run.digest_of(path) for path in local_files(run, source)]
    return sorted(found)


def local_files(run: Run, source: str) -> list[Path]:
    from amalgam.data.sources import files_of

    if source == GENERATED:
        return [run.store.checked(generated_file(run))]
    if source.startswith(REMOTE):
        fetched = _fetched(run, source)
        if fetched is None:
            raise NotKnownYetError(source)
        return [fetched]
    return files_of(source, run.base)


def fetch(run: Run, sources: Sequence[str]) -> None:
    """Remote ones that are not here yet."""
    for source in sources:
        if source.startswith(REMOTE) and _fetched(run, source) is None:
            _fetch(run, source)


def _fetched(run: Run, source: str) -> Path | None:
    record = run.store.record(_fetched_record(run, source))
    if record is None or run.store.absent(record):
        return None
    return run.store.checked(record.files[0])


def _fetched_record(run: Run, source: str) -> Path:
    return run.store.folder("read-corpus", "remote") / f"{fingerprint(source)}.json"


def _fetch(run: Run, source: str) -> None:
    from amalgam.data.sources import fetch_remote

    run.console.say(f"read-corpus: fetching {source}")
    path = _fetched_record(run, source)
    with run.store.draft(path.parent, path.stem, ".parquet") as draft:
        fetch_remote(source, draft.folder)
    record = run.store.record(path)
    if record is not None:
        run.store.keep("remote", source, record.files[0].sha256)
