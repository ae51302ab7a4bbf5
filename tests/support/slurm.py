"""A real Slurm of one node, in a folder of its own: no configuration of the system, no munge, no systemd."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from support.ports import free_ports

_TOOLS = ("slurmctld", "slurmd", "srun", "sinfo")
_CONFIGURATION = """\
ClusterName=odc
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmdPort={node}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=localhost CPUs=8 RealMemory=1000
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def need_slurm() -> None:
    """Skip the test where Slurm is not installed, or this is not root."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip("needs Slurm, and root: apt-get install slurm-wlm")


class Slurm:
    """A controller and a node of eight processors, whatever this machine has. Close it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._daemons = folder, list[subprocess.Popen[bytes]]()
        for name in ("state", "spool"):
            (folder / name).mkdir()
        controller, node = free_ports(2)
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, controller=controller, node=node))
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        try:
            for daemon in ("slurmctld", "slurmd"):
                with (folder / f"{daemon}.log").open("wb") as log:
                    command = [daemon, "-D", "-f", str(folder / "slurm.conf")]
                    self._daemons.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        """Until the node takes jobs."""
        for _ in range(600):
            shown = self.start(["sinfo", "-h", "-o", "%T"]).communicate()[0].strip()
            if shown == "idle":
                return
            time.sleep(0.2)
        logs = "\n".join(path.read_text() for path in self.folder.glob("*.log"))
        raise OSError(f"Slurm does not start: {shown}\n{logs}")

    def start(self, command: Sequence[str], env: Mapping[str, str] = {}) -> subprocess.Popen[str]:
        """Start a command that finds this Slurm; what it prints is read from the process that is returned."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, text=True, env={**os.environ, **self.environment, **env}, **streams)

    def close(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait()
