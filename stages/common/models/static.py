"""A classifier without a transformer: a vector for each token, one convolution over three tokens, and a linear layer.

The vectors are distilled from an encoder: its state of each token alone, reduced by PCA. No standard architecture has
this form, so amalgam registers its own. Other programs first `import amalgam.stages.common.models.static`, or compute
the few lines in numpy (docs/student.md). [B texts, T tokens, D width, V vocabulary]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from amalgam.stages.common.models.model_folder import STATIC, states_body

WIDTH = 232
"""Largest width of the vectors; a narrower encoder keeps its own. With 30,522 tokens the file has 29 MB."""
DROPOUT = 0.4
AT_ONCE = 1024
"""Tokens that the encoder reads at once, each as a text of its own."""


class StaticConfig(PreTrainedConfig):  # type: ignore[misc]
    """Names its sizes as encoders do."""

    model_type = STATIC

    def __init__(
        self,
        vocab_size: int = 2,
        hidden_size: int = WIDTH,
        dropout: float = DROPOUT,
        pad_token_id: int | None = None,
        **rest: Any,
    ) -> None:
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, 1
        self.dropout, self.pad_token_id = dropout, pad_token_id
        super().__init__(**rest)


class StaticBody(nn.Module):
    def __init__(self, config: StaticConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.convolution = nn.Conv1d(config.hidden_size, config.hidden_size, 3, padding=1)
        self.dropout = nn.Dropout(config.dropout / 2)

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns vectors and features [B, T, D], both zero at padding, so that padding changes no text."""
        vectors = self.dropout(self.words(input_ids)) * mask
        return vectors, self.convolution(vectors.transpose(1, 2)).relu().transpose(1, 2) * mask


class StaticForSequenceClassification(PreTrainedModel):  # type: ignore[misc]
    """Classifies by the largest and the mean feature of a text."""

    config_class = StaticConfig
    base_model_prefix = "static"

    def __init__(self, config: StaticConfig) -> None:
        super().__init__(config)
        self.static = StaticBody(config)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(2 * config.hidden_size, config.num_labels)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.static.words

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        output_hidden_states: bool = False,
        **_: Any,
    ) -> SequenceClassifierOutput:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        weights = mask.unsqueeze(-1).to(self.static.words.weight.dtype)
        vectors, features = self.static(input_ids, weights)
        mean = features.sum(1) / weights.sum(1).clamp(min=1)
        logits = self.classifier(self.dropout(torch.cat([features.amax(1), mean], dim=1)))
        return SequenceClassifierOutput(
            logits=logits, hidden_states=(vectors, features) if output_hidden_states else None
        )


def static_classifier(
    vectors: torch.Tensor, *, labels: list[str], seed: int, dropout: float | None
) -> StaticForSequenceClassification:
    """Returns a classifier with these token vectors, which stay as they are, and a new convolution and head."""
    label2id = {label: index for index, label in enumerate(labels)}
    config = StaticConfig(
        vocab_size=len(vectors),
        hidden_size=vectors.shape[1],
        dropout=DROPOUT if dropout is None else dropout,
        id2label=dict(enumerate(labels)),
        label2id=label2id,
        problem_type="single_label_classification",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = StaticForSequenceClassification(config)
    model.static.words.weight.data.copy_(vectors)
    model.static.words.weight.requires_grad_(False)
    return model


def token_vectors(
    encoder: Any, tokenizer: Any, tokens: int, device: torch.device, show: Callable[[int], None]
) -> torch.Tensor:
    """Returns the encoder's mean state of each token alone: its largest components [V, D], with a mean square of 1.

    `show` takes the number of tokens that are read.
    """
    body = states_body(encoder).to(device).eval()
    around = list(tokenizer("")["input_ids"])
    front = 1 if around and around[0] in {tokenizer.cls_token_id, tokenizer.bos_token_id} else 0
    before, after = (torch.tensor(ids, dtype=torch.int64) for ids in (around[:front], around[front:]))
    states = []
    with torch.no_grad():
        for ids in torch.split(torch.arange(tokens), AT_ONCE):
            parts = [before.expand(len(ids), -1), ids[:, None], after.expand(len(ids), -1)]
            texts = torch.cat(parts, dim=1).to(device)
            read = body(input_ids=texts, attention_mask=torch.ones_like(texts))
            states.append(read.last_hidden_state.mean(1).cpu().double())
            show(int(ids[-1]) + 1)
    centred = torch.cat(states)
    centred -= centred.mean(0)
    _, axes = torch.linalg.eigh(centred.T @ centred)  # by size, the smallest first
    vectors = centred @ axes.flip(1)[:, :WIDTH]
    scaled: torch.Tensor = vectors / vectors.square().mean().sqrt().clamp(min=1e-12)
    return scaled.float()


AutoConfig.register(STATIC, StaticConfig, exist_ok=True)

AutoModelForSequenceClassification.register(StaticConfig, StaticForSequenceClassification, exist_ok=True)
