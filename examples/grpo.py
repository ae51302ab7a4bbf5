"""GRPO with odc, the whole loop on one page.

On the CPU: `CUDA_VISIBLE_DEVICES= torchrun --nproc-per-node 2 examples/grpo.py --steps 20`.

The ranks train; a process beside them generates, with weights that it reads from the ranks' memory. What is to be
learnt stands in `Even`: put your own prompts and reward there. (`odc grpo` runs the same with more options.)
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import torch
import torch.distributed as dist

from odc import Settings, fully_shard, shutdown
from odc.balance import cost_from_config, lb_mini
from odc.blocks import blocks_of
from odc.experiments.grpo import GrpoConfig, Sample, grpo_advantages, kl_estimate, policy_losses
from odc.experiments.grpo.rollout import Rollout
from odc.experiments.grpo.samples import batch_of, token_log_probs
from odc.experiments.text.model import build_model, config_of, shipped_config
from odc.handover import version, weight_handle


class Even:
    """Prompts of random tokens; the reward is the share of even tokens in the response."""

    stop_ids = range(8)

    def prompts(self, step: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(step)
        return torch.randint(8, 128, (8, 6), generator=generator).tolist()

    def reward(self, response: list[int]) -> float:
        return sum(token % 2 == 0 for token in response) / len(response)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    task, config = Even(), GrpoConfig(group=4, response_tokens=32, max_tokens=128, kl=0.02)

    source: Path = shipped_config("qwen2-toy")
    model = build_model(source, dtype=torch.float32)
    for layer in blocks_of(model):
        fully_shard(layer)
    fully_shard(model, settings=Settings())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.0, eps=1e-6)
    cost = cost_from_config(config_of(source))

    model.publish()  # every rank: the first weights can be read
    with contextlib.ExitStack() as ending:
        rollout = ending.enter_context(Rollout(config, task.stop_ids, weight_handle(model))) if rank == 0 else None
        for step in range(steps):
            model.publish()  # every rank: the newest weights can be read
            found: list[list[Sample] | None] = [None]
            if rollout is not None:
                prompts = task.prompts(step)
                rollout.ask(step, prompts, at_least=version(model))
                _, responses = rollout.collect()
                found[0] = [
                    Sample(i // 4, prompts[i // 4], r.tokens, r.log_probs, r.reference, task.reward(r.tokens))
                    for i, r in enumerate(responses)
                ]
            dist.broadcast_object_list(found, 0)
            samples = found[0] or []

            rewards = torch.tensor([sample.reward for sample in samples])
            advantages = grpo_advantages(rewards, [sample.group for sample in samples]).tolist()
            plan = lb_mini(
                [len(sample) for sample in samples], world, config.max_tokens, cost
            )  # the same on every rank
            tokens = sum(len(sample.response) for sample in samples)
            with model.minibatch():  # any number of microbatches on each rank; they meet once, at its end
                for indices in plan.ranks[rank]:
                    batch = batch_of([samples[i] for i in indices], [advantages[i] for i in indices])
                    logits = model(**batch.inputs.model_inputs(labels=False)).logits
                    log_probs = token_log_probs(logits, batch.inputs.labels)
                    losses = policy_losses(log_probs, batch.log_probs, batch.advantages, low=0.2, high=0.2, dual=3.0)
                    losses = losses + config.kl * kl_estimate(log_probs, batch.reference)
                    (losses.sum() * world / tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                counts = [len(microbatches) for microbatches in plan.ranks]
                print(
                    f"step {step + 1}: reward {rewards.mean():.3f}, {tokens} tokens, microbatches {counts}", flush=True
                )
        dist.barrier()
    shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
