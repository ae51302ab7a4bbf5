"""Shards against the bytes that were published of them (`odc.fsdp.refusals.refuse_stale`)."""

from __future__ import annotations

import math

import pytest
import torch
from support.members import BF16, F16, F32, F64, HeapGroup

from odc.errors import StaleParametersError
from odc.fsdp.refusals import refuse_stale

LAYOUT = [[("first.weight", 4, F32), ("first.bias", 2, BF16)], [("second.weight", 3, F32)]]


def shards() -> list[list[torch.Tensor]]:
    return [[torch.arange(4.0), torch.tensor([1 / 3, 2 / 3])], [torch.tensor([7.0, 8.0, 9.0])]]


def test_a_single_changed_element_is_found_and_named() -> None:
    with HeapGroup(LAYOUT, 2) as group:
        group.members[1].shards.publish(shards(), [False, False])
        refuse_stale(group.layouts[1], 1, shards())
        assert not group.layouts[1].heap.attached(0), "only this rank's shards are compared"
        for unit, param, at in ((0, 0, 0), (0, 0, 3), (0, 1, 1), (1, 0, 2)):
            now = shards()
            now[unit][param][at] += 0.5
            changed = rf"rank 13 \(epoch 6\): {LAYOUT[unit][param][0]} changed inside an open minibatch .*publish\(\)"
            with pytest.raises(StaleParametersError, match=changed):
                refuse_stale(group.layouts[1], 6, now)
        rounds_alike = shards()
        rounds_alike[0][1] += 1e-5  # peers see bf16: what rounds to the same is what was published
        refuse_stale(group.layouts[1], 1, rounds_alike)


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
def test_a_nan_is_equal_to_itself_and_the_zeros_are_not(dtype: torch.dtype) -> None:
    with HeapGroup([[("w", 2, dtype)]], 1) as group:
        values = torch.tensor([math.nan, 0.0], dtype=dtype)
        group.members[0].shards.publish([[values]], [False])
        refuse_stale(group.layouts[0], 1, [[values.clone()]])
        with pytest.raises(StaleParametersError):
            refuse_stale(group.layouts[0], 1, [[torch.tensor([math.nan, -0.0], dtype=dtype)]])
