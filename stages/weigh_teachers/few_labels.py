"""Corrects the teachers' weights by the gold labels of a few texts.

A conditional logit over the teachers has a factor of the log weights without labels, and a coefficient for each kind
of evidence. It has a bias for each teacher and for each label that the teacher predicts. A normal prior centres it on
the weights without labels. Cross-validation on the labelled texts chooses the strength of the prior.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from amalgam.data.arrays import Array, RowNumbers, softmax
from amalgam.data.lazy import np

LEAST_WEIGHT = 1e-3
"""Smaller weights without labels count as this one, so that a label can correct a wrong certainty."""

STRENGTHS = (300.0, 100.0, 30.0, 10.0, 3.0, 1.0)
"""Candidates for the precision of the prior, from the strongest; "no change" is compared with all of them."""

LEAST_GAIN = 1.0
"""The labels change other texts only if the log-likelihood of all labels, by cross-validation, rises by more."""

FOLDS = 10
"""Folds of the cross-validation; fewer texts are left out one by one."""

ROUNDS, SETTLED = 100, 1e-4
"""Most of Newton's steps, and the change of a coefficient below which they end."""

SHORTEST_STEP = 2**-20
"""Share of Newton's step below which the coefficients count as settled."""

MOST_TRAINING = 2000
"""Most labelled texts that fit a correction; labels in key order are a random sample."""

LEAST_PROBABILITY = 1e-4
"""Smaller probabilities of the right teacher count as this one in cross-validation."""


@dataclass(frozen=True)
class Weighed:
    """Texts with their weights before labels correct them."""

    weights: Array
    """[texts, teachers]."""
    kinds: Sequence[Array]
    """Each kind of standardised evidence: [texts, teachers]."""
    predicted: Array
    """Position of the predicted label in the union: [texts, teachers]."""

    def at(self, rows: RowNumbers | slice) -> Weighed:
        return Weighed(self.weights[rows], [kind[rows] for kind in self.kinds], self.predicted[rows])

    def with_kinds(self, more: Sequence[Array]) -> Weighed:
        return replace(self, kinds=[*self.kinds, *more])


@dataclass(frozen=True)
class Correction:
    """The effect of the labels on the weights of all texts."""

    coefficients: Array
    """Those of the logit; empty: the weights without labels predict as well."""
    biases: Array
    """Predicted labels of the teachers that have a bias, as numbers."""

    def __call__(self, texts: Weighed) -> Array:
        if not len(self.coefficients):
            return texts.weights
        return softmax(_Design.of(texts, self.biases).scores(self.coefficients))


@dataclass(frozen=True)
class Corrected:
    correction: Correction
    strength: float | None
    """Strength of the prior that cross-validation chose; None: the weights without labels predict as well."""
    loss_before: float
    """Mean of -log w(right teachers) on labelled texts, without labels."""
    loss_after: float
    """The same by cross-validation, at the chosen strength."""
    fitted: Array
    """Weights of the labelled texts before their labels are set."""
    cross_validated: Array
    """The same by cross-validation: no label of a text's fold is used."""


def corrected(labelled: Weighed, is_right: Array) -> Corrected:
    """Returns the correction by labelled texts, and their weights; `is_right` [texts, teachers] are right teachers."""
    design, right = _Design.of(labelled.at(slice(MOST_TRAINING))), is_right[:MOST_TRAINING]
    texts = len(right)
    before = loss_of(softmax(design.dense[0]), right)
    candidates: list[tuple[float, float | None, Array]] = [(before, None, labelled.weights[:texts])]
    for strength in STRENGTHS if texts > 1 else ():
        cross_validated = _cross_validated(design, right, strength)
        candidates.append((loss_of(cross_validated, right), strength, cross_validated))
    best, chosen, cross_validated = min(candidates, key=lambda candidate: candidate[0])
    if (before - best) * texts <= LEAST_GAIN:
        best, chosen, cross_validated = candidates[0]
    correction = Correction(np.empty(0) if chosen is None else _fit(design, right, chosen), design.biases)
    fitted = correction(labelled)
    return Corrected(correction, chosen, before, best, fitted, np.concatenate([cross_validated, fitted[texts:]]))


def correction_of(labelled: Weighed, is_right: Array, strength: float) -> Correction:
    """Returns the correction by labelled texts, at a given strength of the prior."""
    design = _Design.of(labelled.at(slice(MOST_TRAINING)))
    return Correction(_fit(design, is_right[:MOST_TRAINING], strength), design.biases)


def with_known(weights: Array, rows: RowNumbers, has_label: Array) -> Array:
    """Divides the weight of the labelled texts `rows` among the teachers that have the label, in proportion."""
    result = weights.copy()
    remaining = np.maximum(weights[rows], LEAST_WEIGHT) * has_label
    result[rows] = remaining / remaining.sum(axis=1, keepdims=True)
    return result


@dataclass(frozen=True)
class _Design:
    """The terms of the logit: dense ones, and the biases of the teachers and of their labels."""

    dense: Sequence[Array]
    """[texts, teachers] each: the log weight, and the kinds of evidence."""
    bias_of: Array
    """[texts, teachers]: the number of the predicted label's bias; the last one is of labels without a bias."""
    biases: Array

    @classmethod
    def of(cls, texts: Weighed, biases: Array | None = None) -> _Design:
        start, teachers = np.log(np.maximum(texts.weights, LEAST_WEIGHT)), texts.weights.shape[1]
        distinct = texts.predicted.astype(np.int64) * teachers + np.arange(teachers)
        biases = np.unique(distinct) if biases is None else biases
        places = np.searchsorted(biases, distinct).clip(max=len(biases) - 1)
        return cls([start, *texts.kinds], np.where(biases[places] == distinct, places, len(biases)), biases)

    @property
    def centre(self) -> Array:
        """Returns the coefficients of the weights without labels."""
        centre = np.zeros(len(self.dense) + self.bias_of.shape[1] + len(self.biases) + 1)
        centre[0] = 1.0
        return centre

    def scores(self, coefficients: Array) -> Array:
        dense, teachers = len(self.dense), self.bias_of.shape[1]
        biases, of_labels = coefficients[dense : dense + teachers], coefficients[dense + teachers :]
        terms = [weight * term for weight, term in zip(coefficients[:dense], self.dense, strict=True)]
        return np.sum(terms, axis=0) + biases + of_labels[self.bias_of]

    def terms(self) -> Array:
        """Returns all terms of a few texts [texts, teachers, terms]."""
        texts, teachers = self.bias_of.shape
        by_teacher = np.broadcast_to(np.eye(teachers), (texts, teachers, teachers))
        by_label = np.eye(len(self.biases) + 1)[self.bias_of]
        return np.concatenate([np.stack(self.dense, axis=2), by_teacher, by_label], axis=2)

    def only(self, rows: Array) -> _Design:
        return _Design([term[rows] for term in self.dense], self.bias_of[rows], self.biases)


def _fit(design: _Design, is_right: Array, strength: float) -> Array:
    """Returns the coefficients with the largest posterior, by Newton's method with a line search."""
    terms, coefficients = design.terms(), design.centre
    used = np.flatnonzero(terms.any(axis=(0, 1)))  # the other coefficients stay at their centre
    terms, centre = terms[:, :, used], coefficients[used]
    flat, point = terms.reshape(-1, len(used)), centre

    def posterior(point: Array) -> float:
        scores = terms @ point
        right = np.logaddexp.reduce(np.where(is_right, scores, -np.inf), axis=1)
        likelihood = (right - np.logaddexp.reduce(scores, axis=1)).sum()
        return float(likelihood - strength / 2 * ((point - centre) ** 2).sum())

    value = posterior(point)
    for _ in range(ROUNDS):
        scores = terms @ point
        weights, right = softmax(scores), softmax(np.where(is_right, scores, -np.inf))
        gradient = (right - weights).ravel() @ flat - strength * (point - centre)
        weighted = flat * weights.reshape(-1, 1)
        mean = weighted.reshape(terms.shape).sum(axis=1)
        spread = flat.T @ weighted - mean.T @ mean
        step = np.linalg.solve(spread + strength * np.eye(len(used)), gradient)
        share, after = 1.0, posterior(point + step)
        while after < value and share > SHORTEST_STEP:
            share /= 2
            after = posterior(point + share * step)
        if after < value:
            break
        point, value = point + share * step, after
        if share * np.abs(step).max() < SETTLED:
            break
    coefficients[used] = point
    return coefficients


def _cross_validated(design: _Design, is_right: Array, strength: float) -> Array:
    """Returns the weights of texts on which the coefficients were not fitted [labelled texts, teachers].

    Texts are in the order of their keys, which are digests, so each fold is a random sample.
    """
    weights = np.empty(is_right.shape)
    for fold in folds(len(is_right)):
        coefficients = _fit(design.only(~fold), is_right[~fold], strength)
        weights[fold] = softmax(design.only(fold).scores(coefficients))
    return weights


def folds(texts: int) -> Iterator[Array]:
    """Yields for each fold whether each text belongs to it."""
    fold = np.arange(texts) % min(FOLDS, texts)
    for number in range(int(fold.max()) + 1):
        yield fold == number


def loss_of(weights: Array, is_right: Array) -> float:
    """Returns the mean of -log w(right teachers)."""
    return float(-np.log(np.maximum((weights * is_right).sum(axis=1), LEAST_PROBABILITY)).mean())
