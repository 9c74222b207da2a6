"""A teacher at inference: its tokens, its vocabulary, its pad token, its rates."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BigBirdConfig,
    BigBirdForSequenceClassification,
    PreTrainedTokenizerFast,
)

from amalgam.data.tokens import encode
from amalgam.pipeline.errors import DataError, ModelError
from amalgam.pipeline.input_files import file_digest
from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.inference import teacher as teacher_module
from amalgam.stages.common.inference.batches import Classifier
from amalgam.stages.common.inference.teacher import DROPOUT_OFF, Rows, Teacher
from amalgam.stages.common.models.loading import (
    apply_rate,
    load_classifier,
    save_pretrained_folder,
)
from amalgam.stages.common.models.model_folder import full_attention
from amalgam.stages.common.models.resolve import Reference, resolve
from amalgam.tests.stages.tiny_models import ENCODERS, SPECIAL, WORDS, save_tiny, tiny, tiny_config, word_tokenizer


def teacher_of(kind: str = "bert", *, limit: int = 10, **settings: Any) -> Teacher:
    model, tokenizer = tiny(kind, spread=6.0, **settings)
    return Teacher(model, tokenizer, digest="77" * 32, seed=0, limit=limit, name="tiny")


def words(count: int, first: int = 0) -> str:
    return " ".join(WORDS[first : first + count])


def test_a_long_text_is_cut_to_the_limit_whatever_the_tokenizers_own_limit() -> None:
    teacher = teacher_of()
    assert teacher.tokenizer.model_max_length > 10**20
    short, exact, long = teacher.tokenise([(words(3),), (words(8),), (words(9),)])
    assert [(len(one), one.truncated) for one in (short, exact, long)] == [(5, False), (10, False), (10, True)]
    assert long.ids.tolist() == exact.ids.tolist()
    assert long.ids.dtype == np.int32


def test_of_a_pair_the_longer_text_is_cut_first() -> None:
    teacher = teacher_of(limit=12)
    [tokens] = teacher.tokenise([(words(20), words(3, first=50))])
    assert tokens.truncated
    assert tokens.type_ids is not None
    assert (tokens.type_ids == 0).sum() == 1 + 6 + 1
    assert (tokens.type_ids == 1).sum() == 3 + 1


def test_a_limit_without_room_for_both_texts_of_a_pair_is_refused() -> None:
    pairs = [(words(3), words(1, first=5)), (words(2, first=7), words(4, first=9))]
    with pytest.raises(ModelError, match="no room for both texts of a pair next to 3 special ones"):
        teacher_of(limit=4).tokenise(pairs)
    first, second = teacher_of(limit=5).tokenise(pairs)
    assert len(first) == len(second) == 5
    assert first.ids.tolist() != second.ids.tolist()


def test_padding_and_truncation_saved_with_the_tokenizer_are_not_obeyed() -> None:
    teacher = teacher_of()
    teacher.tokenizer.backend_tokenizer.enable_padding(length=30)
    teacher.tokenizer.backend_tokenizer.enable_truncation(4)
    assert [len(one) for one in teacher.tokenise([(words(3),), (words(8),)])] == [5, 10]


def test_type_ids_go_only_to_models_that_take_them() -> None:
    model, _ = tiny("distilbert")
    teacher = Teacher(model, word_tokenizer(types=True), digest="", seed=0, limit=10)
    [tokens] = teacher.tokenise([(words(3),)])
    assert tokens.type_ids is None
    assert teacher.run(Rows([tokens], [bytes(16)], np.array([DROPOUT_OFF]))).shape == (1, 3)


def test_a_tokenizer_with_more_tokens_than_the_model_is_an_error_with_the_token() -> None:
    model, _ = tiny("bert", vocab_size=len(SPECIAL) + 90)
    teacher = Teacher(model, word_tokenizer((*WORDS, "added")), digest="", seed=0, limit=10, name="tiny")
    assert len(teacher.tokenise([(words(3),)])) == 1
    with pytest.raises(ModelError, match=r"teacher tiny: .*'added'.* 95 "):
        teacher.tokenise([(words(3),), ("word1 added",)])


def test_a_text_without_any_token_is_refused() -> None:
    with pytest.raises(DataError, match="token"):
        teacher_of("gpt2").tokenise([("word1",), ("",)])


def test_no_texts_are_no_tokens() -> None:
    assert teacher_of().tokenise([]) == []


def test_a_teacher_without_a_pad_token_uses_eos_with_a_note() -> None:
    teacher = teacher_of("gpt2")
    [note] = teacher.notes
    assert note.startswith("teacher tiny ")
    assert "'[SEP]' (id 3)" in note
    tokens = teacher.tokenise([(words(2),), (words(7),), (words(4),)])
    together = teacher.run(Rows(tokens, [bytes(16)] * 3, np.full(3, DROPOUT_OFF)))
    for row, one in enumerate(tokens):
        alone = teacher.run(Rows([one], [bytes(16)], np.array([DROPOUT_OFF])))
        assert (alone[0] - together[row]).abs().max() < 1e-5
    assert teacher_of("bert").notes == ()


@pytest.mark.parametrize(("ends", "pad"), [(True, 0), (False, 3)])
def test_the_token_that_ends_each_text_does_not_pad(pad: int, *, ends: bool) -> None:
    """A head that reads the last token which is no padding would read the one before."""
    model, tokenizer = tiny("gpt2", spread=6.0)
    if ends:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="$A [SEP]", special_tokens=[("[SEP]", 3)]
        )
    inputs = [tokenizer(words(count), return_tensors="pt")["input_ids"] for count in (2, 7, 4)]
    alone = torch.cat([model(input_ids=ids).logits for ids in inputs])
    teacher = Teacher(model, tokenizer, digest="", seed=0, limit=10)
    tokens = teacher.tokenise([(words(count),) for count in (2, 7, 4)])
    together = teacher.run(Rows(tokens, [bytes(16)] * 3, np.full(3, DROPOUT_OFF)))
    assert model.config.pad_token_id == pad
    assert (together - alone).abs().max() < 1e-5


def test_a_finished_model_without_a_pad_token_predicts_batches(tmp_path: Path) -> None:
    """As a decoder that `build-targets --oracle` names."""
    folder = save_tiny(tmp_path / "model", "gpt2", spread=6.0)
    files = resolve(Reference(str(folder), None, folder, Store(tmp_path / "pins"), file_digest))
    model, texts = Classifier(files, device="cpu", max_tokens=10), [(words(2),), (words(7),), (words(4),)]
    expected = np.concatenate([model.logits([text]) for text in texts])
    assert np.abs(model.logits(texts) - expected).max() < 1e-5


@pytest.mark.parametrize(("kind", "share"), [*((kind, 1 / 16) for kind in (*ENCODERS, "gpt2")), ("xlnet", 0.0)])
def test_on_a_gpu_texts_are_padded_to_share_a_launch_unless_this_changes_logits(
    kind: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = teacher_of(kind, limit=16)
    monkeypatch.setattr(teacher_module, "put_on", lambda _device, tensors: tensors)
    teacher.device = torch.device("cuda")
    assert teacher.padding == share


def test_a_short_text_does_not_change_the_attention_of_later_texts(tmp_path: Path) -> None:
    """BigBird's attention is sparse in transformers until the first short text."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    shape |= {"block_size": 2, "num_random_blocks": 1, "max_position_embeddings": 64, "pad_token_id": 0}
    model = BigBirdForSequenceClassification(BigBirdConfig(vocab_size=95, num_labels=3, **shape))
    for parameter in model.parameters():
        parameter.data *= 20 if parameter.dim() > 1 else 1
    save_pretrained_folder(model, word_tokenizer(), tmp_path)
    files = resolve(Reference(str(tmp_path), None, tmp_path, Store(tmp_path / "pins"), file_digest))
    logits = []
    for texts in ([(words(40),)], [(words(1),), (words(40),)]):
        own = load_classifier(files, dropout=None, dtype="fp32")
        teacher = Teacher(own, word_tokenizer(), digest="", seed=0, limit=60)
        runs = [Rows([tokens], [bytes(16)], np.array([DROPOUT_OFF])) for tokens in teacher.tokenise(texts)]
        logits.append([teacher.run(rows) for rows in runs][-1])
    torch.testing.assert_close(*logits)
    assert [bool(full_attention(files.config, limit)) for limit in (14, 15)] == [False, True]


def test_a_model_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(ModelError, match=r"teacher tiny: .* canine has no embedding of each token"):
        teacher_of("canine")


def test_a_decoder_is_keyed_in_any_batch_too() -> None:
    teacher = teacher_of("gpt2")
    teacher.check_dropout_active()
    tokens = teacher.tokenise([(words(2),), (words(7),), (words(4),)])
    keys = [bytes([i]) * 16 for i in range(3)]
    together = teacher.run(Rows(tokens, keys, np.array([0, 1, 2]), width=14))
    for row, one in enumerate(tokens):
        alone = teacher.run(Rows([one], keys[row : row + 1], np.array([row])))
        assert (alone[0] - together[row]).abs().max() < 1e-5


def test_a_limit_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(ModelError, match=r"teacher tiny .*100 tokens[\s\S]*max_tokens"):
        teacher_of(limit=100).check_dropout_active()


@pytest.mark.parametrize(("kind", "limit"), [("bert", 3), ("gpt2", 2), ("gpt2", 1)])
def test_a_limit_too_small_for_the_probes_is_refused(kind: str, limit: int) -> None:
    with pytest.raises(ModelError, match=r"cannot make a text of [\s\S]*larger max_tokens"):
        teacher_of(kind, limit=limit).check_dropout_active()


def test_a_python_tokenizer_reports_truncated_texts() -> None:
    class Slow:
        """The interface of a tokenizer without Rust inside: no encodings to look into."""

        def __init__(self, fast: Any) -> None:
            self.fast = fast

        def __getattr__(self, name: str) -> Any:
            return getattr(self.fast, name)

        def __call__(self, *texts: Any, **options: Any) -> Any:
            encoded = self.fast(*texts, **options)
            encoded._encodings = None  # noqa: SLF001  what it looks like without Rust
            return encoded

    teacher = teacher_of()
    teacher.tokenizer = Slow(teacher.tokenizer)
    assert [one.truncated for one in teacher.tokenise([(words(8),), (words(9),)])] == [False, True]


def test_a_thread_with_another_limit_truncates_no_text_of_this_one() -> None:
    """The reader tokenises ahead while the first launch tokenises its probes."""
    tokenizer, started = word_tokenizer(), Event()
    backend = tokenizer.backend_tokenizer

    class Interrupted:
        """Gives the other thread time between the limit and the texts."""

        def __getattr__(self, name: str) -> Any:
            return getattr(backend, name)

        def encode_batch_fast(self, *arguments: Any, **options: Any) -> Any:
            started.set()
            sleep(0.1)
            return backend.encode_batch_fast(*arguments, **options)

    tokenizer._tokenizer = Interrupted()  # noqa: SLF001  tokenizers has no subclasses
    with ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(encode, tokenizer, [(words(30),)], 50, types=True)
        assert started.wait(10)
        [probe] = encode(tokenizer, [(words(30),)], 7, types=True)
    assert (len(ahead.result()[0]), len(probe)) == (32, 7)


def test_one_token_vocabulary_without_special_tokens_works() -> None:
    bare = Tokenizer(models.WordLevel({"word1": 0, "[UNK]": 1}, unk_token="[UNK]"))  # noqa: S106  a token of text
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    model, _ = tiny("bert")
    teacher = Teacher(model, PreTrainedTokenizerFast(tokenizer_object=bare), digest="", seed=0, limit=12)
    teacher.check_dropout_active()


# --- rates -----------------------------------------------------------------------------------------------------------


def test_a_rate_reaches_every_dropout_of_a_config() -> None:
    config = tiny_config("modernbert")
    apply_rate(config, 0.25)
    names = ("attention_dropout", "classifier_dropout", "embedding_dropout", "mlp_dropout")
    assert {getattr(config, name) for name in names} == {0.25}
    model, tokenizer = tiny("modernbert", rate=0.25)
    sites = Teacher(model, tokenizer, digest="", seed=0, limit=12).sites
    assert {site.rate for site in sites} == {0.25}
    assert len(sites) == 8


@pytest.mark.parametrize("kind", [*ENCODERS, "gpt2"])
def test_a_rate_of_the_user_is_the_rate_of_every_site(kind: str) -> None:
    model, tokenizer = tiny(kind, rate=0.3)
    sites = Teacher(model, tokenizer, digest="", seed=0, limit=12).sites
    assert {site.rate for site in sites} == {0.3}


def test_rates_without_a_value_and_of_inner_configs_are_set_and_flags_are_not() -> None:
    config = tiny_config("bert")
    config.text_config = tiny_config("bert")
    config.use_dropout = True
    assert config.classifier_dropout is None
    apply_rate(config, 0.4)
    assert config.classifier_dropout == config.text_config.hidden_dropout_prob == 0.4
    assert config.use_dropout is True


# --- the tiny models themselves --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "deberta-v2", "roberta"])
def test_a_saved_tiny_model_loads_as_it_was(kind: str, tmp_path: Any) -> None:
    folder = save_tiny(tmp_path / "model", kind, labels=("left", "right"))
    model, tokenizer = tiny(kind, labels=("left", "right"))
    loaded = AutoModelForSequenceClassification.from_pretrained(folder)
    assert loaded.config.id2label == {0: "left", 1: "right"}
    ids = AutoTokenizer.from_pretrained(folder)("word1 WORD2 other", "word3")["input_ids"]
    assert ids == tokenizer("word1 WORD2 other", "word3")["input_ids"]
    weights = loaded.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    with torch.no_grad():  # transformers loads to unaligned memory, where matrix libraries may round otherwise
        assert torch.allclose(loaded.eval()(torch.tensor([ids])).logits, model(torch.tensor([ids])).logits, atol=1e-6)
