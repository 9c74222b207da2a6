"""What each stage costs: how much of its work is missing, times what a trial of it took on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from amalgam.pipeline.config.schema import Student, TrainTeachers
from amalgam.pipeline.execution.stage import PendingDependencyError
from amalgam.stages.app.cost import trials
from amalgam.stages.app.cost.generation import generating, guessing
from amalgam.stages.app.cost.job import BARE_MB, MEGABYTE, Cost, StageEstimate
from amalgam.stages.app.cost.rates import Figures
from amalgam.stages.common.inference.load import load_teacher
from amalgam.stages.common.load import encoder_digest, encoder_files, teachers_of
from amalgam.stages.common.models.resolve import width_of
from amalgam.stages.common.sources import corpus_for, part_identity, sources_of
from amalgam.stages.common.states.families import ENCODER_STATES, blocks_of, kinds_of_states
from amalgam.stages.common.teachers import ResolvedTeacher
from amalgam.stages.target_methods import target_method
from amalgam.stages.train_teachers.settings import settings_of

if TYPE_CHECKING:
    from amalgam.stages.common.inference.teacher import Teacher


TARGET_BYTES = 60
"""Of a text's target beside its numbers: key, weight, teacher, margin."""

FEATURE_BYTES = 800
"""Of a text's state, as of MiniLM: 384 numbers in fp16, and its key."""

ENCODER = "student.encoder"


# ---- texts


def _reading(job: StageEstimate) -> Cost:
    run = job.run
    missing = [unit.name for unit in job.state.missing] or list(sources_of(run.experiment))
    part = "train" if run.experiment.reads_texts else missing[0]
    rates = job.rates.of(
        "reading texts",
        [job.kind_of_texts, None if job.awaits(part) else part_identity(run, part)],
        lambda: trials.reading(job.sample(part), corpus_for(run.experiment, part)),
    )
    rows = sum(job.survey(part).texts for part in missing)
    return Cost(rows * rates["seconds_per_row"], BARE_MB, rows * rates["mb_per_row"])


# ---- trainings


@dataclass(frozen=True)
class _Lessons:
    """What a training goes through: texts learned from, texts looked at again and again, and how often."""

    learned: float
    looked_at: float
    epochs: int
    batch: int
    every: int

    def seconds(self, rates: Figures) -> float:
        steps = self.epochs * -(-self.learned // self.batch)
        looks = -(-steps // self.every)
        looks *= int(rates.get("phases", 1))
        learning, looking = steps * rates["seconds_per_step"], looks * self.looked_at * rates["seconds_per_read"]
        return rates["setup_seconds"] + learning + looking


def _training_teachers(job: StageEstimate) -> Cost:

    settings, part, groups = settings_of(job.run), job.survey(job.teachers_part), job.groups
    wanted = {unit.name for unit in job.state.missing} or set(groups)
    rates = {name: _training_rates(job, *job.encoder(name)) for name in sorted(wanted)}
    held_out, every = trials.TEACHER_HELD_OUT, trials.TEACHER_EVERY
    seconds = 0.0
    for name, labels in ((name, labels) for name, labels in groups.items() if name in wanted):
        size = part.texts * part.share_of(labels)
        lessons = _Lessons(size * (1 - held_out), size * held_out, settings.epochs, settings.batch_size, every)
        seconds += lessons.seconds(rates[name])
    memory = [one["memory_mb"] for one in rates.values()]  # those that are trained together are there together
    disk = sum(one["model_mb"] for one in rates.values())
    return Cost(seconds, sum(memory) if settings.co_train else max(memory), disk)


def _training_student(job: StageEstimate) -> Cost:
    said, student = job.run.experiment, job.run.experiment.student
    texts = job.survey("train").texts if said.reads_texts else said.pseudo_embeddings.count * sum(_label_counts(job))
    validation = job.survey("validation").texts if student.select != "held-out" else 0
    held_out = 0.0 if validation else student.held_out
    looked_at = validation or texts * (held_out or 1.0)
    lessons = _Lessons(texts * (1 - held_out), looked_at, student.epochs, student.batch_size, student.evaluate_every)
    rates = _training_rates(job, student, ENCODER)
    tokens_mb = 4 * texts * rates["tokens_per_text"] / MEGABYTE
    return Cost(lessons.seconds(rates), rates["memory_mb"] + tokens_mb, rates["model_mb"])


def _training_rates(job: StageEstimate, said: Student | TrainTeachers, where: str, part: str | None = None) -> Figures:
    """`part`: whose texts it is measured on, if not those that are learned from."""
    sizes = said.max_tokens, said.batch_size, getattr(said, "layers", None), getattr(said, "accumulate", 1)
    about = [encoder_digest(job.run, said, where), sizes, job.kind_of_texts]
    about += [part] if part else []
    part = part or ("train" if where == ENCODER else job.teachers_part)
    objective, widths = job.run.experiment.objective, None
    if where == ENCODER and objective.read and job.run.experiment.reads_texts:
        widths = _widths(job) if objective.read_states else []
        about += [objective.model_dump(include=objective.read), widths]

    def measure() -> Figures:
        return trials.training(job.run, said, where, job.sample(part), widths)

    return job.rates.of(f"training {said.encoder}", about, measure)


def _widths(job: StageEstimate) -> list[int]:
    """Of the teachers, or of what they will be made from."""
    if _are_trained(job):
        return [width_of(known.files) for known in teachers_of(job.run)]
    return [width_of(encoder_files(job.run, *job.encoder(name))) for name in job.groups]


def _report(job: StageEstimate) -> Cost:
    part = None if job.run.experiment.reads_texts else "test"
    rates = _training_rates(job, job.run.experiment.student, ENCODER, part)
    readings = 1 + job.run.experiment.student.learns  # the bare encoder, and the student
    seconds = rates["setup_seconds"] + readings * job.survey("test").texts * rates["seconds_per_read"]
    return Cost(seconds, rates["memory_mb"], 0.1)


# ---- teachers


def _asking(job: StageEstimate) -> Cost:
    passes = job.run.experiment.cache.passes
    train, test = job.survey("train").texts, job.survey("test").texts
    rows = _rows_missing(job)
    rates = {name: _asking_rates(job, name) for name in rows} if rows is not None else _stand_ins(job)
    rows = rows if rows is not None else dict.fromkeys(rates, train * (passes + 1) + test)
    seconds = sum(rates[name]["setup_seconds"] + rows[name] * rates[name]["seconds_per_pass"] for name in rows)
    disk = sum(rates[name]["mb_per_text"] * rows[name] / (passes + 1) for name in rows)
    tokens = max((one["token_mb_per_text"] for one in rates.values()), default=0.0) * (train + test)
    return Cost(seconds, max((one["memory_mb"] for one in rates.values()), default=BARE_MB), disk + tokens)


def _rows_missing(job: StageEstimate) -> dict[str, float] | None:
    """Text-passes that each teacher still lacks; None: the teachers are not there yet."""
    if job.state.total is None:
        if not _are_trained(job):
            return None
        whole = job.survey("train").texts * (job.run.experiment.cache.passes + 1) + job.survey("test").texts
        return {known.name: whole for known in teachers_of(job.run)}
    rows: dict[str, float] = {}
    for unit in job.state.missing:
        teacher = getattr(unit.payload, "teacher", None)
        if teacher is not None:
            rows[teacher] = rows.get(teacher, 0) + unit.size
    return rows


def _are_trained(job: StageEstimate) -> bool:
    """False: all teachers are still to be trained. Raises NotKnownYetError where a model must be fetched first."""
    try:
        teachers_of(job.run)
    except PendingDependencyError as unknown:
        if unknown.stage == "train-teachers" and not job.run.experiment.teachers:
            return False
        raise
    return True


def _asking_rates(job: StageEstimate, name: str) -> Figures:
    return _asked(job, name, *_known(job, name, job.run.experiment.cache.passes))


def _known(job: StageEstimate, name: str, passes: int) -> tuple[Any, Callable[[str], Teacher]]:
    """What a teacher is known by, and how it is loaded."""
    known: ResolvedTeacher = next(one for one in teachers_of(job.run) if one.name == name)

    def load(dtype: str) -> Teacher:

        return load_teacher(job.run, known, dtype, passes=passes)

    return known.identity, load


def _stand_ins(job: StageEstimate) -> dict[str, Figures]:
    """Teachers that are not trained yet are measured by what they will be: their encoder under a new head."""
    return {name: _asked(job, *_stand_in(job, name, labels)) for name, labels in job.groups.items()}


def _stand_in(job: StageEstimate, name: str, labels: list[str]) -> tuple[str, Any, Callable[[str], Teacher]]:
    said, where = job.encoder(name)
    content = [encoder_digest(job.run, said, where), said.max_tokens]
    return str(said.encoder), [content, len(labels)], partial(trials.proxy_teacher, job.run, said, where, labels)


def _asked(job: StageEstimate, name: str, about: Any, load: Callable[[str], Teacher]) -> Figures:
    passes, dtype = job.run.experiment.cache.passes, _dtype(job)

    def measure() -> Figures:
        return trials.asking(job.run, load, dtype, job.sample("train"))

    return job.rates.of(f"asking {name}", [about, passes, dtype, job.kind_of_texts], measure)


def _dtype(job: StageEstimate) -> str:
    cache = job.run.experiment.cache
    return job.run.store.pinned("dtype", "auto") or "auto" if cache.dtype == "auto" else cache.dtype


# ---- states, and what is seen from all texts together


def _features(job: StageEstimate) -> Cost:
    """The encoder's states and the teachers', as far as each is asked for and missing."""
    said, rows = job.run.experiment, _states_missing(job)
    costs = [_states(job, name, rows) for name in rows if name != ENCODER_STATES]
    if said.targets.looks_at_encoder:
        rates = _training_rates(job, said.student, ENCODER)
        texts = rows.get(ENCODER_STATES, 0.0)
        seconds = rates["setup_seconds"] + texts * rates["seconds_per_read"]
        costs.append(Cost(seconds, rates["memory_mb"], texts * FEATURE_BYTES / MEGABYTE))
    memory = max((cost.memory_mb for cost in costs), default=BARE_MB)
    return Cost(sum(cost.seconds for cost in costs), memory, sum(cost.disk_mb for cost in costs))


def _states(job: StageEstimate, name: str, rows: Mapping[str, float]) -> Cost:
    """A teacher may be asked for states of several kinds, which lack about as many texts each."""
    if _are_trained(job):
        who, (about, load) = name, _known(job, name, passes=0)
    else:
        who, about, load = _stand_in(job, name, job.groups[name])
    dtype, seconds, memory, disk = _dtype(job), 0.0, 0.0, 0.0
    kinds = kinds_of_states(job.run)
    for grain, blocks in kinds:
        measure = partial(trials.states, job.run, load, dtype, job.sample("train"), grain, blocks)
        rates = job.rates.of(f"states of {who}", [about, grain, blocks, dtype, job.kind_of_texts], measure)
        texts = rows[name] / len(kinds)
        seconds += rates["setup_seconds"] + texts * rates["seconds_per_text"]
        memory, disk = max(memory, rates["memory_mb"]), disk + texts * rates["mb_per_text"]
    return Cost(seconds, memory, disk)


def _states_missing(job: StageEstimate) -> dict[str, float]:
    """Texts by whose states they lack, once for each kind of states."""
    if job.state.total is None:
        texts, kinds = float(job.survey("train").texts), len(kinds_of_states(job.run))
        asked = {ENCODER_STATES: texts} if job.run.experiment.targets.looks_at_encoder else {}
        return {**asked, **(dict.fromkeys(_teacher_names(job), texts * kinds) if kinds else {})}
    rows: dict[str, float] = {}
    for unit in job.state.missing:
        rows[unit.payload.teacher] = rows.get(unit.payload.teacher, 0) + unit.size
    return rows


def _teacher_names(job: StageEstimate) -> list[str]:
    return [known.name for known in teachers_of(job.run)] if _are_trained(job) else list(job.groups)


def _fitting(job: StageEstimate) -> Cost:
    """By the square of a teacher's width, for each block; a part that is held out is a share of the training texts."""
    run, rates = job.run, job.rates.of("fitting statistics", None, trials.fitting)
    held_out = run.experiment.generate.held_out if run.experiment.generate else 0.0
    texts = job.survey("train").texts * (held_out / (1 - held_out) if held_out else 1.0)
    blocks = blocks_of(run) if run.experiment.objective.name == "stratanet" else 1
    squares = blocks * sum(width**2 for width in _widths(job))
    memory = BARE_MB + 8 * 4 * blocks * max(_widths(job)) ** 2 / MEGABYTE
    return Cost(texts * squares / 384**2 * rates["seconds_per_text"], memory, 8 * 2 * squares / MEGABYTE)


def _weighing(job: StageEstimate) -> Cost:
    """Every text is compared with every other."""
    texts, teachers = job.survey("train").texts, len(_label_counts(job))
    from amalgam.stages.weigh_teachers.neighbours import REFERENCES

    said = job.run.experiment.targets
    widths = (
        1 + (1 + teachers) * (said.weight_signal == "all") if said.looks_at_neighbours else 0
    )  # in those of an encoder
    rates = job.rates.of("comparing texts", None, trials.comparing)
    memory = texts * (FEATURE_BYTES * 4 * widths + 8 * teachers) / MEGABYTE
    seconds = texts * min(texts, REFERENCES) * rates["seconds_per_pair"] * widths
    return Cost(seconds, BARE_MB + memory, texts * (16 + 4 * teachers) / MEGABYTE)


# ---- targets


def _targets(job: StageEstimate) -> Cost:
    said = job.run.experiment.targets
    passes = job.run.experiment.cache.passes if said.passes is None else said.passes
    sizes = [] if not target_method(said).reads_teachers else _label_counts(job)
    known = job.state.total is not None
    texts = sum(unit.size for unit in job.state.missing) if known else job.survey("train").texts
    seconds = 0.0
    for labels in sizes:
        rates = job.rates.of("building targets", [labels, passes], partial(trials.summing, labels, passes))
        seconds += texts * rates["seconds_per_text"]
    return Cost(seconds, BARE_MB, texts * (4 * (sum(sizes) + len(sizes)) + TARGET_BYTES) / MEGABYTE)


def _label_counts(job: StageEstimate) -> list[int]:
    try:
        return [len(known.labels) for known in teachers_of(job.run)]
    except PendingDependencyError:
        return [len(labels) for labels in job.groups.values()]


COSTS: Mapping[str, Callable[[StageEstimate], Cost]] = {
    "generate": generating,
    "read-corpus": _reading,
    "train-teachers": _training_teachers,
    "cache-teachers": _asking,
    "cache-features": _features,
    "fit-statistics": _fitting,
    "weigh-teachers": _weighing,
    "build-targets": _targets,
    "make-embeddings": guessing,
    "train-student": _training_student,
    "report": _report,
}
