"""Prints the evaluation and the teachers' audit as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from amalgam.data.keys import shown_name, shown_names
from amalgam.pipeline.console import Console, counted
from amalgam.stages.cache_teachers.sample import pass_audit_lines
from amalgam.stages.common.intervals import bounds, interval, nats, percent, points
from amalgam.stages.report import json_types
from amalgam.stages.report.conditions import LEAST_TEXTS
from amalgam.stages.report.verdict_types import LabelEstimates, SystemEstimate
from amalgam.stages.report.verdict_words import evaluated_texts, outside_line, share_of_unknown_line

Score = Literal["accuracy", "macro_f1", "nll_nats", "ece"]
SCORES: tuple[Score, ...] = ("accuracy", "macro_f1", "nll_nats", "ece")

MOST_SYSTEMS, MOST_LABELS = 12, 20


def share(value: float | None) -> str:
    return "-" if value is None else percent(value)


def measure_of(scores: json_types.Measures, score: Score) -> str:
    """Returns a measure of a system; NLL is infinite if a gold label has probability 0."""
    return "∞" if score == "nll_nats" and scores.get("nll_infinite") else measure(score, scores[score])


def measure(score: Score, value: float | None) -> str:
    """Returns a measure as on the page: NLL in nats, the others in percent."""
    return nats(value) if score == "nll_nats" and value is not None else share(value)


# ---- evaluation


def print_evaluation(console: Console, evaluation: json_types.EvaluationSection) -> None:
    """Prints the last systems and the reported one; evaluation.json has all."""
    names, groups = list(evaluation["systems"]), evaluation["groups"]
    names = [name for name in names[:-MOST_SYSTEMS] if name == evaluation["system"]] + names[-MOST_SYSTEMS:]
    texts = evaluated_texts(evaluation)
    title = f"{texts}, {evaluation['labels']} labels; accuracy over all labels{outside_line(evaluation['left_out'])}"
    rows = [row(name, evaluation["systems"][name], groups) for name in names]
    figures = bounds(*interval(json_types.reported_scores(evaluation)["accuracy"], evaluation["n"]))
    console.table(f"{title}\n95 % interval of {evaluation['system']}: {figures}", header(groups), rows)


def print_report_estimates(console: Console, numbers: json_types.ReportJson) -> bool:
    """Prints the share of unknown texts and the estimated accuracies; returns whether there are estimates."""
    by_labels, unlabelled = numbers["label_estimates"], numbers["unlabelled"]
    if numbers["unknown_share"]:
        console.verdict([f"  {share_of_unknown_line(numbers['unknown_share'])}"])
    if by_labels:
        print_estimates(console, f"  accuracy by labels: {estimate_line(by_labels)}", by_labels["systems"])
    elif unlabelled and unlabelled["estimates"]:
        title = "  accuracy estimated without labels, from the teachers' weights"
        print_estimates(console, title, unlabelled["estimates"]["systems"])
    return bool(by_labels or (unlabelled and unlabelled["estimates"]))


def print_estimates(console: Console, title: str, systems: Sequence[SystemEstimate]) -> None:
    rows = [
        [system_name(system), f"{system['n']:,}", percent(system["mean"]), bounds(system["low"], system["high"])]
        if system["n"]
        else [system_name(system), "0", "-", "-"]
        for system in systems
    ]
    console.table(title, ("", "n", "accuracy", "95 % interval"), rows)


def estimate_line(estimates: LabelEstimates) -> str:
    """Returns the number of the texts and how they were picked, for the terminal and the page."""
    count = f"{estimates['n']:,} of {estimates['labels']:,} labelled training texts"
    if estimates["n"] == estimates["labels"]:
        count = f"{estimates['n']:,} labelled training texts"
    sample = sample_words(is_random=estimates["random"])
    have = "has no label and may be a harder one" if estimates["empty"] == 1 else "have no label and may be harder ones"
    empty = f"; {estimates['empty']:,} more {have}" if estimates["empty"] else ""
    return f"{count}, {sample}{outside_line(estimates.get('left_out', 0))}{empty}"


def sample_words(*, is_random: bool) -> str:
    return "picked at random" if is_random else "a random sample only if you picked them at random"


def system_name(system: SystemEstimate) -> str:
    names = {
        "muka": "MUKA's targets",
        "teacher": f"teacher {system['name']}",
        "teacher on its own labels": f"{system['name']} on its own labels",
    }
    return names.get(system["kind"], system["name"])


def unknown_line(unknown: json_types.UnknownQuality) -> str:
    """Returns how many texts the student flags as unknown, for the terminal and the page."""
    n, of_labelled = unknown["labelled"], percent(unknown["labelled_flagged"] / max(unknown["labelled"], 1))
    if unknown["auroc"] is None:
        return f"the student flags {of_labelled} of {counted(n, 'test text')} as unknown"
    flagged = percent(unknown["unknown_flagged"] / unknown["unknown"])
    flagged += f" of {counted(unknown['unknown'], 'unknown test text')} and {of_labelled} of {counted(n, 'other')}"
    auroc = f"AUROC {unknown['auroc']:.3f}, 95 % interval {unknown['low']:.3f} to {unknown['high']:.3f}"
    return f"the student flags {flagged} as unknown ({auroc})"


def header(groups: Iterable[str]) -> list[str]:
    return ["", "accuracy", "macro-F1", "NLL", "ECE", *(f"on {name}" for name in groups)]


def row(name: str, system: json_types.SystemScores, groups: Iterable[str]) -> list[str]:
    """Returns the cells of one system: its name, four measures and the accuracy on each group of labels."""
    measures = (measure_of(system, score) for score in SCORES)
    return [name, *measures, *(share(system["slice_accuracy"][group]) for group in groups)]


# ---- audit


def print_audit(console: Console, audit: json_types.AuditSection) -> None:
    gold = "no gold labels (corpus.label) that training did not use"
    gold = f"{audit['labelled']:,} with gold labels" if audit["labelled"] else gold
    weights = f"weights {audit['weights']}, confidence by {audit['uncertainty']}"
    title = f"{counted(audit['texts'], 'text')}, {gold}; {weights}"
    if audit["accuracy"] is not None:
        title += f"; the union has {percent(audit['accuracy'])} accuracy"
    effect = ["without it: changed", "accuracy", "agreement"]
    header = ["teacher", "labels", "confidence", "wins", "wins by weight", *effect, ""]
    console.table(title, header, [_teacher_row(teacher, audit) for teacher in audit["teachers"]])
    conflicts, names = audit["conflicts"], audit["conflicts"]["teachers"]
    if len(names) > 1:
        least = percent(conflicts["confident_from"])
        title = f"\nconflicts: share of the texts on which both confidences are at least {least} and the labels differ"
        rows = [[name, *map(share, shares)] for name, shares in zip(names, conflicts["shares"], strict=True)]
        for index, cells in enumerate(rows, 1):
            cells[index] = "."
        console.table(title, ["", *names], rows)
    if audit["shared_labels"]:
        rows = [
            [
                " and ".join(pair["teachers"]),
                *(f"{share(pair['same'] / given if given else None)} of {given:,}" for given in pair["given"]),
                shown_names(pair["labels"]),
            ]
            for pair in audit["shared_labels"]
        ]
        title = "\nshared labels: by teacher, the texts that get one, and the share that gets the same from the other"
        console.table(title, ["teachers", "of the first", "of the second", "labels"], rows)
    title = "\nlabels: predictions of each teacher and the share that wins; gold texts, their share won and right"
    header = ["label", "teacher", "predicted", "wins", "gold", "won", "right"]
    console.table(title, header, [_label_row(label, audit) for label in audit["labels"][:MOST_LABELS]])
    if len(audit["labels"]) > MOST_LABELS:
        console.result(f"{len(audit['labels']) - MOST_LABELS} more labels: use --json")
    for line in (*advice(audit), *(pass_audit_lines(audit["passes"]) if "passes" in audit else ())):
        console.result(line)


def _teacher_row(teacher: json_types.AuditedTeacher, audit: json_types.AuditSection) -> list[str]:
    left_out, effect = teacher["left_out"], ["-", "-", "-", ""]
    if left_out is not None:
        agreement, gain = left_out["held_out_agreement"], left_out["gain"]
        duplicate = any(teacher["teacher"] in pair["teachers"] for pair in audit["duplicates"])
        effect = [
            share(left_out["changed"]),
            "-" if gain is None else f"{share(left_out['accuracy'])} ({points(gain)})",
            f"{share(agreement['with'])} -> {share(agreement['without'])}" if agreement["texts"] else "-",
            ", ".join(
                ["harmful"] * bool(left_out["harmful"])
                + ["disagrees"] * _disagrees(left_out)
                + ["duplicate"] * duplicate
            ),
        ]
    shares = (teacher["mean_confidence"], teacher["wins"], teacher["wins_by_weights"])
    return [teacher["teacher"], str(teacher["labels"]), *map(share, shares), *effect]


def _label_row(label: json_types.AuditedLabel, audit: json_types.AuditSection) -> list[str]:
    texts = next((gold for gold in audit["gold"] if gold["label"] == label["label"]), None)
    shares = ["-"] * 3
    if texts:
        shares = [f"{texts['texts']:,}", share(texts["won"][label["teacher"]]), share(texts["right"])]
    return [shown_name(label["label"]), label["teacher"], f"{label['predicted']:,}", share(label["wins"]), *shares]


def advice(audit: json_types.AuditSection) -> list[str]:
    """Returns one line per harmful or disagreeing teacher and per pair of duplicates, with the action to take."""
    effects = [(teacher["teacher"], teacher["left_out"]) for teacher in audit["teachers"] if teacher["left_out"]]
    lines = [
        f"harmful teacher: {name} (without it {_effect(effect)}); remove it from teachers, or check its labels"
        for name, effect in effects
        if effect["harmful"]
    ]
    lines += [
        f"teacher {name} disagrees with the others ({_agreement(effect)}); label some texts to see which are right"
        for name, effect in effects
        if _disagrees(effect)
    ]
    for pair in audit["duplicates"]:
        reason = "the same model"
        if not pair["same_model"]:
            agreement, distance = share(pair["agreement"]), f"{pair['distance']:.3f}"
            reason = f"same label on {agreement} of the texts, mean distance {distance}"
        lines.append(f"duplicates: {' and '.join(pair['teachers'])} ({reason}); remove one of them to save its cost")
    if any(effect["harmful"] is None for _, effect in effects):
        none = [] if lines else ["no duplicate teacher was found"]
        return [*lines, *none, f"harmful teachers are named only with {LEAST_TEXTS} gold labels or more"]
    return lines or ["no harmful or duplicate teacher was found"]


def _disagrees(left_out: json_types.LeftOut) -> bool:
    """Returns whether a teacher disagrees with the others, and no gold label shows who is right."""
    return left_out["harmful"] is None and bool(left_out.get("disagrees"))


def _effect(left_out: json_types.LeftOut) -> str:
    change = f"{points(left_out['gain'] or 0.0)} ± {100 * (left_out['gain_error'] or 0.0):.1f} points"
    return f"accuracy {share(left_out['accuracy'])}, {change}"


def _agreement(left_out: json_types.LeftOut) -> str:
    agreement = left_out["held_out_agreement"]
    return f"their agreement is {share(agreement['without'])} without it, {share(agreement['with'])} with it"
