"""Renders report.json as one HTML page without scripts or requests, and publishes both in reports/.

Every text is escaped. A file that amalgam did not write is never replaced, and links are not followed.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
from collections.abc import Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup, escape

from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.console import duration
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.paths import check_writable
from amalgam.pipeline.storage.local import atomic_write
from amalgam.stages.common.intervals import interval
from amalgam.stages.methods import method_name
from amalgam.stages.report.figures import figures
from amalgam.stages.report.report_json import ReportJson, Row, total_seconds
from amalgam.stages.report.tables import advice

TEMPLATES = Path(__file__).parent

NO_VALUE = "\N{EN DASH}"

MOST_LETTERS = 600
"""Letters of any text on the page."""

CLASSES_SHOWN, SYSTEMS_SHOWN, TEACHERS_SHOWN = 30, 16, 12
"""Most rows of a table."""

FOLDER = "reports"

MARKERS = {".html": '<meta name="generator" content="amalgam report">', ".json": '"amalgam_report": '}
"""Text near the start of every file that amalgam writes here."""

MARKER_BYTES = 400

JOINERS = "\u200c\u200d"
"""Persian, Indic scripts and emoji need these letters."""


# ---- rendering


def page(numbers: ReportJson) -> str:
    return render("page.html.j2", numbers=numbers, figures=figures(numbers), view=_view(numbers))


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
        "count": lambda value: NO_VALUE if value is None else f"{value:,}",
        "score": lambda value: NO_VALUE if value is None else f"{value:.3f}",
        "percent": lambda value: NO_VALUE if value is None else f"{100 * value:.1f} %",
        "points": lambda value: NO_VALUE if value is None else f"{100 * value:+.1f}",
        "size": size,
        "time": lambda value: NO_VALUE if value is None else duration(value),
        "as_yaml": lambda value: Markup("\n").join(
            map(printable, yaml.safe_dump(value, allow_unicode=True).split("\n"))
        ),
        "shade": lambda share: f"h{min(9, int(10 * share))}",
    }
    return environment


def _printed(value: Any) -> Any:
    """Escapes every value that a template prints, and cuts long texts."""
    if isinstance(value, Markup):
        return value
    text = str(value)
    return printable(text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…")


def printable(text: object) -> Markup:
    """Escapes text from data; invisible and direction-changing letters become escape sequences."""
    return escape("".join(ch if ch.isprintable() or ch in JOINERS else _escaped(ch) for ch in str(text)))


def _escaped(letter: str) -> str:
    return " " if letter in "\n\r\t" else letter.encode("unicode_escape").decode()


def size(value: int | None) -> str:
    if value is None:
        return NO_VALUE
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= step:
            return f"{value / step:,.1f} {unit}"
    return f"{value} bytes"


# ---- the rows of long lists, in the order of the page


def _view(numbers: ReportJson) -> dict[str, Any]:
    audit = (numbers["target_quality"] or {}).get("audit")
    cut = [{"teacher": name, "n": n} for name, n in numbers["data"]["cut"].items() if n]
    return {
        "systems": _first(_systems(numbers), SYSTEMS_SHOWN),
        "sweep": [_system(f"τ = {row['temperature']:g}", row, reported=row["ours"]) for row in numbers["sweep"]],
        "classes": _first(_classes(numbers), CLASSES_SHOWN),
        "teachers": _first(_teachers(numbers), TEACHERS_SHOWN),
        "conflicts": _first(_conflicts(audit["conflicts"]) if audit else [], TEACHERS_SHOWN),
        "costs": _first(numbers["teacher_costs"], TEACHERS_SHOWN),
        "cut": sorted(cut, key=lambda row: -row["n"])[:TEACHERS_SHOWN],
        "advice": advice(audit) if audit else [],
        "seconds": total_seconds(numbers),
    }


def _first(rows: list[Row], most: int) -> Row:
    return {"rows": rows[:most], "of": len(rows)}


def _systems(numbers: ReportJson) -> list[Row]:
    evaluation, bound = numbers["evaluation"], numbers["supervised"]
    if evaluation is None:
        return []
    rows = [_system(name, row, reported=name == evaluation["system"]) for name, row in evaluation["systems"].items()]
    if bound and bound["fingerprint"] != numbers["fingerprint"]:
        rows.append(_system("supervised student of this workspace (trained on gold labels)", bound, reported=False))
    return sorted(rows, key=lambda row: (not row["reported"], row["name"].startswith("teacher:"), -row["accuracy"]))


def _system(name: str, scores: Mapping[str, Any], *, reported: bool) -> Row:
    """Returns a row of the table of systems; scores of other reports lack `nll_infinite`."""
    low, high = interval(scores["accuracy"], scores["n"])
    return {"nll_infinite": 0, **scores, "name": name, "reported": reported, "low": low, "high": high}


def _classes(numbers: ReportJson) -> list[Row]:
    """Returns the labels, the lowest recall first."""
    quality = numbers["student_quality"]
    rows = [
        {**row, "recall": row["right"] / row["n"] if row["n"] else None}
        for row in (quality["classes"] if quality else [])
        if row["n"] or row["predicted"]
    ]
    return sorted(rows, key=lambda row: (row["recall"] is None, row["recall"] or 0.0, row["label"]))


def _teachers(numbers: ReportJson) -> list[Row]:
    """Returns the teachers in the order of the file; many teachers by weight."""
    targets, quality = numbers["target_quality"] or {}, numbers["student_quality"]
    audited = {row["teacher"]: row for row in targets["audit"]["teachers"]} if "audit" in targets else {}
    means = targets["mixture"]["mean"] if "mixture" in targets else {}
    own = quality["teachers"]["own"] if quality else {}
    rows = []
    for labels in numbers["labels"]["teachers"]:
        name = labels["teacher"]
        rows.append({**labels, "audit": audited.get(name), "weight": means.get(name), "own": own.get(name)})
    return sorted(rows, key=lambda row: -(row["weight"] or 0.0)) if len(rows) > TEACHERS_SHOWN else rows


def _conflicts(conflicts: Row) -> list[Row]:
    """Returns the pairs of teachers, the most conflicts first."""
    pairs = combinations(enumerate(conflicts["teachers"]), 2)
    rows = [{"teachers": [name_a, name_b], "share": conflicts["shares"][a][b]} for (a, name_a), (b, name_b) in pairs]
    return sorted(rows, key=lambda row: -row["share"])


# ---- publishing


def page_name(settings: ExperimentConfig) -> str:
    """Returns the student's name, or the method's name for a method without training."""
    student = settings.student
    return student.name if student.learns else method_name(settings).replace(":", "-")


def check_page(base: Path, name: str) -> None:
    """Refuses, before any work, a page that `publish` could not write."""
    check_writable(base / FOLDER, "change its permissions")
    for suffix in MARKERS:
        _target(base, name + suffix)


def publish(base: Path, name: str, page: str, numbers: Mapping[str, Any]) -> str:
    """Writes reports/NAME.html and NAME.json, leaves equal files untouched, and returns the page's path."""
    for suffix, text in ((".html", page), (".json", json.dumps(numbers, indent=1) + "\n")):
        target = _target(base, name + suffix)
        if not target.exists() or target.read_bytes() != text.encode():
            with atomic_write(target) as temporary:
                temporary.write_bytes(text.encode())
    return f"{FOLDER}/{name}.html"


def publish_texts(base: Path, name: str, content: bytes) -> str:
    """Writes the texts to label as reports/NAME and returns a line about it; a file with labels is kept."""
    target = base / FOLDER / name
    if target.is_symlink() or (target.exists() and not _without_labels(target, content)):
        return f"  texts to label: {FOLDER}/{name} has labels or other columns, so it was kept"
    if not target.exists() or target.read_bytes() != content:
        with atomic_write(target) as temporary:
            temporary.write_bytes(content)
    return f"  texts to label: {FOLDER}/{name}"


def _without_labels(path: Path, content: bytes) -> bool:
    """Returns whether the file has the columns of `content` and not a single label."""
    header = next(csv.reader(io.StringIO(content.decode())))
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            return rows.fieldnames == header and not any((row[header[-4]] or "").strip() for row in rows)
    except (OSError, ValueError, csv.Error):
        return False


def _target(base: Path, name: str) -> Path:
    target = base / FOLDER / name
    if target.is_symlink() or not target.parent.resolve().is_relative_to(base.resolve()):
        what = f"{FOLDER}/{name} is a link or outside the experiment's folder"
        raise ExperimentError(what, where=str(target), fix="remove the link")
    if target.exists() and not _is_ours(target):
        what = f"{FOLDER}/{name} exists and was not made by amalgam"
        raise ExperimentError(what, where=str(target), fix="move it away, or choose another student.name")
    return target


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return MARKERS[path.suffix].encode() in file.read(MARKER_BYTES)
    except OSError:
        return False
