"""Stage weigh-teachers: the weight of every teacher on every training text, from the cache and the embeddings.

A unit is a block of texts. The first fits means, ranges and shares, which the other blocks reuse: keys are digests, so
its texts are a random sample. A corpus of one block is fitted on all its texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NotRequired, TypedDict

from amalgam.data.arrays import Array, Keys
from amalgam.data.keys import shown_name
from amalgam.data.lazy import np, pa, pc
from amalgam.data.parquet import LABELLED_WEIGHTS, WEIGHTS, build_table, key_array, read_table, write_table
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import DamagedError
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit, once, pending_units
from amalgam.pipeline.storage.facts import FactTypes
from amalgam.pipeline.storage.store import Record, StoredFile
from amalgam.stages.common import load, load_labels
from amalgam.stages.common.cached import load as cached
from amalgam.stages.common.corpus import Bucket, are_written, group_name, neighbouring_buckets
from amalgam.stages.common.input_names import INPUT_NAMES
from amalgam.stages.common.intervals import bounds, percent
from amalgam.stages.target_methods import target_method
from amalgam.stages.weigh_teachers import weigh
from amalgam.stages.weigh_teachers.few_labels import Correction, with_known
from amalgam.stages.weigh_teachers.label_sets import LabelSets
from amalgam.stages.weigh_teachers.labelled_states import Labelled, PartlyLabelled, StateMaps, WeighedBlock, fit_labels
from amalgam.stages.weigh_teachers.load import (
    AnswerSignals,
    TextBlock,
    Texts,
    answer_signals,
    distinct_teachers,
    evidence_of,
    features_of,
    keys_of,
    name_states,
    notes_on_bases,
    text_blocks,
)
from amalgam.stages.weigh_teachers.name_order import UNCLEAR_ORDER, as_good_orders
from amalgam.stages.weigh_teachers.neighbours import Space, similar
from amalgam.stages.weigh_teachers.signals import Params, WeightFacts, one_label, standardised_sum
from amalgam.stages.weigh_teachers.weigh import estimated_accuracy

FITTED = "fitted.safetensors"

LABEL = "amalgam label --count 50"
"""The command in a stored note; the option -c is added when the note is shown."""

LABELLED = "weights_labelled.parquet"
"""The file with the weights of labelled texts; it exists with `labels` of the experiment."""


MOST_TIED = 0.5
"""Part of the texts with equally certain teachers, above which there is a note."""

UNCLEAR, MOST_UNCLEAR = 0.2, 0.05
"""Evidence for a teacher below which a text is unclear, and the share of such texts above which a note names them."""


class WeightSettings(TypedDict):
    teacher_weights: str


class WeightConfig(TypedDict):
    """The settings of a result that `describe` reads."""

    targets: WeightSettings


class BlockSums(TypedDict):
    """Sums over the texts of a block."""

    texts: int
    weights: list[float]
    """By teacher."""
    confirmed: list[float]
    """By linear map, the sum over the texts of what `_Signal.confirmed` has."""
    moved: int
    """Texts with another teacher of the largest weight than without labels."""
    unclear: int
    """Texts with little evidence for any teacher."""
    fit: NotRequired[WeightFacts]
    """The results of the checks, from the first block."""


class WeighTeachers(Stage):
    name = "weigh-teachers"
    VERSION = 31  # the tokens that fine-tuning moved are evidence
    parallelism = "units"
    unit_label = "texts"
    enabled_by = "choose weights that are estimated from all texts (student.method: amalgam)"
    facts = FactTypes(WeightFacts, BlockSums, config=WeightConfig)
    input_names = INPUT_NAMES

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        return experiment.student.learns and target_method(experiment.targets).estimates_weights

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:
        generated = ("generate",) if experiment.targets.weight_signal == "all" and are_written(experiment) else ()
        features = ("cache-features",) if target_method(experiment.targets).reads_features else ()
        return (*generated, "read-corpus", "train-teachers", "cache-teachers", *features)

    def resolve_inputs(self, run: Run) -> None:
        for base in load.named_bases(run).values() if run.experiment.targets.weight_signal == "all" else ():
            load.model_files(run, *base)

    def identity(self, run: Run) -> Identity:
        targets = run.experiment.targets
        settings = targets.model_dump(include={"teacher_weights", "weight_signal", "uncertainty", "temperature"})
        if targets.neighbours:
            settings["neighbours"] = targets.neighbours
        run.result("cache-teachers")
        inputs: dict[str, object] = {"texts": load.train_part(run).texts_digest, **cached.passes_identity(run)}
        inputs |= {"families": cached.families_of(run), "dtype": cached.dtype_of(run)}
        inputs["knows"] = load.known_labels(run)
        if run.experiment.has_catch_all:
            inputs["catch_all"] = "lowers evidence of states"
        if targets.weight_signal == "all" and are_written(run.experiment):
            inputs |= load.generated_identity(run)
        if targets.weight_signal == "all" and (bases := load.bases_of(run)):
            inputs["bases"] = {name: load.model_digest(run, *base) for name, base in bases.items()}
        inputs |= load_labels.labels_identity(run)
        if run.experiment.corpus.limit is not None and len(text_blocks(run)) > 1:
            # Texts beyond the limit move the blocks.
            inputs["blocks"] = [group_name(block.buckets) for block in text_blocks(run)]
        upstream = ["cache-features"] * target_method(targets).reads_features
        return Identity({"targets": settings}, inputs, {stage: run.fingerprint(stage) for stage in upstream})

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        """Returns the first block alone until it is complete."""
        first, *others = self.more_units(run, folder)
        return [first] if pending_units(run, [first]) else [first, *others]

    def more_units(self, run: Run, folder: Path) -> Sequence[Unit]:
        return [
            Unit(
                group_name(block.buckets),
                folder / "units",
                sum(bucket.rows for bucket in block.buckets),
                block,
                is_read_by_others=block.start == 0,
            )
            for block in text_blocks(run)
        ]

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the number of texts; where the first block is missing, all are."""
        if units is None or any(unit.is_read_by_others for unit in units):
            return float(load.train_part(run).texts)
        return float(sum(unit.size for unit in units))

    def run_unit(self, run: Run, unit: Unit) -> None:
        block: TextBlock = unit.payload
        texts, is_first = Texts.of(run, block), block.start == 0
        params = Params() if is_first else _first_params(run, unit.folder)
        weighed, signal = _weigh(run, texts, params)
        weights, labelled_weights = _with_labels(run, texts, weighed, params)
        moved = weights.argmax(axis=1) != weighed.weights.argmax(axis=1)
        weights = distinct_teachers(run).divided(weights)
        evidence = signal.largest_evidence
        facts = BlockSums(
            texts=len(weights),
            weights=weights.sum(axis=0).tolist(),
            confirmed=signal.confirmed.sum(axis=0).tolist(),
            moved=int(moved.sum()),
            unclear=0 if evidence is None else int((evidence < UNCLEAR).sum()),
        )
        if is_first:
            fit = params.facts
            fit["notes"] += [*notes_on_labels(run, weighed.predicted), *_note_on_exclusion(run, fit)]
            fit["notes"] += _note_on_ties(run, weighed, fit)
            fit["names"] = _as_good_orders(run, texts, weighed.predicted)
            facts["fit"] = {**fit, "fitted": len(weights)}
        with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
            column = pa.nulls(len(weights), "float32") if evidence is None else evidence.astype(np.float32)
            columns = {"key": texts.keys, "weight": weights.astype(np.float32), "evidence": column}
            write_table(build_table(WEIGHTS, columns), draft.folder / "weights.parquet")
            if labelled_weights is not None:
                write_table(labelled_weights, draft.folder / LABELLED)
            if is_first and len(text_blocks(run)) > 1:
                params.save(draft.folder / FITTED)
            draft.facts = facts

    def finish(self, run: Run, records: Sequence[Record]) -> WeightFacts:
        targets, space = run.experiment.targets, load.label_space(run)
        facts: WeightFacts = records[0].facts["fit"] | {}
        texts = sum(record.facts["texts"] for record in records)
        shares = np.sum([record.facts["weights"] for record in records], axis=0) / texts
        facts.setdefault("shares", dict(zip(space.columns, shares.round(4).tolist(), strict=True)))
        unclear, differ = sum(record.facts["unclear"] for record in records), len(LabelSets.of(space).groups) > 1
        if differ and unclear > MOST_UNCLEAR * texts and (source := _given_texts(run.experiment)):
            facts["notes"] = [*facts["notes"], _note_on_unclear(unclear, texts, source)]
        if "labelled" in facts:
            facts["labelled"] = {**facts["labelled"], "moved": sum(record.facts["moved"] for record in records)}
            return facts
        is_default = (targets.teacher_weights, targets.weight_signal) == ("range", "all")
        if is_default and differ and not facts["fallback"]:
            confirmed = np.sum([record.facts["confirmed"] for record in records], axis=0) / texts
            facts["accuracy"] = estimated_accuracy(confirmed.tolist(), texts)
        return facts

    def summary(self, run: Run, manifest: Record) -> Iterator[str]:
        shares = manifest.facts.get("shares", {}).items()
        yield f"estimated shares of the texts: {', '.join(f'{name} {100 * share:.0f}%' for name, share in shares)}"
        fitted, texts = manifest.facts.get("fitted", 0), load.train_part(run).texts
        if 0 < fitted < texts and not manifest.facts["fallback"]:
            yield f"ranges and shares were fitted on {fitted:,} random texts of {texts:,}"
        accuracy, labelled = manifest.facts.get("accuracy"), manifest.facts.get("labelled")
        if accuracy:
            value, interval = percent(accuracy["value"]), bounds(accuracy["low"], accuracy["high"])
            yield f"estimated accuracy of the targets: {value} (95 % interval {interval})"
        if labelled:
            moved = counted(labelled["moved"], "text", "has", "have")
            yield f"{counted(labelled['texts'], 'label')}; {moved} another teacher than without labels"

    def notes(self, run: Run, manifest: Record) -> list[str]:
        """Returns the stored notes, whose command gets the file of this run, and one on names that the file gives."""
        given = {teacher.name for teacher in run.experiment.teachers if teacher.labels}
        orders = manifest.facts.get("names", {}).items()
        doubtful = [teacher for teacher, share in orders if teacher in given and share > UNCLEAR_ORDER]
        notes = [*manifest.facts["notes"], *map(_note_on_names, doubtful)]
        return [note.replace(LABEL, f"{LABEL}{run.file_option}") for note in notes]

    def describe(self, manifest: Record) -> str:
        weights = manifest.identity["config"]["targets"]["teacher_weights"]
        return f"weights of {', '.join(manifest.facts.get('shares', ()))} ({weights})"


# ---- weights and their checks


@dataclass(frozen=True)
class _Signal:
    """The evidence as one signal; teachers of equal labels are one group."""

    values: Array | None
    """[texts, groups]; None: the evidence was dropped."""
    kinds: Sequence[Array]
    """[texts, groups] each."""
    answers: Array
    """The evidence of the predictions alone: [texts, teachers]."""
    spaces: Sequence[Space] = ()
    shares: Array | None = None
    """The groups' shares of the texts."""
    largest_evidence: Array | None = None
    """The largest of any teacher [texts]; None if no kinds of evidence were used."""
    confirmed: Array = field(default_factory=lambda: np.zeros((0, 1)))
    """1 where a linear map confirms the target, else 0: [texts, maps]; empty without maps.

    It is less than 1 where teachers of equal labels disagree.
    """


def _weigh(run: Run, texts: Texts, params: Params) -> tuple[WeighedBlock, _Signal]:
    """Returns the weights without labels, and their signal; the first block fills `params`."""
    targets, label_sets = run.experiment.targets, LabelSets.of(distinct_teachers(run).space)
    signals = answer_signals(run, texts)
    read_signal = _combined_signal if targets.weight_signal == "all" else _single_signal
    signal = read_signal(run, texts, signals, params)
    confirmed, shares = signal.confirmed, None
    params.facts["fallback"] = signal.values is None
    if signal.values is None:
        weights = weigh.by_confidence(signals.by_name["confidence"], signals.predicted, targets)
    else:
        weights, shares = weigh.weigh(signal.values, targets, signal.shares, params)
        if not label_sets.all_differ:
            of_groups, weights = weights, label_sets.divided(weights, signal.answers, params)
            if len(confirmed):  # teachers of the same labels that disagree share the weight of one
                largest = weigh.largest_sums(of_groups, label_sets.predicted(signals.predicted, signal.answers))
                part = weigh.largest_sums(weights, signals.predicted) / largest
                confirmed = confirmed * part[:, None]
            shares = None if shares is None else label_sets.divided_shares(shares, weights)
    if shares is not None:
        shares = distinct_teachers(run).divided(shares[None])[0]
        params.facts["shares"] = dict(zip(load.label_space(run).columns, shares.round(4).tolist(), strict=True))
    kinds = [label_sets.by_teacher(kind) for kind in signal.kinds]
    return WeighedBlock(weights, kinds, signals.predicted, signal.spaces), replace(signal, confirmed=confirmed)


def _combined_signal(run: Run, texts: Texts, signals: AnswerSignals, params: Params) -> _Signal:
    """Combines all kinds of evidence."""
    evidence, answers = evidence_of(run, texts, signals, params)
    values, shares = weigh.joint_signal(evidence, params)
    largest, confirmed = None if values is None else values.max(axis=1), np.zeros((0, 1))
    if values is not None and not params.is_reused and values.shape[1] > 1:
        params.facts["notes"] += notes_on_bases(run, params)
    if values is not None and run.experiment.targets.teacher_weights == "range":
        values, confirmed = weigh.with_maps(values, evidence, params)
    return _Signal(values, list(evidence.kinds.values()), answers, evidence.spaces, shares, largest, confirmed)


def _single_signal(run: Run, texts: Texts, signals: AnswerSignals, params: Params) -> _Signal:
    """Takes one number of the predictions; its values are None if it does not separate the teachers."""
    targets, label_sets = run.experiment.targets, LabelSets.of(distinct_teachers(run).space)
    answers = standardised_sum(list(signals.by_name.values()), params.scope("answers"))
    signal = _Signal(None, [label_sets.mean(answers)], answers)
    values = label_sets.mean(signals.by_name[targets.weight_signal])
    if not weigh.exclusive(values, params):
        return signal
    if targets.neighbours:
        near = similar(features_of(run, texts), targets.neighbours)
        values = weigh.coherent(values, near, params)
    if targets.teacher_weights == "range":
        detectors = label_sets.detectors(distinct_teachers(run).space)
        values = weigh.by_range(values, label_sets.predicted(signals.predicted, answers), params, detectors)
    return replace(signal, values=values)


def _given_texts(experiment: ExperimentConfig) -> str:
    """Returns the setting with the files of the training texts; "" if no file has them."""
    if experiment.generate is None:
        return "corpus.train"
    return "generate.corpus" if experiment.generate.reads_corpus else ""


def _note_on_unclear(unclear: int, texts: int, source: str) -> str:
    return (
        f"{unclear:,} of {texts:,} texts have little evidence for any teacher (`evidence` below {UNCLEAR} in the files "
        f"of weigh-teachers): their labels may be in no teacher. Remove such texts from {source}, or label them "
        "(`amalgam label`) by the name of `corpus.unknown`, such as none"
    )


def _note_on_names(teacher: str) -> str:
    return (
        f"teacher {teacher}: the names in `labels` fit the texts that it predicts them for no better than in another "
        f"order. Check their order, by the model's outputs; labels of some texts show it too ({LABEL})"
    )


def _as_good_orders(run: Run, texts: Texts, predicted: Array) -> dict[str, float]:
    """Returns, by teacher, the share of random orders of its label names that fit its predictions as well."""
    if not target_method(run.experiment.targets).reads_features:
        return {}
    features, names, shares = features_of(run, texts).texts, name_states(run), dict[str, float]()
    for (teacher, labels), column in zip(distinct_teachers(run).space.columns.items(), predicted.T, strict=True):
        place = np.zeros(names.shape[1], np.int64)
        place[list(labels)] = np.arange(len(labels))
        share = as_good_orders(features, names[:, list(labels)], place[column])
        if share is not None:
            shares[teacher] = round(share, 4)
    return shares


def notes_on_labels(run: Run, predicted: Array) -> Iterator[str]:
    """Yields a note for each teacher of several labels that predicts one of them for nearly all texts."""
    space = distinct_teachers(run).space
    for teacher, labels, alone in zip(space.columns, predicted.T, one_label(predicted), strict=True):
        if alone and len(space.columns[teacher]) > 1:
            counts = np.bincount(labels)
            label, share = shown_name(space.names[counts.argmax()]), percent(counts.max() / len(labels))
            yield (
                f"teacher {teacher} predicts {label} for {share} of the texts, so its "
                f"evidence is weak: label some texts ({LABEL})"
            )


def _note_on_exclusion(run: Run, facts: WeightFacts) -> Iterator[str]:
    """Yields a note if the evidence for a teacher is no lower where that for another is high."""
    labels = [label for own in distinct_teachers(run).space.columns.values() for label in own]
    are_shared = len(labels) > len(set(labels))
    if are_shared or facts["fallback"] or run.experiment.labels or are_written(run.experiment):
        return
    if facts.get("exclusion", 0.0) < 0:
        yield f"texts that suit one teacher suit others too, by the evidence: label some texts ({LABEL})"


def _note_on_ties(run: Run, weighed: WeighedBlock, facts: WeightFacts) -> Iterator[str]:
    """Yields a note if no evidence is used and the confidences hardly differ, as of files with one label."""
    tied = weigh.ties(weighed.weights, weighed.predicted).mean() if len(weighed.weights) else 0.0
    if facts["fallback"] and tied > MOST_TIED and not run.experiment.labels:
        yield (
            f"the teachers are equally certain of {percent(tied)} of the texts, whose targets are arbitrary: "
            f"label some texts ({LABEL}), or use files with several answers"
        )


@once
def _first_params(run: Run, folder: Path) -> Params:
    """Returns the numbers that the first block determined."""
    first = folder / f"{group_name(text_blocks(run)[0].buckets)}.json"
    record = run.store.record(first)
    if record is None:
        raise DamagedError(f"weigh-teachers {first.stem} is missing", path=str(first))
    return Params.load(run.store.verified_path(next(file for file in record.files if file.name == FITTED)))


# ---- labels


def _with_labels(run: Run, texts: Texts, weighed: WeighedBlock, params: Params) -> tuple[Array, pa.Table | None]:
    """Returns the weights after the labels of the experiment, and in the first block those of `_fit_labels`."""
    labelled, table = _labelled(run, texts.keys), None
    if labelled is None:
        return weighed.weights, None
    if params.is_reused:
        weights = _corrected(weighed, params.scope("labels"))
    else:
        weights, table = _fit_labels(run, texts, weighed, labelled, params)
    return with_known(weights, labelled.rows, labelled.has_label), table


def _corrected(weighed: WeighedBlock, params: Params) -> Array:
    """Returns the weights of a later block, corrected as the first block determined."""
    spaces = weighed.spaces if len(params.stored("scales")) else []
    places = range(len(spaces))
    to_teachers, to_labels = ([params.stored(f"{kind} {at}") for at in places] for kind in ("teachers", "labels"))
    more = StateMaps(to_teachers, to_labels, params.stored("scales"))(spaces, weighed.predicted)
    correction = Correction(params.stored("correction"), params.stored("biases"))
    return correction(weighed.with_kinds(more))


def _fit_labels(
    run: Run, texts: Texts, weighed: WeighedBlock, labelled: Labelled, params: Params
) -> tuple[Array, pa.Table]:
    """Adds the correction by all labelled texts; returns the weights, and those of labelled texts without their labels.

    Texts of other blocks are read for it.
    """
    parts = [(texts, PartlyLabelled.of(weighed, labelled))]
    for others, labels in _labelled_elsewhere(run):
        block, _ = _weigh(run, others, params.reused())
        parts.append((others, PartlyLabelled.of(block, labels)))
    first, *rest = [part for _, part in parts]
    fit = fit_labels(first, rest, len(load.label_space(run).names))
    result, maps = fit.result, fit.maps
    named = {"correction": result.correction.coefficients, "biases": result.correction.biases, "scales": maps.scales}
    named |= {f"teachers {at}": coefficients for at, coefficients in enumerate(maps.to_teachers)}
    named |= {f"labels {at}": coefficients for at, coefficients in enumerate(maps.to_labels)}
    params.scope("labels").store(named)
    params.facts.pop("shares", None)
    params.facts["labelled"] = {
        "texts": len(result.fitted),
        "moved": 0,
        "strength": result.strength,
        "loss_before": round(result.loss_before, 4),
        "loss_after": round(result.loss_after, 4),
    }
    keys = pa.concat_arrays([texts.keys.take(pa.array(part.rows)) for texts, part in parts])
    by_name = {"fitted": result.fitted, "left_out": result.cross_validated}
    columns = {name: distinct_teachers(run).divided(weights).astype(np.float32) for name, weights in by_name.items()}
    return fit.weights, build_table(LABELLED_WEIGHTS, {"key": keys, **columns})


def _labelled_elsewhere(run: Run) -> Iterator[tuple[Texts, Labelled]]:
    """Yields the labelled texts after the first block, in groups of buckets."""
    given, first, after = load_labels.given_labels(run), text_blocks(run)[0], text_blocks(run)[1:]
    bits = {format(int.from_bytes(key[:2], "big"), "016b") for key in given.by_key} if given else set()
    buckets = [bucket for block in after for bucket in block.buckets]
    lengths = {len(bucket.prefix) for bucket in buckets}
    prefixes = {digits[:length] for digits in bits for length in lengths}
    start = sum(bucket.rows for bucket in first.buckets)  # after all references, so none is the text itself
    for group in neighbouring_buckets([bucket for bucket in buckets if bucket.prefix in prefixes]):
        keys = keys_of(run, group)
        labelled = _labelled(run, keys)
        if labelled is not None and len(labelled.rows):
            texts = Texts(keys.take(labelled.rows), [bucket.prefix for bucket in group], start)
            yield texts, replace(labelled, rows=np.arange(len(labelled.rows)))


def _labelled(run: Run, keys: pa.Array) -> Labelled | None:
    """Returns the texts with a label in `labels` of the experiment; None if `labels` has no label of a teacher."""
    given, space = load_labels.given_labels(run), distinct_teachers(run).space
    if given is None or not given.by_key:
        return None
    is_given = pc.is_in(keys, value_set=pa.array(list(given.by_key), keys.type))
    rows = np.flatnonzero(is_given.to_numpy(zero_copy_only=False))
    place = {name: index for index, name in enumerate(space.names)}
    gold = np.array([place[given.by_key[key]] for key in keys.take(rows).to_pylist()], np.int64)
    return Labelled(rows, np.stack([np.isin(gold, labels) for labels in space.columns.values()], axis=1), gold)


# ---- reading weights


def largest_evidence(run: Run, keys: Keys) -> Array | None:
    """Returns the largest scaled evidence of a teacher on texts [n], given in the order of their keys.

    None: weigh-teachers used no kinds of evidence.
    """
    tables: list[pa.Table] = []
    while not tables or key_array(tables[-1].column("key"))[-1] < keys[-1]:
        file = _weight_files(run)[len(tables)]
        tables.append(read_table(run.store.verified_path(file), ["key", "evidence"]))
    table = pa.concat_tables(tables)
    if table.column("evidence").null_count:
        return None
    rows = np.searchsorted(key_array(table.column("key")), keys)
    return table.column("evidence").to_numpy()[rows]


def _weight_files(run: Run) -> list[StoredFile]:
    """Returns the files of the blocks, in the order of their keys."""
    files = run.result("weigh-teachers").files
    return [file for file in files if file.name.endswith(".parquet") and file.name != LABELLED]


def weights_of(run: Run, buckets: Sequence[Bucket]) -> pa.Table:
    """Returns the teacher weights of neighbouring buckets, in the order of their keys."""
    files = _weight_files(run)
    first, last = buckets[0].prefix, buckets[-1].prefix
    overlapping = [
        (block, file)
        for block, file in zip(text_blocks(run), files, strict=True)
        if block.buckets[0].prefix <= last and first <= block.buckets[-1].prefix
    ]
    table = pa.concat_tables(map(read_table, run.store.verified_paths([file for _, file in overlapping])))
    before = (bucket.rows for bucket in overlapping[0][0].buckets if bucket.prefix < first)
    return table.slice(sum(before), sum(bucket.rows for bucket in buckets))


def labelled_weights_of(run: Run) -> pa.Table:
    """Returns the teacher weights of the labelled texts before their labels were set."""
    files = run.result("weigh-teachers").files
    return _read_weights(run, next(file for file in files if file.name == LABELLED))


@once
def _read_weights(run: Run, file: StoredFile) -> pa.Table:
    return read_table(run.store.verified_path(file))
