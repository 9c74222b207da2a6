"""Reads what trainings need from a run: services, and buckets with their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.corpus import Part, read_bucket
from amalgam.stages.common.teachers import NewClassifier
from amalgam.stages.common.training.settings import TrainingServices

if TYPE_CHECKING:
    import pyarrow as pa

    from amalgam.data.tokens import TokenRows


def training_services(run: Run) -> TrainingServices:
    execution = run.experiment.execution
    cpu = execution.device == "cpu"
    return TrainingServices(run.console, run.signals, run.store.root, execution.trackers, cpu)


def tokenized_buckets(
    run: Run, part: Part, new: NewClassifier, columns: Sequence[str]
) -> Iterator[tuple[pa.Table, TokenRows]]:
    """Yields the columns and the tokens of each bucket."""
    from amalgam.stages.common.token_cache import tokens_of

    for bucket in part.buckets:
        tokens = tokens_of(
            run.store, run.console, bucket, new.tokenizer, digest=new.tokenizer_digest, limit=new.limit, types=new.types
        )
        yield read_bucket(run.store, bucket, columns), tokens
