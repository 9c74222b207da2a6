"""Generates the reference pages from the code when the site is built.

MkDocs calls `on_files` (mkdocs.yml, hooks). A new column, error or reason without an entry here stops the build.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from amalgam.data import parquet
from amalgam.data.parquet import Column
from amalgam.pipeline import errors
from amalgam.pipeline.config.load import ON_GENERATED
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.execution.plan import Reason
from amalgam.stages.methods import METHODS, NAMES, value_texts

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

FILES = {
    "CORPUS": "`read-corpus/part-*/*/[!s]*.parquet`",
    "SKIPPED": "`read-corpus/part-*/*/skipped.parquet`",
    "WRITTEN": "`generate/FAMILY/units/*.parquet`",
    "GENERATED": "`generate/FINGERPRINT/texts-*.parquet`",
    "CACHE_TEXTS": "`cache-teachers/FAMILY/units/*.parquet`",
    "CACHE_LOGITS": "the same, in files with logits without dropout",
    "CACHE_PASSES": "the same, in files of passes",
    "STOPS": "the same, of decisions with `cache.adaptive`",
    "STOP_CONFIDENCES": "the same, of the last decision",
    "STOP_REGRESSIONS": "the same, of the regressions behind the decisions",
    "FEATURES": "`cache-features/FAMILY/units/*.parquet` of an encoder",
    "SIMILARITIES": "`report/zero-shot-*/*.parquet`",
    "STATES": "`cache-features/FAMILY/units/*/keys.parquet` of a teacher",
    "TOKENS": "`tokens/FINGERPRINT/*.parquet`",
    "TOKEN_TYPES": "the same, for models that distinguish the two texts of a pair",
    "WEIGHTS": "`weigh-teachers/FINGERPRINT/units/*.parquet`; of the first of several blocks `units/*/weights.parquet`",
    "LABELLED_WEIGHTS": "the same, of the first block, where the experiment has `labels`",
    "UNKNOWN": "output of `amalgam predict --unknown --out`, in addition",
    "TARGETS": "`build-targets/FINGERPRINT/units/*.parquet`",
    "PREDICTIONS": "output of `amalgam predict --out`, in addition to the columns of `--top` and `--explain`",
}
"""Maps the column sets of data/parquet.py to their files in the workspace."""

REASONS = {
    "first-run": "this workspace has no result of the stage",
    "config": "fields of the experiment changed; the message names the field",
    "input": "texts or model files changed",
    "upstream": "an earlier stage will run or has a new result",
    "code": "this version of amalgam computes it differently",
    "missing": "units are missing: an interrupted run, another part, a deleted file",
    "damaged": "a stored file differs from its digest",
    "forced": "the command has `--force`",
}

WHEN = {
    "AmalgamError": "the base class of all errors; also a disk error, with the path",
    "ExperimentError": "an error in the experiment file or the command line",
    "ModelError": "a model of the experiment cannot be used",
    "DataError": "an error in the texts; the message names file, row and field",
    "QualityError": "the student misses `amalgam report --fail-under` or `--fail-if-worse-than`",
    "WorkError": "a unit of work failed; earlier committed units stay",
    "DiskFullError": "the disk is full; free some space and run again",
    "InputChangedError": "a model, a file of texts or the experiment file of a sweep changed during the run",
    "DamagedError": "a stored file differs from its digest: it is quarantined, and the next run recomputes it",
    "OutputError": "stdout cannot be written, such as on a full disk; results in the workspace stay",
    "FaultError": "a fault of amalgam itself; `where` is a file with the traceback, without secrets, to report",
    "InterruptedRunError": "Ctrl-C, SIGTERM or a closed terminal: 128 plus the signal's number; the next run resumes",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Returns the Markdown of each page by its path in docs/."""
    return {
        "reference/experiment.md": "\n".join(_experiment()),
        "reference/commands.md": "\n".join(_commands()),
        "reference/columns.md": "\n".join(_columns()),
        "reference/methods.md": "\n".join(_methods()),
        "reference/errors.md": "\n".join(_errors()),
    }


# ---- the experiment file


def _experiment() -> Iterator[str]:
    yield "# The experiment file\n"
    yield (
        "This page lists every field. The file is YAML; the command line accepts any field as `section.field=value`. "
        "An unknown field is an error that suggests the nearest name. Paths are relative to the file's folder. "
        "`amalgam schema` prints the same as JSON Schema. Files that amalgam writes name it in their first line for "
        "the YAML language server of editors, and `amalgam.schema.json` is next to them.\n"
    )
    top = {name: _section(field) for name, field in ExperimentConfig.model_fields.items()}
    yield from _fields({name: field for name, field in ExperimentConfig.model_fields.items() if not top[name]}, "")
    for name, section in top.items():
        if section is not None:
            several = " (a list)" if name == "teachers" else ""
            yield f"## {name}{several}\n"
            yield f"{_one_line(section.__doc__)}\n" if _own_docstring(section) else ""
            prefix = f"{name}.0." if several else f"{name}."
            yield from _fields(section.model_fields, prefix)


def _fields(fields: dict[str, FieldInfo], prefix: str) -> Iterator[str]:
    yield from _table(
        ["field", "value", "default", "meaning"],
        list(_rows(fields, prefix)),
    )


def _rows(fields: dict[str, FieldInfo], prefix: str) -> Iterator[list[str]]:
    """Yields a row per field; the fields of a section inside a section follow under its name."""
    for name, field in fields.items():
        nested = _section(field)
        table = NAMES.get(prefix + name, {})
        if nested is None:
            kind = ", ".join(f"`{value}`" for value in table) or _kind(field)
            description = " ".join([_one_line(field.description), *value_texts(table)])
            yield [f"`{prefix}{name}`", kind, _default(field), description]
        else:
            yield from _rows(nested.model_fields, f"{prefix}{name}.")


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """Returns the section class of a field, or of its list or optional type, if it has one."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _own_docstring(section: type[BaseModel]) -> bool:
    return bool(section.__dict__.get("__doc__"))


def _kind(field: FieldInfo) -> str:
    annotated: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    kind = _schema_kind(TypeAdapter(annotated).json_schema())
    return f"{kind}, or a single one" if "_as_" in repr((field.annotation, field.metadata)) else kind


def _schema_kind(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_schema_kind(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{_yaml(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{_yaml(schema['const'])}`"
    kind = schema["type"]
    if kind == "array":
        return f"list of {_schema_kind(schema['items'])}{_between(schema, 'minItems', 'maxItems')}"
    if kind == "object":
        values = schema.get("additionalProperties") or next(iter(schema["patternProperties"].values()))
        return f"names, each with {_schema_kind(values)}"
    word = {"string": "text", "integer": "whole number", "number": "number", "boolean": "`true` or `false`"}[kind]
    low = [f"> {schema['exclusiveMinimum']:g}"] if "exclusiveMinimum" in schema else []
    low += [f">= {schema['minimum']:g}"] if "minimum" in schema else []
    high = [f"< {schema['exclusiveMaximum']:g}"] if "exclusiveMaximum" in schema else []
    high += [f"<= {schema['maximum']:g}"] if "maximum" in schema else []
    return " ".join([word, ", ".join([*low, *high])]).strip()


def _between(schema: dict[str, Any], minimum: str, maximum: str) -> str:
    low, high = schema.get(minimum, 0), schema.get(maximum)
    if high is not None:
        return f", {low} to {high} items" if low != high else f", {low} items"
    return f", at least {low}" if low > 1 else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    chosen = value is None and "auto" in str(field.description)
    return "`auto`" if chosen else f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


# ---- commands


def _commands() -> Iterator[str]:
    from typer.main import get_command

    from amalgam.cli import app

    yield "# Commands\n"
    yield (
        "This page has the output of `--help`. Results go to stdout, progress and notes to stderr. `--debug`, anywhere "
        "on the line, shows tracebacks. `amalgam --install-completion` installs shell completion.\n"
    )
    yield _help([])
    for name in get_command(app).commands:  # type: ignore[attr-defined]
        yield f"## amalgam {name}\n"
        yield _help([name])


def _help(arguments: Sequence[str]) -> str:
    from typer.testing import CliRunner

    from amalgam.cli import app

    width = os.environ.get("COLUMNS")
    result = CliRunner(env={"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}).invoke(
        app, [*arguments, "--help"], prog_name="amalgam"
    )
    if result.exit_code or os.environ.get("COLUMNS") != width:
        raise RuntimeError(f"amalgam {' '.join(arguments)} --help: {result.output}")
    return f"```text\n{result.output.strip()}\n```\n"


# ---- columns, methods, errors


def _columns() -> Iterator[str]:
    column_sets = {name: value for name, value in vars(parquet).items() if _is_columns(value)}
    if column_sets.keys() != FILES.keys():
        raise RuntimeError(
            f"column sets without an entry in FILES of docs/reference.py: {column_sets.keys() ^ FILES.keys()}"
        )
    yield "# Columns\n"
    yield (
        "This page lists every column of every Parquet file (`data/parquet.py`). Paths are relative to the workspace, "
        "`artifacts`. `key` has 16 bytes; `array<...>` is a list of fixed length, `list<...>` of any length.\n"
    )
    for name, columns in column_sets.items():
        yield f"## {name.lower().replace('_', ' ')}\n"
        yield f"{FILES[name]}\n"
        rows = [[f"`{col.name}`", f"`{col.dtype}`", "yes" if col.nullable else "", col.meaning] for col in columns]
        yield from _table(["column", "dtype", "null", "meaning"], rows)


def _is_columns(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(column, Column) for column in value)


def _methods() -> Iterator[str]:
    yield "# Method names\n"
    yield (
        "This page lists the values of `student.method`. A name sets defaults, which the experiment file can override. "
        "[Methods](../methods.md) has the formulas, and [the default method](../method.md) its reasons.\n"
    )
    rows = []
    for name, method in METHODS.items():
        sets = ", ".join(_settings(method.defaults)) or "no training"
        sets += f"; {ON_GENERATED} {', '.join(_settings(method.on_generated))}" if method.on_generated else ""
        rows.append([f"`{name}`", method.source, method.needs, sets])
    yield from _table(["`student.method`", "from", "needs", "sets"], rows)


def _settings(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    return (f"`{section}.{name}={value}`" for section, fields in sections.items() for name, value in fields.items())


def _errors() -> Iterator[str]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.AmalgamError)]
    if {kind.__name__ for kind in kinds} != WHEN.keys() or set(get_args(Reason)) != REASONS.keys():
        raise RuntimeError("an error or a reason is missing in docs/reference.py: add it to WHEN or REASONS")
    yield "# Exit codes, errors, reasons\n"
    yield (
        "An error has up to three lines on stderr: the problem, `where:` and `fix:`. The exit code shows its kind. "
        "0 is success, and 2 includes an invalid command line.\n"
    )
    rows = [
        [f"`{kind.__name__}`", "129, 130, 143" if kind is errors.InterruptedRunError else str(kind.exit_code),
         WHEN[kind.__name__]]
        for kind in kinds
    ]  # fmt: skip
    yield from _table(["error", "exit code", "when"], rows)
    yield "## Why a stage runs\n"
    yield "`amalgam plan` and every run print one of these reasons. `amalgam explain STAGE` lists the changed fields.\n"
    yield from _table(["reason", "meaning"], [[f"`{reason}`", REASONS[reason]] for reason in get_args(Reason)])


# ---- Markdown


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'|'.join(' --- ' for _ in header)}|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
