"""Three members, a daemon, and a process to kill."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from support.members import HeapGroup
from support.sides import ONE_UNIT, Side

from odc.runtime import Daemon
from odc.settings import Settings


@pytest.fixture
def group() -> Iterator[HeapGroup]:
    with HeapGroup(ONE_UNIT, 3, settings=Settings(timeout_s=60.0), by_hand=True) as group:
        group.attach()
        group.publish_all()
        yield group


@pytest.fixture
def server() -> Iterator[Daemon]:
    server = Daemon(10)
    yield server
    server.close()


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


@pytest.fixture
def side(store: Any) -> Iterator[Callable[..., Side]]:
    """Makes ranks' roots up to the point where they are announced; all meet at `store`."""
    made = list[Side]()

    def make(me: int, *args: Any, **options: Any) -> Side:
        made.append(Side(store, me, *args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
