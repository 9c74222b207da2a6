"""Updates of stages: reuse, repair in the same run, and stops."""

from __future__ import annotations

import errno
import io
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from amalgam.pipeline.errors import (
    AmalgamError,
    DamagedError,
    DiskFullError,
    ExperimentError,
    InterruptedRunError,
    WorkError,
)
from amalgam.pipeline.execution.runner import MAX_REPAIRS, PartialRunDoneError, update
from amalgam.pipeline.execution.stage import Run, Unit, WorkerShare, check_processes, pending_units, share_of
from amalgam.pipeline.storage.backend import TEMPORARY
from amalgam.tests.pipeline.crashing import fork, wait
from amalgam.tests.pipeline.toy_stages import Letters, built_toy, calls, outcome, toy_base, toy_run, toy_stages
from amalgam.tests.workspaces import flip_bit

UNITS = ["a", "b", "c", "joined", "pair"]


def _no_temporaries(base: Path) -> bool:
    return not list((base / "artifacts").rglob(f"{TEMPORARY}*"))


# ---- reuse


def test_running_again_computes_nothing_and_prints_so(tmp_path: Path) -> None:
    built_toy(toy_base(tmp_path))
    err = io.StringIO()
    states = update(toy_stages(), toy_run(tmp_path, err=err))
    assert [state.state for state in states] == ["current"] * 3
    assert [line.partition(": reused")[:2] for line in err.getvalue().splitlines()] == [
        (stage, ": reused") for stage in ("letters", "joined", "pair")
    ]
    assert calls(tmp_path) == UNITS


def test_a_stage_prints_its_reason_to_run_and_the_path_of_its_result(tmp_path: Path) -> None:
    built_toy(toy_base(tmp_path))
    err = io.StringIO()
    run = toy_run(tmp_path, err=err, targets={"temperature": 0.5})
    update(toy_stages(), run, target="joined")
    first, second, third = err.getvalue().splitlines()
    assert first.startswith("letters: reused")
    assert second.startswith("joined: ")
    assert "targets.temperature: 0.2 -> 0.5" in second
    assert third.startswith("joined: done")
    assert third.endswith(f"artifacts/joined/{run.fingerprint('joined')}")


def test_only_what_reads_a_setting_runs_again(tmp_path: Path) -> None:
    built_toy(toy_base(tmp_path))
    built_toy(tmp_path, targets={"temperature": 0.5})
    assert calls(tmp_path) == [*UNITS, "joined", "pair"]


def test_two_experiments_share_what_they_have_in_common(tmp_path: Path) -> None:
    base = toy_base(tmp_path)
    one, two = built_toy(base), built_toy(base, targets={"temperature": 0.5})
    assert one.result("letters") == two.result("letters")
    assert one.result("joined") != two.result("joined")
    assert calls(base).count("a") == 1


def test_threads_of_one_process_run_one_after_the_other_and_a_signal_ends_the_wait(tmp_path: Path) -> None:
    busy, most = 0, 0

    def work(_run: Run, _unit: Unit) -> None:
        nonlocal busy, most
        busy, most = busy + 1, max(most, busy + 1)
        time.sleep(0.05)
        busy -= 1

    toy_base(tmp_path)
    runs = [toy_run(tmp_path, cache={"seed": seed}) for seed in (1, 2)]
    threads = [threading.Thread(target=update, args=(toy_stages(work), run)) for run in runs]
    for thread in threads:
        thread.start()
    waiting = toy_run(tmp_path, cache={"seed": 3})
    waiting.signals.arrived = signal.SIGINT
    with pytest.raises(InterruptedRunError):
        update(toy_stages(work), waiting)
    for thread in threads:
        thread.join()
    assert most == 1
    assert calls(tmp_path).count("a") == 2


def test_a_target_runs_what_it_needs_and_nothing_after(tmp_path: Path) -> None:
    update(toy_stages(), toy_run(toy_base(tmp_path)), target="joined")
    assert calls(tmp_path) == ["a", "b", "c", "joined"]


def test_a_target_that_is_no_stage_is_refused_with_the_stages(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError) as raised:
        update(toy_stages(), toy_run(toy_base(tmp_path)), target="trio")
    assert "trio" in raised.value.what
    assert "letters, joined, pair" in str(raised.value.fix)


class TwoAtOnce(Letters):
    at_once = 2


def test_units_at_once_are_worked_on_at_the_same_time_and_give_the_same(tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=30)  # breaks unless two units are under way together

    def meet(_run: Run, unit: Unit) -> None:
        if unit.name in {"a", "b"}:
            both.wait()

    one, two = toy_run(toy_base(tmp_path / "one")), toy_run(toy_base(tmp_path / "two"))
    update([Letters()], one)
    update([TwoAtOnce(meet)], two)
    assert one.result("letters") == two.result("letters")


def test_of_units_at_once_one_that_fails_ends_the_run_and_what_was_done_stays(tmp_path: Path) -> None:
    failing = threading.Event()

    def fail(_run: Run, unit: Unit) -> None:
        if unit.name == "b":
            failing.set()
            raise WorkError("no b")
        if unit.name == "a":
            assert failing.wait(30)
            time.sleep(0.5)  # the other thread could run all other units meanwhile

    lines = "".join(f"{chr(letter)}\n" for letter in range(ord("a"), ord("z")))
    run = toy_run(toy_base(tmp_path, lines))
    with pytest.raises(WorkError, match="no b"):
        update([TwoAtOnce(fail)], run)
    assert sorted(calls(tmp_path)) == ["a", "b"]
    update([TwoAtOnce()], toy_run(tmp_path))
    assert calls(tmp_path).count("a") == 1


def test_only_refuses_to_run_what_comes_before(tmp_path: Path) -> None:
    base = toy_base(tmp_path)
    with pytest.raises(ExperimentError) as raised:
        update(toy_stages(), toy_run(base), target="joined", only=True)
    assert raised.value.what.startswith("letters ")
    assert "`amalgam letters`" in str(raised.value.fix)
    assert calls(base) == []
    update(toy_stages(), toy_run(base), target="letters", only=True)
    update(toy_stages(), toy_run(base), target="joined", only=True)
    with pytest.raises(ExperimentError, match=r"joined .*targets\.temperature: 0\.2 -> 0\.5"):
        update(toy_stages(), toy_run(base, targets={"temperature": 0.5}), target="pair", only=True)
    assert calls(base) == ["a", "b", "c", "joined"]


def test_force_makes_everything_again_and_sets_the_old_records_aside(tmp_path: Path) -> None:
    base = toy_base(tmp_path)
    before = outcome(built_toy(base))
    run = toy_run(base)
    states = update(toy_stages(), run, force=True)
    assert [state.reason for state in states] == ["forced"] * 3
    assert calls(base) == UNITS * 2
    assert outcome(run) == before
    assert len(list((base / "artifacts" / "quarantine").iterdir())) == len(UNITS) + 3


# ---- mending


def test_force_makes_every_stage_again_once_in_a_run_with_a_repair(tmp_path: Path) -> None:
    base = toy_base(tmp_path)
    before = outcome(built_toy(base))

    def harm(run: Run, unit: Unit) -> None:
        if unit.name == "joined" and calls(base).count("joined") == 2:
            flip_bit(run.store.path(run.result("letters").files[1]))

    run = toy_run(base)
    update(toy_stages(harm), run, force=True)
    assert calls(base) == [*UNITS, "a", "b", "c", "joined", "b", "joined", "pair"]
    assert outcome(run) == before


@pytest.mark.parametrize("harm", [flip_bit, Path.unlink, lambda path: os.truncate(path, 3)])
def test_a_damaged_unit_alone_is_made_again_in_the_same_run(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    base = toy_base(tmp_path / "damaged")
    changed: dict[str, Any] = {"targets": {"temperature": 0.5}}
    expected = outcome(built_toy(toy_base(tmp_path / "whole"), **changed))
    run = built_toy(base)
    harm(run.store.path(run.result("letters").files[1]))
    (base / "calls.log").unlink()
    assert outcome(built_toy(base, **changed)) == expected
    assert [unit for unit in calls(base) if unit in "abc"] == ["b"]


@pytest.mark.parametrize("harm", [flip_bit, lambda path: os.truncate(path, 3)])
def test_a_damaged_file_gives_a_note_and_is_kept_in_quarantine(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    base = toy_base(tmp_path)
    run = built_toy(base)
    file = run.result("letters").files[1]
    harm(run.store.path(file))
    harmed = run.store.path(file).read_bytes()
    err = io.StringIO()
    update(toy_stages(), toy_run(base, err=err, targets={"temperature": 0.5}))
    [note] = [line for line in err.getvalue().splitlines() if line.startswith("note: ")]
    assert file.path in note
    assert "damaged" in note
    [running] = [line for line in err.getvalue().splitlines() if line.startswith("letters: running")]
    assert file.path in running
    assert "2 of 3 units" in running
    (kept,) = (base / "artifacts" / "quarantine").iterdir()
    assert kept.read_bytes() == harmed


def test_a_repair_forgets_what_the_run_has_read(tmp_path: Path) -> None:
    seen = list[bool]()

    def damaged_once(run: Run, unit: Unit) -> None:
        if unit.name == "joined":
            seen.append("before" in run.cache or "before" in run.results)
            run.cache["before"], run.results["before"] = True, run.results["letters"]
            if len(seen) == 1:
                raise DamagedError("letters are damaged", path="letters")

    update(toy_stages(damaged_once), toy_run(toy_base(tmp_path)))
    assert seen == [False, False]


def test_repairs_end_when_the_disk_damages_every_file(tmp_path: Path) -> None:
    base = toy_base(tmp_path)

    def harm(run: Run, unit: Unit) -> None:
        if unit.name == "joined":
            flip_bit(run.store.path(run.result("letters").files[0]))

    with pytest.raises(DamagedError):
        built_toy(base, harm)
    assert calls(base).count("joined") == MAX_REPAIRS + 1


def test_a_unit_that_vanishes_while_the_others_are_made_is_made_again(tmp_path: Path) -> None:
    base = toy_base(tmp_path / "base")
    gone: list[Path] = []

    def lose_a(run: Run, unit: Unit) -> None:
        if unit.name == "c" and not gone:
            gone.extend(run.store.root.glob("letters/*/a-*.txt"))
            gone[0].unlink()

    assert outcome(built_toy(base, lose_a)) == outcome(built_toy(toy_base(tmp_path / "whole")))
    assert calls(base) == ["a", "b", "c", "a", "joined", "pair"]


# ---- the disk


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_passing_fault_is_tried_again(tmp_path: Path, number: int) -> None:
    base = toy_base(tmp_path)
    err = io.StringIO()

    def fail_once(_run: Run, unit: Unit) -> None:
        if unit.name == "b" and calls(base).count("b") == 1:
            raise OSError(number, os.strerror(number))

    update(toy_stages(fail_once), toy_run(base, err=err))
    assert calls(base) == ["a", "b", "b", "c", "joined", "pair"]
    assert f"letters b: {os.strerror(number)}" in err.getvalue()
    assert "1 of 2" in err.getvalue()


def test_a_lasting_fault_is_tried_three_times_and_committed_units_stay(tmp_path: Path) -> None:
    base = toy_base(tmp_path)

    def fail(_run: Run, unit: Unit) -> None:
        if unit.name == "b":
            raise OSError(errno.EIO, "Input/output error", "/mnt/texts")

    with pytest.raises(WorkError) as raised:
        built_toy(base, fail)
    assert raised.value.what.startswith("letters b: Input/output error")
    assert raised.value.where == "/mnt/texts"
    assert calls(base) == ["a", "b", "b", "b"]
    built_toy(base)
    assert calls(base)[4:] == ["b", "c", "joined", "pair"]


def test_a_full_disk_is_not_tried_again(tmp_path: Path) -> None:
    base = toy_base(tmp_path)

    def fill(_run: Run, unit: Unit) -> None:
        if unit.name == "b":
            with Path("/dev/full").open("w") as full:
                full.write("x")

    with pytest.raises(DiskFullError) as raised:
        built_toy(base, fill)
    assert raised.value.what.startswith("letters b: ")
    assert raised.value.where == str(base / "artifacts")
    assert calls(base) == ["a", "b"]
    built_toy(base)
    assert calls(base) == ["a", "b", "b", "c", "joined", "pair"]


def test_a_full_disk_is_recognised_in_the_text_of_a_librarys_error(tmp_path: Path) -> None:
    base = toy_base(tmp_path)

    def save(_run: Run, unit: Unit) -> None:
        if unit.name == "b":
            save_file({"weight": torch.zeros(100_000)}, tmp_path / "model.safetensors")

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        with pytest.raises(DiskFullError, match="letters b: a file is larger than the system allows") as raised:
            built_toy(base, save)
        assert isinstance(raised.value.__cause__, SafetensorError)
        assert "ulimit -f" in str(raised.value.fix)

    assert wait(fork(work)) == 0
    assert calls(base) == ["a", "b"]


def test_a_quota_is_no_full_disk(tmp_path: Path) -> None:
    def save(_run: Run, _unit: Unit) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with pytest.raises(DiskFullError, match=r"your disk quota is used up(?!.*free)"):
        built_toy(toy_base(tmp_path), save)


def test_a_unit_that_outgrows_the_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    """The limit on file size replaces a full disk: writes really fail, half way."""
    base = toy_base(tmp_path, "apple\nbanana\n" + "c" * 30_000)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        with pytest.raises(DiskFullError, match="letters c: "):
            built_toy(base)

    assert wait(fork(work)) == 0
    assert _no_temporaries(base)
    assert calls(base) == ["a", "b", "c"]
    assert not list((base / "artifacts").glob("letters/*/c*"))
    built_toy(base)
    assert calls(base)[3:] == ["c", "joined", "pair"]


def test_a_workspace_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    base = toy_base(tmp_path)
    (base / "artifacts").write_text("a file where the workspace should be")
    with pytest.raises(ExperimentError) as raised:
        built_toy(base)
    assert raised.value.where == str(base / "artifacts")
    assert "execution.workspace=DIR" in str(raised.value.fix)
    assert calls(base) == []


def test_another_fault_of_the_disk_is_one_error_with_its_place(tmp_path: Path) -> None:
    def fail(_run: Run, unit: Unit) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/mnt/texts")

    with pytest.raises(AmalgamError) as raised:
        built_toy(toy_base(tmp_path), fail)
    assert (raised.value.what, raised.value.where) == ("letters: Permission denied", "/mnt/texts")


# ---- shares


class Rounds(Letters):
    """Each round reveals one letter more, and another process completes it as soon as it is listed."""

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        units = super().units(run, folder)
        return units[: len(units) - len(pending_units(run, units)) + 1]

    def more_units(self, run: Run, folder: Path) -> Sequence[Unit]:
        units = self.units(run, folder)
        for unit in pending_units(run, units):
            self.run_unit(run, unit)
        return units


@pytest.mark.parametrize("share", [WorkerShare(), WorkerShare(0, 2, "part")])
def test_no_round_is_skipped_when_another_process_completes_one(tmp_path: Path, share: WorkerShare) -> None:
    run = toy_run(toy_base(tmp_path), share=share)
    update((Rounds(),), run)
    assert calls(tmp_path) == ["a", "b", "c"]
    assert run.result("letters").facts["units"] == 3


def _part(base: Path, index: int, count: int, *, force: bool = False) -> list[str]:
    """Return the units that this part computed, and the stage at which it ended."""
    before = len(calls(base))
    try:
        update(toy_stages(), toy_run(base, share=WorkerShare(index, count, "part")), force=force)
    except PartialRunDoneError as done:
        return [*calls(base)[before:], f"{done.state.stage} {done.state.done}/{done.state.total}"]
    return calls(base)[before:]


def test_parts_compute_their_share_and_the_last_one_continues(tmp_path: Path) -> None:
    base = toy_base(tmp_path / "parts")
    assert _part(base, 0, 2) == ["a", "c", "letters 2/3"]
    assert _part(base, 1, 2) == ["b", "joined", "pair"]  # the last part also computes what a single process does
    assert toy_run(base).store.head().keys() == {"letters", "joined", "pair"}
    assert _part(base, 0, 2) == []
    assert outcome(toy_run(base)) == outcome(built_toy(toy_base(tmp_path / "alone")))


def test_a_forced_part_computes_its_own_share_again_and_no_other(tmp_path: Path) -> None:
    base = toy_base(tmp_path / "parts")
    _part(base, 0, 2)
    _part(base, 1, 2)
    assert _part(base, 0, 2, force=True)[:2] == ["a", "c"]
    assert "b" in _part(base, 1, 2, force=True)
    assert not {"a", "c"} & set(_part(base, 1, 2, force=True))
    assert _part(base, 0, 2) == []


def test_every_unit_belongs_to_exactly_one_part() -> None:
    units = [Unit(str(index), Path()) for index in range(11)]
    for count in (1, 2, 3, 16):
        shares = [WorkerShare(index, count, "part").select(units) for index in range(count)]
        assert sorted((unit.name for share in shares for unit in share), key=int) == [unit.name for unit in units]


@pytest.mark.parametrize("part", ["4/4", "x/2", "1", "1/", "/2", "-1/2", "1/0", "²/4", ""])
def test_an_impossible_part_is_refused_with_an_example(part: str) -> None:
    with pytest.raises(ExperimentError) as raised:
        share_of(part)
    assert f"--part {part}" in raised.value.what
    assert "--part 0/4" in str(raised.value.fix)


def test_shares_come_from_the_command_or_from_torchrun_but_not_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert share_of(None) == WorkerShare()
    assert share_of("1/3") == WorkerShare(1, 3, "part")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert share_of(None) == WorkerShare(1, 2, "torchrun")
    assert not share_of(None).is_leader
    with pytest.raises(ExperimentError, match="--part and torchrun"):
        share_of("0/2")


def test_another_number_of_processes_than_asked_for_is_refused() -> None:
    check_processes(WorkerShare(0, 3, "part"), 2)
    check_processes(WorkerShare(1, 2, "torchrun"), 2)
    with pytest.raises(ExperimentError) as raised:
        check_processes(WorkerShare(), 2)
    assert "2 processes" in raised.value.what
    assert "torchrun --nproc_per_node 2" in str(raised.value.fix)
