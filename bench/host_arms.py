"""What ranks on several hosts do in `bench.hosts`: one minibatch of each arm, on units without compute or with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2

from odc import Settings, fully_shard

TOKENS = 64
_made: dict[tuple[str, str], Any] = {}  # of this process, by arm and work


@dataclass(frozen=True)
class Work:
    """What one arm does, `microbatches` times. `kind` is "exchange": `units` of `side` x `side` fp32 parameters, which
    compute nothing; or "demo": the model of `odc compare --demo`, with `TOKENS` tokens a microbatch.
    """

    kind: str
    per_host: int
    microbatches: int
    units: int = 4
    side: int = 1448


class _Touch(torch.autograd.Function):
    """Passes x on; the weight's gradient is `gradient`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, kept: bool) -> torch.Tensor:
        ctx.gradient, ctx.kept = gradient, kept
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], ctx.gradient.detach() if ctx.kept else ctx.gradient.clone(), None, None


class Touched(nn.Module):
    """A unit that is gathered and has a gradient of ones, and computes nothing.

    The gradient is made once, as `gloo`'s is, unless it is not `kept`: FSDP2 adds in place to the gradient that it is
    given, so it is given a copy each time.
    """

    def __init__(self, gradient: torch.Tensor, kept: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros_like(gradient))
        self._gradient, self._kept = gradient, kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Touch.apply(x, self.weight, self._gradient, self._kept)
        return y


class Bare:
    """The collectives that FSDP2 calls, with nothing around them."""

    def __init__(self, work: Work) -> None:
        world, numel = dist.get_world_size(), work.side**2
        self._work, shard = work, -(-numel // world)
        self._shard, self._whole, self._sum = torch.ones(shard), torch.ones(shard * world), torch.empty(shard)

    def minibatch(self) -> None:
        for _ in range(self._work.microbatches):
            for _ in range(2 * self._work.units):
                dist.all_gather_into_tensor(self._whole, self._shard)
            for _ in range(self._work.units):
                dist.reduce_scatter_tensor(self._sum, self._whole)


def settings_of(arm: str) -> Settings:
    """Of an arm of odc. Ranks are those of the tests, where settings check the protocol unless they say otherwise."""
    return Settings(
        engine="nixl" if "nixl" in arm else "sockets",
        sums_dtype="bfloat16" if "bf16" in arm else "accumulator",
        prefetch=0 if "inline" in arm else 1,
        push_overlap="inline" not in arm,
        changes="off",  # no weight changes here: nothing would cross but the sums
        trace=False,
        check_protocol=False,
    )


class Sharded:
    """A model under FSDP2 or odc."""

    def __init__(self, work: Work, arm: str) -> None:
        self._work, self._arm = work, arm
        self._model, layers = _demo() if work.kind == "demo" else _units(work, self.on_demand)
        world = dist.get_world_size()
        hybrid = "hybrid" in arm
        shape, names = ((world // work.per_host, work.per_host), ("replicate", "shard")) if hybrid else ((world,), None)
        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
        shard: Callable[..., Any] = fsdp2
        if self.on_demand:
            shard, options["settings"] = fully_shard, settings_of(arm)
        for layer in (*layers, self._model):
            shard(layer, **options)

    @property
    def on_demand(self) -> bool:
        return self._arm.startswith("odc")

    def minibatch(self) -> None:
        self._model.zero_grad()
        scope: AbstractContextManager[Any] = self._model.minibatch() if self.on_demand else nullcontext()
        with scope:
            for m in range(self._work.microbatches):
                last = m == self._work.microbatches - 1
                if not self.on_demand:
                    self._model.set_requires_gradient_sync(last)
                self._model.set_is_last_backward(last and "unmarked" not in self._arm)
                self._loss().backward()

    def _loss(self) -> torch.Tensor:
        if self._work.kind == "exchange":
            touched: torch.Tensor = self._model(torch.ones(1))
            return touched.sum()
        ids = torch.arange(TOKENS).unsqueeze(0)
        loss: torch.Tensor = self._model(input_ids=ids, labels=ids).loss
        return loss

    def check(self) -> None:
        """The gradients are those of all microbatches, averaged over ranks."""
        for parameter in self._model.parameters() if self._work.kind == "exchange" else ():
            local = cast(Any, parameter.grad).to_local()
            assert bool((local == self._work.microbatches).all()), f"{self._arm}: {local.flatten()[:4]}"


def _units(work: Work, kept: bool = False) -> tuple[Any, list[nn.Module]]:
    gradient = torch.ones(work.side, work.side)
    model = nn.Sequential(*(Touched(gradient, kept) for _ in range(work.units)))
    return model, list(model)


def _demo() -> tuple[Any, list[nn.Module]]:
    from odc.blocks import blocks_of
    from odc.experiments.text.model import build_model, shipped_config

    model = build_model(shipped_config("qwen2-demo"), dtype=torch.float32)
    return model, blocks_of(model)


def parameter_bytes(work: Work) -> int:
    """Of the whole model."""
    model, _ = _demo() if work.kind == "demo" else _units(work)
    return sum(parameter.nbytes for parameter in model.parameters())


def build(rank: int, world: int, arm: str, work: Work) -> None:
    """Make an arm and run it once."""
    arms = _made.setdefault((arm, work.kind), Bare(work) if arm == "gloo" else Sharded(work, arm))
    arms.minibatch()
    if isinstance(arms, Sharded):
        arms.check()
    dist.barrier()


def measure(rank: int, world: int, arm: str, work: Work) -> tuple[float, float]:
    """Seconds of a minibatch from barrier to barrier, and seconds that this rank's threads computed."""
    made = _made[arm, work.kind]
    dist.barrier()
    computed, begin = time.process_time(), time.perf_counter()
    made.minibatch()
    dist.barrier()
    return time.perf_counter() - begin, time.process_time() - computed


def bytes_out(arm: str, work: Work, hosts: int) -> float:
    """What leaves a host in a minibatch, as a multiple of the parameters' bytes; all is fp32."""
    world, m = hosts * work.per_host, work.microbatches
    if "hybrid" in arm or arm.startswith("odc"):
        sums = 0.5 if "bf16" in arm else 1
        return (1 + sums) * (hosts - 1) / hosts  # an all-reduce's, or a shard once and a sum once
    syncs = m if arm == "gloo" else 1
    return (world - 1) / world * (2 * m + 2 * syncs)  # gloo reduces and scatters as it all-reduces
