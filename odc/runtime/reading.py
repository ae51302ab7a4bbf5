"""A member's heap as a process outside the job sees it: mapped on the member's host, read by an engine elsewhere.

Neither has the right to write.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from odc.errors import LayoutMismatchError, PeerLostError, UnsupportedError, aborted_by
from odc.memory import ProcessHandle, Words, driver_memory
from odc.memory.driver_calls import DriverError
from odc.memory.mapping import Mapping as SharedMemory
from odc.net.engines import Check, Engine
from odc.net.handshake import READER, export_purpose
from odc.net.network import dial
from odc.protocol.peers.board import REASON_BYTES
from odc.protocol.words import BOARD_WORDS, Word
from odc.runtime.connect import ask_member
from odc.runtime.linking import BOARD, READER_WORDS, board_name

_SPAN_BYTES = 4 << 20  # that are read from another host at once, where what is wanted lies close together
_GAP_BYTES = 4 << 10  # that are read for nothing rather than asked for in two reads


class ReadOnlyMember(ABC):
    """One member, `rank`, for one thread. Close it. Every method raises PeerLostError if the member cannot be read."""

    rank: int

    @abstractmethod
    def load(self) -> Mapping[Word, int]:
        """The `READER_WORDS` of its board now. What is copied later is no older."""

    @abstractmethod
    def expect(self, extents: Sequence[tuple[int, int]]) -> None:
        """What will be copied: (offset, bytes) of each, in this order. What was expected before is forgotten."""

    @abstractmethod
    def copy(self, offset: int, into: torch.Tensor) -> None:
        """Fill `into`, uint8 [n], from this byte of the heap's data on. It is CPU memory, or of the device by which the
        reader maps members; there it is filled in the turn of its current stream.
        """

    def fence(self) -> None:
        """The next `load` is no older than what was copied."""
        return

    @abstractmethod
    def refuse_if_gone(self, doing: str) -> None:
        """Raise `PeerLostError` if the rank died, shut down or aborted."""

    def _refuse(self, doing: str, words: Mapping[Word, int], reason: bytes) -> None:
        if words[Word.ABORT]:
            culprit, reported = words[Word.ABORT] - 1, reason.split(b"\0", 1)[0].decode("utf-8", "replace")
            raise aborted_by(f"reader, {doing}", culprit, reported)
        if words[Word.LEFT]:
            raise PeerLostError(f"reader, {doing}: rank {self.rank} has left the job", culprit=self.rank)

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


def _refuse_other_heap(rank: int) -> LayoutMismatchError:
    return LayoutMismatchError(
        f"reader, attaching to rank {rank}: its heap is not laid out as the weight handle says; ask the job for a new "
        "one",
        culprit=rank,
    )


class MappedMember(ReadOnlyMember):
    """A member on this host, mapped without the right to write.

    `root`, `token`, `nbytes`, `device_bytes` and `digest` are of the weight handle; `board` and `reason` are offsets in
    the heap's words; `device` maps data that lies on a GPU of the host. Raises PeerLostError if the member is gone,
    WaitTimeoutError if its listener does not answer within `timeout_s`, LayoutMismatchError if its heap is another one,
    UnsupportedError if the device cannot map it.
    """

    def __init__(
        self,
        rank: int,
        address: str,
        *,
        root: str,
        token: str,
        nbytes: int,
        digest: str,
        board: int,
        reason: int,
        timeout_s: float,
        device_bytes: int,
        device: torch.device | None,
    ) -> None:
        self.rank, self._reason, self._on_device = rank, reason, device_bytes > 0
        self._data: torch.Tensor | None = None  # on the device, until it is closed
        doing = f"reader, attaching to rank {rank}"
        hint = "; the job has ended, or the weight handle belongs to another run"
        request = {"op": "read", "root": root, "token": token}
        answer = ask_member(address, request, timeout_s, "reader", rank, hint=hint)
        with contextlib.ExitStack() as descriptors:
            for fd in answer.fds:
                descriptors.callback(os.close, fd)
            if "error" in answer.reply:
                raise PeerLostError(f"{doing}: {answer.reply['error']}", culprit=rank)
            size = os.fstat(answer.fds[0]).st_size
            if answer.reply["digest"] != digest or not answer.reply["nbytes"] == nbytes == size:
                raise _refuse_other_heap(rank)
            self._memory = SharedMemory(answer.fds[0], nbytes, writable=False)
            if device_bytes:
                assert device is not None
                self._data = _map_data(answer.fds[1:], device_bytes, device, rank)
        self._memory.prefault(fresh=False)
        self._board = Words(self._memory.address + board, BOARD_WORDS, self._memory)
        self._process = ProcessHandle(answer.pid)

    def load(self) -> Mapping[Word, int]:
        return {word: self._board.load(word) for word in READER_WORDS}

    def expect(self, extents: Sequence[tuple[int, int]]) -> None:
        return

    def copy(self, offset: int, into: torch.Tensor) -> None:
        if self._on_device:
            into.copy_(self._mapped()[offset : offset + into.numel()])
        else:
            ctypes.memmove(into.data_ptr(), self._memory.address + offset, into.numel())

    def fence(self) -> None:
        if self._on_device:
            torch.cuda.current_stream(self._mapped().device).synchronize()
        self._board.fence()

    def _mapped(self) -> torch.Tensor:
        """The data on the device. Raises PeerLostError once the reader was closed, on another thread."""
        data = self._data
        if data is None:
            raise PeerLostError(f"reader: the memory of rank {self.rank} is mapped no more", culprit=self.rank)
        return data

    def refuse_if_gone(self, doing: str) -> None:
        alive = self._process.alive()  # first: a process that has ended well or with an error has stored why
        self._refuse(doing, self.load(), ctypes.string_at(self._memory.address + self._reason, REASON_BYTES))
        if not alive:
            raise PeerLostError(f"reader, {doing}: rank {self.rank} died", culprit=self.rank)

    def close(self) -> None:
        self._process.close()
        self._data = None  # a GPU's memory is unmapped once its work is done


def _map_data(descriptors: Sequence[int], nbytes: int, device: torch.device, rank: int) -> torch.Tensor:
    """uint8 [nbytes]: the data of a rank on this host, on a GPU. What writes there faults."""
    if len(descriptors) != 1:
        raise _refuse_other_heap(rank)
    try:
        with torch.cuda.device(device):
            return driver_memory.map_shared(descriptors[0], nbytes, device, writable=False)
    except (DriverError, RuntimeError) as error:  # the latter of torch: there is no such device
        raise UnsupportedError(
            f"reader, attaching to rank {rank}: {device} cannot map its memory: {error}; see `odc doctor --need cuda`",
            culprit=rank,
        ) from error


class WeightEngine:
    """Reads from members of one root on other hosts, which listen there. `secret` is that of the weight handle."""

    def __init__(self, root: str, secret: bytes, listeners: Mapping[int, tuple[str, int]], timeout_s: float) -> None:
        self.root = root

        def connect(rank: int, check: Check) -> socket.socket:
            return dial(listeners[rank], secret, READER, rank, export_purpose(root), timeout_s, check)

        self.sockets = Engine(READER, connect, timeout_s)

    def close(self) -> None:
        self.sockets.close()


class RemoteMember(ReadOnlyMember):
    """A member on another host. Small pieces that lie close together are read together. `words` names the part of its
    heap that holds words, and is empty where that is the one with the data.

    Raises PeerLostError if it is gone or does not admit this process, LayoutMismatchError if its heap is another one.
    """

    def __init__(self, rank: int, engine: WeightEngine, digest: str, words: str = "") -> None:
        self.rank, self._engine, self._words = rank, engine, words
        self._spans: list[tuple[int, int]] = []  # first byte, end; rising
        self._span = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._at = 0  # of the span that was read last
        if self._ask(again=False)[1] != digest:
            raise _refuse_other_heap(rank)

    def _ask(self, again: bool = True) -> tuple[dict[Word, int], str, bytes]:
        """Asks once more on another connection: one may have ended and the rank not, as while this host slept."""
        try:
            answer = self._engine.sockets.ask(self.rank, board_name(self._engine.root), what="the state")
        except PeerLostError:
            if again:
                with contextlib.suppress(PeerLostError):
                    return self._ask(again=False)
            raise
        *words, digest = BOARD.unpack_from(answer)
        return dict(zip(READER_WORDS, words, strict=True)), digest.decode(), answer[BOARD.size :]

    def load(self) -> Mapping[Word, int]:
        return self._ask()[0]

    def expect(self, extents: Sequence[tuple[int, int]]) -> None:
        spans: list[tuple[int, int]] = []
        for first, nbytes in sorted(extents):
            end = first + nbytes
            if spans and first - spans[-1][1] <= _GAP_BYTES and end - spans[-1][0] <= _SPAN_BYTES:
                spans[-1] = spans[-1][0], max(end, spans[-1][1])
            else:
                spans.append((first, end))
        self._spans, self._at, self._span = spans, 0, self._span[:0]

    def copy(self, offset: int, into: torch.Tensor) -> None:
        end = offset + into.numel()
        if not self._at <= offset <= end <= self._at + self._span.numel():
            first, last = next((span for span in self._spans if span[0] <= offset and end <= span[1]), (offset, end))
            if (first, last) == (offset, end) and into.device.type == "cpu":
                self._read("", offset, into)
                return
            self._at, self._span = first, torch.empty(last - first, dtype=torch.uint8, device="cpu")
            self._read("", first, self._span)
        into.copy_(self._span[offset - self._at : end - self._at])

    def copy_words(self, offset: int, into: torch.Tensor) -> None:
        """As `copy`, from this byte on of what holds words."""
        self._read(self._words, offset, into)

    def _read(self, part: str, offset: int, into: torch.Tensor) -> None:
        self._engine.sockets.read(self.rank, self._engine.root + part, offset, into, what="the weights")

    def refuse_if_gone(self, doing: str) -> None:
        words, _, reason = self._ask()
        self._refuse(doing, words, reason)

    def close(self) -> None:
        self._span = self._span[:0]
