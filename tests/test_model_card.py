"""Licences and model cards: the front matter of other people's cards, the warnings, and the metadata of a student's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from amalgam.stages.app.licences import FREE, RESTRICTED, common_licence, warnings
from amalgam.stages.app.model_card import CardInfo, Numbers, card
from amalgam.stages.common.corpus import hub_datasets
from amalgam.stages.common.intervals import percent
from amalgam.stages.common.models.read_card import MOST_BYTES, Source, read_card
from amalgam.tests.workspaces import Workspace


def source(role: str = "teacher a", *licences: str, **more: Any) -> Source:
    nothing = Source(
        [*licences], None, [], [], gated=False, problem=None, role=role, model=None, commit=None, trained=False
    )
    return dataclasses.replace(nothing, **more)


def test_front_matter_is_read_as_text(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "\ufeff---\r\nlicense: CC-BY-NC-4.0\r\nlanguage:\r\n- no\r\n- en\r\ndatasets: ag_news\r\n"
        "extra_gated_prompt: please\r\nlicense_name: mine\r\n---\r\n# body\r\n---\r\n",
        newline="",
    )
    facts = read_card(tmp_path)
    assert (facts.licences, facts.languages, facts.datasets) == (["cc-by-nc-4.0"], ["no", "en"], ["ag_news"])
    assert (facts.gated, facts.licence_name, facts.problem) == (True, "mine", None)


def absent(folder: Path) -> None:
    """The folder has no card."""


def is_folder(folder: Path) -> None:
    (folder / "README.md").mkdir()


def without_front_matter(folder: Path) -> None:
    (folder / "README.md").write_text("# a model\nlicense: mit\n")


def unclosed(folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: mit\n")


def not_yaml(folder: Path) -> None:
    (folder / "README.md").write_text("---\na: 1\nlicense: [mit\n---\n")


def a_list(folder: Path) -> None:
    (folder / "README.md").write_text("---\n- license\n---\n")


def binary(folder: Path) -> None:
    (folder / "README.md").write_bytes(b"---\n\x00\xff\x01: [\n---\n")


def huge(folder: Path) -> None:
    (folder / "README.md").write_text("---\ntext: " + "x" * MOST_BYTES + "\nlicense: mit\n---\n")


def nested(folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: " + "[" * 5000 + "\n---\n")


@pytest.mark.parametrize(
    "write", [absent, is_folder, without_front_matter, unclosed, not_yaml, a_list, binary, huge, nested]
)
def test_a_card_that_cannot_be_read_states_nothing_and_says_why(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    facts = read_card(tmp_path)
    assert (facts.licences, facts.datasets, facts.languages) == ([], [], [])
    assert facts.problem
    assert "README.md" in facts.problem
    assert str(tmp_path) not in facts.problem


def test_entries_of_another_type_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: {a: b}\ndatasets: [[x], {y: z}, w, '']\nlanguage:\n---\n")
    facts = read_card(tmp_path)
    assert (facts.licences, facts.datasets, facts.languages) == ([], ["w"], [])


@pytest.mark.parametrize(
    ("licence", "published", "piece"),
    [
        ("cc-by-nc-4.0", "apache-2.0", "no commercial use"),
        ("cc-by-nc-4.0", "cc-by-nc-sa-4.0", None),
        ("cc-by-nd-4.0", "cc-by-nd-4.0", "no distribution of adaptations"),
        ("cc-by-sa-4.0", "mit", "same licence"),
        ("cc-by-sa-4.0", "cc-by-sa-4.0", None),
        ("gpl-3.0", "apache-2.0", "same licence"),
        ("llama3.1", "llama3.1", "terms of its own"),
        ("other", "mit", "terms of its own"),
        ("a-licence-of-tomorrow", "mit", "terms of its own"),
        ("unknown", "mit", "states no licence"),
        ("mit", "apache-2.0", None),
        ("intel-research", "mit", "research only"),
    ],
)
def test_a_restriction_that_the_students_licence_does_not_repeat_is_a_warning(
    licence: str, published: str, piece: str | None
) -> None:
    lines = warnings([source("teacher a", licence)], [published])
    assert bool(lines) == (piece is not None)
    assert piece is None or (piece in lines[0] and lines[0].startswith("teacher a"))


def test_an_unstated_licence_and_a_gate_are_warnings() -> None:
    assert ["states no licence" in line for line in warnings([source()], ["mit"])] == [True]
    assert ["is gated" in line for line in warnings([source("teacher a", "mit", gated=True)], ["mit"])] == [True]
    assert len(warnings([source("teacher a", "cc-by-nc-sa-4.0")], [])) == 2


def test_a_student_inherits_only_a_licence_that_all_sources_state_and_that_lets_it() -> None:
    assert common_licence([source("a", "mit"), source("b", "mit")]) == "mit"
    assert common_licence([source("a", "cc-by-nc-sa-4.0")]) == "cc-by-nc-sa-4.0"
    for others in (["mit", "apache-2.0"], ["mit", ""], ["cc-by-nd-4.0"], ["other"], ["unknown"], ["of-tomorrow"]):
        assert common_licence([source("a", *([licence] if licence else [])) for licence in others]) is None
    assert common_licence([]) is None
    assert not FREE & RESTRICTED.keys()


def test_the_metadata_names_the_encoder_of_the_hub_the_languages_and_the_licence() -> None:
    encoder = source("the encoder", "mit", model="org/encoder", commit="0123456789abcdef", languages=["de", "en"])
    teacher = source("teacher a", "mit", model="org/teacher", languages=["en"], datasets=["<b>|x"])
    info = CardInfo(["x", "y"], {"a": ["x", "y"]}, 128, sources=[encoder, teacher])
    text = card(info, "me/m")
    front = yaml.safe_load(text.split("---")[1])
    assert (front["base_model"], front["base_model_relation"]) == ("org/encoder", "finetune")
    assert (front["license"], front["language"], front["pipeline_tag"]) == ("mit", ["en"], "text-classification")
    assert "model-index" not in front
    assert "org/encoder @ 01234567" in text
    assert r"&lt;b&gt;\|x" in text
    assert "which all of its sources state" in text
    assert "cut to 128 tokens" in text
    assert "Check before" not in text


def test_a_card_without_its_sources_says_so() -> None:
    text = card(CardInfo(["x", "y"], {}, None, numbers=Numbers(verdict="do *not* ship")), "me/m")
    assert "does not list the encoder and the teachers" in text
    assert r"do \*not\* ship" in text


def test_data_sets_of_the_hub_are_named_by_their_id() -> None:
    sources = [
        "hf://datasets/a/b/x.csv",
        "hf://datasets/a/b@main/y.csv",
        "hf://datasets/c",
        "s3://a/b/c",
        "texts/x.csv",
    ]
    assert hub_datasets(sources) == ["a/b"]


def test_card_page_and_console_have_the_same_measures(built: Workspace) -> None:
    [path] = built.artifacts.glob("report/*/report-*/evaluation.json")
    evaluation, printed = json.loads(path.read_text("utf-8")), built("report").out
    text = card(CardInfo(evaluation["labels"], {}, None, numbers=Numbers(evaluation=evaluation)), "me/m")
    chance = built.numbers()["chance"]
    assert f"always predicting the most frequent label has {percent(chance)} accuracy" in text
    for lines in (text, printed):
        [row] = [line for line in lines.splitlines() if "teacher:first" in line.replace("\\", "")]
        assert "∞" in row, "a label of another teacher has probability 0"
