"""What odc is measured against may fail on a machine; what is measured is not lost with it."""

from __future__ import annotations

import pytest
import torch

from odc.bench import _torch_symmetric, baselines
from odc.bench.ranks import RankPool
from odc.bench.rounds import Action, measure


def test_symmetric_memory_that_is_refused_leaves_out_its_own_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def refuse(name: str, nbytes: int) -> None:
        asked.append(nbytes)
        raise RuntimeError("CUDASymmetricMemory cannot map a peer's memory")

    def actions(nbytes: int, device: str) -> list[Action]:
        other = baselines._symmetric("_low_contention_all_gather", torch.ones(4), nbytes)
        return [Action("get", lambda: None, nbytes, (other.name,)), other]

    monkeypatch.setattr(_torch_symmetric, "collective", refuse)
    with RankPool(1):
        get, other = measure(actions, 64, "cpu", rounds=3, warm=1)
    assert (get.refused, len(get.seconds)) == ("", 3)
    assert other.name == "symm_mem all_gather" and not other.seconds
    assert other.refused == "RuntimeError: CUDASymmetricMemory cannot map a peer's memory"
    assert asked == [16]
