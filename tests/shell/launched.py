"""Stands for a launcher: starts a command in two processes, with the variables that it gives and JAX reads.

``python -m tests.shell.launched srun|mpirun|kubernetes COMMAND ...``; options before the command are skipped.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

COUNT = 2


def variables(launcher: str, process: int, port: int) -> dict[str, str]:
    """The variables of one process."""
    local, count = str(process), str(COUNT)
    match launcher:
        case "srun":
            return {
                "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": count,
                "SLURM_PROCID": local, "SLURM_LOCALID": local,
            }  # fmt: skip
        case "mpirun":
            return {
                "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911", "OMPI_COMM_WORLD_SIZE": count,
                "OMPI_COMM_WORLD_RANK": local, "OMPI_COMM_WORLD_LOCAL_RANK": local,
            }  # fmt: skip
        case _:  # the name of process 0 is one of the cluster's own DNS, so the address is given
            return {
                "KUBERNETES_SERVICE_HOST": "127.0.0.1", "HOSTNAME": "localhost", "JOB_COMPLETION_INDEX": local,
                "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            }  # fmt: skip


def main() -> int:
    """Starts the processes and waits for them; returns the first code that is not zero."""
    launcher, *words = sys.argv[1:]
    command = words[words.index("python") :]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, *command[1:]],
            env={**os.environ, "JAX_COORDINATOR_PORT": str(port), **variables(launcher, process, port)},
        )
        for process in range(COUNT)
    ]
    return next((code for code in [process.wait() for process in started] if code), 0)


if __name__ == "__main__":
    sys.exit(main())
