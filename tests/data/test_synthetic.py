"""The embedded corpus is a pure function, its parts never share a text, and it is ambiguous but learnable."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from hashlib import blake2b
from itertools import combinations
from typing import Literal

from amalgam.data.demo_corpus import ANYWHERE, SHARED_WORDS, TOPICS, generate, mixture

SHARED = {word: topics for words in SHARED_WORDS.values() for word, topics in words.items()}
LABELS = sorted(TOPICS)
GROUPS = (LABELS[:2], LABELS[2:5], LABELS[5:])
PARTS: tuple[Literal["train", "validation", "test"], ...] = ("train", "validation", "test")


def test_the_same_arguments_give_the_same_texts_and_a_smaller_number_is_a_prefix() -> None:
    assert generate(50, 3) == generate(200, 3)[:50]
    assert generate(50, 3) != generate(50, 4)
    assert generate(50, 3, part="test") != generate(50, 3, part="train")


def test_the_texts_are_the_same_on_every_machine_and_python() -> None:
    rows = generate(500, 0)
    assert rows[7] == ("In the end, the old man underwrote the difficult debt.", "banking")
    assert blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest() == "b181221e59f72eafe0eb495f13a75159"


def test_there_are_eight_topics_and_texts_come_evenly() -> None:
    assert len(LABELS) == 8
    counts = Counter(label for _, label in generate(804, 1))
    assert set(counts) == set(LABELS)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_texts_are_distinct_and_no_part_shares_a_text_with_another_whatever_the_seeds() -> None:
    texts: dict[str, set[str]] = defaultdict(set)
    for part in PARTS:
        for seed in (0, 7):
            drawn = [text for text, _ in generate(500, seed, part)]
            assert len(set(drawn)) == 500
            texts[part].update(drawn)
    for one, other in combinations(PARTS, 2):
        assert not texts[one] & texts[other]


def test_texts_are_sentences_of_eight_to_thirty_five_words() -> None:
    sentence = re.compile(r"[A-Z][a-z]+([ ,-]+[A-Za-z]+)*\.")
    for text, _ in generate(1000, 2):
        assert 8 <= len(text.split()) <= 35, text
        assert all(sentence.fullmatch(part) for part in re.split(r"(?<=\.) ", text)), text


def test_no_person_is_joined_with_themselves() -> None:
    for text, _ in generate(2000, 2):
        assert not re.search(r"\b([a-z]+) and the \1\b", text), text


def test_no_two_topics_share_their_own_words() -> None:
    owners = Counter(
        word
        for fields in (*TOPICS.values(), ANYWHERE)
        for word in {*fields["people"], *fields["deeds"], *fields["things"], *fields["places"]}
    )
    owners.update(list(SHARED))
    assert [word for word, count in owners.items() if count > 1] == []


def test_every_shared_word_sets_label_groups_against_each_other() -> None:
    for word, sharing in SHARED.items():
        assert set(sharing) <= set(LABELS), word
        assert sum(any(topic in sharing for topic in group) for group in GROUPS) >= 2, word


def test_every_pair_of_groups_and_every_topic_has_rivals() -> None:
    rivals = Counter(frozenset(pair) for sharing in SHARED.values() for pair in combinations(sharing, 2))
    for one, other in combinations(GROUPS, 2):
        assert sum(rivals[frozenset((left, right))] for left in one for right in other) >= 20
    for topic in LABELS:
        assert sum(count for pair, count in rivals.items() if topic in pair) >= 20


def test_texts_are_ambiguous_but_learnable() -> None:
    """Word counts alone name most topics of unseen texts, and no counting names them all."""
    accuracy = _naive_bayes(generate(4000, 0), generate(1000, 0, "test"))
    assert 0.85 < accuracy < 0.97


def _naive_bayes(train: list[tuple[str, str]], test: list[tuple[str, str]]) -> float:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for text, label in train:
        counts[label].update(_tokens(text))
    vocabulary = {word for counter in counts.values() for word in counter}
    totals = {label: counter.total() + len(vocabulary) for label, counter in counts.items()}

    def score(text: str, label: str) -> float:
        return sum(math.log((counts[label][word] + 1) / totals[label]) for word in _tokens(text))

    right = sum(max(LABELS, key=lambda label: score(text, label)) == gold for text, gold in test)
    return right / len(test)


def _tokens(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


# ---- general texts


def alike(texts: list[str]) -> float:
    """Of pairs of words in one text that are each of one topic alone, the share that are of the same."""
    owner = {
        item: topic
        for topic, own in TOPICS.items()
        for item in (*own["people"], *own["deeds"], *own["things"])
        if item not in SHARED
    }
    pattern = re.compile(r"\b(" + "|".join(sorted(map(re.escape, owner), key=len, reverse=True)) + r")\b")
    topics = [[owner[word] for word in pattern.findall(text.lower())] for text in texts]
    pairs = [one == other for topics_in in topics for one, other in combinations(topics_in, 2)]
    return sum(pairs) / len(pairs)


def test_general_texts_are_seeded_and_a_smaller_number_is_a_prefix() -> None:
    assert mixture(50, 3) == mixture(200, 3)[:50]
    assert mixture(50, 3) != mixture(50, 4)


def test_general_texts_do_not_reveal_topics() -> None:
    assert alike([text for text, _ in generate(1500, 0)]) > 0.6
    assert alike(mixture(1500, 0)) < 0.2  # one in eight by chance


def test_general_texts_have_every_word_of_every_topic() -> None:
    text = " ".join(mixture(8000, 0)).lower()
    missing = [item for own in TOPICS.values() for item in (*own["people"], *own["things"]) if item not in text]
    assert missing == []


def test_no_general_text_is_a_text_of_the_test_part() -> None:
    assert set(mixture(3000, 0)).isdisjoint(text for text, _ in generate(1000, 0, "test"))
