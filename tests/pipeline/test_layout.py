"""The rooms keep to themselves, and nothing heavy is loaded to look."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from amalgam.tests.pipeline.toy_stages import toy_base

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("pipeline", "stages", "data")
MOST_LINES = 600
MOST_FUNCTION_LINES = 60
HEAVY = ("torch", "transformers", "polars", "pyarrow", "numpy", "accelerate", "huggingface_hub")


def _modules(*places: str) -> list[Path]:
    paths = [
        path for place in places for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
    ]
    assert paths
    return sorted(path for path in paths if "__pycache__" not in path.parts)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def _imports(path: Path) -> tuple[str, ...]:
    return tuple(_each_import(path))


def _each_import(path: Path) -> Iterator[str]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _in_child(code: str, *arguments: str, folder: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- rooms


def test_our_own_code_is_imported_as_amalgam() -> None:
    own = {"pipeline", "stages", "data", "cli", "tests"}
    modules = _modules("cli.py", *ROOMS, "tests")
    assert [(path, name) for path in modules for name in _imports(path) if name.split(".")[0] in own] == []


def test_data_knows_no_runner() -> None:
    """Data may use the vocabulary (errors, the corpus section, fingerprints), not what runs things."""
    machinery = ("amalgam.pipeline.execution", "amalgam.pipeline.storage.store")
    assert [name for path in _modules("data") for name in _imports(path) if name.startswith(machinery)] == []


def test_the_pipeline_imports_no_heavy_library() -> None:
    assert [path for path in _modules("pipeline") if any(name.startswith(HEAVY) for name in _imports(path))] == []


def test_tests_import_no_private_name() -> None:
    imported = {(path, name) for path in _modules("tests") for name in _imports(path) if name.startswith("amalgam.")}
    assert [(path, name) for path, name in imported if any(part.startswith("_") for part in name.split("."))] == []


# ---- nothing heavy


LOOK = """
import sys
from amalgam import cli
for line in sys.argv[1:]:
    sys.argv = ["amalgam", *line.split()]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code, (line, end.code)
    print("loaded by", line, sorted(name for name in {heavy} if name in sys.modules))
"""
LOOKS = ("--help", "plan --help", "status", "explain train-student", "schema", "plan")


def test_looking_loads_nothing_heavy(tmp_path: Path) -> None:
    base = toy_base(tmp_path)
    (base / "source.txt").unlink()
    (base / "source.csv").write_text("text,y\nsome words,a\n")
    (base / "amalgam.yaml").write_text("corpus: {train: source.csv, label: y}\ntargets: {mode: supervised}\n")
    printed = _in_child(LOOK.format(heavy=HEAVY), *LOOKS, folder=base)
    loaded = [line for line in printed.splitlines() if line.startswith("loaded by")]
    assert loaded == [f"loaded by {line} []" for line in LOOKS]
    assert not (base / "artifacts").exists()


# ---- size


def test_files_and_functions_stay_small_and_have_a_purpose() -> None:
    modules = _modules("cli.py", *ROOMS, "tests")
    assert {str(path.relative_to(ROOT)): faults for path in modules if (faults := list(_size_faults(path)))} == {}


def _size_faults(path: Path) -> Iterator[str]:
    text, tree = path.read_text("utf-8"), _tree(path)
    if len(text.splitlines()) > MOST_LINES:
        yield f"more than {MOST_LINES} lines"
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        if (function.end_lineno or 0) - function.lineno >= MOST_FUNCTION_LINES:
            yield f"{function.name} has more than {MOST_FUNCTION_LINES} lines"
    purpose = ast.get_docstring(tree, clean=True)
    if text.strip() and not purpose:
        yield "no docstring"
    if purpose and path.name != "errors.py" and len(purpose.splitlines()) > 5:
        yield "a docstring of more than 5 lines"
