"""Estimates time, memory and disk of the missing work: units left times the recorded seconds of a unit.

Each finished stage records its seconds, bytes and workload in timing.json. Where a stage has no record,
`amalgam plan --estimate` runs one missing unit of each kind; the results stay in the workspace.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, NotRequired, TypedDict

from amalgam.pipeline.config.schema import Student, TrainTeachers
from amalgam.pipeline.console import counted, duration, size
from amalgam.pipeline.errors import AmalgamError
from amalgam.pipeline.execution.plan import StageState, stage_state
from amalgam.pipeline.execution.stage import PendingDependencyError, Run, Stage, Unit
from amalgam.pipeline.storage.facts import fits
from amalgam.pipeline.storage.paths import json_object
from amalgam.pipeline.storage.store import TIMING
from amalgam.stages.cache_teachers.stage import pass_prices
from amalgam.stages.common.cached import load as cached
from amalgam.stages.common.load import encoder_digest, encoder_files, teachers_of
from amalgam.stages.common.models.resolve import DEPTH, WIDTH, ModelFiles, depth_of, hidden_size
from amalgam.stages.common.training.checkpoint_files import TRAINING_STAGES, training_seconds
from amalgam.stages.registry import STAGE_NAMED
from amalgam.stages.train_teachers.stage import encoders_of

MEGABYTE = 1e6
WAITS = "earlier stages have no result yet"
"""Why the cost of a stage is not known; the column `why` names the earlier stage."""

RATES = "rates.json"
"""The measured rates by stage."""

LEAST_WORK = 0.1
"""Smallest share of the largest recorded workload of a stage whose seconds are a rate."""

MEASURING_SECONDS = 10.0
"""No further unit of a stage is measured after this time."""

PROCESS_MB = 400.0
"""Memory of a process with its libraries, without a model."""

INFERENCE_COPIES = 2
"""Weights in memory while a model predicts: the model, and the copy that loading or another dtype needs."""

TRAINING_COPIES = 5
"""Weights in memory while a model trains: weights, gradients, two moments of AdamW, the best checkpoint."""


@dataclass(frozen=True)
class Cost:
    seconds: float
    memory_mb: float
    disk_mb: float

    def cells(self) -> list[str]:
        return [duration(self.seconds), size(self.memory_mb * MEGABYTE), size(self.disk_mb * MEGABYTE)]


class CostJson(TypedDict):
    stages: Mapping[str, Mapping[str, float] | None]
    total: Mapping[str, float] | None
    notes: dict[str, str]
    passes: NotRequired[Mapping[str, int]]


@dataclass(frozen=True)
class CostEstimate:
    """The costs of all stages that are not current, or how a cost becomes known."""

    costs: dict[str, Cost | str]
    passes: Mapping[str, int] = field(default_factory=dict)
    """Text-passes of the teachers: by `cache.passes` none, auto and all, and `adaptive`; empty if none is missing."""
    second_per_pass: float | None = None
    sampled: int = 0
    """Texts that run dropout passes with `cache.passes=auto`, although the others run none."""

    @property
    def estimates(self) -> dict[str, Cost]:
        return {stage: cost for stage, cost in self.costs.items() if isinstance(cost, Cost)}

    @property
    def total(self) -> Cost | None:
        """Returns the sum over all stages, or None if the cost of one is not known."""
        costs = self.estimates.values()
        if not costs or len(costs) < len(self.costs):
            return None
        memory = max(cost.memory_mb for cost in costs)
        return Cost(sum(cost.seconds for cost in costs), memory, sum(cost.disk_mb for cost in costs))

    def cells(self, stage: str) -> list[str]:
        """Returns time, memory and disk of a stage as text; empty cells for a current stage."""
        cost = self.estimates.get(stage)
        return cost.cells() if cost else ["?" if stage in self.costs else ""] * 3

    def lines(self) -> list[str]:
        """Returns the sentences below the table: the stages without an estimate by their reason, and the total."""
        reasons: dict[str, list[str]] = {}
        for stage, cost in self.costs.items():
            if isinstance(cost, str):
                reasons.setdefault(cost, []).append(stage)
        lines = [f"no cost yet for {', '.join(stages)}: {note}" for note, stages in reasons.items()]
        if self.total:
            seconds, memory, disk = self.total.cells()
            lines.append(f"total: about {seconds}, at most {memory} of memory, {disk} on disk")
        if self.passes:
            settings = {"adaptive": "cache.adaptive=true (estimated)"}
            if self.sampled:
                sample = f"a sample of {counted(self.sampled, 'text')}"
                settings["auto"] = f"cache.passes=auto (0, and {cached.AUTO_PASSES} for {sample})"
            prices = ", ".join(
                f"{self._price(count)} with {settings.get(name, f'cache.passes={name}')}"
                for name, count in self.passes.items()
            )
            lines.append(f"price of dropout passes, if nothing is cached: {prices}")
        return lines

    def _price(self, count: int) -> str:
        seconds = "" if self.second_per_pass is None else f" ({duration(count * self.second_per_pass)})"
        return f"{count:,} text-passes{seconds}"

    def to_json(self) -> CostJson:
        stages = {stage: None if isinstance(cost, str) else asdict(cost) for stage, cost in self.costs.items()}
        notes = {stage: cost for stage, cost in self.costs.items() if isinstance(cost, str)}
        costs: CostJson = {"stages": stages, "total": asdict(self.total) if self.total else None, "notes": notes}
        return {**costs, "passes": self.passes} if self.passes else costs


def estimate_cost(run: Run, states: Sequence[StageState], *, measure: bool = False) -> CostEstimate:
    costs: dict[str, Cost | str] = {}
    for state in (state for state in states if state.state != "current"):
        try:
            costs[state.stage] = _cost(run, STAGE_NAMED[state.stage], state, measure=measure)
        except PendingDependencyError as pending:
            costs[state.stage] = WAITS if str(pending) in STAGE_NAMED else f"after {pending}"
        except AmalgamError as error:
            costs[state.stage] = error.what
    if "cache-teachers" not in costs:
        return CostEstimate(costs)
    try:
        passes, sampled = pass_prices(run)
    except (AmalgamError, PendingDependencyError):  # the texts are not read yet
        return CostEstimate(costs)
    rate = _recorded(run, STAGE_NAMED["cache-teachers"])
    return CostEstimate(costs, passes, rate.seconds / rate.workload if rate else None, sampled)


def _cost(run: Run, stage: Stage, state: StageState, *, measure: bool) -> Cost | str:
    """Returns the recorded cost, scaled to the missing work, or how it becomes known."""
    rate = _recorded(run, stage, state.fingerprint)
    if rate is None and any(earlier not in run.results for earlier in state.after):
        return WAITS
    if rate is None and measure and stage.parallelism == "units":
        if state.total is None:
            stage.resolve_inputs(run)
            state = stage_state(stage, run)
        if state.missing:
            rate = _measured(run, stage, state.missing)
            state = stage_state(stage, run)  # without the measured units
    if rate is None:
        command = f"`amalgam plan --estimate{run.options}`"
        if stage.name == "read-corpus":
            return f"run `amalgam read-corpus{run.options}`, then {command}"
        return f"{command} runs and times one unit" if stage.parallelism == "units" else "known after the first run"
    workload = stage.workload(run, state.missing if state.total is not None else None)
    if workload is not None and state.total is not None:
        workload += stage.later_workload(run)
    shares = ((unit, stage.resumes(run, unit)[1]) for unit in state.missing)
    trained = sum(share * (stage.workload(run, [unit]) or 0.0) for unit, share in shares if share)
    scale = 1.0 if workload is None else (workload - trained) / rate.workload
    grows = stage.parallelism == "units"  # other stages write one model or table, however long they take
    disk = rate.bytes / MEGABYTE * (scale if grows else 1.0)
    seconds = rate.fixed + (rate.seconds - rate.fixed) * scale
    return Cost(seconds, PROCESS_MB + max(_weights_mb(run, stage.name), default=0.0), disk)


# ---- recorded and measured rates


@dataclass(frozen=True)
class Rate:
    """The recorded cost of a workload; a stage's `workload` defines its unit."""

    workload: float
    seconds: float
    bytes: float
    fixed: float = 0.0
    """Seconds that do not grow with the workload, such as loading a model for training."""


def _recorded(run: Run, stage: Stage, fingerprint: str | None = None) -> Rate | None:
    """Returns the rate of this build or the last one, else of the largest recorded one, else the measured one.

    A build of a few units, such as those of appended texts, mostly loads models. Below LEAST_WORK it gives no rate.
    A static student gives no rate to a transformer, which takes several times as long, and the reverse. Another
    transformer gives one in proportion to the size of its layers.
    """
    folders = {folder / TIMING: folder.name for folder in run.store.folders(stage.name)}
    records = run.store.records(list(folders))
    rates = {folders[path]: rate for path, record in records.items() if (rate := _rate(record.facts))}
    if stage.name == "train-student":
        is_static = run.experiment.student.is_static
        rates = {name: rate for name, rate in rates.items() if _is_static(run, name) is is_static}
        rates = rates if is_static or not rates else _scaled(run, rates)
    if not rates:
        return _rate(_measured_rates(run).get(stage.name))
    largest = max(rates, key=lambda name: rates[name].workload)
    if stage.parallelism == "units":
        rates = {name: rate for name, rate in rates.items() if rate.workload >= LEAST_WORK * rates[largest].workload}
    name = next((name for name in (fingerprint, run.store.last(stage.name)) if name in rates), None) or largest
    return _without_start(run, stage, name, rates[name])


def _scaled(run: Run, rates: Mapping[str, Rate]) -> dict[str, Rate]:
    """Returns the rates of students with layers of this encoder's size, else those of all, scaled by the size."""
    student = run.experiment.student
    encoder_digest(run, student, cached.ENCODER)  # raises if the next line would send a request
    files = encoder_files(run, student, cached.ENCODER)
    size = (student.layers or depth_of(files)) * hidden_size(files) ** 2
    sizes = {name: _layer_size(run, name) for name in rates}
    same = {name: rate for name, rate in rates.items() if sizes[name] == size}
    return same or {
        name: replace(rate, workload=rate.workload * (sizes[name] or size) / size) for name, rate in rates.items()
    }


def _layer_size(run: Run, fingerprint: str) -> int:
    """Returns the number of layers of a student times the square of their width; 0 if it is not on this machine."""
    manifest = run.store.manifest("train-student", fingerprint)
    paths = [run.store.path(file) for file in manifest.files if file.name == "config.json"] if manifest else []
    config = json_object(paths[0]) if paths else {}
    depth, width = (next((config[name] for name in names if name in config), 0) for names in (DEPTH, WIDTH))
    return depth * width**2 if fits(depth, int) and fits(width, int) else 0


def _is_static(run: Run, student: str) -> bool:
    identity = run.store.identity("train-student", student)
    return identity is not None and "static" in identity["inputs"]


def _without_start(run: Run, stage: Stage, fingerprint: str, rate: Rate) -> Rate:
    """Returns a training's rate with the seconds of its log; the other seconds are fixed.

    The log has all runs of an interrupted training, whose recorded seconds are those of the last run.
    """
    manifest = run.store.manifest(stage.name, fingerprint) if stage.name in TRAINING_STAGES else None
    if manifest is None:
        return rate
    folders = {"/".join(file.path.split("/")[:2]) for file in manifest.files}
    seconds = training_seconds(run.store.root, folders)
    if not seconds:
        return rate
    return replace(rate, seconds=max(rate.seconds, seconds), fixed=max(rate.seconds - seconds, 0.0))


def _rate(facts: Any) -> Rate | None:
    """Returns the rate in these facts; None if they are damaged or record no work."""
    try:
        rate = Rate(*(float(facts[name]) for name in ("workload", "seconds", "bytes")))
    except (KeyError, TypeError, ValueError):
        return None
    return rate if rate.workload > 0 else None


def _measured_rates(run: Run) -> Mapping[str, object]:
    content = run.store.read_json(run.store.root / RATES)
    return content if isinstance(content, dict) else {}


def _measured(run: Run, stage: Stage, missing: Sequence[Unit]) -> Rate | None:
    """Runs the smallest missing unit of each folder, for at most MEASURING_SECONDS, and stores the mean rate.

    Folders have the same weight, because teachers have about the same number of texts.
    """
    run.console.say(f"{stage.name}: measuring one unit of each kind; the results stay in the workspace")
    run.store.claim()
    rates, began = list[Rate](), time.monotonic()
    folder = attrgetter("folder")
    for _, units in groupby(sorted(missing, key=folder), key=folder):
        if not rates or time.monotonic() - began < MEASURING_SECONDS:
            rates.append(_rate_of_unit(run, stage, min(units, key=lambda unit: unit.size)))
    workload = sum(rate.workload for rate in rates)
    seconds = sum(rate.seconds / rate.workload for rate in rates if rate.workload) / len(rates)
    disk = sum(rate.bytes / rate.workload for rate in rates if rate.workload) / len(rates)
    rate = Rate(workload, seconds * workload, disk * workload)
    run.store.replace(run.store.root / RATES, {**_measured_rates(run), stage.name: asdict(rate)})
    return rate if rate.workload > 0 else None


def _rate_of_unit(run: Run, stage: Stage, unit: Unit) -> Rate:
    began = time.monotonic()
    with run.console.progress(stage.name, stage.unit_label, unit.size, 0):
        stage.run_units(run, [unit])
    record = run.store.record(unit.record_path)
    written = sum(file.bytes for file in record.files) if record else 0
    alone = replace(unit, is_read_by_others=False)  # the missing units that read it have not run
    return Rate(stage.workload(run, [alone]) or 0.0, time.monotonic() - began, written)


# ---- memory


def _weights_mb(run: Run, stage: str) -> Iterator[float]:
    """Yields the size of each model of the stage, as often as its weights are in memory."""
    experiment = run.experiment
    if stage in {"cache-teachers", "cache-features", "generate", "make-embeddings"}:
        yield from (INFERENCE_COPIES * _file_mb(teacher.files) for teacher in teachers_of(run))
    if stage in {"train-student", "report"} and experiment.student.learns:
        copies = TRAINING_COPIES if stage == "train-student" else INFERENCE_COPIES
        yield copies * _encoder_mb(run, experiment.student, cached.ENCODER)
    if stage == "train-teachers" and experiment.train_teachers:
        yield from (TRAINING_COPIES * _encoder_mb(run, *encoder) for encoder in encoders_of(run).values())


def _encoder_mb(run: Run, settings: Student | TrainTeachers, where: str) -> float:
    encoder_digest(run, settings, where)  # raises where the model is not on this machine
    return _file_mb(encoder_files(run, settings, where))


def _file_mb(files: ModelFiles) -> float:
    if files.are_predictions:
        return files.folder.stat().st_size / MEGABYTE
    suffix = ".safetensors" if files.weights == "safetensors" else ".bin"
    return sum(path.stat().st_size for path in files.folder.iterdir() if path.suffix == suffix) / MEGABYTE
