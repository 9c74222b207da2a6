"""Reads a model's folder: its configuration, the weights that would be loaded, and the digest of its files.

The digest covers configurations, weights, tokenizer, and trusted code. READMEs, optimizer states and exports to other
formats do not change it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from amalgam.data.keys import shown, shown_names
from amalgam.pipeline.errors import ModelError
from amalgam.pipeline.input_files import InputFile, is_texts
from amalgam.pipeline.storage.paths import json_object

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
OTHER_FORMATS = (".onnx", ".h5", ".msgpack", ".gguf", ".ot", ".tflite")
"""Ends of the names of weights that PyTorch does not load."""
VOCABULARIES = (
    *("tokenizer.json", "*.model", "*.spm", "*vocab*", "*.tokenizer", "*.tiktoken", "dict.txt", "bpe.codes"),
    *("tekken.json", "byte_maps.json"),
)
"""Every name under which an installed tokenizer class looks for its vocabulary; any one of them is enough."""
TOKENIZERS = (
    *VOCABULARIES,
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "merges.txt", "emoji.json", "normalizer.json"),
    "word_*.json",
)
SIZES = {
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"),
    *("dim", "hidden_dim", "n_embd", "n_head", "n_heads", "n_layer", "n_layers", "d_model"),
}
"""Names of the sizes in config.json that every architecture has in one of these forms."""
KINDS = {"model_type": str, "num_labels": int, "pad_token_id": int}
"""Types of further entries, which may be null."""
ADAPTER = "adapter_config.json"
GENERATION = "generation_config.json"
"""Names the end tokens of a language model."""
DISTRIBUTED_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
LFS_POINTER = b"version https://git-lfs"
"""Beginning of the text that a clone without git-lfs has instead of a large file."""
SHA256 = re.compile(r"[0-9a-f]{64}")
ATTENTIVE = "amalgam-attentive"
"""amalgam's own architecture, in attentive.py."""
STATIC = "amalgam-static"
"""amalgam's architecture without a transformer, in static.py."""
READS_PADDING = frozenset({"convbert", "fnet", "mra", "nystromformer", "reformer", "xlnet", "yoso"})
"""Kinds of models whose logits change with padding: a layer has no mask, or the head reads the last place."""
SPARSE = frozenset({"big_bird", "bigbird_pegasus"})
"""Kinds of models with sparse attention that transformers replaces by the full one permanently at a short text."""
NO_VOCABULARY = frozenset({"canine", "perceiver"})
"""Kinds of models without an embedding of each token."""
NO_ENCODER = {
    "funnel": "it fails on texts of few tokens, and has no state of each token",
    "reformer": "it trains on texts of one length only",
}
"""Kinds of models that have a classifier in transformers, but make no student; with the reason."""
OTHER_LAYERS = frozenset({"albert", "longformer", "openai-gpt", "squeezebert", "xlnet"})
"""Kinds of models without a list of layers that each give a state of each token; layer-wise learning needs one."""
ONE_RUN = frozenset({"bert", "camembert", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta"})
"""Kinds of models whose predictions and last states usually come from one run; for estimates only."""
ABSURD_LENGTH = 1_000_000  # tokenizers without a limit report 1e30, or a rounded form of it
POSITIONS_AFTER_PADDING = frozenset(
    {
        *("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm"),
        *("mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    }
)
"""Kinds whose positions start after the padding id, so that many of the position embeddings are never reached."""
CARD = "README.md"
UNKNOWN = "unknown.safetensors"
"""The fit of a student that stages/common/models/unknown.py reads; no weights of the model."""
HEAD = re.compile(r"(classifier|score|classification_head)\.")
"""The usual names of a classifier's own tensors."""
ONNX_MODEL, EXPORT_FACTS = "model.onnx", "export.json"
"""Files of an export, which is no model for transformers."""


def is_export(folder: Path) -> bool:
    """Returns whether the folder is an export, without the weights of a model."""
    return (folder / EXPORT_FACTS).is_file() and not (folder / SAFETENSORS[0]).exists()


def headless_class(config: Mapping[str, Any]) -> str:
    """Returns the class that config.json names if it has no head for labels, such as BertModel; else nothing."""
    classes = config.get("architectures")
    if isinstance(classes, list) and classes and not any("Classif" in str(name) for name in classes):
        return str(classes[0])
    return ""


def is_predictions(path: Path) -> bool:
    """Returns whether a teacher of this path is a file of predictions, and no model; the file may be missing."""
    return is_texts(path) and not path.is_dir()


def read_config(folder: Path, *, where: str, trust_remote_code: bool = False) -> dict[str, Any]:
    """Reads config.json; refuses code that is not trusted, or that cannot be pinned."""
    if (folder / ADAPTER).is_file():
        fix = "merge it into its base model as in docs/how-to/own-teachers.md, LoRA adapter"
        raise ModelError("the model is a PEFT adapter", where=f"{where}: {folder}", fix=fix)
    if not (folder / "config.json").is_file():
        what = "the folder has no config.json, so it is no model"
        folders = sorted(path.parent for path in folder.glob("*/config.json") if not is_export(path.parent))
        headless = [path.name for path in folders if headless_class(json_object(path / "config.json"))]
        models = [path.name for path in folders if path.name not in headless]
        models += [f"{name} (no classifier)" for name in headless]
        fix = "name the folder that save_pretrained wrote"
        fix = f"name one of the models in it: {shown_names(models, 5)}" if models else fix
        raise ModelError(what, where=f"{where}: {folder}", fix=fix)
    names = [name for name in ("config.json", "tokenizer_config.json") if (folder / name).is_file()]
    configs = {name: _read_json(folder / name, where=where) for name in names}
    for name, config in configs.items():
        auto_map = config.get("auto_map")
        if auto_map and not trust_remote_code:
            what = f"the model needs its own code ({name} has an auto_map)"
            fix = "use a model of transformers' own; or read the code, then trust_remote_code: true and a full commit"
            raise ModelError(what, where=where, fix=fix)
        if "--" in json.dumps(auto_map):
            what = f"the model's code is in another repository, which cannot be pinned ({name}: auto_map)"
            fix = "copy the .py files next to config.json and remove 'owner/name--' from auto_map"
            raise ModelError(what, where=where, fix=fix)
        _check_values(config, where=f"{where}: {folder / name}")
    return configs["config.json"]


def longest_text(folder: Path, config: Mapping[str, Any]) -> int:
    """Returns the tokens that `loading.token_limit` allows a model to read, without loading it; for notes only.

    ABSURD_LENGTH if its files name no limit.
    """
    limit, tokenizer = position_limit(config), folder / "tokenizer_config.json"
    length = _read_json(tokenizer, where=str(folder)).get("model_max_length") if tokenizer.is_file() else None
    return min(limit, int(length)) if length and 0 < length < ABSURD_LENGTH else limit


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of config.json about the model of texts; null, like an absent one, is all of it."""
    return config.get("text_config") or config


def position_limit(config: Any) -> int:
    """Returns the number of tokens for which a model has positions; ABSURD_LENGTH if positions are distances.

    `config` is the model's configuration, or the content of its config.json.
    """
    get = _getter(text_config(config) if isinstance(config, dict) else config.get_text_config())
    positions, kind = get("max_position_embeddings") or get("n_positions"), get("model_type")
    is_relative = get("relative_attention") and not get("position_biased_input", True)
    if get("relative_attention_num_buckets") is not None:
        is_relative = kind != "mpnet"
    if type(positions) is not int or positions < 1 or is_relative:
        return ABSURD_LENGTH
    padding = 1 if kind == "mpnet" else get("pad_token_id")  # mpnet's is fixed in its code
    return positions - ((padding or 0) + 1 if kind in POSITIONS_AFTER_PADDING else 0)


def reads_padding(config: Any) -> bool:
    """Returns whether padding changes the logits, by the model's configuration or the content of its config.json."""
    return _getter(_getter(config)("text_config") or config)("model_type") in READS_PADDING


def full_attention(config: Mapping[str, Any], max_tokens: int) -> dict[str, str]:
    """Returns a part of the key of results: earlier ones of SPARSE models depended on the order of the texts.

    `config` is the content of config.json; texts of at most `max_tokens` tokens may all be short.
    """
    get = _getter(text_config(config))
    short = (5 + 2 * (get("num_random_blocks") or 3)) * (get("block_size") or 64)
    is_sparse = get("model_type") in SPARSE and get("attention_type") != "original_full"
    return {"attention": "full"} if is_sparse and max_tokens > short else {}


def end_token(config: Any) -> int | None:
    """Returns the end token of an encoder-decoder; its head reads the last one of a text, else None.

    Such a head refuses texts together, or mixes them up, if one has more end tokens, as its words. `config` is the
    model's configuration, or the content of its config.json.
    """
    get = _getter(config)
    end = get("eos_token_id") if get("is_encoder_decoder") else None
    return end if isinstance(end, int) else None


def _getter(config: Any) -> Callable[..., Any]:
    """Returns `get` of a model's configuration, or of the content of its config.json."""
    return config.get if isinstance(config, dict) else lambda name, default=None: getattr(config, name, default)


def is_dropout_rate(name: str, value: object) -> bool:
    """Returns whether an entry of a model's configuration is a dropout rate; null is the rate of another entry."""
    is_number = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    return is_number and ("dropout" in name or name.endswith("pdrop"))


def has_dropout(config: Mapping[str, Any]) -> bool:
    """Returns whether a dropout rate in config.json is above 0, or it has none; a loaded model decides."""
    rates = list(_dropout_rates(config))
    return not rates or any(rates)


def _dropout_rates(config: Mapping[str, Any]) -> Iterator[float]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _dropout_rates(value)
        elif value is not None and is_dropout_rate(name, value):
            yield value


def check_encoder_kind(config: Mapping[str, Any], *, where: str) -> None:
    """Refuses an architecture of which no classifier can be trained."""
    kind = str(config.get("model_type"))
    reason = NO_ENCODER.get(kind)
    has_own_code = kind in {ATTENTIVE, STATIC} or "auto_map" in config  # of amalgam, or with code of the model's own
    if reason is None and not has_own_code and not has_classifier(kind):
        reason = f"transformers {importlib.metadata.version('transformers')} has no classifier of this kind"
    if reason is not None:
        what = f"a model of the kind {shown(kind)} cannot be an encoder: {reason}"
        raise ModelError(what, where=where, fix="use another encoder, such as a BERT")


def has_classifier(kind: str) -> bool:
    """Returns whether transformers has a classifier of the kind, from its source, because its import takes seconds."""
    library = Path(str(getattr(importlib.util.find_spec("transformers"), "origin", None))).parent
    source = library / "models/auto/modeling_auto.py"
    is_loaded = "transformers.models.auto.modeling_auto" in sys.modules  # also has the kinds that a program registered
    if is_loaded or not source.is_file():  # its import raises the error of an incomplete installation
        from transformers import CONFIG_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

        return kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    text = source.read_text("utf-8")
    classifiers = text.partition("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES = ")[2].partition("\n)\n")[0]
    return f'("{kind}", "' in classifiers or '("bert", "' not in classifiers  # its form has changed


def _check_values(config: Mapping[str, Any], *, where: str) -> None:
    """Refuses sizes that no model has, before libraries fail on them, kinds that read no tokens, quantised weights."""
    for name in SIZES & config.keys():
        size = config[name]
        is_default = size is None and name == "intermediate_size"  # GPT-Neo's: four times the hidden size
        if not is_default and (type(size) is not int or size < 1):
            what = f"{name} is {shown(json.dumps(size))}, not a whole number from 1 on"
            raise ModelError(what, where=where, fix="restore the file, or save the model again with save_pretrained")
    for name, expected in KINDS.items():
        value = config.get(name)
        if value is not None and type(value) is not expected:
            what = f"{name} is {shown(json.dumps(value))}, not {'text' if expected is str else 'a whole number'}"
            raise ModelError(what, where=where, fix="restore the file, or save the model again with save_pretrained")
    length = config.get("model_max_length")
    if length is not None and type(length) not in {int, float}:
        what = f"model_max_length is {shown(json.dumps(length))}, not a number"
        raise ModelError(what, where=where, fix="write the longest text in tokens, or remove the line")
    kind = str(config.get("model_type"))
    if kind in NO_VOCABULARY:
        what = f"a model of the kind {kind} has no embedding of each token"
        raise ModelError(what, where=where, fix="use a model with a vocabulary, such as a BERT")
    if kind == "xmod" and not config.get("default_language"):
        what = "the X-MOD model has no default_language, and fails on texts without one"
        fix = 'call set_default_language("en_XX") of the model, or another of its languages, then save_pretrained'
        raise ModelError(what, where=where, fix=fix)
    quantisation = config.get("quantization_config")
    if quantisation is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        what = f"the weights are quantised (quantization_config: {shown(str(method))})"
        fix = "use the model with plain weights: model.dequantize(), then save_pretrained"
        raise ModelError(what, where=where, fix=fix)


def choose_weights(
    folder: Path, present: Collection[str], config: dict[str, Any], *, where: str, allow_pickle: bool
) -> tuple[list[str], Literal["safetensors", "pickle"]]:
    """Returns the file that transformers would load first with the files that it names, and their kind."""
    if any(DISTRIBUTED_SHARD.fullmatch(name) for name in present):
        raise ModelError("the weights are a distributed checkpoint", where=where, fix="save them with save_pretrained")
    explicit = config.get("transformers_weights")
    for name in (explicit,) if explicit else SAFETENSORS:
        if name in present and str(name).endswith((".safetensors", SAFETENSORS[1])):
            return [str(name), *_shards(folder / str(name), where=where)], "safetensors"
    pickles = [name for name in PICKLES if name in present]
    if explicit or not pickles:
        fix = "restore the file that config.json names" if explicit else "save it with save_pretrained"
        what = f"the model has no weights: there is no {explicit or SAFETENSORS[0]}"
        converted = sorted(name for name in present if name.endswith(OTHER_FORMATS))
        if converted and not explicit:
            what = f"the model has no weights for PyTorch, only {shown(converted[0])}"
            fix = "name the PyTorch model that it was made from; a teacher can also be a file of its predictions"
        raise ModelError(what, where=where, fix=fix)
    if not allow_pickle:
        fix = "convert them (load once, then save_pretrained), or, if you made the file yourself, allow_pickle: true"
        raise ModelError("the model has only pickle weights, which can run code when loaded", where=where, fix=fix)
    return [pickles[0], *_shards(folder / pickles[0], where=where)], "pickle"


def _shards(index: Path, *, where: str) -> list[str]:
    """Returns the files that a weight index names; none for a single file."""
    if index.suffix != ".json":
        return []
    weight_map = _read_json(index, where=where).get("weight_map")
    names = sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, dict) else []
    outside = [name for name in names if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
    if outside or not names:
        what = f"{index.name} names no files of its own folder"
        raise ModelError(what, where=f"{where}: {index}", fix="save the model again with save_pretrained")
    return names


def light_names(present: Iterable[str], *, trust_remote_code: bool = False) -> list[str]:
    """Returns all files but the weights: enough to refuse a model before the weights are downloaded."""
    fixed = ("config.json", GENERATION, ADAPTER, SAFETENSORS[1], PICKLES[1])
    return [
        name
        for name in present
        if name in fixed or matches(name, TOKENIZERS) or (trust_remote_code and name.endswith(".py"))
    ]


def matches(name: str, patterns: Iterable[str]) -> bool:
    return "/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def digest(files: Mapping[str, InputFile], *, where: str) -> str:
    """sha256 over the sorted (name, sha256) of the files."""
    pairs = []
    for name in sorted(files):
        path, sha256 = files[name].path, files[name].sha256
        # In the Hub's cache a file is a link to a blob, whose name is the sha256 of a large file.
        blob = os.path.basename(os.readlink(path)) if path.is_symlink() else ""  # noqa: PTH115, PTH119 - one step, unresolved
        if SHA256.fullmatch(blob) and blob != sha256:
            what = f"the bytes of {name} have changed since the download"
            fix = f"delete {path.parent.parent.parent} and run again, which downloads it again"
            raise ModelError(what, where=f"{where}: {path}", fix=fix)
        pairs.append((name, sha256))
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=True, separators=(",", ":")).encode()).hexdigest()


def _read_json(path: Path, *, where: str) -> dict[str, Any]:
    check_no_pointer(path, where=where)
    try:
        parsed = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        what = f"{path.name} cannot be read as JSON"
        raise ModelError(what, where=f"{where}: {path}{line}", fix="restore the file") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{path.name} is not a JSON object", where=f"{where}: {path}", fix="restore the file")
    return parsed


def check_no_pointer(path: Path, *, where: str) -> None:
    """Refuses a file whose content git-lfs has not fetched."""
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            what, fix = f"{path.name} is a pointer of git-lfs, not the file itself", "run `git lfs pull` in this folder"
            raise ModelError(what, where=f"{where}: {path}", fix=fix)


def check_weights(path: Path, *, where: str) -> None:
    """Lets safetensors compare the header with the size of the file; pickles are checked when they are loaded."""
    if not path.is_file():
        raise ModelError(f"a weight file is missing: {path.name}", where=f"{where}: {path.parent}", fix="restore it")
    check_no_pointer(path, where=where)  # safetensors calls a file without permission missing
    if path.suffix != ".safetensors":
        return
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        what, fix = f"{path.name} is damaged: {error}", "copy or download the file again"
        raise ModelError(what, where=f"{where}: {path}", fix=fix) from None


def count_parameters(folder: Path) -> int | None:
    """Returns the number of weights in the safetensors files; None without such files."""
    shapes = _shapes(folder)
    return sum(map(math.prod, shapes.values())) if shapes else None


def may_have_head(folder: Path, outputs: int) -> bool:
    """Returns whether a tensor may be the last layer of a classifier; always without safetensors files."""
    shapes = _shapes(folder)
    return not shapes or any("embedding" not in name and shape[:1] == [outputs] for name, shape in shapes.items())


def head_outputs(folder: Path) -> int | None:
    """Returns the outputs of the classification head, by the usual names of its tensors; None without such tensors."""
    shapes = _shapes(folder).items()
    return min((shape[0] for name, shape in shapes if HEAD.match(name) and shape), default=None)


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Returns the shape of each tensor in the headers of the safetensors files."""
    shapes = dict[str, list[int]]()
    for path in folder.glob("model*.safetensors"):
        check_weights(path, where=str(folder))  # else a damaged header could have any length
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes |= {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
    return shapes


def states_body(model: Any) -> Any:
    """Returns the part of a classifier that gives the states of a text: the body, of an encoder-decoder its encoder."""
    body = model.base_model
    return body.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else body
