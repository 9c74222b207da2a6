"""Teachers' states are stored apart from their passes, and only missing ones are computed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from amalgam.data.keys import text_key
from amalgam.pipeline.console import Console
from amalgam.pipeline.execution.runner import update
from amalgam.stages.app.runs import open_run
from amalgam.stages.common.cached.load import states_of
from amalgam.stages.registry import STAGES
from amalgam.tests.stages.tiny_models import save_tiny
from amalgam.tests.workspaces import TEACHER_LABELS, TRAIN, Workspace, scale_weights, word_list, write_model

Array = NDArray[Any]
Keys = NDArray[np.bytes_]
POOLED = "objective.name=dfa"
TOKENS = (POOLED, "objective.states=tokens")


def states(workspace: Workspace) -> dict[str, int]:
    """Unit of states -> texts."""
    arrays = {}
    for path in (workspace.artifacts / "cache-features").glob("*/family.json"):
        if "states" in json.loads(path.read_text()):
            for unit in path.parent.glob("units/*.json"):
                arrays[f"{path.parent.name}/{unit.stem}"] = int(json.loads(unit.read_text())["facts"]["rows"])
    return arrays


def families(workspace: Workspace, grain: str) -> Mapping[str, Path]:
    """Teacher -> the folder of its states."""
    keys = {
        path.parent: json.loads(path.read_text())
        for path in (workspace.artifacts / "cache-features").glob("*/family.json")
    }
    return {key["teacher"].split()[-1]: folder for folder, key in keys.items() if key.get("states") == grain}


def test_states_are_computed_without_a_pass_and_only_for_methods_that_use_them(workspace: Workspace) -> None:
    assert "cache-features" not in workspace.plan()
    assert states(workspace) == {}
    with workspace.counting() as asked:
        workspace("train-student", POOLED)
    assert (asked[0].logits, asked[0].passes) == (0, 0)
    assert sorted(states(workspace).values()) == [TRAIN, TRAIN]
    assert workspace.stale(POOLED) == {"report"}


def test_appended_texts_alone_get_states(workspace: Workspace) -> None:
    for settings in ((POOLED,), TOKENS):
        workspace("train-student", *settings)
    before = states(workspace)
    rows = workspace.texts()
    workspace.write([*rows, *((f"{text} again", label) for text, label in rows[:7])])
    for settings in ((POOLED,), TOKENS):
        workspace("train-student", *settings)
    added = {unit: texts for unit, texts in states(workspace).items() if unit not in before}
    assert before.items() <= states(workspace).items()
    assert sorted(added.values()) == [7, 7, 7, 7]


def read_back(workspace: Workspace, keys: Keys) -> list[Array]:
    """Returns each teacher's states by token for the texts with these keys."""
    run = open_run(workspace.config, list(TOKENS), console=Console(quiet=True))
    update(STAGES, run, target="cache-features")
    return [states.take(np.arange(len(keys))) for states in states_of(run, keys)]


def test_states_that_lie_in_several_files_are_those_of_their_texts(workspace: Workspace, tmp_path: Path) -> None:
    workspace("train-student", *TOKENS)
    rows = workspace.texts()
    workspace.write([*((f"{text} again", label) for text, label in rows[:7]), *rows])
    keys = np.array([text_key((text,)) for text, _ in (*workspace.texts()[:20], *rows[-3:])], "S16")
    spread = read_back(workspace, keys)
    assert len(list(families(workspace, "tokens")["first"].glob("units/*.json"))) == 2
    for one, other in zip(spread, read_back(workspace.without_artifacts(tmp_path / "other"), keys), strict=True):
        np.testing.assert_allclose(one, other, atol=4e-3)


def test_another_encoder_of_the_same_depth_costs_no_states_and_another_depth_does(workspace: Workspace) -> None:
    workspace("train-student", POOLED)
    before = states(workspace)
    write_model(workspace.folder / "models/other", words=word_list(workspace), seed=7)
    workspace("train-student", POOLED, "student.encoder=./models/other")
    assert states(workspace) == before
    workspace("train-student", POOLED, "objective.blocks=2")
    assert len(states(workspace)) == 2 * len(before)


def test_teachers_of_different_depth_and_width_have_states_of_their_own_shape(fresh: Workspace) -> None:
    shape: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 64}
    labels = ["gardening", "law", "medicine", "music"]
    write_model(fresh.folder / "models/second", labels=labels, words=word_list(fresh), seed=2, **shape)
    fresh("train-student", POOLED, "objective.blocks=2")
    shapes = {
        name: {np.load(path, mmap_mode="r").shape[1:] for path in folder.glob("units/*/states.npy")}
        for name, folder in families(fresh, "pooled").items()
    }
    assert shapes == {"first": {(2, 32)}, "second": {(2, 48)}}


def test_a_teacher_that_tokenises_otherwise_is_refused_by_token_with_the_way_out_and_not_pooled(
    fresh: Workspace,
) -> None:
    labels = ["gardening", "law", "medicine", "music"]
    write_model(fresh.folder / "models/second", labels=labels, words=word_list(fresh)[::-1], seed=2)
    err = fresh.refusal(2, "train-student", *TOKENS)
    assert "./models/encoder" in err
    assert "objective.states=pooled" in err
    assert states(fresh) == {}
    fresh("train-student", POOLED)


def test_token_limits_that_differ_are_refused_by_token(fresh: Workspace) -> None:
    assert "student.max_tokens=32" in fresh.refusal(2, "train-student", *TOKENS, "student.max_tokens=16")


def test_an_encoder_that_tokenises_otherwise_is_refused_though_the_states_are_cached(workspace: Workspace) -> None:
    workspace("train-student", *TOKENS)
    write_model(workspace.folder / "models/other", words=word_list(workspace)[::-1], seed=7)
    assert "token" in workspace.refusal(2, "train-student", *TOKENS, "student.encoder=./models/other")


@pytest.mark.parametrize("settings", [(POOLED,), TOKENS, ("student.method=amalgam", "cache.passes=0")])
def test_states_that_are_too_large_for_the_cache_are_clipped_with_a_note(
    fresh: Workspace, settings: tuple[str, ...]
) -> None:
    scale_weights(fresh.folder / "models/first", "bert.encoder.layer.0.output.LayerNorm.weight", 1e5)
    fresh.edit("targets:\n  mode: soft\n", "")
    err = fresh("cache-features", *settings).err
    [(teacher, count)] = re.findall(r"note: teacher (.+): ([\d,]+) numbers were clipped in", err)
    kept = [np.load(path) for path in (fresh.artifacts / "cache-features").rglob("*.npy")]
    assert (teacher, int(count.replace(",", ""))) == ("first", sum(int((abs(part) == 65504).sum()) for part in kept))
    assert "65504" not in fresh("cache-features", *settings).err


def test_a_damaged_file_of_states_is_made_again_alone(workspace: Workspace) -> None:
    workspace("train-student", POOLED)
    path = next(families(workspace, "pooled")["first"].glob("units/*/states.npy"))
    before = path.read_bytes()
    path.write_bytes(before[:-4] + b"zzzz")
    workspace.refusal(1, "verify")
    workspace("train-student", POOLED, "student.seed=1")
    assert next(families(workspace, "pooled")["first"].glob("units/*/states.npy")).read_bytes() == before


def test_status_names_whose_states_are_kept(workspace: Workspace) -> None:
    workspace("train-student", POOLED)
    assert "first, second" in workspace("status").out


def test_an_encoder_decoder_is_a_teacher_and_the_student_s_encoder(fresh: Workspace) -> None:
    save_tiny(fresh.folder / "models/second", "t5", labels=TEACHER_LABELS["second"])
    fresh("run", "student.method=amalgam", "targets.mode=hard", "student.encoder=teacher:second")
    assert fresh("predict", "a text", "--json").json[0]["labels"]
    families = (fresh.artifacts / "cache-features").glob("*/family.json")
    assert "encoder" in {json.loads(path.read_text()).get("part") for path in families}
