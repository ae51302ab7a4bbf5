"""The blocks of a model: the modules that are sharded, and recomputed, one by one.

They are of the classes that a Hugging Face model lists as not to be split; for any other model the classes must be
given. Needs none of Hugging Face's libraries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

from odc.errors import ConfigError


def blocks_of(model: nn.Module, classes: str | Iterable[str] | None = None) -> list[nn.Module]:
    """The outermost modules of `classes` in the order of `model.modules()`, `fully_shard`'s before the root.

    Those that share a parameter with the rest of the model, as embeddings do with a tied head, are left to the root:
    perhaps all of them.

    Args:
        model: any module.
        classes: class names; what the model lists in `_no_split_modules` unless given.

    Raises ConfigError where no module is of such a class.
    """
    named = classes or getattr(model, "_no_split_modules", None)
    names = {named} if isinstance(named, str) else set(named or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        looked = ", ".join(sorted(names)) or "none named"
        raise ConfigError(f"no block to shard in {type(model).__name__} (looked for {looked}): name their class")
    times = Counter(id(one) for _, one in model.named_modules(remove_duplicate=False))
    uses = _uses(model)
    found = [block for block in found if all(uses[one] == times[id(block)] * n for one, n in _uses(block).items())]
    inner = {id(below) for block in found for below in block.modules() if below is not block}
    return [block for block in found if id(block) not in inner]


def _uses(module: nn.Module) -> Counter[int]:
    """By the id of a parameter, in how many places below `module` it is; a module that is in two has two of each."""
    return Counter(id(one) for _, one in module.named_parameters(remove_duplicate=False))
