"""The inner loops of `odc.movers.int8`, which numba compiles: see there for the code that they write and read.

They call nothing but numpy. A block of values has one scale; the last block may be shorter. Each loop runs over views
of one block from 0 on: loops of this form become vector instructions, which are several times faster.
"""

from __future__ import annotations

import numpy as np

BLOCK = 128  # elements
LEVELS = np.float32(127.0)  # on either side of 0
TINY = np.float32(2.0**-126)  # the least normal number, whose inverse is finite
_MAGNITUDE, _INFINITE = np.uint64(0x7FFFFFFF), np.uint64(0x7F800000)  # of the bits of a float32


def pack(bits: np.ndarray, values: np.ndarray, tops: np.ndarray, scales: np.ndarray, codes: np.ndarray) -> None:
    """Fill `scales`, float32 [blocks], and `codes`, int8 [n], from `values`, float32 [n], whose `bits` are uint32 [n].

    `tops`, uint32 [blocks], is the memory of `scales`.
    """
    for block in range(len(scales)):
        magnitudes = bits[block * BLOCK : (block + 1) * BLOCK]
        some, into = values[block * BLOCK : (block + 1) * BLOCK], codes[block * BLOCK : (block + 1) * BLOCK]
        top = np.uint64(0)
        for i in range(len(magnitudes)):  # of whole numbers: a maximum of floats has NaN to think of
            top = max(top, np.uint64(magnitudes[i] & _MAGNITUDE))
        tops[block] = top
        scale = scales[block] / LEVELS
        if top >= _INFINITE:
            scales[block] = np.float32(np.nan)
            into[:] = 0
        elif scale < TINY:
            scales[block] = np.float32(0.0)
            into[:] = 0
        else:
            scales[block] = scale
            inverse = np.float32(1.0) / scale
            for i in range(len(some)):
                into[i] = np.int8(np.int32(np.rint(some[i] * inverse)))


def add(values: np.ndarray, scales: np.ndarray, codes: np.ndarray, into: np.ndarray) -> None:
    """Fill `into`, float32 [n] and perhaps `values` itself, with `values` and what was packed, added up."""
    for block in range(len(scales)):
        scale = scales[block]
        one, some = values[block * BLOCK : (block + 1) * BLOCK], codes[block * BLOCK : (block + 1) * BLOCK]
        out = into[block * BLOCK : (block + 1) * BLOCK]
        for i in range(len(some)):
            out[i] = one[i] + np.float32(some[i]) * scale


def rest(values: np.ndarray, scales: np.ndarray, codes: np.ndarray, into: np.ndarray) -> None:
    """Fill `into`, float32 [n], with what is left of `values`; blocks whose scale is NaN stay as they are there."""
    for block in range(len(scales)):
        scale = scales[block]
        if np.isnan(scale):
            continue
        whole, some = values[block * BLOCK : (block + 1) * BLOCK], codes[block * BLOCK : (block + 1) * BLOCK]
        out = into[block * BLOCK : (block + 1) * BLOCK]
        for i in range(len(some)):
            left = whole[i] - np.float32(some[i]) * scale
            if np.isfinite(left):  # not of numbers next to the largest: 127 times their scale is infinite
                out[i] = left
