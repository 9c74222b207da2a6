"""Resolves model references to local folders with a digest, before anything heavy is imported.

A reference is a folder, package:module/folder, or a Hub id. The result is a local folder and the digest of its
files that determine behaviour. For the Hub and for packages the first digest is pinned.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from amalgam.pipeline.errors import ModelError
from amalgam.stages.common.models import hub as model_hub
from amalgam.stages.common.models import model_folder
from amalgam.stages.common.models.model_folder import ATTENTIVE

_Item = TypeVar("_Item")

_Result = TypeVar("_Result")


class Pins(Protocol):
    """Values that a workspace decided once: the first value of a name wins and is returned from then on."""

    def pinned(self, kind: str, name: str) -> str | None: ...

    def pin(self, kind: str, name: str, value: str) -> str: ...


@dataclass(frozen=True)
class ModelFiles:
    given: str
    folder: Path
    digest: str
    """sha256 over the sorted (name, sha256) of the files that determine behaviour."""
    commit: str | None
    weights: Literal["safetensors", "pickle"]
    config: dict[str, Any]


def resolve(  # noqa: PLR0913 - one argument per setting of a model
    given: str,
    *,
    revision: str | None,
    base: Path,
    pins: Pins,
    digest_of: Callable[[Path], str],
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    where: str | None = None,
) -> ModelFiles:
    """Resolves one reference; relative folders start from `base`, and messages name the field `where`."""
    request = Request(given, revision, allow_pickle, trust_remote_code, where)
    return _Finder(request, base, pins, digest_of, _Hub()).find()()


def resolve_all(references: Sequence[Mapping[str, Any]]) -> list[ModelFiles]:
    """Resolves references with `resolve`'s arguments. One error lists all problems, before weights are downloaded."""
    hub = _Hub()

    def find(reference: Mapping[str, Any]) -> Callable[[], ModelFiles]:
        settings = {"where": None, **reference}
        base, pins, digest_of, field = (settings.pop(name) for name in ("base", "pins", "digest_of", "where"))
        return _Finder(Request(**settings, field=field), base, pins, digest_of, hub).find()

    return for_all(lambda finish: finish(), for_all(find, references))


def needs_network(given: str, *, revision: str | None, base: Path, pins: Pins) -> bool:
    """Returns whether `resolve` would send a request: not for folders, packages, and pinned models in the cache."""
    place = place_of(Request(given, revision), base)
    if not isinstance(place, str):
        return False
    commit = _known_commit(place, revision, pins)
    pinned = commit and any(pins.pinned("digest", _digest_name(place, commit, code=code)) for code in (False, True))
    return not pinned or model_hub.cached(place, commit) is None


def newer_revision(given: str, *, revision: str | None, base: Path, pins: Pins) -> str | None:
    """Returns the current commit of the revision if it differs from the pinned one, else None.

    Folders, packages, full commits and an unreachable Hub give None, never an error.
    """
    try:
        place = place_of(Request(given, revision), base)
        pinned = pins.pinned("hub", _revision_name(place, revision)) if isinstance(place, str) else None
        now = model_hub.ask(place, revision, where=given) if isinstance(place, str) and pinned else None
    except ModelError:
        return None
    return now.commit if now and now.commit != pinned else None


def same_models(named: Mapping[str, ModelFiles]) -> list[list[str]]:
    """Returns groups of names whose files are the same."""
    groups: dict[str, list[str]] = {}
    for name, files in named.items():
        groups.setdefault(files.digest, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


@dataclass(frozen=True)
class Request:
    given: str
    revision: str | None
    allow_pickle: bool = False
    trust_remote_code: bool = False
    field: str | None = None

    @property
    def where(self) -> str:
        return f"{self.field}: {self.given}" if self.field else self.given


@dataclass
class _Hub:
    """Sends no further request after the first one without a response."""

    reachable: bool = True

    def ask(self, model_id: str, revision: str | None, where: str) -> model_hub.HubModel | None:
        if not self.reachable:
            return None
        model = model_hub.ask(model_id, revision, where=where)
        self.reachable = model is not None
        return model


@dataclass(frozen=True)
class _Finder:
    request: Request
    base: Path
    pins: Pins
    digest_of: Callable[[Path], str]
    hub: _Hub

    def find(self) -> Callable[[], ModelFiles]:
        """Checks everything but the weights, and returns a function that downloads and digests them."""
        place = place_of(self.request, self.base)
        if isinstance(place, str):
            return self._find_on_hub(place)
        request = self.request
        model_folder.read_config(place, where=request.where, trust_remote_code=request.trust_remote_code)
        return partial(self._identify, place, _package_pin(request.given), None)

    def _find_on_hub(self, model_id: str) -> Callable[[], ModelFiles]:
        revision, name = self.request.revision, _revision_name(model_id, self.request.revision)
        commit = _known_commit(model_id, revision, self.pins)
        used = self._as_first_used(model_id, commit)
        if used:
            return lambda: used
        model = self._ask(model_id, commit or revision)
        if model is None:
            cached = self._find_in_cache(model_id, commit)
            return lambda: cached
        if not model_hub.is_commit(revision) and self.pins.pin("hub", name, model.commit) != model.commit:
            return self._find_on_hub(model_id)  # another process was first: its commit counts
        return partial(self._download, model, self._check_and_fetch_light(model, commit or revision))

    def _as_first_used(self, model_id: str, commit: str | None) -> ModelFiles | None:
        """Returns the cached files of the pinned commit if all exist unchanged, without any request."""
        pinned = self.pins.pinned("digest", self._digest_name(model_id, commit)) if commit else None
        folder = model_hub.cached(model_id, commit) if pinned else None
        if folder is None:
            return None
        try:
            files = self._read(folder, commit)
        except ModelError:
            return None
        return files if files.digest == pinned else None

    def _find_in_cache(self, model_id: str, commit: str | None) -> ModelFiles:
        revision = self.request.revision
        folder = model_hub.cached(model_id, commit or revision)
        if folder is None:
            what = f"the Hub cannot be reached, and {model_id} is not in this machine's cache"
            raise ModelError(what, where=self.request.where, fix=f"go online once; {self._folder_hint()}")
        if not model_hub.is_commit(revision):
            self.pins.pin("hub", _revision_name(model_id, revision), folder.name)
        return self._identify(folder, self._digest_name(model_id, folder.name), folder.name)

    def _check_and_fetch_light(self, model: model_hub.HubModel, revision: str | None) -> list[str]:
        """Downloads the small files, checks that the weights may be loaded, and returns the weights' names."""
        where, trusted = self.request.where, self.request.trust_remote_code
        light = model_folder.light_names(model.names, trust_remote_code=trusted)
        folder = model_hub.fetch(model, light, where=where, revision=revision or model_hub.DEFAULT_REVISION)
        config = model_folder.read_config(folder, where=where, trust_remote_code=trusted)
        allowed = self.request.allow_pickle
        chosen, _ = model_folder.choose_weights(model.names, config, where=where, allow_pickle=allowed)
        return [chosen, *model_folder.shards(folder / chosen, where=where)]

    def _download(self, model: model_hub.HubModel, weights: list[str]) -> ModelFiles:
        folder = model_hub.fetch(model, weights, where=self.request.where)
        return self._identify(folder, self._digest_name(model.id, model.commit), model.commit)

    def _identify(self, folder: Path, pin: str | None, commit: str | None) -> ModelFiles:
        files = self._read(folder, commit)
        if pin and self.pins.pin("digest", pin, files.digest) != files.digest:
            raise ModelError(
                f"the files of {self.request.given} are not those that this workspace first used",
                where=f"{self.request.where}: {folder}",
                fix="restore them, or delete the folder and download the model again; after an intended change, "
                "name a new revision, or a copy of the folder",
            )
        return files

    def _read(self, folder: Path, commit: str | None) -> ModelFiles:
        request = self.request
        contents = model_folder.read_contents(
            folder,
            where=request.where,
            allow_pickle=request.allow_pickle,
            trust_remote_code=request.trust_remote_code,
        )
        digest = model_folder.digest(folder, contents.names, self.digest_of, where=request.where)
        return ModelFiles(request.given, folder, digest, commit, contents.weights, contents.config)

    def _ask(self, model_id: str, revision: str | None) -> model_hub.HubModel | None:
        try:
            return self.hub.ask(model_id, revision, self.request.where)
        except ModelError as error:
            error.fix = f"{error.fix}; {self._folder_hint()}"
            raise

    def _folder_hint(self) -> str:
        if self.request.given.startswith("hub:"):
            return "or give a folder"
        return f"if a folder was meant: {_nearest(self.base / self.request.given)}"

    def _digest_name(self, model_id: str, commit: str | None) -> str:
        return _digest_name(model_id, commit, code=self.request.trust_remote_code)


def place_of(request: Request, base: Path) -> Path | str:
    """Returns an existing folder, or the id of a model on the Hub."""
    given, where = request.given, request.where
    if "://" in given:
        # Not repeated in the message: addresses may carry passwords.
        fix = "write the Hub id (org/name), a folder, or package:module/folder"
        raise ModelError("a model is not named by a web address", where=request.field, fix=fix)
    if given.startswith("package:"):
        return _package_folder(given.removeprefix("package:"), where)
    if given.startswith("hub:"):
        if not model_hub.is_model_id(given.removeprefix("hub:")):
            raise ModelError(f"{given!r} is not a Hub id", where=where, fix="write hub:org/name")
        return given.removeprefix("hub:")
    folder = base / Path(given).expanduser()
    looks_like_id = model_hub.is_model_id(given)
    if folder.is_dir() and looks_like_id and "/" in given:
        what = f"{given} could be the folder {folder} or a model on the Hub"
        raise ModelError(what, where=where, fix=f"write ./{given} for the folder, hub:{given} for the Hub")
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(
            f"{given} is a file, not a model's folder", where=where, fix="name the folder that contains it"
        )
    if looks_like_id:
        return given
    raise ModelError(f"there is no folder {given}", where=where, fix=_nearest(folder))


def _package_folder(reference: str, where: str) -> Path:
    """Finds the folder by the package's spec, because importing the package would run its code."""
    module, *inner = [*reference.split("/", 1)[0].split("."), *Path(reference).parts[1:]]
    try:
        spec = importlib.util.find_spec(module) if module.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    if not roots:
        raise ModelError(f"there is no installed package {module!r}", where=where, fix=f"pip install {module}")
    if ".." in inner:
        raise ModelError("a package reference may not leave the package", where=where, fix="remove the ..")
    folders = [root.joinpath(*inner) for root in roots]
    present = [folder for folder in folders if folder.is_dir()]
    if not present:
        what = f"the package {module!r} has no folder {'/'.join(inner)}"
        raise ModelError(what, where=where, fix=_nearest(folders[0]))
    return present[0]


def _package_pin(given: str) -> str | None:
    """Returns a pin with the package's version, so that an upgrade does not count as damage; None for a folder."""
    if not given.startswith("package:"):
        return None
    module = given.removeprefix("package:").split("/", 1)[0].split(".")[0]
    names = importlib.metadata.packages_distributions().get(module, [])
    return "@".join([given, *(f"{name}=={importlib.metadata.version(name)}" for name in sorted(set(names)))])


def _known_commit(model_id: str, revision: str | None, pins: Pins) -> str | None:
    return revision if model_hub.is_commit(revision) else pins.pinned("hub", _revision_name(model_id, revision))


def _revision_name(model_id: str, revision: str | None) -> str:
    return f"{model_id}@{revision or model_hub.DEFAULT_REVISION}"


def _digest_name(model_id: str, commit: str | None, *, code: bool) -> str:
    """Returns a separate name with trusted code, because its files change the digest."""
    return f"{model_id}@{commit}" + ("+code" if code else "")


def _nearest(folder: Path) -> str:
    """Returns a hint with the folders of the nearest existing parent."""
    missing = Path(os.path.abspath(folder))  # noqa: PTH100 - .. is to be taken literally, links are not to be followed
    while not missing.parent.is_dir():
        missing = missing.parent
    siblings = sorted(path.name for path in missing.parent.iterdir() if path.is_dir() and not path.name.startswith("."))
    close = difflib.get_close_matches(missing.name, siblings, n=3, cutoff=0.4) or siblings[:5]
    return f"{missing.parent} has {', '.join(close)}" if close else f"{missing.parent} has no folders"


def for_all(
    function: Callable[[_Item], _Result], items: Iterable[_Item], *, cannot: str = "be used", where: str | None = None
) -> list[_Result]:
    """Applies the function to all items; one error lists every model that fails."""
    results, errors = [], []
    for item in items:
        try:
            results.append(function(item))
        except ModelError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        whats = "; ".join(f"{error.what} ({error.where})" for error in errors)
        fixes = dict.fromkeys(error.fix for error in errors if error.fix)
        raise ModelError(f"{len(errors)} models cannot {cannot}: {whats}", where=where, fix="; ".join(fixes))
    return results


DEPTH = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")


def depth_of(files: ModelFiles) -> int:
    """Returns the number of transformer layers; the embedding does not count."""
    return _number(files, DEPTH)


def _number(files: ModelFiles, names: Sequence[str]) -> int:
    """Reads one number from config.json, or from transformers' defaults, which the file leaves out."""
    number = next((files.config[name] for name in names if name in files.config), None)
    if number is None:
        number = getattr(auto_config(files).get_text_config(), names[0], None)
    if not isinstance(number, int) or number < 1:
        what = f"config.json has no {names[0]}"
        raise ModelError(what, where=str(files.folder), fix="use an architecture of the transformers library")
    return number


def auto_config(files: ModelFiles, *, trust_remote_code: bool = False) -> Any:
    """Returns the configuration of transformers; registers amalgam's own architecture first if the files need it."""
    from transformers import AutoConfig

    if files.config.get("model_type") == ATTENTIVE:
        import amalgam.stages.common.models.attentive  # noqa: F401 - registers it
    return AutoConfig.from_pretrained(str(files.folder), local_files_only=True, trust_remote_code=trust_remote_code)


def label_names(files: ModelFiles, *, labels: list[str] | None, rename: dict[str, str], teacher: str) -> list[str]:
    """Returns the teacher's label names, renamed, by position of its outputs."""
    where = f"teacher {teacher}: {files.folder / 'config.json'}"
    own = _own_labels(files.config, where)
    names = labels if labels is not None else own
    if len(names) != len(own):
        raise ModelError(_unmatched(names, own), where=where, fix=f"give exactly {len(own)} labels, by position")
    unknown = sorted(set(rename) - set(names))
    if unknown:
        close = difflib.get_close_matches(unknown[0], names, n=1, cutoff=0.4) or names[:5]
        what = f"rename: the teacher has no label {', '.join(map(repr, unknown))}"
        raise ModelError(what, where=where, fix=f"its labels are like {', '.join(map(repr, close))}")
    renamed = [rename.get(name, name) for name in names]
    _refuse_labels(renamed, given=labels is not None, where=where)
    if files.config.get("problem_type") in ("multi_label_classification", "regression"):
        what = f"the teacher does {files.config['problem_type']}: its outputs are no distribution over labels"
        raise ModelError(what, where=where, fix="use a teacher that chooses one label per text")
    return renamed


def _own_labels(config: Mapping[str, Any], where: str) -> list[str]:
    """Returns the labels of id2label; transformers leaves it out of the file for labels without names."""
    id2label = config.get("id2label")
    if id2label is None:
        return [f"LABEL_{index}" for index in range(int(config.get("num_labels") or 2))]
    id2label = id2label if isinstance(id2label, dict) else {"": id2label}
    positions = {int(key): value for key, value in id2label.items() if str(key).isdecimal()}
    names = [positions.get(index) for index in range(len(id2label))]
    if not all(isinstance(name, str) and name for name in names):
        fix = "give labels: the names by position; or mend id2label to count 0, 1, 2, ..."
        raise ModelError("id2label does not name every output, from 0 on, by a text", where=where, fix=fix)
    return [str(name) for name in names]


def _refuse_labels(names: list[str], *, given: bool, where: str) -> None:
    if len(names) < 2:
        fix = "a teacher must choose between labels: leave it out, or give one with two labels or more"
        raise ModelError(
            f"the teacher has one label ({', '.join(names)}), so it is never uncertain", where=where, fix=fix
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        what = f"the teacher has two outputs named {', '.join(map(repr, twice))}"
        raise ModelError(what, where=where, fix="give labels: a different name for each position")
    blank = [name for name in names if re.fullmatch(r"LABEL_\d+", name)]
    if blank and not given:
        what = f"the model has no names for its labels: {', '.join(blank[:5])}"
        raise ModelError(what, where=where, fix=f"give labels: the {len(names)} names, by position")


def _unmatched(names: Sequence[str], own: Sequence[str]) -> str:
    if len(names) > len(own):
        return f"labels: there is no output for {', '.join(map(repr, names[len(own) :]))}: the model has {len(own)}"
    left = ", ".join(f"{index} ({own[index]!r})" for index in range(len(names), len(own)))
    return f"labels: {len(names)} names for {len(own)} outputs: no name for output {left}"
