"""Reading the experiment file: its YAML (plain_yaml.py), overrides on top, every problem at once."""

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

SECRET = re.compile(r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|://[^/\s]*:[^/\s@]*@|\bAKIA[0-9A-Z]{16}\b")


Place = tuple[str | int, ...]


@dataclass
class ParsedYaml:
    """What was read so far: the data, each path's line and raw scalar, and what is wrong."""

    data: Any = None
    lines: dict[Place, int] = field(default_factory=dict)
    raw: dict[Place, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    nodes: int = 0


def refusal(path: Path, problems: list[str]) -> ExperimentError:
    problems = [SECRET.sub("(not shown)", problem)[:MOST_SHOWN] for problem in problems]
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    return ExperimentError(
        f"{path.name}: {count}\n" + "\n".join(f"  {problem}" for problem in problems),
        where=str(path),
        fix="`amalgam schema` lists every field; `amalgam init` writes a commented file",
    )


def read_yaml(path: Path) -> ParsedYaml:
    text = _text(path)
    reading = ParsedYaml()
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise refusal(path, [_not_yaml(error, text.splitlines())]) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise refusal(path, [f"not YAML: {str(error).splitlines()[0]}"]) from None
    if not isinstance(node, yaml.MappingNode):
        raise refusal(path, ["the file must be a mapping of sections; is it empty?"])
    try:
        reading.data = construct(node, (), reading, ())
    except RecursionError:
        raise refusal(path, ["nested too deeply"]) from None
    return reading


def _not_yaml(error: yaml.MarkedYAMLError, lines: list[str]) -> str:
    """In words, with the line: the parser names the place where it could not go on, which may be a line too late."""
    mark, said = error.problem_mark, error.problem or "not YAML"
    if mark is None:
        return said
    begun = next((number for number in range(mark.line, 0, -1) if lines[number - 1 : number] != [""]), 0)
    for number in (mark.line + 1, begun):
        if re.match(r"\s*(- )?[A-Za-z_]+:[^\s:/]", "".join(lines[number - 1 : number]) if number else ""):
            line = lines[number - 1].partition(" #")[0].strip()
            return f"line {number}: a space is missing after the colon: {line}"
    words = next((words for piece, words in NOT_YAML.items() if piece in said), said)
    return f"line {mark.line + 1}, column {mark.column + 1}: {words}"


NOT_YAML = {
    "\\t": "a tab: YAML is indented with spaces",
    "mapping values": "a second colon in one line: quote the value, or begin a new line",
    "another document": "`---` begins a second document: one file is one experiment",
    "<document start>": "no fields are written like this: each is `name: value`",
    "block": "it does not go on from the lines above: indent it as they are, with `- ` if it begins an item",
}
"""What the parser says has one of these pieces in it, and what that means to a person."""


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ExperimentError(
                f"{path.name} is larger than {MOST_BYTES:,} bytes", where=str(path), fix="texts belong in corpus files"
            )
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise ExperimentError(
            f"there is no {path.name}",
            where=str(path.absolute()),
            fix="`amalgam init` writes one; -c FILE names another",
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


def construct(node: yaml.Node, path: Place, reading: ParsedYaml, inside: tuple[int, ...]) -> Any:
    reading.nodes += 1
    line = node.start_mark.line + 1
    reading.lines.setdefault(path, line)
    if reading.nodes > MOST_NODES or id(node) in inside:
        if not any("expands" in problem for problem in reading.problems):
            reading.problems.append(f"line {line}: aliases: the file expands to more than {MOST_NODES:,} values")
        return None
    within = (*inside, id(node))
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, reading, within)
    if isinstance(node, yaml.SequenceNode):
        return _sequence(node, path, reading, within)
    return _scalar(node, path, reading)


def _sequence(node: yaml.SequenceNode, path: Place, reading: ParsedYaml, within: tuple[int, ...]) -> list[Any]:
    if node.tag != "tag:yaml.org,2002:seq":
        reading.problems.append(f"{_at(node, path)}the tag {node.tag} is not allowed")
        return []
    return [construct(item, (*path, index), reading, within) for index, item in enumerate(node.value)]


def _at(node: yaml.Node, path: Place) -> str:
    return f"line {node.start_mark.line + 1}{f', {dotted(path)}' if path else ''}: "


def _scalar(node: yaml.Node, path: Place, reading: ParsedYaml) -> Any:
    reading.raw[path] = node.value
    if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.startswith("tag:yaml.org,2002:python"):
        reading.problems.append(f"{_at(node, path)}the tag {node.tag} is not allowed; write plain values")
        return None
    if node.tag.endswith((":timestamp", ":binary")):
        return node.value
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError, LookupError, ArithmeticError):
        reading.problems.append(f"{_at(node, path)}{node.value[:40]!r} does not read as {node.tag.split(':')[-1]}")
        return None


def _mapping(node: yaml.MappingNode, path: Place, reading: ParsedYaml, within: tuple[int, ...]) -> dict[str, Any]:
    if node.tag != "tag:yaml.org,2002:map":
        reading.problems.append(f"{_at(node, path)}the tag {node.tag} is not allowed")
        return {}
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
            reading.problems.append(f"{_at(key_node, path)}keys must be plain words")
            continue
        here = (*path, key)
        if key in found:
            reading.problems.append(f"{_at(key_node, here)}given twice (first in line {reading.lines[here]})")
            continue
        reading.lines[here] = key_node.start_mark.line + 1
        found[key] = construct(value_node, here, reading, within)
    return found


def dotted(path: Place) -> str:
    return ".".join(str(part) for part in path)


COMMAND_LINE = 0  # stands for a line's number where an override, not the file, said it


@dataclass(frozen=True)
class LoadedExperiment:
    experiment: ExperimentConfig
    path: Path
    overrides: dict[str, Any]

    @property
    def base(self) -> Path:
        """What the file's relative paths start from."""
        return self.path.parent.absolute()


ON_GENERATED = "on generated texts"
"""In the place of a section's name in a preset: what is set besides where texts are generated."""


def load_experiment(
    path: Path, overrides: Iterable[str] = (), *, presets: Mapping[str, Mapping[str, Any]] | None = None
) -> LoadedExperiment:
    reading = read_yaml(path)
    said = _apply_overrides(reading, list(overrides))
    _refuse_secrets(reading, reading.data, ())
    data = _with_preset(reading, presets or {})
    experiment: ExperimentConfig | None = None
    if reading.nodes <= MOST_NODES:
        try:
            experiment = ExperimentConfig.model_validate(data)
        except ValidationError as error:
            reading.problems += _problems(error, reading, data)
        else:
            reading.problems += [
                f"{_where(reading, tuple(problem.field.split('.')))}{problem.message}"
                for problem in check_consistency(experiment)
            ]
    if experiment is None or reading.problems:
        raise refusal(path, reading.problems)
    return LoadedExperiment(experiment, path, said)


# ---- overrides and presets


def _apply_overrides(reading: ParsedYaml, overrides: list[str]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key or any(not part for part in key.split(".")):
            a_file = override.endswith((".yaml", ".yml"))
            meant = f"an experiment file is named by -c: -c {override}" if a_file else "write field=value"
            reading.problems.append(f"{override}: an override looks like targets.temperature=0.5; {meant}")
            continue
        path: Place = tuple(int(part) if re.fullmatch("[0-9]{1,6}", part) else part for part in key.split("."))
        inner = _override_value(text)
        if _put(reading, path, inner.data):
            said[key] = inner.data
            reading.raw |= {(*path, *place): raw for place, raw in inner.raw.items()}
            _from_command_line(reading, path)
    return said


def _override_value(text: str) -> ParsedYaml:
    """Read like a value in the file; what is not YAML is text."""
    inner = ParsedYaml()
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        inner.data = None if node is None else construct(node, (), inner, ())
    except (yaml.YAMLError, RecursionError):
        return ParsedYaml(data=text)
    return ParsedYaml(data=text) if inner.problems else inner


def _from_command_line(reading: ParsedYaml, path: Place) -> None:
    for length in range(1, len(path)):
        reading.lines.setdefault(path[:length], COMMAND_LINE)
    for place in [place for place in reading.lines if place[: len(path)] == path]:
        del reading.lines[place]
    reading.lines[path] = COMMAND_LINE


def _put(reading: ParsedYaml, path: Place, value: Any) -> bool:
    place = reading.data
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
            reading.problems.append(f"{dotted(path)}: there is no {dotted(path[: index + 1])} to override")
            return False
    return False


def _with_preset(reading: ParsedYaml, presets: Mapping[str, Mapping[str, Any]]) -> Any:
    """student.method names defaults; what the file or the command line says stands over them."""
    data = reading.data
    student = data.get("student") if isinstance(data, dict) else None
    method = student.get("method") if isinstance(student, dict) else None
    if method is None or not isinstance(method, str):
        return data
    name = re.sub(r"^teacher:.*", "teacher:<name>", method)
    if name not in presets:
        reading.problems.append(
            f"{_where(reading, ('student', 'method'))}no method {method!r}{_nearest(method, presets)}"
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


# ---- what is wrong, for a person


def _problems(error: ValidationError, reading: ParsedYaml, data: Any) -> list[str]:
    found: list[str] = []
    for item in error.errors(include_url=False, include_context=True):
        if not item["loc"]:
            found.append(str(item["msg"]).removeprefix("Value error, "))
            continue
        path = _known_path(item["loc"], data, missing=item["type"] == "missing")
        found.append(f"{_where(reading, path)}{_message(dict(item), path, reading)}")
    return list(dict.fromkeys(found))


def _known_path(loc: tuple[int | str, ...], data: Any, *, missing: bool) -> Place:
    """Pydantic's location without the names of union arms and validators."""
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


def _where(reading: ParsedYaml, path: Place) -> str:
    for length in range(len(path), 0, -1):
        line = reading.lines.get(path[:length])
        if line is not None:
            return f"{f'line {line}' if line != COMMAND_LINE else 'command line'}, {dotted(path)}: "
    return f"{dotted(path)}: " if path else ""


def _message(item: dict[str, Any], path: Place, reading: ParsedYaml) -> str:
    special = SPECIAL.get(path)
    if special is not None:
        return special
    say = BY_KIND.get(item["type"])
    said = say(item, path) if say else None
    given = item["input"]
    unquoted = given is None or isinstance(given, bool | float | int)
    if said is None and unquoted and str(item["type"]).startswith("string"):
        said = f'is {json.dumps(given)}, not text: quote it ("{reading.raw.get(path, given)}")'
    if said is None:
        plain = MUST_BE.get(str(item["type"]).partition("_")[0]) if item["type"].endswith(PARSED) else None
        message = plain or str(item["msg"]).removeprefix("Value error, ").replace("Input should", "must")
        shown = "" if isinstance(given, dict | list | BaseModel) else f" (given {given!r})"
        said = f"{message[0].lower()}{message[1:]}{shown}" if shown else message
    return said


SPECIAL: dict[Place, str] = {
    ("schema_version",): f"this amalgam reads schema_version {SCHEMA_VERSION}; CHANGELOG.md says what changed since",
}


def _unknown_key(item: dict[str, Any], path: Place) -> str:  # noqa: ARG001 - one shape for all
    renamed = RENAMED.get(dotted(path))
    if renamed is not None:
        return f"is named {renamed} since schema_version 2"
    return f"unknown key{_nearest(str(path[-1]), fields_at(path[:-1]))}"


def _bad_choice(item: dict[str, Any], path: Place) -> str:  # noqa: ARG001 - one shape for all
    expected = str(item["ctx"]["expected"])
    choices = re.findall(r"'([^']*)'", expected)
    return f"is {item['input']!r}; must be one of {expected}{_nearest(str(item['input']), choices, known=False)}"


def _bad_name(item: dict[str, Any], path: Place) -> str:  # noqa: ARG001 - one shape for all
    return f"is {item['input']!r}; use letters, digits, '.', '_' and '-', starting with a letter or digit"


BY_KIND: dict[str, Callable[[dict[str, Any], Place], str]] = {
    "extra_forbidden": _unknown_key,
    "missing": lambda item, path: "is required",  # noqa: ARG005 - one shape for all
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
"""By how the kind of a wrong value begins: int_parsing, int_type, int_from_float."""


def _nearest(word: str, known_words: Iterable[str], *, known: bool = True) -> str:
    words = list(known_words)
    close = difflib.get_close_matches(word, words, 1, 0.6)
    guess = f"; did you mean {close[0]!r}?" if close else ""
    return guess or (f"; known: {', '.join(words)}" if known and words else "")


def fields_at(path: Place) -> list[str]:
    """The fields that the schema allows at a path."""
    model: Any = ExperimentConfig
    for part in path:
        if isinstance(model, type) and issubclass(model, BaseModel) and part in model.model_fields:
            model = _model_in(model.model_fields[str(part)].annotation)
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _model_in(annotation: Any) -> Any:
    if not isinstance(annotation, types.GenericAlias) and isinstance(annotation, type):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((found for arm in typing.get_args(annotation) if (found := _model_in(arm)) is not None), None)


def _refuse_secrets(reading: ParsedYaml, value: Any, path: Place) -> None:
    """A secret never reaches a manifest, a log line or a message: it is refused where it stands, unread."""
    if isinstance(value, dict):
        for key, item in value.items():
            if SECRET.search(str(key)):
                reading.problems.append(f"{_where(reading, (*path, key))}looks like a secret")
            _refuse_secrets(reading, item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_secrets(reading, item, (*path, index))
    elif isinstance(value, str) and SECRET.search(value):
        reading.problems.append(
            f"{_where(reading, path)}looks like a secret (not shown); use `hf auth login` or environment variables"
        )
