"""Writes a sharded model as a folder that `AutoModelForCausalLM.from_pretrained` loads, by way of rank 0's memory."""

from __future__ import annotations

import copy
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn import Module

from odc.experiments.checkpoint import together
from odc.experiments.config import JobConfig
from odc.experiments.data.tokenizer import Tokenizer
from odc.experiments.text.lora import merged, write_adapter

_log = logging.getLogger(__name__)
#: A folder within that of the export, in which the files lie until all are written.
PARTIAL = ".partial"
_CONFIGS = ("config.json", "adapter_config.json")


def export(folder: Path, model: Module, tokenizer: Tokenizer | None = None, config: JobConfig | None = None) -> None:
    """Writes `model` (a sharded transformers model) and its `tokenizer` to `folder`, which must be empty or missing.

    The adapters of a job with `config.lora` are written alone, or added into the model with `config.merge`.
    Every rank calls it, outside a minibatch; it meets the other ranks. The configuration, without which nothing loads
    the folder, appears in it last. Raises `CheckpointError` on every rank if the disk or transformers refuses.
    """
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    together(lambda: _write(folder, model, weights, tokenizer, config), f"export: cannot write {folder}")


def _write(
    folder: Path, model: Any, weights: dict[str, Any], tokenizer: Tokenizer | None, config: JobConfig | None
) -> None:
    partial = folder / PARTIAL  # within: the folder itself may be a link or a mount, which cannot be renamed to
    if partial.exists():
        shutil.rmtree(partial)
    if config is not None and config.lora and not config.merge:
        write_adapter(partial, config, weights)
    else:
        _write_model(partial, model, weights, tokenizer, config if config is not None and config.merge else None)
    if tokenizer is not None:
        tokenizer.save(partial)
    for path in sorted(partial.iterdir(), key=lambda path: path.name in _CONFIGS):
        os.rename(path, folder / path.name)
    partial.rmdir()


def _write_model(
    folder: Path, model: Any, weights: dict[str, Any], tokenizer: Tokenizer | None, adapted: JobConfig | None
) -> None:
    """Saves from an empty copy of the model: the sharded one's class is a wrapper and would be named in the config."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
        if adapted is not None:
            weights = merged(AutoModelForCausalLM.from_config(model.config), adapted, weights)
    if model.generation_config is not None:
        empty.generation_config = copy.deepcopy(model.generation_config)
    if tokenizer is not None:
        _end_with(empty, tokenizer.ends)
    empty.save_pretrained(folder, state_dict=weights)


def _end_with(model: Any, ends: list[int]) -> None:
    """Makes `generate` stop at the tokens that ended documents and answers, beside those at which it did."""
    try:
        model.config.eos_token_id = _stops(model.config, ends)
    except Exception as error:  # of a config that takes one token alone; the generation config counts
        _log.warning("config.json keeps its eos_token_id: %s", error)
    if model.generation_config is None:
        return
    changed = copy.deepcopy(model.generation_config)
    changed.eos_token_id = _stops(changed, ends)
    try:  # transformers saves a config as it was published, but once it is changed, only a valid one
        changed.validate(strict=True)
    except ValueError as error:
        _log.warning("generate will not stop at the tokens %s: the model's generation config: %s", ends, error)
    else:
        model.generation_config = changed


def _stops(config: Any, ends: list[int]) -> int | list[int] | None:
    """What a config stops at, and `ends`; these alone if it stops at none of them, as one for another tokenizer."""
    before = getattr(config, "eos_token_id", None)
    known = before if isinstance(before, list) else [before]
    wanted = list(dict.fromkeys(ends if {*known}.isdisjoint(ends) else [*known, *ends]))
    if wanted == known:
        return before
    return wanted if len(wanted) > 1 else wanted[0]
