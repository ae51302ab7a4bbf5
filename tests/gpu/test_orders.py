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
from support.ranks import RankPool, RanksFailed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from odc import Settings, fully_shard
from odc.fsdp import live_roots
from odc.ranks.worker import load

_HERE = Path(__file__).parent
_LONGEST_S = 240  # without an order ranks may wait for ever
sys.path.insert(0, str(_HERE.parent / "emulated/python"))

import mutations  # noqa: E402 (found by the path above)


class Scenario(NamedTuple):
    """A program: a function of a file of this folder, what it is given after (rank, world), how many ranks run it."""

    file: str
    function: str
    args: tuple[Any, ...]
    ranks: int = 2
    hosts: int = 1
    environment: tuple[tuple[str, str], ...] = ()


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
        pool = request.getfixturevalue("host_ranks")(scenario.hosts, scenario.ranks // scenario.hosts)
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
