"""Which modules of a Hugging Face model become units under verl: the same as under its strategy fsdp2.

They are the blocks, the embedding and the head; an embedding and a head that share a weight stay in the root. So does a
head under fused kernels, unlike there: verl's fused forwards read its weight without calling it. Nothing here needs
Hugging Face's libraries.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from odc.blocks import blocks_of


def units_of(
    module: nn.Module, blocks: str | Iterable[str] | None = None, *, head_apart: bool = True
) -> list[nn.Module]:
    """Modules to shard before the root of a model with a `config`; `blocks` and errors are those of `blocks_of`.

    Without `head_apart` the head stays in the root, and is whole for as long as the root's forward runs.
    """
    found = blocks_of(module, blocks)
    if getattr(module.config, "tie_word_embeddings", False):
        return found
    ends = {"embed_tokens", "lm_head"} if head_apart else {"embed_tokens"}
    return found + [
        one
        for name, one in module.named_modules()
        if isinstance(one, nn.Embedding) or (name.rpartition(".")[2] in ends and hasattr(one, "weight"))
    ]
