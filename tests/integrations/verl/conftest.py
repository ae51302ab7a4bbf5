"""What the tests of verl share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ranks import RankPool
from support.verl import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny language model."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture
def actor() -> Iterator[RankPool]:
    """A pool of its own: a process trains one language model."""
    pool = RankPool(2)
    yield pool
    assert all(outcome.exit_code == 0 for outcome in pool.close())
