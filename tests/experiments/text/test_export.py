from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from odc.experiments.checkpoint import CheckpointError
from odc.experiments.data.bpe import BpeTokenizer, cached_bpe
from odc.experiments.data.sources import RawDocument
from odc.experiments.data.tokenizer import load_tokenizer
from odc.experiments.launch import launch
from odc.experiments.text.export import _end_with, export

TEXT = "def g(x1234): # naïve ☕ don't <|endoftext|>\r\n  \t y"

_SIZES = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def _tokenizer(folder: str) -> BpeTokenizer:
    return cached_bpe([RawDocument("a", "def f(x):\n    return x + 12\n" * 30)], 280, Path(folder).parent / "cache")


def _export(folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """What was exported, by whether the embedding is tied."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    dist.init_process_group("gloo")
    weights = {}
    for tied in (True, False):
        torch.manual_seed(3)
        model = Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=tied, eos_token_id=7))
        model.generation_config.max_length = 99
        weights[str(tied)] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        export(Path(folder, str(tied)), model, _tokenizer(folder))
    dist.barrier()
    dist.destroy_process_group()
    return weights


def test_transformers_loads_what_was_exported(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = tmp_path / "exported"
    exported.mkdir()
    weights = launch(_export, str(exported), ranks=2)[0]
    assert sorted(os.listdir(exported)) == ["False", "True"]
    for tied, expected in weights.items():
        folder = exported / tied
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
        assert (folder / "model.safetensors").is_file()
        model = AutoModelForCausalLM.from_pretrained(folder)
        loaded = model.state_dict()
        assert loaded.keys() == expected.keys()
        assert not [name for name, tensor in loaded.items() if not torch.equal(tensor, expected[name])]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        own = _tokenizer(str(exported))
        ids = tokenizer(TEXT, split_special_tokens=True)["input_ids"]
        assert ids == own.encode(TEXT).tolist() == load_tokenizer(folder).encode(TEXT).tolist()
        assert tokenizer.decode(ids) == TEXT
        assert model.generation_config.max_length == 99
        for config in (model.config, model.generation_config):
            assert config.eos_token_id == own.ends and own.eos_id == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("before", "after"), [(7, [1, 2]), (None, [1, 2]), ([7, 1], [7, 1, 2]), ([2, 1], [2, 1]), (2, [2, 1])]
)
def test_an_exported_model_stops_where_it_did_and_where_the_data_end(before: Any, after: Any) -> None:
    """What is none of the tokenizer's ends is of another one."""
    from transformers import GenerationConfig

    model = SimpleNamespace(config=SimpleNamespace(eos_token_id=before), generation_config=GenerationConfig())
    model.generation_config.eos_token_id = before
    _end_with(model, [1, 2])
    assert model.config.eos_token_id == model.generation_config.eos_token_id == after


def test_a_generation_config_that_cannot_be_changed_is_saved_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After hours of training it must not keep the model from being written."""
    from transformers import GenerationConfig

    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "eos_token_id": 7}))
    published = GenerationConfig.from_pretrained(tmp_path)
    model = SimpleNamespace(config=SimpleNamespace(eos_token_id=7), generation_config=published)
    _end_with(model, [1, 2])
    assert model.generation_config is published and "generate will not stop at the tokens [1, 2]" in caplog.text
    published.save_pretrained(tmp_path / "again")


class _Refusing(BpeTokenizer):
    def save(self, folder: Path) -> None:
        raise ValueError("no")


def _export_to_a_link_and_here(folder: str) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    os.chdir(Path(folder, "here"))
    dist.init_process_group("gloo")
    model = fully_shard(Qwen2ForCausalLM(Qwen2Config(**_SIZES)))
    for name in (Path(folder, "link"), Path(".")):
        export(name, model)
    dist.destroy_process_group()


def test_a_folder_that_no_other_can_be_renamed_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    launch(_export_to_a_link_and_here, str(tmp_path), ranks=1)
    assert sorted(os.listdir(tmp_path)) == ["here", "link", "there"]
    for name in ("here", "link"):
        assert sorted(os.listdir(tmp_path / name)) == ["config.json", "generation_config.json", "model.safetensors"]


def _refused(folder: str) -> str:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    dist.init_process_group("gloo")
    model = fully_shard(Qwen2ForCausalLM(Qwen2Config(**_SIZES)))
    tokenizer = _tokenizer(folder)
    tokenizer.__class__ = _Refusing
    try:
        export(Path(folder), model, tokenizer)
    except CheckpointError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "written"


def test_an_error_of_any_kind_reaches_every_rank(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert launch(_refused, str(folder), ranks=2) == [f"export: cannot write {folder}: no"] * 2
