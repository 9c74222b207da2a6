"""Workspaces of a stranger: records that are signed again after a mutation, links, pipes, bombs and huge numbers.

No command may touch a file outside, hang, take gigabytes of memory, or end with a traceback.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import random
import shutil
import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.small_files import signed
from amalgam.pipeline.storage.store import MANIFEST
from amalgam.tests.fuzz.experiments import Bench, Outcome, entries

SHARES: Mapping[str, int] = {"complete": 10, "stopped": 3, "trained": 3, "weighed": 2, "written": 2}
"""Cases of each experiment, of twenty."""

ALWAYS = (("verify",), ("run",))
SOMETIMES = (
    ("status", "--json"),
    ("plan", "--json"),
    ("explain", "build-targets"),
    ("audit",),
    ("verify", "--repair"),
    ("gc", "--yes"),
    ("gc", "--unused", "--yes"),
    ("gc", "--compact", "--yes"),
    ("build-targets", "--force"),
    ("train-student", "--force"),
    ("report", "--force"),
    ("sweep", "targets.temperature=0.3,0.6"),
    ("predict", "the onion was fried"),
)

DEEP = 100_000
"""Levels of a nested value."""

SPARSE = 6 << 30
"""Bytes of a file without content."""


# ---- values


class Raw(str):
    """JSON text that no encoder would write."""

    __slots__ = ()


def nested(kind: str) -> Raw:
    return Raw("[" * DEEP + "]" * DEEP if kind == "list" else '{"a":' * DEEP + "1" + "}" * DEEP)


def values(rng: random.Random, canary: Path, inside: str) -> Any:
    """Returns a hostile value."""
    up = "../" * rng.randint(1, 8)
    paths: list[Any] = [
        *(str(canary / "model.safetensors"), f"{up}canary/model.safetensors", f"{up}canary/a/b/c.parquet"),
        *(f"cache-teachers/{up}canary/thesis.tex", "./x", "", ".", "..", "/", "//etc/passwd", "~/x", "a/../../b"),
        *("outside/model.safetensors", "outside", "file:///etc/passwd", "s3://bucket/x", "x" * 300, "x/" * 3000),
        *("a\0b", "\ud800", "C:\\x", "..\\..\\x", "*", "[a-z]*", "$(touch x)", "%2e%2e/x", "\x1b[31m", inside),
    ]
    numbers = [
        -1,
        0,
        1,
        2**31,
        2**63,
        2**70,
        -(2**63),
        1e308,
        0.5,
        True,
        False,
        Raw("NaN"),
        Raw("-Infinity"),
        Raw("1e999"),
    ]
    numbers += [Raw("9" * 5000), Raw("1" * 400)]
    others: list[Any] = [None, [], {}, [[]], {"a": {}}, [None] * 3, ["x"] * 100_000, {str(i): i for i in range(10_000)}]
    others += [nested("list"), nested("dict")]
    return rng.choice(rng.choice([paths, numbers, others]))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every node below the root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def mutate(content: Any, rng: random.Random, canary: Path, inside: str) -> str:
    """Changes one node in place, and returns a description."""
    nodes = list(places(content))
    if not nodes:
        return "nothing"
    chosen = rng.choice(nodes)
    parent = content
    for key in chosen[:-1]:
        parent = parent[key]
    key, how = chosen[-1], rng.random()
    place = "/".join(map(str, chosen))
    if how < 0.12:
        del parent[key]
        return f"{place} removed"
    if how < 0.2 and isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
        parent[key] = parent[key] * rng.choice([-1, 2, 1000, 10**12]) + rng.choice([0, 1])
    elif how < 0.26 and isinstance(parent[key], str):
        parent[key] = parent[key] + rng.choice(["/..", "/../../../canary/thesis.tex", "\0", "x" * 300, " ", "\u202e"])
    elif how < 0.32 and isinstance(parent[key], list):
        parent[key] = parent[key] * rng.choice([2, 3, 1000])
    elif how < 0.38:
        other = rng.choice(nodes)
        target: Any = content
        for step in other:
            with contextlib.suppress(KeyError, IndexError, TypeError):
                target = target[step]
        parent[key] = json.loads(json.dumps(target))
    else:
        parent[key] = values(rng, canary, inside)
    return f"{place} = {str(parent[key])[:60]!r}"


def dump(value: Any) -> str:
    """Returns JSON in which raw texts are as they are."""
    raws: list[str] = []

    def mark(item: Any) -> Any:
        if isinstance(item, Raw):
            raws.append(item)
            return f"@raw{len(raws) - 1}@"
        if isinstance(item, dict):
            return {name: mark(part) for name, part in item.items()}
        return [mark(part) for part in item] if isinstance(item, list) else item

    text = json.dumps(mark(value))
    for number, raw in enumerate(raws):
        text = text.replace(f'"@raw{number}@"', raw)
    return text


def sign(content: Mapping[str, Any]) -> bytes:
    """Signs as a stranger can; a content that cannot be signed gets a digest that does not match."""
    text = dump(content)
    try:
        return signed(json.loads(text))
    except (ValueError, RecursionError):
        return dump({**content, "sha256": "0" * 64}).encode()


# ---- mutations of a workspace


def choose_file(bench: Bench, rng: random.Random, *suffixes: str) -> Path | None:
    paths = [path for path in bench.made.files() if path.name.endswith(suffixes) and "quarantine" not in path.parts]
    return rng.choice(paths) if paths else None


def change_record(bench: Bench, rng: random.Random, canary: Path) -> str:
    """Changes a signed JSON file, a checkpoint's state, or the metadata of a delivered folder."""
    path = choose_file(bench, rng, ".json")
    assert path is not None
    content = json.loads(path.read_bytes())
    inside = path.name
    if path.name == "state.json":
        described = mutate(content["checkpoint"], rng, canary, inside)
        with contextlib.suppress(ValueError, RecursionError):
            content["fingerprint"] = fingerprint(json.loads(dump(content["checkpoint"])))
        path.write_text(dump(content))
        return f"{path.name}: {described}"
    is_signed = isinstance(content, dict) and content.pop("sha256", None) is not None
    described = "; ".join(mutate(content, rng, canary, inside) for _ in range(rng.choice([1, 1, 1, 2, 5])))
    path.write_bytes(sign(content) if is_signed else dump(content).encode())
    if path.name == MANIFEST and rng.random() < 0.5:
        described += follow(bench, path)
    return f"{path.relative_to(bench.workspace.folder)}: {described}"


def follow(bench: Bench, manifest: Path) -> str:
    """Renames the folder of a manifest to the fingerprint of its identity, and points HEAD.json there."""
    try:
        content = json.loads(manifest.read_bytes())
        name = fingerprint(content["identity"])
        manifest.parent.rename(manifest.parent.with_name(name))
        head = json.loads((bench.workspace.artifacts / "HEAD.json").read_bytes())
        head.pop("sha256")
        head[manifest.parent.parent.name]["fingerprint"] = name
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    for file in ("HEAD.json", "HEAD.copy.json"):
        (bench.workspace.artifacts / file).write_bytes(signed(head))
    return " (folder renamed)"


def change_index(bench: Bench, rng: random.Random, canary: Path) -> str:
    """Changes an index of packed units, or replaces it by a small file with gigabytes of zeros."""
    path = choose_file(bench, rng, ".gz")
    if path is None:
        return change_record(bench, rng, canary)
    if rng.random() < 0.2:
        path.write_bytes(bomb())
        return f"{path.name}: a bomb"
    content = json.loads(gzip.decompress(path.read_bytes()).partition(b"\n")[2])
    described = "; ".join(mutate(content, rng, canary, path.name) for _ in range(rng.choice([1, 1, 3])))
    body = dump(content).encode("utf-8", "surrogatepass")
    path.write_bytes(gzip.compress(hashlib.sha256(body).hexdigest().encode() + b"\n" + body))
    for copy in path.parent.glob("*.copy.gz"):
        copy.unlink() if rng.random() < 0.5 else copy.write_bytes(path.read_bytes())
    return f"{path.relative_to(bench.workspace.folder)}: {described}"


@cache
def bomb() -> bytes:
    """Returns 4 GiB of zeros, compressed."""
    pack = zlib.compressobj(1, zlib.DEFLATED, 31)
    block = bytes(1 << 24)
    return b"".join([*(pack.compress(block) for _ in range(256)), pack.flush()])


def change_content(bench: Bench, rng: random.Random, canary: Path) -> str:
    """Replaces a unit's file by another content, and signs the records that name it."""
    path = choose_file(bench, rng, ".parquet", ".safetensors", ".npy", "tokenizer.json", "config.json", "findings.json")
    assert path is not None
    others = [other for other in bench.made.files() if other != path and other.stat().st_size < 1 << 20]
    old = path.read_bytes()
    new = rng.choice(
        [
            b"",
            b"\0" * len(old),
            old[: len(old) // 2],
            rng.choice(others).read_bytes(),
            (2**62).to_bytes(8, "little") + old[8:],
            b"PAR1" + b"\xff" * 60 + b"PAR1",
            dump(nested("list")).encode(),
            b'{"auto_map": {"AutoConfig": "evil.Evil"}, "model_type": "bert", "hidden_size": 1000000000}',
            b"{}",
            b"[]",
        ]
    )
    path.write_bytes(new)
    bench.workspace.sign(path)
    return f"{path.relative_to(bench.workspace.folder.parent)}: other content of {len(new)} bytes"


def change_kind(bench: Bench, rng: random.Random, canary: Path) -> str:
    """Replaces a file or a folder by a link, a pipe, a folder, or a file without end."""
    kept = [path for path, entry in bench.made.kept.items() if "quarantine" not in path.parts]
    # The user's own environment names the cache: a workspace from a stranger has none.
    ours = {bench.workspace.artifacts, bench.cache}
    path = rng.choice([path for path in kept if path.exists() and path not in ours])
    is_folder = path.is_dir()
    how = rng.choice(["canary", "itself", "parent", "device", "pipe", "folder", "absent", "closed", "sparse"])
    if how == "closed":
        path.chmod(0)
        return f"{path.relative_to(bench.workspace.folder.parent)}: no permission"
    shutil.rmtree(path) if is_folder else path.unlink()
    if how == "canary":
        path.symlink_to(canary if is_folder else canary / "model.safetensors")
    elif how == "itself":
        path.symlink_to(path.name)
    elif how == "parent":
        path.symlink_to("..")
    elif how == "device":
        path.symlink_to("/dev/zero")
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "sparse":
        with path.open("wb") as file:
            file.truncate(SPARSE)
    return f"{path.relative_to(bench.workspace.folder.parent)}: {how}"


CHANGES = {change_record: 9, change_index: 3, change_content: 3, change_kind: 5}


def case(bench: Bench, rng: random.Random) -> tuple[str, str, list[Outcome]]:
    """Returns the verdict, the mutation and the commands of one case."""
    bench.made.restore()
    (bench.workspace.artifacts / "outside").symlink_to(bench.canary)
    described = rng.choices(list(CHANGES), list(CHANGES.values()))[0](bench, rng, bench.canary)
    for folder in bench.made.folders:
        for path in entries(folder):
            with contextlib.suppress(OSError):
                os.utime(path, (0, 0), follow_symlinks=False)
    words = [*ALWAYS, *rng.sample(SOMETIMES, 3)]
    rng.shuffle(words)
    outcomes = [bench.command(*command) for command in words]
    return judge(bench, outcomes), described, outcomes


def judge(bench: Bench, outcomes: list[Outcome]) -> str:
    for outcome in outcomes:
        if outcome.is_fault:
            return f"WRONG: {outcome.words[0]} ended with a traceback, without memory, or not at all"
    changed = bench.inputs.changes()
    if changed:
        bench.inputs.restore()  # for the next case
        return f"WRONG: files outside changed: {changed[:3]}"
    return "refused" if any(outcome.code for outcome in outcomes) else "unharmed"
