"""A job whose every write a test can order, to read from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.handover_jobs import Job


@pytest.fixture
def job() -> Iterator[Job]:
    with Job() as job:
        yield job
