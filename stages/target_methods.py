"""TARGET_METHODS: the inputs of every `targets.mode`, and the target rules.

A new target method is a class here and a line in TARGET_METHODS. This file imports neither Polars nor NumPy; `build`
does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypedDict

from amalgam.data.arrays import Array, columns_of, first_label, side_by_side, softmax_column, top_margin, total, width
from amalgam.data.keys import LabelSpace
from amalgam.data.lazy import np, pl
from amalgam.pipeline.config.schema import Checks, ExperimentConfig, Targets

LEAST_MARGIN = 1e-6

COMPARATIVE = ("rmd", "md", "msp")
"""Values of `targets.uncertainty` that compare teachers by distance from each one's own texts."""

OF_PASSES = ("mutual-information", "variation-ratio")
"""Values of `targets.uncertainty` that compare the passes of a text: equal passes, or a single one, look certain."""


@dataclass(frozen=True)
class TeacherPredictions:
    """The cached predictions of one teacher, a row for each text."""

    name: str
    """The teacher."""
    logits: pl.Series
    """With dropout off."""
    distribution: pl.Series
    """Over the teacher's own labels, as `targets.distribution` selects it."""
    confidence: pl.Series
    own: pl.Series | None = None
    """Probability of its labels together, where it has outputs that mean none of them."""


@dataclass(frozen=True)
class TargetInputs:
    """The inputs of a rule for a block of texts."""

    space: LabelSpace
    gold: pl.Series
    """Gold label names; null where a text has none."""
    predictions: Sequence[TeacherPredictions] = ()
    """By teacher, in the order of `space.columns`."""
    weights: pl.Series | None = None
    """Each text's teacher weights from weigh-teachers; None: the confidences give the weights."""


@dataclass(frozen=True)
class TargetBatch:
    """The targets of a block of texts, a row for each text."""

    target: pl.Series
    weight: pl.Series
    """The text's weight in the loss."""
    teacher: pl.Series | None = None
    """The teacher with the largest weight; it, the margin and the confidences are None without a comparison."""
    margin: pl.Series | None = None
    confidence: pl.Series | None = None


class LossFacts(TypedDict):
    """The student's loss in the manifest of build-targets."""

    objective: str
    columns: Sequence[Sequence[int]]
    student_temperature: float


def gives_label_distributions(loss: str) -> bool:
    """Returns whether the targets of this loss are distributions over the union of labels, and not over teachers."""
    return loss == "kl"


class TargetMethod:
    """One way to build targets. A subclass overrides the defaults that differ."""

    version: ClassVar[int] = 1
    """Another one makes targets, students and reports of this method stale."""
    loss: ClassVar[str] = "kl"
    """Loss of the student: kl, restricted (each teacher's own labels), scores (logits), mt-bert."""
    reads_teachers: ClassVar[bool] = True
    reads_teacher_weights: ClassVar[bool] = False
    """Whether `targets.teacher_weights` and `text_weights` control the target, a weighted sum of teachers."""
    confidence_is_weight: ClassVar[bool] = False
    """Whether the confidences of all teachers are weights already, and sum to 1."""
    tempered: ClassVar[bool] = False
    """Whether the student's logits are divided by `targets.kd_temperature` too."""
    one_label_set: ClassVar[bool] = False
    """Whether all teachers must have the same labels."""
    takes_labels: ClassVar[bool] = True
    """Whether a text with a label in `labels` of the experiment has it as its target."""

    def __init__(self, targets: Targets) -> None:
        self.targets = targets

    @property
    def fields(self) -> set[str]:
        """Returns the fields of `targets` that change the result; all others never rebuild targets."""
        return {"mode", "kd_temperature"} if self.tempered else {"mode"}

    @property
    def reads_gold(self) -> bool:
        """Returns whether gold labels of the training texts enter the targets."""
        return False

    @property
    def reads_confidence(self) -> bool:
        """Returns whether each text's own confidences enter the targets."""
        return False

    @property
    def reads_passes(self) -> bool:
        """Returns whether the Monte-Carlo dropout passes enter the targets."""
        return False

    @property
    def compares_passes(self) -> bool:
        """Returns whether the confidences measure how much a text's passes differ."""
        return self.targets.uncertainty in OF_PASSES and (self.reads_confidence or self.estimates_weights)

    @property
    def weighs_by_domain(self) -> bool:
        """Returns whether a text's distance from each teacher's domain gives the weights."""
        return self.reads_confidence and self.targets.uncertainty in COMPARATIVE

    @property
    def estimates_weights(self) -> bool:
        """Returns whether weigh-teachers computes the weights, from all texts together."""
        return self.reads_teacher_weights and self.targets.teacher_weights != "muka"

    @property
    def reads_states(self) -> bool:
        """Returns whether the teachers' last hidden states are evidence for weigh-teachers."""
        return self.estimates_weights and self.targets.weight_signal == "all"

    @property
    def reads_features(self) -> bool:
        """Returns whether the student's encoder embeds the texts, for neighbours or next to teachers' states."""
        return self.reads_states or (self.estimates_weights and self.targets.neighbours > 0)

    def checks(self) -> Checks:
        """Yields the checks of settings that can contradict the method."""
        yield from ()

    def full_name(self, experiment: ExperimentConfig, name: str) -> str:  # noqa: ARG002 - a default for subclasses
        """Returns the name in a report: `name` and the parts that the experiment leaves out."""
        return name

    def build(self, inputs: TargetInputs) -> TargetBatch:
        """Builds the targets of a block of texts."""
        raise NotImplementedError

    def tempered_distributions(self, inputs: TargetInputs) -> list[pl.Series]:
        """Returns each teacher's softmax(logits / T)."""
        logits = [teacher.logits for teacher in inputs.predictions]
        wide = [teacher_logits.cast(pl.Array(pl.Float64, width(teacher_logits))) for teacher_logits in logits]
        return [softmax_column(teacher_logits / self.targets.kd_temperature) for teacher_logits in wide]


class WeightedSum(TargetMethod):
    """The target is sum of w_i pad_i(T_i), where entries of a shared label are added; a text weighs its margin or 1."""

    def distributions(self, inputs: TargetInputs) -> Sequence[pl.Series]:
        """Returns T_i of each teacher."""
        raise NotImplementedError

    def ranking(self, inputs: TargetInputs, predicted: Array | None = None) -> Ranking:
        """Compares the teachers by the given weights, else by the confidences.

        Teachers that predict one label have one score: the sum of weights, or the highest confidence. `predicted` are
        the first labels of the teachers, if they are computed already.
        """
        confidences = side_by_side([teacher.confidence for teacher in inputs.predictions])
        scores = confidences if inputs.weights is None else inputs.weights
        by_teacher = scores.to_numpy()
        if width(scores) == 1:
            return Ranking(scores, scores.arr.arg_max(), _ones(len(scores)))
        if not inputs.space.shares_labels:
            return Ranking(scores, scores.arr.arg_max(), pl.Series(top_margin(by_teacher) + LEAST_MARGIN))
        predicted = predicted_labels(inputs) if predicted is None else predicted
        are_weights = self.confidence_is_weight or inputs.weights is not None
        combined = by_label(np.add if are_weights else np.maximum, by_teacher, predicted)
        highest = combined.max(axis=1, keepdims=True)
        leader = np.where(combined == highest, by_teacher, -np.inf).argmax(axis=1)
        disagrees = predicted != np.take_along_axis(predicted, leader[:, None], axis=1)
        second = np.where(disagrees, combined, -np.inf).max(axis=1)
        margin = pl.Series(np.where(disagrees.any(axis=1), highest[:, 0] - second + LEAST_MARGIN, 1.0))
        return Ranking(scores, pl.Series(leader), margin, predicted)

    def shares(self, ranking: Ranking, inputs: TargetInputs) -> pl.Series:
        """Returns w_i of each text."""
        raise NotImplementedError

    def build(self, inputs: TargetInputs) -> TargetBatch:
        ranking = self.ranking(inputs)
        shares = columns_of(self.shares(ranking, inputs))
        entries = [
            (label, values * share)
            for distribution, share, teacher in zip(self.distributions(inputs), shares, inputs.predictions, strict=True)
            for label, values in zip(inputs.space.columns[teacher.name], columns_of(distribution), strict=True)
        ]
        names = pl.Series([teacher.name for teacher in inputs.predictions], dtype=pl.String)
        target, chosen, margin = add_up(entries, inputs.space), names.gather(ranking.leader), ranking.margin
        by_margin = "text_weights" in self.fields and self.targets.text_weights == "margin"
        return TargetBatch(target, margin if by_margin else _ones(len(margin)), chosen, margin, ranking.scores)


class MukaSoft(WeightedSum):
    """MUKA-Soft (Li et al. 2021): sum of w_i pad_i(T_i) with w = softmax(confidence / tau)."""

    reads_teacher_weights = True

    @property
    def fields(self) -> set[str]:
        read = {"mode", "distribution", "text_weights"}
        return read if self.estimates_weights else read | {"uncertainty", "temperature"}

    @property
    def reads_confidence(self) -> bool:
        return not self.estimates_weights

    @property
    def reads_passes(self) -> bool:
        measured = self.reads_confidence and self.targets.uncertainty not in COMPARATIVE
        return measured or self.targets.distribution == "mc-mean"

    def checks(self) -> Checks:
        name, weights = self.targets.uncertainty, self.targets.teacher_weights
        message = f"{name} is a weight of its own, for targets.teacher_weights=muka: not with {weights}"
        yield self.estimates_weights and name in COMPARATIVE, "targets.uncertainty", message

    def full_name(self, experiment: ExperimentConfig, name: str) -> str:
        targets = self.targets
        passes = experiment.cache.passes if targets.passes is None else targets.passes
        omitted = {
            "MC dropout": passes == 0 and not self.estimates_weights,
            "re-weighting": targets.text_weights == "none",
        }
        return _without(name, omitted)

    def distributions(self, inputs: TargetInputs) -> Sequence[pl.Series]:
        distributions = [teacher.distribution for teacher in inputs.predictions]
        return list(map(first_label, distributions)) if self.targets.distribution == "top-label" else distributions

    def shares(self, ranking: Ranking, inputs: TargetInputs) -> pl.Series:
        """Returns the teachers' weights on each text; teachers with the same label divide the weight of one."""
        if inputs.weights is not None:
            return ranking.scores.cast(pl.Array(pl.Float64, len(inputs.predictions)))
        logits = ranking.scores / self.targets.temperature
        if ranking.predicted is None:
            return softmax_column(logits)
        divided = divided_by_label(logits.to_numpy(), ranking.predicted)
        return softmax_column(side_by_side([pl.Series(column) for column in divided.T]))


class MukaHard(MukaSoft):
    """MUKA-Hard (Li et al. 2021): the most confident teacher's distribution, padded."""

    @property
    def fields(self) -> set[str]:
        return super().fields - {"temperature"}

    def shares(self, ranking: Ranking, inputs: TargetInputs) -> pl.Series:
        return side_by_side([(ranking.leader == index).cast(pl.Float64) for index in range(len(inputs.predictions))])


class StrataNet(WeightedSum):
    """StrataNet (Vijayaraghavan et al. 2024): tempered teachers, weighted by how close a text is to their domains."""

    tempered = True
    confidence_is_weight = True
    fields: ClassVar[set[str]] = {"mode", "kd_temperature", "uncertainty"}
    reads_confidence = True

    def checks(self) -> Checks:
        name = self.targets.uncertainty
        message = f"{name} does not measure how far a text is from a teacher's domain, which stratanet needs"
        yield name not in COMPARATIVE, "targets.uncertainty", f"{message}: {', '.join(COMPARATIVE)}"

    def full_name(self, experiment: ExperimentConfig, name: str) -> str:
        objective, targets = experiment.objective, self.targets
        if name != targets.mode:  # with the objective of another method
            return name
        amalgamates = objective.name == targets.mode
        parts: list[str] = [targets.uncertainty] if targets.uncertainty != "rmd" else []
        if targets.reference_fraction != Targets().reference_fraction:
            parts.append(f"reference_fraction {targets.reference_fraction:g}")
        if amalgamates and objective.fusion != "st":
            parts.append(objective.fusion)
        return _without(f"{name} ({', '.join(parts)})" if parts else name, {"amalgamated states": not amalgamates})

    def distributions(self, inputs: TargetInputs) -> Sequence[pl.Series]:
        return self.tempered_distributions(inputs)

    def shares(self, ranking: Ranking, inputs: TargetInputs) -> pl.Series:  # noqa: ARG002
        return ranking.scores


class VanillaKD(TargetMethod):
    """Hinton et al. 2015: one softmax over the logits of all teachers; a shared label gets the sum of its entries."""

    tempered = True

    def build(self, inputs: TargetInputs) -> TargetBatch:
        logits = [logit.cast(pl.Float64) for teacher in inputs.predictions for logit in columns_of(teacher.logits)]
        share = softmax_column(side_by_side(logits) / self.targets.kd_temperature)
        owners = [label for teacher in inputs.predictions for label in inputs.space.columns[teacher.name]]
        return unweighted(add_up(zip(owners, columns_of(share), strict=True), inputs.space))


class UHC(TargetMethod):
    """UHC (Vongkulbhisal et al. 2019): each teacher's distribution, for a loss on its own labels."""

    loss = "restricted"
    tempered = True

    def build(self, inputs: TargetInputs) -> TargetBatch:
        distributions = self.tempered_distributions(inputs)
        return unweighted(side_by_side([share for distribution in distributions for share in columns_of(distribution)]))


class Scores(TargetMethod):
    """The logits of all teachers next to each other."""

    loss = "scores"
    takes_labels = False

    def build(self, inputs: TargetInputs) -> TargetBatch:
        logits = [logit for teacher in inputs.predictions for logit in columns_of(teacher.logits)]
        return unweighted(side_by_side(logits))


class MTBert(TargetMethod):
    """MT-BERT (Wu et al. 2021): sum of y_i(t) / (1 + CE(y, y_i)) over the teachers, next to the gold label.

    Cross-entropy is linear in its target, so the loss of the weighted sum is the weighted sum of the losses. CE(y, y_i)
    is at temperature 1. A text whose label no teacher has, which `on_bad_row: skip` lets pass, gets weight 0.
    """

    loss = "mt-bert"
    tempered = True
    one_label_set = True
    takes_labels = False
    fields: ClassVar[set[str]] = {"mode", "kd_temperature", "text_weights", "task_loss"}

    @property
    def reads_gold(self) -> bool:
        return self.targets.task_loss or self.targets.text_weights != "none"

    def full_name(self, experiment: ExperimentConfig, name: str) -> str:
        if name != self.targets.mode:  # with the objective of another method
            return name
        omitted = {
            "hidden loss": experiment.objective.name != self.targets.mode,
            "weighting": self.targets.text_weights == "none",
            "task loss": not self.targets.task_loss,
        }
        return _without(name, omitted)

    def build(self, inputs: TargetInputs) -> TargetBatch:
        space = inputs.space
        gold = one_hot(inputs.gold.fill_null(""), space)
        has_label = gold.arr.sum()
        entries: list[tuple[int, pl.Series]] = []
        for distribution, teacher in zip(self.tempered_distributions(inputs), inputs.predictions, strict=True):
            columns = space.columns[teacher.name]
            shares = columns_of(distribution)
            if self.targets.text_weights != "none":
                weight = 1 / (1 + has_label * _cross_entropy(teacher, gold, columns))
                shares = [share * weight for share in shares]
            entries += zip(columns, shares, strict=True)
        taught = columns_of(add_up(entries, space))
        gold_parts = [part * float(self.targets.task_loss) for part in columns_of(gold)]
        batch = unweighted(side_by_side([*taught, *gold_parts]))
        return replace(batch, weight=has_label) if self.reads_gold else batch


class Supervised(TargetMethod):
    """Cross-entropy on the gold labels, for comparison."""

    version = 2  # a text with a label outside the union has weight 0
    reads_teachers = False
    reads_gold = True
    takes_labels = False

    def build(self, inputs: TargetInputs) -> TargetBatch:
        target = one_hot(inputs.gold, inputs.space)
        return TargetBatch(target, target.arr.sum())


TARGET_METHODS: Mapping[str, type[TargetMethod]] = {
    "soft": MukaSoft,
    "hard": MukaHard,
    "vanilla-kd": VanillaKD,
    "uhc": UHC,
    "scores": Scores,
    "mt-bert": MTBert,
    "stratanet": StrataNet,
    "supervised": Supervised,
}


def target_method(targets: Targets) -> TargetMethod:
    """Returns the method that `targets.mode` names."""
    return TARGET_METHODS[targets.mode](targets)


def compared_by(targets: Targets) -> Targets:
    """Returns the settings by which a report compares teachers: the targets' own, else MUKA's entropy.

    A temperature that the targets do not read has its default here.
    """
    method = target_method(targets)
    if "temperature" in method.fields or method.estimates_weights:
        return targets
    if method.reads_teacher_weights or method.weighs_by_domain:
        return targets.model_copy(update={"temperature": Targets().temperature})
    return Targets(passes=targets.passes)


# ---- parts of rules


def unweighted(target: pl.Series) -> TargetBatch:
    """Returns targets of a rule that compares no teachers: every text has weight 1."""
    return TargetBatch(target, _ones(len(target)))


def one_hot(gold: pl.Series, space: LabelSpace) -> pl.Series:
    """Returns 1 at the gold label and 0 elsewhere; all 0 for a label outside the union."""
    return side_by_side([(gold == name).cast(pl.Float64) for name in space.names])


def add_up(entries: Iterable[tuple[int, pl.Series]], space: LabelSpace) -> pl.Series:
    """Returns arrays over the union: the columns of each label, added in the order of the teachers."""
    columns: list[list[pl.Series]] = [[] for _ in space.names]
    for label, values in entries:
        columns[label].append(values)
    return side_by_side([total(parts) for parts in columns])


def _cross_entropy(teacher: TeacherPredictions, gold: pl.Series, columns: Sequence[int]) -> pl.Series:
    """Returns -log of the teacher's probability of the gold label, from logits: it stays finite for any logits."""
    logits = [logit.cast(pl.Float64) for logit in columns_of(teacher.logits)]
    of_gold = total(gold.arr.get(label) * logit for label, logit in zip(columns, logits, strict=True))
    top = side_by_side(logits).arr.max()
    return top + total((logit - top).exp() for logit in logits).log() - of_gold


@dataclass(frozen=True)
class Ranking:
    """The teachers of each text, compared by their scores."""

    scores: pl.Series
    leader: pl.Series
    """Position of the teacher with the highest score."""
    margin: pl.Series
    """The leader's score less that of the best teacher with another label, plus 1e-6; 1 if all labels are equal."""
    predicted: Array | None = None
    """Each teacher's first label [texts, teachers] by position in the union; None if no two teachers share a label."""


def predicted_labels(inputs: TargetInputs) -> Array:
    """Returns each teacher's first label [texts, teachers] by position in the union."""
    columns = [np.array(inputs.space.columns[teacher.name]) for teacher in inputs.predictions]
    first = [teacher.distribution.arr.arg_max().to_numpy() for teacher in inputs.predictions]
    return np.stack([labels[places] for labels, places in zip(columns, first, strict=True)], axis=1)


def by_label(combine: np.ufunc, scores: Array, predicted: Array) -> Array:
    """Returns for each teacher the combined score of all teachers with its label [texts, teachers]."""
    start = 0.0 if combine is np.add else -np.inf
    columns = [combine.reduce(np.where(predicted == labels[:, None], scores, start), axis=1) for labels in predicted.T]
    return np.stack(columns, axis=1)


def divided_by_label(logits: Array, predicted: Array) -> Array:
    """Returns logits of weights with which teachers of one label divide the weight of the most confident of them."""
    return logits + by_label(np.maximum, logits, predicted) - by_label(np.logaddexp, logits, predicted)


def _ones(texts: int) -> pl.Series:
    return pl.Series([1.0], dtype=pl.Float64).new_from_index(0, texts)


def _without(name: str, omitted: Mapping[str, bool]) -> str:
    return " ".join([name, *(f"w/o {part}" for part, absent in omitted.items() if absent)])
