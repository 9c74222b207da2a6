"""Runs side by side: their reports' numbers in one table and one page. Nothing is measured again.

Two runs that were measured on the same texts are compared text by text, so that chance has the smallest part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import DataError, ExperimentError
from amalgam.stages.report.html import render, seconds_of
from amalgam.stages.report.publish import put
from amalgam.stages.report.report_json import FORMAT
from amalgam.stages.report.summary import SURE, interval

FILES = (".yaml", ".yml")


def report(  # noqa: PLR0913 - the options of a command
    config: Path, arguments: list[str], *, only: bool, force: bool, part: str | None, quiet: bool
) -> None:
    from amalgam.stages.app.commands import run_stages

    overrides = [argument for argument in arguments if "=" in argument]
    named = [argument for argument in arguments if "=" not in argument]
    if not named or (len(named) == 1 and named[0].endswith(FILES)):
        one = Path(named[0]) if named else config
        run_stages(one, overrides, target="report", only=only, force=force, part=part, quiet=quiet)
    elif len(named) == 1:
        read_report(_page(config.parent, named[0]))  # one that is not there is told first
        what = f"{named[0]} alone has nothing to stand beside"
        raise ExperimentError(what, fix=f"name two runs or more; its own page is reports/{named[0]}.html")
    elif only or force or part:
        raise ExperimentError(
            "--no-upstream, --force and --part are for one run", fix="leave them out, or name one file"
        )
    else:
        _side_by_side(config, named, overrides, quiet=quiet)


def _side_by_side(config: Path, named: list[str], overrides: list[str], *, quiet: bool) -> None:
    """Each is read as soon as it is there: two files may call their students alike."""
    from amalgam.pipeline.console import Console

    found = {}
    for name in named:
        path = _brought(Path(name), overrides, quiet=quiet) if name.endswith(FILES) else _page(config.parent, name)
        found[name.removesuffix(".yaml").removesuffix(".yml")] = read_report(path)
    files = [Path(name) for name in named if name.endswith(FILES)]
    compare((files[0] if files else config).parent.absolute(), found, Console(quiet=quiet))


def _brought(file: Path, overrides: list[str], *, quiet: bool) -> Path:
    """What the file says, as `run` would do it: nothing that an earlier command was told counts."""
    from amalgam.stages.app.commands import run_stages

    return run_stages(file, overrides, target=None, quiet=quiet).report.with_suffix(".json")


def _page(base: Path, name: str) -> Path:
    from amalgam.stages.report.publish import ROOM

    return base / ROOM / f"{name}.json"


Found = dict[str, Any]


NAME = "comparison"

MOST_RUNS, MOST_FIELDS, MOST_GROUPS = 24, 40, 12


def compare(base: Path, runs: dict[str, Found], console: Console) -> None:
    """`runs`: the numbers of each, by the name it is to have here."""
    found = side_by_side([run | {"name": name} for name, run in runs.items()])
    files = {".html": render("comparison.html.j2", numbers=found), ".json": json.dumps(found, indent=1) + "\n"}
    _show(console, found)
    console.say(f"report: {put(base, NAME, {suffix: text.encode() for suffix, text in files.items()})}")


def read_report(path: Path) -> Found:
    """Read like any file that a person may have touched."""
    fix = "run `amalgam report` with this student.name first"
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        there = sorted(one.stem for one in path.parent.glob("*.json") if one.stem != NAME)
        known = f" (there are {', '.join(there)})" if there else ""
        raise ExperimentError(f"there is no report of {path.stem}{known}", where=str(path), fix=fix) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path.name} cannot be read as a report", where=str(path), fix=fix) from error
    if not isinstance(found, dict) or found.get("amalgam_report") != FORMAT or "evaluation" not in found:
        raise DataError(f"{path.name} is no report of this amalgam", where=str(path), fix=fix)
    return found


def side_by_side(runs: Sequence[Found]) -> Found:
    if len(runs) > MOST_RUNS:
        raise ExperimentError(f"{len(runs)} runs are too many for one page", fix=f"name {MOST_RUNS} at most")
    first = runs[0]
    fair = all(_same_texts(run, first) for run in runs)
    rows = [_row(run, first) for run in runs]
    found: Found = {
        "amalgam_report": FORMAT,
        "same_texts": fair,
        "runs": rows,
        "chance": first["chance"] if fair else None,
        "groups": _groups(runs) if fair else [],
        "settings": list(_differences(runs)),
        "verdict": "",
    }
    return found | {"verdict": _verdict(found, runs)}


def _same_texts(one: Found, other: Found) -> bool:
    counted = [(run["evaluation"].get("n"), run["evaluation"].get("left_out")) for run in (one, other)]
    return bool(one["test"]) and one["test"] == other["test"] and counted[0] == counted[1]


def _row(run: Found, first: Found) -> Found:
    evaluation = run["evaluation"]
    system = evaluation["systems"][evaluation["judged"]] if evaluation else {}
    low, high = interval(system["accuracy"], evaluation["n"]) if system else (None, None)
    scores = ("accuracy", "macro_f1", "nll_nats", "nll_infinite", "ece")
    return {
        "name": run["name"],
        "method": run["method"],
        "fingerprint": run["fingerprint"],
        "n": evaluation.get("n"),
        **{key: system.get(key) for key in scores},
        "low": low,
        "high": high,
        "against_first": None if run is first else difference(run, first),
        "losses": {row["step"]: row["lost"] for row in run["losses"]},
        "seconds": seconds_of(run),
        "text_passes": sum(one["text_passes"] for one in run["asked"]),
        "student_bytes": run["student"]["bytes"] if run["student"] else None,
    }


def difference(run: Found, other: Found) -> Found | None:
    """Of accuracy, by the texts on which exactly one of the two is right; None where texts differ or were too many."""
    sides = [one["judged"] and one["judged"]["right_hex"] for one in (run, other)]
    if not _same_texts(run, other) or not all(sides):
        return None
    n = run["evaluation"]["n"]
    ours, theirs = (np.unpackbits(np.frombuffer(bytes.fromhex(side), np.uint8))[:n].astype(int) for side in sides)
    gained, lost = int((ours > theirs).sum()), int((ours < theirs).sum())
    mean = (gained - lost) / n
    reach = SURE * math.sqrt(max(gained + lost - n * mean**2, 0.0)) / n
    return {"mean": mean, "low": mean - reach, "high": mean + reach, "gained": gained, "lost": lost}


def _groups(runs: Sequence[Found]) -> list[Found]:
    """Accuracy on the texts of each teacher's labels, where all runs have the teacher."""
    systems = [run["evaluation"]["systems"][run["evaluation"]["judged"]]["slice_accuracy"] for run in runs]
    shared = [name for name in systems[0] if all(name in one for one in systems)]
    return [{"group": name, "accuracy": [one[name] for one in systems]} for name in shared[:MOST_GROUPS]]


def _differences(runs: Sequence[Found]) -> Iterator[Found]:
    flat = [dict(_leaves(run["settings"])) for run in runs]
    fields = [field for field in dict.fromkeys(key for one in flat for key in one) if field != "student.name"]
    differ = [field for field in fields if len({json.dumps(one.get(field)) for one in flat}) > 1]
    for field in differ[:MOST_FIELDS]:
        yield {"field": field, "values": [_said(one.get(field)) for one in flat]}
    if len(differ) > MOST_FIELDS:
        yield {"field": f"and {len(differ) - MOST_FIELDS} more", "values": ["" for _ in flat]}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _said(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _verdict(found: Found, runs: Sequence[Found]) -> str:
    measured = [(row, run) for row, run in zip(found["runs"], runs, strict=True) if row["accuracy"] is not None]
    if len(measured) < 2:
        return "Fewer than two of these runs were measured on labelled test texts, so that none can be called better."
    if not found["same_texts"]:
        return "These runs were measured on different test texts: a difference of theirs may be one of the texts."
    (best, of_best), (second, of_second) = sorted(measured, key=lambda pair: -pair[0]["accuracy"])[:2]
    said = f"{best['name']} is right most often, on {best['accuracy']:.3f} of {best['n']:,} test texts"
    said += f"; next is {second['name']} with {second['accuracy']:.3f}"
    lead = difference(of_best, of_second)
    if lead is None:
        return f"{said}."
    reach = f"{100 * lead['mean']:.1f} points less (95 % interval {100 * lead['low']:.1f} to {100 * lead['high']:.1f})"
    return f"{said}, {reach}{'' if lead['low'] > 0 else ': that may be chance'}."


def _show(console: Console, found: Found) -> None:
    header = ["", "accuracy", "95 % interval", "macro-F1", "NLL", "ECE", "against the first"]
    rows = [
        [
            f"{row['name']} ({row['method']})" if row["name"] != row["method"] else row["name"],
            _number(row["accuracy"]),
            "-" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}",
            *(_number(row[key]) for key in ("macro_f1", "nll_nats", "ece")),
            _against(row["against_first"]),
        ]
        for row in found["runs"]
    ]
    console.table("", header, rows)
    console.sentence(found["verdict"])


def _against(found: Found | None) -> str:
    return "" if found is None else f"{found['mean']:+.3f} ({found['low']:+.3f} to {found['high']:+.3f})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
