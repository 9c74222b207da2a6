"""The demo's encoder is a plain Hugging Face folder, made silently, and the same whenever it is made."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from amalgam.data.demo_corpus import TOPICS, generate
from amalgam.stages.app.demo_models import tiny_encoder
from amalgam.tests.forking import Forked
from amalgam.tests.workspaces import finish, quiet_environment

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [text for text, _ in generate(600, 0)]
MAKE = """\
import pathlib, sys, warnings
import torch
from amalgam.data.demo_corpus import generate
from amalgam.stages.app.demo_models import tiny_encoder

warnings.simplefilter("error", UserWarning)
torch.set_num_threads(2)
texts = [text for text, _ in generate(600, 0)]
tiny_encoder(pathlib.Path(sys.argv[1]), texts, 0)
print(hash(texts[0]))
print(torch.get_num_threads())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("encoder")
    tiny_encoder(made, TEXTS, 0)
    return made


def test_the_folder_loads_as_a_classifier_with_its_tokenizer(folder: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(TEXTS[:4], padding=True, return_tensors="pt")
    assert batch["input_ids"].max() < model.config.vocab_size == len(tokenizer)
    logits = model(**batch).logits
    assert logits.shape == (4, 3)
    assert logits.isfinite().all()
    assert logits.std(dim=0).min() > 0
    assert (model.config.hidden_dropout_prob, model.config.attention_probs_dropout_prob) == (0.1, 0.1)


def test_the_tokenizer_knows_the_words_whatever_their_case_and_spells_out_others(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 64
    assert tokenizer.tokenize("The Goalkeeper") == ["the", "goalkeeper"]
    assert tokenizer.tokenize("zoo") == ["z", "##o", "##o"]
    lengths = [len(ids) for ids in tokenizer(TEXTS)["input_ids"]]
    assert max(lengths) <= 48
    assert all(tokenizer.unk_token_id not in ids for ids in tokenizer(TEXTS)["input_ids"])


def test_another_process_with_other_hashes_and_threads_makes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    (script := tmp_path / "make.py").write_text(MAKE)
    done = finish(Forked([str(encoder)], tmp_path, quiet_environment(), str(script)))
    assert (done.code, done.err) == (0, "")
    hashed, threads = done.out.splitlines()
    assert (int(hashed) != hash(TEXTS[0]), threads) == (True, "2")
    assert _digests(encoder) == _digests(folder)


def test_another_seed_changes_the_weights_and_leaves_the_callers_random_numbers_alone(
    folder: Path, tmp_path: Path
) -> None:
    before = torch.random.get_rng_state()
    tiny_encoder(tmp_path, TEXTS, 1)
    assert torch.equal(before, torch.random.get_rng_state())
    changed = {name for name, digest in _digests(tmp_path).items() if digest != _digests(folder)[name]}
    assert changed == {"model.safetensors"}


def test_words_of_one_topic_have_close_embeddings(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    table = AutoModel.from_pretrained(folder).embeddings.word_embeddings.weight.detach()
    vectors = {
        topic: [
            table[tokenizer.convert_tokens_to_ids(word)]
            for word in fields["things"]
            if len(tokenizer.tokenize(word)) == 1
        ]
        for topic, fields in TOPICS.items()
    }
    units = {topic: torch.nn.functional.normalize(torch.stack(rows), dim=1) for topic, rows in vectors.items()}
    means = torch.stack([rows.mean(0) for rows in units.values()])
    for number, (topic, rows) in enumerate(units.items()):
        nearest = (rows @ means.T).argmax(1)
        assert (nearest == number).float().mean() >= 0.8, topic


@pytest.mark.parametrize("texts", [["one"], ["", "?"], ["two words"]])
def test_a_handful_of_words_is_enough(texts: list[str], tmp_path: Path) -> None:
    tiny_encoder(tmp_path, texts, 0)
    weights = AutoModel.from_pretrained(tmp_path).embeddings.word_embeddings.weight
    assert weights.isfinite().all()
    assert weights.abs().sum() > 0


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
