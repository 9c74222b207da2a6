"""Predictions as a file: Parquet or csv, written aside and put in its place whole, or csv on stdout."""

from __future__ import annotations

import csv
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

from amalgam.data.keys import shown, text_key
from amalgam.data.parquet import parquet_options
from amalgam.data.rows import Row
from amalgam.data.schemas import Column, arrow_schema, predictions
from amalgam.pipeline.errors import ExperimentError

KINDS = (".parquet", ".csv")

DIGITS = 6
"""Of a probability in a csv."""


class Writer(Protocol):
    rows: int

    def write(
        self, rows: Sequence[Row], labels: Sequence[Sequence[str]], probabilities: Any, masses: Mapping[str, Any]
    ) -> None: ...


@contextmanager
def opened(out: Path | None, top: int, teachers: Sequence[str]) -> Iterator[Writer]:
    """The file takes its place when all is written; where something fails, what stood there stays."""
    columns = predictions(top, teachers)
    if out is None:
        yield _Csv(sys.stdout, columns)
        return
    aside = out.with_name(f".tmp-{os.getpid()}-{uuid.uuid4().hex[:12]}{out.suffix}")
    try:
        if out.suffix.lower() == ".csv":
            with aside.open("w", encoding="utf-8", newline="") as file:
                yield _Csv(file, columns)
        else:
            with _Parquet(aside, columns) as writer:
                yield writer
        aside.replace(out)
    finally:
        aside.unlink(missing_ok=True)


def check_place(out: Path | None, *, force: bool) -> None:
    """Refuses, before anything runs, what would not be written in the end."""
    if out is None:
        return
    if out.suffix.lower() not in KINDS:
        what = f"{shown(out.name)} is of no kind that can be written"
        raise ExperimentError(what, where=f"--out {out}", fix=f"end it in {' or '.join(KINDS)}")
    if not out.absolute().parent.is_dir():
        raise ExperimentError("there is no such folder", where=f"--out {out}", fix=f"mkdir -p {out.parent}")
    if out.exists() and not force:
        raise ExperimentError(f"{shown(out.name)} exists", where=f"--out {out}", fix="name another, or --force")


class _Csv:
    def __init__(self, file: TextIO, columns: Sequence[Column]) -> None:
        self.rows = 0
        self._writer = csv.writer(file, lineterminator="\n")
        self._writer.writerow([column.name for column in columns])

    def write(
        self, rows: Sequence[Row], labels: Sequence[Sequence[str]], probabilities: Any, masses: Mapping[str, Any]
    ) -> None:
        self.rows += len(rows)
        shares = zip(*(mass.tolist() for mass in masses.values()), strict=True) if masses else ((),) * len(rows)
        for row, names, values, share in zip(rows, labels, probabilities.tolist(), shares, strict=True):
            named = [cell for name, value in zip(names, values, strict=True) for cell in (name, round(value, DIGITS))]
            own = [row.number, text_key(row.fields).hex(), "" if row.id is None else row.id]
            self._writer.writerow([*own, *named, *(round(value, DIGITS) for value in share)])


class _Parquet:
    def __init__(self, path: Path, columns: Sequence[Column]) -> None:
        import pyarrow.parquet as pq

        self.rows = 0
        self._schema = arrow_schema(columns)
        self._writer: Any = pq.ParquetWriter(path, self._schema, **parquet_options(self._schema))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def write(
        self, rows: Sequence[Row], labels: Sequence[Sequence[str]], probabilities: Any, masses: Mapping[str, Any]
    ) -> None:
        import pyarrow as pa

        self.rows += len(rows)
        own = [[row.number for row in rows], [text_key(row.fields) for row in rows], [row.id for row in rows]]
        named = [
            values
            for place in range(probabilities.shape[1])
            for values in ([names[place] for names in labels], probabilities[:, place])
        ]
        values = [*own, *named, *masses.values()]
        arrays = [pa.array(column, field.type) for column, field in zip(values, self._schema, strict=True)]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
