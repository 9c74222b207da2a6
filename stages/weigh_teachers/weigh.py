"""Computes each teacher's weight on each text from evidence [texts, teachers], without labels.

Each kind of evidence is scaled by the ends of its range, label by label, and weighed by how clearly it separates the
teachers. Their sum is scaled by each teacher's clearest texts and those of the others. With too few texts, or where no
two kinds agree, the weights are MUKA's own. All numbers are fitted on the first block of a corpus.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from amalgam.data.arrays import Array, softmax, top_margin
from amalgam.data.lazy import np
from amalgam.pipeline.config.schema import Targets
from amalgam.pipeline.console import counted
from amalgam.stages.common.intervals import interval
from amalgam.stages.target_methods import by_label, divided_by_label
from amalgam.stages.weigh_teachers.linear_map import LinearMap, candidate_predictions, label_biases, preferred
from amalgam.stages.weigh_teachers.mixture import mixture, standardised_weights
from amalgam.stages.weigh_teachers.neighbours import REFERENCES, ROWS_AT_ONCE, Space
from amalgam.stages.weigh_teachers.signals import (
    AccuracyEstimate,
    Params,
    WeightFacts,
    correlation,
    one_label,
    standardise,
    standardised_sum,
)

FALLBACK = "each text's own confidences were used, as muka does"


AGREEING = 0.15
"""Least correlation of the two kinds that agree most, and least mean correlation of provenance with the others."""

EXCLUSIVE = 0.15
"""Least exclusion: 0 for signals that have nothing to do with each other, 1 where one is high and the others low."""

COHERENT = 0.1
"""Least correlation of the teachers' own signals with those of the neighbours."""

FEWEST = 2
"""Least number of texts for each label; with fewer, each text's own confidences choose better."""

ENDS = 5
"""Number of values whose mean is an end of a range."""

TOP = 0.03
"""Part of a label's texts whose mean is the upper end of its range, if it is more than ENDS texts."""

LEAST_PART = 0.1
"""Least length of a label's range, as a part of the range to the mean upper end of its teacher.

A label with few texts of low values would have a range of almost 0, and its texts values without bounds.
"""

CLEAREST, LEAST_CLEAREST = 0.1, 20
"""Part of the texts of a label that a teacher leads, by the largest lead, that are its clearest ones.

A label with fewer such texts than the second counts together with the other such labels.
"""

CLEAR = 0.6
"""Mean scaled evidence of a teacher on its clearest texts; on those of the others it is 0."""

RANGE_TEMPERATURE = 1 / 4
"""Temperature of the softmax over the scaled evidence."""

SHARE_FACTOR = 0.1
"""Factor of the log of a teacher's mean weight, which is subtracted from its scaled evidence."""

SHARE_ROUNDS = 30
"""Rounds after which the biases agree with the mean weights."""

MAP_FACTOR = 0.9
"""Factor of the linear maps' predictions, which are added to the scaled evidence."""

MAP_ROUNDS = 2
"""The maps learn the labels that the evidence prefers, then those that both prefer."""

LEAST_EXCLUSION = 0.05
"""Least exclusion in the weight of a kind of evidence, so that each kind has a weight."""

ACCURACY_ODDS, ODDS_FACTOR = 0.6, 2.5
"""Odds of the targets' accuracy against those of the share that the best map confirms; factor of a 95 % interval.

`benchmarks/choice.py accuracy` measures both.
"""

MOST_CONFIRMED = 0.999
"""Largest confirmed share, and 1 minus the least one: the odds are finite."""

LEAST_SHARE = 0.01
"""Least share of a teacher, whose logarithm is finite."""

TIED = 0.01
"""Difference of two sums of weights below which they count as equal."""

LEAST_RANGE = 1e-6
"""Least length of a range, deviation and lead of a kind of evidence: nothing is divided by 0."""


def by_confidence(confidence: Array, predicted: Array, targets: Targets) -> Array:
    """Returns MUKA's weights [texts, teachers], by each text's confidences alone."""
    return softmax(divided_by_label(confidence / targets.temperature, predicted))


def weigh(signal: Array, targets: Targets, shares: Array | None, params: Params) -> tuple[Array, Array | None]:
    """Returns the weights [texts, teachers].

    The mixture also has the teachers' shares of the texts; it estimates them if `shares` is None.
    """
    if targets.teacher_weights == "range":
        return softmax(signal / RANGE_TEMPERATURE), None
    if targets.teacher_weights == "standardised" or signal.shape[1] == 1:
        return standardised_weights(signal, params), None
    weights, estimated = mixture(signal, shares, params)
    params.facts["separation"] = float(estimated.separations.mean())
    return weights, estimated.shares


def largest_sums(weights: Array, predicted: Array) -> Array:
    """Returns, for each text, the largest sum of the weights of teachers that predict one label."""
    return by_label(np.add, weights, predicted).max(axis=1)


def ties(weights: Array, predicted: Array) -> Array:
    """Returns, for each text, whether teachers that predict another label have about the same sum of weights."""
    sums = by_label(np.add, weights, predicted)
    chosen = np.arange(len(sums)), sums.argmax(axis=1)
    as_large = sums > sums[chosen][:, None] - TIED
    has_ties: Array = (as_large & (predicted != predicted[chosen][:, None])).any(axis=1)
    return has_ties


def estimated_accuracy(confirmed: Sequence[float], texts: int) -> AccuracyEstimate:
    """Returns the accuracy of the targets of `method: amalgam` without labels, from the share that each map confirms.

    Targets with more errors are harder to predict from other texts. Poor states predict few right ones either, so the
    best map counts.
    """
    best = min(max(confirmed), MOST_CONFIRMED)
    odds = ACCURACY_ODDS * best / (1 - best)
    return with_interval(odds / (1 + odds), texts)


def with_interval(share: float, texts: int) -> AccuracyEstimate:
    """Adds the error of the odds on a new data set to Wilson's interval of a share of `texts`, in log odds."""
    share = min(max(share, 1 - MOST_CONFIRMED), MOST_CONFIRMED)
    odds = share / (1 - share)
    low, high = (
        math.hypot(math.log(ODDS_FACTOR), math.log(bound / (1 - bound) / odds)) for bound in interval(share, texts)
    )
    bounds = odds * math.exp(-low), odds, odds * math.exp(high)
    lowest, value, highest = (round(bound / (1 + bound), 4) for bound in bounds)
    return {"low": lowest, "value": value, "high": highest}


# ---- several kinds of evidence


@dataclass(frozen=True)
class Evidence:
    """The evidence of the texts of a block, before any estimate."""

    kinds: Mapping[str, Array]
    """Standardised evidence [texts, teachers] of each kind but provenance."""
    predicted: Array
    """Position of the label that each teacher predicts: [texts, teachers]."""
    labels: int
    """Number of labels of all teachers."""
    near: Array
    """Places of the nearest references in the states of the encoder and all teachers: [texts, neighbours]."""
    provenance: Array | None = None
    """Probability of the class that a text was generated for, at the teacher it was generated for."""
    detectors: Collection[int] = ()
    """Positions of the teachers with a single label next to their catch_all."""
    spaces: Sequence[Space] = ()
    """The inputs of linear maps to the labels: states of length 1 of the encoder, and of each teacher."""


def kinds_of(
    answers: Sequence[Array], density: Array, names: Array, tokens: Array | None, params: Params
) -> dict[str, Array]:
    """Returns the standardised evidence [texts, teachers] of each kind but provenance.

    `answers` are confidence, margin and highest logit; `names` is the similarity to the teacher's closest label name.
    `tokens` is how far the teacher's fine-tuning moved the tokens; None if it is unknown.
    """
    kinds = {
        "answers": standardised_sum(answers, params.scope("answers")),
        "states": standardise(density, params.scope("states")),
        "names": standardise(names, params.scope("names")),
    }
    return kinds if tokens is None else {**kinds, "tokens": standardise(tokens, params.scope("tokens"))}


def joint_signal(evidence: Evidence, params: Params) -> tuple[Array | None, Array | None]:
    """Returns the signal of all kinds of evidence, and the teachers' shares; None: the evidence is not used."""
    kinds, facts = dict(evidence.kinds), params.facts
    if not params.value("usable", lambda: _are_usable(evidence, facts["notes"])):
        return None, None
    agreeing = 1.0
    if evidence.provenance is not None:
        provenance = standardise(evidence.provenance, params.scope("written"))
        agreeing = params.value(
            "agreement", lambda: np.mean([agreement(provenance, own) for own in kinds.values()])
        ).item()
        if agreeing >= AGREEING:
            kinds["provenance"] = provenance
        else:
            facts["notes"].append(
                "the teachers that texts were generated for are not used as evidence: they correlate too little with "
                f"the other kinds ({agreeing:.2f})"
            )
    smooth, scaled = dict[str, Array](), dict[str, Array]()
    for kind, values in kinds.items():
        scope = params.scope(f"signal of {kind}")
        smooth[kind] = standardised_sum([values, smoothed(values, evidence.near, scope)], scope)
        scaled[kind] = by_range(smooth[kind], evidence.predicted, scope, evidence.detectors)
    weights = params.value("weights", lambda: list(weights_of_kinds(smooth, scaled, agreeing).values()))
    facts["kinds"] = dict(zip(scaled, weights.round(4).tolist(), strict=True))
    total: Array = np.sum([weight * values for weight, values in zip(weights, scaled.values(), strict=True)], axis=0)
    facts["exclusion"] = round(exclusion(total), 4)
    signal = by_leads(total, total, evidence, params.scope("total"))

    def shares() -> Array:
        of_texts = generated_shares(evidence.provenance)
        return leading_shares(signal) if of_texts is None else of_texts

    return signal, params.value("shares", shares)


def by_leads(signal: Array, leading: Array, evidence: Evidence, params: Params) -> Array:
    """Scales each teacher's signal to CLEAR on its own clearest texts and to 0 on those of the other teachers.

    A teacher's clearest texts are those of each label where it leads all others by most in `leading`. The ends of a
    range are values of a few texts, for a noisy teacher ends of its noise; these are means of more texts.
    """
    if signal.shape[1] == 1 or not len(signal):
        return signal
    lowest, highest = params.value("clearest", lambda: _clearest_ends(signal, leading, evidence))
    return CLEAR * (signal - lowest) / (highest - lowest)


def _clearest_ends(signal: Array, leading: Array, evidence: Evidence) -> Array:
    """Returns the mean signal of each teacher on the clearest texts of the others, and on its own: [2, teachers].

    A teacher with one prediction, whose values already have the mean and deviation of the others', has their mean ends.
    So has a teacher whose own clearest texts have hardly more evidence than those of others: its scale has no meaning.
    """
    teachers = signal.shape[1]
    leads = [leading[:, place] - np.delete(leading, place, axis=1).max(axis=1) for place in range(teachers)]
    pairs = zip(leads, evidence.predicted.T, strict=True)
    means = np.stack([_mean_of_clearest(signal, lead, predicted) for lead, predicted in pairs])
    highest = np.diag(means)
    lowest = (means.sum(axis=0) - highest) / (teachers - 1)
    lengths = highest - lowest
    is_flat = lengths < max(LEAST_RANGE, LEAST_PART * np.maximum(lengths, 0.0).mean())
    scaled_by_others = _scaled_by_others(one_label(evidence.predicted, evidence.detectors), is_flat)
    ends = np.stack([lowest, highest])
    if scaled_by_others.all():
        ends[1] = lowest + 1.0
    elif scaled_by_others.any():
        ends[:, scaled_by_others] = ends[:, ~scaled_by_others].mean(axis=1, keepdims=True)
    return ends


def _mean_of_clearest(signal: Array, lead: Array, predicted: Array) -> Array:
    """Returns the mean signal of all teachers on a teacher's clearest texts; each predicted label counts equally.

    The texts of one label can be much clearer than those of another. Labels with few texts that the teacher leads count
    together as one, or not at all if these are too few too. Without any label, the texts with the largest lead count.
    """
    fewest = min(LEAST_CLEAREST, max(1, len(signal) // signal.shape[1]))
    order = np.argsort(-lead, kind="stable")
    led = order[: (lead > 0).sum()]
    counts = np.bincount(predicted[led])
    labels = np.where(counts >= LEAST_CLEAREST, np.arange(len(counts)), -1)[predicted[led]]
    clearest = []
    for label in np.unique(labels):
        own, least = led[labels == label], ENDS if label >= 0 else fewest
        if len(own) >= least:
            clearest.append(own[: max(least, int(CLEAREST * len(own)))])
    means: Array = np.mean([signal[own].mean(axis=0) for own in clearest or [order[:fewest]]], axis=0)
    return means


def with_maps(signal: Array, evidence: Evidence, params: Params) -> tuple[Array, Array]:
    """Adds the biases of the teachers' shares and the linear maps, which `range` weights have.

    The maps are trained on the labels that the signal prefers, and predict each text's labels without the text itself.
    They correct errors of single texts, and biases let each label keep its part of its teacher's weight. Each round
    scales the signal again, by the clearest texts of signal and maps together. The second value is whether each map
    confirms the target [texts, maps]: it predicts its label before all others.
    """
    if signal.shape[1] == 1 or not len(signal):
        return signal, np.ones((len(signal), 1))
    if params.is_reused:
        maps = params.scope("maps")
        stored = [maps.stored(str(index)) for index in range(len(evidence.spaces))]
        pairs = zip(evidence.spaces, stored, strict=True)
        values, first = zip(*(candidate_predictions(*pair, evidence.predicted) for pair in pairs), strict=True)
        predictions = np.mean(values, axis=0)
        scaled = _scaled_again(signal, predictions, evidence, params)
        total = _mapped(scaled, predictions, maps.stored("biases"), evidence)
    else:
        total, first = _fitted_maps(signal, evidence, params)
    target = preferred(softmax(total / RANGE_TEMPERATURE), evidence.predicted)
    return total, np.stack([labels == target for labels in first], axis=1).astype(float)


def _scaled_again(signal: Array, predictions: Array, evidence: Evidence, params: Params) -> Array:
    """Returns the signal, scaled by the clearest texts of signal and maps together, with the biases of the shares."""
    scaled = by_leads(signal, signal + MAP_FACTOR * predictions, evidence, params)
    return with_shares(scaled, evidence.provenance, params)


def with_shares(signal: Array, provenance: Array | None, params: Params) -> Array:
    """Adds a bias of each teacher.

    A teacher with a large mean weight needs clearer evidence, because its scale can be wrong: the teacher then gets
    texts of others. Where evidence is clear, biases change few texts. The shares of generated texts are known, and the
    biases give the weights these means.
    """
    return signal + params.value("biases of shares", lambda: _share_biases(signal, generated_shares(provenance)))


def _share_biases(signal: Array, shares: Array | None) -> Array:
    teachers = signal.shape[1]
    biases = np.zeros(teachers)
    for _ in range(SHARE_ROUNDS):
        means = np.maximum(softmax((signal + biases) / RANGE_TEMPERATURE).mean(axis=0), LEAST_SHARE)
        if shares is None:
            biases = (biases - SHARE_FACTOR * np.log(means * teachers)) / 2
        else:
            biases += RANGE_TEMPERATURE * np.log(shares / means)
    return biases


def _fitted_maps(signal: Array, evidence: Evidence, params: Params) -> tuple[Array, tuple[Array, ...]]:
    """Returns, without the text itself, the total and each map's label; keeps the numbers of the last round."""
    maps, round_params = [LinearMap.of(space) for space in evidence.spaces], Params()
    coefficients, biases, first = list[Array](), np.empty(0), tuple[Array, ...]()
    total = with_shares(signal, evidence.provenance, round_params)
    for _ in range(MAP_ROUNDS):
        labels = preferred(softmax(total / RANGE_TEMPERATURE), evidence.predicted)
        coefficients = [linear_map.coefficients(labels, evidence.labels) for linear_map in maps]
        pairs = zip(maps, coefficients, strict=True)
        by_map = (linear_map.leave_one_out(matrix, labels, evidence.predicted) for linear_map, matrix in pairs)
        values, first = zip(*by_map, strict=True)
        predictions, round_params = np.mean(values, axis=0), Params()
        scaled = _scaled_again(signal, predictions, evidence, round_params)
        before, after = (softmax(own / RANGE_TEMPERATURE) for own in (scaled, scaled + MAP_FACTOR * predictions))
        biases = RANGE_TEMPERATURE * label_biases(before, after, evidence.predicted, evidence.labels)
        total = _mapped(scaled, predictions, biases, evidence)
    params.store(round_params.values)
    params.scope("maps").store({"biases": biases, **{str(place): matrix for place, matrix in enumerate(coefficients)}})
    return total, first


def _mapped(signal: Array, predictions: Array, biases: Array, evidence: Evidence) -> Array:
    return signal + MAP_FACTOR * predictions + biases[np.arange(signal.shape[1]), evidence.predicted]


def by_range(signal: Array, predicted: Array, params: Params, detectors: Collection[int] = ()) -> Array:
    """Scales each teacher's signal to 0 at its lowest values and 1 at the highest of texts with the predicted label.

    The ends of a range do not depend on the teacher's share of the texts, as mean and deviation do. Labels differ in
    how confident and how dense their own texts are, so each has an upper end of its own.
    """
    ends = params.value("ends", lambda: _ends(signal, predicted, one_label(predicted, detectors)))
    return _between(ends, signal, predicted)


def _between(ends: Array, signal: Array, predicted: Array) -> Array:
    lowest, highest = ends[:, 0], ends[np.arange(len(ends)), np.minimum(predicted + 1, ends.shape[1] - 1)]
    return (signal - lowest) / np.maximum(highest - lowest, LEAST_RANGE)


def _ends(signal: Array, predicted: Array, alone: Array) -> Array:
    """Returns the lower end and the upper ends [teachers, labels + 2].

    The texts at the ends of a teacher with one prediction need not be its own and those of others. So its scaled signal
    has the mean and deviation of the others' scaled signals. That of a teacher with a constant signal is this mean.
    In a few texts, the highest values of a teacher's labels can be below its lowest ones: this teacher is scaled alike.
    """
    lowest, highest = np.sort(signal, axis=0)[:ENDS].mean(axis=0)[:, None], _upper_ends(signal, predicted)
    lengths = highest[:, -1:] - lowest
    ends = np.concatenate([lowest, np.maximum(highest, lowest + LEAST_PART * lengths)], axis=1)
    alone = _scaled_by_others(alone, lengths[:, 0] < LEAST_RANGE)
    if alone.any():
        others = _between(ends, signal, predicted)[:, ~alone]
        mean, deviation = (others.mean(), others.std(axis=0).mean()) if others.size else (0.0, 1.0)
        length = np.maximum(signal.std(axis=0)[alone] / max(float(deviation), LEAST_RANGE), LEAST_RANGE)
        ends[alone, 0] = signal.mean(axis=0)[alone] - mean * length
        ends[alone, 1:] = (ends[alone, 0] + length)[:, None]
    return ends


def _scaled_by_others(alone: Array, is_flat: Array) -> Array:
    """Returns the teachers that have the scale of the others: those with one prediction or without a range.

    If these are all teachers, those with one prediction keep their own scale.
    """
    return is_flat if (alone | is_flat).all() else alone | is_flat


def _upper_ends(signal: Array, predicted: Array) -> Array:
    """Returns the upper ends [teachers, labels + 1]; a label without texts, as the last one, has the teacher's mean."""
    ends = np.empty((signal.shape[1], int(predicted.max(initial=-1)) + 2))
    for teacher, (signals, labels) in enumerate(zip(signal.T, predicted.T, strict=True)):
        highest = {}
        for label in np.unique(labels):
            values = np.sort(signals[labels == label])
            highest[label] = values[-max(ENDS, int(TOP * len(values))) :].mean()
        ends[teacher] = np.mean(list(highest.values()))
        ends[teacher, list(highest)] = list(highest.values())
    return ends


def weights_of_kinds(
    smooth: Mapping[str, Array], scaled: Mapping[str, Array], agreeing: float = 1.0
) -> dict[str, float]:
    """Returns weights that sum to 1: the mean lead of the best teacher over the second, by the root of the exclusion.

    Provenance separates by construction. Its weight is at most that of the best other kind, by the square of
    `agreeing`: its mean correlation with them.
    """
    leads = {kind: float(top_margin(values).mean()) if values.shape[1] > 1 else 1.0 for kind, values in scaled.items()}
    exclusions = {kind: max(exclusion(values), LEAST_EXCLUSION) for kind, values in smooth.items()}
    raw = {kind: max(lead, LEAST_RANGE) * math.sqrt(exclusions[kind]) for kind, lead in leads.items()}
    best = max(weight for kind, weight in raw.items() if kind != "provenance")
    if "provenance" in raw:
        raw["provenance"] = min(raw["provenance"], best) * agreeing**2
    return {kind: weight / sum(raw.values()) for kind, weight in raw.items()}


def leading_shares(signal: Array) -> Array:
    """Returns the share of texts on which each teacher has the highest signal, at least LEAST_SHARE."""
    counts = np.bincount(signal.argmax(axis=1), minlength=signal.shape[1]) / max(1, len(signal))
    counts = np.maximum(counts, LEAST_SHARE)
    return counts / counts.sum()


def _are_usable(evidence: Evidence, notes: list[str]) -> bool:
    """Returns whether there are enough texts, and two kinds that agree; else adds a note."""
    (texts, teachers), kinds = evidence.predicted.shape, evidence.kinds
    if teachers == 1:
        return True
    if evidence.provenance is None and texts < FEWEST * evidence.labels:
        few = f"{counted(texts, 'text', 'is', 'are')} too few to compare teachers on {evidence.labels} labels"
        notes.append(f"{few}: {FALLBACK}")
        return False
    pairs = {(a, b): agreement(kinds[a], kinds[b]) for a, b in combinations(kinds, 2)}
    if max(pairs.values(), default=1.0) >= AGREEING:
        return True
    correlations = ", ".join(f"{a} and {b} {value:.2f}" for (a, b), value in pairs.items())
    notes.append(f"no two kinds of evidence agree on the teachers (correlations: {correlations}): {FALLBACK}")
    return False


def agreement(a: Array, b: Array) -> float:
    """Returns the correlation of two kinds, each relative to its mean over the teachers."""
    return correlation(_relative(a), _relative(b))


def generated_shares(provenance: Array | None) -> Array | None:
    """Returns the fraction of texts generated for each teacher."""
    counts = None if provenance is None else (provenance > 0).sum(axis=0)
    return counts / counts.sum() if counts is not None and counts.all() else None


# ---- a single kind of evidence


def exclusive(signal: Array, params: Params) -> bool:
    """Returns whether the signal separates the teachers."""
    return bool(params.value("separates", lambda: _is_exclusive(signal, params.facts)))


def _is_exclusive(signal: Array, facts: WeightFacts) -> bool:
    facts["exclusion"] = exclusion(signal)
    if signal.shape[1] == 1 or facts["exclusion"] >= EXCLUSIVE:
        return True
    facts["notes"].append(f"the signals do not separate the teachers (exclusion {facts['exclusion']:.2f}): {FALLBACK}")
    return False


def exclusion(signal: Array) -> float:
    """Returns minus the mean correlation of two teachers' signals, relative to the least possible one."""
    teachers = signal.shape[1]
    if teachers == 1 or len(signal) < 2:
        return 0.0
    pairs = [(a, b) for a in range(teachers) for b in range(a)]
    mean = float(np.mean([correlation(signal[:, a], signal[:, b]) for a, b in pairs]))
    return float(-mean * (teachers - 1))


def coherent(signal: Array, near: Array, params: Params) -> Array:
    """Returns the mean over each text's neighbours if it correlates with the signal, else the signal."""
    smooth = smoothed(signal, near, params)
    return smooth if params.value("coherent", lambda: _is_coherent(signal, smooth, params.facts)) else signal


def _is_coherent(signal: Array, smooth: Array, facts: WeightFacts) -> bool:
    facts["coherence"] = float(np.mean([correlation(a, b) for a, b in zip(signal.T, smooth.T, strict=True)]))
    if facts["coherence"] >= COHERENT or signal.shape[1] == 1:
        return True
    facts["notes"].append(
        f"neighbouring texts do not predict a text's teacher (correlation {facts['coherence']:.2f}): "
        "each text's own signal was used"
    )
    return False


# ---- signals


def _relative(signal: Array) -> Array:
    return (signal - signal.mean(axis=1, keepdims=True)).ravel()


def smoothed(signal: Array, near: Array, params: Params) -> Array:
    """Returns the signal's mean over each text's neighbours; a text without any keeps its own."""
    if not near.shape[1]:
        return signal
    references = params.value("references", lambda: signal[:REFERENCES])
    starts = range(0, len(near), ROWS_AT_ONCE)
    means = [references[near[start : start + ROWS_AT_ONCE]].mean(axis=1) for start in starts]
    return np.concatenate(means) if means else signal
