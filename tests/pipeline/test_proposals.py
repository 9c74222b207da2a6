"""Values of proposed commands and lines: they are read as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from amalgam.pipeline.config.load import load_experiment
from amalgam.pipeline.config.proposals import as_flow_yaml, as_yaml

GOOD = "corpus: {train: a.csv}\nteachers: [{name: a, model: m}]\n"
NAMES = ["text", "my text", "a: b", "#1", "yes", "12", "1.5e+3", "...", "it's", "é", "a\nb", "\U0001f600", "\u2028\x85"]
FAMILY = "\U0001f468\u200d\U0001f469"


@pytest.mark.parametrize("name", NAMES)
def test_a_proposed_value_is_read_as_it_was(tmp_path: Path, name: str) -> None:
    path = tmp_path / "amalgam.yaml"
    path.write_text(f"{GOOD}labels: {as_yaml(name)}\n", "utf-8")
    for value in (as_yaml(name), as_flow_yaml(name)):
        experiment = load_experiment(path, [f"corpus.text={value}"]).experiment
        assert (experiment.labels, experiment.corpus.text) == (name, [name])


@given(st.text(max_size=100))
def test_any_text_is_read_as_it_was(text: str) -> None:
    assert yaml.safe_load(as_yaml(text)) == text
    assert yaml.safe_load(as_flow_yaml({text: [text]})) == {text: [text]}


def test_an_emoji_is_one_character() -> None:
    assert as_yaml("\U0001f600") == '"\U0001f600"'
    assert as_yaml(FAMILY) == '"\U0001f468\\U0000200d\U0001f469"'
