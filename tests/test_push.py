"""`amalgam push` to a Hub on 127.0.0.1: the listed and uploaded files; nothing is uploaded without --yes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCardData

from amalgam.stages.app.model_card import CardInfo, card
from amalgam.stages.common.deliveries import MARKS, METADATA
from amalgam.stages.common.intervals import percent
from amalgam.stages.common.models.model_folder import UNKNOWN
from amalgam.tests.stages.fake_hub import FakeHub
from amalgam.tests.workspaces import TEACHER_LABELS, TEST, Workspace, rewrite_mark, write_csv, write_model

NAME = "me/desk"
FILES = {METADATA, "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md", UNKNOWN}


@pytest.fixture
def hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.setenv("HF_TOKEN", "writer")
    return hub


def test_without_yes_it_lists_the_files_and_sends_no_request(desk: Workspace, hub: FakeHub) -> None:
    result = desk("push", NAME)
    assert {line.split()[0] for line in result.out.splitlines()[3:-1]} == FILES
    assert re.search("7 files.*--yes", result.out.splitlines()[-1])
    assert "(private)" in result.out
    assert hub.requests == []


def test_with_yes_every_file_arrives_as_it_is_and_private(desk: Workspace, hub: FakeHub) -> None:
    result = desk("push", NAME, "--yes")
    assert result.out.splitlines()[-1] == f"{hub.address}/{NAME}"
    sent = hub.repositories[NAME].commits["main"]
    assert hub.repositories[NAME].private
    folder = desk.folder / "students/student"
    assert {name: (folder / name).read_bytes() for name in FILES - {"README.md"}} == {
        name: content for name, content in sent.items() if name != "README.md"
    }
    assert not (folder / "README.md").exists()
    assert sent["README.md"].decode() == desk("push", NAME, "--card").out.removesuffix("\n")
    assert "It reads `unknown.safetensors`" in sent["README.md"].decode()
    assert "writer" not in result.out + result.err


def test_weights_go_apart_from_the_commit_by_lfs(workspace: Workspace, hub: FakeHub) -> None:
    from safetensors.torch import load_file, save_file
    from torch import zeros

    weights = workspace.folder / "students/student/model.safetensors"
    save_file({**load_file(weights), "more": zeros(3_000_000)}, weights, metadata={"format": "pt"})
    for name in MARKS:  # a user's own weights
        (weights.parent / name).unlink()
    workspace("push", NAME, "--yes")
    content = weights.read_bytes()
    oid = hashlib.sha256(content).hexdigest()
    assert len(content) > 12_000_000
    assert hub.requests.count(f"PUT /lfs/{oid}") == 1
    states = hashlib.sha256((weights.parent / UNKNOWN).read_bytes()).hexdigest()
    assert set(hub.large) == {oid, states}
    assert hub.repositories[NAME].commits["main"]["model.safetensors"] == content
    before = list(hub.requests)
    workspace("push", NAME, "--yes")
    assert [line for line in hub.requests[len(before) :] if line.startswith("PUT")] == []


def test_the_cards_numbers_are_the_reports(desk: Workspace) -> None:
    head = desk.head("report")
    [path] = (desk.artifacts / "report" / head).glob("*/evaluation.json")
    evaluation = json.loads(path.read_text())
    systems = evaluation["systems"]
    text = desk("push", NAME, "--card").out
    assert f"The student's checkpoint: {evaluation['selected_by']}." in text
    assert "$ pip install amalgam-distill\n" in text
    rows = {
        cells[0]: cells[1:]
        for cells in (re.findall(r"[^|* ][^|*]*[^|* ]", line) for line in text.splitlines())
        if cells
    }
    for name, shown in (("ensemble", "ensemble"), ("student (muka-soft)", r"student \(muka-soft\)")):
        assert rows[shown][:2] == [percent(systems[name]["accuracy"]), percent(systems[name]["macro_f1"])]
    front = yaml.safe_load(text.split("---")[1])
    metrics = front["model-index"][0]["results"][0]["metrics"]
    assert metrics[0] == {"type": "accuracy", "value": round(systems["student (muka-soft)"]["accuracy"], 4)}
    assert re.search(rf"\b{TEST} .*\b8 labels.* 12\.5 %", text)
    assert "| law | second |" in text
    assert str(desk.folder) not in text
    assert [result.metric_value for result in ModelCardData(**front).eval_results or ()] == [
        m["value"] for m in metrics
    ]
    assert "models/encoder" not in text


def test_numbers_are_those_of_the_students_fingerprint(workspace: Workspace) -> None:
    workspace("run", "student.learning_rate=0.01", "targets.temperature=1")
    workspace.edit("epochs: 1", "epochs: 2")
    head = workspace.head("report")
    [path] = (workspace.artifacts / "report" / head).glob("*/evaluation.json")
    accuracy = json.loads(path.read_text())["systems"]["student (muka-soft)"]["accuracy"]
    for arguments in ([], ["--student", "students/student"]):
        text = workspace("push", NAME, "--card", *arguments).out
        assert re.search(rf"\*\*student.*\*\*{percent(accuracy)}\*\*", text)
        assert "learning_rate: 0.01" in text
    student = workspace.folder / "students/student"
    rewrite_mark(student, fingerprint="0" * 20)
    text = workspace("push", NAME, "--card").out
    assert "No evaluation: the workspace has no report on this student" in text
    assert "model-index" not in text
    for name in MARKS:
        (student / name).unlink()
    assert "No evaluation: " in workspace("push", NAME, "--card", "--student", "students/student").out


def labelled(workspace: Workspace, why: str, rows: slice) -> str:
    """Writes test texts that are also training texts, with their reasons, and returns the name of the file."""
    name = f"texts/{why.split(maxsplit=1)[0]}.csv"
    write_csv(workspace.folder / name, ("text", "label", "why"), [(*row, why) for row in workspace.texts()[rows]])
    return name


def test_the_card_has_no_accuracy_of_selected_texts_and_the_cautions_on_learned_ones(workspace: Workspace) -> None:
    of_file = workspace("push", NAME, "--card").out
    assert f"On {TEST} labelled test texts" in of_file
    assert "**Caution**" not in of_file
    selected = labelled(workspace, "student and ensemble differ", slice(60))
    workspace("report", f"corpus.test={selected}")
    accuracy = re.compile(r"\*\*student.*")
    assert accuracy.search(workspace("push", NAME, "--card").out)[0] == accuracy.search(of_file)[0]  # type: ignore[index]
    random = labelled(workspace, "random", slice(70))
    workspace("report", f"corpus.test={random}")
    of_training_texts = workspace("push", NAME, "--card").out
    assert "On 70 labelled test texts" in of_training_texts
    assert "**Caution**: 70 of 70 test texts are also training texts, so the accuracy" in of_training_texts
    workspace("run", "student.name=other", "student.epochs=2", "corpus.test=null")  # the last report is another's
    assert accuracy.search(workspace("push", NAME, "--card").out)[0] == accuracy.search(of_file)[0]  # type: ignore[index]
    workspace.edit("texts/test.csv", selected)
    assert "On 70 labelled test texts" in workspace("push", NAME, "--card").out
    without = "No evaluation: all labelled test texts were selected"
    workspace("report", "student.name=other", "student.epochs=2", f"corpus.test={selected}")
    assert without in workspace("push", NAME, "--card", "--student", "students/other").out


def test_the_verdict_is_that_of_the_page_of_this_report(workspace: Workspace) -> None:
    page = workspace.folder / "reports/student.json"
    numbers = json.loads(page.read_text())
    verdict = {"verdict": {"decision": "do not ship", "reasons": ["Zero-shot is *better*.", 7]}}
    page.write_text(json.dumps(numbers | verdict))
    (workspace.folder / "reports/a.json").write_text("[broken")
    earlier = workspace.folder / "reports/earlier.json"
    earlier.write_text(json.dumps(numbers))
    os.utime(earlier, (1, 1))
    assert r"**Report**: do not ship. Zero-shot is \*better\*." in workspace("push", NAME, "--card").out
    earlier.unlink()
    page.write_text(json.dumps(numbers | verdict | {"fingerprint": "another"}))
    assert "**Report**" not in workspace("push", NAME, "--card").out


def test_the_card_states_the_cards_of_encoder_and_teachers_and_warns(workspace: Workspace) -> None:
    front = "---\nlicense: {}\nlanguage: no\ndatasets: [ag_news]\nbase_model: x/y\n---\nText\n"
    (workspace.folder / "models/first/README.md").write_text(front.format("cc-by-nc-4.0"))
    (workspace.folder / "models/second/README.md").write_text("---\nlicense: [unclosed\n---\n")
    (workspace.folder / "models/encoder/README.md").write_text(front.format("apache-2.0"))
    workspace("train-student")
    result = workspace("push", NAME, "--card", "--license", "apache-2.0")
    front_matter = yaml.safe_load(result.out.split("---")[1])
    assert (front_matter["license"], front_matter["language"]) == ("apache-2.0", ["no"])
    assert "base_model" not in front_matter  # the encoder is a local folder
    assert "| teacher first | a local model | cc-by-nc-4.0 | ag\\_news | no |" in result.out
    assert "| teacher second | a local model | not stated | not stated | not stated |" in result.out
    assert "not YAML, line " in result.out
    notes = [line for line in result.err.splitlines() if line.startswith("note: ")]
    assert any("teacher first, cc-by-nc-4.0, permits no commercial use" in note for note in notes)
    assert any("teacher second states no licence" in note for note in notes)
    assert not any("the encoder" in note for note in notes)
    silent = workspace("push", NAME, "--card", "--license", "cc-by-nc-4.0").err
    assert "cc-by-nc-4.0, permits" not in silent


def test_a_licence_that_the_hub_does_not_know_is_refused(workspace: Workspace) -> None:
    assert "apache-2.0" in workspace.refusal(2, "push", NAME, "--license", "Apache2")
    (workspace.folder / "students/student/README.md").write_text("---\nlicense: mit\n---\nmine\n")
    assert "README.md" in workspace.attempt("push", NAME, "--license", "mit").err


def test_a_card_of_ones_own_is_taken_as_it_is(workspace: Workspace, hub: FakeHub) -> None:
    (workspace.folder / "students/student/README.md").write_text("---\nlicense: mit\n---\nmine\n")
    workspace("push", NAME, "--yes", "--public")
    assert hub.repositories[NAME].commits["main"]["README.md"] == b"---\nlicense: mit\n---\nmine\n"
    assert not hub.repositories[NAME].private


def test_a_card_of_ones_own_stays_when_the_student_is_trained_again(workspace: Workspace) -> None:
    card = workspace.folder / "students/student/README.md"
    card.write_text("---\nlicense: mit\n---\nmine \xe9\n", encoding="latin-1")
    os.utime(card, (1e9, 1e9))
    workspace("train-student", "student.seed=1")
    result = workspace("push", NAME, "--card")
    assert "mine" in result.out
    assert "README.md is older than the student" in result.err


def test_a_folder_with_default_labels_is_pushed_too(desk: Workspace, tmp_path: Path) -> None:
    write_model(tmp_path / "model", words=["a"], seed=0, labels=["LABEL_0", "LABEL_1"])
    result = desk("push", NAME, "--card", "--student", str(tmp_path / "model"))
    assert r"| LABEL\_1 | - |" in result.out
    assert "id2label" in result.err


def test_a_public_repository_is_written_to_only_with_public(desk: Workspace, hub: FakeHub) -> None:
    hub.push(NAME, desk.folder / "models/first")
    assert "--public" in desk.refusal(2, "push", NAME, "--yes")
    assert not [line for line in hub.requests if line.startswith("POST")]
    desk("push", NAME, "--yes", "--public")
    assert set(hub.repositories[NAME].commits["main"]) == FILES


def test_a_private_repository_is_not_written_to_as_a_public_one(desk: Workspace, hub: FakeHub) -> None:
    desk("push", NAME, "--yes")
    refused = desk.attempt("push", NAME, "--yes", "--public")
    assert (refused.code, f"{NAME} is private" in refused.err, "omit --public" in refused.err) == (2, True, True)
    assert hub.repositories[NAME].private


@pytest.mark.parametrize(("token", "piece"), [("reader", "token"), (None, "hf auth login")])
def test_missing_write_permission_is_an_error_without_the_token(
    desk: Workspace, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, token: str | None, piece: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
    refused = desk.attempt("push", NAME, "--yes")
    assert (refused.code, piece in refused.err, "reader" in refused.err) == (2, True, False)
    assert ("this token may not write" in refused.err) is bool(token)
    assert hub.repositories == {}


def test_a_card_that_the_hub_refuses_is_named_with_the_reason(workspace: Workspace, hub: FakeHub) -> None:
    card_of_own = workspace.folder / "students/student/README.md"
    card_of_own.write_text("---\nlicense: unheard-of\n---\n# A card\n")
    refused = workspace.refusal(2, "push", NAME, "--yes")
    assert "the Hub refused the card: Invalid metadata in README.md. - license must be one of apache-2.0" in refused
    assert "fix: correct these fields at the top of README.md\n" in refused
    assert "main" not in hub.repositories[NAME].commits


def test_the_folders_of_git_and_of_the_hub_client_stay_here(desk: Workspace, tmp_path: Path) -> None:
    shutil.copytree(desk.folder / "students/student", tmp_path / "cloned")
    for name in (".git/config", ".cache/huggingface/download/config.json.metadata", "logs/.git/config", "vocabulary/x"):
        (tmp_path / "cloned" / name).parent.mkdir(parents=True)
        (tmp_path / "cloned" / name).write_text("a token")
    listed = desk("push", NAME, "--student", str(tmp_path / "cloned")).out
    assert "vocabulary/x" in listed
    assert ".git/" not in listed
    assert ".cache" not in listed


def test_a_link_in_the_folder_and_a_name_that_is_none_are_refused(desk: Workspace, tmp_path: Path) -> None:
    assert "desk" in desk.attempt("push", "desk").err
    assert "config.json" in desk.refusal(2, "push", NAME, "--student", ".")
    shutil.copytree(desk.folder / "students/student", tmp_path / "linked")
    (tmp_path / "linked/secrets").symlink_to(desk.config)
    assert "link" in desk.refusal(2, "push", NAME, "--student", str(tmp_path / "linked"))


def test_hostile_names_are_text_in_the_card() -> None:
    label, teacher = "<script>alert(1)</script>|[x](javascript:y)\n# big", "a|b"
    text = card(CardInfo([label, "law"], {teacher: [label]}, 32), NAME)
    [row] = [line for line in text.splitlines() if "script" in line]
    assert row.startswith(r"| &lt;script&gt;alert\(1\)&lt;/script&gt;\|\[x\]\(javascript:y\)")
    assert row.endswith(r"| a\|b |")
    assert yaml.safe_load(text.split("---")[1])["library_name"] == "transformers"


def test_the_card_of_a_student_of_pairs_classifies_pairs() -> None:
    text = card(CardInfo(["law"], {"a": ["law"]}, 32, learned=["text", "b c"]), NAME)
    assert 'classify({"text": "first text", "text_pair": "second text"})' in text
    assert 'tokenizer.encode("first text", "second text")' in text
    assert "--input texts.csv --text text --text 'b c' --out labels.parquet\n" in text
    assert "--input texts.csv --out" in card(CardInfo(["law"], {"a": ["law"]}, 32, learned=["text"]), NAME)


def test_of_very_many_labels_a_hundred_are_shown_and_the_rest_counted() -> None:
    text = card(CardInfo([f"label {place}" for place in range(150)], {"all": ["label 3"]}, None), NAME)
    assert "--unknown" not in text  # no file of states
    assert "50 more" in text
    assert (text.count("| label "), len(TEACHER_LABELS)) == (101, 2)


@pytest.mark.parametrize(("teachers", "words"), [(0, "."), (1, " from one teacher."), (2, " from 2 teachers with")])
def test_the_card_counts_the_teachers(teachers: int, words: str) -> None:
    names = {f"teacher-{at}": ["law"] for at in range(teachers)}
    assert f"made with amalgam{words}" in card(CardInfo(["law"], names, 32), NAME)
