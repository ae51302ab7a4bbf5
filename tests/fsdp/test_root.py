"""A root that is built while another rank is lost."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support.models import Case, build
from support.ranks import spawn_ranks
from support.silent import silent_once_a_rank_is_lost
from torch.distributed.device_mesh import init_device_mesh

from odc import Settings, fully_shard
from odc.errors import PeerLostError
from odc.fsdp import _torch_compat as compat


def build_over_a_silent_store(rank: int, world: int) -> None:
    settings = Settings(timeout_s=600.0)
    model: Any = build(fully_shard, Case(counts=((1, 1),)), init_device_mesh("cpu", (world,)), settings=settings)
    dist.barrier()
    if rank == 0:
        ended = pytest.raises(PeerLostError, match="rank 0, building a root: .* by rank 1: rank 1 died")
        with silent_once_a_rank_is_lost() as store, ended:
            patched = mock.patch.object(compat, "default_store", return_value=store)
            with patched:
                model.publish()
    dist.barrier()


def test_a_loss_ends_the_wait_of_a_root_for_a_silent_store() -> None:
    """As where the host of the store is cut off: this rank knows that before any call of the store ends."""
    with spawn_ranks(2, build_over_a_silent_store) as ranks:
        outcomes = ranks.wait()
    assert [(one.exit_code, one.error) for one in outcomes] == [(0, None)] * 2, outcomes[0].describe()
