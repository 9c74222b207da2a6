"""Teachers that are fine-tuned together (MT-BERT, Wu et al. 2021): one attentive pooling and one dense layer for all.

What is minimised is the sum over teachers of CE(y, y_i). The encoders may tokenise differently: a text is its token ids
for all of them, end to end, each encoder's raised by the sizes of the vocabularies before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from amalgam.data.tokens import Ragged
from amalgam.pipeline.errors import ModelError
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.corpus import Part
from amalgam.stages.common.encoders import NewClassifier
from amalgam.stages.common.inference.classifier import BATCH_TOKENS, predict
from amalgam.stages.common.load import load_new_classifier
from amalgam.stages.common.models.attentive import AttentiveHead, attentive_classifier, head_for, without_pooler
from amalgam.stages.common.training.batches import Examples
from amalgam.stages.common.training.examples import labelled
from amalgam.stages.common.training.losses import RestrictedKL
from amalgam.stages.common.training.run import learn
from amalgam.stages.train_teachers.settings import encoders_of, settings_of
from amalgam.stages.train_teachers.training import HELD_OUT, training_settings

Array = np.ndarray[Any, np.dtype[Any]]


class Together(nn.Module):
    """Several encoders under one head; logits are theirs, side by side."""

    def __init__(self, bodies: Sequence[Any], head: AttentiveHead, labels: int) -> None:
        super().__init__()
        self.bodies, self.head = nn.ModuleList(bodies), head
        sizes = [int(body.get_input_embeddings().weight.shape[0]) for body in bodies]
        self.starts = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
        self.config = SimpleNamespace(num_labels=len(bodies) * labels)

    @property
    def pad_id(self) -> int:
        """No encoder's token."""
        return self.starts[-1]

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> SimpleNamespace:
        del attention_mask  # each encoder has its own
        logits = []
        for place, body in enumerate(self.bodies):
            inputs = self._inputs(place, input_ids, token_type_ids)
            states = body(**inputs).last_hidden_state
            logits.append(self.head(states, inputs["attention_mask"]))
        return SimpleNamespace(logits=torch.cat(logits, dim=-1))

    def _inputs(self, place: int, ids: torch.Tensor, types: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The tokens of one encoder, from the left and filled up on the right."""
        first, last = self.starts[place : place + 2]
        own = (ids >= first) & (ids < last)
        lengths = own.sum(dim=1, keepdim=True)
        order = (~own).to(torch.int8).argsort(dim=1, stable=True)[:, : int(lengths.max())]
        there = torch.arange(order.shape[1], device=ids.device) < lengths
        body: Any = self.bodies[place]
        inputs = {
            "input_ids": torch.where(there, ids.gather(1, order) - first, int(body.config.pad_token_id or 0)),
            "attention_mask": there.long(),
        }
        if types is not None and int(getattr(body.config, "type_vocab_size", 0) or 0) > 1:
            inputs["token_type_ids"] = torch.where(there, types.gather(1, order), 0)
        return inputs


def end_to_end(parts: Sequence[Examples], starts: Sequence[int]) -> Examples:
    """The same texts in the tokens of each encoder, as one text each; what is to be learned stands once per encoder."""
    rows = range(len(parts[0]))
    ids = [
        np.concatenate([part.tokens[row] + start for part, start in zip(parts, starts, strict=False)]) for row in rows
    ]
    types = None
    if any(part.type_ids is not None for part in parts):
        types = Ragged.of([np.concatenate([_types(part, row) for part in parts]) for row in rows])
    return Examples(Ragged.of(ids), types, np.tile(parts[0].targets, (1, len(parts))), parts[0].weights)


def _types(part: Examples, row: int) -> Array:
    return np.zeros(len(part.tokens[row]), np.int8) if part.type_ids is None else part.type_ids[row]


def train_together(
    run: Run, labels: Sequence[str], part: Part, checkpoint: Path
) -> dict[str, tuple[NewClassifier, dict[str, Any]]]:
    """Teacher -> the teacher, no load_new_classifier any more, and the facts of its training."""
    news = {name: load_new_classifier(run, said, labels, where) for name, (said, where) in encoders_of(run).items()}
    _refuse_widths(news)
    material = [labelled(run, part, new, labels, held_out=HELD_OUT) for new in news.values()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings_of(run).seed)
        head = head_for(next(iter(news.values())).model.config, len(labels))
    bodies = [without_pooler(new.model.base_model) for new in news.values()]
    model = Together(bodies, head, len(labels))
    examples = end_to_end([one.learn for one in material], model.starts)
    held_out = [one.held_out for one in material if one.held_out is not None]
    judged = end_to_end(held_out, model.starts) if held_out else examples
    together = replace(next(iter(news.values())), model=model, pad_id=model.pad_id)

    def score(model: Any) -> float:
        return float(np.mean(_accuracies(model, judged, len(news))))

    columns = tuple(
        tuple(range(place, place + len(labels))) for place in range(0, model.config.num_labels, len(labels))
    )
    settings = training_settings(run)
    facts = learn(run, together, examples, settings, score, checkpoint, RestrictedKL(columns), what="together")
    own = _accuracies(model, judged, len(news))
    more = {
        "labels": list(labels),
        "texts": len(examples),
        "selected_by": "held out" if held_out else "on its training texts",
    }
    found = {}
    for (name, new), body, accuracy in zip(news.items(), model.bodies, own, strict=True):
        teacher = replace(new, model=attentive_classifier(body, head, list(labels)))
        found[name] = teacher, {**facts, **more, "best_score": accuracy, "together": list(news)}
    return found


def _accuracies(model: Any, examples: Examples, teachers: int) -> list[float]:
    """Of each teacher."""
    logits = predict(model, examples.tokens, pad_id=model.pad_id, batch_tokens=BATCH_TOKENS, type_ids=examples.type_ids)
    says = logits.reshape(len(logits), teachers, -1).argmax(axis=2)
    gold = examples.targets.reshape(len(logits), teachers, -1)[:, 0].argmax(axis=1)
    return [float(share) for share in (says == gold[:, None]).mean(axis=0)]


def _refuse_widths(news: dict[str, NewClassifier]) -> None:
    widths = {name: int(new.model.config.hidden_size) for name, new in news.items()}
    if len(set(widths.values())) > 1:
        raise ModelError(
            "encoders of different width cannot share one pooling and one dense layer",
            where=f"train_teachers.co_train: {', '.join(f'{name} {width}' for name, width in widths.items())}",
            fix="encoders of the same width, or teachers of their own: train_teachers.encoder and groups",
        )
