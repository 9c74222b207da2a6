"""Architectures whose texts are not batched at will: padding or end tokens change their logits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from amalgam.data.tokens import Ragged, TokenRows, encode
from amalgam.stages.app.serve import ExportFolder, OnnxStudent
from amalgam.stages.common.inference.batches import model_inputs, predict, predict_with_states
from amalgam.stages.common.inference.states import Encoder, write_states
from amalgam.stages.common.inference.teacher import Teacher
from amalgam.stages.common.models.attentive import AttentiveConfig
from amalgam.stages.common.models.loading import save_pretrained_folder
from amalgam.stages.common.models.model_folder import READS_PADDING, end_token, read_config, reads_padding
from amalgam.stages.common.models.resolve import NewClassifier
from amalgam.stages.common.training.batches import Examples
from amalgam.tests.stages.tiny_models import SEQ2SEQ, SETTINGS, UNLIKE, save_tiny, tiny, tiny_config, trained_weights
from amalgam.tests.workspaces import Workspace

UNTESTED = {"mra"}
"""It needs a CUDA kernel, or texts of at least 512 tokens."""
READERS = sorted(READS_PADDING - UNTESTED)
LENGTHS = (8, 12, 8, 40, 12, 47)


def texts(*lengths: int) -> Ragged:
    random = np.random.default_rng(0)
    return Ragged.of([np.append(random.integers(5, 90, length - 1), 3).astype(np.int32) for length in lengths])


def largest_change(model: Any, tokens: Ragged) -> float:
    """Returns the largest difference between texts that are padded and texts alone, relative to the logits."""
    rows = np.arange(len(tokens))
    with torch.no_grad():
        padded = model(**model_inputs(tokens, None, rows, 0)).logits
        alone = torch.cat([model(**model_inputs(tokens, None, rows[[row]], 0)).logits for row in rows])
    return float((padded - alone).abs().max() / alone.std(0).max())


@pytest.mark.parametrize("kind", sorted({*SETTINGS, *UNLIKE}))
def test_the_architectures_that_read_padding_are_known(kind: str) -> None:
    model, _ = tiny(kind, spread=4.0, pad_token_id=0)
    assert (largest_change(model, texts(*LENGTHS)) > 1e-3) is (kind in READS_PADDING)


@pytest.mark.parametrize("kind", READERS)
def test_predictions_of_a_text_are_equal_in_any_batch(kind: str) -> None:
    model, _ = tiny(kind, spread=4.0)
    tokens = texts(*LENGTHS)
    alone = np.concatenate([predict(model, tokens.take(np.array([row])), pad_id=0) for row in range(len(tokens))])
    together = predict(model, tokens, pad_id=0)
    assert np.abs(together - alone).max() < 1e-3 * alone.std(0).max()
    if kind != "reformer":  # its states are twice as wide
        assert np.allclose(predict_with_states(model, tokens, pad_id=0, layer=1)[0], together, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in READERS if kind != "reformer"])
def test_states_of_a_text_are_equal_in_any_batch(kind: str, tmp_path: Path) -> None:
    model, tokenizer = tiny(kind, spread=4.0)
    teacher = Teacher(model, tokenizer, digest="", seed=0, limit=64)
    tokens = TokenRows(texts(*LENGTHS), None, np.zeros(len(LENGTHS), bool))
    keys = [bytes([row]) * 16 for row in range(len(tokens))]
    encoder = Encoder(model.base_model, NewClassifier(model, tokenizer, "", 64, False, 0), torch.device("cpu"))
    states, pooled = [], []
    for number, rows in enumerate([range(len(tokens)), *([row] for row in range(len(tokens)))]):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_states(folder, teacher, [keys[row] for row in rows], tokens.take(rows), blocks=2, by_token=False)
        states.append(np.load(folder / "states.npy").astype(np.float64))
        pooled.append(encoder.pooled(tokens.take(rows)))
    for together, *alone in (states, pooled):
        assert np.abs(together - np.concatenate(alone)).max() < 1e-2 * together.std(axis=0).max()


def test_a_model_with_a_head_of_amalgams_reads_padding_if_its_body_does() -> None:
    config = AttentiveConfig(text_config=tiny_config("fnet").to_dict())
    assert reads_padding(config)
    assert reads_padding(config.to_dict())


def test_a_training_pads_no_text(tmp_path: Path) -> None:
    """Two texts of a step give the same student as each text in a part of its own."""
    examples = Examples(texts(8, 12), None, np.eye(3, dtype=np.float32)[[0, 2]], np.ones(2, np.float32))
    together, apart = (trained_weights("fnet", examples, parts, tmp_path) for parts in (1, 2))
    assert (together - apart).abs().max() < 1e-6


def test_a_student_that_reads_padding_is_named_as_such_and_predicts_alike(fresh: Workspace) -> None:
    assert "padding" not in fresh("train-student").err
    tokenizer = AutoTokenizer.from_pretrained(fresh.folder / "models/encoder")
    model, _ = tiny("fnet", spread=4.0, vocab_size=len(tokenizer))
    shutil.rmtree(fresh.folder / "models/encoder")
    save_pretrained_folder(model, tokenizer, fresh.folder / "models/encoder")
    assert "padding changes the student's predictions" in fresh("train-student").err
    two = [fresh.texts()[0][0], "the chef"]
    together = [row["labels"][0]["probability"] for row in fresh("predict", "--json", *two).json]
    alone = [row["labels"][0]["probability"] for text in two for row in fresh("predict", "--json", text).json]
    assert together == pytest.approx(alone, abs=1e-5)
    assert "padding" in fresh("push", "me/m", "--card", "--student", "students/student").out.lower()


# ---- encoder-decoders, whose heads refuse texts together that have different numbers of end tokens


TEXTS = [(text,) for text in ("word1 word2 word3", "word4 [SEP] word5", "word6", "[SEP] word7 [SEP] word8", "word9")]
"""With 1, 2, 1, 3 and 1 end tokens: no batch of two texts and 4 end tokens gives the logits of each."""


@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_a_text_that_holds_the_end_token_is_predicted_as_transformers_does(kind: str) -> None:
    model, tokenizer = tiny(kind, spread=4.0)
    tokens = encode(tokenizer, TEXTS, 64, types=False)
    with torch.no_grad():
        alone = [model(**tokenizer(text, return_tensors="pt")).logits.numpy() for (text,) in TEXTS]
    assert predict(model, tokens.ids, pad_id=0) == pytest.approx(np.concatenate(alone), abs=1e-4)


@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_a_training_accepts_a_text_that_holds_the_end_token(kind: str, tmp_path: Path) -> None:
    """A step gives the same student as with each of its texts in a part of its own."""
    tokens = encode(tiny(kind)[1], TEXTS, 64, types=False)
    targets = np.eye(3, dtype=np.float32)[[0, 2, 1, 0, 2]]
    examples = Examples(tokens.ids, None, targets, np.ones(len(TEXTS), np.float32))
    together, apart = (trained_weights(kind, examples, parts, tmp_path) for parts in (1, len(TEXTS)))
    assert (together - apart).abs().max() < 1e-4


@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_serve_predicts_a_text_that_holds_the_end_token_as_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real session would give wrong predictions where transformers refuses the texts."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model, _ = tiny(kind, spread=4.0)
    save_tiny(tmp_path, kind)

    class Session:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def run(self, _names: list[str], columns: dict[str, Any]) -> list[Any]:
            with torch.no_grad():
                return [model(**{name: torch.from_numpy(ids) for name, ids in columns.items()}).logits.numpy()]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    end, inputs = end_token(read_config(tmp_path, where="it")), ["input_ids", "attention_mask"]
    own = (["a", "b", "c"], "", 64, None, ())
    export = ExportFolder(*own, folder=tmp_path, inputs=inputs, pad_id=0, reads_padding=False, end=end)
    student = OnnxStudent(export, 1)
    alone = [student([text])[0].probabilities for text in TEXTS]
    assert np.ptp(alone, axis=0).max() > 1e-3
    assert [each.probabilities for each in student(TEXTS)] == [pytest.approx(one, abs=1e-4) for one in alone]
