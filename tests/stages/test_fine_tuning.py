"""The training loop on a tiny random BERT: the loss, the batches, and resuming after an interruption.

Run as a module, this file is a rank in the test of two processes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from transformers import BertConfig, BertForSequenceClassification

from amalgam.pipeline.errors import WorkError
from amalgam.stages.common.inference.batches import predict
from amalgam.stages.common.training.batches import Examples, epoch_batches
from amalgam.stages.common.training.loop import (
    TrainingInterrupted,
    TrainingResult,
    TrainingRun,
    TrainingSettings,
    dropout_seed,
    learning_rate,
)
from amalgam.stages.common.training.losses import Loss, WeightedKL
from amalgam.tests.forking import Forked
from amalgam.tests.workspaces import quiet_environment, run_ranks

PLAIN = TrainingSettings(
    epochs=2,
    learning_rate=1e-3,
    batch_size=8,
    warmup=0.1,
    weight_decay=0.01,
    evaluate_every=3,
    seed=7,
    checkpoint_seconds=1e9,
)


def tiny_bert(dropout: float = 0.1) -> Any:
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    torch.manual_seed(1)
    return BertForSequenceClassification(config)


def some_examples(count: int = 33, seed: int = 0) -> Examples:
    draw = np.random.default_rng(seed)
    tokens = [draw.integers(1, 50, size=length).astype(np.int32) for length in draw.integers(3, 13, size=count)]
    types = [(np.arange(len(text)) > 2).astype(np.int32) for text in tokens]
    targets = draw.dirichlet(np.full(4, 0.5), size=count).astype(np.float32)
    return Examples(tokens, types, targets, draw.uniform(0.2, 1, size=count).astype(np.float32))


@dataclass
class Watch:
    """A caller that keeps the losses, and stops or interrupts the training after a step."""

    stop_after: int | None = None
    fail_after: int | None = None
    losses: dict[int, float] = field(default_factory=dict)
    asked: int = 0

    def stop(self) -> bool:
        self.asked += 1
        return self.stop_after == self.asked

    def on_step(self, step: int, total: int, loss: float) -> None:
        assert 0 < step <= total
        self.losses[step] = loss
        if step == self.fail_after:
            raise KeyboardInterrupt


def train(model: Any, folder: Path, training: TrainingSettings = PLAIN, **how: Any) -> TrainingResult:
    return run_of(model, folder, training, **how).fit()


def run_of(
    model: Any,
    folder: Path,
    training: TrainingSettings = PLAIN,
    *,
    examples: Examples | None = None,
    watch: Watch | None = None,
    **options: Any,
) -> TrainingRun:
    examples = some_examples() if examples is None else examples
    watch = watch or Watch()

    def loss_on_first_ten(of: Any) -> float:
        types = examples.type_ids[:10] if examples.type_ids else None
        logits = predict(of, examples.tokens[:10], pad_id=0, batch_tokens=64, type_ids=types)
        torch.rand(3)  # a score may draw random numbers: the training does not notice
        return -kl_by_hand(logits, examples.targets[:10], np.ones(len(logits)), 1.0)

    options = {"pad_id": 0, "score": loss_on_first_ten, "stop": watch.stop, "on_step": watch.on_step, **options}
    return TrainingRun(model, examples, training, checkpoint=folder, **options)


def kl_by_hand(logits: Any, targets: Any, weights: Any, temperature: float) -> float:
    """The same in float64, from the formula."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    log_q = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    p = np.asarray(targets, dtype=np.float64)
    inside = np.where(p > 0, p * (np.log(np.where(p > 0, p, 1)) - log_q), 0)
    return float((np.asarray(weights) * temperature**2 * inside.sum(axis=1)).mean())


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().cpu().clone() for name, weight in model.named_parameters()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.allclose(left[name], right[name], atol=1e-6) for name in left)


# --- loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_loss_equals_the_formula_in_float64(temperature: float) -> None:
    draw = np.random.default_rng(3)
    logits = draw.normal(scale=4, size=(6, 4)).astype(np.float32)
    targets = draw.dirichlet(np.ones(4), size=6).astype(np.float32)
    targets[:3, 2:] = 0  # padded labels: 0 log 0 = 0
    weights = draw.uniform(size=6).astype(np.float32)
    batch = {"targets": torch.from_numpy(targets), "weights": torch.from_numpy(weights)}
    loss = float(WeightedKL(temperature)(torch.from_numpy(logits), batch).mean())
    assert loss == pytest.approx(kl_by_hand(logits, targets, weights, temperature), rel=2e-6)


def test_one_hot_targets_make_it_cross_entropy() -> None:
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    gold = torch.arange(8) % 4
    batch = {"targets": torch.nn.functional.one_hot(gold, 4).float(), "weights": torch.ones(8)}
    cross_entropy = torch.nn.functional.cross_entropy(logits, gold, reduction="none")
    torch.testing.assert_close(WeightedKL()(logits, batch), cross_entropy)


def test_the_first_loss_is_that_of_the_untrained_model_over_the_whole_batch(tmp_path: Path) -> None:
    examples, model, watch = some_examples(), tiny_bert(dropout=0), Watch()
    logits = predict(model, examples.tokens, pad_id=0, batch_tokens=64, type_ids=examples.type_ids)
    rows = epoch_batches(examples.lengths, 8, seed=7, epoch=0)[0]
    train(model, tmp_path, examples=examples, watch=watch, objective=WeightedKL(2.0))
    by_hand = kl_by_hand(logits[rows], examples.targets[rows], examples.weights[rows], 2.0)
    assert watch.losses[1] == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_changes_neither_losses_nor_weights(tmp_path: Path, accumulate: int) -> None:
    whole, parts = Watch(), Watch()
    one, other = tiny_bert(dropout=0), tiny_bert(dropout=0)
    train(one, tmp_path / "1", watch=whole, dtype="fp32")  # in bf16, where the CPU has it, parts round otherwise
    train(other, tmp_path / "n", replace(PLAIN, accumulate=accumulate), watch=parts, dtype="fp32")
    assert len(whole.losses) == 10
    assert [parts.losses[step] for step in whole.losses] == pytest.approx(list(whole.losses.values()), rel=1e-4)
    for name, weight in one.named_parameters():
        assert torch.allclose(weight, other.get_parameter(name), atol=2e-4), name


def test_two_processes_train_as_one_and_leave_together(tmp_path: Path) -> None:
    module = "amalgam.tests.stages.test_fine_tuning"
    done = run_ranks(lambda rank: Forked([str(tmp_path)], tmp_path, quiet_environment(**rank), module))
    assert done.code == 0, done.err
    assert "arn" not in done.err, done.err
    content = json.loads((tmp_path / "rank0.json").read_text())

    alone, model = Watch(), unused_weight_bert()
    whole = replace(UNEVEN, accumulate=1)
    fitted = train(model, tmp_path / "one", whole, examples=some_examples(15), watch=alone, dtype="fp32")
    assert list(content["losses"].values()) == pytest.approx(list(alone.losses.values()), rel=1e-4)
    assert [entry["step"] for entry in content["history"]] == [entry["step"] for entry in fitted.facts["history"]]
    for name, weight in model.named_parameters():
        assert torch.allclose(weight, torch.tensor(content["weights"][name]), atol=2e-4), name

    # Rank 1 alone was signalled to stop, during step 4: both left after it, with one whole checkpoint, of both.
    other = json.loads((tmp_path / "rank1.json").read_text())
    assert content["stopped"] == other["stopped"] == 4
    assert content["resumed_equal"] is other["resumed_equal"] is True
    assert other["losses"] == {}, "on_step is rank 0's"
    with pytest.raises(WorkError, match=r"saved by 2 processes, and this run has 1"):
        train(unused_weight_bert(), tmp_path / "stopped", UNEVEN, examples=some_examples(15))


# --- optimisation ------------------------------------------------------------------------------------------------


def test_every_trainable_weight_changes_and_a_frozen_one_does_not(tmp_path: Path) -> None:
    model = tiny_bert()
    model.bert.embeddings.position_embeddings.weight.requires_grad_(False)
    before = weights_of(model)
    train(model, tmp_path)
    same = [name for name, weight in weights_of(model).items() if torch.equal(weight, before[name])]
    assert same == ["bert.embeddings.position_embeddings.weight"]
    assert not model.training
    assert all(weight.grad is None for weight in model.parameters())


class Scaled(Loss, torch.nn.Module):
    """An objective with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def __call__(self, logits: torch.Tensor, batch: dict[str, torch.Tensor], /) -> torch.Tensor:
        return WeightedKL()(logits * self.scale, batch)


def test_an_objectives_weights_are_trained_and_kept_with_the_models(tmp_path: Path) -> None:
    straight, halted = Scaled(), Scaled()
    train(tiny_bert(), tmp_path / "a", objective=straight)
    assert float(straight.scale.detach()) != 1.0
    with pytest.raises(TrainingInterrupted):
        train(tiny_bert(), tmp_path / "b", objective=halted, watch=Watch(stop_after=4))
    resumed = Scaled()
    train(tiny_bert(), tmp_path / "b", objective=resumed)
    torch.testing.assert_close(resumed.scale, straight.scale)


def test_weights_of_zero_train_nothing_and_only_matrices_decay(tmp_path: Path) -> None:
    examples, model = some_examples(), tiny_bert()
    before = weights_of(model)
    fitted = train(
        model, tmp_path, replace(PLAIN, weight_decay=0.5), examples=replace(examples, weights=examples.weights * 0)
    )
    assert {entry["loss"] for entry in fitted.facts["history"]} == {0.0}
    for name, weight in weights_of(model).items():
        smaller = float(weight.norm()) < float(before[name].norm())
        assert smaller if weight.ndim > 1 else torch.equal(weight, before[name]), name


def test_the_precision_and_accumulation_of_a_trainer_in_this_process_neither_matter_nor_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (AcceleratorState, GradientState):
        monkeypatch.setattr(kind, "_shared_state", {})
    trainers = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=8)
    model = tiny_bert()
    before = weights_of(model)
    train(model, tmp_path)
    assert not equal(before, weights_of(model))
    assert trainers.mixed_precision == AcceleratorState().mixed_precision == "bf16"
    assert trainers.gradient_accumulation_steps == GradientState().num_steps == 8


def test_the_accumulation_of_a_launcher_changes_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = tiny_bert(), tiny_bert()
    for steps, model in zip("18", models, strict=True):
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", steps)
        train(model, tmp_path / steps)
    assert equal(*map(weights_of, models))


def test_gradients_are_clipped(tmp_path: Path) -> None:
    moved = {}
    for clip in (1.0, 1e-10):
        model = tiny_bert()
        before = weights_of(model)
        train(model, tmp_path / str(clip), replace(PLAIN, clip=clip, weight_decay=0.0))
        moved[clip] = max(float((weight - before[name]).abs().max()) for name, weight in weights_of(model).items())
    # Far below Adam's epsilon, clipped gradients move next to nothing.
    assert moved[1e-10] < moved[1.0] / 50


def test_the_learning_rate_rises_and_falls_in_straight_lines_and_is_never_zero() -> None:
    training = replace(PLAIN, learning_rate=1.0, warmup=0.2)
    rates = [learning_rate(step, 10, training) for step in range(10)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])
    assert learning_rate(0, 1, replace(training, warmup=0.0)) == 1.0


@pytest.mark.parametrize(("count", "size"), [(1, 8), (3, 1), (9, 8)])
def test_a_single_example_and_batches_of_one_can_be_trained_on(tmp_path: Path, count: int, size: int) -> None:
    watch = Watch()
    fitted = train(tiny_bert(), tmp_path, replace(PLAIN, batch_size=size), examples=some_examples(count), watch=watch)
    assert fitted.facts["steps"] == len(watch.losses) == 2 * math.ceil(count / size)
    assert all(math.isfinite(loss) for loss in watch.losses.values())


def test_without_examples_there_is_a_clear_error(tmp_path: Path) -> None:
    none = Examples([], None, np.zeros((0, 4), np.float32), np.zeros(0, np.float32))
    with pytest.raises(WorkError, match="texts"):
        run_of(tiny_bert(), tmp_path, examples=none)


def test_the_best_weights_are_those_of_the_best_step(tmp_path: Path) -> None:
    for best in (3, 6, 10):
        scores = iter(float(step == best) for step in (3, 6, 9, 10))
        kept: dict[float, Any] = {}
        model = tiny_bert()

        def score(of: Any, kept: dict[float, Any] = kept, scores: Any = scores) -> float:
            value: float = next(scores)
            kept[value] = {name: weight.detach().clone() for name, weight in of.state_dict().items()}
            return value

        result = train(model, tmp_path / str(best), score=score)
        assert result.facts["best_step"] == best
        assert all(torch.equal(weight, kept[1.0][name]) for name, weight in model.state_dict().items())
    assert np.isfinite(result.facts["best_score"])


@pytest.mark.parametrize(("select", "kept"), [(True, 2), (False, 3)])
def test_the_weights_are_those_of_the_latest_best_score_or_of_the_last_step(
    tmp_path: Path, *, select: bool, kept: int
) -> None:
    scores, seen = [0.1, 0.8, 0.8, 0.3], []

    def score(model: Any) -> float:
        assert not model.training
        seen.append(weights_of(model))
        return scores[len(seen) - 1]

    model = tiny_bert()
    fitted = train(model, tmp_path, score=score, select=select)
    assert [entry["step"] for entry in fitted.facts["history"]] == [3, 6, 9, 10]
    assert [entry["score"] for entry in fitted.facts["history"]] == scores
    assert (fitted.facts["best_step"], fitted.facts["best_score"]) == (
        fitted.facts["history"][kept]["step"],
        scores[kept],
    )
    assert equal(weights_of(model), seen[kept])
    assert not any(equal(seen[kept], others) for others in seen[:kept])


def test_the_same_seed_gives_the_same_weights_and_another_does_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    models = [tiny_bert() for _ in range(3)]
    for at, (model, seed) in enumerate(zip(models, [3, 3, -3], strict=True)):
        torch.manual_seed(at)
        train(model, tmp_path / str(at), replace(PLAIN, seed=seed))
    assert equal(weights_of(models[0]), weights_of(models[1]))
    assert not equal(weights_of(models[0]), weights_of(models[2]))
    assert capfd.readouterr() == ("", "")


def test_dropout_has_a_seed_of_its_own_for_every_seed_step_and_rank() -> None:
    keys = [(seed, step, rank) for seed in (-1, 0, 1) for step in range(200) for rank in range(4)]
    assert len({dropout_seed(*key) for key in keys}) == len(keys)
    assert dropout_seed(1, 23, 4) == 6197079868984234  # the same in every process


# --- prediction --------------------------------------------------------------------------------------------------


def test_predictions_come_in_the_order_of_the_texts_and_leave_the_model_as_it_was() -> None:
    examples, model = some_examples(), tiny_bert().train()
    together = predict(model, examples.tokens, pad_id=0, batch_tokens=40, type_ids=examples.type_ids)
    assert model.training
    assert together.dtype == np.float32
    assert examples.type_ids is not None
    for row, (text, types) in enumerate(zip(examples.tokens, examples.type_ids, strict=True)):
        alone = predict(model, [text], pad_id=0, batch_tokens=40, type_ids=[types])
        assert np.allclose(alone[0], together[row], atol=1e-5)
    assert not np.allclose(together, predict(model, examples.tokens, pad_id=0, batch_tokens=40), atol=1e-4)
    assert predict(model, [], pad_id=0, batch_tokens=40).shape == (0, 4)


def test_a_prediction_that_fails_leaves_the_model_in_training() -> None:
    model = tiny_bert().train()
    with pytest.raises(IndexError):
        predict(model, [np.array([10**6])], pad_id=0)
    assert model.training


# --- a rank ----------------------------------------------------------------------------------------------------


# 15 rows in batches of 7, 7 and 1: the ranks have 4 parts and 3, and of the last batch rank 1 has nothing.
UNEVEN = replace(PLAIN, batch_size=7, accumulate=4)


def unused_weight_bert() -> Any:
    """Processes that wait for the gradient of a weight without one would wait for ever."""
    model = tiny_bert(dropout=0)
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
    return model


def one_of_two_ranks(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    examples, model, watch = some_examples(15), unused_weight_bert(), Watch()
    fitted = train(model, folder / "two", UNEVEN, examples=examples, watch=watch, dtype="fp32")
    report: dict[str, Any] = {"losses": watch.losses, "history": fitted.facts["history"], "stopped": None}
    try:
        train(
            unused_weight_bert(),
            folder / "stopped",
            UNEVEN,
            examples=examples,
            watch=Watch(stop_after=4 if rank else None),
            dtype="fp32",
        )
    except TrainingInterrupted as stopped:
        report["stopped"] = stopped.step
        shutil.copytree(folder / "stopped", folder / f"resumed-{rank}")
    resumed = unused_weight_bert()
    train(resumed, folder / f"resumed-{rank}", UNEVEN, examples=examples, dtype="fp32")
    report["resumed_equal"] = equal(weights_of(resumed), weights_of(model))
    report["weights"] = {name: weight.tolist() for name, weight in model.named_parameters()}
    (folder / f"rank{rank}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    one_of_two_ranks(Path(sys.argv[1]))
