"""Any order of edits, losses and runs ends as a fresh workspace, and computes only missing passes."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from amalgam.data.demo_corpus import generate
from amalgam.data.keys import text_key
from amalgam.tests.workspaces import TOLERANCE, Row, TeacherWork, Workspace, flip_bit, largest_difference

START = 24
SPARE = generate(80, 3)
INDEX = st.integers(0, 10_000)


class WorkspaceMachine(RuleBasedStateMachine):
    """`template` is set by the test: a small experiment that is up to date."""

    template: Workspace

    @initialize()
    def begin(self) -> None:
        self.place = Path(tempfile.mkdtemp(dir=self.template.folder.parent))
        self.workspace = self.template.copy(self.place / "workspace")
        self.rows: list[Row] = self.workspace.texts()
        self.spare = iter(SPARE)
        self.passes, self.temperature = 4, 0.2

    def teardown(self) -> None:
        if hasattr(self, "place"):
            shutil.rmtree(self.place)

    # ---- edits

    @rule(temperature=st.sampled_from([0.1, 0.2, 0.5]))
    def change_the_temperature(self, temperature: float) -> None:
        self.temperature = temperature

    @rule(passes=st.sampled_from([2, 4, 6]))
    def change_the_passes(self, passes: int) -> None:
        self.passes = passes

    @rule(count=st.integers(1, 4))
    def append(self, count: int) -> None:
        self.rows += [next(self.spare) for _ in range(count)]

    @rule(index=INDEX)
    def edit_a_text(self, index: int) -> None:
        self.rows[index % len(self.rows)] = next(self.spare)

    @rule(index=INDEX)
    def reorder_and_duplicate(self, index: int) -> None:
        at = index % len(self.rows)
        self.rows = [*self.rows[at:], *self.rows[:at], self.rows[at]]

    # ---- losses

    @rule(index=INDEX, how=st.sampled_from(["flip", "cut", "delete"]))
    def lose_a_unit(self, index: int, how: str) -> None:
        recorded = {file["path"] for record in self.records() for file in json.loads(record.read_text())["files"]}
        units = [path for path in self.workspace.units() if str(path.relative_to(self.workspace.artifacts)) in recorded]
        if not units:
            return
        path = units[index % len(units)]
        if how == "flip":
            flip_bit(path)
            assert self.workspace.attempt("verify").code == 1
        elif how == "cut":
            path.write_bytes(path.read_bytes()[:-1])
        else:
            path.unlink()

    @rule(index=INDEX)
    def lose_a_record(self, index: int) -> None:
        records = self.records()
        if records:
            records[index % len(records)].unlink()
            for manifest in (self.workspace.artifacts / "cache-teachers").glob("*/MANIFEST.json"):
                manifest.unlink()  # with it, the file would still be trusted

    def records(self) -> list[Path]:
        return sorted((self.workspace.artifacts / "cache-teachers").glob("*/units/*.json"))

    @rule()
    def collect_garbage(self) -> None:
        self.workspace("gc", "--yes")

    # ---- work

    @rule()
    def work(self) -> None:
        self.write()
        expected = self.missing()
        with self.workspace.counting() as asked:
            self.workspace("build-targets")
        assert (asked[0].logits, asked[0].passes) == (expected.logits, expected.passes)
        fresh = self.workspace.without_artifacts(self.place / "fresh")
        fresh("build-targets")
        assert largest_difference(self.workspace.targets(), fresh.targets()) < TOLERANCE
        assert self.workspace.stale() <= {"train-student", "report"}
        shutil.rmtree(fresh.folder)

    def write(self) -> None:
        self.workspace.write(self.rows)
        text = self.template.config.read_text()
        text = text.replace("passes: 4", f"passes: {self.passes}")
        self.workspace.config.write_text(text.replace("mode: soft", f"mode: soft\n  temperature: {self.temperature}"))

    def missing(self) -> TeacherWork:
        """From the whole units on disk, worked out here: the unbroken run of passes that each text still has."""
        train = {text_key((text,)) for text, _ in self.rows}
        test = {text_key((text,)) for text, _ in self.workspace.texts("test")}
        logits = passes = 0
        for key_file in (self.workspace.artifacts / "cache-teachers").glob("*/family.json"):
            has_logits, upto = self.coverage(key_file.parent)
            logits += sum(key not in has_logits for key in train | test)
            passes += sum(max(0, self.passes - upto.get(key, 0)) for key in train)
        return TeacherWork(logits, passes, 0)

    def coverage(self, family: Path) -> tuple[set[bytes], dict[bytes, int]]:
        has_logits, upto = set[bytes](), dict[bytes, int]()
        for record, keys in sorted(self.whole_units(family), key=lambda unit: (unit[0]["first"], unit[0]["last"])):
            has_logits |= set(keys) if record["logits"] else set()
            for key in keys:
                if record["first"] <= upto.get(key, 0) < record["last"]:
                    upto[key] = record["last"]
        return has_logits, upto

    def whole_units(self, family: Path) -> list[tuple[dict[str, Any], list[bytes]]]:
        import pyarrow.parquet as pq

        units_ = []
        for path in (family / "units").glob("*.json"):
            record = json.loads(path.read_text())
            [file] = record["files"]
            data = self.workspace.artifacts / file["path"]
            if data.exists() and data.stat().st_size == file["bytes"]:
                units_.append((record["facts"], pq.read_table(data).column("key").to_pylist()))
        return units_


@pytest.fixture(scope="module")
def small(built: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = built.without_artifacts(tmp_path_factory.mktemp("small") / "template")
    workspace.write(workspace.texts()[:START])
    workspace.write(workspace.texts("test")[:8], "test")
    workspace("build-targets")
    return workspace


def test_any_sequence_of_edits_and_losses_ends_as_a_fresh_run(small: Workspace) -> None:
    WorkspaceMachine.template = small
    run_state_machine_as_test(
        WorkspaceMachine,
        settings=settings(
            max_examples=10,
            stateful_step_count=12,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # shrinking would take minutes; the steps are printed as they were
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_overlapping_passes_count_once(small: Workspace) -> None:
    """[0, 2) and [2, 6), then [0, 2) is lost and made again as [0, 4): six passes are still six."""
    WorkspaceMachine.template = small
    machine = WorkspaceMachine()
    machine.begin()
    shutil.rmtree(machine.workspace.artifacts)
    machine.passes = 2
    machine.write()
    machine.workspace("build-targets")
    lost = machine.workspace.units()
    for passes, temperature in ((6, 0.2), (4, 0.2), (6, 0.5)):  # or the last would be the second's targets again
        machine.passes, machine.temperature = passes, temperature
        machine.work()
        for path in lost:
            path.unlink(missing_ok=True)
        lost = []
    machine.teardown()
