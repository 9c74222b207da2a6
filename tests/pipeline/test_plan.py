"""Current and outdated stages: every reason of the closed list, and its wording."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypedDict, get_args

import pytest

from amalgam.pipeline.errors import DamagedError
from amalgam.pipeline.execution.plan import Reason, StageState, explain_change, plan
from amalgam.pipeline.execution.runner import update
from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.storage.facts import DECLARED, FactTypes
from amalgam.pipeline.storage.store import MANIFEST, canonical_record
from amalgam.stages.app.commands import branches
from amalgam.stages.registry import STAGE_NAMED
from amalgam.tests.pipeline.toy_stages import Joined, Letters, Pair, built_toy, calls, toy_base, toy_run, toy_stages


class NewFacts(TypedDict):
    new: int


Seen = tuple[str, str, str | None, str, int | None, int | None]


def _plan(base: Path, stages: Any = None, **sections: Any) -> list[Seen]:
    before = sorted(base.rglob("*"))
    states = plan(stages or toy_stages(), toy_run(base, **sections))
    assert sorted(base.rglob("*")) == before  # looking changes nothing
    return [(s.stage, s.state, s.reason, s.detail, s.done, s.total) for s in states]


CURRENT: list[Seen] = [
    ("letters", "current", None, "", 3, 3),
    ("joined", "current", None, "", 1, 1),
    ("pair", "current", None, "", 1, 1),
]


def test_nothing_is_there_on_the_first_run(tmp_path: Path) -> None:
    assert _plan(toy_base(tmp_path)) == [
        ("letters", "missing", "first-run", "", 0, 3),
        ("joined", "missing", "first-run", "after letters", None, None),
        ("pair", "missing", "first-run", "after joined", None, None),
    ]


def test_built_stages_are_current(tmp_path: Path) -> None:
    built_toy(toy_base(tmp_path))
    assert _plan(tmp_path) == CURRENT


def test_a_changed_setting_is_named_with_both_values_and_reruns_what_reads_it(tmp_path: Path) -> None:
    built_toy(toy_base(tmp_path))
    assert _plan(tmp_path, targets={"temperature": 0.5}) == [
        CURRENT[0],
        ("joined", "missing", "config", "targets.temperature: 0.2 -> 0.5", 0, 1),
        ("pair", "missing", "upstream", "after joined", None, None),
    ]


def test_a_setting_changed_back_is_current_again(tmp_path: Path) -> None:
    built_toy(toy_base(tmp_path))
    built_toy(tmp_path, targets={"temperature": 0.5})
    assert _plan(tmp_path) == CURRENT


@pytest.mark.parametrize(
    "sections",
    [
        {"student": {"learning_rate": 0.1}},
        {"student": {"name": "other"}},
        {"execution": {"device": "cpu", "batch_tokens": 1, "training_checkpoint_seconds": 1}},
    ],
)
def test_fields_that_no_stage_reads_rerun_nothing(tmp_path: Path, sections: dict[str, Any]) -> None:
    built_toy(toy_base(tmp_path))
    assert _plan(tmp_path, **sections) == CURRENT


def test_a_changed_source_is_an_input(tmp_path: Path) -> None:
    built_toy(toy_base(tmp_path))
    toy_base(tmp_path, "apple\n")
    (stage, state, reason, detail, done, total), joined, _ = _plan(tmp_path)
    assert (stage, state, reason, done, total) == ("letters", "missing", "input", 0, 1)
    assert detail.startswith("source: ")
    assert " -> " in detail
    assert joined[2:4] == ("upstream", "after letters")


def test_a_changed_result_upstream_is_named(tmp_path: Path) -> None:
    before = built_toy(toy_base(tmp_path)).fingerprint("joined")
    changed: dict[str, Any] = {"targets": {"temperature": 0.5}}
    run = toy_run(tmp_path, **changed)
    update(toy_stages(), run, target="joined")
    states = plan(toy_stages(), run)
    now = run.fingerprint("joined")
    assert (states[2].reason, states[2].detail) == ("upstream", f"joined: {before[:8]} -> {now[:8]}")


def test_a_renamed_source_reruns_nothing(tmp_path: Path) -> None:
    built_toy(toy_base(tmp_path))
    (tmp_path / "source.txt").rename(tmp_path / "renamed.txt")
    assert _plan(tmp_path, corpus={"train": "renamed.txt"}) == CURRENT


class NewerJoined(Joined):
    VERSION: ClassVar[int] = 2


def test_newer_code_is_named_with_both_versions(tmp_path: Path) -> None:
    built_toy(toy_base(tmp_path))
    states = _plan(tmp_path, (Letters(), NewerJoined(), Pair()))
    assert states[:2] == [CURRENT[0], ("joined", "missing", "code", "joined: code 1 -> 2", 0, 1)]


def test_newer_code_is_named_where_it_writes_other_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built_toy(toy_base(tmp_path))
    monkeypatch.setitem(DECLARED, "joined", FactTypes(manifest=NewFacts))
    states = _plan(tmp_path, (Letters(), NewerJoined(), Pair()))
    assert states[1] == ("joined", "missing", "code", "joined: code 1 -> 2", 0, 1)


def test_a_deleted_file_is_missing_and_only_its_unit(tmp_path: Path) -> None:
    file = built_toy(toy_base(tmp_path)).result("letters").files[1]
    (tmp_path / "artifacts" / file.path).unlink()
    assert _plan(tmp_path)[0] == ("letters", "partial", "missing", f"{file.path} is missing", 2, 3)


def test_a_file_of_another_size_is_damaged(tmp_path: Path) -> None:
    file = built_toy(toy_base(tmp_path)).result("letters").files[1]
    os.truncate(tmp_path / "artifacts" / file.path, 1)
    sizes = f"(size 1, expected {file.bytes})"
    stage, state, reason, detail, *units = _plan(tmp_path)[0]
    assert (stage, state, reason, units) == ("letters", "partial", "damaged", [2, 3])
    assert file.path in detail
    assert sizes in detail


def test_a_file_that_is_damaged_again_ends_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: object) -> None:
        raise DamagedError("letters are damaged", path="letters")

    monkeypatch.setattr(Letters, "identity", damaged)
    with pytest.raises(DamagedError):
        plan(toy_stages(), toy_run(toy_base(tmp_path)))


def test_a_deleted_manifest_is_missing_and_a_garbled_one_damaged(tmp_path: Path) -> None:
    run = built_toy(toy_base(tmp_path))
    manifest = run.store.folder("letters", run.fingerprint("letters")) / MANIFEST
    manifest.write_bytes(b"\0" * 9)
    assert _plan(tmp_path)[0] == ("letters", "partial", "damaged", f"{MANIFEST} cannot be read", 3, 3)
    manifest.unlink()
    assert _plan(tmp_path)[0] == ("letters", "partial", "missing", f"{MANIFEST} is missing", 3, 3)


def test_a_deleted_previous_result_is_reported_as_missing(tmp_path: Path) -> None:
    import shutil

    built_toy(toy_base(tmp_path))
    shutil.rmtree(tmp_path / "artifacts" / "joined")
    assert _plan(tmp_path, targets={"temperature": 0.5})[1][2] == "missing"


def test_a_partly_done_stage_counts_its_units(tmp_path: Path) -> None:
    def fail_at_c(_run: Run, unit: Any) -> None:
        if unit.name == "c":
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        update(toy_stages(fail_at_c), toy_run(toy_base(tmp_path)))
    assert _plan(tmp_path)[0] == ("letters", "partial", "first-run", "", 2, 3)
    built_toy(tmp_path)
    assert calls(tmp_path) == ["a", "b", "c", "c", "joined", "pair"]


def test_a_field_that_follows_from_other_inputs_is_the_reason_only_alone() -> None:
    old = {"config": {"student": {"evaluate_every": 39, "seed": 0}}, "upstream": {"build-targets": "a" * 20}}
    new = {"config": {"student": {"evaluate_every": 38, "seed": 0}}, "upstream": {"build-targets": "b" * 20}}
    chosen = {"student.evaluate_every": 38}
    assert explain_change(Letters(), old, new, chosen) == ("upstream", "build-targets: aaaaaaaa -> bbbbbbbb")
    assert explain_change(Letters(), old, {**new, "upstream": old["upstream"]}, chosen) == (
        "config",
        "student.evaluate_every: 39 -> 38",
    )
    new["config"] = {"student": {"evaluate_every": 38, "seed": 1}}
    assert explain_change(Letters(), old, new, chosen) == ("config", "student.seed: 0 -> 1")


def test_the_first_reason_counts_changed_inputs_too() -> None:
    old: dict[str, Any] = {"config": {"student": {"seed": 5}}, "inputs": {"encoder": "a" * 20}, "upstream": {}}
    new = {"config": {"student": {"seed": 0}}, "inputs": {"encoder": "a" * 20, "static": 1}, "upstream": {}}
    assert explain_change(Letters(), old, new) == ("config", "student.seed: 5 -> 0 (+1 more)")
    old["config"], new["config"] = {"targets": {"distribution": "x", "mode": "hard"}}, {"targets": {"mode": "uhc"}}
    assert explain_change(Letters(), old, new) == ("config", "targets.mode: hard -> uhc (+2 more)")


@pytest.mark.parametrize(
    ("stage", "old", "new", "detail"),
    [
        ("read-corpus", {}, {"test": ["a" * 20]}, "content of corpus.test: not used -> aaaaaaaa"),
        (
            "cache-teachers",
            {"teachers": {"bert-1.5": {"content": "a" * 20}}},
            {"teachers": {"bert-1.5": {"content": "b" * 20}}},
            "model files of teacher bert-1.5: aaaaaaaa -> bbbbbbbb",
        ),
        (
            "cache-features",
            {"states": [["b", {"max_tokens": 8}]]},
            {"states": [["b", {"max_tokens": 9}]]},
            "max_tokens of teacher b: 8 -> 9",
        ),
        ("cache-features", {"features": {"a": 1}}, {}, "hidden states of the student's encoder: removed"),
        ("weigh-teachers", {"knows": [["b", ["no"]]]}, {"knows": [["b", ["yes"]]]}, "labels of teacher b: no -> yes"),
        (
            "weigh-teachers",
            {"knows": [["bert-v1.5", ["no"]], ["b", ["law"]]]},
            {"knows": [["bert-v1.5", ["yes"]], ["c", ["law"]]]},
            "labels of teacher bert-v1.5: no -> yes (+2 more)",
        ),
        (
            "weigh-teachers",
            {"knows": [["bert-v1.5", ["no"]]]},
            {"knows": [["bert-v1.5", ["no", "yes"]]]},
            'labels of teacher bert-v1.5: ["no"] -> ["no","yes"]',
        ),
        ("build-targets", {}, {"method_version": 2}, "code of targets.mode: not used -> 2"),
        ("report", {"train": {"passes": 0}}, {"train": {"passes": 16}}, "number of dropout passes: 0 -> 16"),
        (
            "report",
            {"train": {"compared by": {}}},
            {"train": {"compared by": {"uncertainty": "entropy"}}},
            "targets.uncertainty: not used -> entropy",
        ),
    ],
)
def test_a_reason_names_an_input_by_its_field_or_plain_words(stage: str, old: Any, new: Any, detail: str) -> None:
    assert explain_change(STAGE_NAMED[stage], {"inputs": old}, {"inputs": new}) == ("input", detail)


def test_forced_is_a_reason_of_its_own(tmp_path: Path) -> None:
    run = built_toy(toy_base(tmp_path))
    states = update(toy_stages(), toy_run(tmp_path), target="joined", force=True)
    assert [(s.reason, s.detail) for s in states] == [(None, ""), ("forced", "--force")]
    assert calls(tmp_path) == ["a", "b", "c", "joined", "pair", "joined"]
    assert _plan(tmp_path) == CURRENT
    assert run.fingerprint("joined") == toy_run(tmp_path).store.head()["joined"]["fingerprint"]


def test_the_reasons_are_these_eight() -> None:
    """Each is produced by a test above; a new reason needs a new test."""
    assert get_args(Reason) == (*("first-run", "config", "input", "upstream", "code", "missing", "damaged", "forced"),)


def test_other_library_versions_give_a_warning_and_rerun_only_when_strict(tmp_path: Path) -> None:
    run = built_toy(toy_base(tmp_path))
    path = run.store.folder("pair", run.fingerprint("pair")) / MANIFEST
    manifest = run.result("pair")
    now = manifest.made["libraries"]["polars"]
    path.write_text(canonical_record(replace(manifest, made={"libraries": {"polars": "0.1"}})))
    states = plan(toy_stages(), toy_run(tmp_path))
    assert [state.warnings for state in states] == [(), (), (f"made with polars 0.1, now {now}",)]
    assert _plan(tmp_path) == CURRENT
    strict = _plan(tmp_path, execution={"on_version_change": "strict"})
    assert strict[0][1:3] == ("missing", "code")


def test_a_state_as_json_is_plain_data() -> None:
    state = StageState("letters", "partial", "config", "a: 1 -> 2", 1, 3, "abc", ("older",), chosen={"a.b": 2})
    assert json.loads(json.dumps(state.to_json())) == {
        "stage": "letters",
        "state": "partial",
        "reason": "config",
        "detail": "a: 1 -> 2",
        "units": {"done": 1, "total": 3},
        "fingerprint": "abc",
        "warnings": ["older"],
        "after": [],
        "chosen": {"a.b": 2},
    }


def test_a_state_names_the_stages_that_the_stage_needs(tmp_path: Path) -> None:
    run = toy_run(toy_base(tmp_path))
    assert [state.after for state in plan(toy_stages(), run)] == [(), ("letters",), ("joined",)]
    built_toy(tmp_path)
    assert [state.after for state in plan(toy_stages(), toy_run(tmp_path))] == [(), ("letters",), ("joined",)]


def test_a_tree_hangs_each_stage_under_the_last_that_it_is_made_of() -> None:
    made_of = {"a": (), "b": ("a",), "c": ("a", "b"), "d": ("a",), "e": ("d",), "f": ()}
    states = [StageState(name, "missing", None, "", None, None, None, after=after) for name, after in made_of.items()]
    assert [start + stage for start, stage in branches(states)] == ["a", "+- b", "|  +- c", "+- d", "   +- e", "f"]


def test_a_garbled_head_costs_nothing_but_the_reason(tmp_path: Path) -> None:
    built_toy(toy_base(tmp_path))
    head = tmp_path / "artifacts" / "HEAD.json"
    head.write_text('{"letters": 5, "joined": {"fingerprint": []}}')
    assert _plan(tmp_path, targets={"temperature": 0.5})[1][2] == "config"  # restored from its copy
    for path in (head, head.with_name("HEAD.copy.json")):
        path.write_text('{"letters": 5, "joined": {"fingerprint": []}}')
    assert _plan(tmp_path) == CURRENT
    assert _plan(tmp_path, targets={"temperature": 0.5})[1][2] == "first-run"


@pytest.mark.parametrize("seconds", [-86_400, 86_400, 0])
def test_clocks_do_not_matter(tmp_path: Path, seconds: int) -> None:
    import time

    built_toy(toy_base(tmp_path))
    when = time.time() + seconds if seconds else 0
    for path in tmp_path.rglob("*"):
        os.utime(path, (when, when))
    assert _plan(tmp_path) == CURRENT


def test_a_moved_workspace_is_current_where_it_is_now(tmp_path: Path) -> None:
    built_toy(toy_base(tmp_path / "here"))
    (tmp_path / "here").rename(tmp_path / "there")
    assert _plan(tmp_path / "there") == CURRENT
    built_toy(tmp_path / "there")
    assert calls(tmp_path / "there") == ["a", "b", "c", "joined", "pair"]


def test_nothing_stored_names_the_machine_it_was_made_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "machine-of-the-test")
    run = built_toy(toy_base(tmp_path))
    stored = [path.read_text() for path in run.store.root.rglob("*.json")]
    assert len(stored) > len(CURRENT)
    assert [text for text in stored if str(tmp_path) in text or "machine-of-the-test" in text] == []
