"""A causal language model that writes many texts at once, each in a slot of its own, at a position of its own.

Texts of any length advance together without padding one another. A model that cannot be used so, as numbers show,
writes each text by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from amalgam.pipeline.errors import ModelError, WorkError
from amalgam.stages.common.inference.fast_encoder import alike
from amalgam.stages.common.models.loading import token_limit

WHERE = "generate.language_model"

BEGINNINGS = ("\n", " ", "The")

PROBE = 6

PROMPTS = 32
"""Read ones that are kept in memory."""

UNSHARED = (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a model raises whose cache is not of keys and values by position."""

WINDOWS = ("sliding_window", "window_size", "attention_window")


class LanguageModel:
    """The model, the tokens that begin and end a text, and those that may never be chosen."""

    def __init__(  # noqa: PLR0913  what writes (two) and how (four, by name)
        self,
        model: Any,
        tokenizer: Any,
        *,
        slots: int,
        longest: int,
        device: torch.device | str,
        memory: int = sys.maxsize,
    ) -> None:
        """`longest`: tokens of a text, what stands in front of it included. Fewer `slots` if `memory` has no room."""
        self.model = model.to(device).eval()
        self.tokenizer = tokenizer
        self.device = torch.device(device)
        self.notes: list[str] = []
        self.longest = token_limit(model.config, tokenizer, longest)
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.begin = self._begin()
        self.ends = self._ends()
        self.banned = self._banned()
        _check_causal(self.model, self.vocabulary, self.device)
        slots = max(1, min(slots, memory // self._bytes_of_a_text()))
        self.slots: BatchedCache | SingleText = BatchedCache(self.model, slots, self.longest)
        if not self._agrees():
            self.slots = SingleText(self.model, slots)
            self.notes.append("this language model writes one text after the other: its cache cannot be shared out")

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return [self.tokenizer.decode(list(row), **options) for row in rows]

    def begin_text(self, slot: int, given: Sequence[int]) -> None:
        """The slot is a new text's, before which these tokens stand; all but the one that its first step is told."""
        with self._memory_for("one text"):
            self.slots.begin(slot, given)

    def step(self, at: Sequence[int], rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits [texts, vocabulary] of what follows the last token of each row, which stands in the slot `at`."""
        with self._memory_for(f"{len(rows)} texts"):
            return self.slots.step(at, rows).float()

    @contextmanager
    def _memory_for(self, texts: str) -> Iterator[None]:
        try:
            with torch.inference_mode():
                yield
        except torch.OutOfMemoryError as error:
            raise WorkError(
                f"the language model: out of memory, {texts} of up to {self.longest} tokens at once",
                where=WHERE,
                fix=f"generate.max_tokens={max(1, self.longest // 2)}, a smaller model, or execution.device=cpu",
            ) from error

    def alone(self, row: Sequence[int]) -> torch.Tensor:
        """Logits [tokens, vocabulary] of what follows each: a function of the row alone, to the last bit."""
        with torch.inference_mode():
            ids = torch.tensor([list(row)], device=self.device)
            return self.model(input_ids=ids, use_cache=False).logits[0].float()  # type: ignore[no-any-return]

    def _begin(self) -> list[int]:
        """What stands before a text's first token, where no prompt does."""
        config = self.model.config
        for special in (self.tokenizer.bos_token_id, config.bos_token_id, *self._end_ids()):
            if isinstance(special, int) and 0 <= special < self.vocabulary:
                return [special]
        for text in BEGINNINGS:
            ids = self.encode(text)
            if ids:
                self.notes.append(f"the language model has no token that begins a text: {text!r} stands in its place")
                return ids[:1]
        raise ModelError(
            "the language model has no token that begins a text, and its tokenizer knows none of the usual words",
            where=WHERE,
            fix="set a bos_token in its tokenizer and save it again",
        )

    def _end_ids(self) -> Iterable[int]:
        config, generation = self.model.config, getattr(self.model, "generation_config", None)
        for said in (self.tokenizer.eos_token_id, config.eos_token_id, getattr(generation, "eos_token_id", None)):
            yield from said if isinstance(said, list) else [] if said is None else [said]

    def _ends(self) -> frozenset[int]:
        ends = frozenset(one for one in self._end_ids() if 0 <= one < self.vocabulary)
        if not ends:
            self.notes.append("the language model has no token that ends a text: all run to generate.max_tokens")
        return ends

    def _banned(self) -> torch.Tensor:
        """Special tokens but those that end a text, and rows of the vocabulary that stand for no token."""
        banned = torch.ones(self.vocabulary, dtype=torch.bool)
        banned[[one for one in self.tokenizer.get_vocab().values() if one < self.vocabulary]] = False
        named = {place for place, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        special = [one for one in {*named, *self.tokenizer.all_special_ids} if one < self.vocabulary]
        banned[special] = True  # also those that have no name of their own, such as <repo_name>
        banned[sorted(self.ends)] = False
        return banned.to(self.device)

    def _bytes_of_a_text(self) -> int:
        """In the cache, as one token shows; of a model whose cache cannot be shared out, one."""
        try:
            with torch.inference_mode():
                ids = torch.tensor([self.begin], device=self.device)
                layers = self.model(input_ids=ids, use_cache=True).past_key_values.layers
            token: int = sum(one.keys.nbytes + one.values.nbytes for one in layers)
            return max(1, token * self.longest)
        except UNSHARED:
            return 1

    def _agrees(self) -> bool:
        """Two rows in slots beside the model's own way: numbers decide, not names. The slots know no sliding window."""
        windows = [getattr(self.model.config, name, None) for name in WINDOWS]
        if any(isinstance(one, int) and one < self.longest for one in windows):
            return False
        count = min(PROBE, self.longest)
        rows = [[(7 * i + 3 * row + 1) % self.vocabulary for i in range(count)] for row in range(2)]
        at = [0, self.slots.count - 1][: self.slots.count]
        given = count // 2
        try:
            for slot, row in zip(at, rows, strict=False):
                self.begin_text(slot, row[:given])
            for place in range(given, count):
                found = self.step(at, [row[: place + 1] for row in rows[: len(at)]])
            with torch.inference_mode():
                expected = self.model(input_ids=torch.tensor(rows, device=self.device)).logits[:, -1].float()
            return alike(found.T, expected[: len(found)].T, torch.float32)
        except UNSHARED as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return False


def _check_causal(model: Any, vocabulary: int, device: torch.device) -> None:
    """What comes later must not change what was said before: an encoder's head loads as a causal one without a word."""
    pair = torch.tensor([[1 % vocabulary, 2 % vocabulary], [1 % vocabulary, 3 % vocabulary]], device=device)
    with torch.inference_mode():
        first, other = model(input_ids=pair).logits[:, 0].float()
    if not alike(first[:, None], other[:, None], torch.float32):
        raise ModelError(
            "the model reads what comes after a token: it is no causal language model",
            where=WHERE,
            fix="name a model that was trained to continue texts, such as a GPT-2",
        )


class BatchedCache:
    """`count` texts beside each other. Unused slots before the last used one compute too, and nobody looks."""

    def __init__(self, model: Any, count: int, length: int) -> None:
        self.model, self.count, self.length = model, count, length
        self.positions = torch.zeros(0, dtype=torch.long, device=model.device)
        """Of a step: where the token of each slot stands."""
        self.reach = 0
        """Up to where the longest text has come; what is behind it is not looked at."""
        self.cache = Cache(layer_class_to_replicate=partial(SlotLayer, self))
        self.read = lru_cache(PROMPTS)(self._read)

    def begin(self, slot: int, given: Sequence[int]) -> None:
        if given:
            for place, (keys, values) in enumerate(self.read(tuple(given))):
                while len(self.cache.layers) <= place:
                    self.cache.layers.append(SlotLayer(self))
                self.cache.layers[place].place(slot, keys, values)

    def _read(self, given: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's keys and values of a prompt, which one pass reads for all texts that stand behind it."""
        ids = torch.tensor([given], device=self.model.device)
        layers = self.model(input_ids=ids, use_cache=True).past_key_values.layers
        return [(layer.keys, layer.values) for layer in layers]

    def step(self, at: Sequence[int], rows: Sequence[Sequence[int]]) -> torch.Tensor:
        device = self.model.device
        used = max(at) + 1
        last = torch.zeros(used, 1, dtype=torch.long)
        positions = torch.zeros(used, dtype=torch.long)
        for slot, row in zip(at, rows, strict=True):
            last[slot, 0], positions[slot] = row[-1], len(row) - 1
        self.positions = positions.to(device)
        self.reach = int(positions.max()) + 1
        seen = torch.arange(self.reach)[None, :] <= positions[:, None]
        mask = torch.zeros(seen.shape, dtype=self.model.dtype).masked_fill_(~seen, torch.finfo(self.model.dtype).min)
        logits = self.model(
            input_ids=last.to(device),
            attention_mask=mask[:, None, None, :].to(device),
            position_ids=self.positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]
        return logits[list(at)]  # type: ignore[no-any-return]


class SlotLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's cache: as long as a text can get, written at each slot's own position."""

    def __init__(self, slots: BatchedCache, **options: Any) -> None:
        super().__init__(**options)
        self.slots = slots
        self.is_initialized: bool = False

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        self._make_room(key_states, value_states)
        positions, reach = self.slots.positions, self.slots.reach
        rows = torch.arange(len(positions), device=self.device)
        self.keys[rows, :, positions] = key_states[:, :, 0]
        self.values[rows, :, positions] = value_states[:, :, 0]
        return self.keys[: len(rows), :, :reach], self.values[: len(rows), :, :reach]

    def place(self, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """What one text [1, heads, tokens, width] begins with."""
        self._make_room(keys, values)
        self.keys[slot, :, : keys.shape[2]] = keys[0]
        self.values[slot, :, : values.shape[2]] = values[0]

    def _make_room(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not self.is_initialized:
            self.dtype, self.device = keys.dtype, keys.device
            self.keys, self.values = (
                like.new_zeros((self.slots.count, like.shape[1], self.slots.length, like.shape[3]))
                for like in (keys, values)
            )
            self.is_initialized = True

    def get_seq_length(self, *_: Any) -> int:
        return 0


class SingleText:
    """Each text with a cache of its own, or with none where the model keeps none."""

    def __init__(self, model: Any, count: int) -> None:
        self.model, self.count = model, count
        self.kept: dict[int, Any] = {}

    def begin(self, slot: int, given: Sequence[int]) -> None:  # noqa: ARG002  the first step reads them
        self.kept.pop(slot, None)

    def step(self, at: Sequence[int], rows: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.cat([self._one(slot, row) for slot, row in zip(at, rows, strict=True)])

    def _one(self, slot: int, row: Sequence[int]) -> torch.Tensor:
        past = self.kept.get(slot)
        ids = torch.tensor([row if past is None else row[-1:]], device=self.model.device)
        found = self.model(input_ids=ids, past_key_values=past, use_cache=True)
        self.kept[slot] = getattr(found, "past_key_values", None)
        return found.logits[:, -1]  # type: ignore[no-any-return]
