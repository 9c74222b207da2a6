"""Methods that learn from teachers' states run by their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from amalgam.stages.common.models.loading import save_pretrained_folder
from amalgam.stages.common.models.model_folder import OTHER_LAYERS
from amalgam.tests.stages.tiny_models import tiny
from amalgam.tests.test_states import states
from amalgam.tests.workspaces import Workspace, edit_json, ranks, word_list, write_model

STATEFUL = ("layerwise", "dfa", "cfl")
OTHER_SHAPE: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 64}


@pytest.fixture
def plain(built: Workspace, tmp_path: Path) -> Workspace:
    """Return an experiment that is up to date, without fields that override a method's defaults."""
    workspace = built.copy(tmp_path / "plain")
    workspace.edit("targets:\n  mode: soft\n", "")
    return workspace


def second_teacher(workspace: Workspace, labels: list[str], **settings: Any) -> None:
    write_model(workspace.folder / "models/second", labels=labels, words=word_list(workspace), seed=2, **settings)


def learned(workspace: Workspace) -> dict[str, Any]:
    """The facts of the last training."""
    return workspace.manifest("train-student")["facts"]


@pytest.mark.parametrize("method", STATEFUL)
def test_the_saved_student_has_nothing_of_the_objective_and_loads_in_transformers(
    plain: Workspace, method: str
) -> None:
    from transformers import AutoModelForSequenceClassification

    plain("train-student", f"student.method={method}", f"student.name={method}")
    folder = plain.folder / "students" / method
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == load_file(plain.folder / "students/student/model.safetensors").keys()
    model, loading = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert len(model.config.id2label) == 8


def test_an_encoder_without_a_state_of_each_token_is_refused_before_a_teacher_runs(fresh: Workspace) -> None:
    folder = fresh.folder / "models/encoder"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    save_pretrained_folder(tiny("t5", vocab_size=len(tokenizer))[0], tokenizer, folder)
    for command in ("plan", "doctor", "run"):
        refused = fresh.attempt(command, "student.method=dfa")
        assert (refused.code, "encoder-decoder" in refused.out + refused.err) == (2, True), refused.err
    assert not fresh.units()


@pytest.mark.parametrize("kind", sorted(OTHER_LAYERS))
def test_layer_wise_learning_of_other_layers_is_refused_before_a_teacher_runs(fresh: Workspace, kind: str) -> None:
    folder = fresh.folder / "models/encoder"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    save_pretrained_folder(tiny(kind, vocab_size=len(tokenizer))[0], tokenizer, folder)
    for command in ("plan", "run"):
        refused = fresh.attempt(command, "student.method=layerwise")
        words = "error: the student's encoder has no list of 2 layers that each give a state of each token\n"
        assert (refused.code, words in refused.out + refused.err) == (2, True), refused.err
    assert not fresh.units()
    assert "no list of 2 layers" not in fresh.attempt("plan", "student.method=dfa").out


@pytest.mark.parametrize("method", STATEFUL)
def test_teachers_of_other_depth_and_width_than_the_student_serve(fresh: Workspace, method: str) -> None:
    second_teacher(fresh, ["gardening", "law", "medicine", "music"], **OTHER_SHAPE)
    fresh.edit("targets:\n  mode: soft\n", "")
    fresh("train-student", f"student.method={method}")


@pytest.mark.parametrize("method", STATEFUL)
def test_teachers_may_share_some_labels(fresh: Workspace, method: str) -> None:
    second_teacher(fresh, ["football", "gardening", "law", "medicine", "music"])
    fresh.edit("targets:\n  mode: soft\n", "")
    fresh("train-student", f"student.method={method}")
    assert len(fresh.targets()[min(fresh.targets())][0]) == (9 if method == "layerwise" else 8)


def test_from_dfa_to_cfl_no_state_and_no_pass_is_computed_again(plain: Workspace) -> None:
    plain("run", "student.method=dfa")
    before = states(plain)
    with plain.counting() as asked:
        result = plain("run", "student.method=cfl")
    assert asked[0].units == 0
    assert states(plain) == before
    assert {"cache-teachers: reused", "cache-features: reused", "build-targets: reused"} <= set(result.err.splitlines())


def test_an_objective_works_with_other_targets_too(plain: Workspace) -> None:
    result = plain("run", "student.method=muka-soft", "objective.name=dfa")
    assert "student (muka-soft and dfa)" in result.out


@pytest.mark.parametrize("learning", ["layer-wise", "joint", "both"])
def test_layerwise_trains_in_the_given_schedule(plain: Workspace, learning: str) -> None:
    plain("train-student", "student.method=layerwise", f"objective.schedule={learning}")
    facts = learned(plain)
    assert set(facts.get("phases", {})) == ({"layer-wise", "joint"} if learning == "both" else set())
    assert facts["selected_by"].endswith("no labels used")


def test_two_processes_learn_layer_by_layer_and_then_end_to_end(plain: Workspace) -> None:
    result = ranks(plain, "train-student", "student.method=layerwise", "student.seed=5")
    assert result.code == 0, result.err
    assert {name: facts["steps"] for name, facts in learned(plain)["phases"].items()} == {"layer-wise": 4, "joint": 4}


def test_joint_learning_alone_needs_no_states_and_no_common_tokenizer(fresh: Workspace) -> None:
    write_model(fresh.folder / "models/second", labels=["law", "music"], words=word_list(fresh)[::-1], seed=2)
    fresh.edit("targets:\n  mode: soft\n", "")
    fresh("build-targets", "student.method=layerwise", "objective.schedule=joint", "corpus.on_bad_row=skip")
    assert states(fresh) == {}
    assert "cache-features" not in fresh.plan("student.method=layerwise", "objective.schedule=joint")


@pytest.mark.parametrize(
    ("overrides", "piece"),
    [
        (["student.method=layerwise", "objective.states=pooled"], "layer-wise"),
        (["student.method=layerwise", "objective.blocks=2"], "objective.blocks"),
        (["student.method=cfl", "objective.states=tokens"], "cfl"),
        (["student.method=cfl", "student.accumulate=2"], "cfl"),
        (["student.method=dfa", "objective.learning_rate=0"], "objective.learning_rate"),
    ],
)
def test_contradicting_fields_are_refused_before_anything_runs(
    fresh: Workspace, overrides: list[str], piece: str
) -> None:
    assert piece in fresh.refusal(2, "run", *overrides)
    assert not fresh.artifacts.exists()


@pytest.mark.parametrize(
    ("tokens", "piece"),
    [(16, "teacher first reads 32 tokens of a text, the student 16"), (32, "do not tokenise alike")],
)
def test_other_tokens_than_those_of_the_student_are_refused_before_a_teacher_runs(
    fresh: Workspace, tokens: int, piece: str
) -> None:
    if tokens == 32:
        edit_json(fresh.folder / "models/first/tokenizer.json", normalizer=None)
    for command in ("plan", "doctor", "run"):
        refused = fresh.attempt(command, "student.method=layerwise", f"student.max_tokens={tokens}")
        assert (refused.code, piece in refused.out + refused.err) == (2, True), refused.err
    assert not fresh.units()


def test_scores_are_not_measured_against_an_oracle(plain: Workspace) -> None:
    err = plain.refusal(2, "build-targets", "targets.mode=scores", "--oracle", "students/student")
    assert "distribution" in err


def test_report_uses_the_objective_of_the_last_train_student(plain: Workspace) -> None:
    plain("train-student", "student.method=dfa", "objective.learning_rate=0.01")
    result = plain("report")
    assert "objective.learning_rate=0.01" in result.err


def test_without_teachers_there_are_no_states_to_learn_from(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    workspace.config.write_text(
        "corpus: {train: a.csv, label: label}\ntargets: {mode: supervised}\nobjective: {name: dfa}\n", "utf-8"
    )
    assert "teacher" in workspace.refusal(2, "plan")


def test_a_link_in_the_place_of_a_phases_checkpoints_is_refused(plain: Workspace, tmp_path: Path) -> None:
    outside, settings = tmp_path / "outside", ("student.method=layerwise", "student.seed=7")
    outside.mkdir()
    plain("build-targets", *settings)
    folder = plain.artifacts / "train-student" / plain.plan(*settings)["train-student"]["fingerprint"] / "checkpoint"
    folder.mkdir(parents=True)
    (folder / "layer-wise").symlink_to(outside)
    refused = plain.attempt("train-student", *settings)
    assert "checkpoint/layer-wise/state.json leaves the workspace through a link" in refused.err
    assert not list(outside.iterdir())
