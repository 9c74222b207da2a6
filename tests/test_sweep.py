"""A sweep makes ordinary students, one for each combination of values; shared results are computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amalgam.pipeline.errors import ExperimentError
from amalgam.stages.app.api import Experiment
from amalgam.stages.app.sweep import Sweep, combinations, over_seeds, swept_fields, values_of
from amalgam.stages.report.tables import SCORES
from amalgam.tests.workspaces import EXPERIMENT, Workspace, amalgam


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0,1,2", ["0", "1", "2"]),
        ("muka-soft, amalgam", ["muka-soft", "amalgam"]),
        ("[desk,study],[weekend]", ["[desk,study]", "[weekend]"]),
        ('"a, b",c', ['"a, b"', "c"]),
        ("0.5", ["0.5"]),
        ("[desk,study]", ["[desk,study]"]),
        ("teacher:first,ensemble", ["teacher:first", "ensemble"]),
        ("0], [1", ["0], [1"]),
        ("", [""]),
    ],
)
def test_values_are_separated_by_commas_outside_brackets(text: str, values: list[str]) -> None:
    assert values_of(text) == values


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "amalgam.yaml").write_text(EXPERIMENT)
    return tmp_path / "amalgam.yaml"


def test_every_combination_is_a_student_with_a_name_of_its_own(config: Path) -> None:
    fields = ["student.method=uhc,muka-soft", "student.seed=0,1", "student.epochs=2"]
    members = combinations(config, *swept_fields(fields, config))
    assert [member.name for member in members] == ["uhc-seed-0", "uhc-seed-1", "muka-soft-seed-0", "muka-soft-seed-1"]
    assert members[1].overrides == [
        "student.epochs=2", "student.method=uhc", "student.seed=1", 'student.name="uhc-seed-1"'
    ]  # fmt: skip
    named = combinations(config, *swept_fields(["student.name=try", "targets.temperature=0.1,.5,5"], config))
    assert [member.name for member in named] == ["try-temperature-0.1", "try-temperature-0.5", "try-temperature-5"]


def test_a_name_of_long_values_ends_in_a_digest(config: Path) -> None:
    encoders = ",".join(f"sentence-transformers/paraphrase-multilingual-{kind}-v2" for kind in ("MiniLM", "mpnet"))
    fields = [f"student.encoder={encoders}", "student.learning_rate=1e-3,1e-4"]
    names = [member.name for member in combinations(config, *swept_fields(fields, config))]
    assert {len(name) for name in names} == {64}
    assert len(set(names)) == 4
    assert "use 1 to 64 ASCII letters" in amalgam("plan", f"student.name={'a' * 65}", folder=config.parent).err


@pytest.mark.parametrize(
    ("arguments", "piece"),
    [
        (["student.seed=0-2"], "no field has several values; given: student.seed=0-2\nfix: separate values by commas"),
        (["student.name=a,b"], "student.name"),
        (["execution.device=cpu,cuda"], "execution.device"),
        (["student.seed=1,1"], "seed-1: student.seed=1 and student.seed=1\nfix: name each value once"),
        (["student.encoder=./a,../a"], "name a: student.encoder=./a and student.encoder=../a\nfix: leave"),
        (["student.epochs=2", "student.encoder=./a,../a"], "amalgam run student.epochs=2 student.encoder=../a"),
        (["student.seed=" + ",".join(map(str, range(15))), "cache.seed=" + ",".join(map(str, range(15)))], "225"),
        (["student.seed=0,none"], "student.seed"),
        (["student.seed=0,1", "student.seed=2,3"], "student.seed is given 2 times"),
    ],
)
def test_an_impossible_sweep_is_refused_before_any_work(config: Path, arguments: list[str], piece: str) -> None:
    result = amalgam("sweep", *arguments, folder=config.parent)
    assert result.code == 2
    assert piece in result.err
    assert sorted(path.name for path in config.parent.iterdir()) == ["amalgam.yaml"]


def test_a_sweep_makes_the_students_of_single_runs_and_computes_no_pass_twice(workspace: Workspace) -> None:
    with workspace.counting() as asked:
        result = workspace("sweep", "student.seed=0,1", "--json").json
    assert asked[0].units == 0
    one, other = result["students"]
    assert (workspace.folder / "students/seed-1/model.safetensors").exists()
    assert one["fingerprint"] != other["fingerprint"]
    plans = workspace.plan("student.seed=0"), workspace.plan("student.seed=1")
    assert [plan["train-student"]["fingerprint"] for plan in plans] == [one["fingerprint"], other["fingerprint"]]
    assert {stage["state"] for plan in plans for stage in plan.values()} == {"current"}
    scores = [student["scores"]["accuracy"] for student in result["students"]]
    mean, deviation = result["over_seeds"][0]["accuracy"]
    assert mean == pytest.approx(sum(scores) / 2)
    assert deviation == pytest.approx(abs(scores[0] - scores[1]) / 2**0.5)
    again = workspace("sweep", "student.seed=0,1")
    assert "running" not in again.err
    assert "replaced" not in again.err
    assert [line.split("  ")[0] for line in again.out.splitlines()[3:]] == ["seed-0", "seed-1", "all, mean of 2"]
    assert f"  {100 * mean:.1f} % ± {100 * deviation:.1f}  " in again.out.splitlines()[-1]


def test_notes_name_replaced_students_and_fields_without_effect(workspace: Workspace) -> None:
    for setting in ("student.learning_rate=1e-3", "student.learning_rate=2e-3"):
        notes = workspace("sweep", "student.accumulate=1,2", setting).err
    assert "students of other settings were replaced: students/accumulate-1, students/accumulate-2" in notes
    assert "accumulate-1 and accumulate-2 have equal scores: student.accumulate changed" in notes


def test_a_student_that_cannot_be_trained_is_named_before_any_is(workspace: Workspace) -> None:
    workspace.write([(text, "") for text, _ in workspace.texts()])
    for values, piece in (
        ("student.layers=1,9", "layers-9: student.layers: 9"),
        ("student.method=uhc,mt-bert", "mt-bert: mt-bert needs teachers with one label set"),
        ("labels=null,labels.csv", "labels.csv: labels.csv does not exist"),
        ("teachers.1.model=./models/second,./models/none", "models-none: there is no folder ./models/none"),
        ("teachers=[./models/first,./models/second],[./models/first]", "first: 20 test texts have a gold label"),
        ("student.method=uhc,supervised", ""),
    ):
        refused = workspace.attempt("sweep", values)
        assert (refused.code != 0, piece in refused.err) == (True, True), refused.err
    assert "supervised: 120 training texts have no gold label" in refused.err
    assert {folder.name for folder in (workspace.folder / "students").iterdir()} == {"student"}


@pytest.mark.parametrize(
    ("content", "piece"),
    [
        (None, "texts-last.csv: texts/last.csv does not exist"),
        (b"text,label\n", "texts-last.csv: no rows in last.csv"),
        (b"a,b\n1,2\n", "texts-last.csv: no column text in last.csv"),
        (b"text,label\na judge,law\n\xff,law\n", "== texts-last.csv: texts\n"),
    ],
)
def test_texts_that_cannot_be_read_are_named_before_a_student_is_trained(
    desk: Workspace, content: bytes | None, piece: str
) -> None:
    last = desk.folder / "texts/last.csv"
    last.unlink(missing_ok=True)
    if content is not None:
        last.write_bytes(content)
    refused = desk.attempt("sweep", "corpus.train=texts/train.csv,texts/last.csv")
    assert (refused.code != 0, piece in refused.err) == (True, True), refused.err
    assert "\n== texts-train.csv\n" not in f"\n{refused.err}"


def test_students_that_differ_in_more_than_seeds_are_no_group() -> None:
    scores = dict.fromkeys(SCORES, 0.5)
    settings = [{"student.method": "uhc", "student.seed": "0"}, {"student.method": "amalgam", "student.seed": "1"}]
    by_settings: Any = [{"values": values, "scores": scores} for values in settings]
    by_method: Any = [{"values": {"student.method": name}, "scores": scores} for name in "ab"]
    assert list(over_seeds(by_settings)) == []
    assert list(over_seeds(by_method)) == []


def test_a_sweep_without_labels_names_the_next_command() -> None:
    student: Any = {"name": "seed-0", "values": {"student.seed": "0"}, "scores": None}
    title, _, rows = Sweep([student], [], {}).table()
    assert rows == [["seed-0"]]
    assert "`amalgam report NAME`" in title


def test_a_sweep_over_teachers_shows_the_teachers_that_every_student_has() -> None:
    measures: dict[str, Any] = {**dict.fromkeys(SCORES, 0.5), "nll_infinite": 0}

    def student(n: int, groups: dict[str, list[str]]) -> Any:
        scores = {**measures, "n": n, "slice_accuracy": dict.fromkeys(groups, 0.5)}
        return {"name": f"{n}", "values": {"teachers": f"{n}"}, "n": n, "groups": groups, "scores": scores}

    first, second = {"first": ["art", "law"]}, {"second": ["sports"]}
    title, columns, rows = Sweep([student(40, {**second, **first}), student(30, first)], [], {}).table()
    assert (columns[5:], len(rows[0]), len(rows[1])) == (["on first"], 6, 6)
    assert title.startswith("30 to 40 labelled test texts; accuracies on different texts cannot be compared")
    title, columns, _ = Sweep([student(40, first), student(40, {"first": ["art"]})], [], {}).table()
    assert (title, columns[5:]) == ("40 labelled test texts", [])


def test_a_sweep_in_python_has_a_row_for_each_student_with_its_values(workspace: Workspace) -> None:
    experiment = Experiment.load(workspace.config, {"student.seed": 7}, quiet=True)
    sweep = experiment.sweep({"student.seed": np.arange(2), "student.method": ["muka-soft"]})
    frame = sweep.frame
    assert frame.select("student", "student.seed", "student.method").rows() == [
        ("seed-0-muka-soft", 0, "muka-soft"), ("seed-1-muka-soft", 1, "muka-soft")
    ]  # fmt: skip
    one = sweep.experiments["seed-1-muka-soft"]
    assert one.plan().is_current
    own = one.evaluation.filter(system="student (muka-soft)").drop("system")
    assert own.equals(frame.tail(1).select(own.columns))
    assert repr(sweep).splitlines()[-1].startswith("muka-soft, mean of 2")
    assert "muka-soft, mean of 2" in sweep._repr_html_()
    compared = experiment.compare(*frame["student"]).frame
    assert compared.select("student", *own.columns).equals(frame.select("student", *own.columns))
    assert compared["difference"].to_list() == [None, pytest.approx(frame["accuracy"][1] - frame["accuracy"][0])]
    assert compared["gained"][1] - compared["lost"][1] == round(compared["difference"][1] * compared["n"][1])
    assert "against the first" in repr(experiment.compare(*frame["student"]))
    assert "against the first" in experiment.compare(*frame["student"])._repr_html_()
    for names in (["seed-0-muka-soft"], ["seed-0-muka-soft"] * 2, ["seed-0-muka-soft", "absent"]):
        with pytest.raises(ExperimentError) as refused:
            experiment.compare(*names)
        assert refused.value.fix
    with pytest.raises(ExperimentError, match=r"overrides: 1 problem[\s\S]*where: experiment.sweep\(...\)"):
        experiment.sweep({"student.sed": [0, 1]})
    wrong: list[Any] = ["student.seed=0,1", {}, {"student.seed": 3}, {"student": {"seed": [0]}}, {"student.seed": []}]
    for fields in wrong:
        with pytest.raises(ExperimentError) as refused:
            experiment.sweep(fields)
        assert refused.value.fix
