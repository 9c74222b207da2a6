"""Types of the report's JSON: evaluation.json, findings.json and reports/NAME.json.

A count `right` is of texts with the gold label; a share or a mean is None where no text can decide it.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from amalgam.stages.build_targets.stage import TargetSummary
from amalgam.stages.cache_teachers.sample import PassAudit
from amalgam.stages.report import verdict_types as types

# ---- the evaluation


class Measures(TypedDict):
    n: int
    accuracy: float
    macro_f1: float
    nll_nats: float | None
    nll_infinite: NotRequired[int]
    """Texts whose gold label has probability 0."""
    ece: float | None


class StudentScores(Measures):
    """The scores of a report, as its manifest has them: without `nll_infinite`."""

    fingerprint: str
    method: str


class SweepPoint(StudentScores):
    temperature: float
    ours: bool
    """Whether it is the student of the page."""


class SystemScores(Measures):
    """The measures of one system; `evaluation.evaluate` defines them."""

    slice_accuracy: dict[str, float | None]
    slice_n: dict[str, int]
    label_f1: NotRequired[dict[str, float | None]]
    confusion: NotRequired[list[list[int]]]


class SelectedTexts(TypedDict):
    """Labelled test texts of a file to label: the selected ones, and the random ones, of which the scores are."""

    texts: int
    random: int
    unused: NotRequired[int]
    """Selected ones that nothing uses, if there are any."""


class EvaluatedSystems(TypedDict):
    n: int
    left_out: int
    systems: dict[str, SystemScores]
    system: str
    """The system that the report is about."""
    selected_by: str
    selected: NotRequired[SelectedTexts]
    """Only with selected test texts."""
    learned: NotRequired[types.LearnedTexts]
    """Only with test texts that are also learned."""


def reported_scores(evaluation: EvaluatedSystems) -> SystemScores:
    """Returns the scores of the system that the report is about."""
    return evaluation["systems"][evaluation["system"]]


def random_texts(evaluation: EvaluatedSystems | None) -> int:
    """Returns the number of labelled test texts, without selected ones."""
    if evaluation is None:
        return 0
    return evaluation["selected"]["random"] if "selected" in evaluation else evaluation["n"]


def majority(evaluation: EvaluatedSystems) -> float:
    """Returns the accuracy of always predicting the most frequent label of the test texts."""
    return max(map(sum, reported_scores(evaluation)["confusion"])) / evaluation["n"]


class Evaluation(EvaluatedSystems):
    """evaluation.json: every system on the labelled test texts."""

    labels: list[str]
    groups: dict[str, list[str]]
    """The labels of each teacher."""


class EvaluationSection(EvaluatedSystems):
    """The evaluation on the page, without confusion matrices and F1 by label."""

    labels: int
    groups: list[str]


# ---- the reported system on the test texts


class LabelQuality(types.LabelOccurrence):
    """A label among the test texts."""

    right: int
    """Texts of the label that are predicted right."""
    predicted: int
    """Texts for which the label is predicted."""
    teachers_right: int | None
    """Texts of the label that a teacher predicts right; None without teachers."""


class ConfusedPair(TypedDict):
    gold: str
    predicted: str
    n: int
    of: int
    """Texts of the gold label."""


class Confusions(TypedDict):
    """The most frequent pairs of all `of` confused ones."""

    of: int
    pairs: list[ConfusedPair]


class ConfusionMatrix(TypedDict):
    labels: list[str]
    others: int
    """Labels in the last row and column."""
    counts: list[list[int]]


class CalibrationBin(TypedDict):
    """The texts with a probability in (low, high]."""

    low: float
    high: float
    n: int
    confidence: float
    """Mean probability of the predictions."""
    accuracy: float


class ConfidentError(TypedDict):
    text: str
    gold: str
    predicted: str
    probability: float
    gold_probability: float


class TeachersQuality(TypedDict):
    n: int
    oracle: int | None
    """Texts that a teacher predicts right: the best possible choice of a teacher."""
    own: dict[str, types.Answered]
    """By teacher: the texts with one of its labels, predicted among its labels."""


class FlaggedShares(TypedDict):
    """The shares of texts with a label and of unknown texts with a score above a threshold."""

    labelled: float
    unknown: float


class UnknownQuality(TypedDict):
    """How well the student's score separates texts with the unknown label from the other test texts."""

    labelled: int
    labelled_flagged: int
    unknown: int
    unknown_flagged: int
    auroc: float | None
    """None without texts of the unknown label, like the ends of its 95 % interval."""
    low: float | None
    high: float | None
    curve: list[FlaggedShares]


class LengthGroup(types.Answered):
    """Texts of `low` to `high` letters."""

    low: int
    high: int


class StudentQuality(TypedDict):
    """The reported system on the test texts: by label, by confidence, and its errors."""

    classes: list[LabelQuality]
    confusions: Confusions
    matrix: ConfusionMatrix
    calibration: dict[str, list[CalibrationBin]]
    errors: list[ConfidentError]
    wrong: int
    right_hex: str | None
    """Bits of the texts with a right prediction; None for very many texts."""
    rows: str | None
    """Digest of the positions of these texts in the test part; None if they are all of it."""
    teachers: TeachersQuality
    rivals: list[types.RivalCounts]
    coverage: types.CoverageCurve
    lengths: list[LengthGroup]
    unknown: UnknownQuality | None
    """None if the student has no threshold."""


# ---- the teachers' audit

Agreements = TypedDict("Agreements", {"texts": int, "with": float | None, "without": float | None})
"""How often the other teachers agree with the union, with the left-out teacher in it and without."""


class LeftOut(TypedDict):
    """The union without a teacher: the share of changed labels, its accuracy and the gain over the whole union."""

    changed: float | None
    accuracy: float | None
    gain: float | None
    gain_error: float | None
    held_out_agreement: Agreements
    harmful: bool | None
    """By gold labels, else None."""
    disagrees: NotRequired[bool | None]
    """Whether the others agree more without it; None if no held-out teacher shares labels."""


class AuditedTeacher(TypedDict):
    teacher: str
    labels: int
    mean_confidence: float | None
    wins: float | None
    """Share of the texts on which it is the most confident."""
    wins_by_weights: float | None
    left_out: LeftOut | None
    """None for a single teacher."""


class Conflicts(TypedDict):
    """By pair of teachers: share of the texts on which both are confident and predict different labels."""

    teachers: list[str]
    confident_from: float
    shares: list[list[float]]


class SharedLabels(TypedDict):
    """Two teachers on the texts for which one of them predicts a label that they share."""

    teachers: list[str]
    labels: list[str]
    given: list[int]
    """By teacher: the texts for which it predicts a shared label."""
    same: int
    """Texts for which both predict the same one."""


class AuditedLabel(TypedDict):
    teacher: str
    label: str
    predicted: int
    wins: float | None


class AuditedGold(TypedDict):
    """The texts with one gold label: shares that each teacher wins, and that the union predicts right."""

    label: str
    texts: int
    won: dict[str, float | None]
    right: float | None


class Duplicates(TypedDict):
    """Two teachers that are one model, or predict almost the same."""

    teachers: list[str]
    agreement: float | None
    distance: float | None
    same_model: bool


class AuditSection(TypedDict):
    """The teachers' audit, as `amalgam audit --json` prints it."""

    passes: NotRequired[PassAudit]
    """Of `cache.passes: auto`, where most texts run none."""
    texts: int
    labelled: int
    weights: str
    uncertainty: str
    accuracy: float | None
    teachers: list[AuditedTeacher]
    conflicts: Conflicts
    shared_labels: list[SharedLabels]
    labels: list[AuditedLabel]
    gold: list[AuditedGold]
    duplicates: list[Duplicates]


# ---- the targets on a sample of the training texts


class Histogram(TypedDict):
    n: int
    low: float
    high: float
    counts: list[int]
    mean: NotRequired[float | None]


class TargetCounts(TypedDict):
    labelled: int
    right: int | None
    """Labelled texts whose target has the gold label first; None if a target is no distribution over the labels."""
    margin: dict[str, Histogram] | None
    summary: TargetSummary


class TeacherUncertainty(TypedDict):
    """Uncertainty of teachers with and without the text's gold label."""

    right: Histogram
    wrong: Histogram
    separation: float | None
    """How often the former is smaller, for two teachers of one text."""


class TeacherChoice(TypedDict):
    """How often the leading teacher of a labelled text has its gold label."""

    by: Literal["confidence", "weights"]
    n: int
    right: int
    chance: float | None
    """The same for a random teacher."""
    oracle: int
    """Texts that a teacher predicts right."""


class TargetMixture(TypedDict):
    mean: dict[str, float]
    """By teacher: its mean weight."""
    largest: Histogram


class DisputedSide(TypedDict):
    teacher: str
    label: str
    confidence: float


class DisputedText(TypedDict):
    """A text on which two confident teachers predict different labels."""

    text: str
    gold: str | None
    sides: list[DisputedSide]


class TargetQuality(TypedDict, total=False):
    """The targets and the teachers on a sample of the training texts; only the first three exist without teachers."""

    texts: int
    sample: int
    targets: TargetCounts
    audit: AuditSection
    labelled: int
    uncertainty: TeacherUncertainty | None
    choice: TeacherChoice
    mixture: TargetMixture
    disputed: list[DisputedText]


# ---- findings.json


class ScriptCounts(TypedDict):
    """The first n texts of a part by writing system."""

    n: int
    scripts: dict[str, int]


class Findings(TypedDict):
    """findings.json: everything that the page shows of texts, apart from the evaluation."""

    student_quality: StudentQuality | None
    target_quality: TargetQuality | None
    unlabelled: types.UnlabelledQuality | None
    linear_map: types.PairedCounts | None
    """The student and a linear map of its encoder's states on held-out training texts; right is the targets' label."""
    scripts: dict[str, ScriptCounts]
    label_estimates: NotRequired[types.LabelEstimates]
    """Only with labelled training texts that the student was not trained on."""
    unknown_share: NotRequired[types.ShareOfUnknown | None]
    given_labels: NotRequired[list[types.LabelOccurrence]]
    """Labels of `labels`, only if it has no text of the labels that only one teacher has."""


# ---- reports/NAME.json


class TeacherLabels(TypedDict):
    teacher: str
    n: int
    alone: int
    """Labels of no other teacher."""
    shown: list[str]
    content: str
    """Digest of the teacher's files."""


class LabelsSection(TypedDict):
    n: int
    shared: int
    teachers: list[TeacherLabels]


class PartCounts(TypedDict):
    part: str
    rows: int
    texts: int
    duplicates: int
    conflicts: int
    over_limit: int
    skipped: dict[str, int]
    labels: int


class DataSection(TypedDict):
    parts: list[PartCounts]
    leaks: dict[str, int]
    """By part: its texts that are training texts too."""
    learned_by_teachers: dict[str, int]
    """By part: its texts that are in `train_teachers.texts` too."""
    cut: dict[str, int]
    """By teacher: truncated texts."""
    cut_student: int | None
    scripts: dict[str, ScriptCounts]


class StageSection(TypedDict):
    stage: str
    needs: list[str]
    fingerprint: str
    description: str
    bytes: int
    seconds: float | None
    units: int | None
    reused_units: int | None
    state: Literal["made", "made in part", "reused"]


class TeacherCost(TypedDict):
    """The work of a teacher's cached predictions."""

    teacher: str
    seconds: float
    text_passes: int
    tokens: int


class ModelSize(TypedDict):
    model: str
    parameters: int | None
    per_second: float | None
    """Texts of the student, or text-passes of a teacher."""


class StudentSection(TypedDict):
    steps: int
    best_step: int
    best_score: float
    selected_by: str
    dtype: str | None
    bytes: int
    libraries: dict[str, str]


class NamedStudent(StudentScores):
    name: str
    supervised: bool


class AccuracyLoss(TypedDict):
    """A step from the teachers to the student: the accuracy after it, and the loss, which may be negative."""

    step: str
    right: float
    n: int
    where: str
    """The texts: test texts, or training texts with gold labels."""
    lost: float


class Note(TypedDict):
    stage: str
    note: str


class ReportJson(TypedDict):
    """reports/NAME.json; `evaluation` is None without labelled test texts."""

    amalgam_report: int
    name: str
    date: str | None
    """Date of the evaluation, UTC."""
    method: str
    learns: bool
    fingerprint: str
    evaluation: EvaluationSection | None
    student_quality: StudentQuality | None
    target_quality: TargetQuality | None
    chance: float | None
    """Accuracy of always predicting the most frequent label."""
    supervised: StudentScores | None
    sweep: list[SweepPoint]
    students: list[NamedStudent]
    """Other students of the workspace, evaluated on the same test texts."""
    labels: LabelsSection
    data: DataSection
    stages: list[StageSection]
    teacher_costs: list[TeacherCost]
    models: list[ModelSize]
    student: StudentSection | None
    libraries: dict[str, str]
    test: str | None
    """Digest of the labelled test texts."""
    settings: dict[str, Any]
    accuracy_losses: list[AccuracyLoss]
    summary: list[str]
    verdict: types.Verdict | None
    """None if no student was trained."""
    unlabelled: types.UnlabelledQuality | None
    """Without labelled test texts."""
    linear_map: types.PairedCounts | None
    label_estimates: types.LabelEstimates | None
    """Accuracies on labelled training texts that the student was not trained on."""
    unknown_share: types.ShareOfUnknown | None
    """None without `corpus.unknown`, or without random labelled texts."""
    given_labels: list[types.LabelOccurrence]
    """Empty if `labels` has a text of a label that only one teacher has, for each such teacher."""
    notes: list[Note]
