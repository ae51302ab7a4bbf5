"""Engines read memory of ranks on other hosts: `sockets` over plain TCP, `nixl` over RDMA or from device memory."""

from odc.net.engines.choice import choose_engine, make_engine
from odc.net.engines.engine import PURPOSE, Dial, Engine
from odc.net.engines.nixl import NixlEngine
from odc.net.engines.sockets import SocketEngine

__all__ = ["PURPOSE", "Dial", "Engine", "NixlEngine", "SocketEngine", "choose_engine", "make_engine"]
