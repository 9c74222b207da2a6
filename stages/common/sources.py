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
    """Returns the corpus section of one part: only the training part and the teachers' texts have limits."""
    own = experiment.train_teachers.limit if experiment.train_teachers else None
    limit = {"train": experiment.corpus.limit, "teachers": own}.get(part)
    if part in generated_sources(experiment):
        return experiment.corpus.model_copy(update={**AS_GENERATED, "limit": limit})
    return experiment.corpus.model_copy(update={"limit": limit})


def corpus_settings(corpus: Corpus) -> dict[str, Any]:
    """Returns the settings that parts depend on; an empty `rename` is left out, so older parts stay valid."""
    return corpus.model_dump(exclude=PATHS if corpus.rename else {*PATHS, "rename"})


def sources_of(experiment: ExperimentConfig) -> dict[str, list[str]]:
    corpus = experiment.corpus
    own = experiment.train_teachers.texts if experiment.train_teachers else None
    parts = {"train": corpus.train, "validation": corpus.validation, "test": corpus.test, "teachers": own}
    parts |= generated_sources(experiment)
    return {part: sources for part, sources in parts.items() if sources}
