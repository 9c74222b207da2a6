"""What the commands do: an experiment file and a workspace in, a run, a table or JSON out."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from amalgam.pipeline.console import Console
from amalgam.pipeline.digests import FileDigests
from amalgam.pipeline.engines import share_of
from amalgam.pipeline.errors import DamagedError, ExperimentError
from amalgam.pipeline.experiment_file import LoadedExperiment, load_experiment
from amalgam.pipeline.fingerprint import differences
from amalgam.pipeline.plan import StageState, identity_of, plan
from amalgam.pipeline.runner import PartDoneError, bring_up_to_date
from amalgam.pipeline.stage import NotKnownYetError, Run, Stage
from amalgam.pipeline.store import open_store
from amalgam.stages.methods import METHODS, PRESETS
from amalgam.stages.order import ASKED_FOR_BY, STAGES


def open_run(
    config: Path, overrides: list[str], *, part: str | None = None, console: Console | None = None
) -> tuple[LoadedExperiment, Run]:
    loaded = load_experiment(config, overrides, presets=PRESETS)
    execution = loaded.experiment.execution
    store = open_store(execution.workspace, loaded.base)
    run = Run(
        loaded.experiment,
        loaded.base,
        store,
        console or Console(),
        share_of(part, execution.processes),
        FileDigests(store.root / "digests.json"),
        loaded.overrides,
    )
    return loaded, run


@contextmanager
def working(run: Run) -> Iterator[None]:
    """Signals are heard, and what was learned of outside files is kept, whatever happens."""
    with run.signals.listening():
        try:
            yield
            _leave_group()
        finally:
            if isinstance(run.digest_of, FileDigests):
                run.digest_of.save()


def _leave_group() -> None:
    """A torchrun process that ends without taking leave makes torch warn of a leak."""
    if "torch" in sys.modules:
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()


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
) -> list[StageState]:
    overrides = [*_remembered(config, overrides, target), *overrides]
    loaded, run = open_run(config, overrides, part=part)
    _check_asked_for(target, loaded)
    run.console = Console(quiet=quiet or (not run.share.leads and run.share.kind == "torchrun"))
    with working(run):
        try:
            states = bring_up_to_date(STAGES, run, target=target, only=only, force=force)
        except PartDoneError as done:
            state = done.state
            run.console.say(
                f"{state.stage}: this part is done; {state.done} of {state.total} units are there. "
                "Whoever comes last, or a later run, goes on."
            )
            return []
        if oracle is not None:
            from amalgam.stages.build_targets.oracle import show_divergence

            show_divergence(run, oracle)
    return states


def _check_asked_for(target: str | None, loaded: LoadedExperiment) -> None:
    wanted = [stage.name for stage in STAGES if stage.wanted(loaded.experiment)]
    if target and target not in wanted and target in ASKED_FOR_BY:
        raise ExperimentError(f"this experiment has no stage {target}", fix=f"{ASKED_FOR_BY[target]} asks for it")


def _remembered(config: Path, overrides: list[str], target: str | None) -> list[str]:
    """What earlier stage commands were told and this one was not: `build-targets --mode hard`, then `train-student`."""
    if target is None:
        return []
    names = [stage.name for stage in STAGES]
    loaded, run = open_run(config, overrides, console=Console(quiet=True))
    head = run.store.head()
    said: dict[str, Any] = {
        key: value
        for name in names[: names.index(target)]
        for key, value in head.get(name, {}).get("overrides", {}).items()
        if key.split(".")[0] in SECTIONS_OF.get(name, ()) and key not in loaded.overrides
    }
    console = Console()
    for key, value in said.items():
        console.note(
            f"{key}={value}, as the last {_stage_of(key)} was told; `{key}=...` here or `amalgam run` says otherwise"
        )
    return [f"{key}={_yaml(value)}" for key, value in said.items()]


SECTIONS_OF: Mapping[str, tuple[str, ...]] = {
    "generate": ("generate",),
    "read-corpus": ("corpus",),
    "train-teachers": ("train_teachers",),
    "cache-teachers": ("cache",),
    "build-targets": ("targets",),
    "guess-embeddings": ("embeddings",),
    "train-student": ("student", "objective"),
}


def _stage_of(key: str) -> str:
    return next(stage for stage, sections in SECTIONS_OF.items() if key.split(".", maxsplit=1)[0] in sections)


def _yaml(value: Any) -> str:
    import json

    return json.dumps(value)


# ---- looking


def show_plan(config: Path, overrides: list[str], *, as_json: bool, measure: bool) -> None:
    from amalgam.stages.bill.bill import bill

    _, run = open_run(config, overrides)
    with working(run):
        states = plan(STAGES, run)
        costs = bill(run, states, measure=measure)
    if as_json:
        run.console.json({"stages": [state.to_json() for state in states], "bill": costs.to_json()})
        return
    priced = any(costs.costs.values())
    rows = [
        [
            state.stage,
            state.state,
            "-" if state.total is None else f"{state.done}/{state.total}",
            *(costs.cells(state.stage) if priced else ()),
            f"{state.reason or ''}{': ' if state.detail and state.reason else ''}{state.detail}",
        ]
        for state in states
    ]
    prices = ["time", "memory", "disk"] if priced else []
    run.console.table("", ["stage", "state", "units", *prices, "why"], rows)
    for line in costs.lines():
        run.console.sentence(line)
    for state in states:
        for warning in state.warnings:
            run.console.note(f"{state.stage}: {warning} (execution.versions=strict makes it again)")


def show_explanation(name: str, config: Path, overrides: list[str], *, as_json: bool) -> None:
    import difflib

    names = [stage.name for stage in STAGES]
    if name not in names:
        close = [one for one in names if one.startswith(name)] or difflib.get_close_matches(name, names, 1)
        raise ExperimentError(
            f"no stage {name!r}",
            fix=f"did you mean {' or '.join(close)}?" if close else f"the stages: {', '.join(names)}",
        )
    _, run = open_run(config, overrides)
    with working(run):
        states = {state.stage: state for state in plan(STAGES, run)}
        found = _explained(next(stage for stage in STAGES if stage.name == name), run, states.get(name))
    if as_json:
        run.console.json(found)
        return
    run.console.result(f"{name}: {found['state']}" + (f" ({found['reason']})" if found["reason"] else ""))
    run.console.result(
        f"  fingerprint now {found['fingerprint'] or 'not known yet'}, built last {found['last'] or 'never'}"
    )
    for change in found["changes"]:
        run.console.result(f"  {change['field']}: {change['change']}")
    if found["identity"] and not found["changes"]:
        import json

        run.console.result(json.dumps(found["identity"], indent=2, ensure_ascii=False))


def _explained(stage: Stage, run: Run, state: StageState | None) -> dict[str, Any]:
    last = run.store.head().get(stage.name, {}).get("fingerprint")
    old = run.store.manifest(stage.name, last) if last else None
    try:
        identity = identity_of(stage, run) if state else None
    except NotKnownYetError:
        identity = None
    changes = list(differences(old.identity, identity)) if old and identity else []
    return {
        "stage": stage.name,
        "state": state.state if state else "not part of this experiment",
        "reason": state.reason if state else None,
        "detail": state.detail if state else "",
        "fingerprint": state.fingerprint if state else None,
        "last": last,
        "changes": [{"field": field, "change": change} for field, change in changes],
        "identity": identity,
    }


def show_status(config: Path, overrides: list[str], *, as_json: bool) -> None:
    from amalgam.stages.housekeeping import holdings

    _, run = open_run(config, overrides)
    found = holdings(run)
    if as_json:
        run.console.json(found)
        return
    run.console.result(f"workspace {found['workspace']}: {found['bytes'] / 1e6:,.1f} MB")
    rows = [
        [row["stage"], "HEAD" if row["head"] else "", row["name"], f"{row['bytes'] / 1e6:,.1f} MB", row["says"]]
        for row in found["artifacts"]
    ]
    run.console.table("", ["stage", "", "result", "size", "what"], rows)
    for note in found["notes"]:
        run.console.note(note)


def verify_workspace(config: Path, overrides: list[str], *, as_json: bool) -> None:
    from amalgam.stages.housekeeping import verify

    _, run = open_run(config, overrides)
    found = verify(run)
    if as_json:
        run.console.json(found)
    else:
        for fault in found["damaged"]:
            run.console.result(f"{fault['path']}: {fault['fault']}; quarantined")
        run.console.result(
            f"{found['files']:,} files, {found['bytes'] / 1e6:,.1f} MB checked, {len(found['damaged'])} damaged"
        )
    if found["damaged"]:
        raise DamagedError(
            f"{len(found['damaged'])} stored files are damaged, and were set aside",
            path=found["damaged"][0]["path"],
            where=run.store.where(run.store.root / "quarantine"),
            fix="`amalgam run` makes them again, and nothing else",
        )


def collect_garbage(  # noqa: PLR0913 - the options of a command
    config: Path, overrides: list[str], *, yes: bool, unused: bool, compact: bool = False, as_json: bool
) -> None:
    from amalgam.stages.housekeeping import garbage, remove

    _, run = open_run(config, overrides)
    if compact:
        _compact(run, yes=yes, as_json=as_json)
        return
    found = garbage(run, unused=unused)
    if yes:
        remove(run, found)
    total = sum(row["bytes"] for row in found)
    if as_json:
        run.console.json({"deleted": yes, "bytes": total, "items": found})
        return
    for row in found:
        run.console.result(f"{row['path']}  {row['bytes'] / 1e6:,.1f} MB  {row['why']}")
    run.console.result(f"{total / 1e6:,.1f} MB {'deleted' if yes else 'could be deleted: amalgam gc --yes'}")


def _compact(run: Run, *, yes: bool, as_json: bool) -> None:
    from amalgam.stages.housekeeping import pack, packable

    found = packable(run)
    units = pack(run, found) if yes else sum(len(loose.new) for loose in found)
    if as_json:
        run.console.json({"packed": yes, "units": units, "folders": [loose.folder for loose in found]})
    elif not yes:
        run.console.result(f"{units:,} units in {len(found)} folders could be packed: amalgam gc --compact --yes")
    else:
        later = "" if run.store.place.far else "; their loose files go with `amalgam gc --yes`, from a day on"
        run.console.result(f"{units:,} units of {len(found)} folders are packed{later}")


def show_audit(config: Path, overrides: list[str], *, as_json: bool) -> None:
    from amalgam.stages.audit.audit import audit
    from amalgam.stages.audit.shown import show

    _, run = open_run(config, overrides)
    with working(run):
        found = audit(run, plan(STAGES, run))
    if as_json:
        run.console.json(found)
    else:
        show(run.console, found)


def show_methods(*, as_json: bool) -> None:
    console = Console()
    if as_json:
        console.json({name: asdict(method) for name, method in METHODS.items()})
        return
    rows = [
        [
            name,
            method.source,
            method.needs,
            ", ".join(f"{s}.{k}={v}" for s, fields in method.defaults.items() for k, v in fields.items())
            or "nothing, and trains nothing",
        ]
        for name, method in METHODS.items()
    ]
    console.table("", ["student.method", "from", "needs", "sets"], rows)


def show_schema() -> None:
    from amalgam.pipeline.experiment import Experiment

    Console().json(Experiment.model_json_schema())


def show_health(config: Path, overrides: list[str], *, as_json: bool) -> None:
    from amalgam.stages.health import examine

    found = examine(config, overrides)
    console = Console()
    if as_json:
        console.json(found)
        return
    console.table("", ["what", "found", "fix"], [[row["what"], row["found"], row["fix"]] for row in found])
