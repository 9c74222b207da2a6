"""Produces blocks of texts from a language model, random words or another corpus, and reports each finished block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np

from amalgam.data.keys import text_key
from amalgam.data.rows import Row, read_rows
from amalgam.pipeline.config.schema import Corpus, Generate
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import ModelError
from amalgam.pipeline.execution.stage import Unit
from amalgam.stages.common.device import pick_device
from amalgam.stages.common.inference.teacher import Teacher
from amalgam.stages.common.models.loading import load_language_model, load_tokenizer
from amalgam.stages.common.models.resolve import ModelFiles
from amalgam.stages.common.teachers import ResolvedTeacher
from amalgam.stages.generate.decoding import GeneratedText, SteeringParams, TextRequest, Writer
from amalgam.stages.generate.language_model import LanguageModel
from amalgam.stages.generate.lazy_sampling import SamplingParams, draw_option, key64, uniform
from amalgam.stages.generate.requests import BLOCK, Family
from amalgam.stages.generate.scoring import Scorer

Done = Callable[[Unit, Sequence[GeneratedText]], None]

STEERED = {"cpu": 32, "cuda": 64, "mps": 32}
"""Texts generated at once with steering, if the cache has room: most of the time goes to the teacher."""

PROMPTED = {"cpu": 128, "cuda": 256, "mps": 128}
"""Texts generated at once without steering: larger batches reduce the language model's cost per token."""

CACHE = {"cpu": 1 << 29, "cuda": 1 << 32, "mps": 1 << 29}
"""Bytes for the language model's key-value cache."""

PROMPT_ROOM = 64
"""Tokens reserved for the prompt."""

FEWEST_WORDS = 5

WORD_MARKS = ("\u2581", "\u0120")  # word-initial marks of sentencepiece and byte-level BPE

SMALLEST_VOCABULARY = 50


@dataclass(frozen=True)
class SourceInputs:
    """Everything that the sources read."""

    settings: Generate
    teachers: Sequence[ResolvedTeacher]
    language_model: ModelFiles | None
    corpus_files: Sequence[Path]
    corpus: Corpus
    load_teacher: Callable[[ResolvedTeacher], Teacher]
    device: str
    batch_tokens: int | None
    console: Console
    stop: Callable[[], None]


def produce(inputs: SourceInputs, units: Sequence[Unit], done: Done) -> None:
    """Calls `done` with each unit and its texts in the order of their index."""
    if inputs.settings.source == "cross-domain":
        _take_corpus(inputs, units, done)
    elif inputs.settings.source == "random-words":
        _draw_words(inputs, units, done)
    else:
        TextGenerator(inputs).produce(units, done)


def text_key64(seed: int, family: Family, index: int) -> int:
    """Returns a text's key. It excludes the language model and its settings, so these share the same noise."""
    teacher = family.key.get("teacher")
    return key64(seed, teacher["content"] if teacher else "", family.label, index)


def without_model(text: str) -> GeneratedText:
    """Returns a text that no model generated; its words count as tokens."""
    return GeneratedText(text, len(text.split()))


# ---- a language model


class TextGenerator:
    """Generates texts with the language model, one teacher at a time."""

    def __init__(self, inputs: SourceInputs) -> None:
        self.inputs = inputs
        self.strength = inputs.settings.steering_strength if inputs.settings.source == "steered" else 0.0

    def produce(self, units: Sequence[Unit], done: Done) -> None:
        teachers = {teacher.name: (position, teacher) for position, teacher in enumerate(self.inputs.teachers)}
        in_order = sorted(units, key=lambda unit: (teachers[_teacher_name(unit)][0], unit.payload.first))
        for name, group in groupby(in_order, key=_teacher_name):
            texts: dict[int, dict[int, GeneratedText]] = {}
            own_units = list(group)
            for (position, index), text in self.writer(teachers[name][1]).write(self._requests(own_units)):
                block = texts.setdefault(position, {})
                block[index] = text
                self.inputs.console.advance(1)
                if len(block) == BLOCK:
                    done(own_units[position], [block[index] for index in sorted(texts.pop(position))])

    def writer(self, teacher: ResolvedTeacher) -> Writer[tuple[int, int]]:
        inputs = self.inputs
        scorer = Scorer(inputs.load_teacher(teacher), batch_tokens=inputs.batch_tokens, stop=inputs.stop)
        steering = SteeringParams(self.strength, inputs.settings.max_tokens, inputs.settings.max_scored)
        return Writer(self.language_model, scorer, steering, stop=inputs.stop)

    def request(self, family: Family, index: int, tag: tuple[int, int]) -> TextRequest[tuple[int, int]]:
        """Returns one text's request, with the prompt and the sampling settings that its key draws."""
        key = text_key64(self.inputs.settings.seed, family, index)
        options = family.choices.items()
        drawn = {name: draw_option(key, question, values) for question, (name, values) in enumerate(options)}
        candidates = self.inputs.settings.candidates
        sampling = SamplingParams(drawn["temperature"], drawn["top_k"], drawn["top_p"], candidates)
        return TextRequest(tag, key, family.label, str(drawn["prompt"]), sampling)

    def _requests(self, units: Sequence[Unit]) -> Iterator[TextRequest[tuple[int, int]]]:
        """Yields requests tagged with the unit's position and the text's index."""
        for position, unit in enumerate(units):
            for index in unit.payload.indices:
                yield self.request(unit.payload.family, index, (position, index))

    @cached_property
    def language_model(self) -> LanguageModel:
        inputs = self.inputs
        if inputs.language_model is None:
            raise AssertionError("no language model")  # the experiment's check requires it
        device = pick_device(inputs.device)
        slots = STEERED if self.strength else PROMPTED
        model = LanguageModel(
            load_language_model(inputs.language_model),
            load_tokenizer(inputs.language_model),
            slots=slots[device.type],
            longest=inputs.settings.max_tokens + PROMPT_ROOM,
            device=device,
            memory=CACHE[device.type],
        )
        for note in model.notes:
            inputs.console.note(note)
        return model


def _teacher_name(unit: Unit) -> str:
    return unit.payload.family.teacher or ""


# ---- random words


def _draw_words(inputs: SourceInputs, units: Sequence[Unit], done: Done) -> None:
    """Draws each text's number of words, then the words, uniformly from the teacher's vocabulary."""
    most = max(FEWEST_WORDS, inputs.settings.max_tokens // 2)
    teachers = {teacher.name: teacher for teacher in inputs.teachers}
    vocabularies: dict[str, list[str]] = {}
    for unit in units:
        inputs.stop()
        family, name = unit.payload.family, _teacher_name(unit)
        if name not in vocabularies:
            vocabularies[name] = _vocabulary(teachers[name])
        keys = [text_key64(inputs.settings.seed, family, index) for index in unit.payload.indices]
        done(unit, [without_model(" ".join(_random_words(key, vocabularies[name], most))) for key in keys])
        inputs.console.advance(BLOCK)


def _random_words(key: int, words: Sequence[str], most: int) -> list[str]:
    count = draw_option(key, 0, range(FEWEST_WORDS, most + 1))
    positions = uniform(key, 0, np.arange(count)) * len(words)
    return [words[int(position)] for position in positions]


def _vocabulary(teacher: ResolvedTeacher) -> list[str]:
    """Returns the tokens that are whole words: no word pieces and no special tokens."""
    tokenizer = load_tokenizer(teacher.files, trust_remote_code=teacher.trust_remote_code)
    special = set(tokenizer.all_special_tokens)
    tokens = [token for token in tokenizer.get_vocab() if token not in special]
    for mark in WORD_MARKS:
        marked = [token.removeprefix(mark) for token in tokens if token.startswith(mark)]
        tokens = marked or tokens
    whole = (token for token in tokens if len(token) > 1 and token.isalnum() and not token.isdigit())
    words = sorted({token for token in whole if token.isascii() or token.isalpha()})
    if len(words) < SMALLEST_VOCABULARY:
        raise ModelError(
            f"teacher {teacher.name}: {len(words)} of its tokens are words, too few for random texts",
            where="generate.source: random-words",
            fix="set generate.source to another source",
        )
    return words


# ---- another corpus


def _take_corpus(inputs: SourceInputs, units: Sequence[Unit], done: Done) -> None:
    """Takes the texts with the lowest keys: a sample by content that a larger sample extends."""
    count = max(unit.payload.first for unit in units) + BLOCK
    texts, requested = _lowest_keys(inputs, count), units[0].payload.family.count
    if len(texts) < requested:
        inputs.console.note(f"generate.corpus has only {len(texts):,} texts; {requested:,} were requested")
    for unit in units:
        inputs.stop()
        done(unit, [without_model(text) for text in texts[unit.payload.first : unit.payload.first + BLOCK]])
        inputs.console.advance(BLOCK)


def _lowest_keys(inputs: SourceInputs, count: int) -> list[str]:
    columns = inputs.corpus.model_copy(update={"text": [inputs.settings.column], "id": "auto", "label": None})
    texts: dict[bytes, str] = {}
    for path in inputs.corpus_files:
        for row in read_rows(path, corpus=columns):
            if isinstance(row, Row):
                texts[text_key(row.fields)] = row.fields[0]
                if len(texts) >= 4 * max(count, BLOCK):
                    texts = dict(sorted(texts.items())[:count])
    return [texts[key] for key in sorted(texts)[:count]]
