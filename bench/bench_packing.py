"""Packing what an optimizer step changes of bf16 weights, and applying it: processor seconds for a GB of weights.

One process on one core. The model and the text of `bench.changes` are trained by AdamW: some steps at a high rate, then
at each rate of the table. What the last step has changed is packed, and applied to a copy of the weights before it, in
turns with a copy of all of them; medians of the turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch

from bench.changes import HIGH_RATE, RATES, SHAPE, text
from odc.movers import changes

TURNS, BEFORE, TOKENS = 7, 10, 256


@pytest.fixture(scope="module")
def train() -> Callable[[float, int], tuple[torch.Tensor, torch.Tensor]]:
    """Trains so many steps at a rate; returns all weights before the last step and after it, as bytes of bf16."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    optimizer, ids = torch.optim.AdamW(model.parameters(), HIGH_RATE), text()
    done = 0

    def weights() -> torch.Tensor:
        whole = torch.cat([one.detach().bfloat16().flatten() for one in model.parameters()]).view(torch.uint8)
        return whole[: len(whole) // 16 * 16]

    def run(rate: float, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal done
        optimizer.param_groups[0]["lr"] = rate
        for _ in range(steps):
            before = weights()
            batch = ids[done * TOKENS :][: TOKENS + 1].long()[None]
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
        return before, weights()

    run(HIGH_RATE, 2 * BEFORE)
    return run


def seconds(work: Callable[[], object]) -> float:
    """Of this process's processor time."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


@pytest.mark.parametrize("rate", RATES)
def test_seconds_a_gb(rate: float, train: Callable[[float, int], Any], note: Callable[..., None]) -> None:
    torch.set_num_threads(1)
    changes.prepare()
    old, new = train(rate, BEFORE)
    into, shard = torch.empty(changes.room_for(len(old)), dtype=torch.uint8), torch.empty_like(old)
    size = changes.pack(old, new, into)
    turns = []
    for _ in range(TURNS):
        copied = seconds(lambda: shard.copy_(old))
        packed = seconds(lambda: changes.pack(old, new, into))
        turns.append((packed, seconds(lambda: changes.patch(shard, into[:size])), copied))
        assert torch.equal(shard, new)
    pack, patch, copy = (median(column) / len(old) * 1e9 for column in zip(*turns, strict=True))
    note(**{
        "learning rate": rate,
        "changed words": f"{float((old.view(torch.int16) != new.view(torch.int16)).float().mean()):.3f}",
        "packed of whole": f"{size / len(old):.3f}",
        "pack, s/GB": pack,
        "patch, s/GB": patch,
        "both, s/GB": pack + patch,
        "a copy, s/GB": copy,
    })  # fmt: skip
