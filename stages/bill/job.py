"""A stage that is on the bill, what it is about, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amalgam.pipeline.plan import StageState
from amalgam.pipeline.stage import Run
from amalgam.stages.bill.rates import Rates
from amalgam.stages.bill.survey import Survey, sample, survey

if TYPE_CHECKING:
    from amalgam.pipeline.experiment import TrainTeachers
    from amalgam.stages.bill.survey import Texts

MEGABYTE = 1e6
BARE_MB = 400
"""A process with its libraries: what has no trial of its own is taken to need no more."""


@dataclass(frozen=True)
class Cost:
    seconds: float
    memory_mb: float
    disk_mb: float


@dataclass(frozen=True)
class Job:
    """A stage that is not current."""

    run: Run
    rates: Rates
    state: StageState

    def survey(self, part: str) -> Survey:
        return survey(self.run, part, self.rates)

    def sample(self, part: str) -> Texts:
        """Where pseudo embeddings stand in the place of texts, something as long as they are."""
        said = self.run.experiment
        if part == "train" and not said.reads_texts:
            return [(" ".join(["a"] * said.embeddings.tokens),)]
        return sample(self.run, part)

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
        from amalgam.stages.train_teachers.stage import encoders_of

        encoders = encoders_of(self.run)
        return encoders.get(teacher) or encoders[""]

    @property
    def groups(self) -> dict[str, list[str]]:
        """The teachers that are to be trained, and their labels."""
        from amalgam.data.labels import cut_in_groups

        settings = self.run.experiment.train_teachers
        known = sorted(self.survey(self.teachers_part).labels)
        groups = (settings.groups or dict.fromkeys(settings.together or {}, known)) if settings else {}
        if isinstance(groups, dict):
            return groups
        names = cut_in_groups(known, groups)
        return {f"teacher-{number}": own for number, own in enumerate(names, 1)}
