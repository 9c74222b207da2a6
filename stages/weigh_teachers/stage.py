"""Stage weigh-teachers: one unit, the weight of every teacher on every training text, from the cache alone.

Wanted where `targets.teacher_weights` is not MUKA's own, which looks at one text at a time: these look at all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from amalgam.data.arrays import Array, top_margin
from amalgam.data.keys import text_key
from amalgam.data.lazy import np, pa, pc, pl
from amalgam.data.parquet import LABELLED_WEIGHTS, WEIGHTS, build_table, key_array, read_table, write_table
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit, once
from amalgam.pipeline.storage.facts import FactTypes
from amalgam.pipeline.storage.store import Record, StoredFile
from amalgam.stages.common.cached.load import (
    answer_reader,
    dtype_of,
    families_of,
    features_of,
    last_states,
    load_encoder,
    passes_counted,
    states_of,
)
from amalgam.stages.common.cached.read import States
from amalgam.stages.common.corpus import Bucket, are_written, neighbouring_buckets, read_bucket
from amalgam.stages.common.intervals import bounds, percent
from amalgam.stages.common.load import generated_file, given_labels, label_space, labels_identity, train_part
from amalgam.stages.target_methods import target_method
from amalgam.stages.weigh_teachers import weigh
from amalgam.stages.weigh_teachers.few_labels import Corrected, Labelled, corrected
from amalgam.stages.weigh_teachers.label_sets import LabelSets
from amalgam.stages.weigh_teachers.neighbours import blocks_of, nearest
from amalgam.stages.weigh_teachers.weigh import Evidence, WeightFacts, estimated_accuracy

LABELLED = "weights_labelled.parquet"
"""The file with the weights of labelled texts; it exists with `labels` of the experiment."""


class WeightSettings(TypedDict):
    teacher_weights: str


class WeightConfig(TypedDict):
    """The settings of a result that `describe` reads."""

    targets: WeightSettings


class WeighTeachers(Stage):
    name = "weigh-teachers"
    VERSION = 10
    parallelism = "single"
    unit_label = "weighings"
    enabled_by = "choose weights that are estimated from all texts (student.method: amalgam)"
    facts = FactTypes(WeightFacts, WeightFacts, config=WeightConfig)

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        return experiment.student.learns and target_method(experiment.targets).weighs_together

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:
        generated = ("generate",) if are_written(experiment) else ()
        features = ("cache-features",) if target_method(experiment.targets).reads_features else ()
        return (*generated, "read-corpus", "train-teachers", "cache-teachers", *features)

    def identity(self, run: Run) -> Identity:
        targets = run.experiment.targets
        settings = targets.model_dump(include={"teacher_weights", "weight_signal", "uncertainty", "temperature"})
        if targets.neighbours:
            settings["neighbours"] = targets.neighbours
            if targets.weight_signal != "all":
                settings["smoothing_rounds"] = 1  # neighbours' means replace a single signal once
        run.result("cache-teachers")
        inputs: dict[str, object] = {"texts": train_part(run).texts_digest, **passes_counted(run)}
        inputs |= {"families": families_of(run), "dtype": dtype_of(run)}
        if targets.weight_signal == "all" and are_written(run.experiment):
            inputs["written"] = generated_file(run).sha256
        if given_labels(run):
            inputs |= {**labels_identity(run), "labelled weights": "left out"}  # before, they were not kept
        if not LabelSets.of(label_space(run)).all_differ:
            inputs["combined"] = "teachers with the same labels"  # before, they excluded each other
        upstream = ["cache-features"] if target_method(targets).reads_features else []
        fingerprints = {stage: run.fingerprint(stage) for stage in upstream}
        return Identity({"targets": settings}, inputs, fingerprints)

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:  # noqa: ARG002
        return [Unit("weights", folder)]

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:  # noqa: ARG002 - the base class's arguments
        """Returns the number of texts."""
        return float(train_part(run).texts)

    def run_unit(self, run: Run, unit: Unit) -> None:
        weights, labelled, facts = teacher_weights(run)
        with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
            write_table(weights, draft.folder / "weights.parquet")
            if labelled is not None:
                write_table(labelled, draft.folder / LABELLED)
            draft.facts = facts

    def summary(self, run: Run, manifest: Record) -> Iterator[str]:  # noqa: ARG002 - the base class's arguments
        shares = ", ".join(
            f"{teacher} {100 * share:.0f}%" for teacher, share in manifest.facts.get("shares", {}).items()
        )
        yield f"estimated shares of the texts: {shares}"
        accuracy, labelled = manifest.facts.get("accuracy"), manifest.facts.get("labelled")
        if accuracy:
            yield (
                f"estimated accuracy of the targets: {percent(accuracy['value'])} "
                f"(95 % interval {bounds(accuracy['low'], accuracy['high'])})"
            )
        if labelled:
            yield f"{labelled['texts']:,} labels; {labelled['moved']:,} texts have another teacher than without them"

    def notes(self, run: Run, manifest: Record) -> list[str]:  # noqa: ARG002 - the base class's arguments
        return list(manifest.facts["notes"])

    def describe(self, manifest: Record) -> str:
        weights = manifest.identity["config"]["targets"]["teacher_weights"]
        return f"{weights} weights of {', '.join(manifest.facts.get('shares', ()))}"


def teacher_weights(run: Run) -> tuple[pa.Table, pa.Table | None, WeightFacts]:
    """Returns the weights of all training texts in the order of their keys, and the facts of the manifest.

    The second table has the weights of the labelled texts without their own labels; None without labels.
    """
    targets, buckets, teachers = run.experiment.targets, train_part(run).buckets, list(label_space(run).columns)
    facts: WeightFacts = {"notes": []}
    keys, predicted, label_sets = keys_of(run, buckets), predictions(run, buckets), LabelSets.of(label_space(run))
    answers = predicted.evidence
    combined = weigh.together(list(answers.values()))
    shares, kinds = None, {"answers": label_sets.mean(combined)}
    if targets.weight_signal == "all":
        evidence = evidence_of(run, keys, predicted)
        kinds = dict(evidence.kinds)
        signal, shares = weigh.agreed_signal(evidence, targets.neighbours, facts)
    else:
        signal = weigh.exclusive(label_sets.mean(answers[targets.weight_signal]), facts)
        if signal is not None and targets.neighbours:
            near = nearest(features_of(run, key_array(keys)), targets.neighbours)[0]
            signal = weigh.coherent(signal, near, facts)
        if signal is not None and targets.teacher_weights == "range":
            signal = weigh.by_range(signal, label_sets.predicted(predicted.labels, combined))
    facts["fallback"] = signal is None
    weights, estimated = weigh.weigh(signal, label_sets.mean(answers["confidence"]), targets, facts, shares)
    labelled, is_default = _labelled(run, keys), (targets.teacher_weights, targets.weight_signal) == ("range", "all")
    estimate = estimated_accuracy(weights) if signal is not None and is_default and not labelled else None
    if estimate:
        facts["accuracy"] = estimate
    if not label_sets.all_differ:
        weights = label_sets.divided(weights, combined)
        estimated = label_sets.divided_shares(estimated, weights)
    apart = None
    if labelled:
        by_teacher = [label_sets.by_teacher(kind) for kind in kinds.values()]
        result = _with_labels(weights, by_teacher, predicted.labels, labelled, facts)
        weights, estimated = result.weights, result.weights.mean(axis=0)
        columns = {"fitted": result.fitted.astype(np.float32), "left_out": result.left_out.astype(np.float32)}
        apart = build_table(LABELLED_WEIGHTS, {"key": keys.take(pa.array(labelled.rows)), **columns})
    facts["shares"] = dict(zip(teachers, estimated.round(4).tolist(), strict=True))
    return build_table(WEIGHTS, {"key": keys, "weight": weights.astype(np.float32)}), apart, facts


def _labelled(run: Run, keys: pa.Array) -> Labelled | None:
    """Returns the texts with a label in `labels` of the experiment, or None."""
    given, space = given_labels(run), label_space(run)
    if given is None:
        return None
    teachers_with = {
        name: [name in owners for name in space.columns] for name, owners in zip(space.names, space.owners, strict=True)
    }
    rows = np.flatnonzero(
        pc.is_in(keys, value_set=pa.array(list(given.by_key), keys.type)).to_numpy(zero_copy_only=False)
    )
    return Labelled(rows, np.array([teachers_with[given.by_key[key]] for key in keys.take(rows).to_pylist()]))


def _with_labels(
    weights: Array, kinds: Sequence[Array], predicted: Array, labelled: Labelled, facts: WeightFacts
) -> Corrected:
    """Returns the weights after the labels."""
    result = corrected(weights, kinds, predicted, labelled)
    moved = weights.argmax(axis=1) != result.weights.argmax(axis=1)
    facts["labelled"] = {
        "texts": len(labelled.rows),
        "moved": int(moved.sum()),
        "strength": result.strength,
        "loss_before": round(result.loss_before, 4),
        "loss_after": round(result.loss_after, 4),
    }
    return result


@dataclass(frozen=True)
class Predictions:
    """The teachers' predictions on all texts."""

    evidence: dict[str, Array]
    """Confidence, margin and highest logit: [texts, teachers] each."""
    labels: Array
    """Position of the predicted label in the union: [texts, teachers]."""


def predictions(run: Run, buckets: Sequence[Bucket]) -> Predictions:
    """Reads the predictions of all teachers, in the order of the buckets' keys."""
    reader, parts, labels = answer_reader(run), [], []
    for group in neighbouring_buckets(buckets):
        keys, prefixes = pl.Series("key", keys_of(run, group), pl.Binary), [bucket.prefix for bucket in group]
        by_teacher, predicted = [], []
        for teacher, own in label_space(run).columns.items():
            evidence = reader.evidence(teacher, prefixes, keys)
            logits, confidence = evidence.logits.to_numpy(), evidence.confidence.to_numpy()
            margin = top_margin(logits.astype(np.float64))
            by_teacher.append(np.stack([confidence, margin, logits.max(axis=1)], axis=1))
            predicted.append(np.array(own)[logits.argmax(axis=1)])
        parts.append(np.stack(by_teacher, axis=2))
        labels.append(np.stack(predicted, axis=1))
    joined = np.concatenate(parts)
    by_name = {name: joined[:, place] for place, name in enumerate(("confidence", "margin", "highest"))}
    return Predictions(by_name, np.concatenate(labels))


def evidence_of(run: Run, keys: pa.Array, predicted: Predictions) -> Evidence:
    """Reads all kinds of evidence for the texts with these keys; teachers of equal labels are one."""
    space, features = label_space(run), features_of(run, key_array(keys))
    states = [Pooled(own) for own in states_of(run, key_array(keys), last_states)]
    labels, owned = load_encoder(run).name_states(space.names).T, list(map(list, space.columns.values()))
    similarity = (features[rows] @ labels for rows in blocks_of(features))
    names = np.concatenate([np.stack([block[:, own].max(axis=1) for own in owned], axis=1) for block in similarity])
    kinds = weigh.kinds_of(list(predicted.evidence.values()), states, names, len(space.names))
    label_sets, written = LabelSets.of(space), provenance(run, keys)
    return Evidence(
        kinds=label_sets.means(kinds),
        predicted=label_sets.predicted(predicted.labels, kinds["answers"]),
        features=features,
        states=label_sets.joined(states),
        written=None if written is None else label_sets.mean(written),
    )


@dataclass(frozen=True)
class Pooled:
    """A teacher's pooled states as a space."""

    states: States

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, rows: Any, /) -> Array:
        places = np.arange(len(self.states))[rows]
        return self.states.take(places)[:, 0, 0].astype(np.float32)


def provenance(run: Run, keys: pa.Array) -> Array | None:
    """Returns the class's probability at the teacher that a text was generated for, 0 at others.

    None: texts were generated for no teacher, or there is one.
    """
    teachers = list(label_space(run).columns)
    if not are_written(run.experiment) or len(teachers) == 1:
        return None
    columns = ["text", "teacher", "class_probability"]
    table = read_table(run.store.verified_path(generated_file(run)), columns)
    rows = {key: row for row, key in enumerate(keys.to_pylist())}
    probabilities = np.zeros((len(rows), len(teachers)))
    for text, teacher, probability in zip(*(table.column(name).to_pylist() for name in columns), strict=True):
        row = rows.get(text_key((text,)))
        if row is not None:
            place = teachers.index(teacher)
            probabilities[row, place] = max(probabilities[row, place], probability)
    return probabilities


def keys_of(run: Run, buckets: Sequence[Bucket]) -> pa.Array:
    """Returns the keys of the buckets' texts."""
    table = pa.concat_tables(read_bucket(run.store, bucket, ["key"]) for bucket in buckets)
    return table.column("key").combine_chunks()


def weights_of(run: Run) -> pa.Table:
    """Returns the teacher weights in the order of the corpus's buckets and their keys."""
    files = run.result("weigh-teachers").files
    return _read_weights(run, next(file for file in files if Path(file.path).name != LABELLED))


def labelled_weights_of(run: Run) -> pa.Table:
    """Returns the teacher weights of the labelled texts before their labels were set."""
    files = run.result("weigh-teachers").files
    return _read_weights(run, next(file for file in files if Path(file.path).name == LABELLED))


@once
def _read_weights(run: Run, file: StoredFile) -> pa.Table:
    return read_table(run.store.verified_path(file))
