"""Which engine reads from other hosts: NIXL where there is an RDMA device or device memory, else plain TCP."""

from __future__ import annotations

import logging

from odc.errors import UnsupportedError
from odc.runtime.engines.engine import Dial, Engine
from odc.runtime.engines.nixl import EXTRA, NixlEngine, installed, rdma_devices
from odc.runtime.engines.sockets import SocketEngine
from odc.settings import EngineName

_log = logging.getLogger(__name__)


def choose_engine(wanted: EngineName, *, device_memory: bool = False) -> EngineName:
    """The engine that `wanted` comes to on this host: "sockets" or "nixl".

    `device_memory` says that what is read lies on GPUs, which sockets cannot read. Raises UnsupportedError where the
    engine that is needed cannot work. Every host of a job should come to the same one.
    """
    if wanted == "sockets" and device_memory:
        raise UnsupportedError("Settings(engine='sockets') reads CPU memory only; device memory needs engine='nixl'")
    if wanted == "nixl" or device_memory:
        if installed() is None:
            raise UnsupportedError(f"reading from other hosts by NIXL, which is not installed here: {EXTRA}")
        return "nixl"
    devices = rdma_devices() if wanted == "auto" else []
    if devices and installed() is None:
        _log.warning("this host has RDMA (%s), but NIXL is not installed: plain TCP is used (%s)", devices[0], EXTRA)
    return "nixl" if devices and installed() is not None else "sockets"


def make_engine(
    wanted: EngineName, me: int, dial: Dial, timeout_s: float, address: str, *, device_memory: bool = False
) -> Engine:
    """The engine of rank `me` (global). `address` is this host's, and `dial` connects to other ranks."""
    if choose_engine(wanted, device_memory=device_memory) == "nixl":
        return NixlEngine(me, dial, timeout_s, address)
    return SocketEngine(me, dial, timeout_s)
