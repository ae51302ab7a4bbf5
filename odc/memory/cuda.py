"""A symmetric heap on CUDA devices, and the lanes (streams and events) of its device.

Data (published shards, accumulators, staging) lies on the device, in torch's symmetric memory. Words (status board,
counters, locks) lie in a `ShmHeap`: a waiting rank polls them without touching the device, the daemon needs no CUDA
context, and a dead rank's board can still be read. In return, a rank must wait for its device (`lanes.settle`) before a
word may announce what it did. The first use of a peer's data maps the memory of all ranks of this host, which is a
collective; `meet` makes sure that each is there before torch's exchange begins, with the deadlines and blame of every
other wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch

from odc.errors import HeapMemoryError, OdcError, UnsupportedError
from odc.memory import _torch_symmetric as symmetric
from odc.memory import device_links
from odc.memory._torch_symmetric import StoreGroup as StoreGroup
from odc.memory.heap import Lanes, NamedHeap
from odc.memory.layout import Layout, Request, check
from odc.memory.shm import LAYOUT_REGION, ShmHeap
from odc.memory.words import Words

_MIB = 1 << 20
# Of the words: text, `_device_text` of a member's device, and in the last byte whether that member adds atomically.
_DEVICE_REGION, _DEVICE_BYTES = "odc/device", 128
_WORDS = "/words"  # the part of the heap that lies in host memory
_URGENT = -1  # a stream's priority; compute has 0


#: What to do where processes that see one device each cannot map the others'.
_SEE_ALL = (
    "every process sees one device alone (CUDA_VISIBLE_DEVICES); let each see all of them and choose its own by "
    "torch.cuda.set_device(LOCAL_RANK). Ray leaves the variable alone with "
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1, Slurm without --gpus-per-task"
)


class CudaLanes:
    """`Lanes` of a CUDA device: each lane is a stream, each mark an event.

    `streams` are the streams to use, by lane; a lane without one gets a new stream, ahead of compute: a push waits for
    a slot until the server has added what is in it. For fetch and push, FSDP2's own streams keep their priorities, and
    what already waits for them keeps its order.

    Made by the training thread, whose current device is the caller's affair. Any other thread is given this device for
    good when it first enters a lane: torch would otherwise go back to device 0 at the end of each, and create a context
    there, half a gigabyte for each rank.
    """

    asynchronous = True

    def __init__(self, device: torch.device, streams: Mapping[str, torch.cuda.Stream] | None = None) -> None:
        self._device, self._streams, self._making = device, dict(streams or {}), threading.Lock()
        self._placed = threading.local()
        self._placed.here = True

    def lane(self, name: str) -> AbstractContextManager[object]:
        if not getattr(self._placed, "here", False):
            torch.cuda.set_device(self._device)
            self._placed.here = True
        stream = self._streams.get(name)
        if stream is None:
            with self._making:
                stream = self._streams.setdefault(name, torch.cuda.Stream(self._device, priority=_URGENT))
        return torch.cuda.stream(stream)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def follow(self, mark: object) -> None:
        torch.cuda.current_stream(self._device).wait_event(cast(torch.cuda.Event, mark))

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


class CudaHeap(NamedHeap):
    """A `SymmetricHeap` with one device for each rank; `layout` is that of the data there, words have their own.

    Args:
        host: unsealed heap for words; it also supplies identity, ranks and member index.
        group: process group of exactly the `local` members, in their order; torch finds the peers through it.
        meet: returns once every local member has called it, or raises. Called at most once.
        local: members on this host, whose data can be reached; None: all.
    """

    def __init__(
        self,
        host: ShmHeap,
        device: torch.device,
        lanes: Lanes,
        group: symmetric.MappingGroup,
        meet: Callable[[], None],
        local: Sequence[int] | None = None,
    ) -> None:
        self.identity, self.ranks, self.me = host.identity, host.ranks, host.me
        self._members = tuple(range(len(self.ranks)) if local is None else local)
        self.device, self.lanes = device, lanes
        self._host, self._group, self._meet = host, group, meet
        self._requests: dict[str, Request] = {}
        self._words: set[str] = set()
        self._order: list[Request] = []
        self._local: torch.Tensor | None = None
        self._bases: dict[int, torch.Tensor] = {}  # by member, once mapped; empty before
        self._mapping, self._atomic = threading.Lock(), True

    @property
    def adds_atomically(self) -> bool:
        """As of every heap. Maps the peers, whose devices' links decide, and who all find the same."""
        if not self._bases and (peers := [member for member in self._members if member != self.me]):
            self._base(peers[0])
        return self._atomic

    @adds_atomically.setter
    def adds_atomically(self, this_rank: bool) -> None:
        self._atomic = this_rank

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
        local = self._create(layout.nbytes)  # zeroed before peers can attach to the words, which announce it
        self._host.allocate(_DEVICE_REGION, _DEVICE_BYTES, words=True)
        # Peers compare their layouts when they attach to the words, before anything is mapped.
        listed = ", ".join(f"{request.name!r} of {request.nbytes} bytes" for request in self._order)
        self._host.seal(f"{fingerprint!r}; words and data: {listed}")
        text = _device_text(self.device).encode()[: _DEVICE_BYTES - 1]
        self._host.tensor(self.me, _DEVICE_REGION, torch.uint8)[: len(text)].copy_(
            torch.frombuffer(bytearray(text), dtype=torch.uint8)
        )
        self._local, self._layout = local, layout

    def _create(self, nbytes: int) -> torch.Tensor:
        try:
            local = self._allocate(nbytes)
        except UnsupportedError:
            raise
        except RuntimeError as error:
            free, _ = torch.cuda.mem_get_info(self.device)
            reason = str(error).splitlines()[0]
            if nbytes <= free and "out of memory" not in reason:
                raise OdcError(
                    f"{self._who()}: {self.device} provides no memory that peers can map: {reason}; see "
                    "`odc doctor --need cuda`"
                ) from error
            raise HeapMemoryError(
                f"{self._who()}: the heap needs {nbytes / _MIB:.1f} MiB of {self.device}, which had {free / _MIB:.1f} "
                f"MiB free: {reason}; use more ranks, a smaller model or smaller staging blocks"
            ) from error
        local.zero_()
        torch.cuda.current_stream(self.device).synchronize()  # before any peer can read it
        return local

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """A refusal may be for memory that torch caches and uses no more, often what a model was loaded into."""
        try:
            return symmetric.allocate(nbytes, self.device)
        except UnsupportedError:
            raise
        except RuntimeError:
            torch.cuda.empty_cache()
            return symmetric.allocate(nbytes, self.device)

    def tensor(
        self, member: int, name: str, dtype: torch.dtype, *, offset: int = 0, numel: int | None = None
    ) -> torch.Tensor:
        if name in self._words:
            return self._host.tensor(member, name, dtype, offset=offset, numel=numel)
        base = self._base(member)
        first, count = self.layout.extent(name, dtype, offset, numel)
        return base[first : first + count * dtype.itemsize].view(dtype)

    def whole(self, member: int) -> torch.Tensor:
        return self._base(member)

    def parts(self) -> dict[str, torch.Tensor]:
        return {**super().parts(), _WORDS: self._host.whole(self.me)}

    def place(self, name: str) -> tuple[str, int]:
        return (_WORDS, self._host.layout.offset(name)) if name in self._words else super().place(name)

    def address(self, member: int, name: str) -> int:
        if name in self._words:
            return self._host.address(member, name)
        return self._base(member).data_ptr() + self.layout.offset(name)

    def base_addresses(self) -> torch.Tensor:
        return torch.tensor([self._base(member).data_ptr() for member in self._members], dtype=torch.int64)

    def words(self, member: int, name: str) -> Words:
        if name not in self._words:
            self.layout.offset(name)  # KeyError where there is no such region at all
            raise OdcError(f"{self._who()}: region {name!r} lies on {self.device}; ask for it with words=True")
        return self._host.words(member, name)

    def attached(self, member: int) -> bool:
        return self._host.attached(member) and (member == self.me or bool(self._bases))

    def _base(self, member: int) -> torch.Tensor:
        """uint8 [nbytes]: the member's data. The first use of a peer's data maps that of all local members."""
        if member not in self._members:
            where = " is on another host" if 0 <= member < len(self.ranks) else ""
            raise IndexError(f"{self._who()}: member {member} of {len(self.ranks)}{where}")
        local = self._local
        if local is None:
            raise OdcError(f"{self._who()}: the heap is {'closed' if self.sealed else 'not sealed yet'}")
        if member == self.me:
            return local
        with self._mapping:
            if not self._bases:
                self._bases = self._map(local)
            return self._bases[member]

    def _map(self, local: torch.Tensor) -> dict[int, torch.Tensor]:
        for member in self._members:
            self._host.address(member, LAYOUT_REGION)  # proves that the member is up and laid out alike
        one_visible = self._refuse_shared_devices()
        uuids = [text.partition(" ")[2] for text in self._devices()]
        mine = self._host.tensor(self.me, _DEVICE_REGION, torch.uint8)
        mine[-1] = self._atomic and device_links.adds_atomically(self.device, uuids)
        self._meet()
        answers = [self._host.tensor(member, _DEVICE_REGION, torch.uint8)[-1] for member in self._members]
        self._atomic = all(map(bool, answers))  # a rank that adds under a lock must not meet one that takes none
        try:
            place = self._members.index(self.me)
            mapped = symmetric.map_peers(local, self._group, place, same_numbers=one_visible)
            return dict(zip(self._members, mapped, strict=True))
        except OdcError:  # a rank has ended meanwhile, or does not come
            raise
        except RuntimeError as error:
            hint = f"; {_SEE_ALL}" if one_visible else ""
            raise OdcError(
                f"{self._who()}: the ranks' devices cannot map each other's memory: {str(error).splitlines()[0]}; "
                f"see `odc doctor --need cuda`{hint}"
            ) from error

    def _refuse_shared_devices(self) -> bool:
        """Whether ranks give one number to different devices; raises OdcError where two ranks are on one device.

        torch takes equal numbers for one device and refuses them in the midst of its exchange, so each rank
        names its device in its words beforehand. Every rank finds the same, so none is left alone in the exchange.
        """
        devices = self._devices()
        ranks = [self.ranks[member] for member in self._members]
        for place, device in enumerate(devices):
            first = devices.index(device)
            if first < place and not symmetric.may_share_devices():
                raise OdcError(
                    f"{self._who()}: ranks {ranks[first]} and {ranks[place]} are both on one device "
                    f"({device}): give each its own by torch.cuda.set_device(LOCAL_RANK) before its first use of CUDA. "
                    f"For tests, ranks may share a device with {symmetric.SHARE}=1 in the environment"
                )
        numbers = [device.split()[0] for device in devices]
        return len(set(numbers)) < len(set(devices))

    def _devices(self) -> list[str]:
        """`_device_text` of every local member."""
        texts = [self._host.tensor(member, _DEVICE_REGION, torch.uint8)[:-1] for member in self._members]
        return [text.numpy().tobytes().split(b"\0", 1)[0].decode() for text in texts]

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
    def read_only_fd(self) -> int:
        return self._host.read_only_fd

    def bytes_by_name(self) -> dict[str, int]:
        return self._host.bytes_by_name() | {name: request.nbytes for name, request in self._requests.items()}

    def close(self) -> None:
        self._local, self._bases = None, {}
        self._host.close()


def _device_text(device: torch.device) -> str:
    """The device's number in this process and, wherever it is visible, the same name."""
    if device.type != "cuda":
        return str(device)
    return f"{device.index} {device_links.device_uuid(device.index)}"
