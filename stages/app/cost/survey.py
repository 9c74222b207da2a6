"""How many texts and labels a part of the corpus has, and a sample of its texts.

Once the part is read this is known; until then it is counted in its files, which takes a moment and is kept as a rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from amalgam.data.rows import BadRow, Row, read_rows
from amalgam.pipeline.execution.stage import PendingDependencyError, Run
from amalgam.stages.app.cost.rates import Figures, MachineRates
from amalgam.stages.common.corpus import Part, fields, part_of, read_bucket
from amalgam.stages.common.sources import corpus_for, local_files, part_identity, sources_of

Texts = list[tuple[str, ...]]

SAMPLE = 512

FIRST_ROWS = 4096

COUNTED_BYTES = 64 << 20
"""A larger file is counted by its first so many bytes."""

LABEL = "label "


@dataclass(frozen=True)
class Survey:
    texts: float
    labels: dict[str, float]
    """How often each occurs; among the first rows, where the part is not read yet."""

    def share_of(self, labels: list[str]) -> float:
        total = sum(self.labels.values())
        return sum(self.labels.get(label, 0) for label in labels) / total if total else 1.0


def survey(run: Run, part: str, rates: MachineRates) -> Survey:
    """Raises NotKnownYetError where a remote file must be fetched first."""
    if part not in sources_of(run.experiment):
        return Survey(0, {})
    read = _read(run, part)
    if read is not None:
        return Survey(read.texts, {str(label): int(count) for label, count in read.facts["labels"].items()})
    found = rates.of(f"counting {part}", part_identity(run, part), lambda: _counted(run, part))
    texts, limit = found["texts"], corpus_for(run.experiment, part).limit
    labels = {name.removeprefix(LABEL): count for name, count in found.items() if name.startswith(LABEL)}
    return Survey(min(texts, limit or texts), labels)


def sample(run: Run, part: str) -> Texts:
    """Buckets are by hash, so any are a fair sample; of files, a comb through the first rows."""
    read = _read(run, part)
    if read is None:
        texts = [row.fields for rows, _ in _first_rows(run, part) for row in _good(rows)]
        return texts[:: max(1, len(texts) // SAMPLE)][:SAMPLE]
    texts = []
    for bucket in read.buckets:
        texts += fields(read_bucket(run, bucket))
        if len(texts) >= SAMPLE:
            break
    return texts[:SAMPLE]


def _read(run: Run, part: str) -> Part | None:
    try:
        return part_of(run, part)
    except PendingDependencyError:
        return None


def _counted(run: Run, part: str) -> Figures:
    found: Figures = {"texts": 0}
    for rows, path in _first_rows(run, part):
        found["texts"] += len(rows) if len(rows) < FIRST_ROWS else _rows_in(path, rows[-1].number)
        for row in _good(rows):
            if row.label is not None:
                found[LABEL + row.label] = found.get(LABEL + row.label, 0) + 1
    return found


def _first_rows(run: Run, part: str) -> Iterator[tuple[list[Row | BadRow], Path]]:

    corpus = corpus_for(run.experiment, part)
    for path in (path for source in sources_of(run.experiment)[part] for path in local_files(run, source)):
        yield list(islice(read_rows(path, corpus=corpus), FIRST_ROWS)), path


def _good(rows: list[Row | BadRow]) -> Iterator[Row]:

    return (row for row in rows if isinstance(row, Row))


def _rows_in(path: Path, lines_of_first: int) -> int:
    """Parquet says it itself; of other files lines are counted, of which a csv row may have several."""
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet as pq

        return int(pq.read_metadata(path).num_rows)
    size, lines, seen = path.stat().st_size, 0, 0
    with path.open("rb") as file:
        while seen < min(size, COUNTED_BYTES):
            block = file.read(1 << 20)
            lines, seen = lines + block.count(b"\n"), seen + len(block)
    return round(lines * size / seen * FIRST_ROWS / lines_of_first)
