"""Resolves model references to local folders with a digest, before anything heavy is imported.

A reference is a folder, package:module/folder, or a Hub id. The result is a local folder and the digest of its
files that determine behaviour. For the Hub and for packages the first digest is pinned. A teacher may also be a file
of predictions.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from amalgam.data.hub import DEFAULT_REVISION
from amalgam.data.keys import shown
from amalgam.pipeline.errors import ModelError, nearest
from amalgam.pipeline.input_files import SUFFIXES, FileMark, InputFile, changed_error, unchanged
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.store import Store
from amalgam.pipeline.user_paths import readable, user_path, without_backslashes
from amalgam.stages.common.models import hub as model_hub
from amalgam.stages.common.models import model_folder
from amalgam.stages.common.models.model_folder import ATTENTIVE, STATIC

if TYPE_CHECKING:
    from amalgam.pipeline.config.schema import Corpus

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

FP32_BYTES = 4

LAST_LAYER = 0
"""A number of blocks of hidden states that means the last layer alone."""

DEPTH = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")

WIDTH = ("hidden_size", "dim", "d_model", "n_embd")


@dataclass(frozen=True)
class Reference:
    """A model as the experiment names it, the workspace that pins it, and the code that it may run."""

    given: str
    revision: str | None
    base: Path
    """Folder from which relative paths start."""
    pins: Store
    """Store of the workspace, where the first value of a name is kept."""
    digest_of: Callable[[Path], str]
    allow_pickle: bool = False
    trust_remote_code: bool = False
    field: str | None = None
    """Field of the experiment, for messages."""
    corpus: Corpus | None = None
    """Its columns name the texts in a file of predictions; None: unknown."""
    labels: Sequence[str] | None = None
    """Its columns of labels; None: all columns of numbers."""

    @property
    def where(self) -> str:
        return f"{self.field}: {self.given}" if self.field else self.given

    @property
    def model_id(self) -> str:
        return self.given.removeprefix("hub:")

    @property
    def revision_pin(self) -> str:
        return f"{self.model_id}@{self.revision or DEFAULT_REVISION}"

    @property
    def known_commit(self) -> str | None:
        return self.revision if model_hub.is_commit(self.revision) else self.pins.pinned("hub", self.revision_pin)

    def pin_commit(self, commit: str) -> str:
        """Returns the pinned commit of the revision: that of the first call. A full commit needs no pin."""
        return commit if model_hub.is_commit(self.revision) else self.pins.pin("hub", self.revision_pin, commit)

    def digest_pin(self, commit: str) -> str:
        """Returns the name under which the digest is pinned: another one with trusted code, whose files change it."""
        return f"{self.model_id}@{commit}" + ("+code" if self.trust_remote_code else "")

    def read(self, folder: Path, digest_of: Callable[[Path], str] | None = None) -> ModelFiles:
        if model_folder.is_predictions(folder):
            corpus, labels = self.corpus, self.labels
            return prediction_file(folder, self.where, corpus=corpus, labels=labels, digest_of=digest_of)
        pickles, trusted = self.allow_pickle, self.trust_remote_code
        return read_model(folder, self.where, digest_of=digest_of, allow_pickle=pickles, trust_remote_code=trusted)


@dataclass(frozen=True)
class ModelFiles:
    given: str
    folder: Path
    """The model's folder, or the file of predictions."""
    digest: str
    """sha256 over the sorted (name, sha256) of the files that determine behaviour."""
    commit: str | None
    weights: Literal["safetensors", "pickle", "none"]
    """none: a file of predictions."""
    config: dict[str, Any]
    """The content of config.json; a file of predictions has id2label alone."""
    trust_remote_code: bool = False
    inputs: tuple[InputFile, ...] = ()
    """The files of the digest; none where no digest was computed."""

    @property
    def are_predictions(self) -> bool:
        return self.weights == "none"

    @property
    def names_of_labels(self) -> Path:
        """Returns the file that names the labels."""
        return self.folder if self.are_predictions else self.folder / "config.json"

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raises InputChangedError if the files differ from those of the digest at the end of the block."""
        with unchanged(self.inputs):
            yield
        if self.inputs and not self.are_predictions:
            names = {file.path.name for file in self.inputs}
            for name in model_folder.light_names(path.name for path in self.folder.iterdir() if path.is_file()):
                if name not in names:
                    raise changed_error(self.folder / name)


@dataclass(frozen=True)
class ResolvedTeacher:
    """A teacher whose model files exist on this machine, with its settings."""

    name: str
    files: ModelFiles
    outputs: tuple[str, ...]
    """The name of each output of the model, renamed."""
    max_tokens: int
    dropout: float | None
    catch_all: frozenset[int] = frozenset()
    """Places of outputs that mean none of the others."""

    @property
    def places(self) -> list[int]:
        """Returns the places of the labels among the outputs."""
        return [place for place in range(len(self.outputs)) if place not in self.catch_all]

    @property
    def labels(self) -> tuple[str, ...]:
        """Returns the outputs that are labels of the student too."""
        return tuple(self.outputs[place] for place in self.places)

    @property
    def has_dropout(self) -> bool:
        """Returns whether its passes differ, by its configuration alone; a loaded model decides."""
        has_rate = self.dropout is not None or model_folder.has_dropout(self.files.config)
        return has_rate and not self.files.are_predictions

    @property
    def identity(self) -> dict[str, Any]:
        """Returns everything that determines its outputs, except the text; renaming labels reruns no pass."""
        return {"content": self.files.digest, "max_tokens": self.max_tokens, "dropout": self.dropout}


@dataclass(frozen=True)
class NewClassifier:
    """Holds a model with an untrained head, its tokenizer and how texts are tokenised for it."""

    model: Any
    tokenizer: Any
    tokenizer_digest: str
    limit: int
    types: bool
    pad_id: int


def has_two_types(config: Any) -> bool:
    """Whether the model distinguishes the two texts of a pair by token types."""
    return int(getattr(config.get_text_config(), "type_vocab_size", 0) or 0) > 1


def resolve(reference: Reference) -> ModelFiles:
    return Finder().find(reference)


def resolve_all(references: Iterable[Reference]) -> list[ModelFiles]:
    """Resolves references. One error lists all problems, before weights are downloaded."""
    finishers = for_all(Finder().check, references)
    return for_all(lambda finish: finish(), finishers)


def needs_network(reference: Reference) -> bool:
    """Returns whether `resolve` would send a request: not for folders, packages, and pinned models in the cache."""
    place, commit = place_of(reference.given, reference.base, field=reference.field), reference.known_commit
    if not isinstance(place, str):
        return False
    pinned = commit and reference.pins.pinned("digest", reference.digest_pin(commit))
    return not pinned or model_hub.cached(place, commit) is None


def local_model(reference: Reference) -> ModelFiles | None:
    """Checks a folder's files without digesting them; returns None if a request to the Hub were needed."""
    place = place_of(reference.given, reference.base, field=reference.field)
    if isinstance(place, str):
        return None if needs_network(reference) else resolve(reference)
    return reference.read(place)


def newer_revision(reference: Reference) -> str | None:
    """Returns the current commit of the revision if it differs from the pinned one, else None.

    Folders, packages, full commits and an unreachable Hub give None, never an error.
    """
    try:
        on_hub = isinstance(place_of(reference.given, reference.base), str)
        pinned = on_hub and reference.pins.pinned("hub", reference.revision_pin)
        now = model_hub.ask(reference.model_id, reference.revision, where=reference.given) if pinned else None
    except ModelError:
        return None
    return now.commit if now and now.commit != pinned else None


def same_models(named: Mapping[str, ModelFiles]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name, files in named.items():
        groups.setdefault(files.digest, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


@dataclass
class Finder:
    """Finds models. It sends no further request to the Hub after the first one without a response."""

    hub_is_reachable: bool = True

    def find(self, reference: Reference) -> ModelFiles:
        return self.check(reference)()

    def check(self, reference: Reference) -> Callable[[], ModelFiles]:
        """Checks everything but the weights, and returns a function that downloads and digests them."""
        place = place_of(reference.given, reference.base, field=reference.field)
        if isinstance(place, str):
            return self._check_on_hub(reference)
        with readable(place, ModelError, reference.where):
            if not model_folder.is_predictions(place):
                model_folder.read_config(place, where=reference.where, trust_remote_code=reference.trust_remote_code)
        return partial(_identify, reference, place)

    def _check_on_hub(self, reference: Reference) -> Callable[[], ModelFiles]:
        commit = reference.known_commit
        used = commit and _as_first_used(reference, commit)
        if used:
            return lambda: used
        model = self._ask(reference, commit or reference.revision)
        if model is None:
            folder = model_hub.cached(reference.model_id, commit or reference.revision)
            if folder is None:
                what = f"the Hub cannot be reached, and {reference.model_id} is not in this machine's cache"
                raise ModelError(what, where=reference.where, fix=f"go online once; {_folder_hint(reference)}")
            reference.pin_commit(folder.name)
            return partial(_identify, reference, folder, commit=folder.name)
        if reference.pin_commit(model.commit) != model.commit:
            return self._check_on_hub(reference)  # another process was first: its commit counts
        return _check_light(reference, model, commit or reference.revision)

    def _ask(self, reference: Reference, revision: str | None) -> model_hub.HubModel | None:
        if not self.hub_is_reachable:
            return None
        try:
            model = model_hub.ask(reference.model_id, revision, where=reference.where)
        except ModelError as error:
            error.fix = f"{error.fix}; {_folder_hint(reference)}"
            raise
        self.hub_is_reachable = model is not None
        return model


def _as_first_used(reference: Reference, commit: str) -> ModelFiles | None:
    """Returns the cached files of the pinned commit if all exist unchanged, without any request."""
    is_pinned = reference.pins.pinned("digest", reference.digest_pin(commit))
    folder = model_hub.cached(reference.model_id, commit) if is_pinned else None
    try:
        return _identify(reference, folder, commit=commit) if folder else None
    except ModelError:
        return None


def _check_light(reference: Reference, model: model_hub.HubModel, revision: str | None) -> Callable[[], ModelFiles]:
    """Downloads the small files, checks that the weights may be loaded, and returns a function that downloads them."""
    where, trusted = reference.where, reference.trust_remote_code
    light = model_folder.light_names(model.names, trust_remote_code=trusted)
    light += [name for name in model.names if name == model_folder.CARD]  # for the card of the student
    folder = model_hub.fetch(model, light, where=where, revision=revision or DEFAULT_REVISION)
    config = model_folder.read_config(folder, where=where, trust_remote_code=trusted)
    pickles = reference.allow_pickle
    weights, _ = model_folder.choose_weights(folder, model.names, config, where=where, allow_pickle=pickles)
    return lambda: _identify(reference, model_hub.fetch(model, weights, where=where), commit=model.commit)


def _identify(reference: Reference, folder: Path, *, commit: str | None = None) -> ModelFiles:
    """Reads the folder; refuses files that differ from those that the workspace pinned."""
    files = reference.read(folder, reference.digest_of)
    pins, pin = reference.pins, reference.digest_pin(commit) if commit else _package_pin(reference.given)
    if pin and (pins.pinned("digest", pin) or pins.pin("digest", pin, files.digest)) != files.digest:
        raise ModelError(
            f"the files of {reference.given} are not those that this workspace first used",
            where=f"{reference.where}: {folder}",
            fix="restore them, or delete the folder and download the model again; after an intended change, "
            "name a new revision, or a copy of the folder",
        )
    return replace(files, given=reference.given, commit=commit)


def read_model(
    folder: Path,
    where: str,
    *,
    digest_of: Callable[[Path], str] | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> ModelFiles:
    """Checks all files of a model's folder; the digest is empty without `digest_of`."""
    with readable(folder, ModelError, where):
        marks = {path.name: FileMark.of(path) for path in folder.iterdir() if path.is_file()}  # before a file is read
        config = model_folder.read_config(folder, where=where, trust_remote_code=trust_remote_code)
        present = list(marks)
        weights, kind = model_folder.choose_weights(folder, present, config, where=where, allow_pickle=allow_pickle)
        for name in weights:
            model_folder.check_weights(folder / name, where=where)
        if not any(model_folder.matches(name, model_folder.VOCABULARIES) for name in present):
            fix = f"save it in the model's folder: tokenizer.save_pretrained({str(folder)!r})"
            raise ModelError("the model has no tokenizer", where=f"{where}: {folder}", fix=fix)
        names = {"config.json", *weights, *model_folder.light_names(present)}
        for name in names:
            model_folder.check_no_pointer(folder / name, where=where)
        if trust_remote_code:
            names.update(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
        if digest_of is None:
            return ModelFiles(str(folder), folder, "", None, kind, config, trust_remote_code)
        inputs = {name: InputFile.of(folder / name, digest_of, marks.get(name)) for name in sorted(names)}
        digest = model_folder.digest(inputs, where=where)
        return ModelFiles(str(folder), folder, digest, None, kind, config, trust_remote_code, tuple(inputs.values()))


def prediction_file(
    path: Path,
    where: str,
    *,
    corpus: Corpus | None = None,
    labels: Sequence[str] | None = None,
    digest_of: Callable[[Path], str] | None = None,
) -> ModelFiles:
    """Reads the labels of a file of predictions; the digest is empty without `digest_of`."""
    from amalgam.stages.common.models import predictions

    where = f"{where}: {path}"
    with readable(path, ModelError, where):
        mark = FileMark.of(path)
        labels = predictions.labels_in(path, labels, corpus, where)
        inputs = () if digest_of is None else (InputFile.of(path, digest_of, mark),)
    columns = [corpus.text, corpus.id, corpus.label] if corpus else []
    digest = fingerprint([predictions.VERSION, inputs[0].sha256, labels, *columns]) if inputs else ""
    config = {"id2label": {str(place): label for place, label in enumerate(labels)}}
    return ModelFiles(str(path), path, digest, None, "none", config, inputs=inputs)


def _package_pin(given: str) -> str | None:
    """Returns a pin with the package's version, so that an upgrade does not count as damage; None for a folder."""
    if not given.startswith("package:"):
        return None
    module = given.removeprefix("package:").split("/", 1)[0].split(".")[0]
    names = importlib.metadata.packages_distributions().get(module, [])
    return "@".join([given, *(f"{name}=={importlib.metadata.version(name)}" for name in sorted(set(names)))])


def _folder_hint(reference: Reference) -> str:
    if reference.given.startswith("hub:"):
        return "or give a folder"
    return f"if a folder was meant: {_folder_near(reference.base / reference.given)}"


# ---- folders and packages


def place_of(given: str, base: Path, *, field: str | None = None) -> Path | str:
    """Returns an existing folder, or the id of a model on the Hub; `hub:` before an id excludes folders."""
    where = f"{field}: {given}" if field else given
    if "://" in given:
        # Not repeated in the message: addresses may carry passwords.
        fix = "write the Hub id (org/name), a folder, or package:module/folder"
        raise ModelError("a model is not named by a web address", where=field, fix=fix)
    if given.startswith("package:"):
        return _package_folder(given.removeprefix("package:"), where)
    if given.startswith("hub:"):
        if not model_hub.is_model_id(given.removeprefix("hub:")):
            raise ModelError(f"{given!r} is not a Hub id", where=where, fix="write hub:org/name")
        return given.removeprefix("hub:")
    folder = user_path(given, base, ModelError, where)
    if folder.is_dir():
        return folder.resolve() if ".." in folder.parts else folder  # for messages
    if folder.is_file() and model_folder.is_predictions(folder):
        return folder
    if folder.exists():
        raise ModelError(f"{given} is a file, not a model's folder", where=where, fix=_file_fix(given, folder))
    if model_folder.is_predictions(folder):
        raise ModelError(f"there is no file {given}", where=where, fix="correct the path, or write this file")
    if not model_hub.is_model_id(given):
        linux = without_backslashes(given)
        fix = f"write / between folders: {linux}" if linux else _folder_near(folder)
        raise ModelError(f"there is no folder {given}", where=where, fix=fix)
    return given


def _file_fix(given: str, file: Path) -> str:
    """Returns the fix for a file that is not one of predictions."""
    if (file.parent / "config.json").is_file():
        return f"name its folder: {given.rpartition('/')[0] or '.'}"
    return f"write its predictions into a file that ends in one of {', '.join(SUFFIXES)}, and name this file"


def _package_folder(reference: str, where: str) -> Path:
    """Finds the folder by the package's spec, because importing the package would run its code."""
    module, *inner = [*reference.split("/", 1)[0].split("."), *Path(reference).parts[1:]]
    try:
        spec = importlib.util.find_spec(module) if module.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        fix = f"install the distribution that has the module {module}"
        raise ModelError(f"there is no installed package {module!r}", where=where, fix=fix)
    if ".." in inner:
        raise ModelError("a package reference may not leave the package", where=where, fix="remove the ..")
    folders = [Path(root).joinpath(*inner) for root in spec.submodule_search_locations]
    present = next((folder for folder in folders if folder.is_dir()), None)
    if present is None:
        what = f"the package {module!r} has no folder {'/'.join(inner)}"
        raise ModelError(what, where=where, fix=_folder_near(folders[0]))
    return present


def folders_like(given: str, base: Path) -> list[str]:
    """Returns the folders next to a missing one, those with the most similar names; empty without its parent."""
    parent = (base / given).parent
    if not parent.is_dir():
        return []
    names = _model_folders(parent)
    start = given.rpartition("/")[0]
    return [f"./{start}/{name}" if start else f"./{name}" for name in nearest((base / given).name, names, 3, ratio=0.6)]


def _model_folders(parent: Path) -> list[str]:
    """Returns the folders of models in a folder; without any, all its folders."""
    folders = sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))
    models = [folder for folder in folders if (folder / "config.json").is_file()]
    return [folder.name for folder in models or folders]


def _folder_near(folder: Path) -> str:
    """Returns the fix: a model or a similar name in the nearest existing parent, if it has any."""
    missing = Path(os.path.abspath(folder))  # noqa: PTH100 - .. is to be taken literally, links are not to be followed
    while not missing.parent.is_dir():
        missing = missing.parent
    siblings = _model_folders(missing.parent)
    models = [name for name in siblings[:5] if (missing.parent / name / "config.json").is_file()]
    close = nearest(missing.name, siblings, 3, ratio=0.4) or models
    if not close:
        return f"copy the model to this place, or name another folder: {missing.parent} has no {missing.name}"
    return f"name a folder of {missing.parent}, such as {', '.join(close)}"


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


# ---- facts of config.json


def depth_of(files: ModelFiles) -> int:
    """Returns the number of transformer layers; the embedding does not count."""
    depth = _size(files, DEPTH)
    if not isinstance(depth, int) or depth < 1:
        fix = "use an architecture of the transformers library"
        raise ModelError(f"config.json has no {DEPTH[0]}", where=str(files.folder), fix=fix)
    return depth


def checked_encoder(files: ModelFiles, layers: int | None) -> ModelFiles:
    """Returns the files; refuses a model that is no encoder of a student, or has fewer layers than these."""
    if files.are_predictions:
        what, fix = "a file of predictions is no encoder", "name a pretrained model, or a teacher that is a model"
        raise ModelError(what, where=f"student.encoder: {files.given}", fix=fix)
    model_folder.check_encoder_kind(files.config, where=str(files.folder / "config.json"))
    if layers is not None and layers > (here := depth_of(files)):
        what = f"student.layers: {layers} is more than the encoder has, {here}"
        raise ModelError(what, where=str(files.folder), fix=f"set student.layers={here} or less")
    return files


def hidden_size(files: ModelFiles) -> int:
    return int(_size(files, WIDTH))


def _size(files: ModelFiles, names: Sequence[str]) -> Any:
    """Returns the size with one of these names; transformers leaves its defaults out of config.json."""
    config = model_folder.text_config(files.config)
    present = (config[name] for name in names if name in config)
    return next(present, None) or getattr(auto_config(files).get_text_config(), names[0], None)


def least_bytes_of(files: ModelFiles, layers: int | None = None) -> int:
    """Returns the least size of the model, or of its first layers, in fp32; 0 for weights without sizes (pickle)."""
    count = model_folder.count_parameters(files.folder) or 0
    return FP32_BYTES * count * (layers or 1) // (depth_of(files) if layers else 1)


def auto_config(files: ModelFiles) -> Any:
    """Returns the configuration of transformers; registers amalgam's own architectures first if the files need it."""
    from transformers import AutoConfig

    if files.config.get("model_type") == ATTENTIVE:
        import amalgam.stages.common.models.attentive
    if files.config.get("model_type") == STATIC:
        import amalgam.stages.common.models.static  # noqa: F401 - registers it
    trusted = files.trust_remote_code
    config = AutoConfig.from_pretrained(str(files.folder), local_files_only=True, trust_remote_code=trusted)
    if config.get_text_config().model_type in model_folder.SPARSE:
        config.get_text_config().attention_type = "original_full"
    return config


def check_model_type(files: ModelFiles) -> None:
    """Refuses a classifier of a kind that transformers does not have; does not import it."""
    kind, where = files.config.get("model_type"), str(files.folder / "config.json")
    if files.trust_remote_code or files.are_predictions or kind in {ATTENTIVE, STATIC}:
        return
    if kind is None:
        raise ModelError("config.json has no model_type", where=where, fix="save the model with save_pretrained")
    if not model_folder.has_classifier(str(kind)):
        version = importlib.metadata.version("transformers")
        what = f"transformers {version} has no classifier of the kind {shown(str(kind))}"
        fix = "update it (pip install -U transformers), or correct model_type in config.json"
        raise ModelError(what, where=where, fix=fix)
