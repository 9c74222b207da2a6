"""The models of a run: resolved teachers with the checks of their labels, and encoders under a new head."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from amalgam.data.keys import shown, shown_names
from amalgam.pipeline.config.schema import Corpus
from amalgam.pipeline.errors import DataError, ExperimentError
from amalgam.stages.common.corpus import Part
from amalgam.stages.common.models.resolve import ModelFiles

LABELS_SHOWN = 5

SIMILARITY = 0.85
"""Lowest ratio of difflib at which an error suggests a label for another one."""

LAST_LAYER = 0
"""A number of blocks of hidden states that means the last layer alone."""


@dataclass(frozen=True)
class ResolvedTeacher:
    """A teacher whose model files exist on this machine, with its settings."""

    name: str
    files: ModelFiles
    labels: tuple[str, ...]
    max_tokens: int
    dropout: float | None

    @property
    def identity(self) -> dict[str, Any]:
        """Returns everything that determines its outputs, except the text; renaming labels reruns no pass."""
        return {"content": self.files.digest, "max_tokens": self.max_tokens, "dropout": self.dropout}


@dataclass(frozen=True)
class NewClassifier:
    """Holds a model with an untrained head, its tokenizer and how texts are tokenised for it."""

    model: Any
    tokenizer: Any
    tokenizer_digest: str
    limit: int
    types: bool
    pad_id: int


def takes_types(config: Any) -> bool:
    """Whether the model distinguishes the two texts of a pair by token types."""
    return int(getattr(config.get_text_config(), "type_vocab_size", 0) or 0) > 1


def check_one_label_set(teachers: Sequence[ResolvedTeacher], mode: str) -> None:
    """Refuses teachers with different label sets, for methods that average over one set."""
    first = teachers[0]
    for teacher in teachers[1:]:
        difference = sorted(set(first.labels) ^ set(teacher.labels))
        if difference:
            raise ExperimentError(
                f"{mode} needs teachers with one label set: {first.name} and {teacher.name} do not share "
                f"{shown_names(difference, LABELS_SHOWN)}",
                where=f"targets.mode: {mode}",
                fix="rename labels that mean the same (teachers: rename), or another method: `amalgam methods`",
            )


def check_gold_labels(part: Part, corpus: Corpus, union: set[str]) -> str | None:
    """Refuses gold labels outside the union; returns a note where the corpus settings skip such texts."""
    counts = part.facts["labels"]
    unknown = {label: int(count) for label, count in sorted(counts.items()) if label not in union}
    if not unknown:
        return None
    names = shown_names(unknown, LABELS_SHOWN)
    count = sum(unknown.values())
    texts = f"{count:,} {part.name} text{'s' if count > 1 else ''}"
    if corpus.on_bad_row == "error" or len(unknown) == len(counts):
        raise DataError(
            f"{texts} {'have' if count > 1 else 'has'} a gold label that is not in the union: {names}",
            where=f"corpus.{part.name}, column {shown(str(corpus.label))}; "
            f"the union is {shown_names(sorted(union), len(union))}",
            fix=f"rename a teacher's labels ({_suggested_renames(unknown, union)}), or leave such texts out: "
            "corpus.on_bad_row: skip",
        )
    return f"{texts} left out: no teacher has the label {names}"


def _suggested_renames(unknown: Iterable[str], union: Iterable[str]) -> str:
    """Returns a `rename` entry for labels that differ only by case or a letter."""
    folded = {label.casefold(): label for label in union}
    close = {label: difflib.get_close_matches(label.casefold(), folded, 1, SIMILARITY) for label in unknown}
    pairs = {folded[matches[0]]: label for label, matches in close.items() if matches}
    renames = ", ".join(f"{json.dumps(old)}: {json.dumps(new)}" for old, new in list(pairs.items())[:LABELS_SHOWN])
    return f"rename: {{{renames}}}" if renames else "teachers: rename"
