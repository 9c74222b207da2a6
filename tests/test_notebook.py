"""The notebook of examples/ runs in an empty folder, and its stored outputs are those of a run."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from amalgam.tests.workspaces import quiet_environment

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples/first_hour.ipynb"
MACHINE_PATH = re.compile(r"/(home|root|tmp|usr|work|Users|var|opt)/|[A-Z]:\\|site-packages")


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]


def kinds(cell: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the type of each output, and its richest form or its stream."""
    return [(output["output_type"], output.get("name") or min(output["data"])) for output in cell["outputs"]]


def text_of(cell: dict[str, Any]) -> str:
    return "\n".join("".join(output.get("text") or output["data"]["text/plain"]) for output in cell["outputs"])


def test_the_notebook_runs_and_its_stored_outputs_have_the_same_form(tmp_path: Path) -> None:
    environment = quiet_environment(JUPYTER_PLATFORM_DIRS="1", IPYTHONDIR=str(tmp_path / "ipython"))
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    target = tmp_path / "executed.ipynb"
    command = [sys.executable, str(ROOT / ".ci/notebook"), str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    executed, stored = code_cells(target), code_cells(NOTEBOOK)
    assert [cell["source"] for cell in executed] == [cell["source"] for cell in stored]
    assert [kinds(cell) for cell in executed] == [kinds(cell) for cell in stored]
    student = next(line for line in text_of(executed[4]).splitlines() if line.startswith("student (amalgam)"))
    assert float(student.split()[2]) > 0.7  # far above every teacher: a run of the cells learns
    assert "cache-teachers: reused" in text_of(executed[-2])


def test_stored_outputs_name_no_machine_and_no_warning() -> None:
    cells = code_cells(NOTEBOOK)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert cell["outputs"], cell["source"]
        assert ("stream", "stderr") not in kinds(cell)
        assert not MACHINE_PATH.search(json.dumps(cell["outputs"])), cell["source"]


class Tags(HTMLParser):
    """Count the open tags; a block of HTML in Markdown must close its own."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "br":  # it has no end
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_of_the_notebook_shows_every_cell_and_output() -> None:
    page: str = runpy.run_path(str(ROOT / "docs/notebook.py"))["page"]()
    for cell in code_cells(NOTEBOOK):
        assert f"```python\n{''.join(cell['source'])}\n```" in page
    blocks = re.findall(r'^<div class="output">\n.*?\n</div>$', page, re.MULTILINE | re.DOTALL)
    outputs = [kind for cell in code_cells(NOTEBOOK) for kind in kinds(cell)]
    assert len(blocks) == sum(form == "text/html" for _, form in outputs)
    assert page.count("``` {.text .output}\n") == sum(form != "text/html" for _, form in outputs)
    for block in blocks:
        assert "\n\n" not in block
        tags = Tags()
        tags.feed(block)
        assert tags.open == []
