"""Defines the commands of a student: options and help. The modules that do the work are imported when one runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from amalgam.data.lazy import LazyModule
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.signals import without_units
from amalgam.pipeline.user_paths import DEFAULT_FILE
from amalgam.stages.app.command_tree import AsJson, Config, Quiet

if TYPE_CHECKING:
    from amalgam.stages.app import batcher
    from amalgam.stages.app import export as exports
    from amalgam.stages.app import predict as predictions
    from amalgam.stages.app import push as uploads
    from amalgam.stages.app import serve as http
else:
    batcher, exports, predictions, uploads, http = (
        LazyModule(f"amalgam.stages.app.{name}") for name in ("batcher", "export", "predict", "push", "serve")
    )

StudentOption = Annotated[
    Path | None, typer.Option("--student", help="Folder of a student; default: the student of the experiment.")
]

PREDICT = """\
Examples:

amalgam predict "the onion was fried" --top 3 --explain

amalgam predict --input texts.csv --text body --id number --out labels.parquet

grep -h onion *.log | amalgam predict --input - > labels.csv

The file has a row for each of the texts, in their order: row, key, id, label, probability; with --top K also label_2,
probability_2 and so on; with --explain mass_TEACHER, the sum over that teacher's labels (a label that several teachers
share counts for each of them); with --unknown the columns unknown and unknown_score.
"""


EXPORT = """\
Examples:

amalgam export --onnx --student students/student --out served/model

amalgam export --onnx --int8                    smaller and faster; compared on corpus.test, or the texts of --input

The folder has model.onnx (inputs input_ids, attention_mask and, for encoders that take them, token_type_ids; output
logits; any batch, any length the student takes), tokenizer.json and config.json with the labels' names. It is written
only if ONNX Runtime and torch agree on 32 texts; export.json has the figure.
An int8 model that loses more than 0.4 points of accuracy is refused without --force. --numpy exports static students.
--onnx needs: pip install 'amalgam-distill[onnx]'
"""


SERVE = """\
Examples:

amalgam serve

amalgam serve --student served/model --port 8080

curl localhost:8000/predict -H 'Content-Type: application/json' -d '{"texts": ["the chef fried the onion"]}'

POST /predict takes texts, or pairs of texts, and "top": 3 for three labels. GET /health and GET /metrics (Prometheus)
are for the operator. The server has no authentication. SIGTERM and Ctrl-C end it: accepted requests are answered first.
Needs: an export (`amalgam export --onnx`), and pip install 'amalgam-distill[serve]'
"""


PUSH = """\
Examples:

amalgam push me/desk-and-study                  lists what would be uploaded, and uploads nothing

amalgam push me/desk-and-study --card           shows the model card

amalgam push me/desk-and-study --yes            uploads to a private repository

The token is that of the Hub client: HF_TOKEN, or the one stored by `hf auth login`. A README.md in the student's folder
is uploaded unchanged; without one the card has the numbers of `amalgam report` and the licences of the teachers.
"""


def predict(  # noqa: PLR0913 - the options of a command
    texts: Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts to classify.")] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--input", metavar="FILE", help="csv, tsv, jsonl, parquet or txt; - is standard input, one text per line."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A .parquet or .csv file; without it csv goes to stdout.")
    ] = None,
    student: StudentOption = None,
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Text column; twice: pairs. [default: corpus.text, text with --student]"),
    ] = None,
    id_column: Annotated[str | None, typer.Option("--id", metavar="COLUMN", help="A column to copy as id.")] = None,
    top: Annotated[int, typer.Option(min=1, metavar="K", help="Number of most likely labels for each text.")] = 1,
    explain: Annotated[
        bool, typer.Option("--explain", help="Add the summed probability of each teacher's labels.")
    ] = False,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="Add a flag and a score of texts unlike the training texts.")
    ] = False,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Leave out unusable rows and count them.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --out.")] = False,
    config: Config = DEFAULT_FILE,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Predict labels and probabilities of texts, or of a file of any size."""
    predictions.predict(
        texts or [],
        source,
        out,
        config=config,
        student=student,
        columns=text or [],
        id_column=id_column,
        top=top,
        explain=explain,
        unknown=unknown,
        skip_bad_rows=skip_bad_rows,
        force=force,
        quiet=quiet,
        as_json=as_json,
    )


def export(  # noqa: PLR0913 - the options of a command
    onnx: Annotated[bool, typer.Option("--onnx", help="Write ONNX.")] = False,
    numpy: Annotated[bool, typer.Option("--numpy", help="Write a static student with its numpy code.")] = False,
    student: StudentOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="[default: the student's folder with -onnx or -numpy]")
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Quantise the model to int8 and compare it with torch.")] = False,
    source: Annotated[Path | None, typer.Option("--input", metavar="FILE", help="Texts to compare int8 on.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an export, or accept an int8 loss.")] = False,
    config: Config = DEFAULT_FILE,
    quiet: Quiet = False,
) -> None:
    """Export the student to ONNX or numpy and compare it with torch."""
    if onnx is numpy:
        raise ExperimentError("give one format", where="amalgam export", fix="run `amalgam export --onnx`, or --numpy")
    with without_units("no export was written"):
        name: Literal["onnx", "numpy"] = "onnx" if onnx else "numpy"
        exports.export(name, config, student, out, int8=int8, source=source, force=force, quiet=quiet)


def serve(  # noqa: PLR0913 - the options of a command
    student: Annotated[
        Path | None,
        typer.Option("--student", help="Folder of an ONNX export; default: that of the experiment's student."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")] = 8000,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Threads of the model. [default: the usable cores]")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=4096, help="Most texts in a batch.")] = 32,
    max_waiting: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Most texts in the queue; more get status 503.")
    ] = 1024,
    max_texts: Annotated[int, typer.Option(min=1, max=100_000, help="Most texts in a request.")] = 256,
    max_characters: Annotated[int, typer.Option(min=1, max=10_000_000, help="Most characters in a text.")] = 20_000,
    max_body: Annotated[
        int, typer.Option(min=1, max=1 << 30, metavar="BYTES", help="Most bytes in a request's body.")
    ] = 1 << 20,
    timeout: Annotated[
        float,
        typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Time to send a request, and to read its answer."),
    ] = 10.0,
    grace: Annotated[
        float, typer.Option(min=0, max=3600, metavar="SECONDS", help="Time for accepted requests after a signal.")
    ] = 25.0,
    config: Config = DEFAULT_FILE,
    quiet: Quiet = False,
) -> None:
    """Serve an ONNX export of the student over HTTP: predictions, health and metrics."""
    with without_units("the server had not started"):
        code = http.serve(
            config,
            student,
            host=host,
            port=port,
            threads=threads,
            batch_size=batch_size,
            most_waiting=max_waiting,
            limits=batcher.Limits(max_texts, max_characters, max_body, timeout, grace),
            quiet=quiet,
        )
    raise typer.Exit(code)


def push(  # noqa: PLR0913 - the options of a command
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="Repository on the Hub, such as me/a-model.")],
    student: StudentOption = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public; default: private.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Upload. Without it, only list.")] = False,
    card: Annotated[bool, typer.Option("--card", help="Print the model card only.")] = False,
    licence: Annotated[
        str | None, typer.Option("--license", metavar="ID", help="Licence in the card, such as apache-2.0.")
    ] = None,
    config: Config = DEFAULT_FILE,
) -> None:
    """Upload the student to the Hugging Face Hub, with a model card from the report."""
    uploads.push(repo_id, config, student, licence=licence, public=public, yes=yes, show_card=card)


COMMANDS: dict[Callable[..., None], str] = {predict: PREDICT, export: EXPORT, serve: SERVE, push: PUSH}
"""The commands in the order of the help, each with its epilog."""
