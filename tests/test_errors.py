"""Errors of the system, of paths, streams and libraries: what, where and a fix, with the right exit code."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amalgam.cli import main
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import AmalgamError, FaultError, WorkError
from amalgam.pipeline.execution.faults import as_error
from amalgam.pipeline.secrets import has_secret, masked
from amalgam.stages.app import commands
from amalgam.tests.test_bad_input import assert_three_lines
from amalgam.tests.workspaces import Workspace, edit_json, flip_bit, quiet_environment

Change = Callable[[Workspace], object]


# ---- permissions


GETS, SETS, VERSION = 125, 126, 0x20080522
OVERRIDES = 0b1110
"""Capabilities with which root reads and writes every file."""


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """Take root's capabilities away from this thread, so that permissions of files hold for it, too."""
    if os.geteuid():
        yield
        return
    libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(VERSION, 0), (ctypes.c_uint32 * 6)()
    assert libc.syscall(GETS, header, sets) == 0
    before, sets[0] = sets[0], sets[0] & ~OVERRIDES
    assert libc.syscall(SETS, header, sets) == 0
    try:
        yield
    finally:
        sets[0] = before
        assert libc.syscall(SETS, header, sets) == 0


def is_privileged_machine() -> bool:
    return os.geteuid() != 0 or (sys.platform == "linux" and os.uname().machine == "x86_64")


permissions = pytest.mark.skipif(not is_privileged_machine(), reason="root's capabilities are dropped on x86-64 alone")


def mode(path: str, bits: int) -> Change:
    def change(workspace: Workspace) -> None:
        place = workspace.folder / path
        if not place.exists():
            place.mkdir()
        place.chmod(bits)

    return change


def denied(workspace: Workspace, change: Change, *arguments: str) -> tuple[int, str]:
    change(workspace)
    try:
        with without_privileges():
            result = workspace.attempt(*arguments)
    finally:
        for path in [workspace.folder, *workspace.folder.rglob("*")]:
            if not path.is_symlink():
                path.chmod(0o755)
    return result.code, result.err


UNREADABLE = {
    "texts/train.csv": 3,
    "texts": 3,
    "models/first": 2,
    "models/first/config.json": 2,
    "models/first/model.safetensors": 2,
    "models/first/tokenizer.json": 2,
    "models/encoder": 2,
    "models/encoder/model.safetensors": 2,
    "amalgam.yaml": 2,
}


@permissions
@pytest.mark.parametrize("path", UNREADABLE)
def test_an_input_without_permission_is_an_error_of_plan_and_run(fresh: Workspace, path: str) -> None:
    for command in ("plan", "run"):
        code, err = denied(fresh, mode(path, 0), command)
        assert code == UNREADABLE[path], err
        assert "Permission denied" in err
        assert path.rpartition("/")[2] in err
        assert "Traceback" not in err
        assert not fresh.units()


@permissions
@pytest.mark.parametrize("source", ["texts/trian.csv", "texts/*.csv"])
def test_a_folder_that_cannot_be_listed_is_an_error_if_a_file_is_looked_up_there(fresh: Workspace, source: str) -> None:
    code, err = denied(fresh, mode("texts", 0o111), "plan", f"corpus.train={source}")
    assert (code, "texts cannot be read: Permission denied" in err, "chmod" in err) == (3, True, True), err
    assert_three_lines(err)


@permissions
@pytest.mark.parametrize("bits", [0o555, 0])
@pytest.mark.parametrize("folder", ["students", "reports", "artifacts"])
def test_a_result_that_could_not_be_written_is_an_error_before_any_work(
    fresh: Workspace, folder: str, bits: int
) -> None:
    for command in ("plan", "run"):
        code, err = denied(fresh, mode(folder, bits), command)
        assert code == 2, err
        assert_three_lines(err)
        words = "cannot be written" if (folder, command) == ("artifacts", "run") else "not writable"
        assert ("cannot be read" if (folder, bits) == ("artifacts", 0) else words) in err
        assert folder in err
        assert not fresh.units()


@permissions
def test_a_damaged_file_is_named_where_it_cannot_be_moved(workspace: Workspace) -> None:
    flip_bit(unit := workspace.units()[0])
    code, err = denied(workspace, mode("artifacts", 0o555), "audit")
    assert (code, unit.name in err, "and cannot be moved to quarantine: Permission denied" in err) == (1, True, True), (
        err
    )


@permissions
def test_trained_teachers_that_could_not_be_written_are_an_error_before_any_work(fresh: Workspace) -> None:
    fresh.edit("teachers:\n", "train_teachers: {encoder: ./models/encoder, groups: 2}\nteachers:\n")
    code, err = denied(fresh, mode("teachers", 0o555), "run", "corpus.labels=null")
    assert (code, "teachers is not writable" in err) == (2, True), err


@pytest.mark.parametrize("folder", ["students", "reports"])
def test_a_file_in_place_of_a_folder_of_results_is_an_error_before_any_work(fresh: Workspace, folder: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        (fresh.folder / folder).rename(fresh.folder / "away")
    (fresh.folder / folder).write_text("mine")
    assert f"{folder} is a file" in fresh.refusal(2, "run")
    assert "folders" in fresh.attempt("doctor").err
    assert not fresh.units()


@permissions
def test_folders_without_permission_do_not_matter_to_results_that_are_current(workspace: Workspace) -> None:
    code, err = denied(workspace, mode("students", 0o555), "run")
    assert code == 0, err
    assert denied(workspace, mode("reports", 0o555), "plan")[0] == 0
    for folder in ("students", "artifacts/report"):
        code, err = denied(workspace, mode(folder, 0o555), "run", "student.name=new", "report.calibration_bins=9")
        assert (code, f"{folder.rpartition('/')[2]} is not writable" in err, ".tmp-" in err) == (2, True, False), err


@permissions
def test_a_stored_file_without_permission_is_named_and_stays(workspace: Workspace) -> None:
    [unit, *_] = workspace.units()
    path = str(unit.relative_to(workspace.folder))
    for command in (["verify"], ["build-targets", "--force"]):
        code, err = denied(workspace, mode(path, 0), *command)
        assert code == 1, err
        assert_three_lines(err)
        assert unit.name in err
        assert "chmod" in err
    assert unit.exists()
    assert workspace("verify").code == 0  # --force has quarantined the manifest, which is no damage
    workspace("run")
    workspace("verify")


@permissions
@pytest.mark.parametrize("name", ["labels.csv", "labels.parquet"])
def test_predictions_that_could_not_be_written_are_an_error_before_the_student_loads(
    workspace: Workspace, name: str
) -> None:
    arguments = ("predict", "--input", "texts/test.csv", "--out", f"out/{name}")
    for bits in (0o555, 0):
        code, err = denied(workspace, mode("out", bits), *arguments)
        assert code == 2, err
        assert_three_lines(err)
        assert "--out" in err
    (workspace.folder / "texts/lines.txt").write_text("one\n")
    for text_file in ("test.csv", "lines.txt"):
        code, err = denied(workspace, mode(f"texts/{text_file}", 0), "predict", "--input", f"texts/{text_file}")
        assert (code, f"{text_file} cannot be read" in err) == (3, True), err


# ---- paths


LONG = "x" * 5000

PATHS = {"~nosuchuser/x": "no user nosuchuser", f"./{LONG}": "too long", '"./a\\0b"': "NUL"}

FIELDS = {
    "corpus.train": 3,
    "corpus.test": 3,
    "teachers.0.model": 2,
    "student.encoder": 2,
    "execution.workspace": 2,
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("path", PATHS, ids=list(PATHS.values()))
def test_a_path_that_no_system_has_is_refused(fresh: Workspace, field: str, path: str) -> None:
    for command in ("plan", "run"):
        err = fresh.refusal(FIELDS[field], command, f"{field}={path}")
        assert_three_lines(err)
        assert PATHS[path] in err
        assert max(map(len, err.splitlines())) < 500
    assert not list(fresh.folder.glob("~*"))


@pytest.mark.parametrize("argument", ["--input", "--out", "--student", "-c"])
def test_a_path_that_is_too_long_is_refused_on_the_command_line(workspace: Workspace, argument: str) -> None:
    options = {"--input": "texts/test.csv", argument: f"{LONG}.csv"}
    result = workspace.attempt("predict", *(word for option in options.items() for word in option))
    assert result.code == (3 if argument == "--input" else 2), result.err
    assert_three_lines(result.err)
    assert "too long" in result.err
    assert max(map(len, result.err.splitlines())) < 500


@pytest.mark.parametrize(("address", "near"), [("gcs://b/x", "gs://"), ("S3://b/x", "s3://"), ("ftp://b/x", "folder")])
def test_a_workspace_of_an_unknown_scheme_is_refused(fresh: Workspace, address: str, near: str) -> None:
    result = fresh.attempt("run", f"execution.workspace={address}")
    assert (result.code, near in result.err) == (2, True), result.err
    assert_three_lines(result.err)
    assert sorted(path.name for path in fresh.folder.iterdir() if ":" in path.name) == []


def test_a_workspace_in_the_home_folder_is_there(fresh: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(fresh.folder / "home"))
    fresh("read-corpus", "execution.workspace=~/work")
    assert (fresh.folder / "home/work/read-corpus").is_dir()
    assert not (fresh.folder / "~").exists()


# ---- streams


on_a_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")


def shell(workspace: Workspace, line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", "-c", f'"$0" -m amalgam {line}', sys.executable],
        cwd=workspace.folder,
        env=quiet_environment(**environment),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@on_a_full_device
@pytest.mark.parametrize("command", ["plan", "--help"])
def test_a_result_that_cannot_be_printed_is_an_error(workspace: Workspace, command: str) -> None:
    result = shell(workspace, f"{command} > /dev/full")
    assert result.returncode == 1, result.stderr
    assert ("cannot be written: " if command != "--help" else "") + "No space left" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr


@on_a_full_device
def test_messages_that_cannot_be_printed_do_not_end_the_work(fresh: Workspace) -> None:
    assert shell(fresh, "read-corpus 2> /dev/full").returncode == 0
    assert fresh.plan()["read-corpus"]["state"] == "current"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_error_and_damage_no_file(fresh: Workspace, closed: str) -> None:
    result = shell(fresh, f"read-corpus {closed}")
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert fresh("verify", "--json").json["damaged"] == []


@pytest.mark.parametrize("seconds", [0.05, 0.1, 0.2, 0.4])
def test_an_interrupt_while_the_command_starts_shows_no_traceback(workspace: Workspace, seconds: float) -> None:
    """Python itself is not ready for signals at first; on a busy machine that takes longer than 20 ms."""
    process = subprocess.Popen(
        [sys.executable, "-m", "amalgam", "plan"],
        cwd=workspace.folder,
        env=quiet_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    not_ready = any(words in err for words in ("Fatal Python error: init_import_site", "Could not import runpy module"))
    assert not_ready or process.returncode in {0, 130, -signal.SIGINT}, err
    assert not_ready or "amalgam" not in err.partition("Traceback")[2], err


# ---- models


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads"),
    "a negative number of layers": ({"num_hidden_layers": -1}, "num_hidden_layers"),
    "a size as text": ({"hidden_size": "32"}, "hidden_size"),
    "a vocabulary as text": ({"vocab_size": "many"}, "vocab_size"),
    "quantised weights": ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    "a quantisation of no kind": ({"quantization_config": "x"}, "quantization_config"),
    "more memory than there is": ({"hidden_size": 10**9}, "memory"),
}


@pytest.mark.parametrize("model", ["first", "encoder"])
@pytest.mark.parametrize("fault", CONFIGS)
def test_a_model_with_a_faulty_config_is_refused(fresh: Workspace, fault: str, model: str) -> None:
    change, named = CONFIGS[fault]
    edit_json(fresh.folder / f"models/{model}/config.json", **change)
    before = fault != "more memory than there is"  # which is known when the model is built
    for command in ("plan", "run") if before else ("run",):
        err = fresh.refusal(2, command)
        assert_three_lines(err)
        assert named in err
        assert f"models/{model}" in err
        assert not (before and fresh.units())


@pytest.mark.parametrize("model", ["first", "encoder"])
@pytest.mark.parametrize("length", ["abc", [1], True])
def test_a_tokenizer_with_a_faulty_limit_is_refused_before_any_work(
    fresh: Workspace, length: object, model: str
) -> None:
    edit_json(fresh.folder / f"models/{model}/tokenizer_config.json", model_max_length=length)
    for command in ("plan", "run"):
        err = fresh.refusal(2, command)
        assert_three_lines(err)
        assert "model_max_length" in err
    assert not fresh.units()


def test_an_encoder_of_nan_is_refused_when_it_loads(fresh: Workspace) -> None:
    from safetensors.torch import load_file, save_file

    path = fresh.folder / "models/encoder/model.safetensors"
    weights = load_file(path)
    first = min(weights)
    weights[first][...] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    err = fresh.refusal(2, "run")
    assert_three_lines(err)
    assert first in err
    assert "models/encoder" in err


# ---- anything else


def test_out_of_memory_has_a_fix(fresh: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 4 TB")):
        monkeypatch.setattr(commands, "show_plan", raising(error))
        result = fresh.attempt("plan")
        assert (result.code, "out of memory" in result.err, "accumulate" in result.err) == (1, True, True), result.err


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_fault_of_amalgam_is_one_line_with_a_file_to_report(
    fresh: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(commands, "show_plan", raising(KeyError("hf_CanaryCanaryCanaryCanary")))
    err = fresh.refusal(FaultError.exit_code, "plan", "corpus.train=https://me:Canary123@example.org/x")
    assert_three_lines(err)
    assert "error: this is a fault of amalgam: KeyError" in err
    [where] = re.findall("^where: (.*)$", err, re.MULTILINE)
    text = Path(where).read_text()
    assert "Traceback" in text
    assert "polars" in text
    assert "Canary" not in err + text
    assert "Traceback" in fresh.refusal(FaultError.exit_code, "plan", "--debug")


def test_a_fault_on_a_full_disk_is_still_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.mkstemp", raising(OSError(28, "No space left on device")))
    assert as_error(ValueError("a\nb")).where is None
    assert as_error(ValueError("a\nb")).what.endswith("ValueError: a")


@pytest.mark.parametrize("number", [1, 5, 12, 13, 17, 20, 21, 22, 28, 30, 36, 40, 116, 122])
def test_every_error_of_the_system_has_a_place_and_a_fix(number: int) -> None:
    error = as_error(OSError(number, os.strerror(number), "/data/x.csv"))
    assert isinstance(error, WorkError)
    assert error.what == f"x.csv: {os.strerror(number)}"
    assert error.where == "/data/x.csv"
    assert error.fix
    assert as_error(error) is error
    assert not isinstance(as_error(AmalgamError("x")), FaultError)


# ---- secrets


SECRETS = [
    "hf_abcdefghijklmnopqrstuv",
    "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "github_pat_11ABCDEFG0abcdefghijkl_0123456789abcdef",
    "glpat-abcdefghij0123456789",
    "sk-proj-ab_cdefghij0123456789ABC-de",
    "AKIAIOSFODNN7EXAMPLE",
    "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "https://b.s3.amazonaws.com/x.csv?X-Amz-Date=1&X-Amz-Signature=0123456789abcdef",
    "https://b.blob.core.windows.net/x.csv?sv=2022&sig=abc%2Bdef",
    "https://storage.googleapis.com/b/x?X-Goog-Signature=aa11",
    "https://me:password@example.org/x.csv",
]
NO_SECRETS = [
    "./data/Experiment2024/TrainingTextsFinalVer1/x.csv",
    "0123456789abcdef0123456789abcdef01234567",
    "sentence-transformers/all-MiniLM-L6-v2",
    "https://example.org/x.csv?page=2",
    "s3://bucket/some/long/prefix/of/forty/letters/x",
    "TheQuickBrownFoxJumpsOverTheLazyDogAgain",
    "texts/sk-news-classifier-2023.csv",
    "models/hf_sentiment_classifier",
    "org/hf_model",
    "hf://datasets/org/name@main",
    "s3://bucket/a:b/c.csv",
    "sk-learn",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_in_any_field_is_refused_and_never_shown(fresh: Workspace, secret: str) -> None:
    token = re.split(r"[=/:@]", secret)[-1] if "://" in secret else secret
    token = "password" if "password" in secret else token
    for field in ("corpus.train", "student.encoder", "student.name", "execution.workspace"):
        result = fresh.attempt("plan", f"{field}={secret}")
        assert result.code == 2, result.err
        assert "secret" in result.err
        assert token not in result.err + result.out
    assert token not in masked(f"a message with {secret} in it")


@pytest.mark.parametrize("text", NO_SECRETS)
def test_a_text_that_resembles_a_secret_is_none(text: str) -> None:
    assert not has_secret(text)
    assert masked(text) == text


def test_messages_show_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    Console().note("fetching s3://me:Canary@bucket")
    assert "Canary" not in capsys.readouterr().err


# ---- wrong results without a word


def test_labels_that_contradict_are_refused(fresh: Workspace) -> None:
    path = fresh.folder / "models/first/config.json"
    names = ["banking", "computing", "cooking", "football"]
    edit_json(path, id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(reversed(names))})
    for command in ("plan", "run"):
        result = fresh.attempt(command)
        assert (result.code, "id2label and label2id contradict" in result.err) == (2, True), result.err
        assert "config.json" in result.err


@pytest.mark.parametrize("field", ["corpus.labels", "teachers.0.labels"])
def test_a_label_given_twice_is_refused(fresh: Workspace, field: str) -> None:
    assert "'law' twice" in fresh.refusal(2, "plan", f"{field}=[law, music, law, cooking]")


def test_a_row_with_a_key_twice_is_refused_with_its_line(fresh: Workspace) -> None:
    (fresh.folder / "texts/train.jsonl").write_text('{"text": "one"}\n{"text": "two", "text": "three"}\n')
    err = fresh.refusal(3, "read-corpus", "corpus.train=texts/train.jsonl")
    assert "train.jsonl line 2" in err
    assert "text is given twice" in err


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_text_of_many_megabytes_is_refused_with_its_row(fresh: Workspace, suffix: str) -> None:
    fresh.write([("one", "law"), ("x " * (1 << 20), "law")], suffix=suffix)
    override = f"corpus.train=texts/train.{suffix}"
    err = fresh.refusal(3, "read-corpus", override)
    assert "too long" in err
    assert "corpus.on_bad_row: skip" in err
    assert max(map(len, err.splitlines())) < 500
    assert "1 row skipped" in fresh("read-corpus", override, "corpus.on_bad_row=skip").err


# ---- output


def test_cells_of_csv_are_no_formulas_and_control_no_terminal() -> None:
    from amalgam.data.parquet import predictions
    from amalgam.stages.app.predict import csv_writer

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    columns = predictions(1, [])
    for file, escaped in ((io.StringIO(), False), (Terminal(), True)):
        write = csv_writer(file, columns)
        write([[1, 2], [b"a", b"b"], ["=1+1", "-5"], ["@x", "\x1b[31mred"], [0.5, 0.5]])
        text = file.getvalue()
        assert "'=1+1" in text
        assert "'@x" in text
        assert ",-5," in text
        assert ("\x1b" not in text) == escaped


@given(
    value=st.recursive(
        st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
@settings(max_examples=300)
def test_json_is_json_for_every_text_and_in_every_locale(value: object) -> None:
    for encoding in ("utf-8", "ascii", "latin-1"):
        raw = io.BytesIO()
        out = io.TextIOWrapper(raw, encoding=encoding)
        Console(out=out, err=io.StringIO()).json(value)
        assert json.loads(raw.getvalue().decode(encoding)) == value


NOT_SAFE = r'"NBSP \xa0, controls \x80\x85\x9f, beyond the BMP \U0001f600, \u2028"'


def test_every_json_command_prints_json_whatever_the_labels_and_the_locale(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.edit("model: ./models/first", f"model: ./models/first\n    rename: {{banking: {NOT_SAFE}}}")
    monkeypatch.chdir(workspace.folder)
    for command in ("plan", "status", "verify", "gc", "audit", "explain report", "methods", "doctor", "predict x"):
        monkeypatch.setattr(sys, "argv", ["amalgam", *command.split(), "--json"])
        raw = io.BytesIO()
        with contextlib.redirect_stdout(io.TextIOWrapper(raw, "ascii")) as out, contextlib.suppress(SystemExit):
            main()
        out.flush()
        assert json.loads(raw.getvalue().decode("ascii")), command


# ---- full disks and sweeps


def test_the_space_of_mapped_states_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from amalgam.stages.common.inference.states import reserve

    path = tmp_path / "states.npy"
    for system in ("Linux", "macOS"):
        np.lib.format.open_memmap(path, "w+", np.float16, (1000, 1000)).flush()
        with monkeypatch.context() as patch:
            if system == "macOS":
                patch.delattr(os, "posix_fallocate")
            reserve(path)
        assert path.stat().st_blocks * 512 >= path.stat().st_size
        assert np.load(path).shape == (1000, 1000)
    monkeypatch.setattr(os, "posix_fallocate", raising(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        reserve(path)


def test_a_sweep_of_a_billion_students_is_refused_at_once(fresh: Workspace) -> None:
    fields = [f"student.{name}=1,2" for name in ("epochs", "batch_size", "accumulate", "evaluate_every", "layers")]
    fields += [f"targets.{name}=1,2" for name in ("temperature", "kd_temperature", "neighbours", "passes")]
    fields += [f"teachers.{index}.max_tokens=8,9" for index in range(2)] + [
        f"cache.x{index}=1,2" for index in range(19)
    ]
    began = time.monotonic()
    assert "1,073,741,824 students" in fresh.refusal(2, "sweep", *fields)
    assert time.monotonic() - began < 60
