"""Short trials of the work itself: a few launches of a teacher, a few steps of a training, on texts of this corpus.

Every trial runs the code that the stage runs, so that its figures need no model of the machine.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from amalgam.data.corpus import read_part
from amalgam.data.parquet import read_table, write_table
from amalgam.pipeline.config.schema import Corpus, Student, TrainTeachers
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.app.cost.rates import Figures
from amalgam.stages.cache_teachers.tables import answer_table
from amalgam.stages.common.encoders import NewClassifier
from amalgam.stages.common.inference.load import launch_budget
from amalgam.stages.common.load import load_new_classifier
from amalgam.stages.common.states.families import blocks_of
from amalgam.stages.common.teachers import ResolvedTeacher
from amalgam.stages.common.training.learner import Objective, WeightedKL
from amalgam.stages.common.training.settings import Training
from amalgam.stages.generate.requests import BLOCK
from amalgam.stages.generate.stage import generate_config, source_inputs, text_plan

if TYPE_CHECKING:
    import numpy as np

    from amalgam.data.tokens import TokenRows
    from amalgam.stages.common.inference.teacher import Teacher
    from amalgam.stages.common.training.batches import Examples
    from amalgam.stages.generate.decoding import TextRequest, Writer
    from amalgam.stages.generate.sources import TextGenerator


Texts = Sequence[tuple[str, ...]]

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

ROUNDS = 3

FIRST_STEPS, STEPS = 2, 8
"""Steps of a trial training: the first ones are slower and do not count."""

ROWS_READ = 4096

SUMMED = 4096

MEGABYTE = 1e6

LIBRARIES = (
    "import torch, accelerate, polars, pyarrow.parquet, transformers.models.bert.modeling_bert\n"
    "from transformers import AutoModelForSequenceClassification, AutoTokenizer"
)

TEACHER_HELD_OUT, TEACHER_EVERY = 0.05, 100
"""What stages/train_teachers keeps aside, and how many steps lie between two looks at it."""


def starting() -> Figures:
    """What any command pays before its first launch: Python and the libraries, in a process of their own."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", LIBRARIES], check=True, capture_output=True)
    return {"seconds": time.perf_counter() - began}


def reading(texts: Texts, corpus: Corpus) -> Figures:
    """Seconds per row of read-corpus, and bytes per text of its buckets."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory() as scratch:
        source, folder = Path(scratch) / "rows.parquet", Path(scratch) / "part"
        folder.mkdir()
        rows = [texts[row % len(texts)] for row in range(ROWS_READ)]
        columns = {name: [f"{row} {text[i]}" for row, text in enumerate(rows)] for i, name in enumerate(corpus.text)}
        pq.write_table(pa.table(columns), source)
        plain = corpus.model_copy(update={"label": None, "id": "auto", "limit": None})
        began = time.perf_counter()
        read_part([source], plain, part="train", folder=folder)
        seconds = time.perf_counter() - began
        size = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
    return {"seconds_per_row": seconds / ROWS_READ, "mb_per_row": size / MEGABYTE / ROWS_READ}


def asking(run: Run, load: Callable[[str], Teacher], dtype: str, texts: Texts) -> Figures:
    """A teacher's set-up, seconds per text and pass, and what a text takes on the disk."""
    from amalgam.stages.common.device import dtype_for, pick_device

    if dtype == "auto":  # most likely: the gate that settles it is not passed here
        dtype = dtype_for(pick_device(run.experiment.execution.device))
    passes = run.experiment.cache.passes
    with PeakMemory() as peak:
        load(dtype)  # the first time libraries are loaded too
        run.cache.pop("loaded teacher", None)
        began = time.perf_counter()
        teacher = load(dtype)
        _ = teacher.lean, teacher.sites if passes else ()
        setup = time.perf_counter() - began
        tokens = _tokens(teacher, texts)
        seconds = _per_row(teacher, tokens, passes, launch_budget(run, teacher))
    return {
        "setup_seconds": setup,
        "seconds_per_pass": seconds,
        **_bytes_of(tokens, teacher.labels, passes),
        "memory_mb": peak.megabytes,
    }


def proxy_teacher(run: Run, settings: TrainTeachers, where: str, labels: list[str], dtype: str) -> Teacher:
    """What a teacher will be once it is trained, as far as time and memory go."""
    import torch

    from amalgam.stages.common.device import pick_device
    from amalgam.stages.common.inference.teacher import Teacher
    from amalgam.stages.common.models.loading import DTYPES

    new = load_new_classifier(run, settings, labels, where)
    device = pick_device(run.experiment.execution.device)
    kind: torch.dtype = getattr(torch, DTYPES[dtype])
    return Teacher(new.model, new.tokenizer, digest="stand-in", seed=0, limit=new.limit, device=device, dtype=kind)


def _tokens(teacher: Teacher, texts: Texts) -> TokenRows:
    from amalgam.data.tokens import encode

    return encode(teacher.tokenizer, texts, teacher.limit, types=teacher.takes_types)


def _per_row(teacher: Teacher, tokens: TokenRows, passes: int, budget: int) -> float:
    """Full launches of a few lengths, and between them a straight line; the mean over the lengths of the sample."""
    import numpy as np

    from amalgam.stages.common.inference.batches import run_passes

    order = np.argsort(tokens.lengths, kind="stable")
    chosen = {int(tokens.lengths[row]): tokens[int(row)] for row in order[[int(q * len(order)) for q in QUANTILES]]}
    taken: dict[int, list[float]] = {length: [] for length in chosen}
    for _ in range(1 + ROUNDS):
        for length, text in chosen.items():
            count = max(1, budget // length // max(passes, 1))
            keys = [row.to_bytes(16, "big") for row in range(count)]
            began = time.perf_counter()
            run_passes(teacher, [text] * count, keys, range(passes), deterministic=not passes, batch_tokens=budget)
            taken[length].append((time.perf_counter() - began) / count / max(passes, 1))
    lengths = sorted(taken)
    medians = [float(np.median(taken[length][1:])) for length in lengths]
    return float(np.interp(tokens.lengths, lengths, medians).mean())


def _bytes_of(tokens: TokenRows, labels: int, passes: int) -> Figures:
    import numpy as np

    from amalgam.stages.common.token_cache import token_table

    random = np.random.default_rng(0)
    logits = random.normal(size=(len(tokens), labels)).astype(np.float32)
    raw = random.normal(size=(len(tokens), passes, labels)).astype(np.float16)
    keys = [random.bytes(16) for _ in range(len(tokens))]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "table.parquet"
        write_table(answer_table(keys, tokens, logits, raw), path)
        answers = path.stat().st_size
        write_table(token_table(tokens), path)
        kept = path.stat().st_size
    return {"mb_per_text": answers / MEGABYTE / len(tokens), "token_mb_per_text": kept / MEGABYTE / len(tokens)}


def training(
    run: Run, said: Student | TrainTeachers, where: str, texts: Texts, widths: Sequence[int] | None = None
) -> Figures:
    """A training's set-up, seconds per step and per text that is only read, and the finished model's size.

    `widths`: of the teachers whose states the student looks at; its phases are then tried one after the other.
    """
    import numpy as np

    from amalgam.data.tokens import encode
    from amalgam.stages.common.inference.classifier import BATCH_TOKENS, predict
    from amalgam.stages.common.training.loop import fit

    with PeakMemory() as peak, tempfile.TemporaryDirectory() as scratch:
        load_new_classifier(run, said, ["one", "two"], where)  # the first time libraries are loaded too
        began = time.perf_counter()
        new = load_new_classifier(run, said, ["one", "two"], where)
        setup = time.perf_counter() - began
        tokens = encode(new.tokenizer, texts, new.limit, types=new.types)
        examples = _examples(tokens, said.batch_size)
        phases = [None] if widths is None else _phases(run, new, examples, widths)
        taken = []
        for place, objective in enumerate(phases):
            ends = [time.perf_counter()]
            fit(
                new.model,
                examples,
                _settings(said),
                pad_id=new.pad_id,
                score=lambda _: 0.0,
                checkpoint=Path(scratch) / str(place),
                stop=lambda: False,
                on_step=lambda *_, ends=ends: ends.append(time.perf_counter()),
                objective=objective,
                cpu=run.experiment.execution.device == "cpu",
            )
            taken.append(float(np.diff(ends)[FIRST_STEPS:].mean()))
        began = time.perf_counter()
        predict(new.model, tokens.ids, pad_id=new.pad_id, batch_tokens=BATCH_TOKENS, type_ids=tokens.type_ids)
        read = (time.perf_counter() - began) / len(tokens)
    return {
        "setup_seconds": setup,
        "seconds_per_step": sum(taken),
        "phases": len(taken),
        "seconds_per_read": read,
        "memory_mb": peak.megabytes,
        "model_mb": sum(weight.numel() * 4 for weight in new.model.parameters()) / MEGABYTE,
        "tokens_per_text": float(tokens.lengths.mean()),
    }


def _phases(run: Run, new: NewClassifier, examples: Examples, widths: Sequence[int]) -> list[Objective | None]:
    """The student's own, over states that are made up."""
    import numpy as np

    from amalgam.stages.common.states.read import States
    from amalgam.stages.train_student.schedule import phases_over

    by_token = run.experiment.objective.read_states == "tokens"
    lengths = examples.lengths if by_token else np.ones(len(examples), np.int64)
    place, starts = np.zeros(len(examples), np.int64), np.cumsum(lengths) - lengths
    random = np.random.default_rng(0)
    rows = [random.normal(size=(int(lengths.sum()), blocks_of(run), width)).astype(np.float16) for width in widths]
    states = [States("", [one], place, starts, lengths) for one in rows]
    alike = np.full((len(examples), blocks_of(run), len(widths)), 1 / max(1, len(widths)), np.float32)
    return [objective for _, objective in phases_over(run, new, states, WeightedKL(), alike)]


def states(  # noqa: PLR0913 - what is asked for, each by name
    run: Run, load: Callable[[str], Teacher], dtype: str, texts: Texts, grain: str, blocks: int
) -> Figures:
    """A teacher's set-up, seconds per text whose states are kept, and what they take on the disk."""
    from amalgam.stages.common.device import dtype_for, pick_device
    from amalgam.stages.common.states.write import write_states

    if dtype == "auto":  # as in asking
        dtype = dtype_for(pick_device(run.experiment.execution.device))
    with PeakMemory() as peak, tempfile.TemporaryDirectory() as scratch:
        load(dtype)  # the first time libraries are loaded too
        run.cache.pop("loaded teacher", None)
        began = time.perf_counter()
        teacher = load(dtype)
        setup = time.perf_counter() - began
        tokens, keys = _tokens(teacher, texts), [row.to_bytes(16, "big") for row in range(len(texts))]
        taken = []
        for _ in range(1 + ROUNDS):
            began = time.perf_counter()
            write_states(Path(scratch), teacher, keys, tokens, blocks=blocks, by_token=grain == "tokens")
            taken.append(time.perf_counter() - began)
        size = sum(path.stat().st_size for path in Path(scratch).iterdir())
    seconds = sorted(taken[1:])[ROUNDS // 2] / len(texts)
    rates = {"setup_seconds": setup, "seconds_per_text": seconds, "mb_per_text": size / MEGABYTE / len(texts)}
    return {**rates, "memory_mb": peak.megabytes}


def _settings(said: Student | TrainTeachers) -> Training:

    return Training(
        epochs=1,
        learning_rate=said.learning_rate,
        batch_size=said.batch_size,
        accumulate=getattr(said, "accumulate", 1),
        warmup=said.warmup,
        weight_decay=said.weight_decay,
        clip=1.0,
        evaluate_every=FIRST_STEPS + STEPS,
        seed=said.seed,
    )


def _examples(tokens: TokenRows, batch: int) -> Examples:
    """As many rows as the trial's steps take; texts come again where the sample is small."""
    import numpy as np

    from amalgam.stages.common.training.batches import Examples

    random = np.random.default_rng(0)
    rows = random.permutation(np.arange(batch * (FIRST_STEPS + STEPS)) % len(tokens))
    taken = tokens.take(rows)
    targets = np.eye(2, dtype=np.float32)[rows % 2]
    return Examples(taken.ids, taken.type_ids, targets, np.ones(len(rows), np.float32))


def summing(labels: int, passes: int) -> Figures:
    """Stage 2's seconds per text and teacher: the file read, its passes summed, the targets written."""
    import numpy as np
    import polars as pl

    from amalgam.data.tokens import Ragged, TokenRows
    from amalgam.stages.common.answers.uncertainty import confidence, sums_over_passes

    random = np.random.default_rng(0)
    logits = random.normal(size=(SUMMED, labels)).astype(np.float32)
    raw = random.normal(size=(SUMMED, passes, labels)).astype(np.float16)
    tokens = TokenRows(Ragged(np.zeros(SUMMED, np.int32), np.arange(SUMMED + 1)), None, np.zeros(SUMMED, bool))
    table = answer_table([random.bytes(16) for _ in range(SUMMED)], tokens, logits, raw)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "table.parquet"
        write_table(table, path)
        taken = []
        for _ in range(1 + ROUNDS):
            began = time.perf_counter()
            found = pl.DataFrame(read_table(path))
            each = [pl.Series(found["logits"].to_numpy())] if not passes else _each(found["passes"].to_numpy(), passes)
            confidence(pl.DataFrame(sums_over_passes(each, "entropy")), "entropy")
            write_table(table.select(["key", "logits"]), path.with_name("targets.parquet"))
            taken.append(time.perf_counter() - began)
    return {"seconds_per_text": float(np.median(taken[1:])) / SUMMED}


def comparing() -> Figures:
    """Seconds per pair of texts whose states are compared."""
    import numpy as np

    from amalgam.stages.weigh_teachers.neighbours import nearest

    states = np.random.default_rng(0).normal(size=(SUMMED, 384)).astype(np.float32)
    taken = []
    for _ in range(1 + ROUNDS):
        began = time.perf_counter()
        nearest(states, 50)
        taken.append(time.perf_counter() - began)
    return {"seconds_per_pair": float(np.median(taken[1:])) / SUMMED**2}


def fitting() -> Figures:
    """Seconds per text and block whose state, 384 wide, goes into a teacher's statistics."""
    import numpy as np

    from amalgam.stages.common.states.read import States
    from amalgam.stages.fit_statistics.domain_scores import Statistics

    random, every = np.random.default_rng(0), np.arange(SUMMED)
    held = random.normal(size=(SUMMED, 1, 384)).astype(np.float16)
    states = States("", [held], np.zeros_like(every), every, np.ones_like(every))
    logits = random.normal(size=(SUMMED, 4)).astype(np.float32)
    began = time.perf_counter()
    Statistics.of(states, logits, every % 4)
    return {"seconds_per_text": (time.perf_counter() - began) / SUMMED}


def _each(raw: Any, passes: int) -> list[Any]:
    import numpy as np
    import polars as pl

    return [pl.Series(np.ascontiguousarray(part)) for part in np.split(raw, passes, axis=1)]


class PeakMemory:
    """The most memory of this process since the block began; where a system cannot say that, since the process did."""

    megabytes = 0.0

    def __enter__(self) -> Self:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        with suppress(OSError, StopIteration):
            status = Path("/proc/self/status").read_text(encoding="utf-8")
            peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
        self.megabytes = peak / MEGABYTE


if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]


TRIED_SECONDS = 8.0

FEWEST_STEPS = 3
"""Of a trial, however long they take."""


def writing(run: Run, known: ResolvedTeacher) -> Figures:
    """A teacher's and the language model's set-up, and seconds and tokens of a text."""
    from amalgam.stages.generate.sources import TextGenerator

    with PeakMemory() as peak:
        began = time.perf_counter()
        generator = TextGenerator(source_inputs(run))
        writer = generator.writer(known)
        setup = time.perf_counter() - began
        orders = list(islice(_orders(run, generator, known), writer.model.slots.count))
        trial = Trial(len(orders))
        trial.write(writer, orders)
    seconds, tokens = trial.of_a_text(generate_config(run).max_tokens)
    return {"setup_seconds": setup, "seconds_per_text": seconds, "tokens_per_text": tokens, "memory_mb": peak.megabytes}


def _orders(run: Run, generator: TextGenerator, known: ResolvedTeacher) -> Iterator[TextRequest[Any]]:
    """The first texts that will be written for the teacher, each class in its turn."""
    own = [family for family in text_plan(run).families if family.teacher == known.name]
    return (generator.request(family, index, (0, index)) for index in range(BLOCK) for family in own)


class _EnoughError(Exception):
    """The trial's time is up."""


@dataclass
class Trial:
    """What was seen while texts were written, all of them together."""

    texts: int
    marks: list[tuple[int, float]] = field(default_factory=list)
    """At the beginning of each step, and at the end: the tokens chosen so far, and the time."""
    ended: list[int] = field(default_factory=list)
    """The tokens of each text that came to its end."""

    def write(self, writer: Writer[Any], orders: Sequence[TextRequest[Any]]) -> None:
        check = writer.stop

        def mark() -> None:
            check()
            self.marks.append((writer.steps, time.perf_counter()))
            if self.marks[-1][1] - self.marks[0][1] > TRIED_SECONDS and len(self.marks) > FEWEST_STEPS:
                raise _EnoughError

        writer.stop = mark
        with suppress(_EnoughError):
            for _, text in writer.write(orders):
                self.ended.append(text.tokens)
            mark()

    def of_a_text(self, most: int) -> tuple[float, float]:
        """Its seconds and tokens, `most` at most. Texts without an end yet end as often as others did."""
        import numpy as np

        chosen, at = (np.array(one, np.float64) for one in zip(*self.marks, strict=True))
        if len(self.ended) == self.texts:
            return float((at[-1] - at[0]) / self.texts), float(np.mean(self.ended))
        reaching = (1 - len(self.ended) / chosen[-1]) ** np.arange(most)
        return float((reaching * _of_each_token(np.diff(chosen), np.diff(at), most)).sum()), float(reaching.sum())


def _of_each_token(tokens: Array, seconds: Array, most: int) -> Array:
    """A straight line through what the first ones took, which never falls."""
    import numpy as np

    [places] = np.nonzero(tokens)
    each = seconds[places] / tokens[places]
    rise, start = np.polyfit(places, each, 1, w=np.sqrt(tokens[places])) if len(each) > 1 else (0.0, each.mean())
    if rise <= 0:
        return np.full(most, each.mean())
    found: Array = np.maximum(start + rise * np.arange(most), each.min())
    return found
