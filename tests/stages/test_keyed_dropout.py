"""Keyed dropout: the same masks however the work is cut, good masks, and what model.train() would have estimated."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from amalgam.data.tokens import Tokens
from amalgam.pipeline.errors import ModelError
from amalgam.stages.common.inference.dropout import (
    SCORES_AT_ONCE,
    Attention,
    Axis,
    Bank,
    KeyedDropout,
    Site,
    attended,
)
from amalgam.stages.common.inference.teacher import DROPOUT_OFF, Rows, Teacher
from amalgam.tests.stages.tiny_models import ENCODERS, WORDS, key_of, tiny

DIGEST = "5e" * 32
PASSES = 3
TOLERANCE = 2e-5
CPU = torch.device("cpu")
HEADS = (Axis("rows", 1), Axis("fixed", 4), Axis("tokens", 1), Axis("tokens", 1))
WORDS_OF_SIX = torch.arange(6)[None] * 0x1234567


def teacher_of(
    kind: str = "bert", *, seed: int = 0, digest: str = DIGEST, spread: float = 6.0, **settings: Any
) -> Teacher:
    if kind == "modernbert":
        settings.setdefault("rate", 0.1)
    model, tokenizer = tiny(kind, spread=spread, **settings)
    return Teacher(model, tokenizer, digest=digest, seed=seed, limit=32, name=kind)


def corpus(count: int, *, longest: int = 9, seed: int = 0) -> list[tuple[str]]:
    numbers = np.random.default_rng(seed)
    return [(" ".join(numbers.choice(WORDS, numbers.integers(1, longest))),) for _ in range(count)]


def logits_of(teacher: Teacher, tokens: list[Tokens], rows: list[tuple[int, int]], *, width: int = 0) -> torch.Tensor:
    """Logits of (text, pass) rows in one launch."""
    texts = [text for text, _ in rows]
    passes = np.array([number for _, number in rows])
    return teacher.run(Rows([tokens[i] for i in texts], [key_of(i) for i in texts], passes, width=width))


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Counts the draws of random numbers, where torch itself makes them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(word in str(func) for word in ("bernoulli", "native_dropout", "rand", "uniform"))
        return func(*args, **(kwargs or {}))


# --- the same however the work is cut ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENCODERS)
def test_logits_depend_neither_on_order_nor_on_batch_nor_on_padding(kind: str) -> None:
    teacher = teacher_of(kind)
    tokens = teacher.tokenise(corpus(8))
    rows = [(text, number) for number in range(PASSES) for text in range(len(tokens))]
    alone = {row: logits_of(teacher, tokens, [row])[0] for row in rows}
    by_pass = [rows[first : first + len(tokens)] for first in range(0, len(rows), len(tokens))]
    launches = [rows] if teacher.can_batch_passes else by_pass
    shuffled = [[launch[i] for i in np.random.default_rng(5).permutation(len(launch))] for launch in launches]
    halves = [half for launch in shuffled for half in (launch[: len(launch) // 3], launch[len(launch) // 3 :])]
    for cut, width in ((launches, 0), (shuffled, 0), (halves, 0), (shuffled, 17), (halves, 29)):
        for launch in cut:
            logits = logits_of(teacher, tokens, launch, width=width)
            assert torch.stack([alone[row] for row in launch]).sub(logits).abs().max() < TOLERANCE
    passes = torch.stack(
        [torch.stack([alone[text, number] for number in range(PASSES)]) for text in range(len(tokens))]
    )
    assert passes.std(1).mean() > 1000 * TOLERANCE


@pytest.mark.parametrize("kind", ["bert", "deberta-v2"])
def test_pairs_of_texts_agree_in_any_batch(kind: str) -> None:
    teacher = teacher_of(kind)
    tokens = teacher.tokenise([(a, b) for (a,), (b,) in zip(corpus(6), corpus(6, seed=1), strict=True)])
    logits = logits_of(teacher, tokens, [(text, 0) for text in range(6)])
    for text in range(6):
        assert (logits_of(teacher, tokens, [(text, 0)], width=25)[0] - logits[text]).abs().max() < TOLERANCE


# --- every site ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENCODERS)
def test_every_draw_of_the_library_is_a_site_and_none_is_left(kind: str) -> None:
    teacher = teacher_of(kind)
    [tokens] = teacher.tokenise([("word1 word2 word3",)])
    sites = teacher.sites
    row = Rows([tokens], [key_of(0)], np.array([0]))
    inputs = teacher.inputs(row)
    teacher.model.train()
    with torch.no_grad(), Draws() as library:
        teacher.model(**inputs)
    with Draws() as keyed:
        teacher.run(row)
    assert library.count == len(sites) > 0
    assert keyed.count == 0
    assert sum(site.kind == "attention" for site in sites) == 2
    assert sum(site.kind == "shared" for site in sites) == (2 if kind.startswith("deberta") else 0)
    assert {site.rate for site in sites} <= ({0.1, 0.2} if kind == "distilbert" else {0.1})


@pytest.mark.parametrize("kind", ["bert", "mpnet", "deberta-v2"])
def test_attention_dropout_alone_makes_passes_differ(kind: str) -> None:
    teacher = teacher_of(kind, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.2, classifier_dropout=0.0)
    assert {site.kind for site in teacher.sites} == {"attention"}
    tokens = teacher.tokenise(corpus(4, longest=12))
    passes = torch.stack([logits_of(teacher, tokens, [(text, number) for text in range(4)]) for number in range(8)])
    assert (passes.std(0) > 500 * TOLERANCE).all()


def test_sites_are_named_by_the_module_that_calls_them() -> None:
    described = teacher_of().describe_sites()
    assert described[0] == "bert.embeddings.dropout (hidden, rate 0.1)"
    assert "bert.encoder.layer.1.attention.self (attention, rate 0.1)" in described
    assert described[-1] == "dropout (pooled, rate 0.1)"


def test_dropout_off_is_the_model_in_eval() -> None:
    teacher = teacher_of()
    tokens = teacher.tokenise(corpus(5))
    logits_of(teacher, tokens, [(0, 0)])
    logits = logits_of(teacher, tokens, [(i, DROPOUT_OFF) for i in range(5)])
    for i in range(5):
        with torch.no_grad():
            wanted = teacher.model.eval()(input_ids=torch.from_numpy(tokens[i].ids).long()[None]).logits
        assert (wanted[0] - logits[i]).abs().max() < TOLERANCE


# --- what model.train() would have estimated --------------------------------------------------------------------------


def entropies(passes: torch.Tensor) -> torch.Tensor:
    """[K, texts, labels] logits to the entropy of the mean probability, in nats."""
    mean = passes.softmax(-1).mean(0)
    return -(mean * mean.log()).sum(-1)


def library_passes(teacher: Teacher, tokens: list[Tokens], count: int) -> torch.Tensor:
    inputs = teacher.inputs(Rows(tokens, [], np.zeros(len(tokens), np.int64)))
    teacher.model.train()
    with torch.inference_mode():
        return torch.stack([teacher.model(**inputs).logits for _ in range(count)])


def keyed_passes(teacher: Teacher, tokens: list[Tokens], passes: range) -> torch.Tensor:
    return torch.stack([logits_of(teacher, tokens, [(i, number) for i in range(len(tokens))]) for number in passes])


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Mean absolute difference of the entropy, over texts and over all pairs of different runs."""
    pairs = [(a, b) for i, a in enumerate(one) for b in (other[:i] if other is one else other)]
    return float(np.mean([(a - b).abs().mean() for a, b in pairs]))


def bias(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Mean difference of the entropy over texts, in its own standard errors."""
    signed = torch.stack(one).mean(0) - torch.stack(other).mean(0)
    return float(signed.mean() / signed.std() * math.sqrt(len(signed)))


def spread_out(**settings: Any) -> Teacher:
    """A teacher whose entropies differ from text to text as much as from run to run, in the middle of their range."""
    teacher = teacher_of(spread=5.0, **settings)
    teacher.model.classifier.weight.data.mul_(8)
    return teacher


@pytest.mark.parametrize("kind", ["bert", "deberta-v2"])
def test_keyed_dropout_agrees_with_train_as_train_agrees_with_itself(kind: str) -> None:
    teacher = spread_out(kind=kind)
    tokens = teacher.tokenise(corpus(320))
    torch.manual_seed(1)
    library = [entropies(library_passes(teacher, tokens, 16)) for _ in range(4)]
    keyed = [entropies(keyed_passes(teacher, tokens, range(16 * i, 16 * i + 16))) for i in range(4)]
    assert library[0].std() > 0.05
    assert difference(keyed, library) <= 1.03 * difference(library, library)
    assert difference(keyed, keyed) == pytest.approx(difference(library, library), rel=0.1)
    assert abs(bias(keyed, library)) < 4


def test_the_agreement_would_notice_attention_dropout_that_is_missing() -> None:
    """The control of the test above, on a teacher whose dropout is mostly in its attention."""
    rates = {"hidden_dropout_prob": 0.02, "classifier_dropout": 0.0}
    whole = spread_out(attention_probs_dropout_prob=0.5, **rates)
    partial = spread_out(attention_probs_dropout_prob=0.0, **rates)
    tokens = whole.tokenise(corpus(320))
    torch.manual_seed(1)
    library = [entropies(library_passes(whole, tokens, 16)) for _ in range(2)]
    keyed, missing = ([entropies(keyed_passes(teacher, tokens, range(16)))] for teacher in (whole, partial))
    assert abs(bias(keyed, library)) < 4
    assert abs(bias(missing, library)) > 8


# --- attention -------------------------------------------------------------------------------------------------------


def attention_of(kind: str) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, 4, 7, 8)
    hidden = torch.rand(6, 1, 7, 7) > 0.4
    hidden[..., 0] = True
    choices: dict[str, dict[str, Any]] = {
        "plain": {},
        "scale": {"scale": 0.7},
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": torch.zeros(6, 1, 7, 7).masked_fill(~hidden, -math.inf)},
        "one for all": {"attn_mask": hidden[0, 0]},
        "causal": {"is_causal": True},
        "grouped": {"enable_gqa": True},
    }
    if kind == "grouped":
        key, value = key[:, :2], value[:, :2]
    return (query, key, value), choices[kind]


@pytest.mark.parametrize("at_once", [1, 1 << 30])
@pytest.mark.parametrize("kind", ["plain", "scale", "bool", "float", "one for all", "causal", "grouped"])
def test_keyed_attention_is_attention_with_masked_probabilities(
    kind: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCORES_AT_ONCE, "cpu", at_once)
    (query, key, value), options = attention_of(kind)
    bank, words = Bank(0, device=CPU, dtype=torch.float32), WORDS_OF_SIX
    with KeyedDropout(bank, [Site("attention", 0.25, HEADS)], words) as mode:
        output = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.25, **options)
    mode.finish()
    # The library's own probabilities: its attention, of values that are the unit vectors.
    units = torch.eye(7).expand(*key.shape[:2], 7, 7)
    probabilities = functional.scaled_dot_product_attention(query, key, units, **options)
    dropped = probabilities * bank.mask(words[0], HEADS, 0.25, (6, 4, 7, 7))
    wanted = dropped @ value.repeat_interleave(4 // value.shape[1], 1)
    assert torch.allclose(output, wanted, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of", ["bool", "float"])
def test_a_row_that_may_look_nowhere_stays_finite(dtype: torch.dtype, of: str) -> None:
    query, key, value = (torch.randn(1, 1, 3, 4, dtype=dtype) for _ in range(3))
    mask = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    mask[..., 1, 1] = True
    given = mask if of == "bool" else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)
    output = attended(Attention(query, key, value, given, 0.1, 0.5), torch.ones(1, 1, 3, 3, dtype=dtype))
    assert output.isfinite().all()
    assert torch.equal(output[..., 1, :], value[..., 1, :])


@pytest.mark.parametrize("drop", [functional.dropout1d, functional.dropout2d])
def test_channel_dropout_drops_whole_channels(drop: Any) -> None:
    x = torch.ones(8, 16, 5) if drop is functional.dropout1d else torch.ones(8, 16, 5, 2)
    site = Site("channels", 0.5, (HEADS[0], Axis("fixed", 16), *[Axis("fixed", 1)] * (x.dim() - 2)))
    with KeyedDropout(Bank(0, device=CPU, dtype=torch.float32), [site], torch.arange(8)[None]):
        output = drop(x, 0.5)
    assert set(output.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(output.flatten(2).amin(-1), output.flatten(2).amax(-1))


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_teacher_without_dropout_is_refused_with_the_ways_out() -> None:
    model, tokenizer = tiny("modernbert")
    with pytest.raises(ModelError, match=r"teacher quiet [\s\S]*dropout: 0\.1[\s\S]*cache\.passes: 0"):
        Teacher(model, tokenizer, digest=DIGEST, seed=0, limit=32, name="quiet").check_dropout_active()


def test_a_teacher_whose_dropout_changes_nothing_is_refused_and_its_sites_named() -> None:
    teacher = teacher_of()
    torch.nn.init.zeros_(teacher.model.classifier.weight)
    with pytest.raises(ModelError, match=r"bert\.embeddings\.dropout \(hidden, rate 0\.1\)"):
        teacher.check_dropout_active()


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_living_teacher_passes_the_check(kind: str) -> None:
    teacher_of(kind).check_dropout_active()


class Head(torch.nn.Module):
    """A classifier head that does something odd before it classifies."""

    def __init__(self, odd: Any) -> None:
        super().__init__()
        self.odd = odd
        self.linear = torch.nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.odd(x))


def with_head(odd: Any) -> Teacher:
    model, tokenizer = tiny("bert", spread=6.0)
    model.classifier = Head(odd)
    return Teacher(model, tokenizer, digest=DIGEST, seed=0, limit=32, name="odd")


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        (lambda x: x + torch.rand(x.shape), "rand"),
        (lambda x: x + torch.randn_like(x), "randn_like"),
        (lambda x: x * torch.empty_like(x).bernoulli_(0.9), "bernoulli_"),
        (lambda x: functional.alpha_dropout(x, 0.1, training=True), "alpha_dropout"),
    ],
)
def test_other_randomness_is_refused_by_name(odd: Any, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        _ = with_head(odd).sites


def test_randomness_inside_a_library_function_is_refused() -> None:
    recurrent = torch.nn.LSTM(32, 32, num_layers=2, dropout=0.5, batch_first=True)
    with pytest.raises(ModelError, match="random numbers"):
        _ = with_head(lambda x: recurrent(x[:, None])[0][:, 0]).sites


def test_dropout_that_comes_and_goes_with_the_text_is_refused() -> None:
    model, tokenizer = tiny("bert", spread=6.0)
    embeddings = model.bert.embeddings
    embeddings.register_forward_hook(lambda _, __, x: functional.dropout(x, 0.1) if x.shape[1] > 12 else x)
    teacher = Teacher(model, tokenizer, digest=DIGEST, seed=0, limit=12, name="odd")
    assert len(teacher.sites) == 8
    teacher.limit = 32
    with pytest.raises(ModelError, match=r"random numbers|text"):
        logits_of(teacher, teacher.tokenise([("word1 " * 20,)]), [(0, 0)])
    with pytest.raises(ModelError, match=r"random numbers|text"):
        _ = Teacher(model, tokenizer, digest=DIGEST, seed=0, limit=32, name="odd").sites


def test_dropout_whose_shape_follows_neither_texts_nor_tokens_is_refused() -> None:
    model, tokenizer = tiny("bert")
    model.bert.embeddings.register_forward_hook(lambda _, __, x: functional.dropout(x.flatten(0, 1), 0.1).view(x.shape))
    with pytest.raises(ModelError, match=r"21 .*3 x 7 tokens"):
        _ = Teacher(model, tokenizer, digest=DIGEST, seed=0, limit=32, name="odd").sites


def test_running_statistics_do_not_learn_from_the_texts() -> None:
    norm = torch.nn.BatchNorm1d(32)
    teacher = with_head(torch.nn.Identity())
    teacher.model.classifier.odd = norm
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    tokens = teacher.tokenise(corpus(6))
    together = logits_of(teacher, tokens, [(i, 0) for i in range(6)])
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    assert (logits_of(teacher, tokens, [(2, 0)])[0] - together[2]).abs().max() < TOLERANCE
