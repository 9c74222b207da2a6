"""STAGES in order: the pipeline on one screen. The import loads no heavy library."""

from __future__ import annotations

from collections.abc import Mapping

from amalgam.pipeline.execution.stage import Stage
from amalgam.stages.build_targets.stage import BuildTargets
from amalgam.stages.cache_features.stage import CacheFeatures
from amalgam.stages.cache_teachers.stage import CacheTeachers
from amalgam.stages.fit_statistics.stage import FitStatistics
from amalgam.stages.generate.stage import Generate
from amalgam.stages.make_embeddings.stage import MakeEmbeddings
from amalgam.stages.read_corpus.stage import ReadCorpus
from amalgam.stages.report.stage import Report
from amalgam.stages.train_student.stage import TrainStudent
from amalgam.stages.train_teachers.stage import TrainTeachers
from amalgam.stages.weigh_teachers.stage import WeighTeachers

STAGES: tuple[Stage, ...] = (
    Generate(),  #       optional: generated texts
    ReadCorpus(),  #     texts, checked and keyed
    TrainTeachers(),  #  optional: teachers from labelled texts
    CacheTeachers(),  #  every teacher on every text, K passes: the expensive part
    CacheFeatures(),  #  optional: hidden states of the texts
    FitStatistics(),  #  optional: statistics of each teacher's own texts
    WeighTeachers(),  #  optional: teacher weights from all texts together
    BuildTargets(),  #   targets and weights of the training texts
    MakeEmbeddings(),  # as-dfd only: embeddings instead of texts
    TrainStudent(),  #   the student, from cached targets
    Report(),  #         evaluation of the teachers, the ensemble and the student
)

STAGE_NAMED: Mapping[str, Stage] = {stage.name: stage for stage in STAGES}
