"""cache.dtype: auto is half precision only where the hardware computes it and the uncertainty stays the same."""

from __future__ import annotations

import json
import re

import pytest

from amalgam.tests.workspaces import Workspace, shift_weights


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that computes bf16."""
    monkeypatch.setattr("amalgam.stages.common.device.dtype_for", lambda _device: "bf16")


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
def test_auto_is_fp32_where_bf16_cannot_resolve_the_logits(fresh: Workspace) -> None:
    """Near a bias of 4,000, bf16 has steps of 16: its passes do not vary as they should."""
    shift_weights(fresh.folder / "models" / "first", {"classifier.bias": 4000.0})
    result = fresh("cache-teachers", "cache.dtype=auto", "cache.passes=16")
    assert result.code == 0, result.err
    assert re.search("cache.dtype.* fp32", result.err)
    assert dtypes(fresh) == {"fp32"}


def test_auto_is_fp32_without_a_note_where_the_hardware_has_nothing_else(
    fresh: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amalgam.stages.common.device.dtype_for", lambda _device: "fp32")
    result = fresh("cache-teachers", "cache.dtype=auto")
    assert result.code == 0, result.err
    assert "cache.dtype" not in result.err
    assert dtypes(fresh) == {"fp32"}
