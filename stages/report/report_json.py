"""Every number of the page, as report.json holds them: what was found, and what stands around it in the workspace."""

from __future__ import annotations

from typing import Any

from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.load import label_space, teachers_of
from amalgam.stages.methods import method_name
from amalgam.stages.report.summary import losses, verdict
from amalgam.stages.report.workspace_facts import asked, others, supervised, sweep, way

Found = dict[str, Any]


FORMAT = 1

LABELS_SHOWN = 8

TEACHERS_SHOWN = 12

NOT_SAID = {"execution", "schema_version"}


def numbers_of(run: Run, evaluation: Found, findings: Found, name: str) -> Found:
    known = list(others(run))
    found: Found = {
        "amalgam_report": FORMAT,
        "name": name,
        "method": method_name(run.experiment),
        "learns": run.experiment.student.learns,
        "fingerprint": run.fingerprint("report"),
        "evaluation": _without_confusion(evaluation),
        "judged": findings.get("judged"),
        "taught": findings.get("taught"),
        "chance": _chance(findings.get("judged")),
        "supervised": supervised(run, known),
        "sweep": sweep(run, known),
        "labels": _labels(run),
        "data": _data(run, findings),
        "way": way(run),
        "asked": asked(run),
        "student": _student(run),
        "libraries": run.result("report").made.get("libraries", {}),
        "test": run.result("report").identity["inputs"].get("test"),
        "settings": run.experiment.model_dump(mode="json", exclude=NOT_SAID),
    }
    found["losses"] = losses(found)
    return found | {"verdict": verdict(found)}


def _without_confusion(evaluation: Found) -> Found:
    """The whole matrices stand in evaluation.json; what the page shows of one is in `judged`."""
    if not evaluation:
        return {}
    large = ("confusion", "label_f1")
    systems = {
        name: {key: value for key, value in one.items() if key not in large}
        for name, one in evaluation["systems"].items()
    }
    kept = {key: evaluation[key] for key in ("n", "left_out", "judged", "selected_by", "adaptive") if key in evaluation}
    return kept | {"labels": len(evaluation["labels"]), "groups": list(evaluation["groups"]), "systems": systems}


def _chance(judged: Found | None) -> float | None:
    """What always saying the most frequent gold label would get."""
    rows = [row["n"] for row in judged["classes"]] if judged else []
    return max(rows) / sum(rows) if sum(rows) else None


def _labels(run: Run) -> Found:
    space = label_space(run)
    owners = space.owners
    alone = {name: sum(theirs == [name] for theirs in owners) for name in space.columns}
    return {
        "n": len(space.names),
        "shared": sum(len(theirs) > 1 for theirs in owners),
        "teachers": [
            {
                "teacher": name,
                "n": len(columns),
                "alone": alone[name],
                "shown": [space.names[place] for place in columns[:LABELS_SHOWN]],
                "content": _content(run, name),
            }
            for name, columns in space.columns.items()
        ],
    }


def _content(run: Run, name: str) -> str:
    return next(teacher.files.digest for teacher in teachers_of(run) if teacher.name == name)


def _data(run: Run, findings: Found) -> Found:
    facts = run.result("read-corpus").facts
    counted = ("rows", "texts", "duplicates", "conflicts", "over_limit", "skipped")
    cut = run.result("cache-teachers").facts["cut"] if "cache-teachers" in run.results else {}
    student = run.result("train-student").facts if "train-student" in run.results else {}
    return {
        "parts": [
            {"part": name, **{key: part[key] for key in counted}, "labels": len(part["labels"])}
            for name, part in facts["parts"].items()
        ],
        "leaks": {part: count for part, (count, _) in facts["leaks"].items()},
        "cut": cut,
        "cut_student": student.get("cut"),
        "scripts": findings.get("scripts", {}),
    }


def _student(run: Run) -> Found | None:
    if "train-student" not in run.results:
        return None
    manifest = run.result("train-student")
    weights = sum(file.bytes for file in manifest.files if file.path.endswith(".safetensors"))
    facts = {key: manifest.facts.get(key) for key in ("steps", "best_step", "best_score", "selected_by", "dtype")}
    return facts | {"bytes": weights, "libraries": manifest.made.get("libraries", {})}
