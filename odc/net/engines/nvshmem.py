"""Reads by NVSHMEM, from the slab of a rank on another host into this rank's, from device to device.

The host asks for each read, on a stream that no other read uses, and looks whether the stream is past it: the library
would wait without end, and does not report deaths either. A read therefore watches the admitted connection to the same
rank, as those by NIXL do. What lies outside the slab is read over TCP.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import struct
from collections.abc import Callable, Iterator

import torch

from odc.memory import Lanes, nvshmem
from odc.memory.cuda_lanes import CudaLanes
from odc.net.engines.connections import Answers, Dial
from odc.net.engines.engine import Engine
from odc.settings import LOST_AFTER_S

_DESCRIPTION = struct.Struct("!QQ")  # offset in the slab, bytes


class NvshmemEngine(Engine):
    """An engine by NVSHMEM, for memory in its slabs once it has been started; an `Engine` for all other memory."""

    name, only_into_own = "nvshmem", True
    _numbers = itertools.count()  # of lanes of all engines: none takes one that another has given up

    def __init__(self, me: int, dial: Dial, timeout_s: float, lost_after_s: float = LOST_AFTER_S) -> None:
        super().__init__(me, dial, timeout_s, lost_after_s, describe=self._describe)
        self._exposed: dict[str, torch.Tensor] = {}
        # Offset and bytes, by region and rank, until this rank withdraws its own.
        self._known: dict[str, dict[int, tuple[int, int]]] = {}
        self._lanes: Lanes | None = None
        self._free: list[str] = []  # lanes that no read uses

    def expose(self, region: str, memory: torch.Tensor) -> None:
        super().expose(region, memory)
        self._exposed[region] = memory
        if self._lanes is None and memory.device.type == "cuda":
            self._lanes = CudaLanes(memory.device)  # on the training thread

    def withdraw(self, name: str) -> None:
        super().withdraw(name)
        self._known.pop(name, None)
        self._exposed.pop(name, None)

    def _describe(self, region: str) -> bytes:
        library, memory = nvshmem.started(), self._exposed.get(region)
        if library is None or memory is None or not library.holds(memory):
            return b""
        return _DESCRIPTION.pack(memory.data_ptr() - library.base, memory.numel())

    def _begin(
        self, answers: Answers, region: str, offset: int, into: torch.Tensor, resources: contextlib.ExitStack
    ) -> Callable[[], bool]:
        library, lanes, found = nvshmem.started(), self._lanes, None
        if library is not None and lanes is not None and library.holds(into):
            found = self._known.get(region, {}).get(answers.rank) or self._ask(answers, region)
        if found is None or library is None or lanes is None:
            return super()._begin(answers, region, offset, into, resources)
        start, nbytes = found
        if offset + into.numel() > nbytes:
            return lambda: False
        if not into.numel():
            return lambda: True
        with lanes.lane(resources.enter_context(self._lane())):
            library.get(into, start + offset, answers.rank)
            return functools.partial(self._await, answers, lanes, lanes.mark())

    def _ask(self, answers: Answers, region: str) -> tuple[int, int] | None:
        """Where the rank's region lies in its slab; None if it lies elsewhere."""
        described = self._description(answers, region)
        if len(described) != _DESCRIPTION.size:
            return None
        offset, nbytes = _DESCRIPTION.unpack(described)
        self._known.setdefault(region, {})[answers.rank] = offset, nbytes
        return offset, nbytes

    def _await(self, answers: Answers, lanes: Lanes, arrived: object) -> bool:
        """Return once a mark is reached."""
        return answers.outcome(lambda: lanes.reached(arrived) or None)

    @contextlib.contextmanager
    def _lane(self) -> Iterator[str]:
        """A lane for the block; one whose block raised may never come to its end, and is not used again."""
        try:
            name = self._free.pop()
        except IndexError:
            name = f"nvshmem {next(self._numbers)}"
        yield name
        self._free.append(name)
