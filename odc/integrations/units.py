"""Which modules of a Hugging Face model become units of `odc.fully_shard`.

Chose the classes that the model itself says must not be split, its blocks, as FSDP2's users do; embedding and head are
units of their own unless they share a weight, which then stays in the root. The price is that a model which names no
blocks must be told. Nothing here needs Hugging Face's libraries.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from odc.errors import ConfigError


def units_of(module: nn.Module, blocks: str | Iterable[str] | None = None) -> list[nn.Module]:
    """Modules to shard before the root, in the order of `module.modules()`.

    Args:
        module: a model with a `config`.
        blocks: class names of its blocks; what it lists in `_no_split_modules` unless given.

    Raises ConfigError where no module is of such a class.
    """
    named = blocks or getattr(module, "_no_split_modules", None)
    classes = {named} if isinstance(named, str) else set(named or ())
    found = [one for one in module.modules() if type(one).__name__ in classes]
    if not found:
        looked = ", ".join(sorted(classes)) or "none named"
        raise ConfigError(f"no block to shard in {type(module).__name__} (looked for {looked}): name their class")
    if getattr(module.config, "tie_word_embeddings", False):
        return found
    ends = {"embed_tokens", "lm_head"}
    return found + [
        one
        for name, one in module.named_modules()
        if isinstance(one, nn.Embedding) or (name.rpartition(".")[2] in ends and hasattr(one, "weight"))
    ]
