"""Renders report.json as one HTML page without scripts or requests, and publishes both in reports/.

Every text is escaped. A file that amalgam did not write is never replaced, and links are not followed.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.console import duration
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.storage.fingerprint import file_digest, fingerprint
from amalgam.pipeline.storage.local import atomic_write
from amalgam.pipeline.storage.store import Store
from amalgam.stages.methods import method_name
from amalgam.stages.report.blocks import ReportJson
from amalgam.stages.report.figures import bar, figures, printable
from amalgam.stages.report.summary import interval
from amalgam.stages.report.teacher_audit.tables import advice

TEMPLATES = Path(__file__).parent

NO_VALUE = "\N{EN DASH}"

MOST_LETTERS = 600
"""Letters of any text on the page."""

CLASSES_SHOWN, SYSTEMS_SHOWN, TEACHERS_SHOWN = 30, 16, 12

PAGE_VERSION = 1
"""Raised when Python code changes the look of the page; a changed template is detected by its digest."""

FOLDER = "reports"

MARKERS = {".html": '<meta name="generator" content="amalgam report">', ".json": '"amalgam_report": '}
"""Text near the start of every file that amalgam writes here."""

MARKER_BYTES = 400


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
    environment.globals |= {"bar": bar}
    return environment


def _printed(value: Any) -> Any:
    """Escapes every value that a template prints, and cuts long texts."""
    if isinstance(value, Markup):
        return value
    text = str(value)
    return printable(text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…")


def size(value: int | None) -> str:
    if value is None:
        return NO_VALUE
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= step:
            return f"{value / step:,.1f} {unit}"
    return f"{value} bytes"


def _view(numbers: ReportJson) -> dict[str, Any]:
    """Returns the rows that the page shows of long lists, with the full lengths."""
    quality, cut = numbers["target_quality"], numbers["data"]["cut"]
    audit = quality.get("audit") if quality else None
    return {
        "systems": _systems(numbers),
        "classes": _classes(numbers),
        "teachers": _teachers(numbers),
        "conflicts": _conflicts(numbers),
        "cut": sorted(((name, n) for name, n in cut.items() if n), key=lambda row: -row[1])[:TEACHERS_SHOWN],
        "advice": advice(audit) if audit else [],
        "seconds": total_seconds(numbers),
    }


def total_seconds(numbers: ReportJson) -> float | None:
    """Returns the seconds of all stages; None if those of one stage are unknown."""
    seconds = [row["seconds"] for row in numbers["stages"]]
    return None if None in seconds else sum(filter(None, seconds))


def _systems(numbers: ReportJson) -> dict[str, Any]:
    evaluation, bound = numbers["evaluation"], numbers["supervised"]
    if evaluation is None:
        return {"rows": [], "more": [], "of": 0}
    rows: list[dict[str, Any]] = [
        {"name": name, "reported": name == evaluation["system"], **scores}
        for name, scores in evaluation["systems"].items()
    ]
    rows.sort(key=lambda row: (not row["reported"], row["name"].startswith("teacher:"), -row["accuracy"]))
    shown, more = rows[:SYSTEMS_SHOWN], list[dict[str, Any]]()
    if bound and bound["fingerprint"] != numbers["fingerprint"]:
        name = "supervised student of this workspace (trained on gold labels)"
        more = [{**bound, "name": name, "reported": False, "nll_infinite": 0}]
    for row in shown + more:
        row["low"], row["high"] = interval(row["accuracy"], row["n"])
    return {"rows": shown, "more": more, "of": len(rows)}


def _classes(numbers: ReportJson) -> dict[str, Any]:
    """Returns the labels with the lowest recall."""
    quality = numbers["student_quality"]
    rows: list[dict[str, Any]] = [
        {**row, "recall": row["right"] / row["n"] if row["n"] else None}
        for row in (quality["classes"] if quality else [])
        if row["n"] or row["predicted"]
    ]
    rows.sort(key=lambda row: (row["recall"] is None, row["recall"] or 0.0, row["label"]))
    return {"rows": rows[:CLASSES_SHOWN], "of": len(rows)}


def _teachers(numbers: ReportJson) -> dict[str, Any]:
    """Returns one row per teacher; of many, those with the largest weight."""
    targets, quality = numbers["target_quality"], numbers["student_quality"]
    audit = targets.get("audit") if targets else None
    mixture = targets.get("mixture") if targets else None
    audited = {row["teacher"]: row for row in audit["teachers"]} if audit else {}
    means = mixture["mean"] if mixture else {}
    own = quality["teachers"]["own"] if quality else {}
    rows: list[dict[str, Any]] = []
    for labels in numbers["labels"]["teachers"]:
        name = labels["teacher"]
        rows.append({**labels, "audit": audited.get(name), "weight": means.get(name), "own": own.get(name)})
    if len(rows) > TEACHERS_SHOWN:
        rows.sort(key=lambda row: -(row["weight"] or 0.0))
    return {"rows": rows[:TEACHERS_SHOWN], "of": len(rows)}


def _conflicts(numbers: ReportJson) -> dict[str, Any]:
    """Returns the pairs of teachers with the most conflicts."""
    targets = numbers["target_quality"]
    audit = targets.get("audit") if targets else None
    if not audit:
        return {"rows": [], "of": 0}
    names, shares = audit["conflicts"]["teachers"], audit["conflicts"]["shares"]
    rows = [
        {"teachers": [names[a], names[b]], "share": shares[a][b]}
        for a in range(len(names))
        for b in range(a + 1, len(names))
    ]
    rows.sort(key=lambda row: -float(str(row["share"])))
    return {"rows": rows[:TEACHERS_SHOWN], "of": len(rows)}


# ---- publishing


def page_name(settings: ExperimentConfig) -> str:
    """Returns the student's name, or the method's name for a method without training."""
    student = settings.student
    return student.name if student.learns else method_name(settings).replace(":", "-")


def check_page(base: Path, name: str) -> None:
    """Refuses, before any work, a page that `publish_page` could not write."""
    for suffix in MARKERS:
        _target(base, name + suffix)


def publish_page(base: Path, store: Store, folder: Path, numbers: ReportJson) -> str:
    """Renders the page unless the workspace has it, copies it to reports/, and returns its path."""
    templates = [[path.name, file_digest(path)] for path in [*sorted(TEMPLATES.glob("*.j2")), TEMPLATES / "page.css"]]
    name = f"page-{fingerprint([PAGE_VERSION, fingerprint(templates), numbers])}"
    record = store.record(folder / f"{name}.json")
    if record is None or any(store.check_file(file) for file in record.files):
        with store.draft(folder, name) as draft:
            (draft.folder / "report.html").write_text(page(numbers), "utf-8")
            (draft.folder / "report.json").write_text(json.dumps(numbers, indent=1) + "\n", "utf-8")
        files = draft.files
    else:
        files = record.files
    contents = {Path(file.path).suffix: store.verified_path(file).read_bytes() for file in files}
    return publish(base, numbers["name"], contents)


def publish(base: Path, name: str, contents: Mapping[str, bytes]) -> str:
    """Writes reports/NAME with each suffix, leaves equal files untouched, and returns the page's path."""
    for suffix, content in contents.items():
        target = _target(base, name + suffix)
        if target.exists() and target.read_bytes() == content:
            continue
        with atomic_write(target) as temporary:
            temporary.write_bytes(content)
    return f"{FOLDER}/{name}.html"


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
