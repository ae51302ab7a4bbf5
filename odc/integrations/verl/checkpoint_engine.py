"""verl's checkpoint engine `odc`: rollout processes read the actor's published shards. For verl 0.9 only.

No rank gathers a parameter and none sends anything: a sync is a `publish()` on the actor's ranks, and every rollout
process reads what they published, through shared memory or from other hosts (`odc.handover`). Importing this module
registers the engine, which verl does with

    rollout.checkpoint_engine.backend=odc
    rollout.checkpoint_engine.custom_backend_module=odc.integrations.verl.checkpoint_engine

in the actor's ranks, in the rollout's processes and in the driver.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.model import convert_weight_keys
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from odc.errors import ConfigError, StaleVersionError, UnsupportedError
from odc.handover import Reader, version, weight_handle
from odc.integrations.verl.engine import actor_here

_ALIGNMENT = 16  # bytes, of a tensor's place among those of its group
_NO_ACTOR = "rollout.checkpoint_engine.backend=odc needs actor_rollout_ref.actor.strategy=odc"
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


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
        """Yield all weights by verl's names, on the CPU, in the actor's compute dtype; while those of a group are used
        the next group is read. A tensor is good until the second next group is read.

        Raises StaleVersionError if the actor has published anew meanwhile; else as `odc.handover.Reader.read`.
        """
        published = self._published
        if published is None:
            raise ConfigError("receive_weights() before init_process_group(): nothing is known of what is to be read")
        for name, tensor in _as_verl(published.whole, published):
            yield name, tensor
        reader = self._reader_of(published.handle)
        groups = groups_of(reader.shapes(), self._bucket)
        rooms = [torch.empty(max(map(bytes_of, groups)), dtype=torch.uint8) for _ in range(2)]

        def begin(number: int) -> asyncio.Task[dict[str, torch.Tensor]]:
            into = laid_out(groups[number], rooms[number % 2])
            return asyncio.create_task(asyncio.to_thread(_read, reader, into, published.version))

        following = begin(0)
        for number in range(len(groups)):
            tensors = await following
            if number + 1 < len(groups):
                following = begin(number + 1)
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


def groups_of(shapes: Shapes, nbytes: int) -> list[Shapes]:
    """The parameters in order, in groups of at most so many bytes, or of one parameter that is larger."""
    groups: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = []
    for name, one in shapes.items():
        if not groups or bytes_of({**groups[-1], name: one}) > nbytes:
            groups.append({})
        groups[-1][name] = one
    return list(groups)


def bytes_of(group: Shapes) -> int:
    """Of a room for the group, with the gaps between tensors."""
    sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in group.values())
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def laid_out(group: Shapes, room: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors of the group, one behind the other in `room` (uint8)."""
    found, at = {}, 0
    for name, (shape, dtype) in group.items():
        size = math.prod(shape) * dtype.itemsize
        found[name] = room[at : at + size].view(dtype).view(shape)
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    return found


def _read(reader: Reader, into: dict[str, torch.Tensor], wanted: int) -> dict[str, torch.Tensor]:
    """`into`, filled with one version; groups of several versions would make a mixture."""
    found, tensors = reader.read(into, at_least=wanted)
    if found != wanted:
        raise StaleVersionError(f"the actor has published version {found} while a rollout read version {wanted}")
    return tensors


def _as_verl(tensors: Mapping[str, torch.Tensor], published: Published) -> Iterator[tuple[str, torch.Tensor]]:
    """By the names under which verl's engines send weights, the experts of a layer one by one."""
    named = ((published.names[key], tensor) for key, tensor in tensors.items())
    return iter(unfuse_moe_params(named, published.model_type))
