"""Compares the reports of several runs in one table, printed and as a page; no run is evaluated again.

Two runs on the same texts are compared text by text, which gives the narrowest interval.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, cast, get_type_hints

from amalgam.data.keys import shown
from amalgam.pipeline.config.proposals import as_yaml, file_option
from amalgam.pipeline.config.schema import COMPARISON, TEACHER
from amalgam.pipeline.console import Console, duration, size
from amalgam.pipeline.errors import COMMAND_LINE, DataError, ExperimentError, QualityError
from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.storage.facts import fits
from amalgam.stages.app.commands import run_stages
from amalgam.stages.common.deliveries import REPORTS, STUDENTS, delivered_student, delivered_students, read_metadata
from amalgam.stages.common.intervals import bounds, interval, paired, percent, points, separate
from amalgam.stages.report.blocks import EvaluationBlock, ReportJson, SystemScores, reported_scores
from amalgam.stages.report.conditions import were_learned
from amalgam.stages.report.html import render
from amalgam.stages.report.publish import place_of, publish
from amalgam.stages.report.report_json import FORMAT, total_seconds
from amalgam.stages.report.students import gained_lost, rival_names
from amalgam.stages.report.tables import measure, print_evaluation, share
from amalgam.stages.report.verdict import compared, lines
from amalgam.stages.report.verdict_types import Estimate, LearnedTexts, Rival
from amalgam.stages.report.verdict_words import (
    difference_sentence,
    evaluation_cautions,
    figures_of,
    learned_sentence,
    name_of,
    tested_on,
)

SUFFIXES = (".yaml", ".yml")

MOST_RUNS, MOST_FIELDS, MOST_GROUPS = 24, 40, 12

STEPS = ("teachers", "choice", "fit", "choice and fit")


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


@dataclass(frozen=True)
class Requirements:
    """Requirements of a single report; a missed one ends the command with exit code 4."""

    fail_under: float | None = None
    """Least accuracy on the labelled test texts."""
    worse_than: str | None = None
    """Name of a rival that must not be significantly better: ensemble, zero-shot, a teacher or a student."""
    as_json: bool = False
    """Print report.json."""

    @property
    def need_test(self) -> bool:
        """Returns whether only labelled test texts can decide them."""
        return self.fail_under is not None or self.worse_than is not None


def report(  # noqa: PLR0913 - the options of a command
    config: Path,
    arguments: list[str],
    requirements: Requirements,
    *,
    only: bool,
    force: bool,
    part: str | None,
    quiet: bool,
) -> None:
    """Makes the report of one experiment file, or compares the reports of several students or files."""
    _check_share(requirements.fail_under)
    overrides = [argument for argument in arguments if "=" in argument]
    names = [argument for argument in arguments if "=" not in argument]
    judged = requirements != Requirements()
    if not names or (len(names) == 1 and names[0].endswith(SUFFIXES)):
        file, tables = Path(names[0]) if names else config, not requirements.as_json
        if judged and part:
            fix = f"run `amalgam report{file_option(file)}` with these options and without --part after the parts"
            raise ExperimentError("--json and --fail-... need the whole report", where=f"--part {part}", fix=fix)
        check = partial(_check_first, requirements)
        experiment = run_stages(
            file,
            overrides,
            target="report",
            only=only,
            force=force,
            part=part,
            quiet=quiet,
            tables=tables,
            check=check,
            rival=requirements.worse_than,
        )
        if judged:
            _check(experiment.report.with_suffix(".json"), file, requirements)
        return
    _check_arguments(arguments, has_options=bool(only or force or part or (len(names) > 1 and requirements.need_test)))
    if len(names) == 1:
        _print_stored(config.parent / REPORTS / f"{names[0]}.json", config, requirements)
    else:
        _compare(config, names, overrides, quiet=quiet, as_json=requirements.as_json)


def _check_arguments(arguments: Sequence[str], *, has_options: bool) -> None:
    """Refuses arguments and options of runs that cannot be compared, or of a report that is made already."""
    names = [argument for argument in arguments if "=" not in argument]
    titles = [_title(name) for name in names]
    if len(names) > MOST_RUNS:
        raise ExperimentError(f"a comparison takes 2 to {MOST_RUNS} runs, got {len(names)}", fix="name fewer runs")
    if len(titles) > len(set(titles)):
        twice = shown(next(title for title in titles if titles.count(title) > 1))
        raise ExperimentError(f"{twice} is named twice", where="amalgam report", fix="name each run once")
    if len(names) < len(arguments) and not any(name.endswith(SUFFIXES) for name in names):
        fix = "remove them, or the names: `amalgam report FIELD=VALUE` makes the report of the experiment file"
        what = "overrides do not change reports that are made"
        raise ExperimentError(what, where=f"amalgam report {shlex.join(arguments)}", fix=fix)
    if has_options:
        fix = "remove these options, or name one run"
        what = "a comparison takes none of --no-upstream, --force, --part and --fail-..."
        raise ExperimentError(what, fix=fix)


def _check_share(accuracy: float | None) -> None:
    if accuracy is not None and not 0 <= accuracy <= 1:
        fix = f"write {accuracy / 100:g}" if 1 < accuracy <= 100 else "write a share, such as 0.8"
        what = f"--fail-under {accuracy:g} is no accuracy between 0 and 1"
        raise ExperimentError(what, where=COMMAND_LINE, fix=fix)


def _check_first(requirements: Requirements, run: Run) -> None:
    """Refuses requirements that no report of this experiment can decide."""
    if requirements.need_test and not run.experiment.corpus.test:
        raise _no_test_texts()
    if requirements.worse_than is not None:
        name, own = requirements.worse_than, run.experiment.student.name
        names = rival_names(run.experiment, run.store, delivered_students(run.base))
        is_delivered = name != own and delivered_student(run.base, name) is not None
        if not is_delivered and name.removeprefix(TEACHER) not in names:
            raise _no_rival(name, names)


def _no_test_texts() -> ExperimentError:
    what = "the accuracy is unknown: there are no labelled test texts"
    return ExperimentError(what, where="corpus.test", fix="set corpus.test and corpus.label")


def _no_rival(name: str, names: Iterable[str]) -> ExperimentError:
    what = f"the report has no rival {shown(name)}"
    return ExperimentError(what, where="--fail-if-worse-than", fix=f"name one of {', '.join(names) or 'none'}")


def _print_stored(path: Path, config: Path, requirements: Requirements) -> None:
    """Prints the stored report of one student, and checks the requirements; nothing runs."""
    numbers, console, place = read_report(path, config), Console(), place_of(config.absolute().parent)
    evaluation, verdict, other = numbers["evaluation"], numbers["verdict"], _other_student(numbers, path)
    page = f"{REPORTS}/{path.stem}.html"
    if other and requirements.need_test:
        raise ExperimentError(other, where=str(path), fix=f"run `{_command(path, config)}`, which measures it")
    if other:
        console.note(f"{other}: run `{_command(path, config)}`")
    if not requirements.as_json:
        if evaluation:
            print_evaluation(console, evaluation, evaluation["labels"], evaluation["groups"])
        if verdict:
            console.verdict(lines(verdict, list(evaluation_cautions(evaluation)), place, page))
        console.say(f"report{place}: {page}")
    _check(path, config, requirements)


def _check(path: Path, config: Path, requirements: Requirements) -> None:
    """Prints report.json if wanted, and raises QualityError if the student misses a requirement."""
    numbers = read_report(path, config)
    evaluation, verdict, where = numbers["evaluation"], numbers["verdict"], f"{REPORTS}/{path.name}"
    if requirements.as_json:
        Console().json(numbers)
    if not requirements.need_test:
        return
    if not evaluation:
        raise _no_test_texts()
    learned = _learned(evaluation)
    if learned and (requirements.fail_under is not None or not learned.get("generated")):
        raise _texts_learned(learned)
    command = verdict["next"].get("command") if verdict and verdict["decision"] != "ship" else None
    fix = f"run `{command}`" if command else "train another student, or lower the requirement"
    met = []
    if requirements.fail_under is not None:
        met.append(_check_accuracy(evaluation, requirements.fail_under, where, fix))
    if requirements.worse_than is not None:
        base, name = path.parent.parent, requirements.worse_than
        fingerprint = delivered_student(base, name)
        if fingerprint and name != path.stem and fingerprint == delivered_student(base, path.stem):
            met.append(f"{shown(path.stem)} and {shown(name)} are the same student")
        else:
            # The report names a student by the first of its folders.
            name = delivered_students(base).get(fingerprint or "", name)
            _check_measured(numbers, name, path, config)
            met.append(_check_rival(numbers, name, where, fix))
    if not requirements.as_json:
        Console().result(f"requirements met: {'; '.join(met)}")


def _check_accuracy(evaluation: EvaluationBlock, least: float, where: str, fix: str) -> str:
    """Returns a sentence on an accuracy that is large enough, and refuses any other."""
    if "selected" in evaluation and not evaluation["selected"]["random"]:
        raise _all_selected()
    scores = reported_scores(evaluation)
    figures = f"n = {scores['n']:,}, 95 % interval {bounds(*interval(scores['accuracy'], scores['n']))}"
    if scores["accuracy"] < least:
        accuracy, required = separate(scores["accuracy"], least)
        what = f"the accuracy is {accuracy} ({figures}), below {required} (--fail-under)"
        raise QualityError(what, where=where, fix=fix)
    return f"the accuracy is {percent(scores['accuracy'])} ({figures}), at least {percent(least)}"


def _check_rival(numbers: ReportJson, name: str, where: str, fix: str) -> str:
    """Returns a sentence on a rival that is not significantly better, and refuses any other.

    It is compared alone: with the students of a year, an interval for all of them would hide almost any loss.
    """
    rival, verdict = compared(_rival(numbers, name)), numbers["verdict"]
    if not rival["n"]:
        what = f"no test text has a label of teacher {rival['name']}"
        raise ExperimentError(what, where="--fail-if-worse-than", fix="add labelled test texts of this teacher")
    if "learned" in rival:
        raise _texts_learned(rival["learned"], f"of the other student {shown(rival['name'])}, ")
    if rival["student_is"] == "worse":
        on = tested_on(verdict["rivals"]) if verdict and rival["kind"] != "teacher on its own labels" else ""
        raise QualityError(f"{difference_sentence(rival)}{on} (--fail-if-worse-than {name})", where=where, fix=fix)
    standing = "better than" if rival["student_is"] == "better" else "not clearly different from"
    return f"the student is {standing} {name_of(rival)}, {points(rival['mean'])} points ({figures_of(rival)})"


def _check_measured(numbers: ReportJson, name: str, path: Path, config: Path) -> None:
    """Refuses a student in students/ that was not measured on the report's test texts; a run of the gate does it."""
    if numbers["verdict"] is None or not delivered_student(path.parent.parent, name):
        return
    if name in {rival["name"] for rival in numbers["verdict"]["rivals"]}:
        return
    evaluation = numbers["evaluation"]
    if evaluation and "selected" in evaluation and not evaluation["selected"]["random"]:
        raise _all_selected()
    what = f"{shown(name)} was not measured on the test texts of {path.stem}"
    fix = f"run `{_command(path, config, '--fail-if-worse-than', name)}`, which predicts them with {STUDENTS}/{name}"
    raise ExperimentError(what, where="--fail-if-worse-than", fix=fix)


def _all_selected() -> ExperimentError:
    what, add = "the accuracy is unknown: all test texts were selected", "add rows with `random` in column `why`"
    return ExperimentError(what, where="corpus.test", fix=add)


def _learned(evaluation: EvaluationBlock | None) -> LearnedTexts | None:
    """Returns the test texts that training used, if they are too many for a requirement or a comparison."""
    learned = evaluation.get("learned") if evaluation else None
    return learned if learned and were_learned(learned) else None


def _texts_learned(learned: LearnedTexts, student: str = "") -> ExperimentError:
    fix = "remove these texts from corpus.test: rows of `labels`, or training texts that a note of read-corpus names"
    fix = "use labelled real texts as corpus.test" if learned.get("generated") else fix
    fix = "set student.select to held-out" if learned.get("validation") else fix
    return ExperimentError(f"{student}{learned_sentence(learned).removesuffix('.')}", where="corpus.test", fix=fix)


def _rival(numbers: ReportJson, name: str) -> Rival:
    """Returns the rival of this name; of several teachers, one is compared on its own labels."""
    rivals = numbers["verdict"]["rivals"] if numbers["verdict"] else []
    matching = [rival for rival in rivals if name in {rival["name"], f"{TEACHER}{rival['name']}"}]
    matching.sort(key=lambda rival: rival["kind"] != "teacher on its own labels")
    if not matching or matching[0]["kind"] == "most frequent label":
        names = dict.fromkeys(rival["name"] for rival in rivals if rival["kind"] != "most frequent label")
        raise _no_rival(name, names)
    return matching[0]


def _compare(config: Path, names: list[str], overrides: list[str], *, quiet: bool, as_json: bool) -> None:
    """Runs each file and reads its report at once: a later file may have the same student name."""
    reports = {}
    for name in names:
        file, path = config, config.parent / REPORTS / f"{name}.json"
        if name.endswith(SUFFIXES):  # as `amalgam run` does: overrides of earlier commands have no effect
            file = Path(name)
            path = run_stages(file, overrides, target=None, quiet=quiet, tables=not as_json).report.with_suffix(".json")
        reports[_title(name)] = numbers = read_report(path, file)
        if other := _other_student(numbers, path):
            Console(quiet=quiet).note(f"{other}: run `{_command(path, file)}`")
    files = [Path(name) for name in names if name.endswith(SUFFIXES)]
    comparison, console = comparison_of(reports), Console(quiet=quiet)
    rows = _table(comparison)
    if as_json:
        console.json(comparison)
    else:
        console.table("", ["", *reports], rows)
        for sentence in (*comparison["cautions"], comparison["summary"]):
            console.sentence(sentence)
    page = render("comparison.html.j2", numbers=comparison, rows=rows)
    base = (files[0] if files else config).parent.absolute()
    console.say(f"report{place_of(base)}: {publish(base, COMPARISON, page, comparison)}")


def _title(name: str) -> str:
    return name.removesuffix(".yaml").removesuffix(".yml")


def _command(path: Path, config: Path, *options: str) -> str:
    return shlex.join(["amalgam", "report", f"student.name={as_yaml(path.stem)}", *options]) + file_option(config)


def _other_student(numbers: ReportJson, path: Path) -> str | None:
    """Returns the difference if the student's folder is not of the training that the page measured."""
    stages = {stage["stage"]: stage["fingerprint"][:8] for stage in numbers["stages"]}
    if not numbers["learns"] or "train-student" not in stages:
        return None
    present = read_metadata(path.parent.parent / STUDENTS / path.stem)
    trained = str(present["fingerprint"])[:8] if present else "no student"
    differs = f"{STUDENTS}/{path.stem} holds {trained}; this page is of {stages['train-student']}"
    return differs if trained != stages["train-student"] else None


def read_report(path: Path, config: Path) -> ReportJson:
    """Reads and checks a report's JSON, which a user may have edited."""
    fix = f"run `{_command(path, config)}` first"
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
            print_evaluation(Console(tables=False), evaluation, evaluation["labels"], evaluation["groups"])
    except (LookupError, ValueError, ArithmeticError):
        return "evaluation"
    return None


def comparison_of(reports: Mapping[str, ReportJson]) -> Comparison:
    """Returns comparison.json; the keys of `reports` are the names of the runs."""
    runs = list(reports.values())
    first = runs[0]
    same_texts = all(_same_texts(run, first) for run in runs)
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
            if (learned := _learned(run["evaluation"]))
        ],
        "summary": _summary(reports, same_texts=same_texts),
    }


def _scores(run: ReportJson) -> SystemScores | None:
    """Returns the scores of the system that the report is about; None without test texts."""
    evaluation = run["evaluation"]
    return reported_scores(evaluation) if evaluation else None


def _same_texts(a: ReportJson, b: ReportJson) -> bool:
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
    if not _same_texts(run, other) or not run["evaluation"] or not ours or not theirs:
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


def _summary(reports: Mapping[str, ReportJson], *, same_texts: bool) -> str:
    measured = [
        (scores, name) for name, run in reports.items() if (scores := _scores(run)) and not _learned(run["evaluation"])
    ]
    if len(measured) < 2:
        return "No run can be called better: fewer than two have labelled test texts that they did not learn."
    if not same_texts:
        return "The runs have different test texts, so their accuracies cannot be compared."
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
    lead_points = f"{100 * lead['mean']:.1f} points (95 % interval {bounds(lead['low'], lead['high'])})"
    significant = "significant" if lead["low"] > 0 else "not significant"
    return f"{accuracies}. The difference, {lead_points}, is {significant}."


def _table(comparison: Comparison) -> list[list[str]]:
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
        *(row(f"change: {step}", change(step)) for step in steps),
        row("time", lambda run: "-" if run["seconds"] is None else duration(run["seconds"])),
        row("text-passes of teachers", lambda run: f"{run['text_passes']:,}"),
        row("size of the student", lambda run: "-" if run["student_bytes"] is None else size(run["student_bytes"])),
        row("report", lambda run: run["fingerprint"]),
    ]


def _against_first(run: ComparedRun) -> str:
    against = run["against_first"]
    return f"{points(against['mean'])} ({points(against['low'])} to {points(against['high'])})" if against else ""
