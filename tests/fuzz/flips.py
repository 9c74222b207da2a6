"""One bit flipped in any file that amalgam made, then `verify` and `run`: caught or harmless, and equal results."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amalgam.pipeline.storage.store import TIMING
from amalgam.tests.fuzz.experiments import Bench, Outcome, delivered, difference, results_of

SHARES: Mapping[str, int] = {"complete": 8, "stopped": 4, "trained": 3, "weighed": 3, "written": 2}
"""Cases of each experiment, of twenty."""

PAGES = "reports/"

HEX = re.compile(r"[0-9a-f]{8,}|\d+")

DAMAGE = re.compile(r"(?<! 0 )damaged|restored|quarantined|missing|is broken")


@dataclass(frozen=True)
class Flip:
    path: Path
    place: int
    bit: int

    def apply(self) -> None:
        """Flips the bit as a faulty disk does: the file's times stay."""
        status = self.path.stat()
        with self.path.open("r+b") as file:
            file.seek(self.place)
            byte = file.read(1)[0]
            file.seek(self.place)
            file.write(bytes([byte ^ (1 << self.bit)]))
        os.utime(self.path, ns=(status.st_atime_ns, status.st_mtime_ns))


def kind(path: Path, bench: Bench) -> str:
    """Returns the path without digests and numbers."""
    folder = bench.workspace.folder
    inside = path.relative_to(folder) if path.is_relative_to(folder) else Path("cache", *path.parts[-4:])
    return HEX.sub("*", str(inside))


def choose(bench: Bench, rng: random.Random) -> Flip:
    """Chooses a place: of all kinds of files alike in half of the cases, of all bytes alike in the others."""
    sizes = {path: len(entry.content) for path, entry in bench.made.kept.items() if isinstance(entry.content, bytes)}
    paths = sorted(path for path, size in sizes.items() if size)
    if rng.random() < 0.5:
        kinds: dict[str, list[Path]] = {}
        for path in paths:
            kinds.setdefault(kind(path, bench), []).append(path)
        path = rng.choice(kinds[rng.choice(sorted(kinds))])
    else:
        path = rng.choices(paths, [sizes[path] for path in paths])[0]
    return Flip(path, rng.randrange(sizes[path]), rng.randrange(8))


def judge(bench: Bench, flip: Flip, outcomes: Sequence[Outcome]) -> str:
    """Returns "caught", "harmless", or the fault."""
    wrong = next((fault for outcome in outcomes if (fault := _fault_of(outcome))), None)
    if wrong is None and outcomes[-1].code:
        wrong = "still damaged after verify and run"
    if wrong is None and bench.inputs.changes():
        wrong = f"inputs changed: {bench.inputs.changes()[:3]}"
    wrong = wrong or _other_result(bench, flip, outcomes)
    if wrong:
        return f"WRONG: {wrong}"
    return "caught" if any(outcome.code or DAMAGE.search(outcome.text) for outcome in outcomes) else "harmless"


def _fault_of(outcome: Outcome) -> str | None:
    name = outcome.words[0]
    if outcome.is_fault:
        return f"{name} ended with a traceback, without memory, or not at all"
    return f"{name} exited with {outcome.code}" if outcome.code and (name, outcome.code) != ("verify", 1) else None


def _other_result(bench: Bench, flip: Flip, outcomes: Sequence[Outcome]) -> str | None:
    """Compares the results within rounding, and the delivered files exactly if no stage ran.

    A page may lose the content of a damaged record of a report, if a command names the damage.
    """
    is_announced = "report" in flip.path.parts[-4:-2] and any(DAMAGE.search(outcome.text) for outcome in outcomes)

    def compared(contents: Mapping[str, Any]) -> dict[str, Any]:
        return {path: content for path, content in contents.items() if not (is_announced and path.startswith(PAGES))}

    try:
        place = difference(compared(bench.results), compared(results_of(bench.workspace)))
    except Exception as error:  # noqa: BLE001 - of any library that reads a damaged file
        return f"a result is unreadable: {error}"
    if place is not None:
        return f"another result: {place}"
    if flip.path.name == TIMING or any("running (" in outcome.text for outcome in outcomes):
        return None
    files, raw = compared(delivered(bench.workspace, Path.read_bytes)), compared(bench.raw)
    return next((f"another result: {path} has other bytes" for path in files if files[path] != raw.get(path)), None)


def case(bench: Bench, rng: random.Random) -> tuple[str, str, list[Outcome]]:
    """Returns the verdict, the place of the flip and the commands of one case."""
    bench.made.restore()
    flip = choose(bench, rng)
    flip.apply()
    commands = (
        (("verify",), ("run",), ("verify",)) if rng.random() < 0.75 else (("run",), ("verify",), ("run",), ("verify",))
    )
    outcomes = [bench.command(*words) for words in commands]
    place = f"{kind(flip.path, bench)} [{flip.path.name}] byte {flip.place} bit {flip.bit}"
    return judge(bench, flip, outcomes), place, outcomes
