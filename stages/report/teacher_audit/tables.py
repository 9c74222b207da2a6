"""Prints the teachers' audit as tables."""

from __future__ import annotations

from amalgam.pipeline.console import Console
from amalgam.stages.report.blocks import AuditBlock, AuditedTeacher, Conflicts, LeftOut

MOST_LABELS = 20


def show(console: Console, audit: AuditBlock) -> None:
    gold = f"{audit['labelled']:,} with gold labels" if audit["labelled"] else "no gold labels"
    title = f"{audit['texts']:,} texts, {gold}; weights {audit['weights']}, confidence by {audit['uncertainty']}"
    if audit["accuracy"] is not None:
        title += f"; the union has {100 * audit['accuracy']:.1f} % accuracy"
    left_out = ["without it: changed", "accuracy", "agreement"]
    header = ["teacher", "labels", "confidence", "wins", "wins by weight", *left_out, ""]
    console.table(title, header, [_teacher_row(teacher, audit) for teacher in audit["teachers"]])
    if len(audit["teachers"]) > 1:
        _show_conflicts(console, audit["conflicts"])
    if audit["shared_labels"]:
        rows = [
            [" and ".join(pair["teachers"]), f"{pair['texts']:,}", number(pair["disagree"]), ", ".join(pair["labels"])]
            for pair in audit["shared_labels"]
        ]
        title = "\nshared labels: texts on which both teachers predict one, and the share on which they disagree"
        console.table(title, ["teachers", "texts", "disagree", "labels"], rows)
    _show_labels(console, audit)
    for line in advice(audit):
        console.result(line)


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
        error = number(left_out["gain_error"])
        return f"accuracy {number(left_out['accuracy'])}, {left_out['gain']:+.3f} +- {error}"
    agreement = left_out["held_out_agreement"]
    return f"the agreement of the others is {number(agreement['without'])} instead of {number(agreement['with'])}"


def _teacher_row(teacher: AuditedTeacher, audit: AuditBlock) -> list[str]:
    left_out, effect = teacher["left_out"], ["-", "-", "-", ""]
    if left_out is not None:
        agreement, gain = left_out["held_out_agreement"], left_out["gain"]
        duplicate = any(teacher["teacher"] in pair["teachers"] for pair in audit["duplicates"])
        remarks = ["harmful"] * bool(left_out["harmful"]) + ["duplicate"] * duplicate
        effect = [
            number(left_out["changed"]),
            "-" if gain is None else f"{number(left_out['accuracy'])} ({gain:+.3f})",
            f"{number(agreement['with'])} -> {number(agreement['without'])}" if agreement["texts"] else "-",
            ", ".join(remarks),
        ]
    shares = (teacher["mean_confidence"], teacher["wins"], teacher["wins_by_weights"])
    return [teacher["teacher"], str(teacher["labels"]), *map(number, shares), *effect]


def _show_conflicts(console: Console, conflicts: Conflicts) -> None:
    names = conflicts["teachers"]
    rows = [
        [name, *("." if name == column else number(share) for column, share in zip(names, shares, strict=True))]
        for name, shares in zip(names, conflicts["shares"], strict=True)
    ]
    least = f"{conflicts['confident_from']:g}"
    title = f"\nconflicts: share of the texts on which both confidences are at least {least} and the labels differ"
    console.table(title, ["", *names], rows)


def _show_labels(console: Console, audit: AuditBlock) -> None:
    gold = {row["label"]: row for row in audit["gold"]}
    rows = []
    for label in audit["labels"][:MOST_LABELS]:
        texts = gold.get(label["label"])
        shares = ["-"] * 3
        if texts:
            shares = [f"{texts['texts']:,}", number(texts["won"][label["teacher"]]), number(texts["right"])]
        rows.append([label["label"], label["teacher"], f"{label['predicted']:,}", number(label["wins"]), *shares])
    title = "\nlabels: predictions of each teacher and the share that wins; gold texts, their share won and right"
    console.table(title, ["label", "teacher", "predicted", "wins", "gold", "won", "right"], rows)
    if len(audit["labels"]) > MOST_LABELS:
        console.result(f"{len(audit['labels']) - MOST_LABELS} more labels: use --json")


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
