"""`model.generate` of a sharded Hugging Face model, each rank with its own number of forwards."""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.fsdp import register_fsdp_forward_method


def generate_alone(model: Any, *, below_root: bool = False) -> None:
    """Have `model.generate` stop where this rank's own sequences end; nothing for a model that does not generate.

    transformers takes a sharded model for one whose forwards are collectives: by default it all-reduces a flag before
    every token, and runs forwards until the last rank is done; its Seq2SeqTrainer asks for that by torch's mark of such
    a model, which the root therefore loses. `synced_gpus=True` in the call still asks for it.
    `below_root`: generate runs a module below the root, as PEFT's does, so the root's own parameters are fetched for
    the whole call.
    """
    if not callable(getattr(model, "generate", None)):
        return
    if below_root:
        register_fsdp_forward_method(model, "generate")
    generate = model.generate

    @functools.wraps(generate)
    def alone(*args: Any, synced_gpus: bool = False, **options: Any) -> Any:
        return generate(*args, synced_gpus=synced_gpus, **options)

    model.generate = alone
    model._is_fsdp_managed_module = False
