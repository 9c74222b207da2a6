"""A label that means none of a teacher's others is no label of the student, and lowers the teacher's weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest

from amalgam import Experiment
from amalgam.data.keys import label_notes
from amalgam.tests.workspaces import TEACHER_LABELS

if TYPE_CHECKING:
    from amalgam.tests.workspaces import Workspace

CATCH_ALL = "teachers.0.catch_all=[computing]"
LEFT = [*(label for label in TEACHER_LABELS["first"] if label != "computing"), *TEACHER_LABELS["second"]]


@pytest.fixture
def workspace(fresh: Workspace) -> Workspace:
    """Returns an experiment whose test texts have labels that are left."""
    fresh.write([row for row in fresh.texts("test") if row[1] != "computing"], "test")
    return fresh


def test_no_teacher_runs_again_and_the_label_is_no_label_of_the_student(workspace: Workspace) -> None:
    workspace("weigh-teachers", "student.method=amalgam")
    before = workspace.plan("student.method=amalgam")
    after = workspace.plan("student.method=amalgam", CATCH_ALL)
    for stage in ("cache-teachers", "cache-features"):
        assert after[stage]["state"] == before[stage]["state"] == "current"
    assert after["weigh-teachers"]["state"] != "current"
    workspace("build-targets", "student.method=amalgam", CATCH_ALL)
    experiment = Experiment.load(workspace.config, {"student.method": "amalgam", "teachers.0.catch_all": ["computing"]})
    assert experiment.targets.collect()["target"].dtype == pl.Array(pl.Float32, len(LEFT))


@pytest.mark.parametrize("method", ["amalgam", "muka-soft"])
def test_a_teacher_weighs_less_where_it_predicts_the_label(workspace: Workspace, method: str) -> None:
    chosen = {}
    for catch_all in ([], ["computing"]):
        overrides = {"student.method": method, "teachers.0.catch_all": catch_all}
        experiment = Experiment.load(workspace.config, overrides, quiet=True)
        experiment.run("build-targets")
        targets = experiment.targets.collect()
        logits = experiment.logits("first").collect().select("key", first=pl.col("logits").arr.arg_max())
        joined = targets.join(logits, on="key")
        predicts = joined["first"] == TEACHER_LABELS["first"].index("computing")
        assert predicts.any()
        chosen[bool(catch_all)] = joined.filter(predicts)["teacher"].to_list().count("first")
    assert chosen[True] < chosen[False]


def test_what_cannot_be_left_out_is_refused(fresh: Workspace) -> None:
    for catch_all, words in {
        "[compute]": "such as 'computing'",
        "[banking, computing, cooking]": "fewer than two labels",
    }.items():
        refused = fresh.attempt("plan", f"teachers.0.catch_all={catch_all}")
        assert (refused.code, words in refused.err) == (2, True), refused.err
    assert "not for teachers with catch_all" in fresh.attempt("plan", CATCH_ALL, "cache.adaptive=true").err


def test_a_label_that_looks_like_one_is_noted() -> None:
    [note] = label_notes({"first": ["law", "Other"], "second": ["music", "Other"]})
    assert note.startswith("Other of first and second counts as a label of the student")
    assert 'catch_all: ["Other"]' in note
    assert not [*label_notes({"only": ["law", "other"]})]


def test_the_share_of_its_own_labels_scales_its_confidence(workspace: Workspace) -> None:
    from amalgam.pipeline.execution.runner import update
    from amalgam.stages.app.api import open_run
    from amalgam.stages.common.cached.load import answer_reader
    from amalgam.stages.registry import STAGES

    workspace("cache-teachers")
    frames = {}
    for overrides in ([], [CATCH_ALL]):
        run = open_run(workspace.config, [*overrides, "targets.passes=0"])
        update(STAGES, run, target="cache-teachers")
        reader = answer_reader(run)
        keys = Experiment.load(workspace.config).texts("train").collect()["key"].cast(pl.Binary)
        frames[bool(overrides)] = reader.predictions("first", ["all"], keys)
    whole, part = frames[False].logits.to_numpy().astype(float), frames[True]
    assert np.array_equal(part.logits.to_numpy(), whole[:, [0, 2, 3]])
    probability = np.exp(whole) / np.exp(whole).sum(axis=1, keepdims=True)
    assert part.own is not None
    assert np.allclose(part.own.to_numpy(), probability[:, [0, 2, 3]].sum(axis=1))
    among = probability[:, [0, 2, 3]] / probability[:, [0, 2, 3]].sum(axis=1, keepdims=True)
    certain = 1 + (among * np.log(among)).sum(axis=1) / np.log(3)
    assert np.allclose(part.confidence.to_numpy(), certain * part.own.to_numpy(), atol=1e-5)
