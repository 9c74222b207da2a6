"""STAGES in order: the pipeline on one screen. Importing this loads no library that computes."""

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
    Generate(),  #       optional: texts where there are none
    ReadCorpus(),  #     texts, checked and keyed once
    TrainTeachers(),  #  optional: teachers from labelled texts
    CacheTeachers(),  #  every teacher, every text, K passes: the expensive part, done once
    CacheFeatures(),  #  optional: each text's state in an encoder, for methods that look at neighbours
    FitStatistics(),  #  optional: what is usual among each teacher's own texts, to tell foreign ones
    WeighTeachers(),  #  optional: which teacher is right on which text, seen from all of them
    BuildTargets(),  #   Polars: what the student is to learn, seconds
    MakeEmbeddings(),  # as-dfd alone: what stands in the place of texts
    TrainStudent(),  #   from cached targets alone
    Report(),  #         every teacher, the ensemble and the student on labelled test texts
)


ASKED_FOR_BY: Mapping[str, str] = {
    "generate": "a `generate` section",
    "train-teachers": "a `train_teachers` section",
    "build-targets": "a student.method that trains a student from texts",
    "make-embeddings": "student.method: as-dfd",
    "train-student": "a student.method that trains a student",
}
"""What makes a stage that a person may name a part of the experiment."""
