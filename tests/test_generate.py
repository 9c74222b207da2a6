"""Stage generate writes texts once, extends, filters and shares them, and resumes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from amalgam.data.parquet import GENERATED
from amalgam.stages.common.models.loading import save_pretrained_folder
from amalgam.stages.weigh_teachers import stage as weighing
from amalgam.stages.weigh_teachers import weigh
from amalgam.tests.stages.tiny_models import tiny_language_model
from amalgam.tests.workspaces import (
    TEACHER_LABELS,
    Workspace,
    flip_bit,
    new_generating_workspace,
    ranks,
    scale_weights,
    shift_weights,
    until,
)

TEXTS = 12
CLASSES = [(teacher, label) for teacher, labels in TEACHER_LABELS.items() for label in labels]


@pytest.fixture
def workspace(generated: Workspace, tmp_path: Path) -> Workspace:
    return generated.copy(tmp_path / "workspace")


@pytest.fixture
def fresh(generated: Workspace, tmp_path: Path) -> Workspace:
    return generated.without_artifacts(tmp_path / "workspace")


def rows(workspace: Workspace) -> list[dict[str, Any]]:
    return pq.read_table(workspace.artifacts / workspace.manifest("generate")["facts"]["file"]).to_pylist()


def blocks(workspace: Workspace) -> dict[str, int]:
    """Every block of texts that is there, and when it was made."""
    return {str(path.relative_to(workspace.artifacts)): path.stat().st_mtime_ns for path in workspace.units("generate")}


def trained_on(workspace: Workspace) -> list[str]:
    facts = workspace.manifest("read-corpus")
    files = [file["path"] for file in facts["files"] if "/train-" in file["path"]]
    return sorted(
        text for path in files for text in pq.read_table(workspace.artifacts / path).column("text").to_pylist()
    )


# ---- results


def test_a_student_is_trained_where_no_text_was_given(generated: Workspace) -> None:
    assert not (generated.folder / "texts/train.csv").exists()
    assert (generated.folder / "students/student/model.safetensors").exists()
    assert generated.stale() == set()
    assert next(iter(generated.plan())) == "generate"


def test_every_teacher_and_class_has_equally_many_texts_with_all_columns(generated: Workspace) -> None:
    rows_ = rows(generated)
    assert list(rows_[0]) == [column.name for column in GENERATED]
    assert Counter((row["teacher"], row["class"]) for row in rows_) == dict.fromkeys(CLASSES, TEXTS)
    assert [row["index"] for row in rows_] == sorted(row["index"] for row in rows_)
    for row in rows_:
        assert (row["source"], row["seed"]) == ("steered", 0)
        assert 0 <= row["class_probability"] <= 1
        assert row["lm_log_probability"] < 0
        assert 0 < row["tokens"] <= 8
        assert row["words"] == len(row["text"].split())
        assert 0 <= row["draw"] < 1


def test_the_student_learns_from_those_that_pass_the_filters(generated: Workspace) -> None:
    passed = {
        row["text"]
        for row in rows(generated)
        if row["class_probability"] >= 0.1
        and row["near_duplicate"] <= 0.8
        and row["repetition"] <= 0.5
        and row["words"] >= 3
    }
    assert trained_on(generated) == sorted(passed)
    assert 0 < len(passed) < len(rows(generated))


def test_generated_test_texts_give_no_accuracy_on_real_texts(workspace: Workspace) -> None:
    labels = [label for labels in TEACHER_LABELS.values() for label in labels]
    assert workspace.attempt("report", "--fail-under", "0").code == 0
    own = [(text, labels[at % len(labels)]) for at, text in enumerate(trained_on(workspace))]
    workspace.write(own, "test")
    refused = workspace.attempt("report", "--fail-under", "0")
    assert refused.code == 2
    error = refused.err.partition("error: ")[2]
    unknown = (
        f"{len(own)} of {len(own)} test texts were written by stage generate: the accuracy on real texts is unknown"
    )
    assert error.startswith(f"{unknown}\nwhere: corpus.test\nfix: use labelled real texts"), refused.err
    assert f"caution: {unknown}" in refused.out
    assert "verdict: ship" not in refused.out


def test_steering_reaches_classes_that_the_language_model_alone_does_not(workspace: Workspace) -> None:
    def mean() -> float:
        rows_ = [row["class_probability"] for row in rows(workspace)]
        return float(sum(rows_) / len(rows_))

    steered = mean()
    workspace("generate", "generate.steering_strength=0")
    assert steered > mean() + 0.1


# ---- written once


def test_running_again_writes_nothing(workspace: Workspace) -> None:
    before = blocks(workspace)
    result = workspace("run")
    assert "generate: reused" in result.err
    assert blocks(workspace) == before


def test_more_texts_extend_the_set_and_rewrite_nothing(workspace: Workspace) -> None:
    before, old = blocks(workspace), rows(workspace)
    workspace("generate", "generate.texts=20")
    after = blocks(workspace)
    assert before.items() < after.items()
    assert len(after) == 2 * len(CLASSES)
    assert rows(workspace)[: len(old)] == old
    assert len(rows(workspace)) == 20 * len(CLASSES)


def test_fewer_texts_are_the_first_ones(workspace: Workspace) -> None:
    before, old = blocks(workspace), rows(workspace)
    workspace("generate", "generate.texts=5")
    assert blocks(workspace) == before
    assert rows(workspace) == old[: 5 * len(CLASSES)]


@pytest.mark.parametrize("gate", ["min_class_probability=0.3", "max_duplicate=0.2", "max_repetition=0"])
def test_another_filter_writes_nothing(workspace: Workspace, gate: str) -> None:
    before, old = blocks(workspace), trained_on(workspace)
    result = workspace("read-corpus", f"generate.{gate}")
    assert "generate: reused" in result.err
    assert f"config: generate.{gate.partition('=')[0]}" in result.err
    assert blocks(workspace) == before
    assert set(trained_on(workspace)) < set(old)


def test_held_out_texts_are_a_part_of_their_own(workspace: Workspace) -> None:
    before, old = blocks(workspace), set(trained_on(workspace))
    result = workspace("read-corpus", "generate.held_out=0.3")
    kept, total = zip(*re.findall(r"(\d+) of (\d+) generated texts pass", result.err), strict=True)
    assert sum(map(int, total)) == TEXTS * len(CLASSES)
    assert sum(map(int, kept)) == len(old)
    parts = workspace.manifest("read-corpus")["facts"]["parts"]
    assert set(parts) == {"train", "test", "held-out"}
    assert blocks(workspace) == before
    learned = set(trained_on(workspace))
    assert learned < old
    assert parts["held-out"]["texts"] == len(old - learned) > 5
    workspace("read-corpus", "generate.held_out=0.4")
    assert set(trained_on(workspace)) < learned


@pytest.mark.parametrize(
    ("share", "part", "advice"), [("0.0001", "held-out", "raise it"), ("0.9999", "train", "lower it")]
)
def test_a_part_without_generated_texts_is_refused_by_the_field_that_divides_them(
    workspace: Workspace, share: str, part: str, advice: str
) -> None:
    err = workspace.refusal(3, "read-corpus", f"generate.held_out={share}")
    assert f"leaves no generated text for the {part} part\nwhere: generate.held_out: {share}\nfix: {advice}" in err


def test_the_last_line_counts_the_requested_texts_not_those_of_whole_blocks(workspace: Workspace) -> None:
    result = workspace("generate", "generate.texts=3", "generate.max_tokens=3")
    assert f", {3 * len(CLASSES)} texts" in result.err


def test_teachers_of_one_model_share_its_texts(workspace: Workspace) -> None:
    before, old = blocks(workspace), rows(workspace)
    second = "  - name: second\n    model: ./models/second\n"
    workspace.edit(second, second + second.replace("name: second", "name: third"))
    workspace("generate")
    assert (blocks(workspace), rows(workspace)) == (before, old)


def test_teachers_in_another_order_give_the_same_texts_in_the_same_order(workspace: Workspace) -> None:
    first, second = (f"  - name: {name}\n    model: ./models/{name}\n" for name in TEACHER_LABELS)
    twin = second.replace("name: second", "name: twin")
    workspace.edit(first + second, first + second + twin)
    workspace("generate")
    old = rows(workspace)
    workspace.edit(first + second + twin, twin + second + first)
    assert workspace.plan()["generate"]["state"] == "current"
    workspace("generate", "--force")
    assert rows(workspace) == old


def test_outputs_in_another_order_give_other_texts_for_the_same_labels(workspace: Workspace) -> None:
    first, *others = TEACHER_LABELS["first"][:3]
    plans = []
    for outputs in ([first, "none", *others], ["none", first, *others]):
        settings = (f"teachers.0.labels=[{', '.join(outputs)}]", "teachers.0.catch_all=[none]")
        plans.append(workspace.plan(*settings)["generate"]["state"])
        workspace("generate", *settings)
    assert "current" not in plans


def test_equal_texts_are_held_out_together(workspace: Workspace) -> None:
    workspace("generate", "generate.max_tokens=2", "generate.min_words=2", "generate.steering_strength=0")
    draws = {(row["text"].lower(), row["draw"]) for row in rows(workspace)}
    texts = {text for text, _ in draws}
    assert 5 < len(texts) < len(rows(workspace))
    assert len({draw for _, draw in draws}) == len(draws) == len(texts)


def test_renaming_a_label_or_a_teacher_writes_nothing(workspace: Workspace) -> None:
    before, old = blocks(workspace), rows(workspace)
    workspace("generate", "teachers.0.rename={banking: money}", "teachers.1.name=other")
    assert blocks(workspace) == before
    named = {"banking": "money", "second": "other"}
    expected = [{**row, **{key: named.get(row[key], row[key]) for key in ("teacher", "class")}} for row in old]
    assert rows(workspace) == expected


def test_force_writes_everything_again_and_the_same(workspace: Workspace) -> None:
    before, old = blocks(workspace), rows(workspace)
    workspace("generate", "--force")
    assert {name for name, made in blocks(workspace).items() if before.get(name) == made} == set()
    assert rows(workspace) == old


def test_doctor_looks_for_the_language_model_too(workspace: Workspace) -> None:
    (workspace.folder / "models/lm").rename(workspace.folder / "models/elsewhere")
    assert "./models/lm" in workspace.attempt("doctor").out


def test_a_changed_teacher_costs_its_own_texts(workspace: Workspace) -> None:
    before = blocks(workspace)
    shift_weights(workspace.folder / "models/first", {"classifier.bias": 0.25})
    workspace("generate")
    after = blocks(workspace)
    assert before.items() < after.items()
    assert len(after) - len(before) == len(TEACHER_LABELS["first"])


def test_an_estimate_measures_the_first_texts_and_keeps_them(workspace: Workspace, tmp_path: Path) -> None:
    fresh = workspace.without_artifacts(tmp_path / "fresh")
    cost = fresh("plan", "--json", "--estimate").json["cost"]["stages"]["generate"]
    assert json.loads((fresh.artifacts / "rates.json").read_text())["generate"]["seconds"] > 0
    assert cost["seconds"] == 0  # the blocks that were measured are all there are
    measured = blocks(fresh)
    assert measured
    assert fresh.plan()["generate"]["state"] == "partial"
    assert blocks(fresh) == measured


# ---- interrupted, shared, damaged


def test_killed_it_ends_as_an_uninterrupted_run(fresh: Workspace, generated: Workspace) -> None:
    process = fresh.process("generate", "execution.batch_tokens=64")
    until(lambda: process.poll() is not None or fresh.digests("generate"))
    process.kill()
    process.communicate()
    made = blocks(fresh)  # the process may have been killed between a file and its record: the block is made again
    kept = {name: at for name, at in made.items() if (fresh.artifacts / f"{name.rpartition('-')[0]}.json").exists()}
    assert kept
    fresh("generate")
    assert kept.items() <= blocks(fresh).items()
    assert fresh.digests("generate") == generated.digests("generate")
    assert rows(fresh) == rows(generated)


def test_two_processes_write_the_very_texts_of_one(fresh: Workspace, generated: Workspace) -> None:
    result = ranks(fresh, "generate")
    assert result.code == 0, result.err
    assert fresh.digests("generate") == generated.digests("generate")
    assert fresh.manifest("generate")["files"] == generated.manifest("generate")["files"]


def test_parts_together_make_the_whole(fresh: Workspace, generated: Workspace) -> None:
    result = fresh("generate", "--part", "1/2")
    assert f"{len(CLASSES) // 2} of {len(CLASSES)} units" in result.err
    half = fresh.digests("generate")
    assert half < generated.digests("generate")
    fresh("generate", "--part", "0/2")
    assert fresh.digests("generate") == generated.digests("generate")
    fresh("generate")
    assert fresh.stale() == {"read-corpus", "cache-teachers", "build-targets", "train-student", "report"}


def test_a_damaged_block_alone_is_written_again(workspace: Workspace, generated: Workspace) -> None:
    path = workspace.units("generate")[3]
    before = blocks(workspace)
    flip_bit(path)
    assert workspace.attempt("verify").code == 1
    assert not path.exists()
    workspace("run")
    changed = {name for name, made in blocks(workspace).items() if before[name] != made}
    assert changed == {str(path.relative_to(workspace.artifacts))}
    assert workspace.digests("generate") == generated.digests("generate")


# ---- other sources


def test_prompts_name_the_class_and_each_text_draws_its_own_settings(workspace: Workspace) -> None:
    result = workspace("run", "generate.source=prompted", "generate.min_class_probability=0", "student.name=prompted")
    assert "rename" not in result.err
    rows_ = rows(workspace)
    assert Counter((row["teacher"], row["class"]) for row in rows_) == dict.fromkeys(CLASSES, TEXTS)
    key = json.loads(
        (
            workspace.artifacts / "generate" / workspace.manifest("generate")["facts"]["families"][0] / "family.json"
        ).read_text()
    )
    assert key["teacher"] == "first"
    assert "family of first, 1 unit, fp32" in workspace("status").out
    assert key["prompt"] == ["banking: ", "A text about banking: ", "The following text is about banking.\n"]
    assert (key["temperature"], key["top_p"], key["top_k"]) == ([0.7, 1.0, 1.3], [0.8, 0.9, 1.0], [20, 50, 200])


def test_a_prompt_with_another_placeholder_is_refused(fresh: Workspace) -> None:
    refused = fresh.attempt("plan", "generate.prompt=A text about {lable}")
    assert (refused.code, "{lable} is no placeholder: write {label}" in refused.err) == (2, True)


def test_a_long_prompt_takes_no_token_from_the_text(fresh: Workspace) -> None:
    """70 tokens, and the error of one that is longer than the model names the model's own limit."""
    vocabulary = json.loads((fresh.folder / "models/lm/tokenizer.json").read_text())["model"]["vocab"]
    words = [word for word in vocabulary if word.isalpha()]
    save_pretrained_folder(*tiny_language_model(words=words, seed=3, n_positions=100), fresh.folder / "models/lm")
    prompt = " ".join(words[:1] * 70)
    fresh("generate", "generate.texts=2", f"generate.prompt={prompt}")
    assert max(row["tokens"] for row in rows(fresh)) == 8
    result = fresh.attempt("generate", "generate.texts=2", f"generate.prompt={prompt} {prompt}")
    assert "the prompt has 141 tokens, and the language model reads 100" in result.err


def test_labels_that_are_no_words_give_a_note_if_prompts_name_them(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = workspace("generate", "generate.source=prompted", "teachers.0.rename={banking: c1}", "generate.texts=2")
    assert "c1 (first)" in result.err
    quiet = workspace("generate", "teachers.0.rename={banking: c1}")
    assert "rename" not in quiet.err
    steered = workspace(
        "generate", "teachers.0.rename={banking: c1}", "generate.prompt=On {label}, ", "generate.texts=2"
    )
    assert "c1 (first)" in steered.err
    monkeypatch.setattr("amalgam.stages.generate.stage.SHOWN_LABELS", 1)
    more = workspace(
        "generate", "generate.source=prompted", "teachers.0.rename={banking: c1, cooking: c2}", "generate.texts=2"
    )
    assert re.search(r"interpret c\d \(first\) and 1 more: ", more.err)


def test_random_words_are_drawn_from_each_teacher_s_vocabulary(workspace: Workspace) -> None:
    result = workspace("run", "generate.source=random-words", "generate.max_tokens=40", "student.name=random")
    assert "generate: done" in result.err
    rows_ = rows(workspace)
    assert Counter(row["teacher"] for row in rows_) == {
        name: TEXTS * len(labels) for name, labels in TEACHER_LABELS.items()
    }
    assert {row["class"] for row in rows_} == {row["class_probability"] for row in rows_} == {None}
    tokenizer = json.loads((workspace.folder / "models/first/tokenizer.json").read_text())
    assert {word for row in rows_ for word in row["text"].split()} <= set(tokenizer["model"]["vocab"])
    lengths = [row["words"] for row in rows_]
    assert (min(lengths), max(lengths)) == (5, 20)
    assert len({row["text"] for row in rows_}) == len(rows_)


def test_another_corpus_gives_a_sample_by_content(workspace: Workspace) -> None:
    options = ("generate.source=cross-domain", "generate.corpus=texts/test.csv")
    part = workspace("generate", *options, "generate.texts=4", "--part", "0/2")
    assert "1 of 2 units" in part.err
    assert "has only" not in part.err
    workspace("generate", *options, "generate.texts=2")
    few = [row["text"] for row in rows(workspace)]
    assert len(few) == 2 * len(CLASSES)
    given = [text for text, _ in workspace.texts("test")]
    assert set(few) < set(given)
    workspace("generate", *options, "generate.texts=4")
    assert [row["text"] for row in rows(workspace)][: len(few)] == few
    result = workspace("generate", *options)
    assert f"generate.corpus has only {len(given)} texts; {TEXTS * len(CLASSES)} were requested" in result.err
    assert sorted(row["text"] for row in rows(workspace)) == sorted(given)


def test_recombined_texts_follow_those_of_the_corpus_and_have_their_words(workspace: Workspace) -> None:
    given = [text for text, _ in workspace.texts("test")]
    per_class = len(given) // len(CLASSES) + 4
    options = ("generate.source=recombined", "generate.corpus=texts/test.csv")
    workspace("generate", *options, f"generate.texts={per_class}")
    few = [row["text"] for row in rows(workspace)]
    assert len(few) == per_class * len(CLASSES)
    assert sorted(few[: len(given)]) == sorted(given)
    new = few[len(given) :]
    assert {word for text in new for word in text.split()} <= {word for text in given for word in text.split()}
    assert len(set(new) - set(given)) > len(new) / 2
    workspace("read-corpus", *options, f"generate.texts={per_class + 8}")
    assert [row["text"] for row in rows(workspace)][: len(few)] == few


def test_unreadable_rows_of_a_corpus_are_counted_in_a_note(workspace: Workspace) -> None:
    rows_ = [b"text", b"a text", b"one caf\xe9", b"two caf\xe9s", b'" "', b"another text"]
    (workspace.folder / "texts/latin.csv").write_bytes(b"\n".join(rows_) + b"\n")
    result = workspace("generate", "generate.source=cross-domain", "generate.corpus=texts/latin.csv")
    assert "note: generate.corpus: 2 rows left out, 2 not UTF-8; the first is " in result.err
    assert "latin.csv row 3" in result.err


@pytest.mark.parametrize("source", ["cross-domain", "recombined"])
def test_a_corpus_without_texts_is_refused(workspace: Workspace, source: str) -> None:
    (workspace.folder / "texts/empty.csv").write_text('text\n" "\n')
    err = workspace.refusal(3, "generate", f"generate.source={source}", "generate.corpus=texts/empty.csv")
    assert f"generate.corpus has no text\nwhere: generate.source: {source}\nfix: " in err


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ([], "corpus.train"),
        (["generate.source=recombined", "generate.corpus=texts/test.csv"], "generate.corpus"),
        (["generate.source=random-words"], None),
    ],
)
def test_a_note_on_texts_with_little_evidence_names_the_setting_of_their_files(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, source: list[str], named: str | None
) -> None:
    monkeypatch.setattr(weighing, "UNCLEAR", 9.0)
    monkeypatch.setattr(weigh, "AGREEING", -1.0)
    options = ("student.method=amalgam", *(source or ["generate=null", "corpus.train=texts/test.csv"]))
    notes = re.findall(r"Remove such texts from ([\w.]+)", workspace("weigh-teachers", *options).err)
    assert notes == ([named] if named else [])


# ---- errors and unreached classes


def test_an_unreached_class_is_reported_with_its_figure_and_the_rest_kept(fresh: Workspace) -> None:
    bias = {"classifier.bias": -1000.0}  # of the first class
    shift_weights(fresh.folder / "models/first", bias)
    result = fresh("read-corpus")
    assert re.search(f"first, banking: 0 of {TEXTS} ", result.err)
    assert "second, law" not in result.err
    assert len(trained_on(fresh)) > 20


def test_the_advice_for_an_unreached_class_names_settings_of_the_source(workspace: Workspace) -> None:
    source = ("generate.source=prompted", "generate.texts=3")
    none = workspace.attempt("read-corpus", *source, "generate.min_class_probability=1")
    few = workspace("read-corpus", *source, "generate.min_class_probability=0.4", "generate.min_words=1")
    for err in (none.err, few.err):
        assert "change generate.prompt, rename the label (teachers: rename)" in err
        assert "steering_strength" not in err


def test_filters_that_leave_nothing_are_an_error_with_the_figures(workspace: Workspace) -> None:
    err = workspace.refusal(3, "run", "generate.min_class_probability=1")
    assert f"{TEXTS * len(CLASSES)} generated texts" in err
    assert f"min_class_probability {TEXTS * len(CLASSES)}" in err
    assert "fix: " in err


def test_a_language_model_that_repeats_itself_leaves_texts_that_a_filter_finds(fresh: Workspace) -> None:
    folder = fresh.folder / "models/lm"
    scale_weights(folder, "transformer.wte.weight", 30.0)  # as good as greedy: it falls into a loop
    result = fresh.attempt(
        "read-corpus", "generate.steering_strength=0", "generate.max_tokens=30", "generate.min_class_probability=0"
    )
    failed = re.search(r"max_repetition (\d+)", result.err)
    assert failed
    assert int(failed[1]) > 10


def test_an_encoder_in_the_place_of_a_language_model_is_refused(fresh: Workspace) -> None:
    err = fresh.refusal(2, "generate", "generate.language_model=./models/first")
    assert "models/first" in err
    assert "fix: " in err


PROBLEMS = {
    "generate.language_model=": "generate.language_model: ",
    "generate.source=cross-domain": "generate.corpus: ",
    "generate.corpus=texts/test.csv": "generate.corpus: ",
    "corpus.train=texts/test.csv": "corpus.train: ",
    "corpus.text=[a, b]": "corpus.text: ",
    "targets.mode=supervised": "targets.mode: ",
    "student.method=supervised": "student.method: ",
    "generate=": "corpus.train: ",
    "generate.top_p=1.5": "generate.top_p",
    "generate.temperature=[]": "generate.temperature",
    "generate.min_words=9": "generate.min_words: 9 is more than generate.max_tokens, 8",
}


@pytest.mark.parametrize("override", PROBLEMS)
def test_contradicting_fields_of_generate_are_refused_before_anything_runs(generated: Workspace, override: str) -> None:
    assert PROBLEMS[override] in generated.refusal(2, "plan", override)


def test_the_corpus_section_may_be_left_out_altogether(tmp_path: Path) -> None:
    workspace = new_generating_workspace(tmp_path / "workspace")
    text = workspace.config.read_text()
    workspace.config.write_text(text[text.index("teachers:") :])
    assert list(workspace.plan()) == [
        "generate",
        "read-corpus",
        "cache-teachers",
        "build-targets",
        "train-student",
        "report",
    ]


def test_looking_at_what_generate_would_do_loads_no_model(generated: Workspace) -> None:
    code = "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); "
    code += "from amalgam.cli import main; sys.argv[1:] = ['plan']; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=generated.folder, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr
