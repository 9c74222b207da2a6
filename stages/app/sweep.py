"""`amalgam sweep`: several students by one command, one for each combination of the values that fields are given.

Each is an ordinary student of an ordinary run, with its own identity, name and report: what two of them share is made
once, and running again is resuming. One after the other; on a Ray cluster all at once.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from amalgam.pipeline.config.load import load_experiment
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.interrupts import InterruptHandler
from amalgam.pipeline.execution.plan import plan
from amalgam.pipeline.execution.runner import update
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.app.demo.with_texts import QuietTables
from amalgam.stages.app.session import open_run, working
from amalgam.stages.methods import PRESETS
from amalgam.stages.registry import STAGES
from amalgam.stages.report.stage import evaluation_if_any, row

STUDENT = "train-student"

MOST = 200
"""Students of one sweep: more are a slip of the keyboard."""

SCORES = ("accuracy", "macro_f1", "nll_nats", "ece")


Found = dict[str, Any]


@dataclass(frozen=True)
class SweepRun:
    """One student of a sweep: its name, and what it is told that others may not be."""

    name: str
    chosen: dict[str, str]
    overrides: list[str]


def run_sweep(config: Path, said: Sequence[str], *, quiet: bool, as_json: bool) -> None:
    members = members_of(config, said)
    _, run = open_run(config, members[0].overrides)
    if run.share.kind == "torchrun":
        raise ExperimentError("a sweep is of one process", fix="without torchrun; execution.engine=ray trains at once")
    if run.experiment.execution.engine == "ray":
        _train_at_once(config, members, quiet=quiet)
    found = []
    for member in members:
        if not quiet:
            Console().say(f"== {member.name}")
        _, run = open_run(config, member.overrides, console=QuietTables(quiet=quiet))
        with working(run):
            update(STAGES, run)
            found.append(_found(member, run))
    _show(Console(quiet=quiet), found, as_json=as_json)


# ---- what is swept


def members_of(config: Path, said: Sequence[str]) -> list[SweepRun]:
    """Every combination, each checked as an experiment before any work."""
    fields = {field: values_of(text) for field, _, text in (one.partition("=") for one in said)}
    swept = {field: values for field, values in fields.items() if len(values) > 1}
    _refuse(swept)
    fixed = [one for one in said if one.partition("=")[0] not in swept]
    student = load_experiment(config, [*fixed, *_first(swept)], presets=PRESETS).experiment.student
    first = [student.name] if "name" in student.model_fields_set else []
    found = []
    for values in itertools.product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        name = "-".join([*first, *(_word(field, value) for field, value in chosen.items())])
        told = [*fixed, *(f"{field}={value}" for field, value in chosen.items()), f'student.name="{name}"']
        load_experiment(config, told, presets=PRESETS)
        found.append(SweepRun(name, chosen, told))
    alike = [name for name, members in itertools.groupby(sorted(one.name for one in found)) if len(list(members)) > 1]
    if alike:
        raise ExperimentError(f"two students would be called {alike[0]}", fix="name each value once")
    return found


def values_of(text: str) -> list[str]:
    """Values between commas, as they were written; commas within brackets and quotes are a value's own."""
    flow = f"[{text}]"
    try:
        node = yaml.compose(flow, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return [text]
    items = node.value if isinstance(node, yaml.SequenceNode) and node.end_mark.index == len(flow) else []
    return [flow[item.start_mark.index : item.end_mark.index] for item in items] or [text]


def _refuse(swept: dict[str, list[str]]) -> None:
    how = next((field for field in swept if field.startswith("execution.") or field == "student.name"), None)
    if how:
        raise ExperimentError(f"{how} is no part of what a student is", fix=f"give {how} one value, and others several")
    if not swept:
        raise ExperimentError("no field has several values", fix="amalgam sweep student.seed=0,1,2")
    count = len(list(itertools.product(*swept.values())))
    if count > MOST:
        raise ExperimentError(f"{count:,} students, and {MOST} at most in one sweep", fix="give fewer values")


def _first(swept: dict[str, list[str]]) -> list[str]:
    return [f"{field}={values[0]}" for field, values in swept.items()]


def _word(field: str, value: str) -> str:
    """A part of a name: a method speaks for itself, a number does not."""
    word = re.sub(r"[^A-Za-z0-9._]+", "-", value).strip("-._") or "empty"
    return word if word[0].isalpha() and word not in {"true", "false", "null"} else f"{field.rpartition('.')[2]}-{word}"


# ---- on a cluster


def _train_at_once(config: Path, members: Sequence[SweepRun], *, quiet: bool) -> None:
    """All that students need, one after the other, since they share it; then the students themselves, a task each."""
    waiting: dict[str, Run] = {}
    for member in members:
        _, run = open_run(config, member.overrides, console=PrefixedConsole(member.name, quiet=quiet))
        wanted = [stage.name for stage in STAGES if stage.is_needed(run.experiment)]
        if STUDENT not in wanted:
            continue
        with working(run):
            update(STAGES, run, target=wanted[wanted.index(STUDENT) - 1])
            next(stage for stage in STAGES if stage.name == STUDENT).resolve_inputs(run)
            state = next(state for state in plan(STAGES, run) if state.stage == STUDENT)
        if state.state != "current" and state.fingerprint:
            waiting.setdefault(state.fingerprint, run)
    signals = InterruptHandler()
    with signals.listening(), ThreadPoolExecutor(max(len(waiting), 1)) as drivers:
        for run in waiting.values():
            run.signals = signals
        trained = [drivers.submit(update, STAGES, run, target=STUDENT) for run in waiting.values()]
    for one in trained:  # all have ended: an error of one has stopped no other
        one.result()


class PrefixedConsole(QuietTables):
    """Says of what is new whose it is."""

    def __init__(self, name: str, *, quiet: bool) -> None:
        super().__init__(quiet=quiet)
        self._name = name

    def _line(self, text: str) -> None:
        super()._line(f"{self._name}: {text}")

    def stage_reused(self, stage: str) -> None: ...


# ---- what is shown


def _found(member: SweepRun, run: Run) -> Found:
    scores = evaluation_if_any(run)
    learns = run.experiment.student.learns
    return {
        "name": member.name,
        "said": member.chosen,
        "fingerprint": run.fingerprint(STUDENT) if learns else None,
        "folder": str(run.base / "students" / member.name) if learns else None,
        "n": scores["n"] if scores else None,
        "groups": dict(scores["groups"]) if scores else {},
        "judged": scores["systems"][scores["system"]] if scores else None,
    }


def _show(console: Console, found: list[Found], *, as_json: bool) -> None:
    seeds = list(over_seeds(found))
    if as_json:
        console.json({"students": found, "over_seeds": seeds})
        return
    measured = [one for one in found if one["judged"]]
    groups = measured[0]["groups"] if measured else {}
    rows = [row(one["name"], one["judged"], groups) if one["judged"] else [one["name"]] for one in found]
    rows += [
        [f"{one['name']}, mean of {one['students']}", *(_spread(*one[score]) for score in SCORES)] for one in seeds
    ]
    header = ["", "accuracy", "macro-F1", "NLL", "ECE", *(f"on {name}" for name in groups)] if measured else ["student"]
    title = f"{measured[0]['n']:,} labelled test texts" if measured else "no labelled test texts (corpus.test)"
    console.table(title, header, [[*cells, *[""] * (len(header) - len(cells))] for cells in rows])


def over_seeds(found: Sequence[Found]) -> Iterator[Found]:
    """Mean and standard deviation of students that differ in nothing but seeds."""
    groups: dict[str, list[Found]] = {}
    for one in found:
        kept = [_word(field, value) for field, value in one["said"].items() if not field.endswith(".seed")]
        if one["judged"] and len(kept) < len(one["said"]):
            groups.setdefault("-".join(kept) or "all", []).append(one["judged"])
    for name, judged in groups.items():
        if len(judged) > 1:
            scores = {score: [one[score] for one in judged] for score in SCORES}
            known = {score: values for score, values in scores.items() if None not in values}
            means = {score: (statistics.mean(values), statistics.stdev(values)) for score, values in known.items()}
            yield {"name": name, "students": len(judged), **{score: means.get(score, (None, None)) for score in SCORES}}


def _spread(mean: float | None, deviation: float | None) -> str:
    return "-" if mean is None else f"{mean:.3f} ± {deviation:.3f}"
