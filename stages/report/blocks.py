"""Types of report.json, of the stored evaluation and of the teachers' audit: one class per block."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class Measures(TypedDict):
    n: int
    accuracy: float
    macro_f1: float
    nll_nats: float | None
    ece: float | None


class Scores(Measures):
    """The measures of one system; `stages.common.metrics.evaluate` defines them."""

    nll_infinite: int
    slice_accuracy: dict[str, float | None]
    slice_n: dict[str, int]
    label_f1: NotRequired[dict[str, float | None]]
    confusion: NotRequired[list[list[int]]]


class EvaluatedSystems(TypedDict):
    n: int
    left_out: int
    systems: dict[str, Scores]
    system: str  # the system that the report is about
    selected_by: str
    adaptive: NotRequired[dict[str, Any]]


class Evaluation(EvaluatedSystems):
    """evaluation.json: every system on the labelled test texts."""

    labels: list[str]
    groups: dict[str, list[str]]


class EvaluationBlock(EvaluatedSystems):
    """The evaluation on the page: without confusion matrices and F1 by label."""

    labels: int
    groups: list[str]


class LabelQuality(TypedDict):
    label: str
    teachers: list[str]
    n: int
    right: int
    predicted: int
    teachers_right: int | None  # texts on which a teacher of this label predicts it


class ConfusedPair(TypedDict):
    gold: str
    predicted: str
    n: int
    of: int


class ConfusedPairs(TypedDict):
    of: int
    pairs: list[ConfusedPair]


class ConfusionMatrix(TypedDict):
    labels: list[str]
    others: int
    counts: list[list[int]]


class CalibrationBin(TypedDict):
    low: float
    high: float
    n: int
    confidence: float
    accuracy: float


class WrongPrediction(TypedDict):
    text: str
    gold: str
    predicted: str
    probability: float
    gold_probability: float


class OwnAccuracy(TypedDict):
    n: int
    right: int


class TeacherQuality(TypedDict):
    n: int
    oracle: int | None
    own: dict[str, OwnAccuracy]


class StudentQuality(TypedDict):
    """The reported system on the test texts: by label, by confidence, and its errors."""

    classes: list[LabelQuality]
    confusions: ConfusedPairs
    matrix: ConfusionMatrix
    calibration: dict[str, list[CalibrationBin]]
    errors: list[WrongPrediction]
    wrong: int
    right_hex: str | None
    teachers: TeacherQuality


class Histogram(TypedDict):
    n: int
    low: float
    high: float
    counts: list[int]
    mean: NotRequired[float | None]


class UncertaintyBlock(TypedDict):
    right: Histogram
    wrong: Histogram
    separation: float | None


class ChoiceBlock(TypedDict):
    by: str
    n: int
    right: int
    chance: float | None
    oracle: int


class MixtureBlock(TypedDict):
    mean: dict[str, float]
    largest: Histogram


class TeacherPrediction(TypedDict):
    teacher: str
    label: str
    confidence: float


class DisputedText(TypedDict):
    text: str
    gold: str | None
    sides: list[TeacherPrediction]


class TargetBlock(TypedDict):
    labelled: int
    right: int | None
    margin: dict[str, Histogram] | None
    summary: dict[str, Any]


class TeacherBlocks(TypedDict, total=False):
    """The blocks about teachers; absent if the student learns without teachers."""

    audit: AuditBlock
    labelled: int
    uncertainty: UncertaintyBlock | None
    choice: ChoiceBlock
    mixture: MixtureBlock
    disputed: list[DisputedText]


class TargetQuality(TeacherBlocks):
    """The targets and the teachers on a sample of the training texts."""

    texts: int
    sample: int
    targets: TargetBlock


HeldOutAgreement = TypedDict("HeldOutAgreement", {"texts": int, "with": float | None, "without": float | None})


class LeftOut(TypedDict):
    """The union without one teacher; `harmful` is None where no text can decide it."""

    changed: float | None
    accuracy: float | None
    gain: float | None
    gain_error: float | None
    held_out_agreement: HeldOutAgreement
    harmful: bool | None


class AuditedTeacher(TypedDict):
    teacher: str
    labels: int
    mean_confidence: float | None
    wins: float | None
    wins_by_weights: float | None
    left_out: LeftOut | None


class Conflicts(TypedDict):
    teachers: list[str]
    confident_from: float
    shares: list[list[float]]


class SharedLabels(TypedDict):
    teachers: list[str]
    labels: list[str]
    texts: int
    disagree: float | None


class AuditedLabel(TypedDict):
    teacher: str
    label: str
    predicted: int
    wins: float | None


class GoldLabel(TypedDict):
    label: str
    texts: int
    won: dict[str, float | None]
    right: float | None


class Duplicate(TypedDict):
    teachers: list[str]
    agreement: float | None
    distance: float | None
    same_model: bool


class AuditBlock(TypedDict):
    """The teachers' audit, as `amalgam audit --json` prints it."""

    texts: int
    labelled: int
    weights: str
    uncertainty: str
    accuracy: float | None
    teachers: list[AuditedTeacher]
    conflicts: Conflicts
    shared_labels: list[SharedLabels]
    labels: list[AuditedLabel]
    gold: list[GoldLabel]
    duplicates: list[Duplicate]


class Scripts(TypedDict):
    n: int
    scripts: dict[str, int]


class Findings(TypedDict):
    """findings.json: everything that the page shows of texts, apart from the evaluation."""

    student_quality: StudentQuality | None
    target_quality: TargetQuality | None
    scripts: dict[str, Scripts]


class StageFacts(TypedDict):
    stage: str
    fingerprint: str
    description: str
    bytes: int
    seconds: float | None
    units: int | None
    reused_units: int | None
    state: str


class TeacherCost(TypedDict):
    teacher: str
    seconds: float
    text_passes: int
    tokens: int


class StudentScores(Measures):
    """Another report of this workspace on the same test texts."""

    fingerprint: str
    method: str


class SweepPoint(StudentScores):
    temperature: float
    ours: bool


class TeacherLabels(TypedDict):
    teacher: str
    n: int
    alone: int
    shown: list[str]
    content: str


class LabelFacts(TypedDict):
    n: int
    shared: int
    teachers: list[TeacherLabels]


class DataFacts(TypedDict):
    parts: list[dict[str, Any]]  # the counts of read-corpus
    leaks: dict[str, int]
    cut: dict[str, int]
    cut_student: int | None
    scripts: dict[str, Scripts]


class AccuracyLoss(TypedDict):
    """One step from the teachers to the student; `lost` is a share of the texts and may be negative."""

    step: str
    right: float
    n: int
    where: str
    lost: float


class ReportJson(TypedDict):
    """reports/NAME.json; `evaluation` is None without labelled test texts."""

    amalgam_report: int
    name: str
    method: str
    learns: bool
    fingerprint: str
    evaluation: EvaluationBlock | None
    student_quality: StudentQuality | None
    target_quality: TargetQuality | None
    chance: float | None
    supervised: StudentScores | None
    sweep: list[SweepPoint]
    labels: LabelFacts
    data: DataFacts
    stages: list[StageFacts]
    teacher_costs: list[TeacherCost]
    student: dict[str, Any] | None  # size, versions and the facts of train-student
    libraries: dict[str, str]
    test: str | None
    settings: dict[str, Any]
    accuracy_losses: list[AccuracyLoss]
    summary: list[str]
