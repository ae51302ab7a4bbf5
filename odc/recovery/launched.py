"""What a program with `odc.Recovery` has from its launcher: a place, and a store that outlives every rank."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from odc.errors import ConfigError, UnsupportedError
from odc.launchers import LAST_PORT


def launched_place() -> tuple[int, int]:
    """(this process's rank as the launcher counts, how many it counts); ConfigError without such numbers."""
    try:
        place, places = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise ConfigError(f"odc.Recovery needs torchrun's variables RANK and WORLD_SIZE ({error})") from error
    if not 0 <= place < places:
        raise ConfigError(f"RANK={place} must be from 0 to {places - 1}, since WORLD_SIZE={places}")
    return place, places


def launchers_store(timeout_s: float) -> Any:
    """A client of the launcher's store; UnsupportedError where rank 0 would host it, ConfigError without an address,
    or where no port has that number.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise UnsupportedError(
            "rank 0 would host the job's store, which ends with it: start the ranks by a launcher that hosts it "
            "(torchrun, odc train), start one by `python -m odc.recovery.store` (docs/launchers.md), or give "
            "odc.Recovery(store=...) one that outlives every rank"
        )
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise ConfigError(f"odc.Recovery needs torchrun's variables MASTER_ADDR and MASTER_PORT ({error})") from error
    if not 0 < port <= LAST_PORT:
        raise ConfigError(f"MASTER_PORT={port} must be from 1 to {LAST_PORT}")
    stores: Any = dist
    return stores.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))
