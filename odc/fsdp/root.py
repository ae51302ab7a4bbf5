"""One root: everything odc keeps for a tree of sharded modules.

It is built when its tree is first used, as only then dtypes, names and the set of groups are final, and named by when
`fully_shard` was called on its module, so ranks may run their roots in any order. Building calls no collective.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from odc.errors import OdcError, UnsupportedError
from odc.fsdp import _torch_compat as compat
from odc.fsdp._torch_param import params_of
from odc.fsdp.fetcher import Fetcher
from odc.fsdp.group import OdcParamGroup, sharded_groups
from odc.fsdp.minibatch import Minibatch
from odc.fsdp.refusals import refuse_capture, refuse_gradient_views
from odc.fsdp.root_layout import (
    agreed_settings,
    calls_below,
    grid_of,
    identity_of,
    open_heap,
    registered,
    sharded_modules,
    units_of,
)
from odc.fsdp.sender import Sender
from odc.memory import keep_freed
from odc.net import JobStore
from odc.protocol import RootState
from odc.runtime import Member, locate, refuse_losses
from odc.trace import recorder

_roots: weakref.WeakSet[Root] = weakref.WeakSet()


class Root:
    """A root and its parts, of the module on which `fully_shard` was called last. Made on a rank's main thread."""

    def __init__(self, module: compat.FSDPModule) -> None:
        self.state = state = compat.lazy_init(module)
        self.groups = groups = cast("list[OdcParamGroup]", compat.groups_of_root(self.state))
        if any(compat.is_manual(below) for below in compat.states_below(self.state)):
            raise OdcError("set_manual_backward_finalization() must be called on the root")
        call = registered(module)
        self.rank = rank = dist.get_rank()
        if groups:
            refuse_capture(f"rank {rank}", compat.device_of(groups[0]))
        grid = grid_of(groups, rank)
        self.settings = settings = agreed_settings(module, call)
        store = compat.default_store()
        watch = functools.partial(refuse_losses, f"rank {rank}, building a root")
        self.grid = grid = locate(JobStore(store, settings.timeout_s, rank, watch=watch), grid)
        for group in groups:
            group.odc_params = list(params_of(group))
        units = units_of(groups, settings)
        if settings.gradient_views:
            params = [group.odc_params for group in groups]
            refuse_gradient_views(f"rank {rank}", grid, list(zip(units, params, strict=True)))
        if compat.device_of(groups[0]).type == "cpu":
            # One unit in use, one fetched ahead, and the gradients of two on their way, rarely of four.
            keep_freed(4 * grid.shards * max(unit.published_bytes for unit in units))
        self.identity = identity = identity_of(call.sequence, grid)
        # Nothing that the daemon or `_shut_down` holds may hold this object: a deleted model gives its heap back.
        self.member = member = Member(
            store,
            identity,
            grid,
            units,
            settings,
            "odc-heap-2",
            lambda rendezvous: open_heap(identity, grid, rendezvous, settings, groups, state),
        )
        self.layout, lanes = member.layout, member.layout.heap.lanes
        self.fetcher = Fetcher(member.shards, settings.prefetch, lanes)
        self.sender = Sender(member.pusher, settings.push_overlap, lanes)
        self.minibatch = Minibatch(member, self.sender, groups, compat.Iteration(self.state))
        self.minibatch.manual = compat.is_manual(self.state)
        for group, unit in zip(groups, units, strict=True):
            group.odc_root, group.odc_unit = self, unit
            group.odc_fetcher, group.odc_minibatch = self.fetcher, self.minibatch
        self.thread = threading.get_ident()  # that trains: an error that ends it ends the root
        self._note: list[str] = []
        self._end = weakref.finalize(self, _shut_down, member, self.fetcher, self.sender, self._note)
        self._end.atexit = False  # `shutdown` does it, before the daemon is stopped
        recorder().rank = self.rank
        if not settings.trace:
            recorder().enabled = False
        member.announce(settings.fingerprint(), calls_below(module))
        _roots.add(self)

    @property
    def alive(self) -> bool:
        return self._end.alive

    def map_peers(self) -> None:
        """On a device map every peer now, on the thread that trains, once each is up; later no thread maps anything."""
        if self.layout.heap.lanes.asynchronous:
            self.member.protocol.attach_all()

    def before_forward(self) -> None:
        """The root's module is about to run: count the microbatch, refuse weights changed since they were published."""
        if self.member.forked:  # whose copy of the heap reads as zeros
            raise UnsupportedError(
                f"rank {self.rank}: a process that was forked from it, as a data loader's workers are, cannot run its "
                "model: run it in the rank itself"
            )
        protocol = self.member.protocol
        protocol.touch("beginning a forward")
        self.minibatch.recover()
        fresh = self.minibatch.state is RootState.CLOSED
        self.minibatch.begin()
        if not fresh and self.settings.stale_check:
            params = [group.odc_params for group in self.groups]
            shards = [[param.shard() for param in unit] for unit in params]
            trains = torch.is_grad_enabled() and any(param.parameter.requires_grad for unit in params for param in unit)
            self.minibatch.stale.compare(self.minibatch.epoch, shards, now=not trains)
        protocol.count_microbatch()
        self.minibatch.last.forward()
        self.fetcher.restart()

    def has(self, module: nn.Module) -> bool:
        """Whether `module` is sharded in this tree, or has a sharded parameter of its own."""
        if isinstance(module, compat.FSDPModule) and compat.state_of(module) is self.state:
            return True
        parts = (part for group in self.groups for param in group.odc_params for part in param.holders)
        return any(module in group.modules for group in self.groups) or module in parts

    def holds_any(self, ids: set[int]) -> bool:
        """Whether `ids` has the `id()` of a sharded parameter; for most optimizers the first one decides."""
        return bool(ids) and any(id(param.parameter) in ids for group in self.groups for param in group.odc_params)

    def shut_down(self, note: str = "") -> Callable[[], None]:
        """Shut down in good order; the modules, which let go of this root, must not be run any more. Does not wait.
        Idempotent.

        `note` goes into the error of a peer that waits for this rank in vain. Returns what `ReleaseQueue.add` does.
        """
        self._note.append(note)
        wait = self._end()
        for group in self.groups:
            if group.odc_root is self:
                group.leave_root()
        return wait or (lambda: None)


def _shut_down(member: Member, fetcher: Fetcher, sender: Sender, note: Sequence[str]) -> Callable[[], None] | None:
    """Also called by the garbage collector, on any thread: does not wait."""
    if not member.forked:
        fetcher.close()
        sender.close()
    return member.shut_down("".join(note))


def live_roots() -> list[Root]:
    """Every root of this process that has been used and not been shut down."""
    return [root for root in _roots if root.alive]


def root_of(module: compat.FSDPModule) -> Root:
    """The root that `module` is on top of, built on first use; UnsupportedError if `module` lies below the top."""
    root = root_at(module)
    if root.state is not compat.state_of(module):
        raise UnsupportedError("call this on the root, the module on which fully_shard was called last")
    return root


def root_at(module: compat.FSDPModule) -> Root:
    """The root of the tree that holds `module`, built on first use; OdcError if it has shut down."""
    state = compat.state_of(module)
    for root in live_roots():
        if root.state is state:
            return root
    top = cast(compat.FSDPModule, _top(module))
    for root in live_roots():
        if root.state is compat.state_of(top):
            return root
    if any(group.odc_root not in (None, *live_roots()) for group in sharded_groups(cast(nn.Module, top))):
        raise OdcError("this model has left the job (odc.shutdown was called); it cannot be run any more")
    with torch.inference_mode(False):  # what the root keeps is written to in training, whichever ran first
        return Root(top)


def root_above(group: compat.FSDPParamGroup) -> Root:
    """The root whose tree holds `group`, built on first use: a unit may be unsharded before the first forward."""
    return root_at(cast(compat.FSDPModule, group.modules[0]))


def refuse_mark_below(module: compat.FSDPModule, last: bool) -> None:
    """Before the next backward is marked as the last or not: UnsupportedError if `module` lies below a root that is
    marked otherwise.
    """
    state = compat.state_of(module)
    if compat.is_root(state):
        return
    if compat.is_root(state) is None:  # states do not share the root's mark yet, which will replace theirs
        top = compat.state_of(cast(compat.FSDPModule, _top(module)))
        if top is state:
            return
        state = top
    if compat.Iteration(state).is_last_backward() != last:
        raise UnsupportedError(
            "set_is_last_backward(), set_requires_gradient_sync() and, on a hybrid mesh, set_requires_all_reduce() "
            "must be called on the root, before any module below it: a minibatch ends for all units together"
        )


def _top(module: Any) -> Any:
    """The outermost sharded module whose tree holds `module`."""
    holders = [m for m in sharded_modules() if any(below is module for below in m.modules())]
    return max(holders, key=lambda m: sum(1 for _ in m.modules()), default=module)
