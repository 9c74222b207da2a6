"""Stage report: evaluates every system on the test texts, describes the targets, and renders the page.

The evaluation is stored, and the page is rendered from stored results alone. Zero-shot similarities are a unit of their
own, which all methods share.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from amalgam.data.keys import shown_names
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import DamagedError, ExperimentError
from amalgam.pipeline.execution.plan import StageState
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit
from amalgam.pipeline.storage.facts import FactTypes, Made
from amalgam.pipeline.storage.fingerprint import fingerprint, library_versions
from amalgam.pipeline.storage.store import MANIFEST, Record, StoredFile
from amalgam.stages.build_targets.stage import read_targets, target_facts
from amalgam.stages.cache_teachers.stage import pass_sample_size
from amalgam.stages.common import load, load_labels
from amalgam.stages.common.cached import load as cached
from amalgam.stages.common.corpus import LABELS_SHOWN, Part, PartRecordFacts
from amalgam.stages.common.deliveries import REPORTS, STUDENTS, delivered_student, read_metadata
from amalgam.stages.common.given_labels import GivenLabels
from amalgam.stages.common.input_names import ENCODER, INPUT_NAMES, PASSES
from amalgam.stages.common.intervals import interval
from amalgam.stages.methods import method_name
from amalgam.stages.report import verdict_types as types
from amalgam.stages.report.audit import audit_texts, audited_texts
from amalgam.stages.report.evaluation import (
    Picked,
    TeacherInputs,
    evaluate_systems,
    measure_student,
    predict_test,
    without_selected,
    write_similarities,
)
from amalgam.stages.report.html import page
from amalgam.stages.report.json_types import (
    AuditSection,
    Evaluation,
    Findings,
    ReportJson,
    SelectedTexts,
    StudentQuality,
    TeacherCost,
    reported_scores,
)
from amalgam.stages.report.label_estimates import label_occurrences, right_texts
from amalgam.stages.report.labelling import compared_with_linear_map, unlabelled_quality
from amalgam.stages.report.load import (
    ZERO_SHOT,
    audit_inputs,
    compared_experiment,
    estimate_inputs,
    evaluation_inputs,
    labelling_inputs,
    learned_part,
    learned_test_texts,
    loaded_rival,
    loaded_student,
    page_inputs,
    zero_shot_identity,
    zero_shot_unit,
)
from amalgam.stages.report.publish import TO_LABEL, check_page, page_name, place_of, publish, publish_texts
from amalgam.stages.report.quality import paired_counts, right_bits, student_quality, target_quality
from amalgam.stages.report.report_json import MEASURES, report_json, teacher_costs
from amalgam.stages.report.students import damaged_reports, other_students
from amalgam.stages.report.tables import print_evaluation, print_report_estimates, unknown_line
from amalgam.stages.report.verdict import lines
from amalgam.stages.report.verdict_words import evaluation_cautions
from amalgam.stages.report.writing_systems import script_counts
from amalgam.stages.target_methods import TARGET_METHODS, compared_by, target_method

EVALUATION, FINDINGS, TEXTS_TO_LABEL = "evaluation.json", "findings.json", "to-label.csv"


class StudentSpeed(TypedDict):
    texts: int
    seconds: float


class ReportUnitFacts(TypedDict, total=False):
    """The facts of the evaluation, if there are labelled test texts; of the similarities the words of each label."""

    scores: dict[str, float | None]
    right_hex: str | None
    rows: str | None
    learned: types.LearnedTexts
    labels: dict[str, str]


class ReportFacts(ReportUnitFacts):
    method: str
    supervised: bool
    """Whether the student learned gold labels alone."""


class ReportMade(Made):
    executed: NotRequired[list[str]]
    teacher_costs: NotRequired[list[TeacherCost]]
    student: NotRequired[StudentSpeed | None]
    date: NotRequired[str]


class Report(Stage):
    name = "report"
    VERSION = 26  # a catch_all is wrong on own labels by labels; equal probabilities give a teacher's first label
    parallelism = "single"
    unit_label = "evaluations"
    on_lost_record = ("the page has no date and no speeds until the report is made again", "amalgam report --force")
    facts = FactTypes(ReportFacts, ReportUnitFacts, ReportMade)
    input_names = {
        r"adaptive": "predictions of the teachers",
        r"labels(\..+)?": "labels",
        r"method": "student.method",
        r"picked": "test texts that were selected for labelling",
        r"test": "content of corpus.test",
        r"train": "training texts",
        r"unknown": "corpus.unknown",
        r"train\.gold": "gold labels of corpus.train",
        r"train\.columns": "columns of corpus.train",
        r"train\.columns\.(.+)": r"corpus.\1",
        r"train\.compared by": "comparison of the teachers",
        r"train\.compared by\.(.+)": r"targets.\1",
        r"train\.adaptive": "cache.adaptive",
        r"train\.passes": PASSES,
        r"zero-shot": "zero-shot baseline",
        r"zero-shot\.version": "code of the zero-shot baseline",
        r"zero-shot\.encoder": ENCODER,
        r"zero-shot\.max_tokens": "student.max_tokens",
    } | INPUT_NAMES

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:
        answers = ("cache-teachers",) if experiment.teacher_names else ()
        method = target_method(experiment.targets)
        features = ("cache-features",) if method.reads_features else ()
        by_domain = ("cache-features", "fit-statistics") if method.weighs_by_domain else ()
        return (
            "read-corpus",
            "train-teachers",
            *answers,
            *features,
            *by_domain,
            "weigh-teachers",
            "build-targets",
            "train-student",
        )

    def resolve_inputs(self, run: Run) -> None:
        load_labels.check_unknown(run)
        if run.experiment.corpus.test:
            load.encoder_files(run, run.experiment.student, cached.ENCODER)

    def check_output(self, run: Run) -> None:
        check_page(run.base, page_name(run.experiment))

    def identity(self, run: Run) -> Identity:
        test, inputs = load.part_of(run, "test"), dict[str, object]()
        unknown = {"unknown": run.experiment.corpus.unknown} if run.experiment.corpus.unknown else {}
        if test:
            inputs = {"test": test.labels_digest, "zero-shot": zero_shot_identity(run), **unknown}
            selected = {key.hex(): labels for key, labels in load_labels.selected_texts(run).items()}
            inputs |= {"picked": fingerprint(selected)} if selected else {}
        if load.teachers_of(run):
            inputs |= {"families": cached.families_of(run), "dtype": cached.dtype_of(run)}
            if pass_sample_size(run):
                inputs["adaptive"] = run.fingerprint("cache-teachers")
            inputs["knows"] = load.known_labels(run)
        given = load_labels.given_labels(run)
        if given:
            sample = fingerprint(sorted(key.hex() for key in given.sample | given.unknown_sample))
            is_random = load_labels.is_random_sample(run)
            outside = {"outside": given.outside_sample} if given.outside_sample else {}
            inputs["labels"] = {"random": is_random, "empty": given.empty, "sample": sample, **unknown, **outside}
        config: dict[str, object] = {"report": run.experiment.report.model_dump()}
        if not run.experiment.student.learns:
            return Identity({**config, "method": method_name(run.experiment)}, inputs)
        inputs["train"] = _train_identity(run)
        return Identity(config, inputs, {"train-student": run.fingerprint("train-student")})

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        """Returns the units in order: the report reads the zero-shot similarities."""
        test = load.part_of(run, "test")
        return [*([zero_shot_unit(run, test)] if test else []), Unit("report", folder)]

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the number of predicted texts, counted once for each evaluation: test texts, else training texts."""
        test, train = load.part_of(run, "test"), load.part_of(run, "train")
        texts = test.texts if test else min(train.texts, types.MOST_PREDICTED) if train else 1
        return float(texts * (1 if units is None else len(units)))

    def run_unit(self, run: Run, unit: Unit) -> None:
        if unit.name == ZERO_SHOT:
            _write_similarities(run, unit)
            return
        evaluation, findings, to_label, speed = _evaluate(run)
        quality = findings["student_quality"]
        facts: dict[str, object] = {}
        if evaluation and quality:
            scores = reported_scores(evaluation).items()
            facts["scores"] = {name: value for name, value in scores if name in MEASURES}
            facts |= {"right_hex": quality["right_hex"], "rows": quality["rows"]}
            facts |= {"learned": evaluation["learned"]} if "learned" in evaluation else {}
        costs: list[TeacherCost] = []
        if "cache-teachers" in run.results:
            costs = teacher_costs(run.result("cache-teachers"), run.store, cached.families_of(run))
        files = {EVALUATION: evaluation, FINDINGS: findings, TEXTS_TO_LABEL: to_label}
        with run.store.draft(unit.folder, unit.name) as draft:
            for name, content in files.items():
                text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) + "\n"
                if content is not None:
                    (draft.folder / name).write_bytes(text.encode())
            draft.facts = facts
            draft.made = {
                "executed": sorted(run.executed),
                "teacher_costs": costs,
                "student": speed,
                "date": datetime.now(UTC).date().isoformat(),
            }

    def finish(self, run: Run, records: Sequence[Record]) -> dict[str, object]:
        supervised = run.experiment.student.learns and not target_method(run.experiment.targets).reads_teachers
        return {"method": method_name(run.experiment), "supervised": supervised, **records[-1].facts}

    def publish(self, run: Run, manifest: Record) -> None:
        for note in damaged_reports(run.store, run.file_option):
            run.console.note(note)
        evaluation, findings, name = evaluation_if_any(run), _findings(run), page_name(run.experiment)
        if run.rival and findings["student_quality"]:
            _measure_rival(run, run.rival, manifest.identity["inputs"], findings["student_quality"]["rows"])
        numbers = report_json(page_inputs(run), evaluation, findings, name)
        to_label = _file(run, TEXTS_TO_LABEL)
        texts = run.store.verified_path(to_label).read_bytes() if to_label else None
        written = publish_texts(run.base, name + TO_LABEL, texts) if texts is not None else ""
        path = publish(run.base, name, page(numbers), numbers, load.delivery_services(run))
        _print(run, numbers)  # after the page is written: stdout may be closed
        if written:
            run.console.say(written)
        run.console.say(f"report{place_of(run.base)}: {path}")
        if run.rival:
            _compare_labels(run, run.rival)

    def describe(self, manifest: Record) -> str:
        return str(manifest.facts["method"])


# ---- stored results


def evaluation_of(run: Run) -> Evaluation:
    evaluation = evaluation_if_any(run)
    if evaluation is None:
        what = "nothing was evaluated: there are no labelled test texts"
        fix = "set corpus.test, for example texts/test.csv; experiment.run().estimates has estimates"
        raise ExperimentError(what, where="corpus.test", fix=fix)
    return evaluation


def evaluation_if_any(run: Run) -> Evaluation | None:
    file = _file(run, EVALUATION)
    return run.store.content(file, Evaluation) if file else None


def _findings(run: Run) -> Findings:
    file = _file(run, FINDINGS)
    if file is None:
        what, fix = f"the record of the report has no {FINDINGS}", f"run `amalgam report --force{run.options}`"
        raise DamagedError(what, path=MANIFEST, where=run.store.backend.address, fix=fix)
    return run.store.content(file, Findings)


def _file(run: Run, name: str) -> StoredFile | None:
    return next((file for file in run.result("report").files if file.name == name), None)


# ---- the page and the console


def _print(run: Run, numbers: ReportJson) -> None:
    evaluation, quality = numbers["evaluation"], numbers["student_quality"]
    if evaluation:
        print_evaluation(run.console, evaluation)
        if not run.experiment.student.learns:
            run.console.verdict([f"reported method: {evaluation['system']}; no student was trained"])
    else:
        run.console.say("  no labelled test texts (corpus.test): the page describes the targets, not the accuracy")
    _print_estimates(run, numbers)
    if quality and quality["unknown"]:
        run.console.say(f"  {unknown_line(quality['unknown'])}")
    if numbers["date"] is None:
        run.console.note(
            "the record of the report is lost, so the page has no date and no speeds; "
            f"run `amalgam report --force{run.options}`"
        )
    if numbers["verdict"]:
        cautions, page_file = list(evaluation_cautions(evaluation)), f"{REPORTS}/{page_name(run.experiment)}.html"
        run.console.verdict(lines(numbers["verdict"], cautions, place_of(run.base), page_file))


# ---- the evaluation


def _evaluate(run: Run) -> tuple[Evaluation | None, Findings, str | None, StudentSpeed | None]:
    """Returns the evaluation and the student's speed with labelled test texts, else the texts to label as csv."""
    test, train, given = load.part_of(run, "test"), learned_part(run), load_labels.given_labels(run)
    evaluation, to_label, speed = None, None, None
    findings: Findings = {
        "student_quality": None,
        "target_quality": None,
        "unlabelled": None,
        "linear_map": None,
        "scripts": {part.name: script_counts(run.store, part) for part in (train, test) if part},
    }
    if test:
        evaluation, findings["student_quality"], speed = _measured(run, test)
        if train:
            findings["linear_map"] = compared_with_linear_map(labelling_inputs(run, train))
    elif train:
        findings["unlabelled"], findings["linear_map"], to_label = unlabelled_quality(labelling_inputs(run, train))
    if train:
        teachers = audit_inputs(replace(run, experiment=compared_experiment(run.experiment)))
        findings["target_quality"] = target_quality(teachers, train, read_targets(run), target_facts(run))
    if train and given and load_labels.estimation_texts(run):
        findings["label_estimates"] = _label_estimates(run, train, given)
    if train and given:
        findings["unknown_share"] = share_of_unknown(run, given)
    if train and given and given.absent_labels(load.label_space(run)):
        findings["given_labels"] = _label_occurrences(run, train, given)
    return evaluation, findings, to_label, speed


def _measured(run: Run, test: Part) -> tuple[Evaluation, StudentQuality, StudentSpeed | None]:
    """Evaluates every system on the labelled test texts, and describes the reported one."""
    inputs, learns = evaluation_inputs(run, test), run.experiment.student.learns
    all_answers, names = predict_test(inputs), inputs.labels.names
    answers = without_selected(all_answers)
    evaluation = Evaluation(
        n=len(answers.gold),
        left_out=len(answers.outside_selected),
        labels=list(names),
        groups={name: [names[column] for column in columns] for name, columns in inputs.labels.columns.items()},
        systems=evaluate_systems(inputs, answers),
        system=inputs.system,
        selected_by=run.result("train-student").facts["selected_by"] if learns else "no student was trained",
    )
    learned = learned_test_texts(run, test)
    if learned:
        evaluation["learned"] = learned
    quality = student_quality(inputs, all_answers, evaluation["systems"][inputs.system]["confusion"])
    selected = int((all_answers.picked != Picked.RANDOM).sum())
    if selected:
        evaluation["selected"] = SelectedTexts(texts=selected, random=len(all_answers.picked) - selected)
        unused = int((all_answers.picked == Picked.HARD).sum())
        if unused:
            evaluation["selected"]["unused"] = unused
    # All labelled texts were predicted, also selected ones.
    speed = StudentSpeed(texts=len(all_answers.gold), seconds=round(all_answers.seconds, 3)) if learns else None
    return evaluation, quality, speed


def _measure_rival(run: Run, name: str, inputs: Mapping[str, Any], rows: str | None) -> None:
    """Stores the scores of students/`name` on this report's test texts, as a report without a page.

    It only predicts. Nothing happens for another system, for the student of this report, or if the scores exist.
    """
    test, student = load.part_of(run, "test"), delivered_student(run.base, name)
    measured = [run.fingerprint("train-student") if run.experiment.student.learns else None]
    measured += [other.student for other in other_students(run.store, inputs["test"], inputs.get("picked"), rows)]
    if test is None or student is None or student in measured:
        return
    facts = read_metadata(run.base / STUDENTS / name) or {}
    texts = TeacherInputs(store=run.store, labels=load.label_space(run), reader=None)
    bins, selected = run.experiment.report.calibration_bins, load_labels.selected_texts(run)
    right, scores = measure_student(loaded_rival(run, name, facts), texts, test, selected, bins)
    if scores is None:
        return
    training = facts.get("training") or {}
    targets = TARGET_METHODS.get(training.get("settings", {}).get("targets", {}).get("mode"))
    report = {
        "method": training.get("method", "student"),
        "supervised": targets is not None and not targets.reads_teachers,
        "scores": {measure: value for measure, value in scores.items() if measure in MEASURES},
        "right_hex": right_bits(right),
        "rows": rows,
        "units": 0,
    }
    of_texts = {key: inputs[key] for key in ("test", "picked") if key in inputs}
    identity = {"stage": "report", "version": Report.VERSION, "config": {}, "inputs": {**of_texts, "rows": rows}}
    identity["upstream"] = {"train-student": student}
    place = run.store.folder("report", fingerprint(identity)) / MANIFEST
    run.store.commit(place, Record("report", (), report, {"libraries": library_versions()}, identity))
    run.console.say(f"  {STUDENTS}/{name}: measured on the same {counted(len(right), 'test text')}, not trained")


def _compare_labels(run: Run, name: str) -> None:
    """Refuses a comparison with students/`name` if test texts have a label that only that student has.

    A label that it lacks gets a note: after a new name of a label it would be wrong on all texts of this label.
    """
    facts, labels = read_metadata(run.base / STUDENTS / name) or {}, set(load.label_space(run).names)
    test: PartRecordFacts | None = run.result("read-corpus").facts["parts"].get("test")
    if test is None or delivered_student(run.base, name) is None:
        return
    theirs = {label for of_teacher in facts.get("teachers", {}).values() for label in of_teacher}
    lost = {label: texts for label, texts in test["labels"].items() if label in theirs - labels}
    new = {label: texts for label, texts in test["labels"].items() if label in labels - theirs}
    if lost:
        texts = f"{sum(lost.values()):,} of {counted(test['texts'], 'test text')}"
        what = f"this student lacks labels of {STUDENTS}/{name}, which {texts} have: {shown_names(lost, LABELS_SHOWN)}"
        fix = "remove these texts from corpus.test if the labels are withdrawn, else add a teacher that has them"
        raise ExperimentError(what, where="--fail-if-worse-than", fix=fix)
    if new and theirs:
        texts = f"{sum(new.values()):,} of {counted(test['texts'], 'test text')}"
        what = f"{STUDENTS}/{name} lacks labels of {texts}, and is wrong on these: {shown_names(new, LABELS_SHOWN)}"
        run.console.note(f"{what}; if only their names are new, set `rename` of the teacher to the earlier names")


def _label_occurrences(run: Run, train: Part, given: GivenLabels) -> list[types.LabelOccurrence]:
    keys = sorted(given.by_key)[: types.MOST_PREDICTED]
    return label_occurrences(estimate_inputs(run, train, {key: given.by_key[key] for key in keys}))


def _label_estimates(run: Run, train: Part, given: GivenLabels) -> types.LabelEstimates:
    gold = {key: given.by_key[key] for key in load_labels.estimation_texts(run)}
    right = right_texts(estimate_inputs(run, train, gold, loaded_student(run)))
    student, ensemble = right.student, right.ensemble
    compared = None if student is None or ensemble is None else paired_counts(student, ensemble)
    return {
        "n": len(gold),
        "labels": len(given.by_key),
        "empty": given.empty,
        "random": load_labels.is_random_sample(run),
        "weights": target_method(run.experiment.targets).estimates_weights,
        "systems": list(right.systems()),
        "gained": compared and compared["gained"],
        "lost": compared and compared["lost"],
        "left_out": given.outside_sample,
        "sample": len(given.sample),
    }


def share_of_unknown(run: Run, given: GivenLabels) -> types.ShareOfUnknown | None:
    """Returns the share of training texts of no label; None without `corpus.unknown`, which marks such texts.

    It is that of the random labelled texts; None without any.
    """
    unknown = len(given.unknown_sample)
    n = len(given.sample) + unknown
    if not (run.experiment.corpus.unknown and n):
        return None
    low, high = interval(unknown / n, n)
    return {"n": n, "unknown": unknown, "low": low, "high": high}


def _print_estimates(run: Run, numbers: ReportJson) -> None:
    if not print_report_estimates(run.console, numbers) and load_labels.given_labels(run):
        texts = math.ceil(load_labels.LEAST_ESTIMATION / load_labels.ESTIMATION_SHARE)
        least = f"{load_labels.LEAST_ESTIMATION} random labelled texts of {texts:,}"
        run.console.say(f"  the labels estimate no accuracy: an estimate needs at least {least} training texts")


# ---- parts of the identity and the units


def _train_identity(run: Run) -> dict[str, object]:
    """Returns the inputs of the target description, and of the texts to label, that are not inputs of the student."""
    part, corpus = learned_part(run), run.experiment.corpus
    if part is None:
        return {}
    inputs: dict[str, object] = {"gold": part.labels_digest}
    columns = corpus.model_dump(include={"text", "id", "label"}, exclude_defaults=True)
    if columns and not load.part_of(run, "test"):
        inputs["columns"] = columns  # of the file of texts to label
    if load.teachers_of(run):
        targets = compared_by(run.experiment.targets)
        method = target_method(targets)
        fields = {"uncertainty", "temperature"} & method.fields
        # Where stage weigh-teachers weighs, its result has these inputs already.
        inputs["compared by"] = {} if method.estimates_weights else targets.model_dump(include=fields)
        inputs |= {} if method.weighs_by_domain else cached.passes_identity(run)
    return inputs


def _write_similarities(run: Run, unit: Unit) -> None:
    from amalgam.stages.common.inference.states import label_words

    encoder, names = cached.load_encoder(run, "fp32"), load.label_space(run).names
    with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
        buckets = load.tokenized_buckets(run, unit.payload, encoder.classifier, ["key"])
        write_similarities(draft.folder, buckets, encoder, names)
        draft.facts = {"labels": {name: label_words(name) for name in names}}


# ---- the teachers' audit


def audit(run: Run, states: Sequence[StageState]) -> AuditSection:
    """Returns the audit of all training texts; refuses if the cache of the teachers is not up to date."""
    state = next((state for state in states if state.stage == "cache-teachers"), None)
    if state is None:
        raise ExperimentError("this experiment has no teachers to audit", where="teachers", fix="name at least one")
    weighs = any(state.stage == "weigh-teachers" for state in states)
    if state.state != "current":
        needed = "weigh-teachers" if weighs else "cache-teachers"
        what = f"the teachers' predictions are not in the cache ({state.why})"
        fix = f"run `amalgam {needed}{run.options}`, then `amalgam audit{run.options}` again"
        entry = run.store.head().get("cache-teachers")
        last = entry["overrides"] if entry and entry.get("file") == run.file_name else {}
        if last.items() > run.overrides.items():
            options = replace(run, overrides=last).options
            fix = f"run `amalgam audit{options}`, with the overrides of the last cache-teachers, or {fix}"
        fix = fix if run.file else f"experiment.run(until={needed!r}), then experiment.audit()"
        raise ExperimentError(what, where=run.store.where(run.store.root / "cache-teachers"), fix=fix)
    inputs = audit_inputs(run)
    if inputs.read_weights is None and weighs:
        run.console.note("the teacher weights are not built: the audit uses those of MUKA; run weigh-teachers first")
    return audit_texts(inputs, audited_texts(inputs, load.train_part(run).buckets))
