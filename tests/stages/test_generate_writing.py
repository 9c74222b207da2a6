"""Texts written many at once: the lazy way equals the naive one token for token, and company changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken

from amalgam.pipeline.errors import ExperimentError, ModelError, WorkError
from amalgam.stages.cache_teachers.teacher import DROPOUT_OFF, Rows, Teacher
from amalgam.stages.generate.choice import Drawing
from amalgam.stages.generate.language_model import Alone, LanguageModel, Slots
from amalgam.stages.generate.noise import text_word
from amalgam.stages.generate.scoring import Reader, Scorer
from amalgam.stages.generate.writing import Order, Steering, Writer, Written
from amalgam.tests.stages.tiny_models import SPECIAL, WORDS, tiny, tiny_language_model, word_tokenizer

LONGEST = 40
LABELS = 3
Tag = tuple[int, int]
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "cls_token", "sep_token")


def language_model(kind: str = "gpt2", *, slots: int = 8, longest: int = LONGEST, **settings: Any) -> LanguageModel:
    return LanguageModel(*tiny_language_model(kind, **settings), slots=slots, longest=longest, device="cpu")


def teacher_of(kind: str = "bert", *, sure: float = 40.0, limit: int = 24) -> Teacher:
    """`sure` scales the head: how far its probabilities are from even."""
    model, tokenizer = tiny(kind, spread=6.0, num_hidden_layers=1) if kind == "bert" else tiny(kind, spread=6.0)
    head = model.classifier if kind == "bert" else model.score
    head.weight.data.mul_(sure)
    return Teacher(model, tokenizer, digest="77" * 32, seed=0, limit=limit, name="tiny")


def orders(texts: int, how: Drawing | None = None, prompt: Sequence[str] = ("",)) -> list[Order[Tag]]:
    """So many of each class."""
    cut = how or Drawing(1.0, None, 0.95, 24)
    return [
        Order((label, index), text_word(0, label, index), label, prompt[index % len(prompt)], cut)
        for index in range(texts)
        for label in range(LABELS)
    ]


def written(
    model: LanguageModel, teacher: Teacher | None, asked: Sequence[Order[Tag]], steering: Steering
) -> dict[Tag, Written]:
    """With a scorer that remembers nothing of another run."""
    return dict(Writer[Tag](model, Scorer(teacher) if teacher else None, steering).write(asked))


# ---- lazy and naive


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("steer", [0.5, 1.0, 2.0, 5.0, 10.0])
def test_lazy_and_naive_write_the_same_tokens(steer: float, greedy: bool) -> None:
    """102 texts each, 1,020 in all; the naive way is the oracle. Greedy texts differ by what stands before them."""
    model, teacher = language_model(slots=16), teacher_of()
    how = Drawing(0.0 if greedy else 1.0, None, 0.95, 24)
    asked = orders(34, how, [f"{one} {other}" for one in WORDS[:6] for other in WORDS[:6]] if greedy else [""])
    lazy = written(model, teacher, asked, Steering(steer, 5))
    naive = written(model, teacher, asked, Steering(steer, 5, lazy=False))
    assert len(lazy) == 102
    assert {tag: text.choices for tag, text in lazy.items()} == {tag: text.choices for tag, text in naive.items()}
    assert [(one.text, one.probability) for one in lazy.values()] == [
        (naive[tag].text, naive[tag].probability) for tag in lazy
    ]
    assert len({text.choices for text in lazy.values()}) > 30
    assert all(text.scored == text.offered for text in naive.values())
    assert sum(text.scored for text in lazy.values()) < sum(text.scored for text in naive.values())


def test_steering_makes_the_teacher_surer_of_the_class() -> None:
    model, teacher = language_model(), teacher_of()
    sure = [
        np.mean([one.probability for one in written(model, teacher, orders(10), Steering(steer, 6)).values()])
        for steer in (0.0, 1.0, 5.0)
    ]
    assert sure[0] < sure[1] < sure[2]


def test_an_oracle_that_knows_nothing_of_slots_writes_the_same_greedy_text() -> None:
    """The language model whole and alone at every token, every candidate scored by the teacher on its own."""
    model, teacher = language_model(), teacher_of()
    [text] = written(model, teacher, orders(1, Drawing(0.0, None, 1.0, 12))[:1], Steering(2.0, 6)).values()
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


# ---- company


def test_a_text_is_the_same_alone_in_company_and_in_any_order() -> None:
    teacher, asked = teacher_of(), orders(12)
    together = written(language_model(), teacher, asked, Steering(2.0, 8))
    backwards = written(language_model(), teacher, asked[::-1], Steering(2.0, 8))
    assert together == backwards
    for order in asked[::5]:
        assert written(language_model(), teacher, [order], Steering(2.0, 8)) == {order.tag: together[order.tag]}


def test_where_rounding_could_decide_a_text_decides_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """With margins so wide that every token is settled apart, lazily, naively, together and alone come out the same."""
    from amalgam.stages.generate import choice

    teacher, asked = teacher_of(), orders(5)
    narrow = written(language_model(), teacher, asked, Steering(1.0, 5))
    monkeypatch.setattr(choice, "MARGIN", 1.0)
    monkeypatch.setattr(choice, "CUT", 0.02)
    writer = Writer[Tag](language_model(), Scorer(teacher), Steering(1.0, 5))
    wide = dict(writer.write(asked))
    assert writer.settled > writer.steps / 2
    assert {tag: text.choices for tag, text in wide.items()} == {tag: text.choices for tag, text in narrow.items()}


@pytest.mark.parametrize("prompts", [("",), ("word3 word4 word5", "word6 word7")], ids=["no prompt", "two prompts"])
def test_a_text_that_ends_makes_room_for_another(prompts: Sequence[str]) -> None:
    """More texts than slots; each launch of the language model is as full as it can be, and a prompt is read once."""
    model, steps, read = language_model(slots=4), list[int](), list[int]()

    def listen(_: Any, __: Any, told: dict[str, Any]) -> None:
        if told["use_cache"] and "past_key_values" not in told:
            read.append(told["input_ids"].shape[1])

    model.model.register_forward_pre_hook(listen, with_kwargs=True)
    own = model.slots.step
    model.slots.step = lambda at, rows: (steps.append(len(at)), own(at, rows))[1]  # type: ignore[func-returns-value, method-assign]
    found = written(model, teacher_of(), orders(8, prompt=prompts), Steering(2.0, 8))
    assert sorted(read) == ([] if prompts == ("",) else [2, 3])
    assert len(found) == 24
    assert steps[0] == 4
    assert sum(steps) == sum(text.tokens for text in found.values())
    assert steps.count(4) > len(steps) - 8


def test_fast_is_cheaper_and_not_exact() -> None:
    model, teacher = language_model(), teacher_of()
    exact, fast = (written(model, teacher, orders(20), Steering(10.0, 6, most)) for most in (None, 2))
    assert all(text.scored <= 2 * text.tokens for text in fast.values())
    assert sum(text.scored for text in fast.values()) < sum(text.scored for text in exact.values()) / 4
    assert any(fast[tag].choices != exact[tag].choices for tag in exact)


# ---- language models as they come


@pytest.mark.parametrize(
    ("kind", "settings", "way"),
    [
        ("gpt2", {}, Slots),
        (
            "llama",
            {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
            Slots,
        ),
        (
            "gpt_neox",
            {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
            Slots,
        ),
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, Alone),
    ],
)
def test_architectures_write_what_they_would_by_themselves(kind: str, settings: dict[str, Any], way: type) -> None:
    """Greedy and unsteered: the argmax of the model's own logits, whole text by whole text."""
    model = language_model(kind, slots=3, spread=4.0, **settings)
    assert isinstance(model.slots, way)
    assert model.longest == LONGEST  # whether the model knows a limit or not
    asked = orders(2, Drawing(0.0), ["word1 word2", "word7"])
    found = written(model, None, asked, Steering(0.0, 6))
    for order in asked:
        row, own = [*model.begin, *model.encode(order.prompt)], list[int]()
        while len(own) < 6 and not (own and own[-1] in model.ends):
            logits = whole(model, [*row, *own], first=not own)
            own.append(int(logits.argmax()))
        assert list(found[order.tag].choices) == own


def whole(model: LanguageModel, row: list[int], *, first: bool) -> torch.Tensor:
    """The model's own logits of what follows a row, all of it anew; no text begins with its end."""
    with torch.no_grad():
        logits: torch.Tensor = model.model(input_ids=torch.tensor([row])).logits[0, -1]
    logits = logits.masked_fill(model.banned, -math.inf)
    if first:
        logits[sorted(model.ends)] = -math.inf
    return logits


def test_an_encoder_is_no_language_model() -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    with pytest.raises(ModelError, match="reads what comes after a token"):
        language_model("bert", **shape)


def without_special(tokenizer: Any, model: Any) -> None:
    for name in SPECIAL_NAMES:
        setattr(tokenizer, name, None)
    for config in (model.config, model.generation_config):
        config.bos_token_id = config.eos_token_id = config.pad_token_id = None


def test_a_language_model_without_any_special_token_begins_with_a_word_and_runs_to_the_limit() -> None:
    model, tokenizer = tiny_language_model(words=("The", *WORDS[1:]))
    tokenizer = word_tokenizer(("the", *WORDS[1:]))
    without_special(tokenizer, model)
    found = LanguageModel(model, tokenizer, slots=4, longest=LONGEST, device="cpu")
    assert found.begin == [len(SPECIAL)]
    assert not found.ends
    assert [note.split(":")[0] for note in found.notes] == [
        "the language model has no token that begins a text",
        "the language model has no token that ends a text",
    ]
    assert {text.tokens for text in written(found, teacher_of(), orders(2), Steering(1.0, 7)).values()} == {7}


class Speechless:
    """A tokenizer that finds no token in any text, and names none."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __call__(self, *_: Any, **__: Any) -> dict[str, list[int]]:
        return {"input_ids": []}


def test_one_that_cannot_begin_at_all_is_refused_with_the_fix() -> None:
    model, tokenizer = tiny_language_model()
    without_special(tokenizer, model)
    with pytest.raises(ModelError, match="no token that begins a text"):
        LanguageModel(model, Speechless(tokenizer), slots=4, longest=LONGEST, device="cpu")


def test_its_own_positions_limit_a_text_where_they_are_fewer_than_wanted() -> None:
    model = language_model(longest=1000)
    assert model.longest == 64
    found = written(model, None, orders(3, Drawing(1.0, None, 1.0, 50)), Steering(0.0, 1000))
    assert max(text.tokens for text in found.values()) <= 64


def test_special_tokens_and_rows_without_a_token_are_never_written() -> None:
    model = language_model(vocab_size=len(SPECIAL) + len(WORDS) + 9)
    found = written(model, None, orders(20, Drawing(1.0, None, 1.0, 200)), Steering(0.0, 8))
    used = {token for text in found.values() for token in text.choices}
    assert used <= {3, *range(len(SPECIAL), len(SPECIAL) + len(WORDS))}
    assert 3 in used


def test_a_special_token_that_goes_by_no_name_is_never_written_either() -> None:
    model, tokenizer = tiny_language_model(vocab_size=len(SPECIAL) + len(WORDS) + 1)
    tokenizer.add_tokens([AddedToken("<repo>", special=True)])
    unnamed = tokenizer.convert_tokens_to_ids("<repo>")
    assert unnamed not in tokenizer.all_special_ids
    assert bool(LanguageModel(model, tokenizer, slots=4, longest=LONGEST, device="cpu").banned[unnamed])


def test_no_text_is_empty_and_none_is_longer_than_asked() -> None:
    found = written(language_model(spread=20.0), None, orders(60, Drawing(1.3, None, 1.0, 95)), Steering(0.0, 3))
    assert all(text.text for text in found.values())
    assert {text.tokens for text in found.values()} == {2, 3}


def test_a_prompt_stands_before_a_text_and_is_no_part_of_it() -> None:
    model, teacher = language_model(), teacher_of()
    with_prompt = written(model, teacher, orders(4, prompt=["word3 word4 word5"]), Steering(1.0, 6))
    without = written(model, teacher, orders(4), Steering(1.0, 6))
    assert all(text.tokens <= 6 and len(text.text.split()) <= 6 for text in with_prompt.values())
    assert {text.choices for text in with_prompt.values()} != {text.choices for text in without.values()}
    with pytest.raises(ExperimentError, match="the prompt has 61 tokens, and the language model reads 40"):
        written(model, teacher, orders(1, prompt=["word1 " * 60]), Steering(1.0, 6))


def test_the_log_probability_is_the_language_model_s_own_of_all_tokens() -> None:
    model = language_model()
    [text] = written(model, teacher_of(), orders(1)[:1], Steering(2.0, 6)).values()
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
    found = written(model, teacher, orders(3), Steering(2.0, 5))
    mine, other = found[0, 0], found[1, 0]
    assert mine.probability == 1
    assert mine.scored <= 4 * mine.tokens
    assert other.probability == pytest.approx(0, abs=1e-100)
    plain = written(model, None, orders(3), Steering(0.0, 5))
    assert [text.choices for text in found.values()] == [plain[tag].choices for tag in found]


@pytest.mark.parametrize("kind", ["bert", "roberta", "gpt2"])
def test_a_reader_gives_the_tokens_that_the_tokenizer_would(kind: str) -> None:
    teacher = teacher_of(kind) if kind != "roberta" else Teacher(*tiny(kind), digest="", seed=0, limit=24)
    reader = Reader(teacher)
    assert reader.joint == " "
    for text in ("word1", "word1 word2", " word3  word4 ", "word5, word6\nword7 !", "word8 " * 40, "unheard of"):
        [whole] = teacher.tokenise([(text,)])
        assert reader.read(text).ids.tolist() == whole.ids.tolist()
        assert reader.read(text).cut == whole.cut


def test_a_tokenizer_that_looks_across_words_is_asked_for_whole_texts() -> None:
    from tokenizers import pre_tokenizers

    teacher = teacher_of()
    teacher.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Punctuation()  # spaces stay inside tokens
    reader = Reader(teacher)
    assert reader.joint is None
    assert reader.read("word1 word2").ids.tolist() == teacher.tokenise([("word1 word2",)])[0].ids.tolist()


def test_a_text_without_a_single_token_says_nothing_of_its_class() -> None:
    teacher = teacher_of("gpt2")
    [nothing, something] = Scorer(teacher).log_probabilities(["  ", "word1 word2"])
    assert np.exp(nothing).tolist() == pytest.approx([1 / 3] * 3)
    assert np.exp(something).sum() == pytest.approx(1)


def test_what_is_reported_does_not_depend_on_company_in_its_last_bit() -> None:
    teacher = teacher_of()
    texts = [f"{WORDS[i % 90]} {WORDS[(3 * i) % 90]}" + " word5" * (i % 4) for i in range(50)]
    scorer = Scorer(teacher)
    together = scorer.log_probabilities(texts)
    for text, near in zip(texts, together, strict=True):
        assert scorer.alone(text).tolist() == Scorer(teacher).alone(text).tolist()
        assert np.allclose(scorer.alone(text), near, atol=1e-4)


def test_a_launch_that_memory_cannot_hold_is_halved_and_at_one_text_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, own = teacher_of(), Teacher.start

    def scarce(most: int) -> Any:
        def start(self: Teacher, rows: Rows) -> Any:
            if len(rows.tokens) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return own(self, rows)

        return start

    texts = [f"{word} word1" for word in WORDS[:11]]
    expected = Scorer(teacher).log_probabilities(texts)
    monkeypatch.setattr(Teacher, "start", scarce(2))
    assert np.allclose(Scorer(teacher).log_probabilities(texts), expected, atol=1e-5)
    monkeypatch.setattr(Teacher, "start", scarce(0))
    with pytest.raises(WorkError, match="out of memory on a single text of 4 tokens"):
        Scorer(teacher).log_probabilities(texts)


def test_a_language_model_that_memory_cannot_hold_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(_: Slots, at: Sequence[int], rows: Sequence[Sequence[int]]) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = language_model()
    monkeypatch.setattr(Slots, "step", starved)
    with pytest.raises(WorkError, match="the language model: out of memory, 3 texts of up to 40 tokens at once"):
        written(model, teacher_of(), orders(1), Steering(1.0, 4))


def test_logits_that_are_no_numbers_are_an_error_and_not_a_choice() -> None:
    teacher = teacher_of()
    teacher.model.classifier.bias.data[0] = math.nan
    with pytest.raises(WorkError, match="teacher tiny: logits are NaN or infinite"):
        written(language_model(), teacher, orders(1), Steering(1.0, 4))
