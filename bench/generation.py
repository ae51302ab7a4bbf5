"""`model.generate` of a sharded model: in lockstep, as transformers does under FSDP, against each rank's own pace.

Run as `OMP_NUM_THREADS=1 python -m bench.generation --results bench/results` (about two minutes). Everything is
*measured*: two ranks with a core each, a small Qwen2 of random weights, one request a call, greedy. A request ends
after a number of tokens, LongAlign-like (lognormal, sigma 0.8) with the mean that `--tokens` says. In lockstep a flag
is all-reduced before every token, and a rank that is done runs forwards until the others are. `kept` fetches weights
once for the whole run, for a whole model of memory.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.script import Script
from odc import Settings
from odc.arms import ARMS
from odc.bench.ranks import RankPool, held
from odc.bench.units import drop
from odc.blocks import blocks_of
from odc.experiments.arms import shard_model
from odc.simulate.lengths import Lognormal

#: (transport, in lockstep, weights kept)
WAYS: dict[str, tuple[str, bool, bool]] = {
    "fsdp2, lockstep": ("fsdp2", True, False),
    "odc, lockstep": ("odc", True, False),
    "odc": ("odc", False, False),
    "odc, kept": ("odc", False, True),
}


def lengths_of(ranks: int, requests: int, mean: float, seed: int) -> list[list[int]]:
    """New tokens of every request, by rank."""
    drawn = Lognormal(1000.0, 4000, 0.8).draw(ranks * requests, np.random.default_rng(seed))
    return np.maximum(1, drawn * mean / drawn.mean()).astype(int).reshape(ranks, requests).tolist()


def build(layers: int, hidden: int) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=1024, num_attention_heads=4, num_key_value_heads=2, **sizes))


def generate(way: str, lengths: list[list[int]], layers: int, hidden: int) -> tuple[float, int]:
    """On every rank: seconds that its requests took, and its forwards."""
    transport, lockstep, kept = WAYS[way]
    drop()
    model, forwards = build(layers, hidden), 0
    shard_model(ARMS[transport], model, blocks_of(model), Settings())  # type: ignore[index]

    def count(*unused: Any) -> None:
        nonlocal forwards
        forwards += 1

    def answer(tokens: int) -> None:
        ids = torch.arange(1, 9)[None]
        options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        found = model.generate(ids, attention_mask=torch.ones_like(ids), synced_gpus=lockstep, **options)
        assert found.shape[1] == 8 + tokens

    answer(2)  # builds heaps and buffers
    if kept:
        model.set_reshard_after_forward(False)
    model.register_forward_pre_hook(count)
    dist.barrier()
    started = time.perf_counter()
    for tokens in lengths[dist.get_rank()]:
        answer(tokens)
    took = time.perf_counter() - started
    dist.barrier()
    held.module = model
    drop()
    return took, forwards


def rows_of(pool: RankPool, given: Any) -> list[dict[str, Any]]:
    """One row a way; speeds are medians of ratios within a repeat."""
    lengths = lengths_of(pool.world, given.requests, given.tokens, given.seed)
    runs: dict[str, list[list[tuple[float, int]]]] = {way: [] for way in WAYS}
    for _ in range(given.repeats):
        for way in WAYS:
            runs[way].append(pool.each(generate, way, lengths, given.layers, given.hidden))
    took = {way: [max(seconds for seconds, _ in run) for run in some] for way, some in runs.items()}
    rows = []
    for way, times in took.items():
        speeds = [[a / b for a, b in zip(took[base], times, strict=True)] for base in list(WAYS)[:2]]
        rows.append(
            {
                "way": way,
                "forwards by rank": "+".join(str(forwards) for _, forwards in runs[way][0]),
                "s (median)": median(times),
                "times as fast as the first": median(speeds[0]),
                "least": min(speeds[0]),
                "most": max(speeds[0]),
                "times as fast as the second": median(speeds[1]),
            }
        )
    return rows


def main() -> None:
    script = Script(
        __doc__,
        ranks=(2, "number of ranks"),
        requests=(16, "of each rank"),
        tokens=(24.0, "new tokens of the mean request"),
        layers=(4, "of the model"),
        hidden=(256, "size of the model"),
        repeats=(3, "runs of each way"),
        seed=(0, "of the lengths"),
    )
    given = script.given
    with RankPool(given.ranks, timeout_s=1800) as pool:
        rows = rows_of(pool, given)
    size = sum(parameter.numel() for parameter in build(given.layers, given.hidden).parameters())
    title = f"{given.requests} requests on each of {given.ranks} ranks generated, {size / 1e6:.1f}M parameters"
    lengths = f"LongAlign-like, {given.tokens:g} new tokens in the mean"
    script.store("generation", title, rows, seed=given.seed, lengths=lengths)


if __name__ == "__main__":
    main()
