"""A part of the corpus: the same files for any order, format or copies; all faults reported; memory bounded."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from amalgam.data import corpus as corpus_module
from amalgam.data.corpus import PartFacts, leaks, places_of, read_part
from amalgam.data.keys import prefix_name, text_key
from amalgam.data.parquet import read_table
from amalgam.pipeline.config.schema import Corpus
from amalgam.pipeline.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from amalgam.data.corpus import PartName

Rows = list[tuple[Any, ...]]


def _write(path: Path, rows: Rows, columns: Sequence[str] = ("id", "text", "label")) -> Path:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table(dict(zip(columns, zip(*rows, strict=True), strict=True))), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([columns, *rows])
    return path


def _take(
    folder: Path, *sources: Path, part: PartName = "train", require_label: bool = False, **corpus: Any
) -> PartFacts:
    folder.mkdir()
    settings = Corpus(train=["x"], label="label", **corpus)
    return read_part(sources, settings, part=part, folder=folder, require_label=require_label)


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _rows(count: int, seed: int = 0) -> Rows:
    draw = random.Random(seed)  # noqa: S311 - any order will do, so long as it is the same
    return [(f"id{at:05}", f"text {at} é {draw.random()}", f"label{at % 3}") for at in range(count)]


def read_texts(path: Path) -> dict[str, list[Any]]:
    return read_table(path).to_pydict()


def _prefix(key: bytes, bits: int) -> str:
    return prefix_name(int.from_bytes(key[:4], "big") >> (32 - bits), bits)


def test_a_part_is_written_by_bucket_in_key_order(tmp_path: Path) -> None:
    rows = _rows(1500)
    facts = _take(tmp_path / "out", _write(tmp_path / "a.csv", rows), id="id")
    assert (facts["rows"], facts["texts"], facts["bits"], facts["labels"]) == (
        1500,
        1500,
        2,
        dict.fromkeys(("label0", "label1", "label2"), 500),
    )
    assert [bucket["file"] for bucket in facts["buckets"]] == ["00.parquet", "01.parquet", "10.parquet", "11.parquet"]
    assert sorted(_bytes(tmp_path / "out")) == facts["files"]
    seen: list[tuple[bytes, str | tuple[str, str], str | None, str | None]] = []
    for bucket in facts["buckets"]:
        texts = read_texts(tmp_path / "out" / bucket["file"])
        assert len(texts["key"]) == bucket["rows"]
        assert {_prefix(key, 2) for key in texts["key"]} == {bucket["prefix"]}
        seen += zip(*(texts[name] for name in ("key", "text", "label", "id")), strict=True)
    assert seen == sorted((text_key([text]), text, label, key) for key, text, label in rows)
    assert facts["texts_digest"] == sha256(b"".join(key for key, *_ in seen)).hexdigest()


@pytest.mark.parametrize(("rows", "buckets"), [(40, 1), (1200, 1024)])
def test_the_files_do_not_depend_on_order_copies_names_or_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, buckets: int
) -> None:
    monkeypatch.setattr("amalgam.data.keys.MOST_ROWS", max(2, 40 // buckets))
    texts = [(text, label) for _, text, label in _rows(rows)]
    mixed = texts + texts[: rows // 2]
    mixed.sort(key=lambda row: text_key(row[0][::-1]))
    one = _take(tmp_path / "one", _write(tmp_path / "one.csv", texts, ("text", "label")))
    halves = [
        _write(tmp_path / f"{name}.parquet", part, ("text", "label"))
        for name, part in (("b", mixed[:7]), ("a", mixed[7:]))
    ]
    two = _take(tmp_path / "two", *halves)
    assert _bytes(tmp_path / "one") == _bytes(tmp_path / "two")
    assert two == {**one, "rows": rows + rows // 2, "duplicates": rows // 2}
    assert 1 << one["bits"] == buckets
    assert sorted(_bytes(tmp_path / "one")) == sorted(
        {f"{_prefix(text_key([text]), one['bits'])}.parquet" for text, _ in texts}
    )


def test_polars_reads_what_is_written(tmp_path: Path) -> None:
    facts = _take(tmp_path / "out", _write(tmp_path / "a.csv", _rows(20)), id="id")
    table = pl.read_parquet(tmp_path / "out" / "all.parquet")
    assert table.columns == ["key", "text", "text_2", "id", "label"]
    assert set(table["id"]) == {key for key, *_ in _rows(20)}
    assert facts["buckets"][0]["prefix"] == "all"


def test_one_text_twice_is_kept_once_under_its_smallest_id(tmp_path: Path) -> None:
    facts = _take(
        tmp_path / "out",
        _write(tmp_path / "a.csv", [("b", "same", "x"), ("a", "same", "x"), ("c", "other", "x")]),
        id="id",
    )
    assert (facts["rows"], facts["texts"], facts["duplicates"], facts["conflicts"]) == (3, 2, 1, 0)
    texts = read_texts(tmp_path / "out" / "all.parquet")
    assert dict(zip(texts["text"], texts["id"], strict=True)) == {"same": "a", "other": "c"}


def test_copies_that_disagree_take_the_label_most_of_them_give(tmp_path: Path) -> None:
    rows = [("a", "x"), ("b", "z"), ("a", "y"), ("b", "q"), ("a", "y"), ("c", ""), ("c", "z")]
    facts = _take(tmp_path / "out", _write(tmp_path / "a.csv", rows, ("text", "label")))
    texts = read_texts(tmp_path / "out" / "all.parquet")
    assert dict(zip(texts["text"], texts["label"], strict=True)) == {"a": "y", "b": "q", "c": "z"}
    assert (facts["conflicts"], facts["labels"]) == (2, {"q": 1, "y": 1, "z": 1})


def test_the_labels_digest_depends_on_labels_alone(tmp_path: Path) -> None:
    rows = [("a", "x"), ("b", "y")]
    facts = {
        name: _take(tmp_path / name, _write(tmp_path / f"{name}.csv", changed, ("text", "label")))
        for name, changed in {
            "one": rows,
            "two": rows[::-1],
            "three": [("a", "x"), ("b", "x")],
            "four": [("a", ""), ("b", "")],
        }.items()
    }
    assert facts["one"]["labels_digest"] == facts["two"]["labels_digest"]
    assert len({facts[name]["labels_digest"] for name in ("one", "three", "four")}) == 3
    assert facts["four"]["labels_digest"] is None
    assert len({part["texts_digest"] for part in facts.values()}) == 1


def test_pairs_of_texts_are_pairs_again_when_read(tmp_path: Path) -> None:
    rows = [("a", "b"), ("ab", "c"), ("a", "b")]
    facts = _take(tmp_path / "out", _write(tmp_path / "a.jsonl", rows, ("one", "two")), text=["one", "two"])
    texts = read_texts(tmp_path / "out" / "all.parquet")
    assert set(zip(texts["text"], texts["text_2"], strict=True)) == {("a", "b"), ("ab", "c")}
    assert facts["duplicates"] == 1


def test_a_limit_is_a_sample_by_content_and_a_larger_one_keeps_the_smaller_ones_texts(tmp_path: Path) -> None:
    rows = _rows(3000)
    facts, kept = [], []
    for at, (limit, order) in enumerate([(600, 1), (600, -1), (1300, 1)]):
        source = _write(tmp_path / f"{at}.csv", rows[::order])
        facts.append(_take(tmp_path / str(at), source, limit=limit))
        buckets = [read_texts(tmp_path / str(at) / bucket["file"]) for bucket in facts[at]["buckets"]]
        kept.append({text for bucket in buckets for text in bucket["text"]})
    assert _bytes(tmp_path / "0") == _bytes(tmp_path / "1")
    assert [len(texts) for texts in kept] == [600, 600, 1300]
    assert kept[0] < kept[2]
    assert (facts[2]["over_limit"], facts[2]["bits"], sum(facts[2]["labels"].values())) == (1700, 3, 1300)
    assert _take(tmp_path / "test", _write(tmp_path / "t.csv", rows), part="test", limit=600)["texts"] == 3000


BAD: Rows = [("1", "fine", "a"), ("2", " ", "a"), ("3", "fine too", "odd"), ("", "no id", "b"), ("5", "", "b")]


def test_bad_rows_are_listed_together_the_first_in_full(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        _take(tmp_path / "out", _write(tmp_path / "a.csv", BAD), id="id", labels=["a", "b"])
    assert "4 rows" in caught.value.what
    assert all(f"a.csv row {row} " in caught.value.what for row in (3, 4, 5, 6))
    assert str(caught.value.where).startswith("a.csv row 3, field text: ")
    assert str(caught.value.fix) == (
        "empty: fill it in or remove the row; bad label: corpus.labels allows: a, b; "
        "or leave such rows out, corpus.on_bad_row: skip"
    )
    assert caught.value.exit_code == 3
    assert _bytes(tmp_path / "out") == {}


def test_bad_rows_can_be_left_out_and_are_listed(tmp_path: Path) -> None:
    facts = _take(tmp_path / "out", _write(tmp_path / "a.csv", BAD), id="id", labels=["a", "b"], on_bad_row="skip")
    assert (facts["rows"], facts["texts"], facts["skipped"]) == (5, 1, {"bad label": 1, "empty": 3})
    assert facts["files"] == ["all.parquet", "skipped.parquet"]
    assert pl.read_parquet(tmp_path / "out" / "skipped.parquet").rows() == [
        ("a.csv", 3, "2", "text", "empty", " "),
        ("a.csv", 4, "3", "label", "bad label", "odd"),
        ("a.csv", 5, None, "id", "empty", ""),
        ("a.csv", 6, "5", "text", "empty", ""),
    ]


def test_a_text_that_is_not_utf8_obeys_the_policy_too(tmp_path: Path) -> None:
    source = tmp_path / "data.csv"
    source.write_bytes(b"text\ncaf\xe9\nfine\n")
    with pytest.raises(DataError) as caught:
        _take(tmp_path / "out", source)
    assert "data.csv row 2 (byte 9), field text" in str(caught.value.where)
    assert r"caf\xe9" in str(caught.value.where)
    assert _take(tmp_path / "skip", source, on_bad_row="skip")["skipped"] == {"not UTF-8": 1}


def test_a_reason_that_occurs_after_the_rows_in_the_message_has_its_fix(tmp_path: Path) -> None:
    (source := tmp_path / "data.csv").write_bytes(b"text\n" + b" \n" * 9 + b"caf\xe9\n")
    with pytest.raises(DataError) as caught:
        _take(tmp_path / "out", source)
    assert "the first 5 are: data.csv row 2 empty; " in caught.value.what
    assert "; not UTF-8: re-encode it: iconv -f cp1252" in str(caught.value.fix)


def test_a_bad_row_is_reported_without_reading_a_huge_file_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "LOOK_ON", 3)
    source = _write(tmp_path / "a.csv", [(" ",), ("b",), ("c",), ("d",), (" ",)], ["text"])
    with pytest.raises(DataError, match="a row of the train texts"):
        _take(tmp_path / "out", source)


def test_ids_of_two_kinds_become_text(tmp_path: Path) -> None:
    source = _write(tmp_path / "a.jsonl", [(1, "a", "x"), (2, "b", "x"), ("x", "c", "x")])
    _take(tmp_path / "out", source, id="id")
    assert sorted(read_texts(tmp_path / "out" / "all.parquet")["id"]) == ["1", "2", "x"]


def test_one_as_a_number_and_as_text_are_never_merged(tmp_path: Path) -> None:
    source = _write(tmp_path / "a.jsonl", [(1, "a", "x"), ("1", "b", "x")])
    with pytest.raises(DataError, match="1 id in id is given"):
        _take(tmp_path / "out", source, id="id")


def test_ids_given_twice_are_listed_with_their_rows(tmp_path: Path) -> None:
    first = _write(tmp_path / "a.csv", [(f"i{at}", f"text {at}", "x") for at in range(7)])
    second = _write(tmp_path / "b.csv", [(f"i{at}", f"other {at}", "x") for at in range(6, 0, -1)])
    with pytest.raises(DataError) as caught:
        _take(tmp_path / "out", second, first, id="id")
    assert caught.value.what.startswith("5 or more ids in id")
    assert (caught.value.where or "").startswith("i6 in a.csv row 8 and b.csv row 2; i5 in a.csv row 7 and b.csv row 3")
    assert "corpus.id: auto" in str(caught.value.fix)
    assert _take(tmp_path / "auto", first, second)["texts"] == 13


def test_a_row_that_is_delivered_twice_is_one_text_also_with_an_id(tmp_path: Path) -> None:
    rows = _rows(30)
    first, second = _write(tmp_path / "a.csv", rows[:20]), _write(tmp_path / "b.csv", rows[10:])
    facts = _take(tmp_path / "out", first, second, id="id")
    assert (facts["texts"], facts["duplicates"], facts["conflicts"]) == (30, 10, 0)
    changed = _write(tmp_path / "c.csv", [("id00012", "another text", "label0"), rows[13]])
    with pytest.raises(DataError, match="1 id in id is given to different texts") as caught:
        _take(tmp_path / "refused", first, second, changed, id="id")
    assert caught.value.where == "id00012 in a.csv row 14 and c.csv row 2"


@pytest.mark.parametrize(
    ("name", "content"), [("a.csv", ""), ("a.csv", "text\n"), ("a.jsonl", "\n"), ("a.parquet", None)]
)
def test_a_file_without_rows_is_refused(tmp_path: Path, name: str, content: str | None) -> None:
    source = tmp_path / name
    if content is None:
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), source)
    else:
        source.write_text(content)
    with pytest.raises(DataError, match=f"no rows in {name}"):
        _take(tmp_path / "out", source)


def test_a_file_of_bad_rows_alone_leaves_nothing(tmp_path: Path) -> None:
    source = _write(tmp_path / "a.csv", [(" ",), (" ",)], ["text"])
    with pytest.raises(DataError, match=r"a\.csv: 2 empty"):
        _take(tmp_path / "out", source, on_bad_row="skip")


def test_labels_are_insisted_on_where_they_are_measured(tmp_path: Path) -> None:
    source = _write(tmp_path / "a.csv", [("a",)], ["text"])
    assert _take(tmp_path / "train", source)["labels"] == {}
    parts: list[tuple[PartName, bool]] = [("validation", False), ("test", False), ("teachers", False), ("train", True)]
    for part, require in parts:
        with pytest.raises(DataError, match="no column label"):
            _take(tmp_path / f"{part}{require}", source, part=part, require_label=require)


def test_files_of_the_same_name_are_distinguished(tmp_path: Path) -> None:
    sources = [_write(tmp_path / folder / "a.csv", [(" ",)], ["text"]) for folder in ("two", "one")]
    with pytest.raises(DataError, match=r"one/a\.csv row 2 .*; two/a\.csv row 2 "):
        _take(tmp_path / "out", *sources)


def test_texts_in_both_parts_are_counted_and_named_by_file_and_row(tmp_path: Path) -> None:
    rows = _rows(1300)
    shared = rows[100:107]
    _take(tmp_path / "train", _write(tmp_path / "a.csv", rows))
    _take(tmp_path / "test", _write(tmp_path / "b.csv", [*shared, ("new", "new", "x")]), part="test", id="id")
    count, keys = leaks(tmp_path / "train", tmp_path / "test")
    assert count == 7
    assert len(keys) == 5
    assert set(keys) < {text_key([text]) for _, text, _ in shared}
    places = places_of(keys, [tmp_path / "a.csv"], Corpus(train=["a.csv"]))
    assert len(places) == 5
    assert set(places) < {f"a.csv row {row}" for row in range(102, 109)}
    _take(tmp_path / "clean", _write(tmp_path / "c.csv", [("new", "new", "x")]))
    assert leaks(tmp_path / "train", tmp_path / "clean") == (0, [])


READ = """
import sys
from pathlib import Path
from amalgam.data import parquet
from amalgam.data.corpus import read_part
from amalgam.pipeline.config.schema import Corpus
parquet.RUN_CHARACTERS = 2 << 20  # several runs for either size, so that only what grows with the corpus differs
folder = Path(sys.argv[2])
folder.mkdir()
read_part([Path(sys.argv[1])], Corpus(train="x", id="id"), part="train", folder=folder)
"""
# A process inherits the memory peak of its parent, so a small process starts the reader.
PEAK = """
import resource, subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[1:]], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, suffix: str) -> None:
    words = "word " * 500
    peak = {}
    for count in (2_000, 18_000):
        rows = [(f"{at}", f"{at} {words}") for at in range(count)]
        source = _write(tmp_path / f"{count}{suffix}", rows, ("id", "text"))
        command = [sys.executable, "-c", PEAK, READ, str(source), str(tmp_path / f"out-{count}")]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peak[count] = int(done.stdout) >> (20 if sys.platform == "darwin" else 10)
    # Allocators and read-ahead differ by up to 20 MB from run to run; holding the texts would take 41 MB more.
    assert peak[18_000] - peak[2_000] < 32, peak
