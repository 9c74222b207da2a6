"""`amalgam push`: the student's folder and its card to the Hub. Private unless told, and nothing without --yes.

The token is the Hub client's own (HF_TOKEN, or what `hf auth login` stored): it is never read, shown or written here.
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
from amalgam.pipeline.execution.versions import library_versions
from amalgam.stages.app.session import open_run, working
from amalgam.stages.app.student.folder import StudentFolder, finished_student
from amalgam.stages.common.models import hub
from amalgam.stages.common.models.model_folder import read_contents
from amalgam.stages.common.models.output_folder import read_mark
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
        what = f"{shown(repo_id)} is no name on the Hub"
        raise ExperimentError(what, where="amalgam push", fix="amalgam push YOUR-NAME/a-model")
    console, finished = Console(), finished_student(config, student)
    read_contents(finished.folder, where="amalgam push", allow_pickle=False, trust_remote_code=False)  # it is a model
    files = _files(finished.folder)
    written = None if CARD in files else card(_known(finished, config, student), repo_id)
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
        console.result(f"{_size(sum(sizes.values()))} in {len(rows)} files; nothing was uploaded: --yes does it")
        return
    console.result(_upload(repo_id, files, written, public=public))


def _files(folder: Path) -> dict[str, Path]:
    """Everything in the folder; a link could lead to what nobody meant to publish."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            fix = "put the file itself there, or remove the link"
            raise ModelError("the student's folder holds a link", where=str(path), fix=fix)
        if path.is_file():
            found[path.relative_to(folder).as_posix()] = path
    return found


def _known(finished: StudentFolder, config: Path, student: Path | None) -> CardInfo:

    folder = json.loads((finished.folder / "config.json").read_text("utf-8"))
    named = {int(place): str(label) for place, label in folder["id2label"].items()}
    labels = [named[place] for place in sorted(named)]
    known = CardInfo(labels, finished.teachers, finished.max_tokens)
    if student is not None:
        return CardInfo(labels, finished.teachers, finished.max_tokens, why_not="pushed without its experiment")
    return _measured(known, finished, config)


def _measured(known: CardInfo, finished: StudentFolder, config: Path) -> CardInfo:
    """With the report's numbers, if they are of this very student."""
    _, run = open_run(config, [], console=Console(quiet=True))
    with working(run):
        plan(STAGES, run)
    mark = read_mark(finished.folder) or {}
    if run.results.get("train-student", ("",))[0] != mark.get("fingerprint"):
        why = "the experiment file has changed since this student was trained"
        return CardInfo(known.labels, known.teachers, known.max_tokens, why_not=why)
    said = run.experiment
    facts = {
        "method": method_name(said),
        "begun from": _public_name(said.student.encoder, run.base),
        "texts learned from": f"{run.result('train-student').facts['texts']:,}",
        "epochs": str(said.student.epochs),
        "fingerprint": str(mark["fingerprint"]),
    }
    if said.teachers or said.train_teachers:
        facts["dropout passes per text and teacher"] = str(said.cache.passes)
    found = evaluation_if_any(run) if "report" in run.results else None
    why = "the report is not up to date, or there are no labelled test texts"
    return CardInfo(known.labels, known.teachers, known.max_tokens, found, why, facts)


def _public_name(encoder: str, base: Path) -> str:
    """A Hub id; never where a folder lies."""
    here = not hub.is_model_id(encoder.removeprefix("hub:")) or (base / encoder).exists()
    return "a model that is not on the Hub" if here else encoder


def _upload(repo_id: str, files: dict[str, Path], written: str | None, *, public: bool) -> str:
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # httpx, whichever it uses

    if get_token() is None:
        raise ModelError("nobody is logged in to the Hub", where="amalgam push", fix="hf auth login, or set HF_TOKEN")
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
        what = f"the upload broke off ({type(error).__name__})"
        raise WorkError(what, where=repo_id, fix="run the command again: what has arrived is not sent twice") from None
    return str(commit.commit_url)


def _make_repository(api: Any, repo_id: str, *, public: bool) -> None:
    """An existing one is as public as it is: what was to be private never goes where all can read it."""
    from huggingface_hub.errors import RepositoryNotFoundError

    there = None
    with suppress(RepositoryNotFoundError):
        there = api.model_info(repo_id, timeout=hub.SECONDS_TO_ANSWER)
    if there is None:
        api.create_repo(repo_id, private=not public, repo_type="model")
    elif not there.private and not public:
        what = f"{repo_id} is public already"
        raise ExperimentError(what, where=hub.address(repo_id), fix="--public agrees to that; or name another")


def _refused(error: HfHubHTTPError, repo_id: str) -> ModelError:
    status = error.response.status_code
    if status in {401, 403}:
        what = f"the Hub does not let this token write to {repo_id}"
        return ModelError(what, where=hub.address(repo_id), fix="a token that may write: hf auth login")
    return ModelError(
        f"the Hub refused the upload with status {status}", where=hub.address(repo_id), fix="try again later"
    )


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 100_000 else f"{count / 1e3:,.1f} kB"


LABELS_SHOWN = 100

SPECIAL = re.compile(r"([\\`*_{}\[\]()#+|~])")


@dataclass(frozen=True)
class CardInfo:
    """What is to be told of a student. Nothing of it is a path."""

    labels: Sequence[str]
    teachers: Mapping[str, Sequence[str]]
    max_tokens: int | None
    evaluation: Mapping[str, Any] | None = None
    """The report's, if it is of this very student."""
    why_not: str = "it was not measured"
    facts: Mapping[str, str] = field(default_factory=dict)
    """How it was made."""


def card(known: CardInfo, repo_id: str) -> str:
    parts = [
        _front_matter(known, repo_id),
        f"# {plain(repo_id.rpartition('/')[2])}",
        _summary(known),
        _use(repo_id),
        "## Measured",
        _scores(known),
        "## Labels",
        _labels(known),
        "## How it was made",
        _made(known),
        "## Limits",
        _limits(known),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(text: str) -> str:
    """Any text as itself: no markup of Markdown or HTML, one line."""
    return SPECIAL.sub(r"\\\1", html.escape(shown(text)))


def _front_matter(known: CardInfo, repo_id: str) -> str:

    data: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["amalgam", "knowledge-amalgamation"],
    }
    if known.evaluation:
        score = known.evaluation["systems"][known.evaluation["system"]]
        metrics = [
            {"type": kind, "value": round(score[key], 4)}
            for kind, key in (("accuracy", "accuracy"), ("f1", "macro_f1"))
        ]
        result = {
            "task": {"type": "text-classification"},
            "dataset": {"type": "own", "name": f"{known.evaluation['n']:,} labelled test texts"},
            "metrics": metrics,
        }
        data["model-index"] = [{"name": repo_id.rpartition("/")[2], "results": [result]}]
    return f"---\n{yaml.safe_dump(data, sort_keys=False, allow_unicode=True)}---"


def _summary(known: CardInfo) -> str:
    teachers = f" from {len(known.teachers)} teachers that each knew some of them" if known.teachers else ""
    return (
        f"A text classifier of {len(known.labels)} labels, made with amalgam{teachers}. "
        "A plain Hugging Face folder: nothing of amalgam is needed to use it."
    )


def _use(repo_id: str) -> str:
    return (
        "```python\nfrom transformers import pipeline\n\n"
        f'classify = pipeline("text-classification", model="{repo_id}")\n```'
    )


def _scores(known: CardInfo) -> str:
    found = known.evaluation
    if not found:
        return f"There are no numbers: {plain(known.why_not)}."
    chosen = [name for name in found["systems"] if name != "zero-shot"]
    rows = [_row(name, found["systems"][name], strong=name == found["system"]) for name in chosen]
    about = (
        f"On {found['n']:,} labelled test texts, over all {len(found['labels'])} labels; chance is "
        f"{1 / len(found['labels']):.3f}. NLL in nats, ECE: calibration error; lower is better for both."
    )
    reading = (
        "A teacher can only be right on its own labels; the ensemble is one softmax over all teachers' logits. "
        f"The student's checkpoint was selected by: {plain(str(found['selected_by']))}."
    )
    header = ["| system | accuracy | macro-F1 | NLL | ECE |", "|---|---|---|---|---|"]
    return "\n".join([about, "", *header, *rows, "", reading])


def _row(name: str, system: Mapping[str, Any], *, strong: bool) -> str:
    values = [
        "-" if system[key] is None else f"{system[key]:.3f}" for key in ("accuracy", "macro_f1", "nll_nats", "ece")
    ]
    cells = [plain(name), *values]
    return f"| {' | '.join(f'**{cell}**' if strong else cell for cell in cells)} |"


def _labels(known: CardInfo) -> str:
    owners = {
        label: [teacher for teacher, own in known.teachers.items() if label in own]
        for label in known.labels[:LABELS_SHOWN]
    }
    rows = [f"| {plain(label)} | {', '.join(map(plain, own)) or '-'} |" for label, own in owners.items()]
    more = len(known.labels) - len(rows)
    note = ["", f"And {more:,} more: config.json names them all."] if more > 0 else []
    return "\n".join(["| label | taught by |", "|---|---|", *rows, *note])


def _made(known: CardInfo) -> str:
    said = {"amalgam": library_versions()["amalgam"], **known.facts}
    return "\n".join(f"- {plain(name)}: {plain(value)}" for name, value in said.items())


def _limits(known: CardInfo) -> str:
    cut = f"- Longer texts were cut to {known.max_tokens} tokens.\n" if known.max_tokens else ""
    return (
        "- It knows these labels and no other: a text of none of them gets one all the same.\n"
        f"{cut}"
        "- What its teachers had wrong, it may have learned. Their licences and those of their texts hold for it too."
    )
