"""The experiment file: every problem at once, with its line, path and a way out; hostile files; overrides; secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.experiment import ExperimentFile
from amalgam.pipeline.experiment_file import LoadedExperiment, load_experiment
from amalgam.pipeline.fingerprint import fingerprint
from amalgam.pipeline.plain_yaml import MOST_BYTES
from amalgam.pipeline.template import write_template

GOOD = "corpus: {train: a.csv}\nteachers: [{name: a, model: m}]\n"
PRESETS = {"warm": {"targets": {"temperature": 0.7, "mode": "hard"}}}
CANARY = "hf_CanaryCanaryCanary0"


def _load(folder: Path, text: str | bytes, *overrides: str) -> LoadedExperiment:
    path = folder / "amalgam.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_experiment(path, overrides, presets=PRESETS)


def _problems(folder: Path, text: str | bytes, *overrides: str) -> list[str]:
    """The problems, one a line."""
    with pytest.raises(ExperimentError) as raised:
        _load(folder, text, *overrides)
    first, *rest = raised.value.what.splitlines()
    assert first == f"amalgam.yaml: {len(rest)} problem{'s' if len(rest) > 1 else ''}"
    assert raised.value.where == str(folder / "amalgam.yaml")
    assert raised.value.fix == "`amalgam schema` lists every field; `amalgam init` writes a commented file"
    assert raised.value.exit_code == 2
    return [line.removeprefix("  ") for line in rest]


NO_INTEGER = "must be a whole number"
NAME = "use letters, digits, '.', '_' and '-', starting with a letter or digit"
MODES = "'soft', 'hard', 'vanilla-kd', 'uhc', 'scores', 'mt-bert', 'stratanet' or 'supervised'"
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
    assert sorted(_problems(tmp_path, MANY)) == sorted(
        [
            "line 1, corpus.train: is required",
            "line 2, corpus.trian: unknown key; did you mean 'train'?",
            "line 3, corpus.limit: must be greater than 0 (given -3)",
            f"line 5, teachers.0.name: is '../x'; {NAME}",
            'line 6, teachers.0.model: is 3, not text: quote it ("3")',
            "line 7, teachers.0.drpout: unknown key; did you mean 'dropout'?",
            f"line 9, cache.passes: {NO_INTEGER} (given 'many')",
            "line 10, cache.dtype: is 'bf32'; must be one of 'auto', 'fp32', 'bf16' or 'fp16'; did you mean 'fp32'?",
            f"line 11, targets.mode: is 'sofd'; must be one of {MODES}; did you mean 'soft'?",
            "line 12, studnet: unknown key; did you mean 'student'?",
        ]
    )


def test_fields_that_do_not_go_together_are_all_named_where_they_stand(tmp_path: Path) -> None:
    text = (
        "corpus: {train: a.csv, test: b.csv}\n"
        "teachers: [{name: a, model: m}, {name: a, model: n, trust_remote_code: true}]\n"
        "targets: {passes: 99}\n"
        "student: {select: validation}\n"
    )
    assert _problems(tmp_path, text) == [
        "line 2, teachers: the name 'a' is given twice",
        "line 2, teachers: a: trust_remote_code needs revision to be a full commit hash",
        "line 1, corpus.label: corpus.test needs the name of the label column",
        "line 4, student.select: validation needs corpus.validation",
        "line 3, targets.passes: 99 is more than cache.passes, 16",
    ]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("1: 2", "line 3, 1: unknown key; known: schema_version, corpus, "),
        ("targets:", "line 3, targets: is a section: write its fields below it, indented, or leave it out"),
        ("targets: {temperature: .inf}", "line 3, targets.temperature: must be a finite number (given inf)"),
        ("targets: {temperature: .nan}", "line 3, targets.temperature: must be a finite number (given nan)"),
        ("cache: {seed: !!int abc}", "line 3, cache.seed: 'abc' does not read as int"),
        ("cache: {seed: !!bool x}", "line 3, cache.seed: 'x' does not read as bool"),
        ("cache: {seed: " + "9" * 5_000 + "}", "line 3, cache.seed: '" + "9" * 40 + "' does not read as int"),
        ("cache: {seed: 1}\ncache: {seed: 2}", "line 4, cache: given twice (first in line 3)"),
        ("cache: {seed: 1,\n seed: 2}", "line 4, cache.seed: given twice (first in line 3)"),
        ("? [a, b]\n: 2", "line 3: keys must be plain words"),
        ("x: &x {}\ncache: {<<: *x}", "line 4, cache: keys must be plain words"),
        ("schema_version: 2", "line 3, schema_version: this amalgam reads schema_version 1; CHANGELOG.md says what"),
        ("generate: {sauce: steered}", "line 3, generate.sauce: unknown key; did you mean 'source'?"),
        ("train_teachers: {encoder: e, groups: {a b: [x]}}", "line 3, train_teachers.groups: is 'a b'; use letters"),
        ("student: {method: wram}", "line 3, student.method: no method 'wram'; did you mean 'warm'?"),
        ("student: {method: zzz}", "line 3, student.method: no method 'zzz'; known: warm"),
    ],
)
def test_a_problem_names_its_line_and_field(tmp_path: Path, more: str, said: str) -> None:
    assert any(problem.startswith(said) for problem in _problems(tmp_path, f"{GOOD}{more}\n"))


def test_labels_that_yaml_takes_for_something_else_are_to_be_quoted_as_written(tmp_path: Path) -> None:
    text = "corpus: {train: a.csv, label: y, labels: [yes, no, 1, null]}\nteachers: [{name: a, model: m}]\n"
    assert _problems(tmp_path, text) == [
        'line 1, corpus.labels.0: is true, not text: quote it ("yes")',
        'line 1, corpus.labels.1: is false, not text: quote it ("no")',
        'line 1, corpus.labels.2: is 1, not text: quote it ("1")',
        'line 1, corpus.labels.3: is null, not text: quote it ("null")',
    ]
    assert _problems(tmp_path, GOOD, "corpus.labels=[yes, b]") == [
        'command line, corpus.labels.0: is true, not text: quote it ("yes")'
    ]


def test_dates_and_the_like_are_the_text_that_was_written(tmp_path: Path) -> None:
    assert _load(tmp_path, GOOD + "student: {name: 2020-01-01}\n").experiment.student.name == "2020-01-01"
    assert _load(tmp_path, GOOD, "student.name=2020-01-01").experiment.student.name == "2020-01-01"


# ---- hostile files


ALIASES = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + level)}: &{chr(98 + level)} [{','.join(['*' + chr(97 + level)] * 10)}]\n" for level in range(8)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file must be a mapping of sections; is it empty?"),
        ("[1]", "the file must be a mapping of sections; is it empty?"),
        ("hello", "the file must be a mapping of sections; is it empty?"),
        ("a: [1\nb: 2", "line 2, column 2: expected ',' or ']', but got ':'"),
        ("a:\n\t- x", "line 2, column 1: a tab: YAML is indented with spaces"),
        ("a: 1\n---\nb: 2", "line 2, column 1: `---` begins a second document: one file is one experiment"),
        ("a:\n  b: 1\n   c: 2", "line 3, column 5: a second colon in one line: quote the value, or begin a new line"),
        ("a:\n   b: 1\n  c: 2", "line 3, column 3: it does not go on from the lines above: indent it as they are"),
        ("a:\n  - b: 1\n  c: 2", "line 3, column 3: it does not go on from the lines above: indent it as they are"),
        ("a:\n  b:texts/x.csv\n  c: 2", "line 2: a space is missing after the colon: b:texts/x.csv"),
        ("text,label\none,law\nb: 2", "line 3, column 2: a second colon in one line"),
        ("corpus: \0", "not YAML: unacceptable character #x0000"),
        ("[" * 5_000, "not YAML: maximum recursion depth exceeded"),
        ("a: " + "{a: " * 3_000, "not YAML: maximum recursion depth exceeded"),
        (ALIASES, "line 1: aliases: the file expands to more than 100,000 values"),
        ("a: &a [*a]", "line 1: aliases: the file expands to more than 100,000 values"),
        ("a: !!python/object:os.system {}", "line 1, a: the tag tag:yaml.org,2002:python/object:os.system is not"),
        ("a: !!python/object/apply:os.system [x]", "line 1, a: the tag tag:yaml.org,2002:python/object/apply:os.s"),
        ("a: !!python/name:os.system x", "line 1, a: the tag tag:yaml.org,2002:python/name:os.system is not"),
        ("a: !mine x", "line 1, a: the tag !mine is not allowed; write plain values"),
        ("a: !!set {x, y}", "line 1, a: the tag tag:yaml.org,2002:set is not allowed"),
        ("a: !!omap [x: 1]", "line 1, a: the tag tag:yaml.org,2002:omap is not allowed"),
        ("--- !!python/object:os.system\na: 1", "line 1: the tag tag:yaml.org,2002:python/object:os.system is not"),
    ],
)
def test_a_file_that_is_not_plain_yaml_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    assert _problems(tmp_path, text)[0].startswith(said)


@pytest.mark.parametrize(
    ("data", "what", "fix"),
    [
        (b"corpus: {train: \xe9}", "amalgam.yaml is not UTF-8 (byte 16)", "save it as UTF-8"),
        (b"#" * (MOST_BYTES + 1), "amalgam.yaml is larger than 1,000,000 bytes", "texts belong in corpus files"),
    ],
)
def test_a_file_that_is_not_text_of_a_reasonable_size_is_not_parsed(
    tmp_path: Path, data: bytes, what: str, fix: str
) -> None:
    with pytest.raises(ExperimentError) as raised:
        _load(tmp_path, data)
    assert (raised.value.what, raised.value.fix) == (what, fix)


def test_a_file_that_is_not_there_or_is_a_folder_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError) as raised:
        load_experiment(tmp_path / "amalgam.yaml")
    assert raised.value.what == "there is no amalgam.yaml"
    assert raised.value.fix == "`amalgam init` writes one; -c FILE names another"
    with pytest.raises(ExperimentError, match="is a folder, not an experiment file"):
        load_experiment(tmp_path)


KEYS = st.sampled_from([*ExperimentFile.model_fields, "train", "name", "model", "mode", "seed", "<<", "1", "~"])
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
ANYTHING = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


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
def test_any_section_beside_a_good_one_loads_or_is_refused(tmp_path: Path, more: str) -> None:
    _loads_or_is_refused(tmp_path, (GOOD + more).encode("utf-8", "replace"))


@ANYTHING
@given(st.lists(st.text(max_size=20) | st.builds("{}.{}={}".format, KEYS, KEYS, FLOW), max_size=3))
def test_any_override_is_taken_or_refused(tmp_path: Path, overrides: list[str]) -> None:
    _loads_or_is_refused(tmp_path, GOOD, *overrides)


# ---- overrides and presets


def test_overrides_stand_over_the_file_and_are_remembered(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("x", "x: an override looks like targets.temperature=0.5"),
        ("=1", "=1: an override looks like targets.temperature=0.5"),
        ("a..b=1", "a..b=1: an override looks like targets.temperature=0.5"),
        ("teachers.5.model=x", "teachers.5.model: there is no teachers.5 to override"),
        ("teachers.x=1", "teachers.x: there is no teachers.x to override"),
        ("corpus.train.name=x", "corpus.train.name: there is no corpus.train.name to override"),
        ("targets.zzz.lr=1", "command line, targets.zzz: unknown key; known: mode, uncertainty, "),
        ("targets.temprature=1", "command line, targets.temprature: unknown key; did you mean 'temperature'?"),
        ("targets.mode=[", "command line, targets.mode: is '['; must be one of"),
        ("targets.mode=!!python/object:os.system x", "command line, targets.mode: is '!!python/object:os.system x';"),
        ("targets.mode=" + "[" * 5_000, "command line, targets.mode: is '[[[["),
        ("cache.seed=" + "9" * 5_000, "command line, cache.seed: "),
        ("teachers." + "9" * 5_000 + ".x=1", "teachers.9999"),
        ("teachers.².x=1", "teachers.².x: there is no teachers.² to override"),
    ],
)
def test_an_override_that_cannot_be_is_refused_by_its_name(tmp_path: Path, override: str, said: str) -> None:
    (problem,) = _problems(tmp_path, GOOD, override)
    assert problem.startswith(said)
    assert len(problem) <= 500


def test_a_bad_value_is_blamed_on_who_said_it(tmp_path: Path) -> None:
    text = GOOD + "targets: {temperature: 0.3, mode: sofd}\n"
    assert [problem.split(":")[0] for problem in _problems(tmp_path, text, "targets.temperature=abc")] == [
        "line 3, targets.mode",
        "command line, targets.temperature",
    ]


# ---- identity


def test_comments_white_space_and_the_order_of_keys_change_nothing(tmp_path: Path) -> None:
    one = "corpus:\n  train: a.csv\n  limit: 5\nteachers:\n- name: a\n  model: m\n"
    other = "# said\nteachers: [{model: m,   name: 'a'}] # here\n\n\ncorpus: {limit: 5, train: [a.csv]}\n"
    assert fingerprint(_load(tmp_path, one).experiment.model_dump()) == fingerprint(
        _load(tmp_path, other).experiment.model_dump()
    )


def test_a_default_that_is_said_is_no_change(tmp_path: Path) -> None:
    said = GOOD + "targets: {temperature: 0.20}\ncache: {seed: 0}\nschema_version: 1\n"
    assert _load(tmp_path, said).experiment == _load(tmp_path, GOOD).experiment


def test_the_file_that_init_writes_is_read(tmp_path: Path) -> None:
    loaded = load_experiment(write_template(tmp_path), presets={"amalgam": {}})
    assert [teacher.name for teacher in loaded.experiment.teachers] == ["first", "second"]
    with pytest.raises(ExperimentError, match="exists"):
        write_template(tmp_path)


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
def test_a_secret_is_refused_wherever_it_stands_and_never_shown(
    tmp_path: Path, more: str, overrides: list[str]
) -> None:
    with pytest.raises(ExperimentError) as raised:
        _load(tmp_path, f"{GOOD}{more}\n", *overrides)
    assert "anary" not in str(raised.value)
    assert "anary" not in repr(raised.value)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


@pytest.mark.parametrize(
    "secret", ["sk-abcdefghijklmnop0123", "AKIAABCDEFGHIJKLMNOP", "https://user:pw@host/x.csv", CANARY]
)
def test_what_looks_like_a_secret_is_refused_with_the_way_out(tmp_path: Path, secret: str) -> None:
    assert _problems(tmp_path, GOOD, f"student.encoder={secret}") == [
        "command line, student.encoder: looks like a secret (not shown); use `hf auth login` or environment variables"
    ]


def test_what_only_resembles_a_secret_is_taken(tmp_path: Path) -> None:
    for harmless in ("org/hf_model", "hf://datasets/org/name@main", "s3://bucket/a:b/c.csv", "sk-learn"):
        assert _load(tmp_path, GOOD, f"student.encoder={harmless}").experiment.student.encoder == harmless


def test_the_schema_knows_every_section_and_says_what_fields_mean() -> None:
    schema: dict[str, Any] = ExperimentFile.model_json_schema()
    assert set(schema["properties"]) == set(ExperimentFile.model_fields)
    assert schema["$defs"]["Cache"]["properties"]["passes"]["description"].startswith("Monte-Carlo dropout passes")
