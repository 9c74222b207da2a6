"""`from amalgam import Experiment`: its results equal the store's, and importing it is cheap."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import zipfile
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import AmalgamError
from amalgam.pipeline.execution.plan import plan
from amalgam.pipeline.execution.stage import PendingDependencyError, Run, Stage
from amalgam.stages.app.api import Experiment
from amalgam.stages.app.runs import open_run
from amalgam.stages.common.intervals import interval
from amalgam.stages.methods import METHODS
from amalgam.stages.registry import STAGES as ALL_STAGES
from amalgam.tests.workspaces import PASSES, TEACHER_LABELS, TEST, TRAIN, Workspace, quiet_environment

ROOT = Path(__file__).resolve().parents[1]
STAGES = ["read-corpus", "cache-teachers", "build-targets", "train-student", "report"]
UNION = [label for own in TEACHER_LABELS.values() for label in own]


@pytest.fixture(scope="module")
def done(desk: Workspace) -> Experiment:
    return Experiment.load(desk.config, quiet=True)


CHANGED = ("targets.temperature=0.5",)


def states(experiment: Experiment) -> dict[str, str]:
    return {state.stage: state.state for state in experiment.plan()}


class RecordingResults(dict[str, Any]):
    """Records the names of the results that are read."""

    def __init__(self, results: dict[str, Any]) -> None:
        super().__init__(results)
        self.read = set[str]()

    def __contains__(self, stage: object) -> bool:
        self.read.add(str(stage))
        return super().__contains__(stage)


def test_a_stage_declares_the_stages_whose_results_its_identity_reads(workspace: Workspace) -> None:
    workspace.edit("targets:\n  mode: soft\n", "")
    names, read = [stage.name for stage in ALL_STAGES], set[str]()
    for method in (name.replace("<name>", "first") for name in METHODS if name != "mt-bert"):
        run = open_run(workspace.config, [f"student.method={method}"])
        plan(ALL_STAGES, run)
        for stage in (stage for stage in ALL_STAGES if stage.is_needed(run.experiment)):
            needs = stage.needs(run.experiment)
            assert set(needs) <= set(names[: names.index(stage.name)])
            run.cache.clear()
            run.results = RecordingResults(run.results)
            with contextlib.suppress(PendingDependencyError):
                stage.identity(run)
            assert run.results.read <= set(needs), (method, stage.name)
            read |= run.results.read
    assert {"read-corpus", "cache-teachers", "build-targets", "train-student"} <= read


def reads_and_needs(
    workspace: Workspace, patch: pytest.MonkeyPatch, *overrides: str
) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Runs all stages; returns the results of other stages that each one read, and those that it declares."""
    read, needs = defaultdict[str, set[str]](set), dict[str, set[str]]()

    def recorded(stage: Stage, work: Callable[..., Any]) -> Callable[..., Any]:
        def run_it(run: Run, *arguments: Any) -> Any:
            run.cache.clear()
            run.results = results = RecordingResults(run.results)
            value = work(run, *arguments)
            read[stage.name] |= results.read & results.keys() - {stage.name}
            needs[stage.name] = results.keys() & set(stage.needs(run.experiment))
            return value

        return run_it

    for stage in ALL_STAGES:
        for name in ("identity", "run_units", "finish"):
            patch.setattr(stage, name, recorded(stage, getattr(stage, name)))
    workspace("run", *overrides)
    return read, needs


@pytest.mark.parametrize(
    "overrides",
    [
        ("student.method=amalgam", "student.held_out=0.25"),  # a report reads features for 20 held-out texts
        ("student.method=stratanet",),
        ("student.method=dfa",),
        ("student.method=muka-soft", "targets.uncertainty=rmd"),
    ],
    ids=" ".join,
)
def test_a_stage_reads_the_results_that_it_declares_and_no_others(
    fresh: Workspace, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    fresh.edit("targets:\n  mode: soft\n", "")
    read, needs = reads_and_needs(fresh, monkeypatch, *overrides)
    assert read == needs


@pytest.mark.parametrize("signal", ["all", "confidence"])
def test_weights_read_the_generated_texts_for_all_signals_only(
    generated: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal: str
) -> None:
    fresh = generated.without_artifacts(tmp_path / "workspace")
    fresh.edit("targets:\n  mode: soft\n", "")
    settings = ["student.method=amalgam", "student.held_out=0.25", f"targets.weight_signal={signal}"]
    read, needs = reads_and_needs(fresh, monkeypatch, *settings)
    assert read == needs
    assert ("generate" in needs["weigh-teachers"]) == (signal == "all")


def test_importing_amalgam_loads_nothing_and_offers_the_experiment() -> None:
    code = """
import sys
before = set(sys.modules)
import amalgam
print(sorted(set(sys.modules) - before))
from amalgam import AmalgamError, Experiment
print([name for name in ("torch", "transformers", "polars", "pyarrow", "numpy") if name in sys.modules])
try:
    amalgam.Expriment
except AttributeError as error:
    print(error)
print(set(dir(amalgam)) == set(amalgam.__all__) >= {"AmalgamError", "Experiment"})
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=quiet_environment()
    )
    absent = "module 'amalgam' has no attribute 'Expriment'"
    assert process.stdout.splitlines() == ["['amalgam']", "[]", absent, "True"]


def test_the_package_has_a_link_for_each_room_and_nothing_else() -> None:
    package = ROOT / ".dev/amalgam"
    names = {path.name for path in package.iterdir()} - {"__init__.py", "__main__.py", "__pycache__"}
    assert names == {"benchmarks", "cli.py", "data", "pipeline", "py.typed", "stages", "tests"}
    assert all((package / name).resolve() == ROOT / name for name in names)


def test_an_editable_install_is_a_path_alone_and_a_wheel_has_the_whole_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of ours next to an editable install's path would hide it, without the packages."""
    from hatchling.build import build_editable, build_wheel

    monkeypatch.chdir(ROOT)
    names = {}
    for build in (build_editable, build_wheel):
        (tmp_path / build.__name__).mkdir()
        wheel = tmp_path / build.__name__ / build(str(tmp_path / build.__name__))
        names[build.__name__] = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names["build_editable"] == {"_amalgam_distill.pth"}
    own = {
        "amalgam/__init__.py",
        "amalgam/__main__.py",
        "amalgam/cli.py",
        "amalgam/py.typed",
        "amalgam/stages/app/api.py",
    }
    assert own <= names["build_wheel"]
    rooms = {"/".join(name.split("/")[:2]) for name in names["build_wheel"]}
    assert rooms == {*own, "amalgam/data", "amalgam/pipeline", "amalgam/stages"} - {"amalgam/stages/app/api.py"}


def test_an_experiment_that_is_up_to_date_shows_its_results(done: Experiment, desk: Workspace) -> None:
    assert states(done) == dict.fromkeys(STAGES, "current")
    assert done.labels == UNION
    targets = done.targets.collect()
    shown = {row["key"]: (row["target"], row["weight"]) for row in targets.iter_rows(named=True)}
    assert shown == desk.targets()
    texts = done.texts().collect()
    assert (len(texts), set(texts["text"])) == (TRAIN, {text for text, _ in desk.texts()})
    assert len(done.texts("test").collect()) == TEST
    assert texts.join(targets, on="key").height == TRAIN


def test_answers_are_those_of_the_teacher_itself(done: Experiment, desk: Workspace) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = desk.folder / "models/second"
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForSequenceClassification, AutoTokenizer))
    asked = done.logits("second").join(done.texts("test"), on="key").collect()
    assert len(asked) == TEST
    row = asked.row(0, named=True)
    with torch.no_grad():
        logits = model(**tokenizer(row["text"], truncation=True, max_length=32, return_tensors="pt")).logits[0]
    assert row["logits"] == pytest.approx(logits.tolist(), abs=1e-4)


def test_passes_are_listed_one_by_one_and_agree_with_their_mean(done: Experiment) -> None:
    import numpy as np

    row = done.passes("first").collect().row(0, named=True)
    logits = np.array(row["passes"], dtype=np.float64)
    assert (row["first"], row["last"], logits.shape) == (0, PASSES, (PASSES, len(TEACHER_LABELS["first"])))
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert row["mean_probability"] == pytest.approx(shares.mean(axis=0).tolist(), abs=1e-3)
    assert len(done.passes("first").collect()) == TRAIN


def test_no_texts_give_a_frame_of_the_same_columns(done: Experiment) -> None:
    full, empty = (done.predict(texts, top=2, explain=True, unknown=True) for texts in (["a text"], []))
    assert (empty.height, empty.schema) == (0, full.schema)


def test_the_evaluation_is_the_reports(done: Experiment) -> None:
    evaluation = done.evaluation
    assert evaluation["system"].to_list()[:3] == ["teacher:first", "teacher:second", "ensemble"]
    scores, groups = ["accuracy", "macro_f1", "nll_nats", "ece"], ["on_first", "on_second"]
    assert evaluation.columns == ["system", "n", *scores, "accuracy_low", "accuracy_high", *groups]
    one = evaluation.row(0, named=True)
    assert (one["accuracy_low"], one["accuracy_high"]) == interval(one["accuracy"], one["n"])
    nll = dict(zip(evaluation["system"], evaluation["nll_nats"], strict=True))
    assert (nll["teacher:first"], nll["zero-shot"]) == (float("inf"), None)
    assert 0 < nll["ensemble"] < float("inf")


def test_the_evaluation_by_label_adds_up_to_that_of_all(done: Experiment) -> None:
    by_label, of_all = done.evaluation_by_label, done.evaluation
    sums = by_label.group_by("system", maintain_order=True).agg(pl.col("n", "right").sum(), pl.col("f1").mean())
    assert by_label["label"].to_list() == len(of_all) * done.labels
    assert sums["n"].to_list() == of_all["n"].to_list()
    assert (sums["right"] / sums["n"]).to_list() == pytest.approx(of_all["accuracy"].to_list())
    assert sums["f1"].to_list() == pytest.approx(of_all["macro_f1"].to_list())


def test_results_of_a_test_file_that_changed_later_are_refused(workspace: Workspace) -> None:
    experiment = Experiment.load(workspace.config, quiet=True)
    n = experiment.run().evaluation["n"][0]  # type: ignore[index]
    assert experiment.evaluation["n"][0] == n
    test = workspace.folder / "texts/test.csv"
    test.write_text(test.read_text().rstrip("\n").rpartition("\n")[0] + "\n")
    with pytest.raises(AmalgamError, match=r"report is not up to date \(upstream"):
        experiment.evaluation  # noqa: B018 - reading is the test
    experiment.run()
    assert experiment.evaluation["n"][0] == n - 1


def test_the_student_answers_from_python_as_from_the_command_line(done: Experiment, desk: Workspace) -> None:
    import numpy as np

    two: Any = np.int64(2)
    row = done.predict(["the chef fried the onion"], top=two, explain=True).row(0, named=True)
    [entry] = desk("predict", "the chef fried the onion", "--top", "2", "--explain", "--json").json
    assert [row["label"], row["label_2"]] == [label["label"] for label in entry["labels"]]
    assert row["mass_first"] == pytest.approx(entry["mass"]["first"])
    assert done.student == desk.folder / "students/student"


def test_student_and_report_of_another_experiment_in_the_folder_are_refused(workspace: Workspace) -> None:
    first = Experiment.load(workspace.config, quiet=True)
    second = Experiment.load(workspace.config, {"student.method": "uhc"}, quiet=True)
    for made in (lambda: second.student, lambda: second.predict(["the chef fried the onion"])):
        with pytest.raises(AmalgamError, match="the student of another experiment: method muka-soft -> uhc"):
            made()
    result = second.run()
    assert second.student == workspace.folder / "students/student"
    assert second.report == workspace.folder / "reports/student.html"
    with pytest.raises(AmalgamError, match="the student of another experiment"):
        first.predict(["the chef fried the onion"])
    with pytest.raises(AmalgamError, match="this page is the report of another experiment"):
        first.report  # noqa: B018
    summary = first.run().summary
    assert first.predict(["the chef fried the onion"]).height == 1
    assert result.summary != summary
    assert first.report == second.workspace.parent / "reports/student.html"


def test_a_student_of_other_texts_in_the_folder_is_refused(workspace: Workspace) -> None:
    texts = [text for text, _ in workspace.texts()]
    second = Experiment.load(workspace.config, ["student.epochs=1"], texts={"train": texts[:50]}, quiet=True)
    third = Experiment.load(workspace.config, ["student.epochs=1"], texts={"train": texts[50:]}, quiet=True)
    second.run(until="train-student")
    with pytest.raises(AmalgamError, match="train-student is not up to date"):
        third.predict(["the chef fried the onion"])
    third.run(until="train-student")
    with pytest.raises(AmalgamError, match="the student of another experiment: other texts"):
        second.predict(["the chef fried the onion"])
    assert third.student == workspace.folder / "students/student"


def test_half_a_character_in_a_list_of_texts_is_named(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace.folder)
    teachers, texts = ["./models/first", "./models/second"], ["a text", "half \ud83d", "another text"]
    with pytest.raises(AmalgamError, match="lone surrogate") as refused:
        Experiment(teachers, texts, quiet=True)
    assert str(refused.value.where).startswith("texts[1]")
    skipping = Experiment(teachers, texts, corpus={"on_bad_row": "skip"}, quiet=True)
    skipping.run(until="read-corpus")
    assert skipping.texts().collect().height == 2


def test_half_a_character_in_a_frame_is_named(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    pd = pytest.importorskip("pandas")
    monkeypatch.chdir(workspace.folder)
    teachers, column = ["./models/first", "./models/second"], ["a text", "half \ud83d", "another text"]
    for texts in ({"text": column}, pd.DataFrame({"text": column}, dtype=object), pd.Series(column, dtype=object)):
        with pytest.raises(AmalgamError, match="lone surrogate") as refused:
            Experiment(teachers, texts, quiet=True)
        assert refused.value.where == r"row 1, counted from 0, column text: 'half \ud83d'"
        skipping = Experiment(teachers, texts, corpus={"on_bad_row": "skip"}, quiet=True)
        skipping.run(until="read-corpus")
        assert skipping.texts().collect().height == 2


def test_small_results_are_shown_as_text_and_as_html(done: Experiment) -> None:
    plan = done.plan()
    assert plan.is_current
    assert plan.frame.select("stage", "state").rows() == [(stage, "current") for stage in STAGES]
    audit = done.audit()
    assert audit.frame["teacher"].to_list() == ["first", "second"]
    assert audit.advice == ["no harmful or duplicate teacher was found"]
    results: list[tuple[Any, str]] = [(plan, "train-student"), (audit, audit.advice[0]), (done, "./models/first")]
    for result, words in results:
        assert words in repr(result)
        assert words in result._repr_html_()
        assert result._repr_html_().count("<table>") == repr(result).count("\n---")


def test_a_plan_names_the_reasons(desk: Workspace) -> None:
    plan = Experiment.load(desk.config, CHANGED, quiet=True).plan()
    row = plan.frame.row(2, named=True)
    assert not plan.is_current
    assert (row["stage"], row["state"], row["reason"]) == ("build-targets", "missing", "config")
    assert all(
        "targets.temperature: 0.2 -&gt; 0.5" in text.replace("->", "-&gt;") for text in (repr(plan), plan._repr_html_())
    )


def test_a_plan_shows_the_remarks_and_the_problems(fresh: Workspace) -> None:
    plan = Experiment.load(fresh.config, ["corpus.text=body", "cache.passes=0"], quiet=True).plan()
    assert (len(plan.remarks), len(plan.problems)) == (1, 2)
    for text in (repr(plan), plan._repr_html_()):
        assert "note: without dropout passes" in text
        assert "error: no column body in test.csv" in text
    with pytest.raises(AmalgamError, match="models, such as encoder"):
        Experiment.load(fresh.config, ["student.encoder=./models/encodr"], quiet=True).plan()


def test_a_run_returns_what_it_did_and_where_the_student_is(workspace: Workspace) -> None:
    experiment = Experiment.load(workspace.config, CHANGED, quiet=True)
    result = experiment.run()
    outcomes = ["reused", "reused", "made", "made", "made in part"]
    assert [stage.outcome for stage in result] == outcomes
    assert (len(result), result.is_complete, result.frame["outcome"].to_list()) == (5, True, outcomes)
    assert result.student == workspace.folder / "students/student"
    assert result.report == workspace.folder / "reports/student.html"
    assert result.evaluation is not None
    assert result.evaluation.equals(experiment.evaluation)
    made = result.stages[2]
    assert (made.units, made.why.startswith("config: targets.temperature"), (made.seconds or 0) > 0) == (1, True, True)
    assert result.summary
    for text in (repr(result), result._repr_html_()):
        assert all(piece in text for piece in ("made in part", "students/student", "reports/student.html"))
    first = experiment.run(until="read-corpus")
    assert (len(first), first.student, first.report, first.evaluation, first.summary) == (1, None, None, None, [])


def test_the_verdict_is_that_of_the_report(workspace: Workspace) -> None:
    result = Experiment.load(workspace.config, quiet=True).run()
    assert result.report is not None
    verdict = json.loads(result.report.with_suffix(".json").read_text())["verdict"]
    assert result.verdict == verdict
    assert f"\nverdict: {verdict['decision']}\nstudent: " in repr(result)


def test_one_part_of_several_is_a_result_that_is_not_complete(fresh: Workspace) -> None:
    Experiment.load(fresh.config, quiet=True).run(until="read-corpus")
    part = Experiment.open(fresh.config, [], Console(quiet=True), "0/2")
    result = part.run(until="cache-teachers")
    assert [stage.outcome for stage in result] == ["reused", "not complete"]
    assert (result.is_complete, result.student) == (False, None)
    assert "2 of 4 done" in repr(result)


def test_python_returns_the_commands_results_as_objects(desk: Workspace) -> None:
    changed = Experiment.load(desk.config, {"targets.temperature": 0.5}, quiet=True)
    assert changed.explain("build-targets") == desk("explain", "build-targets", *CHANGED, "--json").json
    states = changed.plan()
    planned = desk("plan", *CHANGED, "--json").json
    assert [state.to_json() for state in states] == planned["stages"]
    assert changed.estimate_cost(states).to_json() == planned["cost"]
    assert changed.audit().to_json() == desk("audit", "--json").json
    assert changed.status() == desk("status", "--json").json
    assert changed.verify()["damaged"] == []
    with pytest.raises(AmalgamError, match="report is not up to date"):
        changed.report  # noqa: B018


def test_garbage_is_deleted_only_on_request(workspace: Workspace) -> None:
    experiment = Experiment.load(workspace.config, quiet=True)
    (workspace.artifacts / "quarantine").mkdir()
    path = workspace.artifacts / "quarantine/0123abcd-old.parquet"
    path.write_text("damaged")
    assert experiment.find_garbage() == []  # for a day
    os.utime(path, (0, 0))
    assert [item["path"] for item in experiment.find_garbage()] == ["quarantine/0123abcd-old.parquet"]
    experiment.find_garbage(delete=True)
    assert not experiment.find_garbage()


def test_a_result_that_was_deleted_after_it_was_read_is_named_and_made_again(workspace: Workspace) -> None:
    experiment = Experiment.load(workspace.config, quiet=True)
    before = experiment.targets.collect()
    shutil.rmtree(workspace.artifacts / "build-targets")
    with pytest.raises(AmalgamError, match=r"build-targets is not up to date \(missing") as refused:
        experiment.targets.collect()
    assert refused.value.fix == "experiment.run(until='build-targets')"
    experiment.run()
    assert experiment.targets.collect().equals(before)


def test_a_stale_result_is_an_error_and_never_returned(desk: Workspace) -> None:
    changed = Experiment.load(desk.config, {"targets.temperature": 0.5}, quiet=True)
    assert changed.config.targets.temperature == 0.5
    with pytest.raises(AmalgamError, match=r"build-targets .*0\.2 -> 0\.5") as refused:
        _ = changed.targets
    assert refused.value.fix == "experiment.run(until='build-targets')"
    assert len(changed.logits("first").collect()) == TRAIN + TEST


def test_running_until_a_stage_stops_there(workspace: Workspace) -> None:
    experiment = Experiment.load(workspace.config, ["targets.temperature=0.5"], quiet=True)
    with workspace.counting() as asked:
        result = experiment.run(until="build-targets")
    assert [stage.outcome for stage in result] == ["reused", "reused", "made"]
    assert asked[0].units == 0
    assert len(experiment.targets.collect()) == TRAIN
    assert states(experiment)["train-student"] == "missing"


def test_a_quiet_experiment_prints_nothing_and_another_prints_the_report(
    desk: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    Experiment.load(desk.config, quiet=True).run()
    assert capsys.readouterr() == ("", "")
    Experiment.load(desk.config).run()
    output = capsys.readouterr()
    assert ("macro-F1" in output.out, "report: reused" in output.err) == (True, True)


@pytest.mark.parametrize(
    ("do", "piece"),
    [
        (lambda one: one.texts("validation"), "test, train"),
        (lambda one: one.logits("third"), "first, second"),
        (lambda one: one.run(until="tragets"), "read-corpus"),
        (lambda one: one.predict(["the onion"], top=-1), "top is -1"),
        (lambda one: one.predict(["the onion"], top="2"), "top is '2'"),
        (lambda one: one.predict("the onion"), "takes a list of texts"),
        (lambda one: one.label(5, seed=-1), "seed is -1"),
        (lambda one: one.label("5"), "count is '5'"),
        (lambda one: one.label(count=True), "count is True"),
        (
            lambda one: Experiment.load(one.workspace.parent / "amalgam.yaml", {"student.method": "ensemble"}).student,
            "trains no student",
        ),
        (lambda one: Experiment.load(one.workspace.parent / "amalgam.yaml", "a=b"), "['a=b']"),
        (lambda one: Experiment.load(one.workspace.parent / "amalgam.yaml", [("student.seed", 1)]), "a list of texts"),  # type: ignore[list-item]
        (
            lambda one: Experiment.load(one.workspace.parent / "amalgam.yaml", {"student.epochs": {3}}),
            "the value of student.epochs is a set",
        ),
        (
            lambda one: Experiment.load(one.workspace.parent / "amalgam.yaml", texts=pl.DataFrame({"text": ["a"]})),  # type: ignore[arg-type]
            'texts={"train": ..., "test": ...}',
        ),
        (lambda one: Experiment.load(one.workspace.parent / "amalgam.yaml", texts={"dev": []}), "train, validation"),
        (lambda one: Experiment.load(one.workspace.parent / "amalgam.yaml", texts={"test": [1]}), "texts[0] = 1"),
        (
            lambda one: Experiment.load(
                one.workspace.parent / "amalgam.yaml", texts={"test": pl.DataFrame({"Text": ["a"]})}
            ),
            "Text",
        ),
        (
            lambda one: Experiment.load(
                one.workspace.parent / "amalgam.yaml",
                texts={"train": pl.DataFrame({"text": pl.Series([], dtype=pl.String)})},
            ),
            "rows",
        ),
    ],
)
def test_a_wrong_argument_is_refused_with_the_choices(done: Experiment, do: Any, piece: str) -> None:
    with pytest.raises(AmalgamError) as refused:
        do(done)
    assert piece in str(refused.value)


def test_overrides_are_paths_and_numbers_of_numpy_as_in_sections(desk: Workspace) -> None:
    import numpy as np

    overrides = {
        "corpus.test": [Path("texts/test.csv")],
        "student": {"epochs": np.int64(2)},
        "cache.passes": np.int64(4),
    }
    config = Experiment.load(desk.config, overrides, quiet=True).config
    assert (config.corpus.test, config.student.epochs, config.cache.passes) == (["texts/test.csv"], 2, 4)


def test_an_experiment_and_its_results_can_be_pickled(done: Experiment, desk: Workspace) -> None:
    result = done.run()
    copies = pickle.loads(pickle.dumps({"experiment": done, "result": result, "plan": done.plan()}))
    assert states(copies["experiment"]) == dict.fromkeys(STAGES, "current")
    assert copies["experiment"].student == done.student
    assert repr(copies["result"]) == repr(result)
    assert copies["result"].evaluation.equals(done.evaluation)
    assert (copies["plan"].is_current, copies["plan"].problems) == (True, [])
    assert copy.deepcopy(done).labels == UNION


def test_an_experiment_runs_in_a_thread_without_signal_handlers(desk: Workspace) -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(states(Experiment.load(desk.config, quiet=True))))
    thread.start()
    thread.join()
    assert results == [dict.fromkeys(STAGES, "current")]


def test_threads_share_an_experiment(done: Experiment) -> None:
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: done.labels, range(8))) == [UNION] * 8


class Dataset:
    """As much of datasets.Dataset as amalgam looks at: selections that its own table does not show, class numbers."""

    def __init__(self, table: pa.Table, rows: list[int]) -> None:
        self.table, self.rows = table, rows
        self.features = {"text": object(), "label": type("ClassLabel", (), {"names": UNION})()}

    def with_format(self, kind: str) -> Dataset:
        assert kind == "arrow"
        return self

    def iter(self, size: int) -> Any:
        for start in range(0, len(self.rows), min(size, 16)):
            yield self.table.take(self.rows[start : start + min(size, 16)])


def test_the_same_texts_as_any_object_are_one_file_and_rerun_nothing_but_the_reading(workspace: Workspace) -> None:
    frame = pl.read_csv(workspace.folder / "texts/train.csv")
    numbers = [UNION.index(label) for label in frame["label"]]
    table = pa.table({"text": frame["text"].to_list()[::-1], "label": numbers[::-1], "more": numbers})
    given = [frame, frame.lazy(), frame.to_arrow(), Dataset(table, list(range(TRAIN))[::-1])]
    loaded = [Experiment.load(workspace.config, texts={"train": one}, quiet=True) for one in given]
    assert len({tuple(one.config.corpus.train or ()) for one in loaded}) == 1
    [file] = (workspace.artifacts / "given").iterdir()
    assert pl.read_parquet(file).rows() == frame.rows()
    with workspace.counting() as asked:
        result = loaded[-1].run(until="build-targets")
    assert [stage.outcome for stage in result] == ["made in part", "reused", "reused"]
    assert asked[0].units == 0


def test_a_selection_of_a_dataset_is_that_selection(fresh: Workspace) -> None:
    frame = pl.read_csv(fresh.folder / "texts/train.csv")
    labels = [UNION.index(label) for label in frame["label"]]
    table = pa.table({"text": frame["text"].to_list(), "label": labels})
    experiment = Experiment.load(fresh.config, texts={"train": Dataset(table, [5, 3])}, quiet=True)
    experiment.run(until="read-corpus")
    assert set(experiment.texts().collect()["text"]) == {frame["text"][5], frame["text"][3]}
