from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from support.members import BF16, F16, F32, F64, HeapGroup

from odc.errors import StaleParametersError
from odc.fsdp.refusals import refuse_stale

DTYPES = [F32, BF16, F16, F64]
LAYOUT = [[("first.weight", 4, F32), ("first.bias", 2, BF16)], [("second.weight", 3, F32)]]


@pytest.fixture
def group() -> Iterator[HeapGroup]:
    with HeapGroup(LAYOUT, 2) as group:
        yield group


def shards() -> list[list[torch.Tensor]]:
    return [[torch.arange(4.0), torch.tensor([1 / 3, 2 / 3])], [torch.tensor([7.0, 8.0, 9.0])]]


def test_what_was_published_is_not_stale(group: HeapGroup) -> None:
    group.members[1].shards.publish(shards(), [False, False])
    refuse_stale(group.layouts[1], 1, shards())


@pytest.mark.parametrize(("unit", "param", "at"), [(0, 0, 0), (0, 0, 3), (0, 1, 1), (1, 0, 2)])
def test_a_single_changed_element_is_found_and_named(group: HeapGroup, unit: int, param: int, at: int) -> None:
    group.members[1].shards.publish(shards(), [False, False])
    now = shards()
    now[unit][param][at] += 0.5
    with pytest.raises(StaleParametersError) as caught:
        refuse_stale(group.layouts[1], 6, now)
    assert str(caught.value).startswith(f"rank 13 (epoch 6): {LAYOUT[unit][param][0]} changed inside an open minibatch")
    assert "publish()" in str(caught.value)


def test_a_change_below_the_compute_dtype_changes_nothing(group: HeapGroup) -> None:
    """Peers see bf16: a shard whose fp32 bits moved but round to the same is what was published."""
    group.members[0].shards.publish(shards(), [False, False])
    now = shards()
    now[0][1] += 1e-5
    refuse_stale(group.layouts[0], 1, now)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_is_equal_to_itself_and_the_zeros_are_not(dtype: torch.dtype) -> None:
    with HeapGroup([[("w", 2, dtype)]], 1) as group:
        values = torch.tensor([math.nan, 0.0], dtype=dtype)
        group.members[0].shards.publish([[values]], [False])
        refuse_stale(group.layouts[0], 1, [[values.clone()]])
        with pytest.raises(StaleParametersError):
            refuse_stale(group.layouts[0], 1, [[torch.tensor([math.nan, -0.0], dtype=dtype)]])


def test_only_the_own_shards_are_looked_at() -> None:
    with HeapGroup(LAYOUT, 2) as group:
        group.members[1].shards.publish(shards(), [False, False])
        refuse_stale(group.layouts[1], 1, shards())
        assert not group.layouts[1].heap.attached(0)
