"""How a rank leaves a root's job: its peers are told, and the heap is closed once nobody needs it.

One function serves every kind of root (a sharded model, a batch exchange), because the order in which peers are told is
part of the protocol. Finalizers call it, so it waits for nobody.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from odc.runtime.abort import write_text
from odc.runtime.connect import Rendezvous
from odc.runtime.daemon import Daemon
from odc.runtime.departures import Departure
from odc.runtime.service import Service
from odc.runtime.words import Word


def leave(server: Daemon, service: Service, rendezvous: Rendezvous, note: str = "") -> Callable[[], None]:
    """Tell the peers that this rank leaves, and hand the heap over, to be closed when nobody needs it any more.

    May be called from any thread, also by the garbage collector. After an abort the heap is closed at once.

    Args:
        server: of this process.
        service: of the root.
        rendezvous: of the root.
        note: what a peer is told that waits for this rank in vain; nothing if this rank did all it had to.

    Returns:
        A function that waits until the heap is closed, and raises WaitTimeoutError if a peer had to be given up.
    """
    space = service.space
    me = space.geometry.me
    board = space.board(me)
    if note and not board.load(Word.ABORT):
        write_text(space.reason(me), note)
    board.store(Word.LEFT, 1)
    departure = Departure(service, rendezvous, functools.partial(server.dismiss, service))
    server.departures.add(departure)
    return departure.wait
