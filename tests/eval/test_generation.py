"""In a session each rank generates as many tokens as its own requests need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import Pools
from support.tiny_lm import tiny_qwen2
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method

from odc import fully_shard
from odc.eval import session, unsynced

pytest.importorskip("transformers", reason="needs the extra: pip install 'odc-fsdp[train]'")

LENGTHS = ((3, 9), (5,), ())  # tokens to generate, by rank


def generated(rank: int, world: int, way: str) -> tuple[list[int], bool]:
    """Tokens of each answer; and whether the model has torch's mark after the session."""
    model: Any = tiny_qwen2(fully_shard)
    if way == "registered":
        register_fsdp_forward_method(model, "generate")
    evaluated = nn.ModuleDict({"language": model}) if way == "held" else model
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    counts = []
    with session(modules=[evaluated], timeout_s=100.0), torch.no_grad():
        for tokens in LENGTHS[rank]:
            found = model.generate(torch.arange(1, 5)[None], max_new_tokens=tokens, **options)
            counts.append(found.shape[1] - 4)
    return counts, model._is_fsdp_managed_module


@pytest.mark.parametrize("way", ["as it is", "registered", "held"])
def test_ranks_generate_unequal_numbers_of_tokens(ranks: Pools, way: str) -> None:
    assert ranks(3).run(generated, way) == [([3, 9], True), ([5], True), ([], True)]


def unsynced_marks(rank: int, world: int) -> list[bool]:
    model: Any = tiny_qwen2(torch_fully_shard)
    marks = []
    with unsynced(nn.ModuleList([model])):
        marks.append(model._is_fsdp_managed_module)
    return [*marks, model._is_fsdp_managed_module]


def test_a_model_is_marked_again_at_the_end(ranks: Pools) -> None:
    assert ranks(2).run(unsynced_marks) == [[False, True]] * 2
