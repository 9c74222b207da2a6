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
VANILLA_KD = {"mode": "vanilla-kd"}
AMALGAM = {"mode": "soft", "weights": "mixture", "signal": "margin", "neighbours": 50, "smoothings": 2}

METHODS: Mapping[str, Method] = {
    "amalgam": Method("this project, docs/method.md", "logits, features", {"targets": AMALGAM}),
    "muka-soft": Method(MUKA, "logits, passes", {"targets": {"mode": "soft", "weights": "muka"}}),
    "muka-hard": Method(MUKA, "logits, passes", {"targets": {"mode": "hard", "weights": "muka"}}),
    "uhc": Method("Vongkulbhisal et al. 2019 (UHC)", "logits", {"targets": {"mode": "uhc"}}),
    "vanilla-kd": Method("Hinton et al. 2015, all logits side by side", "logits", {"targets": VANILLA_KD}),
    "layerwise": Method(
        "Shen et al. 2019 (AAAI)",
        "logits, states by token",
        {"targets": {"mode": "scores"}, "objective": {"name": "layerwise", "grain": "tokens"}},
    ),
    "dfa": Method(
        "Shen et al. 2019, as MUKA's baseline has it",
        "logits, pooled states",
        {"targets": VANILLA_KD, "objective": {"name": "dfa"}},
    ),
    "cfl": Method(
        "Luo et al. 2019 (CFL, IJCAI)",
        "logits, pooled states",
        {"targets": VANILLA_KD, "objective": {"name": "cfl"}},
    ),
    "supervised": Method(
        "cross-entropy on gold labels: the ceiling", "gold labels", {"targets": {"mode": "supervised"}}
    ),
}

PRESETS = {name: method.defaults for name, method in METHODS.items()}


def method_of(targets: Mapping[str, Any], objective: str = "targets") -> str:
    """The name of what learns these targets by this objective; other weights than a method's own are named too."""
    named: dict[str, str] = {}
    for name, method in METHODS.items():
        if _makes(method, targets):
            named.setdefault(objective_in(method), name)
    if objective in named:
        return named[objective]
    plain = named.get("targets", f"{targets['mode']}, {targets['weights']} weights")
    return plain if objective == "targets" else f"{plain} and {objective}"


def objective_in(method: Method) -> str:
    return str(method.defaults.get("objective", {}).get("name", "targets"))


def _makes(method: Method, targets: Mapping[str, Any]) -> bool:
    return all(targets.get(field) == value for field, value in method.defaults["targets"].items())
