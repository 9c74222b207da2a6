"""Scores how unlike the training texts a text is, by the states of the student's middle and last layer.

The score is the middle layer's Mahalanobis distance from the nearest class, divided by the square root of the width.
Linear maps from both layers to the teachers' evidence are added: texts like those with little evidence have more.
Training texts are near 1. `unknown.safetensors` in the student's folder has the fit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from amalgam.data.arrays import Array, Gaussians, Moments, RowNumbers
from amalgam.pipeline.errors import ModelError
from amalgam.pipeline.storage.facts import fits
from amalgam.stages.common.models.model_folder import UNKNOWN

FORMAT = "2"
WITHOUT_SLOPE = "1"
"""The format of a fit without the maps to the evidence."""

ABOUT = "amalgam"
"""Name of the JSON among the file's metadata."""

KNOWN_SHARE = 0.995
"""Share of the training texts whose score is below the threshold."""

CLEAR_SHARE = 0.9975
"""The same of the texts with clear evidence, which are nearer to the classes than others."""

ADDED_SHARE = 0.99
"""Quantile of their lack of evidence that is added to the threshold."""

RIDGE = 0.3
"""Penalty of the maps to the evidence, per text."""

STRENGTH = 0.5
"""Deviation of a map's values, in deviations of the distance, if it gives the evidence without an error."""

NEW_DEVIATIONS = 2.33
"""Least deviations of the threshold from the median score of new texts; 1 % of a normal distribution have more."""

FEWEST_NEW = 10
"""Fewest new texts whose scores can raise the threshold."""

NORMAL = 1.4826
"""Deviation of a normal distribution over the median distance from its median, which few odd texts hardly change."""

FOLDS = 5
FIX = "restore the file of this student, or delete it: then the score of the logits is used"


@dataclass(frozen=True)
class UnknownStates:
    """Gaussians of the training texts' states by predicted label, and the score above which a text is unknown.

    States are [n, 2, W]: of a middle layer and the last, each the mean over a text's tokens.
    """

    gaussians: Gaussians
    slope: Array
    """[2 W]: states times slope, less `constant`, are added to the score."""
    constant: float
    layer: int
    """Position of the middle layer among the model's hidden states, of which the first is the embeddings."""
    threshold: float
    weights: str
    """Digest of the weights that the states come from."""

    @classmethod
    def of(
        cls, states: Array, groups: RowNumbers, evidence: Array | None = None, *, layer: int, weights: str
    ) -> UnknownStates:
        """Fits to states; the threshold is a quantile of scores under a fit to the other folds.

        A text is nearer to Gaussians fitted on it than a new text is. The only text of a class has no such score. Texts
        with little evidence may have labels of no teacher, and are left out of the Gaussians.
        """
        clear, below = np.ones(len(states), bool), KNOWN_SHARE
        if evidence is not None:
            clear, below = _is_clear(evidence, groups), CLEAR_SHARE
        middle, groups = states[clear, 0], groups[clear]
        folds, scores = _folds(len(middle)), np.empty(len(middle))
        parts = [_moments(middle, groups, folds == fold) for fold in range(folds.max() + 1)]
        has_class = np.empty(len(middle), bool)
        for fold in range(len(parts)):
            others = [part for index, part in enumerate(parts) if index != fold] or parts
            scores[folds == fold] = _scores(Gaussians.of(others), middle[folds == fold])
            has_class[folds == fold] = np.isin(groups[folds == fold], groups[folds != fold])
        scores = scores[has_class] if has_class.any() else scores
        threshold, slope = float(np.quantile(scores, below)), np.zeros(states[0].size)
        if evidence is not None and len(states) > 1:
            slope, added = _lack_of_evidence(states, evidence, float(scores.std()))
            threshold += float(np.quantile(added[clear], ADDED_SHARE))
        constant = float(states.reshape(len(states), -1).mean(axis=0) @ slope)
        return cls(Gaussians.of(parts), slope, constant, layer, threshold, weights)

    def raised(self, new: Array) -> UnknownStates:
        """Returns the fit with a threshold that few of the texts exceed whose states these are; none was learned.

        A student separates the texts that it learned better than others, most of all if they are few. Fewer than
        FEWEST_NEW texts change nothing: one odd text among them would.
        """
        if len(new) < FEWEST_NEW:
            return self
        scores = self.scores(new)
        middle = np.median(scores)
        least = float(middle + NEW_DEVIATIONS * NORMAL * np.median(np.abs(scores - middle)))
        return replace(self, threshold=max(self.threshold, least))

    def scores(self, states: Array) -> Array:
        """Returns the score [n] of each text."""
        added: Array = states.reshape(len(states), len(self.slope)) @ self.slope - self.constant
        return _scores(self.gaussians, states[:, 0]) + added

    def save(self, folder: Path) -> None:
        tensors = {"means": self.gaussians.means, "whiten": self.gaussians.whiten, "slope": self.slope}
        tensors = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
        about = {"format": FORMAT, "layer": str(self.layer), "threshold": repr(self.threshold)}
        about |= {"constant": repr(self.constant), "weights": self.weights}
        # One entry: safetensors writes several in any order, and equal fits are equal files.
        save_file(tensors, folder / UNKNOWN, metadata={ABOUT: json.dumps(about)})


def _lack_of_evidence(states: Array, evidence: Array, deviation: float) -> tuple[Array, Array]:
    """Returns a slope [2 W] along which the evidence falls, and the values [n] that slopes of other folds add.

    Each layer has its own map. The worse its values of the other folds follow the evidence, the less it adds.
    """
    slopes, added, folds = [], np.zeros(len(states)), _folds(len(states))
    evidence = np.clip(evidence, 0.0, 1.0)
    for layer in np.moveaxis(states, 1, 0):
        scale = layer.std(axis=0) + np.finfo(np.float32).eps
        inputs, slope, values = (layer - layer.mean(axis=0)) / scale, np.zeros(len(scale)), np.zeros(len(layer))
        for fold in range(folds.max() + 1):
            chosen = folds != fold
            values[~chosen] = inputs[~chosen] @ _ridge(inputs[chosen], evidence[chosen])
        differ = values.std() > 0 and evidence.std() > 0
        follows = float(np.corrcoef(values, evidence)[0, 1]) if differ else 0.0
        if follows > 0:
            strength = -STRENGTH * follows * deviation / float(values.std())
            slope, added = strength * _ridge(inputs, evidence) / scale, added + strength * values
        slopes.append(slope)
    return np.concatenate(slopes), added


def _ridge(inputs: Array, values: Array) -> Array:
    """Returns the coefficients of a ridge regression on inputs with mean 0."""
    penalty = RIDGE * len(inputs) * np.eye(inputs.shape[1])
    return np.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ (values - values.mean()))


def _folds(texts: int) -> RowNumbers:
    return np.arange(texts) % min(FOLDS, texts)


def _is_clear(evidence: Array, groups: RowNumbers) -> Array:
    """Returns the half of all texts with the most evidence, and that of each group, so that no group is lost."""
    is_clear: Array = evidence >= np.median(evidence)
    for group in np.unique(groups):
        is_member = groups == group
        is_clear |= is_member & (evidence >= np.median(evidence[is_member]))
    return is_clear


def _moments(states: Array, groups: RowNumbers, chosen: Array) -> Moments:
    moments = Moments(states[0], int(groups.max()) + 1)
    moments.add(states[chosen], groups[chosen])
    return moments


def _scores(gaussians: Gaussians, states: Array) -> Array:
    return np.sqrt(gaussians.distance(states) / states.shape[1])


def read_unknown(folder: Path, *, width: int, layers: int, weights: str) -> UnknownStates:
    """Returns the fit in a student's folder; refuses a damaged file and that of other weights.

    `weights` is the digest of the loaded weights.
    """
    path = folder / UNKNOWN
    try:
        path.open("rb").close()  # safetensors calls a file without permission missing
        with safe_open(path, framework="np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = json.loads((file.metadata() or {}).get(ABOUT, "{}"))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{UNKNOWN} is damaged: {error}", where=str(path), fix=FIX) from None
    about = about if fits(about, dict[str, str]) else {}
    if about.get("format") not in {FORMAT, WITHOUT_SLOPE}:
        what = f"{UNKNOWN} has the format {about.get('format', 'none')}, and this version of amalgam reads {FORMAT}"
        raise ModelError(what, where=str(path), fix="update amalgam, or train the student again")
    if about.get("weights") != weights:
        what = f"{UNKNOWN} belongs to other weights than those of this model"
        raise ModelError(what, where=str(path), fix=FIX)
    fit = _fit_of(about, tensors, width)
    if fit is None or not 0 <= fit.layer <= layers:
        what = f"{UNKNOWN} is damaged: its content is not that of a fit to {width} dimensions"
        raise ModelError(what, where=str(path), fix=FIX)
    return fit


def _fit_of(about: Mapping[str, str], tensors: Mapping[str, Array], width: int) -> UnknownStates | None:
    """Returns the fit if all numbers and shapes are possible."""
    parts = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    if about["format"] == WITHOUT_SLOPE:
        parts, about = parts | {"slope": np.zeros(2 * width)}, {**about, "constant": "0"}
    means, whiten, slope = (parts.get(name, np.empty(0)) for name in ("means", "whiten", "slope"))
    try:
        layer, threshold, constant = int(about["layer"]), float(about["threshold"]), float(about["constant"])
    except (KeyError, ValueError):
        return None
    shapes_fit = means.ndim == 2 and means.shape[1] == width and len(means) and whiten.shape == (width, width)
    numbers = threshold, constant, *(np.abs(part).sum() for part in (means, whiten, slope))
    if not shapes_fit or slope.shape != (2 * width,) or not all(map(math.isfinite, numbers)):
        return None
    return UnknownStates(
        Gaussians(means, whiten, np.array(math.nan)), slope, constant, layer, threshold, about["weights"]
    )
