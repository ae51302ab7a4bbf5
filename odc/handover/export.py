"""The job's side of weight export: make the weight handle, and report which version is published.

Any one rank can make the handle, from what every rank has announced in the job's store, so no rank waits for another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from odc.errors import UnsupportedError
from odc.handover.handle import PublishedParameter, PublishedUnit, ShardOwner, WeightHandle
from odc.protocol import HeapLayout
from odc.runtime import reading_token

if TYPE_CHECKING:
    from odc.fsdp import Root


def weight_handle(model: Any) -> str:
    """Text with which a process outside the job can read the weights of `model` (`odc.handover.Reader`): one of this
    user on the ranks' hosts, and any on other hosts, if the job runs on several or has `Settings(address=...)`.

    `model` is a root of `odc.fully_shard`, not inside a forward or backward. Call it on one rank or on several; it is
    not a collective. It waits until every rank of its replica has run the model once or entered `minibatch()`, so do
    not call it where the other ranks wait for this one. Under hybrid sharding its readers read the replica of the rank
    that made it. The text is a password for the weights: keep it private.

    Raises UnsupportedError if a parameter is sharded by tensor parallelism as well, or lies in NVSHMEM's memory;
    WaitTimeoutError or PeerLostError if a rank did not start.
    """
    from odc.fsdp import root_of  # not needed by readers, and slow to load

    root = root_of(model)
    root_layout, grid = root.layout, root.grid
    if not root_layout.exports:
        raise UnsupportedError(
            f"rank {grid.rank}: weights in NVSHMEM's memory cannot be exported, which maps it for its own ranks alone; "
            "leave out Settings(memory='nvshmem')"
        )
    names = _state_names(model, root)
    heap, owners, network = root_layout.heap, [], root.member.network
    rendezvous = root.member.rendezvous
    for member in grid.shard_group:  # this rank's replica; under hybrid sharding all publish the same
        announced = rendezvous.announced(member)
        rank = grid.ranks[member]
        listener = None if network is None else network.address_of(rank, rendezvous.check)
        owners.append(
            ShardOwner(rank, announced["address"], reading_token(announced["token"]), announced["host"], listener)
        )
    parameters = tuple(_parameters(root, root_layout, names))
    parts, (words, board) = heap.parts(), heap.place("board")
    exported = {name for parameter in parameters for name in parameter.names}
    return WeightHandle(
        root=root.identity,
        owners=tuple(owners),
        parameters=parameters,
        board=board,
        reason=heap.place("reason")[1],
        buffers=root_layout.buffers,
        nbytes=parts[words].numel(),
        device_bytes=parts[""].numel() if words else 0,
        digest=heap.digest,
        left_out=tuple(name for name in model.state_dict() if name not in exported),
        secret="" if network is None else network.export_secret(root.identity).hex(),
        units=published_units(root_layout),
        versions=heap.place("versions")[1] if root_layout.says_changes else 0,
        kernels=heap.lanes.asynchronous,
        words=words,
    ).to_json()


def version(model: Any) -> int:
    """The newest version that this rank has published; readers get it once every rank has published it.

    Versions count minibatches, evaluations and calls of `publish()`, from 1. A version is published when a minibatch
    begins, or at once by `model.publish()`.
    """
    from odc.fsdp import root_of

    return root_of(model).minibatch.epoch


def _state_names(model: Any, root: Root) -> dict[int, list[str]]:
    """Names in the state dict, by `id` of the sharded parameter."""
    names: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(name)
    missing = {id(param.parameter) for group in root.groups for param in group.odc_params} - names.keys()
    if missing:
        raise UnsupportedError(f"{len(missing)} sharded parameters are not in the model's state dict under any name")
    return names


def _parameters(root: Root, layout: HeapLayout, names: dict[int, list[str]]) -> list[PublishedParameter]:
    found = []
    for group, unit in zip(root.groups, layout.units, strict=True):
        region = layout.heap.layout.offset(f"published/{unit.index}")
        for param, spec in zip(group.odc_params, unit.params, strict=True):
            if param.shape != param.parameter.shape:
                raise UnsupportedError(
                    f"{spec.name} is sharded by tensor parallelism too; weight export reads only whole parameters"
                )
            found.append(
                PublishedParameter(
                    names=tuple(names[id(param.parameter)]),
                    shape=tuple(torch.Size(param.shape)),
                    dtype=str(spec.dtype).removeprefix("torch."),
                    shard_dim=param.shard_dim,
                    shard_numel=spec.numel,
                    offset=region + spec.published_offset,
                    buffer_bytes=layout.buffer_offset(unit, 1),
                    unit=unit.index,
                )
            )
    return found


def published_units(layout: HeapLayout) -> tuple[PublishedUnit, ...]:
    """The units, where readers may read what has changed of them; else none."""
    if not layout.says_changes:
        return ()
    place = layout.heap.layout.offset
    return tuple(
        PublishedUnit(place(f"published/{unit.index}"), unit.published_bytes, place(f"changes/{unit.index}"))
        for unit in layout.units
    )
