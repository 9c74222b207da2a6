"""Neighbours and densities in spaces of hidden states: by a full comparison, and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from amalgam.data.arrays import Array
from amalgam.stages.weigh_teachers import neighbours
from amalgam.stages.weigh_teachers.neighbours import BlockSpace, compared, mean_of, of_length_1, similar


def density(space: BlockSpace, labels: int) -> Array:
    return compared(space, [space], [], labels, 0).density[:, 0]


def test_the_nearest_texts_are_those_of_a_full_comparison_and_never_the_text_itself() -> None:
    features = np.random.default_rng(0).normal(size=(2100, 8)).astype(np.float32)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    similarity = features @ features.T
    np.fill_diagonal(similarity, -2)
    neighbours = similar(BlockSpace(features, features), 5)
    assert neighbours.shape == (2100, 5)
    assert not (neighbours == np.arange(2100)[:, None]).any()
    found_similarity = np.take_along_axis(similarity, neighbours, axis=1)
    assert np.allclose(np.sort(found_similarity), np.sort(similarity)[:, -5:], atol=1e-6)


def test_texts_that_are_equal_are_each_others_neighbours() -> None:
    texts = np.ones((2, 3), np.float32)
    assert similar(BlockSpace(texts, texts), 1).tolist() == [[1], [0]]


@pytest.mark.parametrize("references", [700, 704])
def test_neighbours_in_a_large_corpus_are_references_without_the_text_itself(
    monkeypatch: pytest.MonkeyPatch, references: int
) -> None:
    monkeypatch.setattr(neighbours, "REFERENCES", references)
    features = np.random.default_rng(0).normal(size=(3000, 8)).astype(np.float32)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    near = similar(BlockSpace(features, features), 5)
    assert near.max() < references
    assert not (near == np.arange(3000)[:, None]).any()
    for row in (3, 2999):
        order = np.argsort(-(features[:references] @ features[row]))
        assert sorted(near[row]) == sorted(order[order != row][:5])
    assert np.array_equal(similar(BlockSpace(features[600:], features, 600), 5), near[600:])


def test_neighbours_are_near_in_all_spaces_whatever_their_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "REFERENCES", 60)
    random = np.random.default_rng(0)
    states = [random.normal(size=(70, 3)), 1000 * random.normal(size=(70, 5)) + 7]
    encoder, group = (BlockSpace(own.astype(np.float32), own.astype(np.float32)) for own in states)
    among = compared(encoder, [group], [group], 2, 4)
    centred = [of_length_1(own - own[:60].mean(axis=0)) for own in states]
    for space, own in zip(among.spaces, centred, strict=True):
        assert space[:] == pytest.approx(own, abs=1e-5)
    similarity = np.sum([own @ own[:60].T for own in centred], axis=0)
    np.fill_diagonal(similarity, -9)
    assert np.array_equal(np.sort(among.near), np.sort(np.argsort(-similarity)[:, :4]))


def test_density_is_of_the_closest_others_around_the_mean() -> None:
    """Around their mean, (7, 1): (1, 0), (-1, 0), (0, 0)."""
    states, single = np.array([[8.0, 1.0], [6.0, 1.0], [7.0, 1.0]], np.float32), np.ones((1, 4), np.float32)
    space, alone = BlockSpace(states, states), BlockSpace(single, single)
    densities = density(space, 9)
    assert densities == pytest.approx([-np.log(1.5 + 1e-3), -np.log(1.5 + 1e-3), -np.log(1 + 1e-3)])
    assert density(alone, 9) == pytest.approx([-np.log(1 + 1e-3)])


def test_no_more_than_the_closest_count_and_equal_texts_are_as_close_as_can_be() -> None:
    random = np.random.default_rng(0)
    states = np.concatenate([np.repeat(np.eye(8)[:1], 6, axis=0), random.normal(size=(300, 8))]).astype(np.float32)
    space = BlockSpace(states, states)
    densities = density(space, 9)
    assert densities[:6] == pytest.approx(np.log(1000), abs=0.01)
    assert densities[6:].max() < 5


def test_texts_that_are_dense_in_the_encoder_too_have_no_density_of_a_teacher() -> None:
    random = np.random.default_rng(0)
    encoder = random.normal(size=(400, 16)).astype(np.float32)
    encoder[:40] = encoder[:1] + 0.1 * random.normal(size=(40, 16))
    learned = encoder.copy()
    learned[40:80] = learned[40:41] + 0.1 * random.normal(size=(40, 16))
    teacher = BlockSpace(learned, learned)
    relative = compared(BlockSpace(encoder, encoder), [teacher], [], 4, 0).relative[:, 0]
    assert relative[40:80].min() > relative[:40].max() + 1
    absolute = density(teacher, 4)
    assert absolute[:80].min() > absolute[80:].max() + 1


def test_the_mean_of_a_space_is_that_of_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "REFERENCES", 2)
    assert mean_of(np.array([[0.0], [2.0], [100.0]], np.float32)).tolist() == [1.0]


@pytest.mark.parametrize(("texts", "labels", "counted"), [(3000, 1, 20), (1000, 10, 10), (100, 50, 5)])
def test_a_tenth_of_the_texts_of_a_label_counts_but_5_to_20(texts: int, labels: int, counted: int) -> None:
    """A text with as many equal ones has the largest density, and one that lacks one more has not."""
    states = np.random.default_rng(0).normal(size=(texts, 8)).astype(np.float32)
    states[: counted + 1], states[-counted:] = np.eye(8)[0], np.eye(8)[1]
    space = BlockSpace(states, states)
    own = density(space, labels)
    assert own[: counted + 1] == pytest.approx(np.log(1000), abs=0.05)
    assert own[-counted:].max() < np.log(1000) - 0.5
