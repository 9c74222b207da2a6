"""`amalgam init`, alone and with teachers: the written file is valid and lists the labels of the models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from amalgam.pipeline.config.load import load_experiment, template
from amalgam.stages.common.models import hub as model_hub
from amalgam.tests.stages.fake_hub import FakeHub, small_model
from amalgam.tests.workspaces import TEACHER_LABELS, CommandResult, Workspace, amalgam, edit_json


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_model(tmp_path / "models/desk", labels=("law", "sport"))
    small_model(tmp_path / "models/study", labels=("law", "Sport", "no"))
    return tmp_path


def init(folder: Path, *arguments: str) -> CommandResult:
    return amalgam("init", *arguments, folder=folder)


def teachers_in(path: Path) -> list[dict[str, object]]:
    return yaml.safe_load(path.read_text())["teachers"]


def test_the_file_names_each_model_and_comments_its_labels(folder: Path) -> None:
    result = init(folder, "--from-teachers", "models/desk/../desk", "./models/study")
    assert (result.code, result.err) == (0, "")
    assert "2 teachers, 4 labels" in result.out
    assert "note: labels with nearly the same name count as different: sport and Sport" in result.out
    text = (folder / "amalgam.yaml").read_text()
    assert teachers_in(folder / "amalgam.yaml") == [
        {"name": "desk", "model": "./models/desk"},
        {"name": "study", "model": "./models/study"},
    ]
    assert "    # 3 labels: law, Sport, no\n    # shared with other teachers: law\n" in text
    assert "    # rename: {Sport: sport}" in text
    assert "encoder: sentence-transformers/all-MiniLM-L6-v2  # English, of the Hub; or a folder" in text


def test_paths_start_from_the_folder_behind_a_link(folder: Path) -> None:
    (folder / "deep/here").mkdir(parents=True)
    (folder / "link").symlink_to("deep/here")
    assert init(folder, "--from-teachers", "models/desk", "models/study", "--into", "link").code == 0
    places = [folder / "link" / str(teacher["model"]) for teacher in teachers_in(folder / "link/amalgam.yaml")]
    assert [place.is_dir() for place in places] == [True, True]


def test_a_quoted_home_folder_is_that_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for words in (["~/first"], ["--into", "~/second"]):
        assert f"wrote {tmp_path}/home/" in amalgam("init", *words, folder=tmp_path).out
    refused = amalgam("demo", "~/../home", folder=tmp_path)
    assert f"{tmp_path}/home/../home is not empty and is no demo" in refused.err
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_second_folder_is_refused(tmp_path: Path) -> None:
    refused = init(tmp_path, "here", "--into", "there")
    assert (refused.code, "--into is a second one" in refused.err) == (2, True), refused.err
    assert list(tmp_path.iterdir()) == []


def test_labels_that_a_list_would_tear_apart_are_quoted(tmp_path: Path) -> None:
    small_model(tmp_path / "mail", labels=("returns, swaps", " lost "))
    init(tmp_path, "--from-teachers", "mail")
    assert '# 2 labels: "returns, swaps", " lost "\n' in (tmp_path / "amalgam.yaml").read_text()


def test_the_file_of_real_teachers_is_a_valid_experiment(fresh: Workspace) -> None:
    fresh.config.unlink()
    fresh("init", "--from-teachers", "./models/first", "./models/second")
    text = fresh.config.read_text()
    assert f"# 4 labels: {', '.join(TEACHER_LABELS['first'])}" in text
    assert fresh.plan("student.encoder=./models/encoder")["read-corpus"]["state"] == "missing"


def test_a_folder_is_taken_as_a_shell_completes_it_and_named_so_that_it_cannot_be_a_hub_id(folder: Path) -> None:
    result = init(folder, "--from-teachers", "models/desk/", "models/study")
    assert result.code == 0, result.err
    assert [teacher["model"] for teacher in teachers_in(folder / "amalgam.yaml")] == ["./models/desk", "./models/study"]


def test_paths_start_from_where_the_file_is_written_and_names_differ(folder: Path) -> None:
    small_model(folder / "other/desk", labels=("a", "b"))
    init(folder, "--from-teachers", "./models/desk", str(folder / "other/desk"), "--into", "work/here")
    assert teachers_in(folder / "work/here/amalgam.yaml") == [
        {"name": "desk", "model": "../../models/desk"},
        {"name": "desk-2", "model": str(folder / "other/desk")},
    ]


def test_of_a_hub_model_the_configuration_alone_is_fetched(folder: Path, hub: FakeHub) -> None:
    commit = hub.push("org/mood", small_model(folder / "hub", labels=("glad", "sad")))
    result = init(folder, "--from-teachers", "org/mood")
    assert result.code == 0, result.err
    assert set(hub.downloads()) == {"config.json"}
    text = (folder / "amalgam.yaml").read_text()
    assert teachers_in(folder / "amalgam.yaml") == [{"name": "mood", "model": "org/mood"}]
    assert f"# revision: {commit}" in text


def test_a_hub_model_that_cannot_be_reached_is_in_the_file_with_a_comment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_hub, "ask", lambda *_, **__: None)
    result = init(folder, "--from-teachers", "./models/desk", "org/mood")
    assert result.code == 0, result.err
    assert "2 teachers, 2 labels" in result.out
    assert "note: the Hub cannot be reached, so the labels of mood are not in the file" in result.out
    text = (folder / "amalgam.yaml").read_text()
    assert "    model: org/mood\n    # its labels were not read" in text
    assert teachers_in(folder / "amalgam.yaml")[1] == {"name": "mood", "model": "org/mood"}
    refused = init(folder, "--from-teachers", "models/dask", "--into", "other")
    assert (refused.code, "did you mean ./models/desk?" in refused.err) == (2, True), refused.err
    assert not (folder / "other").exists()


@pytest.mark.parametrize(
    ("names", "piece"),
    [
        (["./models/dask"], "desk"),
        (["./models/bare", "./models/none", "./models/desk"], "2 models"),
        (["./models/bare"], "./models/bare"),
        (["models/empty"], "no config.json"),
        (["models/empty"], "fix: name the folder that save_pretrained wrote"),
        (["./models"], "fix: name one of the models in it: desk, study, bare (no classifier)"),
        ([], "teacher"),
    ],
)
def test_a_model_that_cannot_be_a_teacher_is_refused_with_a_fix_and_nothing_is_written(
    folder: Path, names: list[str], piece: str
) -> None:
    small_model(folder / "models/bare", architectures=["BertModel"])
    (folder / "models/empty").mkdir()
    refused = init(folder, "--from-teachers", *names)
    assert (refused.code, piece in refused.err) == (2, True), refused.err
    assert not (folder / "amalgam.yaml").exists()


TASK = "BertForTokenClassification, which labels no whole text"


@pytest.mark.parametrize(
    ("model", "piece"),
    [
        ("./models/first", TASK),
        ("./models/encoder", "write the predictions of SetFit into a file"),
        ("./models/first/model.safetensors", "fix: name its folder: ./models/first\n"),
        ("./classifier.joblib", "fix: write its predictions into a file that ends in one of .csv"),
    ],
)
def test_other_models_and_their_files_are_refused_by_init_and_plan(fresh: Workspace, model: str, piece: str) -> None:
    edit_json(fresh.folder / "models/first/config.json", architectures=["BertForTokenClassification"])
    (fresh.folder / "models/encoder/model_head.pkl").touch()
    (fresh.folder / "classifier.joblib").touch()
    for command in (("plan", f"teachers.0.model={model}"), ("init", "--into", "new", "--from-teachers", model)):
        assert piece in fresh.refusal(2, *command)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize(
    ("content", "piece"),
    [
        (POINTER.encode(), "fix: run `git lfs pull` in this folder"),
        (b"\xff" * 7 + b"\x0f", "model.safetensors is damaged"),
        (b"", "model.safetensors is damaged"),
        (1000, "model.safetensors is damaged"),
    ],
)
def test_damaged_weights_are_refused_as_by_plan(fresh: Workspace, content: bytes | int, piece: str) -> None:
    weights = fresh.folder / "models/first/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:content] if isinstance(content, int) else content)
    assert piece in fresh.refusal(2, "plan")
    fresh.config.unlink()
    assert piece in fresh.refusal(2, "init", "--from-teachers", "./models/first", "./models/second")
    assert not fresh.config.exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.txt", "config.json"])
def test_every_file_of_a_model_that_git_lfs_has_not_fetched_is_refused(fresh: Workspace, name: str) -> None:
    (fresh.folder / "models/first" / name).write_text(POINTER)
    for arguments in (("plan",), ("init", "--from-teachers", "./models/first", "./models/second")):
        refused = fresh.attempt(*arguments)
        assert (refused.code, f"{name} is a pointer of git-lfs" in refused.err) == (2, True), refused.err
        assert refused.err.endswith("fix: run `git lfs pull` in this folder\n")
        fresh.config.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("labels", "missing", "piece"),
    [
        (("a", "b"), "tokenizer.json", "the model has no tokenizer"),
        (("a", "b"), "model.safetensors", "the model has no weights"),
        (("LABEL_0",), "", "give it two outputs"),
    ],
)
def test_a_folder_that_plan_refuses_is_no_teacher(
    folder: Path, labels: tuple[str, ...], missing: str, piece: str
) -> None:
    small_model(folder / "models/poor", labels=labels)
    if missing:
        (folder / "models/poor" / missing).unlink()
    refused = init(folder, "--from-teachers", "models/desk", "models/poor")
    assert (refused.code, piece in refused.err) == (2, True), refused.err
    assert not (folder / "amalgam.yaml").exists()


@pytest.mark.parametrize(
    ("kind", "piece"), [(None, "has no model_type"), ("nosuch", "no classifier of the kind nosuch")]
)
def test_a_model_of_an_unknown_kind_is_no_teacher(folder: Path, kind: str | None, piece: str) -> None:
    small_model(folder / "models/poor", model_type=kind)
    refused = init(folder, "--from-teachers", "models/desk", "models/poor")
    assert (refused.code, piece in refused.err) == (2, True), refused.err


def test_a_model_without_the_option_gets_no_file(folder: Path) -> None:
    before = sorted((folder / "models/desk").iterdir())
    refused = init(folder, "models/desk")
    assert (refused.code, "fix: amalgam init --from-teachers models/desk" in refused.err) == (2, True), refused.err
    assert sorted((folder / "models/desk").iterdir()) == before


def test_a_schema_of_the_user_is_kept(folder: Path) -> None:
    schema = folder / "amalgam.schema.json"
    for content in ('{"title": "my own"}', "no JSON"):
        schema.write_text(content)
        refused = init(folder, "--from-teachers", "models/desk")
        assert (refused.code, "amalgam did not write it" in refused.err) == (2, True), refused.err
        assert (schema.read_text(), (folder / "amalgam.yaml").exists()) == (content, False)
    schema.unlink()
    assert init(folder).code == 0
    (folder / "amalgam.yaml").unlink()
    assert init(folder, "--from-teachers", "models/desk").code == 0  # amalgam's own schema is replaced


def test_an_existing_file_is_kept_and_the_fix_writes_another(folder: Path) -> None:
    init(folder)
    for words in ([], ["--from-teachers", "models/desk"]):
        refused = init(folder, *words)
        assert (refused.code, "another folder: amalgam init --into FOLDER\n" in refused.err) == (2, True), refused.err
    assert init(folder, "--into", "other").code == 0


def test_outputs_without_names_are_left_to_be_named(folder: Path) -> None:
    small_model(folder / "models/unnamed", labels=("LABEL_0", "LABEL_1", "LABEL_2"))
    result = init(folder, "--from-teachers", "./models/desk", "./models/unnamed")
    assert "name your texts and the labels of unnamed in it" in result.out
    assert '    labels: ["?", "?", "?"]  # name the 3 outputs' in (folder / "amalgam.yaml").read_text()
    assert teachers_in(folder / "amalgam.yaml")[1]["labels"] == ["?", "?", "?"]


def test_only_outputs_without_a_name_are_left_to_be_named(folder: Path) -> None:
    small_model(folder / "models/mixed", labels=("café ☕", "2"))
    init(folder, "--from-teachers", "./models/desk", "./models/mixed")
    assert teachers_in(folder / "amalgam.yaml")[1]["labels"] == ["café ☕", "?"]
    refused = amalgam("plan", "corpus.train=texts.csv", folder=folder)
    assert """for output 1 ('2')""" in refused.err


def test_numbers_are_left_to_be_named(folder: Path) -> None:
    small_model(folder / "models/numbers", labels=("0", "1"))
    result = init(folder, "--from-teachers", "./models/desk", "./models/numbers")
    assert "name your texts and the labels of numbers in it" in result.out
    assert teachers_in(folder / "amalgam.yaml")[1]["labels"] == ["?", "?"]


def test_init_alone_is_as_it_was_and_writes_over_nothing(folder: Path) -> None:
    assert init(folder, "new").out.startswith("wrote new/amalgam.yaml")
    assert [teacher["name"] for teacher in teachers_in(folder / "new/amalgam.yaml")] == ["first", "second"]
    assert "amalgam.yaml" in init(folder, "new").err
    assert "--from-teachers" in init(folder, "one", "two").err
    assert "fix: amalgam init other" in init(folder, "other/mine.yaml").err
    assert not (folder / "other").exists()


def test_a_hostile_label_stays_in_its_comment(folder: Path) -> None:
    small_model(folder / "models/evil", labels=("a\nteachers: []", "b"))
    init(folder, "--from-teachers", "./models/evil")
    assert teachers_in(folder / "amalgam.yaml") == [{"name": "evil", "model": "./models/evil"}]
    assert json.loads((folder / "models/evil/config.json").read_text())["id2label"]["0"].startswith("a\n")


def test_the_commented_section_for_labelled_texts_is_read_once_it_replaces_the_teachers(tmp_path: Path) -> None:
    path, sections = tmp_path / "amalgam.yaml", template().split("\n\n")
    train_teachers = next(section for section in sections if section.startswith("# train_teachers:"))
    kept = [section for section in sections if not section.startswith(("teachers:", "# train_teachers:"))]
    section = "\n".join(line.removeprefix("# ").removeprefix("#") for line in train_teachers.splitlines())
    path.write_text("\n\n".join([*kept, section]).replace("# label: label", "label: label"), "utf-8")
    trained = load_experiment(path, presets={"amalgam": {}}).experiment.train_teachers
    assert trained is not None
    assert (trained.encoder, trained.groups, trained.texts) == ("./models/encoder", 2, ["texts/labelled.csv"])
