"""`make check-gpu` runs from a bare checkout, reports a missing GPU, and finds wrong results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from amalgam.benchmarks import check_gpu
from amalgam.benchmarks.cache_teachers import Bench
from amalgam.stages.common.inference.dropout import Bank
from amalgam.stages.common.inference.teacher import Teacher
from amalgam.tests.forking import BARE, Forked
from amalgam.tests.stages.test_fused import Uncompiled
from amalgam.tests.stages.test_graphs import KEYS, TEXTS, Recorded, teacher_of
from amalgam.tests.workspaces import finish, quiet_environment

ONE_KIND = """
from amalgam.benchmarks import check_gpu
check_gpu.KINDS = check_gpu.KINDS[:1]
check_gpu.main()
"""


READS = "the model calls aten.item.default in the middle of its work"


def test_the_engine_needs_torch_transformers_and_numpy_alone(tmp_path: Path) -> None:
    (script := tmp_path / "one_kind.py").write_text(ONE_KIND)
    options = ["--device", "cpu", "--texts", "0", "--json"]
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


def test_every_kind_of_model_can_be_built() -> None:
    kinds = {kind: check_gpu.fast_faults(kind, torch.device("cpu")) for kind in check_gpu.KINDS}
    assert kinds == dict.fromkeys(check_gpu.KINDS, ([], "on CUDA alone"))


@pytest.mark.parametrize("wrong", ["", "captured", "compiled"])
def test_fast_launches_that_differ_from_plain_ones_are_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's capture and torch's compiler are replaced; a wrong one is right during its trial."""

    def capture(forward: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        output = forward().clone()
        replays: list[int] = []

        def replay() -> None:
            replays.append(1)
            output.copy_(forward()).add_(wrong == "captured" and len(replays) > 1)

        return replay, output

    def compiler(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def compiled(rows: torch.Tensor, *more: Any) -> torch.Tensor:
            return function(rows, *more) * (1 + (wrong == "compiled" and len(rows) > 1200))

        return compiled

    def with_graphs(model: Any, device: torch.device, dtype: str) -> Teacher:
        teacher = real(model, device, dtype)
        teacher.graphs = teacher.captured_by(capture)
        return teacher

    cpu, real = torch.device("cpu"), check_gpu.build_teacher
    # In float32 on a CPU the encoder looks at its scores.
    monkeypatch.setitem(check_gpu.DTYPES, "fp32", torch.float64)
    monkeypatch.setattr(check_gpu, "dtype_for", lambda _device: "fp32")
    monkeypatch.setattr(check_gpu, "COMPILER", compiler)
    monkeypatch.setattr(check_gpu, "build_teacher", with_graphs)
    faults, text = check_gpu.fast_faults("bert", cpu)
    assert any(f"{wrong} differ from plain ones" in fault for fault in faults) == bool(wrong)
    if not wrong:
        assert (faults, text) == ([], "captured, 4 shapes: equal; captured and compiled, 4 shapes: equal")


def test_the_race_has_a_row_for_each_way_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, captures = Uncompiled(), [Recorded(), Recorded()]
    teacher = teacher_of()
    tokens = teacher.tokenise(TEXTS)
    bench = Bench(teacher, None, tokens, KEYS, 4, 64)
    assert list(check_gpu.ways(bench)) == ["amalgam"]
    teacher.graphs = teacher.captured_by(captures[0])
    monkeypatch.setattr(check_gpu, "CudaCapture", lambda _device: captures[1])
    monkeypatch.setattr(check_gpu, "COMPILER", compiler)
    work = check_gpu.ways(bench)
    done = {}
    for _ in range(2):
        for name, run in work.items():
            before = compiler.calls["added"], captures[0].replays, captures[1].replays
            run()
            after = compiler.calls["added"], captures[0].replays, captures[1].replays
            done[name] = [b > a for a, b in zip(before, after, strict=True)]
    assert done == {
        "amalgam": [True, True, False],
        "amalgam, not compiled": [False, False, True],
        "amalgam, eager": [False, False, False],
    }
