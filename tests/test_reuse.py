"""Stages that rerun after a change, and the number of texts and passes that teachers then run."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.tests.workspaces import (
    PASSES,
    TEACHER_LABELS,
    TEST,
    TOLERANCE,
    TRAIN,
    Workspace,
    build_once,
    largest_difference,
    scale_weights,
    shift_weights,
    up_to_date,
    write_model,
    write_texts,
)

READ, CACHE, TARGETS, STUDENT, REPORT = "read-corpus", "cache-teachers", "build-targets", "train-student", "report"
FEATURES, WEIGH = "cache-features", "weigh-teachers"
NOTHING: set[str] = set()
STUDENT_ON = {STUDENT, REPORT}
TARGETS_ON = {TARGETS, *STUDENT_ON}
CACHE_ON = {CACHE, *TARGETS_ON}
ALL = {READ, *CACHE_ON}
REFUSED = "the command refuses this value, with exit 2"

# field -> (overrides that change it and nothing else, the stages that then run, upstream-caused ones included).
# Stages whose identity waits for one that is not current count: their state is not `current`.
TABLE: dict[str, tuple[list[str], set[str] | str]] = {
    "schema_version": (["schema_version=1"], REFUSED),
    # corpus: read again; later stages wait for its result
    "corpus.train": (["corpus.train=texts/more.csv"], ALL),
    "corpus.validation": (["corpus.validation=texts/validation.csv"], ALL),
    "corpus.test": (["corpus.test=texts/validation.csv"], ALL),
    "corpus.text": (["corpus.text=[text, label]"], ALL),
    "corpus.id": (["corpus.id=text"], ALL),
    "corpus.label": (["corpus.label=text"], ALL),
    "corpus.labels": (["corpus.labels=[banking, law]"], ALL),
    "corpus.rename": (["corpus.rename={banking: money}"], ALL),
    "corpus.unknown": (["corpus.unknown=none"], {REPORT}),
    "corpus.limit": (["corpus.limit=50"], ALL),
    "corpus.on_bad_row": (["corpus.on_bad_row=skip"], ALL),
    "labels": (["labels=texts/labels.csv"], TARGETS_ON),  # with `amalgam`, weigh-teachers too: test_labels.py
    "teachers.name": (["teachers.0.name=other"], CACHE_ON),
    "teachers.model": (["teachers.0.model=./models/third"], CACHE_ON),
    "teachers.revision": (["teachers.0.revision=main"], NOTHING),  # a folder is known by its content
    "teachers.labels": (["teachers.0.labels=[k, l, m, n]"], TARGETS_ON),
    "teachers.rename": (["teachers.0.rename={banking: money}"], TARGETS_ON),
    "teachers.catch_all": (["teachers.0.catch_all=[banking]"], TARGETS_ON),
    "teachers.max_tokens": (["teachers.0.max_tokens=16"], CACHE_ON),
    "teachers.base": (["teachers.0.base=./models/encoder2"], NOTHING),  # weigh-teachers reads it: test_moved_tokens.py
    "teachers.dropout": (["teachers.0.dropout=0.3"], CACHE_ON),
    "teachers.trust_remote_code": (["teachers.0.trust_remote_code=true"], REFUSED),
    "teachers.allow_pickle": (
        ["teachers.0.allow_pickle=true"],
        NOTHING,
    ),  # the digest is the identity
    "cache.passes": (["cache.passes=6"], CACHE_ON),
    "cache.adaptive": (["cache.adaptive=true"], CACHE_ON),
    "cache.seed": (["cache.seed=1"], CACHE_ON),
    "cache.dropout": (["cache.dropout=0.3"], CACHE_ON),  # last-layer: test_last_layer.py
    "cache.max_tokens": (["cache.max_tokens=16"], CACHE_ON),
    "cache.on_long_text": (["cache.on_long_text=error"], CACHE_ON),
    "cache.dtype": (["cache.dtype=bf16"], CACHE_ON),
    "targets.mode": (["targets.mode=hard"], TARGETS_ON),
    "targets.uncertainty": (["targets.uncertainty=energy"], TARGETS_ON),
    "targets.reference_fraction": (
        ["targets.reference_fraction=1"],
        NOTHING,
    ),  # read by rmd, md and msp: test_stratanet.py
    "targets.temperature": (["targets.temperature=0.5"], TARGETS_ON),
    "targets.distribution": (["targets.distribution=mc-mean"], TARGETS_ON),
    "targets.text_weights": (["targets.text_weights=none"], TARGETS_ON),
    "targets.passes": (["targets.passes=2"], TARGETS_ON),
    "targets.kd_temperature": (["targets.kd_temperature=2"], NOTHING),  # vanilla-kd and uhc read it
    "targets.task_loss": (["targets.task_loss=false"], NOTHING),  # mt-bert reads it
    "targets.teacher_weights": (["targets.teacher_weights=standardised"], {WEIGH, *TARGETS_ON}),
    "targets.weight_signal": (["targets.weight_signal=margin"], NOTHING),  # read where weights are not muka
    "targets.neighbours": (["targets.neighbours=3"], NOTHING),
    "student.name": (["student.name=other"], NOTHING),  # only a place
    "student.method": (["student.method=muka-soft"], NOTHING),  # only a preset
    "student.encoder": (["student.encoder=./models/encoder2"], STUDENT_ON),
    "student.revision": (["student.revision=main"], NOTHING),
    "student.layers": (["student.layers=1"], STUDENT_ON),
    "student.dropout": (["student.dropout=0.3"], STUDENT_ON),
    "student.max_tokens": (["student.max_tokens=16"], STUDENT_ON),
    "student.epochs": (["student.epochs=2"], STUDENT_ON),
    "student.learning_rate": (["student.learning_rate=1e-4"], STUDENT_ON),
    "student.batch_size": (["student.batch_size=16"], STUDENT_ON),
    "student.accumulate": (["student.accumulate=2"], NOTHING),  # the same result in less memory
    "student.warmup": (["student.warmup=0.2"], STUDENT_ON),
    "student.weight_decay": (["student.weight_decay=0.1"], STUDENT_ON),
    "student.clip": (["student.clip=2"], STUDENT_ON),
    "student.evaluate_every": (["student.evaluate_every=2"], STUDENT_ON),
    "student.held_out": (["student.held_out=0.2"], STUDENT_ON),
    "student.select": (["student.select=held-out"], NOTHING),  # what `auto` means here
    "student.seed": (["student.seed=1"], STUDENT_ON),
    "objective.name": (["objective.name=dfa"], {FEATURES, *STUDENT_ON}),
    "objective.states": (["objective.states=tokens"], NOTHING),  # read where states are
    "objective.blocks": (["objective.blocks=2"], NOTHING),
    "objective.amalgamation": (["objective.amalgamation=ifa"], NOTHING),  # layerwise reads it
    "objective.adapter": (["objective.adapter=false"], NOTHING),
    "objective.schedule": (["objective.schedule=joint"], NOTHING),
    "objective.learning_rate": (["objective.learning_rate=1e-2"], NOTHING),
    "objective.alpha": (["objective.alpha=0.5"], NOTHING),  # stratanet reads it
    "objective.fusion": (["objective.fusion=no-st"], NOTHING),
    "pseudo_embeddings.count": (["pseudo_embeddings.count=9"], NOTHING),  # as-dfd reads them: test_as_dfd.py
    "pseudo_embeddings.tokens": (["pseudo_embeddings.tokens=9"], NOTHING),
    "pseudo_embeddings.steps": (["pseudo_embeddings.steps=9"], NOTHING),
    "pseudo_embeddings.learning_rate": (["pseudo_embeddings.learning_rate=9"], NOTHING),
    "pseudo_embeddings.adversarial": (["pseudo_embeddings.adversarial=9"], NOTHING),
    "pseudo_embeddings.seed": (["pseudo_embeddings.seed=9"], NOTHING),
    "report.calibration_bins": (["report.calibration_bins=10"], {REPORT}),
    "execution.workspace": (["execution.workspace=elsewhere"], ALL),  # another place, where nothing is yet
    "execution.device": (["execution.device=cpu"], NOTHING),
    "execution.engine": (["execution.engine=ray"], NOTHING),  # nothing to do: no cluster is looked for
    "execution.ray.address": (["execution.ray.address=somewhere:6379"], NOTHING),
    "execution.ray.cpus": (["execution.ray.cpus=2"], NOTHING),
    "execution.ray.gpus": (["execution.ray.gpus=0.5"], NOTHING),
    "execution.processes": (["execution.processes=1"], NOTHING),
    "execution.batch_tokens": (["execution.batch_tokens=512"], NOTHING),
    "execution.training_checkpoint_seconds": (["execution.training_checkpoint_seconds=5"], NOTHING),
    "execution.trackers": (["execution.trackers=[tensorboard]"], NOTHING),
    "execution.on_version_change": (["execution.on_version_change=strict"], ALL),
}
TRAINED = {"train-teachers", *CACHE_ON}
READ_TRAINED = {READ, *TRAINED}
TRAIN_TABLE: dict[str, tuple[list[str], set[str] | str]] = {
    "train_teachers.encoder": (["train_teachers.encoder=./models/encoder2"], TRAINED),
    "train_teachers.revision": (["train_teachers.revision=main"], NOTHING),
    "train_teachers.groups": (["train_teachers.groups=4"], TRAINED),
    "train_teachers.co_train": (
        ["train_teachers={co_train: {one: ./models/encoder}, encoder: null, groups: null}"],
        TRAINED,
    ),
    "train_teachers.texts": (["train_teachers.texts=texts/more.csv"], READ_TRAINED),
    "train_teachers.limit": (["train_teachers.texts=texts/more.csv", "train_teachers.limit=60"], READ_TRAINED),
    "train_teachers.max_tokens": (["train_teachers.max_tokens=16"], TRAINED),
    "train_teachers.epochs": (["train_teachers.epochs=2"], TRAINED),
    "train_teachers.learning_rate": (["train_teachers.learning_rate=1e-4"], TRAINED),
    "train_teachers.batch_size": (["train_teachers.batch_size=16"], TRAINED),
    "train_teachers.warmup": (["train_teachers.warmup=0.2"], TRAINED),
    "train_teachers.weight_decay": (["train_teachers.weight_decay=0.1"], TRAINED),
    "train_teachers.seed": (["train_teachers.seed=1"], TRAINED),
}


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every leaf, dotted; a list of sections is walked like one."""
    for name, field in model.model_fields.items():
        inner = section_in(field.annotation)
        if inner is None:
            yield prefix + name
        else:
            yield from fields_of(inner, f"{prefix}{name}.")


def section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, BaseModel):
        return annotation
    return next((section for arm in get_args(annotation) if (section := section_in(arm)) is not None), None)


@pytest.fixture(scope="module")
def stocked(built: Workspace, shared: Path) -> Workspace:
    """The built experiment, and what the table's values name. Tests only plan with it, so all rows share it."""

    def build(folder: Path) -> Workspace:
        workspace = built.copy(folder)
        stock(workspace)
        return workspace

    return build_once(shared / "stocked", build)


@pytest.fixture(scope="module")
def trained(built: Workspace, shared: Path) -> Workspace:
    def build(folder: Path) -> Workspace:
        workspace = built.without_artifacts(folder)
        stock(workspace)
        workspace.train_teachers("max_tokens: 32")
        return up_to_date(workspace)

    return build_once(shared / "trained", build)


def stock(workspace: Workspace) -> None:
    write_texts(workspace.folder / "texts/more.csv", workspace.texts()[:90])
    write_texts(workspace.folder / "texts/validation.csv", workspace.texts("test")[:20])
    write_texts(workspace.folder / "texts/labels.csv", workspace.texts()[:5])
    for copy, seed in (("third", "first"), ("encoder2", "encoder")):
        shutil.copytree(workspace.folder / "models" / seed, workspace.folder / "models" / copy)
        shift_weights(workspace.folder / "models" / copy, {biased(workspace.folder / "models" / copy): 0.5})


def biased(folder: Path) -> str:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as weights:
        return next(str(name) for name in sorted(weights.keys()) if name.endswith("bias"))


def test_every_field_of_the_experiment_has_a_row() -> None:  # those of generate: test_reuse_generate.py
    assert {name for name in fields_of(ExperimentConfig) if not name.startswith("generate.")} == {*TABLE, *TRAIN_TABLE}


@pytest.mark.parametrize("field", TABLE)
def test_a_field_reruns_the_stages_of_its_row(stocked: Workspace, field: str) -> None:
    check_row(stocked, *TABLE[field])


@pytest.mark.parametrize("field", TRAIN_TABLE)
def test_a_field_of_train_teachers_reruns_the_stages_of_its_row(trained: Workspace, field: str) -> None:
    check_row(trained, *TRAIN_TABLE[field])


def test_a_teacher_with_the_rate_that_auto_chose_is_reused(trained: Workspace) -> None:
    chosen = trained.plan()["train-teachers"]["chosen"]
    assert set(chosen) == {"train_teachers.learning_rate"}
    assert trained.stale(*(f"{field}={value}" for field, value in chosen.items())) == set()


def check_row(workspace: Workspace, overrides: list[str], expected: set[str] | str) -> None:
    assert workspace.stale() == set()
    if expected == REFUSED:
        assert workspace.attempt("plan", *overrides).code == 2
    else:
        planned = workspace.attempt("plan", "--json", *overrides)  # with other labels the gold labels are refused
        assert planned.code in {0, 3}, planned.err
        stages = {stage["stage"]: stage["state"] for stage in planned.json["stages"]}
        assert {name for name, state in stages.items() if state != "current"} == expected


# ---- texts


def test_one_edited_text_alone_is_asked(workspace: Workspace) -> None:
    rows = workspace.texts()
    workspace.write([("the goalkeeper weighed the mortgage", rows[0][1]), *rows[1:]])
    with workspace.counting() as asked:
        workspace("run")
    assert (asked[0].logits, asked[0].passes) == (2, 2 * PASSES)


def test_appended_texts_alone_are_asked(workspace: Workspace) -> None:
    new = [(f"the banker and the nurse discussed the garden {index}", "law") for index in range(7)]
    workspace.write([*workspace.texts(), *new])
    with workspace.counting() as asked:
        workspace("run")
    assert (asked[0].logits, asked[0].passes) == (2 * 7, 2 * 7 * PASSES)
    assert len(workspace.targets()) == TRAIN + 7


def test_appended_texts_give_the_targets_of_a_fresh_run(workspace: Workspace, tmp_path: Path) -> None:
    workspace.write([*workspace.texts(), ("the banker and the nurse discussed the garden", "law")])
    workspace("build-targets")
    other = workspace.without_artifacts(tmp_path / "other")
    other("build-targets")
    assert largest_difference(workspace.targets(), other.targets()) < TOLERANCE


FIRST, SECOND = (f"  - name: {name}\n    model: ./models/{name}\n" for name in ("first", "second"))


@pytest.mark.parametrize(
    "settings",
    [
        ("student.method=amalgam",),
        ("student.method=amalgam", "targets.weight_signal=margin"),
        ("student.method=muka-soft", "targets.teacher_weights=standardised"),
        ("student.method=stratanet",),
    ],
    ids="-".join,
)
def test_teachers_in_another_order_give_the_targets_of_a_fresh_run(
    fresh: Workspace, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    fresh.edit("targets:\n  mode: soft\n", "")
    for name, factor in (("first", 2.0), ("second", 6.0)):  # unlike teachers
        scale_weights(fresh.folder / "models" / name, "classifier.weight", factor)
    fresh("build-targets", *settings)
    fresh.edit(FIRST + SECOND, SECOND + FIRST)
    fresh("build-targets", *settings)
    other = fresh.without_artifacts(tmp_path / "other")
    other("build-targets", *settings)
    assert largest_difference(fresh.targets(), other.targets()) < TOLERANCE


@pytest.mark.parametrize("how", ["reordered", "duplicated", "renamed", "in a folder", "as parquet", "as jsonl"])
def test_the_same_texts_otherwise_written_rerun_nothing_but_the_reading(workspace: Workspace, how: str) -> None:
    rows = workspace.texts()
    if how == "reordered":
        workspace.write(rows[::-1])
    elif how == "duplicated":
        workspace.write([*rows, *rows[:30]])
    elif how == "renamed":
        (workspace.folder / "texts/train.csv").rename(workspace.folder / "texts/other.csv")
        workspace.edit("texts/train.csv", "texts/other.csv")
        assert workspace.stale() == set()
    elif how == "in a folder":
        (workspace.folder / "texts/train").mkdir()
        for name, part in (("one", rows[:50]), ("two", rows[50:])):
            write_texts(workspace.folder / f"texts/train/{name}.csv", part)
        workspace.edit("texts/train.csv", "texts/train")
    else:
        workspace.write(rows, suffix=how.removeprefix("as "))
        workspace.edit("texts/train.csv", f"texts/train.{how.removeprefix('as ')}")
    with workspace.counting() as asked:
        result = workspace("run")
    assert asked[0].units == 0
    assert {f"{stage}: reused" for stage in CACHE_ON} <= set(result.err.splitlines())


def test_equal_bytes_with_another_separator_are_other_texts(workspace: Workspace) -> None:
    for suffix, texts in ((".csv", 1), (".tsv", 2)):
        path = workspace.folder / f"texts/one-column{suffix}"
        path.write_text("text\nthe vet fed the cow\nrain, wind and sun\n")
        result = workspace("read-corpus", f"corpus.train={path}", "corpus.on_bad_row=skip")
        assert re.search(rf"train: {texts} texts?\b", result.err)


def test_a_second_corpus_reuses_the_texts_it_shares(workspace: Workspace) -> None:
    rows = workspace.texts()
    write_texts(workspace.folder / "texts/second.csv", [*rows[:100], ("the vet fed the tractor", "law")])
    with workspace.counting() as asked:
        workspace("run", "corpus.train=texts/second.csv")
    assert (asked[0].logits, asked[0].passes) == (2, 2 * PASSES)
    with workspace.counting() as asked:
        workspace("run")
    assert asked[0].units == 0


def test_a_text_of_the_test_part_that_moves_to_train_is_asked_its_passes_alone(workspace: Workspace) -> None:
    workspace.write([*workspace.texts(), *workspace.texts("test")[:5]])
    with workspace.counting() as asked:
        workspace("run")
    assert (asked[0].logits, asked[0].passes) == (0, 2 * 5 * PASSES)


def test_without_texts_to_ask_a_teacher_no_library_of_models_is_imported(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.write(workspace.texts()[:-5])
    for module in ("cache_teachers.ask", "cache_teachers.from_file", "common.inference.teacher"):
        monkeypatch.setitem(sys.modules, f"amalgam.stages.{module}", None)  # its import fails
    workspace("cache-teachers")


# ---- passes


def test_more_passes_cost_the_difference_and_fewer_cost_nothing(workspace: Workspace) -> None:
    first = {path.name: path.read_bytes() for path in (workspace.artifacts / "build-targets").glob("*/units/*.parquet")}
    with workspace.counting() as asked:
        workspace("run", "cache.passes=6")
    assert (asked[0].logits, asked[0].passes) == (0, 2 * TRAIN * (6 - PASSES))
    six = workspace.targets()
    with workspace.counting() as asked:
        workspace("run", "cache.passes=6")
    assert asked[0].units == 0
    with workspace.counting() as asked:
        workspace("run")
    assert asked[0].units == 0
    workspace("build-targets", "--force")
    again = {path.name: path.read_bytes() for path in (workspace.artifacts / "build-targets").glob("*/units/*.parquet")}
    assert first.items() <= again.items()
    assert largest_difference(workspace.targets(), six) > 10 * TOLERANCE


def test_six_passes_by_steps_equal_six_at_once(workspace: Workspace, tmp_path: Path) -> None:
    workspace("build-targets", "cache.passes=6")
    other = workspace.without_artifacts(tmp_path / "other")
    other("build-targets", "cache.passes=6")
    assert largest_difference(workspace.targets(), other.targets()) < TOLERANCE


def test_four_of_six_cached_passes_are_the_first_four(fresh: Workspace, built: Workspace) -> None:
    fresh("build-targets", "cache.passes=6")
    with fresh.counting() as asked:
        fresh("build-targets", "cache.passes=4")
    assert asked[0].units == 0
    assert largest_difference(fresh.targets(), built.targets()) < TOLERANCE


# ---- teachers


def test_weights_replaced_in_place_rerun_that_teacher_alone(workspace: Workspace) -> None:
    shift_weights(workspace.folder / "models/first", {"classifier.bias": 0.25})
    stage = workspace.plan()[CACHE]
    assert stage["reason"] == "input"
    assert stage["detail"].startswith("model files of teacher first: ")
    with workspace.counting() as asked:
        workspace("run")
    assert (asked[0].logits, asked[0].passes) == (TRAIN + TEST, TRAIN * PASSES)


def test_a_changed_tokenizer_reruns_that_teacher_alone(workspace: Workspace) -> None:
    path = workspace.folder / "models/second/tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["normalizer"] = None
    path.write_text(json.dumps(tokenizer))
    with workspace.counting() as asked:
        workspace("run")
    assert (asked[0].logits, asked[0].passes) == (TRAIN + TEST, TRAIN * PASSES)


def test_a_new_teacher_costs_one_teacher(workspace: Workspace) -> None:
    words = ["the", "a", "onion", "court"]
    write_model(workspace.folder / "models/third", labels=["sailing", "law"], words=words, seed=5)
    workspace.edit("cache:\n", "  - name: third\n    model: ./models/third\ncache:\n")
    with workspace.counting() as asked:
        workspace("run")
    assert (asked[0].logits, asked[0].passes) == (TRAIN + TEST, TRAIN * PASSES)
    target, _ = next(iter(workspace.targets().values()))
    assert len(target) == len(TEACHER_LABELS["first"]) + len(TEACHER_LABELS["second"]) + 1


def test_renaming_a_label_costs_no_pass(workspace: Workspace) -> None:
    with workspace.counting() as asked:
        workspace("build-targets", "teachers.0.rename={banking: money}", "corpus.on_bad_row=skip")
    assert asked[0].units == 0
    assert "money" in workspace.manifest(TARGETS)["facts"]["labels"]


def test_a_moved_model_folder_and_a_renamed_teacher_cost_no_pass(workspace: Workspace) -> None:
    (workspace.folder / "models/first").rename(workspace.folder / "models/moved")
    workspace.edit("./models/first", "./models/moved")
    assert workspace.stale() == set()
    workspace.edit("name: first", "name: premier")
    with workspace.counting() as asked:
        workspace("run")
    assert asked[0].units == 0


# ---- the file


# ---- generate


WRITTEN = {"generate", *ALL}
GENERATE_TABLE: dict[str, tuple[list[str], set[str] | str]] = {
    "generate.source": (["generate.source=prompted"], WRITTEN),
    "generate.texts": (["generate.texts=20"], WRITTEN),
    "generate.language_model": (["generate.language_model=./models/lm2"], WRITTEN),
    "generate.revision": (["generate.revision=main"], NOTHING),
    "generate.prompt": (["generate.prompt=the"], WRITTEN),
    "generate.steering_strength": (["generate.steering_strength=2"], WRITTEN),
    "generate.candidates": (["generate.candidates=20"], WRITTEN),
    "generate.temperature": (["generate.temperature=[0.7, 1.3]"], WRITTEN),
    "generate.top_k": (["generate.top_k=5"], WRITTEN),
    "generate.top_p": (["generate.top_p=0.5"], WRITTEN),
    "generate.max_tokens": (["generate.max_tokens=9"], WRITTEN),
    "generate.max_scored": (["generate.max_scored=4"], WRITTEN),
    "generate.seed": (["generate.seed=1"], WRITTEN),
    "generate.corpus": (["generate.corpus=texts/test.csv"], REFUSED),  # of cross-domain alone
    "generate.column": (["generate.column=label"], NOTHING),
    # filters and the held-out part: existing texts are read again
    "generate.held_out": (["generate.held_out=0.2"], ALL),
    "generate.min_class_probability": (["generate.min_class_probability=0.2"], ALL),
    "generate.max_duplicate": (["generate.max_duplicate=0.5"], ALL),
    "generate.max_repetition": (["generate.max_repetition=0.4"], ALL),
    "generate.min_words": (["generate.min_words=4"], ALL),
}


@pytest.fixture(scope="module")
def generating(generated: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Tests only plan with it, so all rows share it."""
    workspace = generated.copy(tmp_path_factory.mktemp("generated") / "workspace")
    shutil.copytree(workspace.folder / "models/lm", workspace.folder / "models/lm2")
    shift_weights(workspace.folder / "models/lm2", {biased(workspace.folder / "models/lm2"): 0.5})
    return workspace


def test_every_field_of_generate_has_a_row() -> None:
    assert {field for field in fields_of(ExperimentConfig) if field.startswith("generate.")} == set(GENERATE_TABLE)


@pytest.mark.parametrize("field", GENERATE_TABLE)
def test_a_field_of_generate_reruns_the_stages_of_its_row(generating: Workspace, field: str) -> None:
    check_row(generating, *GENERATE_TABLE[field])
