"""Numbers that a fixed teacher gives. If they move, caches written by older versions hold other numbers."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from amalgam.data.keys import text_key
from amalgam.tests.workshop import Shop, new_shop, write_model, write_texts

CHANGED = "results changed: raise ENGINE (cache_teachers/family.py) or the stage's VERSION, then these numbers"
TEXTS = [("the chef fried the onion", "cooking"), ("the judge read the contract to the banker", "law")]
WORDS = sorted({word for text, _ in TEXTS for word in text.split()})
# A key is blake2b-128 of the text; the rows below are in the order of the keys.
KEYS = ["3c8bf8d1a4e9b22aebc8f119b04cb582", "7c4abac54c695ff9908170e91bbadaaf"]
LOGITS = {
    "first": [[-0.707002, 0.747809], [-0.525754, 0.078345]],
    "second": [[-0.062845, -0.321923, -0.470376], [-0.115920, -0.357157, -0.381853]],
}
# Two passes of keyed dropout, one after the other; fp16, hence the wider tolerance.
PASSES = {
    "first": [[-1.521484, 0.106934, -1.363281, 1.096680], [-0.330078, 0.736328, -1.103516, -0.800781]],
    "second": [
        [-2.853516, 1.964844, -4.042969, -0.327148, 0.419678, 1.004883],
        [-0.948242, -0.536621, 0.508789, 1.744141, -0.793945, -0.942383],
    ],
}
# The union is cooking, music, law, banking; the last number is the text's weight.
TARGETS = {
    "soft": [[0.142886, 0.678968, 0.100548, 0.077599, 0.225050], [0.166500, 0.463466, 0.207226, 0.162808, 0.023123]],
    "hard": [[0.189262, 0.810738, 0.0, 0.0, 0.225050], [0.0, 0.300332, 0.391827, 0.307841, 0.023123]],
    "vanilla-kd": [[0.100758, 0.559272, 0.191882, 0.148087, 1.0], [0.149822, 0.447125, 0.225717, 0.177336, 1.0]],
}


def fixed_weights(folder: Path, phase: float) -> None:
    """From a formula, so that no random number generator has a say."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    for place, name in enumerate(sorted(weights)):
        count = torch.arange(weights[name].numel(), dtype=torch.float64)
        values = 0.4 * torch.sin(phase + 0.7 * place + 1.3 * count + 0.01 * count**2)
        values += 1.0 if name.endswith("LayerNorm.weight") else 0.0
        weights[name] = values.reshape(weights[name].shape).float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    shop = new_shop(tmp_path_factory.mktemp("golden") / "shop")
    for name, labels, phase in (("first", ["cooking", "music"], 0.1), ("second", ["law", "banking", "music"], 0.6)):
        write_model(shop.folder / "models" / name, labels=labels, words=WORDS, seed=0)
        fixed_weights(shop.folder / "models" / name, phase)
    write_texts(shop.folder / "texts/train.csv", TEXTS)
    shop.edit("  test: texts/test.csv\n", "")
    shop.edit("passes: 4", "passes: 2")
    shop("cache-teachers")
    return shop


def cached(shop: Shop, column: str) -> dict[str, list[list[float]]]:
    found = {}
    for path in shop.units():
        name = "first" if '"teacher": "first"' in (path.parents[1] / "key.json").read_text() else "second"
        found[name] = pq.read_table(path).column(column).to_pylist()
    return found


def test_keys_are_what_they_were() -> None:
    assert sorted(text_key((text,)).hex() for text, _ in TEXTS) == KEYS, CHANGED


@pytest.mark.parametrize("teacher", LOGITS)
def test_logits_are_what_they_were(golden: Shop, teacher: str) -> None:
    for found, wanted in zip(cached(golden, "logits")[teacher], LOGITS[teacher], strict=True):
        assert found == pytest.approx(wanted, abs=1e-4), CHANGED


@pytest.mark.parametrize("teacher", PASSES)
def test_passes_of_keyed_dropout_are_what_they_were(golden: Shop, teacher: str) -> None:
    for found, wanted in zip(cached(golden, "passes")[teacher], PASSES[teacher], strict=True):
        assert found == pytest.approx(wanted, abs=4e-3), CHANGED


@pytest.mark.parametrize("mode", TARGETS)
def test_targets_are_what_they_were(golden: Shop, mode: str) -> None:
    golden("build-targets", f"targets.mode={mode}")
    found = [[*target, weight] for _, (target, weight) in sorted(golden.targets().items())]
    for row, wanted in zip(found, TARGETS[mode], strict=True):
        assert row == pytest.approx(wanted, abs=1e-4), CHANGED
