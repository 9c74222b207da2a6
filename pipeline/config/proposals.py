"""Writes values and options of proposed commands and lines so that a user can copy them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import yaml

from amalgam.pipeline.user_paths import DEFAULT_FILE

WORD = re.compile(r"(?!\.{3})[A-Za-z0-9./][\w./+-]*", re.ASCII)


def as_yaml(value: object) -> str:
    """Returns a value as an override or a line of the experiment file writes it; text is quoted unless it is a word."""
    if isinstance(value, str) and WORD.fullmatch(value):
        node = yaml.compose(value, Loader=yaml.SafeLoader)
        if node is not None and node.tag == "tag:yaml.org,2002:str":
            return value
    return as_flow_yaml(value)


def as_flow_yaml(value: object) -> str:
    """Returns a value in the flow style of YAML, to which JSON's two escapes for an emoji would be two letters."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in text)


def written(overrides: Mapping[str, object]) -> list[str]:
    """Returns overrides as the arguments of a command."""
    return [f"{name}={as_yaml(value)}" for name, value in overrides.items()]


def file_option(config: Path | None) -> str:
    """Returns the option -c of a proposed command, with a space before it; empty for the default file."""
    return "" if config in (None, DEFAULT_FILE) else f" -c {shlex.quote(str(config))}"
