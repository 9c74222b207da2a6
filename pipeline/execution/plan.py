"""Computes the state of each stage, with the reason, from manifests and digests; reads no text, loads no model."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NotRequired, TypedDict

from amalgam.pipeline.errors import DamagedError
from amalgam.pipeline.execution.stage import PendingDependencyError, Run, Stage, Unit, pending_units
from amalgam.pipeline.storage.fingerprint import LIBRARIES, differences, fingerprint, has_two_values, library_versions
from amalgam.pipeline.storage.store import MANIFEST, Record, StoredFile

Reason = Literal["first-run", "config", "input", "upstream", "code", "missing", "damaged", "forced"]

State = Literal["current", "partial", "missing", "not part of this experiment"]


class StateJson(TypedDict):
    """A stage's state, as `amalgam plan --json` prints it."""

    stage: str
    state: State
    reason: Reason | None
    detail: str
    units: dict[Literal["done", "total"], int | None]
    fingerprint: str | None
    warnings: list[str]
    after: list[str]
    chosen: Mapping[str, Any]


class IdentityJson(TypedDict):
    """All inputs of a stage's result; its digest is the fingerprint."""

    stage: str
    version: int
    config: Mapping[str, Any]
    inputs: Mapping[str, Any]
    upstream: Mapping[str, str]
    libraries: NotRequired[Mapping[str, str]]


@dataclass(frozen=True)
class StageState:
    stage: str
    state: State
    reason: Reason | None
    detail: str
    done: int | None
    """Number of complete units; None while the units depend on a pending stage."""
    total: int | None
    fingerprint: str | None
    warnings: tuple[str, ...] = ()
    missing: tuple[Unit, ...] = ()
    """The missing units, if the units are known."""
    after: tuple[str, ...] = ()
    """The stages of this experiment whose results the stage reads."""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Values by field that the stage chose because the experiment leaves them to auto; empty before they are known."""

    @property
    def why(self) -> str:
        return ": ".join(filter(None, (self.reason, self.detail)))

    @property
    def units(self) -> str:
        return "-" if self.total is None else f"{self.done}/{self.total}"

    def to_json(self) -> StateJson:
        return {
            "stage": self.stage,
            "state": self.state,
            "reason": self.reason,
            "detail": self.detail,
            "units": {"done": self.done, "total": self.total},
            "fingerprint": self.fingerprint,
            "warnings": list(self.warnings),
            "after": list(self.after),
            "chosen": dict(self.chosen),
        }


def plan(stages: Sequence[Stage], run: Run) -> list[StageState]:
    """Returns the state of every stage of the experiment, and fills run.results with the current ones.

    A damaged file is quarantined, and then the planning starts again without it.
    """
    damaged = set[str]()
    while True:
        try:
            needed = [stage for stage in stages if stage.is_needed(run.experiment)]
            states = {stage.name: stage_state(stage, run) for stage in needed}
            needs = {stage.name: stage.needs(run.experiment) for stage in needed}
            return [
                replace(state, after=tuple(earlier for earlier in states if earlier in needs[name]))
                for name, state in states.items()
            ]
        except DamagedError as damage:
            if damage.path in damaged:
                raise
            damaged.add(damage.path)
            run.console.note(damage.what)
            run.results.clear()
            run.cache.clear()


def stage_state(stage: Stage, run: Run) -> StageState:
    try:
        identity = identity_of(stage, run)
    except PendingDependencyError as pending:
        waiting: Reason = "upstream" if stage.name in run.store.head() else "first-run"
        return StageState(stage.name, "missing", waiting, f"after {pending}", None, None, None)
    name = fingerprint(identity)
    manifest, chosen = run.store.manifest(stage.name, name), stage.chosen(run)
    faults = run.store.missing_files(manifest) if manifest else []
    if manifest and not faults:
        run.results[stage.name] = (name, manifest)
        count = int(manifest.facts.get("units", 1))
        warnings = tuple(version_warnings(manifest))
        return StageState(stage.name, "current", None, "", count, count, name, warnings, chosen=chosen)
    run.results.pop(stage.name, None)
    units = stage.units(run, run.store.folder(stage.name, name))
    reason, detail = _reason(stage, run, name, identity, faults[0] if faults else None)
    missing = tuple(pending_units(run, [unit for unit in units if not unit.is_complete]))
    done = len(units) - len(missing)
    begun = [words for unit in missing if (words := stage.resumes(run, unit)[0])]
    detail = "; ".join(filter(None, [detail, *begun]))
    state: State = "partial" if done else "missing"
    return StageState(stage.name, state, reason, detail, done, len(units), name, missing=missing, chosen=chosen)


def shown_choices(chosen: Mapping[str, Any]) -> str:
    """Returns chosen values as overrides that would set them."""
    return " ".join(f"{name}={json.dumps(value).replace(' ', '')}" for name, value in chosen.items())


def identity_of(stage: Stage, run: Run) -> IdentityJson:
    parts = stage.identity(run)
    identity = IdentityJson(
        stage=stage.name,
        version=stage.VERSION,
        config=dict(parts.config),
        inputs=dict(parts.inputs),
        upstream=dict(parts.upstream),
    )
    if run.versions:
        identity["libraries"] = run.versions["libraries"]
    return identity


def _reason(
    stage: Stage, run: Run, name: str, identity: IdentityJson, fault: tuple[StoredFile, str] | None
) -> tuple[Reason, str]:
    if fault is not None:
        file, kind = fault
        return ("missing" if kind == "missing" else "damaged"), f"{file.path} is {kind}"
    before = run.last(stage.name)
    if before is None:
        return "first-run", ""
    if name in {before, run.store.last(stage.name)}:
        exists = run.store.has(run.store.folder(stage.name, name) / MANIFEST)
        return ("damaged", f"{MANIFEST} cannot be read") if exists else ("missing", f"{MANIFEST} is missing")
    old = run.store.identity(stage.name, before)
    if old is None:
        return "missing", "the previous result is no longer there"
    return explain_change(stage, old, identity, stage.chosen(run))


def explain_change(
    stage: Stage, old: Mapping[str, Any], new: Mapping[str, Any], chosen: Collection[str] = ()
) -> tuple[Reason, str]:
    """Returns the first change of a value, else the first one; `chosen` fields follow from others, so they come last.

    A method that is replaced, such as `targets.mode`, comes before the fields that one of the two does not read.
    """
    if old.get("version") != new.get("version"):
        return "code", f"{stage.name}: code {old.get('version')} -> {new.get('version')}"
    parts: tuple[tuple[Reason, str], ...] = (("config", "config"), ("input", "inputs"), ("code", "libraries"))
    by_part = ((reason, list(differences(old.get(part, {}), new.get(part, {})))) for reason, part in parts)
    changes = [
        (reason, *each)
        for reason, differing in by_part
        for each in sorted(differing, key=lambda each: not has_two_values(each[1]))
    ]
    derived = [change for change in changes if change[0] == "config" and change[1] in chosen]
    direct = [change for change in changes if change not in derived]
    if direct:
        reason, key, change = direct[0]
        rest = f" (+{len(direct) - 1} more)" if len(direct) > 1 else ""
        return reason, f"{stage.input_name(key)}: {change}{rest}"
    changed = [f"{key}: {change}" for key, change in differences(old.get("upstream", {}), new.get("upstream", {}))]
    if derived and not changed:
        return "config", "; ".join(f"{key}: {change}" for _, key, change in derived)
    return "upstream", "; ".join(changed)


def version_warnings(manifest: Record) -> Iterator[str]:
    """Yields a warning per updated library; with `execution.on_version_change=strict` an update reruns stages."""
    now = library_versions()
    for library, before in manifest.made.get("libraries", {}).items():
        if library in LIBRARIES and now.get(library) != before:
            yield f"made with {library} {before}, now {now.get(library)}"
