"""Prints the evaluation and the teachers' audit as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from amalgam.pipeline.console import Console
from amalgam.stages.report.blocks import AuditBlock, AuditedLabel, AuditedTeacher, Evaluation, LeftOut, Scores

Score = Literal["accuracy", "macro_f1", "nll_nats", "ece"]
SCORES: tuple[Score, ...] = ("accuracy", "macro_f1", "nll_nats", "ece")

MOST_SYSTEMS, MOST_LABELS = 12, 20


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# ---- evaluation


def print_evaluation(console: Console, scores: Evaluation) -> None:
    """Prints the last systems and the reported one; evaluation.json has all."""
    names = list(scores["systems"])
    names = [name for name in names[:-MOST_SYSTEMS] if name == scores["system"]] + names[-MOST_SYSTEMS:]
    title = f"{scores['n']:,} labelled test texts, {len(scores['labels'])} labels; accuracy over all labels"
    rows = [row(name, scores["systems"][name], scores["groups"]) for name in names]
    console.table(title, header(scores["groups"]), rows)


def header(groups: Iterable[str]) -> list[str]:
    return ["", "accuracy", "macro-F1", "NLL", "ECE", *(f"on {name}" for name in groups)]


def row(name: str, system: Scores, groups: Mapping[str, Any]) -> list[str]:
    """Returns the cells of one system: its name, four measures and the accuracy on each group of labels."""
    measures = (system["accuracy"], system["macro_f1"], system["nll_nats"], system["ece"])
    return [name, *map(number, measures), *(number(system["slice_accuracy"][group]) for group in groups)]


# ---- audit


def print_audit(console: Console, audit: AuditBlock) -> None:
    gold = f"{audit['labelled']:,} with gold labels" if audit["labelled"] else "no gold labels"
    title = f"{audit['texts']:,} texts, {gold}; weights {audit['weights']}, confidence by {audit['uncertainty']}"
    if audit["accuracy"] is not None:
        title += f"; the union has {100 * audit['accuracy']:.1f} % accuracy"
    left_out = ["without it: changed", "accuracy", "agreement"]
    header = ["teacher", "labels", "confidence", "wins", "wins by weight", *left_out, ""]
    console.table(title, header, [_teacher_row(teacher, audit) for teacher in audit["teachers"]])
    conflicts, names = audit["conflicts"], audit["conflicts"]["teachers"]
    if len(names) > 1:
        least = f"{conflicts['confident_from']:g}"
        title = f"\nconflicts: share of the texts on which both confidences are at least {least} and the labels differ"
        rows = [[name, *map(number, shares)] for name, shares in zip(names, conflicts["shares"], strict=True)]
        for index, cells in enumerate(rows, 1):
            cells[index] = "."
        console.table(title, ["", *names], rows)
    if audit["shared_labels"]:
        rows = [
            [" and ".join(pair["teachers"]), f"{pair['texts']:,}", number(pair["disagree"]), ", ".join(pair["labels"])]
            for pair in audit["shared_labels"]
        ]
        title = "\nshared labels: texts on which both teachers predict one, and the share on which they disagree"
        console.table(title, ["teachers", "texts", "disagree", "labels"], rows)
    title = "\nlabels: predictions of each teacher and the share that wins; gold texts, their share won and right"
    header = ["label", "teacher", "predicted", "wins", "gold", "won", "right"]
    console.table(title, header, [_label_row(label, audit) for label in audit["labels"][:MOST_LABELS]])
    if len(audit["labels"]) > MOST_LABELS:
        console.result(f"{len(audit['labels']) - MOST_LABELS} more labels: use --json")
    for line in advice(audit):
        console.result(line)


def _teacher_row(teacher: AuditedTeacher, audit: AuditBlock) -> list[str]:
    left_out, effect = teacher["left_out"], ["-", "-", "-", ""]
    if left_out is not None:
        agreement, gain = left_out["held_out_agreement"], left_out["gain"]
        duplicate = any(teacher["teacher"] in pair["teachers"] for pair in audit["duplicates"])
        effect = [
            number(left_out["changed"]),
            "-" if gain is None else f"{number(left_out['accuracy'])} ({gain:+.3f})",
            f"{number(agreement['with'])} -> {number(agreement['without'])}" if agreement["texts"] else "-",
            ", ".join(["harmful"] * bool(left_out["harmful"]) + ["duplicate"] * duplicate),
        ]
    shares = (teacher["mean_confidence"], teacher["wins"], teacher["wins_by_weights"])
    return [teacher["teacher"], str(teacher["labels"]), *map(number, shares), *effect]


def _label_row(label: AuditedLabel, audit: AuditBlock) -> list[str]:
    texts = next((gold for gold in audit["gold"] if gold["label"] == label["label"]), None)
    shares = ["-"] * 3
    if texts:
        shares = [f"{texts['texts']:,}", number(texts["won"][label["teacher"]]), number(texts["right"])]
    return [label["label"], label["teacher"], f"{label['predicted']:,}", number(label["wins"]), *shares]


def advice(audit: AuditBlock) -> list[str]:
    """Returns one line per harmful teacher and per pair of duplicates, with the action to take."""
    lines = [
        f"harmful teacher: {teacher['teacher']} (without it {_effect(teacher['left_out'])}); "
        "remove it from teachers, or check its labels"
        for teacher in audit["teachers"]
        if teacher["left_out"] and teacher["left_out"]["harmful"]
    ]
    for pair in audit["duplicates"]:
        reason = "the same model"
        if not pair["same_model"]:
            agreement, distance = number(pair["agreement"]), number(pair["distance"])
            reason = f"same label on {agreement} of the texts, mean distance {distance}"
        lines.append(f"duplicates: {' and '.join(pair['teachers'])} ({reason}); remove one of them to save its cost")
    return lines or ["no harmful or duplicate teacher was found"]


def _effect(left_out: LeftOut) -> str:
    if left_out["gain"] is not None:
        return f"accuracy {number(left_out['accuracy'])}, {left_out['gain']:+.3f} +- {number(left_out['gain_error'])}"
    agreement = left_out["held_out_agreement"]
    return f"the agreement of the others is {number(agreement['without'])} instead of {number(agreement['with'])}"
