"""A teacher at inference: texts to token ids, rows of ids to logits, dropout off or keyed.

Nothing here trusts a tokenizer's own length limit or pad token. What cannot serve is refused before the work starts.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amalgam.data.tokens import TokenRows, Tokens, encode
from amalgam.pipeline.errors import DataError, ModelError
from amalgam.stages.cache_teachers.dropout import KeyedDropout, Recorder, Site, sites_of, unkeyed
from amalgam.stages.cache_teachers.lean_encoder import LeanEncoder, lean_encoder
from amalgam.stages.cache_teachers.masks import Bank, row_words, site_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

DROPOUT_OFF = -1
# Two probes tell rows, tokens and fixed axes apart: no two of these numbers, nor their products, share a ratio.
PROBE_ROWS = (3, 5)
PROBE_TOKENS = (7, 11)
LONGEST_PROBE = 1024
ALIKE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
PROBE_TEXT = "one two three four five six seven eight nine ten "
NO_DROPOUT_FIX = "set dropout: 0.1 for this teacher, or cache.passes: 0 (uncertainty from the dropout-off pass alone)"


@dataclass(frozen=True, slots=True)
class Rows:
    """What goes through a teacher at once: each row a (text, pass). All passes are DROPOUT_OFF, or none is."""

    tokens: Sequence[Tokens]
    keys: Sequence[bytes]
    passes: NDArray[np.int64]
    width: int = 0
    """Pad to at least so many tokens."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """Logits on their way to the host, and what says that they have arrived; nothing on a device that is the host."""

    logits: torch.Tensor
    arrival: torch.cuda.Event | None

    def wait(self) -> torch.Tensor:
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.logits


def under_way(logits: torch.Tensor) -> UnderWay:
    """The copy is queued behind its own launch: waiting for it does not wait for launches started since."""
    if logits.device.type != "cuda":
        return UnderWay(logits.cpu(), None)
    host = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
    host.copy_(logits, non_blocking=True)
    arrival: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrival.record()
    return UnderWay(host, arrival)


def apply_rate(config: Any, rate: float) -> tuple[str, ...]:
    """Sets every dropout rate of a model's config, and of the configs inside it. Returns the names it set.

    To be called before the model is built: some build nothing at all where the rate is zero.
    """
    changed: list[str] = []
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            changed += [f"{name}.{inner}" for inner in apply_rate(value, rate)]
        elif _is_rate(name, value):
            setattr(config, name, rate)
            changed.append(name)
    return tuple(changed)


def _is_rate(name: str, value: Any) -> bool:
    number = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    return number and ("dropout" in name or name.endswith("pdrop"))


class Teacher:
    """A loaded sequence classifier and its tokenizer. `digest` and `seed` key the dropout; `name` is for messages."""

    def __init__(  # noqa: PLR0913  a teacher is all of these, by name
        self,
        model: Any,
        tokenizer: Any,
        *,
        digest: str,
        seed: int,
        limit: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        name: str = "teacher",
    ) -> None:
        self.model = model.to(device=device, dtype=dtype).eval()
        self.tokenizer = tokenizer
        self.digest = digest
        self.seed = seed
        self.limit = limit
        self.device = torch.device(device)
        self.dtype: torch.dtype = self.model.dtype
        self.labels: int = model.config.num_labels
        self.name = name
        self.ahead = 1 if self.device.type == "cuda" else 0
        """Launches that are started before the answer of an earlier one is looked at."""
        self.padding = 1 / 16 if self.device.type == "cuda" else 0.0
        """Most that a text is padded to share a launch: small launches cost a GPU more than padding, a CPU less."""
        self.halved = 0
        """Launches of the latest work that had to be halved for lack of memory."""
        self.notes: tuple[str, ...] = ()
        self.width = int(getattr(model.config.get_text_config(), "hidden_size", 768))
        self._vocabulary: int = model.get_input_embeddings().weight.shape[0]
        self.takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
        self._pad = self._choose_pad()
        self._bank = Bank(seed, device=self.device, dtype=self.dtype)
        self._sites: tuple[Site, ...] | None = None
        self._lean: tuple[LeanEncoder | None] | None = None

    def _choose_pad(self) -> int:
        """The config's pad id comes first: models read positions and the last token by it."""
        config = self.model.config.get_text_config()
        candidates = {"config": config.pad_token_id, "tokenizer": self.tokenizer.pad_token_id}
        eos = config.eos_token_id if isinstance(config.eos_token_id, int) else self.tokenizer.eos_token_id
        for pad in candidates.values():
            if pad is not None and 0 <= pad < self._vocabulary:
                config.pad_token_id = pad
                return int(pad)
        pad = eos if eos is not None and 0 <= eos < self._vocabulary else 0
        token = self.tokenizer.convert_ids_to_tokens(pad)
        self.notes += (f"teacher {self.name} has no pad token: {token!r} (id {pad}) is used instead",)
        config.pad_token_id = pad
        return int(pad)

    def tokenise(self, texts: Sequence[tuple[str, ...]]) -> list[Tokens]:
        """Token ids, special tokens included, cut to the limit (the longer text of a pair first)."""
        tokens = encode(self.tokenizer, texts, self.limit, types=self.takes_types)
        self.check(tokens, lambda row: texts[row][0])
        return list(tokens)

    def check(self, tokens: TokenRows, text_of: Callable[[int], str]) -> None:
        """Refuses what this teacher cannot read; `text_of` gives the text of a row, for the message."""
        empty = np.flatnonzero(tokens.lengths == 0)
        if len(empty):
            raise DataError(
                f"teacher {self.name}: its tokenizer finds no token in a text",
                where=f"text {text_of(int(empty[0]))[:40]!a}",
                fix="leave the text out (corpus.on_bad_row: skip leaves out empty ones)",
            )
        self.check_vocabulary(int(tokens.ids.values.max(initial=0)))

    def check_vocabulary(self, highest: int) -> None:
        if highest >= self._vocabulary:
            token = self.tokenizer.convert_ids_to_tokens(highest)
            raise ModelError(
                f"teacher {self.name}: its tokenizer gives {token!r} the id {highest}, "
                f"but the model knows {self._vocabulary} tokens (ids 0 to {self._vocabulary - 1})",
                fix="use the tokenizer the model was trained with, or save the model with resized embeddings",
            )

    def run(self, rows: Rows) -> torch.Tensor:
        """Logits [rows, labels], float32, on the CPU."""
        return self.start(rows).wait()

    def start(self, rows: Rows) -> UnderWay:
        """As `run`, but on a GPU the host goes on while the device computes."""
        inputs = self.inputs(rows)
        off = int(rows.passes[0]) == DROPOUT_OFF
        with torch.inference_mode():
            logits = self._plain(inputs, self.lean) if off else self._dropped(rows, inputs, self.sites, self.lean)
            return under_way(logits.float())

    def _plain(self, inputs: dict[str, torch.Tensor], lean: LeanEncoder | None) -> torch.Tensor:
        self._switch(training=False)
        with lean.instead(None) if lean else nullcontext():
            return self.model(**inputs).logits  # type: ignore[no-any-return]

    def _dropped(
        self, rows: Rows, inputs: dict[str, torch.Tensor], sites: tuple[Site, ...], lean: LeanEncoder | None = None
    ) -> torch.Tensor:
        mode = KeyedDropout(self._bank, sites, self._words(rows, sites))
        self._switch(training=True)
        with mode, lean.instead(mode) if lean else nullcontext():
            logits = self.model(**inputs).logits
        mode.finish()
        return logits  # type: ignore[no-any-return]

    @property
    def lean(self) -> LeanEncoder | None:
        """A faster way through this model's encoder, if there is one that gives the model's own numbers."""
        if self._lean is None:
            self._lean = (self._find_lean(),)
        return self._lean[0]

    def _find_lean(self) -> LeanEncoder | None:
        """Tried on texts of two lengths, padded and not, dropout off and keyed: numbers decide, not names."""
        for first_token in (True, False):
            lean = lean_encoder(self.model, first_token=first_token)
            if lean is None:
                return None
            try:
                agrees = self._agrees(lean)
            except torch.OutOfMemoryError:
                raise
            except (IndexError, RuntimeError, TypeError):  # another model's layers under the same names
                continue
            lean.buffers.drop()
            if agrees:
                return lean
        return None

    def _agrees(self, lean: LeanEncoder) -> bool:
        lengths = (min(self.limit, PROBE_TOKENS[0]), min(self.limit, PROBE_TOKENS[1]))
        random = np.random.default_rng(0)
        for width in (0, lengths[1]):
            tokens = [self._random_tokens(random, lengths[0] if not width or i % 2 else width) for i in range(8)]
            rows = Rows(tokens, [bytes([i + 1]) * 16 for i in range(8)], np.arange(8), width)
            inputs = self.inputs(rows)
            with torch.inference_mode():
                ways = [self._plain(inputs, None), self._plain(inputs, lean)]
                if self._can_be_keyed():
                    ways += [self._dropped(rows, inputs, self.sites), self._dropped(rows, inputs, self.sites, lean)]
            if not all(alike(a.float(), b.float(), self.dtype) for a, b in zip(ways[::2], ways[1::2], strict=True)):
                return False
        return True

    def _can_be_keyed(self) -> bool:
        """A model whose dropout cannot be keyed may still answer with dropout off."""
        try:
            return bool(self.sites)
        except ModelError:
            return False

    def _random_tokens(self, random: np.random.Generator, length: int) -> Tokens:
        ids = random.integers(0, self._vocabulary, length, dtype=np.int32)
        ids[ids == self._pad] = (self._pad + 1) % self._vocabulary
        [like] = self._probe_tokens([length])
        ids[[0, -1]] = like.ids[[0, -1]]
        return Tokens(ids, like.type_ids, cut=False)

    def _words(self, rows: Rows, sites: tuple[Site, ...]) -> torch.Tensor:
        words = site_words(row_words(self.seed, self.digest, rows.keys, rows.passes), len(sites))
        shared = np.array([site.kind == "shared" for site in sites], bool)
        if shared.any():
            if len(set(rows.passes.tolist())) > 1:
                raise ValueError("a teacher with shared dropout sites takes one pass at a time")
            of_no_text = site_words(row_words(self.seed, self.digest, [bytes(16)], rows.passes[:1]), len(sites))
            words = np.where(shared[:, None], of_no_text, words)
        return torch.from_numpy(words.view(np.int64)).to(self.device)

    def inputs(self, rows: Rows) -> dict[str, torch.Tensor]:
        """Exact-length rows need no attention mask; others are padded on the right."""
        lengths = np.array([len(one) for one in rows.tokens])
        shape = len(lengths), max(int(lengths.max()), rows.width)
        ids, types = np.full(shape, self._pad, np.int64), np.zeros(shape, np.int64)
        for row, one in enumerate(rows.tokens):
            ids[row, : len(one)] = one.ids
            if one.type_ids is not None:
                types[row, : len(one)] = one.type_ids
        arrays = {"input_ids": ids}
        if rows.tokens[0].type_ids is not None:
            arrays["token_type_ids"] = types
        if (lengths < shape[1]).any():
            arrays["attention_mask"] = (np.arange(shape[1]) < lengths[:, None]).astype(np.int64)
        return {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}

    def _switch(self, *, training: bool) -> None:
        """train() with whatever keeps running statistics left in eval(): those would learn from the texts."""
        if self.model.training == training:
            return
        self.model.train(training)
        for module in self.model.modules():
            if getattr(module, "running_mean", None) is not None:
                module.eval()

    @property
    def folds(self) -> bool:
        """Several passes may share a launch: no site is shared by all its rows."""
        return all(site.kind != "shared" for site in self.sites)

    @property
    def sites(self) -> tuple[Site, ...]:
        if self._sites is None:
            sites = self._find_sites()
            self._rehearse(sites)
            self._sites = sites
        return self._sites

    def describe_sites(self) -> tuple[str, ...]:
        """The active dropout sites, named by the module that calls them."""
        return tuple(f"{site.name} ({site.kind}, rate {site.rate:g})" for site in self.sites)

    def check_dropout_is_alive(self) -> None:
        """Passes that do not differ look like certainty: refuse them."""
        if not self.sites:
            raise ModelError(
                f"teacher {self.name} has no active dropout: its passes are all the same", fix=NO_DROPOUT_FIX
            )
        [tokens] = self._probe_tokens([min(self.limit, PROBE_TOKENS[1])])
        logits = [self.run(Rows([tokens], [b"check" + bytes(11)], np.array([i]))) for i in range(4)]
        if all(torch.equal(one, logits[0]) for one in logits[1:]):
            raise ModelError(
                f"teacher {self.name}: dropout changes nothing, its passes are all the same",
                where=f"active dropout sites: {', '.join(self.describe_sites())}",
                fix=NO_DROPOUT_FIX,
            )

    def _probe_tokens(self, lengths: Sequence[int]) -> list[Tokens]:
        tokens = []
        for length in lengths:
            probe = [(PROBE_TEXT * (length // 10 + 1),)]
            [one] = encode(self.tokenizer, probe, length, types=self.takes_types)
            if len(one) != length:
                raise ModelError(f"teacher {self.name}: its tokenizer cannot make a text of {length} tokens")
            tokens.append(one)
        self.check_vocabulary(max((int(one.ids.max()) for one in tokens), default=0))
        return tokens

    def _find_sites(self) -> tuple[Site, ...]:
        low, high = PROBE_TOKENS if self.limit >= PROBE_TOKENS[1] else (self.limit - 1, self.limit)
        calls = []
        for rows, length in zip(PROBE_ROWS, (low, high), strict=True):
            tokens = self._probe_tokens([length] * (rows - 1) + [length - 1])
            calls.append(self._recorded(self.inputs(Rows(tokens, [], np.zeros(rows, np.int64)))))
        return sites_of(calls, rows=PROBE_ROWS, tokens=(low, high))

    def _recorded(self, inputs: dict[str, torch.Tensor]) -> list[Any]:
        stack: list[str] = []
        recorder = Recorder(inside=lambda: stack[-1] if stack else "model")
        hooks = list(self._watch(stack))
        before = self._generators()
        self._switch(training=True)
        try:
            with torch.inference_mode(), recorder:
                self.model(**inputs)
        finally:
            for hook in hooks:
                hook.remove()
        if any(not torch.equal(a, b) for a, b in zip(before, self._generators(), strict=True)):
            raise unkeyed("a library function draws them inside")
        return recorder.calls

    def _watch(self, stack: list[str]) -> Iterator[Any]:
        """Keeps the name of the running module on the stack."""
        for name, module in self.model.named_modules():

            def enter(_module: Any, _args: Any, name: str = name) -> None:
                stack.append(name or "model")

            def leave(_module: Any, _args: Any, _output: Any) -> None:
                stack.pop()

            yield module.register_forward_pre_hook(enter)
            yield module.register_forward_hook(leave)

    def _generators(self) -> list[torch.Tensor]:
        on_cuda = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *on_cuda]

    def _rehearse(self, sites: tuple[Site, ...]) -> None:
        """One keyed row as long as they get: its sites must be those of the probes."""
        length = min(self.limit, LONGEST_PROBE)
        rows = Rows(self._probe_tokens([length]), [bytes(16)], np.zeros(1, np.int64))
        try:
            with torch.inference_mode():
                self._dropped(rows, self.inputs(rows), sites)
        except (IndexError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            what = f"teacher {self.name} cannot read {length} tokens: {str(error).splitlines()[0]}"
            raise ModelError(what, fix="set a lower max_tokens for this teacher") from error


def alike(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> bool:
    """Equal up to rounding, which is measured against how much logits differ between texts."""
    spread = float(theirs.std(0).max())
    return float((ours - theirs).abs().max()) <= ALIKE[dtype] * spread
