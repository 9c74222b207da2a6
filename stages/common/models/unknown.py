"""Scores how unlike the training texts a text is, by the states of the student's middle layer.

The score is the Mahalanobis distance from the nearest class, divided by the square root of the width, so that training
texts are near 1. `unknown.safetensors` in the student's folder has the fit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from amalgam.data.arrays import Array, Gaussians, Moments, RowNumbers
from amalgam.pipeline.errors import ModelError
from amalgam.pipeline.storage.facts import fits
from amalgam.stages.common.models.model_folder import UNKNOWN

FORMAT = "1"
PARTS = ("means", "whiten")

ABOUT = "amalgam"
"""Name of the JSON among the file's metadata."""

KNOWN_SHARE = 0.995
"""Share of the training texts whose score is below the threshold."""

CLEAR_SHARE = 0.9975
"""The same of the texts with clear evidence, which are nearer to the classes than others."""

FOLDS = 5
FIX = "restore the file of this student, or delete it: then the score of the logits is used"


@dataclass(frozen=True)
class UnknownStates:
    """Gaussians of the training texts' states by predicted label, and the score above which a text is unknown."""

    gaussians: Gaussians
    layer: int
    """Position among the model's hidden states, of which the first is the embeddings."""
    threshold: float
    weights: str
    """Digest of the weights that the states come from."""

    @classmethod
    def of(
        cls, states: Array, groups: RowNumbers, evidence: Array | None = None, *, layer: int, weights: str
    ) -> UnknownStates:
        """Fits to states [n, W]; the threshold is a quantile of scores under Gaussians of the other folds.

        A text is nearer to Gaussians fitted on it than a new text is. The only text of a class has no such score. Texts
        with little evidence may have labels of no teacher, and are left out.
        """
        below = KNOWN_SHARE
        if evidence is not None:
            clear, below = _is_clear(evidence, groups), CLEAR_SHARE
            states, groups = states[clear], groups[clear]
        folds, scores = np.arange(len(states)) % min(FOLDS, len(states)), np.empty(len(states))
        parts = [_moments(states, groups, folds == fold) for fold in range(folds.max() + 1)]
        has_class = np.empty(len(states), bool)
        for fold in range(len(parts)):
            others = [part for place, part in enumerate(parts) if place != fold] or parts
            scores[folds == fold] = _scores(Gaussians.of(others), states[folds == fold])
            has_class[folds == fold] = np.isin(groups[folds == fold], groups[folds != fold])
        scores = scores[has_class] if has_class.any() else scores
        return cls(Gaussians.of(parts), layer, float(np.quantile(scores, below)), weights)

    def scores(self, states: Array) -> Array:
        """Returns the score [n] of states [n, W]."""
        return _scores(self.gaussians, states)

    def save(self, folder: Path) -> None:
        tensors = {name: getattr(self.gaussians, name).astype(np.float32) for name in PARTS}
        about = {"format": FORMAT, "layer": str(self.layer), "threshold": repr(self.threshold), "weights": self.weights}
        # One entry: safetensors writes several in any order, and equal fits are equal files.
        save_file(tensors, folder / UNKNOWN, metadata={ABOUT: json.dumps(about)})


def _is_clear(evidence: Array, groups: RowNumbers) -> Array:
    """Returns the half of all texts with the most evidence, and that of each group, so that no group is lost."""
    is_clear: Array = evidence >= np.median(evidence)
    for group in np.unique(groups):
        own = groups == group
        is_clear |= own & (evidence >= np.median(evidence[own]))
    return is_clear


def _moments(states: Array, groups: RowNumbers, chosen: Array) -> Moments:
    moments = Moments(states[0], int(groups.max()) + 1)
    moments.add(states[chosen], groups[chosen])
    return moments


def _scores(gaussians: Gaussians, states: Array) -> Array:
    scores: Array = np.sqrt(gaussians.distance(states) / states.shape[1])
    return scores


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
    if about.get("format") != FORMAT:
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
    means, whiten = (tensors.get(name, np.empty(0)).astype(np.float64) for name in PARTS)
    try:
        layer, threshold = int(about["layer"]), float(about["threshold"])
    except (KeyError, ValueError):
        return None
    shapes_fit = means.shape == (len(means), width) and len(means) > 0 and whiten.shape == (width, width)
    if not shapes_fit or not all(map(math.isfinite, (threshold, means.sum(), np.abs(whiten).sum()))):
        return None
    return UnknownStates(Gaussians(means, whiten, np.array(math.nan)), layer, threshold, about["weights"])
