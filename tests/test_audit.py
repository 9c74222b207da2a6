"""`amalgam audit` at the front door: from the cache alone, with labels and without."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from amalgam.tests.workshop import KNOWS, TRAIN, Shop, reweigh


def third(shop: Shop, *, nudge: float, labels: str = "") -> None:
    """A third teacher: the first one's copy, its first bias changed by so much."""
    shutil.copytree(shop.folder / "models/first", shop.folder / "models/third")
    if nudge:
        reweigh(shop.folder / "models/third", {"classifier.bias": nudge})
    shop.edit("cache:\n", f"  - name: third\n    model: ./models/third\n{labels}cache:\n")


def audited(shop: Shop, *overrides: str) -> dict[str, Any]:
    found: dict[str, Any] = shop("audit", "--json", *overrides).json
    return found


def test_the_audit_tells_what_the_targets_tell(shop: Shop) -> None:
    before = sorted(shop.artifacts.rglob("*"))
    found = audited(shop)
    head = json.loads((shop.artifacts / "HEAD.json").read_text())["build-targets"]["fingerprint"]
    manifest = json.loads((shop.artifacts / "build-targets" / head / "MANIFEST.json").read_text())
    chosen = manifest["facts"]["summary"]["chosen"]
    assert (found["texts"], found["labelled"], found["weights"]) == (TRAIN, TRAIN, "muka")
    assert {one["teacher"]: round(one["wins"] * TRAIN) for one in found["teachers"]} == chosen
    assert [one["labels"] for one in found["teachers"]] == [4, 4]
    assert sum(one["says"] for one in found["labels"]) == 2 * TRAIN
    assert {one["label"] for one in found["gold"]} == {label for labels in KNOWS.values() for label in labels}
    assert sorted(shop.artifacts.rglob("*")) == before  # it looks, and leaves nothing
    said = shop("audit").out
    assert all(name in said for name in ("first", "second", "conflicts", "duplicate"))


def test_the_audit_looks_at_the_weights_that_were_made(shop: Shop) -> None:
    method = "student.method=amalgam"
    assert audited(shop, method)["weights"] == "muka"  # nothing has weighed yet
    shop("build-targets", method, "targets.mode=soft")
    found = audited(shop, method)
    assert found["weights"] == "mixture"
    assert sum(one["wins_by_weights"] for one in found["teachers"]) == pytest.approx(1)


def test_what_is_not_cached_is_refused_with_the_command_that_caches_it(fresh: Shop) -> None:
    refused = fresh.tries("audit")
    assert refused.code == 2
    assert "`amalgam cache-teachers`" in refused.err
    fresh("read-corpus")
    assert fresh.tries("audit", "--json").code == 2


@pytest.mark.parametrize(("nudge", "same"), [(0.0, True), (1e-4, False)])
def test_a_teacher_that_is_there_twice_is_found(shop: Shop, nudge: float, same: bool) -> None:
    third(shop, nudge=nudge)
    shop("cache-teachers")
    [pair] = audited(shop)["duplicates"]
    assert (pair["teachers"], pair["same_model"]) == (["first", "third"], same)
    assert pair["agreement"] > 0.98
    assert pair["distance"] < 1e-3
    assert "first and third" in shop("audit").out


def test_a_teacher_whose_labels_are_turned_round_disagrees_and_is_no_duplicate(shop: Shop) -> None:
    turned = ", ".join(reversed(KNOWS["first"]))
    third(shop, nudge=1e-4, labels=f"    labels: [{turned}]\n")
    shop("cache-teachers")
    found = audited(shop)
    assert found["duplicates"] == []
    [shared] = found["shared_labels"]
    assert shared["teachers"] == ["first", "third"]
    assert shared["disagree"] == pytest.approx(1.0)
    assert shared["labels"] == sorted(KNOWS["first"])
    assert "texts on which both say a label that both know" in shop("audit").out


def test_without_labels_the_audit_still_tells_who_is_missed(fresh: Shop) -> None:
    fresh.edit("  test: texts/test.csv\n  label: label\n", "")
    fresh("cache-teachers")
    found = audited(fresh)
    assert (found["labelled"], found["accuracy"], found["gold"]) == (0, None, [])
    assert max(one["left_out"]["changed"] for one in found["teachers"]) > 0
    assert all(one["left_out"]["harmful"] is None for one in found["teachers"])  # strangers: nothing could tell
    assert "no gold labels" in fresh("audit").out


def test_a_single_teacher_can_be_audited(fresh: Shop) -> None:
    fresh.edit("  - name: second\n    model: ./models/second\n", "")
    fresh.edit("  test: texts/test.csv\n  label: label\n", "")
    fresh("cache-teachers")
    found = audited(fresh)
    assert [one["wins"] for one in found["teachers"]] == [1.0]
    assert found["teachers"][0]["left_out"] is None
    assert "first" in fresh("audit").out
