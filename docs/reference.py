"""The reference pages, made from the code when the site is built: nothing in them is written twice.

MkDocs calls `on_files` (mkdocs.yml, hooks). What is new in the code and has no place here stops the build.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from amalgam.data import schemas
from amalgam.data.schemas import Column
from amalgam.pipeline import errors
from amalgam.pipeline.experiment import ExperimentFile
from amalgam.pipeline.plan import Reason
from amalgam.stages.methods import METHODS

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

FILES = {
    "CORPUS": "`read-corpus/part-*/*/*.parquet`",
    "SKIPPED": "`read-corpus/part-*/skipped.parquet`",
    "WRITTEN": "`generate/FAMILY/units/*.parquet`",
    "GENERATED": "`generate/FINGERPRINT/texts-*.parquet`",
    "CACHE_TEXTS": "`cache-teachers/FAMILY/units/*.parquet`",
    "CACHE_LOGITS": "the same, in files that hold answers with dropout off",
    "CACHE_PASSES": "the same, in files that hold passes",
    "FEATURES": "`cache-teachers/FAMILY/units/*.parquet` of an encoder",
    "SIMILARITIES": "`report/zero-shot-*/*.parquet`",
    "STATES": "`cache-teachers/FAMILY/units/*/keys.parquet` of hidden states",
    "TOKENS": "`tokens/FINGERPRINT/*.parquet`",
    "TOKEN_TYPES": "the same, where the model tells the texts of a pair apart",
    "WEIGHTS": "`weigh-teachers/FINGERPRINT/units/*.parquet`",
    "TARGETS": "`build-targets/FINGERPRINT/units/*.parquet`",
    "PREDICTIONS": "what `amalgam predict --out` writes, beside the columns of `--top` and `--explain`",
}
"""Where the columns of data/schemas.py lie in the workspace."""

REASONS = {
    "first-run": "it has never been built here",
    "config": "fields of the experiment changed; the field is named",
    "input": "texts or model files changed",
    "upstream": "a stage before it will run, or made another result",
    "code": "this version of amalgam computes it in another way",
    "missing": "work of it is not there: an interrupted run, another part, a deleted file",
    "damaged": "a stored file is not what was written",
    "forced": "`--force` was said",
}

WHEN = {
    "AmalgamError": "anything amalgam can name; a disk's own error, with the path",
    "ExperimentError": "the experiment file or the command line; nothing has run",
    "ModelError": "a model that the experiment names cannot serve",
    "DataError": "the texts: the file, the row and the field are named",
    "WorkError": "a unit of work failed; what was committed before it stays",
    "DiskFullError": "no room is left; free some and run again",
    "DamagedError": "a stored file is not what was written: set aside, and made again by the next run",
    "InterruptedRunError": "Ctrl-C or SIGTERM: 128 and the signal's number; running again goes on",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Path in docs/ -> Markdown."""
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
        "Every field that may be said. The file is YAML; any field can also be given on the command line, as "
        "`section.field=value`. A field that is not listed here is refused, with the nearest name. Paths start from "
        "the file's folder. `amalgam schema` prints the same as JSON Schema, for editors.\n"
    )
    top = {name: _section(field) for name, field in ExperimentFile.model_fields.items()}
    yield from _fields({name: field for name, field in ExperimentFile.model_fields.items() if not top[name]}, "")
    for name, section in top.items():
        if section is not None:
            several = " (a list)" if name == "teachers" else ""
            yield f"## {name}{several}\n"
            yield f"{_flowing(section.__doc__)}\n" if _own_docstring(section) else ""
            prefix = f"{name}.0." if several else f"{name}."
            yield from _fields(section.model_fields, prefix)


def _fields(fields: dict[str, FieldInfo], prefix: str) -> Iterator[str]:
    yield from _table(
        ["field", "value", "default", "meaning"],
        [
            [f"`{prefix}{name}`", _kind(field), _default(field), _flowing(field.description)]
            for name, field in fields.items()
        ],
    )


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field of the file is, if it is one: itself, a list of it, or it or nothing."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _own_docstring(section: type[BaseModel]) -> bool:
    return bool(section.__dict__.get("__doc__"))


def _kind(field: FieldInfo) -> str:
    annotated: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    told = _said(TypeAdapter(annotated).json_schema())
    return f"{told}, or one alone" if "_as_" in repr((field.annotation, field.metadata)) else told


def _said(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_said(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{_yaml(one)}`" for one in schema["enum"])
    if "const" in schema:
        return f"`{_yaml(schema['const'])}`"
    kind = schema["type"]
    if kind == "array":
        return f"list of {_said(schema['items'])}{_between(schema, 'minItems', 'maxItems')}"
    if kind == "object":
        values = schema.get("additionalProperties") or next(iter(schema["patternProperties"].values()))
        return f"names, each with {_said(values)}"
    word = {"string": "text", "integer": "whole number", "number": "number", "boolean": "`true` or `false`"}[kind]
    low = [f"> {schema['exclusiveMinimum']:g}"] if "exclusiveMinimum" in schema else []
    low += [f">= {schema['minimum']:g}"] if "minimum" in schema else []
    high = [f"< {schema['exclusiveMaximum']:g}"] if "exclusiveMaximum" in schema else []
    high += [f"<= {schema['maximum']:g}"] if "maximum" in schema else []
    return " ".join([word, ", ".join([*low, *high])]).strip()


def _between(schema: dict[str, Any], least: str, most: str) -> str:
    low, high = schema.get(least, 0), schema.get(most)
    if high is not None:
        return f", {low} to {high} of them" if low != high else f", {low} of them"
    return f", at least {low}" if low > 1 else ""


def _default(field: FieldInfo) -> str:
    return "must be said" if field.is_required() else f"`{_yaml(field.get_default(call_default_factory=True))}`"


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# ---- commands


def _commands() -> Iterator[str]:
    from typer.main import get_command

    from amalgam.cli import app

    yield "# Commands\n"
    yield (
        "What `--help` prints. Results go to stdout, everything that informs to stderr. `--debug`, anywhere on the "
        "line, shows tracebacks. `amalgam --install-completion` teaches the shell the names.\n"
    )
    yield _help([])
    for name in get_command(app).commands:  # type: ignore[attr-defined]
        yield f"## amalgam {name}\n"
        yield _help([name])


def _help(arguments: Sequence[str]) -> str:
    from typer.testing import CliRunner

    from amalgam.cli import app

    kept = os.environ.get("COLUMNS")
    done = CliRunner(env={"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}).invoke(
        app, [*arguments, "--help"], prog_name="amalgam"
    )
    if done.exit_code or os.environ.get("COLUMNS") != kept:
        raise RuntimeError(f"amalgam {' '.join(arguments)} --help: {done.output}")
    return f"```text\n{done.output.strip()}\n```\n"


# ---- columns, methods, errors


def _columns() -> Iterator[str]:
    found = {name: value for name, value in vars(schemas).items() if _is_columns(value)}
    if found.keys() != FILES.keys():
        raise RuntimeError(f"columns without a place in docs/reference.py: {found.keys() ^ FILES.keys()}")
    yield "# Columns\n"
    yield (
        "Every column of every Parquet file, from `data/schemas.py`. Paths start from the workspace, `artifacts`. "
        "`key` is 16 fixed bytes; `array<...>` is a list of fixed length, `list<...>` one of any length. What may be "
        "null says so.\n"
    )
    for name, columns in found.items():
        yield f"## {name.lower().replace('_', ' ')}\n"
        yield f"{FILES[name]}\n"
        rows = [[f"`{one.name}`", f"`{one.dtype}`", "yes" if one.nullable else "", one.meaning] for one in columns]
        yield from _table(["column", "dtype", "null", "meaning"], rows)


def _is_columns(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(one, Column) for one in value)


def _methods() -> Iterator[str]:
    yield "# Method names\n"
    yield (
        "What `student.method` may be. A name sets defaults; what the file says stands over them. The formulas are on "
        "[the page of the methods](../methods.md), the default's reasons on [its own](../method.md).\n"
    )
    rows = []
    for name, method in METHODS.items():
        sets = [f"`{s}.{k}={v}`" for s, fields in method.defaults.items() for k, v in fields.items()]
        rows.append([f"`{name}`", method.source, method.needs, ", ".join(sets) or "trains nothing"])
    yield from _table(["`student.method`", "from", "needs", "sets"], rows)


def _errors() -> Iterator[str]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.AmalgamError)]
    if {kind.__name__ for kind in kinds} != WHEN.keys() or set(get_args(Reason)) != REASONS.keys():
        raise RuntimeError("an error or a reason has no sentence in docs/reference.py")
    yield "# Exit codes, errors, reasons\n"
    yield (
        "An error is up to three lines on stderr: what is wrong, `where:` and `fix:`. The exit code tells a script "
        "which kind it is; 0 is success, and 2 also a command line that is not understood.\n"
    )
    rows = [
        [f"`{kind.__name__}`", "130, 143" if kind is errors.InterruptedRunError else str(kind.exit_code),
         WHEN[kind.__name__]]
        for kind in kinds
    ]  # fmt: skip
    yield from _table(["error", "exit code", "when"], rows)
    yield "## Why a stage runs\n"
    yield "`amalgam plan` and every run name one of these; `amalgam explain STAGE` goes into the fields.\n"
    yield from _table(["reason", "meaning"], [[f"`{reason}`", REASONS[reason]] for reason in get_args(Reason)])


# ---- Markdown


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'|'.join(' --- ' for _ in header)}|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def _flowing(text: str | None) -> str:
    return " ".join((text or "").split())
