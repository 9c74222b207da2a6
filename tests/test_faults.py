"""Damage, deletion, moves, signals and rivals at a real workspace: only what was lost is made again, and equals it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from amalgam.data.parquet import matrix
from amalgam.pipeline.execution.stage import Unit
from amalgam.stages.app.session import open_run
from amalgam.stages.cache_teachers.conflict import note_divergence
from amalgam.tests.workshop import SAME, TIMEOUT, TRAIN, Shop, apart, finish, flip


def train_unit(shop: Shop) -> Path:
    """A unit with passes; others have test texts alone."""
    return next(path for path in shop.units() if "passes" in pq.read_schema(path).names)


def record_of(path: Path) -> Path:
    return path.with_name(path.stem.rsplit("-", 1)[0] + ".json")


def cut_to(length: Callable[[int], int]) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: length(len(data))])

    return cut


def other_in_its_place(path: Path) -> None:
    other = next(unit for unit in path.parent.glob("*.parquet") if unit != path)
    shutil.copyfile(other, path)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut to nothing": cut_to(lambda _: 0),
    "cut to 3 bytes": cut_to(lambda _: 3),
    "cut to 100 bytes": cut_to(lambda _: 100),
    "cut to half": cut_to(lambda size: size // 2),
    "cut by one byte": cut_to(lambda size: size - 1),
    "one bit flipped": flip,
    "another unit in its place": other_in_its_place,
    "deleted": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_is_found_told_and_made_again_alone(shop: Shop, damage: str) -> None:
    path, before = train_unit(shop), shop.targets()
    whole = path.read_bytes()
    DAMAGE[damage](path)
    with shop.counting() as asked:
        said = shop("build-targets", "--force")
    assert (asked[0].units, asked[0].passes) == (1, TRAIN * 4)
    assert path.name in said.err
    assert "missing" in said.err if damage == "deleted" else "damaged" in said.err
    assert path.read_bytes() == whole
    assert apart(shop.targets(), before) == 0
    assert shop.stale() <= {"train-student", "report"}
    with shop.counting() as asked:
        shop("run")
    assert asked[0].units == 0


@pytest.mark.parametrize("content", [None, b"", b"{garbage", b"[]", b'{"name": 1}'])
def test_a_lost_or_senseless_record_means_not_committed(shop: Shop, content: bytes | None) -> None:
    path, before = train_unit(shop), shop.targets()
    record, whole = record_of(path), path.read_bytes()
    record.unlink() if content is None else record.write_bytes(content)
    shop("build-targets", "--force")  # the manifest still names the file, and the file verifies
    assert apart(shop.targets(), before) == 0
    with shop.counting() as asked:
        shop("cache-teachers", "--force")
    assert asked[0].units == 4
    assert path.read_bytes() == whole
    assert json.loads(record.read_text())["facts"]["rows"] == TRAIN


def test_more_passes_after_a_lost_record_ask_those_texts_again(shop: Shop, tmp_path: Path) -> None:
    record_of(train_unit(shop)).unlink()
    with shop.counting() as asked:
        shop("build-targets", "cache.passes=6")
    assert asked[0].passes == TRAIN * 6 + TRAIN * 2
    other = shop.without_artifacts(tmp_path / "other")
    other("build-targets", "cache.passes=6")
    assert apart(shop.targets(), other.targets()) < SAME


@pytest.mark.parametrize("content", [None, b"", b"{garbage"])
@pytest.mark.parametrize("stage", ["read-corpus", "cache-teachers", "build-targets", "train-student", "report"])
def test_a_lost_manifest_is_written_again_and_nothing_is_recomputed(
    shop: Shop, stage: str, content: bytes | None
) -> None:
    head = json.loads((shop.artifacts / "HEAD.json").read_text())[stage]["fingerprint"]
    manifest = shop.artifacts / stage / head / "MANIFEST.json"
    before = json.loads(manifest.read_text())
    manifest.unlink() if content is None else manifest.write_bytes(content)
    reason = "missing" if content is None else "damaged"
    state = shop.plan()[stage]
    assert (state["state"], state["reason"]) == ("partial", reason)
    assert state["units"]["done"] == state["units"]["total"]
    made = {path: path.stat().st_mtime_ns for path in shop.artifacts.rglob("*.*") if stage in str(path)}
    shop("run")
    assert json.loads(manifest.read_text()) == before
    assert all(path.stat().st_mtime_ns == when for path, when in made.items() if path != manifest)


def test_a_damaged_student_is_trained_again_from_the_same_targets(shop: Shop) -> None:
    [weights] = (shop.artifacts / "train-student").glob("*/student-*/model.safetensors")
    flip(weights)
    with shop.counting() as asked:
        said = shop("run", "report.calibration_bins=11")
    assert "model.safetensors is damaged" in said.err
    assert "train-student: running" in said.err
    assert "build-targets: reused" in said.err
    assert asked[0].units == 0


def test_a_lost_head_reruns_nothing(shop: Shop) -> None:
    (shop.artifacts / "HEAD.json").write_text("{garbage")
    assert shop.stale() == set()
    with shop.counting() as asked:
        shop("run")
    assert asked[0].units == 0


def test_a_moved_experiment_is_up_to_date_where_it_went(shop: Shop, tmp_path: Path) -> None:
    moved = Shop(tmp_path / "elsewhere/deep/inside")
    moved.folder.parent.mkdir(parents=True)
    shop.folder.rename(moved.folder)
    assert moved.stale() == set()
    with moved.counting() as asked:
        moved("run")
    assert asked[0].units == 0


def test_times_of_files_mean_nothing(shop: Shop) -> None:
    import os

    for path in shop.folder.rglob("*"):
        os.utime(path, (0, 0) if path.suffix == ".parquet" else (4e9, 4e9))
    assert shop.stale() == set()


def test_two_experiments_share_the_cache(shop: Shop) -> None:
    other = shop.config.read_text().replace("mode: soft", "mode: hard").replace("epochs: 1", "epochs: 2")
    (shop.folder / "other.yaml").write_text(other.replace("student:\n", "student:\n  name: other\n"))
    with shop.counting() as asked:
        shop("run", "-c", "other.yaml")
    assert asked[0].units == 0
    assert (shop.folder / "students/other").exists()
    with shop.counting() as asked:
        said = shop("run")
    assert asked[0].units == 0
    assert said.err.count(": reused") == 5


def test_two_runs_at_once_both_end_well_and_equal_one(fresh: Shop, built: Shop) -> None:
    rivals = [fresh.process("run"), fresh.process("run")]
    said = [finish(process) for process in rivals]
    assert [one.code for one in said] == [0, 0], said[0].err + said[1].err
    assert fresh.digests("cache-teachers") == built.digests("cache-teachers")
    assert fresh.digests("build-targets") == built.digests("build-targets")
    assert fresh.stale() == set()
    assert fresh("verify", "--json").json["damaged"] == []


# ---- signals. More passes than the tests use elsewhere, so that there is time to interrupt them.

MANY = ("cache.passes=256", "execution.batch_tokens=2048")


def interrupted(shop: Shop, *signals: signal.Signals) -> tuple[int, str]:
    """cache-teachers, stopped as soon as one unit is committed."""
    process = shop.new_process("cache-teachers", *MANY)
    until(lambda: bool(list((shop.artifacts / "cache-teachers").glob("*/units/*.json"))), process)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.05)
    said = finish(process)
    return said.code, said.err


def until(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    began = time.monotonic()
    while not ready():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() - began < TIMEOUT
        time.sleep(0.01)


@pytest.fixture(scope="module")
def uninterrupted(built: Shop, tmp_path_factory: pytest.TempPathFactory) -> Shop:
    shop = built.without_artifacts(tmp_path_factory.mktemp("uninterrupted") / "shop")
    shop("build-targets", *MANY)
    return shop


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_work_keeps_what_is_committed_and_says_how_to_go_on(
    fresh: Shop, uninterrupted: Shop, number: signal.Signals, code: int
) -> None:
    found, err = interrupted(fresh, number)
    assert found == code, err
    assert "Traceback" not in err
    assert number.name in err
    assert "fix: " in err
    kept = fresh.digests("cache-teachers")
    assert 0 < len(kept) < 4
    assert not list(fresh.artifacts.rglob(".tmp-*"))
    with fresh.counting() as asked:
        fresh("build-targets", *MANY)
    assert asked[0].units == 4 - len(kept)
    assert kept < fresh.digests("cache-teachers")
    assert apart(fresh.targets(), uninterrupted.targets()) < SAME


def test_a_second_interrupt_ends_at_once(fresh: Shop) -> None:
    code, err = interrupted(fresh, signal.SIGINT, signal.SIGINT)
    assert code in {130, -signal.SIGINT}  # a shell says 130 for both; the second may meet a process that is leaving
    assert "Traceback" not in err


def test_killed_three_times_it_ends_where_an_uninterrupted_run_does(fresh: Shop, uninterrupted: Shop) -> None:
    for _ in range(3):
        process = fresh.process("cache-teachers", *MANY)
        before = len(fresh.digests("cache-teachers"))
        began = time.monotonic()
        while process.poll() is None and len(fresh.digests("cache-teachers")) == before:
            assert time.monotonic() - began < TIMEOUT
            time.sleep(0.02)
        process.kill()
        finish(process)
    fresh("build-targets", *MANY)
    assert fresh.digests("cache-teachers") == uninterrupted.digests("cache-teachers")
    assert apart(fresh.targets(), uninterrupted.targets()) < SAME


def test_a_unit_computed_twice_with_other_bytes_keeps_the_first_and_records_how_far_they_differ(shop: Shop) -> None:
    _, run = open_run(shop.config, [])
    path = record_of(train_unit(shop))
    standing = run.store.record(path)
    assert standing is not None
    table = pq.read_table(run.store.path(standing.files[0]))
    shifted = (matrix(table.column("logits")) + 0.25).reshape(-1)
    logits = pa.FixedSizeListArray.from_arrays(pa.array(shifted), table.schema.field("logits").type.list_size)
    with run.store.draft(path.parent, path.stem, ".parquet") as draft:
        place = table.schema.get_field_index("logits")
        pq.write_table(table.set_column(place, table.schema.field(place), logits), draft.folder / "unit.parquet")
        draft.facts = standing.facts
    assert draft.rival == standing
    note_divergence(run, Unit(path.stem, path.parent), draft.files[0], draft.rival)
    [note] = (shop.artifacts / "divergence").glob("*.json")
    assert json.loads(note.read_text())["max_abs_difference"]["logits"] == pytest.approx(0.25)
    assert run.store.record(path) == standing
    assert not run.store.path(draft.files[0]).exists()
