"""The drop-ins against verl's own functions where verl is installed, and against what they promise everywhere."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.verl import import_verl, needs_verl

from odc.balance.cost import VERL_WORKLOAD
from odc.errors import PlanError
from odc.integrations.verl import get_seqlen_balanced_partitions, rearrange_micro_batches


def verls_own() -> Any:
    return import_verl("verl.utils.seqlen_balancing")


def longest(costs: list[float], parts: list[list[int]]) -> float:
    return max(sum(costs[i] for i in part) for part in parts)


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=40), st.integers(1, 8), st.booleans())
def test_partitions_are_sorted_whole_and_not_empty(lengths, parts, equal_size):
    if equal_size:
        lengths = (lengths * parts)[: len(lengths) // parts * parts or parts]
    if len(lengths) < parts:
        with pytest.raises(PlanError, match=f"{len(lengths)} items cannot fill {parts} partitions"):
            get_seqlen_balanced_partitions(lengths, parts, equal_size)
        return
    found = get_seqlen_balanced_partitions(lengths, parts, equal_size)
    assert len(found) == parts and all(found)
    assert all(part == sorted(part) for part in found)
    assert sorted(i for part in found for i in part) == list(range(len(lengths)))
    assert not equal_size or len({len(part) for part in found}) == 1


def test_equal_size_must_divide():
    with pytest.raises(PlanError, match="5 items do not divide into 2"):
        get_seqlen_balanced_partitions([1, 2, 3, 4, 5], 2, True)


@needs_verl
@pytest.mark.parametrize("equal_size", [False, True])
def test_as_even_as_verls(equal_size: bool):
    own = verls_own()
    draw = random.Random(0)
    for _ in range(40):
        parts = draw.randint(1, 8)
        lengths = [min(9999, int(draw.lognormvariate(6, 1)) + 1) for _ in range(parts * draw.randint(1, 12))]
        work = own.calculate_workload(torch.tensor(lengths)).tolist()
        assert work == [int(VERL_WORKLOAD(length)) for length in lengths]
        theirs = own.get_seqlen_balanced_partitions(work, parts, equal_size)
        ours = get_seqlen_balanced_partitions(work, parts, equal_size)
        assert [len(part) > 0 for part in ours] == [len(part) > 0 for part in theirs]
        assert longest(work, ours) <= longest(work, theirs) * 1.001


class Batch(dict):
    """As much of a TensorDict as a batch needs: columns by name, rows by list."""

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else Batch({k: v[key] for k, v in self.items()})


def padded(lengths: list[int]) -> Batch:
    width = max(lengths)
    mask = torch.tensor([[1] * length + [0] * (width - length) for length in lengths])
    return Batch(input_ids=torch.arange(len(lengths))[:, None].expand(-1, width) * mask, attention_mask=mask)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=24), st.integers(1, 3), st.booleans())
def test_microbatches_keep_the_cap_the_groups_and_the_rows(lengths, size, balance):
    lengths = (lengths * size)[: max(size, len(lengths) // size * size)]
    cap = 50 * size
    batch = padded(lengths)
    micro, indices = rearrange_micro_batches(batch, cap, use_dynamic_bsz_balance=balance, force_group_size=size)
    assert sorted(i for some in indices for i in some) == list(range(len(lengths)))
    assert all(some and sum(lengths[i] for i in some) <= cap for some in indices)
    for some in indices:
        assert [i // size for i in some[::size]] * size == [i // size for j in range(size) for i in some[j::size]]
    for rows, some in zip(micro, indices, strict=True):
        assert torch.equal(rows["input_ids"], batch["input_ids"][some])


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([30, 10, 20, 5, 60], [[3], [2], [4], [0], [1]]),  # 5, 20, 60, 30, 10
        ([60, 10, 30, 20], [[3], [0], [2], [1]]),  # 20, 60, 30, 10
        ([60, 60, 60], [[0], [2], [1]]),  # of equal workloads the one with the greater index counts as the greater
    ],
)
def test_the_smallest_workloads_stand_at_both_ends_as_in_verl(lengths: list[int], expected: list[list[int]]):
    """Falling workloads w0 w1 w2 ...: every second one rising to the greatest, then the others falling."""
    batch = padded(lengths)
    micro, indices = rearrange_micro_batches(batch, 60, min_num_micro_batch=len(lengths))
    assert indices == expected
    for rows, (index,) in zip(micro, indices, strict=True):
        assert int(rows["attention_mask"].sum()) == lengths[index]


def test_counts():
    batch = padded([10] * 7)
    assert len(rearrange_micro_batches(batch, 30)[0]) == 3
    assert len(rearrange_micro_batches(batch, 30, num_batches_divided_by=2)[0]) == 4
    assert len(rearrange_micro_batches(batch, 30, min_num_micro_batch=6)[0]) == 6
    with pytest.raises(PlanError, match="8 microbatches are needed, but a rank has only 7"):
        rearrange_micro_batches(batch, 30, min_num_micro_batch=8)
    with pytest.raises(PlanError, match="samples from 1 on, 1 together, have 31 tokens, more than the cap of 30"):
        rearrange_micro_batches(padded([10, 31]), 30)
    with pytest.raises(PlanError, match="does not divide into groups of 2"):
        rearrange_micro_batches(batch, 30, force_group_size=2)


def _rearranged(rank: int, world: int, same: bool) -> Any:
    """Rank 0 has four samples that share no microbatch, rank 1 two that fill one and a bit."""
    batch = padded([60] * 4 if rank == 0 else [100, 10])
    group = torch.distributed.group.WORLD
    try:
        return rearrange_micro_batches(batch, 100, dp_group=group, same_micro_num_in_dp=same)[1]
    except PlanError as error:
        return str(error)


def test_ranks_agree_or_all_raise(ranks) -> None:
    for answer in ranks(2).run(_rearranged, True):
        assert answer == "4 microbatches are needed, but a rank has only 2 samples or groups"
    assert [len(answer) for answer in ranks(2).run(_rearranged, False)] == [4, 2]


def _agreed_count(rank: int, world: int) -> int:
    batch = padded([60] * 3 if rank == 0 else [20] * 6)
    return len(rearrange_micro_batches(batch, 100, dp_group=torch.distributed.group.WORLD)[0])


def test_ranks_have_the_count_of_the_fullest(ranks) -> None:
    assert ranks(2).run(_agreed_count) == [3, 3]


def nested(lengths: list[int]) -> Any:
    from tensordict import TensorDict

    rows = [torch.full((length,), i) for i, length in enumerate(lengths)]
    return TensorDict({"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, [len(lengths)])


@needs_verl
@pytest.mark.parametrize("size", [1, 2])
def test_microbatches_as_few_and_as_even_as_verls(size: int) -> None:
    own = verls_own()
    draw = random.Random(size)
    for _ in range(20):
        lengths = [min(500, int(draw.lognormvariate(4, 1)) + 1) for _ in range(size * draw.randint(2, 16))]
        batch, cap = nested(lengths), 500 * size
        _, theirs = own.rearrange_micro_batches(batch, cap, force_group_size=size)
        micro, ours = rearrange_micro_batches(batch, cap, force_group_size=size)
        assert len(ours) <= len(theirs)
        for rows, some in zip(micro, ours, strict=True):
            assert type(rows) is type(batch)
            assert [row.tolist() for row in rows["input_ids"].unbind()] == [[i] * lengths[i] for i in some]
        if len(ours) == len(theirs):
            work = [VERL_WORKLOAD(length) for length in lengths]
            assert longest(work, ours) <= longest(work, theirs) * 1.01
