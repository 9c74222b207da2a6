"""Source files of the corpus: paths, remote addresses, generated texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amalgam.data.sources import fetch_remote, find_files
from amalgam.pipeline.config.schema import Corpus, ExperimentConfig
from amalgam.pipeline.execution.stage import PendingDependencyError, Run
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.stages.common.generated_texts import GENERATED, gates_of, generated_file, generated_sources

REMOTE = ("hf://", "s3://")

PATHS = {"train", "validation", "test"}

AS_GENERATED: dict[str, Any] = {
    "text": ["text"],
    "id": "auto",
    "label": None,
    "labels": None,
    "rename": {},
    "on_bad_row": "error",
}


def corpus_for(experiment: ExperimentConfig, part: str) -> Corpus:
    """What is said of one part: a limit cuts the training part, and the teachers' own texts have theirs."""
    own = experiment.train_teachers.limit if experiment.train_teachers else None
    limit = {"train": experiment.corpus.limit, "teachers": own}.get(part)
    if part in generated_sources(experiment):
        return experiment.corpus.model_copy(update={**AS_GENERATED, "limit": limit})
    return experiment.corpus.model_copy(update={"limit": limit})


def _said(corpus: Corpus) -> dict[str, Any]:
    """What parts depend on. Where nothing is renamed nothing is said of it: older parts stand."""
    return corpus.model_dump(exclude=PATHS if corpus.rename else {*PATHS, "rename"})


def sources_of(experiment: ExperimentConfig) -> dict[str, list[str]]:
    corpus = experiment.corpus
    own = experiment.train_teachers.texts if experiment.train_teachers else None
    parts = {"train": corpus.train, "validation": corpus.validation, "test": corpus.test, "teachers": own}
    parts |= generated_sources(experiment)
    return {part: sources for part, sources in parts.items() if sources}


def part_identity(run: Run, part: str) -> list[str]:
    found: list[str] = []
    for source in sources_of(run.experiment)[part]:
        if source == GENERATED:
            found += [generated_file(run).sha256, fingerprint(gates_of(run.experiment))]
        elif source.startswith(REMOTE):
            digest = run.store.pinned("remote", source)
            if digest is None:
                raise PendingDependencyError(source)
            found.append(digest)
        else:
            found += [run.digest_of(path) for path in local_files(run, source)]
    return sorted(found)


def local_files(run: Run, source: str) -> list[Path]:

    if source == GENERATED:
        return [run.store.verified_path(generated_file(run))]
    if source.startswith(REMOTE):
        fetched = _fetched(run, source)
        if fetched is None:
            raise PendingDependencyError(source)
        return [fetched]
    return find_files(source, run.base)


def fetch(run: Run, sources: Sequence[str]) -> None:
    """Remote ones that are not here yet."""
    for source in sources:
        if source.startswith(REMOTE) and _fetched(run, source) is None:
            _fetch(run, source)


def _fetched(run: Run, source: str) -> Path | None:
    record = run.store.record(_fetched_record(run, source))
    if record is None or run.store.missing_files(record):
        return None
    return run.store.verified_path(record.files[0])


def _fetched_record(run: Run, source: str) -> Path:
    return run.store.folder("read-corpus", "remote") / f"{fingerprint(source)}.json"


def _fetch(run: Run, source: str) -> None:

    run.console.say(f"read-corpus: fetching {source}")
    path = _fetched_record(run, source)
    with run.store.draft(path.parent, path.stem, ".parquet") as draft:
        fetch_remote(source, draft.folder)
    record = run.store.record(path)
    if record is not None:
        run.store.pin("remote", source, record.files[0].sha256)
