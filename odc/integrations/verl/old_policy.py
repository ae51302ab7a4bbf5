"""The old policy of verl's trainers with rollouts beside them: weights that the actor's ranks keep and load again.

With `trainer.v1.trainer_mode=separate_async` an actor takes several steps between two syncs, and all of them compare
with the policy that the rollouts have. verl 0.9's `DetachActorWorker` keeps and loads weights of strategies that it
knows by name, so it has to learn "odc".
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from odc.fsdp import reshard_all

_WORKERS = "verl.experimental.separation.engine_workers"


def teach_worker() -> None:
    """Let `DetachActorWorker` use the functions below for strategy odc, if this process has one. Idempotent."""
    workers = sys.modules.get(_WORKERS)
    if workers is None or hasattr(workers.DetachActorWorker._get_strategy_handlers, "__wrapped__"):
        return
    theirs = workers.DetachActorWorker._get_strategy_handlers

    @functools.wraps(theirs)
    def handlers(self: Any) -> Any:
        return (keep, load) if self.config.actor.strategy == "odc" else theirs(self)

    workers.DetachActorWorker._get_strategy_handlers = handlers


@torch.no_grad()
def keep(module: Any) -> dict[str, torch.Tensor]:
    """A copy of this rank's shards by name, on the CPU."""
    return {name: shard.clone().cpu() for name, shard in _shards(module)}


@torch.no_grad()
def load(module: Any, kept: Mapping[str, torch.Tensor]) -> None:
    """Bring back what `keep` returned. Every rank calls it, between minibatches.

    It publishes, and waits as `publish()` does: an inference that follows must not read the weights of before.
    """
    for name, shard in _shards(module):
        shard.copy_(kept[name])
    module.publish()


def _shards(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's, by name. An inference may have left whole parameters in their place, which are given up."""
    reshard_all(module)
    for name, parameter in module.named_parameters():
        yield name, parameter.to_local() if isinstance(parameter, DTensor) else parameter
