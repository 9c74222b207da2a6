"""What a model says of tokens: batches by length, dropout off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from amalgam.data.tokens import Ragged
from amalgam.stages.fine_tuning.batches import Ids, model_inputs, token_batches
from amalgam.stages.fine_tuning.learner import put_on

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def predict(
    model: torch.nn.Module,
    tokens: Sequence[Ids],
    *,
    pad_id: int,
    batch_tokens: int,
    type_ids: Sequence[Ids] | None = None,
) -> npt.NDArray[np.float32]:
    """Logits [n, C] in the order of `tokens`, dropout off."""
    import torch

    tokens, type_ids = Ragged.of(tokens), None if type_ids is None else Ragged.of(type_ids)
    lengths = tokens.lengths
    device = next(model.parameters()).device
    config: Any = model.config
    all_logits = np.zeros((len(tokens), config.num_labels), dtype=np.float32)
    was_training = model.training
    model.eval()
    # Not inference mode: what a model caches for itself there could not be trained with afterwards.
    with torch.no_grad():
        for rows in token_batches(lengths, batch_tokens):
            inputs = model_inputs(tokens, type_ids, rows, pad_id)
            logits = model(**put_on(device, inputs)).logits
            all_logits[rows] = logits.float().cpu().numpy()
    model.train(was_training)
    return all_logits
