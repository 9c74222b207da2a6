"""Adaptive passes: a text whose most confident teacher is settled after 4 or 8 passes stops there; others get K.

The number of passes of a text is a function of its first passes alone, so it does not depend on the cache. One text in
a hundred runs 2 K passes: the audit reports what stopping early changed, next to the effect of another seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from amalgam.data.arrays import Array
from amalgam.data.lazy import np, pa
from amalgam.data.parquet import key_column, matrix, read_keys, read_table, write_table
from amalgam.pipeline.execution.stage import Unit
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.cached.coverage import CachedUnit, CachedUnits
from amalgam.stages.common.cached.uncertainty import summarise_passes
from amalgam.stages.common.corpus import Bucket

PASS_STEPS = (4, 8)
"""Numbers of passes after which a text may stop."""

SETTLED_BY = 3.0
"""Standard errors between the most confident teacher and the next."""

AUDITED = 0.01
"""Share of the texts that run 2 K passes."""

VERSION = 1


class StopAudit(TypedDict):
    """Audited texts, and those for which stopping early or another seed choose another teacher than K passes do."""

    audited: int
    stopped_otherwise: int
    seeded_otherwise: int


class DecisionFacts(TypedDict):
    """The facts of a stop decision: of a step the settled texts, of the last one the passes and the audit."""

    prefix: str
    step: int
    rows: int
    settled: NotRequired[int]
    passes: NotRequired[int]
    audited: NotRequired[int]
    stopped_otherwise: NotRequired[int]
    seeded_otherwise: NotRequired[int]


@dataclass(frozen=True)
class StopDecision:
    """The payload of a unit that runs no teacher: it decides after `step` passes which texts of a bucket stop.

    The last unit of a bucket has `step` 0: it writes the passes of every text and the audit.
    """

    bucket: Bucket
    step: int
    families: tuple[str, ...]
    passes: int

    @property
    def steps(self) -> list[int]:
        """Returns the steps up to this one; all of them for the last unit."""
        return [step for step in PASS_STEPS if step < self.passes and (step <= self.step or not self.step)]


@dataclass(frozen=True)
class CachedPasses:
    """Reads the raw passes of cached units, by family."""

    store: Store
    families: Mapping[str, CachedUnits]
    keys_of: Callable[[CachedUnit], Any]

    def read(self, family: str, prefix: str, keys: Any, passes: range) -> Array:
        """Returns the logits [texts, passes, labels], gathered by key from all units of the family that have them."""
        logits: Array | None = None
        for unit in self.families[family].overlapping([prefix]):
            low, high = max(passes.start, unit.first), min(passes.stop, unit.last)
            if low >= high or not len(keys):
                continue
            rows, raw = self._gathered(unit, keys, "passes")
            if not len(rows):
                continue
            raw = raw.reshape(len(rows), unit.last - unit.first, -1)
            if logits is None:
                logits = np.zeros((len(keys), len(passes), raw.shape[2]), raw.dtype)
            logits[rows, low - passes.start : high - passes.start] = raw[:, low - unit.first : high - unit.first]
        return np.zeros((len(keys), len(passes), 2), np.float16) if logits is None else logits

    def logits(self, family: str, prefix: str, keys: Any) -> Array:
        """Returns the logits with dropout off [texts, labels]."""
        logits: Array | None = None
        for unit in self.families[family].overlapping([prefix]):
            if not unit.logits:
                continue
            rows, raw = self._gathered(unit, keys, "logits")
            if len(rows):
                logits = np.zeros((len(keys), raw.shape[1]), raw.dtype) if logits is None else logits
                logits[rows] = raw
        return np.zeros((len(keys), 2), np.float32) if logits is None else logits

    def _gathered(self, unit: CachedUnit, keys: Any, column: str) -> tuple[Array, Array]:
        """Returns the rows of `keys` that the unit has, and their values of a column."""
        unit_keys = self.keys_of(unit)
        places = np.minimum(np.searchsorted(unit_keys, keys), len(unit_keys) - 1)
        rows = np.flatnonzero(unit_keys[places] == keys)
        if not len(rows):
            return rows, np.empty((0, 0), np.float32)
        values = matrix(read_table(self.store.verified_path(unit.file), [column]).column(0))
        return rows, values[places[rows]]

    def confidence(self, decision: StopDecision, keys: Any, passes: range) -> tuple[Array, Array]:
        """Returns the confidence over these passes and its standard error, both [teachers, texts]."""
        prefix = decision.bucket.prefix
        summaries = [summarise_passes(self.read(family, prefix, keys, passes)) for family in decision.families]
        return np.stack([each.confidence for each in summaries]), np.stack([each.confidence_se for each in summaries])


def stopping_rounds(  # noqa: PLR0913  the texts, the teachers and how units are found
    store: Store,
    passes: int,
    buckets: Sequence[tuple[Bucket, Any]],
    families: Sequence[str],
    *,
    request: Callable[[Bucket, Any], Iterable[Unit]],
    pending: Callable[[Sequence[Unit]], Sequence[Unit]],
) -> list[Unit]:
    """Returns all units that can be listed now: up to the first round that is not done, or all rounds.

    `request` lists the units of all teachers for a bucket and the number of passes of each of its texts.
    """
    wanted = {bucket.prefix: np.zeros(len(keys), np.int64) for bucket, keys in buckets}
    decisions: list[Unit] = []
    for step in (*(step for step in PASS_STEPS if step < passes), passes):
        for bucket, keys in buckets:
            of_bucket = wanted[bucket.prefix]
            of_bucket[of_bucket == 0] = -step
            of_bucket[audited(keys)] = 2 * passes
        requests = [unit for bucket, _ in buckets for unit in request(bucket, np.abs(wanted[bucket.prefix]))]
        last = step == passes
        new = [_decision_unit(store, StopDecision(b, 0 if last else step, tuple(families), passes)) for b, _ in buckets]
        if pending(requests):
            return [*requests, *decisions]
        decisions += new
        if last or pending(new):
            break
        for (bucket, keys), unit in zip(buckets, new, strict=True):
            wanted[bucket.prefix] = np.where(audited(keys), 0, _read_decision(store, unit))
    return [*requests, *decisions]


def audited(keys: Any) -> Array:
    """Selects one text in a hundred, by bits of its key that neither buckets nor held-out texts use."""
    low = np.frombuffer(keys.tobytes(), "<u8").reshape(-1, 2)[:, 1]
    selected: Array = low * np.uint64(0x9E3779B97F4A7C15) < np.uint64(int(AUDITED * 2**64))
    return selected


def _decision_unit(store: Store, decision: StopDecision) -> Unit:
    name = fingerprint({"adaptive": VERSION, "families": list(decision.families), "passes": decision.passes})
    folder = store.folder("cache-teachers", name) / "units"
    kind = f"after{decision.step}" if decision.step else "audit"
    bucket = decision.bucket
    return Unit(f"{bucket.prefix}-{bucket.file.sha256[:10]}-{kind}", folder, 0, decision)


def _read_decision(store: Store, unit: Unit) -> Array:
    record = store.record(unit.record_path)
    if record is None:
        raise AssertionError(unit.name)  # its round is done
    passes: Array = read_table(store.verified_path(record.files[0]), ["passes"]).column(0).to_numpy()
    return passes


def decide(cached: CachedPasses, unit: Unit) -> None:
    """Commits one stop decision."""
    decision: StopDecision = unit.payload
    keys = read_keys(cached.store.verified_path(decision.bucket.file))
    settled = _settled(cached, decision, keys)
    facts: DecisionFacts = {"prefix": decision.bucket.prefix, "step": decision.step, "rows": len(keys)}
    if decision.step:
        facts["settled"] = int((settled > 0).sum())
    else:
        settled = np.where(settled > 0, settled, decision.passes)
        facts = {**facts, **_audit(cached, decision, keys, settled), "passes": int(settled.sum())}
    with cached.store.draft(unit.folder, unit.name, ".parquet") as draft:
        columns = {"key": key_column(keys), "passes": pa.array(settled.astype(np.int32))}
        write_table(pa.table(columns), draft.folder / "unit.parquet")
        draft.facts = facts


def _settled(cached: CachedPasses, decision: StopDecision, keys: Any) -> Array:
    """Returns for each text the step at which it was settled, or 0; audited texts are treated like the others."""
    settled = np.zeros(len(keys), np.int64)
    for step in decision.steps:
        rows = np.flatnonzero(settled == 0)
        settled[rows[_is_settled(*cached.confidence(decision, keys[rows], range(step)))]] = step
    return settled


def _is_settled(confidence_MN: Array, error_MN: Array) -> Array:  # noqa: N803 - teachers, texts
    if len(confidence_MN) == 1:
        return np.ones(confidence_MN.shape[1], bool)
    order = np.argsort(confidence_MN, axis=0)[::-1][:2]  # the two most confident teachers
    first, second = np.take_along_axis(confidence_MN, order, 0)
    settled: Array = first - second > SETTLED_BY * np.hypot(*np.take_along_axis(error_MN, order, 0))
    return settled


def _audit(cached: CachedPasses, decision: StopDecision, keys: Any, settled: Array) -> StopAudit:
    """Counts audited texts for which stopping early, or K other passes, choose another teacher than K passes do."""
    rows = np.flatnonzero(audited(keys))
    if not len(rows):
        return {"audited": 0, "stopped_otherwise": 0, "seeded_otherwise": 0}
    audit_keys, passes = keys[rows], decision.passes
    exact = cached.confidence(decision, audit_keys, range(passes))[0].argmax(0)
    reseeded = cached.confidence(decision, audit_keys, range(passes, 2 * passes))[0].argmax(0)
    early = exact.copy()
    for step in decision.steps:
        stopped = settled[rows] == step
        if stopped.any():
            early[stopped] = cached.confidence(decision, audit_keys[stopped], range(step))[0].argmax(0)
    return {
        "audited": len(rows),
        "stopped_otherwise": int((early != exact).sum()),
        "seeded_otherwise": int((reseeded != exact).sum()),
    }
