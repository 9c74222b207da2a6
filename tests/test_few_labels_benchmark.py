"""The benchmark of a few labels: its figures follow from the labelled texts, and its table has a row for each count."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from amalgam.benchmarks import few_labels
from amalgam.benchmarks.choice_settings import Setting, write_setting
from amalgam.benchmarks.uncertain_texts import Candidates, pick, uncertainty
from amalgam.tests.test_choice import setting

__all__ = ["setting"]


def test_labelled_texts_are_right_and_others_are_measured_apart(setting: Setting) -> None:
    count, texts = 200, len(setting.gold)
    base, *measured = few_labels.measure(setting, [count], 1)
    assert base.count == 0
    assert [each.how for each in measured] == ["random", "picked"]
    for each in measured:
        figures = each.figures
        assert figures["labels"] == pytest.approx((count + (texts - count) * figures["others"]) / texts)


def test_the_table_compares_picked_and_random_texts(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_setting(setting, tmp_path / "settings" / f"{setting.name}.npz")
    arguments = ["few_labels.py", "--folder", str(tmp_path), "--counts", "20", "--draws", "2", "--each", "--json"]
    with mock.patch.object(sys, "argv", arguments):
        few_labels.main()
    rows = {row["row"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert set(rows) == {setting.name, "0 none", "20 random", "20 picked", "20 picked-random"}
    gain = rows["20 picked"]["elsewhere"] - rows["20 random"]["elsewhere"]
    assert rows["20 picked-random"]["elsewhere"] == pytest.approx(gain, abs=0.002)
    assert rows["20 picked"]["least_gain"] >= rows["20 picked"]["right"] - rows["0 none"]["right"] - 0.002


def test_a_folder_without_settings_is_refused(tmp_path: Path) -> None:
    with mock.patch.object(sys, "argv", ["few_labels.py", "--folder", str(tmp_path)]), pytest.raises(SystemExit):
        few_labels.main()


def test_uncertain_texts_are_no_near_duplicates_and_of_all_predictions() -> None:
    random = np.random.default_rng(0)
    features = np.repeat(random.normal(size=(40, 8)), 5, axis=0)  # five copies of each text
    weights = np.tile([0.5, 0.5], (200, 1)) + 0.001 * random.random((200, 2))
    answers = np.stack([np.arange(200) // 5 % 4, 4 + np.zeros(200, int)], axis=1)
    rows = [entry.row for entry in pick(Candidates(weights, answers, features), 20, 0) if entry.why == "uncertain"]
    assert len({row // 5 for row in rows}) == len(rows) == 10
    assert len({int(answers[row, 0]) for row in rows}) == 4


def test_certain_texts_are_picked_last_and_teachers_that_agree_are_certain() -> None:
    weights = np.array([[0.5, 0.5], [0.9, 0.1], [0.5, 0.5], [0.99, 0.01]])
    answers = np.array([[0, 1], [0, 1], [0, 0], [0, 1]])
    assert uncertainty(weights, answers)[2] == 0
    assert [entry.row for entry in pick(Candidates(weights, answers, None), 2, 0) if entry.why == "uncertain"] == [0]
