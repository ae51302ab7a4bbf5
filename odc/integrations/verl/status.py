"""Whether verl has loaded odc's plugin, for `odc doctor`; by itself `python -m odc.integrations.verl.status`.

Chose to import verl and look into its registries over looking at what is installed: verl goes on without a plugin that
failed and says so at level DEBUG only. The price is the seconds that importing verl takes.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version

_TESTED = "0.9"


def plugin_status() -> tuple[bool | None, str]:
    """Whether `strategy=odc` works in verl here, and one line on it: versions, or what is wrong and what to do.

    None where verl is not installed.
    """
    try:
        found = version("verl")
    except PackageNotFoundError:
        return None, "verl is not installed: pip install 'odc-fsdp[verl]'"
    if not any(point.name == "odc" for point in entry_points(group="verl.plugins")):
        return False, f"verl {found}: odc is on the path but not installed, so verl cannot find its plugin"
    try:
        importlib.import_module("verl")
        importlib.import_module("odc.integrations.verl.plugin")  # raises again what verl has swallowed
        from verl.workers.engine.base import EngineRegistry

        engines = [kind for kind, known in EngineRegistry._engines.items() if "odc" in known]
    except Exception as error:
        return False, f"verl {found}: the plugin failed: {type(error).__name__}: {error}"
    tested = "" if found.startswith(f"{_TESTED}.") else f" (tested with {_TESTED} only)"
    return True, f"verl {found}{tested}: strategy odc for {' and '.join(engines)}"


if __name__ == "__main__":
    loaded, line = plugin_status()
    print(line)
    sys.exit(not loaded)
