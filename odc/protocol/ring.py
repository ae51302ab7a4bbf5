"""The two words of a staging ring, by which a pusher and an owner's daemon hand its slots to each other."""

from __future__ import annotations

import functools
from collections.abc import Callable

from odc.protocol.check import ProtocolChecks
from odc.protocol.layout import HeapLayout


class RingWords:
    """SENT and ACCUMULATED of the ring from `source` to `owner`; they count blocks since the start."""

    def __init__(self, layout: HeapLayout, owner: int, source: int) -> None:
        sent, accumulated = layout.local(owner).sent, layout.local(owner).accumulated
        if layout.settings.check_protocol:
            sent, accumulated = ProtocolChecks(layout).ring(owner, source)
        self.posted: Callable[[], int] = functools.partial(sent.load, source)
        self.post: Callable[[int], None] = functools.partial(sent.store, source)  # data and headers are in place
        self.added: Callable[[], int] = functools.partial(accumulated.load, source)  # slots that may be filled again
        self.give_back: Callable[[int], None] = functools.partial(accumulated.store, source)  # after the sums
