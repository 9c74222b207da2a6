"""Numbers that a fixed teacher gives. If they move, caches written by older versions hold other numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from amalgam.data.keys import text_key
from amalgam.tests.workspaces import Workspace, new_workspace, write_model, write_texts

CHANGED = "results changed: raise ENGINE (stages/common/cached/coverage.py) or the stage's VERSION, then these numbers"
TEXTS = [("the chef fried the onion", "cooking"), ("the judge read the contract to the banker", "law")]
WORDS = sorted({word for text, _ in TEXTS for word in text.split()})
# A key is blake2b-128 of the text; the rows below are in the order of the keys.
KEYS = ["3c8bf8d1a4e9b22aebc8f119b04cb582", "7c4abac54c695ff9908170e91bbadaaf"]
LOGITS = {
    "first": [[-0.707002, 0.747809], [-0.525754, 0.078345]],
    "second": [[-0.062845, -0.321923, -0.470376], [-0.115920, -0.357157, -0.381853]],
}
# Two passes of keyed dropout, one after the other; the tolerance is wider because of fp16.
PASSES = {
    "first": [[-2.445312, 0.680176, -0.794434, -0.650391], [-0.793457, -0.011467, -2.042969, 0.525391]],
    "second": [
        [1.010742, -0.084534, 0.516602, -0.711426, 0.290039, -2.753906],
        [-0.381836, -0.752441, -1.564453, -1.259766, 0.347168, -2.695312],
    ],
}
# The union is cooking, music, law, banking; the last number is the text's weight.
TARGETS = {
    "soft": [[0.123062, 0.622644, 0.143526, 0.110768, 0.124002], [0.228660, 0.524369, 0.138309, 0.108663, 0.121191]],
    "hard": [[0.189262, 0.810738, 0.0, 0.0, 0.124002], [0.353406, 0.646594, 0.0, 0.0, 0.121191]],
    "vanilla-kd": [[0.100758, 0.559272, 0.191882, 0.148087, 1.0], [0.149822, 0.447125, 0.225717, 0.177336, 1.0]],
}
# The teachers' weights of the default method on the first texts, and the weights of the kinds of evidence.
WEIGHTS = [[0.004681, 0.995319], [0.939357, 0.060643], [0.000001, 0.999999], [0.305330, 0.694670]]
KINDS = {"answers": 0.218, "states": 0.2572, "names": 0.5248}


def fixed_model(folder: Path, phase: float) -> None:
    """Weights from a formula, without a random number generator, and without a library's version in its digest."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    for place, name in enumerate(sorted(weights)):
        count = torch.arange(weights[name].numel(), dtype=torch.float64)
        values = 0.4 * torch.sin(phase + 0.7 * place + 1.3 * count + 0.01 * count**2)
        values += 1.0 if name.endswith("LayerNorm.weight") else 0.0
        weights[name] = values.reshape(weights[name].shape).float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = folder / "config.json"
    config.write_text(re.sub(r'("transformers_version": )"[^"]*"', r'\1"5"', config.read_text("utf-8")), "utf-8")


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = new_workspace(tmp_path_factory.mktemp("golden") / "workspace")
    for name, labels, phase in (("first", ["cooking", "music"], 0.1), ("second", ["law", "banking", "music"], 0.6)):
        write_model(workspace.folder / "models" / name, labels=labels, words=WORDS, seed=0)
        fixed_model(workspace.folder / "models" / name, phase)
    write_texts(workspace.folder / "texts/train.csv", TEXTS)
    workspace.edit("  test: texts/test.csv\n", "")
    workspace.edit("passes: 4", "passes: 2")
    workspace("cache-teachers")
    return workspace


def cached(workspace: Workspace, column: str) -> dict[str, list[list[float]]]:
    by_teacher = {}
    for path in workspace.units():
        name = "first" if '"teacher": "first"' in (path.parents[1] / "family.json").read_text() else "second"
        by_teacher[name] = pq.read_table(path).column(column).to_pylist()
    return by_teacher


def test_keys_are_what_they_were() -> None:
    assert sorted(text_key((text,)).hex() for text, _ in TEXTS) == KEYS, CHANGED


@pytest.mark.parametrize("teacher", LOGITS)
def test_logits_are_what_they_were(golden: Workspace, teacher: str) -> None:
    for actual, wanted in zip(cached(golden, "logits")[teacher], LOGITS[teacher], strict=True):
        assert actual == pytest.approx(wanted, abs=1e-4), CHANGED


@pytest.mark.parametrize("teacher", PASSES)
def test_passes_of_keyed_dropout_are_what_they_were(golden: Workspace, teacher: str) -> None:
    for actual, wanted in zip(cached(golden, "passes")[teacher], PASSES[teacher], strict=True):
        assert actual == pytest.approx(wanted, abs=4e-3), CHANGED


@pytest.mark.parametrize("mode", TARGETS)
def test_targets_are_what_they_were(golden: Workspace, mode: str) -> None:
    golden("build-targets", f"targets.mode={mode}")
    actual = [[*target, weight] for _, (target, weight) in sorted(golden.targets().items())]
    for row, wanted in zip(actual, TARGETS[mode], strict=True):
        assert row == pytest.approx(wanted, abs=1e-4), CHANGED


def test_weights_of_the_default_method_are_what_they_were(tmp_path: Path) -> None:
    workspace = new_workspace(tmp_path / "workspace")
    for name, labels, phase in (("first", ["chef", "onion"], 0.1), ("second", ["judge", "banker"], 0.6)):
        write_model(workspace.folder / "models" / name, labels=labels, words=WORDS, seed=0)
        fixed_model(workspace.folder / "models" / name, phase)
    places = [[i * i + 3 * i * j + j * j + i % 2 * 5 for j in range(3 + i % 4)] for i in range(60)]
    texts = dict.fromkeys(" ".join(WORDS[place % len(WORDS)] for place in own) for own in places)
    write_texts(workspace.folder / "texts/train.csv", [(text, "chef") for text in texts])
    workspace.edit("  test: texts/test.csv\n", "")
    workspace.edit("  mode: soft\n", "  neighbours: 4\n")
    workspace("weigh-teachers", "student.method=amalgam", "student.encoder=teacher:first", "cache.passes=0")
    manifest = workspace.manifest("weigh-teachers")
    assert manifest["facts"]["kinds"] == pytest.approx(KINDS, abs=1e-3), CHANGED
    rows = pq.read_table(workspace.artifacts / manifest["files"][0]["path"]).column("weight").to_pylist()
    for actual, wanted in zip(rows[: len(WEIGHTS)], WEIGHTS, strict=True):
        assert actual == pytest.approx(wanted, abs=1e-3), CHANGED
