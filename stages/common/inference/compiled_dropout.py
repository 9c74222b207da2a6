"""Dropout in one kernel with what stands beside it, on CUDA: written in torch, compiled by torch.

Plain, a mask is written to memory and read again, and the sum or the softmax beside it too; compiled, each number is
read once and written once, and masks are taken from the bank on the way. Same masks; numbers differ by rounding.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from amalgam.stages.common.inference.dropout import MaskClaim

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
    """The compiled kernels of a lean encoder. Rows vary from launch to launch, so they are compiled for any number."""

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
