"""Fixtures of all tests: `ranks(world)` gives a pool of rank processes (see `_ranks`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

# Test directories are no packages; their helpers (`_ranks`, `_models`, ...) have unique names and are found here.
for _helpers in (Path(__file__).parent, Path(__file__).parent / "fsdp"):
    if str(_helpers) not in sys.path:
        sys.path.insert(0, str(_helpers))

# No example of a property test has a deadline: a busy machine must not fail a test.
hypothesis.settings.register_profile("all", deadline=None)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--extent",
        choices=("quick", "rest", "all"),
        default="all",
        help="quick: no test marked `thorough`, few examples of each property; rest: what quick leaves out; "
        "all (the default): both",
    )


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("quick" if config.getoption("--extent") == "quick" else "all")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--extent` does not ask for; properties belong to both halves, with more examples in the rest."""
    extent = config.getoption("--extent")
    left_out = []
    for item in items:
        thorough = item.get_closest_marker("thorough") is not None
        is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        if (extent == "quick" and thorough) or (extent == "rest" and not (thorough or is_property)):
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], object]]:
    """`ranks(world).run(function, *args)` runs a module-level function on every rank of a lasting pool."""
    yield from _pools(())


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[[int], object]]:
    """As `ranks`, in processes where Triton kernels are interpreted; skips where triton is not installed."""
    pytest.importorskip("triton", reason="needs triton: pip install 'odc-fsdp[kernels]'")
    from _ranks import INTERPRETED

    yield from _pools(INTERPRETED)


def _pools(environment: tuple[tuple[str, str], ...]) -> Iterator[Callable[[int], object]]:
    from _ranks import RankPool

    pools: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        return pools.setdefault(world, RankPool(world, environment))

    yield pool
    outcomes = [outcome for one in pools.values() for outcome in one.close()]
    unclean = [outcome.describe() for outcome in outcomes if outcome.exit_code != 0]
    assert not unclean, "pool ranks did not end in good order:\n" + "\n".join(unclean)


def pytest_unconfigure() -> None:
    """End the process that forks ranks, if any test started it."""
    if "_ranks" in sys.modules:
        sys.modules["_ranks"].close_nurseries()
