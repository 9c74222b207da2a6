"""Stage cache-features: hidden states of the training texts, kept by key for the methods that look at them.

It stores states of the untrained student encoder for methods that use neighbouring texts, and states of every teacher
for objectives that learn from them. Families work as for predictions: appended texts cost only themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from amalgam.data.parquet import write_table
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import ModelError
from amalgam.pipeline.execution.faults import with_retries
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit
from amalgam.pipeline.storage.facts import FactTypes
from amalgam.pipeline.storage.store import Record
from amalgam.stages.common import load
from amalgam.stages.common.cached import load as cached
from amalgam.stages.common.cached.coverage import StateFacts, family_in, units_for
from amalgam.stages.common.input_names import ENCODER, INPUT_NAMES
from amalgam.stages.common.models.model_folder import ONE_RUN, OTHER_LAYERS, text_config
from amalgam.stages.common.models.resolve import ModelFiles, depth_of, hidden_size
from amalgam.stages.common.token_cache import TokenizedUnit, tokenizer_digest
from amalgam.stages.objective_inputs import domain_measure, no_layers, objective_inputs
from amalgam.stages.target_methods import target_method

if TYPE_CHECKING:
    from amalgam.stages.common.inference.teacher import Teacher

STATES = "hidden states of the student's encoder"
"""The name of an input."""


class FamiliesFacts(TypedDict):
    """The families of states by their owner."""

    families: dict[str, list[str]]
    clipped: NotRequired[dict[str, int]]
    """By owner, the numbers beyond the largest of fp16; without owners that have none."""


class CacheFeatures(Stage):
    name = "cache-features"
    VERSION = 1
    parallelism = "units"
    unit_label = "texts"
    reads = ("read-corpus", "train-teachers")
    enabled_by = "choose targets or an objective that read hidden states"
    facts = FactTypes(FamiliesFacts, StateFacts)
    input_names = {
        r"features(\.feature)?": STATES,
        r"features\.content": ENCODER,
        r"features\.dtype": "cache.dtype",
        r"features\.max_tokens": "student.max_tokens",
        r"features\.(.+)": rf"{STATES}: \1",
        r"tokens_of": "tokens of the student's encoder",
        r"tokens_of\.0": ENCODER,
        r"tokens_of\.1": "student.max_tokens",
    } | INPUT_NAMES

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        reads_states = objective_inputs(experiment).states is not None or domain_measure(experiment) is not None
        return experiment.student.learns and (reads_states or target_method(experiment.targets).reads_features)

    def resolve_inputs(self, run: Run) -> None:
        load.encoder_files(run, run.experiment.student, cached.ENCODER)
        check_states(run)  # before the teachers run

    def identity(self, run: Run) -> Identity:
        inputs: dict[str, object] = {"texts": load.train_part(run).texts_digest}
        inputs |= {part.name: part.texts_digest for part in load.extra_parts(run)}
        features = next((family.key for family in cached.state_families(run) if family.teacher is None), None)
        inputs |= {"features": features} if features else {}
        of_teachers = [[family.owner, family.key] for family in cached.state_families(run) if family.teacher]
        inputs |= {"states": of_teachers} if of_teachers else {}
        if objective_inputs(run.experiment).states == "tokens":  # as this encoder's tokenizer cuts texts too
            student = run.experiment.student
            inputs["tokens_of"] = [load.encoder_digest(run, student, cached.ENCODER), student.max_tokens]
        return Identity({}, inputs)

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        requests = {
            part.name: list(cached.requests_of(run, part)) for part in (load.train_part(run), *load.extra_parts(run))
        }
        units: list[Unit] = []
        for family in _families(run):
            present = cached.units_of(run, self.name, family.name)
            for bucket in (bucket for part in cached.parts_of(run, family) for bucket in requests[part.name]):
                units += units_for(family.owner, bucket, present, 0)
        return units

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the number of texts, counted once for each kind of states that cache-teachers will not write."""
        if units is None:
            return _texts(run, [family for family in _families(run) if not _comes_with_predictions(run, family)])
        predicted = {family.name: _predicted(run, family) for family in _families(run)}

        def is_apart(unit: Unit) -> bool:
            names = predicted[unit.folder.parent.name]
            return unit.is_complete or names is None or unit.name in names

        return float(sum(unit.size for unit in units if is_apart(unit)))

    def least_bytes(self, run: Run, units: Sequence[Unit] | None) -> tuple[int, int]:
        """Returns a byte for each number of one state of each text: half of its size in fp16, as for predictions."""
        student = run.experiment.student
        files = [
            family.teacher.files if family.teacher else load.encoder_files(run, student, cached.ENCODER)
            for family in cached.state_families(run)
        ]
        sizes = [hidden_size(model) for model in files]
        texts = _texts(run, _families(run)) if units is None else sum(unit.size for unit in units)
        return int(texts) * min(sizes, default=0), 0

    def run_units(self, run: Run, units: Sequence[Unit]) -> None:
        for name, group in groupby(units, key=lambda unit: unit.folder.parent.name):
            work = _work_on(run, next(family for family in _families(run) if family.name == name))
            for unit in group:
                run.signals.check()
                with_retries(partial(work, unit), f"{self.name} {unit.name}", run.store, run.console)
                run.console.advance(unit.size)

    def finish(self, run: Run, records: Sequence[Record]) -> FamiliesFacts:
        families: dict[str, list[str]] = {}
        for family in cached.state_families(run):
            named = f"states of {family.owner}" if family.teacher else f"features of {run.experiment.student.encoder}"
            cached.describe_family(run, self.name, family.name, {"teacher": named, **family.key, **family.versions})
            families.setdefault(family.owner, []).append(family.name)
        counts = Counter[str]()
        for record in records:
            counts[family_in(record.files[0].path)] += record.facts.get("clipped", 0)
        by_owner = {owner: sum(counts[name] for name in names) for owner, names in families.items()}
        clipped = {owner: count for owner, count in by_owner.items() if count}
        return {"families": families, "clipped": clipped} if clipped else {"families": families}

    def notes(self, run: Run, manifest: Record) -> Iterator[str]:
        for owner, count in manifest.facts.get("clipped", {}).items():
            numbers = counted(count, "number", "was", "were")
            yield f"teacher {owner}: {numbers} clipped in its hidden states, at 65504, the largest that the cache keeps"

    def recomputed(self, unit: Record | None, teacher: str) -> str:
        texts = counted(unit.facts["rows"], "text") if unit and "rows" in unit.facts else "one unit"
        return f"computed again: hidden states of {texts}{f' of teacher {teacher}' if teacher else ''}"

    def describe(self, manifest: Record) -> str:
        return f"states of {', '.join(manifest.facts['families'])}"


def _families(run: Run) -> list[cached.StateFamily]:
    """Returns the required states, those of teachers of one model once."""
    return list({family.name: family for family in cached.state_families(run)}.values())


def _texts(run: Run, families: Sequence[cached.StateFamily]) -> float:
    return float(sum(part.texts for family in families for part in cached.parts_of(run, family)))


def _comes_with_predictions(run: Run, family: cached.StateFamily) -> bool:
    """Returns whether cache-teachers writes these states where it lacks the predictions."""
    if family.teacher is None or cached.passes_of(run.experiment) or not cached.reads_last_layers(run.experiment):
        return False
    is_last_layer = family.key == cached.last_layer_family(run, family.teacher).key
    return is_last_layer and family.teacher.files.config.get("model_type") in ONE_RUN


def _predicted(run: Run, family: cached.StateFamily) -> Collection[str] | None:
    """Returns the names of the units with predictions, whose states are computed apart; None: those of all are."""
    if family.teacher is None or not _comes_with_predictions(run, family):
        return None
    folder = cached.units_folder(run, "cache-teachers", cached.families_of(run)[family.teacher.name])
    return {path.stem for path in run.store.units_in(folder)}


def _work_on(run: Run, family: cached.StateFamily) -> Callable[[Unit], None]:
    """Returns the function that computes and commits one unit of this family."""
    if family.teacher is None:
        return partial(_write_features, run)
    teacher = load.teacher_loader(run).load(family.teacher, family.key["dtype"], passes=0)
    tokenize = load.unit_texts(run, [load.train_part(run), *load.extra_parts(run)]).tokenizer(family.teacher, teacher)
    return partial(_write_states, run, family.key, teacher, tokenize)


def _write_features(run: Run, unit: Unit) -> None:
    from amalgam.stages.common.inference.states import feature_table

    bucket = next(bucket for bucket in load.train_part(run).buckets if bucket.prefix == unit.payload.prefix)
    encoder = cached.load_encoder(run, cached.encoder_dtype(run))
    rows, tokens = load.token_cache(run, encoder.classifier).read(bucket, unit.payload.rows)
    table = feature_table(encoder, rows.column("key"), tokens)
    with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
        write_table(table, draft.folder / "unit.parquet")
        draft.facts = unit.payload.facts(table.num_rows)


def _write_states(
    run: Run, key: Mapping[str, Any], teacher: Teacher, tokenize: Callable[[Unit], TokenizedUnit], unit: Unit
) -> None:
    from amalgam.stages.common.inference.states import write_states

    texts = tokenize(unit)
    by_token = key["states"] == "tokens"
    with run.store.draft(unit.folder, unit.name) as draft:
        written = (draft.folder, teacher, texts.keys, texts.tokens)
        clipped = write_states(*written, blocks=key["blocks"], by_token=by_token)
        draft.facts = unit.payload.facts_of_states(len(texts.keys), clipped)


def check_states(run: Run) -> None:
    """Refuses a student without the states that the objective reads or replaces, and a teacher of other tokens.

    Tokens have to be equal if the objective compares the states of each.
    """
    student, objective = run.experiment.student, objective_inputs(run.experiment)
    if not (student.learns and objective.states):
        return
    load.encoder_digest(run, student, cached.ENCODER)  # raises if the next line would send a request
    files = load.encoder_files(run, student, cached.ENCODER)
    if files.config.get("is_encoder_decoder") and not student.is_static:
        what = "an encoder-decoder as the student gives no states of its tokens, which the objective compares"
        fix = "use a BERT-like encoder, or a method that reads no states: `amalgam methods`"
        raise ModelError(what, where=f"{cached.ENCODER}: {student.encoder}", fix=fix)
    if objective.replaces_states and text_config(files.config).get("model_type") in OTHER_LAYERS:
        raise no_layers(student.layers or depth_of(files))
    wanted = _digest(files) if objective.states == "tokens" else None
    for teacher in load.teachers_of(run) if wanted else ():
        fix = "set objective.states=pooled (layerwise: objective.schedule=joint), or use an encoder with its tokenizer"
        if _digest(teacher.files) != wanted:
            what = f"teacher {teacher.name} and the student's encoder {student.encoder} do not tokenise alike"
            raise ModelError(f"{what}, so their tokens have no counterparts", where="objective.states: tokens", fix=fix)
        if teacher.max_tokens != student.max_tokens:
            what = (
                f"teacher {teacher.name} reads {teacher.max_tokens} tokens of a text, the student {student.max_tokens}"
            )
            fix = f"set student.max_tokens={teacher.max_tokens}, or cache.max_tokens={student.max_tokens}"
            raise ModelError(f"{what}: long texts are cut otherwise", where="objective.states: tokens", fix=fix)


def _digest(files: ModelFiles) -> str:
    from amalgam.stages.common.models.loading import load_tokenizer

    return tokenizer_digest(load_tokenizer(files), files)
