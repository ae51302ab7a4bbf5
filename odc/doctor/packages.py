"""Probes of what is installed: system, torch, odc's extras, verl's plugin."""

from __future__ import annotations

import platform
import re
from importlib import metadata

from odc.doctor.examination import Broken, Missing
from odc.doctor.requirements import packages_of, version_tuple
from odc.provenance import version_of


def system() -> str:
    """Operating system, kernel and Python."""
    found = f"{platform.system()} {platform.release()}, Python {platform.python_version()}, {platform.machine()}"
    if platform.system() != "Linux" or version_tuple(platform.release()) < (5, 3):
        raise Broken(found)
    return found


def torch_itself() -> str:
    """The version of torch, of which odc must know the private names."""
    try:
        import torch
    except ImportError as error:
        raise Missing(f"does not import: {error}") from None
    try:
        import odc.fsdp  # noqa: F401
    except ImportError as error:
        raise Broken(str(error)) from None
    if not torch.distributed.is_gloo_available():
        raise Broken(f"{torch.__version__} is built without gloo")
    return torch.__version__


def extra(name: str) -> str:
    """The packages of an extra; only lower bounds are checked."""
    lacking = []
    for package, condition in packages_of(name):
        have, least = version_of(package), re.search(r">=\s*([\w.]+)", condition)
        if have is None:
            lacking.append(f"{package} is not installed")
        elif least and version_tuple(have) < version_tuple(least[1]):
            lacking.append(f"{package} {have} is older than {least[1]}")
    if lacking:
        raise Missing(", ".join(lacking))
    return ", ".join(package for package, _ in packages_of(name))


def verl_plugin() -> str:
    """Whether verl would find odc's plugin and load it; verl itself goes on without one that fails."""
    verl = version_of("verl")
    if verl is None:
        raise Missing("verl is not installed")
    ours = [one for one in metadata.entry_points(group="verl.plugins") if one.value.split(".")[0] == "odc"]
    if not ours:
        raise Missing(f"verl {verl} is there, odc's plugin is not registered")
    try:
        plugin = ours[0].load()
        kinds = " and ".join(plugin.kinds())
    except Exception as error:
        raise Broken(f"{ours[0].value} does not load: {type(error).__name__}: {error} (verl {verl})") from None
    tested = "" if verl.startswith(f"{plugin.TESTED}.") else f" (tested with {plugin.TESTED} only)"
    return f"verl {verl}{tested}: strategy odc for {kinds}"
