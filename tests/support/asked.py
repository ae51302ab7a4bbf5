"""Prints what each call of `bench.stand_in` asks a device for, of three units over eight members.

Run as a script by `tests/bench/test_stand_in.py`, in a process where nothing is interpreted.
"""

from __future__ import annotations

import json

import torch

from bench.stand_in import CPU, CountingLanes, measure, no_device, untouched
from odc.bench.alone import OWNERS, Members
from odc.protocol import UnitSpec
from odc.settings import Settings

NUMEL = 1 << 21  # of a matrix's shard: bytes that the copy engine takes


def main() -> None:
    params = [("up", NUMEL, torch.bfloat16), ("norm", 64, torch.bfloat16), ("down", NUMEL, torch.bfloat16)]
    units = [UnitSpec.build(i, f"layer {i}", params, torch.float32) for i in range(3)]
    with no_device() as asked:
        lanes = CountingLanes(asked)
        members = Members(CPU, lambda _: lanes, Settings(), OWNERS, units, untouched)
        members.publish()
        rows = measure(members, asked, 20)
        members.close()
    columns = ("launches", "batches", "waits", "memsets")
    print(json.dumps({row["call"]: {column: row[column] for column in columns} for row in rows}))


if __name__ == "__main__":
    main()
