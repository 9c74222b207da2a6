"""Families of cached answers: their identity and folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.pipeline.execution.stage import PendingDependencyError, Run
from amalgam.pipeline.storage.fingerprint import library_versions
from amalgam.stages.common.answers.coverage import (
    BucketRequest,
    CachedUnits,
    UnitKeys,
    bucket_requests,
    cached_units,
    family_name,
)
from amalgam.stages.common.corpus import Part
from amalgam.stages.common.load import teachers_of
from amalgam.stages.common.teachers import ResolvedTeacher

if TYPE_CHECKING:
    from amalgam.stages.common.answers.read import AnswerReader, FamilyIndex


def passes_counted(run: Run) -> dict[str, Any]:
    """Returns the number of cached passes that are used, for the identities of dependent stages."""
    counted_passes = run.experiment.targets.passes
    facts: dict[str, Any] = {"passes": run.experiment.cache.passes if counted_passes is None else counted_passes}
    return facts | ({"adaptive": run.experiment.cache.passes} if run.experiment.cache.adaptive else {})


def dtype_of(run: Run) -> str:
    """Returns the dtype; `auto` keeps the workspace's first choice, so results of two dtypes never mix."""
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


def units_folder(run: Run, family: str) -> Path:
    """Returns the folder of the family's units."""
    folders: dict[str, Path] = run.cache.setdefault("unit folders", {})
    if family not in folders:
        folders[family] = run.store.folder("cache-teachers", family) / "units"
    return folders[family]


def units_of(run: Run, family: str) -> CachedUnits:
    """Returns the complete units of the family."""
    return cached_units(run.store, units_folder(run, family))


def unit_keys(run: Run) -> UnitKeys:
    """Returns the reader of unit keys that all families of this run share."""
    if "unit keys" not in run.cache:
        run.cache["unit keys"] = UnitKeys(run.store)
    reader: UnitKeys = run.cache["unit keys"]
    return reader


def requests_of(run: Run, part: Part) -> Iterator[BucketRequest]:
    """Yields the part's buckets as requests to teachers."""
    return bucket_requests(run.store, part, unit_keys(run))


def family_indexes(run: Run) -> dict[str, FamilyIndex]:
    """Returns the files of the current cache-teachers manifest by family."""
    from amalgam.stages.common.answers.read import index_files

    fingerprint = run.fingerprint("cache-teachers")
    if run.cache.get("answer index", ("",))[0] != fingerprint:
        run.cache["answer index"] = fingerprint, index_files(run.result("cache-teachers").files)
    indexes: dict[str, FamilyIndex] = run.cache["answer index"][1]
    return indexes


def answer_reader(run: Run) -> AnswerReader:
    """Returns a reader of the cached predictions of all teachers."""
    from amalgam.stages.common.answers.read import AnswerReader

    cache = run.experiment.cache
    return AnswerReader(
        run.store,
        run.result("cache-teachers"),
        family_indexes(run),
        families_of(run),
        run.experiment.targets,
        cache.passes,
        cache.adaptive,
    )
