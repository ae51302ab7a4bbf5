"""Ranks with time enough to import verl on a busy machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def ranks(ranks: Callable[[int], Any]) -> Callable[[int], Any]:
    return lambda world: SimpleNamespace(run=partial(ranks(world).run, timeout=500))
