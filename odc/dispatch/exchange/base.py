"""What every exchange offers: move rows by a route, gather small things, as one protocol.

Chose the step and a channel's name as the identity of a move over a running count: ranks then agree which move is which
even where they come to them in another order, as decoupled ranks do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from odc.dispatch.rearrangement import Ints
from odc.dispatch.route import Route


class Exchange(Protocol):
    """Moves tensors between the instances of one group.

    Attributes:
        ranks: global rank of each instance.
        me: own instance.
        moved: bytes that this rank sent to others since the start, by channel.
        buffer_bytes: most bytes that this rank's buffers for sending and receiving took at once, so far.
    """

    ranks: tuple[int, ...]
    me: int
    moved: dict[str, int]
    buffer_bytes: int

    def gather(self, step: int, channel: str, values: Ints) -> list[Ints]:
        """The int64 arrays [any length] of all instances; on the planning thread. Waits for all.

        Raises:
            WaitTimeoutError, PeerLostError: a rank, which is named, did not come.
        """
        ...

    def move(
        self, step: int, channel: str, route: Route, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Send own rows, return the rows that are to lie here, by field; not differentiable. On the main thread.

        Args:
            step: at most one move of each channel in a step; steps rise.
            channel: names the move.
            route: the own part of a move that all ranks planned alike.
            tensors: by field [rows, features...], dense; also with 0 rows, so that dtype and features are known.

        Raises:
            PlanError: tensors are not what was planned, or another rank planned another move; the rank is named.
            WaitTimeoutError, PeerLostError: a rank, which is named, did not come.
        """
        ...

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        ...


def sent_bytes(route: Route, row_bytes: Mapping[str, int]) -> list[int]:
    """[d] bytes for each destination, the own instance included."""
    totals = sum(field.sent * row_bytes[name] for name, field in route.fields.items())
    listed: list[int] = totals.tolist()  # type: ignore[union-attr]  # a route has at least one field
    return listed
