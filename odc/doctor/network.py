"""Probe of the network: interfaces that are up, RDMA devices, and the library that would use them.

Chose to read /sys over running tools: `ibv_devinfo` and `ip` are missing in most containers, /sys is not.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from odc.doctor.finding import Finding, absent, ok

_NIXL = ("nixl", "nixl-cu13", "nixl-cu12")


def network(sys: Path = Path("/sys/class")) -> list[Finding]:
    """What could join this host to others; odc needs none of it on one host."""
    up = [nic for nic in sorted(_names(sys / "net")) if nic != "lo" and _read(sys / "net" / nic / "operstate") == "up"]
    said = ", ".join(f"{nic} ({_speed(sys / 'net' / nic)})" for nic in up)
    found = [
        ok("network", said, "network")
        if up
        else absent("network", "no interface but loopback is up", "nothing on one host; else bring one up", "network")
    ]
    rdma = sorted(_names(sys / "infiniband"))
    if rdma:
        ports = [
            f"{name} ({_read(sys / 'infiniband' / name / 'ports' / '1' / 'rate') or 'rate unknown'})" for name in rdma
        ]
        found.append(ok("RDMA", ", ".join(ports), "network"))
    else:
        do = (
            "nothing on one host; across hosts TCP is used, which is slow: see that /dev/infiniband is in the container"
        )
        found.append(absent("RDMA", "no InfiniBand or RoCE device", do, "rdma"))
    return [*found, _nixl()]


def _nixl() -> Finding:
    for package in _NIXL:
        try:
            return ok("NIXL", f"{package} {metadata.version(package)}", "network")
        except metadata.PackageNotFoundError:
            continue
    return absent(
        "NIXL", "not installed", "for ranks on several hosts: pip install nixl-cu13 (works without CUDA)", "network"
    )


def _speed(nic: Path) -> str:
    mbit = _read(nic / "speed")
    return f"{int(mbit) / 1000:g} Gbit/s" if mbit.isdigit() else "speed unknown"


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
