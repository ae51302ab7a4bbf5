"""Every order that odc's protocol needs is needed: without it the happens-before checker reports accesses, in one run.

Over emulated CUDA with `-p ordered_session` (tests/emulated/README.md), where each of these tests takes one order out.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.device import own_device
from support.host_ranks import HostPools
from support.ranks import RankPool, RanksFailed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from odc import Settings, fully_shard
from odc.errors import AbandonedMinibatchError, StaleParametersError
from odc.fsdp import live_roots, root_of
from odc.hosts.sums import HostSums
from odc.net.engines import Engine
from odc.ranks.worker import load

_HERE = Path(__file__).parent
_LONGEST_S = 240  # without an order ranks may wait for ever
sys.path.insert(0, str(_HERE.parent / "emulated/python"))

import mutations  # noqa: E402 (found by the path above)


class Scenario(NamedTuple):
    """A program: a function of a file of this folder, what it is given after (rank, world), how many ranks run it.

    `apart`: in processes of its own, as with an `environment` of its own.
    """

    file: str
    function: str
    args: tuple[Any, ...]
    ranks: int = 2
    hosts: int = 1
    environment: tuple[tuple[str, str], ...] = ()
    apart: bool = False


def _settings(**some: Any) -> Settings:
    """Without odc's own check of its protocol, which would end some of these runs first."""
    return Settings(timeout_s=30.0, check_protocol=False, **some)


_COUNTS = ((1, 1, 1, 1), (2, 1, 3, 1))
SCENARIOS = {
    "server": Scenario("test_dropin", "equals_the_whole_model", (_settings(), False)),
    "small slots": Scenario("test_dropin", "equals_the_whole_model", (_settings(staging_block_bytes=4096), False)),
    "under locks": Scenario(
        "test_dropin", "equals_the_whole_model", (_settings(accumulate="direct"), False),
        environment=(("EMULATED_DEVICES", "2"), ("EMULATED_P2P_ATOMICS", "0")),
    ),
    "evaluation": Scenario("test_orders", "evaluates", ()),
    "pairs": Scenario("test_hosts", "same", (_COUNTS, _settings(), (2, 2)), 4),
    "replicas": Scenario("test_hosts", "same", (_COUNTS, _settings(), (4, 1)), 4),
    "nodes": Scenario("test_hosts", "same", (_COUNTS, _settings(), (2, 2), "world"), 4),
    "hosts": Scenario("test_hosts", "same", (((1, 1), (2, 1)), _settings(), (2,)), 2, 2),
    "changes": Scenario(
        "test_hosts", "same", (((1, 1), (2, 1), (0, 2)), _settings(changes="on"), (2,)), 2, 2
    ),
    "rounded sums": Scenario("test_hosts", "sums_in_backward", ("bfloat16",), 4, 2),
    "int8 sums": Scenario("test_hosts", "int8_gradients", ("cuda",), 4, 2),
    "optimizer": Scenario("test_optimizer_stream", "trained", (True,)),
    "cut short before its add": Scenario("test_orders", "cut_short", (_settings(), "add_part", False)),
    "cut short after its add": Scenario("test_orders", "cut_short", (_settings(), "add_part", True)),
    "cut short direct": Scenario(
        "test_orders", "cut_short", (_settings(accumulate="direct"), "accumulate_all", True)
    ),
    "late sums": Scenario("test_orders", "sums_late", (), 2, 2),
    "landings": Scenario("test_orders", "by_landings", (), 4, 2),
    "forward aside": Scenario("test_orders", "forward_aside", (), 1),
    "nvshmem": Scenario(
        "test_nvshmem", "same", (((1, 1), (2, 1)), _settings(memory="nvshmem", nvshmem_bytes=64 << 20)), 2, 2,
        apart=True,
    ),
}  # fmt: skip


def evaluates(rank: int, world: int) -> None:
    """Epochs in which nothing is pushed; `publish` ends each."""
    device = own_device(rank)
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).to(device)
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cuda", (world,)), settings=_settings())
    for _ in range(3):
        with torch.no_grad():
            model(torch.ones(8, 64, device=device))
        model.publish()
    for root in live_roots():
        root.shut_down()


def cut_short(rank: int, world: int, settings: Settings, step: str, done: bool) -> None:
    """Rank 0's push in the first of two minibatches, in which rank 1 has none, fails at a step of its mover: when that
    is `done`, or before.
    """
    device = own_device(rank)
    model: Any = fully_shard(nn.Linear(64, 64).to(device), mesh=init_device_mesh("cuda", (world,)), settings=settings)
    mover = root_of(model).layout.mover
    run = getattr(mover, step)

    def fail(*args: Any) -> None:
        if done:
            run(*args)
        raise ValueError("cut short")

    for number in range(2):
        with contextlib.suppress(AbandonedMinibatchError), pytest.MonkeyPatch.context() as patch, model.minibatch():
            if (rank, number) == (0, 0):
                patch.setattr(mover, step, fail)
            if (rank, number) != (1, 0):
                model(torch.ones(8, 64, device=device)).sum().backward()
    for root in live_roots():
        root.shut_down()


def forward_aside(rank: int, world: int) -> None:
    """A forward behind a change of weights has a stream of its own. As the root is unsharded it fetches nothing, and no
    backward follows.
    """
    device = own_device(rank)
    model: Any = fully_shard(
        nn.Linear(64, 64).to(device), mesh=init_device_mesh("cuda", (world,)), settings=_settings()
    )
    x, stream = torch.ones(8, 64, device=device), torch.cuda.Stream(device)
    shard = model.weight.to_local().detach()
    with contextlib.suppress(StaleParametersError), model.minibatch():
        model(x)
        shard.add_(1.0)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            model(x)
    for root in live_roots():
        root.shut_down()


def _same(*args: Any) -> None:
    load("scenario_test_hosts", str(_HERE / "test_hosts.py"), "same")(*args)


def sums_late(rank: int, world: int) -> None:
    """All sums are rounded at the end, as where the daemon comes to none of them before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostSums, "announce", lambda sums: False)
        _same(rank, world, ((1, 1), (2, 1)), _settings(sums_dtype="bfloat16"), (2,))


def by_landings(rank: int, world: int) -> None:
    """Between hosts what peers of this host are to have is read as by an engine that does not reach their memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "only_into_own", True)
        _same(rank, world, _COUNTS, _settings(), (4,))


def mutated(rank: int, world: int, mutation: str, scenario: Scenario) -> None:
    # By a name that no test's module has: tests/kernels/ has a test_dropin as well, which ranks may have loaded.
    body = load(f"scenario_{scenario.file}", str(_HERE / f"{scenario.file}.py"), scenario.function)
    with mutations.applied(mutation), contextlib.suppress(AssertionError):  # numbers may be wrong now
        body(rank, world, *scenario.args)
    torch.cuda.synchronize()  # the next program begins after all of this one


@pytest.mark.parametrize("mutation", mutations.table())
def test_without_it_the_checker_reports(
    request: pytest.FixtureRequest, ranks: Callable[[int], Any], mutation: str
) -> None:
    session = request.config.pluginmanager.get_plugin("ordered")
    if session is None:
        pytest.skip("accesses are not recorded: needs emulated CUDA and -p ordered_session")
    entry = mutations.table()[mutation]
    scenario = SCENARIOS[entry.scenario]
    if scenario.hosts > 1:
        pools = request.getfixturevalue("host_ranks")
        if scenario.apart:
            pools = HostPools()
            request.addfinalizer(pools.close)
        pool = pools(scenario.hosts, scenario.ranks // scenario.hosts)
    elif scenario.environment:
        pool = RankPool(scenario.ranks, scenario.environment)
        request.addfinalizer(pool.close)
    else:
        pool = ranks(scenario.ranks)
    session.found()  # what other tests have left
    try:
        pool.run(mutated, mutation, scenario, timeout=_LONGEST_S)
    except RanksFailed as error:
        print(str(error)[-2000:])
    reports = session.found()
    fitting = [text for text in reports if entry.meets in text]
    print(*reports[:3], sep="\n")
    assert fitting, f"{entry.file} without {mutation} was not reported; of {len(reports)} reports none of {entry.meets}"
