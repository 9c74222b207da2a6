"""cache.adaptive: a sample runs all passes, and decides after how many others stop."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from amalgam.pipeline.execution.runner import update
from amalgam.stages.app.runs import open_run, working
from amalgam.stages.cache_teachers import adaptive, sample, stage
from amalgam.stages.cache_teachers.adaptive import PassPredictions, are_settled, audit_regressions, fit
from amalgam.stages.cache_teachers.sample import pass_audit_lines
from amalgam.stages.common.cached import load
from amalgam.stages.common.cached.load import FEWEST_SAMPLED
from amalgam.stages.common.cached.uncertainty import summarise_passes
from amalgam.stages.registry import STAGES
from amalgam.tests.forking import Forked
from amalgam.tests.interruptible import main_killed
from amalgam.tests.workspaces import (
    TOLERANCE,
    TRAIN,
    Workspace,
    edit_json,
    finish,
    largest_difference,
    quiet_environment,
    ranks,
)

AUTO = ("cache.adaptive=true", "student.method=muka-soft", "cache.passes=auto")
MODULE = "amalgam.tests.test_adaptive"
PASSES, COPIES, FEWEST = 12, 4, 10


@pytest.fixture
def shop(fresh: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A workspace with enough texts for a sample of a twelfth of them, with 12 passes."""
    monkeypatch.setattr(load, "AUTO_PASSES", PASSES)
    monkeypatch.setattr(load, "FEWEST_SAMPLED", FEWEST)
    for module in (adaptive, sample):
        monkeypatch.setattr(module, "is_better", lambda _facts: True)  # random teachers cannot be predicted
    fresh.write([(f"{text} {copy}", label) for text, label in fresh.texts() for copy in range(COPIES)])
    return fresh


def facts(workspace: Workspace) -> dict[str, Any]:
    content: dict[str, Any] = workspace.manifest("cache-teachers")
    return dict(content["facts"])


def decisions(workspace: Workspace) -> pl.DataFrame:
    """By text: the passes that count, and the confidences of both teachers."""
    files = facts(workspace)["confidences"].values()
    return pl.concat([pl.read_parquet(workspace.artifacts / path) for path in files]).sort("key")


def raw(workspace: Workspace, family: str) -> dict[bytes, np.ndarray[Any, Any]]:
    """By text: all its passes in order."""
    parts: dict[bytes, list[tuple[int, Any]]] = {}
    for record in sorted((workspace.artifacts / "cache-teachers" / family / "units").glob("*.json")):
        content = json.loads(record.read_text())
        frame = pl.read_parquet(workspace.artifacts / content["files"][0]["path"])
        if "passes" in frame.columns:
            count = content["facts"]["last"] - content["facts"]["first"]
            for key, passes in frame.select("key", "passes").iter_rows():
                parts.setdefault(key, []).append((content["facts"]["first"], np.array(passes).reshape(count, -1)))
    return {
        key: np.concatenate([one for _, one in sorted(parts_, key=lambda p: p[0])]) for key, parts_ in parts.items()
    }


def test_texts_stop_early_and_others_have_the_confidence_of_all_passes(shop: Workspace) -> None:
    with shop.counting() as asked:
        result = shop("cache-teachers", *AUTO)
    frame, audit = decisions(shop), facts(shop)["audit"]
    taken = frame["passes"].to_numpy()
    assert set(taken) <= {0, 2, 8, PASSES}
    assert len(set(taken)) > 1
    assert (taken[: audit["sampled"]] == PASSES).all()
    assert audit["sampled"] == len(taken) // PASSES
    assert audit["runs"] == pytest.approx(1 + taken.mean())
    assert audit["stopped"] == (taken < PASSES).sum()
    assert asked[0].passes == 2 * taken.sum()
    for teacher, family in enumerate(facts(shop)["families"].values()):
        by_text = raw(shop, family)
        assert {key: len(passes) for key, passes in by_text.items()} == {
            key: count for key, count in frame.select("key", "passes").iter_rows() if count
        }
        for key, count, confidences in frame.iter_rows():
            if count == PASSES:
                exact = summarise_passes(by_text[key][None].astype(np.float16)).confidence[0]
                assert confidences[teacher] == pytest.approx(exact, abs=1e-4)
            assert 0 <= confidences[teacher] <= 1
    assert f"{audit['runs']:.2f} passes a text instead of {PASSES + 1}" in result.err


def test_a_single_pass_has_no_halves_so_every_text_runs_it(shop: Workspace) -> None:
    result = shop("cache-teachers", *AUTO, "cache.passes=1")
    assert "Warning" not in result.err
    assert "audit" not in facts(shop)


def test_a_run_without_enough_texts_notes_that_all_of_them_run_all_passes(fresh: Workspace) -> None:
    with fresh.counting() as asked:
        result = fresh("cache-teachers", "cache.adaptive=true", "student.method=muka-soft", f"cache.passes={PASSES}")
    assert asked[0].passes == 2 * PASSES * TRAIN
    note = " ".join(result.err.split())
    assert re.search(rf"note: cache.adaptive=true has no effect: .* {FEWEST_SAMPLED * PASSES} texts", note)


def test_targets_have_the_confidences_of_the_decisions(shop: Workspace) -> None:
    shop("build-targets", *AUTO)
    frame = decisions(shop)
    targets = pl.concat(map(pl.read_parquet, shop.artifacts.glob("build-targets/*/units/*.parquet"))).sort("key")
    assert np.array(targets["confidence"].to_list()) == pytest.approx(np.array(frame["confidence"].to_list()), abs=1e-6)


def test_teachers_in_another_order_keep_their_confidences(shop: Workspace, tmp_path: Path) -> None:
    shop("build-targets", *AUTO)
    first, second = (f"  - name: {name}\n    model: ./models/{name}\n" for name in ("first", "second"))
    shop.edit(first + second, second + first)
    shop("build-targets", *AUTO)
    other = shop.without_artifacts(tmp_path / "other")
    other("build-targets", *AUTO)
    assert largest_difference(shop.targets(), other.targets()) < TOLERANCE


def test_cached_passes_do_not_change_the_result(shop: Workspace) -> None:
    """All passes of every text first, then adaptive ones: the same targets as by these alone, and no pass more."""
    alone = shop.without_artifacts(shop.folder.parent / "alone")
    alone("build-targets", *AUTO)
    shop("cache-teachers", f"cache.passes={PASSES}", AUTO[1])
    with shop.counting() as asked:
        shop("build-targets", *AUTO)
    assert (asked[0].logits, asked[0].passes) == (0, 0)
    assert decisions(shop)["passes"].equals(decisions(alone)["passes"])
    assert largest_difference(shop.targets(), alone.targets()) < TOLERANCE


def test_running_again_computes_no_pass_and_more_passes_cost_the_difference(shop: Workspace) -> None:
    shop("build-targets", *AUTO)
    taken = decisions(shop)["passes"].sum()
    with shop.counting() as asked:
        shop("build-targets", *AUTO)
    assert asked[0].units == 0
    assert shop.stale(*AUTO).isdisjoint({"cache-teachers", "build-targets"})
    with shop.counting() as asked:
        shop("build-targets", "cache.adaptive=false", AUTO[1])
    assert (asked[0].logits, asked[0].passes) == (0, 2 * (PASSES * len(decisions_keys(shop)) - taken))
    assert "confidences" not in facts(shop)


def decisions_keys(workspace: Workspace) -> list[bytes]:
    return list(pl.concat(map(pl.read_parquet, workspace.artifacts.glob("read-corpus/*/train-*/*.parquet")))["key"])


@pytest.mark.parametrize("setting", ["targets.uncertainty=energy", "targets.distribution=mc-mean", "targets.passes=12"])
def test_other_measures_and_means_of_passes_read_all_of_them(shop: Workspace, setting: str) -> None:
    with shop.counting() as asked:
        shop("cache-teachers", *AUTO, setting)
    assert asked[0].passes == 2 * PASSES * len(decisions_keys(shop))
    assert "audit" not in facts(shop)


def test_appended_texts_cost_their_own_passes_and_those_that_the_new_sample_moves(shop: Workspace) -> None:
    shop("cache-teachers", *AUTO)
    before = decisions(shop)
    shop.write([*shop.texts(), *((f"one more text, number {row}", shop.texts()[0][1]) for row in range(3))])
    with shop.counting() as asked:
        shop("build-targets", *AUTO)
    after = decisions(shop)
    both = after.join(before, on="key", how="left").fill_null(0)
    assert len(after) == len(before) + 3
    assert asked[0].logits == 2 * 3
    assert asked[0].passes == 2 * (both["passes"] - both["passes_right"]).clip(0).sum()
    alone = shop.without_artifacts(shop.folder.parent / "alone")
    alone("build-targets", *AUTO)
    assert decisions(alone)["passes"].equals(after["passes"])


def test_all_texts_run_all_passes_where_fewer_change_the_choice(
    shop: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (adaptive, sample):
        monkeypatch.setattr(module, "is_better", lambda _facts: False)
    with shop.counting() as asked:
        result = shop("run", *AUTO)
    assert set(decisions(shop)["passes"]) == {PASSES}
    assert asked[0].passes == 2 * PASSES * len(decisions_keys(shop))
    assert f"all {len(decisions_keys(shop))} texts run {PASSES} passes" in result.err


def test_fewer_passes_are_used_if_they_agree_at_least_as_often_as_two_halves() -> None:
    assert adaptive.is_better({"sampled": 9, "same": 7, "halves_same": 7})
    assert not adaptive.is_better({"sampled": 9, "same": 6, "halves_same": 7})


def test_a_single_teacher_and_copies_of_one_run_the_sample_alone(shop: Workspace) -> None:
    shop.edit("  test: texts/test.csv\n", "")
    shop.edit("./models/second", "./models/first")
    with shop.counting() as asked:
        shop("cache-teachers", *AUTO)
    audit = facts(shop)["audit"]
    assert asked[0].passes == PASSES * audit["sampled"]
    assert audit["stopped"] == audit["texts"] - audit["sampled"]
    shop.edit("  - name: second\n    model: ./models/first\n", "")
    with shop.counting() as asked:
        shop("build-targets", *AUTO)
    assert asked[0].passes == 0


def test_without_dropout_no_passes_run_that_an_audit_could_count(shop: Workspace) -> None:
    for name in ("first", "second"):
        config = shop.folder / f"models/{name}/config.json"
        edit_json(config, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.0)
    result = shop("cache-teachers", *AUTO)
    assert result.err.count("its prediction without dropout counts as every pass") == 2
    assert "passes a text" not in result.err
    assert "audit" not in facts(shop)
    assert "passes a text" not in shop("audit", *AUTO).out


def test_the_audit_is_on_the_page(shop: Workspace) -> None:
    shop("run", *AUTO)
    line = f"fewer passes and {PASSES} passes have the same most confident teacher for"
    [page] = (shop.folder / "reports").glob("*.html")
    assert line in page.read_text()
    assert line in shop("audit", *AUTO).out
    assert shop("audit", "--json", *AUTO).json["passes"] == facts(shop)["audit"]


def test_the_plan_estimates_the_passes(shop: Workspace) -> None:
    shop("read-corpus")
    texts, trained, sampled = 40 + 480, 480, 480 // PASSES
    every = 2 * (texts + PASSES * trained)
    estimated = 2 * (texts + PASSES * sampled + 2 * (trained - sampled))
    for setting in (AUTO, AUTO[1:]):  # also for one who might set it
        prices = shop("plan", "--json", *setting).json["cost"]["passes"]
        assert prices == {"0": 2 * texts, "auto": every, str(PASSES): every, "adaptive": estimated}
    plan = " ".join(shop("plan", *AUTO).out.split())
    assert f"{estimated:,} text-passes with cache.adaptive=true (estimated)" in plan
    run = open_run(shop.folder / "amalgam.yaml", AUTO)
    with working(run):
        update(STAGES, run, target="read-corpus", keep_overrides=False)
    assert stage.CacheTeachers().workload(run, None) == estimated
    shop("cache-teachers", "student.method=muka-soft", "cache.passes=0")
    of_sample = stage.CacheTeachers().workload(run, stage.CacheTeachers().units(run, shop.artifacts))
    assert stage.CacheTeachers().later_workload(run) == estimated - of_sample > 0
    costs = [shop("plan", "--json", *setting).json["cost"]["stages"]["cache-teachers"] for setting in (AUTO, AUTO[1:])]
    assert costs[0]["seconds"] == pytest.approx(costs[1]["seconds"] * (estimated - 2 * texts) / (every - 2 * texts))


def test_two_processes_decide_together(fresh: Workspace) -> None:
    fresh.write([(f"{text} {copy}", label) for text, label in fresh.texts() for copy in range(8)])
    alone = fresh.without_artifacts(fresh.folder.parent / "alone")
    alone("build-targets", *AUTO)
    assert "confidences" in facts(alone)
    result = ranks(fresh, "build-targets", *AUTO)
    assert result.code == 0, result.err
    assert decisions(fresh)["passes"].equals(decisions(alone)["passes"])
    assert largest_difference(fresh.targets(), alone.targets()) < TOLERANCE


@pytest.mark.parametrize("call", [1, 3, 4, 5, 6])
def test_a_run_killed_in_any_round_ends_as_one_that_was_not(shop: Workspace, call: int, tmp_path: Path) -> None:
    whole = shop.copy(tmp_path / "whole")
    with whole.counting() as asked:
        whole("cache-teachers", *AUTO)
    killed = Forked(("cache-teachers", *AUTO), shop.folder, quiet_environment(KILL_AT=str(call)), MODULE)
    assert finish(killed).code == -signal.SIGKILL
    with shop.counting() as again:
        shop("cache-teachers", *AUTO)
    assert again[0].logits + again[0].passes <= asked[0].logits + asked[0].passes
    assert facts(shop)["audit"] == facts(whole)["audit"]
    assert decisions(shop)["passes"].equals(decisions(whole)["passes"])


# ---- the regressions


def answers(rng: np.random.Generator, texts: int, noise: float, scale: float = 1.0) -> PassPredictions:
    """Passes that deviate from the logits by `noise`."""
    logits = rng.normal(0, 2 * scale, (texts, 3))
    return PassPredictions(logits, logits[:, None] + noise * rng.normal(0, 1, (texts, 16, 3)))


def test_a_regression_predicts_texts_that_it_was_not_fitted_on_as_well_as_it_says() -> None:
    rng = np.random.default_rng(0)
    inputs = np.column_stack([np.ones(4000), rng.normal(5, 3, (4000, 3))])
    wanted = inputs @ [1.0, 0.5, -2.0, 0.0] + rng.normal(0, 0.3, 4000)
    fitted = fit(inputs[:200], wanted[:200])
    error = np.sqrt(np.mean((inputs[200:] @ fitted.weights - wanted[200:]) ** 2))
    assert error == pytest.approx(0.3, rel=0.1)
    assert fitted.deviation == pytest.approx(error, rel=0.15)


def test_the_two_most_confident_teachers_decide() -> None:
    predicted = np.array([[-3.0, -1.0, 0.0], [-3.0, -2.9, 0.0], [-1.0, -1.2, -3.0]])
    assert are_settled(predicted, np.ones(3)).tolist() == [True, False, True]
    assert not are_settled(predicted, np.full(3, 9.0)).any()
    assert are_settled(predicted, np.array([9.0, 9.0, 1.0])).tolist() == [False, False, False]
    assert are_settled(np.array([[np.nan, 0.0]]), np.ones(2)).tolist() == [False]
    assert are_settled(predicted[:, :1], np.ones(1)).all()


def test_passes_that_equal_the_prediction_without_dropout_are_not_needed() -> None:
    rng = np.random.default_rng(1)
    audit = audit_regressions([answers(rng, 200, 0.0), answers(rng, 200, 0.0)], 16)
    assert audit["halves_same"] == audit["sampled"] == 200
    assert audit["same"] >= 198


def test_fewer_passes_agree_more_often_than_two_halves_of_noisy_ones() -> None:
    rng = np.random.default_rng(2)
    audit = audit_regressions([answers(rng, 300, 1.5), answers(rng, 300, 1.5)], 16)
    assert 0.7 * 300 < audit["halves_same"] < audit["same"]


def test_the_audit_separates_texts_that_stopped_from_texts_that_may_not() -> None:
    audit = {"texts": 4000, "sampled": 200, "passes": 16, "runs": 3.5, "same": 192, "halves_same": 186, "stopped": 3200}
    first, second = pass_audit_lines(audit)  # type: ignore[arg-type]
    assert first == (
        "3.50 passes a text instead of 17: one without dropout, at most 16 with it; 3,200 of 4,000 texts stopped early"
    )
    assert (
        "for 96.0 % of 200 sampled texts (95 % interval 92.3 to 98.0); 8 passes and 8 others agree for 93.0 %" in second
    )
    first, _ = pass_audit_lines({**audit, "stopped": 0, "runs": 17.0, "same": 185})  # type: ignore[typeddict-item]
    assert first.startswith("all 4,000 texts run 16 passes")


if __name__ == "__main__":
    for of in (load, stage):
        setattr(of, "AUTO_PASSES", PASSES)  # noqa: B010
    load.FEWEST_SAMPLED = FEWEST
    setattr(adaptive, "is_better", lambda _facts: True)  # noqa: B010
    main_killed()
