"""Fixtures of all benchmarks: a pool of ranks, and a notebook that prints and stores a module's rows at its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parent.parent
if str(_ROOT) not in sys.path:  # `bench` is a folder of modules, not an installed package
    sys.path.insert(0, str(_ROOT))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", default="runs/bench", help="folder for tables and JSON (default: runs/bench)")


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    """Two ranks, this process and a child."""
    from odc.bench.ranks import RankPool

    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def begun() -> Any:
    """The state before the first benchmark, whose ranks are the load of the others."""
    from odc.provenance import begin

    return begin()


@pytest.fixture(scope="module")
def note(request: pytest.FixtureRequest, begun: Any) -> Iterator[Callable[..., None]]:
    """`note(column=value, ...)` adds a row to the module's table."""
    from odc.bench.report import store

    rows: list[dict[str, Any]] = []
    yield lambda **row: rows.append(row)
    name = Path(request.path).stem.removeprefix("bench_")
    title = (request.module.__doc__ or name).strip().splitlines()[0]
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        if rows:
            store(Path(request.config.getoption("--results")), name, title, rows, begun=begun)
