"""CUDA graphs of training steps: a GPU repeats the kernels of a step, and its host launches none of them.

A step of few tokens waits for its host: BERT-base has over a thousand kernels. A graph holds forward and backward for
one shape of a batch; it reads fixed tensors and adds to the weights' gradients, which stay. Texts are padded to few
widths, so that shapes come again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from amalgam.pipeline.errors import first_line
from amalgam.pipeline.execution.faults import is_out_of_memory
from amalgam.stages.common.device import put_on

Tensors = dict[str, torch.Tensor]
Shape = tuple[tuple[str, tuple[int, ...]], ...]

RECORDED_MODELS = {"bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "mpnet", "modernbert"}
"""Models whose steps never wait for the device. Recording another one could fail, which PyTorch does not undo."""
MOST_TOKENS, WIDEST = 1 << 14, 512
"""Larger steps keep a GPU busy longer than its host needs for their kernels. The shape alone decides, so that a resumed
run records what an uninterrupted one does.
"""


NO_MEMORY = "memory does not suffice"


def graph_width(longest: int, limit: int) -> int:
    """Returns the width that a batch is padded to: a multiple of 8, or of 32 for long texts, up to the limit."""
    step = 8 if longest <= 128 else 32
    return min(-(-longest // step) * step, limit)


class Recorded(NamedTuple):
    inputs: Tensors
    scale: torch.Tensor
    loss: torch.Tensor
    repeat: Callable[[], None]


class StepGraphs:
    """Runs forward and backward of batches, recorded for each shape where it can be; gradients add up."""

    def __init__(
        self, weights: Iterable[torch.Tensor], loss_of: Callable[[Tensors], torch.Tensor], device: torch.device
    ) -> None:
        self.weights = list(weights)
        self.loss_of = loss_of
        self._device = device
        self.recorded: dict[Shape, Recorded] = {}
        self._pool: Any = None
        self.note: str | None = None
        """Why no further shape is recorded."""

    def backward(self, batch: Tensors, scale: float) -> torch.Tensor:
        """Adds the gradients of the batch's loss times `scale`; returns that loss, which the next call overwrites."""
        shape = tuple((name, tuple(tensor.shape)) for name, tensor in batch.items())
        recorded = self.recorded.get(shape)
        if recorded is None and self.note is None and _is_worth_a_graph(batch):
            recorded = self.record(shape, batch)
        if recorded is None:
            return self._unrecorded(batch, scale)
        fill(recorded.inputs, batch)
        recorded.scale.fill_(scale)
        recorded.repeat()
        return recorded.loss

    def _unrecorded(self, batch: Tensors, scale: float) -> torch.Tensor:
        """Launches the kernels; gives up the graphs where memory suffices for one of the two."""
        try:
            return self._added(batch, scale)
        except RuntimeError as error:
            if not self.recorded or not is_out_of_memory(error):
                raise
        self._give_up(NO_MEMORY)
        return self._added(batch, scale)

    def _added(self, batch: Tensors, scale: float) -> torch.Tensor:
        loss = self.loss_of(put_on(self._device, batch)) * scale
        gradients = torch.autograd.grad(loss, self.weights, allow_unused=True)
        for weight, gradient in zip(self.weights, gradients, strict=True):
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        return loss.detach()

    def _give_up(self, why: str) -> None:
        self.clear()
        self.note = f"training launches its kernels one by one, which is slower: {why}"
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def clear(self) -> None:
        self.recorded.clear()
        self._pool = None

    def record(self, shape: Shape, batch: Tensors) -> Recorded | None:
        """Returns the graph of this shape, or None, with a note, if the model's steps cannot be recorded."""
        inputs, scale = put_on(self._device, batch), torch.zeros((), device=self._device)
        stream, state = torch.cuda.current_stream(self._device), torch.cuda.get_rng_state(self._device)
        try:
            self._rehearse(inputs)
            loss, repeat = self._capture(lambda: self.loss_of(inputs) * scale)
        except RuntimeError as error:
            self._give_up(NO_MEMORY if is_out_of_memory(error) else first_line(error))
            self._leave_recording(stream)
            return None
        finally:
            torch.cuda.set_rng_state(state, self._device)
        self.recorded[shape] = Recorded(inputs, scale, loss, repeat)
        return self.recorded[shape]

    def _rehearse(self, inputs: Tensors) -> None:
        """Runs the step once on another stream: a graph needs libraries that are ready."""
        stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self.keep_gradients(inputs)
        torch.cuda.current_stream(self._device).wait_stream(stream)

    def keep_gradients(self, inputs: Tensors) -> None:
        """Gives each weight that the loss reads a gradient that stays; others keep none, so that they do not decay."""
        gradients = torch.autograd.grad(self.loss_of(inputs), self.weights, allow_unused=True)
        for weight, gradient in zip(self.weights, gradients, strict=True):
            if gradient is not None and weight.grad is None:
                weight.grad = torch.zeros_like(weight)

    def _leave_recording(self, stream: torch.cuda.Stream) -> None:
        """A recording that failed leaves its stream and its generator of random numbers in place.

        Graphs that were recorded before would keep the old generator, so they were given up.
        """
        torch.cuda.set_stream(stream)
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(torch.Generator(generator.device))

    def _capture(self, loss_of: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        with torch.cuda.device(self._device), recording:
            loss = loss_of()
            torch.autograd.backward(loss)
        self._pool = self._pool or graph.pool()
        return loss.detach(), graph.replay


def _is_worth_a_graph(batch: Tensors) -> bool:
    mask = batch["attention_mask"]
    return mask.numel() <= MOST_TOKENS and mask.shape[-1] <= WIDEST


def fill(inputs: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> None:
    """Copies a batch into tensors on the device, through pinned memory: so the host does not wait."""
    for name, tensor in batch.items():
        inputs[name].copy_(tensor.pin_memory() if inputs[name].is_cuda else tensor, non_blocking=True)
