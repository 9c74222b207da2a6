"""Runs each stage of an experiment on any number of short texts, as a command of its own, and measures it.

python benchmarks/whole_run.py --texts 100000 1000000 10000000 [--folder FOLDER] [--json]

Two tiny BERT teachers and a static student learn generated texts of 11 to 17 words. 10^7 texts need 8 GB
of disk. An interrupted run continues in the same --folder.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from amalgam.benchmarks.protocol import row, show
from amalgam.benchmarks.scale import measured, stored
from amalgam.data.demo_corpus import ANYWHERE, TOPICS

if TYPE_CHECKING:
    from collections.abc import Iterator

TEACHER_TEXTS, TEST_TEXTS = 4_000, 1_000
CHUNK = 500_000
"""Texts that are generated at once."""
SLOTS = ("people", "deeds", "things", "people", "deeds", "things")
FORM = "the {} {} the {} and the {} {} the {}"
OWN, STRAY = 0.6, 0.1
"""Shares of the words that come from the text's topic, and from another one; the others have no topic."""
STAGES = "read-corpus train-teachers cache-teachers cache-features weigh-teachers build-targets train-student report"
COMMANDS = (*(f"{stage} --quiet" for stage in STAGES.split()), "plan --json", "run --quiet")
"""Each stage; then a plan and a run of a current workspace."""
SETTINGS = (
    "train_teachers.groups={first: [banking, computing, law, medicine], second: [cooking, football, gardening, music]}",
    "cache.passes=auto",
    "student={method: amalgam, encoder: static:encoder, max_tokens: 48, batch_size: 512}",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, nargs="+", default=[100_000])
    parser.add_argument("--folder", type=Path, help="folder of the experiments, which stay; default: a temporary one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        show(_rows(options.folder or Path(scratch), options.texts), as_json=options.json)


def _rows(folder: Path, sizes: list[int]) -> Iterator[dict[str, Any]]:
    for texts in sizes:
        experiment = folder / str(texts)
        _write(experiment, texts)
        for command in COMMANDS:
            spent = measured(*command.split(), "-c", str(experiment / "amalgam.yaml"), *SETTINGS)
            each = {"us_a_text": round(1e6 * spent.seconds / texts, 1)}
            yield row("whole_run", command, texts=texts, **spent.figures, **each)
        report = json.loads(next((experiment / "reports").glob("*.json")).read_text("utf-8"))
        systems = {name: round(system["accuracy"], 4) for name, system in report["evaluation"]["systems"].items()}
        yield row("whole_run", "accuracy", texts=texts, **systems, right_teacher=_right(report))
        for name, figures in stored(experiment / "artifacts", texts).items():
            yield row("whole_run", f"stored: {name}", texts=texts, **figures)


def _right(report: dict[str, Any]) -> float:
    """Returns the share of training texts whose heaviest teacher is right."""
    return next(round(loss["right"], 4) for loss in report["accuracy_losses"] if loss["step"] == "choice")


def _write(folder: Path, texts: int) -> None:
    """Writes the demo's experiment with other texts."""
    from amalgam.stages.app.demo import write_demo

    sizes = {"teachers": TEACHER_TEXTS, "test": TEST_TEXTS, "train": texts}
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    for seed, (name, count) in enumerate(sizes.items()):
        path = folder / f"texts/{name}.parquet"
        if not path.exists():
            drawn(count, np.random.default_rng(seed)).write_parquet(path)
    write_demo(folder)


def drawn(count: int, random: np.random.Generator) -> pl.DataFrame:
    chunks = [_chunk(min(CHUNK, count - start), random) for start in range(0, count, CHUNK)]
    return pl.concat(chunks)


def _chunk(count: int, random: np.random.Generator) -> pl.DataFrame:
    """Returns texts of FORM with their label; each word draws its topic."""
    topics = sorted(TOPICS)
    labels, others = random.integers(len(topics), size=count), random.integers(1, len(topics), size=count)
    columns = []
    for kind in SLOTS:
        lists = [TOPICS[topic][kind] for topic in topics] + [ANYWHERE[kind]]
        starts, lengths = np.cumsum([0, *map(len, lists)]), np.array([len(words) for words in lists])
        share = random.random(count)
        stray = np.where(share < OWN + STRAY, (labels + others) % len(topics), len(topics))
        topic = np.where(share < OWN, labels, stray)
        places = starts[topic] + (random.random(count) * lengths[topic]).astype(np.int64)
        columns.append(pl.Series([word for words in lists for word in words]).gather(places))
    named = pl.Series(topics).gather(labels)
    return pl.select(text=pl.format(FORM, *columns), label=named)


if __name__ == "__main__":
    main()
