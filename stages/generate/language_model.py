"""Runs a causal language model on many texts at once; each text has its own slot and position in the cache.

Texts of different length advance together without padding. If a model's logits differ in the shared cache, each text
gets its own cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from amalgam.pipeline.errors import ModelError, WorkError
from amalgam.pipeline.execution.faults import is_out_of_memory
from amalgam.stages.common.inference.fast_encoder import close_enough
from amalgam.stages.common.models.loading import longest_row, vocabulary_of
from amalgam.stages.generate.requests import LANGUAGE_MODEL

BEGINNINGS = ("\n", " ", "The")

PROBE = 6

PROMPTS = 32
"""Prompts whose keys and values stay in memory."""

UNSHARED = (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Errors of a model whose cache does not hold keys and values by position."""

WINDOWS = ("sliding_window", "window_size", "attention_window")


class LanguageModel:
    """A language model with its start and end tokens and the tokens that are never generated."""

    def __init__(  # noqa: PLR0913  model, tokenizer and four named limits
        self,
        model: Any,
        tokenizer: Any,
        *,
        slots: int,
        longest: int,
        device: torch.device | str,
        memory: int = sys.maxsize,
    ) -> None:
        """`longest` counts a text's tokens with its prompt; `memory` in bytes reduces the number of `slots`."""
        self.model = model.to(device).eval()
        self.model.config.pad_token_id = None  # rows are never padded; transformers takes a start token for padding
        self.tokenizer = tokenizer
        self.device = torch.device(device)
        self.notes: list[str] = []
        self.longest = longest_row(model.config, tokenizer, longest)
        self.vocabulary = vocabulary_of(model, name="the language model")
        end_ids = self._end_ids()
        self.begin = self._begin(end_ids)
        self.ends = frozenset(token for token in end_ids if 0 <= token < self.vocabulary)
        if not self.ends:
            self.notes.append("the language model has no end token: every text has generate.max_tokens tokens")
        self.banned = self._banned()
        self._check_causal()
        slots = max(1, min(slots, memory // self._bytes_of_a_text()))
        self.slots: BatchedCache | SingleText = BatchedCache(self.model, slots, self.longest)
        if not self._agrees():
            self.slots = SingleText(self.model, slots)
            self.notes.append("the language model generates one text at a time: its cache cannot be shared")

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return [self.tokenizer.decode(list(row), **options) for row in rows]

    def begin_text(self, slot: int, given: Sequence[int]) -> None:
        """Assigns the slot to a new text; `given` is its prompt without the last token, which the first step reads."""
        with self._memory_for("one text"):
            self.slots.begin(slot, given)

    def step(self, at: Sequence[int], rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Returns logits [texts, vocabulary] of the token after each row; `at` has the slot of each row."""
        with self._memory_for(f"{len(rows)} texts"):
            return self.slots.step(at, rows).float()

    @contextmanager
    def _memory_for(self, texts: str) -> Iterator[None]:
        try:
            with torch.inference_mode():
                yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise WorkError(
                f"the language model is out of memory with {texts} of up to {self.longest} tokens",
                where=LANGUAGE_MODEL,
                fix="lower generate.max_tokens, set execution.device=cpu or use a smaller model",
            ) from error

    def alone(self, row: Sequence[int]) -> torch.Tensor:
        """Returns logits [tokens, vocabulary] after each token of a batch of one: bit-exact, a function of the row."""
        return self._logits([row])[0]

    def _logits(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Returns logits [texts, tokens, vocabulary] of rows of one length, without a cache."""
        with torch.inference_mode():
            ids = torch.tensor([list(row) for row in rows], device=self.device)
            return self.model(input_ids=ids, use_cache=False).logits.float()

    def _end_ids(self) -> list[int]:
        config, generation = self.model.config, getattr(self.model, "generation_config", None)
        given = (self.tokenizer.eos_token_id, config.eos_token_id, getattr(generation, "eos_token_id", None))
        return [token for ids in given if ids is not None for token in (ids if isinstance(ids, list) else [ids])]

    def _begin(self, end_ids: Sequence[int]) -> list[int]:
        """Returns the tokens before a text that has no prompt."""
        for special in (self.tokenizer.bos_token_id, self.model.config.bos_token_id, *end_ids):
            if isinstance(special, int) and 0 <= special < self.vocabulary:
                return [special]
        for text in BEGINNINGS:
            ids = self.encode(text)
            if ids:
                self.notes.append(f"the language model has no start token: texts start with {text!r}")
                return ids[:1]
        raise ModelError(
            "the language model has no start token, and its tokenizer has no token for the usual first words",
            where=LANGUAGE_MODEL,
            fix="set a bos_token in its tokenizer and save the model again",
        )

    def _banned(self) -> torch.Tensor:
        """Returns a mask of special tokens, except the end tokens, and of vocabulary rows without a token."""
        banned = torch.ones(self.vocabulary, dtype=torch.bool)
        banned[[token for token in self.tokenizer.get_vocab().values() if token < self.vocabulary]] = False
        named = {number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        special = [token for token in {*named, *self.tokenizer.all_special_ids} if token < self.vocabulary]
        banned[special] = True  # includes special tokens without a role, such as <repo_name>
        banned[sorted(self.ends)] = False
        return banned.to(self.device)

    def _check_causal(self) -> None:
        """Refuses a model whose logits depend on later tokens: encoders load as causal models without a warning."""
        first, second = self._logits([[token % self.vocabulary for token in pair] for pair in ((1, 2), (1, 3))])[:, 0]
        if not close_enough(first[:, None], second[:, None], torch.float32):
            raise ModelError(
                "the model is no causal language model: its logits depend on later tokens",
                where=LANGUAGE_MODEL,
                fix="set generate.language_model to a causal language model, such as GPT-2",
            )

    def _bytes_of_a_text(self) -> int:
        """Measures a text's bytes in the cache with one token; returns 1 if the cache cannot be shared."""
        try:
            with torch.inference_mode():
                ids = torch.tensor([self.begin], device=self.device)
                layers = self.model(input_ids=ids, use_cache=True).past_key_values.layers
            token: int = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
            return max(1, token * self.longest)
        except UNSHARED:
            return 1

    def _agrees(self) -> bool:
        """Compares two rows in shared slots with the model's plain forward pass; sliding windows are unsupported."""
        windows = [getattr(self.model.config, name, None) for name in WINDOWS]
        if any(isinstance(window, int) and window < self.longest for window in windows):
            return False
        count = min(PROBE, self.longest)
        rows = [[(7 * i + 3 * row + 1) % self.vocabulary for i in range(count)] for row in range(2)]
        at = [0, self.slots.count - 1][: self.slots.count]
        given = count // 2
        try:
            for slot, row in zip(at, rows, strict=False):
                self.begin_text(slot, row[:given])
            for position in range(given, count):
                logits = self.step(at, [row[: position + 1] for row in rows[: len(at)]])
            expected = self._logits(rows)[:, -1]
            return close_enough(logits.T, expected[: len(logits)].T, torch.float32)
        except UNSHARED as error:
            if is_out_of_memory(error):
                raise
            return False


class BatchedCache:
    """A cache of `count` texts. Unused slots below the last used one are computed and ignored."""

    def __init__(self, model: Any, count: int, length: int) -> None:
        self.model, self.count, self.length = model, count, length
        self.positions = torch.zeros(0, dtype=torch.long, device=model.device)
        """Position of each slot's token in the current step."""
        self.reach = 0
        """Length of the longest text; attention is limited to it."""
        self.cache = Cache(layer_class_to_replicate=partial(SlotLayer, self))
        self.read = lru_cache(PROMPTS)(self._read)

    def begin(self, slot: int, given: Sequence[int]) -> None:
        if given:
            for number, (keys, values) in enumerate(self.read(tuple(given))):
                while len(self.cache.layers) <= number:
                    self.cache.layers.append(SlotLayer(self))
                self.cache.layers[number].write_prompt(slot, keys, values)

    def _read(self, given: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns each layer's keys and values of a prompt; one pass serves all texts with this prompt."""
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
        return logits[list(at)]


class SlotLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's cache with room for the longest text; each slot writes at its own position."""

    def __init__(self, slots: BatchedCache, **options: Any) -> None:
        super().__init__(**options)
        self.slots = slots
        self.is_initialized: bool = False

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        self._allocate(key_states, value_states)
        positions, reach = self.slots.positions, self.slots.reach
        rows = torch.arange(len(positions), device=self.device)
        self.keys[rows, :, positions] = key_states[:, :, 0]
        self.values[rows, :, positions] = value_states[:, :, 0]
        return self.keys[: len(rows), :, :reach], self.values[: len(rows), :, :reach]

    def write_prompt(self, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the keys and values [1, heads, tokens, width] of one text's prompt."""
        self._allocate(keys, values)
        self.keys[slot, :, : keys.shape[2]] = keys[0]
        self.values[slot, :, : values.shape[2]] = values[0]

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not self.is_initialized:
            self.dtype, self.device = keys.dtype, keys.device
            self.keys, self.values = (
                like.new_zeros((self.slots.count, like.shape[1], self.slots.length, like.shape[3]))
                for like in (keys, values)
            )
            self.is_initialized = True

    def get_seq_length(self, *_: Any) -> int:
        return 0


@dataclass(eq=False)
class SingleText:
    """Gives each text its own cache, or none if the model returns no cache."""

    model: Any
    count: int
    caches: dict[int, Any] = field(default_factory=dict)

    def begin(self, slot: int, given: Sequence[int]) -> None:  # noqa: ARG002  the first step reads them
        self.caches.pop(slot, None)

    def step(self, at: Sequence[int], rows: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.cat([self._logits(slot, row) for slot, row in zip(at, rows, strict=True)])

    def _logits(self, slot: int, row: Sequence[int]) -> torch.Tensor:
        past = self.caches.get(slot)
        ids = torch.tensor([row if past is None else row[-1:]], device=self.model.device)
        output = self.model(input_ids=ids, past_key_values=past, use_cache=True)
        self.caches[slot] = getattr(output, "past_key_values", None)
        return output.logits[:, -1]
