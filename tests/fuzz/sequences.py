"""Random sequences of commands in a workspace full of a user's files, which must stay byte-equal."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

from amalgam.tests.fuzz.experiments import OURS, Bench, Outcome, Snapshot, entries, write_canary

STEPS = 8
"""Commands of a sequence."""

SHARES: Mapping[str, int] = {"complete": 10, "trained": 5, "written": 5}
"""Cases of each experiment, of twenty."""

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("run",),
    ("run", "targets.temperature=0.5"),
    ("run", "student.name=other"),
    ("run", "student.name=mine"),
    ("run", "student.name=../mine"),
    ("run", "student.seed=3"),
    ("run", "execution.workspace=mine"),
    ("run", "execution.workspace=."),
    ("run", "execution.workspace=.."),
    ("run", "execution.workspace=new"),
    ("gc", "--yes", "execution.workspace=mine"),
    ("gc", "--yes", "execution.workspace=."),
    ("gc", "--yes"),
    ("gc", "--unused", "--yes"),
    ("gc", "--unused", "--yes", "targets.temperature=0.9"),
    ("gc", "--compact", "--yes"),
    ("verify",),
    ("verify", "--repair"),
    ("cache-teachers", "--force"),
    ("build-targets", "--force"),
    ("train-student", "--force"),
    ("report", "--force"),
    ("sweep", "targets.temperature=0.3,0.6"),
    ("sweep", "student.seed=5,6", "student.name=mine"),
    ("predict", "the onion was fried"),
    ("predict", "--input", "texts/test.csv", "--out", "mine.csv"),
    ("predict", "--input", "texts/test.csv", "--out", "../canary/thesis.tex"),
    ("predict", "--input", "texts/test.csv", "--out", "predictions.csv", "--force"),
    ("push", "me/student", "--yes"),
    ("audit",),
    ("status",),
    ("plan",),
    ("doctor",),
    ("init",),
)

EDITS = ("age", "damage", "lose", "edit")


def their_files(bench: Bench) -> list[Path]:
    """Writes a user's files around the workspace, in it, and next to the delivered results."""
    folder, artifacts = bench.workspace.folder, bench.workspace.artifacts
    roots = [folder / "mine", folder / "notes", artifacts / "mine", artifacts / "thesis"]
    roots += [artifacts / room / "mine" for room in ("cache-teachers", "train-student", "quarantine", "pins", "tokens")]
    roots += [folder / room / "mine" for room in OURS[1:]]
    for root in roots:
        write_canary(root)
    singles = [
        *(folder / name for name in ("mine.csv", "README.md", "model.safetensors", ".git/HEAD", "data/mine.parquet")),
        *(
            artifacts / name
            for name in ("model.safetensors", "mine.json", "x-01234567.parquet", ".tmp-mine", "a/b/c.parquet")
        ),
        *(artifacts / f"{room}/mine.json" for room in ("read-corpus", "cache-teachers", "report", "training-logs")),
        *(artifacts / f"{room}/model.safetensors" for room in ("train-student", "quarantine", "build-targets")),
        *(folder / f"students/{name}" for name in ("notes.md", ".tmp-mine", "student/README.md", "student/mine.csv")),
        *(folder / f"reports/{name}" for name in ("mine.html", "mine.json", "student.csv", "figure.svg")),
    ]
    for path in singles:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"mine: {path.name}")
    link = artifacts / "thesis/out"
    link.symlink_to(folder / "mine")
    return [*roots, *singles, link]


class TheirTree:
    """A user's files, which are also among those of amalgam."""

    def __init__(self, bench: Bench) -> None:
        bench.made.restore()
        paths = their_files(bench)
        self.snapshot = Snapshot(*paths)
        self.inputs = bench.inputs
        self.everything = Snapshot(bench.workspace.folder, bench.cache, bench.canary)

    def changes(self) -> list[str]:
        return [*self.snapshot.changes(), *self.inputs.changes()]


def edit(bench: Bench, tree: TheirTree, rng: random.Random) -> str:
    """Ages all files, or damages or deletes one of amalgam's."""
    theirs = set(tree.snapshot.kept) | set(tree.inputs.kept)
    how = rng.choice(EDITS)
    ours = [path for path in bench.made.files() if path.exists() and path not in theirs]
    if how == "age" or not ours:
        for path in entries(bench.workspace.folder):
            os.utime(path, (0, 0), follow_symlinks=False)
        return "age"
    path = rng.choice(ours)
    if how == "lose":
        path.unlink()
    else:
        raw = bytearray(path.read_bytes() or b"x")
        raw[rng.randrange(len(raw))] ^= 1
        path.write_bytes(bytes(raw))
    return f"{how} {path.relative_to(bench.workspace.folder.parent)}"


def case(bench: Bench, tree: TheirTree, rng: random.Random) -> tuple[str, str, list[Outcome]]:
    """Returns the verdict, the steps and the commands of one sequence."""
    tree.everything.restore()
    done: list[str] = []
    outcomes: list[Outcome] = []
    for words in steps(rng):
        if words is None:
            done.append(edit(bench, tree, rng))
            continue
        outcomes.append(bench.command(*words))
        done.append(" ".join(words))
        changed = tree.changes()
        if changed:
            return f"WRONG: a user's files changed: {changed[:4]}", "; ".join(done), outcomes
        if outcomes[-1].is_fault:
            return f"WRONG: {words[0]} ended with a traceback or not at all", "; ".join(done), outcomes
    return "unharmed", "; ".join(done), outcomes


def steps(rng: random.Random) -> Iterator[tuple[str, ...] | None]:
    for _ in range(STEPS):
        if rng.random() < 0.4:
            yield None
        yield rng.choice(COMMANDS)
