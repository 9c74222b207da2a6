"""The demo writes an ordinary experiment; that its stages work is shown by every other test, and by `make demo`."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.experiment_file import load_experiment
from amalgam.stages.demo import METHODS_SHOWN, TEXTS, write_demo
from amalgam.stages.methods import METHODS, PRESETS
from amalgam.tests.workshop import amalgam


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "amalgam-demo"
    write_demo(folder)
    return folder


def test_the_demo_is_an_ordinary_experiment_with_texts_and_an_encoder(folder: Path) -> None:
    experiment = load_experiment(folder / "amalgam.yaml", presets=PRESETS).experiment
    assert experiment.train_teachers is not None
    assert isinstance(experiment.train_teachers.groups, dict)
    assert [len(labels) for labels in experiment.train_teachers.groups.values()] == [2, 3, 3]
    assert experiment.cache.passes == 16
    rows = {name: pq.read_table(folder / f"texts/{name}.parquet").num_rows for name in TEXTS}
    assert rows["train"] >= 4000
    assert rows["test"] >= 1000
    assert (folder / "encoder/model.safetensors").exists()


def test_no_text_is_in_two_parts_of_the_demo(folder: Path) -> None:
    parts = [set(pq.read_table(folder / f"texts/{name}.parquet").column("text").to_pylist()) for name in TEXTS]
    assert sum(map(len, parts)) == len(set.union(*parts))


def test_writing_the_demo_again_changes_nothing(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    write_demo(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_the_demo_is_not_written_among_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ExperimentError, match="holds no demo"):
        write_demo(tmp_path)


def test_every_method_shown_is_a_method() -> None:
    assert set(METHODS_SHOWN) <= set(METHODS)


def test_the_demos_plan_starts_with_its_texts(folder: Path) -> None:
    states = amalgam("plan", "--json", folder=folder).json["stages"]
    assert states[0]["stage"] == "read-corpus"
    assert states[0]["units"] == {"done": 0, "total": 3}
