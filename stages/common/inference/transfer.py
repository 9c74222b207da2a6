"""Between host and device, with neither waiting for the other: what goes in is pinned, what comes out is on its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PendingTransfer:
    """Logits on their way to the host, and what says that they have arrived; nothing on a device that is the host."""

    logits: torch.Tensor
    arrival: torch.cuda.Event | None

    def wait(self) -> torch.Tensor:
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.logits


def under_way(logits: torch.Tensor) -> PendingTransfer:
    """The copy is queued behind its own launch: waiting for it does not wait for launches started since."""
    if logits.device.type != "cuda":
        return PendingTransfer(logits.cpu(), None)
    host = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
    host.copy_(logits, non_blocking=True)
    arrival: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    # That device's stream: of several GPUs another may be the current one.
    arrival.record(torch.cuda.current_stream(logits.device))
    return PendingTransfer(host, arrival)


def sent(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy from plain memory would first wait for all that the GPU was given before it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
