"""The inner loop of `odc.movers.tiles`, which numba compiles. It calls nothing but numpy; words that stay or move by
one take no branch.
"""

from __future__ import annotations

import numpy as np

TILE = 2048  # words
GROUP = 8  # words


def patch(words: np.ndarray, packed: np.ndarray, values: np.ndarray, first: int) -> None:
    """Turn the words of a parameter, uint16 or uint8 [n], into those of the version whose changes are `packed`.

    `packed` is uint32, `values` the same memory in the dtype of `words`; `first` is the parameter's first entry there.
    """
    codes = packed.view(np.uint16)
    for tile in range((len(words) + TILE - 1) // TILE):
        record = np.int64(packed[first + tile])
        if record == 0:
            continue
        place = words[tile * TILE : (tile + 1) * TILE]
        bitmap = (len(place) + 32 * GROUP - 1) // (32 * GROUP)
        groups = 0
        for i in range(32 * bitmap):
            groups += packed[record + i // 32] >> np.uint32(i % 32) & 1
        code_at = 2 * (record + bitmap)
        value_at = 2 * (code_at + np.int64(groups)) // place.itemsize
        for i in range(32 * bitmap):
            if packed[record + i // 32] >> np.uint32(i % 32) & 1:
                code, group = codes[code_at], place[i * GROUP : (i + 1) * GROUP]
                code_at += 1
                for k in range(len(group)):
                    group[k] += (code >> 2 * k & 1) - (code >> 2 * k + 1 & 1)  # 3 leaves it
                others = code & code >> 1 & 0x5555
                k = 0
                while others:
                    if others & 1:
                        group[k] = values[value_at]
                        value_at += 1
                    others >>= 2
                    k += 1
