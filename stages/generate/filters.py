"""Measures generated texts without a teacher (length, repetition, duplicates) and writes them as tables.

read-corpus applies the filters to these measures, so a changed filter generates no new text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from amalgam.data.parquet import read_table
from amalgam.data.schemas import GENERATED, WRITTEN, arrow_schema
from amalgam.pipeline.errors import DamagedError
from amalgam.pipeline.execution.stage import Unit
from amalgam.pipeline.storage.store import Store
from amalgam.stages.generate.decoding import GeneratedText
from amalgam.stages.generate.lazy_sampling import uniform
from amalgam.stages.generate.requests import Family, GenerateInputs, TextPlan
from amalgam.stages.generate.sources import text_key64

NGRAM = 3
"""Words per n-gram."""

DRAW = 1 << 33
"""A position beyond the end of any text and beyond the draws of its settings."""

NGrams = frozenset[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Quality:
    words: int
    repetition: float
    near_duplicate: float


def ngrams(words: list[str]) -> list[tuple[str, ...]]:
    """Returns all n-grams; a shorter text is one n-gram."""
    return [tuple(words[start : start + NGRAM]) for start in range(max(1, len(words) - NGRAM + 1))]


def qualities(texts: Iterable[str]) -> list[Quality]:
    """Measures texts in the given order; each is compared with earlier texts only, so later texts change nothing."""
    earlier = _EarlierTexts()
    measured = []
    for text in texts:
        words = text.lower().split()
        sequences = ngrams(words)
        distinct = frozenset(sequences)
        similarity = earlier.add(distinct) if words else 0.0
        measured.append(Quality(len(words), 1 - len(distinct) / len(sequences), similarity))
    return measured


class _EarlierTexts:
    """Finds the most similar earlier text exactly, through shared n-grams; copies are stored once."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._texts_with: dict[tuple[str, ...], list[int]] = {}
        self._distinct: set[NGrams] = set()

    def add(self, grams: NGrams) -> float:
        """Returns the largest Jaccard similarity to an earlier text and stores this one."""
        if grams in self._distinct:
            return 1.0
        shared = Counter(text for gram in grams for text in self._texts_with.get(gram, ()))
        nearest = max((n / (len(grams) + self._sizes[text] - n) for text, n in shared.items()), default=0.0)
        self._distinct.add(grams)
        for gram in grams:
            self._texts_with.setdefault(gram, []).append(len(self._sizes))
        self._sizes.append(len(grams))
        return nearest


def block_table(first: int, texts: Sequence[GeneratedText]) -> pa.Table:
    """Returns one block of texts as a table."""
    columns = {
        "text": [text.text for text in texts],
        "index": list(range(first, first + len(texts))),
        "class_probability": [text.probability for text in texts],
        "lm_log_probability": [text.log_lm for text in texts],
        "tokens": [text.tokens for text in texts],
    }
    return pa.table(columns, schema=arrow_schema(WRITTEN))


def collected_table(plan: TextPlan, store: Store) -> pa.Table:
    """Returns all texts, sorted by index and then by teacher and class."""
    inputs = plan.inputs
    labels = {teacher.name: teacher.labels for teacher in inputs.teachers}
    numbers = {family.name: number for number, family in enumerate(plan.families)}
    rows: list[tuple[int, int, dict[str, Any]]] = []
    for family, table in _blocks(plan.units(store), store):
        facts = _family_columns(inputs, family, labels)
        for row in table.to_pylist():
            if row["index"] < family.count:
                key = text_key64(inputs.settings.seed, family, row["index"])
                draw = uniform(key, DRAW, np.zeros(1, np.int64))[0]
                rows.append((row["index"], numbers[family.name], {**row, **facts, "draw": float(draw)}))
    rows.sort(key=lambda row: row[:2])
    measured = qualities(str(row["text"]) for _, _, row in rows)
    records = [{**row, **asdict(quality)} for (_, _, row), quality in zip(rows, measured, strict=True)]
    return pa.Table.from_pylist(records, schema=arrow_schema(GENERATED))


def _family_columns(inputs: GenerateInputs, family: Family, labels: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    return {
        "source": inputs.settings.source,
        "teacher": family.teacher,
        "class": None if family.teacher is None or family.label is None else labels[family.teacher][family.label],
        "seed": inputs.settings.seed,
    }


def _blocks(units: Sequence[Unit], store: Store) -> list[tuple[Family, pa.Table]]:
    records = store.records([unit.record_path for unit in units], complete=False)
    for unit in units:
        if unit.record_path not in records:
            raise DamagedError(f"the record of generate {unit.name} is missing", path=str(unit.record_path))
    paths = store.verified_paths(records[unit.record_path].files[0] for unit in units)
    return [(unit.payload.family, read_table(path)) for unit, path in zip(units, paths, strict=True)]
