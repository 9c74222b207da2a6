"""A label that means none of a teacher's others is no label of the student, and lowers the teacher's weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest

from amalgam import Experiment
from amalgam.data.keys import label_notes
from amalgam.stages.common.intervals import percent
from amalgam.stages.weigh_teachers import weigh
from amalgam.tests.workspaces import TEACHER_LABELS, write_csv

if TYPE_CHECKING:
    from collections.abc import Collection

    from amalgam.stages.common.cached.read import CacheReader
    from amalgam.stages.weigh_teachers.signals import Params
    from amalgam.tests.workspaces import Workspace

CATCH_ALL = "teachers.0.catch_all=[computing]"
OTHERS = [label for label in TEACHER_LABELS["first"] if label != "banking"]
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


@pytest.mark.parametrize(
    ("method", "names"), [("amalgam", ["computing"]), ("muka-soft", ["computing"]), ("amalgam", OTHERS)]
)
def test_a_teacher_weighs_less_where_it_predicts_the_label(workspace: Workspace, method: str, names: list[str]) -> None:
    chosen, places = {}, list(map(TEACHER_LABELS["first"].index, names))
    for catch_all in ([], names):
        overrides = {"student.method": method, "teachers.0.catch_all": catch_all, "corpus.test": None}
        experiment = Experiment.load(workspace.config, overrides, quiet=True)
        experiment.run("build-targets")
        targets = experiment.targets.collect()
        logits = experiment.logits("first").collect().select("key", first=pl.col("logits").arr.arg_max())
        joined = targets.join(logits, on="key")
        predicts = joined["first"].is_in(places)
        assert predicts.any()
        chosen[bool(catch_all)] = joined.filter(predicts)["teacher"].to_list().count("first")
    assert chosen[True] < chosen[False]


def test_what_cannot_be_left_out_is_refused(fresh: Workspace) -> None:
    for catch_all, words in {
        "[compute]": "such as 'computing'",
        "[banking, computing, cooking, gardening]": "no label",
    }.items():
        assert words in fresh.refusal(2, "plan", f"teachers.0.catch_all={catch_all}")
    assert "not for teachers with catch_all" in fresh.attempt("plan", CATCH_ALL, "cache.adaptive=true").err
    one_label = f"teachers.0.catch_all=[{', '.join(OTHERS)}]"
    apart = fresh.attempt("plan", one_label, "corpus.test=null", "targets.mode=uhc")
    assert "teacher first has one label, and uhc compares the labels of each teacher" in apart.err
    same = ("teachers.1.catch_all=[law, medicine, music]", "teachers.1.rename={gardening: banking}")
    assert "all teachers together have one label, banking" in fresh.attempt("plan", one_label, *same).err


def right_on_own_labels(workspace: Workspace, part: str, **settings: object) -> tuple[int, int]:
    """Returns how many texts have a label of the first teacher, and for how many its largest output is this label."""
    experiment = Experiment.load(workspace.config, settings)
    logits = experiment.logits("first")
    texts = experiment.texts(part).select(pl.col("key").cast(pl.Binary), "label")
    joined = texts.join(logits.with_columns(pl.col("key").cast(pl.Binary)), on="key").collect()
    own = joined.filter(pl.col("label").is_in(TEACHER_LABELS["first"]))
    names = [TEACHER_LABELS["first"][place] for place in own["logits"].arr.arg_max()]
    return len(own), sum(name == label for name, label in zip(names, own["label"], strict=True))


def test_a_prediction_of_the_label_is_wrong_on_its_own_labels(workspace: Workspace) -> None:
    workspace("report", CATCH_ALL, "student.epochs=1")
    n, right = right_on_own_labels(workspace, "test")
    assert workspace.numbers()["student_quality"]["teachers"]["own"]["first"] == {"n": n, "right": right}
    workspace.write([row for row in workspace.texts() if row[1] != "computing"])
    write_csv(workspace.folder / "labels.csv", ("text", "label"), workspace.texts())
    options = ("student.method=amalgam", CATCH_ALL, "corpus.test=null")
    shown = " ".join(workspace("label", "labels.csv", *options).out.split())
    n, right = right_on_own_labels(workspace, "train", **{"corpus.test": None})
    assert f"first on its own labels {n} {percent(right / n)} " in shown


def test_the_confidence_of_a_detector_is_the_probability_of_its_label(workspace: Workspace) -> None:
    reader, keys = answers_of(workspace, f"teachers.0.catch_all=[{', '.join(OTHERS)}]")
    part, whole = (reader.predictions("first", ["all"], keys), answers_of(workspace)[0])
    logits = whole.predictions("first", ["all"], keys).logits.to_numpy().astype(float)
    banking = (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True))[:, TEACHER_LABELS["first"].index("banking")]
    assert np.allclose(part.confidence.to_numpy(), banking)
    assert (part.distribution.to_numpy() == 1).all()


def test_a_single_kind_of_evidence_keeps_a_detectors_own_range(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def by_range(signal: np.ndarray[Any, Any], predicted: Any, params: Params, detectors: Collection[int]) -> Any:
        given.append(list(detectors))
        return signal

    monkeypatch.setattr(weigh, "by_range", by_range)
    monkeypatch.setattr(weigh, "exclusive", lambda *_: True)
    workspace(
        "weigh-teachers",
        "student.method=amalgam",
        "targets.weight_signal=margin",
        "corpus.test=null",
        f"teachers.0.catch_all=[{', '.join(OTHERS)}]",
    )
    assert given == [[0]]


@pytest.mark.parametrize("names", [["computing"], OTHERS])
def test_the_distance_from_a_domain_can_be_measured(workspace: Workspace, names: list[str]) -> None:
    overrides = {"targets.uncertainty": "rmd", "teachers.0.catch_all": names, "corpus.test": None}
    experiment = Experiment.load(workspace.config, overrides, quiet=True)
    experiment.run("build-targets")
    assert experiment.targets.collect()["weight"].is_finite().all()


def test_a_label_that_looks_like_one_is_noted() -> None:
    [note] = label_notes({"first": ["law", "Other"], "second": ["music", "Other"]})
    assert note.startswith("Other of first and second counts as a label of the student")
    assert 'catch_all: ["Other"]' in note
    assert not [*label_notes({"only": ["law", "other"]})]


def answers_of(workspace: Workspace, *overrides: str) -> tuple[CacheReader, pl.Series]:
    """Returns the reader of the cached predictions, and the keys of the training texts."""
    from amalgam.pipeline.execution.runner import update
    from amalgam.stages.app.runs import open_run
    from amalgam.stages.common.cached.load import cache_reader
    from amalgam.stages.registry import STAGES

    run = open_run(workspace.config, ["targets.passes=0", "corpus.test=null", *overrides])
    update(STAGES, run, target="cache-teachers")
    texts = Experiment.load(workspace.config, {"corpus.test": None}).texts("train").collect()
    return cache_reader(run), texts["key"].cast(pl.Binary)


def test_the_share_of_its_own_labels_scales_its_confidence(workspace: Workspace) -> None:
    (reader, keys), (with_it, _) = answers_of(workspace), answers_of(workspace, CATCH_ALL)
    whole = reader.predictions("first", ["all"], keys).logits.to_numpy().astype(float)
    part = with_it.predictions("first", ["all"], keys)
    assert np.array_equal(part.logits.to_numpy(), whole[:, [0, 2, 3]])
    probability = np.exp(whole) / np.exp(whole).sum(axis=1, keepdims=True)
    assert part.own is not None
    assert np.allclose(part.own.to_numpy(), probability[:, [0, 2, 3]].sum(axis=1))
    among = probability[:, [0, 2, 3]] / probability[:, [0, 2, 3]].sum(axis=1, keepdims=True)
    certain = 1 + (among * np.log(among)).sum(axis=1) / np.log(3)
    assert np.allclose(part.confidence.to_numpy(), certain * part.own.to_numpy(), atol=1e-5)
