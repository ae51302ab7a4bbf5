from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.linked import Linked, two_hosts_unlinked
from support.spread import Spread


@pytest.fixture
def spread() -> Iterator[Spread]:
    made = Spread()
    yield made
    made.close()


@pytest.fixture
def linked() -> Iterator[Linked]:
    """Links of members 0 and 2, not yet joined."""
    made = Linked(two_hosts_unlinked())
    yield made
    made.close()
