"""A program's share, interpreted, at any address and of any length; nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_heaps import numbers, same_bits
from support.kernel_references import accumulate_reference, add_reference, get_reference, publish_reference
from support.on_ranks import on_interpreted_ranks

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
ROOM = 160


@on_interpreted_ranks(1)
def test_any_share(rank: int, world: int) -> None:
    """Elements left over after whole groups of 16, addresses off by one element and more, shares longer than a step."""
    from odc.kernels import accumulate, add, publish

    @settings(max_examples=60, deadline=None)
    @given(
        st.sampled_from([(F32, F32), (BF16, F32), (F32, BF16), (F32, F64)]),
        st.integers(1, 100),
        st.integers(0, 17),
        st.integers(0, 17),
        st.sampled_from([16, 64, 128]),
    )
    def property_(types: tuple[torch.dtype, torch.dtype], n: int, here: int, there: int, block: int) -> None:
        source, target = types
        values = numbers(n, ROOM, source)[here : here + n]
        for launcher, reference in ((publish, publish_reference), (add, add_reference)):
            if launcher is add and target == BF16:
                continue
            found, expected = numbers(0, ROOM, target), numbers(0, ROOM, target)
            launcher([found[there : there + n]], [values], block=block)  # type: ignore[operator]
            reference([expected[there : there + n]], [values])  # type: ignore[operator]
            assert same_bits(found, expected), f"{launcher.__name__}: {values.dtype} to {target}"
        if target != BF16:
            found, expected = numbers(0, ROOM, target), numbers(0, ROOM, target)
            table = torch.tensor([found.data_ptr()])
            accumulate([values], [n], [there], table, dtype=target, block=block)
            accumulate_reference([values], [n], [there], [expected])
            assert same_bits(found, expected), f"accumulate: {values.dtype} to {target}"

    property_()


@on_interpreted_ranks(1)
def test_shares_longer_than_a_step(rank: int, world: int) -> None:
    """Unaligned shares go in steps of 1024."""
    from odc.kernels import get

    memory = numbers(1, 5000, F32).view(torch.uint8)
    for offset in (0, 4, 16):
        for n in (1023, 1024, 1025, 4000):
            out, expected = torch.full((n,), -1.0), torch.full((n,), -1.0)
            get(out, torch.tensor([memory.data_ptr()]), 0, offset, block=4096)
            get_reference(expected, [memory], 0, offset)
            assert same_bits(out, expected), f"{n} from byte {offset}"


@on_interpreted_ranks(1)
@pytest.mark.parametrize("start", [-(2**33), -5, 0, 3, 16, 2**31, 2**32 + 3])
def test_what_a_gradient_is_short_of_a_shard_is_zeroed_and_no_more(rank: int, world: int, start: int) -> None:
    """Shards may have more than 2^32 elements: a gradient then ends far before a tile, or far behind it."""
    from support.zeroing import zeroing

    found = torch.ones(ROOM)
    zeroing[(1,)](found.data_ptr(), torch.tensor([start]), torch.tensor([2**33]), BLOCK=16)
    assert found.tolist() == [float(not start <= i < 16) for i in range(ROOM)]


@on_interpreted_ranks(1)
def test_a_promise_of_alignment_is_kept_in_all_that_is_interpreted(rank: int, world: int) -> None:
    from support.promises import promising

    memory = numbers(0, ROOM, F64)
    assert memory.data_ptr() % 16 == 0
    promising[(1,)](memory.data_ptr() + 32)
    with pytest.raises(Exception, match="is promised to be a multiple of 16"):
        promising[(1,)](memory.data_ptr() + 8)
