"""What the student learns from: texts and targets joined by key, and a part kept aside to select on."""

from __future__ import annotations

import numpy as np

from amalgam.data.parquet import key_array, matrix
from amalgam.data.tokens import join
from amalgam.pipeline.errors import WorkError
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.build_targets.stage import read_targets
from amalgam.stages.common.corpus import read_bucket
from amalgam.stages.common.encoders import NewClassifier
from amalgam.stages.common.load import train_part
from amalgam.stages.common.training.examples import TrainingData, _split, _tokens


def lessons(run: Run, new: NewClassifier, *, held_out: float) -> TrainingData:
    """The training texts with the targets that build-targets made of them."""
    tokens, keys, targets, weights = [], [], [], []
    buckets = train_part(run).buckets
    for bucket, taught in zip(buckets, read_targets(run), strict=True):
        rows = read_bucket(run.store, bucket, ["key"])
        if not rows.column("key").equals(taught.column("key")):
            raise WorkError(
                "texts and targets do not have the same keys",
                fix="`amalgam verify`, then `amalgam build-targets --force`",
            )
        tokens.append(_tokens(run, bucket, new))
        keys.append(key_array(rows.column("key")))
        targets.append(matrix(taught.column("target")))
        weights.append(taught.column("weight").to_numpy())
    scale = np.float32(run.result("build-targets").facts["weight_scale"])
    return _split(keys, join(tokens), np.concatenate(targets), np.concatenate(weights) * scale, held_out)
