"""Defines the options and the help of `amalgam serve`; the modules that do the work are imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from amalgam.data.lazy import LazyModule
from amalgam.pipeline.user_paths import DEFAULT_FILE

if TYPE_CHECKING:
    from amalgam.stages.app import batcher
    from amalgam.stages.app import serve as http
else:
    batcher, http = (LazyModule(f"amalgam.stages.app.{name}") for name in ("batcher", "serve"))

EPILOG = """\
Examples:

amalgam serve

amalgam serve --student served/model --port 8080

curl localhost:8000/predict -H 'Content-Type: application/json' -d '{"texts": ["the chef fried the onion"]}'

POST /predict takes texts, or pairs of texts, and "top": 3 for three labels. GET /health and GET /metrics (Prometheus)
are for the operator. The server has no authentication. SIGTERM and Ctrl-C end it: accepted requests are answered first.
Needs: an export (`amalgam export --onnx`), and pip install 'amalgam-distill[serve]'
"""


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
        float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Time in which a client sends a request.")
    ] = 10.0,
    grace: Annotated[
        float, typer.Option(min=0, max=3600, metavar="SECONDS", help="Time for accepted requests after a signal.")
    ] = 25.0,
    config: Annotated[Path, typer.Option("-c", "--config", readable=False, help="The experiment file.")] = DEFAULT_FILE,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print only the result.")] = False,
) -> None:
    """Serve an ONNX export of the student over HTTP: predictions, health and metrics."""
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
