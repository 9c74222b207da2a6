"""Compares cheaper predictions with K dropout passes, by the choice of the most confident teacher.

python benchmarks/passes.py --experiment FOLDER/amalgam.yaml [--passes 16] [--closest 0 0.03 0.08] [--json]

The teachers run 2 K passes for every text; cached ones are reused. Each row chooses a teacher for each text in one way.
same is the share of texts with the choice of the first K passes. `other passes` chooses by the second K.
difference is same minus that of `other passes`, with a 95 % interval from a bootstrap over texts.
passes counts forward passes for each text and teacher, the one without dropout included.
A corrected row learns log(1 - confidence) of K passes from the prediction without dropout, teacher by teacher.
It learns on a random sample of the texts, and its figures are means over draws of the sample. The correction is left
out where the prediction without dropout agrees with K passes as often on the sample, by cross-validation.
`last layer` chooses by K passes of `cache.dropout: last-layer`, which count as none.
Its sampled texts, and a share of the texts with the smallest gap between the two best teachers, have K passes.
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

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Array = np.ndarray[Any, np.dtype[Any]]

LEAST = 1e-6
"""Least uncertainty whose logarithm is taken."""

RIDGE = 1.0
SHARE = 0.05
"""Share of the texts in a sample; at most one text in K, and at least 200 where this allows it."""

LEAST_SAMPLE = 200
FOLDS = 10
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
    shares: Array = entropy_nats(probability) / np.log(probability.shape[-1])
    return shares


def features_of(logits: Array) -> Array:
    """Returns the inputs of the correction, from one teacher's logits without dropout: [texts, features]."""
    exact = logits.astype(np.float64)
    ordered = np.sort(exact, axis=1)
    log_uncertainty = np.log(uncertainty(softmax(exact)).clip(LEAST))
    energy = np.logaddexp.reduce(exact, axis=1) - exact.mean(axis=1)
    columns = [log_uncertainty, log_uncertainty**2, ordered[:, -1], ordered[:, -1] - ordered[:, -2], energy]
    return np.stack(columns, axis=1)


def corrected(logits: Array, exact: Array, sampled: Array) -> Array:
    """Predicts log(uncertainty) of K passes for all texts, by ridge regression on the sampled ones."""
    features = features_of(logits)
    scaled = (features - features[sampled].mean(axis=0)) / (features[sampled].std(axis=0) + 1e-9)
    design = np.column_stack([np.ones(len(scaled)), scaled])
    penalty = RIDGE * np.diag([0.0] + [1.0] * features.shape[1])
    inputs, wanted = design[sampled], np.log(exact[sampled].clip(LEAST))
    predicted: Array = design @ np.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ wanted)
    return predicted


def corrected_choice(predictions: Predictions, sampled: Array, share: float) -> tuple[Array, float]:
    """Returns each text's teacher, and the passes of a text: the sample and a share of the others have K."""
    exact, texts = predictions.first, predictions.texts
    log_uncertainty = np.log(predictions.without_dropout.clip(LEAST))
    if _is_corrected_better(predictions, sampled):
        log_uncertainty = _corrected(predictions, sampled)
    best = np.sort(log_uncertainty, axis=1)
    others = np.setdiff1d(np.arange(texts), sampled)
    closest = others[np.argsort((best[:, 1] - best[:, 0])[others], kind="stable")][: round(share * texts)]
    with_passes = np.concatenate([sampled, closest])
    log_uncertainty[with_passes] = np.log(exact[with_passes].clip(LEAST))
    return log_uncertainty.argmin(axis=1), 1 + predictions.count * len(with_passes) / texts


def _corrected(predictions: Predictions, sampled: Array) -> Array:
    pairs = zip(predictions.logits, predictions.first.T, strict=True)
    return np.stack([corrected(logits, exact, sampled) for logits, exact in pairs], axis=1)


def _is_corrected_better(predictions: Predictions, sampled: Array) -> bool:
    """Returns whether the correction chooses as K passes do more often on the sample, by cross-validation."""
    chosen, plain = predictions.first.argmin(axis=1), predictions.without_dropout.argmin(axis=1)
    by_fold = np.empty(len(sampled), np.int64)
    for fold in np.array_split(np.arange(len(sampled)), FOLDS):
        others = np.delete(sampled, fold)
        by_fold[fold] = _corrected(predictions, others)[sampled[fold]].argmin(axis=1)
    return bool((by_fold == chosen[sampled]).sum() > (plain[sampled] == chosen[sampled]).sum())


def sample_size(texts: int, passes: int) -> int:
    return min(max(round(SHARE * texts), LEAST_SAMPLE), texts // passes)


# ---- rows


def rows(
    name: str, predictions: Predictions, shares: Sequence[float], draws: int, last_layer: Predictions | None = None
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
    samples = [random.permutation(texts)[: sample_size(texts, count)] for _ in range(draws)]
    for share in shares:
        choices, passes = zip(*(corrected_choice(predictions, sample, share) for sample in samples), strict=True)
        yield measured(f"corrected, closest {share:.0%}", choices, passes[0])


def collected(experiment: Path, passes: int, limit: int | None, *, last_layer: bool = False) -> Predictions:
    """Runs cache-teachers with 2 K passes, and returns its predictions in the order of the training texts."""
    from amalgam.pipeline.console import Console
    from amalgam.pipeline.execution.runner import update
    from amalgam.stages.app import frames
    from amalgam.stages.app.api import open_run, working
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
        "--closest", type=float, nargs="+", default=[0.0, 0.03, 0.08], help="shares of texts with K passes"
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
        show(list(rows(name, predictions, options.closest, options.draws, last_layer)), as_json=options.json)


if __name__ == "__main__":
    main()
