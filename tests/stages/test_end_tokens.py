"""Encoder-decoders, whose heads refuse texts together that have different numbers of end tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from amalgam.data.tokens import encode
from amalgam.stages.app.serve import ExportFolder, OnnxStudent
from amalgam.stages.common.inference.batches import predict
from amalgam.stages.common.models.model_folder import end_token, read_config
from amalgam.stages.common.training.batches import Examples
from amalgam.tests.stages.tiny_models import SEQ2SEQ, save_tiny, tiny, trained_weights

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
