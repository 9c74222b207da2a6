"""Compares fewer predictions with K dropout passes, by the choice of the most confident teacher.

python benchmarks/passes.py --experiment FOLDER/amalgam.yaml [--passes 16] [--settled-by 0.2 0.3 0.5] [--json]

The teachers run 2 K passes for every text; cached ones are reused. Each row chooses a teacher for each text in one way.
same is the share of texts with the choice of the first K passes. `other passes` chooses by the second K.
difference is same minus that of `other passes`, with a 95 % interval from a bootstrap over texts.
passes counts forward passes for each text and teacher, the one without dropout included.
`adaptive` is that of `cache.adaptive: true`: its sample runs K passes, others stop early, and all of that counts.
Its passes are the first of the K that it is compared with, which favours it over other passes.
Its figures are means over draws of the sample. `--settled-by` sets the multiple of the errors at which a text stops.
`last layer` chooses by K passes of `cache.dropout: last-layer`, which count as none.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from amalgam.benchmarks.protocol import row, show
from amalgam.data.arrays import entropy_nats, softmax
from amalgam.stages.cache_teachers import adaptive
from amalgam.stages.common.cached.load import adaptive_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Array = np.ndarray[Any, np.dtype[Any]]

BOOTSTRAPS = 1000


@dataclass(frozen=True)
class Predictions:
    """The predictions of all teachers for the same texts."""

    logits: Sequence[Array]
    """By teacher: [texts, labels] with dropout off."""
    passes: Sequence[Array]
    """By teacher: [texts, 2 K, labels]."""
    has_gold: Array | None = None
    """Whether each teacher has each text's gold label [texts, teachers]."""

    @property
    def count(self) -> int:
        """Returns K."""
        return int(self.passes[0].shape[1]) // 2

    @property
    def texts(self) -> int:
        return len(self.logits[0])

    @cached_property
    def without_dropout(self) -> Array:
        return np.stack([uncertainty(softmax(logits.astype(np.float64))) for logits in self.logits], axis=1)

    def by_passes(self, part: slice) -> Array:
        """Returns the uncertainty of the mean over some passes [texts, teachers]."""
        means = [softmax(passes[:, part].astype(np.float64)).mean(axis=1) for passes in self.passes]
        return np.stack([uncertainty(mean) for mean in means], axis=1)

    @cached_property
    def first(self) -> Array:
        return self.by_passes(slice(self.count))

    @cached_property
    def second(self) -> Array:
        return self.by_passes(slice(self.count, 2 * self.count))


def uncertainty(probability: Array) -> Array:
    """Returns 1 - confidence by entropy, in [0, 1]."""
    return entropy_nats(probability) / np.log(probability.shape[-1])


def adaptive_choice(predictions: Predictions, sampled: Array) -> tuple[Array, float]:
    """Returns each text's teacher by adaptive passes, and the passes of a text."""
    count, texts = predictions.count, predictions.texts
    answers = [
        adaptive.PassPredictions(logits, passes[:, :count])
        for logits, passes in zip(predictions.logits, predictions.passes, strict=True)
    ]
    others = np.setdiff1d(np.arange(texts), sampled)
    fitted = adaptive.fit_all(answers, count, sampled)
    taken, log = adaptive.stop(fitted, others, lambda _step, rows: [one.of(rows) for one in answers])
    chosen, stopped = predictions.first.argmin(axis=1), taken >= 0
    chosen[others[stopped]] = log[stopped].argmin(axis=1)
    run = np.full(texts, count)
    run[others[stopped]] = taken[stopped]
    return chosen, 1 + float(run.mean())


# ---- rows


def rows(
    name: str, predictions: Predictions, gaps: Sequence[float], draws: int, last_layer: Predictions | None = None
) -> Iterator[dict[str, Any]]:
    """Yields a row for each way to choose teachers; `last_layer` has passes of the last layer alone."""
    count, texts = predictions.count, predictions.texts
    chosen, other = predictions.first.argmin(axis=1), predictions.second.argmin(axis=1)
    random = np.random.default_rng(0)
    resampled = random.integers(0, texts, (BOOTSTRAPS, texts))

    def measured(label: str, choices: Sequence[Array], passes: float) -> dict[str, Any]:
        same = np.mean([choice == chosen for choice in choices], axis=0)
        gain = same - (other == chosen)
        low, high = np.quantile(gain[resampled].mean(axis=1), [0.025, 0.975])
        figures: dict[str, Any] = {"n": texts, "passes": round(passes, 2), "same": round(float(same.mean()), 3)}
        figures |= {
            "difference": round(float(gain.mean()), 3),
            "low": round(float(low), 3),
            "high": round(float(high), 3),
        }
        if predictions.has_gold is not None:
            right = np.mean([predictions.has_gold[np.arange(texts), choice].mean() for choice in choices])
            figures["right"] = round(float(right), 3)
        return row("passes", label, data=name, **figures)

    yield measured("other passes", [other], 1 + count)
    yield measured("no passes", [predictions.without_dropout.argmin(axis=1)], 1)
    if last_layer is not None:
        yield measured("last layer", [last_layer.first.argmin(axis=1)], 1)
    quarter = slice(count, count + max(1, count // 4))
    yield measured("a quarter", [predictions.by_passes(quarter).argmin(axis=1)], 1 + max(1, count // 4))
    size = adaptive_size(texts, count)
    samples = [random.permutation(texts)[:size] for _ in range(draws if size else 0)]
    for gap in gaps if samples else ():
        adaptive.SETTLED_BY = gap
        choices, passes = zip(*(adaptive_choice(predictions, sample) for sample in samples), strict=True)
        yield measured(f"adaptive, {gap:g} errors", choices, float(np.mean(passes)))


def collected(experiment: Path, passes: int, limit: int | None, *, last_layer: bool = False) -> Predictions:
    """Runs cache-teachers with 2 K passes, and returns its predictions in the order of the training texts."""
    from amalgam.pipeline.console import Console
    from amalgam.pipeline.execution.runner import update
    from amalgam.stages.app import frames
    from amalgam.stages.app.runs import open_run, working
    from amalgam.stages.common.load import label_space
    from amalgam.stages.registry import STAGES

    overrides = [f"cache.passes={2 * passes}", *([f"corpus.limit={limit}"] if limit else [])]
    overrides += ["cache.dropout=last-layer"] if last_layer else []
    run = open_run(experiment, overrides, console=Console(out=sys.stderr))
    with working(run):
        update(STAGES, run, target="cache-teachers", keep_overrides=False)
    texts, space = frames.texts(run, "train").collect(), label_space(run)
    logits, raw = list[Array](), list[Array]()
    for teacher in space.columns:
        cached = frames.logits(run, teacher).collect()
        logits.append(texts.join(cached, on="key", how="left", maintain_order="left")["logits"].to_numpy())
        by_range = frames.passes(run, teacher).collect().partition_by("first", maintain_order=True)
        parts = [texts.join(part, on="key", how="left", maintain_order="left")["passes"] for part in by_range]
        raw.append(np.concatenate([np.stack([np.stack(one) for one in part.to_list()]) for part in parts], axis=1))
    has_gold = None
    if not texts["label"].null_count():
        owned = [[space.names[place] for place in own] for own in space.columns.values()]
        has_gold = np.stack([np.isin(texts["label"].to_numpy(), own) for own in owned], axis=1)
    return Predictions(logits, raw, has_gold)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", type=Path, nargs="+", required=True)
    parser.add_argument("--passes", type=int, default=16, help="K")
    parser.add_argument("--limit", type=int, help="most texts")
    parser.add_argument(
        "--settled-by", type=float, nargs="+", default=[adaptive.SETTLED_BY], help="errors at which a text stops"
    )
    parser.add_argument("--draws", type=int, default=20, help="draws of the sample")
    parser.add_argument("--last-layer", action="store_true", help="also K passes of the last layer alone")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for experiment in options.experiment:
        predictions = collected(experiment, options.passes, options.limit)
        name = experiment.absolute().parent.name
        last_layer = (
            collected(experiment, options.passes, options.limit, last_layer=True) if options.last_layer else None
        )
        show(list(rows(name, predictions, options.settled_by, options.draws, last_layer)), as_json=options.json)


if __name__ == "__main__":
    main()
