"""Runs `amalgam demo`: three small classifiers are distilled into one student, offline, from the embedded corpus.

It writes an ordinary experiment and runs it for each method; shared results are computed once. With `--data-free` the
students learn from generated texts only. The supervised student is trained on real texts.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from amalgam.data.demo_corpus import PartName, generate, mixture
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.storage.local import atomic_write
from amalgam.pipeline.storage.paths import TEMPORARY_NAME
from amalgam.stages.app.demo_models import tiny_encoder, tiny_language_model
from amalgam.stages.app.init import SCHEMA_FILE, SCHEMA_LINE, write_with_schema
from amalgam.stages.app.runs import run_without_tables
from amalgam.stages.common.deliveries import REPORTS
from amalgam.stages.methods import load_with_methods
from amalgam.stages.report.json_types import Evaluation
from amalgam.stages.report.publish import page_name
from amalgam.stages.report.stage import evaluation_of
from amalgam.stages.report.tables import header, row

TEXTS: dict[str, tuple[int, int, PartName]] = {
    "train": (4000, 0, "train"),
    "teachers": (4000, 100, "train"),
    "test": (1000, 0, "test"),
}
"""file: (texts, seed, part of the embedded corpus). Teachers and students train on different texts."""

GENERAL_TEXTS = 8000
FIRST_WORDS = ("# The demo's experiment", "# Teachers, a language model, and no text")
WRITTEN_FIRST = {"texts", "encoder", "artifacts", "lm", "with-texts.yaml", SCHEMA_FILE}
EXPERIMENTS = Path(__file__).with_name("demo_experiments")
METHODS_SHOWN = ("vanilla-kd", "uhc", "muka-hard", "muka-soft", "amalgam", "supervised")

ROWS = (
    ("vanilla-kd", "random-words"),
    ("vanilla-kd", "cross-domain"),
    ("vanilla-kd", "prompted"),
    ("vanilla-kd", "steered"),
    ("amalgam", "steered"),
    ("stratanet", "steered"),
    ("as-dfd", None),
)
"""(method, source of its texts); as-dfd has no texts, but embeddings made by the teachers."""


def run_demo(folder: Path, overrides: list[str], *, quiet: bool) -> None:
    students: dict[str, FileAndOverrides] = {}
    for method in METHODS_SHOWN:
        name = "supervised student (saw labels)" if method == "supervised" else f"{method} student"
        settings = [f"student.method={method}", f"student.name={method}", *overrides]
        students[name] = folder / "amalgam.yaml", settings
    write_demo(folder, students.values())
    run = _compare(folder, students, overrides, quiet=quiet)
    Console(quiet=quiet).result(f"Its report: {folder}/{REPORTS}/{page_name(run.experiment)}.html")


def run_data_free(folder: Path, overrides: list[str], *, quiet: bool) -> None:
    """Trains three teachers and a small language model, which generates texts in four ways, and students on them."""
    console, with_texts = Console(quiet=quiet, tables=False), folder / "with-texts.yaml"
    students: dict[str, FileAndOverrides] = {}
    for method, source in ROWS:
        settings = [f"student.method={method}", f"student.name={method}{f'-{source}' if source else ''}"]
        settings += [f"generate.source={source}"] if source else []
        settings += ["generate.corpus=texts/general.parquet"] if source == "cross-domain" else []
        name = f"{method} on {source} texts" if source else f"{method}, no texts"
        students[name] = folder / "amalgam.yaml", [*settings, *overrides]
    students["supervised student (real texts and labels)"] = with_texts, []
    write_data_free(folder, console, students.values())
    console.say("== teachers")
    run_without_tables(with_texts, [], console, "train-teachers")
    _compare(folder, students, overrides, quiet=quiet)


FileAndOverrides = tuple[Path, list[str]]
"""The experiment file of a student, and its overrides."""


def _compare(folder: Path, students: Mapping[str, FileAndOverrides], overrides: list[str], *, quiet: bool) -> Run:
    """Prints the teachers and baselines of the first evaluation, and the student of each; returns the file's run."""
    console, evaluations = Console(quiet=quiet), dict[str, Evaluation]()
    progress = Console(quiet=quiet, tables=False)
    for name, (config, settings) in students.items():
        console.say(f"== {name}")
        evaluations[name] = evaluation_of(run_without_tables(config, settings, progress))
    # HEAD is the experiment of the file, from which later commands continue.
    run = run_without_tables(folder / "amalgam.yaml", overrides, Console(quiet=True, tables=False))
    first = next(iter(evaluations.values()))
    systems = {name: system for name, system in first["systems"].items() if "student" not in name}
    for name, scores in evaluations.items():
        systems[name] = scores["systems"][scores["system"]]
    rows = [row(name, system, first["groups"]) for name, system in systems.items()]
    title = f"\n{first['n']:,} test texts, {len(first['labels'])} labels; accuracy over all labels"
    console.table(title, header(first["groups"]), rows)
    console.result(f"\nAn ordinary experiment is in {folder}: cd {shlex.quote(str(folder))} && amalgam plan")
    return run


# ---- files


def write_demo(folder: Path, students: Iterable[FileAndOverrides] = ()) -> None:
    """Writes texts, a tiny encoder and the experiment file; existing files stay."""
    _check(folder, "amalgam.yaml", students)
    _write_texts_and_encoder(folder, "train")
    _copy_missing("amalgam.yaml", folder / "amalgam.yaml")


def write_data_free(folder: Path, console: Console, students: Iterable[FileAndOverrides] = ()) -> None:
    """Writes texts, the teachers' encoder, the language model and two experiment files; existing files stay."""
    _check(folder, "data-free.yaml", students)
    _write_texts_and_encoder(folder, "teachers")
    general, language_model = folder / "texts/general.parquet", folder / "lm"
    complete = general.exists() and language_model.exists()
    texts = [] if complete else mixture(GENERAL_TEXTS, seed=0)
    if not general.exists():
        _write(pa.table({"text": texts}), general)
    _copy_missing("with-texts.yaml", folder / "with-texts.yaml")
    _copy_missing("data-free.yaml", folder / "amalgam.yaml")
    if not language_model.exists():
        console.say("== a language model of general text")
        tiny_language_model(language_model, texts, seed=0)


def _check(folder: Path, experiment: str, students: Iterable[FileAndOverrides]) -> None:
    """Refuses other files in the folder, and overrides that a student's experiment does not take."""
    _refuse_other_files(folder)
    for config, settings in students:
        load_with_methods(config if config.exists() else EXPERIMENTS / experiment, settings)


def _write_texts_and_encoder(folder: Path, encoder_texts: str) -> None:
    write_texts(folder)
    if not (folder / "encoder" / "model.safetensors").exists():
        tiny_encoder(folder / "encoder", [text for text, _ in generate(*TEXTS[encoder_texts])], seed=0)


def _refuse_other_files(folder: Path) -> None:
    """Refuses a folder that is neither empty nor a demo, complete or interrupted."""
    if folder.exists() and not folder.is_dir():
        raise ExperimentError(f"{folder} is not a folder", fix="name another folder: amalgam demo DIR")
    file = folder / "amalgam.yaml"
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    names = {name for name in names if not TEMPORARY_NAME.fullmatch(name)}  # of a writing that was killed
    text = file.read_text("utf-8", "replace") if file.is_file() else ""
    ours = text.removeprefix(SCHEMA_LINE).startswith(FIRST_WORDS) if file.is_file() else names <= WRITTEN_FIRST
    if names and not ours:
        raise ExperimentError(f"{folder} is not empty and is no demo", fix="name another folder: amalgam demo DIR")


def write_texts(folder: Path) -> None:
    for name, settings in TEXTS.items():
        path = folder / f"texts/{name}.parquet"
        if not path.exists():
            texts, labels = zip(*generate(*settings), strict=True)
            _write(pa.table({"text": texts, "label": labels}), path)


def _write(table: pa.Table, path: Path) -> None:
    """Writes a whole file or none, because an existing file is not written again."""
    with atomic_write(path) as temporary:
        pq.write_table(table, temporary)


def _copy_missing(experiment: str, path: Path) -> None:
    if not path.exists():
        write_with_schema(path, SCHEMA_LINE + (EXPERIMENTS / experiment).read_text("utf-8"))
