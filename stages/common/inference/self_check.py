"""A faster way through a teacher is taken only where it gives the model's own numbers.

Tried on texts of two lengths, padded and not, dropout off and keyed: numbers decide, not names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amalgam.pipeline.errors import ModelError
from amalgam.stages.common.inference.compiled_dropout import Fused
from amalgam.stages.common.inference.fast_encoder import FastEncoder, lean_encoder

if TYPE_CHECKING:
    from amalgam.stages.common.inference.compiled_dropout import Compiler
    from amalgam.stages.common.inference.teacher import Teacher


ALIKE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}


def build_fast_encoder(teacher: Teacher) -> FastEncoder | None:
    for first_token in (True, False):
        lean = lean_encoder(teacher.model, first_token=first_token)
        if lean is None:
            return None
        try:
            agrees = _agrees(teacher, lean)
        except torch.OutOfMemoryError:
            raise
        except (ModelError, IndexError, RuntimeError, TypeError, ValueError):  # another model under the same names
            continue
        lean.buffers.drop()
        if agrees:
            return lean
    return None


def fuse(teacher: Teacher, lean: FastEncoder, compiler: Compiler) -> str:
    """Compiled kernels for the lean encoder, if they can be had and agree; else why not."""
    lean.fused = Fused(compiler)
    why = "their numbers are not the model's"
    try:
        if _agrees(teacher, lean):
            return ""
    except torch.OutOfMemoryError:
        why = "memory does not suffice"
    except Exception as error:  # noqa: BLE001  a compiler may fail in any way, and none is worth a run
        why = (str(error).splitlines() or [type(error).__name__])[0]
    lean.fused = None
    return why


def _agrees(teacher: Teacher, lean: FastEncoder) -> bool:
    for rows in teacher.trials():
        with torch.inference_mode():
            inputs = teacher.inputs(rows)
            ways = [teacher.plain(inputs, None), teacher.plain(inputs, lean)]
            if _can_be_keyed(teacher):
                keyed = teacher.inputs(rows, teacher.sites)
                ways += [teacher.dropped(keyed, teacher.sites), teacher.dropped(keyed, teacher.sites, lean)]
        if not all(alike(a.float(), b.float(), teacher.dtype) for a, b in zip(ways[::2], ways[1::2], strict=True)):
            return False
    return True


def _can_be_keyed(teacher: Teacher) -> bool:
    """A model whose dropout cannot be keyed may still answer with dropout off."""
    try:
        return bool(teacher.sites)
    except ModelError:
        return False


def alike(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> bool:
    """Equal up to rounding, which is measured against how much logits differ between texts."""
    spread = float(theirs.std(0).max())
    return float((ours - theirs).abs().max()) <= ALIKE[dtype] * spread
