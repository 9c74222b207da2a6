"""Provenance as evidence: of written texts, and of no others, the teacher that each was written for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from amalgam.data.keys import text_key
from amalgam.data.parquet import key_array
from amalgam.pipeline.execution.plan import plan
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.app.runs import open_run
from amalgam.stages.common.corpus import are_written, texts_file
from amalgam.stages.common.load import reference_part, train_part
from amalgam.stages.fit_statistics.stage import generated_for
from amalgam.stages.registry import STAGES
from amalgam.stages.weigh_teachers.load import keys_of, provenance
from amalgam.stages.weigh_teachers.weigh import generated_shares
from amalgam.tests.workspaces import TEACHER_LABELS, Workspace

AMALGAM = "student.method=amalgam"


def _planned(workspace: Workspace, *overrides: str) -> Run:
    run = open_run(workspace.config, list(overrides))
    plan(STAGES, run)
    return run


def test_of_a_written_text_its_own_teacher_has_the_classs_probability_and_others_nothing(generated: Workspace) -> None:
    run = _planned(generated)
    keys = keys_of(run, train_part(run).buckets)
    shares = provenance(run, keys)
    rows = pq.read_table(run.store.verified_path(texts_file(run.result("generate")))).to_pylist()
    expected = np.zeros((train_part(run).texts, len(TEACHER_LABELS)))
    places = {key: place for place, key in enumerate(keys.to_pylist())}
    for row in rows:
        if text_key((row["text"],)) in places:
            at = places[text_key((row["text"],))], list(TEACHER_LABELS).index(row["teacher"])
            expected[at] = max(expected[at], row["class_probability"])
    assert (expected > 0).sum() >= len(expected)
    assert shares == pytest.approx(expected)
    assert generated_shares(shares) == pytest.approx((expected > 0).sum(axis=0) / (expected > 0).sum())


def test_rows_that_a_filter_dropped_count_for_no_teacher(generated: Workspace, tmp_path: Path) -> None:
    workspace = generated.copy(tmp_path / "workspace")
    filters = ("generate.min_words=1", "generate.min_class_probability=0", "generate.held_out=0.5")
    overrides = (AMALGAM, "generate.max_tokens=2", "generate.steering_strength=0", *filters)
    workspace("read-corpus", *overrides)
    run = _planned(workspace, *overrides)
    keys, teachers = keys_of(run, train_part(run).buckets), list(TEACHER_LABELS)
    rows = pq.read_table(run.store.verified_path(texts_file(run.result("generate")))).to_pylist()
    origins = {(text_key((row["text"],)), row["teacher"]) for row in rows}
    assert any({(key, teacher) for teacher in teachers} <= origins for key in keys.to_pylist())
    shares = provenance(run, keys)
    assert shares is not None
    assert ((shares > 0).sum(axis=1) == 1).all()
    keys = keys_of(run, reference_part(run).buckets)
    own = [generated_for(run, teacher, key_array(keys)) for teacher in teachers]
    assert (np.sum(own, axis=0) == 1).all()


def test_texts_that_were_written_for_no_class_have_none(generated: Workspace, built: Workspace) -> None:
    run = _planned(built)
    assert provenance(run, keys_of(run, train_part(run).buckets)) is None
    assert generated_shares(None) is None
    assert not are_written(_planned(generated, "generate.source=random-words").experiment)


def test_weights_of_written_texts_depend_on_what_generate_wrote(generated: Workspace, tmp_path: Path) -> None:
    workspace = generated.copy(tmp_path / "workspace")
    workspace("build-targets", AMALGAM)
    manifest = workspace.manifest("weigh-teachers")
    written = texts_file(_planned(workspace).result("generate")).sha256
    assert manifest["identity"]["inputs"]["written"] == written
