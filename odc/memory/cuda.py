"""A symmetric heap on CUDA devices.

Data (published shards, accumulators, staging) lies on the device, in memory of CUDA's driver that peers map one by
one, when they first use it. Words (status board, counters, locks) lie in a `ShmHeap`: a waiting rank polls them without
touching the device, the daemon needs no CUDA context, and a dead rank's board can still be read. In return, a rank must
wait for its device (`lanes.settle`) before a word may announce what it did.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch

from odc.errors import HeapMemoryError, OdcError
from odc.memory import device_links, driver_memory
from odc.memory.driver_calls import DriverError
from odc.memory.heap import Lanes, NamedHeap
from odc.memory.layout import Layout, Request, check
from odc.memory.shm import LAYOUT_REGION, ShmHeap
from odc.memory.words import Words

_MIB = 1 << 20
# Of the words: the UUID of a member's device, and those of the devices to which that member adds atomically.
_DEVICE_REGION, _DEVICE_BYTES = "odc/device", 4096
_WORDS = "/words"  # the part of the heap that lies in host memory


class CudaHeap(NamedHeap):
    """A `SymmetricHeap` with one device for each rank; `layout` is that of the data there, words have their own.

    Args:
        host: unsealed heap for words; it also supplies identity, ranks and member index, and passes descriptors.
        local: members on this host, whose data can be reached; None: all.

    A subclass with other memory overrides `_create` and `_map`.
    """

    def __init__(self, host: ShmHeap, device: torch.device, lanes: Lanes, local: Sequence[int] | None = None) -> None:
        self.identity, self.ranks, self.me = host.identity, host.ranks, host.me
        self._members = tuple(range(len(self.ranks)) if local is None else local)
        self.device, self.lanes = device, lanes
        self._host = host
        self._requests: dict[str, Request] = {}
        self._words: set[str] = set()
        self._order: list[Request] = []
        self._bases: list[torch.Tensor | None] = [None] * len(self.ranks)  # by member, once mapped
        self._mapping = [threading.Lock() for _ in self.ranks]
        self._mover_is_atomic, self._atomic = True, threading.Lock()
        self._adds_atomically: bool | None = None

    @property
    def adds_atomically(self) -> bool:
        """As of every heap. Attaches to the words of all local members, who all find the same in them."""
        if not self.sealed:
            return self._mover_is_atomic
        with self._atomic:
            if self._adds_atomically is None:
                # A rank that adds under a lock must not meet one that takes none.
                regions = (self._host.tensor(member, _DEVICE_REGION, torch.uint8) for member in self._members)
                described = [bytes(one.numpy()).partition(b"\0")[0].decode().split() for one in regions]
                devices = {device for device, *_ in described}
                self._adds_atomically = all(devices <= set(reached) for _, *reached in described)
            return self._adds_atomically

    @adds_atomically.setter
    def adds_atomically(self, this_rank: bool) -> None:
        self._mover_is_atomic = this_rank

    def allocate(self, name: str, nbytes: int, *, words: bool = False) -> None:
        request = Request(name, int(nbytes))
        check(request)
        if name in self._requests or name in self._words:
            raise ValueError(f"region {name!r} was allocated twice")
        if words:
            self._host.allocate(name, nbytes)
            self._words.add(name)
        elif self.sealed or self._host.sealed:
            raise OdcError(f"{self._who()}: region {name!r} was allocated after the heap was sealed")
        else:
            self._requests[name] = request
        self._order.append(request)

    def seal(self, fingerprint: str = "") -> None:
        if self.sealed:
            raise OdcError(f"{self._who()}: a heap can be sealed only once")
        layout = Layout.build(list(self._requests.values()), fingerprint)
        local = self._create(layout.nbytes)
        self._host.allocate(_DEVICE_REGION, _DEVICE_BYTES, words=True)
        # Peers compare their layouts when they attach to the words, before anything is mapped.
        listed = ", ".join(f"{request.name!r} of {request.nbytes} bytes" for request in self._order)
        try:
            local.zero_()
            self.lanes.settle()  # before peers can attach to the words, which announce it
            self._host.seal(f"{fingerprint!r}; words and data: {listed}")
        except BaseException:
            self._host.close()  # and the descriptor of `local`
            raise
        device, reached = self._described()
        text = " ".join([device, *(reached if self._mover_is_atomic else ())]).encode()[:_DEVICE_BYTES]
        region = self._host.tensor(self.me, _DEVICE_REGION, torch.uint8).numpy()
        region[: len(text)] = memoryview(text)
        self._bases[self.me], self._layout = local, layout

    def _described(self) -> tuple[str, list[str]]:
        """The UUID of this rank's device, and those of the devices to which it adds atomically."""
        if self.device.type != "cuda":
            return str(self.device), [str(self.device)]
        return device_links.device_uuid(self.device.index), device_links.atomic_peers(self.device)

    def _create(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes]: this rank's memory, not filled. Raises HeapMemoryError if it does not fit."""
        try:
            local, fd = self._allocate(nbytes)
        except DriverError as error:
            free, _ = torch.cuda.mem_get_info(self.device)
            if nbytes <= free and error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise OdcError(
                    f"{self._who()}: {self.device} provides no memory that peers can map: {error}; see "
                    "`odc doctor --need cuda`"
                ) from error
            raise HeapMemoryError(
                f"{self._who()}: the heap needs {nbytes / _MIB:.1f} MiB of {self.device}, which had {free / _MIB:.1f} "
                f"MiB free: {error}; use more ranks, a smaller model or smaller staging blocks"
            ) from error
        self._host.other_fds = (fd,)
        return local

    def _allocate(self, nbytes: int) -> tuple[torch.Tensor, int]:
        """A refusal may be for memory that torch caches and uses no more, often what a model was loaded into."""
        try:
            return driver_memory.allocate(nbytes, self.device)
        except DriverError:
            torch.cuda.empty_cache()
            return driver_memory.allocate(nbytes, self.device)

    def _map(self, member: int) -> torch.Tensor:
        """uint8 [nbytes]: the memory of a peer, to which this rank has attached. Called once for each."""
        descriptors = self._host.take_other_fds(member)
        if len(descriptors) != 1:
            why = "it could not be mapped before, or was not passed"
            raise OdcError(f"{self._who()}: {self.device} cannot map the memory of rank {self.ranks[member]}: {why}")
        try:
            return driver_memory.map_shared(descriptors[0], self.layout.nbytes, self.device)
        except DriverError as error:
            raise OdcError(
                f"{self._who()}: {self.device} cannot map the memory of rank {self.ranks[member]}: {error}; see "
                "`odc doctor --need cuda`"
            ) from error
        finally:
            os.close(descriptors[0])

    def tensor(
        self, member: int, name: str, dtype: torch.dtype, *, offset: int = 0, numel: int | None = None
    ) -> torch.Tensor:
        if name in self._words:
            return self._host.tensor(member, name, dtype, offset=offset, numel=numel)
        base = self.whole(member)
        first, count = self.layout.extent(name, dtype, offset, numel)
        return base[first : first + count * dtype.itemsize].view(dtype)

    def parts(self) -> dict[str, torch.Tensor]:
        return {**super().parts(), _WORDS: self._host.whole(self.me)}

    def place(self, name: str) -> tuple[str, int]:
        return (_WORDS, self._host.layout.offset(name)) if name in self._words else super().place(name)

    def address(self, member: int, name: str) -> int:
        if name in self._words:
            return self._host.address(member, name)
        return self.whole(member).data_ptr() + self.layout.offset(name)

    def words(self, member: int, name: str) -> Words:
        if name not in self._words:
            self.layout.offset(name)  # KeyError where there is no such region at all
            raise OdcError(f"{self._who()}: region {name!r} lies on {self.device}; ask for it with words=True")
        return self._host.words(member, name)

    def attached(self, member: int) -> bool:
        return self._host.attached(member) and self._bases[member] is not None

    def whole(self, member: int) -> torch.Tensor:
        """As of every heap; mapped at its first use."""
        if member not in self._members:
            where = " is on another host" if 0 <= member < len(self.ranks) else ""
            raise IndexError(f"{self._who()}: member {member} of {len(self.ranks)}{where}")
        bases = self._bases  # `close` replaces it
        found = bases[member]
        if found is not None:
            return found
        if bases[self.me] is None:
            raise OdcError(f"{self._who()}: the heap is {'closed' if self.sealed else 'not sealed yet'}")
        self._host.address(member, LAYOUT_REGION)  # proves that the member is up and laid out alike
        with self._mapping[member]:
            found = bases[member]
            if found is None:
                found = bases[member] = self._map(member)
            return found

    @property
    def nbytes(self) -> int:
        return self._host.nbytes + (self._layout.nbytes if self._layout else 0)

    @property
    def digest(self) -> str:
        return self._host.digest

    @property
    def fd(self) -> int:
        return self._host.fd

    @property
    def other_fds(self) -> tuple[int, ...]:
        return self._host.other_fds

    @property
    def read_only_fd(self) -> int:
        return self._host.read_only_fd

    def bytes_by_name(self) -> dict[str, int]:
        return self._host.bytes_by_name() | {name: request.nbytes for name, request in self._requests.items()}

    def close(self) -> None:
        self._bases = [None] * len(self.ranks)  # views hold their mapping, which ends with the last of them
        self._host.close()
