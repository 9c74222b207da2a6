"""Reads the evidence of weigh-teachers from the cache: a block of texts at a time, teachers without copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from amalgam.data.arrays import Array, Keys, softmax, top_margin
from amalgam.data.keys import shown_names, text_key
from amalgam.data.lazy import np, pa, pl
from amalgam.data.parquet import key_array
from amalgam.pipeline.execution.stage import Run, once
from amalgam.stages.common import load
from amalgam.stages.common.cached import load as cached
from amalgam.stages.common.corpus import Bucket, are_written, neighbouring_buckets, read_bucket
from amalgam.stages.common.models.resolve import ResolvedTeacher
from amalgam.stages.common.token_cache import TokenCache, tokenizer_digest
from amalgam.stages.weigh_teachers import weigh
from amalgam.stages.weigh_teachers.label_sets import DistinctTeachers, LabelSets
from amalgam.stages.weigh_teachers.moved_tokens import have_one_origin, mean_movement, movement
from amalgam.stages.weigh_teachers.neighbours import (
    BlockSpace,
    Compared,
    Pooled,
    Space,
    compared,
    rows_of,
)
from amalgam.stages.weigh_teachers.signals import Params, with_absence
from amalgam.stages.weigh_teachers.weigh import Evidence

MOVED = "moved tokens"

LEAST_OWN = 1e-9
"""Probabilities of a teacher's labels below it count as equal."""


# ---- blocks of texts


@dataclass(frozen=True)
class TextBlock:
    """Neighbouring buckets of training texts."""

    buckets: tuple[Bucket, ...]
    start: int
    """The number of texts before it."""


def text_blocks(run: Run) -> list[TextBlock]:
    return _blocks_of(run, load.train_part(run).texts_digest)


@once
def _blocks_of(run: Run, _digest: str) -> list[TextBlock]:
    groups = list(neighbouring_buckets(load.train_part(run).buckets))
    ends = np.cumsum([sum(bucket.rows for bucket in group) for group in groups]).tolist()
    return [TextBlock(group, start) for group, start in zip(groups, [0, *ends], strict=False)]


@dataclass(frozen=True)
class Texts:
    """The keys of texts, and their buckets."""

    keys: pa.Array
    prefixes: Sequence[str]
    start: int
    """The number of texts before the block that they are from."""

    @property
    def key_column(self) -> pl.Series:
        return pl.Series("key", self.keys, pl.Binary)

    @classmethod
    def of(cls, run: Run, block: TextBlock) -> Texts:
        return cls(keys_of(run, block.buckets), [bucket.prefix for bucket in block.buckets], block.start)


@once
def distinct_teachers(run: Run) -> DistinctTeachers:
    families = cached.families_of(run)
    contents = [(families[each.name], each.labels, each.catch_all) for each in load.teachers_of(run)]
    return DistinctTeachers.of(load.label_space(run), contents)


# ---- the evidence


@dataclass(frozen=True)
class AnswerSignals:
    """The teachers' predictions on some texts."""

    by_name: dict[str, Array]
    """Confidence, margin and highest logit: [texts, teachers] each. The kind `answers` of evidence is their sum."""
    predicted: Array
    """Position of the predicted label in the union: [texts, teachers]."""
    own_shares: Array
    """Probability of all labels of a teacher, without those of its catch_all: [texts, teachers]."""


def answer_signals(run: Run, texts: Texts) -> AnswerSignals:
    """Reads the predictions of all teachers."""
    reader = cached.cache_reader(run)
    by_teacher, predicted, own_shares = [], [], []
    for teacher, labels in distinct_teachers(run).space.columns.items():
        predictions = reader.predictions(teacher, texts.prefixes, texts.key_column)
        logits, confidence = predictions.logits.to_numpy(), predictions.confidence.to_numpy()
        margin = top_margin(logits.astype(np.float64)) if len(labels) > 1 else np.full(len(logits), np.inf)
        if predictions.own is not None:  # it may prefer none of its labels
            share = predictions.own.to_numpy().clip(LEAST_OWN, 1 - LEAST_OWN)
            margin = np.minimum(margin, np.log(share / (1 - share)))
        own_shares.append(np.ones(len(logits)) if predictions.own is None else predictions.own.to_numpy())
        by_teacher.append(np.stack([confidence, margin, logits.max(axis=1)], axis=1))
        predicted.append(np.array(labels)[logits.argmax(axis=1)])
    joined = np.stack(by_teacher, axis=2)
    by_name = {name: joined[:, index] for index, name in enumerate(("confidence", "margin", "highest"))}
    return AnswerSignals(by_name, np.stack(predicted, axis=1), np.stack(own_shares, axis=1))


def evidence_of(run: Run, texts: Texts, signals: AnswerSignals, params: Params) -> tuple[Evidence, Array]:
    """Reads all kinds of evidence, and that of the predictions by teacher; teachers of equal labels are one."""
    space = distinct_teachers(run).space
    label_sets, generated_for = LabelSets.of(space), provenance(run, texts.keys)
    features, states = features_of(run, texts), _states(run, texts)
    own, groups = [each for each in states if each is not None], label_sets.joined(states)
    among = compared(features, own, groups, len(space.names), run.experiment.targets.neighbours)
    density, closest = _density(run, among, states, signals.predicted), _closest_names(run, features.texts)
    tokens = _tokens(run, texts, params.scope(MOVED))
    if run.experiment.has_catch_all:
        density, closest = (
            lowered_evidence(values, signals.own_shares, params.scope(kind))
            for kind, values in {"own states": density, "own names": closest}.items()
        )
        tokens = None if tokens is None else lowered_evidence(tokens, signals.own_shares, params.scope("own tokens"))
    kinds = weigh.kinds_of(list(signals.by_name.values()), density, closest, tokens, params)
    predicted = label_sets.predicted(signals.predicted, kinds["answers"])
    by_group, detectors = {kind: label_sets.mean(values) for kind, values in kinds.items()}, label_sets.detectors(space)
    evidence = Evidence(
        kinds=with_absence(by_group, predicted, params, detectors),
        predicted=predicted,
        detectors=detectors,
        labels=len(space.names),
        near=among.near,
        provenance=None if generated_for is None else label_sets.mean(generated_for),
        spaces=among.spaces,
    )
    return evidence, kinds["answers"]


def lowered_evidence(evidence: Array, own_shares: Array, params: Params) -> Array:
    """Lowers evidence of states towards its minimum where a teacher predicts its catch_all.

    Such texts are dense in its states too, because it learned them.
    """
    lowest = params.value("lowest", lambda: evidence.min(axis=0))
    return lowest + (evidence - lowest) * own_shares


def features_of(run: Run, texts: Texts) -> BlockSpace:
    """Returns the encoder's states."""
    return _with_references(run, texts, partial(cached.features_of, run))


def _states(run: Run, texts: Texts) -> list[BlockSpace | None]:
    """Returns the states of each teacher; a file of predictions has none."""

    def read(teacher: ResolvedTeacher, keys: Keys, prefixes: Sequence[str]) -> Space:
        return Pooled(cached.states_of_teacher(run, teacher, keys, cached.last_layer_family, prefixes))

    teachers = [each for each in load.teachers_of(run) if each.name in distinct_teachers(run).space.columns]
    return [
        None if teacher.files.are_predictions else _with_references(run, texts, partial(read, teacher))
        for teacher in teachers
    ]


def _with_references(run: Run, texts: Texts, read: Callable[[Keys, Sequence[str]], Space]) -> BlockSpace:
    """Reads a space of the texts, and of the first block, which has the references."""
    space = read(key_array(texts.keys), texts.prefixes)
    if not texts.start:
        return BlockSpace(space, space)
    first = _first_texts(run)
    return BlockSpace(space, read(key_array(first.keys), first.prefixes), texts.start)


def _first_texts(run: Run) -> Texts:
    return Texts.of(run, text_blocks(run)[0])


def _density(run: Run, among: Compared, states: Sequence[BlockSpace | None], predicted: Array) -> Array:
    """Returns the evidence of each teacher's states: their density, or without states the neighbours' agreement.

    An encoder that is a teacher has dense classes too, so its density is not subtracted.
    """
    encoder = load.encoder_digest(run, run.experiment.student, cached.ENCODER)
    is_a_teacher = encoder in {teacher.files.digest for teacher in load.teachers_of(run)}
    columns = iter((among.density if is_a_teacher else among.relative).T)
    evidence = [
        _agreement(run, teacher, labels, among.near) if own is None else next(columns)
        for teacher, labels, own in zip(distinct_teachers(run).space.columns, predicted.T, states, strict=True)
    ]
    return np.stack(evidence, axis=1)


def _closest_names(run: Run, features: Space) -> Array:
    """Returns the similarity of each text to the closest label name of each teacher."""
    names, columns = name_states(run), list(map(list, distinct_teachers(run).space.columns.values()))
    similarity = (features[rows] @ names for rows in rows_of(features))
    return np.concatenate(
        [np.stack([block[:, labels].max(axis=1) for labels in columns], axis=1) for block in similarity]
    )


def _agreement(run: Run, teacher: str, predicted: Array, near: Array) -> Array:
    """Returns the mean probability, for the neighbours of each text, of the label that the teacher predicts for it.

    It is the evidence of a file of predictions, which has no states.
    """
    if not near.shape[1]:
        return np.zeros(len(near))
    first, labels = _first_texts(run), distinct_teachers(run).space.columns[teacher]
    logits = cached.cache_reader(run).predictions(teacher, first.prefixes, first.key_column).logits.to_numpy()
    places = np.searchsorted(np.sort(labels), predicted)
    own: Array = softmax(logits.astype(np.float64))[:, np.argsort(labels)]
    return own[near, places[:, None]].mean(axis=1)


def _tokens(run: Run, texts: Texts, params: Params) -> Array | None:
    """Returns how far each teacher's fine-tuning moved the tokens of a text, less the mean of all teachers.

    [texts, teachers]; 0 for teachers without moved tokens. None: fewer than two have any.
    """
    columns, means = list(distinct_teachers(run).space.columns), moved_tokens_of(run, texts, params)
    if len(means) < 2:
        return None
    moved = np.stack(list(means.values()), axis=1)
    result = np.zeros((len(moved), len(columns)))
    result[:, list(map(columns.index, means))] = moved - moved.mean(axis=1, keepdims=True)
    return result


def moved_tokens_of(run: Run, texts: Texts, params: Params) -> dict[str, Array]:
    """Returns how far fine-tuning moved the tokens of each text [texts], by teacher; without teachers that have none.

    A teacher has none without a known base, or with the vectors of its base, as after a training of its head alone.
    """
    teachers = _teachers_with_bases(run)
    if not params.is_reused:
        _fit_movement(run, teachers, params)
    prefixes = set(texts.prefixes)
    buckets = [bucket for bucket in load.train_part(run).buckets if bucket.prefix in prefixes]
    rows = np.searchsorted(key_array(keys_of(run, buckets)), key_array(texts.keys))
    scopes = [(teacher, params.scope(teacher.name)) for teacher in teachers]
    return {
        teacher.name: _mean_movement(run, teacher, buckets, own)[rows]
        for teacher, own in scopes
        if own.stored("moved").any()
    }


def _teachers_with_bases(run: Run) -> list[ResolvedTeacher]:
    """Returns the distinct teachers that were, or may have been, fine-tuned from an encoder of the experiment."""
    columns, bases = distinct_teachers(run).space.columns, load.bases_of(run)
    return [each for each in load.models_of(run) if each.name in columns and each.name in bases]


def _fit_movement(run: Run, teachers: Sequence[ResolvedTeacher], params: Params) -> None:
    """Stores how far fine-tuning moved each token of these teachers, and how they tokenise texts."""
    from amalgam.stages.common.models import loading

    @lru_cache(1)
    def of_base(base: load.NamedModel) -> Any:
        files = load.model_files(run, *base)
        return loading.token_vectors(loading.new_student(files, labels=["one", "two"], layers=None, seed=0))

    bases = load.bases_of(run)
    for teacher in teachers:
        model = loading.load_classifier(teacher.files, dropout=None, dtype=loading.stored_dtype(teacher.files))
        tokenizer, own, base = _tokenizer(run, teacher.name), loading.token_vectors(model), of_base(bases[teacher.name])
        moved, has_base = np.zeros(0, np.float32), False
        if own is not None and base is not None:
            pair = own.float().numpy(), loading.rounded_as(base, own.float()).numpy()
            if has_base := have_one_origin(*pair):
                moved = movement(*pair, tokenizer.all_special_ids)
        limit = loading.token_limit(model.config, tokenizer, teacher.max_tokens)
        values = {"moved": moved, "base": has_base, "limit": limit, "types": loading.takes_types(model)}
        params.scope(teacher.name).store(values)


def notes_on_bases(run: Run, params: Params) -> Iterator[str]:
    """Yields a note on each wrong `base`, and one where so few bases are known that no tokens are evidence."""
    own, named = params.scope(MOVED), load.named_bases(run)
    teachers = [teacher.name for teacher in _teachers_with_bases(run)]
    unknown = [name for name in teachers if not own.scope(name).stored("base")]
    for name in [name for name in unknown if name in named]:
        yield f"teacher {name} was not fine-tuned from its base, {named[name].model}: their token vectors are unlike"
    unnamed = [name for name in unknown if name not in named]
    count = sum(bool(own.scope(name).stored("moved").any()) for name in teachers)
    if unnamed and count < 2:
        yield (
            f"the training texts of {shown_names(unnamed)} are no evidence. If you know the encoder that each was "
            "fine-tuned from, name it (`base` of a teacher)"
        )


def _mean_movement(run: Run, teacher: ResolvedTeacher, buckets: Sequence[Bucket], params: Params) -> Array:
    """Returns the mean movement of the tokens of each text in the buckets."""
    tokenizer, moved = _tokenizer(run, teacher.name), params.stored("moved")
    limit, types = params.stored("limit").item(), bool(params.stored("types"))
    digest = tokenizer_digest(tokenizer, teacher.files)
    cache = TokenCache(run.store, run.console, tokenizer, digest, limit, types)
    return np.concatenate(
        [mean_movement(cache.tokens(bucket).ids, moved, tokenizer.all_special_ids) for bucket in buckets]
    )


@once
def _tokenizer(run: Run, teacher: str) -> Any:
    from amalgam.stages.common.models.loading import load_tokenizer

    return load_tokenizer(next(each.files for each in load.teachers_of(run) if each.name == teacher))


@once
def name_states(run: Run) -> Array:
    """Returns the encoder's states of the label names [width, labels]."""
    return cached.load_encoder(run, cached.encoder_dtype(run)).name_states(load.label_space(run).names).T


def provenance(run: Run, keys: pa.Array) -> Array | None:
    """Returns the class's probability at the teacher that a text was generated for, 0 at others.

    None: texts were generated for no teacher, or there is one.
    """
    teachers = list(distinct_teachers(run).space.columns)
    if not are_written(run.experiment) or len(teachers) == 1:
        return None
    generated_for = _generated_for(run)
    probabilities = np.zeros((len(keys), len(teachers)))
    for row, key in enumerate(keys.to_pylist()):
        for teacher, probability in generated_for.get(key, ()):
            probabilities[row, teacher] = max(probabilities[row, teacher], probability)
    return probabilities


@once
def _generated_for(run: Run) -> dict[bytes, list[tuple[int, float]]]:
    """Returns the teacher and the class's probability of each training text, by key; a text may occur repeatedly."""
    columns, table = ["text", "teacher", "class_probability"], load.generated_texts(run, "train")
    places = dict(zip(load.label_space(run).columns, distinct_teachers(run).places.tolist(), strict=True))
    generated_for: dict[bytes, list[tuple[int, float]]] = {}
    for text, teacher, probability in zip(*(table.column(name).to_pylist() for name in columns), strict=True):
        generated_for.setdefault(text_key((text,)), []).append((places[teacher], probability))
    return generated_for


def keys_of(run: Run, buckets: Sequence[Bucket]) -> pa.Array:
    table = pa.concat_tables(read_bucket(run.store, bucket, ["key"]) for bucket in buckets)
    return table.column("key").combine_chunks()
