"""The layers of ModernBERT in few large steps, as module `fast_encoder` has for those of BERT.

Its layers normalise first, turn queries and keys by their places, read near keys alone in most layers, and gate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutput

from amalgam.stages.common.inference.dropout import KeyedDropout, Turn, gated
from amalgam.stages.common.inference.fast_encoder import Buffers, FastEncoder, LayerInputs, product


@dataclass(frozen=True)
class PreNormLayer:
    """One layer; rates of zero are sites that are not there."""

    norm: nn.Module
    three: nn.Linear
    attended: nn.Linear
    attended_norm: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear
    heads: int
    scaling: float
    score_rate: float
    attended_rate: float
    rate: float
    kind: str
    """Kind of the layer's attention, which has its own rotary embedding."""
    window: int


class ModernEncoder(FastEncoder):
    """Replaces the body of the model, from the embeddings to the last norm."""

    def __init__(self, body: Any, layers: list[PreNormLayer], *, first_token: bool) -> None:
        self.encoder: Any = body
        self.last_block = body.layers[-1]
        self.pre_norm = layers
        self.first_token = first_token
        self.longest_trial = 2 * max(layer.window for layer in layers) + 7
        weight = layers[0].three.weight
        self.buffers = Buffers(weight.device, weight.dtype)

    def mask_input(self, mask: torch.Tensor) -> torch.Tensor:
        return mask

    def _forward(  # type: ignore[override]
        self,
        dropout: KeyedDropout | None,
        kept: list[LayerInputs] | None,
        states: list[torch.Tensor] | None,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **_rest: Any,
    ) -> BaseModelOutput:
        hidden = self.encoder.embeddings(input_ids=input_ids)
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        with torch._C.DisableTorchFunction():  # noqa: SLF001  the mode is checked by name below, not call by call
            turns = dict(self._turns(hidden))
            normed = self.pre_norm[0].norm(hidden)
            for layer, norm in self._with_next_norms():
                is_last = layer is self.pre_norm[-1]
                first_token = is_last and self.first_token and states is None
                inputs = self._inputs_of(layer, hidden, normed, mask, turns, first_token=first_token)
                hidden = inputs.hidden
                if is_last and kept is not None:
                    kept.append(inputs)
                    hidden = hidden.clone()
                hidden, normed = self._layer_of(layer, norm, inputs, hidden, dropout)
        if states is not None:
            states.append(normed)
        return BaseModelOutput(last_hidden_state=normed)

    def _forward_last(
        self, dropout: KeyedDropout, inputs: LayerInputs, passes: int, *_inputs: Any, **_rest: Any
    ) -> BaseModelOutput:
        dropout.skip()
        with torch._C.DisableTorchFunction():  # noqa: SLF001
            hidden = inputs.hidden.repeat_interleave(passes, 0)
            *_, (layer, norm) = self._with_next_norms()
            _, normed = self._layer_of(layer, norm, inputs, hidden, dropout, passes)
        return BaseModelOutput(last_hidden_state=normed)

    def _turns(self, hidden: torch.Tensor) -> Iterator[tuple[str, Turn]]:
        places = torch.arange(hidden.shape[1], device=hidden.device)[None]
        for kind in {layer.kind for layer in self.pre_norm}:
            cos, sin = self.encoder.rotary_emb(hidden, places, kind)
            yield kind, Turn(cos[0].contiguous(), sin[0].contiguous())

    def _with_next_norms(self) -> list[tuple[PreNormLayer, nn.Module]]:
        """Returns each layer, and the norm of the layer after it."""
        norms = [*(layer.norm for layer in self.pre_norm[1:]), self.encoder.final_norm]
        return list(zip(self.pre_norm, norms, strict=True))

    def _inputs_of(  # noqa: PLR0913  all that a layer reads
        self,
        layer: PreNormLayer,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        mask: torch.Tensor | None,
        turns: dict[str, Turn],
        *,
        first_token: bool,
    ) -> LayerInputs:
        rows, tokens, width = hidden.shape
        all_of = self.buffers.take("three", rows * tokens, layer.three.out_features)
        product(layer.three, normed.view(-1, width), all_of)
        query, key, value = all_of.view(rows, tokens, 3, layer.heads, -1).unbind(2)
        if first_token:
            query, hidden = query[:, :1], hidden[:, :1].contiguous()
        return LayerInputs((query, key, value), hidden, mask, turns[layer.kind], layer.window)

    def _layer_of(  # noqa: PLR0913  all that a layer reads
        self,
        layer: PreNormLayer,
        norm: nn.Module,
        inputs: LayerInputs,
        hidden: torch.Tensor,
        dropout: KeyedDropout | None,
        passes: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the layer's results to `hidden` in place, and returns it and what the next layer reads."""
        width, flat = hidden.shape[-1], hidden.numel() // hidden.shape[-1]
        mixed = self.buffers.take("mixed", *hidden.shape)
        if passes > 1 and dropout is not None:
            self._first_token_attention(layer, inputs, dropout, mixed.view(-1, passes, width))
        else:
            self._attention(layer, inputs, dropout, mixed)
        out = self.buffers.take("out", *hidden.shape)
        product(layer.attended, mixed.view(flat, width), out.view(flat, width))
        normed = self._summed(layer.attended_norm, hidden, out, layer.attended_rate, dropout)
        wide = self.buffers.take("wide", *hidden.shape[:2], layer.up.out_features)
        product(layer.up, normed.view(flat, width), wide.view(flat, -1))
        narrow = self._gated(wide, layer.rate, dropout)
        product(layer.down, narrow.view(flat, -1), out.view(flat, width))
        return hidden, self._summed(norm, hidden, out, 0.0, None)

    def _summed(
        self, norm: Any, hidden: torch.Tensor, rows: torch.Tensor, rate: float, dropout: KeyedDropout | None
    ) -> torch.Tensor:
        claim = dropout.claim(tuple(rows.shape), rate) if dropout is not None and rate else None
        normed = self.kernels.add_norm(norm, hidden, rows, claim, keep=True) if self.kernels else None
        if normed is None:
            if claim is None:
                hidden.add_(rows)
            else:
                hidden.addcmul_(rows, claim.of(slice(None), self.buffers.take("mask", *rows.shape)))
            normed = norm(hidden)
        return normed

    def _gated(self, wide: torch.Tensor, rate: float, dropout: KeyedDropout | None) -> torch.Tensor:
        narrow = self.buffers.take("narrow", *wide.shape[:2], wide.shape[2] // 2)
        claim = dropout.claim(tuple(narrow.shape), rate) if dropout is not None and rate else None
        if self.kernels is not None and self.kernels.gate(wide, claim, narrow) is not None:
            return narrow
        gated(wide, narrow)
        return narrow if claim is None else narrow.mul_(claim.of(slice(None), self.buffers.take("mask", *narrow.shape)))


def describe_modern_encoder(model: Any, *, first_token: bool) -> ModernEncoder | None:
    """Returns None for other layers than those of ModernBERT. The caller compares the numbers."""
    body, config = model.base_model, model.config
    try:
        layers = [_described(block, config) for block in body.layers]
        gelu = all(getattr(block.mlp.act, "act", None) is functional.gelu for block in body.layers)
        is_body = callable(body.rotary_emb) and callable(body.embeddings) and type(body.final_norm) is nn.LayerNorm
    except AttributeError:
        return None
    if not is_body or not gelu or not layers or not all(_is_plain(layer) for layer in layers):
        return None
    return ModernEncoder(body, layers, first_token=first_token)


def _described(block: Any, config: Any) -> PreNormLayer:
    attention, gate, kind = block.attn, block.mlp, block.attention_type
    return PreNormLayer(
        norm=block.attn_norm,
        three=attention.Wqkv,
        attended=attention.Wo,
        attended_norm=block.mlp_norm,
        up=gate.Wi,
        down=gate.Wo,
        heads=config.num_attention_heads,
        scaling=attention.head_dim**-0.5,
        score_rate=float(attention.attention_dropout),
        attended_rate=float(getattr(attention.out_drop, "p", 0.0)),
        rate=float(gate.drop.p),
        kind=kind,
        window=config.local_attention // 2 if kind == "sliding_attention" else 0,
    )


def _is_plain(layer: PreNormLayer) -> bool:
    """Neither quantised nor adapted."""
    return all(type(linear) is nn.Linear for linear in (layer.three, layer.attended, layer.up, layer.down)) and (
        type(layer.attended_norm) is nn.LayerNorm and type(layer.norm) in {nn.LayerNorm, nn.Identity}
    )
