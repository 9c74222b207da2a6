"""The teachers of an experiment: those it names and those it trains, with what identifies each and what each knows."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amalgam.data.keys import shown
from amalgam.data.labels import LabelSpace, union_of
from amalgam.pipeline.config.schema import ExperimentConfig, Teacher
from amalgam.pipeline.errors import DataError, ExperimentError
from amalgam.pipeline.execution.stage import PendingDependencyError, Run
from amalgam.stages.common.corpus import part_of
from amalgam.stages.common.models.label_names import label_names
from amalgam.stages.common.models.resolve import ModelFiles, needs_network, resolve, resolve_all, same_models

LABELS_TOLD = 5

NEARLY_THE_SAME = 0.85


@dataclass(frozen=True)
class KnownTeacher:
    name: str
    files: ModelFiles
    labels: tuple[str, ...]
    max_tokens: int
    dropout: float | None
    trust_remote_code: bool = False
    allow_pickle: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        """What its outputs are a function of, apart from the text. Label names are not: renaming costs no pass."""
        return {
            "content": self.files.digest,
            "max_tokens": self.max_tokens,
            "dropout": self.dropout,
        }


def teachers_of(run: Run) -> list[KnownTeacher]:
    """In the order that the union of labels follows: trained ones first, then those the file names."""
    if "teachers" not in run.cache:
        run.cache["teachers"] = [*_trained(run), *_named(run)]
    found: list[KnownTeacher] = run.cache["teachers"]
    return found


def label_space(run: Run) -> LabelSpace:
    """The union over all teachers; the gold labels where there is no teacher (a supervised student alone)."""
    teachers = teachers_of(run)
    if teachers:
        return union_of({teacher.name: teacher.labels for teacher in teachers})
    gold = run.experiment.corpus.labels or sorted(run.result("read-corpus").facts["parts"]["train"]["labels"])
    return LabelSpace(tuple(gold), {})


def prepare_teachers(run: Run) -> None:
    """Find every model that the experiment names before any work starts: one error lists all that are missing."""
    found = resolve_all([_reference(run, teacher) for teacher in run.experiment.teachers])
    named = {teacher.name: files for teacher, files in zip(run.experiment.teachers, found, strict=True)}
    for twins in same_models(named) if not run.cache.get("twins told") else []:
        run.console.note(f"teachers {' and '.join(twins)} are the very same model")
    run.cache["twins told"] = True


def check_gold(run: Run) -> None:
    """A gold label outside the union can be neither learned nor predicted: refused before any teacher runs."""
    targets = run.experiment.targets
    if targets.mode == "mt-bert":
        _check_one_label_set(teachers_of(run))
    for name in ("test", "validation", *(["train"] if targets.reads_gold else [])):
        _check_gold_of(run, name, set(label_space(run).names))


def _check_one_label_set(teachers: list[KnownTeacher]) -> None:
    first = teachers[0]
    for other in teachers[1:]:
        alone = sorted(set(first.labels) ^ set(other.labels))
        if alone:
            raise ExperimentError(
                f"mt-bert is for teachers that share one label set: {first.name} and {other.name} do not share "
                f"{', '.join(shown(label) for label in alone[:LABELS_TOLD])}",
                where="targets.mode: mt-bert",
                fix="rename labels that mean the same (teachers: rename), or another method: `amalgam methods`",
            )


def _check_gold_of(run: Run, name: str, known: set[str]) -> None:
    part = part_of(run, name)
    counts = part.facts["labels"] if part else {}
    strange = {label: int(count) for label, count in sorted(counts.items()) if label not in known}
    if not strange:
        return
    some = ", ".join(shown(label) for label in list(strange)[:LABELS_TOLD])
    more = f" and {len(strange) - LABELS_TOLD} more" if len(strange) > LABELS_TOLD else ""
    count = sum(strange.values())
    texts = f"{count:,} {name} text{'s' if count > 1 else ''}"
    if run.experiment.corpus.on_bad_row == "error" or len(strange) == len(counts):
        raise DataError(
            f"{texts} {'have' if count > 1 else 'has'} a gold label that is not in the union: {some}{more}",
            where=f"corpus.{name}, column {shown(str(run.experiment.corpus.label))}; "
            f"the union is {', '.join(shown(label) for label in sorted(known))}",
            fix=f"rename a teacher's labels ({_renaming(strange, known)}), or leave such texts out: "
            "corpus.on_bad_row: skip",
        )
    run.console.note(f"{texts} left out: no teacher knows {some}{more}")


def _renaming(strange: Iterable[str], known: Iterable[str]) -> str:
    """Labels that differ in nothing but case or a letter are shown as what to write."""
    folded = {label.casefold(): label for label in known}
    close = {label: difflib.get_close_matches(label.casefold(), folded, 1, NEARLY_THE_SAME) for label in strange}
    pairs = {folded[near[0]]: label for label, near in close.items() if near}
    said = ", ".join(f"{json.dumps(old)}: {json.dumps(new)}" for old, new in list(pairs.items())[:LABELS_TOLD])
    return f"rename: {{{said}}}" if said else "teachers: rename"


def _named(run: Run) -> Iterable[KnownTeacher]:
    for teacher in run.experiment.teachers:
        if needs_network(teacher.model, revision=teacher.revision, base=run.base, pins=run.store):
            raise PendingDependencyError(teacher.model)
        files = resolve(**_reference(run, teacher))
        labels = label_names(files, labels=teacher.labels, rename=teacher.rename, teacher=teacher.name)
        yield _known(run.experiment, teacher, files, labels)


def _known(experiment: ExperimentConfig, teacher: Teacher, files: ModelFiles, labels: list[str]) -> KnownTeacher:
    return KnownTeacher(
        teacher.name,
        files,
        tuple(labels),
        teacher.max_tokens or experiment.cache.max_tokens,
        teacher.dropout if teacher.dropout is not None else experiment.cache.dropout,
        teacher.trust_remote_code,
        teacher.allow_pickle,
    )


def _reference(run: Run, teacher: Teacher) -> dict[str, Any]:
    return {
        "given": teacher.model,
        "revision": teacher.revision,
        "base": run.base,
        "pins": run.store,
        "digest_of": run.digest_of,
        "allow_pickle": teacher.allow_pickle,
        "trust_remote_code": teacher.trust_remote_code,
        "where": f"teacher {teacher.name}",
    }


def _trained(run: Run) -> Iterable[KnownTeacher]:
    if run.experiment.train_teachers is None:
        return
    manifest = run.result("train-teachers")
    for name in manifest.facts["teachers"]:
        folder = trained_folder(run, name)
        files = resolve(str(folder), revision=None, base=run.base, pins=run.store, digest_of=run.digest_of)
        labels = label_names(files, labels=None, rename={}, teacher=name)
        settings = run.experiment.train_teachers
        yield KnownTeacher(name, files, tuple(labels), settings.max_tokens, run.experiment.cache.dropout)


def trained_folder(run: Run, name: str) -> Path:
    """The Hugging Face folder of a teacher that train-teachers made, every file checked."""
    manifest = run.result("train-teachers")
    files = [file for file in manifest.files if file.path.split("/")[-2].rsplit("-", 1)[0] == name]
    return run.store.verified_folder(files)
