"""The page: report.json's numbers in one file that needs nothing else. No script, no request, every text escaped."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from amalgam.pipeline.console import duration
from amalgam.pipeline.storage.fingerprint import file_digest, fingerprint
from amalgam.stages.report.figures import bar, figures, shown
from amalgam.stages.report.summary import interval
from amalgam.stages.report.teacher_audit.tables import verdicts

Found = dict[str, Any]


HERE = Path(__file__).parent

NOTHING = "\N{EN DASH}"

LETTERS = 600
"""Of any single text of the page; a label may be of any length."""

CLASSES_SHOWN, SYSTEMS_SHOWN, TEACHERS_SHOWN = 30, 16, 12


def page(numbers: Found) -> str:
    return render("page.html.j2", numbers=numbers, figures=figures(numbers), view=_view(numbers))


def drawn_by() -> str:
    """What the page looks like, apart from its numbers."""
    return fingerprint([[path.name, file_digest(path)] for path in [*sorted(HERE.glob("*.j2")), HERE / "page.css"]])


def render(template: str, **values: Any) -> str:
    style = (HERE / "page.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return _environment().get_template(template).render(style=Markup(style), policy=policy, **values)  # noqa: S704 - ours


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalised,
    )
    environment.filters |= {
        "count": lambda value: NOTHING if value is None else f"{value:,}",
        "score": lambda value: NOTHING if value is None else f"{value:.3f}",
        "percent": lambda value: NOTHING if value is None else f"{100 * value:.1f} %",
        "points": lambda value: f"{100 * value:+.1f}",
        "size": size,
        "time": lambda value: NOTHING if value is None else duration(value),
        "as_yaml": lambda value: Markup("\n").join(map(shown, yaml.safe_dump(value, allow_unicode=True).split("\n"))),
        "shade": lambda share: f"h{min(9, int(10 * share))}",
    }
    environment.globals |= {"bar": bar}
    return environment


def _finalised(value: Any) -> Any:
    """Whatever is put into the page as text is shown as text: escaped, and with nothing invisible in it."""
    if isinstance(value, Markup):
        return value
    text = str(value)
    return shown(text if len(text) <= LETTERS else f"{text[:LETTERS]}…")


def size(value: int) -> str:
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= step:
            return f"{value / step:,.1f} {unit}"
    return f"{value} bytes"


def _view(numbers: Found) -> Found:
    """What is shown of what is many, and how many there are."""
    seen = numbers["supervised"]
    return {
        "systems": _systems(numbers),
        "classes": _classes(numbers),
        "teachers": _teachers(numbers),
        "conflicts": _conflicts(numbers),
        "cut": sorted(((name, n) for name, n in numbers["data"]["cut"].items() if n), key=lambda one: -one[1])[:12],
        "advice": verdicts(numbers["taught"]["audit"]) if "audit" in (numbers["taught"] or {}) else [],
        "supervised": interval(seen["accuracy"], seen["n"]) if seen else None,
        "seconds": seconds_of(numbers),
    }


def seconds_of(numbers: Found) -> float | None:
    """Of all stages; None where one was made before its time was kept, since a part would pass for the whole."""
    known = [row["seconds"] for row in numbers["way"]]
    return None if None in known else sum(known)


def _systems(numbers: Found) -> Found:
    evaluation = numbers["evaluation"]
    rows = []
    for name, one in evaluation.get("systems", {}).items():
        low, high = interval(one["accuracy"], evaluation["n"])
        rows.append({"name": name, "judged": name == evaluation["judged"], "low": low, "high": high, **one})
    kept = sorted(rows, key=lambda row: (not row["judged"], row["name"].startswith("teacher:"), -row["accuracy"]))
    return {"rows": kept[:SYSTEMS_SHOWN], "of": len(rows)}


def _classes(numbers: Found) -> Found:
    """The least recalled first where not all are shown, so that what fails is seen."""
    rows = [row for row in (numbers["judged"] or {}).get("classes", []) if row["n"] or row["predicted"]]
    rows = [row | {"recall": row["right"] / row["n"] if row["n"] else None} for row in rows]
    order = sorted(rows, key=lambda row: (row["recall"] is None, row["recall"] or 0.0, row["label"]))
    return {"rows": order[:CLASSES_SHOWN], "of": len(rows), "labels": len((numbers["judged"] or {}).get("classes", []))}


def _teachers(numbers: Found) -> Found:
    """Of many, those that win most texts."""
    taught = numbers["taught"] or {}
    audit = {one["teacher"]: one for one in taught.get("audit", {}).get("teachers", [])}
    means = taught.get("mixture", {}).get("mean", {})
    own = (numbers["judged"] or {}).get("teachers", {}).get("own", {})
    rows = [
        one | {"audit": audit.get(one["teacher"]), "weight": means.get(one["teacher"]), "own": own.get(one["teacher"])}
        for one in numbers["labels"]["teachers"]
    ]
    order = sorted(rows, key=lambda row: -(row["weight"] or 0.0)) if len(rows) > TEACHERS_SHOWN else rows
    return {"rows": order[:TEACHERS_SHOWN], "of": len(rows)}


def _conflicts(numbers: Found) -> list[Found]:
    """Pairs of teachers, those first that are most often both confident of different labels."""
    found = (numbers["taught"] or {}).get("audit", {}).get("conflicts")
    if not found:
        return []
    names = found["teachers"]
    pairs = [
        {"teachers": [names[one], names[other]], "share": found["shares"][one][other]}
        for one in range(len(names))
        for other in range(one + 1, len(names))
    ]
    return sorted(pairs, key=lambda pair: -pair["share"])[:TEACHERS_SHOWN]
