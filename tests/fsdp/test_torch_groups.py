"""Process groups that are dropped while ranks that live wait in them, and have sent what no rank receives."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from odc.experiments.launch import launch
from odc.fsdp._torch_groups import drop_groups


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
        time.sleep(0.5)  # for what rank 1 sends to come; what has come cannot be read
        drop_groups([])
        return "dropped"
    dist.recv(torch.empty_like(sent), src=0, tag=2)
    dist.isend(sent, dst=0, tag=1)
    try:
        dist.recv(torch.empty_like(sent), src=0, tag=3)
    except RuntimeError as error:
        return "timed out" if "imed out" in str(error) else "closed"
    return "received"


@pytest.mark.timeout(120)
def test_a_group_ends_where_a_rank_has_sent_what_no_rank_receives() -> None:
    assert launch(leave_what_was_sent, ranks=2) == ["dropped", "closed"]
