"""A tiny random Qwen2 with a tokenizer of single characters: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:?\n"


def tiny_tokenizer() -> Any:
    """One id a character; the first three are unknown, padding and end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<unk>", "<pad>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", model_max_length=512
    )


def tiny_qwen2(fully_shard: Callable[[Any], Any] | None = None) -> Any:
    """The same weights on every rank, sharded layer by layer if asked for; in eval mode."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=3 + len(CHARACTERS),
        hidden_size=36,
        intermediate_size=50,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=1,
    )
    model = Qwen2ForCausalLM(config).eval()
    if fully_shard is not None:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def forwards(model: Any) -> list[None]:
    """A list that gets an entry for each forward of `model` from now on."""
    ran: list[None] = []
    model.register_forward_hook(lambda *_: ran.append(None))
    return ran
