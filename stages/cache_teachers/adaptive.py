"""Adaptive passes: after 4 and 8 passes, texts whose surest teacher is settled ask no more; the rest go on to K.

What a text gets is a function of its first passes alone, so it is the same whatever the cache already holds. One text
in a hundred runs 2 K passes: the audit, which tells what stopping early changed, beside what another seed changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amalgam.data.parquet import key_column, matrix, read_keys, read_table, write_table
from amalgam.pipeline.execution.stage import Run, Unit, pending_units
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.stages.common.answers.coverage import cached_units, unit_keys
from amalgam.stages.common.corpus import Bucket

if TYPE_CHECKING:
    import numpy as np


if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]


RUNGS = (4, 8)

SETTLED_BY = 3.0
"""Standard errors between the surest teacher and the next."""

AUDITED = 0.01

VERSION = 1


@dataclass(frozen=True)
class StopDecision:
    """The work of a unit that asks no teacher: how many passes each text of a bucket needs, as far as is known after
    `rung` of them; or, at the end (`rung` 0), what the audited texts say.
    """

    bucket: Bucket
    rung: int
    families: tuple[str, ...]
    passes: int


Asks = Callable[[Bucket, Any], Iterable[Unit]]
"""(bucket, passes wanted by each of its texts) -> the units of all teachers that make or hold them."""


def stopping_rounds(run: Run, buckets: Sequence[tuple[Bucket, Any]], families: Sequence[str], asks: Asks) -> list[Unit]:
    """All units there are to know: the last round listed is not done, or nothing is left to do."""
    import numpy as np

    passes = run.experiment.cache.passes
    wanted = {bucket.prefix: np.zeros(len(keys), np.int64) for bucket, keys in buckets}
    verdicts: list[Unit] = []
    for rung in (*(rung for rung in RUNGS if rung < passes), passes):
        for bucket, keys in buckets:
            open_still = wanted[bucket.prefix]
            open_still[open_still == 0] = -rung
            open_still[audited(keys)] = 2 * passes
        asked = [unit for bucket, _ in buckets for unit in asks(bucket, np.abs(wanted[bucket.prefix]))]
        last = rung == passes
        new = [_verdict_unit(run, bucket, 0 if last else rung, families) for bucket, _ in buckets]
        if pending_units(run, asked):
            return [*asked, *verdicts]
        verdicts += new
        if last or pending_units(run, new):
            break
        for (bucket, keys), unit in zip(buckets, new, strict=True):
            found = verdict_of(run, unit)
            wanted[bucket.prefix] = np.where(audited(keys), 0, found)
    return [*asked, *verdicts]


def audited(keys: Any) -> Array:
    """One text in a hundred, by bits of its key that neither buckets nor held-out texts are chosen by."""
    import numpy as np

    low = np.frombuffer(keys.tobytes(), "<u8").reshape(-1, 2)[:, 1]
    found: Array = low * np.uint64(0x9E3779B97F4A7C15) < np.uint64(int(AUDITED * 2**64))
    return found


def _verdict_unit(run: Run, bucket: Bucket, rung: int, families: Sequence[str]) -> Unit:
    passes = run.experiment.cache.passes
    name = fingerprint({"adaptive": VERSION, "families": list(families), "passes": passes})
    folder = run.store.folder("cache-teachers", name) / "units"
    kind = f"after{rung}" if rung else "audit"
    mark = f"{bucket.prefix}-{bucket.file.sha256[:10]}-{kind}"
    return Unit(mark, folder, 0, StopDecision(bucket, rung, tuple(families), passes))


def verdict_of(run: Run, unit: Unit) -> Array:

    record = run.store.record(unit.record_path)
    if record is None:
        raise AssertionError(unit.name)  # it was just seen to be done
    found: Array = read_table(run.store.verified_path(record.files[0]), ["passes"]).column(0).to_numpy()
    return found


def decide(run: Run, unit: Unit) -> None:
    """Commit one verdict."""
    import numpy as np
    import pyarrow as pa

    verdict: StopDecision = unit.payload
    keys = read_keys(run.store.verified_path(verdict.bucket.file))
    facts: dict[str, Any] = {"prefix": verdict.bucket.prefix, "rung": verdict.rung, "rows": len(keys)}
    if verdict.rung:
        settled = _after(run, verdict, keys, verdict.rung)
        facts["settled"] = int((settled > 0).sum())
    else:
        settled = _after(run, verdict, keys, max((r for r in RUNGS if r < verdict.passes), default=0))
        settled = np.where(settled > 0, settled, verdict.passes)
        facts |= _audit(run, verdict, keys, settled) | {"passes": int(settled.sum())}
    with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
        columns = {"key": key_column(keys), "passes": pa.array(settled.astype(np.int32))}
        write_table(pa.table(columns), draft.folder / "unit.parquet")
        draft.facts = facts


def _after(run: Run, verdict: StopDecision, keys: Any, rung: int) -> Array:
    """For each text the rung at which it was settled, or 0. Audited texts are judged like the others."""
    import numpy as np

    found = np.zeros(len(keys), np.int64)
    for step in (one for one in RUNGS if one <= rung and one < verdict.passes):
        rows = np.flatnonzero(found == 0)
        confidence, error = _sureness(run, verdict, keys[rows], 0, step)
        found[rows[_settled(confidence, error)]] = step
    return found


def _settled(confidence_MN: Array, error_MN: Array) -> Array:  # noqa: N803 - teachers, texts
    import numpy as np

    if len(confidence_MN) == 1:
        return np.ones(confidence_MN.shape[1], bool)
    order = np.argsort(confidence_MN, axis=0)[::-1]
    first, second = (np.take_along_axis(confidence_MN, order[i : i + 1], 0)[0] for i in (0, 1))
    errors = [np.take_along_axis(error_MN, order[i : i + 1], 0)[0] for i in (0, 1)]
    found: Array = first - second > SETTLED_BY * np.hypot(*errors)
    return found


def _audit(run: Run, verdict: StopDecision, keys: Any, settled: Array) -> dict[str, int]:
    """Of the audited texts: how often the teacher chosen early is not the one that K passes choose, and how often K
    other passes choose another one than the first K.
    """
    import numpy as np

    rows = np.flatnonzero(audited(keys))
    if not len(rows):
        return {"audited": 0, "stopped_otherwise": 0, "seeded_otherwise": 0}
    some, passes = keys[rows], verdict.passes
    exact = _sureness(run, verdict, some, 0, passes)[0].argmax(0)
    other = _sureness(run, verdict, some, passes, 2 * passes)[0].argmax(0)
    early = exact.copy()
    for rung in RUNGS:
        here = settled[rows] == rung
        if here.any() and rung < passes:
            early[here] = _sureness(run, verdict, some[here], 0, rung)[0].argmax(0)
    return {
        "audited": len(rows),
        "stopped_otherwise": int((early != exact).sum()),
        "seeded_otherwise": int((other != exact).sum()),
    }


def _sureness(run: Run, verdict: StopDecision, keys: Any, first: int, last: int) -> tuple[Array, Array]:
    """[teachers, texts]: confidence over these passes, and its standard error."""
    import numpy as np

    from amalgam.stages.common.answers.statistics import statistics

    found = [
        statistics(raw_passes(run, family, verdict.bucket.prefix, keys, first, last)) for family in verdict.families
    ]
    return np.stack([one.confidence for one in found]), np.stack([one.confidence_se for one in found])


def raw_passes(  # noqa: PLR0913  which passes of which texts, and where they are
    run: Run, family: str, prefix: str, keys: Any, first: int, last: int
) -> Array:
    """[texts, passes first..last-1, labels], gathered by key from whatever units of the family hold them."""
    import numpy as np

    cached = run.cache.get("ladder units", {}).get(family) or cached_units(run, family)
    found: Array | None = None
    for unit in cached.overlapping(prefix):
        low, high = max(first, unit.first), min(last, unit.last)
        if low >= high or not len(keys):
            continue
        held = unit_keys(run, unit)
        places = np.minimum(np.searchsorted(held, keys), len(held) - 1)
        rows = np.flatnonzero(held[places] == keys)
        if not len(rows):
            continue
        raw = matrix(read_table(run.store.verified_path(unit.file), ["passes"]).column(0))
        raw = raw.reshape(len(held), unit.last - unit.first, -1)[places[rows]]
        if found is None:
            found = np.zeros((len(keys), last - first, raw.shape[2]), raw.dtype)
        found[rows, low - first : high - first] = raw[:, low - unit.first : high - unit.first]
    if found is None:
        return np.zeros((len(keys), last - first, 2), np.float16)
    return found


def summary(records: Iterable[Any]) -> dict[str, Any]:
    """What stopping early saved and what it changed, over all buckets."""
    audits = [record.facts for record in records if record.facts.get("rung") == 0]
    totals = {name: sum(int(one[name]) for one in audits) for name in ("rows", "passes", "audited")}
    chosen = {name: sum(int(one[name]) for one in audits) for name in ("stopped_otherwise", "seeded_otherwise")}
    shares = {name: count / totals["audited"] if totals["audited"] else None for name, count in chosen.items()}
    return {
        "texts": totals["rows"],
        "mean_passes": totals["passes"] / max(1, totals["rows"]),
        "audited": totals["audited"],
        **shares,
    }


def audit_lines(found: dict[str, Any], passes: int) -> list[str]:
    """For a person: what was saved, and what it changed beside what another seed would change."""
    lines = [f"adaptive: {found['mean_passes']:.1f} passes a text instead of {passes}"]
    if found["audited"]:
        lines.append(
            f"audit of {found['audited']:,} texts: stopping early chose another teacher for "
            f"{found['stopped_otherwise']:.2%}; {passes} passes of another seed do for {found['seeded_otherwise']:.2%}"
        )
    return lines
