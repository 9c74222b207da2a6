"""Resolves the inputs of the report's parts from the run: evaluation, estimates, audit and page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from amalgam.data.lazy import pa, pc, pl
from amalgam.data.parquet import key_array
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.stage import Run, Unit, once
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.stages.build_targets.stage import read_targets, target_facts, unset_targets
from amalgam.stages.cache_teachers.sample import PassAudit
from amalgam.stages.common import load, load_labels
from amalgam.stages.common.cached import load as cached
from amalgam.stages.common.cached.read import CacheReader
from amalgam.stages.common.corpus import CorpusFacts, Part, corpus_for, tables
from amalgam.stages.common.deliveries import STUDENTS, check_delivered, delivered_students
from amalgam.stages.common.given_labels import GivenLabels
from amalgam.stages.common.models.resolve import read_model
from amalgam.stages.fit_statistics.stage import with_domain_confidence
from amalgam.stages.methods import method_name
from amalgam.stages.objective_inputs import reads_texts
from amalgam.stages.read_corpus.stage import train_needs_label
from amalgam.stages.report.audit import AuditInputs
from amalgam.stages.report.conditions import MOST_LEARNED
from amalgam.stages.report.evaluation import EvaluationInputs
from amalgam.stages.report.label_estimates import EstimateInputs
from amalgam.stages.report.labelling import LabellingInputs
from amalgam.stages.report.report_json import ReportInputs, generates
from amalgam.stages.report.verdict_types import LearnedTexts
from amalgam.stages.target_methods import (
    COMPARATIVE,
    TeacherPredictions,
    compared_by,
    gives_label_distributions,
    target_method,
)
from amalgam.stages.train_student.stage import automatic_schedule, held_out_share, student_folder, validation_part
from amalgam.stages.train_teachers.stage import learned_by_teachers
from amalgam.stages.weigh_teachers.stage import weights_of

if TYPE_CHECKING:
    from amalgam.stages.common.inference.batches import Classifier

ZERO_SHOT, ZERO_SHOT_VERSION = "zero-shot", 1


def learned_part(run: Run) -> Part | None:
    """Returns None if the student learns from no texts."""
    learns = run.experiment.student.learns and reads_texts(run.experiment)
    return load.part_of(run, "train") if learns else None


def learned_test_texts(run: Run, test: Part) -> LearnedTexts | None:
    """Returns the test texts that training also used; those of `labels` are learned with their gold labels."""
    facts: CorpusFacts = run.result("read-corpus").facts
    shared: dict[str, int] = {leak["other"]: leak["texts"] for leak in facts["leaks"] if leak["part"] == "test"}
    if not run.experiment.student.learns or validation_part(run) is None:
        shared.pop("validation", None)
    if not shared:
        return None
    labelled, selecting, of = _learned_with_labels(run, test, shared), shared.get("validation", 0), test.texts
    if generates(run.experiment) and shared.get("train", 0) >= max(labelled, selecting, 1):
        return {"texts": shared["train"], "of": of, "labelled": False, "generated": True}
    if selecting > labelled and (len(shared) == 1 or selecting > MOST_LEARNED * of):
        return {"texts": selecting, "of": of, "labelled": True, "validation": True}
    return {"texts": labelled or shared["train"], "of": of, "labelled": bool(labelled)}


def _learned_with_labels(run: Run, test: Part, shared: Mapping[str, int]) -> int:
    """Returns how many test texts are learned with gold labels; `shared` has the texts in each other part."""
    given, needs_label = load_labels.given_labels(run), train_needs_label(run.experiment)
    parts = shared.keys() & ({"teachers", "train"} if needs_label else {"teachers"})
    if given is None and len(parts) < 2:
        return sum(shared[name] for name in parts)
    keys = pa.concat_tables(tables(run.store, test, ["key"])).column("key").combine_chunks()
    texts = {key for key in keys.to_pylist() if given and key in given.by_key}
    for part in filter(None, (load.part_of(run, name) for name in parts)):
        for table in tables(run.store, part, ["key"]):
            texts.update(table.filter(pc.is_in(table.column("key"), value_set=keys)).column("key").to_pylist())
    return len(texts)


@once
def loaded_student(run: Run) -> Classifier:
    return load.load_student(run, student_folder(run), load.label_space(run).names, where="the student")


def loaded_rival(run: Run, name: str, facts: Mapping[str, Any]) -> Classifier:
    """Loads the finished student students/`name`, whose mark has these facts, with the labels of its own."""
    from amalgam.stages.common.inference.batches import Classifier

    folder, columns, limit = run.base / STUDENTS / name, facts.get("text"), facts.get("max_tokens")
    check_delivered(folder, run.file_option)
    if isinstance(columns, list) and len(columns) != len(corpus_for(run.experiment, "test").text):
        what = f"{STUDENTS}/{name} was trained on {'pairs of texts' if len(columns) > 1 else 'single texts'}"
        fix = "set corpus.text to the columns of such texts, or name another rival"
        raise ExperimentError(f"{what}, and the test texts are others", where="--fail-if-worse-than", fix=fix)
    files, device = read_model(folder, f"the student {name}"), run.experiment.execution.device
    return Classifier(files, device=device, max_tokens=limit if isinstance(limit, int) else None)


def teacher_reader(run: Run) -> CacheReader | None:
    """Returns the reader of the teachers' cached predictions; None without teachers."""
    return cached.cache_reader(run) if load.label_space(run).columns else None


def zero_shot_identity(run: Run) -> dict[str, object]:
    """Identifies the student's encoder before training, with all layers: `student.layers` is not part of it."""
    student = run.experiment.student
    digest = load.encoder_digest(run, student, cached.ENCODER)
    return {"encoder": digest, "max_tokens": student.max_tokens, "version": ZERO_SHOT_VERSION}


def zero_shot_unit(run: Run, test: Part) -> Unit:
    name = fingerprint([zero_shot_identity(run), test.texts_digest, list(load.label_space(run).names)])
    return Unit(ZERO_SHOT, run.store.folder("report", f"{ZERO_SHOT}-{name}"), payload=test)


def evaluation_inputs(run: Run, test: Part) -> EvaluationInputs:
    learns, system = run.experiment.student.learns, method_name(run.experiment)
    similarities = run.store.record(zero_shot_unit(run, test).record_path)
    if similarities is None:
        raise AssertionError("the zero-shot unit is complete before the report")
    return EvaluationInputs(
        store=run.store,
        test=test,
        labels=load.label_space(run),
        reader=teacher_reader(run),
        similarities=run.store.verified_path(similarities.files[0]),
        system=f"student ({system})" if learns else system,
        student=loaded_student(run) if learns else None,
        calibration_bins=run.experiment.report.calibration_bins,
        unknown_label=run.experiment.corpus.unknown,
        selected=load_labels.selected_texts(run),
    )


def estimate_inputs(
    run: Run, train: Part, gold: Mapping[bytes, str], student: Classifier | None = None
) -> EstimateInputs:
    """Returns the inputs of the estimates on the texts with these gold labels by key."""
    return EstimateInputs(
        store=run.store,
        train=train,
        labels=load.label_space(run),
        gold=gold,
        reader=teacher_reader(run),
        targets=partial(unset_targets, run),
        student=student,
    )


def labelling_inputs(run: Run, train: Part) -> LabellingInputs:
    weighed = "weigh-teachers" in run.results
    has_features = target_method(run.experiment.targets).reads_features
    accuracy = run.result("weigh-teachers").facts.get("accuracy") if weighed else None
    return LabellingInputs(
        store=run.store,
        train=train,
        labels=load.label_space(run),
        student=loaded_student(run),
        reader=teacher_reader(run),
        targets=read_targets(run) if gives_label_distributions(target_facts(run)["objective"]) else None,
        held_out=held_out_share(run),
        corpus=run.experiment.corpus,
        given=load_labels.given_labels(run) or GivenLabels({}),
        read_weights=partial(weights_of, run) if accuracy else None,
        accuracy=accuracy,
        read_features=partial(cached.features_of, run) if has_features else None,
    )


def compared_experiment(experiment: ExperimentConfig) -> ExperimentConfig:
    """Returns the experiment by which the page compares teachers; it reads no passes that the student's own lacks."""
    cache = experiment.cache.model_copy(update={"passes": cached.passes_of(experiment)})
    return experiment.model_copy(update={"targets": compared_by(experiment.targets), "cache": cache})


def audit_inputs(run: Run) -> AuditInputs:
    labels, targets = load.label_space(run), run.experiment.targets
    by_domain = target_method(targets).weighs_by_domain and {"fit-statistics", "cache-features"} <= run.results.keys()
    reader = teacher_reader(run)

    def read_predictions(prefixes: Sequence[str], keys: Any) -> Sequence[TeacherPredictions]:
        column = pl.Series("key", keys, pl.Binary)
        predictions = [reader.predictions(name, prefixes, column) for name in labels.columns] if reader else []
        return with_domain_confidence(run, predictions, prefixes, key_array(keys)) if by_domain else predictions

    given = load_labels.given_labels(run)

    def are_learned(prefixes: Sequence[str], keys: Any) -> Any:
        learned = learned_by_teachers(run, prefixes, key_array(keys))
        return learned | [key in given.by_key for key in keys.to_pylist()] if given else learned

    return AuditInputs(
        labels=labels,
        models={teacher.name: teacher.files for teacher in load.teachers_of(run)},
        targets=targets,
        read_weights=partial(weights_of, run) if "weigh-teachers" in run.results else None,
        uncertainty="entropy" if targets.uncertainty in COMPARATIVE and not by_domain else targets.uncertainty,
        store=run.store,
        read_predictions=read_predictions,
        are_learned=are_learned,
        passes=_effect_of_passes(run),
    )


def _effect_of_passes(run: Run) -> PassAudit | None:
    """Returns the comparison of one pass with many; None with a catch_all, which it does not regard."""
    if not load.teachers_of(run) or run.experiment.has_catch_all:
        return None
    return run.result("cache-teachers").facts.get("audit")


def page_inputs(run: Run) -> ReportInputs:
    return ReportInputs(
        settings=run.experiment,
        store=run.store,
        results=run.results,
        descriptions=run.descriptions,
        labels=load.label_space(run),
        teachers={teacher.name: teacher.files for teacher in load.teachers_of(run)},
        student=run.base / STUDENTS / run.experiment.student.name,
        notes=run.notes,
        needs=run.needs,
        names=delivered_students(run.base),
        automatic=automatic_schedule(run) if run.experiment.student.learns else None,
        file=run.file.path.name if run.file else "",
        overrides=run.overrides,
    )
