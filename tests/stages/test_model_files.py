"""Local folders and packages: which model a reference means, its identity, and the errors."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from amalgam.pipeline.errors import ModelError
from amalgam.pipeline.input_files import file_digest
from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.models.label_names import label_names
from amalgam.stages.common.models.resolve import (
    ModelFiles,
    Reference,
    needs_network,
    resolve,
    resolve_all,
    same_models,
)
from amalgam.tests.stages.fake_hub import safetensors_bytes, small_model
from amalgam.tests.stages.tiny_models import refusal
from amalgam.tests.workspaces import flip_bit

if TYPE_CHECKING:
    from collections.abc import Callable


def reference(given: str, base: Path, revision: str | None = None, **more: Any) -> Reference:
    return Reference(given, revision, base, Store(base / "workspace"), file_digest, **more)


def resolved(given: str, base: Path, **more: Any) -> ModelFiles:
    return resolve(reference(given, base, **more))


def test_a_folder_is_found_from_the_experiments_own_folder(tmp_path: Path) -> None:
    small_model(tmp_path / "models" / "news")
    for given in ("./models/news", str(tmp_path / "models" / "news")):
        files = resolved(given, tmp_path)
        assert files.folder.samefile(tmp_path / "models" / "news")
        assert (files.commit, files.weights, files.given) == (None, "safetensors", given)
        assert files.config["id2label"] == {"0": "a", "1": "b"}
    assert not (tmp_path / "workspace").exists()


def test_the_digest_is_the_sorted_names_and_sha256s(tmp_path: Path) -> None:
    folder = small_model(tmp_path / "news")
    pairs = [[name, file_digest(folder / name)] for name in ("config.json", "model.safetensors", "tokenizer.json")]
    expected = hashlib.sha256(json.dumps(pairs, separators=(",", ":")).encode()).hexdigest()
    assert resolved("./news", tmp_path).digest == expected


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_weights_tokenizer_or_configuration_replaced_in_place_are_another_model(tmp_path: Path, name: str) -> None:
    folder = small_model(tmp_path / "news")
    before = resolved("./news", tmp_path).digest
    small_model(tmp_path / "other", labels=("x", "y"), numbers=b"87654321")
    (tmp_path / "other" / "tokenizer.json").write_text('{"version": "1.1"}')
    shutil.copy(tmp_path / "other" / name, folder / name)
    assert resolved("./news", tmp_path).digest != before


@pytest.mark.parametrize(
    "name",
    ["vocab.txt", "special_tokens_map.json", "added_tokens.json", "spm.model", "bpe.codes", "generation_config.json"],
)
def test_a_file_of_tokens_added_is_another_model(tmp_path: Path, name: str) -> None:
    folder = small_model(tmp_path / "news")
    before = resolved("./news", tmp_path).digest
    (folder / name).write_text("{}")
    assert resolved("./news", tmp_path).digest != before


def test_files_that_change_no_behaviour_do_not_matter(tmp_path: Path) -> None:
    folder = small_model(tmp_path / "news")
    before = resolved("./news", tmp_path).digest
    for name in (
        "README.md",
        ".gitattributes",
        "optimizer.pt",
        "training_args.bin",
        "trainer_state.json",
        "model.onnx",
    ):
        (folder / name).write_text("anything")
    (folder / "pytorch_model.bin").write_text("safetensors come first")
    small_model(folder / "checkpoint-100")
    assert resolved("./news", tmp_path).digest == before


def test_the_same_files_elsewhere_are_the_same_model_with_a_note(tmp_path: Path) -> None:
    one, two = small_model(tmp_path / "one"), small_model(tmp_path / "two")
    small_model(tmp_path / "three", labels=("c", "d"))
    models = {name: resolved(f"./{name}", tmp_path) for name in ("one", "three", "two")}
    assert one != two
    assert same_models(models) == [["one", "two"]]


def test_every_tokenizer_file_of_transformers_is_part_of_the_identity() -> None:
    """Read from the sources of all tokenizers that a sequence classifier can have."""
    import re

    import transformers

    from amalgam.stages.common.models.model_folder import TOKENIZERS, matches

    sources = (Path(transformers.__file__).parent / "models").glob("*/tokenization_*.py")
    named = {
        name
        for source in sources
        for table in re.findall(r"VOCAB_FILES_NAMES\s*=\s*\{(.*?)\}", source.read_text("utf-8"), re.DOTALL)
        for name in re.findall(r':\s*"([\w.-]+)"', table)
    }
    assert len(named) > 10
    assert {name for name in named if not matches(name, TOKENIZERS)} == set()


def test_a_missing_folder_is_reported_with_the_nearest_names(tmp_path: Path) -> None:
    small_model(tmp_path / "models" / "news-small")
    (tmp_path / "models" / "unrelated").mkdir()
    error = refusal(lambda: resolved("./models/news-smal", tmp_path))
    assert "./models/news-smal" in error.what
    assert "news-small" in str(error.fix)
    assert "unrelated" not in str(error.fix)


def test_an_existing_folder_is_taken_before_the_hub(tmp_path: Path) -> None:
    small_model(tmp_path / "org" / "name")
    for given in ("org/name", "./org/name"):
        assert resolved(given, tmp_path).folder.samefile(tmp_path / "org" / "name")
    assert needs_network(reference("hub:org/name", tmp_path))


def test_a_file_is_no_folder_and_a_web_address_no_reference(tmp_path: Path) -> None:
    small_model(tmp_path / "news")
    assert "is a file" in refusal(lambda: resolved("news/model.safetensors", tmp_path)).what
    with pytest.raises(ModelError) as caught:
        resolved("https://me:hf_canary@huggingface.co/org/name", tmp_path)
    assert "hf_canary" not in str(caught.value)
    assert "../../etc" in refusal(lambda: resolved("hub:../../etc", tmp_path)).what


def test_a_package_carries_a_model_and_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "carrier_of_models"
    small_model(package / "inner" / "model")
    (package / "__init__.py").write_text("raise SystemError('imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    for given in ("package:carrier_of_models/inner/model", "package:carrier_of_models.inner/model"):
        assert resolved(given, tmp_path).folder == package / "inner" / "model"
    assert "innerr" in refusal(lambda: resolved("package:carrier_of_models/innerr", tmp_path)).what
    assert "inner" in str(refusal(lambda: resolved("package:carrier_of_models/innerr", tmp_path)).fix)
    assert "no installed package" in refusal(lambda: resolved("package:not_there_at_all/model", tmp_path)).what
    assert "leave" in refusal(lambda: resolved("package:carrier_of_models/../../etc", tmp_path)).what


def test_a_packages_model_may_not_change_under_the_same_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "changing_carrier"
    small_model(package / "model")
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    resolved("package:changing_carrier/model", tmp_path)
    flip_bit(package / "model" / "model.safetensors", -1)
    error = refusal(lambda: resolved("package:changing_carrier/model", tmp_path))
    assert "workspace" in error.what


def test_an_upgraded_package_is_a_new_model_and_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    small_model(site / "upgraded_carrier" / "model")
    (site / "upgraded_carrier" / "__init__.py").touch()
    monkeypatch.syspath_prepend(site)
    digests = []
    for version, numbers in (("1.0", b"11111111"), ("2.0", b"22222222")):
        info = site / f"upgraded_carrier-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: upgraded-carrier\nVersion: {version}\n")
        (info / "top_level.txt").write_text("upgraded_carrier\n")
        small_model(site / "upgraded_carrier" / "model", numbers=numbers)
        digests.append(resolved("package:upgraded_carrier/model", tmp_path).digest)
        shutil.rmtree(info)
    assert len(set(digests)) == 2


@pytest.mark.parametrize("kept", [0, 5, 20, -1])
def test_truncated_weights_are_damaged_without_being_loaded(tmp_path: Path, kept: int) -> None:
    weights = small_model(tmp_path / "news") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    error = refusal(lambda: resolved("./news", tmp_path))
    assert "damaged" in error.what
    assert "model.safetensors" in str(error.where)


@pytest.mark.parametrize("header", [b"not json", b"[]", b'{"w": 1}', b'{"w": {"data_offsets": "x"}}'])
def test_weights_with_a_nonsense_header_are_damaged(tmp_path: Path, header: bytes) -> None:
    weights = small_model(tmp_path / "news") / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header + b"12345678")
    assert "model.safetensors is damaged" in refusal(lambda: resolved("./news", tmp_path)).what


def test_shards_are_all_needed_and_stay_inside_the_folder(tmp_path: Path) -> None:
    folder = small_model(tmp_path / "news")
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    (folder / "part-2.safetensors").write_bytes(safetensors_bytes(b"22"))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "part-1.safetensors", "v": "part-2.safetensors"}}))
    before = resolved("./news", tmp_path).digest
    (folder / "part-2.safetensors").write_bytes(safetensors_bytes(b"33"))
    assert resolved("./news", tmp_path).digest != before
    (folder / "part-2.safetensors").unlink()
    assert "part-2.safetensors" in refusal(lambda: resolved("./news", tmp_path)).what
    index.write_text(json.dumps({"weight_map": {"w": "../news/part-1.safetensors"}}))
    assert "own folder" in refusal(lambda: resolved("./news", tmp_path)).what


def test_pickle_weights_need_to_be_allowed(tmp_path: Path) -> None:
    folder = small_model(tmp_path / "news")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    error = refusal(lambda: resolved("./news", tmp_path))
    assert "only pickle weights" in error.what
    assert "allow_pickle: true" in str(error.fix)
    assert resolved("./news", tmp_path, allow_pickle=True).weights == "pickle"


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_model_with_its_own_code_is_refused_at_once(tmp_path: Path, name: str) -> None:
    folder = small_model(tmp_path / "news")
    (folder / "code.py").write_text("X = 1")
    config = json.loads((folder / "config.json").read_text())
    (folder / name).write_text(json.dumps({**config, "auto_map": {"AutoModel": "code.Model"}}))
    error = refusal(lambda: resolved("./news", tmp_path))
    assert name in error.what
    assert "trust_remote_code: true" in str(error.fix)
    trusted = resolved("./news", tmp_path, trust_remote_code=True).digest
    (folder / "code.py").write_text("X = 2")
    assert resolved("./news", tmp_path, trust_remote_code=True).digest != trusted
    (folder / name).write_text(json.dumps({**config, "auto_map": {"AutoModel": "org/other--code.Model"}}))
    error = refusal(lambda: resolved("./news", tmp_path, trust_remote_code=True))
    assert "another repository" in error.what


def test_folders_that_are_no_models_have_their_own_errors(tmp_path: Path) -> None:
    def broken(change: Callable[[Path], object]) -> str:
        shutil.rmtree(tmp_path / "news", ignore_errors=True)
        change(small_model(tmp_path / "news"))
        return refusal(lambda: resolved("./news", tmp_path)).what

    assert "no config.json" in broken(lambda folder: (folder / "config.json").unlink())
    assert "JSON" in broken(lambda folder: (folder / "config.json").write_text("{"))
    assert "JSON" in broken(lambda folder: (folder / "config.json").write_text("[]"))
    assert "no weights" in broken(lambda folder: (folder / "model.safetensors").unlink())
    onnx = broken(lambda folder: (folder / "model.safetensors").rename(folder / "model.onnx"))
    assert onnx == "the model has no weights for PyTorch, only model.onnx"
    assert "no tokenizer" in broken(lambda folder: (folder / "tokenizer.json").unlink())
    assert "adapter" in broken(lambda folder: (folder / "adapter_config.json").write_text("{}"))
    shard = "shard-00001-model-00001-of-00002.safetensors"
    assert "distributed" in broken(lambda folder: (folder / shard).write_text(""))


def test_weights_that_config_json_names_are_the_ones_that_count(tmp_path: Path) -> None:
    folder = small_model(tmp_path / "news", transformers_weights="other.safetensors")
    assert "other.safetensors" in refusal(lambda: resolved("./news", tmp_path)).what
    (folder / "other.safetensors").write_bytes(safetensors_bytes(b"abc"))
    before = resolved("./news", tmp_path).digest
    flip_bit(folder / "other.safetensors", -1)
    assert resolved("./news", tmp_path).digest != before


def test_all_problems_come_in_one_error(tmp_path: Path) -> None:
    small_model(tmp_path / "good")
    small_model(tmp_path / "code", auto_map={"AutoModel": "code.Model"})
    references = [reference(given, tmp_path) for given in ("./good", "./code", "./gone", "./good")]
    with pytest.raises(ModelError) as caught:
        resolve_all(references)
    assert caught.value.what.startswith("2 models ")
    assert "./gone" in caught.value.what
    assert "./code" in caught.value.what
    assert "./good" not in str(caught.value)
    assert [files.given for files in resolve_all([references[0], references[3]])] == ["./good", "./good"]


def test_folders_need_no_network_and_nothing_heavy_is_imported(tmp_path: Path) -> None:
    small_model(tmp_path / "news")
    assert not needs_network(reference("./news", tmp_path))
    assert not needs_network(reference(str(tmp_path / "news"), tmp_path, "v1"))
    code = (
        "import sys; from pathlib import Path; from amalgam.stages.common.models.resolve import Reference, resolve\n"
        "from amalgam.pipeline.storage.store import Store\n"
        "resolve(Reference('./news', None, Path(), Store(Path('p')), lambda path: 'x'))\n"
        "print({'torch', 'transformers', 'huggingface_hub', 'polars', 'httpx2'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (run.stdout.strip(), run.stderr) == ("set()", "")


def files_with(**config: Any) -> ModelFiles:
    return ModelFiles("./news", Path("news"), "digest", None, "safetensors", config)


def names(files: ModelFiles, labels: list[str] | None = None, rename: dict[str, str] | None = None) -> list[str]:
    return label_names(files, labels=labels, rename=rename or {}, teacher="news")


def test_labels_are_read_by_position_whatever_their_order_in_the_file() -> None:
    order = [10, 2, 0, 1, *range(3, 10)]
    files = files_with(id2label={str(index): f"label {index}" for index in order})
    assert names(files) == [f"label {index}" for index in range(11)]


def test_labels_can_be_given_and_renamed() -> None:
    files = files_with(id2label={"0": "LABEL_0", "1": "LABEL_1"})
    assert names(files, ["world", "sport"]) == ["world", "sport"]
    assert names(files, ["world", "sport"], {"sport": "sports"}) == ["world", "sports"]
    assert names(files, None, {"LABEL_0": "world", "LABEL_1": "sport"}) == ["world", "sport"]


@pytest.mark.parametrize(
    "config", [{"id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}}, {}, {"num_labels": 4}]
)
def test_placeholders_are_no_names(config: dict[str, Any]) -> None:
    error = refusal(lambda: names(files_with(**config)))
    assert "LABEL_0" in error.what
    assert "labels:" in str(error.fix) or "give labels" in str(error.fix)
    assert "teacher news" in str(error.where)


def test_a_wrong_number_of_labels_names_the_unmatched() -> None:
    files = files_with(id2label={"0": "world", "1": "sport", "2": "business"})
    assert "2 ('business')" in refusal(lambda: names(files, ["world", "sport"])).what
    assert "'science'" in refusal(lambda: names(files, ["world", "sport", "business", "science"])).what


@pytest.mark.parametrize(
    ("config", "own"),
    [
        ({}, "has no id2label, which means 2 labels"),
        ({"id2label": {str(index): f"x{index}" for index in range(5)}}, "names 5 labels"),
    ],
)
@pytest.mark.parametrize("labels", [None, ["a", "b", "c"]])
def test_a_head_of_another_size_gives_both_numbers_and_the_fix(
    tmp_path: Path, config: dict[str, Any], own: str, labels: list[str] | None
) -> None:
    folder = small_model(tmp_path / "news", labels=("a", "b", "c"))
    files = replace(files_with(**config), folder=folder)
    error = refusal(lambda: names(files, labels))
    assert error.what == f"config.json {own}, but the weights have 3 outputs"
    assert '"id2label": {"0": "NAME", "1": "NAME", ...}' in str(error.fix)


def test_an_unknown_label_in_rename_is_reported_with_the_nearest() -> None:
    error = refusal(lambda: names(files_with(id2label={"0": "world", "1": "sport"}), None, {"sports": "s"}))
    assert "'sports'" in error.what
    assert "'sport'" in str(error.fix)
    assert "world" not in str(error.fix)
    error = refusal(lambda: names(files_with(id2label={"0": "world", "1": "sport"}), None, {"sports": "sport"}))
    assert error.fix == 'write the teacher\'s name first: {"sport": "sports"}'


@pytest.mark.parametrize(
    ("config", "piece"),
    [
        ({"id2label": {"0": "on\nly"}}, r"the teacher has one label (on\nly)"),
        ({"id2label": {"0": "same", "1": "same"}}, "'same'"),
        ({"id2label": {"0": "a", "2": "b"}}, "output"),
        ({"id2label": {"0": "a", "1": 7}}, "output"),
        ({"id2label": ["a", "b"]}, "output"),
        (
            {"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"},
            "multi_label_classification",
        ),
        ({"id2label": {"0": "LABEL_0"}, "problem_type": "regression"}, "regression"),
    ],
)
def test_labels_that_cannot_serve_are_refused(config: dict[str, Any], piece: str) -> None:
    assert piece in refusal(lambda: names(files_with(**config))).what


def test_renaming_two_labels_to_one_is_refused() -> None:
    error = refusal(lambda: names(files_with(id2label={"0": "a", "1": "b"}), None, {"a": "b"}))
    assert "'b'" in error.what
    assert error.fix == "rename: {a: b} gives both one name: choose another"


def test_digests_come_from_the_callers_memo(tmp_path: Path) -> None:
    small_model(tmp_path / "news")
    asked: list[str] = []

    def digest_of(path: Path) -> str:
        asked.append(path.name)
        return "0" * 64

    resolve(Reference("./news", None, tmp_path, Store(tmp_path / "pins"), digest_of))
    assert asked == ["config.json", "model.safetensors", "tokenizer.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["news"]
