"""Checks correctness and speed on a GPU (`make check-gpu`). It needs only torch, transformers and numpy.

Masks must equal those of the CPU bit for bit. Logits must agree with the CPU, with and without dropout.
Half precision must keep the variance between passes. Captured and compiled batches must give the logits of plain ones.
The benchmark then compares BERT-base with its rivals (bf16, K = 16). Exit code 1 means an error, 4 no GPU.
"""

from __future__ import annotations

import argparse
import copy
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, logging

from amalgam.benchmarks.cache_teachers import (
    MATRIX_FLOP,
    NAIVE_BATCH,
    Bench,
    amalgam,
    best_batch,
    deterministic,
    flop_of,
    matrix_seconds,
    not_computed,
    passes_one_by_one,
)
from amalgam.benchmarks.protocol import interleaved, median, paired, row, show
from amalgam.data.tokens import Tokens
from amalgam.stages.common.device import dtype_for, tokens_at_once
from amalgam.stages.common.inference.batches import run_passes
from amalgam.stages.common.inference.cuda import CudaCapture, Graphs
from amalgam.stages.common.inference.dropout import Axis, Bank, row_words, site_words
from amalgam.stages.common.inference.teacher import DROPOUT_OFF, Rows, Teacher

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_GPU = 4
COMPILER = torch.compile
KINDS = ("bert", "roberta", "distilbert", "electra", "mpnet")
SHAPE = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
SHAPES: dict[str, dict[str, Any]] = {"distilbert": {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 128}}
TOLERANCE = {"fp32": 2e-4, "bf16": 0.06, "fp16": 0.01}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
AG_NEWS_LENGTHS = (28, 34, 37, 40, 42, 43, 45, 47, 48, 50, 51, 53, 54, 56, 58, 60, 63, 66, 73, 99)
"""Median token length in each twentieth of AG News' test texts, truncated at 128."""


class Plain:
    """Replaces a tokenizer for generated ids, without a file."""

    pad_token_id = 0
    eos_token_id = None
    model_input_names = ("input_ids",)

    def convert_ids_to_tokens(self, number: int) -> str:
        return str(number)

    def __call__(self, texts: list[str], *, max_length: int = 60, **_how: Any) -> Any:
        class Encoded(dict[str, Any]):
            encodings = None

        return Encoded(input_ids=[[2, *[9] * (max_length - 2), 3] for _ in texts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--texts", type=int, default=2048, help="number of texts for the benchmark; 0 checks correctness only"
    )
    parser.add_argument("--passes", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.set_verbosity_error()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: run on a machine with a GPU, or set --device cpu", file=sys.stderr)  # noqa: T201
        raise SystemExit(NO_GPU)
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device(options.device)
    faults = [*mask_faults(device)]
    fast: dict[str, str] = {}
    for kind in KINDS:
        faults += logit_faults(kind, device)
        apart, fast[kind] = fast_faults(kind, device)
        faults += apart
    for fault in faults:
        print(f"WRONG: {fault}", file=sys.stderr)  # noqa: T201
    if faults:
        raise SystemExit(1)
    show(
        [
            row("check_gpu", "correct", masks="equal", models=", ".join(KINDS)),
            *(row("check_gpu", kind, fast_ways=summary) for kind, summary in fast.items()),
        ],
        as_json=options.json,
    )
    if options.texts:
        show(race(device, options), as_json=options.json)


def mask_faults(device: torch.device) -> list[str]:
    """Compares masks with the CPU, and checks their rate and their independence between passes, texts and sites."""
    axes = (Axis("rows", 1), Axis("tokens", 1), Axis("fixed", 96))
    keys = [i.to_bytes(16, "big") for i in range(32)]
    words = site_words(row_words(1, "digest", keys * 4, np.repeat(np.arange(4), 32)), 3)
    on_cpu, on_device = (
        torch.stack(
            [
                Bank(1, device=place, dtype=torch.float32)
                .mask(torch.from_numpy(site.view(np.int64)).to(place), axes, 0.1, (128, 40, 96))
                .cpu()
                for site in words
            ]
        )
        for place in (torch.device("cpu"), device)
    )
    faults = [] if torch.equal(on_cpu, on_device) else ["masks differ from the CPU's"]
    kept = (on_device > 0).double()
    error = abs(float(kept.mean()) - 0.9) / np.sqrt(0.09 / kept.numel())
    if error > 5:
        faults.append(f"the rate is wrong by {error:.1f} standard errors")
    flat = kept.view(3 * 128, -1) - kept.mean()
    correlation = flat @ flat.T / flat.shape[1] / 0.09
    worst = float(correlation.fill_diagonal_(0).abs().max()) * np.sqrt(flat.shape[1])
    if worst > 6.5:
        faults.append(f"two masks correlate by {worst:.1f} standard errors")
    return faults


def logit_faults(kind: str, device: torch.device) -> list[str]:
    model = _model(kind)
    exact = build_teacher(model, torch.device("cpu"), "fp32")
    random = np.random.default_rng(0)
    tokens = [_text(random, length) for length in random.integers(5, 60, 24)]
    keys = [i.to_bytes(16, "big") for i in range(len(tokens))]
    expected = _answers(exact, tokens, keys)
    faults = []
    for dtype in sorted({"fp32", dtype_for(device)}):
        teacher = build_teacher(model, device, dtype)
        answers = _answers(teacher, tokens, keys)
        spread = float(np.std(expected[1], axis=1).mean())
        worst = max(float(np.abs(a - b).mean()) for a, b in zip(answers, expected, strict=True)) / spread
        if worst > TOLERANCE[dtype] * 4:
            faults.append(f"{kind}, {dtype}: logits differ from the CPU's by {worst:.3f} of their spread")
        ratio = float(np.median(answers[1].var(1) / expected[1].var(1)))
        if not 0.98 <= ratio <= 1.02:
            faults.append(f"{kind}, {dtype}: the variance of passes is {ratio:.3f} times that of fp32 on the CPU")
    return faults


def fast_faults(kind: str, device: torch.device) -> tuple[list[str], str]:
    """Compares captured and compiled batches with plain ones, and returns the faults and a summary.

    The batches are padded and unpadded, with and without dropout.
    """
    teacher = build_teacher(_model(kind), device, dtype_for(device))
    if teacher.graphs is None:
        return [], "on CUDA alone"
    batches = list(_batches())
    with plainly(teacher):
        expected = [teacher.run(rows).numpy() for rows in batches]
    faults, summaries = [], []
    for way in ("captured", "captured and compiled"):
        if way != "captured":
            teacher.fuse(COMPILER)
        # The three runs are plain, captured and replayed.
        replayed = [[teacher.run(rows).numpy() for _ in range(3)][-1] for rows in batches]
        apart = max(float(np.abs(a - b).max() / b.std(0).max()) for a, b in zip(replayed, expected, strict=True))
        if apart > TOLERANCE[teacher.name]:
            faults.append(f"{kind}: batches {way} differ from plain ones by {apart:.4f} of their spread")
        summaries.append(f"{way}, {len(teacher.graphs.captured)} shapes: {f'within {apart:.1e}' if apart else 'equal'}")
    return faults, "; ".join([*summaries, *teacher.notes])


def _batches() -> Iterator[Rows]:
    random = np.random.default_rng(1)
    keys = [i.to_bytes(16, "big") for i in range(64)]
    for length, width in ((21, 0), (34, 40)):
        tokens = [_text(random, length) for _ in range(64)]
        for number in (DROPOUT_OFF, 0, 1):
            yield Rows(tokens, keys, np.full(64, number), width)


@contextmanager
def plainly(teacher: Teacher, graphs: Graphs | None = None) -> Iterator[None]:
    """Runs without compilation, with the given captured batches or none."""
    encoder = teacher.fast_encoder
    before = teacher.graphs, encoder.fused if encoder else None
    teacher.graphs = graphs
    if encoder:
        encoder.fused = None
    try:
        yield
    finally:
        teacher.graphs = before[0]
        if encoder:
            encoder.fused = before[1]


def _model(kind: str) -> Any:
    torch.manual_seed(0)
    labels = {"num_labels": 3, "vocab_size": 200, "pad_token_id": 0}
    model = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model(kind, **SHAPES.get(kind, SHAPE), **labels)
    )
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(4.0)
    return model


def build_teacher(model: Any, device: torch.device, dtype: str) -> Teacher:
    return Teacher(
        copy.deepcopy(model), Plain(), digest="check", seed=0, limit=60, device=device, dtype=DTYPES[dtype], name=dtype
    )


def _text(random: np.random.Generator, length: int, vocabulary: int = 200) -> Tokens:
    ids = random.integers(5, vocabulary, int(length), dtype=np.int32)
    ids[[0, -1]] = 2, 3
    return Tokens(ids, None, truncated=False)


def _answers(teacher: Teacher, tokens: list[Tokens], keys: list[bytes]) -> tuple[Any, Any]:
    logits, raw = run_passes(teacher, tokens, keys, range(16), deterministic=True, batch_tokens=2048)
    return logits, raw.astype(np.float64)


def race(device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    dtype = dtype_for(device)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", num_labels=4))
    random = np.random.default_rng(0)
    tokens = [_text(random, random.choice(AG_NEWS_LENGTHS), 30000) for _ in range(options.texts)]
    keys = [i.to_bytes(16, "big") for i in range(len(tokens))]
    reference = copy.deepcopy(model).to(device)
    teacher = Teacher(
        model, Plain(), digest="bench", seed=0, limit=128, device=device, dtype=DTYPES[dtype], name="bert-base"
    )
    bench = Bench(teacher, reference, tokens, keys, options.passes, tokens_at_once(device, teacher.width))
    low = copy.deepcopy(reference).to(DTYPES[dtype])
    batch = best_batch(low, bench)
    by_length = np.argsort(bench.lengths, kind="stable")
    candidates: dict[str, Any] = {
        **ways(bench),
        "deterministic": partial(deterministic, bench),
        "tuned": partial(passes_one_by_one, low, bench, by_length, batch),
        "naive": partial(passes_one_by_one, reference, bench, np.arange(len(tokens)), NAIVE_BATCH),
        "matrix rate": partial(matrix_seconds, bench),
    }
    seconds = interleaved(candidates, options.repeats)
    rate = MATRIX_FLOP / median(seconds.pop("matrix rate"))
    flop = sum(flop_of(teacher.model.config, int(length)) for length in bench.lengths) * options.passes
    rows = []
    for name, taken in seconds.items():
        took = median(taken)
        figures: dict[str, Any] = {
            "passes_per_s": round(len(tokens) * options.passes / took, 1),
            "mfu": round(flop / took / rate, 3),
            "ratio_to_tuned": round(paired(seconds["tuned"], taken), 2),
            "ratio_to_naive": round(paired(seconds["naive"], taken), 2),
        }
        if name.startswith(("amalgam", "deterministic")):
            figures["mfu_executed"] = round((flop - not_computed(bench)) / took / rate, 3)
        if name == "amalgam":
            figures["dropout_price"] = round(paired(taken, seconds["deterministic"]), 3)
            figures["captured_shapes"] = len(teacher.graphs.captured) if teacher.graphs is not None else None
        rows.append(row("check_gpu", name, **figures, dtype="fp32" if name == "naive" else dtype))
    rows += [row("check_gpu", "note", text=note) for note in teacher.notes]
    return [*rows, row("check_gpu", "matrix rate", tflops=round(rate / 1e12, 1), dtype=dtype)]


def ways(bench: Bench) -> dict[str, Any]:
    """Returns the variants of the engine: complete, without compilation, and eager."""
    teacher = bench.teacher
    if teacher.graphs is None:
        return {"amalgam": partial(amalgam, bench)}
    graphs = teacher.captured_by(CudaCapture(teacher.device))
    ways = {
        "amalgam": nullcontext,
        "amalgam, not compiled": partial(plainly, teacher, graphs),
        "amalgam, eager": partial(plainly, teacher),
    }
    teacher.fuse(COMPILER)

    def timed(context: Any) -> None:
        with context():
            amalgam(bench)

    timed(ways["amalgam"])  # a recurring shape is captured here, in the warm-up
    timed(ways["amalgam, not compiled"])
    return {name: partial(timed, context) for name, context in ways.items()}


if __name__ == "__main__":
    main()
