"""AS-DFD makes pseudo embeddings by the teachers' gradients, and trains a student that reads no text."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from amalgam.stages.make_embeddings.search import fit_projection
from amalgam.tests.stages.tiny_models import save_tiny
from amalgam.tests.workspaces import TEACHER_LABELS, Workspace, build_once, up_to_date, word_list, write_model

METHOD = "student.method=as-dfd"
SMALL = [
    METHOD,
    "pseudo_embeddings.count=24",
    "pseudo_embeddings.tokens=6",
    "pseudo_embeddings.steps=40",
    "pseudo_embeddings.learning_rate=0.05",
]
QUICK = [*SMALL, "pseudo_embeddings.steps=4"]
"""For tests of other things than the quality of the embeddings."""


@pytest.fixture(scope="module")
def learned(built: Workspace, shared: Path) -> Workspace:
    """Never to be changed; its corpus has a test part and nothing else."""
    return build_once(shared / "as-dfd", lambda folder: up_to_date(bare(built.without_artifacts(folder)), *SMALL))


def bare(workspace: Workspace) -> Workspace:
    workspace.edit("  train: texts/train.csv\n", "")
    workspace.edit("targets:\n  mode: soft\n", "")
    return workspace


def guessed(workspace: Workspace) -> dict[str, bytes]:
    files = (workspace.artifacts / "make-embeddings").rglob("*.safetensors")
    return {str(path.relative_to(workspace.artifacts)): path.read_bytes() for path in files}


def test_without_training_texts_a_student_of_all_labels_is_made(learned: Workspace) -> None:
    result = learned("report", *SMALL)
    assert "student (as-dfd)" in result.out
    assert learned.manifest("train-student")["facts"]["labels"] == [
        label for labels in TEACHER_LABELS.values() for label in labels
    ]
    assert set(learned.plan(*SMALL)) == {"read-corpus", "cache-teachers", "make-embeddings", "train-student", "report"}


def test_teachers_take_most_embeddings_for_the_class_they_were_made_for(learned: Workspace) -> None:
    teachers = learned.manifest("make-embeddings")["facts"]["teachers"]
    assert {name: list(labels) for name, labels in teachers.items()} == TEACHER_LABELS
    for labels in teachers.values():
        assert all(one["rows"] == 24 and one["taken"] > 20 for one in labels.values()), labels


def test_noise_alone_is_not_taken_for_every_class(learned: Workspace, tmp_path: Path) -> None:
    workspace = learned.without_artifacts(tmp_path / "workspace")
    result = workspace("make-embeddings", *SMALL, "pseudo_embeddings.steps=1", "pseudo_embeddings.learning_rate=1e-6")
    rows = [
        one for labels in workspace.manifest("make-embeddings")["facts"]["teachers"].values() for one in labels.values()
    ]
    assert sum(one["taken"] for one in rows) < 0.5 * sum(one["rows"] for one in rows)
    assert "raise pseudo_embeddings.steps" in result.err


def test_the_same_seed_gives_the_same_embeddings_and_another_seed_others(learned: Workspace, tmp_path: Path) -> None:
    workspace = learned.without_artifacts(tmp_path / "workspace")
    workspace("make-embeddings", *QUICK)
    first = guessed(workspace)
    again = learned.without_artifacts(tmp_path / "again")
    again("make-embeddings", *QUICK)
    assert guessed(again) == first
    workspace("make-embeddings", *QUICK, "pseudo_embeddings.seed=1")
    assert len(set(guessed(workspace).values())) == 2 * len(first) > 0


def test_the_student_moves_but_for_its_word_embeddings(learned: Workspace) -> None:
    before = load_file(learned.folder / "models/encoder/model.safetensors")
    after = load_file(learned.folder / "students/student/model.safetensors")
    moved = {name for name, value in before.items() if not after[f"bert.{name}"].equal(value)}
    still = set(before) - moved
    assert "embeddings.word_embeddings.weight" in still
    assert {name for name in still if "encoder.layer" in name and "key.bias" not in name} == set()


@pytest.mark.parametrize("field", ["count=16", "tokens=5", "steps=20", "learning_rate=0.1", "adversarial=0", "seed=3"])
def test_a_field_of_embeddings_makes_them_again_and_no_teacher_is_asked_about_texts(
    learned: Workspace, field: str
) -> None:
    assert learned.stale(*SMALL, f"pseudo_embeddings.{field}") == {"make-embeddings", "train-student", "report"}


def test_the_temperature_of_the_targets_reaches_the_student_alone(learned: Workspace) -> None:
    assert learned.stale(*SMALL, "targets.kd_temperature=2") == {"train-student", "report"}


def test_another_student_finds_the_embeddings_as_they_are(learned: Workspace, tmp_path: Path) -> None:
    workspace = learned.copy(tmp_path / "workspace")
    result = workspace("run", *SMALL, "student.seed=1")
    assert {"make-embeddings: reused", "cache-teachers: reused"} <= set(result.err.splitlines())


def test_teachers_of_another_width_are_led_to_the_students(learned: Workspace, tmp_path: Path) -> None:
    workspace = learned.without_artifacts(tmp_path / "workspace")
    workspace.write([(text, label) for text, label in workspace.texts("test")], "train")
    wide = {"hidden_size": 48, "intermediate_size": 64}
    write_model(
        workspace.folder / "models/second", labels=TEACHER_LABELS["second"], words=word_list(workspace), seed=2, **wide
    )
    assert "student (as-dfd)" in workspace("run", *QUICK).out


def test_a_student_that_shares_no_words_with_a_teacher_is_refused(learned: Workspace, tmp_path: Path) -> None:
    workspace = learned.without_artifacts(tmp_path / "workspace")
    shutil.rmtree(workspace.folder / "models/encoder")
    write_model(workspace.folder / "models/encoder", words=[f"mot{n}" for n in range(60)], seed=9)
    tried = workspace.attempt("run", *QUICK)
    assert tried.code == 2
    assert "tokens in common" in tried.err


def test_a_word_of_an_uncased_student_is_the_lower_case_token_of_a_cased_teacher() -> None:
    words = [f"word{number}" for number in range(40)]
    table = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))

    def pair(tokens: list[str], rows: torch.Tensor) -> tuple[Any, Any]:
        vocabulary = {token: number for number, token in enumerate(tokens)}
        tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary, all_special_tokens=[])
        return SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=rows)), tokenizer

    cased = pair([*words, *map(str.title, words)], torch.cat([table, -table]))
    assert torch.allclose(fit_projection(cased, pair(words, table), "first"), torch.eye(8), atol=1e-4)


@pytest.mark.parametrize(("model", "name"), [("second", "teacher second"), ("encoder", "the student's encoder")])
def test_an_encoder_decoder_reads_no_embeddings(learned: Workspace, tmp_path: Path, model: str, name: str) -> None:
    workspace = learned.without_artifacts(tmp_path / "workspace")
    save_tiny(workspace.folder / "models" / model, "bart", labels=TEACHER_LABELS["second"])
    tried = workspace.attempt("run", *QUICK)
    assert tried.code == 2
    assert f"error: {name} does not read embeddings instead of tokens" in tried.err


@pytest.mark.parametrize(
    ("overrides", "piece"),
    [
        (["targets.mode=soft"], "targets.mode"),
        (["pseudo_embeddings.tokens=40"], "32 tokens, special tokens included\nwhere: pseudo_embeddings.tokens: 40"),
    ],
)
def test_contradicting_fields_are_refused(learned: Workspace, tmp_path: Path, overrides: list[str], piece: str) -> None:
    tried = learned.without_artifacts(tmp_path / "workspace").attempt("run", *SMALL, *overrides)
    assert (tried.code, piece in tried.err) == (2, True), tried.err


def test_an_experiment_that_generates_texts_writes_none_for_it(generated: Workspace, tmp_path: Path) -> None:
    workspace = generated.without_artifacts(tmp_path / "workspace")
    workspace.edit("targets:\n  mode: soft\n", "")
    assert "generate" not in workspace.plan(*QUICK)
    assert "student (as-dfd)" in workspace("run", *QUICK).out


def test_neither_training_nor_test_texts_are_needed(
    learned: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amalgam.stages.cache_teachers.stage.dtype_for", lambda _device: "bf16")
    workspace = learned.without_artifacts(tmp_path / "other")
    result = workspace("run", *QUICK, "corpus.train=null", "corpus.test=null", "cache.dtype=auto")
    assert "cache.dtype auto is fp32 (there are no texts to compare it on)" in result.err
    assert (workspace.folder / "students/student/model.safetensors").exists()
