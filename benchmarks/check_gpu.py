"""Checks correctness and speed on a GPU (`make check-gpu`). It needs only torch, transformers and numpy.

Masks must equal those of the CPU bit for bit. Logits must agree with the CPU, with and without dropout.
Half precision must keep the variance between passes. Kernels must give the logits of separate steps.
Training steps in CUDA graphs must give the gradients of plain ones, and stop where a model cannot be recorded.
The benchmark then compares BERT-base and ModernBERT-base with their rivals (bf16, K = 16).
Last it compares the training of BERT-base with Trainer, which needs all libraries of amalgam.
Exit code 1 means an error, 4 no GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForSequenceClassification, logging

from amalgam.benchmarks.cache_teachers import (
    NAIVE_BATCH,
    Bench,
    amalgam,
    best_batch,
    deterministic,
    flop_of,
    matrix_rate,
    matrix_seconds,
    not_computed,
    one_run,
    passes_one_by_one,
)
from amalgam.benchmarks.protocol import interleaved, median, paired, row, show, spread
from amalgam.data.tokens import Ragged, Tokens
from amalgam.stages.common.device import dtype_for, put_on, tokens_at_once
from amalgam.stages.common.inference.batches import run_passes
from amalgam.stages.common.inference.dropout import Axis, Bank, row_words, site_words
from amalgam.stages.common.inference.teacher import DROPOUT_OFF, Rows, Teacher
from amalgam.stages.common.training.step_graphs import StepGraphs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NO_GPU = 4
KINDS = ("bert", "roberta", "distilbert", "electra", "mpnet", "modernbert")
RATES = dict.fromkeys(("attention_dropout", "embedding_dropout", "mlp_dropout", "classifier_dropout"), 0.1)
RACED: dict[str, dict[str, Any]] = {"bert": {}, "modernbert": RATES}
"""Architectures of the benchmark, at their base size, with their rates of dropout."""
TRAINING = "training"
RIVALS = ("tuned", "tuned, compiled", "tuned, packed, compiled", "naive")
NAIVE_SHARE = 8
PACKED_TOKENS = 1 << 15
BATCH_ROWS = 64
TRAINING_BATCH = 64
SHAPE = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 128},
    "modernbert": {**SHAPE, **RATES, "num_attention_heads": 2},
}
GRADIENTS_APART = 1e-3
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
        "--race", nargs="*", choices=(*RACED, TRAINING), default=(*RACED, TRAINING), help="nothing: correctness only"
    )
    parser.add_argument("--texts", type=int, default=2048, help="number of texts for the benchmark")
    parser.add_argument("--passes", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--without", nargs="*", choices=RIVALS, default=(), help="rivals to leave out")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sizes", type=json.loads, default={}, help="settings of a smaller model, as JSON")
    options = parser.parse_args()
    logging.set_verbosity_error()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: run on a machine with a GPU, or set --device cpu", file=sys.stderr)  # noqa: T201
        raise SystemExit(NO_GPU)
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device(options.device)
    faults = [*mask_faults(device)]
    summaries: dict[str, str] = {}
    for kind in KINDS:
        faults += [*logit_faults(kind, device), *state_faults(kind, device)]
        apart, summaries[kind] = kernel_faults(kind, device)
        faults += apart
        faults += graph_faults(kind, device) if device.type == "cuda" else []
    for fault in faults:
        print(f"WRONG: {fault}", file=sys.stderr)  # noqa: T201
    if faults:
        raise SystemExit(1)
    show(
        [
            row("check_gpu", "correct", masks="equal", models=", ".join(KINDS)),
            *(row("check_gpu", kind, kernels=summary) for kind, summary in summaries.items()),
        ],
        as_json=options.json,
    )
    for name in options.race:
        rows = training(device, options) if name == TRAINING else race(name, device, options)
        show(rows, as_json=options.json)


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


def state_faults(kind: str, device: torch.device) -> list[str]:
    """Compares the states that come with the logits with the last layer's states of the model on the CPU."""
    model, random = _model(kind), np.random.default_rng(3)
    exact = build_teacher(model, torch.device("cpu"), "fp32")
    tokens = [_text(random, length) for length in random.integers(5, 60, 24)]
    keys = [i.to_bytes(16, "big") for i in range(len(tokens))]
    alone = [Rows([text], [key], np.full(1, DROPOUT_OFF)) for text, key in zip(tokens, keys, strict=True)]
    expected = np.stack([exact.states(rows)[-1][0].mean(0).numpy() for rows in alone])
    faults = []
    for dtype in sorted({"fp32", dtype_for(device)}):
        teacher = build_teacher(model, device, dtype)
        if teacher.fast_encoder is None:  # its states are computed in a pass of their own
            continue
        states = np.empty(expected.shape, np.float16)
        run_passes(teacher, tokens, keys, range(0), deterministic=True, batch_tokens=512, states=states)
        apart = float(np.abs(states - expected).mean() / expected.std(0).mean())
        if apart > TOLERANCE[dtype] * 4:
            faults.append(f"{kind}, {dtype}: states differ from the CPU's by {apart:.4f} of their spread")
    return faults


def kernel_faults(kind: str, device: torch.device) -> tuple[list[str], str]:
    """Compares passes in the kernels with those in separate steps, and returns the faults and a summary.

    The batches are padded and unpadded, of few tokens and of many.
    """
    teacher = build_teacher(_model(kind), device, dtype_for(device))
    if teacher.kernels is None:
        return [], "no kernels on this device"
    batches = list(_batches())
    with plainly(teacher):
        expected = [teacher.run(rows).numpy() for rows in batches]
    logits = [teacher.run(rows).numpy() for rows in batches]
    apart = max(float(np.abs(a - b).mean() / b.std(0).mean()) for a, b in zip(logits, expected, strict=True))
    faults = list(teacher.notes)
    if apart > TOLERANCE[teacher.name]:
        faults.append(f"{kind}: kernels differ from separate steps by {apart:.4f} of the spread")
    return faults, f"within {apart:.1e} of the spread of logits"


def graph_faults(kind: str, device: torch.device) -> list[str]:
    """Compares gradients of a recorded step with those of a plain one, with the same dropout and with another.

    With the first kind of model it also tries to record a step that waits for the device, and another one after that.
    """
    model = _model(kind).to(device).train()
    random = np.random.default_rng(2)
    ids = torch.from_numpy(random.integers(5, 200, (16, 24)))
    ids[::2, 17:] = 0
    batch = {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.from_numpy(random.integers(0, 3, 16)),
    }
    weights = [*model.parameters()]

    def loss_of(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**inputs).loss

    def looking(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_of(inputs) if float(inputs["attention_mask"].sum()) else loss_of(inputs) * 0

    def gradients(run: Callable[[], object], seed: int) -> torch.Tensor:
        for weight in weights:
            weight.grad = None if weight.grad is None else weight.grad.zero_()
        torch.manual_seed(seed)
        run()
        return torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None]).clone()

    graphs, refused, later = (StepGraphs(weights, of, device) for of in (loss_of, looking, loss_of))
    steps = [("a recorded step", graphs, 1), ("the same step again", graphs, 1), ("other dropout", graphs, 2)]
    if kind == KINDS[0]:
        steps += [("a step that cannot be recorded", refused, 1), ("a step recorded after it", later, 1)]
    expected = gradients(lambda: torch.autograd.backward(loss_of(put_on(device, batch)) * 0.5), 1)
    faults = []
    for what, of, seed in steps:
        apart = float((gradients(partial(of.backward, batch, 0.5), seed) - expected).norm() / expected.norm())
        if (apart < GRADIENTS_APART) is not (seed == 1):
            faults.append(f"{kind}, {what}: gradients differ from those of a plain step by {apart:.3g} of their norm")
    if graphs.note or later.note or (kind == KINDS[0] and not refused.note):
        faults.append(f"{kind}: {graphs.note or later.note or 'a step that waits for the device was recorded'}")
    return faults


def _batches() -> Iterator[Rows]:
    random = np.random.default_rng(1)
    keys = [i.to_bytes(16, "big") for i in range(BATCH_ROWS)]
    for length, width in ((9, 0), (21, 0), (34, 40), (130, 150)):
        tokens = [_text(random, length) for _ in keys]
        for number in (0, 1):
            yield Rows(tokens, keys, np.full(len(keys), number), width)


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
        copy.deepcopy(model), Plain(), digest="check", seed=0, limit=150, device=device, dtype=DTYPES[dtype], name=dtype
    )


def _text(random: np.random.Generator, length: int, vocabulary: int = 200) -> Tokens:
    ids = random.integers(5, vocabulary, int(length), dtype=np.int32)
    ids[[0, -1]] = 2, 3
    return Tokens(ids, None, truncated=False)


def _answers(teacher: Teacher, tokens: list[Tokens], keys: list[bytes]) -> tuple[Any, Any]:
    logits, raw = run_passes(teacher, tokens, keys, range(16), deterministic=True, batch_tokens=2048)
    return logits, raw.astype(np.float64)


def race(shape: str, device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    dtype = dtype_for(device)
    bench, low = _bench(shape, device, dtype, options)
    batch = best_batch(low, bench)
    by_length = np.argsort(bench.lengths, kind="stable")
    few = replace(bench, tokens=bench.tokens[::NAIVE_SHARE], keys=bench.keys[::NAIVE_SHARE])
    candidates: dict[str, Any] = {
        "amalgam": partial(amalgam, bench),
        "amalgam, separate steps": partial(_in_separate_steps, bench),
        "deterministic": partial(deterministic, bench),
        "one run": partial(one_run, bench),
        "tuned": partial(passes_one_by_one, low, bench, by_length, batch),
        "naive": partial(_naive, few),
        "matrix rate": partial(matrix_seconds, bench),
    }
    if device.type == "cuda":
        compiled = by_layer(copy.deepcopy(low))
        candidates["tuned, compiled"] = partial(passes_one_by_one, compiled, bench, by_length, batch)
        candidates["tuned, packed, compiled"] = partial(Packed(low).run, bench)
    candidates = {name: run for name, run in candidates.items() if name not in options.without}
    seconds = interleaved(candidates, options.repeats)
    rate = matrix_rate(bench, seconds.pop("matrix rate"))
    flop = sum(flop_of(bench.teacher.model.config, int(length)) for length in bench.lengths)
    rows = []
    for name, taken in seconds.items():
        passes = 1 if name == "one run" else options.passes
        took = median(taken)
        figures: dict[str, Any] = {
            "texts_per_s": round(len(bench.tokens) / took, 1),
            "passes_per_s": round(len(bench.tokens) * passes / took, 1),
            "mfu": round(flop * passes / took / rate, 3),
            "spread": round(spread(taken), 3),
        }
        for rival in RIVALS:
            if rival in seconds and name != "one run":
                figures[f"ratio_to_{rival.replace(', ', '_')}"] = round(paired(seconds[rival], taken), 2)
        if name.startswith(("amalgam", "deterministic")):
            figures["mfu_executed"] = round((flop * passes - not_computed(bench)) / took / rate, 3)
        if name == "amalgam":
            figures["dropout_price"] = round(paired(taken, seconds["deterministic"]), 3)
        rows.append(row("check_gpu", f"{shape}: {name}", **figures, dtype="fp32" if name == "naive" else dtype))
    rows += [row("check_gpu", "note", text=note) for note in bench.teacher.notes]
    return [*rows, row("check_gpu", "matrix rate", tflops=round(rate / 1e12, 1), dtype=dtype)]


def training(device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compares the training of BERT-base with `transformers.Trainer`, as benchmarks/train_student.py does."""
    try:
        from amalgam.benchmarks import train_student
        from amalgam.benchmarks.models import new_classifier
        from amalgam.stages.common.training.loop import training_dtype
    except ImportError as error:
        return [row("check_gpu", f"{TRAINING}: not measured", text=f"{error.name} is not installed")]
    bench, low = _bench("bert", device, dtype_for(device), options)
    tokenizer, labels = new_classifier("random", 4)[1], np.arange(len(bench.tokens)) % 4
    targets = np.full((len(labels), 4), 0.1, np.float32) + 0.6 * np.eye(4, dtype=np.float32)[labels]
    data = train_student.TrainingData(
        Ragged.of([text.ids for text in bench.tokens]), None, labels, targets, np.ones(len(labels), np.float32)
    )
    with tempfile.TemporaryDirectory() as scratch:
        dtype = training_dtype(device)
        trained = train_student.Bench(low.float().cpu(), tokenizer, device, dtype, Path(scratch))
        rows = train_student.race(
            trained, data, train_student.training_for(1, TRAINING_BATCH, 5e-5), (), options.repeats
        )
    rate = matrix_rate(bench, [matrix_seconds(bench)])
    flop = 3 * sum(flop_of(low.config, int(length)) for length in bench.lengths)
    for one in rows:
        one["mfu"] = round(flop * one["texts_per_s"] / len(labels) / rate, 3)
        one |= {"benchmark": "check_gpu", "row": f"{TRAINING}: {one['row']}"}
    return rows


def _bench(shape: str, device: torch.device, dtype: str, options: argparse.Namespace) -> tuple[Bench, Any]:
    """Returns the texts with the teacher, and the rivals' copy of its model in half precision."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model(shape, num_labels=4, **RACED[shape], **options.sizes)
    )
    random = np.random.default_rng(0)
    tokens = [_text(random, random.choice(AG_NEWS_LENGTHS), 30000) for _ in range(options.texts)]
    keys = [i.to_bytes(16, "big") for i in range(len(tokens))]
    reference = copy.deepcopy(model).to(device)
    low = copy.deepcopy(reference).to(DTYPES[dtype])
    teacher = Teacher(model, Plain(), digest="bench", seed=0, limit=128, device=device, dtype=DTYPES[dtype], name=shape)
    return Bench(teacher, reference, tokens, keys, options.passes, tokens_at_once(device, teacher.width)), low


def _naive(few: Bench) -> float:
    """Returns the seconds of all texts, from those of a part of them: the whole takes a minute."""
    began = time.perf_counter()
    passes_one_by_one(few.reference, few, np.arange(len(few.tokens)), NAIVE_BATCH)
    return (time.perf_counter() - began) * NAIVE_SHARE


def _in_separate_steps(bench: Bench) -> None:
    with plainly(bench.teacher):
        amalgam(bench)


@contextmanager
def plainly(teacher: Teacher) -> Iterator[None]:
    """Runs without kernels."""
    before = teacher.kernels, teacher._bank.kernels  # noqa: SLF001  a part of the teacher
    teacher.kernels = None
    teacher.use_kernels(None)
    try:
        yield
    finally:
        teacher.kernels = before[0]
        teacher.use_kernels(before[1])


def layers_of(model: Any) -> Any:
    return model.bert.encoder.layer if hasattr(model, "bert") else model.model.layers


def by_layer(model: Any) -> Any:
    """Compiles each layer by itself: layers of one kind share their code, so this takes seconds and not minutes."""
    for layer in layers_of(model):
        layer.compile(dynamic=True)
    return model


class Packed:
    """A model without padding: all texts of a batch in one row, FlashAttention with dropout over their own lengths."""

    def __init__(self, model: Any) -> None:
        AttentionInterface.register("packed", _packed_attention)
        self.model = by_layer(copy.deepcopy(model))
        self.model.config._attn_implementation = "packed"  # noqa: SLF001  no public way for a model that is built

    def _encode(self, ids: Any, places: Any, starts: Any) -> Any:
        if hasattr(self.model, "bert"):
            hidden = self.model.bert.embeddings(input_ids=ids, position_ids=places)
            for layer in layers_of(self.model):
                hidden = layer(hidden, None, starts=starts)
                hidden = hidden[0] if isinstance(hidden, tuple) else hidden
            return hidden
        encoder = self.model.model
        hidden = encoder.embeddings(input_ids=ids)
        turned = {kind: encoder.rotary_emb(hidden, places, kind) for kind in set(self.model.config.layer_types)}
        for layer in encoder.layers:
            hidden = layer(hidden, None, position_embeddings=turned[layer.attention_type], starts=starts)
        return encoder.final_norm(hidden)

    def _classified(self, first: Any) -> Any:
        model = self.model
        if hasattr(model, "bert"):
            return model.classifier(model.dropout(model.bert.pooler(first.unsqueeze(1))))
        return model.classifier(model.drop(model.head(first)))

    def logits(self, texts: list[Any], device: torch.device) -> torch.Tensor:
        lengths = [len(ids) for ids in texts]
        places = np.concatenate([np.arange(length) for length in lengths])
        starts = torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)).to(device)
        ids = torch.from_numpy(np.concatenate(texts).astype(np.int64)).to(device)[None]
        hidden = self._encode(ids, torch.from_numpy(places).to(device)[None], starts)
        logits: torch.Tensor = self._classified(hidden[0, starts[:-1].long()])
        return logits.float()

    def run(self, bench: Bench) -> None:
        self.model.train()
        order = np.argsort(bench.lengths, kind="stable")
        batch_of = np.cumsum(bench.lengths[order]) // PACKED_TOKENS
        for number in range(int(batch_of[-1]) + 1):
            chosen = [bench.tokens[i].ids for i in order[batch_of == number]]
            with torch.inference_mode():
                for _ in range(bench.passes):
                    self.logits(chosen, bench.teacher.device).cpu().numpy()


def _packed_attention(  # noqa: PLR0913  transformers' signature
    _module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    starts: torch.Tensor,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    heads = [tensor.transpose(1, 2).squeeze(0) for tensor in (query, key, value)]
    longest = max(AG_NEWS_LENGTHS)
    side = None if sliding_window is None else sliding_window - 1
    flash = torch.ops.aten._flash_attention_forward  # noqa: SLF001  the one with dropout over lengths
    options = {"scale": scaling, "window_size_left": side, "window_size_right": side}
    mixed = flash(*heads, starts, starts, longest, longest, dropout, False, False, **options)[0]
    return mixed.unsqueeze(0), None


if __name__ == "__main__":
    main()
