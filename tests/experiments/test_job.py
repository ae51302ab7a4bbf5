from __future__ import annotations

import torch
import torch.distributed as dist

from odc.experiments.config import threads_per_rank
from odc.experiments.job import rank_group
from odc.experiments.launch import launch


def _lives() -> list[object]:
    with rank_group(2, 60.0):
        inside = [dist.get_rank(), dist.get_world_size(), dist.get_backend(), torch.get_num_threads()]
    return [*inside, dist.is_initialized()]


def test_a_group_is_there_inside_and_gone_after() -> None:
    assert launch(_lives, ranks=2) == [[rank, 2, "gloo", threads_per_rank(2), False] for rank in (0, 1)]


def _fails() -> list[object]:
    try:
        with rank_group(1, 60.0):
            raise ValueError(f"inside {dist.get_world_size()}")
    except ValueError as error:
        return [str(error), dist.is_initialized()]


def test_an_error_comes_out_and_the_group_is_gone() -> None:
    assert launch(_fails, ranks=1) == [["inside 1", False]]
