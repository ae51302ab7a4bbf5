"""Writes a sharded model as a folder that `AutoModelForCausalLM.from_pretrained` loads, by way of rank 0's memory."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn import Module

from odc.experiments.checkpoint import together
from odc.experiments.data.tokenizer import Tokenizer


def export(folder: Path, model: Module, tokenizer: Tokenizer | None = None) -> None:
    """Writes `model` (a sharded transformers model) and its `tokenizer` to `folder`, which must be empty or missing.

    Every rank calls it, outside a minibatch; it meets the other ranks. The folder appears once complete. Raises
    `CheckpointError` on every rank if the disk or transformers refuses.
    """
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    together(lambda: _write(folder, model, weights, tokenizer), f"export: cannot write {folder}")


def _write(folder: Path, model: Any, weights: dict[str, Any], tokenizer: Tokenizer | None) -> None:
    """Saves from an empty copy of the model: the sharded one's class is a wrapper and would be named in the config."""
    from transformers import AutoModelForCausalLM

    partial = folder.with_name(folder.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    if model.generation_config is not None:
        empty.generation_config = copy.deepcopy(model.generation_config)
    if tokenizer is not None:
        _end_with(empty, tokenizer.eos_id)
    empty.save_pretrained(partial, state_dict=weights)
    if tokenizer is not None:
        tokenizer.save(partial)
    if folder.exists():
        folder.rmdir()
    os.rename(partial, folder)


def _end_with(model: Any, eos_id: int) -> None:
    """Makes `generate` stop at the token that ended the documents, which a config for another tokenizer does not."""
    for config in (model.config, model.generation_config):
        ends = getattr(config, "eos_token_id", None)
        if config is not None and eos_id not in (ends if isinstance(ends, list) else [ends]):
            config.eos_token_id = eos_id
