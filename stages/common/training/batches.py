"""Which rows make up each step, and their tensors.

The order of an epoch is a pure function of (seed, epoch), and a batch is the same whatever the number of
processes or accumulated parts: those only share it out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from amalgam.data.tokens import Ragged
from amalgam.stages.common.inference.batches import Ids, RowNumbers, model_inputs

# Texts of so many batches are sorted by length together: little padding, and still a random order.
SORTED_TOGETHER = 50


@dataclass(frozen=True)
class Examples:
    """Texts as token ids (special tokens included), and what to learn of each: a distribution and a weight."""

    tokens: Sequence[Ids]
    type_ids: Sequence[Ids] | None
    targets: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        counts = {len(self.tokens), len(self.targets), len(self.weights)}
        counts |= set() if self.type_ids is None else {len(self.type_ids)}
        if len(counts) > 1 or self.targets.ndim != 2:
            raise ValueError(f"examples of unequal length: {sorted(counts)}, targets of shape {self.targets.shape}")
        # End to end, whatever they came as: batches are gathered from one array.
        object.__setattr__(self, "tokens", Ragged.of(self.tokens))
        object.__setattr__(self, "type_ids", None if self.type_ids is None else Ragged.of(self.type_ids))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> RowNumbers:
        return Ragged.of(self.tokens).lengths

    def digest(self) -> str:
        """Identity of everything that is learned from, in its order."""
        total = hashlib.sha256(self.lengths.tobytes())
        for texts in (self.tokens, self.type_ids):
            if texts:
                total.update(Ragged.of(texts).values.astype(np.int32, copy=False).data)
        total.update(repr(self.targets.shape).encode())
        total.update(np.ascontiguousarray(self.targets, dtype=np.float32).data)
        total.update(np.ascontiguousarray(self.weights, dtype=np.float32).data)
        return total.hexdigest()


def epoch_batches(lengths: RowNumbers, size: int, *, seed: int, epoch: int) -> list[RowNumbers]:
    """Every row once, in ceil(n / size) batches of texts of like length, in random order."""
    # numpy takes no negative seeds; two's complement keeps different seeds different.
    generator = np.random.default_rng([seed % 2**64, epoch])
    shuffled = generator.permutation(len(lengths))
    batches: list[RowNumbers] = []
    for start in range(0, len(shuffled), size * SORTED_TOGETHER):
        chunk = shuffled[start : start + size * SORTED_TOGETHER]
        chunk = chunk[np.argsort(lengths[chunk], kind="stable")]
        batches += [chunk[at : at + size] for at in range(0, len(chunk), size)]
    return [batches[at] for at in generator.permutation(len(batches))]


def share(batch: RowNumbers, *, rank: int, world: int, accumulate: int) -> list[RowNumbers]:
    """One process's part of a batch, in at most `accumulate` pieces; none where rows are fewer than processes."""
    return [part for part in np.array_split(batch[rank::world], accumulate) if len(part)]


def collate(examples: Examples, rows: RowNumbers, pad_id: int) -> dict[str, torch.Tensor]:
    """The encoder's inputs, and beside them `targets`, `weights` and the `rows` themselves for the objective."""
    return {
        **model_inputs(examples.tokens, examples.type_ids, rows, pad_id),
        "targets": torch.from_numpy(examples.targets[rows].astype(np.float32, copy=False)),
        "weights": torch.from_numpy(examples.weights[rows].astype(np.float32, copy=False)),
        "rows": torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64)),
    }
