"""Tests that need a CUDA device; each skips, with the reason, where there is none. `make test-gpu` runs them.

Ranks share device 0 where there are fewer devices than ranks, so one is enough.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from _ranks import RankPool

_HERE = Path(__file__).parent
for _helpers in (_HERE, _HERE.parent / "memory"):
    if str(_helpers) not in sys.path:
        sys.path.insert(0, str(_helpers))

SHARED = (("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1"),)  # torch's own switch: several ranks on one device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """As the fixture of all tests, on devices."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")
    pools: dict[int, RankPool] = {}
    yield lambda world: pools.setdefault(world, RankPool(world, SHARED))
    outcomes = [outcome for one in pools.values() for outcome in one.close()]
    unclean = [outcome.describe() for outcome in outcomes if outcome.exit_code != 0]
    assert not unclean, "ranks did not end in good order:\n" + "\n".join(unclean)
