"""METHODS: every method on one screen. A name sets defaults for the experiment, which the file overrides.

MUKA: Li et al. 2021 (and MUKI, Findings of EMNLP 2022). vanilla-kd: Hinton et al. 2015, on all logits side by side.
`report` measures two more that need no training: each teacher alone, and `ensemble`, the argmax of all logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

METHODS: Mapping[str, Mapping[str, Any]] = {
    "muka-soft": {"targets": {"mode": "soft"}},
    "muka-hard": {"targets": {"mode": "hard"}},
    "vanilla-kd": {"targets": {"mode": "vanilla-kd"}},
    "supervised": {"targets": {"mode": "supervised"}},
}


def method_of(mode: str) -> str:
    """The name of what `targets.mode` makes."""
    return next(name for name, preset in METHODS.items() if preset["targets"]["mode"] == mode)
