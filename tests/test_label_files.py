"""Files of labels: names, columns, labels and ids that are accepted, and messages about the others."""

from __future__ import annotations

import csv
from collections.abc import Sequence

import pytest

from amalgam import Experiment
from amalgam.tests.workspaces import Workspace

AMALGAM = ("student.method=amalgam", "targets.mode=hard")


def write(workspace: Workspace, rows: Sequence[Sequence[str]], name: str = "labels.csv") -> None:
    with (workspace.folder / name).open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])


# ---- before any stage


FAULTS: dict[str, tuple[str, int, str]] = {
    "absent": ("nope.csv", 3, "./nope.csv does not exist"),
    "folder": ("texts", 3, "./texts is no file of labels"),
    "other columns": ("amalgam.csv", 3, "no column text in amalgam.csv"),
    "other label": ("labels.csv", 3, "no teacher has the label bankng; did you mean banking?"),
    "another method": ("labels.csv targets.mode=scores", 2, "targets.mode: scores does not use labels"),
    "no file": ("--out more.csv targets.mode=scores", 2, "targets.mode: scores does not use labels"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_label_refuses_a_file_before_any_stage_runs(fresh: Workspace, fault: str) -> None:
    arguments, code, message = FAULTS[fault]
    write(fresh, [(fresh.texts()[0][0], "bankng")])
    (fresh.folder / "amalgam.csv").write_text("body,sort\na,b\n")
    refused = fresh.attempt("label", *arguments.split())
    assert (refused.code, message in refused.err) == (code, True), refused.err
    assert not list(fresh.artifacts.rglob("*.parquet"))


def test_label_takes_the_labels_of_the_corpus(workspace: Workspace) -> None:
    effect = workspace("label", "corpus", *AMALGAM)
    assert "120 labels" in effect.out
    assert "labels=corpus" in effect.out
    experiment = Experiment.load(workspace.config, AMALGAM, quiet=True)
    assert experiment.compare_labels("corpus").labels == 120
