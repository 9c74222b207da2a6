"""`amalgam export --onnx`: ONNX Runtime alone gives the logits of torch; an export that differs is refused."""

from __future__ import annotations

import ast
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from amalgam.benchmarks import exports
from amalgam.data.arrays import Array, softmax
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import ModelError, WorkError
from amalgam.stages.app import export_onnx as onnx_export
from amalgam.stages.app import int8
from amalgam.stages.app.serve import OnnxStudent, read_export
from amalgam.stages.app.student import StudentFolder, finished_in
from amalgam.tests.forking import BARE, Forked
from amalgam.tests.stages.tiny_models import save_tiny
from amalgam.tests.test_bad_input import assert_three_lines
from amalgam.tests.test_errors import LONG, denied, mode, permissions, raising
from amalgam.tests.workspaces import (
    TEACHER_LABELS,
    Workspace,
    amalgam,
    build_once,
    edit_json,
    finish,
    flip_bit,
    quiet_environment,
    rewrite_mark,
)

ROOT = Path(__file__).resolve().parents[1]
UNION = [label for own in TEACHER_LABELS.values() for label in own]
ALONE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"amalgam", "torch", "transformers"}:
            raise ImportError(f"{name} is not to be needed")

sys.meta_path.insert(0, Refuse())
"""


SIGNAL_IN_IMPORT = """
import runpy, signal, sys

class Raise:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy.linalg":
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGTERM)

sys.meta_path.insert(0, Raise())
runpy.run_module("amalgam", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def exported(built: Workspace, shared: Path, tmp_path: Path) -> Workspace:
    def build(folder: Path) -> Workspace:
        workspace = built.copy(folder)
        result = workspace("export", "--onnx")
        assert result.out.strip() == str(workspace.folder / "students/student-onnx")
        assert re.search(r"32 texts.* \d\.\de-\d\d", result.err)
        assert "student: students/student (muka-soft, fingerprint " in result.err
        return workspace

    return build_once(shared / "exported", build).copy(tmp_path / "exported")


def test_the_folder_holds_what_onnx_runtime_needs_and_no_weights_of_torch(exported: Workspace) -> None:
    folder = exported.folder / "students/student-onnx"
    names = {path.name for path in folder.iterdir()}
    assert {"model.onnx", "config.json", "tokenizer.json", "export.json"} <= names
    assert not [name for name in names if name.endswith(".safetensors")]
    assert {name for name in names if name.startswith(".")} == {".amalgam.json", ".amalgam.copy.json"}
    facts = json.loads((folder / "export.json").read_text())
    assert (facts["labels"], facts["max_tokens"], facts["parity_texts"]) == (UNION, 32, 32)
    assert facts["pad_id"] == json.loads((folder / "config.json").read_text())["pad_token_id"]
    assert 0 <= facts["largest_difference"] < 1e-4


def printed_by(workspace: Workspace, *arguments: str) -> str:
    """Run a new Python in the workspace's folder; return its output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=workspace.folder,
        env=quiet_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_in_the_docs_runs_without_torch_and_predicts_as_the_student(exported: Workspace) -> None:
    blocks = re.findall(r"```python[^\n]*\n(.*?)```", (ROOT / "docs/student.md").read_text("utf-8"), re.DOTALL)
    [example] = [block for block in blocks if "onnxruntime" in block]
    printed = printed_by(exported, "-I", "-c", ALONE + example)
    texts = ["the chef fried the onion", "the court heard the banker and the nurse"]
    predictions = exported("predict", *texts, "--json").json
    assert printed.strip() == str([entry["labels"][0]["label"] for entry in predictions])


def test_the_examples_of_the_model_card_predict_as_the_student(exported: Workspace, tmp_path: Path) -> None:
    card = exported("push", "me/desk", "--card").out
    python = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(python) == 2
    text = " ".join(["the chef fried the onion"] * 40)
    example = "\n".join(python).replace("me/desk", "students/student").replace("desk-onnx/", "students/student-onnx/")
    (script := tmp_path / "example.py").write_text(example.replace('"a text"', repr(text)))
    done = finish(Forked([], exported.folder, quiet_environment(), str(script), BARE))
    assert done.code == 0, done.err
    [entry] = exported("predict", text, "--json").json
    first, second = done.out.strip().splitlines()
    best = entry["labels"][0]
    assert ast.literal_eval(first)[0]["label"] == second == best["label"]
    assert ast.literal_eval(first)[0]["score"] == pytest.approx(best["probability"], abs=1e-4)


def test_an_export_with_other_logits_is_refused_with_the_difference(exported: Workspace, tmp_path: Path) -> None:
    import onnx
    from onnx import numpy_helper

    model = onnx.load(exported.folder / "students/student-onnx/model.onnx")
    weight = next(one for one in model.graph.initializer if one.name.endswith("classifier.bias"))
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) + np.float32(0.25), weight.name))
    onnx.save(model, tmp_path / "other.onnx")
    classifier = finished_in(exported.folder / "students/student").load()
    with pytest.raises(WorkError, match=r"2\.50e-01"):
        onnx_export.check_parity(classifier, tmp_path / "other.onnx")


def test_an_export_that_onnx_runtime_cannot_run_is_refused_with_the_fix(exported: Workspace, tmp_path: Path) -> None:
    """As that of a Qwen3.5, whose number of texts torch fixes."""
    import onnx

    model = onnx.load(exported.folder / "students/student-onnx/model.onnx")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    onnx.save(model, tmp_path / "other.onnx")
    classifier = finished_in(exported.folder / "students/student").load()
    with pytest.raises(WorkError, match="ONNX Runtime cannot run the export of a bert") as refused:
        onnx_export.check_parity(classifier, tmp_path / "other.onnx")
    assert "train a student from another encoder" in str(refused.value.fix)


def test_a_served_batch_is_padded_with_the_token_that_the_model_reads_as_padding(tmp_path: Path) -> None:
    """The configuration of a GPT-2 names none, and its head reads the last token that is no padding."""
    folder = save_tiny(tmp_path / "model", "gpt2", spread=4.0)
    amalgam("export", "--onnx", "--student", str(folder), folder=tmp_path)
    texts = [(" ".join(["word5", "word9", "word40", "word77"][:count]),) for count in range(1, 5)]
    expected = softmax(finished_in(folder).load().logits(texts))
    served = OnnxStudent(read_export(tmp_path / "model-onnx", ""), 1)(texts)
    assert np.abs(expected - [each.probabilities for each in served]).max() < 1e-5


def test_the_texts_compared_reach_from_a_word_to_beyond_the_limit(exported: Workspace) -> None:
    classifier = finished_in(exported.folder / "students/student").load()
    lengths = [len(text.split()) for (text,) in onnx_export.parity_texts(classifier)]
    assert (len(lengths), min(lengths), max(lengths) > classifier.limit) == (32, 1, True)


def test_an_export_is_replaced_only_with_force_and_another_folder_never(exported: Workspace) -> None:
    assert "--force" in exported.attempt("export", "--onnx").err
    refused = exported.attempt("export", "--onnx", "--force", "--out", "texts")
    assert (refused.code, "texts" in refused.err) == (2, True)
    assert (exported.folder / "texts/train.csv").exists()


def test_an_export_under_another_name_is_refused_with_its_student(exported: Workspace) -> None:
    (exported.folder / "students/student").rename(exported.folder / "students/v1")
    (exported.folder / "releases").mkdir()
    (exported.folder / "students/student-onnx").rename(exported.folder / "releases/v1")
    (exported.folder / "current").symlink_to("releases/v1")
    for export in ("releases/v1", "current"):
        refused = exported.attempt("predict", "a text", "--student", export)
        assert "fix: name the student, such as students/v1; " in refused.err, refused.err
    within = amalgam("predict", "a text", "--student", ".", folder=exported.folder / "current")
    assert "fix: name the student, such as students/student; " in within.err, within.err


def test_an_export_of_the_present_folder_is_next_to_it(exported: Workspace) -> None:
    refused = amalgam("export", "--onnx", "--student", ".", folder=exported.folder / "students/student")
    assert (refused.code, refused.err.splitlines()[-1]) == (2, "fix: replace it with --force"), refused.err


def test_a_damaged_export_elsewhere_is_not_mended_by_verify(exported: Workspace) -> None:
    shutil.copytree(exported.folder / "students/student-onnx", exported.folder / "served/model")
    flip_bit(exported.folder / "served/model/model.onnx")
    refused = exported.attempt("serve", "--student", "served/model")
    assert (refused.code, "the model is damaged: model.onnx" in refused.err) == (2, True), refused.err
    assert "fix: copy or export the folder again" in refused.err
    assert "0 damaged" in exported("verify", "--repair").out


def test_an_interrupted_export_leaves_the_earlier_one_and_has_no_units(
    exported: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    before = (exported.folder / "students/student-onnx/model.onnx").read_bytes()
    monkeypatch.setattr(onnx_export, "check_parity", interrupt)
    for options in (("--force",), ("--out", "stopped")):
        result = exported.attempt("export", "--onnx", *options)
        assert result.code == 128 + signal.SIGTERM, result.err
        assert "error: stopped by SIGTERM; no export was written\n" in result.err
        assert "fix: run the same command again, which starts over" in result.err
    assert (exported.folder / "students/student-onnx/model.onnx").read_bytes() == before
    assert not (exported.folder / "stopped").exists()


def test_a_signal_while_the_libraries_of_the_server_load_prints_no_traceback(exported: Workspace) -> None:
    command = [sys.executable, "-c", SIGNAL_IN_IMPORT, "serve", "--port", "0"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=exported.folder, env=quiet_environment(), check=False
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert done.stderr.startswith("error: stopped by SIGTERM; the server had not started\n")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"inputs": ["input_ids"]}, "attention_mask"),
        ({"labels": ["a", "b"]}, "8 outputs, and export.json 2 labels"),
        ({"max_tokens": 100}, "does not truncate at 100 tokens"),
        ({"pad_id": 1_000_000}, "idx=1000000"),
    ],
)
def test_a_model_that_export_json_does_not_describe_is_not_served(
    exported: Workspace, tmp_path: Path, changes: dict[str, list[str] | int], part: str
) -> None:
    shutil.copytree(exported.folder / "students/student-onnx", tmp_path / "own", ignore=shutil.ignore_patterns(".*"))
    edit_json(tmp_path / "own/export.json", **changes)
    refused = exported.attempt("serve", "--port", "0", "--student", str(tmp_path / "own"))
    assert (refused.code, part in refused.err) == (2, True), refused.err
    assert_three_lines(refused.err)


def test_without_the_extra_the_error_has_the_pip_command(built: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    refused = built.attempt("export", "--onnx")
    assert (refused.code, "pip install 'amalgam-distill[onnx]'" in refused.err) == (2, True)
    assert "amalgam export --onnx" in built.attempt("export").err


@permissions
def test_an_export_that_could_not_be_written_is_an_error_before_the_student_loads(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StudentFolder, "load", raising(AssertionError("the student was loaded")))
    for bits in (0o555, 0):
        code, err = denied(workspace, mode("out", bits), "export", "--onnx", "--out", "out/model")
        assert code == 2, err
        assert_three_lines(err)
        assert "--out" in err
    (workspace.folder / "link").symlink_to("out")
    for out in ("texts/train.csv/model", "link", f"{LONG}/model"):
        result = workspace.attempt("export", "--onnx", "--out", out)
        assert result.code == 2, result.err
        assert_three_lines(result.err)


def test_an_int8_export_has_its_comparison_on_labelled_test_texts(exported: Workspace) -> None:
    result = exported("export", "--onnx", "--int8", "--force")
    folder = exported.folder / "students/student-onnx-int8"
    assert result.out.strip() == str(folder)
    assert "ONNX int8" in result.err
    facts = json.loads((folder / "export.json").read_text())["int8"]
    assert (facts["labelled"], facts["source"]) == (len(exported.texts("test")), "corpus.test")
    assert facts["same_label"] > 0.8
    assert abs(facts["accuracy_fp32"] - facts["accuracy_int8"]) <= 1 - facts["same_label"] + 1e-9
    sizes = {row["form"]: row["bytes"] for row in facts["speed"]}
    assert sizes["ONNX int8"] == (folder / "model.onnx").stat().st_size < sizes["ONNX fp32"]
    assert sizes["torch fp32"] == (exported.folder / "students/student/model.safetensors").stat().st_size
    assert all(row["texts_per_second"] > 0 and row["one_text_seconds"] > 0 for row in facts["speed"])
    assert not (folder / "fp32.onnx").exists()


def test_the_benchmark_has_the_accuracy_of_a_trained_student(
    exported: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    labelled, student = exported.texts("test"), exported.folder / "students/student"
    texts = exported.folder / "labelled.parquet"
    pl.DataFrame(labelled, schema=["text", "label"], orient="row").write_parquet(texts)
    monkeypatch.setattr(sys, "argv", ["exports.py", "--student", str(student), "--texts", str(texts), "--json"])
    exports.main()
    rows = {row["row"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    classifier, row = finished_in(student).load(), rows["student: accuracy"]
    places = classifier.logits([(text,) for text, _ in labelled]).argmax(axis=1)
    right = [classifier.labels[place] == gold for place, (_, gold) in zip(places, labelled, strict=True)]
    assert row["accuracy_fp32"] == pytest.approx(np.mean(right), abs=1e-3)
    assert (row["n"], row["of_torch"]) == (len(right), rows["student: ONNX int8"]["of_torch"])


def test_the_int8_model_computes_in_int8_and_agrees_with_the_student(exported: Workspace, tmp_path: Path) -> None:
    import onnx
    import onnxruntime

    classifier = finished_in(exported.folder / "students/student").load()
    onnx_export.write_model(classifier, tmp_path / "fp32.onnx")
    int8.write_int8(tmp_path / "fp32.onnx", tmp_path / "int8.onnx")
    operators = {node.op_type for node in onnx.load(tmp_path / "int8.onnx").graph.node}
    assert "MatMul" in operators, "products of the attention"
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "run.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "int8.onnx"), options)
    run = {node.op_type for node in onnx.load(tmp_path / "run.onnx").graph.node}
    assert "MatMulIntegerToFloat" in run
    assert (tmp_path / "int8.onnx").stat().st_size < 0.7 * (tmp_path / "fp32.onnx").stat().st_size
    assert "SkipLayerNormalization" not in run, "its kernel is slower than a sum and a normalisation"
    tokens = classifier.tokenizer(["the chef fried the onion"], return_tensors="np")
    names = {one.name for one in session.get_inputs()}
    (logits,) = session.run(["logits"], {name: value for name, value in tokens.items() if name in names})
    expected = classifier.logits([("the chef fried the onion",)])
    assert np.abs(logits - expected).max() < 0.1 * np.abs(expected).max()


def int8_of(folder: Path, nodes: Sequence[Any], weights: Mapping[str, Array]) -> Any:
    """Write a model from `tokens` to `logits` in int8 as int8.onnx; return its session."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    first, *_, last = [shape for values in weights.values() for shape in values.shape]
    widths = {"tokens": first, "logits": last}
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "length", width])]
        for name, width in widths.items()
    )
    arrays = [numpy_helper.from_array(values, name) for name, values in weights.items()]
    graph = helper.make_graph(nodes, "products", inputs, outputs, arrays)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "fp32.onnx")
    int8.write_int8(folder / "fp32.onnx", folder / "int8.onnx")
    return onnxruntime.InferenceSession(str(folder / "int8.onnx"), providers=["CPUExecutionProvider"])


def test_a_token_with_large_values_leaves_the_other_tokens_their_bits(tmp_path: Path) -> None:
    from onnx import helper

    random = np.random.default_rng(0)
    wide, narrow = (random.normal(size=shape).astype(np.float32) for shape in ((16, 64), (64, 16)))
    nodes = [
        helper.make_node("MatMul", ["tokens", "wide"], ["raised"], name="up"),
        helper.make_node("Relu", ["raised"], ["active"], name="active"),
        helper.make_node("MatMul", ["active", "narrow"], ["logits"], name="down"),
    ]
    session = int8_of(tmp_path, nodes, {"wide": wide, "narrow": narrow})
    tokens = random.normal(size=(1, 6, 16)).astype(np.float32)
    tokens[0, 0] *= 100
    tokens[0, 5] = 0
    (logits,) = session.run(["logits"], {"tokens": tokens})
    expected = np.maximum(tokens @ wide, 0) @ narrow
    differences, scales = (np.abs(values).max(axis=(0, 2)) for values in (logits - expected, expected))
    assert (differences[:5] < 0.05 * scales[:5]).all()
    assert differences[5] == 0, "a token of zeros alone"


def test_two_products_of_an_int8_model_fit_in_16_bits(tmp_path: Path) -> None:
    """CPUs without VNNI add the products of two inputs in 16 bits, and larger sums saturate."""
    import onnx
    from onnx import helper, numpy_helper

    inputs = 5  # an odd number: the last one has no partner
    weights = np.tile(np.array([1, -1, 0.5], np.float32), (inputs, 1))
    nodes = [helper.make_node("MatMul", ["tokens", "weights"], ["logits"])]
    session = int8_of(tmp_path, nodes, {"weights": weights})
    arrays = {each.name: numpy_helper.to_array(each) for each in onnx.load(tmp_path / "int8.onnx").graph.initializer}
    numbers = arrays["weights_int8"].astype(int)
    largest = 255 * np.abs(numbers[0:4:2] + numbers[1:4:2]).max()
    assert 2**14 < largest < 2**15
    tokens = np.ones((1, 2, inputs), np.float32)
    (logits,) = session.run(["logits"], {"tokens": tokens})
    assert logits == pytest.approx(tokens @ weights, rel=0.01)


def test_other_texts_change_no_answer_of_an_int8_export(exported: Workspace) -> None:
    exported("export", "--onnx", "--int8", "--force")
    student = OnnxStudent(read_export(exported.folder / "students/student-onnx-int8", ""), 2)
    texts = [("the onion",), ("the court heard the banker and the nurse " * 3,), ("chef",)]
    alone = [student([text])[0].probabilities for text in texts]
    together = [each.probabilities for each in student(texts)]
    assert np.array(together) == pytest.approx(np.array(alone), abs=1e-6)


def test_an_int8_export_of_an_earlier_version_is_refused(exported: Workspace, tmp_path: Path) -> None:
    shutil.copytree(exported.folder / "students/student-onnx", tmp_path / "own", ignore=shutil.ignore_patterns(".*"))
    edit_json(tmp_path / "own/export.json", int8={"texts": 500})
    with pytest.raises(ModelError, match="of an earlier version"):
        read_export(tmp_path / "own", "")


def int8_facts(
    before: float | None, after: float | None, same: float, labelled: int = 2000, gained: int = 0
) -> int8.Int8Facts:
    """`gained`: texts on which only the int8 model is right."""
    lost = gained + round(((before or 0.0) - (after or 0.0)) * labelled)
    return {
        "texts": 500,
        "source": "corpus.test",
        "same_label": same,
        "labelled": 0 if before is None else labelled,
        "gained": gained,
        "lost": lost,
        "accuracy_fp32": before,
        "accuracy_int8": after,
        "speed": [],
    }


def test_the_comparison_of_int8_is_in_percent(capsys: pytest.CaptureFixture[str]) -> None:
    facts = int8_facts(0.9, 0.896, 0.97)
    facts["speed"] = [
        {"form": form, "bytes": 1000, "texts_per_second": 1.0, "one_text_seconds": 1.0, "start_seconds": 1e-6}
        for form in (int8.TORCH, int8.INT8)
    ]
    int8.show(Console(), facts)
    assert "97.0 % of 500 texts" in (printed := "".join(capsys.readouterr()))
    assert "90.0 % in fp32, 89.6 % in int8" in printed
    assert ["ready in" in line for line in printed.splitlines()[1:]] == [False, True], "torch has no session"


def test_an_int8_model_that_loses_accuracy_is_refused_without_force(
    exported: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    int8.check_loss(int8_facts(0.9, 0.896, 0.97), force=False)
    int8.check_loss(int8_facts(None, None, 0.98), force=False)
    int8.check_loss(int8_facts(0.9, 0.5, 0.5), force=True)
    int8.check_loss(int8_facts(0.9, 0.894, 0.99, gained=100), force=False)  # 100 against 112 texts may be chance
    int8.check_loss(int8_facts(0.9, 0.89, 0.99, labelled=100), force=False)  # one text
    with pytest.raises(WorkError, match=r"loses 0\.6 points"):
        int8.check_loss(int8_facts(0.9, 0.894, 0.99), force=False)
    for few in (int8_facts(None, None, 0.97), int8_facts(1.0, 1.0, 0.97, labelled=1)):
        with pytest.raises(WorkError, match="another label"):
            int8.check_loss(few, force=False)
    monkeypatch.setattr(int8, "LEAST_SAME", 1.1)
    refused = exported.attempt("export", "--onnx", "--int8", "--out", "refused")
    assert refused.code != 0
    assert_three_lines(refused.err)
    assert "--force" in refused.err
    assert not (exported.folder / "refused").exists()


def test_int8_is_compared_on_the_columns_that_the_student_learned(exported: Workspace) -> None:
    student = exported.folder / "students/of-pairs"
    shutil.copytree(exported.folder / "students/student", student)
    rewrite_mark(student, text=["body", "reply"])
    given = ("export", "--onnx", "--int8", "--force", "--student", "students/of-pairs", "--out", "of-pairs")
    refused = exported.attempt(*given)
    assert (refused.code, "classifies pairs of texts" in refused.err, "--input FILE" in refused.err) == (2, True, True)
    (exported.folder / "pairs.csv").write_text("text,reply\nthe chef fried the onion,the court heard the nurse\n")
    refused = exported.attempt(*given, "--input", "pairs.csv", "-c", "absent.yaml")
    assert (refused.code, refused.err.splitlines()[1]) == (3, "error: no column body in pairs.csv"), refused.err
    assert "fix: rename the columns of texts in the file: body and reply" in refused.err
    (exported.folder / "pairs.csv").write_text("body,reply\nthe chef fried the onion,the court heard the nurse\n")
    texts = int8.compared_texts(finished_in(student), exported.config, exported.folder / "pairs.csv", int8=True)
    assert texts is not None
    assert texts.texts == [("the chef fried the onion", "the court heard the nurse")]
    shutil.rmtree(student)


def test_int8_is_compared_on_the_texts_of_a_file_with_and_without_labels(exported: Workspace) -> None:
    (exported.folder / "plain.csv").write_text("text\nthe chef fried the onion\nthe court heard the nurse\n")
    given = ("export", "--onnx", "--int8", "--force", "--out", "of-file", "--input")
    exported(*given, "plain.csv")
    facts = json.loads((exported.folder / "of-file/export.json").read_text())["int8"]
    assert (facts["texts"], facts["labelled"], facts["accuracy_int8"]) == (2, 0, None)
    (exported.folder / "plain.txt").write_text("the chef fried the onion\n")
    for wrong in ("absent.csv", "students", "plain.txt"):
        refused = exported.attempt(*given, wrong)
        assert refused.code == 3, refused.err
        assert_three_lines(refused.err)
    assert "--int8" in exported.attempt("export", "--onnx", "--input", "plain.csv").err
    (exported.folder / "latin.csv").write_bytes(b"text\nthe chef fried the onion\nla cr\xe8me\n")
    refused = exported.attempt(*given, "latin.csv")
    assert refused.code == 3, refused.err
    assert "where: latin.csv row 3 " in refused.err
    exported.edit("corpus:\n", "corpus:\n  on_bad_row: skip\n")
    texts = int8.compared_texts(
        finished_in(exported.folder / "students/student"), exported.config, exported.folder / "latin.csv", int8=True
    )
    assert texts is not None
    assert texts.texts == [("the chef fried the onion",)]
