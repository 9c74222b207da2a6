"""A workspace of any size without a teacher's work: synthetic keys and answers, committed through the real store.

Everything that reads them (plan, stage 2, the runner) is the real code; only what a teacher would say is drawn.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from amalgam.data.corpus import Bucket, PartFacts
from amalgam.data.keys import KEY_BYTES, bits_for, prefix_name
from amalgam.data.schemas import CACHE_LOGITS, CACHE_PASSES, CACHE_TEXTS, CORPUS, arrow_schema
from amalgam.data.shards import key_column, write_table
from amalgam.pipeline.console import Console
from amalgam.pipeline.runner import bring_up_to_date
from amalgam.stages.cache_teachers.stage import CacheTeachers
from amalgam.stages.cache_teachers.statistics import statistics
from amalgam.stages.commands import open_run
from amalgam.stages.order import STAGES
from amalgam.stages.read_corpus.parts import train_part
from amalgam.stages.read_corpus.stage import ReadCorpus

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amalgam.pipeline.stage import Run, Unit

DRAWN = 1 << 14
"""Different answers; a text gets one of them."""


@dataclass(frozen=True)
class Shape:
    texts: int
    teachers: int
    labels: int
    passes: int


def write_experiment(folder: Path, shape: Shape) -> Path:
    """An experiment file whose source and teachers are there to be recognised, and never read or loaded."""
    folder.mkdir(parents=True)
    (folder / "train.csv").write_text(f"text\nstands for {shape.texts} synthetic texts\n")
    for number in range(shape.teachers):
        model = folder / "models" / f"teacher-{number}"
        model.mkdir(parents=True)
        names = {str(place): f"label {number} {place}" for place in range(shape.labels)}
        (model / "config.json").write_text(json.dumps({"model_type": "bert", "id2label": names}))
        (model / "tokenizer.json").write_text("{}")
        _write_stub(model / "model.safetensors", number)
    teachers = "".join(
        f"  - {{name: teacher-{number}, model: ./models/teacher-{number}}}\n" for number in range(shape.teachers)
    )
    config = folder / "amalgam.yaml"
    cache = f"cache: {{passes: {shape.passes}, dtype: fp32}}\n"
    config.write_text(f"corpus:\n  train: train.csv\nteachers:\n{teachers}{cache}")
    return config


def _write_stub(path: Path, number: int) -> None:
    from safetensors.numpy import save_file

    save_file({"stub": np.full(1, number, np.float32)}, path)


def quiet_run(config: Path, *overrides: str) -> Run:
    return open_run(config, list(overrides), console=Console(quiet=True))[1]


def write_corpus(config: Path, shape: Shape) -> None:
    run = quiet_run(config)
    stage = ReadCorpus()
    (unit,) = stage.units(run, run.store.root)
    with _unsynced(), run.store.draft(unit.folder, unit.name) as draft:
        draft.facts = {"part": unit.name, **_write_part(draft.folder, shape).to_json()}
    bring_up_to_date(STAGES, run, target="read-corpus")


def _write_part(folder: Path, shape: Shape) -> PartFacts:
    bits, digest = bits_for(shape.texts), sha256()
    counts = np.random.default_rng(0).multinomial(shape.texts, [0.5**bits] * (1 << bits))
    buckets = []
    for number, rows in enumerate(counts.tolist()):
        keys = _keys(number, bits, rows)
        prefix = prefix_name(number, bits)
        digest.update(keys.tobytes())
        buckets.append(Bucket(prefix, rows, f"{prefix}.parquet"))
        write_table(_corpus_table(keys), folder / f"{prefix}.parquet")
    files = tuple(sorted(bucket.file for bucket in buckets))
    nothing: dict[str, int] = {}
    return PartFacts(
        rows=shape.texts,
        texts=shape.texts,
        duplicates=0,
        over_limit=0,
        conflicts=0,
        skipped=nothing,
        labels=nothing,
        texts_digest=digest.hexdigest(),
        labels_digest=None,
        bits=bits,
        buckets=tuple(buckets),
        files=files,
    )


def _keys(number: int, bits: int, rows: int) -> NDArray[np.bytes_]:
    """Sorted random keys that begin with the bucket's bits; 64 random bits more make equal ones a wonder."""
    random = np.random.default_rng([1, number])
    high = random.integers(0, 1 << (64 - bits), rows, dtype=np.uint64) | np.uint64(number << (64 - bits) if bits else 0)
    halves = np.stack([np.sort(high), random.integers(0, 1 << 63, rows, dtype=np.uint64)], axis=1)
    return halves.astype(">u8").view(f"S{KEY_BYTES}").reshape(-1)


def _corpus_table(keys: NDArray[np.bytes_]) -> pa.Table:
    schema = arrow_schema(CORPUS)
    texts = pa.array([keys[row : row + 1].tobytes().hex() for row in range(len(keys))])
    nothing = [pa.nulls(len(keys), schema.field(name).type) for name in ("text_2", "id", "label")]
    return pa.table([key_column(keys), texts, *nothing], schema=schema)


def write_answers(config: Path, shape: Shape) -> int:
    """Stage 1 as it stands after its teachers were asked: the units that it names itself; how many there were."""
    run = quiet_run(config)
    bring_up_to_date(STAGES, run, target="read-corpus")
    units = CacheTeachers().units(run, run.store.root)
    drawn = _drawn_answers(shape)
    buckets = {bucket.prefix: bucket for bucket in train_part(run).buckets}
    with _unsynced():
        for place, unit in enumerate(units):
            _commit(run, unit, drawn, buckets[unit.work.prefix].file.path, place)
    bring_up_to_date(STAGES, quiet_run(config), target="cache-teachers")
    return len(units)


@contextmanager
def _unsynced() -> Iterator[None]:
    """What is only made to be measured and then deleted need not survive a loss of power."""
    synced = os.fsync
    os.fsync = lambda fd: None  # noqa: ARG005
    try:
        yield
    finally:
        os.fsync = synced


def _commit(run: Run, unit: Unit, drawn: pa.Table, texts: str, place: int) -> None:
    from amalgam.data.shards import read_keys

    ask = unit.work
    keys = read_keys(run.store.root / texts)
    keys = keys if ask.rows is None else keys[np.asarray(ask.rows)]
    rows = np.random.default_rng([2, place]).integers(0, DRAWN, len(keys))
    table = drawn.take(rows).add_column(0, _key_field(), key_column(keys))
    with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
        write_table(table, draft.folder / "unit.parquet")
        draft.facts = {
            "prefix": ask.prefix,
            "logits": ask.logits,
            "first": ask.first,
            "last": ask.last,
            "rows": len(keys),
            "cut": 0,
            "tokens": 50 * len(keys),
        }


def _key_field() -> pa.Field:
    return arrow_schema(CACHE_TEXTS).field("key")


def _drawn_answers(shape: Shape) -> pa.Table:
    random = np.random.default_rng(3)
    logits = random.normal(0, 2, (DRAWN, shape.labels)).astype(np.float32)
    passes = (logits[:, None] + random.normal(0, 1, (DRAWN, shape.passes, shape.labels))).astype(np.float16)
    sizes = {"logits": shape.labels, "passes": shape.passes * shape.labels, "mean_probability": shape.labels}
    columns: dict[str, Any] = {
        "tokens": pa.array(np.full(DRAWN, 50, np.int32)),
        "cut": pa.array(np.zeros(DRAWN, bool)),
        "logits": _arrays(logits),
    }
    schema = [*CACHE_TEXTS, *CACHE_LOGITS]
    if shape.passes:
        said = statistics(passes)
        columns |= {
            "passes": _arrays(passes.reshape(DRAWN, -1)),
            "mean_probability": _arrays(said.mean_probability.astype(np.float32)),
            "entropy_nats": pa.array(said.entropy_nats.astype(np.float32)),
            "confidence": pa.array(said.confidence.astype(np.float32)),
            "confidence_se": pa.array(said.confidence_se.astype(np.float32), from_pandas=True),
        }
        schema += CACHE_PASSES
    return pa.table(columns, schema=arrow_schema(schema, sizes).remove(0))


def _arrays(values: NDArray[Any]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
