"""Computes a teacher's log-probability of a class for many texts that mostly share all but their last word."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from amalgam.data.keys import text_key
from amalgam.data.tokens import Tokens, encode
from amalgam.stages.common.device import tokens_at_once
from amalgam.stages.common.inference.batches import never_stop, run_passes
from amalgam.stages.common.inference.teacher import Teacher

Floats = NDArray[np.float64]

CACHED = 1 << 16
"""Texts whose scores, and words whose tokens, stay in memory."""

PROBES = (
    "The court, which had not met since Monday, said: no.",  # not prose
    "its 3.5% gain isn't what they'd hoped for; (see below)",  # not prose
    "a  double  space, a-hyphen and an e-mail@address.com",
    "Wörter naïve 中文 text 🙂 and so on",
    "one two three",
)


class Tokenization:
    """Tokenizes texts for a teacher; if its tokenizer splits at words, only the last word is tokenized each time."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self._cached: dict[str, tuple[int, ...]] = {}
        self._special = self._find_special_tokens()
        self.separator = self._find_separator()
        """Precedes a word that is tokenized alone: " " or nothing. None: the whole text must be tokenized."""

    def tokens(self, text: str) -> Tokens:
        return self._whole(text) if self.separator is None else self._by_words(text, self.separator)

    def _whole(self, text: str) -> Tokens:
        return encode(self.teacher.tokenizer, [(text,)], self.teacher.limit, types=self.teacher.takes_types)[0]

    def _by_words(self, text: str, separator: str) -> Tokens:
        before, after, token_type = self._special
        head, space, word = text.rpartition(" ")
        ids = [*self._ids(head), *self._ids(separator + word)] if space and head else self._ids(text)
        room = self.teacher.limit - len(before) - len(after)
        row = np.array([*before, *ids[:room], *after], np.int32)
        types = np.full(len(row), token_type, np.int8) if token_type is not None else None
        return Tokens(row, types, truncated=len(ids) > room)

    def _ids(self, text: str) -> tuple[int, ...]:
        ids = self._cached.get(text)
        if ids is None:
            if len(self._cached) >= CACHED:
                self._cached.clear()
            ids = tuple(self._plain(text))
            self._cached[text] = ids
        return ids

    def _plain(self, text: str) -> list[int]:
        backend = getattr(self.teacher.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            if backend.truncation is not None:
                backend.no_truncation()
            return list(backend.encode(text, add_special_tokens=False).ids)
        return list(self.teacher.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _find_special_tokens(self) -> tuple[list[int], list[int], int | None]:
        """Returns the special tokens before and after a text, and the token type of a single text."""
        whole, plain = self._whole(PROBES[-1]), self._plain(PROBES[-1])
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
            if all(_equal(self._by_words(text, separator), self._whole(text)) for text in texts):
                return separator
        return None


def _equal(a: Tokens, b: Tokens) -> bool:
    types = [[] if tokens.type_ids is None else tokens.type_ids.tolist() for tokens in (a, b)]
    return [a.ids.tolist(), types[0]] == [b.ids.tolist(), types[1]]


class Scorer:
    """Computes the log-probabilities of all of a teacher's classes, with dropout off."""

    def __init__(
        self, teacher: Teacher, *, batch_tokens: int | None = None, stop: Callable[[], None] = never_stop
    ) -> None:
        self.teacher = teacher
        self.tokenization = Tokenization(teacher)
        self.batch_tokens = batch_tokens or tokens_at_once(teacher.device, teacher.width)
        self.stop = stop
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
        return self._computed(self.teacher.tokenise([(text,)]) if text else [self.tokenization.tokens(text)])[0]

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
