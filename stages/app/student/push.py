"""Uploads the student's folder and a model card to the Hub (`amalgam push`); private by default, only with --yes.

The Hub client handles the token. Names from other people's models are escaped in the card.
"""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from amalgam.data.keys import shown
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import AmalgamError, ExperimentError, ModelError, WorkError
from amalgam.pipeline.execution.plan import plan
from amalgam.pipeline.storage.fingerprint import library_versions
from amalgam.stages.app.session import open_run, working
from amalgam.stages.app.student.folder import StudentFolder, finished_student
from amalgam.stages.common.models import hub
from amalgam.stages.common.models.model_folder import read_contents
from amalgam.stages.common.models.output_folder import read_metadata
from amalgam.stages.methods import method_name
from amalgam.stages.registry import STAGES
from amalgam.stages.report.stage import evaluation_if_any

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError


CARD = "README.md"


def push(  # noqa: PLR0913 - the options of the command
    repo_id: str, config: Path, student: Path | None, *, public: bool, yes: bool, show_card: bool
) -> None:
    if not hub.is_model_id(repo_id) or "/" not in repo_id:
        what = f"{shown(repo_id)} is no repository name"
        raise ExperimentError(what, where="amalgam push", fix="run `amalgam push YOUR-NAME/a-model`")
    console, finished = Console(), finished_student(config, student)
    read_contents(finished.folder, where="amalgam push", allow_pickle=False, trust_remote_code=False)  # it is a model
    files = _files(finished.folder)
    written = None if CARD in files else card(_card_info(finished, config, student), repo_id)
    if show_card:
        console.result(written if written is not None else files[CARD].read_text("utf-8"))
        return
    sizes = {name: path.stat().st_size for name, path in files.items()}
    rows = [[name, _size(size), ""] for name, size in sizes.items()]
    if written is not None:
        rows.append([CARD, _size(len(written.encode())), "written from the report: --card shows it"])
    kind = "public" if public else "private"
    console.table(f"{finished.folder} -> {hub.address(repo_id)} ({kind})", ["file", "size", ""], rows)
    if not yes:
        console.result(f"{_size(sum(sizes.values()))} in {len(rows)} files; nothing was uploaded: add --yes")
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


def _card_info(finished: StudentFolder, config: Path, student: Path | None) -> CardInfo:

    folder = json.loads((finished.folder / "config.json").read_text("utf-8"))
    named = {int(place): str(label) for place, label in folder["id2label"].items()}
    labels = [named[place] for place in sorted(named)]
    info = CardInfo(labels, finished.teachers, finished.max_tokens)
    if student is not None:
        return CardInfo(labels, finished.teachers, finished.max_tokens, why_not="pushed without its experiment")
    return _measured(info, finished, config)


def _measured(info: CardInfo, finished: StudentFolder, config: Path) -> CardInfo:
    """Adds the report's numbers if they are those of this student."""
    _, run = open_run(config, [], console=Console(quiet=True))
    with working(run):
        plan(STAGES, run)
    metadata = read_metadata(finished.folder) or {}
    if run.results.get("train-student", ("",))[0] != metadata.get("fingerprint"):
        why = "the experiment file has changed since this student was trained"
        return CardInfo(info.labels, info.teachers, info.max_tokens, why_not=why)
    experiment = run.experiment
    facts = {
        "method": method_name(experiment),
        "encoder": _public_name(experiment.student.encoder, run.base),
        "training texts": f"{run.result('train-student').facts['texts']:,}",
        "epochs": str(experiment.student.epochs),
        "fingerprint": str(metadata["fingerprint"]),
    }
    if experiment.teachers or experiment.train_teachers:
        facts["dropout passes per text and teacher"] = str(experiment.cache.passes)
    evaluation = evaluation_if_any(run) if "report" in run.results else None
    why = "the report is not up to date, or there are no labelled test texts"
    return CardInfo(info.labels, info.teachers, info.max_tokens, evaluation, why, facts)


def _public_name(encoder: str, base: Path) -> str:
    """Returns the Hub id of the encoder, never a path."""
    here = not hub.is_model_id(encoder.removeprefix("hub:")) or (base / encoder).exists()
    return "a model that is not on the Hub" if here else encoder


def _upload(repo_id: str, files: dict[str, Path], written: str | None, *, public: bool) -> str:
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # httpx, whichever it uses

    if get_token() is None:
        raise ModelError("no Hub token is set", where="amalgam push", fix="run `hf auth login`, or set HF_TOKEN")
    operations: list[Any] = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
    if written is not None:
        operations.append(CommitOperationAdd(CARD, io.BytesIO(written.encode())))
    api = HfApi()
    try:
        with hub.silent():
            _make_repository(api, repo_id, public=public)
            commit = api.create_commit(repo_id, operations, commit_message="amalgam push", repo_type="model")
    except AmalgamError:
        raise
    except HfHubHTTPError as error:
        raise _refused(error, repo_id) from None
    except (HTTPError, OSError, ValueError) as error:
        what = f"the upload failed ({type(error).__name__})"
        raise WorkError(what, where=repo_id, fix="run the command again; uploaded files are not sent twice") from None
    return str(commit.commit_url)


def _make_repository(api: Any, repo_id: str, *, public: bool) -> None:
    """Creates the repository; refuses a public one unless --public agrees."""
    from huggingface_hub.errors import RepositoryNotFoundError

    existing = None
    with suppress(RepositoryNotFoundError):
        existing = api.model_info(repo_id, timeout=hub.SECONDS_TO_ANSWER)
    if existing is None:
        api.create_repo(repo_id, private=not public, repo_type="model")
    elif not existing.private and not public:
        what = f"{repo_id} is public"
        raise ExperimentError(what, where=hub.address(repo_id), fix="add --public, or name another repository")


def _refused(error: HfHubHTTPError, repo_id: str) -> ModelError:
    status = error.response.status_code
    if status in {401, 403}:
        what = f"the Hub does not let this token write to {repo_id}"
        return ModelError(what, where=hub.address(repo_id), fix="run `hf auth login` with a token that can write")
    return ModelError(
        f"the Hub refused the upload with status {status}", where=hub.address(repo_id), fix="try again later"
    )


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 100_000 else f"{count / 1e3:,.1f} kB"


LABELS_SHOWN = 100

SPECIAL = re.compile(r"([\\`*_{}\[\]()#+|~])")


@dataclass(frozen=True)
class CardInfo:
    """Content of a model card; it has no path."""

    labels: Sequence[str]
    teachers: Mapping[str, Sequence[str]]
    max_tokens: int | None
    evaluation: Mapping[str, Any] | None = None
    """Evaluation of this student in the report."""
    why_not: str = "it was not measured"
    facts: Mapping[str, str] = field(default_factory=dict)
    """Settings of the training by name."""


def card(info: CardInfo, repo_id: str) -> str:
    parts = [
        _front_matter(info, repo_id),
        f"# {plain(repo_id.rpartition('/')[2])}",
        _summary(info),
        _use(repo_id),
        "## Measured",
        _scores(info),
        "## Labels",
        _labels(info),
        "## How it was made",
        _made(info),
        "## Limits",
        _limits(info),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(text: str) -> str:
    """Returns the text in one line, with Markdown and HTML escaped."""
    return SPECIAL.sub(r"\\\1", html.escape(shown(text)))


def _front_matter(info: CardInfo, repo_id: str) -> str:

    data: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["amalgam", "knowledge-amalgamation"],
    }
    if info.evaluation:
        score = info.evaluation["systems"][info.evaluation["system"]]
        metrics = [
            {"type": kind, "value": round(score[key], 4)}
            for kind, key in (("accuracy", "accuracy"), ("f1", "macro_f1"))
        ]
        result = {
            "task": {"type": "text-classification"},
            "dataset": {"type": "own", "name": f"{info.evaluation['n']:,} labelled test texts"},
            "metrics": metrics,
        }
        data["model-index"] = [{"name": repo_id.rpartition("/")[2], "results": [result]}]
    return f"---\n{yaml.safe_dump(data, sort_keys=False, allow_unicode=True)}---"


def _summary(info: CardInfo) -> str:
    teachers = f" from {len(info.teachers)} teachers with different labels" if info.teachers else ""
    return (
        f"A text classifier of {len(info.labels)} labels, made with amalgam{teachers}. "
        "It is a Hugging Face model; using it does not require amalgam."
    )


def _use(repo_id: str) -> str:
    return (
        "```python\nfrom transformers import pipeline\n\n"
        f'classify = pipeline("text-classification", model="{repo_id}")\n```'
    )


def _scores(info: CardInfo) -> str:
    evaluation = info.evaluation
    if not evaluation:
        return f"No evaluation: {plain(info.why_not)}."
    chosen = [name for name in evaluation["systems"] if name != "zero-shot"]
    rows = [_row(name, evaluation["systems"][name], strong=name == evaluation["system"]) for name in chosen]
    about = (
        f"On {evaluation['n']:,} labelled test texts, over all {len(evaluation['labels'])} labels; chance is "
        f"{1 / len(evaluation['labels']):.3f}. NLL in nats, ECE: calibration error; lower is better for both."
    )
    reading = (
        "A teacher predicts only its own labels; the ensemble is one softmax over all teachers' logits. "
        f"The student's checkpoint was selected by: {plain(str(evaluation['selected_by']))}."
    )
    header = ["| system | accuracy | macro-F1 | NLL | ECE |", "|---|---|---|---|---|"]
    return "\n".join([about, "", *header, *rows, "", reading])


def _row(name: str, system: Mapping[str, Any], *, strong: bool) -> str:
    values = [
        "-" if system[key] is None else f"{system[key]:.3f}" for key in ("accuracy", "macro_f1", "nll_nats", "ece")
    ]
    cells = [plain(name), *values]
    return f"| {' | '.join(f'**{cell}**' if strong else cell for cell in cells)} |"


def _labels(info: CardInfo) -> str:
    owners = {
        label: [teacher for teacher, own in info.teachers.items() if label in own]
        for label in info.labels[:LABELS_SHOWN]
    }
    rows = [f"| {plain(label)} | {', '.join(map(plain, own)) or '-'} |" for label, own in owners.items()]
    more = len(info.labels) - len(rows)
    note = ["", f"And {more:,} more: config.json names them all."] if more > 0 else []
    return "\n".join(["| label | teachers |", "|---|---|", *rows, *note])


def _made(info: CardInfo) -> str:
    facts = {"amalgam": library_versions()["amalgam"], **info.facts}
    return "\n".join(f"- {plain(name)}: {plain(value)}" for name, value in facts.items())


def _limits(info: CardInfo) -> str:
    cut = f"- Longer texts were cut to {info.max_tokens} tokens.\n" if info.max_tokens else ""
    return (
        "- The model predicts one of these labels for every text, also for texts of other classes.\n"
        f"{cut}"
        "- The model may repeat errors of its teachers. The licences of the teachers and their texts apply to it."
    )
