"""The audit as plain tables."""

from __future__ import annotations

from typing import Any

from amalgam.pipeline.console import Console

MOST_LABELS = 20


def show(console: Console, found: dict[str, Any]) -> None:
    of_gold = f"{found['labelled']:,} with gold labels" if found["labelled"] else "no gold labels"
    title = f"{found['texts']:,} texts, {of_gold}; weights {found['weights']}, confidence by {found['uncertainty']}"
    if found["accuracy"] is not None:
        title += f"; the union is right on {found['accuracy']:.3f}"
    header = ["teacher", "labels", "confidence", "wins", "by weights", "left out: changes", "accuracy", "agreement", ""]
    console.table(title, header, [_teacher(one, found) for one in found["teachers"]])
    if len(found["teachers"]) > 1:
        _show_conflicts(console, found["conflicts"])
    if found["shared_labels"]:
        rows = [
            [" and ".join(one["teachers"]), f"{one['texts']:,}", _number(one["disagree"]), ", ".join(one["labels"])]
            for one in found["shared_labels"]
        ]
        console.table("\ntexts on which both say a label that both know", ["", "texts", "disagree", "labels"], rows)
    _show_labels(console, found)
    for line in verdicts(found):
        console.result(line)


def verdicts(found: dict[str, Any]) -> list[str]:
    """What a person should look at."""
    said = []
    for one in found["teachers"]:
        if one["left_out"] and one["left_out"]["harmful"]:
            why = _why(one["left_out"])
            said.append(
                f"harmful: {one['teacher']} (without it {why}); leave it out of teachers, or look at its labels"
            )
    for pair in found["duplicates"]:
        if pair["same_model"]:
            why = "the very same model"
        else:
            why = f"same label on {pair['agreement']:.3f} of the texts, mean distance {pair['distance']:.3f}"
        said.append(f"duplicates: {' and '.join(pair['teachers'])} ({why}); one of them costs without telling more")
    return said or ["no harmful or duplicate teacher was found"]


def _why(left_out: dict[str, Any]) -> str:
    if left_out["gain"] is not None:
        return f"accuracy {left_out['accuracy']:.3f}, {left_out['gain']:+.3f} +- {left_out['gain_error']:.3f}"
    agreement = left_out["held_out_agreement"]
    return f"the others agree with each other on {agreement['without']:.3f} instead of {agreement['with']:.3f}"


def _teacher(one: dict[str, Any], found: dict[str, Any]) -> list[str]:
    left_out = one["left_out"]
    if left_out is None:
        absence = ["-", "-", "-", ""]
    else:
        agreement = left_out["held_out_agreement"]
        gain = "-" if left_out["gain"] is None else f"{left_out['accuracy']:.3f} ({left_out['gain']:+.3f})"
        agreed = "-" if not agreement["texts"] else f"{agreement['with']:.3f} -> {agreement['without']:.3f}"
        twin = any(one["teacher"] in pair["teachers"] for pair in found["duplicates"])
        marks = ["harmful"] * bool(left_out["harmful"]) + ["duplicate"] * twin
        absence = [_number(left_out["changed"]), gain, agreed, ", ".join(marks)]
    shares = [_number(one[key]) for key in ("mean_confidence", "wins", "wins_by_weights")]
    return [one["teacher"], str(one["labels"]), *shares, *absence]


def _show_conflicts(console: Console, conflicts: dict[str, Any]) -> None:
    names = conflicts["teachers"]
    rows = [
        [name, *("." if name == other else _number(share) for other, share in zip(names, shares, strict=True))]
        for name, shares in zip(names, conflicts["shares"], strict=True)
    ]
    title = (
        f"\nconflicts: share of the texts on which both are confident (>= {conflicts['confident_from']:g}) and differ"
    )
    console.table(title, ["", *names], rows)


def _show_labels(console: Console, found: dict[str, Any]) -> None:
    gold = {one["label"]: one for one in found["gold"]}
    rows = []
    for one in found["labels"][:MOST_LABELS]:
        known = gold.get(one["label"])
        of_gold = (
            [f"{known['texts']:,}", _number(known["won"][one["teacher"]]), _number(known["right"])] if known else []
        )
        rows.append([one["label"], one["teacher"], f"{one['says']:,}", _number(one["wins"]), *(of_gold or ["-"] * 3)])
    more = len(found["labels"]) - MOST_LABELS
    title = "\nlabels: how often a teacher says one and then wins the text; of the gold label's texts, won and right"
    console.table(title, ["label", "teacher", "said", "wins", "gold", "won", "right"], rows)
    if more > 0:
        console.result(f"... and {more} more: --json has them all")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
