"""`make check-gpu` runs from a bare checkout, reports a missing GPU, and finds wrong results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from amalgam.benchmarks import check_gpu
from amalgam.stages.common.inference.dropout import Bank
from amalgam.stages.common.inference.teacher import Teacher
from amalgam.stages.common.training.step_graphs import Tensors
from amalgam.tests.forking import BARE, Forked
from amalgam.tests.stages.test_kernels import Steps
from amalgam.tests.stages.test_step_graphs import Emulated
from amalgam.tests.workspaces import finish, quiet_environment

ONE_KIND = """
from amalgam.benchmarks import check_gpu
check_gpu.KINDS = check_gpu.KINDS[:1]
check_gpu.main()
"""


def test_the_engine_needs_torch_transformers_and_numpy_alone(tmp_path: Path) -> None:
    (script := tmp_path / "one_kind.py").write_text(ONE_KIND)
    options = ["--device", "cpu", "--race", "--json"]
    result = finish(Forked(options, tmp_path, quiet_environment(), str(script), BARE))
    assert result.code == 0, result.err
    assert '"row": "correct"' in result.out


def test_without_a_gpu_it_prints_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["check_gpu"])
    with pytest.raises(SystemExit) as leaving:
        check_gpu.main()
    assert leaving.value.code == check_gpu.NO_GPU
    assert "no GPU here" in capsys.readouterr().err


def test_masks_that_differ_or_repeat_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert check_gpu.mask_faults(cpu) == []
    real = Bank.mask

    def repeated(self: Bank, words: torch.Tensor, *how: object) -> torch.Tensor:
        return real(self, words * 0, *how)  # type: ignore[arg-type]

    monkeypatch.setattr(Bank, "mask", repeated)
    assert any("correlate" in fault for fault in check_gpu.mask_faults(cpu))


def test_logits_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert check_gpu.logit_faults("bert", cpu) == []
    monkeypatch.setattr(check_gpu, "dtype_for", lambda _device: "bf16")
    monkeypatch.setitem(check_gpu.TOLERANCE, "bf16", 1e-6)
    assert any("differ from the CPU's" in fault for fault in check_gpu.logit_faults("bert", cpu))


def test_states_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert [check_gpu.state_faults(kind, cpu) for kind in check_gpu.KINDS] == [[]] * len(check_gpu.KINDS)
    monkeypatch.setattr(check_gpu, "dtype_for", lambda _device: "bf16")
    monkeypatch.setitem(check_gpu.TOLERANCE, "bf16", 1e-6)
    assert any("states differ from the CPU's" in fault for fault in check_gpu.state_faults("modernbert", cpu))


def test_every_kind_of_model_can_be_built() -> None:
    kinds = {kind: check_gpu.kernel_faults(kind, torch.device("cpu")) for kind in check_gpu.KINDS}
    assert kinds == dict.fromkeys(check_gpu.KINDS, ([], "no kernels on this device"))


def test_recorded_steps_with_other_gradients_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(check_gpu, "StepGraphs", Emulated)
    faults = {kind: check_gpu.graph_faults(kind, cpu) for kind in check_gpu.KINDS}
    # The emulation records any step.
    assert faults.pop("bert") == ["bert: a step that waits for the device was recorded"]
    assert not any(faults.values())

    class Unscaled(Emulated):
        def backward(self, batch: Tensors, scale: float) -> torch.Tensor:
            return super().backward(batch, scale * 1.01)

    monkeypatch.setattr(check_gpu, "StepGraphs", Unscaled)
    first, again = check_gpu.graph_faults("roberta", cpu)
    assert first.startswith("roberta, a recorded step: gradients differ from those of a plain step by 0.01 ")
    assert again.startswith("roberta, the same step again")


@pytest.mark.parametrize(
    ("factor", "fault"), [(1.0, None), (1.0001, "differ from separate steps"), (1.1, "slower steps")]
)
def test_kernels_that_differ_from_separate_steps_are_found(
    factor: float, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = check_gpu.build_teacher

    def with_kernels(model: Any, device: torch.device, dtype: str) -> Teacher:
        teacher = real(model, device, dtype)
        teacher.kernels = Steps(factor)
        return teacher

    monkeypatch.setattr(check_gpu, "dtype_for", lambda _device: "fp32")
    monkeypatch.setattr(check_gpu, "build_teacher", with_kernels)
    faults, _ = check_gpu.kernel_faults("bert", torch.device("cpu"))
    assert [fault in message for message in faults] == [True] if fault else faults == []


def race_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    """Returns the rows of the races with tiny models on the CPU, without the checks of correctness."""
    sizes = '{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}'
    monkeypatch.setattr(check_gpu, "KINDS", ())
    monkeypatch.setattr(check_gpu, "dtype_for", lambda _device: "fp32")
    options = ["--device", "cpu", "--texts", "16", "--passes", "2", "--repeats", "1", "--sizes", sizes, "--json"]
    monkeypatch.setattr(sys, "argv", ["check_gpu", *options, *more])
    check_gpu.main()
    return {row["row"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}


def test_the_race_has_a_row_for_each_candidate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = race_rows(monkeypatch, capsys)
    candidates = ("amalgam", "amalgam, separate steps", "deterministic", "one run", "tuned", "naive")
    assert {f"{shape}: {name}" for shape in check_gpu.RACED for name in candidates} <= set(rows)
    assert {"training: amalgam", "training: supervised", "training: trainer", "training: trainer-grouped"} <= set(rows)
    assert rows["training: amalgam"]["mfu"] > 0
    assert rows["bert: tuned"]["ratio_to_tuned"] == 1
    assert rows["bert: amalgam"]["dropout_price"] > 0


def test_a_rival_can_be_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = race_rows(monkeypatch, capsys, "--race", "bert", "--without", "tuned")
    assert "bert: tuned" not in rows
    assert "ratio_to_tuned" not in rows["bert: amalgam"]
    assert rows["bert: amalgam"]["ratio_to_naive"] > 0
