"""Uploads the student's folder and a model card to the Hub (`amalgam push`); private by default, only with --yes.

The Hub client handles the token.
"""

from __future__ import annotations

import io
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is httpx's, whichever it uses
    HfHubHTTPError,
    HTTPError,
    RepositoryNotFoundError,
)

from amalgam.data.hub import SECONDS_TO_ANSWER, address, silent
from amalgam.data.keys import shown, shown_names
from amalgam.pipeline.config.proposals import file_option
from amalgam.pipeline.console import Console, counted, size
from amalgam.pipeline.errors import MOST_LINE, AmalgamError, ExperimentError, ModelError, WorkError, nearest
from amalgam.pipeline.execution.plan import plan
from amalgam.pipeline.storage.store import open_store
from amalgam.stages.app.licences import LICENCES, warnings
from amalgam.stages.app.model_card import CardInfo, Numbers, card, numbers_of
from amalgam.stages.app.runs import open_run, working
from amalgam.stages.app.student import StudentFolder, finished_student
from amalgam.stages.common.deliveries import COPY_OF_MARK
from amalgam.stages.common.load import part_of
from amalgam.stages.common.models import hub
from amalgam.stages.common.models.label_names import own_labels
from amalgam.stages.common.models.model_folder import CARD, STATIC, UNKNOWN, reads_padding
from amalgam.stages.common.models.read_card import read_card
from amalgam.stages.common.models.resolve import ModelFiles, read_model
from amalgam.stages.methods import load_with_methods
from amalgam.stages.registry import STAGE_NAMED

HEAD = "ForSequenceClassification"
"""End of the class names of classifiers."""

LOCAL_FOLDERS = {".cache", ".git"}
"""Folders of the Hub client and of git, which are never uploaded: the configuration of git may have a token."""


def push(  # noqa: PLR0913 - the options of the command
    repo_id: str, config: Path, student: Path | None, *, licence: str | None, public: bool, yes: bool, show_card: bool
) -> None:
    if not hub.is_model_id(repo_id) or "/" not in repo_id:
        what = f"{shown(repo_id)} is no repository name"
        fix = f"run `amalgam push YOUR-NAME/a-model{file_option(config)}`"
        raise ExperimentError(what, where="amalgam push", fix=fix)
    console, finished = Console(), finished_student(config, student)
    _check_licence(licence, finished.folder)
    model, files = _classifier(finished.folder), _files(finished.folder)
    written = None
    if CARD in files:
        remarks = warnings(finished.sources, read_card(finished.folder).licences)
        if files[CARD].stat().st_mtime < files["config.json"].stat().st_mtime:
            remarks.append(f"{files[CARD]} is older than the student: check its numbers")
    else:
        labels, are_named = own_labels(model, teacher=finished.folder.name)
        info = CardInfo(
            labels,
            finished.teachers,
            finished.max_tokens,
            sources=finished.sources,
            training=finished.training,
            fingerprint=finished.fingerprint,
            licence=licence,
            numbers=_numbers(finished, config, required=student is None),
            flags_unknown=UNKNOWN in files,
            is_static=model.config.get("model_type") == STATIC,
            reads_padding=reads_padding(model.config),
            learned=finished.learned,
        )
        written, remarks = card(info, repo_id), info.warnings
        remarks += [] if are_named else ["the labels have no names: set id2label in config.json"]
        remarks += [] if info.published_licence else ["the card states no licence: choose one with --license"]
    for line in remarks:
        console.note(line)
    if show_card:
        console.result(written if written is not None else files[CARD].read_text("utf-8", "replace"))
        return
    sizes = {name: path.stat().st_size for name, path in files.items()}
    rows = [[name, size(count), ""] for name, count in sizes.items()]
    if written is not None:
        rows.append([CARD, size(len(written.encode())), "written from the report: --card shows it"])
    kind = "public" if public else "private"
    console.table(f"{finished.folder} -> {address(repo_id)} ({kind})", ["file", "size", ""], rows)
    if not yes:
        console.result(f"{size(sum(sizes.values()))} in {counted(len(rows), 'file')}; nothing was uploaded: add --yes")
        return
    console.result(_upload(repo_id, files, written, public=public))


def _classifier(folder: Path) -> ModelFiles:
    """Returns the model in the folder; refuses one that is no classifier."""
    model = read_model(folder, "amalgam push")
    kinds = [str(kind) for kind in model.config.get("architectures") or ()]
    if kinds and not any(kind.endswith(HEAD) for kind in kinds):
        fix = "name the folder of a student, such as students/student"
        raise ModelError(f"{shown(kinds[0])} is no classifier", where=str(folder), fix=fix)
    return model


def _check_licence(licence: str | None, folder: Path) -> None:
    if licence is None:
        return
    if (folder / CARD).exists():
        what, fix = f"the student's folder has its own {CARD}", f"write `license: {shown(licence)}` at its top"
        raise ExperimentError(what, where=f"--license, {folder / CARD}", fix=fix)
    if licence not in LICENCES:
        close = nearest(licence, LICENCES, 3, ratio=0.4) or ["apache-2.0", "mit"]
        what = f"{shown(licence)} is no licence identifier of the Hub"
        raise ExperimentError(what, where="--license", fix=f"write {shown_names(close, 3)}, or other")


def _files(folder: Path) -> dict[str, Path]:
    """Returns all files to upload, which excludes the copy of the mark; refuses links, which could publish others."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if not LOCAL_FOLDERS.isdisjoint(name.parts):
            continue
        if path.is_symlink():
            fix = "put the file itself there, or remove the link"
            raise ModelError("the student's folder contains a link", where=str(path), fix=fix)
        if path.is_file() and path.name != COPY_OF_MARK:
            files[name.as_posix()] = path
    return files


def _numbers(finished: StudentFolder, config: Path, *, required: bool) -> Numbers:
    """Returns the numbers on this student in the workspace; without `required`, an unreadable experiment has none."""
    if finished.fingerprint is None:
        return Numbers(why_not="the student's folder names no training")
    try:
        loaded = load_with_methods(config)
        store = open_store(loaded.experiment.execution.workspace, loaded.base)
    except AmalgamError:
        if required:
            raise
        return Numbers()
    return numbers_of(store, loaded.base, finished.fingerprint, partial(_own_test, config))


def _own_test(config: Path) -> str | None:
    """Returns the digest of the labels in corpus.test of the experiment file; None if they are unknown."""
    run = open_run(config, [], console=Console(quiet=True))
    with suppress(AmalgamError, OSError), working(run):
        plan([STAGE_NAMED["generate"], STAGE_NAMED["read-corpus"]], run)
        test = part_of(run, "test") if "read-corpus" in run.results else None
        return test.labels_digest if test else None
    return None


# ---- the upload


def _upload(repo_id: str, files: dict[str, Path], written: str | None, *, public: bool) -> str:
    """Uploads the files in one commit; creates the repository, or refuses one that --public does not agree with."""
    if get_token() is None:
        raise ModelError("no Hub token is set", where="amalgam push", fix="run `hf auth login`, or set HF_TOKEN")
    operations: list[Any] = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
    if written is not None:
        operations.append(CommitOperationAdd(CARD, io.BytesIO(written.encode())))
    api = HfApi()
    try:
        with silent():
            existing = None
            with suppress(RepositoryNotFoundError):
                existing = api.model_info(repo_id, timeout=SECONDS_TO_ANSWER)
            if existing is None:
                api.create_repo(repo_id, private=not public, repo_type="model")
            elif bool(existing.private) is public:
                kind, option = ("private", "omit --public") if public else ("public", "add --public")
                fix = f"{option}, or name another repository"
                raise ExperimentError(f"{repo_id} is {kind}", where=address(repo_id), fix=fix)
            commit = api.create_commit(repo_id, operations, commit_message="amalgam push", repo_type="model")
    except HfHubHTTPError as error:
        status, reason = error.response.status_code, _reason(error.server_message or "")
        what, fix = f"the Hub refused the upload with status {status}{reason}", "try again later"
        if status in {401, 403}:
            what = f"the Hub does not let this token write to {repo_id}{reason}"
            fix = "run `hf auth login` with a token that can write"
        raise ModelError(what, where=address(repo_id), fix=fix) from None
    except (HTTPError, OSError, ValueError) as error:
        if isinstance(error.__cause__, HfHubHTTPError):  # the Hub has checked the card
            what = f"the Hub refused the card{_reason(str(error))}"
            fix = f"correct these fields at the top of {CARD}"
            fix += " in the student's folder; --card prints the one that was written" if written is not None else ""
            raise ModelError(what, where=address(repo_id), fix=fix) from None
        what = f"the upload failed ({type(error).__name__})"
        raise WorkError(what, where=repo_id, fix="run the command again; uploaded files are not sent twice") from None
    return str(commit.commit_url)


def _reason(message: str) -> str:
    """Returns the Hub's message in one line, for the end of a sentence."""
    return f": {shown(' '.join(message.split()), MOST_LINE)}" if message.strip() else ""
