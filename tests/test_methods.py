"""Methods by name at the front door: each runs on the same cache, and looks at no more than it needs."""

from __future__ import annotations

import json

import pytest

from amalgam.stages.methods import METHODS, method_of, objective_in
from amalgam.tests.workshop import TRAIN, Shop

TOGETHER = ("cache-features", "weigh-teachers")


def _embedded(shop: Shop) -> int:
    """Texts that went through the encoder."""
    found = 0
    for path in (shop.artifacts / "cache-teachers").glob("*/key.json"):
        if "feature" in json.loads(path.read_text()):
            found += sum(json.loads(unit.read_text())["facts"]["rows"] for unit in path.parent.glob("units/*.json"))
    return found


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_by_changing_one_word_and_asks_no_teacher_again(shop: Shop, method: str) -> None:
    shop.edit("targets:\n  mode: soft\n", "")
    with shop.counting() as asked:
        said = shop("run", f"student.method={method}", "student.name=other")
    assert (asked[0].logits, asked[0].passes) == (0, 0)
    assert f"student ({method})" in said.out
    assert shop.stale(f"student.method={method}", "student.name=other") == set()


def test_methods_are_listed_with_their_source_and_needs(fresh: Shop) -> None:
    listed = fresh("methods", "--json").json
    assert set(listed) == set(METHODS)
    assert all(method["source"] and method["needs"] and method["defaults"] for method in listed.values())
    assert all(name in fresh("methods").out for name in METHODS)


def test_only_methods_that_look_at_all_texts_have_the_stages_for_it(shop: Shop) -> None:
    assert not set(TOGETHER) & set(shop.plan())
    assert set(TOGETHER) <= set(shop.plan("student.method=amalgam"))
    plan = shop.plan("targets.weights=standardised", "targets.signal=margin")
    assert ("weigh-teachers" in plan, "cache-features" in plan) == (True, False)


def test_appended_texts_alone_go_through_the_encoder(shop: Shop) -> None:
    method = "student.method=amalgam"
    shop("build-targets", method)
    before = _embedded(shop)
    rows = shop.texts()
    shop.write([*rows, *((f"{text} again", label) for text, label in rows[:7])])
    shop("build-targets", method)
    assert (before, _embedded(shop)) == (TRAIN, TRAIN + 7)
    assert len(shop.targets()) == TRAIN + 7


def test_a_word_that_weights_do_not_read_weighs_nothing_again(shop: Shop) -> None:
    method = "student.method=amalgam"
    shop("run", method)
    assert shop.stale(method, "targets.kd_temperature=0.7") == set()
    assert shop.stale(method, "cache.seed=0") == set()
    assert shop.stale(method, "targets.reweight=none") == {"build-targets", "train-student", "report"}
    assert shop.stale(method, "targets.smoothings=1") == {"weigh-teachers", "build-targets", "train-student", "report"}
    assert "cache-features" in shop.stale(method, "student.encoder=./models/first")


def test_targets_are_named_by_the_method_that_makes_them() -> None:
    for name, method in METHODS.items():
        targets = {"weights": "muka", "mode": "soft", **method.defaults["targets"]}
        assert method_of(targets, objective_in(method)) == name
    assert method_of({"mode": "soft", "weights": "standardised"}) == "soft, standardised weights"
    assert method_of({"mode": "soft", "weights": "muka"}, "dfa") == "muka-soft and dfa"
