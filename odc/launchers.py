"""Ranks from a launcher's variables: srun, mpirun, Kubernetes, SkyPilot, dstack, and torchrun, which always wins.

`find` reads a mapping and nothing else; `export` sets torchrun's variables in this process, so that torch's `env://`
rendezvous and everything else that reads them works under any of these launchers (docs/clusters.md). `parent_of` leads
from a rank to the process that has started it.
"""

from __future__ import annotations

import itertools
import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from odc.errors import ConfigError

TORCHRUN = "torchrun"
LAST_PORT = 65535
_PORT = 29500  # where the launcher gives each job a network of its own
_FIRST_PORT, _PORTS = 20000, 10000  # below those that Linux hands out by itself
_LOOPBACK = "127.0.0.1"
_NODES = r"(?:[^,\[\]\s]|\[[\d,-]+\])+"


def parent_of(pid: int, proc: Path = Path("/proc")) -> int:
    """The process that has started another; OSError where that one has ended, or is of another container."""
    stat = (proc / str(pid) / "stat").read_bytes()
    return int(stat.rpartition(b")")[2].split()[1])  # behind the name, which may hold anything, and the state


@dataclass(frozen=True)
class Launched:
    """Process `rank` of the `world` processes that `launcher` has started, on host `host` of `hosts`.

    Each of them is a rank, unless the launcher starts one a host: then `ranks_each` are to run on every host, 0 where
    the launcher does not give their number. `address` and `port` are those of the job's store; `missing` says, one
    text each, why the processes cannot find each other, and what to do. With anything missing other fields may be
    wrong, but a world of 1 is a process that runs alone.
    """

    launcher: str
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    host: int = 0
    hosts: int = 1
    address: str | None = None
    port: int | None = None
    ranks_each: int = 1
    missing: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line: what has started this process, as what, and what is missing."""
        rank = f", rank {self.rank}" if self.world > 1 else ""
        tasks = f"{_counted(self.world, 'process', 'processes')} on {_counted(self.hosts, 'host', 'hosts')}"
        return f"{self.launcher}: " + ("; ".join(self.missing) or f"{tasks}{rank}; nothing missing")

    def variables(self, ranks_each: int = 1) -> dict[str, str]:
        """Torchrun's variables for this process; with `ranks_each` above 1 those of the first rank that it starts.

        Raises ConfigError with all that is missing, and where a host has several processes that start several ranks.
        """
        if self.missing:
            raise ConfigError(self.describe())
        if ranks_each > 1 and self.world != self.hosts:
            raise ConfigError(f"{self.launcher} starts several processes a host: let each of them be one rank")
        return {
            "RANK": str(self.rank * ranks_each),
            "WORLD_SIZE": str(self.world * ranks_each),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world * ranks_each),
            "GROUP_RANK": str(self.host),
            "GROUP_WORLD_SIZE": str(self.hosts),
            "MASTER_ADDR": str(self.address),
            "MASTER_PORT": str(self.port),
        }


def find(environment: Mapping[str, str]) -> Launched | None:
    """What started a process that has these variables; None if it was no launcher that odc knows. Never raises."""
    return next((found for read in _READERS if (found := read(_Variables(environment))) is not None), None)


def export() -> Launched | None:
    """Set torchrun's variables in `os.environ`, for one process a rank; call it before `init_process_group`.

    Does nothing under torchrun, or where no launcher is found. Rank 0 hosts the job's store. Does not wait.

    Raises:
        ConfigError: something is missing, or the launcher starts one process for several ranks; the text says what.
    """
    launched = find(os.environ)
    if launched is None or launched.launcher == TORCHRUN:
        return launched
    if launched.ranks_each > 1:
        raise ConfigError(
            f"{launched.launcher} starts one process a host, for {launched.ranks_each} ranks: start them by torchrun "
            "(docs/clusters.md), or by odc train"
        )
    os.environ.update(launched.variables())
    return launched


def expand_hosts(nodes: str) -> list[str]:
    """Names of a node list as Slurm writes it: `gpu[01-03,07],login` is gpu01, gpu02, gpu03, gpu07 and login.

    Raises ValueError for a list that is none.
    """
    found = []
    if not re.fullmatch(f"{_NODES}(?:,{_NODES})*", nodes):
        raise ValueError(f"{nodes!r} is no list of nodes")
    for one in re.findall(_NODES, nodes):
        parts = re.split(r"\[([^\[\]]*)\]", one)  # text, range, text, range, ..., text
        each = [_expand_range(part) if at % 2 else [part] for at, part in enumerate(parts)]
        found += ["".join(words) for words in itertools.product(*each)]
    return found


def _expand_range(text: str) -> list[str]:
    """`01-03,07` is 01, 02, 03, 07."""
    found: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers:
            raise ValueError(f"{part!r} is no range")
        found += [f"{number:0{len(first)}d}" for number in numbers]
    return found


def expand_counts(text: str) -> list[int]:
    """Numbers as Slurm repeats them: `2(x3),1` is 2, 2, 2, 1. Raises ValueError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{text!r} is no list of counts")
        found += [int(match[1])] * int(match[2] or 1)
    return found


@dataclass
class _Variables:
    """An environment, read by name, that notes what is missing in it."""

    of: Mapping[str, str]
    missing: list[str] = field(default_factory=list)

    def text(self, *names: str) -> str | None:
        """The first of `names` that is set to more than spaces."""
        return next((found for name in names if (found := self.of.get(name, "").strip())), None)

    def number(self, *names: str, otherwise: int | None = None) -> int:
        """The first of `names` that is set; `otherwise` without, or 0 and a note where there is no such."""
        text = self.text(*names)
        if text is not None and text.isdecimal():
            return int(text)
        if text is None and otherwise is not None:
            return otherwise
        self.missing.append(f"{names[0]} is not set" if text is None else f"{names[0]} is {text!r}, which is no number")
        return 0

    def port(self, job: str | None, *names: str) -> int:
        """MASTER_PORT or one of `names`; else one that follows from the name of the job, where hosts are shared."""
        derived = _PORT if job is None else _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
        return self.number("MASTER_PORT", *names, otherwise=derived)

    def address(self, hosts: int, *names: str, do: str) -> str | None:
        """MASTER_ADDR or one of `names`; loopback on one host; else a note that ends in `do`."""
        found = self.text("MASTER_ADDR", *names) or (_LOOPBACK if hosts == 1 else None)
        if found is None:
            self.missing.append(f"MASTER_ADDR is not set: {do}")
        return found

    def launched(self, launcher: str, **fields: object) -> Launched:
        """Whatever was read until now, checked."""
        if fields["port"] > LAST_PORT:  # type: ignore[operator]
            self.missing.append(f"port {fields['port']} is above {LAST_PORT}")
        made = Launched(launcher, **fields, missing=tuple(self.missing))  # type: ignore[arg-type]
        if made.missing or (made.rank < made.world and made.local_rank < made.local_world <= made.world):
            return made
        here = f"rank {made.rank} of {made.world} is {made.local_rank} of {made.local_world} on its host"
        return replace(made, missing=(f"its variables contradict each other: {here}",))


def _torchrun(given: _Variables) -> Launched | None:
    if not {"RANK", "WORLD_SIZE"} <= given.of.keys():
        return None
    rank, world = given.number("RANK"), given.number("WORLD_SIZE")
    local_world = given.number("LOCAL_WORLD_SIZE", otherwise=world) or world
    hosts = given.number("GROUP_WORLD_SIZE", otherwise=-(-world // max(1, local_world)))
    return given.launched(
        TORCHRUN,
        rank=rank,
        world=world,
        local_rank=given.number("LOCAL_RANK", otherwise=rank % max(1, local_world)),
        local_world=local_world,
        host=given.number("GROUP_RANK", otherwise=rank // max(1, local_world)),
        hosts=hosts,
        address=given.address(0, do="the address of rank 0's host"),
        port=given.number("MASTER_PORT"),
    )


def _mpi(given: _Variables, launcher: str, names: tuple[str, str, str, str], job: str | None) -> Launched:
    """`names` are those of rank, world, local rank and local world."""
    rank, world, local_rank, local_world = (given.number(name) for name in names)
    if not given.missing and local_world and rank % local_world != local_rank:
        given.missing.append("ranks of a host are not in sequence, or hosts differ in their number: map by slot")
    elif not given.missing and local_world and world % local_world:
        given.missing.append(
            f"hosts differ in their number of ranks, which {launcher} does not say: use srun or torchrun"
        )
    hosts = max(1, world // max(1, local_world))
    return given.launched(
        launcher,
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        host=rank // max(1, local_world),
        hosts=hosts,
        address=given.address(hosts, do="export it, and pass it on (mpirun -x MASTER_ADDR)"),
        port=given.port(job),
    )


def _mpirun(given: _Variables) -> Launched | None:
    if "OMPI_COMM_WORLD_RANK" not in given.of:
        return None
    kinds = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, world, local_rank, local_world = (f"OMPI_COMM_WORLD_{kind}" for kind in kinds)
    job = given.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")
    return _mpi(given, "mpirun", (rank, world, local_rank, local_world), job)


def _hydra(given: _Variables) -> Launched | None:
    """Mpiexec of MPICH and Intel MPI. `srun --mpi=pmi2` sets PMI_RANK too, but not the ranks of a host."""
    if not {"PMI_RANK", "MPI_LOCALNRANKS"} <= given.of.keys():
        return None
    return _mpi(given, "mpiexec", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), None)


def _other_mpiexec(given: _Variables) -> Launched | None:
    """Mpiexec of Cray's PALS; on a Cray srun sets these too. PMI's alone, as of Flux, do not say what a host has."""
    if "PMI_RANK" not in given.of or given.number("PMI_SIZE", otherwise=1) < 2:
        return None
    if "PMI_LOCAL_SIZE" in given.of:
        return _mpi(given, "mpiexec", ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"), None)
    do = "export RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or use srun or torchrun"
    missing = f"PMI_RANK is set, but not MPI_LOCALNRANKS, the ranks of this host: {do}"
    return Launched("PMI", world=given.number("PMI_SIZE"), missing=(missing,))


def _srun(given: _Variables) -> Launched | None:
    if given.text("SLURM_PROCID") is None or given.text("SLURM_STEP_ID", "SLURM_STEPID") is None:
        return None
    rank, world = given.number("SLURM_PROCID"), given.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    hosts = given.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", otherwise=1)
    local_rank, host = given.number("SLURM_LOCALID"), given.number("SLURM_NODEID", otherwise=0)
    tasks = _tasks_of_hosts(given, world, hosts)
    if not given.missing and host < len(tasks) and sum(tasks[:host]) + local_rank != rank:
        given.missing.append("tasks of a host are not in sequence: srun --distribution=block")
    names = ("SLURM_JOB_ID", "SLURM_JOBID"), ("SLURM_STEP_ID", "SLURM_STEPID")
    job, step = (given.text(*each) for each in names)
    return given.launched(
        "srun",
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=tasks[host] if host < len(tasks) else 0,
        host=host,
        hosts=hosts,
        address=given.address(hosts, do="SLURM_STEP_NODELIST names no host") if hosts == 1 else _first_node(given),
        port=given.port(f"{job}.{step}"),
    )


def _tasks_of_hosts(given: _Variables, world: int, hosts: int) -> list[int]:
    """Tasks by host; empty, with a note, where Slurm's variables give none."""
    text = given.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    try:
        counts = expand_counts(text) if text is not None else []
    except ValueError:
        counts = []
    if len(counts) == hosts and sum(counts) == world:
        return counts
    if hosts and world % hosts == 0:  # those of the job, of which this step takes a part
        return [world // hosts] * hosts
    given.missing.append(f"SLURM_STEP_TASKS_PER_NODE is {text!r}, for {world} tasks on {hosts} hosts")
    return []


def _first_node(given: _Variables) -> str | None:
    """The address of the first host of a step."""
    nodes = given.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    try:
        first = expand_hosts(nodes)[0] if nodes is not None else None
    except ValueError:
        first = None
    return given.text("MASTER_ADDR") or first or given.address(0, do=f"SLURM_STEP_NODELIST is {nodes!r}")


def _batch_script(given: _Variables) -> Launched | None:
    """A job of Slurm with several tasks, in a process that srun has not started."""
    if given.text("SLURM_JOB_ID", "SLURM_JOBID") is None or given.number("SLURM_NTASKS", otherwise=1) < 2:
        return None
    tasks = given.text("SLURM_NTASKS")
    return Launched(
        "Slurm",
        missing=(f"SLURM_NTASKS={tasks} without srun: this is the batch script's own process; put srun before it",),
    )


def _a_process_a_host(
    given: _Variables, launcher: str, count: str, number: tuple[str, ...], each: str, address: tuple[str, ...], do: str
) -> Launched:
    """`count`, `number`, `each` and `address` name the variables of hosts, this host, ranks of it, and the first."""
    hosts, host, ranks = given.number(count), given.number(*number), given.text(each) or ""
    found = given.address(hosts, *address, do=do)
    return given.launched(
        launcher,
        rank=host,
        world=hosts,
        host=host,
        hosts=hosts,
        address=found.split()[0] if found else None,
        port=given.port(None, "PET_MASTER_PORT"),
        ranks_each=int(ranks) if ranks.isdecimal() else 0,
    )


def _kubernetes(given: _Variables) -> Launched | None:
    """Kubeflow's TrainJob sets torchrun's options (PET_...); a plain Indexed Job has them from its manifest."""
    if given.text("PET_NNODES") is None:
        if "JOB_COMPLETION_INDEX" not in given.of:
            return None
        alone = "PET_NNODES is not set, so this pod runs alone: set it to the Job's completions (docs/clusters.md)"
        return Launched("Indexed Job", missing=(alone,))
    name = "TrainJob" if "PET_NODE_RANK" in given.of else "Indexed Job"
    number = ("PET_NODE_RANK", "JOB_COMPLETION_INDEX")
    do = "set PET_MASTER_ADDR to pod 0's name, JOB-0.SERVICE of a headless service"
    return _a_process_a_host(
        given, name, "PET_NNODES", number, "PET_NPROC_PER_NODE", ("PET_MASTER_ADDR",), f"{do} (docs/clusters.md)"
    )


def _skypilot(given: _Variables) -> Launched | None:
    if "SKYPILOT_NODE_RANK" not in given.of:
        return None
    count, number, each = "SKYPILOT_NUM_NODES", ("SKYPILOT_NODE_RANK",), "SKYPILOT_NUM_GPUS_PER_NODE"
    address = ("SKYPILOT_NODE_IPS",)
    return _a_process_a_host(given, "SkyPilot", count, number, each, address, "SKYPILOT_NODE_IPS is empty")


def _dstack(given: _Variables) -> Launched | None:
    if "DSTACK_NODE_RANK" not in given.of:
        return None
    count, number, each = "DSTACK_NODES_NUM", ("DSTACK_NODE_RANK",), "DSTACK_GPUS_PER_NODE"
    address = ("DSTACK_MASTER_NODE_IP",)
    return _a_process_a_host(given, "dstack", count, number, each, address, "DSTACK_MASTER_NODE_IP is empty")


#: The first that finds its variables counts. mpirun and mpiexec start their daemons by srun, so their ranks have both.
_READERS: tuple[Callable[[_Variables], Launched | None], ...] = (
    _torchrun,
    _mpirun,
    _hydra,
    _srun,
    _other_mpiexec,
    _kubernetes,
    _skypilot,
    _dstack,
    _batch_script,
)


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
