"""Pseudo embeddings that a teacher takes for a class, found by its gradient (AS-DFD, Ma et al. 2020).

They start as noise of the size of the teacher's word embeddings. An adversary learns beside them to guess a hidden one
from those around it, and they are made hard to guess, so that they do not all become one. [B texts, T tokens, W width]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

from amalgam.pipeline.config.schema import PseudoEmbeddings
from amalgam.pipeline.errors import ExperimentError
from amalgam.stages.generate.lazy_sampling import key64

if TYPE_CHECKING:
    from amalgam.stages.common.inference.teacher import Teacher


ADVERSARY_RATE = 1e-3

HEAD_WIDTH = 16


class Adversary(nn.Module):
    """One Transformer layer that guesses what stands in a hidden place."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        heads = next(heads for heads in range(max(1, width // HEAD_WIDTH), 0, -1) if width % heads == 0)
        self.places = nn.Parameter(torch.randn(tokens, width) * 0.1)
        self.hidden = nn.Parameter(torch.zeros(width))
        self.layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
        self.guess = nn.Linear(width, width)

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """How far the guesses are from what stands there, 0 to 2; `hidden`: a place for each text."""
        rows = torch.arange(len(embeddings), device=embeddings.device)
        seen = embeddings.clone()
        seen[rows, hidden] = self.hidden
        guessed = self.guess(self.layer(seen + self.places))[rows, hidden]
        return 1 - cosine_similarity(guessed, embeddings[rows, hidden], dim=-1)


class Frame:
    """The special tokens that a tokenizer puts around a text, as the model's own embeddings."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        table: torch.Tensor = model.get_input_embeddings().weight.detach()
        around = list(tokenizer("")["input_ids"])
        front = 1 if around and around[0] in {tokenizer.cls_token_id, tokenizer.bos_token_id} else 0
        self.before, self.after = table[around[:front]], table[around[front:]]

    def __len__(self) -> int:
        return len(self.before) + len(self.after)

    def __call__(self, embeddings: torch.Tensor) -> torch.Tensor:
        sides = [side.expand(len(embeddings), -1, -1).to(embeddings.device) for side in (self.before, self.after)]
        return torch.cat([sides[0], embeddings, sides[1]], dim=1)


def guess(
    teacher: Teacher, label: int, said: PseudoEmbeddings, *, stop: Callable[[], None] = lambda: None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[count, T, W] without special tokens, and what the teacher makes of them: logits [count, labels]."""
    model, frame = teacher.model, Frame(teacher.model, teacher.tokenizer)
    if said.tokens + len(frame) > teacher.limit:
        raise ExperimentError(
            f"teacher {teacher.name} reads {teacher.limit} tokens, special ones included",
            where=f"embeddings.tokens: {said.tokens}",
            fix=f"pseudo_embeddings.tokens={teacher.limit - len(frame)}",
        )
    table = model.get_input_embeddings().weight.detach().float()
    wanted = torch.full((said.count,), label, device=table.device)
    frozen = [weight for weight in model.parameters() if weight.requires_grad]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(key64(said.seed, teacher.digest, label, 0) % 2**63)
        noise = torch.randn(said.count, said.tokens, table.shape[1]).to(table.device)
        embeddings = nn.Parameter(table.mean(0) + table.std(0) * noise)
        adversary = Adversary(table.shape[1], said.tokens).to(table.device)
        try:
            _freeze(frozen, fixed=True)
            _search(lambda: model(inputs_embeds=frame(embeddings)).logits, embeddings, adversary, wanted, said, stop)
        finally:
            _freeze(frozen, fixed=False)
    with torch.no_grad():
        logits = model(inputs_embeds=frame(embeddings)).logits.float()
    return embeddings.detach().cpu().contiguous(), logits.cpu().contiguous()


def _search(  # noqa: PLR0913 - what is moved, by what, towards what
    asked: Callable[[], torch.Tensor],
    embeddings: nn.Parameter,
    adversary: Adversary,
    wanted: torch.Tensor,
    said: PseudoEmbeddings,
    stop: Callable[[], None],
) -> None:
    """Turn by turn: the adversary learns to guess, then embeddings learn the class and to be hard to guess."""
    mine = torch.optim.Adam([embeddings], said.learning_rate)
    its = torch.optim.Adam(adversary.parameters(), ADVERSARY_RATE)
    for _ in range(said.steps):
        stop()
        hidden = torch.randint(said.tokens, (said.count,)).to(embeddings.device)
        its.zero_grad()
        adversary(embeddings.detach(), hidden).mean().backward()
        its.step()
        mine.zero_grad()
        hard = adversary(embeddings, hidden).sum()
        loss = cross_entropy(asked().float(), wanted, reduction="sum") - said.adversarial * hard
        loss.backward(inputs=[embeddings])
        mine.step()


def _freeze(weights: list[nn.Parameter], *, fixed: bool) -> None:
    for weight in weights:
        weight.requires_grad_(not fixed)
