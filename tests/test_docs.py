"""README and docs are run: every command block is run, every experiment is read, in the order of the page.

Each page has a folder of its own. ```console holds commands after `$ ` and their output; an output that begins with
`error:` must come exactly so. ```yaml and ```python with a title are files that the reader writes; ```text is shown.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from amalgam.benchmarks.gallery import Entry, make_page
from amalgam.data.demo_corpus import generate
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.storage.facts import DECLARED, FactTypes
from amalgam.stages.app.api import Experiment
from amalgam.stages.app.results import Audit, Plan, RunResult, StageResult
from amalgam.stages.common.training import schedule
from amalgam.stages.methods import METHODS, load_with_methods
from amalgam.stages.objective_inputs import OBJECTIVE_INPUTS
from amalgam.stages.train_student.objectives import OBJECTIVES
from amalgam.tests.forking import LIGHT, Forked
from amalgam.tests.stages.fake_hub import FakeHub
from amalgam.tests.test_notebook import MACHINE_PATH
from amalgam.tests.workspaces import (
    EXPERIMENT,
    CommandResult,
    Workspace,
    amalgam,
    finish,
    word_list,
    write_model,
    write_texts,
)

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
FENCE = r'^```(\S*)(?: title="([^"]+)")?[^\n]*\n(.*?)^```$'
LANGUAGES = {"console", "mermaid", "yaml", "python", "sh", "text"}

ONLY_PARSED = {
    "make ": "sets up a virtual environment, or is the test-suite itself",
    "bash .ci/run": "is the test-suite itself, and more",
    "source .venv/bin/activate": "is of a shell that stays",
    "torchrun": "several processes; tests/test_processes.py runs them",
    "ACCELERATE_USE_CPU=1 torchrun": "several processes; tests/test_processes.py runs them",
    "sbatch": "needs a cluster; its script is written, its parts are run on the same page",
    "amalgam export --numpy": "needs a static student; tests/test_static.py exports one",
    "python students/student-numpy": "the same",
    "amalgam serve": "runs until a signal; tests/test_serve.py runs it",
    "curl": "needs a running server; tests/test_serve.py sends what it sends",
    "docker": "builds an image; tests/test_recipes.py reads its recipe",
    "kubectl": "needs a cluster; tests/test_recipes.py reads what it is given",
}
"""Commands that are not run, and why; only the arguments of their `amalgam` calls are parsed."""

ON_A_HUB = "docs/how-to/hub-teachers.md"


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None
    text: str


@dataclass(frozen=True)
class Command:
    line: str
    output: str


def blocks_of(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text("utf-8")
    matches = re.finditer(FENCE, text, re.MULTILINE | re.DOTALL)
    for match in matches:
        assert match[1] in LANGUAGES, f"{page}: a block of {match[1] or 'no language'}:\n{match[3]}"
        yield Block(match[1], match[2], match[3])


def commands_of(block: Block) -> Iterator[Command]:
    assert block.text.startswith("$ "), f"a console block begins with `$ `:\n{block.text}"
    for entry in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line, _, output = entry.partition("\n")
        yield Command(shlex.join(shlex.split(line, comments=True)) if "#" in line else line.strip(), output)


# ---- a reader


@dataclass
class Reader:
    """Runs the commands of a page in a folder of its own."""

    page: str
    folder: Path
    environment: dict[str, str] | None = None
    names: dict[str, Any] = field(default_factory=dict)

    def reads(self, block: Block) -> None:
        if block.title:
            (self.folder / block.title).write_text(block.text)
        if block.title == "amalgam.yaml":
            load_with_methods(self.folder / "amalgam.yaml")
        elif block.language == "yaml":
            is_experiment(yaml.safe_load(block.text))
        elif block.language == "python" and not block.title:
            with contextlib.chdir(self.folder), contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block.text, f"{self.page}, a block", "exec"), self.names)  # noqa: S102 - our own pages
        elif block.language == "console":
            for command in commands_of(block):
                self.does(command)

    def does(self, command: Command) -> None:
        result = self.run(command.line)
        if result is None:
            return
        wrong = command.output.startswith("error:")
        assert bool(result.code) == wrong, f"{self.page}: $ {command.line}\n{result.code}\n{result.err}{result.out}"
        if wrong:
            lines = result.err[result.err.index("error:") :]
            assert [line.rstrip() for line in lines.splitlines()] == command.output.splitlines()

    def run(self, command: str) -> CommandResult | None:
        if any(command.startswith(start) for start in ONLY_PARSED):
            is_understood(command)
            return None
        first, *rest = shlex.split(command)
        if first == "amalgam":
            return self.amalgam(rest)
        if first == "python":
            with contextlib.chdir(self.folder):
                runpy.run_path(rest[0], run_name="__main__")
            return CommandResult(0, "", "")
        done = subprocess.run(
            ["/bin/bash", "-c", f"{command} && pwd"], cwd=self.folder, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            self.folder = Path(done.stdout.splitlines()[-1])
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def amalgam(self, arguments: list[str]) -> CommandResult:
        if self.environment is None:
            result = amalgam(*arguments, folder=self.folder)
        else:
            result = finish(Forked(arguments, self.folder, self.environment, loaded=LIGHT))
        if arguments[:1] == ["init"] and self.page == "README.md":  # the reader names texts and models
            (self.folder / "amalgam.yaml").write_text(EXPERIMENT)
        return result


def is_understood(command: str) -> None:
    """Assert that the options of a command that is not run exist, and its overrides are fields."""
    from typer.main import get_command

    from amalgam.cli import app

    words = [word for part in shlex.split(command.replace("<", "").replace(">", "")) for word in part.split()]
    if not {"amalgam", "amalgam.cli"} & set(words) or words[0] == "docker":
        return
    place = next(index for index, word in enumerate(words) if word in {"amalgam", "amalgam.cli"})
    group: Any = get_command(app)
    with group.make_context("amalgam", words[place + 1 :]) as context:
        name, chosen, rest = group.resolve_command(context, words[place + 1 :])
        chosen.make_context(name, rest, parent=context)


def is_experiment(content: dict[str, Any]) -> None:
    """A piece of an experiment file, with the least that makes it whole."""
    least: dict[str, Any] = {"corpus": {"train": "a.csv", "label": "y"}, "teachers": [{"name": "a", "model": "./a"}]}
    if "generate" in content:
        del least["corpus"]
    ExperimentConfig.model_validate({**least, **content})


# ---- the folder's content before


def a_shop(built: Workspace, folder: Path) -> None:
    """An experiment that is up to date."""
    built.copy(folder)


def a_shop_without_a_file(built: Workspace, folder: Path) -> None:
    built.copy(folder).config.unlink()


def a_checkout_after_the_demo(built: Workspace, folder: Path) -> None:
    """As `amalgam demo` leaves it, but that its models know nothing and its texts are few."""
    demo = folder / "amalgam-demo"
    (demo / "texts").mkdir(parents=True)
    for part in ("train", "test"):
        write_texts(demo / f"texts/{part}.parquet", generate(160, 0, part))
    words = word_list(built)
    for seed, (name, labels) in enumerate(
        {"desk": ["banking", "computing"], "weekend": ["cooking", "football", "gardening"]}.items()
    ):
        write_model(demo / "teachers" / name, labels=labels, words=words, seed=seed)
    write_model(demo / "encoder", words=words, seed=9)


PREPARED: dict[str, Callable[[Workspace, Path], None]] = {
    "README.md": a_shop_without_a_file,
    "docs/tutorial.md": a_checkout_after_the_demo,
}


@pytest.fixture
def hub(built: Workspace, tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Hub with the models that a page names."""
    names = {"someone/emotions": "first", "someone/topics": "second", "someone/encoder": "encoder"}
    with FakeHub() as hub:
        for name, folder in names.items():
            hub.push(name, built.folder / "models" / folder)
        yield hub.env(tmp_path / "hub", OMP_NUM_THREADS="1")


def reader_of(page: str, folder: Path, request: pytest.FixtureRequest) -> Reader:
    name = "generated" if page.endswith("no-data.md") else "built"
    PREPARED.get(page, a_shop)(request.getfixturevalue(name), folder)
    return Reader(page, folder, request.getfixturevalue("hub") if page == ON_A_HUB else None)


@pytest.fixture
def _short_trainings(built: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose few epochs where a page sets none: a page is about commands; tests/test_defaults.py trains for as long.

    The shared workspace is built before, because a student's mark has the epochs that are chosen.
    """
    monkeypatch.setattr(schedule, "MIN_STEPS", 10)
    monkeypatch.setattr(schedule, "STEPS_PER_LABEL", 0)


@pytest.fixture
def _no_further_stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove what the stage and the objective of docs/contributing add to tables when the test ends."""
    monkeypatch.setitem(DECLARED, "count-words", FactTypes())
    with patch.dict(METHODS), patch.dict(OBJECTIVE_INPUTS), patch.dict(OBJECTIVES):
        yield


@pytest.mark.usefixtures("_short_trainings", "_no_further_stage")
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_work(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    blocks = [block for block in blocks_of(page) if block.language != "text"]
    if not blocks:
        return
    reader = reader_of(page, tmp_path / "place", request)
    for block in blocks:
        reader.reads(block)


def test_a_command_that_does_not_exist_is_noticed(workspace: Workspace) -> None:
    reader = Reader("a page", workspace.folder)
    with pytest.raises(AssertionError, match="plan --measured"):
        reader.does(Command("amalgam plan --measured", ""))
    with pytest.raises(AssertionError, match="something else"):
        reader.does(Command("amalgam plan student.metod=uhc", "error: something else\n"))
    with pytest.raises(Exception, match="--nosuch"):
        is_understood("torchrun --nproc_per_node 2 -m amalgam.cli run --nosuch")


def test_every_exception_of_commands_that_are_not_run_is_used() -> None:
    commands = [
        command.line for page in PAGES for block in blocks_of(page) if block.language == "console"
        for command in commands_of(block)
    ]  # fmt: skip
    assert [start for start in ONLY_PARSED if not any(command.startswith(start) for command in commands)] == []


def test_a_command_in_a_sentence_is_one_too() -> None:
    """`amalgam plan --estimate` in running text: its options exist."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        for command in re.findall(r"`(amalgam [a-z][^`]*)`", text):
            is_understood(command)


# ---- pages and code


def test_every_page_is_in_the_sites_navigation() -> None:
    import_only = yaml.safe_load(re.sub(r"!!python\S*", "", (ROOT / "mkdocs.yml").read_text("utf-8")))
    named = set(re.findall(r"[\w/-]+\.md", str(import_only["nav"])))
    assert {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")} == {
        page
        for page in named
        if not page.startswith("reference/") and page != "first-hour.md"  # made by hooks
    }


def test_a_list_follows_an_empty_line() -> None:
    for page in PAGES:
        text = re.sub(FENCE, "", (ROOT / page).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        for paragraph in re.split(r"\n\s*\n", text):
            first, *others = paragraph.strip("\n").split("\n")
            if not re.match(r"\s*([-*]|\d+\.) |<!--", first):
                assert [line for line in others if re.match(r"([-*]|\d+\.) ", line)] == [], page


def test_the_glossary_has_each_term_once_in_order_and_other_pages_use_it() -> None:
    rows = re.findall(
        r"^\| (?!term \|)([^|(]+?)(?: \(([^|]+)\))? \|", (ROOT / "docs/glossary.md").read_text("utf-8"), re.MULTILINE
    )
    terms = [(term.lower(), sense) for term, sense in rows]
    assert len(set(terms)) == len(terms) > 50
    first_table = terms[: terms.index(("accuracy", ""))]
    assert first_table == sorted(first_table)
    others = "".join((ROOT / page).read_text("utf-8").lower() for page in PAGES if page != "docs/glossary.md")
    words = re.sub(r"\s+", " ", others)
    assert [term for term, _ in terms for word in term.split(", ") if word not in words] == []


def test_every_test_that_the_security_page_names_exists() -> None:
    named = re.findall(r"`(tests/[^`]+)`", (ROOT / "docs/security.md").read_text("utf-8"))
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_gallery_links_every_report_page_with_its_verdict() -> None:
    row = r"^\| \[([\w-]+)\]\(gallery/\1\.html\) \| .+ \| (?:`(.+?)`)? \| .* \|$"
    decisions = dict(re.findall(row, (ROOT / "docs/gallery.md").read_text("utf-8"), re.MULTILINE))
    pages = {path.stem: path.read_text("utf-8") for path in (ROOT / "docs/gallery").iterdir()}
    assert set(decisions) == set(pages)
    assert set(decisions.values()) == {"ship", "do not ship", "cannot say", ""}
    for name, page in pages.items():
        assert '<meta name="generator" content="amalgam report">' in page
        assert not MACHINE_PATH.search(page), name
        decision = re.findall(r'<p class="decision">(.*?)</p>', page)
        assert decision == ([decisions[name].capitalize()] if decisions[name] else [])
        assert ("Disputed texts" in page) == (name in {"demo", "demo-muka-soft"}), name  # no text of a data set


def test_a_page_of_the_gallery_is_that_of_a_run_without_its_texts(workspace: Workspace, tmp_path: Path) -> None:
    row = make_page(workspace.folder, Entry("shop", "A shop"), tmp_path, texts=False)
    assert re.match(r"\| \[shop\]\(gallery/shop\.html\) \| A shop \| `[a-z ]+` \| .+ \|$", row)
    own = (workspace.folder / "reports/student.html").read_text("utf-8")
    page = (tmp_path / "shop.html").read_text("utf-8")
    assert "Accuracy of every system" in page
    assert "Disputed texts" in own
    assert "Disputed texts" not in page
    assert "Most confident errors" not in page
    assert str(workspace.folder) not in page


def test_the_page_on_python_has_every_public_name() -> None:
    words = set(re.findall(r"\w+", (ROOT / "docs/python.md").read_text()))
    for kind in (Experiment, RunResult, StageResult, Plan, Audit):
        names = {*vars(kind), *getattr(kind, "__annotations__", {})}
        public = {name for name in names if not name.startswith("_")}
        assert public - words <= {"HEADER", "block", "cells", "open", "print_to"}, kind.__name__


def test_reference_pages_are_made_from_the_code() -> None:
    pages = runpy.run_path(str(ROOT / "docs/reference.py"))["pages"]()
    fields = {
        f"`{section}.{'0.' * (section == 'teachers')}{name}`"
        for section, model in ExperimentConfig.model_json_schema()["properties"].items()
        for name in _properties(model)
    }
    written = pages["reference/experiment.md"]
    assert sorted(name for name in fields if name not in written) == []
    assert [row for row in written.splitlines() if row.startswith("| `") and row.endswith("|  |")] == []
    for name in ("cache-teachers", "plan", "audit"):
        assert f"## amalgam {name}\n" in pages["reference/commands.md"]
    assert "| `entropy_nats` | `float32` |" in pages["reference/columns.md"]
    assert "| `muka-soft` |" in pages["reference/methods.md"]
    assert "; on generated texts `targets.mode=soft`, " in pages["reference/methods.md"]
    assert "| `DataError` | 3 |" in pages["reference/errors.md"]


def test_the_paths_of_the_reference_have_texts_and_skipped_rows_apart(fresh: Workspace) -> None:
    with (fresh.folder / "texts/train.csv").open("a") as texts:
        texts.write('"",x\n')
    assert fresh("read-corpus", "corpus.on_bad_row=skip").code == 0
    paths = runpy.run_path(str(ROOT / "docs/reference.py"))["FILES"]
    for name in ("CORPUS", "SKIPPED"):
        files = list(fresh.artifacts.glob(paths[name].strip("`")))
        assert {file.name == "skipped.parquet" for file in files} == {name == "SKIPPED"}


def _properties(model: dict[str, Any]) -> list[str]:
    schema = ExperimentConfig.model_json_schema()["$defs"]
    names = re.findall(r"#/\$defs/(\w+)", str(model))
    properties: list[str] = []
    for section in names:
        for name, entry in schema[section]["properties"].items():
            nested = _properties(entry) if "properties" in schema.get(str(entry.get("$ref"))[8:], {}) else []
            properties += [f"{name}.{inner}" for inner in nested] or [name]
    return properties
