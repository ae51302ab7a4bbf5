"""Every exchange against `Rearrangement.apply`, on real ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.doubles import KINDS, exchange_of, moves
from support.on_ranks import on_ranks

from odc.dispatch import Rearrangement
from odc.dispatch.exchange import OnDemandExchange
from odc.dispatch.exchange.rows import Kind, as_bytes, from_bytes
from odc.dispatch.route import Route
from odc.protocol import Waiter
from odc.trace import MAIN


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 4])
def test_a_move_brings_every_row_to_its_place(ranks: Any, kind: str, world: int) -> None:
    ranks(world).run(moves, kind, list(range(24)))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_stay_in_cpu_memory_where_torch_makes_tensors_on_a_device(ranks: Any, kind: str) -> None:
    ranks(2).run(moves, kind, list(range(8)), "meta")


def test_bytes_of_a_view_are_those_of_its_values():
    """Torch conjugates and negates by a flag, which bytes do not have."""
    rows = torch.randn(3, 2, dtype=torch.complex64)
    for view in (rows.conj(), rows.conj().imag):
        assert view.is_conj() or view.is_neg()
        found = from_bytes(as_bytes(view), Kind(view.dtype, tuple(view.shape[1:])))
        torch.testing.assert_close(found, view.resolve_conj().resolve_neg(), rtol=0, atol=0)


@on_ranks(2)
def test_on_demand_only_moves_wait_on_the_training_thread(rank: int, world: int) -> None:
    """What is gathered is for planning, beside which the rank computes."""
    lanes, until = list[tuple[str, bool]](), Waiter.until

    def watched(self: Waiter, *given: Any, **options: Any) -> None:
        lanes.append((options["lane"], options["noted"]))
        until(self, *given, **options)

    route = Route.of(Rearrangement.to([1, 1], [1, 0]), {"rows": [3, 3]}, rank)
    with pytest.MonkeyPatch.context() as patch, exchange_of("on_demand", rank, world, ["data", "plan"]) as exchange:
        assert isinstance(exchange, OnDemandExchange)
        patch.setattr(Waiter, "until", watched)
        for step in (1, 2):  # the second put waits for the first to be read
            exchange.gather(step, "plan", np.arange(rank))
        gathering = lanes.copy()
        for step in (1, 2):
            exchange.move(step, "data", route, {"rows": torch.zeros(3, 2)})
        patch.undo()
    assert gathering == [("plan", False)] * 3
    assert lanes[3:] == [(MAIN, True)] * 3
