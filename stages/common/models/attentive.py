"""A classifier that reads a text by attentive pooling (MT-BERT), as teachers do that were fine-tuned together.

No standard head does this, so amalgam registers its own architecture and loads such a folder without remote code.
Other programs first `import amalgam.stages.common.models.attentive`. The body is that of an ordinary encoder.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from amalgam.stages.common.models.model_folder import ATTENTIVE

QUERY_WIDTH = 200
"""Of Wu et al. 2021."""


class AttentiveConfig(PreTrainedConfig):  # type: ignore[misc]
    """`text_config`: the encoder's own."""

    model_type = ATTENTIVE

    def __init__(self, text_config: Any = None, query_width: int = QUERY_WIDTH, **rest: Any) -> None:
        settings = text_config.to_dict() if isinstance(text_config, PreTrainedConfig) else dict(text_config or {})
        self.text_config = AutoConfig.for_model(settings.pop("model_type", "bert"), **settings)
        self.query_width = query_width
        rest.setdefault("pad_token_id", self.text_config.pad_token_id)
        super().__init__(**rest)


class AttentivePooling(nn.Module):
    """sum_t a_t h_t, a = softmax over real tokens of q . tanh(W h_t + b)."""

    def __init__(self, width: int, query_width: int) -> None:
        super().__init__()
        self.key = nn.Linear(width, query_width)
        self.query = nn.Linear(query_width, 1, bias=False)

    def forward(self, states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """[B, W] of [B, T, W]; without a mask all tokens are real."""
        scores = self.query(torch.tanh(self.key(states))).squeeze(-1)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
        return (scores.softmax(-1).unsqueeze(1) @ states).squeeze(1)


class AttentiveHead(nn.Module):
    """Holds the pooling and one dense layer, which co-trained teachers share."""

    def __init__(self, width: int, labels: int, *, query_width: int, rate: float) -> None:
        super().__init__()
        self.pooling = AttentivePooling(width, query_width)
        self.dropout = nn.Dropout(rate)
        self.dense = nn.Linear(width, labels)

    def forward(self, states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return self.dense(self.dropout(self.pooling(states, mask)))


class AttentiveClassifier(PreTrainedModel):  # type: ignore[misc]
    """Keeps the body under its own architecture's prefix, so that a student can start from it."""

    config_class = AttentiveConfig
    _supports_sdpa = True

    def __init__(self, config: AttentiveConfig) -> None:
        super().__init__(config)
        # In the dtype that is being loaded: else it is the one that the encoder's own configuration was saved with.
        body = without_pooler(AutoModel.from_config(config.text_config, dtype=torch.get_default_dtype()))
        self.base_model_prefix = body.base_model_prefix
        setattr(self, self.base_model_prefix, body)
        self.attentive = head_for(config.text_config, config.num_labels, config.query_width)
        self.takes_types = "token_type_ids" in inspect.signature(body.forward).parameters
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.get_input_embeddings()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        **rest: Any,
    ) -> SequenceClassifierOutput:
        types = {"token_type_ids": token_type_ids} if self.takes_types and token_type_ids is not None else {}
        output = self.base_model(input_ids=input_ids, attention_mask=attention_mask, **types, **rest)
        logits = self.attentive(output.last_hidden_state, attention_mask)
        return SequenceClassifierOutput(logits=logits, hidden_states=output.hidden_states)


def head_for(config: Any, labels: int, query_width: int = QUERY_WIDTH) -> AttentiveHead:
    """Returns a head with the dropout that the encoder's own architecture has before its classifier."""
    names = ("classifier_dropout", "seq_classif_dropout", "hidden_dropout_prob", "dropout")
    rates = [getattr(config, name, None) for name in names]
    rate = next((float(rate) for rate in rates if isinstance(rate, int | float)), 0.0)
    return AttentiveHead(int(config.hidden_size), labels, query_width=query_width, rate=rate)


def without_pooler(body: Any) -> Any:
    """Removes the pooler, which the attentive head does not read, so it would never learn."""
    if getattr(body, "pooler", None) is not None:
        body.pooler = None
    return body


def attentive_classifier(body: Any, head: AttentiveHead, labels: list[str]) -> AttentiveClassifier:
    """Returns a separate classifier with the weights of a body and a head that others may share."""
    label2id = {label: index for index, label in enumerate(labels)}
    model = AttentiveClassifier(AttentiveConfig(body.config, id2label=dict(enumerate(labels)), label2id=label2id))
    model.base_model.load_state_dict(body.state_dict())
    model.attentive.load_state_dict(head.state_dict())
    model.eval()
    return model


AutoConfig.register(ATTENTIVE, AttentiveConfig, exist_ok=True)

AutoModelForSequenceClassification.register(AttentiveConfig, AttentiveClassifier, exist_ok=True)
