"""The demo writes an ordinary experiment; that its stages work is shown by every other test, and by `make demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.storage.local import temporary_path
from amalgam.stages.app import demo, demo_models
from amalgam.stages.app.demo import METHODS_SHOWN, ROWS, TEXTS, write_data_free, write_demo, write_texts
from amalgam.stages.methods import METHODS, load_with_methods
from amalgam.tests.workspaces import amalgam


def with_texts(patch: pytest.MonkeyPatch, count: int) -> None:
    """Give each part of the demo this number of texts."""
    for name, (_, seed, part) in TEXTS.items():
        patch.setitem(TEXTS, name, (count, seed, part))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "amalgam-demo"
    write_demo(folder)
    return folder


def test_the_demo_is_an_ordinary_experiment_with_texts_and_an_encoder(folder: Path) -> None:
    experiment = load_with_methods(folder / "amalgam.yaml").experiment
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


def test_the_files_of_the_demo_name_the_schema_and_those_of_older_versions_are_known(folder: Path) -> None:
    file = folder / "amalgam.yaml"
    text = file.read_text("utf-8")
    first, _, rest = text.partition("\n")
    assert (folder / first.rpartition("$schema=")[2]).is_file()
    file.write_text(rest, "utf-8")
    write_demo(folder)
    assert file.read_text("utf-8") == rest
    file.write_text(text, "utf-8")


def test_the_demo_is_not_written_among_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ExperimentError, match="demo"):
        write_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_demo_is_not_written_into_an_experiment_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "amalgam.yaml").write_text("corpus: {train: texts/train.csv}\n")
    with pytest.raises(ExperimentError, match="demo"):
        write_demo(tmp_path)


@pytest.mark.parametrize(
    ("words", "folder", "overrides"),
    [
        ([], "amalgam-demo", []),
        (["student.encoder=./models/x"], "amalgam-demo", ["student.encoder=./models/x"]),
        (
            ["corpus.train=http://x/y", "student.epochs=2"],
            "amalgam-demo",
            ["corpus.train=http://x/y", "student.epochs=2"],
        ),
        (["./a=b", "student.epochs=2"], "a=b", ["student.epochs=2"]),
        (["some/folder"], "some/folder", []),
    ],
)
def test_an_override_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], folder: str, overrides: list[str]
) -> None:
    runs: list[tuple[Path, list[str]]] = []
    monkeypatch.setattr("amalgam.stages.app.demo.run_demo", lambda *arguments, **_: runs.append(arguments))
    amalgam("demo", *words, folder=tmp_path)
    assert runs == [(Path(folder), overrides)]


@pytest.mark.parametrize("option", [[], ["--data-free"]])
def test_a_misspelt_field_is_refused_before_the_demo_is_written(tmp_path: Path, option: list[str]) -> None:
    result = amalgam("demo", *option, "student.epoch=2", folder=tmp_path)
    assert (result.code, result.out) == (2, "")
    assert "student.epoch: unknown key; did you mean 'epochs'?" in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("override", ["student.method=ensemble", "student.name=mine"])
def test_the_demo_names_the_report_of_its_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    with_texts(monkeypatch, 100)
    monkeypatch.setattr(demo, "METHODS_SHOWN", ("vanilla-kd",))
    quick = ["train_teachers.epochs=1", "student.epochs=1", "cache.passes=0"]
    result = amalgam("demo", "--quiet", override, *quick, folder=tmp_path)
    assert result.code == 0, result.err
    assert (tmp_path / result.out.split()[-1]).is_file()


def test_a_demo_stopped_while_it_was_written_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_texts(monkeypatch, 40)
    write_texts(tmp_path)
    temporary_path(tmp_path).touch()
    write_demo(tmp_path)
    assert (tmp_path / "amalgam.yaml").exists()


@pytest.mark.parametrize(("module", "function"), [(pq, "write_table"), (demo_models, "save_file")])
def test_a_file_of_the_demo_is_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, function: str
) -> None:
    def stop(_content: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        with_texts(patch, 20)
        patch.setattr(module, function, stop)
        with pytest.raises(KeyboardInterrupt):
            write_demo(tmp_path)
        assert [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"half"] == []


def test_every_method_shown_is_a_method() -> None:
    assert set(METHODS_SHOWN) <= set(METHODS)


def test_the_demos_plan_starts_with_its_texts(folder: Path) -> None:
    states = amalgam("plan", "--json", folder=folder).json["stages"]
    assert states[0]["stage"] == "read-corpus"
    assert states[0]["units"] == {"done": 0, "total": 3}


# ---- its data-free twin


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twin") / "amalgam-demo-data-free"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_models, "STEPS", 2)
        patch.setattr(demo, "GENERAL_TEXTS", 1000)
        with_texts(patch, 600)
        write_data_free(folder, Console(quiet=True))
    return folder


def test_the_twins_students_see_no_text_that_the_teachers_or_the_test_know(twin: Path) -> None:
    experiment = load_with_methods(twin / "amalgam.yaml").experiment
    assert experiment.corpus.train is None
    assert experiment.generate is not None
    assert experiment.generate.source == "steered"
    general = pq.read_table(twin / "texts/general.parquet")
    assert general.column_names == ["text"]
    written = set(general.column("text").to_pylist())
    for name in TEXTS:
        assert written.isdisjoint(pq.read_table(twin / f"texts/{name}.parquet").column("text").to_pylist())


def test_the_twins_ceiling_and_its_students_begin_and_are_measured_alike(twin: Path) -> None:
    ours = load_with_methods(twin / "amalgam.yaml").experiment
    ceiling = load_with_methods(twin / "with-texts.yaml").experiment
    assert ours.corpus.test == ceiling.corpus.test
    assert ours.teacher_names == ceiling.teacher_names
    assert ours.student.encoder == ceiling.student.encoder
    assert ours.cache == ceiling.cache


def test_writing_the_twin_again_changes_nothing(twin: Path) -> None:
    before = {path: path.read_bytes() for path in twin.rglob("*") if path.is_file()}
    write_data_free(twin, Console(quiet=True))
    assert {path: path.read_bytes() for path in twin.rglob("*") if path.is_file()} == before


def test_every_row_of_the_data_free_demo_is_a_valid_experiment(twin: Path) -> None:
    for method, source in ROWS:
        overrides = [f"student.method={method}", *([f"generate.source={source}"] if source else [])]
        overrides += ["generate.corpus=texts/general.parquet"] if source == "cross-domain" else []
        assert load_with_methods(twin / "amalgam.yaml", overrides).experiment.student.method == method
