"""Engines read memory of ranks on other hosts: `Engine` over TCP, `NixlEngine` over RDMA, `NvshmemEngine` on GPUs."""

from odc.net.engines.connections import Check, no_check
from odc.net.engines.engine import PURPOSE, Engine, Reading
from odc.net.engines.nixl import NixlEngine, choose_engine

__all__ = ["PURPOSE", "Check", "Engine", "NixlEngine", "Reading", "choose_engine", "no_check"]
