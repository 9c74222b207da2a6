"""Teachers that are fine-tuned together are ordinary teachers for every later stage."""

from __future__ import annotations

import json
from typing import Any

import pytest

from amalgam.stages.common.training.losses import RestrictedKL
from amalgam.stages.train_teachers import training
from amalgam.tests.workspaces import TEACHER_LABELS, TRAIN, Workspace, word_list, write_model

LABELS = sorted(label for labels in TEACHER_LABELS.values() for label in labels)
SECTION = """\
train_teachers:
  co_train: {one: ./models/encoder, two: ./models/deeper}
  epochs: 1
  learning_rate: 1e-3
  weight_decay: 0
  max_tokens: 32
"""
METHOD = "student.method=mt-bert"

GROUPS = "train_teachers={encoder: ./models/encoder, groups: 1, co_train: null}"


@pytest.fixture
def together(fresh: Workspace) -> Workspace:
    """Two encoders of other depth and other tokenizers."""
    write_model(fresh.folder / "models/deeper", words=word_list(fresh)[::-1], seed=5, num_hidden_layers=2)
    fresh.replace_teachers(SECTION)
    fresh.edit("targets:\n  mode: soft\n", "")
    return fresh


def test_they_serve_every_stage_and_learn_once(together: Workspace) -> None:
    result = together("run", METHOD)
    assert "student (mt-bert)" in result.out
    assert all(f"teacher:{name}" in result.out for name in ("one", "two"))
    for name in ("one", "two"):
        config = json.loads((together.folder / f"teachers/{name}/config.json").read_text())
        assert list(config["id2label"].values()) == LABELS
    heads = [
        {name: tensor.tolist() for name, tensor in weights(together, teacher).items() if name.startswith("attentive")}
        for teacher in ("one", "two")
    ]
    assert heads[0] == heads[1]  # one pooling and one dense layer for both
    assert len(heads[0]) == 5
    assert together.stale(METHOD) == set()
    with together.counting() as asked:
        again = together("run", METHOD, "student.encoder=teacher:two", "student.layers=1", "student.name=begun")
    assert (asked[0].units, "train-teachers: reused" in again.err) == (0, True)
    head = together.head("train-student")
    assert (together.artifacts / "train-student" / head).exists()
    assert len(together.targets()) == TRAIN


def test_each_of_them_has_a_softmax_of_its_own(together: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def noted(columns: Any) -> RestrictedKL:
        made.append([list(labels) for labels in columns])
        return RestrictedKL(columns)

    monkeypatch.setattr(training, "RestrictedKL", noted)
    together("train-teachers")
    assert made == [[list(range(len(LABELS))), list(range(len(LABELS), 2 * len(LABELS)))]]


def weights(workspace: Workspace, teacher: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(workspace.folder / f"teachers/{teacher}/model.safetensors")


def test_a_changed_encoder_trains_all_of_them_again(together: Workspace) -> None:
    together("train-teachers")
    assert together.plan()["train-teachers"]["units"] == {"done": 2, "total": 2}
    assert together.stale("train_teachers.co_train={one: ./models/encoder, three: ./models/deeper}") > {
        "train-teachers"
    }
    units = together.plan("train_teachers.co_train={one: ./models/encoder, two: ./models/encoder}")["train-teachers"]
    assert units["units"] == {"done": 0, "total": 2}


def test_one_teacher_that_was_lost_is_made_again_with_the_others_as_they_were(together: Workspace) -> None:
    together("train-teachers")
    [record] = together.artifacts.glob("train-teachers/teacher-*/two.json")
    before = sorted(path.name for path in together.artifacts.glob("train-teachers/teacher-*/*/model.safetensors"))
    kept = weights(together, "one")
    record.unlink()
    together("train-teachers", "--force")
    assert (
        sorted(path.name for path in together.artifacts.glob("train-teachers/teacher-*/*/model.safetensors")) == before
    )
    again = weights(together, "one")
    assert all((kept[name] == again[name]).all() for name in kept)


@pytest.mark.parametrize(
    ("override", "piece"),
    [
        ("train_teachers.groups=2", "train_teachers.groups: "),
        ("train_teachers.encoder=./models/encoder", "train_teachers.encoder: "),
        ("train_teachers.co_train=null", "train_teachers.encoder: "),
        ("student.encoder=teacher:three", "one, two"),
    ],
)
def test_contradicting_fields_are_refused(together: Workspace, override: str, piece: str) -> None:
    assert piece in together.refusal(2, "plan", override)


def test_labels_of_no_group_are_named(together: Workspace) -> None:
    first, second, *left = LABELS
    groups = f"train_teachers={{encoder: ./models/encoder, groups: {{one: [{first}, {second}]}}, co_train: null}}"
    together("read-corpus", "corpus.test=null")
    texts = sum(label in left for _, label in together.texts())
    note = f"no group of train_teachers.groups: {', '.join(left)}; no teacher learns their {texts} texts"
    assert note in together("plan", groups, "corpus.test=null").err
    assert note in together("train-teachers", groups, "train_teachers.epochs=1", "corpus.test=null").err
    assert "in no group" not in together("plan", GROUPS, "corpus.test=null").err


def test_test_labels_of_no_group_are_refused_before_a_teacher_trains(together: Workspace) -> None:
    first, second, third, *_ = LABELS
    groups = f"train_teachers={{encoder: ./models/encoder, groups: {{one: [{first}, {second}]}}, co_train: null}}"
    together("read-corpus")
    planned, refused = (together.attempt(command, groups) for command in ("plan", "train-teachers"))
    for attempt in (planned, refused):
        assert (attempt.code, "gold label that is not one of the student's" in attempt.err) == (3, True)
        assert third in attempt.err
    assert not [*together.artifacts.glob("train-teachers/*")]
    assert together("train-teachers", groups, "train_teachers.epochs=1", "corpus.on_bad_row=skip").code == 0


def test_texts_of_one_label_train_no_teacher(together: Workspace) -> None:
    together.write([(text, "law") for text, _ in together.texts()])
    for override in ("train_teachers.co_train={one: ./models/encoder}", GROUPS):
        refused = together.attempt("train-teachers", override, "corpus.test=null")
        assert (refused.code, "have 1 label" in refused.err, "where: corpus.label" in refused.err) == (3, True, True)


def test_encoders_of_different_width_are_refused(together: Workspace) -> None:
    write_model(together.folder / "models/deeper", words=word_list(together), seed=5, hidden_size=48)
    err = together.refusal(2, "train-teachers")
    assert "one 32, two 48" in err
    assert "fix: " in err


def test_the_cost_of_teachers_that_were_never_trained_is_not_known(together: Workspace) -> None:
    cost = together("plan", "--json", "--estimate").json["cost"]
    assert cost["stages"]["train-teachers"] is None
    assert "train-teachers" in cost["notes"]
