"""Changes of a unit's shard by tiles, in plain torch, for tensors on any device: what `odc.kernels.pack` writes.

Records lie in the order of their tiles here. Nothing is fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

TILE, GROUP = 2048, 8
OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def directory_bytes(params: Sequence[torch.Tensor]) -> int:
    """Before the records."""
    return 4 * sum(-(-len(words_of(param)) // TILE) for param in params)


def words_of(values: torch.Tensor) -> torch.Tensor:
    """int32, 1-D: the words of 16 bits, or of 8 where elements have no more."""
    if values.itemsize == 1:
        return values.view(torch.uint8).int()
    return values.view(torch.int16).int() & 0xFFFF


def pack(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """uint8: what turns the first of each pair into the second, bit for bit; empty if all are the same."""
    device = pairs[0][0].device if pairs else None
    tiles = [one for old, new in pairs for one in _tiles(old, new)]
    at, starts, records = len(tiles), list[int](), list[torch.Tensor]()
    for record in tiles:
        starts.append(at if len(record) else 0)
        at += len(record) // 4
        records.append(record)
    if at == len(tiles):
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.cat([torch.tensor(starts, dtype=torch.int32, device=device).view(torch.uint8), *records])


def _tiles(old: torch.Tensor, new: torch.Tensor) -> list[torch.Tensor]:
    was, now = words_of(old), words_of(new)
    return [_record(a, b, old.itemsize == 1) for a, b in zip(was.split(TILE), now.split(TILE), strict=True) if len(a)]


def _record(was: torch.Tensor, now: torch.Tensor, narrow: bool) -> torch.Tensor:
    last = 0xFF if narrow else 0xFFFF
    step = (now - was) & last
    code = torch.full_like(step, 3)
    for number, value in enumerate((0, 1, last)):
        code[step == value] = number
    if not code.any():
        return code[:0].to(torch.uint8)
    groups = _padded(code, GROUP).view(-1, GROUP)
    changed = (groups != 0).any(1)
    bits = _padded(changed, 32).view(-1, 8).int()
    bitmap = (bits << torch.arange(8, device=bits.device)).sum(1).to(torch.uint8)
    codes = (groups[changed] << 2 * torch.arange(GROUP, device=bits.device)).sum(1)
    codes = torch.stack([codes & 0xFF, codes >> 8], 1).to(torch.uint8).view(-1)
    others = now[code == 3]
    values = others.to(torch.uint8) if narrow else torch.stack([others & 0xFF, others >> 8], 1).to(torch.uint8).view(-1)
    return _padded(torch.cat([bitmap, codes, values]), 4)


def _padded(values: torch.Tensor, to: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % to))


def patch(params: Sequence[torch.Tensor], packed: torch.Tensor) -> None:
    """Turn the parameters of a unit's shard, in place, into the version whose changes are `packed`."""
    tiles = [tile for param in params if len(param) for tile in _views(param).split(TILE)]
    starts = packed[: 4 * len(tiles)].view(torch.int32).tolist()
    for tile, start in zip(tiles, starts, strict=True):
        if start:
            _patch(tile, packed[4 * start :])


def _views(param: torch.Tensor) -> torch.Tensor:
    return param.view(torch.uint8 if param.itemsize == 1 else torch.int16)


def _patch(tile: torch.Tensor, record: torch.Tensor) -> None:
    groups = -(-len(tile) // GROUP)
    bitmap, shifts = -(-groups // 32) * 4, torch.arange(GROUP, device=tile.device)
    changed = (record[:bitmap, None].int() >> shifts & 1).view(-1)[:groups].bool()
    at = bitmap + 2 * int(changed.sum())
    halves = _pairs(record[bitmap:at])
    codes = torch.zeros(groups, GROUP, dtype=torch.int32, device=tile.device)
    codes[changed] = (halves[:, None] >> 2 * shifts & 3).int()
    code = codes.view(-1)[: len(tile)]
    new = tile.int() + (code == 1).int() - (code == 2).int()
    others = code == 3
    values = record[at : at + tile.itemsize * int(others.sum())]
    new[others] = values.int() if tile.itemsize == 1 else _pairs(values)
    tile.copy_(new.to(tile.dtype))


def _pairs(values: torch.Tensor) -> torch.Tensor:
    """int32: bytes, two and two."""
    halves = values.view(-1, 2).int()
    return halves[:, 0] | halves[:, 1] << 8
