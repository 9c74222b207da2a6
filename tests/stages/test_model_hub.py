"""Models from the Hub: pinned once, downloaded once, then offline; and every refusal in words a person can act on.

Each request comes from a process of its own, pointed at a Hub on this machine by HF_ENDPOINT alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from amalgam.tests.forking import LIGHT, Forked
from amalgam.tests.stages.fake_hub import FakeHub, small_model
from amalgam.tests.workspaces import finish, flip_bit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass
class Asker:
    """A workspace and a cache; `home` names the cache, so that two workspaces can share one."""

    hub: FakeHub
    folder: Path
    home: Path
    env: dict[str, str] = field(default_factory=dict)

    def __call__(self, *questions: dict[str, Any]) -> list[Any]:
        self.folder.mkdir(exist_ok=True)
        environment = self.hub.env(self.home, **self.env)
        process = Forked([json.dumps(questions)], self.folder, environment, "amalgam.tests.stages.ask_hub", LIGHT)
        run = finish(process)
        assert (run.code, run.err) == (0, ""), run.err
        return list(run.json)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as running:
        yield running


@pytest.fixture
def ask(hub: FakeHub, tmp_path: Path) -> Asker:
    return Asker(hub, tmp_path / "work", tmp_path / "home")


RESOLVE = {"function": "resolve", "given": "org/news"}


def test_main_is_pinned_at_first_use_and_later_runs_need_no_hub(hub: FakeHub, ask: Asker, tmp_path: Path) -> None:
    first = hub.push("org/news", small_model(tmp_path / "news"))
    wanted = {"function": "needs_network", "given": "org/news"}
    before, answers, after = ask(wanted, RESOLVE, wanted)
    assert (before, answers["commit"], after) == (True, first, False)
    second = hub.push("org/news", small_model(tmp_path / "news", numbers=b"87654321"))
    hub.requests.clear()
    again, *_ = ask(RESOLVE, {**RESOLVE, "given": "hub:org/news"})
    assert again == answers
    assert hub.requests == []
    newer, fixed = ask(
        {"function": "newer_revision", "given": "org/news"},
        {"function": "newer_revision", "given": "org/news", "revision": second},
    )
    assert (newer, fixed) == (second, None)
    del hub.repositories["org/news"]
    assert ask(RESOLVE, {"function": "newer_revision", "given": "org/news"}) == [answers, None]


def test_only_what_a_classifier_needs_is_downloaded(hub: FakeHub, ask: Asker, tmp_path: Path) -> None:
    folder = small_model(tmp_path / "news")
    for name in (
        "README.md",
        "pytorch_model.bin",
        "model.onnx",
        "optimizer.pt",
        "tf_model.h5",
        "custom.py",
        "vocab.txt",
    ):
        (folder / name).write_text(name)
    small_model(folder / "openvino")
    hub.push("org/news", folder)
    ask(RESOLVE)
    assert sorted(hub.downloads()) == ["README.md", "config.json", "model.safetensors", "tokenizer.json", "vocab.txt"]


def test_a_fixed_commit_and_a_branch_and_a_tag_are_what_they_say(hub: FakeHub, ask: Asker, tmp_path: Path) -> None:
    old = hub.push("org/news", small_model(tmp_path / "news"))
    new = hub.push("org/news", small_model(tmp_path / "news", numbers=b"87654321"), branch="refs/pr/1")
    hub.push("org/news", small_model(tmp_path / "news", numbers=b"11111111"))
    fixed, branch, main = ask({**RESOLVE, "revision": old}, {**RESOLVE, "revision": "refs/pr/1"}, RESOLVE)
    assert (fixed["commit"], branch["commit"]) == (old, new)
    assert len({fixed["digest"], branch["digest"], main["digest"]}) == 3


def test_a_warm_cache_serves_a_new_workspace_without_the_hub(hub: FakeHub, ask: Asker, tmp_path: Path) -> None:
    hub.push("org/news", small_model(tmp_path / "news"))
    answers = ask(RESOLVE)
    hub.push("org/news", small_model(tmp_path / "news", numbers=b"87654321"))
    offline = Asker(hub, tmp_path / "elsewhere", ask.home, {"HF_HUB_OFFLINE": "1"})
    hub.requests.clear()
    assert offline(RESOLVE) == answers
    assert hub.requests == []
    online = Asker(hub, tmp_path / "elsewhere", ask.home)
    assert online(RESOLVE) == answers


def test_all_missing_models_come_in_one_error_and_nothing_large_is_fetched(
    hub: FakeHub, ask: Asker, tmp_path: Path
) -> None:
    hub.push("org/news", small_model(tmp_path / "news"))
    references = [{"given": given, "where": f"teachers.{given}"} for given in ("org/news", "org/gone", "lost")]
    [error] = ask({"function": "resolve_all", "references": references})
    assert error["what"].startswith("2 models ")
    assert "org/gone" in error["what"]
    assert "teachers.lost" in error["what"]
    assert "model.safetensors" not in hub.downloads()
    assert ask({"function": "resolve_all", "references": references[:1]}) == [1]


def test_a_busy_hub_is_asked_once_and_not_for_each_model(hub: FakeHub, ask: Asker) -> None:
    hub.busy = True
    references = [{"given": given} for given in ("org/a", "org/b", "org/c")]
    [error] = ask({"function": "resolve_all", "references": references})
    assert error["what"].startswith("3 models ")
    assert all(f"org/{name} " in error["what"] for name in "abc")
    assert len(hub.requests) == 1


def test_an_unreachable_hub_fails_at_once(ask: Asker) -> None:
    with FakeHub() as gone:
        pass
    [error, newer] = Asker(gone, ask.folder, ask.home)(RESOLVE, {"function": "newer_revision", "given": "org/news"})
    assert "org/news" in error["what"]
    assert newer is None


@pytest.mark.parametrize("env", [{}, {"HF_TOKEN": "hf_canary_of_the_user"}])
def test_the_error_of_a_gated_model_has_the_address_of_its_licence(
    hub: FakeHub, ask: Asker, tmp_path: Path, env: dict[str, str]
) -> None:
    hub.push("org/news", small_model(tmp_path / "news"), gated=True)
    ask.env = env
    [error] = ask(RESOLVE)
    assert "gated" in error["what"]
    assert all(piece in error["fix"] for piece in (f"{hub.address}/org/news", "hf auth login"))
    pins = list((ask.folder / "workspace/pins").iterdir())
    assert pins
    assert "canary" not in json.dumps(error)


def test_neither_token_nor_password_reaches_a_message_or_a_pin(hub: FakeHub, ask: Asker, tmp_path: Path) -> None:
    hub.push("org/news", small_model(tmp_path / "news"))
    address = hub.address.replace("http://", "http://me:canary_password@")
    ask.env = {"HF_TOKEN": "hf_canary_of_the_user", "HF_ENDPOINT": address}
    spoken = ask(RESOLVE, {**RESOLVE, "given": "org/gone"}, {**RESOLVE, "revision": "v9"})
    assert spoken[0]["commit"]
    assert "no model org/gone" in spoken[1]["what"]
    hub.busy = True
    spoken += ask({**RESOLVE, "given": "org/other"})
    pins = list((ask.folder / "workspace/pins").iterdir())
    assert pins
    assert "canary" not in json.dumps(spoken) + "".join(path.read_text() for path in pins)


def test_a_missing_revision_differs_from_a_missing_model(hub: FakeHub, ask: Asker, tmp_path: Path) -> None:
    hub.push("org/news", small_model(tmp_path / "news"))
    [error] = ask({**RESOLVE, "revision": "v9"})
    assert "org/news" in error["what"]
    assert "'v9'" in error["what"]


def test_a_folder_that_was_meant_is_shown_when_the_hub_has_no_such_model(hub: FakeHub, ask: Asker) -> None:
    small_model(ask.folder / "models" / "news-small")
    [error] = ask({**RESOLVE, "given": "models/news-smal"})
    assert "news-small" in error["fix"]
    assert hub.requests


@pytest.mark.parametrize(
    ("change", "piece"),
    [({"auto_map": {"AutoModel": "code.Model"}}, "own code"), ({"pickle": True}, "only pickle weights")],
)
def test_an_unsafe_model_is_refused_before_its_weights_are_downloaded(
    hub: FakeHub, ask: Asker, tmp_path: Path, change: dict[str, Any], piece: str
) -> None:
    folder = small_model(tmp_path / "news", **change)
    if "pickle" in change:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    hub.push("org/news", folder)
    [error] = ask(RESOLVE)
    assert piece in error["what"]
    assert not {"model.safetensors", "pytorch_model.bin"} & set(hub.downloads())


def _weights(values: dict[str, str]) -> Path:
    from pathlib import Path

    return Path(values["folder"]) / "model.safetensors"


def test_a_flipped_bit_in_the_cache_is_found_even_at_first_use(hub: FakeHub, ask: Asker, tmp_path: Path) -> None:
    hub.push("org/news", small_model(tmp_path / "news"))
    [answers] = ask(RESOLVE)
    flip_bit(_weights(answers).resolve(), -1)
    for workspace in (ask, Asker(hub, tmp_path / "new", ask.home)):
        [error] = workspace(RESOLVE)
        assert "bytes" in error["what"]
        assert "model.safetensors" in error["where"]


def test_a_small_file_changed_in_the_cache_is_found_by_the_pinned_digest(
    hub: FakeHub, ask: Asker, tmp_path: Path
) -> None:
    hub.push("org/news", small_model(tmp_path / "news"))
    [answers] = ask(RESOLVE)
    (_weights(answers).parent / "tokenizer.json").resolve().write_text('{"version": "9.9"}')
    [error] = ask(RESOLVE)
    assert "workspace" in error["what"]


def test_a_cut_off_download_is_completed(hub: FakeHub, ask: Asker, tmp_path: Path) -> None:
    hub.push("org/news", small_model(tmp_path / "news"))
    [answers] = ask(RESOLVE)
    for path in (_weights(answers).resolve(), _weights(answers)):
        path.unlink()
    hub.requests.clear()
    assert ask(RESOLVE) == [answers]
    assert hub.downloads() == ["model.safetensors"]


def test_a_pin_without_files_is_kept_to_even_when_the_branch_has_moved(
    hub: FakeHub, ask: Asker, tmp_path: Path
) -> None:
    first = hub.push("org/news", small_model(tmp_path / "news"))
    ask(RESOLVE)
    hub.push("org/news", small_model(tmp_path / "news", numbers=b"87654321"))
    fresh = Asker(hub, ask.folder, tmp_path / "another-machine")
    assert fresh(RESOLVE)[0]["commit"] == first
