"""Types of the verdict: its inputs, which are counts, and its parts in report.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NotRequired, TypedDict

from amalgam.stages.common.given_labels import PREDICTED, WHY

Decision = Literal["ship", "do not ship", "cannot say"]

Kind = Literal[
    "ensemble",
    "zero-shot",
    "teacher",
    "teacher on its own labels",
    "student",
    "supervised student",
    "most frequent label",
]

Standing = Literal["better", "worse", "not clearly different"]

TO_LABEL = ".to-label.csv"
"""End of the name of the file with the texts to label."""

PREDICTED_COLUMNS = (*PREDICTED, WHY)
"""Columns of this file that follow the column to fill."""


class PairedCounts(TypedDict):
    """The student and another system on the same n texts, compared text by text."""

    n: int
    student_right: int
    right: int
    gained: int
    """Texts on which only the student is right."""
    lost: int


class RivalCounts(TypedDict):
    """The student and another system on the same n test texts."""

    name: str
    kind: Kind
    n: int
    student_right: int
    right: int
    gained: int | None
    """Texts on which only the student is right; None if the two cannot be compared text by text."""
    lost: int | None
    selected: NotRequired[bool]
    """Whether the texts were selected because student and ensemble differ: accuracies on ordinary texts are others."""
    on_random: NotRequired[float]
    """With selected texts: the difference of the accuracies on the random ones among them."""
    learned: NotRequired[LearnedTexts]
    """Only if a rival student learned too many of the texts for a comparison."""


class Estimate(TypedDict):
    """A number with its 95 % interval."""

    mean: float
    low: float
    high: float


class Rival(RivalCounts, Estimate):
    """`mean`: accuracy of the student minus that of the rival."""

    student_is: Standing
    together: int
    """Number of rivals of this kind: the interval holds for all of them together. Earlier pages lack it."""


class Cause(TypedDict):
    code: str
    text: str


class Next(TypedDict):
    text: str
    command: NotRequired[str]


class Verdict(TypedDict):
    decision: Decision
    reasons: list[str]
    causes: list[Cause]
    cautions: list[str]
    """Remarks on which the decision does not depend."""
    next: Next
    rivals: list[Rival]
    texts_needed: int | None
    """About how many labelled test texts would decide; None if the decision is clear or the number is too large."""


class Answered(TypedDict):
    """Texts answered, and answered right."""

    n: int
    right: int


class Threshold(Answered):
    probability: float
    """Least probability of the answers."""


class CoverageCurve(TypedDict):
    """Texts answered (`n`) and answered right, by least probability, and for the most probable n texts."""

    thresholds: list[Threshold]
    curve: list[Answered]


MOST_PREDICTED = 2_000
"""Most training texts that the student predicts for a page without labelled test texts."""

Reference = Literal["targets", "ensemble"]
"""The comparison without gold labels: the ensemble where targets are no distribution over labels."""


class Agreement(TypedDict):
    """How many texts have the label of the reference."""

    reference: Reference
    texts: Literal["held-out texts", "training texts"]
    n: int
    right: int


class LabelShare(TypedDict):
    """A label among n training texts, without gold labels."""

    label: str
    predicted: int
    expected: int
    """Texts whose reference has the label first."""
    mass: float
    """Sum of the label's probabilities in the reference."""
    ensemble: int | None
    """Texts whose ensemble has the label first."""
    teachers: list[str]
    """The teachers of the label."""


SystemKind = Literal["student", "targets", "ensemble", "muka", "teacher", "teacher on its own labels"]
"""`muka`: the label of the most confident teacher."""


class SystemEstimate(Estimate):
    """The estimated accuracy of a system on n training texts."""

    name: str
    kind: SystemKind
    n: int


class EstimatedGap(Estimate):
    """The estimated accuracy of the ensemble minus that of the student on the same n held-out texts."""

    n: int


class WeightEstimates(TypedDict):
    """Estimates without labels, from the teachers' weights."""

    systems: list[SystemEstimate]
    gap: EstimatedGap | None
    """None with too few held-out texts."""


class UnlabelledQuality(TypedDict):
    """The student on n training texts, without gold labels."""

    n: int
    held_out: int
    """Texts that the student was not trained on."""
    agreement: Agreement
    ensemble: int | None
    """Texts on which the ensemble has the same label."""
    labels: list[LabelShare]
    coverage: CoverageCurve
    """Agreement with the reference by least probability."""
    to_label: int
    """Texts in the file to label."""
    estimates: WeightEstimates | None
    """None if the weights of the teachers are not those of the default method, or labels chose them."""


class ShareOfUnknown(TypedDict):
    """The share of training texts of no label, by n random labelled texts."""

    n: int
    unknown: int
    """Texts with the label `corpus.unknown`."""
    low: float
    high: float


class LabelEstimates(TypedDict):
    """Estimates on the n labelled training texts that the student was not trained on."""

    n: int
    labels: int
    """All labels in `labels` of the experiment."""
    empty: int
    """Rows of the file without a label."""
    unknown: ShareOfUnknown | None
    """None without `corpus.unknown` in the experiment."""
    random: bool
    """Whether the texts are known to be a random sample of the training texts."""
    weights: bool
    """Whether the labels chose the weights of the teachers, so that targets and student are corrected for it."""
    systems: list[SystemEstimate]
    gained: int | None
    """Texts on which only the student is right, and not the ensemble; None without teachers."""
    lost: int | None
    left_out: NotRequired[int]
    """Random labelled texts whose label no teacher has."""
    sample: NotRequired[int]
    """All other random labelled texts, of which the n are a part."""


class LabelCounts(TypedDict):
    """The test texts of a label, its right predictions and all predictions of it."""

    label: str
    n: int
    right: int
    predicted: int


class LabelOccurrence(TypedDict):
    """A label among texts with gold labels."""

    label: str
    teachers: list[str]
    """The teachers of the label."""
    n: int
    """Texts with this gold label."""
    ensemble: int | None
    """Texts for which the ensemble predicts it; None without teachers."""


class LearnedTexts(TypedDict):
    """Test texts that training also used, of all test texts."""

    texts: int
    of: int
    labelled: bool
    """Whether their gold labels were used."""
    validation: NotRequired[bool]
    """Whether they are validation texts, which selected the checkpoint and were not learned."""
    generated: NotRequired[bool]
    """Whether stage generate wrote them."""


@dataclass(frozen=True)
class VerdictInputs:
    n: int
    """Labelled test texts, without selected ones."""
    rivals: Sequence[RivalCounts] = ()
    labels: Sequence[LabelCounts] = ()
    tested: Sequence[LabelOccurrence] = ()
    """Every label among the test texts."""
    given: Sequence[LabelOccurrence] = ()
    """Every label among the texts of `labels`; empty if each teacher has a text of a label that only it has."""
    unlabelled: UnlabelledQuality | None = None
    linear_map: PairedCounts | None = None
    """A linear map of the encoder's states that learned the same targets, on held-out texts; right is their label.

    None with too few of these texts, or without cached states.
    """
    teachers: int = 0
    steps: int | None = None
    epochs: int = 1
    automatic_epochs: int | None = None
    """Epochs that `auto` would choose; None if unknown."""
    learning_rate: float | None = None
    automatic_rate: float | None = None
    texts: int | None = None
    """Texts that the student learned."""
    largest_loss: str | None = None
    """Step with the largest loss of accuracy: teachers, choice, fit, choice and fit."""
    by_labels: LabelEstimates | None = None
    """Accuracies on labelled training texts; they count only without labelled test texts."""
    weights_unused: bool = False
    """Whether the teachers' evidence was dropped, and each text's own confidences were used."""
    long_texts: float = 0.0
    """Share of the training texts that the student's limit truncates."""
    method: str = "amalgam"
    label_file: str | None = None
    """File of the gold labels of training texts in the experiment."""
    label: str | None = "label"
    """Column of the gold labels in the experiment file."""
    selected: int = 0
    """Labelled test texts that were selected because they are hard."""
    unused: int = 0
    """Those of them that nothing uses."""
    left_out: int = 0
    """Labelled test texts whose label no teacher has, without selected ones."""
    learned: LearnedTexts | None = None
    generates: bool = False
    """Whether stage generate wrote the training texts, which are then no test texts."""
    page: str = "student"
    file: str = ""
    """Name of the experiment file; empty without one."""
    remade: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """By student without a folder: the overrides that train it again; empty if they are unknown."""
    folders: Collection[str] = ()
    """Names in students/, which no proposed student has."""
    overrides: Mapping[str, object] = field(default_factory=dict)
    """Overrides of this run, which the next command repeats."""
