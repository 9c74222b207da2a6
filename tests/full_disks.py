"""`python -m amalgam.tests.full_disks`: runs commands on disks with 60 amounts of free space; `make check-disk`.

A disk is mounted once, on tmpfs and on ext4, and a file takes its space except the blocks of the case. After a
command failed, the file is deleted, and the next `run` must end with the results of an undisturbed one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from amalgam.pipeline.errors import DamagedError, DiskFullError, ExperimentError, FaultError
from amalgam.tests.forking import Forked
from amalgam.tests.fuzz.experiments import (
    EXPERIMENTS,
    OURS,
    Outcome,
    Snapshot,
    difference,
    entries,
    quick,
    results_of,
)
from amalgam.tests.workspaces import finish, flip_bit, quiet_environment

SIZES = 60
"""Cases of each disk and part, from a full disk to one with a little more space than an undisturbed run takes."""

DISKS = ("tmpfs", "ext4")
CAPACITY = 64 << 20
BLOCK = 4096
STEPS = (1 << 24, 1 << 18, BLOCK)
"""Bytes by which the file that takes the space grows."""
MARGIN = 1.1

LOOKS: Sequence[tuple[str, ...]] = (("plan",), ("status",), ("verify",), ("gc", "--yes"), ("run",), ("doctor",))
"""Commands of which each case of a new experiment runs one after the `run` that failed."""

LATER: Sequence[tuple[str, ...]] = (
    ("verify", "--repair"),
    ("predict", "--input", "texts/test.csv", "--out", "predictions.parquet"),
    ("report", "--force"),
    ("gc", "--compact", "--yes"),
    ("run", "targets.temperature=0.5", "student.name=other"),
    ("export", "--onnx"),
    ("predict", "--input", "texts/test.csv", "--out", "predictions.csv"),
    ("sweep", "student.seed=3,4"),
    ("run",),
)
"""Commands of a finished experiment, one of whose delivered files is damaged; each case runs AT_ONCE in turn."""

AT_ONCE = 3

PARTS = ("begin", "meanwhile", "later")
"""`meanwhile` is `begin` without the check before the work, as if another program took the space after it."""

UNCHECKED = "--unchecked"
FULL = ("the disk is full", "too little space")
DAMAGED = "the model is damaged"
"""Message of a command that needs the student while the disk has no space for another copy of a damaged file."""


@dataclass(frozen=True)
class Disk:
    """A mounted file system of its own."""

    folder: Path

    @property
    def free(self) -> int:
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize

    @property
    def ballast(self) -> Path:
        return self.folder / "ballast"

    def leave(self, count: int) -> None:
        """Takes all space but `count` bytes."""
        self.release()
        with self.ballast.open("wb") as file:
            for step in STEPS:  # ext4 needs blocks for the extents of the file itself
                with contextlib.suppress(OSError):
                    while (taken := min(step, self.free - count)) > 0:
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, taken)

    def release(self) -> None:
        self.ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def mounted(kind: str, scratch: Path, capacity: int = CAPACITY) -> Iterator[Disk]:
    """Mounts an empty disk; needs root, or a user namespace (`unshare --map-root-user --mount`) for tmpfs."""
    folder, image = scratch / kind, scratch / f"{kind}.img"
    folder.mkdir()
    words = ["-t", "tmpfs", "-o", f"size={capacity}", "tmpfs"]
    if kind == "ext4":
        with image.open("wb") as file:
            file.truncate(capacity)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True, capture_output=True)
        words = ["-o", "loop", str(image)]
    subprocess.run(["mount", *words, folder], check=True, capture_output=True)
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


class Probe:
    """An experiment on a disk: its inputs, its undisturbed results, and the space that they take."""

    def __init__(self, disk: Disk, experiment: str) -> None:
        self.disk = disk
        before = disk.free
        self.workspace, self.results = EXPERIMENTS[experiment](disk.folder / "experiment")
        folder = self.workspace.folder
        self.finished = Snapshot(*(folder / name for name in OURS))
        self.delete_results()
        self.inputs = Snapshot(folder)
        inputs = before - disk.free
        assert self.command("run").code == 0
        self.results = results_of(self.workspace)
        self.needed = before - disk.free - inputs

    def delete_results(self) -> None:
        for name in OURS:
            shutil.rmtree(self.workspace.folder / name, ignore_errors=True)

    def command(self, *words: str, checked: bool = True) -> Outcome:
        """Runs a command in a process, whose temporary files are on the same disk."""
        module = "amalgam.__main__" if checked else "amalgam.tests.full_disks"
        given = words if checked else (UNCHECKED, *words)
        environment = quiet_environment(TMPDIR=str(self.disk.folder), AMALGAM_CACHE=str(self.disk.folder / "cache"))
        result = finish(Forked(given, self.workspace.folder, environment, module))
        return Outcome(words, result.code, result.err + result.out)

    def restore(self, *, finished: bool) -> None:
        self.disk.release()
        folder = self.workspace.folder
        for path in self.disk.folder.iterdir():
            if path != folder and path.name != "lost+found":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.delete_results()
        self.inputs.restore()
        if finished:
            self.finished.restore()
            flip_bit(folder / "students/student/model.safetensors")

    def case(self, part: str, number: int, left: int) -> tuple[str, list[Outcome]]:
        """Returns the verdict and the commands of one case."""
        self.restore(finished=part == "later")
        self.disk.leave(left)
        words = (
            [LATER[(number + step) % len(LATER)] for step in range(AT_ONCE)]
            if part == "later"
            else [("run",), LOOKS[number % len(LOOKS)]]
        )
        outcomes = [self.command(*command, checked=part != "meanwhile") for command in words]
        wrong = next((fault for outcome in outcomes if (fault := fault_of(outcome))), None)
        has_failed = any(outcome.code for outcome in outcomes)
        self.disk.release()
        outcomes += [self.command("run"), self.command("verify")]
        wrong = wrong or self._after(outcomes[-2:], with_others=part == "later")
        return f"WRONG: {wrong}" if wrong else "refused" if has_failed else "enough", outcomes

    def _after(self, outcomes: Sequence[Outcome], *, with_others: bool) -> str | None:
        """Returns the fault after space was freed, the experiment was run, and it was verified.

        `with_others`: there may be other students, which reports list.
        """
        failed = [outcome for outcome in outcomes if outcome.code]
        if failed:
            return f"{failed[0].words[0]} exited with {failed[0].code} on a disk with space"
        left = [str(path) for path in entries(self.disk.folder) if path.name.startswith((".tmp-", "amalgam-fault-"))]
        if left:
            return f"temporary files are left: {left[:3]}"
        expected, results = (
            {
                path: content
                for path, content in contents.items()
                if path in self.results and not (with_others and "report" in path)
            }
            for contents in (self.results, results_of(self.workspace))
        )
        place = difference(expected, results)
        return f"another result: {place}" if place else None


ENDS = {0, DiskFullError.exit_code, DamagedError.exit_code, ExperimentError.exit_code}


def fault_of(outcome: Outcome) -> str | None:
    """Returns the fault of a command's end, or None."""
    name, text = " ".join(outcome.words), outcome.text
    if outcome.code == FaultError.exit_code or "Traceback" in text or outcome.code not in ENDS:
        return f"{name} ended with a traceback or with {outcome.code}"
    lines = text.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if outcome.code and not errors:
        return f"{name} has no error message"
    if outcome.code and outcome.words != ("verify",):
        if not any(words in text for words in (*FULL, DAMAGED)):
            return f"{name} does not name the full disk"
        parts = ("fix: ",) if outcome.words[0] == "doctor" else ("where: ", "fix: ")  # its table names the folder
        if not all(any(line.startswith(part) for line in lines) for part in parts):
            return f"{name} names no place or no fix"
    is_report = any(line.startswith(("error: report ", "error: report:")) for line in errors)  # it is small
    if outcome.words[0] == "run" and outcome.code and "need" not in text and not is_report:
        return f"{name} does not name the need"
    return None


def run_unchecked() -> None:
    """Runs the command of the other arguments without the check of free space before the work."""
    from amalgam.cli import main as run_command
    from amalgam.pipeline.execution import disk_space

    setattr(disk_space, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=1 << 60)))  # noqa: B010
    sys.argv = ["amalgam", *sys.argv[2:]]
    run_command()


def sizes(needed: int, count: int) -> list[int]:
    """Returns the bytes that the cases leave free, in whole blocks."""
    return [round(needed * MARGIN * number / max(count - 1, 1) / BLOCK) * BLOCK for number in range(count)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m amalgam.tests.full_disks", description=__doc__)
    parser.add_argument("--sizes", type=int, default=SIZES, help=f"cases of each disk and part (default: {SIZES})")
    parser.add_argument("--disks", nargs="+", choices=DISKS, default=list(DISKS), help="default: all")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--experiment", choices=EXPERIMENTS, default="weighed", help="default: weighed")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run one size and print its commands")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    verdicts: Counter[tuple[str, ...]] = Counter()
    shown = 0
    with tempfile.TemporaryDirectory(prefix="amalgam-disks-") as scratch, quick():
        for kind in options.disks:
            with mounted(kind, Path(scratch)) as disk:
                probe = Probe(disk, options.experiment)
                for part in options.parts:
                    for number, left in enumerate(sizes(probe.needed, options.sizes)):
                        if options.only not in {None, number}:
                            continue
                        verdict, outcomes = probe.case(part, number, left)
                        verdicts[kind, part, verdict.partition(":")[0]] += 1
                        if verdict.startswith("WRONG"):
                            print(f"{kind}/{part}/{number} ({left:,} bytes): {verdict}", flush=True)
                        if options.only is not None or (verdict.startswith("WRONG") and shown < 5):
                            shown += 1
                            print(*outcomes, sep="\n", flush=True)
    for (kind, part, verdict), count in verdicts.items():
        print(f"{kind}, {part}: {count} {verdict}")
    return 1 if any(verdict == "WRONG" for *_, verdict in verdicts) else 0


if __name__ == "__main__":
    if sys.argv[1:2] == [UNCHECKED]:
        run_unchecked()
    else:
        sys.exit(main())
