"""The scripts of `examples/processes`, each with what its launcher gives to two processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

SCRIPTS = ROOT / "examples" / "processes"
KUBERNETES = '''
"""The part of Kubernetes' client that JAX uses, with one job of two pods."""
from types import SimpleNamespace as Values

from jax._src.clusters.k8s_cluster import K8sCluster

pod = Values(
    metadata=Values(name="train-0", labels={"job-name": "train"}, owner_references=[Values(controller=True, kind="Job")]),
    spec=Values(subdomain="train"),
)
job = Values(metadata=Values(name="train", labels={}), spec=Values(parallelism=2))
core = Values(list_namespaced_pod=lambda namespace, field_selector: Values(items=[pod]))
batch = Values(read_namespaced_job=lambda name, namespace: job)
client = Values(CoreV1Api=lambda: core, BatchV1Api=lambda: batch, exceptions=Values(ApiException=RuntimeError))


def load():
    K8sCluster._namespace = classmethod(lambda cls: "default")  # a file of the pod


config = Values(load_incluster_config=load)
'''


def launched(command: list[str], folder: Path) -> str:
    """What a script prints, with launchers of `tests.shell.launched` on its path."""
    for name in ("srun", "mpirun"):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tests.shell.launched {name} "$@"\n')
        (folder / name).chmod(0o755)
    (folder / "kubernetes.py").write_text(KUBERNETES)
    given = {
        "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{folder}", "CLUSTER": "2x2", "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }  # fmt: skip
    known = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    ended = subprocess.run(command, env={**known, **given}, cwd=SCRIPTS, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def check_losses(text: str) -> None:
    """Both processes print the same three losses, which fall."""
    each = [re.findall(rf"process {n} of 2: loss (\S+)", text) for n in range(2)]
    assert len(each[0]) == 3
    assert each[0] == each[1] == sorted(each[0], reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["slurm.sh", "openmpi.sh"])
def test_a_script_trains_in_both_processes(script: str, tmp_path: Path) -> None:
    check_losses(launched(["bash", script], tmp_path))


@pytest.mark.slow
def test_the_pods_of_a_job_train_together(tmp_path: Path) -> None:
    """The command of the job, in two processes that find the API server of the test."""
    (command,) = re.findall(r"command: \[(.*)\]", (SCRIPTS / "kubernetes.yaml").read_text())
    check_losses(launched([sys.executable, "-m", "tests.shell.launched", "kubernetes", *command.split(", ")], tmp_path))
