"""README.md: short, with figures that the benchmarks recorded; the documentation's search finds the common words."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from amalgam.stages.methods import load_with_methods
from amalgam.tests.test_docs import ROOT
from amalgam.tests.workspaces import amalgam

README = (ROOT / "README.md").read_text("utf-8")
RESULTS = (ROOT / "benchmarks/RESULTS.md").read_text("utf-8")
MOST_LINES = 120
ROWS = [re.findall(r"\| \**(0\.\d{3})", row) for row in README.splitlines() if row.startswith("| ") and "**0." in row]
LOSSES = [float(row[4]) - float(row[3]) for row in ROWS]
"""Accuracy of `supervised` minus that of amalgam in each row of the table."""
DIFFERENCES = [f"{min(LOSSES):.3f}", f"{max(LOSSES):.3f}"]


def test_the_readme_is_short_and_lists_no_files() -> None:
    assert len(README.splitlines()) <= MOST_LINES
    assert not re.search("[\u251c\u2514\u2500]", README)
    for part in ("```mermaid", "from amalgam import Experiment", "pip install", "$ amalgam run", "docs/install.md"):
        assert part in README


def test_the_picture_names_no_box_twice() -> None:
    """Mermaid draws two boxes of one name as one box, with the text of the second."""
    picture = README.partition("```mermaid\n")[2].partition("```")[0]
    names = re.findall(r"\b(\w+)\[", picture)
    assert names
    assert len(names) == len(set(names))


@pytest.mark.parametrize("page", ["README.md", "docs/results.md", "docs/comparison.md"])
def test_every_accuracy_is_one_of_the_benchmarks(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    figures = set(re.findall(r"(?<![\d.])0\.\d{3}\b", text)) - set(DIFFERENCES)
    assert figures
    assert sorted(figure for figure in figures if figure not in RESULTS) == []


def test_the_differences_named_on_the_comparison_page_are_those_of_the_table() -> None:
    assert len(LOSSES) >= 2
    assert "by {} to {} accuracy".format(*DIFFERENCES) in (ROOT / "docs/comparison.md").read_text("utf-8")


def test_links_to_a_heading_of_the_benchmarks_exist() -> None:
    anchors = [*re.findall(r"RESULTS\.md#([\w-]+)", README), *re.findall(r"\]\(#([\w-]+)\)", RESULTS)]
    assert len(anchors) > 5
    for anchor in anchors:
        slugs = [re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in RESULTS.splitlines()
                 if line.startswith("#")]  # fmt: skip
        assert anchor in slugs


def test_pages_name_sections_of_the_benchmarks_that_exist() -> None:
    sections = {re.sub(r" \([^()]*\)$", "", line.lstrip("# ")) for line in RESULTS.splitlines() if line[:1] == "#"}
    names = {
        " ".join(name.split())
        for page in (ROOT / "docs").rglob("*.md")
        for paragraph in page.read_text("utf-8").split("\n\n")
        for name in re.findall(r'"([^"]+)"', paragraph.partition("benchmarks/RESULTS.md")[2])
    }
    assert len(names) > 10
    assert names - sections == set()


def test_the_goals_are_counted() -> None:
    summary, _, goals = RESULTS.partition("## Goals")[2].partition("</details>")[0].partition("</summary>")
    counts = Counter(row.split("|")[-2].strip().partition(",")[0] for row in goals.splitlines() if row.startswith("| "))
    yes, partly, no = (counts[answer] for answer in ("yes", "partly", "no"))
    assert f"{yes + partly + no} goals: {yes} reached, {partly} in part, {no} missed" in summary
    assert f"[{yes + partly + no} goals](#goals): {yes} are reached, {partly} in part, and {no} are missed" in RESULTS


@pytest.mark.parametrize("name", ["ag_news.yaml", "mt_bert.yaml"])
def test_examples_name_texts_and_models_that_users_have(name: str) -> None:
    path = ROOT / "examples" / name
    load_with_methods(path)
    content = yaml.safe_load(path.read_text("utf-8"))
    corpus, trained = content["corpus"], content["train_teachers"]
    assert all(source.startswith("hf://") for source in (corpus["train"], corpus["test"], trained["texts"]))
    assert "package:" not in str(content)


def test_init_writes_the_schema_that_its_first_line_names(tmp_path: Path) -> None:
    amalgam("init", folder=tmp_path)
    text = (tmp_path / "amalgam.yaml").read_text("utf-8")
    name = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    assert name
    schema = json.loads((tmp_path / name[1]).read_text("utf-8"))
    assert schema == json.loads(amalgam("schema", folder=tmp_path).out)
