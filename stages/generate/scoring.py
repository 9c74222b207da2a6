"""A teacher's log-probability of a class for many texts, most of which share all but their last word with others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from amalgam.data.keys import text_key
from amalgam.data.tokens import Tokens, encode
from amalgam.stages.common.device import tokens_at_once
from amalgam.stages.common.inference.batches import go_on, run_passes
from amalgam.stages.common.inference.teacher import Teacher

Numbers = NDArray[np.float64]
KEPT = 1 << 16
"""Texts whose answers, and words whose tokens, stay in memory."""

PROBES = (
    "The court, which had not met since Monday, said: no.",
    "its 3.5% gain isn't what they'd hoped for; (see below)",
    "a  double  space, a-hyphen and an e-mail@address.com",
    "Wörter naïve 中文 text 🙂 and so on",
    "one two three",
)


class Reader:
    """Texts in a teacher's tokens. Where words are tokenised one by one, only the last is ever tokenised anew."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self._known: dict[str, tuple[int, ...]] = {}
        self._frame = self._find_frame()
        self.joint = self._find_joint()
        """What stands before a word in its own right: " " or nothing; None: whole texts must be tokenised."""

    def read(self, text: str) -> Tokens:
        return self._whole(text) if self.joint is None else self._by_words(text, self.joint)

    def _whole(self, text: str) -> Tokens:

        return encode(self.teacher.tokenizer, [(text,)], self.teacher.limit, types=self.teacher.takes_types)[0]

    def _by_words(self, text: str, joint: str) -> Tokens:
        before, after, types = self._frame
        head, space, word = text.rpartition(" ")
        ids = [*self._ids(head), *self._ids(joint + word)] if space and head else self._ids(text)
        room = self.teacher.limit - len(before) - len(after)
        framed = np.array([*before, *ids[:room], *after], np.int32)
        kinds = np.full(len(framed), types, np.int8) if types is not None else None
        return Tokens(framed, kinds, cut=len(ids) > room)

    def _ids(self, text: str) -> tuple[int, ...]:
        found = self._known.get(text)
        if found is None:
            if len(self._known) >= KEPT:
                self._known.clear()
            found = tuple(self._plain(text))
            self._known[text] = found
        return found

    def _plain(self, text: str) -> list[int]:
        backend = getattr(self.teacher.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            if backend.truncation is not None:
                backend.no_truncation()
            return list(backend.encode(text, add_special_tokens=False).ids)
        return list(self.teacher.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _find_frame(self) -> tuple[list[int], list[int], int | None]:
        """The special tokens before and after a text, and the one token type of them all."""
        whole, plain = self._whole(PROBES[-1]), self._plain(PROBES[-1])
        ids = whole.ids.tolist()
        start = next((at for at in range(len(ids)) if ids[at : at + len(plain)] == plain), 0)
        types = None if whole.type_ids is None else int(whole.type_ids[0])
        return ids[:start], ids[start + len(plain) :], types

    def _find_joint(self) -> str | None:
        """Tried on texts with all that may go wrong, every prefix of them: numbers decide, not the tokenizer's name."""
        if self.teacher.tokenizer.truncation_side != "right":
            return None
        texts = [probe[:end] for probe in PROBES for end in range(1, len(probe) + 1)]
        for joint in (" ", ""):
            if all(_same(self._by_words(text, joint), self._whole(text)) for text in texts):
                return joint
        return None


def _same(one: Tokens, other: Tokens) -> bool:
    types = [[] if tokens.type_ids is None else tokens.type_ids.tolist() for tokens in (one, other)]
    return [one.ids.tolist(), types[0]] == [other.ids.tolist(), types[1]]


class Scorer:
    """Log-probabilities of all of a teacher's classes, dropout off."""

    def __init__(self, teacher: Teacher, *, batch_tokens: int | None = None, stop: Callable[[], None] = go_on) -> None:
        self.teacher = teacher
        self.reader = Reader(teacher)
        self.batch_tokens = batch_tokens or tokens_at_once(teacher.device, teacher.width)
        self.stop = stop
        self.computed = 0
        """Texts that went through the teacher; others were asked about before."""
        self._known: dict[bytes, Numbers] = {}

    def log_probabilities(self, texts: Sequence[str]) -> list[Numbers]:
        """[classes] for each text, those of one length computed together."""
        if len(self._known) >= KEPT:
            self._known.clear()
        read = [self.reader.read(text) for text in texts]
        names = [tokens.ids.tobytes() for tokens in read]
        new = {name: tokens for name, tokens in zip(names, read, strict=True) if name not in self._known}
        self._known |= dict(zip(new, self._computed(list(new.values())), strict=True))
        return [self._known[name] for name in names]

    def alone(self, text: str) -> Numbers:
        """Computed by itself and from the whole text: a function of the text alone, to the last bit."""
        return self._computed(self.teacher.tokenise([(text,)]) if text else [self.reader.read(text)])[0]

    def _computed(self, tokens: Sequence[Tokens]) -> list[Numbers]:
        """A text without a single token says nothing: all classes alike."""
        found = [np.full(self.teacher.labels, -np.log(self.teacher.labels))] * len(tokens)
        some = [place for place, one in enumerate(tokens) if len(one)]
        if some:
            asked = [tokens[place] for place in some]
            self.teacher.check_vocabulary(max(int(one.ids.max()) for one in asked))
            keys = [text_key([one.ids.tobytes().hex()]) for one in asked]
            logits, _ = run_passes(
                self.teacher, asked, keys, range(0), deterministic=True, batch_tokens=self.batch_tokens, stop=self.stop
            )
            answers = torch.log_softmax(torch.from_numpy(logits).double(), 1).numpy()
            for place, answer in zip(some, answers, strict=True):
                found[place] = answer
            self.computed += len(some)
        return found
