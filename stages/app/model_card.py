"""Renders the model card of a student, from its folder and from the report on it in the workspace.

Names from other people's models are escaped in the text and in the metadata.
"""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jinja2
import yaml
from huggingface_hub import EvalResult, ModelCardData

from amalgam.data.keys import shown
from amalgam.pipeline.storage.fingerprint import library_versions
from amalgam.pipeline.storage.paths import json_object
from amalgam.pipeline.storage.store import Store
from amalgam.stages.app.licences import common_licence, warnings
from amalgam.stages.common.deliveries import REPORTS
from amalgam.stages.common.intervals import interval, percent
from amalgam.stages.common.models.read_card import Source, TrainingSummary
from amalgam.stages.report.json_types import Evaluation, majority, random_texts, reported_scores
from amalgam.stages.report.stage import EVALUATION
from amalgam.stages.report.students import complete_reports
from amalgam.stages.report.tables import measure_of
from amalgam.stages.report.verdict_words import evaluation_cautions

TEMPLATE = Path(__file__).parent / "card.md.j2"
LABELS_SHOWN = 100
NAME, SENTENCE = 80, 1000
"""Characters that are shown of a name, and of a sentence."""
SPECIAL = re.compile(r"([\\`*_{}\[\]()#+|~])")


@dataclass(frozen=True)
class Numbers:
    evaluation: Evaluation | None = None
    why_not: str = "the student was pushed without its experiment"
    """Why there is no evaluation."""
    verdict: str | None = None
    """The first line of the report's verdict or summary."""


@dataclass(frozen=True)
class CardInfo:
    """Content of a model card; it has no path."""

    labels: Sequence[str]
    teachers: Mapping[str, Sequence[str]]
    max_tokens: int | None
    sources: Sequence[Source] = ()
    """The encoder, then the teachers."""
    training: TrainingSummary | None = None
    fingerprint: str | None = None
    licence: str | None = None
    """The licence that the student is published under; None: that of all sources, if they state the same."""
    numbers: Numbers = field(default_factory=Numbers)
    flags_unknown: bool = False
    """Whether the folder has a fit of unknown texts."""
    is_static: bool = False
    """Whether the student has no transformer, so that transformers loads it with amalgam only."""
    reads_padding: bool = False
    """Whether padding changes its predictions."""
    learned: Sequence[str] = ()
    """Names of the text columns that it learned; two for pairs."""

    def owners(self, label: str) -> list[str]:
        return [teacher for teacher, labels in self.teachers.items() if label in labels]

    @property
    def published_licence(self) -> str | None:
        return self.licence or common_licence(self.sources)

    @property
    def warnings(self) -> list[str]:
        return warnings(self.sources, [self.published_licence] if self.published_licence else [])

    @property
    def silent(self) -> list[str]:
        """Returns the sources whose card could not be read, with the reason."""
        return [f"{source.role} ({source.problem})" for source in self.sources if source.problem]

    @property
    def languages(self) -> list[str]:
        return sorted({language for source in self.sources[1:] for language in source.languages})


# ---- the report's numbers


def numbers_of(store: Store, base: Path, student: str, own_test: Callable[[], str | None]) -> Numbers:
    """Returns the numbers of a report on the student with this fingerprint, also if it is not the last report.

    `own_test` returns the digest of the labels in corpus.test of the experiment file.
    """
    last, reports = store.last("report"), _reports(store, student)
    if not reports:
        return Numbers(why_not="the workspace has no report on this student")
    reports.sort(key=lambda report: report.fingerprint != last)
    ordinary = [report for report in reports if random_texts(report.evaluation)]
    if not ordinary:
        selected = any(report.evaluation for report in reports)
        why_not = "all labelled test texts were selected" if selected else "there are no labelled test texts"
        return Numbers(None, why_not, _verdict(base, reports[0].fingerprint))
    if len(ordinary) > 1 and ordinary[0].fingerprint != last:
        own_digest = own_test()
        ordinary.sort(key=lambda report: (report.test != own_digest, -random_texts(report.evaluation)))
    return Numbers(ordinary[0].evaluation, "", _verdict(base, ordinary[0].fingerprint))


@dataclass(frozen=True)
class StudentReport:
    fingerprint: str
    test: str | None
    """Digest of the labels of the test texts."""
    evaluation: Evaluation | None


def _reports(store: Store, student: str) -> list[StudentReport]:
    reports = []
    for fingerprint, manifest in complete_reports(store):
        upstream, inputs = manifest.identity.get("upstream"), manifest.identity.get("inputs", {})
        if manifest.files and upstream and upstream.get("train-student") == student:  # without files: of a gate
            file = next((file for file in manifest.files if file.name == EVALUATION), None)
            evaluation: Evaluation | None = store.content(file, Evaluation) if file else None
            reports.append(StudentReport(fingerprint, inputs.get("test"), evaluation))
    return reports


def _verdict(base: Path, report: str) -> str | None:
    """Returns the verdict and its reasons, or the first line of the summary, from the report's latest JSON file.

    An earlier page of the report, of another name, has the verdict against fewer students.
    """
    for path in sorted((base / REPORTS).glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        numbers = json_object(path)
        if numbers.get("fingerprint") == report:
            match numbers:
                case {"verdict": {"decision": str(decision), "reasons": [*reasons]}}:
                    return " ".join([f"{decision}.", *(reason for reason in reasons if isinstance(reason, str))])
                case {"summary": [str(line), *_]}:
                    return line
    return None


# ---- the card


def card(info: CardInfo, repo_id: str) -> str:
    name = repo_id.rpartition("/")[2]
    environment = jinja2.Environment(  # noqa: S701 - `plain` escapes Markdown as well as HTML
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {
        "plain": plain,
        "sentence": partial(plain, limit=SENTENCE),
        "measure": measure_of,
        "percent": percent,
        "listed": lambda values: ", ".join(map(plain, values)) or "not stated",
    }
    training = info.training
    versions = {"amalgam": library_versions()["amalgam"]} if training is None else training.libraries
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        metadata=_metadata(info, name).to_yaml().strip(),
        repo_id=repo_id,
        name=name,
        info=info,
        evaluation=info.numbers.evaluation,
        interval=_interval(info.numbers.evaluation),
        majority=majority(info.numbers.evaluation) if info.numbers.evaluation else None,
        cautions=list(evaluation_cautions(info.numbers.evaluation)),
        shown=LABELS_SHOWN,
        columns="".join(
            f" --text {shown(shlex.quote(name))}" for name in info.learned if list(info.learned) != ["text"]
        ),
        # In a code block, which no setting may close.
        settings=yaml.safe_dump(training.settings, allow_unicode=True).replace("`", "'").strip() if training else "",
        versions=versions,
    )


def _metadata(info: CardInfo, name: str) -> ModelCardData:
    """Returns the front matter: an entry that nothing states is left out."""
    evaluation, encoder = info.numbers.evaluation, info.sources[0] if info.sources else None
    base = encoder.model if encoder and not str(encoder.model).startswith("package:") else None
    return ModelCardData(
        base_model=base,
        base_model_relation="finetune" if base else None,
        datasets=(info.training.datasets if info.training else None) or None,
        language=info.languages or None,
        library_name="transformers",
        license=info.published_licence,
        pipeline_tag="text-classification",
        tags=["amalgam", "knowledge-amalgamation", "knowledge-distillation"],
        model_name=name if evaluation else None,
        eval_results=_results(evaluation) if evaluation else None,
    )


def _results(evaluation: Evaluation) -> list[EvalResult]:
    scores, texts = reported_scores(evaluation), f"{evaluation['n']:,} labelled test texts"
    return [
        EvalResult("text-classification", "own", texts, kind, round(value, 4), metric_name=metric)
        for kind, metric, value in (
            ("accuracy", None, scores["accuracy"]),
            ("f1", "macro-F1", scores["macro_f1"]),
            ("nll", "NLL in nats", scores["nll_nats"]),
            ("ece", "expected calibration error", scores["ece"]),
        )
        if value is not None
    ]


def _interval(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return ""
    low, high = interval(reported_scores(evaluation)["accuracy"], evaluation["n"])
    return f"{percent(low)} to {percent(high)}"


def plain(text: str, limit: int = NAME) -> str:
    """Returns the text in one line of limited length, with Markdown and HTML escaped."""
    return SPECIAL.sub(r"\\\1", html.escape(shown(text, limit), quote=False))
