"""What it costs to write texts, or to guess what stands in their place, before any text is there.

A trial writes as many texts as advance together, for some seconds. Where these do not suffice for whole texts, later
tokens cost what earlier ones foretell: a text grows, and its teacher reads it again for every candidate.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from amalgam.stages.bill.job import BARE_MB, MEGABYTE, Cost, Job
from amalgam.stages.bill.trials import Peak
from amalgam.stages.teachers import KnownTeacher, teachers_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from amalgam.pipeline.stage import Run
    from amalgam.stages.bill.rates import Figures
    from amalgam.stages.generate.writing import Order, Writer

    Array = np.ndarray[Any, np.dtype[Any]]

TRIED_SECONDS = 8.0
FEWEST_STEPS = 3
"""Of a trial, however long they take."""
TOKEN_BYTES = 12
"""Of a written text on the disk, for each token: in its block, and once more where all are gathered."""
WORDS_SECONDS = 1e-4
"""Of a text that no model writes: drawing words, or taking what another corpus has."""
FIRST_STEPS, STEPS = 1, 2
"""Of guessing: two trials, which differ by so many steps."""


def generating(job: Job) -> Cost:
    """As long as the texts took that are there; before any is, what a trial says, teacher by teacher."""
    from amalgam.stages.generate.families import block_units

    paths = [unit.record_path for unit in block_units(job.run)]
    done = list(job.run.store.records(paths, whole=False).values())
    if not done:
        return _first_texts(job)
    texts = sum(int(record.facts["rows"]) for record in done)
    seconds = sum(float(record.made["seconds"]) for record in done)
    disk = sum(file.bytes for record in done for file in record.files)
    share = sum(unit.size for unit in job.state.missing) / texts
    return Cost(share * seconds, BARE_MB, share * disk / MEGABYTE)


def _first_texts(job: Job) -> Cost:
    from amalgam.stages.generate.families import families_of, settings_of

    settings, wanted = settings_of(job.run), dict[str | None, int]()
    for unit in job.state.missing:
        if unit.work is not None:  # gathering them takes no time
            teacher = unit.work.family.teacher
            wanted[teacher] = wanted.get(teacher, 0) + unit.size
    if not settings.writes:
        texts = sum(family.count for family in families_of(job.run))
        return Cost(texts * WORDS_SECONDS, BARE_MB, texts * settings.max_tokens * TOKEN_BYTES / MEGABYTE)
    costs = []
    for known in (known for known in teachers_of(job.run) if known.name in wanted):
        rates, texts = rates_of_writing(job, known), wanted[known.name]
        seconds = rates["setup_seconds"] + texts * rates["seconds_per_text"]
        costs.append(Cost(seconds, rates["memory_mb"], texts * rates["tokens_per_text"] * TOKEN_BYTES / MEGABYTE))
    return Cost(*_added(costs))


def rates_of_writing(job: Job, known: KnownTeacher) -> Figures:
    from amalgam.stages.generate.families import language_model_digest, said_of, settings_of

    about = [language_model_digest(job.run), known.identity, said_of(settings_of(job.run))]
    return job.rates.of(f"writing for {known.name}", about, partial(writing, job.run, known))


def writing(run: Run, known: KnownTeacher) -> Figures:
    """A teacher's and the language model's set-up, and seconds and tokens of a text."""
    from amalgam.stages.generate.families import settings_of
    from amalgam.stages.generate.making import writer_for

    with Peak() as peak:
        began = time.perf_counter()
        writer = writer_for(run, known)
        setup = time.perf_counter() - began
        orders = list(islice(_orders(run, known), writer.model.slots.count))
        trial = Trial(len(orders))
        trial.write(writer, orders)
        run.memory.pop("language model", None)
    seconds, tokens = trial.of_a_text(settings_of(run).max_tokens)
    return {"setup_seconds": setup, "seconds_per_text": seconds, "tokens_per_text": tokens, "memory_mb": peak.megabytes}


def _orders(run: Run, known: KnownTeacher) -> Iterator[Order[Any]]:
    """The first texts that will be written for the teacher, each class in its turn."""
    from amalgam.stages.generate.families import BLOCK, families_of
    from amalgam.stages.generate.making import order_of

    own = [family for family in families_of(run) if family.teacher == known.name]
    return (order_of(run, family, index, (0, index)) for index in range(BLOCK) for family in own)


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

    def write(self, writer: Writer[Any], orders: Sequence[Order[Any]]) -> None:
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


# ---- as-dfd


def guessing(job: Job) -> Cost:
    said, costs = job.run.experiment.embeddings, []
    wanted: dict[str, int] = {}
    for unit in job.state.missing:
        wanted[unit.work[0].name] = wanted.get(unit.work[0].name, 0) + 1
    for known in (known for known in teachers_of(job.run) if known.name in wanted):
        about = [known.identity, said.count, said.tokens]
        rates = job.rates.of(f"guessing for {known.name}", about, partial(_guessing, job.run, known))
        classes = wanted[known.name]
        seconds = rates["setup_seconds"] + classes * said.steps * rates["seconds_per_step"]
        costs.append(Cost(seconds, rates["memory_mb"], classes * rates["mb_per_class"]))
    return Cost(*_added(costs))


def _guessing(run: Run, known: KnownTeacher) -> Figures:
    from amalgam.stages.cache_teachers.asking import loaded_teacher
    from amalgam.stages.guess_embeddings.guessing import guess

    said, taken = run.experiment.embeddings, []
    with Peak() as peak:
        ends = [time.perf_counter()]
        teacher = loaded_teacher(run, known, "fp32", passes=0)
        ends.append(time.perf_counter())
        for steps in (FIRST_STEPS, FIRST_STEPS, FIRST_STEPS + STEPS):  # the first one is slower, and does not count
            embeddings, logits = guess(teacher, 0, said.model_copy(update={"steps": steps}), stop=run.signals.check)
            ends.append(time.perf_counter())
    taken = [after - before for before, after in pairwise(ends)]
    return {
        "setup_seconds": taken[0],
        "seconds_per_step": max(taken[3] - taken[2], 0.0) / STEPS,
        "mb_per_class": 4 * (embeddings.numel() + logits.numel()) / MEGABYTE,
        "memory_mb": peak.megabytes,
    }


def _added(costs: Sequence[Cost]) -> tuple[float, float, float]:
    """One teacher after the other."""
    memory = max((cost.memory_mb for cost in costs), default=BARE_MB)
    return sum(cost.seconds for cost in costs), memory, sum(cost.disk_mb for cost in costs)
