"""The integrations' tests skip what is not installed; `make test-integrations` says what must be."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--installed", help="packages, with commas between, without which not to start", default="")


def pytest_configure(config: pytest.Config) -> None:
    names = filter(None, config.getoption("--installed").split(","))
    if absent := [name for name in names if not importlib.util.find_spec(name)]:
        raise pytest.UsageError(f"not installed: {', '.join(absent)}")
