"""What the adapters of evaluation harnesses share: running a model's requests on all ranks.

Each harness believes that it runs alone, and its requests are spread over the ranks below it. The first rank sees every
request and every answer in order, as a single process would, and computes the metrics once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from odc.balance import partition
from odc.errors import UnsupportedError
from odc.eval import Peers, run_requests

Cost = Callable[[Any], float]

#: Options of both harnesses that cannot work on several ranks, and why.
CACHES = {
    "use_cache": "ranks would ask for different requests",
    "cache_requests": "ranks would write one file",
    "rewrite_requests_cache": "ranks would write one file",
    "delete_requests_cache": "ranks would delete one folder",
}


_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


class RequestsDone(BaseException):
    """Unwinds a harness on a rank that has answered all its requests; the first rank does the rest."""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, the environment names no ranks: lm-eval, too, returns results only where LOCAL_RANK is 0 or not set."""
    taken = {name: os.environ.pop(name) for name in _RANK_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(taken)


@contextlib.contextmanager
def spread_requests(
    lm: Any,
    kinds: Sequence[str],
    peers: Peers,
    *,
    pad: bool,
    cost: Cost | None,
    after: Callable[[str], None],
    plain: Callable[[Any], Any] = lambda answer: answer,
) -> Iterator[None]:
    """Inside, `lm`'s methods named `kinds` run each request on one rank and return the answers on the first.

    With `pad` (see `run_requests`) documents are dealt out in turn, not by cost, and requests run one by one, because a
    model that batches or merges them (lm-eval's runs equal requests once) has unequal forwards anyway. `cost` of a
    request is by default the characters of its texts. `after` is called with each kind that is done on the other ranks,
    where every answer is None. `plain` turns an answer into a value that ranks can send each other. Raises
    UnsupportedError when a kind is asked for twice: then requests depend on answers, which all ranks would need.
    What a method asks of `lm` while it runs requests stays on this rank.
    """
    asked: set[str] = set()
    running = threading.Lock()  # held while this rank runs requests

    def answer(
        kind: str, method: Callable[[list[Any]], Sequence[Any]], requests: list[Any], **options: Any
    ) -> Sequence[Any]:
        if running.locked():
            return method(requests, **options)
        if kind in asked:
            raise UnsupportedError(
                f"{kind} was asked for twice: requests made from answers (agentic tasks) need one rank"
            )
        asked.add(kind)
        owners = document_owners(requests, peers.world, None if pad else cost or characters)
        run = functools.partial(method, **options)
        if pad:
            run = functools.partial(_one_by_one, run)

        def local(some: list[Any]) -> list[Any]:
            with running:
                return [plain(one) for one in run(some)]

        answers = run_requests(requests, local, peers, owners=owners, pad=pad, key=_key, kind=f"{kind} requests")
        if answers is not None:
            return answers
        after(kind)
        return [None] * len(requests)

    for kind in kinds:
        setattr(lm, kind, functools.partial(answer, kind, getattr(lm, kind)))
    try:
        yield
    except RequestsDone:
        peers.let_first_work()
        raise
    finally:
        for kind in kinds:
            delattr(lm, kind)


def _one_by_one(method: Callable[[list[Any]], Sequence[Any]], requests: list[Any]) -> Sequence[Any]:
    return [method([request])[0] for request in requests]


def document_owners(requests: Sequence[Any], world: int, cost: Cost | None) -> list[int]:
    """The member that runs each request. Requests of one document stay together, because they share a context.

    With a cost, the members' sums of cost are nearly equal; without, documents are dealt out in turn.
    """
    documents = [list(some) for _, some in groupby(requests, key=lambda request: (request.task_name, request.doc_id))]
    if cost is None:
        owners: Sequence[int] = [number % world for number in range(len(documents))]
    elif documents:
        owners = partition([sum(map(cost, some)) for some in documents], world).tolist()
    else:
        owners = []
    return [owner for owner, some in zip(owners, documents, strict=True) for _ in some]


def characters(request: Any) -> float:
    """Number of characters in a request's texts, which estimates its cost."""
    return float(sum(len(text) for text in _texts(request)))


def refuse(library: str, options: dict[str, Any], why: dict[str, str]) -> None:
    """Raise UnsupportedError for an option that is set and listed in `why`."""
    for name, reason in why.items():
        if options.get(name):
            raise UnsupportedError(f"{library} on several ranks does not support {name}={options[name]!r}: {reason}")


def _key(request: Any) -> Any:
    return request.task_name, request.doc_id, request.idx, _texts(request)


def _texts(request: Any) -> tuple[str, ...]:
    return tuple(text for text in request.args if isinstance(text, str))
