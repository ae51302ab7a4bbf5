"""What a command takes from torchrun, where that started it."""

from __future__ import annotations

import os
from typing import Any

from odc.errors import ConfigError


def under_torchrun() -> bool:
    """Whether torchrun started this process as one rank."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def given_by_torchrun(given: dict[str, Any]) -> dict[str, Any]:
    """Fields of a job that torchrun sets: the ranks, and the ranks of a node, where `given` has none."""
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return {"ranks": world} | ({"per_node": local} if 1 < local < world and "per_node" not in given else {})


def refuse_torchrun(what: str) -> None:
    """Raise ConfigError under torchrun."""
    if under_torchrun():
        raise ConfigError(f"{what} starts its own ranks, on one host; start it without torchrun")
