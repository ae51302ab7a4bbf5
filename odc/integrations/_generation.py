"""`model.generate` of a sharded Hugging Face model, each rank with its own number of forwards."""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.fsdp import register_fsdp_forward_method


def generate_alone(model: Any) -> None:
    """Have `model.generate` stop where this rank's own sequences end; nothing for a model that does not generate.

    transformers takes a sharded model for one whose forwards are collectives: by default it all-reduces a flag before
    every token, and runs forwards until the last rank is done; its Seq2SeqTrainer asks for that by torch's mark of such
    a model, which the root therefore loses. `synced_gpus=True` in the call still asks for it.
    Where generate runs modules below the root, PEFT's base model or an encoder, the root's own parameters are fetched
    for the whole call. At its end they are shards again.
    """
    if not callable(getattr(model, "generate", None)):
        return
    if hasattr(model, "get_base_model") or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        register_fsdp_forward_method(model, "generate")
    generate = model.generate

    @functools.wraps(generate)
    def alone(*args: Any, synced_gpus: bool = False, **options: Any) -> Any:
        model._generates = True
        try:
            return generate(*args, synced_gpus=synced_gpus, **options)
        finally:
            model._generates = False
            model.reshard()

    model.generate = alone
    model._is_fsdp_managed_module = False


def generates(model: Any) -> bool:
    """Whether a `generate` is in progress."""
    return bool(getattr(model, "_generates", False))
