"""Notices that a rank on another host ends before any root is linked to it.

From its first sharded module on, a rank keeps a connection to the rank with its index on the host before and on the
host after its own, as torchrun numbers them: a ring of each index. Each end announces that it watches, and good-bye as
it shuts down. An end between the two is a death, which goes around the ring, and into the job's store for ranks that
wait there. Once a root has a link, the link reports it.

Both ends of a pair store where they listen before they dial the other, so at least one of them finds it. A rank
that ends before that, or before its first sharded module, is missed. A neighbour that cannot be reached is not taken
for dead: with `Settings(address=...)` on the root alone it may be well.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Sequence

from odc.deadlines import STORE_ENDING_S
from odc.errors import OdcError
from odc.memory import close_after_fork
from odc.net.announced import announce_failure
from odc.net.host_link import HostLink, side_to_blame
from odc.net.liveness import Liveness, Loss
from odc.net.messages import MalformedMessageError, Message, MessageReader, RankEnded, Watching, encode
from odc.net.network import HostNetwork
from odc.net.reactor import Reactor, Registration
from odc.protocol.peers.board import REASON_BYTES, clipped
from odc.worker import in_background

PURPOSE = "watch"
_LIMITS: dict[type[Message], int] = {Watching: 0, RankEnded: REASON_BYTES}


def neighbours(rank: int, world: int) -> list[int]:
    """Of `world` ranks, those with the index of `rank` on the hosts before and after its own; none on one host, or
    where no launcher has published how many ranks a host has.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or 0)
    if not 0 < here < world or world % here:
        return []
    return sorted({(rank + here) % world, (rank - here) % world})


class _Neighbour(HostLink):
    """One connection, and the state of its other end."""

    def __init__(self, rank: int, connection: socket.socket, lost_after_s: float) -> None:
        self.reading: Registration | None = None
        super().__init__(rank, connection, lost_after_s)
        self.reader = MessageReader(_LIMITS)
        self.watches = self.left = False

    def close(self) -> None:
        if self.reading is not None:
            self.reading.cancel()
        super().close()


class HostWatch:
    """This rank's watch over its `neighbours`, by connections to the listener of `network`: reports those that end
    without a good-bye, and passes the first report of every lost rank on around the ring. Raises as a JobStore does.
    """

    def __init__(
        self,
        reactor: Reactor,
        network: HostNetwork,
        liveness: Liveness,
        neighbours: Sequence[int],
        lost_after_s: float,
    ) -> None:
        self._reactor, self._network, self._rank = reactor, network, network.rank
        self._liveness, self._neighbours, self._lost_after_s = liveness, neighbours, lost_after_s
        self._lock = threading.Lock()
        self._connected: list[_Neighbour] = []
        self._closed = False
        network.expect(PURPOSE, self._welcome)
        liveness.follow(PURPOSE, self._pass_on)
        close_after_fork(self)
        self.connect()

    def watched(self) -> set[int]:
        """The neighbours whose death would be noticed now."""
        return {neighbour.member for neighbour in list(self._connected) if neighbour.watches}

    def wait_for_network(self, lost_after_s: float) -> None:
        """Take an interruption of the network for a death only after so long, from now on."""
        with self._lock:
            self._lost_after_s = lost_after_s
            for neighbour in self._connected:
                with contextlib.suppress(OSError):  # it has ended, which the loop will notice
                    neighbour.wait_for_network(lost_after_s)

    # connections -------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect to the neighbours that listen already, and are not watched yet; the others will connect to this rank.
        On a thread that ends then.
        """
        in_background("odc-watch", self._dial)

    def _dial(self) -> None:
        for rank in set(self._neighbours) - self.watched():
            with contextlib.suppress(OdcError):  # also where it is stopped
                connection = None if self._closed else self._network.dial_if_listening(rank, PURPOSE)
                if connection is not None:
                    self._reactor.call(functools.partial(self._adopt, connection, rank))

    def _welcome(self, connection: socket.socket, rank: int) -> None:
        if rank in self._neighbours:
            self._adopt(connection, rank)
        else:
            connection.close()

    def _adopt(self, connection: socket.socket, rank: int) -> None:
        neighbour = _Neighbour(rank, connection, self._lost_after_s)
        with self._lock:
            if self._closed:
                neighbour.close()
                return
            self._connected.append(neighbour)
            _send(neighbour, Watching(until_now=0))
        for loss in self._liveness.losses():
            _send(neighbour, _message(loss))
        read = functools.partial(self._read, neighbour)
        neighbour.reading = self._reactor.on_readable(neighbour.fileno(), read)

    # what they send ----------------------------------------------------------------------------------------------

    def _read(self, neighbour: _Neighbour) -> None:
        try:
            for message in neighbour.messages(neighbour.reader):
                self._take(neighbour, message)
        except (OSError, MalformedMessageError) as error:
            self._drop(neighbour, error)

    def _take(self, neighbour: _Neighbour, message: Message) -> None:
        match message:
            case RankEnded(rank, culprit, reason):
                self._liveness.report(Loss(rank, culprit, reason))
            case Watching(until_now):
                neighbour.watches, neighbour.left = True, bool(until_now)

    def _drop(self, neighbour: _Neighbour, error: Exception) -> None:
        with self._lock:
            self._connected.remove(neighbour)
            neighbour.close()
        if neighbour.left or not neighbour.watches:
            return
        rank = named = neighbour.member
        if isinstance(error, ConnectionResetError | BrokenPipeError):
            reason = f"rank {rank} died: its connection to rank {self._rank}, which watches it, has ended"
        elif isinstance(error, MalformedMessageError):
            reason = f"rank {rank} speaks nonsense: its connection to rank {self._rank} is broken ({error})"
        else:
            named, other = self._cut_off(rank)
            reason = f"rank {named} cannot be reached any more from rank {other}, its neighbour ({error})"
        self._liveness.report(Loss(rank, named, reason))
        # The daemon, on whose thread this is, must not wait for the store.
        store = self._network.store.within(STORE_ENDING_S)
        in_background("odc-watch", functools.partial(announce_failure, store, reason, named))

    def _cut_off(self, rank: int) -> tuple[int, int]:
        """Of this rank and the neighbour `rank`, between which the network has been cut: the one to name, the other."""
        with self._lock:
            silent = {one.member for one in self._connected if one.silent()} | {rank}
        known = {self._rank, *self._neighbours}
        named, _ = side_to_blame(known - silent, silent, min(known))
        return (rank, self._rank) if rank in named else (self._rank, rank)

    def _pass_on(self, loss: Loss) -> None:
        if self._liveness.is_first(loss):
            for neighbour in self._connected:
                _send(neighbour, _message(loss))

    # ending ------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Send good-bye to the neighbours and hang up; idempotent. Once the loop has ended."""
        with self._lock:
            self._closed = True
            for neighbour in self._connected:
                _send(neighbour, Watching(until_now=1))
                neighbour.hang_up()
        self.close()

    def close(self) -> None:
        """Close everything, and nothing else: a forked child runs this too."""
        self._closed = True
        for neighbour in self._connected:
            neighbour.close()


def _send(link: HostLink, message: Message) -> None:
    with contextlib.suppress(OSError):  # the loop notices its end as it reads
        link.send(encode(message))


def _message(loss: Loss) -> RankEnded:
    return RankEnded(loss.rank, loss.culprit, clipped(loss.text()))
