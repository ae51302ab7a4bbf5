"""What odc is measured against: a plain copy or add as the limit, and collectives that move as many bytes.

On CUDA these are NCCL's and torch's symmetric-memory collectives where every rank has its own device, which NCCL
requires; otherwise gloo's, by way of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist

from odc.bench.rounds import Action


def transport(device: str) -> str:
    """The backend of collectives on `device`."""
    return "nccl" if device == "cuda" and dist.get_world_size() <= torch.cuda.device_count() else "gloo"


def copy(nbytes: int, device: str, times: int = 1, dtype: torch.dtype = torch.float32) -> Action:
    """Private memory to private memory: `nbytes` written, read as fp32 and written as `dtype`."""
    name = {"cpu": "memcpy", "cuda": "device copy"}[device] if dtype is torch.float32 else "local cast"
    numel, apart = nbytes // dtype.itemsize, slices(times, device)
    source = torch.ones(apart * numel, device=device).split(numel)
    target = torch.empty(apart * numel, dtype=dtype, device=device).split(numel)
    run = repeated(lambda i: target[i].copy_(source[i]), times, apart)
    return Action(name, run, nbytes, times=times, limit=True, queued=True)


def roofline(nbytes: int, read_and_written: int, device: str, times: int, of: str = "") -> Action:
    """A copy that reads and writes `read_and_written` bytes in all, as the action of `nbytes` must."""
    return replace(copy(read_and_written // 8 * 4, device, times), name=f"byte roofline{of}", nbytes=nbytes)


def add(nbytes: int, device: str, times: int = 1) -> list[Action]:
    """Adds `nbytes` of fp32 to a private fp32 tensor; the first action is the limit, a copy on a device."""
    apart = slices(times, device)
    source = torch.ones(apart * nbytes // 4, device=device).split(nbytes // 4)
    target = torch.zeros(apart * nbytes // 4, device=device).split(nbytes // 4)
    run = repeated(lambda i: target[i].add_(source[i]), times, apart)
    plain = Action("local add_", run, nbytes, times=times, limit=device == "cpu", queued=True)
    return [plain] if device == "cpu" else [roofline(nbytes, 3 * nbytes, device, times), plain]


def repeated(run: Callable[[int], object], times: int, apart: int) -> Callable[[], object]:
    """Calls `run(i)` `times` times, with `apart` slices of memory in turn."""

    def loop() -> None:
        for i in range(times):
            run(i % apart)

    return loop


def slices(times: int, device: str) -> int:
    """Pieces of memory to repeat on: on a device as many as repetitions, so that no cache holds them; else one."""
    return times if device == "cuda" else 1


def all_gather(nbytes: int, device: str) -> list[Action]:
    """All-gathers in which `nbytes` of other ranks reach this one."""
    kind, world = transport(device), dist.get_world_size()
    if world == 1:
        return []
    part = torch.ones(max(1, nbytes // 4 // (world - 1)), device=device)
    whole = torch.empty(part.numel() * world, device=device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch < 2.13
    made = [collective(f"{kind} all_gather", lambda: gather(whole, part), nbytes, device)]
    if kind == "nccl":
        made.append(_symmetric("_low_contention_all_gather", part, nbytes))
    return made


def reduce_scatter(nbytes: int, device: str) -> list[Action]:
    """Reduce-scatters in which `nbytes` of fp32 leave this rank."""
    kind, world = transport(device), dist.get_world_size()
    if world == 1:
        return []
    part = torch.empty(max(1, nbytes // 4 // (world - 1)), device=device)
    whole = torch.ones(part.numel() * world, device=device)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch < 2.13
    made = [collective(f"{kind} reduce_scatter", lambda: scatter(part, whole), nbytes, device)]
    if kind == "nccl":
        made.append(_symmetric("_low_contention_reduce_scatter", whole, nbytes, "sum"))
    return made


def all_to_all(nbytes: int, device: str) -> list[Action]:
    """An all-to-all in which `nbytes` leave this rank and as many reach it."""
    kind, world = transport(device), dist.get_world_size()
    if world == 1:
        return []
    sent = torch.ones(max(1, nbytes // 4 // (world - 1)) * world, device=device)
    got = torch.empty_like(sent)
    return [collective(f"{kind} all_to_all", lambda: dist.all_to_all_single(got, sent), nbytes, device)]


def collective(
    name: str, run: Callable[[], object], nbytes: int, device: str, after: Callable[[], object] = lambda: None
) -> Action:
    """A collective as a baseline; by way of the host it is slow, and gloo may lack it for memory of a device."""
    if device == "cuda" and transport(device) == "gloo":
        return Action(f"{name} (via host)", run, nbytes, after=after, most=3, optional=True)
    return Action(name, run, nbytes, after=after, queued=device == "cuda")


def barrier() -> Action:
    """A barrier on the CPU."""
    flag = torch.zeros(1)
    return Action("gloo barrier", lambda: dist.all_reduce(flag))  # what gloo's barrier is, and never NCCL's


def _symmetric(name: str, tensor: torch.Tensor, nbytes: int, *options: str) -> Action:
    """One of torch's symmetric-memory collectives: copy engines, no SM taken from compute. Torch may lack its private
    names, or be refused the memory; odc's rows do not depend on it.
    """

    @cache
    def made() -> Callable[..., object]:
        from odc.bench._torch_symmetric import collective as symmetric

        return symmetric(name, tensor.nbytes)

    label = f"symm_mem {name.removeprefix('_low_contention_')}"
    return Action(label, lambda: made()(tensor, *options), nbytes, queued=True, optional=True)
