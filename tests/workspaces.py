"""Tiny experiments for tests: a Workspace runs the command in this process and counts the teachers' work.

A workspace is a folder with texts, two tiny random teachers, an encoder and amalgam.yaml.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Any

from amalgam.data.demo_corpus import generate
from amalgam.pipeline.input_files import file_digest
from amalgam.pipeline.storage.small_files import signed, verified
from amalgam.pipeline.storage.store import Record, Store, canonical_record, open_store
from amalgam.stages.common.deliveries import MARKS, METADATA
from amalgam.tests.forking import Forked

TEACHER_LABELS = {
    "first": ["banking", "computing", "cooking", "football"],
    "second": ["gardening", "law", "medicine", "music"],
}
TRAIN, TEST, PASSES = 120, 40, 4
TIMEOUT = 150

EXPERIMENT = """\
corpus:
  train: texts/train.csv
  test: texts/test.csv
  label: label
teachers:
  - name: first
    model: ./models/first
  - name: second
    model: ./models/second
cache:
  passes: 4
  max_tokens: 32
  dtype: fp32
targets:
  mode: soft
student:
  encoder: ./models/encoder
  max_tokens: 32
  epochs: 1
  batch_size: 32
  learning_rate: 1e-3
"""

TRAINED = ("train_teachers:", "encoder: ./models/encoder", "groups: 2", "epochs: 1")

Row = tuple[str, str]
TargetsByKey = dict[bytes, tuple[list[float], float]]
TOLERANCE = 3e-4
"""Largest difference of equal targets: other batches can round an fp16 pass otherwise; a lost pass differs far more."""


@dataclass(frozen=True)
class CommandResult:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def rows(self) -> list[dict[str, str]]:
        """The rows of a csv table by column."""
        return list(csv.DictReader(io.StringIO(self.out)))


@dataclass(frozen=True)
class TeacherWork:
    """Computed (family, text) pairs with dropout off, such pairs times passes, and units."""

    logits: int
    passes: int
    units: int


class Workspace:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # ---- commands

    def __call__(self, *arguments: str) -> CommandResult:
        """Run the command in this process, in the workspace's folder; it must succeed."""
        return self._ended(0, *arguments)

    def refusal(self, code: int, *arguments: str) -> str:
        """Return the messages of a command that must end with this code."""
        return self._ended(code, *arguments).err

    def _ended(self, code: int, *arguments: str) -> CommandResult:
        result = self.attempt(*arguments)
        assert result.code == code, f"amalgam {' '.join(arguments)}: {result.code}\n{result.err}{result.out}"
        return result

    def attempt(self, *arguments: str) -> CommandResult:
        return amalgam(*arguments, folder=self.folder)

    def plan(self, *overrides: str) -> dict[str, dict[str, Any]]:
        stages = self("plan", "--json", *overrides).json["stages"]
        return {stage["stage"]: stage for stage in stages}

    def stale(self, *overrides: str) -> set[str]:
        """Return the stages that `run` would run."""
        return {name for name, stage in self.plan(*overrides).items() if stage["state"] != "current"}

    def process(self, *arguments: str, **environment: str) -> Forked:
        """Start the command in a forked process."""
        return Forked(arguments, self.folder, quiet_environment(**environment))

    def new_process(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start the command as a shell does, in a new Python process."""
        return subprocess.Popen(
            [sys.executable, "-m", "amalgam", *arguments],
            cwd=self.folder,
            env=quiet_environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    # ---- the experiment

    @property
    def artifacts(self) -> Path:
        return self.folder / "artifacts"

    @property
    def config(self) -> Path:
        return self.folder / "amalgam.yaml"

    def edit(self, old: str, new: str) -> None:
        text = self.config.read_text()
        assert old in text, f"{old!r} is not in amalgam.yaml"
        self.config.write_text(text.replace(old, new))

    def replace_teachers(self, section: str) -> None:
        text = self.config.read_text()
        self.edit(text[text.index("teachers:") : text.index("cache:")], section)

    def train_teachers(self, *fields: str) -> None:
        """Replace the teachers by two that the experiment trains for an epoch."""
        self.replace_teachers("\n  ".join([*TRAINED, *fields]) + "\n")

    def texts(self, part: str = "train") -> list[Row]:
        import polars as pl

        return [(text, label) for text, label in pl.read_csv(self.folder / f"texts/{part}.csv").iter_rows()]

    def write(self, rows: Sequence[Row], part: str = "train", suffix: str = "csv") -> None:
        write_texts(self.folder / f"texts/{part}.{suffix}", rows)

    def copy(self, folder: Path) -> Workspace:
        shutil.copytree(self.folder, folder)
        return Workspace(folder)

    def without_artifacts(self, folder: Path) -> Workspace:
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("artifacts", "students"))
        return Workspace(folder)

    # ---- results

    def units(self, stage: str = "cache-teachers") -> list[Path]:
        return sorted((self.artifacts / stage).glob("*/units/*.parquet"))

    def digests(self, stage: str) -> set[tuple[str, str]]:
        """Return (unit, digest) of every committed file of a stage's units."""
        pairs = set()
        for path in (self.artifacts / stage).glob("*/units/*.json"):
            record = json.loads(path.read_text())
            pairs |= {(f"{path.parent.parent.name}/{path.stem}", file["sha256"]) for file in record["files"]}
        return pairs

    def head(self, stage: str) -> str:
        """Return the fingerprint of the stage's last result."""
        return str(json.loads((self.artifacts / "HEAD.json").read_text())[stage]["fingerprint"])

    def manifest(self, stage: str) -> Any:
        """Return the manifest of the stage's last result."""
        return json.loads((self.artifacts / stage / self.head(stage) / "MANIFEST.json").read_text())

    def sign(self, changed: Path) -> None:
        """Give every record that names the file its new size and digest."""
        if not changed.is_relative_to(self.artifacts):
            return
        inside = changed.relative_to(self.artifacts).as_posix()
        for path in self.artifacts.rglob("*.json"):
            with contextlib.suppress(ValueError, KeyError, TypeError, OSError, RecursionError):
                content = json.loads(path.read_bytes())
                named = [file for file in content["files"] if file["path"] == inside]
                if named:
                    content.pop("sha256")
                    for file in named:
                        file |= {"bytes": changed.stat().st_size, "sha256": file_digest(changed)}
                    path.write_bytes(signed(content))

    def numbers(self, name: str = "student") -> Any:
        """Return the content of a report's JSON."""
        return json.loads((self.folder / f"reports/{name}.json").read_text("utf-8"))

    def targets(self) -> TargetsByKey:
        """Return the current targets by key."""
        import pyarrow.parquet as pq

        by_key: TargetsByKey = {}
        for file in self.manifest("build-targets")["files"]:
            for row in pq.read_table(self.artifacts / file["path"], columns=["key", "target", "weight"]).to_pylist():
                by_key[row["key"]] = (row["target"], row["weight"])
        return by_key

    @contextlib.contextmanager
    def counting(self) -> Iterator[list[TeacherWork]]:
        """Count the teachers' work in the block; read it after the block."""
        before, work = set(self._records()), list[TeacherWork]()
        yield work
        facts = [facts for mark, facts in self._records().items() if mark not in before]
        logits = sum(fact["rows"] * bool(fact["logits"]) for fact in facts)
        passes = sum(fact["rows"] * (fact["last"] - fact["first"]) for fact in facts)
        work.append(TeacherWork(logits, passes, len(facts)))

    def _records(self) -> dict[tuple[str, int, int], Mapping[str, Any]]:
        """Return the facts of units by path, inode and time: a recomputed unit has a new inode."""
        by_file = {}
        for path in (self.artifacts / "cache-teachers").glob("*/units/*.json"):
            with contextlib.suppress(ValueError, KeyError, TypeError, FileNotFoundError):
                record = json.loads(path.read_text())
                if "tokens" not in record["facts"]:
                    continue  # a stopping decision: no teacher ran
                stat = (self.artifacts / record["files"][0]["path"]).stat()
                by_file[str(path), stat.st_ino, stat.st_mtime_ns] = record["facts"]
        return by_file


def amalgam(*arguments: str, folder: Path) -> CommandResult:
    """Run `amalgam ARGUMENTS` in a folder as the console script does, without a new process."""
    from amalgam.cli import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    argv, sys.argv = sys.argv, ["amalgam", *arguments]
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        finally:
            sys.argv = argv
    return CommandResult(code, out.getvalue(), err.getvalue())


def finish(process: subprocess.Popen[str] | Forked, seconds: float = TIMEOUT) -> CommandResult:
    """Wait for a process; one that hangs is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {seconds} s: {process.args!r}\n{out}\n{err}") from None
    return CommandResult(process.wait(), out, err)


def ranks(workspace: Workspace, *arguments: str) -> CommandResult:
    """The command as two ranks on one node."""
    return run_ranks(lambda rank: workspace.process(*arguments, **rank))


def free_port() -> int:
    """Return a port below those that the system gives to connections, one of which could take it meanwhile."""
    for port in SystemRandom().sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no free port among 100")


def run_ranks(start: Callable[[dict[str, str]], Forked], processes: int = 2) -> CommandResult:
    """As `torchrun` on one node, without the launcher: the failure of a rank ends the others."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "ACCELERATE_USE_CPU": "1"}
    world |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    world |= {"GLOO_SOCKET_IFNAME": "lo"}  # else it looks up the name of the machine, and warns if there is none
    running = [start({**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(processes)]
    deadline = time.monotonic() + TIMEOUT
    while not all(rank.poll() is not None for rank in running):
        has_failed = any(rank.poll() for rank in running)
        if has_failed or time.monotonic() > deadline:
            for rank in running:
                rank.send_signal(signal.SIGKILL if has_failed else signal.SIGABRT)
        time.sleep(0.01)
    code = next((code for rank in running if (code := rank.wait())), 0)
    outputs = [rank.communicate() for rank in running]
    return CommandResult(code, "".join(out for out, _ in outputs), "".join(err for _, err in outputs))


def torchrun(
    workspace: Workspace,
    *arguments: str,
    processes: int = 2,
    meeting: str | None = None,
    module: str = "amalgam.cli",
) -> Forked:
    """Start the processes of one node: of the only one, or of one of two that meet at a port."""
    nodes = ["--nnodes", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint", meeting] if meeting else ["--nnodes", "1"]
    where = [*nodes, "--local_addr", "127.0.0.1", "--nproc_per_node", str(processes)]
    words = [*where, "-m", module, *arguments]
    return Forked(words, workspace.folder, quiet_environment(ACCELERATE_USE_CPU="1"), "amalgam.tests.launching")


def quiet_environment(**more: str) -> dict[str, str]:
    """Return the environment without an outer launcher's variables, with one thread a process."""
    outer = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "COLUMNS", "NO_COLOR"}
    kept = {name: value for name, value in os.environ.items() if name not in outer}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


def largest_difference(one: TargetsByKey, other: TargetsByKey) -> float:
    """Return the largest difference of any target or weight, or infinity if the texts differ."""
    if one.keys() != other.keys():
        return float("inf")
    return max(
        abs(a - b)
        for key, (target, weight) in one.items()
        for a, b in zip([*target, weight], [*other[key][0], other[key][1]], strict=True)
    )


def until(condition: Callable[[], object], process: Forked | subprocess.Popen[str] | None = None) -> None:
    """Waits for the condition; fails if it does not become true, or if the process ends before."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def rewrite(path: Path, change: Callable[[Record], Record]) -> None:
    """Change a record and its digest."""
    path.write_text(canonical_record(change(Record.from_json(path.read_text()))))


def edit_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite_mark(folder: Path, **changes: Any) -> None:
    """Change the mark of a delivered folder, with its digest, and its copy."""
    mark = verified((folder / METADATA).read_bytes())
    assert mark is not None
    for name in MARKS:
        (folder / name).write_bytes(signed({**mark, **changes}))


def opened(address: str) -> Store:
    return open_store(address, Path("/nowhere"))


def objects(address: str) -> list[str]:
    return [entry.path for entry in opened(address).backend.list()]


def flip_bit(path: Path, place: int = -100) -> None:
    """Flip one bit; the size stays, and Parquet readers report no error."""
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1
    path.write_bytes(bytes(data))


def age(folder: Path) -> None:
    """Make every file older than the day for which gc keeps it."""
    for path in folder.rglob("*"):
        os.utime(path, (0, 0), follow_symlinks=False)


# ---- building


def build_once(folder: Path, build: Callable[[Path], Workspace]) -> Workspace:
    """Return the workspace below `folder`, which all workers of pytest see: the first builds it, others wait."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "workspace").exists():
            shutil.rmtree(folder / "unfinished", ignore_errors=True)  # of a worker that crashed
            build(folder / "unfinished").folder.rename(folder / "workspace")
    return Workspace(folder / "workspace")


def up_to_date(workspace: Workspace, *overrides: str) -> Workspace:
    workspace("run", *overrides)
    return workspace


def new_workspace(folder: Path) -> Workspace:
    """Write texts, teachers, encoder and experiment file; no stage has run."""
    train, test = generate(TRAIN, 0), generate(TEST, 0, "test")
    (folder / "texts").mkdir(parents=True)
    write_texts(folder / "texts/train.csv", train)
    write_texts(folder / "texts/test.csv", test)
    words = word_list(Workspace(folder))
    for seed, (name, labels) in enumerate(TEACHER_LABELS.items(), 1):
        write_model(folder / "models" / name, labels=labels, words=words, seed=seed)
    write_model(folder / "models/encoder", words=words, seed=9)
    (folder / "amalgam.yaml").write_text(EXPERIMENT)
    return Workspace(folder)


def word_list(workspace: Workspace) -> list[str]:
    """Return the words of the workspace's models."""
    return sorted({word.strip(".,").lower() for text, _ in workspace.texts() for word in text.split()})


GENERATE = """\
generate:
  language_model: ./models/lm
  texts: 12
  steering_strength: 6
  candidates: 30
  max_tokens: 8
  min_class_probability: 0.1
cache:
"""


def new_generating_workspace(folder: Path) -> Workspace:
    """Return a new workspace with a tiny language model instead of training texts."""
    from amalgam.stages.common.models.loading import save_pretrained_folder
    from amalgam.tests.stages.tiny_models import tiny_language_model

    workspace = new_workspace(folder)
    save_pretrained_folder(*tiny_language_model(words=word_list(workspace), seed=3), folder / "models/lm")
    for name in TEACHER_LABELS:
        scale_weights(folder / "models" / name, "classifier.weight", 8.0)
    (folder / "texts/train.csv").unlink()
    workspace.edit("  train: texts/train.csv\n", "")
    workspace.edit("cache:\n", GENERATE)
    return workspace


def scale_weights(folder: Path, name: str, factor: float) -> None:
    """Scale one tensor of a model, in place."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights[name] *= factor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_bases(workspace: Workspace) -> None:
    """Give each teacher a base, from which it was fine-tuned on texts of its labels: their words have other vectors."""
    import torch
    from safetensors.torch import load_file, save_file

    from amalgam.data.tokens import encode
    from amalgam.stages.common.models.loading import load_tokenizer
    from amalgam.stages.common.models.resolve import read_model

    for name, labels in TEACHER_LABELS.items():
        folder = workspace.folder / "models" / name
        base = shutil.copytree(folder, folder.with_name(f"{name}-base"))
        weights, tokenizer = load_file(base / "model.safetensors"), load_tokenizer(read_model(folder, name))
        vectors = weights["bert.embeddings.word_embeddings.weight"]
        own = [(text,) for text, label in workspace.texts()[:200] if label in labels]
        learned = sorted(set(encode(tokenizer, own, 32, types=False).ids.values.tolist()))
        vectors[learned] += 0.1 * torch.randn(
            len(learned), vectors.shape[1], generator=torch.Generator().manual_seed(0)
        )
        save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
        workspace.edit(f"    model: ./models/{name}\n", f"    model: ./models/{name}\n    base: ./models/{name}-base\n")


def write_texts(path: Path, rows: Sequence[Row]) -> None:
    import polars as pl

    frame = pl.DataFrame({"text": [text for text, _ in rows], "label": [label for _, label in rows]})
    if path.suffix == ".csv":
        frame.write_csv(path)
    elif path.suffix == ".jsonl":
        frame.write_ndjson(path)
    else:
        frame.write_parquet(path)


def record_of(unit: Path) -> Path:
    """Return the record of a unit's file."""
    return unit.with_name(unit.name.rpartition("-")[0] + ".json")


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows by column."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_csv(path: Path, header: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def write_model(
    folder: Path, *, words: Sequence[str], seed: int, labels: Sequence[str] | None = None, **settings: Any
) -> None:
    """Write one random BERT layer with wide weights, so that texts differ; without labels, an encoder alone."""
    import torch
    from transformers import BertForSequenceClassification, BertModel

    from amalgam.stages.common.models.loading import save_pretrained_folder
    from amalgam.tests.stages.tiny_models import SPECIAL, tiny_config, word_tokenizer

    shape = {"num_hidden_layers": 1, "initializer_range": 0.2, "vocab_size": len(SPECIAL) + len(words)}
    config = tiny_config("bert", labels or ("a", "b"), **{**shape, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BertForSequenceClassification(config) if labels else BertModel(config)
    save_pretrained_folder(model, word_tokenizer(words), folder)


def shift_weights(folder: Path, change: Mapping[str, float]) -> None:
    """Add numbers to the first element of tensors of a model, in place."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    for name, amount in change.items():
        weights[name].view(-1)[0] += amount
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
