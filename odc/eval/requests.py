"""Requests of an evaluation: how many each rank has, padding them to equal counts, and running each on one rank.

Collectives inside a model (FSDP2, DDP) need equal counts; under odc they need not, and padding only costs forwards.
"""

from __future__ import annotations

import copy
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from odc.errors import PlanError, ResultsError
from odc.eval.gather import gather_results
from odc.eval.peers import Peers

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class RequestPlan:
    """Requests of each kind by member: `counts[kind][member]`, in sorted order of kinds; `me` is this rank's member."""

    counts: Mapping[str, tuple[int, ...]]
    me: int

    def __post_init__(self) -> None:
        for kind, counts in self.counts.items():
            if not counts or any(count < 0 for count in counts) or not 0 <= self.me < len(counts):
                raise PlanError(f"counts of {kind!r} do not fit member {self.me}: {counts}")

    def own(self, kind: str) -> int:
        return self.counts[kind][self.me]

    def pads(self, kind: str) -> int:
        """Copies that this rank needs to have as many requests of `kind` as any other rank."""
        return max(self.counts[kind]) - self.counts[kind][self.me]


def plan_requests(counts: Mapping[str, int], peers: Peers) -> RequestPlan:
    """The plan of all ranks' requests. Every rank calls it, with its own counts by kind; it waits for all.

    Every rank gets the same kinds in the same order, even those of which it has no request. PlanError for counts < 0.
    """
    everyone = peers.exchange(dict(counts), "counts of requests")
    kinds = sorted({kind for one in everyone for kind in one})
    return RequestPlan({kind: tuple(one.get(kind, 0) for one in everyone) for kind in kinds}, peers.me)


@dataclass(frozen=True)
class PaddedRequests(Generic[T]):
    """Requests to run, with a tag that marks copies; copies come last."""

    requests: list[T]
    is_pad: list[bool]

    def keep(self, responses: Sequence[R]) -> list[R]:
        """The responses to real requests, in their order. Raises ResultsError unless every request has one."""
        if len(responses) != len(self.requests):
            raise ResultsError(f"{len(self.requests)} requests were run, but there are {len(responses)} responses")
        return [response for response, pad in zip(responses, self.is_pad, strict=True) if not pad]


def pad_requests(
    requests: Sequence[T],
    plan: RequestPlan,
    kind: str,
    *,
    mode: Literal["pad", "none"] = "pad",
    make_pad: Callable[[], T] | None = None,
) -> PaddedRequests[T]:
    """This rank's requests of `kind`, with as many copies of the last one as planned, or with none. Local.

    Equal counts are not yet equal forwards: generation stops at different lengths and harnesses merge equal requests,
    so a model with collectives inside can still hang. `mode="pad"` adds the copies that such models need; "none" (for
    odc) adds nothing. `make_pad` makes a request that may be run and discarded, on a rank that has none to copy. Copies
    are shallow (`copy.copy`), so a harness that appends responses to a list of the request must make its own.

    Raises PlanError where the count differs from the plan's, or a rank without requests must pad and has no `make_pad`.
    """
    if len(requests) != plan.own(kind):
        raise PlanError(f"member {plan.me} has {len(requests)} requests of {kind!r}, the plan has {plan.own(kind)}")
    missing = plan.pads(kind) if mode == "pad" else 0
    if missing and not requests and make_pad is None:
        raise PlanError(
            f"member {plan.me} has no request of {kind!r} to copy, but {missing} must be run beside those of others; "
            "pass make_pad, or run without padding (odc)"
        )
    pads = [copy.copy(requests[-1]) if requests else make_pad() for _ in range(missing)]  # type: ignore[misc]
    return PaddedRequests([*requests, *pads], [False] * len(requests) + [True] * missing)


def run_requests(
    requests: Sequence[T],
    run: Callable[[list[T]], Iterable[R]],
    peers: Peers,
    *,
    owners: Sequence[int] | None = None,
    pad: bool = False,
    key: Callable[[T], Any] | None = None,
    kind: str = "requests",
) -> list[R] | None:
    """Run each request on one rank. Every rank calls it with the same requests; it returns on all ranks together.

    Every rank builds all requests and picks its own, because requests of evaluation harnesses hold functions and images
    that cannot be sent.

    Args:
        requests: the same, in the same order, on every rank.
        run: answers this rank's requests, in their order; not called if there are none.
        owners: the member that runs each request, the same on every rank; by default requests are dealt out in turn.
            Any counts will do; `odc.balance.partition(costs, ranks)` makes the work even.
        pad: run equally many requests on every rank and discard the copies, for models with collectives inside.
        key: what ranks compare requests by before any is run: its `repr` must be the same on every rank. None compares
            only how many there are.
        kind: names the requests in messages.

    Returns the answers in the order of `requests` on the group's first rank, None on the others. Raises PlanError if
    ranks have different requests, or owners that are not members; ResultsError if `run` returned another number of
    answers than it had requests.
    """
    owners = [number % peers.world for number in range(len(requests))] if owners is None else list(map(int, owners))
    if len(owners) != len(requests) or not all(0 <= owner < peers.world for owner in owners):
        raise PlanError(f"rank {peers.rank}: owners of {kind} are not one of {peers.world} members for each request")
    seen = zlib.crc32(repr(owners).encode())
    for request in requests if key else ():
        seen = zlib.crc32(repr(key(request)).encode(), seen)  # type: ignore[misc]
    everyone = peers.exchange((len(requests), seen), f"agreement on {kind}")
    if set(everyone) != {everyone[0]}:
        counts = ", ".join(f"rank {rank}: {one[0]}" for rank, one in zip(peers.ranks, everyone, strict=True))
        raise PlanError(f"ranks were given different {kind} or owners ({counts}); every rank must build the same ones")
    mine = [number for number, owner in enumerate(owners) if owner == peers.me]
    counted = Counter(owners)
    plan = RequestPlan({kind: tuple(counted[member] for member in range(peers.world))}, peers.me)
    own = [requests[number] for number in mine]
    padded = pad_requests(own, plan, kind, mode="pad" if pad else "none", make_pad=lambda: copy.copy(requests[-1]))
    answers = padded.keep([*run(padded.requests)]) if padded.requests else []
    return gather_results(answers, mine, peers, expected=len(requests), what=f"answers to {kind}")
