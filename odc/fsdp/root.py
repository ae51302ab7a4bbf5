"""One root: everything odc keeps for a tree of sharded modules.

Chose to build a root when its tree is first used, as torch does (only then are dtypes, names and the set of groups
final), but to *name* it by when `fully_shard` was called on its module: ranks may run their roots in any order and
still agree which heap is which. Building calls no collective; peers are attached when first needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from odc.errors import OdcError, UnsupportedError
from odc.fsdp import _torch_compat as compat
from odc.fsdp._torch_param import ShardedParam, params_of
from odc.fsdp.backend import open_heap
from odc.fsdp.fetcher import Fetch, Fetcher
from odc.fsdp.group import OdcParamGroup
from odc.fsdp.minibatch import Minibatch
from odc.fsdp.registry import Sharded, registered
from odc.fsdp.sender import Sender
from odc.fsdp.stale import refuse_stale
from odc.runtime import (
    Daemon,
    Geometry,
    Gradient,
    Rendezvous,
    Service,
    Space,
    State,
    UnitSpec,
    Verbs,
    Waiter,
    Word,
    accumulator_dtype,
    daemon,
    leave,
    summary,
)
from odc.settings import Settings
from odc.trace import recorder

_roots: weakref.WeakSet[Root] = weakref.WeakSet()


class Root:
    """A root and its parts. Made by `root_of` on a rank's main thread.

    Args:
        module: on which `fully_shard` was called last in its tree.
    """

    def __init__(self, module: compat.FSDPModule) -> None:
        self.state = compat.lazy_init(module)
        self.groups = cast("list[OdcParamGroup]", compat.groups_of_root(self.state))
        if any(compat.is_manual(below) for below in compat.states_below(self.state)):
            raise OdcError("set_manual_backward_finalization() must be called on the root")
        sharded = registered(module)
        self.geometry = _geometry(self.groups, sharded.rank)
        self.settings = _agreed_settings(module, sharded)
        self.rank = sharded.rank
        for group in self.groups:
            group.odc_params = list(params_of(group))
        units = [_unit(i, group, self.settings) for i, group in enumerate(self.groups)]
        self.identity = _identity(sharded.sequence, self.geometry)
        # Nothing that the daemon or `_leave` holds may hold this object: a deleted model gives its heap back.
        waiter: list[Waiter] = []
        self.rendezvous = rendezvous = Rendezvous(
            compat.default_store(),
            self.identity,
            self.geometry,
            self.settings.timeout_s,
            lambda doing: waiter[0].check(doing),
        )
        heap = open_heap(self.identity, self.geometry, rendezvous, self.settings, self.groups, self.state)
        self.space = Space(heap, self.geometry, units, self.settings, "odc-heap-2")
        self.verbs = Verbs(self.space, rendezvous.ring)
        waiter.append(self.verbs.waiter)
        service = Service(self.identity, self.space)
        server = daemon(self.rank)
        rendezvous.on_attach = lambda member, pid: server.watch(service, member, pid)
        rendezvous.on_failure = service.abort
        server.serve(service)
        self.fetcher = Fetcher(self.verbs, self.settings.prefetch, heap.lanes)
        self.sender = Sender(self.verbs, self.settings.push_overlap, heap.lanes)
        self.minibatch = Minibatch(self.verbs, self.sender, self.groups, compat.Iteration(self.state))
        self.minibatch.manual = compat.is_manual(self.state)
        self.shards = self.geometry.shards
        for group, unit in zip(self.groups, units, strict=True):
            group.odc_root, group.odc_unit = self, unit
        self.thread = threading.get_ident()  # that trains: an error that ends it ends the root
        self._note: list[str] = []
        self._leave = weakref.finalize(
            self, _leave, os.getpid(), server, service, rendezvous, self.fetcher, self.sender, self._note
        )
        self._leave.atexit = False  # `shutdown` does it, before the daemon is stopped
        recorder().set_rank(self.rank)
        if not self.settings.trace:
            recorder().enabled = False
        rendezvous.announce(
            server.door_name,
            service.token,
            heap.digest,
            summary(units),
            self.settings.fingerprint(),
            [unit.lines() for unit in units],
            _calls(module),
        )
        _roots.add(self)

    # what a group needs (see `odc.fsdp.group.Engine`) ------------------------------------------------------------

    def begin(self) -> None:
        """Open a minibatch if none is open."""
        self.minibatch.begin()

    def start_fetch(self, unit: UnitSpec, params: list[ShardedParam], *, now: bool) -> Fetch:
        """Get a unit under way."""
        return self.fetcher.start(unit, params, now=now)

    def used(self, group: OdcParamGroup, phase: str) -> None:
        """Fetch ahead what came after the group last time."""
        self.fetcher.used(group, phase)

    def push(self, unit: UnitSpec, gradients: list[Gradient]) -> None:
        """Send a unit's gradients to their owners."""
        self.minibatch.push(unit, gradients)

    def finalized(self, group: OdcParamGroup) -> None:
        """A last backward is over for the group."""
        self.minibatch.finalized(group)

    def partial_backward(self) -> None:
        """A backward has gone through a group of which only some modules ran."""
        self.minibatch.partial_backward()

    # what the modules need ---------------------------------------------------------------------------------------

    def map_peers(self) -> None:
        """On a device reach every peer now: ranks meet in it, and first fetches of two roots may come in any order."""
        if self.space.heap.lanes.asynchronous:
            self.space.attach_all()

    def before_forward(self) -> None:
        """The root's module is about to run: count the microbatch, refuse weights changed since they were published."""
        self.verbs.touch("beginning a forward")
        self.minibatch.recover()
        fresh = self.minibatch.state is State.CLOSED
        self.minibatch.begin()
        if not fresh and self.settings.stale_check:
            shards = [[param.shard() for param in group.odc_params] for group in self.groups]
            refuse_stale(self.space, self.minibatch.epoch, shards)
        self.verbs.board.store(Word.MICROBATCH, self.verbs.board.load(Word.MICROBATCH) + 1)
        self.fetcher.restart("forward")
        self.fetcher.restart("backward")

    def parameter_ids(self) -> set[int]:
        """`id()` of every sharded parameter, as optimizers hold them."""
        return {id(param.parameter) for group in self.groups for param in group.odc_params}

    def leave(self, note: str = "") -> Callable[[], None]:
        """Leave the job in good order; the modules must not be run any more. Waits for nobody. Idempotent.

        Args:
            note: what a peer is told that waits for this rank in vain.

        Returns:
            A function that waits until no peer needs the heap and it is closed; it raises WaitTimeoutError if a peer
            had to be given up.
        """
        self._note.append(note)
        return self._leave() or _nothing


def _nothing() -> None:
    return


def _leave(
    pid: int,
    server: Daemon,
    service: Service,
    rendezvous: Rendezvous,
    fetcher: Fetcher,
    sender: Sender,
    note: Sequence[str],
) -> Callable[[], None] | None:
    """Also called by the garbage collector, on any thread: waits for nobody. Returns what waits for the heap's end."""
    if os.getpid() != pid:
        return None  # a forked child (DataLoader worker) drops its copy; the heap and its words are still the rank's
    fetcher.close()
    sender.close()
    return leave(server, service, rendezvous, "".join(note))


def _calls(module: compat.FSDPModule) -> list[int]:
    """Numbers of the calls of `fully_shard` that made the tree."""
    sharded = [m for m in cast(nn.Module, module).modules() if isinstance(m, compat.FSDPModule)]
    return sorted({registered(one).sequence for one in sharded})


def live_roots() -> list[Root]:
    """Every root of this process that has been used and not left."""
    return [root for root in _roots if root._leave.alive]


def root_of(module: compat.FSDPModule) -> Root:
    """The root that `module` is on top of, built on first use.

    Raises:
        UnsupportedError: `module` lies below the root of its tree.
    """
    root = root_at(module)
    if root.state is not compat.state_of(module):
        raise UnsupportedError("call this on the root, the module on which fully_shard was called last")
    return root


def root_at(module: compat.FSDPModule) -> Root:
    """The root of the tree that `module` stands in, built on first use.

    Raises:
        OdcError: the root has left the job.
    """
    state = compat.state_of(module)
    for root in live_roots():
        if root.state is state:
            return root
    top = cast(compat.FSDPModule, _top(module))
    groups = compat.groups_of_state(compat.state_of(top))
    for root in live_roots():
        if root.state is compat.state_of(top):
            return root
    if any(isinstance(group, OdcParamGroup) and group.odc_root is not None for group in groups):
        raise OdcError("this model has left the job (odc.shutdown was called); it cannot be run any more")
    with torch.inference_mode(False):  # what the root keeps is written to in training, whoever ran first
        return Root(top)


def root_above(group: compat.FSDPParamGroup) -> Root:
    """The root whose tree holds `group`, built on first use: a unit may be unsharded before the first forward."""
    return root_at(cast(compat.FSDPModule, group.modules[0]))


def _top(module: Any) -> Any:
    """The outermost sharded module whose tree holds `module`."""
    holders = [m for m in Sharded.modules() if any(below is module for below in m.modules())]
    return max(holders, key=lambda m: sum(1 for _ in m.modules()), default=module)


def _agreed_settings(module: compat.FSDPModule, sharded: Sharded) -> Settings:
    settings = sharded.settings or Settings()
    for name, below in cast(nn.Module, module).named_modules():
        if not isinstance(below, compat.FSDPModule) or below is module:
            continue
        own = registered(below).settings
        if own is not None and own != settings:
            raise ValueError(f"settings of {name!r} conflict with those of the root: {own} against {settings}")
    return settings


def _geometry(groups: list[OdcParamGroup], rank: int) -> Geometry:
    if not groups:
        raise UnsupportedError("a root without parameters has nothing to shard")
    ranks, shards, has_shards = compat.mesh_of(groups[0])
    for group in groups:
        if not isinstance(group, OdcParamGroup):
            raise UnsupportedError(f"unit {compat.unit_name(group)!r} was sharded by torch's fully_shard, not by odc's")
        if compat.mesh_of(group) != (ranks, shards, has_shards):
            raise UnsupportedError(
                f"unit {compat.unit_name(group)!r} is on another mesh (ranks {compat.mesh_of(group)[0]}) than unit "
                f"{compat.unit_name(groups[0])!r} (ranks {ranks}); units of one root must share a mesh"
            )
    if rank not in ranks:
        raise OdcError(f"rank {rank} is not on the mesh of ranks {ranks} that it shards over")
    return Geometry(ranks, shards, ranks.index(rank))


def _unit(index: int, group: OdcParamGroup, settings: Settings) -> UnitSpec:
    name = compat.unit_name(group)
    for param in group.odc_params:
        if param.has_extension:
            raise UnsupportedError(f"unit {name!r}: {param.name} has all-gather extensions (float8?): not supported")
    params = [(param.name, param.padded_numel, param.compute_dtype) for param in group.odc_params]
    # Also what is frozen by now, if it was not when it was sharded: adapters are frozen while the base is evaluated.
    trained = [
        param
        for param, before in zip(group.odc_params, group.odc_trained, strict=True)
        if before or param.parameter.requires_grad
    ]
    frozen = {name for name, _, _ in params} - {param.name for param in trained}
    wide = any(torch.float64 in (param.own_dtype, param.reduce_dtype, param.gradient_dtype) for param in trained)
    return UnitSpec.build(index, name, params, accumulator_dtype(settings.reproducible or wide), frozen)


def _identity(sequence: int, geometry: Geometry) -> str:
    ranks = hashlib.sha256(json.dumps([geometry.ranks, geometry.shards]).encode()).hexdigest()[:8]
    return f"{sequence}.{ranks}"
