"""cache.adaptive: settled texts stop early, the rest run K passes, and an audit reports the change."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import polars as pl
import pytest

from amalgam.data.keys import text_key
from amalgam.stages.cache_teachers import adaptive
from amalgam.stages.cache_teachers.adaptive import audited
from amalgam.stages.common.cached.uncertainty import MEASURES, confidence, summarise_passes, sums_over_passes
from amalgam.tests.workspaces import TOLERANCE, Workspace, largest_difference, ranks

ADAPTIVE = ("cache.adaptive=true", "cache.passes=16")


@pytest.fixture
def many_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the texts instead of a hundredth: the shop has only some dozens."""
    monkeypatch.setattr(adaptive, "AUDITED", 0.1)


def facts(workspace: Workspace) -> dict[str, Any]:
    head = json.loads((workspace.artifacts / "HEAD.json").read_text())["cache-teachers"]["fingerprint"]
    content: dict[str, Any] = json.loads((workspace.artifacts / "cache-teachers" / head / "MANIFEST.json").read_text())
    return dict(content["facts"])


def passes_of(workspace: Workspace) -> dict[bytes, int]:
    """By text: how many passes count."""
    frames = [pl.read_parquet(workspace.artifacts / path) for path in facts(workspace)["pass_counts"].values()]
    return dict(pl.concat(frames).iter_rows())


def raw(workspace: Workspace, family: str) -> dict[bytes, np.ndarray[Any, Any]]:
    """By text: all its passes in order."""
    parts: dict[bytes, list[tuple[int, Any]]] = {}
    for record in sorted((workspace.artifacts / "cache-teachers" / family / "units").glob("*.json")):
        content = json.loads(record.read_text())
        frame = pl.read_parquet(workspace.artifacts / content["files"][0]["path"])
        if "passes" in frame.columns:
            count = content["facts"]["last"] - content["facts"]["first"]
            for key, passes in frame.select("key", "passes").iter_rows():
                parts.setdefault(key, []).append((content["facts"]["first"], np.array(passes).reshape(count, -1)))
    return {
        key: np.concatenate([one for _, one in sorted(parts_, key=lambda p: p[0])]) for key, parts_ in parts.items()
    }


@pytest.mark.usefixtures("many_audited")
def test_texts_stop_where_their_most_confident_teacher_is_settled(fresh: Workspace) -> None:
    assert fresh("cache-teachers", *ADAPTIVE).code == 0
    taken, families = passes_of(fresh), list(facts(fresh)["families"].values())
    answers = [raw(fresh, family) for family in families]
    assert set(taken.values()) <= {4, 8, 16}
    assert len(set(taken.values())) > 1
    in_audit = {key for key in taken if audited(np.array([key], "S16"))[0]}
    assert in_audit
    for key, passes in taken.items():
        settled = [rung for rung in (4, 8) if _settled([one[key] for one in answers], rung)]
        assert passes == (settled[0] if settled else 16)
        assert {len(one[key]) for one in answers} == {32 if key in in_audit else passes}


def _settled(passes: list[np.ndarray[Any, Any]], rung: int) -> bool:
    estimates = [summarise_passes(one[None, :rung].astype(np.float16)) for one in passes]
    (low, low_error), (high, high_error) = sorted(
        (float(f.confidence[0]), float(f.confidence_se[0])) for f in estimates
    )
    return high - low > 3 * math.hypot(low_error, high_error)


@pytest.mark.usefixtures("many_audited")
def test_the_audit_compares_the_effect_of_stopping_with_that_of_a_seed(fresh: Workspace) -> None:
    result = fresh("cache-teachers", *ADAPTIVE)
    facts_of_run = facts(fresh)["adaptive"]
    taken = passes_of(fresh)
    assert facts_of_run["texts"] == len(taken)
    assert facts_of_run["mean_passes"] == pytest.approx(np.mean(list(taken.values())))
    assert facts_of_run["audited"] == sum(audited(np.array([key], "S16"))[0] for key in taken) > 0
    assert 0 <= facts_of_run["stopped_otherwise"] <= 1
    assert 0 <= facts_of_run["seeded_otherwise"] <= 1
    assert f"{facts_of_run['mean_passes']:.1f} passes" in result.err
    assert "another teacher" in fresh("run", *ADAPTIVE).err
    [evaluation] = fresh.artifacts.glob("report/*/report-*/evaluation.json")
    assert json.loads(evaluation.read_text())["adaptive"] == facts_of_run


@pytest.mark.usefixtures("many_audited")
def test_cached_passes_do_not_change_the_result(fresh: Workspace) -> None:
    """16 passes of every text first, then adaptive: the same targets as adaptive alone, and no pass but the audit's."""
    alone = fresh.without_artifacts(fresh.folder.parent / "alone")
    assert alone("build-targets", *ADAPTIVE).code == 0
    assert fresh("cache-teachers", "cache.passes=16").code == 0
    with fresh.counting() as asked:
        assert fresh("build-targets", *ADAPTIVE).code == 0
    in_audit = sum(audited(np.array([key], "S16"))[0] for key in passes_of(fresh))
    assert asked[0].logits == 0
    assert asked[0].passes == 2 * 16 * in_audit
    assert passes_of(fresh) == passes_of(alone)
    assert largest_difference(fresh.targets(), alone.targets()) < TOLERANCE


def test_running_again_computes_no_pass(fresh: Workspace) -> None:
    assert fresh("build-targets", *ADAPTIVE).code == 0
    with fresh.counting() as asked:
        assert fresh("build-targets", *ADAPTIVE).code == 0
    assert fresh.stale(*ADAPTIVE).isdisjoint({"cache-teachers", "build-targets"})
    assert asked[0].units == 0


def test_the_entropy_of_few_passes_is_corrected_to_that_of_many() -> None:
    """The plug-in entropy of 4 passes is below that of 16; corrected, the two agree in the mean."""
    rng = np.random.default_rng(0)
    centres = rng.normal(0, 1, (4000, 1, 3))
    logits = centres + rng.normal(0, 1.0, (4000, 16, 3))
    raw, entropy = logits.reshape(4000, -1), MEASURES["entropy"]
    exact = confidence(pl.DataFrame(sums_over_passes(raw, 16, entropy)), entropy).mean()
    plain = confidence(pl.DataFrame(sums_over_passes(raw[:, : 4 * 3], 4, entropy)), entropy).mean()
    few = pl.DataFrame(sums_over_passes(raw[:, : 4 * 3], 4, entropy, squares=True))
    mended = confidence(few, entropy, 16).mean()
    assert isinstance(exact, float)
    assert isinstance(plain, float)
    assert isinstance(mended, float)
    assert plain - exact > 0.02
    assert abs(mended - exact) < 0.2 * (plain - exact)
    all_of = pl.DataFrame(sums_over_passes(raw, 16, entropy, squares=True))
    assert confidence(all_of, entropy, 16).mean() == pytest.approx(exact, abs=1e-12)


def test_the_audit_takes_one_text_in_a_hundred_whatever_their_order() -> None:
    keys = np.array([text_key([f"text {i}"]) for i in range(40000)], "S16")
    share = audited(keys).mean()
    assert 0.0085 < share < 0.0115
    assert (audited(keys[::-1]) == audited(keys)[::-1]).all()


def test_two_processes_climb_the_ladder_together(fresh: Workspace) -> None:
    alone = fresh.without_artifacts(fresh.folder.parent / "alone")
    assert alone("build-targets", *ADAPTIVE).code == 0
    result = ranks(fresh, "build-targets", *ADAPTIVE)
    assert result.code == 0, result.err
    assert passes_of(fresh) == passes_of(alone)
    assert largest_difference(fresh.targets(), alone.targets()) < TOLERANCE
