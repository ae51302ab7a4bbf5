"""Every exchange against `Rearrangement.apply`, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from support.doubles import KINDS, moves


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 4])
def test_a_move_brings_every_row_to_its_place(ranks: Any, kind: str, world: int) -> None:
    ranks(world).run(moves, kind, list(range(24)))
