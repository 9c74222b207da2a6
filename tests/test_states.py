"""Teachers' states at the front door: kept apart from their passes, computed once, and only where they are missing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amalgam.data.keys import text_key
from amalgam.pipeline.console import Console
from amalgam.pipeline.execution.runner import update
from amalgam.stages.app.session import open_run
from amalgam.stages.common.states.read import states_of
from amalgam.stages.registry import STAGES
from amalgam.tests.workshop import TRAIN, Shop, word_list, write_model

Array = NDArray[Any]
Keys = NDArray[np.bytes_]
POOLED = "objective.name=dfa"
TOKENS = (POOLED, "objective.states=tokens")


def states(shop: Shop) -> dict[str, int]:
    """Unit of states -> texts."""
    found = {}
    for path in (shop.artifacts / "cache-teachers").glob("*/key.json"):
        if "states" in json.loads(path.read_text()):
            for unit in path.parent.glob("units/*.json"):
                found[f"{path.parent.name}/{unit.stem}"] = int(json.loads(unit.read_text())["facts"]["rows"])
    return found


def families(shop: Shop, grain: str) -> Mapping[str, Path]:
    """Teacher -> the folder of its states."""
    keys = {
        path.parent: json.loads(path.read_text()) for path in (shop.artifacts / "cache-teachers").glob("*/key.json")
    }
    return {key["teacher"].split()[-1]: folder for folder, key in keys.items() if key.get("states") == grain}


def test_states_are_computed_without_a_pass_and_only_where_a_method_asks(shop: Shop) -> None:
    assert "cache-features" not in shop.plan()
    assert states(shop) == {}
    with shop.counting() as asked:
        shop("train-student", POOLED)
    assert (asked[0].logits, asked[0].passes) == (0, 0)
    assert sorted(states(shop).values()) == [TRAIN, TRAIN]
    assert shop.stale(POOLED) == {"report"}


def test_appended_texts_alone_get_states(shop: Shop) -> None:
    for said in ((POOLED,), TOKENS):
        shop("train-student", *said)
    before = states(shop)
    rows = shop.texts()
    shop.write([*rows, *((f"{text} again", label) for text, label in rows[:7])])
    for said in ((POOLED,), TOKENS):
        shop("train-student", *said)
    added = {unit: texts for unit, texts in states(shop).items() if unit not in before}
    assert before.items() <= states(shop).items()
    assert sorted(added.values()) == [7, 7, 7, 7]


def read_back(shop: Shop, keys: Keys) -> list[Array]:
    """Of each teacher, by token, for the texts with these keys."""
    _, run = open_run(shop.config, list(TOKENS), console=Console(quiet=True))
    update(STAGES, run, target="cache-features")
    return [states.take(np.arange(len(keys))) for states in states_of(run, keys)]


def test_states_that_lie_in_several_files_are_those_of_their_texts(shop: Shop, tmp_path: Path) -> None:
    shop("train-student", *TOKENS)
    rows = shop.texts()
    shop.write([*((f"{text} again", label) for text, label in rows[:7]), *rows])
    keys = np.array([text_key((text,)) for text, _ in (*shop.texts()[:20], *rows[-3:])], "S16")
    spread = read_back(shop, keys)
    assert len(list(families(shop, "tokens")["first"].glob("units/*.json"))) == 2
    for one, other in zip(spread, read_back(shop.without_artifacts(tmp_path / "other"), keys), strict=True):
        np.testing.assert_allclose(one, other, atol=4e-3)


def test_another_encoder_of_the_same_depth_costs_no_states_and_another_depth_does(shop: Shop) -> None:
    shop("train-student", POOLED)
    before = states(shop)
    write_model(shop.folder / "models/other", words=word_list(shop), seed=7)
    shop("train-student", POOLED, "student.encoder=./models/other")
    assert states(shop) == before
    shop("train-student", POOLED, "objective.blocks=2")
    assert len(states(shop)) == 2 * len(before)


def test_teachers_of_different_depth_and_width_have_states_of_their_own_shape(fresh: Shop) -> None:
    shape: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 64}
    labels = ["gardening", "law", "medicine", "music"]
    write_model(fresh.folder / "models/second", labels=labels, words=word_list(fresh), seed=2, **shape)
    fresh("train-student", POOLED, "objective.blocks=2")
    shapes = {
        name: {np.load(path, mmap_mode="r").shape[1:] for path in folder.glob("units/*/states.npy")}
        for name, folder in families(fresh, "pooled").items()
    }
    assert shapes == {"first": {(2, 32)}, "second": {(2, 48)}}


def test_a_teacher_that_tokenises_otherwise_is_refused_by_token_with_the_way_out_and_not_pooled(fresh: Shop) -> None:
    labels = ["gardening", "law", "medicine", "music"]
    write_model(fresh.folder / "models/second", labels=labels, words=word_list(fresh)[::-1], seed=2)
    said = fresh.tries("train-student", *TOKENS)
    assert said.code == 2
    assert "./models/encoder" in said.err
    assert "objective.states=pooled" in said.err
    assert states(fresh) == {}
    fresh("train-student", POOLED)


def test_token_limits_that_differ_are_refused_by_token(fresh: Shop) -> None:
    said = fresh.tries("train-student", *TOKENS, "student.max_tokens=16")
    assert said.code == 2
    assert "student.max_tokens=32" in said.err


def test_an_encoder_that_tokenises_otherwise_is_refused_though_the_states_are_cached(shop: Shop) -> None:
    shop("train-student", *TOKENS)
    write_model(shop.folder / "models/other", words=word_list(shop)[::-1], seed=7)
    said = shop.tries("train-student", *TOKENS, "student.encoder=./models/other")
    assert said.code == 2
    assert "token" in said.err


def test_a_damaged_file_of_states_is_made_again_alone(shop: Shop) -> None:
    shop("train-student", POOLED)
    path = next(families(shop, "pooled")["first"].glob("units/*/states.npy"))
    before = path.read_bytes()
    path.write_bytes(before[:-4] + b"zzzz")
    said = shop.tries("verify")
    assert said.code == 1
    shop("train-student", POOLED, "student.seed=1")
    assert next(families(shop, "pooled")["first"].glob("units/*/states.npy")).read_bytes() == before


def test_status_names_whose_states_are_kept(shop: Shop) -> None:
    shop("train-student", POOLED)
    assert "first, second" in shop("status").out
