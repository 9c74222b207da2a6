"""Checks the facts of a record against the types that its stage declares, when the record is read.

A workspace may come from a stranger, whose records have valid digests; facts of another type are damage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    Required,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

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
    check = CHECKS.get(get_origin(kind) or kind)
    if check is not None:
        return check(value, get_args(kind))
    if is_typeddict(kind):
        return isinstance(value, dict) and _has_fields(value, kind)
    return type(value) is kind


def _has_fields(value: Mapping[str, object], kind: Any) -> bool:
    fields, required = _fields(kind)
    return required <= value.keys() and all(fits(value[name], fields[name]) for name in fields.keys() & value.keys())


@cache
def _fields(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Returns the types of a TypedDict's fields, and the names of the required ones."""
    fields = get_type_hints(kind, include_extras=True)
    marks = {name: get_origin(hint) for name, hint in fields.items()}  # __required_keys__ ignores marks in strings
    required = {name for name, mark in marks.items() if mark is Required}
    required |= {name for name in kind.__required_keys__ if marks[name] is not NotRequired}
    return fields, frozenset(required)


def _is_integer(value: object) -> bool:
    return type(value) is int and abs(value) < LARGEST


def _is_list(value: object, kinds: Sequence[Any]) -> bool:
    return isinstance(value, list) and all(fits(item, kinds[0]) for item in value)


CHECKS: Mapping[Any, Callable[[Any, Sequence[Any]], bool]] = {
    Any: lambda _, __: True,
    None: lambda value, _: value is None,
    NoneType: lambda value, _: value is None,
    int: lambda value, _: _is_integer(value) and value >= 0,
    float: lambda value, _: (type(value) is float and math.isfinite(value)) or _is_integer(value),
    list: _is_list,
    Sequence: _is_list,
    tuple: lambda value, kinds: isinstance(value, list) and len(value) == len(kinds) and all(map(fits, value, kinds)),
    dict: lambda value, kinds: isinstance(value, dict) and all(fits(item, kinds[1]) for item in value.values()),
    Union: lambda value, kinds: any(fits(value, kind) for kind in kinds),
    UnionType: lambda value, kinds: any(fits(value, kind) for kind in kinds),
    Literal: lambda value, kinds: value in kinds,
    Required: lambda value, kinds: fits(value, kinds[0]),
    NotRequired: lambda value, kinds: fits(value, kinds[0]),
}
