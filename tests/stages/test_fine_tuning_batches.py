"""Which rows make a step: all of them, in random order, with little padding, shared without loss."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from amalgam.data.tokens import Ragged, TokenRows
from amalgam.stages.common.inference.batches import token_batches
from amalgam.stages.common.training.batches import Examples, collate, epoch_batches, labelled, share, split


def test_every_row_comes_once_an_epoch_in_an_order_of_seed_and_epoch_alone() -> None:
    lengths = np.random.default_rng(0).integers(3, 100, size=1003)
    batches = epoch_batches(lengths, 8, seed=-5, epoch=2)
    assert sorted(np.concatenate(batches).tolist()) == list(range(1003))
    assert [len(batch) for batch in batches].count(8) == 125
    assert len(batches) == 126
    again = epoch_batches(lengths, 8, seed=-5, epoch=2)
    assert all(np.array_equal(one, other) for one, other in zip(batches, again, strict=True))
    for seed, epoch in [(-5, 3), (5, 2)]:
        other = epoch_batches(lengths, 8, seed=seed, epoch=epoch)
        assert not np.array_equal(np.concatenate(other), np.concatenate(batches))


def test_batches_of_like_length_leave_little_padding_and_come_in_random_order() -> None:
    lengths = np.random.default_rng(0).integers(3, 100, size=4000)
    batches = epoch_batches(lengths, 32, seed=0, epoch=0)
    padded = sum(len(batch) * lengths[batch].max() for batch in batches)
    assert padded < 1.06 * lengths.sum()
    longest = np.array([lengths[batch].max() for batch in batches])
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.3


@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (2, 1), (3, 4), (16, 2)])
def test_processes_and_parts_share_a_batch_without_loss(world: int, accumulate: int) -> None:
    batch = np.arange(100, 113)
    shares = [share(batch, rank=rank, world=world, accumulate=accumulate) for rank in range(world)]
    assert all(len(parts) <= accumulate and all(len(part) for part in parts) for parts in shares)
    assert sorted(row for parts in shares for part in parts for row in part) == batch.tolist()


def test_token_batches_keep_their_budget_and_a_longer_text_is_a_batch_of_its_own() -> None:
    lengths = np.array([5, 90, 7, 3, 40, 8])
    batches = token_batches(lengths, 24)
    assert sorted(np.concatenate(batches).tolist()) == list(range(6))
    assert all(len(rows) == 1 or len(rows) * lengths[rows].max() <= 24 for rows in batches)
    assert [rows.tolist() for rows in batches] == [[3, 0, 2], [5], [4], [1]]
    assert token_batches(lengths[:0], 24) == []


def two_texts() -> Examples:
    tokens = [np.array([2, 9, 3], np.int32), np.array([2, 3], np.int32)]
    types = [np.array([0, 1, 1], np.int32), np.array([0, 1], np.int32)]
    return Examples(tokens, types, np.array([[1, 0], [0.5, 0.5]], np.float32), np.array([1, 0.25], np.float32))


def test_a_batch_is_padded_and_has_its_row_numbers() -> None:
    batch = {name: tensor.tolist() for name, tensor in collate(two_texts(), np.array([1, 0]), 7).items()}
    assert batch == {
        "input_ids": [[2, 3, 7], [2, 9, 3]],
        "attention_mask": [[1, 1, 0], [1, 1, 1]],
        "token_type_ids": [[0, 1, 0], [0, 1, 1]],
        "targets": [[0.5, 0.5], [1, 0]],
        "weights": [0.25, 1],
        "rows": [1, 0],
    }


def test_the_digest_depends_on_the_boundaries_of_texts() -> None:
    examples = two_texts()
    same = Examples(list(examples.tokens), examples.type_ids, examples.targets.copy(), examples.weights.copy())
    joined = [np.array([2, 9], np.int32), np.array([3, 2, 3], np.int32)]
    moved = Examples(joined, examples.type_ids, examples.targets, examples.weights)
    assert examples.digest() == same.digest()
    assert examples.digest() != moved.digest()
    assert examples.digest() != Examples(examples.tokens, None, examples.targets, examples.weights).digest()


def test_held_out_texts_do_not_count_as_truncated_training_texts() -> None:
    keys = np.frombuffer(np.random.default_rng(0).bytes(16 * 200), "S16")
    tokens = TokenRows(Ragged.of([np.arange(3)] * 200), None, np.ones(200, bool))
    data = split([(keys, tokens, np.eye(2)[[0] * 200], np.ones(200))], 0.25)
    assert data.held_out is not None
    assert data.truncated == len(data.learn) == 200 - len(data.held_out)


def test_texts_with_another_label_or_none_are_left_out() -> None:
    keys = pa.array([bytes([row]) * 16 for row in range(1, 6)], pa.binary(16))
    rows = pa.table({"key": keys, "label": ["law", None, "music", "of no teacher", "law"]})
    tokens = TokenRows(Ragged.of([np.arange(length) for length in (3, 4, 5, 6, 7)]), None, np.zeros(5, bool))
    learned = labelled([(rows, tokens)], ["music", "law"]).learn
    assert learned.targets.tolist() == [[0, 1], [1, 0], [0, 1]]
    assert learned.lengths.tolist() == [3, 5, 7]
