"""Weigh-teachers on a corpus of several blocks: any number of processes gives the same weights, and work is kept.

As a module, it runs the command with small blocks: `python -m amalgam.tests.test_weighing_blocks weigh-teachers`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from amalgam.cli import main
from amalgam.data.arrays import held_out_keys
from amalgam.data.demo_corpus import generate
from amalgam.data.keys import text_key
from amalgam.pipeline.execution.stage import Run, Unit
from amalgam.pipeline.storage.store import StoredFile
from amalgam.stages.common import corpus
from amalgam.stages.common.corpus import Bucket
from amalgam.stages.train_student import training
from amalgam.stages.weigh_teachers import name_order, neighbours, signals, stage, weigh
from amalgam.stages.weigh_teachers.load import AnswerSignals, answer_signals
from amalgam.stages.weigh_teachers.stage import LABELLED, WeighTeachers
from amalgam.tests.forking import Forked
from amalgam.tests.workspaces import (
    TEACHER_LABELS,
    Workspace,
    build_once,
    finish,
    flip_bit,
    new_workspace,
    quiet_environment,
    run_ranks,
    write_bases,
)

AMALGAM = ("student.method=amalgam", "targets.mode=hard")
WEIGH = ("weigh-teachers", *AMALGAM)
TEXTS, BLOCKS = 1500, 4
MODULE = "amalgam.tests.test_weighing_blocks"
SMALL = (
    (corpus, "UNIT_TEXTS", 400),
    (weigh, "REFERENCES", 150),
    (neighbours, "REFERENCES", 150),
    (weigh, "AGREEING", -1.0),
)
"""Blocks of one bucket; random teachers do not agree, and their evidence is used all the same."""

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in SMALL:
            patch.setattr(module, name, value)
        yield


def build(folder: Path) -> Workspace:
    workspace = new_workspace(folder)
    workspace.write(generate(TEXTS, 0))
    write_bases(workspace)
    workspace("cache-features", *AMALGAM)
    return workspace


@pytest.fixture
def cached(shared: Path, tmp_path: Path) -> Workspace:
    """Return a copy of a workspace in which weigh-teachers has not run."""
    return build_once(shared / "blocks", build).copy(tmp_path / "workspace")


@pytest.fixture
def alone(cached: Workspace, tmp_path: Path) -> Mapping[bytes, Array]:
    """Return the weights of one process."""
    return weights(by_one(cached.copy(tmp_path / "alone")))


def by_one(workspace: Workspace, *overrides: str) -> Workspace:
    workspace(*WEIGH, *overrides)
    return workspace


def weights(workspace: Workspace) -> dict[bytes, Array]:
    return column(workspace, "weight")


def column(workspace: Workspace, name: str) -> dict[bytes, Any]:
    files = [file["path"] for file in workspace.manifest("weigh-teachers")["files"]]
    paths = [path for path in files if path.endswith(".parquet") and not path.endswith(f"/{LABELLED}")]
    assert len(paths) == BLOCKS
    table = pa.concat_tables(pq.read_table(workspace.artifacts / path) for path in paths)
    keys = table.column("key").to_pylist()
    assert keys == sorted(keys)
    return dict(zip(keys, np.array(table.column(name).to_pylist()), strict=True))


def assert_equal(own: Mapping[bytes, Array], others: Mapping[bytes, Array]) -> None:
    assert list(own) == list(others)
    assert np.array(list(own.values())) == pytest.approx(np.array(list(others.values())), abs=1e-5)


def started(workspace: Workspace, **rank: str) -> Forked:
    return Forked(WEIGH, workspace.folder, quiet_environment(**rank), MODULE)


def test_a_teacher_that_predicts_one_label_for_nearly_all_texts_is_named(
    cached: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "ONE_LABEL", 0.01)
    shutil.copyfile(cached.folder / "amalgam.yaml", cached.folder / "other.yaml")
    result = cached(*WEIGH, "-c", "other.yaml")
    for teacher in TEACHER_LABELS:
        assert f"teacher {teacher} predicts " in result.err
    assert "amalgam label --count 50 -c other.yaml" in result.err


@pytest.mark.parametrize(("exclusion", "is_noted"), [(-0.1, True), (0.1, False)])
def test_evidence_that_is_high_for_all_teachers_at_once_is_noted(
    cached: Workspace, monkeypatch: pytest.MonkeyPatch, exclusion: float, is_noted: bool
) -> None:
    monkeypatch.setattr(weigh, "exclusion", lambda _: exclusion)
    note = "texts that suit one teacher suit others too, by the evidence: label some texts (amalgam label --count 50)"
    assert (note in " ".join(cached(*WEIGH).err.split())) is is_noted


def test_names_in_the_wrong_order_are_noted_where_the_file_gives_them(
    cached: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name_order, "FEWEST_LABELS", 1)
    monkeypatch.setattr(stage, "UNCLEAR_ORDER", -1.0)
    assert "fit the texts" not in cached(*WEIGH).err
    names = ", ".join(reversed(TEACHER_LABELS["first"]))
    noted = cached(*WEIGH, f"teachers.0.labels=[{names}]").err
    assert "teacher first: the names in `labels` fit the texts" in noted
    assert "teacher second" not in noted


def test_teachers_that_predict_the_same_label_are_right_together_in_the_estimate(
    cached: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def same(*given: Any) -> AnswerSignals:
        answers = answer_signals(*given)
        return replace(answers, predicted=np.zeros_like(answers.predicted))

    monkeypatch.setattr(stage, "answer_signals", same)
    by_one(cached)
    assert cached.manifest("weigh-teachers")["facts"]["accuracy"]["value"] > 0.99


def test_teachers_of_equal_labels_that_disagree_lower_the_estimate(cached: Workspace) -> None:
    config, labels = cached.config.read_text(), TEACHER_LABELS["first"]
    estimates = []
    for renamed in (labels, labels[::-1]):
        rename = json.dumps(dict(zip(labels, renamed, strict=True)))
        entry = f"  - name: third\n    model: ./models/first\n    rename: {rename}\ncache:\n"
        cached.config.write_text(config.replace("cache:\n", entry))
        cached(*WEIGH)
        estimates.append(cached.manifest("weigh-teachers")["facts"]["accuracy"]["value"])
    assert estimates[1] < estimates[0] - 0.1


def test_a_copy_of_a_teacher_changes_no_weight(cached: Workspace) -> None:
    labels = TEACHER_LABELS["first"]
    rename = json.dumps(dict(zip(labels, labels[::-1], strict=True)))
    unlike = f"  - name: unlike\n    model: ./models/first\n    rename: {rename}\n"
    copy = "  - name: copy\n    model: ./models/first\n"
    lines = "".join(f'"{text}",{label}\n' for text, label in cached.texts()[:40])
    (cached.folder / "labels.csv").write_text(f"text,label\n{lines}")
    config, by_teachers = cached.config.read_text(), []
    for entries in (unlike, copy + unlike):
        cached.config.write_text(config.replace("cache:\n", f"{entries}cache:\n"))
        by_teachers.append(weights(by_one(cached, "labels=labels.csv")))
    first, second, *copies, unlike_first = np.array(list(by_teachers[1].values())).T
    assert copies[0] == pytest.approx(first, abs=1e-6)
    without = np.array(list(by_teachers[0].values())).T
    assert np.stack([2 * first, second, unlike_first]) == pytest.approx(without, abs=1e-5)


@pytest.mark.parametrize("encoder", ["./models/encoder", f"teacher:{next(iter(TEACHER_LABELS))}"])
def test_densities_are_relative_to_the_encoder_unless_it_is_a_teacher(
    cached: Workspace, monkeypatch: pytest.MonkeyPatch, encoder: str
) -> None:
    uses = []

    def relative(among: neighbours.Compared) -> Array:
        uses.append(among)
        return among.density - among.common[:, None]

    monkeypatch.setattr(neighbours.Compared, "relative", property(relative))
    assert cached(*WEIGH, f"student.encoder={encoder}").code == 0
    assert bool(uses) == (not encoder.startswith("teacher:"))


@pytest.mark.parametrize(("bound", "is_named"), [(0.5, True), (-9.0, False)])
def test_texts_with_little_evidence_are_counted_over_all_blocks(
    cached: Workspace, monkeypatch: pytest.MonkeyPatch, bound: float, *, is_named: bool
) -> None:
    monkeypatch.setattr(stage, "UNCLEAR", bound)
    notes = cached(*WEIGH).err
    unclear = sum(value < bound for value in column(cached, "evidence").values())
    assert (unclear > 0.05 * TEXTS) == is_named
    assert (f"{unclear:,} of 1,500 texts have little evidence for any teacher" in notes) == is_named


def test_texts_of_teachers_of_equal_labels_are_not_unclear(cached: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evidence for a single label set has no other to be compared with."""
    monkeypatch.setattr(stage, "UNCLEAR", 9.0)
    rename = json.dumps(dict(zip(TEACHER_LABELS["second"], TEACHER_LABELS["first"], strict=True)))
    assert "little evidence" not in cached(*WEIGH, f"teachers.1.rename={rename}", "corpus.test=null").err


@pytest.mark.parametrize(("signal", "is_used"), [("all", True), ("confidence", False)])
def test_the_fit_of_unknown_texts_reads_the_evidence_on_the_texts_that_the_student_learned(
    cached: Workspace, monkeypatch: pytest.MonkeyPatch, signal: str, *, is_used: bool
) -> None:
    read, settings = (
        dict[str, Any](),
        (*AMALGAM, f"targets.weight_signal={signal}", "student.epochs=1", "student.held_out=0.1"),
    )
    monkeypatch.setattr(training, "fit_unknown_states", lambda *_, **options: read.update(options))
    monkeypatch.setattr(training, "UNKNOWN_TEXTS", 700)  # of two blocks
    assert cached("train-student", *settings).code == 0
    evidence = column(cached, "evidence")
    if not is_used:
        assert read["evidence"] is None
        assert set(evidence.values()) == {None}
        return
    learned = [key for key in evidence if not held_out_keys(np.array([key], "S16"), 0.1)[0]][:700]
    assert read["evidence"] == pytest.approx(np.array([evidence[key] for key in learned]))
    assert np.ptp(read["evidence"]) > 0.1


@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_give_the_weights_of_one(
    cached: Workspace, alone: Mapping[bytes, Array], processes: int
) -> None:
    result = run_ranks(lambda rank: started(cached, **rank), processes)
    assert result.code == 0, result.err
    assert_equal(weights(cached), alone)
    assert np.ptp(np.array(list(alone.values()))[:, 0]) > 0.5
    assert "tokens" in cached.manifest("weigh-teachers")["facts"]["kinds"]


def test_parts_give_the_weights_of_one_process_in_any_order(cached: Workspace, alone: Mapping[bytes, Array]) -> None:
    assert "3 of 4 units" in cached(*WEIGH, "--part", "1/2").err  # with the first block, which both parts need
    cached(*WEIGH, "--part", "0/2")
    assert_equal(weights(cached), alone)
    assert "weigh-teachers: reused" in cached("build-targets", *AMALGAM).err
    assert len(cached.targets()) == len(alone)


def test_a_killed_run_keeps_its_blocks(
    cached: Workspace, alone: Mapping[bytes, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = Forked(WEIGH, cached.folder, quiet_environment(KILL_AT="3"), MODULE)
    assert finish(killed).code == -signal.SIGKILL
    kept = cached.digests("weigh-teachers")
    assert len({unit for unit, _ in kept}) == 2
    done = count_units(monkeypatch)
    by_one(cached)
    assert len(done) == BLOCKS - 2
    assert kept < cached.digests("weigh-teachers")
    assert_equal(weights(cached), alone)
    assert "weigh-teachers: reused" in cached(*WEIGH).err


def test_damaged_blocks_are_computed_again(
    cached: Workspace, alone: Mapping[bytes, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_one(cached)
    fitted, *others = [cached.artifacts / file["path"] for file in cached.manifest("weigh-teachers")["files"]]
    assert fitted.suffix == ".safetensors"
    flip_bit(others[-1])
    done = count_units(monkeypatch)
    assert "does not match its digest" in cached("build-targets", *AMALGAM).err
    assert done == [others[-1].name.rsplit("-", 1)[0]]
    flip_bit(fitted)
    others[-1].unlink()  # another block needs the damaged numbers
    done.clear()
    assert "does not match its digest" in cached(*WEIGH).err
    assert done == [fitted.parent.name.rsplit("-", 1)[0], others[-1].name.rsplit("-", 1)[0]]
    assert_equal(weights(cached), alone)


def test_labels_in_any_block_correct_the_weights_of_all(cached: Workspace, alone: Mapping[bytes, Array]) -> None:
    rows = cached.texts()[:40]
    lines = "".join(f'"{text}",{label}\n' for text, label in rows)
    (cached.folder / "labels.csv").write_text(f"text,label\n{lines}")
    by_one(cached, "labels=labels.csv")
    assert cached.manifest("weigh-teachers")["facts"]["labelled"]["texts"] == len(rows)
    [labelled] = [
        file["path"] for file in cached.manifest("weigh-teachers")["files"] if file["path"].endswith(f"/{LABELLED}")
    ]
    keys = pq.read_table(cached.artifacts / labelled).column("key").to_pylist()
    assert keys == sorted(text_key([text]) for text, _ in rows)
    corrected = weights(cached)
    for text, label in rows:
        assert corrected[text_key([text])].tolist() == [float(label in own) for own in TEACHER_LABELS.values()]
    moved = [key for key in alone if corrected[key].argmax() != alone[key].argmax()]
    assert len(moved) == cached.manifest("weigh-teachers")["facts"]["labelled"]["moved"]


@pytest.mark.parametrize("place", ["first", "last"])
def test_blocks_without_a_label_are_corrected_by_those_of_others(
    cached: Workspace, alone: Mapping[bytes, Array], place: str
) -> None:
    label_of = {text_key([text]): (text, label) for text, label in cached.texts()}
    by_key = [label_of[key] for key in alone]
    rows = by_key[:3] if place == "first" else by_key[-3:]
    lines = "".join(f'"{text}",{label}\n' for text, label in rows)
    (cached.folder / "labels.csv").write_text(f"text,label\n{lines}")
    by_one(cached, "labels=labels.csv")
    corrected = weights(cached)
    for text, label in rows:
        assert corrected[text_key([text])].tolist() == [float(label in own) for own in TEACHER_LABELS.values()]


def test_a_renamed_label_is_part_of_the_identity(cached: Workspace) -> None:
    by_one(cached)
    planned = cached.attempt("plan", "--json", *AMALGAM, "teachers.0.rename={banking: money}")
    states = {stage["stage"]: stage["state"] for stage in planned.json["stages"]}  # the gold labels are refused
    assert states["weigh-teachers"] != "current"
    assert states["cache-teachers"] == states["cache-features"] == "current"


def test_texts_beyond_the_limit_can_move_the_blocks_of_the_others(
    cached: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "UNIT_TEXTS", 500)  # one bucket of 375 texts, or five of 94
    rows, limit = generate(6 * TEXTS, 0), "corpus.limit=900"
    last = sorted(text_key([text]) for text, _ in rows[:TEXTS])[899]
    by_one(cached, limit)
    cached.write([*rows[:TEXTS], *(row for row in rows[TEXTS:] if text_key([row[0]]) > last)])
    assert cached("build-targets", *AMALGAM, limit).code == 0
    assert len(cached.targets()) == 900


def test_targets_are_built_in_equal_groups_that_need_not_be_the_blocks(
    cached: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "UNIT_TEXTS", 1200)  # four buckets: a block of three and one of one
    cached("build-targets", *AMALGAM)
    blocks, groups = (
        [pq.read_metadata(path).num_rows for path in sorted(cached.artifacts.glob(f"{stage}/*/units/**/*.parquet"))]
        for stage in ("weigh-teachers", "build-targets")
    )
    assert len(blocks) == len(groups) == 2
    assert blocks[0] > groups[0]
    assert sum(blocks) == sum(groups) == TEXTS  # the stage refuses weights of other texts


@pytest.mark.parametrize(("rows", "sizes"), [(10_000, [10]), (33_000, [16, 17]), (98_000, [24, 25, 24, 25]), (0, [])])
def test_groups_of_buckets_are_equal_for_two_threads(
    monkeypatch: pytest.MonkeyPatch, rows: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(corpus, "UNIT_TEXTS", 32_768)
    file = StoredFile("", 0, "")
    buckets = [Bucket(format(number, "07b"), 1000, "", file) for number in range(rows // 1000)]
    groups = list(corpus.even_groups(buckets, at_once=2))
    assert [len(group) for group in groups] == sizes
    assert [bucket for group in groups for bucket in group] == buckets


def test_a_forced_run_computes_all_blocks(cached: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    by_one(cached)
    done = count_units(monkeypatch)
    assert "fitted on" in cached(*WEIGH, "--force").err
    assert len(done) == BLOCKS


def test_the_first_block_alone_is_known_until_it_is_complete(cached: Workspace) -> None:
    plan = cached.plan(*AMALGAM)["weigh-teachers"]
    assert plan["units"] == {"done": 0, "total": 1}
    cached.attempt(*WEIGH, "--part", "1/2")
    assert cached.plan(*AMALGAM)["weigh-teachers"]["units"] == {"done": 3, "total": BLOCKS}


def test_an_estimate_times_the_first_block_by_its_own_texts(cached: Workspace) -> None:
    cached("plan", "--estimate", *AMALGAM)
    [record] = (cached.artifacts / "weigh-teachers").glob("*/units/*.json")
    rate = json.loads((cached.artifacts / "rates.json").read_text())["weigh-teachers"]
    assert rate["workload"] == json.loads(record.read_text())["facts"]["texts"] < TEXTS / 2


def count_units(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the units that run from now on."""
    done: list[str] = []
    run_unit = WeighTeachers.run_unit

    def counted(stage: WeighTeachers, run: Run, unit: Unit) -> None:
        run_unit(stage, run, unit)
        done.append(unit.name)

    monkeypatch.setattr(WeighTeachers, "run_unit", counted)
    return done


def kill_at(number: int) -> None:
    """Kill this process as it begins the unit of this number."""
    run_unit, begun = WeighTeachers.run_unit, []

    def killed(stage: WeighTeachers, run: Run, unit: Unit) -> None:
        begun.append(unit)
        if len(begun) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        run_unit(stage, run, unit)

    setattr(WeighTeachers, "run_unit", killed)  # noqa: B010 - mypy has no assignment of a method


if __name__ == "__main__":
    for module, name, value in SMALL:
        setattr(module, name, value)
    if "KILL_AT" in os.environ:
        kill_at(int(os.environ["KILL_AT"]))
    sys.argv[0] = "amalgam"
    main()
