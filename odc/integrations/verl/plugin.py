"""What verl loads through the entry point `verl.plugins`: importing this registers the engines and the platform "cpu".

verl logs a plugin that failed only at level DEBUG and continues without it; `odc doctor` checks whether this one works.
Importing verl's engines fixes its platform: next to a plugin that brings its own platform, leave this one out by
`VERL_USE_EXTERNAL_PLUGINS=<name of the other>`.
"""

from __future__ import annotations

from odc.integrations.verl import cpu_changes, cpu_platform, engine

__all__ = ["cpu_changes", "cpu_platform", "engine", "kinds"]

TESTED = "0.9"  # version of verl

cpu_changes.apply()


def kinds() -> list[str]:
    """The kinds of model for which verl's registry has strategy "odc" by now."""
    from verl.workers.engine.base import EngineRegistry

    return [kind for kind, known in EngineRegistry._engines.items() if "odc" in known]
