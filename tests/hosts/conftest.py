from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.spread import Spread


@pytest.fixture
def spread() -> Iterator[Spread]:
    made = Spread()
    yield made
    made.close()
