"""Makes the report pages of docs/gallery.md, from an experiment of benchmarks/methods.py and from the demo.

python benchmarks/gallery.py --experiment methods-benchmark/trec6-2-2000 --demo amalgam-demo

Results that exist are reused. Pages of a data set quote none of its texts, because licences differ. The texts of the
demo belong to amalgam.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from markupsafe import escape

from amalgam.pipeline.errors import DataError
from amalgam.stages.app.api import Experiment
from amalgam.stages.app.comparison import read_report
from amalgam.stages.app.demo import write_demo
from amalgam.stages.app.report_command import Requirements, report
from amalgam.stages.common.deliveries import REPORTS
from amalgam.stages.report.html import page
from amalgam.stages.report.json_types import ReportJson

DOCS = Path(__file__).resolve().parents[1] / "docs"
CONFIG, UNLABELLED = "amalgam.yaml", "unlabelled.yaml"
LEAST_QUOTE, MOST_QUOTE = 12, 40
"""Characters of a text that are looked for; a shorter text may be a word of the page."""
REASONS = 2
"""Most reasons of a verdict in the table."""
HEAD = ("| page | experiment | verdict | reason |", "|---|---|---|---|")
TABLE = re.compile(r"(?<=<!-- made by benchmarks/gallery\.py -->\n).*?(?=<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """A student and its page."""

    page: str
    about: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    file: str = CONFIG


AMALGAM = {"student.method": "amalgam", "student.seed": 0}
DATA = (
    Entry(
        "trec6",
        "TREC-6: two MiniLM teachers with three labels each, 2,000 texts",
        {**AMALGAM, "student.name": "amalgam-0"},
    ),
    Entry(
        "trec6-untrained",
        "the same, but one epoch at a learning rate of 2e-5",
        {**AMALGAM, "student.epochs": 1, "student.learning_rate": 2e-5, "student.name": "untrained"},
    ),
    Entry("trec6-unlabelled", "the same student, without any label", {"student.name": "unlabelled"}, UNLABELLED),
)
DEMO = (
    Entry("demo", "`amalgam demo`: three tiny teachers with eight labels, 4,000 texts; the page quotes texts"),
    Entry("demo-muka-soft", "the same by MUKA-Soft", {"student.method": "muka-soft", "student.name": "muka-soft"}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--experiment", type=Path, required=True, help="folder of benchmarks/methods.py with amalgam.yaml"
    )
    parser.add_argument("--demo", type=Path, default=Path("amalgam-demo"), help="folder of the demo")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of gallery.md")
    options = parser.parse_args()
    pages = options.docs / "gallery"
    pages.mkdir(exist_ok=True)
    write_unlabelled(options.experiment)
    write_demo(options.demo)
    rows = [make_page(options.experiment, entry, pages, texts=False) for entry in DATA]
    rows += [make_page(options.demo, entry, pages, texts=True) for entry in DEMO]
    rows.append(make_comparison(options.demo, pages))
    write_rows(options.docs / "gallery.md", rows)


def write_unlabelled(folder: Path) -> None:
    """Writes the experiment with its trained teachers as folders, and without labels."""
    experiment = yaml.safe_load((folder / CONFIG).read_text("utf-8"))
    trained = sorted(path.name for path in (folder / "teachers").iterdir() if path.is_dir())
    corpus = {name: value for name, value in experiment["corpus"].items() if name not in {"test", "label"}}
    content = {
        "corpus": corpus,
        "teachers": [{"name": name, "model": f"./teachers/{name}"} for name in trained],
        "cache": experiment["cache"],
        "student": {**experiment["student"], "method": "amalgam", "seed": 0},
    }
    (folder / UNLABELLED).write_text(yaml.safe_dump(content, sort_keys=False), "utf-8")


def make_page(folder: Path, entry: Entry, pages: Path, *, texts: bool) -> str:
    """Runs the experiment, writes its report page, and returns its row of the gallery."""
    experiment = Experiment.load(folder / entry.file, entry.overrides)
    experiment.run()
    numbers = read_report(experiment.report.with_suffix(".json"), "run the experiment")
    numbers["settings"] = short_paths(numbers["settings"])
    html = page(numbers if texts else without_texts(numbers))
    if not texts:
        check_quotes(experiment, html)
    (pages / f"{entry.page}.html").write_text(html, "utf-8")
    verdict = numbers["verdict"]
    if verdict is None:
        raise DataError("the report has no verdict", where=str(experiment.report), fix="name a method that trains")
    return _row(entry.page, entry.about, f"`{verdict['decision']}`", verdict["reasons"][:REASONS])


def without_texts(numbers: ReportJson) -> ReportJson:
    """Returns the numbers without the lists that quote texts, and notes on the corpus without examples."""
    quality, targets = numbers["student_quality"], numbers["target_quality"]
    return {
        **numbers,
        "notes": [
            {**note, "note": note["note"].partition(": ")[0]} if note["stage"] == "read-corpus" else note
            for note in numbers["notes"]
        ],
        "student_quality": quality and {**quality, "errors": []},
        "target_quality": targets and {**targets, "disputed": []},
    }


def check_quotes(experiment: Experiment, html: str) -> None:
    """Refuses a page that quotes a text of the experiment."""
    parts = ["train", *(["test"] if experiment.config.corpus.test else [])]
    texts = [text for part in parts for text in experiment.texts(part).select("text").collect().to_series()]
    quoted = [text for text in texts if len(text) >= LEAST_QUOTE and str(escape(text[:MOST_QUOTE])) in html]
    if quoted:
        raise DataError(f"the page quotes {len(quoted)} texts", where=quoted[0], fix="leave their list out")


def short_paths(value: Any) -> Any:
    """Returns settings whose absolute paths are cut to their last two parts."""
    if isinstance(value, dict):
        return {name: short_paths(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [short_paths(inner) for inner in value]
    is_path = isinstance(value, str) and Path(value).is_absolute()
    return "/".join(Path(value).parts[-2:]) if is_path else value


def make_comparison(folder: Path, pages: Path) -> str:
    """Compares the demo's students, and returns the row of the comparison."""
    names = [str(entry.overrides.get("student.name", "student")) for entry in DEMO]
    report(folder / CONFIG, names, Requirements(), only=False, force=False, part=None, quiet=True)
    shutil.copyfile(folder / REPORTS / "comparison.html", pages / "demo-comparison.html")
    return _row("demo-comparison", f"both, text by text: `amalgam report {' '.join(names)}`", "", [])


def _row(name: str, about: str, verdict: str, reasons: Sequence[str]) -> str:
    return f"| [{name}](gallery/{name}.html) | {about} | {verdict} | {' '.join(reasons)} |"


def write_rows(path: Path, rows: Sequence[str]) -> None:
    """Replaces the rows of the gallery's table."""
    table = "\n".join(["", *HEAD, *rows, "", ""])
    path.write_text(TABLE.sub(lambda _: table, path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
