"""The tokens that a teacher's fine-tuning moved are evidence, where the encoder it was fine-tuned from is known."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from amalgam.data.keys import text_key
from amalgam.data.tokens import Ragged
from amalgam.stages.common.models.loading import rounded_as
from amalgam.stages.weigh_teachers import weigh
from amalgam.stages.weigh_teachers.moved_tokens import have_one_origin, mean_movement, movement
from amalgam.tests.workspaces import TEACHER_LABELS, Workspace, write_bases, write_model

AMALGAM = "student.method=amalgam"
OTHER_KINDS = {"answers", "states", "names"}


@pytest.fixture
def workspace(fresh: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Returns an experiment whose random teachers' evidence is used, although no kinds agree."""
    monkeypatch.setattr(weigh, "AGREEING", -1.0)
    return fresh


def kinds(workspace: Workspace, *overrides: str) -> Mapping[str, float]:
    workspace("weigh-teachers", AMALGAM, *overrides)
    of_kinds: Mapping[str, float] = workspace.manifest("weigh-teachers")["facts"]["kinds"]
    return of_kinds


def right_weight(workspace: Workspace) -> float:
    """Returns the mean weight of the teacher that has the label of the text."""
    [file] = [file["path"] for file in workspace.manifest("weigh-teachers")["files"]]
    table = pq.read_table(workspace.artifacts / file)
    label_of = {text_key([text]): label for text, label in workspace.texts()}
    has_label = [[label_of[key] in own for own in TEACHER_LABELS.values()] for key in table.column("key").to_pylist()]
    return float(np.array(table.column("weight").to_pylist())[np.array(has_label)].mean())


def test_a_teacher_weighs_more_on_texts_with_the_tokens_that_it_learned(workspace: Workspace) -> None:
    assert set(kinds(workspace)) == OTHER_KINDS  # the encoder of the student is another one
    without = right_weight(workspace)
    write_bases(workspace)
    by_kind = kinds(workspace)
    assert set(by_kind) == OTHER_KINDS | {"tokens"}
    assert by_kind["tokens"] == max(by_kind.values())
    assert "base" not in " ".join(workspace.manifest("weigh-teachers")["facts"]["notes"])
    assert right_weight(workspace) > without + 0.1


def test_another_base_changes_the_weights_alone(workspace: Workspace) -> None:
    write_bases(workspace)
    kinds(workspace)
    shutil.copytree(workspace.folder / "models/second-base", workspace.folder / "models/same")
    assert "weigh-teachers" not in workspace.stale(AMALGAM, "teachers.1.base=./models/same")
    other = workspace.stale(AMALGAM, "teachers.1.base=./models/encoder")
    assert "weigh-teachers" in other
    assert not other & {"cache-teachers", "cache-features"}


@pytest.mark.parametrize(
    ("base", "note"),
    [
        ("./models/encoder", "teacher second was not fine-tuned from its base, ./models/encoder"),
        ("./models/wide", "teacher second was not fine-tuned from its base, ./models/wide"),
        ("null", "the training texts of second are no evidence"),  # that of the student is another one
        ("./models/second", ""),  # no vector was moved
    ],
)
def test_a_single_teacher_with_moved_tokens_is_compared_with_no_other(
    workspace: Workspace, base: str, note: str
) -> None:
    write_bases(workspace)
    write_model(workspace.folder / "models/wide", words=["one", "two"], seed=1, hidden_size=64)
    assert set(kinds(workspace, f"teachers.1.base={base}")) == OTHER_KINDS
    notes = " ".join(workspace.manifest("weigh-teachers")["facts"]["notes"])
    assert note in notes
    assert ("base" in notes) == bool(note)


def test_a_base_that_does_not_exist_is_refused_before_any_stage(workspace: Workspace) -> None:
    write_bases(workspace)
    shutil.rmtree(workspace.folder / "models/second-base")
    assert "base of teacher second: ./models/second-base" in workspace.refusal(2, "run", AMALGAM)
    assert "there is no folder ./models/second-base" in workspace.attempt("doctor", AMALGAM).out
    assert not list(workspace.artifacts.glob("cache-teachers/*"))


def test_trained_teachers_start_from_a_known_encoder(workspace: Workspace) -> None:
    workspace.train_teachers()
    assert set(kinds(workspace, "corpus.limit=300", "student.encoder=./models/first")) == OTHER_KINDS | {"tokens"}


# ---- the movement


def vectors(tokens: int = 200) -> Any:
    return np.random.default_rng(0).normal(size=(tokens, 16)).astype(np.float32)


def test_only_tokens_of_the_training_texts_are_moved() -> None:
    base = vectors()
    own = base * np.float32(0.97)  # weight decay
    own[[3, 5, 7]] += vectors(3) * np.array([[0.1], [0.1], [0.4]], np.float32)
    assert have_one_origin(own, base)
    moved = movement(own, base, special=[7, 999])
    assert set(np.flatnonzero(moved)) == {3, 5}
    assert moved[[3, 5]].mean() == pytest.approx(1.0)


def test_tokens_that_one_model_lacks_are_not_moved() -> None:
    base = vectors()
    more = np.concatenate([base, vectors(8)])
    more[2] += 1.0
    assert np.flatnonzero(movement(more, base, [])).tolist() == [2]
    assert len(movement(more, base, [])) == len(more)
    assert not movement(base, more[:150], [])[150:].any()


def test_vectors_of_other_tokens_have_another_origin() -> None:
    base = vectors()
    assert not have_one_origin(base[::-1], base)
    assert not have_one_origin(base[:, :8], base)
    assert not movement(base, base, []).any()


def test_special_tokens_do_not_count_in_the_mean() -> None:
    ids = Ragged.of([np.array([0, 1, 2, 9], np.int32), np.array([0, 9], np.int32), np.array([0, 2, 2, 9], np.int32)])
    moved = np.array([0, 1, 3, 0, 0, 0, 0, 0, 0, 0], np.float32)
    assert mean_movement(ids, moved, [0, 9, 100]).tolist() == [2.0, 0.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_to_half_precision_moves_no_token(dtype: torch.dtype) -> None:
    base = torch.from_numpy(vectors())
    own = base.clone()
    own[4] += 0.1
    own = own.to(dtype).float()
    moved = movement(own.numpy(), rounded_as(base, own).numpy(), [])
    assert np.flatnonzero(moved).tolist() == [4]
