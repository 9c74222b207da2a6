"""Completes stages, fields, methods and teachers in the shell; an error gives no completions.

bash splits words at "=", other shells do not: overrides are completed in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from amalgam.pipeline.user_paths import DEFAULT_FILE


def stages(incomplete: str) -> list[str]:
    from amalgam.stages.registry import STAGE_NAMED

    return [name for name in STAGE_NAMED if name.startswith(incomplete)]


def modes(incomplete: str) -> list[str]:
    return [value for value in fields()["targets.mode"] if value.startswith(incomplete)]


def overrides(ctx: typer.Context, incomplete: str) -> list[str]:
    field, equals, begun = incomplete.partition("=")
    if equals:
        return [f"{field}={value}" for value in _values(ctx, field) if value.startswith(begun)]
    words = [word for word in ctx.params.get("overrides") or [] if word != "="]
    if words and "=" not in words[-1] and words[-1] in fields():
        return [value for value in _values(ctx, words[-1]) if value.startswith(incomplete)]
    return [f"{field}=" for field in fields() if field.startswith(incomplete)]


def fields() -> dict[str, list[str]]:
    """Returns every field that can be overridden by name, with the values that the schema lists."""
    from amalgam.stages.methods import experiment_schema

    schema = experiment_schema()
    return dict(_leaves(schema, schema["$defs"], ""))


def _leaves(section: Mapping[str, Any], sections: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, list[str]]]:
    for name, field in section["properties"].items():
        kinds = field.get("anyOf", [field])
        inner = next((kind["$ref"].rpartition("/")[2] for kind in kinds if "$ref" in kind), None)
        if inner:
            yield from _leaves(sections[inner], sections, f"{prefix}{name}.")
        elif not any("$ref" in kind.get("items", {}) for kind in kinds):  # an entry of a list has no name
            yield prefix + name, list(dict.fromkeys(str(value) for kind in kinds for value in _choices(kind)))


def _choices(kind: Mapping[str, Any]) -> list[Any]:
    if kind.get("type") == "boolean":
        return ["true", "false"]
    return [kind["const"]] if "const" in kind else list(kind.get("enum", []))


def _values(ctx: typer.Context, field: str) -> list[str]:
    from amalgam.pipeline.config.schema import TEACHER, UNTRAINED
    from amalgam.pipeline.errors import AmalgamError
    from amalgam.stages.methods import METHODS, load_with_methods

    if field not in {"student.method", "student.encoder"}:
        return fields().get(field, [])
    try:
        loaded = load_with_methods(Path(ctx.params.get("config") or DEFAULT_FILE))
        teachers = [TEACHER + name for name in loaded.experiment.teacher_names]
    except AmalgamError:
        teachers = []
    methods = list(dict.fromkeys([*METHODS, *UNTRAINED])) if field == "student.method" else []
    methods = [name for name in methods if not name.startswith(TEACHER)]  # a placeholder of the names that follow
    return [*methods, *teachers]
