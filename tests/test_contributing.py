"""The files and names on the pages of docs/contributing exist. tests/test_docs.py runs their examples."""

from __future__ import annotations

import ast
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


# ---- map.md: questions, each answered by places that exist


PAGE = ROOT / "docs/contributing/map.md"


def _answers() -> dict[str, list[str]]:
    """Question -> its places, from the rows of the page's table."""
    rows = [line.strip("|").split("|") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    return {row[0].strip(): re.findall(r"`([^`]+)`", row[1]) for row in rows[2:]}


def _names(path: Path) -> set[str]:
    """The classes, functions and constants of a module, and the methods of its classes as Class.method."""
    names: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef):
            members = [child.name for child in node.body if isinstance(child, ast.FunctionDef)]
            names |= {node.name, *(f"{node.name}.{member}" for member in members)}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_each_question_has_an_answer() -> None:
    answers = _answers()
    assert len(answers) >= 25
    assert [question for question, places in answers.items() if not question.endswith("?") or not places] == []


def test_every_place_exists() -> None:
    missing = []
    for place in (place for places in _answers().values() for place in places):
        path, _, name = place.partition("::")
        file = ROOT / path
        if not file.exists() or (name and name not in _names(file)):
            missing.append(place)
    assert missing == []
