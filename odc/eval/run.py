"""`run_requests`: requests that every rank knows, each run by one of them, answers in order on the first.

Chose to give every rank all requests and let it pick its own over shipping them: requests of evaluation harnesses hold
functions and images that do not travel. The price is that each rank builds all of them, which is text work.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from odc.errors import PlanError
from odc.eval.gather import gather_results
from odc.eval.pad import pad_requests
from odc.eval.peers import Peers
from odc.eval.plan import RequestPlan

T = TypeVar("T")
R = TypeVar("R")


def run_requests(
    requests: Sequence[T],
    run: Callable[[list[T]], Sequence[R]],
    peers: Peers,
    *,
    owners: Sequence[int] | None = None,
    pad: bool = False,
    key: Callable[[T], Any] | None = None,
    kind: str = "requests",
) -> list[R] | None:
    """Run each request on one rank. Every rank calls it with the same requests; returns on all together.

    Args:
        requests: the same, in the same order, on every rank.
        run: answers this rank's requests, in their order; not called where there are none.
        owners: the member that runs each request, the same on every rank; None deals them out in turn. Any numbers
            will do, also none for some ranks; `odc.balance.partition(costs, ranks)` makes the work even.
        pad: run as many requests on every rank as on the one with most (copies, thrown away): only for models with
            collectives inside. Without it nothing is wasted.
        key: what ranks compare requests by before any is run: its `repr` must be the same on every rank. None compares
            only how many there are.
        kind: for messages.

    Returns:
        The answers in the order of `requests` on the group's first rank, None on the others.

    Raises:
        PlanError: ranks have other requests, or owners that are not members.
        ResultsError: `run` gave another number of answers than it had requests.
    """
    owners = [number % peers.world for number in range(len(requests))] if owners is None else owners
    if len(owners) != len(requests) or not all(0 <= owner < peers.world for owner in owners):
        raise PlanError(f"rank {peers.rank}: owners of {kind} are not one of {peers.world} members for each request")
    seen = zlib.crc32(repr(list(owners)).encode())
    for request in requests if key else ():
        seen = zlib.crc32(repr(key(request)).encode(), seen)  # type: ignore[misc]
    everyone = peers.exchange((len(requests), seen), f"agreement on {kind}")
    if set(everyone) != {everyone[0]}:
        counts = ", ".join(f"rank {rank}: {one[0]}" for rank, one in zip(peers.ranks, everyone, strict=True))
        raise PlanError(f"ranks were given different {kind} or owners ({counts}); build them alike on every rank")
    mine = [number for number, owner in enumerate(owners) if owner == peers.me]
    plan = RequestPlan({kind: tuple(list(owners).count(member) for member in range(peers.world))}, peers.me)
    padded = pad_requests(
        [requests[number] for number in mine],
        plan,
        kind,
        mode="pad" if pad else "none",
        make_pad=lambda: copy.copy(requests[-1]),
    )
    answers = padded.keep(run(padded.requests)) if padded.requests else []
    return gather_results(answers, mine, peers, expected=len(requests), what=f"answers to {kind}")
