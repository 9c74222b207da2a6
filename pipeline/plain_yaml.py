"""The experiment file's YAML: what it says, in which line, and what is no YAML, in words.

Only plain YAML is read: no tags, no duplicate keys, bounded in size and in what aliases may expand to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from amalgam.pipeline.errors import ExperimentError

MOST_BYTES = 1_000_000
MOST_NODES = 100_000
MOST_SHOWN = 500
SECRET = re.compile(r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|://[^/\s]*:[^/\s@]*@|\bAKIA[0-9A-Z]{16}\b")

Place = tuple[str | int, ...]


@dataclass
class Reading:
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


def read_yaml(path: Path) -> Reading:
    text = _text(path)
    reading = Reading()
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


def construct(node: yaml.Node, path: Place, reading: Reading, inside: tuple[int, ...]) -> Any:
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


def _sequence(node: yaml.SequenceNode, path: Place, reading: Reading, within: tuple[int, ...]) -> list[Any]:
    if node.tag != "tag:yaml.org,2002:seq":
        reading.problems.append(f"{_at(node, path)}the tag {node.tag} is not allowed")
        return []
    return [construct(item, (*path, index), reading, within) for index, item in enumerate(node.value)]


def _at(node: yaml.Node, path: Place) -> str:
    return f"line {node.start_mark.line + 1}{f', {dotted(path)}' if path else ''}: "


def _scalar(node: yaml.Node, path: Place, reading: Reading) -> Any:
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


def _mapping(node: yaml.MappingNode, path: Place, reading: Reading, within: tuple[int, ...]) -> dict[str, Any]:
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
