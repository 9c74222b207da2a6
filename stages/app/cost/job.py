"""A stage that is on the bill, what it is about, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from amalgam.data.labels import cut_in_groups
from amalgam.pipeline.config.schema import TrainTeachers
from amalgam.pipeline.execution.plan import StageState
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.app.cost.rates import Figures, MachineRates
from amalgam.stages.app.cost.survey import Survey, Texts, sample, survey
from amalgam.stages.app.cost.trials import writing
from amalgam.stages.common.generated_texts import HELD_OUT, generated_sources
from amalgam.stages.common.load import teachers_of
from amalgam.stages.common.teachers import ResolvedTeacher
from amalgam.stages.generate.requests import fingerprint_config
from amalgam.stages.generate.stage import generate_config, language_model_digest, text_plan
from amalgam.stages.train_teachers.settings import encoders_of

MEGABYTE = 1e6

BARE_MB = 400
"""A process with its libraries: what has no trial of its own is taken to need no more."""


@dataclass(frozen=True)
class Cost:
    seconds: float
    memory_mb: float
    disk_mb: float


@dataclass(frozen=True)
class StageEstimate:
    """A stage that is not current."""

    run: Run
    rates: MachineRates
    state: StageState

    def survey(self, part: str) -> Survey:
        """Of texts that are still to be written, all that are wanted: what gates will leave out is not known."""
        if not self.awaits(part):
            return survey(self.run, part, self.rates)

        held_out = generate_config(self.run).held_out
        share = held_out if part == HELD_OUT else 1 - held_out
        return Survey(share * sum(family.count for family in text_plan(self.run).families), {})

    def sample(self, part: str) -> Texts:
        """Of what is still to be made, something that is as long as it will be."""
        said = self.run.experiment
        if part == "train" and not said.reads_texts:
            return [_as_long_as(said.pseudo_embeddings.tokens)]
        if self.awaits(part):
            found = [rates_of_writing(self, known)["tokens_per_text"] for known in teachers_of(self.run)]
            return [_as_long_as(round(tokens)) for tokens in found]
        return sample(self.run, part)

    def awaits(self, part: str) -> bool:
        """Whether a language model is to write its texts first. Other sources take seconds, and are not guessed at."""
        said = self.run.experiment.generate
        writes = said is not None and said.writes and part in generated_sources(self.run.experiment)
        return writes and "generate" not in self.run.results

    @property
    def kind_of_texts(self) -> Any:
        """Rates are kept for texts like these: appended ones are taken to be of the same kind."""
        said, made = self.run.experiment.corpus, self.run.experiment.generate
        return [said.text, made.source if made else said.train]

    @property
    def teachers_part(self) -> str:
        settings = self.run.experiment.train_teachers
        return "teachers" if settings and settings.texts else "train"

    def encoder(self, teacher: str) -> tuple[TrainTeachers, str]:
        """The settings that name a trained teacher's encoder, and where they do."""
        encoders = encoders_of(self.run)
        return encoders.get(teacher) or encoders[""]

    @property
    def groups(self) -> dict[str, list[str]]:
        """The teachers that are to be trained, and their labels."""
        settings = self.run.experiment.train_teachers
        known = sorted(self.survey(self.teachers_part).labels)
        groups = (settings.groups or dict.fromkeys(settings.co_train or {}, known)) if settings else {}
        if isinstance(groups, dict):
            return groups
        names = cut_in_groups(known, groups)
        return {f"teacher-{number}": own for number, own in enumerate(names, 1)}


def _as_long_as(tokens: int) -> tuple[str, ...]:
    return (" ".join(["a"] * max(1, tokens)),)


def rates_of_writing(job: StageEstimate, known: ResolvedTeacher) -> Figures:

    about = [language_model_digest(job.run), known.identity, fingerprint_config(generate_config(job.run))]
    return job.rates.of(f"writing for {known.name}", about, partial(writing, job.run, known))
