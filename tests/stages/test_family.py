"""Cached units are found by bucket, and only those whose texts changed are opened."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from amalgam.data.keys import ALL, keys_digest, overlaps
from amalgam.pipeline.execution.stage import Unit
from amalgam.pipeline.storage.store import StoredFile
from amalgam.stages.common.cached.coverage import (
    UNIT_PREDICTIONS,
    BucketRequest,
    CachedUnit,
    CachedUnits,
    Coverage,
    UnitRequest,
    units_for,
)
from amalgam.stages.common.corpus import Bucket

if TYPE_CHECKING:
    from numpy.typing import NDArray


def unit(name: str, prefix: str, first: int = 0, last: int = 4, rows: int = 1) -> CachedUnit:
    return CachedUnit(name, prefix, first == 0, first, last, rows, StoredFile(f"{name}.parquet", 1, ""))


def asked(part: str, keys: NDArray[np.bytes_], prefix: str = "0") -> BucketRequest:
    bucket = Bucket(prefix, len(keys), keys_digest(keys.tobytes()), StoredFile("0.parquet", 1, ""))
    return BucketRequest(part, bucket, lambda _: keys, lambda unit: pytest.fail(unit.name))


def test_the_units_that_overlap_a_bucket_are_those_that_a_look_at_each_finds_in_the_same_order() -> None:
    draw = random.Random(0)  # noqa: S311  nothing secret

    def prefix() -> str:
        return "".join(draw.choices("01", k=draw.randrange(7))) or ALL

    units = [unit(str(number), prefix(), draw.choice([0, 4]), draw.choice([8, 16])) for number in range(300)]
    cached = CachedUnits(units, Path())
    in_order = sorted(units, key=lambda one: (one.first, one.last, one.prefix, one.name))
    assert cached.entries == in_order
    for bucket in [ALL, "0", "1", *(prefix() for _ in range(200))]:
        assert cached.overlapping([bucket]) == [one for one in in_order if overlaps(one.prefix, bucket)]


def test_a_units_name_depends_on_its_texts() -> None:
    keys = np.array([bytes([number]) * 16 for number in range(1, 5)])
    bucket, fewer = asked("train", keys), asked("train", keys[:3])
    every, few = np.arange(4), np.arange(3)
    name = bucket.name(every, True, 0, 4)
    assert name == asked("test", keys.copy()).name(every, True, 0, 4)
    assert bucket.name(few, True, 0, 4) == fewer.name(few, True, 0, 4)
    assert (
        len({name, bucket.name(few, True, 0, 4), bucket.name(every, False, 0, 4), bucket.name(every, True, 0, 8)}) == 4
    )


def test_many_passes_of_a_large_bucket_are_cut_into_units_that_a_later_plan_finds_by_their_names() -> None:
    keys = np.array([number.to_bytes(16, "big") for number in range(1, 2001)])
    new = list(units_for("a", asked("train", keys), CachedUnits([], Path()), 16))
    assert [len(each.payload.rows) for each in new] == [666, 667, 667]
    assert sum(each.size for each in new) == 2000 * 17
    assert max(each.size for each in new) <= UNIT_PREDICTIONS
    np.testing.assert_array_equal(np.concatenate([each.payload.rows for each in new]), np.arange(2000))

    units = [unit(each.name, "0", 0, 16, rows=len(each.payload.rows)) for each in new]
    planned = list(units_for("a", asked("train", keys), CachedUnits(units, Path()), 16))
    assert {each.name for each in planned} == {each.name for each in new}
    assert all(each.is_complete for each in planned)
    more = list(units_for("a", asked("train", keys), CachedUnits(units, Path()), 24))
    assert [each.payload for each in more if not each.is_complete] == [
        UnitRequest("a", "train", "0", None, logits=False, first=16, last=24)
    ]
    missing = [
        each for each in units_for("a", asked("train", keys), CachedUnits(units[1:], Path()), 16) if each.payload
    ]
    assert [each.name for each in missing] == [new[0].name]


def test_appended_texts_of_a_large_bucket_are_one_unit() -> None:
    keys = np.array([number.to_bytes(16, "big") for number in range(2000)])
    before = keys[np.arange(2000) % 100 > 0]
    first = list(units_for("a", asked("train", before), CachedUnits([], Path()), 16))
    kept = {each.name: before[each.payload.rows] for each in first}
    cached = CachedUnits([unit(name, "0", 0, 16, rows=len(own)) for name, own in kept.items()], Path())
    bucket = Bucket("0", len(keys), keys_digest(keys.tobytes()), StoredFile("0.parquet", 1, ""))
    request = BucketRequest("train", bucket, lambda _: keys, lambda one: kept[one.name])
    (appended,) = (each for each in units_for("a", request, cached, 16) if each.payload)
    np.testing.assert_array_equal(appended.payload.rows, np.arange(0, 2000, 100))


@pytest.mark.parametrize(("texts", "passes"), [(2000, 16), (1000, 16), (2048, 64), (500, 16)])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_parts_that_run_in_turn_compute_each_unit_once(texts: int, passes: int, parts: int) -> None:
    keys = np.array([number.to_bytes(16, "big") for number in range(8 * texts)])
    buckets = {f"{number:03b}": keys[number * texts : (number + 1) * texts] for number in range(8)}
    done: list[CachedUnit] = []

    def planned() -> list[Unit]:
        requests = (asked("train", own, prefix) for prefix, own in buckets.items())
        return [each for one in requests for each in units_for("a", one, CachedUnits(done, Path()), passes)]

    names = [each.name for each in planned()]
    for part in range(parts):
        for each in [each for each in planned()[part::parts] if each.payload]:
            done.append(unit(each.name, each.payload.prefix, 0, passes, rows=each.size // (passes + 1)))
            assert [every.name for every in planned()] == names
    assert sorted(each.name for each in done) == sorted(names)


@pytest.mark.parametrize(("texts", "passes", "units"), [(2000, 0, 1), (2000, 4, 1), (2000, 64, 4), (1, 20_000, 1)])
def test_a_bucket_is_cut_by_its_predictions(texts: int, passes: int, units: int) -> None:
    keys = np.array([number.to_bytes(16, "big") for number in range(1, texts + 1)])
    new = list(units_for("a", asked("train", keys), CachedUnits([], Path()), passes))
    assert len(new) == units
    if units == 1:
        assert new[0].payload.rows is None


def test_passes_are_added_without_a_gap_and_only_as_far_as_they_are_new() -> None:
    coverage, rows = Coverage(3, 8), np.arange(3)
    assert not coverage.add(unit("later", "0", 4, 8), rows)
    assert coverage.add(unit("first", "0", 0, 4), rows[:2])
    assert not coverage.add(unit("again", "0", 0, 4), rows[:2])
    assert coverage.add(unit("overlapping", "0", 2, 8), rows)
    assert coverage.passes.tolist() == [8, 8, 0]
    assert [(own.tolist(), *rest) for own, *rest in coverage.missing()] == [([2], True, 0, 8)]


def test_a_unit_of_other_texts_counts_for_those_of_the_bucket_alone() -> None:
    keys = np.array([number.to_bytes(16, "big") for number in range(1, 10)])
    bucket = Bucket("0", 4, keys_digest(keys[:4].tobytes()), StoredFile("0.parquet", 1, ""))
    request = BucketRequest("train", bucket, lambda _: keys[:4], lambda _: keys[[1, 3, 5, 7]])
    assert request.rows_of(unit("other", "0", rows=4)).tolist() == [1, 3]
