"""Chooses the device and the number format where the experiment does not set them, and moves tensors between devices.

It refuses a machine without the device or the libraries that an experiment needs.
Each process chooses by itself: cache-teachers must never wait for a process without work.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from amalgam.data.lazy import torch
from amalgam.pipeline.errors import ExperimentError

CPU_INFO = Path("/proc/cpuinfo")

ON_EVERY_MACHINE = ("auto", "cpu")

NUMBERS_AT_ONCE = 15 << 21
"""Limit of a launch's states on a GPU: 40,960 tokens of BERT-base. Larger products are no faster."""


def pick_device(wanted: str) -> torch.device:
    offered = _offered()
    if wanted not in ON_EVERY_MACHINE and offered.type != wanted:
        raise ExperimentError(
            f"execution.device is {wanted}, but this machine offers {offered.type}", fix="set execution.device=auto"
        )
    device = torch.device("cpu") if wanted == "cpu" else offered
    avoid_plans(device)
    return device


def check_device(wanted: str) -> str:
    """Refuses a device that this machine lacks; imports torch only for another device than the CPU."""
    return wanted if wanted in ON_EVERY_MACHINE else str(pick_device(wanted))


def check_libraries(names: Sequence[str], extra: str, where: str) -> None:
    """Refuses a command or a setting for which this machine lacks the libraries of an extra."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            fix = f"pip install 'amalgam-distill[{extra}]'"
            raise ExperimentError(f"{name} is not installed", where=where, fix=fix) from None


def _offered() -> torch.device:
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def avoid_plans(device: torch.device) -> None:
    """Leaves out cuDNN's attention on a GPU: a plan for each new shape takes it as long as ten steps."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)


def dtype_for(device: torch.device) -> str:
    """Returns bf16 where the hardware computes it, fp16 on older GPUs, fp32 elsewhere."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if device.type == "cpu" and _cpu_computes_bf16() else "fp32"


def _cpu_computes_bf16() -> bool:
    """Returns whether this CPU multiplies faster in bf16 than in fp32.

    AMX does. AVX512-BF16 alone does on AMD (730 to 180 GFLOP/s), but not on an Intel Xeon (67 to 115).
    """
    amx, avx = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    if amx and amx():
        return True
    is_intel = CPU_INFO.is_file() and "GenuineIntel" in CPU_INFO.read_text()
    return bool(avx and avx() and not is_intel)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seeds the generators of the CPU and of the device.

    torch.manual_seed also formats a stack trace for each kind of device that is not in use: a fifth of a small step.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def tokens_at_once(device: torch.device, width: int) -> int:
    """Returns the tokens of a launch: few on a CPU, to fit its caches; on a GPU, as many as make products fast."""
    if device.type != "cuda":
        return 4096
    free, _ = torch.cuda.mem_get_info(device)
    return max(1 << 14, min(1 << 16, NUMBERS_AT_ONCE // width, free // (256 * width)))


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies through pinned memory to a GPU: a copy from plain memory would wait for all of its earlier work."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def put_on(device: torch.device, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: to_device(tensor, device) for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class PendingTransfer:
    """Logits during their copy to the host, and the event of its end; None where the device is the host."""

    logits: torch.Tensor
    arrival: torch.cuda.Event | None

    def wait(self) -> torch.Tensor:
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.logits


def start_transfer(logits: torch.Tensor) -> PendingTransfer:
    """Queues the copy behind its own launch, so that waiting for it does not wait for later launches."""
    if logits.device.type != "cuda":
        return PendingTransfer(logits.cpu(), None)
    host = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
    host.copy_(logits, non_blocking=True)
    arrival: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    # That device's stream: of several GPUs another may be the current one.
    arrival.record(torch.cuda.current_stream(logits.device))
    return PendingTransfer(host, arrival)
