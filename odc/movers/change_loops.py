"""The inner loops of `odc.movers.changes`, which numba compiles: see there for the code that they write and read.

They call nothing but numpy, and each other. A branch on a single word is mispredicted too often, so there is none:
loops over the words of a tile become vector instructions, and bits are moved for all lanes of a tile at once. A lane is
64 bits of a map of the words, eight of its bytes. Only words that have other values are taken one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

TILE = 4096  # words
GROUP = 8  # words
ROW = 64  # bytes of a map whose lowest bits stand for neighbours
GROUPS, LANES = TILE // GROUP, TILE // 64
_ROUNDS = 6  # of moves by 1, 2, 4 .. 32 bits within a lane
_ONE = np.uint64(1)
_LARGEST = 0xFFFFFFFF  # bytes: where tiles begin is written in 32 bits


def pack(old: np.ndarray, new: np.ndarray, into: np.ndarray) -> int:
    """Bytes written of what turns `old` into `new`, both uint16 [n]; 0 if they are the same, -1 if it does not fit.

    `into`: uint8 [m], at an address that is a multiple of 4.
    """
    tiles = (len(old) + TILE - 1) // TILE
    at = starts_bytes = 4 * (tiles + 1)
    if starts_bytes > len(into):
        return -1
    starts = into[:starts_bytes].view(np.uint32)
    maps = np.empty((3, GROUPS), np.uint8)
    tops, stream, routes = np.empty(ROW, np.uint8), np.empty(2 * LANES + 1, np.uint64), _room_for_routes()
    for tile in range(tiles):
        starts[tile] = at
        was, now = old[tile * TILE : (tile + 1) * TILE], new[tile * TILE : (tile + 1) * TILE]
        if len(was) < TILE:
            was, now = _padded(was), _padded(now)
        _compare(was, now, maps[0], maps[1], maps[2])
        groups = _filled(maps[0], tops)
        if groups == 0:
            continue
        changed, near, up = maps[0].view(np.uint64), maps[1].view(np.uint64), maps[2].view(np.uint64)
        _find_routes(changed, routes)
        bits = _append(stream, 0, near, changed, routes)
        _find_routes(near, routes)
        moved = _append(stream, bits, up, near, routes) - bits
        stream_at = at + ROW + groups
        values_at = (stream_at + (bits + moved + 7) // 8 + 3) // 4 * 4
        end = values_at + (2 * (bits - moved) + 3) // 4 * 4
        if end > min(len(into), _LARGEST):
            return -1
        into[at : at + ROW] = tops
        _keep_filled(maps[0], into[at + ROW : stream_at])
        some = into[stream_at:values_at]
        some[:] = stream.view(np.uint8)[: len(some)]
        _take(now, changed, near, into[values_at:end].view(np.uint16))
        at = end
    starts[tiles] = at
    return at if at > starts_bytes else 0


def patch(words: np.ndarray, packed: np.ndarray) -> None:
    """Turn `words`, uint16 [n], into what `packed`, uint8 [m] at a multiple of 4, says."""
    starts = packed[: 4 * ((len(words) + TILE - 1) // TILE + 1)].view(np.uint32)
    maps = np.empty((3, GROUPS), np.uint8)
    changed, near, up = maps[0].view(np.uint64), maps[1].view(np.uint64), maps[2].view(np.uint64)
    stream, routes = np.zeros(2 * LANES + 1, np.uint64), _room_for_routes()
    for tile in range(len(starts) - 1):
        if starts[tile + 1] == starts[tile]:
            continue
        record = packed[np.int64(starts[tile]) : np.int64(starts[tile + 1])]
        stream_at = ROW + _spread_filled(record, maps[0])
        some = record[stream_at : stream_at + 2 * TILE // 8]
        stream.view(np.uint8)[: len(some)] = some
        _find_routes(changed, routes)
        bits = _extract(stream, 0, near, changed, routes)
        _find_routes(near, routes)
        end = _extract(stream, bits, up, near, routes)
        values = record[(stream_at + (end + 7) // 8 + 3) // 4 * 4 :].view(np.uint16)
        place = words[tile * TILE : (tile + 1) * TILE]
        whole = place if len(place) == TILE else _padded(place)
        _move(whole, maps[1], maps[2])
        _put(whole, changed, near, values)
        if len(place) < TILE:
            place[:] = whole[: len(place)]


def _padded(words: np.ndarray) -> np.ndarray:
    whole = np.zeros(TILE, np.uint16)
    whole[: len(words)] = words
    return whole


def _compare(was: np.ndarray, now: np.ndarray, changed: np.ndarray, near: np.ndarray, up: np.ndarray) -> None:
    """Fill three maps of a tile: words that have changed; of those, the ones that moved by one; of those, upwards."""
    for block in range(GROUPS // ROW):
        words = slice(block * ROW * 8, (block + 1) * ROW * 8)
        groups = slice(block * ROW, (block + 1) * ROW)
        a, b, c, n, u = was[words], now[words], changed[groups], near[groups], up[groups]
        for i in range(ROW):
            some, ones, ups = np.uint8(0), np.uint8(0), np.uint8(0)
            for bit in range(8):
                step = np.uint16(b[bit * ROW + i] - a[bit * ROW + i])
                some |= np.uint8(step != 0) << bit
                ups |= np.uint8(step == 1) << bit
                ones |= np.uint8((step == 1) | (step == 0xFFFF)) << bit
            c[i], n[i], u[i] = some, ones, ups


def _move(words: np.ndarray, near: np.ndarray, up: np.ndarray) -> None:
    """Add 1 to the words of a tile that are in both maps, and take 1 from those that are in `near` alone."""
    for block in range(GROUPS // ROW):
        w = words[block * ROW * 8 : (block + 1) * ROW * 8]
        n, u = near[block * ROW : (block + 1) * ROW], up[block * ROW : (block + 1) * ROW]
        for i in range(ROW):
            for bit in range(8):
                w[bit * ROW + i] += (u[i] >> bit & 1) * 2 - (n[i] >> bit & 1)


def _filled(groups: np.ndarray, tops: np.ndarray) -> int:
    """How many groups have a changed word; `tops` gets their map."""
    count = 0
    for i in range(ROW):
        top = np.uint8(0)
        for bit in range(8):
            filled = np.uint8(groups[bit * ROW + i] != 0)
            top |= filled << bit
            count += int(filled)
        tops[i] = top
    return count


def _keep_filled(groups: np.ndarray, into: np.ndarray) -> None:
    at = 0
    for group in groups:
        if at < len(into):  # else only empty groups follow
            into[at] = group
        at += group != 0


def _spread_filled(record: np.ndarray, groups: np.ndarray) -> int:
    """Fill the map of groups from a record; returns how many of them have a changed word."""
    at = 0
    for bit in range(8):
        for i in range(ROW):
            filled = record[i] >> bit & 1
            groups[bit * ROW + i] = record[ROW + at] * filled
            at += filled
    return at


def _room_for_routes() -> np.ndarray:
    return np.empty((_ROUNDS, LANES), np.uint64)


def _find_routes(masks: np.ndarray, routes: np.ndarray) -> None:
    """Which bits of each lane move in each round, for those of its mask to come to its low end.

    A bit moves by the number of zeros below it in the mask: bit k of that number says whether it moves in round k.
    "Hacker's Delight" has this for one lane as `compress`.
    """
    for lane in range(LANES):
        mask = masks[lane]
        zeros = ~mask << _ONE
        for k in range(_ROUNDS):
            odd = zeros  # where the number of zeros below is odd
            for j in range(_ROUNDS):
                odd ^= odd << np.uint64(1 << j)
            moved = odd & mask
            routes[k, lane] = moved
            mask = mask ^ moved | moved >> np.uint64(1 << k)
            zeros &= ~odd


def _append(stream: np.ndarray, at: int, lanes: np.ndarray, masks: np.ndarray, routes: np.ndarray) -> int:
    """Append the bits of each lane that are in its mask, from bit `at` of the stream on; returns where they end."""
    lows = np.empty(LANES, np.uint64)
    for lane in range(LANES):
        x = lanes[lane]
        for k in range(_ROUNDS):
            moved = x & routes[k, lane]
            x = x ^ moved | moved >> np.uint64(1 << k)
        lows[lane] = x
    if at == 0:
        stream[0] = 0
    for lane in range(LANES):
        word, shift = at // 64, np.uint64(at % 64)
        stream[word] |= lows[lane] << shift
        stream[word + 1] = lows[lane] >> _ONE >> (np.uint64(63) - shift)
        at += _ones(masks[lane])
    return at


def _extract(stream: np.ndarray, at: int, lanes: np.ndarray, masks: np.ndarray, routes: np.ndarray) -> int:
    """Fill lanes with what `_append` has written."""
    for lane in range(LANES):
        word, shift = at // 64, np.uint64(at % 64)
        lanes[lane] = stream[word] >> shift | stream[word + 1] << _ONE << (np.uint64(63) - shift)
        at += _ones(masks[lane])
    for lane in range(LANES):
        x = lanes[lane]
        for k in range(_ROUNDS - 1, -1, -1):
            moved = routes[k, lane]
            x = x & ~moved | x << np.uint64(1 << k) & moved
        lanes[lane] = x & masks[lane]
    return at


def _take(words: np.ndarray, changed: np.ndarray, near: np.ndarray, values: np.ndarray) -> None:
    """The words that have changed and not by one, in the order of the map."""
    at = 0
    for lane in range(LANES):
        left, first = changed[lane] ^ near[lane], _first(lane)
        while left:
            values[at] = words[first + _offset(left)]
            at += 1
            left &= left - _ONE


def _put(words: np.ndarray, changed: np.ndarray, near: np.ndarray, values: np.ndarray) -> None:
    """The opposite of `_take`."""
    at = 0
    for lane in range(LANES):
        left, first = changed[lane] ^ near[lane], _first(lane)
        while left:
            words[first + _offset(left)] = values[at]
            at += 1
            left &= left - _ONE


def _first(lane: int) -> int:
    """The word of a lane's first bit."""
    return lane // 8 * ROW * 8 + lane % 8 * 8


def _offset(lane: Any) -> Any:
    """How far the word of the lowest bit of a lane is behind that of its first bit."""
    bit = _ones((lane & ~lane + _ONE) - _ONE)
    return bit % 8 * ROW + bit // 8


def _ones(bits: Any) -> Any:
    """How many bits are set; compilers know this form."""
    bits -= bits >> _ONE & np.uint64(0x5555555555555555)
    bits = (bits & np.uint64(0x3333333333333333)) + (bits >> np.uint64(2) & np.uint64(0x3333333333333333))
    bits = bits + (bits >> np.uint64(4)) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64(bits * np.uint64(0x0101010101010101) >> np.uint64(56))
