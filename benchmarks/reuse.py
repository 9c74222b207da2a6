"""Measures the cost of changes (K 16 -> 32, appended texts) against a fresh run, and memory by number of texts.

python benchmarks/reuse.py --texts PATH/ag_news/train.parquet [--json]
python benchmarks/reuse.py --auto 1000
python benchmarks/reuse.py --memory 10000 1000000

--auto compares `cache.passes: auto` with K = 16, for two teachers of `method: amalgam`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from amalgam.benchmarks.cache_teachers import LABELS
from amalgam.benchmarks.models import SHAPES, save_classifier
from amalgam.benchmarks.protocol import median, paired, peak_of_process_mb, row, show, texts_from

PASSES = 16
WORDS = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, help="a Parquet file with a column `text`; default: the embedded corpus")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--shape", choices=SHAPES, default="minilm")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--auto", type=int, metavar="TEXTS", help="number of texts; measures `cache.passes: auto` against K = 16"
    )
    parser.add_argument(
        "--memory",
        type=int,
        nargs="*",
        default=[],
        help="numbers of texts; measures peak memory with a tiny teacher, K = 1",
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(options.worker)
        return
    measure = _auto if options.auto else _changes
    rows = _memory(options.memory) if options.memory else measure(options)
    show(rows, as_json=options.json)


def _changes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Times each change in separate workspaces. The teacher is loaded before the clock starts."""
    texts = texts_from(options.texts, options.count * 101 // 100)
    base_texts = texts[: options.count]
    seconds: dict[str, list[float]] = {"K 32": [], "K 16": [], "K 16 to 32": [], "1 % appended": []}
    with tempfile.TemporaryDirectory() as scratch:
        model = save_classifier(Path(scratch) / "teacher", options.shape, LABELS)
        _warm_up(Path(scratch) / "warm-up", texts, model)
        for repeat in range(options.repeats):
            fresh_folder, grown_folder = Path(scratch) / f"{repeat}-fresh", Path(scratch) / f"{repeat}-grown"
            _experiment(fresh_folder, base_texts, model)
            _experiment(grown_folder, base_texts, model)
            seconds["K 32"].append(_timed(fresh_folder, 2 * PASSES))
            seconds["K 16"].append(_timed(grown_folder, PASSES))
            _experiment(grown_folder, texts, model)
            seconds["1 % appended"].append(_timed(grown_folder, PASSES))
            _experiment(grown_folder, base_texts, model)
            seconds["K 16 to 32"].append(_timed(grown_folder, 2 * PASSES))
    fresh = {"K 16 to 32": "K 32", "1 % appended": "K 16"}
    return [
        row(
            "reuse",
            name,
            seconds=round(median(taken), 2),
            of_fresh=round(paired(taken, seconds[fresh[name]]), 4) if name in fresh else None,
            texts=len(texts) - len(base_texts) if name == "1 % appended" else len(base_texts),
        )
        for name, taken in seconds.items()
    ]


def _auto(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Times cache-teachers with K = 16 and with auto, in turn and in new workspaces; both load two teachers."""
    texts = texts_from(options.texts, options.auto)
    seconds: dict[str, list[float]] = {f"K {PASSES}": [], "auto": []}
    with tempfile.TemporaryDirectory() as scratch:
        models = [save_classifier(Path(scratch) / f"teacher-{more}", options.shape, LABELS + more) for more in (0, 1)]
        _warm_up(Path(scratch) / "warm-up", texts, *models)
        for repeat in range(options.repeats):
            for name, taken in seconds.items():
                folder = Path(scratch) / f"{repeat}-{name}"
                _experiment(folder, texts, *models, targets="student: {method: amalgam}")
                taken.append(_timed(folder, None if name == "auto" else PASSES))
    sixteen, auto = seconds.values()
    return [
        row("reuse", f"K {PASSES}", seconds=round(median(sixteen), 2)),
        row(
            "reuse",
            "auto",
            seconds=round(median(auto), 2),
            times_faster=round(paired(sixteen, auto), 2),
            texts=len(texts),
        ),
    ]


def _warm_up(base: Path, texts: list[str], *models: Path) -> None:
    """Runs a few texts, so that no timed run starts the libraries."""
    _experiment(base, texts[:8], *models)
    _timed(base, 2)


def _experiment(base: Path, texts: list[str], *models: Path, targets: str = "targets: {mode: soft}") -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    base.mkdir(exist_ok=True)
    pq.write_table(pa.table({"text": texts}), base / "texts.parquet")
    teachers = ", ".join(f"{{name: {model.name}, model: {model}}}" for model in models)
    (base / "amalgam.yaml").write_text(
        f"corpus: {{train: texts.parquet}}\nteachers: [{teachers}]\ncache: {{max_tokens: 128}}\n{targets}\n"
    )


def _timed(base: Path, passes: int | None) -> float:
    from amalgam.pipeline.console import Console
    from amalgam.pipeline.execution.runner import update
    from amalgam.stages.app.runs import open_run, working
    from amalgam.stages.common.cached.load import dtype_of
    from amalgam.stages.common.load import teacher_loader, teachers_of
    from amalgam.stages.registry import STAGES

    run = open_run(base / "amalgam.yaml", [] if passes is None else [f"cache.passes={passes}"])
    run.console = Console(quiet=True)
    with working(run):
        update(STAGES, run, target="read-corpus")
        next(stage for stage in STAGES if stage.name == "cache-teachers").resolve_inputs(run)
        _ = teacher_loader(run).load(teachers_of(run)[0], dtype_of(run), passes=passes or 0).fast_encoder
        began = time.perf_counter()
        update(STAGES, run, target="cache-teachers")
        return time.perf_counter() - began


def _memory(sizes: list[int]) -> list[dict[str, Any]]:
    """Measures the peak memory of cache-teachers in a separate process, after another has read the corpus."""
    rows: list[dict[str, Any]] = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as scratch:
            base = Path(scratch)
            _tiny(base / "model")
            _many(base, size)
            command = [sys.executable, "-m", "amalgam.cli", "read-corpus", "-c", str(base / "amalgam.yaml")]
            subprocess.run(command, check=True, capture_output=True)
            began = time.perf_counter()
            worker = [sys.executable, __file__, "--worker", str(base)]
            peak = float(subprocess.run(worker, check=True, capture_output=True, text=True).stdout.split()[-1])
            figures: dict[str, Any] = {"texts": size, "peak_rss_mb": round(peak, 1)}
            figures["seconds"] = round(time.perf_counter() - began, 1)
            if rows:
                figures["of_the_first"] = round(peak / rows[0]["peak_rss_mb"], 3)
            rows.append(row("reuse", f"memory at {size:,} texts", **figures))
    return rows


def _many(base: Path, size: int) -> None:
    import numpy as np

    random = np.random.default_rng(0)
    with (base / "texts.jsonl").open("w") as file:
        for i in range(size):
            words = " ".join(f"word{word}" for word in random.integers(0, WORDS, 4 + i % 9))
            file.write(f'{{"text": "{words} {i}"}}\n')
    (base / "amalgam.yaml").write_text(
        "corpus: {train: texts.jsonl}\nteachers: [{name: tiny, model: model}]\n"
        "cache: {passes: 1, max_tokens: 32, dtype: fp32}\ntargets: {mode: soft}\n"
    )


def _tiny(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"word{i}" for i in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    labels = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    config = BertConfig(vocab_size=len(names), max_position_embeddings=64, **shape, **labels)
    BertForSequenceClassification(config).save_pretrained(folder)


def _work(base: Path) -> None:
    """Prints the peak memory of this process."""
    from amalgam.pipeline.console import Console
    from amalgam.pipeline.execution.runner import update
    from amalgam.stages.app.runs import open_run, working
    from amalgam.stages.registry import STAGES

    run = open_run(base / "amalgam.yaml", [])
    run.console = Console(quiet=True)
    with working(run):
        update(STAGES, run, target="cache-teachers")
    print(peak_of_process_mb())  # noqa: T201  the parent process reads it


if __name__ == "__main__":
    main()
