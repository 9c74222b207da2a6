"""What a path, a folder, a glob and a remote address mean."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
import threading
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import polars as pl
import pytest

from amalgam.data import remote
from amalgam.data.corpus import find_files
from amalgam.data.remote import fetch_remote
from amalgam.data.rows import BadRow, Row, read_rows
from amalgam.pipeline.config.schema import Corpus
from amalgam.pipeline.errors import DataError, DiskFullError, InputChangedError
from amalgam.stages.common.corpus import content_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


ODD = [
    *("a[1]*", "b?", "c{1,2}", "**", "[!a]", "file:x", "s3:x", "hf:x", "-rf", "x\ny", "%41", "two words", "#a?b=1"),
    *("~", "$ODD", "`echo decoy`", "a\\b", "'q\"", "caf\u00e9", "cafe\u0301", "\u202eabc", "c;d", "a,b"),
]
DECOYS = ["a1", "a1b", "bc", "c1", "c2", "A", "x", "decoy", "a", "b"]


def _make(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("text\nhello\n")


def test_a_file_a_folder_and_a_glob_are_found_in_order_of_name(tmp_path: Path) -> None:
    _make(tmp_path / "in", "b.csv", "a.CSV", "README.md")
    expected = [tmp_path / "in" / "a.CSV", tmp_path / "in" / "b.csv"]
    assert find_files("in/b.csv", tmp_path) == expected[1:]
    assert find_files("in", tmp_path) == expected
    assert find_files("in/[ab].*", tmp_path) == expected
    assert find_files(str(tmp_path / "in" / "*.csv"), tmp_path / "elsewhere") == expected[1:]


def test_a_name_that_looks_like_a_glob_is_taken_literally(tmp_path: Path) -> None:
    _make(tmp_path, "a[1].csv")
    assert find_files("a[1].csv", tmp_path) == [tmp_path / "a[1].csv"]


def test_packed_files_of_a_folder_are_read_and_hidden_ones_are_not(tmp_path: Path) -> None:
    for name in ("b.csv.gz", "a.csv", ".c.csv.part", "._a.csv", "d.md"):
        (tmp_path / name).write_text("text\nyes\n")
    assert [file.name for file in find_files(".", tmp_path)] == ["a.csv", "b.csv.gz"]
    (tmp_path / "c.jsonl.zst").write_text("")
    with pytest.raises(DataError, match=r"files of several kinds: \.csv, \.jsonl"):
        find_files(".", tmp_path)


def test_texts_in_folders_of_a_folder_are_named_and_the_fix_finds_them(tmp_path: Path) -> None:
    (tmp_path / "in/_temporary").mkdir(parents=True)
    (tmp_path / "in/.day").mkdir()
    (tmp_path / "in/night/.day").mkdir(parents=True)
    for name in ("in/a.csv", "in/_temporary/b.csv", "in/.day/c.csv", "in/night/.day/c.csv"):
        (tmp_path / name).write_text("text\nyes\n")
    assert find_files("in", tmp_path) == [tmp_path / "in/a.csv"]
    (tmp_path / "in/day/late").mkdir(parents=True)
    (tmp_path / "in/day/late/b.csv.gz").write_text("")
    with pytest.raises(DataError, match=r"has texts in folders, such as day/late/b\.csv\.gz") as caught:
        find_files("in/", tmp_path)
    assert caught.value.fix == "name the files: in/**/*.csv.gz, or without folders in/*.csv.gz"
    assert find_files("in/**/*.csv.gz", tmp_path) == [tmp_path / "in/day/late/b.csv.gz"]


def parquet_of(text: str) -> bytes:
    pl.DataFrame({"text": [text]}).write_parquet(file := io.BytesIO())
    return file.getvalue()


CONTENTS: dict[str, Callable[[str], bytes]] = {
    "csv": lambda text: f"text\n{text}\n".encode(),
    "jsonl": lambda text: f'{{"text": "{text}"}}\n'.encode(),
    "parquet": parquet_of,
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("suffix", CONTENTS)
def test_an_odd_name_is_taken_literally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, suffix: str
) -> None:
    """Decoys are what a pattern, an address or a shell would find instead."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ODD", "decoy")
    decoy = CONTENTS[suffix]("decoy")
    for folder in (name, *DECOYS):
        (tmp_path / folder).mkdir(exist_ok=True)
        for file in (name, *DECOYS):
            (tmp_path / folder / f"{file}.{suffix}").write_bytes(decoy)
    (tmp_path / name / f"{name}.{suffix}").write_bytes(CONTENTS[suffix]("wanted"))
    for base in (tmp_path, Path()):
        for source in (f"./{name}/{name}.{suffix}", f"{name}/{name}.{suffix}", f"./{name}/[!ac]*.{suffix}"):
            if source.startswith("~"):  # the home folder
                continue
            files = find_files(source, base)
            if source.endswith(f"[!ac]*.{suffix}"):
                assert {file.parent.name for file in files} == {name}
                continue
            assert [file.name for file in files] == [f"{name}.{suffix}"]
            rows = list(read_rows(files[0], corpus=Corpus(train=["x"])))
            assert [row.fields for row in rows if isinstance(row, Row)] == [("wanted",)]


def test_a_pattern_in_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home [1]"))
    _make(tmp_path / "home [1]", "a.csv")
    assert find_files("~/*.csv", tmp_path) == [tmp_path / "home [1]/a.csv"]


def test_a_command_in_a_message_quotes_the_name(tmp_path: Path) -> None:
    path = tmp_path / "a; rm b.csv"
    path.write_bytes(b"text\ncaf\xe9\n")
    [bad] = read_rows(path, corpus=Corpus(train=["x"]))
    assert isinstance(bad, BadRow)
    assert f"utf-8 '{path}' > 'utf8-a; rm b.csv'" in bad.fix


def test_a_name_in_another_unicode_form_is_not_found_but_explained(tmp_path: Path) -> None:
    _make(tmp_path, "cafe\u0301.csv")
    with pytest.raises(DataError) as caught:
        find_files("caf\u00e9.csv", tmp_path)
    assert "NFC, NFD" in str(caught.value.fix)


def test_a_missing_file_is_answered_with_the_nearest_names(tmp_path: Path) -> None:
    _make(tmp_path / "texts", "train.csv", "test.csv")
    with pytest.raises(DataError) as caught:
        find_files("texts/trian.csv", tmp_path)
    assert "texts/trian.csv" in caught.value.what
    assert "train.csv" in (caught.value.fix or "")
    with pytest.raises(DataError) as caught:
        find_files("textz/deep/train.csv", tmp_path)
    assert str(caught.value.fix).endswith(": texts")
    with pytest.raises(DataError) as caught:
        find_files("texts/train", tmp_path)
    assert str(caught.value.fix).startswith("name one of these: train.csv")
    with pytest.raises(DataError) as caught:
        find_files("fancyzhx/ag_news", tmp_path)
    assert str(caught.value.fix).endswith("; a data set on the Hub is hf://datasets/OWNER/NAME/FILE")
    for windows, linux in ((r"texts\train.csv", "texts/train.csv"), (r"C:\Users\me\a.csv", "/mnt/c/Users/me/a.csv")):
        with pytest.raises(DataError) as caught:
            find_files(windows, tmp_path)
        assert caught.value.fix == f"write / between folders: {linux}"
    with pytest.raises(DataError) as caught:
        find_files("texts/train.csv, texts/test.csv", tmp_path)
    assert str(caught.value.fix).endswith(": [texts/train.csv, texts/test.csv]")


def test_files_of_several_kinds_are_refused(tmp_path: Path) -> None:
    _make(tmp_path / "in", "a.csv", "b.jsonl")
    for source in ("in", "in/*"):
        with pytest.raises(DataError, match=r"\.csv, \.jsonl") as caught:
            find_files(source, tmp_path)
        assert "a list of patterns, one for each kind: [in/*.csv, in/*.jsonl]" in str(caught.value.fix)


def test_a_file_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    _make(tmp_path, "a.xlsx")
    with pytest.raises(DataError, match=r"a\.xlsx"):
        find_files("a.xlsx", tmp_path)
    _make(tmp_path, "a.csv")
    with pytest.raises(DataError) as caught:
        find_files("a.*", tmp_path)
    assert (caught.value.where, caught.value.fix) == (str(tmp_path / "a.xlsx"), "save the sheet as csv, UTF-8")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("a.zip", "run: unzip a.zip"),
        ("a.xls", "save the sheet as csv, UTF-8"),
        ("a.arrow", "save it as Parquet: by to_"),
        ("a.feather", "save it as Parquet: by to_"),
    ],
)
def test_files_and_folders_of_another_kind_have_their_own_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    _make(tmp_path / "in", name, "state.json")
    (tmp_path / name).touch()
    for source, start in ((name, ""), ("in", f"{name}: ")):
        with pytest.raises(DataError) as caught:
            find_files(source, tmp_path)
        assert str(caught.value.fix).startswith(start + fix.replace(" a.", f" {source}/a." if start else " a."))


def test_the_fix_for_a_folder_of_txt_files_works_when_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("law/0.txt", "music/1.txt"):
        (tmp_path / "in 1" / name).parent.mkdir(parents=True)
        (tmp_path / "in 1" / name).write_text(f'"{name}",\nand more\n')
    with pytest.raises(DataError, match="no file of texts in in 1") as caught:
        find_files("in 1", tmp_path)
    command = str(caught.value.fix).partition("run: ")[2].replace("python", sys.executable)
    subprocess.run(["/bin/sh", "-c", command], check=True)
    rows = list(read_rows(tmp_path / "in 1.csv", corpus=Corpus(train=["x"], label="folder")))
    assert [(*row.fields, row.label) for row in rows if isinstance(row, Row)] == [
        ('"law/0.txt",\nand more\n', "law"),
        ('"music/1.txt",\nand more\n', "music"),
    ]


def test_a_folder_without_texts_is_refused(tmp_path: Path) -> None:
    _make(tmp_path / "in", "README.md")
    with pytest.raises(DataError, match=r" in\b"):
        find_files("in", tmp_path)


class _Bucket(BaseHTTPRequestHandler):
    """As much of S3 as a reader needs: signed GET and HEAD, with ranges."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, bytes]] = {}
    signed: ClassVar[list[str]] = []
    later: ClassVar[list[bytes]] = []
    """Contents of the object, one after each GET."""

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.signed.append(self.headers.get("Authorization", ""))
        whole = self.objects.get(self.path)
        if whole is None:
            self._answer(404, b"", {})
            return
        if self.command == "GET" and self.later:
            self.objects[self.path] = self.later.pop(0)
        size = len(whole)
        low, _, high = self.headers.get("Range", f"bytes=0-{size}").removeprefix("bytes=").partition("-")
        start, stop = (int(low), min(size, int(high or size) + 1)) if low else (max(0, size - int(high)), size)
        etag = f'"{md5(whole, usedforsecurity=False).hexdigest()}"'
        self._answer(206, whole[start:stop], {"Content-Range": f"bytes {start}-{stop - 1}/{size}", "ETag": etag})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        dated = {"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT", "Content-Length": str(len(body))}
        for name, value in {**dated, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Bucket]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Bucket)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    _Bucket.objects, _Bucket.signed, _Bucket.later = {}, [], []
    yield _Bucket
    server.shutdown()
    thread.join()
    server.server_close()


def test_s3_parquet_is_read_from_the_endpoint_the_environment_names(tmp_path: Path, bucket: type[_Bucket]) -> None:
    file = io.BytesIO()
    pl.DataFrame({"text": ["a", "b"], "id": [1, 2]}).write_parquet(file)
    bucket.objects["/texts/in/a.parquet"] = file.getvalue()
    local = fetch_remote("s3://texts/in/a.parquet", tmp_path)
    assert local.name == "a.parquet"
    assert pl.read_parquet(local).rows() == [("a", 1), ("b", 2)]
    assert bucket.signed
    assert all("Credential=an-id/" in signature for signature in bucket.signed)


PROFILES = """
[first]
aws_access_key_id = first-id
aws_secret_access_key = first-secret

[work]
aws_access_key_id = work-id
aws_secret_access_key = work-secret
"""


@pytest.mark.parametrize("extra", ["obstore", "no obstore"])
def test_s3_is_read_with_the_keys_of_the_profile(
    tmp_path: Path, bucket: type[_Bucket], monkeypatch: pytest.MonkeyPatch, extra: str
) -> None:
    if extra == "no obstore":
        monkeypatch.setitem(sys.modules, "obstore", None)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(remote, "find_spec", lambda _: None)  # boto3
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(PROFILES)
    (tmp_path / ".aws/config").write_text("[profile work]\nregion = eu-west-1\n")
    bucket.objects["/texts/a.csv"] = b"text\nhello\n"
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert fetch_remote("s3://texts/a.csv", tmp_path).read_text() == "text\nhello\n"
    assert bucket.signed
    assert all("Credential=work-id/" in signature and "/eu-west-1/" in signature for signature in bucket.signed)
    monkeypatch.setenv("AWS_PROFILE", "sso user")
    with pytest.raises(DataError, match="profile sso user has no access key") as caught:
        fetch_remote("s3://texts/a.csv", tmp_path)
    assert "export-credentials --profile 'sso user'" in str(caught.value.fix)
    (tmp_path / ".aws/credentials").write_text("a-secret")  # no section
    with pytest.raises(DataError, match="profile sso user") as caught:
        fetch_remote("s3://texts/a.csv", tmp_path)
    assert "a-secret" not in str(caught.value)


def test_s3_lines_arrive_unparsed_and_keep_their_numbers(tmp_path: Path, bucket: type[_Bucket]) -> None:
    bucket.objects["/texts/a.csv"] = b'\xef\xbb\xbfid,text\n01,"two\nlines, ""quoted"""\n02,\x00z'
    bucket.objects["/texts/a.jsonl"] = b'{"text": "\\ud83d"}\n\n{"text": 5}\n'
    rows = list(read_rows(fetch_remote("s3://texts/a.csv", tmp_path), corpus=Corpus(train=["x"], id="id")))
    assert [(row.number, row.fields, row.id) for row in rows if isinstance(row, Row)] == [
        (2, ('two\nlines, "quoted"',), "01"),
        (4, ("\x00z",), "02"),
    ]
    bad = list(read_rows(fetch_remote("s3://texts/a.jsonl", tmp_path), corpus=Corpus(train=["x"])))
    assert [row.number for row in bad] == [1, 3]


@pytest.mark.parametrize("pattern", ["*.csv", "a[12].csv", "a?.csv"])
def test_csv_files_of_a_pattern_are_refused_as_each_has_a_header(
    tmp_path: Path, bucket: type[_Bucket], pattern: str
) -> None:
    bucket.objects["/texts/a1.csv"] = bucket.objects["/texts/a2.csv"] = b"text\nhello\n"
    with pytest.raises(DataError) as caught:
        fetch_remote(f"s3://texts/{pattern}", tmp_path)
    assert "name one file at a time" in str(caught.value.fix)


def test_a_failed_download_leaves_nothing_and_prints_no_secret(tmp_path: Path, bucket: type[_Bucket]) -> None:
    bucket.objects["/texts/bad.csv"] = b"text\ncaf\xe9\n"
    for url, fix in (("s3://texts/none.parquet", "check the address"), ("s3://texts/bad.csv", "re-encode it")):
        with pytest.raises(DataError, match="texts/") as caught:
            fetch_remote(url, tmp_path)
        assert "a-secret" not in str(caught.value)
        assert fix in str(caught.value.fix)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("extra", ["obstore", "no obstore"])
@pytest.mark.parametrize("writes", [1, 2, 100])
def test_an_object_written_while_it_is_read_is_one_version_or_an_error(
    tmp_path: Path, bucket: type[_Bucket], monkeypatch: pytest.MonkeyPatch, writes: int, extra: str
) -> None:
    if extra == "no obstore":
        monkeypatch.setitem(sys.modules, "obstore", None)
    contents = [f"text\n{'x' * number}\n".encode() for number in range(1, writes + 2)]
    bucket.objects["/texts/a.csv"], bucket.later[:] = contents[0], contents[1:]
    if writes == 100:
        with pytest.raises(InputChangedError, match=r"a\.csv changed") as caught:
            fetch_remote("s3://texts/a.csv", tmp_path)
        assert "a-secret" not in str(caught.value)
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    else:
        assert fetch_remote("s3://texts/a.csv", tmp_path).read_bytes() == contents[-1]


def test_an_address_that_names_no_file_is_refused_without_its_secrets(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="file") as caught:
        fetch_remote("s3://key:canary@texts/folder?token=canary", tmp_path)
    assert "canary" not in str(caught.value)
    for url, fix in {
        "hf://datasets/a/b/*.csv": "of csv and tsv, name one file at a time",
        "hf://datasets/a/b/c.csv.gz": "fetch it and name the local file",  # whose fix unpacks it
    }.items():
        with pytest.raises(DataError) as caught:
            fetch_remote(url, tmp_path)
        assert str(caught.value.fix).endswith(fix)


@pytest.mark.parametrize(
    ("address", "function", "error", "reason"),
    [
        ("s3://texts/a.csv", "copy_texts", OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (
            "s3://texts/a.csv",
            "copy_texts",
            pl.exceptions.ComputeError("No space left on device (os error 28)"),
            "the disk is full",
        ),
        ("hf://datasets/o/n/a.csv", "fetch_texts", OSError(errno.EDQUOT, "Quota"), "your disk quota is used up"),
    ],
)
def test_a_full_disk_is_no_fault_of_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, function: str, error: Exception, reason: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(remote, function, fail)
    monkeypatch.setattr(remote, "_versions", lambda *_: None)
    with pytest.raises(DiskFullError, match=f"cannot be stored: {reason}\n") as full:
        fetch_remote(address, tmp_path)
    assert "free some space" in str(full.value.fix)


def test_files_and_folders_with_texts_are_proposed_for_a_missing_folder(tmp_path: Path) -> None:
    for name in ("models/first/config.json", "more/part.jsonl", "texts.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text\na\n")
    with pytest.raises(DataError) as refused:
        find_files("texts/train.csv", tmp_path)
    assert refused.value.fix == "name one of these: more, texts.csv"


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_equal_files_with_other_separators_are_other_texts(tmp_path: Path, suffix: str) -> None:
    identities = {name: content_of("f" * 64, str(tmp_path / f"{name}{suffix}")) for name in ("a.csv", "b.csv", "a.tsv")}
    assert identities["a.csv"] == identities["b.csv"] != identities["a.tsv"]
