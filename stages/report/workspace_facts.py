"""What stands around a result in its workspace: the stages it came from and their costs, and other students.

Read from manifests and records alone, each time a page is drawn: another student may have come since.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from amalgam.pipeline.execution.runner import TIMING
from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.storage.fingerprint import canonical
from amalgam.pipeline.storage.store import Record
from amalgam.stages.common.answers.families import families_of, family_in

Found = dict[str, Any]


# ---- the way here


def history(run: Run) -> Found:
    """Of this run, kept beside what it found: which stages had work to do, and what the teachers' answers took."""
    return {"ran": sorted(run.executed), "asked": _asked(run) if "cache-teachers" in run.results else []}


def _asked(run: Run) -> list[Found]:
    """By teacher, from the units that this experiment uses, whoever made them."""
    teacher_of = {family: teacher for teacher, family in families_of(run).items()}
    found: dict[str, Found] = {
        teacher: {"teacher": teacher, "seconds": 0.0, "text_passes": 0, "tokens": 0} for teacher in teacher_of.values()
    }
    files = run.result("cache-teachers").files
    standing = {file.path: run.store.root / f"{file.path.rpartition('-')[0]}.json" for file in files}
    records = run.store.records(list(standing.values()), whole=False)
    for file in files:
        record = records.get(standing[file.path])
        facts = record.facts if record else {}
        if record is None or "tokens" not in facts or "seconds" not in record.made:
            continue
        passes = int(facts["last"]) - int(facts["first"]) + int(bool(facts["logits"]))
        row = found[teacher_of[family_in(file.path)]]
        row["seconds"] = round(row["seconds"] + float(record.made["seconds"]), 3)
        row["text_passes"] += int(facts["rows"]) * passes
        row["tokens"] += int(facts["tokens"]) * passes
    return list(found.values())


def way(run: Run) -> list[Found]:
    """Every stage that this result came from, in order: how large, how long, made or reused when it was found."""
    record = run.store.record(run.store.folder("report", run.fingerprint("report")) / "report.json")
    ran = set(record.made.get("ran", ())) if record else set()
    return [
        {
            "stage": stage,
            "fingerprint": fingerprint,
            "what": _what(stage, manifest),
            "bytes": sum(file.bytes for file in manifest.files),
            **_work(run, stage, fingerprint, reused=stage not in ran),
        }
        for stage, (fingerprint, manifest) in run.results.items()
    ]


def asked(run: Run) -> list[Found]:
    record = run.store.record(run.store.folder("report", run.fingerprint("report")) / "report.json")
    return list(record.made.get("asked", ())) if record else []


def _work(run: Run, stage: str, fingerprint: str, *, reused: bool) -> Found:
    record = run.store.record(run.store.folder(stage, fingerprint) / TIMING)
    if record is None:
        return {"seconds": None, "units": None, "found": None, "made": "reused" if reused else "made"}
    seconds, units, there = (record.facts[key] for key in ("seconds", "units", "found"))
    state = "reused" if reused or there == units else "made" if not there else "made in part"
    return {"seconds": seconds, "units": units, "found": there, "made": state}


def _what(stage: str, manifest: Record) -> str:
    facts, config = manifest.facts, manifest.identity.get("config", {})
    said = {
        "generate": lambda: f"{facts['texts']:,} texts, {facts['source']}",
        "read-corpus": lambda: f"texts: {', '.join(_part(*part) for part in facts['parts'].items())}",
        "train-teachers": lambda: f"{len(facts['teachers'])} teachers",
        "cache-teachers": lambda: f"{len(facts['families'])} teachers, {config['cache']['passes']} passes each",
        "cache-features": lambda: f"states of {len(facts['families'])} models",
        "fit-statistics": lambda: f"{len(facts['teachers'])} teachers",
        "weigh-teachers": lambda: f"weights: {config['targets']['teacher_weights']}",
        "build-targets": lambda: f"{facts['summary']['texts']:,} targets over {len(facts['labels'])} labels",
        "make-embeddings": lambda: f"for {len(facts['teachers'])} teachers",
        "train-student": lambda: f"{facts['steps']:,} steps, best at {facts['best_step']:,}",
        "report": lambda: str(facts["method"]),
    }
    return said[stage]() if stage in said else ""


def _part(name: str, facts: Found) -> str:
    return f"{facts['texts']:,} {'for the ' if name == 'teachers' else ''}{name}"


# ---- other students


def others(run: Run) -> Iterator[Found]:
    """Every report of this workspace on the same labelled test texts, ours among them."""
    mine = run.result("report").identity["inputs"].get("test")
    for folder in run.store.folders("report") if mine else []:
        manifest = run.store.manifest("report", folder.name)
        if (
            manifest is None
            or manifest.identity.get("inputs", {}).get("test") != mine
            or run.store.missing_files(manifest)
        ):
            continue
        student, targets = _upstream(run, manifest, "train-student"), None
        if student:
            targets = _upstream(run, student, "build-targets")
        system = manifest.facts.get("judged")
        if system:
            yield {
                "fingerprint": folder.name,
                "method": str(manifest.facts["method"]),
                "student": student.identity if student else {},
                "targets": targets.identity if targets else {},
                **system,
            }


def _upstream(run: Run, manifest: Record, stage: str) -> Record | None:
    name = manifest.identity.get("upstream", {}).get(stage)
    return run.store.manifest(stage, name) if name else None


def supervised(run: Run, known: list[Found]) -> Found | None:
    """The best student that learned from gold labels, of the same encoder."""
    encoder = _encoder(next((one for one in known if one["fingerprint"] == run.fingerprint("report")), None))
    found = [one for one in known if _mode(one) == "supervised" and (encoder is None or _encoder(one) == encoder)]
    best = max(found, key=lambda one: one["accuracy"], default=None)
    return _shown(best) if best else None


def sweep(run: Run, known: list[Found]) -> list[Found]:
    """Students of MUKA's soft targets that differ in nothing but the temperature: ours, or else the largest group."""
    groups: dict[str, list[Found]] = {}
    for one in known:
        if _mode(one) == "soft" and "temperature" in one["targets"]["config"]["targets"]:
            groups.setdefault(_but_temperature(one), []).append(one)
    ours = run.fingerprint("report")
    order = sorted(
        groups.items(), key=lambda item: (all(one["fingerprint"] != ours for one in item[1]), -len(item[1]), item[0])
    )
    group = order[0][1] if order else []
    rows = [
        {"temperature": one["targets"]["config"]["targets"]["temperature"], "ours": one["fingerprint"] == ours}
        | _shown(one)
        for one in group
    ]
    return sorted(rows, key=lambda row: (row["temperature"], row["fingerprint"])) if len(rows) > 1 else []


def _shown(one: Found) -> Found:
    return {key: one[key] for key in ("fingerprint", "method", "n", "accuracy", "macro_f1", "nll_nats", "ece")}


def _mode(one: Found) -> str:
    return str(one["targets"].get("config", {}).get("targets", {}).get("mode", ""))


def _encoder(one: Found | None) -> Any:
    return one["student"].get("inputs", {}).get("encoder") if one else None


def _but_temperature(one: Found) -> str:
    targets, student = one["targets"], {key: value for key, value in one["student"].items() if key != "upstream"}
    said = {key: value for key, value in targets["config"]["targets"].items() if key != "temperature"}
    return canonical([said, targets["inputs"], targets["upstream"], targets["version"], student])
