"""Decides whether to ship a student, or that the texts do not suffice, with the causes and the next command.

docs/verdict.md has the rule. It reads counts alone: of the student and each rival on the same labelled test texts, or
without labels the agreement with the targets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from amalgam.pipeline.console import counted
from amalgam.stages.common.intervals import bounds, errors_of, interval, paired, texts_needed, unpaired
from amalgam.stages.report import conditions
from amalgam.stages.report import verdict_types as types
from amalgam.stages.report import verdict_words as words
from amalgam.stages.report.causes import absent_cautions, causes_of, cautions_of, left_out_cautions, too_few
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

PRINTED = 4
"""Most reasons that `amalgam run` prints."""


# ---- the verdict


def verdict(inputs: types.VerdictInputs) -> types.Verdict:
    if not inputs.n and not inputs.selected:
        return _without_labels(inputs)
    kinds = [counts["kind"] for counts in inputs.rivals]
    rivals = [compared(counts, kinds.count(counts["kind"])) for counts in inputs.rivals]
    faults = list(_faults(inputs, rivals))
    decision, reasons, needed = _decided(inputs, rivals)
    if decision == "ship" and inputs.learned and conditions.were_learned(inputs.learned):
        decision, reasons = "cannot say", [words.learned_sentence(inputs.learned)]
    if decision == "cannot say" and not faults:
        faults = list(_below_linear_map(inputs.linear_map))
    if faults:
        decision, reasons, needed = "do not ship", faults, None
    causes = list(causes_of(inputs, rivals)) if decision != "ship" else []
    if decision == "cannot say":
        causes += too_few(inputs, rivals, needed)
    return {
        "decision": decision,
        "reasons": reasons,
        "causes": causes,
        "cautions": list(cautions_of(inputs, rivals)),
        "next": next_step(inputs, decision, causes, rivals, needed),
        "rivals": rivals,
        "texts_needed": needed,
    }


def lines(verdict: types.Verdict, cautions: Sequence[str] = (), place: str = "", page: str = "") -> list[str]:
    """Returns the end of `amalgam run`: the decision with its reasons, cautions, the causes, and the next step.

    `place` follows the word "next": the folder of its command. `page` has all cautions.
    """
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


def _decided(
    inputs: types.VerdictInputs, rivals: Sequence[types.Rival]
) -> tuple[types.Decision, list[str], int | None]:
    """Compares the student with the baseline: the decision, its reason, and the texts that would decide."""
    if inputs.n < conditions.LEAST_TEXTS:
        return "cannot say", [_too_few_sentence(inputs)], None
    by_kind = {rival["kind"]: rival for rival in rivals}
    baseline = next(by_kind[kind] for kind in BASELINES if kind in by_kind)  # of test texts the last one always exists
    untested = conditions.untested_teachers(rivals)
    if untested:
        return "cannot say", [f"No test text has a label of {words.teachers_named(untested)}."], None
    if baseline["student_is"] == "better":
        reason = (
            f"{words.difference_sentence(baseline)}{words.tested_on(rivals)}, and no rival is significantly better."
        )
        return "ship", [reason], None
    if baseline["low"] > -EQUAL:
        reason = f"The student is at most 1 point worse than {words.name_of(baseline)} ({words.figures_of(baseline)})"
        return "ship", [f"{reason}, and no rival is significantly better."], None
    reason = f"The student and {words.name_of(baseline)} are not clearly different ({words.figures_of(baseline)})."
    n, gained, lost = baseline["n"], baseline["gained"] or 0, baseline["lost"] or 0
    return "cannot say", [reason], None if inputs.selected else texts_needed(gained, lost, n, EQUAL)


def _too_few_sentence(inputs: types.VerdictInputs) -> str:
    random = "random " if inputs.selected else ""
    texts = counted(inputs.n, f"{random}labelled test text", "is", "are")
    return f"{texts} too few: a verdict needs at least {conditions.LEAST_TEXTS}."


# ---- do not ship


def _faults(inputs: types.VerdictInputs, rivals: Sequence[types.Rival]) -> Iterator[str]:
    yield from _better_rivals(rivals)
    yield from _missed_labels(inputs)
    for rival in conditions.lost_teachers(rivals):
        of_student, of_teacher = (words.ratio(count, rival["n"]) for count in (rival["student_right"], rival["right"]))
        yield (
            f"On the labels of teacher {rival['name']} the student has {of_student} accuracy, less than half of "
            f"the teacher's {of_teacher} (n = {rival['n']:,}). The teacher chooses among these labels alone."
        )
    yield from _useless(rivals)


def _better_rivals(rivals: Sequence[types.Rival]) -> Iterator[str]:
    """Yields the better rivals: none that learned the texts, or that texts without a label of some teacher favour."""
    favoured = FAVOURED if conditions.untested_teachers(rivals) else ()
    blocking = [rival for rival in rivals if rival["kind"] in BLOCKING and rival["kind"] not in favoured]
    better = [rival for rival in blocking if rival["student_is"] == "worse" and "learned" not in rival]
    best: dict[types.Kind, list[types.Rival]] = {}
    for rival in sorted(better, key=lambda rival: rival["mean"]):
        best.setdefault(rival["kind"], []).append(rival)
    for kind, (rival, *more) in best.items():
        also = f"; {len(more)} more {kind}{'s are' if len(more) > 1 else ' is'} better too" if more else ""
        yield f"{words.difference_sentence(rival)}{words.tested_on(rivals)}{also}."


def _missed_labels(inputs: types.VerdictInputs) -> Iterator[str]:
    lost = conditions.never_right(inputs)
    if conditions.many_lost(lost, inputs):
        yield words.never_right_sentence(lost)
    rare = _missed_rare_labels(inputs)
    if rare:
        names, n = [row["label"] for row in rare], sum(row["n"] for row in rare)
        never = f"{counted(len(names), 'label', 'is', 'are')} never predicted right, with {n:,} test texts together"
        yield f"{never}: {words.listed(names)}."


def _missed_rare_labels(inputs: types.VerdictInputs) -> list[types.LabelCounts]:
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


def _without_labels(inputs: types.VerdictInputs) -> types.Verdict:
    quality, faults, cautions = inputs.unlabelled, list[str](), list[str]()
    reasons = ["There are no labelled test texts.", *_estimates(inputs)]
    cautions += [*left_out_cautions(inputs), *absent_cautions(inputs)]
    if inputs.by_labels:
        worse = _worse_than_ensemble(inputs.by_labels)
        (faults if inputs.by_labels["random"] else cautions).extend([worse] if worse else [])
    if quality:
        faults += _unlabelled_faults(quality, inputs.linear_map)
        reasons += [_agreement(quality), *_shares(quality)]
        cautions += [] if conditions.many_unpredicted(quality) else _unpredicted(quality)
        both = "Agreement and estimates are" if quality["estimates"] else "Agreement is"
        cautions.append(f"{both} no accuracy: the student repeats the teachers' errors too.")
    decision: types.Decision = "do not ship" if faults else "cannot say"
    causes = list(causes_of(inputs, []))
    causes.append({"code": "no-labels", "text": "there are no labelled test texts"})
    return {
        "decision": decision,
        "reasons": faults or reasons,
        "causes": causes,
        "cautions": cautions,
        "next": next_step(inputs, decision, causes, [], None),
        "rivals": [],
        "texts_needed": None,
    }


def _estimates(inputs: types.VerdictInputs) -> Iterator[str]:
    """Yields the estimated accuracy: by labelled training texts, else without labels."""
    if inputs.by_labels:
        yield words.estimate_sentence(inputs.by_labels)
    elif inputs.unlabelled and inputs.unlabelled["estimates"]:
        yield words.weight_estimate_sentence(inputs.unlabelled["estimates"])


def _unlabelled_faults(quality: types.UnlabelledQuality, linear: types.PairedCounts | None) -> Iterator[str]:
    agreement = quality["agreement"]
    if conditions.many_unpredicted(quality):
        yield from _unpredicted(quality)
    yield from _lost_without_labels(quality)
    yield from _below_ensemble(quality)
    if interval(agreement["right"] / max(agreement["n"], 1), agreement["n"])[1] < LEAST_AGREEMENT:
        missed = [NOT_LEARNED] if agreement["reference"] == "targets" else []
        yield " ".join([*missed, _agreement(quality)])
    else:
        yield from _below_linear_map(linear)


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
            f"(95 % interval {100 * gap['low']:+.1f} to {100 * gap['high']:+.1f}, n = {gap['n']:,} held-out texts)."
        )


def _below_linear_map(linear: types.PairedCounts | None) -> Iterator[str]:
    """Yields by how much a linear map of the encoder's states fits the targets better, if that is clear."""
    if not linear:
        return
    mean, most, least = (-100 * bound for bound in paired(linear["gained"], linear["lost"], linear["n"]))
    if least > 0 and mean > 100 * LINEAR_LEAD:
        student, texts = words.ratio(linear["student_right"], linear["n"]), counted(linear["n"], "held-out text")
        ratio, points = words.ratio(linear["right"], linear["n"]), f"{mean:+.1f} points"
        yield (
            f"{NOT_LEARNED} It has their label on {student} of {texts}, "
            f"a linear map of its encoder's states on {ratio} "
            f"({points}, 95 % interval {least:+.1f} to {most:+.1f})."
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
            f"The student predicts {row['label']} on {words.ratio(row['predicted'], n)} of the texts; "
            f"{HAVE[reference]} it on {words.ratio(row['expected'], n)}."
        )


def _worse_than_ensemble(estimates: types.LabelEstimates) -> str | None:
    """Returns a sentence if the student is significantly worse than the ensemble on the labelled training texts."""
    if estimates["gained"] is None or estimates["lost"] is None:
        return None
    mean, low, high = paired(estimates["gained"], estimates["lost"], estimates["n"])
    if high >= 0:
        return None
    numbers = f"95 % interval {-100 * high:+.1f} to {-100 * low:+.1f}, n = {estimates['n']:,}"
    return f"On labelled training texts the ensemble is {-100 * mean:.1f} points better than the student ({numbers})."
