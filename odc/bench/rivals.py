"""What odc is measured against: a plain copy or add as the limit, and collectives that move as many bytes.

Chose to size a collective by what reaches a rank from others: an all-gather in which `nbytes` arrive here, a
reduce-scatter and an all-to-all in which `nbytes` leave here. gloo on the CPU; on CUDA NCCL and torch's
symmetric-memory collectives, where every rank has a device of its own (NCCL refuses to share one, and a barrier on the
device between processes that take turns on it measures the turns).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from odc.bench.rounds import Action


def own_device_each() -> bool:
    """Whether no two ranks share a CUDA device."""
    return dist.get_world_size() <= torch.cuda.device_count()


def transport(device: str) -> str | None:
    """Of collectives on `device`; None where there is none to measure against."""
    if device == "cpu":
        return "gloo"
    return "nccl" if own_device_each() else None


def copy(nbytes: int, device: str, times: int = 1, dtype: torch.dtype = torch.float32) -> Action:
    """Private memory to private memory: `nbytes` written, read as fp32 and written as `dtype`."""
    numel = nbytes // dtype.itemsize
    source, target = torch.ones(numel, device=device), torch.empty(numel, dtype=dtype, device=device)
    name = {"cpu": "memcpy", "cuda": "device copy"}[device] if dtype is torch.float32 else "local cast"
    return Action(name, repeated(lambda: target.copy_(source), times), nbytes, times=times)


def add(nbytes: int, device: str, times: int = 1) -> Action:
    """`nbytes` of fp32 into a private fp32 tensor."""
    source, target = torch.ones(nbytes // 4, device=device), torch.zeros(nbytes // 4, device=device)
    return Action("local add_", repeated(lambda: target.add_(source), times), nbytes, times=times)


def repeated(run: Callable[[], object], times: int) -> Callable[[], object]:
    """`run`, `times` times over."""
    if times == 1:
        return run

    def loop() -> None:
        for _ in range(times):
            run()

    return loop


def all_gather(nbytes: int, device: str) -> list[Action]:
    """`nbytes` of others reach this rank."""
    kind, peers = transport(device), max(1, dist.get_world_size() - 1)
    if kind is None or dist.get_world_size() == 1:
        return []
    part = torch.ones(max(1, nbytes // 4 // peers), device=device)
    whole = torch.empty(part.numel() * dist.get_world_size(), device=device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch < 2.13
    made = [Action(f"{kind} all_gather", lambda: gather(whole, part), nbytes)]
    if kind == "nccl":
        made.append(_symmetric("_low_contention_all_gather", part, nbytes))
    return made


def reduce_scatter(nbytes: int, device: str) -> list[Action]:
    """`nbytes` of fp32 leave this rank."""
    kind, world = transport(device), dist.get_world_size()
    if kind is None or world == 1:
        return []
    part = torch.empty(max(1, nbytes // 4 // (world - 1)), device=device)
    whole = torch.ones(part.numel() * world, device=device)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch < 2.13
    made = [Action(f"{kind} reduce_scatter", lambda: scatter(part, whole), nbytes)]
    if kind == "nccl":
        made.append(_symmetric("_low_contention_reduce_scatter", whole, nbytes, "sum"))
    return made


def all_to_all(nbytes: int, device: str) -> list[Action]:
    """`nbytes` leave this rank, as many reach it."""
    kind, world = transport(device), dist.get_world_size()
    if kind is None or world == 1:
        return []
    sent = torch.ones(max(1, nbytes // 4 // (world - 1)) * world, device=device)
    got = torch.empty_like(sent)
    return [Action(f"{kind} all_to_all", lambda: dist.all_to_all_single(got, sent), nbytes)]


def barrier() -> Action:
    """gloo's, on the CPU."""
    flag = torch.zeros(1)
    return Action("gloo barrier", lambda: dist.all_reduce(flag))  # what gloo's barrier is, and never NCCL's


def _symmetric(name: str, tensor: torch.Tensor, nbytes: int, *options: str) -> Action:
    """One of torch's symmetric-memory collectives: copy engines, no SM taken from compute."""
    from odc.memory._torch_symmetric import collective

    run = collective(name, tensor.nbytes)
    label = f"symm_mem {name.removeprefix('_low_contention_')}"
    return Action(label, lambda: run(tensor, *options), nbytes)
