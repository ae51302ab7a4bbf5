"""`model.claim`: whichever rank computes what, the gradients are those of the whole minibatch; and how it fails."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import differences
from support.extent import examples
from support.failing import WORLD, assert_all_noticed
from support.models import Case, build, next_token_loss, own_gradients, tokens
from support.on_ranks import on_ranks
from support.rank_worker import die, report
from support.ranks import Pools, RankOutcome
from torch.distributed.device_mesh import init_device_mesh

from odc import OdcError, Settings, fully_shard
from odc.errors import AbandonedMinibatchError, PeerLostError, UnsupportedError
from odc.fsdp import default_store
from odc.memory import atomics, plain_x86_64
from odc.protocol.queue import Queue

Ended = Callable[..., list[RankOutcome]]
CASE = Case(counts=((0,),))
ROOM = 16 << 10


def sharded(world: int, *, hybrid: bool = False, low_precision: bool = False, **chosen: Any) -> Any:
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b")) if hybrid else None
    options = {"queue_bytes": ROOM, **chosen}
    case = dataclasses.replace(CASE, low_precision=low_precision)
    return build(fully_shard, case, grid or init_device_mesh("cpu", (world,)), settings=Settings(**options))


def loaded(rank: int, step: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Of different lengths, so that the queue has an order of its own."""
    return [{"x": tokens(rank, step, i, rows=1 + (rank + 2 * i) % 3)} for i in range(count)]


def backward(model: Any, x: torch.Tensor) -> None:
    """One row has no use for a layer, as text without an image has none for a tower."""
    skip = (1,) if len(x) == 1 else ()
    (next_token_loss(model(x, skip=skip), x) / 50).backward()


def claim_all(model: Any, mine: Sequence[dict[str, torch.Tensor]], pause: Callable[[], float]) -> list[int]:
    """One minibatch of the queue; returns the places in it that this rank computed."""
    numbers = []
    with model.minibatch():
        claims = model.claim(mine)
        for microbatch in claims:
            numbers.append(claims.number)
            time.sleep(pause())
            backward(model, microbatch["x"])
    return numbers


def step_down(model: Any) -> None:
    """What an optimizer would do, so that an epoch mixed up with another shows."""
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)
    model.zero_grad()


Seen = list[dict[str, torch.Tensor | None]]


def one_run(
    rank: int, world: int, counts: Sequence[Sequence[int]], seed: int | None, pause_s: float = 0.0, **chosen: Any
) -> tuple[Seen, list[list[int]]]:
    """Gradients by step, and the places this rank computed; `seed` None: each its own, without a queue.

    Pauses last up to `pause_s`, and five times that on one rank.
    """
    model, seen, numbers = sharded(world, **chosen), Seen(), list[list[int]]()
    draw = random.Random(f"{seed} {rank}")
    slow = random.Random(seed).randrange(world)
    for step, by_rank in enumerate(counts):
        mine = loaded(rank, step, by_rank[rank])
        if seed is None:
            with model.minibatch():
                for microbatch in mine:
                    backward(model, microbatch["x"])
        else:
            longest = 5 * pause_s if rank == slow else pause_s
            numbers.append(claim_all(model, mine, lambda longest=longest: draw.random() * longest))
        seen.append(own_gradients(model))
        step_down(model)
    return seen, numbers


# right whichever rank computes -----------------------------------------------------------------------------------


def same_bits_under_pauses(
    rank: int, world: int, counts: Any, seeds: list[int], pause_s: float, chosen: Any
) -> list[list[list[int]]]:
    reference, _ = one_run(rank, world, counts, None, reproducible=True, **chosen)
    numbers = []
    for seed in seeds:
        seen, computed = one_run(rank, world, counts, seed, pause_s, reproducible=True, **chosen)
        wrong = [line for mine, other in zip(seen, reference, strict=True) for line in differences(mine, other, None)]
        assert not wrong, "\n".join(wrong)
        numbers.append(computed)
    return numbers


def assert_each_once(by_rank: Sequence[Sequence[Sequence[int]]], counts: Sequence[Sequence[int]]) -> None:
    """`by_rank[rank][step]`: places computed."""
    for step, loads in enumerate(counts):
        assert sorted(number for one in by_rank for number in one[step]) == list(range(sum(loads)))


@pytest.mark.parametrize(
    ("counts", "chosen", "pauses_s"),
    [
        # The slower the machine, the longer a pause must be to change which rank computes what.
        (((3, 1), (0, 5), (2, 2)), {"accumulate": "server"}, (0.002, 0.02, 0.2)),
        (((3, 1), (0, 5), (2, 2)), {"accumulate": "direct"}, (0.002, 0.02, 0.2)),
        # The first minibatch is one row: on some rank one layer may not run before the third.
        (((1, 0), (3, 0), (2, 3)), {"low_precision": True}, (0.002,)),
        (((5, 0, 1, 2), (0, 0, 7, 0)), {"hybrid": True}, (0.002,)),  # the queue spans all replicas
    ],
    ids=["server", "direct", "bf16", "replicas"],
)
def test_reproducible_gives_the_bits_of_static_ranks_whichever_computed_what(
    ranks: Pools, counts: tuple[tuple[int, ...], ...], chosen: dict[str, Any], pauses_s: tuple[float, ...]
) -> None:
    for pause_s in pauses_s:
        seeds = [1, 2, 3, 4] if len(pauses_s) > 1 else [1, 2]
        found = ranks(len(counts[0])).run(same_bits_under_pauses, counts, seeds, pause_s, chosen)
        for by_rank in zip(*found, strict=True):  # of one seed
            assert_each_once(by_rank, counts)
        if len(pauses_s) == 1 or len({str(numbers) for numbers in found[0]}) > 1:
            return
    pytest.fail("the pauses changed nothing: this shows nothing")


def rounding(values: torch.Tensor) -> torch.Tensor:
    return 1e-6 + 1e-5 * values.abs()


def near_the_static_arm(rank: int, world: int, counts: Any, seed: int) -> list[list[int]]:
    reference, _ = one_run(rank, world, counts, None)
    seen, numbers = one_run(rank, world, counts, seed, 0.002)
    wrong = [line for mine, other in zip(seen, reference, strict=True) for line in differences(mine, other, rounding)]
    assert not wrong, "\n".join(wrong)
    return numbers


@settings(max_examples=examples(8), deadline=None)
@given(
    counts=st.lists(st.tuples(*[st.integers(0, 4)] * 2), min_size=1, max_size=3).map(tuple), seed=st.integers(0, 999)
)
def test_any_counts_under_any_pauses(ranks: Pools, counts: tuple[tuple[int, int], ...], seed: int) -> None:
    assert_each_once(ranks(2).run(near_the_static_arm, counts, seed), counts)


@on_ranks(2)
def test_a_rank_may_compute_nothing(rank: int, world: int, name: str) -> None:
    """Rank 0 comes late to its first claim; the other has emptied the queue by then."""
    model, store = sharded(world), default_store()
    with model.minibatch():
        claims = model.claim(loaded(rank, 0, 3))
        if rank == 0:
            store.wait([f"{name} is empty"])
        numbers = []
        for one in claims:
            backward(model, one["x"])
            numbers.append(claims.number)
        store.set(f"{name} is empty", "")
    assert numbers == list(range(6 * rank))
    assert any(gradient is not None for gradient in own_gradients(model).values())


@on_ranks(2)
def test_a_claim_that_a_signal_cuts_short_costs_the_minibatch(rank: int, world: int, name: str) -> None:
    """No rank computes what was claimed: the others would train without it."""
    model, store = sharded(world), default_store()

    def interrupted(*unused: Any) -> None:
        raise KeyboardInterrupt

    def one_minibatch() -> None:
        with model.minibatch():
            claims = model.claim(loaded(rank, 0, 2))
            if rank == 0:
                with mock.patch.object(Queue, "_copy", interrupted), pytest.raises(KeyboardInterrupt):
                    next(claims)
                store.set(f"{name} is cut short", "")
            store.wait([f"{name} is cut short"])
            for one in claims:
                backward(model, one["x"])

    with pytest.raises(
        AbandonedMinibatchError, match="by rank 0: a claim of a microbatch ended with KeyboardInterrupt"
    ):
        one_minibatch()
    claim_all(model, loaded(rank, 1, 2), float)
    assert any(gradient is not None for gradient in own_gradients(model).values())


# refusals --------------------------------------------------------------------------------------------------------


def refusals_before_work(rank: int, world: int) -> None:
    plain = sharded(world, queue_bytes=0)
    with pytest.raises(OdcError, match=rf"rank {rank}: claim\(\) outside of `with model.minibatch\(\):`"):
        plain.claim([])
    refused = (UnsupportedError, PeerLostError)  # whichever rank is first ends the job, with these words
    with pytest.raises(refused, match=r"no queue: .* settings=Settings\(queue_bytes=...\)"), plain.minibatch():
        plain.claim([])


def test_no_queue_and_no_minibatch_are_refused(ended: Ended) -> None:
    (outcome,) = ended(refusals_before_work, world=1)
    assert outcome.answered and outcome.error is None, outcome.describe()


def leaves_early(rank: int, world: int) -> None:
    model = sharded(world)
    with model.minibatch():
        for count, one in enumerate(model.claim(loaded(rank, 0, 2))):
            if not count:
                dist.barrier()  # each has claimed one: else rank 0 may take all of them
            backward(model, one["x"])
            if rank == 1:
                break


def never_calls(rank: int, world: int) -> None:
    model = sharded(world)
    with model.minibatch():
        for one in model.claim(loaded(rank, 0, 2)) if rank == 0 else []:
            backward(model, one["x"])


def too_much(rank: int, world: int) -> None:
    model = sharded(world)
    claim_all(model, loaded(rank, 0, 1), float)
    with model.minibatch():
        for _ in model.claim([{"x": torch.zeros(ROOM, dtype=torch.int64)}] if rank == 1 else []):
            pass


@pytest.mark.parametrize(
    ("program", "culprit", "message"),
    [
        (leaves_early, 1, r"rank 1 \(epoch 1\) left the queue before its end; a rank that calls model.claim\(\)"),
        (never_calls, 0, r"rank 0 \(epoch 1\) shares a queue, but rank 1 ended that minibatch without an offer"),
        (too_much, 1, r"rank 1 \(epoch 2\) offers 1 microbatches that take \d+ bytes; Settings\(queue_bytes=16384\)"),
    ],
)
def test_what_breaks_the_rules_ends_the_job_on_every_rank(
    program: Callable[[int, int], None], culprit: int, message: str, ended: Ended
) -> None:
    outcomes = ended(program)
    assert re.search(message, outcomes[culprit].message), outcomes[culprit].describe()
    other = outcomes[1 - culprit]
    assert other.error == "PeerLostError" and re.search(message, other.message), other.describe()


def test_without_libatomic_a_queue_is_refused_before_any_work() -> None:
    without = mock.patch.object(atomics, "default_atomics", plain_x86_64)
    with without, pytest.raises(UnsupportedError, match="apt-get install libatomic1"):
        fully_shard(torch.nn.Linear(2, 2), mesh=mock_mesh(), settings=Settings(queue_bytes=64))


def mock_mesh() -> Any:
    """As much of a mesh as is read before the settings."""
    return mock.Mock(ndim=1, device_type="cpu")


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_queue_bytes_is_a_whole_number(value: Any) -> None:
    with pytest.raises(ValueError, match="queue_bytes must be a whole number of bytes, 0 or more"):
        Settings(queue_bytes=value)


# death -----------------------------------------------------------------------------------------------------------


def train_until_the_end(rank: int, world: int, at: str, culprit: int) -> None:
    model = sharded(world)
    report("ready")
    for step in range(2000):
        with model.minibatch():
            if rank == culprit and step == 2 and at == "before it offers":
                die()
            claims = model.claim(loaded(rank, step, 3))
            if rank == culprit and step == 2 and at == "after it has offered":
                die()
            for m, microbatch in enumerate(claims):
                if rank == culprit and step == 2 and at == "with a claim":
                    die()
                backward(model, microbatch["x"])
                if rank == culprit and step == 2 and m == 0 and at == "between claims":
                    die()
            if rank == culprit and step == 2 and at == "with a claim":
                die()  # it got none
        model.zero_grad()


@pytest.mark.parametrize(
    ("at", "culprit"),
    [("before it offers", 1), ("after it has offered", 0), ("with a claim", 0), ("between claims", 2)],
)
def test_killed_in_the_middle_of_the_queue(at: str, culprit: int, ended: Ended) -> None:
    """Rank 0 is the queue's home: its memory outlives it for the ranks that have mapped it."""
    outcomes = ended(train_until_the_end, at, culprit, world=WORLD)
    assert outcomes[culprit].exit_code == -9, outcomes[culprit].describe()
    assert_all_noticed(outcomes, culprit, outcomes[culprit].reports[-1][0])


# the example ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_example_runs() -> None:
    """As a user starts it."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/claim.py"],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"step {step}: 1180 tokens" for step in range(3)]
