"""Source files of the corpus: paths, remote addresses, generated texts."""

from __future__ import annotations

from typing import Any

from amalgam.pipeline.config.schema import Corpus, ExperimentConfig
from amalgam.stages.common.generated_texts import generated_sources

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
