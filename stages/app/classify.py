"""Classifies texts without torch and transformers: `amalgam export --numpy` copies this file next to its arrays.

    python students/student-numpy/classify.py < texts.txt > labels.tsv

A program imports it: Classifier("students/student-numpy").predict(["the chef fried the onion"]).
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

ARRAYS = "arrays.safetensors"
AT_ONCE = 32
"""Texts whose features are in memory at once."""
MOST_WORDS, LONGEST_WORD = 100_000, 50
"""Words whose tokens stay in memory, and characters of the longest of them."""

Array = np.ndarray[Any, np.dtype[Any]]

_ADDED = r"\[[0-9A-Za-z_]+\]"  # as [SEP]
_MARK = r"!-/:-@\[-`{-~"  # ASCII punctuation
_WORDS: Callable[[str], list[str]] = re.compile(rf"{_ADDED}|[^ \t\r\n{_MARK}]+|[{_MARK}]").findall


class Classifier:
    """A static student: its folder has config.json, tokenizer.json and the arrays."""

    def __init__(self, folder: str | Path) -> None:
        names = json.loads((Path(folder) / "config.json").read_text("utf-8"))["id2label"]
        self.labels = [names[str(index)] for index in range(len(names))]
        facts = Path(folder) / "export.json"
        self.columns = json.loads(facts.read_text("utf-8")).get("text", []) if facts.is_file() else []
        tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))  # truncates as in the training
        self._ids = (Words if Words.suit(tokenizer) else Tokens)(tokenizer)
        arrays = load_file(Path(folder) / ARRAYS)
        vectors = np.pad(arrays["vectors"] * arrays["scales"][:, None], ((0, 1), (0, 0)))
        gap = len(vectors) - 1
        self._rows = np.append(arrays["rows"], gap).astype(np.int64)  # the last one, -1, is between texts
        self._before, here, self._after = (vectors @ weights for weights in arrays["convolution"])
        self._here = here + arrays["convolution_bias"]
        self._here[gap] = -np.inf  # all features are 0
        self._weights, self._bias = arrays["classifier"], arrays["classifier_bias"]

    def predict(self, texts: Sequence[Any]) -> list[tuple[str, float]]:
        """Returns the label of each text (or pair) and its probability."""
        logits = self.logits(texts)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = powers / powers.sum(axis=1, keepdims=True)
        return [(self.labels[row.argmax()], float(row.max())) for row in probabilities]

    def logits(self, texts: Sequence[Any]) -> Array:
        if isinstance(texts, str):  # else each character would be a text
            raise TypeError('give a list of texts: predict(["a text"])')
        if len(self.columns) > 1 and any(isinstance(text, str) for text in texts):
            raise ValueError(f"this student classifies pairs of texts ({' and '.join(self.columns)}), not single texts")
        if len(self.columns) == 1 and not all(isinstance(text, str) for text in texts):
            raise ValueError(f"this student classifies single texts ({self.columns[0]}), not pairs of texts")
        parts = [self._logits(texts[start : start + AT_ONCE]) for start in range(0, len(texts), AT_ONCE)]
        return np.concatenate([np.zeros((0, len(self.labels)), np.float32), *parts])

    def _logits(self, texts: Sequence[Any]) -> Array:
        """Computes all tokens at once, [tokens, width]: the texts follow each other, with a zero row after each."""
        tokens = self._ids(texts)
        rows = self._rows[[-1, *chain.from_iterable((*ids, -1) for ids in tokens), -1]]
        features = self._here[rows[1:-1]]
        features += self._before[rows[:-2]]
        features += self._after[rows[2:]]
        np.maximum(features, 0, out=features)
        ends = accumulate((len(ids) + 1 for ids in tokens), initial=0)
        each = [features[start:end] for start, end in pairwise(ends)]  # np.add.reduceat takes three times as long
        highest = np.array([np.maximum.reduce(tokens) for tokens in each])
        means = np.array([np.full(len(tokens), 1 / max(len(tokens) - 1, 1), np.float32) @ tokens for tokens in each])
        return np.hstack([highest, means]) @ self._weights + self._bias


class Tokens:
    """Returns the tokens of texts or pairs, truncated as in the training: of a pair the longer text first."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        truncation = tokenizer.truncation or {}
        self._limit, self._side = truncation.get("max_length", sys.maxsize), truncation.get("direction")
        tokenizer.no_truncation()  # its own needs gigabytes for a pair of long texts
        self._tokenizer = tokenizer

    def __call__(self, texts: Sequence[Any]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(list(texts))
        return [each.ids if len(each) <= self._limit else self._cut(each) for each in encoded]

    def _cut(self, encoding: Any) -> list[int]:
        parts = np.array([-1 if part is None else part for part in encoding.sequence_ids])
        kept = parts < 0  # special tokens
        first, second = (np.flatnonzero(parts == part) for part in (0, 1))
        room = self._limit - int(kept.sum())
        fewer = min(len(first), len(second), room // 2)
        sizes = (room - fewer, fewer) if len(first) > len(second) else (fewer, room - fewer)
        for part, size in zip((first, second), sizes, strict=True):
            kept[part[len(part) - size :] if self._side == "left" else part[:size]] = True
        return np.array(encoding.ids)[kept].tolist()


class Words(Tokens):
    """Returns the same tokens from a table of words, because texts share most of their words.

    A tokenizer of BERT divides texts at white space and punctuation first, so a word has the same tokens in each text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        words = ((word, id_) for word, id_ in tokenizer.get_vocab().items() if word.isascii() and word.isalnum())
        super().__init__(tokenizer)
        self._tokens = {word: [id_] for word, id_ in words if word == word.lower()}
        self._lowers = tokenizer.normalizer.lowercase
        around = tokenizer.encode("a")
        front = around.special_tokens_mask.index(0)
        self._before, self._after = around.ids[:front], around.ids[front + 1 :]
        self._most = self._limit - len(self._before) - len(self._after)

    @staticmethod
    def suit(tokenizer: Tokenizer) -> bool:
        parts = tokenizer.model, tokenizer.normalizer, tokenizer.pre_tokenizer
        is_bert = all(map(isinstance, parts, (WordPiece, BertNormalizer, BertPreTokenizer)))
        added = tokenizer.get_added_tokens_decoder().values()
        direction = (tokenizer.truncation or {}).get("direction", "right")
        return is_bert and direction == "right" and all(re.fullmatch(_ADDED, token.content) for token in added)

    def __call__(self, texts: Sequence[Any]) -> list[list[int]]:
        if not all(isinstance(text, str) for text in texts):
            return super().__call__(texts)
        return [self._of(text) for text in texts]

    def _of(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in _WORDS(text):
            ids += self._tokens.get(word) or self._new(word)
        return [*self._before, *ids[: self._most], *self._after]

    def _new(self, word: str) -> list[int]:
        lower = word.lower() if self._lowers and word.isascii() and word.isalnum() else word
        tokens = self._tokens.get(lower) or self._tokenizer.encode(word, add_special_tokens=False).ids
        if len(word) <= LONGEST_WORD and len(self._tokens) < MOST_WORDS:
            self._tokens[word] = tokens
        return tokens


def _lines() -> Iterator[list[str]]:
    while lines := [line.rstrip("\r\n") for line in islice(sys.stdin, AT_ONCE)]:
        yield lines


def _print(answers: Sequence[tuple[str, float]]) -> None:
    try:
        for label, probability in answers:
            print(label, f"{probability:.4f}", sep="\t")  # noqa: T201
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python writes the rest when it exits
        is_closed = isinstance(error, BrokenPipeError)  # by its reader, such as `head`
        sys.exit(None if is_closed else f"the labels cannot be written: {error.strerror}; use a disk with space")


def main() -> None:
    if len(sys.argv) > 1 or sys.stdin is None or sys.stdout is None:  # None: closed, as by `<&-`
        print(f"usage: python {sys.argv[0]} < texts.txt > labels.tsv", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    classifier = Classifier(Path(__file__).parent)
    if len(classifier.columns) > 1:
        pairs = f"pairs of texts ({' and '.join(classifier.columns)})"
        sys.exit(f'this student classifies {pairs}: import Classifier, and call predict([("first", "second")])')
    sys.stdin.reconfigure(encoding="utf-8-sig", errors="replace")  # type: ignore[union-attr]
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    for lines in _lines():
        _print(classifier.predict(lines))


if __name__ == "__main__":
    main()
