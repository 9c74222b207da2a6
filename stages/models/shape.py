"""How deep and wide a model is, by its config.json: planning needs to know, and must load no library for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amalgam.pipeline.errors import ModelError
from amalgam.stages.models.files import ModelFiles

DEPTH = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
WIDTH = ("hidden_size", "dim", "n_embd", "d_model")


def depth_of(files: ModelFiles) -> int:
    """Transformer layers; the embedding is none."""
    return _number(files, DEPTH)


def width_of(files: ModelFiles) -> int:
    return _number(files, WIDTH)


def _number(files: ModelFiles, names: Sequence[str]) -> int:
    """Architectures name it differently, and transformers leaves out of the file what is its own default."""
    found = next((files.config[name] for name in names if name in files.config), None)
    if found is None:
        found = getattr(_text_config(files), names[0], None)
    if not isinstance(found, int) or found < 1:
        what = f"config.json does not say the model's {names[0]}"
        raise ModelError(what, where=str(files.folder), fix="use a transformer that transformers itself knows")
    return found


def _text_config(files: ModelFiles) -> Any:
    from transformers import AutoConfig

    from amalgam.stages.models.loading import ATTENTIVE

    if files.config.get("model_type") == ATTENTIVE:
        import amalgam.stages.models.attentive  # noqa: F401 - registers it

    return AutoConfig.from_pretrained(str(files.folder), local_files_only=True).get_text_config()
