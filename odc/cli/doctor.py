"""`odc doctor`: does what is installed here work with odc?

Chose to import what it reports on over reading versions: a version says nothing of a build that cannot be loaded, and
verl hides a plugin that failed. The price is some seconds.
"""

from __future__ import annotations

import platform
from importlib.metadata import version

from odc.integrations.verl.status import plugin_status


def doctor() -> bool:
    """Print one line on each thing; whether none of them is broken (what is not installed is not broken)."""
    print(f"  ok       odc {version('odc-fsdp')} on Python {platform.python_version()}")
    found = [_torch(), plugin_status()]
    for good, line in found:
        print(f"{'  absent' if good is None else '  ok    ' if good else '  BROKEN'}   {line}")
    return all(good is not False for good, _ in found)


def _torch() -> tuple[bool, str]:
    try:
        import torch

        import odc.fsdp  # noqa: F401  (checks every private name of torch that odc uses)
    except Exception as error:
        return False, f"torch: {type(error).__name__}: {error}"
    return True, f"torch {torch.__version__}"
