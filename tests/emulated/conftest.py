"""Tests of the emulation itself, for `make test-emulated`: where nothing is emulated, none of them is collected."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
collect_ignore_glob = [] if "libemulated_cuda" in os.environ.get("LD_PRELOAD", "") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
