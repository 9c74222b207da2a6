"""What the report finds: of every system on the test part, and of what was taught on the training texts."""

from __future__ import annotations

from typing import Any

from amalgam.pipeline.stage import Run
from amalgam.stages.read_corpus.parts import Part, part_of, tables
from amalgam.stages.report.evaluation import answered, evaluation_of
from amalgam.stages.report.judged import looked_at
from amalgam.stages.report.scripts import scripts_of
from amalgam.stages.report.seen import taught_part
from amalgam.stages.report.teaching import taught

Found = dict[str, Any]
LOOKED_AT = 5_000
"""Texts of a part, the first in key order, whose writing systems are told."""


def find(run: Run) -> tuple[Found | None, Found]:
    """The evaluation, where there are labelled test texts, and the rest."""
    test = part_of(run, "test")
    found = answered(run, test) if test else None
    evaluation = evaluation_of(run, test, found) if test and found else None
    judged = looked_at(run, test, found) if test and found else None
    train = taught_part(run)
    return evaluation, {
        "judged": judged,
        "taught": taught(run),
        "scripts": {part.name: _scripts(run, part) for part in (train, test) if part},
    }


def _scripts(run: Run, part: Part) -> Found:
    texts: list[str] = []
    for table in tables(run, part):
        texts += table.column("text").to_pylist()[: LOOKED_AT - len(texts)]
        if len(texts) >= LOOKED_AT:
            break
    return {"n": len(texts), "scripts": scripts_of(texts)}
