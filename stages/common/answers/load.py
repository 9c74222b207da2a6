"""Families of cached answers: their identity and folders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amalgam.pipeline.execution.stage import PendingDependencyError, Run
from amalgam.pipeline.execution.versions import library_versions
from amalgam.stages.common.answers.coverage import family_name
from amalgam.stages.common.load import teachers_of
from amalgam.stages.common.teachers import ResolvedTeacher

if TYPE_CHECKING:
    pass


def passes_counted(run: Run) -> dict[str, Any]:
    """How many of the cached passes count, for the identity of what is made of them."""
    said = run.experiment.targets.passes
    found: dict[str, Any] = {"passes": run.experiment.cache.passes if said is None else said}
    return found | ({"adaptive": run.experiment.cache.passes} if run.experiment.cache.adaptive else {})


def dtype_of(run: Run) -> str:
    """What `auto` meant when this workspace first met it: results of two dtypes never mix."""
    wanted = run.experiment.cache.dtype
    if wanted != "auto":
        return wanted
    pinned = run.store.pinned("dtype", "auto")
    if pinned is None:
        raise PendingDependencyError("the dtype is chosen")
    return pinned


def families_of(run: Run) -> dict[str, str]:
    return {teacher.name: family_of(run, teacher) for teacher in teachers_of(run)}


def family_of(run: Run, teacher: ResolvedTeacher) -> str:
    return family_name(family_key(run, teacher))


def family_key(run: Run, teacher: ResolvedTeacher) -> dict[str, Any]:
    key: dict[str, Any] = {**teacher.identity, "seed": run.experiment.cache.seed, "dtype": dtype_of(run)}
    if run.experiment.execution.on_version_change == "strict":
        key["libraries"] = library_versions()
    return key
