"""Generation from a sharded model, each rank at its own pace.

On the CPU: `CUDA_VISIBLE_DEVICES= torchrun --nproc-per-node 2 examples/generate.py`.

Every rank has other prompts, stops where its own sequences end and starts its next batch at once; no rank waits for
another one's tokens. At the end rank 0 alone evaluates, while the others leave. Name a Hugging Face folder to generate
with its model; without one it is a small model of random weights.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

from odc import fully_shard, shutdown
from odc.blocks import blocks_of


def build(folder: str | None) -> Any:
    """The same weights on every rank."""
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    if folder:
        return AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=256, num_hidden_layers=2, **sizes))


def generate(model: Any, prompts: list[tuple[list[int], int]], keep: bool = False) -> tuple[list[list[int]], int]:
    """Continuations of (prompt, most new tokens), and how many forwards they took; one prompt a batch.

    `keep` fetches weights once and keeps them, for a whole model of memory; otherwise a block's are fetched for each
    token, as they are needed.
    """
    forwards = 0

    def count(*unused: Any) -> None:
        nonlocal forwards
        forwards += 1

    hook = model.register_forward_pre_hook(count)
    model.set_reshard_after_forward(not keep)
    answers = [continuation(model, prompt, most) for prompt, most in prompts]
    model.set_reshard_after_forward(True)
    hook.remove()
    return answers, forwards


def continuation(model: Any, prompt: list[int], most: int) -> list[int]:
    """Without `synced_gpus=False` transformers would run as many forwards as the rank with the longest answer."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": most, "do_sample": False, "pad_token_id": 0, "synced_gpus": False}
    tokens = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    return tokens[0, len(prompt) :].tolist()


def main(folder: str | None = None, steps: int = 2) -> list[tuple[int, int]]:
    """Alternate generation and training; return (forwards, new tokens) of this rank's generations."""
    rank = dist.get_rank()
    model = build(folder)
    for block in blocks_of(model):
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = []
    for step in range(steps):
        prompts = [([1 + step, 2, 3 + i], 4 + 12 * rank) for i in range(2)]  # rank 1 writes four times as much
        answers, forwards = generate(model, prompts)
        done.append((forwards, sum(map(len, answers))))
        print(f"rank {rank}, step {step}: {done[-1][1]} tokens in {forwards} forwards", flush=True)
        with model.minibatch():  # the ranks meet here, once
            for (prompt, _), answer in zip(prompts, answers, strict=True):
                ids = torch.tensor([prompt + answer])
                model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.publish()  # every rank: rank 0 can read the last weights, whatever the others do
    if rank == 0:
        ids = torch.arange(1, 9)[None]
        with torch.no_grad():
            print(f"rank 0 alone: loss {model(input_ids=ids, labels=ids).loss:.3f}", flush=True)
    return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="of a Hugging Face model")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    main(arguments.folder)
    shutdown()  # waits until no rank reads this one's shards any more
    dist.destroy_process_group()
