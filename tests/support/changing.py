"""Four members on two hosts whose weights change: what crosses, and whether each member has the published bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from odc.protocol import Word
from support.deferred import late_heaps
from support.members import BF16, F32, room
from support.spread import Spread

LAYOUT = [[("w", 40_000, BF16), ("b", 5, BF16)], [("v", 30_000, F32)], [("u", 6, F32)]]
WHOLE_BYTES = 80_016  # of unit 0


@contextmanager
def two_hosts(late: bool = False, **options: Any) -> Iterator[Spread]:
    """With checksums, but not the checks of words: no member is DONE here."""
    with pytest.MonkeyPatch.context() as patch:
        if late:
            late_heaps(patch)
        spread = Spread(layout=LAYOUT, **{"changes": "on", **options})
        for layout in spread.group.layouts:
            layout.settings = dataclasses.replace(layout.settings, check_protocol=True)
        try:
            yield spread
        finally:
            spread.close()


class Weights:
    """The shards of all four members, in fp32."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.of = [
            [[torch.randn(numel, generator=generator) * 0.02 for _, numel, _ in unit] for unit in LAYOUT]
            for _ in range(4)
        ]

    def publish(self, spread: Spread) -> None:
        for member, shards in enumerate(self.of):
            spread.group.members[member].shards.publish(shards, [False] * len(LAYOUT))
        spread.mirror(Word.PUBLISHED)

    def step(self, lr: float, seed: int, units: tuple[int, ...] = (0, 1, 2)) -> None:
        generator = torch.Generator().manual_seed(seed)
        for shards in self.of:
            for unit in units:
                for shard in shards[unit]:
                    shard -= lr * torch.randn(len(shard), generator=generator).mul(0.4).clamp(-1, 1)

    def expect(self, spread: Spread, me: int, unit: int) -> None:
        spec = spread.group.units[unit]
        outs = room(spec, 4)
        spread.group.members[me].shards.fetch(spec, outs)
        spread.group.layouts[me].heap.lanes.settle()
        for i, out in enumerate(outs):
            wanted = torch.cat([self.of[member][unit][i] for member in range(4)]).to(out.dtype)
            assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))


def crossed(spread: Spread) -> int:
    """Bytes that members have read from other hosts since this was last asked."""
    total = sum(nbytes for engine in spread.engines for _, nbytes in engine.reads)
    for engine in spread.engines:
        engine.reads.clear()
    return total
