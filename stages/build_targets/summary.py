"""Are the targets any good? Weights, who was chosen, and, where gold labels are there, how often rightly.

Gold labels are looked at here only to inform; no target depends on them (but the supervised ones).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
import pyarrow as pa

from amalgam.data.keys import LabelSpace
from amalgam.pipeline.config.schema import Targets
from amalgam.stages.target_methods import TargetBatch

BINS = 10


def summarise(ruling: TargetBatch, rows: pa.Table, space: LabelSpace) -> dict[str, Any]:
    """Counts and sums alone, so that buckets can be added up."""
    weight = ruling.weight
    bins = (weight.clip(0, 1) * BINS).floor().clip(0, BINS - 1).cast(pl.Int64)
    chosen = ruling.teacher.drop_nulls()
    facts: dict[str, Any] = {
        "texts": len(weight),
        "weight_sum": float(weight.sum()),
        "weight_bins": [int((bins == index).sum()) for index in range(BINS)],
        "chosen": {teacher: int((chosen == teacher).sum()) for teacher in space.columns} if len(chosen) else {},
        "selection": {},
    }
    gold = pl.Series("label", rows.column("label"), dtype=pl.String)
    if len(chosen) and gold.null_count() < len(gold):
        facts["selection"] = _selection(ruling, gold, space)
    return facts


def _selection(ruling: TargetBatch, gold: pl.Series, space: LabelSpace) -> dict[str, Any]:
    """Counts how often the chosen teacher has the gold label: over all texts, and by large and small weight."""
    owners = dict(zip(space.names, space.owners, strict=True))
    labelled = gold.is_in(list(owners))
    right = pl.Series(
        [teacher in owners.get(label, ()) for teacher, label in zip(ruling.teacher, gold, strict=True)],
        dtype=pl.Boolean,
    )
    heavy = ruling.weight >= 0.5
    groups = {"all": labelled, "heavy": labelled & heavy, "light": labelled & ~heavy}
    return {name: [int((right & group).sum()), int(group.sum())] for name, group in groups.items()}


def merge(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Adds the parts in the order of the buckets, so the sum does not depend on the workers."""
    result: dict[str, Any] = {}
    for part in parts:
        result = _added(result, part)
    return result


def _added(one: Any, other: Any) -> Any:
    if isinstance(other, dict):
        return {key: _added((one or {}).get(key), value) for key, value in other.items()} | {
            key: value for key, value in (one or {}).items() if key not in other
        }
    if isinstance(other, list):
        return [_added(a, b) for a, b in zip(one or [0] * len(other), other, strict=True)]
    return other + (one or 0)


def lines(summary: dict[str, Any], targets: Targets) -> list[str]:
    texts = max(summary["texts"], 1)
    report = [f"{summary['texts']:,} texts, mode {targets.mode}, mean weight {summary['weight_sum'] / texts:.3f}"]
    if summary["chosen"]:
        shares = (f"{teacher} {100 * count / texts:.0f}%" for teacher, count in summary["chosen"].items())
        report.append(f"most confident: {', '.join(shares)}")
        report.append(
            f"weights 0.0 .. 1.0: {' '.join(f'{100 * count / texts:.0f}%' for count in summary['weight_bins'])}"
        )
    selection = summary["selection"]
    if selection and selection["all"][1]:
        parts = (f"{name} {right / count:.3f} (n={count:,})" for name, (right, count) in selection.items() if count)
        report.append(f"right teacher chosen: {', '.join(parts)}")
    return report
