"""The links of one root: a TCP connection to the member with this rank's index on every other host.

This rank pushes its words there as it stores them, each once a host, with the texts and counts that explain them before
them in the same stream. What arrives goes into the mirror in this rank's heap, where every rank of this host looks. The
daemon reads; whoever stores a word writes, which never waits for long: the kernel's buffer takes more than an epoch's
words. A link that breaks ends the job.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch

from odc.deadlines import LINK_FIRST_PAUSE_S, LINK_LONGEST_PAUSE_S, LINK_REFRESH_S, Backoff, Deadline
from odc.net.frames import Frame, FrameKind, FrameReader, MalformedFrameError
from odc.net.host_link import HostLink, side_to_blame
from odc.protocol.layout import HeapLayout
from odc.protocol.peers.board import REASON_BYTES
from odc.protocol.peers.remote import RemotePeer
from odc.protocol.words import BOARD_WORDS, Outcome, RootState, Word, decode_outcome
from odc.settings import LOST_AFTER_S

_SEEN_BY_ALL = frozenset(
    {
        Word.PUBLISHED,
        Word.DONE,
        Word.OUTCOME_EVEN,
        Word.OUTCOME_ODD,
        Word.COMPLETE,
        Word.REDUCED,
        Word.READ,
        Word.ABORT,
        Word.LEFT,
        Word.OFFERED,
        Word.PUBLISHING,
    }
)
_FOR_STATUS = (Word.STATE, Word.MICROBATCH, Word.FETCHED, Word.PUSHED)
_NOW_AND_THEN = (*_FOR_STATUS, Word.WAITING_EPOCH, Word.WAITING, Word.PROGRESS)
_LAST = (Word.PUBLISHED, Word.COMPLETE, Word.READ, Word.DONE, Word.ABORT, Word.LEFT)  # of a link's first words
_COUNT = ">i8"  # a push count on the wire
_COUNTS = 1 << 10  # of a frame
_DEAD = (ConnectionResetError, BrokenPipeError)
_REGIONS = {FrameKind.ENTRIES: "entries", FrameKind.TAKEN: "taken"}  # of an arena's words


def words_frame(kind: FrameKind, first: int, values: Sequence[int]) -> Frame:
    """Words of an arena, from word `first` on."""
    return Frame(kind, value=first, body=np.array(values, _COUNT).tobytes())


def _nothing(*unused: object) -> None:
    return


class Links:
    """All links of one root, over hosts.

    `abort(reason, culprit)` ends the job on this host, and over this rank's board on the others. All methods may be
    called from any thread.
    """

    def __init__(
        self, layout: HeapLayout, abort: Callable[[str, int], None], lost_after_s: float = LOST_AFTER_S
    ) -> None:
        self._layout, self._grid, self._abort, self._lost_after_s = layout, layout.grid, abort, lost_after_s
        self._links: dict[int, HostLink] = {}
        # Reentrant: the garbage collector may end a root, which tells the others, while this thread tells something.
        self._changing = threading.RLock()
        self._closed = False
        self._refreshed = 0.0
        self._sizes: dict[FrameKind, int] = {}  # words of the regions that an arena mirrors
        self._words_of: Callable[[FrameKind], list[int]] = lambda kind: []
        layout.pushed_board.told, layout.pushed_board.refresh = self.told, self.refresh
        self.summed: Callable[[int, int, dict[int, int]], None] = _nothing  # told SUMMED of a member, by epoch

    def mirror(self, sizes: dict[FrameKind, int], words_of: Callable[[FrameKind], list[int]]) -> None:
        """Carry an arena's words too, so many of each kind; `words_of` are all that this rank has stored. Before any
        link is made, so before the member is announced.
        """
        self._sizes, self._words_of = sizes, words_of

    # to the other hosts ------------------------------------------------------------------------------------------

    def up(self, partner: int) -> bool:
        return partner in self._links

    def add(self, partner: int, connection: socket.socket) -> HostLink | None:
        """Use an admitted connection to `partner`: tell it how this rank fares. None if there is a link already."""
        link = HostLink(partner, connection, self._lost_after_s)
        with self._changing:
            if self._closed or partner in self._links:
                link.close()
                return None
            self._links[partner] = link
            self._send(link, *(words_frame(kind, 0, self._words_of(kind)) for kind in self._sizes))
            self._send(link, *self._first_frames())
        return link

    def _first_frames(self) -> list[Frame]:
        board, mine = self._layout.pushed_board, self._layout.mine
        frames = [Frame(FrameKind.REASON, body=mine.reason.encode())]
        epoch = board.load(Word.PUBLISHED)
        for one in (max(0, epoch - 1), epoch):
            frames.append(Frame(FrameKind.ABANDONMENT, value=one, body=mine.abandonment(one).encode()))
        words = [word for word in (*_SEEN_BY_ALL, *_NOW_AND_THEN) if word not in _LAST]
        return frames + [Frame(FrameKind.WORD, word, board.load(word)) for word in (*words, *_LAST)]

    def told(self, index: int, value: int) -> None:
        """This rank has stored a word."""
        if index in _SEEN_BY_ALL:
            self._tell(*self._explained(index, value))
        elif index == Word.PROGRESS:
            self.refresh()
        elif index == Word.STATE and value == RootState.CLOSED:  # it may not call into odc again for long
            self._refresh()

    def _explained(self, index: int, value: int) -> list[Frame]:
        frames = [Frame(FrameKind.WORD, index, value)]
        mine = self._layout.mine
        if index in (Word.ABORT, Word.LEFT):
            frames.insert(0, Frame(FrameKind.REASON, body=mine.reason.encode()))
        elif index in (Word.OUTCOME_EVEN, Word.OUTCOME_ODD):
            epoch = self._layout.pushed_board.load(Word.PUBLISHED)
            if decode_outcome(value, epoch) is Outcome.ABANDONED:
                frames.insert(0, Frame(FrameKind.ABANDONMENT, value=epoch, body=mine.abandonment(epoch).encode()))
        return frames

    def refresh(self) -> None:
        """Tell what others look at only when they have waited for long, or for `odc status`; a few times a second."""
        if time.monotonic() - self._refreshed >= LINK_REFRESH_S:
            self._refresh()

    def _refresh(self) -> None:
        self._refreshed = time.monotonic()
        board = self._layout.pushed_board
        frames = [Frame(FrameKind.WORD, word, board.load(word)) for word in _NOW_AND_THEN]
        with self._changing:
            for link in self._links.values():
                if link.room(0):  # or the other end has been stopped for long, and reads the next ones
                    self._send(link, *frames)

    def tell_counts(self, counts: torch.Tensor) -> None:
        """Waits where another host has been stopped, and for as long."""
        for first in range(0, len(counts), _COUNTS):
            body = counts[first : first + _COUNTS].numpy().astype(_COUNT).tobytes()
            frame = Frame(FrameKind.COUNTS, value=first, body=body)
            for link in list(self._links.values()):
                self._await_room(link, len(frame.body))
            self._tell(frame)

    def _await_room(self, link: HostLink, nbytes: int) -> None:
        timeout_s, backoff = self._layout.settings.timeout_s, Backoff(LINK_FIRST_PAUSE_S, LINK_LONGEST_PAUSE_S)
        deadline, board = Deadline(timeout_s), self._layout.pushed_board
        while not link.room(nbytes) and not board.load(Word.ABORT):
            if deadline.passed():
                self._lost(link, TimeoutError(f"for {timeout_s:g} s it has not read what this host says"))
                return
            backoff.sleep()

    def tell_host(self, host: int, frame: Frame) -> None:
        """Tell one host; one that is not linked yet learns of it when it is, by `words_of`."""
        with self._changing:
            link = self._links.get(self._grid.partner(host))
            if link is not None:
                self._send(link, frame)

    def tell_summed(self, epoch: int, counts: Mapping[int, int]) -> None:
        body = np.array(list(counts.items()), _COUNT).tobytes()
        self._tell(Frame(FrameKind.SUMMED, value=epoch, body=body))

    def _tell(self, *frames: Frame) -> None:
        with self._changing:
            for link in list(self._links.values()):
                self._send(link, *frames)

    def _send(self, link: HostLink, *frames: Frame) -> None:
        try:
            link.send(*frames)
        except _DEAD:
            return  # whoever reads from it finds out whether the other end had shut down before
        except OSError as error:
            self._lost(link, error)

    # from the other hosts ----------------------------------------------------------------------------------------

    def reader(self, link: HostLink) -> Callable[[], bool]:
        """A function for the daemon to call when `link` is readable; False once it never will be again."""
        limits = {
            FrameKind.WORD: 0,
            FrameKind.REASON: REASON_BYTES,
            FrameKind.ABANDONMENT: REASON_BYTES,
            FrameKind.COUNTS: 8 * _COUNTS,
            **{kind: 8 * words for kind, words in self._sizes.items()},
            FrameKind.SUMMED: 16 * len(self._layout.units),
        }
        frames, heard = FrameReader(limits, BOARD_WORDS), False

        def read() -> bool:
            nonlocal heard
            try:
                # Once: the daemon calls again if there is more, and sees to everybody else before.
                data = link.receive()
                if data == b"":
                    raise ConnectionResetError("end of the stream")
                heard = heard or data is not None
                for frame in frames.feed(data or b""):
                    self._take(link.member, frame)
            except (OSError, MalformedFrameError) as error:
                if not heard and isinstance(error, _DEAD):  # it has admitted this rank, and not taken its link
                    self.missed(link.member)
                else:
                    self._lost(link, error)
                return False
            return not self._closed

        return read

    def _take(self, member: int, frame: Frame) -> None:
        peer = self._layout.remote(member)
        if frame.kind is FrameKind.WORD:
            peer.board.store(frame.index, frame.value)  # release: everything that came before it is in the mirror
            peer.board.wake(frame.index)
            if frame.index == Word.ABORT and frame.value:
                self._abort(peer.reason, frame.value - 1)
        elif frame.kind is FrameKind.REASON:
            peer.set_reason(frame.body.decode("utf-8", "replace"))
        elif frame.kind is FrameKind.ABANDONMENT:
            peer.set_abandonment(frame.value, frame.body.decode("utf-8", "replace"))
        elif frame.kind in _REGIONS:
            self._mirror(peer, frame)
        elif frame.kind is FrameKind.SUMMED:
            self._take_summed(member, frame)
        else:
            self._take_counts(peer, frame)

    def _take_counts(self, peer: RemotePeer, frame: Frame) -> None:
        counts = np.frombuffer(frame.body[: len(frame.body) // 8 * 8], _COUNT).astype(np.int64)
        if len(frame.body) % 8 or not 0 <= frame.value <= self._layout.param_base[-1] - len(counts):
            raise MalformedFrameError(f"{len(frame.body)} bytes of counts from count {frame.value} on")
        peer.pushes[frame.value : frame.value + len(counts)].copy_(torch.from_numpy(counts))

    def _take_summed(self, member: int, frame: Frame) -> None:
        if len(frame.body) % 16:
            raise MalformedFrameError(f"{len(frame.body)} bytes of sums")
        numbers = np.frombuffer(frame.body, _COUNT).tolist()
        counts = dict(zip(numbers[::2], numbers[1::2], strict=True))
        if not all(0 <= unit < len(self._layout.units) for unit in counts):
            raise MalformedFrameError(f"sums of units {sorted(counts)}")
        self.summed(member, frame.value, counts)

    def missed(self, partner: int, why: str = "") -> None:
        """`partner` has no link to this rank: it shut this root down, or ended, before it had one.

        The job goes on, because roots that were built and never run may be shut down at any time. Whoever waits for it
        is told.
        """
        with self._changing:
            if self._closed:  # the mirror's memory may be gone
                return
            peer = self._layout.remote(partner)
            peer.set_reason(why)
            peer.board.store(Word.LEFT, 1)

    def ended(self, member: int, reason: str, culprit: int) -> None:
        """End the job, as `member` has ended; unless it has a link to this rank, which tells how it ended."""
        with self._changing:
            if self._closed or member in self._links or member not in self._grid.partners:
                return
            self._blame(member, reason, culprit)
        self._abort(reason, culprit)

    def _blame(self, member: int, reason: str, culprit: int) -> None:
        """Say so in the mirror too, where ranks of this host see it to which this rank is not attached."""
        peer = self._layout.remote(member)
        peer.set_reason(reason)
        peer.board.store(Word.ABORT, 1 + culprit)

    def _mirror(self, peer: RemotePeer, frame: Frame) -> None:
        values = np.frombuffer(frame.body[: len(frame.body) // 8 * 8], _COUNT).tolist()
        if len(frame.body) % 8 or not 0 <= frame.value <= self._sizes[frame.kind] - len(values):
            raise MalformedFrameError(f"{len(frame.body)} bytes of an arena's words from word {frame.value} on")
        words = peer.mirrored(_REGIONS[frame.kind])
        for at in reversed(range(len(values))):  # STEP, which is the first word of an entry, last
            words.store(frame.value + at, values[at])

    def _lost(self, link: HostLink, error: Exception) -> None:
        """End the job, unless the other end had shut down in good order, or this rank closes its links."""
        with self._changing:
            ended = self._closed or self._links.get(link.member) is not link
        if ended:
            return
        peer, grid = self._layout.remote(link.member), self._grid
        board = peer.board
        if board.load(Word.LEFT) or self._layout.pushed_board.load(Word.ABORT):
            return
        at = f"in epoch {board.load(Word.PUBLISHED)} (done with {board.load(Word.DONE)})"
        if isinstance(error, _DEAD):
            reason, culprit = f"rank {peer.rank} died {at}: its link to rank {grid.rank} has ended", peer.rank
        elif isinstance(error, MalformedFrameError):
            there = self._ranks_on([grid.host(link.member)])
            reason, culprit = f"the host of ranks {there} speaks nonsense {at}: {error}", peer.rank
        else:
            reason, culprit = self._cut_off(link, f"{at}: {error}")
        with self._changing:
            if not self._closed:
                self._blame(link.member, reason, culprit)
        self._abort(reason, culprit)

    def _cut_off(self, link: HostLink, how: str) -> tuple[str, int]:
        """Why the network is divided and whom to blame, the same on every rank of both sides: see `side_to_blame`."""
        grid = self._grid
        with self._changing:
            silent = {one.member for one in self._links.values() if one is link or one.silent()}
        beyond = {grid.host(member) for member in silent}
        here = {grid.host(member) for member in grid.members} - beyond
        named, why = side_to_blame(here, beyond, grid.host(grid.ranks.index(min(grid.ranks))))
        others = beyond if named == here else here
        reason = (
            f"the host of ranks {self._ranks_on(named)} cannot be reached any more from that of ranks "
            f"{self._ranks_on(others)} {how} (named as {why}: which side was cut off, or died, cannot be told)"
        )
        return reason, min(grid.ranks[member] for host in named for member in grid.on(host))

    def _ranks_on(self, hosts: Collection[int]) -> str:
        grid = self._grid
        return ", ".join(str(rank) for rank in sorted(grid.ranks[one] for host in hosts for one in grid.on(host)))

    def unheard(self) -> list[int]:
        """Partners whose host has not acknowledged all that this rank has said. Hanging up before may lose the rest."""
        with self._changing:
            return [partner for partner, link in self._links.items() if link.unacknowledged()]

    def _deafen(self) -> None:
        """Say in the mirrors that they stay as they are, or a rank of this host would wait for what is not heard."""
        mine = self._layout.mine
        culprit = mine.board.load(Word.ABORT)
        for partner in self._grid.partners:
            peer = self._layout.remote(partner)
            if not (peer.board.load(Word.LEFT) or peer.board.load(Word.ABORT)):
                peer.set_reason(mine.reason)
                peer.board.store(Word.ABORT if culprit else Word.LEFT, culprit or 1)

    def close(self) -> None:
        """Hang up; idempotent. From then on the partners have LEFT in the mirrors of this rank's heap."""
        with self._changing:
            if self._closed:
                return
            self._closed = True
            self._deafen()
            board = self._layout.pushed_board
            board.told, board.refresh = _nothing, _nothing  # they held this object, and it the heap
            self.summed = _nothing
            for link in self._links.values():
                link.hang_up()
