"""The proposed command of a verdict: it is about the student of the report, and works as printed."""

from __future__ import annotations

import csv
import json
import shlex
from typing import Any

from amalgam.stages.common.deliveries import METADATA
from amalgam.tests.workspaces import TRAIN, Workspace


def next_of(workspace: Workspace, name: str) -> dict[str, Any]:
    step: dict[str, Any] = json.loads((workspace.folder / f"reports/{name}.json").read_text())["verdict"]["next"]
    return step


def test_texts_to_label_are_for_the_student_of_this_name(workspace: Workspace) -> None:
    gold, metadata = dict(workspace.texts()), workspace.folder / "students/student" / METADATA
    before = metadata.read_bytes()
    workspace("run", "corpus.test=null", "student.name=two", "student.epochs=20", "student.learning_rate=1e-2")
    command = next_of(workspace, "two")["command"]
    path = workspace.folder / "reports/two.to-label.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = [{**row, "label": gold[row["text"]]} for row in csv.DictReader(file)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    assert "train-student: reused" in workspace(*shlex.split(command)[1:]).err
    assert json.loads((workspace.folder / "reports/two.json").read_text())["evaluation"]["n"] == TRAIN
    assert metadata.read_bytes() == before
