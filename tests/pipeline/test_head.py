"""HEAD.json and pins: the few values of a workspace that change, or that are decided once."""

from __future__ import annotations

from pathlib import Path

from amalgam.pipeline.storage.store import Store


def test_overrides_in_head_are_those_of_its_fingerprint(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.move_head("letters", "abc")
    store.move_head("letters", "def")  # another command, at the same time
    store.store_overrides({"letters": "abc"}, {"cache.seed": 1}, "a.yaml")
    assert store.head()["letters"] == {"fingerprint": "abc", "overrides": {"cache.seed": 1}, "file": "a.yaml"}


def test_overrides_are_stored_for_the_stages_of_the_command_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for stage in ("a", "b"):
        store.move_head(stage, "1" * 20)
    store.store_overrides({"a": "2" * 20}, {"x": 1}, "amalgam.yaml")
    assert store.head()["a"] == {"fingerprint": "2" * 20, "overrides": {"x": 1}, "file": "amalgam.yaml"}
    assert store.head()["b"] == {"fingerprint": "1" * 20, "overrides": {}}
    store.move_head("a", "3" * 20)
    assert store.head()["a"] == {"fingerprint": "3" * 20, "overrides": {"x": 1}, "file": "amalgam.yaml"}


def test_only_the_last_result_is_marked_as_computed_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.move_head("a", "1" * 20)
    store.mark_rebuilding("a", "2" * 20)
    assert "rebuilding" not in store.head()["a"]
    store.mark_rebuilding("a", "1" * 20)
    assert store.head()["a"]["rebuilding"] is True
    store.move_head("a", "1" * 20)
    assert "rebuilding" not in store.head()["a"]


def test_a_damaged_head_is_written_again_from_its_copy(tmp_path: Path) -> None:
    Store(tmp_path).move_head("a", "1" * 20)
    path = tmp_path / "HEAD.json"
    before = path.read_bytes()
    path.write_bytes(before[:-9])
    assert Store(tmp_path).last("a") == "1" * 20
    assert path.read_bytes() == before


def test_head_keeps_what_other_stages_built(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.move_head("letters", "abc")
    store.move_head("joined", "def")
    store.move_head("letters", "xyz")
    assert {stage: entry["fingerprint"] for stage, entry in store.head().items()} == {"letters": "xyz", "joined": "def"}


def test_a_pin_keeps_its_first_value(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.pinned("commit", "org/model main") is None
    assert store.pin("commit", "org/model main", "aaa") == "aaa"
    assert store.pin("commit", "org/model main", "bbb") == "aaa"
    assert Store(tmp_path).pinned("commit", "org/model main") == "aaa"
    assert store.pinned("commit", "org/model v2") is None


def test_a_garbage_pin_is_replaced(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.pin("dtype", "auto", "fp32")
    for path in (tmp_path / "pins").iterdir():  # its copy too
        path.write_bytes(b"\0" * 40)
    assert store.pin("dtype", "auto", "bf16") == "bf16"


def test_a_pin_of_another_name_is_no_pin(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.pin("hub", "one", "aaa")
    store.pin("hub", "two", "bbb")
    one, other = (path for path in sorted((tmp_path / "pins").iterdir()) if ".copy" not in path.name)
    texts = one.read_bytes(), other.read_bytes()
    one.write_bytes(texts[1])
    other.write_bytes(texts[0])
    assert (store.pinned("hub", "one"), store.pinned("hub", "two")) == ("aaa", "bbb")
