"""`amalgam predict` on the student of the tiny experiment: its own probabilities for texts from every source."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from amalgam.data.keys import text_key
from amalgam.pipeline.errors import ExperimentError
from amalgam.stages.app import predict as predict_module
from amalgam.stages.app.api import Experiment
from amalgam.stages.app.student import Predictions, Student
from amalgam.stages.common.deliveries import COPY_OF_MARK, MARKS, METADATA
from amalgam.stages.common.models.model_folder import UNKNOWN
from amalgam.tests.forking import Forked
from amalgam.tests.stages.tiny_models import save_tiny
from amalgam.tests.test_bad_input import assert_three_lines
from amalgam.tests.workspaces import (
    TEACHER_LABELS,
    TEST,
    Workspace,
    finish,
    quiet_environment,
    rewrite_mark,
    until,
    write_csv,
    write_texts,
)

TEXTS = ["the chef fried the onion", "the court heard the banker", "a nurse"]


@pytest.fixture(scope="module")
def right(desk: Workspace) -> dict[str, dict[str, float]]:
    """Return the predictions of transformers for the test part and TEXTS."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = desk.folder / "students/student"
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForSequenceClassification, AutoTokenizer))
    by_name = {}
    with torch.no_grad():
        for text in [*TEXTS, *(text for text, _ in desk.texts("test"))]:
            shares = (
                model(**tokenizer(text, truncation=True, max_length=32, return_tensors="pt"))
                .logits.softmax(-1)[0]
                .tolist()
            )
            by_name[text] = {model.config.id2label[place]: share for place, share in enumerate(shares)}
    return by_name


def best(shares: dict[str, float]) -> str:
    return max(shares, key=lambda label: shares[label])


def test_typed_texts_get_the_models_own_probabilities(desk: Workspace, right: dict[str, dict[str, float]]) -> None:
    result = desk("predict", *TEXTS, "--top", "99", "--json").json
    assert [entry["text"] for entry in result] == TEXTS
    for entry in result:
        probabilities = {label["label"]: label["probability"] for label in entry["labels"]}
        assert probabilities == pytest.approx(right[entry["text"]], abs=1e-5)
        assert list(probabilities.values()) == sorted(probabilities.values(), reverse=True)


def test_explain_sums_what_each_teachers_labels_hold(desk: Workspace, right: dict[str, dict[str, float]]) -> None:
    [entry] = desk("predict", TEXTS[0], "--explain", "--json").json
    for teacher, labels in TEACHER_LABELS.items():
        assert entry["mass"][teacher] == pytest.approx(sum(right[TEXTS[0]][label] for label in labels), abs=1e-5)
    shown = desk("predict", TEXTS[0], "--explain").out
    assert f"labels of first   {entry['mass']['first']:.3f}" in shown


def plain_student(desk: Workspace, tmp_path: Path, *without: str) -> Path:
    """Returns a copy of the student's folder without marks, and without these files."""
    folder = tmp_path / "plain"
    shutil.copytree(desk.folder / "students/student", folder)
    for name in (*MARKS, *without):
        (folder / name).unlink(missing_ok=True)
    return folder


def test_unknown_texts_are_far_from_the_states_of_each_class(desk: Workspace) -> None:
    """Compares with transformers and the file alone: the least distance of the layer's mean state from a class.

    Two linear maps of the states of this layer and of the last one are added.
    """
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = desk.folder / "students/student"
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForSequenceClassification, AutoTokenizer))
    with safe_open(folder / UNKNOWN, framework="pt") as file:
        about = json.loads(file.metadata()["amalgam"])
        means, whiten, slope = (file.get_tensor(name) for name in ("means", "whiten", "slope"))
    with torch.no_grad():
        outputs = [model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True) for text in TEXTS]
    states, last = (
        torch.stack([output.hidden_states[layer][0].mean(0) for output in outputs])
        for layer in (int(about["layer"]), -1)
    )
    white = (states[:, None] - means) @ whiten.T
    added = torch.cat([states, last], 1) @ slope - float(about["constant"])
    scores = ((white.square().sum(-1).min(1).values / means.shape[1]).sqrt() + added).tolist()
    threshold = float(about["threshold"])
    for entry, score in zip(desk("predict", *TEXTS, "--unknown", "--json").json, scores, strict=True):
        assert entry["unknown"]["score"] == pytest.approx(score, rel=1e-3)
        assert entry["unknown"]["threshold"] == threshold
        assert entry["unknown"]["flag"] is (score > threshold)
        assert entry["unknown"]["source"] == "states"
    shown = desk("predict", TEXTS[0], "--unknown").out
    assert f"unknown: {'yes' if scores[0] > threshold else 'no'} (score {scores[0]:.3f}, threshold" in shown
    rows = desk("predict", "--input", "texts/train.csv", "--unknown", "--explain").rows
    assert list(rows[0])[-4:] == ["unknown", "unknown_score", "mass_first", "mass_second"]
    assert sum(row["unknown"] == "true" for row in rows) < len(rows) / 20
    assert scores[-1] > 1.2 * threshold  # two words; the training texts are sentences


def test_without_the_states_unknown_texts_are_flagged_as_transformers_and_the_config_alone_would(
    desk: Workspace, tmp_path: Path
) -> None:
    """Compares with four lines of transformers, as in docs/student.md."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = plain_student(desk, tmp_path, UNKNOWN)
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForSequenceClassification, AutoTokenizer))
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in TEXTS])
    scores = (-logits.logsumexp(dim=-1)).tolist()
    threshold = model.config.unknown_threshold
    result = desk("predict", *TEXTS, "--unknown", "--json", "--student", str(folder)).json
    for entry, score in zip(result, scores, strict=True):
        assert entry["unknown"]["score"] == pytest.approx(score, abs=1e-5)
        assert entry["unknown"]["threshold"] == threshold
        assert entry["unknown"]["flag"] is (score > threshold)
        assert entry["unknown"]["source"] == "logits"
    shown = desk("predict", TEXTS[0], "--unknown", "--student", str(folder)).out
    assert f"unknown: {'yes' if scores[0] > threshold else 'no'} (score {scores[0]:.3f}, threshold" in shown
    rows = desk("predict", "--input", "texts/train.csv", "--unknown", "--student", str(folder)).rows
    assert {row["unknown"] for row in rows} <= {"true", "false"}
    assert 0 < sum(row["unknown"] == "true" for row in rows) < len(rows) / 3


def test_a_damaged_or_foreign_file_of_states_is_refused(desk: Workspace, tmp_path: Path) -> None:
    """The folder has no marks, so that only the file itself shows the fault."""
    from safetensors import safe_open
    from safetensors.numpy import save_file

    folder = plain_student(desk, tmp_path)
    path = folder / UNKNOWN
    whole = path.read_bytes()
    with safe_open(path, framework="np") as file:
        about, tensors = json.loads(file.metadata()["amalgam"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def refusal() -> str:
        return desk.attempt("predict", TEXTS[0], "--unknown", "--student", str(folder)).err

    faults = {
        f"{UNKNOWN} belongs to other weights": (tensors, about | {"weights": "0" * 64}),
        f"{UNKNOWN} has the format 99": (tensors, about | {"format": "99"}),
        f"{UNKNOWN} is damaged: its content is not": (tensors | {"means": tensors["means"][:, 1:].copy()}, about),
    }
    for message, (content, changed) in faults.items():
        save_file(content, path, metadata={"amalgam": json.dumps(changed)})
        assert message in refusal()
    for content, changed in (
        (tensors | {"whiten": tensors["whiten"] * float("nan")}, about),
        (tensors, about | {"layer": "99"}),
        (tensors, about | {"weights": 1}),
        (tensors, []),
    ):
        save_file(content, path, metadata={"amalgam": json.dumps(changed)})
        assert f"error: {UNKNOWN} " in refusal()
    path.write_bytes(whole[: len(whole) // 2])
    assert f"{UNKNOWN} is damaged" in refusal()
    assert "delete it: then the score of the logits is used" in refusal()
    assert desk.attempt("predict", TEXTS[0], "--student", str(folder)).code == 0  # without --unknown it is not read
    path.write_bytes(whole)
    assert desk("predict", TEXTS[0], "--unknown", "--student", str(folder)).code == 0


@pytest.mark.parametrize(
    ("labels", "settings", "piece"),
    [
        (["a", "b"], {"problem_type": "multi_label_classification"}, "the student does multi_label_classification"),
        (["a"], {}, "the student has one output"),
    ],
)
def test_a_model_that_chooses_no_label_is_refused(
    desk: Workspace, tmp_path: Path, labels: list[str], settings: dict[str, str], piece: str
) -> None:
    save_tiny(tmp_path / "model", "bert", labels=labels, **settings)
    err = desk.refusal(2, "predict", TEXTS[0], "--student", str(tmp_path / "model"))
    assert piece in err
    assert "use transformers.pipeline" in err


def test_a_changed_file_of_states_is_found_by_the_mark(desk: Workspace, tmp_path: Path) -> None:
    shutil.copytree(desk.folder / "students/student", tmp_path / "student")
    with (tmp_path / "student" / UNKNOWN).open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\1\0")
    err = desk.refusal(2, "predict", TEXTS[0], "--student", str(tmp_path / "student"))
    assert f"the model is damaged: {UNKNOWN} (its content does not match its digest)" in err


def test_a_student_without_threshold_refuses_unknown(desk: Workspace, tmp_path: Path) -> None:
    config = plain_student(desk, tmp_path, UNKNOWN) / "config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "unknown_threshold"}))
    err = desk.refusal(2, "predict", TEXTS[0], "--unknown", "--student", str(config.parent))
    assert f"has no {UNKNOWN}, and its config.json no unknown_threshold" in err
    assert "`amalgam train-student`" in err


def test_a_label_that_two_teachers_share_counts_for_each(desk: Workspace, tmp_path: Path) -> None:
    shutil.copytree(desk.folder / "students/student", tmp_path / "student")
    rewrite_mark(tmp_path / "student", teachers={"one": ["banking", "law"], "other": ["law"]})
    [entry] = desk(
        "predict", TEXTS[1], "--explain", "--json", "--top", "99", "--student", str(tmp_path / "student")
    ).json
    shares = {label["label"]: label["probability"] for label in entry["labels"]}
    assert entry["mass"]["other"] == pytest.approx(shares["law"])
    assert entry["mass"]["one"] == pytest.approx(shares["law"] + shares["banking"])


@pytest.mark.parametrize("out", ["labels.parquet", "labels.csv"])
def test_a_file_keeps_its_order_and_every_row(
    desk: Workspace, right: dict[str, dict[str, float]], monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    import polars as pl

    monkeypatch.setattr(predict_module, "BLOCK_ROWS", 7)
    desk("predict", "--input", "texts/test.csv", "--id", "label", "--out", out, "--top", "2", "--explain", "--force")
    table = pl.read_parquet(desk.folder / out) if out.endswith("parquet") else pl.read_csv(desk.folder / out)
    rows = desk.texts("test")
    texts = [text for text, _ in rows]
    assert table.columns[:7] == ["row", "key", "id", "label", "probability", "label_2", "probability_2"]
    assert table.columns[7:] == ["mass_first", "mass_second"]
    keys = [text_key((text,)) for text in texts]
    assert table["key"].to_list() == (keys if out.endswith("parquet") else [key.hex() for key in keys])
    assert table["row"].to_list() == list(range(2, TEST + 2))
    assert table["id"].to_list() == [label for _, label in rows]
    assert table["label"].to_list() == [best(right[text]) for text in texts]
    assert table["probability"].to_list() == pytest.approx([max(right[text].values()) for text in texts], abs=1e-5)


def test_the_column_is_the_experiments_unless_another_is_named(workspace: Workspace) -> None:
    path = workspace.folder / "texts/test.csv"
    path.write_text(path.read_text().replace("text,", "headline,", 1))
    workspace.edit("corpus:", "corpus:\n  text: headline")
    assert len(workspace("predict", "--input", "texts/test.csv").rows) == TEST
    assert "fix: --text headline" in workspace.refusal(3, "predict", "--input", "texts/test.csv", "--text", "headlin")
    path.write_text(path.read_text().replace("headline,", "the: line,", 1))
    assert "fix: --text 'the: line'" in workspace.attempt("predict", "--input", "texts/test.csv", "--text", "line").err
    assert 'fix: set corpus.text: "the: line"' in workspace.attempt("plan", "corpus.text=line").err


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_every_kind_of_file_gives_the_same_predictions(desk: Workspace, tmp_path: Path, kind: str) -> None:
    rows = desk.texts("test")[:9]
    if kind == "txt":
        (tmp_path / "some.txt").write_text("\n\n".join(text for text, _ in rows) + "\n")
    else:
        write_texts(tmp_path / f"some.{kind}", rows)
    write_texts(tmp_path / "some.csv", rows)
    outputs, plain = (desk("predict", "--input", str(tmp_path / name)).rows for name in (f"some.{kind}", "some.csv"))
    assert [row["key"] for row in outputs] == [row["key"] for row in plain]
    assert [row["label"] for row in outputs] == [row["label"] for row in plain]


@pytest.mark.parametrize(("name", "content"), [("a.csv", "text\n"), ("a.csv", ""), ("a.jsonl", ""), ("a.txt", "\n")])
def test_a_day_without_texts_has_no_predictions(desk: Workspace, tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    printed = desk("predict", "--input", str(tmp_path / name), "--top", "2")
    desk("predict", "--input", str(tmp_path / name), "--out", "none.parquet", "--force")
    assert printed.out.splitlines() == ["row,key,id,label,probability,label_2,probability_2"]
    assert f"note: no rows in {name}" in printed.err
    assert pq.read_table(desk.folder / "none.parquet").shape == (0, 5)


def test_a_pipe_is_read_a_text_a_line(desk: Workspace, monkeypatch: pytest.MonkeyPatch, right: dict[str, Any]) -> None:
    (desk.folder / "lines").write_text("\n".join(TEXTS))
    with (desk.folder / "lines").open() as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        rows = desk("predict", "--input", "-").rows
    assert [row["label"] for row in rows] == [best(right[text]) for text in TEXTS]


def break_nothing(desk: Workspace) -> None:
    """The command alone is wrong."""


def blank(desk: Workspace) -> None:
    (desk.folder / "bad.csv").write_text('text\nfine\n" "\nalso fine\n')


def latin(desk: Workspace) -> None:
    (desk.folder / "bad.txt").write_bytes(b"fine\ncaf\xe9\n")


def wide(desk: Workspace) -> None:
    (desk.folder / "bad.txt").write_bytes("fine\nalso fine\n".encode("utf-16"))


def taken(desk: Workspace) -> None:
    (desk.folder / "taken.csv").write_text("mine")


def packed(desk: Workspace) -> None:
    (desk.folder / "packed.parquet.gz").touch()


def unmarked(desk: Workspace) -> None:
    shutil.copytree(desk.folder / "students/student", desk.folder / "bare", dirs_exist_ok=True)
    for name in MARKS:
        (desk.folder / "bare" / name).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("prepare", "arguments", "code", "piece"),
    [
        (break_nothing, [], 2, "--input texts.csv; for a pipe, --input -"),
        (break_nothing, ["a text", "--input", "texts/test.csv"], 2, "not both"),
        (break_nothing, ["corpus.on_bad_row=skip", "--input", "texts/test.csv"], 2, "out; --skip-bad-rows leaves"),
        (break_nothing, ["  "], 2, "empty"),
        (break_nothing, ["a text", "student.name=other"], 2, "--student students/other"),
        (break_nothing, ["texts/test.csv"], 2, "fix: amalgam predict --input texts/test.csv"),
        (break_nothing, ["texts/test.csv", "--out", "x.csv"], 2, "fix: amalgam predict --input texts/test.csv"),
        (break_nothing, ["texts/tests.csv"], 2, "texts/tests.csv looks like a file, and does not exist"),
        (break_nothing, ["-"], 2, "fix: amalgam predict --input -"),
        (break_nothing, ["a text", "--out", "x.csv"], 2, "--json > FILE"),
        (break_nothing, ["--input", "texts/test.csv", "--json"], 2, "--out FILE.parquet"),
        (taken, ["--input", "texts.csv"], 3, "fix: set --input FILE"),  # taken.csv is as like as its ending
        (break_nothing, ["--input", "texts/tests.csv.gz"], 3, "fix: did you mean --input texts/test.csv?"),
        (break_nothing, ["--input", "amalgam.yaml"], 3, ".csv"),
        (packed, ["--input", "packed.parquet.gz"], 3, "fix: run: gzip -dk packed.parquet.gz"),
        (break_nothing, ["--input", "texts/test.csv", "--text", "Text"], 3, "fix: --text text"),
        (break_nothing, ["--input", "texts/test.csv", "--out", "x.xlsx"], 2, ".parquet or .csv"),
        (break_nothing, ["--input", "texts/test.csv", "--out", "no/x.csv"], 2, "mkdir -p no"),
        (break_nothing, ["a text", "--student", "nowhere"], 2, "nowhere"),
        (break_nothing, ["a text", "--student", "student"], 2, "such as students/student, not student"),
        (break_nothing, ["a text", "--student", "texts"], 2, "config.json"),
        (break_nothing, ["a text", "-c", "other.yaml"], 2, "amalgam init"),
        (blank, ["--input", "bad.csv"], 3, "bad.csv row 3, field text: empty"),
        (latin, ["--input", "bad.txt"], 3, "bad.txt line 2: not UTF-8"),
        (wide, ["--input", "bad.txt"], 3, "iconv -f utf-16 -t utf-8 bad.txt"),
        (wide, ["--input", "bad.txt", "--skip-bad-rows"], 3, "bad.txt is UTF-16"),
        (taken, ["--input", "texts/test.csv", "--out", "taken.csv"], 2, "--force"),
        (break_nothing, ["--input", "texts/test.csv", "--out", "./texts/test.csv", "--force"], 2, "is the input"),
        (break_nothing, ["caf\udce9"], 2, "a text is not UTF-8"),
        (unmarked, ["a text", "--explain", "--student", "bare"], 2, "needs a student that amalgam trained"),
    ],
)
def test_unusable_arguments_are_refused_with_a_fix(
    desk: Workspace, prepare: Callable[[Workspace], None], arguments: list[str], code: int, piece: str
) -> None:
    prepare(desk)
    result = desk.attempt("predict", *arguments)
    assert (result.code, piece in result.err, result.out) == (code, True, ""), result.err


def test_a_long_text_that_ends_as_a_file_name_is_a_text(desk: Workspace) -> None:
    assert len(desk("predict", "a long text " * 100 + "notes.txt").rows) == 1


def test_bad_rows_can_be_left_out_and_are_counted(desk: Workspace) -> None:
    blank(desk)
    result = desk("predict", "--input", "bad.csv", "--skip-bad-rows")
    assert [row["row"] for row in result.rows] == ["2", "4"]
    assert "rows left out: 1 empty" in result.err


def test_a_text_that_is_probably_missing_is_named(desk: Workspace) -> None:
    write_texts(desk.folder / "gaps.csv", [("nan", ""), ("a nurse", ""), ("NULL", ""), ("nan", "")])
    result = desk("predict", "--input", "gaps.csv")
    assert len(result.rows) == 4
    assert "note: 2 rows have the text nan (gaps.csv row 2 is the first): if it is a missing one" in result.err
    assert "note: 1 row has the text NULL (gaps.csv row 4): if it is a missing one" in result.err


def test_a_failure_leaves_the_old_file_and_no_other(desk: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    taken(desk)
    pipe = io.TextIOWrapper(io.BytesIO(b"fine\ncaf\xe9\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", pipe)
    assert desk.attempt("predict", "--input", "-", "--out", "taken.csv", "--force").code == 3
    assert (desk.folder / "taken.csv").read_text() == "mine"
    assert not list(desk.folder.glob(".tmp-*"))


PIPED = """\
import os
import sys

from amalgam.cli import main

os.dup2(os.open("pipe", os.O_RDWR), 0)  # the pipe never ends
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_wait_for_a_pipe_and_leaves_no_file(
    desk: Workspace, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    (tmp_path / "piped.py").write_text(PIPED)
    os.mkfifo(tmp_path / "pipe")
    student = ["--student", str(desk.folder / "students/student")]
    words = ["predict", "--input", "-", "--out", "labels.csv", *student]
    process = Forked(words, tmp_path, quiet_environment(), str(tmp_path / "piped.py"))
    until(lambda: list(tmp_path.glob(".tmp-*")), process)
    time.sleep(0.2)  # for the first read
    process.send_signal(number)
    result = finish(process)
    assert result.code == code, result.err
    assert f"stopped by {number.name}; no output was written" in result.err
    assert "fix: run the same command again, which starts over" in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "piped.py"]


def test_a_folder_as_input_and_an_export_as_student_are_named_as_such(desk: Workspace) -> None:
    refused = desk.attempt("predict", "--input", "texts")
    assert (refused.code, "the input is a folder, not a file" in refused.err) == (3, True), refused.err
    assert "such as texts/test.csv" in refused.err
    assert (
        "error: . has no supported file type" in desk.attempt("predict", "--input", "texts/test.csv", "--out", ".").err
    )
    for form, file, use in (("onnx", "model.onnx", "`amalgam serve`"), ("numpy", "arrays.safetensors", "classify.py")):
        export = desk.folder / f"students/student-{form}"
        export.mkdir()
        for name in ("config.json", "export.json", file):
            (export / name).write_text("{}")
        refused = desk.attempt("predict", "a text", "--student", f"students/student-{form}")
        assert (refused.code, "this folder is an export" in refused.err) == (2, True), refused.err
        assert "models in it: student\n" in desk.attempt("predict", "--student", "students", "a text").err
        assert "name the student, such as students/student; " in refused.err
        assert use in refused.err
        shutil.rmtree(export)


def test_a_signal_between_two_blocks_of_a_file_ends_without_output(
    desk: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Signalled(Student):
        def __call__(self, texts: Sequence[tuple[str, ...]]) -> Predictions:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().__call__(texts)

    monkeypatch.setattr("amalgam.stages.app.predict.Student", Signalled)
    result = desk.attempt("predict", "--input", "texts/test.csv", "--out", "stopped.csv")
    assert (result.code, "stopped by SIGTERM; no output was written" in result.err) == (143, True), result.err
    assert not (desk.folder / "stopped.csv").exists()


def test_a_student_of_an_older_amalgam_gets_its_teachers_labels_without_training(workspace: Workspace) -> None:
    path = workspace.folder / "students/student" / METADATA
    mark = json.loads(path.read_text())
    path.write_text(json.dumps({"fingerprint": mark["fingerprint"]}))
    path.with_name(COPY_OF_MARK).unlink()
    weights = (workspace.folder / "students/student/model.safetensors").stat().st_ino
    workspace("train-student")
    assert json.loads(path.read_text()) == mark
    assert (workspace.folder / "students/student/model.safetensors").stat().st_ino == weights


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--input", "texts/test.csv", "--text", ""), "--text has no name of a column"),
        (("--input", "texts/test.csv", *("--text", "a", "--text", "b", "--text", "c")), "--text is given 3 times"),
        (("--input", "-", "--text", "a"), "a pipe has no columns"),
        (("--input", "-", "--text", "a", "--text", "b"), "a pipe has no columns"),
        (("--input", "-", "--id", "number"), "a pipe has no columns"),
        (("--input", "lines.txt", "--id", "number"), "a .txt file has no columns"),
    ],
)
@pytest.mark.parametrize("learned", [["text"], ["text", "second"]])
def test_columns_that_the_input_cannot_have_are_refused(
    desk: Workspace, learned: list[str], words: Sequence[str], message: str
) -> None:
    student = desk.folder / "students/other"
    shutil.copytree(desk.folder / "students/student", student)
    rewrite_mark(student, text=learned)
    refused = desk.attempt("predict", "--student", "students/other", *words)
    shutil.rmtree(student)
    assert (refused.code, refused.err.partition("\n")[0]) == (2, f"error: {message}"), refused.err
    assert_three_lines(refused.err)


def test_a_home_folder_in_a_path_is_that_of_the_user(
    desk: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "student").symlink_to(desk.folder / "students/student")
    (tmp_path / "lines.txt").write_text("the onion\n")
    desk("predict", "--input", "~/lines.txt", "--student", "~/student", "--out=~/joined.csv")
    desk("predict", "--input=~/lines.txt", "--student=~/student", "--out", "~/again.csv")
    assert (tmp_path / "joined.csv").read_text() == (tmp_path / "again.csv").read_text()
    assert not (desk.folder / "~").exists()
    entries = desk("predict", "--json", "~/1", "--", "--out=~/2", "--out", "~/3").json
    assert [entry["text"] for entry in entries] == ["~/1", "--out=~/2", "--out", "~/3"]


def write_pairs(workspace: Workspace) -> None:
    """Give each text of the experiment a second one."""
    for part in ("train", "test"):
        rows = [(text, text.upper(), label) for text, label in workspace.texts(part)]
        write_csv(workspace.folder / f"texts/{part}.csv", ("text", "the second", "label"), rows)
    workspace.edit("corpus:", "corpus:\n  text: [text, the second]")


def test_a_student_of_pairs_refuses_single_texts(fresh: Workspace) -> None:
    write_pairs(fresh)
    fresh("train-student")
    file = ["--input", "texts/test.csv"]
    assert len(fresh("predict", *file).rows) == TEST
    fix = "fix: name both columns of a file: amalgam predict --input FILE --text text --text 'the second'"
    for arguments in (["a text"], [*file, "--text", "text"], [*file, "--student", "students/student"]):
        refused = fresh.attempt("predict", *arguments)
        assert (refused.code, refused.out) == (2, "")
        assert "the second one is missing: the second" in refused.err
        assert fix in refused.err
    experiment = Experiment.load(fresh.config, quiet=True)
    with pytest.raises(ExperimentError, match="pairs of texts"):
        experiment.predict(["a text"])
    assert experiment.predict([("a text", "its second")])["text", "text_2"].rows() == [("a text", "its second")]


def test_a_student_of_single_texts_refuses_pairs(workspace: Workspace) -> None:
    refused = workspace.attempt("predict", "--input", "texts/test.csv", "--text", "text", "--text", "label")
    assert (refused.code, refused.out) == (2, "")
    assert "the student classifies single texts (text), not pairs of texts" in refused.err
    assert "fix: name one column: --text text" in refused.err
    with pytest.raises(ExperimentError, match="single texts"):
        Experiment.load(workspace.config, quiet=True).predict([("a text", "its second")])


def test_the_student_is_named_and_how_it_differs_from_the_experiment(workspace: Workspace) -> None:
    metadata = json.loads((workspace.folder / "students/student" / METADATA).read_text())
    result = workspace("predict", TEXTS[0], "--json")
    assert f"student: students/student (muka-soft, fingerprint {metadata['fingerprint']})" in result.err
    assert "note:" not in result.err
    assert [entry["student"] for entry in result.json] == [metadata["fingerprint"]]
    workspace.edit("epochs: 1", "epochs: 2")
    assert "student.epochs 1 -> 2" in workspace("predict", TEXTS[0]).err
    assert "student.epochs" not in workspace("predict", TEXTS[0], "--student", "students/student").err
    workspace.edit("mode: soft", "mode: hard\n  temperature: 0.3")
    workspace.edit("batch_size: 32", "batch_size: 16")
    assert "method muka-soft -> muka-hard; " in workspace("predict", TEXTS[0]).err
    changed = ["targets.temperature 0.2 -> 0.3", "student.epochs 1 -> 2", "student.batch_size 32 -> 16"]
    assert all(change in workspace("predict", TEXTS[0]).err for change in changed)
    workspace.edit("mode: hard\n  temperature: 0.3", "mode: soft")
    workspace.edit("batch_size: 16", "batch_size: 32")
    workspace.edit("  epochs: 2\n", "")
    differs = workspace("predict", TEXTS[0]).err
    assert "training: student.epochs 1 -> auto. `amalgam run` updates it" in differs
    workspace("train-student")
    assert "note:" not in workspace("predict", TEXTS[0]).err
    workspace.edit("    model: ./models/second", "    model: ./models/second\n    rename: {law: laws}")
    workspace.edit("encoder: ./models/encoder", "encoder: ./models/other")
    assert "training: student.encoder; teachers.second. `amalgam run`" in workspace("predict", TEXTS[0]).err
    assert workspace("predict", TEXTS[0], "--quiet").err == ""


def test_a_folder_is_no_output_file(desk: Workspace) -> None:
    (desk.folder / "out.csv").mkdir()
    refused = desk.attempt("predict", "--input", "texts/test.csv", "--out", "out.csv", "--force")
    assert (refused.code, "out.csv is a folder" in refused.err) == (2, True)
