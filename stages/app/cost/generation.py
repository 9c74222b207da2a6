"""What it costs to write texts, or to guess what stands in their place, before any text is there.

A trial writes as many texts as advance together, for some seconds. Where these do not suffice for whole texts, later
tokens cost what earlier ones foretell: a text grows, and its teacher reads it again for every candidate.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from amalgam.pipeline.execution.stage import Run
from amalgam.stages.app.cost.job import BARE_MB, MEGABYTE, Cost, StageEstimate, rates_of_writing
from amalgam.stages.app.cost.rates import Figures
from amalgam.stages.app.cost.trials import PeakMemory
from amalgam.stages.common.inference.load import load_teacher
from amalgam.stages.common.load import teachers_of
from amalgam.stages.common.teachers import ResolvedTeacher
from amalgam.stages.generate.stage import generate_config, text_plan

TOKEN_BYTES = 12
"""Of a written text on the disk, for each token: in its block, and once more where all are gathered."""

WORDS_SECONDS = 1e-4
"""Of a text that no model writes: drawing words, or taking what another corpus has."""

FIRST_STEPS, STEPS = 1, 2
"""Of guessing: two trials, which differ by so many steps."""


def generating(job: StageEstimate) -> Cost:
    """As long as the texts took that are there; before any is, what a trial says, teacher by teacher."""
    paths = [unit.record_path for unit in text_plan(job.run).units(job.run.store)]
    done = list(job.run.store.records(paths, whole=False).values())
    if not done:
        return _first_texts(job)
    texts = sum(int(record.facts["rows"]) for record in done)
    seconds = sum(float(record.made["seconds"]) for record in done)
    disk = sum(file.bytes for record in done for file in record.files)
    share = sum(unit.size for unit in job.state.missing) / texts
    return Cost(share * seconds, BARE_MB, share * disk / MEGABYTE)


def _first_texts(job: StageEstimate) -> Cost:

    settings, wanted = generate_config(job.run), dict[str | None, int]()
    for unit in job.state.missing:
        if unit.payload is not None:  # gathering them takes no time
            teacher = unit.payload.family.teacher
            wanted[teacher] = wanted.get(teacher, 0) + unit.size
    if not settings.writes:
        texts = sum(family.count for family in text_plan(job.run).families)
        return Cost(texts * WORDS_SECONDS, BARE_MB, texts * settings.max_tokens * TOKEN_BYTES / MEGABYTE)
    costs = []
    for known in (known for known in teachers_of(job.run) if known.name in wanted):
        rates, texts = rates_of_writing(job, known), wanted[known.name]
        seconds = rates["setup_seconds"] + texts * rates["seconds_per_text"]
        costs.append(Cost(seconds, rates["memory_mb"], texts * rates["tokens_per_text"] * TOKEN_BYTES / MEGABYTE))
    return Cost(*_added(costs))


# ---- as-dfd


def guessing(job: StageEstimate) -> Cost:
    said, costs = job.run.experiment.pseudo_embeddings, []
    wanted: dict[str, int] = {}
    for unit in job.state.missing:
        wanted[unit.payload[0].name] = wanted.get(unit.payload[0].name, 0) + 1
    for known in (known for known in teachers_of(job.run) if known.name in wanted):
        about = [known.identity, said.count, said.tokens]
        rates = job.rates.of(f"guessing for {known.name}", about, partial(_guessing, job.run, known))
        classes = wanted[known.name]
        seconds = rates["setup_seconds"] + classes * said.steps * rates["seconds_per_step"]
        costs.append(Cost(seconds, rates["memory_mb"], classes * rates["mb_per_class"]))
    return Cost(*_added(costs))


def _guessing(run: Run, known: ResolvedTeacher) -> Figures:
    from amalgam.stages.make_embeddings.search import guess

    said, taken = run.experiment.pseudo_embeddings, []
    with PeakMemory() as peak:
        ends = [time.perf_counter()]
        teacher = load_teacher(run, known, "fp32", passes=0)
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
