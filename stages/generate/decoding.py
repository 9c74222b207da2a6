"""Generates many texts at once: each text has a slot, and a new text takes the slot of a finished one.

Noise is keyed by text, position and token. The composition of a batch changes the last bits of logits. A token that
rounding could decide is therefore computed again for its text alone, and so are all reported numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from amalgam.data.keys import text_key
from amalgam.data.tokens import Tokens, encode
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.storage.small_files import canonical
from amalgam.stages.common.device import tokens_at_once
from amalgam.stages.common.inference.batches import run_passes
from amalgam.stages.common.inference.dropout import GOLDEN, MIX_B, mixed
from amalgam.stages.common.inference.teacher import Teacher
from amalgam.stages.generate.language_model import LanguageModel

Item = TypeVar("Item")
Floats = NDArray[np.float64]
Positions = NDArray[np.int64]
Tag = tuple[int, int]

MARGIN = 1e-3
"""Totals closer than this times (1 + strength) count as a tie: other batch shapes round differently, by far less."""

CUT = 1e-5
"""The same margin for a share of the probability, and ten times this for a logit, at the cut of the candidates."""

LEAST_TEMPERATURE = 1e-6
"""Least sampling temperature above 0: with less, the most probable candidate has all of the probability too."""

FIRST = 4
"""Candidates scored together in the first round; later rounds score half as many as all rounds before."""

CACHED = 1 << 16
"""Texts whose scores, and words whose tokens, stay in memory."""

PROBES = (
    "The court, which had not met since Monday, said: no.",  # not prose
    "its 3.5% gain isn't what they'd hoped for; (see below)",  # not prose
    "a  double  space, a-hyphen and an e-mail@address.com",
    "Wörter naïve 中文 text 🙂 and so on",
    "one two three",
)
"""Texts on which the two ways to tokenize must agree."""

FRACTION = 2.0**-53

QUESTIONS = 1 << 32
"""Positions from here on are beyond the end of any text; they number the draws of a text's own settings."""

UNFINISHED = "\ufffd"
"""The character that a decoder writes for an incomplete byte sequence."""


# ---- keyed random numbers


def key64(*parts: Any) -> int:
    """Returns a 64-bit key of a text: a hash of its seed, teacher, class and index."""
    return int.from_bytes(hashlib.blake2b(canonical(list(parts)).encode(), digest_size=8).digest(), "little")


def uniform(key: int, position: int, numbers: Positions) -> Floats:
    """Returns a number strictly between 0 and 1 for each of `numbers` at one position of one text."""
    start = mixed(np.array([key], np.uint64) ^ mixed(np.array([position + 1], np.uint64) * np.uint64(GOLDEN)))
    bits = mixed(start ^ mixed((numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(MIX_B)))
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * FRACTION


def gumbel(key: int, position: int, numbers: Positions) -> Floats:
    """Returns standard Gumbel noise; the argmax of log-weights plus this noise is a sample."""
    return -np.log(-np.log(uniform(key, position, numbers)))


def draw_option(key: int, question: int, options: Sequence[Item]) -> Item:
    """Returns the option that a text draws; `question` numbers the text's draws from 0."""
    share = uniform(key, QUESTIONS + question, np.zeros(1, np.int64))[0]
    return options[min(int(share * len(options)), len(options) - 1)]


# ---- candidates for a token


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Limits the language model's distribution before steering. Temperature 0 is greedy decoding at temperature 1."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    candidates: int = 200

    @property
    def divisor(self) -> float:
        """Returns the divisor of logits; no quotient overflows."""
        return max(self.temperature, LEAST_TEMPERATURE) if self.temperature else 1.0

    @property
    def limit(self) -> int:
        return min(self.candidates, self.top_k or self.candidates)


class Candidates(NamedTuple):
    """The candidates for one text's next token, in descending order of probability."""

    ids: Positions
    log_lm: Floats
    """After temperature."""
    is_near_tie: bool
    """Rounding could change the set of candidates."""


def find_candidates(logits: torch.Tensor, params: Sequence[SamplingParams], banned: torch.Tensor) -> list[Candidates]:
    """Returns each text's candidates from logits [texts, vocabulary]; tokens where `banned` is true are excluded."""
    scores = logits.masked_fill(banned, float("-inf"))
    scores = scores.cpu() if scores.device.type == "mps" else scores  # MPS has no fp64
    limit = min(max(row.limit for row in params) + 1, scores.shape[1])
    best, ids = (tensor.cpu() for tensor in scores.topk(limit, dim=1))
    temperatures = torch.tensor([row.divisor for row in params], dtype=torch.float64, device=scores.device)
    normalizers = torch.logsumexp(scores.double() / temperatures[:, None], 1).cpu().numpy()
    rows = zip(ids.numpy(), best.double().numpy(), params, normalizers, strict=True)
    return [_candidates(*row) for row in rows]


def _candidates(ids: Positions, scores: Floats, params: SamplingParams, normalizer: float) -> Candidates:
    """Sorts equal scores by id; the nucleus is computed over the whole vocabulary."""
    order = np.lexsort((ids, -scores))
    order = order[np.isfinite(scores[order])]
    excluded = order[params.limit : params.limit + 1]
    order = order[: params.limit]
    is_near_tie = bool(len(excluded) and scores[order[-1]] - scores[excluded[0]] < 10 * CUT)
    log_lm = scores[order] / params.divisor - normalizer
    kept = len(order)
    if params.top_p < 1:
        before = np.cumsum(np.exp(log_lm)) - np.exp(log_lm)
        kept = max(1, int((before < params.top_p).sum()))
        is_near_tie |= bool((np.abs(before - params.top_p) < CUT).any())
    return Candidates(ids[order[:kept]], log_lm[:kept], is_near_tie)


# ---- one token


class LazySampler:
    """Samples one token of p_LM(v) p_T(c | v)^strength: with Gumbel noise g, argmax log p_LM + g + strength log p_T.

    Since log p_T <= 0, candidates are scored in the order of log p_LM + g until the best total exceeds the next bound.
    The result equals scoring all of them. With `max_scored`, fewer are scored and the sample is inexact.
    """

    def __init__(self, log_lm: Floats, noise: Floats, strength: float, *, max_scored: int | None = None) -> None:
        self.noise, self.strength = noise, strength
        self.bounds = log_lm + noise
        order = np.argsort(-self.bounds, kind="stable")
        self.order = order[: max_scored or len(order)]
        last, excluded = self.order[-1], order[len(self.order) : len(self.order) + 1]
        self.is_near_tie = bool((self.bounds[last] - self.bounds[excluded] < MARGIN).any())
        """Rounding could change the first `max_scored` candidates."""
        self.totals = np.full(len(log_lm), -np.inf)
        self.scored = 0

    def pending(self) -> Positions:
        """Returns the candidates to score next; empty once the winner is known."""
        if self.strength == 0:
            return self.order[:0]
        rest = self.order[self.scored :]
        # A candidate that can only tie is scored too: a tie goes to the more probable candidate.
        able: Positions = rest[self.bounds[rest] >= self.totals.max()]
        return able[: max(FIRST, self.scored // 2)]

    def take(self, positions: Positions, log_teacher: Floats) -> None:
        self.totals[positions] = self.bounds[positions] + self.strength * np.minimum(log_teacher, 0.0)
        self.scored += len(positions)

    @property
    def winner(self) -> int:
        return int(self.order[0]) if self.strength == 0 else int(self.totals.argmax())

    def near_ties(self) -> Positions:
        """Returns the winner and every candidate that rounding could make the winner, in the candidates' order."""
        scored = self.order[: self.scored]
        reach = np.full(len(self.bounds), -np.inf)
        reach[self.order] = self.bounds[self.order]
        reach[scored] = self.totals[scored]
        return np.flatnonzero(reach >= reach[self.winner] - MARGIN * (1 + self.strength))


# ---- the teacher


class Tokenization:
    """Tokenizes texts for a teacher; if its tokenizer splits at words, only the last word is tokenized each time."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self._ids = lru_cache(CACHED)(self._plain)
        self._special = self._find_special_tokens()
        self.separator = self._find_separator()
        """Precedes a word that is tokenized alone: " " or nothing. None: the whole text must be tokenized."""

    def tokens(self, text: str) -> Tokens:
        return self.whole(text) if self.separator is None else self._by_words(text, self.separator)

    def whole(self, text: str) -> Tokens:
        return encode(self.teacher.tokenizer, [(text,)], self.teacher.limit, types=self.teacher.takes_types)[0]

    def _by_words(self, text: str, separator: str) -> Tokens:
        before, after, token_type = self._special
        head, space, word = text.rpartition(" ")
        ids = [*self._ids(head), *self._ids(separator + word)] if space and head else self._ids(text)
        room = self.teacher.limit - len(before) - len(after)
        row = np.array([*before, *ids[:room], *after], np.int32)
        types = np.full(len(row), token_type, np.int8) if token_type is not None else None
        return Tokens(row, types, truncated=len(ids) > room)

    def _plain(self, text: str) -> list[int]:
        backend = getattr(self.teacher.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            if backend.truncation is not None:
                backend.no_truncation()
            return list(backend.encode(text, add_special_tokens=False).ids)
        return list(self.teacher.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _find_special_tokens(self) -> tuple[list[int], list[int], int | None]:
        """Returns the special tokens before and after a text, and the token type of a single text."""
        whole, plain = self.whole(PROBES[-1]), self._plain(PROBES[-1])
        ids = whole.ids.tolist()
        start = next((at for at in range(len(ids)) if ids[at : at + len(plain)] == plain), 0)
        token_type = None if whole.type_ids is None else int(whole.type_ids[0])
        return ids[:start], ids[start + len(plain) :], token_type

    def _find_separator(self) -> str | None:
        """Tests both separators on every prefix of difficult texts; the tokenizer's class is not consulted."""
        if self.teacher.tokenizer.truncation_side != "right":
            return None
        texts = [probe[:end] for probe in PROBES for end in range(1, len(probe) + 1)]
        for separator in (" ", ""):
            if all(_equal(self._by_words(text, separator), self.whole(text)) for text in texts):
                return separator
        return None


def _equal(a: Tokens, b: Tokens) -> bool:
    types = [[] if tokens.type_ids is None else tokens.type_ids.tolist() for tokens in (a, b)]
    return [a.ids.tolist(), types[0]] == [b.ids.tolist(), types[1]]


class Scorer:
    """Computes the log-probabilities of all of a teacher's classes, with dropout off."""

    def __init__(
        self, teacher: Teacher, *, batch_tokens: int | None = None, stop: Callable[[], None] = lambda: None
    ) -> None:
        self.teacher, self.stop = teacher, stop
        self.tokenization = Tokenization(teacher)
        self.batch_tokens = batch_tokens or tokens_at_once(teacher.device, teacher.width)
        self.computed = 0
        """Texts that the teacher ran on; other scores came from the cache."""
        self._cached: dict[bytes, Floats] = {}

    def log_probabilities(self, texts: Sequence[str]) -> list[Floats]:
        """Returns [classes] for each text; texts of one length are computed together."""
        if len(self._cached) >= CACHED:
            self._cached.clear()
        rows = [self.tokenization.tokens(text) for text in texts]
        keys = [tokens.ids.tobytes() for tokens in rows]
        new = {key: tokens for key, tokens in zip(keys, rows, strict=True) if key not in self._cached}
        self._cached |= dict(zip(new, self._computed(list(new.values())), strict=True))
        return [self._cached[key] for key in keys]

    def alone(self, text: str) -> Floats:
        """Computes a text in a batch of one from all of its tokens: bit-exact, a function of the text alone."""
        return self._computed([self.tokenization.whole(text)])[0]

    def _computed(self, tokens: Sequence[Tokens]) -> list[Floats]:
        """Returns log-probabilities; a text without tokens gets the uniform distribution."""
        scores = [np.full(self.teacher.labels, -np.log(self.teacher.labels))] * len(tokens)
        positions = [position for position, row in enumerate(tokens) if len(row)]
        if positions:
            rows = [tokens[position] for position in positions]
            self.teacher.check_vocabulary(max(int(row.ids.max()) for row in rows))
            keys = [text_key([row.ids.tobytes().hex()]) for row in rows]
            logits, _ = run_passes(
                self.teacher, rows, keys, range(0), deterministic=True, batch_tokens=self.batch_tokens, stop=self.stop
            )
            log_probabilities = torch.log_softmax(torch.from_numpy(logits).double(), 1).numpy()
            for position, row in zip(positions, log_probabilities, strict=True):
                scores[position] = row
            self.computed += len(positions)
        return scores


# ---- texts


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A text to generate: everything it depends on apart from the models and the steering."""

    tag: Tag
    key: int
    """Made by key64."""
    label: int
    """Index of the class among the teacher's labels."""
    prompt: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class SteeringParams:
    strength: float
    max_tokens: int
    max_scored: int | None = None
    """Candidates scored per token; with a limit the sample is inexact."""


@dataclass(frozen=True, slots=True)
class GeneratedText:
    text: str
    tokens: int
    log_lm: float | None = None
    """Natural logarithm of the language model's probability of the tokens, the end token included."""
    probability: float | None = None
    """The teacher's probability of the class."""
    scored: int = 0
    """Candidates that the teacher scored."""
    choices: tuple[int, ...] = ()
    """The chosen tokens, the end token included."""


@dataclass
class _Text:
    """A text in a slot."""

    request: TextRequest
    row: list[int]
    prompt_tokens: int
    """Tokens of the row before the text's own."""
    so_far: str = ""
    scored: int = 0

    @property
    def own_tokens(self) -> list[int]:
        return self.row[self.prompt_tokens :]


class _Turn(NamedTuple):
    """The choice of one text's next token."""

    text: _Text
    candidates: Candidates
    sampler: LazySampler


@dataclass(eq=False)
class Writer:
    """Generates texts with one language model, steered by one teacher."""

    model: LanguageModel
    scorer: Scorer
    steering: SteeringParams
    sampler: type[LazySampler] = LazySampler
    ties_broken: int = 0
    """Tokens that were computed again because rounding could decide them."""

    def write(self, requests: Iterable[TextRequest]) -> Iterator[tuple[Tag, GeneratedText]]:
        """Yields each text as soon as it is finished."""
        waiting = iter(requests)
        free = list(range(self.model.slots.count))[::-1]
        active: dict[int, _Text] = {}
        while True:
            for request in islice(waiting, len(free)):
                slot = free.pop()
                active[slot] = self._start(request)
                self.model.begin_text(slot, active[slot].row[:-1])
            if not active:
                return
            self.scorer.stop()
            texts = list(active.values())
            turns = self._turns(texts, self.model.step(list(active), [text.row for text in texts]))
            self._score(turns)
            done = [slot for slot, turn in zip(list(active), turns, strict=True) if self._append(turn)]
            finished = [active.pop(slot) for slot in done]
            free = sorted([*free, *done], reverse=True)  # low slots first: every slot below the last used one computes
            yield from ((text.request.tag, self._result(text)) for text in finished)

    def _start(self, request: TextRequest) -> _Text:
        row = [*self.model.begin, *(self.model.encode(request.prompt) if request.prompt else [])]
        if len(row) > self.model.longest:
            raise ExperimentError(
                f"the prompt has {len(row)} tokens, and the language model reads {self.model.longest}",
                where="generate.prompt",
                fix="shorten the prompt",
            )
        return _Text(request, row, len(row))

    def _turns(self, texts: list[_Text], logits: torch.Tensor) -> list[_Turn]:
        turns = [self._turn(*pair) for pair in zip(texts, self._candidates(texts, logits), strict=True)]
        for place, turn in enumerate(turns):
            if turn.candidates.is_near_tie or turn.sampler.is_near_tie:
                [candidates] = self._candidates([turn.text], self.model.alone(turn.text.row)[-1:])
                turns[place] = self._turn(turn.text, candidates)
        return turns

    def _candidates(self, texts: list[_Text], logits: torch.Tensor) -> list[Candidates]:
        banned = torch.stack([self.model.banned] * len(texts))
        for row, text in enumerate(texts):
            if not text.so_far.strip():  # prevents empty texts
                banned[row, sorted(self.model.ends)] = True
        return find_candidates(logits, [text.request.sampling for text in texts], banned)

    def _turn(self, text: _Text, candidates: Candidates) -> _Turn:
        request, ids = text.request, candidates.ids
        greedy = request.sampling.temperature == 0
        noise = np.zeros(len(ids)) if greedy else gumbel(request.key, len(text.own_tokens), ids)
        steering = self.steering
        sampler = self.sampler(candidates.log_lm, noise, steering.strength, max_scored=steering.max_scored)
        return _Turn(text, candidates, sampler)

    def _score(self, turns: list[_Turn]) -> None:
        """Scores the candidates of all texts together, in rounds, until every choice is certain."""
        while pending := [(turn, positions) for turn in turns if len(positions := turn.sampler.pending())]:
            texts = [text for turn, positions in pending for text in self._extended(turn, positions)]
            scores = iter(self.scorer.log_probabilities(texts))
            for turn, positions in pending:
                label = turn.text.request.label
                turn.sampler.take(positions, np.array([float(row[label]) for row in islice(scores, len(positions))]))

    def _extended(self, turn: _Turn, positions: Positions) -> list[str]:
        """Returns the text with each candidate appended; an end token appends nothing."""
        tokens, ends = turn.text.own_tokens, self.model.ends
        ids = [int(turn.candidates.ids[position]) for position in positions]
        return self.model.decode([tokens if token in ends else [*tokens, token] for token in ids])

    def _append(self, turn: _Turn) -> bool:
        """Adds the chosen token to its text; returns whether the text is finished."""
        text = turn.text
        near_ties = turn.sampler.near_ties()
        position = turn.sampler.winner if len(near_ties) == 1 else self._tie_broken(turn, near_ties)
        self.ties_broken += len(near_ties) > 1
        token = int(turn.candidates.ids[position])
        text.scored += turn.sampler.scored
        text.row.append(token)
        if token in self.model.ends:
            return True
        [text.so_far] = self.model.decode([text.own_tokens])
        return len(text.own_tokens) >= self.steering.max_tokens or len(text.row) > self.model.longest

    def _tie_broken(self, turn: _Turn, positions: Positions) -> int:
        """Returns the winner among candidates that rounding could choose from, each computed alone."""
        request, ids = turn.text.request, turn.candidates.ids[positions]
        logits = self.model.alone(turn.text.row)[-1].cpu().double().numpy()[ids]
        totals = logits / request.sampling.divisor + turn.sampler.noise[positions]
        if turn.sampler.strength:
            scores = [float(self.scorer.alone(text)[request.label]) for text in self._extended(turn, positions)]
            totals += turn.sampler.strength * np.minimum(scores, 0.0)
        return int(positions[totals.argmax()])

    def _result(self, text: _Text) -> GeneratedText:
        final = text.so_far.strip().rstrip(UNFINISHED).rstrip()
        probability = float(np.exp(self.scorer.alone(final)[text.request.label]))
        choices = text.own_tokens
        logits = self.model.alone(text.row[:-1])[text.prompt_tokens - 1 :].cpu().double()
        log_lm = float(torch.log_softmax(logits, 1).numpy()[np.arange(len(choices)), choices].sum())
        return GeneratedText(final, len(choices), log_lm, probability, text.scored, tuple(choices))
