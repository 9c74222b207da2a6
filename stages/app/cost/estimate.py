"""The bill of what is missing, stage by stage: work counted from the experiment and the plan, times measured rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from amalgam.pipeline.console import duration
from amalgam.pipeline.errors import AmalgamError
from amalgam.pipeline.execution.plan import StageState
from amalgam.pipeline.execution.stage import PendingDependencyError, Run
from amalgam.stages.app.cost.job import Cost, StageEstimate
from amalgam.stages.app.cost.rates import MachineRates, NotMeasuredError
from amalgam.stages.app.cost.stages import COSTS
from amalgam.stages.app.cost.trials import starting


@dataclass(frozen=True)
class CostEstimate:
    costs: dict[str, Cost | None]
    """Of the stages that are not current; None: not known, and `notes` say why."""
    notes: dict[str, str]
    starting: float
    """Seconds before the first stage can begin."""

    @property
    def total(self) -> Cost | None:
        known = [cost for cost in self.costs.values() if cost]
        if not known or len(known) < len(self.costs):
            return None
        seconds = self.starting + sum(cost.seconds for cost in known)
        return Cost(seconds, max(cost.memory_mb for cost in known), sum(cost.disk_mb for cost in known))

    def cells(self, stage: str) -> list[str]:
        """Time, memory and disk of a stage; nothing of one that is current."""
        return _shown(self.costs[stage]) if stage in self.costs else ["", "", ""]

    def lines(self) -> list[str]:
        said = [f"{stage}: cost not known: {note}" for stage, note in self.notes.items()]
        if self.total is None:
            return said
        time, memory, disk = _shown(self.total)
        return [*said, f"in all about {time}, {memory} of memory at most, {disk} on the disk"]

    def to_json(self) -> dict[str, Any]:
        costs = {stage: asdict(cost) if cost else None for stage, cost in self.costs.items()}
        total = self.total
        return {
            "stages": costs,
            "starting_seconds": self.starting,
            "total": asdict(total) if total else None,
            "notes": self.notes,
        }


def estimate_cost(run: Run, states: Sequence[StageState], *, measure: bool) -> CostEstimate:
    """What is current costs nothing. Without `measure` only rates that the workspace keeps are used."""
    rates = MachineRates(run, measure=measure)
    costs: dict[str, Cost | None] = {}
    notes: dict[str, str] = {}
    begun = 0.0
    for state in (state for state in states if state.state != "current"):
        try:
            begun = begun or rates.of("starting", None, starting)["seconds"]
            costs[state.stage] = COSTS[state.stage](StageEstimate(run, rates, state))
        except (PendingDependencyError, NotMeasuredError, AmalgamError) as error:
            costs[state.stage], notes[state.stage] = None, _why(error)
    if not measure and any(note == _why(NotMeasuredError()) for note in notes.values()):
        notes = {"time, memory and disk": _why(NotMeasuredError())}
    return CostEstimate(costs, notes, begun)


def _why(error: Exception) -> str:
    if isinstance(error, NotMeasuredError):
        return "`amalgam plan --estimate` tries this machine, once"
    if isinstance(error, PendingDependencyError):
        return f"after {error.stage}"
    return error.what if isinstance(error, AmalgamError) else str(error)


def _shown(cost: Cost | None) -> list[str]:
    if cost is None:
        return ["?", "?", "?"]
    return [duration(cost.seconds), _size(cost.memory_mb), _size(cost.disk_mb)]


def _size(megabytes: float) -> str:
    return f"{megabytes / 1000:,.1f} GB" if megabytes >= 1000 else f"{megabytes:,.0f} MB"
