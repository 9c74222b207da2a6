"""Compares train-student with its rivals: one student on the same tokens, interleaved.

python benchmarks/train_student.py --texts PATH/ag_news/train.parquet [--padding | --order] [--json]

`--order` trains with batches of similar length, as train-student does, and with batches in random order. Both have the
same steps and seeds, and accuracy is of as many other texts.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from amalgam.benchmarks.models import new_classifier
from amalgam.benchmarks.protocol import interleaved, median, paired, peak_rss_mb, row, show, spread
from amalgam.data.tokens import Ragged, encode
from amalgam.stages.common.device import pick_device
from amalgam.stages.common.inference.batches import predict
from amalgam.stages.common.training import batches
from amalgam.stages.common.training.batches import Examples, epoch_batches
from amalgam.stages.common.training.loop import TrainingRun, TrainingSettings, training_dtype
from amalgam.stages.common.training.losses import WeightedKL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Trained = tuple[Any, float]
    Trial = Callable[["TrainingData", TrainingSettings], Trained]

# The check trains on the shortest texts until the model has memorised them.
MEMORISED = 32
EPOCHS_TO_MEMORISE = {"pre-trained": 10, "random": 30}


@dataclass
class Bench:
    """Holds the student, tokenizer and device that all rivals share."""

    student: Any
    tokenizer: Any
    device: torch.device
    dtype: str
    scratch: Path
    real_share: dict[str, float] = field(default_factory=dict)
    accuracy: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingData:
    """Holds tokens, gold labels, target distributions and weights of the training texts."""

    tokens: Ragged
    type_ids: Ragged | None
    gold: NDArray[np.int64]
    targets: NDArray[np.float32]
    weights: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.gold)

    def take(self, rows: NDArray[np.int64]) -> TrainingData:
        types = None if self.type_ids is None else self.type_ids.take(rows)
        return TrainingData(self.tokens.take(rows), types, self.gold[rows], self.targets[rows], self.weights[rows])


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as scratch:
        texts, labels = _texts(options, options.rows * (2 if options.order else 1))
        names = sorted(set(labels))
        student, tokenizer = new_classifier("random" if options.random else "minilm", len(names))
        device = pick_device(options.device)
        dtype = training_dtype(device) if options.dtype == "auto" else options.dtype
        bench = Bench(student, tokenizer, device, dtype, Path(scratch))
        gold = np.array([names.index(label) for label in labels], np.int64)
        data = training_data(tokenizer, texts, gold, len(names), options.max_tokens)
        epochs = -(-options.steps // -(-options.rows // options.batch_size))
        training = training_for(epochs, options.batch_size, options.learning_rate)
        if options.padding:
            share = round(real_share(data, training), 3)
            rows = [row("train_student", "padding", texts=len(data), real_token_share=share)]
        elif options.order:
            rows = orders(bench, data, training, options.repeats)
        else:
            check(bench, data, EPOCHS_TO_MEMORISE["random" if options.random else "pre-trained"])
            rows = race(bench, data, training, options.without, options.repeats)
    show(rows, as_json=options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, help="a Parquet file with `text` and `label`; default: embedded corpus")
    parser.add_argument("--rows", type=int, default=256, help="number of texts")
    parser.add_argument("--steps", type=int, default=1, help="minimum number of steps, rounded up to whole epochs")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--random", action="store_true", help="use random weights with the same architecture")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--without", nargs="*", default=[], help="rows to leave out")
    parser.add_argument("--padding", action="store_true", help="only count the share of tokens that are not padding")
    parser.add_argument("--order", action="store_true", help="compare batches by length with random ones")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def training_for(epochs: int, batch_size: int, learning_rate: float) -> TrainingSettings:
    """Returns settings that all loops support: one evaluation at the end, no checkpoint, no warm-up."""
    return TrainingSettings(
        epochs=epochs,
        learning_rate=learning_rate,
        batch_size=batch_size,
        accumulate=1,
        warmup=0.0,
        weight_decay=0.01,
        clip=1.0,
        evaluate_every=10**9,
        seed=0,
        checkpoint_seconds=1e9,
    )


def _texts(options: argparse.Namespace, rows: int) -> tuple[list[str], list[str]]:
    if options.texts is None:
        from amalgam.data.demo_corpus import generate

        pairs = [(text, str(label)) for text, label in generate(rows, 0)]
    else:
        import pyarrow.parquet as pq

        table = pq.read_table(options.texts, columns=["text", "label"])
        chosen = np.random.default_rng(0).permutation(len(table))[:rows]
        pairs = [(str(text["text"]), str(text["label"])) for text in table.take(chosen).to_pylist()]
    return [text for text, _ in pairs], [label for _, label in pairs]


def training_data(
    tokenizer: Any, texts: Sequence[str], gold: NDArray[np.int64], labels: int, limit: int
) -> TrainingData:
    """Returns the data with soft targets around the gold label and weights of mean one."""
    tokens = encode(tokenizer, [(text,) for text in texts], limit, types=True)
    draw = np.random.default_rng(0)
    one_hot = np.eye(labels)[gold]
    targets = 0.7 * one_hot + 0.3 * draw.dirichlet(np.ones(labels), len(gold))
    weights = draw.uniform(0.5, 1, len(gold))
    return TrainingData(
        tokens.ids,
        tokens.type_ids,
        gold,
        targets.astype(np.float32),
        (weights / weights.mean()).astype(np.float32),
    )


def rivals(bench: Bench) -> dict[str, Trial]:
    return {
        "amalgam": partial(in_our_loop, bench, hard=False),
        "supervised": partial(in_our_loop, bench, hard=True),
        "trainer": partial(by_trainer, bench, grouped=False),
        "trainer-grouped": partial(by_trainer, bench, grouped=True),
    }


def in_our_loop(bench: Bench, data: TrainingData, training: TrainingSettings, *, hard: bool) -> Trained:
    """Trains with the loop of train-student, and returns the model and the seconds.

    With `hard`, targets are one-hot and weights are one.
    """
    one_hot = np.eye(data.targets.shape[1], dtype=np.float32)[data.gold]
    learned = (one_hot, np.ones_like(data.weights)) if hard else (data.targets, data.weights)
    examples = Examples(data.tokens, data.type_ids, *learned)
    model = copy.deepcopy(bench.student)
    began = time.perf_counter()
    TrainingRun(
        model,
        examples,
        training,
        pad_id=bench.tokenizer.pad_token_id,
        score=lambda _: 0.0,
        checkpoint=bench.scratch / "checkpoint",
        stop=lambda: False,
        on_step=lambda *_: None,
        cpu=bench.device.type == "cpu",
        dtype=bench.dtype,
    ).fit()
    _wait_for(bench.device)
    return model, time.perf_counter() - began


def by_trainer(bench: Bench, data: TrainingData, training: TrainingSettings, *, grouped: bool) -> Trained:
    """Trains with transformers.Trainer and dynamic padding. The preparation is not timed."""
    from transformers import DataCollatorWithPadding, PrinterCallback, Trainer

    padding = DataCollatorWithPadding(bench.tokenizer)
    places = np.zeros(2, np.int64)

    def collate(features: list[dict[str, Any]]) -> Any:
        batch = padding(features)
        places[:] += int(batch["attention_mask"].sum()), batch["attention_mask"].numel()
        return batch

    trainer = Trainer(
        copy.deepcopy(bench.student),
        _trainer_arguments(bench, training, grouped=grouped),
        train_dataset=_as_features(data),
        data_collator=collate,
        processing_class=bench.tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)  # torch's default, which our loop changes
    began = time.perf_counter()
    trainer.train()
    _wait_for(bench.device)
    took = time.perf_counter() - began
    bench.real_share["trainer-grouped" if grouped else "trainer"] = float(places[0] / places[1])
    return trainer.model.eval(), took


def _trainer_arguments(bench: Bench, training: TrainingSettings, *, grouped: bool) -> Any:
    from transformers import TrainingArguments

    # transformers 5 renamed the option.
    renamed = "train_sampling_strategy" in {option.name for option in fields(TrainingArguments)}
    grouping = {"train_sampling_strategy": "group_by_length"} if renamed else {"group_by_length": True}
    return TrainingArguments(
        str(bench.scratch / "trainer"),
        per_device_train_batch_size=training.batch_size,
        num_train_epochs=training.epochs,
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        max_grad_norm=training.clip,
        seed=training.seed,
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=bench.dtype == "bf16",
        use_cpu=bench.device.type == "cpu",
        **(grouping if grouped else {}),
    )


def _as_features(data: TrainingData) -> list[dict[str, Any]]:
    features: list[dict[str, Any]] = [
        {"input_ids": ids.tolist(), "labels": int(gold)} for ids, gold in zip(data.tokens, data.gold, strict=True)
    ]
    if data.type_ids is not None:
        for feature, types in zip(features, data.type_ids, strict=True):
            feature["token_type_ids"] = types.tolist()
    return features


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check(bench: Bench, data: TrainingData, epochs: int) -> None:
    """Checks the loss, the updates, and that every rival memorises a few texts."""
    logits = torch.randn(64, data.targets.shape[1], generator=torch.Generator().manual_seed(0))
    gold = torch.arange(64) % logits.shape[1]
    batch = {"targets": torch.eye(logits.shape[1])[gold], "weights": torch.ones(64)}
    if not torch.equal(WeightedKL()(logits, batch), torch.nn.functional.cross_entropy(logits, gold, reduction="none")):
        raise SystemExit("the loss of one-hot targets differs from cross-entropy")
    few = data.take(np.argsort(data.tokens.lengths, kind="stable")[:MEMORISED])
    check_update(bench, few)
    training = training_for(epochs, 8, 3e-4)
    for name, trial in rivals(bench).items():
        model, _ = trial(few, training)
        if (memorised := accuracy(bench, model, few)) < 0.9:
            raise SystemExit(f"{name} memorised only {memorised:.0%} of {len(few)} texts")


def check_update(bench: Bench, few: TrainingData) -> None:
    """Compares three updates with the Trainer's, on all texts at once and without dropout."""
    from transformers import AutoModelForSequenceClassification

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    config = copy.deepcopy(bench.student.config)
    config.update(off)
    still = AutoModelForSequenceClassification.from_config(config)
    still.load_state_dict(bench.student.state_dict())
    same = replace(bench, student=still, dtype="fp32")
    training = training_for(3, len(few), 1e-4)
    before = _logits(bench, still.to(bench.device), few)
    ours, theirs = (_logits(bench, rivals(same)[name](few, training)[0], few) for name in ("supervised", "trainer"))
    apart, moved = np.abs(ours - theirs).max(), np.abs(ours - before).max()
    if apart > 0.02 * moved:
        raise SystemExit(
            f"three updates change the logits by {moved:.3g}, but differ from the Trainer's by {apart:.3g}"
        )


def accuracy(bench: Bench, model: Any, data: TrainingData) -> float:
    return float((_logits(bench, model, data).argmax(1) == data.gold).mean())


def _logits(bench: Bench, model: Any, data: TrainingData) -> NDArray[np.float32]:
    pad_id = bench.tokenizer.pad_token_id
    return predict(model, data.tokens, pad_id=pad_id, batch_tokens=4096, type_ids=data.type_ids)


def race(
    bench: Bench, data: TrainingData, training: TrainingSettings, without: Sequence[str], repeats: int
) -> list[dict[str, Any]]:
    running = {name: trial for name, trial in rivals(bench).items() if name not in without}
    for name in ("amalgam", "supervised"):
        bench.real_share[name] = real_share(data, training)

    def timed(name: str) -> float:
        model, took = running[name](data, training)
        bench.accuracy[name] = accuracy(bench, model, data)
        return took

    seconds = interleaved({name: partial(timed, name) for name in running}, repeats)
    return [_figures(name, bench, data, training, seconds) for name in running]


def orders(bench: Bench, data: TrainingData, training: TrainingSettings, seeds: int) -> list[dict[str, Any]]:
    """Returns accuracy on the second half of the texts, by the order of the batches, after training on the first."""
    half = len(data) // 2
    learned, others = data.take(np.arange(half)), data.take(np.arange(half, len(data)))
    right: dict[str, list[NDArray[np.bool_]]] = {"by length": [], "random": []}
    seconds: dict[str, list[float]] = {name: [] for name in right}
    for seed, name in product(range(seeds), right):
        together = batches.SORTED_TOGETHER if name == "by length" else 1
        with mock.patch.object(batches, "SORTED_TOGETHER", together):
            model, took = in_our_loop(bench, learned, replace(training, seed=seed), hard=False)
        right[name].append(_logits(bench, model, others).argmax(1) == others.gold)
        seconds[name].append(took)
    gain = np.mean(right["by length"], axis=0) - np.mean(right["random"], axis=0)
    return [
        row(
            "train_student",
            f"order: {name}",
            texts=half,
            steps=training.epochs * -(-half // training.batch_size),
            accuracy=round(float(np.mean(right[name])), 3),
            each=[round(float(of.mean()), 3) for of in right[name]],
            gain=round(float(gain.mean()), 3),
            within=round(1.96 * float(gain.std()) / len(gain) ** 0.5, 3),
            texts_per_s=round(training.epochs * half / median(seconds[name]), 1),
            dtype=bench.dtype,
        )
        for name in right
    ]


def real_share(data: TrainingData, training: TrainingSettings) -> float:
    """Returns the share of tokens that are not padding in amalgam's batches."""
    lengths = data.tokens.lengths
    places = sum(
        len(rows) * int(lengths[rows].max())
        for epoch in range(training.epochs)
        for rows in epoch_batches(lengths, training.batch_size, seed=training.seed, epoch=epoch)
    )
    return float(lengths.sum() * training.epochs / places)


def _figures(
    name: str, bench: Bench, data: TrainingData, training: TrainingSettings, seconds: dict[str, list[float]]
) -> dict[str, Any]:
    taken = seconds[name]
    texts = len(data) * training.epochs
    steps = -(-len(data) // training.batch_size) * training.epochs
    figures: dict[str, Any] = {
        "texts_per_s": round(texts / median(taken), 2),
        "steps_per_s": round(steps / median(taken), 3),
        "real_token_share": round(bench.real_share[name], 3),
        "accuracy": round(bench.accuracy[name], 3),
        "spread": round(spread(taken), 3),
        "peak_rss_mb": round(peak_rss_mb()),
        "dtype": bench.dtype,
    }
    for rival in ("supervised", "trainer", "trainer-grouped"):
        if rival in seconds:
            figures[f"ratio_to_{rival.replace('-', '_')}"] = round(paired(seconds[rival], taken), 3)
    return row("train_student", name, **figures)


if __name__ == "__main__":
    main()
