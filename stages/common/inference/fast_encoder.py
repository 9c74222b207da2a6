"""The layers of BERT-like encoders in few large steps: the model's own numbers, in less time.

Queries, keys and values come of one product, results go into buffers that stay, and dropout is a window of the bank
multiplied in. Where the head reads the first token alone, the last layer computes no other. Checked against the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from amalgam.stages.common.inference.dropout import Attention, Kernels, KeyedDropout, Turn, hide, scores_at_once

CLOSE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}

HALF = {torch.bfloat16, torch.float16}

LONGEST_PLAIN = 512
"""Texts without dropout that are longer, in tokens, use torch's attention; the kernel was not measured on them."""

SAFE = 60.0
"""exp(60) summed over any row, and exp(-60), are well inside float32."""


@dataclass(frozen=True)
class Layer:
    """One post-norm encoder layer; rates of zero are sites that are not there."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    attended: nn.Linear
    attended_norm: nn.LayerNorm
    up: nn.Linear
    activation: Any
    down: nn.Linear
    norm: nn.LayerNorm
    heads: int
    scaling: float
    score_rate: float
    attended_rate: float
    rate: float
    weight: torch.Tensor = field(init=False)
    bias: torch.Tensor = field(init=False)

    @torch.inference_mode(mode=False)  # else the weights could no longer be in a computation with gradients
    def __post_init__(self) -> None:
        """Joins query, key and value in one matrix; the model's own weights become views of it, which saves memory."""
        three = (self.query, self.key, self.value)
        object.__setattr__(self, "weight", torch.cat([linear.weight.data for linear in three]))
        object.__setattr__(self, "bias", torch.cat([linear.bias.data for linear in three]))
        width = self.query.out_features
        for number, linear in enumerate(three):
            linear.weight.data = self.weight[number * width : (number + 1) * width]
            linear.bias.data = self.bias[number * width : (number + 1) * width]


@dataclass(frozen=True)
class LayerInputs:
    """A layer's work before its first dropout site: it is the same in every pass over the same states."""

    three: tuple[torch.Tensor, ...]
    """Query, key and value."""
    hidden: torch.Tensor
    mask: torch.Tensor | None
    turn: Turn | None = None
    window: int = 0

    def attention(self, layer: Any, rate: float = 0.0) -> Attention:
        query, key, value = (part.transpose(1, 2) for part in self.three)
        return Attention(query, key, value, self.mask, rate, layer.scaling, self.turn, self.window)


@dataclass(eq=False)
class Buffers:
    """Tensors that stay from launch to launch: fresh memory costs more than the numbers written into it."""

    device: torch.device
    dtype: torch.dtype
    _flat: dict[str, torch.Tensor] = field(default_factory=dict)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        size = torch.Size(shape).numel()
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size:
            self._flat.pop(name, None)
            flat = self._flat[name] = torch.empty(size, device=self.device, dtype=self.dtype)
        return flat[:size].view(shape)

    def drop(self) -> None:
        self._flat.clear()


class FastEncoder:
    """Replaces a model's encoder while `patched` or `last_layer` is active."""

    kernels: Kernels | None = None
    """Used instead of separate steps."""
    longest_trial = 0
    """Length of the texts, if not short ones, on which this form of a model has to agree with another one."""

    def __init__(self, encoder: Any, layers: list[Layer], *, first_token: bool) -> None:
        self.encoder = encoder
        self.last_block: Any = self.encoder.layer[-1]
        self.layers = layers
        self.first_token = first_token
        weight = layers[0].weight
        self.buffers = Buffers(weight.device, weight.dtype)

    def mask_input(self, mask: torch.Tensor) -> torch.Tensor:
        """Returns the model's attention mask, as the model takes it without looking into it.

        For a mask of two dimensions it first checks whether a token is hidden: a GPU's host would wait for the result.
        """
        return mask.bool()[:, None, None, :]

    def patched(
        self,
        dropout: KeyedDropout | None,
        kept: list[LayerInputs] | None = None,
        states: list[torch.Tensor] | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """Runs all layers; adds to `kept` the last one's inputs, and to `states` its states of all tokens.

        Both are valid until the next run.
        """
        return self._replaced(partial(self._forward, dropout, kept, states))

    def last_layer(
        self, dropout: KeyedDropout, inputs: LayerInputs, passes: int
    ) -> contextlib.AbstractContextManager[None]:
        """Runs the last layer on inputs that were kept, so many passes of each text in a row."""
        return self._replaced(partial(self._forward_last, dropout, inputs, passes))

    @contextlib.contextmanager
    def _replaced(self, forward: Any) -> Iterator[None]:
        self.encoder.forward = forward
        try:
            yield
        finally:
            del self.encoder.forward

    def _forward(
        self,
        dropout: KeyedDropout | None,
        kept: list[LayerInputs] | None,
        states: list[torch.Tensor] | None,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **_rest: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        hidden = hidden_states
        with torch._C.DisableTorchFunction():  # noqa: SLF001  the mode is checked by name below, not call by call
            for layer in self.layers:
                last = layer is self.layers[-1]
                first_token = last and self.first_token and states is None
                inputs = self._inputs(layer, hidden, attention_mask, first_token=first_token)
                hidden = self._layer(layer, inputs, dropout)
                if last and kept is not None:
                    kept.append(inputs)
        if states is not None:
            states.append(hidden)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)

    def _forward_last(
        self, dropout: KeyedDropout, inputs: LayerInputs, passes: int, *_states: Any, **_rest: Any
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        dropout.skip()
        with torch._C.DisableTorchFunction():  # noqa: SLF001
            hidden = self._layer(self.layers[-1], inputs, dropout, passes)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)

    def _inputs(
        self, layer: Layer, hidden: torch.Tensor, mask: torch.Tensor | None, *, first_token: bool
    ) -> LayerInputs:
        three = self._projected(layer, hidden, first_token=first_token)
        if first_token:
            hidden = hidden[:, :1].contiguous()
            mask = mask[:, :, :1] if mask is not None else None
        return LayerInputs(three, hidden, mask)

    def _layer(self, layer: Layer, inputs: LayerInputs, dropout: KeyedDropout | None, passes: int = 1) -> torch.Tensor:
        hidden = inputs.hidden if passes == 1 else inputs.hidden.repeat_interleave(passes, 0)
        shape = hidden.shape
        rows, _, width = shape
        mixed = self.buffers.take("mixed", *shape)
        if passes > 1 and dropout is not None:
            self._first_token_attention(layer, inputs, dropout, mixed.view(-1, passes, width))
        else:
            self._attention(layer, inputs, dropout, mixed)
        flat = (-1, width)
        out = self.buffers.take("out", *shape)
        product(layer.attended, mixed.view(flat), out.view(flat))
        hidden = self._added(layer.attended_norm, hidden, out, layer.attended_rate, dropout)
        wide = _widened(layer, hidden.view(flat), self.buffers.take("wide", rows * shape[1], layer.up.out_features))
        product(layer.down, wide, out.view(flat))
        return self._added(layer.norm, hidden, out, layer.rate, dropout)

    def _projected(self, layer: Layer, hidden: torch.Tensor, *, first_token: bool) -> tuple[torch.Tensor, ...]:
        """Query, key, value: [rows, tokens, heads, width of a head], of the first token alone if so wanted."""
        rows, tokens, width = hidden.shape
        skip = width if first_token else 0
        all_of = self.buffers.take("three", rows * tokens, 3 * width - skip)
        torch.addmm(layer.bias[skip:], hidden.view(-1, width), layer.weight[skip:].t(), out=all_of)
        *query, key, value = all_of.view(rows, tokens, -1, layer.heads, width // layer.heads).unbind(2)
        if first_token:
            first = layer.query(hidden[:, 0])
            query = [first.view(rows, 1, layer.heads, -1)]
        return query[0], key, value

    def _attention(self, layer: Any, inputs: LayerInputs, dropout: KeyedDropout | None, mixed: torch.Tensor) -> None:
        heads_last = inputs.three[0].shape
        rows, queries, heads, _ = heads_last
        attention = inputs.attention(layer, layer.score_rate if dropout is not None else 0.0)
        claim = dropout.claim(attention.scores_shape, attention.rate) if dropout and attention.rate else None
        is_long = claim is None and inputs.turn is None and attention.key.shape[2] > LONGEST_PLAIN
        kernels = None if is_long else self.kernels
        if kernels is not None and kernels.attend(attention, claim, mixed.view(heads_last).transpose(1, 2)) is not None:
            return
        q, k, v, mask = attention.plain()[:4]
        if claim is None:
            attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scaling)
            mixed.view(heads_last).copy_(attended.transpose(1, 2))
            return
        at_once = max(1, scores_at_once(q.device) // (heads * queries * k.shape[2]))
        for first in range(0, rows, at_once):
            part = slice(first, min(first + at_once, rows))
            hidden_keys = mask if mask is None or mask.shape[0] == 1 else mask[part]
            scores = self._scores(layer, q[part], k[part], hidden_keys)
            total = exponentials(scores)
            weights = scores.mul_(claim.of(part, self.buffers.take("score mask", *scores.shape)))
            values = self._copied("v", v[part])
            into = self.buffers.take("q", *values.shape[:2], queries, values.shape[3])
            attended = torch.bmm(weights.flatten(0, 1), values.flatten(0, 1), out=into.flatten(0, 1))
            if total is not None:
                attended.div_(total.view(*attended.shape[:2], 1))
            mixed[part].view(-1, queries, heads, v.shape[3]).copy_(
                attended.view(-1, heads, *attended.shape[1:]).transpose(1, 2)
            )

    def _first_token_attention(
        self, layer: Any, inputs: LayerInputs, dropout: KeyedDropout, mixed: torch.Tensor
    ) -> None:
        """Mixes values for the first token, all passes of a text in one product: [texts, passes, width]."""
        query, key, value, mask = inputs.attention(layer).plain()[:4]
        texts, passes, width = mixed.shape
        weights = torch.softmax(self._scores(layer, query, key, mask), -1)  # [texts, heads, 1, keys]
        heads, keys = weights.shape[1], weights.shape[3]
        if layer.score_rate:
            masks = dropout.claim((texts * passes, heads, 1, keys), layer.score_rate).whole()
            weights = weights * masks.view(texts, passes, heads, keys).transpose(1, 2)
        else:
            weights = weights.expand(-1, -1, passes, -1)
        into = mixed.view(texts, passes, heads, width // heads)
        into.copy_(torch.matmul(weights, value).transpose(1, 2))

    def _scores(self, layer: Any, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        rows, heads, queries, _ = query.shape
        q, k = self._copied("q", query, layer.scaling), self._copied("k", key)
        scores = self.buffers.take("scores", rows * heads, queries, key.shape[2])
        torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), out=scores)
        scores = scores.view(rows, heads, queries, -1)
        if mask is not None:
            hide(scores, mask)
        return scores

    def _copied(self, name: str, heads: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Returns a contiguous copy of [rows, heads, tokens, width], multiplied by `scale` if given."""
        into = self.buffers.take(name, *heads.shape)
        return into.copy_(heads) if scale is None else torch.mul(heads, scale, out=into)

    def _added(
        self, norm: nn.LayerNorm, hidden: torch.Tensor, out: torch.Tensor, rate: float, dropout: KeyedDropout | None
    ) -> torch.Tensor:
        claim = dropout.claim(tuple(out.shape), rate) if dropout is not None and rate else None
        normed = self.kernels.add_norm(norm, hidden, out, claim, keep=False) if self.kernels else None
        if normed is not None:
            return normed
        if claim is None:
            return norm(out.add_(hidden))
        mask = claim.of(slice(None), self.buffers.take("mask", *out.shape))
        return norm(torch.addcmul(hidden, out, mask, out=out))


def exponentials(scores: torch.Tensor) -> torch.Tensor | None:
    """Computes the softmax in place, or exponentials and returns their sums, to divide the product by.

    Exponentials are used on a CPU, where softmax is slow on some row lengths, if none can overflow or vanish.
    """
    if scores.device.type == "cpu" and scores.dtype == torch.float32:
        low, high = torch.aminmax(scores)
        if float(low) > -SAFE and float(high) < SAFE:
            return scores.exp_().sum(-1)
    torch.softmax(scores, -1, out=scores)
    return None


def product(linear: nn.Linear, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if linear.bias is None:
        return torch.mm(rows, linear.weight.t(), out=out)
    return torch.addmm(linear.bias, rows, linear.weight.t(), out=out)


def _widened(layer: Layer, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Returns the activation of `layer.up`.

    In half precision, a GPU computes GELU inside the product, in its tanh form: within 5e-4 of the exact form.
    """
    if getattr(layer.activation, "act", None) is not functional.gelu:
        return layer.activation(product(layer.up, rows, out))
    if rows.is_cuda and rows.dtype in HALF:
        return torch._addmm_activation(layer.up.bias, rows, layer.up.weight.t(), use_gelu=True, out=out)  # noqa: SLF001
    return torch.ops.aten.gelu_(product(layer.up, rows, out))


def describe_fast_encoder(model: Any, *, first_token: bool) -> FastEncoder | None:
    """Returns None for a model without such layers. The caller compares the numbers."""
    base = model.base_model
    encoder: Any = getattr(base, "encoder", None) or getattr(base, "transformer", None)
    blocks = getattr(encoder, "layer", None)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks) or getattr(model.config, "is_decoder", False):
        return None
    try:
        described = [_described(block) for block in blocks]
    except AttributeError:
        return None
    if not all(_plain(parts) for parts in described):
        return None
    return FastEncoder(encoder, [Layer(**parts) for parts in described], first_token=first_token)


PARTS = {
    "query": ("attention.self.query", "attention.q_lin"),
    "key": ("attention.self.key", "attention.k_lin"),
    "value": ("attention.self.value", "attention.v_lin"),
    "attended": ("attention.output.dense", "attention.out_lin"),
    "attended_norm": ("attention.output.LayerNorm", "sa_layer_norm"),
    "up": ("intermediate.dense", "ffn.lin1"),
    "activation": ("intermediate.intermediate_act_fn", "ffn.activation"),
    "down": ("output.dense", "ffn.lin2"),
    "norm": ("output.LayerNorm", "output_layer_norm"),
    "heads": ("attention.self.num_attention_heads", "attention.n_heads"),
    "head_width": ("attention.self.attention_head_size", "attention.attention_head_size"),
    "score_rate": ("attention.self.dropout.p", "attention.dropout.p"),
    "attended_rate": ("attention.output.dropout.p", None),
    "rate": ("output.dropout.p", "ffn.dropout.p"),
}
"""Where a block of BERT, and one of DistilBERT, has the parts of a layer; None: a rate of zero."""


def _described(block: Any) -> dict[str, Any]:
    paths = {name: distilled if hasattr(block, "ffn") else plain for name, (plain, distilled) in PARTS.items()}
    parts = {name: attrgetter(path)(block) if path else 0.0 for name, path in paths.items()}
    scaling = parts.pop("head_width") ** -0.5
    return {**parts, "scaling": scaling}


def _plain(parts: dict[str, Any]) -> bool:
    """Neither quantised nor adapted: linear maps with a bias, of one width."""
    linears = [part for part in parts.values() if isinstance(part, nn.Module) and hasattr(part, "in_features")]
    width = parts["query"].in_features
    return (
        len(linears) == 6
        and all(type(linear) is nn.Linear and linear.bias is not None for linear in linears)
        and all(parts[name].out_features == width for name in ("query", "key", "value", "attended", "down"))
        and all(type(parts[name]) is nn.LayerNorm for name in ("attended_norm", "norm"))
    )


def close_enough(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> bool:
    """Equal up to rounding, which is measured against how much logits differ between texts."""
    spread = float(theirs.std(0).max())
    return float((ours - theirs).abs().max()) <= CLOSE[dtype] * spread


def mean_over_tokens(states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Returns the mean over each text's own tokens; None: none is padding."""
    if mask is None:
        return states.mean(1)
    weights = mask.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1).clamp(min=1)
