"""Attentive pooling, and encoders that are fine-tuned together under it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from amalgam.data.tokens import encode
from amalgam.pipeline.input_files import file_digest
from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.inference.teacher import DROPOUT_OFF, Rows, Teacher
from amalgam.stages.common.models.attentive import AttentivePooling, attentive_classifier, head_for, without_pooler
from amalgam.stages.common.models.loading import (
    load_classifier,
    load_tokenizer,
    new_student,
    save_pretrained_folder,
)
from amalgam.stages.common.models.resolve import ModelFiles, Reference, resolve
from amalgam.stages.common.training.batches import Examples, collate
from amalgam.stages.common.training.loop import TrainingSettings
from amalgam.stages.common.training.losses import RestrictedKL
from amalgam.stages.train_teachers.training import CoTrainedTeachers, concatenated
from amalgam.tests.stages.tiny_models import save_tiny, tiny, train_to_the_end

LABELS = ["x", "y", "z"]
TEXTS = [(f"word{row} word{2 * row} word{row + 9}"[: 12 + row],) for row in range(12)]


def saved(folder: Path, kind: str, **settings: Any) -> tuple[Any, ModelFiles]:
    model, tokenizer = tiny(kind, spread=4.0, **settings)
    body = without_pooler(model.base_model)
    torch.manual_seed(1)
    classifier: Any = attentive_classifier(body, head_for(body.config, len(LABELS)), LABELS)
    save_pretrained_folder(classifier, tokenizer, folder)
    return classifier, resolve(Reference(str(folder), None, folder, Store(folder / "pins"), file_digest))


def test_attentive_pooling_is_a_mean_weighted_by_what_a_query_finds_in_each_token() -> None:
    """Scores 2 tanh(h): tokens 0 and atanh(0.5) score 0 and 1; the third is padding."""
    pooling = AttentivePooling(1, 1).double()
    with torch.no_grad():
        for parameter, value in zip(pooling.parameters(), (1.0, 0.0, 2.0), strict=True):
            parameter.fill_(value)
    half = math.atanh(0.5)
    states = torch.tensor([[[0.0], [half], [99.0]]], dtype=torch.float64)
    output = pooling(states, torch.tensor([[1, 1, 0]]))
    assert output.tolist() == [pytest.approx([half * math.e / (1 + math.e)])]
    assert pooling(states[:, :2], None).tolist() == output.tolist()


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "deberta-v2", "modernbert"])
def test_its_folder_is_a_teacher_like_any_other(tmp_path: Path, kind: str) -> None:
    classifier, files = saved(tmp_path / "teacher", kind)
    again = load_classifier(files, dropout=0.1, dtype="fp32")
    teacher = Teacher(again, load_tokenizer(files), digest="d", seed=0, limit=16)
    rows = Rows(teacher.tokenise(TEXTS[:3]), [bytes([row]) * 16 for row in range(3)], np.full(3, DROPOUT_OFF))
    with torch.no_grad():
        inputs = teacher.tokenizer([text for (text,) in TEXTS[:3]], padding=True, return_tensors="pt")
        wanted = classifier(**inputs).logits
    torch.testing.assert_close(teacher.run(rows), wanted, atol=1e-5, rtol=1e-4)
    teacher.check_dropout_active()
    assert any("attentive" in site for site in teacher.describe_sites())


def test_it_reads_embeddings_in_the_place_of_tokens(tmp_path: Path) -> None:
    """As AS-DFD gives them."""
    classifier, _ = saved(tmp_path / "teacher", "bert")
    ids = torch.tensor([[2, 7, 8, 9, 3]])
    with torch.no_grad():
        given = classifier(inputs_embeds=classifier.get_input_embeddings()(ids)).logits
        torch.testing.assert_close(given, classifier(input_ids=ids).logits)


def test_all_of_it_is_loaded_in_the_dtype_asked_for(tmp_path: Path) -> None:
    """The saved encoder's configuration inside this one is fp32."""
    body = tiny("bert")[0].base_model
    body.config.dtype = torch.float32
    classifier: Any = attentive_classifier(without_pooler(body), head_for(body.config, len(LABELS)), LABELS)
    save_pretrained_folder(classifier, tiny("bert")[1], tmp_path / "teacher")
    files = resolve(Reference(str(tmp_path / "teacher"), None, tmp_path, Store(tmp_path / "pins"), file_digest))
    model = load_classifier(files, dropout=0.1, dtype="bf16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.dtype == torch.bfloat16


def test_the_encoders_configuration_is_saved_without_its_folder(tmp_path: Path) -> None:
    save_tiny(tmp_path / "encoder")
    body = AutoModel.from_pretrained(tmp_path / "encoder")
    classifier: Any = attentive_classifier(without_pooler(body), head_for(body.config, len(LABELS)), LABELS)
    save_pretrained_folder(classifier, tiny("bert")[1], tmp_path / "teacher")
    assert str(tmp_path) not in (tmp_path / "teacher/config.json").read_text()


def test_a_student_begins_as_its_body_under_a_head_of_its_own_kind(tmp_path: Path) -> None:
    classifier, files = saved(tmp_path / "teacher", "bert")
    student: Any = new_student(files, labels=["p", "q"], layers=1, seed=0)
    assert type(student).__name__ == "BertForSequenceClassification"
    own, given = student.state_dict(), classifier.state_dict()
    body = [name for name in own if name.startswith("bert.") and "pooler" not in name]
    assert len(body) > 10
    assert all(torch.equal(own[name], given[name]) for name in body)


def examples_of(kinds: list[str]) -> tuple[CoTrainedTeachers, list[Examples]]:
    """Encoders of different tokenizers and architecture, and the texts for each."""
    models = [tiny(kind, spread=4.0, vocab_size=95 + 3 * place) for place, kind in enumerate(kinds)]
    bodies = [without_pooler(model.base_model) for model, _ in models]
    torch.manual_seed(2)
    together = CoTrainedTeachers(bodies, head_for(bodies[0].config, len(LABELS)), len(LABELS))
    gold = np.eye(len(LABELS), dtype=np.float32)[np.arange(len(TEXTS)) % len(LABELS)]
    tokens = [encode(tokenizer, TEXTS, 16 - 5 * place, types=True) for place, (_, tokenizer) in enumerate(models)]
    return together, [Examples(one.ids, one.type_ids, gold, np.ones(len(TEXTS), np.float32)) for one in tokens]


def test_each_encoder_reads_its_own_tokens_of_a_text_that_holds_all() -> None:
    together, parts = examples_of(["bert", "roberta", "distilbert"])
    together.eval()
    rows = np.array([3, 0, 7])
    batch = collate(concatenated(parts, together.starts), rows, together.pad_id)
    names = ("input_ids", "attention_mask", "token_type_ids")
    with torch.no_grad():
        logits = together(**{name: batch[name] for name in names}).logits
        for place, (body, part) in enumerate(zip(together.bodies, parts, strict=True)):
            own = collate(part, rows, 0)
            if place:
                own.pop("token_type_ids", None)
            states = body(**{name: own[name] for name in names if name in own}).last_hidden_state
            wanted = together.head(states, own["attention_mask"])
            torch.testing.assert_close(logits[:, 3 * place : 3 * place + 3], wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["convbert", "fnet"])
def test_an_encoder_that_reads_padding_gets_none(kind: str) -> None:
    together, parts = examples_of(["bert", kind])
    together.eval()
    texts = concatenated(parts, together.starts)
    texts = replace(texts, tokens=[ids[: len(ids) - row % 3] for row, ids in enumerate(texts.tokens)], type_ids=None)
    with torch.no_grad():
        batches = [collate(texts, rows, together.pad_id) for rows in (np.arange(6), *np.arange(6)[:, None])]
        first, *alone = (together(batch["input_ids"], batch["attention_mask"]).logits for batch in batches)
    torch.testing.assert_close(first, torch.cat(alone), atol=1e-5, rtol=1e-4)


def test_the_sum_of_the_teachers_cross_entropies_is_what_is_minimised() -> None:
    logits = torch.log(torch.tensor([[1.0, 3.0, 2.0, 2.0]], dtype=torch.float64))
    batch = {"targets": torch.tensor([[0.0, 1.0, 0.0, 1.0]]), "weights": torch.ones(1)}
    loss = RestrictedKL(((0, 1), (2, 3)))(logits, batch)
    assert loss.tolist() == pytest.approx([-math.log(0.75) - math.log(0.5)])


@pytest.mark.parametrize("kinds", [["bert"], ["bert", "roberta"], ["bert", "convbert"]])
def test_every_encoder_and_the_shared_head_learn(tmp_path: Path, kinds: list[str]) -> None:
    together, parts = examples_of(kinds)
    before = {name: value.clone() for name, value in together.named_parameters()}
    columns = tuple(tuple(range(3 * place, 3 * place + 3)) for place in range(len(kinds)))
    examples, training = concatenated(parts, together.starts), TrainingSettings(2, 1e-3, 6, 0.0, 0.0, 0)
    options = {"pad_id": together.pad_id, "objective": RestrictedKL(columns), "cpu": True}
    train_to_the_end(together, examples, training, tmp_path, **options)
    still = [name for name, value in together.named_parameters() if torch.equal(before[name], value)]
    assert still == []
