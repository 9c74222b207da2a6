"""Compares the reports of several runs in one table, printed and as a page; no run is evaluated again.

Two runs on the same texts are compared text by text, which gives the narrowest interval.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np

from amalgam.pipeline.console import Console, duration
from amalgam.pipeline.errors import DataError, ExperimentError
from amalgam.stages.report.blocks import ReportJson
from amalgam.stages.report.html import FOLDER, publish, render, size, total_seconds
from amalgam.stages.report.report_json import FORMAT
from amalgam.stages.report.summary import NORMAL_95, interval, percent

SUFFIXES = (".yaml", ".yml")

NAME = "comparison"

MOST_RUNS, MOST_FIELDS, MOST_GROUPS = 24, 40, 12

STEPS = ("teachers", "choice", "fit", "choice and fit")


class Difference(TypedDict):
    """The difference of accuracy of two runs, with its 95 % interval."""

    mean: float
    low: float
    high: float
    gained: int
    lost: int


class RunRow(TypedDict):
    name: str
    method: str
    fingerprint: str
    n: int | None
    accuracy: float | None
    macro_f1: float | None
    nll_nats: float | None
    nll_infinite: int | None
    ece: float | None
    low: float | None
    high: float | None
    against_first: Difference | None
    accuracy_losses: dict[str, float]
    seconds: float | None
    text_passes: int
    student_bytes: int | None


class Group(TypedDict):
    group: str
    accuracy: list[float | None]


class Setting(TypedDict):
    field: str
    values: list[str]


class Comparison(TypedDict):
    """reports/comparison.json."""

    amalgam_report: int
    same_texts: bool
    runs: list[RunRow]
    chance: float | None
    groups: list[Group]
    settings: list[Setting]
    summary: str


def report(  # noqa: PLR0913 - the options of a command
    config: Path, arguments: list[str], *, only: bool, force: bool, part: str | None, quiet: bool
) -> None:
    """Makes the report of one experiment file, or compares the reports of several students or files."""
    from amalgam.stages.app.commands import run_stages

    overrides = [argument for argument in arguments if "=" in argument]
    names = [argument for argument in arguments if "=" not in argument]
    if not names or (len(names) == 1 and names[0].endswith(SUFFIXES)):
        file = Path(names[0]) if names else config
        run_stages(file, overrides, target="report", only=only, force=force, part=part, quiet=quiet)
    elif len(names) == 1:
        read_report(_report_path(config.parent, names[0]))  # a missing report is the first error
        fix = f"name two runs or more; the page of this run is {FOLDER}/{names[0]}.html"
        raise ExperimentError(f"a comparison needs two runs, got {names[0]}", fix=fix)
    elif only or force or part:
        fix = "remove these options, or name one file"
        raise ExperimentError("a comparison takes none of --no-upstream, --force and --part", fix=fix)
    else:
        _compare_named(config, names, overrides, quiet=quiet)


def _compare_named(config: Path, names: list[str], overrides: list[str], *, quiet: bool) -> None:
    """Runs each file and reads its report at once: a later file may have the same student name."""
    reports = {}
    for name in names:
        path = _report_path(config.parent, name)
        if name.endswith(SUFFIXES):
            path = _run_file(Path(name), overrides, quiet=quiet)
        reports[name.removesuffix(".yaml").removesuffix(".yml")] = read_report(path)
    files = [Path(name) for name in names if name.endswith(SUFFIXES)]
    compare((files[0] if files else config).parent.absolute(), reports, Console(quiet=quiet))


def _run_file(file: Path, overrides: list[str], *, quiet: bool) -> Path:
    """Runs the file as `amalgam run` does: overrides of earlier commands have no effect."""
    from amalgam.stages.app.commands import run_stages

    return run_stages(file, overrides, target=None, quiet=quiet).report.with_suffix(".json")


def _report_path(base: Path, name: str) -> Path:
    return base / FOLDER / f"{name}.json"


def read_report(path: Path) -> ReportJson:
    """Reads and checks a report's JSON, which a user may have edited."""
    fix = "run `amalgam report` with this student.name first"
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        names = sorted(file.stem for file in path.parent.glob("*.json") if file.stem != NAME)
        existing = f" (existing: {', '.join(names)})" if names else ""
        raise ExperimentError(f"there is no report of {path.stem}{existing}", where=str(path), fix=fix) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path.name} cannot be read as a report", where=str(path), fix=fix) from error
    if not isinstance(content, dict) or content.get("amalgam_report") != FORMAT or "evaluation" not in content:
        raise DataError(f"{path.name} is not a report of this amalgam version", where=str(path), fix=fix)
    return cast("ReportJson", content)


def compare(base: Path, reports: Mapping[str, ReportJson], console: Console) -> None:
    """Prints the comparison and writes its page; the keys of `reports` are the names of the runs."""
    runs = [cast("ReportJson", {**run, "name": name}) for name, run in reports.items()]
    comparison = comparison_of(runs)
    rows = _table(comparison)
    console.table("", ["", *reports], rows)
    console.sentence(comparison["summary"])
    page = render("comparison.html.j2", numbers=comparison, rows=rows)
    contents = {".html": page.encode(), ".json": (json.dumps(comparison, indent=1) + "\n").encode()}
    console.say(f"report: {publish(base, NAME, contents)}")


def comparison_of(runs: Sequence[ReportJson]) -> Comparison:
    if len(runs) > MOST_RUNS:
        raise ExperimentError(f"a comparison takes at most {MOST_RUNS} runs, got {len(runs)}", fix="name fewer runs")
    first = runs[0]
    same_texts = all(_same_texts(run, first) for run in runs)
    comparison: Comparison = {
        "amalgam_report": FORMAT,
        "same_texts": same_texts,
        "runs": [_run_row(run, first) for run in runs],
        "chance": first["chance"] if same_texts else None,
        "groups": _groups(runs) if same_texts else [],
        "settings": list(_differing_settings(runs)),
        "summary": "",
    }
    comparison["summary"] = _summary(comparison, runs)
    return comparison


def _same_texts(a: ReportJson, b: ReportJson) -> bool:
    if not a["evaluation"] or not b["evaluation"] or a["test"] != b["test"]:
        return False
    counts = [(run["n"], run["left_out"]) for run in (a["evaluation"], b["evaluation"])]
    return bool(a["test"]) and counts[0] == counts[1]


def _run_row(run: ReportJson, first: ReportJson) -> RunRow:
    evaluation = run["evaluation"]
    scores = evaluation["systems"][evaluation["system"]] if evaluation else None
    low, high = interval(scores["accuracy"], scores["n"]) if scores else (None, None)
    return {
        "name": run["name"],
        "method": run["method"],
        "fingerprint": run["fingerprint"],
        "n": evaluation["n"] if evaluation else None,
        "accuracy": scores["accuracy"] if scores else None,
        "macro_f1": scores["macro_f1"] if scores else None,
        "nll_nats": scores["nll_nats"] if scores else None,
        "nll_infinite": scores["nll_infinite"] if scores else None,
        "ece": scores["ece"] if scores else None,
        "low": low,
        "high": high,
        "against_first": None if run is first else difference(run, first),
        "accuracy_losses": {loss["step"]: loss["lost"] for loss in run["accuracy_losses"]},
        "seconds": total_seconds(run),
        "text_passes": sum(cost["text_passes"] for cost in run["teacher_costs"]),
        "student_bytes": run["student"]["bytes"] if run["student"] else None,
    }


def difference(run: ReportJson, other: ReportJson) -> Difference | None:
    """Compares two runs text by text; None if the texts differ or were too many to store."""
    sides = [side["student_quality"] and side["student_quality"]["right_hex"] for side in (run, other)]
    if not _same_texts(run, other) or not run["evaluation"] or not all(sides):
        return None
    n = run["evaluation"]["n"]
    ours, theirs = (np.unpackbits(np.frombuffer(bytes.fromhex(side or ""), np.uint8))[:n].astype(int) for side in sides)
    gained, lost = int((ours > theirs).sum()), int((ours < theirs).sum())
    mean = (gained - lost) / n
    reach = NORMAL_95 * math.sqrt(max(gained + lost - n * mean**2, 0.0)) / n
    return {"mean": mean, "low": mean - reach, "high": mean + reach, "gained": gained, "lost": lost}


def _groups(runs: Sequence[ReportJson]) -> list[Group]:
    """Returns the accuracy on the labels of each teacher that all runs have."""
    slices = [
        evaluation["systems"][evaluation["system"]]["slice_accuracy"]
        for evaluation in (run["evaluation"] for run in runs)
        if evaluation
    ]
    shared = [name for name in slices[0] if all(name in accuracy for accuracy in slices)]
    return [{"group": name, "accuracy": [accuracy[name] for accuracy in slices]} for name in shared[:MOST_GROUPS]]


def _differing_settings(runs: Sequence[ReportJson]) -> Iterator[Setting]:
    settings = [dict(_leaves(run["settings"])) for run in runs]
    fields = [field for field in dict.fromkeys(key for leaves in settings for key in leaves) if field != "student.name"]
    differ = [field for field in fields if len({json.dumps(leaves.get(field)) for leaves in settings}) > 1]
    for field in differ[:MOST_FIELDS]:
        yield {"field": field, "values": [_value(leaves.get(field)) for leaves in settings]}
    if len(differ) > MOST_FIELDS:
        yield {"field": f"and {len(differ) - MOST_FIELDS} more", "values": ["" for _ in settings]}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _value(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _summary(comparison: Comparison, runs: Sequence[ReportJson]) -> str:
    order = sorted(
        ((accuracy, row, run) for row, run in zip(comparison["runs"], runs, strict=True)
         if (accuracy := row["accuracy"]) is not None),
        key=lambda entry: -entry[0],
    )  # fmt: skip
    if len(order) < 2:
        return "No run can be called better: fewer than two have labelled test texts."
    if not comparison["same_texts"]:
        return "The runs have different test texts, so their accuracies cannot be compared."
    (best, best_row, best_run), (second, second_row, second_run) = order[:2]
    accuracies = f"{best_row['name']} has the highest accuracy, {percent(best)} on {best_row['n']:,} test texts"
    accuracies += f"; {second_row['name']} is next with {percent(second)}"
    lead = difference(best_run, second_run)
    if lead is None:
        return f"{accuracies}."
    points = f"{100 * lead['mean']:.1f} points (95 % interval {100 * lead['low']:.1f} to {100 * lead['high']:.1f})"
    significant = "significant" if lead["low"] > 0 else "not significant"
    return f"{accuracies}. The difference, {points}, is {significant}."


def _table(comparison: Comparison) -> list[list[str]]:
    """Returns one row per measure: its name and the value of each run."""
    runs = comparison["runs"]
    rows = [
        ["method", *(run["method"] for run in runs)],
        ["accuracy", *(_number(run["accuracy"]) for run in runs)],
        ["95 % interval", *("-" if run["low"] is None else f"{run['low']:.3f} to {run['high']:.3f}" for run in runs)],
        ["against the first", *(_difference(run["against_first"]) for run in runs)],
        ["n", *("-" if run["n"] is None else f"{run['n']:,}" for run in runs)],
        ["macro-F1", *(_number(run["macro_f1"]) for run in runs)],
        ["NLL", *("∞" if run["nll_infinite"] else _number(run["nll_nats"]) for run in runs)],
        ["ECE", *(_number(run["ece"]) for run in runs)],
    ]
    rows += [[f"on labels of {group['group']}", *map(_number, group["accuracy"])] for group in comparison["groups"]]
    for step in STEPS:
        if any(step in run["accuracy_losses"] for run in runs):
            lost = [run["accuracy_losses"].get(step) for run in runs]
            rows.append([f"lost: {step}", *("-" if loss is None else f"{100 * loss:+.1f}" for loss in lost)])
    return [
        *rows,
        ["time", *("-" if run["seconds"] is None else duration(run["seconds"]) for run in runs)],
        ["text-passes of teachers", *(f"{run['text_passes']:,}" for run in runs)],
        ["size of the student", *(size(run["student_bytes"]) for run in runs)],
        ["report", *(run["fingerprint"] for run in runs)],
    ]


def _difference(against: Difference | None) -> str:
    return "" if against is None else f"{against['mean']:+.3f} ({against['low']:+.3f} to {against['high']:+.3f})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
