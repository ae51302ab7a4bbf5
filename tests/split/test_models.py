"""Which models are refused, with which reason, and what the check on first use finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.split_jobs import KINDS, OwnModel, model_of, stand_in_for, tokens_of
from torch import Tensor, nn
from transformers import AttentionInterface

from odc.errors import UnsupportedError
from odc.split import attend, models
from odc.split.rehearsal import rehearse


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "own"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_that_can_be_split_pass_and_run_whole_samples_as_before(kind: str, dtype: torch.dtype) -> None:
    model: Any = model_of(kind, dtype)
    tokens = tokens_of(3, 40)[None]
    packed = torch.cat([torch.arange(25), torch.arange(15)])[
        None
    ]  # two samples in a row, distinguished by their positions
    given = [{"input_ids": tokens}, {"input_ids": tokens, "position_ids": packed}]
    before = [model(**inputs, use_cache=False).logits for inputs in given]
    extra = models.hook(model)
    assert models.hook(model).keys() == extra.keys(), "twice is once"
    heads = 4 if kind == "gpt2" else 2
    assert rehearse(model, models.layers_of(model), extra) == 2 * heads * 8 * dtype.itemsize
    for inputs, expected in zip(given, before, strict=True):
        assert torch.equal(model(**inputs, use_cache=False).logits, expected)


@pytest.mark.parametrize("name", ["flash_attention_2", "kernels-community/flash-attn2", "somewhere/attention"])
def test_flash_attention_keeps_its_name_and_gets_whole_samples(name: str) -> None:
    """The name stands for a library, or a kernel of a hub, that is imported by it: something else stands in here."""
    model: Any = model_of("llama")
    tokens = tokens_of(3, 40)[None]
    expected = model(input_ids=tokens, use_cache=False).logits
    with stand_in_for(name, model) as asked:
        extra = models.hook(model)
        assert rehearse(model, models.layers_of(model), extra) == 2 * 2 * 8 * 4
        hooked = AttentionInterface()[name]
        other: Any = model_of("llama")
        other.config._attn_implementation = name
        models.hook(other)
        assert AttentionInterface()[name] is hooked, "a second model of this attention wraps it again"
        asked.clear()
        assert torch.equal(model(input_ids=tokens, use_cache=False).logits, expected)
        assert asked == [name] * models.layers_of(model), "whole samples must reach the attention under its own name"
        lengths = torch.tensor([0, 40], dtype=torch.int32)
        with pytest.raises(UnsupportedError, match="passes cu_seq_lens_q to attention"):
            model(input_ids=tokens, odc_piece=object(), cu_seq_lens_q=lengths, **extra)


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("llama", {"attention_dropout": 0.1}, "dropout of 0.1"),
        ("gpt2", {"resid_pdrop": 0.2}, "dropout of 0.2"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits"),
    ],
)
def test_refused_by_its_config(kind: str, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        models.hook(model_of(kind, **more))


def _of_older_transformers(self: Any, hidden_states: Tensor, cache_position: Any = None, **more: Any) -> Any:
    """Takes what the attention of Ministral 3 does in transformers 5.0."""
    raise AssertionError("the model is refused before it runs")


def test_queries_scaled_by_their_place_in_the_piece_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check on first use does not see it: the first scaled position lies beyond its 64 tokens."""
    model: Any = model_of("ministral3", num_key_value_heads=2)
    assert model.config.rope_parameters["llama_4_scaling_beta"]
    rehearse(model, models.layers_of(model), models.hook(model))
    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", _of_older_transformers)
    with pytest.raises(UnsupportedError, match="scales queries by their place in the piece"):
        models.hook(model)
    model.config.rope_parameters["llama_4_scaling_beta"] = 0.0
    models.hook(model)


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 60,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gemma2", "caps the scores .* attention is 'eager'"),
        ("bloom", "attention is 'eager'"),
        ("falcon", "does not hand its attention|fails with"),
        ("stablelm", "no layer hands its attention over .* before it fails with RuntimeError"),
        ("nemotron", "no layer hands its attention over .* before it fails with RuntimeError"),
        ("qwen3_next", "layers of type linear_attention"),
        ("llama4_text", "chunked_attention.* attends in chunks"),
        ("deepseek_v3", "latent"),
    ],
)
def test_kinds_of_models_that_are_refused(kind: str, reason: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL))
    with pytest.raises(UnsupportedError, match=reason):
        rehearse(model, models.layers_of(model), models.hook(model))


class Restarts(OwnModel):
    """Counts positions by itself."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, odc_piece: Any = None) -> Tensor:
        return super().forward(input_ids, torch.arange(input_ids.shape[1])[None].expand_as(input_ids), odc_piece)


class Forgets(OwnModel):
    """Hands one of two layers over."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, odc_piece: Any = None) -> Tensor:
        hidden = self.embed(input_ids)
        for layer, project in enumerate(self.qkv):
            q, k, v = project(hidden).unflatten(-1, (6, 8)).transpose(1, 2).split(2, dim=1)
            if odc_piece is None or layer:
                out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                out = attend(q, k, v, odc_piece, layer)
            hidden = hidden + out.transpose(1, 2).flatten(2)
        return self.head(hidden)


class Loses(OwnModel):
    """Does not know the keyword."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return super().forward(input_ids, position_ids)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Restarts, r"differ from the whole sample's by \d\.\de[-+]0\d, more than 1.0e-04 of their norm"),
        (Forgets, "of its 2 layers these did not hand their attention over: 1;"),
        (Loses, "fails with TypeError: .*unexpected keyword argument 'odc_piece'"),
    ],
)
def test_what_rules_do_not_see_the_check_on_first_use_does(kind: type[OwnModel], reason: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(UnsupportedError, match=reason):
        rehearse(kind(), 2, {})


def test_keywords_and_masks_that_attention_does_not_know_are_refused() -> None:
    model: Any = model_of("llama")
    extra = models.hook(model)
    tokens = tokens_of(1, 12)[None]
    with pytest.raises(UnsupportedError, match="passes softcap to attention"):
        model(input_ids=tokens, odc_piece=object(), softcap=30.0, **extra)
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match="a mask of its own|mask"):
        model(input_ids=tokens, odc_piece=object(), **{**extra, "attention_mask": mask})


def test_attention_that_is_not_causal_is_refused() -> None:
    """By the module's own word, whatever its layer passes."""
    model: Any = model_of("llama")
    extra = models.hook(model)
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(UnsupportedError, match=r"its attention is not causal \(layer 1\)"):
        rehearse(model, models.layers_of(model), extra)
