"""Decides whether to ship a student, or that the texts do not suffice, with the causes and the next command.

docs/verdict.md has the rule. It reads counts alone: of the student and each rival on the same labelled test texts, or
without labels the agreement with the targets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from amalgam.pipeline.console import counted
from amalgam.stages.common.intervals import (
    bounds,
    difference_bounds,
    errors_of,
    interval,
    paired,
    percent,
    points,
    texts_needed,
    unpaired,
)
from amalgam.stages.common.training.schedule import FEW_STEPS
from amalgam.stages.report import conditions
from amalgam.stages.report import verdict_types as types
from amalgam.stages.report import verdict_words as words
from amalgam.stages.report.conditions import VerdictInputs
from amalgam.stages.report.json_types import AccuracyLoss, EvaluatedSystems, LabelQuality
from amalgam.stages.report.next_step import next_step

BLOCKING: tuple[types.Kind, ...] = ("ensemble", "zero-shot", "teacher", "student", "most frequent label")
"""Rivals that cost nothing more than the student: a significantly better one decides against the student."""

BASELINES: tuple[types.Kind, ...] = ("ensemble", "zero-shot", "most frequent label")
"""The first of these that exists is the baseline, which a student must beat or equal."""

FAVOURED: tuple[types.Kind, ...] = ("teacher", "ensemble", "student")
"""Rivals that may be better only because the test texts have no label of some teacher."""

EQUAL = 0.01
"""Accuracy by which a student may be worse than the baseline, at the lower end of the interval."""

LEAST_GAIN, LEAST_UNCLEAR_GAIN = 0.25, 0.5
"""Least part of the possible gain over the most frequent label, at the upper end of the interval.

The second holds for a gain that is not significant.
"""

LEAST_ACCURACY = 0.5
"""Least accuracy of a student whose teachers are weak on their own labels, at the upper end of the interval."""

CHANCE_ERRORS = 3.0
"""Standard errors by which rare labels must be missed more often than by chance."""

LEAST_AGREEMENT = 0.5
"""Without labelled texts: least agreement with the reference, at the upper end of the interval."""

RELEVANT = 0.05
"""Share of the texts from which the ensemble's predictions of a teacher's labels count as relevant."""

ESTIMATED_LEAD = 0.1
"""Estimated lead of the ensemble that is clear, at the lower end of the interval: smaller ones were sometimes wrong."""

LINEAR_LEAD = 0.1
"""Where labels do not decide: least lead of a linear map of the encoder's states, if it is significant."""

NOT_LEARNED = "The student did not learn its targets."

SHARE_GAP = 0.1
"""Difference of a label's shares in predictions and targets from which it is a reason."""

HAVE: Mapping[types.Reference, str] = {"targets": "the targets have", "ensemble": "the ensemble has"}

Outcome = tuple[types.Decision, list[str], int | None]
"""The decision, its reasons, and the number of test texts that would decide."""

PRINTED = 4
"""Most reasons that `amalgam run` prints."""


# ---- the verdict


def verdict(inputs: VerdictInputs) -> types.Verdict:
    kinds = [counts["kind"] for counts in inputs.rivals]
    rivals = [compared(counts, kinds.count(counts["kind"])) for counts in inputs.rivals]
    evaluation = inputs.report["evaluation"]
    decision, reasons, needed = _by_test_texts(inputs, rivals) if evaluation else _without_labels(inputs)
    causes = list(_causes(inputs, rivals)) if decision != "ship" else []
    if decision == "cannot say" or not evaluation:
        causes.append(_undecided(inputs, rivals, needed))
    return {
        "decision": decision,
        "reasons": reasons,
        "causes": causes,
        "cautions": list(_cautions(inputs, evaluation, rivals) if evaluation else _unlabelled_cautions(inputs)),
        "next": next_step(inputs, decision, causes, rivals, needed),
        "rivals": rivals,
        "texts_needed": needed,
    }


def lines(verdict: types.Verdict, cautions: Sequence[str] = (), place: str = "", page: str = "") -> list[str]:
    """Returns the end of `amalgam run`: the decision with its reasons, cautions, the causes, and the next step.

    If teachers are better on their own labels, it has the best one. `place` follows the word "next": the folder of its
    command. `page` has all cautions.
    """
    best = min(conditions.better_on_own_labels(verdict["rivals"]), key=lambda rival: rival["mean"], default=None)
    cautions = [*cautions, *([words.better_on_own_labels_sentence(best)] if best else [])]
    printed = [f"verdict: {verdict['decision']}. {' '.join(verdict['reasons'][:2])}"]
    printed += [f"  {reason}" for reason in verdict["reasons"][2:PRINTED]]
    printed += [f"  caution: {caution}" for caution in cautions if caution not in verdict["reasons"]]
    hidden = {*verdict["cautions"]} - {*cautions, *verdict["reasons"]}
    printed += [f"  {counted(len(hidden), 'more caution')} in {page}"] if hidden and page else []
    causes = [cause["text"] for cause in verdict["causes"] if cause["code"] != "no-labels"]  # the reason names it
    if causes:
        printed.append(f"  cause: {'; '.join(causes[:3])}")
    step = verdict["next"]
    command = f"{step['command']}  # " if "command" in step else ""
    printed.append(f"  next{place}: {command}{step['text']}")
    return printed


def compared(counts: types.RivalCounts, together: int = 1) -> types.Rival:
    """Adds the difference; its interval holds for so many rivals of this kind together."""
    errors = errors_of(together)
    gained, lost, n = counts["gained"], counts["lost"], counts["n"]
    if gained is None or lost is None:
        mean, low, high = unpaired(counts["student_right"] / max(n, 1), counts["right"] / max(n, 1), n, errors)
    else:
        mean, low, high = paired(gained, lost, n, errors)
    student_is: types.Standing = "better" if low > 0 else "worse" if high < 0 else "not clearly different"
    return {**counts, "mean": mean, "low": low, "high": high, "student_is": student_is, "together": together}


# ---- by labelled test texts


def _by_test_texts(inputs: VerdictInputs, rivals: Sequence[types.Rival]) -> Outcome:
    decision, reason, needed = _against_baseline(inputs, rivals)
    if decision == "ship" and inputs.learned:
        decision, reason = "cannot say", words.learned_sentence(inputs.learned)
    faults = list(_faults(inputs, rivals))
    if decision == "cannot say" and not faults:
        faults = list(_below_linear_map(inputs.report["linear_map"]))
    return ("do not ship", faults, None) if faults else (decision, [reason], needed)


def _against_baseline(inputs: VerdictInputs, rivals: Sequence[types.Rival]) -> tuple[types.Decision, str, int | None]:
    """Compares the student with the baseline: the decision, its reason, and the texts that would decide."""
    if inputs.n < conditions.LEAST_TEXTS:
        texts = counted(inputs.n, f"{inputs.random}labelled test text", "is", "are")
        return "cannot say", f"{texts} too few: a verdict needs at least {conditions.LEAST_TEXTS}.", None
    untested = conditions.untested_teachers(rivals)
    if untested:
        return "cannot say", f"No test text has a label of {words.teachers_named(untested)}.", None
    by_kind = {rival["kind"]: rival for rival in rivals}
    baseline = next(by_kind[kind] for kind in BASELINES if kind in by_kind)  # of test texts the last one always exists
    name, figures = words.name_of(baseline), words.figures_of(baseline)
    is_best = "and no rival is significantly better."
    if baseline["student_is"] == "better":
        return "ship", f"{words.difference_sentence(baseline)}{words.tested_on(rivals)}, {is_best}", None
    if baseline["low"] > -EQUAL:
        return "ship", f"The student is at most 1 point worse than {name} ({figures}), {is_best}", None
    n, gained, lost = baseline["n"], baseline["gained"] or 0, baseline["lost"] or 0
    needed = None if inputs.random else texts_needed(gained, lost, n, EQUAL)
    return "cannot say", f"The student and {name} are not clearly different ({figures}).", needed


def _faults(inputs: VerdictInputs, rivals: Sequence[types.Rival]) -> Iterator[str]:
    yield from _better_rivals(inputs, rivals)
    yield from _missed_labels(inputs)
    for rival in conditions.lost_teachers(rivals):
        of_student, of_teacher = (words.ratio(count, rival["n"]) for count in (rival["student_right"], rival["right"]))
        yield (
            f"On the labels of teacher {rival['name']} the student has {of_student} accuracy, less than half of "
            f"the teacher's {of_teacher} (n = {rival['n']:,}). The teacher chooses among these labels alone."
        )
    yield from _useless(rivals)


def _better_rivals(inputs: VerdictInputs, rivals: Sequence[types.Rival]) -> Iterator[str]:
    """Yields the better rivals: none that learned the texts, or that texts without a label of some teacher favour."""
    favoured = FAVOURED if conditions.untested_teachers(rivals) else ()
    blocking = [rival for rival in rivals if rival["kind"] in BLOCKING and rival["kind"] not in favoured]
    better = [rival for rival in blocking if rival["student_is"] == "worse" and "learned" not in rival]
    best: dict[types.Kind, list[types.Rival]] = {}
    for rival in sorted(better, key=lambda rival: rival["mean"]):
        best.setdefault(rival["kind"], []).append(rival)
    for kind, (rival, *more) in best.items():
        also = f"; {len(more)} more {kind}{'s are' if len(more) > 1 else ' is'} better too" if more else ""
        gone = " It is in no folder now." if kind == "student" and rival["name"] in inputs.remade else ""
        yield f"{words.difference_sentence(rival)}{words.tested_on(rivals)}{also}.{gone}"


def _missed_labels(inputs: VerdictInputs) -> Iterator[str]:
    lost = conditions.never_right(inputs)
    if conditions.many_lost(lost, inputs):
        yield words.never_right_sentence(lost)
    rare = _missed_rare_labels(inputs)
    if rare:
        names, n = [row["label"] for row in rare], sum(row["n"] for row in rare)
        never = f"{counted(len(names), 'label', 'is', 'are')} never predicted right, with {n:,} test texts together"
        yield f"{never}: {words.listed(names)}."


def _missed_rare_labels(inputs: VerdictInputs) -> list[LabelQuality]:
    """Returns the rare labels that are never predicted right, if they are too many and chance does not explain it.

    Chance: the student predicts each text of a rare label right with half of its accuracy.
    """
    rows = [row for row in inputs.labels if 0 < row["n"] < conditions.LEAST_OF_LABEL]
    missed = [row for row in rows if not row["right"]]
    right = sum(row["right"] for row in inputs.labels) / max(inputs.n, 1) / 2
    chances = [(row["n"], (1 - right) ** row["n"]) for row in rows]
    expected = sum(n * chance for n, chance in chances)
    error = math.sqrt(sum(n**2 * chance * (1 - chance) for n, chance in chances))
    texts = sum(row["n"] for row in missed)
    by_chance = texts < conditions.LEAST_OF_LABEL or texts <= expected + CHANCE_ERRORS * error
    return [] if by_chance or not conditions.many_lost(missed, inputs) else missed


def _useless(rivals: Sequence[types.Rival]) -> Iterator[str]:
    """Yields why a student is of no use even if all rivals are worse: the absolute bar."""
    frequent = conditions.most_frequent(rivals)
    if frequent is None or not frequent["n"]:
        return
    n, right = frequent["n"], frequent["student_right"]
    least = LEAST_GAIN if frequent["student_is"] == "better" else LEAST_UNCLEAR_GAIN
    if frequent["student_is"] != "worse" and frequent["high"] < least * (1 - frequent["right"] / n):
        much = "little" if frequent["student_is"] == "better" else "no"
        yield f"The student is {much} better than {words.name_of(frequent)} ({words.figures_of(frequent)})."
    low, high = interval(right / n, n)
    teachers = conditions.weak_teachers(rivals)
    if teachers and high < LEAST_ACCURACY:
        yield (
            f"The student has only {words.ratio(right, n)} accuracy (95 % interval {bounds(low, high)}). "
            f"The teachers have only {words.ratio(teachers['right'], teachers['n'])} accuracy on their own labels."
        )


# ---- without labels


def _without_labels(inputs: VerdictInputs) -> Outcome:
    faults = list(_unlabelled_faults(inputs))
    if faults:
        return "do not ship", faults, None
    quality, estimates = inputs.report["unlabelled"], inputs.report["label_estimates"]
    reasons = ["There are no labelled test texts."]
    if estimates:
        reasons.append(words.estimate_sentence(estimates))
    elif quality and quality["estimates"]:
        reasons.append(words.weight_estimate_sentence(quality["estimates"]))
    reasons += [_agreement(quality), *_shares(quality)] if quality else []
    return "cannot say", reasons, None


def _unlabelled_faults(inputs: VerdictInputs) -> Iterator[str]:
    quality, estimates = inputs.report["unlabelled"], inputs.report["label_estimates"]
    if estimates and estimates["random"]:
        yield from _worse_than_ensemble(estimates)
    if not quality:
        return
    if conditions.many_unpredicted(quality):
        yield from _unpredicted(quality)
    yield from _lost_without_labels(quality)
    yield from _below_ensemble(quality)
    agreement = quality["agreement"]
    if interval(agreement["right"] / max(agreement["n"], 1), agreement["n"])[1] < LEAST_AGREEMENT:
        missed = [NOT_LEARNED] if agreement["reference"] == "targets" else []
        yield " ".join([*missed, _agreement(quality)])
    else:
        yield from _below_linear_map(inputs.report["linear_map"])


def _unpredicted(quality: types.UnlabelledQuality) -> Iterator[str]:
    missing = conditions.never_predicted(quality)
    if missing:
        count, though = counted(len(missing), "label", "is", "are"), HAVE[quality["agreement"]["reference"]]
        them = "it" if len(missing) == 1 else "them"
        yield f"{count} never predicted, though {though} {them}: {words.listed(missing)}."


def _lost_without_labels(quality: types.UnlabelledQuality) -> Iterator[str]:
    """Yields the teachers whose labels the student never predicts, though the ensemble often does."""
    for teacher, rows in conditions.unpredicted_teachers(quality).items():
        texts = sum(row["ensemble"] or 0 for row in rows)
        if texts >= max(RELEVANT * quality["n"], conditions.LEAST_OF_LABEL):
            yield (
                f"The student never predicts a label of teacher {teacher}; the ensemble does on "
                f"{words.ratio(texts, quality['n'])} of {counted(quality['n'], 'training text')}."
            )


def _below_ensemble(quality: types.UnlabelledQuality) -> Iterator[str]:
    """Yields the estimated lead of the ensemble if it is clear."""
    gap = quality["estimates"] and quality["estimates"]["gap"]
    if gap and gap["low"] > ESTIMATED_LEAD:
        yield (
            f"The ensemble's estimated accuracy is {100 * gap['mean']:.1f} points higher than the student's "
            f"(95 % interval {difference_bounds(gap['low'], gap['high'])}, n = {gap['n']:,} held-out texts)."
        )


def _below_linear_map(linear: types.PairedCounts | None) -> Iterator[str]:
    """Yields by how much a linear map of the encoder's states fits the targets better, if that is clear."""
    if not linear:
        return
    n = linear["n"]
    lead, low, high = paired(linear["lost"], linear["gained"], n)
    if low > 0 and lead > LINEAR_LEAD:
        student, map_of_states = (words.ratio(right, n) for right in (linear["student_right"], linear["right"]))
        yield (
            f"{NOT_LEARNED} It has their label on {student} of {counted(n, 'held-out text')}, "
            f"a linear map of its encoder's states on {map_of_states} "
            f"({points(lead)} points, 95 % interval {difference_bounds(low, high)})."
        )


def _agreement(quality: types.UnlabelledQuality) -> str:
    agreement = quality["agreement"]
    right, n = agreement["right"], agreement["n"]
    return (
        f"The student agrees with the {agreement['reference']} on {words.ratio(right, n)} of "
        f"{counted(n, agreement['texts'].removesuffix('s'))} (95 % interval {bounds(*interval(right / max(n, 1), n))})."
    )


def _shares(quality: types.UnlabelledQuality) -> Iterator[str]:
    """Yields the labels that neither reference nor student have, and the label with the largest difference."""
    n, labels, reference = quality["n"], quality["labels"], quality["agreement"]["reference"]
    absent = [row["label"] for row in labels if not row["predicted"] and row["expected"] == 0]
    if absent:
        count = counted(len(absent), "label")
        yield f"Neither {reference} nor student have {count}: {words.listed(absent)}."
    gaps = [(abs(row["predicted"] - row["expected"]), row) for row in labels]
    gap, row = max(gaps, key=lambda entry: entry[0], default=(0, None))
    if row and gap >= SHARE_GAP * n:
        yield (
            f"The student predicts {words.listed([row['label']])} on {words.ratio(row['predicted'], n)} of the texts; "
            f"{HAVE[reference]} it on {words.ratio(row['expected'], n)}."
        )


def _worse_than_ensemble(estimates: types.LabelEstimates) -> Iterator[str]:
    """Yields by how much the student is worse than the ensemble on labelled training texts, if significantly."""
    if estimates["gained"] is None or estimates["lost"] is None:
        return
    lead, low, high = paired(estimates["lost"], estimates["gained"], estimates["n"])
    if low > 0:
        numbers = f"95 % interval {difference_bounds(low, high)}, n = {estimates['n']:,}"
        yield f"On labelled training texts the ensemble is {100 * lead:.1f} points better than the student ({numbers})."


# ---- causes

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

LOSSES = {
    "teachers": ("teachers-wrong", "the teachers are wrong on many texts"),
    "choice": ("wrong-choice", "the targets often follow the wrong teacher"),
    "fit": ("not-fitted", "the student does not fit its targets"),
    "choice and fit": ("choice-or-fit", "the targets follow the wrong teacher, or the student does not fit them"),
}
"""Code and text of the cause, by the step with the largest loss of accuracy."""


def _causes(inputs: VerdictInputs, rivals: Sequence[types.Rival]) -> Iterator[types.Cause]:
    """Yields the likely causes of a bad or unclear student, the most likely first."""
    quality, student = inputs.report["unlabelled"], inputs.student
    yield from _training_causes(inputs)
    weak = conditions.weak_teachers(rivals)
    if weak:
        text = f"the teachers have only {words.ratio(weak['right'], weak['n'])} accuracy on their own labels"
        yield {"code": "teachers-weak", "text": text}
    if weak and inputs.teacher_steps is not None and inputs.teacher_steps < FEW_STEPS:
        text = f"a teacher was trained for only {counted(inputs.teacher_steps, 'step')}"
        yield {"code": "teachers-few-steps", "text": text}
    unpredicted = [row["label"] for row in inputs.labels if row["n"] and not row["predicted"]]
    if quality:
        unpredicted = conditions.never_predicted(quality)
    if unpredicted:
        text = f"{counted(len(unpredicted), 'label', 'is', 'are')} never predicted ({words.listed(unpredicted)})"
        yield {"code": "labels-never-predicted", "text": text}
    yield from _teacher_causes(inputs, rivals)
    long_texts = student["cut"] / max(student["texts"], 1)
    if long_texts >= MANY_LONG:
        text = f"{percent(long_texts)} of the training texts are longer than student.max_tokens"
        yield {"code": "long-texts", "text": text}
    frequent = conditions.most_frequent(rivals)
    if frequent and frequent["right"] >= SKEWED * frequent["n"]:
        share, label = words.ratio(frequent["right"], frequent["n"]), words.listed([frequent["name"]])
        text = f"{share} of the test texts have one label, {label}"
        yield {"code": "skewed-labels", "text": text}


def _training_causes(inputs: VerdictInputs) -> Iterator[types.Cause]:
    steps, texts = inputs.student["steps"], inputs.student["texts"]
    if steps < FEW_STEPS:
        yield {"code": "few-steps", "text": f"{counted(steps, 'training step', 'is', 'are')} few"}
    rate, automatic = inputs.student["learning_rate"], inputs.automatic.learning_rate
    if rate >= HIGH_RATE * automatic:
        text = f"the learning rate {rate:g} is {rate / automatic:.0f} times the automatic one, {automatic:g}"
        yield {"code": "high-rate", "text": text}
    quality = inputs.report["unlabelled"]
    labels = len(quality["labels"] if quality else inputs.labels)
    if 0 < texts < max(FEW_TEXTS, FEW_TEXTS_PER_LABEL * labels):  # as-dfd reads none
        of_labels = f" for {counted(labels, 'label')}" if labels else ""  # none are known if all texts were selected
        yield {"code": "few-texts", "text": f"{counted(texts, 'training text', 'is', 'are')} few{of_labels}"}


def _teacher_causes(inputs: VerdictInputs, rivals: Sequence[types.Rival]) -> Iterator[types.Cause]:
    for rival in conditions.lost_teachers(rivals):
        accuracy = words.ratio(rival["student_right"], rival["n"])
        text = f"the student has {accuracy} accuracy on the labels of {rival['name']}"
        yield {"code": "teacher-loses", "text": text}
    quality = inputs.report["unlabelled"]
    if quality:
        unpredicted = conditions.unpredicted_teachers(quality).items()
        absent = [teacher for teacher, rows in unpredicted if all(row["expected"] == 0 for row in rows)]
        without = {"targets": "no target has a label", "ensemble": "the ensemble predicts no label"}
        if absent:
            text = f"{without[quality['agreement']['reference']]} of {words.listed(absent)}"
            yield {"code": "teacher-absent", "text": text}
    if inputs.weights_unused:
        text = "the evidence for a choice of teachers was dropped"
        yield {"code": "choice-not-trusted", "text": text}
    step = relevant_loss(inputs.report["accuracy_losses"])
    if step:
        code, text = LOSSES[step]
        yield {"code": code, "text": text}


def relevant_loss(losses: Sequence[AccuracyLoss]) -> str | None:
    """Returns the step with the largest loss that can be a cause: of the teachers, it is an error on many texts."""
    least = {"teachers": MANY_WRONG}
    relevant = [loss for loss in losses if loss["lost"] > 0 and loss["lost"] >= least.get(loss["step"], 0)]
    largest = max(relevant, key=lambda loss: float(loss["lost"]), default=None)
    return largest["step"] if largest and len(losses) > 1 else None


def _undecided(inputs: VerdictInputs, rivals: Sequence[types.Rival], needed: int | None) -> types.Cause:
    """Returns why the test texts do not decide."""
    untested, texts = conditions.untested_teachers(rivals), counted(inputs.n, "test text")
    code = "few-test-texts"
    if inputs.report["evaluation"] is None:
        code, text = "no-labels", "there are no labelled test texts"
    elif inputs.learned and inputs.learned.get("generated"):
        code, text = "test-texts-generated", "stage generate wrote the test texts"
    elif inputs.learned:
        code, text = "test-texts-learned", "training used the test texts with their gold labels"
    elif inputs.n < conditions.LEAST_TEXTS:
        text = f"only {counted(inputs.n, f'{inputs.random}labelled test text')}"
    elif untested:
        code, text = "teacher-untested", f"no test text is of {words.listed(untested)}"
    elif inputs.random:
        text = f"{texts} and the selected ones are too few"
    elif needed is None:
        code, text = "tie", "the two differ too little for any practical number of test texts"
    else:
        text = f"{texts} are too few; about {needed:,} would decide, if the difference stays"
    return {"code": code, "text": text}


# ---- cautions

MANY_UNKNOWN = 0.05
"""Share of training texts of no label, at the lower end of its interval, from which it is a caution."""


def _cautions(inputs: VerdictInputs, evaluation: EvaluatedSystems, rivals: Sequence[types.Rival]) -> Iterator[str]:
    """Yields the remarks; that on selected texts comes first."""
    estimates = inputs.report["label_estimates"]
    yield from words.cautions_on_texts(evaluation)
    yield from _outside_cautions(estimates)
    yield from _absent_cautions(inputs, rivals)
    yield from _unknown_cautions(inputs)
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


def _unlabelled_cautions(inputs: VerdictInputs) -> Iterator[str]:
    quality, estimates = inputs.report["unlabelled"], inputs.report["label_estimates"]
    yield from _outside_cautions(estimates)
    yield from _absent_cautions(inputs)
    yield from _unknown_cautions(inputs)
    if estimates and not estimates["random"]:
        yield from _worse_than_ensemble(estimates)
    if quality:
        yield from () if conditions.many_unpredicted(quality) else _unpredicted(quality)
        both = "Agreement and estimates are" if quality["estimates"] else "Agreement is"
        reference = quality["agreement"]["reference"]
        yield f"{both} no accuracy: the student repeats the errors of the {reference} too."


def _absent_cautions(inputs: VerdictInputs, rivals: Sequence[types.Rival] = ()) -> Iterator[str]:
    """Yields the cautions on labels that no labelled text has, though the ensemble predicts them."""
    untested = conditions.untested_teachers(rivals)
    absent = [("text of `labels`", *entry) for entry in conditions.absent_labels(inputs.report["given_labels"]).items()]
    of_test = conditions.absent_labels(inputs.labels).items()
    absent += [("test text", teacher, rows) for teacher, rows in of_test if teacher not in untested]
    for text, teacher, rows in absent:
        names, count = words.listed([row["label"] for row in rows]), conditions.predicted_by_ensemble(rows)
        absent_sentence = f"No {text} has a label of teacher {teacher} alone: {names}."
        older = "Labels that are older than this teacher are wrong for such texts."
        yield f"{absent_sentence} The ensemble predicts them on {count:,}. {older}"
    never = [row for row in inputs.labels if not row["n"] and not row["predicted"]]
    if conditions.predicted_by_ensemble(never) >= conditions.LEAST_EXPECTED:
        names = words.listed([row["label"] for row in never if row["ensemble"]])
        yield f"The student never predicts labels that no test text has, though the ensemble does: {names}."


def _unknown_cautions(inputs: VerdictInputs) -> Iterator[str]:
    share = inputs.report["unknown_share"]
    if share and share["low"] > MANY_UNKNOWN:
        yield f"{words.share_of_unknown_line(share)}. The student gives such texts one of its labels too."


def _outside_cautions(estimates: types.LabelEstimates | None) -> Iterator[str]:
    """Yields the caution that the student's estimated accuracy leaves out texts with labels of no teacher."""
    means = [system["mean"] for system in estimates["systems"] if system["kind"] == "student"] if estimates else []
    if estimates and means:
        outside, sample = estimates.get("left_out", 0), estimates.get("sample", 0)
        yield from words.outside_sentence(outside, sample, means[0], "training texts")


def _rival_cautions(rivals: Sequence[types.Rival]) -> Iterator[str]:
    untested, better_teachers = conditions.untested_teachers(rivals), conditions.better_on_own_labels(rivals)
    for rival in rivals:
        is_better, difference = rival["student_is"] == "worse", words.difference_sentence(rival)
        if is_better and "learned" in rival:
            yield f"{difference}. Of that student, {words.learned_sentence(rival['learned'])}"
            continue
        if untested and is_better and rival["kind"] in {"ensemble", "student"}:
            yield f"{difference}{words.tested_on(rivals)}."
        if is_better and rival["kind"] == "supervised student":
            yield f"{difference}. It was trained on gold labels: if you have them, ship that student."
        if rival in better_teachers:
            yield words.better_on_own_labels_sentence(rival)
        if rival["kind"] == "teacher on its own labels" and 0 < rival["n"] < conditions.LEAST_OF_LABEL:
            yield f"Only {counted(rival['n'], 'test text', 'has', 'have')} a label of teacher {rival['name']}."
