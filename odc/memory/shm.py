"""The CPU heap: one memfd for each rank, mapped by every rank of the host that needs it.

An anonymous memory file leaves no name behind, and no small /dev/shm bounds it; the rank's server hands its descriptor
out. Memory is taken and zeroed at `seal`, so training never sees a first touch or a full machine. The heap begins with
a text that describes its layout, so that an error can name the first difference.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from odc.errors import HeapMemoryError, LayoutMismatchError, OdcError, WaitTimeoutError
from odc.memory.available_memory import FreeMemory, free_memory
from odc.memory.heap import HostLanes, Lanes, NamedHeap
from odc.memory.layout import Layout, Request, check, describe, difference
from odc.memory.mapping import Mapping
from odc.memory.processes import close_after_fork
from odc.memory.words import Words

LAYOUT_REGION = "heap/layout"
_MIB = 1 << 20
_MFD_NOEXEC_SEAL = 8  # Linux 6.3; some hosts refuse memory files without it
_LENGTH = struct.Struct("<q")


@dataclass(frozen=True)
class Attachment:
    """A peer's heap as its server handed it over: descriptor, size and digest of its layout.

    `others` are descriptors of what the peer has elsewhere. The receiver owns all of them.
    """

    fd: int
    nbytes: int
    digest: str
    others: tuple[int, ...] = ()


class ShmHeap(NamedHeap):
    """A `SymmetricHeap` in shared memory of one host; the protocol describes the methods.

    `connect` returns the heap of a member, by index; it waits for it to come up and raises odc errors itself, and is
    called at most once at a time for each member, from the thread that needs it. `deadline_s` is how long a thread
    waits for another one that attaches to the same member; `probe` returns how much memory is left.
    """

    def __init__(
        self,
        identity: str,
        ranks: tuple[int, ...] | list[int],
        me: int,
        connect: Callable[[int], Attachment],
        deadline_s: float,
        *,
        probe: Callable[[], FreeMemory] = free_memory,
    ) -> None:
        self.identity, self.ranks, self.me = identity, tuple(ranks), me
        if not 0 <= me < len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"member {me} of ranks {self.ranks}: ranks must differ and the member must be one of them")
        self.device = torch.device("cpu")
        self.lanes: Lanes = HostLanes()
        self._connect, self._deadline_s, self._probe = connect, deadline_s, probe
        self._requests: dict[str, Request] = {}
        self._fd = self._read_only = -1
        #: Descriptors of memory elsewhere, which peers and readers get as well. The heap owns them; set before `seal`.
        self.other_fds: tuple[int, ...] = ()
        self._peers_other_fds: dict[int, tuple[int, ...]] = {}
        self._closed = False
        self._mappings: list[Mapping | None] = [None] * len(self.ranks)
        self._locks = [threading.Lock() for _ in self.ranks]
        self._words: dict[tuple[int, str], Words] = {}

    def allocate(self, name: str, nbytes: int, *, words: bool = False) -> None:
        request = Request(name, int(nbytes))
        check(request)
        if self.sealed or self._closed:
            raise OdcError(f"{self._who()}: region {name!r} was allocated after the heap was sealed")
        if name in self._requests or name == LAYOUT_REGION:
            raise ValueError(f"region {name!r} was allocated twice")
        self._requests[name] = request

    def seal(self, fingerprint: str = "") -> None:
        if self.sealed or self._closed:
            raise OdcError(f"{self._who()}: a heap can be sealed only once")
        text = describe(list(self._requests.values()), fingerprint).encode()
        table = Request(LAYOUT_REGION, _LENGTH.size + len(text))
        layout = Layout.build([table, *self._requests.values()], fingerprint)
        self._refuse_if_too_large(layout.nbytes, layout)
        try:
            fd = self._create(layout.nbytes)
        except OSError as error:
            raise HeapMemoryError(
                f"{self._who()}: the kernel makes no memory file of {layout.nbytes / _MIB:.1f} MiB for the heap: "
                f"{error}; look at `ulimit -f` and `ulimit -n`"
            ) from error
        try:
            mapping = self._map(fd, layout)
        except BaseException:
            os.close(fd)
            raise
        mapping.tensor(torch.uint8, 0, table.nbytes).copy_(
            torch.frombuffer(bytearray(_LENGTH.pack(len(text)) + text), dtype=torch.uint8)
        )
        self._fd, self._layout, self._mappings[self.me] = fd, layout, mapping
        close_after_fork(self)

    def _create(self, nbytes: int) -> int:
        name = os.fsencode(f"odc.{self.identity}.{self.ranks[self.me]}")[:240].decode(errors="ignore")
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            fd = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fd = os.memfd_create(name, flags)
        try:
            os.ftruncate(fd, nbytes)
            # Peers that map it can rely on its size: they get no SIGBUS, whatever happens to this rank.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _map(self, fd: int, layout: Layout) -> Mapping:
        try:
            mapping = Mapping(fd, layout.nbytes)
            mapping.prefault(lambda left: self._refuse_if_too_large(left, layout), fresh=True)
        except OSError as error:
            free = self._probe()
            raise HeapMemoryError(
                f"{self._who()}: the heap needs {layout.nbytes / _MIB:.1f} MiB and {free.limited_by} leaves "
                f"{free.nbytes / _MIB:.1f} MiB free, but the kernel refuses: {error}"
            ) from error
        return mapping

    def _refuse_if_too_large(self, needed: int, layout: Layout) -> None:
        free = self._probe()
        if needed > free.nbytes:
            raise HeapMemoryError(
                f"{self._who()}: the heap needs {layout.nbytes / _MIB:.1f} MiB"
                + (f" (of which {needed / _MIB:.1f} MiB are still to be taken)" if needed < layout.nbytes else "")
                + f", but {free.limited_by} leaves {free.nbytes / _MIB:.1f} MiB free; use fewer ranks on this host, "
                "a smaller model or smaller staging blocks"
            )

    def tensor(
        self, member: int, name: str, dtype: torch.dtype, *, offset: int = 0, numel: int | None = None
    ) -> torch.Tensor:
        return self._attach(member).tensor(dtype, *self.layout.extent(name, dtype, offset, numel))

    def whole(self, member: int) -> torch.Tensor:
        return self._attach(member).tensor(torch.uint8, 0, self.nbytes)

    def address(self, member: int, name: str) -> int:
        return self._attach(member).address + self.layout.offset(name)

    def words(self, member: int, name: str) -> Words:
        cache = self._words  # `close` replaces it
        found = cache.get((member, name))
        if found is None:
            mapping = self._attach(member)
            offset, count = self.layout.offset(name), self.layout.size(name) // 8
            found = cache[member, name] = Words(mapping.address + offset, count, mapping)
        return found

    def attached(self, member: int) -> bool:
        return self._mappings[member] is not None

    def _attach(self, member: int) -> Mapping:
        if not 0 <= member < len(self.ranks):
            raise IndexError(f"{self._who()}: member {member} of {len(self.ranks)}")
        mapping = self._mappings[member]
        if mapping is not None:
            return mapping
        if self._closed or not self.sealed:
            raise OdcError(f"{self._who()}: the heap is {'closed' if self._closed else 'not sealed yet'}")
        if not self._locks[member].acquire(timeout=self._deadline_s):
            raise WaitTimeoutError(
                f"{self._who()}, attaching to rank {self.ranks[member]}: another thread has been attaching for "
                f"{self._deadline_s:g} s"
            )
        try:
            return self._mappings[member] or self._attach_now(member)
        finally:
            self._locks[member].release()

    def _attach_now(self, member: int) -> Mapping:
        mappings = self._mappings  # `close` replaces it
        attachment = self._connect(member)
        self._peers_other_fds[member] = attachment.others
        try:
            self._refuse_other_layout(member, attachment)
            mapping = Mapping(attachment.fd, attachment.nbytes)
            mapping.prefault(fresh=False)
        except BaseException:
            _close(self.take_other_fds(member))
            raise
        finally:
            os.close(attachment.fd)
        if self._closed:  # meanwhile
            _close(self.take_other_fds(member))
        mappings[member] = mapping
        return mapping

    def take_other_fds(self, member: int) -> tuple[int, ...]:
        """The `other_fds` of a peer that was attached, once: the caller closes them. Empty afterwards."""
        return self._peers_other_fds.pop(member, ())

    def _refuse_other_layout(self, member: int, theirs: Attachment) -> None:
        size = os.fstat(theirs.fd).st_size
        if theirs.digest == self.digest and theirs.nbytes == self.nbytes == size:
            return
        me, rank = self.ranks[self.me], self.ranks[member]
        if theirs.digest == self.digest:
            what = f"rank {me} has {self.nbytes} bytes, rank {rank} announced {theirs.nbytes} and provided {size}"
        else:
            mine = describe(list(self._requests.values()), self.layout.fingerprint)
            other = _read_description(theirs.fd, size)
            what = difference(mine, other) if other else f"{self.nbytes} bytes against {theirs.nbytes}"
        raise LayoutMismatchError(
            f"rank {me} and rank {rank} laid out heap {self.identity} differently (rank {me} named first): {what}; "
            "every rank must shard the same modules in the same order, with the same settings"
        )

    @property
    def nbytes(self) -> int:
        return self._layout.nbytes if self._layout else 0

    @property
    def digest(self) -> str:
        return self.layout.digest

    @property
    def fd(self) -> int:
        if self._fd < 0:
            raise OdcError(f"{self._who()}: the heap is {'closed' if self._closed else 'not sealed yet'}")
        return self._fd

    @property
    def read_only_fd(self) -> int:
        """A read-only descriptor of this rank's memory, for processes outside the job; the heap
        owns it. Raises OSError where there is no procfs. From one thread at a time.
        """
        if self._read_only < 0:
            os.fchmod(self.fd, stat.S_IRUSR)  # or its holder could open it anew for writing
            self._read_only = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        return self._read_only

    def bytes_by_name(self) -> dict[str, int]:
        if self._layout is None:
            return {name: request.nbytes for name, request in self._requests.items()}
        return {request.name: request.nbytes for request in self._layout.requests}

    def close(self) -> None:
        self._closed = True
        descriptors, self._fd, self._read_only = (self._fd, self._read_only, *self.other_fds), -1, -1
        self.other_fds = ()
        _close(fd for fd in descriptors if fd >= 0)
        for member in range(len(self.ranks)):
            _close(self.take_other_fds(member))
        # Views hold their mapping, so the memory is released with the last of them.
        self._mappings = [None] * len(self.ranks)
        self._words = {}


def _close(descriptors: Iterable[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def _read_description(fd: int, size: int) -> str:
    """The layout text at the start of a peer's heap; empty if there is none."""
    (length,) = _LENGTH.unpack(os.pread(fd, _LENGTH.size, 0)) if size >= _LENGTH.size else (0,)
    if not 0 < length <= size - _LENGTH.size:
        return ""
    return os.pread(fd, length, _LENGTH.size).decode("utf-8", "replace")
