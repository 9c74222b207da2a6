"""Reads a model's folder: its configuration, the weights that would be loaded, and the digest of its files.

The digest covers configuration, weights, tokenizer, and trusted code. READMEs, optimizer states and exports to other
formats do not change it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from amalgam.pipeline.errors import ModelError

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")

PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")

# Every name under which an installed tokenizer class looks for its vocabulary; any one of the first is enough.
VOCABULARIES = (
    *("tokenizer.json", "*.model", "*.spm", "*vocab*", "*.tokenizer", "*.tiktoken", "dict.txt", "bpe.codes"),
    *("tekken.json", "byte_maps.json"),
)

TOKENIZERS = (
    *VOCABULARIES,
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "merges.txt", "emoji.json", "normalizer.json"),
    "word_*.json",
)

ADAPTER = "adapter_config.json"

DISTRIBUTED_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")

SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Contents:
    names: tuple[str, ...]
    weights: Literal["safetensors", "pickle"]
    config: dict[str, object]


def read_contents(folder: Path, *, where: str, allow_pickle: bool, trust_remote_code: bool) -> Contents:
    config = read_config(folder, where=where, trust_remote_code=trust_remote_code)
    present = [path.name for path in folder.iterdir() if path.is_file()]
    chosen, kind = choose_weights(present, config, where=where, allow_pickle=allow_pickle)
    weights = [chosen, *shards(folder / chosen, where=where)]
    for name in weights:
        _refuse_truncated(folder / name, where=where)
    if not any(matches(name, VOCABULARIES) for name in present):
        fix = f"save it in the model's folder: tokenizer.save_pretrained({str(folder)!r})"
        raise ModelError("the model has no tokenizer", where=f"{where}: {folder}", fix=fix)
    names = {"config.json", *weights, *light_names(present, trust_remote_code=False)}
    if trust_remote_code:
        names.update(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    return Contents(tuple(sorted(names)), kind, config)


def digest(folder: Path, names: Iterable[str], digest_of: Callable[[Path], str], *, where: str) -> str:
    """sha256 over the sorted (name, sha256) of the files."""
    pairs = []
    for name in sorted(names):
        sha256 = digest_of(folder / name)
        _refuse_damaged_blob(folder / name, sha256, where=where)
        pairs.append((name, sha256))
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=True, separators=(",", ":")).encode()).hexdigest()


def light_names(present: Iterable[str], *, trust_remote_code: bool) -> list[str]:
    """Returns all files but the weights: enough to refuse a model before the weights are downloaded."""
    fixed = ("config.json", ADAPTER, SAFETENSORS[1], PICKLES[1])
    return [
        name
        for name in present
        if name in fixed or matches(name, TOKENIZERS) or (trust_remote_code and name.endswith(".py"))
    ]


def matches(name: str, patterns: Iterable[str]) -> bool:
    return "/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def choose_weights(
    present: Collection[str], config: dict[str, Any], *, where: str, allow_pickle: bool
) -> tuple[str, Literal["safetensors", "pickle"]]:
    """Returns the file that transformers would load first, and its kind."""
    if ADAPTER in present:
        fix = "merge it into its base model (merge_and_unload) and save the whole"
        raise ModelError("the model is a PEFT adapter", where=where, fix=fix)
    if any(DISTRIBUTED_SHARD.fullmatch(name) for name in present):
        raise ModelError("the weights are a distributed checkpoint", where=where, fix="save them with save_pretrained")
    explicit = config.get("transformers_weights")
    for name in (explicit,) if explicit else SAFETENSORS:
        if name in present and str(name).endswith((".safetensors", SAFETENSORS[1])):
            return str(name), "safetensors"
    pickles = [name for name in PICKLES if name in present]
    if explicit or not pickles:
        wanted = explicit or SAFETENSORS[0]
        fix = "save it with save_pretrained" if not explicit else "restore the file that config.json names"
        raise ModelError(f"the model has no weights: there is no {wanted}", where=where, fix=fix)
    if not allow_pickle:
        fix = "convert them (load once, then save_pretrained), or, if you made the file yourself, allow_pickle: true"
        raise ModelError("the model has only pickle weights, which can run code when loaded", where=where, fix=fix)
    return pickles[0], "pickle"


def shards(index: Path, *, where: str) -> list[str]:
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


def read_config(folder: Path, *, where: str, trust_remote_code: bool) -> dict[str, object]:
    if not (folder / "config.json").is_file():
        adapter = (folder / ADAPTER).is_file()
        what = "the folder holds only a PEFT adapter" if adapter else "the folder has no config.json, so it is no model"
        fix = (
            "merge it into its base model and save the whole"
            if adapter
            else "name the folder that save_pretrained wrote"
        )
        raise ModelError(what, where=f"{where}: {folder}", fix=fix)
    config = _read_json(folder / "config.json", where=where)
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            _refuse_code(folder / name, where=where, trust_remote_code=trust_remote_code)
    return config


def _refuse_code(path: Path, *, where: str, trust_remote_code: bool) -> None:
    auto_map = _read_json(path, where=where).get("auto_map")
    if not auto_map:
        return
    if not trust_remote_code:
        raise ModelError(
            f"the model needs its own code ({path.name} has an auto_map)",
            where=where,
            fix="use a model of transformers' own; or read the code, then trust_remote_code: true and a full commit",
        )
    if "--" in json.dumps(auto_map):
        raise ModelError(
            f"the model's code is in another repository, which cannot be pinned ({path.name}: auto_map)",
            where=where,
            fix="copy the .py files next to config.json and remove 'owner/name--' from auto_map",
        )


def _read_json(path: Path, *, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        what = f"{path.name} cannot be read as JSON"
        raise ModelError(what, where=f"{where}: {path}{line}", fix="restore the file") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{path.name} is not a JSON object", where=f"{where}: {path}", fix="restore the file")
    return parsed


def _refuse_truncated(path: Path, *, where: str) -> None:
    """Compares a safetensors file with the size in its header; the loader checks pickles."""
    if not path.is_file():
        raise ModelError(f"a weight file is missing: {path.name}", where=f"{where}: {path.parent}", fix="restore it")
    if path.suffix != ".safetensors":
        return
    size, expected = path.stat().st_size, _safetensors_size(path)
    if size != expected:
        what = f"{path.name} is damaged: it has {size} bytes, " + (
            f"its header implies {expected}" if expected else "and no readable header"
        )
        raise ModelError(what, where=f"{where}: {path}", fix="copy or download the file again")


def _safetensors_size(path: Path) -> int | None:
    """Returns the size by the header: 8 bytes of length, a JSON header of that length, then the tensors."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > os.fstat(file.fileno()).st_size - 8:
            return None
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            return 8 + length + max(ends, default=0)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            return None


def _refuse_damaged_blob(path: Path, sha256: str, *, where: str) -> None:
    """Compares a file with its blob's name, which in the Hub's cache is the sha256 of a large file."""
    blob = os.path.basename(os.readlink(path)) if path.is_symlink() else ""  # noqa: PTH115, PTH119 - one step, unresolved
    if SHA256.fullmatch(blob) and blob != sha256:
        what = f"the bytes of {path.name} have changed since the download"
        fix = f"delete {path.parent.parent.parent} and run again, which downloads it again"
        raise ModelError(what, where=f"{where}: {path}", fix=fix)


ATTENTIVE = "amalgam-attentive"
"""amalgam's own architecture, in attentive.py."""
