"""Writes the results of read-corpus, cache-teachers and build-targets for any number of texts, without a teacher.

The project's code makes identities, units, names, records and manifests. Only texts and answers are random.
Without `whole`, a file of answers has only keys, lengths and truncation flags, because planning reads no other column.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from amalgam.data.corpus import BucketFacts, PartFacts
from amalgam.data.keys import KEY_BYTES, bits_for, keys_digest, prefix_name
from amalgam.data.parquet import CACHE_TEXTS, CORPUS, TARGETS, arrow_schema, key_column, read_keys, write_table
from amalgam.pipeline.console import Console
from amalgam.pipeline.execution.plan import plan
from amalgam.pipeline.execution.runner import update
from amalgam.pipeline.storage.fingerprint import library_versions
from amalgam.stages.app.runs import open_run
from amalgam.stages.build_targets.stage import BuildTargets
from amalgam.stages.cache_teachers.stage import CacheTeachers
from amalgam.stages.common.load import part_of, train_part
from amalgam.stages.read_corpus.stage import ReadCorpus
from amalgam.stages.registry import STAGES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from amalgam.pipeline.execution.stage import Run, Unit

    Keys = NDArray[np.bytes_]

CHARACTERS = 236
"""Characters of a text: the mean of AG News."""
TOKENS = 50
APPENDED = 100
"""One new text is appended for this number of texts."""


@dataclass(frozen=True)
class Shape:
    texts: int
    teachers: int
    labels: int = 4
    passes: int = 16
    whole: bool = False

    @property
    def tests(self) -> int:
        return min(10_000, self.texts // 10)


@dataclass(frozen=True)
class Experiments:
    """Holds the paths of three experiment files of one workspace."""

    first: Path
    appended: Path
    new_teacher: Path


def write_experiments(folder: Path, shape: Shape) -> Experiments:
    """Writes placeholder sources and models. No row is read and no model is loaded."""
    folder.mkdir(parents=True)
    for name in ("train", "appended", "test"):
        (folder / f"{name}.csv").write_text(f"text,label\nplaceholder of the {name} texts,label 0 0\n")
    for number in range(shape.teachers + 1):
        _write_model(folder / "models" / f"teacher-{number}", number, shape.labels)
    files = [("first", "train", 0), ("appended", "appended", 0), ("new_teacher", "train", 1)]
    return Experiments(**{name: _write_file(folder, name, train, shape, more) for name, train, more in files})


def _write_model(folder: Path, number: int, labels: int) -> None:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    names = {str(place): f"label {number} {place}" for place in range(labels)}
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "id2label": names}))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"classifier.bias": np.full(labels, number, np.float32)}, folder / "model.safetensors")


def _write_file(folder: Path, name: str, train: str, shape: Shape, more: int) -> Path:
    teachers = "".join(
        f"  - {{name: teacher-{number}, model: ./models/teacher-{number}}}\n" for number in range(shape.teachers + more)
    )
    corpus = f"corpus: {{train: {train}.csv, test: test.csv, label: label}}\n"
    path = folder / f"{name}.yaml"
    path.write_text(
        f"{corpus}teachers:\n{teachers}cache: {{passes: {shape.passes}, dtype: fp32}}\ntargets: {{mode: soft}}\n"
    )
    return path


def quiet_run(config: Path) -> Run:
    run = open_run(config, [], console=Console(quiet=True))
    run.store.claim()
    return run


@contextmanager
def _unsynced() -> Iterator[None]:
    """Disables fsync, because the workspace is temporary."""
    synced = os.fsync
    os.fsync = lambda fd: None  # noqa: ARG005
    try:
        yield
    finally:
        os.fsync = synced


# ---- texts


def write_corpora(experiments: Experiments, shape: Shape) -> None:
    """Writes the training texts, with and without appended texts, the test texts, and the manifests."""
    for config in (experiments.appended, experiments.first):
        run = quiet_run(config)
        for unit in ReadCorpus().units(run, run.store.root):
            if run.store.record(unit.record_path) is None:
                with _unsynced(), run.store.draft(unit.folder, unit.name) as draft:
                    facts = _write_part(draft.folder, unit.name, shape, appended=config == experiments.appended)
                    draft.facts = {"part": unit.name, **facts}
        update(STAGES, run, target="read-corpus")


def _write_part(folder: Path, part: str, shape: Shape, *, appended: bool) -> PartFacts:
    seed, texts = (1, shape.texts) if part == "train" else (2, shape.tests)
    more = texts // APPENDED if appended and part == "train" else 0
    bits, digest = bits_for(texts + more), sha256()
    buckets = []
    letters = _letters()
    for number, keys in enumerate(_keys(texts, more, bits, seed)):
        if len(keys):
            prefix = prefix_name(number, bits)
            file, content = f"{prefix}.parquet", keys.tobytes()
            write_table(_corpus_table(keys, letters, "label 0 0" if part == "test" else None), folder / file)
            digest.update(content)
            buckets.append(BucketFacts(prefix=prefix, rows=len(keys), keys_digest=keys_digest(content), file=file))
    names = sorted(bucket["file"] for bucket in buckets)
    return PartFacts(
        rows=texts + more,
        texts=texts + more,
        duplicates=0,
        over_limit=0,
        conflicts=0,
        skipped={},
        labels={"label 0 0": texts} if part == "test" else {},
        texts_digest=digest.hexdigest(),
        labels_digest=None,
        bits=bits,
        buckets=buckets,
        files=names,
    )


def _keys(texts: int, more: int, bits: int, seed: int) -> Iterator[Keys]:
    """Yields the keys of each bucket in order. Appended texts do not change the first keys."""
    buckets = 1 << bits
    counts = np.random.default_rng([seed, texts]).multinomial(texts, [1 / buckets] * buckets)
    further = np.random.default_rng([seed, texts, more]).multinomial(more, [1 / buckets] * buckets)
    for number in range(buckets):
        random = np.random.default_rng([seed, number])
        yield np.sort(np.concatenate([drawn_keys(random, number, bits, int(n[number])) for n in (counts, further)]))


def drawn_keys(random: np.random.Generator, number: int, bits: int, rows: int) -> Keys:
    """Returns keys with the bucket's prefix and enough random bits to be unique."""
    high = random.integers(0, 1 << (64 - bits), rows, dtype=np.uint64, endpoint=False) | np.uint64(
        number << (64 - bits) if bits else 0
    )
    halves = np.stack([high, random.integers(0, 1 << 63, rows, dtype=np.uint64)], axis=1)
    return halves.astype(">u8").view(f"S{KEY_BYTES}").reshape(-1)


def _letters() -> NDArray[np.uint8]:
    return np.random.default_rng(3).choice(np.frombuffer(b"etaoinshrdlu    ", np.uint8), 1 << 23)


def _corpus_table(keys: Keys, letters: NDArray[np.uint8], label: str | None) -> pa.Table:
    schema = arrow_schema(CORPUS)
    start = int.from_bytes(keys[:1].tobytes()[8:12], "big") % (1 << 22)
    offsets = np.arange(len(keys) + 1, dtype=np.int32) * CHARACTERS
    places = (start + np.arange(len(keys) * CHARACTERS)) % len(letters)
    texts = pa.StringArray.from_buffers(len(keys), pa.py_buffer(offsets), pa.py_buffer(letters[places].tobytes()))
    nothing = pa.nulls(len(keys), pa.string())
    labels = nothing if label is None else pa.array([label] * len(keys))
    return pa.table([key_column(keys), texts, nothing, nothing, labels], schema=schema)


# ---- answers


def lacking(config: Path) -> list[Unit]:
    """Returns the missing units of cache-teachers."""
    run = quiet_run(config)
    update(STAGES, run, target="read-corpus")
    return [unit for unit in CacheTeachers().units(run, run.store.root) if unit.payload is not None]


def write_answers(config: Path, units: Iterable[Unit], shape: Shape) -> None:
    """Commits units like cache-teachers. All teachers have the same random answers for a bucket."""
    run = quiet_run(config)
    update(STAGES, run, target="read-corpus")
    parts = {name: part_of(run, name) for name in ("train", "test")}
    buckets = {(name, bucket.prefix): bucket for name, part in parts.items() if part for bucket in part.buckets}
    scratch = run.store.root / "drawn.parquet"
    for (part, prefix, last, rows), alike in groupby(sorted(units, key=_place), key=_place):
        keys = read_keys(run.store.path(buckets[part, prefix].file))[slice(*rows)]
        write_table(_answers(keys, last, shape), scratch)
        drawn = scratch.read_bytes()
        with _unsynced():
            for unit in alike:
                _commit(run, unit, len(keys), drawn)
    scratch.unlink(missing_ok=True)


def _place(unit: Unit) -> tuple[str, str, int, tuple[int | None, ...]]:
    ask = unit.payload
    rows = () if ask.rows is None else (int(ask.rows[0]), int(ask.rows[-1]) + 1)
    if ask.first or not ask.logits or (rows and len(ask.rows) != rows[1] - rows[0]):
        raise AssertionError(f"{unit.name}: only whole buckets and their parts are supported")
    return ask.part, ask.prefix, ask.last, rows or (None,)


def _commit(run: Run, unit: Unit, rows: int, drawn: bytes) -> None:
    ask = unit.payload
    with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
        (draft.folder / "unit.parquet").write_bytes(drawn)
        draft.facts = {
            "prefix": ask.prefix,
            "logits": ask.logits,
            "first": ask.first,
            "last": ask.last,
            "rows": rows,
            "cut": 0,
            "tokens": TOKENS * rows,
            "device": "none",
            "halved_launches": 0,
        }
        draft.made = {"libraries": library_versions(), "seconds": 0.0}


def _answers(keys: Keys, passes: int, shape: Shape) -> pa.Table:
    if shape.whole:
        return whole_answers(keys, shape, passes)
    columns = [key_column(keys), pa.array(np.full(len(keys), TOKENS, np.int32)), pa.array(np.zeros(len(keys), bool))]
    return pa.table(columns, schema=arrow_schema(CACHE_TEXTS))


def whole_answers(keys: Keys, shape: Shape, passes: int) -> pa.Table:
    """Returns every column of cache-teachers, from random logits."""
    from amalgam.data.parquet import key_list
    from amalgam.data.tokens import Ragged, TokenRows
    from amalgam.stages.cache_teachers.ask import answer_table

    random = np.random.default_rng(4)
    logits = random.normal(0, 2, (len(keys), shape.labels)).astype(np.float32)
    passes_logits = (logits[:, None] + random.normal(0, 1, (len(keys), passes, shape.labels))).astype(np.float16)
    offsets = np.arange(len(keys) + 1, dtype=np.int64) * TOKENS
    tokens = TokenRows(Ragged(np.zeros(offsets[-1], np.int32), offsets), None, np.zeros(len(keys), bool))
    return answer_table(key_list(keys), tokens.lengths, tokens.truncated, logits, passes_logits)


def half_of(units: Sequence[Unit], teacher: str) -> list[Unit]:
    """Returns every second unit of one teacher."""
    return [unit for unit in units if unit.payload.teacher == teacher][::2]


def changed_buckets(experiments: Experiments) -> int:
    """Returns the number of buckets that the appended texts change."""
    rows_by_prefix = []
    for config in (experiments.first, experiments.appended):
        run = quiet_run(config)
        update(STAGES, run, target="read-corpus")
        rows_by_prefix.append({bucket.prefix: bucket.rows for bucket in train_part(run).buckets})
    return sum(rows != rows_by_prefix[0].get(prefix) for prefix, rows in rows_by_prefix[1].items())


# ---- targets


def write_targets(config: Path) -> None:
    """Writes targets with only random keys and weights, because planning reads no column of them."""
    run = quiet_run(config)
    stage = BuildTargets()
    name = next(state.fingerprint for state in plan(STAGES, run) if state.stage == stage.name)
    if name is None:
        raise AssertionError("cache-teachers is not current")
    schema = pa.schema(
        [arrow_schema(TARGETS, {"target": 1, "confidence": 1}).field(name) for name in ("key", "weight")]
    )
    for unit in stage.units(run, run.store.folder(stage.name, name)):
        weight = pa.array(np.ones(unit.size, np.float32))
        keys = drawn_keys(np.random.default_rng(5), 0, 0, unit.size)
        with _unsynced(), run.store.draft(unit.folder, unit.name, ".parquet") as draft:
            write_table(pa.table([key_column(keys), weight], schema=schema), draft.folder / "unit.parquet")
            draft.facts = {
                "texts": unit.size,
                "weight_sum": float(unit.size),
                "weight_bins": [0] * 9 + [unit.size],
                "chosen": {},
                "selection": {},
            }
    update(STAGES, run, target="build-targets")
