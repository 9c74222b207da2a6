"""Loading: a teacher with every weight or not at all, a student under a new head, and nothing printed on the way."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from amalgam.pipeline.errors import ModelError
from amalgam.pipeline.input_files import file_digest
from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.models.loading import (
    check_tokens,
    load_classifier,
    load_language_model,
    load_tokenizer,
    new_student,
    save_pretrained_folder,
    token_limit,
)
from amalgam.stages.common.models.model_folder import POSITIONS_AFTER_PADDING, check_encoder_kind, longest_text
from amalgam.stages.common.models.resolve import ModelFiles, Reference, checked_encoder, resolve
from amalgam.tests.stages.tiny_models import SHAPE, refusal, tiny_config, tiny_language_model, word_tokenizer
from amalgam.tests.workspaces import edit_json

KINDS = ("bert", "roberta", "distilbert", "albert", "electra", "deberta-v2", "mpnet", "modernbert", "xlm-roberta")
AFTER_PADDING = {"roberta", "xlm-roberta", "mpnet"}
LABELS = ["world", "sport", "business", "science"]


def files_of(folder: Path, **more: Any) -> ModelFiles:
    pins = Store(folder.parent / "pins")
    return resolve(Reference(str(folder), None, folder, pins, file_digest, **more))


def saved(
    folder: Path, kind: str = "bert", *, form: str = "AutoModelForSequenceClassification", **settings: Any
) -> Path:
    """Three layers, so that there are some to leave out."""
    import torch
    import transformers

    layers = "n_layers" if kind == "distilbert" else "num_hidden_layers"
    config = tiny_config(kind, **{"labels": ("a", "b", "c"), layers: 3, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = getattr(transformers, form).from_config(config)
    save_pretrained_folder(model, word_tokenizer(types=False), folder)
    return folder


def load(files: ModelFiles, **more: Any) -> Any:
    return load_classifier(files, **{"dropout": None, "dtype": "fp32", **more})


@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_loads_all_weights_in_eval_mode_and_with_sdpa_if_supported(tmp_path: Path, kind: str) -> None:
    import torch
    from safetensors.torch import load_file

    folder = saved(tmp_path / "model", kind)
    edit_json(folder / "config.json", attn_implementation="eager", _attn_implementation="eager")
    model = load(files_of(folder))
    stored = load_file(folder / "model.safetensors")
    assert stored
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in stored.items())
    assert not model.training
    assert model.config._attn_implementation == ("sdpa" if type(model)._supports_sdpa else "eager")  # noqa: SLF001
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_weights_are_aligned_in_memory(tmp_path: Path, kind: str) -> None:
    """Unaligned memory makes some CPUs round otherwise: equal weights must give equal logits."""
    folder = saved(tmp_path / "model", kind)
    models = [load(files_of(folder)), new_student(files_of(folder), labels=LABELS, layers=None, seed=3)]
    for model in models:
        assert [name for name, tensor in model.state_dict().items() if tensor.data_ptr() % 64] == []


def test_a_language_model_is_aligned_and_its_head_stays_tied(tmp_path: Path) -> None:
    save_pretrained_folder(*tiny_language_model(), tmp_path / "model")
    model = load_language_model(files_of(tmp_path / "model"))
    assert [name for name, tensor in model.state_dict().items() if tensor.data_ptr() % 64] == []
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_the_dtype_is_the_one_asked_for_whatever_was_stored(tmp_path: Path) -> None:
    import torch

    files = files_of(saved(tmp_path / "model", dtype="float16"))
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        assert {parameter.dtype for parameter in load(files, dtype=name).parameters()} == {dtype}


def test_the_dropout_rate_is_set_before_the_model_is_built(tmp_path: Path) -> None:
    import torch

    files = files_of(saved(tmp_path / "model", "modernbert"))
    for rate, expected in ((None, {0.0}), (0.25, {0.25})):
        model = load(files, dropout=rate)
        rates = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
        assert rates == expected
        assert model.model.layers[0].attn.attention_dropout == (rate or 0.0)


@pytest.mark.parametrize(
    ("kind", "form"), [("bert", "AutoModel"), ("roberta", "AutoModel"), ("deberta-v2", "AutoModelForMaskedLM")]
)
def test_an_encoder_without_a_head_is_refused_as_teacher(tmp_path: Path, kind: str, form: str) -> None:
    error = refusal(lambda: load(files_of(saved(tmp_path / "model", kind, form=form))))
    assert "classification head" in error.what
    assert "classifier" in error.what


@pytest.mark.parametrize("outer", ["module.", "model.inner."])
def test_weights_of_a_wrapper_and_of_another_architecture_are_named_as_such(tmp_path: Path, outer: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {outer + name: tensor for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    assert f"the names of the weights begin with '{outer}'" in refusal(lambda: load(files_of(folder))).what
    shutil.copy(saved(tmp_path / "other", "roberta") / "model.safetensors", folder)
    error = refusal(lambda: load(files_of(folder)))
    assert error.what.startswith("config.json describes a bert, but the weights are those of another architecture")


def test_a_head_of_another_size_is_refused_with_both_sizes(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    names = {"0": "a", "1": "b"}
    edit_json(folder / "config.json", id2label=names, label2id={"a": 0, "b": 1})
    error = refusal(lambda: load(files_of(folder)))
    assert re.search("id2label.* 2 .* 3 ", error.what)


def test_a_config_that_describes_fewer_or_more_layers_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    edit_json(folder / "config.json", num_hidden_layers=2)
    assert "fewer layers" in refusal(lambda: load(files_of(folder))).what
    assert "fewer layers" in refusal(lambda: new_student(files_of(folder), labels=LABELS, layers=None, seed=0)).what
    edit_json(folder / "config.json", num_hidden_layers=4)
    assert "weights are missing" in refusal(lambda: load(files_of(folder))).what
    error = refusal(lambda: new_student(files_of(folder), labels=LABELS, layers=None, seed=0))
    assert "weights" in error.what


def test_an_unknown_architecture_is_one_line(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    edit_json(folder / "config.json", model_type="not-yet-invented")
    assert "configuration" in refusal(lambda: load(files_of(folder))).what


def _pickled(folder: Path, content: object) -> Path:
    import torch

    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    return folder


def test_pickle_weights_load_when_allowed_and_only_then(tmp_path: Path) -> None:
    import torch

    whole = load(files_of(saved(tmp_path / "model"))).state_dict()
    folder = _pickled(tmp_path / "model", whole)
    assert "pickle" in refusal(lambda: files_of(folder)).what
    loaded = load(files_of(folder, allow_pickle=True)).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in whole.items())


class _Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_hostile_pickle_runs_nothing_even_when_pickles_are_allowed(tmp_path: Path) -> None:
    folder = _pickled(saved(tmp_path / "model"), {"weight": _Hostile(tmp_path / "owned")})
    files = files_of(folder, allow_pickle=True)
    assert "model" in refusal(lambda: load(files)).what
    assert not (tmp_path / "owned").exists()


CODE = """
from transformers import BertConfig, BertForSequenceClassification
class OwnConfig(BertConfig):
    model_type = "own"
class OwnModel(BertForSequenceClassification):
    config_class = OwnConfig
"""


def test_trusted_code_is_loaded_from_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = saved(tmp_path / "model")
    (folder / "own.py").write_text(CODE)
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForSequenceClassification": "own.OwnModel"}
    edit_json(folder / "config.json", model_type="own", auto_map=auto_map)
    assert "code" in refusal(lambda: files_of(folder)).what
    files = files_of(folder, trust_remote_code=True)
    assert type(load(files)).__name__ == "OwnModel"


def test_a_dropout_that_the_configuration_refuses_is_an_error_of_the_model(tmp_path: Path) -> None:
    """The configuration of MPT allows whole numbers alone as the rate of its attention."""
    folder = saved(tmp_path / "model")
    edit_json(folder / "config.json", model_type="mpt")
    refusal(lambda: load_classifier(files_of(folder), dropout=0.1, dtype="fp32"))
    refusal(lambda: new_student(files_of(folder), labels=LABELS, layers=None, seed=0, dropout=0.1))


def test_nothing_is_printed_and_the_users_logging_is_left_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.utils import logging

    folder = saved(tmp_path / "model", form="AutoModelForMaskedLM")
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    student = new_student(files_of(folder), labels=LABELS, layers=1, seed=0)
    save_pretrained_folder(student, load_tokenizer(files_of(folder)), tmp_path / "out")
    load(files_of(tmp_path / "out"))
    refusal(lambda: load(files_of(folder)))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_the_threshold_of_unknown_texts_is_not_that_of_the_encoder(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    edit_json(folder / "config.json", unknown_threshold=-3.5)
    assert load(files_of(folder)).config.unknown_threshold == -3.5
    assert not hasattr(new_student(files_of(folder), labels=LABELS, layers=None, seed=0).config, "unknown_threshold")


def test_the_first_layers_of_a_longformer_have_their_windows(tmp_path: Path) -> None:
    folder = saved(tmp_path / "encoder", "longformer", attention_window=[8, 16, 24])
    student = new_student(files_of(folder), labels=LABELS, layers=2, seed=0)
    assert student.config.attention_window == [8, 16]


def body_of(model: Any) -> dict[str, Any]:
    return {name: tensor for name, tensor in model.base_model.state_dict().items() if "pooler" not in name}


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *((kind, "AutoModelForMaskedLM") for kind in KINDS),
        *(("roberta", form) for form in ("AutoModel", "AutoModelForSequenceClassification")),
    ],
)
def test_a_student_is_the_first_layers_of_any_encoder_under_a_new_head(tmp_path: Path, kind: str, form: str) -> None:
    import torch
    from transformers import AutoModel, AutoModelForSequenceClassification

    folder = saved(tmp_path / "encoder", kind, form=form)
    whole = body_of(AutoModel.from_pretrained(folder))
    for layers in (None, 2):
        student = new_student(files_of(folder), labels=LABELS, layers=layers, seed=3)
        body = body_of(student)
        assert all(torch.equal(tensor, whole[name]) for name, tensor in body.items())
        assert student.config.num_hidden_layers == (layers or 3)
        if kind != "albert":  # its layers are one layer, used again
            assert len(body) == len(whole) if layers is None else len(body) < len(whole)
    save_pretrained_folder(student, load_tokenizer(files_of(folder)), tmp_path / "student")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "student")
    assert again.config.id2label == dict(enumerate(LABELS))
    assert again.config.num_hidden_layers == 2
    ids = torch.tensor([[2, 7, 8, 3]])
    with torch.no_grad():  # transformers loads to unaligned memory, where matrix libraries may round otherwise
        assert torch.allclose(again(ids).logits, student.eval()(ids).logits, atol=1e-6)
        assert again(ids).logits.shape == (1, len(LABELS))


def test_a_student_is_a_function_of_its_seed_and_leaves_the_callers_randomness_alone(tmp_path: Path) -> None:
    import torch

    files = files_of(saved(tmp_path / "encoder", "roberta", form="AutoModel"))
    torch.manual_seed(11)
    state = torch.get_rng_state()
    one = new_student(files, labels=LABELS, layers=2, seed=1).state_dict()
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(12)
    same = new_student(files, labels=LABELS, layers=2, seed=1).state_dict()
    other = new_student(files, labels=LABELS, layers=2, seed=2).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert [name for name in one if not torch.equal(one[name], other[name])] == [
        "classifier.dense.weight",
        "classifier.out_proj.weight",
    ]


@pytest.mark.parametrize("labels", [LABELS, ["x", "y", "z"]])
def test_another_classifiers_head_is_never_kept_not_even_one_of_the_right_size(
    tmp_path: Path, labels: list[str]
) -> None:
    import torch

    files = files_of(saved(tmp_path / "encoder", "electra"))
    head = {name: tensor for name, tensor in load(files).state_dict().items() if name.startswith("classifier.")}
    student = new_student(files, labels=labels, layers=None, seed=3).state_dict()
    matrices = [name for name in head if name.endswith("weight")]
    assert len(matrices) == 2
    assert not any(torch.equal(student[name], head[name]) for name in matrices)


def test_a_pretrained_prediction_head_stays_below_the_new_outputs(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    folder = saved(tmp_path / "encoder", "modernbert", form="AutoModelForMaskedLM")
    student = new_student(files_of(folder), labels=LABELS, layers=1, seed=3)
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(student.state_dict()["head.dense.weight"], stored["head.dense.weight"])


def test_more_layers_than_the_encoder_has_are_refused(tmp_path: Path) -> None:
    files = files_of(saved(tmp_path / "encoder", form="AutoModel"))
    assert checked_encoder(files, 3) == checked_encoder(files, None) == files
    error = refusal(lambda: checked_encoder(files, 4))
    assert re.search(r"student\.layers: 4 .* 3$", error.what)


def test_the_kinds_that_have_a_classifier_are_known_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it, those that a program has registered are known, too."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig
    from transformers.models.auto import modeling_auto

    def refused(kind: str) -> bool:
        try:
            check_encoder_kind({"model_type": kind}, where="here")
        except ModelError as error:
            return "has no classifier" in error.what
        return False

    class Own(PreTrainedConfig):  # type: ignore[misc]
        model_type = "own-kind"

    class OwnClassifier:
        config_class = Own

    classified = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.keys()
    kinds = {kind for kind in CONFIG_MAPPING if "amalgam" not in kind}
    assert kinds > classified
    assert {kind for kind in kinds if refused(kind)} == kinds - classified
    assert refused("own-kind")
    AutoConfig.register("own-kind", Own)
    AutoModelForSequenceClassification.register(Own, OwnClassifier)
    assert not refused("own-kind")
    monkeypatch.delitem(sys.modules, "transformers.models.auto.modeling_auto")
    assert {kind for kind in kinds if refused(kind)} == kinds - classified


def test_an_encoder_made_of_blocks_cannot_be_cut(tmp_path: Path) -> None:
    from transformers import FunnelConfig, FunnelForSequenceClassification

    shape = {"block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "vocab_size": 95}
    folder = tmp_path / "encoder"
    save_pretrained_folder(FunnelForSequenceClassification(FunnelConfig(**shape)), word_tokenizer(), folder)
    error = refusal(lambda: new_student(files_of(folder), labels=LABELS, layers=1, seed=0))
    assert "cannot be cut" in error.what


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_at_the_limit_passes_and_one_token_more_would_not(tmp_path: Path, kind: str) -> None:
    import torch

    files = files_of(saved(tmp_path / "model", kind))
    model, tokenizer = load(files), load_tokenizer(files)
    limit = token_limit(model.config, tokenizer, 1000)
    assert min(longest_text(files.folder, files.config), 1000) == limit
    if kind == "deberta-v2":  # distances only: no text is too long
        assert limit == 1000
        assert model(torch.full((1, 200), 9)).logits.isfinite().all()
        return
    assert limit == 64 - (0 if kind not in AFTER_PADDING else 2 if kind == "mpnet" else 1)
    assert model(torch.full((1, limit), 9)).logits.isfinite().all()
    assert token_limit(model.config, tokenizer, 10) == 10
    if kind != "modernbert":  # rotary: computed for any length, trained for so many
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, limit + 1), 9))


def test_every_model_with_positions_after_padding_is_listed() -> None:
    """Read from the sources of all models that transformers has as sequence classifiers."""
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    kinds = set()
    for kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(kind)
        sources = [source.read_text("utf-8") for source in folder.glob("modeling_*.py")]
        if any("position_ids_from_input_ids(" in source for source in sources):
            kinds.add(kind)
    assert len(kinds) > 10
    assert kinds - POSITIONS_AFTER_PADDING == set()


def test_a_tokenizers_own_limit_counts_unless_it_is_absurd(tmp_path: Path) -> None:
    files = files_of(saved(tmp_path / "model"))
    model, tokenizer = load(files), load_tokenizer(files)
    assert tokenizer.model_max_length > 1e20
    assert token_limit(model.config, tokenizer, 1000) == 64
    tokenizer.model_max_length = 32
    assert token_limit(model.config, tokenizer, 1000) == 32
    tokenizer.save_pretrained(files.folder)
    assert longest_text(files.folder, files.config) == 32
    assert "set max_tokens" in str(refusal(lambda: token_limit(model.config, tokenizer, 2)).fix)
    tokenizer.model_max_length = 2
    assert "model_max_length" in str(refusal(lambda: token_limit(model.config, tokenizer, 1000)).fix)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    files = files_of(saved(tmp_path / "model"))
    model, tokenizer = load(files), load_tokenizer(files)
    assert check_tokens(model, tokenizer, name="teacher news") == []
    tokenizer.add_tokens(["brandnew"])
    error = refusal(lambda: check_tokens(model, tokenizer, name="teacher news"))
    assert all(piece in error.what for piece in ("teacher news", "'brandnew'", "95 tokens"))


def test_a_missing_pad_token_is_replaced_with_a_note_or_refused() -> None:
    import torch

    from amalgam.tests.stages.tiny_models import tiny

    model, tokenizer = tiny("gpt2")
    notes = check_tokens(model, tokenizer, name="teacher news")
    [note] = notes
    assert "teacher news" in note
    assert "'[SEP]'" in note
    batch = tokenizer(["word1 word2 word3", "word4"], padding=True, return_tensors="pt")
    alone = tokenizer(["word4"], return_tensors="pt")
    with torch.no_grad():
        one, two = model(**alone).logits[0], model(**batch).logits[1]
    assert torch.allclose(one, two, atol=1e-5)
    tokenizer.pad_token = tokenizer.eos_token = None
    assert "no pad token" in refusal(lambda: check_tokens(model, tokenizer, name="teacher news")).what


def of_texts_and_images(folder: Path) -> ModelFiles:
    """Two layers for texts, and one for images."""
    from transformers import Gemma3Config, Gemma3ForSequenceClassification

    shape = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    texts: dict[str, Any] = {**shape, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
    texts |= {"vocab_size": 95, "pad_token_id": None}
    images = {**shape, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    model = Gemma3ForSequenceClassification(Gemma3Config(text_config=texts, vision_config=images))
    save_pretrained_folder(model, word_tokenizer(types=False), folder)
    return files_of(folder)


def test_the_pad_token_of_a_model_of_texts_and_images_is_that_of_its_texts(tmp_path: Path) -> None:
    files = of_texts_and_images(tmp_path / "encoder")
    model, tokenizer = new_student(files, labels=LABELS, layers=None, seed=0), load_tokenizer(files)
    assert check_tokens(model, tokenizer, name="teacher news") == []
    assert model.config.text_config.pad_token_id == tokenizer.pad_token_id


def test_a_model_of_texts_and_images_is_cut_to_the_first_layers_of_its_texts(tmp_path: Path) -> None:
    model = new_student(of_texts_and_images(tmp_path / "encoder"), labels=LABELS, layers=1, seed=0)
    assert len(model.base_model.language_model.layers) == 1


def test_an_encoder_and_decoder_of_two_configs_cannot_be_cut(tmp_path: Path) -> None:
    from transformers import T5GemmaConfig, T5GemmaForSequenceClassification

    shape = {**SHAPE, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 95}
    config = T5GemmaConfig(encoder=shape, decoder={**shape, "cross_attention_hidden_size": 32}, vocab_size=95)
    save_pretrained_folder(T5GemmaForSequenceClassification(config), word_tokenizer(types=False), tmp_path / "encoder")
    error = refusal(lambda: new_student(files_of(tmp_path / "encoder"), labels=LABELS, layers=1, seed=0))
    assert "t5gemma cannot be cut" in error.what


def test_a_saved_model_is_a_plain_folder_that_pipelines_load(tmp_path: Path) -> None:
    from transformers import pipeline

    files = files_of(saved(tmp_path / "encoder", form="AutoModel"))
    tokenizer = load_tokenizer(files)
    tokenizer(["word1", "word2 word3"], padding="max_length", truncation=True, max_length=50)
    save_pretrained_folder(new_student(files, labels=LABELS, layers=None, seed=0), tokenizer, tmp_path / "student")
    names = sorted(path.name for path in (tmp_path / "student").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in names[0], *names[2:]:
        assert str(tmp_path) not in (tmp_path / "student" / name).read_text("utf-8")
    state = json.loads((tmp_path / "student" / "tokenizer.json").read_text("utf-8"))
    assert (state["padding"], state["truncation"]) == (None, None)
    scores = pipeline("text-classification", model=str(tmp_path / "student"), device="cpu", top_k=None)(["word1"])[0]
    assert {entry["label"] for entry in scores} == set(LABELS)
    assert sum(entry["score"] for entry in scores) == pytest.approx(1.0, abs=1e-5)
