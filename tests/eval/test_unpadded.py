"""Under odc no padding is needed: the same scores, fewer forwards, on a sharded Qwen2."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from support.tiny_lm import tiny_qwen2
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from odc import fully_shard
from odc.eval import gather_metrics, pad_requests, plan_requests, session
from odc.fsdp import default_store

pytest.importorskip("transformers", reason="needs the extra: pip install 'odc-fsdp[train]'")

_runs = itertools.count()  # the same number for a run on every rank
COUNTS = {2: (5, 2), 3: (4, 0, 2)}  # requests by rank; one has none


def request(rank: int, number: int) -> torch.Tensor:
    """int64 [1, length], of another length for each."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randint(0, 45, (1, 5 + 7 * number + rank), generator=generator)


@torch.no_grad()
def score(model: Any, tokens: torch.Tensor) -> float:
    """Summed log-probability of all tokens but the first."""
    logits = model(tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
    return float(logits.gather(-1, tokens[0, 1:, None]).sum())


def evaluate(model: Any, rank: int, world: int, mode: Any) -> tuple[Any, ...]:
    """All scores on rank 0; forwards that this rank ran; when it ran its last, and was done.

    Without padding rank 0 begins when all others are done, which needs forwards that wait for no other rank.
    """
    forwards, last, store, run = 0, 0.0, default_store(), f"evaluation {next(_runs)}"

    def count(*unused: Any) -> None:
        nonlocal forwards, last
        forwards, last = forwards + 1, time.monotonic()

    model.register_forward_hook(count)
    with session(modules=[model], timeout_s=100.0) as peers:
        mine = [request(rank, number) for number in range(COUNTS[world][rank])]
        plan = plan_requests({"score": len(mine)}, peers)
        padded = pad_requests(mine, plan, "score", mode=mode, make_pad=lambda: request(0, 0))
        if rank == 0 and mode == "none":
            store.wait([f"{run} of rank {other}" for other in range(1, world)])  # before it has fetched from them
        scores = padded.keep([score(model, tokens) for tokens in padded.requests])
        done = time.monotonic()
        store.set(f"{run} of rank {rank}", "done")
        found = gather_metrics({"score": [((rank, i), value) for i, value in enumerate(scores)]}, peers)
    return found, forwards, last, done


def _all_ways(rank: int, world: int) -> list[tuple[Any, ...]]:
    odc, fsdp2 = tiny_qwen2(fully_shard), tiny_qwen2(torch_fully_shard)
    return [
        evaluate(odc, rank, world, "pad"),
        evaluate(odc, rank, world, "none"),
        evaluate(fsdp2, rank, world, "pad"),
        evaluate(tiny_qwen2(), rank, world, "none"),
    ]


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_padded_and_unpadded_give_the_same_scores(ranks, world: int):
    by_rank = ranks(world).run(_all_ways)
    counts = COUNTS[world]
    padded, unpadded, fsdp2, whole = ([one[way] for one in by_rank] for way in range(4))
    keys = [(rank, number) for rank, count in enumerate(counts) for number in range(count)]
    assert [key for key, _ in unpadded[0][0]["score"]] == keys
    assert padded[0][0] == unpadded[0][0] == fsdp2[0][0] == whole[0][0]
    assert [one[0] for one in unpadded[1:]] == [None] * (world - 1)
    assert [one[1] for one in padded] == [one[1] for one in fsdp2] == [max(counts)] * world
    assert [one[1] for one in unpadded] == list(counts)
    assert all(one[3] < unpadded[0][2] for one in unpadded[1:]), "rank 0 was to be the last by far"
