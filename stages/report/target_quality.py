"""What the student was taught, seen on the training texts: teachers right and wrong, margins, weights, disputed texts.

Keys are hashes, so the first texts in key order are a random sample: a look at them costs the same however many texts
there are. What stage 2 counted over all texts is taken from its summary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from amalgam.data.arrays import softmax
from amalgam.data.parquet import matrix
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.build_targets.read import read_targets
from amalgam.stages.common.corpus import Bucket, Part, read_bucket
from amalgam.stages.common.load import label_space, teachers_of
from amalgam.stages.report.student_quality import texts_of
from amalgam.stages.report.teacher_audit.audit import looked_over
from amalgam.stages.report.teacher_audit.counts import Block
from amalgam.stages.report.training_texts import seen_targets, taught_part
from amalgam.stages.target_methods import target_method

Array = np.ndarray[Any, np.dtype[Any]]


SAMPLE, LEAST_SAMPLE = 20_000, 2_000

WORK = 4e9
"""Numbers that the audit may look at: it weighs the teachers anew with each one, and each two of them, left out."""

BINS = 20

DISPUTED = 12

ROUNDING = 1e-3


def taught(run: Run) -> dict[str, Any] | None:
    part = taught_part(run)
    if part is None:
        return None
    space = label_space(run)
    some = sample_of(part, len(space.columns), len(space.names))
    n = sum(bucket.rows for bucket in some)
    found: dict[str, Any] = {"texts": part.texts, "sample": n, "targets": _targets(run, some, n)}
    if teachers_of(run):
        seen = replace(
            run, experiment=run.experiment.model_copy(update={"targets": seen_targets(run.experiment.targets)})
        )
        stand = _Stand(seen)
        found["audit"] = looked_over(seen, some, stand.add)
        found |= stand.summary(run, part)
    return found


def sample_of(part: Part, teachers: int, labels: int) -> list[Bucket]:
    """Whole buckets, from the first in key order; fewer of them where there are very many teachers."""
    wanted = min(SAMPLE, max(LEAST_SAMPLE, WORK / max(teachers**3 * labels, 1)))
    some: list[Bucket] = []
    for bucket in part.buckets:
        if sum(one.rows for one in some) >= wanted:
            break
        some.append(bucket)
    return some


class _Stand:
    """What is kept of the sample's blocks: teachers' confidences, and who has the gold label."""

    def __init__(self, run: Run) -> None:
        self._run, self._space = run, label_space(run)
        self._columns = [np.array(columns) for columns in self._space.columns.values()]
        self._blocks: list[tuple[Array, ...]] = []

    def add(self, block: Block) -> None:
        says = [own[one.argmax(axis=1)] for own, one in zip(self._columns, block.distributions, strict=True)]
        owns = [np.isin(block.gold_N, own) for own in self._columns]
        weights = self._weights(block)
        parts = (np.stack(says, axis=1), np.stack(owns, axis=1), block.confidence_NT, weights, block.gold_N)
        self._blocks.append(parts)

    def _weights(self, block: Block) -> Array:
        """The teachers' shares of each text's target."""
        targets = self._run.experiment.targets
        method = target_method(targets)
        scores = block.confidence_NT if block.weights_NT is None else block.weights_NT
        if method.winner_takes_all:
            alone: Array = np.eye(len(self._columns))[scores.argmax(axis=1)]
            return alone
        given = block.weights_NT is not None or method.confidence_is_weight
        return scores if given else softmax(scores / targets.temperature)

    def summary(self, run: Run, part: Part) -> dict[str, Any]:
        says, owns, confidence, weights, gold = (np.concatenate(side) for side in zip(*self._blocks, strict=True))
        names = list(self._space.columns)
        labelled = owns.any(axis=1)
        by = "weights" if "weigh-teachers" in run.results else "confidence"
        chosen = (weights if by == "weights" else confidence).argmax(axis=1)
        right = owns[np.arange(len(chosen)), chosen] & labelled
        top = weights.max(axis=1)
        said_right = (says == gold[:, None]).any(axis=1) & labelled
        return {
            "labelled": int(labelled.sum()),
            "uncertainty": _uncertainty(confidence[labelled], owns[labelled]),
            "choice": {
                "by": by,
                "n": int(labelled.sum()),
                "right": int(right.sum()),
                "chance": float(owns[labelled].mean()) if labelled.any() else None,
                "oracle": int(said_right.sum()),
            },
            "mixture": {
                "mean": dict(zip(names, weights.mean(axis=0).tolist(), strict=True)),
                "largest": histogram(top, (0.0, 1.0)),
            },
            "disputed": self._disputed(run, part, says, confidence, gold),
        }

    def _disputed(self, run: Run, part: Part, says: Array, confidence: Array, gold: Array) -> list[dict[str, Any]]:
        """Where two teachers are surest of different labels: the pair whose less sure one is surest."""
        if confidence.shape[1] < 2:
            return []
        strength = np.full(len(says), -np.inf)
        pair = np.zeros((len(says), 2), np.int64)
        for one in range(confidence.shape[1]):
            for other in range(one + 1, confidence.shape[1]):
                less = np.where(says[:, one] == says[:, other], -np.inf, confidence[:, [one, other]].min(axis=1))
                more = less > strength
                strength[more], pair[more] = less[more], (one, other)
        order = np.argsort(-strength, kind="stable")[:DISPUTED]
        most = [place for place in order.tolist() if np.isfinite(strength[place])]
        keys = _keys(run, part, max(most, default=-1) + 1)
        texts = texts_of(run, part, {keys[place] for place in most})
        names, labels = list(self._space.columns), self._space.names
        return [
            {
                "text": texts[keys[place]],
                "gold": labels[int(gold[place])] if gold[place] >= 0 else None,
                "sides": [
                    {
                        "teacher": names[teacher],
                        "says": labels[int(says[place, teacher])],
                        "confidence": float(confidence[place, teacher]),
                    }
                    for teacher in pair[place].tolist()
                ],
            }
            for place in most
        ]


def _keys(run: Run, part: Part, count: int) -> list[bytes]:
    found: list[bytes] = []
    for bucket in part.buckets:
        if len(found) >= count:
            break
        found += read_bucket(run, bucket, ["key"]).column("key").to_pylist()
    return found


def _uncertainty(confidence: Array, owns: Array) -> dict[str, Any] | None:
    """Uncertainty is 1 - confidence; teachers that know the gold label beside those that do not."""
    if not owns.any():
        return None
    values = 1 - confidence
    limits = _limits(values)
    return {
        "right": histogram(values[owns], limits),
        "wrong": histogram(values[~owns], limits),
        "told_apart": auc(values, owns),
    }


def _limits(values: Array) -> tuple[float, float]:
    """0 to 1, but for measures that know other bounds."""
    low, high = float(values.min()), float(values.max())
    return min(low, 0.0) if low < -ROUNDING else 0.0, max(high, 1.0) if high > 1 + ROUNDING else 1.0


def auc(values: Array, owns: Array) -> float | None:
    """How often, of a right and a wrong teacher of the same text, the right one is less uncertain; ties count half."""
    wins = pairs = 0.0
    for teacher in range(values.shape[1]):
        mine = owns[:, teacher]
        for other in range(values.shape[1]):
            both = mine & ~owns[:, other]
            ours, theirs = values[both, teacher], values[both, other]
            wins += float((ours < theirs).sum() + 0.5 * (ours == theirs).sum())
            pairs += len(ours)
    return wins / pairs if pairs else None


def histogram(values: Array, limits: tuple[float, float]) -> dict[str, Any]:
    """Of all values: one that rounding has put past an end counts at that end."""
    counts, _ = np.histogram(values.clip(*limits), bins=BINS, range=limits)
    mean = float(values.mean()) if len(values) else None
    return {"n": len(values), "low": limits[0], "high": limits[1], "counts": counts.tolist(), "mean": mean}


def _targets(run: Run, some: list[Bucket], n: int) -> dict[str, Any]:
    """Margins where there are some, and how often the target's first label is the gold one."""
    facts, space = run.result("build-targets").facts, label_space(run)
    place = {name: index for index, name in enumerate(space.names)}
    found: list[tuple[Array, Array, Array, Array]] = []
    over_labels = facts["objective"] == "kl"
    for bucket, table in zip(some, read_targets(run), strict=False):
        labels = read_bucket(run, bucket, ["label"]).column("label").to_pylist()
        gold = np.array([place.get(label, -1) for label in labels], np.int64)
        first = matrix(table.column("target")).argmax(axis=1) if over_labels else np.full(len(gold), -1)
        margin = table.column("margin").to_numpy(zero_copy_only=False).astype(np.float64)
        owner = _owners(space, table.column("teacher").to_pylist(), gold)
        found.append((gold, first, margin, owner))
    gold, first, margin, owner = (np.concatenate(side) for side in zip(*found, strict=True))
    known = gold >= 0
    has_margin = bool(n) and bool(np.isfinite(margin).all())
    return {
        "labelled": int(known.sum()),
        "right": int((first == gold)[known].sum()) if over_labels and known.any() else None,
        "margin": _margins(margin, owner, known) if has_margin and len(space.columns) > 1 else None,
        "summary": facts["summary"],
    }


def _owners(space: Any, chosen: list[str | None], gold: Array) -> Array:
    """Whether the chosen teacher has the gold label."""
    columns = {name: set(own) for name, own in space.columns.items()}
    rows = zip(chosen, gold.tolist(), strict=True)
    return np.array([teacher is not None and label in columns[teacher] for teacher, label in rows], dtype=bool)


def _margins(margin: Array, owner: Array, known: Array) -> dict[str, Any]:
    limits = _limits(margin)
    if not known.any():
        return {"all": histogram(margin, limits)}
    return {"right": histogram(margin[known & owner], limits), "wrong": histogram(margin[known & ~owner], limits)}
