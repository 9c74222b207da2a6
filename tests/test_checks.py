"""`plan` and `doctor` find the errors of `run` before anything runs; overrides act as `plan` shows."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from amalgam.cli import app
from amalgam.data.keys import similar_labels
from amalgam.pipeline import input_files
from amalgam.pipeline.errors import ModelError
from amalgam.stages.app.api import Experiment
from amalgam.stages.app.command_tree import as_overrides
from amalgam.stages.common.deliveries import MARKS
from amalgam.tests.workspaces import Workspace, age, amalgam, edit_json, flip_bit


def _label(workspace: Workspace, form: str, teacher: str = "first") -> None:
    path = workspace.folder / f"models/{teacher}/config.json"
    config = json.loads(path.read_text())
    config["id2label"] = {index: form.format(index) for index in range(4)}
    config.pop("label2id", None)
    path.write_text(json.dumps(config))


def _unname_labels(workspace: Workspace) -> None:
    _label(workspace, "LABEL_{}")


def _number_labels(workspace: Workspace) -> None:
    for teacher in ("first", "second"):
        _label(workspace, "{}", teacher)


def _csv_as_parquet(workspace: Workspace) -> None:
    (workspace.folder / "texts/train.csv").rename(workspace.folder / "texts/train.parquet")
    workspace.edit("texts/train.csv", "texts/train.parquet")


def _empty(workspace: Workspace) -> None:
    (workspace.folder / "texts/train.csv").write_text("")


def _without_labels(workspace: Workspace) -> None:
    (workspace.folder / "texts/test.csv").write_text("text\na text\n")


def _header_alone(workspace: Workspace) -> None:
    (workspace.folder / "texts/test.csv").write_text("text,label\n")


def _without_config(workspace: Workspace) -> None:
    (workspace.folder / "models/second/config.json").unlink()


Change = Callable[[Workspace], None]


def _mac_line_ends(workspace: Workspace) -> None:
    path = workspace.folder / "texts/train.csv"
    path.write_bytes(path.read_bytes().replace(b"\r", b"").replace(b"\n", b"\r"))


def _without_header(workspace: Workspace) -> None:
    path = workspace.folder / "texts/train.csv"
    path.write_text(path.read_text().partition("\n")[2])


def _commas_in_tsv(workspace: Workspace) -> None:
    (workspace.folder / "texts/train.csv").rename(workspace.folder / "texts/train.tsv")
    workspace.edit("train: texts/train.csv", "train: texts/train.tsv")


def _json_array(workspace: Workspace) -> None:
    (workspace.folder / "texts/train.jsonl").write_text('[{"text": "one"}, {"text": "two"}]')
    workspace.edit("train: texts/train.csv", "train: texts/train.jsonl")


def _kind(kind: str, model: str = "encoder") -> Change:
    def change(workspace: Workspace) -> None:
        edit_json(workspace.folder / f"models/{model}/config.json", model_type=kind)
        if model != "encoder":
            workspace.edit("./models/encoder", f"teacher:{model}")

    return change


MISTAKES: dict[str, tuple[Change | str, int, str]] = {
    "a column that is not in the header": ("corpus.text=body", 3, "set corpus.text"),
    "a column of ids that one file lacks": ("corpus.id=number", 3, "set corpus.id: auto"),
    "a file that does not exist": ("corpus.test=texts/tset.csv", 3, "test.csv"),
    "a test file without the label column": ("corpus.label=gold", 3, "set corpus.label"),
    "a test file with texts alone": (_without_labels, 3, "add this column to test.csv, or name another file"),
    "an empty file": (_empty, 3, "fill it or leave it out"),
    "a file with a header alone": (_header_alone, 3, "fill it or leave it out"),
    "a csv named .parquet": (_csv_as_parquet, 3, "it looks like csv: name it train.csv"),
    "a web address": ("corpus.test=https://example.org/a.csv", 3, "download the file and name it"),
    "a teacher's folder that does not exist": ("teachers.0.model=./models/frist", 2, "first"),
    "a teacher without config.json": (_without_config, 2, "config.json"),
    "a teacher without label names": (_unname_labels, 2, "give labels: the 4 names, by position"),
    "teachers whose labels are numbers": (_number_labels, 2, 'write labels: ["0", "1", "2", "3"]'),
    "a placeholder for a label": ('teachers.0.labels=["?", "?", "?", "?"]', 2, "give each output its name"),
    "labels of another number": ("teachers.0.labels=[a, b]", 2, "give exactly 4 labels"),
    "old Mac line ends": (_mac_line_ends, 3, "tr '\\r' '\\n' < texts/train.csv > utf8-train.csv"),
    "no header": (
        _without_header,
        3,
        "if the first line is a text, put a line with the names of the columns before it",
    ),
    "commas in a .tsv": (_commas_in_tsv, 3, "it has commas: name it train.csv"),
    "a JSON array named .jsonl": (_json_array, 3, "texts/train-lines.jsonl"),
    "an encoder that does not exist": ("student.encoder=./models/encodr", 2, "encoder"),
    "an encoder of characters": (_kind("canine"), 2, "use a model with a vocabulary"),
    "an encoder of bytes": (_kind("perceiver"), 2, "use a model with a vocabulary"),
    "a teacher of characters": (_kind("canine", "second"), 2, "use a model with a vocabulary"),
    "a teacher of an unknown kind": (_kind("nosuch", "second"), 2, "update it (pip install -U transformers)"),
    "an encoder that pools tokens": (_kind("funnel"), 2, "use another encoder, such as a BERT"),
    "a teacher that pools tokens, as the encoder": (_kind("funnel", "first"), 2, "use another encoder"),
    "an encoder of texts of one length": (_kind("reformer"), 2, "use another encoder"),
    "an encoder of which transformers has no classifier": (_kind("mamba"), 2, "use another encoder"),
    "an encoder without a default language": (_kind("xmod"), 2, 'set_default_language("en_XX")'),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_by_plan_and_doctor_before_anything_runs(fresh: Workspace, mistake: str) -> None:
    change, code, fix = MISTAKES[mistake]
    overrides = [change] if isinstance(change, str) else []
    if not isinstance(change, str):
        change(fresh)
    for command in ("plan", "run"):
        assert fix in fresh.refusal(code, command, *overrides)
    assert not list(fresh.artifacts.rglob("*.parquet"))
    doctor = fresh.attempt("doctor", *overrides)
    assert (doctor.code, fix in doctor.out, "checks failed" in doctor.err) == (2, True, True), doctor.out


@pytest.mark.parametrize("place", ["fresh", "workspace"])
def test_a_label_of_a_teacher_as_unknown_label_is_refused(place: str, request: pytest.FixtureRequest) -> None:
    workspace, message = request.getfixturevalue(place), "corpus.unknown: banking is a label of teacher first"
    before = sorted(workspace.artifacts.glob("report/*"))
    for command in ("plan", "run"):
        refused = workspace.attempt(command, "corpus.unknown=banking")
        assert (refused.code, message in refused.err, "catch_all" in refused.err) == (2, True, True), refused.err
    assert message in workspace.attempt("doctor", "corpus.unknown=banking").out
    assert sorted(workspace.artifacts.glob("report/*")) == before
    assert not list(workspace.artifacts.glob("cache-teachers/*/units/*")) or place == "workspace"
    both = workspace.attempt("plan", "corpus.unknown=none", "teachers.0.model=./nowhere")
    assert both.err.startswith("error: there is no folder ./nowhere\n")


def test_all_mistakes_are_listed_at_once(fresh: Workspace) -> None:
    result = fresh.attempt("plan", "corpus.text=body", "teachers.0.model=./nowhere", "student.encoder=./models/encodr")
    assert result.err.startswith("error: 4 problems\n1. ")  # both corpus files lack the column
    assert result.err.splitlines()[-1].startswith("fix: make each of these changes")
    assert all(piece in result.err for piece in ("train.csv", "test.csv", "./nowhere", "encodr"))
    listed = json.loads(fresh.attempt("plan", "--json", "teachers.0.model=./nowhere").out)["problems"]
    assert [problem["what"] for problem in listed] == ["there is no folder ./nowhere"]


def test_doctor_lists_every_fault_with_its_teacher_and_fix(fresh: Workspace) -> None:
    edit_json(fresh.folder / "models/first/config.json", model_type="nosuch")
    (fresh.folder / "models/first/tokenizer.json").write_text("{}")
    (fresh.folder / "models/encoder/tokenizer.json").write_text('{"model": 1}')
    _label(fresh, "LABEL_{}")
    wrong = ("teachers.1.model=./models/secnd", "corpus.text=body")
    result = fresh.attempt("doctor", "--json", *wrong)
    faults = [(row["check"], row["result"], row["fix"]) for row in result.json if not row["ok"]]
    expected = [
        ("texts", "no column body in train.csv", ", if all files have it; else rename it to body here"),
        ("texts", "no column body in test.csv", "set corpus.text: "),
        ("teacher first", "has no classifier of the kind nosuch", "pip install -U transformers"),
        ("teacher first", "the tokenizer of ", "tokenizer.save_pretrained("),
        ("teacher first", "no names for its labels", "give labels: "),
        ("teacher second", "there is no folder ./models/secnd", "second"),
        ("models", "the tokenizer of ", "tokenizer.save_pretrained("),
    ]
    assert len(faults) == len(expected)
    shared = fresh.attempt("doctor", "student.encoder=teacher:first").err
    assert "checks failed: teacher first\n" in shared, "not also as the encoder, with the same fault"
    for (check, what, fix), fault in zip(expected, faults, strict=True):
        assert (check, what in fault[1], fix in fault[2]) == (fault[0], True, True), fault
    assert result.code == 2
    assert "7 of " in result.err
    assert ": texts, teacher first, teacher second, models" in result.err


def test_plan_and_doctor_name_the_method(fresh: Workspace) -> None:
    assert "method: muka-soft" in fresh("plan").out.splitlines()
    assert fresh("plan", "--json", "targets.mode=hard").json["method"] == "muka-hard"
    [method] = [row["result"] for row in fresh("doctor", "--json").json if row["check"] == "method"]
    assert method == "muka-soft"


def test_a_missing_file_is_named_with_its_field_and_line_and_similar_files_of_texts(fresh: Workspace) -> None:
    (fresh.folder / "texts/train.py").touch()
    (fresh.folder / "texts/train.schema.json").touch()
    fresh.edit("train: texts/train.csv", "train: texts/trian.csv")
    for command in ("plan", "run", "doctor --json"):
        result = fresh.attempt(*command.split())
        text = result.out if "json" in command else result.err
        assert "name one of these: train.csv" in text
        assert "test.csv" not in text  # the test file is no proposal for the training
    assert f"where: line 2, corpus.train: no trian.csv in {fresh.folder / 'texts'}" in fresh.attempt("run").err
    assert "where: command line, corpus.test: no nope.csv" in fresh.attempt("plan", "corpus.test=nope.csv").err
    assert "train.py" not in fresh.attempt("plan").err


def test_good_experiments_pass(fresh: Workspace) -> None:
    assert fresh("plan", "--json").json["problems"] == []
    assert fresh("plan", "--json").json["notes"] == []
    assert all(check["ok"] for check in fresh("doctor", "--json").json)


def test_doctor_fails_for_a_named_file_that_does_not_exist(tmp_path: Path) -> None:
    assert amalgam("doctor", folder=tmp_path).code == 0
    refused = amalgam("doctor", "-c", "elsewhere/amalgam.yaml", folder=tmp_path)
    assert (refused.code, "checks failed: experiment" in refused.err) == (2, True), refused.err
    assert "amalgam.yaml does not exist" in refused.out


def test_plan_counts_the_training_texts_without_a_gold_label_after_the_texts_are_read(fresh: Workspace) -> None:
    path = fresh.folder / "texts/train.csv"
    texts = [row.rsplit(",", 1)[0] for row in path.read_text().splitlines()]
    path.write_text("".join(f"{text}\n" for text in texts))
    assert fresh.attempt("plan", "student.method=supervised").code == 3  # the header lacks the column
    fresh("read-corpus")
    assert "120 training texts have no gold label" in fresh.refusal(3, "plan", "student.method=supervised")
    fresh("plan")


def test_plan_refuses_the_labels_of_another_test_file_as_run_does(workspace: Workspace) -> None:
    rows = workspace.texts("test")
    workspace.write([(text, label.upper()) for text, label in rows], "upper")
    workspace("read-corpus", "corpus.test=texts/upper.csv")
    for command in ("plan", "run"):
        refused = workspace.attempt(command, "corpus.test=texts/upper.csv")
        assert (refused.code, "40 test texts have a gold label that is not one of" in refused.err) == (3, True)
        assert '"LAW": "law"' in refused.err


def test_blanks_around_a_gold_label_of_the_corpus_do_not_count(workspace: Workspace) -> None:
    workspace.write([(text, f" {label} ") for text, label in workspace.texts("test")], "padded")
    workspace("read-corpus", "corpus.test=texts/padded.csv")
    assert workspace.stale("corpus.test=texts/padded.csv") == set()
    refused = workspace.attempt("run", "corpus.test=texts/padded.csv", 'corpus.rename={" law ": LAW}')
    assert (refused.code, "not one of the student's: LAW" in refused.err) == (3, True), refused.err


@pytest.mark.parametrize("field", ["teachers.0", "student"])
def test_plan_names_a_revision_of_a_folder(workspace: Workspace, field: str) -> None:
    model = {"teachers.0": "./models/first", "student": "./models/encoder"}[field]
    [note] = workspace("plan", f"{field}.revision=main", "--json").json["notes"]
    assert note == f"revision: main has no effect, because {model} is on this machine"


def test_a_label_that_is_probably_missing_is_named(workspace: Workspace) -> None:
    rows = workspace.texts()
    workspace.write([(text, "NaN") for text, _ in rows[:3]] + rows[3:])
    note = "3 train texts have the label NaN: if it is a missing one"
    assert note in workspace("read-corpus").err
    assert note not in workspace("read-corpus", "corpus.unknown=NaN").err


def test_a_column_of_texts_named_as_labels_is_recognised(workspace: Workspace) -> None:
    assert "this one has texts" in workspace.refusal(3, "run", "corpus.text=label", "corpus.label=text")


def test_looking_makes_no_workspace(fresh: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "SETTLED_SECONDS", -1)  # digests of new files are cached, too
    for command in ("plan", "status", "doctor", "explain report"):
        fresh(*command.split())
        assert not fresh.artifacts.exists(), command
    fresh("read-corpus")
    digests = fresh.artifacts / "digests.json"
    digests.unlink()
    fresh("plan")
    assert digests.exists()


def test_similar_labels_differ_by_case_separators_or_a_plural_and_belong_to_two_teachers() -> None:
    labels = {"a": ["Health", "card payment", "bus", "top-up"], "b": ["health", "card_payments", "business", "bus"]}
    assert similar_labels(labels) == [("Health", "health"), ("card payment", "card_payments")]
    assert similar_labels({"a": ["rock", "rocks", "日本"], "b": ["日本", "--", "!!"]}) == []


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (["teachers.1.rename={gardening: Cookings}"], "cooking and Cookings"),
        (["student.method=muka-soft", "cache.passes=0"], "cache.passes=16"),
    ],
)
def test_plan_remarks_on_what_would_surprise(fresh: Workspace, overrides: list[str], note: str) -> None:
    result = fresh("plan", *overrides)
    assert note in result.err


def test_plan_and_doctor_name_models_that_read_fewer_tokens_than_max_tokens(fresh: Workspace) -> None:
    overrides = ["teachers.1.max_tokens=1000", "student.max_tokens=600"]
    plan, doctor = fresh("plan", *overrides).err, fresh("doctor", *overrides).out
    for printed in (plan, doctor):
        assert "teacher second reads at most 64 tokens, fewer than max_tokens 1,000: longer texts are" in printed
        assert "student.encoder reads at most 64 tokens, fewer than max_tokens 600" in printed
        assert "teacher first" not in printed
    assert "note: teacher first, teacher second read at most 64 tokens" in fresh("plan", "cache.max_tokens=65").err


def test_similar_labels_are_noted_by_doctor_a_run_and_audit_too(workspace: Workspace) -> None:
    renamed = ["teachers.1.rename={gardening: Cookings}", "corpus.test=null"]
    note = "labels with nearly the same name count as different: cooking and Cookings"
    assert note in workspace("doctor", *renamed).out
    assert workspace("build-targets", *renamed).err.count(f"note: {note}") == 1
    assert f"note: {note}" in workspace("audit", *renamed).err
    assert workspace("audit").err == ""


def test_plan_notes_names_that_are_no_folders(fresh: Workspace) -> None:
    fresh.edit("./models/first", "models/first")
    assert fresh("plan").err == ""
    assert "after the download of org/encoder\n" in fresh("plan", "student.encoder=org/encoder").out
    misspelt = fresh("plan", "teachers.1.model=models/secnd", "student.encoder=models/encodr")
    start = "is not a folder here; it is taken as a Hub id: did you mean"
    assert f"models/secnd {start} ./models/second?" in misspelt.err
    assert f"models/encodr {start} ./models/encoder" in misspelt.err
    (fresh.folder / "models/encoder").rename(fresh.folder / "encoder")
    for encoder in ("encodr", "static:encodr"):
        assert f"note: encodr {start} ./encoder?" in fresh("plan", f"student.encoder={encoder}").err
    assert (
        "write hub:org/second if it is one"
        in fresh("plan", "teachers.1.model=org/second", "student.encoder=./encoder").err
    )
    encoder = "student.encoder=./encoder"
    assert "taken as a Hub id" not in fresh("plan", "teachers.1.model=hub:org/second", encoder).err
    named = Experiment([fresh.folder / "models/first", "org/second"], ["a text"], workspace=fresh.folder / "a")
    assert any("org/second is not a folder here" in remark for remark in named.plan().remarks)


def test_numbers_are_labels_of_an_only_teacher_and_where_the_file_names_or_confirms_them(fresh: Workspace) -> None:
    _number_labels(fresh)
    named = ["teachers.0.labels=[a, b, c, d]", 'teachers.1.rename={"0": e, "1": f, "2": g, "3": h}']
    assert fresh("plan", "--json", *named).json["problems"] == []
    confirmed = [f'teachers.{index}.labels=["0", "1", "2", "3"]' for index in (0, 1)]
    assert fresh("plan", "--json", *confirmed).json["problems"] == []
    one = "teachers=[{name: first, model: ./models/first}]"
    assert fresh("plan", "--json", one).json["problems"] == []
    with pytest.raises(ModelError, match=r"2 models cannot be teachers.*labels are numbers"):
        Experiment([fresh.folder / "models/first", fresh.folder / "models/second"], ["a text"])


def test_a_single_teacher_is_remarked(fresh: Workspace) -> None:
    text = fresh.config.read_text()
    begin, _, rest = text.partition("  - name: second")
    fresh.config.write_text(begin + "\n".join(line for line in rest.splitlines()[1:] if not line.startswith("    ")))
    assert "the only teacher" in fresh("plan", "corpus.test=null").err


# ---- overrides


def test_plan_names_the_overrides_that_later_commands_repeat_and_the_student_of_other_settings(
    workspace: Workspace,
) -> None:
    workspace("build-targets", "--mode", "hard")
    noted = workspace("plan").err
    assert "the last build-targets had targets.mode=hard" in noted
    assert workspace("train-student", "--quiet").err == ""
    repeated = workspace("train-student")
    assert "targets.mode=hard, as in the last build-targets" in repeated.err
    planned = workspace("plan")
    assert workspace.stale() == set()
    assert "students/student holds another student; `amalgam run` replaces it" in planned.err
    workspace("run", "student.learning_rate=1e-3", "student.evaluate_every=auto", "corpus.text=text")  # as in the file
    assert workspace("plan").err == ""
    workspace("run", "student.seed=4")
    assert "`amalgam run student.seed=0` replaces it" in workspace("plan", "student.seed=0").err


def test_a_missing_page_of_another_student_is_not_mended_by_a_run(workspace: Workspace) -> None:
    workspace("run", "student.name=other")
    (workspace.folder / "reports/other.html").unlink()
    verified = workspace.attempt("verify")
    assert "written again by a run of that student; or delete reports/other.*" in verified.out
    assert "fix: follow the line of each file" in verified.err
    (workspace.folder / "reports/other.json").unlink()
    assert workspace("verify").code == 0


def test_the_overrides_of_one_experiment_file_are_not_repeated_for_another(workspace: Workspace) -> None:
    shutil.copyfile(workspace.config, workspace.folder / "second.yaml")
    workspace("build-targets", "--mode", "hard")
    second = workspace("train-student", "-c", "second.yaml")
    assert "as in the last build-targets" not in second.err
    assert workspace.stale() == set()
    assert "had targets.mode" not in workspace("plan", "-c", "second.yaml").err
    assert "as in the last build-targets" not in workspace("train-student").err  # that of second.yaml is the last


def test_report_and_predict_use_the_same_student_after_another_was_trained(workspace: Workspace) -> None:
    workspace("run", "student.name=other", "student.seed=5", "targets.mode=hard")
    name = r"students/student \(muka-soft, fingerprint"
    reported = workspace("report")
    assert "the overrides of students/other are left out: add student.name=other to repeat them" in reported.err
    assert "student: students/student\n" in reported.err
    assert "report: reports/student.html" in reported.err
    assert "as in the last" not in reported.err
    assert re.search(name, workspace("predict", "the chef fried the onion").err)


def test_the_overrides_of_another_student_are_repeated_with_its_name(workspace: Workspace) -> None:
    workspace("run", "student.name=other", "student.seed=5")
    assert "had student" not in workspace("plan").err
    reported = workspace("report", "student.name=other")
    assert "student.seed=5, as in the last train-student" in reported.err
    assert "left out" not in reported.err
    assert "report: reports/other.html" in reported.err


def test_a_command_that_fails_stores_no_override(workspace: Workspace) -> None:
    workspace.refusal(2, "run", "corpus.test=texts/train.csv", "targets.mode=hard", "student.encoder=./nowhere")
    assert "had" not in workspace("plan").err
    assert "as in the last" not in workspace("train-student").err


def test_texts_to_label_store_no_override(workspace: Workspace) -> None:
    workspace("label", "--count", "3", "--out", "texts.csv", "targets.temperature=2")
    assert "build-targets" not in workspace.stale("targets.temperature=2")
    assert "as in the last" not in workspace("report").err


def test_a_sweep_stores_no_override(workspace: Workspace) -> None:
    workspace("sweep", "targets.temperature=0.2,0.4", "student.method=ensemble", "--quiet")
    assert "had" not in workspace("plan").err


@pytest.mark.parametrize("slip", [["--targets.temperature=0.5"], ["--targets.temperature", "0.5"]])
def test_a_field_written_as_an_option_is_an_override(workspace: Workspace, slip: list[str]) -> None:
    assert workspace("plan", "--json", *slip).out == workspace("plan", "--json", "targets.temperature=0.5").out


def test_a_field_with_hyphens_is_that_of_the_experiment() -> None:
    for option in (["--student.learning-rate=3e-5"], ["--student.learning-rate", "3e-5"]):
        assert as_overrides(["plan", *option]) == ["plan", "student.learning_rate=3e-5"]


def test_a_text_that_looks_like_an_option_is_unchanged() -> None:
    texts = ["predict", "--", "--student.epochs", "--3.5 stars"]
    assert as_overrides(texts) == texts
    assert as_overrides(["predict", "--3.5 stars"]) == ["predict", "--3.5 stars"]


SLIPS = {
    "plan epochs=3": "did you mean student.epochs",
    "plan studnt.epochs=3": "did you mean 'student'?",
    "plan nonsense": "nonsense: an override looks like targets.temperature=0.5",
    "plan --epochs 3": "write student.epochs=VALUE",
    "plan --student.epochs": "write student.epochs=VALUE",
    "plan --student.epochs --json": "write student.epochs=VALUE",
    "-c other.yaml plan": "such as `amalgam plan -c ...`",
    "student.epochs=3 plan": "write amalgam plan student.epochs=3",
    "--student.epochs=3": "write amalgam run student.epochs=3",
    "run --until report": "run `amalgam report`, which first runs the stages before it",
    "run --dry-run": "run `amalgam plan`",
    "run --resume": "the same command resumes",
    "train-student --lr 1e-4": "write student.learning_rate=VALUE",
    "plan --tre": "did you mean --tree?",
    "status --nonsense": "run `amalgam status --help`",
    "gc --dry": "without --yes the command changes nothing",
    "run --student other": "write student.FIELD=VALUE",
    "predict --file a.csv": "did you mean --input?",
    "explain": "fix: write, for example, `amalgam explain build-targets targets.temperature=0.5`",
    "sweep": "needs FIELD=VALUE[,VALUE...]...",
    "push": "needs REPO_ID",
    "push one two": "`amalgam push` takes no argument two",
    "methods all": "fix: run `amalgam methods --help`, which lists the options",
    "export students/one": "fix: write `amalgam export --student students/one`",
    "export --onnx student.name=one": "fix: write `amalgam export --student students/one`",
    "export --onnx student.seed=1": "fix: leave it out, or set student.seed in the experiment file, which -c names",
    "serve port=8080": "fix: write `amalgam serve --port 8080`",
    "plan -c": "fix: write `amalgam plan -c VALUE`",
    "gc --yes=3": "fix: write, for example, `amalgam gc --unused --yes`",
    "label --count many": "fix: write, for example, `amalgam label --count 50`",
    "compare a b": "fix: run `amalgam report A B`",
    "trian": "did you mean train-teachers or train-student?",
    "biuld-targets": "did you mean build-targets?",
    "report --fail-under 85": "write 0.85",
    "report --fail-under 8500": "write a share, such as 0.8",
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_on_the_command_line_is_answered_with_its_place_and_a_suggestion(fresh: Workspace, slip: str) -> None:
    result = fresh.attempt(*slip.split())
    assert (result.code, result.out) == (2, ""), result.err
    assert "where: command line" in result.err
    assert SLIPS[slip] in result.err
    assert "amalgam.yaml" not in result.err


def test_gc_counts_the_unused_results_that_are_too_young_to_delete(workspace: Workspace) -> None:
    unused = ("gc", "--unused", "student.seed=7")
    workspace("run", "student.seed=7")
    assert "2 results younger than 24 h: kept" in workspace(*unused).out
    assert workspace(*unused, "--json").json["young_results"] == 2
    age(workspace.artifacts)
    assert workspace(*unused, "--json").json["young_results"] == 0
    assert "younger" not in workspace(*unused).out


def test_proposed_commands_name_the_experiment_file_and_repeat_overrides(workspace: Workspace) -> None:
    other = ("-c", "my file.yaml")
    workspace.edit("epochs: 1", "epochs: 2")
    workspace.config.rename(workspace.folder / "my file.yaml")
    again = "student.seed=7 -c 'my file.yaml'"
    assert f"run: amalgam label labels.csv {again}" in workspace("label", "student.seed=7", *other).out
    labels = (workspace.folder / "labels.csv").read_text().splitlines()
    (workspace.folder / "labels.csv").write_text(f"{labels[0]}\n{labels[1].replace(',,', ',law,', 1)}\n")
    assert f"amalgam run labels=./labels.csv {again}" in workspace("label", "labels.csv", "student.seed=7", *other).out
    assert "`amalgam doctor -c 'my file.yaml'`" in workspace.attempt("doctor", "corpus.text=body", *other).err
    assert "`amalgam run -c 'my file.yaml'`" in workspace("predict", "a text", *other).err
    workspace("build-targets", "targets.temperature=0.3", *other)
    workspace("build-targets", *other)
    age(workspace.artifacts)
    assert f"amalgam gc --unused --yes {again}" in workspace("gc", "--unused", "student.seed=7", *other).out
    refused = workspace.attempt("audit", "cache.max_tokens=16", *other).err
    assert "`amalgam cache-teachers cache.max_tokens=16 -c 'my file.yaml'`" in refused


def break_marks(workspace: Workspace) -> None:
    for name in MARKS:
        (workspace.folder / "students/student" / name).write_text("{")


def remove_marks(workspace: Workspace) -> None:
    for name in MARKS:
        (workspace.folder / "students/student" / name).unlink()


def break_student(workspace: Workspace) -> None:
    (workspace.folder / "students/student/config.json").write_text("{}")


def break_report(workspace: Workspace) -> None:
    (workspace.folder / "reports/student.html").write_text("")


def remove_cache(workspace: Workspace) -> None:
    shutil.rmtree(workspace.artifacts / "cache-teachers")


def label_wrongly(workspace: Workspace) -> None:
    (workspace.folder / "wrong.csv").write_text("text,label\na text,nolabel\n")


PROPOSED: list[tuple[Callable[[Workspace], object], str, str]] = [
    (remove_marks, "predict --explain text", "amalgam train-student"),
    (break_marks, "predict text", "amalgam run"),
    (break_student, "predict text", "amalgam verify --repair"),
    (break_report, "verify", "written again by `amalgam run"),
    (lambda workspace: flip_bit(workspace.units()[0]), "verify", "fix: run `amalgam run"),
    (remove_cache, "gc --unused", "amalgam run"),
    (remove_cache, "gc --unused", "amalgam gc"),
    (label_wrongly, "build-targets labels=wrong.csv", "amalgam label --count 50"),
    (label_wrongly, "build-targets labels=nosuch.csv", "amalgam label --count 50"),
    (label_wrongly, "report nosuch student", "amalgam report student.name=nosuch"),
    (label_wrongly, "report --part 0/2 --json", "amalgam report"),
    (label_wrongly, "predict wrong.csv", "amalgam predict --input wrong.csv"),
    (label_wrongly, "push nosuch", "amalgam push YOUR-NAME/a-model"),
    (label_wrongly, "sweep student.seed=1", "amalgam sweep student.seed=0,1,2"),
    (label_wrongly, "export --numpy", "amalgam export --onnx"),
]


@pytest.mark.parametrize(("change", "line", "piece"), PROPOSED, ids=[f"{row[1]}-{row[2]}" for row in PROPOSED])
def test_the_fix_of_an_error_names_the_experiment_file(
    workspace: Workspace, change: Callable[[Workspace], object], line: str, piece: str
) -> None:
    change(workspace)
    workspace.config.rename(workspace.folder / "my file.yaml")
    result = workspace.attempt(*line.split(" "), "-c", "my file.yaml")
    assert result.code
    assert f"{piece} -c 'my file.yaml'" in result.out + result.err


# ---- help


def test_every_command_is_listed_under_a_heading_with_its_whole_help(tmp_path: Path) -> None:
    words = " ".join(amalgam("--help", folder=tmp_path).out.split())
    for command in app.registered_commands:
        text = command.help or (command.callback.__doc__ if command.callback else "") or ""
        assert f"{command.name or command.callback.__name__} {' '.join(text.split())}" in words  # type: ignore[union-attr]
    assert "--debug" in words
