"""Exports the student to ONNX with free batch size and length (`amalgam export --onnx`).

The logits of 32 texts are compared with torch; a model that differs is refused and removed.
"""

from __future__ import annotations

import importlib
import json
import logging
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from amalgam.data.demo_corpus import generate
from amalgam.data.keys import shown
from amalgam.data.tokens import Ragged, encode, uses_token_types
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import ExperimentError, WorkError
from amalgam.pipeline.storage.local import atomic_write
from amalgam.stages.app.student.folder import finished_student
from amalgam.stages.common.models.model_folder import light_names

if TYPE_CHECKING:
    from amalgam.stages.common.inference.classifier import Classifier


Array = np.ndarray[Any, np.dtype[Any]]


MODEL, FACTS = "model.onnx", "export.json"

TEXTS, AT_ONCE = 32, 8

MOST_APART = 1e-3
"""Largest difference of a logit, relative to the largest logit; it allows another order of float32 operations."""

LIBRARIES = ("onnx", "onnxscript", "onnxruntime")


def export(config: Path, student: Path | None, out: Path | None, *, force: bool, quiet: bool) -> None:
    _check_libraries()
    finished = finished_student(config, student)
    place = out or finished.folder.with_name(f"{finished.folder.name}-onnx")
    _check_place(place, force=force)
    classifier = finished.load()
    classifier.model.to("cpu")
    with atomic_write(place) as temporary:
        temporary.mkdir()
        write_model(classifier, temporary / MODEL)
        facts = check_parity(classifier, temporary / MODEL)
        for name in light_names([path.name for path in finished.folder.iterdir()], trust_remote_code=False):
            shutil.copy2(finished.folder / name, temporary / name)
        (temporary / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
        if place.exists():
            shutil.rmtree(place)
    console = Console(quiet=quiet)
    console.say(f"on {TEXTS} texts no logit differs from torch's by more than {facts['largest_difference']:.1e}")
    console.result(str(place))


def write_model(classifier: Classifier, path: Path) -> None:
    import torch

    names = _inputs(classifier)
    example = {name: torch.ones(2, min(7, classifier.limit), dtype=torch.int64) for name in names}
    free = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=classifier.limit)}
    try:
        with _silent():
            program = torch.onnx.export(
                _only_logits(classifier.model).eval(),
                kwargs=example,
                input_names=names,
                output_names=["logits"],
                dynamic_shapes=dict.fromkeys(names, free),
                dynamo=True,
                verbose=False,
            )
            assert program is not None  # noqa: S101 - it is None only without dynamo
            program.save(path)
    except RuntimeError as error:
        raise WorkError(
            f"torch cannot export a {classifier.model.config.model_type} to ONNX",
            where=shown(str(error), 300),
            fix="use the folder with transformers, or train a student from another encoder",
        ) from error


def check_parity(classifier: Classifier, path: Path) -> dict[str, Any]:
    """Compares ONNX Runtime with torch, in padded batches and one by one; raises if they differ."""
    import onnxruntime

    texts = parity_texts(classifier)
    tokens = encode(classifier.tokenizer, texts, classifier.limit, types=classifier.types)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    largest, scale = 0.0, 0.0
    for size in (AT_ONCE, 1):
        for start in range(0, TEXTS, size):
            inputs = _padded(tokens.ids, tokens.type_ids, range(start, start + size), classifier.pad_id)
            expected = _torch_logits(classifier, inputs)
            logits = session.run(["logits"], {name: inputs[name] for name in _inputs(classifier)})[0]
            scale = max(scale, float(np.abs(expected).max()))
            difference = float(np.abs(logits - expected).max()) if np.isfinite(logits).all() else float("inf")
            largest = max(largest, difference)
    if largest > MOST_APART * scale:
        raise WorkError(
            f"the exported model differs from torch: a logit differs by {largest:.2e}",
            where=f"{TEXTS} texts; at most {MOST_APART * scale:.0e} is allowed",
            fix="use the folder with transformers; a newer torch or onnxscript may export this encoder correctly",
        )
    return {
        "inputs": _inputs(classifier),
        "labels": classifier.labels,
        "max_tokens": classifier.limit,
        "parity_texts": TEXTS,
        "largest_difference": largest,
        "versions": {name: version(name) for name in ("torch", "transformers", *LIBRARIES)},
    }


def parity_texts(classifier: Classifier) -> list[tuple[str, ...]]:
    """Returns texts from one word to more tokens than the model accepts."""
    words = " ".join(text for text, _ in generate(max(TEXTS, classifier.limit // 4), 0)).split()
    longest = min(len(words), classifier.limit + 8)
    return [(" ".join(words[place : place + max(1, longest * (place + 1) // TEXTS)]),) for place in range(TEXTS)]


def _torch_logits(classifier: Classifier, inputs: dict[str, Array]) -> Array:
    import torch

    with torch.no_grad():
        logits: Array = classifier.model(
            **{name: torch.from_numpy(array) for name, array in inputs.items()}
        ).logits.numpy()
    return logits


def _padded(ids: Ragged, types: Ragged | None, rows: Sequence[int], pad_id: int) -> dict[str, Array]:
    places = np.array(rows)
    padded, mask = ids.padded(places, pad_id)
    inputs: dict[str, Array] = {"input_ids": padded, "attention_mask": mask.astype(np.int64)}
    if types is not None:
        inputs["token_type_ids"], _ = types.padded(places, 0)
    return inputs


def _inputs(classifier: Classifier) -> list[str]:

    types = uses_token_types(classifier.tokenizer, types=classifier.types)
    return ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]


def _only_logits(model: Any) -> Any:
    import torch

    class Logits(torch.nn.Module):
        """Wraps the model so that logits are its only output."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> Any:
            types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
            return self.model(input_ids=input_ids, attention_mask=attention_mask, **types).logits

    return Logits()


def _check_libraries() -> None:

    for name in LIBRARIES:
        try:
            importlib.import_module(name)
        except ImportError:
            fix = "pip install 'amalgam[onnx]'"
            raise ExperimentError(f"{name} is not installed", where="amalgam export --onnx", fix=fix) from None


def _check_place(place: Path, *, force: bool) -> None:
    if not place.exists():
        return
    if not (place / FACTS).is_file() or not (place / MODEL).is_file():
        fix = "name another folder with --out"
        raise ExperimentError(f"{shown(place.name)} exists and is no export", where=str(place.absolute()), fix=fix)
    if not force:
        fix = "replace it with --force"
        raise ExperimentError(f"{shown(place.name)} exists", where=str(place.absolute()), fix=fix)


@contextmanager
def _silent() -> Iterator[None]:
    """Silences the exporter's warnings; check_parity tests the result."""
    logs = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for log, level in zip(logs, levels, strict=True):
                log.setLevel(level)
