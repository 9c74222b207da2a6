"""Sentences about rivals and labels, which the verdict, the page and the comparison of reports share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from amalgam.data.keys import shown_name, shown_names
from amalgam.pipeline.console import counted
from amalgam.stages.common.intervals import bounds, difference_bounds, percent, points
from amalgam.stages.report import verdict_types as types
from amalgam.stages.report.conditions import LEAST_OF_LABEL, MOST_OUTSIDE, untested_teachers
from amalgam.stages.report.json_types import EvaluatedSystems, LabelQuality, random_texts, reported_scores

SHOWN = 5
"""Most names in a sentence."""

LEAST_CALIBRATED, MOST_ECE = 100, 0.2
"""Of at least so many test texts, a larger calibration error is a caution; of 50 texts even chance reaches it."""


def listed(names: Sequence[str]) -> str:
    """Returns labels or teachers as a part of a sentence."""
    return shown_names(names, SHOWN)


def name_of(rival: types.RivalCounts) -> str:
    """Returns the rival as the object of a sentence."""
    return {
        "ensemble": "the ensemble",
        "zero-shot": "zero-shot",
        "teacher": f"teacher {rival['name']}",
        "teacher on its own labels": f"teacher {rival['name']} on its own labels",
        "student": f"the other student “{rival['name']}”",
        "supervised student": f"the other student “{rival['name']}”",
        "most frequent label": f"always predicting {shown_name(rival['name'])}",
    }[rival["kind"]]


def difference_sentence(rival: types.Rival) -> str:
    """Returns the better of the two as the subject; the interval is that of the stated difference."""
    name, better = name_of(rival), f"{100 * abs(rival['mean']):.1f} points better than"
    if rival["mean"] >= 0:
        return f"The student is {better} {name} ({figures_of(rival)})"
    return f"{name[0].upper()}{name[1:]} is {better} the student ({figures_of(rival, rival_first=True)})"


def better_on_own_labels_sentence(rival: types.Rival) -> str:
    return f"{difference_sentence(rival)}. The teacher chooses among its own labels alone, the student among all."


def figures_of(rival: types.Rival, *, rival_first: bool = False) -> str:
    n, low, high = rival["n"], rival["low"], rival["high"]
    sign, texts = -1 if rival_first else 1, ""
    if rival.get("selected"):
        smaller = points(sign * rival["on_random"]) if "on_random" in rival else "the difference is smaller"
        texts = f" with selected texts; on random texts alone {smaller}"
    first, second = ratio(rival["student_right"], n), ratio(rival["right"], n)
    if rival_first:
        first, second, low, high = second, first, -high, -low
    of = f" for {rival['together']} comparisons together" if rival["together"] > 1 else ""
    return f"{first} against {second}, 95 % interval{of} {difference_bounds(low, high)}, n = {n:,}{texts}"


def evaluated_texts(evaluation: EvaluatedSystems, of: str = "labelled test text") -> str:
    """Returns the number of the texts of which the scores are: the random ones, if others were selected."""
    random = "random " if "selected" in evaluation and evaluation["selected"]["random"] else ""
    return counted(evaluation["n"], f"{random}{of}")


def selection_sentence(n: int, selected: int, unused: int = 0) -> str:
    """Returns how many test texts were selected, and for which numbers only the n random ones count."""
    total = counted(n + selected, "test text")
    were, them = ("was", "it") if selected == 1 else ("were", "them")
    if not n:
        every = "The only test text" if selected == 1 else f"All {total}"
        return f"{every} {were} selected (column `why`): the accuracy on ordinary texts is unknown."
    random = f"numbers are of the {counted(n, 'random text')}."
    another = f"for another student, or by an older version, so nothing uses {them}. All {random}"
    if selected == unused:
        return f"{selected:,} of {total} {were} selected (column `why`) {another}"
    used = f"{selected - unused:,} of them" if unused else them
    return (
        f"{selected:,} of {total} {were} selected (column `why`). Only the comparison with the ensemble uses {used}; "
        f"its difference is larger than on ordinary texts. All other {random}"
    )


def learned_sentence(learned: types.LearnedTexts) -> str:
    part = f"{learned['texts']:,} of {counted(learned['of'], 'test text')}"
    if learned.get("validation"):
        also = "is also a validation text" if learned["texts"] == 1 else "are also validation texts"
        return f"{part} {also}, which selected the checkpoint: the accuracy on new texts may be lower."
    if learned.get("generated"):
        written = "was written by stage generate" if learned["texts"] == 1 else "were written by stage generate"
        return f"{part} {written}: the accuracy on real texts is unknown."
    if learned["labelled"]:
        most = 100 * learned["texts"] / learned["of"]
        were = "was learned with its gold label" if learned["texts"] == 1 else "were learned with their gold labels"
        return f"{part} {were}: accuracies are up to {most:.1f} points too high."
    also = "is also a training text" if learned["texts"] == 1 else "are also training texts"
    return f"{part} {also}, so the accuracy on new texts may be lower."


def evaluation_cautions(evaluation: EvaluatedSystems | None) -> Iterator[str]:
    """Yields the cautions on test texts that are not ordinary new texts, and on probabilities."""
    if evaluation is None:
        return
    yield from cautions_on_texts(evaluation)
    ece = reported_scores(evaluation)["ece"]
    if evaluation["n"] >= LEAST_CALIBRATED and ece is not None and ece > MOST_ECE:
        off = f"The probabilities differ from the accuracy by {100 * ece:.1f} points on average (ECE)"
        yield f"{off}: before you use a threshold, measure the accuracy above it."


def cautions_on_texts(evaluation: EvaluatedSystems) -> Iterator[str]:
    """Yields the cautions on test texts that are not ordinary new texts."""
    if "selected" in evaluation:
        selected = evaluation["selected"]
        yield selection_sentence(selected["random"], selected["texts"], selected.get("unused", 0))
    if "learned" in evaluation:
        yield learned_sentence(evaluation["learned"])
    n, accuracy = random_texts(evaluation), reported_scores(evaluation)["accuracy"]
    if n:
        yield from outside_sentence(evaluation["left_out"], n, accuracy, "test texts")


def outside_sentence(outside: int, n: int, accuracy: float, texts: str) -> Iterator[str]:
    """Yields a caution if many labelled texts are not among the n counted ones because no teacher has their label."""
    total = n + outside
    if outside > MOST_OUTSIDE * total:
        have = "has a label of no teacher and is" if outside == 1 else "have a label of no teacher and are"
        right = f"{'about ' * (texts != 'test texts')}{percent(accuracy * n / total)}"
        yield f"{outside:,} of {total:,} labelled {texts} {have} not counted: of all {total:,}, {right} are right."


def outside_line(outside: int) -> str:
    """Returns the end of a line with a number of labelled texts: those with a label of no teacher."""
    return f"; {outside:,} more {'has' if outside == 1 else 'have'} a label of no teacher" if outside else ""


def ratio(count: int, n: int) -> str:
    return percent(count / max(n, 1))


def weight_estimate_sentence(estimates: types.WeightEstimates) -> str:
    """Returns the accuracies that are estimated without labels; the interval is that of the first system."""
    first, *others = (system for system in estimates["systems"] if system["kind"] != "muka")
    also = ", ".join(f"that of the {other['name']} at {percent(other['mean'])}" for other in others)
    owner = "targets'" if first["kind"] == "targets" else f"{first['name']}'s"
    return (
        f"The {owner} accuracy is estimated at {percent(first['mean'])} "
        f"(95 % interval {bounds(first['low'], first['high'])}); {also}. "
        "This holds if the teachers are right on most texts of their own labels."
    )


def estimate_sentence(estimates: types.LabelEstimates) -> str:
    """Returns the estimated accuracies on labelled training texts, and the condition under which they hold."""
    systems = {system["kind"]: system for system in estimates["systems"]}
    student, *others = (systems[kind] for kind in ("student", "targets", "ensemble") if kind in systems)
    also = "; ".join(f"the {other['name']} {percent(other['mean'])}" for other in others)
    sentence = (
        f"On {estimates['n']:,} labelled training texts, which it did not learn, the student has about "
        f"{percent(student['mean'])} accuracy (95 % interval {bounds(student['low'], student['high'])})"
    )
    condition = "" if estimates["random"] else " This holds if they are a random sample of the training texts."
    return f"{sentence}{f'; {also}' if also else ''}.{condition}"


def share_of_unknown_line(share: types.ShareOfUnknown) -> str:
    """Returns the share of training texts of no label."""
    of = f"{share['unknown']:,} of {share['n']:,} texts {'fits' if share['unknown'] == 1 else 'fit'} no label"
    return f"{of}: {ratio(share['unknown'], share['n'])} ({bounds(share['low'], share['high'])})"


def never_right_sentence(lost: Sequence[LabelQuality]) -> str:
    if len(lost) == 1:
        return f"The label {shown_name(lost[0]['label'])} is never predicted right, with {lost[0]['n']:,} test texts."
    never = f"{len(lost):,} labels are never predicted right, each with at least {LEAST_OF_LABEL} test texts"
    return f"{never}: {listed([row['label'] for row in lost])}."


def tested_on(rivals: Sequence[types.RivalCounts]) -> str:
    """Returns the end of a sentence with a difference: that no or few test texts have a label of some teacher."""
    counts = {rival["name"]: rival["n"] for rival in rivals if rival["kind"] == "teacher on its own labels"}
    untested, few = untested_teachers(rivals), [name for name, n in counts.items() if n < LEAST_OF_LABEL]
    if untested:
        return f", on texts without a label of {teachers_named(untested)}"
    return f", on texts of which fewer than {LEAST_OF_LABEL} have a label of {teachers_named(few)}" if few else ""


def teachers_named(names: Sequence[str]) -> str:
    return f"{'teacher' if len(names) == 1 else 'the teachers'} {listed(names)}"
