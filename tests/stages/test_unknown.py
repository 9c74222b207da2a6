"""The fit of unknown texts: flags, the file, and models without states per token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from amalgam.pipeline.errors import ModelError
from amalgam.stages.common.inference.batches import middle_layer, model_inputs, predict, predict_with_states
from amalgam.stages.common.models.unknown import KNOWN_SHARE, UnknownStates, read_unknown
from amalgam.stages.report.quality import unknown_quality
from amalgam.stages.train_student.training import upper_bound
from amalgam.tests.stages.tiny_models import tiny

WIDTH = 24


def states(random: np.random.Generator, texts: int, *, moved: float = 0.0) -> tuple[Any, Any]:
    """Returns states of three classes in directions of very different variance, twice, and the classes."""
    groups = np.arange(texts) % 3
    scale = np.geomspace(3.0, 0.5, WIDTH)
    values = 100.0 + np.eye(WIDTH)[groups] * 20 + random.normal(size=(texts, WIDTH)) * scale
    values[:, -1] += moved  # in the direction of the least variance
    return np.stack([values, values], 1), groups


def test_texts_outside_the_covariance_are_flagged_and_few_new_texts_of_the_classes() -> None:
    """With 60 texts for 24 dimensions, a threshold on the fitted texts' own distances would flag most new texts."""
    random = np.random.default_rng(0)
    fit = UnknownStates.of(*states(random, 60), layer=1, weights="")
    labelled, unknown = (fit.scores(states(random, 3000, moved=moved)[0]) for moved in (0.0, 5.0))
    quality = unknown_quality(labelled, unknown, fit.threshold)
    assert quality["auroc"] is not None
    assert quality["auroc"] > 0.9
    assert quality["labelled_flagged"] / 3000 < 1 - KNOWN_SHARE + 0.05
    assert 0.5 < np.median(labelled) < 2.0


def test_the_distance_is_that_from_the_nearest_class() -> None:
    random = np.random.default_rng(1)
    values, groups = states(random, 3000)
    fit = UnknownStates.of(values, groups, layer=1, weights="")
    between = values[groups == 0].mean(axis=0) * 2 - values[groups == 1].mean(axis=0)
    means = np.stack([values[groups == group].mean(axis=0) for group in range(3)])
    assert fit.scores(means).max() < fit.scores(between[None])[0]
    one = UnknownStates.of(values, np.zeros_like(groups), layer=1, weights="")
    assert fit.scores(means).max() < one.scores(means).min()


def test_texts_that_no_teacher_knows_can_be_among_the_training_texts() -> None:
    """A third of them is a class of its own, predicted as the others, with less evidence in the mean."""
    random = np.random.default_rng(3)
    values, groups = states(random, 900)
    is_unknown = groups == 2
    predicted = np.where(is_unknown, random.integers(2, size=900), groups)
    evidence = np.where(is_unknown, 0.3, 0.7) + 0.15 * random.normal(size=900)
    new, classes = states(random, 900)

    def auroc(fit: UnknownStates) -> float:
        labelled, others = (fit.scores(new[(classes == 2) == own]) for own in (False, True))
        quality = unknown_quality(labelled, others, fit.threshold)
        return float(quality["auroc"] or 0)

    without = UnknownStates.of(values, predicted, layer=1, weights="")
    fit = UnknownStates.of(values, predicted, evidence, layer=1, weights="")
    assert auroc(without) < 0.8
    assert auroc(fit) > 0.95


def with_evidence(random: np.random.Generator, texts: int, *, followed: bool) -> tuple[Any, Any, Any]:
    """Returns states, classes and evidence; one unit of the last layer follows the evidence or not."""
    values, groups = states(random, texts)
    evidence = random.uniform(0.2, 0.9, size=texts)
    if followed:
        values[:, 1, 10] += 20 * evidence
    return values, groups, evidence


def test_texts_like_those_with_little_evidence_have_higher_scores() -> None:
    random = np.random.default_rng(8)
    values, groups, evidence = with_evidence(random, 900, followed=True)
    fit = UnknownStates.of(values, groups, evidence, layer=1, weights="")
    without = replace(fit, slope=0 * fit.slope, constant=0.0)
    usual, little = states(random, 900)[0], states(random, 900)[0]
    usual[:, 1, 10] += 20 * 0.8
    little[:, 1, 10] += 20 * 0.1

    def auroc(own: UnknownStates) -> float:
        return float(unknown_quality(own.scores(usual), own.scores(little), own.threshold)["auroc"] or 0)

    assert auroc(without) == pytest.approx(0.5, abs=0.05)
    assert auroc(fit) > 0.75
    assert (fit.scores(usual) > fit.threshold).mean() < 0.02
    assert fit.scores(values).mean() == pytest.approx(without.scores(values).mean(), abs=1e-6)


def test_evidence_that_states_do_not_follow_adds_next_to_nothing() -> None:
    random = np.random.default_rng(9)
    fit = UnknownStates.of(*with_evidence(random, 900, followed=False), layer=1, weights="")
    assert (states(random, 900)[0].reshape(900, -1) @ fit.slope).std() < 0.02
    same = UnknownStates.of(*states(random, 60), np.full(60, 0.5), layer=1, weights="")
    assert not same.slope.any()


def test_no_class_is_lost_whose_texts_have_little_evidence() -> None:
    values, groups = states(np.random.default_rng(4), 300)
    evidence = np.where(groups == 2, 0.0, 1.0) + 0.1 * np.random.default_rng(5).random(300)
    fit = UnknownStates.of(values, groups, evidence, layer=1, weights="")
    new, classes = states(np.random.default_rng(6), 3000)
    is_flagged = fit.scores(new) > fit.threshold
    assert len(fit.gaussians.means) == 3
    assert is_flagged[classes == 2].mean() < 0.1


def test_labels_of_one_training_text_do_not_raise_the_threshold() -> None:
    values, groups = states(np.random.default_rng(7), 600)
    usual = UnknownStates.of(values, groups, layer=1, weights="").threshold
    values[:10, :, 5] += 30.0 * np.arange(1, 11)[:, None]
    groups[:10] = np.arange(3, 13)
    assert UnknownStates.of(values, groups, layer=1, weights="").threshold < 1.1 * usual


def test_the_threshold_rises_if_new_texts_are_further_away_than_learned_ones() -> None:
    """As with a student of few texts, the learned texts are nearer to their classes than new ones."""
    values, groups = states(np.random.default_rng(10), 600)
    learned = values - 0.3 * (values - np.stack([values[groups == group].mean(axis=0) for group in range(3)])[groups])
    fit = UnknownStates.of(learned, groups, layer=1, weights="")
    held_out, later = (states(np.random.default_rng(seed), texts)[0] for seed, texts in ((11, 60), (12, 3000)))
    raised = fit.raised(held_out)
    assert (fit.scores(later) > fit.threshold).mean() > 0.1
    assert (raised.scores(later) > raised.threshold).mean() < 0.04
    assert fit.raised(learned[:60]).threshold == fit.threshold
    held_out[:6, :, -1] += 20.0
    assert fit.raised(held_out).threshold < 1.1 * raised.threshold
    assert fit.raised(held_out[5:7]).threshold == fit.threshold  # an odd one of two decides nothing


def test_one_text_and_equal_states_can_be_fitted() -> None:
    for texts, evidence in ((1, None), (7, None), (1, np.ones(1)), (2, np.array([0.2, 0.9])), (7, np.ones(7))):
        fit = UnknownStates.of(np.ones((texts, 2, WIDTH)), np.zeros(texts, np.int64), evidence, layer=0, weights="")
        assert fit.scores(np.ones((2, 2, WIDTH))) == pytest.approx([0.0, 0.0], abs=1e-6)
        assert fit.scores(np.full((1, 2, WIDTH), 2.0))[0] > fit.threshold


def test_the_file_gives_the_same_scores(tmp_path: Path) -> None:
    values, groups = states(np.random.default_rng(2), 200)
    evidence = np.random.default_rng(3).random(200) + values[:, 0, 0] / 100
    fit = UnknownStates.of(values, groups, evidence, layer=2, weights="ab")
    fit.save(tmp_path)
    read = read_unknown(tmp_path, width=WIDTH, layers=2, weights="ab")
    assert (read.layer, read.threshold) == (fit.layer, fit.threshold)
    assert fit.slope.any()
    assert read.scores(values) == pytest.approx(fit.scores(values), rel=1e-3)
    with pytest.raises(ModelError, match="belongs to other weights"):
        read_unknown(tmp_path, width=WIDTH, layers=2, weights="cd")
    with pytest.raises(ModelError, match="is damaged"):
        read_unknown(tmp_path, width=WIDTH, layers=1, weights="ab")


def test_a_fit_without_a_slope_is_read(tmp_path: Path) -> None:
    values, groups = states(np.random.default_rng(2), 200)
    fit = UnknownStates.of(values, groups, layer=2, weights="ab")
    tensors = {name: getattr(fit.gaussians, name).astype(np.float32) for name in ("means", "whiten")}
    about = {"format": "1", "layer": "2", "threshold": repr(fit.threshold), "weights": "ab"}
    save_file(tensors, tmp_path / "unknown.safetensors", metadata={"amalgam": json.dumps(about)})
    read = read_unknown(tmp_path, width=WIDTH, layers=2, weights="ab")
    assert read.scores(values) == pytest.approx(fit.scores(values), rel=1e-3)


TOKENS = [np.array([2, *range(9, 9 + size), 3]) for size in (1, 4, 9, 30)]


@pytest.mark.parametrize(
    ("kind", "layers"), [("bert", 2), ("bert", 1), ("distilbert", 2), ("gpt2", 2), ("modernbert", 2)]
)
def test_the_states_are_the_mean_of_the_middle_layer_for_any_batch(kind: str, layers: int) -> None:
    settings: dict[str, Any] = {"num_hidden_layers": layers} if kind == "bert" else {}
    model, _ = tiny(kind, spread=3.0, **settings)
    model.config.pad_token_id = 0
    assert middle_layer(model, model_inputs(TOKENS, None, np.arange(2), 0)) == 1
    logits, values = predict_with_states(model, TOKENS, pad_id=0, layer=1)
    assert logits == pytest.approx(predict(model, TOKENS, pad_id=0), abs=1e-4)
    for row, ids in enumerate(TOKENS):
        with torch.no_grad():
            states = model(input_ids=torch.from_numpy(ids)[None], output_hidden_states=True).hidden_states
        for place, layer in enumerate((1, -1)):
            assert values[row, place] == pytest.approx(states[layer][0].mean(0).numpy(), abs=1e-4)


def test_a_model_without_a_state_per_token_has_no_middle_layer() -> None:
    from transformers import BartConfig, BartForSequenceClassification

    shape = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = BartForSequenceClassification(BartConfig(vocab_size=60, eos_token_id=3, pad_token_id=0, **shape, **heads))
    assert middle_layer(model, model_inputs(TOKENS, None, np.arange(1), 0)) is None


@pytest.mark.parametrize("texts", [2, 5, 10, 18, 19, 30, 200])
def test_the_threshold_of_the_logits_flags_a_twentieth_of_new_texts_in_the_mean(texts: int) -> None:
    random, new = np.random.default_rng(0), np.random.default_rng(1).normal(size=2000)
    flagged = [(new > upper_bound(random.normal(size=texts))).mean() for _ in range(2000)]
    assert 0.03 < np.mean(flagged) < 0.07


def test_one_text_is_its_own_threshold() -> None:
    assert upper_bound(np.array([-1.5])) == -1.5
