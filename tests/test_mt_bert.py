"""MT-BERT trains from gold labels and teachers with all labels; one field leaves out each of its parts."""

from __future__ import annotations

import pytest

from amalgam.tests.workspaces import TEACHER_LABELS, TRAIN, Workspace, word_list, write_model

LABELS = sorted(label for labels in TEACHER_LABELS.values() for label in labels)
METHOD = "student.method=mt-bert"


@pytest.fixture
def alike(fresh: Workspace) -> Workspace:
    """Two teachers of all the labels, in another order each and of different width."""
    fresh.edit("targets:\n  mode: soft\n", "")
    for seed, (name, labels) in enumerate((("first", LABELS), ("second", LABELS[::-1])), 1):
        wider = {"hidden_size": 48} if name == "second" else {}
        write_model(fresh.folder / "models" / name, labels=labels, words=word_list(fresh), seed=seed, **wider)
    return fresh


def test_it_runs_by_one_word_and_reports_that_it_used_labels(alike: Workspace) -> None:
    result = alike("run", METHOD)
    assert "student (mt-bert)" in result.out
    assert "gold labels" in alike.manifest("train-student")["facts"]["selected_by"]
    assert {len(target) for target, _ in alike.targets().values()} == {2 * len(LABELS)}
    assert alike.stale(METHOD) == set()
    before = alike.targets()
    with alike.counting() as asked:
        for without, name in (
            ("objective.name=targets", "mt-bert w/o hidden loss"),
            ("targets.text_weights=none", "mt-bert w/o weighting"),
            ("targets.task_loss=false", "mt-bert w/o task loss"),
        ):
            assert f"student ({name})" in alike("run", METHOD, without).out
            assert (alike.targets() == before) == (without == "objective.name=targets")
    assert asked[0].units == 0


def test_teachers_of_other_labels_are_refused_before_any_is_asked(fresh: Workspace) -> None:
    fresh.edit("targets:\n  mode: soft\n", "")
    err = fresh.refusal(2, "run", METHOD)
    assert "banking, computing" in err
    assert "rename" in err
    assert not (fresh.artifacts / "cache-teachers").exists()


def test_labels_that_are_read_must_be_there(alike: Workspace) -> None:
    alike.edit("  test: texts/test.csv\n  label: label\n", "")
    assert "targets.mode: mt-bert" in alike.refusal(2, "plan", METHOD)
    without = ("targets.text_weights=none", "targets.task_loss=false")
    alike("train-student", METHOD, *without)
    assert "no labels" in alike.manifest("train-student")["facts"]["selected_by"]


def test_texts_without_a_label_are_refused_where_labels_are_learned(alike: Workspace) -> None:
    alike("build-targets", METHOD, "targets.text_weights=none", "targets.task_loss=false")
    rows = alike.texts()
    alike.write([*rows[:-1], (rows[-1][0], "")])
    alike.refusal(3, "build-targets", METHOD)


def test_a_single_teacher_is_distilled_by_it_too(alike: Workspace) -> None:
    alike.edit("  - name: second\n    model: ./models/second\n", "")
    alike("train-student", METHOD)
    assert len(alike.targets()) == TRAIN


def test_the_student_can_begin_as_the_first_layers_of_a_teacher(alike: Workspace) -> None:
    """Before training, its body is the teacher's, and its head is new."""
    from safetensors.torch import load_file

    write_model(
        alike.folder / "models/first",
        labels=LABELS,
        words=word_list(alike),
        seed=1,
        num_hidden_layers=3,
        hidden_size=48,
    )
    begun = ("student.encoder=teacher:first", "student.layers=2", "student.learning_rate=1e-12")
    alike("train-student", METHOD, *begun)
    student, teacher = (
        load_file(alike.folder / place / "model.safetensors") for place in ("students/student", "models/first")
    )
    body = {name for name in teacher if name.startswith("bert.") and "layer.2." not in name}
    assert {name for name in student if name.startswith("bert.")} == body
    assert all(float((student[name] - teacher[name]).abs().max()) < 1e-6 for name in body)
    assert float((student["classifier.weight"] - teacher["classifier.weight"]).abs().max()) > 1e-3
    assert alike.stale(METHOD, *begun) == {"report"}
    short = (METHOD, "student.encoder=teacher:first", "student.layers=1")
    alike("train-student", *short)
    alike.edit("    model: ./models/first", "    model: ./models/second")
    assert "train-student" in alike.stale(*short)
    assert "more than the encoder has, 1" in alike.attempt("plan", METHOD, *begun).err


def test_a_teacher_that_is_not_there_is_no_encoder(fresh: Workspace) -> None:
    assert "first, second" in fresh.refusal(2, "plan", "student.encoder=teacher:third")
