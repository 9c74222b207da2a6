"""Launches: every row once, the same numbers however it is cut, and errors with a fix."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from amalgam.pipeline.errors import InterruptedRunError, WorkError
from amalgam.stages.common.inference.batches import plan_launches, run_passes
from amalgam.stages.common.inference.teacher import DROPOUT_OFF, Rows, Teacher
from amalgam.tests.stages.tiny_models import WORDS, tiny

LENGTHS = [3, 9, 3, 5, 9, 3, 20, 5, 3]
TEXTS = [(" ".join(WORDS[(7 * i + j) % 90] for j in range(1 + i % 5)),) for i in range(11)]
KEYS = [bytes([i]) * 16 for i in range(len(TEXTS))]


def teacher_of(kind: str = "bert", **settings: Any) -> Teacher:
    model, tokenizer = tiny(kind, spread=6.0, **settings)
    return Teacher(model, tokenizer, digest="0d" * 32, seed=4, limit=32, name="tiny")


def passes_of(
    teacher: Teacher, passes: range, *, texts: int = len(TEXTS), batch_tokens: int = 4096, **options: Any
) -> np.ndarray[Any, Any]:
    tokens = teacher.tokenise(TEXTS[:texts])
    return run_passes(teacher, tokens, KEYS[:texts], passes, deterministic=False, batch_tokens=batch_tokens, **options)[
        1
    ]


# --- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("batch_tokens", [1, 12, 50, 4096])
def test_every_text_and_pass_is_in_one_launch_of_one_length_within_the_budget(batch_tokens: int, fold: bool) -> None:
    launches = list(plan_launches(LENGTHS, range(4, 7), batch_tokens=batch_tokens, fold=fold))
    rows = [(text, number) for one in launches for text, number in zip(one.texts, one.passes, strict=True)]
    assert sorted(rows) == [(text, number) for text in range(len(LENGTHS)) for number in range(4, 7)]
    for one in launches:
        [length] = {LENGTHS[text] for text in one.texts}
        assert len(one) * length <= batch_tokens or len(one) == 1
        assert fold or len(set(one.passes)) == 1


def test_texts_of_near_lengths_fill_up_a_launch_within_the_bound() -> None:
    lengths = [100] * 40 + [99, 98, 95, 94, 93, 80, 40, 39]
    launches = list(plan_launches(lengths, range(4), batch_tokens=16000, fold=True, padding=1 / 16))
    kinds = [sorted({lengths[text] for text in one.texts}) for one in launches]
    assert kinds == [[100], [93, 94, 95, 98, 99], [80], [39, 40]]
    assert [
        len(one) for one in plan_launches([52] * 30 + [50] * 21, range(4), batch_tokens=4160, fold=True, padding=1 / 16)
    ] == [80, 80, 44]
    for one in launches:
        widest = max(lengths[text] for text in one.texts)
        assert lengths[one.texts[0]] == widest
        assert all(lengths[text] >= widest * (1 - 1 / 16) for text in one.texts)
        assert len(one) * widest <= 16000
    rows = [(text, number) for one in launches for text, number in zip(one.texts, one.passes, strict=True)]
    assert sorted(rows) == [(text, number) for text in range(len(lengths)) for number in range(4)]


@pytest.mark.parametrize("kind", ["bert", "deberta-v2", "gpt2"])
def test_padding_to_share_a_launch_changes_nothing(kind: str) -> None:
    teacher = teacher_of(kind)
    alone = passes_of(teacher, range(3)).astype(np.float64)
    teacher.padding = 0.5
    together = passes_of(teacher, range(3)).astype(np.float64)
    assert np.allclose(alone, together, rtol=2**-9, atol=1e-4)


def test_passes_are_folded_into_launches_as_large_as_the_budget_allows() -> None:
    sizes = [len(one) for one in plan_launches([10] * 7, range(16), batch_tokens=320, fold=True)]
    assert sizes == [32, 32, 32, 16]


def test_the_longest_texts_come_first() -> None:
    launches = plan_launches(LENGTHS, range(2), batch_tokens=64, fold=True)
    order = [LENGTHS[one.texts[0]] for one in launches]
    assert order == sorted(order, reverse=True)


def test_no_text_and_no_pass_are_no_launch() -> None:
    assert list(plan_launches([], range(3), batch_tokens=8, fold=True)) == []
    assert list(plan_launches([4], range(3, 3), batch_tokens=8, fold=True)) == []


# --- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "deberta-v2"])
def test_the_first_16_of_32_passes_are_the_16_passes_bit_for_bit(kind: str) -> None:
    teacher = teacher_of(kind)
    # One row a launch: equal launches, equal bits.
    few, many = (passes_of(teacher, range(count), texts=3, batch_tokens=1) for count in (16, 32))
    assert np.array_equal(few, many[:, :16])
    later = passes_of(teacher, range(16, 32), texts=3, batch_tokens=1)
    assert np.array_equal(later, many[:, 16:])
    assert (many.astype(np.float64).std(1) > 0.01).all()


@pytest.mark.parametrize("kind", ["bert", "deberta-v2"])
def test_the_first_16_of_32_passes_are_the_16_passes_in_any_launches(kind: str) -> None:
    teacher = teacher_of(kind)
    alone = passes_of(teacher, range(16), texts=6, batch_tokens=1).astype(np.float64)
    for budget in (40, 4096):
        many = passes_of(teacher, range(32), texts=6, batch_tokens=budget).astype(np.float64)
        # Rounding to 16 bits may fall either way where sums are ordered otherwise.
        assert np.allclose(many[:, :16], alone, rtol=2**-10, atol=1e-5)


def test_order_of_the_texts_does_not_matter() -> None:
    teacher = teacher_of()
    tokens = teacher.tokenise(TEXTS)
    order = np.random.default_rng(0).permutation(len(TEXTS))
    one = run_passes(teacher, tokens, KEYS, range(3), deterministic=True, batch_tokens=99)
    shuffled = [tokens[i] for i in order], [KEYS[i] for i in order]
    two = run_passes(teacher, *shuffled, range(3), deterministic=True, batch_tokens=47)
    assert one[0] is not None
    assert two[0] is not None
    assert np.allclose(one[0][order], two[0], atol=1e-5)
    assert np.allclose(one[1][order].astype(np.float64), two[1].astype(np.float64), rtol=2**-10, atol=1e-5)


def test_the_dropout_off_run_is_eval_and_comes_only_if_asked_for() -> None:
    teacher = teacher_of()
    tokens = teacher.tokenise(TEXTS)
    logits, passes = run_passes(teacher, tokens, KEYS, range(2), deterministic=True, batch_tokens=64)
    assert logits is not None
    assert (str(logits.dtype), logits.shape) == ("float32", (len(TEXTS), 3))
    assert (str(passes.dtype), passes.shape) == ("float16", (len(TEXTS), 2, 3))
    for one, row in zip(tokens, logits, strict=True):
        with torch.no_grad():
            wanted = teacher.model.eval()(torch.from_numpy(one.ids).long()[None]).logits[0].numpy()
        assert np.allclose(row, wanted, atol=1e-5)
    nothing, none = run_passes(teacher, tokens, KEYS, range(0), deterministic=False, batch_tokens=64)
    assert nothing is None
    assert none.shape == (len(TEXTS), 0, 3)


def test_a_teacher_without_dropout_still_answers_with_dropout_off() -> None:
    teacher = teacher_of("modernbert")
    logits, _ = run_passes(teacher, teacher.tokenise(TEXTS), KEYS, range(0), deterministic=True, batch_tokens=64)
    assert logits is not None
    assert np.isfinite(logits).all()


# --- stopping and failing --------------------------------------------------------------------------------------------


def test_progress_counts_every_row() -> None:
    done: list[int] = []
    teacher = teacher_of()
    run_passes(
        teacher, teacher.tokenise(TEXTS), KEYS, range(3), deterministic=True, batch_tokens=40, on_progress=done.append
    )
    assert sum(done) == len(TEXTS) * 4
    assert len(done) > 5


@pytest.mark.parametrize("rows", [3, 1000])
def test_overlapping_launches_change_nothing(rows: int) -> None:
    """As on a GPU: two launches under way at most, answers in their order, also where memory does not suffice."""
    wanted = passes_of(teacher_of(), range(5), batch_tokens=64)
    teacher = teacher_of()
    _ = teacher.fast_encoder
    teacher.prefetch = 1
    asked = starve(teacher, rows=rows)
    seen: list[int] = []
    logits = passes_of(teacher, range(5), batch_tokens=64, on_progress=lambda _: seen.append(len(asked)))
    assert np.allclose(logits.astype(np.float64), wanted.astype(np.float64), rtol=2**-10, atol=1e-5)
    assert len(seen) > 2
    assert seen[0] >= 2
    assert seen[-1] == len(asked)


def test_a_stop_takes_effect_before_the_next_launch() -> None:
    done: list[int] = []

    def stop() -> None:
        if len(done) == 2:
            raise InterruptedRunError("stopped", signal_number=15)

    with pytest.raises(InterruptedRunError):
        passes_of(teacher_of(), range(3), batch_tokens=10, stop=stop, on_progress=done.append)
    assert len(done) == 2


def starve(teacher: Teacher, *, rows: int, error: type[Exception] = torch.OutOfMemoryError) -> list[int]:
    """Gives the teacher memory for so many rows a launch; returns the number of rows of every launch."""
    asked: list[int] = []

    def check(_: Any, __: Any, named: dict[str, Any]) -> None:
        asked.append(len(named["input_ids"]))
        if asked[-1] > rows:
            raise error("CUDA out of memory. Tried to allocate 2.00 GiB")

    teacher.model.register_forward_pre_hook(check, with_kwargs=True)
    return asked


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_launch_too_large_for_memory_is_halved_and_gives_the_same(error: type[Exception]) -> None:
    wanted = passes_of(teacher_of(), range(5))
    teacher = teacher_of()
    _ = teacher.fast_encoder
    asked = starve(teacher, rows=3, error=error)
    logits = passes_of(teacher, range(5))
    assert np.allclose(logits.astype(np.float64), wanted.astype(np.float64), rtol=2**-10, atol=1e-5)
    assert teacher.oom_splits == sum(rows > 3 for rows in asked) > 0
    # The smaller limit applies to all later launches.
    assert max(asked[len(asked) // 2 :]) <= 5


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_lack_of_memory_is_no_property_of_the_model(error: type[Exception]) -> None:
    teacher = teacher_of()
    starve(teacher, rows=0, error=error)
    with pytest.raises(error, match="out of memory"):
        _ = teacher.sites
    with pytest.raises(error, match="out of memory"):
        _ = teacher.fast_encoder
    with pytest.raises(error, match="out of memory"):
        _ = teacher.ignores_padding


def test_one_text_too_large_for_memory_is_named_with_its_tokens() -> None:
    teacher = teacher_of()
    _ = teacher.sites
    starve(teacher, rows=0)
    with pytest.raises(WorkError, match="7 tokens") as caught:
        passes_of(teacher, range(2))
    assert caught.value.where == f"text {KEYS[4].hex()}"
    assert "max_tokens: 3" in str(caught.value)


def test_other_failures_of_a_teacher_are_not_taken_for_lack_of_memory() -> None:
    teacher = teacher_of()
    _ = teacher.sites
    teacher.model.register_forward_pre_hook(lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        passes_of(teacher, range(2))


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_a_text_that_holds_the_end_token_is_answered_next_to_others(kind: str) -> None:
    """Encoder-decoders read the last end token, and refuse texts together that differ in their number."""
    teacher = teacher_of(kind)
    tokens = teacher.tokenise([("word1 word2 word3",), ("word4 [SEP] word5",), ("word6 word7 word8",)])
    assert len({len(text) for text in tokens}) == 1
    keys, budget = KEYS[:3], 4096
    together, passes = run_passes(teacher, tokens, keys, range(2), deterministic=True, batch_tokens=budget)
    for row, text in enumerate(tokens):
        key = keys[row : row + 1]
        alone, own_passes = run_passes(teacher, [text], key, range(2), deterministic=True, batch_tokens=budget)
        assert together is not None
        assert alone is not None
        assert together[row] == pytest.approx(alone[0], abs=1e-5)
        assert passes[row] == pytest.approx(own_passes[0], abs=1e-2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_unusable_logits_name_the_texts_the_teacher_and_the_pass(value: float) -> None:
    teacher = teacher_of()
    tokens = teacher.tokenise(TEXTS)
    broken = int(tokens[4].ids[-2])
    affected = [key.hex() for key, one in zip(KEYS, tokens, strict=True) if broken in one.ids]
    teacher.model.bert.embeddings.word_embeddings.weight.data[broken] = value
    with pytest.raises(WorkError, match=r"teacher tiny: .*\(dropout off\)") as off:
        run_passes(teacher, tokens, KEYS, range(0), deterministic=True, batch_tokens=4096)
    assert off.value.where is not None
    assert set(re.findall("[0-9a-f]{32}", off.value.where)) <= set(affected)
    with pytest.raises(WorkError, match=r"\(pass 20, 21\)") as on:
        run_passes(teacher, tokens, KEYS, range(20, 22), deterministic=False, batch_tokens=4096)
    assert on.value.where is not None
    assert KEYS[4].hex() in on.value.where


def test_a_teacher_that_gives_no_number_is_refused_as_such_and_its_damaged_weights_are_named() -> None:
    teacher = teacher_of()
    tokens = teacher.tokenise(TEXTS)

    def refused() -> WorkError:
        with pytest.raises(WorkError, match="logits are NaN or infinite") as error:
            run_passes(teacher, tokens, KEYS, range(0), deterministic=True, batch_tokens=4096)
        return error.value

    teacher.model.classifier.weight.data[:] = 3e38
    first = refused()
    assert re.fullmatch(r"all \d+ texts so far", str(first.where))
    assert (first.fix, "weights" in first.what) == ("leave this teacher out", False)
    teacher.has_predicted = True
    assert re.search("[0-9a-f]{32}", str(refused().where))
    teacher.model.classifier.weight.data[0] = float("nan")
    damaged = refused()
    assert "tiny: logits are NaN or infinite, since its weights are NaN or infinite: classifier.weight" in damaged.what
    assert "again" in str(damaged.fix)


def test_logits_that_16_bits_cannot_hold_are_refused_with_the_fix() -> None:
    teacher = teacher_of()
    teacher.model.classifier.weight.data.mul_(1e7)
    for teacher.dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(WorkError, match="beyond 65504") as error:
            passes_of(teacher, range(2))
        assert error.value.fix == "leave the texts or this teacher out"  # the cache has 16 bits in any dtype
    half = teacher_of()
    half.model.classifier.weight.data[:] = float("nan")
    half.dtype = torch.float16
    with pytest.raises(WorkError, match=r"cache\.dtype: fp32"):
        passes_of(half, range(2))


def test_rows_of_different_lengths_may_share_a_launch() -> None:
    teacher = teacher_of()
    tokens = teacher.tokenise(TEXTS)
    together = teacher.run(Rows(tokens, KEYS, np.full(len(tokens), 3))).numpy()
    assert np.allclose(together, passes_of(teacher, range(3, 4))[:, 0].astype(np.float64), rtol=2**-10, atol=1e-5)
    off = teacher.run(Rows(tokens, KEYS, np.full(len(tokens), DROPOUT_OFF))).numpy()
    logits, _ = run_passes(teacher, tokens, KEYS, range(0), deterministic=True, batch_tokens=64)
    assert logits is not None
    assert np.allclose(off, logits, atol=1e-5)
