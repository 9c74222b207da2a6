"""Defines the options of predict, export and push; heavy imports happen inside a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Option("-c", "--config", help="The experiment file.")]

StudentFolder = Annotated[
    Path | None, typer.Option("--student", help="Folder of a student; default: the student of the experiment.")
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print only the result.")]

FILE = Path("amalgam.yaml")


PREDICT = """\
Examples:

amalgam predict "the onion was fried" --top 3 --explain

amalgam predict --input texts.csv --text body --id number --out labels.parquet

grep -h onion *.log | amalgam predict --input - > labels.csv

The file has a row for each of the texts, in their order: row, key, id, label, probability; with --top K also label_2,
probability_2 and so on; with --explain mass_TEACHER, the sum over that teacher's labels (a label that several teachers
share counts for each of them).
"""


EXPORT = """\
Examples:

amalgam export --onnx

amalgam export --onnx --student students/student --out served/model

The folder has model.onnx (inputs input_ids, attention_mask and, for encoders that take them, token_type_ids; output
logits; any batch, any length the student takes), tokenizer.json and config.json with the labels' names. It is written
only if ONNX Runtime and torch agree on 32 texts; export.json has the figure. Needs: pip install 'amalgam[onnx]'
"""


PUSH = """\
Examples:

amalgam push me/desk-and-study                  lists what would be uploaded, and uploads nothing

amalgam push me/desk-and-study --card           shows the model card

amalgam push me/desk-and-study --yes            uploads to a private repository

The token is that of the Hub client: HF_TOKEN, or the one stored by `hf auth login`. A README.md in the student's folder
is uploaded unchanged; without one the card has the numbers of `amalgam report`.
"""


def add_to(app: typer.Typer) -> None:
    app.command(epilog=PREDICT)(predict)
    app.command(epilog=EXPORT)(export)
    app.command(epilog=PUSH)(push)


def predict(  # noqa: PLR0913 - the options of a command
    texts: Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts to classify.")] = None,
    source: Annotated[
        str | None,
        typer.Option("--input", metavar="FILE", help="csv, tsv, jsonl, parquet or txt; - reads a pipe, a text a line."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A .parquet or .csv file; without it csv goes to stdout.")
    ] = None,
    student: StudentFolder = None,
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="The text column; twice for pairs. [default: corpus.text]"),
    ] = None,
    id_column: Annotated[str | None, typer.Option("--id", metavar="COLUMN", help="A column to copy as id.")] = None,
    top: Annotated[int, typer.Option(min=1, metavar="K", help="Number of most likely labels for each text.")] = 1,
    explain: Annotated[
        bool, typer.Option("--explain", help="Add the summed probability of each teacher's labels.")
    ] = False,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Leave out unusable rows and count them.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --out.")] = False,
    config: Config = FILE,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Predict labels and probabilities of texts, or of a file of any size."""
    from amalgam.stages.app.student.predict import from_commands

    from_commands(
        texts or [],
        source,
        out,
        config=config,
        student=student,
        columns=text or [],
        id_column=id_column,
        top=top,
        explain=explain,
        skip_bad_rows=skip_bad_rows,
        force=force,
        quiet=quiet,
        as_json=as_json,
    )


def export(  # noqa: PLR0913 - the options of a command
    onnx: Annotated[bool, typer.Option("--onnx", help="Write ONNX, the only format.")] = False,
    student: StudentFolder = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to. [default: the student's folder with -onnx]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    config: Config = FILE,
    quiet: Quiet = False,
) -> None:
    """Export the student to ONNX and compare it with torch."""
    from amalgam.pipeline.errors import ExperimentError

    if not onnx:
        raise ExperimentError("no format is given", where="amalgam export", fix="run `amalgam export --onnx`")
    from amalgam.stages.app.student import export_onnx as onnx_export

    onnx_export.export(config, student, out, force=force, quiet=quiet)


def push(  # noqa: PLR0913 - the options of a command
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="Repository on the Hub, such as me/a-model.")],
    student: StudentFolder = None,
    public: Annotated[bool, typer.Option("--public", help="Make the repository public; default: private.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Upload. Without it, only list.")] = False,
    card: Annotated[bool, typer.Option("--card", help="Print the model card only.")] = False,
    config: Config = FILE,
) -> None:
    """Upload the student to the Hugging Face Hub, with a model card from the report."""
    from amalgam.stages.app.student import push as work

    work.push(repo_id, config, student, public=public, yes=yes, show_card=card)
