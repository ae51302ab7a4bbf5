"""Ranks in containers of one machine: without its PID and network namespaces each container is a host; with them, all
are one.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist
from support.compare import differences
from support.exact import Exact, batch, train
from support.host_ranks import HostPools
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from odc import Settings, fully_shard
from odc.runtime.daemon import ask_all

SETTINGS = Settings(timeout_s=60.0)
COUNTS = ((1, 1, 1, 1), (2, 1, 3, 1), (0, 2, 0, 1))


def same(rank: int, world: int) -> int:
    """Trained as by FSDP2, to the bit; gives how many values of gradients and parameters are not zero."""
    counts = tuple(row[:world] for row in COUNTS)
    ours, theirs = train(fully_shard, rank, counts, "last", settings=SETTINGS), train(torch_fully_shard, rank, counts)
    wrong = differences(ours, theirs, None)
    assert not wrong, "\n".join(wrong)
    return sum(int(one.count_nonzero()) for one in ours.values() if one is not None)


def reached(rank: int, world: int) -> dict[int, str]:
    """How this rank reaches the others: "here" through memory that it maps, "elsewhere" over the network."""
    model = Exact()
    fully_shard(model, settings=SETTINGS)
    with model.minibatch():
        model(batch(rank, 0, 0)).sum().backward()
    dist.barrier()  # so that all are there while each looks
    found = {one.rank: "elsewhere" if one.elsewhere else "here" for one in ask_all() if one.error is None}
    dist.barrier()
    return found


@pytest.mark.parametrize(
    ("shared", "seen"),
    [
        pytest.param("", "elsewhere", id="nothing"),
        pytest.param("-n", "elsewhere", id="network"),  # containers of one pod
        pytest.param("-p", "elsewhere", id="pids", marks=pytest.mark.thorough),
        pytest.param("-n -p", "here", id="both"),
    ],
)
def test_a_pod_a_rank_on_one_machine_equals_fsdp2(host_ranks: HostPools, shared: str, seen: str) -> None:
    """Each container has its own /dev/shm, mounts, IPC and host name, and those namespaces that are not `shared`."""
    pods = host_ranks(3, 1, shared)
    assert min(pods.run(same)) > 1000
    for rank, found in enumerate(pods.run(reached)):
        assert found == {other: "here" if other == rank else seen for other in range(3)}
