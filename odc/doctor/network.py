"""Probes of what joins hosts: interfaces, RDMA devices, NIXL, and which engine odc would read with here.

One host needs none of it. Nothing is sent: whether hosts reach each other, and how fast, only a run can tell
(docs/hosts.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from odc.doctor.finding import Finding, absent, broken, ok, version_of
from odc.errors import UnsupportedError, install
from odc.net.engines import choose_engine

_NIXL = ("nixl-cu13", "nixl-cu12")
_EXTRA = f"{install('nixl')}, which works without CUDA"
_TRANSPORTS = {"ib": "InfiniBand and RoCE", "ib_mlx5": "mlx5", "ib_efa": "EFA", "cuda": "device memory"}


def network(sys: Path = Path("/sys/class"), dev: Path = Path("/dev")) -> list[Finding]:
    """Interfaces that are up, RDMA devices, NIXL, and the engine that `Settings(engine="auto")` comes to."""
    up = [nic for nic in _names(sys / "net") if nic != "lo" and _read(sys / "net" / nic / "operstate") == "up"]
    said = ", ".join(f"{nic} ({_speed(sys / 'net' / nic)})" for nic in up)
    do = "nothing on one host; else bring one up"
    nics = ok("network", said, "network") if up else absent("network", "no interface but loopback is up", do, "network")
    return [nics, _rdma(sys / "infiniband", dev / "infiniband"), nixl(), _engine()]


def _rdma(adapters: Path, files: Path) -> Finding:
    rates = {name: _read(adapters / name / "ports" / "1" / "rate") or "rate unknown" for name in _names(adapters)}
    if not rates:
        do = (
            "nothing on one host; across hosts TCP is used, which is slow: see that /dev/infiniband is in the container"
        )
        return absent("RDMA", "no InfiniBand or RoCE device", do, "rdma")
    said = ", ".join(f"{name} ({rate})" for name, rate in rates.items())
    down = [name for name in rates if "ACTIVE" not in (_read(adapters / name / "ports" / "1" / "state") or "ACTIVE")]
    if down:
        return broken("RDMA", f"{said}; the port of {', '.join(down)} is not active", "see `ibstat`, the cable", "rdma")
    if not any(name.startswith("uverbs") for name in _names(files)):
        return broken("RDMA", f"{said}; {files} has no uverbs", "docker run --device=/dev/infiniband", "rdma")
    return ok("RDMA", said, "rdma")


def nixl() -> Finding:
    """NIXL's version, whether it loads, and for which transports its UCX was built."""
    found = next(((name, version) for name in _NIXL if (version := version_of(name))), None)
    if found is None:
        do = f"for InfiniBand, RoCE, EFA or device memory between hosts: {_EXTRA}; plain TCP needs nothing"
        return absent("NIXL", "not installed", do, "rdma")
    name, version = found
    built = transports(str(file) for file in metadata.files(name) or ())
    said = f"{name} {version}, UCX for TCP{''.join(f', {_TRANSPORTS[one]}' for one in built)}"
    if "ib" not in built:
        return broken("NIXL", said, f"pip install --force-reinstall {name}: PyPI's wheels have InfiniBand", "rdma")
    try:
        _load(name)
    except (ImportError, OSError) as error:
        return broken("NIXL", f"{said}; it does not load: {error}", f"reinstall {name}", "rdma")
    return ok("NIXL", said, "rdma")


def transports(files: Iterable[str]) -> list[str]:
    """The transports of `_TRANSPORTS` that UCX's modules among `files` serve."""
    names = {match[1] for file in files if (match := re.search(r"libuct_(\w+)\.so", file))}
    return [one for one in _TRANSPORTS if one in names]


def _load(package: str) -> None:
    import importlib

    importlib.import_module(f"{package.replace('-', '_')}._api")


def _engine() -> Finding:
    try:
        chosen = choose_engine("auto")
    except UnsupportedError as error:
        return broken("engine", str(error), _EXTRA, "network")
    why = {"sockets": "plain TCP; device memory goes through pinned memory", "nixl": "this host has RDMA"}[chosen]
    return ok("engine", f"{chosen} ({why}); every host of a job should say the same", "network")


def _speed(nic: Path) -> str:
    mbit = _read(nic / "speed")
    return f"{int(mbit) / 1000:g} Gbit/s" if mbit.isdecimal() else "speed unknown"


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
