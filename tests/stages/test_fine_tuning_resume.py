"""Resuming after an interruption: the same weights after any stop, damaged checkpoint or non-finite loss.

Run as a script, this file saves a checkpoint and is killed at each of its writes in turn.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from amalgam.pipeline.errors import DiskFullError, WorkError
from amalgam.stages.common.inference.batches import predict
from amalgam.stages.common.training import checkpoint
from amalgam.stages.common.training.batches import Examples
from amalgam.stages.common.training.checkpoint_files import resume_point
from amalgam.stages.common.training.loop import TrainingInterrupted, TrainingResult, TrainingSettings
from amalgam.stages.common.training.losses import Loss, WeightedKL
from amalgam.tests.forking import Forked
from amalgam.tests.stages import test_fine_tuning
from amalgam.tests.stages.test_fine_tuning import Watch, tiny_bert
from amalgam.tests.stages.tiny_models import plain_examples, train_to_the_end
from amalgam.tests.workspaces import flip_bit, quiet_environment

if TYPE_CHECKING:
    from collections.abc import Callable

# 20 rows in batches of 4: 5 steps an epoch, 10 in all.
PLAIN = replace(test_fine_tuning.PLAIN, batch_size=4, accumulate=2, seed=0)


EXAMPLES = plain_examples(20, labels=4)


def train(
    model: Any,
    folder: Path,
    training: TrainingSettings = PLAIN,
    *,
    watch: Watch | None = None,
    examples: Examples = EXAMPLES,
    sign: int = 1,
    **options: Any,
) -> TrainingResult:
    watch = watch or Watch()

    def score(of: Any) -> float:
        torch.rand(3)  # a score may draw random numbers: the training does not notice
        return sign * float(predict(of, examples.tokens, pad_id=0, batch_tokens=64)[:, 0].mean())

    options |= {"score": score, "stop": watch.stop, "on_step": watch.on_step}
    return train_to_the_end(model, examples, training, folder, **options)


def stopped_at(folder: Path, *steps: int) -> None:
    """Writes checkpoints of these steps, as a kill between writing one and removing another leaves them."""
    for step in steps:
        with pytest.raises(TrainingInterrupted) as stopped:
            train(tiny_bert(), folder / "apart" / str(step), watch=Watch(stop_after=step))
        assert stopped.value.step == step
        shutil.move(folder / "apart" / str(step) / f"step-{step:06d}", folder / f"step-{step:06d}")


def same_weights(left: Any, right: Any) -> bool:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.allclose(one, other, atol=1e-6) for one, other in pairs)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TrainingResult, dict[int, float]]:
    model, watch = tiny_bert(), Watch()
    return model, train(model, tmp_path_factory.mktemp("whole"), watch=watch), watch.losses


# Within an epoch, where an evaluation is due, at the end of an epoch, at the very end.
@pytest.mark.parametrize("step", [4, 6, 5, 10])
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path, uninterrupted: Any, step: int) -> None:
    model, fitted, losses = uninterrupted
    stopped_at(tmp_path, step)
    resumed, watch = tiny_bert(), Watch()
    again = train(resumed, tmp_path, watch=watch)
    assert again == fitted._replace(facts={**fitted.facts, "resumed_from_step": step})
    assert watch.losses == {at: loss for at, loss in losses.items() if at > step}
    assert same_weights(resumed, model)


def test_the_best_weights_outlive_an_interruption_that_came_after_them(tmp_path: Path) -> None:
    best_steps = []
    for sign in (-1, 1):
        whole, resumed = tiny_bert(), tiny_bert()
        fitted = train(whole, tmp_path / f"whole{sign}", sign=sign).facts
        with pytest.raises(TrainingInterrupted):
            train(tiny_bert(), tmp_path / f"{sign}", sign=sign, watch=Watch(stop_after=8))
        again = train(resumed, tmp_path / f"{sign}", sign=sign).facts
        assert same_weights(resumed, whole)
        assert (again["best_step"], again["best_score"]) == (fitted["best_step"], fitted["best_score"])
        best_steps.append(fitted["best_step"])
    assert min(best_steps) < 8, "one of the two scores was best before the stop"


def test_a_killed_run_resumes_from_the_last_timed_checkpoint(tmp_path: Path, uninterrupted: Any) -> None:
    often = replace(PLAIN, checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_bert(), tmp_path, often, watch=Watch(fail_after=7))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000006"]
    resumed = tiny_bert()
    again = train(resumed, tmp_path, often)
    assert again.facts["resumed_from_step"] == 6
    assert same_weights(resumed, uninterrupted[0])


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a flipped bit in the weights": lambda at: flip_bit(at / "weights.safetensors"),
    "a flipped bit in the optimizer": lambda at: flip_bit(at / "optimizer.safetensors"),
    "a flipped bit in the state": lambda at: flip_bit(at / "state.json"),
    "a short file": lambda at: os.truncate(at / "best.safetensors", 100),
    "an empty state": lambda at: os.truncate(at / "state.json", 0),
    "a missing file": lambda at: (at / "best.safetensors").unlink(),
    "a missing state": lambda at: (at / "state.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_broken_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, uninterrupted: Any, damage: str
) -> None:
    stopped_at(tmp_path, 4, 7)
    DAMAGE[damage](tmp_path / "step-000007")
    resumed = tiny_bert()
    again = train(resumed, tmp_path)
    assert again.facts["resumed_from_step"] == 4
    assert len(again.notes) == 1
    assert again.notes[0].startswith("checkpoint step-000007 ")
    assert same_weights(resumed, uninterrupted[0])


def test_with_every_checkpoint_broken_the_run_starts_again(tmp_path: Path, uninterrupted: Any) -> None:
    stopped_at(tmp_path, 4)
    flip_bit(tmp_path / "step-000004" / "weights.safetensors")
    resumed = tiny_bert()
    assert train(resumed, tmp_path).facts["resumed_from_step"] == 0
    assert same_weights(resumed, uninterrupted[0])


def test_the_plan_names_the_latest_readable_checkpoint_with_its_phase(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    assert resume_point(tmp_path, tmp_path) == ("", 0.0)
    stopped_at(folder, 4, 6)
    assert resume_point(tmp_path, tmp_path) == ("resumes from step 6 of 10", 0.6)
    (folder / "step-000006/state.json").write_text("{}")
    assert resume_point(tmp_path, tmp_path) == ("resumes from step 4 of 10", 0.4)
    earlier = checkpoint.read(folder, 4)  # as earlier versions wrote it
    shutil.rmtree(folder)
    checkpoint.save(folder / "joint", replace(earlier, state={**earlier.state, "total": None}))
    assert resume_point(tmp_path, tmp_path) == ("resumes joint from step 4", 0.0)


def test_a_checkpoint_of_another_training_is_passed_over(tmp_path: Path) -> None:
    stopped_at(tmp_path, 4)
    faster = train(tiny_bert(), tmp_path, replace(PLAIN, learning_rate=2e-3))
    assert faster.facts["resumed_from_step"] == 0
    [note] = faster.notes
    assert "step-000004" in note
    heavier = replace(EXAMPLES, weights=np.full(20, 2, np.float32))
    assert train(tiny_bert(), tmp_path, examples=heavier).facts["resumed_from_step"] == 0
    # Neither the interval between checkpoints nor the parts of a batch are in the training's identity.
    for same in (replace(PLAIN, checkpoint_seconds=1e8), replace(PLAIN, accumulate=4)):
        assert train(tiny_bert(), tmp_path, same).facts["resumed_from_step"] == 4


def test_another_number_of_processes_may_resume_only_between_epochs(tmp_path: Path, uninterrupted: Any) -> None:
    for step in (4, 5):
        stopped_at(tmp_path / str(step), step)
        snapshot = checkpoint.read(tmp_path / str(step), step)
        checkpoint.save(tmp_path / str(step), replace(snapshot, state=snapshot.state | {"world": 3}))
    with pytest.raises(WorkError, match=r"step 4.* 3 .* 1\nwhere: .*\nfix: .*3"):
        train(tiny_bert(), tmp_path / "4")
    assert train(tiny_bert(), tmp_path / "5").facts["resumed_from_step"] == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_count": {}},
        {"step": 7},
        {"best_score": None},
        {"history": [{"step": 3}]},
        {"unknown": 1},
        {"tensors": "weights"},
        {"tensors": "best"},
        {"tensors": "optimizer"},
    ],
    ids=str,
)
def test_a_signed_checkpoint_of_other_content_is_skipped(tmp_path: Path, changes: dict[str, Any]) -> None:
    stopped_at(tmp_path, 6)
    snapshot = checkpoint.latest(tmp_path)[0]
    assert snapshot is not None
    state, tensors = snapshot.state, dict(snapshot.tensors)
    if "tensors" in changes:
        name = changes["tensors"]
        tensors[name] = {of: torch.zeros(3) if tensor.ndim else tensor for of, tensor in tensors[name].items()}
    else:
        state = {**state, "progress": {**state["progress"], **changes}}
    shutil.rmtree(tmp_path)
    checkpoint.save(tmp_path, replace(snapshot, state=state, tensors=tensors))
    result = train(tiny_bert(), tmp_path)
    assert result.facts["resumed_from_step"] == 0
    assert any("skipped" in note for note in result.notes)


class NotANumber(Loss):
    """WeightedKL, but for some of its calls; with accumulate 2, each step makes two."""

    def __init__(self, *calls: int) -> None:
        self.calls, self.made = calls, 0

    def __call__(self, logits: torch.Tensor, batch: dict[str, torch.Tensor], /) -> torch.Tensor:
        self.made += 1
        return WeightedKL()(logits, batch) * (float("nan") if self.made in self.calls else 1.0)


def test_a_nan_loss_changes_no_weight_and_gives_a_note(tmp_path: Path) -> None:
    model, watch = tiny_bert(), Watch()
    fitted = train(model, tmp_path, watch=watch, objective=NotANumber(3, 5, 11))
    assert [step for step, loss in watch.losses.items() if loss != loss] == [2, 3, 6]  # noqa: PLR0124 - nan is not itself
    [note] = fitted.notes
    assert note.startswith("3 steps ")
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())


def test_a_checkpoint_of_another_objective_is_skipped(tmp_path: Path) -> None:
    class Other(WeightedKL):
        """Another loss with the same settings."""

    stopped_at(tmp_path, 6)
    result = train(tiny_bert(), tmp_path, objective=Other())
    assert result.facts["resumed_from_step"] == 0
    assert "of another training" in result.notes[0]


class NoGradient(NotANumber):
    """The loss of these calls is finite, but the gradient is not."""

    def __call__(self, logits: torch.Tensor, batch: dict[str, torch.Tensor], /) -> torch.Tensor:
        self.made += 1
        zero = (logits - logits.detach()).sum(dim=1).abs().sqrt() if self.made in self.calls else 0.0
        return WeightedKL()(logits, batch) + zero


def test_a_gradient_that_is_no_number_changes_no_weight_and_gives_a_note(tmp_path: Path) -> None:
    model, watch = tiny_bert(), Watch()
    fitted = train(model, tmp_path, watch=watch, objective=NoGradient(3))
    assert np.isfinite(list(watch.losses.values())).all()
    assert fitted.notes == ["1 step was skipped because of a non-finite loss or gradient"]
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())


def test_a_finished_training_is_neither_evaluated_nor_saved_again(tmp_path: Path) -> None:
    first = train(tiny_bert(), tmp_path, keep=True)
    [state] = tmp_path.glob("*/state.json")
    before = state.stat()
    again = train(tiny_bert(), tmp_path, keep=True)
    assert again.facts == {**first.facts, "resumed_from_step": first.facts["steps"]}
    assert (state.stat().st_ino, state.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_three_such_losses_in_a_row_end_the_run_and_keep_the_last_good_checkpoint(tmp_path: Path) -> None:
    often = replace(PLAIN, checkpoint_seconds=0)
    with pytest.raises(WorkError) as raised:
        train(tiny_bert(), tmp_path, often, objective=NotANumber(9, 11, 13, 15))
    assert all(piece in raised.value.what for piece in ("loss", "3 steps", "step 7"))
    assert raised.value.where is not None
    rows, kept = raised.value.where.removeprefix("training rows ").split("; ")
    assert len(rows.split(", ")) == 4
    assert kept.endswith("checkpoint: step 4")
    snapshot, notes = checkpoint.latest(tmp_path)
    assert snapshot is not None
    assert (snapshot.step, notes) == (4, [])


def test_a_score_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="score after step 3"):
        train_to_the_end(tiny_bert(), EXAMPLES, PLAIN, tmp_path, score=lambda _: float("nan"))


def small_snapshot(step: int) -> checkpoint.Checkpoint:
    tied = torch.full((64,), float(step))
    tensors = {"weights": {"a": tied, "tied": tied}, "optimizer": {}, "best": {"a": tied[::2]}}
    return checkpoint.Checkpoint(step, {"step": step}, tensors)


def test_a_full_disk_is_called_that_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, small_snapshot(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        with pytest.raises(DiskFullError, match=r"ulimit -f\): a checkpoint needs"):
            checkpoint.save(tmp_path, small_snapshot(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoint.latest(tmp_path)[0] is not None


@pytest.mark.parametrize("lost", ["step-000002", "."])
def test_a_checkpoint_that_another_run_removes_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Two runs of one experiment have one folder: the faster one removes the other's checkpoint, or ends."""
    folder = tmp_path / "checkpoint"
    checkpoint.save(folder, small_snapshot(1))

    def after_another_run(table: Any, path: Path) -> None:
        shutil.rmtree(path.parent if lost != "." else folder)
        save_file(table, path)

    monkeypatch.setattr(checkpoint, "save_file", after_another_run)
    checkpoint.save(folder, small_snapshot(2))
    monkeypatch.undo()
    snapshot, notes = checkpoint.latest(folder)
    assert (snapshot is None, notes) == (lost == ".", [])
    checkpoint.save(folder, small_snapshot(3))
    assert [path.name for path in folder.iterdir()] == ["step-000003"]


def test_two_runs_that_save_at_once_both_go_on_and_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    def save_all() -> None:
        for step in range(1, 30):
            checkpoint.save(tmp_path, small_snapshot(step))

    with ThreadPoolExecutor(2) as runs:
        for run in [runs.submit(save_all) for _ in range(2)]:
            run.result()
    checkpoint.save(tmp_path, small_snapshot(30))
    snapshot, notes = checkpoint.latest(tmp_path)
    assert snapshot is not None
    assert (snapshot.step, notes) == (30, [])
    assert [path.name for path in tmp_path.iterdir()] == ["step-000030"]


def test_a_link_in_the_place_of_a_checkpoint_leads_to_no_removal(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "checkpoint"
    outside.mkdir()
    folder.mkdir()
    (outside / "state.json").write_text("mine")
    (folder / "step-000001").symlink_to(outside)
    checkpoint.save(folder, small_snapshot(2))
    assert (outside / "state.json").read_text() == "mine"


def test_a_save_killed_at_any_write_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    module = "amalgam.tests.stages.test_fine_tuning_resume"
    out, err = Forked([str(tmp_path)], tmp_path, quiet_environment(), module).communicate()
    assert out, err
    outcomes = json.loads(out)
    assert {step for step, _ in outcomes} == {1, 2}
    assert len(outcomes) > 10
    assert all(weights == [float(step)] * 64 for step, weights in outcomes)


# --- kills -------------------------------------------------------------------------------------------------------

WRITES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}


def die_at(event_number: int, folder: Path) -> None:
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in WRITES and str(folder) in str(arguments[0]):
            seen += 1
            if seen == event_number:
                os._exit(137)

    sys.addaudithook(hook)


def kill_at_every_write(folder: Path) -> list[tuple[int, list[float]]]:
    """For every n: a child that saves step 2 over step 1 and dies at its n-th write; then what can be read."""
    outcomes = []
    for event_number in range(1, 1000):
        here = folder / str(event_number)
        checkpoint.save(here, small_snapshot(1))
        child = os.fork()
        if child == 0:
            die_at(event_number, here)
            checkpoint.save(here, small_snapshot(2))
            os._exit(0)
        survived = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        snapshot, _ = checkpoint.latest(here)
        assert snapshot is not None, event_number
        outcomes.append((snapshot.step, snapshot.tensors["weights"]["tied"].tolist()))
        if survived:
            return outcomes
    raise AssertionError("the child never came to its end")


if __name__ == "__main__":
    print(json.dumps(kill_at_every_write(Path(sys.argv[1]))))  # noqa: T201 - the answer to the test
