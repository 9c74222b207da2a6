"""Plans launches of (text, pass) rows and runs them; predicts in batches without passes.

A launch that does not fit into memory is halved. Texts of one token length share a launch, with their passes in one
batch, so that no padding is computed. On a GPU, texts of similar length fill up a launch. Masks are keyed, so the
grouping of rows changes results only by rounding.
"""

from __future__ import annotations

import gc
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from amalgam.data.arrays import RowNumbers, unknown_score
from amalgam.data.keys import shown_names
from amalgam.data.tokens import Ids, Ragged, TokenRows, Tokens, by_count, encode
from amalgam.pipeline.errors import ModelError, WorkError
from amalgam.pipeline.execution.faults import is_out_of_memory
from amalgam.stages.common.device import PendingTransfer, pick_device, put_on, tokens_at_once
from amalgam.stages.common.inference.fast_encoder import mean_over_tokens
from amalgam.stages.common.inference.teacher import DROPOUT_OFF, Rows, Teacher
from amalgam.stages.common.models.loading import choose_pad, load_classifier, load_tokenizer, not_finite, token_limit
from amalgam.stages.common.models.model_folder import UNKNOWN, end_token, reads_padding
from amalgam.stages.common.models.resolve import ModelFiles, has_two_types
from amalgam.stages.common.models.unknown import UnknownStates, read_unknown

KEYS_SHOWN = 5

LARGEST = float(np.finfo(np.float16).max)

BATCH_TOKENS = 8192
"""Limit of a batch without dropout passes."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Row i is text `texts[i]` in pass `passes[i]`; all passes are DROPOUT_OFF, or none is."""

    texts: NDArray[np.int64]
    passes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.texts)

    def with_passes(self, passes: range) -> Launch:
        """Returns the rows of each text: without dropout, and in these passes."""
        of_text = np.array([DROPOUT_OFF, *passes])
        return Launch(np.repeat(self.texts, len(of_text)), np.tile(of_text, len(self)))

    def halves(self) -> tuple[Launch, Launch]:
        first, second = np.split(np.arange(len(self)), [(len(self) + 1) // 2])
        return self.take(first), self.take(second)

    def take(self, rows: RowNumbers) -> Launch:
        return Launch(self.texts[rows], self.passes[rows])


def plan_launches(
    lengths: Sequence[int], passes: range, *, batch_tokens: int, fold: bool, padding: float = 0.0
) -> Iterator[Launch]:
    """Yields every (text, pass) once, the longest texts first, so that a lack of memory shows at the start.

    A launch has at least one row and at most `batch_tokens` tokens, of texts of one length. Texts of another length
    fill it up if none is padded by more than the share `padding`. Without `fold` a launch has a single pass.
    """
    numbers = np.asarray(lengths, np.int64)
    together = np.array(passes, np.int64)
    for texts in _groups(numbers, batch_tokens // max(1, len(passes) if fold else 1), padding):
        rows = max(1, batch_tokens // max(1, int(numbers[texts[0]])))
        for group in [together] if fold else together[:, None]:
            of_text, in_pass = np.repeat(texts, len(group)), np.tile(group, len(texts))
            for first in range(0, len(of_text), rows):
                yield Launch(of_text[first : first + rows], in_pass[first : first + rows])


def _groups(lengths: NDArray[np.int64], full: int, padding: float) -> Iterator[NDArray[np.int64]]:
    """Places of texts of one length, the longest first; those near it fill up its last launch of `full` tokens."""
    group: list[NDArray[np.int64]] = []
    widest, room = 0, 0
    for length in map(int, np.unique(lengths)[::-1]):
        texts = np.flatnonzero(lengths == length)
        if group and length >= widest * (1 - padding):
            group.append(texts[:room])
            texts, room = texts[room:], room - len(group[-1])
        if group and (len(texts) or not room):
            yield np.concatenate(group)
            group = []
        if len(texts):
            group, widest = [texts], length
            room = -len(texts) % max(1, full // max(1, length))
    if group:
        yield np.concatenate(group)


def run_passes(  # noqa: PLR0913  what to compute (four) and how (five, by name)
    teacher: Teacher,
    tokens: Sequence[Tokens],
    keys: Sequence[bytes],
    passes: range,
    *,
    deterministic: bool,
    repeats: bool = False,
    batch_tokens: int,
    states: NDArray[np.float16] | None = None,
    on_progress: Callable[[int], None] = lambda _rows: None,
    stop: Callable[[], None] = lambda: None,
) -> tuple[NDArray[np.float32] | None, NDArray[np.float16]]:
    """Returns the logits of the dropout-off run [texts, labels], if wanted, and of the passes [texts, passes, labels].

    `repeats`: the caller stores the run without dropout as every pass.
    `states` [texts, width] receives the means over tokens of the last layer's states, if there are no passes.
    `on_progress` receives the rows of each finished launch; `stop` runs before each launch and may raise.
    A teacher that drops units in its last layer alone runs both together, the run without dropout in any case.
    """
    together = teacher.last_layer and len(passes) > 0
    launcher = _Launcher(teacher, tokens, keys, stop, passes if together else None, pooled=states is not None)
    teacher.oom_splits = 0
    lengths = [len(text) for text in tokens]
    plan = partial(plan_launches, lengths, batch_tokens=batch_tokens, padding=teacher.padding)
    logits = np.empty((len(tokens), teacher.labels), np.float32) if deterministic else None
    launches: list[Iterable[Launch]] = []
    if together or deterministic:
        launches.append(plan(range(DROPOUT_OFF, 0), fold=True))
    if len(passes) and not together:
        launches.append(plan(passes, fold=teacher.can_batch_passes))
    raw = np.empty((len(tokens), len(passes), teacher.labels), np.float16)
    for part, numbers in launcher.run(chain(*launches)):
        values = numbers[:, : teacher.labels]
        dropped = part.passes != DROPOUT_OFF
        what = "logits are beyond 65504, the largest number the cache keeps"
        broken = (np.abs(values) > LARGEST) & (dropped[:, None] | repeats)
        launcher.refuse(part, broken, what, torch.float32)  # the cache has 16 bits in any dtype
        raw[part.texts[dropped], part.passes[dropped] - passes.start] = values[dropped].astype(np.float16)
        if logits is not None:
            logits[part.texts[~dropped]] = values[~dropped]
        if states is not None:
            states[part.texts] = numbers[:, teacher.labels :].clip(-LARGEST, LARGEST)
        on_progress(len(part) if deterministic else int(dropped.sum()))
    return logits, raw


@dataclass
class _Launcher:
    """Runs the launches of one call; lowers the number of tokens at once where memory does not suffice."""

    teacher: Teacher
    tokens: Sequence[Tokens]
    keys: Sequence[bytes]
    stop: Callable[[], None]
    last_layer_passes: range | None
    """Passes that follow each launch without dropout, in the last layer alone."""
    pooled: bool
    """Whether the logits are followed by the means of states, as in `Teacher.start`."""
    ceiling: int | None = None
    """Most tokens of a launch with several rows, once memory did not suffice."""

    def run(self, launches: Iterable[Launch]) -> Iterator[tuple[Launch, NDArray[np.float32]]]:
        """Yields the launches' logits, in parts if memory does not suffice. On a GPU, the next ones are under way."""
        started: deque[tuple[Launch, PendingTransfer]] = deque()
        for launch in launches:
            ids = [self.tokens[i].ids for i in launch.texts]
            parts = by_count(ids, np.arange(len(launch)), end_token(self.teacher.model.config))
            waiting = [launch.take(rows) for rows in reversed(parts)]
            while waiting:
                part = waiting.pop()
                size = len(part) * len(self.tokens[part.texts[0]])
                if self.ceiling is None or size <= self.ceiling or len(part) == 1:
                    self.stop()
                    transfer = self._start(part)
                    if transfer is not None:
                        started.append((part, transfer))
                        yield from self._finished(started, self.teacher.prefetch)
                        continue
                    yield from self._finished(started, 0)
                    self._lower_ceiling(part)
                waiting += reversed(part.halves())
        yield from self._finished(started, 0)

    def _finished(
        self, started: deque[tuple[Launch, PendingTransfer]], but: int
    ) -> Iterator[tuple[Launch, NDArray[np.float32]]]:
        """Waits for the launches in their order, all `but` the last few."""
        while len(started) > but:
            part, transfer = started.popleft()
            values = transfer.wait().numpy()
            if self.last_layer_passes is not None:
                part = part.with_passes(self.last_layer_passes)
            self.refuse(part, ~np.isfinite(values), "logits are NaN or infinite", self.teacher.dtype)
            self.teacher.has_predicted = True
            yield part, values

    def _start(self, part: Launch) -> PendingTransfer | None:
        """Returns None without enough memory. The error is dropped, and with it all that its traceback keeps alive."""
        tokens, keys = [self.tokens[i] for i in part.texts], [self.keys[i] for i in part.texts]
        rows = Rows(tokens, keys, part.passes)
        try:
            if self.last_layer_passes is not None:
                return self.teacher.start_last_layer(rows, self.last_layer_passes)
            return self.teacher.start(rows, pooled=self.pooled)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _lower_ceiling(self, part: Launch) -> None:
        gc.collect()
        if self.teacher.device.type == "cuda":
            torch.cuda.empty_cache()
        length = len(self.tokens[part.texts[0]])
        if len(part) == 1:
            raise WorkError(
                f"teacher {self.teacher.name}: out of memory on a single text of {length} tokens",
                where=f"text {self.keys[part.texts[0]].hex()}",
                fix=f"set max_tokens: {max(1, length // 2)} for this teacher, or execution.device: cpu",
            )
        self.teacher.oom_splits += 1
        self.ceiling = (len(part) + 1) // 2 * length

    def refuse(self, part: Launch, broken: NDArray[np.bool_], what: str, dtype: torch.dtype) -> None:
        """Raises an error that names the texts and passes whose logits are broken; fp32 may mend another `dtype`."""
        rows = broken.any(axis=1)
        if not rows.any():
            return
        passes = sorted(set(part.passes[rows].tolist()))
        when = "dropout off" if passes == [DROPOUT_OFF] else f"pass {', '.join(map(str, passes))}"
        texts = dict.fromkeys(self.keys[i].hex() for i in part.texts[rows])
        where, fix = f"texts {shown_names(texts, KEYS_SHOWN)}", "leave the texts or this teacher out"
        if rows.all() and len(texts) > 1 and not self.teacher.has_predicted:
            where, fix = f"all {len(texts)} texts so far", "leave this teacher out"
        damage = not_finite(self.teacher.model)
        if damage:
            what, fix = f"{what}, since its {damage}", "download or save this teacher again, or leave it out"
        if dtype == torch.float16 or (dtype != torch.float32 and not damage):
            fix = "set cache.dtype: fp32"
        raise WorkError(f"teacher {self.teacher.name}: {what} ({when})", where=where, fix=fix)


def token_batches(lengths: RowNumbers, batch_tokens: int, *, equal: bool = False) -> list[RowNumbers]:
    """Returns the rows by length, cut so that a padded batch has at most `batch_tokens` tokens; one text may have more.

    With `equal`, all texts of a batch have one length, so that none is padded.
    """
    order = np.argsort(lengths, kind="stable")
    batches: list[RowNumbers] = []
    start = 0
    for at, row in enumerate(order):
        is_full = (at - start + 1) * int(lengths[row]) > batch_tokens
        if at > start and (is_full or (equal and lengths[row] != lengths[order[start]])):
            batches.append(order[start:at])
            start = at
    return [*batches, order[start:]] if len(order) else []


def model_batches(config: Any, tokens: Ragged, batch_tokens: int) -> list[RowNumbers]:
    """Returns the batches of texts that a model of this configuration reads together."""
    batches = token_batches(tokens.lengths, batch_tokens, equal=reads_padding(config))
    return [part for batch in batches for part in by_count(tokens, batch, end_token(config))]


def model_inputs(
    tokens: Sequence[Ids], type_ids: Sequence[Ids] | None, rows: RowNumbers, pad_id: int, width: int = 0
) -> dict[str, torch.Tensor]:
    """Returns the model's inputs for these rows, padded to the longest of them, or to this width if it is larger."""
    ids, mask = Ragged.of(tokens).take(rows).padded(pad_id, width)
    arrays = {"input_ids": ids, "attention_mask": mask.astype(np.int64)}
    if type_ids is not None:
        arrays["token_type_ids"], _ = Ragged.of(type_ids).take(rows).padded(0, width)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def predict(
    model: Any,
    tokens: Sequence[Ids],
    *,
    pad_id: int,
    batch_tokens: int = BATCH_TOKENS,
    type_ids: Sequence[Ids] | None = None,
) -> NDArray[np.float32]:
    """Returns logits [n, C] in the order of `tokens`, without dropout."""
    tokens, type_ids = Ragged.of(tokens), None if type_ids is None else Ragged.of(type_ids)
    all_logits = np.zeros((len(tokens), model.config.num_labels), dtype=np.float32)
    with _without_dropout(model):
        for rows in model_batches(model.config, tokens, batch_tokens):
            inputs = put_on(next(model.parameters()).device, model_inputs(tokens, type_ids, rows, pad_id))
            all_logits[rows] = model(**inputs).logits.float().cpu().numpy()
    return all_logits


def predict_with_states(
    model: Any, tokens: Sequence[Ids], *, pad_id: int, layer: int, type_ids: Sequence[Ids] | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns logits [n, C] and the means over tokens [n, 2, W] of a layer's states and the last one's."""
    tokens, type_ids = Ragged.of(tokens), None if type_ids is None else Ragged.of(type_ids)
    width, device = int(model.config.get_text_config().hidden_size), next(model.parameters()).device
    all_logits = np.zeros((len(tokens), model.config.num_labels), dtype=np.float32)
    all_states = np.zeros((len(tokens), 2, width), dtype=np.float32)
    with _without_dropout(model):
        for rows in model_batches(model.config, tokens, tokens_at_once(device, width)):
            inputs = put_on(device, model_inputs(tokens, type_ids, rows, pad_id))
            output = model(**inputs, output_hidden_states=True)
            all_logits[rows] = output.logits.float().cpu().numpy()
            for place, states in enumerate((output.hidden_states[layer], output.hidden_states[-1])):
                all_states[rows, place] = mean_over_tokens(states.float(), inputs["attention_mask"]).cpu().numpy()
    return all_logits, all_states


def middle_layer(model: Any, inputs: dict[str, torch.Tensor]) -> int | None:
    """Returns the position of the middle layer among the hidden states; None if these inputs get no state per token."""
    with _without_dropout(model):
        output = model(**put_on(next(model.parameters()).device, inputs), output_hidden_states=True)
    states = getattr(output, "hidden_states", None) or ()
    shape = (*inputs["input_ids"].shape, getattr(model.config.get_text_config(), "hidden_size", None))
    middle = len(states) // 2
    return middle if len(states) > 1 and tuple(states[middle].shape) == shape else None


@contextmanager
def _without_dropout(model: torch.nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    # Not inference mode: tensors that a model caches in that mode could not be trained with afterwards.
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def weights_digest(model: torch.nn.Module) -> str:
    """Returns a digest of all weights, which does not depend on the format of their file."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(weight.detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


LONGEST_TOKENS = 512
"""Longest text of a student whose folder names no limit."""


class Classifier:
    """Predicts logits in fp32 without dropout, in the model's own order of labels unless reordered."""

    def __init__(self, files: ModelFiles, *, device: str, max_tokens: int | None) -> None:
        self.folder = files.folder
        self.model: Any = load_classifier(files, dropout=None, dtype="fp32").to(pick_device(device))
        self.tokenizer = load_tokenizer(files)
        self.limit = token_limit(self.model.config, self.tokenizer, max_tokens or LONGEST_TOKENS)
        self.types = has_two_types(self.model.config)
        self.pad_id, _ = choose_pad(self.model, self.tokenizer, name=str(files.folder))
        self.labels = [str(self.model.config.id2label[index]) for index in range(self.model.config.num_labels)]
        self._order = list(range(len(self.labels)))
        self.truncated = 0
        """Number of texts so far that were longer than the limit."""

    def reorder(self, labels: Sequence[str], *, where: str) -> None:
        """Orders the logits by these labels; refuses a model with other labels."""
        if set(self.labels) != set(labels):
            raise ModelError(
                f"{where} has other labels than this experiment",
                where=f"{self.folder}: {shown_names(self.labels)}",
                fix=f"use a model with exactly the labels {shown_names(labels)}",
            )
        self._order = [self.labels.index(name) for name in labels]
        self.labels = list(labels)

    @cached_property
    def unknown_states(self) -> UnknownStates | None:
        """The fit of the middle layer's states in the model's folder; None without it."""
        if not (self.folder / UNKNOWN).exists():
            return None
        config = self.model.config.get_text_config()
        return read_unknown(
            self.folder,
            width=int(config.hidden_size),
            layers=int(config.num_hidden_layers),
            weights=weights_digest(self.model),
        )

    @property
    def unknown_threshold(self) -> float | None:
        """Unknown score above which a text is unlike the training texts; None if the folder has none."""
        if self.unknown_states is not None:
            return self.unknown_states.threshold
        threshold = getattr(self.model.config, "unknown_threshold", None)
        return threshold if isinstance(threshold, float) else None

    def logits(self, texts: Sequence[tuple[str, ...]]) -> NDArray[np.float64]:
        """Returns the logits [texts, labels]."""
        tokens = self._encode(texts)
        logits = predict(self.model, tokens.ids, pad_id=self.pad_id, type_ids=tokens.type_ids)
        return logits[:, self._order].astype(np.float64)

    def logits_and_scores(self, texts: Sequence[tuple[str, ...]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the logits [texts, labels] and the unknown scores [texts]: of the states, else of the logits."""
        fit = self.unknown_states
        if fit is None:
            logits = self.logits(texts)
            return logits, unknown_score(logits)
        tokens = self._encode(texts)
        predicted, states = predict_with_states(
            self.model, tokens.ids, pad_id=self.pad_id, layer=fit.layer, type_ids=tokens.type_ids
        )
        return predicted[:, self._order].astype(np.float64), fit.scores(states.astype(np.float64))

    def _encode(self, texts: Sequence[tuple[str, ...]]) -> TokenRows:
        tokens = encode(self.tokenizer, texts, self.limit, types=self.types)
        self.truncated += int(tokens.truncated.sum())
        return tokens
