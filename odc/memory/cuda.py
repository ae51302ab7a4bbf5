"""A symmetric heap on CUDA devices of one host: torch's symmetric memory for data, shared memory for words.

Chose two memories behind one heap. Data (published shards, accumulators, staging) lies on the device, allocated and
mapped by torch's symmetric memory, whose pointer table is the one kernels take. Words (status board, counters, locks)
lie in a `ShmHeap`: a waiting rank polls them from the processor without touching the device, the daemon needs no
context to answer for them, and a dead rank's board can still be read. The price is that a rank must wait for its
device (`lanes.settle`) before a word may speak of what the device did.

Mapping is a collective of the heap's ranks: torch exchanges handles among all of them at once. So the first use of a
peer's data is a meeting, the only one beside a minibatch's end; `meet` makes sure that everyone is there before torch's
exchange begins, with the deadlines and blame of every other wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from odc.errors import HeapMemoryError, OdcError, UnsupportedError
from odc.memory import _torch_symmetric as symmetric
from odc.memory.lanes import Lanes
from odc.memory.layout import Layout, Request, check
from odc.memory.shm import LAYOUT_REGION, ShmHeap
from odc.memory.words import Words

_MIB = 1 << 20


class CudaHeap:
    """A `SymmetricHeap` on one device a rank; see there for the methods.

    Args:
        host: for words, unsealed; it says who is who.
        device: own CUDA device.
        lanes: of the device.
        group: process group of exactly the heap's ranks, in their order; torch finds the peers through it.
        meet: returns once every rank of the heap has called it, or raises. Called at most once.
    """

    def __init__(
        self,
        host: ShmHeap,
        device: torch.device,
        lanes: Lanes,
        group: torch.distributed.ProcessGroup,
        meet: Callable[[], None],
    ) -> None:
        self.identity, self.ranks, self.me = host.identity, host.ranks, host.me
        self.device = device
        self.lanes = lanes
        self._host, self._group, self._meet = host, group, meet
        self._requests: dict[str, Request] = {}
        self._words: set[str] = set()
        self._order: list[Request] = []
        self._layout: Layout | None = None
        self._own: torch.Tensor | None = None
        self._bases: list[torch.Tensor] = []  # by member, once mapped; empty before
        self._mapping = threading.Lock()

    # before seal -------------------------------------------------------------------------------------------------

    def allocate(self, name: str, nbytes: int, *, words: bool = False) -> None:
        if words:
            if name in self._requests:
                raise ValueError(f"region {name!r} was allocated twice")
            self._host.allocate(name, nbytes)
            self._words.add(name)
            self._order.append(Request(name, int(nbytes)))
            return
        request = Request(name, int(nbytes))
        check(request)
        if self.sealed or self._host.sealed:
            raise OdcError(f"{self._who()}: region {name!r} was asked for after the heap was sealed")
        if name in self._requests or name in self._words:
            raise ValueError(f"region {name!r} was allocated twice")
        self._requests[name] = request
        self._order.append(request)

    def seal(self, fingerprint: str = "") -> None:
        if self.sealed:
            raise OdcError(f"{self._who()}: a heap can be sealed once")
        layout = Layout.build(list(self._requests.values()), fingerprint)
        own = self._create(layout.nbytes)  # zeroed before the words can be attached, which says that it is there
        # What peers must agree on is compared when words are attached, before anything is mapped.
        listed = ", ".join(f"{request.name!r} of {request.nbytes} bytes" for request in self._order)
        self._host.seal(f"{fingerprint!r}; words and data: {listed}")
        self._own, self._layout = own, layout

    def _create(self, nbytes: int) -> torch.Tensor:
        free, _ = torch.cuda.mem_get_info(self.device)
        try:
            own = symmetric.allocate(nbytes, self.device)
        except UnsupportedError:
            raise
        except RuntimeError as error:  # of the driver, or of torch
            said = str(error).splitlines()[0]
            if nbytes <= free and "out of memory" not in said:
                raise OdcError(
                    f"{self._who()}: {self.device} gives no memory that peers can map: {said}; see "
                    "`odc doctor --need cuda`"
                ) from error
            raise HeapMemoryError(
                f"{self._who()}: the heap needs {nbytes / _MIB:.1f} MiB of {self.device}, which had {free / _MIB:.1f} "
                f"MiB free: {said}; use more ranks, a smaller model or smaller staging blocks"
            ) from error
        own.zero_()
        torch.cuda.current_stream(self.device).synchronize()  # before any peer can look
        return own

    # views -------------------------------------------------------------------------------------------------------

    def tensor(
        self, member: int, name: str, dtype: torch.dtype, *, offset: int = 0, numel: int | None = None
    ) -> torch.Tensor:
        if name in self._words:
            return self._host.tensor(member, name, dtype, offset=offset, numel=numel)
        base, layout = self._base(member), self.layout
        room = layout.size(name) // dtype.itemsize
        count = room - offset if numel is None else numel
        if offset < 0 or count < 0 or offset + count > room:
            raise ValueError(
                f"elements {offset} to {offset + count} of region {name!r}: it holds {room} elements of {dtype}"
            )
        first = layout.offset(name) + offset * dtype.itemsize
        return base[first : first + count * dtype.itemsize].view(dtype)

    def address(self, member: int, name: str) -> int:
        if name in self._words:
            return self._host.address(member, name)
        return self._base(member).data_ptr() + self.layout.offset(name)

    def base_addresses(self) -> torch.Tensor:
        return torch.tensor([self._base(member).data_ptr() for member in range(len(self.ranks))], dtype=torch.int64)

    def words(self, member: int, name: str) -> Words:
        if name not in self._words:
            self.layout.offset(name)  # KeyError where there is no such region at all
            raise OdcError(f"{self._who()}: region {name!r} lies on {self.device}; ask for it with words=True")
        return self._host.words(member, name)

    # peers -------------------------------------------------------------------------------------------------------

    def attached(self, member: int) -> bool:
        return self._host.attached(member) and (member == self.me or bool(self._bases))

    def _base(self, member: int) -> torch.Tensor:
        """uint8 [nbytes]: the member's data; maps everyone's on first need of a peer's."""
        if not 0 <= member < len(self.ranks):
            raise IndexError(f"{self._who()}: member {member} of {len(self.ranks)}")
        own = self._own
        if own is None:
            raise OdcError(f"{self._who()}: the heap is {'closed' if self.sealed else 'not sealed yet'}")
        if member == self.me:
            return own
        with self._mapping:
            if not self._bases:
                self._bases = self._map(own)
            return self._bases[member]

    def _map(self, own: torch.Tensor) -> list[torch.Tensor]:
        for member in range(len(self.ranks)):
            self._host.address(member, LAYOUT_REGION)  # each is up, and laid out alike
        self._meet()
        try:
            return symmetric.map_peers(own, self._group, self.me)
        except RuntimeError as error:
            raise OdcError(
                f"{self._who()}: the ranks' devices cannot map each other's memory: {str(error).splitlines()[0]}; "
                "see `odc doctor --need cuda` (several ranks on one device need "
                "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 in the environment)"
            ) from error

    # accounting and end ------------------------------------------------------------------------------------------

    @property
    def sealed(self) -> bool:
        return self._layout is not None

    @property
    def layout(self) -> Layout:
        """Of the data on the device; words have their own."""
        if self._layout is None:
            raise OdcError(f"{self._who()}: the heap is not sealed yet")
        return self._layout

    @property
    def nbytes(self) -> int:
        return self._host.nbytes + (self._layout.nbytes if self._layout else 0)

    @property
    def digest(self) -> str:
        return self._host.digest

    @property
    def fd(self) -> int:
        return self._host.fd

    def bytes_by_name(self) -> dict[str, int]:
        return self._host.bytes_by_name() | {name: request.nbytes for name, request in self._requests.items()}

    def close(self) -> None:
        """As the protocol says; device memory goes when the last view of it does."""
        self._own, self._bases = None, []
        self._host.close()

    def _who(self) -> str:
        return f"rank {self.ranks[self.me]}, heap {self.identity}"
