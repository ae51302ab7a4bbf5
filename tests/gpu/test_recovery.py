"""A killed rank costs one minibatch on GPUs too: jobs end with the same bits as one that nothing befell.

With as many devices as ranks NCCL has torch's collectives, else gloo.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from support.device import own_device
from support.recovering import Death, Work, run, unequal

from odc.experiments.launch import launch
from odc.fsdp import _torch_groups
from odc.recovery import process_group
from odc.recovery.generations import Generations
from odc.recovery.members import Share
from odc.recovery.process_group import GenerationGroup
from odc.recovery.slots import Slots

RANKS, STEPS = 2, 5
ON_GPU = Work(device="cuda")
ROUNDS = {
    "forward and backward": [Death(1, 1, "forward"), Death(0, 2, "backward", "segfault")],
    "finish and clip": [Death(1, 1, "finish"), Death(1, 2, "collected"), Death(0, 3, "clip", "exit")],
    "step and keep": [Death(1, 1, "step"), Death(0, 2, "keep"), Death(1, 3, "keep")],
    "first minibatch": [Death(1, 0, "building"), Death(0, 0, "finish")],
    "another recovery": [Death(1, 1, "backward"), Death(0, 1, "restore"), Death(1, 1, "ready")],
    "mapping device memory": [Death(1, 0, "map"), Death(0, 2, "begin"), Death(1, 2, "map")],
    "all at once": [Death(rank, 2, "begin") for rank in range(RANKS)],
}


@pytest.fixture(scope="module", autouse=True)
def _needs_a_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("undisturbed"), RANKS, steps=STEPS, work=ON_GPU)


@pytest.mark.parametrize("deaths", ROUNDS.values(), ids=ROUNDS.keys())
def test_a_job_survives_deaths(deaths: list[Death], undisturbed: Any, tmp_path: Path) -> None:
    found = run(tmp_path, RANKS, deaths, steps=STEPS, work=ON_GPU)
    happened = {path.name for path in tmp_path.iterdir()}
    assert happened == {f"{death.rank}.{death.step}.{death.point}" for death in deaths}
    assert not unequal(found, undisturbed)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.thorough] * bool(seed)) for seed in range(4)])
def test_a_job_survives_deaths_at_any_moment(seed: int, undisturbed: Any, tmp_path: Path) -> None:
    found = run(tmp_path, RANKS, restarts=60, killed=(2.0, 5, seed), steps=STEPS, work=ON_GPU)
    assert not unequal(found, undisturbed)


def test_a_heap_is_gone_before_the_next_one_comes(tmp_path: Path) -> None:
    """Each would take the memory of the other."""
    deaths = [Death(1, step, "backward") for step in (1, 4, 7)]
    survivor = run(tmp_path, RANKS, deaths, steps=9, work=ON_GPU)[0]
    assert survivor["recoveries"] == 3
    heaps = [heaps for _, _, heaps in survivor["held"]]
    assert max(heaps) == heaps[0]


def keeps_what_streams_have_been_asked_for(rank: int, world: int) -> list[bool]:
    """Whether a kept state, in several sizes, is what streams, late as they may be, come to; in and out of pinned
    memory.
    """
    device = own_device(rank)
    beside, none = torch.cuda.Stream(device), cast(Generations, None)
    slots, right = Slots.create(Share(0, rank)), []
    for step, n in enumerate((1 << 16, 1 << 20, 1 << 20, 1 << 20)):
        state = [torch.zeros(n, device=device), torch.zeros(n // 64, 64, device=device).t(), torch.zeros(3)]
        beside.wait_stream(torch.cuda.current_stream(device))
        for turn in range(1, 21):
            with torch.cuda.stream(beside if turn % 2 else torch.cuda.current_stream(device)):
                for tensor in state[:2]:
                    tensor.add_(step + turn)
            torch.cuda.current_stream(device).wait_stream(beside)
            beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):  # as an optimizer that a loop runs there
            for tensor in state[:2]:
                tensor.mul_(2)
        GenerationGroup(none, nccl=False).settle(state)
        slots.write(step, state, b"text")
        (fd,) = [one for one in slots.fds if os.pread(one, 8, 0)[0] == 1 + step]  # whoever looks now sees all of it
        found = os.pread(fd, 4 * n, 4096)
        right.append(torch.equal(torch.frombuffer(bytearray(found), dtype=torch.float32), state[0].cpu()))
        kept, _ = slots.read(step)
        right.append(all(torch.equal(mine, theirs.cpu()) for mine, theirs in zip(kept, state, strict=True)))
        right.append(kept[0].is_pinned())
    slots.close()
    right.append(not kept[0].is_pinned())
    return right


def test_a_state_is_kept_when_all_of_it_has_arrived(ranks: Any) -> None:
    (right,) = ranks(1).run(keeps_what_streams_have_been_asked_for)
    assert right == [True] * len(right)


def groups_of_generations() -> list[int]:
    """How many parts NCCL has of each of three groups, and after each was dropped; the last with another group."""
    own_device(0)
    stores: Any = dist
    found = []
    for more in (False, False, True):
        dist.init_process_group(process_group._backend(nccl=True), store=stores.HashStore(), rank=0, world_size=1)
        if more:
            dist.new_group([0])
        found.append(len(_torch_groups.nccl_parts()))
        _torch_groups.abort_nccl()
        _torch_groups.drop_groups([])
        found.append(int(dist.is_initialized()))
    return found


def test_nccls_groups_are_aborted_and_dropped() -> None:
    """Before a first collective, which makes a communicator; those of the jobs above are with a device a rank."""
    assert launch(groups_of_generations, ranks=1) == [[1, 0, 1, 0, 2, 0]]
