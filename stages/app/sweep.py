"""Trains one student for each combination of the given field values (`amalgam sweep`).

Each student has its own identity, name and report; shared results are computed once. Students are trained one after
the other, or in parallel on a Ray cluster.
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

from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.faults import InterruptHandler
from amalgam.pipeline.execution.plan import plan
from amalgam.pipeline.execution.runner import update
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.app.api import QuietTables, open_run, working
from amalgam.stages.methods import load_with_methods
from amalgam.stages.registry import STAGES
from amalgam.stages.report.stage import evaluation_if_any
from amalgam.stages.report.tables import row

STUDENT = "train-student"

MOST = 200
"""Largest number of students in a sweep."""

SCORES = ("accuracy", "macro_f1", "nll_nats", "ece")


Found = dict[str, Any]


@dataclass(frozen=True)
class SweepRun:
    """One student of a sweep: its name, and the values that distinguish it."""

    name: str
    chosen: dict[str, str]
    overrides: list[str]


def run_sweep(config: Path, overrides: Sequence[str], *, quiet: bool, as_json: bool) -> None:
    members = members_of(config, overrides)
    run = open_run(config, members[0].overrides)
    if run.share.kind == "torchrun":
        raise ExperimentError("a sweep runs in one process", fix="omit torchrun, or set execution.engine=ray")
    if run.experiment.execution.engine == "ray":
        _train_at_once(config, members, quiet=quiet)
    results = []
    for member in members:
        if not quiet:
            Console().say(f"== {member.name}")
        run = open_run(config, member.overrides, console=QuietTables(quiet=quiet))
        with working(run):
            update(STAGES, run)
            results.append(_found(member, run))
    _show(Console(quiet=quiet), results, as_json=as_json)


# ---- combinations


def members_of(config: Path, overrides: Sequence[str]) -> list[SweepRun]:
    """Returns every combination, each validated as an experiment before any work."""
    fields = {field: values_of(text) for field, _, text in (one.partition("=") for one in overrides)}
    swept = {field: values for field, values in fields.items() if len(values) > 1}
    _refuse(swept)
    fixed = [one for one in overrides if one.partition("=")[0] not in swept]
    student = load_with_methods(config, [*fixed, *_first(swept)]).experiment.student
    first = [student.name] if "name" in student.model_fields_set else []
    members = []
    for values in itertools.product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        name = "-".join([*first, *(_word(field, value) for field, value in chosen.items())])
        settings = [*fixed, *(f"{field}={value}" for field, value in chosen.items()), f'student.name="{name}"']
        load_with_methods(config, settings)
        members.append(SweepRun(name, chosen, settings))
    alike = [name for name, members in itertools.groupby(sorted(one.name for one in members)) if len(list(members)) > 1]
    if alike:
        raise ExperimentError(f"two students have the name {alike[0]}", fix="name each value once")
    return members


def values_of(text: str) -> list[str]:
    """Returns the values between commas, unparsed; commas inside brackets and quotes do not separate."""
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
        raise ExperimentError(f"{how} does not distinguish students", fix=f"give {how} one value")
    if not swept:
        raise ExperimentError("no field has several values", fix="amalgam sweep student.seed=0,1,2")
    count = len(list(itertools.product(*swept.values())))
    if count > MOST:
        raise ExperimentError(f"{count:,} students exceed the limit of {MOST} in a sweep", fix="give fewer values")


def _first(swept: dict[str, list[str]]) -> list[str]:
    return [f"{field}={values[0]}" for field, values in swept.items()]


def _word(field: str, value: str) -> str:
    """Returns a part of the student's name; numbers include the name of their field."""
    word = re.sub(r"[^A-Za-z0-9._]+", "-", value).strip("-._") or "empty"
    return word if word[0].isalpha() and word not in {"true", "false", "null"} else f"{field.rpartition('.')[2]}-{word}"


# ---- on a cluster


def _train_at_once(config: Path, members: Sequence[SweepRun], *, quiet: bool) -> None:
    """Runs the earlier stages one after the other, since students share them; then trains students in parallel."""
    waiting: dict[str, Run] = {}
    for member in members:
        run = open_run(config, member.overrides, console=PrefixedConsole(member.name, quiet=quiet))
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
    """Prefixes each line with the name of its student."""

    def __init__(self, name: str, *, quiet: bool) -> None:
        super().__init__(quiet=quiet)
        self._name = name

    def say(self, text: str) -> None:
        super().say(f"{self._name}: {text}")

    def stage_reused(self, stage: str) -> None: ...


# ---- results


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


def _show(console: Console, results: list[Found], *, as_json: bool) -> None:
    seeds = list(over_seeds(results))
    if as_json:
        console.json({"students": results, "over_seeds": seeds})
        return
    measured = [item for item in results if item["judged"]]
    groups = measured[0]["groups"] if measured else {}
    rows = [row(item["name"], item["judged"], groups) if item["judged"] else [item["name"]] for item in results]
    rows += [
        [f"{item['name']}, mean of {item['students']}", *(_spread(*item[score]) for score in SCORES)] for item in seeds
    ]
    header = ["", "accuracy", "macro-F1", "NLL", "ECE", *(f"on {name}" for name in groups)] if measured else ["student"]
    title = f"{measured[0]['n']:,} labelled test texts" if measured else "no labelled test texts (corpus.test)"
    console.table(title, header, [[*cells, *[""] * (len(header) - len(cells))] for cells in rows])


def over_seeds(results: Sequence[Found]) -> Iterator[Found]:
    """Yields mean and standard deviation of students that differ only in seeds."""
    groups: dict[str, list[Found]] = {}
    for result in results:
        kept = [_word(field, value) for field, value in result["said"].items() if not field.endswith(".seed")]
        if result["judged"] and len(kept) < len(result["said"]):
            groups.setdefault("-".join(kept) or "all", []).append(result["judged"])
    for name, judged in groups.items():
        if len(judged) > 1:
            scores = {score: [result[score] for result in judged] for score in SCORES}
            complete = {score: values for score, values in scores.items() if None not in values}
            means = {score: (statistics.mean(values), statistics.stdev(values)) for score, values in complete.items()}
            yield {"name": name, "students": len(judged), **{score: means.get(score, (None, None)) for score in SCORES}}


def _spread(mean: float | None, deviation: float | None) -> str:
    return "-" if mean is None else f"{mean:.3f} ± {deviation:.3f}"
