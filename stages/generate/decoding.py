"""Many texts written at once: each in a slot, each token chosen as the teacher steers, a new text where one ends.

Numbers of other company differ in their last bits. So what rounding could decide is computed again for the text by
itself, and what is reported always is: a text is a function of its order alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from amalgam.pipeline.errors import ExperimentError
from amalgam.stages.common.inference.batches import go_on
from amalgam.stages.generate.keyed_random import gumbel
from amalgam.stages.generate.language_model import LanguageModel
from amalgam.stages.generate.lazy_sampling import Candidates, LazySampler, SamplingParams, chosen_among, offers
from amalgam.stages.generate.scoring import Scorer

Tag = TypeVar("Tag")

UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that make no character yet."""


@dataclass(frozen=True, slots=True)
class TextRequest(Generic[Tag]):
    """A text to be written: everything that it is a function of, beside models and steer."""

    tag: Tag
    word: int
    """Its key, as noise.text_word makes it."""
    label: int | None
    """The class, by its place among the teacher's."""
    prompt: str = ""
    how: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class SteeringParams:
    steer: float = 1.0
    max_tokens: int = 128
    fast: int | None = None
    """Score at most so many candidates a token: not exact."""
    lazy: bool = True


@dataclass(frozen=True, slots=True)
class GeneratedText:
    text: str
    tokens: int
    log_lm: float | None
    """Natural logarithm of the language model's probability of its tokens, the end included."""
    probability: float | None
    """The teacher's, of the class."""
    scored: int
    """Candidates that were scored for it."""
    offered: int
    """Candidates that could have been."""
    choices: tuple[int, ...]
    """The chosen tokens, the end included."""


@dataclass
class _Text(Generic[Tag]):
    order: TextRequest[Tag]
    row: list[int]
    begun: int
    """Where its own tokens begin in the row; up to there they are given."""
    so_far: str = ""
    scored: int = 0
    offered: int = 0
    ended: bool = False

    @property
    def written(self) -> list[int]:
        return self.row[self.begun :]


@dataclass
class _Turn(Generic[Tag]):
    """One text's next token in the making."""

    text: _Text[Tag]
    offer: Candidates
    noise: np.ndarray[Any, Any]
    choice: LazySampler


class Writer(Generic[Tag]):
    """`agreed` counts, for each number of `watched` scores, how often so few would have chosen the same token."""

    def __init__(
        self,
        model: LanguageModel,
        scorer: Scorer | None,
        steering: SteeringParams,
        *,
        stop: Callable[[], None] = go_on,
        watched: tuple[int, ...] = (),
    ) -> None:
        self.model, self.scorer, self.steering, self.stop = model, scorer, steering, stop
        self.agreed = dict.fromkeys(watched, 0)
        self.steps = 0
        self.settled = 0
        """Steps that rounding could have decided."""

    def write(self, orders: Iterable[TextRequest[Tag]]) -> Iterator[tuple[Tag, GeneratedText]]:
        """Each as soon as it is done."""
        waiting = iter(orders)
        free = list(range(self.model.slots.count))[::-1]
        active: dict[int, _Text[Tag]] = {}
        while True:
            for order in islice(waiting, len(free)):
                slot = free.pop()
                active[slot] = self._begun(order)
                self.model.begin_text(slot, active[slot].row[:-1])
            if not active:
                return
            self.stop()
            self._step(active)
            done = [slot for slot, text in active.items() if text.ended]
            finished = [active.pop(slot) for slot in done]
            free = sorted([*free, *done], reverse=True)  # the last are used when there is no other: they cost
            yield from self._finished(finished)

    def _begun(self, order: TextRequest[Tag]) -> _Text[Tag]:
        row = [*self.model.begin, *(self.model.encode(order.prompt) if order.prompt else [])]
        if len(row) > self.model.longest:
            raise ExperimentError(
                f"the prompt has {len(row)} tokens, and the language model reads {self.model.longest}",
                where="generate.prompt",
                fix="a shorter prompt",
            )
        return _Text(order, row, len(row))

    def _step(self, active: dict[int, _Text[Tag]]) -> None:
        """One token for every text."""
        texts = list(active.values())
        turns = self._turns(texts, self.model.step(list(active), [text.row for text in texts]))
        self._score(turns)
        for turn in turns:
            self._take(turn)

    def _turns(self, texts: list[_Text[Tag]], logits: torch.Tensor) -> list[_Turn[Tag]]:
        found = offers(logits, [text.order.how for text in texts], torch.stack([self._banned(text) for text in texts]))
        turns = [self._turn(text, offer) for text, offer in zip(texts, found, strict=True)]
        return [self._turn(turn.text, self._own_offer(turn.text)) if _on_edge(turn) else turn for turn in turns]

    def _banned(self, text: _Text[Tag]) -> torch.Tensor:
        banned = self.model.banned.clone()
        if not text.so_far.strip():  # an empty text would say nothing
            banned[sorted(self.model.ends)] = True
        return banned

    def _own_offer(self, text: _Text[Tag]) -> Candidates:
        [offer] = offers(self.model.alone(text.row)[-1:], [text.order.how], self._banned(text)[None])
        return offer

    def _turn(self, text: _Text[Tag], offer: Candidates) -> _Turn[Tag]:
        steering, order = self.steering, text.order
        greedy = order.how.temperature == 0
        noise = np.zeros(len(offer.ids)) if greedy else gumbel(order.word, len(text.written), offer.ids)
        steer = 0.0 if order.label is None or self.scorer is None else steering.steer
        return _Turn(
            text, offer, noise, LazySampler(offer.log_lm, noise, steer, lazy=steering.lazy, most=steering.fast)
        )

    def _score(self, turns: list[_Turn[Tag]]) -> None:
        """Round by round, the candidates of all texts together, until every choice is settled."""
        while True:
            asked = [(turn, wanted) for turn in turns if len(wanted := turn.choice.wanted())]
            if not asked:
                return
            texts = [text for turn, wanted in asked for text in self._candidates(turn, wanted)]
            answers = iter(self._judge.log_probabilities(texts))
            for turn, wanted in asked:
                label = turn.text.order.label
                scores = [float(one[label]) for one in islice(answers, len(wanted))]
                turn.choice.take(wanted, np.array(scores))

    @property
    def _judge(self) -> Scorer:
        if self.scorer is None:
            raise AssertionError("a text that is not steered asks for no score")  # _turn says so
        return self.scorer

    def _candidates(self, turn: _Turn[Tag], places: np.ndarray[Any, Any]) -> list[str]:
        """What the text would be; a token that ends it adds nothing."""
        written, ends = turn.text.written, self.model.ends
        ids = [int(turn.offer.ids[place]) for place in places]
        return self.model.decode([written if one in ends else [*written, one] for one in ids])

    def _take(self, turn: _Turn[Tag]) -> None:
        text = turn.text
        places = turn.choice.contenders()
        place = turn.choice.winner if len(places) == 1 else self._settled(turn, places)
        for most in self.agreed:
            self.agreed[most] += chosen_among(turn.choice, most)
        self.steps += 1
        self.settled += len(places) > 1
        token = int(turn.offer.ids[place])
        text.scored += turn.choice.scored
        text.offered += len(turn.offer.ids)
        text.row.append(token)
        if token not in self.model.ends:
            [text.so_far] = self.model.decode([text.written])
        full = len(text.written) >= self.steering.max_tokens or len(text.row) > self.model.longest
        text.ended = token in self.model.ends or full

    def _settled(self, turn: _Turn[Tag], places: np.ndarray[Any, Any]) -> int:
        """Between those that rounding could choose from: each computed by itself."""
        ids, how = turn.offer.ids[places], turn.text.order.how
        logits = self.model.alone(turn.text.row)[-1].cpu().double().numpy()[ids]
        totals = logits / (how.temperature or 1.0) + turn.noise[places]
        if turn.choice.steer:
            label = turn.text.order.label
            own = [float(self._judge.alone(text)[label]) for text in self._candidates(turn, places)]
            totals += turn.choice.steer * np.minimum(own, 0.0)
        return int(places[totals.argmax()])

    def _finished(self, texts: list[_Text[Tag]]) -> Iterator[tuple[Tag, GeneratedText]]:
        for text in texts:
            final = text.so_far.strip().rstrip(UNFINISHED).rstrip()
            label = text.order.label
            known = self.scorer is not None and label is not None
            probability = float(np.exp(self._judge.alone(final)[label])) if known else None
            log_lm = self._log_lm(text)
            count, choices = len(text.written), tuple(text.written)
            yield text.order.tag, GeneratedText(final, count, log_lm, probability, text.scored, text.offered, choices)

    def _log_lm(self, text: _Text[Tag]) -> float:
        logits = self.model.alone(text.row[:-1])[text.begun - 1 :].cpu().double()
        own = torch.log_softmax(logits, 1).numpy()
        return float(own[np.arange(len(text.written)), text.written].sum())


def _on_edge(turn: _Turn[Any]) -> bool:
    return turn.offer.on_edge or turn.choice.on_edge
