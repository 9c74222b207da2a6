"""A student's model card: what it knows, who taught it, how well it did, all from the report's own numbers.

Names of labels and teachers come from models of others: they are escaped for Markdown, and plain data in its YAML.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from amalgam.data.keys import shown
from amalgam.pipeline.execution.versions import library_versions

LABELS_SHOWN = 100

SPECIAL = re.compile(r"([\\`*_{}\[\]()#+|~])")


@dataclass(frozen=True)
class CardInfo:
    """What is to be told of a student. Nothing of it is a path."""

    labels: Sequence[str]
    teachers: Mapping[str, Sequence[str]]
    max_tokens: int | None
    evaluation: Mapping[str, Any] | None = None
    """The report's, if it is of this very student."""
    why_not: str = "it was not measured"
    facts: Mapping[str, str] = field(default_factory=dict)
    """How it was made."""


def card(known: CardInfo, repo_id: str) -> str:
    parts = [
        _front_matter(known, repo_id),
        f"# {plain(repo_id.rpartition('/')[2])}",
        _summary(known),
        _use(repo_id),
        "## Measured",
        _measured(known),
        "## Labels",
        _labels(known),
        "## How it was made",
        _made(known),
        "## Limits",
        _limits(known),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(text: str) -> str:
    """Any text as itself: no markup of Markdown or HTML, one line."""
    return SPECIAL.sub(r"\\\1", html.escape(shown(text)))


def _front_matter(known: CardInfo, repo_id: str) -> str:

    data: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["amalgam", "knowledge-amalgamation"],
    }
    if known.evaluation:
        score = known.evaluation["systems"][known.evaluation["system"]]
        metrics = [
            {"type": kind, "value": round(score[key], 4)}
            for kind, key in (("accuracy", "accuracy"), ("f1", "macro_f1"))
        ]
        result = {
            "task": {"type": "text-classification"},
            "dataset": {"type": "own", "name": f"{known.evaluation['n']:,} labelled test texts"},
            "metrics": metrics,
        }
        data["model-index"] = [{"name": repo_id.rpartition("/")[2], "results": [result]}]
    return f"---\n{yaml.safe_dump(data, sort_keys=False, allow_unicode=True)}---"


def _summary(known: CardInfo) -> str:
    teachers = f" from {len(known.teachers)} teachers that each knew some of them" if known.teachers else ""
    return (
        f"A text classifier of {len(known.labels)} labels, made with amalgam{teachers}. "
        "A plain Hugging Face folder: nothing of amalgam is needed to use it."
    )


def _use(repo_id: str) -> str:
    return (
        "```python\nfrom transformers import pipeline\n\n"
        f'classify = pipeline("text-classification", model="{repo_id}")\n```'
    )


def _measured(known: CardInfo) -> str:
    found = known.evaluation
    if not found:
        return f"There are no numbers: {plain(known.why_not)}."
    chosen = [name for name in found["systems"] if name != "zero-shot"]
    rows = [_row(name, found["systems"][name], strong=name == found["system"]) for name in chosen]
    about = (
        f"On {found['n']:,} labelled test texts, over all {len(found['labels'])} labels; chance is "
        f"{1 / len(found['labels']):.3f}. NLL in nats, ECE: calibration error; lower is better for both."
    )
    reading = (
        "A teacher can only be right on its own labels; the ensemble is one softmax over all teachers' logits. "
        f"The student's checkpoint was selected by: {plain(str(found['selected_by']))}."
    )
    header = ["| system | accuracy | macro-F1 | NLL | ECE |", "|---|---|---|---|---|"]
    return "\n".join([about, "", *header, *rows, "", reading])


def _row(name: str, system: Mapping[str, Any], *, strong: bool) -> str:
    values = [
        "-" if system[key] is None else f"{system[key]:.3f}" for key in ("accuracy", "macro_f1", "nll_nats", "ece")
    ]
    cells = [plain(name), *values]
    return f"| {' | '.join(f'**{cell}**' if strong else cell for cell in cells)} |"


def _labels(known: CardInfo) -> str:
    owners = {
        label: [teacher for teacher, own in known.teachers.items() if label in own]
        for label in known.labels[:LABELS_SHOWN]
    }
    rows = [f"| {plain(label)} | {', '.join(map(plain, own)) or '-'} |" for label, own in owners.items()]
    more = len(known.labels) - len(rows)
    note = ["", f"And {more:,} more: config.json names them all."] if more > 0 else []
    return "\n".join(["| label | taught by |", "|---|---|", *rows, *note])


def _made(known: CardInfo) -> str:
    said = {"amalgam": library_versions()["amalgam"], **known.facts}
    return "\n".join(f"- {plain(name)}: {plain(value)}" for name, value in said.items())


def _limits(known: CardInfo) -> str:
    cut = f"- Longer texts were cut to {known.max_tokens} tokens.\n" if known.max_tokens else ""
    return (
        "- It knows these labels and no other: a text of none of them gets one all the same.\n"
        f"{cut}"
        "- What its teachers had wrong, it may have learned. Their licences and those of their texts hold for it too."
    )
