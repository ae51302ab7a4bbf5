from __future__ import annotations

import uuid

import pytest


@pytest.fixture
def name() -> str:
    """Of a job's exchanges: unlike any other of the same ranks."""
    return uuid.uuid4().hex
