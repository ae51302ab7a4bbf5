"""Three members, a daemon, and a process to kill."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from _daemons import LAYOUT
from _members import Crew

from odc.server import Daemon
from odc.settings import Settings


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew(LAYOUT, 3, settings=Settings(timeout_s=60.0), by_hand=True) as crew:
        crew.attach()
        crew.publish_all()
        yield crew


@pytest.fixture
def server() -> Iterator[Daemon]:
    server = Daemon(10)
    yield server
    server.close()


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
    yield process
    process.kill()
    process.wait()
