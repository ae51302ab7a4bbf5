"""Which heap a root gets: by the device its mesh is on.

Chose the mesh's device type as the only thing that decides, as it decides for FSDP2: there is no setting to get wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from odc.errors import UnsupportedError
from odc.fsdp import _torch_compat as compat
from odc.memory import ShmHeap, SymmetricHeap
from odc.runtime import Geometry, Rendezvous
from odc.settings import Settings


def open_heap(
    identity: str,
    geometry: Geometry,
    rendezvous: Rendezvous,
    settings: Settings,
    groups: Sequence[compat.FSDPParamGroup],
    state: compat.FSDPState,
) -> SymmetricHeap:
    """An unsealed heap for a root.

    Args:
        identity: of the root, the same on every rank.
        geometry: who stands where.
        rendezvous: attaches the root to its peers.
        settings: of the root.
        groups: every unit of the root.
        state: of the root module, initialised.

    Raises:
        UnsupportedError: a mesh over which torch cannot map device memory, or units on several devices.
    """
    host = ShmHeap(identity, geometry.ranks, geometry.me, rendezvous.connect, settings.timeout_s)
    device = compat.device_of(groups[0])
    for group in groups:
        if compat.device_of(group) != device:
            name = compat.unit_name(group)
            raise UnsupportedError(f"unit {name!r} is on {compat.device_of(group)}, the first unit on {device}")
    if device.type == "cpu":
        return host
    process_group = compat.process_group_of(groups[0])
    if process_group is None:
        raise UnsupportedError(
            f"no process group has exactly the ranks {geometry.ranks} of the mesh, in this order: on CUDA a mesh is "
            "1-D, or 2-D over the whole world"
        )
    from odc.memory.cuda import CudaHeap, CudaLanes

    lanes = CudaLanes(device, compat.lane_streams(state))
    return CudaHeap(host, device, lanes, process_group, rendezvous.meet)
