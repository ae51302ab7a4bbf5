"""A multimodal model whose vision tower some ranks skip.

On the CPU: `CUDA_VISIBLE_DEVICES= torchrun --nproc-per-node 2 examples/skip_tower.py`.

LLaVA runs its vision tower for images only. A rank whose microbatches are all text never enters it, and under odc
no rank waits for it there: the tower's gradients are summed over the ranks that used it, and every rank gets its
part of them. Under FSDP2 the same loop hangs in the tower's first all-gather.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from odc import fully_shard, shutdown
from odc.blocks import blocks_of

IMAGE = 7  # token that stands for a patch of an image


def build() -> Any:
    """A tiny LLaVA, the same on every rank: images of 4 x 4 patches, of which each becomes a token."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen2Config

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    vision = CLIPVisionConfig(**sizes, num_attention_heads=2, image_size=16, patch_size=4)
    text = Qwen2Config(**sizes, vocab_size=64, num_attention_heads=2, num_key_value_heads=1)
    image: dict[str, Any] = {"image_token_id": IMAGE, "vision_feature_layer": -1}
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, **image))


def text(seed: int, length: int = 12) -> dict[str, torch.Tensor]:
    ids = torch.randint(8, 64, (1, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def image(seed: int) -> dict[str, torch.Tensor]:
    """As `text`, with an image before it."""
    rows = text(seed)
    ids = torch.cat([torch.full((1, 16), IMAGE), rows["input_ids"]], 1)
    pixels = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    labels = ids.masked_fill(ids == IMAGE, -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "pixel_values": pixels}


def main(steps: int = 3, shard: bool = True) -> list[float]:
    """Train; return the loss of each step, over all ranks. Rank 0 has two texts, others a text and three images."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build()
    if shard:
        for block in blocks_of(model.model.vision_tower) + blocks_of(model.model.language_model):
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        everyone = [[text(step), text(step + 10)]] + [[text(step + 20)] + [image(step + i) for i in range(3)]] * (
            world - 1
        )
        count = sum(map(len, everyone))
        total = torch.zeros(())
        if shard:
            with model.minibatch():
                for microbatch in everyone[rank]:
                    loss = model(**microbatch).loss * world / count
                    loss.backward()
                    total += loss.detach() / world
            dist.all_reduce(total)
        else:
            for microbatch in (one for some in everyone for one in some):
                loss = model(**microbatch).loss / count
                loss.backward()
                total += loss.detach()
        used = any(p.grad is not None for p in model.model.vision_tower.parameters())
        assert used, "the tower has gradients on every rank, also where it did not run"
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
        if rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    main()
    shutdown()
    dist.destroy_process_group()
