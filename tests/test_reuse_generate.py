"""Stages that rerun when a field of generate changes: the golden table of test_reuse.py continues here."""

from __future__ import annotations

import shutil

import pytest

from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.tests.test_reuse import ALL, NOTHING, REFUSED, biased, check_row, fields_of
from amalgam.tests.workspaces import Workspace, shift_weights

WRITTEN = {"generate", *ALL}
GENERATE_TABLE: dict[str, tuple[list[str], set[str] | str]] = {
    "generate.source": (["generate.source=prompted"], WRITTEN),
    "generate.texts": (["generate.texts=20"], WRITTEN),
    "generate.language_model": (["generate.language_model=./models/lm2"], WRITTEN),
    "generate.revision": (["generate.revision=main"], NOTHING),
    "generate.prompt": (["generate.prompt=the"], WRITTEN),
    "generate.steering_strength": (["generate.steering_strength=2"], WRITTEN),
    "generate.candidates": (["generate.candidates=20"], WRITTEN),
    "generate.temperature": (["generate.temperature=[0.7, 1.3]"], WRITTEN),
    "generate.top_k": (["generate.top_k=5"], WRITTEN),
    "generate.top_p": (["generate.top_p=0.5"], WRITTEN),
    "generate.max_tokens": (["generate.max_tokens=9"], WRITTEN),
    "generate.max_scored": (["generate.max_scored=4"], WRITTEN),
    "generate.seed": (["generate.seed=1"], WRITTEN),
    "generate.corpus": (["generate.corpus=texts/test.csv"], REFUSED),  # of cross-domain alone
    "generate.column": (["generate.column=label"], NOTHING),
    # filters and the held-out part: existing texts are read again
    "generate.held_out": (["generate.held_out=0.2"], ALL),
    "generate.min_class_probability": (["generate.min_class_probability=0.2"], ALL),
    "generate.max_duplicate": (["generate.max_duplicate=0.5"], ALL),
    "generate.max_repetition": (["generate.max_repetition=0.4"], ALL),
    "generate.min_words": (["generate.min_words=4"], ALL),
}


@pytest.fixture(scope="module")
def stocked(generated: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Tests only plan with it, so all rows share it."""
    workspace = generated.copy(tmp_path_factory.mktemp("generated") / "workspace")
    shutil.copytree(workspace.folder / "models/lm", workspace.folder / "models/lm2")
    shift_weights(workspace.folder / "models/lm2", {biased(workspace.folder / "models/lm2"): 0.5})
    return workspace


def test_every_field_of_generate_has_a_row() -> None:
    assert {field for field in fields_of(ExperimentConfig) if field.startswith("generate.")} == set(GENERATE_TABLE)


@pytest.mark.parametrize("field", GENERATE_TABLE)
def test_a_field_of_generate_reruns_the_stages_of_its_row(stocked: Workspace, field: str) -> None:
    check_row(stocked, *GENERATE_TABLE[field])
