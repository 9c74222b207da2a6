"""Kernels are used only if their results are those of separate steps."""

from __future__ import annotations

import torch
from torch import nn

from amalgam.stages.common.inference.dropout import Attention, Kernels, MaskClaim, attended, gated, scattered


def find_kernels() -> Kernels | None:
    """Returns the kernels of module `kernels`; None without Triton, which torch brings along on Linux with CUDA."""
    try:
        from amalgam.stages.common.inference import kernels
    except (ImportError, AttributeError, OSError, RuntimeError):  # no Triton, or a broken one
        return None
    return kernels


class ComparedKernels:
    """Kernels whose every result is compared with that of separate steps."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.agree = True

    def attend(
        self, attention: Attention, claim: MaskClaim | None, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        mask = claim.whole() if claim else attention.query.new_ones(attention.scores_shape)
        expected, visible = attended(attention, mask), attention.plain().mask
        result = self._kernels.attend(attention, claim, out)
        if result is not None and visible is not None:  # without a visible key, a result has no meaning
            sees = visible.any(-1).expand(expected.shape[:-1])
            self._checked(result[sees], expected[sees], 0.1)
            return result
        return self._checked(result, expected, 0.1)

    def add_norm(
        self, norm: nn.LayerNorm, hidden: torch.Tensor, rows: torch.Tensor, claim: MaskClaim | None, *, keep: bool
    ) -> torch.Tensor | None:
        added = hidden + rows if claim is None else torch.addcmul(hidden, rows, claim.whole())
        result = self._checked(self._kernels.add_norm(norm, hidden, rows, claim, keep=keep), norm(added), 0.02)
        if keep and result is not None:
            self._checked(hidden, added, 0.02)
        return result

    def gate(self, wide: torch.Tensor, claim: MaskClaim | None, out: torch.Tensor) -> torch.Tensor | None:
        expected = gated(wide) if claim is None else gated(wide) * claim.whole()
        return self._checked(self._kernels.gate(wide, claim, out), expected, 0.02)

    def multiply(self, rows: torch.Tensor, claim: MaskClaim) -> torch.Tensor | None:
        expected = rows * claim.whole()
        return self._checked(self._kernels.multiply(rows, claim), expected, 0.02)

    def offsets(self, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        expected = scattered(words.unsqueeze(-1) + places.flatten())
        self.agree &= torch.equal(self._kernels.offsets(words, places), expected)
        return expected

    def _checked(self, result: torch.Tensor | None, expected: torch.Tensor, bound: float) -> torch.Tensor | None:
        """The bounds are far above rounding, and below what a wrong mask changes."""
        if result is not None:
            difference = (result.float() - expected.float()).abs().mean()
            self.agree &= bool(difference <= bound * expected.float().abs().mean())
        return result
