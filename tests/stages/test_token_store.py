"""Kept tokens: the very ones the tokenizer gives, made once for all who share it, and made again where damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amalgam.data.tokens import Ragged, TokenRows, encode, has_fast_backend, join, unreadable_texts
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.app.runs import open_run
from amalgam.stages.common import token_cache as token_store
from amalgam.stages.common.corpus import fields, read_bucket
from amalgam.stages.common.load import encoder_files, part_of, teachers_of
from amalgam.stages.common.models.loading import load_tokenizer
from amalgam.stages.common.token_cache import TokenCache, tokenizer_digest
from amalgam.tests.stages.tiny_models import word_tokenizer
from amalgam.tests.workspaces import Workspace, age, flip_bit

PAIRS = [("word1 word2 word3", "word4"), ("word5", "word6 WORD7 unknown word8 word9"), ("[SEP] word1", "")]
SINGLES = [(text,) for pair in PAIRS for text in pair]


def kept_files(workspace: Workspace) -> list[Path]:
    return sorted((workspace.artifacts / "tokens").glob("*/*.parquet"))


def opened(workspace: Workspace) -> Run:
    """A run whose corpus is known."""
    run = open_run(workspace.config, [])
    manifest = run.store.manifest("read-corpus", run.store.head()["read-corpus"]["fingerprint"])
    assert manifest is not None
    run.results["read-corpus"] = ("known", manifest)
    return run


def tokenizer_of_the_student(run: Run) -> tuple[Any, str]:
    files = encoder_files(run, run.experiment.student, "student.encoder")
    tokenizer = load_tokenizer(files)
    return tokenizer, tokenizer_digest(tokenizer, files)


def tokens_of_training(run: Run, limit: int = 32) -> TokenRows:
    tokenizer, digest = tokenizer_of_the_student(run)
    part = part_of(run, "train")
    assert part is not None
    return join(
        TokenCache(run.store, run.console, tokenizer, digest, limit, types=True).tokens(bucket)
        for bucket in part.buckets
    )


def made_anew(run: Run, limit: int = 32) -> TokenRows:
    tokenizer, _ = tokenizer_of_the_student(run)
    part = part_of(run, "train")
    assert part is not None
    made = [encode(tokenizer, fields(read_bucket(run.store, bucket)), limit, types=True) for bucket in part.buckets]
    return join(made)


def assert_same(one: TokenRows, other: TokenRows) -> None:
    assert np.array_equal(one.ids.values, other.ids.values)
    assert np.array_equal(one.ids.offsets, other.ids.offsets)
    assert np.array_equal(one.truncated, other.truncated)
    assert (one.type_ids is None) == (other.type_ids is None)
    if one.type_ids is not None and other.type_ids is not None:
        assert np.array_equal(one.type_ids.values, other.type_ids.values)
        assert one.type_ids.values.dtype == other.type_ids.values.dtype


def no_tokenizer(*_: object, **__: object) -> TokenRows:
    raise AssertionError("a tokenizer was called")


@pytest.mark.parametrize("limit", [5, 500])
def test_kept_tokens_are_the_very_ones_the_tokenizer_gives(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    run = opened(workspace)
    anew = made_anew(run, limit)
    assert_same(tokens_of_training(run, limit), anew)
    monkeypatch.setattr(token_store, "encode", no_tokenizer)
    assert_same(tokens_of_training(opened(workspace), limit), anew)
    assert anew.truncated.any() == (limit == 5)


def test_a_second_student_with_the_same_tokenizer_makes_no_token(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_store, "encode", no_tokenizer)
    workspace("train-student", "student.seed=5")
    monkeypatch.undo()
    before = kept_files(workspace)
    workspace("train-student", "student.max_tokens=9")
    assert len(kept_files(workspace)) == len(before) + 1  # the training texts, cut elsewhere


@pytest.mark.parametrize("damage", [flip_bit, Path.unlink, lambda path: path.write_bytes(b"PAR1")])
def test_damaged_tokens_are_made_again_and_the_student_is_the_same(
    workspace: Workspace, damage: Callable[[Path], object]
) -> None:
    student = workspace.folder / "students"
    weights = next(student.glob("*/model.safetensors")).read_bytes()
    path = kept_files(workspace)[0]
    whole = path.read_bytes()
    damage(path)
    workspace("train-student", "--force")
    assert path.read_bytes() == whole
    assert next(student.glob("*/model.safetensors")).read_bytes() == weights
    assert workspace("verify", "--json").json["damaged"] == []


def test_a_flipped_bit_is_detected(workspace: Workspace) -> None:
    flip_bit(kept_files(workspace)[0])
    assert "damaged" in workspace("train-student", "--force").err
    assert len(list((workspace.artifacts / "quarantine").iterdir())) >= 1


def test_verify_looks_at_tokens_too(workspace: Workspace) -> None:
    path = kept_files(workspace)[0]
    flip_bit(path)
    result = workspace.attempt("verify", "--json")
    assert [row["path"] for row in result.json["damaged"]] == [str(path.relative_to(workspace.artifacts))]


def test_gc_keeps_the_tokens_of_the_corpus_and_no_others(workspace: Workspace) -> None:
    before = kept_files(workspace)
    age(workspace.artifacts)
    workspace("gc", "--unused", "--yes")
    assert kept_files(workspace) == before
    workspace.write([*workspace.texts(), ("a wholly new text about the law", "law")])
    workspace("run")
    grown = kept_files(workspace)
    age(workspace.artifacts)
    workspace("gc", "--unused", "--yes")
    left = kept_files(workspace)
    assert set(left) < set(grown)
    assert len(set(left) & set(before)) == 1  # the test part's, which did not change
    assert_same(tokens_of_training(opened(workspace)), made_anew(opened(workspace)))


def test_teachers_and_student_share_tokens_when_their_tokenizers_do_the_same(
    workspace: Workspace, tmp_path: Path
) -> None:
    run = opened(workspace)
    tokenizer, digest = tokenizer_of_the_student(run)
    for teacher in teachers_of(run):
        assert tokenizer_digest(load_tokenizer(teacher.files), teacher.files) == digest
    # Another name, another folder, another limit of its own, other calls before: the same tokens.
    tokenizer(["word1 word2"], truncation=True, max_length=3, padding=True)
    tokenizer.model_max_length, tokenizer.name_or_path = 7, "elsewhere"
    tokenizer.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**text, "name_or_path": "somewhere"}))
    files = teachers_of(run)[0].files
    assert tokenizer_digest(tokenizer.from_pretrained(str(tmp_path)), files) == digest


def test_a_tokenizer_that_does_otherwise_has_another_digest(workspace: Workspace) -> None:
    run = opened(workspace)
    files = teachers_of(run)[0].files

    def changed(change: Callable[[Any], object]) -> str:
        tokenizer = word_tokenizer()
        change(tokenizer)
        return tokenizer_digest(tokenizer, files)

    class InPython(type(word_tokenizer())):  # type: ignore[misc]
        def _encode_plus(self, *given: Any, **more: Any) -> Any:
            return super()._encode_plus(*given, **more)

    digests = [
        changed(lambda _: None),
        changed(lambda tokenizer: tokenizer.add_tokens(["new"])),
        changed(lambda tokenizer: setattr(tokenizer, "truncation_side", "left")),
        changed(lambda tokenizer: setattr(tokenizer, "split_special_tokens", True)),
        changed(lambda tokenizer: setattr(tokenizer.backend_tokenizer, "normalizer", None)),
        tokenizer_digest(InPython(tokenizer_object=word_tokenizer().backend_tokenizer), files),
    ]
    assert len(set(digests)) == len(digests)
    assert changed(lambda _: None) == digests[0]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("limit", [5, 6, 32])
@pytest.mark.parametrize("texts", [SINGLES, PAIRS], ids=["singles", "pairs"])
def test_the_fast_backend_gives_the_tokenizers_ids(
    texts: list[tuple[str, ...]], limit: int, split: bool, side: str
) -> None:
    tokenizer = word_tokenizer()
    tokenizer.truncation_side, tokenizer.split_special_tokens = side, split
    assert has_fast_backend(tokenizer)
    tokenizer(["word1", "word2 word3"], padding=True, truncation=True, max_length=3)  # another's settings do not stay
    tokens = encode(tokenizer, texts, limit, types=True)
    fields = [list(field) for field in zip(*texts, strict=True)]
    cutting = {"truncation": "longest_first" if len(fields) > 1 else "only_first", "max_length": limit}
    encoding = tokenizer(*fields, **cutting, return_token_type_ids=True)
    assert [one.ids.tolist() for one in tokens] == encoding["input_ids"]
    assert [one.type_ids.tolist() for one in tokens if one.type_ids is not None] == encoding["token_type_ids"]
    whole = tokenizer(*fields)["input_ids"]
    assert tokens.truncated.tolist() == [len(ids) > limit for ids in whole]


def test_ragged_rows_are_taken_and_padded_as_lists_would_be() -> None:
    rows = [[5, 6, 7], [], [8], [9, 10]]
    ragged = Ragged.of([np.array(row, np.int32) for row in rows])
    assert [row.tolist() for row in ragged] == rows
    assert ragged[-1].tolist() == [9, 10]
    assert ragged[0].base is not None  # a view
    assert [row.tolist() for row in ragged.take(np.array([3, 0, 3, 1]))] == [[9, 10], [5, 6, 7], [9, 10], []]
    assert [row.tolist() for row in ragged[1:3]] == [[], [8]]
    filled, existing = ragged.take(np.array([2, 0])).padded(-1)
    assert filled.tolist() == [[8, -1, -1], [5, 6, 7]]
    assert existing.tolist() == [[True, False, False], [True, True, True]]
    with pytest.raises(IndexError):
        ragged[4]
    assert len(Ragged.of([])) == 0
    assert len(join([])) == 0


def test_texts_with_more_unknown_than_known_tokens_are_unreadable() -> None:
    tokenizer = word_tokenizer()
    texts = ["word1 word2", "word1 other", "word1 other other", "other", ""]
    assert unreadable_texts(encode(tokenizer, [(text,) for text in texts], 8, types=False).ids, tokenizer) == 2
    tokenizer.unk_token = None
    assert unreadable_texts(encode(tokenizer, [("word1",)], 8, types=False).ids, tokenizer) == 0
