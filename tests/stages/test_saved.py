"""A saved folder truncates as the training did: in a pipeline, predict, ONNX Runtime and sentence-transformers."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from amalgam.data.arrays import softmax
from amalgam.data.tokens import encode
from amalgam.stages.app.export_onnx import check_parity, write_model
from amalgam.stages.app.student import finished_in
from amalgam.stages.common.inference.batches import model_inputs, predict
from amalgam.stages.common.models.loading import (
    check_tokens,
    load_tokenizer,
    new_student,
    save_pretrained_folder,
)
from amalgam.stages.common.models.model_folder import ONNX_MODEL
from amalgam.stages.common.models.resolve import read_model
from amalgam.tests.forking import BARE, Forked
from amalgam.tests.stages.tiny_models import tiny, word_tokenizer
from amalgam.tests.workspaces import Workspace, finish, quiet_environment

TEXT = "the chef fried onion court heard banker nurse judge read contract in a garden"
WORDS = TEXT.split(" ")
LIMIT, POSITIONS = 16, 66
TEXTS = [" ".join(WORDS[:3]), " ".join(WORDS * 2), " ".join(reversed(WORDS * 30))]
"""Within the limit, beyond it, and beyond the positions of the model."""
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
LEAKS = ("is_local", "local_files_only", "name_or_path", "truncation_strategy", '"stride"')


def bert() -> Any:
    from transformers import BertTokenizer

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    return BertTokenizer(vocab={word: index for index, word in enumerate(names)})


def roberta() -> Any:
    """Byte-level BPE."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import RobertaTokenizer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return RobertaTokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])


def sentencepiece() -> Any:
    """A unigram model with its scores, as sentencepiece trains it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import XLMRobertaTokenizer

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=SPECIAL, unk_token="<unk>")  # noqa: S106
    tokenizer.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    return XLMRobertaTokenizer(vocab=[tuple(piece) for piece in json.loads(tokenizer.to_str())["model"]["vocab"]])


KINDS = [("bert", bert), ("roberta", roberta), ("xlm-roberta", sentencepiece)]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a student that was loaded from a saved encoder, as train-student does."""
    kind, make = request.param
    base, tokenizer = tmp_path_factory.mktemp("saved"), make()
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": None}
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS, "num_hidden_layers": 1}
    model, _ = tiny(kind, spread=8.0, **{**special, **shape})
    save_pretrained_folder(model, tokenizer, base / "encoder")
    loaded = load_tokenizer(read_model(base / "encoder", "the encoder"))
    encode(loaded, [("a text",)], 7, types=False)  # the tokenizer truncates elsewhere during the training
    save_pretrained_folder(model, loaded, base / "student", max_tokens=LIMIT)
    return base / "student"


def probabilities(folder: Path, texts: list[tuple[str, ...]]) -> Any:
    return softmax(finished_in(folder).load().logits(texts))


def test_the_files_have_the_limit_and_nothing_of_the_machine(folder: Path) -> None:
    from tokenizers import Tokenizer

    texts = "".join((folder / name).read_text("utf-8") for name in ("config.json", "tokenizer_config.json"))
    assert json.loads((folder / "tokenizer_config.json").read_text("utf-8"))["model_max_length"] == LIMIT
    assert not [leak for leak in (*LEAKS, str(folder.parent)) if leak in texts]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [len(tokenizer.encode(text).ids) <= LIMIT for text in TEXTS] == [True] * 3
    assert len(tokenizer.encode(TEXTS[0], TEXTS[2]).ids) == LIMIT


CLASSIFY = """
import json, sys
from transformers import pipeline

classify = pipeline("text-classification", model=sys.argv[1], truncation=True, top_k=None)
print(json.dumps([classify(inputs) for inputs in json.loads(sys.argv[2])]))
"""


def test_a_pipeline_predicts_as_predict_does_on_long_texts_and_pairs(folder: Path, tmp_path: Path) -> None:
    single: list[tuple[str, ...]] = [(text,) for text in TEXTS]
    pairs: list[tuple[str, ...]] = [(first, second) for first in TEXTS for second in TEXTS]
    inputs = [dict(zip(("text", "text_pair"), row, strict=False)) for row in (*single, *pairs)]
    (script := tmp_path / "classify.py").write_text(CLASSIFY)
    result = finish(Forked([str(folder), json.dumps(inputs)], tmp_path, quiet_environment(), str(script), BARE))
    assert result.code == 0, result.err
    ours = [*probabilities(folder, single), *probabilities(folder, pairs)]
    for scores, expected in zip(result.json, ours, strict=True):
        by_label = {score["label"]: score["score"] for score in scores}
        assert [by_label[label] for label in ("a", "b", "c")] == pytest.approx(list(expected), abs=1e-5)
    beyond = probabilities(folder, [(TEXTS[1],), (TEXTS[1] + " contract" * 40,), (TEXTS[0],)])
    assert beyond[0] == pytest.approx(beyond[1], abs=1e-6)
    assert np.abs(beyond[0] - beyond[2]).max() > 1e-3  # the texts are different at all


@pytest.mark.parametrize("folder", KINDS[1:], indirect=True)
def test_onnx_runtime_with_the_saved_tokenizer_predicts_as_predict_does(folder: Path, tmp_path: Path) -> None:
    """tests/test_export.py compares a BERT on a long text."""
    onnxruntime = pytest.importorskip("onnxruntime")
    from tokenizers import Tokenizer

    classifier = finished_in(folder).load()
    classifier.model.to("cpu")
    write_model(classifier, tmp_path / ONNX_MODEL)
    facts = check_parity(classifier, tmp_path / ONNX_MODEL)
    assert facts["max_tokens"] == LIMIT
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    session = onnxruntime.InferenceSession(str(tmp_path / ONNX_MODEL))
    for text, expected in zip(TEXTS, probabilities(folder, [(text,) for text in TEXTS]), strict=True):
        encoded = tokenizer.encode(text)
        columns = {
            "input_ids": encoded.ids,
            "attention_mask": encoded.attention_mask,
            "token_type_ids": encoded.type_ids,
        }
        (logits,) = session.run(["logits"], {name: np.array([columns[name]]) for name in facts["inputs"]})
        assert softmax(logits.astype(np.float64))[0] == pytest.approx(expected, abs=1e-4)


def sentence_embeddings(folder: Path, texts: list[str]) -> Any:
    """Return the embeddings of sentence-transformers, or of the same steps where it is not installed."""
    if importlib.util.find_spec("sentence_transformers"):
        transformer = importlib.import_module("sentence_transformers").SentenceTransformer
        return transformer(str(folder), device="cpu").encode(texts)
    import torch
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    limit = min(tokenizer.model_max_length, model.config.max_position_embeddings)
    inputs = tokenizer(texts, padding=True, truncation="longest_first", max_length=limit, return_tensors="pt")
    mask = inputs["attention_mask"].unsqueeze(-1).float()
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    return ((states * mask).sum(1) / mask.sum(1)).numpy()


def test_sentence_transformers_reads_the_tokens_that_the_training_read(folder: Path) -> None:
    import torch

    classifier = finished_in(folder).load()
    classifier.model.to("cpu")
    tokens = encode(classifier.tokenizer, [(text,) for text in TEXTS], LIMIT, types=classifier.types)
    for row, embedding in enumerate(sentence_embeddings(folder, TEXTS)):
        inputs = {"input_ids": torch.tensor(np.array([tokens.ids[row]], dtype=np.int64))}
        with torch.no_grad():
            states = classifier.model.base_model(**inputs).last_hidden_state
        assert embedding == pytest.approx(states[0].mean(0).numpy(), abs=1e-4)


def test_saving_again_without_a_limit_keeps_the_models_and_not_the_truncation(folder: Path, tmp_path: Path) -> None:
    files = read_model(folder, "the student")
    save_pretrained_folder(finished_in(folder).load().model, load_tokenizer(files), tmp_path / "again")
    config = json.loads((tmp_path / "again/tokenizer_config.json").read_text("utf-8"))
    assert config["model_max_length"] == LIMIT
    assert not {"max_length", "stride", "truncation_strategy"} & config.keys()
    assert json.loads((tmp_path / "again/tokenizer.json").read_text("utf-8"))["truncation"] is None


def test_students_and_trained_teachers_are_saved_with_the_length_of_their_training(workspace: Workspace) -> None:
    student = workspace.folder / "students/student"
    assert json.loads((student / "tokenizer_config.json").read_text())["model_max_length"] == 32
    assert not re.search("|".join(LEAKS), (student / "tokenizer_config.json").read_text())
    workspace.train_teachers("max_tokens: 24")
    workspace.edit("  max_tokens: 32\n  epochs", "  epochs")
    workspace("train-student", "student.max_tokens=200")
    for name, limit in (("teachers/teacher-1", 24), ("teachers/teacher-2", 24), ("students/student", 64)):
        config = (workspace.folder / name / "tokenizer_config.json").read_text()
        assert json.loads(config)["model_max_length"] == limit
        assert not re.search("|".join(LEAKS), config)
    metadata = json.loads((student / ".amalgam.json").read_text())
    assert metadata["max_tokens"] == 64  # as many positions as the encoder has
    assert [source["trained"] for source in metadata["sources"]] == [False, True, True]
    encoder = ("student.max_tokens=30", "student.encoder=static:teacher:teacher-1", "student.method=amalgam")
    lower = workspace("train-student", *encoder)
    assert lower.err.count("its tokenizer truncates at 24 tokens, below max_tokens: 30") == 1


@pytest.mark.parametrize("kind", ["gpt2", "flaubert"])
def test_a_model_that_learned_no_token_types_gets_none_and_its_head_finds_the_last_token(
    kind: str, tmp_path: Path
) -> None:
    """Both models add an embedding for token types; the pad token of the config is not the tokenizer's."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, _ = tiny(kind, spread=4.0, pad_token_id=9)
    save_pretrained_folder(model, word_tokenizer(), tmp_path / "encoder")
    files = read_model(tmp_path / "encoder", "the encoder")
    loaded = load_tokenizer(files)
    new = new_student(files, labels=["a", "b"], layers=None, seed=0)
    assert "token_type_ids" in loaded.model_input_names
    check_tokens(new, loaded, name="student.encoder")
    texts = ["word1 word2", "word3 word4 word5 word6"]
    tokens = encode(loaded, [(text,) for text in texts], 16, types=False)
    alone = np.concatenate([predict(new, tokens.ids[row : row + 1], pad_id=loaded.pad_token_id) for row in (0, 1)])
    with torch.no_grad():
        trained = new(**model_inputs(tokens.ids, None, np.arange(2), loaded.pad_token_id)).logits.numpy()
    save_pretrained_folder(new, loaded, tmp_path / "student", max_tokens=16)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "student")
    inputs = AutoTokenizer.from_pretrained(tmp_path / "student")(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        elsewhere = plain(**inputs).logits.numpy()
    tolerance = 1e-4 * np.abs(alone[0] - alone[1]).max()
    assert np.abs(trained - alone).max() < tolerance
    assert np.abs(elsewhere - alone).max() < tolerance
