"""Results in the store as Polars frames, large ones lazy: only files that a current manifest names, each checked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from amalgam.data.keys import shown
from amalgam.data.lazy import np, pl
from amalgam.data.parquet import predictions as prediction_columns
from amalgam.data.rows import has_surrogate
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import DataError, ExperimentError
from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.storage.store import StoredFile
from amalgam.stages.app.student import Student
from amalgam.stages.common.cached.coverage import family_in
from amalgam.stages.common.cached.load import families_of
from amalgam.stages.common.cached.read import scan
from amalgam.stages.common.intervals import interval
from amalgam.stages.common.load import part_of, teachers_of
from amalgam.stages.report.json_types import SystemScores
from amalgam.stages.report.stage import evaluation_of
from amalgam.stages.report.tables import SCORES, system_name
from amalgam.stages.report.verdict_types import SystemEstimate

ESTIMATED: dict[str, Literal["mean", "low", "high"]] = {
    "accuracy": "mean",
    "accuracy_low": "low",
    "accuracy_high": "high",
}


def texts(run: Run, *parts: str) -> pl.LazyFrame:
    files = list[StoredFile]()
    for name in parts:
        part = part_of(run, name)
        if part is None:
            fix = f"name one of its parts: {', '.join(_parts(run))}"
            raise ExperimentError(f"the corpus has no part {name!r}", where="texts", fix=fix)
        files += [bucket.file for bucket in part.buckets]
    return pl.scan_parquet(run.store.verified_paths(files), glob=False)


def _parts(run: Run) -> list[str]:
    return list(run.result("read-corpus").facts["parts"])


def _of_experiment(run: Run, rows: pl.LazyFrame) -> pl.LazyFrame:
    """Returns the rows of the experiment's texts, each once: a file of the cache may have texts of others too."""
    keys = texts(run, *_parts(run)).select("key")
    return rows.join(keys, on="key", how="semi", maintain_order="left").unique("key", maintain_order=True)


def logits(run: Run, teacher: str) -> pl.LazyFrame:
    files, labels = _files(run, teacher)
    schema = {"key": pl.Binary, "tokens": pl.Int32, "cut": pl.Boolean, "logits": pl.Array(pl.Float32, labels)}
    return _of_experiment(run, scan(list(files), schema).filter(pl.col("logits").is_not_null()))


def passes(run: Run, teacher: str) -> pl.LazyFrame:
    """Returns a row per text and range of passes: `cache.adaptive` runs more passes on some texts."""
    files, labels = _files(run, teacher)
    ranges = sorted({span for span in files.values() if span[1] > span[0]})
    if not ranges:
        raise ExperimentError("the teachers ran no passes", where="cache.passes", fix="set cache.passes to 16")
    statistics = ("entropy_nats", "confidence", "confidence_se")
    frames = []
    for first, last in ranges:
        schema = {
            "key": pl.Binary,
            "passes": pl.Array(pl.Float16, (last - first) * labels),
            "mean_probability": pl.Array(pl.Float32, labels),
            **dict.fromkeys(statistics, pl.Float32),
        }
        rows = scan([path for path in files if files[path] == (first, last)], schema)
        each = pl.col("passes").reshape((-1, last - first, labels)).cast(pl.List(pl.Array(pl.Float16, labels)))
        span = pl.lit(first).alias("first"), pl.lit(last).alias("last")
        frames.append(_of_experiment(run, rows).select("key", *span, each, "mean_probability", *statistics))
    return pl.concat(frames)


def targets(run: Run) -> pl.LazyFrame:
    return pl.scan_parquet(run.store.verified_paths(run.result("build-targets").files), glob=False)


def evaluation(run: Run) -> pl.DataFrame:
    scores = evaluation_of(run)
    rows = [{"system": name, **scores_row(system, scores["groups"])} for name, system in scores["systems"].items()]
    return pl.DataFrame(rows, infer_schema_length=None)


def evaluation_by_label(run: Run) -> pl.DataFrame:
    scores, rows = evaluation_of(run), []
    for name, system in scores["systems"].items():
        confusion = np.array(system["confusion"])
        gold, predicted, right = confusion.sum(axis=1), confusion.sum(axis=0), confusion.diagonal()
        for label, *counts in zip(scores["labels"], gold.tolist(), predicted.tolist(), right.tolist(), strict=True):
            rows.append([name, label, *counts, system["label_f1"][label]])
    types = {"system": pl.String, "label": pl.String, "n": pl.Int64, "predicted": pl.Int64, "right": pl.Int64}
    return pl.DataFrame(rows, {**types, "f1": pl.Float64}, orient="row")


def scores_row(scores: SystemScores, groups: Iterable[str]) -> dict[str, int | float | None]:
    """Returns n, the measures of a system with the interval of its accuracy, and the accuracy on each group."""
    measures: dict[str, float | None] = {key: scores[key] for key in SCORES}
    if scores.get("nll_infinite"):
        measures["nll_nats"] = math.inf
    low, high = interval(scores["accuracy"], scores["n"])
    on_groups = {f"on_{group}": scores["slice_accuracy"][group] for group in groups}
    return {"n": scores["n"], **measures, "accuracy_low": low, "accuracy_high": high, **on_groups}


def estimates(systems: Sequence[SystemEstimate]) -> pl.DataFrame:
    """Returns the estimated accuracies, as `evaluation` has the measured ones; null for a system without texts."""
    rows = [
        {"system": system_name(system), "n": system["n"]}
        | {name: system[end] if system["n"] else None for name, end in ESTIMATED.items()}
        for system in systems
    ]
    types = {"system": pl.String, "n": pl.Int64} | dict.fromkeys(ESTIMATED, pl.Float64)
    return pl.DataFrame(rows, schema=types)


def predictions(student: Student, inputs: Sequence[str | tuple[str, str]]) -> pl.DataFrame:
    texts = checked_texts(inputs, student.finished.learned)
    if texts:
        fix, fix_pairs = 'pass pairs of texts: [("a text", "its second text")]', 'pass single texts: ["a text"]'
        student.finished.check_pairs(len(texts[0]), "predict", fix, fix_pairs)
    predicted = student(texts)
    columns = prediction_columns(student.top, list(predicted.masses), unknown=predicted.unknown is not None)
    names = [column.name for column in columns]
    values = dict(zip(names[names.index("label") :], predicted.columns, strict=True))
    inputs_by_name = dict(zip(("text", "text_2"), zip(*texts, strict=True), strict=False)) or {"text": ()}
    rows = pl.DataFrame({**inputs_by_name, **values})
    return rows.with_columns(pl.selectors.by_dtype(pl.Null).cast(pl.String))  # without texts


def _files(run: Run, name: str) -> tuple[dict[Path, tuple[int, int]], int]:
    """Returns the teacher's files with their range of passes, and the number of its outputs."""
    teachers = {teacher.name: teacher for teacher in teachers_of(run)}
    if name not in teachers:
        raise ExperimentError(f"no teacher {name!r}", where="teachers", fix=f"name one of {', '.join(teachers)}")
    manifest, family = run.result("cache-teachers"), families_of(run)[name]
    ranges = manifest.facts["ranges"]
    files = [file for file in manifest.files if file.path in ranges and family_in(file.path) == family]
    spans = [(int(first), int(last)) for first, last in (ranges[file.path] for file in files)]
    return dict(zip(run.store.verified_paths(files), spans, strict=True)), len(teachers[name].outputs)


def checked_texts(texts: Any, learned: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Returns the fields of each text; refuses anything but non-empty texts, or pairs of them.

    `learned`: the text columns that the student learned.
    """
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        fix = 'pass a list: experiment.predict(["a text"])'
        raise DataError(f"predict takes a list of texts, got {type(texts).__name__}", where="predict", fix=fix)
    if isinstance(texts, Mapping) or hasattr(texts, "columns"):
        first, *second = [f"frame[{json.dumps(name, ensure_ascii=False)}]" for name in learned or ("text",)]
        fix = f"pass one column: experiment.predict({first})"
        if second:
            fix = f"pass pairs of texts: experiment.predict(list(zip({first}, {second[0]})))"
        raise DataError(f"predict takes a list of texts, got {type(texts).__name__}", where="predict", fix=fix)
    rows = [tuple(text) if isinstance(text, tuple | list) else (text,) for text in texts]
    for number, row in enumerate(rows):
        fault = next(filter(None, map(_fault, row)), None)
        if fault is None and (len(row) not in (1, 2) or len(row) != len(rows[0])):
            fault = f"the entry has {counted(len(row), 'text')}, the first has {len(rows[0])}"
        if fault:
            fix = "pass non-empty texts, or pairs (text, text_2), but not both"
            raise DataError(fault, where=f"predict, texts[{number}]", fix=fix)
    return rows


def _fault(text: Any) -> str | None:
    if not isinstance(text, str):
        return f"{shown(repr(text))} is no text"
    if not text.strip():
        return "the text is empty"
    return "the text has a lone surrogate" if has_surrogate(text) else None
