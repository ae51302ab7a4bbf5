"""Small copies of large models: what they keep of a config, and that it stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from odc.errors import UnsupportedError
from odc.model_copies import LENGTHS, alone, apart, gradient_of

transformers = pytest.importorskip("transformers", reason="needs the train extra")


def config_of(kind: str, **changes: Any) -> Any:
    return transformers.AutoConfig.for_model(kind, **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "layers"),
    [
        ("llama", {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}, 2),
        ("gpt_oss", {}, 2),  # windows in every second layer
        pytest.param("gemma3_text", {}, 6, marks=pytest.mark.thorough),  # in all but every sixth
        pytest.param("qwen3_moe", {"num_hidden_layers": 48}, 2, marks=pytest.mark.thorough),
        pytest.param("deepseek_v3", {}, 4, marks=pytest.mark.thorough),  # experts from the fourth on
    ],
)
def test_a_copy_is_small_and_has_a_layer_of_each_kind(
    monkeypatch: pytest.MonkeyPatch, kind: str, changes: dict[str, Any], layers: int
):
    """And no generator of random numbers goes on elsewhere than without it."""
    seeded = list[int]()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    config = config_of(kind, **changes)
    before = config.to_dict()
    state = torch.get_rng_state()
    copied = alone(config)
    assert config.to_dict() == before and torch.equal(torch.get_rng_state(), state)
    assert not seeded
    assert copied.config.num_hidden_layers == layers
    assert sum(parameter.numel() for parameter in copied.model.parameters()) < 3e7
    window = getattr(copied.config, "sliding_window", None)
    assert window is None or window < min(LENGTHS)


def test_a_model_like_the_copy_has_its_weights_and_gives_its_outputs():
    copied = alone(config_of("llama", hidden_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=50))
    model = copied.like("sdpa")
    outputs = []
    for document in copied.documents:
        logits = model(input_ids=document[None], use_cache=False).logits[0]
        torch.nn.functional.cross_entropy(logits[:-1], document[1:], reduction="sum").backward()
        outputs.append(logits.detach())
    assert tuple(map(len, copied.documents)) == LENGTHS
    assert apart(torch.cat(outputs), copied.output) < 1e-6
    assert apart(gradient_of(model), copied.gradient) < 1e-6
    assert not gradient_of(model).any(), "it is taken away"


def test_copies_are_on_the_cpu_whatever_the_default_device_is():
    torch.set_default_device("meta")
    try:
        copied = alone(config_of("llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=50))
        model = copied.like("sdpa")
    finally:
        torch.set_default_device(None)
    tensors = (copied.output, copied.gradient, *copied.documents, *copied.model.buffers(), *model.buffers())
    assert {one.device.type for one in (*tensors, *copied.model.parameters(), *model.parameters())} == {"cpu"}


def test_a_config_that_no_copy_of_runs():
    with pytest.raises(UnsupportedError, match="no small copy of it runs to check it: ValueError"):
        alone(config_of("vit"))
