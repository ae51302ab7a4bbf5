"""What a job that failed may not leave behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.leaks import assert_nothing_left, shared_files


@pytest.fixture
def nothing_left() -> Iterator[list[int]]:
    """Put pids of ranks in; at the end of the test nothing of theirs may be left."""
    files, pids = shared_files(), list[int]()
    yield pids
    assert pids, "the test has named no ranks"
    assert_nothing_left(pids, files)
