"""How a student reads embeddings of a teacher's space: by the linear map that leads common tokens to its own.

The map is fitted once, by least squares on the two tables of word embeddings, and held: what the student learns on
mapped embeddings it then knows of its own words. Where both have one space the map is next to the identity.
"""

from __future__ import annotations

from typing import Any

import torch

from amalgam.pipeline.errors import ModelError

STARTS = ("\u2581", "\u0120")  # what sentencepiece and byte-level BPE put before a word

CONTINUES = "##"

HELD = 1e-3
"""Of the mean square of the teacher's directions: how strongly the map is held to the identity, or to nothing."""


def fitted(teacher: tuple[Any, Any], student: tuple[Any, Any], name: str) -> torch.Tensor:
    """[teacher's width, student's width], from (model, tokenizer) of both."""
    (known, its), (new, own) = teacher, student
    one = known.get_input_embeddings().weight.detach().double().cpu()
    other = new.get_input_embeddings().weight.detach().double().cpu()
    theirs, mine = _words(its), _words(own)
    common = sorted(theirs.keys() & mine.keys())
    if len(common) < one.shape[1]:
        raise ModelError(
            f"teacher {name} and the student's encoder have {len(common)} tokens in common, too few to lead "
            f"embeddings of width {one.shape[1]} from one to the other",
            where="objective.name: as-dfd",
            fix="an encoder of the same language, or one that is a teacher: student.encoder=teacher:NAME",
        )
    given, wanted = one[[theirs[word] for word in common]], other[[mine[word] for word in common]]
    square = given.T @ given
    held = HELD * square.diagonal().mean()
    eye = torch.eye(*square.shape, dtype=torch.float64)
    start = eye if one.shape[1] == other.shape[1] else torch.zeros(one.shape[1], other.shape[1], dtype=torch.float64)
    found: torch.Tensor = torch.linalg.solve(square + held * eye, given.T @ wanted + held * start).float()
    return found


def _words(tokenizer: Any) -> dict[tuple[str, bool], int]:
    """(token without marks, lower case; whether it begins a word) -> id, special tokens left out."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = set(tokenizer.all_special_tokens)
    tokens = {token: number for token, number in vocabulary.items() if token not in special}
    marked = any(token.startswith(STARTS) for token in tokens)
    found: dict[tuple[str, bool], int] = {}
    for token, number in sorted(tokens.items()):
        begins = token.startswith(STARTS) if marked else not token.startswith(CONTINUES)
        plain = token.lstrip("".join(STARTS)) if marked else token.removeprefix(CONTINUES)
        if plain:
            found.setdefault((plain.lower(), begins), number)
    return found
