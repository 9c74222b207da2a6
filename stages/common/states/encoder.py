"""Texts through an encoder, dropout off: the mean over each text's own tokens, never over padding."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amalgam.data.schemas import FEATURES, arrow_schema
from amalgam.data.tokens import TokenRows, encode
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.corpus import Bucket, fields, read_bucket
from amalgam.stages.common.device import pick_device
from amalgam.stages.common.encoders import NewClassifier
from amalgam.stages.common.inference.batches import model_inputs, token_batches
from amalgam.stages.common.inference.classifier import BATCH_TOKENS
from amalgam.stages.common.load import load_new_classifier
from amalgam.stages.common.states.families import ENCODER
from amalgam.stages.common.token_cache import tokens_of

if TYPE_CHECKING:
    import pyarrow as pa


Array = np.ndarray[Any, np.dtype[Any]]
SEAM = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[\s_-]+")
"""Between the words of a label name: camel case, and what stands for a space."""


def words_of(label: str) -> str:
    """sci_tech, sci-tech and sciTech are all two words."""
    return " ".join(word for word in SEAM.split(label) if word) or label


def name_states(encoder: Encoder, names: Sequence[str]) -> Array:
    """[names, width], each of length 1."""
    how = encoder.how
    return encoder.pooled(encode(how.tokenizer, [(words_of(name),) for name in names], how.limit, types=how.types))


SMALL_PART = 4
"""Of a bucket: fewer than one text in so many are tokenised without keeping the tokens."""


@dataclass(frozen=True)
class Encoder:
    body: Any
    how: NewClassifier
    device: torch.device

    @classmethod
    def of(cls, run: Run) -> Encoder:
        """The student's, whole and before it learns: `student.layers` is not asked."""
        new = load_new_classifier(
            run, run.experiment.student.model_copy(update={"layers": None}), ["one", "two"], ENCODER
        )
        device = pick_device(run.experiment.execution.device)
        return cls(new.model.base_model.to(device).eval(), new, device)

    def pooled(self, tokens: TokenRows) -> np.ndarray[Any, Any]:
        """[texts, width], each of length 1."""
        found: np.ndarray[Any, Any] | None = None
        with torch.inference_mode():
            for rows in token_batches(tokens.ids.lengths, BATCH_TOKENS):
                inputs = model_inputs(tokens.ids, tokens.type_ids, rows, self.how.pad_id)
                inputs = {name: tensor.to(self.device) for name, tensor in inputs.items()}
                states = self.body(**inputs).last_hidden_state.float()
                means = mean_over_tokens(states, inputs["attention_mask"])
                found = np.empty((len(tokens), means.shape[1]), np.float32) if found is None else found
                found[rows] = torch.nn.functional.normalize(means, dim=-1).cpu().numpy()
        return found if found is not None else np.empty((0, 0), np.float32)


def mean_over_tokens(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    there = mask.unsqueeze(-1).to(states.dtype)
    return (states * there).sum(1) / there.sum(1).clamp(min=1)


def feature_table(run: Run, encoder: Encoder, bucket: Bucket, places: Any) -> pa.Table:
    """Of the bucket's texts at these places; None: of all."""
    import pyarrow as pa

    rows = read_bucket(run, bucket)
    how = encoder.how
    if places is not None and SMALL_PART * len(places) < bucket.rows:
        tokens = encode(how.tokenizer, fields(rows.take(places)), how.limit, types=how.types)
    else:
        tokens = tokens_of(run, bucket, how.tokenizer, digest=how.tokenizer_digest, limit=how.limit, types=how.types)
        tokens = tokens if places is None else tokens.take(places)
    keys = rows.column("key") if places is None else rows.column("key").take(places)
    values = encoder.pooled(tokens).astype(np.float16)
    arrays = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    return pa.table([keys, arrays], schema=arrow_schema(FEATURES, {"features": values.shape[1]}))
