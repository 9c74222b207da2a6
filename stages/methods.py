"""METHODS: every method on one screen. A name sets defaults for the experiment, which the file overrides.

`report` measures two more that need no training: each teacher alone, and `ensemble`, the argmax of all logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Method:
    source: str
    needs: str
    """Of what is cached."""
    defaults: Mapping[str, Mapping[str, Any]]


MUKA = "Li et al. 2021 (MUKA; MUKI, Findings of EMNLP 2022)"
AMALGAM = {"mode": "soft", "weights": "mixture", "signal": "margin", "neighbours": 50, "smoothings": 2}

METHODS: Mapping[str, Method] = {
    "amalgam": Method("this project, docs/method.md", "logits, features", {"targets": AMALGAM}),
    "muka-soft": Method(MUKA, "logits, passes", {"targets": {"mode": "soft", "weights": "muka"}}),
    "muka-hard": Method(MUKA, "logits, passes", {"targets": {"mode": "hard", "weights": "muka"}}),
    "uhc": Method("Vongkulbhisal et al. 2019 (UHC)", "logits", {"targets": {"mode": "uhc"}}),
    "vanilla-kd": Method("Hinton et al. 2015, all logits side by side", "logits", {"targets": {"mode": "vanilla-kd"}}),
    "supervised": Method(
        "cross-entropy on gold labels: the ceiling", "gold labels", {"targets": {"mode": "supervised"}}
    ),
}

PRESETS = {name: method.defaults for name, method in METHODS.items()}


def method_of(targets: Mapping[str, Any]) -> str:
    """The name of what these targets make; in soft and hard ones other weights than a method's own are named too."""
    for name, method in METHODS.items():
        if all(targets.get(field) == value for field, value in method.defaults["targets"].items()):
            return name
    return f"{targets['mode']}, {targets['weights']} weights"
