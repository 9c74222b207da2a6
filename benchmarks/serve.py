"""Loads `amalgam serve` with requests from several clients, and ends it while they send.

python benchmarks/serve.py --shape minilm --texts PATH/ag_news/test.parquet
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from amalgam.benchmarks.models import SHAPES, save_classifier
from amalgam.benchmarks.protocol import median, row, show, spread, texts_from

if TYPE_CHECKING:
    from collections.abc import Sequence

WARM_UP = 64
BATCH = 32
LABELS = 4
ENDED_AFTER = 200
"""Requests after which SIGTERM is sent, in the run that ends under load."""


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as scratch:
        folder = _export(options.shape, Path(scratch))
        texts = _texts(options)
        bodies = [_body(texts[first : first + options.each]) for first in range(0, len(texts), options.each)]
        rows = [_direct(folder, texts, options)]
        rows += [_load(folder, bodies, clients, options) for clients in options.clients]
        rows.append(_end_under_load(folder, bodies, options))
    for figures in rows[1:-1]:
        figures["cpu_of_direct"] = round(figures["cpu_ms_a_text"] / rows[0]["cpu_ms_a_text"], 3)
    show(rows, as_json=options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="random", help="the student, exported by `export --onnx`")
    parser.add_argument("--texts", type=Path, help="a Parquet file with a column `text`; default: the embedded corpus")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--each", type=int, default=1, help="texts of a request")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64], help="clients that send at once")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of the model")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _texts(options: argparse.Namespace) -> list[str]:
    wanted = options.requests * options.each
    texts = texts_from(options.texts, wanted if options.texts else min(wanted, 4000))
    return (texts * (wanted // len(texts) + 1))[:wanted]


def _export(shape: str, scratch: Path) -> Path:
    from amalgam.stages.app.export import export

    student = save_classifier(scratch / "student", shape, LABELS)
    export("onnx", Path("none.yaml"), student, None, force=False, quiet=True)
    return scratch / "student-onnx"


def _body(texts: Sequence[str]) -> bytes:
    content = json.dumps({"texts": texts}).encode()
    head = (
        f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    return head.encode() + b"\r\n\r\n" + content


def _direct(folder: Path, texts: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Measures the same model without a server, in batches of texts in their order."""
    from amalgam.stages.app.serve import OnnxStudent, read_export

    student = OnnxStudent(read_export(folder, "export the student"), options.threads)
    batches = [[(text,) for text in texts[first : first + BATCH]] for first in range(0, len(texts), BATCH)]
    student(batches[0])
    rates, before = [], time.process_time()
    for part in np.array_split(np.arange(len(batches)), min(5, len(batches))):
        began = time.perf_counter()
        for number in part:
            student(batches[number])
        rates.append(sum(len(batches[number]) for number in part) / (time.perf_counter() - began))
    cpu = round((time.process_time() - before) * 1e3 / len(texts), 2)
    return row(
        "serve", "direct", texts_per_s=round(median(rates), 1), cpu_ms_a_text=cpu, spread=round(spread(rates), 3)
    )


class Server:
    """The command in a process of its own."""

    def __init__(self, folder: Path, threads: int) -> None:
        began = time.perf_counter()
        command = [sys.executable, "-m", "amalgam", "serve", "--student", str(folder), "--port", "0", "--quiet"]
        self.process = subprocess.Popen([*command, "--threads", str(threads)], stdout=subprocess.PIPE, text=True)
        if self.process.stdout is None:
            raise SystemExit("the server has no output")
        self.port = int(self.process.stdout.readline().rpartition(":")[2])
        self.seconds = time.perf_counter() - began

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_mb(self) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text("utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e3


def _load(folder: Path, bodies: Sequence[bytes], clients: int, options: argparse.Namespace) -> dict[str, Any]:
    server = Server(folder, options.threads)
    try:
        asyncio.run(_send(server.port, bodies[:WARM_UP], clients))
        began, before = time.perf_counter(), server.cpu_seconds()
        answers = asyncio.run(_send(server.port, bodies, clients))
        took, cpu = time.perf_counter() - began, server.cpu_seconds() - before
        peak = server.peak_mb()
    finally:
        server.end()
    seconds = np.array([second for _, second in answers])
    figures = {
        "requests": len(bodies),
        "texts_per_s": round(len(bodies) * options.each / took, 1),
        "cpu_ms_a_text": round(cpu * 1e3 / (len(bodies) * options.each), 2),
        "p50_ms": round(float(np.quantile(seconds, 0.5)) * 1e3, 1),
        "p99_ms": round(float(np.quantile(seconds, 0.99)) * 1e3, 1),
        "not_200": sum(status != 200 for status, _ in answers),
        "start_s": round(server.seconds, 2),
        "peak_mb": round(peak),
    }
    return row("serve", f"{clients} clients", **figures)


def _end_under_load(folder: Path, bodies: Sequence[bytes], options: argparse.Namespace) -> dict[str, Any]:
    """Ends the server while clients send; counts the requests without an answer."""
    server, clients = Server(folder, options.threads), options.clients[-1]

    async def run() -> tuple[list[tuple[int, float]], float]:
        answers: list[tuple[int, float]] = []
        load = asyncio.create_task(_send(server.port, bodies, clients, answers))
        while len(answers) < min(ENDED_AFTER, len(bodies) // 2):  # noqa: ASYNC110 - a benchmark
            await asyncio.sleep(0.01)
        began = time.perf_counter()
        server.process.send_signal(signal.SIGTERM)
        await load
        return answers, time.perf_counter() - began

    answers, seconds = asyncio.run(run())
    code = server.process.wait()
    lost = sum(status == 0 for status, _ in answers)
    figures = {"answered": len(answers) - lost, "lost": lost, "seconds": round(seconds, 2), "exit_code": code}
    return row("serve", f"SIGTERM under {clients} clients", **figures)


async def _send(
    port: int, bodies: Sequence[bytes], clients: int, answers: list[tuple[int, float]] | None = None
) -> list[tuple[int, float]]:
    """Returns status and seconds of each request; 0 is a broken connection."""
    results = [] if answers is None else answers
    waiting = iter(bodies)

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for body in waiting:
            began = time.perf_counter()
            try:
                writer.write(body)
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
            except (OSError, asyncio.IncompleteReadError):
                results.append((0, time.perf_counter() - began))
                break
            results.append((int(head[9:12]), time.perf_counter() - began))
            if b"\r\nConnection: close" in head:
                break
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return results


if __name__ == "__main__":
    main()
