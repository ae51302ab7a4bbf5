"""Which thread compiles and loads kernels: the one that trains, before the others launch any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.deferred import move_all
from support.uninterpreted import run_uninterpreted
from torch.utils._python_dispatch import TorchDispatchMode

from odc.movers.cuda import CudaMover

BF16, F32 = torch.bfloat16, torch.float32


def test_no_thread_but_the_training_one_compiles_or_loads(tmp_path: Path) -> None:
    """By triton's own launches, with a stand-in for its driver; what is loaded was compiled first."""
    found, _ = run_uninterpreted("prepared.py", tmp_path)
    assert found["launched"] > 300, "the threads launched nothing"
    assert found["late"] == [], f"{len(found['late'])} kernels were loaded by other threads"
    assert found["locked"] == [], f"{len(found['locked'])} launches wait where another thread compiles"
    early = 12 + 8 + 2 + 3
    assert found["early"] == early, (
        "six kernels a dtype; then five, those of 2-byte words are there; two that patch, three that round"
    )


class Launched(TorchDispatchMode):
    """The operators of torch that are called, each with the dtypes of its tensors: a kernel each on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, tuple[torch.dtype, ...]]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [one for arg in args for one in (arg if isinstance(arg, list) else [arg])]
        dtypes = tuple(dict.fromkeys(one.dtype for one in flat if isinstance(one, torch.Tensor)))
        name = str(function)
        if not any(view in name for view in ("view", "slice", "split", "alias", "detach", "empty", "zeros", "ones")):
            self.found.add((name, dtypes))
        return function(*args, **(kwargs or {}))


def test_torchs_kernels_are_loaded_by_the_training_thread() -> None:
    """Where there is no compiler: what the other threads call was called before, with the same dtypes."""
    mover, numel, shards = CudaMover(1, 1 << 40, move_all), 6, 2
    with Launched() as early:
        mover.prepare(torch.device("cpu"), [(F32, BF16, F32), (F32, F32, F32), (F32, F32, None)], False)
    with Launched() as late:
        for dtype in (BF16, F32):
            values = [torch.ones(shards * numel - 1, dtype=dtype)]
            memory = [(shard, torch.zeros(256, dtype=torch.uint8)) for shard in range(shards)]
            sums = torch.zeros(numel, dtype=F32)
            mover.gather([torch.zeros(shards * numel, dtype=dtype)], [0], shards, memory)
            mover.stage(values, (numel,), (0,), memory)
            mover.add_part(values, (numel,), (0,), 0, sums)
            mover.addition([sums], [[values[0][:numel]] * 2]).run()
            mover.add([sums], [values[0][:numel]])
    assert len(late.found) >= 5
    assert late.found <= early.found, late.found - early.found
