"""A student without a transformer: `student.encoder: static:ENCODER`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from amalgam.stages.common.models.static import (
    StaticForSequenceClassification,
)
from amalgam.tests.test_export import ALONE, ROOT, printed_by
from amalgam.tests.workspaces import Workspace, build_once

STATIC = "student.encoder=static:./models/encoder"


@pytest.fixture(scope="module")
def static(built: Workspace, shared: Path) -> Workspace:
    """Return an experiment whose student is static and learned more steps than the others of these tests."""

    def build(folder: Path) -> Workspace:
        workspace = built.copy(folder)
        workspace.edit("encoder: ./models/encoder", "encoder: static:./models/encoder")
        workspace.edit("epochs: 1", "epochs: 20")
        workspace("run")
        return workspace

    return build_once(shared / "static", build)


def test_it_has_the_encoders_vectors_and_no_other_stage_runs_for_it(built: Workspace, static: Workspace) -> None:
    assert built.stale(STATIC) == {"train-student", "report"}
    config = json.loads((static.folder / "students/student/config.json").read_text())
    encoder = json.loads((static.folder / "models/encoder/config.json").read_text())
    assert config["model_type"] == "amalgam-static"
    assert (config["vocab_size"], config["hidden_size"]) == (encoder["vocab_size"], encoder["hidden_size"])
    assert not static.stale()


def test_it_learns(static: Workspace) -> None:
    records = [json.loads(path.read_text()) for path in static.artifacts.glob("train-student/*/student.json")]
    [history] = [record["facts"]["history"] for record in records if record["facts"]["epochs"] == 20]
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]


def test_numpy_alone_predicts_as_the_student(static: Workspace) -> None:
    blocks = re.findall(r"```python[^\n]*\n(.*?)```", (ROOT / "docs/student.md").read_text("utf-8"), re.DOTALL)
    [example] = [block for block in blocks if "safetensors.numpy" in block]
    assert len(example.splitlines()) <= 25
    printed = printed_by(static, "-I", "-c", ALONE + example + "\nprint(logits.tolist())")
    texts = ["the chef fried the onion", "the court heard the banker and the nurse"]
    labels, logits = printed.strip().splitlines()
    predictions = static("predict", *texts, "--json").json
    assert labels == str([entry["labels"][0]["label"] for entry in predictions])
    probabilities = torch.tensor(json.loads(logits)).softmax(-1).max(-1).values.tolist()
    assert probabilities == pytest.approx([entry["labels"][0]["probability"] for entry in predictions], abs=1e-4)


def test_padding_changes_no_text(static: Workspace) -> None:
    model = StaticForSequenceClassification.from_pretrained(static.folder / "students/student")
    ids = torch.tensor([[2, 7, 8, 9, 3], [2, 7, 3, 0, 0]])
    with torch.no_grad():
        padded = model(ids, torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])).logits[1]
        torch.testing.assert_close(padded, model(ids[1:, :3]).logits[0])
        assert not torch.allclose(padded, model(ids[1:]).logits[0])


def test_the_order_of_words_counts(static: Workspace) -> None:
    model = StaticForSequenceClassification.from_pretrained(static.folder / "students/student")
    with torch.no_grad():
        first, second = model(torch.tensor([[2, 7, 8, 9, 3], [2, 9, 7, 8, 3]])).logits
    assert not torch.allclose(first, second, atol=1e-3)


def test_it_is_exported_and_its_card_says_how_it_loads(static: Workspace) -> None:
    static("export", "--onnx")
    card = static("push", "me/desk", "--card").out
    assert "import amalgam.stages.common.models.static" in card
    assert "using it does not require amalgam" not in card


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["student.encoder=static"], "static:ENCODER"),
        (["student.encoder=static:teacher:third"], "no teacher has this name"),
        ([STATIC, "student.layers=1"], "a static student has no layers"),
        ([STATIC, "student.method=dfa"], "trains the layers of a transformer"),
        ([STATIC, "student.method=as-dfd"], "trains the layers of a transformer"),
    ],
)
def test_settings_that_need_a_transformer_are_refused(built: Workspace, overrides: list[str], fix: str) -> None:
    result = built.attempt("plan", *overrides)
    assert (result.code, fix in result.err) == (2, True), result.err
