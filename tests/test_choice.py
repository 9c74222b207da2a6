"""Benchmarks on settings of choice.py: settings are slices, and the figures are those of hand-made weights."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import polars as pl
import pytest

from amalgam.benchmarks import choice, few_labels, unlabelled_estimates
from amalgam.benchmarks.choice_pools import Pool, collected, groups_of, labelled_texts, pools_of, unpacked
from amalgam.benchmarks.choice_settings import Setting, load_settings, setting_from, write_setting
from amalgam.data.parquet import matrix
from amalgam.pipeline.console import Console
from amalgam.pipeline.execution.runner import update
from amalgam.stages.app.runs import open_run, working
from amalgam.stages.common.cached.uncertainty import summarise_passes
from amalgam.stages.common.load import train_part
from amalgam.stages.registry import STAGES
from amalgam.stages.weigh_teachers import weigh
from amalgam.stages.weigh_teachers.stage import weights_of
from amalgam.tests.workspaces import Workspace

TEXTS = 240
TEACHERS = {"a": [0, 1], "b": [2, 3, 4]}


@pytest.fixture
def setting() -> Setting:
    """Two teachers that are sure of their own texts, and states around one centre for each label."""
    random = np.random.default_rng(0)
    gold = np.arange(TEXTS) % 5
    centres = random.normal(size=(5, 16))
    logits, passes, states = [], [], []
    for own in TEACHERS.values():
        sure = 4.0 * (gold[:, None] == np.array(own)) + random.normal(size=(TEXTS, len(own)))
        logits.append(sure.astype(np.float32))
        passes.append((sure[:, None] + 0.3 * random.normal(size=(TEXTS, 4, len(own)))).astype(np.float16))
        spread = np.where(np.isin(gold, own), 0.1, 1.0)[:, None]
        states.append((centres[gold] + spread * random.normal(size=(TEXTS, 16))).astype(np.float16))
    features = centres[gold] + 0.5 * random.normal(size=(TEXTS, 16))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    similarity = features @ centres.T
    return Setting(
        name="made-2-draw0-t1.2",
        pool="made-2-draw0",
        labels=list("vwxyz"),
        teachers=TEACHERS,
        layers={"a": 0, "b": 0},
        logits=logits,
        passes=passes,
        states=states,
        moved=[np.isin(gold, own) + random.normal(size=TEXTS) for own in TEACHERS.values()],
        features=features.astype(np.float16),
        similarity=similarity.astype(np.float32),
        gold=gold,
        texts=[f"text {row}" for row in range(TEXTS)],
    )


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    with mock.patch.object(sys, "argv", ["choice.py", *arguments, "--json"]):
        choice.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {row["row"]: row for row in rows}


def test_right_and_labels_count_the_most_heavily_weighted_teacher(setting: Setting) -> None:
    assert setting.right(choice.oracle(setting)) == 1.0
    only_first = np.tile([1.0, 0.0], (TEXTS, 1))
    assert setting.right(only_first) == pytest.approx(0.4)
    first = np.isin(setting.gold, [0, 1])
    correct = setting.logits[0].argmax(axis=1) == setting.gold
    assert setting.labelled(only_first) == pytest.approx((first & correct).mean())
    assert setting.lost(only_first) == pytest.approx(0.6)
    assert setting.lost(choice.oracle(setting)) == 0.0
    unlike = np.tile([0.0, 1.0], (TEXTS, 1))
    unlike[: TEXTS // 4] = [1.0, 0.0]
    assert setting.lost(unlike) == pytest.approx(0.4)


def test_confidence_is_that_of_the_cache(setting: Setting) -> None:
    expected = summarise_passes(setting.passes[1]).confidence
    assert setting.answers["confidence"][:, 1] == pytest.approx(expected, abs=1e-6)


def test_a_written_setting_gives_the_same_weights(setting: Setting, tmp_path: Path) -> None:
    write_setting(setting, tmp_path / "settings" / f"{setting.name}.npz")
    [loaded] = load_settings(tmp_path)
    assert loaded.texts == setting.texts
    assert loaded.teachers == setting.teachers
    for estimator in choice.ESTIMATORS.values():
        assert np.array_equal(estimator(loaded), estimator(setting))
    assert not list(load_settings(tmp_path, ["another"]))


def test_thinned_settings_keep_a_quarter_of_one_teachers_texts_or_of_the_others(setting: Setting) -> None:
    shares = {thinned.name.removeprefix(f"{setting.name} "): thinned.shares[0] for thinned in setting.thinned()}
    assert list(shares) == ["1:4 a", "1:4 b"]
    assert shares["1:4 a"] == pytest.approx(0.1 / 0.7, abs=0.06)
    assert shares["1:4 b"] == pytest.approx(0.4 / 0.55, abs=0.06)
    three = replace(setting, teachers={"a": [0], "b": [1], "c": [2, 3, 4]})
    names = [thinned.name.removeprefix(f"{setting.name} ") for thinned in three.thinned()]
    assert names == ["1:4 a", "4:1 a", "1:4 b", "4:1 b", "1:4 c", "4:1 c"]


def test_the_benchmark_gives_the_weights_of_weigh_teachers(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weigh, "AGREEING", -1.0)  # random teachers do not agree
    run = open_run(workspace.config, ["student.method=amalgam"], console=Console(quiet=True))
    with working(run):
        update(STAGES, run, target="weigh-teachers")
    arrays = collected(run)
    assert unpacked(arrays["about"])["trained"] == {}
    made = setting_from("made", "made", {0: arrays, 1: arrays}, {0: 0, 1: 0})
    table = weights_of(run, train_part(run).buckets)
    assert made.answers["confidence"] == pytest.approx(arrays["confidence"], abs=1e-9)
    assert choice.amalgam(made) == pytest.approx(matrix(table.column("weight")), abs=1e-4)
    signal = made.estimated[0]
    assert signal is not None
    assert table.column("evidence").to_numpy() == pytest.approx(signal.max(axis=1), abs=1e-4)
    alone = setting_from("one", "made", {0: arrays}, {0: 0}, unknown=True)
    assert len(alone.gold) == len(made.gold)
    assert np.array_equal(alone.gold >= 0, made.has_gold[:, 0])


def test_the_table_has_the_loss_against_the_best_rival(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_setting(setting, tmp_path / "settings" / f"{setting.name}.npz")
    own = tmp_path / "mine.py"
    own.write_text(
        "import numpy as np\n\ndef first(setting):\n    return np.eye(2)[np.zeros(len(setting.gold), int)]\n"
    )
    rows = printed(capsys, "table", "--folder", str(tmp_path), "--estimators", "oracle", f"{own}:first")
    assert list(rows) == [*choice.RIVALS, "oracle", "first"]
    assert rows["oracle"]["right"] == rows["oracle"]["thinned_worst"] == 1.0
    assert rows["first"]["right"] == 0.4
    assert rows["first"]["loss"] == pytest.approx(max(rows[name]["right"] for name in choice.RIVALS) - 0.4, abs=0.4)
    assert rows["oracle"]["loss"] <= 0.0
    assert rows["muka"]["settings"] == "1 of 1 pools, 2 thinned"
    assert rows["muka"]["within"] is None  # one pool has no interval


def test_without_settings_or_estimators_the_message_names_the_fix(tmp_path: Path) -> None:
    for arguments, fix in (
        (["table", "--folder", str(tmp_path)], "choice.py make"),
        (["table", "--folder", str(tmp_path), "--estimators", "best"], "use muka"),
    ):
        with mock.patch.object(sys, "argv", ["choice.py", *arguments]), pytest.raises(SystemExit, match=fix):
            choice.main()


def test_pools_partition_the_labels_by_their_draw(tmp_path: Path) -> None:
    labels = [f"label {number}" for number in range(7)]
    texts = [(f"{label} {row}", label) for label in labels for row in range(30)]
    texts += [("twice", "label 0"), ("twice", "label 1"), ("rare", "label 8")]
    pl.DataFrame(texts, schema=["text", "label"], orient="row").write_parquet(tmp_path / "train.parquet")
    kept = labelled_texts(tmp_path / "train.parquet")
    assert sorted(kept["label"].unique()) == labels
    assert "twice" not in kept["text"]
    pools = list(pools_of({"made": tmp_path}, draws=2))
    assert [(pool.groups, pool.draw, pool.layers) for pool in pools[:3]] == [(3, 0, 0), (2, 0, 0), (3, 0, 3)]
    first, second = (groups_of(labels, Pool("made", 3, draw)) for draw in range(2))
    assert sorted(label for own in first.values() for label in own) == labels
    assert first != second


def test_make_counts_its_settings_those_of_an_interrupted_run_too(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [(f"label {row % 4} {row}", f"label {row % 4}") for row in range(120)]
    data = tmp_path / "made"
    data.mkdir()
    pl.DataFrame(texts, schema=["text", "label"], orient="row").write_parquet(data / "train.parquet")
    arguments = ["make", "--data", str(tmp_path), "--sets", "made", "--draws", "1", "--folder", str(tmp_path / "out")]
    with (
        mock.patch.object(choice, "write_pool"),
        mock.patch.object(choice, "settings_of", lambda _, pool: [replace(setting, name=pool.name)]),
    ):
        first, again = (printed(capsys, *arguments)["make"] for _ in range(2))
    assert (first["pools"], first["settings"]) == (again["pools"], again["settings"]) == (2, 2)
    assert len(list(load_settings(tmp_path / "out"))) == 2


# ---- benchmarks/few_labels.py


def test_the_table_has_a_row_for_each_count(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_setting(setting, tmp_path / "settings" / f"{setting.name}.npz")
    count, texts = 200, len(setting.gold)
    arguments = ["few_labels.py", "--folder", str(tmp_path), "--counts", str(count), "--draws", "2", "--each", "--json"]
    with mock.patch.object(sys, "argv", arguments):
        few_labels.main()
    rows = {row["row"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert set(rows) == {setting.name, "0 labels", "200 labels"}
    labelled = rows["200 labels"]
    assert labelled["labels"] == pytest.approx((count + (texts - count) * labelled["others"]) / texts, abs=0.002)
    assert labelled["least_gain"] == pytest.approx(labelled["right"] - rows["0 labels"]["right"], abs=0.002)


def test_a_folder_without_settings_is_refused(tmp_path: Path) -> None:
    arguments = ["few_labels.py", "--folder", str(tmp_path)]
    with mock.patch.object(sys, "argv", arguments), pytest.raises(SystemExit, match="has no such setting"):
        few_labels.main()


# ---- benchmarks/unlabelled_estimates.py


SYSTEMS = ("targets", "ensemble", "muka")


def test_every_system_is_measured_once_and_students_are_compared_with_the_ensemble(setting: Setting) -> None:
    measured = {each.system: each for each in unlabelled_estimates.measure(setting)}
    students = {f"{kind} {part:g}" for kind in ("states", "encoder") for part in unlabelled_estimates.PARTS}
    assert set(measured) == {*SYSTEMS, *students}
    best = measured["states 1"]
    assert best.accuracy > 0.8
    assert best.value == pytest.approx(best.accuracy, abs=0.03)
    assert not best.clear
    assert best.lead < 0


def test_a_bad_student_is_clearly_below_the_ensemble_unless_its_agreement_decides(setting: Setting) -> None:
    rows = np.arange(len(setting.gold))

    def students(_setting: Setting, _learned: Any, targets: Any, _mass: Any) -> list[tuple[str, Any]]:
        return [(f"{share:g}", np.where(rows % 100 < share, targets, (targets + 1) % 5)) for share in (60, 20)]

    with mock.patch.object(unlabelled_estimates, "_students", students):
        measured = {each.system: each for each in unlabelled_estimates.measure(setting)}
    assert [(measured[name].is_open, measured[name].clear) for name in ("60", "20")] == [(True, True), (False, False)]
    assert measured["60"].accuracy == pytest.approx(0.6, abs=0.12)
    assert measured["60"].value == pytest.approx(measured["60"].accuracy, abs=0.15)
    assert measured["20"].lead > measured["60"].lead > 0.2


def test_the_ensemble_is_the_label_with_the_highest_logit(setting: Setting) -> None:
    highest = np.concatenate(setting.logits, axis=1).argmax(axis=1)
    assert unlabelled_estimates._ensemble(setting).tolist() == highest.tolist()  # noqa: SLF001


def test_the_table_has_a_row_for_each_system_and_one_for_all_students(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_setting(setting, tmp_path / "settings" / f"{setting.name}.npz")
    with mock.patch.object(sys, "argv", ["unlabelled_estimates.py", "--folder", str(tmp_path), "--json"]):
        unlabelled_estimates.main()
    rows = {row["row"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert len(rows) == 1 + len(SYSTEMS) + 2 * len(unlabelled_estimates.PARTS)
    own = [row for name, row in rows.items() if name.split()[1] in {"states", "encoder"}]
    for count in ("n", "clear", "wrong", "below"):
        assert rows["all students"][count] == sum(row[count] for row in own)
    with (
        mock.patch.object(sys, "argv", ["unlabelled_estimates.py", "--folder", str(tmp_path / "none")]),
        pytest.raises(SystemExit, match=r"choice\.py make"),
    ):
        unlabelled_estimates.main()
