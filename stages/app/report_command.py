"""Makes, prints or compares reports, and checks the requirements of `--fail-...`: the command `amalgam report`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from amalgam.data.keys import shown
from amalgam.pipeline.config.proposals import file_option, written
from amalgam.pipeline.config.schema import COMPARISON, TEACHER, ConfigSection
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import READ_ONLY, AmalgamError, ExperimentError, QualityError, reason_of
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.app.commands import run_stages
from amalgam.stages.app.comparison import (
    ComparedReports,
    comparison_of,
    folder_mismatch,
    have_same_texts,
    read_report,
    table,
)
from amalgam.stages.common.deliveries import REPORTS, STUDENTS, delivered_student, delivered_students
from amalgam.stages.common.intervals import bounds, interval, percent, points, separate
from amalgam.stages.methods import load_with_methods
from amalgam.stages.report.conditions import too_many_learned
from amalgam.stages.report.html import render
from amalgam.stages.report.json_types import EvaluationSection, ReportJson, random_texts, reported_scores
from amalgam.stages.report.publish import place_of, publish
from amalgam.stages.report.students import rival_names
from amalgam.stages.report.tables import print_evaluation, print_report_estimates
from amalgam.stages.report.verdict import compared, lines
from amalgam.stages.report.verdict_types import LearnedTexts, Rival
from amalgam.stages.report.verdict_words import (
    difference_sentence,
    evaluation_cautions,
    figures_of,
    learned_sentence,
    name_of,
    tested_on,
)

SUFFIXES = (".yaml", ".yml")

MOST_RUNS = 24


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
    overrides = [argument for argument in arguments if "=" in argument]
    names = [_name_in(argument, config.parent) for argument in arguments if "=" not in argument]
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


def _name_in(argument: str, base: Path) -> str:
    """Returns the student of a path in reports/ or students/, and any other argument unchanged."""
    path = Path(argument)
    folders = {start / name for start in (Path(), base, base.absolute()) for name in (REPORTS, STUDENTS)}
    is_path = path.parent in folders
    return path.name.removesuffix(".html").removesuffix(".json") if is_path else argument


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
        if is_delivered and name in {"ensemble", "zero-shot", *run.experiment.teacher_names}:
            raise _two_rivals(name, is_teacher=name in run.experiment.teacher_names)


def _no_test_texts() -> ExperimentError:
    what = "the accuracy is unknown: there are no labelled test texts"
    return ExperimentError(what, where="corpus.test", fix="set corpus.test and corpus.label")


def _no_rival(name: str, names: Iterable[str]) -> ExperimentError:
    what = f"the report has no rival {shown(name)}"
    return ExperimentError(what, where="--fail-if-worse-than", fix=f"name one of {', '.join(names) or 'none'}")


def _two_rivals(name: str, *, is_teacher: bool) -> ExperimentError:
    what = f"two rivals have the name {shown(name)}: {STUDENTS}/{name} and {'a teacher' if is_teacher else name}"
    fix = f"rename {STUDENTS}/{name}{f', or write {TEACHER}{name} for the teacher' if is_teacher else ''}"
    return ExperimentError(what, where="--fail-if-worse-than", fix=fix)


def _print_stored(path: Path, config: Path, requirements: Requirements) -> None:
    """Prints the stored report of one student, and checks the requirements; nothing runs."""
    numbers, console, place = _read(path, config), Console(), place_of(config.absolute().parent)
    evaluation, verdict, mismatch = numbers["evaluation"], numbers["verdict"], folder_mismatch(numbers, path)
    page = f"{REPORTS}/{path.stem}.html"
    if mismatch and requirements.need_test:
        fix = f"run `{_command(numbers, path, config)}`, which measures it"
        raise ExperimentError(mismatch, where=str(path), fix=fix)
    if mismatch:
        console.note(f"{mismatch}: run `{_command(numbers, path, config)}`")
    if not requirements.as_json:
        if evaluation:
            print_evaluation(console, evaluation)
        print_report_estimates(console, numbers)
        if verdict:
            console.verdict(lines(verdict, list(evaluation_cautions(evaluation)), place, page))
        console.say(f"report{place}: {page}")
    _check(path, config, requirements)


def _check(path: Path, config: Path, requirements: Requirements) -> None:
    """Prints report.json if wanted, and raises QualityError if the student misses a requirement."""
    numbers = _read(path, config)
    evaluation, verdict, where = numbers["evaluation"], numbers["verdict"], f"{REPORTS}/{path.name}"
    if requirements.as_json:
        Console().json(numbers)
    if not requirements.need_test:
        return
    if not evaluation:
        raise _no_test_texts()
    learned = too_many_learned(evaluation)
    if learned and (requirements.fail_under is not None or not learned.get("generated")):
        raise _texts_learned(learned)
    command = verdict["next"].get("command") if verdict and verdict["decision"] != "ship" else None
    fix = f"run `{command}`" if command else "train another student, or lower the requirement"
    met = []
    if requirements.fail_under is not None:
        met.append(_check_accuracy(evaluation, requirements.fail_under, where, fix))
    if requirements.worse_than is not None:
        base, name = path.parent.parent, requirements.worse_than
        fingerprint = delivered_student(base, name) if name != path.stem else None
        if fingerprint and fingerprint == delivered_student(base, path.stem):
            met.append(f"{shown(path.stem)} and {shown(name)} are the same student")
        else:
            by_name = not (fingerprint and verdict)
            rival = _rival(numbers, name) if by_name else _student(numbers, name, fingerprint)
            if rival is None:
                raise _not_measured(numbers, name, path, config)
            met.append(_check_rival(numbers, rival, where, fix))
    if not requirements.as_json:
        Console().result(f"requirements met: {'; '.join(met)}")


def _check_accuracy(evaluation: EvaluationSection, least: float, where: str, fix: str) -> str:
    """Returns a sentence on an accuracy that is large enough, and refuses any other."""
    if not random_texts(evaluation):
        raise _all_selected()
    scores = reported_scores(evaluation)
    figures = f"n = {scores['n']:,}, 95 % interval {bounds(*interval(scores['accuracy'], scores['n']))}"
    if scores["accuracy"] < least:
        accuracy, required = separate(scores["accuracy"], least)
        what = f"the accuracy is {accuracy} ({figures}), below {required} (--fail-under)"
        raise QualityError(what, where=where, fix=fix)
    return f"the accuracy is {percent(scores['accuracy'])} ({figures}), at least {percent(least)}"


def _check_rival(numbers: ReportJson, rival: Rival, where: str, fix: str) -> str:
    """Returns a sentence on a rival that is not significantly better, and refuses any other.

    It is compared alone: with the students of a year, an interval for all of them would hide almost any loss.
    """
    rival, verdict = compared(rival), numbers["verdict"]
    if not rival["n"]:
        what = f"no test text has a label of teacher {rival['name']}"
        raise ExperimentError(what, where="--fail-if-worse-than", fix="add labelled test texts of this teacher")
    if "learned" in rival:
        raise _texts_learned(rival["learned"], f"of the other student {shown(rival['name'])}, ")
    if rival["student_is"] == "worse":
        on = tested_on(verdict["rivals"]) if verdict and rival["kind"] != "teacher on its own labels" else ""
        what = f"{difference_sentence(rival)}{on} (--fail-if-worse-than {rival['name']})"
        raise QualityError(what, where=where, fix=fix)
    standing = "better than" if rival["student_is"] == "better" else "not clearly different from"
    return f"the student is {standing} {name_of(rival)}, {points(rival['mean'])} points ({figures_of(rival)})"


def _not_measured(numbers: ReportJson, name: str, path: Path, config: Path) -> ExperimentError:
    """Returns the error of a student that was not measured on the report's test texts; a run of the gate does it."""
    if numbers["evaluation"] and not random_texts(numbers["evaluation"]):
        return _all_selected()
    what = f"{shown(name)} was not measured on the test texts of {path.stem}"
    command = _command(numbers, path, config, "--fail-if-worse-than", name)
    fix = f"run `{command}`, which predicts them with {STUDENTS}/{name}"
    return ExperimentError(what, where="--fail-if-worse-than", fix=fix)


def _all_selected() -> ExperimentError:
    what, add = "the accuracy is unknown: all test texts were selected", "add rows with `random` in column `why`"
    return ExperimentError(what, where="corpus.test", fix=add)


def _texts_learned(learned: LearnedTexts, student: str = "") -> ExperimentError:
    fix = "remove these texts from corpus.test: rows of `labels`, or training texts that a note of read-corpus names"
    fix = "use labelled real texts as corpus.test" if learned.get("generated") else fix
    fix = "set student.select to held-out" if learned.get("validation") else fix
    return ExperimentError(f"{student}{learned_sentence(learned).removesuffix('.')}", where="corpus.test", fix=fix)


def _named_rivals(numbers: ReportJson) -> list[Rival]:
    """Returns the rivals that a requirement can name; the name of the most frequent label is a label."""
    rivals = numbers["verdict"]["rivals"] if numbers["verdict"] else []
    return [rival for rival in rivals if rival["kind"] != "most frequent label"]


def _student(numbers: ReportJson, name: str, fingerprint: str | None) -> Rival | None:
    """Returns the student in students/`name`, which the report may have by another name; None if it was not measured.

    A student that the folder had before is another one.
    """
    students = {"student", "supervised student"}
    for rival in _named_rivals(numbers):
        if rival["name"] == name and rival["kind"] not in students:
            raise _two_rivals(name, is_teacher=rival["kind"] not in {"ensemble", "zero-shot"})
    same = [rival for rival in _named_rivals(numbers) if rival.get("fingerprint") == fingerprint]
    return {**same[0], "name": name} if same else None


def _rival(numbers: ReportJson, name: str) -> Rival:
    """Returns the rival of this name; of several teachers, one is compared on its own labels."""
    rivals = _named_rivals(numbers)
    matching = [rival for rival in rivals if name in {rival["name"], f"{TEACHER}{rival['name']}"}]
    if not matching:
        raise _no_rival(name, dict.fromkeys(rival["name"] for rival in rivals))
    return min(matching, key=lambda rival: rival["kind"] != "teacher on its own labels")


def _compare(config: Path, names: list[str], overrides: list[str], *, quiet: bool, as_json: bool) -> None:
    """Runs each file and reads its report at once: a later file may have the same student name."""
    reports = {}
    for name in names:
        file, path = config, config.parent / REPORTS / f"{name}.json"
        if name.endswith(SUFFIXES):  # as `amalgam run` does: overrides of earlier commands have no effect
            file = Path(name)
            path = run_stages(file, overrides, target=None, quiet=quiet, tables=not as_json).report.with_suffix(".json")
        reports[_title(name)] = numbers = _read(path, file)
        if mismatch := folder_mismatch(numbers, path):
            Console(quiet=quiet).note(f"{mismatch}: run `{_command(numbers, path, file)}`")
    comparison, console = comparison_of(reports), Console(quiet=quiet)
    if as_json:
        console.json(comparison)
    else:
        ComparedReports(comparison).print_to(console)
    if remedy := _remedy_of_texts(reports, config, names):
        console.note(remedy)
    page = render("comparison.html.j2", numbers=comparison, rows=table(comparison))
    base = (Path(names[0]) if names[0].endswith(SUFFIXES) else config).parent.absolute()
    try:
        console.say(f"report{place_of(base)}: {publish(base, COMPARISON, page, comparison)}")
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        console.note(f"{REPORTS}/{COMPARISON}.html is not updated: {reason_of(error)}")


def _remedy_of_texts(reports: Mapping[str, ReportJson], config: Path, names: Sequence[str]) -> str:
    """Returns how to compare runs that were measured on different test texts; empty if they need no other ones."""
    measured = [name for name, numbers in reports.items() if numbers["evaluation"]]
    if len(measured) < 2 or all(have_same_texts(reports[measured[0]], reports[name]) for name in measured):
        return ""
    if any(name.endswith(SUFFIXES) for name in names):
        return "set the same corpus.test in all files to compare them"
    pages = {name: config.parent / REPORTS / f"{name}.json" for name in measured}
    newest = max(measured, key=lambda name: pages[name].stat().st_mtime)
    others = [name for name in measured if not have_same_texts(reports[name], reports[newest])]
    rival = next((name for name in others if delivered_student(config.parent, name)), None)
    if rival is None:
        return ""
    command = _command(reports[newest], pages[newest], config, "--fail-if-worse-than", rival)
    return f"`{command}` predicts the test texts of {newest} with {STUDENTS}/{rival}, and compares both"


def _read(path: Path, config: Path) -> ReportJson:
    return read_report(path, f"run `{_command(None, path, config)}`")


def _command(numbers: ReportJson | None, path: Path, config: Path, *options: str) -> str:
    """Returns the command that makes a student's report; overrides give the experiment file the stored settings."""
    overrides: dict[str, Any] = {"student.name": path.stem}
    with suppress(AmalgamError):  # of an experiment file that cannot be read
        overrides |= _differing(numbers, config, overrides)
    return shlex.join(["amalgam", "report", *written(overrides), *options]) + file_option(config)


def _differing(numbers: ReportJson | None, config: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the stored settings that the experiment file with these overrides has not."""
    experiment = load_with_methods(config, written(overrides)).experiment
    differing = dict(_changed(numbers["settings"] if numbers else {}, experiment))
    if "student.method" not in differing:
        return differing
    method = {"student.method": differing["student.method"]}  # it sets other fields, which need no overrides then
    return method | _differing(numbers, config, {**overrides, **method})


def _changed(stored: Mapping[str, Any], now: ConfigSection, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the fields of `now` that have another stored value; a whole section if only one of both has it."""
    fields = now.model_dump(mode="json")
    for name, value in stored.items():
        section = getattr(now, name, None)
        if isinstance(section, ConfigSection) and isinstance(value, Mapping):
            yield from _changed(value, section, f"{path}{name}.")
        elif fields.get(name, value) != value:
            yield f"{path}{name}", value


def _title(name: str) -> str:
    return name.removesuffix(".yaml").removesuffix(".yml")
