"""The integrations' tests skip what is not installed; `make test-integrations` says what must be.

Makes `_trainers` importable, also on rank processes: they get pytest's path.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--installed", help="packages, with commas between, without which not to start", default="")


def pytest_configure(config: pytest.Config) -> None:
    names = filter(None, config.getoption("--installed").split(","))
    if absent := [name for name in names if not importlib.util.find_spec(name)]:
        raise pytest.UsageError(f"not installed: {', '.join(absent)}")
