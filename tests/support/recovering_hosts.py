"""Jobs of `support.recovering` over several hosts: on each a launcher, which starts ranks there and starts them again.

The job's store is hosted by the test's process, as a scheduler would, and outlives every rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from odc.ranks.processes import PATIENCE_S, RanksFailed, task
from odc.ranks.worker import _end, die_with
from support import recovering
from support.host_ranks import move_to
from support.hosts import Host, Hosts
from support.ranks import RankProcesses
from support.recovering import COMMON, STEPS, Death, Work


class Launch(NamedTuple):
    """What one host starts: these ranks, each again if it ends otherwise than well, so often in all.

    It begins once the files `after` are there: the deaths of these ranks on another host. `on` is the host's number,
    where it is not the launch's own.
    """

    ranks: Sequence[int]
    restarts: int
    after: Sequence[str] = ()
    on: int | None = None


def launch_here(
    host: int, launch: Launch, environments: Mapping[int, dict[str, str]], entry: Callable[..., Any], *program: Any
) -> list[int]:
    """As a task: on the host of process `host` start ranks that run `entry(*program)`.

    Returns how often a rank ended otherwise than well, by the exit codes, once every rank has ended, or may not be
    started again.
    """
    move_to(host)
    folder, ended, running = Path(program[0]), list[int](), dict[int, int]()
    while not all((folder / name).exists() for name in launch.after):
        time.sleep(0.01)
    for rank in launch.ranks:
        running[_start(environments[rank], entry, program)] = rank
    while running:
        pid, status = os.wait()
        rank = running.pop(pid, -1)
        if rank < 0 or status == 0:  # the first is a keeper that has lost its rank
            continue
        ended.append(os.waitstatus_to_exitcode(status))
        if len(ended) <= launch.restarts:
            running[_start(environments[rank], entry, program)] = rank
    return ended


def _start(environment: dict[str, str], entry: Callable[..., Any], program: Sequence[Any]) -> int:
    """Fork a rank; what it returns goes into a file beside the program's folder."""
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with(parent)
        os.environ.update(environment)
        torch.set_num_threads(1)
        torch.save(recovering.unless_over(entry, *program), result_file(program[0], int(os.environ["RANK"])))
        code = 0
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)  # peers learn of it
    _end(code)
    raise AssertionError("unreachable")


def result_file(folder: str, rank: int) -> Path:
    return Path(f"{folder}.{rank}.pt")


def run_on(
    hosts: Hosts,
    per_host: int,
    folder: Path,
    deaths: Collection[Death] = (),
    *,
    steps: int = STEPS,
    launches: Sequence[Launch] | None = None,
    restarts: int | None = None,
    keeper: bool = False,
    killed: tuple[float, int, int] | None = None,
    work: Work = COMMON,
    **options: Any,
) -> list[Any]:
    """The job on `per_host` ranks of each host, and what each rank returned; None if it ended after the last step.

    `killed` and `work` are those of `train`; `options` go to `odc.Recovery`. `launches`, by host, say otherwise where
    ranks are started. With `keeper` the launchers say that they start ranks again, as torchrun does.
    """
    allowed = 3 * len(deaths) if restarts is None else restarts
    if launches is None:
        launches = [Launch(range(i * per_host, (i + 1) * per_host), allowed) for i in range(len(hosts))]
    program = tuple(deaths), steps, killed, options, work
    return run_program_on(hosts, per_host, launches, keeper, recovering.train, folder, *program)


def run_program_on(
    hosts: Hosts,
    per_host: int,
    launches: Sequence[Launch],
    keeper: bool,
    entry: Callable[..., Any],
    folder: Path,
    *program: Any,
) -> list[Any]:
    """What `entry(folder, *program)` returned on each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    world = len({rank for launch in launches for rank in launch.ranks})
    store = hosts.new_store()  # it is there until this function returns
    each = {rank: _environment(hosts, store, rank, per_host, world, keeper) for rank in range(world)}
    processes = RankProcesses(len(hosts), once=True, own=lambda host: {"OMP_NUM_THREADS": "1"})
    try:
        at = [hosts[i if launch.on is None else launch.on].pid for i, launch in enumerate(launches)]
        processes.send(
            *(
                task(launch_here, host, launch, each, entry, str(folder), *program)
                for host, launch in zip(at, launches, strict=True)
            )
        )
        if not processes.answers(PATIENCE_S, grace_s=1.0):
            processes.fail("a launcher has failed")
        processes.wait()
        missing = [rank for rank in range(world) if not result_file(str(folder), rank).exists()]
        if missing:
            printed = "\n".join(outcome.describe() for outcome in processes.outcomes)
            raise RanksFailed(f"ranks {missing} have not ended well\n{printed}")
    finally:
        processes.close()
    return [torch.load(result_file(str(folder), rank), weights_only=False) for rank in range(world)]


def _environment(hosts: Hosts, store: Any, rank: int, per_host: int, world: int, keeper: bool) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % per_host),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(per_host),
        "GROUP_RANK": str(rank // per_host),
        "GROUP_WORLD_SIZE": str(world // per_host),
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_MAX_RESTARTS": "100" if keeper else "0",
        **hosts[0].environment(),
    }


def kill_ranks(host: Host) -> int:
    """Kill all ranks on a host, whose launcher lives; returns how many there were."""
    there = host.processes()
    launchers = {pid for pid in there if _parent(pid) not in there}
    ranks = [pid for pid in there if _parent(pid) in launchers]
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(ranks)


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
