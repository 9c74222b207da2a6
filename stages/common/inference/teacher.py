"""A teacher at inference: texts to token ids, rows of ids to logits, dropout off or keyed.

Nothing here trusts a tokenizer's own length limit or pad token. What cannot serve is refused before the work starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from amalgam.data.tokens import Ragged, TokenRows, Tokens, encode
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import DataError, ModelError, first_line
from amalgam.pipeline.execution.faults import is_out_of_memory
from amalgam.stages.common.device import PendingTransfer, pick_device, put_on, start_transfer, to_device, tokens_at_once
from amalgam.stages.common.inference import dropout
from amalgam.stages.common.inference.compared_kernels import ComparedKernels, find_kernels
from amalgam.stages.common.inference.fast_encoder import (
    HALF,
    FastEncoder,
    LayerInputs,
    close_enough,
    describe_fast_encoder,
    mean_over_tokens,
)
from amalgam.stages.common.inference.modern_encoder import describe_modern_encoder
from amalgam.stages.common.models import loading
from amalgam.stages.common.models.model_folder import states_body
from amalgam.stages.common.models.resolve import ResolvedTeacher

DROPOUT_OFF = -1

# Two probes distinguish rows, tokens and fixed axes: no two of these numbers, nor their products, share a ratio.
PROBE_ROWS = (3, 5)
PROBE_TOKENS = (7, 11)

LONGEST_PROBE = 1024
TRIAL_ROWS = 8

WORDS = "words"

Inputs: TypeAlias = Mapping[str, torch.Tensor]

PROBE_TEXT = "one two three four five six seven eight nine ten "

NO_DROPOUT_FIX = "set dropout: 0.1 for this teacher, or cache.passes: 0 (uncertainty from the dropout-off pass alone)"
ALL_LAYERS_FIX = "set cache.dropout: null (dropout in every layer), or cache.passes: 0 (no passes)"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that go through a teacher at once: each a (text, pass). All passes are DROPOUT_OFF, or none is."""

    tokens: Sequence[Tokens]
    keys: Sequence[bytes]
    passes: NDArray[np.int64]
    width: int = 0
    """Pad to at least so many tokens."""


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
        last_layer: bool = False,
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
        self.last_layer = last_layer
        """Whether passes drop units in the last layer and the head alone."""
        self.prefetch = 1 if self.device.type == "cuda" else 0
        """Launches that start before the logits of an earlier one are read."""
        self.oom_splits = 0
        """Launches of the latest call that were halved for lack of memory."""
        self.has_predicted = False
        """Whether the logits of some text were numbers."""
        self.notes: tuple[str, ...] = ()
        self.width = int(getattr(model.config.get_text_config(), "hidden_size", 768))
        self._vocabulary = loading.vocabulary_of(model, name=f"teacher {name}")
        self.takes_types = loading.takes_types(model)
        self._pad = self._choose_pad()
        self._bank = dropout.Bank(seed, device=self.device, dtype=self.dtype)
        self.kernels = find_kernels() if self.device.type == "cuda" and self.dtype in HALF else None
        """Kernels that were not yet compared with the model's own steps."""

    @cached_property
    def padding(self) -> float:
        """Most that a text is padded to share a launch: small launches cost a GPU more than padding, a CPU less."""
        return 1 / 16 if self.device.type == "cuda" and self.ignores_padding else 0.0

    @property
    def ignores_padding(self) -> bool:
        """Whether padding changes no logits; it does where a head reads the last place, or a layer has no mask."""
        try:
            rows = next(self.trials())
            with torch.inference_mode():
                plain, padded = (
                    self.forward(self.inputs(replace(rows, width=width)), None) for width in (0, PROBE_TOKENS[1])
                )
        except (ModelError, IndexError, RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            return False  # it does not read random tokens
        return close_enough(padded.float(), plain.float(), self.dtype)

    def _choose_pad(self) -> int:
        pad, is_given = loading.choose_pad(self.model, self.tokenizer, name=f"teacher {self.name}")
        if not is_given:
            token = self.tokenizer.convert_ids_to_tokens(pad)
            self.notes += (f"teacher {self.name} has no pad token: {token!r} (id {pad}) is used instead",)
        return pad

    def tokenise(self, texts: Sequence[tuple[str, ...]]) -> list[Tokens]:
        """Token ids, special tokens included, truncated to the limit (the longer text of a pair first)."""
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
        loading.check_token_id(highest, self._vocabulary, self.tokenizer, f"teacher {self.name}")

    def run(self, rows: Rows) -> torch.Tensor:
        """Logits [rows, labels], float32, on the CPU."""
        return self.start(rows).wait()

    def start(self, rows: Rows, *, pooled: bool = False) -> PendingTransfer:
        """Starts `run`; on a GPU the host continues while the device computes.

        With a fast encoder, `pooled` adds the means of the last layer's states: [rows, labels + width]; dropout is off.
        """
        with torch.inference_mode():
            self._adopt_kernels()
            if pooled and self.fast_encoder:
                return start_transfer(self._logits_and_states(self.inputs(rows), self.fast_encoder))
            if int(rows.passes[0]) == DROPOUT_OFF:
                logits = self.forward(self.inputs(rows), self.fast_encoder)
            else:
                logits = self.forward_with_dropout(self.inputs(rows, self.sites), self.sites, self.fast_encoder)
            return start_transfer(logits.float())

    def states(self, rows: Rows) -> tuple[torch.Tensor, ...]:
        """[rows, tokens, width] after each layer, dropout off; that of the embedding is left out."""
        self._switch(training=False)
        inputs = self.inputs(rows)
        with torch.inference_mode():
            states = getattr(states_body(self.model)(**inputs, output_hidden_states=True), "hidden_states", None)
        shape = inputs["input_ids"].shape
        if not states or len(states) < 2 or any(layer.shape[:2] != shape for layer in states):
            what = f"teacher {self.name} does not give a state of each token after each layer"
            raise ModelError(what, fix="leave it out, or choose a method that needs no states: `amalgam methods`")
        return tuple(states[1:])

    def start_last_layer(self, rows: Rows, passes: range) -> PendingTransfer:
        """Starts a run without dropout, and passes of the last layer and the head on its states.

        Each text has 1 + len(passes) rows of logits.
        """
        with torch.inference_mode():
            self._adopt_kernels()
            logits = self._last_layer_logits(rows, passes, self.early_sites)
            return start_transfer(logits.flatten(0, 1).float())

    def _last_layer_logits(self, rows: Rows, passes: range, early: int) -> torch.Tensor:
        encoder, kept, inputs = self.fast_encoder, list[LayerInputs](), self.inputs(rows)
        if encoder is None:
            raise AssertionError(self.name)  # early_sites refuses it
        self._switch(training=False)
        with encoder.patched(None, kept):
            logits = [self._logits(inputs, encoder)[:, None]]
        at_once = 1
        if encoder.first_token:  # so many passes take the memory of one pass over all tokens
            at_once = inputs["input_ids"].shape[1]
            inputs = {name: tensor[:, :1] for name, tensor in inputs.items() if name != "attention_mask"}
        self._switch(training=True)
        for start in range(passes.start, passes.stop, at_once):
            part = np.arange(start, min(start + at_once, passes.stop))
            keys = [key for key in rows.keys for _ in part]
            words = self._words(Rows([], keys, np.tile(part, len(rows.keys))), self.sites)
            mode = dropout.KeyedDropout(self._bank, self.sites, words, early)
            named = {name: tensor.repeat_interleave(len(part), 0) for name, tensor in inputs.items()}
            with mode, encoder.last_layer(mode, kept[0], len(part)):
                logits.append(self._logits(named, encoder).view(-1, len(part), self.labels))
            mode.finish()
        return torch.cat(logits, 1)

    @cached_property
    def early_sites(self) -> int:
        """Returns the number of dropout sites before the last layer; refuses a model without such a layer."""
        encoder = self.fast_encoder
        if encoder is not None:
            early = self._count_early_sites(encoder.last_block)
            if self.sites and _last_layer_agrees(self, early):
                return early
        raise ModelError(
            f"teacher {self.name}: the last layer of its architecture ({self.model.config.model_type}) "
            "cannot run alone",
            fix=f"{ALL_LAYERS_FIX}, or leave this teacher out",
        )

    def _count_early_sites(self, last_block: torch.nn.Module) -> int:
        recorder, counts = dropout.Recorder(inside=str), list[int]()
        inputs = self.inputs(Rows([self._probe(min(self.limit, PROBE_TOKENS[0]))], [], np.zeros(1, int)))
        self._switch(training=True)
        entering = last_block.register_forward_pre_hook(lambda *_: counts.append(len(recorder.calls)))
        with entering, torch.inference_mode(), recorder:
            self.model(**inputs)
        return counts[0]

    def _adopt_kernels(self) -> None:
        """From here on layers run in the kernels of this device, if they give the numbers of separate steps."""
        kernels, self.kernels = self.kernels, None
        if kernels is None:
            return
        try:
            if _kernels_agree(self, kernels):
                self.use_kernels(kernels)
                return
            why = "their numbers are not the model's"
        except torch.OutOfMemoryError:
            why = "memory does not suffice"
        except Exception as error:  # noqa: BLE001  a compiler may fail in any way, and none is worth a run
            why = first_line(error)
        finally:
            if self.fast_encoder is not None:
                self.fast_encoder.buffers.drop()  # they are larger without kernels
        self.notes += (f"teacher {self.name}: its layers run in separate, slower steps: {why}",)

    def use_kernels(self, kernels: dropout.Kernels | None) -> None:
        """Runs layers and their dropout in these kernels; None: in separate steps."""
        self._bank.kernels = kernels
        if self.fast_encoder is not None:
            self.fast_encoder.kernels = kernels

    def forward(self, inputs: Inputs, encoder: FastEncoder | None) -> torch.Tensor:
        self._switch(training=False)
        with encoder.patched(None) if encoder else nullcontext():
            return self._logits(inputs, encoder)

    def _logits_and_states(self, inputs: Inputs, encoder: FastEncoder) -> torch.Tensor:
        states = list[torch.Tensor]()
        self._switch(training=False)
        with encoder.patched(None, states=states):
            logits = self._logits(inputs, encoder)
        return torch.cat([logits.float(), mean_over_tokens(states[0].float(), inputs.get("attention_mask"))], 1)

    def forward_with_dropout(
        self, inputs: Inputs, sites: tuple[dropout.Site, ...], encoder: FastEncoder | None = None, early: int = 0
    ) -> torch.Tensor:
        """Returns the logits of one launch; its first `early` sites drop nothing, without an encoder."""
        mode = dropout.KeyedDropout(self._bank, sites, inputs[WORDS], early)
        self._switch(training=True)
        with mode, encoder.patched(mode) if encoder else nullcontext():
            logits = self._logits(inputs, encoder)
        mode.finish()
        return logits

    def _logits(self, inputs: Inputs, encoder: FastEncoder | None) -> torch.Tensor:
        named = {name: tensor for name, tensor in inputs.items() if name != WORDS}
        if encoder and "attention_mask" in named:
            named["attention_mask"] = encoder.mask_input(named["attention_mask"])
        return self.model(**named).logits

    @cached_property
    def fast_encoder(self) -> FastEncoder | None:
        """Returns a faster form of this model's encoder, or None if none gives the model's own numbers."""
        return build_fast_encoder(self)

    def trials(self, lengths: tuple[int, int] = PROBE_TOKENS, number: int = TRIAL_ROWS) -> Iterator[Rows]:
        """Yields launches to compare two forms of a model by: random texts of two lengths, without and with padding."""
        low, high = (min(self.limit, length) for length in lengths)
        random = np.random.default_rng(0)
        for width in (0, high):
            tokens = []
            for row in range(number):
                probe = self._probe(low if not width or row % 2 else width)
                ids = random.integers(0, self._vocabulary, len(probe), dtype=np.int32)
                ids[ids == self._pad] = (self._pad + 1) % self._vocabulary
                ids[[0, -1]] = probe.ids[[0, -1]]
                tokens.append(Tokens(ids, probe.type_ids, truncated=False))
            yield Rows(tokens, [bytes([i + 1]) * 16 for i in range(number)], np.arange(number), width)

    def _words(self, rows: Rows, sites: tuple[dropout.Site, ...]) -> torch.Tensor:
        words = dropout.site_words(dropout.row_words(self.seed, self.digest, rows.keys, rows.passes), len(sites))
        shared = np.array([site.kind == "shared" for site in sites], bool)
        if shared.any():
            if len(set(rows.passes.tolist())) > 1:
                raise ValueError("a teacher with shared dropout sites takes one pass at a time")
            of_no_text = dropout.site_words(
                dropout.row_words(self.seed, self.digest, [bytes(16)], rows.passes[:1]), len(sites)
            )
            words = np.where(shared[:, None], of_no_text, words)
        return to_device(torch.from_numpy(words.view(np.int64)), self.device)

    def inputs(self, rows: Rows, sites: tuple[dropout.Site, ...] | None = None) -> dict[str, torch.Tensor]:
        """Returns the model's inputs, padded on the right, with an attention mask only where rows differ in length."""
        ids, mask = Ragged.of([tokens.ids for tokens in rows.tokens]).padded(self._pad, rows.width)
        arrays = {"input_ids": ids}
        if types := [tokens.type_ids for tokens in rows.tokens if tokens.type_ids is not None]:
            arrays["token_type_ids"], _ = Ragged.of(types).padded(0, rows.width)
        if not mask.all():
            arrays["attention_mask"] = mask.astype(np.int64)
        tensors = put_on(self.device, {name: torch.from_numpy(array) for name, array in arrays.items()})
        return tensors if sites is None else tensors | {WORDS: self._words(rows, sites)}

    def _switch(self, *, training: bool) -> None:
        """Switches to train(), except modules with running statistics, which would learn from the texts."""
        if self.model.training == training:
            return
        self.model.train(training)
        for module in self.model.modules():
            if getattr(module, "running_mean", None) is not None:
                module.eval()

    @property
    def can_batch_passes(self) -> bool:
        """Whether several passes may share a launch, because no site is shared by all rows."""
        return all(site.kind != "shared" for site in self.sites)

    @cached_property
    def sites(self) -> tuple[dropout.Site, ...]:
        """The dropout calls of a forward pass, in order."""
        low, high = PROBE_TOKENS if self.limit >= PROBE_TOKENS[1] else (self.limit - 1, self.limit)
        calls = []
        try:
            for rows, length in zip(PROBE_ROWS, (low, high), strict=True):
                tokens = [self._probe(size) for size in (*[length] * (rows - 1), length - 1)]
                calls.append(self._recorded(self.inputs(Rows(tokens, [], np.zeros(rows, np.int64)))))
            sites = dropout.sites_of(calls, rows=PROBE_ROWS, tokens=(low, high))
            self._rehearse(sites)
        except dropout.UnkeyedDropoutError as error:
            error.what = f"teacher {self.name}: {error.what}"
            raise
        return sites

    @cached_property
    def keyed_sites(self) -> tuple[dropout.Site, ...] | None:
        """The dropout calls of a forward pass, or None if they cannot be keyed, so that no pass can run."""
        try:
            return self.sites
        except dropout.UnkeyedDropoutError:
            return None

    def describe_sites(self) -> tuple[str, ...]:
        """The active dropout sites, named by the module that calls them."""
        return tuple(f"{site.name} ({site.kind}, rate {site.rate:g})" for site in self.sites)

    def check_dropout_active(self) -> None:
        """Passes that do not differ look like certainty: refuse them."""
        if not self.sites:
            raise ModelError(
                f"teacher {self.name} has no active dropout: its passes are all the same", fix=NO_DROPOUT_FIX
            )
        if not self.has_active_dropout:
            place = " in its last layer and head" if self.last_layer else ""
            raise ModelError(
                f"teacher {self.name}: dropout{place} changes nothing, its passes are all the same",
                where=f"active dropout sites: {', '.join(self.describe_sites())}",
                fix=ALL_LAYERS_FIX if self.last_layer else NO_DROPOUT_FIX,
            )

    @cached_property
    def has_active_dropout(self) -> bool:
        """Whether four passes of one text differ; False if none can run."""
        if not self.keyed_sites or (self.last_layer and self.early_sites == len(self.sites)):
            return False
        tokens, keys = [self._probe(min(self.limit, PROBE_TOKENS[1]))], [b"check" + bytes(11)]
        if self.last_layer:
            passes = self.start_last_layer(Rows(tokens, keys, np.array([DROPOUT_OFF])), range(4)).wait()[1:]
        else:
            passes = torch.cat([self.run(Rows(tokens, keys, np.array([i]))) for i in range(4)])
        return bool((passes != passes[0]).any())

    def _probe(self, length: int) -> Tokens:
        [tokens] = encode(self.tokenizer, [(PROBE_TEXT * (length // 10 + 1),)], length, types=self.takes_types)
        if not 0 < length == len(tokens):
            raise ModelError(
                f"teacher {self.name}: its tokenizer cannot make a text of {length} tokens",
                fix="set a larger max_tokens for this teacher, or use the tokenizer that the model was trained with",
            )
        self.check_vocabulary(int(tokens.ids.max()))
        return tokens

    def _recorded(self, inputs: dict[str, torch.Tensor]) -> list[dropout.Call]:
        names = {module: name for name, module in self.model.named_modules()}
        running: list[str] = []

        def leave(*_: Any) -> None:
            running.pop()

        entering = register_module_forward_pre_hook(lambda module, _: running.append(names.get(module) or "model"))
        recorder = dropout.Recorder(inside=lambda: running[-1])
        before = self._generators()
        self._switch(training=True)
        try:
            with entering, register_module_forward_hook(leave), torch.inference_mode(), recorder:
                self.model(**inputs)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            with torch.inference_mode():
                self.forward(inputs, None)  # raises if the model also fails without dropout
            what = f"this model fails with dropout: {first_line(error)}"
            raise dropout.UnkeyedDropoutError(what, fix=dropout.WITHOUT_DROPOUT) from error
        if any(not torch.equal(a, b) for a, b in zip(before, self._generators(), strict=True)):
            raise dropout.unsupported_dropout("a library function draws them inside")
        return recorder.calls

    def _generators(self) -> list[torch.Tensor]:
        on_cuda = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *on_cuda]

    def _rehearse(self, sites: tuple[dropout.Site, ...]) -> None:
        """One keyed row as long as they get: its sites must be those of the probes."""
        length = min(self.limit, LONGEST_PROBE)
        rows = Rows([self._probe(length)], [bytes(16)], np.zeros(1, np.int64))
        try:
            with torch.inference_mode():
                self.forward_with_dropout(self.inputs(rows, sites), sites)
        except (IndexError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            what = f"teacher {self.name} cannot read {length} tokens: {first_line(error)}"
            raise ModelError(what, fix="set a lower max_tokens for this teacher") from error


# ---- a faster encoder is used only if its numbers are the model's own: tried on texts of two lengths, padded and not


def build_fast_encoder(teacher: Teacher) -> FastEncoder | None:
    is_modern = getattr(teacher.model.config, "model_type", "") == "modernbert"
    describe = describe_modern_encoder if is_modern else describe_fast_encoder
    for first_token in (True, False):
        encoder: FastEncoder | None = describe(teacher.model, first_token=first_token)
        if encoder is None:
            return None
        try:
            agrees = _agrees(teacher, encoder)
        except (ModelError, IndexError, RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            continue  # another model under the same names
        encoder.buffers.drop()
        if agrees:
            return encoder
    return None


def _agrees(teacher: Teacher, encoder: FastEncoder) -> bool:
    longest = min(encoder.longest_trial, teacher.limit)
    for rows in chain(teacher.trials(), teacher.trials((longest // 2 + 1, longest)) if longest else ()):
        plain, fast = (_logits_with(teacher, rows, chosen) for chosen in (None, encoder))
        if not all(close_enough(ours, theirs, teacher.dtype) for ours, theirs in zip(fast, plain, strict=True)):
            return False
    return True


def _kernels_agree(teacher: Teacher, kernels: dropout.Kernels) -> bool:
    """Compares each kernel's results, on short texts and on the longest, and the logits of the short ones."""
    compared, encoder = ComparedKernels(kernels), teacher.fast_encoder
    with torch.inference_mode():
        try:
            for rows in teacher.trials():
                teacher.use_kernels(None)
                plain = _logits_with(teacher, rows, encoder)
                teacher.use_kernels(compared)
                fast = _logits_with(teacher, rows, encoder)
                if not all(close_enough(a, b, teacher.dtype) for a, b in zip(fast, plain, strict=True)):
                    return False
            longest = min(teacher.limit, LONGEST_PROBE)
            for rows in teacher.trials((longest // 2 + 1, longest), number=2):
                _logits_with(teacher, rows, encoder)
        finally:
            teacher.use_kernels(None)
    return compared.agree


def _logits_with(teacher: Teacher, rows: Rows, encoder: FastEncoder | None) -> list[torch.Tensor]:
    """Returns the logits without dropout, and those with it if it can be keyed."""
    try:
        sites = teacher.sites
    except ModelError:  # a model whose dropout cannot be keyed may still run with dropout off
        sites = ()
    with torch.inference_mode():
        logits = [teacher.forward(teacher.inputs(rows), encoder)]
        if sites:
            logits.append(teacher.forward_with_dropout(teacher.inputs(rows, sites), sites, encoder))
    return [tensor.float() for tensor in logits]


def _last_layer_agrees(teacher: Teacher, early: int) -> bool:
    """Compares passes of the last layer alone with the model's own layers, all of them run."""
    passes = range(2)
    for rows in teacher.trials():
        with torch.inference_mode():
            ours = teacher._last_layer_logits(rows, passes, early)  # noqa: SLF001  a part of the teacher
            theirs = [teacher.forward(teacher.inputs(rows), None)]
            for number in passes:
                inputs = teacher.inputs(replace(rows, passes=np.full(len(rows.keys), number)), teacher.sites)
                theirs.append(teacher.forward_with_dropout(inputs, teacher.sites, early=early))
        for column, logits in enumerate(theirs):
            if not close_enough(ours[:, column].float(), logits.float(), teacher.dtype):
                return False
    return True


@dataclass
class TeacherLoader:
    """Loads teachers and keeps the latest in memory: units come teacher by teacher."""

    seed: int
    device: str
    batch_tokens: int | None
    console: Console
    last_layer: bool
    _key: tuple[ResolvedTeacher, str] | None = None
    _teacher: Teacher | None = None
    _notes: set[str] = field(default_factory=set)

    def load(self, resolved: ResolvedTeacher, dtype: str, *, passes: int) -> Teacher:
        """Returns the teacher in memory or loads it; where passes are wanted, refuses one without active dropout."""
        if self._teacher is None or self._key != (resolved, dtype):
            self._teacher = None  # frees the memory before the next one is loaded
            self._teacher = self._load(resolved, dtype)
            self._key = resolved, dtype
            self.log_notes(self._teacher)
        if passes:
            self._teacher.check_dropout_active()
        return self._teacher

    def _load(self, resolved: ResolvedTeacher, dtype: str) -> Teacher:
        model = loading.load_classifier(resolved.files, dropout=resolved.dropout, dtype=dtype)
        tokenizer = loading.load_tokenizer(resolved.files)
        return Teacher(
            model,
            tokenizer,
            name=resolved.name,
            digest=resolved.files.digest,
            seed=self.seed,
            limit=loading.token_limit(model.config, tokenizer, resolved.max_tokens),
            device=pick_device(self.device),
            last_layer=self.last_layer,
        )

    def tokens_at_once(self, teacher: Teacher) -> int:
        return self.batch_tokens or tokens_at_once(teacher.device, teacher.width)

    def log_notes(self, teacher: Teacher) -> None:
        """Prints each note of the teacher once; inference may add notes."""
        for note in teacher.notes:
            self.note_once(note)

    def note_once(self, text: str) -> None:
        """Prints a note, which a later round of units has too."""
        if text not in self._notes:
            self.console.note(text)
            self._notes.add(text)
