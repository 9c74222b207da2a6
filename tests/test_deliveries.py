"""Delivered folders and pages: damage is found and mended, and a user's own files stay."""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amalgam.pipeline.storage.paths import MOST_BYTES
from amalgam.stages.common import deliveries
from amalgam.stages.common.deliveries import EXPORT, MARKS, Mark, read_mark, replace_folder, write_mark, written_files
from amalgam.stages.report.publish import publish_texts
from amalgam.tests.workspaces import Workspace, age, flip_bit, rewrite_mark

Change = Callable[[Path], object]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, Change] = {"flip": flip_bit, "cut": cut, "delete": Path.unlink}
DELIVERED = ("model.safetensors", "config.json", "tokenizer.json", "unknown.safetensors")


def student(workspace: Workspace) -> Path:
    return workspace.folder / "students/student"


def contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and "students" in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def damaged(workspace: Workspace, *options: str) -> dict[str, dict[str, Any]]:
    return {row["path"]: row for row in workspace.attempt("verify", "--json", *options).json["damaged"]}


# ---- students


@pytest.mark.parametrize(("how", "name"), [*zip(DAMAGES, DELIVERED, strict=False), ("flip", DELIVERED[-1])])
def test_a_damaged_student_is_found_by_verify_and_mended_by_run(workspace: Workspace, how: str, name: str) -> None:
    path = student(workspace) / name
    before = path.read_bytes()
    DAMAGES[how](path)
    result = workspace.attempt("verify")
    assert result.code == 1
    assert f"students/student/{name}" in result.out
    assert "copied" in result.out
    assert "quarantine" not in result.err  # nothing is there
    err = workspace("run").err
    assert f"students/student/{name}" in err
    assert "train-student: reused" in err
    assert path.read_bytes() == before
    assert damaged(workspace) == {}


def test_verify_finds_damage_that_keeps_size_and_time(workspace: Workspace) -> None:
    path = student(workspace) / "model.safetensors"
    workspace("run")
    status = path.stat()
    flip_bit(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert list(damaged(workspace)) == ["students/student/model.safetensors"]
    flip_bit(next(workspace.artifacts.rglob("build-targets/*/*/*.parquet")))
    assert "`amalgam run student.seed=0`, which recomputes" in workspace.attempt("verify", "student.seed=0").err


def test_verify_repair_mends_a_student_from_the_store(workspace: Workspace) -> None:
    path = student(workspace) / "model.safetensors"
    before = path.read_bytes()
    flip_bit(path)
    changed = path.read_bytes()
    [row] = damaged(workspace, "--repair").values()
    assert row["repair"] == "copied from the workspace"
    assert path.read_bytes() == before
    assert workspace("verify").code == 0
    [kept] = (workspace.artifacts / "quarantine").glob("*-model.safetensors")
    assert kept.read_bytes() == changed


def test_a_student_that_the_store_no_longer_has_is_damage_without_repair(workspace: Workspace) -> None:
    workspace("run", "student.name=other", "student.seed=5")
    shutil.rmtree(workspace.artifacts / "train-student")
    flip_bit(student(workspace) / "model.safetensors")
    result = workspace.attempt("verify", "--repair", "--json")
    assert result.code == 1
    [row] = [row for row in result.json["damaged"] if row["path"].startswith("students/student/")]
    assert not row["mended"]


@pytest.mark.parametrize("command", [("predict", "a text"), ("push", "me/student")])
def test_a_damaged_student_is_not_used(workspace: Workspace, command: tuple[str, ...]) -> None:
    flip_bit(student(workspace) / "model.safetensors")
    err = workspace.refusal(2, *command)
    assert "model.safetensors" in err
    assert "amalgam verify --repair" in err


@pytest.mark.parametrize(("how", "name"), [("flip", MARKS[0]), ("flip", MARKS[1]), ("delete", MARKS[0])])
def test_a_damaged_mark_is_restored_from_its_copy(workspace: Workspace, how: str, name: str) -> None:
    before = contents(workspace.folder)
    DAMAGES[how](student(workspace) / name)
    assert list(damaged(workspace)) == [f"students/student/{name}"]
    workspace("run")
    assert contents(workspace.folder) == before
    DAMAGES[how](student(workspace) / name)
    workspace("verify", "--repair")
    assert contents(workspace.folder) == before


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def enlarge(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(MOST_BYTES + 1)


UNREADABLE: dict[str, Change] = {"flip": flip_bit, "pipe": pipe, "link": link, "large": enlarge}


@pytest.mark.parametrize("how", UNREADABLE)
def test_without_mark_and_copy_a_folder_with_the_files_of_the_workspace_is_marked_again(
    workspace: Workspace, how: str
) -> None:
    before = contents(workspace.folder)
    (student(workspace) / "mine.txt").write_text("mine")
    for name in MARKS:
        UNREADABLE[how](student(workspace) / name)
    row = damaged(workspace)["students/student/.amalgam.json"]
    assert row["command"] == "amalgam run"
    assert "the files are those of the workspace" in row["repair"]
    result = workspace("run")
    assert ".amalgam.json was damaged" in result.err
    assert "train-student: reused" in result.err
    assert (student(workspace) / "mine.txt").read_text() == "mine"
    (student(workspace) / "mine.txt").unlink()
    assert contents(workspace.folder) == before
    assert damaged(workspace) == {}


@pytest.mark.parametrize("how", UNREADABLE)
def test_without_mark_and_copy_a_folder_with_other_files_is_not_replaced(workspace: Workspace, how: str) -> None:
    for name in (*MARKS, "config.json"):
        UNREADABLE[how](student(workspace) / name)
    err = workspace.refusal(2, "run")
    assert "students/student" in err
    assert "move it away" in err
    assert "move students/student away" in damaged(workspace)["students/student/.amalgam.json"]["repair"]


@pytest.mark.parametrize("how", UNREADABLE)
def test_a_student_whose_mark_and_copy_are_damaged_is_not_used(workspace: Workspace, how: str) -> None:
    UNREADABLE[how](student(workspace) / ".amalgam.json")
    assert workspace("predict", "the onion was fried").out  # the copy has the digests
    UNREADABLE[how](student(workspace) / ".amalgam.copy.json")
    err = workspace.refusal(2, "predict", "the onion was fried")
    assert "damaged .amalgam.json" in err
    assert "amalgam run" in err


def test_a_mark_that_names_files_outside_is_damaged(workspace: Workspace) -> None:
    from amalgam.pipeline.storage.small_files import signed

    (workspace.folder / "mine.txt").write_text("mine")
    for name in (".amalgam.json", ".amalgam.copy.json"):
        path = student(workspace) / name
        mark = json.loads(path.read_text())
        mark.pop("sha256")
        mark["files"]["../../mine.txt"] = {"bytes": 1, "sha256": "0" * 64, "stored": "../../mine.txt"}
        path.write_bytes(signed(mark))
    for words, code in ((("verify",), 1), (("verify", "--repair"), 1), (("run",), 0), (("verify",), 0)):
        assert workspace.attempt(*words).code == code
        assert (workspace.folder / "mine.txt").read_text() == "mine"


def test_verify_repair_mends_the_store_from_a_delivered_student(workspace: Workspace) -> None:
    [path] = workspace.artifacts.glob("train-student/*/*/model.safetensors")
    before = path.read_bytes()
    for command in ((), ("verify",)):  # also after a command has quarantined the file
        flip_bit(path)
        assert not command or workspace.attempt(*command).code == 1
        [row] = damaged(workspace, "--repair").values()
        assert (row["repair"], row["mended"]) == ("copied from the delivered folder", True)
        assert path.read_bytes() == before
    assert "train-student: reused" in workspace("run").err


def test_verify_keeps_an_earlier_result_that_a_delivered_student_can_mend(workspace: Workspace) -> None:
    """No run computes it again, so only the delivered student has the file."""
    [manifest] = (workspace.artifacts / "train-student").glob("*/MANIFEST.json")
    workspace("run", "student.name=other", "targets.temperature=0.5")
    [stored] = manifest.parent.glob("student-*/model.safetensors")
    inside, before = str(stored.relative_to(workspace.artifacts)), stored.read_bytes()
    flip_bit(stored)
    for _ in range(2):
        row = damaged(workspace)[inside]
        assert (row["command"], row["mended"]) == ("amalgam verify --repair", False)
        assert "copied from the delivered folder" in row["repair"]
    assert damaged(workspace, "--repair")[inside]["mended"]
    assert stored.read_bytes() == before
    assert manifest.is_file()
    assert damaged(workspace) == {}


def test_a_damaged_delivered_student_does_not_mend_the_store(workspace: Workspace) -> None:
    [path] = workspace.artifacts.glob("train-student/*/*/model.safetensors")
    flip_bit(path)
    flip_bit(student(workspace) / "model.safetensors")
    rows = damaged(workspace, "--repair")
    assert [row["mended"] for row in rows.values()] == [False, False]
    assert not path.exists()


# ---- teachers and pages


def test_a_damaged_trained_teacher_is_mended(workspace: Workspace) -> None:
    workspace.train_teachers("max_tokens: 24")
    workspace("train-teachers")
    path = workspace.folder / "teachers/teacher-1/model.safetensors"
    before = path.read_bytes()
    flip_bit(path)
    assert list(damaged(workspace)) == ["teachers/teacher-1/model.safetensors"]
    workspace("train-teachers")
    assert path.read_bytes() == before
    flip_bit(path)
    workspace("verify", "--repair")
    assert path.read_bytes() == before


@pytest.mark.parametrize(("name", "place"), [("student.html", -100), ("student.json", 120)])
def test_a_damaged_page_is_written_again(workspace: Workspace, name: str, place: int) -> None:
    path = workspace.folder / "reports" / name
    before = path.read_bytes()
    flip_bit(path, place)
    changed = path.read_bytes()
    row = damaged(workspace)[f"reports/{name}"]
    assert "amalgam run" in row["repair"]
    workspace("run")
    assert path.read_bytes() == before
    assert damaged(workspace) == {}
    assert changed in [kept.read_bytes() for kept in (workspace.artifacts / "quarantine").iterdir()]


def test_pages_that_a_user_deletes_are_no_damage(workspace: Workspace) -> None:
    for path in (workspace.folder / "reports").glob("student.*"):
        path.unlink()
    assert damaged(workspace) == {}


def test_a_damaged_report_of_another_student_is_named(workspace: Workspace) -> None:
    (manifest,) = (workspace.artifacts / "report").glob("*/MANIFEST.json")
    workspace("report", "report.calibration_bins=9")
    assert "damaged" not in workspace("report", "report.calibration_bins=9").err
    flip_bit(manifest)
    result = workspace("report", "report.calibration_bins=9")
    assert f"report/{manifest.parent.name}" in result.err
    assert "amalgam verify" in result.err


def test_a_page_whose_record_is_lost_has_a_note(workspace: Workspace) -> None:
    (record,) = (workspace.artifacts / "report").glob("*/report.json")
    flip_bit(record)
    row = damaged(workspace)[str(record.relative_to(workspace.artifacts))]
    assert row["command"] == "amalgam report --force"
    assert "no date" in row["repair"]
    assert "`amalgam report --force student.seed=0`" in workspace("report", "student.seed=0").err
    assert "lost" not in workspace("report", "--force").err


# ---- a user's files

MINE = {"README.md": "my card", "scores.csv": "a,b\n", "notes/deep/a.txt": "mine", "vocab.txt": "mine"}


def add_mine(folder: Path) -> None:
    for name, text in MINE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("../../texts")


def assert_mine(folder: Path) -> None:
    assert {name: (folder / name).read_text() for name in MINE} == MINE
    assert (folder / "empty").is_dir()
    assert (folder / "link").readlink() == Path("../../texts")


def test_a_users_files_in_a_delivered_folder_stay_and_are_no_damage(workspace: Workspace) -> None:
    add_mine(student(workspace))
    before = (student(workspace) / "model.safetensors").read_bytes()
    assert damaged(workspace) == {}
    for words in (("run",), ("verify", "--repair"), ("run", "student.seed=5"), ("gc", "--yes")):
        workspace(*words)
        assert_mine(student(workspace))
        age(student(workspace))
    assert (student(workspace) / "model.safetensors").read_bytes() != before
    assert damaged(workspace) == {}
    assert not list((workspace.folder / "students").glob(".tmp-*"))


def test_a_users_change_of_a_delivered_file_is_kept_in_quarantine(workspace: Workspace) -> None:
    (student(workspace) / "config.json").write_text('{"my": "change"}')
    result = workspace("run", "student.seed=5")
    assert "students/student/config.json" in result.err
    [kept] = (workspace.artifacts / "quarantine").glob("*-config.json")
    assert kept.read_text() == '{"my": "change"}'


def test_a_note_says_that_the_student_of_another_workspace_is_replaced(workspace: Workspace) -> None:
    assert "does not have" not in workspace("run", "student.seed=5").err
    shutil.move(workspace.artifacts, workspace.folder / "former")
    note = "note: students/student was a model that this workspace does not have; it is replaced"
    assert note in workspace("run", "student.seed=6").err


def test_a_folder_whose_replacement_fails_stays_with_the_users_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = tmp_path / "student", Path.rename
    target.mkdir()
    (target / "notes.txt").write_text("mine")

    def fail(path: Path, place: Path) -> Path:
        if (path / "new.txt").exists():
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, place)

    monkeypatch.setattr(Path, "rename", fail)
    monkeypatch.setattr(deliveries, "_exchange", lambda *_: False)  # as on another system than Linux
    with pytest.raises(OSError, match="Input/output error"):
        replace_folder(target, lambda folder: (folder / "new.txt").touch())
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["student", "student/notes.txt"]


@pytest.mark.skipif(sys.platform != "linux", reason="exchanges folders in one step")
def test_a_folder_that_is_replaced_is_never_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rename, looks = tmp_path / "student", Path.rename, list[Path]()
    target.mkdir()
    add_mine(target)
    write_mark(target, Mark("earlier", {}, {}))

    def look(path: Path, place: Path) -> Path:
        assert_mine(target)
        looks.append(path)
        return rename(path, place)

    monkeypatch.setattr(Path, "rename", look)
    replace_folder(target, lambda folder: write_mark(folder, Mark("later", {}, {})))
    assert looks
    assert_mine(target)
    assert read_mark(target) == Mark("later", {}, {})


def test_two_deliveries_at_once_end_well(workspace: Workspace) -> None:
    add_mine(student(workspace))
    seeds = [workspace.process("run", f"student.seed={seed}") for seed in (5, 6)]
    for process in seeds:
        out, err = process.communicate(timeout=150)
        assert process.wait() == 0, out + err
    assert_mine(student(workspace))
    assert damaged(workspace) == {}
    assert not list((workspace.folder / "students").glob(".tmp-*"))


def test_a_page_that_two_processes_write_has_the_mark_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, others = tmp_path / "reports", list[threading.Thread]()
    write_mark = deliveries.write_mark

    def deliver(text: bytes) -> None:
        deliveries.deliver_page(folder, "student", text.decode() * 20, {"student.html": text}, None)

    def interrupted(target: Path, mark: deliveries.Mark) -> None:
        if not others:
            others.append(threading.Thread(target=deliver, args=(b"b",)))
            others[0].start()
            others[0].join(0.5)  # it waits for the first page
        write_mark(target, mark)

    monkeypatch.setattr(deliveries, "write_mark", interrupted)
    deliver(b"a")
    others[0].join()
    mark = deliveries.read_mark(folder / deliveries.PAGES / "student")
    assert mark is not None
    assert (mark.fingerprint, deliveries.faults(folder, mark.files or {})) == ("b" * 20, {})


@pytest.mark.parametrize("suffix", [".html", ".json"])
def test_a_pipe_in_the_place_of_a_page_is_refused(workspace: Workspace, suffix: str) -> None:
    pipe(workspace.folder / f"reports/student{suffix}")
    for words in (("run", "student.seed=5"), ("report", "--force")):
        assert f"reports/student{suffix} exists and was not made by amalgam" in workspace.refusal(2, *words)
    if suffix == ".json":
        assert "cannot be read as a report" in workspace.attempt("report", "student", "other").err


def test_a_pipe_in_the_place_of_the_texts_to_label_is_kept(workspace: Workspace) -> None:
    workspace.edit("  label: label\n", "")
    workspace.edit("  test: texts/test.csv\n", "")
    workspace("run")
    [texts] = (workspace.folder / "reports").glob("*.to-label.csv")
    pipe(texts)
    assert "was kept" in workspace("report", "--force").err
    assert texts.is_fifo()


def test_a_long_text_to_label_is_compared_with_that_of_the_file(tmp_path: Path) -> None:
    """The csv module has one limit for all readers; the first reader of a process finds the default one."""
    (tmp_path / "reports").mkdir()
    header, text = "key,text,label,student,ensemble,why\n", "onion " * 30_000
    empty, filled, other = (f"{header}00,{cells},a,b,random\n".encode() for cells in (f"{text},", f"{text},a", "x,"))
    before = csv.field_size_limit(131_072)
    try:
        assert "was kept" not in publish_texts(tmp_path, "student.to-label.csv", empty)
        assert "was kept" not in publish_texts(tmp_path, "student.to-label.csv", other)
        (tmp_path / "reports/student.to-label.csv").write_bytes(filled)
        assert "was kept" in publish_texts(tmp_path, "student.to-label.csv", empty)
    finally:
        csv.field_size_limit(before)


def test_the_command_for_a_damaged_export_names_its_student_and_its_folder(workspace: Workspace) -> None:
    students = workspace.folder / "students"
    shutil.copytree(students / "student", students / "other")
    rewrite_mark(students / "other", fingerprint="0" * 20)
    for name, fingerprint in (("student-onnx-int8", workspace.head("train-student")), ("small", "0" * 20)):
        (students / name).mkdir()
        (students / name / "model.onnx").write_bytes(b"of ONNX")
        mark = Mark(fingerprint, written_files(students / name), {"options": "--onnx --int8"}, EXPORT)
        write_mark(students / name, mark)
        flip_bit(students / name / "model.onnx")
    damaged = workspace.attempt("verify", "--json").json["damaged"]
    start = "exported again by `amalgam export --onnx --int8 --force"
    assert {row["path"].split("/")[1]: row["repair"] for row in damaged} == {
        "small": f"{start} --student students/other --out students/small`",
        "student-onnx-int8": f"{start}`",
    }
