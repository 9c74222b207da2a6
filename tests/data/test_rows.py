"""Rows have exact positions; an unusable row has a place, a reason and a fix."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from amalgam.data import packed
from amalgam.data.corpus import find_files
from amalgam.data.rows import BadRow, Row, read_rows
from amalgam.pipeline.config.schema import Corpus
from amalgam.pipeline.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


def _read(path: Path, content: bytes | str | Any, *, require_label: bool = False, **corpus: Any) -> list[Row | BadRow]:
    if isinstance(content, pa.Table):
        pq.write_table(content, path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_rows(path, corpus=Corpus(train=["x"], **corpus), require_label=require_label))


def _good(rows: list[Row | BadRow]) -> list[tuple[Any, ...]]:
    assert not [row for row in rows if isinstance(row, BadRow)]
    return [(row.number, *row.fields, row.id, row.label) for row in rows if isinstance(row, Row)]


def _bad(rows: list[Row | BadRow]) -> BadRow:
    (row,) = [row for row in rows if isinstance(row, BadRow)]
    return row


def test_the_same_rows_are_read_from_every_format(tmp_path: Path) -> None:
    ids, texts, labels = ["7", "8"], ['say "a, b"\nc', "d\te"], ["x", "y"]
    csv = 'label,id,text\nx,7,"say ""a, b""\nc"\n\ny,8,d\te\n'
    tsv = 'label\tid\ttext\r\nx\t7\t"say ""a, b""\nc"\r\ny\t8\t"d\te"\r\n'
    lines = "".join(
        json.dumps({"text": text, "label": label, "id": key}) + "\n"
        for text, label, key in zip(texts, labels, ids, strict=True)
    )
    table = pa.table({"id": [7, 8], "label": pa.array(labels).dictionary_encode(), "more": [0, 1], "text": texts})
    expected = list(zip(texts, ids, labels, strict=True))
    by_format = {
        name: _good(_read(tmp_path / name, content, id="id", label="label"))
        for name, content in {"a.csv": csv, "a.tsv": tsv, "a.jsonl": lines, "a.parquet": table}.items()
    }
    assert {name: [row[0] for row in rows] for name, rows in by_format.items()} == {
        "a.csv": [2, 5],
        "a.tsv": [2, 4],
        "a.jsonl": [1, 2],
        "a.parquet": [1, 2],
    }
    for rows in by_format.values():
        assert [row[1:] for row in rows] == expected


def test_a_csv_of_a_spreadsheet_may_have_semicolons(tmp_path: Path) -> None:
    content = '\ufefflabel;text\r\nx;"one; two, three"\r\ny;four, five\r\n'
    rows = _read(tmp_path / "a.csv", content, label="label")
    assert _good(rows) == [(2, "one; two, three", None, "x"), (3, "four, five", None, "y")]
    assert _good(_read(tmp_path / "a.csv", "\ufeff\r\nlabel;text\r\nx;one\r\n")) == [(3, "one", None, None)]
    assert _good(_read(tmp_path / "b.csv", "text\none; two\n")) == [(2, "one; two", None, None)]
    assert _good(_read(tmp_path / "c.csv", '"a;b",text\nno,one; two\n')) == [(2, "one; two", None, None)]
    assert _good(_read(tmp_path / "d.csv", '"a, b";text\nno;one, two\n')) == [(2, "one, two", None, None)]


def test_pairs_of_texts_are_read_in_the_order_asked_for(tmp_path: Path) -> None:
    rows = _read(tmp_path / "a.csv", "b,a\nno,yes\n", text=["a", "b"])
    assert _good(rows) == [(2, "yes", "no", None, None)]
    assert _bad(_read(tmp_path / "a.csv", "b,a\n,yes\n", text=["a", "b"])).field == "b"


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path) -> None:
    assert _good(_read(tmp_path / "a.csv", b"\xef\xbb\xbftext\nhello\n")) == [(2, "hello", None, None)]
    line = b'\xef\xbb\xbf{"text": "hello"}\n'
    hello = [(1, "hello", None, None), (2, "hello", None, None)]  # two joined files
    assert _good(_read(tmp_path / "a.jsonl", line + line)) == hello
    assert "line 1 (byte 14)" in _bad(_read(tmp_path / "a.jsonl", line.replace(b"hello", b"\xe9"))).where


def test_control_characters_are_data(tmp_path: Path) -> None:
    text = "a\x00b\x1b[31m\u200b"
    for name, content in {
        "a.csv": f"text\n{text}\n",
        "a.jsonl": json.dumps({"text": text}),
        "a.parquet": pa.table({"text": [text]}),
    }.items():
        assert [row.fields for row in _read(tmp_path / name, content) if isinstance(row, Row)] == [(text,)]


def test_a_byte_that_is_not_utf8_is_named_with_row_byte_and_field(tmp_path: Path) -> None:
    rows = _read(tmp_path / "data.csv", b"id,text\n1,caf\xe9 \xe9\n2,fine\n", id="id")
    assert _bad(rows).where == r"data.csv row 2 (byte 14), field text: not UTF-8: caf\xe9 \xe9"
    assert f"iconv -f cp1252 -t utf-8 {tmp_path}/data.csv > utf8-data.csv" in str(_bad(rows).fix)
    assert rows[1] == Row("data.csv", 3, ("fine",), "2", None)
    rows = _read(tmp_path / "data.jsonl", b'{"text": "fine"}\n{"id": 2, "text": "caf\xe9"}\n')
    assert _bad(rows).where == r"data.jsonl line 2 (byte 40), field text: not UTF-8: caf\xe9"


def test_parquet_text_that_is_not_utf8_is_named_with_its_row(tmp_path: Path) -> None:
    broken = pa.array([b"fine", b"caf\xe9", None], pa.binary()).view(pa.string())
    rows = _read(tmp_path / "a.parquet", pa.table({"text": broken}))
    assert [row.where for row in rows if isinstance(row, BadRow)] == [
        r"a.parquet row 2, field text: not UTF-8: caf\xe9",
        "a.parquet row 3, field text: null: null",
    ]
    assert _bad(rows[:2]).fix == "write its texts again in UTF-8"  # iconv would change the other bytes of the file


@pytest.mark.parametrize("text", ["text\nhello\n", "text\r\nhello\r\n"])
def test_the_fix_for_a_file_of_another_kind_works_when_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in 1").mkdir()
    pq.write_table(pa.table({"text": ["hello"]}), parquet := io.BytesIO())
    contents = {
        "is UTF-16,": text.encode("utf-16"),
        "is UTF-32,": text.encode("utf-32"),
        "is UTF-32, not": f"\ufeff{text}".encode("utf-32-be"),
        **{f"is UTF-{form},": text.encode(f"utf-{form}") for form in ("16LE", "16BE", "32LE", "32BE")},
        "is a Parquet file": parquet.getvalue(),
        "is packed by gzip": gzip.compress(text.encode()),
        "is packed by xz": lzma.compress(text.encode()),
        "a first line for Excel": f"sep=;\r\n{text}".encode(),
        "old Mac line ends": b"text\rhello\r",
    }
    for message, content in contents.items():
        with pytest.raises(DataError, match=message) as caught:
            _read(tmp_path / "in 1/a.csv", content)
        command = str(caught.value.fix).partition(": ")[2]
        subprocess.run(["/bin/sh", "-c", command], check=True)
        made = tmp_path / ("in 1/a.parquet" if command.startswith("mv") else "utf8-a.csv")
        assert [row[1] for row in _good(list(read_rows(made, corpus=Corpus(train=["x"]))))] == ["hello"]
    with pytest.raises(DataError, match="spreadsheet"):
        _read(tmp_path / "a.csv", b"PK\x03\x04")
    with pytest.raises(DataError, match="the header is not UTF-8"):  # bytes of no text, among them an old line end
        _read(tmp_path / "a.csv", b"te\xffxt\rhello\r")


@pytest.mark.parametrize("content", ['[{"text": "yes"}]', '\ufeff[\n  {\n    "text": "yes"\n  }\n]\n'])
def test_a_json_array_is_no_jsonl_and_the_fix_works_when_pasted(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError, match="is one JSON array") as caught:
        _read(tmp_path / "a b.jsonl", content.encode())
    command = str(caught.value.fix).partition(": ")[2].replace("python -c", f"{sys.executable} -c")
    subprocess.run(["/bin/sh", "-c", command], check=True)
    made = tmp_path / "a b-lines.jsonl"
    assert [row[1] for row in _good(list(read_rows(made, corpus=Corpus(train=["x"]))))] == ["yes"]


@pytest.mark.parametrize(
    ("name", "content", "made"),
    [
        ("a.txt", b'"hello" he said,\n\nyes\n', "a.csv"),
        ("a.json", b'[{"text":"\\"hello\\" he said,"}, {"text":"yes"}]', "a.jsonl"),
        ("a.json", b'{"text":"\\"hello\\" he said,"}\n{"text":"yes"}\n', "a.jsonl"),
        ("a.txt.gz", gzip.compress(b'text\n"""hello"" he said,"\nyes\n'), "a.txt"),
    ],
    ids=["txt", "JSON array", "JSON lines", "gzip"],
)
def test_the_fix_for_a_suffix_works_when_pasted(tmp_path: Path, name: str, content: bytes, made: str) -> None:
    (tmp_path / "in 1").mkdir()
    (tmp_path / "in 1" / name).write_bytes(content)
    with pytest.raises(DataError, match=name) as caught:
        find_files(f"in 1/{name}", tmp_path)
    command = str(caught.value.fix).rpartition(": ")[2].replace("python", sys.executable)
    subprocess.run(["/bin/sh", "-c", command], check=True)
    if made == "a.txt":
        assert (tmp_path / "in 1" / made).read_bytes() == gzip.decompress(content)
        return
    rows = list(read_rows(tmp_path / "in 1" / made, corpus=Corpus(train=["x"])))
    assert [row[1] for row in _good(rows)] == ['"hello" he said,', "yes"]


def _packed_by_zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), (".zst", _packed_by_zstd)],
)
def test_packed_files_are_read_and_cut_ones_are_refused(tmp_path: Path, suffix: str, pack: Any) -> None:
    for name, content in (("a.csv", b'id,text\n1,"one,\nline"\n2,yes\n'), ("a.jsonl", ROWS_OF_JSON)):
        whole, path = pack(content), tmp_path / f"{name}{suffix}"
        assert [row[1:3] for row in _good(_read(path, whole, id="id"))] == [("one,\nline", "1"), ("yes", "2")]
        for cut in (whole[:-9], whole[: len(whole) // 2]):
            with pytest.raises(DataError, match=rf"{name}{suffix} is not a whole file of"):
                _read(path, cut)
    with pytest.raises(DataError, match="is one JSON array"):
        _read(tmp_path / f"a.jsonl{suffix}", pack(b'[{"text": "yes"}]'))


ROWS_OF_JSON = b'{"id": 1, "text": "one,\\nline"}\n{"id": 2, "text": "yes"}\n'


@pytest.mark.parametrize(
    ("name", "content", "made"),
    [
        ("in 1/a.csv.gz", gzip.compress("text\nyes\ncafé\n".encode("cp1252")), "utf8-a.csv"),
        ("in 1/a.csv.gz", gzip.compress(b"text\ryes\r"), "utf8-a.csv"),
        ("in 1/a.csv.gz", gzip.compress(b"text\nyes\nno, no\n"), "in 1/a.tsv"),
        ("-a.csv", "text\nyes\ncafé\n".encode("cp1252"), "utf8--a.csv"),
    ],
    ids=["not UTF-8", "Mac line ends", "commas in the only column", "a name like an option"],
)
def test_the_fix_of_a_row_works_when_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, made: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in 1").mkdir()
    try:
        fix = _bad(_read(tmp_path / name, content)).fix
    except DataError as error:
        fix = str(error.fix)
    subprocess.run(["/bin/sh", "-c", fix.rpartition(": ")[2]], check=True)
    assert _good(list(read_rows(tmp_path / made, corpus=Corpus(train=["x"]))))[0][1] == "yes"


@pytest.mark.parametrize(("name", "renamed"), [("a.tsv", "a.csv"), ("a.tsv.gz", "a.csv.gz"), ("A.TSV", "A.csv")])
def test_a_tsv_with_commas_is_to_be_named_csv(tmp_path: Path, name: str, renamed: str) -> None:
    content = b"id,text\n1,yes\n"
    with pytest.raises(DataError) as caught:
        _read(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
    assert caught.value.fix == f"it has commas: name it {renamed}"


def test_a_line_of_a_packed_file_that_is_larger_than_the_memory_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "LINE_LIMIT", 1000)
    rows = _read(tmp_path / "a.jsonl.gz", gzip.compress(b"[" * 10_000 + ROWS_OF_JSON))
    assert {row.reason for row in rows if isinstance(row, BadRow)} == {"broken"}


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ('{"text": "a" "id": 2}', '{"text": "a" "id": 2}'),
        ('["a"]', '["a"]'),
        ("[" * 20_000, f"{'[' * 77}..."),
        ('{"text": ' + "1" * 5000 + "}", '{"text": 111'),
    ],
)
def test_a_broken_line_is_named_with_its_number(tmp_path: Path, line: str, shown: str) -> None:
    rows = _read(tmp_path / "a.jsonl", f'{{"text": "a"}}\n\n{line}\n{{"text": "b"}}\n')
    assert _bad(rows).where.startswith("a.jsonl line 3: broken (")
    assert _bad(rows).reason == "broken"
    assert shown in _bad(rows).where
    assert [row.number for row in rows] == [1, 3, 4]


def test_half_a_character_is_an_error_with_its_line(tmp_path: Path) -> None:
    rows = _read(tmp_path / "a.jsonl", '{"text": "whole \\ud83d\\ude00"}\n{"text": "half \\ud83d"}\n')
    assert rows[0] == Row("a.jsonl", 1, ("whole \U0001f600",), None, None)
    assert _bad(rows).where == r"a.jsonl line 2, field text: lone surrogate: half \ud83d"


@pytest.mark.parametrize(
    ("value", "reason", "shown"),
    [
        ("null", "null", "null"),
        ("NaN", "null", "nan"),
        ("5", "not text", "5"),
        ("true", "not text", "True"),
        ('["a"]', "not text", "['a']"),
        ('""', "empty", ""),
        ('" \\t\\n"', "empty", r" \t\n"),
    ],
)
def test_a_value_other_than_text_is_named_and_never_converted(
    tmp_path: Path, value: str, reason: str, shown: str
) -> None:
    bad = _bad(_read(tmp_path / "a.jsonl", f'{{"id": 7, "text": {value}}}', id="id"))
    assert (bad.number, bad.field, bad.reason, bad.value, bad.id) == (1, "text", reason, shown, "7")


def test_parquet_columns_of_numbers_and_nulls_are_no_text(tmp_path: Path) -> None:
    for values, reason in (([1], "not text"), ([1.5], "not text"), ([float("nan")], "null"), ([b"a"], "not text")):
        assert _bad(_read(tmp_path / "a.parquet", pa.table({"text": values}))).reason == reason


def test_numbers_in_csv_are_text(tmp_path: Path) -> None:
    assert _good(_read(tmp_path / "a.csv", "text\n5\nnull\n")) == [(2, "5", None, None), (3, "null", None, None)]


def test_a_field_that_one_line_lacks_is_missing_there(tmp_path: Path) -> None:
    bad = _bad(_read(tmp_path / "a.jsonl", '{"text": "a"}\n{"txt": "b"}\n'))
    assert bad.where == "a.jsonl line 2, field text: missing"


@pytest.mark.parametrize(
    ("value", "reason"), [("null", "null"), ('" "', "empty"), ("1.5", "not text"), ("true", "not text")]
)
def test_an_id_is_text_or_a_whole_number(tmp_path: Path, value: str, reason: str) -> None:
    bad = _bad(_read(tmp_path / "a.jsonl", f'{{"id": {value}, "text": "a"}}', id="id"))
    assert (bad.field, bad.reason) == ("id", reason)


def test_a_ragged_row_is_shown_with_its_line(tmp_path: Path) -> None:
    rows = _read(tmp_path / "a.csv", "id,text\n1,a,b\n2,c\n3\n")
    first, second = (row.where for row in rows if isinstance(row, BadRow))
    assert first.startswith("a.csv row 2: 3 fields")
    assert first.endswith(": 1,a,b")
    assert second.startswith("a.csv row 4: 1 field")
    assert second.endswith(": 3")


def test_a_quote_broken_within_its_line_costs_that_line_alone(tmp_path: Path) -> None:
    rows = _read(tmp_path / "a.csv", 'id,text\n1,"a"b\n2,c\n')
    assert _bad(rows).where.startswith("a.csv row 2: ")
    assert _bad(rows).where.endswith(': 1,"a"b')
    assert 'written ""' in _bad(rows).fix
    assert "close the quote" in _bad(_read(tmp_path / "a.csv", 'id,text\n1,"a')).fix
    assert rows[1] == Row("a.csv", 3, ("c",), None, None)


def test_an_unclosed_quote_stops_the_reading_where_it_opened(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 3: .*quote") as caught:
        _read(tmp_path / "a.csv", 'id,text\n1,fine\n2,"open\n3,swallowed\n', on_bad_row="skip")
    assert (caught.value.where or "").endswith(': 2,"open')


def test_a_long_text_fits_in_a_csv(tmp_path: Path) -> None:
    text = "word " * 60_000
    assert _good(_read(tmp_path / "a.csv", f"text\n{text}\n")) == [(2, text, None, None)]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_a_missing_column_is_answered_with_those_there_are(tmp_path: Path, name: str) -> None:
    content = {
        "a.csv": "Id,Texts\n1,a\n",
        "a.jsonl": '{"Id": 1}\n{"Texts": "a"}\n',
        "a.parquet": pa.table({"Id": [1], "Texts": ["a"]}),
    }
    with pytest.raises(DataError) as caught:
        _read(tmp_path / name, content[name])
    assert name in caught.value.what
    assert "Id, Texts" in str(caught.value.where)
    assert "corpus.text: Texts" in str(caught.value.fix)


def test_columns_of_a_jsonl_file_are_listed_without_a_label_that_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        _read(tmp_path / "a.jsonl", '{"body": "a"}\n', label="label")
    assert str(caught.value.where).endswith("has the columns: body")


def test_a_text_within_an_object_is_copied_out_by_the_fix(tmp_path: Path) -> None:
    content = '{"id": 1, "my data": {"text": "yes", "label": "x"}}\n'
    for column in ("text", "data.text"):
        with pytest.raises(DataError) as caught:
            _read(tmp_path / "a b.jsonl", content, text=[column])
        command = str(caught.value.fix).partition(": ")[2].replace("python -c", f"{sys.executable} -c")
        subprocess.run(["/bin/sh", "-c", command], check=True)
        rows = list(read_rows(tmp_path / "a b-flat.jsonl", corpus=Corpus(train=["x"])))
        assert _good(rows) == [(1, "yes", None, None)]


@pytest.mark.parametrize(
    ("column", "fix"),
    [
        ("sentence", "set corpus.text: one of them, if all files have it; else rename it to sentence here"),
        ("premise,claim", 'set corpus.text: ["premise", "claim"]'),
    ],
)
def test_texts_in_other_columns_are_answered_with_the_way_to_read_them(tmp_path: Path, column: str, fix: str) -> None:
    (tmp_path / "a.csv").write_text("premise,claim\na,b\n")
    with pytest.raises(DataError) as caught:
        list(read_rows(tmp_path / "a.csv", corpus=Corpus(train=["x"], text=[column])))
    assert str(caught.value.fix).startswith(fix)


def test_a_column_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"two columns .*text"):
        _read(tmp_path / "a.csv", "text,text\na,b\n")


def test_a_label_is_optional_unless_it_is_required(tmp_path: Path) -> None:
    assert _good(_read(tmp_path / "a.csv", "text\na\n", label="label")) == [(2, "a", None, None)]
    assert _good(_read(tmp_path / "a.csv", "text,label\na,\n", label="label")) == [(2, "a", None, None)]
    with pytest.raises(DataError, match="no column label"):
        _read(tmp_path / "a.csv", "text\na\n", label="label", require_label=True)
    bad = _bad(_read(tmp_path / "a.csv", "text,label\na,\n", label="label", require_label=True))
    assert (bad.field, bad.reason) == ("label", "empty")
    late = '{"text": "a"}\n' * 100 + '{"text": "b", "label": "x"}\n'
    assert _good(_read(tmp_path / "a.jsonl", late, label="label"))[-1] == (101, "b", None, "x")


def test_a_label_outside_the_list_is_named_with_the_allowed_ones(tmp_path: Path) -> None:
    bad = _bad(_read(tmp_path / "a.csv", "text,label\na,good\nb,odd\n", label="label", labels=["good", "bad"]))
    assert bad.where == "a.csv row 3, field label: bad label: odd"
    assert "corpus.labels" in str(bad.fix)
    assert "good, bad" in str(bad.fix)


def test_a_renamed_label_is_the_new_one_everywhere_after(tmp_path: Path) -> None:
    """Labels that are allowed are the new names; two that become one are one."""
    settings: dict[str, Any] = {"label": "label", "rename": {"Trans": "traffic", "3": "traffic"}}
    content = "text,label\na,Trans\nb,law\nc,3\n"
    assert [row[3] for row in _good(_read(tmp_path / "a.csv", content, **settings))] == ["traffic", "law", "traffic"]
    rows = _read(tmp_path / "a.csv", content, **settings, labels=["law", "traffic"])
    assert [row.label for row in rows if isinstance(row, Row)] == ["traffic", "law", "traffic"]
    rows = _read(tmp_path / "a.csv", content, **settings, labels=["law", "Trans"])
    assert [row.value for row in rows if isinstance(row, BadRow)] == ["Trans", "3"]


def test_whole_numbers_are_positions_among_the_labels_in_every_format(tmp_path: Path) -> None:
    for name, content in {
        "a.csv": "text,label\na,1\nb,0\nc,2\n",
        "a.jsonl": '{"text": "a", "label": 1}\n{"text": "b", "label": "0"}\n{"text": "c", "label": 2}\n',
        "a.parquet": pa.table({"text": ["a", "b", "c"], "label": [1, 0, 2]}),
    }.items():
        rows = _read(tmp_path / name, content, label="label", labels=["no", "yes"])
        assert [row.label for row in rows if isinstance(row, Row)] == ["yes", "no"]
        assert _bad(rows).reason == "bad label"


def test_a_number_of_any_length_is_no_position(tmp_path: Path) -> None:
    for value in ("00", "-1", "1" * 5000):
        rows = _read(tmp_path / "a.csv", f"text,label\na,{value}\n", label="label", labels=["no", "yes"])
        assert _bad(rows).reason == "bad label"


def test_labels_that_are_numbers_themselves_are_never_positions(tmp_path: Path) -> None:
    rows = _read(
        tmp_path / "a.jsonl",
        '{"text": "a", "label": 1}\n{"text": "b", "label": "2"}\n',
        label="label",
        labels=["1", "2"],
    )
    assert [row.label for row in rows if isinstance(row, Row)] == ["1", "2"]
    assert _bad(_read(tmp_path / "a.jsonl", '{"text": "a", "label": 0}', label="label", labels=["1", "2"])).value == "0"


def test_whole_numbers_without_a_list_become_their_text_and_nothing_else_does(tmp_path: Path) -> None:
    rows = _read(tmp_path / "a.jsonl", '{"text": "a", "label": 3}\n{"text": "b", "label": true}\n', label="label")
    assert rows[0] == Row("a.jsonl", 1, ("a",), None, "3")
    assert _bad(rows).reason == "not text"
    assert _bad(_read(tmp_path / "a.parquet", pa.table({"text": ["a"], "label": [1.0]}), label="label")).value == "1.0"


def test_a_damaged_parquet_file_is_an_error_of_data(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["hello"] * 1000}), whole := io.BytesIO())
    data = whole.getvalue()
    footer = int.from_bytes(data[-8:-4], "little") + 8
    no_footer, no_page = data[:-footer] + bytes(footer - 8) + data[-8:], data[:4] + b"\xff" * 10 + data[14:]
    for damaged in (b"PAR1 and then nothing", no_footer, no_page):
        with pytest.raises(DataError, match=r"a\.parquet is not a whole parquet file") as caught:
            _read(tmp_path / "a.parquet", damaged)
        assert caught.value.fix == "write it again from where it came"


def test_a_column_of_values_that_python_cannot_hold_is_named_with_its_type(tmp_path: Path) -> None:
    texts_in_lists = pa.ListArray.from_arrays([0, 1], pa.array([b"caf\xe9"], pa.binary()).view(pa.string()))
    for values in (
        pa.array([10**8], pa.int32()).cast(pa.date32()),
        pa.array([10**15], pa.timestamp("s")),
        pa.array([1], pa.timestamp("us", tz="Mars/Base")),
        texts_in_lists,
    ):
        with pytest.raises(DataError, match=r"the column day of a\.parquet has values of type .*, not text"):
            _read(tmp_path / "a.parquet", pa.table({"text": ["a"], "day": values}), label="day")


def test_a_file_that_cannot_be_opened_is_an_error_of_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.csv.*No such file"):
        list(read_rows(tmp_path / "gone.csv", corpus=Corpus(train=["x"])))


def test_hostile_names_and_values_are_shown_escaped(tmp_path: Path) -> None:
    rows = _read(tmp_path / "a\x1b.csv", "text,label\nx,\x1b[31m\u202e<script>\n", label="label", labels=["a", "b"])
    assert _bad(rows).where == r"a\x1b.csv row 2, field label: bad label: \x1b[31m\u202e<script>"


def test_a_hidden_folder_is_not_proposed_for_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / ".npm").mkdir()
    with pytest.raises(DataError) as refused:
        find_files("nope", tmp_path)
    hub = "a data set on the Hub is hf://datasets/OWNER/NAME/FILE"
    assert refused.value.fix == f"put the file there, or name another; {hub}"


def test_an_option_with_an_absent_column_is_proposed_with_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("number,text,page no\n1,a text,5\n")
    with pytest.raises(DataError) as refused:
        list(read_rows(tmp_path / "new.csv", corpus=Corpus(train=["x"], id="nope"), setting="--{} "))
    assert refused.value.fix == "--id number or 'page no'"
