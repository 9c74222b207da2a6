"""The commands on a tiny experiment: their results, their output, and a student that works without amalgam."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amalgam import Experiment
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.console import size
from amalgam.pipeline.storage.fingerprint import differences
from amalgam.stages.app.oracle import divergence
from amalgam.stages.common.device import pick_device
from amalgam.stages.common.training.loop import training_dtype
from amalgam.stages.registry import STAGE_NAMED
from amalgam.tests.forking import BARE, Forked
from amalgam.tests.workspaces import (
    TEACHER_LABELS,
    TEST,
    TRAIN,
    Workspace,
    age,
    finish,
    flip_bit,
    quiet_environment,
)

STAGES = ["read-corpus", "cache-teachers", "build-targets", "train-student", "report"]
UNION = [label for own in TEACHER_LABELS.values() for label in own]

ALONE = """
import sys

for name in [name for name in sys.modules if name.split(".")[0] == "amalgam"]:  # __init__.py and tests alone
    assert name.startswith("amalgam.tests") or name == "amalgam", name
    del sys.modules[name]

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "amalgam":
            raise ImportError("amalgam is not to be needed")

sys.meta_path.insert(0, Refuse())
from transformers import pipeline

classify = pipeline("text-classification", model=sys.argv[1], top_k=None, device="cpu")
print(sorted(found["label"] for found in classify(["the chef fried the onion"])[0]))
"""


def evaluation_of(workspace: Workspace) -> dict[str, object]:
    [path] = (workspace.artifacts / "report" / workspace.head("report")).glob("*/evaluation.json")
    return json.loads(path.read_text())


def test_the_student_answers_in_a_process_that_cannot_import_amalgam(built: Workspace, tmp_path: Path) -> None:
    student = built.folder / "students/student"
    (script := tmp_path / "alone.py").write_text(ALONE)
    done = finish(Forked([str(student)], tmp_path, quiet_environment(), str(script), BARE))
    assert done.code == 0, done.err
    assert done.out.strip().splitlines()[-1] == str(sorted(UNION))


def test_the_students_labels_are_the_union_in_the_teachers_order(built: Workspace) -> None:
    config = json.loads((built.folder / "students/student/config.json").read_text())
    assert [config["id2label"][str(place)] for place in range(len(UNION))] == UNION


def test_the_evaluation_has_every_system(built: Workspace) -> None:
    evaluation = evaluation_of(built)
    systems = evaluation["systems"]
    assert isinstance(systems, dict)
    assert list(systems) == ["teacher:first", "teacher:second", "ensemble", "zero-shot", "student (muka-soft)"]
    assert (evaluation["n"], evaluation["left_out"], evaluation["labels"], evaluation["groups"]) == (
        TEST,
        0,
        UNION,
        TEACHER_LABELS,
    )
    for system in systems.values():
        assert {"accuracy", "macro_f1", "nll_nats", "ece", "slice_accuracy", "confusion"} <= set(system)
        assert sum(map(sum, system["confusion"])) == TEST


def test_running_again_runs_nothing(workspace: Workspace) -> None:
    with workspace.counting() as asked:
        result = workspace("run")
    assert [line for line in result.err.splitlines() if "reused" in line] == [f"{stage}: reused" for stage in STAGES]
    assert "running" not in result.err
    assert asked[0].units == 0


def test_a_plan_in_json_has_the_promised_shape(workspace: Workspace) -> None:
    stages = workspace("plan", "--json", "targets.temperature=0.5").json["stages"]
    assert [stage["stage"] for stage in stages] == STAGES
    for stage in stages:
        assert {"stage", "state", "reason", "detail", "units"} <= set(stage)
    assert [stage["state"] for stage in stages] == ["current", "current", "missing", "missing", "missing"]
    assert [stage["reason"] for stage in stages] == [None, None, "config", "upstream", "upstream"]
    assert stages[2]["detail"] == "targets.temperature: 0.2 -> 0.5"
    assert stages[1]["units"] == {"done": 4, "total": 4}
    assert stages[2]["units"] == {"done": 0, "total": 1}


def test_a_plan_before_the_first_run_shows_the_order_of_stages(fresh: Workspace) -> None:
    stages = fresh.plan()
    assert {stage["state"] for stage in stages.values()} == {"missing"}
    assert {stage["reason"] for stage in stages.values()} == {"first-run"}
    assert not fresh.units()


def test_explain_names_the_field_that_changed(workspace: Workspace) -> None:
    result = workspace("explain", "build-targets", "targets.temperature=0.5")
    assert "targets.temperature: 0.2 -> 0.5" in result.out
    outcome = workspace("explain", "build-targets", "targets.temperature=0.5", "--json").json
    assert (outcome["state"], outcome["reason"]) == ("missing", "config")
    assert outcome["changes"] == [{"field": "config.targets.temperature", "change": "0.2 -> 0.5"}]
    assert outcome["last"] == workspace.head("build-targets")


def test_explain_compares_with_the_student_of_the_same_name(workspace: Workspace) -> None:
    workspace("run", "student.name=other", "student.seed=1", "targets.temperature=0.5")
    own = workspace("explain", "train-student", "student.seed=2")
    assert "  student.seed: 0 -> 2\n" in own.out
    assert " (students/student)\n" in own.out
    shown = workspace("explain", "build-targets", "targets.temperature=0.9").out
    assert "  targets.temperature: 0.2 -> 0.9\n" in shown
    assert workspace.plan("student.seed=2")["train-student"]["detail"] == "student.seed: 0 -> 2"
    new = workspace("explain", "train-student", "student.seed=2", "student.name=new")
    assert ("  student.seed: 1 -> 2\n" in new.out, " (students/other)\n" in new.out) == (True, True)
    current = workspace("explain", "train-student").out
    assert ("train-student: current" in current, "  student.select: held-out\n" in current) == (True, True)


def test_every_input_of_a_result_has_a_name_for_a_reader(built: Workspace, generated: Workspace) -> None:
    for workspace in (built, generated):
        for path in workspace.artifacts.glob("*/*/MANIFEST.json"):
            identity = json.loads(path.read_text())["identity"]
            stage, inputs = STAGE_NAMED[identity["stage"]], {part: identity[part] for part in ("config", "inputs")}
            for field, _ in differences(inputs, with_other_values(inputs)):
                name = stage.input_name(field)
                is_field = name.split(".")[0] in ExperimentConfig.model_fields
                assert is_field or name != field.partition(".")[2], (stage.name, field)


def with_other_values(value: Any) -> Any:
    """Return an identity with other values at the same paths."""
    match value:
        case dict():
            return {name: with_other_values(inner) for name, inner in value.items()}
        case [str(name), dict() | list() as inner]:
            return [name, with_other_values(inner)]
        case list():
            return [with_other_values(inner) for inner in value]
    return f"not {value}"


def test_explain_of_no_stage_suggests_one(workspace: Workspace) -> None:
    assert "build-targets" in workspace.refusal(2, "explain", "build-target")


def test_status_shows_what_is_there_and_what_head_is(workspace: Workspace) -> None:
    result = workspace("status", "--json").json
    heads = {row["stage"] for row in result["artifacts"] if row["head"]}
    assert heads == set(STAGES)
    targets = next(row for row in result["artifacts"] if row["stage"] == "build-targets")
    assert targets["name"] == workspace.head("build-targets")
    assert targets["summary"] == f"muka-soft, {TRAIN} texts; 1/1 files"
    assert "K = 4, fp32; 4/4 files" in workspace("status").out


def test_a_shard_that_a_person_deleted_is_missing_in_status_and_alone_runs_again(workspace: Workspace) -> None:
    workspace.units()[0].unlink()
    cached = [
        row["summary"] for row in workspace("status", "--json").json["artifacts"] if row["stage"] == "cache-teachers"
    ]
    assert any("3/4 files" in summary for summary in cached)
    stage = workspace.plan()["cache-teachers"]
    assert (stage["state"], stage["reason"], stage["units"]) == ("partial", "missing", {"done": 3, "total": 4})
    with workspace.counting() as asked:
        workspace("run")
    assert asked[0].units == 1


def test_verify_counts_every_file_and_names_the_damaged(workspace: Workspace) -> None:
    whole = workspace("verify", "--json").json
    assert whole["damaged"] == []
    assert whole["files"] > len(workspace.units())
    path = workspace.units()[0]
    path.write_bytes(path.read_bytes()[:-1])
    result = workspace.attempt("verify", "--json")
    assert result.code == 1
    assert [fault["path"] for fault in result.json["damaged"]] == [str(path.relative_to(workspace.artifacts))]
    assert not path.exists()
    assert list((workspace.artifacts / "quarantine").iterdir())


def test_verify_names_the_records_that_cannot_be_read(workspace: Workspace) -> None:
    pin = workspace.artifacts / "pins" / "dtype-auto.json"
    pin.parent.mkdir(exist_ok=True)
    patterns = ("read-corpus/part-*/*.json", "cache-teachers/*/units/*.json", "build-targets/*/MANIFEST.json")
    paths = [pin, *(next(workspace.artifacts.glob(pattern)) for pattern in patterns)]
    for path in paths:
        path.write_text("{")
    result = workspace.attempt("verify", "--json")
    assert result.code == 1
    damaged = {workspace.artifacts / fault["path"] for fault in result.json["damaged"]}
    assert damaged == set(paths)
    assert not any(path.exists() for path in paths)
    workspace("run")
    assert workspace("verify", "--json").json["damaged"] == []


def test_gc_lists_and_deletes_only_with_yes(workspace: Workspace) -> None:
    flip_bit(workspace.units()[0])
    workspace("build-targets", "--force")
    looked = workspace("gc", "--json").json
    assert looked["items"] == []  # a day of grace
    kept = looked["young_quarantine"]
    assert kept["bytes"] == sum(path.stat().st_size for path in (workspace.artifacts / "quarantine").iterdir()) > 0
    line = f"{kept['files']} quarantined files, {size(kept['bytes'])}: kept until {kept['until']}"
    assert line in workspace("gc").out.splitlines()
    assert 86_000 < (datetime.fromisoformat(kept["until"]) - datetime.now(UTC)).total_seconds() <= 86_400
    age(workspace.artifacts)
    items = workspace("gc", "--json").json["items"]
    assert {item["kind"] for item in items} == {"quarantined"}
    assert "kept until" not in workspace("gc").out
    [item] = [item for item in items if item["path"].endswith(".parquet")]
    assert (workspace.artifacts / item["path"]).exists()
    assert workspace("gc", "--yes", "--json").json["deleted"] is True
    assert not (workspace.artifacts / item["path"]).exists()
    assert workspace.stale() == set()


def test_gc_of_unused_results_keeps_the_inputs_of_the_last_builds(workspace: Workspace) -> None:
    workspace("run", "targets.temperature=0.5")
    before = workspace.targets()
    age(workspace.artifacts)
    workspace("gc", "--unused", "--yes", "targets.temperature=0.5")
    assert workspace.stale("targets.temperature=0.5") == set()
    assert workspace.stale() == {"build-targets", "train-student", "report"}
    assert workspace.targets() == before
    with workspace.counting() as asked:
        workspace("run")
    assert asked[0].units == 0


def test_the_student_trains_on_the_targets_that_were_built_last_with_a_note(workspace: Workspace) -> None:
    workspace("build-targets", "--mode", "hard")
    result = workspace("train-student")
    assert 'targets.mode="hard"' in result.err or "targets.mode=hard" in result.err
    manifest = json.loads(
        (workspace.artifacts / "train-student" / workspace.head("train-student") / "MANIFEST.json").read_text()
    )
    assert manifest["identity"]["upstream"]["build-targets"] == workspace.head("build-targets")
    assert manifest["facts"]["dtype"] == training_dtype(pick_device("auto"))
    by_teacher = [sorted([sum(target[:4]), sum(target[4:])]) for target, _ in workspace.targets().values()]
    assert len(by_teacher) == TRAIN
    assert all(shares == pytest.approx([0, 1]) for shares in by_teacher)
    workspace("run")  # the file has soft, and `run` follows the file
    assert workspace.stale() == set()


def test_only_refuses_instead_of_running_what_comes_before(fresh: Workspace) -> None:
    err = fresh.refusal(2, "build-targets", "--no-upstream", "corpus.limit=50")
    assert "read-corpus" in err
    assert "`amalgam read-corpus corpus.limit=50`" in err


def test_force_makes_a_result_again(workspace: Workspace) -> None:
    result = workspace("build-targets", "--force")
    assert "build-targets: running" in result.err
    assert "cache-teachers: reused" in result.err


def test_doctor_lists_the_environment(workspace: Workspace) -> None:
    checks = workspace("doctor", "--json").json
    assert [row["check"] for row in checks if "free" in row["result"]] == ["disk"]
    rows = {row["check"]: row for row in checks}
    assert "2 teachers, 8 labels" in rows["teachers"]["result"]
    assert {row["fix"] for what, row in rows.items() if what != "disk"} == {""}


def test_the_divergence_is_that_of_the_target_from_the_oracle() -> None:
    """By hand: 0.5 log(0.5 / 0.8) + 0.5 log(0.5 / 0.2) = 0.2231; the other direction is 0.1927."""
    nats = divergence(np.zeros((3, 2), np.float32), np.array([[0.8, 0.2], [0.5, 0.5], [1.0, 0.0]]))
    assert nats[:2] == pytest.approx([0.22314, 0.0], abs=1e-5)
    assert np.isinf(nats[2])


def test_an_oracle_measures_the_divergence_of_the_targets(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    result = workspace("build-targets", "--oracle", "students/student")
    assert "KL(oracle || target), all: " in result.out
    assert "weight < 0.5: " in result.out
    nats = float(result.out.split("all: ")[1].split()[0])
    assert 0 < nats < 5
    Experiment.load(workspace.config).compare_targets(str(workspace.folder / "students/student"))
    assert "KL(oracle || target), all: " in capsys.readouterr().out


def test_hard_targets_have_no_finite_divergence_and_are_compared_by_label(workspace: Workspace) -> None:
    result = workspace(
        "build-targets", "--mode", "hard", "targets.distribution=top-label", "--oracle", "students/student"
    )
    [line] = [line for line in result.out.splitlines() if "target), all: " in line]
    count = line.split("n=")[1].rstrip(")")
    assert f"all: infinite, as {count} targets have a label of probability 0, the same first label for " in line


def test_an_oracle_with_other_labels_is_refused(workspace: Workspace) -> None:
    err = workspace.refusal(2, "build-targets", "--oracle", f"models/{next(iter(TEACHER_LABELS))}")
    assert "other labels" in err


@pytest.mark.parametrize(
    ("stage", "asks"),
    [
        ("generate", "`generate` section"),
        ("train-teachers", "`train_teachers` section"),
        ("make-embeddings", "as-dfd"),
    ],
)
def test_a_stage_that_is_not_needed_is_refused_with_the_field_that_needs_it(
    workspace: Workspace, stage: str, asks: str
) -> None:
    err = workspace.refusal(2, stage)
    assert stage in err
    assert asks in err


def test_a_report_without_labelled_texts_names_the_missing_field(workspace: Workspace) -> None:
    assert "corpus.test" in workspace("report", "corpus.test=null").err


def test_half_a_stages_name_is_enough_to_be_understood(workspace: Workspace) -> None:
    assert re.search("train-teachers.*train-student", workspace.attempt("explain", "train").err)


def test_plan_loads_no_torch_for_a_teacher_without_a_pad_token(workspace: Workspace) -> None:
    config = workspace.folder / "models/first/config.json"
    content = json.loads(config.read_text())
    del content["pad_token_id"]
    config.write_text(json.dumps(content))
    code = "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); "
    code += "from amalgam.cli import main; sys.argv[1:] = ['plan']; main()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=workspace.folder, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
