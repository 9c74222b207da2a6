"""The defaults that a method sets, below values of the file and the command line."""

from __future__ import annotations

from pathlib import Path

from amalgam.pipeline.config.load import ON_GENERATED, load_experiment
from amalgam.pipeline.config.schema import Targets

TEACHERS = "teachers: [{name: a, model: m}]\n"
TEXTS = "corpus: {train: a.csv}\n"
PRESETS = {"warm": {"targets": {"temperature": 0.7, "mode": "hard"}, ON_GENERATED: {"targets": {"mode": "soft"}}}}


def _targets(folder: Path, text: str, *overrides: str) -> Targets:
    path = folder / "amalgam.yaml"
    path.write_text(TEACHERS + text)
    return load_experiment(path, overrides, presets=PRESETS).experiment.targets


def test_the_file_and_the_command_line_override_a_methods_defaults(tmp_path: Path) -> None:
    def targets(text: str, *overrides: str) -> tuple[str, float]:
        section = _targets(tmp_path, TEXTS + text, *overrides)
        return section.mode, section.temperature

    assert targets("") == ("soft", 0.2)
    assert targets("student: {method: warm}\n") == ("hard", 0.7)
    assert targets("student: {method: warm}\ntargets: {temperature: 0.9}\n") == ("hard", 0.9)
    assert targets("student: {method: warm}\n", "targets.mode=soft") == ("soft", 0.7)
    assert targets("targets: {temperature: 0.9}\n", "student.method=warm") == ("hard", 0.9)


def test_without_a_method_and_its_fields_an_experiment_has_the_default_preset(tmp_path: Path) -> None:
    def loaded(text: str, *overrides: str) -> tuple[str | None, str]:
        path = tmp_path / "amalgam.yaml"
        path.write_text(TEACHERS + TEXTS + text)
        experiment = load_experiment(
            path, overrides, presets=PRESETS, default="warm", names={"targets.mode": ["soft", "hard", "uhc"]}
        ).experiment
        return experiment.student.method, experiment.targets.mode

    assert loaded("") == ("warm", "hard")
    assert loaded("student: {method: null}\n") == (None, "hard")
    assert loaded("targets: {temperature: 0.9}\n") == ("warm", "hard")
    assert loaded("targets: {mode: uhc}\n") == (None, "uhc")
    assert loaded("", "targets.mode=soft") == ("warm", "soft")
    assert loaded("targets: {mode: uhc}\n", "targets.mode=soft") == (None, "soft")
    assert loaded("targets: {mode: uhc}\nstudent: {method: warm}\n") == ("warm", "uhc")
    assert loaded("targets: {mode: uhc}\n", "student.method=warm") == ("warm", "hard")
    assert loaded("targets: {mode: uhc}\n", "student={method: warm}") == ("warm", "hard")
    assert loaded("targets: {mode: uhc}\n", "student.method=null") == (None, "uhc")
    assert loaded("targets: {mode: uhc}\n", "targets={mode: soft}", "student.method=warm") == ("warm", "soft")


def test_on_generated_texts_a_method_may_set_something_else(tmp_path: Path) -> None:
    def mode(text: str, *overrides: str) -> str:
        return _targets(tmp_path, f"student: {{method: warm}}\n{text}", *overrides).mode

    assert mode(TEXTS) == "hard"
    assert mode("generate: {source: random-words}\n") == "soft"
    assert mode("", "generate.source=random-words") == "soft"
    assert mode("generate: {source: random-words}\ntargets: {mode: uhc}\n") == "uhc"
