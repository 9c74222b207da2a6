"""Wrong words for the commands of results and of the workspace: what, where and a fix, and nothing is written."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate.tracking
import pytest

from amalgam.cli import main
from amalgam.data.parquet import predictions
from amalgam.stages.app.predict import csv_writer
from amalgam.stages.report.report_json import FORMAT
from amalgam.tests.test_errors import on_a_full_device
from amalgam.tests.workspaces import Workspace

Change = Callable[[Workspace], object]
PART_OF_REPORT = f'{{"amalgam_report": {FORMAT}, "evaluation": null}}'


def nothing(_: Workspace) -> None: ...


def write(path: str, content: str | bytes) -> Change:
    def change(workspace: Workspace) -> None:
        place = workspace.folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def delete(path: str) -> Change:
    return lambda workspace: shutil.rmtree(workspace.folder / path)


def folder_in_place_of(path: str) -> Change:
    def change(workspace: Workspace) -> None:
        (workspace.folder / path).unlink()
        (workspace.folder / path).mkdir()

    return change


def fifo(name: str) -> Change:
    return lambda workspace: os.mkfifo(workspace.folder / name)


def dangling(name: str) -> Change:
    return lambda workspace: (workspace.folder / name).symlink_to("nosuch.csv")


def edited(*path: str, value: object) -> Change:
    """Sets the field behind the keys of reports/student.json."""

    def change(workspace: Workspace) -> None:
        file = workspace.folder / "reports/student.json"
        content = part = json.loads(file.read_text())
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value
        file.write_text(json.dumps(content))

    return change


def to_label(content: str) -> Change:
    return write("reports/x.to-label.csv", content)


LABELLED = "run corpus.test=reports/x.to-label.csv corpus.label=label"
FILE = "execution.workspace=amalgam.yaml"

WRONG: list[tuple[Change, str, int, str]] = [
    # texts to label, and reports
    (to_label("row,text,label\n1,a text,\n"), LABELLED, 3, "x.to-label.csv row 2, field label: empty"),
    (to_label("row,text,label\n1,a text,nolabel\n"), LABELLED, 3, "x.to-label.csv row 2; the student's labels are"),
    (to_label("row,text,label\n"), LABELLED, 3, "no rows in x.to-label.csv"),
    (to_label("row|text|label\n1|a|law\n"), LABELLED, 3, "commas instead of"),
    (nothing, "report --fail-under nan", 2, "--fail-under"),
    (nothing, "report --fail-if-worse-than \x1b[31m", 2, "name one of ensemble"),
    (nothing, "report student student", 2, "student is named twice"),
    (nothing, "report student student.seed=1", 2, "overrides do not change reports"),
    (nothing, "report nosuch", 2, "existing: student"),
    (nothing, "report nosuch", 2, "fix: name an existing one, or run `amalgam report student.name=nosuch` first"),
    (nothing, "report student nosuch", 2, "there is no report of nosuch"),
    (nothing, "report a b --fail-under=0.5", 2, "a comparison takes none of"),
    (write("reports/student.json", "{}"), "report student other", 3, "student.json is not a report"),
    (write("reports/student.json", PART_OF_REPORT), "report student", 3, "the field name is missing or was edited"),
    (edited("evaluation", "n", value="many"), "report student", 3, "field evaluation is missing or was edited"),
    (edited("evaluation", "system", value="x"), "report student --json", 3, "where: reports/student.json"),
    (edited("student_quality", "right_hex", value="x"), "report student other", 3, "student.json is not a report"),
    (edited("verdict", "next", value=None), "report student", 3, "fix: run `amalgam report student.name=student`"),
    (write("reports/other.json", "[1,2"), "report other student", 3, "other.json cannot be read as a report"),
    # verify and gc
    (nothing, f"verify {FILE}", 2, "amalgam.yaml is a file, not a folder"),
    (nothing, f"verify --repair --json {FILE}", 2, "amalgam.yaml is a file, not a folder"),
    (nothing, "gc --compact --unused", 2, "--compact packs units, and --unused lists results"),
    (nothing, f"gc --yes {FILE}", 2, "amalgam.yaml is a file, not a folder"),
    (nothing, f"status {FILE}", 2, "amalgam.yaml is a file, not a folder"),
    (nothing, "verify students/student", 2, "write field=value"),
    (nothing, "verify --repair execution.workspace=texts", 2, "neither empty nor a workspace"),
    (nothing, "gc --json --yes execution.workspace=texts", 2, "neither empty nor a workspace"),
    (delete("artifacts/cache-teachers"), "gc --yes --unused", 1, "HEAD.json names a result of cache-teachers"),
    (folder_in_place_of("artifacts/WORKSPACE.json"), "gc --yes", 1, "artifacts/WORKSPACE.json"),
    (write("artifacts/WORKSPACE.json", "{}"), "gc --yes execution.workspace=s3://", 2, "BUCKET/PREFIX"),
    # export
    (nothing, "export --onnx --out .", 2, "workspace exists and is no export"),
    (nothing, "export --onnx --out /", 2, "/ exists and is no export"),
    (nothing, "export --onnx --out amalgam.yaml/x", 2, "amalgam.yaml is a file"),
    (nothing, "export --onnx --out students/student --force", 2, "is no export"),
    (nothing, "export --onnx --student models/encoder --out x", 2, "no classification head"),
    (nothing, "export --onnx --student texts", 2, "no config.json"),
    (write("models/a;b/config.json", "{}"), "serve --student models/a;b", 2, "serve --student 'models/a;b-onnx'"),
    # push
    (nothing, "push ../../x/y", 2, "is no repository name"),
    (nothing, "push me/x --student models/encoder", 2, "BertModel is no classifier"),
    (nothing, "push me/x --license nosuch", 2, "no licence identifier"),
    (nothing, "push me/x --student texts", 2, "no config.json"),
    (nothing, "plan teachers.0.model=./models", 2, "models in it: first, second, encoder (no classifier)"),
    (nothing, "push me/x -c nosuch.yaml", 2, "nosuch.yaml does not exist"),
    (nothing, r"plan teachers.0.model=.\models\first", 2, "fix: write / between folders: ./models/first"),
    (nothing, "plan student.encoder=first", 0, "it is taken as a Hub id: did you mean teacher:first?"),
    # the device (no Linux machine has mps)
    (nothing, "run --force execution.device=mps", 2, "set execution.device=auto"),
    (nothing, "plan student.epochs=2 execution.device=mps", 2, "execution.device is mps"),
    (nothing, "doctor execution.device=mps", 2, "execution.device"),
    # an encoder with fewer layers, and a teacher without head
    (nothing, "plan student.layers=99", 2, "student.layers: 99 is more than the encoder has"),
    (nothing, "plan teachers.0.model=./models/encoder teachers.0.labels=[a,b,c]", 2, "no classification head"),
    (nothing, "run teachers.0.model=./models/encoder teachers.0.labels=[a,b,c]", 2, "no classification head"),
    # addresses without two slashes
    (nothing, "plan execution.workspace=s3:/bucket/x", 2, "did you mean s3://bucket/x?"),
    (nothing, "plan execution.workspace=s3:bucket/x", 2, "did you mean s3://bucket/x?"),
    (nothing, "plan corpus.train=hf:/datasets/a/b.csv", 3, "did you mean hf://datasets/a/b.csv?"),
    (nothing, "plan corpus.train=hf://datasets/a/b", 3, "hf://datasets/a/b does not name a file that can be read"),
    (nothing, "plan corpus.train=hf://a/b/c.csv", 3, "fix: write hf://datasets/OWNER/NAME/PATH"),
    (write("s3:/x", ""), "plan execution.workspace=s3:/bucket/x", 2, "did you mean s3://bucket/x?"),
    (nothing, "plan execution.workspace=https://x/y", 2, "fix: name a folder, or s3:// or gs:// or az://"),
    (nothing, "plan execution.workspace=S3://x/y", 2, "fix: name a folder, or s3://\n"),
    (nothing, "plan execution.workspace=az://c/p", 1, "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY,"),
    # slips
    (nothing, "plan teachers.5.model=x", 2, "teachers has 2, from 0 on"),
    (nothing, "plan student.epochs=3,4", 2, "amalgam sweep student.epochs=3,4"),
    (nothing, "plan teachers.0.rename={law:laws}", 2, "rename.law:laws: a space is missing after the colon"),
    (nothing, "plan student={epochs:3}", 2, "student.epochs:3: a space is missing after the colon"),
    (nothing, "plan -c amalgam.yml", 2, "did you mean -c amalgam.yaml?"),
    (nothing, "plan -c ok", 2, "did you mean -c amalgam.yaml?"),
    (nothing, "run -c .", 2, "error: workspace is a folder, not an experiment file"),
    (fifo("p.csv"), "plan corpus.train=p.csv", 3, "p.csv is a pipe or a device, not a file"),
    (fifo("p.yaml"), "plan -c p.yaml", 2, "p.yaml is a pipe or a device, not a file"),
    (nothing, "plan -c texts", 2, "run `amalgam init texts`"),
    (write("other/my one.yaml", ""), "plan -c other", 2, "did you mean -c 'other/my one.yaml'?"),
    (nothing, "plan -c texts/train.csv", 2, "is it an experiment file?"),
    (nothing, "plan corpus.text=[a,b,c]", 2, "corpus.text: takes at most 2 (given 3)"),
    (nothing, "plan corpus.train=[]", 2, "corpus.train: takes at least 1 (given 0)"),
    (write("a.parquet", b"PAR1 cut"), "predict --input a.parquet", 3, "workspace/a.parquet\n"),
    (nothing, "plan corpus.id=null", 2, "corpus.id: is null, not text: leave it out, or write auto"),
    (nothing, "plan corpus.on_bad_row=null", 2, "corpus.on_bad_row: is null; must be one of 'error' or 'skip'"),
    (nothing, "plan execution.device=gpu", 2, "did you mean 'cuda'?"),
    (nothing, "predict --input texts/tarin.csv", 3, "did you mean --input texts/train.csv?"),
    (nothing, "plan student.epochs 3", 2, "write student.epochs=VALUE"),
    (nothing, "predict --texts a", 2, "did you mean --text?"),
    (nothing, "--versoin", 2, "did you mean --version?"),
    (nothing, "run train-student", 2, "run `amalgam train-student`, which first runs"),
    (nothing, "run train_student student.epochs=2", 2, "run `amalgam train-student`, which first runs"),
    (nothing, "run --stage targets", 2, "run the command of that stage"),
    (nothing, "run --set student.epochs=3", 2, "leave it out: write student.epochs=3"),
    (nothing, "my.yaml", 2, "write amalgam run -c my.yaml"),
    (nothing, "evaluate", 2, "did you mean report?"),
    (nothing, "check", 2, "did you mean plan or doctor?"),
    (nothing, "predict -i a.csv", 2, "did you mean --id or --input?"),
    (nothing, "predict --in a.csv", 2, "did you mean --input?"),
    (nothing, "predict --model students/student a", 2, "did you mean --student?"),
    (nothing, "report --fail-under 101%", 2, "no accuracy between 0 and 1"),
    (nothing, "report --fail-under good", 2, "write 0.8 or 80%"),
    # rows, files and settings of predict
    (write("a.csv", b"text\ncaf\xe9\n \n"), "predict --input a.csv --skip-bad-rows", 3, "1 not UTF-8, 1 empty"),
    (write("a.csv", b"text\ncaf\xe9\n \n"), "predict --input a.csv --skip-bad-rows", 3, "fix: not UTF-8: re-encode"),
    (write("a.txt", b"caf\xe9\n"), "predict --input a.txt", 3, "iconv -f cp1252 -t utf-8 a.txt > utf8-a.txt"),
    (write("a.txt", "ab" * (1 << 19) + "\n" + "a " * (1 << 20)), "predict --input a.txt", 3, "a.txt line 2: too long"),
    (fifo("f.csv"), "predict --input f.csv", 3, "fix: --input - < f.csv"),
    (nothing, "predict --input s3://b/z.csv", 3, "predict reads files, not addresses"),
    (dangling("d.csv"), "predict --input d.csv", 3, "fix: set --input FILE"),
    (nothing, "predict student.name=v2 --input texts/test.csv", 2, "fix: write --student students/v2"),
    (nothing, "predict student.name=v2", 2, "fix: write --student students/v2"),
    (nothing, "predict cache.seed=1 --input texts/test.csv", 2, "fix: leave it out\n"),
    # --json
    (nothing, "doctor --json -c nosuch.yaml", 2, "nosuch.yaml does not exist"),
    (nothing, "explain --json nosuch", 2, "name one of generate"),
    (nothing, "audit --json cache.passes=1", 2, "not in the cache"),
    (nothing, "predict hello --id number", 2, "--id is for texts that come from a file"),
    (nothing, "predict --json --input texts/test.csv", 2, "--json is for texts that are typed"),
    (nothing, "sweep --json student.name=a,b", 2, "give student.name one value"),
    (nothing, "plan --json nosuch.field=1", 2, "unknown key"),
]


@pytest.mark.parametrize(("change", "line", "code", "piece"), WRONG, ids=[f"{row[1]}-{row[3]}" for row in WRONG])
def test_a_wrong_input_ends_with_its_name(
    request: pytest.FixtureRequest, change: Change, line: str, code: int, piece: str
) -> None:
    workspace: Workspace = request.getfixturevalue("desk" if change is nothing else "workspace")
    change(workspace)
    before = {path for path in workspace.folder.rglob("*") if "artifacts" not in path.parts}
    result = workspace.attempt(*line.split(" "))
    assert result.code == code, result.err
    assert piece in result.err + result.out
    assert "Traceback" not in result.err
    assert ".tmp-" not in result.err
    assert before == {path for path in workspace.folder.rglob("*") if "artifacts" not in path.parts}


PRINTING = ["--help", "plan", "plan --json", "plan --tree", "status", "verify", "gc", "audit", "explain report"]
PRINTING += ["methods", "schema", "doctor", "push me/x", "push me/x --card"]


@on_a_full_device
@pytest.mark.parametrize("line", PRINTING)
def test_no_command_hides_that_its_result_cannot_be_printed(
    built: Workspace, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(built.folder)
    monkeypatch.setattr("sys.argv", ["amalgam", *line.split(" ")])
    full = Path("/dev/full").open("w")  # noqa: SIM115 - closing it fails, too
    try:
        with contextlib.redirect_stdout(full), pytest.raises(SystemExit) as ended:
            main()
    finally:
        with contextlib.suppress(OSError):
            full.close()
    assert ended.value.code == 1
    assert "No space left" in capsys.readouterr().err


def test_a_forced_run_on_a_missing_device_keeps_the_results(workspace: Workspace) -> None:
    workspace("run")
    assert workspace.attempt("run", "--force", "execution.device=mps").code == 2
    assert not workspace.stale()
    workspace("run", "execution.device=mps")  # nothing runs, so nothing needs the device


def test_a_missing_engine_or_tracker_is_named_before_anything_runs(
    fresh: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [])
    for override, what, fix in (
        ("execution.engine=ray", "ray is not installed", "pip install 'amalgam-distill[ray]'"),
        ("execution.trackers=[wandb]", "the tracker wandb is not installed", "pip install wandb"),
    ):
        for command in ("plan", "doctor", "run", "train-student", "sweep student.seed=0,1"):
            refused = fresh.attempt(*command.split(" "), override)
            output = refused.out + refused.err
            assert (refused.code, what in output, fix in output) == (2, True, True), (command, output)
    assert not fresh.artifacts.exists()


def test_a_stage_that_trains_nothing_needs_no_tracker(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [])
    workspace("read-corpus", "execution.trackers=[wandb]")
    workspace("run")
    monkeypatch.setitem(sys.modules, "ray", None)
    workspace("run", "execution.trackers=[wandb]", "execution.engine=ray")


def test_a_short_write_to_an_unbuffered_output_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """With PYTHONUNBUFFERED, stdout has no buffer, and a disk with little space takes a part."""
    written = bytearray()

    class Short(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            taken = bytes(data)[:100]
            written.extend(taken)
            return len(taken)

    stdout = io.TextIOWrapper(Short(), "utf-8", write_through=True)  # type: ignore[type-var]  # as Python makes it
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "argv", ["amalgam", "schema"])
    with contextlib.suppress(SystemExit):
        main()
    assert json.loads(written)["title"]


def test_an_unbuffered_output_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(os.devnull).open("wb", buffering=0) as raw, io.TextIOWrapper(raw, write_through=True) as stdout:
        raw.name = "<stdout>"  # as Python sets it
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "argv", ["amalgam", "--version"])
        with contextlib.suppress(SystemExit):
            main()
        assert sys.stdout is not stdout
        assert sys.stdout.name == "<stdout>"


def test_predictions_are_printed_in_utf_8_in_any_locale() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, "latin-1")
    csv_writer(file, predictions(1, []))([[1], [b"a"], [None], ["日本"], [0.5]])
    file.flush()
    assert "日本" in raw.getvalue().decode()


def test_plan_names_a_revision_of_the_encoder_of_a_teacher(workspace: Workspace) -> None:
    notes = workspace("plan", "student.encoder=teacher:first", "student.revision=main", "--json").json["notes"]
    assert "revision: main has no effect, because student.encoder is that of teacher first" in notes
