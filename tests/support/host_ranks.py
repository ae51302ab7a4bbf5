"""Rank processes on several hosts (see `support.hosts`): pools that last, and one-shot ranks that may be killed.

A rank is forked like any other of the tests, which loads no module anew, and enters its host before it joins the
process group. As the PID namespace holds for children only, it forks once more; the process between does nothing and
ends as the rank ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from odc.ranks.processes import PATIENCE_S, RankOutcome, task
from support.hosts import Hosts, Part, PerHost, children, enter_namespaces, places_of
from support.ranks import RankPool, RankProcesses

_groups = itertools.count()


def live_on(host: int, prefix: str) -> None:
    """As a rank's first task: return in a child that lives in the namespaces of process `host` and has joined."""
    move_to(host)
    _join(prefix)


def move_to(host: int) -> None:
    """Return in a child that lives in the namespaces of process `host`; the parent ends as it does."""
    folder = os.getcwd()
    enter_namespaces(host)
    os.chdir(folder)  # of the new mounts
    child = os.fork()
    if child:
        _stand_for(child)
    from odc.ranks.worker import die_with

    die_with(0)  # the number of a parent in another namespace


def _stand_for(child: int) -> None:
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(child, signal.SIGUSR1))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        time.sleep(60)
    os._exit(code)


def _join(prefix: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    stores: Any = dist
    timeout = timedelta(seconds=PATIENCE_S)
    store = stores.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=stores.PrefixStore(prefix, store), rank=rank, world_size=world, timeout=timeout
    )


class HostRanks(RankProcesses):
    """`per_host` ranks on each of the hosts, or of each its own number, in one process group; those of a host follow
    each other.
    """

    def __init__(self, hosts: Hosts | Part, per_host: PerHost) -> None:
        places = places_of(per_host, len(hosts))
        world = len(places)
        super().__init__(world, once=False, own=lambda rank: hosts.rank_environment(rank, per_host))
        self._entered: dict[int, int] = {}
        prefix = f"group{next(_groups)}"
        try:
            self.send(*(task(live_on, hosts[host].pid, prefix) for host, _ in places))
            if not self.answers(PATIENCE_S, grace_s=1.0):
                self.fail("ranks could not enter their hosts")
            self._entered = {outcome.rank: children(outcome.pid)[0] for outcome in self.outcomes}
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the ranks, as they are numbered outside their hosts."""
        return [self._entered[outcome.rank] for outcome in self.outcomes]

    def kill(self, rank: int) -> float:
        now = time.monotonic()
        self.signal(rank, signal.SIGKILL)
        return now if rank in self._entered else super().kill(rank)

    def leave(self) -> None:
        """Have every rank end in good order after its present task."""
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.send_bytes(b"")

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank that has entered its host: SIGSTOP to stop it, SIGCONT to let it go on."""
        if rank in self._entered:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._entered[rank], number)


class HostPool(RankPool):
    """Ranks on hosts that run one function after another: `run(function, *args)` as in `RankPool`."""

    def __init__(self, hosts: Hosts | Part, per_host: PerHost) -> None:
        super().__init__(len(places_of(per_host, len(hosts))))
        self.hosts, self.per_host = hosts, per_host

    def _start(self) -> RankProcesses:
        return HostRanks(self.hosts, self.per_host)


@contextlib.contextmanager
def spawn_on_hosts(
    hosts: Hosts | Part, per_host: PerHost, function: Callable[..., Any], *args: Any
) -> Iterator[HostRanks]:
    """Start ranks that run `function(rank, world, *args)` and end; what still lives at the end is killed."""
    ranks = HostRanks(hosts, per_host)
    try:
        ranks.perform(function, args)
        ranks.leave()
        yield ranks
    finally:
        ranks.close()


class HostPools:
    """Pools by shape, made when they are first asked for; each has hosts of its own."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, PerHost, str], HostPool] = {}
        self._open = contextlib.ExitStack()

    def __call__(self, count: int, per_host: PerHost, shared: str = "") -> HostPool:
        """The pool of `per_host` ranks on each of `count` hosts, or of as many as it says of each (see `Hosts`)."""
        key = count, per_host, shared
        if key not in self._pools:
            self._pools[key] = HostPool(self._open.enter_context(Hosts(count, shared)), per_host)
        return self._pools[key]

    def close(self) -> list[RankOutcome]:
        """End all ranks in good order, then their hosts; returns how the ranks ended."""
        try:
            return [outcome for pool in self._pools.values() for outcome in pool.close()]
        finally:
            self._open.close()
