"""Renders report.json as one HTML page without scripts or requests; every text is escaped."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup, escape

from amalgam.data.keys import shown_names
from amalgam.pipeline.config.schema import TEACHER
from amalgam.pipeline.console import duration, printable, size
from amalgam.stages.cache_teachers.sample import pass_audit_lines
from amalgam.stages.common.intervals import bounds, difference_bounds, interval, nats, percent, points
from amalgam.stages.report.figures import coverage_of, figures, spikes
from amalgam.stages.report.json_types import Conflicts, Measures, ModelSize, ReportJson
from amalgam.stages.report.report_json import TEST, total_seconds
from amalgam.stages.report.tables import advice, estimate_line, system_name, unknown_line
from amalgam.stages.report.verdict_types import Threshold, UnlabelledQuality
from amalgam.stages.report.verdict_words import evaluated_texts, share_of_unknown_line

TEMPLATES = Path(__file__).parent

NO_VALUE = "\N{EN DASH}"

MOST_LETTERS = 600
"""Letters of any text on the page."""

CLASSES_SHOWN, SYSTEMS_SHOWN, TEACHERS_SHOWN = 30, 16, 12
"""Most rows of a table."""

LEAST_ANSWERED, GOOD = 20, 0.95
"""Least texts above a probability for a sentence about it, and the accuracy that the sentence looks for."""

SMALL_GAP = 2.0
"""Points between mean probability and accuracy that count as equal."""

MILLION = 10**6

STUDENT = "student "
"""Start of another student's row."""

JOINERS = "\u200c\u200d"
"""Persian, Indic scripts and emoji need these letters."""

SECTION = "<h2>(.+?)</h2>"
"""A section of the template; texts from data are escaped."""

SPACES = str.maketrans("\n\r\t", "   ")


# ---- rendering


def page(numbers: ReportJson) -> str:
    html = render("page.html.j2", numbers=numbers, figures=figures(numbers), view=_view(numbers))
    links = (f'<a href="#{_anchor(title)}">{title}</a>' for title in re.findall(SECTION, html))
    linked = re.sub(SECTION, lambda match: f'<h2 id="{_anchor(match[1])}">{match[1]}</h2>', html)
    return linked.replace("<nav></nav>", f"<nav>{' · '.join(links)}</nav>", 1)


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def render(template: str, **values: Any) -> str:
    style = (TEMPLATES / "page.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return _environment().get_template(template).render(style=Markup(style), policy=policy, **values)  # noqa: S704 - our file


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printed,
    )
    environment.filters |= {
        "count": _optional("{:,}".format),
        "names": shown_names,
        "nats": _optional(nats),
        "percent": _optional(percent),
        "system_name": system_name,
        "bounds": lambda row: bounds(row["low"], row["high"]),
        "difference_bounds": lambda row: difference_bounds(row["low"], row["high"]),
        "millions": _optional(millions),
        "points": _optional(points),
        "unbroken": lambda text: as_html(text).replace(" %", "\N{NO-BREAK SPACE}%"),
        "size": _optional(size),
        "time": _optional(duration),
        "as_yaml": lambda value: Markup("\n").join(map(as_html, yaml.safe_dump(value, allow_unicode=True).split("\n"))),
        "shade": lambda share: f"h{min(9, int(10 * share))}",
    }
    return environment


def _optional(form: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: NO_VALUE if value is None else form(value)


def _printed(value: Any) -> Any:
    """Escapes every value that a template prints, and cuts long texts."""
    if isinstance(value, Markup):
        return value
    text = str(value)
    return as_html(text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…")


def as_html(text: object) -> Markup:
    """Escapes text from data; invisible and direction-changing letters become escape sequences."""
    return escape(printable(str(text).translate(SPACES), keep=JOINERS))


def millions(count: int) -> str:
    return f"{count / 1e6:,.1f} million" if count >= MILLION else f"{count:,}"


# ---- the rows of long lists, in the order of the page


Row = dict[str, Any]
"""A row of a table; the template is its only reader."""


def _view(numbers: ReportJson) -> dict[str, object]:
    audit = (numbers["target_quality"] or {}).get("audit")
    cut = [(name, n) for name, n in numbers["data"]["cut"].items() if n]
    causes = {cause["code"] for cause in numbers["verdict"]["causes"]} if numbers["verdict"] else set()
    quality, evaluation = numbers["student_quality"], numbers["evaluation"]
    return {
        "texts": evaluation and evaluated_texts(evaluation),
        "systems": _first(_systems(numbers), SYSTEMS_SHOWN),
        "sweep": [_system(f"τ = {row['temperature']:g}", row, reported=row["ours"]) for row in numbers["sweep"]],
        "classes": _first(_classes(numbers), CLASSES_SHOWN),
        "teachers": _first(_teachers(numbers), TEACHERS_SHOWN),
        "conflicts": _first(_conflicts(audit["conflicts"]) if audit else [], TEACHERS_SHOWN),
        "costs": _first(numbers["teacher_costs"], TEACHERS_SHOWN),
        "models": _first(numbers["models"] if numbers["learns"] else [], TEACHERS_SHOWN + 1),
        "shares": _first(_shares(numbers["unlabelled"]), CLASSES_SHOWN),
        "cut": sorted(cut, key=lambda row: -row[1])[:TEACHERS_SHOWN],
        "advice": advice(audit) if audit else [],
        "passes": list(pass_audit_lines(audit["passes"])) if audit and "passes" in audit else [],
        "seconds": total_seconds(numbers),
        "coverage": _coverage(numbers),
        "label_estimates": numbers["label_estimates"] and estimate_line(numbers["label_estimates"]),
        "unknown_share": numbers["unknown_share"] and share_of_unknown_line(numbers["unknown_share"]),
        "unknown": unknown_line(quality["unknown"]) if quality and quality["unknown"] else None,
        "calibration": _calibration(numbers),
        "lengths": [
            {**row, "interval": interval(row["right"] / row["n"], row["n"])}
            for row in (quality["lengths"] if quality else ())
        ],
        "losses": _losses(numbers),
        "size": _size(numbers["models"]),
        "spikes": spikes(numbers),
        # The student's only note is that of few steps.
        "notes": [row for row in numbers["notes"] if "few-steps" not in causes or row["stage"] != "train-student"],
        "undertrained": bool(causes & {"few-steps", "not-fitted", "labels-never-predicted"}),
    }


def _first(rows: Sequence[Mapping[str, object]], most: int) -> dict[str, object]:
    """Returns the first rows of a list, and its length."""
    return {"rows": rows[:most], "of": len(rows)}


def _systems(numbers: ReportJson) -> list[Row]:
    """Returns the reported system, the others and other students, the best first, and the teachers last."""
    evaluation, verdict = numbers["evaluation"], numbers["verdict"]
    if evaluation is None:
        return []
    starts = {"ensemble": "", "zero-shot": "", "teacher": TEACHER, "student": STUDENT, "supervised student": STUDENT}
    rivals = verdict["rivals"] if verdict else []
    leads = {f"{starts[rival['kind']]}{rival['name']}": rival for rival in rivals if rival["kind"] in starts}
    rows = [_system(name, row, reported=name == evaluation["system"]) for name, row in evaluation["systems"].items()]
    for student in numbers["students"]:
        method = student["method"] if student["method"] != student["name"] else None
        remark = "trained on gold labels" if student["supervised"] else method
        rows.append(_system(f"{STUDENT}{student['name']}", student, reported=False, remark=remark))
    for row in rows:
        row["lead"] = leads.get(row["name"])
    return sorted(rows, key=lambda row: (not row["reported"], row["name"].startswith(TEACHER), -row["accuracy"]))


def _system(name: str, scores: Measures, *, reported: bool, remark: str | None = None) -> Row:
    low, high = interval(scores["accuracy"], scores["n"])
    row = {"name": name, "reported": reported, "low": low, "high": high, "lead": None, "remark": remark}
    return {"nll_infinite": 0, **scores, **row}


def _coverage(numbers: ReportJson) -> Row | None:
    quality, unlabelled, measured = numbers["student_quality"], numbers["unlabelled"], coverage_of(numbers)
    if not measured:
        return None
    everything, distinct = measured["thresholds"][0], list[Threshold]()
    for row in measured["thresholds"]:
        if row["n"] and (not distinct or row["n"] != distinct[-1]["n"]):
            distinct.append(row)
    are_right = "are right"
    if unlabelled and not quality:
        are_right = f"have the label of the {unlabelled['agreement']['reference']}"
    n, chosen = everything["n"], [row for row in distinct[1:] if row["n"] >= LEAST_ANSWERED]
    sentence = f"{percent(everything['right'] / n)} of all answers {are_right}."
    if chosen:
        row = next((row for row in chosen if row["right"] >= GOOD * row["n"]), chosen[-1])
        sentence = (
            f"If the student answers only with a probability of at least {row['probability']:g}, it answers "
            f"{percent(row['n'] / n)} of the texts; {percent(row['right'] / row['n'])} of these {are_right}. {sentence}"
        )
    return {
        "sentence": sentence,
        "caption": f"The texts with the most probable predictions first, n = {n:,}. The dot is all texts.",
        "measure": "accuracy" if quality else "agreement",
        "n": n,
        "rows": distinct,
    }


def _calibration(numbers: ReportJson) -> str:
    quality, evaluation = numbers["student_quality"], numbers["evaluation"]
    bins = quality["calibration"].get(evaluation["system"]) if quality and evaluation else None
    if not bins or not evaluation:
        return "The scores of this system are no probabilities: they only order the labels."
    n = sum(row["n"] for row in bins)
    mean, accuracy = (sum(row["n"] * row[key] for row in bins) / n for key in ("confidence", "accuracy"))
    gap = 100 * (mean - accuracy)
    finding = "about right" if abs(gap) < SMALL_GAP else f"{abs(gap):.1f} points too {'high' if gap > 0 else 'low'}"
    means = f"mean probability {percent(mean)}, accuracy {percent(accuracy)}"
    return f"The predicted probabilities are {finding} on average ({means}, n = {n:,})."


def _losses(numbers: ReportJson) -> list[Row]:
    """Returns each step's accuracy on training and on test texts, which cannot be subtracted from each other."""
    names = {
        "teachers": "the best possible choice of a teacher",
        "choice": "the targets",
        "fit": "the student" if numbers["learns"] else "the method",
    }
    rows = list[Row]()
    for loss in numbers["accuracy_losses"]:
        on_test = loss["where"] == TEST
        name = names.get(loss["step"], names["fit"])
        rows.append({"name": name, "train": None if on_test else loss, "test": loss if on_test else None})
    choice = (numbers["target_quality"] or {}).get("choice")
    if rows and choice and choice["n"]:
        rows[0]["train"] = {"right": choice["oracle"] / choice["n"], "n": choice["n"]}
    return rows if len(rows) > 1 else []


def _size(models: Sequence[ModelSize]) -> str:
    """Compares the student's parameters with those of all teachers, which the ensemble needs."""
    counts = [row["parameters"] for row in models if row["parameters"] is not None]
    if len(counts) < max(len(models), 2):
        return ""
    student, *teachers = counts
    together = "the teacher" if len(teachers) == 1 else f"the {len(teachers)} teachers together"
    share = f"{percent(student / sum(teachers))} of {together} ({millions(sum(teachers))})"
    return f"The student has {millions(student)} parameters, {share}."


def _shares(unlabelled: UnlabelledQuality | None) -> list[Row]:
    """Returns the labels whose predicted share differs most from the reference first; never predicted ones lead."""
    if not unlabelled:
        return []
    n, rows = max(unlabelled["n"], 1), list[Row]()
    for row in unlabelled["labels"]:
        share, reference = row["predicted"] / n, row["mass"] / n
        rows.append({**row, "share": share, "reference": reference, "gap": abs(share - reference)})
    return sorted(rows, key=lambda row: (row["predicted"] > 0, -row["gap"], row["label"]))


def _classes(numbers: ReportJson) -> list[Row]:
    """Returns the labels, the lowest recall first."""
    quality = numbers["student_quality"]
    rows: list[Row] = [
        {**row, "recall": row["right"] / row["n"] if row["n"] else None, "low": low, "high": high}
        for row in (quality["classes"] if quality else [])
        if row["n"] or row["predicted"]
        for low, high in [interval(row["right"] / max(row["n"], 1), row["n"])]
    ]
    return sorted(rows, key=lambda row: (row["recall"] is None, row["recall"] or 0.0, row["label"]))


def _teachers(numbers: ReportJson) -> list[Row]:
    """Returns the teachers in the order of the file; many teachers by weight."""
    targets, quality = numbers["target_quality"] or {}, numbers["student_quality"]
    audited = {row["teacher"]: row for row in targets["audit"]["teachers"]} if "audit" in targets else {}
    means = targets["mixture"]["mean"] if "mixture" in targets else {}
    on_own = quality["teachers"]["own"] if quality else {}
    rows: list[Row] = []
    for labels in numbers["labels"]["teachers"]:
        name = labels["teacher"]
        rows.append({**labels, "audit": audited.get(name), "weight": means.get(name), "own": on_own.get(name)})
    return sorted(rows, key=lambda row: -(row["weight"] or 0.0)) if len(rows) > TEACHERS_SHOWN else rows


def _conflicts(conflicts: Conflicts) -> list[Row]:
    """Returns the pairs of teachers, the most conflicts first."""
    pairs = combinations(enumerate(conflicts["teachers"]), 2)
    rows: list[Row] = [
        {"teachers": (name_a, name_b), "share": conflicts["shares"][a][b]} for (a, name_a), (b, name_b) in pairs
    ]
    return sorted(rows, key=lambda row: -row["share"])
