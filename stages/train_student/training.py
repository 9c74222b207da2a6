"""Trains the student: joins texts and targets, builds the objective's phases, selects the best checkpoint.

From pseudo embeddings instead of texts (as-dfd), targets are pad_i(T_i): the prediction of the embedding's teacher,
padded to the union of labels. Special tokens are the student's own. The student's word embeddings are not trained,
since it reads no word.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file

from amalgam.data.arrays import unknown_score
from amalgam.data.parquet import key_array, matrix
from amalgam.data.tokens import TokenRows
from amalgam.pipeline.config.schema import Objective
from amalgam.pipeline.errors import ExperimentError, ModelError, WorkError
from amalgam.stages.build_targets.stage import TargetFacts
from amalgam.stages.common.cached.read import States
from amalgam.stages.common.inference import batches
from amalgam.stages.common.inference.teacher import Teacher
from amalgam.stages.common.models.loading import aligned
from amalgam.stages.common.models.resolve import NewClassifier
from amalgam.stages.common.models.unknown import UnknownStates
from amalgam.stages.common.training.batches import BucketArrays, Examples, TrainingData, split
from amalgam.stages.common.training.loop import TrainingSettings
from amalgam.stages.common.training.losses import Loss, WeightedKL
from amalgam.stages.common.training.run import FEWEST_TO_SELECT, Selection, TrainingServices, learn, negative_loss
from amalgam.stages.common.training.schedule import PhasedFacts, TrainingFacts, UnknownThreshold, held_out_rows
from amalgam.stages.make_embeddings.search import SpecialTokens, check_reads_embeddings, fit_projection
from amalgam.stages.train_student.objectives import OBJECTIVES, ObjectiveContext, Phases

SCORE_NAMES = {"scores": "difference from", "mt-bert": "cross-entropy to"}

ACCEPTED_SHARE = 0.95
"""Share of new texts that the threshold of the logits' score accepts."""
STUDENT_T = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81, 1.8, 1.78, 1.77, 1.76, 1.75, 1.75, 1.74)
"""ACCEPTED_SHARE quantile of Student's t with 1, 2, … 17 degrees of freedom."""
UNKNOWN_TEXTS = 20_000
"""Largest number of texts to which the states of unknown texts are fitted."""


def train(  # noqa: PLR0913 - the training's inputs, by name
    services: TrainingServices,
    new: NewClassifier,
    examples: Examples,
    phases: Phases,
    settings: TrainingSettings,
    selection: Selection,
    checkpoint: Path,
) -> TrainingFacts:
    """Trains the student in place; returns the facts of the last phase, with those of all if there are several."""
    results = {
        name: learn(services, new, examples, settings, selection, checkpoint / name, loss, keep=bool(name), phase=name)
        for name, loss in phases
    }
    last = list(results.values())[-1]
    if len(results) == 1:
        return last
    facts: PhasedFacts = {**last, "phases": results}
    return facts


def set_unknown_threshold(new: NewClassifier, data: TrainingData, validation: Examples | None) -> UnknownThreshold:
    """Sets config.unknown_threshold, so that ACCEPTED_SHARE of the texts have a lower score; reads no label.

    The texts are those of the validation, or held-out ones; texts that were learned have lower scores than new texts.
    """
    new_texts = validation or data.held_out
    texts = new_texts if new_texts and len(new_texts) > 1 else data.learn
    source = "training texts" if texts is data.learn else "validation texts" if validation else "held-out texts"
    logits = batches.predict(new.model, texts.tokens, pad_id=new.pad_id, type_ids=texts.type_ids)
    threshold = upper_bound(unknown_score(logits.astype(np.float64)))
    new.model.config.unknown_threshold = threshold
    return {"threshold": threshold, "texts": len(texts), "source": source}


def upper_bound(scores: np.ndarray[Any, Any]) -> float:
    """Returns a bound that ACCEPTED_SHARE of new scores are below in the mean; that of a normal distribution of few."""
    rank = math.ceil(ACCEPTED_SHARE * (len(scores) + 1))
    if len(scores) == 1 or rank <= len(scores):
        return float(np.sort(scores)[min(rank, len(scores)) - 1])
    return float(scores.mean() + STUDENT_T[len(scores) - 2] * scores.std(ddof=1) * math.sqrt(1 + 1 / len(scores)))


def fit_unknown_states(
    model: Any,
    learned: Examples,
    *,
    pad_id: int,
    new: Examples | None = None,
    evidence: np.ndarray[Any, Any] | None = None,
) -> UnknownStates | None:
    """Fits the states of at most UNKNOWN_TEXTS learned texts by predicted label; None if the model gives no states.

    Learned texts are in the order of their keys, which are hashes, so the first of them are a random sample.
    `evidence` is the teachers' largest evidence on each of them. `new` texts were not learned and raise the threshold.
    """
    texts = learned.first(UNKNOWN_TEXTS)
    layer = batches.middle_layer(model, batches.model_inputs(texts.tokens, texts.type_ids, np.arange(1), pad_id))
    if layer is None:
        return None
    predict = partial(batches.predict_with_states, model, pad_id=pad_id, layer=layer)
    logits, states = predict(texts.tokens, type_ids=texts.type_ids)
    if not np.isfinite(states).all():
        return None
    groups = logits.argmax(axis=1)
    weights = batches.weights_digest(model)
    fit = UnknownStates.of(states.astype(np.float64), groups, evidence, layer=layer, weights=weights)
    if new is None:
        return fit
    texts = new.first(UNKNOWN_TEXTS)
    states = predict(texts.tokens, type_ids=texts.type_ids)[1]
    return fit.raised(states.astype(np.float64)) if np.isfinite(states).all() else fit


def targeted(
    texts: Iterable[tuple[pa.Table, TokenRows]],
    targets: Iterable[pa.Table],
    *,
    held_out: float,
    unused: Collection[bytes],
) -> TrainingData:
    """Returns the training texts with their targets, joined bucket by bucket, and a held-out share."""

    def read(rows: pa.Table, tokens: TokenRows, table: pa.Table) -> BucketArrays:
        if not rows.column("key").equals(table.column("key")):
            fix = "run `amalgam verify`, then `amalgam build-targets --force`"
            raise WorkError("texts and targets do not have the same keys", fix=fix)
        keys, values = key_array(rows.column("key")), matrix(table.column("target"))
        return keys, tokens, values, table.column("weight").to_numpy()

    return split((read(*bucket, table) for bucket, table in zip(texts, targets, strict=True)), held_out, unused)


def selection(data: TrainingData, pad_id: int, loss: Loss, facts: TargetFacts, *, are_labelled: bool) -> Selection:
    """Returns how checkpoints are selected without validation texts; `are_labelled`: `labels` corrected targets."""
    gold = "gold labels among them" if facts["gold"] or are_labelled else "no labels used"
    source = f"held-out targets, {gold}" if data.held_out else "the targets themselves"
    scored = data.held_out or data.learn.first(FEWEST_TO_SELECT)  # nothing is selected without held-out texts
    name = f"{SCORE_NAMES.get(facts['objective'], 'KL to')} {source}"
    return Selection(name, negative_loss(scored, pad_id, loss), len(data.held_out or ()))


def objective_phases(  # noqa: PLR0913 - the fields of the context, by name
    config: Objective,
    new: NewClassifier,
    states: Sequence[States],
    targets: Loss,
    *,
    seed: int,
    confidence: np.ndarray[Any, Any] | None,
) -> Phases:
    """Returns the phases of the training; the objective's own weights are drawn from the student's seed."""
    width, labels = int(new.model.config.get_text_config().hidden_size), int(new.model.config.num_labels)
    context = ObjectiveContext(config, targets, states, width, labels, confidence)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return OBJECTIVES[config.name](context)


def check_lengths(states: Iterable[States], examples: Examples) -> None:
    """Refuses states per token if a teacher reads other tokens of a text than the student."""
    lengths: Any = examples.lengths
    for teacher in states:
        if (teacher.lengths != lengths).any():
            raise ModelError(
                f"teacher {teacher.teacher} and the student do not read the same tokens of a text",
                where="objective.states: tokens",
                fix="set the same max_tokens for both, or objective.states=pooled (layerwise: schedule=joint)",
            )


# ---- pseudo embeddings


SCORED = 64
"""Embeddings that are scored at once."""

TeacherEmbeddings = tuple[Teacher, Sequence[int], Sequence[Path]]
"""A teacher, its label columns in the union, and the files of its pseudo embeddings, one per class."""


def projected_embeddings(
    new: NewClassifier, teachers: Iterable[TeacherEmbeddings], *, labels: int, tokens: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the pseudo embeddings of every teacher and class in the student's space, and their targets."""
    special = SpecialTokens(new.model, new.tokenizer)
    if tokens + len(special) > new.limit:
        raise ExperimentError(
            f"the student reads {new.limit} tokens, special tokens included",
            where=f"pseudo_embeddings.tokens: {tokens}",
            fix=f"set pseudo_embeddings.tokens={new.limit - len(special)}",
        )
    check_reads_embeddings(new.model, special, name="the student's encoder")
    embeddings, targets = [], []
    for teacher, columns, files in teachers:
        projection = fit_projection((teacher.model, teacher.tokenizer), (new.model, new.tokenizer), teacher.name)
        for file in files:
            tensors = load_file(file)
            padded = torch.zeros(len(tensors["logits"]), labels)
            padded[:, list(columns)] = torch.softmax(tensors["logits"] / temperature, dim=-1)
            embeddings.append(special(aligned(tensors["embeddings"]) @ projection))
            targets.append(padded)
    return torch.cat(embeddings), torch.cat(targets)


def split_embeddings(
    embeddings: torch.Tensor, targets: torch.Tensor, loss: WeightedKL, *, held_out: float
) -> tuple[Examples, Selection]:
    """Returns the embeddings to learn from, and how checkpoints are selected without validation texts."""
    is_held_out = held_out_rows(len(targets), held_out)
    learned = torch.from_numpy(~is_held_out)
    ids = [np.zeros(embeddings.shape[1], np.int64)] * int(learned.sum())
    weights = np.ones(len(ids), np.float32)
    examples = Examples(ids, None, targets[learned].numpy(), weights, embeddings[learned])
    source = "held-out pseudo embeddings" if is_held_out.any() else "the pseudo embeddings themselves"
    rows = torch.from_numpy(is_held_out) if is_held_out.any() else learned
    score = partial(_negative_loss, embeddings[rows], targets[rows], loss)
    name = f"KL to the teachers on {source}, no labels used"
    return examples, Selection(name, score, int(is_held_out.sum()))


def _negative_loss(embeddings: torch.Tensor, targets: torch.Tensor, loss: WeightedKL, model: Any) -> float:
    device, total = next(model.parameters()).device, 0.0
    with torch.no_grad():
        for inputs, predicted in zip(torch.split(embeddings, SCORED), torch.split(targets, SCORED), strict=True):
            logits = model(inputs_embeds=inputs.to(device)).logits.cpu().double()
            weights = torch.ones(len(logits), dtype=torch.float64)
            total += float(loss(logits, {"targets": predicted.double(), "weights": weights}).sum())
    return -total / len(targets)
