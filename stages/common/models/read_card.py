"""Reads licences, data sets and languages from a model's README.md, for the card of a student that is made of it.

Only the front matter that the Hub defines is read. A field that it does not state stays empty.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.stages.common.models.model_folder import CARD
from amalgam.stages.common.models.resolve import ModelFiles

MOST_BYTES = 1_000_000
MOST_ITEMS, MOST_CHARACTERS = 100, 200
"""Largest number of entries of a list, and of characters of one."""

FRONT_MATTER = re.compile(r"\A\ufeff?\s*---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
GATE = "extra_gated_"
"""Start of the fields by which a card requires consent before a download."""


@dataclass(frozen=True)
class CardFacts:
    licences: list[str]
    """Identifiers of the Hub, in lower case."""
    licence_name: str | None
    """The name of a licence without an identifier."""
    datasets: list[str]
    languages: list[str]
    gated: bool
    problem: str | None
    """Why the card states nothing; None if it was read."""


@dataclass(frozen=True)
class Source(CardFacts):
    """A model that a student is made of; it has no path, because it is published with the student."""

    role: str
    """`the encoder`, or `teacher NAME`."""
    model: str | None
    """Id on the Hub, or package:module/folder; None for a local folder."""
    commit: str | None
    trained: bool
    """Whether the experiment trained the teacher; the card is then that of its encoder."""


@dataclass(frozen=True)
class TrainingSummary:
    """How a student was made; it has no path either."""

    method: str
    texts: int
    steps: int
    best_step: int
    selected_by: str
    datasets: list[str]
    """The data sets of the Hub among its training texts."""
    settings: dict[str, dict[str, Any]]
    """Fields of the experiment that determine it, by section."""
    libraries: dict[str, str]
    automatic: dict[str, int | float] = field(default_factory=dict)
    """The epochs and the learning rate that `auto` chooses for its texts, whether it did or not."""
    models: dict[str, str] = field(default_factory=dict)
    """The digests of `model_digests`."""


def model_digests(experiment: ExperimentConfig) -> dict[str, str]:
    """Returns a digest of the fields, which have paths, of each teacher and of the encoder; no file is read."""
    fields = {"model", "revision", "labels", "rename", "max_tokens", "dropout"}
    models = {
        f"teachers.{teacher.name}": teacher.model_dump(include=fields | ({"catch_all"} if teacher.catch_all else set()))
        for teacher in experiment.teachers
    }
    models["student.encoder"] = experiment.student.model_dump(include={"encoder", "revision"})
    return {name: fingerprint(values) for name, values in models.items()}


def source_of(role: str, files: ModelFiles, *, trained: bool = False) -> Source:
    is_public = files.commit is not None or files.given.startswith("package:")
    card = _facts({}, "it is a file of predictions") if files.are_predictions else read_card(files.folder)
    return Source(
        role=role,
        model=files.given.removeprefix("hub:") if is_public else None,
        commit=files.commit,
        trained=trained,
        **asdict(card),
    )


def read_card(folder: Path) -> CardFacts:
    """Returns the statements of the folder's card; a card that cannot be read is a problem, not an error."""
    if not (folder / CARD).is_file():
        return _facts({}, f"there is no file {CARD}")
    try:
        with (folder / CARD).open("rb") as file:
            text = file.read(MOST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        return _facts({}, f"{CARD} cannot be read ({error.strerror})")
    matter = FRONT_MATTER.match(text)
    if not matter:
        return _facts({}, f"{CARD} has no front matter between two lines of ---")
    try:
        # Its values are text alone: `language: no` is Norwegian, not false.
        stated = yaml.load(matter[1], yaml.BaseLoader)  # noqa: S506 - it constructs text, lists and mappings
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 2}" if mark else ""
        return _facts({}, f"the front matter of {CARD} is not YAML{line}")
    if not isinstance(stated, dict):
        return _facts({}, f"the front matter of {CARD} is not a mapping")
    return _facts(stated, None)


def _facts(stated: dict[Any, Any], problem: str | None) -> CardFacts:
    names = _texts(stated.get("license_name"))
    return CardFacts(
        licences=[licence.lower() for licence in _texts(stated.get("license"))],
        licence_name=names[0] if names else None,
        datasets=_texts(stated.get("datasets")),
        languages=_texts(stated.get("language")),
        gated=any(str(key).startswith(GATE) for key in stated),
        problem=problem,
    )


def _texts(value: Any) -> list[str]:
    """Returns the texts of an entry, which may be one text or a list; other values are left out."""
    items = value if isinstance(value, list) else [value]
    texts = [item.strip()[:MOST_CHARACTERS] for item in items[:MOST_ITEMS] if isinstance(item, str)]
    return [text for text in texts if text]
