"""METHODS: every method on one screen. A name sets defaults for the experiment, which the file overrides.

Methods that train nothing are rows of every report. With such a method the report evaluates it, and trains no student.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from amalgam.pipeline.config.load import ON_GENERATED
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.stages.target_methods import TARGET_METHODS, target_method


@dataclass(frozen=True)
class Method:
    source: str
    needs: str
    """The cached inputs that it reads."""
    defaults: Mapping[str, Mapping[str, Any]]
    trains: bool = True
    on_generated: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Additional defaults for generated texts."""


MUKA = "Li et al. 2021 (MUKA; MUKI, Findings of EMNLP 2022)"

VANILLA_KD = {"mode": "vanilla-kd"}

AMALGAM = {
    "mode": "hard",
    "distribution": "top-label",
    "teacher_weights": "mixture",
    "weight_signal": "all",
    "neighbours": 50,
}

HEDGED = {"mode": "soft", "distribution": "deterministic"}
"""A generated text may have no topic, so no teacher gets all of the weight."""


STRATA = {"mode": "stratanet", "uncertainty": "rmd", "kd_temperature": 0.75}

STRATA_STUDENT = {"epochs": 10, "batch_size": 16, "warmup": 0.2, "dropout": 0.2}

SETTINGS = {"uncertainty", "kd_temperature"}
"""Fields of `targets` that do not change the name of a method."""


METHODS: Mapping[str, Method] = {
    "amalgam": Method(
        "this project, docs/method.md", "logits, features", {"targets": AMALGAM}, on_generated={"targets": HEDGED}
    ),
    "muka-soft": Method(MUKA, "logits, passes", {"targets": {"mode": "soft", "teacher_weights": "muka"}}),
    "muka-hard": Method(MUKA, "logits, passes", {"targets": {"mode": "hard", "teacher_weights": "muka"}}),
    "uhc": Method("Vongkulbhisal et al. 2019 (UHC)", "logits", {"targets": {"mode": "uhc"}}),
    "vanilla-kd": Method("Hinton et al. 2015, all logits side by side", "logits", {"targets": VANILLA_KD}),
    "layerwise": Method(
        "Shen et al. 2019 (AAAI)",
        "logits, states by token",
        {"targets": {"mode": "scores"}, "objective": {"name": "layerwise", "states": "tokens"}},
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
    "mt-bert": Method(
        "Wu et al. 2021 (MT-BERT, Findings of ACL)",
        "gold labels, logits, pooled states",
        {"targets": {"mode": "mt-bert"}, "objective": {"name": "mt-bert"}},
    ),
    "stratanet": Method(
        "Vijayaraghavan et al. 2024 (StrataNet, NAACL)",
        "logits, pooled states",
        {"targets": STRATA, "objective": {"name": "stratanet"}, "student": STRATA_STUDENT},
    ),
    "as-dfd": Method(
        "Ma et al. 2020 (AS-DFD, EMNLP)",
        "pseudo embeddings, no text",
        {"targets": VANILLA_KD, "objective": {"name": "as-dfd"}},
    ),
    "supervised": Method(
        "cross-entropy on gold labels: the ceiling", "gold labels", {"targets": {"mode": "supervised"}}
    ),
    "teacher:<name>": Method("one teacher alone, zeros on labels it does not know", "logits", {}, trains=False),
    "ensemble": Method("argmax of all teachers' logits side by side", "logits", {}, trains=False),
    "zero-shot": Method("nearest label name in the encoder's space, no teacher", "label names", {}, trains=False),
}


PRESETS: Mapping[str, Mapping[str, Any]] = {
    name: {**method.defaults, ON_GENERATED: method.on_generated} for name, method in METHODS.items()
}


def method_of(targets: Mapping[str, Any], objective: str = "targets") -> str:
    """The name of what learns these targets by this objective; other weights than a method's own are named too."""
    named: dict[str, str] = {}
    for name, method in METHODS.items():
        if method.trains and _makes(method, targets):
            named.setdefault(objective_in(method), name)
    if objective in named:
        return named[objective]
    mode, weights = targets["mode"], f", {targets['teacher_weights']} weights"
    plain = named.get("targets", f"{mode}{weights if TARGET_METHODS[mode].weighted else ''}")
    return plain if objective == "targets" else f"{plain} and {objective}"


def objective_in(method: Method) -> str:
    return str(method.defaults.get("objective", {}).get("name", "targets"))


def _makes(method: Method, targets: Mapping[str, Any]) -> bool:
    defaults = method.defaults.get("targets", {})
    hedged = {**defaults, **method.on_generated.get("targets", {})}
    return any(
        all(targets.get(name) == value for name, value in one.items() if name not in SETTINGS)
        for one in (defaults, hedged)
    )


def method_name(experiment: ExperimentConfig) -> str:
    """Returns the name in the report: the method, and the parts that the experiment leaves out."""
    if not experiment.student.learns:
        return str(experiment.student.method)
    targets = experiment.targets
    name = method_of(targets.model_dump(), experiment.objective.name)
    return target_method(targets).full_name(experiment, name)
