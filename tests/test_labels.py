"""Gold labels of a few training texts: read from a file or the corpus, checked, and used by weights and targets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from amalgam import Experiment
from amalgam.data.arrays import held_out_keys
from amalgam.data.keys import text_key
from amalgam.pipeline.errors import AmalgamError
from amalgam.stages.common import load_labels
from amalgam.stages.common.intervals import interval
from amalgam.stages.report.label_estimates import RightTexts
from amalgam.stages.weigh_teachers import weigh
from amalgam.tests.workspaces import TEACHER_LABELS, Workspace, read_csv, write_csv

LABELS = [label for own in TEACHER_LABELS.values() for label in own]
AMALGAM = ("student.method=amalgam", "targets.mode=hard")


def write(workspace: Workspace, rows: Sequence[Sequence[str]], header: Sequence[str] = ("text", "label")) -> Path:
    path = workspace.folder / "labels.csv"
    write_csv(path, header, rows)
    return path


# ---- the file


def test_a_labelled_text_has_its_label_as_target_with_weight_1(workspace: Workspace) -> None:
    before = workspace.targets()
    rows = workspace.texts()[:6]
    write(workspace, [*rows, (workspace.texts()[7][0], "")])
    result = workspace("build-targets", "labels=labels.csv")
    assert "cache-teachers: reused" in result.err
    after = workspace.targets()
    labelled = {text_key([text]): label for text, label in rows}
    for key, (target, weight) in after.items():
        if key in labelled:
            assert target == [float(label == labelled[key]) for label in LABELS]
            assert weight == 1.0
        else:
            assert (target, weight) == before[key]


def test_labels_rerun_weights_targets_and_student_only(workspace: Workspace) -> None:
    workspace("run", *AMALGAM)
    assert workspace.stale(*AMALGAM) == set()
    write(workspace, workspace.texts()[:6])
    stale = {"weigh-teachers", "build-targets", "train-student", "report"}
    assert workspace.stale(*AMALGAM, "labels=labels.csv") == stale
    workspace("build-targets", *AMALGAM, "labels=labels.csv")
    assert workspace.stale(*AMALGAM, "labels=labels.csv") == {"train-student", "report"}
    write(workspace, workspace.texts()[6::-1][1:])  # the same labels in another order
    assert workspace.stale(*AMALGAM, "labels=labels.csv") == {"train-student", "report"}
    write(workspace, workspace.texts()[:7])
    assert workspace.stale(*AMALGAM, "labels=labels.csv") == stale


def test_the_weights_of_a_labelled_text_are_those_of_teachers_that_know_the_label(workspace: Workspace) -> None:
    rows = workspace.texts()[:6]
    write(workspace, rows)
    workspace("build-targets", *AMALGAM, "labels=labels.csv")
    manifest = workspace.manifest("weigh-teachers")
    assert manifest["facts"]["labelled"]["texts"] == 6
    import pyarrow.parquet as pq

    table = pq.read_table(workspace.artifacts / manifest["files"][0]["path"]).to_pylist()
    weights = {row["key"]: row["weight"] for row in table}
    for text, label in rows:
        assert weights[text_key([text])] == [float(label in own) for own in TEACHER_LABELS.values()]


def test_labels_of_the_corpus_give_the_result_of_the_same_labels_in_a_file(workspace: Workspace) -> None:
    rows = workspace.texts()
    workspace.write([(text, label if place < 5 else "") for place, (text, label) in enumerate(rows)])
    assert "`labels: corpus` uses them" in workspace("build-targets").err + workspace("plan").err
    workspace("build-targets", "labels=corpus")
    write(workspace, rows[:5])
    assert "build-targets" not in workspace.stale("labels=labels.csv")


def test_fewer_texts_than_files_of_the_corpus_can_be_written(fresh: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amalgam.data.corpus.bits_for", lambda _: 4)
    fresh("label", "--count", "2", *AMALGAM)
    texts = {text for text, _ in fresh.texts()}
    assert len({row["text"] for row in read_csv(fresh.folder / "labels.csv")} & texts) == 2


def test_columns_of_the_corpus_keep_their_names(fresh: Workspace) -> None:
    rows = fresh.texts()
    for part, texts in (("train", rows), ("test", fresh.texts("test"))):
        lines = [(str(number), text, label) for number, (text, label) in enumerate(texts)]
        write_csv(fresh.folder / f"texts/{part}.csv", ("key", "why", "label"), lines)
    own = ("corpus.text=[why]", "corpus.id=key", *AMALGAM)
    fresh("label", "--count", "30", *own)
    table = read_csv(fresh.folder / "labels.csv")
    assert {row["why_"] for row in table} == {"random"}
    assert all(rows[int(row["key"])][0] == row["why"] for row in table)
    assert all(row["key_"] == text_key([row["why"]]).hex() for row in table)
    filled = [{**row, "label": rows[int(row["key"])][1]}.values() for row in table]
    write_csv(fresh.folder / "labels.csv", table[0], filled)
    assert "30 labels" in fresh("label", "labels.csv", *own).out


def test_a_corpus_whose_texts_all_have_a_label_has_none_to_label(workspace: Workspace) -> None:
    write(workspace, workspace.texts())
    refused = workspace.attempt("label", "labels=labels.csv", *AMALGAM, "--out", "more.csv")
    assert "every training text has a label" in refused.err
    assert refused.code == 2


@pytest.mark.parametrize("key", ["abcd", "no number", "00" * 17])
def test_a_key_of_no_text_is_named(workspace: Workspace, key: str) -> None:
    write(workspace, [(key, "law")], ("key", "label"))
    assert f"row 2: no training text has the key {key}" in workspace.attempt("plan", "labels=labels.csv").err


def test_ids_identify_texts(fresh: Workspace) -> None:
    rows = [(text, label, str(number)) for number, (text, label) in enumerate(fresh.texts())]
    write_csv(fresh.folder / "texts/train.csv", ("text", "label", "number"), rows)
    test = [(text, label, str(number)) for number, (text, label) in enumerate(fresh.texts("test"))]
    write_csv(fresh.folder / "texts/test.csv", ("text", "label", "number"), test)
    write(fresh, [("3", rows[3][1]), ("500", "law")], ("number", "label"))
    refused = fresh.attempt("plan", "corpus.id=number", "labels=labels.csv")
    assert "row 3: no training text has the id 500" in refused.err
    assert "labels.csv: 1 problem\n" in refused.err
    write(fresh, [("3", rows[3][1])], ("number", "label"))
    fresh("build-targets", "corpus.id=number", "labels=labels.csv")
    assert fresh.targets()[text_key([rows[3][0]])][1] == 1.0
    written = fresh("label", "--count", "4", "--out", "more.csv", "corpus.id=number")
    assert "4 random texts to label" in written.out
    for row in read_csv(fresh.folder / "more.csv"):
        assert rows[int(row["number"])][0] == row["text"]


def test_keys_identify_texts_that_an_editor_changed(workspace: Workspace) -> None:
    text, label = workspace.texts()[3]
    write(workspace, [(text_key([text]).hex(), "edited by a spreadsheet", label)], ("key", "text", "label"))
    workspace("build-targets", "labels=labels.csv")
    assert workspace.targets()[text_key([text])][1] == 1.0


@pytest.mark.parametrize("command", ["plan", "doctor", "build-targets"])
def test_all_faults_of_a_file_are_in_one_message(workspace: Workspace, command: str) -> None:
    (first, label), (second, _) = workspace.texts()[:2]
    other = next(name for name in LABELS if name != label)
    write(workspace, [(first, label), (second, "bankng"), ("no such text", label), (first, other)])
    result = workspace.attempt(command, "labels=labels.csv")
    assert result.code != 0
    shown = result.out + result.err
    assert "labels.csv: 3 problems" in shown
    assert "row 3: no teacher has the label bankng; did you mean banking?" in shown
    assert "row 4: no training text is no such text" in shown
    assert f"has two labels: {other} here, {label} in row 2" in shown


def test_a_shared_label_is_named_once_and_other_rows_are_counted(fresh: Workspace) -> None:
    write(fresh, [("no such text", "zzz")] * 25)
    result = fresh.attempt("plan", "labels=labels.csv", "teachers.1.rename={law: banking}")
    assert "row 2: no teacher has the label zzz; the labels are banking, computing, cooking, " in result.err
    assert "cooking, football, gardening, medicine, music\n" in result.err
    assert "  row 3: no teacher has the label zzz\n" in result.err
    assert "labels.csv: 50 problems" in result.err
    assert "  and 45 more" in result.err


def test_faults_are_found_before_any_stage_has_run(fresh: Workspace) -> None:
    write(fresh, [("no such text", "banking")])
    assert "row 2: no training text is no such text" in fresh.refusal(3, "plan", "labels=labels.csv")
    assert "row 2: no training text is no such text" in fresh.attempt("run", "labels=labels.csv").err
    assert not list(fresh.artifacts.glob("cache-teachers/*/units/*"))


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        (("text", "label"), [("a text", "")], "no row of labels.csv has a label"),
        (("text", "label"), [], "no row of labels.csv has a label"),
        (("text", "lable"), [("a text", "law")], "rename a column to label: lable"),
        (("body", "label"), [("a text", "law")], "rename a column to text"),
    ],
)
def test_a_file_without_labels_or_columns_is_refused(
    workspace: Workspace, header: Sequence[str], rows: Sequence[Sequence[str]], message: str
) -> None:
    write(workspace, rows, header)
    assert message in workspace.refusal(3, "plan", "labels=labels.csv")


def test_errors_name_the_label_column_of_the_corpus(fresh: Workspace) -> None:
    for part in ("train", "test"):
        file = fresh.folder / f"texts/{part}.csv"
        file.write_text(file.read_text().replace("text,label", "text,topic {en}", 1))
    fresh.edit("label: label", "label: topic {en}")
    for header, message in {
        ("text", "topic {en}", "label"): "fix: write a label into the column topic {en} of some rows",
        ("text", "Topic {en}"): 'fix: rename a column to topic {en}: "Topic {en}"',
    }.items():
        write(fresh, [("a text", "", "law")[: len(header)]], header)
        assert message in fresh.refusal(3, "plan", "labels=labels.csv")


# ---- estimates of accuracies


LABELLED = ("labels=labels.csv", "corpus.test=null", *AMALGAM)


def estimates(workspace: Workspace) -> dict[str, Any]:
    numbers = workspace.numbers()
    return numbers["label_estimates"]


@pytest.fixture
def estimating(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Return a workspace in which 10 of 120 texts are enough for an estimate."""
    monkeypatch.setattr(load_labels, "LEAST_ESTIMATION", 10)
    return workspace


def test_random_labels_estimate_the_accuracy_of_the_student_and_its_rivals(estimating: Workspace) -> None:
    estimating("label", "--count", "14", *AMALGAM)
    fill(estimating.folder / "labels.csv", dict(estimating.texts()), 12)
    result = estimating("run", *LABELLED)
    assert "12 labelled training texts, picked at random; 2 more have no label" in result.out
    numbers = estimating.numbers()
    assert numbers["summary"][0].startswith(
        "On 12 labelled training texts, which it did not learn, the student has about "
    )
    block = estimates(estimating)
    assert (block["n"], block["labels"], block["empty"], block["random"]) == (12, 12, 2, True)
    systems = {(system["kind"], system["name"]): system for system in block["systems"]}
    assert {kind for kind, _ in systems} == {"student", "targets", "ensemble", "teacher", "teacher on its own labels"}
    for system in systems.values():
        assert system["low"] <= system["mean"] <= system["high"]
    own = [systems["teacher on its own labels", teacher]["n"] for teacher in TEACHER_LABELS]
    assert sum(own) == 12
    page = (estimating.folder / "reports/student.html").read_text()
    assert "Accuracy by a few labels" in page
    again = estimating("report", *LABELLED)
    assert "report: reused" in again.err


def learned(workspace: Workspace) -> int:
    """Return the number of texts that the student was trained on."""
    manifest = workspace.manifest("train-student")
    return int(manifest["facts"]["texts"])


def test_the_student_does_not_learn_the_texts_that_estimate_its_accuracy(estimating: Workspace) -> None:
    for labelled, number in ((12, 108), (9, 120), (40, 108)):  # 9 are too few for an estimate, 40 more than a tenth
        write(estimating, estimating.texts()[:labelled])
        estimating("train-student", "student.held_out=0", *LABELLED)
        assert learned(estimating) == number
    estimating("train-student", "student.held_out=0", "labels=null", *AMALGAM)
    assert learned(estimating) == 120
    write(estimating, estimating.texts())
    estimating("train-student", "student.held_out=0.1", *LABELLED)
    held_out = held_out_keys(np.array([text_key((text,)) for text, _ in estimating.texts()], "S16"), 0.1).sum()
    assert learned(estimating) == 108 - held_out < 104


# ---- texts of no label

NO_LABEL = "corpus.unknown=none"


def test_unknown_texts_have_weight_0_and_are_not_learned(estimating: Workspace) -> None:
    rows = estimating.texts()
    write(estimating, [*rows[:12], *((text, " none ") for text, _ in rows[12:20])])
    estimating("build-targets", NO_LABEL, *LABELLED)
    weights = {key: weight for key, (_, weight) in estimating.targets().items()}
    assert all(weights[text_key([text])] == 0.0 for text, _ in rows[12:20])
    assert all(weights[text_key([text])] == 1.0 for text, _ in rows[:12])
    files = estimating.manifest("build-targets")["files"]
    margins = [pl.read_parquet(estimating.artifacts / file["path"], columns=["margin"]) for file in files]
    assert (pl.concat(margins)["margin"] > 0).all()  # it stays that of the teachers
    estimating("train-student", "student.held_out=0", NO_LABEL, *LABELLED)
    assert learned(estimating) == 100  # 12 estimate, 8 are unknown
    write(estimating, [*rows[:12], *((text, "none") for text, _ in rows[12:21])])
    assert {"build-targets", "train-student"} <= estimating.stale("student.held_out=0", NO_LABEL, *LABELLED)


def test_random_unknown_texts_estimate_their_share(estimating: Workspace) -> None:
    written = estimating("label", "--count", "20", NO_LABEL, *AMALGAM).out
    assert "music, or none where no label fits" in " ".join(written.split())
    path = estimating.folder / "labels.csv"
    truth = dict(estimating.texts())
    fill(path, {text: "none" if len(text) % 4 == 0 else label for text, label in truth.items()}, 18)
    unknown = sum(row["label"] == "none" for row in read_csv(path))
    assert 0 < unknown < 8
    low, high = interval(unknown / 18, 18)
    share = f"{unknown} of 18 texts {'fits' if unknown == 1 else 'fit'} no label: {100 * unknown / 18:.1f} % "
    printed = f"{share}({100 * low:.1f} to {100 * high:.1f})"
    effect = estimating("label", "labels.csv", NO_LABEL, *AMALGAM)
    assert f"{18 - unknown} labels, 2 rows without one" in effect.out
    assert "share of labels" not in effect.out
    assert printed in effect.out
    assert f"accuracy on {18 - unknown} labelled texts, picked at random" in effect.out
    assert printed in estimating("run", NO_LABEL, *LABELLED).out
    assert estimating.numbers()["unknown_share"] == {"n": 18, "unknown": unknown, "low": low, "high": high}
    page = (estimating.folder / "reports/student.html").read_text().replace("\u00a0", " ")
    assert share in page.replace("&nbsp;", " ")
    estimating("label", "--count", "5", "labels=labels.csv", NO_LABEL, *AMALGAM, "--out", "more.csv")
    assert sum(row["label"] == "none" for row in read_csv(estimating.folder / "more.csv")) == unknown


def test_unknown_texts_of_the_corpus_are_those_of_a_file(workspace: Workspace) -> None:
    rows = [*workspace.texts()[:5], *((text, "none") for text, _ in workspace.texts()[5:8])]
    workspace.write([*rows, *((text, "") for text, _ in workspace.texts()[8:])])
    workspace("build-targets", "labels=corpus", NO_LABEL)
    write(workspace, rows)
    assert "build-targets" not in workspace.stale("labels=labels.csv", NO_LABEL)


def test_a_label_that_may_mark_unknown_texts_has_a_fix(workspace: Workspace) -> None:
    rows = workspace.texts()
    write(workspace, [rows[0], (rows[1][0], "none"), (rows[2][0], "none")])
    err = workspace.refusal(3, "plan", "labels=labels.csv")
    assert "fix: if none marks texts of no label, set corpus.unknown: none; else correct or remove " in err
    write(workspace, [rows[0], (rows[1][0], "none"), (rows[2][0], "other")])
    assert "corpus.unknown" not in workspace.attempt("plan", "labels=labels.csv").err


def test_labels_of_unknown_origin_estimate_under_a_condition(estimating: Workspace) -> None:
    write(estimating, estimating.texts()[:12])
    result = estimating("run", *LABELLED)
    assert "a random sample only if you picked them at random" in result.out
    assert "This holds if they are a random sample" in (estimating.folder / "reports/student.html").read_text()
    assert estimates(estimating)["random"] is False


def test_labels_of_hard_texts_estimate_nothing(estimating: Workspace) -> None:
    picked = ["random"] * 3 + ["small margin"] * 9
    rows = [(*row, why) for row, why in zip(estimating.texts()[:12], picked, strict=True)]
    write(estimating, rows, ("text", "label", "why"))
    needs = "the labels estimate no accuracy: an estimate needs at least 10 random labelled texts of 100 training texts"
    assert needs in estimating("run", *LABELLED).err
    assert estimates(estimating) is None
    effect = estimating("label", "labels.csv", *AMALGAM)
    assert "accuracy on 3 labelled texts, picked at random" in effect.out
    write(estimating, rows[3:], ("text", "label", "why"))
    effect = estimating("label", "labels.csv", NO_LABEL, *AMALGAM)
    assert "picked" not in effect.out
    assert "no label" not in effect.out


def test_a_method_without_a_choice_of_teachers_has_estimates_too(estimating: Workspace) -> None:
    write(estimating, estimating.texts()[:12])
    for method, kinds in {"muka-soft": {"targets"}, "uhc": set[str]()}.items():
        mode = {"muka-soft": "soft"}.get(method, method)
        estimating("run", "labels=labels.csv", "corpus.test=null", f"student.method={method}", f"targets.mode={mode}")
        systems = estimates(estimating)["systems"]
        assert {"student", "ensemble"} | kinds == {row["kind"] for row in systems if "teacher" not in row["kind"]}
        assert "chose the weights" not in (estimating.folder / "reports/student.html").read_text()


def test_a_correction_for_fitted_weights_lowers_the_student_and_widens_its_interval() -> None:
    right = np.arange(50) < 40
    fitted = np.arange(50) < 45
    texts = RightTexts({}, {}, None, fitted, right, student=fitted)
    student, targets = texts.systems()
    assert student["mean"] == targets["mean"] == 0.8
    moved = RightTexts({}, {}, None, fitted, right, student=(np.arange(50) < 40) | (np.arange(50) >= 45))
    corrected_student, _ = moved.systems()
    assert corrected_student["mean"] == pytest.approx(0.8)
    assert corrected_student["high"] - corrected_student["low"] > student["high"] - student["low"]
    plain = RightTexts({}, {}, None, None, None, student=right)
    assert [(row["mean"], row["low"], row["high"]) for row in plain.systems()] == [(0.8, *interval(0.8, 50))]


# ---- the texts to label


def fill(path: Path, labels: dict[str, str], rows: int | None = None) -> None:
    """Write the true labels into the first rows, or all, of a file of `amalgam label`."""
    table = read_csv(path)
    for row in table[:rows]:
        row["label"] = labels[row["text"]]
    write_csv(path, table[0], [row.values() for row in table])


def test_texts_to_label_are_written_filled_and_compared(workspace: Workspace) -> None:
    written = workspace("label", "--count", "20", *AMALGAM)
    path = workspace.folder / "labels.csv"
    assert "20 random texts to label" in written.out
    rows = read_csv(path)
    assert len({row["key"] for row in rows}) == 20
    assert {row["label"] for row in rows} == {""}
    assert {row["hint_1"] for row in rows} | {row["hint_2"] for row in rows} <= set(LABELS)
    assert any(row["hint_1"] in TEACHER_LABELS["second"] for row in rows)  # the order of the teachers is random
    assert workspace.attempt("label", *AMALGAM).code == 2  # a file is never replaced
    fill(path, dict(workspace.texts()), 19)
    effect = workspace("label", "labels.csv", *AMALGAM)
    assert "19 labels, 1 row without one" in effect.out
    assert "accuracy on 19 labelled texts, picked at random" in effect.out
    assert {"targets without labels", "targets with labels", "ensemble"} <= {
        line.split("  ")[0] for line in effect.out.splitlines()
    }
    assert "of 120 training texts have another target, " in effect.out
    assert "another teacher" in effect.out
    assert "share with labels  share of labels  95 % interval" in effect.out
    assert "amalgam run labels=./labels.csv" in effect.out
    assert "amalgam run labels=./labels.csv student.method=amalgam" in effect.out
    fields = "`labels: ./labels.csv`, `student.method=amalgam`, `targets.mode=hard`"
    assert f"or set {fields} in the experiment file" in effect.out
    numbers = workspace("label", "labels.csv", "--json", *AMALGAM).json
    assert (numbers["labels"], sum(share for share, *_ in numbers["by_labels"].values())) == (19, pytest.approx(1))


def test_texts_to_label_are_announced_as_json_and_a_filled_file_has_no_output(fresh: Workspace) -> None:
    written = fresh("label", "--count", "5", "--json", "--out", "some.csv", *AMALGAM).json
    command = shlex.join(["amalgam", "label", "some.csv", *AMALGAM])
    assert written == {"file": "some.csv", "texts": 5, "earlier": 0, "labels": LABELS, "next": command}
    assert "fewer than" not in fresh("label", "--count", "120", "--out", "all.csv", *AMALGAM).err
    more = fresh("label", "--count", "5000", "--out", "more.csv", *AMALGAM)
    assert "120 random texts to label" in more.out
    assert "note: these are all training texts without a label, fewer than 5,000; test texts are left out" in more.err
    assert "--out" in fresh.refusal(2, "label", "some.csv", "--out", "more.csv", *AMALGAM)


def test_without_labels_the_accuracy_of_the_targets_is_estimated(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "estimated accuracy" not in workspace("build-targets", *AMALGAM).err  # the evidence does not agree
    monkeypatch.setattr(weigh, "AGREEING", -1.0)
    result = workspace("weigh-teachers", "--force", *AMALGAM)
    assert "estimated accuracy of the targets: " in result.err
    workspace("label", "--count", "20", *AMALGAM)
    fill(workspace.folder / "labels.csv", dict(workspace.texts()))
    labelled = workspace("build-targets", *AMALGAM, "labels=labels.csv")
    assert "20 labels" in labelled.err
    assert "estimated accuracy" not in labelled.err
    assert "estimated accuracy" not in workspace("build-targets").err


def test_without_labels_the_report_estimates_the_accuracy_of_every_system(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weigh, "AGREEING", -1.0)  # else the weights are MUKA's
    workspace("weigh-teachers", "--force", *AMALGAM)
    changed = (*AMALGAM, "student.held_out=0.4", "student.seed=3")
    printed = workspace("report", "corpus.test=null", *changed).out
    assert "accuracy estimated without labels, from the teachers' weights" in printed
    assert "MUKA's targets" in printed
    assert printed in workspace("report", "student").out
    numbers = workspace.numbers()
    assert "Estimated accuracy" in (workspace.folder / "reports/student.html").read_text()
    rows = {row["kind"]: row for row in numbers["unlabelled"]["estimates"]["systems"]}
    assert list(rows) == ["student", "targets", "ensemble", "muka"]
    held_out, texts = numbers["unlabelled"]["held_out"], numbers["unlabelled"]["n"]
    assert [row["n"] for row in rows.values()] == [held_out, texts, texts, texts]
    assert held_out < texts
    assert all(row["mean"] <= rows["targets"]["mean"] for row in (rows["ensemble"], rows["muka"]))
    assert numbers["unlabelled"]["estimates"]["gap"]["n"] == held_out
    assert any("estimated" in reason for reason in numbers["verdict"]["reasons"])
    student_right = numbers["unlabelled"]["agreement"]["right"]
    assert numbers["linear_map"].items() >= {"n": held_out, "student_right": student_right}.items()
    workspace("report", *changed)
    assert workspace.numbers()["linear_map"] == numbers["linear_map"]

    write(workspace, workspace.texts()[:20])  # labels choose the weights
    workspace("report", "corpus.test=null", "labels=labels.csv", *changed)
    numbers = workspace.numbers()
    assert numbers["unlabelled"]["estimates"] is None


def test_a_method_that_weighs_no_teachers_has_texts_to_label_too(workspace: Workspace) -> None:
    workspace("label", "--count", "5", "student.method=vanilla-kd", "targets.mode=vanilla-kd")
    fill(workspace.folder / "labels.csv", dict(workspace.texts()))
    effect = workspace("label", "labels.csv", "student.method=vanilla-kd", "targets.mode=vanilla-kd")
    assert "5 labels" in effect.out
    assert "share with labels" not in effect.out


@pytest.mark.parametrize(("method", "mode"), [("uhc", "uhc"), ("muka-soft", "soft"), ("vanilla-kd", "vanilla-kd")])
def test_other_methods_have_the_gold_label_as_target(workspace: Workspace, method: str, mode: str) -> None:
    text, label = workspace.texts()[0]
    write(workspace, [(text, label)])
    workspace("build-targets", f"student.method={method}", f"targets.mode={mode}", "labels=labels.csv")
    target, weight = workspace.targets()[text_key([text])]
    own = next(labels for labels in TEACHER_LABELS.values() if label in labels)
    assert target[LABELS.index(own[0]) : LABELS.index(own[-1]) + 1] == [float(name == label) for name in own]
    assert weight == 1.0
    others = len(TEACHER_LABELS) - 1 if method == "uhc" else 0  # each keeps its distribution
    assert sum(target) == pytest.approx(1 + others)


def test_a_method_that_does_not_use_labels_is_named(workspace: Workspace) -> None:
    write(workspace, workspace.texts()[:2])
    assert "does not use `labels: labels.csv`" in workspace("plan", "targets.mode=scores", "labels=labels.csv").err


def test_labels_from_python(workspace: Workspace) -> None:
    experiment = Experiment.load(workspace.config, {"student.method": "amalgam", "targets.mode": "hard"}, quiet=True)
    frame = experiment.label(count=10)
    assert frame.columns[:3] == ["key", "text", "label"]
    truth = dict(workspace.texts())
    path = workspace.folder / "from_python.csv"
    frame.with_columns(label=frame["text"].replace_strict(truth)).write_csv(path)
    last = workspace.head("build-targets")
    effect = experiment.compare_labels(path)
    assert workspace.head("build-targets") == last
    assert effect.labels == 10
    assert effect.estimates is not None
    assert (effect.estimates.texts, effect.estimates.random) == (10, True)


@pytest.mark.parametrize("kind", ["polars", "pandas", "arrow", "binary keys"])
def test_python_takes_a_frame_of_labels(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(workspace.folder)
    arguments = ["./models/first", "./models/second"], "texts/train.csv"
    student = {"encoder": "./models/encoder"}
    experiment = Experiment(*arguments, student=student, quiet=True)
    frame = experiment.label(count=np.int64(10))  # type: ignore[arg-type]
    filled = frame.with_columns(label=frame["text"].replace_strict(dict(workspace.texts())))
    binary = filled.with_columns(key=filled["key"].str.decode("hex"))  # as of experiment.texts()
    notes = filled.to_pandas().assign(note=[1, "unsure"] * 5)
    kinds = {"polars": filled, "pandas": notes, "arrow": filled.to_arrow(), "binary keys": binary}
    labels: Any = kinds[kind]
    effect = experiment.compare_labels(labels)
    assert effect.labels == 10
    assert effect.estimates is not None
    assert effect.estimates.random
    again = Experiment(*arguments, labels=labels, student=student, quiet=True)
    assert str(again.config.labels).startswith("./artifacts/given/")
    assert again.plan()[0].state == "current"


def test_labels_of_another_type_are_refused(workspace: Workspace) -> None:
    experiment = Experiment.load(workspace.config, quiet=True)
    with pytest.raises(AmalgamError, match="labels is a list, not a frame"):
        experiment.compare_labels([("a text", "banking")])
    with pytest.raises(AmalgamError, match="has a label"):
        experiment.compare_labels(experiment.label(count=5))


FRAMES: list[tuple[Any, str, str, str]] = [
    ({"text": "a", "label": ["law"]}, "one text as column text", "labels: dict", "put the texts into a list"),
    ({"text": ["a"], "label": []}, "cannot be read as a table", "labels: dict", "all columns the same length"),
    (SimpleNamespace(columns=[]), "an unknown type", "labels: types.SimpleNamespace", "or the path of a file"),
    ({"text": ["a"]}, "no column label in the frame of labels", "the frame of labels has the columns: text", "label"),
    ({"text": ["a"], "label": ["la"]}, "the frame of labels: 2 problems", "labels", "`experiment.label(50)` returns"),
    ({"text": ["a"], "label": [""]}, "no row of the frame of labels has a label", "labels", "into the column label"),
]


@pytest.mark.parametrize(("frame", "what", "where", "fix"), FRAMES, ids=[row[1] for row in FRAMES])
def test_errors_of_a_frame_name_the_argument(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, frame: Any, what: str, where: str, fix: str
) -> None:
    monkeypatch.chdir(workspace.folder)
    with pytest.raises(AmalgamError, match=re.escape(what)) as refused:
        Experiment.load(quiet=True).compare_labels(frame)
    assert refused.value.where == where
    assert fix in str(refused.value.fix)
    arguments = ["./models/first", "./models/second"], "texts/train.csv"
    with pytest.raises(AmalgamError, match=re.escape(what)):
        Experiment(*arguments, labels=frame, student={"encoder": "./models/encoder"}, quiet=True).run("build-targets")
