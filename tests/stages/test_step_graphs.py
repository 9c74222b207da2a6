"""Training steps in CUDA graphs: without a GPU, recorded steps are emulated; `check_gpu.py` compares real ones."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from amalgam.stages.common.training import loop, step_graphs
from amalgam.stages.common.training.losses import Loss, RestrictedKL, WeightedKL
from amalgam.stages.common.training.step_graphs import Recorded, StepGraphs, Tensors, graph_width
from amalgam.tests.stages.test_fine_tuning import PLAIN, Watch, run_of, tiny_bert, train


class Emulated(StepGraphs):
    """Repeats a step by running it again on the fixed inputs."""

    def record(self, shape: step_graphs.Shape, batch: Tensors) -> Recorded | None:
        state = torch.get_rng_state()
        self.keep_gradients(batch)
        torch.set_rng_state(state)
        inputs = {name: torch.zeros_like(tensor) for name, tensor in batch.items()}
        scale, loss = torch.zeros(()), torch.zeros(())

        def repeat() -> None:
            result = self.loss_of(inputs) * scale
            torch.autograd.backward(result)
            loss.copy_(result.detach())

        self.recorded[shape] = Recorded(inputs, scale, loss, repeat)
        return self.recorded[shape]


class Refusing(StepGraphs):
    """A model that no graph can hold."""

    def keep_gradients(self, inputs: Tensors) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    def _leave_recording(self, stream: torch.cuda.Stream) -> None:
        """Nothing is left on a CPU."""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[StepGraphs]:
    """Lets a run on the CPU use emulated graphs, and returns those that were made."""
    made: list[StepGraphs] = []

    def step_graphs_of(run: Any) -> StepGraphs:
        made.append(Emulated(run.names, run.loss_of, run.device))
        return made[-1]

    monkeypatch.setattr(loop.TrainingRun, "step_graphs", step_graphs_of)
    return made


def without_graphs(folder: Path, watch: Watch, **how: Any) -> Any:
    model = tiny_bert(dropout=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.TrainingRun, "step_graphs", lambda _run: None)
        train(model, folder, watch=watch, **how)
    return model


@pytest.mark.parametrize("accumulate", [1, 3])
def test_graphs_train_the_same_model(accumulate: int, tmp_path: Path, graphs: list[StepGraphs]) -> None:
    training = replace(PLAIN, accumulate=accumulate)
    model, watches = tiny_bert(dropout=0.0), (Watch(), Watch())
    train(model, tmp_path / "a", training, watch=watches[0], dtype="fp32")
    plain = without_graphs(tmp_path / "b", watches[1], training=training, dtype="fp32")
    assert watches[0].losses == pytest.approx(watches[1].losses, rel=1e-4)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    [made] = graphs
    assert made.recorded == {}  # the memory is free again


def test_a_width_of_eight_serves_all_texts_up_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[int, ...]] = set()

    class Noting(Emulated):
        def backward(self, batch: Tensors, scale: float) -> torch.Tensor:
            seen.add(tuple(batch["input_ids"].shape))
            return super().backward(batch, scale)

    monkeypatch.setattr(loop.TrainingRun, "step_graphs", lambda run: Noting(run.names, run.loss_of, run.device))
    train(tiny_bert(), tmp_path, dtype="fp32")
    assert {width for _, width in seen} == {8, 12}  # 12 is the longest text


@pytest.mark.parametrize(
    ("longest", "limit", "width"),
    [(1, 512, 8), (8, 512, 8), (9, 512, 16), (128, 512, 128), (129, 512, 160), (50, 51, 51)],
)
def test_widths(longest: int, limit: int, width: int) -> None:
    assert graph_width(longest, limit) == width


def test_a_weight_without_a_gradient_does_not_decay(tmp_path: Path, graphs: list[StepGraphs]) -> None:
    """Its gradient stays None, not zero, with which the optimizer would let it decay."""
    model = tiny_bert()
    model.unused = torch.nn.Linear(3, 3)
    before = model.unused.weight.detach().clone()
    train(model, tmp_path, dtype="fp32")
    assert torch.equal(model.unused.weight, before)
    assert len(graphs) == 1


def test_a_model_that_no_graph_holds_is_trained_without_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop.TrainingRun, "step_graphs", lambda run: Refusing(run.names, run.loss_of, run.device))
    for name in ("get_rng_state", "set_rng_state", "synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: SimpleNamespace(wait_stream=lambda _other: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    model, watches = tiny_bert(dropout=0.0), (Watch(), Watch())
    result = train(model, tmp_path / "a", watch=watches[0], dtype="fp32")
    without_graphs(tmp_path / "b", watches[1], dtype="fp32")
    assert watches[0].losses == pytest.approx(watches[1].losses, rel=1e-4)
    why = "operation not permitted when stream is capturing"
    assert result.notes == [f"training launches its kernels one by one, which is slower: {why}"]


def test_without_memory_for_another_graph_all_graphs_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier graphs would keep a generator that later steps no longer seed."""

    class Limited(Emulated):
        def record(self, shape: step_graphs.Shape, batch: Tensors) -> Recorded | None:
            if not self.recorded:
                return super().record(shape, batch)
            self._give_up(step_graphs.NO_MEMORY)
            assert self.recorded == {}
            return None

    monkeypatch.setattr(loop.TrainingRun, "step_graphs", lambda run: Limited(run.names, run.loss_of, run.device))
    watches = (Watch(), Watch())
    result = train(tiny_bert(dropout=0.0), tmp_path / "a", watch=watches[0], dtype="fp32")
    without_graphs(tmp_path / "b", watches[1], dtype="fp32")
    assert watches[0].losses == pytest.approx(watches[1].losses, rel=1e-4)
    assert result.notes == ["training launches its kernels one by one, which is slower: memory does not suffice"]


@pytest.mark.parametrize("recorded", [True, False])
def test_a_plain_step_without_memory_frees_that_of_the_graphs(recorded: bool) -> None:
    weight, tries = torch.ones(1, requires_grad=True), []

    def loss_of(batch: Tensors) -> torch.Tensor:
        if len(batch["attention_mask"]) == step_graphs.MOST_TOKENS + 1:
            tries.append(dict(recorder.recorded))
            if len(tries) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return (batch["attention_mask"] * weight).sum()

    recorder = Emulated([weight], loss_of, torch.device("cpu"))
    if recorded:
        recorder.backward({"attention_mask": torch.ones(3)}, 1.0)
    many = {"attention_mask": torch.ones(step_graphs.MOST_TOKENS + 1)}
    if not recorded:
        with pytest.raises(torch.OutOfMemoryError):
            recorder.backward(many, 1.0)
        return
    assert float(recorder.backward(many, 1.0)) == step_graphs.MOST_TOKENS + 1
    assert [len(shapes) for shapes in tries] == [1, 0]
    assert weight.grad is not None
    assert float(weight.grad) == step_graphs.MOST_TOKENS + 4


def test_many_tokens_and_long_texts_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(1, requires_grad=True)
    graphs = Emulated([weight], lambda batch: (batch["attention_mask"] * weight).sum(), torch.device("cpu"))
    monkeypatch.setattr(step_graphs, "MOST_TOKENS", 6)
    monkeypatch.setattr(step_graphs, "WIDEST", 4)
    shapes = (((7,), 0), ((1, 5), 0), ((1, 4), 1), ((2, 3), 2), ((1, 4), 2))
    for shape, recorded in shapes:
        loss = graphs.backward({"attention_mask": torch.ones(shape)}, 0.5)
        assert float(loss) == 0.5 * np.prod(shape)
        assert len(graphs.recorded) == recorded
    assert weight.grad is not None
    assert float(weight.grad) == 0.5 * sum(np.prod(shape) for shape, _ in shapes)


@pytest.mark.parametrize(
    ("objective", "device", "recorded"),
    [(WeightedKL(), "cuda", True), (WeightedKL(), "cpu", False), (RestrictedKL([[0], [1]]), "cuda", False)],
)
def test_graphs_are_for_gpus_and_losses_of_fixed_steps(
    objective: Loss, device: str, recorded: bool, tmp_path: Path
) -> None:
    run = run_of(tiny_bert(), tmp_path, objective=objective, cpu=True)
    assert run.graphs is None
    run.device = torch.device(device)
    assert (run.step_graphs() is not None) is recorded
    run.examples = replace(run.examples, embeddings=torch.zeros(33, 12, 32))
    assert run.step_graphs() is None
