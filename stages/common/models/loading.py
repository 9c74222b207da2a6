"""Loads resolved models: teachers with all their weights, students with a new head, and their tokenizers.

A weight that is missing, left over or of another size is an error here. Transformers would continue with random numbers
and a line in the log.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from amalgam.data.keys import shown_names
from amalgam.pipeline.console import silenced
from amalgam.pipeline.errors import AmalgamError, ModelError, first_line
from amalgam.stages.common.models import model_folder
from amalgam.stages.common.models.resolve import ModelFiles, auto_config, has_two_types

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
ALIGNMENT = 64  # bytes of one cache line, to which torch aligns its own CPU allocations

OF_THE_LOADER = ("is_local", "local_files_only", "max_length", "stride", "truncation_strategy")
"""Entries of tokenizer_config.json that transformers adds on loading: how it found the folder, and tokenizer.json's
truncation, which calls of the tokenizer ignore."""

PRETRAINED_HEADS = ("ForMaskedLM", "ForPreTraining", "ForCausalLM")

_few = partial(shown_names, most=3)


def load_tokenizer(files: ModelFiles) -> PreTrainedTokenizerBase:
    trusted = files.trust_remote_code
    with _as_model_error(files, "tokenizer"):
        return AutoTokenizer.from_pretrained(str(files.folder), local_files_only=True, trust_remote_code=trusted)


def stored_dtype(files: ModelFiles) -> str:
    """Returns the dtype in which a model was saved, by its configuration."""
    stored = files.config.get("dtype") or files.config.get("torch_dtype")
    return next((dtype for dtype, name in DTYPES.items() if name == stored), "fp32")


def load_classifier(files: ModelFiles, *, dropout: float | None, dtype: str) -> PreTrainedModel:
    """Loads a classifier with every weight from the files."""
    model, loading = _load(files, _config(files, dropout), dtype=DTYPES[dtype])
    fix = "name a fine-tuned classifier; an encoder alone has no labels"
    _refuse_incomplete(files, model, loading, head="classification head", fix=fix)
    return model


def load_language_model(files: ModelFiles) -> PreTrainedModel:
    """Loads a causal language model in fp32 with every weight from the files."""
    model, loading = _load(files, _config(files), kind=AutoModelForCausalLM)
    fix = "name a model that was trained to continue texts, such as a GPT-2"
    _refuse_incomplete(files, model, loading, head="language model head", fix=fix)
    return model


def new_student(
    files: ModelFiles, *, labels: list[str], layers: int | None, seed: int, dropout: float | None = None
) -> PreTrainedModel:
    """Loads an encoder, or its first layers, under a new head for these labels; depends on files and arguments only."""
    files = replace(files, trust_remote_code=False)  # a student loads without code
    config = _config(files, dropout)
    if config.model_type == model_folder.ATTENTIVE:  # the body alone, under its own architecture's head
        config = config.text_config
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}
    config.problem_type = "single_label_classification"
    vars(config).pop("unknown_threshold", None)  # of the student that the encoder was
    if layers is not None:
        _set_layers(files, config, layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with _as_model_error(files, "encoder"):
            fresh = AutoModelForSequenceClassification.from_config(
                config, dtype=torch.float32, trust_remote_code=False, attn_implementation=None
            )
        model, loading = _load(files, config)
    new = {*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}
    body = [key for key in sorted(new) if _in_body(model, key) and "pooler" not in key]
    if body:
        what = f"weights of the encoder itself are missing or of another size: {_few(body)}"
        raise ModelError(what, where=str(files.folder), fix="save the encoder again, or use another one")
    if layers is None:
        _refuse_left_over(files, model, loading["unexpected_keys"])
    faulty = not_finite(model, new)
    if faulty:  # no student can learn from it
        raise ModelError(faulty, where=str(files.folder), fix="download or save the encoder again, or use another one")
    weights, initial = model.state_dict(), fresh.state_dict()
    if not str((files.config.get("architectures") or [""])[0]).endswith(PRETRAINED_HEADS):
        new.update(key for key in weights if not _in_body(model, key))  # another classifier's head
    with torch.no_grad():
        for key in sorted(new & weights.keys()):
            weights[key].copy_(initial[key])
    return model


def longest_row(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, wanted: int) -> int:
    """Returns the number of tokens for which the model has positions, at most `wanted`."""
    limits = [wanted, model_folder.position_limit(config)]
    if 0 < tokenizer.model_max_length < model_folder.ABSURD_LENGTH:
        limits.append(int(tokenizer.model_max_length))
    return min(limits)


def token_limit(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, wanted: int) -> int:
    """Returns the longest text in tokens, with special ones, for which the model has positions."""
    limit, special = longest_row(config, tokenizer, wanted), tokenizer.num_special_tokens_to_add(pair=False)
    if limit <= special:
        what = f"{limit} tokens leave no room for text next to {special} special ones"
        fix = "correct model_max_length in tokenizer_config.json, or use another model"
        fix = f"set max_tokens to at least {special + 1}" if wanted <= special else fix
        raise ModelError(what, where=_name_of(tokenizer), fix=fix)
    return limit


def token_vectors(model: PreTrainedModel) -> torch.Tensor | None:
    """Returns the embeddings of all tokens [tokens, width]; models of characters or bytes have none."""
    try:
        weight: torch.Tensor = model.get_input_embeddings().weight.detach()
    except (AttributeError, NotImplementedError):
        return None
    return weight


def vocabulary_of(model: PreTrainedModel, *, name: str) -> int:
    """Returns the number of tokens that the model has embeddings of; refuses a model without them."""
    vectors = token_vectors(model)
    if vectors is None:
        what = f"{name}: a model of the kind {model.config.model_type} has no embedding of each token"
        raise ModelError(what, fix="use a model with a vocabulary, such as a BERT")
    return len(vectors)


def rounded_as(vectors: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Returns the vectors, rounded to the half precision of the others, if these were stored in one."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(others.to(dtype).to(others.dtype), others):
            return vectors.to(dtype).to(vectors.dtype)
    return vectors


def takes_types(model: PreTrainedModel) -> bool:
    """Returns whether the model distinguishes the texts of a pair by token types."""
    return "token_type_ids" in inspect.signature(model.forward).parameters


def check_token_id(highest: int, vocabulary: int, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuses a tokenizer with an id for which the model has no embedding."""
    if highest >= vocabulary:
        token = tokenizer.convert_ids_to_tokens(highest)
        what = f"{name}: its tokenizer gives {token!r} the id {highest}, but the model has {vocabulary} tokens"
        fix = "use the tokenizer that the model was trained with, or save the model with resized embeddings"
        raise ModelError(what, where=_name_of(tokenizer), fix=fix)


def choose_pad(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, name: str) -> tuple[int, bool]:
    """Sets the model's pad token; returns it, and whether model or tokenizer has it. Else it is the end token, or 0.

    That of the config comes first: models read positions and the last token by it. Another one must not end each text:
    heads that read the last token which is no padding would read the one before.
    """
    config, vocabulary = model.config.get_text_config(), vocabulary_of(model, name=name)
    own_pad, own_end = (getattr(config, field, None) for field in ("pad_token_id", "eos_token_id"))
    eos = own_end if isinstance(own_end, int) else tokenizer.eos_token_id
    others, end = (tokenizer.pad_token_id, eos, 0, 1), next(reversed(tokenizer("")["input_ids"]), None)
    pads = [pad for pad in (own_pad, *(pad for pad in others if pad != end)) if pad is not None]
    pad = next(pad for pad in pads if 0 <= pad < vocabulary)
    config.pad_token_id = pad
    return int(pad), pad in (own_pad, tokenizer.pad_token_id)


def check_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, name: str) -> list[str]:
    """Refuses a tokenizer with ids that a new classifier lacks, makes their inputs agree, and returns notes.

    The tokenizer sets a missing pad token. The config gets its pad token, by which some heads find the last token,
    except where positions count from its own. The tokenizer leaves out token types that the classifier does not learn:
    some models, such as XLNet, would read them in other programs.
    """
    check_token_id(max(tokenizer.get_vocab().values(), default=-1), vocabulary_of(model, name=name), tokenizer, name)
    notes = []
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            fix = "set a pad token in the tokenizer and save it again"
            raise ModelError(f"{name}: its tokenizer has no pad token", where=_name_of(tokenizer), fix=fix)
        tokenizer.pad_token = tokenizer.eos_token
        notes.append(f"{name} has no pad token: {tokenizer.eos_token!r} is used instead")
    config = model.config.get_text_config()
    if config.pad_token_id is None or config.model_type not in model_folder.POSITIONS_AFTER_PADDING:
        config.pad_token_id = tokenizer.pad_token_id
    if not has_two_types(model.config):
        names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names
    return notes


def _name_of(tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.name_or_path or "its tokenizer")


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself, or a copy if its memory is not aligned, as that from a safetensors file may be.

    Matrix libraries round differently there, so equal weights would give different outputs.
    """
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def save_pretrained_folder(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, max_tokens: int | None = None
) -> None:
    """Writes a Hugging Face folder that loads without amalgam: config with id2label, safetensors, tokenizer.

    With `max_tokens` the saved tokenizer truncates at the length of the training.
    """
    if max_tokens is not None:
        tokenizer.model_max_length = max_tokens
    _remove_path(model.config)
    for key in OF_THE_LOADER:
        tokenizer.init_kwargs.pop(key, None)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # else the last batch's padding and truncation would be saved with it
        backend.no_padding()
        backend.no_truncation()
        if max_tokens is not None:
            backend.enable_truncation(max_tokens, direction=tokenizer.truncation_side)
    folder.mkdir(parents=True, exist_ok=True)
    with _silent():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _remove_path(config: Any) -> None:
    """Removes the folder that a configuration was read from, also from those inside it, where it would be saved."""
    config.name_or_path = ""
    for value in vars(config).values():
        if hasattr(value, "name_or_path"):
            _remove_path(value)


def _config(files: ModelFiles, dropout: float | None = None) -> PreTrainedConfig:
    with _as_model_error(files, "configuration"):
        config = auto_config(files)
    if dropout is not None:
        with _as_model_error(files, f"configuration with dropout {dropout:g}"):
            apply_rate(config, dropout)
    return config


def _load(
    files: ModelFiles,
    config: PreTrainedConfig,
    *,
    dtype: str = "float32",
    kind: Any = AutoModelForSequenceClassification,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Loads weights of any size; `_refuse_incomplete` then names the mismatched one, which the loader would not."""
    with _as_model_error(files, "model"):
        model, loading = kind.from_pretrained(
            str(files.folder),
            config=config,
            dtype=getattr(torch, dtype),
            use_safetensors=files.weights == "safetensors",
            weights_only=True,
            local_files_only=True,
            trust_remote_code=files.trust_remote_code,
            attn_implementation=None,  # sdpa where the model has it, else eager; never the file's setting
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = aligned(tensor.data)
    return model, loading


def _refuse_incomplete(
    files: ModelFiles, model: PreTrainedModel, loading: Mapping[str, Any], *, head: str, fix: str
) -> None:
    """Refuses weights that are of another size, missing or left over; `fix` is for a model without this head."""
    where = str(files.folder)
    mismatched = loading["mismatched_keys"]
    if mismatched:
        in_head = [entry for entry in mismatched if not _in_body(model, entry[0])]
        name, stored, wanted = min(in_head or mismatched)
        what = f"{name} has the shape {tuple(stored)} in the weights but {tuple(wanted)} by config.json"
        if in_head and next(iter(wanted)) == model.config.num_labels:
            what += f": id2label names {model.config.num_labels} labels, the weights have {next(iter(stored))} outputs"
        raise ModelError(what, where=where, fix="restore the config.json that belongs to the weights")
    missing = sorted(loading["missing_keys"])
    if missing and loading["unexpected_keys"]:
        _refuse_other_names(files, model, missing, loading["unexpected_keys"])
    missing_head = [key for key in missing if not _in_body(model, key)]
    if missing_head:
        raise ModelError(f"no {head}: missing {_few(missing_head)}", where=where, fix=fix)
    if missing:
        raise ModelError(f"weights are missing: {_few(missing)}", where=where, fix="save the model again, whole")
    _refuse_left_over(files, model, loading["unexpected_keys"])


def _refuse_other_names(
    files: ModelFiles, model: PreTrainedModel, missing: Sequence[str], unexpected: Collection[str]
) -> None:
    """Refuses weights that a wrapper saved, whose names have a prefix, and weights of another architecture."""
    for outer in (key.removesuffix(missing[0]) for key in unexpected if key.endswith(f".{missing[0]}")):
        what = f"the names of the weights begin with {outer!r}: a model within another one was saved"
        raise ModelError(what, where=str(files.folder), fix="save the inner model by its own save_pretrained")
    if {key for key, _ in model.named_parameters()} <= {*missing}:
        what = f"config.json describes a {model.config.model_type}, but the weights are those of another architecture"
        what = f"{what}, such as {_few(sorted(unexpected)[:1])}"
        raise ModelError(what, where=str(files.folder), fix="restore the config.json that belongs to the weights")


def _refuse_left_over(files: ModelFiles, model: PreTrainedModel, unexpected: Collection[str]) -> None:
    """Refuses further layers of a kind that the model has: config.json describes fewer layers than were trained."""
    patterns = {re.sub(r"\.\d+\.", ".N.", key) for key in model.state_dict()}
    further = [key for key in sorted(unexpected) if re.sub(r"\.\d+\.", ".N.", key) in patterns]
    if further:
        what = f"config.json describes fewer layers than the weights have: {_few(further)} would be left out"
        raise ModelError(what, where=str(files.folder), fix="restore the config.json that belongs to the weights")


def not_finite(model: PreTrainedModel, ignored: Collection[str] = ()) -> str:
    """Returns a message with the weights that are NaN or infinite; empty if there are none."""
    tensors = {key: tensor for key, tensor in model.state_dict().items() if key not in ignored}
    faulty = [key for key, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    return f"weights are NaN or infinite: {_few(sorted(faulty))}" if faulty else ""


def _in_body(model: PreTrainedModel, key: str) -> bool:
    return key.startswith(f"{model.base_model_prefix}.")


def _set_layers(files: ModelFiles, config: PreTrainedConfig, layers: int) -> None:
    """Sets the number of layers through num_hidden_layers, which every architecture's config maps to its own name."""
    config = getattr(config, "text_config", config)
    try:
        here = config.num_hidden_layers
        for name, value in vars(config).items():
            if isinstance(value, list) and len(value) == here and ("layer" in name or name == "attention_window"):
                setattr(config, name, value[:layers])
        config.num_hidden_layers = layers
    except (AttributeError, NotImplementedError):  # a model of two configs, or of blocks
        what = f"a model of the kind {config.model_type} cannot be cut to its first layers"
        fix = "leave out student.layers, or use another encoder"
        raise ModelError(what, where=str(files.folder), fix=fix) from None


@contextmanager
def _as_model_error(files: ModelFiles, part: str) -> Iterator[None]:
    """Turns any error that a library raises on a bad model into one line; refuses files that change meanwhile."""
    try:
        with files.unchanged(), _silent():
            yield
    except (AmalgamError, MemoryError):
        raise
    except Exception as error:
        what = f"the {part} of {files.given} cannot be loaded: {first_line(error)}"
        raise ModelError(what, where=str(files.folder), fix="try it with transformers alone to see more") from error


def _silent() -> AbstractContextManager[None]:
    bars = logging.is_progress_bar_enabled, logging.disable_progress_bar, logging.enable_progress_bar
    return silenced("transformers", *bars)


def apply_rate(config: Any, rate: float) -> None:
    """Sets every dropout rate of a model's config, and of the configs inside it.

    Call it before the model is built: some models build no dropout for a rate of zero.
    """
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            apply_rate(value, rate)
        elif model_folder.is_dropout_rate(name, value):
            setattr(config, name, rate)
