"""In a notebook the messages of a cell are one output that is rewritten, and tables are HTML."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import ModelError
from amalgam.pipeline.notebook import HtmlConsole, NotebookConsole, console_of_python, table_html


class Kernel:
    """As much of a notebook as amalgam uses: the outputs of each cell, and the loaded parts of IPython."""

    kernel = object()

    def __init__(self) -> None:
        self.execution_count = 1
        self.outputs: list[tuple[int, dict[str, str]]] = []

    def display(self, content: dict[str, str], *, raw: bool, display_id: bool = False) -> Any:
        assert raw
        place = len(self.outputs)
        self.outputs.append((self.execution_count, content))

        def update(content: dict[str, str], *, raw: bool) -> None:
            assert raw
            self.outputs[place] = (self.outputs[place][0], content)

        return types.SimpleNamespace(update=update) if display_id else None

    def texts(self) -> list[str]:
        return [content.get("text/html", content["text/plain"]) for _, content in self.outputs]


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: kernel))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=kernel.display))
    return kernel


def test_the_line_of_progress_moves_at_the_end_of_the_messages(
    notebook: Kernel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    console = console_of_python(quiet=False)
    console.stage_started("build-targets", "first-run")
    with console.progress("build-targets", "texts", 100, 0):
        for _ in range(3):
            now[0] += 1
            console.advance(20)
            assert notebook.texts() == [f"build-targets: running (first-run)\n{notebook.texts()[0].splitlines()[-1]}"]
        assert "build-targets  60%" in notebook.texts()[0]
        console.note("a text was truncated")
        assert notebook.texts()[0].splitlines()[1:] == ["note: a text was truncated"]
        now[0] += 1
        console.advance(20)
        assert "80%" in notebook.texts()[0].splitlines()[-1]
    assert notebook.texts() == ["build-targets: running (first-run)\nnote: a text was truncated"]
    assert capsys.readouterr() == ("", "")


def test_a_table_stands_between_the_messages_before_and_after_it(
    notebook: Kernel, capsys: pytest.CaptureFixture[str]
) -> None:
    console = console_of_python(quiet=False)
    console.say("before")
    console.table("A table", ["name", "accuracy"], [["<b>", "0.5"], ["student", "-"]])
    console.say("after")
    console.result("the end")
    first, table, last = notebook.texts()
    assert (first, last) == ("before", "after\nthe end")
    assert '<td style="text-align: left">&lt;b&gt;</td><td style="text-align: right">0.5</td>' in table
    assert capsys.readouterr() == ("", "")


def test_each_cell_has_its_own_output(notebook: Kernel) -> None:
    console = console_of_python(quiet=False)
    console.say("first")
    notebook.execution_count = 2
    console.say("second")
    assert [(cell, content["text/plain"]) for cell, content in notebook.outputs] == [(1, "first"), (2, "second")]


def test_outside_of_a_notebook_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(console_of_python(quiet=False)) is Console
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    assert type(console_of_python(quiet=False)) is Console


def test_a_quiet_console_shows_nothing_in_a_notebook(notebook: Kernel, capsys: pytest.CaptureFixture[str]) -> None:
    console = console_of_python(quiet=True)
    console.say("a message")
    console.result("a result")
    console.table("A table", ["name"], [["a"]])
    assert (notebook.outputs, capsys.readouterr()) == ([], ("", ""))
    assert not isinstance(console, NotebookConsole)


def test_html_escapes_every_cell_and_shows_control_characters() -> None:
    console = HtmlConsole()
    console.table("<title>", ["<a>"], [["\x1b[31m&"]])
    console.result("<script>")
    assert "".join(console.parts).count("<script>") == 0
    assert "\\x1b[31m&amp;" in console.parts[0]
    assert "&lt;title&gt;" in console.parts[0]
    assert "<tbody>\n</tbody>" in table_html("", ["stage", "state"], [])
    assert 'right">∞<' in table_html("", ["NLL"], [["∞"], ["0.61"], ["-"]])
    assert table_html("of <a>\nand b", ["stage"], []).startswith("<p>of &lt;a&gt;<br>and b</p>\n")


def test_an_error_is_shown_by_its_lines_as_on_the_command_line() -> None:
    error = ModelError("there is no folder ./a", where="teacher a", fix="name a folder")
    lines = ["ModelError: there is no folder ./a", "where: teacher a", "fix: name a folder"]
    assert error._render_traceback_() == lines  # IPython calls it


def test_no_message_shows_a_secret(notebook: Kernel) -> None:
    """Notebooks are stored and shared with their outputs."""
    console_of_python(quiet=False).say("fetching s3://texts/train.csv?X-Amz-Signature=0123456789abcdef")
    assert notebook.texts() == ["fetching s3://texts/train.csv?(not shown)"]


def test_a_console_without_tables_prints_messages_alone(
    notebook: Kernel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def print_all() -> None:
        console = console_of_python(quiet=False, tables=False)
        console.table("scores", ["accuracy"], [["0.9"]])
        console.verdict(["verdict: ship"])
        console.say("== amalgam-seed-0")

    print_all()
    assert notebook.texts() == ["== amalgam-seed-0"]
    monkeypatch.delitem(sys.modules, "IPython")
    print_all()
    assert capsys.readouterr() == ("", "== amalgam-seed-0\n")
