"""Messages on the problems of an experiment file: the place, and the nearest field or value that the schema allows."""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from amalgam.pipeline.config.schema import SCHEMA_VERSION, ExperimentConfig
from amalgam.pipeline.errors import nearest

KeyPath = tuple[str | int, ...]


def dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def placed(place: str, path: KeyPath, problem: str) -> str:
    return f"{', '.join(filter(None, [place, dotted(path)]))}: {problem}"


def path_in(data: Any, loc: tuple[int | str, ...], *, missing: bool) -> KeyPath:
    """Returns pydantic's location without the names of union types and validators."""
    path: list[str | int] = []
    for index, part in enumerate(loc):
        if isinstance(data, dict) and (part in data or (missing and index == len(loc) - 1)):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            break
        path.append(part)
    return tuple(path)


MUST_BE = {
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "list": "must be a list: [a, b]",
    "dict": "must be a mapping: {a: b}",
    "string": "must be text",
}
"""Messages by the first word of pydantic's error type, such as int_parsing, int_type or int_from_float."""

MUST_BE_TEACHERS = "must be a list: write each teacher as `- {name: NAME, model: FOLDER}`"


def validation_message(item: ErrorDetails, path: KeyPath, raw: str | None) -> str:
    if item["input"] is None and path and NO_BLANK.fullmatch(str(path[-1])):
        return "a space is missing after the colon"
    return _rule_message(item, path, raw)


def _rule_message(item: ErrorDetails, path: KeyPath, raw: str | None) -> str:
    given = item["input"]
    kind, _, fault = item["type"].partition("_")
    match item["type"]:
        case _ if path == ("schema_version",):
            return f"this amalgam reads schema_version {SCHEMA_VERSION}; CHANGELOG.md lists the changes"
        case "extra_forbidden":
            message = f"unknown key{_field_hint(path)}"
        case "missing":
            message = "is required"
        case "literal_error":
            expected = str(item["ctx"]["expected"])
            choices, word = re.findall(r"'([^']*)'", expected), str(given)
            word = "cuda" if word.casefold() == "gpu" else word
            message = f"is {_written(given)}; must be one of {expected}{hint(word, choices, listed=False)}"
        case "string_pattern_mismatch":
            message = f"is {given!r}; use 1 to 64 ASCII letters, digits, '.', '_' and '-', first a letter or digit"
        case "too_long" | "too_short":
            bound, most = ("at most", "max_length") if fault == "long" else ("at least", "min_length")
            message = f"takes {bound} {item['ctx'][most]} (given {item['ctx']['actual_length']})"
        case "model_type":
            message = "is a section: write its fields below it, indented, or leave it out"
        case "string_type" if given is None or isinstance(given, bool | float | int):
            message = f"is {json.dumps(given)}, not text: {_as_text(given, path, raw)}"
        case _:
            rule = MUST_BE.get(kind) if fault in {"parsing", "type", "from_float"} else None
            rule = _not_a_mapping(rule, given, path) if isinstance(given, dict) and rule else rule
            message = rule or item["msg"].removeprefix("Value error, ").replace("Input should", "must")
            if not isinstance(given, dict | list | BaseModel):
                is_word = isinstance(given, bool) and raw not in {None, "true", "false"}  # such as yes, no, on and off
                written = f"{raw}, which YAML reads as {json.dumps(given)}" if is_word else _written(given)
                is_list = kind in {"int", "float"} and isinstance(given, str) and "," in given
                sweep = f"; for several students: amalgam sweep {dotted(path)}={given}" if is_list else ""
                message = f"{message[0].lower()}{message[1:]} (given {written}){sweep}"
    return message


def _not_a_mapping(rule: str, given: dict[Any, Any], path: KeyPath) -> str:
    """Returns the rule for a mapping that should be a text, a number or a list."""
    if path == ("teachers",):
        return MUST_BE_TEACHERS
    is_text = len(given) == 1 and rule in {MUST_BE["list"], MUST_BE["string"]}
    return f"{rule}{'; YAML reads this value as a mapping: quote it' if is_text else ', not a mapping'}"


def _written(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def _as_text(given: object, path: KeyPath, raw: str | None) -> str:
    """Returns the fix: quote the value, or leave out a null; in a list it may be the text "null"."""
    if given is not None or isinstance(path[-1], int):
        return f'quote it ("{given if raw is None else raw}")'
    field = fields_at(path[:-1]).get(str(path[-1]))
    if field is None or field.is_required():
        return "write one"
    return "leave it out" + (f", or write {field.default}" if field.default else "")


def hint(word: str, choices: Iterable[str], *, listed: bool = True) -> str:
    words = list(choices)
    for choice in nearest(word, words, ratio=0.6):
        return f"; did you mean {choice!r}?"
    return f"; known: {', '.join(words)}" if listed and words else ""


OTHER_NAMES = {
    "lr": "learning_rate",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
    "path": "model",
    "folder": "model",
    "texts": "train",
    "text_column": "text",
    "label_column": "label",
    "max_length": "max_tokens",
    "output_dir": "workspace",
}
"""Names of other programs for a field."""


def _field_hint(path: KeyPath) -> str:
    """Returns the fields of this name in other sections, those of the student first; else the nearest one here."""
    name, sections = OTHER_NAMES.get(str(path[-1]), str(path[-1])), {**ExperimentConfig.model_fields}
    if name in fields_at(path[:-1]):
        return f"; did you mean {name!r}?"
    owners = [section for section in sections if section != "teachers" and name in fields_at((section,))]
    fields = [f"{section}.{name}" for section in sorted(owners, key=lambda section: section != "student")]
    return f"; did you mean {' or '.join(fields)}?" if fields else hint(name, fields_at(path[:-1]))


def fields_at(path: KeyPath) -> Mapping[str, FieldInfo]:
    """Returns the fields that the schema allows at a path."""
    model: type[BaseModel] | None = ExperimentConfig
    for part in path:
        if model is not None and part in model.model_fields:
            kinds = kinds_in(model.model_fields[str(part)].annotation)
            model = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
    return model.model_fields if model is not None else {}


def kinds_in(annotation: Any) -> Iterator[type]:
    """Yields the types of an annotation, also those of unions and lists."""
    origin = typing.get_origin(annotation) or annotation
    if isinstance(origin, type) and origin is not types.UnionType:
        yield origin
    for option in () if origin in {dict, typing.Literal} else typing.get_args(annotation):
        yield from kinds_in(option)


NO_BLANK = re.compile(r"[^:]+:[^:]+")
"""A key and a value without a blank between them, which YAML reads as a key in braces."""

NOT_YAML = {
    "\\t": "a tab: YAML is indented with spaces",
    "mapping values": "a second colon in one line: quote the value, or begin a new line",
    "another document": "`---` begins a second document: one file is one experiment",
    "<document start>": "no fields are written like this: each is `name: value`",
    "'<scalar>'": "text after the end of a value: check the quotes and brackets of this line and of the one above",
    "block": "the indentation differs from the lines above: indent it as they are, with `- ` if it begins an item",
}
"""Maps parts of the parser's messages to plain words."""


def not_yaml(error: yaml.MarkedYAMLError, lines: list[str]) -> str:
    """Returns the error in plain words with its line; the parser may name the line after the faulty one."""
    mark, problem = error.problem_mark, error.problem or "not YAML"
    if mark is None:
        return problem
    if error.context == "while scanning a quoted scalar" and "end of stream" in problem and error.context_mark:
        begin = error.context_mark
        return f"line {begin.line + 1}, column {begin.column + 1}: this quote has no second one: close it"
    begun = next((number for number in range(mark.line, 0, -1) if lines[number - 1 : number] != [""]), 0)
    for number in (mark.line + 1, begun):
        if re.match(r"\s*(- )?[A-Za-z_]+:[^\s:/]", "".join(lines[number - 1 : number]) if number else ""):
            line = lines[number - 1].partition(" #")[0].strip()
            return f"line {number}: a space is missing after the colon: {line}"
    words = next((words for piece, words in NOT_YAML.items() if piece in problem), problem)
    return f"line {mark.line + 1}, column {mark.column + 1}: {words}"
