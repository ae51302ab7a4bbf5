"""The inner loops of `odc.movers.changes`, which numba compiles: see there for the code that they write and read.

They call nothing but numpy, and each other. Words are uint16; a count of words is a multiple of 8.
"""

from __future__ import annotations

import numpy as np

TILE = 4096  # words
GROUP = 8  # words
_TOPS = TILE // GROUP // 8  # bytes


def pack(old: np.ndarray, new: np.ndarray, into: np.ndarray, places: np.ndarray, counts: np.ndarray) -> int:
    """Bytes written of what turns `old` into `new`, both uint16 [n]; 0 if they are the same, -1 if it does not fit.

    `into`: uint8 [m], at an address that is a multiple of 4. `places`, uint8 [256, 8], has the numbers of the bits that
    are set in each byte; `counts`, uint8 [256], how many.
    """
    tiles = (len(old) + TILE - 1) // TILE
    starts_bytes = 4 * (tiles + 1)
    if starts_bytes > len(into):
        return -1
    starts = into[:starts_bytes].view(np.uint32)
    was, now = old.view(np.uint64), new.view(np.uint64)
    tops = np.empty(_TOPS, np.uint8)
    masks, codes, values = (
        np.empty(TILE // GROUP, np.uint8),
        np.empty(TILE + 4, np.uint8),
        np.empty(TILE + 1, np.uint16),
    )
    at = starts_bytes
    for tile in range(tiles):
        starts[tile] = at
        first, end = tile * TILE, min((tile + 1) * TILE, len(old))
        groups, changed, escaped = 0, 0, 0
        tops[:] = 0
        for word in range(first, end, GROUP):
            pair = word // 4
            if was[pair] == now[pair] and was[pair + 1] == now[pair + 1]:
                continue
            mask = 0
            for i in range(GROUP):
                mask |= (new[word + i] != old[word + i]) << i
            for i in range(counts[mask]):
                place = word + places[mask, i]
                value = new[place]
                step = np.uint16(value - old[place])
                up, down = step == 1, step == 0xFFFF
                codes[changed] = up + 2 * down
                changed += 1
                values[escaped] = value  # without a branch, which would be hard to predict
                escaped += not (up or down)
            masks[groups] = mask
            groups += 1
            number = (word - first) // GROUP
            tops[number // 8] |= 1 << number % 8
        if groups:
            at = _write(into, at, tops, masks[:groups], codes, changed, values[:escaped])
            if at < 0:
                return -1
    starts[tiles] = at
    return at if at > starts_bytes else 0


def _write(
    into: np.ndarray,
    at: int,
    tops: np.ndarray,
    masks: np.ndarray,
    codes: np.ndarray,
    changed: int,
    values: np.ndarray,
) -> int:
    """The end of the record that is written at `at`; -1 if it does not fit."""
    codes[changed : changed + 4] = 0
    quads = (changed + 3) // 4
    end = (at + len(tops) + len(masks) + quads + 3) // 4 * 4
    if end + (2 * len(values) + 3) // 4 * 4 > len(into):
        return -1
    into[at : at + len(tops)] = tops
    at += len(tops)
    into[at : at + len(masks)] = masks
    at += len(masks)
    for quad in range(quads):
        i = 4 * quad
        into[at + quad] = codes[i] | codes[i + 1] << 2 | codes[i + 2] << 4 | codes[i + 3] << 6
    into[end : end + 2 * len(values)].view(np.uint16)[:] = values
    return end + (2 * len(values) + 3) // 4 * 4


def patch(words: np.ndarray, packed: np.ndarray, places: np.ndarray, counts: np.ndarray) -> None:
    """Turn `words`, uint16 [n], into what `packed`, uint8 [m] at a multiple of 4, says. As for `pack` otherwise."""
    tiles = (len(words) + TILE - 1) // TILE
    starts = packed[: 4 * (tiles + 1)].view(np.uint32)
    steps = np.array([0, 1, 0xFFFF, 0], np.uint16)
    for tile in range(tiles):
        at = np.int64(starts[tile])
        if starts[tile + 1] == starts[tile]:
            continue
        masks = at + _TOPS
        groups = 0
        for i in range(_TOPS):
            groups += counts[packed[at + i]]
        codes = masks + groups
        changed = 0
        for i in range(groups):
            changed += counts[packed[masks + i]]
        value_at = (codes + (changed + 3) // 4 + 3) // 4 * 4
        values = packed[value_at : np.int64(starts[tile + 1])].view(np.uint16)
        group, done, escaped = masks, 0, 0
        for i in range(_TOPS):
            top = packed[at + i]
            for j in range(counts[top]):
                word = tile * TILE + (8 * i + places[top, j]) * GROUP
                mask = packed[group]
                group += 1
                for k in range(counts[mask]):
                    place = word + places[mask, k]
                    code = packed[codes + done // 4] >> 2 * (done % 4) & 3
                    done += 1
                    if code:
                        words[place] += steps[code]
                    else:
                        words[place] = values[escaped]
                        escaped += 1
