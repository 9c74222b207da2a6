"""Types of the verdict, and of the counts and estimates that it reads, in the report's JSON."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

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
    fingerprint: NotRequired[str]
    """That of a rival student, which may have several names."""
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
    """Number of rivals of this kind: the interval holds for all of them together."""


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
