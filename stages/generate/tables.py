"""Texts as columns: a unit's own, and all of them in one file, in an order that more texts only extend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from amalgam.data.parquet import read_table
from amalgam.data.schemas import GENERATED, WRITTEN, arrow_schema
from amalgam.pipeline.errors import DamagedError
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.load import teachers_of
from amalgam.stages.generate.decoding import GeneratedText
from amalgam.stages.generate.filters import qualities
from amalgam.stages.generate.keyed_random import uniform
from amalgam.stages.generate.requests import Family, block_units, generate_config, text_families
from amalgam.stages.generate.sources import word_of

DRAW = 1 << 33
"""A place beyond any text's end, and beyond its choices."""


def written_table(first: int, texts: Sequence[GeneratedText]) -> pa.Table:
    columns = {
        "text": [text.text for text in texts],
        "index": list(range(first, first + len(texts))),
        "class_probability": [text.probability for text in texts],
        "lm_log_probability": [text.log_lm for text in texts],
        "tokens": [text.tokens for text in texts],
    }
    return pa.table(columns, schema=arrow_schema(WRITTEN))


def generated_table(run: Run) -> pa.Table:
    """By index, then in the order of teachers and classes."""
    labels = {known.name: known.labels for known in teachers_of(run)}
    seed, source = generate_config(run).seed, generate_config(run).source
    numbers = {family.name: number for number, family in enumerate(text_families(run))}
    rows: list[tuple[int, int, dict[str, Any]]] = []
    for family, table in _blocks(run):
        said = {
            "source": source,
            "teacher": family.teacher,
            "class": None if family.teacher is None or family.label is None else labels[family.teacher][family.label],
            "seed": seed,
        }
        for row in table.to_pylist():
            if row["index"] < family.count:
                draw = uniform(word_of(run, family, row["index"]), DRAW, np.zeros(1, np.int64))[0]
                rows.append((row["index"], numbers[family.name], {**row, **said, "draw": float(draw)}))
    rows.sort(key=lambda row: row[:2])
    found = [row for _, _, row in rows]
    for row, quality in zip(found, qualities(str(row["text"]) for row in found), strict=True):
        row |= {"words": quality.words, "repetition": quality.repetition, "near_duplicate": quality.near_duplicate}
    return pa.Table.from_pylist(found, schema=arrow_schema(GENERATED))


def _blocks(run: Run) -> list[tuple[Family, pa.Table]]:
    units = list(block_units(run))
    records = run.store.records([unit.record_path for unit in units], whole=False)
    for unit in units:
        if unit.record_path not in records:
            raise DamagedError(f"generate {unit.name} is gone", path=str(unit.record_path))
    paths = run.store.verified_paths(records[unit.record_path].files[0] for unit in units)
    return [(unit.payload.family, read_table(path)) for unit, path in zip(units, paths, strict=True)]
