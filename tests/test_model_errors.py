"""An exception in a model's own code names the model; one in the code of amalgam is a fault of amalgam."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPTNeoConfig

from amalgam.pipeline.errors import MOST_LINE, FaultError, ModelError, WorkError, first_line
from amalgam.pipeline.execution.faults import as_error
from amalgam.stages.common.inference.dropout import DropoutMode, Recorder
from amalgam.stages.common.models.loading import save_pretrained_folder
from amalgam.stages.common.models.model_folder import read_config
from amalgam.tests.stages.tiny_models import tiny
from amalgam.tests.workspaces import TEACHER_LABELS, Workspace


@pytest.mark.parametrize(("name", "command"), [("first", "cache-teachers"), ("encoder", "train-student")])
def test_the_model_its_folder_and_its_error_are_named(fresh: Workspace, name: str, command: str) -> None:
    """A Nystroemformer with fewer landmarks than segments reads only texts of one length."""
    folder, labels = fresh.folder / "models" / name, TEACHER_LABELS["first"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = {"num_landmarks": 2, "vocab_size": len(tokenizer)}
    save_pretrained_folder(tiny("nystromformer", labels=labels, **settings)[0], tokenizer, folder)
    err = fresh.refusal(ModelError.exit_code, command)
    assert "error: NystromformerForSequenceClassification fails in its own code: RuntimeError: " in err
    assert re.search(f"^where: .*models/{name}$", err, re.MULTILINE)
    assert re.search("^fix: lower max_tokens", err, re.MULTILINE)


def error_of(model: Any, **inputs: Any) -> BaseException:
    with pytest.raises((IndexError, NotImplementedError, RuntimeError, TypeError)) as raised:
        model(**inputs)
    return raised.value


def test_only_errors_of_the_models_code_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = tiny("bert")
    ids = torch.ones(1, 4, dtype=torch.int64)
    assert type(as_error(error_of(model, input_ids=ids + 1000))) is ModelError
    with Recorder(inside=str):
        inside = error_of(model, input_ids=ids + 1000)
    assert type(as_error(inside)) is ModelError
    with DropoutMode():  # its masks are not implemented
        assert type(as_error(error_of(model.train(), input_ids=ids))) is FaultError
    assert type(as_error(RuntimeError("outside"))) is FaultError

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(model.classifier, "forward", full)
    assert type(as_error(error_of(model.eval(), input_ids=ids))) is WorkError


def test_the_size_that_a_gpt_neo_derives_may_be_null(tmp_path: Path) -> None:
    GPTNeoConfig(attention_types=[[["global"], 1]], num_layers=1).save_pretrained(tmp_path)
    assert read_config(tmp_path, where="teacher first")["intermediate_size"] is None
    (tmp_path / "config.json").write_text('{"hidden_size": null}')
    with pytest.raises(ModelError, match="hidden_size is null"):
        read_config(tmp_path, where="teacher first")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('"model_type": ["bert"]', r'model_type is \["bert"\], not text'),
        ('"num_labels": "three"', 'num_labels is "three", not a whole number'),
        ('"pad_token_id": "0"', 'pad_token_id is "0", not a whole number'),
    ],
)
def test_an_entry_of_another_type_is_named(tmp_path: Path, entry: str, message: str) -> None:
    (tmp_path / "config.json").write_text(f"{{{entry}}}")
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path, where="teacher first")
    (tmp_path / "config.json").write_text(f"{{{entry.partition(':')[0]}: null}}")
    assert read_config(tmp_path, where="teacher first")


def test_the_first_line_of_a_message_is_not_blank_and_not_long() -> None:
    error = ValueError("\n  \n  the reason  \nmore")
    assert (first_line(error), first_line(error, named=True)) == ("the reason", "ValueError: the reason")
    assert first_line(MemoryError()) == first_line(MemoryError(), named=True) == "MemoryError"
    assert first_line(ValueError("x" * 2 * MOST_LINE)) == "x" * MOST_LINE + " ..."
    assert first_line(ValueError("word " * MOST_LINE)).endswith("word word ...")


def test_a_label_with_half_of_a_character_is_refused_by_plan(fresh: Workspace) -> None:
    config = fresh.folder / "models/first/config.json"
    config.write_text(config.read_text().replace('"banking"', '"bank\\ud83d"'))
    assert "id2label: the name of output 0 has half of a character" in fresh.refusal(ModelError.exit_code, "plan")
