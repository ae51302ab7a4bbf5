"""Leaving a job whose modules will be used again, in the next generation of the same job (docs/recovery.md).

`odc.shutdown` is for the end: modules cannot be run after it. Here they keep their parameters, and the root is built
anew when they are next used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from odc.deadlines import STORE_ENDING_S, STORE_LEAST_S, WORD_SLEEP_S
from odc.fsdp import _torch_compat as compat
from odc.fsdp import _torch_groups, hooks
from odc.fsdp.call import join_job, shutdown
from odc.fsdp.group import sharded_groups
from odc.fsdp.root import live_roots
from odc.fsdp.root_layout import registered
from odc.net import JobStore, announce_failure, announce_process
from odc.net.network import HostNetwork
from odc.protocol import Word
from odc.runtime import daemon
from odc.settings import Settings


def refuse_groups(model: nn.Module) -> None:
    """UnsupportedError if a model is sharded such that its process groups cannot be made again."""
    _torch_groups.refuse_other_groups(sharded_groups(model))


def aborted_by_another() -> bool:
    """Whether a root of this process has learned that another rank has ended the job."""
    found = {root.member.protocol.board.load(Word.ABORT) - 1 for root in live_roots()}
    return bool(found - {-1, dist.get_rank()})


def refuse_aborted(doing: str) -> bool:
    """Raise PeerLostError if a root of this process has learned that the job ends. Returns whether there is one."""
    roots = live_roots()
    for root in roots:
        root.member.protocol.waiter.check(doing)
    return bool(roots)


def await_rank(ready: Callable[[float], bool], rank: int, what: str) -> None:
    """Wait for `rank` (global) to do `what`; `ready(seconds)`, which may sleep for so long, is true once it has.

    Raises as every wait for that rank in a minibatch does, after the same time without a call of it into odc. Returns
    at once where no root of this process has that rank.
    """
    for root in live_roots():
        if rank in root.grid.ranks:
            until, pause = root.member.protocol.waiter.until, functools.partial(ready, WORD_SLEEP_S)
            until(functools.partial(ready, 0.0), root.grid.ranks.index(rank), what, pause=pause)
            return


def announce_rank(timeout_s: float, settings: Settings | None) -> None:
    """Let the others notice from now on that this process ends: those of its host, and its neighbours on other hosts.

    In each new default process group. Without it the end of a rank before its first `fully_shard` would be noticed by
    no rank. Waits for no rank, but up to `timeout_s` for the store: torch asks for the name of each new connection's
    other end, which takes a resolver that does not answer 5 s and more. `settings` are the network's.
    """
    rank, store = dist.get_rank(), compat.default_store()
    announce_process(JobStore(store, max(timeout_s, STORE_LEAST_S), rank), rank)
    server = daemon(rank)
    hooks.end_collectives_at_a_loss(server.liveness)
    server.watch_hosts(store, settings, dist.get_world_size())


def host_network(settings: Settings) -> HostNetwork:
    """How other hosts reach this process, in the present default process group.

    Raises UnsupportedError where this host's address cannot be determined, and as a JobStore does.
    """
    rank = dist.get_rank()
    return daemon(rank).listening(compat.default_store(), settings)


def leave_generation(models: list[nn.Module], reason: str, culprit: int) -> None:
    """Give the open minibatch up, abort and shut down all roots, and destroy the process group.

    On the rank's main thread, outside of forward and backward, with no error being handled. Waits for no rank.
    """
    store = JobStore(compat.default_store(), STORE_ENDING_S, dist.get_rank())
    for root in live_roots():
        root.member.protocol.abort(reason, culprit)
        root.minibatch.leave()
    announce_failure(store, reason, culprit)  # for ranks that attach to no heap any more
    _torch_groups.abort_nccl()  # heaps end when their devices are done, also with collectives
    shutdown()
    groups = [group for model in models for group in sharded_groups(model)]
    for group in groups:
        group.forget_root()
    _torch_groups.drop_groups(groups)


def enter_generation(models: list[nn.Module]) -> None:
    """Take the default process group that was made since; calls no collective."""
    groups = [group for model in models for group in sharded_groups(model)]
    _torch_groups.take_groups(groups)
    calls = [
        registered(module) for model in models for module in model.modules() if isinstance(module, compat.FSDPModule)
    ]
    settings = next((call.settings for call in calls if call.settings is not None), None)
    hooks.watch_exit(compat.default_store(), dist.get_rank())
    join_job(dist.get_rank(), settings)
