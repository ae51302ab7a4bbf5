"""The links of one root: a TCP connection to the member with this rank's index on every other host.

This rank pushes its words there as it stores them, each once a host, with the texts and counts that explain them before
them in the same stream. What arrives goes into the mirror in this rank's heap, where each rank of this host reads. The
daemon reads; the thread that stores a word writes, which never waits for long: the kernel's buffer takes more than an
epoch's words. A link that breaks ends the job.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from odc.deadlines import LINK_FIRST_PAUSE_S, LINK_LONGEST_PAUSE_S, LINK_REFRESH_S, Backoff, Deadline
from odc.memory import Words
from odc.net.host_link import HostLink, side_to_blame
from odc.net.liveness import Loss
from odc.net.messages import (
    EntryWords,
    GivenReason,
    GivenUp,
    MalformedMessageError,
    Message,
    MessageReader,
    PushCounts,
    ReadableSums,
    ShardVersions,
    StoredWord,
    TakenWords,
    encode,
)
from odc.protocol.layout import HeapLayout
from odc.protocol.peers.board import REASON_BYTES
from odc.protocol.protocol import abort
from odc.protocol.words import (
    ARENA_TABLE,
    ARENA_TAKEN,
    BOARD_WORDS,
    UNREACHED,
    VERSION_WORDS,
    Outcome,
    RootState,
    Word,
    decode_outcome,
)
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
_FOR_STATUS = (Word.STATE, Word.MICROBATCH, Word.FETCHED, Word.PUSHED, Word.SAVED)
_NOW_AND_THEN = (*_FOR_STATUS, Word.WAITING_EPOCH, Word.WAITING, Word.PROGRESS)
_LAST = (Word.PUBLISHED, Word.COMPLETE, Word.READ, Word.DONE, Word.ABORT, Word.LEFT)  # of a link's first words
_ARENA: dict[str, type[EntryWords | TakenWords]] = {ARENA_TABLE: EntryWords, ARENA_TAKEN: TakenWords}
_COUNTS = 1 << 10  # of a message
_DEAD = (ConnectionResetError, BrokenPipeError)

#: Called with a member, an epoch, and by unit how often its host's ranks have pushed what may be read of its sums.
Summed = Callable[[int, int, dict[int, int]], None]


class Links:
    """All links of one root, over hosts: its `odc.protocol.sink.WordSink`.

    `report` is that of the table of lost ranks. All methods may be called from any thread.
    """

    def __init__(self, layout: HeapLayout, report: Callable[[Loss], None], lost_after_s: float = LOST_AFTER_S) -> None:
        self._layout, self._grid, self._report, self._lost_after_s = layout, layout.grid, report, lost_after_s
        self._links: dict[int, HostLink] = {}
        self._lost: set[int] = set()  # partners whose link has ended without a good-bye
        # Reentrant: the garbage collector may end a root, which sends to the others, while this thread sends.
        self._changing = threading.RLock()
        self._closed = False
        self._waiting_shown = False  # to the other hosts
        self._refreshed = 0.0
        sizes = layout.heap.bytes_by_name()
        self._words = {region: sizes.get(region, 0) // 8 for region in _ARENA}  # how many, where there is an arena

    # to the other hosts ------------------------------------------------------------------------------------------

    def up(self, partner: int) -> bool:
        return partner in self._links

    def will_report(self, partner: int) -> bool:
        """Whether there is a link that has not reported how `partner` ends."""
        return partner in self._links and partner not in self._lost

    def add(self, partner: int, connection: socket.socket) -> HostLink | None:
        """Use an admitted connection to `partner`: send it this rank's state. None if there is a link already."""
        link = HostLink(partner, connection, self._lost_after_s)
        with self._changing:
            if self._closed or partner in self._links:
                link.close()
                return None
            self._links[partner] = link
            self._send(link, encode(*self._first_messages()))
        return link

    def _first_messages(self) -> list[Message]:
        """This rank's state, which its other threads change meanwhile. What is stored last is loaded first and sent
        last: a word must not come before what explains it.
        """
        heap, mine, board = self._layout.heap, self._layout.mine, self._layout.mine.board
        words = [word for word in (*_SEEN_BY_ALL, *_NOW_AND_THEN) if word not in _LAST]
        stored = [StoredWord(word, board.load(word)) for word in reversed((*words, *_LAST))]
        epoch = board.load(Word.PUBLISHED)
        given_up = [GivenUp(one, mine.abandonment(one)) for one in (max(0, epoch - 1), epoch)]
        messages: list[Message] = [*self._versions(), GivenReason(mine.reason), *given_up, *reversed(stored)]
        for region, count in self._words.items():
            if count:
                values = tuple(map(heap.words(mine.member, region).load, range(count)))
                messages.insert(0, _ARENA[region](0, values))
        return messages

    def _versions(self) -> list[ShardVersions]:
        if not self._layout.says_changes:
            return []
        words = self._layout.heap.words(self._grid.me, "versions")
        return [ShardVersions(tuple(map(words.load, range(VERSION_WORDS * len(self._layout.units)))))]

    def stored(self, index: int, value: int) -> None:
        """This rank has stored a word."""
        if index in _SEEN_BY_ALL:
            self._send_all(*self._explained(index, value))
        elif index == Word.PROGRESS:
            self.refresh()
        elif (index, value) == (Word.STATE, RootState.CLOSED) or (
            (index, value) == (Word.WAITING, 0) and self._shows_wait()
        ):  # it may not call into odc again for long: it would stand there in a state, or a wait, that is over
            self._refresh()

    def _shows_wait(self) -> bool:
        with self._changing:  # another thread may have read the wait, to send it, and not noted that yet
            return self._waiting_shown

    def _explained(self, index: int, value: int) -> list[Message]:
        messages: list[Message] = [StoredWord(index, value)]
        mine = self._layout.mine
        if index == Word.PUBLISHED:
            messages[:0] = self._versions()
        elif index in (Word.ABORT, Word.LEFT):
            messages.insert(0, GivenReason(mine.reason))
        elif index in (Word.OUTCOME_EVEN, Word.OUTCOME_ODD):
            epoch = self._layout.mine.board.load(Word.PUBLISHED)
            if decode_outcome(value, epoch) is Outcome.ABANDONED:
                messages.insert(0, GivenUp(epoch, mine.abandonment(epoch)))
        return messages

    def refresh(self) -> None:
        """Send what others read only when they have waited for long, or for `odc status`; a few times a second."""
        if time.monotonic() - self._refreshed >= LINK_REFRESH_S:
            self._refresh()

    def _refresh(self) -> None:
        self._refreshed = time.monotonic()
        with self._changing:
            if self._closed:  # the board's memory may be gone
                return
            board = self._layout.mine.board
            words = {word: board.load(word) for word in _NOW_AND_THEN}
            self._waiting_shown = words[Word.WAITING] != 0
            encoded = encode(*(StoredWord(word, value) for word, value in words.items()))
            for link in self._links.values():
                if link.room(0):  # or the other end has been stopped for long, and reads the next ones
                    self._send(link, encoded)

    def send_counts(self, counts: torch.Tensor) -> None:
        """Waits where another host has been stopped, and for as long."""
        for first in range(0, len(counts), _COUNTS):
            some = PushCounts(first, tuple(counts[first : first + _COUNTS].tolist()))
            for link in list(self._links.values()):
                self._await_room(link, 8 * len(some.values))
            self._send_all(some)

    def _await_room(self, link: HostLink, nbytes: int) -> None:
        timeout_s, backoff = self._layout.settings.timeout_s, Backoff(LINK_FIRST_PAUSE_S, LINK_LONGEST_PAUSE_S)
        deadline, board = Deadline(timeout_s), self._layout.mine.board
        while not link.room(nbytes) and not board.load(Word.ABORT):
            if deadline.passed():
                self._end(link, TimeoutError(f"for {timeout_s:g} s it has not read what this host says"))
                return
            backoff.sleep()

    def send_words(self, host: int, region: str, first: int, values: Sequence[int]) -> None:
        """A host that is not linked yet receives them once it is."""
        with self._changing:
            link = self._links.get(self._grid.partner(host))
            if link is not None:
                self._send(link, encode(_ARENA[region](first, tuple(values))))

    def send_summed(self, epoch: int, counts: Mapping[int, int]) -> None:
        """SUMMED: by unit, how often the host's ranks have pushed what its sums hold that the partners may read."""
        self._send_all(ReadableSums(epoch, tuple(itertools.chain.from_iterable(counts.items()))))

    def _send_all(self, *messages: Message) -> None:
        encoded = encode(*messages)  # once, for what may be hundreds of links
        with self._changing:
            for link in list(self._links.values()):
                self._send(link, encoded)

    def _send(self, link: HostLink, encoded: bytes) -> None:
        if self._closed:  # this rank's mirrors elsewhere are final
            return
        try:
            link.send(encoded)
        except _DEAD:
            return  # the daemon, as it reads, finds out whether the other end had shut down before
        except OSError as error:
            self._end(link, error)

    # from the other hosts ----------------------------------------------------------------------------------------

    def reader(self, link: HostLink, summed: Summed | None = None) -> Callable[[], bool]:
        """A function for the daemon to call when `link` is readable; False once it never will be again. It gives each
        SUMMED of the link's member to `summed`.
        """
        limits: dict[type[Message], int] = {
            StoredWord: 0,
            GivenReason: REASON_BYTES,
            GivenUp: REASON_BYTES,
            PushCounts: _COUNTS,
            **{_ARENA[region]: count for region, count in self._words.items()},
            ReadableSums: 2 * len(self._layout.units),
            ShardVersions: VERSION_WORDS * len(self._layout.units),
        }
        reader = MessageReader(limits)

        def read() -> bool:
            try:
                for message in link.messages(reader):
                    self._take(link.member, message, summed)
            except (OSError, MalformedMessageError) as error:
                if not reader.heard and isinstance(error, _DEAD):  # it has admitted this rank, and not taken its link
                    self.missed(link.member)
                else:
                    self._end(link, error)
                return False
            return not self._closed

        return read

    def _take(self, member: int, message: Message, summed: Summed | None) -> None:
        layout, peer = self._layout, self._layout.remote(member)
        match message:
            case StoredWord(index, value) if 0 <= index < BOARD_WORDS:
                peer.board.store(index, value)  # release: everything that came before it is in the mirror
                peer.board.wake(index)
                if index == Word.ABORT and value:
                    abort(layout, peer.reason, value - 1)
            case GivenReason(text):
                peer.set_reason(text)
            case GivenUp(epoch, text):
                peer.set_abandonment(epoch, text)
            case PushCounts(first, values) if 0 <= first <= layout.param_base[-1] - len(values):
                peer.pushes[first : first + len(values)].copy_(torch.tensor(values, dtype=torch.int64))
            case EntryWords(first, values) if 0 <= first <= self._words[ARENA_TABLE] - len(values):
                _mirror(peer.mirrored(ARENA_TABLE), first, values)
            case TakenWords(first, values) if 0 <= first <= self._words[ARENA_TAKEN] - len(values):
                _mirror(peer.mirrored(ARENA_TAKEN), first, values)
            case ShardVersions(values) if layout.says_changes and len(values) == VERSION_WORDS * len(layout.units):
                for unit in layout.units:
                    _mirror(peer.versions(unit), 0, values[VERSION_WORDS * unit.index :][:VERSION_WORDS])
            case ReadableSums(epoch, values) if len(values) % 2 == 0 and {*values[::2]} <= {*range(len(layout.units))}:
                if summed is not None:
                    summed(member, epoch, dict(zip(values[::2], values[1::2], strict=True)))
            case _:
                raise MalformedMessageError(f"{type(message).__name__} beyond what there is")

    def missed(self, partner: int, why: str = "") -> None:
        """`partner` has no link to this rank: it shut this root down, or ended, before it had one; or it cannot be
        reached, which `why` explains.

        The job goes on, because roots that were built and never run may be shut down at any time. A rank that waits for
        it gets the error.
        """
        with self._changing:
            if self._closed:  # the mirror's memory may be gone
                return
            peer = self._layout.remote(partner)
            peer.set_reason(why)
            peer.board.store(Word.LEFT, UNREACHED if why else 1)

    def _end(self, link: HostLink, error: Exception) -> None:
        """Report the loss of the other end, unless it had shut down in good order, or this rank closes its links."""
        peer, grid = self._layout.remote(link.member), self._grid
        with self._changing:
            if self._closed or link.member in self._lost or self._links.get(link.member) is not link:
                return
            if peer.board.load(Word.LEFT) or self._layout.mine.board.load(Word.ABORT):
                return
            self._lost.add(link.member)
        reason, detail, culprit = f"rank {peer.rank} died", f": its link to rank {grid.rank} has ended", peer.rank
        if isinstance(error, MalformedMessageError):
            there = self._ranks_on([grid.host(link.member)])
            reason, detail = f"the host of ranks {there} speaks nonsense", f": {error}"
        elif not isinstance(error, _DEAD) and link.silent():
            reason, why, culprit = self._cut_off(link)
            detail = f": {error} ({why})"
        elif not isinstance(error, _DEAD):  # its host answers
            reason, detail = f"rank {peer.rank} does not read its link to rank {grid.rank}", f": {error}"
        self._report(Loss(peer.rank, culprit, reason, detail, certain=False))

    def _cut_off(self, link: HostLink) -> tuple[str, str, int]:
        """Between which hosts the network is divided, why one side is named, and whom to blame: the same on every rank
        of both sides (see `side_to_blame`).
        """
        grid = self._grid
        with self._changing:
            silent = {one.member for one in self._links.values() if one is link or one.silent()}
        beyond = {grid.host(member) for member in silent}
        here = {grid.host(member) for member in grid.members} - beyond
        named, why = side_to_blame(here, beyond, grid.host(grid.ranks.index(min(grid.ranks))))
        others = beyond if named == here else here
        reason = (
            f"the host of ranks {self._ranks_on(named)} cannot be reached any more from that of ranks "
            f"{self._ranks_on(others)}"
        )
        why = f"named as {why}: which side was cut off, or died, cannot be known"
        return reason, why, min(grid.ranks[member] for host in named for member in grid.on(host))

    def _ranks_on(self, hosts: Collection[int]) -> str:
        grid = self._grid
        return ", ".join(str(rank) for rank in sorted(grid.ranks[one] for host in hosts for one in grid.on(host)))

    def unacknowledged(self) -> list[int]:
        """Partners whose host has not acknowledged all that was sent. Disconnecting before may lose the rest."""
        with self._changing:
            return [partner for partner, link in self._links.items() if link.unacknowledged()]

    def _mark_final(self) -> None:
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
            self._mark_final()
            for link in self._links.values():
                link.hang_up()


def _mirror(words: Words, first: int, values: Sequence[int]) -> None:
    for at in reversed(range(len(values))):  # STEP, which is the first word of an entry, last
        words.store(first + at, values[at])
