"""Dropout in one kernel: the same masks and, up to rounding, the same numbers, or it is not taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from amalgam.stages.common.inference import cuda as fused
from amalgam.stages.common.inference import teacher as teachers
from amalgam.stages.common.inference.teacher import DROPOUT_OFF, Rows, Teacher
from amalgam.tests.stages.test_graphs import Recorded, rows_of, teacher_of

traced = partial(torch.compile, backend="aot_eager", fullgraph=True)


class Uncompiled:
    """The functions as they are written, counted."""

    def __init__(self) -> None:
        self.calls = {"added": 0, "probabilities": 0}

    def __call__(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counted(*arguments: Any) -> torch.Tensor:
            self.calls[function.__name__] += 1
            return function(*arguments)

        return counted


def launches(teacher: Teacher) -> list[Rows]:
    every = list(range(10))
    return [
        rows_of(teacher, every, every),
        rows_of(teacher, [0, 1, 2, 3] * 3, list(range(12))),
        rows_of(teacher, [4, 5, 6], [7, 7, 8], 17),
        rows_of(teacher, [7], [3]),
    ]


def both_ways(teacher: Teacher, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    assert teacher.fast_encoder is not None
    with_it, teacher.fast_encoder.fused = teacher.fast_encoder.fused, None
    plain = teacher.run(rows)
    teacher.fast_encoder.fused = with_it
    return teacher.run(rows), plain


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_functions_give_the_plain_ways_numbers(kind: str, dtype: torch.dtype) -> None:
    teacher, compiler = teacher_of(kind, dtype=dtype), Uncompiled()
    teacher.fuse(compiler)
    assert teacher.notes == ()
    for rows in launches(teacher):
        results, plain = both_ways(teacher, rows)
        apart = (results - plain).abs().max() / plain.abs().max()
        assert apart < (1e-6 if dtype == torch.float64 else 0.05)
    layers = 2
    assert compiler.calls["probabilities"] > layers
    assert compiler.calls["added"] > layers


def test_they_are_traced_whole_and_once_for_all_shapes() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # noqa: SLF001
    teacher = teacher_of()
    teacher.fuse(traced)
    assert teacher.notes == ()
    first = counters["stats"]["unique_graphs"]
    for rows in launches(teacher):
        results, plain = both_ways(teacher, rows)
        assert torch.allclose(results, plain, rtol=1e-6)
    assert counters["stats"]["unique_graphs"] == first
    assert not counters["graph_break"]


def test_a_failing_compiler_gives_a_note_and_eager_code_is_used() -> None:
    def broken(_: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def fails(*_: Any) -> torch.Tensor:
            raise FileNotFoundError("no C compiler\nfound anywhere")

        return fails

    teacher, plain = teacher_of(), teacher_of()
    teacher.fuse(broken)
    [note] = teacher.notes
    assert note.startswith("teacher tiny: ")
    assert note.endswith(": no C compiler")
    for rows in launches(teacher):
        assert torch.equal(teacher.run(rows), plain.run(rows))


def test_compiled_numbers_that_are_not_the_models_are_not_taken() -> None:
    def wrong(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *arguments: function(*arguments) * 1.1

    teacher, plain = teacher_of(), teacher_of()
    teacher.fuse(wrong)
    [note] = teacher.notes
    assert note.startswith("teacher tiny: ")
    assert "compiled" in note
    rows = launches(teacher)[0]
    assert torch.equal(teacher.run(rows), plain.run(rows))


def test_models_with_layers_of_their_own_are_left_alone() -> None:
    teacher, compiler = teacher_of("mpnet"), Uncompiled()
    teacher.fuse(compiler)
    assert compiler.calls == {"added": 0, "probabilities": 0}
    assert teacher.notes == ()


@pytest.mark.parametrize("switch", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_where_torch_must_not_compile_the_plain_way_stays(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch, "1")
    teacher = teacher_of()
    teacher.fuse(Uncompiled())
    assert teacher.fast_encoder is not None
    assert teacher.fast_encoder.fused is None


def test_compilation_begins_after_some_launches_and_graphs_are_recaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teachers, "FUSE_AFTER", 4)
    teacher, compiler, capture = teacher_of(), Uncompiled(), Recorded()
    teacher.graphs = teacher.captured_by(capture)
    teacher.compiler = compiler
    plain = teacher_of()
    rows = launches(teacher)[0]
    wanted = plain.run(rows)
    seen = []
    for number in range(8):
        off = Rows(rows.tokens, rows.keys, np.full(len(rows.tokens), DROPOUT_OFF))
        assert torch.equal(teacher.run(off), plain.run(off)), number
        assert torch.allclose(teacher.run(rows), wanted, rtol=1e-6)
        seen.append((compiler.calls["added"] > 0, capture.captures))
    assert [fused for fused, _ in seen] == [False] * 3 + [True] * 5
    assert [captures for _, captures in seen] == [0, 2, 2, 2, 3, 4, 4, 4]


def test_few_rows_are_left_to_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, compiler = teacher_of(), Uncompiled()
    teacher.fuse(compiler)
    monkeypatch.setattr(fused, "FEWEST", 10_000)
    compiler.calls.update(added=0, probabilities=0)
    results, plain = both_ways(teacher, launches(teacher)[0])
    assert torch.equal(results, plain)
    assert compiler.calls == {"added": 0, "probabilities": 0}
