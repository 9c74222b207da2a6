"""TARGET_METHODS: one class for each value of `targets.mode`, with the fields it reads, its loss and its rule.

A new method is a class here, a line in TARGET_METHODS, and its name in `targets.mode` of the schema. Importing this
file loads neither Polars nor NumPy; `build` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from amalgam.data.keys import LabelSpace
from amalgam.pipeline.config.schema import COMPARATIVE, ExperimentConfig, Targets

if TYPE_CHECKING:
    import polars as pl

LEAST_MARGIN = 1e-6


@dataclass(frozen=True)
class Evidence:
    """The cached predictions of one teacher, a row for each text."""

    teacher: str
    logits: pl.Series
    """With dropout off."""
    distribution: pl.Series
    """Over the teacher's own labels, as `targets.distribution` selects it."""
    confidence: pl.Series


@dataclass(frozen=True)
class TargetInputs:
    """The inputs of a rule for a block of texts."""

    space: LabelSpace
    targets: Targets
    gold: pl.Series
    """Gold label names; null where a text has none."""
    evidence: Sequence[Evidence] = ()
    """By teacher, in the order of `space.columns`."""
    weights: pl.Series | None = None
    """Each text's teacher weights from weigh-teachers; None: the confidences give the weights."""


@dataclass(frozen=True)
class TargetBatch:
    """The targets of a block of texts, a row for each text."""

    target: pl.Series
    weight: pl.Series
    """The text's weight in the loss."""
    teacher: pl.Series
    """The teacher with the largest weight; null where the method compares no teachers."""
    margin: pl.Series
    confidence: pl.Series


class TargetMethod:
    """One way to build targets. A subclass overrides the defaults that differ."""

    loss: ClassVar[str] = "kl"
    """Loss of the student: kl, restricted (each teacher's own labels), scores (logits), mt-bert."""
    reads_teachers: ClassVar[bool] = True
    weighted: ClassVar[bool] = False
    """Whether the target is a weighted sum of teachers, which `targets.teacher_weights` and `text_weights` control."""
    winner_takes_all: ClassVar[bool] = False
    """Whether the teacher with the largest weight gets all of it."""
    confidence_is_weight: ClassVar[bool] = False
    """Whether the confidences of all teachers are weights already, and sum to 1."""
    tempered: ClassVar[bool] = False
    """Whether the student's logits are divided by `targets.kd_temperature` too."""
    one_label_set: ClassVar[bool] = False
    """Whether all teachers must have the same labels."""

    def fields(self, targets: Targets) -> set[str]:  # noqa: ARG002 - a method may ignore its settings
        """Returns the fields of `targets` that change the result; all others never rebuild targets."""
        return {"mode", "kd_temperature"} if self.tempered else {"mode"}

    def reads_gold(self, targets: Targets) -> bool:  # noqa: ARG002
        """Returns whether gold labels of the training texts enter the targets."""
        return False

    def reads_confidence(self, targets: Targets) -> bool:  # noqa: ARG002
        """Returns whether each text's own confidences enter the targets."""
        return False

    def reads_passes(self, targets: Targets) -> bool:  # noqa: ARG002
        """Returns whether the Monte-Carlo dropout passes enter the targets."""
        return False

    def full_name(self, experiment: ExperimentConfig, name: str) -> str:  # noqa: ARG002
        """Returns the name in a report: `name` and the parts that the experiment leaves out."""
        return name

    def build(self, inputs: TargetInputs) -> TargetBatch:
        """Builds the targets of a block of texts."""
        raise NotImplementedError


class MukaSoft(TargetMethod):
    """MUKA-Soft (Li et al. 2021): sum of w_i pad_i(T_i) with w = softmax(confidence / tau)."""

    weighted = True

    def fields(self, targets: Targets) -> set[str]:
        read = {"mode", "distribution", "text_weights"}
        if weighs_together(targets):
            return read
        return read | {"uncertainty"} | (set() if self.winner_takes_all else {"temperature"})

    def reads_confidence(self, targets: Targets) -> bool:
        return not weighs_together(targets)

    def reads_passes(self, targets: Targets) -> bool:
        measured = self.reads_confidence(targets) and targets.uncertainty not in COMPARATIVE
        return measured or targets.distribution == "mc-mean"

    def full_name(self, experiment: ExperimentConfig, name: str) -> str:
        targets = experiment.targets
        passes = experiment.cache.passes if targets.passes is None else targets.passes
        omitted = {
            "MC dropout": passes == 0 and not weighs_together(targets),
            "re-weighting": targets.text_weights == "none",
        }
        return _without(name, omitted)

    def build(self, inputs: TargetInputs) -> TargetBatch:
        from amalgam.data.arrays import columns_of, first_label

        scores = _scores(inputs)
        margin = _margin(scores)
        distributions = [evidence.distribution for evidence in inputs.evidence]
        if inputs.targets.distribution == "top-label":
            distributions = [first_label(distribution) for distribution in distributions]
        weight = _ones(len(margin)) if inputs.targets.text_weights == "none" else margin
        return _chosen(inputs, scores, distributions, columns_of(self.shares(scores, inputs)), weight)

    def shares(self, scores: pl.Series, inputs: TargetInputs) -> pl.Series:
        """Returns the teachers' weights on each text."""
        import polars as pl

        from amalgam.data.arrays import softmax_column

        if inputs.weights is not None:
            return scores.cast(pl.Array(pl.Float64, len(inputs.evidence)))
        return softmax_column(scores / inputs.targets.temperature)


class MukaHard(MukaSoft):
    """MUKA-Hard (Li et al. 2021): the most confident teacher's distribution, padded."""

    winner_takes_all = True

    def shares(self, scores: pl.Series, inputs: TargetInputs) -> pl.Series:  # noqa: ARG002 - as MukaSoft
        from amalgam.data.arrays import first_label

        return first_label(scores)


class StrataNet(TargetMethod):
    """StrataNet (Vijayaraghavan et al. 2024): tempered teachers, weighted by how close a text is to their domains."""

    tempered = True
    confidence_is_weight = True

    def fields(self, targets: Targets) -> set[str]:
        return super().fields(targets) | {"uncertainty"}

    def reads_confidence(self, targets: Targets) -> bool:  # noqa: ARG002
        return True

    def full_name(self, experiment: ExperimentConfig, name: str) -> str:
        objective, targets = experiment.objective, experiment.targets
        if objective.name not in {"stratanet", "targets"}:
            return name
        parts: list[str] = [targets.uncertainty] if targets.uncertainty != "rmd" else []
        parts += (
            [f"reference_fraction {targets.reference_fraction:g}"]
            if targets.reference_fraction != Targets().reference_fraction
            else []
        )
        parts += [objective.fusion] if objective.name == "stratanet" and objective.fusion != "st" else []
        full = f"stratanet ({', '.join(parts)})" if parts else "stratanet"
        return _without(full, {"amalgamated states": objective.name == "targets"})

    def build(self, inputs: TargetInputs) -> TargetBatch:
        from amalgam.data.arrays import columns_of

        scores = _scores(inputs)
        return _chosen(inputs, scores, _tempered(inputs), columns_of(scores), _ones(len(scores)))


class VanillaKD(TargetMethod):
    """Hinton et al. 2015: one softmax over the logits of all teachers; a shared label gets the sum of its entries."""

    tempered = True

    def build(self, inputs: TargetInputs) -> TargetBatch:
        import polars as pl

        from amalgam.data.arrays import columns_of, side_by_side, softmax_column

        logits = [column.cast(pl.Float64) for evidence in inputs.evidence for column in columns_of(evidence.logits)]
        share = softmax_column(side_by_side(logits, "logits") / inputs.targets.kd_temperature)
        owners = [label for evidence in inputs.evidence for label in inputs.space.columns[evidence.teacher]]
        return unweighted(add_up(zip(owners, columns_of(share), strict=True), inputs.space), inputs)


class UHC(TargetMethod):
    """UHC (Vongkulbhisal et al. 2019): each teacher's distribution, for a loss on its own labels."""

    loss = "restricted"
    tempered = True

    def build(self, inputs: TargetInputs) -> TargetBatch:
        from amalgam.data.arrays import columns_of, side_by_side

        sides = [column for distribution in _tempered(inputs) for column in columns_of(distribution)]
        return unweighted(side_by_side(sides, "target"), inputs)


class Scores(TargetMethod):
    """The logits of all teachers next to each other."""

    loss = "scores"

    def build(self, inputs: TargetInputs) -> TargetBatch:
        from amalgam.data.arrays import columns_of, side_by_side

        sides = [column for evidence in inputs.evidence for column in columns_of(evidence.logits)]
        return unweighted(side_by_side(sides, "target"), inputs)


class MTBert(TargetMethod):
    """MT-BERT (Wu et al. 2021): sum of y_i(t) / (1 + CE(y, y_i)) over the teachers, next to the gold label.

    Cross-entropy is linear in its target, so the loss of the weighted sum is the weighted sum of the losses. CE(y, y_i)
    is at temperature 1. A text whose label no teacher has, which `on_bad_row: skip` lets pass, gets weight 0.
    """

    loss = "mt-bert"
    tempered = True
    one_label_set = True

    def fields(self, targets: Targets) -> set[str]:
        return super().fields(targets) | {"text_weights", "task_loss"}

    def reads_gold(self, targets: Targets) -> bool:
        return targets.task_loss or targets.text_weights != "none"

    def full_name(self, experiment: ExperimentConfig, name: str) -> str:
        if experiment.objective.name not in {"mt-bert", "targets"}:
            return name
        omitted = {
            "hidden loss": experiment.objective.name == "targets",
            "weighting": experiment.targets.text_weights == "none",
            "task loss": not experiment.targets.task_loss,
        }
        return _without("mt-bert", omitted)

    def build(self, inputs: TargetInputs) -> TargetBatch:
        from amalgam.data.arrays import columns_of, side_by_side

        targets, space = inputs.targets, inputs.space
        gold = one_hot(inputs.gold.fill_null(""), space)
        has_label = gold.arr.sum()
        entries: list[tuple[int, pl.Series]] = []
        for distribution, evidence in zip(_tempered(inputs), inputs.evidence, strict=True):
            own = space.columns[evidence.teacher]
            columns = columns_of(distribution)
            if targets.text_weights != "none":
                weight = 1 / (1 + has_label * _cross_entropy(evidence, gold, own))
                columns = [column * weight for column in columns]
            entries += zip(own, columns, strict=True)
        taught = columns_of(add_up(entries, space))
        gold_parts = [column * float(targets.task_loss) for column in columns_of(gold)]
        batch = unweighted(side_by_side([*taught, *gold_parts], "target"), inputs)
        return replace(batch, weight=has_label) if self.reads_gold(targets) else batch


class Supervised(TargetMethod):
    """Cross-entropy on the gold labels: the upper bound."""

    reads_teachers = False

    def reads_gold(self, targets: Targets) -> bool:  # noqa: ARG002
        return True

    def build(self, inputs: TargetInputs) -> TargetBatch:
        return unweighted(one_hot(inputs.gold, inputs.space), inputs)


TARGET_METHODS: Mapping[str, TargetMethod] = {
    "soft": MukaSoft(),
    "hard": MukaHard(),
    "vanilla-kd": VanillaKD(),
    "uhc": UHC(),
    "scores": Scores(),
    "mt-bert": MTBert(),
    "stratanet": StrataNet(),
    "supervised": Supervised(),
}


def target_method(targets: Targets) -> TargetMethod:
    """Returns the method that `targets.mode` names."""
    return TARGET_METHODS[targets.mode]


def weighs_together(targets: Targets) -> bool:
    """Returns whether weigh-teachers computes the weights, from all texts together."""
    return target_method(targets).weighted and targets.teacher_weights != "muka"


def weighs_by_domain(targets: Targets) -> bool:
    """Returns whether a text's distance from each teacher's domain gives the weights."""
    return targets.uncertainty in COMPARATIVE and target_method(targets).reads_confidence(targets)


# ---- parts of rules


def unweighted(target: pl.Series, inputs: TargetInputs) -> TargetBatch:
    """Returns targets of a rule that compares no teachers: every text has weight 1."""
    import polars as pl

    from amalgam.data.arrays import constant

    texts, teachers = len(target), max(len(inputs.space.columns), 1)
    confidence = constant(None, pl.Array(pl.Float64, teachers), texts)
    return TargetBatch(
        target, _ones(texts), constant(None, pl.String, texts), constant(None, pl.Float64, texts), confidence
    )


def one_hot(gold: pl.Series, space: LabelSpace) -> pl.Series:
    """Returns 1 at the gold label and 0 elsewhere; all 0 for a label outside the union."""
    import polars as pl

    from amalgam.data.arrays import side_by_side

    return side_by_side([(gold == name).cast(pl.Float64) for name in space.names], "target")


def add_up(entries: Iterable[tuple[int, pl.Series]], space: LabelSpace) -> pl.Series:
    """Returns arrays over the union: the columns of each label, added in the order of the teachers."""
    from amalgam.data.arrays import side_by_side, total

    columns: list[list[pl.Series]] = [[] for _ in space.names]
    for label, column in entries:
        columns[label].append(column)
    return side_by_side([total(parts) for parts in columns], "target")


def _chosen(
    inputs: TargetInputs,
    scores: pl.Series,
    distributions: Sequence[pl.Series],
    shares: Sequence[pl.Series],
    weight: pl.Series,
) -> TargetBatch:
    """Returns sum_i w_i pad_i(T_i), where entries of a shared label are added."""
    import polars as pl

    from amalgam.data.arrays import columns_of

    entries = [
        (label, column * share)
        for distribution, share, evidence in zip(distributions, shares, inputs.evidence, strict=True)
        for label, column in zip(inputs.space.columns[evidence.teacher], columns_of(distribution), strict=True)
    ]
    names = pl.Series([evidence.teacher for evidence in inputs.evidence], dtype=pl.String)
    return TargetBatch(
        add_up(entries, inputs.space), weight, names.gather(scores.arr.arg_max()), _margin(scores), scores
    )


def _scores(inputs: TargetInputs) -> pl.Series:
    """Returns one number for each text and teacher: the given weight, else the confidence."""
    from amalgam.data.arrays import side_by_side

    if inputs.weights is not None:
        return inputs.weights
    return side_by_side([evidence.confidence for evidence in inputs.evidence], "confidence")


def _tempered(inputs: TargetInputs) -> list[pl.Series]:
    """Returns each teacher's softmax(logits / T)."""
    import polars as pl

    from amalgam.data.arrays import softmax_column, width

    return [
        softmax_column(
            evidence.logits.cast(pl.Array(pl.Float64, width(evidence.logits))) / inputs.targets.kd_temperature
        )
        for evidence in inputs.evidence
    ]


def _cross_entropy(evidence: Evidence, gold: pl.Series, own: Sequence[int]) -> pl.Series:
    """Returns -log of the teacher's probability of the gold label, from logits: it stays finite for any logits."""
    import polars as pl

    from amalgam.data.arrays import column, columns_of, side_by_side, total

    logits = [series.cast(pl.Float64) for series in columns_of(evidence.logits)]
    of_gold = total(column(gold, label) * logit for label, logit in zip(own, logits, strict=True))
    top = side_by_side(logits, "logits").arr.max()
    return top + total((logit - top).exp() for logit in logits).log() - of_gold


def _margin(scores: pl.Series) -> pl.Series:
    """Returns c_max - c_second + 1e-6; 1 for a single teacher."""
    import polars as pl

    from amalgam.data.arrays import top_margin, width

    if width(scores) == 1:
        return _ones(len(scores))
    return pl.Series("confidence", top_margin(scores.to_numpy()) + LEAST_MARGIN)


def _ones(texts: int) -> pl.Series:
    import polars as pl

    from amalgam.data.arrays import constant

    return constant(1.0, pl.Float64, texts)


def _without(name: str, omitted: Mapping[str, bool]) -> str:
    return " ".join([name, *(f"w/o {part}" for part, absent in omitted.items() if absent)])


def measure_of(experiment: ExperimentConfig) -> str | None:
    """Returns the measure, or None without one; stratanet uses rmd where the targets name no measure."""
    uncertainty = experiment.targets.uncertainty
    if experiment.objective.name == "stratanet":
        return uncertainty if uncertainty in COMPARATIVE else "rmd"
    return uncertainty if weighs_by_domain(experiment.targets) else None
