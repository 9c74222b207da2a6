"""Resolves the cached predictions and hidden states that an experiment reads: their identity, folders and files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.data.arrays import Keys
from amalgam.data.parquet import read_keys
from amalgam.pipeline.config.schema import STATIC, ExperimentConfig
from amalgam.pipeline.execution.stage import PendingDependencyError, Run, once
from amalgam.pipeline.storage.store import MANIFEST, StoredFile
from amalgam.stages.common import load
from amalgam.stages.common.cached import coverage
from amalgam.stages.common.cached.read import CacheReader, Features, States, open_features, open_states
from amalgam.stages.common.corpus import Bucket, Part
from amalgam.stages.common.device import pick_device
from amalgam.stages.common.models.model_folder import full_attention, reads_padding, states_body, text_config
from amalgam.stages.common.models.resolve import LAST_LAYER, ResolvedTeacher, depth_of
from amalgam.stages.objective_inputs import domain_measure, objective_inputs, reads_texts
from amalgam.stages.target_methods import target_method

if TYPE_CHECKING:
    from amalgam.stages.common.inference.states import Encoder

ENCODER = "student.encoder"

DTYPES = ("fp32", "bf16", "fp16")

AUTO_PASSES = 16
"""K of the MUKA paper."""

SAMPLED, SAMPLED_SHARE, MOST_SAMPLED = 200, 0.05, 5000
"""Texts of a sample, if the corpus is large enough; share and most of them where the sample decides on the others."""

ADAPTIVE_VERSION = 3
"""Raised when the same predictions decide on other passes."""

FEWEST_SAMPLED = 30
"""A smaller sample is not worth its cost: its interval is too wide."""

KEPT_UNITS = 64
"""Units whose keys stay in memory."""

# ---- families and their units


def units_folder(run: Run, stage: str, family: str) -> Path:
    """Returns the folder of the family's units; the stage is cache-teachers or cache-features."""
    return run.store.folder(stage, family) / "units"


def units_of(run: Run, stage: str, family: str) -> coverage.CachedUnits:
    folder = units_folder(run, stage, family)
    return coverage.CachedUnits(coverage.cached_units(run.store.units(folder)), folder)


@once
def unit_keys(run: Run) -> Callable[[coverage.CachedUnit], Keys]:
    """Returns the reader of unit keys that all families of this run share; it keeps some, as buckets come in order."""
    return lru_cache(KEPT_UNITS)(lambda unit: read_keys(run.store.verified_path(unit.file)))


def requests_of(run: Run, part: Part) -> Iterator[coverage.BucketRequest]:
    """Yields the part's buckets as requests to teachers; the first read of keys fetches the files of all buckets."""
    store, keys_of = run.store, unit_keys(run)
    fetch = cache(lambda: store.backend.fetch([bucket.file.path for bucket in part.buckets]))

    def read(bucket: Bucket) -> Keys:
        fetch()
        return read_keys(store.verified_path(bucket.file))

    return (coverage.BucketRequest(part.name, bucket, read, keys_of) for bucket in part.buckets)


def describe_family(run: Run, stage: str, family: str, content: Mapping[str, Any]) -> None:
    """Writes family.json, which describes the family to a reader of its folder."""
    path = run.store.folder(stage, family) / "family.json"
    if not run.store.has(path):
        run.store.replace(path, content, copy=True)


# ---- predictions


def passes_of(experiment: ExperimentConfig) -> int:
    """Returns the number of dropout passes for each text; auto: none if the method's choice does not need them."""
    if experiment.cache.passes is not None:
        return experiment.cache.passes
    method, used, learns = target_method(experiment.targets), experiment.targets.passes, experiment.student.learns
    if len(experiment.teachers) == 1 and experiment.targets.distribution != "mc-mean":
        return used or 0  # no passes change the weight of a single teacher
    if learns and (method.reads_passes or (method.estimates_weights and not method.reads_states)):
        return AUTO_PASSES if used is None else used
    return used or 0


def passes_identity(run: Run) -> dict[str, int]:
    """Returns the number of cached passes that are used, for the identities of dependent stages."""
    passes = run.experiment.targets.passes
    identity = {"passes": passes_of(run.experiment) if passes is None else passes}
    return identity | ({"adaptive": ADAPTIVE_VERSION} if adaptive_sample_size(run) else {})


def adaptive_sample_size(run: Run) -> int:
    """Returns the number of sampled texts that decide on the passes of the others; 0: every text has the same number.

    Confidences are predicted by the measure of MUKA's paper. Means of the passes need all of them. A single pass cannot
    be halved, and the halves decide whether fewer passes suffice.
    """
    experiment, targets = run.experiment, run.experiment.targets
    usable = targets.uncertainty == "entropy" and targets.distribution != "mc-mean" and targets.passes is None
    usable = usable and target_method(targets).reads_passes and reads_texts(experiment)
    passes = passes_of(experiment) if experiment.cache.adaptive and usable and not experiment.cache.last_layer else 0
    return adaptive_size(load.train_part(run).texts, passes) if passes > 1 else 0


def adaptive_size(texts: int, passes: int) -> int:
    """Returns the number of sampled texts, where they decide on the passes of the others."""
    return sample_size(texts, passes, min(MOST_SAMPLED, max(SAMPLED, round(SAMPLED_SHARE * texts))))


def adaptive_note(run: Run) -> Iterator[str]:
    """Yields a note where `cache.adaptive` is set and every text runs all passes nevertheless."""
    passes = passes_of(run.experiment)
    if run.experiment.cache.adaptive and passes and not adaptive_sample_size(run):
        needs = "targets.uncertainty=entropy, targets.passes=null, another targets.distribution than mc-mean"
        texts = f"{FEWEST_SAMPLED * passes:,} texts of corpus.train"
        yield f"cache.adaptive=true has no effect: it needs a method such as MUKA, {needs}, and {texts}"


def sample_size(texts: int, passes: int, most: int = SAMPLED) -> int:
    """Returns the number of sampled texts: together they run at most one pass for each text of the corpus."""
    size = min(most, texts // passes)
    return size if size >= FEWEST_SAMPLED else 0


def dtype_of(run: Run) -> str:
    """Returns the dtype; `auto` keeps the workspace's first choice, so results of two dtypes never mix."""
    wanted = run.experiment.cache.dtype
    dtype = pinned_dtype(run) if wanted == "auto" else wanted
    if dtype is None:
        raise PendingDependencyError("cache.dtype is chosen")
    return dtype


def pinned_dtype(run: Run) -> str | None:
    """Returns the dtype that `auto` chose before: that of its pin or, without a pin, of the results that exist."""
    return run.store.pinned("dtype", "auto") or _dtype_of_results(run)


@once
def _dtype_of_results(run: Run) -> str | None:
    """Returns the dtype of the results of `auto`, else that of the teachers' families if all have the same."""
    folders = run.store.folders("cache-teachers")
    manifests = run.store.records([folder / MANIFEST for folder in folders], complete=False).values()
    identities = [manifest.identity for manifest in manifests]
    dtypes = {each["inputs"]["dtype"] for each in identities if each["config"]["cache"]["dtype"] == "auto"}
    names = {folder.name for folder in folders}
    for dtype in () if dtypes else DTYPES:
        if any(coverage.family_name(family_key(run, teacher, dtype)) in names for teacher in load.teachers_of(run)):
            dtypes.add(dtype)
    return dtypes.pop() if len(dtypes) == 1 else None


def families_of(run: Run) -> dict[str, str]:
    dtype = dtype_of(run)
    return {teacher.name: coverage.family_name(family_key(run, teacher, dtype)) for teacher in load.teachers_of(run)}


def family_key(run: Run, teacher: ResolvedTeacher, dtype: str) -> dict[str, object]:
    key: dict[str, object] = {**teacher.identity, "seed": run.experiment.cache.seed, "dtype": dtype}
    if run.experiment.cache.last_layer:
        key["passes"] = "last-layer"
    config = teacher.files.config
    if text_config(config).get("pad_token_id") is None:
        key["pad"] = "no end token"  # earlier predictions were padded with the token that ends each text
    return key | full_attention(config, teacher.max_tokens) | run.versions


@once
def _family_indexes(run: Run, stage: str, _fingerprint: str) -> dict[str, coverage.PrefixIndex[StoredFile]]:
    """Returns the files of the stage's current manifest by family and bucket, in its order."""
    families: dict[str, list[tuple[str, StoredFile]]] = {}
    for file in run.result(stage).files:
        prefix = file.path.split("/")[3].partition("-")[0]  # STAGE/FAMILY/units/UNIT
        families.setdefault(coverage.family_in(file.path), []).append((prefix, file))
    return {family: coverage.PrefixIndex(pairs) for family, pairs in families.items()}


def cache_reader(run: Run) -> CacheReader:
    return CacheReader(
        store=run.store,
        manifest=run.result("cache-teachers"),
        indexes=_family_indexes(run, "cache-teachers", run.fingerprint("cache-teachers")),
        families=families_of(run),
        teachers={teacher.name: teacher for teacher in load.teachers_of(run)},
        targets=run.experiment.targets,
        passes=passes_of(run.experiment),
    )


# ---- hidden states


@dataclass(frozen=True)
class StateFamily:
    """The identity of one family of cached states: of the student's encoder where `teacher` is None."""

    key: Mapping[str, Any]
    teacher: ResolvedTeacher | None
    versions: Mapping[str, Any]
    """`Run.versions`, which the identity of every stage has already."""

    @property
    def name(self) -> str:
        return coverage.family_name({**self.key, **self.versions})

    @property
    def owner(self) -> str:
        return self.teacher.name if self.teacher else "the encoder"  # no teacher can have this name


def state_families(run: Run) -> list[StateFamily]:
    """Returns the families of states that the experiment reads, in the order of computation."""
    method, objective = target_method(run.experiment.targets), objective_inputs(run.experiment)
    families = [encoder_family(run)] if method.reads_features else []
    if reads_last_layers(run.experiment):
        families += [last_layer_family(run, teacher) for teacher in load.models_of(run)]
    if objective.states:
        families += [objective_family(run, teacher) for teacher in load.models_of(run)]
    return families


def reads_last_layers(experiment: ExperimentConfig) -> bool:
    """Returns whether a stage reads the states of every teacher's last layer."""
    by_domain = domain_measure(experiment) is not None and not objective_inputs(experiment).weighs_by_domain
    return experiment.student.learns and (by_domain or target_method(experiment.targets).reads_states)


def encoder_family(run: Run) -> StateFamily:
    """Returns the family for finding neighbours: mean of the last layer's tokens, before the student is trained."""
    student = run.experiment.student
    digest = load.encoder_digest(run, student, ENCODER)
    key = {"feature": "mean of the last block's tokens", "content": digest, "max_tokens": student.max_tokens}
    config = load.encoder_files(run, student, ENCODER).config
    if config.get("is_encoder_decoder"):
        key["part"] = "encoder"
    key |= {} if encoder_dtype(run) == "fp32" else {"dtype": encoder_dtype(run)}
    key |= _without_padding(config) | full_attention(config, student.max_tokens)
    return StateFamily(key, None, run.versions)


def objective_family(run: Run, teacher: ResolvedTeacher) -> StateFamily:
    """Returns the family of the states that the objective trains on."""
    experiment = run.experiment
    blocks = experiment.objective.blocks or experiment.student.layers
    if not blocks:
        load.encoder_digest(run, experiment.student, ENCODER)  # raises while the depth would need a request to the Hub
        blocks = depth_of(load.encoder_files(run, experiment.student, ENCODER))
    return _teacher_family(run, teacher, str(objective_inputs(experiment).states), blocks)


def last_layer_family(run: Run, teacher: ResolvedTeacher) -> StateFamily:
    return _teacher_family(run, teacher, "pooled", LAST_LAYER)


def statistics_family(run: Run, teacher: ResolvedTeacher) -> StateFamily:
    """Returns the family of the domain statistics: the objective's if it weighs by domain, else the last layer's."""
    return (objective_family if objective_inputs(run.experiment).weighs_by_domain else last_layer_family)(run, teacher)


def _teacher_family(run: Run, teacher: ResolvedTeacher, kind: str, blocks: int) -> StateFamily:
    """Passes, dropout and label names do not change the states, so they are not in the key."""
    key = {
        "states": kind,
        "blocks": blocks,
        "content": teacher.files.digest,
        "max_tokens": teacher.max_tokens,
        "dtype": dtype_of(run),
        **_without_padding(teacher.files.config),
        **full_attention(teacher.files.config, teacher.max_tokens),
    }
    return StateFamily(key, teacher, run.versions)


def _without_padding(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns a part of the key of states: earlier ones of models that read padding depended on other texts."""
    return {"padding": "none"} if reads_padding(config) else {}


def parts_of(run: Run, family: StateFamily) -> list[Part]:
    """Returns the parts whose texts need states of this family: train, and reference texts of the statistics."""
    if family.teacher is None or family.key != statistics_family(run, family.teacher).key:
        return [load.train_part(run)]
    return [load.train_part(run), *load.extra_parts(run)]


def states_of(
    run: Run,
    keys: Keys,
    family_of: Callable[[Run, ResolvedTeacher], StateFamily] = objective_family,
    prefixes: Sequence[str] | None = None,
) -> list[States]:
    """Returns the states of every teacher for the texts with these keys; `prefixes` are their buckets, None is all."""
    return [states_of_teacher(run, teacher, keys, family_of, prefixes) for teacher in load.teachers_of(run)]


def states_of_teacher(
    run: Run,
    teacher: ResolvedTeacher,
    keys: Keys,
    family_of: Callable[[Run, ResolvedTeacher], StateFamily],
    prefixes: Sequence[str] | None = None,
) -> States:
    folders: dict[Path, dict[str, Path]] = {}
    files = sorted(_files_of(run, family_of(run, teacher), prefixes), key=lambda file: Path(file.path))
    for file, local in zip(files, run.store.verified_paths(files), strict=True):
        path = Path(file.path)
        folders.setdefault(path.parent, {})[path.name] = local
    return open_states(teacher.name, list(folders.values()), keys)


def features_of(run: Run, keys: Keys, prefixes: Sequence[str] | None = None) -> Features:
    return open_features(run.store.verified_paths(_files_of(run, encoder_family(run), prefixes)), keys)


def _files_of(run: Run, family: StateFamily, prefixes: Sequence[str] | None) -> list[StoredFile]:
    index = _family_indexes(run, "cache-features", run.fingerprint("cache-features"))[family.name]
    return index.entries if prefixes is None else index.overlapping(prefixes)


def encoder_dtype(run: Run) -> str:
    """Returns the dtype of the encoder's states: that of the teachers, but fp32 for fp16, in which states overflow."""
    return "bf16" if dtype_of(run) == "bf16" else "fp32"


@once
def load_encoder(run: Run, dtype: str) -> Encoder:
    """Loads the student's encoder with all its layers, as it is before training."""
    from amalgam.stages.common.inference.states import Encoder

    student = run.experiment.student
    settings = student.model_copy(update={"layers": None, "encoder": student.encoder.removeprefix(STATIC)})
    new = load.load_new_classifier(run, settings, ["one", "two"], ENCODER)
    device = pick_device(run.experiment.execution.device)
    body = states_body(new.model).to(device).eval()
    encoder = Encoder(body.bfloat16() if dtype == "bf16" else body, new, device)
    encoder.check()
    return encoder
