"""Training of a 0.5B-parameter Qwen2 (random weights) on CUDA by two arms: losses, step time, memory.

Run as `OMP_NUM_THREADS=1 python -m bench.gpu_train --results bench/results` (`make bench-gpu` does). Both arms get the
same samples, weights and optimizer; a loss is summed over all tokens of the step. Where ranks share a device NCCL
refuses to work, so FSDP2 then runs on one rank with all samples: its losses are still the reference, its time and
memory are those of another job and say nothing of odc's.
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

from odc.bench.crew import Crew, apart, held
from odc.bench.report import store
from odc.bench.units import drop

SAMPLES, TOKENS, STEPS, WARM = 8, 1024, 6, 2
GIB = float(1 << 30)
LARGEST_GAP = 2e-2  # of losses near 12, in bf16


def qwen2() -> Any:
    """Qwen2-0.5B's shape."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=TOKENS,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config)


def build(arm: str) -> None:
    """The sharded model and its optimizer, in `held`."""
    drop()
    device = torch.device("cuda", torch.cuda.current_device())
    model = qwen2().to(device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if arm == "odc":
        from odc.fsdp import fully_shard
    else:
        from torch.distributed.fsdp import fully_shard  # type: ignore[assignment]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    held.model, held.device = model, device
    held.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.cuda.reset_peak_memory_stats(device)


def train(arm: str, steps: int) -> tuple[list[float], list[float], float, float]:
    """(losses over all ranks, seconds of each step, peak GiB of torch's allocator, GiB of odc's heap)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    losses, seconds = [], []
    for step in range(steps):
        rows = torch.randint(151936, (SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(step))
        mine = rows[rank::world].to(held.device)
        torch.cuda.synchronize()
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
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        whole = total.cpu()
        dist.all_reduce(whole)
        losses.append(float(whole) / (SAMPLES * TOKENS))
    heap = 0
    if arm == "odc":
        from odc.fsdp import root_of

        heap = root_of(held.model).space.heap.nbytes
    return losses, seconds, torch.cuda.max_memory_allocated(held.device) / GIB, heap / GIB


def run(arm: str, ranks: int, steps: int) -> dict[str, Any]:
    """One arm's row; its losses beside."""
    with Crew(ranks, 900.0, "cuda") as crew:
        crew.each(build, arm)
        answers = crew.each(train, arm, steps)
        crew.each(drop)
    losses, seconds = answers[0][0], [max(each) for each in zip(*(answer[1] for answer in answers), strict=True)]
    return {
        "arm": arm,
        "ranks": ranks,
        "step_s": median(seconds[WARM:]),
        "peak_GiB_a_rank": max(answer[2] for answer in answers),
        "heap_GiB_a_rank": max(answer[3] for answer in answers),
        "losses": [round(loss, 5) for loss in losses],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--results", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    if options.steps <= WARM:
        parser.error(f"--steps: more than the {WARM} that are not timed")
    if not torch.cuda.is_available():
        parser.exit(1, "bench.gpu_train: no CUDA device here (`odc doctor` says what is missing)\n")
    rows = []
    for ranks in options.ranks:
        shared = ranks > torch.cuda.device_count()
        reference = apart(run, "fsdp2", 1 if shared else ranks, options.steps)
        row = apart(run, "odc", ranks, options.steps)
        gap = max(abs(a - b) for a, b in zip(row["losses"], reference["losses"], strict=True))
        rows += [reference | {"largest_loss_gap": 0.0}, row | {"largest_loss_gap": gap}]
        if gap > LARGEST_GAP:
            raise SystemExit(f"losses differ by {gap}: {row['losses']} against {reference['losses']}")
    title = (__doc__ or "").splitlines()[0]
    store(options.results, "gpu_train", title, rows, tokens_a_step=SAMPLES * TOKENS, steps=options.steps)


if __name__ == "__main__":
    main()
