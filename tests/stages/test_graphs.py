"""Captured launches give the numbers of plain launches for the current texts, or none. The fake of CUDA's capture
keeps the same state as a graph: the tensors that the forward read when it was captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from amalgam.stages.common.inference import cuda as graphs
from amalgam.stages.common.inference.batches import plan_launches, run_passes
from amalgam.stages.common.inference.cuda import Graphs, HostReadError, NoHostReads
from amalgam.stages.common.inference.teacher import DROPOUT_OFF, Rows, Teacher
from amalgam.tests.stages.tiny_models import WORDS as VOCABULARY
from amalgam.tests.stages.tiny_models import tiny

CPU = torch.device("cpu")
LENGTHS = (4, 4, 4, 4, 6, 6, 6, 6, 7, 9)
TEXTS = [(" ".join(VOCABULARY[(11 * i + j) % 90] for j in range(n)),) for i, n in enumerate(LENGTHS)]
KEYS = [bytes([i + 1]) * 16 for i in range(len(TEXTS))]


class Recorded:
    """Runs the forward again on the tensors it was captured with, into the memory of its first answer."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0

    def __call__(self, forward: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        self.captures += 1
        output = torch.zeros_like(forward())

        def replay() -> None:
            self.replays += 1
            output.copy_(forward())

        return replay, output


def teacher_of(kind: str = "bert", *, dtype: torch.dtype = torch.float64, **settings: Any) -> Teacher:
    """In float64: on a CPU the float32 way of the fast encoder looks at its scores, which no other device's does."""
    torch.manual_seed(3)
    model, tokenizer = tiny(kind, spread=6.0, **settings)
    return Teacher(model, tokenizer, digest="d", seed=5, limit=40, dtype=dtype, name="tiny")


def with_graphs(capture: Any = None, kind: str = "bert") -> tuple[Teacher, Any]:
    teacher, capture = teacher_of(kind), capture or Recorded()
    teacher.graphs = teacher.captured_by(capture)
    return teacher, capture


def rows_of(teacher: Teacher, texts: list[int], passes: list[int], width: int = 0) -> Rows:
    tokens = teacher.tokenise([TEXTS[i] for i in texts])
    return Rows(tokens, [KEYS[i] for i in texts], np.array(passes), width)


@pytest.mark.parametrize("width", [0, 13])
@pytest.mark.parametrize("passes", [[DROPOUT_OFF] * 3, [0, 1, 5]])
def test_replays_give_the_plain_launchs_logits_bit_for_bit(passes: list[int], width: int) -> None:
    plain = teacher_of()
    teacher, capture = with_graphs()
    for texts in ([0, 1, 2], [1, 2, 3], [3, 0, 1], [2, 2, 0]):
        rows = rows_of(teacher, texts, passes, width)
        assert torch.equal(teacher.run(rows), plain.run(rows)), texts
    # The first is plain; the second is captured, and replayed as a check; the others are replayed.
    assert (capture.captures, capture.replays) == (1, 3)
    assert teacher.notes == ()


def test_a_replay_distinguishes_passes_and_texts_of_one_shape() -> None:
    plain = teacher_of()
    teacher, capture = with_graphs()
    answers = []
    for passes in ([0, 0, 0], [0, 0, 0], [1, 1, 1], [2, 3, 4]):
        rows = rows_of(teacher, [0, 1, 2], passes)
        answers.append(teacher.run(rows))
        assert torch.equal(answers[-1], plain.run(rows))
    assert capture.captures == 1
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[1], answers[2])


def test_answers_stay_what_they_are_when_later_launches_run() -> None:
    """Two launches under way, as on a GPU: an answer must not share memory with the next replay."""
    teacher, _ = with_graphs()
    for _ in range(2):
        teacher.run(rows_of(teacher, [0, 1, 2], [0, 1, 2]))
    first = teacher.start(rows_of(teacher, [0, 1, 2], [0, 1, 2]))
    before = first.logits.clone()
    teacher.start(rows_of(teacher, [1, 2, 3], [3, 4, 5]))
    assert torch.equal(first.wait(), before)


def test_other_shapes_and_dropout_off_have_captures_of_their_own() -> None:
    plain = teacher_of()
    teacher, capture = with_graphs()
    launches = [
        ([0, 1], [0, 1], 0),
        ([0, 1, 2], [0, 1, 2], 0),
        ([0, 1], [DROPOUT_OFF] * 2, 0),
        ([4, 5], [0, 1], 0),
        ([0, 1], [0, 1], 8),
    ]
    for _ in range(3):
        for launch in launches:
            rows = rows_of(teacher, *launch)
            assert torch.equal(teacher.run(rows), plain.run(rows)), launch
    assert capture.captures == len(launches)
    assert teacher.graphs is not None
    assert len(teacher.graphs.captured) == len(launches)


@pytest.mark.parametrize("padding", [0.0, 0.4])
def test_a_whole_run_gives_the_same_answers(padding: float) -> None:
    plain = teacher_of()
    teacher, capture = with_graphs()
    teacher.prefetch = 1
    plain.padding = teacher.padding = padding
    tokens = plain.tokenise(TEXTS)
    how: dict[str, Any] = {"deterministic": True, "batch_tokens": 16}
    wanted = run_passes(plain, tokens, KEYS, range(6), **how)
    for _ in range(2):
        logits = run_passes(teacher, tokens, KEYS, range(6), **how)
        for ours, theirs in zip(logits, wanted, strict=True):
            assert ours is not None
            assert theirs is not None
            assert np.array_equal(ours, theirs)
    assert capture.replays > 2 * capture.captures > 0


def test_full_launches_of_a_plan_share_few_shapes() -> None:
    """Capturing pays because all launches of a length but the last have one shape."""
    lengths = np.random.default_rng(0).integers(20, 40, 4000)
    plan = list(plan_launches(lengths.tolist(), range(16), batch_tokens=4096, fold=True, padding=1 / 16))
    shapes = [(len(one), int(lengths[one.texts].max())) for one in plan]
    assert len(plan) > 400
    assert len(set(shapes)) < len(plan) / 8


def test_captures_are_bounded_and_those_that_came_first_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 2)
    plain = teacher_of()
    teacher, capture = with_graphs()
    for _ in range(3):
        for texts in ([0, 1], [0, 1, 2], [0, 1, 2, 3]):
            rows = rows_of(teacher, texts, list(range(len(texts))))
            assert torch.equal(teacher.run(rows), plain.run(rows))
    assert capture.captures == 2
    assert teacher.notes == ()


def test_a_shape_is_captured_only_when_it_comes_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "SEEN", 2)
    teacher, capture = with_graphs()
    sizes = [2, 3, 4, 2, 4, 1, 1]
    for size in sizes:
        teacher.run(rows_of(teacher, list(range(size)), list(range(size))))
    # The shape of two rows was evicted in between, that of four was not, and one row alone never pays.
    assert capture.captures == 1


def test_a_failed_capture_gives_one_note_and_launches_continue() -> None:
    asked: list[int] = []

    def fails(_: Callable[[], torch.Tensor]) -> Any:
        asked.append(1)
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore of it")

    plain = teacher_of()
    teacher, _ = with_graphs(fails)
    for passes in ([0, 1, 2], [DROPOUT_OFF] * 3):
        for _ in range(3):
            rows = rows_of(teacher, [0, 1, 2], passes)
            assert torch.equal(teacher.run(rows), plain.run(rows))
    assert len(asked) == 1
    why = "CUDA error: operation not permitted when stream is capturing"
    [note] = teacher.notes
    assert note.startswith("teacher tiny: ")
    assert note.endswith(f": {why}")


def test_a_replay_that_does_not_read_what_is_there_is_found_out() -> None:
    """As of a capture that holds the numbers of the launch it was made from."""

    def frozen(forward: Callable[[], torch.Tensor]) -> Any:
        return (lambda: None), forward().clone()

    plain = teacher_of()
    teacher, _ = with_graphs(frozen)
    for _ in range(3):
        rows = rows_of(teacher, [0, 1, 2], [0, 1, 2])
        assert torch.equal(teacher.run(rows), plain.run(rows))
    assert len(teacher.notes) == 1
    assert "other numbers" in teacher.notes[0]
    assert teacher.graphs is not None
    assert len(teacher.graphs.captured) == 0


def test_captures_are_let_go_when_memory_does_not_suffice() -> None:
    teacher, _ = with_graphs()
    tokens = teacher.tokenise(TEXTS)
    for _ in range(2):
        wanted = run_passes(teacher, tokens, KEYS, range(4), deterministic=False, batch_tokens=24)[1]
    assert teacher.graphs is not None
    assert teacher.graphs.captured

    def check(_: Any, __: Any, named: dict[str, Any]) -> None:
        if len(named["input_ids"]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    teacher.model.register_forward_pre_hook(check, with_kwargs=True)
    logits = run_passes(teacher, tokens, KEYS, range(4), deterministic=False, batch_tokens=40)[1]
    assert np.allclose(logits, wanted, rtol=2e-3, atol=1e-3)
    assert len(teacher.graphs.captured) == 0
    assert len(teacher.notes) == 1
    assert "wanted for launches" in teacher.notes[0]


def test_buffers_that_a_capture_reads_by_address_outlive_larger_ones() -> None:
    teacher, _ = with_graphs()
    for _ in range(2):
        teacher.run(rows_of(teacher, [0, 1], [0, 1]))
    assert teacher.graphs is not None
    [captured] = teacher.graphs.captured.values()
    addresses = {one.data_ptr() for one in captured.kept}
    encoder = teacher.fast_encoder
    assert encoder is not None
    assert {one.data_ptr() for one in encoder.buffers.tensors()} <= addresses
    teacher.run(rows_of(teacher, [9] * 8, list(range(8))))
    assert not {one.data_ptr() for one in encoder.buffers.tensors()} <= addresses


# --- what may be captured --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [0, 13])
@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "electra", "distilbert", "camembert"])
def test_a_launch_of_the_lean_encoder_reads_nothing_on_the_host(kind: str, width: int) -> None:
    teacher = teacher_of(kind)
    assert teacher.fast_encoder is not None
    rows = rows_of(teacher, [0, 1, 2], [0, 1, 2], width)
    with torch.inference_mode():
        off, keyed = teacher.inputs(rows), teacher.inputs(rows, teacher.sites)
        assert ("attention_mask" in keyed) == bool(width)
        with NoHostReads(CPU):
            teacher.forward(off, teacher.fast_encoder)
            teacher.forward_with_dropout(keyed, teacher.sites, teacher.fast_encoder)


def test_a_model_that_reads_on_the_host_is_not_captured_and_only_that_kind_of_launch() -> None:
    plain = teacher_of("bert")
    teacher, capture = with_graphs(kind="bert")
    classify = teacher.model.classifier.forward

    def looks(hidden: torch.Tensor) -> Any:
        return classify(hidden) if not teacher.model.training or float(hidden.sum()) < 1e9 else None

    teacher.model.classifier.forward = looks
    for passes in ([0, 1, 2], [DROPOUT_OFF] * 3):
        for _ in range(3):
            rows = rows_of(teacher, [0, 1, 2], passes)
            assert torch.equal(teacher.run(rows), plain.run(rows))
    assert capture.captures == 1
    assert len(teacher.notes) == 1
    assert "aten.item" in teacher.notes[0]


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: int(x.argmax()),
        torch.nonzero,
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x + 1),
        lambda x: x + torch.tensor([1.0, 2.0]),
    ],
)
def test_every_way_to_read_on_the_host_is_found(reads: Callable[[torch.Tensor], Any]) -> None:
    x = torch.randn(3, 2)
    reads(x)
    with torch.inference_mode(), pytest.raises(HostReadError), NoHostReads(CPU):
        reads(x)


def test_numbers_in_the_hosts_own_memory_are_no_matter() -> None:
    """Another device computes; the host's numbers go along as arguments."""
    with NoHostReads(torch.device("meta")):
        assert torch.empty(3, device="meta").mul(torch.tensor(2.0)).shape == (3,)
    for inference in (True, False):
        with torch.inference_mode(inference), pytest.raises(HostReadError), NoHostReads(torch.device("meta")):
            torch.ones(3).to("meta")


def test_shapes_that_never_came_before_are_only_noted() -> None:
    """Not even the teacher's numbers are looked at: the host would wait for them."""
    compared: list[int] = []

    def close_enough(_: torch.Tensor, __: torch.Tensor) -> bool:
        compared.append(1)
        return True

    few = Graphs(Recorded(), close_enough=close_enough, kept=list, note=lambda _: None)
    for rows in (2, 3, 4, 2, 2, 2):
        few.run("kind", {"x": torch.ones(rows, 2)}, lambda inputs: inputs["x"] * 2)
    assert compared == [1]
