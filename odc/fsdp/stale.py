"""Whether this rank's shards are still what its peers fetch: compared in every microbatch of an open minibatch.

On the CPU a change is an error before the microbatch runs. On a device a microbatch asks for one launch and waits for
nothing. What it finds is read at the end of the minibatch, where the host waits anyway: no optimizer steps, but the
microbatch has run. Where no gradients are made (evaluation, a frozen model) it is read at once, as no end may come.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import torch

from odc.errors import StaleParametersError
from odc.movers.choice import device_mover
from odc.protocol import HeapLayout

Shards = Sequence[Sequence[torch.Tensor]]


class StaleCheck:
    """Of one root, on the rank's main thread but for `refuse`, which a backward may call.

    It compares bytes, because tensor versions miss in-place optimizer writes and `.data`.
    """

    def __init__(self, layout: HeapLayout) -> None:
        self._layout = layout
        self._names = [spec.name for unit in layout.units for spec in unit.params]
        # On a device: for each parameter whether a comparison has found it changed, and a mark after the last of those
        # that are not read yet.
        self._changed = torch.zeros(0)
        self._asked: object = None
        if layout.heap.lanes.asynchronous:
            self._changed = torch.zeros(len(self._names), dtype=torch.int32, device=layout.heap.device)

    @torch.no_grad()
    def compare(self, epoch: int, shards: Shards, *, now: bool) -> None:
        """Raise `StaleParametersError`, naming the parameter, if a shard is no longer what was published in `epoch`.

        `shards` are padded, by unit and parameter, 1-D. On a device, without `now`, `refuse` raises it later.
        """
        lanes, places = self._layout.heap.lanes, self._layout.published(epoch)
        flat = [shard for tensors in shards for shard in tensors]
        if lanes.asynchronous:
            device_mover(self._layout.mover).differ(places, flat, self._changed)
            self._asked = lanes.mark()
            if now:
                self.refuse(epoch)
            return
        for name, place, shard in zip(self._names, places, flat, strict=True):
            if not _same_bytes(place, shard.to(place.dtype)):
                self._raise(epoch, name)

    def refuse(self, epoch: int) -> None:
        """Raise what comparisons that were not read yet have found, after waiting for them; on the CPU there are none.

        What is raised here is not raised again.
        """
        if self._asked is None:
            return
        lanes = self._layout.heap.lanes
        lanes.follow(self._asked)
        lanes.settle()
        self._asked = None
        changed = self._changed.tolist()
        if any(changed):
            self._changed.zero_()
            self._raise(epoch, self._names[changed.index(1)])

    def _raise(self, epoch: int, name: str) -> None:
        raise StaleParametersError(
            f"rank {self._layout.grid.rank} (epoch {epoch}): {name} changed inside an open minibatch (evaluation opens "
            "one too), after it was published; peers would still see the old values. Call model.publish() on every "
            "rank after changing weights (EMA swap, manual edit), or change them between minibatches"
        )


@cache
def _memcmp() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).memcmp  # several times as fast as torch.equal, and a NaN equals itself
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return function


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return _memcmp()(left.data_ptr(), right.data_ptr(), left.nbytes) == 0
