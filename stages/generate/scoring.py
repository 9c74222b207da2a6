"""A teacher's log-probability of a class for many texts, most of which share all but their last word with others.

Texts of one token length share launches of one fixed size: a text's numbers do not depend on its company, not even in
their last bit.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amalgam.data.tokens import Tokens
from amalgam.pipeline.errors import WorkError
from amalgam.stages.cache_teachers.launches import OUT_OF_MEMORY, go_on
from amalgam.stages.cache_teachers.teacher import DROPOUT_OFF, Rows, Teacher

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS = {"cpu": 8, "cuda": 64, "mps": 64}
"""Of a launch, always: on another kind of device numbers differ in their last bits anyway."""
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
        from amalgam.data.tokens import encode

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

    def __init__(self, teacher: Teacher, *, stop: Callable[[], None] = go_on) -> None:
        self.teacher = teacher
        self.reader = Reader(teacher)
        self.rows = ROWS[teacher.device.type]
        self.stop = stop
        self.computed = 0
        """Texts that went through the teacher; others were asked about before."""
        self._known: dict[bytes, NDArray[np.float64]] = {}

    def log_probabilities(self, texts: Sequence[str]) -> list[NDArray[np.float64]]:
        """[classes] for each text. A text without a single token says nothing: all classes alike."""
        if len(self._known) >= KEPT:
            self._known.clear()
        read = [self.reader.read(text) for text in texts]
        names = [tokens.ids.tobytes() for tokens in read]
        new = {name: tokens for name, tokens in zip(names, read, strict=True) if name not in self._known}
        if b"" in new:
            self._known[b""] = np.full(self.teacher.labels, -np.log(self.teacher.labels))
            del new[b""]
        self.teacher.check_vocabulary(max((int(tokens.ids.max()) for tokens in new.values()), default=0))
        answers: dict[bytes, NDArray[np.float64]] = {}
        for group in self._launches(new):
            answers |= dict(zip(group, self._launched([new[name] for name in group]), strict=True))
        self._known |= answers
        return [self._known[name] for name in names]

    def _launches(self, new: dict[bytes, Tokens]) -> Iterator[list[bytes]]:
        by_length: dict[int, list[bytes]] = {}
        for name, tokens in new.items():
            by_length.setdefault(len(tokens), []).append(name)
        for names in by_length.values():
            first = 0
            while first < len(names):  # rows may become fewer in between
                group = names[first : first + self.rows]
                first += len(group)
                yield group

    def _launched(self, tokens: list[Tokens]) -> list[NDArray[np.float64]]:
        """In parts where memory does not suffice; a launch that is not full is filled up with its first text."""
        found: list[NDArray[np.float64]] = []
        while len(found) < len(tokens):
            part = tokens[len(found) : len(found) + self.rows]
            self.stop()
            logits = self._tried([*part, *[part[0]] * (self.rows - len(part))])
            if logits is None:
                self._halve(len(part[0]))
                continue
            if not bool(torch.isfinite(logits).all()):
                raise WorkError(
                    f"teacher {self.teacher.name}: logits are NaN or infinite",
                    where=f"a text of {len(part[0])} tokens",
                    fix="leave this teacher out, or mend its weights",
                )
            found += list(torch.log_softmax(logits[: len(part)].double(), 1).numpy())
            self.computed += len(part)
        return found

    def _tried(self, tokens: list[Tokens]) -> Any:
        """None: not enough memory. The error is dropped here, and with it all that its traceback keeps alive."""
        rows = Rows(tokens, [bytes(16)] * len(tokens), np.full(len(tokens), DROPOUT_OFF))
        try:
            return self.teacher.run(rows)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            known = isinstance(error, torch.OutOfMemoryError)
            if not known and not any(words in str(error).lower() for words in OUT_OF_MEMORY):
                raise
            return None

    def _halve(self, length: int) -> None:
        gc.collect()
        if self.teacher.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.rows == 1:
            raise WorkError(
                f"teacher {self.teacher.name}: out of memory on a single text of {length} tokens",
                fix=f"set generate.max_tokens or this teacher's max_tokens: {max(1, length // 2)}, "
                "or execution.device: cpu",
            )
        self.rows //= 2
