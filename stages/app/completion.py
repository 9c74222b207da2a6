"""Completes stages, fields, methods and teachers in the shell; an error gives no completions.

bash splits words at "=", other shells do not: overrides are completed in both.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import typer

FIELDS_OF_LISTS = ("teachers",)


def stages(incomplete: str) -> list[str]:
    from amalgam.stages.registry import STAGES

    return [stage.name for stage in STAGES if stage.name.startswith(incomplete)]


def modes(incomplete: str) -> list[str]:
    return [value for value in _values(None, "targets.mode") if value.startswith(incomplete)]


def overrides(ctx: typer.Context, incomplete: str) -> list[str]:
    field, equals, begun = incomplete.partition("=")
    if equals:
        return [f"{field}={value}" for value in _values(ctx, field) if value.startswith(begun)]
    words = [word for word in ctx.params.get("overrides") or [] if word != "="]
    if words and "=" not in words[-1] and words[-1] in fields():
        return [value for value in _values(ctx, words[-1]) if value.startswith(incomplete)]
    return [f"{field}=" for field in fields() if field.startswith(incomplete)]


def fields() -> dict[str, Any]:
    """Returns every field that can be overridden by name, with its type."""
    from amalgam.pipeline.config.schema import ExperimentConfig

    return dict(_leaves(ExperimentConfig, ""))


def _leaves(model: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    from pydantic import BaseModel

    for name, field in model.model_fields.items():
        arms = [field.annotation, *typing.get_args(field.annotation)]
        section = next((arm for arm in arms if isinstance(arm, type) and issubclass(arm, BaseModel)), None)
        if name in FIELDS_OF_LISTS:
            continue
        if section is not None:
            yield from _leaves(section, f"{prefix}{name}.")
        else:
            yield prefix + name, field.annotation


def _values(ctx: Any, field: str) -> list[str]:
    from amalgam.pipeline.config.schema import TEACHER, UNTRAINED
    from amalgam.stages.methods import METHODS, NAMES

    if field == "student.method":
        return [*METHODS, *(name for name in UNTRAINED if name not in METHODS), *_teachers(ctx, TEACHER)]
    if field == "student.encoder":
        return _teachers(ctx, TEACHER)
    return list(NAMES[field]) if field in NAMES else list(dict.fromkeys(_choices(fields().get(field))))


def _choices(annotation: Any) -> Iterator[str]:
    if annotation is bool:
        yield from ("true", "false")
    elif typing.get_origin(annotation) is Literal:
        yield from (str(value) for value in typing.get_args(annotation))
    elif typing.get_origin(annotation) in {typing.Union, types.UnionType, typing.Annotated}:
        for arm in typing.get_args(annotation):
            yield from _choices(arm)


def _teachers(ctx: Any, prefix: str) -> list[str]:
    from amalgam.pipeline.errors import AmalgamError
    from amalgam.stages.methods import load_with_methods

    params = getattr(ctx, "params", {}) or {}
    try:
        loaded = load_with_methods(Path(params.get("config") or "amalgam.yaml"))
    except AmalgamError:
        return []
    return [prefix + name for name in loaded.experiment.teacher_names]
