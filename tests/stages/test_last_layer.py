"""Dropout in the last layer alone gives the passes of the whole model with dropout there, and runs the rest once."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from amalgam.benchmarks.check_gpu import RACED
from amalgam.pipeline.errors import ModelError
from amalgam.stages.common.inference.batches import run_passes
from amalgam.stages.common.inference.dropout import Bank, KeyedDropout, row_words, site_words
from amalgam.stages.common.inference.teacher import Rows, Teacher
from amalgam.tests.stages.tiny_models import tiny

KINDS = ("bert", "roberta", "xlm-roberta", "electra", "distilbert", "modernbert")
TEXTS = [(" ".join(f"word{(i * 7 + j) % 90}" for j in range(n)),) for i, n in enumerate((3, 9, 9, 20, 31))]
PAIRS = [(first, TEXTS[row - 1][0]) for row, (first,) in enumerate(TEXTS)]
KEYS = [bytes([i + 1]) * 16 for i in range(len(TEXTS))]
PASSES = range(2, 8)


def teacher_of(kind: str = "bert", *, mean_pooled: bool = False, **settings: Any) -> Teacher:
    torch.manual_seed(3)
    settings = {"num_hidden_layers" if kind != "distilbert" else "n_layers": 3, **RACED.get(kind, {}), **settings}
    model, tokenizer = tiny(kind, **settings)
    for weights in model.parameters():
        torch.nn.init.normal_(weights, std=0.3)
    if mean_pooled:
        model.bert.pooler = Mean(model.bert.pooler)
    return Teacher(model, tokenizer, digest="d", seed=5, limit=40, last_layer=True)


class Mean(torch.nn.Module):
    """Reads all tokens."""

    def __init__(self, pooler: Any) -> None:
        super().__init__()
        self.dense = pooler.dense

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(hidden.mean(1)))


def passes_of(
    teacher: Teacher, texts: list[Any], passes: range = PASSES, *, logits: bool = True, batch_tokens: int = 200
) -> tuple[Any, Any]:
    return run_passes(teacher, teacher.tokenise(texts), KEYS, passes, deterministic=logits, batch_tokens=batch_tokens)


def reference(teacher: Teacher, texts: list[Any]) -> torch.Tensor:
    """Return passes of the whole model, text by text, whose dropout before the last layer has the rate zero."""
    model = copy.deepcopy(teacher.model)
    body = model.base_model
    encoder = getattr(body, "encoder", None) or getattr(body, "transformer", None)
    blocks = encoder.layer if encoder else body.layers
    last = set(blocks[-1].modules())
    for module in set(model.base_model.modules()) - last:
        if hasattr(module, "attention_dropout"):  # of ModernBERT
            module.attention_dropout = 0.0
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    bank = Bank(teacher.seed, device=torch.device("cpu"), dtype=torch.float32)
    early, sites = teacher.early_sites, teacher.sites
    assert 0 < early < len(sites)
    rows = []
    for tokens, key in zip(teacher.tokenise(texts), KEYS, strict=True):
        for number in PASSES:
            row = Rows([tokens], [key], np.array([number]))
            words = site_words(row_words(teacher.seed, teacher.digest, row.keys, row.passes), len(sites))[early:]
            mode = KeyedDropout(bank, sites[early:], torch.from_numpy(words.view(np.int64)))
            with torch.no_grad(), mode:
                rows.append(model.train()(**teacher.inputs(row)).logits[0])
            mode.finish()
    return torch.stack(rows).view(len(texts), len(PASSES), -1)


@pytest.mark.parametrize("kind", KINDS)
def test_passes_are_those_of_the_whole_model_with_dropout_in_its_last_layer(kind: str) -> None:
    teacher = teacher_of(kind)
    logits, raw = passes_of(teacher, TEXTS)
    wanted = reference(teacher, TEXTS)
    assert float(wanted.std(1).mean()) > 0.05
    assert torch.allclose(torch.from_numpy(raw).float(), wanted, atol=1e-2, rtol=2e-3)  # raw is fp16
    off, _ = passes_of(teacher, TEXTS, range(0))
    assert np.allclose(logits, off, atol=2e-5)


@pytest.mark.parametrize(("texts", "mean_pooled"), [(PAIRS, False), (TEXTS, True), (PAIRS, True)])
def test_pairs_and_heads_that_read_every_token_are_right_too(texts: list[Any], mean_pooled: bool) -> None:
    teacher = teacher_of(mean_pooled=mean_pooled)
    _, raw = passes_of(teacher, texts)
    assert teacher.fast_encoder is not None
    assert teacher.fast_encoder.first_token is not mean_pooled
    assert torch.allclose(torch.from_numpy(raw).float(), reference(teacher, texts), atol=1e-2, rtol=2e-3)


def test_passes_depend_neither_on_the_batch_nor_on_other_passes() -> None:
    teacher = teacher_of()
    _, raw = passes_of(teacher, TEXTS)
    _, alone = passes_of(teacher, TEXTS, range(4, 6), logits=False, batch_tokens=1)
    assert np.allclose(raw[:, 2:4], alone, atol=1e-2)
    teacher.padding = 0.9  # texts of several lengths in one launch
    _, padded = passes_of(teacher, TEXTS)
    assert np.allclose(raw, padded, atol=1e-2)


def test_the_layers_before_the_last_run_once_and_it_reads_one_token() -> None:
    teacher = teacher_of()
    assert teacher.early_sites == 7
    assert teacher.fast_encoder is not None
    rows: dict[int, list[int]] = {}
    for number, layer in enumerate(teacher.fast_encoder.layers):
        norm = layer.norm
        layer_rows = rows.setdefault(number, [])
        norm.register_forward_hook(lambda _m, _i, out, layer_rows=layer_rows: layer_rows.append(out[..., 0].numel()))
    passes_of(teacher, TEXTS, range(16))
    tokens = sum(len(text) for text in teacher.tokenise(TEXTS))
    assert [sum(rows[number]) for number in range(3)] == [tokens, tokens, len(TEXTS) * 17]


def test_a_lack_of_memory_halves_a_launch_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = teacher_of()
    wanted = passes_of(teacher, TEXTS)
    real = teacher.start_last_layer

    def small(rows: Rows, passes: range) -> Any:
        if len(rows.tokens) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(rows, passes)

    monkeypatch.setattr(teacher, "start_last_layer", small)
    for ours, theirs in zip(passes_of(teacher, TEXTS), wanted, strict=True):
        assert np.allclose(ours, theirs, atol=1e-2)
    assert teacher.oom_splits == 1


@pytest.mark.parametrize("kind", ["mpnet", "deberta-v2", "albert", "gpt2"])
def test_another_architecture_is_refused_with_a_way_out(kind: str) -> None:
    model, tokenizer = tiny(kind)
    teacher = Teacher(model, tokenizer, digest="d", seed=5, limit=32, last_layer=True)
    with pytest.raises(ModelError, match=r"cannot run alone[\s\S]*cache\.dropout: null"):
        teacher.check_dropout_active()
    assert np.isfinite(passes_of(teacher, TEXTS, range(0))[0]).all()


def test_dropout_before_the_last_layer_alone_is_refused_with_a_way_out() -> None:
    teacher = teacher_of(classifier_dropout=0.0)
    for module in teacher.model.bert.encoder.layer[-1].modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with pytest.raises(ModelError, match=r"last layer and head changes nothing[\s\S]*cache\.dropout: null"):
        teacher.check_dropout_active()


def test_a_teacher_without_dropout_is_refused_as_with_all_layers() -> None:
    rates: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    with pytest.raises(ModelError, match=r"no active dropout[\s\S]*dropout: 0\.1"):
        teacher_of(**rates).check_dropout_active()


def test_dropout_of_the_head_alone_is_enough() -> None:
    teacher = teacher_of(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.3)
    teacher.check_dropout_active()
    assert teacher.early_sites == 0
    assert passes_of(teacher, TEXTS)[1].std(1).mean() > 0.05
