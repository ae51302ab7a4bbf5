"""Finds the helpers of these tests, and those that make heaps; compiles kernels while others are interpreted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for _helpers in (HERE, HERE.parent / "memory"):
    if str(_helpers) not in sys.path:
        sys.path.insert(0, str(_helpers))


def is_compiled(item: pytest.Item) -> bool:
    return item.path == HERE / "test_compile.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What was compiled is looked at after the other tests of this folder."""
    places = [at for at, item in enumerate(items) if item.path.parent == HERE]
    for at, item in zip(places, sorted((items[at] for at in places), key=is_compiled), strict=True):
        items[at] = item


@pytest.fixture(scope="session", autouse=True)
def _compiling(request: pytest.FixtureRequest) -> None:
    targets = {item.callspec.params["target"] for item in request.session.items if is_compiled(item)}  # type: ignore[attr-defined]
    if targets:
        from _compiled import begin

        begin(targets)
