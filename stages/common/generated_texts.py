"""Generated texts as a part of the corpus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.storage.store import Record, StoredFile

if TYPE_CHECKING:
    pass


def texts_file(manifest: Record) -> StoredFile:
    """Returns the stored table of all generated texts."""
    return next(file for file in manifest.files if file.path == manifest.facts["file"])


HELD_OUT = "held-out"

GENERATED = "what generate wrote"
"""Represents the generated file among a part's sources."""

GATES = ("held_out", "min_class_probability", "max_duplicate", "max_repetition", "min_words")


def generated_sources(experiment: ExperimentConfig) -> dict[str, list[str]]:
    settings = experiment.generate
    if settings is None or not experiment.reads_texts:
        return {}
    return {"train": [GENERATED], **({HELD_OUT: [GENERATED]} if settings.held_out else {})}


def are_written(experiment: ExperimentConfig) -> bool:
    """Whether each text was written for a teacher and one of its classes."""
    return experiment.generate is not None and experiment.generate.writes


def gates_of(experiment: ExperimentConfig) -> dict[str, Any]:
    return experiment.generate.model_dump(include=set(GATES)) if experiment.generate else {}
