"""Probes of what is installed: system, torch, odc's extras (as its installed metadata lists them), verl's plugin."""

from __future__ import annotations

import platform
import re
from importlib import metadata

from odc.doctor.finding import Finding, absent, broken, ok, version_of, version_tuple
from odc.errors import install

_DISTRIBUTION = "odc-fsdp"
_GROUP = "verl.plugins"
_DEVELOPERS = frozenset({"test", "lint", "dev"})
_NAME = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?\s*([^;]*)(?:;\s*(.*))?$")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


def system() -> list[Finding]:
    """Operating system, kernel and Python."""
    said = f"{platform.system()} {platform.release()}, Python {platform.python_version()}, {platform.machine()}"
    if platform.system() != "Linux":
        return [broken("system", said, "odc runs on Linux only (memfd, pidfd, abstract sockets)")]
    if version_tuple(platform.release()) < (5, 3):
        return [broken("system", said, "a kernel of 5.3 or newer (pidfd_open)")]
    return [ok("system", said)]


def torch_itself() -> list[Finding]:
    """torch, and whether odc knows the private names of this version."""
    try:
        import torch
    except ImportError as error:
        return [absent("torch", f"does not import: {error}", "pip install 'torch>=2.11,<2.16'")]
    except OSError as error:  # a shared library of its
        return [broken("torch", f"does not load: {error}", "reinstall torch")]
    try:
        import odc.fsdp  # noqa: F401
    except ImportError as error:
        return [broken("torch", str(error), "pip install 'torch>=2.11,<2.16'")]
    if not torch.distributed.is_gloo_available():
        return [broken("torch", f"{torch.__version__} is built without gloo", "a torch built with gloo, as wheels are")]
    return [ok("torch", torch.__version__)]


def extras() -> list[Finding]:
    """Whether each extra of odc has everything that it names, new enough."""
    try:
        requires = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        do = "pip install -e . in the checkout"
        return [absent("odc-fsdp", "runs from source, not installed: extras and plugins are unknown", do, "verl")]
    return [_extra(name, wanted) for name, wanted in by_extra(requires).items() if name not in _DEVELOPERS]


def names_of_extras() -> list[str]:
    """The installed odc's extras, without those for developers."""
    try:
        return [name for name in by_extra(metadata.requires(_DISTRIBUTION) or []) if name not in _DEVELOPERS]
    except metadata.PackageNotFoundError:
        return []


def by_extra(requires: list[str]) -> dict[str, list[tuple[str, str]]]:
    """{extra: [(package, condition)]} from lines of metadata; extras within extras are resolved."""
    direct: dict[str, list[tuple[str, str]]] = {}
    nested: dict[str, list[str]] = {}
    for line in requires:
        match = _NAME.match(line)
        of = _EXTRA.search(match[4] or "") if match else None
        if match is None or of is None:
            continue
        extra, package, inner, condition = of[1], match[1], match[2], match[3]
        direct.setdefault(extra, [])
        if package.lower().replace("_", "-") == _DISTRIBUTION:
            nested.setdefault(extra, []).extend(word.strip() for word in (inner or "").split(","))
        else:
            direct[extra].append((package, condition.strip()))

    def whole(extra: str, seen: frozenset[str]) -> list[tuple[str, str]]:
        more = [one for name in nested.get(extra, ()) if name not in seen for one in whole(name, seen | {name})]
        return [*direct.get(extra, ()), *more]

    return {extra: whole(extra, frozenset({extra})) for extra in direct}


def _extra(name: str, wanted: list[tuple[str, str]]) -> Finding:
    missing = [text for package, condition in wanted if (text := _lacks(package, condition))]
    if missing:
        return absent(f"extra {name}", ", ".join(missing), install(name), name)
    return ok(f"extra {name}", ", ".join(package for package, _ in wanted), name)


def _lacks(package: str, condition: str) -> str:
    """What is wrong with a package, or nothing; only lower bounds are checked."""
    have = version_of(package)
    if have is None:
        return f"{package} is not installed"
    least = re.search(r">=\s*([\w.]+)", condition)
    if least and version_tuple(have) < version_tuple(least[1]):
        return f"{package} {have} is older than {least[1]}"
    return ""


def verl_plugin() -> list[Finding]:
    """Whether verl would find odc's plugin and load it; verl itself goes on without one that fails."""
    ours = [entry for entry in metadata.entry_points(group=_GROUP) if entry.value.split(".")[0] == "odc"]
    verl = version_of("verl")
    if verl is None:
        return [absent("verl plugin", "verl is not installed", "for reinforcement learning: pip install verl", "verl")]
    if not ours:
        do = f"pip install -e . in the checkout (an entry point of group {_GROUP} comes with it)"
        return [absent("verl plugin", f"verl {verl} is there, odc's plugin is not registered", do, "verl")]
    try:
        plugin = next(entry.load() for entry in ours)
        kinds = " and ".join(plugin.kinds())
    except Exception as error:
        said = f"{ours[0].value} does not load: {type(error).__name__}: {error}"
        return [broken("verl plugin", said, f"a version of verl that this odc knows; verl is {verl}", "verl")]
    tested = "" if verl.startswith(f"{plugin.TESTED}.") else f" (tested with {plugin.TESTED} only)"
    return [ok("verl plugin", f"verl {verl}{tested}: strategy odc for {kinds}", "verl")]
