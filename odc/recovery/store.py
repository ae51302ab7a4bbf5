"""The job's store, as a process of its own: `python -m odc.recovery.store 29500`.

For launchers that host none: Slurm, Kubernetes, a loop of the shell (docs/launchers.md). It is started once for a job,
outlives all of its ranks, and is stopped by a signal when they have ended. Ranks find it by MASTER_ADDR and
MASTER_PORT, and wait for it.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

import torch.distributed as dist


def serve(port: int) -> None:
    """Host the store at a port of every interface until a signal ends the process."""
    stores: Any = dist
    store = stores.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    signal.pause()
    del store  # not before


if __name__ == "__main__":
    serve(int(sys.argv[1]))
