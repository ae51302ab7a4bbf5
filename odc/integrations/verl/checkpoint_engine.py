"""verl's checkpoint engine `odc`: rollout processes read the actor's published shards. For verl 0.9 only.

No rank gathers a parameter and none sends anything: a sync is a `publish()` on the actor's ranks, and every rollout
process reads what they published, through shared memory or from other hosts (`odc.handover`). Importing this module
registers the engine, which verl does with

    rollout.checkpoint_engine.backend=odc
    rollout.checkpoint_engine.custom_backend_module=odc.integrations.verl.checkpoint_engine

in the actor's ranks, in the rollout's processes and in the driver.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.model import convert_weight_keys
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from odc.errors import ConfigError, UnsupportedError
from odc.handover import Reader, read_groups, version, weight_handle
from odc.integrations.verl.engine import actor_here

_NO_ACTOR = "rollout.checkpoint_engine.backend=odc needs actor_rollout_ref.actor.strategy=odc"


@dataclass(frozen=True)
class Published:
    """What a rollout process has to know of a sync.

    `handle` lets it read the weights (a password for them) from `version` on; `names` are those that verl gives to what
    the state dict holds; `whole` are, by the names of the state dict, the values that no rank shards (buffers).
    """

    handle: str
    version: int
    names: dict[str, str]
    whole: dict[str, torch.Tensor]
    model_type: str


@CheckpointEngineRegistry.register("odc")
class OdcCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """On an actor's rank it publishes, in a rollout's process it reads; verl's `CheckpointEngineManager` calls both.

    Args:
        bucket_size: bytes that are read at once, but at least a whole parameter; a rollout process holds twice as many.
        is_master: of the actor's rank that answers for all.
        timeout_s: how long a rollout process waits for a rank that makes no progress.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_s: float = 600.0) -> None:
        self._bucket, self._is_master, self._timeout_s = bucket_size, is_master, timeout_s
        self._published: Published | None = None
        self._reader: tuple[str, Reader] | None = None  # and the handle that it was made of

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
        """Yield all weights by verl's names, on the CPU, in the actor's compute dtype. A tensor is good until the
        next is asked for. Waits, and raises, as `odc.handover.read_groups`.
        """
        published = self._published
        if published is None:
            raise ConfigError("receive_weights() before init_process_group(): nothing is known of what is to be read")
        for name, tensor in _as_verl(published.whole, published):
            yield name, tensor
        reader = self._reader_of(published.handle)
        for tensors in read_groups(reader, self._bucket, published.version):
            for name, tensor in _as_verl(tensors, published):
                yield name, tensor

    def _reader_of(self, handle: str) -> Reader:
        """The reader of the last sync, or a new one where the actor has another handle."""
        if self._reader is None or self._reader[0] != handle:
            if self._reader is not None:
                self._reader[1].close()
            self._reader = handle, Reader(handle, timeout_s=self._timeout_s)
        return self._reader[1]


def published(engine: Any) -> Published:
    """What rollout processes learn of the engine's weights, as they were published last."""
    module, state = engine.module, engine.module.state_dict()
    names = convert_weight_keys({key: key for key in state}, module)
    return Published(
        handle=weight_handle(module),
        version=version(module),
        names={key: name for name, key in names.items()},
        whole={key: value.cpu() for key, value in state.items() if not isinstance(value, DTensor)},
        model_type=engine.model_config.hf_config.model_type,
    )


def _refuse(engine: Any) -> None:
    refused = {
        "LoRA": hasattr(engine.module, "peft_config"),
        "quantization-aware training": getattr(engine, "_qat_enabled", False),
    }
    for what, there in refused.items():
        if there:
            raise UnsupportedError(f"rollout.checkpoint_engine.backend=odc does not export weights of {what}")


def _as_verl(tensors: Mapping[str, torch.Tensor], published: Published) -> Iterator[tuple[str, torch.Tensor]]:
    """By the names under which verl's engines send weights, the experts of a layer one by one."""
    named = ((published.names[key], tensor) for key, tensor in tensors.items())
    return iter(unfuse_moe_params(named, published.model_type))
