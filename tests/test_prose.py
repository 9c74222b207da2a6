"""`.ci/prose` reports banned words, long sentences and empty variable names, and reports nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "prose"
LONG = "One " + "two " * 24 + "three."


def _findings(folder: Path, name: str, text: str, *options: str) -> list[str]:
    """The findings as "line: text", or the printed lines where options are given."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    command = [sys.executable, str(SCRIPT), *options, str(path.relative_to(folder))]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    *lines, total = ended.stdout.splitlines()
    assert ended.stderr == ""
    assert ended.returncode == (0 if total.startswith("0 findings") else 1)
    return lines if options else [line.removeprefix(f"{path.relative_to(folder)}:") for line in lines]


def test_the_markdown_of_a_notebook_is_read_and_its_code_is_not(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "The student is drawn anew."]},
        {"cell_type": "code", "source": ["anew = 1  # anew"]},
    ]
    assert _findings(tmp_path, "page.ipynb", json.dumps({"cells": cells})) == ["3: 'anew': write \"again\""]


def test_words_are_reported_with_their_replacement(tmp_path: Path) -> None:
    text = "# Title\n\nThe runner starts.\nThe student is drawn anew. It\nstands here.\n\n| a | whoever |\n"
    assert _findings(tmp_path, "page.md", text) == [
        "4: 'anew': write \"again\"",
        '4: \'stands\': write "is", "exists", "applies"',
        '7: \'whoever\': write the subject\'s name ("the user", "the runner")',
    ]


def test_a_word_inside_another_and_a_question_are_no_findings(tmp_path: Path) -> None:
    text = "A standard student understands. What is a unit? An unknown foretold anewly.\n"
    assert _findings(tmp_path, "page.md", text) == []


def test_code_addresses_and_comments_of_markdown_are_not_read(tmp_path: Path) -> None:
    text = "Run `stands anew`, see [it](whoever.md).\n\n```sh\nwhoever stands\n```\n\n<!-- told -->\n\n~~~\nanew\n~~~\n"
    assert _findings(tmp_path, "page.md", text) == []


def test_a_sentence_has_at_most_25_words(tmp_path: Path) -> None:
    allowed = LONG.replace("two ", "", 1)
    (finding,) = _findings(tmp_path, "page.md", f"{allowed} {allowed}\n\n{allowed}\nShort.\n{LONG}\n")
    assert finding.startswith("5: 26 words, at most 25: One two")


def test_what_ends_a_sentence(tmp_path: Path) -> None:
    ten = "one two three four five six seven eight nine ten"
    assert (
        _findings(tmp_path, "page.md", f"{ten} (e.g. {ten}). {ten}? {ten}: {ten}.\n\n- {ten}\n- {ten}\n- {ten}\n") == []
    )
    assert len(_findings(tmp_path, "page.md", f"{ten} (e.g. {ten}) 0.5 {ten}; `{ten}`.\n")) == 1


def test_tables_and_columns_have_no_longest_sentence(tmp_path: Path) -> None:
    assert _findings(tmp_path, "page.md", f"| {LONG} | {LONG} |\n") == []
    assert (
        _findings(tmp_path, "stages/x.py", f'"""Returns x.\n\nA      {"one " * 20}\nB      {"two " * 20}\n"""\n') == []
    )


def test_docstrings_and_comments_of_python(tmp_path: Path) -> None:
    text = '''"""Reads anew."""

# The first line
# stands here.


def f() -> int:
    """Returns one.

    It was told so.
    """
    return 1  # whoever calls


class C:
    field: int = 1
    """What is counted."""
'''
    lines = [finding.split(":")[0] for finding in _findings(tmp_path, "stages/x.py", text)]
    assert lines == ["1", "3", "10", "12", "17"]


def test_messages_of_python(tmp_path: Path) -> None:
    text = """
raise ValueError(f"{path} stands" if path else "told")
console.note(f"{n} texts heard")
typer.Option(help="Draw anew.")
ExperimentError("x", where="whoever", fix="ask")
"""
    lines = [finding.split(":")[0] for finding in _findings(tmp_path, "tests/x.py", text)]
    assert lines == ["2", "2", "3", "4", "5", "5"]


def test_keys_and_short_strings_are_no_messages(tmp_path: Path) -> None:
    text = 'raise ValueError(x["told"], f(there="told"))\nkey = "told"\nnoqa = 1  # noqa: told\n'
    assert _findings(tmp_path, "stages/x.py", text) == []


def test_a_long_string_is_prose_outside_the_tests_unless_marked(tmp_path: Path) -> None:
    text = 'x = "The teachers were all told so."\n'
    assert len(_findings(tmp_path, "stages/x.py", text)) == 1
    assert _findings(tmp_path, "tests/x.py", text) == []
    assert _findings(tmp_path, "stages/x.py", text.replace("\n", "  # not prose\n")) == []


def test_comments_of_yaml_and_templates_without_settings(tmp_path: Path) -> None:
    text = "told: 1     # stands here\n# told: 2\n# told: 3   # anew\n# A note\n# whoever reads.\n"
    assert [finding.split(":")[0] for finding in _findings(tmp_path, "x.yaml", text)] == ["1", "3", "4"]
    template = f'TEMPLATE = """\\\n{text}"""\n'
    assert [finding.split(":")[0] for finding in _findings(tmp_path, "stages/x.py", template)] == ["2", "4", "5"]


def test_variables_are_named_after_their_content(tmp_path: Path) -> None:
    text = "found = 1\nfor told, x in y: pass\ndef f(known, *, there=1): pass\nx.said = found\nwith a as held: pass\n"
    findings = _findings(tmp_path, "pipeline/x.py", text)
    assert [finding.split(":")[0] for finding in findings] == ["1", "2", "3", "3", "5"]
    assert findings[0] == "1: variable 'found': write the noun of its content"


def test_counts_per_folder(tmp_path: Path) -> None:
    (line,) = _findings(tmp_path, "stages/x.py", f"found = 1  # anew\n# {LONG}\n", "--count")
    assert line.split() == ["stages", "1", "words", "1", "length", "1", "names"]
