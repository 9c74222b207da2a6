"""The exit code of `amalgam report --fail-under` and `--fail-if-worse-than`."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import replace
from typing import Any

import pytest

from amalgam.data.demo_corpus import generate
from amalgam.stages.app import maintenance
from amalgam.stages.app.student import Student, finished_in
from amalgam.stages.report.students import OtherStudent, named_students, temperature_sweep
from amalgam.stages.report.verdict import compared
from amalgam.stages.report.verdict_types import RivalCounts
from amalgam.tests.workspaces import TEACHER_LABELS, Workspace, edit_json, flip_bit, rewrite_mark


def test_a_missed_requirement_has_its_own_exit_code_and_names_the_number(built: Workspace) -> None:
    accuracy = built("report", "--json").json["evaluation"]["systems"]["student (muka-soft)"]["accuracy"]
    err = built.refusal(4, "report", "--fail-under", str(accuracy + 0.001))
    assert f"{100 * accuracy:.1f} %" in err
    assert "--fail-under" in err
    met = built("report", "--fail-under", str(accuracy), "--fail-if-worse-than", "zero-shot").out.splitlines()[-1]
    assert met.startswith(f"requirements met: the accuracy is {100 * accuracy:.1f} % (n = 40, 95 % interval ")
    standing = r"; the student is (better than|not clearly different from) zero-shot, [+-]\d+\.\d points \("
    assert re.search(standing, met)
    assert f"below {100 * accuracy + 0.004:.3f} %" in built.attempt("report", "--fail-under", str(accuracy + 4e-5)).err
    assert built.attempt("report", "--fail-under", "80").code == 2
    assert built.attempt("report", "student", "other", "--fail-under", "0.5").code == 2


@pytest.mark.parametrize("worse", [True, False])
def test_a_rival_fails_the_report_only_if_it_is_better(workspace: Workspace, *, worse: bool) -> None:
    rivals = {rival["name"]: rival for rival in workspace("report", "--json").json["verdict"]["rivals"]}
    name = next((name for name, rival in rivals.items() if (rival["student_is"] == "worse") == worse), None)
    if name:
        assert workspace.attempt("report", "--fail-if-worse-than", name).code == (4 if worse else 0)
    refused = workspace.attempt("report", "--fail-if-worse-than", "nobody", "student.seed=9")
    assert (refused.code, "train-student" in refused.err) == (2, False), "refused before any stage"
    assert "ensemble, zero-shot, first, second" in refused.err


def test_a_student_with_the_name_of_the_most_frequent_label_is_a_rival(workspace: Workspace) -> None:
    path, verdict = workspace.folder / "reports/student.json", workspace.numbers()["verdict"]
    [label] = [rival["name"] for rival in verdict["rivals"] if rival["kind"] == "most frequent label"]
    assert workspace.attempt("report", "student", "--fail-if-worse-than", label).code == 2
    counts: RivalCounts = {
        "name": label, "kind": "student", "n": 40, "student_right": 20, "right": 31, "gained": 2, "lost": 13
    }  # fmt: skip
    edit_json(path, verdict={**verdict, "rivals": [*verdict["rivals"], compared(counts)]})
    err = workspace.refusal(4, "report", "student", "--fail-if-worse-than", label)
    assert f"The other student “{label}” is 27.5 points better" in err


def test_the_rival_of_a_gate_is_compared_alone_however_many_students_there_are(workspace: Workspace) -> None:
    path, verdict = workspace.folder / "reports/student.json", workspace.numbers()["verdict"]
    counts: RivalCounts = {
        "name": "v0", "kind": "student", "n": 40, "student_right": 20, "right": 31, "gained": 2, "lost": 13
    }  # fmt: skip
    rivals = [compared({**counts, "name": f"v{number}"}, 30) for number in range(30)]
    assert rivals[0]["student_is"] == "not clearly different"
    edit_json(path, verdict={**verdict, "rivals": [*verdict["rivals"], *rivals]})
    err = workspace.refusal(4, "report", "student", "--fail-if-worse-than", "v3")
    assert "(77.5 % against 50.0 %, 95 % interval +" in err


def test_two_names_of_one_student_are_the_same_rival(workspace: Workspace) -> None:
    workspace("run", "student.name=another")
    same = workspace("report", "another", "--fail-if-worse-than", "student").out.splitlines()[-1]
    assert same == "requirements met: another and student are the same student"
    workspace("run", "student.name=next", "student.seed=9", "student.epochs=1")
    gate = ("report", "student.name=next", "--fail-if-worse-than")
    first, second = (workspace.attempt(*gate, name) for name in ("another", "student"))
    assert first.code in {0, 4}, first.err
    assert "“another”" in first.out + first.err
    assert (first.code, first.out.replace("“another”", "“student”")) == (second.code, second.out)
    assert workspace.attempt("report", "next", "--fail-if-worse-than", "next").code == 2
    shutil.copytree(workspace.folder / "students/student", workspace.folder / "students/a-copy")
    for name in ("student", "a-copy"):
        stored = workspace.attempt("report", "next", "--fail-if-worse-than", name)
        assert (stored.code, f"other student “{name}”" in stored.out + stored.err) == (first.code, True), stored.err


def test_a_student_that_replaced_a_measured_one_is_no_rival_by_its_name(workspace: Workspace) -> None:
    workspace("run", "student.name=next", "student.seed=9")
    workspace("run", "student.seed=3")
    err = workspace.refusal(2, "report", "next", "--fail-if-worse-than", "student")
    assert "student was not measured on the test texts of next" in err


def test_a_name_of_a_student_and_of_a_teacher_is_refused(workspace: Workspace) -> None:
    shutil.move(workspace.folder / "students/student", workspace.folder / "students/first")
    for report in (["student.name=next", "student.seed=9"], ["next"]):
        err = workspace.refusal(2, "report", *report, "--fail-if-worse-than", "first")
        assert "two rivals have the name first: students/first and a teacher" in err
        assert "train-student: running" not in err
        of_teacher = workspace.attempt("report", *report, "--fail-if-worse-than", "teacher:first")
        assert of_teacher.code in {0, 4}, of_teacher.err
        assert "eacher first on its own labels" in of_teacher.out + of_teacher.err


def test_the_report_of_a_delivered_student_stays_for_later_gates(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace("run", "student.name=next", "student.seed=9", "student.epochs=1")
    monkeypatch.setattr(maintenance, "OLD_SECONDS", -60.0)
    unused = ("gc", "--unused", "--yes", "student.name=next", "student.seed=9", "student.epochs=1")
    assert "neither the last builds nor this experiment use it" in workspace(*unused).out
    gate = workspace.attempt("report", "student.name=next", "--fail-if-worse-than", "student")
    assert gate.code in {0, 4}, gate.err
    report = workspace.folder / "artifacts/report"
    before = len(list(report.iterdir()))
    shutil.rmtree(workspace.folder / "students/student")
    workspace(*unused)
    assert len(list(report.iterdir())) < before


def test_a_gate_measures_a_finished_student_on_new_test_texts_and_does_not_train_it(workspace: Workspace) -> None:
    def files() -> dict[str, bytes]:
        paths = [workspace.folder / "reports/student.json", *(workspace.folder / "students/student").iterdir()]
        return {path.name: path.read_bytes() for path in paths}

    before = files()
    workspace.write(generate(50, 7, "test"), "test")
    workspace.write(generate(20, 7), "train-2")
    day = ["corpus.train=texts/train*.csv", "student.name=next"]
    workspace("run", *day)
    err = workspace.refusal(2, "report", "next", "--fail-if-worse-than", "student")
    assert "student was not measured on the test texts of next" in err
    command = "amalgam report student.name=next 'corpus.train=[\"texts/train*.csv\"]' --fail-if-worse-than student"
    assert f"fix: run `{command}`, which predicts" in err
    fix = f"note: `{command}` predicts the test texts of next"
    assert fix in workspace("report", "student", "next").err
    gate = workspace.attempt(*shlex.split(command)[1:])
    assert gate.code in {0, 4}, gate.err
    assert "students/student: measured on the same 50 test texts, not trained" in gate.err
    assert "train-student: running" not in gate.err
    assert files() == before
    again = workspace.attempt(*shlex.split(command)[1:])
    assert (again.code, again.out, "measured on" in again.err) == (gate.code, gate.out, False)
    assert workspace.attempt("report", "next", "--fail-if-worse-than", "student").code == gate.code
    plain = ("student.name=plain", "student.method=ensemble")
    assert "the report has no rival next" in workspace.refusal(2, "report", *plain, "--fail-if-worse-than", "next")
    assert workspace("verify").code == 0

    numbers = workspace.numbers("next")
    [rival] = [rival for rival in numbers["verdict"]["rivals"] if rival["name"] == "student"]
    workspace("report")  # of the same student, which the texts have not changed
    own = workspace("report", "--json").json["evaluation"]["systems"]["student (muka-soft)"]
    assert files()["model.safetensors"] == before["model.safetensors"]
    assert rival["right"] == round(own["accuracy"] * own["n"])
    assert rival["gained"] - rival["lost"] == rival["student_right"] - rival["right"]
    [scores] = [scores for scores in numbers["students"] if scores["name"] == "student"]
    assert scores == {**scores, **{measure: own[measure] for measure in ("n", "accuracy", "nll_nats", "ece")}}


def test_a_proposed_command_repeats_renamed_labels_and_a_whole_section(workspace: Workspace) -> None:
    workspace.write([(text, label.replace("law", "laws")) for text, label in generate(40, 7, "test")], "test")
    section = '{"texts": 3, "source": "recombined", "corpus": "texts/train.csv", "column": "text"}'
    renamed = ["student.name=next", "corpus.rename.laws=law", "corpus.train=null", f"generate={section}"]
    workspace("run", *renamed)
    err = workspace.refusal(2, "report", "next", "--fail-if-worse-than", "student")
    [command] = re.findall(r"fix: run `amalgam (.*)`, which predicts", err)
    gate = workspace.attempt(*shlex.split(command))
    assert gate.code in {0, 4}, gate.err
    assert "train-student: running" not in gate.err


def test_a_gate_measures_a_student_of_other_labels_and_refuses_a_damaged_one(workspace: Workspace) -> None:
    left = workspace.config.read_text().replace("  - name: second\n    model: ./models/second\n", "")
    (workspace.folder / "first.yaml").write_text(left)
    gate = ["report", "-c", "first.yaml", "student.name=next", "corpus.on_bad_row=skip", "--fail-if-worse-than"]
    refused = workspace.attempt(*gate, "student")
    lost = (
        "this student lacks labels of students/student, which 20 of 40 test texts have: gardening, law, medicine, music"
    )
    assert (refused.code, lost in refused.err) == (2, True), refused.err
    assert (workspace.folder / "reports/next.html").is_file()
    workspace.edit("model: ./models/first\n", "model: ./models/first\n    rename: {banking: finance}\n")
    renamed = ["student.name=renamed", "corpus.rename.banking=finance", "--fail-if-worse-than", "student"]
    err = workspace.attempt("report", *renamed).err
    assert "note: students/student lacks labels of 5 of 40 test texts, and is wrong on these: finance; if" in err
    unknown = [("A text of another label.", "chess")]
    workspace.write([row for row in workspace.texts("test") if row[1] in TEACHER_LABELS["first"]] + unknown, "test")
    assert workspace.attempt(*gate, "student").code in {0, 4}
    numbers = workspace.numbers("next")
    [rival] = [rival for rival in numbers["verdict"]["rivals"] if rival["name"] == "student"]
    first = TEACHER_LABELS["first"]
    tested = [row for row in workspace.texts("test") if row[1] in first]
    assert rival["n"] == numbers["evaluation"]["n"] == len(tested)
    student = Student(finished_in(workspace.folder / "students/student"), top=1, explain=False)
    predicted = student([(text,) for text, _ in tested]).labels
    assert rival["right"] == sum(labels == [label] for labels, (_, label) in zip(predicted, tested, strict=True))
    shutil.copytree(workspace.folder / "students/student", workspace.folder / "students/worn")
    rewrite_mark(workspace.folder / "students/worn", fingerprint="0123456789abcdef", text=["first", "second"])
    assert "students/worn was trained on pairs of texts" in workspace.refusal(2, *gate, "worn")
    flip_bit(workspace.folder / "students/worn/model.safetensors")
    assert "the model is damaged: model.safetensors" in workspace.refusal(2, *gate, "worn")


def test_a_training_that_replaces_another_student_states_it(workspace: Workspace) -> None:
    workspace.write(workspace.texts()[:100])
    end = "`amalgam run` replaces it, unless the training is the same"
    assert f"students/student holds another student; {end}" in workspace("plan").err
    assert "  student: students/student, which replaces another student of this name\n" in workspace("run").err
    assert "  student: students/student\n" in workspace("run", "--force").err
    assert workspace("plan").err == ""
    seed = workspace("plan", "student.seed=4").err
    assert "students/student holds another student; `amalgam run student.seed=4` replaces it\n" in seed


def test_a_report_of_a_student_that_learned_the_test_texts_counts_more_than_a_gate() -> None:
    scores: Any = {"fingerprint": "0", "method": "amalgam", "n": 40, "accuracy": 0.5}
    gate = OtherStudent(scores, "a", "ff", False, None, None, None, "", {}, "")
    report = replace(gate, learned={"texts": 9, "of": 40, "labelled": True})
    for students in ([gate, report], [report, gate]):
        assert named_students(students, "b", {"a": "v1"}) == [("v1", report)]


def test_a_student_with_several_reports_is_one_point_of_a_sweep() -> None:
    scores: Any = [{"fingerprint": report, "method": "muka-soft", "n": 40, "accuracy": 0.5} for report in "012"]
    cold = OtherStudent(scores[0], "a", None, False, None, None, 0.2, "", {}, "")
    again = replace(cold, scores=scores[1])
    warm = replace(cold, student="b", temperature=0.5, scores=scores[2])
    for page in ("0", "1"):
        points = temperature_sweep(page, [cold, again, warm])
        assert [(point["temperature"], point["ours"]) for point in points] == [(0.2, True), (0.5, False)]
    assert temperature_sweep("0", [cold, again]) == []


def test_a_teacher_without_a_test_text_decides_nothing(workspace: Workspace) -> None:
    texts = [(text, label) for text, label in workspace.texts("test") if label in TEACHER_LABELS["first"]]
    workspace.write(texts, "test")
    refused = workspace.attempt("report", "--fail-if-worse-than", "second")
    assert (refused.code, "no test text has a label of teacher second" in refused.err) == (2, True), refused.err


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_stored_page_decides_nothing_about_another_student(workspace: Workspace, *, is_deleted: bool) -> None:
    assert "this page is of" not in workspace("report", "student", "--fail-under", "0").err
    folder = workspace.folder / "students/student"
    if is_deleted:
        shutil.rmtree(folder)
    else:
        rewrite_mark(folder, fingerprint="0123456789abcdef")
    holds = "students/student holds " + ("no student" if is_deleted else "01234567")
    differs = f"{holds}; this page is of {workspace.head('train-student')[:8]}"
    for requirement in (["--fail-under", "0"], ["--fail-if-worse-than", "zero-shot"]):
        refused = workspace.attempt("report", "student", *requirement)
        assert (refused.code, differs in refused.err) == (2, True), refused.err
        assert "fix: run `amalgam report student.name=student`" in refused.err
    noted = workspace("report", "student")
    assert f"note: {differs}: run `amalgam report student.name=student`" in noted.err
    assert "verdict: " in noted.out


def test_a_student_that_learned_the_test_texts_meets_no_requirement_and_is_no_rival(workspace: Workspace) -> None:
    fitted = ["student.learning_rate=1e-2", "student.epochs=20"]
    workspace("report", "student.method=supervised", "corpus.train=texts/test.csv", "student.name=leaky", *fitted)
    verdict = workspace("report", "--json").json["verdict"]
    better = next(caution for caution in verdict["cautions"] if caution.startswith("The other student “leaky” is"))
    assert "were learned with their gold labels" in better
    assert not any("leaky" in reason for reason in verdict["reasons"])
    for requirement in (["leaky", "--fail-under", "0"], ["student", "--fail-if-worse-than", "leaky"]):
        assert "were learned with their gold labels" in workspace.refusal(2, "report", *requirement)
    compared = workspace("report", "student", "leaky").out
    assert "\nleaky: " in compared
    assert "No run can be called better" in compared
