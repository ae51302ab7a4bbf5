"""numba, where it is installed and does not load."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from odc import compiled
from odc.balance import partition


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("numba")
    real = importlib.import_module

    def load(name: str, *rest: Any) -> Any:
        if name == "numba":
            raise ImportError("Numba needs NumPy 2.2 or less")
        return real(name, *rest)

    compiled.numba.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", load)
        yield
    compiled.numba.cache_clear()


def test_a_numba_that_does_not_load_is_passed_over_with_one_warning(
    broken: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert compiled.numba() is None and compiled.numba() is None
    assert [record.getMessage() for record in caplog.records] == [
        "numba does not load, so loops run without it: Numba needs NumPy 2.2 or less"
    ]


def test_planners_run_without_it(broken: None) -> None:
    lengths = [1 + i % 7 for i in range(512)]
    owners = partition(lengths, 4)
    assert sorted({int(owner) for owner in owners}) == [0, 1, 2, 3]
