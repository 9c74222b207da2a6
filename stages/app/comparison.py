"""Compares the reports of several runs text by text, which gives the narrowest interval; nothing is evaluated again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast, get_type_hints

from amalgam.data.lazy import pl
from amalgam.pipeline.config.schema import COMPARISON
from amalgam.pipeline.console import Console, duration, size
from amalgam.pipeline.errors import DataError, ExperimentError
from amalgam.pipeline.notebook import Printed
from amalgam.pipeline.storage.facts import fits
from amalgam.stages.common.deliveries import REPORTS, STUDENTS, read_metadata
from amalgam.stages.common.intervals import bounds, difference_bounds, interval, paired, percent, points
from amalgam.stages.report.conditions import too_many_learned
from amalgam.stages.report.json_types import ReportJson, SystemScores, reported_scores
from amalgam.stages.report.report_json import FORMAT, total_seconds
from amalgam.stages.report.students import gained_lost
from amalgam.stages.report.tables import SCORES, measure, print_evaluation, share
from amalgam.stages.report.verdict_types import Estimate
from amalgam.stages.report.verdict_words import learned_sentence

MOST_FIELDS, MOST_GROUPS = 40, 12

STEPS = ("teachers", "choice", "fit", "choice and fit")
CHANGE = "change:"
CHANGES = f"{CHANGE} points of accuracy gained or lost at each step from the teachers to the student."


class Against(Estimate):
    """Accuracy of a run minus that of another on the same texts."""

    gained: int
    lost: int


class ComparedRun(TypedDict):
    """A run; its measures are None without labelled test texts."""

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
    against_first: Against | None
    accuracy_losses: dict[str, float]
    """By step."""
    seconds: float | None
    text_passes: int
    student_bytes: int | None


class GroupAccuracy(TypedDict):
    """The accuracy of each run on the labels of a teacher."""

    group: str
    accuracy: list[float | None]


class DifferingSetting(TypedDict):
    field: str
    values: list[str]


class Comparison(TypedDict):
    """comparison.json."""

    amalgam_report: int
    same_texts: bool
    runs: list[ComparedRun]
    chance: float | None
    groups: list[GroupAccuracy]
    settings: list[DifferingSetting]
    cautions: list[str]
    """On runs that learned too many of the test texts."""
    summary: str


def read_report(path: Path, remedy: str) -> ReportJson:
    """Reads and checks a report's JSON, which a user may have edited; `remedy` makes the report."""
    fix = f"{remedy} first"
    try:
        content = json.loads(path.read_text("utf-8") if path.is_file() or not path.exists() else "")  # a pipe blocks
    except FileNotFoundError:
        names = sorted(file.stem for file in path.parent.glob("*.json") if file.stem != COMPARISON)
        existing = f" (existing: {', '.join(names)})" if names else ""
        fix = f"name an existing one, or {fix}" if names else fix
        raise ExperimentError(f"there is no report of {path.stem}{existing}", where=str(path), fix=fix) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path.name} cannot be read as a report", where=str(path), fix=fix) from error
    if not isinstance(content, dict) or content.get("amalgam_report") != FORMAT:
        raise DataError(f"{path.name} is not a report of this amalgam version", where=str(path), fix=fix)
    if wrong := _wrong_field(content):
        what = f"{path.name} is not a report as amalgam writes it: the field {wrong} is missing or was edited"
        raise DataError(what, where=str(path), fix=fix)
    return cast("ReportJson", content)


def _wrong_field(content: dict[str, Any]) -> str | None:
    """Returns the first field that has another type than in a report, or whose numbers contradict each other."""
    for name, kind in get_type_hints(ReportJson).items():
        if not fits(content.get(name, ...), kind):
            return name
    report = cast("ReportJson", content)
    evaluation = report["evaluation"]
    try:
        comparison_of({"first": report, "second": report.copy()})
        if evaluation:
            print_evaluation(Console(tables=False), evaluation)
    except (LookupError, ValueError, ArithmeticError):
        return "evaluation"
    return None


@dataclass(frozen=True, repr=False)
class ComparedReports(Printed):
    """Students compared text by text with the first one, on the same labelled test texts."""

    content: Comparison

    @property
    def frame(self) -> pl.DataFrame:
        """A row per student: the columns of `evaluation`, and the difference of its accuracy to the first student's.

        difference, difference_low and difference_high: the 95 % interval; gained, lost: texts that one alone has right.
        """
        return pl.DataFrame([self._row(index) for index in range(len(self.content["runs"]))], infer_schema_length=None)

    def _row(self, index: int) -> dict[str, Any]:
        run = self.content["runs"][index]
        against = run["against_first"] or dict.fromkeys(("mean", "low", "high", "gained", "lost"))
        return {
            "student": run["name"],
            "method": run["method"],
            "n": run["n"],
            **{score: run[score] for score in SCORES},
            **({"nll_nats": math.inf} if run["nll_infinite"] else {}),
            "accuracy_low": run["low"],
            "accuracy_high": run["high"],
            **{f"on_{group['group']}": group["accuracy"][index] for group in self.content["groups"]},
            "difference": against["mean"],
            "difference_low": against["low"],
            "difference_high": against["high"],
            "gained": against["gained"],
            "lost": against["lost"],
        }

    @property
    def summary(self) -> list[str]:
        """Cautions, and the difference of the two highest accuracies."""
        return [*self.content["cautions"], self.content["summary"]]

    def print_to(self, console: Console) -> None:
        rows = table(self.content)
        console.table("", ["", *(run["name"] for run in self.content["runs"])], rows)
        if any(row[0].startswith(CHANGE) for row in rows):
            console.sentence(CHANGES)
        for sentence in self.summary:
            console.sentence(sentence)


def compare_students(base: Path, names: Sequence[str], note: Callable[[str], None]) -> ComparedReports:
    """Compares the reports of students of this folder by name."""
    if len(names) < 2 or len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
        what = "compare takes the names of two or more students, each once"
        raise ExperimentError(what, where="compare", fix='experiment.compare("first-student", "second-student")')
    reports = {}
    for name in names:
        path, remedy = base / REPORTS / f"{name}.json", "run the experiment with this student.name"
        reports[name] = numbers = read_report(path, remedy)
        if mismatch := folder_mismatch(numbers, path):
            note(f"{mismatch}: {remedy}")
    return ComparedReports(comparison_of(reports))


def folder_mismatch(numbers: ReportJson, path: Path) -> str | None:
    """Returns the difference if the student's folder is not of the training that the page measured."""
    stages = {stage["stage"]: stage["fingerprint"][:8] for stage in numbers["stages"]}
    if not numbers["learns"] or "train-student" not in stages:
        return None
    present = read_metadata(path.parent.parent / STUDENTS / path.stem)
    trained = str(present["fingerprint"])[:8] if present else "no student"
    differs = f"{STUDENTS}/{path.stem} holds {trained}; this page is of {stages['train-student']}"
    return differs if trained != stages["train-student"] else None


def comparison_of(reports: Mapping[str, ReportJson]) -> Comparison:
    """Returns comparison.json; the keys of `reports` are the names of the runs."""
    runs = list(reports.values())
    first = runs[0]
    same_texts = all(have_same_texts(run, first) for run in runs)
    return {
        "amalgam_report": FORMAT,
        "same_texts": same_texts,
        "runs": [_run_row(name, run, first) for name, run in reports.items()],
        "chance": first["chance"] if same_texts else None,
        "groups": _groups(runs) if same_texts else [],
        "settings": list(_differing_settings(runs)),
        "cautions": [
            f"{name}: {learned_sentence(learned)}"
            for name, run in reports.items()
            if (learned := too_many_learned(run["evaluation"]))
        ],
        "summary": _summary(reports, same_texts=same_texts),
    }


def _scores(run: ReportJson) -> SystemScores | None:
    """Returns the scores of the system that the report is about; None without test texts."""
    evaluation = run["evaluation"]
    return reported_scores(evaluation) if evaluation else None


def have_same_texts(a: ReportJson, b: ReportJson) -> bool:
    if not a["evaluation"] or not b["evaluation"] or a["test"] != b["test"]:
        return False
    counts = [(run["n"], run["left_out"]) for run in (a["evaluation"], b["evaluation"])]
    return bool(a["test"]) and counts[0] == counts[1]


def _run_row(name: str, run: ReportJson, first: ReportJson) -> ComparedRun:
    scores = _scores(run)
    low, high = interval(scores["accuracy"], scores["n"]) if scores else (None, None)
    return {
        "name": name,
        "method": run["method"],
        "fingerprint": run["fingerprint"],
        "n": scores and scores["n"],
        "accuracy": scores and scores["accuracy"],
        "macro_f1": scores and scores["macro_f1"],
        "nll_nats": scores and scores["nll_nats"],
        "nll_infinite": scores and scores.get("nll_infinite"),
        "ece": scores and scores["ece"],
        "low": low,
        "high": high,
        "against_first": None if run is first else difference(run, first),
        "accuracy_losses": {loss["step"]: loss["lost"] for loss in run["accuracy_losses"]},
        "seconds": total_seconds(run),
        "text_passes": sum(cost["text_passes"] for cost in run["teacher_costs"]),
        "student_bytes": run["student"]["bytes"] if run["student"] else None,
    }


def difference(run: ReportJson, other: ReportJson) -> Against | None:
    """Compares the accuracy of two runs text by text, with its 95 % interval (McNemar, `intervals.paired`).

    Returns None if the texts differ or were too many to store.
    """
    ours, theirs = (side["student_quality"] and side["student_quality"]["right_hex"] for side in (run, other))
    if not have_same_texts(run, other) or not run["evaluation"] or not ours or not theirs:
        return None
    gained, lost = gained_lost(ours, theirs)
    mean, low, high = paired(gained, lost, run["evaluation"]["n"])
    return {"mean": mean, "low": low, "high": high, "gained": gained, "lost": lost}


def _groups(runs: Sequence[ReportJson]) -> list[GroupAccuracy]:
    """Returns the accuracies on the labels of each teacher that has the same labels in all runs."""
    slices = [scores["slice_accuracy"] for run in runs if (scores := _scores(run))]
    labels = [_teacher_labels(run) for run in runs]
    shared = [
        name
        for name in slices[0]
        if all(name in accuracy for accuracy in slices)
        and all(of_run.get(name) == labels[0].get(name) for of_run in labels)
    ]
    return [{"group": name, "accuracy": [accuracy[name] for accuracy in slices]} for name in shared[:MOST_GROUPS]]


def _teacher_labels(run: ReportJson) -> dict[str, set[str]]:
    labels: dict[str, set[str]] = {}
    for row in run["student_quality"]["classes"] if run["student_quality"] else ():
        for teacher in row["teachers"]:
            labels.setdefault(teacher, set()).add(row["label"])
    return labels


def _differing_settings(runs: Sequence[ReportJson]) -> Iterator[DifferingSetting]:
    settings = [dict(_leaves(run["settings"])) for run in runs]
    fields = dict.fromkeys(field for each in settings for field in each)
    differ = [field for field in fields if len({json.dumps(each.get(field)) for each in settings}) > 1]
    differ = [field for field in differ if field != "student.name"]
    for field in differ[:MOST_FIELDS]:
        yield {"field": field, "values": [_value(each.get(field)) for each in settings]}
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


def _summary(reports: Mapping[str, ReportJson], *, same_texts: bool) -> str:
    measured = [
        (scores, name)
        for name, run in reports.items()
        if (scores := _scores(run)) and not too_many_learned(run["evaluation"])
    ]
    if len(measured) < 2:
        return "No run can be called better: fewer than two have labelled test texts that they did not learn."
    if not same_texts:
        return "The runs have different test texts or gold labels, so their accuracies cannot be compared."
    (best, name), (second, next_name), *_ = sorted(measured, key=lambda entry: -entry[0]["accuracy"])
    if best["accuracy"] == second["accuracy"]:
        return (
            f"{name} and {next_name} have the same accuracy, {percent(best['accuracy'])} on {best['n']:,} test texts."
        )
    accuracies = f"{name} has the highest accuracy, {percent(best['accuracy'])} on {best['n']:,} test texts"
    accuracies += f"; {next_name} is next with {percent(second['accuracy'])}"
    lead = difference(reports[name], reports[next_name])
    if lead is None:
        return f"{accuracies}."
    lead_points = f"{100 * lead['mean']:.1f} points (95 % interval {difference_bounds(lead['low'], lead['high'])})"
    significant = "significant" if lead["low"] > 0 else "not significant"
    return f"{accuracies}. The difference, {lead_points}, is {significant}."


def table(comparison: Comparison) -> list[list[str]]:
    """Returns one row per measure: its name and the value of each run."""

    def row(name: str, cell: Callable[[ComparedRun], str]) -> list[str]:
        return [name, *map(cell, comparison["runs"])]

    def change(step: str) -> Callable[[ComparedRun], str]:
        return lambda run: points(-run["accuracy_losses"][step]) if step in run["accuracy_losses"] else "-"

    steps = [step for step in STEPS if any(step in run["accuracy_losses"] for run in comparison["runs"])]
    return [
        row("method", lambda run: run["method"]),
        row("accuracy", lambda run: share(run["accuracy"])),
        row("95 % interval", lambda run: "-" if run["low"] is None else bounds(run["low"] or 0.0, run["high"] or 0.0)),
        row("against the first", _against_first),
        row("n", lambda run: "-" if run["n"] is None else f"{run['n']:,}"),
        row("macro-F1", lambda run: share(run["macro_f1"])),
        row("NLL", lambda run: "∞" if run["nll_infinite"] else measure("nll_nats", run["nll_nats"])),
        row("ECE", lambda run: share(run["ece"])),
        *([f"on labels of {group['group']}", *map(share, group["accuracy"])] for group in comparison["groups"]),
        *(row(f"{CHANGE} {step}", change(step)) for step in steps),
        row("time", lambda run: "-" if run["seconds"] is None else duration(run["seconds"])),
        row("text-passes of teachers", lambda run: f"{run['text_passes']:,}"),
        row("size of the student", lambda run: "-" if run["student_bytes"] is None else size(run["student_bytes"])),
        row("report", lambda run: run["fingerprint"]),
    ]


def _against_first(run: ComparedRun) -> str:
    against = run["against_first"]
    return f"{points(against['mean'])} ({difference_bounds(against['low'], against['high'])})" if against else ""
