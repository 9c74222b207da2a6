"""Searches pseudo embeddings that a teacher predicts as a class, by its gradient (AS-DFD, Ma et al. 2020).

They start as noise with the scale of the teacher's word embeddings. An adversary learns to predict a hidden embedding
from its neighbours, and the search makes it fail, which keeps the embeddings diverse. [B texts, T tokens, W width]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

from amalgam.pipeline.config.schema import PseudoEmbeddings
from amalgam.pipeline.errors import ExperimentError, ModelError, first_line
from amalgam.stages.generate.decoding import key64

if TYPE_CHECKING:
    from amalgam.stages.common.inference.teacher import Teacher


ADVERSARY_RATE = 1e-3

HEAD_WIDTH = 16


class Adversary(nn.Module):
    """A Transformer layer that predicts the embedding at a hidden position."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        heads = next(heads for heads in range(max(1, width // HEAD_WIDTH), 0, -1) if width % heads == 0)
        self.positions = nn.Parameter(torch.randn(tokens, width) * 0.1)
        self.hidden = nn.Parameter(torch.zeros(width))
        self.layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
        self.output = nn.Linear(width, width)

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the cosine distance of the predictions, 0 to 2; `hidden` is one position per text."""
        rows = torch.arange(len(embeddings), device=embeddings.device)
        masked = embeddings.clone()
        masked[rows, hidden] = self.hidden
        predicted = self.output(self.layer(masked + self.positions))[rows, hidden]
        return 1 - cosine_similarity(predicted, embeddings[rows, hidden], dim=-1)


class SpecialTokens:
    """The embeddings of the special tokens before and after a text."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        table: torch.Tensor = model.get_input_embeddings().weight.detach()
        ids = list(tokenizer("")["input_ids"])
        front = 1 if ids and ids[0] in {tokenizer.cls_token_id, tokenizer.bos_token_id} else 0
        self.before, self.after = table[ids[:front]], table[ids[front:]]

    def __len__(self) -> int:
        return len(self.before) + len(self.after)

    def __call__(self, embeddings: torch.Tensor) -> torch.Tensor:
        sides = [side.expand(len(embeddings), -1, -1).to(embeddings.device) for side in (self.before, self.after)]
        return torch.cat([sides[0], embeddings, sides[1]], dim=1)


def check_reads_embeddings(model: Any, special: SpecialTokens, *, name: str) -> None:
    """Refuses a model that does not read embeddings instead of tokens."""
    table = model.get_input_embeddings().weight.detach()
    try:
        with torch.no_grad():
            model(inputs_embeds=special(table[None, :1]))
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        what = f"{name} does not read embeddings instead of tokens: {first_line(error)}"
        raise ModelError(what, where="objective.name: as-dfd", fix="use another model, such as a BERT") from error


def search_embeddings(
    teacher: Teacher, label: int, config: PseudoEmbeddings, *, stop: Callable[[], None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns embeddings [count, T, W] without special tokens, and the teacher's logits [count, labels]."""
    model, special = teacher.model, SpecialTokens(teacher.model, teacher.tokenizer)
    if config.tokens + len(special) > teacher.limit:
        raise ExperimentError(
            f"teacher {teacher.name} reads {teacher.limit} tokens, special tokens included",
            where=f"pseudo_embeddings.tokens: {config.tokens}",
            fix=f"set pseudo_embeddings.tokens={teacher.limit - len(special)}",
        )
    check_reads_embeddings(model, special, name=f"teacher {teacher.name}")
    model.requires_grad_(False)  # a loaded teacher is never trained
    table = model.get_input_embeddings().weight.detach().float()
    labels = torch.full((config.count,), label, device=table.device)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(key64(config.seed, teacher.digest, label, 0) % 2**63)
        noise = torch.randn(config.count, config.tokens, table.shape[1]).to(table.device)
        embeddings = nn.Parameter(table.mean(0) + table.std(0) * noise)
        adversary = Adversary(table.shape[1], config.tokens).to(table.device)
        optimizer = torch.optim.Adam([embeddings], config.learning_rate)
        adversary_optimizer = torch.optim.Adam(adversary.parameters(), ADVERSARY_RATE)
        for _ in range(config.steps):  # the adversary learns to predict, then the embeddings to be unpredictable
            stop()
            hidden = torch.randint(config.tokens, (config.count,)).to(table.device)
            adversary_optimizer.zero_grad()
            adversary(embeddings.detach(), hidden).mean().backward()
            adversary_optimizer.step()
            optimizer.zero_grad()
            hard = adversary(embeddings, hidden).sum()
            logits = model(inputs_embeds=special(embeddings)).logits.float()
            loss = cross_entropy(logits, labels, reduction="sum") - config.adversarial * hard
            loss.backward(inputs=[embeddings])
            optimizer.step()
    with torch.no_grad():
        logits = model(inputs_embeds=special(embeddings)).logits.float()
    return embeddings.detach().cpu().contiguous(), logits.cpu().contiguous()


# ---- from the teacher's space to the student's

STARTS = ("\u2581", "\u0120")  # word-initial marks of sentencepiece and byte-level BPE

CONTINUES = "##"

REGULARIZATION = 1e-3
"""Weight of the identity (or of zero, if widths differ), relative to the mean square of the teacher's directions."""


def fit_projection(teacher: tuple[Any, Any], student: tuple[Any, Any], name: str) -> torch.Tensor:
    """Fits the linear map [teacher's width, student's width] of common tokens by regularised least squares."""
    table, student_table = (
        model.get_input_embeddings().weight.detach().cpu().double() for model, _ in (teacher, student)
    )
    words, student_words = _words(teacher[1]), _words(student[1])
    common, width, student_width = sorted(words.keys() & student_words.keys()), table.shape[1], student_table.shape[1]
    if len(common) < width:
        raise ModelError(
            f"teacher {name} and the student's encoder have {len(common)} tokens in common, too few to map "
            f"embeddings of width {width}",
            where="objective.name: as-dfd",
            fix="set student.encoder to an encoder of the same language, or to teacher:NAME",
        )
    inputs, outputs = table[[words[word] for word in common]], student_table[[student_words[word] for word in common]]
    square = inputs.T @ inputs
    strength = REGULARIZATION * square.diagonal().mean()
    eye = torch.eye(*square.shape, dtype=torch.float64)
    prior = eye if width == student_width else torch.zeros(width, student_width, dtype=torch.float64)
    projection: torch.Tensor = torch.linalg.solve(square + strength * eye, inputs.T @ outputs + strength * prior)
    return projection.float()


def _words(tokenizer: Any) -> dict[tuple[str, bool], int]:
    """Maps (lower-case token without marks, whether it starts a word) to its id, without special tokens.

    Of tokens that differ in case, the lower-case one is taken: a student without case has no other.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = set(tokenizer.all_special_tokens)
    tokens = {token: number for token, number in vocabulary.items() if token not in special}
    marked = any(token.startswith(STARTS) for token in tokens)
    words: dict[tuple[str, bool], int] = {}
    for token, number in sorted(tokens.items(), key=lambda item: (item[0] != item[0].lower(), item[0])):
        begins = token.startswith(STARTS) if marked else not token.startswith(CONTINUES)
        plain = token.lstrip("".join(STARTS)) if marked else token.removeprefix(CONTINUES)
        if plain:
            words.setdefault((plain.lower(), begins), number)
    return words
