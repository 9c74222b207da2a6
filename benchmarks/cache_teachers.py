"""Compares cache-teachers with its rivals: K dropout passes of one teacher on the same texts, interleaved.

python benchmarks/cache_teachers.py --texts PATH/ag_news/train.parquet [--json]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from amalgam.benchmarks.models import SHAPES, save_classifier
from amalgam.benchmarks.protocol import interleaved, median, paired, peak_rss_mb, row, show, spread, texts_from
from amalgam.data.tokens import Tokens, encode
from amalgam.stages.common.device import PendingTransfer, dtype_for, pick_device, tokens_at_once
from amalgam.stages.common.inference.batches import plan_launches, run_passes
from amalgam.stages.common.inference.teacher import DROPOUT_OFF, Rows, Teacher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LABELS = 4
NAIVE_BATCH = 32
TUNED_BATCHES = (16, 32, 64, 128)
TUNED_BATCHES_ON_A_GPU = (128, 256, 512, 1024)


@dataclass
class Bench:
    """Holds the checkpoint, token ids, truncation and K that all candidates share."""

    teacher: Teacher
    reference: Any
    tokens: Sequence[Tokens]
    keys: list[bytes]
    passes: int
    budget: int

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(ids) for ids in self.tokens])


def main() -> None:
    options = _options()
    device = pick_device(options.device)
    dtype = dtype_for(device) if options.dtype == "auto" else options.dtype
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_classifier(Path(scratch) / "teacher", options.shape, LABELS)
        texts = texts_from(options.texts, options.count)
        bench = _bench(folder, texts, options, device, dtype)
        check(bench)
        rows = race(bench, folder, texts, options, dtype)
    for length in options.lengths:
        rows += price(bench, length, options, dtype)
    show(rows, as_json=options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, help="a Parquet file with a column `text`; default: the embedded corpus")
    parser.add_argument("--count", type=int, default=128, help="number of texts")
    parser.add_argument("--passes", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--shape", choices=SHAPES, default="minilm")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=[64, 128, 256, 512], help="text lengths for the cost of dropout"
    )
    parser.add_argument("--without", nargs="*", default=[], help="rows to leave out")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _bench(folder: Path, texts: Sequence[str], options: argparse.Namespace, device: torch.device, dtype: str) -> Bench:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=DTYPES[dtype])
    reference = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).to(device)
    teacher = Teacher(model, tokenizer, digest="bench", seed=0, limit=options.max_tokens, device=device)
    tokens = encode(tokenizer, [(text,) for text in texts], options.max_tokens, types=True)
    keys = [i.to_bytes(16, "big") for i in range(len(tokens))]
    return Bench(teacher, reference, tokens, keys, options.passes, tokens_at_once(device, teacher.width))


def check(bench: Bench) -> None:
    """Checks the logits without dropout against the model, and the variance with dropout against `train()`."""
    tokens, keys = bench.tokens[:32], bench.keys[:32]
    off, _ = run_passes(bench.teacher, tokens, keys, range(0), deterministic=True, batch_tokens=bench.budget)
    own = np.concatenate([_padded(bench.reference.eval(), [ids]) for ids in tokens])
    if off is None or np.abs(off - own).max() > (1e-3 if bench.teacher.dtype == torch.float32 else 0.15):
        raise SystemExit("the logits without dropout differ from those of the model")
    _, raw = run_passes(bench.teacher, tokens, keys, range(16), deterministic=False, batch_tokens=bench.budget)
    bench.reference.train()
    drawn = np.stack([_padded(bench.reference, tokens) for _ in range(16)], 1)
    ratio = raw.astype(np.float64).var(1).mean() / drawn.var(1).mean()
    if not 0.8 < ratio < 1.25:
        raise SystemExit(f"the variance of keyed passes is {ratio:.2f} times that of train()")


def race(
    bench: Bench, folder: Path, texts: Sequence[str], options: argparse.Namespace, dtype: str
) -> list[dict[str, Any]]:
    low = _copy_of(bench, DTYPES[dtype])
    batch = best_batch(low, bench)
    by_length = np.argsort(bench.lengths, kind="stable")
    inputs = np.arange(len(bench.tokens))
    waits: list[float] = []
    candidates: dict[str, Any] = {
        "amalgam": partial(amalgam, bench),
        "amalgam, file to Parquet": partial(end_to_end, bench, folder, texts, dtype, waits),
        "last layer": partial(last_layer, bench),
        "one run": partial(one_run, bench),
        "deterministic": partial(deterministic, bench),
        "tuned": partial(passes_one_by_one, low, bench, by_length, batch),
        "naive": partial(passes_one_by_one, bench.reference, bench, inputs, NAIVE_BATCH),
        "muki loop, repaired": partial(muki_loop, bench, options.max_tokens),
        "matrix rate": partial(matrix_seconds, bench),
    }
    for name in options.without:
        candidates.pop(name, None)
    seconds = interleaved(candidates, options.repeats)
    rate = matrix_rate(bench, seconds.pop("matrix rate")) if "matrix rate" in seconds else float("nan")
    rows = []
    alone, one = seconds.pop("last layer", None), seconds.pop("one run", None)
    if alone and one and "amalgam" in seconds:
        figures = {"seconds": round(median(alone), 3), "all_layers": round(median(seconds["amalgam"]), 3)}
        figures |= {"one_run": round(median(one), 3), "spread": round(spread(alone), 3)}
        figures |= {"of_all": round(paired(alone, seconds["amalgam"]), 3), "of_one": round(paired(alone, one), 3)}
        rows.append(row("cache_teachers", "last layer", **figures, dtype=dtype))
    for name, taken in seconds.items():
        rows.append(_figures(name, bench, taken, seconds, rate, dtype))
        if name == "tuned":
            rows[-1]["batch"] = batch
        if name == "amalgam, file to Parquet" and waits:
            rows[-1]["device_waits"] = round(median(waits), 4)
    rows.append(row("cache_teachers", "matrix rate", gflops=round(rate / 1e9, 1), dtype=dtype))
    return rows


def _figures(  # noqa: PLR0913  a row needs all arguments
    name: str, bench: Bench, taken: list[float], seconds: dict[str, list[float]], rate: float, dtype: str
) -> dict[str, Any]:
    took = median(taken)
    flop = sum(flop_of(bench.teacher.model.config, length) for length in bench.lengths) * bench.passes
    figures: dict[str, Any] = {
        "texts_per_s": round(len(bench.tokens) / took, 2),
        "passes_per_s": round(len(bench.tokens) * bench.passes / took, 1),
        "mfu": round(flop / took / rate, 3),
        "spread": round(spread(taken), 3),
        "peak_rss_mb": round(peak_rss_mb()),
        "dtype": "fp32" if name in {"naive", "muki loop, repaired"} else dtype,
    }
    for rival in ("tuned", "naive"):
        if rival in seconds:
            figures[f"ratio_to_{rival}"] = round(paired(seconds[rival], taken), 2)
    if name == "amalgam" and "deterministic" in seconds:
        figures["dropout_price"] = round(paired(taken, seconds["deterministic"]), 3)
    if name.startswith(("amalgam", "deterministic")):
        skipped = not_computed(bench)
        figures["mfu_executed"] = round((flop - skipped) / took / rate, 3)
    return row("cache_teachers", name, **figures)


def flop_of(config: Any, tokens: int) -> int:
    """Returns the FLOP of a forward pass on a text. A token has L (8 h^2 + 4 h f) + 4 L T h, or 6 h f if gated."""
    layers, width = config.num_hidden_layers, config.hidden_size
    return int(layers * (8 * width**2 + _flop_of_wide(config) + 4 * tokens * width) * tokens)


def _flop_of_wide(config: Any) -> int:
    """Returns the FLOP per token of a layer's products with its wide states."""
    return (6 if config.model_type == "modernbert" else 4) * config.hidden_size * config.intermediate_size


def not_computed(bench: Bench) -> int:
    """Returns the FLOP that the last layer skips, because the head reads only the first token."""
    if bench.teacher.fast_encoder is None or not bench.teacher.fast_encoder.first_token:
        return 0
    config = bench.teacher.model.config
    width, of_wide = config.hidden_size, _flop_of_wide(config)
    each = [(4 * width**2 + of_wide + 4 * length * width) * (length - 1) for length in bench.lengths]
    return int(sum(each)) * bench.passes


def amalgam(bench: Bench) -> None:
    run_passes(
        bench.teacher, bench.tokens, bench.keys, range(bench.passes), deterministic=False, batch_tokens=bench.budget
    )


def last_layer(bench: Bench) -> None:
    """Runs K passes of the last layer and the head alone (`cache.dropout: last-layer`)."""
    bench.teacher.last_layer = True
    try:
        amalgam(bench)
    finally:
        bench.teacher.last_layer = False


def one_run(bench: Bench) -> None:
    """Runs each text once, without dropout."""
    run_passes(bench.teacher, bench.tokens, bench.keys, range(0), deterministic=True, batch_tokens=bench.budget)


def deterministic(bench: Bench) -> None:
    """Runs the same batches without dropout. As many are under way as in `run_passes`."""
    teacher = bench.teacher
    plan = partial(plan_launches, batch_tokens=bench.budget, fold=teacher.can_batch_passes, padding=teacher.padding)
    started: deque[PendingTransfer] = deque()
    for launch in plan(bench.lengths.tolist(), range(bench.passes)):
        tokens, keys = [bench.tokens[i] for i in launch.texts], [bench.keys[i] for i in launch.texts]
        started.append(teacher.start(Rows(tokens, keys, np.full(len(launch), DROPOUT_OFF))))
        if len(started) > teacher.prefetch:
            started.popleft().wait()
    for transfer in started:
        transfer.wait()


def end_to_end(bench: Bench, folder: Path, texts: Sequence[str], dtype: str, waits: list[float]) -> float:
    """Times the commands' code from a text file to closed Parquet files with digests.

    The teacher is loaded before the clock starts.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from amalgam.pipeline.console import Console
    from amalgam.pipeline.execution.runner import update
    from amalgam.stages.app.runs import open_run, working
    from amalgam.stages.cache_teachers import ask
    from amalgam.stages.common.load import teacher_loader, teachers_of
    from amalgam.stages.registry import STAGES

    computing = 0.0
    real = run_passes

    def timed(*arguments: Any, **options: Any) -> Any:
        nonlocal computing
        began = time.perf_counter()
        answers = real(*arguments, **options)
        computing += time.perf_counter() - began
        return answers

    with tempfile.TemporaryDirectory() as scratch, mock.patch.object(ask, "run_passes", timed):
        base = Path(scratch)
        pq.write_table(pa.table({"text": list(texts)}), base / "texts.parquet")
        (base / "amalgam.yaml").write_text(
            f"corpus: {{train: texts.parquet}}\nteachers: [{{name: teacher, model: {folder}}}]\n"
            f"cache: {{passes: {bench.passes}, max_tokens: {bench.teacher.limit}, dtype: {dtype}}}\n"
        )
        run = open_run(base / "amalgam.yaml", [f"execution.device={bench.teacher.device.type}"])
        run.console = Console(quiet=True)
        with working(run):
            began = time.perf_counter()
            update(STAGES, run, target="read-corpus")
            took = time.perf_counter() - began
            next(stage for stage in STAGES if stage.name == "cache-teachers").resolve_inputs(run)
            teacher_loader(run).load(teachers_of(run)[0], dtype, passes=bench.passes).fast_encoder  # noqa: B018  built once, before the clock starts
            began = time.perf_counter()
            update(STAGES, run, target="cache-teachers")
            caching = time.perf_counter() - began
        waits.append(1 - computing / caching)
        return took + caching


def passes_one_by_one(model: Any, bench: Bench, order: NDArray[np.int64], batch: int) -> None:
    """Runs K passes over all batches in `train()`, padded to the longest text of each batch."""
    model.train()
    for first in range(0, len(order), batch):
        chosen = [bench.tokens[i] for i in order[first : first + batch]]
        for _ in range(bench.passes):
            _padded(model, chosen)


def muki_loop(bench: Bench, width: int) -> None:
    """Runs the published loop, padded to the limit and repaired to draw K passes."""
    bench.reference.train()
    for first in range(0, len(bench.tokens), NAIVE_BATCH):
        chosen = bench.tokens[first : first + NAIVE_BATCH]
        drawn = [_padded(bench.reference, chosen, width) for _ in range(bench.passes)]
        mean = np.mean([np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) for logits in drawn], 0)
        _ = -(mean * np.log(mean)).sum(-1)


def _padded(model: Any, tokens: Sequence[Tokens], width: int = 0) -> NDArray[np.float32]:
    lengths = np.array([len(text) for text in tokens])
    shape = len(tokens), max(int(lengths.max()), width)
    ids = np.zeros(shape, np.int64)
    for place, text in enumerate(tokens):
        ids[place, : len(text)] = text.ids
    mask = (np.arange(shape[1]) < lengths[:, None]).astype(np.int64)
    device = next(model.parameters()).device
    with torch.inference_mode():
        logits = model(
            input_ids=torch.from_numpy(ids).to(device), attention_mask=torch.from_numpy(mask).to(device)
        ).logits
    return logits.float().cpu().numpy()


def _copy_of(bench: Bench, dtype: torch.dtype) -> Any:
    import copy

    return copy.deepcopy(bench.reference).to(dtype)


def best_batch(model: Any, bench: Bench) -> int:
    """Returns the fastest batch size of the tuned rival, on one pass over the sorted texts."""
    by_length = np.argsort(bench.lengths, kind="stable")
    one_pass = Bench(bench.teacher, bench.reference, bench.tokens, bench.keys, 1, bench.budget)
    batches = TUNED_BATCHES if bench.teacher.device.type == "cpu" else TUNED_BATCHES_ON_A_GPU
    trials = {str(batch): partial(passes_one_by_one, model, one_pass, by_length, batch) for batch in batches}
    seconds = interleaved(trials, 2)
    return int(min(seconds, key=lambda batch: median(seconds[batch])))


MATRIX_REPEATS = 8


def matrix_shape(bench: Bench) -> tuple[int, int, int]:
    return (4096, 1536, 1536) if bench.teacher.device.type == "cpu" else (8192, 8192, 8192)


def matrix_rate(bench: Bench, seconds: Sequence[float]) -> float:
    """Returns the FLOP per second of the matrix product."""
    rows, inner, columns = matrix_shape(bench)
    return 2 * rows * inner * columns * MATRIX_REPEATS / median(seconds)


def matrix_seconds(bench: Bench) -> float:
    """Returns the seconds of a matrix product in the teacher's dtype, which bounds every rate."""
    rows, inner, columns = matrix_shape(bench)
    device, dtype = bench.teacher.device, bench.teacher.dtype
    left, right = torch.randn(rows, inner).to(device, dtype), torch.randn(inner, columns).to(device, dtype)
    out = torch.empty(rows, columns, device=device, dtype=dtype)
    torch.mm(left, right, out=out)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(MATRIX_REPEATS):
        torch.mm(left, right, out=out)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def price(bench: Bench, length: int, options: argparse.Namespace, dtype: str) -> list[dict[str, Any]]:
    """Measures the cost of dropout at one length, on two batches of random ids."""
    if length > bench.teacher.model.config.max_position_embeddings:
        return []
    random = np.random.default_rng(length)
    count = max(2, 2 * bench.budget // length // bench.passes)
    ids = random.integers(1000, 20000, (count, length), dtype=np.int32)
    same = Bench(
        bench.teacher,
        bench.reference,
        [Tokens(row_ids, np.zeros(length, np.int32), truncated=False) for row_ids in ids],
        [i.to_bytes(16, "big") for i in range(count)],
        bench.passes,
        bench.budget,
    )
    seconds = interleaved(
        {"amalgam": partial(amalgam, same), "deterministic": partial(deterministic, same)}, options.repeats
    )
    figures = {"tokens": length, "dropout_price": round(paired(seconds["amalgam"], seconds["deterministic"]), 3)}
    return [row("cache_teachers", f"price at {length} tokens", **figures, dtype=dtype)]


if __name__ == "__main__":
    main()
