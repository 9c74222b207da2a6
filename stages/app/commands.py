"""Runs the commands: calls `amalgam.Experiment` and prints its results as a table or JSON."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

from amalgam.data.keys import shown_name, shown_names
from amalgam.pipeline.config.load import ON_GENERATED
from amalgam.pipeline.config.proposals import as_yaml, file_option, written
from amalgam.pipeline.config.schema import FROM_CORPUS
from amalgam.pipeline.console import Console, counted, size
from amalgam.pipeline.errors import DamagedError, ExperimentError, all_of
from amalgam.pipeline.execution.plan import StageState, shown_choices
from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.storage.fingerprint import values
from amalgam.pipeline.user_paths import check_new
from amalgam.stages.app.api import Experiment
from amalgam.stages.app.arguments import local_path
from amalgam.stages.app.checks import stored_overrides
from amalgam.stages.app.cost import CostEstimate
from amalgam.stages.app.doctor import diagnose
from amalgam.stages.app.label import how_to_use, write_labels_file
from amalgam.stages.app.maintenance import find_garbage, young_quarantine
from amalgam.stages.app.runs import open_run
from amalgam.stages.app.verify import REPAIR, RUN, Damage
from amalgam.stages.common.deliveries import FOLDERS
from amalgam.stages.common.given_labels import label_column
from amalgam.stages.methods import METHODS, NAMES, method_name
from amalgam.stages.registry import STAGE_NAMED, STAGES


def run_stages(  # noqa: PLR0913 - the options of a command
    config: Path,
    overrides: list[str],
    *,
    target: str | None,
    only: bool = False,
    force: bool = False,
    part: str | None = None,
    quiet: bool = False,
    oracle: Path | None = None,
    tables: bool = True,
    check: Callable[[Run], object] | None = None,
    rival: str | None = None,
) -> Experiment:
    """Runs the stages up to `target`; `check` refuses an experiment before any stage runs; `rival` as in `Run`."""
    console = Console(quiet=quiet, tables=tables)
    repeated = _remembered(config, overrides, target, console) if target else []
    fields = [*repeated, *overrides]
    if check is not None:
        check(open_run(config, fields, console=Console(quiet=True)))
    experiment = Experiment.open(config, fields, console, part, rival)
    if experiment.run(target, only=only, force=force).is_complete and oracle is not None:
        experiment.compare_targets(oracle)
    return experiment


def _remembered(config: Path, overrides: list[str], target: str, console: Console) -> list[str]:
    """Returns the overrides of earlier commands with this file and for this student that this command lacks.

    They follow `build-targets --mode hard`, for example, in `train-student`.
    """
    run = open_run(config, overrides, console=Console(quiet=True))
    repeated: dict[str, object] = {}
    name, others = run.experiment.student.name, set[str]()
    named = {field for field in NAMES if "student.method" in run.overrides}  # a method replaces them
    for stage in takewhile(lambda stage: stage.name != target, STAGES):
        stored, student = stored_overrides(run, stage)
        if student != name:
            others.update([student] if stored else [])
            continue
        for field, value in ((field, value) for field, value in stored.items() if field not in named):
            repeated[field] = value
            fix = f"set `{field}=...` to change it, or use `amalgam run{file_option(config)}`"
            console.note(f"{field}={as_yaml(value)}, as in the last {stage.name}; {fix}")
    for other in sorted(others):
        fix = f"add {shlex.quote(f'student.name={other}')} to repeat them"
        console.note(f"this command is for students/{name}; the overrides of students/{other} are left out: {fix}")
    return written(repeated)


# ---- looking


def show_plan(config: Path, overrides: list[str], *, as_json: bool, measure: bool, tree: bool) -> None:
    console, experiment = _looking(config, overrides)
    states = experiment.plan()
    costs = experiment.estimate_cost(states, measure=measure)
    states = experiment.plan() if measure else states  # with the measured units
    remarks, problems, method = states.remarks, states.problems, method_name(experiment.config)
    if as_json:
        details = {"method": method, "stages": [state.to_json() for state in states], "cost": costs.to_json()}
        console.json({**details, "notes": remarks, "problems": [problem.to_json() for problem in problems]})
    else:
        _print_plan(console, states, costs, method, tree=tree)
        for remark in remarks:
            console.note(remark)
    if problems:
        raise all_of(problems)


def _print_plan(
    console: Console, states: Sequence[StageState], costs: CostEstimate, method: str, *, tree: bool
) -> None:
    prices = ["time", "memory", "disk"] if costs.estimates else []
    rows = {
        state.stage: [state.state, state.units, *(costs.cells(state.stage) if prices else ()), state.why]
        for state in states
    }
    if tree:
        for start, stage in branches(states):
            console.result(f"{start}{stage}  {', '.join(cell for cell in rows[stage] if cell not in {'', '-'})}")
    else:
        header = ["stage", "state", "units", *prices, "why"]
        console.table("", header, [[stage, *cells] for stage, cells in rows.items()])
    console.result(f"method: {method}")
    for line in costs.lines():
        console.sentence(line)
    for state in states:
        if state.chosen:
            console.sentence(f"{state.stage}, auto: {shown_choices(state.chosen)}")
        for warning in state.warnings:
            console.note(f"{state.stage}: {warning} (execution.on_version_change=strict recomputes it)")


def branches(states: Sequence[StageState], parent: str | None = None, start: str = "") -> Iterator[tuple[str, str]]:
    """Each stage under the last of those that it is made of, with the lines that are drawn before it."""
    under = [state.stage for state in states if (state.after[-1] if state.after else None) == parent]
    for stage in under:
        root, more = parent is None, stage != under[-1]
        yield "" if root else f"{start}+- ", stage
        yield from branches(states, stage, "" if root else start + ("|  " if more else "   "))


def show_explanation(name: str, config: Path, overrides: list[str], *, as_json: bool) -> None:
    console, experiment = _looking(config, overrides)
    details = experiment.explain(name)
    if as_json:
        console.json(details)
        return
    reason = ": ".join(text for text in (details["reason"], details["detail"]) if text)
    console.result(f"{name}: {details['state']}" + (f" ({reason})" if reason else ""))
    now, last = details["fingerprint"] or "not known yet", details["last"] or "never"
    student = f" (students/{details['student']})" if details["student"] else ""
    console.result(f"  fingerprint now {now}, built last {last}{student}")
    changes = [(each["field"], each["change"]) for each in details["changes"]]
    inputs = {part: value for part, value in (details["identity"] or {}).items() if part != "stage"}
    input_name = STAGE_NAMED[name].input_name
    for line in dict.fromkeys(f"{input_name(field)}: {text}" for field, text in changes or values(inputs)):
        console.result(f"  {line}")


def show_status(config: Path, overrides: list[str], *, as_json: bool) -> None:
    console, experiment = _looking(config, overrides)
    status = experiment.status()
    if as_json:
        console.json(status)
        return
    console.result(f"workspace {status['workspace']}: {size(status['bytes'])}")
    rows = [
        [row["stage"], "HEAD" if row["head"] else "", row["name"], size(row["bytes"]), row["summary"]]
        for row in status["artifacts"]
    ]
    console.table("", ["stage", "", "result", "size", "what"], rows)
    for note in status["notes"]:
        console.note(note)


def verify_workspace(config: Path, overrides: list[str], *, repair: bool, as_json: bool) -> None:
    console, experiment = _looking(config, overrides)
    results = experiment.verify(repair=repair)
    damaged = results["damaged"]
    if as_json:
        console.json(results)
    else:
        for damage in damaged:
            state = "mended" if damage["mended"] else "to mend"
            console.result(f"{damage['path']}: {damage['fault']}; {state}: {damage['repair']}")
        console.result(f"{counted(results['files'], 'file')}, {size(results['bytes'])} checked, {len(damaged)} damaged")
    left = [damage for damage in damaged if not damage["mended"]]
    stored = [damage for damage in left if damage["command"] and damage["path"].split("/")[0] not in FOLDERS]
    if left or (damaged and not repair):
        files = counted(len(left or damaged), "file", "is", "are")
        raise DamagedError(
            f"{files} damaged" if left else f"{files} restored",
            path=damaged[0]["path"],
            where=f"damaged results are in {results['quarantine']}" if stored else (left or damaged)[0]["path"],
            fix=_fix(left, config, overrides),
        )


def _fix(left: Sequence[Damage], config: Path, overrides: Sequence[str]) -> str:
    """Returns the commands that mend the damages."""
    commands = {damage["command"] for damage in left}
    run_again = shlex.join([*RUN.split(), *overrides]) + file_option(config)
    steps = [f"run `{REPAIR}{file_option(config)}`, which copies delivered files again"] if REPAIR in commands else []
    steps += [f"run `{run_again}`, which recomputes only the damaged results"] if RUN in commands else []
    steps += [f"run `{command}{file_option(config)}`" for command in sorted(commands - {"", RUN, REPAIR})]
    steps += [f"follow the line of {'each other' if steps else 'each'} file"] if "" in commands else []
    return ", then ".join(steps) or "check the disk if it happens often"


def collect_garbage(config: Path, overrides: list[str], *, yes: bool, unused: bool, as_json: bool) -> None:
    console = Console()
    run = open_run(config, overrides, console=console)
    garbage, young = find_garbage(run, unused=unused, delete=yes)
    total, quarantined = sum(row["bytes"] for row in garbage), young_quarantine(run)
    if as_json:
        kept = {"young_quarantine": quarantined, **({"young_results": young} if unused else {})}
        console.json({"deleted": yes, "bytes": total, "items": garbage, **kept})
        return
    for why in dict.fromkeys(row["why"] for row in garbage):
        sizes = [row["bytes"] for row in garbage if row["why"] == why]
        console.result(f"{counted(len(sizes), 'file')}, {size(sum(sizes))}: {why}")
    console.result(f"{size(total)} {'deleted' if yes else 'could be deleted'}")
    if quarantined["files"]:
        files = f"{counted(quarantined['files'], 'quarantined file')}, {size(quarantined['bytes'])}"
        console.result(f"{files}: kept until {quarantined['until']}")
    if young:
        console.result(f"{counted(young, 'result')} younger than 24 h: kept")
    if garbage and not yes:
        options = shlex.join([*(["--unused"] if unused else []), "--yes", *overrides]) + file_option(config)
        console.result(f"`amalgam gc {options}` deletes them; `--json` lists them")


def compact_workspace(config: Path, overrides: list[str], *, yes: bool, as_json: bool) -> None:
    console, experiment = _looking(config, overrides)
    packs = experiment.compact(write=yes)
    units, folders = packs["units"], len(packs["folders"])
    options = shlex.join(["--yes", *overrides]) + file_option(config)
    if as_json:
        console.json({"packed": yes, **packs})
    elif not folders:
        console.result("there are no small units to pack")
    elif not yes:
        count = f"{counted(units, 'unit')} in {counted(folders, 'folder')}"
        console.result(f"{count} could be packed: amalgam gc --compact {options}")
    else:
        command = f"amalgam gc {options}"
        later = f"; the loose files go with `{command}`, from a day on" if packs["loose"] else ""
        console.result(f"{counted(units, 'unit')} of {counted(folders, 'folder')}: packed{later}")


LABELS_FILE, NEW_TEXTS = "labels.csv", 50


def label(  # noqa: PLR0913 - the options of a command
    arguments: list[str], config: Path, *, count: int | None, seed: int | None, out: Path | None, as_json: bool
) -> None:
    """Writes the texts to label, or with a filled file prints the changes by its labels."""
    files = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    if not files:
        _write_texts_to_label(config, overrides, count or NEW_TEXTS, seed or 0, out, as_json=as_json)
        return
    if len(files) > 1:
        raise ExperimentError(f"{len(files)} files of labels are given", where="amalgam label", fix="name one file")
    options = {"--count": count, "--seed": seed, "--out": out}
    if given := [name for name, value in options.items() if value is not None]:
        what = f"`amalgam label FILE` takes no {' or '.join(given)}: it writes no texts to label"
        labels = shlex.quote(f"labels={_labels_field(files[0], config)}")
        fix = f"omit {' and '.join(given)}; for texts after these labels, write {labels}"
        raise ExperimentError(what, where=f"amalgam label {shlex.quote(files[0])}", fix=fix)
    _show_label_effect(files[0], config, overrides, as_json=as_json)


def _write_texts_to_label(  # noqa: PLR0913 - the options of a command
    config: Path, overrides: list[str], count: int, seed: int, out: Path | None, *, as_json: bool
) -> None:
    console, experiment = _looking(config, overrides)
    target = out or config.parent / LABELS_FILE
    if target.suffix.lower() != ".csv":
        fix = f"--out {shlex.quote(str(target.parent / f'{target.stem or Path(LABELS_FILE).stem}.csv'))}"
        raise ExperimentError(f"--out {target} does not end in .csv", where="amalgam label", fix=fix)
    check_new(target, "edit it, move it away, or name another file with --out")
    table = experiment.label(count, seed=seed)
    write_labels_file(target, table)
    command = f"amalgam label {shlex.join([str(target), *overrides])}{file_option(config)}"
    corpus, labels = experiment.config.corpus, experiment.labels
    column = label_column(corpus)
    earlier = sum(label != "" for label in table[column])
    texts = table.height - earlier
    if texts < count:
        console.note(f"these are all training texts without a label, fewer than {count:,}; test texts are left out")
    if as_json:
        console.json({"file": str(target), "texts": texts, "earlier": earlier, "labels": labels, "next": command})
        return
    before = f", after {counted(earlier, 'earlier label')}" if earlier else ""
    console.result(f"{target}: {counted(texts, 'random text')} to label{before}")
    outside = f", or {shown_name(corpus.unknown)} where no label fits" if corpus.unknown else ""
    console.sentence(f"labels: {shown_names(labels, len(labels))}{outside}")
    console.result(f"fill the column {as_yaml(column)}, then run: {command}")


def _show_label_effect(file: str, config: Path, overrides: list[str], *, as_json: bool) -> None:
    console, experiment = _looking(config, overrides)
    effect = experiment.compare_labels(file)
    if as_json:
        console.json(asdict(effect))
        return
    effect.print_to(console)
    console.result(how_to_use(_labels_field(file, config), overrides, config))


def _labels_field(file: str, config: Path) -> str:
    """Returns the field `labels` of the experiment for a file that the command line names."""
    return file if file == FROM_CORPUS else local_path(Path(file).absolute(), config.absolute().parent)


def show_audit(config: Path, overrides: list[str], *, as_json: bool) -> None:
    console, experiment = _looking(config, overrides)
    audit = experiment.audit()
    if as_json:
        console.json(audit.to_json())
    else:
        audit.print_to(console)


def _looking(config: Path, overrides: list[str]) -> tuple[Console, Experiment]:
    console = Console()
    return console, Experiment.open(config, overrides, console)


def show_methods(*, as_json: bool) -> None:
    console = Console()
    if as_json:
        console.json({name: asdict(method) for name, method in METHODS.items()})
        return
    rows = []
    for name, method in METHODS.items():
        on_generated = f"; {ON_GENERATED} {_settings(method.on_generated)}" if method.on_generated else ""
        sets = _settings(method.defaults) + on_generated or "nothing, and trains nothing"
        rows.append([name, method.source, method.needs, sets])
    console.table("", ["student.method", "from", "needs", "sets"], rows)


def _settings(sections: Mapping[str, Mapping[str, Any]]) -> str:
    pairs = [(section, *pair) for section, fields in sections.items() for pair in fields.items()]
    return ", ".join(f"{section}.{name}={value}" for section, name, value in pairs)


def show_health(config: Path, overrides: list[str], *, as_json: bool) -> None:
    checks, console = list(diagnose(config, overrides)), Console()
    failed = [check.check for check in checks if not check.ok]
    names = ", ".join(dict.fromkeys(failed))
    if as_json:
        console.json([check._asdict() for check in checks])
    else:
        console.table("", ["check", "result", "fix"], [check[:3] for check in checks])
    if failed:
        what = f"{len(failed)} of {len(checks)} checks failed: {names}"
        fix = f"apply the fixes in the table, and run `amalgam doctor{file_option(config)}` again"
        raise ExperimentError(what, fix=fix)
