"""Bad input through the command: the exit code and three lines, what, where and fix; nothing left half-done."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from amalgam.pipeline.config.schema import Corpus
from amalgam.pipeline.errors import ModelError
from amalgam.stages.common.corpus import rename_fix
from amalgam.stages.common.models.resolve import place_of
from amalgam.tests.workspaces import TEACHER_LABELS, Workspace, edit_json, largest_difference, shift_weights

TRAIN = "texts/train.csv"
HEADLESS = "a base model without a head"


@dataclass(frozen=True)
class Case:
    """A file written over the training texts, or overrides; the exit code, and names that the message must contain."""

    code: int
    named: tuple[str, ...]
    content: bytes | None = None
    name: str = "texts/train.csv"
    overrides: tuple[str, ...] = ()


CASES = {
    "not UTF-8": Case(3, ("not UTF-8", "train.csv", "iconv"), b"text,label\ncaf\xe9 au lait,law\n"),
    "a broken line of JSON": Case(
        3, ("train.jsonl", "2"), b'{"text": "one", "label": "law"}\n{"text": "tw\n', "texts/train.jsonl"
    ),
    "a lone surrogate": Case(3, ("train.jsonl", "1"), b'{"text": "one \\ud83d"}\n', "texts/train.jsonl"),
    "an id given as a number and as text": Case(
        3,
        ("1 in train.jsonl row 1", "corpus.id: auto"),
        b'{"text": "one", "id": 1}\n{"text": "two", "id": "1"}\n',
        "texts/train.jsonl",
        ("corpus.id=id", "corpus.test=null"),
    ),
    "an id given twice": Case(
        3, ("7", "corpus.id: auto"), b"text,id\none,7\ntwo,7\n", overrides=("corpus.id=id", "corpus.test=null")
    ),
    "a row without text": Case(3, ("train.csv", "on_bad_row: skip"), b"text,label\n,law\ntwo,law\n"),
    "a blank text": Case(3, ("train.csv", "on_bad_row: skip"), b"text,label\n   ,law\ntwo,law\n"),
    "a ragged row": Case(3, ("train.csv",), b"text,label\none,law\ntwo,law,three\n"),
    "a comma in a csv of one column": Case(3, ("train.csv row 3", ".tsv"), b"text\none\ntwo, three\n"),
    "an unclosed quote": Case(3, ("train.csv",), b'text,label\n"one,law\ntwo,law\n'),
    "columns separated otherwise": Case(3, ("'|'", ".tsv"), b"text|label\none|law\n"),
    "plain text": Case(3, ("train.txt", "csv"), b"one\ntwo\n", "texts/train.txt"),
    "a label that is not allowed": Case(
        3,
        ("train.csv", "banking"),
        b"text,label\none,law\ntwo,lawx\n",
        overrides=("corpus.labels=[banking, law]", "targets.mode=supervised"),
    ),
    "a text too long, and that an error": Case(
        3, ("4 tokens", "cache.on_long_text"), overrides=("cache.on_long_text=error", "cache.max_tokens=4")
    ),
    "one column as both texts of a pair": Case(2, ("corpus.text", "twice"), overrides=("corpus.text=[text, text]",)),
    "a name that leads outside": Case(2, ("student.name", "letters"), overrides=("student.name=../../x",)),
    "a secret": Case(2, ("secret", "hf auth login"), overrides=("student.encoder=hf_abcdefghijklmnopqrstuv",)),
    "more processes than there are": Case(2, ("2 processes", "torchrun"), overrides=("execution.processes=2",)),
    "more passes than are cached": Case(2, ("targets.passes",), overrides=("targets.passes=9",)),
    "a rename of no label": Case(2, ("'bankink'", "banking"), overrides=("teachers.0.rename={bankink: money}",)),
    HEADLESS: Case(
        2,
        ("no classification head", "classifier", "fine-tuned"),
        overrides=("teachers.1.model=./models/encoder", "teachers.1.labels=[k, l]", "corpus.on_bad_row=skip"),
    ),
    "code from a repository, unpinned": Case(
        2, ("trust_remote_code", "full commit"), overrides=("teachers.0.trust_remote_code=true",)
    ),
}


def assert_three_lines(err: str) -> None:
    """What (several problems: one indented line each), where, fix; nothing after them."""
    lines = [line for line in err[err.index("error: ") :].splitlines() if not line.startswith("  ")]
    assert [line.split(":")[0] for line in lines] in (["error", "where", "fix"], ["error", "fix"])
    assert "Traceback" not in err


@pytest.mark.parametrize("name", CASES)
def test_unusable_input_is_refused_in_three_lines(fresh: Workspace, name: str) -> None:
    case = CASES[name]
    if case.content is not None:
        (fresh.folder / TRAIN).unlink()
        (fresh.folder / case.name).write_bytes(case.content)
        fresh.edit(TRAIN, case.name)
    result = fresh.attempt("cache-teachers", *case.overrides)
    assert (result.code, result.out) == (case.code, ""), result.err
    assert_three_lines(result.err)
    for piece in case.named:
        assert piece in result.err
    assert not (fresh.artifacts / "build-targets").exists()
    assert name == HEADLESS or not fresh.units()  # that it has no head is known when its turn comes
    assert sorted(path.name for path in fresh.folder.parent.iterdir()) == ["workspace"]


def test_a_proposed_file_is_quoted_for_the_shell(fresh: Workspace) -> None:
    fresh.config.rename(fresh.folder / "my amalgam.yaml")
    (fresh.folder / "a b").mkdir()
    assert "`amalgam init 'a b'`" in fresh.attempt("plan", "-c", "a b").err
    assert "did you mean -c 'my amalgam.yaml'?" in fresh.attempt("plan", "-c", "my amalgam.yml").err


def test_all_problems_of_the_file_are_listed_at_once_with_their_lines(fresh: Workspace) -> None:
    fresh.edit("  mode: soft", "  mode: sfot\n  temprature: 1")
    fresh.edit("  epochs: 1", "  epochs: 0")
    err = fresh.refusal(2, "plan", "student.laers=2")
    assert "4 problems" in err
    for piece in (
        "line 15, targets.mode",
        "line 16, targets.temprature",
        "'temperature'",
        "student.epochs",
        "'layers'",
    ):
        assert piece in err


# ---- rows that may be skipped


def test_unusable_rows_are_left_out_and_counted_with_skip(fresh: Workspace) -> None:
    train = fresh.folder / "texts/train.csv"
    fresh.write([*fresh.texts()[:60], ("", "law"), ("   ", "law")])
    train.write_bytes(train.read_bytes() + b"caf\xe9,law\n")
    result = fresh("cache-teachers", "corpus.on_bad_row=skip")
    assert "60 texts, 3 rows skipped" in result.err
    [skipped] = fresh.artifacts.glob("read-corpus/part-*/train-*/skipped.parquet")
    assert f"2 empty, 1 not UTF-8: {skipped}\n" in result.err
    note = "note: 1 train row left out, not UTF-8: re-encode it: iconv -f cp1252 -t utf-8 FILE > utf8-FILE\n"
    assert (note in result.err, "left out, empty" in result.err) == (True, False)
    assert note not in fresh("cache-teachers", "corpus.on_bad_row=skip").err  # printed once
    assert "skipped" not in fresh("read-corpus", "corpus.on_bad_row=skip", "--quiet").err
    quiet = fresh("read-corpus", "corpus.on_bad_row=skip", "--quiet", "--force").err
    [skipped] = fresh.artifacts.glob("read-corpus/part-*/train-*/skipped.parquet")
    assert quiet == f"note: 3 train rows skipped: 2 empty, 1 not UTF-8: {skipped}\n"


def test_test_texts_that_are_also_in_train_are_counted(fresh: Workspace) -> None:
    fresh.write([*fresh.texts(), *fresh.texts("test")[:3]])
    assert "3 of 40 test texts are also in corpus.train: test.csv row 2, test.csv row 3" in fresh("read-corpus").err


def test_labelled_training_texts_as_test_texts_need_no_removal(fresh: Workspace) -> None:
    fresh.write([*fresh.texts(), *fresh.texts("test")])
    notes = fresh("read-corpus").err
    assert "all 40 test texts are also in corpus.train: the accuracy on new texts can be lower" in notes
    assert "remove them" not in notes


def test_a_column_of_numbers_as_texts_is_remarked(fresh: Workspace) -> None:
    remark = "note: the train texts are numbers, such as "
    assert remark not in fresh("read-corpus").err
    fresh.write([(f"{number / 4}", "law") for number in range(50)])
    assert remark in fresh("read-corpus").err


def test_the_same_text_twice_is_one_text(fresh: Workspace) -> None:
    fresh.write([*fresh.texts(), *fresh.texts()[:9]])
    assert "120 texts, 9 duplicate rows" in fresh("read-corpus").err


def test_an_empty_file_among_others_is_left_out_with_a_note_where_bad_rows_are(fresh: Workspace) -> None:
    fresh.edit("train: texts/train.csv", "train: texts/train*.csv")
    for name, content in (("train-2.csv", ""), ("train-3.csv", "text,label\n"), ("train-4.csv", "text,label\n,\n")):
        (fresh.folder / "texts" / name).write_text(content)
    for command in ("plan", "read-corpus"):
        assert "no rows in train-2.csv" in fresh.refusal(3, command)
    fresh.edit("  label: label\n", "  label: label\n  on_bad_row: skip\n")
    fresh("plan")
    noted = fresh("read-corpus").err
    assert "note: no row is used of 3 train files: train-2.csv, train-3.csv, train-4.csv\n" in noted
    assert "train: 120 texts, 1 row skipped" in noted
    for command in ("plan", "read-corpus"):
        refused = fresh.attempt(command, "corpus.train=[texts/train-2.csv,texts/train-3.csv]")
        assert (refused.code, "no rows in train-2.csv" in refused.err) == (3, True), refused.err


def test_test_texts_with_different_labels_are_listed(fresh: Workspace) -> None:
    texts = fresh.texts("test")
    other = next(label for _, label in texts if label != texts[0][1])
    fresh.write([*texts, (texts[0][0], other), texts[1]], "test")
    rows = f"{texts[0][1]} in test.csv row 2, {other} in test.csv row {len(texts) + 2}"
    rule = "The most frequent label counts, else the first by name"
    assert f"note: 1 test text has different labels: {rows}. {rule}\n" in fresh("read-corpus").err
    fresh.edit("teachers:", "train_teachers: {encoder: ./models/encoder, groups: 2, texts: texts/test.csv}\nunused:")
    fresh.config.write_text(fresh.config.read_text().partition("unused:")[0])
    assert "note: 1 train_teachers text has different labels: " in fresh("read-corpus").err


def test_one_text_is_no_plural(fresh: Workspace) -> None:
    (text, label), *rows = fresh.texts()
    other = next(other for _, other in rows if other != label)
    fresh.write([(text, label), *rows, (text, other)])
    assert "120 texts, 1 duplicate row, 1 text with contradicting labels" in fresh("read-corpus").err


def test_truncated_texts_are_counted_for_each_teacher(fresh: Workspace) -> None:
    result = fresh("cache-teachers", "cache.max_tokens=8")
    assert re.search(r"teachers? first.*: \d+ .*texts", result.err)


def test_truncated_texts_of_predict_are_counted(workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("short\n" + "a long text " * 100)
    for source in (["--input", str(tmp_path / "long.txt")], ["short", "a long text " * 100, "--json"]):
        assert "1 text was longer than 32 tokens, and truncated" in workspace("predict", *source).err
    assert "truncated" not in workspace("predict", "short").err


def test_truncated_texts_that_were_removed_are_not_counted(fresh: Workspace) -> None:
    def truncated(count: int) -> int:
        fresh.write([*texts, *long[:count]])
        fresh("cache-teachers")
        return int(fresh.manifest("cache-teachers")["facts"]["cut"]["first"])

    texts = fresh.texts()
    long = [(" ".join([text] * 12), label) for text, label in texts[:3]]
    all_texts = truncated(3)
    assert [truncated(count) for count in (1, 2)] == [all_texts - 2, all_texts - 1]


def test_texts_that_a_tokenizer_cannot_read_are_counted(fresh: Workspace) -> None:
    unreadable = [(f"은행원이 대출을 심사했다 {number}", label) for number, (_, label) in enumerate(fresh.texts()[:20])]
    fresh.write([*fresh.texts(), *unreadable])
    notes = fresh("run", "student.held_out=0").err
    for model, texts in (("teacher first", 180), ("teacher second", 180), ("student.encoder", 140)):
        assert f"20 of {texts} texts are mostly unknown tokens for {model}" in notes
    fresh.write([*fresh.texts()[:120], *unreadable[:5]])
    assert "unknown tokens" not in fresh("run", "student.held_out=0").err


# ---- gold labels outside the union of the teachers' labels


def test_test_texts_of_no_label_alone_are_an_error_before_any_teacher_runs(fresh: Workspace) -> None:
    fresh.write([(text, "none") for text, _ in fresh.texts("test")], "test")
    refused = fresh.attempt("run", "corpus.unknown=none")
    assert (refused.code, "no test text has a label of a teacher: all have the label none" in refused.err) == (3, True)
    assert not list(fresh.artifacts.glob("cache-teachers/*/units/*"))


def test_a_gold_label_outside_the_union_is_an_error_before_any_teacher_runs(fresh: Workspace) -> None:
    fresh.write([*fresh.texts("test"), ("the boat left the harbour", "sailing")], "test")
    err = fresh.refusal(3, "run")
    assert "sailing" in err
    assert "where: corpus.test, column label" in err
    assert "corpus.on_bad_row: skip" in err
    assert not fresh.units()


def test_labels_that_differ_in_case_get_a_rename_as_fix(fresh: Workspace) -> None:
    fresh.write([(text, label.title()) for text, label in fresh.texts("test")], "test")
    result = fresh.attempt("run", "corpus.on_bad_row=skip")
    assert (result.code, "on_bad_row" in result.err) == (3, False)  # it is set, and no text would be left
    [renames] = re.findall(r"fix: set corpus.rename: (\{.*\})$", result.err, re.MULTILINE)
    assert json.loads(renames)["Banking"] == "banking"
    fresh("build-targets", f"corpus.rename={renames}")


def test_a_label_that_a_teacher_renames_gets_this_rename_as_fix(fresh: Workspace) -> None:
    fresh.edit("model: ./models/second", "model: ./models/second\n    rename: {law: courts, music: songs}")
    error = fresh.attempt("build-targets").err
    assert "law, music" in error
    [renames] = re.findall(r"fix: set corpus.rename: (\{.*\}), or leave", error)
    assert json.loads(renames) == {"law": "courts", "music": "songs"}


def test_a_label_that_only_looks_like_a_teachers_gets_a_rename_that_shows_the_difference() -> None:
    corpus = Corpus(train=["a.csv"])
    assert rename_fix(["cafe\u0301"], ["law", "caf\u00e9"], corpus, {}) == (
        'set corpus.rename: {"cafe\\u0301": "caf\\u00e9"}'
    )
    assert rename_fix(["CAF\u00c9"], ["law", "caf\u00e9"], corpus, {}) == 'set corpus.rename: {"CAFÉ": "café"}'


@pytest.mark.parametrize("column", ["prob_{}", "P({})", "{} score"])
def test_columns_that_add_a_text_to_labels_get_a_rename_of_their_teacher(column: str) -> None:
    bare = {column.format(label): label for label in ("law", "literature and music", "medicine")}
    fix = rename_fix(["law", "literature and music"], ["banking", *bare, "sports law"], Corpus(), {})
    assert fix == f"set `rename` of the teacher with these labels: {json.dumps(bare)}"
    assert "corpus.rename" in rename_fix(["law"], ["banking", "sports law"], Corpus(), {})


def test_a_fix_and_a_note_name_similar_and_other_labels(fresh: Workspace) -> None:
    """With on_bad_row: skip a misspelt label leaves its texts out of the test, so the note has the rename, too."""
    others = [("the boat left the harbour", "sailing"), ("the judge left the court", "Law")]
    fresh.write([*fresh.texts("test"), *others], "test")
    rename = 'set corpus.rename: {"Law": "law"}'
    refused = fresh.attempt("build-targets")
    assert f"fix: {rename}; correct or remove the other labels, or leave such texts out" in refused.err
    noted = fresh("build-targets", "corpus.on_bad_row=skip")
    names = "Law, sailing"
    assert f"no teacher has the label {names}; to keep texts of a similar label, {rename}" in noted.err


def test_numbers_as_labels_are_positions_in_a_list_to_name(fresh: Workspace) -> None:
    labels = sorted({label for _, label in fresh.texts("test")})
    fresh.write([(text, str(labels.index(label))) for text, label in fresh.texts("test")], "test")
    refused = fresh.attempt("build-targets")
    assert "fix: set corpus.labels to the names of the labels 0, 1, 2 ... in this order\n" in refused.err
    fresh("build-targets", f"corpus.labels={json.dumps(labels)}")


def test_several_labels_of_a_text_get_no_rename_as_fix(fresh: Workspace) -> None:
    fresh.write([(text, f"{label}; law") for text, label in fresh.texts("test")], "test")
    assert "fix: give each text one label: a student chooses one of all labels\n" in fresh.attempt("build-targets").err


def test_a_rename_as_fix_keeps_the_settings_that_the_file_has(fresh: Workspace) -> None:
    for part in ("train", "test"):
        fresh.write([(text, label.upper()) for text, label in fresh.texts(part)], part)
    labels = sorted({label.replace("LAW", "Law") for _, label in fresh.texts("test")})
    settings = [f"corpus.labels={json.dumps(labels)}", 'corpus.rename={"LAW": "Law"}']
    [line] = [line for line in fresh.attempt("run", *settings).err.splitlines() if line.startswith("fix: ")]
    fix = re.fullmatch(r"fix: set corpus.rename: (\{.*\}) and corpus.labels: (\[.*\])", line)
    assert fix, line
    assert json.loads(fix[1])["LAW"] == "law"
    fresh("build-targets", f"corpus.rename={fix[1]}", f"corpus.labels={fix[2]}")


def test_texts_with_such_labels_are_left_out_and_counted_with_skip(fresh: Workspace) -> None:
    sailing = [(f"the {boat} left the harbour", "sailing") for boat in ("boat", "ferry", "yacht")]
    fresh.write([*fresh.texts("test"), *sailing], "test")
    result = fresh("run", "corpus.on_bad_row=skip")
    assert re.search(r"3 test texts .*sailing", result.err)
    numbers = fresh.numbers()
    evaluation = numbers["evaluation"]
    assert (evaluation["n"], evaluation["left_out"]) == (40, 3)
    share = 100 * evaluation["systems"][evaluation["system"]]["accuracy"] * 40 / 43
    caution = f"3 of 43 labelled test texts have a label of no teacher and are not counted: of all 43, {share:.1f} %"
    assert any(text.startswith(caution) for text in numbers["verdict"]["cautions"])
    printed = " ".join((result.out + result.err).split())
    assert caution in printed
    assert "accuracy over all labels; 3 more have a label of no teacher" in printed


@pytest.mark.parametrize("unknown", ["sailing", "none"])
def test_a_student_of_gold_labels_learns_no_text_with_such_a_label(fresh: Workspace, unknown: str) -> None:
    options = ("student.method=supervised", "student.held_out=0", "corpus.on_bad_row=skip", f"corpus.unknown={unknown}")
    sailing = [(f"the {boat} left the harbour", "sailing") for boat in ("boat", "ferry", "yacht")]
    fresh.write([*fresh.texts(), *sailing])
    assert re.search(r"note: 3 train texts left out: .*sailing", fresh("train-student", *options).err)
    assert fresh.manifest("train-student")["facts"]["texts"] == len(fresh.texts()) - 3
    assert sorted(weight for _, weight in fresh.targets().values())[:4] == [0, 0, 0, 1]
    fresh.write(sailing)
    assert "sailing" in fresh.refusal(3, "train-student", *options)


def test_a_validation_part_wholly_outside_the_union_is_refused_even_with_skip(fresh: Workspace) -> None:
    fresh.write([("the boat left the harbour", "sailing")], "validation")
    err = fresh.refusal(3, "run", "corpus.validation=texts/validation.csv", "corpus.on_bad_row=skip")
    assert "sailing" in err
    assert "corpus.validation" in err


def test_a_supervised_student_without_teachers_needs_its_test_labels_in_train(fresh: Workspace) -> None:
    fresh.replace_teachers("")
    assert fresh("run", "targets.mode=supervised").code == 0
    fresh.write([*fresh.texts("test"), ("the boat left the harbour", "sailing")], "test")
    assert "sailing" in fresh.refusal(3, "run", "targets.mode=supervised")


# ---- models


def test_a_teacher_with_its_labels_in_another_order_gives_equal_targets(fresh: Workspace, built: Workspace) -> None:
    """Outputs and id2label are permuted alike; the union keeps the first teacher's order."""
    from safetensors.torch import load_file, save_file

    folder, order = fresh.folder / "models/second", [2, 0, 3, 1]
    weights = load_file(folder / "model.safetensors")
    for name in ("classifier.weight", "classifier.bias"):
        weights[name] = weights[name][order].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    names = [TEACHER_LABELS["second"][place] for place in order]
    by_name = {name: place for place, name in enumerate(names)}
    edit_json(folder / "config.json", id2label=dict(enumerate(names)), label2id=by_name)
    fresh("build-targets", "targets.passes=0")
    built_shop = built.copy(fresh.folder.parent / "as-built")
    built_shop("build-targets", "targets.passes=0")
    places = [*range(4), *(4 + order.index(place) for place in range(4))]
    ours = {key: ([target[place] for place in places], weight) for key, (target, weight) in fresh.targets().items()}
    assert largest_difference(ours, built_shop.targets()) < 1e-5


def test_a_teacher_without_label_names_is_refused(fresh: Workspace) -> None:
    names = {index: f"LABEL_{index}" for index in range(4)}
    by_name = {name: index for index, name in names.items()}
    edit_json(fresh.folder / "models/first/config.json", id2label=names, label2id=by_name)
    err = fresh.refusal(2, "run")
    assert "LABEL_0" in err
    assert re.search("^fix: .*labels.* 4 ", err, re.MULTILINE)
    assert "teacher first" in err
    fresh("cache-teachers", "teachers.0.labels=[banking, computing, cooking, football]")


def test_a_teacher_without_dropout_is_refused_with_a_fix(fresh: Workspace) -> None:
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"), 0.0)
    edit_json(fresh.folder / "models/first/config.json", **rates)
    err = fresh.refusal(2, "run")
    assert_three_lines(err)
    assert "first" in err
    assert "dropout: 0.1" in err
    fresh("build-targets", "teachers.0.dropout=0.1")
    fresh("build-targets", "student.method=amalgam", "cache.passes=auto")


def test_a_teacher_with_nan_logits_fails_with_its_name_and_the_texts(fresh: Workspace) -> None:
    shift_weights(fresh.folder / "models/second", {"classifier.bias": float("nan")})
    err = fresh.refusal(1, "run")
    assert_three_lines(err)
    assert "second" in err
    assert "fix: " in err
    assert "fp32" not in err[err.index("fix: ") :]  # the teacher runs in fp32 already
    assert not (fresh.artifacts / "build-targets").exists()


def test_two_teachers_of_the_same_model_get_a_warning(fresh: Workspace) -> None:
    same = ("teachers.1.model=./models/first", "corpus.on_bad_row=skip")
    planned = fresh("plan", *same)
    assert "teachers first and second are the same model" in planned.out + planned.err
    result = fresh("cache-teachers", *same)
    assert re.search("first and second .*same model", result.err)


def test_teachers_of_the_same_model_are_run_once_and_have_the_same_truncated_texts(fresh: Workspace) -> None:
    same = "teachers.1.model=./models/first"
    result = fresh("cache-teachers", same, "corpus.on_bad_row=skip", "cache.max_tokens=8")
    [count] = re.findall(r"teachers first, second: (\d+) texts were longer than their limit", result.err)
    assert 0 < int(count) <= 180
    manifest = fresh.manifest("cache-teachers")
    assert manifest["facts"]["units"] == len({file["path"] for file in manifest["files"]})


def test_pickle_weights_are_refused_unless_allowed(fresh: Workspace) -> None:
    import torch
    from safetensors.torch import load_file

    folder = fresh.folder / "models/first"
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    err = fresh.refusal(2, "cache-teachers")
    assert "pickle" in err
    assert "allow_pickle: true" in err
    fresh("cache-teachers", "teachers.0.allow_pickle=true")


def test_a_missing_encoder_is_an_error_before_the_first_stage_runs(fresh: Workspace) -> None:
    err = fresh.refusal(2, "run", "student.encoder=./models/encodr")
    assert_three_lines(err)
    assert "./models/encodr" in err
    assert not (fresh.artifacts / "read-corpus").exists()
    fresh("cache-teachers", "student.encoder=./models/encodr")  # for which no student is needed


def test_texts_are_checked_before_a_model_is_resolved(fresh: Workspace) -> None:
    for model in ("./models/nowhere", "org/model"):
        for override, piece in {
            "corpus.train=texts/tarin.csv": "texts/tarin.csv does not exist",
            "corpus.text=body": "no column body in train.csv",
            "corpus.label=gold": "no column gold in test.csv",
        }.items():
            assert piece in fresh.refusal(3, "run", override, f"teachers.0.model={model}")


def test_code_in_a_models_folder_is_never_run_and_gives_no_prompt(fresh: Workspace) -> None:
    folder = fresh.folder / "models/first"
    code = {"AutoModelForSequenceClassification": "evil.Evil", "AutoConfig": "evil.EvilConfig"}
    edit_json(folder / "config.json", auto_map=code, model_type="evil")
    (folder / "evil.py").write_text(f"open({str(fresh.folder / 'ran')!r}, 'w')\n")
    assert_three_lines(fresh.refusal(2, "cache-teachers"))
    assert not (fresh.folder / "ran").exists()


# ---- results


def test_cached_nan_logits_never_reach_a_student(workspace: Workspace) -> None:
    """The digests are in order: the target rule itself refuses NaN."""
    for path in workspace.units():
        spoil(path)
        workspace.sign(path)
    err = workspace.refusal(1, "build-targets", "targets.temperature=0.7")
    assert "120 texts" in err
    assert re.search("^where: .*soft.*entropy", err, re.MULTILINE)


def spoil(path: Path) -> None:
    """Replace the logits by NaN."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    width = len(table.column("logits")[0])
    values = pa.array([float("nan")] * width * len(table), pa.float32())
    place = table.schema.get_field_index("logits")
    column = pa.FixedSizeListArray.from_arrays(values, width)
    pq.write_table(table.set_column(place, table.schema.field(place), column), path)


def test_a_folder_that_amalgam_did_not_write_is_never_overwritten(fresh: Workspace) -> None:
    mine = fresh.folder / "students/student"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("years of work")
    assert "students/student" in fresh.refusal(2, "run")
    assert sorted(path.name for path in mine.iterdir()) == ["thesis.txt"]
    fresh("run", "student.name=other")


def test_a_workspace_without_write_permission_is_an_error_before_any_model_loads(fresh: Workspace) -> None:
    fresh.artifacts.write_text("a file")
    err = fresh.refusal(2, "run")
    assert "workspace" in err
    assert "execution.workspace=DIR" in err


def test_a_name_without_the_letters_of_its_folder_is_remarked(fresh: Workspace) -> None:
    (fresh.folder / "models/first").rename(fresh.folder / "models/中文")
    teachers = "teachers=[./models/中文, ./models/second]"
    assert "teacher ./models/中文 is named teacher: names have ASCII letters; set `name`" in fresh("plan", teachers).err
    assert "is named" not in fresh("plan", "teachers.0.model=./models/中文").err
    written = fresh("init", "--from-teachers", "models/中文", "models/second", "--into", "new").out
    assert "note: teacher ../models/中文 is named teacher: names have ASCII letters; set `name`" in written
    assert "ASCII letters, digits" in fresh.attempt("plan", "teachers.0.name=中").err


def test_a_folder_without_models_is_not_proposed(tmp_path: Path) -> None:
    (tmp_path / "artifacts").mkdir()
    with pytest.raises(ModelError, match="no folder") as refused:
        place_of("./models/first", tmp_path)
    assert refused.value.fix == f"copy the model to this place, or name another folder: {tmp_path} has no models"


def test_texts_that_an_earlier_run_truncated_are_refused(fresh: Workspace) -> None:
    fresh("cache-teachers", "cache.max_tokens=4")
    err = fresh.refusal(3, "cache-teachers", "cache.max_tokens=4", "cache.on_long_text=error")
    assert re.search(r"longer than 4 tokens of teacher first: \d+ texts", err), err
    fresh.write([("the vet", "law"), ("a cow", "law")])
    fresh.write([("the vet", "law"), ("a cow", "law")], "test")
    assert fresh("cache-teachers", "cache.max_tokens=4", "cache.on_long_text=error").code == 0


def test_a_text_that_is_probably_missing_is_named(workspace: Workspace) -> None:
    rows = workspace.texts()
    workspace.write([*rows[:1], ("nan", "law"), *rows[1:], ("None", "law"), ("nan", "music")])
    notes = workspace("read-corpus").err
    assert "2 train rows have the text nan (train.csv row 3 is the first): if it is a missing one" in notes
    assert f"1 train row has the text None (train.csv row {len(rows) + 3}): if it is a missing one" in notes
    assert workspace("read-corpus", "corpus.text=[text,label]").err.count("if it is a missing one") == 2  # pairs
