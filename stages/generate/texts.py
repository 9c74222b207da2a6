"""Produces blocks of texts from a language model, random words or another corpus, and collects them in one table.

The table has measures of each text (length, repetition, duplicates). read-corpus applies the filters to them, so a
changed filter generates no new text.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from amalgam.data.keys import text_key
from amalgam.data.parquet import GENERATED, WRITTEN, arrow_schema, build_table, read_table
from amalgam.data.rows import ABSENT, Row, listed_reasons, read_rows
from amalgam.data.words import words_of
from amalgam.pipeline.config.schema import Corpus, Generate
from amalgam.pipeline.console import Console, counted
from amalgam.pipeline.errors import DamagedError, DataError, ModelError
from amalgam.pipeline.execution.stage import Unit
from amalgam.pipeline.input_files import InputFile, unchanged
from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.device import pick_device
from amalgam.stages.common.inference.teacher import TeacherLoader
from amalgam.stages.common.models.loading import load_language_model, load_tokenizer
from amalgam.stages.common.models.resolve import ModelFiles, ResolvedTeacher
from amalgam.stages.generate import decoding
from amalgam.stages.generate.language_model import LanguageModel
from amalgam.stages.generate.recombined import Recombiner
from amalgam.stages.generate.requests import BLOCK, Block, Family, TextPlan

Blocks = Iterator[tuple[Unit, Sequence[decoding.GeneratedText]]]

STEERED = {"cpu": 32, "cuda": 64, "mps": 32}
"""Texts generated at once with steering, if the cache has room: most of the time goes to the teacher."""

PROMPTED = {"cpu": 128, "cuda": 256, "mps": 128}
"""Texts generated at once without steering: larger batches reduce the language model's cost per token."""

CACHE = {"cpu": 1 << 29, "cuda": 1 << 32, "mps": 1 << 29}
"""Bytes for the language model's key-value cache."""

FEWEST_WORDS = 5

WORD_MARKS = ("\u2581", "\u0120")  # word-initial marks of sentencepiece and byte-level BPE

SMALLEST_VOCABULARY = 50

NGRAM = 3
"""Words per n-gram."""

RECOMBINED = 1 << 15
"""Most texts of the corpus that are recombined."""

DRAW = 1 << 33
"""A position beyond the end of any text and beyond the draws of its settings."""


@dataclass(frozen=True)
class SourceInputs:
    settings: Generate
    teachers: Sequence[ResolvedTeacher]
    language_model: ModelFiles | None
    corpus_files: Sequence[Path]
    corpus_inputs: Sequence[InputFile]
    """The corpus files that are outside the workspace."""
    loader: TeacherLoader
    console: Console
    stop: Callable[[], None]


def produce(inputs: SourceInputs, units: Sequence[Unit]) -> Blocks:
    """Yields each unit with its texts in the order of their index."""
    sources = {"cross-domain": _take_corpus, "random-words": _draw_words, "recombined": _recombine}
    return sources.get(inputs.settings.source, _write_texts)(inputs, units)


def text_key64(seed: int, family: Family, index: int) -> int:
    """Returns a text's key. It excludes the language model and its settings, so these share the same noise."""
    teacher = family.key.get("teacher")
    return decoding.key64(seed, teacher["content"] if teacher else "", family.label, index)


# ---- a language model


def _write_texts(inputs: SourceInputs, units: Sequence[Unit]) -> Blocks:
    """Generates texts with the language model, one teacher at a time."""
    settings = inputs.settings
    strength = settings.steering_strength if settings.source == "steered" else 0.0
    model = _language_model(inputs, STEERED if strength else PROMPTED, units)
    teachers = {teacher.name: teacher for teacher in inputs.teachers}
    in_order = sorted(units, key=lambda unit: (unit.payload.family.teacher, unit.payload.first))
    for name, group in groupby(in_order, key=lambda unit: str(unit.payload.family.teacher)):
        teacher = inputs.loader.load(teachers[name], "fp32", passes=0)
        scorer = decoding.Scorer(teacher, batch_tokens=inputs.loader.batch_tokens, stop=inputs.stop)
        steering = decoding.SteeringParams(strength, settings.max_tokens, settings.max_scored)
        own_units = list(group)
        blocks: dict[int, dict[int, decoding.GeneratedText]] = defaultdict(dict)
        for (position, index), text in decoding.Writer(model, scorer, steering).write(_requests(settings, own_units)):
            blocks[position][index] = text
            inputs.console.advance(int(index < own_units[position].payload.family.count))
            if len(blocks[position]) == BLOCK:
                yield own_units[position], [text for _, text in sorted(blocks.pop(position).items())]


def _requests(settings: Generate, units: Sequence[Unit]) -> Iterator[decoding.TextRequest]:
    """Yields each text's request, with the unit's position and the text's index as its tag."""
    for position, unit in enumerate(units):
        family = unit.payload.family
        for index in unit.payload.indices:
            key = text_key64(settings.seed, family, index)
            options = enumerate(family.choices.items())
            drawn = {name: decoding.draw_option(key, question, values) for question, (name, values) in options}
            sampling = decoding.SamplingParams(
                drawn["temperature"], drawn["top_k"], drawn["top_p"], settings.candidates
            )
            yield decoding.TextRequest((position, index), key, family.label, str(drawn["prompt"]), sampling)


def _language_model(inputs: SourceInputs, slots: dict[str, int], units: Sequence[Unit]) -> LanguageModel:
    """Returns the language model, with room for the longest prompt and generate.max_tokens after it."""
    if inputs.language_model is None:
        raise AssertionError("no language model")  # the experiment's check requires it
    device, tokenizer = pick_device(inputs.loader.device), load_tokenizer(inputs.language_model)
    prompts = sorted({prompt for unit in units for prompt in unit.payload.family.choices["prompt"]})
    longest = max(map(len, tokenizer(prompts, add_special_tokens=False, verbose=False)["input_ids"]))
    model = LanguageModel(
        load_language_model(inputs.language_model),
        tokenizer,
        slots=slots[device.type],
        longest=1 + longest + inputs.settings.max_tokens,  # after the start token
        device=device,
        memory=CACHE[device.type],
    )
    for note in model.notes:
        inputs.console.note(note)
    return model


# ---- random words


def _draw_words(inputs: SourceInputs, units: Sequence[Unit]) -> Blocks:
    """Draws each text's number of words, then the words, uniformly from the teacher's vocabulary."""
    most = max(FEWEST_WORDS, inputs.settings.max_tokens // 2)
    teachers = {teacher.name: teacher for teacher in inputs.teachers}
    vocabulary = cache(lambda name: vocabulary_words(teachers[name]))
    for unit in units:
        inputs.stop()
        family = unit.payload.family
        keys = [text_key64(inputs.settings.seed, family, index) for index in unit.payload.indices]
        yield unit, [_random_words(key, vocabulary(family.teacher), most) for key in keys]
        inputs.console.advance(unit.size)


def _random_words(key: int, words: Sequence[str], most: int) -> decoding.GeneratedText:
    count = decoding.draw_option(key, 0, range(FEWEST_WORDS, most + 1))
    positions = decoding.uniform(key, 0, np.arange(count)) * len(words)
    return decoding.GeneratedText(" ".join(words[int(position)] for position in positions), count)


def vocabulary_words(teacher: ResolvedTeacher) -> list[str]:
    """Returns the tokens that are whole words: no word pieces and no special tokens."""
    tokenizer = load_tokenizer(teacher.files)
    special = set(tokenizer.all_special_tokens)
    tokens = [token for token in tokenizer.get_vocab() if token not in special]
    for mark in WORD_MARKS:
        tokens = [token for token in tokens if token.startswith(mark)] or tokens
    decoded = (tokenizer.convert_tokens_to_string([token]).strip() for token in tokens)  # byte-level ones are encoded
    whole = (word for word in decoded if len(word) > 1 and word.isalnum() and not word.isdigit())
    words = sorted({word for word in whole if word.isascii() or word.isalpha()})
    if len(words) < SMALLEST_VOCABULARY:
        raise ModelError(
            f"teacher {teacher.name}: {len(words)} of its tokens are words, too few for random texts",
            where="generate.source: random-words",
            fix="set generate.source to another source",
        )
    return words


# ---- another corpus


def _take_corpus(inputs: SourceInputs, units: Sequence[Unit]) -> Blocks:
    """Takes the texts with the lowest keys: a sample by content that a larger sample extends."""
    texts = _lowest_keys(inputs, max(unit.payload.indices.stop for unit in units))
    for unit in units:
        inputs.stop()
        yield unit, _counted(_own(texts, unit.payload))
        inputs.console.advance(unit.size)


def _recombine(inputs: SourceInputs, units: Sequence[Unit]) -> Blocks:
    """Takes the texts of the corpus like cross-domain, and then texts made of their words."""
    texts = _lowest_keys(inputs, RECOMBINED)
    recombiner = Recombiner(texts)
    for unit in units:
        inputs.stop()
        originals = _own(texts, unit.payload)
        new = unit.payload.indices[len(originals) :]
        keys = [text_key64(inputs.settings.seed, unit.payload.family, index) for index in new]
        yield unit, _counted([*originals, *map(recombiner.text, new, keys)])
        inputs.console.advance(unit.size)


def _own(texts: Sequence[str], block: Block) -> Sequence[str]:
    return texts[block.indices.start : block.indices.stop]


def _counted(texts: Sequence[str]) -> list[decoding.GeneratedText]:
    """Returns the texts with their numbers of words."""
    return [decoding.GeneratedText(text, len(words_of(text))) for text in texts]


def _lowest_keys(inputs: SourceInputs, count: int) -> list[str]:
    """Returns at most so many texts of generate.corpus; refuses a corpus without any. A note counts unreadable rows."""
    columns = Corpus(train=None, text=[inputs.settings.column])
    texts, unreadable, first = dict[bytes, str](), Counter[str](), ""
    with unchanged(inputs.corpus_inputs):
        for row in (row for path in inputs.corpus_files for row in read_rows(path, corpus=columns)):
            if isinstance(row, Row):
                texts[text_key(row.fields)] = row.fields[0]
                if len(texts) >= 4 * count:
                    texts = dict(sorted(texts.items())[:count])
            elif row.reason not in ABSENT:
                unreadable[row.reason] += 1
                first = first or row.where
    if unreadable:
        rows = counted(unreadable.total(), "row")
        inputs.console.note(f"generate.corpus: {rows} left out, {listed_reasons(unreadable)}; the first is {first}")
    if not texts:
        where, fix = f"generate.source: {inputs.settings.source}", "name a file of texts"
        raise DataError("generate.corpus has no text", where=where, fix=fix)
    return [texts[key] for key in sorted(texts)[:count]]


# ---- tables


def block_table(first: int, texts: Sequence[decoding.GeneratedText]) -> pa.Table:
    values = {
        "text": [text.text for text in texts],
        "index": list(range(first, first + len(texts))),
        "class_probability": [text.probability for text in texts],
        "lm_log_probability": [text.log_lm for text in texts],
        "tokens": [text.tokens for text in texts],
    }
    return build_table(WRITTEN, values)


def collected_table(plan: TextPlan, store: Store) -> pa.Table:
    """Returns all texts, sorted by index and then by teacher and class, with their measures."""
    settings, labels = plan.settings, {teacher.name: teacher.outputs for teacher in plan.teachers}
    numbers = {family.name: number for number, family in enumerate(plan.families)}
    rows: list[tuple[int, int, dict[str, Any]]] = []
    for family, table in _blocks(plan.units(store), store):
        label = None if family.teacher is None or family.label is None else labels[family.teacher][family.label]
        origin = {"source": settings.source, "teacher": family.teacher, "class": label, "seed": settings.seed}
        for row in table.to_pylist():
            if row["index"] < family.count:
                key = decoding.key64(settings.seed, words_of(row["text"].lower()))  # equal texts are held out together
                draw = float(decoding.uniform(key, DRAW, np.zeros(1, np.int64))[0])
                rows.append((row["index"], numbers[family.name], {**row, **origin, "draw": draw}))
    rows.sort(key=lambda row: row[:2])
    measured = qualities(row["text"] for _, _, row in rows)
    records = [{**row, **quality._asdict()} for (_, _, row), quality in zip(rows, measured, strict=True)]
    return pa.Table.from_pylist(records, schema=arrow_schema(GENERATED))


def _blocks(units: Sequence[Unit], store: Store) -> Iterator[tuple[Family, pa.Table]]:
    records = store.records([unit.record_path for unit in units], complete=False)
    for unit in units:
        if unit.record_path not in records:
            raise DamagedError(f"the record of generate {unit.name} is missing", path=str(unit.record_path))
    paths = store.verified_paths(records[unit.record_path].files[0] for unit in units)
    yield from ((unit.payload.family, read_table(path)) for unit, path in zip(units, paths, strict=True))


# ---- measures of a text


class Quality(NamedTuple):
    words: int
    repetition: float
    near_duplicate: float


def qualities(texts: Iterable[str]) -> list[Quality]:
    """Measures texts in the given order; each is compared with earlier texts only, so later texts change nothing.

    The largest Jaccard similarity to an earlier text is exact; copies are stored once.
    """
    stored: set[frozenset[tuple[str, ...]]] = set()
    sizes = array("q")
    texts_with: dict[tuple[str, ...], array[int]] = defaultdict(lambda: array("q"))
    measured = []
    for text in texts:
        words = words_of(text.lower())
        # A text of fewer words is one n-gram.
        ngrams = [tuple(words[start : start + NGRAM]) for start in range(max(1, len(words) - NGRAM + 1))]
        distinct = frozenset(ngrams)
        nearest = 1.0 if words and distinct in stored else 0.0
        if words and distinct not in stored:
            earlier = [np.array(texts_with[ngram]) for ngram in distinct if ngram in texts_with]
            if earlier:
                shared = np.bincount(np.concatenate(earlier), minlength=len(sizes))
                nearest = float((shared / (np.array(sizes) + len(distinct) - shared)).max())
            for ngram in distinct:
                texts_with[ngram].append(len(sizes))
            sizes.append(len(distinct))
            stored.add(distinct)
        measured.append(Quality(len(words), 1 - len(distinct) / len(ngrams), nearest))
    return measured
