"""The proposed command of a verdict is about the student of the report; test texts that are learned or selected."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from amalgam.stages.common.deliveries import METADATA
from amalgam.stages.report.conditions import VerdictInputs
from amalgam.stages.report.verdict import verdict
from amalgam.tests.stages.verdict_cases import changed, labelled_inputs, made, unlabelled, unlabelled_inputs
from amalgam.tests.workspaces import TEST, TRAIN, Workspace, amalgam, read_csv, write_csv


def next_of(workspace: Workspace, name: str) -> dict[str, Any]:
    return workspace.numbers(name)["verdict"]["next"]


def test_weak_teachers_are_the_next_cause_after_the_training() -> None:
    causes = verdict(made(1000, [0.6, 0, 0, 0], 0.25, 0.25, labels=4, own=(0.4, 0.3), steps=54))["causes"]
    assert [cause["code"] for cause in causes][:3] == ["few-steps", "teachers-weak", "teacher-loses"]


@pytest.mark.parametrize(
    ("steps", "command"),
    [
        (900, "amalgam run train_teachers.epochs=auto student.name=longer"),
        (54, "amalgam run student.epochs=auto train_teachers.epochs=auto student.name=longer"),
    ],
)
def test_weak_teachers_that_trained_few_steps_train_longer(steps: int, command: str) -> None:
    inputs = made(1000, [0.6, 0, 0, 0], 0.25, 0.25, labels=4, own=(0.4, 0.3), steps=steps)
    trained = verdict(replace(inputs, teacher_steps=12))
    assert "a teacher was trained for only 12 steps" in [cause["text"] for cause in trained["causes"]]
    assert trained["next"] == {
        "text": "Train the teachers long enough. Call experiment.write() first.",
        "command": command,
    }
    for longer in (verdict(replace(inputs, teacher_steps=300)), verdict(inputs)):
        assert "train_teachers" not in longer["next"]["command"]


def test_the_steps_of_trained_teachers_are_those_of_the_experiment(workspace: Workspace) -> None:
    workspace.train_teachers()
    workspace("run")
    result = workspace.numbers()["verdict"]
    assert "teachers-few-steps" in {cause["code"] for cause in result["causes"]}
    assert "train_teachers.epochs=auto" in result["next"]["command"]
    assert "train-teachers" in workspace.stale(*shlex.split(result["next"]["command"])[2:])


def test_the_report_of_one_student_is_printed_by_its_name(workspace: Workspace) -> None:
    made, stored = workspace("report"), workspace("report", "student")
    assert (stored.out, stored.err) == (made.out, "report: reports/student.html\n")
    assert "verdict: " in stored.out
    assert workspace("report", "student", "--json").json == workspace("report", "--json").json
    assert workspace.attempt("report", "student", "--fail-under", "1").code == 4


@pytest.mark.parametrize("path", ["reports/student.html", "./reports/student.json", "students/student/"])
def test_a_report_is_printed_by_the_path_of_its_page_or_of_its_student(built: Workspace, path: str) -> None:
    assert built("report", path).out == built("report", "student").out


def test_texts_to_label_are_for_the_student_of_this_name(workspace: Workspace) -> None:
    workspace.edit("  label: label\n", "")
    gold, metadata = dict(workspace.texts()), workspace.folder / "students/student" / METADATA
    before = metadata.read_bytes()
    overrides = ["student.name=two", "student.epochs=20", "student.learning_rate=1e-2"]
    workspace("run", "corpus.test=null", "corpus.label=label", *overrides)
    command = next_of(workspace, "two")["command"]
    path = workspace.folder / "reports/two.to-label.csv"
    rows = [{**row, "label": gold[row["text"]]} for row in read_csv(path)]
    write_csv(path, rows[0], [row.values() for row in rows])
    assert "train-student: reused" in workspace(*shlex.split(command)[1:]).err
    assert workspace.numbers("two")["evaluation"]["n"] == TRAIN
    assert metadata.read_bytes() == before


def test_labelled_texts_are_not_among_those_to_label_and_their_file_is_not_the_one_to_fill(
    workspace: Workspace,
) -> None:
    gold, path = dict(workspace.texts()), workspace.folder / "reports/student.to-label.csv"
    settings = ["corpus.test=null", "student.method=amalgam", "student.epochs=20", "student.learning_rate=1e-2"]
    workspace("run", *settings)
    rows = read_csv(path)
    labelled = [{**row, "label": gold[row["text"]]} for row in rows[:50]]
    write_csv(path, rows[0], [row.values() for row in labelled])
    workspace("run", *settings, f"labels=./reports/{path.name}")
    step = next_of(workspace, "student")
    assert "command" not in step
    assert "Rename reports/student.to-label.csv" in step["text"]
    path.rename(workspace.folder / "labels.csv")
    workspace("run", *settings, "labels=labels.csv")
    others = [row["key"] for row in read_csv(path)]
    assert sorted([*others, *(row["key"] for row in labelled)]) == sorted(row["key"] for row in rows)
    assert path.name in next_of(workspace, "student")["command"]

    hard, text = {row["key"]: row["label"] for row in labelled[:20]}, (workspace.folder / "labels.csv").read_text()
    (workspace.folder / "labels.csv").write_text(text.replace(",random\n", ",student and ensemble differ\n", 20))
    for override in ("report.calibration_bins=9", "report.calibration_bins=8"):
        assert "was kept" not in workspace("run", *settings, "labels=labels.csv", override).err
        content = {row["key"]: row["label"] for row in read_csv(path)}
        assert content == dict.fromkeys(others, "") | hard


def test_test_texts_to_add_are_for_the_student_of_this_name(workspace: Workspace) -> None:
    overrides = ["corpus.test=texts/few.csv", "student.name=two", "student.epochs=80"]
    few = workspace.texts("test")[:30]
    workspace.write(few, "few")
    workspace("run", *overrides)
    predicted = workspace("predict", "--student", "students/two", "--input", "texts/few.csv")
    labels = [row["label"] for row in predicted.rows]
    workspace.write([(text, label) for (text, _), label in zip(few, labels, strict=True)], "few")  # no rival is better
    workspace("report", *overrides)
    text = next_of(workspace, "two")["text"]
    command = re.search("`(amalgam report .*)`", text)
    assert command, text
    workspace.write(workspace.texts("test"), "few")
    workspace(*shlex.split(command[1])[1:])
    assert workspace.numbers("two")["evaluation"]["n"] == TEST


def test_a_proposed_student_replaces_no_folder(workspace: Workspace) -> None:
    students = workspace.folder / "students"
    workspace("report")
    assert "student.name=longer" in shlex.split(next_of(workspace, "student")["command"])
    (students / "longer").mkdir()
    workspace("report")
    assert "student.name=longer-2" in shlex.split(next_of(workspace, "student")["command"])


def test_from_another_folder_the_console_names_the_folder_of_command_and_page(workspace: Workspace) -> None:
    file = str(workspace.config.relative_to(workspace.folder.parent))
    elsewhere = amalgam("report", "-c", file, folder=workspace.folder.parent)
    here = workspace("report")
    name = workspace.folder.name
    assert [line for line in elsewhere.out.splitlines() if line.startswith(f"  next (in {name}): ")]
    assert f"report (in {name}): reports/student.html" in elsewhere.err.splitlines()
    assert [line for line in here.out.splitlines() if line.startswith("  next: ")]
    assert "report: reports/student.html" in here.err.splitlines()


def test_test_texts_whose_labels_are_learned_do_not_suffice(workspace: Workspace) -> None:
    rows = workspace.texts()[:60]
    workspace.write(rows, "labelled")
    workspace.write(rows[:20], "given")
    ran = workspace("run", "corpus.test=texts/labelled.csv", "labels=texts/given.csv")
    caution = "20 of 60 test texts were learned with their gold labels: accuracies are up to 33.3 points too high."
    assert f"  caution: {caution}" in ran.out.splitlines()
    assert "all 60 test texts are also in corpus.train" in ran.err
    verdict = workspace.numbers()["verdict"]
    assert caution in verdict["cautions"]
    ran = workspace("run", "corpus.test=texts/labelled.csv")
    assert "  caution: 60 of 60 test texts are also training texts, so the accuracy" in ran.out


def test_test_texts_that_select_the_checkpoint_do_not_suffice(workspace: Workspace) -> None:
    ran = workspace("run", "corpus.validation=texts/test.csv", "student.epochs=auto")
    assert "40 of 40 test texts are also in corpus.validation, which selects the checkpoint" in ran.err
    caution = "40 of 40 test texts are also validation texts, which selected the checkpoint"
    assert f"  caution: {caution}" in ran.out
    unused = workspace("run", "corpus.validation=texts/test.csv", "student.select=held-out")
    assert caution not in unused.out


def test_the_file_of_texts_to_label_has_the_columns_of_the_corpus(workspace: Workspace) -> None:
    quoted = (json.dumps(text) for text, _ in workspace.texts())
    (workspace.folder / "texts/train.csv").write_text("\n".join(["text", *quoted]))
    path, texts = workspace.folder / "reports/student.to-label.csv", ("run", "corpus.test=null", "--quiet")
    workspace(*texts, "corpus.label=null")
    assert path.read_text().startswith("key,text,label,")
    workspace(*texts, "corpus.label=topic")
    assert path.read_text().startswith("key,text,topic,")
    path.write_text(path.read_text().replace(",,", ",computing,", 1))
    workspace(*texts, "corpus.label=label")
    assert path.read_text().startswith("key,text,topic,"), "a file with labels is kept"


def write_reasons(workspace: Workspace, whys: Sequence[str], **others: str) -> None:
    """Give the first texts to label these reasons, in a file of any name; `others` replace values in all rows."""
    gold, target = dict(workspace.texts()), workspace.folder / "texts/labelled.csv"
    if not target.exists():
        workspace("report", "corpus.test=null")
    rows = read_csv(workspace.folder / "reports/student.to-label.csv")
    named = [{**row, "label": gold[row["text"]], "why": why, **others} for row, why in zip(rows, whys, strict=False)]
    write_csv(target, named[0], [row.values() for row in named])


def test_of_selected_test_texts_only_random_ones_count_but_for_the_ensemble(workspace: Workspace) -> None:
    whys = ["random"] * 20 + ["student and ensemble differ"] * 12 + ["small margin"] * 5
    write_reasons(workspace, whys)
    result = workspace("run", "corpus.test=texts/labelled.csv")
    numbers = workspace.numbers()
    assert numbers["evaluation"]["n"] == 20
    assert numbers["evaluation"]["selected"] == {"texts": 17, "random": 20, "unused": 5}
    folder = workspace.artifacts / "report" / workspace.head("report")
    assert json.loads((folder / "report.json").read_text())["made"]["student"]["texts"] == 37  # all take time
    assert sum(row["n"] for row in numbers["student_quality"]["classes"]) == 20
    rivals = {rival["kind"]: rival["n"] for rival in numbers["verdict"]["rivals"]}
    assert (rivals["ensemble"], rivals["zero-shot"], rivals["most frequent label"]) == (32, 20, 20)
    caution = "17 of 37 test texts were selected (column `why`)"
    assert f"  caution: {caution}" in result.out
    assert "20 random labelled test texts" in result.out
    text = (workspace.folder / "reports/student.html").read_text("utf-8")
    assert "17 of 37 test texts were selected" in text
    assert "20 random labelled test texts" in text

    write_reasons(workspace, whys, student="a label of another student")
    workspace("run", "corpus.test=texts/labelled.csv")
    numbers = workspace.numbers()
    assert numbers["evaluation"]["selected"]["unused"] == 17
    assert not any("selected" in rival or rival["n"] > 20 for rival in numbers["verdict"]["rivals"])
    assert f"{caution} for another student" in numbers["verdict"]["cautions"][0]

    write_reasons(workspace, whys[20:])
    workspace("run", "corpus.test=texts/labelled.csv")
    numbers = workspace.numbers()
    assert {rival["kind"] for rival in numbers["verdict"]["rivals"]} == {"ensemble"}
    assert numbers["verdict"]["decision"] != "ship"
    err = workspace.refusal(2, "report", "corpus.test=texts/labelled.csv", "--fail-under", "0.1")
    assert "all test texts were selected" in err


def test_selected_texts_of_no_label_do_not_count_among_the_unknown_ones(workspace: Workspace) -> None:
    write_reasons(workspace, ["random"] * 20 + ["student and ensemble differ"] * 4)
    path = workspace.folder / "texts/labelled.csv"
    rows = read_csv(path)
    changed_rows = [*rows[:17], *({**row, "label": "none"} for row in rows[17:])]
    write_csv(path, rows[0], [row.values() for row in changed_rows])
    workspace("run", "corpus.test=texts/labelled.csv", "corpus.unknown=none")
    numbers = workspace.numbers()
    counts = numbers["evaluation"]["n"], numbers["evaluation"]["left_out"], numbers["student_quality"]["unknown"]
    assert (*counts[:2], counts[2]["labelled"], counts[2]["unknown"]) == (17, 0, 17, 3)


def test_a_column_why_of_the_users_own_selects_nothing(workspace: Workspace) -> None:
    write_reasons(workspace, ["a remark"] * 40)
    workspace("run", "corpus.test=texts/labelled.csv")
    assert workspace.numbers()["evaluation"]["n"] == 40
    assert "selected" not in workspace.numbers()["evaluation"]


# ---- made experiments


def with_settings(inputs: VerdictInputs, **sections: Any) -> VerdictInputs:
    """Changes sections of the experiment's settings by name."""
    return changed(inputs, settings={**inputs.report["settings"], **sections})


@pytest.mark.parametrize(("limit", "step"), [(255, "student.max_tokens=256"), (256, "student.epochs=auto")])
def test_no_step_lowers_or_repeats_the_limit_of_tokens(limit: int, step: str) -> None:
    inputs = with_settings(made(1000, 0.6, 0.8, cut=2500), student={"max_tokens": limit})
    assert step in verdict(inputs)["next"]["command"]


@pytest.mark.parametrize(("texts", "proposed"), [(0, False), (3, False), (49, False), (50, True)])
def test_fewer_texts_to_label_than_a_verdict_needs_are_not_proposed(texts: int, *, proposed: bool) -> None:
    step = verdict(unlabelled_inputs(unlabelled=unlabelled(91) | {"to_label": texts}))["next"]
    assert ("command" in step) == proposed
    assert step["text"].startswith(f"Label the {texts} texts of" if proposed else "Label about 200 texts")


@pytest.mark.parametrize(("text", "column"), [("text", "label"), ("label", "label_")])
def test_the_column_of_labels_is_that_of_the_file_to_label(text: str, column: str) -> None:
    inputs = with_settings(unlabelled_inputs(unlabelled=unlabelled(91)), corpus={"text": [text], "label": None})
    assert verdict(inputs)["next"]["command"].endswith(f" corpus.label={column}")


def test_a_student_of_pairs_is_not_used_on_a_typed_text() -> None:
    inputs = with_settings(made(500, 0.852, 0.762), corpus={"text": ["question", "an answer"], "label": "label"})
    step = verdict(replace(inputs, file="other.yaml"))["next"]
    assert "command" not in step
    assert "`amalgam predict --input FILE --text question --text 'an answer' -c other.yaml`" in step["text"]


def test_a_label_with_a_line_break_breaks_no_sentence() -> None:
    label = "law,\nor order"
    counts: Any = {label: (100, 500)}
    quality = unlabelled(91, banking=(900, 500), **counts)
    unclear = verdict(unlabelled_inputs(unlabelled={**quality, "labels": quality["labels"][::-1]}))
    frequent = {"name": label, "kind": "most frequent label", "n": 400, "student_right": 330, "right": 396}
    worse = verdict(labelled_inputs(400, [{**frequent, "gained": 0, "lost": 66}]))
    for sentences in (unclear["reasons"], worse["reasons"], [cause["text"] for cause in worse["causes"]]):
        assert any('"law,\\nor order"' in sentence for sentence in sentences), sentences
        assert not any("\n" in sentence for sentence in sentences)
