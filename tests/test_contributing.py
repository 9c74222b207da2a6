"""The examples of docs/contributing run against the real classes; the files and names on the pages exist."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

from amalgam.pipeline.storage.facts import DECLARED, FactTypes

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("target-method", "uncertainty-measure", "stage", "storage-backend")


def _text(page: str) -> str:
    return (ROOT / "docs/contributing" / f"{page}.md").read_text("utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_the_example_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", _text(page), re.MULTILINE | re.DOTALL)
    assert any("assert " in block for block in blocks)
    names: dict[str, Any] = {"__name__": f"example_{page.replace('-', '_')}"}
    monkeypatch.setitem(DECLARED, "count-words", FactTypes())  # that of the page ends with the test
    with contextlib.chdir(tmp_path):
        for block in blocks:
            exec(compile(block, f"{page}.md", "exec"), names)  # noqa: S102 - our own pages


@pytest.mark.parametrize("page", PAGES)
def test_the_files_and_names_of_a_page_exist(page: str) -> None:
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", _text(page), flags=re.MULTILINE | re.DOTALL))
    paths = [span for span in spans if span.endswith(".py") and "NAME" not in span]
    assert paths
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    code = "".join((ROOT / path).read_text("utf-8") for path in set(paths))
    names = [span.split(".")[-1] for span in spans if re.fullmatch(r"_?[A-Za-z]+(_[A-Za-z]+)*(\.[a-z]+)?", span)]
    assert [name for name in names if name not in code] == []
