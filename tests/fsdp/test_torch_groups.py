"""Process groups that are dropped while ranks that live wait in them, and have sent what no rank receives."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from odc.experiments.launch import launch
from odc.fsdp import default_store
from odc.fsdp._torch_groups import drop_groups, gloo_groups


def leave_what_was_sent() -> str:
    """Rank 0 drops the group when bytes of rank 1 have come for memory that is gone; how the wait of rank 1 ends."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    dist.all_to_all_single(torch.empty(2), torch.empty(2))
    sent = torch.ones(9, dtype=torch.uint8)
    if dist.get_rank() == 0:
        received = dist.irecv(torch.empty_like(sent), src=1, tag=1)
        del received
        dist.send(sent, dst=1, tag=2)
        default_store().wait(["sent"])
        time.sleep(0.5)  # for what rank 1 has sent to come; what has come cannot be read
        drop_groups([])
        return "dropped"
    dist.recv(torch.empty_like(sent), src=0, tag=2)
    dist.isend(sent, dst=0, tag=1)
    default_store().set("sent", "")
    try:
        dist.recv(torch.empty_like(sent), src=0, tag=3)
    except RuntimeError as error:
        return "timed out" if "imed out" in str(error) else "closed"
    return "received"


def leave_a_group_of_the_programs() -> str:
    """Rank 0 drops all groups and keeps one of its own, in which rank 2 waits for it and rank 1 has connected to none;
    how the wait ends.
    """
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    dist.all_to_all_single(torch.empty(3), torch.empty(3))
    own, rank, value, store = dist.new_group(), dist.get_rank(), torch.ones(1), default_store()
    if rank == 2:
        dist.recv(value, src=0, group=own)
        try:
            dist.recv(value, src=0, group=own, tag=1)
        except RuntimeError as error:
            return "timed out" if "imed out" in str(error) else "closed"
        finally:
            store.set("ended", "")
    if rank == 0:
        dist.send(value, dst=2, group=own)
        drop_groups([])
    store.wait(["ended"], timedelta(seconds=600))  # the end of a process closes its connections, too
    return "waited"


def groups_without_a_backend() -> list[int]:
    dist.init_process_group()
    own = dist.new_group([dist.get_rank()])
    return [len(gloo_groups(1 - dist.get_rank())), len(gloo_groups(dist.get_rank())), own.size()]


def test_gloo_is_found_in_groups_that_were_given_no_backend() -> None:
    assert launch(groups_without_a_backend, ranks=2) == [[1, 2, 1]] * 2


def test_a_group_ends_where_a_rank_has_sent_what_no_rank_receives() -> None:
    assert launch(leave_what_was_sent, ranks=2) == ["dropped", "closed"]


def test_a_group_that_the_program_keeps_ends_for_the_ranks_that_wait_in_it() -> None:
    assert launch(leave_a_group_of_the_programs, ranks=3) == ["waited", "waited", "closed"]
