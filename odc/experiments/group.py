"""A rank's process group, for as long as its part of a job takes.

Chose one order for all jobs: threads, group, the work, a barrier, odc's end, the group's end. The price is that a rank
whose work failed leaves without the barrier, and its peers learn of it from odc or from whoever started them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from odc.experiments.config import threads_per_rank


@contextmanager
def rank_group(ranks: int, timeout_s: float, backend: str = "gloo") -> Iterator[None]:
    """The process group of `ranks`, in a process that has the environment of `torchrun`; torch's threads are set.

    Every rank enters it. Who leaves it well waits for all others; after an error it is taken down at once.
    """
    from odc.fsdp import shutdown

    torch.set_num_threads(threads_per_rank(ranks))
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        yield
        dist.barrier()  # no rank takes the group down while another still writes
    finally:
        shutdown()
        dist.destroy_process_group()
