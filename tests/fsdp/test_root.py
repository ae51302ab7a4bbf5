"""A root that is built while another rank is lost, and one that a forked process uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.forked import answer_of_child
from support.models import Case, build, tokens
from support.ranks import RankPool, spawn_ranks
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


def runs_in_a_forked_child(rank: int, world: int) -> tuple[bool, str]:
    """Whether the model says the same before and after a child that ran it, and the child's error."""
    model: Any = build(fully_shard, Case(counts=((1,),)), init_device_mesh("cpu", (world,)))
    x = tokens(rank, 0, 0)
    with torch.no_grad():
        before = model(x)
    message = answer_of_child(lambda: f"computed {model(x)}")
    with torch.no_grad():
        return torch.equal(model(x), before), message


def test_a_forked_child_cannot_run_the_model(ranks: Callable[[int], RankPool]) -> None:
    """Its copy of the heap reads as zeros, and others would wait for it."""
    ((same, error),) = ranks(1).run(runs_in_a_forked_child)
    assert same
    assert error.startswith(
        "UnsupportedError: rank 0: a process that was forked from it, as a data loader's workers are, cannot run"
    )
