"""Identity: equal content is equal, other content is other, and what differs can be named."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amalgam.pipeline import input_files
from amalgam.pipeline.input_files import file_digest
from amalgam.pipeline.storage.fingerprint import LENGTH, FileDigests, differences, fingerprint
from amalgam.pipeline.storage.small_files import canonical, signed, verified

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
PLAIN = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)


def test_equal_content_is_equal_whatever_the_order_of_its_keys() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"a": 1} | {"b": [1, 2]})
    assert fingerprint({"a": 1, "b": [1, 2]}) != fingerprint({"a": 1, "b": [2, 1]})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": "1"}),
        ({"a": None}, {}),
        ({"a": ""}, {"a": None}),
        ({"ab": "c"}, {"a": "bc"}),
        (["ab", "c"], ["a", "bc"]),
        ({"a": []}, {"a": {}}),
        ("é", "e\u0301"),
    ],
)
def test_nearly_equal_values_have_different_fingerprints(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)
    assert list(differences(one, other)) != []


def test_a_fingerprint_is_this_one_for_ever() -> None:
    """Should this fail, every workspace out there would be computed again."""
    assert canonical({"b": [1, 0.2, None, True], "a": "é"}) == '{"a":"é","b":[1,0.2,null,true]}'
    assert fingerprint({"b": [1, 0.2, None, True], "a": "é"}) == "6b3c3f3d58b5532801c2"
    assert len(fingerprint({})) == LENGTH == 20


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_has_not_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        fingerprint({"a": number})


def test_live_objects_and_paths_are_refused() -> None:
    for live in (Path("a"), object(), {1, 2}, b"bytes"):
        with pytest.raises(TypeError):
            fingerprint({"a": live})


@given(PLAIN, PLAIN)
def test_two_identities_differ_exactly_when_a_difference_can_be_named(one: Any, other: Any) -> None:
    assert (fingerprint(one) == fingerprint(other)) == (list(differences(one, other)) == [])


CHANGED_ORDER = [("a.0.0", "x -> y"), ("a.0.1", "1 -> 2"), ("a.1.0", "y -> x"), ("a.1.1", "2 -> 1")]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": {"b": 0.2}}, {"a": {"b": 0.5}}, [("a.b", "0.2 -> 0.5")]),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, [("a.1.b", "2 -> 3")]),
        ({"a": [1]}, {"a": [1, 2]}, [("a", "[1] -> [1,2]")]),
        ({"a": None}, {}, [("a", "null -> not used")]),
        ({}, {"a": "x"}, [("a", "not used -> x")]),
        ({"a": 1, "b": 2}, {"b": 3, "c": 4}, [("a", "1 -> not used"), ("b", "2 -> 3"), ("c", "not used -> 4")]),
        ({"a": "soft"}, {"a": "hard"}, [("a", "soft -> hard")]),
        ({"a": "x" * 99}, {"a": 1}, [("a", "x" * 37 + "... -> 1")]),
        ({"a": "0123456789abcdef" * 4}, {"a": "f" * 64}, [("a", "01234567 -> ffffffff")]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, []),
        ({"a": ["a" * 64]}, {"a": ["a" * 64, "b" * 64]}, [("a", "aaaaaaaa -> aaaaaaaa, bbbbbbbb")]),
        ({"a": ["a" * 64]}, {"a": ["b" * 64] * 5}, [("a", "aaaaaaaa -> bbbbbbbb, bbbbbbbb, bbbbbbbb and 2 more")]),
        ({"a": {"b": {"c": 1}}}, {"a": {}}, [("a.b", "removed")]),
        ({"a": {}}, {"a": {"b": {"c": 1}}}, [("a.b", "added")]),
        ({"a": [["x", {"c": 1}]]}, {"a": [["x", {"c": 2}], ["y", {}]]}, [("a.x.c", "1 -> 2"), ("a.y", "added")]),
        ({"a": [["x", {}], ["y", {}]]}, {"a": [["y", {}], ["z", {}]]}, [("a.x", "removed"), ("a.z", "added")]),
        ({"a": [["x", 1], ["x", 1]]}, {"a": [["x", 1]]}, [("a", "changed")]),
        ({"a": [["x", {"c": 1}], ["y", 2]]}, {"a": [["x", {"c": 2}], ["y", 2]]}, [("a.x.c", "1 -> 2")]),
        ({"a": [["x", 1], ["y", 2]]}, {"a": [["y", 2], ["x", 1]]}, CHANGED_ORDER),
    ],
)
def test_differences_name_the_field_and_both_values(old: Any, new: Any, expected: list[tuple[str, str]]) -> None:
    assert list(differences(old, new)) == expected


# ---- digests of files outside the workspace


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files just written count as settled."""
    monkeypatch.setattr(input_files, "SETTLED_SECONDS", -1.0)


@pytest.mark.usefixtures("settled")
def test_a_digest_is_kept_across_processes(tmp_path: Path) -> None:
    memo, source = tmp_path / "w" / "digests.json", tmp_path / "a.txt"
    source.write_text("text")
    first = FileDigests(memo)
    assert first(source) == file_digest(source)
    first.save()
    content = verified(memo.read_bytes().replace(file_digest(source).encode(), b"remembered"), trusted=True)
    assert content is not None
    memo.write_bytes(signed(content))
    assert FileDigests(memo)(source) == "remembered"
    memo.write_bytes(memo.read_bytes().replace(b"remembered", b"Remembered"))
    assert FileDigests(memo)(source) == file_digest(source)  # a damaged digest is computed again


@pytest.mark.usefixtures("settled")
def test_a_file_replaced_in_place_with_its_size_and_time_restored_is_noticed(tmp_path: Path) -> None:
    memo, source = tmp_path / "digests.json", tmp_path / "a.txt"
    source.write_text("text")
    before = source.stat()
    digest_of = FileDigests(memo)
    assert digest_of(source) == file_digest(source)
    digest_of.save()
    after = before
    while after.st_ctime_ns == before.st_ctime_ns:  # the clock of a file system can be coarse
        time.sleep(0.02)
        with source.open("r+") as file:
            file.write("TEXT")
        os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = source.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert digest_of(source) == FileDigests(memo)(source) == file_digest(source)


@pytest.mark.usefixtures("settled")
def test_two_processes_keep_each_others_digests(tmp_path: Path) -> None:
    memo, paths = tmp_path / "digests.json", [tmp_path / "a.txt", tmp_path / "b.txt"]
    processes = [FileDigests(memo) for _ in paths]
    for digest_of, path in zip(processes, paths, strict=True):
        path.write_text(path.name)
        digest_of(path)
        digest_of.save()
    both = FileDigests(memo)
    assert [both(path) for path in paths] == [file_digest(path) for path in paths]
    assert not both.is_changed


def test_the_digest_of_a_file_changed_just_now_is_not_kept(tmp_path: Path) -> None:
    memo, source = tmp_path / "digests.json", tmp_path / "a.txt"
    source.write_text("text")
    digest_of = FileDigests(memo)
    digest_of(source)
    digest_of.save()
    assert not memo.exists()


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("garbage", ["", "{", "[]", "\0\0", "null", "[" * 100_000])
def test_a_garbled_memo_costs_time_and_never_truth(tmp_path: Path, garbage: str) -> None:
    memo, source = tmp_path / "digests.json", tmp_path / "a.txt"
    source.write_text("text")
    memo.write_text(garbage)
    digest_of = FileDigests(memo)
    assert digest_of(source) == file_digest(source)
    digest_of.save()
    assert file_digest(source) in memo.read_text()


@pytest.mark.usefixtures("settled")
def test_a_memo_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "w").write_text("a file")
    source = tmp_path / "a.txt"
    source.write_text("text")
    digest_of = FileDigests(tmp_path / "w" / "digests.json")
    digest_of(source)
    digest_of.save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "w"]


def test_a_file_that_is_not_there_is_an_error_and_no_digest(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileDigests(tmp_path / "digests.json")(tmp_path / "a.txt")
