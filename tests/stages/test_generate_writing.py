"""Texts written many at once: the lazy way equals the naive one token for token, and company changes nothing."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from amalgam.benchmarks import generate
from amalgam.benchmarks.generate import ExhaustiveSampler
from amalgam.pipeline.errors import ExperimentError, WorkError
from amalgam.stages.common.inference.teacher import DROPOUT_OFF, Rows, Teacher
from amalgam.stages.generate.decoding import SamplingParams, Scorer, SteeringParams, Tokenization, Writer
from amalgam.tests.stages.tiny_models import WORDS, tiny
from amalgam.tests.stages.writers import language_model, orders, teacher_of, whole, written

# ---- lazy and naive


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("steer", [0.5, 2.0, 10.0])
def test_lazy_and_naive_write_the_same_tokens(steer: float, greedy: bool) -> None:
    """51 texts each, 306 in all; the naive way is the oracle. Greedy texts differ by their prompts."""
    model, teacher = language_model(slots=16), teacher_of()
    how = SamplingParams(0.0 if greedy else 1.0, None, 0.95, 24)
    asked = orders(17, how, list(WORDS) if greedy else [""])
    lazy = written(model, teacher, asked, SteeringParams(steer, 5))
    naive = written(model, teacher, asked, SteeringParams(steer, 5), ExhaustiveSampler)
    assert len(lazy) == 51
    assert {tag: text.choices for tag, text in lazy.items()} == {tag: text.choices for tag, text in naive.items()}
    assert [(one.text, one.probability) for one in lazy.values()] == [
        (naive[tag].text, naive[tag].probability) for tag in lazy
    ]
    assert len({text.choices for text in lazy.values()}) > 15
    assert sum(text.scored for text in lazy.values()) < sum(text.scored for text in naive.values())


def test_steering_makes_the_teacher_surer_of_the_class() -> None:
    model, teacher = language_model(), teacher_of()
    sure = [
        np.mean([one.probability for one in written(model, teacher, orders(10), SteeringParams(steer, 6)).values()])
        for steer in (0.0, 1.0, 5.0)
    ]
    assert sure[0] < sure[1] < sure[2]


def test_a_plain_loop_without_slots_writes_the_same_greedy_text() -> None:
    """The language model whole and alone at every token, every candidate scored by the teacher on its own."""
    model, teacher = language_model(), teacher_of()
    [text] = written(model, teacher, orders(1, SamplingParams(0.0, None, 1.0, 12))[:1], SteeringParams(2.0, 6)).values()
    expected: list[int] = []
    row = list(model.begin)
    for _ in range(6):
        logits = whole(model, row, first=not expected)
        best, ids = torch.log_softmax(logits.double(), 0).topk(12)
        totals = []
        for log_lm, token in zip(best.tolist(), ids.tolist(), strict=True):
            candidate = model.decode([expected if token in model.ends else [*expected, token]])[0]
            [tokens] = teacher.tokenise([(candidate,)])
            answer = teacher.run(Rows([tokens], [bytes(16)], np.array([DROPOUT_OFF])))[0]
            totals.append(log_lm + 2.0 * float(torch.log_softmax(answer.double(), 0)[0]))
        row.append(int(ids[int(np.argmax(totals))]))
        expected.append(row[-1])
        if row[-1] in model.ends:
            break
    assert list(text.choices) == expected


def test_the_benchmark_counts_the_texts_that_it_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts have equally many of each class: of three classes, --timed-texts 1 times three texts."""
    monkeypatch.setattr(generate, "timed", lambda *_: {"naive": [6.0], "amalgam": [1.5]})
    bench = generate.Bench(language_model(), teacher_of(), SamplingParams(1.0, None, 0.95, 24))
    options = Namespace(texts=1, tokens=3, timed_texts=1, timed_tokens=3, timed_steer=[1.0])
    assert [row["texts_per_s"] for row in generate.measured(bench, 1.0, options)] == [0.5, 2.0]


# ---- company


def test_a_text_does_not_depend_on_its_batch_or_order() -> None:
    teacher, asked = teacher_of(), orders(8)
    together = written(language_model(), teacher, asked, SteeringParams(2.0, 8))
    backwards = written(language_model(), teacher, asked[::-1], SteeringParams(2.0, 8))
    assert together == backwards
    for order in asked[::5]:
        assert written(language_model(), teacher, [order], SteeringParams(2.0, 8)) == {order.tag: together[order.tag]}


@pytest.mark.parametrize(("steer", "temperature"), [(1.0, 1.0), (3.0, 2.0)])
def test_where_rounding_could_decide_a_text_decides_for_itself(
    monkeypatch: pytest.MonkeyPatch, steer: float, temperature: float
) -> None:
    """If every token's margin is too narrow, lazy, naive, joint and single decoding give equal texts."""
    from amalgam.stages.generate import decoding as choice

    teacher, asked = teacher_of(), orders(5, SamplingParams(temperature, None, 0.95, 24))
    steering = SteeringParams(steer, 5)
    narrow = written(language_model(), teacher, asked, steering)
    monkeypatch.setattr(choice, "MARGIN", 1.0)
    monkeypatch.setattr(choice, "CUT", 0.02)
    writer = Writer(language_model(), Scorer(teacher), steering)
    wide = dict(writer.write(asked))
    assert writer.ties_broken > sum(text.tokens for text in wide.values()) / 2
    assert {tag: text.choices for tag, text in wide.items()} == {tag: text.choices for tag, text in narrow.items()}


@pytest.mark.parametrize("prompts", [("",), ("word3 word4 word5", "word6 word7")], ids=["no prompt", "two prompts"])
def test_a_text_that_ends_makes_room_for_another(prompts: Sequence[str]) -> None:
    """More texts than slots; each launch of the language model is as full as it can be, and a prompt is read once."""
    model, steps, read = language_model(slots=4), list[int](), list[int]()

    def listen(_: Any, __: Any, event: dict[str, Any]) -> None:
        if event["use_cache"] and "past_key_values" not in event:
            read.append(event["input_ids"].shape[1])

    model.model.register_forward_pre_hook(listen, with_kwargs=True)
    own = model.slots.step
    model.slots.step = lambda at, rows: (steps.append(len(at)), own(at, rows))[1]  # type: ignore[func-returns-value, method-assign]
    texts = written(model, teacher_of(), orders(8, prompt=prompts), SteeringParams(2.0, 8))
    assert sorted(read) == ([] if prompts == ("",) else [2, 3])
    assert len(texts) == 24
    assert steps[0] == 4
    assert sum(steps) == sum(text.tokens for text in texts.values())
    assert steps.count(4) > len(steps) - 8


def test_the_last_texts_pay_for_no_slot_behind_them() -> None:
    """Six texts of one token in four slots."""
    model, rows = language_model(slots=4), list[int]()

    def listen(_: Any, __: Any, event: dict[str, Any]) -> None:
        if event.get("past_key_values"):
            rows.append(event["input_ids"].numel())

    model.model.register_forward_pre_hook(listen, with_kwargs=True)
    assert len(written(model, None, orders(2), SteeringParams(0.0, 1))) == 6
    assert rows == [4, 2]


def test_fast_is_cheaper_and_not_exact() -> None:
    model, teacher = language_model(), teacher_of()
    exact, fast = (written(model, teacher, orders(20), SteeringParams(10.0, 6, most)) for most in (None, 2))
    assert all(text.scored <= 2 * text.tokens for text in fast.values())
    assert sum(text.scored for text in fast.values()) < sum(text.scored for text in exact.values()) / 4
    assert any(fast[tag].choices != exact[tag].choices for tag in exact)


# ---- texts


def test_no_text_is_empty_and_none_is_longer_than_asked() -> None:
    texts = written(
        language_model(spread=20.0), None, orders(60, SamplingParams(1.3, None, 1.0, 95)), SteeringParams(0.0, 3)
    )
    assert all(text.text for text in texts.values())
    assert {text.tokens for text in texts.values()} == {2, 3}


def test_a_word_that_is_an_end_token_is_in_no_text_and_begins_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words that texts begin with become end tokens: without them no text may be empty."""
    model, params, own = language_model(spread=20.0), SamplingParams(1.3, None, 1.0, 95), Scorer.log_probabilities
    begun = written(model, None, orders(20, params), SteeringParams(0.0, 1)).values()
    ends = [token for token, _ in Counter(text.choices[0] for text in begun).most_common(5)]
    model.ends |= frozenset(ends)
    scored = list[str]()

    def noted(self: Scorer, texts: Sequence[str]) -> Any:
        scored.extend(texts)
        return own(self, texts)

    monkeypatch.setattr(Scorer, "log_probabilities", noted)
    texts = list(written(model, None, orders(20, params), SteeringParams(1.0, 3)).values())
    assert any(text.choices[-1] in ends for text in texts)
    assert all(text.text for text in texts)
    words = set(model.decode([[token] for token in ends]))
    assert not any(words & set(text.split()) for text in [*scored, *(text.text for text in texts)])


def test_a_prompt_precedes_a_text_and_is_no_part_of_it() -> None:
    model, teacher = language_model(), teacher_of()
    with_prompt = written(model, teacher, orders(4, prompt=["word3 word4 word5"]), SteeringParams(1.0, 6))
    without = written(model, teacher, orders(4), SteeringParams(1.0, 6))
    assert all(text.tokens <= 6 and len(text.text.split()) <= 6 for text in with_prompt.values())
    assert {text.choices for text in with_prompt.values()} != {text.choices for text in without.values()}
    with pytest.raises(ExperimentError, match=r"61 tokens.* 40"):
        written(model, teacher, orders(1, prompt=["word1 " * 60]), SteeringParams(1.0, 6))


def test_the_log_probability_is_the_language_model_s_own_of_all_tokens() -> None:
    model = language_model()
    [text] = written(model, teacher_of(), orders(1)[:1], SteeringParams(2.0, 6)).values()
    ids = torch.tensor([[*model.begin, *text.choices]])
    with torch.no_grad():
        logits = model.model(input_ids=ids).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    assert text.log_lm == pytest.approx(-float(loss), abs=1e-3)


# ---- teachers as they come


def test_a_teacher_that_is_certain_everywhere_ends_all_the_same() -> None:
    model, teacher = language_model(), teacher_of()
    teacher.model.classifier.weight.data.zero_()
    teacher.model.classifier.bias.data = torch.tensor([500.0, 0.0, 0.0])
    texts = written(model, teacher, orders(3), SteeringParams(2.0, 5))
    mine, other = texts[0, 0], texts[1, 0]
    assert mine.probability == 1
    assert mine.scored <= 4 * mine.tokens
    assert other.probability == pytest.approx(0, abs=1e-100)
    plain = written(model, None, orders(3), SteeringParams(0.0, 5))
    assert [text.choices for text in texts.values()] == [plain[tag].choices for tag in texts]


@pytest.mark.parametrize("kind", ["bert", "roberta", "gpt2"])
def test_words_are_tokenized_as_in_the_whole_text(kind: str) -> None:
    teacher = teacher_of(kind) if kind != "roberta" else Teacher(*tiny(kind), digest="", seed=0, limit=24)
    tokenization = Tokenization(teacher)
    assert tokenization.separator == " "
    for text in ("word1", "word1 word2", " word3  word4 ", "word5, word6\nword7 !", "word8 " * 40, "unheard of"):
        [whole] = teacher.tokenise([(text,)])
        assert tokenization.tokens(text).ids.tolist() == whole.ids.tolist()
        assert tokenization.tokens(text).truncated == whole.truncated


def test_a_tokenizer_that_joins_words_gets_whole_texts() -> None:
    from tokenizers import pre_tokenizers

    teacher = teacher_of()
    teacher.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Punctuation()  # spaces stay inside tokens
    tokenization = Tokenization(teacher)
    assert tokenization.separator is None
    assert tokenization.tokens("word1 word2").ids.tolist() == teacher.tokenise([("word1 word2",)])[0].ids.tolist()


def test_a_text_without_a_token_has_no_class_probability() -> None:
    teacher = teacher_of("gpt2")
    [nothing, something] = Scorer(teacher).log_probabilities(["  ", "word1 word2"])
    assert np.exp(nothing).tolist() == pytest.approx([1 / 3] * 3)
    assert np.exp(something).sum() == pytest.approx(1)


def test_reported_numbers_do_not_depend_on_the_batch_in_their_last_bit() -> None:
    teacher = teacher_of()
    texts = [f"{WORDS[i % 90]} {WORDS[(3 * i) % 90]}" + " word5" * (i % 4) for i in range(25)]
    scorer = Scorer(teacher)
    together = scorer.log_probabilities(texts)
    for text, near in zip(texts, together, strict=True):
        assert scorer.alone(text).tolist() == Scorer(teacher).alone(text).tolist()
        assert np.allclose(scorer.alone(text), near, atol=1e-4)


def test_a_launch_that_memory_cannot_hold_is_halved_and_at_one_text_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, own = teacher_of(), Teacher.start

    def scarce(most: int) -> Any:
        def start(self: Teacher, rows: Rows, **_options: bool) -> Any:
            if len(rows.tokens) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return own(self, rows)

        return start

    texts = [f"{word} word1" for word in WORDS[:11]]
    expected = Scorer(teacher).log_probabilities(texts)
    monkeypatch.setattr(Teacher, "start", scarce(2))
    assert np.allclose(Scorer(teacher).log_probabilities(texts), expected, atol=1e-5)
    monkeypatch.setattr(Teacher, "start", scarce(0))
    with pytest.raises(WorkError, match=r"out of memory.* 4 tokens"):
        Scorer(teacher).log_probabilities(texts)


def test_logits_that_are_no_numbers_are_an_error_and_not_a_choice() -> None:
    teacher = teacher_of()
    teacher.model.classifier.bias.data[0] = math.nan
    with pytest.raises(WorkError, match=r"teacher tiny: .*NaN"):
        written(language_model(), teacher, orders(1), SteeringParams(1.0, 4))
