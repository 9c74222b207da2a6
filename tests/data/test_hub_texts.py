"""Texts of hf:// addresses come from the Hub of HF_ENDPOINT, at one commit, and each refusal names the fix."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl
import pytest
from huggingface_hub import constants

from amalgam.tests.stages.fake_hub import FakeHub
from amalgam.tests.workspaces import amalgam

if TYPE_CHECKING:
    from pathlib import Path

    from amalgam.tests.workspaces import CommandResult

DATA = "datasets/someone/news"
BRANCHES = {None: "main", "v1": "v1", "~parquet": "refs/convert/parquet", "refs%2Fpr%2F1": "refs/pr/1"}
EXPERIMENT = """\
corpus: {{train: '{source}'}}
teachers: [{{name: a, model: ./a}}, {{name: b, model: ./b}}]
student: {{encoder: ./c}}
"""


@dataclass
class Reader:
    hub: FakeHub
    folder: Path

    def __call__(self, source: str, **settings: object) -> CommandResult:
        """Reads the texts of one address, with settings that huggingface_hub has from the environment."""
        (self.folder / "amalgam.yaml").write_text(EXPERIMENT.format(source=source))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setattr(constants, name, value)
            return amalgam("read-corpus", folder=self.folder)

    def push(self, branch: str = "main", *, gated: bool = False) -> str:
        """Stores two Parquet files and a csv file with an odd name as a commit of the branch."""
        files = self.folder / "files"
        for name in ("parts", "lines"):
            (files / name).mkdir(parents=True, exist_ok=True)
        (files / "my texts.csv").write_bytes(b'id,text\r\n1,"two\nlines"\r\n2,hello\r\n')
        for number in range(2):
            table = pl.DataFrame({"text": [f"text {number}", f"{branch} {number}"]})
            table.write_parquet(files / f"parts/{number}.parquet")
            (files / f"lines/{number}.jsonl").write_text(f'{{"text": "line {number}"}}')
            (files / f"lines/{number}.csv").write_text(f"text\nline {number}\n")
        return self.hub.push(DATA, files, branch=branch, gated=gated)

    def texts(self) -> list[str]:
        [*files] = (self.folder / "artifacts/read-corpus").glob("part-*/*/*.parquet")
        return sorted(pl.concat(pl.read_parquet(file, glob=False) for file in files)["text"])


@pytest.fixture
def read(hub: FakeHub, tmp_path: Path) -> Reader:
    return Reader(hub, tmp_path)


@pytest.mark.parametrize("revision", BRANCHES)
def test_a_file_is_read_at_the_present_commit_of_its_revision(read: Reader, revision: str | None) -> None:
    commit = read.push(BRANCHES[revision])
    at = f"@{revision}" if revision else ""
    result = read(f"hf://{DATA}{at}/my texts.csv")
    assert (result.code, read.texts()) == (0, ["hello", "two\nlines"]), result.err
    downloads = [path for path in read.hub.requests if "/resolve/" in path]
    assert downloads
    assert {path.split("/resolve/")[1] for path in downloads} == {f"{commit}/my%20texts.csv"}


def test_the_parquet_files_of_a_pattern_are_joined_and_read_once(read: Reader) -> None:
    read.push()
    read.folder /= "with [brackets]"
    read.folder.mkdir()
    assert read(f"hf://{DATA}/parts/*.parquet").code == 0
    assert read.texts() == ["main 0", "main 1", "text 0", "text 1"]
    requests = len(read.hub.requests)
    assert read(f"hf://{DATA}/parts/*.parquet", HF_HUB_OFFLINE=True).code == 0
    assert len(read.hub.requests) == requests


def test_the_lines_of_a_pattern_are_joined(read: Reader) -> None:
    read.push()
    assert read(f"hf://{DATA}/lines/*.jsonl").code == 0
    assert read.texts() == ["line 0", "line 1"]


def test_files_of_a_pattern_with_different_columns_are_refused_with_a_way_to_read_them(read: Reader) -> None:
    read.push()
    pl.DataFrame({"text": ["more"], "id": [1]}).write_parquet(read.folder / "files/parts/2.parquet")
    read.hub.push(DATA, read.folder / "files")
    result = read(f"hf://{DATA}/parts/*.parquet")
    assert (result.code, "fix: name files with the same columns, or fetch them" in result.err) == (3, True), result.err


REFUSALS: dict[str, tuple[str, dict[str, object], str, str]] = {
    "no such data set": ("hf://datasets/someone/nwes/a.csv", {}, "no data set someone/nwes", "hf auth login"),
    "no such revision": (f"hf://{DATA}@v9/my texts.csv", {}, "no revision 'v9'", "branches and tags"),
    "no such file": (f"hf://{DATA}/part/0.parquet", {}, "no file part/0.parquet", "parts/0.parquet"),
    "no such pattern": (f"hf://{DATA}/*.parquet", {}, "no file *.parquet", "parts/0.parquet"),
    "two headers": (f"hf://{DATA}/lines/[01].csv", {}, "several files", "name one file at a time"),
    "no owner": ("hf://datasets/news/a.csv", {}, "no address of a file", "hf://datasets/OWNER/NAME/PATH"),
    "offline": (f"hf://{DATA}/my texts.csv", {"HF_HUB_OFFLINE": True}, "cannot be read", "unset HF_HUB_OFFLINE"),
    "no network": (f"hf://{DATA}/my texts.csv", {"ENDPOINT": "http://127.0.0.1:9"}, "cannot be read", "network"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_the_fix(read: Reader, name: str) -> None:
    source, settings, what, fix = REFUSALS[name]
    read.push()
    result = read(source, **settings)
    assert result.code == 3, result.err
    [error, place, remedy] = [line for line in result.err.splitlines() if line.startswith(("error:", "where:", "fix:"))]
    assert what in error
    assert "hf://" in place or "http://" in place
    assert fix in remedy


@pytest.mark.parametrize("lock", ["private", "gated"])
def test_a_locked_data_set_needs_a_login_whose_token_is_never_printed(
    read: Reader, monkeypatch: pytest.MonkeyPatch, lock: str
) -> None:
    read.push(gated=lock == "gated")
    read.hub.repositories[DATA].private = lock == "private"
    result = read(f"hf://{DATA}/my texts.csv")
    assert (result.code, "HF_TOKEN" in result.err) == (3, True), result.err
    read.hub.repositories[DATA].gated = False
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    result = read(f"hf://{DATA}/my texts.csv")
    assert (result.code, "canary" in result.err) == (0, False), result.err
    assert "canary" not in json.dumps([path.read_text("utf-8") for path in read.folder.rglob("*.json")])
