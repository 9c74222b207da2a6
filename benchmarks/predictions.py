"""Measures the choice of teachers, and students, where all teachers are files of predictions of scikit-learn.

python benchmarks/predictions.py --data PATH [--sets trec6 banking77] [--groups 2 3] [--draws 2] [--students] [--json]

Each teacher is a logistic regression on TF-IDF, of words or of characters in turn, on a group of labels that the draw
decides. One half of the labelled texts trains the teachers; the other half has no labels for the student. Each form has
its own row: probabilities, one label for each text, and five answers drawn from the probabilities. `right` is the share
of texts whose most heavily weighted teacher has the gold label, as a mean over the draws.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from amalgam.benchmarks.methods import AMALGAM, DATA_SETS, ENCODER, STUDENT, SUPERVISED, correct_answers
from amalgam.benchmarks.protocol import row, show, updated

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

EXPERIMENT = """\
corpus: {{train: {train}, test: {test}, label: label}}
teachers: [{teachers}]
cache: {{max_tokens: {tokens}}}
student: {{encoder: {encoder}, max_tokens: {tokens}}}
"""
FORMS = ("probabilities", "labels", "answers")
ANSWERS = 5
METHODS = ("muka-soft", AMALGAM)
OWN_TEXTS, TEXTS_OF_A_LABEL = 400, 20
"""Training texts of a teacher, or for each of its labels, whichever is more."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets: NAME/{train,test}.parquet")
    parser.add_argument("--sets", nargs="+", default=list(DATA_SETS))
    parser.add_argument("--groups", nargs="+", type=int, default=[2, 3], help="numbers of teachers")
    parser.add_argument("--draws", type=int, default=2, help="draws of the groups of labels and of the teachers' texts")
    parser.add_argument("--limit", type=int, default=1200, help="most unlabelled texts")
    parser.add_argument("--max-tokens", type=int, default=32, help="of the encoder")
    parser.add_argument("--students", action="store_true", help="also trains students, of the first draw")
    parser.add_argument("--folder", type=Path, default=Path("predictions-benchmark"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    show((figures for name in options.sets for figures in _data_set(name, options)), as_json=options.json)


def _data_set(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    base = options.folder / name
    base.mkdir(parents=True, exist_ok=True)
    every = pl.read_parquet(options.data / name / "train.parquet").drop_nulls().unique("text", maintain_order=True)
    every = every.sample(fraction=1, shuffle=True, seed=0)
    half = len(every) // 2
    taught, texts = every[:half], every[half : half + options.limit]
    test = pl.read_parquet(options.data / name / "test.parquet").drop_nulls()
    for part, frame in {"train": texts, "test": test}.items():
        frame.select("text", "label").write_parquet(base / f"{part}.parquet")
    labels = sorted(every["label"].unique().to_list())
    for count in (count for count in options.groups if len(labels) >= 2 * count):
        configs = {form: [base / f"{form}-{count}-{draw}.yaml" for draw in range(options.draws)] for form in FORMS}
        for draw in range(options.draws):
            random = np.random.default_rng([draw, count])
            parts = np.array_split(random.permutation(len(labels)), count)
            groups = [[labels[place] for place in part] for part in parts]
            teachers = _write_teachers(base, groups, draw, taught, pl.concat([texts, test]))
            for form, files in teachers.items():
                settings = {"train": "train.parquet", "test": "test.parquet", "teachers": ", ".join(files)}
                text = EXPERIMENT.format(**settings, tokens=options.max_tokens, encoder=ENCODER)
                configs[form][draw].write_text(text, "utf-8")
        for form, paths in configs.items():
            figures: dict[str, Any] = {"data": name, "teachers": count, "form": form, "texts": len(texts)}
            figures |= {method: statistics.mean(_right(path, method) for path in paths) for method in METHODS}
            if options.students:
                figures |= _students(paths[0], form)
            yield row("predictions", f"{name} {count} {form}", **figures)


def _write_teachers(
    base: Path, groups: Sequence[Sequence[str]], draw: int, taught: pl.DataFrame, texts: pl.DataFrame
) -> Mapping[str, list[str]]:
    """Writes the predictions of a teacher for each group of labels; returns the files of each form."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    kinds: list[dict[str, Any]] = [{"ngram_range": (1, 2)}, {"analyzer": "char_wb", "ngram_range": (2, 4)}]
    distinct = texts.select("text").unique(maintain_order=True)
    files: dict[str, list[str]] = {form: [] for form in FORMS}
    for place, own in enumerate(groups):
        examples = taught.filter(pl.col("label").is_in(own)).sample(fraction=1, shuffle=True, seed=draw)
        examples = examples.head(max(OWN_TEXTS, TEXTS_OF_A_LABEL * len(own)))
        vectors = TfidfVectorizer(sublinear_tf=True, **kinds[place % len(kinds)])
        model = make_pipeline(vectors, LogisticRegression(C=20, max_iter=500))
        model.fit(examples["text"].to_list(), examples["label"].to_list())
        probabilities = model.predict_proba(distinct["text"].to_list())
        names = [str(name) for name in model.classes_]
        frames = {
            "probabilities": distinct.with_columns(**dict(zip(names, probabilities.T, strict=True))),
            "labels": distinct.with_columns(label=pl.Series([names[best] for best in probabilities.argmax(axis=1)])),
            "answers": distinct.with_columns(label=_answers(names, probabilities, [draw, len(groups), place])),
        }
        for form, frame in frames.items():
            path = base / f"{form}-{len(groups)}-{draw}-{place}.parquet"
            frame.write_parquet(path)
            files[form].append(f"./{path.name}")
    return files


def _answers(names: Sequence[str], probabilities: np.ndarray[Any, Any], seed: Sequence[int]) -> pl.Series:
    """Returns a list of labels for each text, as a language model answers at temperature 1."""
    shares = probabilities / probabilities.sum(axis=1, keepdims=True)
    counts = np.random.default_rng(seed).multinomial(ANSWERS, shares)
    return pl.Series([np.repeat(names, count).tolist() for count in counts])


def _right(config: Path, method: str) -> float:
    run = updated(config, [f"student.method={method}"], {"train-student", "report"})
    right, texts = run.result("build-targets").facts["summary"]["selection"]["all"]
    return float(right / texts)


def _students(config: Path, form: str) -> dict[str, float]:
    figures: dict[str, float] = {}
    for method in (SUPERVISED, AMALGAM):
        run = updated(config, [f"student.method={method}", f"student.name={method}-{form}"])
        correct = correct_answers(run)
        figures |= {"ensemble": float(correct["ensemble"].mean()), f"student {method}": float(correct[STUDENT].mean())}
    return figures


if __name__ == "__main__":
    main()
