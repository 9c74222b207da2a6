"""The texts that Python gives to `Experiment.predict`."""

from __future__ import annotations

from typing import Any

import pytest

from amalgam.pipeline.errors import DataError
from amalgam.stages.app.frames import checked_texts


@pytest.mark.parametrize(
    ("texts", "piece"),
    [
        ("abc", 'predict(["a text"])'),
        (b"abc", "list of texts"),
        (7, "list of texts"),
        ({"text": ["a"]}, 'frame["text"]'),
        ([None], "texts[0]"),
        (["a", 1], "texts[1]"),
        (["a", float("nan")], "nan is no text"),
        ([""], "empty"),
        (["a", " \n"], "texts[1]"),
        (["a\ud800"], "surrogate"),
        (["a", ("b", "c")], "texts[1]"),
        ([("a", None)], "None is no text"),
        ([("a", "b", "c")], "3 texts"),
        ([()], "0 texts"),
    ],
)
def test_texts_from_python_are_checked(texts: Any, piece: str) -> None:
    with pytest.raises(DataError) as refused:
        checked_texts(texts)
    assert piece in str(refused.value)


def test_a_frame_of_pairs_is_refused_with_the_two_columns() -> None:
    with pytest.raises(DataError) as refused:
        checked_texts({"premise": ["a"], "hypothesis": ["b"]}, ("premise", "hypothesis"))
    assert (
        refused.value.fix == 'pass pairs of texts: experiment.predict(list(zip(frame["premise"], frame["hypothesis"])))'
    )


def test_texts_from_python_may_be_any_column() -> None:
    import numpy as np
    import polars as pl

    assert checked_texts(np.array(["a", "b"])) == checked_texts(pl.Series(["a", "b"])) == [("a",), ("b",)]
    assert checked_texts(iter([["a", "b"]])) == [("a", "b")]
    assert checked_texts([]) == []
