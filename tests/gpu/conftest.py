"""Tests that need a CUDA device; each skips, with the reason, where there is none. `make test-gpu` runs them.

Ranks share device 0 where there are fewer devices than ranks, so one is enough. Where there is an NVIDIA device and
`-m gpu` was asked for, a session in which every test skipped fails: nothing was tested.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.device import own_device
from support.ranks import RankPool

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


_ran: list[str] = []  # tests of this folder that did more than skip


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and not report.skipped and "gpu" in report.keywords:
        _ran.append(report.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if why := nothing_was_tested(session):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.stash[_WHY] = why


_WHY = pytest.StashKey[str]()


def nothing_was_tested(session: pytest.Session) -> str:
    """What is wrong with a session of GPU tests that ran none of them on a machine with a device."""
    option = session.config.option
    if (
        option.markexpr != "gpu"
        or option.collectonly
        or _ran
        or not session.testscollected
        or time.time() > getattr(option, "until", math.inf)  # CI was slow: no time was left for any
        or not (torch.cuda.is_available() or nvidia_devices())
    ):
        return ""
    if torch.cuda.is_available():
        return "there is a CUDA device, and no test ran on it"
    return f"there is an NVIDIA device, and torch {torch.__version__} does not see it: `odc doctor --need cuda`"


def nvidia_devices() -> list[Path]:
    return [path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.markexpr == "gpu":
        why = config.stash.get(_WHY, "")
        terminalreporter.section("GPU")
        terminalreporter.line(f"{len(_ran)} tests ran on a device" + (f": {why}" if why else ""))


@pytest.fixture
def device() -> torch.device:
    """The first device, made current."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")
    return own_device(0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """As the fixture of all tests, on devices."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")
    pools: dict[int, RankPool] = {}
    yield lambda world: pools.setdefault(world, RankPool(world))
    outcomes = [outcome for one in pools.values() for outcome in one.close()]
    unclean = [outcome.describe() for outcome in outcomes if outcome.exit_code != 0]
    assert not unclean, "ranks did not end in good order:\n" + "\n".join(unclean)
