"""`make benchmark`: one table between two markers; a benchmark that fails or cannot run is a row."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

import pytest

from amalgam.benchmarks import check_gpu, table
from amalgam.benchmarks.table import BEGIN, BENCHMARKS, END, NEEDS, Benchmark, Line

ROOT = Path(__file__).resolve().parents[1]
SPEED = Line("speed, {row}", "amalgam|other", "texts_per_s", "texts/s", {"ratio": "{} x rival"})
PRINTS = """
import json, sys
print("a message")
print(json.dumps({"row": "amalgam", "texts_per_s": 1234.5, "ratio": 2.0, "spread": 0.021, "arguments": sys.argv[1:]}))
print(json.dumps({"row": "not in the table", "texts_per_s": 1}))
"""


def options(*, quick: bool = True, **more: object) -> argparse.Namespace:
    return argparse.Namespace(**{"quick": quick, "data": None, "work": Path("w"), **more})


def test_the_rows_of_the_gpu_are_those_that_its_benchmark_prints() -> None:
    names = [f"{race}: amalgam" for race in (*check_gpu.RACED, check_gpu.TRAINING)]
    assert [line.row for line in BENCHMARKS["gpu"].lines] == names


def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, name: str = "fake") -> Benchmark:
    """Return a benchmark whose module has this code."""
    folder = tmp_path / "fakes"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(table, "PACKAGE", "fakes")
    return Benchmark(name, [SPEED], "--quickly", "--whole DATA/x")


def test_a_row_has_figure_ratio_spread_and_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcome = table.measured(fake(monkeypatch, tmp_path, PRINTS), options(), {})
    assert not outcome.failed
    text = table.table({"swift": outcome}, options(), "abc, 2026-01-02", 0.5)
    assert "| `swift` | speed, amalgam | 1,234 texts/s | 2 x rival | 2 % |" in text.splitlines()
    assert re.search(r"^- swift, \d+ s: `python benchmarks/fake.py --quickly`$", text, re.MULTILINE), text
    assert (text.count("<details>"), text.endswith("\n</details>")) == (1, True)
    assert "2026-01-02" in text
    assert "busy" in text
    assert "busy" not in table.table({"swift": outcome}, options(), "abc, 2026-01-02", 0.01)


def test_folders_are_replaced_in_arguments_and_not_in_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    benchmark = fake(monkeypatch, tmp_path, PRINTS)
    whole = options(quick=False, data=tmp_path)
    assert table.filled(f"{benchmark.whole} WORK/a/b", whole) == [
        "--whole",
        f"{tmp_path}/x",
        f"{Path('w').absolute()}/a/b",
    ]
    assert table.measured(benchmark, whole, {}).command == "python benchmarks/fake.py --whole DATA/x"


@pytest.mark.parametrize(
    ("code", "part"),
    [
        (
            "raise SystemExit('the answers differ: /a/folder/of/mine/x.py | see')",
            "exit code 1: the answers differ: x.py / see",
        ),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9: no message"),
        ("print('nothing')", "none of the expected rows"),
        ("import time; time.sleep(60)", "longer than 1 s"),
        (PRINTS + "raise ValueError('later')", "ValueError: later"),
    ],
)
def test_a_failure_is_a_row_with_its_message_and_the_others_continue(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, part: str
) -> None:
    monkeypatch.setattr(table, "QUICK_SECONDS", 1 if "sleep" in code else 60)
    broken = table.measured(fake(monkeypatch, tmp_path, code), options(), {})
    assert broken.failed
    assert part in broken.cells[-1].figure
    assert broken.cells[-1].what == "speed"
    assert (len(broken.cells) == 2) == (code.startswith(PRINTS)), "rows before the failure stay"
    monkeypatch.setattr(table, "QUICK_SECONDS", 60)
    assert not table.measured(fake(monkeypatch, tmp_path, PRINTS, "second"), options(), {}).failed


def test_an_absent_need_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_has_gpu", lambda: False)
    monkeypatch.setattr(table, "run", pytest.fail)
    for name, quick, part in (
        ("gpu", True, "this machine has no GPU"),
        ("cluster", True, "ray" if not NEEDS["ray"][0](options()) else "too long"),
        ("teachers", False, "DATA=FOLDER"),
        ("methods", True, "too long"),
    ):
        outcome = table.measured(BENCHMARKS[name], options(quick=quick), {})
        assert (outcome.failed, len(outcome.cells)) == (False, 1)
        assert outcome.cells[0].figure.startswith("not measured: ")
        assert part in outcome.cells[0].figure


def test_a_benchmark_runs_after_the_one_whose_files_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert table.selected(["few-labels", "targets"]) == ["targets", "pools", "few-labels"]
    names = list(BENCHMARKS)
    assert table.selected(names) == names
    for name, benchmark in BENCHMARKS.items():
        for earlier in benchmark.after:
            first = BENCHMARKS[earlier]
            assert names.index(earlier) < names.index(name)
            assert set(first.needs) <= set(benchmark.needs)
            [folder] = re.findall(r"--(?:folder|out) (\S+)", first.whole)
            assert folder in benchmark.whole
    monkeypatch.setattr(table, "run", pytest.fail)
    failed = {"methods": table.Outcome("methods", [], failed=True)}
    monkeypatch.setitem(NEEDS, "minilm", (lambda _: True, ""))
    passes = table.measured(BENCHMARKS["passes"], options(quick=False, data=Path("d")), failed)
    assert [cells.figure for cells in passes.cells] == ["not measured: it reads the files of `methods`, which failed"]


def test_the_table_replaces_the_text_between_the_markers_and_nothing_else() -> None:
    results = (ROOT / "benchmarks/RESULTS.md").read_text("utf-8")
    once = table.with_table(results, "the table")
    assert f"{BEGIN}\nthe table\n{END}" in once
    assert once.partition(BEGIN)[0] == results.partition(BEGIN)[0]
    assert once.partition(END)[2] == results.partition(END)[2]
    assert table.with_table(once, "the table") == once
    for broken in ("no marker", f"{END} {BEGIN}", f"{BEGIN} {BEGIN} {END}"):
        with pytest.raises(SystemExit, match="fix: "):
            table.with_table(broken, "the table")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_options_rows_and_figures_of_each_entry_are_those_of_its_benchmark(name: str) -> None:
    benchmark = BENCHMARKS[name]
    source = (ROOT / f"benchmarks/{benchmark.module}.py").read_text("utf-8")
    for arguments in (benchmark.quick or "", benchmark.whole):
        assert [option for option in re.findall(r"--[\w-]+", arguments) if f'"{option}"' not in source] == []
    assert '"--json"' in source
    for line in benchmark.lines:
        names = [line.figure, *line.ratios]
        missing = [name for name in names if name not in source and not name.startswith("ratio_to_")]
        assert set(missing) <= {"accuracy", "gap_closed", "peak_rss_mb"}, "estimates.py and scale.py compute these"
    assert set(benchmark.needs) <= NEEDS.keys()
    assert "DATA" not in (benchmark.quick or "")


def test_each_command_of_the_page_names_a_benchmark_and_its_options() -> None:
    page = (ROOT / "benchmarks/README.md").read_text("utf-8")
    commands = re.findall(r"^python (benchmarks/\w+\.py)(.*?)(?:  #.*)?$", page, re.MULTILINE)
    assert len(commands) > 30
    for script, arguments in commands:
        source = (ROOT / script).read_text("utf-8")
        assert [option for option in re.findall(r"--[\w-]+", arguments) if f'"{option}"' not in source] == [], script


def test_a_table_that_changed_is_no_change_of_the_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(table, "RESULTS", tmp_path / "benchmarks/RESULTS.md")
    table.RESULTS.parent.mkdir()
    table.RESULTS.write_text("before")
    author = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for words in (("init",), ("add", "."), (*author, "commit", "--message", "first")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)  # noqa: S607
    head = table.commit()
    table.RESULTS.write_text("after")
    assert table.commit() == head
    (tmp_path / "benchmarks/serve.py").write_text("")
    assert table.commit() == f"{head} with changes"


def test_the_share_of_other_processes_is_between_zero_and_one() -> None:
    before = table.cpu_seconds()
    sum(range(10**6))
    share = table.foreign_share(before)
    assert share is None or 0 <= share <= 1
    assert table.foreign_share(None) is None
