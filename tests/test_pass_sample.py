"""cache.passes: auto runs passes on a sample of the texts, and reports what the others lose without them."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from amalgam.pipeline.console import Console
from amalgam.stages.cache_teachers import stage
from amalgam.stages.cache_teachers.sample import pass_audit_lines
from amalgam.stages.common.cached import load
from amalgam.stages.common.cached.load import sample_size
from amalgam.stages.common.cached.uncertainty import summarise_passes
from amalgam.stages.methods import load_with_methods
from amalgam.tests.forking import Forked
from amalgam.tests.interruptible import main_killed
from amalgam.tests.stages.tiny_models import save_tiny
from amalgam.tests.workspaces import (
    TEACHER_LABELS,
    TEST,
    TRAIN,
    Workspace,
    edit_json,
    finish,
    flip_bit,
    quiet_environment,
    ranks,
    shift_weights,
    word_list,
    write_model,
)

AUTO = ("cache.passes=auto", "student.method=amalgam")
MODULE = "amalgam.tests.test_pass_sample"
PASSES, SAMPLED = 4, TRAIN // 4
LAYERS: dict[str, Any] = {"num_hidden_layers": 2}


@pytest.fixture
def auto(fresh: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A workspace whose sample is a quarter of its texts, with 4 passes."""
    monkeypatch.setattr(load, "AUTO_PASSES", PASSES)
    fresh.edit("targets:\n  mode: soft\n", "")
    return fresh


def cached(workspace: Workspace) -> dict[str, Any]:
    """Return the facts of the last cache-teachers."""
    content = workspace.manifest("cache-teachers")
    return dict(content["facts"])


def answers(workspace: Workspace, family: str) -> tuple[dict[bytes, Any], dict[bytes, Any]]:
    """Return logits and passes of a family by text."""
    logits, passes = dict[bytes, Any](), dict[bytes, Any]()
    for record in (workspace.artifacts / "cache-teachers" / family / "units").glob("*.json"):
        frame = pl.read_parquet(workspace.artifacts / json.loads(record.read_text())["files"][0]["path"])
        logits |= dict(frame.select("key", "logits").iter_rows()) if "logits" in frame.columns else {}
        passes |= dict(frame.select("key", "passes").iter_rows()) if "passes" in frame.columns else {}
    return logits, passes


@pytest.mark.parametrize(
    ("texts", "size"), [(2, 0), (150, 0), (479, 0), (480, 30), (1000, 62), (3200, 200), (10**8, 200)]
)
def test_a_sample_costs_at_most_one_pass_a_text(texts: int, size: int) -> None:
    assert sample_size(texts, 16) == size
    assert size * 16 <= texts


def test_the_sampled_texts_have_all_passes_and_the_others_none(auto: Workspace) -> None:
    with auto.counting() as asked:
        result = auto("cache-teachers", *AUTO)
    assert (asked[0].logits, asked[0].passes) == (2 * (TRAIN + TEST), 2 * PASSES * SAMPLED)
    audit, families = cached(auto)["audit"], cached(auto)["families"].values()
    by_teacher = [answers(auto, family) for family in families]
    trained = sorted(pl.concat(map(pl.read_parquet, auto.artifacts.glob("read-corpus/*/train-*/*.parquet")))["key"])
    assert {key for _, passes in by_teacher for key in passes} == set(trained[:SAMPLED])
    keys = trained[:SAMPLED]
    off = [summarise_passes(np.array([[one[0][key]] for key in keys])).confidence for one in by_teacher]
    raw = [np.array([one[1][key] for key in keys]).reshape(SAMPLED, PASSES, -1) for one in by_teacher]
    on, first, second = (
        np.stack([summarise_passes(one[:, part]).confidence for one in raw]).argmax(0)
        for part in (slice(None), slice(2), slice(2, 4))
    )
    assert audit == {
        "texts": TRAIN,
        "sampled": SAMPLED,
        "passes": PASSES,
        "runs": pytest.approx(2.0),
        "same": int((np.stack(off).argmax(0) == on).sum()),
        "halves_same": int((first == second).sum()),
    }
    assert f"4 passes with it for {SAMPLED} of {TRAIN} texts" in result.err


def states_of(workspace: Workspace) -> dict[str, dict[bytes, Any]]:
    """Return the hidden states of the teachers by family and text."""
    states: dict[str, dict[bytes, Any]] = {}
    for path in sorted((workspace.artifacts / "cache-features").glob("*/units/*/states.npy")):
        keys = pl.read_parquet(path.with_name("keys.parquet"))["key"].to_list()
        states.setdefault(path.parents[2].name, {}).update(zip(keys, np.load(path), strict=True))
    return states


def test_the_run_without_dropout_gives_the_states_too(auto: Workspace) -> None:
    auto("cache-teachers", *AUTO)
    early = states_of(auto)
    assert [len(states) for states in early.values()] == [TRAIN - SAMPLED] * 2
    auto("run", *AUTO)
    together = states_of(auto)
    assert [len(states) for states in together.values()] == [TRAIN] * 2
    shutil.rmtree(auto.artifacts / "cache-features")
    auto("run", *AUTO)
    apart = states_of(auto)
    for family, states in apart.items():
        assert states.keys() == together[family].keys()
        assert np.allclose([states[key] for key in states], [together[family][key] for key in states], atol=2e-3)
        assert all(np.array_equal(values, together[family][key]) for key, values in early[family].items())


def test_states_of_the_same_run_cost_nothing_more(auto: Workspace) -> None:
    auto("run", *AUTO)
    for passes, is_free in (("auto", True), (str(PASSES), False)):
        plan = auto("plan", "--json", "cache.max_tokens=16", AUTO[1], f"cache.passes={passes}").json
        assert (plan["cost"]["stages"]["cache-features"]["seconds"] == 0) == is_free


def test_states_that_exist_are_not_computed_again(auto: Workspace) -> None:
    auto("run", *AUTO)
    before = auto.digests("cache-features")
    shutil.rmtree(auto.artifacts / "cache-teachers")
    auto("run", *AUTO)
    assert auto.digests("cache-features") == before


def test_a_method_without_states_computes_none(auto: Workspace) -> None:
    auto("cache-teachers", "cache.passes=auto", "student.method=vanilla-kd")
    assert states_of(auto) == {}


def test_no_pass_changes_the_weight_of_a_single_teacher(auto: Workspace) -> None:
    def passes(*overrides: str) -> int:
        settings = ["cache.passes=auto", "student.method=muka-soft", *overrides]
        return load.passes_of(load_with_methods(auto.config, settings).experiment)

    one = "teachers=[./models/first]"
    assert [passes(), passes(one), passes(one, "targets.distribution=mc-mean")] == [PASSES, 0, PASSES]
    auto("build-targets", one, "corpus.label=null", "cache.passes=auto", "student.method=muka-soft", "corpus.test=null")


def test_the_audit_is_in_the_run_of_the_teachers_in_report_and_audit(auto: Workspace) -> None:
    line = r"one pass and 4 passes have the same most confident teacher for \d+\.\d % of them \(95 % interval"
    assert len(re.findall(line, auto("run", *AUTO).err)) == 1
    assert "passes a text" not in auto("run", *AUTO).err
    assert auto("audit", "--json", *AUTO).json["passes"] == cached(auto)["audit"]
    assert re.search(line, auto("audit", *AUTO).out)
    [page] = (auto.folder / "reports").glob("*.html")
    assert re.search(line, page.read_text())
    assert "None passes" not in page.read_text()


def test_more_passes_later_cost_the_difference_and_targets_stay(auto: Workspace) -> None:
    auto("build-targets", *AUTO)
    assert auto.stale(*AUTO) & {"cache-teachers", "weigh-teachers", "build-targets"} == set()
    auto("cache-teachers", "cache.passes=0", AUTO[1])
    assert auto.stale("cache.passes=0", AUTO[1]) & {"weigh-teachers", "build-targets"} == set()
    with auto.counting() as asked:
        auto("cache-teachers", "cache.passes=4", "student.method=muka-soft")
    assert (asked[0].logits, asked[0].passes) == (0, 2 * PASSES * (TRAIN - SAMPLED))


def test_a_new_text_costs_itself_and_a_sampled_one_its_passes(auto: Workspace) -> None:
    auto("cache-teachers", *AUTO)
    before = {key for family in cached(auto)["families"].values() for key in answers(auto, family)[1]}
    auto.write([*auto.texts(), *((f"one more text, number {row}", auto.texts()[0][1]) for row in range(8))])
    with auto.counting() as asked:
        auto("cache-teachers", *AUTO)
    after = {key for family in cached(auto)["families"].values() for key in answers(auto, family)[1]}
    assert cached(auto)["audit"]["sampled"] == SAMPLED + 2
    assert before < after
    assert (asked[0].logits, asked[0].passes) == (2 * 8, 2 * PASSES * len(after - before))


def test_a_lost_unit_of_the_sample_is_made_again(auto: Workspace) -> None:
    auto("cache-teachers", *AUTO)
    before = cached(auto)["audit"]
    [unit, *_] = [path for path in auto.units() if "passes" in pl.read_parquet_schema(path)]
    flip_bit(unit)
    assert auto.attempt("verify").code != 0
    with auto.counting() as asked:
        auto("cache-teachers", *AUTO)
    assert asked[0].passes > 0
    assert cached(auto)["audit"] == before


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_run_killed_in_any_phase_ends_as_one_that_was_not(auto: Workspace, call: int, tmp_path: Path) -> None:
    """The calls of each teacher: all texts without dropout, then the sample with it.

    Units are written in the background: at the second call those of the first may not be there yet.
    """
    whole = auto.copy(tmp_path / "whole")
    with whole.counting() as asked:
        whole("cache-teachers", *AUTO)
    killed = Forked(("cache-teachers", *AUTO), auto.folder, quiet_environment(KILL_AT=str(call)), MODULE)
    assert finish(killed).code == -signal.SIGKILL
    with auto.counting() as again:
        auto("cache-teachers", *AUTO)
    work, fresh = (of[0].logits + of[0].passes for of in (again, asked))
    assert (work < fresh) if call > 2 else (work <= fresh)
    assert cached(auto)["audit"] == cached(whole)["audit"]
    for own, other in zip(cached(auto)["families"].values(), cached(whole)["families"].values(), strict=True):
        for mine, expected in zip(answers(auto, own), answers(whole, other), strict=True):
            assert mine.keys() == expected.keys()
            for key, values in mine.items():
                assert np.array(values) == pytest.approx(np.array(expected[key]), abs=1e-4)


def test_two_processes_share_the_sample(fresh: Workspace) -> None:
    fresh.edit("targets:\n  mode: soft\n", "")
    fresh.write([(f"{text} {copy}", label) for text, label in fresh.texts() for copy in range(4)])
    alone = fresh.without_artifacts(fresh.folder.parent / "alone")
    alone("cache-teachers", *AUTO)
    assert ranks(fresh, "cache-teachers", *AUTO).code == 0
    assert cached(fresh)["audit"]["sampled"] == cached(alone)["audit"]["sampled"] == 4 * TRAIN // 16


def test_a_teacher_without_dropout_has_equal_passes(auto: Workspace) -> None:
    """It is refused where the user sets a number of passes, and counts as it is where amalgam chooses it."""
    labels = ["banking", "computing", "cooking", "football"]
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    write_model(auto.folder / "models" / "first", words=word_list(auto), seed=1, labels=labels, **still)
    result = auto("cache-teachers", *AUTO)
    assert "teacher first: it has no active dropout" in result.err
    logits, passes = answers(auto, cached(auto)["families"]["first"])
    assert len(passes) == SAMPLED
    for key, raw in passes.items():
        assert np.array(raw).reshape(PASSES, -1) == pytest.approx(np.tile(logits[key], (PASSES, 1)), rel=1e-2, abs=1e-2)
    assert auto.attempt("cache-teachers", "cache.passes=5", "student.method=muka-soft").code == 2
    write_model(
        auto.folder / "models" / "second", words=word_list(auto), seed=2, labels=TEACHER_LABELS["second"], **LAYERS
    )
    last = auto("cache-teachers", *AUTO, "cache.dropout=last-layer")
    assert "teacher first: it has no active dropout in its last layer and head, so its prediction" in last.err


def test_a_teacher_without_dropout_is_refused_before_another_runs_its_passes(auto: Workspace) -> None:
    edit_json(auto.folder / "models/second/config.json", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    auto("cache-teachers", "cache.passes=0")
    with auto.counting() as asked:
        refused = auto.attempt("cache-teachers", f"cache.passes={PASSES}")
    assert (refused.code, asked[0].units) == (2, 0)
    assert "teacher second has no active dropout" in refused.err


def test_the_progress_of_equal_passes_counts_each(auto: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_json(auto.folder / "models/first/config.json", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    auto("read-corpus")
    done = list[int]()
    monkeypatch.setattr(Console, "advance", lambda _console, amount: done.append(amount))
    with auto.counting() as asked:
        auto("cache-teachers", "student.method=muka-soft", "cache.passes=auto")
    assert sum(done) == asked[0].logits + asked[0].passes


def test_equal_passes_that_the_cache_cannot_keep_are_refused(auto: Workspace) -> None:
    edit_json(auto.folder / "models/first/config.json", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    shift_weights(auto.folder / "models/first", {"classifier.bias": 1e5})
    refused = auto.attempt("cache-teachers", "student.method=muka-soft", "cache.passes=auto")
    assert (refused.code, "teacher first: logits are beyond 65504" in refused.err) == (1, True), refused.err


def test_teachers_without_dropout_have_no_audit_of_passes(auto: Workspace) -> None:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    for seed, (name, labels) in enumerate(TEACHER_LABELS.items()):
        write_model(auto.folder / "models" / name, words=word_list(auto), seed=seed, labels=labels, **still)
    result = auto("cache-teachers", *AUTO)
    assert "teacher second: it has no active dropout" in result.err
    assert "passes with it" not in result.err
    assert "audit" not in cached(auto)


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize(
    "settings", [("cache.passes=auto", "targets.uncertainty=mutual-information"), (f"cache.passes={PASSES}",)]
)
def test_equal_passes_are_refused_although_auto_cached_them(
    auto: Workspace, settings: tuple[str, ...], *, is_cached: bool
) -> None:
    """They look certain to a measure that compares passes, and a number of passes needs dropout."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    labels = TEACHER_LABELS["first"]
    write_model(auto.folder / "models" / "first", words=word_list(auto), seed=1, labels=labels, **still)
    if is_cached:
        auto("build-targets", "student.method=muka-hard", "cache.passes=auto")
    with auto.counting() as asked:
        refused = auto.attempt("build-targets", "student.method=muka-hard", *settings)
    assert (refused.code, asked[0].units) == (2, 0)
    assert "teacher first" in refused.err
    assert "passes are all the same" in refused.err


@pytest.mark.parametrize(
    ("kind", "why"), [("longformer", "dropout .* cannot be keyed"), ("reformer", "fails with dropout: .* length")]
)
def test_a_teacher_whose_dropout_cannot_be_keyed_has_equal_passes(auto: Workspace, kind: str, why: str) -> None:
    """With dropout, Reformer reads texts of one length only."""
    save_tiny(auto.folder / "models/first", kind, labels=TEACHER_LABELS["first"])
    result = auto("cache-teachers", *AUTO, "cache.dtype=auto")
    assert "teacher first: its dropout cannot be keyed, so its prediction without dropout counts" in result.err
    assert len(answers(auto, cached(auto)["families"]["first"])[1]) == SAMPLED
    err = auto.refusal(2, "cache-teachers", "cache.passes=5", "student.method=muka-soft", "cache.dtype=auto")
    assert re.search(f"error: teacher first: this model('s)? {why}", err), err


def test_the_plan_shows_the_prices_of_no_passes_of_auto_and_of_all(auto: Workspace) -> None:
    auto("read-corpus")
    plan, texts = " ".join(auto("plan", *AUTO).out.split()), TRAIN + TEST
    prices = [2 * texts, 2 * (texts + PASSES * SAMPLED), 2 * (texts + PASSES * TRAIN)]
    for price, name in zip(prices, ("0", "auto", "4"), strict=True):
        assert f"{price:,} text-passes with cache.passes={name}" in plan
    sample = f"cache.passes=auto (0, and {PASSES} for a sample of {SAMPLED} texts), "
    assert sample in plan
    assert "a sample" not in auto("plan", AUTO[0], "student.method=muka-soft").out
    assert auto("plan", "--json", *AUTO).json["cost"]["passes"] == {"0": prices[0], "auto": prices[1], "4": prices[2]}
    with auto.counting() as asked:
        auto("cache-teachers", *AUTO)
    assert asked[0].logits + asked[0].passes == prices[1]
    assert "text-passes" not in auto("plan", *AUTO).out
    priced = " ".join(auto("plan", "cache.passes=7", AUTO[1]).out.split())
    assert re.search(rf"{2 * (texts + 7 * TRAIN):,} text-passes \(.*s\) with cache.passes=7", priced)


def test_the_plan_prices_no_passes_that_do_not_run(auto: Workspace) -> None:
    """Those of a teacher without dropout are equal, and a copy of a model has its predictions."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    edit_json(auto.folder / "models/first/config.json", **still)
    auto("read-corpus")
    texts, passes = TRAIN + TEST, {"0": 0, "auto": PASSES * SAMPLED, "4": PASSES * TRAIN}
    prices = auto("plan", "--json", *AUTO).json["cost"]["passes"]
    assert prices == {name: 2 * texts + count for name, count in passes.items()}
    auto("cache-teachers", *AUTO)
    timing = auto.artifacts / "cache-teachers" / auto.head("cache-teachers") / "timing.json"
    assert json.loads(timing.read_text())["facts"]["workload"] == prices["auto"]
    auto.edit("./models/first", "./models/second")
    prices = auto.attempt("plan", "--json", *AUTO).json["cost"]["passes"]
    assert prices == {name: texts + count for name, count in passes.items()}


@pytest.mark.parametrize("method", ["uhc", "vanilla-kd"])
def test_a_method_without_passes_has_a_report(auto: Workspace, method: str) -> None:
    result = auto("run", f"student.method={method}", "cache.passes=auto")
    assert result.code == 0, result.err


def test_one_teacher_or_a_small_corpus_has_no_sample(auto: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    auto("read-corpus")
    assert auto("build-targets", "student.method=uhc", "cache.passes=auto").code == 0
    assert "audit" not in cached(auto)
    monkeypatch.setattr(load, "FEWEST_SAMPLED", SAMPLED + 1)
    result = auto("run", *AUTO)
    assert "audit" not in cached(auto)
    assert "no audit" not in result.err
    monkeypatch.undo()
    auto.edit("  - name: second\n    model: ./models/second\n", "")
    auto.edit("  test: texts/test.csv\n", "")
    auto("cache-teachers", *AUTO)
    assert "audit" not in cached(auto)


def test_the_interval_is_that_of_the_sample() -> None:
    audit = {"texts": 4000, "sampled": 200, "passes": 16, "runs": 1.8, "same": 194, "halves_same": 196}
    first, second = pass_audit_lines(audit)  # type: ignore[arg-type]
    assert first.endswith("16 passes with it for 200 of 4,000 texts, 1.80 passes a text in all")
    assert "97.0 % of them (95 % interval 93.6 to 98.6); 8 passes and 8 others agree for 98.0 %" in second


if __name__ == "__main__":
    for of in (load, stage):
        setattr(of, "AUTO_PASSES", PASSES)  # noqa: B010
    main_killed()
