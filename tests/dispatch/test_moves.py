"""Every exchange against `Rearrangement.apply`, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.doubles import KINDS, moves

from odc.dispatch.exchange.rows import Kind, as_bytes, from_bytes


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
