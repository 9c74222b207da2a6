"""The commands on a tiny experiment: what they make, what they say, and that the student stands without amalgam."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from amalgam.stages.common.device import pick_device
from amalgam.stages.common.training.learner import training_dtype
from amalgam.tests.workshop import KNOWS, TEST, TRAIN, Shop, flip, quiet_environment, write_texts

STAGES = ["read-corpus", "cache-teachers", "build-targets", "train-student", "report"]
UNION = [label for own in KNOWS.values() for label in own]

ALONE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "amalgam":
            raise ImportError("amalgam is not to be needed")

sys.meta_path.insert(0, Refuse())
from transformers import pipeline

classify = pipeline("text-classification", model=sys.argv[1], top_k=None, device="cpu")
print(sorted(found["label"] for found in classify(["the chef fried the onion"])[0]))
"""


def head_of(shop: Shop, stage: str) -> str:
    return str(json.loads((shop.artifacts / "HEAD.json").read_text())[stage]["fingerprint"])


def evaluation_of(shop: Shop) -> dict[str, object]:
    [path] = (shop.artifacts / "report" / head_of(shop, "report")).glob("*/evaluation.json")
    found: dict[str, object] = json.loads(path.read_text())
    return found


def test_the_student_answers_in_a_process_that_cannot_import_amalgam(built: Shop) -> None:
    student = built.folder / "students/student"
    command = [sys.executable, "-I", "-c", ALONE, str(student)]
    done = subprocess.run(command, capture_output=True, text=True, env=quiet_environment(), timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == str(sorted(UNION))


def test_the_students_labels_are_the_union_in_the_teachers_order(built: Shop) -> None:
    config = json.loads((built.folder / "students/student/config.json").read_text())
    assert [config["id2label"][str(place)] for place in range(len(UNION))] == UNION


def test_the_evaluation_has_every_system(built: Shop) -> None:
    found = evaluation_of(built)
    systems = found["systems"]
    assert isinstance(systems, dict)
    assert list(systems) == ["teacher:first", "teacher:second", "ensemble", "zero-shot", "student (muka-soft)"]
    assert (found["n"], found["left_out"], found["labels"], found["groups"]) == (TEST, 0, UNION, KNOWS)
    for system in systems.values():
        assert {"accuracy", "macro_f1", "nll_nats", "ece", "slice_accuracy", "confusion"} <= set(system)
        assert sum(map(sum, system["confusion"])) == TEST


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "folder"])
def test_the_same_texts_in_another_form_are_the_same_texts(fresh: Shop, built: Shop, suffix: str) -> None:
    rows = fresh.texts()
    if suffix == "folder":
        (fresh.folder / "texts/train").mkdir()
        write_texts(fresh.folder / "texts/train/one.csv", rows[:50])
        write_texts(fresh.folder / "texts/train/two.csv", rows[50:])
        fresh.edit("train: texts/train.csv", "train: texts/train")
    else:
        fresh.write(rows, suffix=suffix)
        fresh.edit("texts/train.csv", f"texts/train.{suffix}")
    (fresh.folder / "texts/train.csv").unlink()
    fresh("build-targets")
    assert fresh.targets() == built.targets()


def test_running_again_runs_nothing(shop: Shop) -> None:
    with shop.counting() as asked:
        said = shop("run")
    assert [line for line in said.err.splitlines() if "reused" in line] == [f"{stage}: reused" for stage in STAGES]
    assert "running" not in said.err
    assert asked[0].units == 0


def test_a_plan_in_json_has_the_promised_shape(shop: Shop) -> None:
    stages = shop("plan", "--json", "targets.temperature=0.5").json["stages"]
    assert [stage["stage"] for stage in stages] == STAGES
    for stage in stages:
        assert {"stage", "state", "reason", "detail", "units"} <= set(stage)
    assert [stage["state"] for stage in stages] == ["current", "current", "missing", "missing", "missing"]
    assert [stage["reason"] for stage in stages] == [None, None, "config", "upstream", "upstream"]
    assert stages[2]["detail"] == "targets.temperature: 0.2 -> 0.5"
    assert stages[1]["units"] == {"done": 4, "total": 4}
    assert stages[2]["units"] == {"done": 0, "total": 1}


def test_a_plan_before_the_first_run_says_what_waits_for_what(fresh: Shop) -> None:
    stages = fresh.plan()
    assert {stage["state"] for stage in stages.values()} == {"missing"}
    assert {stage["reason"] for stage in stages.values()} == {"first-run"}
    assert not fresh.units()


def test_explain_names_the_field_that_changed(shop: Shop) -> None:
    said = shop("explain", "build-targets", "targets.temperature=0.5")
    assert "targets.temperature: 0.2 -> 0.5" in said.out
    found = shop("explain", "build-targets", "targets.temperature=0.5", "--json").json
    assert (found["state"], found["reason"]) == ("missing", "config")
    assert found["changes"] == [{"field": "config.targets.temperature", "change": "0.2 -> 0.5"}]
    assert found["last"] == head_of(shop, "build-targets")


def test_explain_of_no_stage_suggests_one(shop: Shop) -> None:
    said = shop.tries("explain", "build-target")
    assert said.code == 2
    assert "build-targets" in said.err


def test_status_shows_what_is_there_and_what_head_is(shop: Shop) -> None:
    found = shop("status", "--json").json
    heads = {row["stage"] for row in found["artifacts"] if row["head"]}
    assert heads == set(STAGES)
    targets = next(row for row in found["artifacts"] if row["stage"] == "build-targets")
    assert targets["name"] == head_of(shop, "build-targets")
    assert targets["says"] == f"muka-soft, {TRAIN} texts; 1/1 files"
    assert "K = 4, fp32; 4/4 files" in shop("status").out


def test_a_shard_that_a_person_deleted_is_missing_in_status_and_alone_runs_again(shop: Shop) -> None:
    shop.units()[0].unlink()
    cached = [row["says"] for row in shop("status", "--json").json["artifacts"] if row["stage"] == "cache-teachers"]
    assert any("3/4 files" in says for says in cached)
    stage = shop.plan()["cache-teachers"]
    assert (stage["state"], stage["reason"], stage["units"]) == ("partial", "missing", {"done": 3, "total": 4})
    with shop.counting() as asked:
        shop("run")
    assert asked[0].units == 1


def test_verify_counts_every_file_and_names_the_damaged(shop: Shop) -> None:
    whole = shop("verify", "--json").json
    assert whole["damaged"] == []
    assert whole["files"] > len(shop.units())
    path = shop.units()[0]
    path.write_bytes(path.read_bytes()[:-1])
    said = shop.tries("verify", "--json")
    assert said.code == 1
    assert [fault["path"] for fault in said.json["damaged"]] == [str(path.relative_to(shop.artifacts))]
    assert not path.exists()
    assert list((shop.artifacts / "quarantine").iterdir())


def test_gc_lists_and_deletes_only_when_told(shop: Shop) -> None:
    flip(shop.units()[0])
    shop("build-targets", "--force")
    items = shop("gc", "--json").json["items"]
    assert {item["why"] for item in items} == {"quarantined"}
    [item] = [item for item in items if item["path"].endswith(".parquet")]
    assert (shop.artifacts / item["path"]).exists()
    assert shop("gc", "--yes", "--json").json["deleted"] is True
    assert not (shop.artifacts / item["path"]).exists()
    assert shop.stale() == set()


def test_gc_of_unused_results_keeps_what_the_last_builds_stand_on(shop: Shop) -> None:
    shop("run", "targets.temperature=0.5")
    before = shop.targets()
    shop("gc", "--unused", "--yes")
    assert shop.stale("targets.temperature=0.5") == set()
    assert shop.stale() == {"build-targets", "train-student", "report"}
    assert shop.targets() == before
    with shop.counting() as asked:
        shop("run")
    assert asked[0].units == 0


def test_the_student_trains_on_the_targets_that_were_built_last_and_says_so(shop: Shop) -> None:
    shop("build-targets", "--mode", "hard")
    said = shop("train-student")
    assert 'targets.mode="hard"' in said.err or "targets.mode=hard" in said.err
    manifest = json.loads(
        (shop.artifacts / "train-student" / head_of(shop, "train-student") / "MANIFEST.json").read_text()
    )
    assert manifest["identity"]["upstream"]["build-targets"] == head_of(shop, "build-targets")
    assert manifest["facts"]["dtype"] == training_dtype(pick_device("auto"))
    assert all(max(target) == pytest.approx(max(target)) for target, _ in shop.targets().values())
    shop("run")  # the file says soft, and `run` does what the file says
    assert shop.stale() == set()


def test_only_refuses_instead_of_running_what_comes_before(fresh: Shop) -> None:
    said = fresh.tries("build-targets", "--no-upstream")
    assert said.code == 2
    assert "read-corpus" in said.err
    assert "`amalgam read-corpus`" in said.err


def test_force_makes_a_result_again(shop: Shop) -> None:
    said = shop("build-targets", "--force")
    assert "build-targets: running" in said.err
    assert "cache-teachers: reused" in said.err


def test_init_writes_a_file_that_plan_reads_and_never_writes_over_it(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    assert "wrote" in shop("init").out
    assert shop.tries("init").code == 2
    said = shop.tries("plan")
    assert said.code in {2, 3}  # it names texts and models that are not there
    assert "texts/train.csv" in said.err
    assert "error: " in said.err


def test_the_schema_has_every_section(tmp_path: Path) -> None:
    found = Shop(tmp_path)("schema").json
    assert {"corpus", "teachers", "train_teachers", "cache", "targets", "student"} <= set(found["properties"])


def test_methods_are_listed(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    assert shop("methods", "--json").json["muka-soft"]["defaults"]["targets"]["mode"] == "soft"
    assert "vanilla-kd" in shop("methods").out


def test_doctor_says_what_is_there_and_what_is_wrong(shop: Shop) -> None:
    found = {row["what"]: row for row in shop("doctor", "--json").json}
    assert "2 teachers found" in found["teachers"]["found"]
    assert {row["fix"] for what, row in found.items() if what != "disk"} == {""}
    shop.edit("./models/second", "./models/secand")
    wrong = ("corpus.test=texts/tets.csv", "student.encoder=./models/encodr")
    found = {row["what"]: row for row in shop("doctor", *wrong, "--json").json}
    for what, said, fix in (
        ("teachers", "secand", "second"),
        ("texts", "tets.csv", "test.csv"),
        ("models", "encodr", "encoder"),
    ):
        assert said in found[what]["found"]
        assert fix in found[what]["fix"]


def test_an_oracle_measures_the_targets(shop: Shop) -> None:
    said = shop("build-targets", "--oracle", "students/student")
    assert "KL" in said.err + said.out


def test_an_oracle_tells_how_far_the_targets_are_from_its_own(shop: Shop) -> None:
    said = shop("build-targets", "--oracle", "students/student")
    assert "KL to the oracle, all: " in said.out
    assert "weight < 0.5: " in said.out
    nats = float(said.out.split("all: ")[1].split()[0])
    assert 0 < nats < 5


def test_an_oracle_with_other_labels_is_refused(shop: Shop) -> None:
    said = shop.tries("build-targets", "--oracle", f"models/{next(iter(KNOWS))}")
    assert said.code == 2
    assert "knows other labels" in said.err


@pytest.mark.parametrize(
    ("stage", "asks"),
    [
        ("generate", "`generate` section"),
        ("train-teachers", "`train_teachers` section"),
        ("make-embeddings", "as-dfd"),
    ],
)
def test_a_stage_that_nothing_asks_for_says_what_would(shop: Shop, stage: str, asks: str) -> None:
    said = shop.tries(stage)
    assert said.code == 2
    assert stage in said.err
    assert asks in said.err


def test_a_report_without_labelled_texts_says_what_it_cannot_tell(shop: Shop) -> None:
    assert "corpus.test" in shop("report", "corpus.test=null").err


def test_half_a_stages_name_is_enough_to_be_understood(shop: Shop) -> None:
    assert re.search("train-teachers.*train-student", shop.tries("explain", "train").err)


def test_verify_says_that_run_mends_what_it_set_aside(shop: Shop) -> None:
    flip(shop.units()[0])
    said = shop.tries("verify")
    assert said.code == 1
    assert "`amalgam run`" in said.err
    shop("run")
    assert shop("verify").code == 0
