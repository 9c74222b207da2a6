"""Writes the cached predictions of teachers that are files: each text's row is looked up, and no model runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import polars as pl
import pyarrow as pa

from amalgam.data.arrays import Array
from amalgam.data.keys import shown
from amalgam.data.parquet import key_array, key_list
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import DataError
from amalgam.pipeline.execution.faults import with_retries
from amalgam.pipeline.execution.stage import Unit
from amalgam.stages.cache_teachers.ask import CacheInputs, answer_table, commit_answers
from amalgam.stages.common.cached.coverage import AnswerFacts, UnitRequest
from amalgam.stages.common.corpus import read_bucket
from amalgam.stages.common.models.predictions import Predictions, id_keys, read_predictions
from amalgam.stages.common.models.resolve import ResolvedTeacher


def write_predictions(inputs: CacheInputs, teacher: ResolvedTeacher, units: Sequence[Unit]) -> None:
    """Writes the units of one teacher, after a check that its file has all of their texts."""
    files, note = teacher.files, inputs.loader.note_once
    if inputs.passes:
        note(f"teacher {teacher.name} is a file of predictions, so its prediction counts as every pass")
    labels = list(files.config["id2label"].values())
    with files.unchanged():
        predictions = read_predictions(files.folder, labels, inputs.corpus, f"teacher {teacher.name}: {files.folder}")
    fewest, most = predictions.answers
    if most > 1:
        count = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
        note(f"teacher {teacher.name}: {count} answers for each text of {files.folder.name}, averaged")
    for column, reason in predictions.unread.items():
        what = f"teacher {teacher.name}: the column {column} of {files.folder.name} is not read"
        note(f"{what}: {reason}")
    if predictions.by_id:
        _check_ids(inputs, teacher)
    _check_texts(inputs, teacher, predictions, units)
    for unit in units:
        inputs.check_interrupt()
        work = partial(_write_unit, inputs, predictions, unit)
        with_retries(work, f"cache-teachers {unit.name}", inputs.store, inputs.console)
        inputs.console.advance(unit.size)


def _check_ids(inputs: CacheInputs, teacher: ResolvedTeacher) -> None:
    """Refuses ids that name one text of corpus.train and another of corpus.test."""
    texts = pa.concat_tables(
        read_bucket(inputs.store, bucket, ["id", "key"]) for bucket in inputs.texts.buckets.values()
    )
    ids = pl.DataFrame(texts).unique().group_by("id").len().filter(pl.col("len") > 1)["id"].sort()
    if len(ids):
        what = f"{teacher.files.folder.name} names texts by ids, and {counted(len(ids), 'id')} of corpus.train "
        fix = f"make them unique, or name the texts by the column {', '.join(inputs.corpus.text)} instead"
        what = f"teacher {teacher.name}: {what}{'names' if len(ids) == 1 else 'name'} another text of corpus.test"
        raise DataError(what, where=f"the first: {shown(ids[0])}", fix=fix)


def _check_texts(
    inputs: CacheInputs, teacher: ResolvedTeacher, predictions: Predictions, units: Sequence[Unit]
) -> None:
    absent, first = dict[str, int](), ""
    for unit in units:
        table = _rows(inputs, unit, ["key", "id"])
        _, is_there = predictions.of(_named(predictions, table))
        if not is_there.all():
            part = unit.payload.part
            absent[part] = absent.get(part, 0) + int((~is_there).sum())
            first = first or shown(str(_rows(inputs, unit, ["text"]).column("text")[int(is_there.argmin())]))
    if absent:
        parts = " and ".join(f"{count:,} of corpus.{part}" for part, count in absent.items())
        what = f"teacher {teacher.name}: {teacher.files.folder.name} has no prediction for {parts}"
        texts = counted(sum(bucket.rows for bucket in inputs.texts.buckets.values()), "text")
        fix = "name the texts as the corpus has them, with their case and their blanks, or by id (corpus.id); "
        fix += "every text of corpus.train and corpus.test needs a row: without an answer, "
        fix += "one with a label such as unsure, which `catch_all` names"
        raise DataError(f"{what} ({texts} in all)", where=f"the first: {first}", fix=fix)


def _rows(inputs: CacheInputs, unit: Unit, columns: Sequence[str]) -> pa.Table:
    request: UnitRequest = unit.payload
    table = read_bucket(inputs.store, inputs.texts.buckets[request.part, request.prefix], columns)
    return table if request.rows is None else table.take(request.rows)


def _named(predictions: Predictions, table: pa.Table) -> Array:
    """Returns the names of the texts by which the file has them."""
    return id_keys(table.column("id").to_pylist()) if predictions.by_id else key_array(table.column("key"))


def _write_unit(inputs: CacheInputs, predictions: Predictions, unit: Unit) -> None:
    request: UnitRequest = unit.payload
    began = time.monotonic()
    table = _rows(inputs, unit, ["key", "id"])
    logits, _ = predictions.of(_named(predictions, table))
    keys = key_list(key_array(table.column("key")))
    passes = np.repeat(logits[:, None], request.last - request.first, axis=1)
    nothing = np.zeros(len(keys), np.int32)
    answers = answer_table(keys, nothing, nothing.astype(bool), logits if request.logits else None, passes)
    counts: AnswerFacts = {**request.facts(len(keys)), "cut": 0, "unreadable": 0, "tokens": 0, "device": "file"}
    commit_answers(inputs.store, inputs.console, unit, answers, counts, time.monotonic() - began)
