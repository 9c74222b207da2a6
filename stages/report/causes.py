"""Names the likely causes of a bad or unclear student, and the remarks on which the decision does not depend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from amalgam.pipeline.console import counted
from amalgam.stages.common.intervals import percent
from amalgam.stages.common.training.schedule import FEW_STEPS
from amalgam.stages.report import conditions
from amalgam.stages.report import verdict_types as types
from amalgam.stages.report import verdict_words as words

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


def causes_of(inputs: types.VerdictInputs, rivals: Sequence[types.Rival]) -> Iterator[types.Cause]:
    """Yields the likely causes of a bad or unclear student, the most likely first."""
    yield from _training_causes(inputs)
    unpredicted = [row["label"] for row in inputs.labels if row["n"] and not row["predicted"]]
    if inputs.unlabelled:
        unpredicted = conditions.never_predicted(inputs.unlabelled)
    if unpredicted:
        text = f"{counted(len(unpredicted), 'label', 'is', 'are')} never predicted ({words.listed(unpredicted)})"
        yield {"code": "labels-never-predicted", "text": text}
    yield from _teacher_causes(inputs, rivals)
    if inputs.long_texts >= MANY_LONG:
        text = f"{percent(inputs.long_texts)} of the training texts are longer than student.max_tokens"
        yield {"code": "long-texts", "text": text}
    frequent = conditions.most_frequent(rivals)
    if frequent and frequent["right"] >= SKEWED * frequent["n"]:
        text = f"{words.ratio(frequent['right'], frequent['n'])} of the test texts have one label, {frequent['name']}"
        yield {"code": "skewed-labels", "text": text}


def _training_causes(inputs: types.VerdictInputs) -> Iterator[types.Cause]:
    if inputs.steps is not None and inputs.steps < FEW_STEPS:
        yield {"code": "few-steps", "text": f"{counted(inputs.steps, 'training step', 'is', 'are')} few"}
    rate, automatic = inputs.learning_rate, inputs.automatic_rate
    if rate and automatic and rate >= HIGH_RATE * automatic:
        text = f"the learning rate {rate:g} is {rate / automatic:.0f} times the automatic one, {automatic:g}"
        yield {"code": "high-rate", "text": text}
    labels = len(inputs.unlabelled["labels"] if inputs.unlabelled else inputs.labels)
    if inputs.texts and inputs.texts < max(FEW_TEXTS, FEW_TEXTS_PER_LABEL * labels):
        of_labels = f" for {counted(labels, 'label')}" if labels else ""  # none are known if all texts were selected
        yield {"code": "few-texts", "text": f"{counted(inputs.texts, 'training text', 'is', 'are')} few{of_labels}"}


def _teacher_causes(inputs: types.VerdictInputs, rivals: Sequence[types.Rival]) -> Iterator[types.Cause]:
    for rival in conditions.lost_teachers(rivals):
        accuracy = words.ratio(rival["student_right"], rival["n"])
        text = f"the student has {accuracy} accuracy on the labels of {rival['name']}"
        yield {"code": "teacher-loses", "text": text}
    if inputs.unlabelled:
        unpredicted = conditions.unpredicted_teachers(inputs.unlabelled).items()
        absent = [teacher for teacher, rows in unpredicted if all(row["expected"] == 0 for row in rows)]
        without = {"targets": "no target has a label", "ensemble": "the ensemble predicts no label"}
        if absent:
            reference = inputs.unlabelled["agreement"]["reference"]
            yield {"code": "teacher-absent", "text": f"{without[reference]} of {words.listed(absent)}"}
    weak = conditions.weak_teachers(rivals)
    if weak:
        text = f"the teachers have only {words.ratio(weak['right'], weak['n'])} accuracy on their own labels"
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


def too_few(inputs: types.VerdictInputs, rivals: Sequence[types.Rival], needed: int | None) -> list[types.Cause]:
    """Returns why the test texts do not decide."""
    untested, texts = conditions.untested_teachers(rivals), counted(inputs.n, "test text")
    if inputs.learned and conditions.were_learned(inputs.learned):
        code, text = "test-texts-learned", "training used the test texts with their gold labels"
        if inputs.learned.get("generated"):
            code, text = "test-texts-generated", "stage generate wrote the test texts"
        return [{"code": code, "text": text}]
    if inputs.n < conditions.LEAST_TEXTS:
        random = "random labelled" if inputs.selected else "labelled"
        return [{"code": "few-test-texts", "text": f"only {counted(inputs.n, f'{random} test text')}"}]
    if untested:
        return [{"code": "teacher-untested", "text": f"no test text is of {words.listed(untested)}"}]
    if inputs.selected:
        return [{"code": "few-test-texts", "text": f"{texts} and the selected ones are too few"}]
    if needed is None:
        return [{"code": "tie", "text": "the two differ too little for any practical number of test texts"}]
    text = f"{texts} are too few; about {needed:,} would decide, if the difference stays"
    return [{"code": "few-test-texts", "text": text}]


def cautions_of(inputs: types.VerdictInputs, rivals: Sequence[types.Rival]) -> Iterator[str]:
    """Yields the remarks; that on selected texts comes first."""
    if inputs.selected:
        yield words.selection_sentence(inputs.n, inputs.selected, inputs.unused)
    if inputs.learned:
        yield words.learned_sentence(inputs.learned)
    yield from left_out_cautions(inputs)
    yield from absent_cautions(inputs, rivals)
    share = inputs.by_labels["unknown"] if inputs.by_labels else None
    if share and share["low"] > MANY_UNKNOWN:
        yield f"{words.share_of_unknown_line(share)}. The student gives such texts one of its labels too."
    frequent = conditions.most_frequent(rivals)
    if frequent and 2 * frequent["student_right"] < frequent["n"]:
        accuracy = words.ratio(frequent["student_right"], frequent["n"])
        yield f"The student has only {accuracy} accuracy: most answers are wrong."
    yield from _rival_cautions(rivals)
    lost = conditions.never_right(inputs)
    if lost and not conditions.many_lost(lost, inputs):
        yield words.never_right_sentence(lost)
    rare = [row["label"] for row in inputs.labels if row["n"] < conditions.LEAST_OF_LABEL]
    if rare:
        labels = counted(len(rare), "label", "has", "have")
        few = f"{labels} fewer than {conditions.LEAST_OF_LABEL} test texts, too few for a decision"
        yield f"{few}: {words.listed(rare)}."


def absent_cautions(inputs: types.VerdictInputs, rivals: Sequence[types.Rival] = ()) -> Iterator[str]:
    """Yields the cautions on labels that no labelled text has, though the ensemble predicts them."""
    untested = conditions.untested_teachers(rivals)
    absent = [("text of `labels`", entry) for entry in conditions.absent_labels(inputs.given).items()]
    absent += [("test text", entry) for entry in conditions.absent_labels(inputs.tested).items()]
    for text, (teacher, rows) in absent:
        if text != "test text" or teacher not in untested:
            names, count = words.listed([row["label"] for row in rows]), conditions.predicted_by_ensemble(rows)
            absent_sentence = f"No {text} has a label of teacher {teacher} alone: {names}."
            older = "Labels that are older than this teacher are wrong for such texts."
            yield f"{absent_sentence} The ensemble predicts them on {count:,}. {older}"
    predicted = {row["label"] for row in inputs.labels if row["predicted"]}
    never = [row for row in inputs.tested if not row["n"] and row["label"] not in predicted]
    if conditions.predicted_by_ensemble(never) >= conditions.LEAST_EXPECTED:
        names = words.listed([row["label"] for row in never if row["ensemble"]])
        yield f"The student never predicts labels that no test text has, though the ensemble does: {names}."


def left_out_cautions(inputs: types.VerdictInputs) -> Iterator[str]:
    """Yields the cautions that accuracies leave out texts with labels of no teacher."""
    if inputs.labels:
        right = sum(row["right"] for row in inputs.labels) / max(inputs.n, 1)
        yield from words.left_out_sentence(inputs.left_out, inputs.n, right, "test texts")
    for system in inputs.by_labels["systems"] if inputs.by_labels else ():
        if inputs.by_labels and system["kind"] == "student":
            left_out, sample = inputs.by_labels.get("left_out", 0), inputs.by_labels.get("sample", 0)
            yield from words.left_out_sentence(left_out, sample, system["mean"], "training texts")


def _rival_cautions(rivals: Sequence[types.Rival]) -> Iterator[str]:
    untested = conditions.untested_teachers(rivals)
    for rival in rivals:
        is_better, difference = rival["student_is"] == "worse", words.difference_sentence(rival)
        if is_better and "learned" in rival:
            yield f"{difference}. Of that student, {words.learned_sentence(rival['learned'])}"
            continue
        if untested and is_better and rival["kind"] in {"ensemble", "student"}:
            yield f"{difference}{words.tested_on(rivals)}."
        if is_better and rival["kind"] == "supervised student":
            yield f"{difference}. It was trained on gold labels: if you have them, ship that student."
        if is_better and rival["kind"] == "teacher on its own labels":
            yield f"{difference}. The teacher chooses among its own labels alone, the student among all."
        if rival["kind"] == "teacher on its own labels" and 0 < rival["n"] < conditions.LEAST_OF_LABEL:
            yield f"Only {counted(rival['n'], 'test text', 'has', 'have')} a label of teacher {rival['name']}."
