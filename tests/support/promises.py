"""Imported where kernels are interpreted: an address that `tl.multiple_of` promises to be aligned has to be.

The interpreter drops the promise, on which a GPU reads 16 bytes at once and faults.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

_set_attr = TensorHandle.set_attr


def _checked(handle: TensorHandle, key: str, value: list[int]) -> None:
    if key == "tt.divisibility" and (handle.data % value[0]).any():
        raise AssertionError(f"{handle.data} is promised to be a multiple of {value[0]}")
    _set_attr(handle, key, value)


_class: Any = TensorHandle
_class.set_attr = _checked


@triton.jit
def promising(target: tl.tensor) -> None:
    """Write a byte to an address that is promised to be a multiple of 16."""
    tl.store(tl.multiple_of(target.to(tl.pointer_type(tl.int8)), 16), 1)
