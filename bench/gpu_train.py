"""Training of a 0.5B-parameter Qwen2 (random weights) on CUDA by two arms: losses, step time, memory.

Run as `OMP_NUM_THREADS=1 python -m bench.gpu_train --results bench/results` (`make bench-gpu` does); with `--rehearse`
the same script trains a tiny model on the CPU. Both arms get the same samples, weights and optimizer; a loss is summed
over all tokens of the step. NCCL refuses ranks that share a device, so FSDP2 then runs on one rank with all samples:
its losses are still the reference, but its time and memory are those of another job and do not compare with odc's. With
`--gloo` it has as many ranks as odc, which communicate through the host: its memory compares, and its time is gloo's.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.functional import cross_entropy

from odc.bench.ranks import RankPool, alone, held
from odc.bench.report import store
from odc.bench.units import drop
from odc.provenance import begin

SAMPLES, TOKENS, STEPS, WARM = 8, 1024, 6, 2
GIB = float(1 << 30)
LARGEST_GAP = 2e-2  # of losses near 12, in bf16
#: Qwen2-0.5B's shape, and one for the CPU.
QWEN2 = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
TINY = {**dict.fromkeys(QWEN2, 2), "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}


def qwen2(shape: dict[str, int]) -> Any:
    """The model with random weights, the same on every rank."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**shape, tie_word_embeddings=True, max_position_embeddings=TOKENS, attn_implementation="sdpa")
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config)


def build(arm: str, device: str) -> None:
    """The sharded model and its optimizer, in `held`."""
    drop()
    held.device = torch.device(device, torch.cuda.current_device() if device == "cuda" else None)
    held.shape = QWEN2 if device == "cuda" else TINY
    with held.device:
        model = qwen2(held.shape)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if arm == "odc":
        from odc.fsdp import fully_shard
    else:
        from torch.distributed.fsdp import fully_shard  # type: ignore[assignment]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    held.model = model
    held.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats(held.device)


def train(arm: str, steps: int) -> tuple[list[float], list[float], float, float]:
    """(losses over all ranks, seconds of each step, peak GiB of torch's allocator, GiB of odc's heap)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    losses, seconds = [], []
    for step in range(steps):
        rows = torch.randint(
            held.shape["vocab_size"], (SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(step)
        )
        mine = rows[rank::world].to(held.device)
        settle()
        begin = time.perf_counter()
        total = torch.zeros((), device=held.device)
        for i, row in enumerate(mine):
            if arm != "odc":
                held.model.set_is_last_backward(i == len(mine) - 1)
            elif i == 0:
                held.block = held.model.minibatch()
                held.block.__enter__()
            logits = held.model(row[None, :-1]).logits
            loss = cross_entropy(logits[0].float(), row[1:], reduction="sum")
            (loss * world / (SAMPLES * TOKENS)).backward()
            total += loss.detach()
        if arm == "odc":
            held.block.__exit__(None, None, None)
        held.optimizer.step()
        held.optimizer.zero_grad()
        settle()
        seconds.append(time.perf_counter() - begin)
        whole = total.cpu()
        dist.all_reduce(whole)
        losses.append(float(whole) / (SAMPLES * TOKENS))
    heap = 0
    if arm == "odc":
        from odc.fsdp import root_of

        heap = root_of(held.model).layout.heap.nbytes
    peak = torch.cuda.max_memory_allocated(held.device) if held.device.type == "cuda" else 0
    return losses, seconds, peak / GIB, heap / GIB


def settle() -> None:
    if held.device.type == "cuda":
        torch.cuda.synchronize()


def run(arm: str, ranks: int, steps: int, device: str) -> dict[str, Any]:
    """The row of one arm, and its losses."""
    with RankPool(ranks, 300.0, device) as pool:
        pool.each(build, arm, device)
        answers = pool.each(train, arm, steps)
        pool.each(drop)
    losses, seconds = answers[0][0], [max(each) for each in zip(*(answer[1] for answer in answers), strict=True)]
    return {
        "arm": arm,
        "ranks": ranks,
        "step_s": median(seconds[WARM:] or seconds),
        "tokens_s": SAMPLES * TOKENS / median(seconds[WARM:] or seconds),
        "peak_GiB_a_rank": max(answer[2] for answer in answers),
        "heap_GiB_a_rank": max(answer[3] for answer in answers),
        "losses": [round(loss, 5) for loss in losses],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--results", type=Path, default=Path("runs/bench"))
    parser.add_argument("--gloo", action="store_true", help="FSDP2 by way of the host where ranks share a device")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU: does the script run?")
    options = parser.parse_args()
    begun = begin()
    if options.steps <= WARM:
        parser.error(f"--steps must be more than {WARM}, which warm up")
    if not (options.rehearse or torch.cuda.is_available()):
        parser.exit(1, "bench.gpu_train: no CUDA device here (`odc doctor` says what is missing)\n")
    device = "cpu" if options.rehearse else "cuda"
    title, name = (__doc__ or "").splitlines()[0], "gpu_train"
    if options.rehearse:
        title, name = "A rehearsal of bench.gpu_train: a tiny model on the CPU", "gpu_train_rehearsal"
    about = {"tokens_a_step": SAMPLES * TOKENS, "steps": options.steps, "begun": begun}
    rows: list[dict[str, Any]] = []

    def measured(arm: str, ranks: int, reference: list[float] | None) -> list[float]:
        """The losses of an arm, whose row is stored at once, in case a later arm fails or is cut off."""
        row = alone(run, arm, ranks, options.steps, device)
        losses: list[float] = row["losses"]
        row["largest_loss_gap"] = max(abs(a - b) for a, b in zip(losses, reference or losses, strict=True))
        rows.append(row)
        store(options.results, name, title, rows, **about)
        return losses

    for ranks in options.ranks:
        shared = device == "cuda" and ranks > torch.cuda.device_count()
        found = measured("odc", ranks, None)  # first: by way of the host FSDP2 may take all the time there is
        measured("fsdp2", 1 if shared and not options.gloo else ranks, found)
    if far := [row for row in rows if row["largest_loss_gap"] > LARGEST_GAP]:
        raise SystemExit(f"FSDP2's losses differ by {far[0]['largest_loss_gap']} from odc's before them")


if __name__ == "__main__":
    main()
