"""Engines read memory of ranks on other hosts: `Engine` over TCP, `NixlEngine` over RDMA or from device memory."""

from odc.net.engines.connections import Check, no_check
from odc.net.engines.engine import PURPOSE, Engine
from odc.net.engines.nixl import NixlEngine, choose_engine, make_engine

__all__ = ["PURPOSE", "Check", "Engine", "NixlEngine", "choose_engine", "make_engine", "no_check"]
