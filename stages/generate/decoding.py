"""Generates many texts at once: each text has a slot, and a new text takes the slot of a finished one.

The composition of a batch changes the last bits of logits. A token that rounding could decide is therefore computed
again for its text alone, and so are all reported numbers. A text depends on its request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from amalgam.pipeline.errors import ExperimentError
from amalgam.stages.common.inference.batches import never_stop
from amalgam.stages.generate.language_model import LanguageModel
from amalgam.stages.generate.lazy_sampling import Candidates, LazySampler, SamplingParams, find_candidates, gumbel
from amalgam.stages.generate.scoring import Scorer

Tag = TypeVar("Tag")

UNFINISHED = "\ufffd"
"""The character that a decoder writes for an incomplete byte sequence."""


@dataclass(frozen=True, slots=True)
class TextRequest(Generic[Tag]):
    """A text to generate: everything it depends on apart from the models and the steering."""

    tag: Tag
    key: int
    """Made by lazy_sampling.key64."""
    label: int | None
    """Index of the class among the teacher's labels."""
    prompt: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class SteeringParams:
    strength: float = 1.0
    max_tokens: int = 128
    max_scored: int | None = None
    """Candidates scored per token; with a limit the sample is inexact."""


@dataclass(frozen=True, slots=True)
class GeneratedText:
    text: str
    tokens: int = 0
    log_lm: float | None = None
    """Natural logarithm of the language model's probability of the tokens, the end token included."""
    probability: float | None = None
    """The teacher's probability of the class."""
    scored: int = 0
    """Candidates that the teacher scored."""
    offered: int = 0
    """Candidates that the language model proposed."""
    choices: tuple[int, ...] = ()
    """The chosen tokens, the end token included."""


@dataclass
class _Text(Generic[Tag]):
    request: TextRequest[Tag]
    row: list[int]
    prompt_tokens: int
    """Tokens of the row before the text's own."""
    so_far: str = ""
    scored: int = 0
    offered: int = 0
    ended: bool = False

    @property
    def own_tokens(self) -> list[int]:
        return self.row[self.prompt_tokens :]


@dataclass
class _Turn(Generic[Tag]):
    """The choice of one text's next token."""

    text: _Text[Tag]
    candidates: Candidates
    noise: np.ndarray[Any, Any]
    sampler: LazySampler

    @property
    def is_near_tie(self) -> bool:
        return self.candidates.is_near_tie or self.sampler.is_near_tie


class Writer(Generic[Tag]):
    """Generates texts with one language model, steered by one teacher."""

    def __init__(
        self,
        model: LanguageModel,
        scorer: Scorer | None,
        steering: SteeringParams,
        *,
        stop: Callable[[], None] = never_stop,
        sampler: type[LazySampler] = LazySampler,
    ) -> None:
        self.model, self.scorer, self.steering, self.stop, self.sampler = model, scorer, steering, stop, sampler
        self.steps = 0
        self.ties_broken = 0
        """Tokens that were computed again because rounding could decide them."""

    def write(self, requests: Iterable[TextRequest[Tag]]) -> Iterator[tuple[Tag, GeneratedText]]:
        """Yields each text as soon as it is finished."""
        waiting = iter(requests)
        free = list(range(self.model.slots.count))[::-1]
        active: dict[int, _Text[Tag]] = {}
        while True:
            for request in islice(waiting, len(free)):
                slot = free.pop()
                active[slot] = self._start(request)
                self.model.begin_text(slot, active[slot].row[:-1])
            if not active:
                return
            self.stop()
            self._step(active)
            done = [slot for slot, text in active.items() if text.ended]
            finished = [active.pop(slot) for slot in done]
            free = sorted([*free, *done], reverse=True)  # low slots first: every slot below the last used one computes
            yield from ((text.request.tag, self._result(text)) for text in finished)

    def _start(self, request: TextRequest[Tag]) -> _Text[Tag]:
        row = [*self.model.begin, *(self.model.encode(request.prompt) if request.prompt else [])]
        if len(row) > self.model.longest:
            raise ExperimentError(
                f"the prompt has {len(row)} tokens, and the language model reads {self.model.longest}",
                where="generate.prompt",
                fix="shorten the prompt",
            )
        return _Text(request, row, len(row))

    def _step(self, active: dict[int, _Text[Tag]]) -> None:
        """Adds one token to every text."""
        texts = list(active.values())
        turns = self._turns(texts, self.model.step(list(active), [text.row for text in texts]))
        self._score(turns)
        for turn in turns:
            self._append(turn)

    def _turns(self, texts: list[_Text[Tag]], logits: torch.Tensor) -> list[_Turn[Tag]]:
        banned = torch.stack([self._banned(text) for text in texts])
        candidates = find_candidates(logits, [text.request.sampling for text in texts], banned)
        turns = [self._turn(text, own) for text, own in zip(texts, candidates, strict=True)]
        return [
            self._turn(turn.text, self._candidates_alone(turn.text)) if turn.is_near_tie else turn for turn in turns
        ]

    def _banned(self, text: _Text[Tag]) -> torch.Tensor:
        banned = self.model.banned.clone()
        if not text.so_far.strip():  # prevents empty texts
            banned[sorted(self.model.ends)] = True
        return banned

    def _candidates_alone(self, text: _Text[Tag]) -> Candidates:
        logits = self.model.alone(text.row)[-1:]
        [candidates] = find_candidates(logits, [text.request.sampling], self._banned(text)[None])
        return candidates

    def _turn(self, text: _Text[Tag], candidates: Candidates) -> _Turn[Tag]:
        request, ids = text.request, candidates.ids
        greedy = request.sampling.temperature == 0
        noise = np.zeros(len(ids)) if greedy else gumbel(request.key, len(text.own_tokens), ids)
        strength = 0.0 if request.label is None or self.scorer is None else self.steering.strength
        sampler = self.sampler(candidates.log_lm, noise, strength, max_scored=self.steering.max_scored)
        return _Turn(text, candidates, noise, sampler)

    def _score(self, turns: list[_Turn[Tag]]) -> None:
        """Scores the candidates of all texts together, in rounds, until every choice is certain."""
        while True:
            pending = [(turn, positions) for turn in turns if len(positions := turn.sampler.pending())]
            if not pending:
                return
            texts = [text for turn, positions in pending for text in self._extended(turn, positions)]
            scores = iter(self._teacher.log_probabilities(texts))
            for turn, positions in pending:
                label = turn.text.request.label
                turn.sampler.take(positions, np.array([float(row[label]) for row in islice(scores, len(positions))]))

    @property
    def _teacher(self) -> Scorer:
        if self.scorer is None:
            raise AssertionError("a text without steering needs no score")  # _turn sets its strength to 0
        return self.scorer

    def _extended(self, turn: _Turn[Tag], positions: np.ndarray[Any, Any]) -> list[str]:
        """Returns the text with each candidate appended; an end token appends nothing."""
        tokens, ends = turn.text.own_tokens, self.model.ends
        ids = [int(turn.candidates.ids[position]) for position in positions]
        return self.model.decode([tokens if token in ends else [*tokens, token] for token in ids])

    def _append(self, turn: _Turn[Tag]) -> None:
        text = turn.text
        near_ties = turn.sampler.near_ties()
        position = turn.sampler.winner if len(near_ties) == 1 else self._tie_broken(turn, near_ties)
        self.steps += 1
        self.ties_broken += len(near_ties) > 1
        token = int(turn.candidates.ids[position])
        text.scored += turn.sampler.scored
        text.offered += len(turn.candidates.ids)
        text.row.append(token)
        if token not in self.model.ends:
            [text.so_far] = self.model.decode([text.own_tokens])
        full = len(text.own_tokens) >= self.steering.max_tokens or len(text.row) > self.model.longest
        text.ended = token in self.model.ends or full

    def _tie_broken(self, turn: _Turn[Tag], positions: np.ndarray[Any, Any]) -> int:
        """Returns the winner among candidates that rounding could choose from, each computed alone."""
        ids, sampling = turn.candidates.ids[positions], turn.text.request.sampling
        logits = self.model.alone(turn.text.row)[-1].cpu().double().numpy()[ids]
        totals = logits / (sampling.temperature or 1.0) + turn.noise[positions]
        if turn.sampler.strength:
            label = turn.text.request.label
            scores = [float(self._teacher.alone(text)[label]) for text in self._extended(turn, positions)]
            totals += turn.sampler.strength * np.minimum(scores, 0.0)
        return int(positions[totals.argmax()])

    def _result(self, text: _Text[Tag]) -> GeneratedText:
        final = text.so_far.strip().rstrip(UNFINISHED).rstrip()
        label = text.request.label
        scores = self.scorer is not None and label is not None
        probability = float(np.exp(self._teacher.alone(final)[label])) if scores else None
        choices = tuple(text.own_tokens)
        return GeneratedText(final, len(choices), self._log_lm(text), probability, text.scored, text.offered, choices)

    def _log_lm(self, text: _Text[Tag]) -> float:
        logits = self.model.alone(text.row[:-1])[text.prompt_tokens - 1 :].cpu().double()
        log_probabilities = torch.log_softmax(logits, 1).numpy()
        return float(log_probabilities[np.arange(len(text.own_tokens)), text.own_tokens].sum())
