"""Chooses the epochs, the learning rate and the evaluations that an experiment leaves to auto.

Small data gets a minimum number of steps, large data few epochs, and a narrow encoder a larger learning rate.
The chosen values enter fingerprints: a field set to the value that auto chose reuses the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from amalgam.data.arrays import Array, Keys, held_out_keys
from amalgam.data.lazy import np
from amalgam.pipeline.config.schema import Student, TrainTeachers
from amalgam.pipeline.console import counted

MIN_STEPS, STEPS_PER_LABEL = 300, 10
"""A training has at least MIN_STEPS + STEPS_PER_LABEL * labels steps."""
MIN_EPOCHS = 3
MAX_STEPS = 30_000
"""Most steps of a training of more than one epoch."""
BASE_RATE, BASE_WIDTH, MAX_RATE = 5e-5, 768, 1e-3
"""The rate is BASE_RATE * (BASE_WIDTH / width) ** 1.5: 1.4e-4 at width 384, 3.2e-5 at width 1024."""
EVALUATIONS = (10, 20)
"""Fewest and most evaluations of a training; between them, one per epoch."""
STATIC_RATE, STATIC_STEPS, STATIC_EPOCHS = 1e-3, 3, 6
"""Learning rate of a student without a transformer, how many times more steps it has, and its fewest epochs."""
FEW_STEPS = 200
"""Steps below which a note is shown: fine-tuning a pre-trained encoder usually takes some hundreds."""

TEACHER_HELD_OUT = 0.05
"""Share of a teacher's texts on which its accuracy is measured and, if they are enough, the checkpoint is selected."""
MOST_COUNTED = 10_000
"""Texts up to which the learned ones are counted; of more, a step more or less in an epoch does not matter."""

HELD_OUT_ACCURACY = "held-out accuracy"
"""Name of the score that selects the checkpoint of a teacher."""


@dataclass(frozen=True)
class Schedule:
    """Values of the fields that may be left to auto."""

    epochs: int
    learning_rate: float
    evaluate_every: int


def held_out_rows(rows: int, share: float) -> Array:
    """Returns which rows without a key are held out; none if no other row would remain."""
    held_out: Array = np.random.default_rng(0).random(rows) < share
    return held_out & ~held_out.all()


def learned_texts(texts: int, held_out: float, keys: Callable[[], Keys]) -> int:
    """Returns the number of texts that are not held out, or of all if none remains; `keys` reads their keys."""
    if not held_out or texts > MOST_COUNTED:
        return round(texts * (1 - held_out)) or texts
    return int((~held_out_keys(keys(), held_out)).sum()) or texts


def schedule_of(section: Student | TrainTeachers, *, texts: int, labels: int, width: int) -> Schedule:
    """Returns the section's own values, and chosen ones for the fields that are not set; `texts` are learned."""
    per_epoch = max(1, -(-texts // section.batch_size))
    is_static = isinstance(section, Student) and section.is_static
    fewest_steps = (STATIC_STEPS if is_static else 1) * (MIN_STEPS + STEPS_PER_LABEL * labels)
    wanted = max(STATIC_EPOCHS if is_static else MIN_EPOCHS, -(-fewest_steps // per_epoch))
    epochs = section.epochs or max(1, min(wanted, MAX_STEPS // per_epoch))
    rate = STATIC_RATE if is_static else min(MAX_RATE, BASE_RATE * (BASE_WIDTH / width) ** 1.5)
    every = section.evaluate_every if isinstance(section, Student) else None
    evaluations = min(max(epochs, EVALUATIONS[0]), EVALUATIONS[1])
    every = every or max(1, epochs * per_epoch // evaluations)
    return Schedule(epochs, section.learning_rate or float(f"{rate:.1e}"), every)


def chosen_fields(section: str, settings: Student | TrainTeachers, values: Mapping[str, Any]) -> dict[str, object]:
    """Returns the values of the fields that the experiment leaves to auto, by their names in it."""
    auto = [name for name in values if name in type(settings).model_fields and getattr(settings, name) is None]
    return {f"{section}.{name}": values[name] for name in auto}


# ---- results of a training


class ScoredStep(TypedDict):
    step: int
    epoch: float
    score: float
    loss: float | None
    """Mean since the last evaluation."""
    learning_rate: float


class FitFacts(TypedDict):
    steps: int
    best_step: int
    best_score: float
    history: list[ScoredStep]
    dtype: str
    """Precision of the products; weights and updates are always fp32."""
    resumed_from_step: int


class TrainingFacts(FitFacts):
    epochs: int
    learning_rate: float
    selected_by: str


class TeacherFacts(TrainingFacts):
    labels: list[str]
    texts: int
    held_out: int
    """Number of texts on which the accuracy, `best_score`, is measured; 0: measured on the training texts."""


class TeachersFacts(TypedDict):
    teachers: dict[str, TeacherFacts]


class PhasedFacts(TrainingFacts):
    """The result of the last phase, and those of all."""

    phases: dict[str, TrainingFacts]


class UnknownThreshold(TypedDict):
    """The score above which the student's texts are unknown, and the texts that set it."""

    threshold: float
    texts: int
    source: str


class StudentFacts(TrainingFacts):
    labels: list[str]
    cut: int
    """Number of truncated texts."""
    unreadable: NotRequired[int]
    """Number of texts with mostly unknown tokens."""
    texts: int
    unknown: UnknownThreshold | None
    """None for a student that learned from pseudo embeddings."""


class StudentRecordFacts(StudentFacts):
    max_tokens: int
    phases: NotRequired[dict[str, TrainingFacts]]


def kept(facts: TrainingFacts) -> str:
    """Returns which step of a training its result is."""
    return f"kept step {facts['best_step']:,} of {facts['steps']:,}"


def few_steps(facts: TrainingFacts, section: str, more: str = "add texts") -> Iterator[str]:
    """Yields a note on a training that is too short for an encoder; `more` gives it more examples."""
    if facts["steps"] < FEW_STEPS:
        yield (
            f"{counted(facts['steps'], 'step', 'is', 'are')} few for fine-tuning an encoder: {more}, or set "
            f"{section}.epochs=auto (now {facts['epochs']})"
        )
