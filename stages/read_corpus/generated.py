"""Filters generated texts for a part of the corpus, and counts the rejected texts by filter.

The student learns from one part of them. The rest is held out, to fit statistics of the teachers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.data.parquet import read_table, write_table
from amalgam.pipeline.config.schema import Generate
from amalgam.pipeline.errors import DataError
from amalgam.stages.common.corpus import HELD_OUT

if TYPE_CHECKING:
    import pyarrow as pa

FEW = 0.1
"""A class with less than this fraction of its texts kept is reported."""


def write_kept(source: Path, settings: Generate, part: str, target: Path) -> dict[str, Any]:
    """Writes the generated texts that pass all filters; returns the counts by filter and by class."""
    table = read_table(source)
    held_out = _numbers(table, "draw", 1.0) < settings.held_out
    mine = table.filter(held_out if part == HELD_OUT else ~held_out)
    passed, failed = _passed(mine, settings)
    kept = mine.filter(passed)
    if not kept.num_rows:
        raise _nothing_left(part, mine.num_rows, failed)
    write_table(kept, target)
    total, good = _by_class(mine), _by_class(kept)
    accepted = {name: [good.get(name, 0), count] for name, count in total.items()}
    return {"failed": failed, "accepted": accepted}


def gate_lines(facts: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Returns a summary of the filters, and a note for each class with hardly any texts left."""
    kept, total = (sum(counts[place] for counts in facts["accepted"].values()) for place in (0, 1))
    reasons = ", ".join(f"{name} {count:,}" for name, count in facts["failed"].items() if count)
    poor = [
        f"{name}: {counts[0]} of {counts[1]} generated texts pass the gates ({100 * counts[0] / counts[1]:.0f}%); "
        "a larger generate.steering_strength, more generate.texts or another language model may reach it"
        for name, counts in facts["accepted"].items()
        if counts[0] < FEW * counts[1]
    ]
    return f"{kept:,} of {total:,} generated texts pass the gates" + (f" (fail: {reasons})" if reasons else ""), poor


def _passed(table: pa.Table, settings: Generate) -> tuple[Any, dict[str, int]]:
    """Applies the filters; a text without a class probability passes that filter, and a text may fail several."""
    gates = {
        "min_words": _numbers(table, "words", 0) >= settings.min_words,
        "min_class_probability": _numbers(table, "class_probability", 1.0) >= settings.min_class_probability,
        "max_duplicate": _numbers(table, "near_duplicate", 0.0) <= settings.max_duplicate,
        "max_repetition": _numbers(table, "repetition", 0.0) <= settings.max_repetition,
    }
    passed = gates["min_words"].copy()
    for gate in gates.values():
        passed &= gate
    return passed, {name: int((~gate).sum()) for name, gate in gates.items()}


def _numbers(table: pa.Table, column: str, absent: float) -> Any:
    import pyarrow.compute as pc

    return pc.fill_null(table.column(column).cast("float64"), absent).to_numpy()


def _by_class(table: pa.Table) -> dict[str, int]:
    counts: dict[str, int] = {}
    for source, teacher, label in zip(*(table.column(one).to_pylist() for one in NAMES), strict=True):
        name = source if teacher is None else teacher if label is None else f"{teacher}, {label}"
        counts[name] = counts.get(name, 0) + 1
    return counts


NAMES = ("source", "teacher", "class")


def _nothing_left(part: str, total: int, failed: Mapping[str, int]) -> DataError:
    reasons = ", ".join(f"{name} {count:,}" for name, count in failed.items() if count)
    return DataError(
        f"none of {total:,} generated texts is left for the {part} part",
        where=f"the gates of generate; texts that fail: {reasons or 'none'}",
        fix="raise generate.texts or generate.steering_strength, or relax a filter (no new text is generated)",
    )
