"""Shows the notebook of examples/ as a page with its stored outputs; `.ci/notebook` runs it and stores them.

MkDocs calls `on_files` (mkdocs.yml, hooks).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples/first_hour.ipynb"
PAGE = "first-hour.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """Returns the notebook as Markdown: each code cell, then its outputs."""
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return "\n\n".join(block for cell in cells for block in _blocks(cell)) + "\n"


def _blocks(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {"text/plain": output.get("text", "")})
        html = "".join(data.get("text/html", ""))
        yield _raw(html) if html else f"``` {{.text .output}}\n{''.join(data['text/plain']).rstrip()}\n```"


def _raw(html: str) -> str:
    """Returns HTML as one block of Markdown, with tables in the style of the page."""
    plain = re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)
    plain = re.sub(r"<table[^>]*>", "<table>", plain)
    lines = "\n".join(line for line in plain.splitlines() if line.strip())  # a blank line would end the block
    return f'<div class="output">\n{lines}\n</div>'
