"""An actor's weights as its ranks publish them, by the names under which verl's engines send weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from verl.utils.model import convert_weight_keys
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from odc.handover import Reader, read_groups, version, weight_handle
from odc.handover.groups import GROUP_BYTES


@dataclass(frozen=True)
class Published:
    """What a reader has to know of a sync.

    `handle` lets it read the weights (a password for them) from `version` on; `names` are those that verl gives to what
    the state dict holds; `whole` are, by the names of the state dict, the values that no rank shards (buffers).
    """

    handle: str
    version: int
    names: dict[str, str]
    whole: dict[str, torch.Tensor]
    model_type: str

    def as_verl(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of the state dict by verl's names, the experts of a layer one by one."""
        named = ((self.names[key], tensor) for key, tensor in tensors.items())
        return iter(unfuse_moe_params(named, self.model_type))


def published(engine: Any) -> Published:
    """What readers learn of the engine's weights, as they were published last."""
    module, state = engine.module, engine.module.state_dict()
    names = convert_weight_keys({key: key for key in state}, module)
    return Published(
        handle=weight_handle(module),
        version=version(module),
        names={key: name for name, key in names.items()},
        whole={key: value.cpu() for key, value in state.items() if not isinstance(value, DTensor)},
        model_type=engine.model_config.hf_config.model_type,
    )


class PublishedReader:
    """Reads what is published; it stays attached from sync to sync, until another handle comes."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._reader: tuple[str, Reader] | None = None  # and the handle that it was made of

    def read(
        self, learned: Published, nbytes: int, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights by verl's names, in the actor's compute dtype, on `device`, and on the CPU what no rank
        shards. A tensor is good until the next is asked for. Holds twice `nbytes`, and at least two parameters. Waits,
        and raises, as `read_groups`.
        """
        yield from learned.as_verl(learned.whole)
        for tensors in read_groups(self._attached(learned.handle, device), nbytes, learned.version, device=device):
            yield from learned.as_verl(tensors)

    def _attached(self, handle: str, device: torch.device | str) -> Reader:
        """A reader that maps by this device if it is a GPU, else by the current one."""
        if self._reader is None or self._reader[0] != handle:
            if self._reader is not None:
                self._reader[1].close()
            by = device if torch.device(device).type == "cuda" else None
            self._reader = handle, Reader(handle, timeout_s=self._timeout_s, device=by)
        return self._reader[1]


def published_here(engine: Any, reader: PublishedReader) -> Iterator[tuple[str, torch.Tensor]]:
    """Publish the engine's weights, then yield all of them as `PublishedReader.read`, in memory of their own, on the
    device of the engine.

    For a rollout beside the rank. Every rank of the engine calls it; nothing is published before the first weight is
    asked for, and none of the ranks may publish anew before all have read the last.
    """
    engine.module.publish()
    device = next(engine.module.parameters()).device
    for name, tensor in reader.read(published(engine), GROUP_BYTES, device):
        yield name, tensor.to(device, copy=True)  # rollouts of verl may keep a tensor while they ask for the next
