"""Recombined texts are made of the words of others, and a key determines each."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from amalgam.stages.generate.recombined import Recombiner

TEXTS = ["the chef fried the onion", "the court heard the banker", "a nurse read the chart", "a banker fried an egg"]


def test_a_key_determines_the_text_and_other_keys_give_others() -> None:
    first, second = Recombiner(TEXTS), Recombiner(TEXTS)
    made = [first.text(place, place) for place in range(200)]
    assert made == [second.text(place, place) for place in range(200)]
    assert len(set(made)) > 60


def test_no_text_is_empty_or_longer_than_two_texts() -> None:
    recombiner = Recombiner(TEXTS)
    lengths = [len(recombiner.text(place, place).split()) for place in range(500)]
    assert min(lengths) > 0
    assert max(lengths) <= 10


def test_texts_without_spaces_are_recombined_by_characters() -> None:
    recombiner = Recombiner(["今天天气很好", "明天会下雨吗", "我今天很高兴"])
    made = {recombiner.text(place, place) for place in range(60)}
    assert not any(" " in text for text in made)
    assert len(made) > 20


def test_a_continued_text_has_only_pairs_of_words_that_stand_together_somewhere() -> None:
    recombiner, random = Recombiner(TEXTS), np.random.default_rng(0)
    pairs = {pair for words in recombiner.texts for pair in pairwise(words)}
    made = [recombiner.continued(words, random) for words in recombiner.texts * 20]
    assert {pair for words in made for pair in pairwise(words)} <= pairs
    assert any(not any(text.startswith(" ".join(words)) for text in TEXTS) for words in made)


def test_a_joined_text_is_the_first_words_of_one_and_the_last_words_of_another() -> None:
    recombiner, random = Recombiner(["a b c", "d e f"]), np.random.default_rng(0)
    made = {" ".join(recombiner.joined(["a", "b", "c"], random)) for _ in range(200)}
    ends = [*(("a b c"[start:]) for start in (0, 2, 4)), *(("d e f"[start:]) for start in (0, 2, 4))]
    assert made == {f"{start} {end}" for start in ("a", "a b", "a b c") for end in ends}


def test_a_quarter_of_the_words_are_replaced_and_half_of_those_between_the_same_neighbours() -> None:
    words, random = [f"w{place}" for place in range(4000)], np.random.default_rng(0)
    other = [word if place % 2 else f"x{place}" for place, word in enumerate(words)]
    recombiner = Recombiner([" ".join(words), " ".join(other)])
    replaced = recombiner.replaced(words, random)
    assert sum(new != word for new, word in zip(replaced, words, strict=True)) / 4000 == pytest.approx(0.25, abs=0.03)
    between = recombiner.replaced_between(words, random)  # a word is one of the two between its neighbours
    assert sum(new != word for new, word in zip(between, words, strict=True)) / 2000 == pytest.approx(0.25, abs=0.05)


def test_short_texts_keep_their_spaces() -> None:
    recombiner = Recombiner(["red shoes", "blue hat", "cheap flights", "shoes"])
    assert {word for place in range(40) for word in recombiner.text(place, place).split()} <= set(recombiner.words)
