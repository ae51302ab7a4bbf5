"""What a command takes from the launcher that started it: torchrun, srun, or any other that `odc.launchers` knows."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odc import launchers
from odc.errors import ConfigError


def under_launcher() -> str | None:
    """The launcher that has started this process as one of several, or torchrun; None without."""
    launched = launchers.find(os.environ)
    if launched is None or (launched.launcher != launchers.TORCHRUN and launched.world == 1):
        return None
    return launched.launcher


@dataclass(frozen=True)
class Start:
    """How a person starts a command of odc: the words before the command's name, and what they do not show."""

    words: Sequence[str] = ("odc",)
    note: str = ""


ALONE = Start()


def how_to_start(arguments: Sequence[str], parent: int | None = None, proc: Path = Path("/proc")) -> Start:
    """How this process's job was started, to be called before `join_launcher`. `arguments` are those of this command.

    The words of torchrun and mpirun are read off the processes above this one, from `parent` on; srun's follow from its
    variables.
    """
    launched = launchers.find(os.environ)
    if launched is None or launched.missing:
        return ALONE
    if launched.launcher == "srun":
        alike = launched.local_world * launched.hosts == launched.world
        tasks = ("--ntasks-per-node", launched.local_world) if alike else ("--ntasks", launched.world)
        return Start(tuple(map(str, ("srun", "--nodes", launched.hosts, *tasks, "odc"))))
    above = launched.launcher in ("mpirun", "mpiexec") or "TORCHELASTIC_RUN_ID" in os.environ
    words = _words_above(arguments, os.getppid() if parent is None else parent, proc) if above else ()
    if not words:
        return Start(note="by the launcher of this job")
    if launched.launcher == launchers.TORCHRUN and launched.hosts > 1:
        return Start(words, "on every host, as this job")
    return Start(words)


def _words_above(arguments: Sequence[str], pid: int, proc: Path) -> tuple[str, ...]:
    """The words before `arguments` in the first command line that ends with them, of `pid` and the processes above it.

    Empty where there is none.
    """
    found: tuple[str, ...] = ()
    try:
        while pid > 1:
            words = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            if arguments and words[-len(arguments) :] == [*arguments]:
                found = tuple(words[: -len(arguments)])
            pid = launchers.parent_of(pid, proc)
    except OSError:  # of another container, or gone
        pass
    program = Path(found[1]).name if len(found) > 1 else ""
    return (program, *found[2:]) if program and shutil.which(program) == found[1] else found


def join_launcher(given: dict[str, Any]) -> int:
    """Ranks of the job that this process is to start: 0 without a launcher (all of them), 1 where it is one itself.

    Sets torchrun's variables under any other launcher; of a process for several ranks they are those of the first.
    `ranks` of `given` are those of the whole job; of one host they are set here if the launcher says them. Raises
    ConfigError for what is missing.
    """
    launched = launchers.find(os.environ)
    if launched is None:
        return 0
    if launched.launcher == launchers.TORCHRUN:
        return 1
    if launched.world == 1:
        if launched.missing and "ranks" not in given:
            print(f"odc: {launched.describe()}", file=sys.stderr, flush=True)
        if launched.ranks_each > 1:
            given.setdefault("ranks", launched.ranks_each)
        return 0
    if launched.missing:
        raise ConfigError(launched.describe())
    each = _ranks_each(launched, given.get("ranks"))
    os.environ.update(launched.variables(each))
    return each


def _ranks_each(launched: launchers.Launched, ranks: int | None) -> int:
    """Ranks that each process of `launched` stands for, of a job of `ranks`."""
    if ranks is None and not launched.ranks_each:
        raise ConfigError(
            f"ranks: {launched.launcher} starts one process a host and does not say for how many ranks; name those of "
            f"all {launched.hosts} hosts (--ranks)"
        )
    total = launched.ranks_each * launched.world if ranks is None else ranks
    if total < launched.world or total % launched.world:
        raise ConfigError(
            f"ranks: {launched.launcher} has started {launched.world} processes, each for equally many ranks; --ranks "
            f"must be {launched.world} or a multiple, not {total}"
        )
    return total // launched.world


def given_by_launcher(given: dict[str, Any]) -> dict[str, Any]:
    """Fields of a job that torchrun's variables set: the ranks, and the ranks of a node where `given` has none, and the
    nodes have equally many.
    """
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    alike = 1 < local < world and local * int(os.environ.get("GROUP_WORLD_SIZE", "0")) in (0, world)
    return {"ranks": world} | ({"per_node": local} if alike and "per_node" not in given else {})


def refuse_launcher(what: str) -> None:
    """Raise ConfigError where a launcher has started this process as one of several."""
    if (launcher := under_launcher()) is not None:
        raise ConfigError(f"{what} starts its own ranks, on one host; start it without {launcher}")


def carry_out_job(workload: Any, each: int) -> Any | None:
    """Runs `each` ranks of a job, as `join_launcher` counts them; returns the result of rank 0 where that is known.

    A rank's error goes to torchrun, too. Several ranks of a host, with other hosts, cannot be started again.
    """
    from odc.experiments import job

    if each == 0:
        return job.run(workload)[0]
    if each == 1:
        from torch.distributed.elastic.multiprocessing.errors import record

        run_rank: Callable[[Any], Any] = record(job.run_rank)
        result = run_rank(workload)
        return result if os.environ["RANK"] == "0" else None
    if workload.restarts:
        raise ConfigError(f"recover: {each} ranks of a process that the launcher starts are not started again")
    from odc.experiments.hosts import HostTeam

    with HostTeam.of_launcher(task="the job") as team:
        workload.prepare()
        results = job.launch_ranks(workload, team)
        return results[0] if team.leads else None
