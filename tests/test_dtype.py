"""cache.dtype: auto is half precision only where the hardware computes it and the uncertainty stays the same."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from amalgam.stages.cache_teachers import half_precision
from amalgam.stages.cache_teachers.half_precision import sample_texts
from amalgam.stages.common import device
from amalgam.stages.common.inference.batches import run_passes
from amalgam.stages.common.models.loading import save_pretrained_folder
from amalgam.tests.stages.tiny_models import save_tiny, tiny
from amalgam.tests.workspaces import TEACHER_LABELS, Workspace, flip_bit, shift_weights

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that computes bf16."""
    monkeypatch.setattr("amalgam.stages.cache_teachers.stage.dtype_for", lambda _device: "bf16")


def dtypes(workspace: Workspace) -> set[str]:
    return {json.loads(path.read_text())["dtype"] for path in workspace.artifacts.glob("cache-teachers/*/family.json")}


@pytest.mark.usefixtures("half")
def test_auto_is_bf16_where_uncertainty_stays_what_it_is(fresh: Workspace) -> None:
    result = fresh("cache-teachers", "cache.dtype=auto", "cache.passes=16")
    assert result.code == 0, result.err
    assert re.search("cache.dtype.* bf16", result.err)
    assert dtypes(fresh) == {"bf16"}
    again = fresh("cache-teachers", "cache.dtype=auto", "cache.passes=16")
    assert "cache.dtype auto" not in again.err


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("passes", ["16", "auto"])
def test_auto_is_fp32_where_bf16_cannot_resolve_the_logits(fresh: Workspace, passes: str) -> None:
    """Near a bias of 4,000, bf16 has steps of 16: its passes vary otherwise. A later method may run them."""
    shift_weights(fresh.folder / "models" / "first", {"classifier.bias": 4000.0})
    fresh.edit("targets:\n  mode: soft\n", "")
    result = fresh("cache-teachers", "cache.dtype=auto", f"cache.passes={passes}", "student.method=amalgam")
    assert result.code == 0, result.err
    assert re.search(r"cache.dtype.* fp32 .*first (?!1\.000)\d", result.err)
    assert dtypes(fresh) == {"fp32"}


@pytest.mark.usefixtures("half")
def test_auto_is_fp32_where_bf16_changes_labels_and_no_pass_is_compared(fresh: Workspace) -> None:
    """All logits are near 400, where bf16 has steps of 2."""
    path = fresh.folder / "models" / "first" / "model.safetensors"
    weights = load_file(path)
    save_file({**weights, "classifier.bias": weights["classifier.bias"] + 400}, path, metadata={"format": "pt"})
    result = fresh("cache-teachers", "cache.dtype=auto", "cache.passes=0")
    assert re.search(r"cache.dtype.* fp32 .*labels that differ: first [1-9]\d*\.", result.err)
    assert "cache.dtype auto: comparing bf16 with fp32 on 32 texts, once\n" in result.err
    assert dtypes(fresh) == {"fp32"}


@pytest.mark.usefixtures("half")
def test_auto_is_fp32_for_a_teacher_without_half_precision(fresh: Workspace) -> None:
    save_tiny(fresh.folder / "models/first", "fnet", labels=TEACHER_LABELS["first"])
    result = fresh("cache-teachers", "cache.dtype=auto")
    assert re.search(r"cache.dtype auto is fp32 .*teacher first cannot run in it: ", result.err)
    assert dtypes(fresh) == {"fp32"}


@pytest.mark.usefixtures("half")
def test_auto_is_fp32_where_a_teacher_cannot_run_in_bf16(fresh: Workspace) -> None:
    """XLNet; nor can its dropout be keyed, which a method without passes does not need."""
    folder = fresh.folder / "models/first"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = len(tokenizer)
    save_pretrained_folder(tiny("xlnet", labels=TEACHER_LABELS["first"], vocab_size=words)[0], tokenizer, folder)
    fresh.edit("targets:\n  mode: soft\n", "")
    result = fresh("cache-teachers", "cache.dtype=auto", "cache.passes=auto", "student.method=vanilla-kd")
    assert re.search(r"cache.dtype.* fp32 .*teacher first cannot run", result.err)
    assert dtypes(fresh) == {"fp32"}


@pytest.mark.usefixtures("half")
def test_only_the_check_truncates_texts_at_its_own_limit(fresh: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = list[int]()

    def spied(teacher: Any, tokens: Any, *rest: Any, **named: Any) -> Any:
        checked.extend(map(len, tokens))
        return run_passes(teacher, tokens, *rest, **named)

    monkeypatch.setattr(half_precision, "LONGEST", 16)
    monkeypatch.setattr(half_precision, "run_passes", spied)
    fresh.write([(f"{text} and {text} and {text} and {text}", label) for text, label in fresh.texts()])
    fresh.edit("  test: texts/test.csv\n", "")
    fresh.edit("  - name: second\n    model: ./models/second\n", "")  # else another teacher follows that of the check
    fresh("cache-teachers", "cache.dtype=auto", "cache.passes=1")
    cached = [pq.read_table(path, columns=["tokens"])["tokens"].to_pylist() for path in fresh.units()]
    assert max(checked) == 16
    assert max(map(max, cached)) == 32


@pytest.mark.parametrize(
    ("work", "passes", "wanted"),
    [
        (17 * 2_000, 16, 106),  # one pass in 20
        (2 * 2_000, None, 32),  # auto runs two passes a text, and the check 16 of each
        (2 * 16_000, None, 100),
        (1 * 2_000, 0, 100),
        (1_000_000, None, 256),
    ],
)
def test_the_check_runs_a_small_share_of_the_passes(work: int, passes: int | None, wanted: int) -> None:
    keys = [place.to_bytes(16, "big") for place in range(300)]
    columns = {"key": pa.array(keys, pa.binary(16)), "text": ["a text"] * 300, "text_2": pa.nulls(300, pa.string())}
    table = pa.table(columns)
    assert list(sample_texts([table], work, passes)) == keys[:wanted]


@pytest.mark.parametrize(
    ("amx", "avx", "vendor", "dtype"),
    [
        (True, True, "GenuineIntel", "bf16"),
        (False, True, "GenuineIntel", "fp32"),
        (False, True, "AuthenticAMD", "bf16"),
        (False, False, "AuthenticAMD", "fp32"),
    ],
)
def test_a_cpu_uses_bf16_only_where_its_products_are_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str, dtype: str, *, amx: bool, avx: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx)
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(device, "CPU_INFO", tmp_path / "cpuinfo")
    assert device.dtype_for(torch.device("cpu")) == dtype


def test_auto_is_fp32_without_a_note_where_the_hardware_has_nothing_else(
    fresh: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amalgam.stages.cache_teachers.stage.dtype_for", lambda _device: "fp32")
    result = fresh("cache-teachers", "cache.dtype=auto")
    assert result.code == 0, result.err
    assert "cache.dtype" not in result.err
    assert dtypes(fresh) == {"fp32"}


@pytest.mark.parametrize("content", [b"\0" * 40, None], ids=["damaged", "deleted"])
@pytest.mark.parametrize("complete", [True, False])
def test_a_lost_decision_is_taken_from_the_results_that_exist(
    fresh: Workspace, monkeypatch: pytest.MonkeyPatch, content: bytes | None, *, complete: bool
) -> None:
    monkeypatch.setattr("amalgam.stages.cache_teachers.stage.dtype_for", lambda _device: "bf16")
    fresh("cache-teachers", "cache.dtype=auto", "cache.passes=16")
    if not complete:
        next(fresh.artifacts.glob("cache-teachers/*/MANIFEST.json")).unlink()
    for path in (fresh.artifacts / "pins").glob("dtype-*"):  # its copy too
        path.unlink() if content is None else path.write_bytes(content)
    # Without the results this dtype would be chosen.
    monkeypatch.setattr("amalgam.stages.cache_teachers.stage.dtype_for", lambda _device: "fp32")
    with fresh.counting() as asked:
        result = fresh("cache-teachers", "cache.dtype=auto", "cache.passes=16")
    assert "bf16, as in the results" in result.err
    assert ("is damaged" in result.err) == (content is not None)
    assert asked[0].units == 0
    assert dtypes(fresh) == {"bf16"}


def test_a_damaged_decision_is_restored_from_its_copy(fresh: Workspace) -> None:
    fresh("cache-teachers", "cache.dtype=auto")
    pin = next(path for path in (fresh.artifacts / "pins").glob("dtype-*") if ".copy" not in path.name)
    whole = pin.read_bytes()
    flip_bit(pin, 60)
    result = fresh("plan", "cache.dtype=auto")
    assert pin.name in result.err
    assert pin.read_bytes() == whole


def test_the_encoders_states_have_the_teachers_dtype(fresh: Workspace) -> None:
    fresh.edit("targets:\n  mode: soft\n", "")
    states = {}
    for dtype in ("fp32", "bf16"):
        fresh("cache-features", f"cache.dtype={dtype}", "cache.passes=0", "student.method=amalgam")
        [family] = fresh.manifest("cache-features")["facts"]["families"]["the encoder"]
        units = (fresh.artifacts / "cache-features" / family / "units").glob("*.parquet")
        states[dtype] = pl.concat(map(pl.read_parquet, units)).sort("key")["features"].to_numpy()
    assert np.allclose(states["fp32"], states["bf16"], atol=0.02)
    assert not np.array_equal(states["fp32"], states["bf16"])
