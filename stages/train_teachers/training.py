"""Fine-tunes teachers on labelled texts with the same loop as the student's: one alone, or several jointly.

Co-training is that of MT-BERT (Wu et al. 2021): encoders share one attentive pooling and one dense layer. The loss is
the sum over teachers of CE(y, y_i). The encoders may have different tokenizers. A text is the concatenation of its
token ids for each encoder, offset by the sizes of the vocabularies before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from amalgam.data.tokens import TokenRows
from amalgam.pipeline.errors import ModelError
from amalgam.stages.common.inference.batches import predict
from amalgam.stages.common.models.attentive import AttentiveHead, attentive_classifier, head_for, without_pooler
from amalgam.stages.common.models.model_folder import reads_padding
from amalgam.stages.common.models.resolve import NewClassifier
from amalgam.stages.common.training.batches import Examples, TrainingData, labelled
from amalgam.stages.common.training.loop import TrainingSettings
from amalgam.stages.common.training.losses import RestrictedKL
from amalgam.stages.common.training.run import Score, Selection, TrainingServices, accuracy_on, learn
from amalgam.stages.common.training.schedule import HELD_OUT_ACCURACY, TEACHER_HELD_OUT, TeacherFacts, TrainingFacts

Encoders = Mapping[str, tuple[NewClassifier, Iterable[tuple[pa.Table, TokenRows]]]]
"""By teacher: its encoder under a new head, and the labelled texts in its tokens."""


Trained = dict[str, tuple[NewClassifier, TeacherFacts]]


def train(
    encoders: Encoders, labels: list[str], settings: TrainingSettings, services: TrainingServices, checkpoint: Path
) -> Trained:
    [(name, (new, texts))] = encoders.items()
    data = labelled(texts, labels, held_out=TEACHER_HELD_OUT)
    selection = _selection(accuracy_on(data.held_out or data.learn, new.pad_id), data)
    facts = learn(services, new, data.learn, settings, selection, checkpoint)
    return {name: (new, _facts(facts, labels, data))}


def co_train(
    encoders: Encoders, labels: list[str], settings: TrainingSettings, services: TrainingServices, checkpoint: Path
) -> Trained:
    news = {name: new for name, (new, _) in encoders.items()}
    first = next(iter(news.values()))
    _check_widths(news)
    data = [labelled(texts, labels, held_out=TEACHER_HELD_OUT) for _, texts in encoders.values()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        head = head_for(first.model.config, len(labels))
    model = CoTrainedTeachers([without_pooler(new.model.base_model) for new in news.values()], head, len(labels))
    examples = concatenated([part.learn for part in data], model.starts)
    scored = concatenated([part.held_out or part.learn for part in data], model.starts)

    def score(model: Any) -> float:
        return float(np.mean(_accuracies(model, scored, len(news))))

    starts = range(0, len(news) * len(labels), len(labels))
    objective = RestrictedKL([range(start, start + len(labels)) for start in starts])
    combined = replace(first, model=model, pad_id=model.pad_id)
    selection = _selection(score, data[0])
    learned = learn(services, combined, examples, settings, selection, checkpoint, objective, phase="together")
    facts, accuracies = _facts(learned, labels, data[0]), _accuracies(model, scored, len(news))
    return {
        name: (replace(new, model=attentive_classifier(body, head, labels)), facts | {"best_score": accuracy})
        for (name, new), body, accuracy in zip(news.items(), model.bodies, accuracies, strict=True)
    }


def _selection(score: Score, data: TrainingData) -> Selection:
    return Selection(HELD_OUT_ACCURACY, score, len(data.held_out or ()))


def _facts(facts: TrainingFacts, labels: list[str], data: TrainingData) -> TeacherFacts:
    return {**facts, "labels": labels, "texts": len(data.learn), "held_out": len(data.held_out or ())}


def _accuracies(model: Any, examples: Examples, teachers: int) -> list[float]:
    logits = predict(model, examples.tokens, pad_id=model.pad_id, type_ids=examples.type_ids)
    predicted = logits.reshape(len(logits), teachers, -1).argmax(axis=2)
    gold = examples.targets.reshape(len(logits), teachers, -1)[:, 0].argmax(axis=1)
    return [float(share) for share in (predicted == gold[:, None]).mean(axis=0)]


def _check_widths(news: dict[str, NewClassifier]) -> None:
    widths = {name: int(new.model.config.hidden_size) for name, new in news.items()}
    if len(set(widths.values())) > 1:
        raise ModelError(
            "encoders of different width cannot share one pooling and one dense layer",
            where=f"train_teachers.co_train: {', '.join(f'{name} {width}' for name, width in widths.items())}",
            fix="use encoders of the same width, or train separately: set train_teachers.encoder and groups",
        )


class CoTrainedTeachers(nn.Module):
    """Several encoders under one head; returns their concatenated logits."""

    def __init__(self, bodies: Sequence[Any], head: AttentiveHead, labels: int) -> None:
        super().__init__()
        self.bodies, self.head = nn.ModuleList(bodies), head
        sizes = [int(body.get_input_embeddings().weight.shape[0]) for body in bodies]
        self.starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        self.pad_id = self.starts[-1]  # no encoder's token
        self.config = SimpleNamespace(num_labels=len(bodies) * labels)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> SimpleNamespace:
        del attention_mask  # each encoder gets its own mask
        logits = []
        for index, body in enumerate(self.bodies):
            inputs = self._inputs(index, input_ids, token_type_ids)
            logits.append((self._unpadded if reads_padding(body.config) else self._logits)(body, inputs))
        return SimpleNamespace(logits=torch.cat(logits, dim=-1))

    def _logits(self, body: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.head(body(**inputs).last_hidden_state, inputs["attention_mask"])

    def _unpadded(self, body: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the logits of a body that reads padding, from texts of one length at a time."""
        lengths = inputs["attention_mask"].sum(dim=1)
        groups = {length: (lengths == length).nonzero().flatten() for length in {*lengths.tolist()}}
        parts = [
            self._logits(body, {name: tensor[rows, :length] for name, tensor in inputs.items()})
            for length, rows in groups.items()
        ]
        return torch.cat(parts)[torch.cat([*groups.values()]).argsort()]

    def _inputs(self, index: int, ids: torch.Tensor, types: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Returns the tokens of one encoder, padded on the right."""
        first, last = self.starts[index : index + 2]
        is_own = (ids >= first) & (ids < last)
        lengths = is_own.sum(dim=1, keepdim=True)
        order = (~is_own).to(torch.int8).argsort(dim=1, stable=True)[:, : int(lengths.max())]
        mask = torch.arange(order.shape[1], device=ids.device) < lengths
        body: Any = self.bodies[index]
        inputs = {
            "input_ids": torch.where(mask, ids.gather(1, order) - first, int(body.config.pad_token_id or 0)),
            "attention_mask": mask.long(),
        }
        if types is not None and int(getattr(body.config, "type_vocab_size", 0) or 0) > 1:
            inputs["token_type_ids"] = torch.where(mask, types.gather(1, order), 0)
        return inputs


def concatenated(parts: Sequence[Examples], starts: Sequence[int]) -> Examples:
    """Concatenates each text's tokens for all encoders; its targets are repeated once per encoder."""
    started = list(zip(parts, starts, strict=False))
    rows = range(len(parts[0]))
    ids = [np.concatenate([part.tokens[row] + start for part, start in started]) for row in rows]
    types = None
    if any(part.type_ids is not None for part in parts):
        columns = [part.type_ids or [np.zeros(len(tokens), np.int8) for tokens in part.tokens] for part in parts]
        types = [np.concatenate(parts_of_text) for parts_of_text in zip(*columns, strict=True)]
    return Examples(ids, types, np.tile(parts[0].targets, (1, len(parts))), parts[0].weights)
