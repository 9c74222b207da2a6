"""Names the likely causes of a bad or unclear student, and the remarks on which the decision does not depend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from amalgam.data.keys import shown_name, shown_names
from amalgam.pipeline.console import counted
from amalgam.stages.common.intervals import interval, percent
from amalgam.stages.common.training.schedule import FEW_STEPS
from amalgam.stages.report.verdict_types import (
    Answered,
    Cause,
    LabelCounts,
    LabelShare,
    Reference,
    Rival,
    RivalCounts,
    UnlabelledQuality,
    VerdictInputs,
)
from amalgam.stages.report.verdict_words import (
    SHOWN,
    difference_sentence,
    learned_sentence,
    ratio,
    selection_sentence,
    unknown_share_line,
)

LEAST_TEXTS = 50
"""Least labelled test texts of a student to ship."""

LEAST_OF_LABEL = 10
"""Least texts of a label or of a teacher's labels that are looked at alone."""

MOST_LOST = 0.05
"""Share of the labels, and of the texts, that a student to ship may lose: one label of 20."""

MOST_LEARNED = 0.02
"""Share of the test texts that may have been learned with their gold labels."""

MANY_UNKNOWN = 0.05
"""Share of training texts of no label, at the lower end of its interval, from which it is a caution."""

MANY_LONG, SKEWED = 0.2, 0.8
"""Share of truncated texts, and share of the most frequent label, from which they are named as a cause."""

HIGH_RATE = 5.0
"""Multiple of the automatic learning rate from which a rate is named as a cause."""

FEW_TEXTS, FEW_TEXTS_PER_LABEL = 200, 10
"""Fewer training texts are named as a cause, in all or per label."""

MANY_WRONG = 0.1
"""Share of the texts that no teacher predicts right from which the teachers' errors are named as a cause.

Every student and the ensemble have these errors, so fewer do not explain why the student is worse than another system.
"""

WEAK_TEACHERS = 2 / 3
"""Accuracy of the teachers on their own labels below which they are weak, at the upper end of the interval."""


def causes_of(inputs: VerdictInputs, rivals: Sequence[Rival]) -> Iterator[Cause]:
    """Yields the likely causes of a bad or unclear student, the most likely first."""
    yield from _training_causes(inputs)
    unpredicted = [row["label"] for row in inputs.labels if row["n"] and not row["predicted"]]
    if not inputs.n and inputs.unlabelled:
        unpredicted = never_predicted(inputs.unlabelled)
    if unpredicted:
        text = f"{counted(len(unpredicted), 'label', 'is', 'are')} never predicted ({shown_names(unpredicted, SHOWN)})"
        yield {"code": "labels-never-predicted", "text": text}
    yield from _teacher_causes(inputs, rivals)
    if inputs.long_texts >= MANY_LONG:
        text = f"{percent(inputs.long_texts)} of the training texts are longer than student.max_tokens"
        yield {"code": "long-texts", "text": text}
    frequent = next((rival for rival in rivals if rival["kind"] == "most frequent label"), None)
    if frequent and frequent["right"] >= SKEWED * frequent["n"]:
        text = f"{ratio(frequent['right'], frequent['n'])} of the test texts have one label, {frequent['name']}"
        yield {"code": "skewed-labels", "text": text}


def _training_causes(inputs: VerdictInputs) -> Iterator[Cause]:
    if inputs.steps is not None and inputs.steps < FEW_STEPS:
        yield {"code": "few-steps", "text": f"{counted(inputs.steps, 'training step', 'is', 'are')} few"}
    rate, automatic = inputs.learning_rate, inputs.automatic_rate
    if rate and automatic and rate >= HIGH_RATE * automatic:
        text = f"the learning rate {rate:g} is {rate / automatic:.0f} times the automatic one, {automatic:g}"
        yield {"code": "high-rate", "text": text}
    labels = len(inputs.unlabelled["labels"] if inputs.unlabelled else inputs.labels)
    if inputs.texts and inputs.texts < max(FEW_TEXTS, FEW_TEXTS_PER_LABEL * labels):
        text = f"{counted(inputs.texts, 'training text', 'is', 'are')} few for {counted(labels, 'label')}"
        yield {"code": "few-texts", "text": text}


def _teacher_causes(inputs: VerdictInputs, rivals: Sequence[Rival]) -> Iterator[Cause]:
    for rival in lost_teachers(rivals):
        text = f"the student has {ratio(rival['student_right'], rival['n'])} accuracy on the labels of {rival['name']}"
        yield {"code": "teacher-loses", "text": text}
    unpredicted = unpredicted_teachers(inputs.unlabelled) if inputs.unlabelled and not inputs.n else {}
    absent = [teacher for teacher, own in unpredicted.items() if all(row["expected"] == 0 for row in own)]
    if absent:
        by_targets = inputs.unlabelled is None or reference_of(inputs.unlabelled) == "targets"
        without = "no target has a label" if by_targets else "the ensemble predicts no label"
        yield {"code": "teacher-absent", "text": f"{without} of {shown_names(absent, SHOWN)}"}
    alone = teachers_alone(rivals)
    if alone and alone["weak"]:
        text = f"the teachers have only {ratio(alone['right'], alone['n'])} accuracy on their own labels"
        yield {"code": "teachers-weak", "text": text}
    if inputs.weights_unused:
        text = "the evidence for a choice of teachers was dropped"
        yield {"code": "choice-not-trusted", "text": text}
    losses = {
        "teachers": ("teachers-wrong", "the teachers are wrong on many texts"),
        "choice": ("wrong-choice", "the targets often follow the wrong teacher"),
        "fit": ("not-fitted", "the student does not fit its targets"),
        "choice and fit": ("choice-or-fit", "the targets follow the wrong teacher, or the student does not fit them"),
    }
    if inputs.largest_loss in losses:
        code, text = losses[inputs.largest_loss]
        yield {"code": code, "text": text}


def too_few(inputs: VerdictInputs, rivals: Sequence[Rival], needed: int | None) -> list[Cause]:
    """Returns why the test texts do not decide."""
    untested, texts = untested_teachers(rivals), counted(inputs.n, "test text")
    if were_learned(inputs):
        return [{"code": "test-texts-learned", "text": "the test texts were learned with their gold labels"}]
    if inputs.n < LEAST_TEXTS:
        random = "random labelled" if inputs.selected else "labelled"
        return [{"code": "few-test-texts", "text": f"only {counted(inputs.n, f'{random} test text')}"}]
    if untested:
        return [{"code": "teacher-untested", "text": f"no test text is of {shown_names(untested, SHOWN)}"}]
    if inputs.selected:
        return [{"code": "few-test-texts", "text": f"{texts} and the selected ones are too few"}]
    if needed is None:
        return [{"code": "tie", "text": "the two differ too little for any practical number of test texts"}]
    text = f"{texts} are too few; about {needed:,} would decide, if the difference stays"
    return [{"code": "few-test-texts", "text": text}]


def cautions_of(inputs: VerdictInputs, rivals: Sequence[Rival]) -> Iterator[str]:
    """Yields the remarks; that on selected texts comes first."""
    if inputs.selected:
        yield selection_sentence(inputs.n, inputs.selected)
    if inputs.learned:
        yield learned_sentence(inputs.learned)
    share = inputs.by_labels["unknown"] if inputs.by_labels else None
    if share and share["low"] > MANY_UNKNOWN:
        yield f"{unknown_share_line(share)}. The student gives such texts one of its labels too."
    frequent = next((rival for rival in rivals if rival["kind"] == "most frequent label"), None)
    if frequent and 2 * frequent["student_right"] < frequent["n"]:
        accuracy = ratio(frequent["student_right"], frequent["n"])
        yield f"The student has only {accuracy} accuracy: most answers are wrong."
    yield from _rival_cautions(rivals)
    lost = never_right(inputs)
    if lost and not many_lost(lost, inputs):
        yield never_right_sentence(lost)
    rare = [row["label"] for row in inputs.labels if row["n"] < LEAST_OF_LABEL]
    if rare:
        labels = counted(len(rare), "label", "has", "have")
        few = f"{labels} fewer than {LEAST_OF_LABEL} test texts, too few for a decision"
        yield f"{few}: {shown_names(rare, SHOWN)}."


def _rival_cautions(rivals: Sequence[Rival]) -> Iterator[str]:
    untested = untested_teachers(rivals)
    for rival in rivals:
        if untested and rival["kind"] in {"ensemble", "student"} and rival["student_is"] == "worse":
            yield f"{difference_sentence(rival)}{tested_on(rivals)}."
        if rival["kind"] == "supervised student" and rival["student_is"] == "worse":
            yield f"{difference_sentence(rival)}. It was trained on gold labels: if you have them, ship that student."
        if rival["kind"] == "teacher on its own labels" and rival["student_is"] == "worse":
            yield (
                f"{difference_sentence(rival)}. The teacher chooses among its own labels alone, the student among all."
            )
        if rival["kind"] == "teacher on its own labels" and 0 < rival["n"] < LEAST_OF_LABEL:
            has = "has" if rival["n"] == 1 else "have"
            yield f"Only {counted(rival['n'], 'test text')} {has} a label of teacher {rival['name']}."


def were_learned(inputs: VerdictInputs) -> bool:
    """Returns whether so many test texts were learned with their gold labels that no student can be shipped."""
    learned = inputs.learned
    return learned is not None and learned["labelled"] and learned["texts"] > MOST_LEARNED * learned["of"]


# ---- losses, which the rule also reads


def never_right(inputs: VerdictInputs) -> list[LabelCounts]:
    """Returns the labels with at least LEAST_OF_LABEL test texts that the student never predicts right."""
    return [row for row in inputs.labels if row["n"] >= LEAST_OF_LABEL and not row["right"]]


def many_lost(lost: Sequence[LabelCounts], inputs: VerdictInputs) -> bool:
    """Returns whether lost labels are more than MOST_LOST of the tested labels or of the test texts."""
    return _are_many([row["n"] for row in lost], [row["n"] for row in inputs.labels], inputs.n)


def _are_many(lost: Sequence[int], labels: Sequence[int], texts: int) -> bool:
    """Compares lost labels with all labels that have texts, and their texts with all texts."""
    return len(lost) > MOST_LOST * sum(n > 0 for n in labels) or sum(lost) > MOST_LOST * texts


def never_right_sentence(lost: Sequence[LabelCounts]) -> str:
    if len(lost) == 1:
        return f"The label {shown_name(lost[0]['label'])} is never predicted right, with {lost[0]['n']:,} test texts."
    never = f"{len(lost):,} labels are never predicted right, each with at least {LEAST_OF_LABEL} test texts"
    return f"{never}: {shown_names([row['label'] for row in lost], SHOWN)}."


class TeachersAlone(Answered):
    """The teachers together, each on the texts with its own labels."""

    weak: bool


def teachers_alone(rivals: Sequence[Rival]) -> TeachersAlone | None:
    """Returns the teachers' accuracy on their own labels; of a single teacher it is that of the ensemble."""
    own = [rival for rival in rivals if rival["kind"] == "teacher on its own labels"]
    own = own or [rival for rival in rivals if rival["kind"] == "ensemble" and not rival.get("selected")]
    n, right = sum(rival["n"] for rival in own), sum(rival["right"] for rival in own)
    if not n:
        return None
    return {"n": n, "right": right, "weak": interval(right / n, n)[1] < WEAK_TEACHERS}


def untested_teachers(rivals: Sequence[RivalCounts]) -> list[str]:
    return [rival["name"] for rival in rivals if rival["kind"] == "teacher on its own labels" and not rival["n"]]


def tested_on(rivals: Sequence[RivalCounts]) -> str:
    """Returns the end of a sentence with a difference: that no or few test texts have a label of some teacher."""
    counts = {rival["name"]: rival["n"] for rival in rivals if rival["kind"] == "teacher on its own labels"}
    untested, few = untested_teachers(rivals), [name for name, n in counts.items() if n < LEAST_OF_LABEL]
    if untested:
        return f", on texts without a label of {teachers_named(untested)}"
    return f", on texts of which fewer than {LEAST_OF_LABEL} have a label of {teachers_named(few)}" if few else ""


def teachers_named(names: Sequence[str]) -> str:
    return f"{'teacher' if len(names) == 1 else 'the teachers'} {shown_names(names, SHOWN)}"


def lost_teachers(rivals: Sequence[Rival]) -> list[Rival]:
    """Returns the teachers on whose labels the student's interval ends below half of the teacher's accuracy."""
    return [
        rival
        for rival in rivals
        if rival["kind"] == "teacher on its own labels"
        and rival["n"] >= LEAST_OF_LABEL
        and interval(rival["student_right"] / rival["n"], rival["n"])[1] < rival["right"] / rival["n"] / 2
    ]


def reference_of(quality: UnlabelledQuality) -> Reference:
    """Returns the reference of the student on training texts without gold labels."""
    return quality["agreement"]["reference"] if quality["agreement"] else "targets"


def never_predicted(quality: UnlabelledQuality) -> list[str]:
    """Returns the labels that the student never predicts, though LEAST_OF_LABEL texts have them in the reference."""
    return [
        row["label"] for row in quality["labels"] if not row["predicted"] and (row["expected"] or 0) >= LEAST_OF_LABEL
    ]


def many_unpredicted(quality: UnlabelledQuality) -> bool:
    """Returns whether the labels of `never_predicted` are more than MOST_LOST of the reference's labels or texts."""
    expected = {row["label"]: row["expected"] or 0 for row in quality["labels"]}
    return _are_many([expected[label] for label in never_predicted(quality)], [*expected.values()], quality["n"])


def unpredicted_teachers(quality: UnlabelledQuality) -> dict[str, list[LabelShare]]:
    """Returns the teachers of whose labels the student predicts none, with their labels."""
    labels = quality["labels"]
    teachers = dict.fromkeys(name for row in labels for name in row["teachers"])
    own = {teacher: [row for row in labels if teacher in row["teachers"]] for teacher in teachers}
    return {teacher: rows for teacher, rows in own.items() if not any(row["predicted"] for row in rows)}
