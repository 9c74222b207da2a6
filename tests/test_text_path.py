"""A text passes few files between the csv file and the student."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from amalgam.pipeline.execution.stage import Run, Unit
from amalgam.stages.registry import STAGES
from amalgam.tests.workspaces import Workspace

ROOT = Path(__file__).resolve().parents[1]
WAY = ("read-corpus", "cache-teachers", "build-targets", "train-student")
MODELS = "stages/common/models/"
MOST_FILES = 35


def test_a_text_passes_few_files(fresh: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the files with a function that runs while a stage computes its units, apart from the loading of models."""
    names: set[str] = set()

    def profile(frame: FrameType, _event: str, _argument: Any) -> None:
        if frame.f_code.co_flags & CO_OPTIMIZED:  # a function; the bodies of modules and classes are imports
            names.add(frame.f_code.co_filename)

    def profiled(run_units: Callable[[Run, Sequence[Unit]], None]) -> Callable[[Run, Sequence[Unit]], None]:
        def wrapper(run: Run, units: Sequence[Unit]) -> None:
            threading.setprofile(profile)
            sys.setprofile(profile)
            try:
                run_units(run, units)
            finally:
                sys.setprofile(None)
                threading.setprofile(None)

        return wrapper

    for stage in STAGES:
        if stage.name in WAY:
            monkeypatch.setattr(stage, "run_units", profiled(stage.run_units))
    fresh("run", "cache.passes=2")
    paths = {Path(name).resolve() for name in names if name.endswith(".py")}
    files = sorted(str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT))
    passed = [file for file in files if file.startswith(("data/", "stages/")) and not file.startswith(MODELS)]
    assert "data/rows.py" in passed
    assert "stages/train_student/stage.py" in passed
    assert len(passed) <= MOST_FILES, "\n".join(passed)
