"""Sources of the corpus: paths, remote addresses and generated texts."""

from __future__ import annotations

from typing import Any

from amalgam.pipeline.config.schema import Corpus, ExperimentConfig
from amalgam.pipeline.storage.store import Record, StoredFile

REMOTE = ("hf://", "s3://")

HELD_OUT = "held-out"

GENERATED = "what generate wrote"
"""Represents the generated file among a part's sources."""

GATES = ("held_out", "min_class_probability", "max_duplicate", "max_repetition", "min_words")

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
    """Returns the corpus section of one part: only the training part and the teachers' texts have limits."""
    own = experiment.train_teachers.limit if experiment.train_teachers else None
    limit = {"train": experiment.corpus.limit, "teachers": own}.get(part)
    if part in generated_sources(experiment):
        return experiment.corpus.model_copy(update={**AS_GENERATED, "limit": limit})
    return experiment.corpus.model_copy(update={"limit": limit})


def corpus_settings(corpus: Corpus) -> dict[str, Any]:
    """Returns the settings that parts depend on; older parts stay valid: with id_type, without an empty `rename`."""
    return {"id_type": "auto", **corpus.model_dump(exclude=PATHS if corpus.rename else {*PATHS, "rename"})}


def sources_of(experiment: ExperimentConfig) -> dict[str, list[str]]:
    corpus = experiment.corpus
    own = experiment.train_teachers.texts if experiment.train_teachers else None
    parts = {"train": corpus.train, "validation": corpus.validation, "test": corpus.test, "teachers": own}
    parts |= generated_sources(experiment)
    return {part: sources for part, sources in parts.items() if sources}


def texts_file(manifest: Record) -> StoredFile:
    """Returns the stored table of all generated texts."""
    return next(file for file in manifest.files if file.path == manifest.facts["file"])


def generated_sources(experiment: ExperimentConfig) -> dict[str, list[str]]:
    settings = experiment.generate
    if settings is None or not experiment.reads_texts:
        return {}
    return {"train": [GENERATED], **({HELD_OUT: [GENERATED]} if settings.held_out else {})}


def are_written(experiment: ExperimentConfig) -> bool:
    """Returns whether each text was generated for a teacher and one of its classes."""
    return experiment.generate is not None and experiment.generate.writes


def gates_of(experiment: ExperimentConfig) -> dict[str, Any]:
    return experiment.generate.model_dump(include=set(GATES)) if experiment.generate else {}
