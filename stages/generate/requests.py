"""What is to be written: per teacher and class a family of texts, in blocks of so many; a unit is one block.

A family is everything that its texts are a function of but their number. Names are no part of it: they are put in
when all texts are gathered, so that renaming writes nothing anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from amalgam.pipeline.config.schema import Generate
from amalgam.pipeline.execution.stage import PendingDependencyError, Run, Unit
from amalgam.pipeline.execution.versions import library_versions
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.stages.common.load import teachers_of
from amalgam.stages.common.models.resolve import ModelFiles, needs_network, resolve
from amalgam.stages.common.sources import local_files
from amalgam.stages.common.teachers import ResolvedTeacher

ENGINE = 1
"""Raised whenever the same models, settings, seed and index give another text."""

BLOCK = 16
"""Texts of a unit: always whole, so that more texts later find them as they are."""

LANGUAGE_MODEL = "generate.language_model"


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

SAID: Mapping[str, set[str]] = {
    "steered": {"steering_strength", "candidates", "max_tokens", "max_scored", "seed"},
    "prompted": {"candidates", "max_tokens", "seed"},
    "random-words": {"max_tokens", "seed"},
    "cross-domain": {"column", "seed"},
}

GATES = {"held_out", "min_class_probability", "max_duplicate", "max_repetition", "min_words"}


@dataclass(frozen=True)
class Family:
    name: str
    key: Mapping[str, Any]
    teacher: str | None
    label: int | None
    """The class, by its place among the teacher's labels."""
    count: int
    """Texts that are wanted of it."""
    choices: Mapping[str, Choices] = field(default_factory=dict)
    """What each text draws its own of."""

    @property
    def blocks(self) -> int:
        return -(-self.count // BLOCK)


@dataclass(frozen=True)
class Block:
    family: Family
    first: int


def generate_config(run: Run) -> Generate:
    if run.experiment.generate is None:
        raise AssertionError("generate is not wanted")  # `wanted` says so
    return run.experiment.generate


def text_families(run: Run) -> list[Family]:
    """In the order of teachers and their labels."""
    if "text families" not in run.cache:
        run.cache["text families"] = list(_families(run))
    found: list[Family] = run.cache["text families"]
    return found


def block_units(run: Run) -> Iterator[Unit]:
    """The first blocks of all families, then the second ones: any share of them is as balanced as the whole."""
    families = text_families(run)
    for number in range(max(family.blocks for family in families)):
        for family in families:
            if number < family.blocks:
                folder = run.store.folder("generate", family.name) / "units"
                yield Unit(f"{number:06}", folder, BLOCK, Block(family, number * BLOCK))


def choices_of(settings: Generate) -> dict[str, Choices]:
    """Prompts, temperatures, top_k and top_p, the source's own where nothing is said."""
    own = DIVERSITY[settings.source]
    return {name: getattr(settings, name) or own[name] for name in own}


def said_of(settings: Generate) -> dict[str, Any]:
    """Of the section, what texts are a function of, as far as the source reads it."""
    choices = choices_of(settings) if settings.writes else {}
    return {"source": settings.source, **settings.model_dump(include=SAID[settings.source]), **choices}


def language_model_files(run: Run) -> ModelFiles:
    settings = generate_config(run)
    if LANGUAGE_MODEL not in run.cache:
        run.cache[LANGUAGE_MODEL] = resolve(**_reference(run), digest_of=run.digest_of, where=LANGUAGE_MODEL)
    found: ModelFiles = run.cache[LANGUAGE_MODEL]
    if settings.language_model is None:
        raise AssertionError("no language model")  # the experiment says so
    return found


def language_model_digest(run: Run) -> str:
    """For identities: never asks the Hub."""
    if LANGUAGE_MODEL not in run.cache and needs_network(**_reference(run)):
        raise PendingDependencyError(str(generate_config(run).language_model))
    return language_model_files(run).digest


def teacher_identity(known: ResolvedTeacher) -> dict[str, Any]:
    """Dropout is off here."""
    return {"content": known.files.digest, "max_tokens": known.max_tokens}


def corpus_digests(run: Run) -> list[str]:

    sources = generate_config(run).corpus or []
    return sorted(run.digest_of(path) for source in sources for path in local_files(run, source))


def no_word(label: str) -> bool:
    """A name that tells a language model nothing."""
    numbered = re.fullmatch(r"(?i)(label|class|category|topic|[a-z])?[ _-]*\d+", label)
    return bool(numbered) or re.search(r"[^\W\d_]{2,}", label) is None


def _families(run: Run) -> Iterator[Family]:
    settings = generate_config(run)
    common = {"engine": ENGINE, **said_of(settings)}
    if run.experiment.execution.on_version_change == "strict":
        common["libraries"] = library_versions()
    teachers = teachers_of(run)
    if settings.source == "cross-domain":
        count = settings.texts * sum(len(known.labels) for known in teachers)
        yield _family({**common, "texts": corpus_digests(run)}, None, None, count)
        return
    for known in teachers:
        of_teacher = {**common, "teacher": teacher_identity(known)}
        if not settings.writes:
            yield _family(of_teacher, known.name, None, settings.texts * len(known.labels))
            continue
        for place, label in enumerate(known.labels):
            own = choices_of(settings)
            own["prompt"] = [prompt.replace("{label}", label) for prompt in own["prompt"]]
            key = {**of_teacher, "language_model": language_model_digest(run), "label": place, **own}
            yield _family(key, known.name, place, settings.texts, own)


def _family(
    key: Mapping[str, Any], teacher: str | None, label: int | None, count: int, choices: Mapping[str, Choices] = {}
) -> Family:
    return Family(fingerprint(key), key, teacher, label, count, choices)


def _reference(run: Run) -> dict[str, Any]:
    settings = generate_config(run)
    where = {"base": run.base, "pins": run.store}
    return {"given": settings.language_model, "revision": settings.revision, **where}
