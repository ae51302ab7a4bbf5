"""What verl loads through the entry point `verl.plugins`: importing this registers the engines and the platform "cpu".

Chose the entry point over `VERL_USE_EXTERNAL_MODULES`: an installed odc is found with nothing set. verl logs a plugin
that failed at level DEBUG only and goes on without it; `odc doctor` says what became of this one. The price: verl's
engines are imported, and by that its platform is fixed, as soon as verl is. Beside a plugin that brings a platform of
its own, leave this one out: `VERL_USE_EXTERNAL_PLUGINS=<name of the other>`.
"""

from __future__ import annotations

from odc.integrations.verl import cpu_platform, engine

__all__ = ["cpu_platform", "engine", "kinds"]

TESTED = "0.9"  # versions of verl


def kinds() -> list[str]:
    """The kinds of model for which verl has strategy "odc" by now, by looking into its registry."""
    from verl.workers.engine.base import EngineRegistry

    return [kind for kind, known in EngineRegistry._engines.items() if "odc" in known]
