"""Each method runs on the same cache by its name, and reads only the inputs that it needs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from amalgam.pipeline.errors import ExperimentError
from amalgam.stages.common.cached import load
from amalgam.stages.common.inference.states import label_words
from amalgam.stages.methods import METHODS, experiment_schema, load_with_methods, method_of, objective_in
from amalgam.stages.objective_inputs import OBJECTIVE_INPUTS
from amalgam.stages.target_methods import TARGET_METHODS, VanillaKD
from amalgam.stages.train_student.objectives import OBJECTIVES
from amalgam.tests.workspaces import TEST, TRAIN, Workspace, write_texts

TOGETHER = ("cache-features", "weigh-teachers")
TRAINED = [name for name, method in METHODS.items() if method.trains]
UNTRAINED = ["teacher:second", "ensemble", "zero-shot"]


def _embedded(workspace: Workspace) -> int:
    """Texts that went through the encoder."""
    count = 0
    for path in (workspace.artifacts / "cache-features").glob("*/family.json"):
        if "feature" in json.loads(path.read_text()):
            count += sum(json.loads(unit.read_text())["facts"]["rows"] for unit in path.parent.glob("units/*.json"))
    return count


def _evaluation(workspace: Workspace) -> dict[str, Any]:
    head = workspace.head("report")
    [path] = (workspace.artifacts / "report" / head).glob("*/evaluation.json")
    return json.loads(path.read_text())


FEWER = {"as-dfd": ("pseudo_embeddings.count=8", "pseudo_embeddings.steps=20")}
"""By default there are so many that only the time would grow."""


@pytest.mark.parametrize("method", [name for name in TRAINED if name != "mt-bert"])  # for teachers of one label set
def test_every_method_runs_by_changing_one_word_and_computes_no_pass_again(workspace: Workspace, method: str) -> None:
    workspace.edit("targets:\n  mode: soft\n", "")
    overrides = (f"student.method={method}", "student.name=other", *FEWER.get(method, ()))
    with workspace.counting() as asked:
        result = workspace("run", *overrides)
    assert (asked[0].logits, asked[0].passes) == (0, 0)
    assert f"student ({method})" in result.out
    assert workspace.stale(*overrides) == set()


@pytest.mark.parametrize("method", UNTRAINED)
def test_the_report_measures_a_method_without_training(fresh: Workspace, built: Workspace, method: str) -> None:
    result = fresh("run", f"student.method={method}")
    evaluation, other = _evaluation(fresh), _evaluation(built)
    assert method in result.out
    assert evaluation["system"] == method
    assert evaluation["systems"] == {name: other["systems"][name] for name in evaluation["systems"]}
    assert [name for name in other["systems"] if name not in evaluation["systems"]] == ["student (muka-soft)"]
    assert set(fresh.plan(f"student.method={method}")) == {"read-corpus", "cache-teachers", "report"}
    assert not (fresh.folder / "students").exists()
    assert fresh.stale(f"student.method={method}") == set()
    assert fresh.stale(f"student.method={method}", "student.epochs=2", "targets.mode=hard") == set()
    assert fresh.stale(f"student.method={method}", "student.encoder=./models/first") == {"report"}


def test_methods_share_what_zero_shot_was_found_to_be(workspace: Workspace) -> None:
    [before] = workspace.artifacts.glob("report/zero-shot-*/*.parquet")
    workspace("run", "student.method=ensemble")
    assert list(workspace.artifacts.glob("report/zero-shot-*/*.parquet")) == [before]
    write_texts(workspace.folder / "texts/test.csv", workspace.texts("test")[: TEST - 1])
    workspace("run", "student.method=ensemble")
    assert len(list(workspace.artifacts.glob("report/zero-shot-*/*.parquet"))) == 2


def test_zero_shot_is_the_nearest_label_name_of_the_bare_encoder(workspace: Workspace) -> None:
    """Compares with the encoder itself, run by transformers alone, text by text."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(workspace.folder / "models/encoder"))
    body = AutoModel.from_pretrained(str(workspace.folder / "models/encoder")).eval()

    def state(text: str) -> torch.Tensor:
        with torch.no_grad():
            mean = body(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(dim=1)[0]
        return torch.nn.functional.normalize(mean, dim=0)

    evaluation = _evaluation(workspace)
    names = torch.stack([state(label) for label in evaluation["labels"]])
    rows = workspace.texts("test")
    right = [evaluation["labels"][int((names @ state(text)).argmax())] == label for text, label in rows]
    assert evaluation["systems"]["zero-shot"]["accuracy"] == pytest.approx(sum(right) / len(right))
    assert evaluation["systems"]["zero-shot"]["ece"] is None  # a similarity is no probability


@pytest.mark.parametrize("method", ["muka-soft", "amalgam"])
def test_a_copy_of_a_teacher_changes_neither_targets_nor_weights(workspace: Workspace, method: str) -> None:
    workspace.edit("targets:\n  mode: soft\n", "")
    workspace("build-targets", f"student.method={method}")
    alone = workspace.targets()
    shutil.copytree(workspace.folder / "models/first", workspace.folder / "models/copy")
    workspace.edit(
        "    model: ./models/first\n", "    model: ./models/first\n  - name: copy\n    model: ./models/copy\n"
    )
    workspace("build-targets", f"student.method={method}")
    copied = workspace.targets()
    assert copied.keys() == alone.keys()
    assert max(weight for _, weight in alone.values()) > 0.1
    for key, (target, weight) in alone.items():
        assert copied[key][0] == pytest.approx(target, abs=1e-4)
        assert copied[key][1] == pytest.approx(weight, abs=1e-4)


def test_label_names_are_read_as_words() -> None:
    names = ["sci_tech", "sci-tech", "sciTech", "SciTech", "sci tech", "HTTPError", "Sports", "__", "top_up-byCard"]
    words = ["sci tech", "sci tech", "sci Tech", "Sci Tech", "sci tech", "HTTP Error", "Sports", "__", "top up by Card"]
    assert [label_words(name) for name in names] == words


@pytest.mark.parametrize(
    ("override", "piece"),
    [
        ("student.method=teacher:third", "first, second"),
        ("student.method=ensembles", "did you mean 'ensemble'?"),
    ],
)
def test_a_method_that_is_not_there_is_refused_with_what_is(fresh: Workspace, override: str, piece: str) -> None:
    assert piece in fresh.refusal(2, "plan", override)


def test_a_method_that_is_only_measured_needs_something_to_be_measured_on(fresh: Workspace) -> None:
    fresh.edit("  test: texts/test.csv\n", "")
    assert "needs corpus.test" in fresh.refusal(2, "plan", "student.method=ensemble")
    assert fresh.attempt("train-student", "student.method=ensemble", "corpus.test=texts/test.csv").code == 2


@pytest.mark.parametrize(
    ("mode", "variant", "name"),
    [
        ("soft", "targets.passes=0", "w/o MC dropout"),
        ("hard", "targets.text_weights=none", "w/o re-weighting"),
    ],
)
def test_ablated_parts_are_named_in_a_methods_row(workspace: Workspace, mode: str, variant: str, name: str) -> None:
    plain = workspace.targets()
    with workspace.counting() as asked:
        out = workspace("run", f"student.method=muka-{mode}", f"targets.mode={mode}", variant, "student.name=other").out
    assert asked[0].units == 0
    assert f"student (muka-{mode} {name})" in out
    assert workspace.targets() != plain
    if "text_weights" in variant:
        assert {weight for _, weight in workspace.targets().values()} == {1.0}


def test_a_variant_without_passes_has_one_name(fresh: Workspace) -> None:
    assert (
        "student (muka-soft w/o MC dropout w/o re-weighting)"
        in fresh("run", "cache.passes=0", "targets.text_weights=none").out
    )


def test_passes_are_run_for_methods_that_read_them(fresh: Workspace) -> None:
    """A second method computes the missing passes alone, and the number that auto chose reuses the result."""
    fresh.edit("  passes: 4\n", "")
    fresh.edit("targets:\n  mode: soft\n", "")
    method = "student.method=amalgam"
    fresh("read-corpus")
    assert "cache.passes=0" in fresh("plan", method).out
    with fresh.counting() as asked:
        fresh("build-targets", method)
    assert (asked[0].logits, asked[0].passes) == (2 * (TRAIN + TEST), 0)
    assert fresh.stale(method, "cache.passes=0") & {"cache-teachers", "weigh-teachers", "build-targets"} == set()
    for name in ("vanilla-kd", "uhc", "supervised", "ensemble", "zero-shot", "teacher:first"):
        assert load.passes_of(load_with_methods(fresh.config, [f"student.method={name}"]).experiment) == 0
    with fresh.counting() as asked:
        fresh("build-targets", "student.method=muka-soft")
    assert (asked[0].logits, asked[0].passes) == (0, 2 * load.AUTO_PASSES * TRAIN)
    with fresh.counting() as asked:
        fresh("build-targets", method, "targets.weight_signal=confidence", "targets.passes=2")
        fresh("build-targets", method)
        fresh("run", "student.method=ensemble")
    assert (asked[0].logits, asked[0].passes) == (0, 0)


@pytest.mark.parametrize("measure", ["mutual-information", "variation-ratio"])
def test_a_measure_that_compares_passes_needs_two(workspace: Workspace, measure: str) -> None:
    def load_with(*overrides: str) -> None:
        load_with_methods(workspace.config, [f"targets.uncertainty={measure}", *overrides])

    for accepted in (("cache.passes=2",), ("cache.passes=auto",), ("targets.mode=uhc", "cache.passes=0")):
        load_with(*accepted)
    amalgam = ["targets.teacher_weights=range", "targets.weight_signal=all"]
    load_with("student.method=ensemble", "cache.passes=0")
    for refused in (["cache.passes=1"], ["targets.passes=0"], ["cache.passes=auto", *amalgam], ["cache.passes=0"]):
        with pytest.raises(ExperimentError, match=r"targets.uncertainty: .*compares passes"):
            load_with(*refused)


def test_methods_are_listed_with_their_source_and_needs(fresh: Workspace) -> None:
    listed = fresh("methods", "--json").json
    assert set(listed) == set(METHODS)
    assert all(method["source"] and method["needs"] for method in listed.values())
    assert all(bool(method["defaults"]) == method["trains"] for method in listed.values())
    assert all(name in fresh("methods").out for name in METHODS)


def test_only_methods_that_look_at_all_texts_have_the_stages_for_it(workspace: Workspace) -> None:
    assert not set(TOGETHER) & set(workspace.plan())
    assert set(TOGETHER) <= set(workspace.plan("student.method=amalgam"))
    plan = workspace.plan("targets.teacher_weights=standardised", "targets.weight_signal=margin")
    assert ("weigh-teachers" in plan, "cache-features" in plan) == (True, False)
    plan = workspace.plan("student.method=muka-soft", "targets.teacher_weights=range")
    assert ("weigh-teachers" in plan, "cache-features" in plan) == (True, False)


def test_appended_texts_alone_go_through_the_encoder(workspace: Workspace) -> None:
    method = "student.method=amalgam"
    workspace("build-targets", method)
    before = _embedded(workspace)
    rows = workspace.texts()
    workspace.write([*rows, *((f"{text} again", label) for text, label in rows[:7])])
    workspace("build-targets", method)
    assert (before, _embedded(workspace)) == (TRAIN, TRAIN + 7)
    assert len(workspace.targets()) == TRAIN + 7


def test_a_word_that_weights_do_not_read_weighs_nothing_again(workspace: Workspace) -> None:
    method = "student.method=amalgam"
    workspace("run", method)
    assert workspace.stale(method, "targets.kd_temperature=0.7") == set()
    assert workspace.stale(method, "cache.seed=0") == set()
    assert workspace.stale(method, "targets.text_weights=none") == {"build-targets", "train-student", "report"}
    assert workspace.stale(method, "targets.neighbours=2") == {
        "weigh-teachers",
        "build-targets",
        "train-student",
        "report",
    }
    assert "cache-features" in workspace.stale(method, "student.encoder=./models/first")


def test_targets_are_named_by_the_method_that_makes_them() -> None:
    for name in TRAINED:
        targets = {"teacher_weights": "muka", "mode": "soft", **METHODS[name].defaults["targets"]}
        assert method_of(targets, objective_in(METHODS[name])) == name
        hedged = {**targets, **METHODS[name].on_generated.get("targets", {})}
        assert method_of(hedged, objective_in(METHODS[name])) == name
    assert method_of({"mode": "soft", "teacher_weights": "standardised"}) == "soft, standardised weights"
    assert method_of({"mode": "soft", "teacher_weights": "muka"}, "dfa") == "muka-soft and dfa"


def test_a_line_in_the_table_makes_a_target_method_a_value_of_targets_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "amalgam.yaml"
    path.write_text("corpus: {train: a.csv}\nteachers: [{name: a, model: m}]\ntargets: {mode: added}\n")
    with pytest.raises(ExperimentError, match=r"targets\.mode"):
        load_with_methods(path)
    monkeypatch.setitem(cast("dict[str, Any]", TARGET_METHODS), "added", VanillaKD)
    assert load_with_methods(path).experiment.targets.mode == "added"
    assert "added" in experiment_schema()["$defs"]["Targets"]["properties"]["mode"]["enum"]


def test_every_objective_that_learns_from_texts_has_a_loss() -> None:
    assert {name for name, inputs in OBJECTIVE_INPUTS.items() if inputs.reads_texts} == set(OBJECTIVES)
