"""Training of a 0.5B-parameter Qwen2 (random weights) on CUDA by two arms: losses, step time, memory.

Run as `OMP_NUM_THREADS=1 python -m bench.gpu_train --results bench/results` (`make bench-gpu` does); with `--rehearse`
the same script trains a tiny model on the CPU. Both arms get the same samples, weights and optimizer; a loss is summed
over all tokens of the step. NCCL refuses ranks that share a device, so FSDP2 then runs on one rank with all samples:
its losses are still the reference, but its time and memory are those of another job and do not compare with odc's. With
`--gloo` it has as many ranks as odc, which communicate through the host: its memory compares, and its time is gloo's.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.functional import cross_entropy

from bench.script import Script
from odc import Settings
from odc.arms import ARMS, ArmName
from odc.bench.ranks import RankPool, alone, held
from odc.bench.units import drop
from odc.experiments.arms import run_minibatch, shard_model
from odc.fsdp import root_of

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


def build(arm: ArmName, device: str) -> None:
    """The sharded model and its optimizer, in `held`."""
    drop()
    held.device = torch.device(device, torch.cuda.current_device() if device == "cuda" else None)
    held.shape = QWEN2 if device == "cuda" else TINY
    with held.device:
        held.model = qwen2(held.shape)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_model(ARMS[arm], held.model, list(held.model.model.layers), Settings(), device, mp_policy=policy)
    held.optimizer = torch.optim.AdamW(held.model.parameters(), lr=1e-4)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats(held.device)


def train(arm: ArmName, steps: int) -> tuple[list[float], list[float], float, float]:
    """(losses over all ranks, seconds of each step, peak GiB of torch's allocator, GiB of odc's heap)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    losses, seconds = [], []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(held.shape["vocab_size"], (SAMPLES, TOKENS + 1), generator=generator)
        mine, total = rows[rank::world].to(held.device), torch.zeros((), device=held.device)

        def backward(m: int, mine: torch.Tensor = mine, total: torch.Tensor = total) -> None:
            logits = held.model(mine[m][None, :-1]).logits
            loss = cross_entropy(logits[0].float(), mine[m][1:], reduction="sum")
            (loss * world / (SAMPLES * TOKENS)).backward()
            total += loss.detach()

        settle()
        begin = time.perf_counter()
        run_minibatch(ARMS[arm], held.model, len(mine), backward)
        held.optimizer.step()
        held.optimizer.zero_grad()
        settle()
        seconds.append(time.perf_counter() - begin)
        whole = total.cpu()
        dist.all_reduce(whole)
        losses.append(float(whole) / (SAMPLES * TOKENS))
    heap = root_of(held.model).layout.heap.nbytes if arm == "odc" else 0
    peak = torch.cuda.max_memory_allocated(held.device) if held.device.type == "cuda" else 0
    return losses, seconds, peak / GIB, heap / GIB


def settle() -> None:
    if held.device.type == "cuda":
        torch.cuda.synchronize()


def run(arm: ArmName, ranks: int, steps: int, device: str) -> dict[str, Any]:
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
    script = Script(
        __doc__,
        ranks=([2, 4], "numbers of ranks"),
        steps=(STEPS, f"more than {WARM}, which warm up"),
        gloo=(False, "FSDP2 by way of the host where ranks share a device"),
        rehearse=(False, "a tiny model on the CPU: does the script run?"),
    )
    given, rows = script.given, list[dict[str, Any]]()
    if given.steps <= WARM:
        raise SystemExit(f"--steps must be more than {WARM}, which warm up")
    if not (given.rehearse or torch.cuda.is_available()):
        raise SystemExit("bench.gpu_train: no CUDA device here (see `odc doctor`)")
    device = "cpu" if given.rehearse else "cuda"
    title, name = (__doc__ or "").splitlines()[0], "gpu_train"
    if given.rehearse:
        title, name = "A rehearsal of bench.gpu_train: a tiny model on the CPU", "gpu_train_rehearsal"

    def measured(arm: ArmName, ranks: int, reference: list[float] | None) -> list[float]:
        """The losses of an arm, whose row is stored at once, in case a later arm fails or is cut off."""
        row = alone(run, arm, ranks, given.steps, device)
        losses: list[float] = row["losses"]
        row["largest_loss_gap"] = max(abs(a - b) for a, b in zip(losses, reference or losses, strict=True))
        rows.append(row)
        script.store(name, title, rows, tokens_a_step=SAMPLES * TOKENS, steps=given.steps)
        return losses

    for ranks in given.ranks:
        shared = device == "cuda" and ranks > torch.cuda.device_count()
        found = measured("odc", ranks, None)  # first: by way of the host FSDP2 may take all the time there is
        measured("fsdp2", 1 if shared and not given.gloo else ranks, found)
    if far := [row for row in rows if row["largest_loss_gap"] > LARGEST_GAP]:
        raise SystemExit(f"FSDP2's losses differ by {far[0]['largest_loss_gap']} from odc's before them")


if __name__ == "__main__":
    main()
