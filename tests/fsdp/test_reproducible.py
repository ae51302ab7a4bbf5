"""`Settings(reproducible=True)`: the order in which pushes arrive changes no bit of a gradient.

Delays are put in front of each push to each owner. That they do reorder additions is shown by the fp32 accumulator,
whose bits differ between the same runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import differences
from support.extent import examples
from support.models import Case, build, next_token_loss, own_gradients, tokens
from support.ranks import Pools
from torch.distributed.device_mesh import init_device_mesh

from odc import Settings, fully_shard
from odc.protocol.push import HostRoute

RUNS = 20
FEWER = 6  # enough for fp32 bits to differ, as `test_the_delays_do_reorder_additions` shows
COUNTS = (3, 1, 2, 2)


@contextlib.contextmanager
def delayed_pushes(seed: object, longest_s: float) -> Iterator[list[int]]:
    """Sleep up to `longest_s` before every push to an owner; gives the owners in the order they were pushed to."""
    random_ = random.Random(repr(seed))
    push_to, owners = HostRoute.push_to, list[int]()

    def delayed(self: HostRoute, owner: int, *args: Any) -> int:
        time.sleep(random_.random() * longest_s)
        owners.append(owner)
        return push_to(self, owner, *args)

    with mock.patch.object(HostRoute, "push_to", delayed):
        yield owners


def run_minibatch(model: Any, rank: int, step: int, count: int, skew: tuple[float, ...] = ()) -> None:
    """`skew`: seconds to wait before each microbatch."""
    with model.minibatch():
        for i in range(count):
            time.sleep(skew[i] if skew else 0.0)
            x = tokens(rank, step, i)
            (next_token_loss(model(x), x) / 18).backward()


def bits(model: Any) -> str:
    """Digest of all own gradients."""
    digest = hashlib.sha256()
    for name, gradient in own_gradients(model).items():
        assert gradient is not None, f"{name} has no gradient"
        digest.update(gradient.numpy().tobytes())
    return digest.hexdigest()


def bits_of_runs(
    rank: int,
    world: int,
    chosen: Settings,
    runs: int,
    low_precision: bool = False,
    hybrid: bool = False,
    longest_s: float = 0.003,
) -> list[str]:
    """The same minibatch again and again, under other delays each time."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    case = Case(counts=(COUNTS,), low_precision=low_precision)
    model = build(fully_shard, case, grid if hybrid else init_device_mesh("cpu", (world,)), settings=chosen)
    found = []
    for run in range(runs):
        with delayed_pushes((rank, run), longest_s if run else 0.0) as owners:
            run_minibatch(model, rank, 0, COUNTS[rank])
        assert len(owners) >= COUNTS[rank] * 4, f"the delays were not reached: {owners}"
        found.append(bits(model))
        model.zero_grad()
    return found


@pytest.mark.parametrize("low_precision", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", ["server", "direct"])
def test_runs_under_random_delays_give_the_same_bits(ranks: Pools, accumulate: str, low_precision: bool) -> None:
    chosen = Settings(reproducible=True, accumulate=accumulate)  # type: ignore[arg-type]
    runs = max(FEWER, examples(RUNS))
    for found in ranks(4).run(bits_of_runs, chosen, runs, low_precision):
        assert len(set(found)) == 1


def test_with_replicas_too(ranks: Pools) -> None:
    found = ranks(4).run(bits_of_runs, Settings(reproducible=True), FEWER, False, True)
    assert all(len(set(one)) == 1 for one in found)
    # Both replicas of a shard add the same numbers in the same order.
    assert found[0] == found[2]
    assert found[1] == found[3]


@pytest.mark.parametrize("accumulate", ["server", "direct"])
def test_the_delays_do_reorder_additions(ranks: Pools, accumulate: str) -> None:
    chosen = Settings(accumulate=accumulate)  # type: ignore[arg-type]
    for longest_s in (0.003, 0.03, 0.3):  # the slower the machine, the longer a delay must be to matter
        found = ranks(4).run(bits_of_runs, chosen, FEWER, False, False, longest_s)
        if any(len(set(one)) > 1 for one in found):
            return
    pytest.fail("the same bits in fp32: the tests above would show nothing")


# skew ------------------------------------------------------------------------------------------------------------

Counts = tuple[tuple[int, ...], ...]


def same_under_skew(
    rank: int, world: int, counts: Counts, skew: tuple[tuple[float, ...], ...], chosen: Settings, longest_s: float
) -> int:
    """Minibatches of `counts`, once at full speed and once with ranks and pushes held up; the bits must agree."""
    seen: list[list[dict[str, torch.Tensor | None]]] = []
    for held_up in (False, True):
        model = build(fully_shard, Case(counts=counts), init_device_mesh("cpu", (world,)), settings=chosen)
        seen.append([])
        with delayed_pushes((rank, counts), longest_s if held_up else 0.0):
            for step, by_rank in enumerate(counts):
                run_minibatch(model, rank, step, by_rank[rank], skew[rank] if held_up else ())
                seen[-1].append(own_gradients(model))
                # What an optimizer would do, so that an epoch mixed up with another shows.
                with torch.no_grad():
                    for p in model.parameters():
                        if p.grad is not None:
                            p.sub_(p.grad, alpha=0.1)
                model.zero_grad()
    wrong = [line for mine, other in zip(*seen, strict=True) for line in differences(mine, other, None)]
    assert not wrong, "\n".join(wrong)
    return sum(gradient is not None for step in seen[0] for gradient in step.values())


waits = st.tuples(*[st.sampled_from([0.0, 0.0, 0.001, 0.004, 0.015])] * 3)


@settings(max_examples=examples(12), deadline=None)
@given(
    counts=st.lists(st.tuples(*[st.integers(0, 3)] * 4), min_size=2, max_size=4).map(tuple),
    skew=st.tuples(*[waits] * 4),
    accumulate=st.sampled_from(["server", "direct"]),
    prefetch=st.integers(0, 2),
    overlap=st.booleans(),
    longest_s=st.sampled_from([0.0, 0.002]),
)
def test_any_interleaving_gives_the_same_bits(
    ranks: Pools,
    counts: Counts,
    skew: tuple[tuple[float, ...], ...],
    accumulate: str,
    prefetch: int,
    overlap: bool,
    longest_s: float,
) -> None:
    chosen = Settings(
        reproducible=True,
        accumulate=accumulate,  # type: ignore[arg-type]
        prefetch=prefetch,
        push_overlap=overlap,
        staging_block_bytes=4096,
    )
    with_gradients = ranks(4).run(same_under_skew, counts, skew, chosen, longest_s)
    assert len(set(with_gradients)) == 1, "a gradient is there on some ranks and missing on others"
