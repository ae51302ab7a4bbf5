"""`pad_requests`: the same number of requests on every rank, by copies that are tagged and dropped afterwards.

Chose copies of the last request over made-up ones: they cost what a real one costs and cannot fail where it does not.
The price is wasted forwards (`RequestPlan.waste`), and equal requests are not yet equal forwards: generation stops at
different lengths and harnesses merge equal requests, so a model with collectives inside can still hang. Under odc use
mode "none": no copies at all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from odc.errors import PlanError, ResultsError
from odc.eval.plan import RequestPlan

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Padded(Generic[T]):
    """Requests to run, each tagged real or pad; pads come last."""

    requests: list[T]
    is_pad: list[bool]

    def keep(self, responses: Sequence[R]) -> list[R]:
        """The responses to real requests, in their order. Raises ResultsError unless there is one to each request."""
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
) -> Padded[T]:
    """This rank's requests of `kind`, with as many copies as the plan says, or with none. On this rank only.

    Args:
        requests: as many as the plan has for this rank and kind.
        mode: "none" (odc) adds nothing; "pad" what collectives inside the model need.
        make_pad: makes a request that may be run and thrown away, on a rank that has none to copy. Copies are shallow
            (`copy.copy`): a harness that appends responses to a list of the request needs one of its own.

    Raises:
        PlanError: counts differ from the plan's, or a rank without requests must pad and has no `make_pad`.
    """
    if len(requests) != plan.own(kind):
        raise PlanError(f"member {plan.me} has {len(requests)} requests of {kind!r}, the plan says {plan.own(kind)}")
    missing = plan.pads(kind) if mode == "pad" else 0
    if missing and not requests and make_pad is None:
        raise PlanError(
            f"member {plan.me} has no request of {kind!r} to copy, but {missing} must be run beside those of others; "
            "pass make_pad, or run without padding (odc)"
        )
    pads = [copy.copy(requests[-1]) if requests else make_pad() for _ in range(missing)]  # type: ignore[misc]
    return Padded([*requests, *pads], [False] * len(requests) + [True] * missing)
