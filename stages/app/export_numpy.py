"""Exports a static student for numpy (`amalgam export --numpy`): arrays, tokenizer, labels and classify.py.

With --int8 each vector has 8 bits a number, and only frequent tokens
have one; the others have the mean vector, which is zero.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from amalgam.data.arrays import Array
from amalgam.data.tokens import encode
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import AmalgamError, ExperimentError, WorkError
from amalgam.stages.app import classify, int8
from amalgam.stages.app.api import Experiment
from amalgam.stages.app.export_onnx import MOST_APART, TEXTS, parity_texts
from amalgam.stages.app.student import StudentFolder
from amalgam.stages.common.corpus import fields
from amalgam.stages.common.inference.batches import Classifier
from amalgam.stages.common.models.model_folder import STATIC
from amalgam.stages.common.models.resolve import read_model

SCRIPT = "classify.py"
MOST_TOKENS = 14_000
"""Tokens that keep a vector in int8: with the tokenizer of BERT the folder has 4.8 MB."""
COUNTED_TEXTS = 100_000
FP32, INT8 = "numpy fp32", "numpy int8"

Logits = Callable[[Sequence[Any]], Array]


def check(student: StudentFolder, option: str) -> None:
    if read_model(student.folder, "the student").config.get("model_type") != STATIC:
        fix = f"run `amalgam export --onnx{option}`, or train one: student.encoder=static:ENCODER student.name=small"
        raise ExperimentError("--numpy needs a static student", where=str(student.folder), fix=fix)


def write(classifier: Classifier, folder: Path) -> dict[str, Any]:
    shutil.copyfile(classify.__file__, folder / SCRIPT)
    _write_arrays(classifier, folder)
    return _check_parity(classifier, folder)


# ---- the arrays


def _write_arrays(classifier: Classifier, folder: Path, kept: Array | None = None) -> None:
    """Writes the arrays of classify.py; with `kept`, the ids of some tokens, theirs alone, in int8."""
    weights = {name: value.float().numpy() for name, value in classifier.model.state_dict().items()}
    vectors = weights["static.words.weight"]
    rows = np.arange(len(vectors), dtype=np.int32)
    scales = np.ones(len(vectors), np.float32)
    if kept is not None:
        rows = np.full(len(vectors), len(kept), np.uint16)
        rows[kept] = np.arange(len(kept), dtype=np.uint16)
        vectors = np.pad(vectors[kept], ((0, 1), (0, 0)))  # the last row is of all other tokens
        scales = (np.abs(vectors).max(axis=1) / 127).astype(np.float32)
        vectors = np.rint(vectors / np.maximum(scales, 1e-12)[:, None]).astype(np.int8)
    arrays = {
        "vectors": vectors,
        "scales": scales,
        "rows": rows,
        "convolution": weights["static.convolution.weight"].transpose(2, 1, 0),
        "convolution_bias": weights["static.convolution.bias"],
        "classifier": weights["classifier.weight"].T,
        "classifier_bias": weights["classifier.bias"],
    }
    content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    (folder / classify.ARRAYS).write_bytes(content)


def _kept_tokens(classifier: Classifier, config: Path | None, first: int) -> Array:
    """Returns the ids of the most frequent tokens of the training texts, then those with the smallest ids.

    Training texts before `first`, which int8 is compared on, do not count: all of their tokens would be kept.
    Tokenizers number frequent tokens first, so this is a fair order where the training texts are unknown or unreadable.
    """
    counts = np.zeros(classifier.model.config.vocab_size, np.int64)
    texts = None
    if config is not None:
        with suppress(AmalgamError):
            texts = Experiment.open(config, [], Console(quiet=True)).texts("train").head(COUNTED_TEXTS).collect()
    if texts is not None:
        tokens = encode(classifier.tokenizer, fields(texts.slice(first).to_arrow()), classifier.limit, types=False)
        counts += np.bincount(tokens.ids.values, minlength=len(counts))
    return np.sort(np.argsort(-counts, kind="stable")[:MOST_TOKENS])


# ---- the comparison


def _check_parity(classifier: Classifier, folder: Path) -> dict[str, Any]:
    texts = parity_texts(classifier)
    expected, logits = classifier.logits(texts), classify.Classifier(folder).logits([text for (text,) in texts])
    largest = float(np.abs(logits - expected).max()) if np.isfinite(logits).all() else float("inf")
    allowed = MOST_APART * float(np.abs(expected).max())
    if largest > allowed:
        what = f"the exported arrays differ from torch: a logit differs by {largest:.2e}"
        fix = "use the folder with transformers, or export it with --onnx"
        raise WorkError(what, where=f"{TEXTS} texts; at most {allowed:.0e} is allowed", fix=fix)
    return {"labels": classifier.labels, "parity_texts": TEXTS, "largest_difference": largest}


def quantise(classifier: Classifier, folder: Path, texts: int8.ComparedTexts, config: Path | None) -> int8.Int8Facts:
    """Replaces the arrays of the folder by their int8 form, and returns its comparison with the student."""
    inputs = [text[0] if len(text) == 1 else text for text in texts.texts]
    arrays, first = folder / classify.ARRAYS, len(texts.texts) if texts.source == "corpus.train" else 0

    def by_torch(texts: Sequence[Any]) -> Array:
        return classifier.logits([(text,) if isinstance(text, str) else text for text in texts])

    def by_numpy() -> Logits:
        return classify.Classifier(folder).logits

    expected, torch_speed = _timed(int8.TORCH, int8.weight_bytes(classifier), lambda: by_torch, inputs)
    _, fp32_speed = _timed(FP32, arrays.stat().st_size, by_numpy, inputs)
    _write_arrays(classifier, folder, _kept_tokens(classifier, config, first))
    logits, int8_speed = _timed(INT8, arrays.stat().st_size, by_numpy, inputs)
    return {
        **int8.agreement(classifier.labels, texts, expected.argmax(axis=1), logits.argmax(axis=1)),
        "speed": [torch_speed, fp32_speed, int8_speed],
    }


def _timed(form: str, size: int, start: Callable[[], Logits], inputs: Sequence[Any]) -> tuple[Array, int8.Speed]:
    """Returns the logits of the texts, and the speed with tokenising."""
    began = time.perf_counter()
    logits_of = start()
    started = time.perf_counter() - began
    logits = logits_of(inputs)  # this first call is a warm-up too
    began = time.perf_counter()
    logits_of(inputs)
    together = time.perf_counter() - began
    alone = inputs[: int8.SINGLE_TEXTS]
    began = time.perf_counter()
    for text in alone:
        logits_of([text])
    return logits, {
        "form": form,
        "bytes": size,
        "texts_per_second": len(inputs) / together,
        "one_text_seconds": (time.perf_counter() - began) / len(alone),
        "start_seconds": started,
    }
