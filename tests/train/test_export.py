from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from odc.train.export import export
from odc.train.launch import launch

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def _export(folder: str) -> dict[str, list[float]]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    dist.init_process_group("gloo")
    sums = {}
    for tied in (True, False):
        torch.manual_seed(3)
        model = Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=tied))
        sums[str(tied)] = model(torch.arange(9)[None]).logits.sum(-1).flatten().tolist()
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        export(Path(folder, str(tied)), model)
    dist.barrier()
    dist.destroy_process_group()
    return sums


def test_transformers_loads_what_was_exported(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    sums = launch(_export, str(tmp_path), ranks=2)[0]
    assert sorted(os.listdir(tmp_path)) == ["False", "True"]
    for tied, expected in sums.items():
        folder = tmp_path / tied
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
        assert (folder / "model.safetensors").is_file()
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            assert model(torch.arange(9)[None]).logits.sum(-1).flatten().tolist() == expected
