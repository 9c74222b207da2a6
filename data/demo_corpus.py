"""The embedded corpus: short English texts about eight topics, made by a grammar, offline and seeded.

Each text has words of one topic, some of a second topic, and words that several topics share. The label is the topic
with the largest expected share of words. Some texts are therefore ambiguous, and no model predicts all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from configparser import ConfigParser
from hashlib import blake2b
from itertools import chain, count
from pathlib import Path
from random import Random
from typing import Literal

PartName = Literal["train", "validation", "test"]

Words = Mapping[str, tuple[str, ...]]


def _read_words() -> dict[str, Words]:
    """Returns the items of each section of demo_words.txt by name."""
    parser = ConfigParser(delimiters=("=",), interpolation=None)
    parser.read_string(Path(__file__).with_name("demo_words.txt").read_text("utf-8"))
    return {
        name: {key: tuple(" ".join(item.split()) for item in items.split(",")) for key, items in section.items()}
        for name, section in parser.items()
        if section
    }


_SECTIONS = _read_words()
ANYWHERE = _SECTIONS["anywhere"]
SHARED_WORDS = {kind: _SECTIONS[f"shared {kind}"] for kind in ("people", "deeds", "things", "places")}
"""By kind: the topics of each shared word."""
TOPICS = {name: words for name, words in _SECTIONS.items() if name != "anywhere" and not name.startswith("shared ")}
_SHARED_BY_TOPIC = {
    kind: {topic: [word for word, sharing in words.items() if topic in sharing] for topic in TOPICS}
    for kind, words in SHARED_WORDS.items()
}


# Degree of ambiguity. With these values, a student trained on gold labels reaches about 0.9 accuracy, and the teachers'
# pooled logits are clearly below. No method's result was used to choose them.
FROM_TOPIC = 0.60  # of the words: the topic's
FROM_STRAY = 0.10  # another topic's; the rest has no topic
SHARED = 0.25  # of the words of a topic, how many may as well be another's
OWN_DEED = 0.50  # of the objects of a topic, how many come with a verb of that topic
WITH_ADJECTIVE = 0.30

# Which part a text belongs to is read off the text itself, so no two seeds can share a text across parts.
_SLICES: dict[PartName, range] = {"train": range(8), "validation": range(8, 9), "test": range(9, 10)}

# Sentences for any position, and sentences that only open a text or follow a full stop.
_PLAIN = (
    "the {people} {acts} {places}",
    "the {people} {acts} and {acts}",
    "the {people} and the {people} {acts} {times}",
    "nobody {acts} {places}",
    "there was a word about the {things} when the {people} {acts}",
    "the {adjectives} {things} and the {things} were {places}",
)

_OPENING = (
    "{times}, the {people} {acts}",
    "{places}, the {people} {acts}",
    "it was the {things}, not the {things}, that the {people} {minds}",
)

_JOINTS = (". ", ". ", ". ", ", and ", ", but ", ", while ", ", because ", " after ", " before ")

_LENGTHS = range(8, 36)

_SLOT = re.compile(r"\{(\w+)\}")


_TOPICS = sorted(TOPICS)


def generate(n: int, seed: int, part: PartName = "train") -> list[tuple[str, str]]:
    """The first n distinct (text, label) of a part: a pure function, where a smaller n is a prefix of a larger one.

    Labels come evenly. A text of one part never occurs in another, whatever the seeds.
    """
    rng = Random(f"amalgam-synthetic/{part}/{seed}")  # noqa: S311 - not a secret: a seeded corpus
    labels = chain.from_iterable(rng.sample(_TOPICS, k=len(TOPICS)) for _ in count())
    rows: dict[str, str] = {}
    while len(rows) < n:
        label = next(labels)
        text = next(text for text in _texts(rng, label) if _in_part(text, part) and text not in rows)
        rows[text] = label
    return list(rows.items())


def mixture(n: int, seed: int) -> list[str]:
    """Returns the first n distinct general texts: they have no label and do not show which words share a topic.

    The sentences are the same, but each word draws its topic, or none, independently of its neighbours. No text is one
    of `test` or `validation`.
    """
    rng = Random(f"amalgam-mixture/{seed}")  # noqa: S311 - not a secret: a seeded corpus
    texts: dict[str, None] = {}
    while len(texts) < n:
        text = _Mixer(rng, "", "").text()
        if len(text.split()) in _LENGTHS and _in_part(text, "train"):
            texts[text] = None
    return list(texts)


def _in_part(text: str, part: PartName) -> bool:
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 10 in _SLICES[part]


def _texts(rng: Random, topic: str) -> Iterator[str]:
    """Yields texts of the wanted lengths that contain words of their topic, without end."""
    while True:
        stray = rng.choice([other for other in _TOPICS if other != topic])
        writer = _Writer(rng, topic, stray)
        text = writer.text()
        if writer.on_topic and len(text.split()) in _LENGTHS:
            yield text


class _Writer:
    """Fills the slots of one text, no word or form twice, and counts the words that came from its topic."""

    def __init__(self, rng: Random, topic: str, stray: str) -> None:
        self.rng, self.topic, self.stray = rng, topic, stray
        self.used: set[str] = set()
        self.on_topic = 0

    def text(self) -> str:
        text = self._sentence(_PLAIN + _OPENING)
        for _ in range(self.rng.choice((0, 1, 1, 2))):
            joint = self.rng.choice(_JOINTS)
            text += joint + self._sentence(_PLAIN + _OPENING if joint == ". " else _PLAIN)
        return re.sub(r"(^|\. )([a-z])", lambda match: match[1] + match[2].upper(), text) + "."

    def _sentence(self, forms: tuple[str, ...]) -> str:
        return _SLOT.sub(lambda slot: self._fill(slot[1]), self._pick(forms))

    def _pick(self, words: Sequence[str]) -> str:
        fresh = words if self.used.isdisjoint(words) else [word for word in words if word not in self.used]
        word = self.rng.choice(fresh or words)
        self.used.add(word)
        return word

    def _fill(self, slot: str) -> str:
        if slot in {"times", "adjectives", "minds"}:
            return self._pick(ANYWHERE["deeds" if slot == "minds" else slot])
        return self._act(self._source()) if slot == "acts" else self._word(slot, self._source())

    def _act(self, source: str | None) -> str:
        """A deed and its object from one source, so that `the chef fried the onion` and `mentioned the onion`."""
        deed = self._word("deeds", source if self.rng.random() < OWN_DEED else None)
        adjective = self._pick(ANYWHERE["adjectives"]) + " " if self.rng.random() < WITH_ADJECTIVE else ""
        return f"{deed} the {adjective}{self._word('things', source)}"

    def _source(self) -> str | None:
        draw = self.rng.random()
        if draw < FROM_TOPIC:
            return self.topic
        return self.stray if draw < FROM_TOPIC + FROM_STRAY else None

    def _word(self, kind: str, source: str | None) -> str:
        if source is None:
            return self._pick(ANYWHERE[kind])
        self.on_topic += source == self.topic
        shared = _SHARED_BY_TOPIC[kind][source]
        return self._pick(shared if self.rng.random() < SHARED else TOPICS[source][kind])


class _Mixer(_Writer):
    """Draws the topic, or none, for each word independently."""

    def _word(self, kind: str, source: str | None) -> str:  # noqa: ARG002  whose it would be does not matter
        mixed = self.rng.choice(_TOPICS) if self.rng.random() >= FROM_TOPIC + FROM_STRAY else None
        return super()._word(kind, mixed)
