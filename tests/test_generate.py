"""Stage 0 through the front door: texts where there were none, written once, extended, gated, shared and resumed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from amalgam.data.schemas import GENERATED
from amalgam.tests.workshop import (
    KNOWS,
    TIMEOUT,
    Shop,
    flip,
    new_generating_shop,
    ranks,
    reweigh,
    reweigh_all,
)

TEXTS = 12
CLASSES = [(teacher, label) for teacher, labels in KNOWS.items() for label in labels]


@pytest.fixture
def shop(generated: Shop, tmp_path: Path) -> Shop:
    return generated.copy(tmp_path / "shop")


@pytest.fixture
def fresh(generated: Shop, tmp_path: Path) -> Shop:
    return generated.without_artifacts(tmp_path / "shop")


def manifest(shop: Shop, stage: str = "generate") -> dict[str, Any]:
    head = json.loads((shop.artifacts / "HEAD.json").read_text())[stage]["fingerprint"]
    found: dict[str, Any] = json.loads((shop.artifacts / stage / head / "MANIFEST.json").read_text())
    return found


def rows(shop: Shop) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(shop.artifacts / manifest(shop)["facts"]["file"]).to_pylist()
    return found


def blocks(shop: Shop) -> dict[str, int]:
    """Every block of texts that is there, and when it was made."""
    return {str(path.relative_to(shop.artifacts)): path.stat().st_mtime_ns for path in shop.units("generate")}


def trained_on(shop: Shop) -> list[str]:
    facts = manifest(shop, "read-corpus")
    files = [file["path"] for file in facts["files"] if "/train-" in file["path"]]
    return sorted(text for path in files for text in pq.read_table(shop.artifacts / path).column("text").to_pylist())


# ---- what comes out


def test_a_student_is_trained_where_no_text_was_given(generated: Shop) -> None:
    assert not (generated.folder / "texts/train.csv").exists()
    assert (generated.folder / "students/student/model.safetensors").exists()
    assert generated.stale() == set()
    assert next(iter(generated.plan())) == "generate"


def test_every_teacher_and_class_has_equally_many_with_all_that_is_known_of_each(generated: Shop) -> None:
    found = rows(generated)
    assert list(found[0]) == [column.name for column in GENERATED]
    assert Counter((row["teacher"], row["class"]) for row in found) == dict.fromkeys(CLASSES, TEXTS)
    assert [row["index"] for row in found] == sorted(row["index"] for row in found)
    for row in found:
        assert (row["source"], row["seed"]) == ("steered", 0)
        assert 0 <= row["class_probability"] <= 1
        assert row["lm_log_probability"] < 0
        assert 0 < row["tokens"] <= 8
        assert row["words"] == len(row["text"].split())
        assert 0 <= row["draw"] < 1


def test_the_student_learns_from_those_that_pass_the_gates(generated: Shop) -> None:
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


def test_steering_reaches_classes_that_the_language_model_alone_does_not(shop: Shop) -> None:
    def mean() -> float:
        found = [row["class_probability"] for row in rows(shop)]
        return float(sum(found) / len(found))

    steered = mean()
    shop("generate", "generate.steering_strength=0")
    assert steered > mean() + 0.1


# ---- written once


def test_running_again_writes_nothing(shop: Shop) -> None:
    before = blocks(shop)
    said = shop("run")
    assert "generate: reused" in said.err
    assert blocks(shop) == before


def test_more_texts_extend_the_set_and_write_nothing_anew(shop: Shop) -> None:
    before, old = blocks(shop), rows(shop)
    shop("generate", "generate.texts=20")
    after = blocks(shop)
    assert before.items() < after.items()
    assert len(after) == 2 * len(CLASSES)
    assert rows(shop)[: len(old)] == old
    assert len(rows(shop)) == 20 * len(CLASSES)


def test_fewer_texts_are_the_first_ones(shop: Shop) -> None:
    before, old = blocks(shop), rows(shop)
    shop("generate", "generate.texts=5")
    assert blocks(shop) == before
    assert rows(shop) == old[: 5 * len(CLASSES)]


@pytest.mark.parametrize("gate", ["min_class_probability=0.3", "max_duplicate=0.2", "max_repetition=0"])
def test_another_gate_writes_nothing(shop: Shop, gate: str) -> None:
    before, old = blocks(shop), trained_on(shop)
    said = shop("read-corpus", f"generate.{gate}")
    assert "generate: reused" in said.err
    assert f"config: generate.{gate.partition('=')[0]}" in said.err
    assert blocks(shop) == before
    assert set(trained_on(shop)) < set(old)


def test_what_is_held_out_is_a_part_of_its_own(shop: Shop) -> None:
    before, old = blocks(shop), set(trained_on(shop))
    said = shop("read-corpus", "generate.held_out=0.3")
    kept, total = zip(*re.findall(r"(\d+) of (\d+) generated texts pass", said.err), strict=True)
    assert sum(map(int, total)) == TEXTS * len(CLASSES)
    assert sum(map(int, kept)) == len(old)
    parts = manifest(shop, "read-corpus")["facts"]["parts"]
    assert set(parts) == {"train", "test", "held-out"}
    assert blocks(shop) == before
    learned = set(trained_on(shop))
    assert learned < old
    assert parts["held-out"]["texts"] == len(old - learned) > 5
    shop("read-corpus", "generate.held_out=0.4")
    assert set(trained_on(shop)) < learned


def test_renaming_a_label_or_a_teacher_writes_nothing(shop: Shop) -> None:
    before, old = blocks(shop), rows(shop)
    shop("generate", "teachers.0.rename={banking: money}", "teachers.1.name=other")
    assert blocks(shop) == before
    named = {"banking": "money", "second": "other"}
    expected = [{**row, **{key: named.get(row[key], row[key]) for key in ("teacher", "class")}} for row in old]
    assert rows(shop) == expected


def test_force_writes_everything_again_and_the_same(shop: Shop) -> None:
    before, old = blocks(shop), rows(shop)
    shop("generate", "--force")
    assert {name for name, made in blocks(shop).items() if before.get(name) == made} == set()
    assert rows(shop) == old


def test_doctor_looks_for_the_language_model_too(shop: Shop) -> None:
    (shop.folder / "models/lm").rename(shop.folder / "models/elsewhere")
    assert "./models/lm" in shop("doctor").out


def test_a_changed_teacher_costs_its_own_texts(shop: Shop) -> None:
    before = blocks(shop)
    reweigh(shop.folder / "models/first", {"classifier.bias": 0.25})
    shop("generate")
    after = blocks(shop)
    assert before.items() < after.items()
    assert len(after) - len(before) == len(KNOWS["first"])


def test_the_bill_goes_by_the_texts_that_are_there(shop: Shop, tmp_path: Path) -> None:
    fresh = shop.without_artifacts(tmp_path / "fresh")

    def cost(shop: Shop, *overrides: str) -> dict[str, Any]:
        found: dict[str, Any] = shop("plan", "--json", "--estimate", *overrides).json["cost"]
        return found

    assert cost(fresh)["stages"]["generate"]["seconds"] > 0  # a short trial tells, where nothing is written yet
    more = cost(shop, "generate.texts=30")
    made = [json.loads(path.read_text()) for path in (shop.artifacts / "generate").glob("*/units/*.json")]
    per_text = sum(one["made"]["seconds"] for one in made) / sum(one["facts"]["rows"] for one in made)
    assert more["stages"]["generate"]["seconds"] == pytest.approx(16 * len(CLASSES) * per_text)


# ---- interrupted, shared, damaged


def test_killed_again_and_again_it_ends_where_an_uninterrupted_run_does(fresh: Shop, generated: Shop) -> None:
    for _ in range(2):
        there = len(fresh.digests("generate"))
        process = fresh.process("generate", "execution.batch_tokens=64")
        deadline = time.monotonic() + TIMEOUT
        while len(fresh.digests("generate")) <= there and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
        process.communicate()
    kept = blocks(fresh)
    fresh("generate")
    assert kept.items() <= blocks(fresh).items()
    assert fresh.digests("generate") == generated.digests("generate")
    assert rows(fresh) == rows(generated)


def test_two_processes_write_the_very_texts_of_one(fresh: Shop, generated: Shop) -> None:
    said = ranks(fresh, "generate")
    assert said.code == 0, said.err
    assert fresh.digests("generate") == generated.digests("generate")
    assert manifest(fresh)["files"] == manifest(generated)["files"]


def test_parts_together_make_the_whole(fresh: Shop, generated: Shop) -> None:
    said = fresh("generate", "--part", "1/2")
    assert f"{len(CLASSES) // 2} of {len(CLASSES)} units" in said.err
    half = fresh.digests("generate")
    assert half < generated.digests("generate")
    fresh("generate", "--part", "0/2")
    assert fresh.digests("generate") == generated.digests("generate")
    fresh("generate")
    assert fresh.stale() == {"read-corpus", "cache-teachers", "build-targets", "train-student", "report"}


def test_a_damaged_block_alone_is_written_again(shop: Shop, generated: Shop) -> None:
    path = shop.units("generate")[3]
    before = blocks(shop)
    flip(path)
    assert shop.tries("verify").code == 1
    assert not path.exists()
    shop("run")
    changed = {name for name, made in blocks(shop).items() if before[name] != made}
    assert changed == {str(path.relative_to(shop.artifacts))}
    assert shop.digests("generate") == generated.digests("generate")


# ---- other sources


def test_prompts_name_the_class_and_each_text_draws_its_own_settings(shop: Shop) -> None:
    said = shop("run", "generate.source=prompted", "generate.min_class_probability=0", "student.name=prompted")
    assert "rename" not in said.err
    found = rows(shop)
    assert Counter((row["teacher"], row["class"]) for row in found) == dict.fromkeys(CLASSES, TEXTS)
    key = json.loads((shop.artifacts / "generate" / manifest(shop)["facts"]["families"][0] / "key.json").read_text())
    assert key["prompt"] == ["banking: ", "A text about banking: ", "The following text is about banking.\n"]
    assert (key["temperature"], key["top_p"], key["top_k"]) == ([0.7, 1.0, 1.3], [0.8, 0.9, 1.0], [20, 50, 200])


def test_labels_that_are_no_words_are_told_where_prompts_name_them(shop: Shop) -> None:
    said = shop("generate", "generate.source=prompted", "teachers.0.rename={banking: c1}", "generate.texts=2")
    assert "c1 (first)" in said.err
    quiet = shop("generate", "teachers.0.rename={banking: c1}")
    assert "rename" not in quiet.err
    steered = shop("generate", "teachers.0.rename={banking: c1}", "generate.prompt=On {label}, ", "generate.texts=2")
    assert "c1 (first)" in steered.err


def test_random_words_are_drawn_from_each_teacher_s_vocabulary(shop: Shop) -> None:
    said = shop("run", "generate.source=random-words", "generate.max_tokens=40", "student.name=random")
    assert "generate: done" in said.err
    found = rows(shop)
    assert Counter(row["teacher"] for row in found) == {name: TEXTS * len(labels) for name, labels in KNOWS.items()}
    assert {row["class"] for row in found} == {row["class_probability"] for row in found} == {None}
    tokenizer = json.loads((shop.folder / "models/first/tokenizer.json").read_text())
    assert {word for row in found for word in row["text"].split()} <= set(tokenizer["model"]["vocab"])
    lengths = [row["words"] for row in found]
    assert (min(lengths), max(lengths)) == (5, 20)
    assert len({row["text"] for row in found}) == len(found)


def test_another_corpus_gives_a_sample_by_content(shop: Shop) -> None:
    options = ("generate.source=cross-domain", "generate.corpus=texts/test.csv")
    shop("generate", *options, "generate.texts=2")
    few = [row["text"] for row in rows(shop)]
    assert len(few) == 2 * len(CLASSES)
    given = [text for text, _ in shop.texts("test")]
    assert set(few) < set(given)
    shop("generate", *options, "generate.texts=4")
    assert [row["text"] for row in rows(shop)][: len(few)] == few
    said = shop("generate", *options)
    assert f"generate.corpus has only {len(given)} texts; {TEXTS * len(CLASSES)} were wanted" in said.err
    assert sorted(row["text"] for row in rows(shop)) == sorted(given)


# ---- what cannot be, and what is not reached


def test_a_class_that_is_not_reached_is_told_with_its_figure_and_the_rest_kept(fresh: Shop) -> None:
    bias = {"classifier.bias": -1000.0}  # of the first class
    reweigh(fresh.folder / "models/first", bias)
    said = fresh("run")
    assert re.search(f"first, banking: 0 of {TEXTS} ", said.err)
    assert "second, law" not in said.err
    assert len(trained_on(fresh)) > 20


def test_gates_that_leave_nothing_are_an_error_with_the_figures(shop: Shop) -> None:
    said = shop.tries("run", "generate.min_words=50")
    assert said.code == 3
    assert f"{TEXTS * len(CLASSES)} generated texts" in said.err
    assert f"min_words {TEXTS * len(CLASSES)}" in said.err
    assert "generates nothing" in said.err


def test_a_language_model_that_repeats_itself_leaves_texts_that_a_gate_finds(fresh: Shop) -> None:
    folder = fresh.folder / "models/lm"
    reweigh_all(folder, "transformer.wte.weight", 30.0)  # as good as greedy: it falls into a loop
    said = fresh.tries(
        "run", "generate.steering_strength=0", "generate.max_tokens=30", "generate.min_class_probability=0"
    )
    failed = re.search(r"max_repetition (\d+)", said.err)
    assert failed
    assert int(failed[1]) > 10


def test_an_encoder_in_the_place_of_a_language_model_is_refused(fresh: Shop) -> None:
    said = fresh.tries("generate", "generate.language_model=./models/first")
    assert said.code == 2
    assert "models/first" in said.err
    assert "fix: " in said.err


PROBLEMS = {
    "generate.language_model=": "generate.language_model: ",
    "generate.source=cross-domain": "generate.corpus: ",
    "generate.corpus=texts/test.csv": "generate.corpus: ",
    "corpus.train=texts/test.csv": "corpus.train: ",
    "corpus.text=[a, b]": "corpus.text: ",
    "targets.mode=supervised": "targets.mode: ",
    "generate=": "corpus.train: ",
    "generate.top_p=1.5": "generate.top_p",
    "generate.temperature=[]": "generate.temperature",
}


@pytest.mark.parametrize("override", PROBLEMS)
def test_what_does_not_go_together_is_said_before_anything_runs(generated: Shop, override: str) -> None:
    said = generated.tries("plan", override)
    assert said.code == 2
    assert PROBLEMS[override] in said.err


def test_the_corpus_section_may_be_left_out_altogether(tmp_path: Path) -> None:
    shop = new_generating_shop(tmp_path / "shop")
    text = shop.config.read_text()
    shop.config.write_text(text[text.index("teachers:") :])
    assert list(shop.plan()) == [
        "generate",
        "read-corpus",
        "cache-teachers",
        "build-targets",
        "train-student",
        "report",
    ]


def test_looking_at_what_generate_would_do_loads_no_model(generated: Shop) -> None:
    code = "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); "
    code += "from amalgam.cli import main; sys.argv[1:] = ['plan']; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=generated.folder, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr
