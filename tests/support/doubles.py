"""Moves, tensors and exchanges for the tests of dispatch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from odc.dispatch import Rearrangement
from odc.dispatch.exchange import AllGatherExchange, CollectiveExchange, Exchange, OnDemandExchange
from odc.dispatch.route import Route

KINDS = ("collective", "all_gather", "on_demand")
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.complex64, torch.float8_e4m3fn]
_made = 0


@contextmanager
def exchange_of(kind: str, rank: int, world: int, channels: list[str], **more: Any) -> Iterator[Exchange]:
    """An exchange of all ranks of a pool."""
    from odc.fsdp import default_store

    global _made
    _made += 1
    name, timeout_s = f"test{_made}", more.pop("timeout_s", 60.0)
    made: Exchange
    if kind == "on_demand":
        made = OnDemandExchange(
            default_store(),
            range(world),
            rank,
            channels,
            timeout_s=timeout_s,
            name=name,
            **{"arena_bytes": 1 << 20} | more,
        )
    else:
        cls = AllGatherExchange if kind == "all_gather" else CollectiveExchange
        made = cls(default_store(), timeout_s=timeout_s, name=name)
    try:
        yield made
    except BaseException:
        raise
    else:
        made.close()


def random_move(world: int, most: int, seed: int) -> Rearrangement:
    """Any bijection, empty instances and slots in any order included."""
    draw = np.random.default_rng(seed)
    counts = draw.integers(0, most + 1, world) * (draw.random(world) < 0.8)
    n = int(counts.sum())
    owners = draw.integers(0, world, n) if draw.random() < 0.7 else np.full(n, draw.integers(world))
    return Rearrangement(counts, np.bincount(owners, minlength=world), draw.permutation(n))


def ragged(move: Rearrangement, seed: int) -> list[torch.Tensor]:
    """One tensor an example, of ragged rows, its values unlike any other's."""
    draw = np.random.default_rng(seed)
    rows = draw.integers(0, 5, len(move.order))
    return [
        100.0 * i + torch.arange(float(count) * 3, device="cpu").view(count, 3) for i, count in enumerate(rows.tolist())
    ]


def joined(examples: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat(examples) if examples else like[:0]


def moves(rank: int, world: int, kind: str, seeds: list[int], default_device: str = "cpu") -> None:
    """Move random rows by random plans, in CPU memory whatever torch's default is, and look where each one arrives."""
    with torch.device(default_device), exchange_of(kind, rank, world, ["data", "seeds"]) as exchange:
        assert [one.tolist() for one in exchange.gather(1, "seeds", np.array(seeds))] == [seeds] * world
        for step, seed in enumerate(seeds, 1):
            plan = random_move(world, 5, seed)
            values = ragged(plan, seed)
            dtype = DTYPES[seed % len(DTYPES)]
            fields = {
                "rows": (values, torch.zeros(0, 3, device="cpu")),
                "other": (
                    [one[:, :2].to(dtype).view(-1, 1, 2) for one in values],
                    torch.zeros(0, 1, 2, dtype=dtype, device="cpu"),
                ),
                "one": (
                    [torch.tensor([i], device="cpu") for i in range(len(values))],
                    torch.zeros(0, dtype=torch.int64, device="cpu"),
                ),
            }
            given, expected, rows = {}, {}, {}
            for name, (examples, like) in fields.items():
                at = plan.starts.tolist()
                batches = [examples[at[i] : at[i + 1]] for i in range(world)]
                given[name] = joined(batches[rank], like)
                expected[name] = joined(plan.apply(batches)[rank], like)
                rows[name] = [len(one) for one in examples]
            got = exchange.move(step, "data", Route.of(plan, rows, rank), given)
            for name, value in expected.items():
                assert got[name].dtype == value.dtype and got[name].shape == value.shape, f"{name} of seed {seed}"
                same = torch.equal(got[name].view(torch.uint8), value.contiguous().view(torch.uint8))
                assert same, f"{name} of seed {seed} on rank {rank}"
