"""Keys distinguish texts, buckets divide them, and nothing printed can harm a terminal."""

from __future__ import annotations

import subprocess
import sys
import time
from hashlib import blake2b

import pytest

from amalgam.data.keys import (
    bits_for,
    label_notes,
    overlaps,
    prefix_name,
    shown,
    shown_names,
    text_key,
    union_of,
)
from amalgam.pipeline.config.schema import Corpus


def test_the_key_of_a_text_never_changes() -> None:
    assert text_key(["hello"]).hex() == "75abcde22a0c83a399870449cf0a47dc"
    assert text_key(["hello"]) == blake2b(bytes([5, *bytes(7)]) + b"hello", digest_size=16).digest()


def test_fields_are_kept_apart() -> None:
    assert len({text_key(fields) for fields in (("a", "b"), ("ab",), ("a", "b", ""), ("", "ab"))}) == 4


def test_a_name_that_a_list_would_tear_apart_is_quoted() -> None:
    assert shown_names(["returns, swaps", " mail ", "it's", "a b", ""]) == '"returns, swaps", " mail ", it\'s, a b, ""'
    assert shown_names(["a,b", "c", "d"], most=1) == '"a,b" and 2 more'
    [note] = label_notes({"first": ["Returns, swaps"], "second": ["returns, swaps"]})
    assert ': "Returns, swaps" and "returns, swaps"; to' in note


def test_labels_of_two_teachers_that_look_the_same_are_noted_with_the_reason() -> None:
    [note] = label_notes({"first": ["caf\u00e9", "tea"], "second": ["cafe\u0301", "milk"]})
    assert "(the same name with accents in Unicode NFC and NFD)" in note


def test_half_a_character_is_no_text() -> None:
    with pytest.raises(UnicodeEncodeError):
        text_key(["\ud83d"])


def test_a_prefix_has_as_many_digits_as_bits() -> None:
    bits = 0b011011111
    assert [prefix_name(bits >> (9 - size), size) for size in (0, 1, 4, 9)] == ["all", "0", "0110", "011011111"]


@pytest.mark.parametrize(
    ("rows", "bits"), [(0, 0), (1, 0), (512, 0), (513, 1), (1024, 1), (1025, 2), (1_000_000, 9), (10**9, 13)]
)
def test_small_buckets_hold_about_512_rows_and_large_ones_2048(rows: int, bits: int) -> None:
    assert bits_for(rows) == bits


def test_more_rows_never_have_fewer_buckets() -> None:
    bits = [bits_for(rows) for rows in range(1, 300_000, 7)]
    assert bits == sorted(bits)


def test_buckets_overlap_where_one_holds_the_other() -> None:
    assert overlaps("all", "01")
    assert overlaps("01", "0110")
    assert overlaps("0110", "01")
    assert not overlaps("0111", "0110")


def test_labels_cost_time_by_their_number_and_not_by_its_square() -> None:
    labels, began = [f"label {number}" for number in range(60_000)], time.process_time()
    assert Corpus(labels=labels).labels == labels
    owners = union_of({"first": labels[:40_000], "second": labels[20_000:]}).owners
    assert [owners[place] for place in (0, 30_000, 59_999)] == [["first"], ["first", "second"], ["second"]]
    assert time.process_time() - began < 10  # squares took 100 s


def test_a_message_shows_text_on_one_harmless_line() -> None:
    assert shown("a\x1b[31m\r\n\x00\u202eb\udce9") == r"a\x1b[31m\r\n\x00\u202eb\xe9"
    assert shown("é" * 80) == "é" * 80
    assert shown("x" * 81) == "x" * 77 + "..."
    assert len(shown("\n" * 1000)) == 80


def test_keys_are_made_without_the_libraries_that_take_long_to_load() -> None:
    code = (
        "import sys, amalgam.data.demo_corpus, amalgam.data.keys, amalgam.data.parquet, amalgam.data.rows;"
        "print(sorted({'numpy', 'pyarrow', 'polars', 'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
