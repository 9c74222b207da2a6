"""The benchmark of the estimates without labels: its figures are those of the report on a hand-made setting."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from amalgam.benchmarks import unlabelled_estimates
from amalgam.benchmarks.choice_settings import Setting, write_setting
from amalgam.tests.test_choice import setting

__all__ = ["setting"]

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
