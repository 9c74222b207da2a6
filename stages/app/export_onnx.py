"""Exports the student to ONNX with free batch size and length (`amalgam export --onnx`)."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from amalgam.data.demo_corpus import generate
from amalgam.data.keys import shown
from amalgam.data.tokens import encode, uses_token_types
from amalgam.pipeline.errors import MOST_LINE, WorkError, first_line
from amalgam.stages.app.int8 import ComparedTexts, OnnxInt8Facts, compare, write_int8
from amalgam.stages.app.student import StudentFolder
from amalgam.stages.common.device import check_libraries
from amalgam.stages.common.inference.batches import Classifier, model_inputs
from amalgam.stages.common.models.model_folder import ONNX_MODEL

TEXTS, AT_ONCE = 32, 8
MOST_APART = 1e-3
"""Largest difference of a logit, relative to the largest logit; it allows another order of float32 operations."""

LIBRARIES = ("onnx", "onnxscript", "onnxruntime")


def check(_student: StudentFolder, _option: str) -> None:
    check_libraries(LIBRARIES, "onnx", "amalgam export --onnx")


def write(classifier: Classifier, folder: Path) -> dict[str, Any]:
    write_model(classifier, folder / ONNX_MODEL)
    return check_parity(classifier, folder / ONNX_MODEL)


def quantise(classifier: Classifier, folder: Path, texts: ComparedTexts, _config: Path | None) -> OnnxInt8Facts:
    fp32, model = folder / "fp32.onnx", folder / ONNX_MODEL
    model.rename(fp32)
    write_int8(fp32, model)
    facts = compare(classifier, fp32, model, texts)
    fp32.unlink()
    return facts


class _Logits(torch.nn.Module):
    """Wraps a model so that logits are its only output."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> Any:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **types).logits


def write_model(classifier: Classifier, path: Path) -> None:
    names = _input_names(classifier)
    free = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=classifier.limit)}
    no_export = f"torch cannot export a {classifier.model.config.model_type} to ONNX"
    with _no_export(no_export, RuntimeError), _silent(), _eager_attention(classifier):
        program = torch.onnx.export(
            _Logits(classifier.model).eval(),
            kwargs={name: torch.ones(2, min(7, classifier.limit), dtype=torch.int64) for name in names},
            input_names=names,
            output_names=["logits"],
            dynamic_shapes=dict.fromkeys(names, free),
            dynamo=True,
            verbose=False,
        )
        assert program is not None  # noqa: S101 - it is None only without dynamo
        for node in program.model.graph:
            added = node.inputs[0].producer() if node.op_type == "LayerNormalization" and node.inputs[0] else None
            if added is not None and added.op_type == "Add":
                added.op_type = "Sum"  # ONNX Runtime fuses Add with the normalisation, and that is slower
        program.save(path)


@contextmanager
def _no_export(what: str, kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind as error:
        fix = "use the folder with transformers, or train a student from another encoder"
        raise WorkError(what, where=shown(first_line(error.__cause__ or error), MOST_LINE), fix=fix) from error


@contextmanager
def _silent() -> Iterator[None]:
    """Silences the libraries' messages and warnings; amalgam checks each model that they write."""
    logging.disable()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def _eager_attention(classifier: Classifier) -> Iterator[None]:
    """Exports plain products: torch's fused attention becomes a graph with tests for empty rows."""
    model = classifier.model
    before = model.config._attn_implementation  # noqa: SLF001 - transformers has no public name
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def check_parity(classifier: Classifier, path: Path) -> dict[str, Any]:
    """Compares ONNX Runtime with torch, in padded batches and one by one; raises if they differ."""
    import onnxruntime

    tokens = encode(classifier.tokenizer, parity_texts(classifier), classifier.limit, types=classifier.types)
    no_run = f"ONNX Runtime cannot run the export of a {classifier.model.config.model_type}"
    with _no_export(no_run, Exception):
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    largest, scale = 0.0, 0.0
    for size in (AT_ONCE, 1):
        for start in range(0, TEXTS, size):
            inputs = model_inputs(tokens.ids, tokens.type_ids, np.arange(start, start + size), classifier.pad_id)
            with torch.no_grad():
                expected = classifier.model(**inputs).logits.numpy()
            with _no_export(no_run, Exception):
                logits = session.run(["logits"], {name: tensor.numpy() for name, tensor in inputs.items()})[0]
            scale = max(scale, float(np.abs(expected).max()))
            difference = float(np.abs(logits - expected).max()) if np.isfinite(logits).all() else float("inf")
            largest = max(largest, difference)
    if largest > MOST_APART * scale:
        what = f"the exported model differs from torch: a logit differs by {largest:.2e}"
        fix = "use the folder with transformers; a newer torch or onnxscript may export this encoder correctly"
        raise WorkError(what, where=f"{TEXTS} texts; at most {MOST_APART * scale:.0e} is allowed", fix=fix)
    return {
        "inputs": _input_names(classifier),
        "labels": classifier.labels,
        "max_tokens": classifier.limit,
        "pad_id": classifier.pad_id,
        "parity_texts": TEXTS,
        "largest_difference": largest,
        "versions": {name: version(name) for name in ("torch", "transformers", *LIBRARIES)},
    }


def parity_texts(classifier: Classifier) -> list[tuple[str, ...]]:
    """Returns texts from one word to more tokens than the model accepts."""
    words = " ".join(text for text, _ in generate(max(TEXTS, classifier.limit // 4), 0)).split()
    longest = min(len(words), classifier.limit + 8)
    return [(" ".join(words[index : index + max(1, longest * (index + 1) // TEXTS)]),) for index in range(TEXTS)]


def _input_names(classifier: Classifier) -> list[str]:
    types = uses_token_types(classifier.tokenizer, types=classifier.types)
    return ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]
