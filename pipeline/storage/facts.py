"""Checks the facts of a record against the types that its stage declares, when the record is read.

A workspace may come from a stranger, whose records have valid digests; facts of another type are damage.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, NotRequired, Required, TypedDict, Union

LARGEST = 2**53
"""Limit of every number: JSON has no larger integer exactly, and no count is larger."""


class Made(TypedDict, total=False):
    """How a unit or a result was made."""

    libraries: dict[str, str]
    seconds: float


Timing = TypedDict(  # noqa: UP013 - a stored name
    "Timing", {"seconds": float, "units": int, "found": int, "workload": float, "bytes": int}
)
"""The cost of a build, in its record; `found` are the units that were complete before."""


class ResultIdentity(TypedDict, total=False):
    """The inputs of a result, as far as every stage has them."""

    stage: str
    version: int
    config: dict[str, Any]
    inputs: dict[str, Any]
    upstream: dict[str, str]


class FactTypes(NamedTuple):
    """Types of the records of a stage: each a TypedDict, or a union of them."""

    manifest: Any = Any
    """Facts of the stage's result."""
    unit: Any = Any
    """Facts of a unit."""
    made: Any = Made
    config: Any = Any
    """The settings in the identity of a result, as far as the stage reads them there."""


DECLARED: dict[str, FactTypes] = {}
"""The types by the name of the stage's folder."""


def fits(value: object, kind: Any) -> bool:
    """Returns whether a value of JSON has the type; integers are counts, and numbers are finite."""
    return check_of(kind)(value)


@cache
def check_of(kind: Any) -> Check:
    """Returns the function that checks values of the type; a plan checks a hundred thousand of them."""
    origin = typing.get_origin(kind) or kind
    if origin in PLAIN:
        return PLAIN[origin]
    if origin in NESTED:
        parts = typing.get_args(kind)
        return NESTED[origin](parts if origin is Literal else [check_of(part) for part in parts])
    if typing.is_typeddict(kind):
        return _has_fields(kind)
    return lambda value: type(value) is kind


def _has_fields(kind: Any) -> Check:
    hints = typing.get_type_hints(kind, include_extras=True)
    marks = {name: typing.get_origin(hint) for name, hint in hints.items()}
    required = {name for name, mark in marks.items() if mark is Required}  # __required_keys__ ignores marks in strings
    required |= {name for name in kind.__required_keys__ if marks[name] is not NotRequired}
    checks = [(name, check_of(hint)) for name, hint in hints.items()]

    def check(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and required <= value.keys()
            and all(fits_field(value[name]) for name, fits_field in checks if name in value)
        )

    return check


def _is_integer(value: object) -> bool:
    return type(value) is int and abs(value) < LARGEST


Check = Callable[[Any], bool]

PLAIN: Mapping[Any, Check] = {
    Any: lambda _: True,
    None: lambda value: value is None,
    NoneType: lambda value: value is None,
    int: lambda value: _is_integer(value) and value >= 0,
    float: lambda value: (type(value) is float and math.isfinite(value)) or _is_integer(value),
}

NESTED: Mapping[Any, Callable[[Sequence[Any]], Check]] = {
    list: lambda checks: lambda value: isinstance(value, list) and all(map(checks[0], value)),
    Sequence: lambda checks: lambda value: isinstance(value, list) and all(map(checks[0], value)),
    tuple: lambda checks: (
        lambda value: (
            isinstance(value, list)
            and len(value) == len(checks)
            and all(check(item) for check, item in zip(checks, value, strict=True))
        )
    ),
    dict: lambda checks: lambda value: isinstance(value, dict) and all(map(checks[1], value.values())),
    Union: lambda checks: lambda value: any(check(value) for check in checks),
    UnionType: lambda checks: lambda value: any(check(value) for check in checks),
    Literal: lambda choices: lambda value: value in choices,
    Required: lambda checks: checks[0],
    NotRequired: lambda checks: checks[0],
}
