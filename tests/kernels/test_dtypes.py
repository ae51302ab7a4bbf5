"""Conversions give torch's bits, for every number; what cannot be converted or summed into is refused."""

from __future__ import annotations

import pytest
import torch
from support.kernel_heaps import same_bits
from support.on_ranks import on_interpreted_ranks

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@on_interpreted_ranks(1)
def test_conversions_give_torchs_bits(rank: int, world: int) -> None:
    from odc.kernels import get

    def converted(values: torch.Tensor, to: torch.dtype) -> torch.Tensor:
        out = torch.empty(values.numel(), dtype=to)
        get(out, torch.tensor([values.data_ptr()]), 0, dtype=values.dtype)
        return out

    every_half = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    edges = torch.tensor([0x7F7FFFFF, 0x00000001, 0x007FFFFF, 0x3F808000, 0x3F818000, 0x7F800000, 0x7F800001])
    seeded = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=seeded, device="cpu").to(edges.device)
    singles = torch.cat([drawn, edges, edges - (1 << 31)]).to(torch.int32).view(F32)
    for values, to in [
        (every_half.view(BF16), F32),
        (every_half.view(BF16), F64),
        (every_half.view(F16), F32),
        (every_half.view(F16), BF16),
        (singles, BF16),
        (singles, F64),
        (singles.double() * 1.0000001, BF16),
    ]:
        out, expected = converted(values, to), values.to(to)
        nan = expected.isnan()
        assert torch.equal(out.isnan(), nan), f"{values.dtype} to {to}: not the same numbers are NaN"
        assert same_bits(out[~nan], expected[~nan]), f"{values.dtype} to {to}"


@on_interpreted_ranks(1)
def test_names_and_refusals(rank: int, world: int) -> None:
    from odc.errors import UnsupportedError
    from odc.kernels.dtypes import accumulator_dtype, kernel_dtype, word_dtype

    assert word_dtype([F32, BF16, F64]) == torch.int16
    assert word_dtype([torch.bool]) == torch.int8
    assert word_dtype([torch.complex128]) == word_dtype([F64, torch.complex128]) == torch.int64
    assert str(kernel_dtype(BF16)) == "bf16" and str(accumulator_dtype(F64)) == "fp64"
    with pytest.raises(UnsupportedError, match=r"float8_e5m2 can only be copied"):
        kernel_dtype(torch.float8_e5m2)
    for dtype in (F16, BF16, torch.int64):
        with pytest.raises(UnsupportedError, match=f"fp32 or fp64, not in {dtype}"):
            accumulator_dtype(dtype)
