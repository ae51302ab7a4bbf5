from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.members import BF16, F32

from odc.protocol import UnitSpec
from odc.protocol.runs import runs_of


@given(
    st.lists(st.tuples(st.integers(1, 50), st.sampled_from([F32, BF16]), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 120),
)
def test_blocks_hold_every_gradient_once_and_fit(params: list[tuple[int, torch.dtype, bool]], room: int) -> None:
    unit = UnitSpec.build(0, "u", [(f"p{i}", numel, dtype) for i, (numel, dtype, _) in enumerate(params)], F32)
    pushed = [i for i, (_, _, there) in enumerate(params) if there]
    runs = runs_of(unit, pushed, [params[i][1] for i in pushed])
    blocks = [(run, block) for run in runs for block in run.blocks(room)]
    found: list[tuple[int, int, int]] = []
    for run, block in blocks:
        assert block.stop - block.start == len(block.numels) == len(block.offsets)
        assert block.numel == sum(block.numels) and block.offsets[0] == 0
        assert block.numel <= room or len(block.numels) == 1, "what does not fit is one gradient"
        assert run.start <= block.start < block.stop <= run.stop and block.dtype == run.dtype
        found += [
            (at, block.first + offset, numel)
            for at, offset, numel in zip(range(block.start, block.stop), block.offsets, block.numels, strict=True)
        ]
    specs = [unit.params[i] for i in pushed]
    assert found == [(at, spec.accumulator_offset, spec.numel) for at, spec in enumerate(specs)]
    for (one, first), (other, second) in itertools.pairwise(blocks):
        assert one is not other or first.numel + second.numels[0] > room, "no block more than need be"
