"""Element types: torch's as triton's, and conversions that give torch's bits compiled and interpreted alike.

fp32 and bf16 are converted by integer arithmetic, because triton's interpreter truncates where the hardware rounds to
nearest even, and loses subnormals.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl

from odc.errors import UnsupportedError

_TRITON: dict[torch.dtype, Any] = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}
_WORDS: dict[int, torch.dtype] = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def kernel_dtype(dtype: torch.dtype) -> Any:
    """Triton's name for a floating or integer `dtype`; UnsupportedError for another."""
    if dtype not in _TRITON:
        raise UnsupportedError(f"kernels convert between fp64, fp32, fp16 and bf16; {dtype} can only be copied")
    return _TRITON[dtype]


def converts(source: torch.dtype, to: torch.dtype) -> bool:
    """Whether kernels bring `source` to `to`: any type as it is, and those that triton knows to each other."""
    return source == to or (source in _TRITON and to in _TRITON)


def word_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The widest integer type in whose words tensors of all these types can be copied; complex128 has two a number."""
    return _WORDS[min(8, min((dtype.itemsize for dtype in dtypes), default=1))]


def accumulator_dtype(dtype: torch.dtype) -> Any:
    """Triton's name for an accumulator's type; UnsupportedError for any but fp32 and fp64."""
    if dtype not in (torch.float32, torch.float64):
        raise UnsupportedError(
            f"gradients are accumulated in fp32 or fp64, not in {dtype}: sums of many pushes lose what is smaller than "
            "the last bit, and atomic adds of fp16 or bf16 are not atomic between processes in triton's interpreter"
        )
    return _TRITON[dtype]


@triton.jit
def cast(values: tl.tensor, TO: tl.constexpr) -> tl.tensor:
    """`values` in dtype `TO`, rounded to nearest even, as torch's copy does. A NaN stays one; its payload may not."""
    if values.dtype == TO:
        return values
    elif TO == tl.bfloat16:
        wide = values.to(tl.float32)
        bits = tl.where(wide == wide, wide.to(tl.uint32, bitcast=True), 0x7FC00000)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif values.dtype == tl.bfloat16:
        wide = (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        return wide.to(TO)
    else:
        return values.to(TO)
