"""Every exchange against `Rearrangement.apply`, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.doubles import KINDS, exchange_of, ragged, random_move

from odc.dispatch.route import Route

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.complex64, torch.float8_e4m3fn]


def joined(examples: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat(examples) if examples else like[:0]


def moves(rank: int, world: int, kind: str, seeds: list[int]) -> None:
    with exchange_of(kind, rank, world, ["data"]) as exchange:
        for step, seed in enumerate(seeds, 1):
            plan = random_move(world, 5, seed)
            values = ragged(plan, seed)
            dtype = DTYPES[seed % len(DTYPES)]
            fields = {
                "rows": (values, torch.zeros(0, 3)),
                "other": ([one[:, :2].to(dtype).view(-1, 1, 2) for one in values], torch.zeros(0, 1, 2, dtype=dtype)),
                "one": ([torch.tensor([i]) for i in range(len(values))], torch.zeros(0, dtype=torch.int64)),
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 4])
def test_a_move_brings_every_row_to_its_place(ranks: Any, kind: str, world: int) -> None:
    ranks(world).run(moves, kind, list(range(24)))
