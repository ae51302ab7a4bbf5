"""verl's checkpoint engine `odc`: rollout processes read the actor's published shards. For verl 0.9 only.

No rank gathers a parameter and none sends anything: a sync is a `publish()` on the actor's ranks, and every rollout
process reads what they published, in memory that it maps or from other hosts (`odc.handover`). Importing this module
registers the engine, which verl does with

    rollout.checkpoint_engine.backend=odc
    rollout.checkpoint_engine.custom_backend_module=odc.integrations.verl.checkpoint_engine

in the actor's ranks, in the rollout's processes and in the driver.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from odc.errors import ConfigError, UnsupportedError
from odc.handover.groups import GROUP_BYTES
from odc.integrations.verl.engine import actor_here
from odc.integrations.verl.published import Published, PublishedReader, published

_NO_ACTOR = "rollout.checkpoint_engine.backend=odc needs actor_rollout_ref.actor.strategy=odc"


@CheckpointEngineRegistry.register("odc")
class OdcCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """On an actor's rank it publishes, in a rollout's process it reads; verl's `CheckpointEngineManager` calls both.

    Where the job packs what changes, a rollout's process keeps a copy of the shards on other hosts, see `Reader`.

    Args:
        bucket_size: bytes that are read at once, 64 MiB at most and at least a whole parameter; a rollout process holds
            twice as many, in CPU memory.
        is_master: of the actor's rank that answers for all.
        timeout_s: how long a rollout process waits for a rank that makes no progress.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_s: float = 600.0) -> None:
        self._bucket, self._is_master = min(bucket_size, GROUP_BYTES), is_master
        self._published: Published | None = None
        self._reader = PublishedReader(timeout_s)

    def prepare(self) -> Published | None:
        """On every rank of the actor: publish the weights; waits until every rank is done with what was published
        before. Elsewhere nothing. Returns None but on the master.

        Raises ConfigError if the actor's strategy is not odc; UnsupportedError for LoRA, and for verl's quantization.
        """
        engine = actor_here()
        if engine is None:
            if self._is_master:
                raise ConfigError(_NO_ACTOR)
            return None
        _refuse(engine)
        engine.module.publish()
        return published(engine) if self._is_master else None

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Published | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of `init_process_group`, by rank: none in the actor, and what is to be read in the rollout."""
        found = [one for one in metadata[:actor_wg_world_size] if one is not None]
        if not found:
            raise ConfigError(_NO_ACTOR)
        return {}, {"published": found[:1] * rollout_world_size}

    def init_process_group(self, published: Published | None = None) -> None:
        """Take what is to be read. There is no group: a reader asks nothing of the ranks."""
        self._published = published

    def finalize(self) -> None:
        """Nothing ends: a reader keeps its mappings for the next sync."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        """Nothing is sent; `weights`, which gathers a parameter when it is asked for one, is not asked."""
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield all weights by verl's names, in the actor's compute dtype. Beside a GPU each is there, in memory of its
        own, as verl hands on CUDA's handles; else it is on the CPU, and good until the next is asked for. Waits, and
        raises, as `odc.handover.read_groups`.
        """
        published = self._published
        if published is None:
            raise ConfigError("receive_weights() before init_process_group(): nothing is known of what is to be read")
        on_gpu = torch.cuda.is_available()
        for name, tensor in self._reader.read(published, self._bucket):
            yield name, tensor.cuda() if on_gpu else tensor


def _refuse(engine: Any) -> None:
    refused = {
        "LoRA": hasattr(engine.module, "peft_config"),
        "quantization-aware training": getattr(engine, "_qat_enabled", False),
    }
    for what, there in refused.items():
        if there:
            raise UnsupportedError(f"rollout.checkpoint_engine.backend=odc does not export weights of {what}")
