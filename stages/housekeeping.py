"""What the workspace holds, whether it is still what was written, and what in it nobody needs."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from amalgam.pipeline.runner import WORK
from amalgam.pipeline.stage import Run
from amalgam.pipeline.store import MANIFEST, TEMPORARY, Record
from amalgam.stages.models.files import newer_revision
from amalgam.stages.order import STAGES

OLD_SECONDS = 24 * 3600.0
ROOMS = ("pins", "quarantine", "journals", "given")
"""Not of any stage: no record stands for what lies there."""


def holdings(run: Run) -> dict[str, Any]:
    """Every finished result, what of it HEAD is, and the families of stage 1."""
    head = run.store.head()
    artifacts = [
        row for stage in STAGES for row in _results(run, stage.name, head.get(stage.name, {}).get("fingerprint"))
    ]
    return {
        "workspace": str(run.store.root),
        "bytes": sum(size for _, size in _files(run.store.root)),
        "head": head,
        "artifacts": artifacts,
        "notes": list(_newer_models(run)),
    }


def _results(run: Run, stage: str, head: str | None) -> Iterator[dict[str, Any]]:
    room = run.store.root / stage
    for folder in sorted(room.iterdir()) if room.is_dir() else []:
        manifest = run.store.manifest(stage, folder.name)
        is_family = (folder / "key.json").exists()
        if manifest is None and not is_family:
            continue
        yield {
            "stage": stage,
            "name": folder.name,
            "head": folder.name == head,
            "bytes": sum(size for _, size in _files(folder)),
            "says": _family_line(folder) if manifest is None else _manifest_line(run, stage, manifest),
        }


def _manifest_line(run: Run, stage: str, manifest: Record) -> str:
    total = len(manifest.files)
    whole = total - len(run.store.absent(manifest))
    shards = f"{whole}/{total} files" + ("" if whole == total else " (the next run makes the rest again)")
    facts, config = manifest.facts, manifest.identity.get("config", {})
    said = {
        "generate": lambda: f"{facts['texts']:,} texts, {facts['source']}",
        "read-corpus": lambda: ", ".join(f"{part} {found['texts']:,} texts" for part, found in facts["parts"].items()),
        "train-teachers": lambda: ", ".join(facts["teachers"]),
        "cache-teachers": lambda: f"{', '.join(facts['families'])}; K = {config['cache']['passes']}, {facts['dtype']}",
        "cache-features": lambda: f"states of {', '.join(facts['families'])}",
        "fit-statistics": lambda: f"statistics of {', '.join(facts['teachers'])}",
        "weigh-teachers": lambda: f"{config['targets']['weights']} weights of {', '.join(facts['shares'])}",
        "build-targets": lambda: (
            f"{facts.get('method', config['targets']['mode'])}, {facts['summary']['texts']:,} texts"
        ),
        "guess-embeddings": lambda: f"pseudo embeddings of {', '.join(facts['teachers'])}",
        "train-student": lambda: (
            f"{len(facts['labels'])} labels, best of {facts['steps']:,} steps by {facts['selected_by']}"
        ),
        "report": lambda: str(facts["method"]),
    }
    return f"{said[stage]()}; {shards}"


def _family_line(folder: Path) -> str:
    import json

    try:
        key = json.loads((folder / "key.json").read_text("utf-8"))
    except (OSError, ValueError):
        return "family (key.json cannot be read)"
    units = len(list((folder / "units").glob("*.json")))
    return f"family of {key.get('teacher')}, {units} units, {key.get('dtype', 'fp32')}"


def _newer_models(run: Run) -> Iterator[str]:
    for teacher in run.experiment.teachers:
        newer = newer_revision(teacher.model, revision=teacher.revision, base=run.base, pins=run.store)
        if newer:
            yield f"teacher {teacher.name}: the Hub has a newer version, {newer[:12]}; revision: {newer} takes it"


def verify(run: Run) -> dict[str, Any]:
    """Every file of every record against its digest."""
    damaged, files, size = [], 0, 0
    seen: set[str] = set()
    for _, record in _records(run):
        for file in record.files:
            if file.path in seen:
                continue
            seen.add(file.path)
            files, size = files + 1, size + file.bytes
            fault = run.store.fault(file)
            if fault:
                damaged.append({"path": file.path, "fault": fault})
                run.store.quarantine(run.store.path(file))
    return {"files": files, "bytes": size, "damaged": damaged}


def garbage(run: Run, *, unused: bool) -> list[dict[str, Any]]:
    root = run.store.root
    found = [_item(root, path, size, why) for path, size, why in _leftovers(run)]
    if unused:
        kept = _in_use(run)
        found += [
            _item(root, path, path.stat().st_size, "the last builds do not use it")
            for record_path, record in _records(run)
            for path in [record_path, *(run.store.path(file) for file in record.files)]
            if str(path.relative_to(root)) not in kept and path.exists()
        ]
    return list({row["path"]: row for row in found}.values())


def remove(run: Run, found: list[dict[str, Any]]) -> None:
    """Records go before their files: what is left half-deleted reads as not committed."""
    paths = [run.store.root / row["path"] for row in found]
    for path in sorted(paths, key=lambda path: path.suffix != ".json"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for folder, _, _ in os.walk(run.store.root, topdown=False):
        if folder != str(run.store.root) and not any(Path(folder).iterdir()):
            Path(folder).rmdir()


def _leftovers(run: Run) -> Iterator[tuple[Path, int, str]]:
    """Temporary files of dead processes (a day old), quarantine, and data files that no record names."""
    root = run.store.root
    named = {file.path for _, record in _records(run) for file in record.files}
    now = time.time()
    for path, size in _files(root):
        inside = path.relative_to(root)
        temporary = next((part for part in inside.parts if part.startswith(TEMPORARY)), None)
        if temporary is not None:
            if now - path.stat().st_mtime > OLD_SECONDS:
                yield path, size, "temporary, over a day old"
        elif inside.parts[0] == "quarantine":
            yield path, size, "quarantined"
        elif _is_data(inside) and str(inside) not in named and now - path.stat().st_mtime > OLD_SECONDS:
            yield path, size, "no record names it, over a day old"


def _is_data(inside: Path) -> bool:
    parts = inside.parts
    return len(parts) > 2 and parts[0] not in ROOMS and inside.suffix != ".json" and "checkpoint" not in parts


def _records(run: Run) -> Iterator[tuple[Path, Record]]:
    for path, _ in _files(run.store.root):
        inside = path.relative_to(run.store.root)
        if path.suffix == ".json" and len(inside.parts) > 1 and inside.parts[0] not in ROOMS:
            record = run.store.record(path)
            if record is not None:
                yield path, record


def _in_use(run: Run) -> set[str]:
    """What HEAD's manifests name, and the records that stand for it."""
    from amalgam.stages.token_store import ROOM, is_of

    kept: set[str] = set()
    for stage, entry in run.store.head().items():
        manifest = run.store.manifest(stage, entry["fingerprint"])
        if manifest is not None:
            folder = run.store.folder(stage, entry["fingerprint"]).relative_to(run.store.root)
            kept |= {str(folder / MANIFEST), str(folder / WORK)}
            kept |= {file.path for file in manifest.files}
    texts = _texts_in_use(run)
    for path, record in _records(run):
        if path.relative_to(run.store.root).parts[0] == ROOM and is_of(record, texts):
            kept |= {file.path for file in record.files}
        if any(file.path in kept for file in record.files):
            kept.add(str(path.relative_to(run.store.root)))
    return kept


def _texts_in_use(run: Run) -> set[str]:
    """The digests of the last corpus's files: tokens are kept as long as their texts are there."""
    entry = run.store.head().get("read-corpus")
    manifest = run.store.manifest("read-corpus", entry["fingerprint"]) if entry else None
    return {file.sha256 for file in manifest.files} if manifest else set()


def _files(root: Path) -> Iterator[tuple[Path, int]]:
    for folder, _, names in sorted(os.walk(root)):
        for name in sorted(names):
            path = Path(folder) / name
            try:
                yield path, path.stat().st_size
            except OSError:
                continue


def _item(root: Path, path: Path, size: int, why: str) -> dict[str, Any]:
    return {"path": str(path.relative_to(root)), "bytes": size, "why": why}
