"""Engines read memory of ranks on other hosts: `sockets` over plain TCP, `nixl` over RDMA or from device memory."""

from odc.runtime.engines.choice import choose_engine, make_engine
from odc.runtime.engines.engine import PURPOSE, Dial, Engine
from odc.runtime.engines.nixl import NixlEngine
from odc.runtime.engines.sockets import SocketEngine

__all__ = ["PURPOSE", "Dial", "Engine", "NixlEngine", "SocketEngine", "choose_engine", "make_engine"]
