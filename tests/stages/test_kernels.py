"""Dropout in kernels: the same masks and, up to rounding, the same logits, or separate steps run.

The kernels need a GPU or Triton's interpreter. Elsewhere, functions of torch with the same signatures replace them.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from amalgam.benchmarks.check_gpu import RACED
from amalgam.stages.common.inference.dropout import Attention, MaskClaim, attended, gated, scattered
from amalgam.stages.common.inference.teacher import DROPOUT_OFF, Rows, Teacher
from amalgam.tests.stages.tiny_models import WORDS, tiny
from amalgam.tests.workspaces import quiet_environment

LENGTHS = (4, 4, 4, 4, 6, 6, 6, 6, 7, 9)
TEXTS = [(" ".join(WORDS[(11 * i + j) % 90] for j in range(n)),) for i, n in enumerate(LENGTHS)]
KEYS = [bytes([i + 1]) * 16 for i in range(len(TEXTS))]
LAYERS = 2


class Steps:
    """The kernels' results, in separate steps, times `factor`. `taken`: the number of calls of each."""

    def __init__(self, factor: float = 1.0, *, refused: tuple[str, ...] = ()) -> None:
        self.taken = {"attend": 0, "add_norm": 0, "gate": 0, "multiply": 0}
        self.factor = factor
        self.refused = refused

    def attend(
        self, attention: Attention, claim: MaskClaim | None, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        mask = claim.whole() if claim else attention.query.new_ones(attention.scores_shape)
        mixed = self._result("attend", lambda: attended(attention, mask))
        if mixed is None or out is None:
            return mixed
        return out.copy_(mixed)

    def add_norm(
        self,
        norm: torch.nn.LayerNorm,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        claim: MaskClaim | None,
        *,
        keep: bool,
    ) -> torch.Tensor | None:
        added = hidden + (rows * claim.whole() if claim else rows)
        result = self._result("add_norm", lambda: norm(added))
        if keep and result is not None:
            hidden.copy_(added)
        return result

    def gate(self, wide: torch.Tensor, claim: MaskClaim | None, out: torch.Tensor) -> torch.Tensor | None:
        result = self._result("gate", lambda: gated(wide) * (claim.whole() if claim else 1))
        return None if result is None else out.copy_(result)

    def multiply(self, rows: torch.Tensor, claim: MaskClaim) -> torch.Tensor | None:
        return self._result("multiply", lambda: rows * claim.whole())

    def offsets(self, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return scattered(words.unsqueeze(-1) + places.flatten())

    def _result(self, name: str, work: Any) -> torch.Tensor | None:
        if name in self.refused:
            return None
        self.taken[name] += 1
        result: torch.Tensor = work()
        return result * self.factor


def teacher_of(
    kind: str = "bert", *, dtype: torch.dtype = torch.float64, kernels: Any = None, **settings: Any
) -> Teacher:
    torch.manual_seed(3)
    model, tokenizer = tiny(kind, spread=6.0, **RACED.get(kind, {}), **settings)
    teacher = Teacher(model, tokenizer, digest="d", seed=5, limit=40, dtype=dtype, name="tiny")
    teacher.kernels = kernels
    return teacher


def rows_of(teacher: Teacher, texts: list[int], passes: list[int], width: int = 0) -> Rows:
    tokens = teacher.tokenise([TEXTS[i] for i in texts])
    return Rows(tokens, [KEYS[i] for i in texts], np.array(passes), width)


def batches(teacher: Teacher) -> list[Rows]:
    return [
        rows_of(teacher, list(range(10)), list(range(10))),
        rows_of(teacher, [4, 5, 6], [7, 7, 8], 17),
        rows_of(teacher, [7], [3]),
    ]


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "mpnet", "modernbert"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_logits_are_those_of_separate_steps(kind: str, dtype: torch.dtype) -> None:
    kernels = Steps()
    teacher, plain = teacher_of(kind, dtype=dtype, kernels=kernels), teacher_of(kind, dtype=dtype)
    for rows in batches(teacher):
        expected = plain.run(rows)
        apart = (teacher.run(rows) - expected).abs().max() / expected.abs().max()
        assert apart < (1e-6 if dtype == torch.float64 else 0.1)
    assert teacher.notes == ()
    assert kernels.taken["multiply"] > 0
    assert (kernels.taken["attend"] >= LAYERS) == (kind != "mpnet")  # whose scores have a bias
    assert (kernels.taken["add_norm"] >= LAYERS) == (kind != "mpnet")
    assert (kernels.taken["gate"] >= LAYERS) == (kind == "modernbert")


@pytest.mark.parametrize("name", ["attend", "add_norm", "gate", "multiply"])
def test_a_call_that_a_kernel_refuses_runs_in_separate_steps(name: str) -> None:
    kernels = Steps(refused=(name,))
    teacher, plain = teacher_of("modernbert", kernels=kernels), teacher_of("modernbert")
    for rows in batches(teacher):
        assert torch.allclose(teacher.run(rows), plain.run(rows), rtol=1e-6)
    assert [other for other, count in kernels.taken.items() if not count] == [name]


def test_the_last_layer_alone_runs_in_kernels_too() -> None:
    kernels = Steps()
    teacher, plain = teacher_of(kernels=kernels), teacher_of()
    rows = rows_of(teacher, [0, 1, 2], [DROPOUT_OFF] * 3)
    results = [one.start_last_layer(rows, range(3)).wait() for one in (teacher, plain)]
    assert torch.allclose(results[0], results[1], rtol=1e-6)
    assert kernels.taken["add_norm"] > 0


@pytest.mark.parametrize(
    ("kind", "taken"),
    [("bert", (LAYERS, 2 * LAYERS, 0)), ("modernbert", (LAYERS, 2 * LAYERS, LAYERS)), ("mpnet", (0, 0, 0))],
)
def test_layers_run_in_kernels_without_dropout_too(kind: str, taken: tuple[int, ...]) -> None:
    kernels = Steps()
    teacher, plain = teacher_of(kind, kernels=kernels), teacher_of(kind)
    rows = rows_of(teacher, [0, 1, 2], [DROPOUT_OFF] * 3)
    assert torch.allclose(teacher.run(rows), plain.run(rows), rtol=1e-6)
    before = dict(kernels.taken)
    teacher.run(rows)
    counts = {name: count - before[name] for name, count in kernels.taken.items()}
    assert counts == dict(zip(("attend", "add_norm", "gate"), taken, strict=True)) | {"multiply": 0}


def test_kernels_with_other_numbers_are_not_used() -> None:
    teacher, plain = teacher_of(kernels=Steps(1.1)), teacher_of()
    rows = batches(teacher)[0]
    assert torch.equal(teacher.run(rows), plain.run(rows))
    [note] = teacher.notes
    assert note == "teacher tiny: its layers run in separate, slower steps: their numbers are not the model's"


class OtherMasks(Steps):
    """Attention without dropout, or products with the masks of the next places."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong

    def attend(
        self, attention: Attention, claim: MaskClaim | None, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        if self.wrong != "attend":
            return super().attend(attention, claim, out)
        mixed = attended(attention, attention.query.new_ones(attention.scores_shape))
        return mixed if out is None else out.copy_(mixed)

    def multiply(self, rows: torch.Tensor, claim: MaskClaim) -> torch.Tensor | None:
        return super().multiply(rows, claim if self.wrong != "multiply" else claim._replace(offsets=claim.offsets + 1))


@pytest.mark.parametrize("wrong", ["attend", "multiply"])
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_kernels_with_other_masks_are_not_used(kind: str, wrong: str) -> None:
    """In half precision, the logits of a few rows alone would not show it."""
    teacher = teacher_of(kind, dtype=torch.bfloat16, kernels=OtherMasks(wrong))
    teacher.run(batches(teacher)[0])
    assert len(teacher.notes) == 1


class OtherMeans(Steps):
    """Queries that see no key get other numbers than in separate steps: the kernels read fewer of their keys."""

    def attend(
        self, attention: Attention, claim: MaskClaim | None, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        mixed, visible = super().attend(attention, claim, out), attention.plain().mask
        assert mixed is not None
        return mixed if visible is None else mixed.add_(~visible.any(-1)[..., None] * 9.0)


def test_queries_without_a_visible_key_are_not_compared() -> None:
    """Of padding that is further from the last token than a layer's window."""
    kernels = OtherMeans()
    layers: dict[str, Any] = {"num_hidden_layers": 3, "global_attn_every_n_layers": 3}
    teacher, plain = (teacher_of("modernbert", kernels=one, **layers) for one in (kernels, None))
    for rows in batches(teacher):
        assert torch.allclose(teacher.run(rows), plain.run(rows), rtol=1e-6)
    assert teacher.notes == ()
    assert kernels.taken["attend"] > 0


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (FileNotFoundError("no C compiler\nfound anywhere"), "no C compiler"),
        (torch.OutOfMemoryError("12 GiB"), "memory does not suffice"),
        (KeyError(), "KeyError"),
    ],
)
def test_a_kernel_that_fails_gives_a_note_once(error: Exception, why: str) -> None:
    class Broken(Steps):
        def multiply(self, rows: torch.Tensor, claim: MaskClaim) -> torch.Tensor | None:
            raise error

    teacher, plain = teacher_of(kernels=Broken()), teacher_of()
    for rows in batches(teacher):
        assert torch.equal(teacher.run(rows), plain.run(rows))
    assert teacher.notes == (f"teacher tiny: its layers run in separate, slower steps: {why}",)


INTERPRETED = """
import amalgam.benchmarks.check_gpu as check
import torch
from amalgam.stages.common.inference import kernels

of_device = check.build_teacher

def build_teacher(*arguments):
    teacher = of_device(*arguments)
    teacher.kernels = kernels
    return teacher

check.build_teacher, check.dtype_for = build_teacher, lambda _device: "fp32"
check.BATCH_ROWS = 2
for kind in ("bert", "modernbert"):
    faults, summary = check.kernel_faults(kind, torch.device("cpu"))
    assert not faults, faults
    print(kind, summary)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch for CUDA")
def test_the_kernels_themselves_in_tritons_interpreter(tmp_path: Path) -> None:
    (script := tmp_path / "interpreted.py").write_text(INTERPRETED)
    environment = quiet_environment(TRITON_INTERPRET="1")
    # Not a fork: Triton reads the variable when it is imported.
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
