"""Measures how well `predict --unknown` separates texts of other data sets from those of the student.

python benchmarks/unknown.py --student FOLDER --known PATH/test.parquet --others A.parquet B.parquet [--limit 500]
    [--train TEXTS.parquet ...] [--json]

Two rows for each file of --others: by the states in unknown.safetensors, and by the logits. lost is the share of
known texts whose label is right and that are flagged. --train fits the states to these training texts, for a student
without the file.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from amalgam.benchmarks.protocol import row, show
from amalgam.data.arrays import unknown_score
from amalgam.data.tokens import encode
from amalgam.stages.app.student import finished_in
from amalgam.stages.common.inference.batches import Classifier, predict_with_states
from amalgam.stages.common.models.unknown import UnknownStates
from amalgam.stages.common.training.batches import Examples
from amalgam.stages.report.quality import unknown_quality
from amalgam.stages.train_student.training import fit_unknown_states

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amalgam.data.arrays import Array

LEAST = 15
"""Least number of characters of an unknown text."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--student", type=Path, required=True)
    parser.add_argument("--known", type=Path, required=True, help="texts of the student's data set, with column label")
    parser.add_argument("--others", type=Path, nargs="+", required=True, help="texts of other data sets")
    parser.add_argument("--train", type=Path, nargs="+", help="training texts, for a student without the file")
    parser.add_argument("--limit", type=int, default=500, help="texts of each other data set, at random")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    student = finished_in(options.student).load()
    fit = student.unknown_states if options.train is None else _fitted(student, options.train)
    table = pl.read_parquet(options.known)
    logits, scores = _scores(student, fit, table["text"].to_list())
    right = np.array(student.labels)[logits.argmax(axis=1)] == table["label"].to_numpy()
    thresholds = {"states": fit.threshold if fit else np.nan, "logits": student.model.config.unknown_threshold}
    rows = []
    for path in options.others:
        others = pl.read_parquet(path).filter(pl.col("text").str.len_chars() >= LEAST)
        sample = others.sample(min(options.limit, len(others)), seed=1)["text"].to_list()
        _, unknown = _scores(student, fit, sample)
        for source, own in scores.items():
            quality = unknown_quality(own, unknown[source], thresholds[source])
            figures: dict[str, Any] = {name: quality[name] for name in ("auroc", "low", "high")}
            figures |= {"known": len(own), "unknown": len(sample), "accuracy": float(right.mean())}
            figures |= {
                "known_flagged": quality["labelled_flagged"] / len(own),
                "lost": float((right & (own > thresholds[source])).mean()),
                "unknown_flagged": quality["unknown_flagged"] / len(sample),
            }
            rows.append(row("unknown", f"{path.parent.name}/{path.stem}: {source}", **figures))
    show(rows, as_json=options.json)


def _fitted(student: Classifier, paths: Sequence[Path]) -> UnknownStates | None:
    texts = pl.concat([pl.read_parquet(path, columns=["text"]) for path in paths])["text"].to_list()
    tokens = encode(student.tokenizer, [(text,) for text in texts], student.limit, types=student.types)
    no_targets = np.zeros((len(tokens), 0), np.float32), np.zeros(len(tokens), np.float32)
    return fit_unknown_states(student.model, Examples(tokens.ids, tokens.type_ids, *no_targets), pad_id=student.pad_id)


def _scores(student: Classifier, fit: UnknownStates | None, texts: Sequence[str]) -> tuple[Array, dict[str, Array]]:
    """Returns the logits, and the scores by their source."""
    tokens = encode(student.tokenizer, [(text,) for text in texts], student.limit, types=student.types)
    layer = fit.layer if fit else 0
    logits, states = predict_with_states(
        student.model, tokens.ids, pad_id=student.pad_id, layer=layer, type_ids=tokens.type_ids
    )
    scores = {"states": fit.scores(states.astype(np.float64))} if fit else {}
    return logits, {**scores, "logits": unknown_score(logits.astype(np.float64))}


if __name__ == "__main__":
    main()
