"""Files of labels: names, columns, labels and ids that are accepted, and messages about the others."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np
import polars as pl
import pytest

from amalgam import AmalgamError, Experiment
from amalgam.data.keys import text_key
from amalgam.pipeline.config.schema import Corpus
from amalgam.stages.common import load_labels
from amalgam.stages.report.labelling import header_of, linear_labels, select
from amalgam.stages.weigh_teachers import weigh
from amalgam.tests.test_labels import AMALGAM, LABELS, fill
from amalgam.tests.test_usage import examples_of
from amalgam.tests.workspaces import TEACHER_LABELS, Workspace, amalgam, read_csv, write_csv


def write(workspace: Workspace, rows: Sequence[Sequence[str]], name: str = "labels.csv") -> None:
    write_csv(workspace.folder / name, ("text", "label", "why")[: len(rows[0])], rows)


# ---- before any stage


FAULTS: dict[str, tuple[str, int, str]] = {
    "absent": ("nope.csv", 3, "./nope.csv does not exist"),
    "earlier file": ("labels.csv labels=nope.csv", 3, "nope.csv does not exist"),
    "no user": ("~nosuchuser/labels.csv", 2, "there is no user nosuchuser"),
    "folder": ("texts", 3, "./texts is no file"),
    "other columns": ("amalgam.csv", 3, "no column text in amalgam.csv"),
    "text file": ("labels.txt", 3, "fix: if its rows have columns, name it .csv: mv labels.txt labels.csv"),
    "other label": ("labels.csv", 3, "no teacher has the label bankng; did you mean banking?"),
    "another method": ("labels.csv targets.mode=scores", 2, "targets.mode: scores does not use labels"),
    "another kind": ("--out texts/l.parquet", 2, "fix: --out texts/l.csv"),
    "no name": ("--out .", 2, "fix: --out labels.csv"),
    "no suffix": ("--out l", 2, "--out l does not end in .csv"),
    "count": ("labels.csv --count 50", 2, "fix: omit --count; for texts after these labels, write labels=./labels.csv"),
    "seed": ("labels.csv --seed 0", 2, "`amalgam label FILE` takes no --seed: it writes no texts to label"),
    "count and out": ("labels.csv --out l.csv --count 5", 2, "takes no --count or --out: it"),
    "no file": ("--out more.csv targets.mode=scores", 2, "targets.mode: scores does not use labels"),
    "existing": ("--count 5", 2, "or name another file with --out"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_label_refuses_a_file_before_any_stage_runs(fresh: Workspace, fault: str) -> None:
    arguments, code, message = FAULTS[fault]
    write(fresh, [(fresh.texts()[0][0], "bankng")])
    (fresh.folder / "amalgam.csv").write_text("body,sort\na,b\n")
    (fresh.folder / "labels.txt").write_text("text,label\na,law\n")
    assert message in fresh.refusal(code, "label", *arguments.split())
    assert not list(fresh.artifacts.rglob("*.parquet"))


def test_a_file_in_a_fix_is_relative_to_the_experiment_file(fresh: Workspace) -> None:
    arguments = ("workspace/labels.csv", "--count", "5", "-c", "workspace/amalgam.yaml")
    assert "write labels=./labels.csv" in amalgam("label", *arguments, folder=fresh.folder.parent).err


def test_label_takes_the_labels_of_the_corpus(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    effect = workspace("label", "corpus", *AMALGAM)
    assert "120 labels" in effect.out
    assert "labels=corpus" in effect.out
    experiment = Experiment.load(workspace.config, AMALGAM, quiet=True)
    assert experiment.compare_labels("corpus").labels == 120
    monkeypatch.setenv("HOME", str(workspace.folder))
    with pytest.raises(AmalgamError, match=r"nope\.csv does not exist") as refused:
        experiment.compare_labels("~/nope.csv")
    assert "~" not in str(refused.value)


def test_gold_labels_that_chose_the_teacher_do_not_measure_the_choice(workspace: Workspace) -> None:
    rows = workspace.texts()
    write(workspace, rows[:50])
    result = workspace("run", *AMALGAM, "labels=labels.csv", "corpus.test=null")
    assert re.search(r"right teacher chosen: all \d+\.\d % \(n=70\)", result.err)
    numbers = workspace.numbers()
    quality = numbers["target_quality"]
    assert (quality["labelled"], quality["choice"]["n"], quality["targets"]["labelled"]) == (120, 70, 70)
    everything = workspace("run", *AMALGAM, "labels=corpus", "corpus.test=null")
    numbers = workspace.numbers()
    assert numbers["target_quality"]["choice"]["n"] == 0
    assert "no sampled training text has a gold label of a teacher outside `labels`" in numbers["summary"][1]
    assert "right teacher chosen" not in everything.err
    assert workspace.manifest("train-student")["facts"]["selected_by"].endswith("targets, gold labels among them")


# ---- ids


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "polars", "pandas"])
def test_whole_numbers_are_ids_in_the_texts_and_in_the_labels(fresh: Workspace, kind: str) -> None:
    numbered = pl.DataFrame(fresh.texts(), schema=["text", "label"], orient="row").with_row_index("number")
    numbered = numbered.cast({"number": pl.Int64})
    numbered.write_parquet(fresh.folder / "texts/train.parquet")
    fresh.edit("train: texts/train.csv", "train: texts/train.parquet\n  id: number")
    fresh.edit("  test: texts/test.csv\n", "")
    labels = numbered.select("number", "label").head(6)
    if kind in {"parquet", "jsonl"}:
        write_file = labels.write_parquet if kind == "parquet" else labels.write_ndjson
        write_file(fresh.folder / f"labels.{kind}")
        fresh("plan", f"labels=labels.{kind}")
        assert "6 labels" in fresh("label", f"labels.{kind}", *AMALGAM).out
        labels.head(1).with_columns(number=500).write_parquet(fresh.folder / "other.parquet")
        assert "row 1: no training text has the id 500" in fresh.attempt("plan", "labels=other.parquet").err
        return
    experiment = Experiment.load(fresh.config, AMALGAM, quiet=True)
    assert experiment.compare_labels(labels if kind == "polars" else labels.to_pandas()).labels == 6


def test_each_id_of_a_text_that_occurs_twice_labels_it(fresh: Workspace) -> None:
    rows = [(str(number), text, label) for number, (text, label) in enumerate(fresh.texts())]
    write_csv(fresh.folder / "texts/train.csv", ("number", "text", "label"), [*rows, ("twice", *rows[3][1:])])
    fresh.edit("train: texts/train.csv", "train: texts/train.csv\n  id: number")
    fresh.edit("  test: texts/test.csv\n", "")
    other = next(label for _, _, label in rows if label != rows[3][2])
    refusals = {
        f"3,{rows[3][2]}\ntwice,{other}": f"row 3: twice has two labels: {other} here, {rows[3][2]} in row 2",
        f"thrice,{other}": "row 2: no training text has the id thrice",
    }
    for _ in ("before read-corpus", "after it"):
        for content, message in refusals.items():
            (fresh.folder / "ids.csv").write_text(f"number,label\n{content}\n")
            assert message in fresh.attempt("plan", "labels=ids.csv").err
        for identity in ("3", "twice"):
            (fresh.folder / "ids.csv").write_text(f"number,label\n{identity},{other}\n")
            assert "ids.csv" not in fresh("plan", "labels=ids.csv").err
        fresh("build-targets", "labels=ids.csv")
        assert fresh.targets()[text_key([rows[3][1]])] == ([float(label == other) for label in LABELS], 1.0)
    (fresh.folder / "ids.csv").write_text(f"number,label\n3,{other}\n")
    assert "build-targets" not in fresh.stale("labels=ids.csv")


def test_ids_in_the_labels_alone_are_refused_with_the_field_of_ids(workspace: Workspace) -> None:
    path = workspace.folder / "labels.csv"
    path.write_text("id,label\n3,law\n")
    refused = workspace.attempt("plan", "labels=labels.csv")
    assert (refused.code, "no column text in labels.csv" in refused.err) == (3, True)
    assert "fix: set corpus.id: id, if the texts have this column; else add the column text" in refused.err
    path.write_text("number,Text,label\n3,a text,law\n")
    assert "fix: rename a column to text: Text\n" in workspace.attempt("plan", "labels=labels.csv").err


def test_an_id_beyond_the_limit_of_the_corpus_has_no_training_text(fresh: Workspace) -> None:
    numbered = pl.DataFrame(fresh.texts(), schema=["text", "label"], orient="row").with_row_index("number")
    numbered.write_csv(fresh.folder / "texts/train.csv")
    fresh.edit("train: texts/train.csv", "train: texts/train.csv\n  id: number\n  limit: 50")
    fresh.edit("  test: texts/test.csv\n", "")
    numbered.select("number", "label").write_csv(fresh.folder / "ids.csv")
    for command in ("plan", "build-targets"):
        assert "ids.csv: 70 problems" in fresh.attempt(command, "labels=ids.csv").err


# ---- labels


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_scores_of_labels_are_not_read_and_a_note_says_so(workspace: Workspace, suffix: str) -> None:
    rows = pl.DataFrame(workspace.texts()[:4], schema=["text", "label"], orient="row")
    for name, frame in {"plain": rows, "scored": rows.with_columns(confidence=0.6)}.items():
        path = workspace.folder / f"{name}.{suffix}"
        getattr(frame, {"csv": "write_csv", "jsonl": "write_ndjson", "parquet": "write_parquet"}[suffix])(path)
        note = f"{path.name}: the column confidence is not read: every label counts as certain"
        assert (note in workspace("plan", f"labels={path.name}").err) == (name == "scored")


def test_blanks_around_a_label_do_not_count(workspace: Workspace) -> None:
    (first, label), (second, other) = workspace.texts()[:2]
    write(workspace, [(first, label), (second, other)])
    workspace("build-targets", "labels=labels.csv")
    write(workspace, [(first, f"{label}  "), (second, f" {other}"), (first, label)])
    assert "build-targets" not in workspace.stale("labels=labels.csv")


def test_the_label_of_unknown_texts_is_a_hint_too(fresh: Workspace) -> None:
    write(fresh, [fresh.texts()[0], (fresh.texts()[1][0], "None"), (fresh.texts()[2][0], "xyz")])
    refused = fresh.attempt("plan", "labels=labels.csv", "corpus.unknown=none")
    assert "row 3: no teacher has the label None; did you mean none?" in refused.err
    assert "the labels are banking, computing, cooking, football, gardening, law, medicine, music, none" in refused.err
    skipped = fresh("label", "labels.csv", "corpus.unknown=none", "corpus.on_bad_row=skip", *AMALGAM)
    assert "with a label of no teacher (None: did you mean none?, xyz)" in skipped.err


def test_blanks_around_a_label_do_not_count_where_the_experiment_lists_its_labels(workspace: Workspace) -> None:
    listed = (f"corpus.labels={json.dumps(LABELS)}", "corpus.rename={Law: law}", "labels=labels.csv")
    texts = [text for text, _ in workspace.texts()[:4]]
    write(workspace, list(zip(texts, ["music", "banking", "law", LABELS[2]], strict=True)))
    workspace("build-targets", *listed)
    write(workspace, list(zip(texts, ["music ", " banking", "Law  ", " 2"], strict=True)))
    assert "build-targets" not in workspace.stale(*listed)
    write(workspace, [*zip(texts, ["music ", "bankng ", "law", "8 "], strict=True)])
    refused = workspace.attempt("plan", *listed)
    assert "labels.csv: 2 problems" in refused.err
    assert "row 3: field label: bad label: bankng" in refused.err


def test_blanks_around_a_label_of_a_teacher_do_not_count(fresh: Workspace) -> None:
    rename = 'teachers=[{model: ./models/first, rename: {banking: " banking "}}]'
    write(fresh, [(text, "banking") for text, label in fresh.texts() if label == "banking"])
    assert "no teacher has" not in fresh("plan", rename, "labels=labels.csv", "corpus.test=null").err


def test_a_label_in_other_case_gets_a_rename_as_fix(workspace: Workspace) -> None:
    rows = [(text, label.upper()) for text, label in workspace.texts()[:30]]
    write(workspace, rows)
    refused = workspace.attempt("plan", "labels=labels.csv")
    fix = refused.err.splitlines()[-1]
    assert fix.startswith('fix: set corpus.rename: {"')
    assert fix.endswith("}, or correct these rows")
    rename = re.sub(r"^fix: set corpus.rename: (.*), or correct these rows", r"corpus.rename=\1", fix)
    assert "30 labels" in workspace("label", "labels.csv", rename, *AMALGAM).out
    write(workspace, [*rows, ("no such text", rows[0][1].lower())])
    refused = workspace.attempt("plan", "labels=labels.csv")
    assert "; correct or remove the other rows; `amalgam label" in refused.err


# ---- a second file


def test_the_examples_of_help_make_two_batches(workspace: Workspace) -> None:
    first, compare, second = examples_of("label")
    workspace(*first)
    fill(workspace.folder / "labels.csv", dict(workspace.texts()))
    assert "50 labels\n" in workspace(*compare).out
    assert "50 random texts to label, after 50 earlier labels" in workspace(*second).out
    assert len(read_csv(workspace.folder / "more.csv")) == 100


def test_texts_to_label_follow_the_earlier_labels_in_one_file(workspace: Workspace) -> None:
    truth = dict(workspace.texts())
    workspace("label", "--count", "20", *AMALGAM)
    first = read_csv(workspace.folder / "labels.csv")
    fill(workspace.folder / "labels.csv", truth, -1)
    announced = workspace("label", "--count", "30", "--out", "more.csv", *AMALGAM, "labels=labels.csv")
    assert "more.csv: 31 random texts to label, after 19 earlier labels" in announced.out
    second = read_csv(workspace.folder / "more.csv")
    assert len({row["key"] for row in second}) == 50
    assert {row["key"] for row in first} == {row["key"] for row in second[:20]}
    assert {row["why"] for row in second} == {"random"}
    assert [row["label"] for row in second[20:]] == [""] * 30
    assert sum(row["label"] == truth[row["text"]] for row in second) == 19
    fill(workspace.folder / "more.csv", truth)
    effect = workspace("label", "more.csv", *AMALGAM, "labels=labels.csv", "--json").json
    assert (effect["labels"], effect["earlier"], effect["dropped"]) == (50, 19, 0)
    assert 0 <= effect["right_before"] <= 31
    lines = workspace("label", "more.csv", *AMALGAM, "labels=labels.csv").out
    assert "50 labels; the experiment has 19 earlier labels\n" in lines
    assert "of the 31 newly labelled texts" in lines
    assert "share with earlier labels" in lines
    assert "targets without labels" not in lines
    assert "amalgam run labels=./more.csv" in lines


def test_earlier_labels_that_another_file_lacks_are_counted(workspace: Workspace) -> None:
    rows = workspace.texts()
    write(workspace, rows[:6])
    write(workspace, rows[4:9], "other.csv")
    lines = workspace("label", "other.csv", "labels=labels.csv", *AMALGAM).out
    assert "4 earlier labels would no longer be used" in lines
    assert "newly" not in workspace("label", "./labels.csv", "labels=labels.csv", *AMALGAM).out


def test_texts_of_a_file_without_reasons_are_random_only_if_drawn(workspace: Workspace) -> None:
    write(workspace, workspace.texts()[:3])
    workspace("label", "--count", "2", "--seed", "1", "--out", "more.csv", *AMALGAM, "labels=labels.csv")
    assert [row["why"] for row in read_csv(workspace.folder / "more.csv")] == ["", "", "", "random", "random"]


def test_texts_that_were_selected_keep_the_reason_or_become_random_as_often_as_others(workspace: Workspace) -> None:
    """The texts without a label are easier than all texts if student and ensemble differ on the labelled ones."""
    rows = [(*row, "student and ensemble differ") for row in workspace.texts()[:60]]
    write(workspace, rows)
    workspace("label", "--count", "30", "--out", "more.csv", *AMALGAM, "labels=labels.csv")
    reasons = [row["why"] for row in read_csv(workspace.folder / "more.csv")]
    assert set(reasons[:60]) == {"student and ensemble differ", "random"}
    assert 15 < reasons[:60].count("random") < 45
    assert reasons[60:] == ["random"] * 30


def test_texts_to_label_are_no_test_texts(workspace: Workspace) -> None:
    rows = workspace.texts()
    workspace.write(rows[:10], "test")
    workspace("label", "--count", "1000", *AMALGAM)
    assert {row["text"] for row in read_csv(workspace.folder / "labels.csv")} == {text for text, _ in rows[10:]}
    workspace.write(rows, "test")
    err = workspace.refusal(2, "label", "--count", "5", "--out", "more.csv", *AMALGAM)
    assert "every training text has a label or is a test text" in err


def test_labels_of_the_corpus_that_no_teacher_has_are_noted_if_bad_rows_are_skipped(fresh: Workspace) -> None:
    rows = fresh.texts()
    fresh.write([(text, "maths" if row < 3 else label) for row, (text, label) in enumerate(rows)])
    result = fresh("build-targets", "labels=corpus", "corpus.on_bad_row=skip")
    note = "note: 3 train texts learned without a label: no teacher has the label maths"
    assert result.err.count(note) == 1
    assert "train texts" not in fresh("build-targets", "corpus.on_bad_row=skip").err
    plan = fresh("plan", "labels=corpus", "corpus.on_bad_row=skip", "targets.temperature=0.5")
    assert (plan.out + plan.err).count("maths") == 1


# ---- labels of texts that the corpus lost


def test_skip_leaves_out_labels_of_lost_texts_and_of_removed_teachers(workspace: Workspace) -> None:
    kept = workspace.texts()[:6]
    lost = [("a text of last month", "law"), (workspace.texts()[7][0], "taxes"), (" ", "law")]
    write(workspace, [*kept, *lost])
    err = workspace.refusal(3, "plan", "labels=labels.csv")
    assert err.endswith("; or leave such rows out: corpus.on_bad_row=skip\n")
    note = "1 of no training text, 1 with a label of no teacher (taxes), 1 without a usable text or label"
    noted = workspace("build-targets", "labels=labels.csv", "corpus.on_bad_row=skip")
    assert noted.err.count(f"note: labels.csv: 3 rows left out: {note}") == 1
    quiet = workspace("build-targets", "labels=labels.csv", "corpus.on_bad_row=skip", "targets.mode=hard", "--quiet")
    assert quiet.err.count(f"note: labels.csv: 3 rows left out: {note}") == 1
    write(workspace, kept)
    assert "build-targets" not in workspace.stale("labels=labels.csv", "corpus.on_bad_row=skip")


def test_skip_keeps_refusing_contradictions_and_a_file_of_lost_texts_only(fresh: Workspace) -> None:
    skip = ("plan", "labels=labels.csv", "corpus.on_bad_row=skip")
    text = fresh.texts()[0][0]
    write(fresh, [(text, "law"), (text, "music"), ("a text of last month", "law")])
    contradicting = fresh.attempt(*skip)
    assert (contradicting.code, "has two labels" in contradicting.err) == (3, True)
    assert "labels.csv: 1 problem\n" in contradicting.err
    write(fresh, [(text, "law"), (text, "music")])
    assert "on_bad_row" not in fresh.attempt(*skip[:2]).err
    write(fresh, [("a text of last month", "law")])
    assert "row 2: no training text is a text of last month" in fresh.attempt(*skip).err
    write(fresh, [("a text of last month", "law"), fresh.texts()[0]])
    fresh(*skip)


def test_a_file_saved_by_a_spreadsheet_in_another_coding_is_read_by_its_keys(fresh: Workspace) -> None:
    rows = [(text_key([text]).hex(), label) for text, label in fresh.texts()[:30]]
    rows[0] = (rows[0][0], "LAW")
    lines = ["key;text;label;why", *(f"{key};caf\xe9;{label};random" for key, label in rows)]
    (fresh.folder / "labels.csv").write_bytes("\r\n".join(lines).encode("cp1252"))
    assert "labels.csv: 1 problem\n" in fresh.attempt("plan", "labels=labels.csv").err
    result = fresh("label", "labels.csv", "corpus.on_bad_row=skip", *AMALGAM)
    assert "1 row left out: 1 with a label of no teacher (LAW: did you mean law?)" in result.err
    assert "29 labels" in result.out


def test_random_labels_of_no_teacher_are_counted_as_left_out(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_labels, "LEAST_ESTIMATION", 10)
    workspace("label", "--count", "20", *AMALGAM)
    outside = [row["text"] for row in read_csv(workspace.folder / "labels.csv")][:6]
    fill(workspace.folder / "labels.csv", dict(workspace.texts()) | dict.fromkeys(outside, "taxes"))
    settings = ("labels=labels.csv", "corpus.on_bad_row=skip", "corpus.test=null", *AMALGAM)
    run = workspace("run", *settings)
    assert "14 labelled training texts, picked at random; 6 more have a label of no teacher" in run.out
    cautions = workspace.numbers()["verdict"]["cautions"]
    assert any(text.startswith("6 of 20 labelled training texts have a label of no teacher") for text in cautions)
    path = workspace.folder / "labels.csv"
    first = next(line for line in path.read_text().splitlines(keepends=True) if ",taxes," in line)
    path.write_text(path.read_text().replace(first, ""))
    assert "report" in workspace.stale(*settings)
    effect = workspace("label", "labels.csv", "corpus.on_bad_row=skip", *AMALGAM).out
    assert "accuracy on 14 labelled texts, picked at random; 5 more have a label of no teacher" in effect


@pytest.mark.parametrize("labelled", [0, 1])
def test_the_share_of_texts_of_no_label_needs_no_label_of_a_teacher(workspace: Workspace, labelled: int) -> None:
    rows = workspace.texts()[:50]
    write(workspace, [*rows[:labelled], *((text, "none") for text, _ in rows[labelled:])])
    settings, n = ["corpus.unknown=none", *AMALGAM], 50 - labelled
    share = f"{n} of 50 texts fit no label: {2 * n}.0"
    effect = workspace("label", "labels.csv", *settings).out
    assert share in effect
    assert ("the right target" in effect) == bool(labelled)
    settings += ["labels=labels.csv", "corpus.test=null"]
    assert share in workspace("run", *settings).out
    numbers = workspace.numbers()
    assert (numbers["unknown_share"]["unknown"], numbers["label_estimates"]) == (n, None)
    assert any(text.startswith(share) for text in numbers["verdict"]["cautions"])
    assert share in (workspace.folder / "reports/student.html").read_text().replace("\u00a0", " ")


def test_labels_that_are_older_than_a_teacher_are_noted(workspace: Workspace) -> None:
    rows = [row for row in workspace.texts() if row[1] in TEACHER_LABELS["first"]]
    settings = ("labels=labels.csv", *AMALGAM)
    note = "note: no text of labels.csv has a label of teacher second alone"
    write(workspace, rows[:29])
    assert note not in workspace("build-targets", *settings).err
    write(workspace, rows[:30])
    run = workspace("report", *settings)
    assert note in run.err
    numbers = workspace.numbers()
    given, tested = numbers["given_labels"], numbers["student_quality"]["classes"]
    assert sum(row["n"] for row in given) == sum(row["ensemble"] for row in given) == 30
    assert {row["label"] for row in given if row["n"]} <= {*TEACHER_LABELS["first"]}
    assert sum(row["ensemble"] for row in tested) == numbers["evaluation"]["n"]
    second = next(row for row in workspace.texts() if row[1] in TEACHER_LABELS["second"])
    write(workspace, [*rows[:30], second])
    assert note not in workspace("report", *settings).err
    assert workspace.numbers()["given_labels"] == []


# ---- the texts to label of a report


def test_texts_to_label_are_random_ones_and_random_ones_on_which_student_and_ensemble_differ() -> None:
    rng = np.random.default_rng(0)
    student, ensemble = rng.dirichlet(np.ones(4), 1000), rng.dirichlet(np.ones(4), 1000)
    chosen = select(student, ensemble)
    assert chosen == select(student, ensemble)
    assert len({row for row, _ in chosen}) == len(chosen) == 200
    by_reason = {why: [row for row, reason in chosen if reason == why] for _, why in chosen}
    assert {why: len(own) for why, own in by_reason.items()} == {"student and ensemble differ": 100, "random": 100}
    differ = np.flatnonzero(student.argmax(axis=1) != ensemble.argmax(axis=1))
    assert by_reason["student and ensemble differ"] == differ[differ >= 100][:100].tolist()


@pytest.mark.parametrize("wrong", [0.02, 0.5])
def test_random_texts_to_label_estimate_the_accuracy(wrong: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        student, gold = rng.dirichlet(np.ones(4), 1000), np.empty(1000, int)
        gold[:] = student.argmax(axis=1)
        errors = rng.random(1000) < wrong
        gold[errors] = (gold[errors] + 1) % 4
        chosen = select(student, np.eye(4)[gold])  # the ensemble disagrees exactly on errors
        assert 190 <= len(chosen) <= 200
        random = [row for row, why in chosen if why == "random"]
        assert sorted(random) == list(range(len(random)))  # the first rows are a random sample
        assert len(random) >= 100


def test_few_texts_are_all_labelled_and_no_ensemble_is_needed() -> None:
    student = np.random.default_rng(0).dirichlet(np.ones(3), 30)
    assert sorted(row for row, _ in select(student, None)) == list(range(30))


def test_texts_that_have_a_label_are_not_labelled_again() -> None:
    rng = np.random.default_rng(0)
    student, ensemble = rng.dirichlet(np.ones(4), 1000), rng.dirichlet(np.ones(4), 1000)
    labelled = set(range(0, 1000, 3))
    chosen = [row for row, _ in select(student, ensemble, labelled)]
    assert len(set(chosen)) == 200
    assert not labelled & set(chosen)
    assert select(student, ensemble, range(1000)) == select(student, ensemble, (), range(1000)) == []
    assert [row for row, _ in select(student, None, labelled)] == [row for row in range(1000) if row % 3][:200]


@pytest.mark.parametrize("texts", [2000, 500])
def test_random_texts_are_random_after_labels_of_texts_on_which_student_and_ensemble_differ(texts: int) -> None:
    """Without those the others are easier; if the texts between them are needed, they are among the random ones."""
    rng, errors = np.random.default_rng(0), []
    for _ in range(20):
        differ = rng.random(texts) < 0.2
        student, ensemble = np.eye(2)[np.zeros(texts, int)], np.eye(2)[differ.astype(int)]
        first = select(student, ensemble)
        random, differing = ({row for row, own in first if (own == "random") == which} for which in (True, False))
        second = select(student, ensemble, random, differing)
        assert sum(row not in differing for row, _ in second) >= 150
        assert not random & {row for row, _ in second}
        assert texts == 500 or not differing & {row for row, _ in second}
        errors.append(np.mean([differ[row] for row, own in second if own == "random"]) - differ.mean())
    assert abs(np.mean(errors)) < 0.03


def test_the_columns_are_those_of_the_corpus() -> None:
    plain = Corpus(train=["a.csv"])
    assert header_of(plain) == ["key", "text", "label", "student", "ensemble", "why"]
    pairs = Corpus(train=["a.csv"], text=["premise", "why"], id="number", label="gold")
    assert header_of(pairs) == ["key", "number", "premise", "why", "gold", "student", "ensemble", "why_"]


def test_a_linear_map_predicts_the_held_out_texts_from_the_others_alone() -> None:
    rng = np.random.default_rng(0)
    labels, is_held_out = rng.integers(0, 3, 400), rng.random(400) < 0.3
    features = np.eye(8)[labels] + rng.normal(0, 0.1, (400, 8))
    hidden = np.where(is_held_out, 3, labels)  # a label that only held-out texts have
    assert (linear_labels(features, hidden, is_held_out, 4) == labels[is_held_out]).mean() > 0.99


# ---- in Python


def test_python_has_every_estimate_that_is_printed(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weigh, "AGREEING", -1.0)  # else the weights are MUKA's
    options = [*AMALGAM, "corpus.test=null", "student.held_out=0.4"]
    experiment = Experiment.load(workspace.config, options, quiet=True)
    experiment.run("weigh-teachers", force=True)
    frame = experiment.run().estimates
    assert frame is not None
    assert frame["system"].to_list() == ["student", "targets", "ensemble", "MUKA's targets"]
    systems = workspace.numbers()["unlabelled"]["estimates"]["systems"]
    assert frame.rows() == [
        (name, *(system[key] for key in ("n", "mean", "low", "high")))
        for name, system in zip(frame["system"], systems, strict=True)
    ]
    with pytest.raises(AmalgamError, match=r"experiment.run\(\).estimates"):
        _ = experiment.evaluation

    labels = experiment.label(10)
    truth = dict(workspace.texts())
    filled = labels.with_columns(label=labels["text"].replace_strict(truth))
    effect = experiment.compare_labels(filled)
    assert effect.estimates is not None
    assert effect.estimates.frame.row(0)[:2] == ("targets without labels", 10)
    filled.write_csv(workspace.folder / "filled.csv")
    printed = workspace("label", "filled.csv", *options).out
    assert printed.startswith(repr(effect))
    assert "<td" in effect._repr_html_()


def test_python_takes_a_file_of_labels(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    write(workspace, workspace.texts()[:3])
    monkeypatch.chdir(workspace.folder)
    experiment = Experiment(["./models/first", "./models/second"], "texts/train.csv", labels="labels.csv", quiet=True)
    assert experiment.config.labels == "./labels.csv"
    with pytest.raises(AmalgamError, match=r"(?s)lables.csv does not exist.*; `experiment.label"):
        Experiment(["./models/first", "./models/second"], "texts/train.csv", labels="lables.csv", quiet=True)
