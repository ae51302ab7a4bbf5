"""The default process group of a generation, made such that the end of a rank holds no other up.

gloo connects two ranks in a wait that nothing but the group's timeout ends, half an hour. So making the group connects
none (TORCH_GLOO_LAZY_INIT); then a thread has all pairs connect, and is left behind if a rank ends meanwhile. Once two
ranks are connected, the end of one breaks the other's collective at once.
"""

from __future__ import annotations

import functools
import os
from typing import Any, cast

import torch
import torch.distributed as dist

from odc.deadlines import LOSS_POLL_S, Deadline
from odc.errors import PeerLostError, WaitTimeoutError
from odc.fsdp.rejoin import announce_rank
from odc.net.store import clone_of
from odc.recovery.generations import PREFIX, GenerationOver, Generations
from odc.worker import Job, in_background


def make_group(store: Any, generations: Generations) -> None:
    """Make the default process group of the generation that was entered, and wait until all its ranks are connected.

    Raises GenerationOver when the generation is given up meanwhile, PeerLostError if a connection fails, which is
    mostly the same, WaitTimeoutError after their `patience_s`.
    """
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    rank, world, stores = generations.rank, generations.world, cast(Any, dist)
    # A thread that is left behind may wait for a rank's address, and hold the connection until then.
    prefixed = stores.PrefixStore(f"{PREFIX}{generations.generation}", clone_of(store) or store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world)
    announce_rank(generations.patience_s)
    connected = Job(functools.partial(dist.all_to_all_single, torch.empty(world), torch.empty(world)))
    in_background("odc-connect", connected.run)
    deadline = Deadline(generations.patience_s)
    while not connected.over(LOSS_POLL_S):
        if generations.culprit() is not None:
            generations.leave()
            raise GenerationOver
        if deadline.passed():
            raise WaitTimeoutError(
                f"rank {rank}, in generation {generations.generation}, connecting to all ranks for torch's "
                f"collectives: it has not been done in {deadline.timeout_s:g} s"
            )
    try:
        connected.wait()
    except RuntimeError as error:
        raise PeerLostError(f"rank {rank}, connecting to all ranks for torch's collectives: {error}") from error
