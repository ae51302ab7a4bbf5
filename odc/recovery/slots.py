"""Where a rank keeps its state: two slots of memory that outlive its process, because the ranks of its host hold them.

    slot    words, a page of them | tensors, one after the other | text

A state goes to the slot with the older one: STEP = 0, tensors, text, STEP = 1 + s. So whenever its rank dies, the other
slot is whole; all ranks finish a step together, so one step is whole on every rank (docs/recovery.md).

A slot is a nameless memory file, so it is gone with the last process that holds it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pickle
import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, Self

import torch

from odc.errors import HeapMemoryError, UnsupportedError
from odc.memory import Words, close_after_fork, free_memory, round_up
from odc.memory.mapping import Mapping
from odc.memory.pinned import PinnedMapping
from odc.recovery.members import Share

_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_MARK = 0x0DC5_1075
_PAGE, _ALIGN, _MIB = 4096, 64, 1 << 20


class HolderEndedError(OSError):
    """The process that has shown slots has ended since; its number may be another process's by now."""


class SlotWord(IntEnum):
    """Words of a slot, each stored by its rank alone."""

    STEP = 0  # 1 + the step whose state is whole; 0: none. Stored last, and first set to 0
    TEXT_AT = 1  # bytes from the beginning of the slot
    TEXT_BYTES = 2
    MARK = 3  # that this is a slot, and
    LAYOUT = 4  # of which share
    OWNER = 5


class Extent(NamedTuple):
    """Where a state ends in its slot: with a text, at bytes from the beginning of the slot."""

    text_at: int
    text_bytes: int

    @property
    def end(self) -> int:
        return self.text_at + self.text_bytes


class StateSlot:
    """One slot, here or of another process: `fd` belongs to it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._closing = weakref.finalize(self, os.close, fd)  # also of slots that are dropped
        self._closing.atexit = False
        self._mapped: Mapping | None = None
        self._pinned: PinnedMapping | None = None  # for the state of a model on a device

    @property
    def nbytes(self) -> int:
        return os.fstat(self.fd).st_size

    def word(self, word: SlotWord) -> int:
        """Read from the descriptor: most holders of a slot never map it."""
        return int.from_bytes(os.pread(self.fd, 8, 8 * word), "little", signed=True)

    def belongs_to(self, share: Share) -> bool:
        """Whether this is a slot of that share; of another file it is none."""
        try:
            return tuple(map(self.word, (SlotWord.MARK, SlotWord.LAYOUT, SlotWord.OWNER))) == (_MARK, *share)
        except OSError:  # a pipe, for instance
            return False

    def words(self) -> Words:
        mapping = self._mapping()
        return Words(mapping.address, len(SlotWord), mapping)

    def _mapping(self) -> Mapping:
        if self._mapped is None or self._mapped.nbytes != self.nbytes:
            self._mapped = Mapping(self.fd, self.nbytes)
        return self._mapped

    def grow(self, nbytes: int) -> None:
        """Take memory for `nbytes`; HeapMemoryError if there is none. What the slot holds stays."""
        before, nbytes = self.nbytes, round_up(nbytes, _PAGE)
        if nbytes <= before:
            return
        free = free_memory()
        if nbytes - before > free.nbytes:
            raise HeapMemoryError(
                f"keeping a rank's state needs {(nbytes - before) / _MIB:.1f} MiB more, but {free.limited_by} leaves "
                f"{free.nbytes / _MIB:.1f} MiB free"
            )
        self._unpin()  # all of it is pinned anew, when it is next filled
        os.ftruncate(self.fd, nbytes)
        self._mapping().prefault(fresh=not before)

    def fill(self, tensors: Sequence[torch.Tensor], table: Sequence[tuple[int, ...]], at: int, text: bytes) -> None:
        """Copy a state; returns when all of it is there, also what devices copy."""
        mapping = self._mapping()
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        for (start, *shape), tensor in zip(table, tensors, strict=True):
            if tensor.numel():
                mapping.tensor(tensor.dtype, start, tensor.numel()).view(shape).copy_(tensor, non_blocking=True)
        mapping.tensor(torch.uint8, at, len(text)).copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def pin(self) -> None:
        """Before a device copies into it; HeapMemoryError if CUDA refuses. Until it grows or closes."""
        mapping = self._mapping()
        if self._pinned is None or self._pinned.mapping is not mapping:
            self._unpin()
            self._pinned = PinnedMapping(mapping)

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    def state(self, extent: Extent) -> torch.Tensor:
        """A state's bytes, tensors and text: uint8 [n]."""
        return self._mapping().tensor(torch.uint8, _PAGE, extent.end - _PAGE)

    def text(self) -> bytes:
        return os.pread(self.fd, self.word(SlotWord.TEXT_BYTES), self.word(SlotWord.TEXT_AT))

    def view(self, dtype: torch.dtype, start: int, shape: Sequence[int]) -> torch.Tensor:
        return self._mapping().tensor(dtype, start, torch.Size(shape).numel()).view(torch.Size(shape))

    def close(self) -> None:
        self._unpin()
        self._mapped = None
        self.fd = -1
        self._closing()


class Slots:
    """Both slots of one share. Only the process whose it is may `write`, `read` or `forget`; any holder may look."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._slots = tuple(StateSlot(fd) for fd in fds)
        close_after_fork(self)

    @classmethod
    def create(cls, share: Share) -> Self:
        """Empty slots; HeapMemoryError where the system makes no files for them."""
        fds: list[int] = []
        try:
            for i in range(2):
                fds.append(_memory_file(f"odc.state.{share.rank}.{i}"))
        except OSError as error:
            _close(fds)
            text = f"the kernel makes no memory files for the kept state of rank {share.rank}: {error}"
            raise HeapMemoryError(f"{text}; look at `ulimit -n`") from error
        made = cls(fds)
        for slot in made._slots:
            slot.grow(_PAGE)
            words = slot.words()
            words.store(SlotWord.LAYOUT, share.layout)
            words.store(SlotWord.OWNER, share.rank)
            words.store(SlotWord.MARK, _MARK)
        return made

    @classmethod
    def held_by(cls, pid: int, fds: Sequence[int], share: Share) -> Self:
        """The slots that process `pid` of this host holds as `fds`. It needs no help of that process, which may be
        computing.

        HolderEndedError if it has ended, or holds another's; UnsupportedError if the system refuses it.
        """
        opened: list[int] = []
        try:
            for fd in fds:
                opened.append(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            _close(opened)
            if error.errno in _REFUSED:  # as it would be in the next generation too
                raise UnsupportedError(
                    f"the state of rank {share.rank} cannot be held by process {os.getpid()}: {error}. Ranks of a host "
                    "need the same user, and a limit of open files (ulimit -n) above two more for each of them"
                ) from error
            raise HolderEndedError(f"process {pid} does not hold the slots of rank {share.rank}: {error}") from error
        found = cls(opened)
        if not all(slot.belongs_to(share) for slot in found._slots):
            found.close()
            raise HolderEndedError(f"process {pid} holds other files than the slots of rank {share.rank}")
        return found

    @property
    def fds(self) -> list[int]:
        """Descriptors in this process."""
        return [slot.fd for slot in self._slots]

    def steps(self) -> list[int]:
        """The steps whose states are whole."""
        return sorted(step - 1 for slot in self._slots if (step := slot.word(SlotWord.STEP)))

    def write(self, step: int, tensors: Sequence[torch.Tensor], text: bytes) -> None:
        """Keep the state after `step` in place of the older of the two, or of one of the same step.

        HeapMemoryError without memory for it: then what was kept stays.
        """
        table, at = [], _PAGE
        for tensor in tensors:
            table.append((at, *tensor.shape))
            at = round_up(at + tensor.nbytes, _ALIGN)
        text = pickle.dumps(([(tensor.dtype, *one) for tensor, one in zip(tensors, table, strict=True)], text))
        on_device = any(tensor.is_cuda for tensor in tensors)
        self._put(step, Extent(at, len(text)), lambda slot: slot.fill(tensors, table, at, text), pinned=on_device)

    def receive(self, step: int, extent: Extent, read: Callable[[torch.Tensor], object]) -> None:
        """As `write`, where another process has: `read` fills memory with the bytes that are its `shown` there."""
        self._put(step, extent, lambda slot: read(slot.state(extent)))

    def _put(self, step: int, extent: Extent, fill: Callable[[StateSlot], object], *, pinned: bool = False) -> None:
        for slot in self._slots:  # both, or the memory might run out in the middle of the training
            if extent.end > slot.nbytes:  # with room for a text twice as long: to grow maps all of the slot anew
                slot.grow(extent.end + extent.text_bytes)
        kept = {one.word(SlotWord.STEP): one for one in self._slots}
        slot = kept.get(1 + step) or kept[min(kept)]  # a job may begin twice at its first step
        if pinned:
            slot.pin()
        words = slot.words()
        words.store(SlotWord.STEP, 0)
        words.fence()  # no byte of the new state is there before the old one has ceased to count
        fill(slot)
        words.store(SlotWord.TEXT_AT, extent.text_at)
        words.store(SlotWord.TEXT_BYTES, extent.text_bytes)
        words.store(SlotWord.STEP, 1 + step)

    def shown(self, step: int) -> tuple[Extent, torch.Tensor]:
        """The state after `step`, which must be whole, as bytes for another process: a view, uint8 [n]."""
        slot = self._holding(step)
        extent = Extent(slot.word(SlotWord.TEXT_AT), slot.word(SlotWord.TEXT_BYTES))
        return extent, slot.state(extent)

    def read(self, step: int) -> tuple[list[torch.Tensor], bytes]:
        """The tensors, as views of the slot, and the text that `write` was given for `step`, which must be whole."""
        slot = self._holding(step)
        table, text = pickle.loads(slot.text())
        return [slot.view(dtype, start, shape) for dtype, start, *shape in table], text

    def _holding(self, step: int) -> StateSlot:
        return next(one for one in self._slots if one.word(SlotWord.STEP) == 1 + step)

    def forget_after(self, step: int) -> None:
        """What was kept of later steps is of a history that is given up, and must not count in the next recovery."""
        for slot in self._slots:
            if slot.word(SlotWord.STEP) > 1 + step:
                slot.words().store(SlotWord.STEP, 0)

    def close(self) -> None:
        """Let go of them; the memory stays for as long as another process holds it. Idempotent."""
        for slot in self._slots:
            slot.close()


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _memory_file(name: str) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with contextlib.suppress(OSError):  # a holder that maps it cannot be hurt by a file that shrinks
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd
