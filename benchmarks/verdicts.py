"""Makes good, bad and hopeless experiments, runs each with nothing set, and compares its verdict with many labels.

python benchmarks/verdicts.py --data PATH [--sets trec6 banking77] [--method muka-soft] [--texts 1500] [--test 300]
    [--many 2000] [--folder verdicts-benchmark] [--json]

Each student has a folder of its own, so none is a rival of another. Two MiniLM teachers learn other texts than
the student does. verdict is the decision of `amalgam run` on --test labelled texts. on_many is the decision of the same
student on up to --many further texts, which no model has learned. outcome is right if both are equal, undecided if the
first alone is `cannot say`, else wrong. Where the experiment has too few labels by construction, the decision that
docs/verdict.md promises is right too. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from amalgam.benchmarks.models import minilm_folder
from amalgam.benchmarks.protocol import row, show
from amalgam.data.keys import cut_in_groups
from amalgam.stages.app.api import Experiment
from amalgam.stages.app.comparison import read_report

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import polars as pl

SETS = ("trec6", "ag_news", "banking77", "5abstracts")
OTHER = {"trec6": "ag_news", "ag_news": "5abstracts", "banking77": "trec6", "5abstracts": "banking77"}
"""The data set whose texts the experiment `other texts` has instead of its own."""
FEW = 30
"""Labelled texts of the experiment `few labels`."""
UNTRAINED = {"student.epochs": 1, "student.learning_rate": 2e-5}
CANNOT_SAY, DO_NOT_SHIP = "cannot say", "do not ship"
OUTCOMES = ("right", "undecided", "wrong")


@dataclass(frozen=True)
class Case:
    """How an experiment differs from the good one."""

    student: str = "good"
    """Cases with the same student differ by their test texts alone."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    teachers: str = "teachers"
    train: str = "train"
    test: str | None = "test"
    right: str | None = None
    """The right decision; None: the decision on many labels."""


CASES = {
    "good": Case(),
    "untrained": Case("untrained", UNTRAINED),
    "wrong labels": Case("wrong-labels", teachers="wrong"),
    "other texts": Case("other-texts", train="other"),
    "few labels": Case(test="few", right=CANNOT_SAY),
    "one teacher's labels": Case(test="first", right=CANNOT_SAY),
    "no labels": Case(test=None, right=CANNOT_SAY),
    "no labels, untrained": Case("untrained", UNTRAINED, test=None, right=DO_NOT_SHIP),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets: NAME/{train,test}.parquet")
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--method", default="amalgam", help="student.method")
    parser.add_argument("--texts", type=int, default=1500, help="texts of the teachers, and as many of the student")
    parser.add_argument("--test", type=int, default=300, help="labelled test texts")
    parser.add_argument("--many", type=int, default=2000, help="most labelled texts of the second decision")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=Path("verdicts-benchmark"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [figures for name in options.sets for figures in _data_set(name, options)]
    counts = Counter(each["outcome"] for each in rows)
    rows.append(row("verdicts", "all", **{name: counts[name] for name in OUTCOMES}, experiments=len(rows)))
    show(rows, as_json=options.json)


def _data_set(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    base = (options.folder / f"{name}-{options.texts}-{options.test}-{options.many}").absolute()
    base.mkdir(parents=True, exist_ok=True)
    write_texts(name, base, options)
    for teachers in sorted({CASES[about].teachers for about in options.cases}):
        _write(base / teachers, options, train=base / "train.parquet", labelled=base / f"{teachers}.parquet")
        Experiment.load(base / teachers / "amalgam.yaml", quiet=True).run("train-teachers")
    for about in options.cases:
        case = CASES[about]
        folder = base / f"{case.student}-{options.method}"
        trained = [base / case.teachers / f"teachers/teacher-{place}" for place in (1, 2)]
        _write(folder, options, train=base / f"{case.train}.parquet", teachers=trained)
        own = {"corpus.test": str(base / f"{case.test}.parquet"), "corpus.label": "label"} if case.test else {}
        many = {"corpus.test": str(base / "many.parquet"), "corpus.label": "label"}
        verdict, accuracy, _ = _verdict(folder, {**case.overrides, **own})
        on_many, true, n = _verdict(folder, {**case.overrides, **many})
        figures = {
            "data": name,
            "method": options.method,
            "verdict": verdict,
            "on_many": on_many,
            "outcome": outcome(verdict, case.right, on_many),
        }
        yield row("verdicts", about, **figures, accuracy=accuracy, accuracy_on_many=true, n=n)


def outcome(verdict: str, right: str | None, on_many: str) -> str:
    is_right = verdict == (right or on_many) or verdict == on_many == DO_NOT_SHIP
    return "right" if is_right else "undecided" if verdict == CANNOT_SAY else "wrong"


def _verdict(folder: Path, overrides: Mapping[str, Any]) -> tuple[str, float | None, int | None]:
    """Runs an experiment; returns the decision, the accuracy, and the number of test texts."""
    experiment = Experiment.load(folder / "amalgam.yaml", overrides, quiet=True)
    experiment.run()
    report = read_report(experiment.report.with_suffix(".json"), "run the experiment")
    if report["verdict"] is None:
        raise SystemExit(f"{folder}: the report has no verdict")
    evaluation = report["evaluation"]
    if evaluation is None:
        return report["verdict"]["decision"], None, None
    return report["verdict"]["decision"], evaluation["systems"][evaluation["system"]]["accuracy"], evaluation["n"]


# ---- files


def write_texts(name: str, base: Path, options: argparse.Namespace) -> None:
    import polars as pl

    train, test = _texts(options.data / name / "train.parquet"), _texts(options.data / name / "test.parquet")
    train = train.filter(~pl.col("text").is_in(test["text"].implode()))
    labelled, unlabelled = train.head(options.texts), train.slice(options.texts, options.texts)
    wrong = np.random.default_rng(0).permutation(labelled["label"].to_numpy())
    first, _ = cut_in_groups(sorted(train["label"].unique()), 2)
    files = {
        "teachers": labelled,
        "wrong": labelled.with_columns(label=pl.Series(wrong)),
        "train": unlabelled.select("text"),
        "other": _texts(options.data / OTHER.get(name, SETS[0]) / "train.parquet").head(options.texts).select("text"),
        "test": test.head(options.test),
        "few": test.head(FEW),
        "first": test.head(options.test).filter(pl.col("label").is_in(first)),
        "many": pl.concat([test.slice(options.test), train.slice(2 * options.texts)]).head(options.many),
    }
    for part, texts in files.items():
        if not len(texts):
            raise SystemExit(f"{name}: no text is left for {part}.parquet; give smaller --texts or --test")
        texts.write_parquet(base / f"{part}.parquet")  # the same bytes in each run


def _texts(path: Path) -> pl.DataFrame:
    import polars as pl

    texts = pl.read_parquet(path, columns=["text", "label"]).unique("text", keep="first", maintain_order=True)
    return texts.sample(fraction=1, shuffle=True, seed=0)


def _write(
    folder: Path,
    options: argparse.Namespace,
    *,
    train: Path,
    labelled: Path | None = None,
    teachers: list[Path] | None = None,
) -> None:
    """Writes an experiment with teachers to train, or with finished ones; all else is the default."""
    tokens, encoder = {"max_tokens": options.max_tokens}, str(minilm_folder())
    content: dict[str, Any] = {"corpus": {"train": str(train)}}
    if labelled:
        own = {"encoder": encoder, "groups": 2, "texts": str(labelled), "limit": options.texts}
        content = {"corpus": {"train": str(train), "label": "label"}, "train_teachers": {**own, **tokens}}
    else:
        content["teachers"] = [{"name": path.name, "model": str(path)} for path in teachers or ()]
    content |= {"cache": tokens, "student": {"method": options.method, "encoder": encoder, **tokens}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "amalgam.yaml").write_text(yaml.safe_dump(content, sort_keys=False), "utf-8")


if __name__ == "__main__":
    main()
