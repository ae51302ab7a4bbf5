"""The arms: what a minibatch is planned as, how the model is sharded, and how the ranks run it.

Chose to keep balancing (which plan) apart from transport (who communicates when), so that a comparison says which of
the two made the difference:

* `fsdp2`: LB-Micro; torch's collectives as in ZeRO-3: gather in forward and backward, reduce after every microbatch.
* `fsdp2-resident`: LB-Mini; torch's collectives, but parameters stay gathered and gradients whole for a minibatch.
* `odc-equal`: LB-Micro, on demand.
* `odc`: LB-Mini, on demand.
* `odc-dynamic`: LB-Dynamic, on demand: one queue, each rank claims the next microbatch when it is free.

`fsdp2` reduces after every microbatch, as torchtitan and verl do: deferring it (`set_requires_gradient_sync(False)`)
keeps whole gradients on every rank, which gives up what ZeRO-3 is for. That deferral is `fsdp2-resident`, which then
needs no communication between the first forward and the last backward, at the price of a whole model and a whole
gradient per rank. It needs at least one microbatch on every rank.

Where ranks meet at every microbatch, a rank with fewer of them runs zero-weight dummies up to the maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from odc.balance import Cost, Plan, lb_dynamic, lb_micro, lb_mini, queue_of
from odc.errors import ConfigError
from odc.settings import Settings
from odc.train.config import ArmName

Balance = Literal["lb_micro", "lb_mini", "lb_dynamic"]
Transport = Literal["collectives", "resident", "on demand"]
_POLICIES: dict[Balance, Callable[..., Plan]] = {"lb_micro": lb_micro, "lb_mini": lb_mini, "lb_dynamic": lb_dynamic}


@dataclass(frozen=True)
class Arm:
    """One way to run a minibatch; see the module.

    Args:
        name: as in tables and JSON.
        balance: the planner, "lb_micro" (equal counts), "lb_mini", or "lb_dynamic" (a queue).
        transport: who communicates when.
    """

    name: ArmName
    balance: Balance
    transport: Transport

    def plan(self, lengths: Sequence[int], ranks: int, max_tokens: int, cost: Cost, seed: int) -> Plan:
        """The plan of one minibatch, the same on every rank without communication."""
        return _POLICIES[self.balance](lengths, ranks, max_tokens, cost=cost, seed=seed)

    @property
    def dynamic(self) -> bool:
        """Whether ranks claim microbatches from a queue; a plan then only predicts who computes what."""
        return self.balance == "lb_dynamic"

    def loads(self, plan: Plan, rank: int) -> list[tuple[list[int], float]]:
        """(sample indices, predicted cost) of each microbatch that a rank builds.

        It computes them too, unless the arm is dynamic: then they are dealt like samples to data loaders, one after
        the other, so that every rank holds as many.
        """
        if self.dynamic:
            return queue_of(plan)[rank :: len(plan.ranks)]
        return [(mb, cost) for mb, cost in zip(plan.ranks[rank], plan.costs[rank], strict=True) if mb]

    def counts(self, plan: Plan) -> list[int]:
        """Microbatches each rank runs, dummies included; of a dynamic arm, is predicted to run."""
        own = [sum(1 for microbatch in microbatches if microbatch) for microbatches in plan.ranks]
        if self.transport == "collectives":
            return [max(own)] * len(own)
        if self.transport == "resident":
            return [max(1, count) for count in own]
        return own

    def predicted_bubble(self, plan: Plan) -> float:
        """The plan's own prediction, by its cost model, for how often the ranks of this arm meet."""
        return plan.bubble_per_microbatch if self.transport == "collectives" else plan.bubble

    def shard(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        settings: Settings,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        """Shards each block and then the model, in place, over the world. Every rank calls it; a mesh may be made.

        Args:
            model: on `device`.
            blocks: of it, in order.
            settings: of the odc arms.
            device: type of the mesh's devices. Said, because torch's default is a GPU wherever there is one.
            options: for `fully_shard`.
        """
        options["mesh"] = init_device_mesh(device, (dist.get_world_size(),))
        if self.transport == "on demand":
            from odc.fsdp import fully_shard as on_demand

            for block in blocks:
                on_demand(block, settings=settings, **options)
            on_demand(model, settings=settings, **options)
            return
        from torch.distributed.fsdp import fully_shard

        from odc.train.collectives import record_collectives

        for module in (*blocks, model):
            if self.transport == "resident":
                fully_shard(module, reshard_after_forward=False, **options)
            else:
                fully_shard(module, **options)
        if device == "cpu":  # elsewhere the processor sees only when they are asked for
            record_collectives(model)

    def run(self, model: nn.Module, count: int, backward: Callable[[int], None]) -> None:
        """Calls `backward(m)` for each microbatch m and leaves complete gradients in `.grad`; meets the other ranks."""
        with self._minibatch(model):
            for m in range(count):
                if self.transport == "resident":
                    _mark(model, last=m == count - 1)
                backward(m)
                if self.transport == "resident" and m < count - 1:
                    _forget_order(model)

    def run_queue(
        self,
        model: nn.Module,
        mine: Sequence[Mapping[str, Tensor]],
        costs: Sequence[float],
        backward: Callable[[int, int, Mapping[str, Tensor]], None],
    ) -> None:
        """Like `run`, for a dynamic arm: offers `mine` to all ranks and computes what this rank claims.

        Calls `backward(m, number, tensors)` for its m-th microbatch, which stands at place `number` in the queue.
        """
        with self._minibatch(model):
            claims = cast(Any, model).claim(mine, costs)
            for m, tensors in enumerate(claims):
                backward(m, claims.number, tensors)

    def _minibatch(self, model: nn.Module) -> AbstractContextManager[None]:
        if self.transport == "on demand":
            return cast("AbstractContextManager[None]", cast(Any, model).minibatch())
        return nullcontext()


def _mark(model: Any, *, last: bool) -> None:
    """Between the first forward and the last backward nothing is gathered, reduced or given up."""
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)
    model.set_reshard_after_backward(last)


def _forget_order(model: Any) -> None:
    """Has the last backward prefetch by its own forward.

    torch forgets the order of forwards only after a last backward. With an earlier microbatch still in it, the first
    block's backward would gather the last one again, which it has just given up: on ranks with several microbatches
    only, and the others never come.
    """
    from odc.fsdp import _torch_compat as compat

    compat.clear_forward_order(compat.state_of(model))


ARMS: dict[ArmName, Arm] = {
    "fsdp2": Arm("fsdp2", "lb_micro", "collectives"),
    "fsdp2-resident": Arm("fsdp2-resident", "lb_mini", "resident"),
    "odc-equal": Arm("odc-equal", "lb_micro", "on demand"),
    "odc": Arm("odc", "lb_mini", "on demand"),
    "odc-dynamic": Arm("odc-dynamic", "lb_dynamic", "on demand"),
}


def arm_named(name: str) -> Arm:
    """The arm called `name`; raises `ConfigError` listing the names."""
    if name not in ARMS:
        raise ConfigError(f"there is no arm {name!r}; there are {', '.join(ARMS)}")
    return ARMS[name]
