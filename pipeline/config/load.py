"""Reads the experiment file and its overrides, and reports all problems at once with their lines.

PyYAML parses the file into nodes with lines. Its own constructors would stop at the first problem, accept keys that
are given twice, and drop the text from which a value was read.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ValidationError

from amalgam.pipeline.config.messages import (
    KeyPath,
    dotted,
    fields_at,
    hint,
    kinds_in,
    not_yaml,
    path_in,
    placed,
    validation_message,
)
from amalgam.pipeline.config.schema import NO_TEACHERS, SAFE_NAME, Checks, ExperimentConfig
from amalgam.pipeline.console import printable
from amalgam.pipeline.errors import COMMAND_LINE, ExperimentError, nearest, short_path
from amalgam.pipeline.input_files import FileMark, InputFile, is_texts, program_of
from amalgam.pipeline.secrets import has_secret, masked
from amalgam.pipeline.user_paths import check_utf8

MOST_BYTES = 1_000_000
MOST_VALUES = 100_000
MOST_LEVELS = 100
MOST_SHOWN = 500
"""Largest size of a file, number of its values with aliases, depth of its nesting, and characters of a message."""

ON_GENERATED = "on generated texts"
"""Key of a preset's further sections, which apply if texts are generated."""


class LoadedExperiment(NamedTuple):
    experiment: ExperimentConfig
    base: Path
    """Folder from which relative paths of the file start."""
    overrides: dict[str, Any]
    file: InputFile | None
    places: Mapping[str, str]
    """The place of each field that the file or an override sets, such as "line 3"."""


@dataclass(frozen=True)
class GivenExperiment:
    """An experiment without a file: its sections, and the folder from which its paths start."""

    data: Mapping[str, Any]
    base: Path

    @property
    def yaml(self) -> str:
        """Returns the content of an experiment file with these sections."""
        try:
            return yaml.safe_dump(dict(self.data), sort_keys=False, allow_unicode=True, width=120)
        except yaml.YAMLError as error:
            value = error.args[-1]
            what = f"a {type(value).__name__} is no plain value: {printable(str(value)[:80], keep='')}"
            fix = "use text, numbers, lists and dicts in the sections; save a frame as a file, and name the file"
            raise ExperimentError(what, where=GIVEN, fix=fix) from None


ExperimentSource = Path | GivenExperiment

GIVEN = "Experiment(...)"
"""Name of an experiment without a file in messages."""


def load_experiment(  # noqa: PLR0913 - what the stages add to the schema
    source: ExperimentSource,
    overrides: Iterable[str] = (),
    *,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    default: str | None = None,
    names: Mapping[str, Iterable[str]] | None = None,
    checks: Callable[[ExperimentConfig], Checks] = lambda experiment: iter(()),  # noqa: ARG005
) -> LoadedExperiment:
    """Loads an experiment: `presets` by student.method, the `names` of fields by path, and `checks` of all fields.

    The `default` preset is that of a file which sets neither student.method nor one of the fields in `names`. An
    override of student.method replaces these fields of the file too.
    """
    parsed = _parse(source)
    _name_teachers(parsed.data)
    chosen = any(_value_at(parsed.data, path) is not None for path in names or {})  # an override keeps the method
    applied: dict[str, Any] = {}
    given = list(overrides)
    _check_quoted(given)
    for override in given:
        applied |= parsed.override(override)
    method = _value_at(parsed.data, "student.method")
    if parsed.places.get(("student", "method")) == COMMAND_LINE and (presets or {}).get(str(method)):
        parsed.drop_those_of_the_file(names or {})
    _name_teachers(parsed.data)  # those of an override
    data = _with_preset(parsed, presets or {}, None if chosen else default)
    try:
        experiment = ExperimentConfig.model_validate(data, context=names)
    except ValidationError as error:
        for place, message in _messages(parsed, data, error):
            parsed.add(place, message)
    else:
        for contradiction, changed, message in checks(experiment):
            if contradiction:
                is_name = changed == "teachers"
                parsed.add(_repeated_name(parsed, experiment) if is_name else tuple(changed.split(".")), message)
        if not parsed.problems:
            base = source.parent.absolute() if isinstance(source, Path) else source.base
            places = {dotted(path): place for path, place in parsed.places.items()}
            return LoadedExperiment(experiment, base, applied, parsed.file, places)
    raise _config_error(source, parsed.problems)


def _messages(parsed: ParsedFile, data: Any, error: ValidationError) -> list[tuple[KeyPath, str]]:
    """Returns the place and the message of each problem; a field that takes a number or a word has one."""
    messages = list[tuple[KeyPath, str]]()
    for item in error.errors(include_url=False):
        place = path_in(data, item["loc"], missing=item["type"] == "missing")
        message = validation_message(item, place, parsed.raw.get(place))
        if item["type"] == "literal_error" and messages and messages[-1][0] == place:
            is_close = "did you mean" in message
            messages[-1] = place, message if is_close else f"{messages[-1][1]}, or {item['ctx']['expected']}"
        else:
            messages.append((place, message))
    return messages


def _check_quoted(overrides: Sequence[str]) -> None:
    """Refuses an override that the shell has divided at the blanks within its brackets."""
    for index, text in enumerate(overrides[:-1]):
        words = itertools.accumulate(overrides[index:], "{} {}".format)
        opened = (whole for whole in words if sum(map(whole.count, "[{")) <= sum(map(whole.count, "]}")))
        whole = next(opened, text)
        if "=" in text and whole != text and "=" not in overrides[index + 1]:
            what = f"the shell has divided the override of {text.partition('=')[0]} at its blanks"
            raise ExperimentError(what, where=COMMAND_LINE, fix=f"put it in quotes: {masked(shlex.quote(whole))}")


ARGUMENTS = "the arguments texts, validation and test are the fields of corpus"


def _config_error(source: ExperimentSource, problems: Iterable[str]) -> ExperimentError:
    lines = [f"  {masked(problem)[:MOST_SHOWN]}" for problem in dict.fromkeys(problems)]
    name, where = (source.name, str(source)) if isinstance(source, Path) else (GIVEN, None)
    file = ", or `amalgam init` for a commented file" if where else f"; {ARGUMENTS}"
    if all(line.startswith(f"  {COMMAND_LINE}") for line in lines):
        lines = [line.replace(f"{COMMAND_LINE}, ", "", 1) for line in lines]
        name, where, file = COMMAND_LINE, COMMAND_LINE, ""
    what = "\n".join([f"{name}: {len(lines)} problem{'s' if len(lines) > 1 else ''}", *lines])
    return ExperimentError(what, where=where, fix=f"run `amalgam schema` for all fields{file}")


def template(teachers: str = "") -> str:
    """Returns the commented amalgam.yaml of `amalgam init`; `teachers` replaces the section of that name."""
    text = Path(__file__).with_name("template.yaml").read_text("utf-8")
    if teachers:
        before, _, rest = text.partition("\nteachers: ")
        text = "\n".join([f"{before}\n{teachers}", rest.partition("\n\n")[2]])
    return text


# ---- from text to plain data

PLAIN_TAGS = {
    yaml.MappingNode: ("map",),
    yaml.SequenceNode: ("seq",),
    yaml.ScalarNode: ("str", "null", "bool", "int", "float", "timestamp", "binary"),
}

TAG = "tag:yaml.org,2002:"

OCTAL = re.compile(r"[-+]?0[0-7_]+")


@dataclass
class ParsedFile:
    """Holds the data of a file, the place and the raw text of each value, and the problems."""

    data: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)
    """The values' places, such as "line 3"."""
    raw: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    values: int = 0
    file: InputFile | None = None

    def add(self, path: KeyPath, problem: str) -> None:
        """Adds a problem with the place of the value or of the nearest section around it."""
        prefixes = (path[:length] for length in range(len(path), -1, -1))
        place = next((self.places[prefix] for prefix in prefixes if prefix in self.places), "")
        self.problems.append(placed(place, path, problem))

    def read(self, node: yaml.Node, path: KeyPath = ()) -> Any:
        """Returns the plain value of a node, and keeps its place."""
        self.places.setdefault(path, f"line {node.start_mark.line + 1}")
        self.values += 1
        if self.values > MOST_VALUES or len(path) > MOST_LEVELS:
            what = f"aliases or brackets expand to more than {MOST_VALUES:,} values or {MOST_LEVELS} levels"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)
        if node.tag.removeprefix(TAG) not in PLAIN_TAGS[type(node)]:
            self.add(path, f"the tag {node.tag} is not allowed; write or quote a plain value")
        elif isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        elif isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        elif isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        return None

    def refuse_secret(self, text: str, path: KeyPath) -> None:
        if has_secret(text):
            self.add(path, "looks like a secret (not shown); use `hf auth login` or environment variables")

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        self.raw[path] = node.value
        self.refuse_secret(node.value, path)
        if node.tag in {f"{TAG}timestamp", f"{TAG}binary"}:
            return node.value
        if node.tag in {f"{TAG}int", f"{TAG}float"} and (":" in node.value or OCTAL.fullmatch(node.value)):
            base = "base 60" if ":" in node.value else "base 8"
            self.add(path, f"YAML reads {node.value} as a number of {base}; write it in decimals, or quote it as text")
            return None
        try:
            return yaml.SafeLoader("").construct_object(node)
        except (yaml.YAMLError, ValueError, LookupError, ArithmeticError):
            self.add(path, f"{node.value[:40]!r} does not read as {node.tag.removeprefix(TAG)}")
            return None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = f"line {key_node.start_mark.line + 1}"
            key = str(key_node.value)
            here = (*path, key)
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == f"{TAG}merge":
                self.problems.append(placed(line, path, "keys must be plain words"))
            elif key in values:
                self.problems.append(placed(line, here, f"given twice (first in {self.places[here]})"))
            else:
                self.places[here] = line
                self.refuse_secret(key, here)
                values[key] = self.read(value_node, here)
        return values

    def override(self, text: str) -> dict[str, Any]:
        """Sets the value of FIELD=VALUE, and returns both; a value that is not plain YAML is text.

        A mapping for a section changes the fields that it names, and the section's others stay.
        """
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            a_file = text.endswith((".yaml", ".yml"))
            is_field = text.rpartition(".")[2] in fields_at(tuple(text.split(".")[:-1]))
            fix = f"write {text}=VALUE" if is_field else "write field=value"
            fix = f"name an experiment file with -c {shlex.quote(text)}" if a_file else fix
            self.problems.append(f"{COMMAND_LINE}, {text}: an override looks like targets.temperature=0.5; {fix}")
            return {}
        path = tuple(int(part) if re.fullmatch("[0-9]{1,6}", part) else part for part in key.split("."))
        inner = ParsedFile()
        try:
            node = yaml.compose(value, Loader=yaml.SafeLoader)
            plain = None if node is None else inner.read(node, path)
        except (yaml.YAMLError, RecursionError):
            inner.problems.append("not YAML")
        else:
            if isinstance(plain, dict) and not value.lstrip().startswith("{") and _is_text(path):  # such as "word: "
                inner, plain = ParsedFile(), value
            elif isinstance(plain, bool | int | float) and _is_text(path):  # a shell has removed the quotes
                plain = inner.raw[path]
        values = _fields_of(path, value if inner.problems else plain)
        if values == {path: {}} and fields_at(path) and isinstance(_value_at(self.data, dotted(path)), dict):
            return {}
        for field_path, field_value in values.items():
            if not self._put(field_path, field_value):
                return {}
            size = len(field_path)
            kept = {earlier: place for earlier, place in self.places.items() if earlier[:size] != field_path}
            sections = {field_path[:length]: COMMAND_LINE for length in range(1, size)}
            self.places = {**sections, **kept, field_path: COMMAND_LINE}
        self.places |= dict.fromkeys(inner.places, COMMAND_LINE)
        self.raw |= inner.raw
        self.refuse_secret(text, path)
        return {dotted(field_path): field_value for field_path, field_value in values.items()}

    def drop_those_of_the_file(self, fields: Iterable[str]) -> None:
        """Removes fields such as `targets.mode`, unless an override sets them."""
        for section, name in (path.split(".") for path in fields):
            overridden = self.places.get((section, name)) == COMMAND_LINE
            if isinstance(self.data.get(section), dict) and not overridden:
                self.data[section].pop(name, None)
                self.places.pop((section, name), None)
                self.raw.pop((section, name), None)

    def _put(self, path: KeyPath, value: Any) -> bool:
        """Sets the value, and creates the sections around it; returns False if the path leads nowhere."""
        holder: Any = self.data
        for index, part in enumerate(path):
            if isinstance(holder, dict):
                part = str(part)  # noqa: PLW2901 - a key that consists of digits
                holder.setdefault(part, None)
            elif not (isinstance(holder, list) and isinstance(part, int) and part < len(holder)):
                count = f"; {dotted(path[:index])} has {len(holder)}, from 0 on" if isinstance(holder, list) else ""
                none = f"there is no {dotted(path[: index + 1])} to override{count}"
                self.problems.append(f"{COMMAND_LINE}, {dotted(path)}: {none}")
                return False
            if index == len(path) - 1:
                holder[part] = value
            elif holder[part] is None:
                holder[part] = {}
            holder = holder[part]
        return True


def _fields_of(path: KeyPath, value: Any) -> dict[KeyPath, Any]:
    """Returns the fields in a mapping for a section, by path; any other value by its own path."""
    if not (isinstance(value, dict) and value and path[0] in SECTIONS and fields_at(path)):
        return {path: value}
    inner = (_fields_of((*path, name), inner_value) for name, inner_value in value.items())
    return {field_path: field_value for fields in inner for field_path, field_value in fields.items()}


def _is_text(path: KeyPath) -> bool:
    """Returns whether the schema allows text at this path, and no mapping."""
    field = fields_at(path[:-1]).get(str(path[-1]))
    kinds = set(kinds_in(field.annotation)) if field else set()
    return str in kinds and not any(kind is dict or issubclass(kind, BaseModel) for kind in kinds)


def _value_at(data: Any, path: str) -> Any:
    for part in path.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _parse(source: ExperimentSource) -> ParsedFile:
    parsed = ParsedFile()
    if isinstance(source, Path):
        text, parsed.file = _read(source)
    else:
        text = source.yaml
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            raise _config_error(source, ["no section such as `corpus:`; is it an experiment file?"])
        parsed.data = parsed.read(node) or {}
    except yaml.MarkedYAMLError as error:
        raise _config_error(source, [*parsed.problems, not_yaml(error, text.splitlines())]) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise _config_error(source, [f"not YAML: {str(error).splitlines()[0]}"]) from None
    if not isinstance(source, Path):
        parsed.places.clear()  # its lines mean nothing to the caller
    return parsed


UNREADABLE = {
    FileNotFoundError: ("does not exist", "run `amalgam init`, or name another file with -c FILE"),
    IsADirectoryError: ("is a folder, not an experiment file", ""),
    UnicodeDecodeError: ("is not UTF-8 (byte {error.start})", "save it as UTF-8"),
    OSError: ("cannot be read ({error.strerror})", "check its permissions"),
}
"""Messages and fixes by the kind of error; the first that fits."""


def _read(path: Path) -> tuple[str, InputFile]:
    check_utf8(path.absolute())
    where = str(path.absolute())
    name = short_path(path.name or path.absolute().name)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            fix = "save the experiment in a file, and name it with -c FILE"
            raise ExperimentError(f"{name} is a pipe or a device, not a file", where=short_path(where), fix=fix)
        if path.stat().st_size > MOST_BYTES:
            what = f"{path.name} is larger than {MOST_BYTES:,} bytes"
            raise ExperimentError(what, where=where, fix="move the texts into files, and name these in corpus.train")
        mark, content = FileMark.of(path), path.read_bytes()
        text = io.TextIOWrapper(io.BytesIO(content), "utf-8").read()
    except (OSError, UnicodeDecodeError) as error:
        what, fix = next(words for kind, words in UNREADABLE.items() if isinstance(error, kind))
        what = what.format(error=error)
        is_folder = isinstance(error, IsADirectoryError)
        if is_folder:
            fix = f"run `amalgam init {shlex.quote(str(path))}`, which writes one into it"
        if (is_folder or isinstance(error, FileNotFoundError)) and (near := _files_like(path)):
            fix = f"did you mean -c {shlex.quote(near[0])}?" + ("" if is_folder else f" else {fix}")
        raise ExperimentError(f"{name} {what}", where=short_path(where), fix=short_path(fix)) from None
    return text, InputFile(path.absolute(), mark, hashlib.sha256(content).hexdigest())


def _files_like(path: Path) -> list[str]:
    """Returns the YAML files in a folder; for a path without a file, those like it in its folder, or the only one."""
    folder = path if path.is_dir() else path.parent
    names = sorted(file.name for file in folder.glob("*.y*ml")) if folder.is_dir() else []
    near = names if path.is_dir() or len(names) == 1 else nearest(path.name, names, ratio=0.6)
    return [str(folder / name) for name in near]


def _name_teachers(data: dict[str, Any]) -> None:
    """Makes a section of each teacher that is given by its model alone, and names teachers after their models."""
    given = data.get("teachers")
    if not isinstance(given, list):
        return
    entries = [{"model": entry} if isinstance(entry, str) else entry for entry in given]
    taken = [entry.get("name") for entry in entries if isinstance(entry, dict)]
    for index, entry in enumerate(entries):
        if isinstance(entry, dict) and not entry.get("name") and isinstance(entry.get("model"), str):
            entries[index] = {**entry, "name": name_of(entry["model"], taken)}
            taken.append(entries[index]["name"])
    data["teachers"] = entries


def _repeated_name(parsed: ParsedFile, experiment: ExperimentConfig) -> KeyPath:
    """Returns the path of an override that repeats a teacher's name; else that of all teachers."""
    names = [teacher.name for teacher in experiment.teachers]
    paths: list[KeyPath] = [("teachers", index, "name") for index, name in enumerate(names) if names.count(name) > 1]
    return next((path for path in paths if parsed.places.get(path) == COMMAND_LINE), ("teachers",))


def name_of(given: str, taken: Collection[object]) -> str:
    """Returns a name made of the last part of the reference, with a number if it is taken.

    A checkpoint of a Trainer, run/checkpoint-500, is run-500: checkpoints of several runs have one name. A file of
    predictions has no suffix in its name.
    """
    bare = re.sub(r"(?<=[^./])/checkpoint-(?=\d+$)", "-", (given.partition(":")[2] or given).rstrip("/"))
    last = bare.rpartition("/")[2]
    if is_texts(Path(last)):
        last = Path(last.removesuffix(Path(last).suffix) if program_of(Path(last)) else last).stem
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-._")[:60]
    stem = stem if re.match(SAFE_NAME, stem) else "teacher"
    names = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
    return next(name for name in names if name not in (*taken, *NO_TEACHERS))


def note_on_name(model: str, name: str) -> str | None:
    """Returns a note if the name of a teacher lacks letters of its model."""
    if PurePath(model).name.isascii():
        return None
    return f"teacher {printable(model)} is named {name}: names have ASCII letters; set `name`"


SECTIONS = frozenset(ExperimentConfig.model_fields) - {"teachers"}
"""Fields of the file that may be sections; teachers are a list."""


def _with_preset(parsed: ParsedFile, presets: Mapping[str, Mapping[str, Any]], default: str | None) -> Any:
    """Returns the data on top of the defaults that student.method, or else `default`, sets."""
    given = _value_at(parsed.data, "student.method")
    method = default if given is None else given
    if not isinstance(method, str):
        return parsed.data
    preset = presets.get(re.sub(r"^teacher:.*", "teacher:<name>", method))
    if preset is None:
        parsed.add(("student", "method"), f"no method {method!r}{hint(method, presets)}")
        return parsed.data
    defaults = {section: fields for section, fields in preset.items() if section != ON_GENERATED}
    if isinstance(parsed.data.get("generate"), dict):
        defaults = _merged(defaults, preset.get(ON_GENERATED, {}))
    return _merged(_merged({"student": {"method": method}}, defaults), parsed.data)


def _merged(under: Any, over: Any) -> Any:
    if isinstance(under, Mapping) and isinstance(over, Mapping):
        return {**under, **{key: _merged(under.get(key), value) for key, value in over.items()}}
    return over
