"""Chooses the next step after a verdict, and writes its command."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from amalgam.pipeline.config.proposals import file_option, written
from amalgam.pipeline.config.schema import Corpus
from amalgam.pipeline.console import counted
from amalgam.stages.common.given_labels import label_column
from amalgam.stages.report.conditions import LEAST_TEXTS, VerdictInputs, untested_teachers
from amalgam.stages.report.publish import TO_LABEL
from amalgam.stages.report.verdict_types import Cause, Decision, Next, Rival
from amalgam.stages.report.verdict_words import listed

TEACHERS_AT_FAULT = {"choice-not-trusted", "teacher-absent", "teacher-loses", "teachers-weak", "teachers-wrong"}
"""Codes of causes after which the teachers need a look."""

LABELS = 100
"""Training texts to label where only labels can improve the choice of teachers."""

MORE_TOKENS = 256
"""Tokens of a text that a student should read, if many texts are truncated."""


def next_step(
    inputs: VerdictInputs, decision: Decision, causes: Sequence[Cause], rivals: Sequence[Rival], needed: int | None
) -> Next:
    codes = {cause["code"] for cause in causes}
    if decision == "ship":
        return _use_student(inputs)
    if decision == "cannot say" and inputs.report["evaluation"] is None:
        return _label_texts(inputs)
    if decision == "cannot say" and "tie" in codes:
        return {"text": "Decide by size and speed: the student is one model."}
    if decision == "cannot say" and not codes & {"few-steps", "teachers-few-steps"}:
        return _label_test_texts(inputs, rivals, needed)
    remedy = _remedy(inputs, codes, rivals)
    others = [rival for rival in rivals if rival["kind"] == "student" and "learned" not in rival]
    better = [rival for rival in others if rival["student_is"] == "worse"]
    if not better or untested_teachers(rivals):  # such texts favour students that follow one teacher
        return remedy
    better.sort(key=lambda rival: (rival["name"] in inputs.remade, rival["mean"]))  # students with a folder first
    steps = [_other_student(inputs, rival["name"]) for rival in better]
    if remedy.get("command", "").startswith("amalgam run "):  # audit and label train no student
        steps.append(remedy)
    return next((step for step in steps if "command" in step), steps[0])


def _use_student(inputs: VerdictInputs) -> Next:
    name, columns = inputs.report["name"], inputs.report["settings"]["corpus"]["text"]
    student = [] if name == "student" else ["--student", f"students/{name}"]
    if len(columns) == 1:
        return _with_command(inputs, "Use the student.", _command(inputs, "predict", "a text", *student))
    options = [part for column in columns for part in ("--text", column)]  # a typed text is no pair
    command = _command(inputs, "predict", "--input", "FILE", *options, *student)
    return {"text": f"Use the student on a file of pairs: `{command}`."}


def _with_command(inputs: VerdictInputs, text: str, command: str) -> Next:
    """Returns a step whose command reads the experiment file, which an experiment from Python has to write first."""
    return {"text": text if inputs.file else f"{text} Call experiment.write() first.", "command": command}


def _label_test_texts(inputs: VerdictInputs, rivals: Sequence[Rival], needed: int | None) -> Next:
    if inputs.learned:
        if inputs.learned.get("generated"):
            return {"text": f"Use labelled real texts as corpus.test, and run `{_again(inputs, 'run')}` again."}
        if inputs.learned.get("validation"):
            return _run(inputs, "Select the checkpoint on held-out training texts.", {"student.select": "held-out"})
        again = f"run `{_again(inputs, 'run')}` again"
        where = "they are rows of `labels`, or training texts that a note of read-corpus names"
        return {"text": f"Remove these texts from corpus.test, and {again}: {where}."}
    again = f"run `{_again(inputs, 'report')}` again"
    untested = untested_teachers(rivals)
    if untested and inputs.n >= LEAST_TEXTS:
        return {"text": f"Add labelled test texts of {listed(untested)}, and {again}."}
    goal = f"about {needed:,}" if needed else f"at least {max(4 * LEAST_TEXTS, 2 * inputs.n):,}"
    return {"text": f"Label more {inputs.random}test texts, {goal} in all, and {again}."}


def _other_student(inputs: VerdictInputs, name: str) -> Next:
    """Returns the way to a better student: its verdict, or the run that trains it again."""
    if name not in inputs.remade:
        text = f"The other student, “{name}”, is better: see its verdict."
        return _with_command(inputs, text, _command(inputs, "report", name))
    if not inputs.remade[name]:
        why = "its texts, labels, models or version are others, and the report cannot name them"
        again = f"Train the better student ({name}) again: its folder has another student now"
        return {"text": f"{again}. Repeat the command that trained it, with an unused student.name: {why}."}
    return _run(inputs, "Train the better student again.", inputs.remade[name])


def _remedy(inputs: VerdictInputs, codes: set[str], rivals: Sequence[Rival]) -> Next:
    """Returns the remedy of the most likely cause; no training adds a teacher that the targets lack."""
    longer = {"student.epochs": "auto"} if "few-steps" in codes and not _is_long(inputs) else {}
    longer |= {"train_teachers.epochs": "auto"} if "teachers-few-steps" in codes else {}
    rate = {"student.learning_rate": "auto"} if "high-rate" in codes else {}
    if (longer or rate) and "teacher-absent" not in codes:
        text = "Train long enough." if longer else "Use the automatic learning rate."
        text = "Train the teachers long enough." if "train_teachers.epochs" in longer else text
        return _run(inputs, text, {**longer, **rate, "student.name": "longer" if longer else "auto-rate"})
    if inputs.report["labels"]["teachers"] and codes & TEACHERS_AT_FAULT:
        return _look_at_teachers(inputs)
    if "wrong-choice" in codes and inputs.report["method"] == "amalgam":
        text = f"Label {LABELS} training texts; they correct the choice of the teacher."
        return _with_command(inputs, text, _again(inputs, "label", "--count", str(LABELS)))
    if "wrong-choice" in codes:
        return _run(inputs, "Use another rule.", {"student.method": "amalgam", "student.name": "amalgam"})
    if "long-texts" in codes and inputs.report["settings"]["student"]["max_tokens"] < MORE_TOKENS:
        return _run(inputs, "Read more of each text.", {"student.max_tokens": MORE_TOKENS, "student.name": "long"})
    return _without_cause(inputs, codes, rivals)


def _without_cause(inputs: VerdictInputs, codes: set[str], rivals: Sequence[Rival]) -> Next:
    """Returns the next step where training as `auto` does is the only remedy, or where it was no remedy."""
    if not _is_long(inputs):
        return _run(inputs, "Train longer.", {"student.epochs": "auto", "student.name": "longer"})
    if any(rival["kind"] == "zero-shot" and rival["student_is"] == "worse" for rival in rivals):
        text = "Use zero-shot: it is better and needs no training."
        return _run(inputs, text, {"student.method": "zero-shot"})
    if "few-texts" in codes:
        return {"text": f"Add training texts: the student learned {counted(inputs.student['texts'], 'text')}."}
    if inputs.report["labels"]["teachers"]:
        return _look_at_teachers(inputs)
    return {"text": "Label more training texts, or choose another student.encoder."}


def _is_long(inputs: VerdictInputs) -> bool:
    """Returns whether the student has at least the automatic number of epochs."""
    return inputs.student["epochs"] >= inputs.automatic.epochs


def _look_at_teachers(inputs: VerdictInputs) -> Next:
    return _with_command(inputs, "Look at the teachers: one may be wrong or not needed.", _again(inputs, "audit"))


def _label_texts(inputs: VerdictInputs) -> Next:
    quality, settings = inputs.report["unlabelled"], inputs.report["settings"]
    count = quality["to_label"] if quality else 0
    if count < LEAST_TEXTS or inputs.generates:  # fewer decide nothing
        texts = "real texts" if inputs.generates else "texts"
        return {"text": f"Label about 200 {texts}, and set corpus.test and corpus.label."}
    file = f"reports/{inputs.report['name']}{TO_LABEL}"
    if settings["labels"] and Path(settings["labels"]) == Path(file):  # it is kept
        return {"text": f"Rename {file}, also in `labels`; the next run then writes other texts to label there."}
    column = label_column(Corpus.model_validate(settings["corpus"]))
    new = {"corpus.test": file, **({} if settings["corpus"]["label"] else {"corpus.label": column})}
    return _run(inputs, f"Label the {counted(count, 'text')} of {file}, then run the command.", new)


# ---- commands, which are entered in the folder of the experiment file


def _run(inputs: VerdictInputs, text: str, new: Mapping[str, object]) -> Next:
    """Returns a step that runs the experiment again, with the overrides of this run and new ones."""
    repeated = {name: value for name, value in inputs.overrides.items() if name not in new}
    name = {"student.name": free_student(str(new["student.name"]), inputs.folders)} if "student.name" in new else {}
    return _with_command(inputs, text, _command(inputs, "run", *written({**repeated, **new, **name})))


def free_student(name: str, taken: Collection[str]) -> str:
    """Returns the name, or with the first number that no folder has: a run would replace the student in its folder."""
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    return next(free for free in itertools.chain([name], numbered) if free not in taken)


def _again(inputs: VerdictInputs, name: str, *arguments: str) -> str:
    """Returns the command for the experiment of this run, which the file alone does not describe."""
    return _command(inputs, name, *arguments, *written(inputs.overrides))


def _command(inputs: VerdictInputs, name: str, *arguments: str) -> str:
    file = Path(inputs.file) if inputs.file else None
    return shlex.join(["amalgam", name, *arguments]) + file_option(file)
