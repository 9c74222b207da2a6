"""Length, repetition and nearness to earlier texts, against cases counted by hand."""

from __future__ import annotations

from collections import Counter
from time import process_time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from amalgam.pipeline.config.schema import Generate
from amalgam.stages.common.corpus import generated_part
from amalgam.stages.generate import texts
from amalgam.stages.generate.requests import uninformative_label
from amalgam.stages.generate.texts import qualities


def test_repetition_is_the_share_of_sequences_that_a_text_had_before() -> None:
    fresh, looped, short, empty = qualities(["a b c d e", "the cat the cat the cat", "so so", ""])
    assert fresh.repetition == 0
    assert looped.repetition == 1 - 2 / 4
    assert (short.repetition, short.words) == (0, 2)
    assert (empty.words, empty.repetition, empty.near_duplicate) == (0, 0, 0)


def test_a_loop_of_one_word_repeats_nearly_everything() -> None:
    [quality] = qualities(["no " * 50])
    assert quality.repetition == pytest.approx(1 - 1 / 48)


def test_nearness_is_the_largest_share_of_common_sequences_with_an_earlier_text() -> None:
    first, copy, near, far = qualities(["a b c d e f", "A b c d E f", "a b c d x y", "one two three four"])
    assert first.near_duplicate == 0
    assert copy.near_duplicate == 1
    assert near.near_duplicate == 2 / 6  # abc and bcd, of abc bcd cde def and cdx dxy
    assert far.near_duplicate == 0


def test_each_character_of_a_script_without_spaces_is_a_word() -> None:
    first, near, looped, mixed = qualities(["今天天气很好", "今天天气不好", "很好很好很好", "iPhone 15 很好"])
    assert (first.words, first.repetition) == (6, 0)
    assert near.near_duplicate == 2 / 6
    assert looped.repetition == 1 - 2 / 4
    assert mixed.words == 4
    assert [quality.words for quality in qualities(["アイウエオ。", "ｱｲｳｴｵ｡", "한국어 ﾡﾢ"])] == [6, 6, 2]


def test_more_texts_change_nothing_of_the_earlier_ones() -> None:
    texts = [f"w{i % 3} w{i % 4} w{i % 5} w{i % 2} end" for i in range(40)]
    assert qualities(texts)[:25] == qualities(texts[:25])


def test_of_equal_texts_the_first_that_passes_the_other_filters_is_kept() -> None:
    texts = ["a b c d e", "a b c d e", "A b c d e", "a b c d x", "a b c d e", "a b c d x"]
    columns = {"text": texts, "class_probability": [0.1, 0.9, 0.9, 0.1, 0.9, 0.9]}
    nearness = [quality.near_duplicate for quality in qualities(texts)]
    table = pa.table({**columns, "near_duplicate": nearness, "words": [5] * 6, "repetition": [0] * 6, "draw": [0] * 6})
    settings = Generate(source="random-words", max_duplicate=0.6)
    own, filters = generated_part(table, settings, "train")
    kept = np.logical_and.reduce(list(filters.values()))
    assert (own.num_rows, kept.tolist()) == (6, [False, True, False, False, False, True])


def test_texts_of_a_script_without_spaces_are_equal_with_other_spaces() -> None:
    texts = ["今天天气很好", "今天 天气 很好"]
    nearness = [quality.near_duplicate for quality in qualities(texts)]
    columns = {"text": texts, "class_probability": [0.1, 0.9], "near_duplicate": nearness}
    table = pa.table({**columns, "words": [6] * 2, "repetition": [0] * 2, "draw": [0] * 2})
    settings = Generate(source="random-words", max_duplicate=0.6, min_class_probability=0.5)
    filters = generated_part(table, settings, "train")[1]
    assert np.logical_and.reduce(list(filters.values())).tolist() == [False, True]


def test_ten_thousand_copies_cost_little() -> None:
    rows_ = qualities(["all the very same words " * 10] * 10_000)
    assert {one.near_duplicate for one in rows_[1:]} == {1}


def test_texts_with_one_opening_cost_little_more_than_others() -> None:
    """The prompt's openings recur in most texts, and each text is compared with all that share one."""
    count = 6000

    def seconds(opening: str) -> float:
        texts = [
            opening + " ".join(f"w{(number * 7919 + place) % 9973}x{number}" for place in range(20))
            for number in range(count)
        ]

        def once() -> float:
            began = process_time()
            qualities(texts)
            return process_time() - began

        return min(once() for _ in range(2))  # on a busy machine one may take twice as long

    began = process_time()
    for _ in range(count // 10):
        Counter(range(count))
    in_python = 15 * (process_time() - began)  # for each text, three n-grams of half of the texts on average
    assert seconds("in this paper we present ") - seconds("") < in_python / 2


def test_random_words_of_byte_level_tokens_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.train_from_iterator(["el día sílaba título"] * 5, trainers.BpeTrainer(vocab_size=600))
    monkeypatch.setattr(texts, "load_tokenizer", lambda _: PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    monkeypatch.setattr(texts, "SMALLEST_VOCABULARY", 1)
    teacher: Any = SimpleNamespace(files=None, name="first")
    assert {"el", "día", "sílaba", "título"} <= set(texts.vocabulary_words(teacher))


@pytest.mark.parametrize("label", ["LABEL_0", "7", "c3", "class 12", "A", "--"])
def test_some_labels_are_uninformative_labels(label: str) -> None:
    assert uninformative_label(label)


@pytest.mark.parametrize("label", ["Sports", "Sci/Tech", "card_arrival", "5 stars", "Бизнес", "no"])
def test_others_are(label: str) -> None:
    assert not uninformative_label(label)
