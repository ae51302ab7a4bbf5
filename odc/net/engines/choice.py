"""Which engine reads from other hosts: NIXL where there is an RDMA device, else plain TCP."""

from __future__ import annotations

import logging

from odc.errors import UnsupportedError
from odc.net.engines.engine import Dial, Engine
from odc.net.engines.nixl import EXTRA, NixlEngine, installed, rdma_devices
from odc.net.engines.sockets import SocketEngine
from odc.settings import EngineName, Settings

_log = logging.getLogger(__name__)


def choose_engine(wanted: EngineName) -> EngineName:
    """The engine that `wanted` comes to on this host: "sockets" or "nixl".

    Raises UnsupportedError where NIXL is wanted and not installed. Every host of a job should come to the same one.
    """
    if wanted == "nixl":
        if installed() is None:
            raise UnsupportedError(f"reading from other hosts by NIXL, which is not installed here: {EXTRA}")
        return "nixl"
    devices = rdma_devices() if wanted == "auto" else []
    if devices and installed() is None:
        _log.warning("this host has RDMA (%s), but NIXL is not installed: plain TCP is used (%s)", devices[0], EXTRA)
    return "nixl" if devices and installed() is not None else "sockets"


def make_engine(settings: Settings, me: int, dial: Dial, address: str) -> Engine:
    """The engine of rank `me` (global). `address` is this host's, and `dial` connects to other ranks."""
    if choose_engine(settings.engine) == "nixl":
        return NixlEngine(me, dial, settings.timeout_s, address, settings.lost_after_s)
    return SocketEngine(me, dial, settings.timeout_s, lost_after_s=settings.lost_after_s)
