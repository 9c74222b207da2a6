"""The files and names on the pages of docs/contributing exist. tests/test_docs.py runs their examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("target-method", "uncertainty-measure", "stage", "storage-backend")


def _text(page: str) -> str:
    return (ROOT / "docs/contributing" / f"{page}.md").read_text("utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_the_example_of_a_page_checks_its_result(page: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", _text(page), re.MULTILINE | re.DOTALL)
    assert any("assert " in block for block in blocks)


@pytest.mark.parametrize("page", PAGES)
def test_the_files_and_names_of_a_page_exist(page: str) -> None:
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", _text(page), flags=re.MULTILINE | re.DOTALL))
    paths = [span for span in spans if span.endswith(".py") and "NAME" not in span]
    assert paths
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    code = "".join((ROOT / path).read_text("utf-8") for path in set(paths))
    names = [span.split(".")[-1] for span in spans if re.fullmatch(r"_?[A-Za-z]+(_[A-Za-z]+)*(\.[a-z]+)?", span)]
    assert [name for name in names if name not in code] == []
