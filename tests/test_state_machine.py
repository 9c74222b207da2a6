"""Any order of edits, losses and runs ends where a fresh workspace ends, and asks teachers only what is missing."""

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
from amalgam.tests.workshop import SAME, Asked, Row, Shop, apart, flip

START = 24
SPARE = generate(80, 3)
INDEX = st.integers(0, 10_000)


class Workspace(RuleBasedStateMachine):
    """`template` is set by the test: a small experiment that is up to date."""

    template: Shop

    @initialize()
    def begin(self) -> None:
        self.place = Path(tempfile.mkdtemp(dir=self.template.folder.parent))
        self.shop = self.template.copy(self.place / "shop")
        self.rows: list[Row] = self.shop.texts()
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
        units = [path for path in self.shop.units() if str(path.relative_to(self.shop.artifacts)) in recorded]
        if not units:
            return
        path = units[index % len(units)]
        if how == "flip":
            flip(path)
            assert self.shop.tries("verify").code == 1
        elif how == "cut":
            path.write_bytes(path.read_bytes()[:-1])
        else:
            path.unlink()

    @rule(index=INDEX)
    def lose_a_record(self, index: int) -> None:
        records = self.records()
        if records:
            records[index % len(records)].unlink()
            for manifest in (self.shop.artifacts / "cache-teachers").glob("*/MANIFEST.json"):
                manifest.unlink()  # it would vouch for the file still

    def records(self) -> list[Path]:
        return sorted((self.shop.artifacts / "cache-teachers").glob("*/units/*.json"))

    @rule()
    def collect_garbage(self) -> None:
        self.shop("gc", "--yes")

    # ---- work

    @rule()
    def work(self) -> None:
        self.write()
        expected = self.missing()
        with self.shop.counting() as asked:
            self.shop("build-targets")
        assert (asked[0].logits, asked[0].passes) == (expected.logits, expected.passes)
        fresh = self.shop.without_artifacts(self.place / "fresh")
        fresh("build-targets")
        assert apart(self.shop.targets(), fresh.targets()) < SAME
        assert self.shop.stale() <= {"train-student", "report"}
        shutil.rmtree(fresh.folder)

    def write(self) -> None:
        self.shop.write(self.rows)
        text = self.template.config.read_text()
        text = text.replace("passes: 4", f"passes: {self.passes}")
        self.shop.config.write_text(text.replace("mode: soft", f"mode: soft\n  temperature: {self.temperature}"))

    def missing(self) -> Asked:
        """From the whole units on disk, worked out here: the unbroken run of passes that each text still has."""
        train = {text_key((text,)) for text, _ in self.rows}
        test = {text_key((text,)) for text, _ in self.shop.texts("test")}
        logits = passes = 0
        for key_file in (self.shop.artifacts / "cache-teachers").glob("*/key.json"):
            has_logits, upto = self.coverage(key_file.parent)
            logits += sum(key not in has_logits for key in train | test)
            passes += sum(max(0, self.passes - upto.get(key, 0)) for key in train)
        return Asked(logits, passes, 0)

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

        found = []
        for path in (family / "units").glob("*.json"):
            record = json.loads(path.read_text())
            [file] = record["files"]
            data = self.shop.artifacts / file["path"]
            if data.exists() and data.stat().st_size == file["bytes"]:
                found.append((record["facts"], pq.read_table(data).column("key").to_pylist()))
        return found


@pytest.fixture(scope="module")
def small(built: Shop, tmp_path_factory: pytest.TempPathFactory) -> Shop:
    shop = built.without_artifacts(tmp_path_factory.mktemp("small") / "template")
    shop.write(shop.texts()[:START])
    shop.write(shop.texts("test")[:8], "test")
    shop("build-targets")
    return shop


def test_every_path_ends_where_a_fresh_run_does(small: Shop) -> None:
    Workspace.template = small
    run_state_machine_as_test(
        Workspace,
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


def test_overlapping_passes_count_once(small: Shop) -> None:
    """[0, 2) and [2, 6), then [0, 2) is lost and made again as [0, 4): six passes are still six."""
    Workspace.template = small
    machine = Workspace()
    machine.begin()
    shutil.rmtree(machine.shop.artifacts)
    machine.passes = 2
    machine.write()
    machine.shop("build-targets")
    lost = machine.shop.units()
    for passes, temperature in ((6, 0.2), (4, 0.2), (6, 0.5)):  # or the last would be the second's targets again
        machine.passes, machine.temperature = passes, temperature
        machine.work()
        for path in lost:
            path.unlink(missing_ok=True)
        lost = []
    machine.teardown()
