"""Places and fixes of errors about paths."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from amalgam.data.corpus import find_files
from amalgam.pipeline.errors import DataError, ExperimentError
from amalgam.pipeline.storage.local import LocalStorage
from amalgam.stages.common.models.resolve import place_of


def test_a_workspace_that_cannot_be_made_has_the_fix_of_its_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExperimentError, match="Not a directory") as error:
        LocalStorage(tmp_path / "file" / "workspace").check()
    assert error.value.fix == "check the path, the disk and the mount, or set execution.workspace=DIR"


@pytest.mark.parametrize(("number", "falls_back"), [(errno.EPERM, True), (errno.EIO, False), (errno.ENOSPC, False)])
def test_only_a_disk_without_hard_links_gets_a_file_by_a_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, falls_back: bool
) -> None:
    def link(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    storage = LocalStorage(tmp_path)
    if falls_back:
        assert storage.put_if_absent("stage/unit.json", b"{}")
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            storage.put_if_absent("stage/unit.json", b"{}")
    assert (tmp_path / "stage/unit.json").exists() == falls_back
    assert len(list((tmp_path / "stage").iterdir())) == falls_back


def test_the_place_of_an_error_is_a_path_without_dots(tmp_path: Path) -> None:
    assert ExperimentError("it", where=f"{tmp_path}/exp/../../x: 3").where == f"{tmp_path.parent.resolve()}/x: 3"
    (tmp_path / "far" / "exp").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/exp")
    assert ExperimentError("it", where=f"{tmp_path}/link/../x").where == f"{tmp_path.resolve()}/far/x"
    assert ExperimentError("it", where=f"{tmp_path}/link/..").where == f"{tmp_path.resolve()}/far"
    assert place_of("../exp", tmp_path / "link") == tmp_path.resolve() / "far/exp"
    with pytest.raises(DataError) as error:
        find_files("../nope.csv", tmp_path / "link")
    assert error.value.where == f"no nope.csv in {tmp_path.resolve()}/far"
    for same in ("teachers/../x", "line 3", "/a/b..c/d", "s3://a/../b", None):
        assert ExperimentError("it", where=same).where == same
