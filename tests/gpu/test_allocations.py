"""Where device memory is allocated: after the first minibatch, not on odc's threads.

An allocation may wait for every kernel that runs on the device, and so hold up the ranks that wait for such a thread.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from support.device import own_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from odc import Settings, fully_shard
from odc.fsdp import live_roots
from odc.protocol import HeapLayout

MEMORY: Any = torch.cuda.memory  # what records allocations has no public name
THREADS = ("odc/worker.py", "odc/runtime/daemon.py")  # where odc's threads begin


def allocated(rank: int, world: int, settings: Settings) -> tuple[dict[str, int], int]:
    """Three minibatches after the first: how often which function of odc's
    threads allocated, and how often any Python did.
    """
    device = own_device(int(os.environ.get("LOCAL_RANK", rank)))
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(96, 160), nn.Tanh(), nn.Linear(160, 96)) for _ in range(3))
    model: Any = nn.Sequential(*layers).to(device)
    mesh = init_device_mesh("cuda", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh, settings=settings)
    fully_shard(model, mesh=mesh, settings=settings)

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def minibatch(step: int) -> None:
        kept = []  # so that parameters and gradients lie elsewhere in every minibatch
        with model.minibatch():
            for i in range(count := 1 + (rank + step) % 2):
                model.set_is_last_backward(i == count - 1)  # sums leave for other hosts then
                kept.append(torch.empty(1000 * (step + 1), device=device))
                model(torch.randn(8, 96, device=device)).square().mean().backward()
        if settings.changes == "on":
            optimizer.step()
        model.zero_grad()

    minibatch(0)
    rounds = settings.sums_dtype == "int8"
    torch.cuda.synchronize()
    MEMORY._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=100_000)
    patched, rounded = list[int](), list[bool]()
    real, real_rounding = HeapLayout.patch, HeapLayout.round_sums
    main = threading.get_ident()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(HeapLayout, "patch", lambda *args: (patched.append(1), real(*args))[1])
        patches.setattr(
            HeapLayout,
            "round_sums",
            lambda *args: (rounded.append(threading.get_ident() != main), real_rounding(*args))[1],
        )
        for step in (1, 2, 3):
            minibatch(step)
    assert bool(patched) == (settings.changes == "on"), "no changes were applied"
    assert any(rounded) or not rounds, "no sum was rounded on a thread"
    torch.cuda.synchronize()
    traces = MEMORY._snapshot()["device_traces"]
    MEMORY._record_memory_history(enabled=None)
    made, found = 0, dict[str, int]()
    for entry in (entry for trace in traces for entry in trace if entry["action"] == "alloc"):
        made += bool(entry["frames"])  # autograd's thread has none: it runs no Python
        if any(frame["filename"].endswith(THREADS) for frame in entry["frames"]):
            where = " < ".join(frame["name"] for frame in entry["frames"][:6])
            found[where] = found.get(where, 0) + 1
    for root in live_roots():
        root.shut_down()
    return found, made


@pytest.mark.parametrize("settings", [{"changes": "on"}, {"sums_dtype": "int8"}])
def test_no_thread_allocates_for_what_crosses_to_other_hosts(request: Any, settings: dict[str, Any]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")
    pool = request.getfixturevalue("host_ranks")(2, 1)
    for found, made in pool.run(allocated, Settings(timeout_s=120.0, **settings), timeout=240):
        assert made > 20, "the training thread allocates: it is seen"
        assert not found, found


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("accumulate", ["server", "direct"])
def test_no_thread_of_odc_allocates_after_the_first_minibatch(ranks: Any, accumulate: Any, kernels: Any) -> None:
    settings = Settings(timeout_s=120.0, accumulate=accumulate, kernels=kernels)
    for found, made in ranks(2).run(allocated, settings, timeout=240):
        assert made > 20, "the training thread allocates: it is seen"
        assert not found, found
