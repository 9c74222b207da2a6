"""Blocks to texts: by a language model in slots, of random words, or from another corpus. Each block as it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np

from amalgam.data.keys import text_key
from amalgam.data.rows import Row, read_rows
from amalgam.pipeline.config.schema import Generate
from amalgam.pipeline.errors import ModelError
from amalgam.pipeline.execution.stage import Run, Unit
from amalgam.stages.common.device import pick_device
from amalgam.stages.common.inference.load import load_teacher
from amalgam.stages.common.load import teachers_of
from amalgam.stages.common.models.loading import load_language_model, load_tokenizer
from amalgam.stages.common.sources import local_files
from amalgam.stages.common.teachers import ResolvedTeacher
from amalgam.stages.generate.decoding import GeneratedText, SteeringParams, TextRequest, Writer
from amalgam.stages.generate.keyed_random import one_of, text_word, uniform
from amalgam.stages.generate.language_model import LanguageModel
from amalgam.stages.generate.lazy_sampling import SamplingParams
from amalgam.stages.generate.requests import BLOCK, Block, Family, generate_config, language_model_files
from amalgam.stages.generate.scoring import Scorer

Done = Callable[[Unit, Sequence[GeneratedText]], None]
STEERED = {"cpu": 32, "cuda": 64, "mps": 32}
"""Texts that advance together, if the cache has room for them: most of the time goes to the teacher, text by text."""

PROMPTED = {"cpu": 128, "cuda": 256, "mps": 128}
"""The same where no teacher is asked: the more, the less a token costs the language model."""

CACHE = {"cpu": 1 << 29, "cuda": 1 << 32, "mps": 1 << 29}
"""Bytes for what the language model keeps of texts in the making."""

PROMPT_ROOM = 64
"""Tokens that may stand before a text."""

FEWEST_WORDS = 5

WORD_MARKS = ("\u2581", "\u0120")  # what sentencepiece and byte-level BPE put before a word

LEAST_VOCABULARY = 50


def make(run: Run, units: Sequence[Unit], done: Done) -> None:
    """`done` is told each unit and its texts, in the order of their index."""
    source = generate_config(run).source
    if source == "cross-domain":
        _take(run, units, done)
    elif source == "random-words":
        _draw(run, units, done)
    else:
        _write(run, units, done)


def word_of(run: Run, family: Family, index: int) -> int:
    """The text's key. The language model and its settings are left out: with others the same noise meets them."""
    teacher = family.key.get("teacher")
    content = teacher["content"] if teacher else ""
    return text_word(generate_config(run).seed, content, family.label, index)


# ---- a language model


def _write(run: Run, units: Sequence[Unit], done: Done) -> None:
    """Teacher by teacher: one is in memory at a time."""
    teachers = {known.name: (place, known) for place, known in enumerate(teachers_of(run))}
    in_order = sorted(units, key=lambda unit: (teachers[_family(unit).teacher or ""][0], unit.payload.first))
    for name, mine in groupby(in_order, key=lambda unit: _family(unit).teacher or ""):
        gathered: dict[int, dict[int, GeneratedText]] = {}
        of_teacher = list(mine)
        for (place, index), text in writer_for(run, teachers[name][1]).write(_orders(run, of_teacher)):
            texts = gathered.setdefault(place, {})
            texts[index] = text
            run.console.advance(1)
            if len(texts) == BLOCK:
                done(of_teacher[place], [texts[one] for one in sorted(gathered.pop(place))])


def _orders(run: Run, units: Sequence[Unit]) -> Iterator[TextRequest[tuple[int, int]]]:
    """Tagged with the unit's place and the text's index."""
    for place, unit in enumerate(units):
        first = unit.payload.first
        for index in range(first, first + BLOCK):
            yield order_of(run, _family(unit), index, (place, index))


def order_of(run: Run, family: Family, index: int, tag: tuple[int, int]) -> TextRequest[tuple[int, int]]:
    word = word_of(run, family, index)
    prompt, how = drawn(family, word, generate_config(run).candidates)
    return TextRequest(tag, word, family.label, prompt, how)


def drawn(family: Family, word: int, candidates: int) -> tuple[str, SamplingParams]:
    """The text's own prompt and cut of the distribution."""
    own = {name: one_of(word, question, options) for question, (name, options) in enumerate(family.choices.items())}
    return str(own["prompt"]), SamplingParams(own["temperature"], own["top_k"], own["top_p"], candidates)


def writer_for(run: Run, known: ResolvedTeacher) -> Writer[tuple[int, int]]:

    settings = generate_config(run)
    batch_tokens = run.experiment.execution.batch_tokens
    teacher = load_teacher(run, known, "fp32", passes=0)
    scorer = Scorer(teacher, batch_tokens=batch_tokens, stop=run.signals.check)
    steering = SteeringParams(_steer(settings), settings.max_tokens, settings.max_scored)
    return Writer(_language_model(run), scorer, steering, stop=run.signals.check)


def _steer(settings: Generate) -> float:
    return settings.steering_strength if settings.source == "steered" else 0.0


def _language_model(run: Run) -> LanguageModel:

    settings, files = generate_config(run), language_model_files(run)
    if "language model" not in run.cache:
        device = pick_device(run.experiment.execution.device)
        tokenizer = load_tokenizer(files)
        longest = settings.max_tokens + PROMPT_ROOM
        slots = STEERED if _steer(settings) else PROMPTED
        model = LanguageModel(
            load_language_model(files),
            tokenizer,
            slots=slots[device.type],
            longest=longest,
            device=device,
            memory=CACHE[device.type],
        )
        for note in model.notes:
            run.console.note(note)
        run.cache["language model"] = model
    found: LanguageModel = run.cache["language model"]
    return found


# ---- random words


def _draw(run: Run, units: Sequence[Unit], done: Done) -> None:
    """Each text's number of words, then the words, evenly from those of the teacher's vocabulary."""
    most = max(FEWEST_WORDS, generate_config(run).max_tokens // 2)
    words: dict[str, list[str]] = {}
    for unit in units:
        run.signals.check()
        family = _family(unit)
        name = family.teacher or ""
        if name not in words:
            words[name] = _words_of(next(known for known in teachers_of(run) if known.name == name))
        keys = [word_of(run, family, index) for index in range(unit.payload.first, unit.payload.first + BLOCK)]
        done(unit, [_without_model(" ".join(_random_words(key, words[name], most))) for key in keys])
        run.console.advance(BLOCK)


def _random_words(key: int, words: Sequence[str], most: int) -> list[str]:
    count = one_of(key, 0, range(FEWEST_WORDS, most + 1))
    places = uniform(key, 0, np.arange(count)) * len(words)
    return [words[int(place)] for place in places]


def _words_of(known: ResolvedTeacher) -> list[str]:
    """The tokens that are whole words: neither a word's continuation nor special."""
    tokenizer = load_tokenizer(known.files, trust_remote_code=known.trust_remote_code)
    special = set(tokenizer.all_special_tokens)
    tokens = [token for token in tokenizer.get_vocab() if token not in special]
    for mark in WORD_MARKS:
        marked = [token.removeprefix(mark) for token in tokens if token.startswith(mark)]
        tokens = marked or tokens
    whole = (token for token in tokens if len(token) > 1 and token.isalnum() and not token.isdigit())
    words = sorted({token for token in whole if token.isascii() or token.isalpha()})
    if len(words) < LEAST_VOCABULARY:
        raise ModelError(
            f"teacher {known.name}: {len(words)} of its tokens are words, too few to draw texts from",
            where="generate.source: random-words",
            fix="another source",
        )
    return words


# ---- another corpus


def _take(run: Run, units: Sequence[Unit], done: Done) -> None:
    """The texts with the lowest keys: a sample by content, which a larger one extends."""
    wanted = max(unit.payload.first for unit in units) + BLOCK
    texts = _lowest(run, wanted)
    if len(texts) < _family(units[0]).count:
        run.console.note(f"generate.corpus has only {len(texts):,} texts; {_family(units[0]).count:,} were wanted")
    for unit in units:
        run.signals.check()
        done(unit, [_without_model(text) for text in texts[unit.payload.first : unit.payload.first + BLOCK]])
        run.console.advance(BLOCK)


def _lowest(run: Run, wanted: int) -> list[str]:

    settings = generate_config(run)
    columns = run.experiment.corpus.model_copy(update={"text": [settings.column], "id": "auto", "label": None})
    found: dict[bytes, str] = {}
    for path in (path for source in settings.corpus or [] for path in local_files(run, source)):
        for row in read_rows(path, corpus=columns):
            if isinstance(row, Row):
                found[text_key(row.fields)] = row.fields[0]
                if len(found) >= 4 * max(wanted, BLOCK):
                    found = dict(sorted(found.items())[:wanted])
    return [found[key] for key in sorted(found)[:wanted]]


def _without_model(text: str) -> GeneratedText:
    return GeneratedText(text, len(text.split()), None, None, 0, 0, ())


def _family(unit: Unit) -> Family:
    block: Block = unit.payload
    return block.family
