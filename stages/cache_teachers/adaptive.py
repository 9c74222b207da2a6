"""Adaptive passes (`cache.adaptive`): a text runs dropout passes until its most confident teacher is settled.

A sample runs all K. On it, a regression for each teacher and step learns the uncertainty of K passes. Its input is the
prediction without dropout and the first passes. A text stops where its two most confident teachers differ by more than
the errors. If two halves of the K passes agree more often on the sample than fewer passes with K, all texts run K.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NotRequired, TypeAlias, TypedDict

from amalgam.data import parquet
from amalgam.data.arrays import Array, entropy_nats, softmax
from amalgam.data.lazy import np, pa
from amalgam.pipeline.execution.stage import Unit
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.store import Record, Store
from amalgam.stages.common.cached.coverage import BucketRequest, CachedUnit, CachedUnits
from amalgam.stages.common.cached.load import ADAPTIVE_VERSION
from amalgam.stages.common.corpus import Bucket

STEPS = (0, 2, 8)
"""Numbers of passes after which a text may stop."""

SETTLED_BY = 0.5
"""Errors of the predicted logarithms of the uncertainty, between the two most confident teachers."""

USUAL_PASSES = 2
"""Passes of a text outside the sample, for estimates of the cost: 2.9 on TREC-6 and 0.4 on Banking77."""

LEAST = 1e-6
"""Least uncertainty whose logarithm is taken."""

RIDGE, FOLDS = 1.0, 10


class RegressionFacts(TypedDict):
    """The facts of the regressions: of the sampled texts, those with the same teacher by fewer passes and by K."""

    sampled: int
    same: int
    """By cross-validation."""
    halves_same: int
    """By the first and the second half of the passes."""
    differ: NotRequired[bool]
    """Whether the passes of a teacher differ; records of older versions lack it."""


class StopFacts(TypedDict):
    """The facts of a decision for a bucket; only the last one has the prefix and the passes."""

    rows: int
    settled: int
    prefix: NotRequired[str]
    passes: NotRequired[int]
    """The sum over all texts."""


@dataclass(frozen=True)
class StopDecision:
    """The payload of a unit that decides after `step` passes which texts of a bucket stop; None: the last decision."""

    bucket: Bucket
    step: int | None
    sampled: int
    """Number of the bucket's first texts that are in the sample."""
    regressions: Unit


@dataclass(frozen=True)
class CachedPasses:
    """Reads the raw passes of cached units, by family."""

    store: Store
    families: Mapping[str, CachedUnits]
    keys_of: Callable[[CachedUnit], Any]

    def read(self, family: str, prefix: str, keys: Any, passes: range) -> Array:
        """Returns the logits [texts, passes, labels], gathered by key from all units of the family that have them."""
        logits: Array | None = None
        units = [unit for unit in self.families[family].overlapping([prefix]) if _shared(unit, passes)]
        for unit, rows, flat in self._gathered(units, keys, "passes"):
            shared, raw = _shared(unit, passes), flat.reshape(len(rows), unit.last - unit.first, -1)
            if logits is None:
                logits = np.zeros((len(keys), len(passes), raw.shape[2]), raw.dtype)
            read = raw[:, shared.start - unit.first : shared.stop - unit.first]
            logits[rows, shared.start - passes.start : shared.stop - passes.start] = read
        return np.zeros((len(keys), len(passes), 2), np.float16) if logits is None else logits

    def logits(self, family: str, prefix: str, keys: Any) -> Array:
        """Returns the logits with dropout off [texts, labels]."""
        logits: Array | None = None
        units = [unit for unit in self.families[family].overlapping([prefix]) if unit.logits]
        for _, rows, raw in self._gathered(units, keys, "logits"):
            logits = np.zeros((len(keys), raw.shape[1]), raw.dtype) if logits is None else logits
            logits[rows] = raw
        return np.zeros((len(keys), 2), np.float32) if logits is None else logits

    def _gathered(
        self, units: Iterable[CachedUnit], keys: Any, column: str
    ) -> Iterator[tuple[CachedUnit, Array, Array]]:
        """Yields each unit that has some of the keys, with their rows and their values of the column."""
        for unit in units:
            unit_keys = self.keys_of(unit)
            places = np.minimum(np.searchsorted(unit_keys, keys), len(unit_keys) - 1)
            rows = np.flatnonzero(unit_keys[places] == keys)
            if len(rows):
                values = parquet.matrix(parquet.read_table(self.store.verified_path(unit.file), [column]).column(0))
                yield unit, rows, values[places[rows]]


def _shared(unit: CachedUnit, passes: range) -> range:
    """Returns the passes that the unit has of these."""
    return range(max(passes.start, unit.first), min(passes.stop, unit.last))


def stopping_rounds(
    store: Store,
    passes: int,
    sample: Sequence[tuple[BucketRequest, int]],
    families: Sequence[str],
    request: Callable[[BucketRequest, Any], Iterable[Unit]],
) -> Iterator[tuple[list[Unit], list[Unit]]]:
    """Yields the units of each round, and all units up to it; a round reads the results of the earlier ones.

    `sample` has every bucket with the number of its first texts that are sampled. `request` lists the units of all
    teachers for a bucket and the number of passes of each of its texts.
    """
    regressions = _regressions_unit(store, passes, [(bucket, rows) for bucket, rows in sample if rows], families)
    wanted = {bucket.prefix: passes * (np.arange(bucket.texts) < sampled) for bucket, sampled in sample}

    def prediction_units() -> list[Unit]:
        return [unit for bucket, _ in sample for unit in request(bucket, wanted[bucket.prefix])]

    def decisions(step: int | None) -> list[Unit]:
        return [_stop_unit(StopDecision(each.bucket, step, sampled, regressions)) for each, sampled in sample]

    units, decided = prediction_units(), [regressions]
    yield units, units
    yield decided, [*units, *decided]
    steps = [step for step in STEPS if step < passes]
    steps = steps if is_better(_record(store, regressions).facts) else steps[:1]
    for step, more in pairwise((*steps, passes)):
        new = decisions(step)
        decided += new
        yield new, [*units, *decided]
        for (bucket, _), unit in zip(sample, new, strict=True):
            wanted[bucket.prefix][_passes_in(store, unit) < 0] = more
        units = prediction_units()
        yield units, [*units, *decided]
    new = decisions(None)
    yield new, [*units, *decided, *new]


def _regressions_unit(
    store: Store, passes: int, sample: Sequence[tuple[BucketRequest, int]], families: Sequence[str]
) -> Unit:
    name = fingerprint({"adaptive": ADAPTIVE_VERSION, "families": list(families), "passes": passes})
    keys = [key.hex() for bucket, rows in sample for key in parquet.key_list(bucket.keys[:rows])]
    sampled = tuple((request.bucket, rows) for request, rows in sample)
    return Unit(f"all-{fingerprint(keys)[:10]}-regressions", store.folder("cache-teachers", name) / "units", 0, sampled)


def _stop_unit(stop: StopDecision) -> Unit:
    """Returns the unit of a decision, named by the digest of the bucket's file: an appended text changes its rows."""
    regressions, bucket = stop.regressions, stop.bucket
    kind = "last" if stop.step is None else f"after{stop.step}"
    sample_digest = regressions.name.split("-")[1]
    return Unit(f"{bucket.prefix}-{bucket.file.sha256[:10]}-{sample_digest}-{kind}", regressions.folder, 0, stop)


def _record(store: Store, unit: Unit) -> Record:
    record = store.record(unit.record_path)
    if record is None:
        raise AssertionError(unit.name)  # its round is done
    return record


def _passes_in(store: Store, decision: Unit) -> Array:
    path = store.verified_path(_record(store, decision).files[0])
    return parquet.read_table(path, ["passes"]).column(0).to_numpy()


def is_better(facts: Any) -> bool:
    """Returns whether fewer passes choose the teacher of all passes at least as often as two halves agree."""
    return bool(facts["same"] >= facts["halves_same"])


# ---- the regressions


@dataclass(frozen=True)
class PassPredictions:
    """The cached predictions of one teacher for some texts."""

    logits: Array
    """Without dropout [texts, labels]."""
    passes: Array
    """The first passes [texts, passes, labels]."""

    @classmethod
    def joined(cls, parts: Sequence[PassPredictions]) -> PassPredictions:
        logits, passes = zip(*((part.logits, part.passes) for part in parts), strict=True)
        return cls(np.concatenate(logits), np.concatenate(passes))

    def of(self, rows: Array) -> PassPredictions:
        return PassPredictions(self.logits[rows], self.passes[rows])

    def inputs(self, step: int) -> Array:
        """Returns the inputs of the regression [texts, 8]: 1, five numbers of `logits`, and two of `step` passes."""
        exact = self.logits.astype(np.float64)
        ordered = np.sort(exact, axis=1)
        without, energy = log_uncertainty(softmax(exact)), np.logaddexp.reduce(exact, axis=1) - exact.mean(axis=1)
        first = self.after(step) if step else np.zeros(len(exact))
        columns = [without, without**2, ordered[:, -1], ordered[:, -1] - ordered[:, -2], energy, first, first**2]
        return np.stack([np.ones(len(exact)), *columns], axis=1)

    def after(self, count: int) -> Array:
        """Returns the logarithm of the uncertainty by the first passes."""
        return log_uncertainty(_mean_probability(self.passes[:, :count]))

    @cached_property
    def halves(self) -> tuple[Array, Array]:
        half = self.passes.shape[1] // 2
        return self.after(half), log_uncertainty(_mean_probability(self.passes[:, half : 2 * half]))


@dataclass(frozen=True)
class Regression:
    """Predicts the logarithm of the uncertainty by all passes."""

    weights: Array
    deviation: float
    """The deviation of a prediction, with each text left out of the fit."""


def _mean_probability(passes: Array) -> Array:
    return softmax(passes.astype(np.float64)).mean(axis=1)


def log_uncertainty(probability: Array) -> Array:
    """Returns log(1 - confidence), where the confidence is that of `targets.uncertainty: entropy`."""
    share = entropy_nats(probability) / math.log(probability.shape[-1])
    return np.log(np.maximum(share, LEAST))


def fit(inputs: Array, targets: Array) -> Regression:
    """Fits a ridge regression; inputs are scaled to their deviation, and the first one is constant."""
    mean, scale = inputs.mean(axis=0), inputs.std(axis=0) + 1e-9
    mean[0], scale[0] = 0.0, 1.0
    design = (inputs - mean) / scale
    inverse = np.linalg.inv(design.T @ design + RIDGE * np.diag([0.0] + [1.0] * (inputs.shape[1] - 1)))
    scaled = inverse @ design.T @ targets
    leverage = np.einsum("ij,jk,ik->i", design, inverse, design).clip(max=0.9)
    errors = (targets - design @ scaled) / (1 - leverage)
    weights = scaled / scale
    weights[0] -= (scaled * mean / scale).sum()
    return Regression(weights, float(np.sqrt(np.mean(errors**2))))


Regressions: TypeAlias = Mapping[int, Sequence[Regression]]
"""By step the regressions of all teachers."""


def fit_all(predictions: Sequence[PassPredictions], passes: int, rows: Array) -> Regressions:
    """Fits the regressions of all steps and teachers on these rows, which have all passes."""
    targets = [teacher.after(passes)[rows] for teacher in predictions]
    return {
        step: [fit(teacher.inputs(step)[rows], log) for teacher, log in zip(predictions, targets, strict=True)]
        for step in STEPS
        if step < passes
    }


def stop(
    regressions: Regressions, rows: Array, predictions_of: Callable[[int, Array], Sequence[PassPredictions]]
) -> tuple[Array, Array]:
    """Returns the step at which each row stops, -1 where none is enough, and the predicted logs of the uncertainty."""
    taken = np.full(len(rows), -1)
    log = np.zeros((len(rows), len(next(iter(regressions.values()), ()))))
    for step, of_teachers in regressions.items():
        open_rows = np.flatnonzero(taken < 0)
        if not len(open_rows):
            break
        pairs = zip(predictions_of(step, rows[open_rows]), of_teachers, strict=True)
        log[open_rows] = np.stack([teacher.inputs(step) @ regression.weights for teacher, regression in pairs], axis=1)
        settled = are_settled(log[open_rows], np.array([each.deviation for each in of_teachers]))
        taken[open_rows[settled]] = step
    return taken, log


def are_settled(log_uncertainty: Array, deviations: Array) -> Array:
    """Returns whether the two most confident teachers of each row [rows, teachers] are apart."""
    if len(deviations) == 1:
        return np.ones(len(log_uncertainty), bool)
    first, second = np.argsort(log_uncertainty, axis=1, kind="stable")[:, :2].T
    rows = np.arange(len(log_uncertainty))
    gap = log_uncertainty[rows, second] - log_uncertainty[rows, first]
    return gap > SETTLED_BY * np.hypot(deviations[first], deviations[second])


def audit_regressions(predictions: Sequence[PassPredictions], passes: int) -> RegressionFacts:
    """Counts sampled texts with the same teacher by fewer passes and by all, by cross-validation, and by two halves."""
    exact = np.stack([teacher.after(passes) for teacher in predictions]).argmin(axis=0)
    rows, chosen = np.arange(len(exact)), exact.copy()
    for fold in np.array_split(rows, min(FOLDS, len(rows))):
        regressions = fit_all(predictions, passes, np.delete(rows, fold))
        taken, log = stop(regressions, fold, lambda _step, rows: [teacher.of(rows) for teacher in predictions])
        chosen[fold[taken >= 0]] = log[taken >= 0].argmin(axis=1)
    first, second = (np.stack([teacher.halves[part] for teacher in predictions]).argmin(axis=0) for part in (0, 1))
    same, halves_same = int((chosen == exact).sum()), int((first == second).sum())
    differ = any(bool(np.ptp(teacher.passes, axis=1).any()) for teacher in predictions)
    return {"sampled": len(rows), "same": same, "halves_same": halves_same, "differ": differ}


# ---- units


@dataclass(frozen=True)
class AdaptivePasses:
    """Runs the units that decide; teachers of one model count once."""

    cached: CachedPasses
    families: Sequence[str]
    passes: int

    def run(self, unit: Unit) -> None:
        if isinstance(unit.payload, StopDecision):
            self._decide(unit)
        else:
            self._fit(unit)

    def _predictions(self, bucket: Bucket, keys: Any, count: int) -> list[PassPredictions]:
        cached, prefix = self.cached, bucket.prefix
        return [
            PassPredictions(cached.logits(family, prefix, keys), cached.read(family, prefix, keys, range(count)))
            for family in self.families
        ]

    def _fit(self, unit: Unit) -> None:
        """Commits the regressions; the payload has the buckets with sampled texts, and the number of each."""
        parts = list[list[PassPredictions]]()
        for bucket, rows in unit.payload:
            keys = parquet.read_keys(self.cached.store.verified_path(bucket.file))[:rows]
            parts.append(self._predictions(bucket, keys, self.passes))
        predictions = [PassPredictions.joined(of_teacher) for of_teacher in zip(*parts, strict=True)]
        regressions = fit_all(predictions, self.passes, np.arange(len(predictions[0].logits)))
        rows = [
            {"family": family, "step": step, "weights": each.weights.tolist(), "deviation": each.deviation}
            for step, of_families in regressions.items()
            for family, each in zip(self.families, of_families, strict=True)
        ]
        with self.cached.store.draft(unit.folder, unit.name, ".parquet") as draft:
            parquet.write_table(
                pa.Table.from_pylist(rows, parquet.arrow_schema(parquet.STOP_REGRESSIONS)),
                draft.folder / "unit.parquet",
            )
            draft.facts = {**audit_regressions(predictions, self.passes)}

    def _regressions(self, stop: StopDecision) -> Regressions:
        """Returns the regressions of the steps up to this decision; none where the audit is against them."""
        record = _record(self.cached.store, stop.regressions)
        regressions: dict[int, list[Regression]] = {}
        table = parquet.read_table(self.cached.store.verified_path(record.files[0]))
        for row in table.to_pylist() if is_better(record.facts) else ():
            if stop.step is None or row["step"] <= stop.step:
                regressions.setdefault(row["step"], []).append(Regression(np.array(row["weights"]), row["deviation"]))
        return regressions

    def _decide(self, unit: Unit) -> None:
        """Commits a decision: the passes of each text, -1 where it needs more, and at the end the confidences."""
        decision: StopDecision = unit.payload
        store, bucket = self.cached.store, decision.bucket
        keys = parquet.read_keys(store.verified_path(bucket.file))
        others = np.arange(decision.sampled, len(keys))
        taken = np.full(len(keys), self.passes)
        taken[others], log = stop(
            self._regressions(decision), others, lambda step, rows: self._predictions(bucket, keys[rows], step)
        )
        facts: StopFacts = {"rows": len(keys), "settled": int(((taken >= 0) & (taken < self.passes)).sum())}
        columns: dict[str, Any] = {"key": parquet.key_list(keys)}
        if decision.step is None:
            taken[taken < 0] = self.passes
            columns["confidence"] = self._confidences(bucket, keys, taken, log)
            facts |= {"prefix": bucket.prefix, "passes": int(taken.sum())}
        columns["passes"] = taken.astype(np.int32)
        schema = parquet.STOPS if decision.step is not None else parquet.STOP_CONFIDENCES
        with store.draft(unit.folder, unit.name, ".parquet") as draft:
            parquet.write_table(parquet.build_table(schema, columns), draft.folder / "unit.parquet")
            draft.facts = facts

    def _confidences(self, bucket: Bucket, keys: Any, taken: Array, predicted: Array) -> Array:
        """Returns the confidences [texts, families]: predicted where a text stopped, by all passes elsewhere."""
        log = np.zeros((len(keys), len(self.families)))
        log[len(keys) - len(predicted) :, : predicted.shape[1]] = predicted
        rows = np.flatnonzero(taken == self.passes)
        for column, teacher in enumerate(self._predictions(bucket, keys[rows], self.passes) if len(rows) else ()):
            log[rows, column] = teacher.after(self.passes)
        return (1 - np.exp(log)).clip(0, 1).astype(np.float32)
