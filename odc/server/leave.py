"""How a rank leaves a root's job: peers are told, and the daemon's loop closes the heap.

Chose one function for every kind of root (a sharded model, a batch exchange): the order in which peers are told is part
of the protocol. It is what finalizers call, so it waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable

from odc.comm import Word
from odc.comm.wait import read_reason
from odc.server.attach import Rendezvous
from odc.server.daemon import Daemon
from odc.server.service import Service


def leave(server: Daemon, service: Service, rendezvous: Rendezvous) -> Callable[[], None]:
    """Tell the peers that this rank leaves, and why if the job was aborted; hand the heap over to be closed.

    May be called from any thread, also by the garbage collector. Returns a function that waits until the heap is closed
    (see `Daemon.dismiss`).
    """
    space = service.space
    me = space.geometry.me
    board = space.board(me)
    if board.load(Word.ABORT):
        rendezvous.tell(read_reason(space, me), board.load(Word.ABORT) - 1)
    board.store(Word.LEFT, 1)

    def close() -> None:
        rendezvous.close()
        space.close()

    return server.dismiss(service, close)
