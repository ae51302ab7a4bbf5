"""Fetching a unit into its unsharded parameters, at need or ahead of it.

The order of units is learned from the run itself: after unit A came unit B last time, so B is fetched while A computes.
Each wrong guess costs a unit of memory until the minibatch ends, never a wrong result.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from odc.fsdp import _torch_compat as compat
from odc.fsdp._torch_param import ShardedParam
from odc.memory import HostLanes, Lanes, advise_huge
from odc.protocol import UnitSpec
from odc.protocol.fetch import PublishedShards
from odc.trace import FETCH, recorder
from odc.worker import Job, Worker

_HOST = HostLanes()


@dataclass(frozen=True)
class Fetch:
    """A unit on its way into this rank; `follow` holds this thread's lane back until the copies are over. `worker` is
    to do the job, if it is ahead of need.
    """

    job: Job[None]
    params: list[ShardedParam]
    by_shard: list[torch.Tensor]
    shards: int
    follow: Callable[[], None]
    worker: Worker | None = None

    def begin(self) -> None:
        """Get it under way, once its owner keeps it: what a signal's handler raises must not lose it."""
        if self.worker is not None:
            self.worker.submit(self.job)

    def wait(self) -> None:
        """Return when the unsharded parameters hold the published values; fetches here if no thread has begun."""
        try:
            self.job.result()
        finally:
            self.follow()  # also where an error cut the copies short: the memory may have another use next
        for param, values in zip(self.params, self.by_shard, strict=True):
            if param.shard_dim:
                param.rearrange(values, self.shards)
            param.ready()

    def drop(self) -> None:
        """Give it up: nothing is copied after this returns, and the storage is freed."""
        self.job.cancel()
        self.follow()
        for param in self.params:
            param.free()


class Fetcher:
    """Fetches of one root; `ahead` units are fetched ahead of use, with 0 there is no thread."""

    def __init__(self, shards: PublishedShards, ahead: int, lanes: Lanes = _HOST) -> None:
        self._shards, self._ahead, self._lanes = shards, ahead, lanes
        self._worker = Worker("odc-fetch", depth=ahead + 1) if ahead else None
        # Weak: a unit holds its root, and the root's end must not wait for its fetcher's.
        self._last: dict[str, weakref.ref[compat.FSDPParamGroup]] = {}
        self._next: dict[str, dict[int, weakref.ref[compat.FSDPParamGroup]]] = {}

    def prepare(self, unit: UnitSpec, params: list[ShardedParam], *, now: bool) -> Fetch:
        """Allocate the unsharded parameters; returns a fetch to `begin`. With `now` the caller waits for it at once."""
        shards = self._shards.count
        outputs = [param.allocate(shards) for param in params]
        lanes = self._lanes
        for output in outputs if not lanes.asynchronous else ():
            advise_huge(output)  # freshly allocated: most of a large fetch would be page faults
        with torch.inference_mode(False):  # the fetch thread writes to it, which is in no inference mode
            by_shard = [torch.empty_like(o) if p.shard_dim else o for p, o in zip(params, outputs, strict=True)]
        lane = "main" if now or self._worker is None else "fetch"
        allocated = lanes.mark()  # the previous user of this memory is done with it by then
        copied: list[object] = []

        def copy() -> None:
            begin = recorder().now_on(lane)
            with lanes.lane("fetch"):
                lanes.follow(allocated)
                try:
                    nbytes = self._shards.fetch(unit, by_shard, lane=lane)
                finally:
                    copied.append(lanes.mark())  # also after an error: what was asked for is still to come
            recorder().add(FETCH, begin, unit=unit.name, nbytes=nbytes, lane=lane)

        def follow() -> None:
            for mark in copied:
                lanes.follow(mark)

        return Fetch(Job(copy), params, by_shard, shards, follow, self._worker if lane == "fetch" else None)

    def used(self, group: compat.FSDPParamGroup, phase: str) -> None:
        """Note that `group` is in use in `phase` ("forward" or "backward") and fetch what followed it last time, but
        for units that a backward does not need.
        """
        if not self._ahead:
            return
        order = self._next.setdefault(phase, {})
        last_ref = self._last.get(phase)
        last = last_ref() if last_ref is not None else None
        if last is not None and last is not group:
            order[id(last)] = weakref.ref(group)
        self._last[phase] = weakref.ref(group)
        following, fetched = group, 0
        for _ in range(len(order)):  # where a unit is used twice the order may go in a circle
            ref = order.get(id(following))
            after = ref() if ref is not None else None
            if after is None or fetched == self._ahead:
                return
            following = after
            if phase != "backward" or following.unshard_in_backward:
                following.unshard()
                fetched += 1

    def restart(self) -> None:
        """New passes begin: the first unit of each does not follow the last of one before."""
        self._last.clear()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


class FetchedGroup(compat.UnorderedGroup):
    """What a torch parameter group keeps of its fetches. Never constructed: a group's class is set (see `adopt`).

    Attributes:
        odc_fills_unused: whether parameters that no rank has used get zeros, once their unit has had gradients.
    """

    odc_params: list[ShardedParam]
    odc_fetch: Fetch | None
    odc_fills_unused: bool

    def await_fetch(self) -> None:
        """Return when the fetch under way is over."""
        self._end_fetch(Fetch.wait)

    def drop_fetch(self) -> None:
        """Give up a fetch for which no thread waited: its values are of an epoch that ends."""
        if self.odc_fetch is not None:
            self._end_fetch(Fetch.drop)

    def _end_fetch(self, how: Callable[[Fetch], None]) -> None:
        """A signal's handler may raise here. The fetch is kept while a thread copies for it, as the memory must not be
        freed before; and no longer, as one that was dropped would pass for one that has filled its memory.
        """
        assert self.odc_fetch is not None
        try:
            how(self.odc_fetch)
        finally:
            if self.odc_fetch.job.over():
                self.odc_fetch = None

    def give_up(self) -> None:
        """After an interrupted forward or backward: drop its fetch and its gradients, free the unsharded parameters."""
        self.drop_fetch()
        for param in self.odc_params:
            param.take_gradient()
        compat.make_idle(self)
        compat.to_sharded(self)
        for param in self.odc_params:
            param.free()  # also what was allocated for a fetch that never began
