"""Building models: from a config and a seed, from a checkpoint, and not from anything else."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from odc.balance import cost_from_config
from odc.blocks import blocks_of
from odc.errors import ConfigError
from odc.experiments.data.bpe import ByteTokenizer
from odc.experiments.data.tokenizer import load_tokenizer
from odc.experiments.text.model import build_model, config_of, shipped_config

pytest.importorskip("transformers", reason="needs the train extra")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A config of a model small enough for tests."""
    fields = json.loads(shipped_config("qwen2-tiny").read_text())
    fields |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 70}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return path


def weights(model) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(one, other) -> bool:
    mine, theirs = weights(one), weights(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_seed_decides_the_weights_and_nothing_else_changes(small: Path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = build_model(small, dtype=torch.float32, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert same(model, build_model(small.parent, dtype=torch.float32, seed=1))
    assert not same(model, build_model(small, dtype=torch.float32, seed=2))
    assert model.training
    assert model.config._attn_implementation == "odc_documents"


def test_dtype_differs_by_rounding_only(small: Path):
    wide = build_model(small, dtype=torch.float32)
    narrow = build_model(small, dtype=torch.bfloat16)
    for name, value in weights(wide).items():
        assert torch.equal(weights(narrow)[name], value.bfloat16()), name
    assert narrow.model.rotary_emb.inv_freq.dtype == torch.float32
    assert narrow.lm_head.weight is narrow.model.embed_tokens.weight


def test_vocabulary_follows_the_tokenizer(small: Path):
    assert build_model(small, vocab_size=99, dtype=torch.float32).lm_head.weight.shape == (99, 32)
    assert build_model(small, dtype=torch.float32).config.vocab_size == 70


def test_checkpoint_round_trip(small: Path, tmp_path: Path):
    model = build_model(small, dtype=torch.float32, seed=3)
    model.save_pretrained(str(tmp_path / "saved"))
    loaded = build_model(tmp_path / "saved", vocab_size=70, dtype=torch.float32, seed=9)
    assert same(model, loaded)
    assert loaded.training
    assert loaded.config._attn_implementation == "odc_documents"
    assert build_model(tmp_path / "saved", dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="has 70 ids, the data has 71"):
        build_model(tmp_path / "saved", vocab_size=71, dtype=torch.float32)


def test_checkpoint_with_broken_weights(small: Path, tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        build_model(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("name", ["qwen2-tiny", "qwen2-small"])
def test_shipped_configs_build(name: str):
    with torch.device("meta"):
        model = build_model(shipped_config(name), dtype=torch.float32)
    fields = config_of(shipped_config(name))
    assert len(blocks_of(model)) == fields["num_hidden_layers"]
    per_token = cost_from_config(fields).a / 6
    matmuls = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2)
    assert per_token == matmuls, "the linear cost is 6 FLOPs for each weight of a matrix (the tied head among them)"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"neither a JSON config nor a folder with config\.json"),
        ("{", "is not a JSON config"),
        ("{}", "names no 'model_type'"),
        ('{"model_type": "not-a-model"}', "not a config that transformers knows"),
        ('{"model_type": "vit"}', "not a causal language model"),
        (
            '{"model_type": "gemma3"}',
            r"multimodal model \(gemma3\); save its language model, .* as docs/finetune.md shows",
        ),
    ],
)
def test_neither_config_nor_checkpoint(tmp_path: Path, content: str | None, message: str):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        build_model(tmp_path, dtype=torch.float32)


def test_weights_in_another_format_are_not_taken_for_a_bare_config(small: Path):
    (small.parent / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds pytorch_model\.bin but no model\.safetensors"):
        build_model(small.parent, dtype=torch.float32)


def test_missing_package_and_unknown_shipped_config(small: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"qwen9 is no file or folder, and no shipped config: qwen2-demo, qwen2-"):
        shipped_config("qwen9")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install -e '.\[train\]'"):
        build_model(small, dtype=torch.float32)


def test_the_language_model_of_gemma_3_is_saved_as_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = sizes | {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 259}
    vision = sizes | {"image_size": 28, "patch_size": 14}
    whole = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))
    whole.save_pretrained("gemma-3-4b-it")
    ByteTokenizer().save(Path("gemma-3-4b-it"))
    with pytest.raises(ConfigError, match="multimodal"):
        build_model(Path("gemma-3-4b-it"), dtype=torch.float32)
    page = (Path(__file__).parents[3] / "docs" / "finetune.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(program, {})
    model = build_model(Path("model"), vocab_size=259, dtype=torch.float32)
    assert type(model).__name__ == "Gemma3ForCausalLM"
    assert same(model.model, whole.model.language_model) and torch.equal(model.lm_head.weight, whole.lm_head.weight)
    assert load_tokenizer(Path("model")).encode("ab").tolist() == [97, 98]
