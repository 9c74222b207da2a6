"""Shows messages, progress and tables in a Jupyter notebook: one output that is rewritten, and tables as HTML.

IPython is used where a kernel has loaded it, and is never imported.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Sequence
from html import escape
from typing import Any

from amalgam.pipeline.console import Console, printable
from amalgam.pipeline.secrets import masked


def kernel() -> Any:
    """Returns the shell of the notebook in which this code runs; None outside of one."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell if getattr(shell, "kernel", None) is not None else None


if kernel() is not None:
    # The libraries import tqdm.auto, which prints this in red without ipywidgets. amalgam shows none of its bars.
    warnings.filterwarnings("ignore", message="IProgress not found")


def console_of_python(*, quiet: bool, tables: bool = True) -> Console:
    """Returns the console of `amalgam.Experiment`; `quiet` prints nothing, not even results."""
    if quiet:
        return Console(quiet=True, err=io.StringIO(), out=io.StringIO())
    return NotebookConsole(tables=tables) if kernel() is not None else Console(tables=tables)


def table_html(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a table without styles of its own, except that columns of text are aligned at the left."""
    cells = [[str(cell) for cell in row] for row in rows]
    columns = list(zip(*cells, strict=True)) or [()] * len(header)
    sides = ["right" if _is_number_column(column) else "left" for column in columns]
    lines = [_row("th", header, sides), "</thead>", "<tbody>", *(_row("td", row, sides) for row in cells)]
    caption = escape(printable(title.strip())).replace("\n", "<br>")
    caption = f"<p>{caption}</p>\n" if title else ""
    return caption + "\n".join(["<table>", "<thead>", *lines, "</tbody>", "</table>"])


def _is_number_column(column: Sequence[str]) -> bool:
    return all(cell[:1].isdigit() or cell in {"", "-", ".", "∞"} for cell in column) and any(map(str.strip, column))


def _row(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    parts = (
        f'<{tag} style="text-align: {side}">{escape(printable(cell))}</{tag}>'
        for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{''.join(parts)}</tr>"


class HtmlConsole(Console):
    """Collects tables and results as HTML, and prints nothing."""

    def __init__(self) -> None:
        super().__init__(quiet=True, out=io.StringIO())
        self.parts: list[str] = []

    def result(self, text: str) -> None:
        self.parts.append(f"<p>{escape(printable(text.strip()))}</p>")

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.parts.append(table_html(title, header, rows))


class Printed:
    """A result that Python shows as the command prints it, in a notebook as HTML."""

    def print_to(self, console: Console) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        out = io.StringIO()
        self.print_to(Console(quiet=True, out=out))
        return out.getvalue().rstrip("\n")

    def _repr_html_(self) -> str:
        console = HtmlConsole()
        self.print_to(console)
        return "\n".join(console.parts)


class NotebookConsole(Console):
    """Writes all messages of a cell into one output, with the line of progress at its end."""

    def __init__(self, *, tables: bool = True) -> None:
        super().__init__(tables=tables)
        self._every_seconds = 0.5
        self._cell: int | None = None
        self._output: Any = None
        self._lines: list[str] = []
        self._moving = ""

    def say(self, text: str, *, always: bool = False) -> None:  # noqa: ARG002 - a notebook is never quiet
        self._begin_cell()
        self._lines.append(printable(masked(text)))
        self._moving = ""
        self._rewrite()

    def result(self, text: str) -> None:
        self.say(text)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if not self.has_tables:
            return
        self._output = None
        self._display(
            {"text/html": table_html(title, header, rows), "text/plain": self._text_table(title, header, rows)}
        )

    def _draw(self, parts: Sequence[str]) -> None:
        self._begin_cell()
        self._moving = printable("  ".join(parts))
        self._rewrite()

    def _clear(self) -> None:
        if self._moving:
            self._moving = ""
            self._rewrite()

    def _begin_cell(self) -> None:
        cell = getattr(kernel(), "execution_count", None)
        if self._output is None or cell != self._cell:
            self._cell, self._output, self._lines = cell, None, []

    def _rewrite(self) -> None:
        content = {"text/plain": "\n".join([*self._lines, *([self._moving] if self._moving else [])])}
        if self._output is None:
            self._output = self._display(content, display_id=True)
        else:
            self._output.update(content, raw=True)

    @staticmethod
    def _display(content: dict[str, str], **options: Any) -> Any:
        return sys.modules["IPython.display"].display(content, raw=True, **options)
