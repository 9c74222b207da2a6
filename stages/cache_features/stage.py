"""Stage cache-features: the state of each training text in the student's encoder before it learns, kept by key.

Wanted only where a method looks at neighbouring texts. A family like a teacher's: appended texts cost themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from amalgam.pipeline.experiment import Experiment
from amalgam.pipeline.plan import library_versions
from amalgam.pipeline.stage import Identity, Run, Unit, UnitByUnit
from amalgam.pipeline.store import Record
from amalgam.stages.cache_teachers.family import Asked, cached_units, family_name, units_for
from amalgam.stages.models.encoder import encoder_digest, encoder_files
from amalgam.stages.read_corpus.parts import Bucket, read_bucket, train_part

if TYPE_CHECKING:
    from amalgam.stages.cache_features.pooling import Encoder

ENCODER = "student.encoder"


class CacheFeatures(UnitByUnit):
    name: ClassVar[str] = "cache-features"
    VERSION: ClassVar[int] = 1
    spread: ClassVar[Literal["units", "together", "alone"]] = "units"
    measure: ClassVar[str] = "texts"

    def wanted(self, experiment: Experiment) -> bool:
        return experiment.student.learns and experiment.targets.looks_at_neighbours

    def prepare(self, run: Run) -> None:
        encoder_files(run, run.experiment.student, ENCODER)

    def identity(self, run: Run) -> Identity:
        return Identity({}, {"features": _family_key(run), "texts": train_part(run).texts_digest})

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:  # noqa: ARG002 - units stand in the family
        return list(_units(run))

    def run_unit(self, run: Run, unit: Unit) -> None:
        from amalgam.data.shards import write_table
        from amalgam.stages.cache_features.pooling import feature_table

        bucket = next(one for one in train_part(run).buckets if one.prefix == unit.work.prefix)
        table = feature_table(run, _encoder(run), bucket, unit.work.rows)
        with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
            write_table(table, draft.folder / "unit.parquet")
            whole = {"prefix": bucket.prefix, "logits": True, "first": 0, "last": 0}
            draft.facts = {**whole, "rows": table.num_rows}
            draft.made = {"libraries": library_versions()}

    def finish(self, run: Run, folder: Path, records: Sequence[Record]) -> dict[str, Any]:  # noqa: ARG002
        family = feature_family(run)
        path = run.store.folder("cache-teachers", family) / "key.json"
        if not path.exists():
            run.store.replace(path, {"teacher": f"features of {run.experiment.student.encoder}", **_family_key(run)})
        return {"family": family}

    def deliver(self, run: Run, manifest: Record, *, fresh: bool) -> None: ...


def feature_family(run: Run) -> str:
    return family_name(_family_key(run))


def _family_key(run: Run) -> dict[str, Any]:
    student = run.experiment.student
    digest = encoder_digest(run, student, ENCODER)
    return {"feature": "mean of the last block's tokens", "content": digest, "max_tokens": student.max_tokens}


def _units(run: Run) -> Iterator[Unit]:
    from amalgam.data.shards import read_keys

    family = feature_family(run)
    cached = cached_units(run, family)
    for bucket in train_part(run).buckets:
        asked = Asked("train", bucket.prefix, read_keys(run.store.checked(bucket.file)))
        yield from units_for(run, family, "encoder", asked, cached, 0)


def _encoder(run: Run) -> Encoder:
    from amalgam.stages.cache_features.pooling import Encoder

    if "feature encoder" not in run.memory:
        run.memory["feature encoder"] = Encoder.of(run)
    found: Encoder = run.memory["feature encoder"]
    return found


def features_of(run: Run, buckets: Sequence[Bucket]) -> Any:
    """[texts, width] float32, in the order of the buckets' texts."""
    import numpy as np

    from amalgam.data.shards import key_array, matrix, read_table

    manifest = run.result("cache-features")
    tables = [read_table(run.store.checked(file)) for file in manifest.files]
    keys = np.concatenate([key_array(table.column("key")) for table in tables])
    values = np.concatenate([matrix(table.column("features")) for table in tables])
    order = np.argsort(keys, kind="stable")
    wanted = np.concatenate([key_array(read_bucket(run, bucket, ["key"]).column("key")) for bucket in buckets])
    return values[order[np.searchsorted(keys[order], wanted)]].astype(np.float32)
