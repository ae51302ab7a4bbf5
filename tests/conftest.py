"""Fixtures of all tests: `ranks(world)` gives a pool of rank processes (see `support.ranks`)."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import pytest

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

# Tests import `support`, their shared scaffolding, from here; rank processes get pytest's path.
if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--extent",
        choices=("quick", "rest", "all"),
        default="all",
        help="quick: every behaviour once (`make test`); rest: what that leaves out; all: both (the default)",
    )
    parser.addoption(
        "--until", type=float, default=float("inf"), help="no test begins after this moment (seconds since 1970)"
    )
    parser.addoption("--turn", type=int, default=0, help="the number of the file to begin with")
    parser.addoption("--installed", help="packages, with commas between, without which not to start", default="")


def pytest_configure(config: pytest.Config) -> None:
    from support.extent import ALL_EXAMPLES, QUICK_EXAMPLES

    names = filter(None, config.getoption("--installed").split(","))
    if absent := [name for name in names if not importlib.util.find_spec(name)]:
        raise pytest.UsageError(f"not installed: {', '.join(absent)}")
    count = QUICK_EXAMPLES if config.getoption("--extent") == "quick" else ALL_EXAMPLES
    # No example has a deadline: a busy machine must not fail a test.
    hypothesis.settings.register_profile("odc", deadline=None, max_examples=count)
    hypothesis.settings.load_profile("odc")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collections: a million objects come to stay, and none need be looked at later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from support.extent import beginning_with, left_out, longest_first

    out = left_out(items, config.getoption("--extent"))
    if out:
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]
    if config.getoption("--turn"):
        beginning_with(items, config.getoption("--turn"))
    else:
        longest_first(items, Path(__file__).parent)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > item.config.getoption("--until"):
        pytest.skip("no time is left")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _judged((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _judged((yield))


def _judged(report: Report) -> Report:
    if os.environ.get("CI"):
        from support.skips import judge

        judge(report)
    return report


@pytest.fixture(scope="session", autouse=True)
def one_fork_server() -> None:
    """What loads torch, odc and transformers for ranks does so once in a process, for tests and for jobs."""
    from support.ranks import share_server

    share_server()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], object]]:
    """`ranks(world).run(function, *args)` runs a module-level function on every rank of a lasting pool."""
    yield from _pools(())


@pytest.fixture(scope="session")
def host_ranks() -> Iterator[Callable[[int, int], object]]:
    """`host_ranks(hosts, per_host).run(function, *args)` is as `ranks` over hosts: namespaces joined by a network.

    Skips where none can be made, and fails there in CI. A test that limits or cuts the network makes
    `support.hosts.Hosts` for itself.
    """
    from support.hosts import need_hosts

    need_hosts()
    from support.host_ranks import HostPools

    pools = HostPools()
    yield pools
    _assert_clean(pools.close())


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[[int], object]]:
    """As `ranks`, in processes where Triton kernels are interpreted; skips where triton is not installed."""
    pytest.importorskip("triton", reason="needs triton: pip install 'odc-fsdp[kernels]'")
    from support.ranks import INTERPRETED

    yield from _pools(INTERPRETED)


@pytest.fixture
def nothing_left() -> Iterator[list[int]]:
    """Put pids of ranks in; at the end of the test nothing of theirs may be left."""
    from support.leaks import assert_nothing_left, memfds_of, shared_files

    files, memfds, pids = shared_files(), memfds_of(os.getpid()), list[int]()
    yield pids
    assert pids, "the test has named no ranks"
    assert_nothing_left(pids, files, memfds)


def _pools(environment: tuple[tuple[str, str], ...]) -> Iterator[Callable[[int], object]]:
    from support.ranks import RankPool

    pools: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        return pools.setdefault(world, RankPool(world, environment))

    yield pool
    _assert_clean([outcome for one in pools.values() for outcome in one.close()])


def _assert_clean(outcomes: list[Any]) -> None:
    unclean = [outcome.describe() for outcome in outcomes if outcome.exit_code != 0]
    assert not unclean, "pool ranks did not end in good order:\n" + "\n".join(unclean)


def pytest_unconfigure() -> None:
    """End the processes that fork ranks, if any test started one."""
    if "odc.ranks.processes" in sys.modules:
        sys.modules["odc.ranks.processes"].close_fork_servers()
