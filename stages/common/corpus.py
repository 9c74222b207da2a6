"""The parts of the corpus: their sources in the experiment, and their buckets of keyed rows for later stages."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from amalgam.data.arrays import Array
from amalgam.data.corpus import PartFacts, labelled_places
from amalgam.data.keys import shown, shown_names
from amalgam.data.lazy import np, pa, pc
from amalgam.data.parquet import read_table
from amalgam.data.rows import LONG_NAME
from amalgam.data.words import words_of
from amalgam.pipeline.config.schema import Corpus, ExperimentConfig, Generate
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import DataError, nearest
from amalgam.pipeline.input_files import kind_of
from amalgam.pipeline.storage.store import Record, Store, StoredFile
from amalgam.stages.objective_inputs import reads_texts

REMOTE = ("hf://", "s3://")
DATASETS = "hf://datasets/"

FETCHED = "remote"
"""Folder of the copies of remote files in the results of read-corpus; they have the columns of their source."""

HELD_OUT = "held-out"

GENERATED = "what generate wrote"
"""Represents the generated file among a part's sources."""

IN_MEMORY = "texts in memory"
"""Represents texts that `amalgam.Experiment` has not stored yet."""

FILTERS = {"held_out", "min_class_probability", "max_duplicate", "max_repetition", "min_words"}

AS_GENERATED: dict[str, object] = {
    "text": ["text"],
    "id": "auto",
    "label": None,
    "labels": None,
    "rename": {},
    "on_bad_row": "error",
}

Measured = Literal["validation", "test"]
MEASURED: tuple[Measured, ...] = ("validation", "test")
"""Parts on which an accuracy is measured."""

Learned = Literal["train", "teachers", "validation"]
LEARNED: tuple[Learned, ...] = ("train", "teachers", "validation")
"""Parts that the training of students and teachers uses."""

UNIT_TEXTS = 1 << 15
"""Texts per unit: the overhead of files and calls is small, and a unit fits into any memory."""


# ---- sources


def sources_of(experiment: ExperimentConfig) -> dict[str, list[str]]:
    """Returns the paths, remote addresses or GENERATED of each part that the experiment has."""
    corpus = experiment.corpus
    of_teachers = experiment.train_teachers.texts if experiment.train_teachers else None
    parts = {"train": corpus.train, "validation": corpus.validation, "test": corpus.test, "teachers": of_teachers}
    if experiment.generate is not None and reads_texts(experiment):
        parts |= {"train": [GENERATED], **({HELD_OUT: [GENERATED]} if experiment.generate.held_out else {})}
    return {part: sources for part, sources in parts.items() if sources}


def content_of(sha256: str, name: str) -> str:
    """Returns the identity of a file of texts: its digest, and whether tabs separate it, since a csv may be equal."""
    return f"{sha256} tsv" if kind_of(Path(name)) == ".tsv" else sha256


def hub_datasets(sources: Iterable[str]) -> list[str]:
    """Returns the ids of the Hub's data sets among these sources; a revision after @ is left out."""
    addresses = [source.removeprefix(DATASETS).split("/") for source in sources if source.startswith(DATASETS)]
    return sorted({"/".join(parts[:2]).partition("@")[0] for parts in addresses if len(parts) > 2})


def corpus_for(experiment: ExperimentConfig, part: str) -> Corpus:
    """Returns the corpus section of one part: only the training part and the teachers' texts have limits."""
    of_teachers = experiment.train_teachers.limit if experiment.train_teachers else None
    limit = {"train": experiment.corpus.limit, "teachers": of_teachers}.get(part)
    generated = GENERATED in sources_of(experiment).get(part, [])
    return experiment.corpus.model_copy(update={**(AS_GENERATED if generated else {}), "limit": limit})


def corpus_settings(corpus: Corpus) -> dict[str, object]:
    """Returns the settings that parts depend on; older parts stay valid: with id_type, without an empty `rename`."""
    settings = corpus.model_dump(exclude={"train", "validation", "test"})
    if not corpus.rename:
        del settings["rename"]
    if corpus.unknown is None or not corpus.labels:  # it only is one more allowed label
        del settings["unknown"]
    return {**settings, "id_type": "auto"}


def texts_file(manifest: Record) -> StoredFile:
    return next(file for file in manifest.files if file.path == manifest.facts["file"])


def are_written(experiment: ExperimentConfig) -> bool:
    """Returns whether each text was generated for a teacher and one of its classes."""
    return experiment.generate is not None and experiment.generate.writes


def filters_of(experiment: ExperimentConfig) -> dict[str, object]:
    return experiment.generate.model_dump(include=FILTERS) if experiment.generate else {}


def generated_part(table: pa.Table, settings: Generate, part: str) -> tuple[pa.Table, dict[str, Array]]:
    """Returns a part's generated texts, and for each filter which of them pass it.

    A text without a class probability passes that filter, and a text may fail several.
    """
    held_out = _numbers(table, "draw", 1.0) < settings.held_out
    rows = held_out if part == HELD_OUT else ~held_out
    passes = {
        "min_words": _numbers(table, "words", 0) >= settings.min_words,
        "min_class_probability": _numbers(table, "class_probability", 1.0) >= settings.min_class_probability,
        "max_repetition": _numbers(table, "repetition", 0.0) <= settings.max_repetition,
    }
    passes["max_duplicate"] = _nearness(table, np.logical_and.reduce(list(passes.values()))) <= settings.max_duplicate
    return table.filter(rows), {name: are_kept[rows] for name, are_kept in passes.items()}


def _nearness(table: pa.Table, passes: Array) -> Array:
    """Returns `near_duplicate`; of equal texts the first that passes the other filters has the value of the first."""
    nearness, first, kept = _numbers(table, "near_duplicate", 0.0).copy(), dict[str, float](), set[str]()
    for row, text in enumerate(table.column("text").to_pylist()):
        words = " ".join(words_of(text.lower()))
        value = first.setdefault(words, nearness[row])
        if passes[row] and words not in kept:
            nearness[row] = value
            kept.add(words)
    return nearness


def _numbers(table: pa.Table, column: str, absent: float) -> Array:
    return pc.fill_null(table.column(column).cast("float64"), absent).to_numpy()


# ---- buckets


@dataclass(frozen=True)
class Bucket:
    prefix: str
    rows: int
    keys_digest: str
    file: StoredFile


class FetchedFacts(TypedDict):
    source: str


class PartRecordFacts(PartFacts):
    """The facts of a part in the manifest, with the counts of generated texts."""

    part: NotRequired[str]
    failed: NotRequired[dict[str, int]]
    """Generated texts that fail each filter."""
    accepted: NotRequired[dict[str, list[int]]]
    """By class: generated texts that pass all filters, and all."""


class Leak(TypedDict):
    """Texts of a part that are also in `other`, which training uses."""

    part: Measured
    other: Learned
    texts: int
    places: list[str]
    """File and row of the first."""


class CorpusFacts(TypedDict):
    parts: dict[str, PartRecordFacts]
    leaks: list[Leak]


@dataclass(frozen=True)
class Part:
    name: str
    facts: PartRecordFacts
    buckets: tuple[Bucket, ...]

    @property
    def texts(self) -> int:
        return self.facts["texts"]

    @property
    def texts_digest(self) -> str:
        return self.facts["texts_digest"]

    @property
    def labels_digest(self) -> str | None:
        return self.facts["labels_digest"]

    @property
    def labels(self) -> list[str]:
        """The gold labels that occur, by name."""
        return sorted(self.facts["labels"])


def read_bucket(store: Store, bucket: Bucket, columns: Sequence[str] | None = None) -> pa.Table:
    """Returns the bucket's rows, in key order."""
    return read_table(store.verified_path(bucket.file), columns)


def tables(store: Store, part: Part, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yields the part's rows, bucket by bucket, in key order."""
    store.backend.fetch([bucket.file.path for bucket in part.buckets])
    for bucket in part.buckets:
        yield read_bucket(store, bucket, columns)


def rows_at(store: Store, buckets: Sequence[Bucket], rows: Sequence[int]) -> pa.Table:
    """Returns the rows at ascending positions; one bucket is in memory at a time."""
    parts, ends = [], np.cumsum([bucket.rows for bucket in buckets])
    by_bucket = np.split(np.asarray(rows), np.searchsorted(rows, ends))
    for bucket, end, inside in zip(buckets, ends, by_bucket, strict=False):
        if len(inside):
            parts.append(read_bucket(store, bucket).take(pa.array(inside - (end - bucket.rows))))
    return pa.concat_tables(parts)


def first_buckets(part: Part, texts: float) -> list[Bucket]:
    """Returns the first buckets in key order, up to the one that completes this many texts."""
    totals = accumulate(bucket.rows for bucket in part.buckets)
    return list(part.buckets[: 1 + sum(total < texts for total in totals)])


def fields(table: pa.Table) -> list[tuple[str, ...]]:
    """Returns each row's one or two texts."""
    first = table.column("text").to_pylist()
    if table.column("text_2").null_count == table.num_rows:
        return [(text,) for text in first]
    return list(zip(first, table.column("text_2").to_pylist(), strict=True))


def unit_name_of(file: StoredFile) -> str:
    """Returns the name of the unit, a part or a teacher, whose files are in the folder NAME-DIGEST."""
    return file.path.split("/")[-2].rsplit("-", 1)[0]


def neighbouring_buckets(buckets: Sequence[Bucket], most: int | None = None) -> Iterator[tuple[Bucket, ...]]:
    """Yields groups of buckets in key order, of at most `most` texts or one bucket, the same in all processes."""
    group: list[Bucket] = []
    for bucket in buckets:
        if group and sum(member.rows for member in group) + bucket.rows > (most or UNIT_TEXTS):
            yield tuple(group)
            group = []
        group.append(bucket)
    if group:
        yield tuple(group)


def even_groups(buckets: Sequence[Bucket], at_once: int) -> Iterator[tuple[Bucket, ...]]:
    """Yields groups of about UNIT_TEXTS or fewer, equal up to a bucket: `at_once` threads have the same work."""
    ends = list(accumulate(bucket.rows for bucket in buckets))
    groups = -(-ends[-1] // UNIT_TEXTS) if ends else 0
    if groups > 1:
        groups = -(-groups // at_once) * at_once
    shares = [(end - bucket.rows / 2) / ends[-1] for bucket, end in zip(buckets, ends, strict=True)]
    for _, group in groupby(zip(buckets, shares, strict=True), lambda pair: int(pair[1] * groups)):
        yield tuple(bucket for bucket, _ in group)


def group_name(buckets: Sequence[Bucket]) -> str:
    """Returns the name of a group's unit: names in order are keys in order."""
    return buckets[0].prefix if len(buckets) == 1 else f"{buckets[0].prefix}-{buckets[-1].prefix}"


# ---- gold labels

SIMILARITY = 0.85
"""Lowest ratio of `nearest` at which an error suggests a label for another one."""

LABELS_SHOWN, MOST_RENAMES = 5, 20

LEFT_OUT = "left out"
"""The treatment of texts with gold labels outside the union in a part whose gold labels are read."""


def check_gold_labels(  # noqa: PLR0913  the part, three kinds of labels, and two for the message
    part: Part,
    corpus: Corpus,
    union: set[str],
    renamed: Mapping[str, str],
    files: Callable[[], Sequence[Path]],
    treatment: str,
) -> str | None:
    """Refuses gold labels outside the union; returns a note on such texts if the settings skip them.

    `renamed`: the new names of the teachers' labels.
    """
    counts = part.facts["labels"]
    expected = union | {corpus.unknown}
    unknown = {label: int(count) for label, count in sorted(counts.items()) if label not in expected}
    if not unknown:
        if treatment == LEFT_OUT and counts and not union & counts.keys():
            what = f"no {part.name} text has a label of a teacher: all have the label {shown(str(corpus.unknown))}"
            fix = "add texts with labels of the teachers"
            fix += f", or leave out corpus.{part.name}" if part.name != "train" else ""
            raise DataError(what, where=f"corpus.{part.name}, column {shown(str(corpus.label))}", fix=fix)
        return None
    names = shown_names(unknown, LABELS_SHOWN)
    count = sum(unknown.values())
    texts = counted(count, f"{part.name} text", "has", "have")
    has_known = bool(union & counts.keys())
    similar = [
        label for label in unknown if renamed.get(label) in union or nearest(label, list(union), ratio=SIMILARITY)
    ]
    if corpus.on_bad_row == "error" or not has_known:
        skip = ", or leave such texts out: corpus.on_bad_row: skip" if has_known else ""
        others = "; correct or remove the other labels" if 0 < len(similar) < len(unknown) else ""
        fix = f"{rename_fix(unknown, union, corpus, renamed)}{others}{skip}"
        if not has_known and sum(len(label.split()) for label in unknown) > LONG_NAME * len(unknown):
            fix = "set corpus.label to the column of the labels: this one has texts"
        raise DataError(
            f"{texts} a gold label that is not one of the student's: {names}",
            where=f"corpus.{part.name}, column {shown(str(corpus.label))}: "
            f"{', '.join(labelled_places(unknown, files(), corpus))}; "
            f"the student's labels are {shown_names(sorted(union), len(union))}",
            fix=fix,
        )
    note = f"{counted(count, f'{part.name} text')} {treatment}: no teacher has the label {names}"
    return (
        f"{note}; to keep texts of a similar label, {rename_fix(unknown, union, corpus, renamed)}" if similar else note
    )


SEPARATORS = re.compile(r"\s*[;,|]\s*")
"""Characters between several labels of one text."""


def _without_affix(unknown: Iterable[str], labels: Sequence[str]) -> dict[str, str]:
    """Returns a teacher's labels by their columns if these add one text, such as prob_, to several unknown labels."""
    affixes = Counter(
        (start, end)
        for label in unknown
        if not label.isdecimal()
        for start, inner, end in (name.partition(label) for name in labels)
        if inner and start + end and not (start[-1:].isalnum() or end[:1].isalnum())
    )
    [((start, end), count)] = affixes.most_common(1) or [(("", ""), 0)]
    columns = sorted(name for name in labels if name.startswith(start) and name.endswith(end))
    return {name: name.removeprefix(start).removesuffix(end) for name in columns} if count > 1 else {}


def rename_fix(unknown: Iterable[str], union: Iterable[str], corpus: Corpus, renamed: Mapping[str, str]) -> str:
    """Returns the lines that rename the labels that a teacher renames, or that differ by case or a letter from one."""
    labels = list(union)
    if all({*SEPARATORS.split(label)} <= {*labels} for label in unknown):
        return "give each text one label: a student chooses one of all labels"
    if bare := _without_affix(unknown, labels):
        return f"set `rename` of the teacher with these labels: {json.dumps(bare, ensure_ascii=False)}"
    pairs = {label: match for label in unknown for match in nearest(label, labels, ratio=SIMILARITY)}
    pairs |= {label: renamed[label] for label in unknown if renamed.get(label) in labels}
    if not pairs and not corpus.labels and all(label.isdecimal() for label in unknown):
        return "set corpus.labels to the names of the labels 0, 1, 2 ... in this order"
    if not pairs:
        return "rename these labels to those of the teachers (corpus.rename)"
    new = dict(list(pairs.items())[:MOST_RENAMES])
    renames = {**{label: new.get(name, name) for label, name in corpus.rename.items()}, **new}
    look_alike = not all(unicodedata.is_normalized("NFC", label) for label in new)
    fix = f"set corpus.rename: {json.dumps(renames, ensure_ascii=look_alike)}"
    if corpus.labels:
        allowed = json.dumps(list(dict.fromkeys(new.get(label, label) for label in corpus.labels)), ensure_ascii=False)
        fix += f" and corpus.labels: {allowed}"
    return fix
