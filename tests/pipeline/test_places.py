"""Places and fixes of errors about paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.storage.local import LocalStorage


def test_a_workspace_that_cannot_be_made_has_the_fix_of_its_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExperimentError, match="Not a directory") as error:
        LocalStorage(tmp_path / "file" / "workspace").check()
    assert error.value.fix == "check the path, the disk and the mount, or set execution.workspace=DIR"


def test_the_place_of_an_error_is_a_path_without_dots(tmp_path: Path) -> None:
    assert ExperimentError("it", where=f"{tmp_path}/exp/../../x: 3").where == f"{tmp_path.parent.resolve()}/x: 3"
    (tmp_path / "far" / "exp").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/exp")
    assert ExperimentError("it", where=f"{tmp_path}/link/../x").where == f"{tmp_path.resolve()}/far/x"
    for same in ("teachers/../x", "line 3", "/a/b..c/d", "s3://a/../b", None):
        assert ExperimentError("it", where=same).where == same
