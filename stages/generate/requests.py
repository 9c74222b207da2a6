"""Plans the texts to generate: one family per teacher and class, one unit per block of texts.

A family's key contains everything that determines its texts except their number. Names are added when the texts are
collected, so renaming a teacher or a label generates nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

from amalgam.pipeline.config.schema import Generate
from amalgam.pipeline.execution.stage import Unit
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.models.resolve import ResolvedTeacher

ENGINE = 2  # texts after prompts of more than 64 tokens
OTHER_ENGINE = 4  # halfwidth katakana are words
"""Versions with and without a language model: raised if the same models, settings, seed and index give another text."""

LANGUAGE_MODEL = "generate.language_model"

BLOCK = 16
LARGE_BLOCK = 1024
"""Texts per unit, with and without a language model. Blocks are always complete, so a larger number reuses them."""

Choices = Sequence[Any]

DIVERSITY: Mapping[str, Mapping[str, Choices]] = {
    "steered": {"prompt": [""], "temperature": [1.0], "top_k": [None], "top_p": [0.9]},
    "prompted": {
        "prompt": ["{label}: ", "A text about {label}: ", "The following text is about {label}.\n"],
        "temperature": [0.7, 1.0, 1.3],
        "top_k": [20, 50, 200],
        "top_p": [0.8, 0.9, 1.0],
    },
}
"""Each source's default prompts and sampling settings."""

IDENTITY_FIELDS: Mapping[str, set[str]] = {
    "steered": {"steering_strength", "candidates", "max_tokens", "max_scored", "seed"},
    "prompted": {"candidates", "max_tokens", "seed"},
    "random-words": {"max_tokens", "seed"},
    "cross-domain": {"column", "seed"},
    "recombined": {"column", "seed"},
}
"""The settings that each source's texts depend on."""


@dataclass(frozen=True)
class Family:
    key: Mapping[str, Any]
    teacher: str | None
    label: int | None
    """Index of the class among the teacher's labels."""
    count: int
    """Number of requested texts."""
    choices: Mapping[str, Choices] = field(default_factory=dict)
    """Options from which each text draws its own."""

    @cached_property
    def name(self) -> str:
        return fingerprint(self.key)

    @cached_property
    def block(self) -> int:
        return BLOCK if self.choices else LARGE_BLOCK


@dataclass(frozen=True)
class Block:
    family: Family
    first: int

    @property
    def indices(self) -> range:
        return range(self.first, self.first + self.family.block)


@dataclass(frozen=True)
class TextPlan:
    """Everything that determines the generated texts."""

    settings: Generate
    teachers: Sequence[ResolvedTeacher]
    language_model: str | None
    """Digest; None where the source needs no language model."""
    corpus: Sequence[str]
    """Digests of the texts of generate.corpus."""
    libraries: Mapping[str, str] | None
    """Library versions, where they are part of the identity."""

    @cached_property
    def families(self) -> list[Family]:
        """Returns the families in the order of the teachers' names and their labels; the same models share them."""
        settings = self.settings
        common = {"engine": ENGINE if settings.writes else OTHER_ENGINE, **fingerprint_config(settings)}
        if self.libraries is not None:
            common["libraries"] = dict(self.libraries)
        if not settings.writes:
            common["block"] = LARGE_BLOCK
        if settings.reads_corpus:
            count = settings.texts * sum(len(teacher.labels) for teacher in self.teachers)
            return [Family({**common, "texts": list(self.corpus)}, None, None, count)]
        families: dict[str, Family] = {}
        for teacher in sorted(self.teachers, key=attrgetter("name")):
            for family in self._of_teacher(teacher, common):
                families.setdefault(family.name, family)
        return list(families.values())

    def _of_teacher(self, teacher: ResolvedTeacher, common: Mapping[str, Any]) -> Iterator[Family]:
        settings = self.settings
        key = {**common, "teacher": teacher_identity(teacher)}
        if not settings.writes:
            yield Family(key, teacher.name, None, settings.texts * len(teacher.labels))
            return
        for index, label in zip(teacher.places, teacher.labels, strict=True):
            choices = sampling_choices(settings)
            choices["prompt"] = [prompt.replace("{label}", label) for prompt in choices["prompt"]]
            family_key = {**key, "language_model": self.language_model, "label": index, **choices}
            yield Family(family_key, teacher.name, index, settings.texts, choices)

    def units(self, store: Store) -> list[Unit]:
        """Returns the first block of every family, then the second ones, so every share of the work is balanced."""
        return [
            Unit(f"{number:06}", folder, min(family.block, family.count - first), Block(family, first))
            for number in range(max(-(-family.count // family.block) for family in self.families))
            for family in self.families
            if (first := number * family.block) < family.count
            for folder in [store.folder("generate", family.name) / "units"]
        ]


def sampling_choices(settings: Generate) -> dict[str, Choices]:
    """Returns prompts, temperatures, top_k and top_p, with the source's defaults for unset fields."""
    defaults = DIVERSITY[settings.source]
    return {name: getattr(settings, name) or defaults[name] for name in defaults}


def fingerprint_config(settings: Generate) -> dict[str, object]:
    """Returns the settings that the texts depend on; fields that the source ignores are left out."""
    choices = sampling_choices(settings) if settings.writes else {}
    return {"source": settings.source, **settings.model_dump(include=IDENTITY_FIELDS[settings.source]), **choices}


def teacher_identity(teacher: ResolvedTeacher) -> dict[str, object]:
    """Returns the teacher's identity without dropout, which is off during generation."""
    return {"content": teacher.files.digest, "max_tokens": teacher.max_tokens}


def uninformative_label(label: str) -> bool:
    """Returns whether a label name carries no meaning for a language model: a number or no letters."""
    numbered = re.fullmatch(r"(?i)(label|class|category|topic|[a-z])?[ _-]*\d+", label)
    return bool(numbered) or re.search(r"[^\W\d_]{2,}", label) is None
