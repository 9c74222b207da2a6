"""Training examples, the rows of each step, and their tensors.

The order of an epoch is a pure function of (seed, epoch). A batch is the same for any number of processes and
accumulated parts; these only divide it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from amalgam.data.arrays import Array, RowNumbers, held_out_keys
from amalgam.data.parquet import key_array, places_in
from amalgam.data.tokens import Ids, Ragged, TokenRows, join
from amalgam.stages.common.inference.batches import model_inputs

SORTED_TOGETHER = 50
"""Batches whose texts are sorted by length together: little padding, and the order stays random."""


@dataclass(frozen=True)
class Examples:
    """Texts as token ids with special tokens, and each text's target distribution and weight."""

    tokens: Sequence[Ids]
    type_ids: Sequence[Ids] | None
    targets: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    embeddings: torch.Tensor | None = None
    """[texts, tokens, width], which the encoder reads instead of token ids; the ids then only give the number."""

    def __post_init__(self) -> None:
        # One array for all texts, from which batches are collected.
        object.__setattr__(self, "tokens", Ragged.of(self.tokens))
        object.__setattr__(self, "type_ids", None if self.type_ids is None else Ragged.of(self.type_ids))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> RowNumbers:
        return Ragged.of(self.tokens).lengths

    def first(self, texts: int) -> Examples:
        """Returns at most so many texts: a random sample where they are in the order of their keys."""
        types = None if self.type_ids is None else self.type_ids[:texts]
        return Examples(self.tokens[:texts], types, self.targets[:texts], self.weights[:texts])

    def digest(self) -> str:
        digest = hashlib.sha256(self.lengths.tobytes())
        for texts in (self.tokens, self.type_ids):
            if texts:
                digest.update(Ragged.of(texts).values.astype(np.int32, copy=False).data)
        digest.update(repr(self.targets.shape).encode())
        digest.update(np.ascontiguousarray(self.targets, dtype=np.float32).data)
        digest.update(np.ascontiguousarray(self.weights, dtype=np.float32).data)
        return digest.hexdigest()


def epoch_batches(lengths: RowNumbers, size: int, *, seed: int, epoch: int) -> list[RowNumbers]:
    """Returns every row once, in ceil(n / size) batches of texts of similar length, in random order."""
    # numpy refuses negative seeds; two's complement keeps different seeds different.
    generator = np.random.default_rng([seed % 2**64, epoch])
    shuffled = generator.permutation(len(lengths))
    batches: list[RowNumbers] = []
    for start in range(0, len(shuffled), size * SORTED_TOGETHER):
        chunk = shuffled[start : start + size * SORTED_TOGETHER]
        chunk = chunk[np.argsort(lengths[chunk], kind="stable")]
        batches += [chunk[at : at + size] for at in range(0, len(chunk), size)]
    return [batches[at] for at in generator.permutation(len(batches))]


def share(batch: RowNumbers, *, rank: int, world: int, accumulate: int) -> list[RowNumbers]:
    """Returns one process's rows in at most `accumulate` parts; empty if there are fewer rows than processes."""
    return [part for part in np.array_split(batch[rank::world], accumulate) if len(part)]


def collate(examples: Examples, rows: RowNumbers, pad_id: int, width: int = 0) -> dict[str, torch.Tensor]:
    """Returns the encoder's inputs, at least so wide, and `targets`, `weights` and `rows` for the objective."""
    embeddings = {} if examples.embeddings is None else {"inputs_embeds": examples.embeddings[torch.from_numpy(rows)]}
    return {
        **model_inputs(examples.tokens, examples.type_ids, rows, pad_id, width),
        **embeddings,
        "targets": torch.from_numpy(examples.targets[rows].astype(np.float32, copy=False)),
        "weights": torch.from_numpy(examples.weights[rows].astype(np.float32, copy=False)),
        "rows": torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64)),
    }


# ---- labelled and targeted texts


@dataclass(frozen=True)
class TrainingData:
    learn: Examples
    held_out: Examples | None
    truncated: int
    """Number of truncated texts in `learn`."""
    keys: Array
    """Keys of the texts in `learn`, in their order."""


BucketArrays = tuple[Array, TokenRows, Array, Array]
"""Keys, tokens, targets and weights of a bucket's texts."""


def labelled(
    buckets: Iterable[tuple[pa.Table, TokenRows]], labels: Sequence[str], *, held_out: float = 0.0
) -> TrainingData:
    """Returns labelled texts with one-hot targets; texts with labels outside `labels` are left out."""
    one_hot = np.eye(len(labels), dtype=np.float32)

    def read(rows: pa.Table, tokens: TokenRows) -> BucketArrays:
        gold = places_in(rows.column("label"), labels)
        kept = np.flatnonzero(gold >= 0)
        keys, targets = key_array(rows.column("key"))[kept], one_hot[gold[kept]]
        return keys, tokens.take(kept), targets, np.ones(len(kept), np.float32)

    return split((read(*bucket) for bucket in buckets), held_out)


def split(buckets: Iterable[BucketArrays], held_out: float, unused: Collection[bytes] = ()) -> TrainingData:
    """Splits off the share `held_out` of the texts by their keys; all texts are learned if none would remain.

    Texts with the keys `unused` are in neither part.
    """
    columns = [*zip(*buckets, strict=True)]
    tokens = join(columns[1])
    keys, targets, weights = (np.concatenate(columns[place]) for place in (0, 2, 3))
    is_used = ~np.isin(keys, np.array(list(unused), keys.dtype))
    is_held_out = held_out_keys(keys, held_out) & is_used
    is_learned = is_used & ~is_held_out
    if not is_learned.any():
        is_learned, is_held_out = is_used, np.zeros_like(is_used)

    def examples(chosen: Array) -> Examples:
        taken = tokens.take(np.flatnonzero(chosen))
        return Examples(taken.ids, taken.type_ids, targets[chosen], weights[chosen])

    rest = examples(is_held_out) if is_held_out.any() else None
    return TrainingData(examples(is_learned), rest, int(tokens.truncated[is_learned].sum()), keys[is_learned])
