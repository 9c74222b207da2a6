"""`--help` has examples that the command line accepts, and the shell is offered what there is."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import typer

from amalgam.cli import app
from amalgam.stages import STAGE_FOLDERS
from amalgam.stages.app.command_tree import PATH_OPTIONS
from amalgam.stages.app.completion import fields
from amalgam.stages.methods import METHODS
from amalgam.stages.registry import STAGES
from amalgam.tests.workspaces import EXPERIMENT, amalgam

COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]  # a group, by its commands


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "amalgam.yaml").write_text(EXPERIMENT)
    return tmp_path


def examples_of(command: str) -> list[list[str]]:
    text = amalgam(command, "--help", folder=Path.cwd()).out
    lines = re.sub(r"\n  (?=\S)(?!amalgam |grep )", " ", text.partition("Example")[2]).splitlines()
    examples = [line.split("amalgam ", 1)[1] for line in lines if "  amalgam " in f"  {line}"]
    return [shlex.split(line.partition("   ")[0].partition(" > ")[0]) for line in examples]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_the_command_line_accepts(command: str) -> None:
    examples = examples_of(command)
    assert examples
    for words in examples:
        assert words[0] == command
        group = typer.main.get_command(app)
        inner = group.commands[command]  # type: ignore[attr-defined]
        context = inner.make_context(command, words[1:], resilient_parsing=False)
        overrides = context.params.get("overrides") or []
        assert [override for override in overrides if override.partition("=")[0] not in fields()] == []


def test_every_stage_has_a_command() -> None:
    assert {stage.name for stage in STAGES} <= set(COMMANDS)
    assert [stage.name.replace("-", "_") for stage in STAGES] == list(STAGE_FOLDERS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_home_folder_is_inserted_in_every_option_that_is_a_path(command: str) -> None:
    inner = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    hints = get_type_hints(inspect.unwrap(inner.callback))
    paths = {name for name, hint in hints.items() if Path in (hint, *get_args(hint))}
    options = {option for parameter in inner.params if parameter.name in paths for option in parameter.opts}
    assert options <= set(PATH_OPTIONS)


def test_help_imports_no_stage() -> None:
    code = "import sys, amalgam.cli; print([name for name in sys.modules if name == 'pydantic' or 'stage.' in name])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def offered(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str, kind: str = "bash") -> list[str]:
    """Return the completions for all words and the one being typed."""
    monkeypatch.setenv("_AMALGAM_COMPLETE", f"complete_{kind}")
    if kind == "bash":
        monkeypatch.setenv("COMP_WORDS", "\n".join(["amalgam", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
    else:
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", " ".join(["amalgam", *words]))
    result = amalgam(folder=folder)
    assert "Traceback" not in result.err
    os.environ.pop("_AMALGAM_COMPLETE")
    return result.out.split()


def test_bash_which_breaks_words_at_the_sign_is_offered_bare_values(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert offered(folder, monkeypatch, "explain", "build") == ["build-targets"]
    assert offered(folder, monkeypatch, "explain", "") == [stage.name for stage in STAGES]
    assert offered(folder, monkeypatch, "run", "student.me") == ["student.method="]
    assert offered(folder, monkeypatch, "run", "student.method", "=", "muka") == [
        name for name in METHODS if name.startswith("muka")
    ]
    offers = set(offered(folder, monkeypatch, "run", "student.method", "="))
    assert offers == {*METHODS, "teacher:first", "teacher:second"} - {"teacher:<name>"}
    assert offered(folder, monkeypatch, "run", "targets.text_weights", "=", "m") == ["margin"]
    assert offered(folder, monkeypatch, "run", "cache.adaptive", "=", "") == ["true", "false"]
    assert offered(folder, monkeypatch, "build-targets", "--mode", "so") == ["soft"]


def test_teachers_are_those_of_the_file_at_hand(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered(folder, monkeypatch, "run", "student.encoder", "=", "t") == ["teacher:first", "teacher:second"]
    (folder / "other.yaml").write_text(EXPERIMENT.replace("name: first", "name: third"))
    words = ("run", "-c", "other.yaml", "student.encoder", "=", "teacher")
    assert offered(folder, monkeypatch, *words) == ["teacher:third", "teacher:second"]
    (folder / "amalgam.yaml").write_text("corpus: [")
    assert offered(folder, monkeypatch, "run", "student.encoder", "=", "t") == []


def test_a_shell_that_keeps_words_whole_gets_whole_completions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    completions = offered(folder, monkeypatch, "run", "student.method=uh", kind="zsh")
    assert "student.method=uhc" in " ".join(completions)


def test_the_help_names_stages_without_numbers(tmp_path: Path) -> None:
    text = amalgam("--help", folder=tmp_path).out
    assert "cache-teachers" in text
    assert not re.search(r"[Ss]tage \d", text)
