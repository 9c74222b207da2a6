"""Reads the experiment file and its overrides, and reports all problems at once with their lines."""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from amalgam.pipeline.config.checks import check_consistency
from amalgam.pipeline.config.schema import RENAMED, SCHEMA_VERSION, ExperimentConfig
from amalgam.pipeline.errors import ExperimentError

MOST_BYTES = 1_000_000
MOST_NODES = 100_000
MOST_SHOWN = 500
"""Largest size of a file, number of its values, and length of a message in characters."""

SECRET = re.compile(r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|://[^/\s]*:[^/\s@]*@|\bAKIA[0-9A-Z]{16}\b")


KeyPath = tuple[str | int, ...]


@dataclass
class ParsedYaml:
    """Holds the data of a file, the line and the raw text of each value, and the problems."""

    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    raw: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    nodes: int = 0


def config_error(path: Path, problems: list[str]) -> ExperimentError:
    problems = [SECRET.sub("(not shown)", problem)[:MOST_SHOWN] for problem in problems]
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    return ExperimentError(
        f"{path.name}: {count}\n" + "\n".join(f"  {problem}" for problem in problems),
        where=str(path),
        fix="run `amalgam schema` for all fields, or `amalgam init` for a commented file",
    )


def read_yaml(path: Path) -> ParsedYaml:
    text = _text(path)
    parsed = ParsedYaml()
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise config_error(path, [_not_yaml(error, text.splitlines())]) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise config_error(path, [f"not YAML: {str(error).splitlines()[0]}"]) from None
    if not isinstance(node, yaml.MappingNode):
        raise config_error(path, ["the file must be a mapping of sections; is it empty?"])
    try:
        parsed.data = to_python(node, (), parsed, ())
    except RecursionError:
        raise config_error(path, ["nested too deeply"]) from None
    return parsed


def _not_yaml(error: yaml.MarkedYAMLError, lines: list[str]) -> str:
    """Returns the error in plain words with its line; the parser may name the line after the faulty one."""
    mark, problem = error.problem_mark, error.problem or "not YAML"
    if mark is None:
        return problem
    begun = next((number for number in range(mark.line, 0, -1) if lines[number - 1 : number] != [""]), 0)
    for number in (mark.line + 1, begun):
        if re.match(r"\s*(- )?[A-Za-z_]+:[^\s:/]", "".join(lines[number - 1 : number]) if number else ""):
            line = lines[number - 1].partition(" #")[0].strip()
            return f"line {number}: a space is missing after the colon: {line}"
    words = next((words for piece, words in NOT_YAML.items() if piece in problem), problem)
    return f"line {mark.line + 1}, column {mark.column + 1}: {words}"


NOT_YAML = {
    "\\t": "a tab: YAML is indented with spaces",
    "mapping values": "a second colon in one line: quote the value, or begin a new line",
    "another document": "`---` begins a second document: one file is one experiment",
    "<document start>": "no fields are written like this: each is `name: value`",
    "block": "the indentation differs from the lines above: indent it as they are, with `- ` if it begins an item",
}
"""Maps parts of the parser's messages to plain words."""


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ExperimentError(
                f"{path.name} is larger than {MOST_BYTES:,} bytes", where=str(path), fix="texts belong in corpus files"
            )
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise ExperimentError(
            f"{path.name} does not exist",
            where=str(path.absolute()),
            fix="run `amalgam init`, or name another file with -c FILE",
        ) from None
    except UnicodeDecodeError as error:
        raise ExperimentError(
            f"{path.name} is not UTF-8 (byte {error.start})", where=str(path), fix="save it as UTF-8"
        ) from None
    except IsADirectoryError:
        fix = f"name the file in it: -c {path / 'amalgam.yaml'}"
        raise ExperimentError(f"{path.name} is a folder, not an experiment file", where=str(path), fix=fix) from None
    except OSError as error:
        raise ExperimentError(
            f"{path.name} cannot be read: {error.strerror}", where=str(path), fix="check its permissions"
        ) from None


def to_python(node: yaml.Node, path: KeyPath, parsed: ParsedYaml, inside: tuple[int, ...]) -> Any:
    parsed.nodes += 1
    line = node.start_mark.line + 1
    parsed.lines.setdefault(path, line)
    if parsed.nodes > MOST_NODES or id(node) in inside:
        if not any("expands" in problem for problem in parsed.problems):
            parsed.problems.append(f"line {line}: aliases: the file expands to more than {MOST_NODES:,} values")
        return None
    within = (*inside, id(node))
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, parsed, within)
    if isinstance(node, yaml.SequenceNode):
        return _sequence(node, path, parsed, within)
    return _scalar(node, path, parsed)


def _sequence(node: yaml.SequenceNode, path: KeyPath, parsed: ParsedYaml, within: tuple[int, ...]) -> list[Any]:
    if node.tag != "tag:yaml.org,2002:seq":
        parsed.problems.append(f"{_at(node, path)}the tag {node.tag} is not allowed")
        return []
    return [to_python(item, (*path, index), parsed, within) for index, item in enumerate(node.value)]


def _at(node: yaml.Node, path: KeyPath) -> str:
    return f"line {node.start_mark.line + 1}{f', {dotted(path)}' if path else ''}: "


def _scalar(node: yaml.Node, path: KeyPath, parsed: ParsedYaml) -> Any:
    parsed.raw[path] = node.value
    if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.startswith("tag:yaml.org,2002:python"):
        parsed.problems.append(f"{_at(node, path)}the tag {node.tag} is not allowed; write plain values")
        return None
    if node.tag.endswith((":timestamp", ":binary")):
        return node.value
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError, LookupError, ArithmeticError):
        parsed.problems.append(f"{_at(node, path)}{node.value[:40]!r} does not read as {node.tag.split(':')[-1]}")
        return None


def _mapping(node: yaml.MappingNode, path: KeyPath, parsed: ParsedYaml, within: tuple[int, ...]) -> dict[str, Any]:
    if node.tag != "tag:yaml.org,2002:map":
        parsed.problems.append(f"{_at(node, path)}the tag {node.tag} is not allowed")
        return {}
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
            parsed.problems.append(f"{_at(key_node, path)}keys must be plain words")
            continue
        here = (*path, key)
        if key in values:
            parsed.problems.append(f"{_at(key_node, here)}given twice (first in line {parsed.lines[here]})")
            continue
        parsed.lines[here] = key_node.start_mark.line + 1
        values[key] = to_python(value_node, here, parsed, within)
    return values


def dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


COMMAND_LINE = 0  # line number of values that an override set


@dataclass(frozen=True)
class LoadedExperiment:
    experiment: ExperimentConfig
    path: Path
    overrides: dict[str, Any]

    @property
    def base(self) -> Path:
        """Returns the folder from which relative paths of the file start."""
        return self.path.parent.absolute()


ON_GENERATED = "on generated texts"
"""Key of a preset's further sections, which apply if texts are generated."""


def load_experiment(
    path: Path, overrides: Iterable[str] = (), *, presets: Mapping[str, Mapping[str, Any]] | None = None
) -> LoadedExperiment:
    parsed = read_yaml(path)
    applied = _apply_overrides(parsed, list(overrides))
    _refuse_secrets(parsed, parsed.data, ())
    data = _with_preset(parsed, presets or {})
    experiment: ExperimentConfig | None = None
    if parsed.nodes <= MOST_NODES:
        try:
            experiment = ExperimentConfig.model_validate(data)
        except ValidationError as error:
            parsed.problems += _problems(error, parsed, data)
        else:
            parsed.problems += [
                f"{_where(parsed, tuple(problem.field.split('.')))}{problem.message}"
                for problem in check_consistency(experiment)
            ]
    if experiment is None or parsed.problems:
        raise config_error(path, parsed.problems)
    return LoadedExperiment(experiment, path, applied)


# ---- overrides and presets


def _apply_overrides(parsed: ParsedYaml, overrides: list[str]) -> dict[str, Any]:
    applied: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key or any(not part for part in key.split(".")):
            a_file = override.endswith((".yaml", ".yml"))
            fix = f"name an experiment file with -c {override}" if a_file else "write field=value"
            parsed.problems.append(f"{override}: an override looks like targets.temperature=0.5; {fix}")
            continue
        path: KeyPath = tuple(int(part) if re.fullmatch("[0-9]{1,6}", part) else part for part in key.split("."))
        inner = _override_value(text)
        if _put(parsed, path, inner.data):
            applied[key] = inner.data
            parsed.raw |= {(*path, *place): raw for place, raw in inner.raw.items()}
            _from_command_line(parsed, path)
    return applied


def _override_value(text: str) -> ParsedYaml:
    """Parses the value of an override as YAML; a value that is not plain YAML is text."""
    inner = ParsedYaml()
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        inner.data = None if node is None else to_python(node, (), inner, ())
    except (yaml.YAMLError, RecursionError):
        return ParsedYaml(data=text)
    return ParsedYaml(data=text) if inner.problems else inner


def _from_command_line(parsed: ParsedYaml, path: KeyPath) -> None:
    for length in range(1, len(path)):
        parsed.lines.setdefault(path[:length], COMMAND_LINE)
    for place in [place for place in parsed.lines if place[: len(path)] == path]:
        del parsed.lines[place]
    parsed.lines[path] = COMMAND_LINE


def _put(parsed: ParsedYaml, path: KeyPath, value: Any) -> bool:
    place = parsed.data
    for index, part in enumerate(path):
        last = index == len(path) - 1
        if isinstance(place, list) and isinstance(part, int) and part < len(place):
            if last:
                place[part] = value
                return True
            place = place[part]
        elif isinstance(place, dict):
            if last:
                place[str(part)] = value
                return True
            if place.get(str(part)) is None:
                place[str(part)] = {}
            place = place[str(part)]
        else:
            parsed.problems.append(f"{dotted(path)}: there is no {dotted(path[: index + 1])} to override")
            return False
    return False


def _with_preset(parsed: ParsedYaml, presets: Mapping[str, Mapping[str, Any]]) -> Any:
    """Returns the data on top of the defaults that student.method sets."""
    data = parsed.data
    student = data.get("student") if isinstance(data, dict) else None
    method = student.get("method") if isinstance(student, dict) else None
    if method is None or not isinstance(method, str):
        return data
    name = re.sub(r"^teacher:.*", "teacher:<name>", method)
    if name not in presets:
        parsed.problems.append(
            f"{_where(parsed, ('student', 'method'))}no method {method!r}{_nearest(method, presets)}"
        )
        return data
    preset = {section: fields for section, fields in presets[name].items() if section != ON_GENERATED}
    if isinstance(data.get("generate"), dict):
        preset = _merged(preset, presets[name].get(ON_GENERATED, {}))
    return _merged(preset, data)


def _merged(under: Any, over: Any) -> Any:
    if isinstance(under, Mapping) and isinstance(over, Mapping):
        return {**under, **{key: _merged(under.get(key), value) for key, value in over.items()}}
    return over


# ---- messages


def _problems(error: ValidationError, parsed: ParsedYaml, data: Any) -> list[str]:
    problems: list[str] = []
    for item in error.errors(include_url=False, include_context=True):
        if not item["loc"]:
            problems.append(str(item["msg"]).removeprefix("Value error, "))
            continue
        path = _known_path(item["loc"], data, missing=item["type"] == "missing")
        problems.append(f"{_where(parsed, path)}{_message(dict(item), path, parsed)}")
    return list(dict.fromkeys(problems))


def _known_path(loc: tuple[int | str, ...], data: Any, *, missing: bool) -> KeyPath:
    """Returns pydantic's location without the names of union types and validators."""
    path: list[str | int] = []
    for index, part in enumerate(loc):
        if isinstance(data, dict) and (part in data or (missing and index == len(loc) - 1)):
            path.append(part)
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            path.append(part)
            data = data[part]
        else:
            break
    return tuple(path)


def _where(parsed: ParsedYaml, path: KeyPath) -> str:
    for length in range(len(path), 0, -1):
        line = parsed.lines.get(path[:length])
        if line is not None:
            return f"{f'line {line}' if line != COMMAND_LINE else 'command line'}, {dotted(path)}: "
    return f"{dotted(path)}: " if path else ""


def _message(item: dict[str, Any], path: KeyPath, parsed: ParsedYaml) -> str:
    special = SPECIAL.get(path)
    if special is not None:
        return special
    message_for = BY_KIND.get(item["type"])
    message = message_for(item, path) if message_for else None
    given = item["input"]
    unquoted = given is None or isinstance(given, bool | float | int)
    if message is None and unquoted and str(item["type"]).startswith("string"):
        message = f'is {json.dumps(given)}, not text: quote it ("{parsed.raw.get(path, given)}")'
    if message is None:
        plain = MUST_BE.get(str(item["type"]).partition("_")[0]) if item["type"].endswith(PARSED) else None
        text = plain or str(item["msg"]).removeprefix("Value error, ").replace("Input should", "must")
        shown = "" if isinstance(given, dict | list | BaseModel) else f" (given {given!r})"
        message = f"{text[0].lower()}{text[1:]}{shown}" if shown else text
    return message


SPECIAL: dict[KeyPath, str] = {
    ("schema_version",): f"this amalgam reads schema_version {SCHEMA_VERSION}; CHANGELOG.md lists the changes",
}


def _unknown_key(item: dict[str, Any], path: KeyPath) -> str:  # noqa: ARG001 - all have one signature
    renamed = RENAMED.get(dotted(path))
    if renamed is not None:
        return f"is named {renamed} since schema_version 2"
    return f"unknown key{_nearest(str(path[-1]), fields_at(path[:-1]))}"


def _bad_choice(item: dict[str, Any], path: KeyPath) -> str:  # noqa: ARG001 - all have one signature
    expected = str(item["ctx"]["expected"])
    choices = re.findall(r"'([^']*)'", expected)
    return f"is {item['input']!r}; must be one of {expected}{_nearest(str(item['input']), choices, listed=False)}"


def _bad_name(item: dict[str, Any], path: KeyPath) -> str:  # noqa: ARG001 - all have one signature
    return f"is {item['input']!r}; use letters, digits, '.', '_' and '-', starting with a letter or digit"


BY_KIND: dict[str, Callable[[dict[str, Any], KeyPath], str]] = {
    "extra_forbidden": _unknown_key,
    "missing": lambda item, path: "is required",  # noqa: ARG005 - all have one signature
    "literal_error": _bad_choice,
    "string_pattern_mismatch": _bad_name,
    "model_type": lambda item, path: "is a section: write its fields below it, indented, or leave it out",  # noqa: ARG005
}


PARSED = ("_parsing", "_type", "_from_float")

MUST_BE = {
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "list": "must be a list: [a, b]",
    "string": "must be text",
}
"""Messages by the first word of pydantic's error type, such as int_parsing or int_type."""


def _nearest(word: str, choices: Iterable[str], *, listed: bool = True) -> str:
    words = list(choices)
    close = difflib.get_close_matches(word, words, 1, 0.6)
    guess = f"; did you mean {close[0]!r}?" if close else ""
    return guess or (f"; known: {', '.join(words)}" if listed and words else "")


def fields_at(path: KeyPath) -> list[str]:
    """Returns the fields that the schema allows at a path."""
    model: Any = ExperimentConfig
    for part in path:
        if isinstance(model, type) and issubclass(model, BaseModel) and part in model.model_fields:
            model = _model_in(model.model_fields[str(part)].annotation)
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _model_in(annotation: Any) -> Any:
    if not isinstance(annotation, types.GenericAlias) and isinstance(annotation, type):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((model for option in typing.get_args(annotation) if (model := _model_in(option)) is not None), None)


def _refuse_secrets(parsed: ParsedYaml, value: Any, path: KeyPath) -> None:
    """Adds a problem for each likely secret, so that none reaches a manifest, a log or a message."""
    if isinstance(value, dict):
        for key, item in value.items():
            if SECRET.search(str(key)):
                parsed.problems.append(f"{_where(parsed, (*path, key))}looks like a secret")
            _refuse_secrets(parsed, item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_secrets(parsed, item, (*path, index))
    elif isinstance(value, str) and SECRET.search(value):
        parsed.problems.append(
            f"{_where(parsed, path)}looks like a secret (not shown); use `hf auth login` or environment variables"
        )
