"""`amalgam audit` reads the cache alone, with labels and without."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest

from amalgam.data.arrays import held_out_keys
from amalgam.data.keys import text_key
from amalgam.stages.common.training.schedule import TEACHER_HELD_OUT
from amalgam.tests.workspaces import TEACHER_LABELS, TRAIN, Workspace, shift_weights


def third(workspace: Workspace, *, nudge: float, labels: str = "") -> None:
    """A third teacher: the first one's copy, its first bias changed by so much."""
    shutil.copytree(workspace.folder / "models/first", workspace.folder / "models/third")
    if nudge:
        shift_weights(workspace.folder / "models/third", {"classifier.bias": nudge})
    workspace.edit("cache:\n", f"  - name: third\n    model: ./models/third\n{labels}cache:\n")


def audited(workspace: Workspace, *overrides: str) -> dict[str, Any]:
    return workspace("audit", "--json", *overrides).json


def test_the_audit_agrees_with_the_targets(workspace: Workspace) -> None:
    before = sorted(workspace.artifacts.rglob("*"))
    audit = audited(workspace)
    manifest = workspace.manifest("build-targets")
    chosen = manifest["facts"]["summary"]["chosen"]
    assert (audit["texts"], audit["labelled"], audit["weights"]) == (TRAIN, TRAIN, "muka")
    assert {one["teacher"]: round(one["wins"] * TRAIN) for one in audit["teachers"]} == chosen
    assert [one["labels"] for one in audit["teachers"]] == [4, 4]
    assert sum(one["predicted"] for one in audit["labels"]) == 2 * TRAIN
    assert {one["label"] for one in audit["gold"]} == {label for labels in TEACHER_LABELS.values() for label in labels}
    assert sorted(workspace.artifacts.rglob("*")) == before  # the audit writes nothing
    result = workspace("audit").out
    assert all(name in result for name in ("first", "second", "conflicts", "duplicate"))


def test_the_audit_looks_at_the_weights_that_were_made(workspace: Workspace) -> None:
    method = "student.method=amalgam"
    unbuilt = workspace("audit", "--json", method)
    assert unbuilt.json["weights"] == "muka"
    assert "the teacher weights are not built: the audit uses those of MUKA" in unbuilt.err
    workspace("build-targets", method, "targets.mode=soft")
    assert workspace("audit", method).err == workspace("audit").err == ""
    audit = audited(workspace, method)
    assert audit["weights"] == "range"
    assert sum(one["wins_by_weights"] for one in audit["teachers"]) == pytest.approx(1)


def test_labels_that_choose_the_teachers_do_not_measure_them(workspace: Workspace) -> None:
    rows = workspace.texts()
    workspace.write([(text, label if place < 30 else "") for place, (text, label) in enumerate(rows)])
    method = ("student.method=amalgam", "targets.mode=hard")
    workspace("build-targets", *method)
    assert audited(workspace, *method)["labelled"] == 30
    workspace("build-targets", *method, "labels=corpus")
    audit = audited(workspace, *method, "labels=corpus")
    assert (audit["labelled"], audit["accuracy"], audit["gold"]) == (0, None, [])


@pytest.mark.parametrize("own_texts", [0, 60])
def test_texts_that_trained_teachers_learned_do_not_measure_them(fresh: Workspace, own_texts: int) -> None:
    rows = fresh.texts()
    fresh.write(rows[:own_texts], "own")
    fresh.train_teachers("max_tokens: 16", *(["texts: texts/own.csv"] if own_texts else []))
    fresh("cache-teachers")
    keys = np.array([text_key([text]) for text, _ in rows[: own_texts or None]], "S16")
    learned = len(keys) - held_out_keys(keys, TEACHER_HELD_OUT).sum()
    assert 0 < learned < len(keys)
    assert audited(fresh)["labelled"] == TRAIN - learned


def test_an_audit_without_cache_is_refused_with_the_command_that_fills_it(fresh: Workspace) -> None:
    assert "`amalgam cache-teachers`" in fresh.refusal(2, "audit")
    method = "student.method=amalgam"
    assert f"`amalgam weigh-teachers {method}`, then `amalgam audit {method}`" in fresh.refusal(2, "audit", method)
    refused = fresh.attempt("audit", "student.method=muka-soft", "cache.passes=6")
    fix = "cache-teachers student.method=muka-soft cache.passes=6`, then `amalgam audit student.method=muka-soft cache"
    assert fix in refused.err
    fresh("read-corpus")
    assert fresh.attempt("audit", "--json").code == 2
    fresh("build-targets", "cache.passes=2", "cache.seed=7")
    again = "amalgam audit cache.passes=2 cache.seed=7"
    assert f"fix: run `{again}`, with the overrides of the last cache-teachers, or run " in fresh.refusal(2, "audit")
    assert "last cache-teachers" not in fresh.refusal(2, "audit", "cache.seed=8")
    fresh(*again.split()[1:])


@pytest.mark.parametrize(("nudge", "same"), [(0.0, True), (1e-4, False)])
def test_a_teacher_that_is_there_twice_is_found(workspace: Workspace, nudge: float, same: bool) -> None:
    third(workspace, nudge=nudge)
    workspace("cache-teachers")
    [pair] = audited(workspace)["duplicates"]
    assert (pair["teachers"], pair["same_model"]) == (["first", "third"], same)
    assert pair["agreement"] > 0.98
    assert pair["distance"] < 1e-3
    assert "first and third" in workspace("audit").out


def test_without_a_copy_no_target_changes(workspace: Workspace) -> None:
    third(workspace, nudge=0.0)
    method = ("student.method=amalgam", "targets.mode=soft")
    workspace("build-targets", *method)
    changed = {one["teacher"]: one["left_out"]["changed"] for one in audited(workspace, *method)["teachers"]}
    assert (changed["first"], changed["third"]) == (0, 0)


def test_a_teacher_whose_labels_are_turned_round_disagrees_and_is_no_duplicate(workspace: Workspace) -> None:
    turned = ", ".join(reversed(TEACHER_LABELS["first"]))
    third(workspace, nudge=1e-4, labels=f"    labels: [{turned}]\n")
    workspace("cache-teachers")
    audit = audited(workspace)
    assert audit["duplicates"] == []
    [shared] = audit["shared_labels"]
    assert shared["teachers"] == ["first", "third"]
    assert (shared["given"], shared["same"]) == ([audit["texts"]] * 2, 0)
    assert shared["labels"] == sorted(TEACHER_LABELS["first"])
    none = f"0.0 % of {audit['texts']}"
    assert f"first and third {none} {none}" in " ".join(workspace("audit").out.split())


def test_an_audit_without_labels_has_leave_one_out_figures(fresh: Workspace) -> None:
    fresh.edit("  test: texts/test.csv\n  label: label\n", "")
    fresh("cache-teachers")
    audit = audited(fresh)
    assert (audit["labelled"], audit["accuracy"], audit["gold"]) == (0, None, [])
    assert max(one["left_out"]["changed"] for one in audit["teachers"]) > 0
    assert all(one["left_out"]["harmful"] is None for one in audit["teachers"])  # no shared labels: no evidence
    printed = fresh("audit").out
    assert "no gold labels (corpus.label)" in printed
    assert "no duplicate teacher was found" in printed
    assert "harmful teachers are named only with 50 gold labels or more" in printed


def test_a_single_teacher_can_be_audited(fresh: Workspace) -> None:
    fresh.edit("  - name: second\n    model: ./models/second\n", "")
    fresh.edit("  test: texts/test.csv\n  label: label\n", "")
    fresh("cache-teachers")
    audit = audited(fresh)
    assert [one["wins"] for one in audit["teachers"]] == [1.0]
    assert audit["teachers"][0]["left_out"] is None
    assert "first" in fresh("audit").out
