"""Recombined texts are made of the words of others, and a key determines each."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

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
    assert any(" ".join(words) not in TEXTS for words in made)


def test_short_texts_keep_their_spaces() -> None:
    recombiner = Recombiner(["red shoes", "blue hat", "cheap flights", "shoes"])
    assert {word for place in range(40) for word in recombiner.text(place, place).split()} <= set(recombiner.words)
