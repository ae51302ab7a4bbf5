"""Members of one session as threads of this process, over a store in its memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from odc.eval import Peers

RANKS = (4, 7, 9, 2)  # global ranks of the members: messages must name these


def run_together(
    world: int, function: Callable[[Peers], Any], *, timeout_s: float = 60.0, store: Any = None
) -> list[Any]:
    """What `function(peers)` returned, or the exception it raised, by member."""
    store, results = dist.HashStore() if store is None else store, list[Any]([None] * world)

    def live(member: int) -> None:
        peers = Peers(store, RANKS[:world], member, timeout_s)
        try:
            results[member] = function(peers)
        except Exception as error:
            peers.fail(error)
            results[member] = error

    threads = [threading.Thread(target=live, args=(member,), daemon=True) for member in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
        assert not thread.is_alive(), "a member does not come to its end"
    if not any(isinstance(result, Exception) for result in results):
        assert not [key for key in store.list_keys() if "data/" in key], "messages that no member has read"
    return results
