"""Probes of what joins hosts: interfaces, RDMA devices, NIXL, and which engine odc would read with here.

One host needs none of it. Nothing is sent: whether hosts reach each other, and how fast, only a run can show
(docs/hosts.md).
"""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from pathlib import Path

from odc.doctor.examination import Broken, Missing
from odc.net.engines import choose_engine
from odc.provenance import version_of

_TRANSPORTS = {"ib": "InfiniBand and RoCE", "ib_mlx5": "mlx5", "ib_efa": "EFA", "cuda": "device memory"}
_CLASS = Path("/sys/class")


def interfaces(sys_class: Path = _CLASS) -> str:
    """Interfaces that are up, with their speed."""
    up = []
    for nic in sorted((sys_class / "net").glob("*")):
        if nic.name != "lo" and _read(nic / "operstate") == "up":
            mbit = _read(nic / "speed")
            up.append(f"{nic.name} ({f'{int(mbit) / 1000:g} Gbit/s' if mbit.isdecimal() else 'speed unknown'})")
    if not up:
        raise Missing("no interface but loopback is up")
    return ", ".join(up)


def rdma(sys_class: Path = _CLASS, dev: Path = Path("/dev")) -> str:
    """RDMA devices, with their rate."""
    adapters = sorted((sys_class / "infiniband").glob("*"))
    if not adapters:
        raise Missing("no InfiniBand or RoCE device")
    rates = [f"{one.name} ({_read(one / 'ports' / '1' / 'rate') or 'rate unknown'})" for one in adapters]
    states = {one.name: _read(one / "ports" / "1" / "state") for one in adapters}
    down = [name for name, state in states.items() if state and "ACTIVE" not in state]
    if down:
        raise Broken(f"{', '.join(rates)}; the port of {', '.join(down)} is not active")
    if not list((dev / "infiniband").glob("uverbs*")):
        raise Broken(f"{', '.join(rates)}; {dev / 'infiniband'} has no uverbs")
    return ", ".join(rates)


def nixl() -> str:
    """NIXL's version, whether it loads, and for which transports its UCX was built."""
    name = next((one for one in ("nixl-cu13", "nixl-cu12") if version_of(one)), None)
    if name is None:
        raise Missing("not installed")
    modules = [re.search(r"libuct_(\w+)\.so", str(file)) for file in metadata.files(name) or ()]
    built = [text for one, text in _TRANSPORTS.items() if one in {module[1] for module in modules if module}]
    found = f"{name} {version_of(name)}, UCX for {', '.join(['TCP', *built])}"
    if _TRANSPORTS["ib"] not in built:
        raise Broken(f"{found}: not for InfiniBand, as PyPI's wheels are")
    try:
        importlib.import_module(f"{name.replace('-', '_')}._api")
    except (ImportError, OSError) as error:
        raise Broken(f"{found}; it does not load: {error}") from None
    return found


def engine() -> str:
    """The engine that `Settings(engine="auto")` comes to."""
    chosen = choose_engine("auto")
    why = {"sockets": "plain TCP; device memory goes through pinned memory", "nixl": "this host has RDMA"}[chosen]
    return f"{chosen} ({why}); every host of a job should have the same"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
