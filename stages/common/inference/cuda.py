"""Captures launches of a recurring shape as CUDA graphs, and compiles dropout.

A forward is captured only if it reads nothing on the host. It is used only if its replay with other rows gives the
logits of the plain launch. After any failure, launches run one by one. Dropout is compiled into kernels of torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from amalgam.stages.common.inference.dropout import MaskClaim

Inputs: TypeAlias = Mapping[str, torch.Tensor]
Forward: TypeAlias = Callable[[Inputs], torch.Tensor]
Capture: TypeAlias = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], object], torch.Tensor]]
Kind: TypeAlias = tuple[str, ...]
Shape: TypeAlias = tuple[Kind, tuple[torch.Size, ...]]
MOST = 64
"""Limit of captured launches per teacher. The first ones are kept; evicting them would lead to endless captures."""

SEEN = 512
"""Number of recent shapes in the cache; a shape that recurs among them is captured."""

WORDS = "words"


aten = torch.ops.aten

READS = {
    aten._local_scalar_dense.default,  # noqa: SLF001
    aten.equal.default,
    aten.is_nonzero.default,
    aten.item.default,
    aten.masked_select.default,
    aten.nonzero.default,
}

INDEXES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class HostReadError(RuntimeError):
    """Raised by a forward that reads from the host midway, because a replay cannot."""


class NoHostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Refuses operations that cannot be captured: reads of a number or a shape, and copies from the host's memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func in READS or (func in INDEXES and _by_truth(args[1])):
            raise HostReadError(f"the model calls {func} in the middle of its work")
        result = func(*args, **(kwargs or {}))
        if self._travelled(func, args, result):
            raise HostReadError(f"the model fetches from the host or gives to it in the middle of its work ({func})")
        return result

    def _travelled(self, func: Any, args: Sequence[Any], result: Any) -> bool:
        """Returns whether the operation copies between host and device; single numbers do not count."""
        tensors = [value for value in (*args, result) if isinstance(value, torch.Tensor)]
        if func is aten.lift_fresh.default:
            return tensors[0].device.type == self._device.type
        return len({tensor.device.type for tensor in tensors if tensor.dim()}) > 1


def _by_truth(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in {torch.bool, torch.uint8} for index in indices)


@dataclass(frozen=True)
class Captured:
    """Holds the captured launch of one shape: its inputs, its replay and its output."""

    inputs: dict[str, torch.Tensor]
    replay: Callable[[], object]
    output: torch.Tensor
    kept: tuple[torch.Tensor, ...]
    """Tensors made outside that the replay reads or writes by address: they must outlive it."""

    def answer(self, inputs: Inputs) -> torch.Tensor:
        """Returns a copy of the logits.

        All steps run on one stream, so the next launch may start before this one is done.
        """
        for name, tensor in self.inputs.items():
            tensor.copy_(inputs[name])
        self.replay()
        return self.output.clone()


@dataclass(eq=False)
class Graphs:
    """Holds the captured launches of a teacher, and captures more of them."""

    capture: Capture
    close_enough: Callable[[torch.Tensor, torch.Tensor], bool]
    kept: Callable[[], Sequence[torch.Tensor]]
    note: Callable[[str], None]
    captured: dict[Shape, Captured] = field(default_factory=dict)
    _seen: OrderedDict[Shape, None] = field(default_factory=OrderedDict)
    _closed: set[Kind] | None = field(default_factory=set)
    """Kinds of launches that cannot be captured; None once capturing has stopped."""

    def run(self, kind: str, inputs: Inputs, forward: Forward) -> torch.Tensor:
        """Logits of a launch whose first axes are its rows (of words the last): replayed if there is a capture."""
        shape: Shape = (kind, *inputs), tuple(one.shape for one in inputs.values())
        captured = self.captured.get(shape)
        if captured is not None:
            return captured.answer(inputs)
        result = forward(inputs)
        if self._pays(shape) and len(result) > 1:
            self._try(shape, inputs, forward, result)
        return result

    def forget(self) -> None:
        """The forward is another one from here on."""
        self.captured.clear()
        self._seen.clear()

    def close(self, why: str) -> None:
        """Frees all captures permanently."""
        if self._closed is not None:
            self.captured.clear()
            self._closed = None
            self.note(f"launches are not captured: {why}")

    def _pays(self, shape: Shape) -> bool:
        """It has come before, lately."""
        if self._closed is None or shape[0] in self._closed or len(self.captured) >= MOST:
            return False
        before = shape in self._seen
        self._seen[shape] = None
        self._seen.move_to_end(shape)
        if len(self._seen) > SEEN:
            self._seen.popitem(last=False)
        return before

    def _try(self, shape: Shape, inputs: Inputs, forward: Forward, result: torch.Tensor) -> None:
        try:
            captured = self._new(inputs, forward)
            right = self.close_enough(captured.answer(inputs), result)
        except HostReadError as error:
            self._leave(shape[0], str(error))
        except RuntimeError as error:  # a capture may fail in as many ways as CUDA itself
            self.close(str(error).splitlines()[0])
        else:
            if right:
                self.captured[shape] = captured
            else:
                self.close("a replay gives other numbers than the launch that it replaces")

    def _leave(self, kind: Kind, why: str) -> None:
        """Stops capturing one kind; the note is printed once, for padded and unpadded launches together."""
        if self._closed is None:
            return
        if kind[0] not in {closed[0] for closed in self._closed}:
            self.note(f"launches with {kind[0]} are not captured: {why}")
        self._closed.add(kind)

    def _new(self, inputs: Inputs, forward: Forward) -> Captured:
        """Captures the launch with its rows rotated, so that the first replay proves that it reads its inputs."""
        own = {name: tensor.roll(1, -1 if name == WORDS else 0) for name, tensor in inputs.items()}
        with NoHostReads(next(iter(own.values())).device):
            forward(own)
        replay, output = self.capture(lambda: forward(own))
        return Captured(own, replay, output, tuple(self.kept()))


class CudaCapture:
    """Captures with torch.cuda.graph, from one memory pool.

    Replays never overlap, and each output is cloned before the next replay overwrites it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._made: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def __call__(self, forward: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        # A failed capture leaves its stream as the current one; the outer context restores the old one.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            self._check_room(self._rehearsed(forward))
            graph = torch.cuda.CUDAGraph()
            # A pool lives as long as a graph that was captured into it.
            pool = next((captured.pool() for captured in self._made), None)
            where: dict[str, Any] = {"pool": pool, "stream": self._stream}
            try:
                # Other threads read and write files meanwhile, which must not end the capture.
                with torch.cuda.graph(graph, capture_error_mode="thread_local", **where):
                    output = forward()
            except RuntimeError:
                self._mend_generator()
                raise
            self._made.add(graph)
            return graph.replay, output

    def _rehearsed(self, forward: Callable[[], torch.Tensor]) -> int:
        """Runs once on the capture's stream, where waiting for the device is an error; returns the bytes it takes."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        with torch.cuda.stream(self._stream), _no_waiting():
            forward()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before

    def _check_room(self, needed: int) -> None:
        """For the capture, and still for a launch that is not captured."""
        free, _ = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        if free + cached < 2 * needed:
            raise RuntimeError("their memory does not suffice")

    def _mend_generator(self) -> None:
        """A capture that fails leaves the generator in capture, so that nothing could draw from it; a clone is free."""
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        with contextlib.suppress(RuntimeError):
            generator.graphsafe_set_state(generator.clone_state())


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it does not see every wait yet
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


Compiler: TypeAlias = Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]
FEWEST = 32
"""Rows of a kernel; fewer are left to the plain way. A size of one would be compiled for itself, in mid-work."""


def added(  # noqa: PLR0913  all that a kernel reads
    hidden: torch.Tensor,
    out: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """norm(hidden + out x mask), row by row: [rows, width]."""
    places = offsets.unsqueeze(1) + torch.arange(out.shape[1], device=out.device)
    return functional.layer_norm(torch.addcmul(hidden, out, values[places]), weight.shape, weight, bias, eps)


def probabilities(scores: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """softmax(scores) x mask, row by row: [rows, keys]."""
    places = offsets.unsqueeze(1) + torch.arange(scores.shape[1], device=scores.device)
    return torch.softmax(scores, -1) * values[places]


class Fused:
    """The compiled kernels of a fast encoder. Rows vary from launch to launch, so they are compiled for any number."""

    def __init__(self, compiler: Compiler = torch.compile) -> None:
        self._added = compiler(added)
        self._probabilities = compiler(probabilities)

    def added(self, norm: Any, hidden: torch.Tensor, out: torch.Tensor, claim: MaskClaim) -> torch.Tensor | None:
        """None: not for this shape."""
        if not _one_window_each(claim, out):
            return None
        width = out.shape[-1]
        rows = _rows(hidden.reshape(-1, width)), _rows(out.view(-1, width))
        values, offsets = claim.bank.values(claim.site.rate), _rows(claim.offsets.reshape(-1))
        return self._added(*rows, values, offsets, norm.weight, norm.bias, norm.eps).view(out.shape)

    def probabilities(self, scores: torch.Tensor, claim: MaskClaim, part: slice) -> torch.Tensor | None:
        """None: not for this shape. `part`: which of the claim's rows these are."""
        claim = claim._replace(offsets=claim.offsets[part])
        if not _one_window_each(claim, scores):
            return None
        flat = _rows(scores.view(-1, scores.shape[-1]))
        torch._dynamo.maybe_mark_dynamic(flat, 1)  # noqa: SLF001  as many keys as tokens
        values, offsets = claim.bank.values(claim.site.rate), _rows(claim.offsets.reshape(-1))
        return self._probabilities(flat, values, offsets).view(scores.shape)


def may_compile() -> bool:
    """Torch's own switches: where it does not compile, these functions are slower than the plain way."""
    return "1" not in {os.environ.get("TORCH_COMPILE_DISABLE"), os.environ.get("TORCHDYNAMO_DISABLE")}


def _one_window_each(claim: MaskClaim, tensor: torch.Tensor) -> bool:
    """A window of the bank for each row along the last axis, and of both more than a few."""
    rows = math.prod(tensor.shape[:-1])
    return claim.offsets.numel() == rows >= FEWEST and tensor.shape[-1] > 1


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    torch._dynamo.maybe_mark_dynamic(tensor, 0)  # noqa: SLF001
    return tensor
