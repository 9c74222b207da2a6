"""A student without a transformer: `student.encoder: static:ENCODER`."""

from __future__ import annotations

import ast
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import Metaspace
from transformers import BertTokenizer, PreTrainedTokenizerFast

from amalgam.data.tokens import encode, encode_truncated
from amalgam.pipeline import console
from amalgam.stages.app import classify, export_numpy, int8
from amalgam.stages.app.serve import read_export
from amalgam.stages.app.student import finished_in
from amalgam.stages.common.models import static as static_models
from amalgam.stages.common.models.static import StaticForSequenceClassification
from amalgam.tests.test_errors import on_a_full_device
from amalgam.tests.test_export import ALONE, printed_by
from amalgam.tests.test_predict import write_pairs
from amalgam.tests.workspaces import Workspace, build_once, edit_json, quiet_environment, rewrite_mark

STATIC = "student.encoder=static:./models/encoder"


@pytest.fixture
def static(built: Workspace, shared: Path, tmp_path: Path) -> Workspace:
    """Return a copy of an experiment whose student is static and learned more steps than others of these tests."""

    def build(folder: Path) -> Workspace:
        workspace = built.copy(folder)
        workspace.edit("encoder: ./models/encoder", "encoder: static:./models/encoder")
        workspace.edit("epochs: 1", "epochs: 20")
        workspace("run")
        return workspace

    return build_once(shared / "static", build).copy(tmp_path / "workspace")


def test_it_has_the_encoders_vectors_and_no_other_stage_runs_for_it(built: Workspace, static: Workspace) -> None:
    assert built.stale(STATIC) == {"train-student", "report"}
    config = json.loads((static.folder / "students/student/config.json").read_text())
    encoder = json.loads((static.folder / "models/encoder/config.json").read_text())
    assert config["model_type"] == "amalgam-static"
    assert (config["vocab_size"], config["hidden_size"]) == (encoder["vocab_size"], encoder["hidden_size"])
    assert not static.stale()


def test_the_token_vectors_show_their_progress(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = json.loads((workspace.folder / "models/encoder/config.json").read_text())["vocab_size"]
    monkeypatch.setattr(static_models, "AT_ONCE", tokens // 2)
    monkeypatch.setattr(console, "EVERY_SECONDS", 0)
    printed = workspace("train-student", STATIC).err
    assert re.search(rf"^train-student token vectors  \d+%  {tokens // 2}/{tokens} tokens$", printed, re.MULTILINE)
    assert re.search(r"^train-student  \d+%.* steps .*loss \d", printed, re.MULTILINE)


def test_it_learns(static: Workspace) -> None:
    records = [json.loads(path.read_text()) for path in static.artifacts.glob("train-student/*/student.json")]
    [history] = [record["facts"]["history"] for record in records if record["facts"]["epochs"] == 20]
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]


TEXTS = ["the chef fried the onion", "the court heard the banker and the nurse", "", "onion " * 100]


def test_numpy_alone_predicts_as_the_student(static: Workspace) -> None:
    out = static("export", "--numpy").out
    assert out.strip() == str(static.folder / "students/student-numpy")
    code = f"import sys; sys.path.insert(0, 'students/student-numpy')\n{ALONE}\nfrom classify import Classifier\n"
    code += f"print(Classifier('students/student-numpy').predict({TEXTS!r}))"
    printed = ast.literal_eval(printed_by(static, "-I", "-c", code))
    student = finished_in(static.folder / "students/student").load()
    expected = torch.tensor(student.logits([(text,) for text in TEXTS])).softmax(-1).max(-1)
    assert [label for label, _ in printed] == [student.labels[place] for place in expected.indices.tolist()]
    assert [share for _, share in printed] == pytest.approx(expected.values.tolist(), abs=1e-4)


def test_an_export_truncates_as_predict_whatever_the_tokenizers_file_has(static: Workspace, tmp_path: Path) -> None:
    """As the folders of sentence-transformers have it: a student that amalgam did not train."""
    source, folder = static.folder / "students/student", tmp_path / "elsewhere"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".*", "unknown.safetensors"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    static("export", "--numpy", "--student", str(folder))
    text = "the chef fried the onion and then the court heard the banker and the nurse"
    expected = finished_in(folder).load().logits([(text,)])
    assert classify.Classifier(tmp_path / "elsewhere-numpy").logits([text]) == pytest.approx(expected, abs=1e-4)


def bert_tokenizer() -> Tokenizer:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abeis日.'#", "##s", "##a", "onion", "the"]
    tokenizer = BertTokenizer(vocab={piece: place for place, piece in enumerate(pieces)}).backend_tokenizer
    tokenizer.enable_truncation(12)
    return tokenizer


def test_a_table_of_words_gives_the_tokens_of_the_tokenizer() -> None:
    tokenizer = bert_tokenizer()
    white, others = " \t\n\r\x0b\x1c\x85\xa0\u2028\u3000", "abse\u0301éİΣ\u200d\0\ufffd日本😀.'#[]"
    pieces = [*white, *others, *" " * 20, "[sep]", "[SEP]", "The", " [MASK] ", "##s", "onion", "the", "a" * 120]
    draw = random.Random(0)  # noqa: S311 - no secret
    texts = ["".join(draw.choices(pieces, k=draw.randrange(40))) for _ in range(3000)]
    pairs = [("the onion", "a"), ("a", ""), *zip(texts[:200], texts[200:400], strict=True)]
    expected = [[encoding.ids for encoding in tokenizer.encode_batch(part)] for part in (texts, pairs)]
    assert classify.Words.suit(tokenizer)
    words = classify.Words(tokenizer)
    assert words(texts) == words(texts) == expected[0]
    assert words(pairs) == expected[1]


@pytest.mark.parametrize("side", ["right", "left"])
def test_pairs_are_truncated_as_by_the_tokenizer_and_not_by_it(side: str) -> None:
    """The tokenizer keeps each rest of one text with each rest of the other: 2.4 GB for four pairs of 2,000 words."""
    draw = random.Random(1)  # noqa: S311 - no secret
    texts = [" ".join(draw.choices(["onion", "the", "[SEP]"], k=draw.randrange(20))) for _ in range(400)]
    pairs = [*zip(texts[::2], texts[1::2], strict=True)]
    for limit in (9, 12):
        tokenizer = bert_tokenizer()
        tokenizer.enable_truncation(limit, direction=side)
        expected = [(each.ids, each.type_ids, bool(each.overflowing)) for each in tokenizer.encode_batch(pairs)]
        assert [*encode_truncated(tokenizer, pairs, limit, side)] == expected
        tokenizer.enable_truncation(limit, direction=side)
        assert classify.Tokens(tokenizer)(pairs) == [ids for ids, _, _ in expected]
        fast = PreTrainedTokenizerFast(tokenizer_object=bert_tokenizer(), truncation_side=side)
        rows = encode(fast, pairs, limit, types=True)
        assert [(ids.tolist(), truncated) for ids, truncated in zip(rows.ids, rows.truncated, strict=True)] == [
            (ids, truncated) for ids, _, truncated in expected
        ]
        assert fast.backend_tokenizer.truncation is None
        assert tokenizer.truncation is None


def test_other_tokenizers_have_no_table_of_words() -> None:
    others = [bert_tokenizer() for _ in range(4)]
    others[0].pre_tokenizer = Metaspace()
    others[1].add_tokens(["two words"])
    others[2].enable_truncation(12, direction="left")
    others[3].add_tokens(["covid-19"])
    assert not any(map(classify.Words.suit, others))


def test_the_command_of_the_export_classifies_lines(static: Workspace) -> None:
    static("export", "--numpy", "--out", "small")
    command = [sys.executable, "-I", "small/classify.py"]
    given = b"the chef fried the onion\r\n\nthe court heard the caf\xe9\n"
    done = subprocess.run(command, input=given, capture_output=True, cwd=static.folder, check=True)
    lines = done.stdout.decode().splitlines()
    [entry] = static("predict", TEXTS[0], "--json").json
    assert len(lines) == 3
    assert lines[0].split("\t")[0] == entry["labels"][0]["label"]
    (static.folder / "many.txt").write_bytes(given * 5000)
    piped = ["/bin/sh", "-c", f"{shlex.join(command)} < many.txt | head -n 1"]
    done = subprocess.run(piped, capture_output=True, cwd=static.folder, check=True)
    assert len(done.stdout.splitlines()) == 1
    assert not done.stderr
    for wrong in (f"{shlex.join(command)} many.txt", f"{shlex.join(command)} <&-", f"{shlex.join(command)} >&-"):
        done = subprocess.run(["/bin/sh", "-c", wrong], capture_output=True, cwd=static.folder, check=False)
        assert (done.returncode, done.stdout) == (2, b"")
        assert done.stderr == b"usage: python small/classify.py < texts.txt > labels.tsv\n"


@on_a_full_device
@pytest.mark.parametrize("texts", [1, 5000])
@pytest.mark.parametrize("environment", [{}, {"PYTHONUNBUFFERED": "1"}])
def test_labels_that_cannot_be_written_are_an_error(static: Workspace, texts: int, environment: dict[str, str]) -> None:
    static("export", "--numpy", "--out", "small")
    done = subprocess.run(
        ["/bin/sh", "-c", f"{shlex.join([sys.executable, 'small/classify.py'])} > /dev/full"],
        input=b"onion\n" * texts,
        capture_output=True,
        cwd=static.folder,
        env=quiet_environment(**environment),
        check=False,
    )
    message = b"the labels cannot be written: No space left on device; use a disk with space\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_the_command_of_the_export_writes_utf_8_in_any_locale(static: Workspace) -> None:
    static("export", "--numpy", "--out", "small")
    config = json.loads((static.folder / "small/config.json").read_text("utf-8"))
    names = {number: f"日本 {label}" for number, label in config["id2label"].items()}
    edit_json(static.folder / "small/config.json", id2label=names)
    command, environment = [sys.executable, "small/classify.py"], quiet_environment(PYTHONIOENCODING="latin-1")
    done = subprocess.run(
        command, input=b"onion\n", capture_output=True, cwd=static.folder, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().partition("\t")[0] in names.values()


def test_exports_of_a_student_of_pairs_refuse_single_texts(fresh: Workspace) -> None:
    write_pairs(fresh)
    fresh("train-student", STATIC)
    for form in ("numpy", "onnx"):
        fresh("export", f"--{form}")
        facts = json.loads((fresh.folder / f"students/student-{form}/export.json").read_text())
        assert facts["text"] == ["text", "the second"]
    assert read_export(fresh.folder / "students/student-onnx", "").columns == ["text", "the second"]
    command = [sys.executable, "-I", "students/student-numpy/classify.py"]
    done = subprocess.run(command, input=b"a text\n", capture_output=True, cwd=fresh.folder, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"classifies pairs of texts (text and the second)" in done.stderr
    assert b"Traceback" not in done.stderr
    student = classify.Classifier(fresh.folder / "students/student-numpy")
    assert len(student.predict([("a text", "its second")])) == 1
    with pytest.raises(ValueError, match="pairs of texts"):
        student.predict(["a text"])


def test_the_classifier_of_a_numpy_export_takes_a_list_of_single_texts(static: Workspace) -> None:
    static("export", "--numpy", "--force")
    student = classify.Classifier(static.folder / "students/student-numpy")
    assert len(student.predict(TEXTS[:2])) == 2
    with pytest.raises(TypeError, match="a list of texts"):
        student.predict("a text")
    with pytest.raises(ValueError, match="single texts"):
        student.predict([("a text", "its second")])


def test_an_int8_export_keeps_frequent_tokens_and_has_its_comparison(
    static: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_numpy, "MOST_TOKENS", 60)
    result = static("export", "--numpy", "--int8", "--force")
    folder = static.folder / "students/student-numpy-int8"
    assert result.out.strip() == str(folder)
    arrays = load_file(folder / "arrays.safetensors")
    assert arrays["vectors"].dtype == np.int8
    assert len(arrays["vectors"]) == 61
    assert not arrays["vectors"][-1].any()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    counts = Counter(token for text, _ in static.texts() for token in tokenizer.encode(text).ids)
    frequent = [token for token, _ in counts.most_common(40)]
    assert (arrays["rows"][frequent] < 60).all()
    facts = json.loads((folder / "export.json").read_text())["int8"]
    assert (facts["labelled"], facts["source"]) == (len(static.texts("test")), "corpus.test")
    assert [row["form"] for row in facts["speed"]] == ["torch fp32", "numpy fp32", "numpy int8"]
    assert facts["same_label"] > 0.8


def test_the_tokens_of_a_student_from_elsewhere_are_not_counted_in_other_texts(
    static: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_numpy, "MOST_TOKENS", 60)
    static("export", "--numpy", "--int8", "--force")
    own = load_file(static.folder / "students/student-numpy-int8/arrays.safetensors")["rows"]
    for name, is_own in (("moved", True), ("other", False)):
        shutil.copytree(static.folder / "students/student", tmp_path / name)
        if not is_own:
            rewrite_mark(tmp_path / name, fingerprint="0" * 64)
        static("export", "--numpy", "--int8", "--force", "--student", str(tmp_path / name))
        rows = load_file(tmp_path / f"{name}-numpy-int8/arrays.safetensors")["rows"]
        assert (rows == (own if is_own else np.minimum(np.arange(len(rows)), 60))).all()


def test_tokens_of_the_texts_that_int8_is_compared_on_are_not_counted(
    static: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_numpy, "MOST_TOKENS", 60)
    classifier, kept = finished_in(static.folder / "students/student").load(), []
    monkeypatch.setattr(export_numpy, "_write_arrays", lambda *given: kept.append(given[-1]))
    monkeypatch.setattr(export_numpy, "_timed", lambda *_: (np.zeros((1, 2)), {}))
    folder = static.folder / "students/student"
    (folder / classify.ARRAYS).touch()
    for source, compared in (("corpus.train", len(static.texts())), ("corpus.test", len(static.texts("test")))):
        texts = int8.ComparedTexts([("the onion",)] * compared, [None] * compared, source)
        export_numpy.quantise(classifier, folder, texts, static.config)
    assert (kept[0] == np.arange(60)).all()
    assert (kept[1] != np.arange(60)).any()


def test_int8_numbers_are_near_those_of_the_student(static: Workspace) -> None:
    static("export", "--numpy", "--force")
    static("export", "--numpy", "--int8", "--force")
    whole, small = (classify.Classifier(static.folder / f"students/student-numpy{form}") for form in ("", "-int8"))
    expected = whole.logits(TEXTS)
    assert np.abs(small.logits(TEXTS) - expected).max() < 0.1 * np.abs(expected).max()
    assert small.logits([]).shape == (0, expected.shape[1])


def test_numpy_needs_a_static_student_and_a_format_of_its_own(built: Workspace, static: Workspace) -> None:
    refused = built.attempt("export", "--numpy")
    assert (refused.code, "amalgam export --onnx" in refused.err) == (2, True)
    assert "static:ENCODER" in refused.err
    refused = built.attempt("export", "--numpy", "--student", "students/student")
    assert "run `amalgam export --onnx --student students/student`" in refused.err
    assert static.attempt("export", "--numpy", "--onnx").code == 2
    static("export", "--onnx", "--out", "both")
    other = static.attempt("export", "--numpy", "--out", "both", "--force")
    assert (other.code, "no export" in other.err) == (2, True)


def test_an_unreadable_config_is_an_error_of_the_model(static: Workspace) -> None:
    """A folder without a mark, which is the user's own."""
    shutil.copytree(static.folder / "students/student", static.folder / "own", ignore=shutil.ignore_patterns(".*"))
    (static.folder / "own/config.json").write_text("{")
    refused = static.attempt("export", "--numpy", "--student", "own")
    assert (refused.code, "config.json cannot be read as JSON" in refused.err) == (2, True)


def test_padding_changes_no_text(static: Workspace) -> None:
    model = StaticForSequenceClassification.from_pretrained(static.folder / "students/student")
    ids = torch.tensor([[2, 7, 8, 9, 3], [2, 7, 3, 0, 0]])
    with torch.no_grad():
        padded = model(ids, torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])).logits[1]
        torch.testing.assert_close(padded, model(ids[1:, :3]).logits[0])
        assert not torch.allclose(padded, model(ids[1:]).logits[0])


def test_the_order_of_words_counts(static: Workspace) -> None:
    model = StaticForSequenceClassification.from_pretrained(static.folder / "students/student")
    with torch.no_grad():
        first, second = model(torch.tensor([[2, 7, 8, 9, 3], [2, 9, 7, 8, 3]])).logits
    assert not torch.allclose(first, second, atol=1e-3)


def test_it_is_exported_and_its_card_says_how_it_loads(static: Workspace) -> None:
    static("export", "--onnx")
    card = static("push", "me/desk", "--card").out
    assert "import amalgam.stages.common.models.static" in card
    assert "using it does not require amalgam" not in card


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["student.encoder=static"], "static:ENCODER"),
        (["student.encoder=static:teacher:third"], "no teacher has the name 'third'"),
        ([STATIC, "student.layers=1"], "a static student has no layers"),
        ([STATIC, "student.method=dfa"], "trains the layers of a transformer"),
        ([STATIC, "student.method=as-dfd"], "trains the layers of a transformer"),
    ],
)
def test_settings_that_need_a_transformer_are_refused(built: Workspace, overrides: list[str], fix: str) -> None:
    result = built.attempt("plan", *overrides)
    assert (result.code, fix in result.err) == (2, True), result.err
