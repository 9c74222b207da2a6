"""AS-DFD makes pseudo embeddings by the teachers' gradients, and trains a student that reads no text."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from amalgam.pipeline.config.schema import PseudoEmbeddings
from amalgam.stages.common.models.resolve import NewClassifier
from amalgam.stages.make_embeddings import search
from amalgam.stages.make_embeddings.search import SpecialTokens, fit_projection, search_embeddings
from amalgam.stages.train_student.training import projected_embeddings
from amalgam.tests.stages.tiny_models import save_tiny, tiny
from amalgam.tests.stages.writers import teacher_of
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
    assert "tokens in common" in workspace.refusal(2, "run", *QUICK)


def pair(tokens: list[str], rows: torch.Tensor) -> tuple[Any, Any]:
    """A model and a tokenizer, for their word embeddings."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary, all_special_tokens=[])
    return SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=rows)), tokenizer


def test_a_word_of_an_uncased_student_is_the_lower_case_token_of_a_cased_teacher() -> None:
    words = [f"word{number}" for number in range(40)]
    table = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    cased = pair([*words, *map(str.title, words)], torch.cat([table, -table]))
    assert torch.allclose(fit_projection(cased, pair(words, table), "first"), torch.eye(8), atol=1e-4)


def test_a_projection_is_the_least_squares_fit_with_a_small_penalty() -> None:
    """The penalty is a thousandth of the mean square, towards 0 where widths differ and else towards the identity."""
    random, words = torch.Generator().manual_seed(0), [f"word{number}" for number in range(40)]
    rows = 30 * torch.randn(40, 8, generator=random, dtype=torch.float64)
    penalty = 1e-3 * (rows**2).sum() / 8
    for width in (5, 8):
        mapped = torch.randn(40, width, generator=random, dtype=torch.float64)
        fitted = fit_projection(pair(words, rows), pair(words, mapped), "first")
        prior = torch.eye(8, dtype=torch.float64) if width == 8 else torch.zeros(8, width, dtype=torch.float64)
        gradient = rows.T @ (rows @ fitted.double() - mapped) + penalty * (fitted.double() - prior)
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-2, rtol=0)


class Obvious(torch.nn.Module):
    """An adversary whose distance is the sum of the embeddings."""

    def __init__(self, *_: int) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, embeddings: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return embeddings.sum(dim=(1, 2)) + 0 * self.unused


def test_embeddings_go_along_the_gradient_of_the_class_and_of_the_adversarys_distance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A first step of Adam is the learning rate, against the sign of the gradient of CE - adversarial * distance."""
    monkeypatch.setattr(search, "Adversary", Obvious)
    teacher, rate = teacher_of(), 1e-3
    table = teacher.model.get_input_embeddings().weight.detach()

    def made(adversarial: float, learning_rate: float = rate) -> torch.Tensor:
        settings = PseudoEmbeddings(
            count=60, tokens=4, steps=1, learning_rate=learning_rate, adversarial=adversarial, seed=3
        )
        return search_embeddings(teacher, 1, settings, stop=lambda: None)[0]

    start = made(0, 1e-12)
    scaled = ((start - table.mean(0)) / table.std(0)).flatten(0, 1)
    assert scaled.mean(0).abs().max() < 0.3
    assert (scaled.std(0) - 1).abs().max() < 0.3
    embeddings = start.clone().requires_grad_()
    logits = teacher.model(inputs_embeds=SpecialTokens(teacher.model, teacher.tokenizer)(embeddings)).logits
    [gradient] = torch.autograd.grad(-torch.log_softmax(logits, dim=1)[:, 1].sum(), embeddings)
    for adversarial in (0.0, float(gradient.abs().median())):
        total = gradient - adversarial
        moved = made(adversarial) - start
        clear = total.abs() > 1e-3 * gradient.abs().max()
        torch.testing.assert_close(moved[clear], -rate * total.sign()[clear], atol=1e-5, rtol=0)
        assert clear.float().mean() > 0.5


def test_the_student_learns_the_padded_tempered_prediction_of_each_embeddings_teacher(tmp_path: Path) -> None:
    model, tokenizer = tiny("bert", labels=("a", "b", "c"), vocab_size=95)
    new = NewClassifier(model, tokenizer, "", 16, types=False, pad_id=0)
    embeddings, logits = torch.randn(2, 3, 32), torch.tensor([[1.0, 3.0], [0.0, -2.0]])
    save_file({"embeddings": embeddings, "logits": logits}, tmp_path / "class.safetensors")
    teachers: Any = [
        (SimpleNamespace(model=model, tokenizer=tokenizer, name="t"), [2, 0], [tmp_path / "class.safetensors"])
    ]
    inputs, targets = projected_embeddings(new, teachers, labels=3, tokens=3, temperature=2.0)
    first = 1 / (1 + torch.exp((logits[:, 1] - logits[:, 0]) / 2))
    torch.testing.assert_close(targets, torch.stack([1 - first, torch.zeros(2), first], dim=1))
    table = model.get_input_embeddings().weight.detach()
    expected = [torch.cat([table[[2]], text, table[[3]]]) for text in embeddings]  # [CLS] and [SEP]
    torch.testing.assert_close(inputs, torch.stack(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("model", "name"), [("second", "teacher second"), ("encoder", "the student's encoder")])
def test_an_encoder_decoder_reads_no_embeddings(learned: Workspace, tmp_path: Path, model: str, name: str) -> None:
    workspace = learned.without_artifacts(tmp_path / "workspace")
    save_tiny(workspace.folder / "models" / model, "bart", labels=TEACHER_LABELS["second"])
    assert f"error: {name} does not read embeddings instead of tokens" in workspace.refusal(2, "run", *QUICK)


@pytest.mark.parametrize(
    ("overrides", "piece"),
    [
        (["targets.mode=soft"], "targets.mode"),
        (["pseudo_embeddings.tokens=40"], "32 tokens, special tokens included\nwhere: pseudo_embeddings.tokens: 40"),
    ],
)
def test_contradicting_fields_are_refused(learned: Workspace, tmp_path: Path, overrides: list[str], piece: str) -> None:
    assert piece in learned.without_artifacts(tmp_path / "workspace").refusal(2, "run", *SMALL, *overrides)


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
    assert "few for fine-tuning an encoder: raise pseudo_embeddings.count, or set student.epochs=auto" in result.err
    assert (workspace.folder / "students/student/model.safetensors").exists()
