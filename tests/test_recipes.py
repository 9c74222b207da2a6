"""Recipes for clusters: the command line accepts their options, and a job array is run as SLURM would run it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from amalgam.pipeline.errors import DataError, ExperimentError, InterruptedRunError
from amalgam.pipeline.execution.stage import WorkerShare, share_of
from amalgam.stages.app.completion import fields
from amalgam.tests.test_docs import ROOT, blocks_of, is_understood
from amalgam.tests.workspaces import (
    Workspace,
    finish,
    quiet_environment,
    until,
)

RECIPES = ROOT / "examples/recipes"
JOBS = ["kubernetes-cache.yaml", "kubernetes-run.yaml"]
TERMINATED = InterruptedRunError("", signal_number=signal.SIGTERM).exit_code


def recipe(name: str) -> dict[str, Any]:
    content = yaml.safe_load((RECIPES / name).read_text("utf-8"))
    assert isinstance(content, dict)
    return content


def containers_of(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield from value.get("containers", ())
        for inner in value.values():
            yield from containers_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from containers_of(inner)


def takes(words: list[str]) -> None:
    """Asserts that the command line has the options, and the experiment file the fields."""
    is_understood(shlex.join(words))
    overrides = [word.partition("=")[0] for word in words if re.match(r"[a-z_]+\.[a-z_.]+=", word)]
    assert [field for field in overrides if field not in fields()] == []


def test_every_recipe_is_tested() -> None:
    assert {path.name for path in RECIPES.iterdir()} == {
        *JOBS, "kuberay-rayjob.yaml", "Dockerfile", "Dockerfile.dockerignore"
    }  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_a_jobs_command_is_one_and_its_exit_codes_are_ours(name: str) -> None:
    job = recipe(name)
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    takes(["amalgam", *container["args"]])
    assert pod["restartPolicy"] == "Never"  # nothing else goes with podFailurePolicy
    actions = {
        code: rule["action"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule and rule["onExitCodes"]["containerName"] == container["name"]
        for code in rule["onExitCodes"]["values"]
    }
    assert actions == {ExperimentError.exit_code: "FailJob", DataError.exit_code: "FailJob", TERMINATED: "Ignore"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_pods_of_an_indexed_job_are_all_parts_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    job = recipe("kubernetes-cache.yaml")["spec"]
    assert job["completionMode"] == "Indexed"
    [container] = job["template"]["spec"]["containers"]
    for name in ("SLURM_ARRAY_TASK_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    shares = []
    for index in range(job["completions"]):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        shares.append(share_of(container["args"][container["args"].index("--part") + 1]))
    assert shares == [WorkerShare(index, job["completions"], "part") for index in range(job["completions"])]


def test_a_ray_jobs_command_is_one_and_its_workers_have_what_it_asks_for() -> None:
    job = recipe("kuberay-rayjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    words = shlex.split(job["spec"]["entrypoint"])
    takes(words)
    assert "execution.engine=ray" in words
    [gpus] = [float(word.partition("=")[2]) for word in words if word.startswith("execution.ray.gpus=")]
    cluster = job["spec"]["rayClusterSpec"]
    for group in cluster["workerGroupSpecs"]:
        for container in containers_of(group):
            assert float(container["resources"]["limits"]["nvidia.com/gpu"]) >= gpus
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    path = Path(words[words.index("-c") + 1])
    for pod in pods:
        [container] = containers_of(pod)
        assert str(path.parent) in {mount["mountPath"] for mount in container["volumeMounts"]}
        assert pod["template"]["spec"]["volumes"] == [
            {"name": "work", "persistentVolumeClaim": {"claimName": "amalgam"}}
        ]


def test_the_image_runs_our_command_and_not_as_root() -> None:
    text = re.sub(r"\\\n", " ", (RECIPES / "Dockerfile").read_text("utf-8"))
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    settings = {}
    for word, rest in lines:
        assert word in {"FROM", "ARG", "RUN", "ENV", "USER", "WORKDIR", "ENTRYPOINT"}
        settings[word] = rest
    assert int(settings["USER"]) > 0
    assert f"--owner={settings['USER']} --group={settings['USER']} {settings['WORKDIR']}" in text
    for name in (*JOBS, "kuberay-rayjob.yaml"):  # a volume that the image's user may write to
        assert f"runAsUser: {settings['USER']}," in (RECIPES / name).read_text("utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert yaml.safe_load(settings["ENTRYPOINT"])[0] in project["scripts"]
    assert "grep '^torch==' /src/constraints.txt" in text
    assert len(re.findall(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)) == 1
    for name in re.findall(r"/src/(\S+\.txt)", text):
        assert (ROOT / name).exists()
    for run in (rest.partition("rw ")[2] or rest for word, rest in lines if word == "RUN"):
        subprocess.run(["/bin/sh", "-n", "-c", run], check=True)


# ---- SLURM


FORKED = """\
import os, pathlib, signal, sys
from amalgam.tests.forking import Forked
from amalgam.tests.interruptible import MODULE

process = Forked(sys.argv[1:], pathlib.Path.cwd(), os.environ, MODULE)
signal.signal(signal.SIGTERM, lambda number, _: os.kill(process.pid, number))
process.wait()
for text, file in zip(process.communicate(), (sys.stdout, sys.stderr), strict=True):
    file.write(text)
sys.exit(process.returncode)
"""
"""An `amalgam` that starts at once and waits for a signal; it passes on the signal and the exit code."""


def script(page: str, title: str) -> str:
    [block] = [block for block in blocks_of(page) if block.title == title]
    return block.text


def started(workspace: Workspace, folder: Path, task: dict[str, str]) -> subprocess.Popen[str]:
    """Start a task of the page's array as SLURM does: the script, and the task's variables."""
    amalgam = folder / "amalgam"
    amalgam.write_text(f"#!{sys.executable}\n{FORKED}")
    amalgam.chmod(0o755)
    (workspace.folder / "amalgam.sbatch").write_text(script("docs/how-to/slurm.md", "amalgam.sbatch"))
    return subprocess.Popen(
        ["/bin/bash", "amalgam.sbatch"],
        cwd=workspace.folder,
        env=quiet_environment(**task, PATH=os.pathsep.join([str(folder), os.environ["PATH"]])),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_task_ended_by_slurm_resumes_and_parts_make_the_whole(
    fresh: Workspace, built: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [
        {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_COUNT": "2"}
        for task in range(2)
    ]
    process = started(fresh, tmp_path, tasks[0])
    until(lambda: fresh.digests("cache-teachers"), process)
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.code == TERMINATED, ended.err
    kept = fresh.digests("cache-teachers")
    assert not list(fresh.artifacts.rglob(".tmp-*"))
    messages = []
    for task in tasks:  # the first is queued again
        for name, value in task.items():
            monkeypatch.setenv(name, value)
        messages.append(fresh("cache-teachers", "--part", "auto").err)
    assert "2 of 4 units" in messages[0]
    assert "cache-teachers: done" in messages[1]
    assert kept < fresh.digests("cache-teachers")
    assert len(fresh.units()) == len(built.units())


@pytest.mark.parametrize(
    ("page", "title"),
    [("docs/how-to/slurm.md", "amalgam.sbatch"), ("docs/how-to/several-gpus.md", "amalgam-student.sbatch")],
)
def test_a_batch_script_is_one_and_its_command_is_ours(page: str, title: str, tmp_path: Path) -> None:
    """The commands that it starts are recorded instead of run."""
    text = script(page, title)
    options = re.findall(r"^#SBATCH --([a-z-]+)", text, re.MULTILINE)
    assert set(options) <= {"job-name", "array", "gres", "signal", "requeue", "nodes", "ntasks-per-node"}
    assert "requeue" in options
    for name in ("amalgam", "srun"):
        (tmp_path / name).write_text(f'#!/bin/bash\nprintf "%s\\n" {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    settings = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node1"}
    around = {**os.environ, **settings, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["/bin/bash", "-u"], input=text, env=around, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    takes(words)
    if words[0] == "srun":
        assert {"node1:29400", "7"} <= set(words)


def test_the_nightly_job_promotes_a_candidate_that_passes_its_gate(
    built: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [script] = [block.text for block in blocks_of("docs/how-to/production.md") if block.title == "nightly.sh"]
    workspace = built.copy(tmp_path / "shop")
    (workspace.folder / "current").symlink_to("releases/student")
    (workspace.folder / "current.new").symlink_to("releases/killed")  # of a job that was killed before its last step
    monkeypatch.chdir(workspace.folder)
    name, codes = "2026-11-28", []
    for least in ("0.8", "0"):
        shutil.rmtree(workspace.folder / "students" / name, ignore_errors=True)
        workspace.write(workspace.texts()[:100])
        steps = (
            script.replace("$name", name)
            .replace("0.8", least)
            .replace('"$(basename "$(readlink current)")"', "student")
        )
        for line in steps.splitlines()[2:]:
            words = shlex.split(line)
            codes.append(workspace.attempt(*words[1:]).code if words[0] == "amalgam" else subprocess.call(words))
            if codes[-1]:
                break
    assert codes == [0, 4, 0, 0, 0, 0, 0, 0]
    assert (workspace.folder / "current").readlink() == Path("releases") / name
    assert workspace("report", "student.name=next", "student.epochs=2", "--fail-if-worse-than", name).code == 0
