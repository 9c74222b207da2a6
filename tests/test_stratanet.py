"""StrataNet and its measures on real and on generated texts; repeated commands reuse results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from amalgam.tests.test_state_methods import learned, second_teacher
from amalgam.tests.test_states import states
from amalgam.tests.workspaces import TRAIN, Workspace, build_once, ranks, up_to_date, word_list, write_model

METHOD = "student.method=stratanet"
HELD_OUT = "generate.held_out=0.3"
STUDENT_ON = {"train-student", "report"}
TARGETS_ON = {"build-targets", *STUDENT_ON}
OWN = "the most confident of those generated for it"


def without_mode(workspace: Workspace) -> Workspace:
    """Remove the fields that override a method's defaults."""
    workspace.edit("targets:\n  mode: soft\n", "")
    return workspace


@pytest.fixture
def plain(built: Workspace, shared: Path, tmp_path: Path) -> Workspace:
    """Return a copy of an experiment with real texts that is up to date by stratanet."""
    build = build_once(shared / "stratanet", lambda folder: up_to_date(without_mode(built.copy(folder)), METHOD))
    return build.copy(tmp_path / "plain")


@pytest.fixture(scope="module")
def written(generated: Workspace, shared: Path) -> Workspace:
    """Generated texts with a part held out, up to date by stratanet."""
    return build_once(
        shared / "stratanet-generated",
        lambda folder: up_to_date(without_mode(generated.copy(folder)), METHOD, HELD_OUT),
    )


def confidence(workspace: Workspace) -> Any:
    """[texts, teachers] of the targets that were built last, by key."""
    tables = [
        pq.read_table(workspace.artifacts / file["path"]) for file in workspace.manifest("build-targets")["files"]
    ]
    rows = sorted((row for table in tables for row in table.to_pylist()), key=lambda row: row["key"])
    return np.array([row["confidence"] for row in rows])


def test_it_runs_from_real_texts_with_the_papers_defaults(plain: Workspace) -> None:
    result = plain("run", METHOD)
    assert "student (stratanet)" in result.out
    assert plain.stale(METHOD) == set()
    taught = plain.manifest("build-targets")["identity"]["config"]["targets"]
    assert taught == {"mode": "stratanet", "uncertainty": "rmd", "kd_temperature": 0.75}
    identity = plain.manifest("train-student")["identity"]["config"]
    assert identity["objective"] == {
        "name": "stratanet",
        "blocks": None,
        "alpha": 0.7,
        "fusion": "st",
        "learning_rate": 1e-3,
    }
    assert (identity["student"]["dropout"], identity["student"]["warmup"]) == (0.2, 0.2)
    assert json.loads((plain.folder / "students/student/config.json").read_text())["hidden_dropout_prob"] == 0.2


def test_it_runs_from_generated_texts_and_learns_statistics_from_those_held_out(written: Workspace) -> None:
    parts = written.manifest("read-corpus")["facts"]["parts"]
    statistics = written.manifest("fit-statistics")["facts"]["teachers"]
    assert {facts["which"] for facts in statistics.values()} == {OWN}
    assert {facts["background"] for facts in statistics.values()} == {parts["held-out"]["texts"]}
    half = sum(facts["texts"] for facts in statistics.values())
    assert 0 < half < parts["held-out"]["texts"]
    shares = confidence(written)
    assert len(shares) == parts["train"]["texts"]
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-6)


def test_without_held_out_texts_statistics_come_from_training_texts_with_a_note(
    generated: Workspace, tmp_path: Path
) -> None:
    workspace = without_mode(generated.copy(tmp_path / "workspace"))
    result = workspace("run", METHOD)
    assert "generate.held_out=0.1" in result.err
    assert {facts["which"] for facts in workspace.manifest("fit-statistics")["facts"]["teachers"].values()} == {OWN}


def test_texts_for_no_teacher_are_references_of_the_most_confident_one(written: Workspace, tmp_path: Path) -> None:
    workspace = written.copy(tmp_path / "workspace")
    workspace(
        "run", METHOD, HELD_OUT, "generate.source=cross-domain", "generate.corpus=texts/test.csv", "generate.texts=5"
    )
    statistics = workspace.manifest("fit-statistics")["facts"]["teachers"]
    assert {facts["which"] for facts in statistics.values()} == {"the most confident"}
    for facts in statistics.values():  # rounded up for each class
        assert 0 <= facts["texts"] - facts["background"] / 4 < 4


def test_all_of_a_teachers_texts_as_in_the_paper_are_other_statistics_and_a_student_of_that_name(
    written: Workspace, tmp_path: Path
) -> None:
    half = sum(facts["texts"] for facts in written.manifest("fit-statistics")["facts"]["teachers"].values())
    workspace = written.copy(tmp_path / "workspace")
    paper = ("targets.reference_fraction=1", HELD_OUT, METHOD)
    assert workspace.stale(*paper) == {"fit-statistics", *TARGETS_ON}
    assert "student (stratanet (reference_fraction 1))" in workspace("run", *paper).out
    statistics = workspace.manifest("fit-statistics")["facts"]["teachers"].values()
    held_out = workspace.manifest("read-corpus")["facts"]["parts"]["held-out"]["texts"]
    assert sum(facts["texts"] for facts in statistics) >= held_out > half


# ---- work done once


def test_another_alpha_or_ablation_is_another_student_and_nothing_else(plain: Workspace) -> None:
    for word in ("objective.alpha=0.5", "objective.fusion=no-st", "objective.fusion=multiply"):
        assert plain.stale(METHOD, word) == STUDENT_ON
    before = states(plain)
    with plain.counting() as asked:
        plain("train-student", METHOD, "objective.fusion=multiply")
    assert asked[0].units == 0
    assert states(plain) == before


@pytest.mark.parametrize("measure", ["md", "msp"])
def test_another_measure_is_other_targets_and_another_student_and_fits_nothing(plain: Workspace, measure: str) -> None:
    before = confidence(plain)
    assert plain.stale(METHOD, f"targets.uncertainty={measure}") == TARGETS_ON
    result = plain("build-targets", METHOD, f"targets.uncertainty={measure}")
    assert "fit-statistics: reused" in result.err
    assert np.abs(confidence(plain) - before).max() > 0.01


def test_appended_texts_get_their_own_states_and_held_out_ones_are_not_asked_again(
    written: Workspace, tmp_path: Path
) -> None:
    workspace = written.copy(tmp_path / "workspace")
    before = states(workspace)
    with workspace.counting() as asked:
        workspace("run", METHOD, HELD_OUT, "generate.texts=14")
    assert before.items() < states(workspace).items()
    parts = workspace.manifest("read-corpus")["facts"]["parts"]
    old = written.manifest("read-corpus")["facts"]["parts"]
    new = {name: parts[name]["texts"] - old[name]["texts"] for name in ("train", "held-out")}
    assert asked[0].logits == 2 * sum(new.values())
    assert asked[0].passes == 2 * 4 * new["train"]


def test_methods_without_statistics_need_no_held_out_texts(generated: Workspace, tmp_path: Path) -> None:
    workspace = generated.copy(tmp_path / "workspace")
    workspace("build-targets", HELD_OUT)
    assert "held-out" not in workspace.manifest("cache-teachers")["identity"]["inputs"]["texts"]
    assert "fit-statistics" not in workspace.plan(HELD_OUT)


def test_ablated_parts_are_named_in_the_report(plain: Workspace) -> None:
    result = plain("run", METHOD, "targets.uncertainty=md", "objective.fusion=no-st")
    assert "student (stratanet (md, no-st))" in result.out
    result = plain("run", METHOD, "objective.name=targets")
    assert "student (stratanet w/o amalgamated states)" in result.out


# ---- for other methods, teachers and students


def test_muka_runs_with_it_and_reads_no_pass(plain: Workspace) -> None:
    for method, measure in (("muka-soft", "md"), ("muka-soft", "msp"), ("muka-hard", "rmd")):
        overrides = (f"student.method={method}", f"targets.uncertainty={measure}")
        plain("build-targets", *overrides)
        shares = confidence(plain)
        assert len(shares) == TRAIN
        np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-6)
        assert plain.stale(*overrides, "targets.passes=2") == STUDENT_ON


def test_its_states_work_with_mukas_targets(plain: Workspace) -> None:
    result = plain("run", "student.method=muka-soft", "objective.name=stratanet")
    assert "student (muka-soft and stratanet)" in result.out
    assert plain.manifest("train-student")["identity"]["config"]["confidence"] == "rmd"


def test_four_teachers_of_other_widths_and_depths_and_a_student_from_one_of_them(fresh: Workspace) -> None:
    second_teacher(fresh, ["gardening", "law"], num_hidden_layers=3, hidden_size=48, intermediate_size=64)
    shape: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32}
    for seed, (name, labels) in enumerate([("third", ["medicine", "football"]), ("fourth", ["music", "law"])], 5):
        write_model(fresh.folder / "models" / name, labels=labels, words=word_list(fresh), seed=seed, **shape)
        fresh.edit("cache:\n", f"  - name: {name}\n    model: ./models/{name}\ncache:\n")
    without_mode(fresh)
    result = fresh("run", METHOD, "student.encoder=teacher:second", "student.layers=2")
    assert "student (stratanet)" in result.out
    assert confidence(fresh).shape == (TRAIN, 4)
    assert json.loads((fresh.folder / "students/student/config.json").read_text())["num_hidden_layers"] == 2
    assert {width["width"] for width in fresh.manifest("fit-statistics")["facts"]["teachers"].values()} == {32, 48, 16}


def test_two_processes_fit_a_teacher_each_and_give_the_very_statistics_of_one(plain: Workspace, tmp_path: Path) -> None:
    plain("run", METHOD)
    other = plain.without_artifacts(tmp_path / "other")
    result = ranks(other, "train-student", METHOD)
    assert result.code == 0, result.err
    statistics = [workspace.manifest("fit-statistics")["identity"] for workspace in (plain, other)]
    assert statistics[0] == statistics[1]
    np.testing.assert_allclose(confidence(other), confidence(plain), atol=2e-3)
    assert learned(other)["steps"] == learned(plain)["steps"]


def test_the_audit_goes_by_the_same_confidence(plain: Workspace) -> None:
    overrides = ("student.method=muka-soft", "targets.uncertainty=rmd")
    plain("build-targets", *overrides)
    result = plain("audit", "--json", *overrides).json
    assert result["uncertainty"] == "rmd"
    means = [teacher["mean_confidence"] for teacher in result["teachers"]]
    assert means == pytest.approx(confidence(plain).mean(axis=0).tolist(), abs=1e-5)


def test_the_cost_of_statistics_is_that_of_the_last_build(plain: Workspace) -> None:
    cost = plain("plan", "--json", METHOD, "cache.passes=3").json["cost"]
    assert cost["notes"] == {}


@pytest.mark.parametrize(
    ("overrides", "piece"),
    [
        ([METHOD, "objective.states=tokens"], "stratanet"),
        ([METHOD, "targets.uncertainty=entropy"], "targets.uncertainty: "),
        (["student.method=amalgam", "targets.uncertainty=md"], "targets.teacher_weights=muka"),
        ([METHOD, "objective.alpha=1.5"], "objective.alpha"),
    ],
)
def test_contradicting_fields_are_refused_before_anything_runs(
    fresh: Workspace, overrides: list[str], piece: str
) -> None:
    assert piece in without_mode(fresh).refusal(2, "run", *overrides)
    assert not fresh.artifacts.exists()
