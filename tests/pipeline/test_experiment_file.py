"""The experiment file: every problem at once, with its line, path and fix; hostile files; overrides; secrets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amalgam.pipeline.config.load import MOST_BYTES, LoadedExperiment, load_experiment, template
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.stages.methods import consistency_checks

GOOD = "corpus: {train: a.csv}\nteachers: [{name: a, model: m}]\n"
NAMES = {
    "targets.mode": ("soft", "hard", "uhc", "supervised"),
    "objective.name": ("targets", "layerwise", "dfa", "cfl", "mt-bert", "stratanet", "as-dfd"),
}
PRESETS = {"warm": {"targets": {"temperature": 0.7, "mode": "hard"}}}
CANARY = "hf_CanaryCanaryCanary0"


def _load(folder: Path, text: str | bytes, *overrides: str) -> LoadedExperiment:
    path = folder / "amalgam.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_experiment(path, overrides, presets=PRESETS, names=NAMES, checks=consistency_checks)


def _problems(folder: Path, text: str | bytes, *overrides: str) -> list[str]:
    """Return the problems, one a line, as `place: problem`; of overrides alone, the place is in the first line."""
    with pytest.raises(ExperimentError) as raised:
        _load(folder, text, *overrides)
    first, *problems = raised.value.what.splitlines()
    if raised.value.where == "command line":
        assert first.startswith(f"command line: {len(problems)} ")
        problems = [f"command line, {line.strip()}" for line in problems]
    else:
        assert first.startswith(f"amalgam.yaml: {len(problems)} ")
        assert raised.value.where == str(folder / "amalgam.yaml")
    assert "amalgam schema" in str(raised.value.fix)
    assert raised.value.exit_code == 2
    return [line.removeprefix("  ") for line in problems]


def _by_place(problems: list[str]) -> dict[str, str]:
    by_place: dict[str, str] = {}
    for place, _, problem in (line.partition(": ") for line in problems):
        by_place[place] = f"{by_place.get(place, '')}{problem}; "
    return by_place


MANY = """\
corpus:
  trian: a.csv
  limit: -3
teachers:
- name: ../x
  model: 3
  drpout: 0.1
cache:
  passes: many
  dtype: bf32
targets: {mode: sofd}
studnet: {}
"""


def test_all_problems_come_at_once_with_line_path_and_nearest_key(tmp_path: Path) -> None:
    expected = {
        "line 2, corpus.trian": ["unknown key", "'train'"],
        "line 3, corpus.limit": ["-3"],
        "line 5, teachers.0.name": ["'../x'", "letters"],
        "line 6, teachers.0.model": ['"3"'],
        "line 7, teachers.0.drpout": ["unknown key", "'dropout'"],
        "line 9, cache.passes": ["whole number", "'many'"],
        "line 10, cache.dtype": ["'bf32'", "'auto'", "'fp32'", "'bf16'", "'fp16'", "did you mean 'fp32'"],
        "line 11, targets.mode": ["'sofd'", "'uhc'", "'supervised'", "did you mean 'soft'"],
        "line 12, studnet": ["unknown key", "'student'"],
    }
    problems = _by_place(_problems(tmp_path, MANY))
    assert problems.keys() == expected.keys()
    for place, pieces in expected.items():
        assert [piece for piece in pieces if piece not in problems[place]] == []


def test_training_texts_are_required(tmp_path: Path) -> None:
    for text in ("corpus: {label: y}\n", ""):
        [problem] = _problems(tmp_path, f"{text}teachers: [{{name: a, model: m}}]\n")
        assert "corpus.train: is required" in problem


def test_a_teacher_without_a_name_has_that_of_its_model(tmp_path: Path) -> None:
    def teachers(text: str, *overrides: str) -> list[tuple[str, str]]:
        loaded = _load(tmp_path, f"corpus: {{train: a.csv}}\n{text}", *overrides)
        return [(teacher.name, teacher.model) for teacher in loaded.experiment.teachers]

    assert teachers("teachers: [./models/news, org/news]\n") == [("news", "./models/news"), ("news-2", "org/news")]
    later = "teachers: [{model: ./a}, {model: b, name: a}, {model: c, name: }, {model: .}]\n"
    assert teachers(later) == [("a-2", "./a"), ("a", "b"), ("c", "c"), ("teacher", ".")]
    assert teachers("teachers: [./a, ./b]\n", "teachers.0.model=./c") == [("a", "./c"), ("b", "./b")]
    assert teachers("", "teachers=[./a, org/b]") == [("a", "./a"), ("b", "org/b")]
    with pytest.raises(ExperimentError, match=r"teachers\.0: is a section: write its fields below it"):
        teachers("teachers: [7, ./a]\n")
    with pytest.raises(ExperimentError, match=r"teachers: must be a list: write each teacher as `- {name:"):
        teachers("teachers: {a: ./models/x}\n")
    with pytest.raises(ExperimentError, match=r"teachers\.0\.model: is required"):
        teachers("teachers: [{revision: main}]\n")


def test_labels_of_the_corpus_need_a_column_and_texts_that_are_not_generated(tmp_path: Path) -> None:
    assert _problems(tmp_path, f"{GOOD}labels: corpus\n") == [
        "line 1, corpus.label: labels: corpus needs it: write the name of the label column"
    ]
    text = "corpus: {label: y}\nteachers: [./a]\ngenerate: {language_model: ./lm}\nlabels: corpus\n"
    [problem] = _problems(tmp_path, text)
    assert problem.startswith("line 4, labels: corpus needs gold labels, and generated texts have none")


def test_no_student_has_the_name_of_the_page_of_compared_reports(tmp_path: Path) -> None:
    [problem] = _problems(tmp_path, f"{GOOD}student: {{name: comparison}}\n")
    assert "student.name: reports/comparison is the page of compared reports" in problem


def test_no_student_has_the_name_of_another_system_in_reports(tmp_path: Path) -> None:
    for name in ("ensemble", "zero-shot", "first"):
        text = f"corpus: {{train: a.csv}}\nteachers: [./first, ./second]\nstudent: {{name: {name}}}\n"
        [problem] = _problems(tmp_path, text)
        assert "student.name: another system of the report has this name" in problem


def test_no_teacher_has_the_name_of_another_system_in_reports(tmp_path: Path) -> None:
    corpus = "corpus: {train: a.csv}\n"
    for name in ("ensemble", "zero-shot", "student"):
        [problem] = _problems(tmp_path, f"{corpus}teachers: [{{name: {name}, model: m}}]\n")
        assert problem.startswith(f"line 2, teachers: the name '{name}' is that of another system in reports")
    assert _load(tmp_path, f"{corpus}teachers: [./students/student]\n").experiment.teacher_names == ["student-2"]


def test_fields_that_contradict_each_other_are_all_named_with_their_lines(tmp_path: Path) -> None:
    text = (
        "corpus: {train: a.csv, test: b.csv}\n"
        "teachers: [{name: a, model: m}, {name: a, model: n, trust_remote_code: true}]\n"
        "targets: {passes: 99}\n"
        "cache: {passes: 16}\n"
        "student: {select: validation}\n"
    )
    expected = [
        ("line 2, teachers: ", "'a'"),
        ("line 2, teachers: ", "trust_remote_code"),
        ("line 1, corpus.label: ", "corpus.test"),
        ("line 5, student.select: ", "corpus.validation"),
        ("line 3, targets.passes: ", "cache.passes"),
    ]
    for problem, (place, piece) in zip(_problems(tmp_path, text), expected, strict=True):
        assert problem.startswith(place)
        assert piece in problem


@pytest.mark.parametrize(
    ("more", "place", "piece"),
    [
        ("1: 2", "line 3, 1", "schema_version, corpus"),
        ("targets:", "line 3, targets", "section"),
        ("targets: {temperature: .inf}", "line 3, targets.temperature", "finite"),
        ("targets: {temperature: .nan}", "line 3, targets.temperature", "finite"),
        ("cache: {seed: !!int abc}", "line 3, cache.seed", "'abc'"),
        ("cache: {seed: !!bool x}", "line 3, cache.seed", "'x'"),
        ("cache: {seed: " + "9" * 5_000 + "}", "line 3, cache.seed", "'" + "9" * 40 + "'"),
        ("cache: {seed: 1}\ncache: {seed: 2}", "line 4, cache", "line 3"),
        ("cache: {seed: 1,\n seed: 2}", "line 4, cache.seed", "line 3"),
        ("? [a, b]\n: 2", "line 3", "plain words"),
        ("x: &x {}\ncache: {<<: *x}", "line 4, cache", "plain words"),
        ("schema_version: 99", "line 3, schema_version", "CHANGELOG.md"),
        ("generate: {sauce: steered}", "line 3, generate.sauce", "'source'"),
        ("train_teachers: {encoder: e, groups: {a b: [x]}}", "line 3, train_teachers.groups", "'a b'"),
        ("train_teachers: {encoder: e, groups: {a: [x, y, x]}}", "line 3, train_teachers.groups", "'x' twice"),
        ("student: {method: wram}", "line 3, student.method", "'warm'"),
        ("student: {method: zzz}", "line 3, student.method", "warm"),
    ],
)
def test_a_problem_names_its_line_and_field(tmp_path: Path, more: str, place: str, piece: str) -> None:
    assert piece in _by_place(_problems(tmp_path, f"{GOOD}{more}\n"))[place]


def test_labels_that_yaml_takes_for_something_else_are_to_be_quoted_as_written(tmp_path: Path) -> None:
    text = "corpus: {train: a.csv, label: y, labels: [yes, no, 1, null]}\nteachers: [{name: a, model: m}]\n"
    problems = _by_place(_problems(tmp_path, text))
    quoted = dict(enumerate(['"yes"', '"no"', '"1"', '"null"']))
    assert problems.keys() == {f"line 1, corpus.labels.{index}" for index in quoted}
    assert all(quoted[index] in problems[f"line 1, corpus.labels.{index}"] for index in quoted)
    [override] = _problems(tmp_path, GOOD, "corpus.labels=[yes, b]")
    assert override.startswith("command line, corpus.labels.0: ")
    assert '"yes"' in override


def test_dates_and_the_like_are_the_text_that_was_written(tmp_path: Path) -> None:
    assert _load(tmp_path, GOOD + "student: {name: 2020-01-01}\n").experiment.student.name == "2020-01-01"
    assert _load(tmp_path, GOOD, "student.name=2020-01-01").experiment.student.name == "2020-01-01"


# ---- hostile files


ALIASES = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + level)}: &{chr(98 + level)} [{','.join(['*' + chr(97 + level)] * 10)}]\n" for level in range(8)
)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", ["is it an experiment file?"]),
        ("[1]", ["is it an experiment file?"]),
        ("hello", ["is it an experiment file?"]),
        ("a: [1\nb: 2", ["line 2, column 2: ", "','", "':'"]),
        ("a:\n\t- x", ["line 2, column 1: ", "tab", "spaces"]),
        ("a: 1\n---\nb: 2", ["line 2, column 1: ", "`---`"]),
        ("a:\n  b: 1\n   c: 2", ["line 3, column 5: ", "second colon"]),
        ("a:\n   b: 1\n  c: 2", ["line 3, column 3: ", "indent"]),
        ('a: 1\nb: "./x\nc: 2\nd: 3\n', ["line 2, column 4: ", "close it"]),
        ("a: 1\nb: './x\nc: './y'\n", ["line 3, column 5: ", "check the quotes"]),
        ("a:\n  - b: 1\n  c: 2", ["line 3, column 3: ", "indent"]),
        ("a:\n  b:texts/x.csv\n  c: 2", ["line 2: ", "space", "b:texts/x.csv"]),
        ("text,label\none,law\nb: 2", ["line 3, column 2: ", "second colon"]),
        ("corpus: \0", ["not YAML", "#x0000"]),
        ("[" * 2_000, ["not YAML"]),
        ("a: " + "{a: " * 1_500, ["not YAML"]),
        (ALIASES, ["line 1, ", "aliases", "100,000"]),
        ("a: &a [*a]", ["line 1, ", "aliases", "100,000"]),
        ("a: !!python/object:os.system {}", ["line 1, a: ", "tag:yaml.org,2002:python/object:os.system"]),
        ("a: !!python/object/apply:os.system [x]", ["line 1, a: ", "tag:yaml.org,2002:python/object/apply:os.s"]),
        ("a: !!python/name:os.system x", ["line 1, a: ", "tag:yaml.org,2002:python/name:os.system"]),
        ("a: !mine x", ["line 1, a: ", "!mine"]),
        ("a: !!set {x, y}", ["line 1, a: ", "tag:yaml.org,2002:set"]),
        ("a: !!omap [x: 1]", ["line 1, a: ", "tag:yaml.org,2002:omap"]),
        ("--- !!python/object:os.system\na: 1", ["line 1: ", "tag:yaml.org,2002:python/object:os.system"]),
    ],
)
def test_a_file_that_is_not_plain_yaml_is_refused_in_one_line(tmp_path: Path, text: str, pieces: list[str]) -> None:
    problem = _problems(tmp_path, text)[0]
    assert [piece for piece in pieces if piece not in problem] == []


@pytest.mark.parametrize(
    ("data", "what", "fix"),
    [
        (b"corpus: {train: \xe9}", "byte 16", "UTF-8"),
        (b"#" * (MOST_BYTES + 1), "1,000,000 bytes", "corpus"),
    ],
)
def test_a_file_that_is_not_text_of_a_reasonable_size_is_not_parsed(
    tmp_path: Path, data: bytes, what: str, fix: str
) -> None:
    with pytest.raises(ExperimentError, match=r"amalgam\.yaml") as raised:
        _load(tmp_path, data)
    assert what in raised.value.what
    assert fix in str(raised.value.fix)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"amalgam\.yaml") as raised:
        load_experiment(tmp_path / "amalgam.yaml")
    assert "amalgam init" in str(raised.value.fix)
    assert "-c FILE" in str(raised.value.fix)
    with pytest.raises(ExperimentError, match="folder"):
        load_experiment(tmp_path)


KEYS = st.sampled_from([*ExperimentConfig.model_fields, "train", "name", "model", "mode", "seed", "<<", "1", "~"])
SCALARS = st.sampled_from(
    [
        *("yes", "no", "null", "1", "0.5", ".inf", ".nan", "1e999", "0x1F", "2020-01-01", "2020-99-99", "1:30", "soft"),
        *("!!int x", "!!float x", "!!bool x", "!!null x", "!!timestamp x", "!!binary -", "!!binary aGk=", "!x y"),
        *("a", "*a", "&a b", "''", '"\\ud83d"', "9" * 5_000, "-", "?", "=", "<<"),
    ]
)
FLOW = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: "[" + ", ".join(items) + "]")
        | st.lists(st.tuples(KEYS, inner), max_size=3).map(
            lambda pairs: "{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}"
        )
    ),
    max_leaves=6,
)
SECTIONED = st.lists(st.tuples(KEYS, FLOW), max_size=4).map(
    lambda pairs: "".join(f"{key}: {value}\n" for key, value in pairs)
)
ANYTHING = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def _loads_or_is_refused(folder: Path, text: str | bytes, *overrides: str) -> None:
    try:
        loaded = _load(folder, text, *overrides)
    except ExperimentError as error:
        assert str(error)  # noqa: PT017 - it may load just as well
    else:
        fingerprint(loaded.experiment.model_dump())  # what loads has an identity


@ANYTHING
@given(st.text() | st.binary() | SECTIONED)
def test_any_file_loads_or_is_refused_and_never_anything_else(tmp_path: Path, text: str | bytes) -> None:
    safe = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
    _loads_or_is_refused(tmp_path, safe)


@ANYTHING
@given(SECTIONED)
def test_any_section_next_to_a_good_one_loads_or_is_refused(tmp_path: Path, more: str) -> None:
    _loads_or_is_refused(tmp_path, (GOOD + more).encode("utf-8", "replace"))


@ANYTHING
@given(st.lists(st.text(max_size=20) | st.builds("{}.{}={}".format, KEYS, KEYS, FLOW), max_size=3))
def test_any_override_is_taken_or_refused(tmp_path: Path, overrides: list[str]) -> None:
    _loads_or_is_refused(tmp_path, GOOD, *overrides)


# ---- overrides and presets


def test_overrides_replace_values_of_the_file_and_are_recorded(tmp_path: Path) -> None:
    text = GOOD + "targets: {temperature: 0.3, mode: hard}\n"
    loaded = _load(
        tmp_path, text, "targets.temperature=0.5", "teachers.0.model=n", "cache.dropout=", "corpus.text=[a, b]"
    )
    assert loaded.experiment.targets.temperature == 0.5
    assert loaded.experiment.targets.mode == "hard"
    assert loaded.experiment.teachers[0].model == "n"
    assert loaded.experiment.corpus.text == ["a", "b"]
    assert loaded.overrides == {
        "targets.temperature": 0.5,
        "teachers.0.model": "n",
        "cache.dropout": None,
        "corpus.text": ["a", "b"],
    }
    assert loaded.base == tmp_path


def test_a_section_as_an_override_changes_the_fields_that_it_names(tmp_path: Path) -> None:
    file = f"{GOOD}student: {{encoder: org/own, epochs: 9}}\nexecution: {{ray: {{cpus: 3}}, batch_tokens: 5}}\n"
    sections = ("student={epochs: 2}", "execution={ray: {gpus: 1}}", "cache={passes: 7}", "corpus={}")
    loaded = _load(tmp_path, file, *sections)
    experiment = loaded.experiment
    assert (experiment.student.encoder, experiment.student.epochs) == ("org/own", 2)
    assert (experiment.execution.ray.cpus, experiment.execution.ray.gpus, experiment.execution.batch_tokens) == (
        3,
        1,
        5,
    )
    assert loaded.overrides == {"student.epochs": 2, "execution.ray.gpus": 1, "cache.passes": 7}
    assert any("generate" in problem for problem in _problems(tmp_path, file, "generate={}"))  # it is not left out
    renaming = GOOD.replace("a.csv", "a.csv, rename: {a: b}")
    for value, rename in (("{c: d}", {"c": "d"}), ("{}", {})):  # no section, but the value of a field
        assert _load(tmp_path, renaming, f"corpus.rename={value}").experiment.corpus.rename == rename
    [problem] = _problems(tmp_path, file, "student={epoch: 2}")
    assert "did you mean 'epochs'?" in problem


def test_an_override_of_a_text_that_looks_like_another_value_is_text(tmp_path: Path) -> None:
    prompt = "A news story about {label}: "
    text = "teachers: [{model: m}]\ngenerate: {source: prompted, language_model: lm}\n"
    generate = _load(tmp_path, text, f"generate.prompt={prompt}").experiment.generate
    assert generate is not None
    assert generate.prompt == [prompt]
    assert _load(tmp_path, GOOD, "corpus.rename=a: b").experiment.corpus.rename == {"a": "b"}
    with pytest.raises(ExperimentError, match=r"divided the override of corpus.rename(.|\n)*'corpus.rename=\{a: b\}'"):
        _load(tmp_path, GOOD, "corpus.rename={a:", "b}", "corpus.id=no")
    experiment = _load(tmp_path, GOOD, "student.name=2024", "corpus.id=no").experiment
    assert (experiment.student.name, experiment.corpus.id) == ("2024", "no")
    (problem,) = _problems(tmp_path, text.replace("lm}", "lm, prompt: {a: b}}"))
    assert "must be a list: [a, b]; YAML reads this value as a mapping: quote it" in problem
    wrong = GOOD.replace("a.csv", "a.csv, labels: {0: law, 1: music}, on_bad_row: yes, rename: [a, b]")
    ends = "[a, b], not a mapping", "is true; must be one of 'error' or 'skip'", "must be a mapping: {a: b}"
    assert all(problem.endswith(ends) for problem in _problems(tmp_path, wrong))


@pytest.mark.parametrize(
    ("override", "place", "piece"),
    [
        ("x", "command line, x", "targets.temperature=0.5"),
        ("=1", "command line, =1", "targets.temperature=0.5"),
        ("a..b=1", "command line, a..b=1", "targets.temperature=0.5"),
        ("teachers.5.model=x", "command line, teachers.5.model", "teachers.5"),
        ("teachers.x=1", "command line, teachers.x", "teachers.x"),
        ("corpus.train.name=x", "command line, corpus.train.name", "corpus.train.name"),
        ("targets.zzz.lr=1", "command line, targets.zzz", "mode, uncertainty"),
        ("targets.temprature=1", "command line, targets.temprature", "'temperature'"),
        ("cache.dropout=head", "command line, cache.dropout", "must be a number (given 'head'), or 'last-layer'"),
        ("targets.mode=[", "command line, targets.mode", "'['"),
        ("targets.mode=!!python/object:os.system x", "command line, targets.mode", "'!!python/object:os.system x'"),
        ("targets.mode=" + "[" * 2_000, "command line, targets.mode", "'[[[["),
        ("cache.seed=" + "9" * 5_000, "command line, cache.seed", ""),
        ("teachers." + "9" * 5_000 + ".x=1", "command line, teachers.9999", ""),
        ("teachers.².x=1", "command line, teachers.².x", "teachers.²"),
    ],
)
def test_an_impossible_override_is_refused_by_its_name(tmp_path: Path, override: str, place: str, piece: str) -> None:
    (problem,) = _problems(tmp_path, GOOD, override)
    assert problem.startswith(place)
    assert piece in problem
    assert len(problem) <= 500


def test_a_name_that_an_override_repeats_is_a_problem_of_the_override(tmp_path: Path) -> None:
    text = "teachers: [./models/a, ./models/b]\ncorpus: {train: train.csv}\n"
    (tmp_path / "amalgam.yaml").write_text(text)
    with pytest.raises(ExperimentError) as error:
        load_experiment(tmp_path / "amalgam.yaml", ["teachers.0.name=b"], checks=consistency_checks)
    assert (error.value.what.partition(":")[0], error.value.where) == ("command line", "command line")
    assert "teachers.0.name: the name 'b' is given twice" in error.value.what
    (tmp_path / "amalgam.yaml").write_text(
        text.replace("./models/b", "{model: ./models/b, name: a}, {model: c, name: a}")
    )
    with pytest.raises(ExperimentError, match="line 1, teachers: the name 'a' is given twice"):
        load_experiment(tmp_path / "amalgam.yaml", ["teachers.0.name=c"], checks=consistency_checks)


def test_a_bad_value_names_the_file_or_the_command_line(tmp_path: Path) -> None:
    text = GOOD + "targets: {temperature: 0.3, mode: sofd}\n"
    assert [problem.split(":")[0] for problem in _problems(tmp_path, text, "targets.temperature=abc")] == [
        "line 3, targets.mode",
        "command line, targets.temperature",
    ]


# ---- identity


def test_comments_white_space_and_the_order_of_keys_change_nothing(tmp_path: Path) -> None:
    first = "corpus:\n  train: a.csv\n  limit: 5\nteachers:\n- name: a\n  model: m\n"
    second = "# comment\nteachers: [{model: m,   name: 'a'}] # here\n\n\ncorpus: {limit: 5, train: [a.csv]}\n"
    assert fingerprint(_load(tmp_path, first).experiment.model_dump()) == fingerprint(
        _load(tmp_path, second).experiment.model_dump()
    )


def test_a_default_that_is_written_is_no_change(tmp_path: Path) -> None:
    text = GOOD + "targets: {temperature: 0.20}\ncache: {seed: 0}\nschema_version: 2\n"
    assert _load(tmp_path, text).experiment == _load(tmp_path, GOOD).experiment


def test_the_file_that_init_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "amalgam.yaml"
    path.write_text(template(), "utf-8")
    loaded = load_experiment(path, presets={"amalgam": {}})
    assert [teacher.name for teacher in loaded.experiment.teachers] == ["first", "second"]


# ---- secrets


@pytest.mark.parametrize(
    ("more", "overrides"),
    [
        (f"student: {{encoder: {CANARY}}}", []),
        (f"student: {{encoder: 'package:{CANARY}/x'}}", []),
        (f"student: {{token: {CANARY}}}", []),
        (f"student: {{method: {CANARY}}}", []),
        (f"student: {{name: '{CANARY} '}}", []),
        (f"cache: {{passes: {CANARY}}}", []),
        (f"cache: {{dtype: {CANARY}}}", []),
        (f"{CANARY}: 1", []),
        (f"student: {{encoder: {CANARY}", []),
        (f"student: {{encoder: !{CANARY} x}}", []),
        (f"student: {{encoder: *{CANARY}}}", []),
        (f"train_teachers: {{encoder: e, groups: {{{CANARY}: [a]}}}}", []),
        ("", [f"student.encoder={CANARY}"]),
        ("", [CANARY]),
        ("", [f"student.{CANARY}=1"]),
        ("", [f"teachers.9.model={CANARY}"]),
        ("", [f"corpus.train=[{CANARY}"]),
        ("", [f"corpus.train=https://me:{CANARY}@host/texts.csv"]),
        ("", ["corpus.train=https://me:hf_CanaryPassword@host/texts.csv"]),
    ],
)
def test_a_secret_is_refused_in_every_place_and_never_shown(tmp_path: Path, more: str, overrides: list[str]) -> None:
    with pytest.raises(ExperimentError) as raised:
        _load(tmp_path, f"{GOOD}{more}\n", *overrides)
    assert "anary" not in str(raised.value)
    assert "anary" not in repr(raised.value)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


def test_the_schema_has_every_section_and_describes_every_field() -> None:
    schema: dict[str, Any] = ExperimentConfig.model_json_schema()
    assert set(schema["properties"]) == set(ExperimentConfig.model_fields)
    assert schema["$defs"]["Cache"]["properties"]["passes"]["description"]


# ---- strict types and ranges

REFUSED = {
    "cache.passes": ["yes", "1:30", "010", "'3'", "3.0", "1e1", "[3]", "-1", "10**3"],
    "targets.task_loss": ["1", "0", "'true'", "null"],
    "cache.seed": ["null", "-1", str(2**70), str(2**63), "true", "1.5", "no"],
    "student.learning_rate": ["true", "'fast'", "0", "-1e-3", "2e5", "1e300", ".inf", ".nan", "190:20:30.15"],
    "student.weight_decay": ["off", "1e300", "-0.1"],
    "student.epochs": ["on", "0", str(2**70), "2.5", "'2'"],
    "student.batch_size": ["y:1", "true", str(2**70)],
    "student.max_tokens": ["1e2", str(2**70)],
    "student.clip": ["0", "1e-300", "1e300"],
    "student.name": ["1", "true", "1.5", "null"],
    "targets.temperature": ["1e300", "1e-300", "0", "true"],
    "targets.kd_temperature": ["1e300", "1e-300", "1:30", "yes"],
    "corpus.limit": ["true", "0", "1e4", str(2**70)],
    "corpus.text": ["1", "[text, 1]", "{}", "true"],
    "corpus.rename": ["[]", "{a: 1}", "text"],
    "execution.batch_tokens": ["yes", "0"],
    "execution.ray": ["1", "[]", "yes"],
    "execution.trackers": ["[ledger]", "wandb"],
    "report.calibration_bins": ["1", "true", "1e1"],
    "teachers": ["{}", "first", "[1]", "true"],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values])
def test_a_value_of_another_type_or_out_of_range_is_refused_by_its_name(tmp_path: Path, field: str, value: str) -> None:
    section, _, name = field.partition(".")
    extra = f"{section}: {{{name}: {value}}}" if name else f"{section}: {value}"
    path = tmp_path / "amalgam.yaml"
    path.write_text(f"schema_version: 2\n{'' if section == 'corpus' else 'corpus: {train: x.csv}'}\n{extra}\n")
    with pytest.raises(ExperimentError) as raised:
        load_experiment(path)
    assert name in str(raised.value) or section in str(raised.value)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    ("field", "value", "read"),
    [
        ("student.learning_rate", "1e-3", 0.001),
        ("student.learning_rate", "2E-1", 0.2),
        ("student.learning_rate", "1", 1.0),
        ("student.weight_decay", ".5", 0.5),
        ("targets.temperature", "1.5e-1", 0.15),
        ("cache.passes", "1_0", 10),
        ("cache.seed", str(2**63 - 1), 2**63 - 1),
        ("targets.task_loss", "yes", True),
    ],
)
def test_a_number_is_read_as_it_is_written(tmp_path: Path, field: str, value: str, read: object) -> None:
    path = tmp_path / "amalgam.yaml"
    path.write_text("corpus: {train: x.csv}\n")
    section, _, name = field.partition(".")
    experiment = load_experiment(path, [f"{field}={value}"]).experiment
    assert getattr(getattr(experiment, section), name) == read


def test_every_number_of_the_schema_has_two_bounds() -> None:
    schema = ExperimentConfig.model_json_schema()

    def unbounded(part: Any, path: str) -> Iterator[str]:
        if "$ref" in part:
            part = schema["$defs"][part["$ref"].rpartition("/")[2]]
        if part.get("type") in {"integer", "number"} and "const" not in part:
            bounds = ({"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"})
            if not all(bound & part.keys() for bound in bounds):
                yield path
        inner = {**part.get("properties", {}), **dict(enumerate(part.get("anyOf", ())))}
        inner |= {key: part[key] for key in ("items", "additionalProperties") if isinstance(part.get(key), dict)}
        for key, value in inner.items():
            yield from unbounded(value, f"{path}.{key}")

    assert list(unbounded(schema, "")) == []


def test_the_name_of_another_program_for_a_field_gets_the_field_as_fix(tmp_path: Path) -> None:
    text = "corpus: {train: a.csv, text_column: body}\nteachers: [{name: a, path: m}]\nstudent: {lr: 1e-5}\n"
    with pytest.raises(ExperimentError) as caught:
        _load(tmp_path, text)
    for problem in ("text_column: unknown key; did you mean 'text'", "path: unknown key; did you mean 'model'"):
        assert problem in str(caught.value)
    assert "student.lr: unknown key; did you mean 'learning_rate'?" in str(caught.value)
    for override, field in (("corpus.texts=a.csv", "'train'"), ("texts=a.csv", "corpus.train")):
        with pytest.raises(ExperimentError, match=f"texts: unknown key; did you mean {field}"):
            _load(tmp_path, GOOD, override)
