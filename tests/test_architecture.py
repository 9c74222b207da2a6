"""The layers of the code: no import points upwards, no files import each other in a cycle, `Run` stays at the edge.

Every import counts, those inside functions and under TYPE_CHECKING too, and so does a string that names a module.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LAYERS = (
    "pipeline/errors.py",
    "pipeline/secrets.py",
    "pipeline/user_paths.py",
    "pipeline/input_files.py",
    "pipeline/signals.py",
    "pipeline/console.py",
    "pipeline/notebook.py",
    "pipeline/config",
    "pipeline/storage",
    "pipeline/execution",
    "data",
    "stages/target_methods.py",
    "stages/objective_inputs.py",
    "stages/methods.py",
    "stages/common",
    "stages/STAGE",  # earlier stages only, in the order of STAGES
    "stages/registry.py",
    "stages/app",
    "cli.py",
)
HEAVY = {
    "torch",
    "transformers",
    "polars",
    "pyarrow",
    "numpy",
    "accelerate",
    "huggingface_hub",
    "safetensors",
    "tokenizers",
}
OPTIONAL = {"ray", "obstore", "onnx", "onnxruntime", "onnxscript", "h11"}
RUN = ("amalgam.pipeline.execution.stage", "Run")
EDGE = re.compile(
    r"pipeline/execution/.*|stages/app/.*|stages/\w+/(stage|load|load_labels)\.py|stages/common/\w+/load\.py"
)

LATE = {
    "cli.py": "a command loads its own work: `--help` takes 0.1 s, and pydantic alone would take 0.2 s more",
    "stages/app/completion.py": "the shell waits for a completion",
    "stages/common/inference/compared_kernels.py": "the kernels need Triton, which torch for a CPU lacks",
    "stages/common/models/resolve.py": "the engine runs where pydantic is absent, which files of predictions need",
}
"""Files that may import light modules inside functions, with the reason."""


class Import(NamedTuple):
    path: str
    line: int
    module: str
    """The imported module; of our own the file."""
    names: tuple[str, ...]
    in_function: bool
    type_checking: bool


@functools.cache
def find_imports(root: Path) -> list[Import]:
    """Return every import in cli.py, pipeline, stages and data."""
    paths = [
        root / "cli.py",
        *(path for room in ("pipeline", "stages", "data") for path in (root / room).rglob("*.py")),
    ]
    return [entry for path in sorted(paths) if path.exists() for entry in _imports_of(root, path)]


def _imports_of(root: Path, path: Path) -> Iterator[Import]:
    def visit(node: ast.AST, *, in_function: bool, type_checking: bool) -> Iterator[Import]:
        for line, module, names in _modules(root, node):
            yield Import(str(path.relative_to(root)), line, module, names, in_function, type_checking)
        in_function = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        type_checking = type_checking or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, in_function=in_function, type_checking=type_checking)

    yield from visit(ast.parse(path.read_text("utf-8")), in_function=False, type_checking=False)


def _modules(root: Path, node: ast.AST) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    if isinstance(node, ast.Import):
        yield from ((node.lineno, _file_of(root, alias.name), ()) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        names: dict[str, tuple[str, ...]] = {}
        for alias in node.names:
            submodule = _file_of(root, f"{node.module}.{alias.name}")
            file = submodule if submodule.endswith(".py") else _file_of(root, node.module)
            names[file] = (*names.get(file, ()), alias.name)
        yield from ((node.lineno, file, imported) for file, imported in names.items())
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        file = _file_of(root, node.value.split(":")[0]) if re.fullmatch(r"amalgam(\.\w+)+(:\w+)?", node.value) else ""
        if file.endswith(".py"):
            yield node.lineno, file, ()


def _file_of(root: Path, module: str) -> str:
    """The file of one of our own modules, else the module's name."""
    relative = module.removeprefix("amalgam.").replace(".", "/")
    for candidate in (f"{relative}.py", f"{relative}/__init__.py"):
        if module.startswith("amalgam.") and (root / candidate).is_file():
            return candidate
    return module


def stage_order(root: Path) -> list[str]:
    """Return the folders of the stages in the order of STAGES, as the registry writes it."""
    tree = ast.parse((root / "stages/registry.py").read_text("utf-8"))
    folders = {
        alias.asname or alias.name: str(node.module).split(".")[2]
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("amalgam.stages.")
        for alias in node.names
    }
    targets = {
        ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target): node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
    }
    names = [node.id for node in ast.walk(targets["STAGES"] or tree) if isinstance(node, ast.Name)]
    return list(dict.fromkeys(folders[name] for name in names if name in folders))


def layer_of(path: str, order: list[str]) -> tuple[int, int] | None:
    """Return the layer and, in a stage, its place in the order. Packages' own __init__.py have no layer."""
    for number, layer in enumerate(LAYERS):
        if path == layer or path.startswith(f"{layer}/"):
            return number, 0
    folder = Path(path).parts[1] if path.startswith("stages/") else ""
    if folder in order:
        return LAYERS.index("stages/STAGE"), order.index(folder)
    return None


def upward_arrows(root: Path) -> set[str]:
    """Return "importer -> imported" of every import of a higher layer, and of a file that has no layer."""
    order = stage_order(root)
    arrows = set()
    for entry in find_imports(root):
        lower, upper = layer_of(entry.path, order), layer_of(entry.module, order)
        if entry.module.startswith(("amalgam.tests", "amalgam.benchmarks")) or (lower and upper and upper > lower):
            arrows.add(f"{entry.path} -> {entry.module}")
        elif lower is None and not entry.path.endswith("__init__.py"):
            arrows.add(f"{entry.path} has no layer")
    return arrows


def cycle_arrows(root: Path) -> set[str]:
    """Return the imports that are part of a cycle between files."""
    graph: dict[str, set[str]] = {}
    for entry in find_imports(root):
        if entry.module.endswith(".py"):
            graph.setdefault(entry.path, set()).add(entry.module)
    reachable = {path: _reachable(graph, path) for path in graph}
    return {
        f"{path} -> {module}"
        for path, modules in graph.items()
        for module in modules
        if path in reachable.get(module, set()) or path == module
    }


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - reached
        reached |= new
        waiting.extend(new)
    return reached


def loaded_libraries(root: Path) -> dict[str, set[str]]:
    """Return the heavy libraries that importing each of our own files loads, directly or through another file."""
    at_import = [entry for entry in find_imports(root) if not entry.in_function and not entry.type_checking]
    loaded: dict[str, set[str]] = {entry.path: set() for entry in at_import}
    changed = True
    while changed:
        changed = False
        for entry in at_import:
            new = _libraries_of(entry, loaded) - loaded[entry.path]
            loaded[entry.path] |= new
            changed = changed or bool(new)
    return loaded


def _libraries_of(entry: Import, loaded: dict[str, set[str]]) -> set[str]:
    if entry.module.endswith(".py"):
        return loaded.get(entry.module, set())
    return {entry.module.split(".")[0]} & (HEAVY | OPTIONAL)


def late_imports(root: Path) -> set[str]:
    """Return "file: module" of every import inside a function that saves no loading of a heavy or optional library."""
    loaded = loaded_libraries(root)
    return {
        f"{entry.path}: {entry.module}"
        for entry in find_imports(root)
        if entry.in_function
        and _libraries_of(entry, loaded) <= loaded.get(entry.path, set())
        and not (entry.module.endswith(".py") and not entry.names)
    }


def run_below_the_edge(root: Path) -> set[str]:
    """Return the files that import `Run` and are neither a stage's edge nor above the stages."""
    file = _file_of(root, RUN[0])
    importers = {entry.path for entry in find_imports(root) if entry.module == file and RUN[1] in entry.names}
    return {path for path in importers if not EDGE.fullmatch(path)}


# ---- this tree


def test_no_import_points_upwards() -> None:
    assert sorted(upward_arrows(ROOT)) == []


def test_no_files_import_each_other() -> None:
    assert sorted(cycle_arrows(ROOT)) == []


def test_run_stays_at_the_edge_of_the_stages() -> None:
    assert sorted(run_below_the_edge(ROOT)) == []


def test_imports_inside_functions_save_loading_time() -> None:
    late = late_imports(ROOT)
    assert sorted(entry for entry in late if entry.split(":")[0] not in LATE) == []
    assert set(LATE) <= {entry.split(":")[0] for entry in late}


# ---- small trees


def _tree(root: Path, **files: str) -> Path:
    files = {"stages__registry": "", **files}
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text or "STAGES = ()\n", encoding="utf-8")
    return root


REGISTRY = """
from amalgam.stages.late.stage import Late
from amalgam.stages.early.stage import Early
STAGES: tuple[Stage, ...] = (Early(), Late())
"""
EMPTY = "x = 1\n"


def test_an_import_of_a_lower_layer_is_no_upward_arrow(tmp_path: Path) -> None:
    root = _tree(
        tmp_path,
        stages__registry=REGISTRY,
        stages__early__stage="from amalgam.stages.common.cached import read\nimport amalgam.pipeline.errors\n",
        stages__late__stage="from amalgam.stages.early.stage import x\n",
        stages__common__cached__read="from amalgam.data.keys import x\nimport torch\n",
        data__keys="from amalgam.pipeline.config.schema import x\n",
        pipeline__config__schema="from amalgam.pipeline.errors import x\n",
        pipeline__errors=EMPTY,
        cli="from amalgam.stages.app import api\n",
        stages__app__api="from amalgam.stages.registry import STAGES\n",
    )
    assert stage_order(root) == ["early", "late"]
    assert upward_arrows(root) == set()
    assert cycle_arrows(root) == set()
    assert late_imports(root) == set()


def test_upward_arrows_are_found_wherever_the_import_is(tmp_path: Path) -> None:
    root = _tree(
        tmp_path,
        stages__registry=REGISTRY,
        stages__early__stage="def f():\n    from amalgam.stages.late.stage import x\n",
        stages__late__stage="if TYPE_CHECKING:\n    from amalgam.stages.app import api\n",
        stages__common__read="from amalgam.stages import early\nfrom amalgam.stages.early import stage\n",
        stages__app__api='commands = ("amalgam.cli:app",)\n',
        pipeline__errors="from amalgam.pipeline import console\n",
        pipeline__console=EMPTY,
        data__keys="import amalgam.stages.methods\nimport amalgam.tests.workspaces\n",
        stages__methods=EMPTY,
        stages__odd=EMPTY + "import json\n",
        cli=EMPTY,
    )
    assert upward_arrows(root) == {
        "stages/early/stage.py -> stages/late/stage.py",
        "stages/late/stage.py -> stages/app/api.py",
        "stages/common/read.py -> stages/early/stage.py",
        "stages/app/api.py -> cli.py",
        "pipeline/errors.py -> pipeline/console.py",
        "data/keys.py -> stages/methods.py",
        "data/keys.py -> amalgam.tests.workspaces",
        "stages/odd.py has no layer",
    }


def test_cycles_are_found_and_an_import_that_only_leads_to_one_is_none(tmp_path: Path) -> None:
    root = _tree(
        tmp_path,
        data__a="from amalgam.data.b import x\n",
        data__b="def f():\n    from amalgam.data import c\n",
        data__c="if TYPE_CHECKING:\n    import amalgam.data.a\n",
        data__d="import amalgam.data.a\n",
    )
    cycle = {"data/a.py -> data/b.py", "data/b.py -> data/c.py", "data/c.py -> data/a.py"}
    assert cycle_arrows(root) == cycle


def test_an_import_in_a_function_saves_loading_a_heavy_library(tmp_path: Path) -> None:
    root = _tree(
        tmp_path,
        data__light="import json\n",
        data__heavy="from amalgam.data.tensors import x\n",
        data__tensors="import torch\n",
        data__a="def f():\n    import json, torch.nn, ray\n    from amalgam.data import light, heavy\n",
        data__b="import torch\ndef f():\n    import torch.nn, numpy\n    from amalgam.data import heavy\n",
    )
    assert late_imports(root) == {
        "data/a.py: json",
        "data/a.py: data/light.py",
        "data/b.py: torch.nn",
        "data/b.py: data/heavy.py",
    }


def test_run_is_imported_at_the_edge_of_a_stage_alone(tmp_path: Path) -> None:
    run = "from amalgam.pipeline.execution.stage import Run, Stage\n"
    root = _tree(
        tmp_path,
        pipeline__execution__stage=EMPTY,
        pipeline__execution__runner=run,
        stages__report__stage=run,
        stages__report__figures="def f():\n    " + run,
        stages__common__load=run,
        stages__common__cached__load=run,
        stages__common__cached__read=run.replace("Run, ", ""),
        stages__common__device="if TYPE_CHECKING:\n    " + run,
        stages__app__cost__survey=run,
    )
    assert run_below_the_edge(root) == {"stages/report/figures.py", "stages/common/device.py"}
