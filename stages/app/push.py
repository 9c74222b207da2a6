"""Uploads the student's folder and a model card to the Hub (`amalgam push`); private by default, only with --yes.

The Hub client handles the token. Names from other people's models are escaped in the card.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import CommitOperationAdd, EvalResult, HfApi, ModelCardData, get_token
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is httpx's, whichever it uses
    HfHubHTTPError,
    HTTPError,
    RepositoryNotFoundError,
)

from amalgam.data.keys import shown
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import ExperimentError, ModelError, WorkError
from amalgam.pipeline.execution.plan import plan
from amalgam.pipeline.storage.fingerprint import library_versions
from amalgam.stages.app.api import open_run, working
from amalgam.stages.app.predict import StudentFolder, finished_student
from amalgam.stages.common.models import hub
from amalgam.stages.common.models.model_folder import read_metadata
from amalgam.stages.common.models.resolve import read_model
from amalgam.stages.methods import method_name
from amalgam.stages.registry import STAGES
from amalgam.stages.report.html import size
from amalgam.stages.report.report_json import Evaluation
from amalgam.stages.report.stage import evaluation_if_any

CARD = "README.md"
TEMPLATE = Path(__file__).parent / "card.md.j2"
LABELS_SHOWN = 100
SPECIAL = re.compile(r"([\\`*_{}\[\]()#+|~])")


def push(  # noqa: PLR0913 - the options of the command
    repo_id: str, config: Path, student: Path | None, *, public: bool, yes: bool, show_card: bool
) -> None:
    if not hub.is_model_id(repo_id) or "/" not in repo_id:
        what = f"{shown(repo_id)} is no repository name"
        raise ExperimentError(what, where="amalgam push", fix="run `amalgam push YOUR-NAME/a-model`")
    console, finished = Console(), finished_student(config, student)
    model = read_model(finished.folder, "amalgam push")
    files = _files(finished.folder)
    written = None
    if CARD not in files:
        id2label = model.config["id2label"]
        labels = [str(id2label[position]) for position in sorted(id2label, key=int)]
        info = CardInfo(labels, finished.teachers, finished.max_tokens)
        written = card(_measured(info, finished, config) if student is None else info, repo_id)
    if show_card:
        console.result(written if written is not None else files[CARD].read_text("utf-8"))
        return
    sizes = {name: path.stat().st_size for name, path in files.items()}
    rows = [[name, size(count), ""] for name, count in sizes.items()]
    if written is not None:
        rows.append([CARD, size(len(written.encode())), "written from the report: --card shows it"])
    kind = "public" if public else "private"
    console.table(f"{finished.folder} -> {hub.address(repo_id)} ({kind})", ["file", "size", ""], rows)
    if not yes:
        console.result(f"{size(sum(sizes.values()))} in {len(rows)} files; nothing was uploaded: add --yes")
        return
    console.result(_upload(repo_id, files, written, public=public))


def _files(folder: Path) -> dict[str, Path]:
    """Returns all files of the folder; refuses links, which could publish other files."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            fix = "put the file itself there, or remove the link"
            raise ModelError("the student's folder contains a link", where=str(path), fix=fix)
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = path
    return files


# ---- the upload


def _upload(repo_id: str, files: dict[str, Path], written: str | None, *, public: bool) -> str:
    """Uploads the files in one commit; creates the repository, or refuses a public one unless --public agrees."""
    if get_token() is None:
        raise ModelError("no Hub token is set", where="amalgam push", fix="run `hf auth login`, or set HF_TOKEN")
    operations: list[Any] = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
    if written is not None:
        operations.append(CommitOperationAdd(CARD, io.BytesIO(written.encode())))
    api = HfApi()
    try:
        with hub.silent():
            existing = None
            with suppress(RepositoryNotFoundError):
                existing = api.model_info(repo_id, timeout=hub.SECONDS_TO_ANSWER)
            if existing is None:
                api.create_repo(repo_id, private=not public, repo_type="model")
            elif not existing.private and not public:
                fix = "add --public, or name another repository"
                raise ExperimentError(f"{repo_id} is public", where=hub.address(repo_id), fix=fix)
            commit = api.create_commit(repo_id, operations, commit_message="amalgam push", repo_type="model")
    except HfHubHTTPError as error:
        status = error.response.status_code
        what, fix = f"the Hub refused the upload with status {status}", "try again later"
        if status in {401, 403}:
            what = f"the Hub does not let this token write to {repo_id}"
            fix = "run `hf auth login` with a token that can write"
        raise ModelError(what, where=hub.address(repo_id), fix=fix) from None
    except (HTTPError, OSError, ValueError) as error:
        what = f"the upload failed ({type(error).__name__})"
        raise WorkError(what, where=repo_id, fix="run the command again; uploaded files are not sent twice") from None
    return str(commit.commit_url)


# ---- the model card


@dataclass(frozen=True)
class CardInfo:
    """Content of a model card; it has no path."""

    labels: Sequence[str]
    teachers: Mapping[str, Sequence[str]]
    max_tokens: int | None
    evaluation: Evaluation | None = None
    """Evaluation of this student in the report."""
    why_not: str = "pushed without its experiment"
    """Why the card has no evaluation."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Settings of the training by name."""

    def owners(self, label: str) -> list[str]:
        return [teacher for teacher, labels in self.teachers.items() if label in labels]


def _measured(info: CardInfo, finished: StudentFolder, config: Path) -> CardInfo:
    """Adds the report's numbers if they are those of this student."""
    run = open_run(config, [], console=Console(quiet=True))
    with working(run):
        plan(STAGES, run)
    metadata = read_metadata(finished.folder) or {}
    if run.results.get("train-student", ("",))[0] != metadata.get("fingerprint"):
        return replace(info, why_not="the experiment file has changed since this student was trained")
    experiment, encoder = run.experiment, run.experiment.student.encoder
    is_path = not hub.is_model_id(encoder.removeprefix("hub:")) or (run.base / encoder).exists()
    facts = {
        "method": method_name(experiment),
        "encoder": "a model that is not on the Hub" if is_path else encoder,
        "training texts": f"{run.result('train-student').facts['texts']:,}",
        "epochs": str(experiment.student.epochs),
        "fingerprint": str(metadata["fingerprint"]),
    }
    if experiment.teacher_names:
        facts["dropout passes per text and teacher"] = str(experiment.cache.passes)
    evaluation = evaluation_if_any(run) if "report" in run.results else None
    why_not = "the report is not up to date, or there are no labelled test texts"
    return replace(info, evaluation=evaluation, why_not=why_not, facts=facts)


def card(info: CardInfo, repo_id: str) -> str:
    """Renders the card; names from other people's models are escaped in the text and in the metadata."""
    name, results = repo_id.rpartition("/")[2], []
    if info.evaluation:
        scores, texts = info.evaluation["systems"][info.evaluation["system"]], f"{info.evaluation['n']:,}"
        results = [
            EvalResult(
                task_type="text-classification",
                dataset_type="own",
                dataset_name=f"{texts} labelled test texts",
                metric_type=kind,
                metric_value=round(score, 4),
            )
            for kind, score in (("accuracy", scores["accuracy"]), ("f1", scores["macro_f1"]))
        ]
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-classification",
        tags=["amalgam", "knowledge-amalgamation"],
        model_name=name if results else None,
        eval_results=results or None,
    )
    environment = jinja2.Environment(  # noqa: S701 - `plain` escapes Markdown as well as HTML
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"plain": plain, "score": lambda value: "-" if value is None else f"{value:.3f}"}
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        metadata=metadata.to_yaml().strip(),
        repo_id=repo_id,
        name=name,
        info=info,
        shown=LABELS_SHOWN,
        facts={"amalgam": library_versions()["amalgam"], **info.facts},
    )


def plain(text: str) -> str:
    """Returns the text in one line, with Markdown and HTML escaped."""
    return SPECIAL.sub(r"\\\1", html.escape(shown(text)))
