"""A multimodal job over hosts: its exchange moves examples between them, and losses are those of one host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny_multimodal import run_job, tiny_job

HostPools = Callable[[int, int], Any]


def losses(rank: int, world: int, folder: str, per_node: int) -> tuple[list[float], int]:
    """Of every step; and the bytes that this rank sent to other hosts."""
    config = tiny_job(Path(folder), per_node=per_node, ranks=world, arm="odc", reproducible=True)
    result = run_job(rank, world, config)
    far = sum(count.far for record in result.steps for count in record.phases.values())
    return [record.loss for record in result.steps], far


@pytest.mark.thorough
def test_losses_are_those_of_one_host(host_ranks: HostPools, ranks: Callable[[int], Any], tmp_path: Path) -> None:
    tiny_job(tmp_path)
    over_hosts = host_ranks(2, 2).run(losses, str(tmp_path), 0)
    on_one = ranks(4).run(losses, str(tmp_path), 2)
    assert over_hosts[0][0] == pytest.approx(on_one[0][0], rel=1e-5)
    assert [far for _, far in over_hosts] == [far for _, far in on_one] and sum(far for _, far in over_hosts) > 0
