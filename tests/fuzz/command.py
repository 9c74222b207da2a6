"""`python -m amalgam.tests.fuzz`: damages, attacks and uses small experiments at random, and counts the outcomes.

Every case has a seed of its own, so that `--seed 3 --only flips/complete/17` repeats one.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from amalgam.tests.fuzz import flips, hostile, sequences
from amalgam.tests.fuzz.experiments import EXPERIMENTS, Bench, Outcome, bench, limit_memory, quick

Case = Callable[[random.Random], tuple[str, str, list[Outcome]]]

PARTS = {"flips": 2000, "hostile": 500, "sequences": 100}
"""Cases of each part."""

SHARES = {"flips": flips.SHARES, "hostile": hostile.SHARES, "sequences": sequences.SHARES}

SHOWN = 5
"""Failing cases that are printed with the output of their commands."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m amalgam.tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of all cases (default: 0)")
    parser.add_argument("--seconds", type=float, default=3600, help="stop after this time (default: 3600)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS), help="default: all")
    parser.add_argument("--only", metavar="PART/EXPERIMENT/NUMBER", help="run one case and print its commands")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    return parser.parse_args()


def numbers(part: str, experiments: list[str]) -> dict[str, int]:
    """Returns the number of cases of each experiment."""
    shares = {name: share for name, share in SHARES[part].items() if name in experiments}
    return {name: PARTS[part] * share // (sum(shares.values()) or 1) for name, share in shares.items()}


def case_of(part: str, built: Bench) -> Case:
    if part == "sequences":
        tree = sequences.TheirTree(built)
        return lambda rng: sequences.case(built, tree, rng)
    return functools.partial({"flips": flips.case, "hostile": hostile.case}[part], built)


class Tally:
    """Counts verdicts by part, and prints the failing cases."""

    def __init__(self, *, verbose: bool) -> None:
        self.verdicts: dict[str, Counter[str]] = {}
        self.verbose, self.shown = verbose, 0

    def add(self, name: str, verdict: str, place: str, outcomes: list[Outcome]) -> None:
        part = name.partition("/")[0]
        word = verdict.partition(":")[0]
        self.verdicts.setdefault(part, Counter())[word] += 1
        if word == "WRONG":
            print(f"{name}: {verdict[:400]}\n  {place[:400]}", flush=True)
            if self.shown < SHOWN or self.verbose:
                self.shown += 1
                print(*outcomes, sep="\n", flush=True)
        elif self.verbose:
            print(f"{name}: {verdict}: {place[:200]}", flush=True)

    @property
    def failed(self) -> int:
        return sum(counts["WRONG"] for counts in self.verdicts.values())


def planned(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Yields part, experiment and number, all experiments and parts in turn, so that a short run has some of each."""
    counts = {(part, name): n for part in options.parts for name, n in numbers(part, options.experiments).items()}
    blocks = {key: max(1, count // BLOCKS) for key, count in counts.items()}
    for block in itertools.count():
        if all(block * blocks[key] >= count for key, count in counts.items()):
            return
        for part, name in sorted(counts, key=lambda key: key[1]):
            key = (part, name)
            cases = range(block * blocks[key], min((block + 1) * blocks[key], counts[key]))
            yield from ((part, name, number) for number in cases)


BLOCKS = 50
"""Number of times that a whole run takes the experiments in turn."""


class Cases:
    """Builds an experiment when its first case is due."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.benches: dict[str, Bench] = {}
        self.cases: dict[tuple[str, str], Case] = {}

    def run(self, part: str, name: str, rng: random.Random) -> tuple[str, str, list[Outcome]]:
        if name not in self.benches:
            self.benches[name] = bench(name, self.folder)
            limit_memory()
        if (part, name) not in self.cases:
            self.cases[part, name] = case_of(part, self.benches[name])
        return self.cases[part, name](rng)


def main() -> int:
    options = arguments()
    began, tally = time.monotonic(), Tally(verbose=options.verbose or bool(options.only))
    todo = planned(options)
    if options.only:
        part, name, number = options.only.split("/")
        todo = iter([(part, name, int(number))])
    with tempfile.TemporaryDirectory(prefix="amalgam-fuzz-") as folder, quick():
        tempfile.tempdir = folder  # for the files of faults
        cases = Cases(Path(folder))
        for part, name, number in todo:
            if time.monotonic() - began > options.seconds:
                print(f"stopped after {options.seconds:.0f} s")
                break
            rng = random.Random(f"{options.seed}/{part}/{name}/{number}")
            tally.add(f"{part}/{name}/{number}", *cases.run(part, name, rng))
    for part, verdicts in tally.verdicts.items():
        counts = ", ".join(f"{count:,} {verdict}" for verdict, count in sorted(verdicts.items()))
        print(f"{part}: {sum(verdicts.values()):,} of {PARTS[part]:,} cases, seed {options.seed}: {counts}")
    print(f"{time.monotonic() - began:.0f} s; {tally.failed} wrong")
    return 1 if tally.failed else 0
