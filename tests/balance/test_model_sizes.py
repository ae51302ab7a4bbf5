"""Sizes read from configs, against models that transformers builds of the same configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from odc.balance import cost_from_config
from odc.balance.model_sizes import text_config
from odc.errors import PlanError
from odc.simulate.catalog import parameter_counts

transformers = pytest.importorskip("transformers", reason="needs the train extra")

KINDS = ("gpt2", "opt", "arcee", "gemma3n_text", "ernie4_5_moe", "qwen2_moe")
MORE_KINDS = (
    *("afmoe", "apertus", "codegen", "cohere2", "gemma2", "gemma3_text", "gemma4_text", "glm4_moe", "gpt_bigcode"),
    *("gpt_neox", "gpt_oss", "gptj", "granitemoe", "jais2", "llama", "mimo_v2_flash", "mixtral", "nanochat"),
    *("olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen3", "qwen3_moe", "smollm3", "starcoder2"),
)


def built(kind: str) -> tuple[dict[str, Any], Any]:
    """The default config of a type, and its model, which takes no memory."""
    config = transformers.AutoConfig.for_model(kind)
    with torch.device("meta"):
        return config.to_dict(), transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.thorough) for kind in MORE_KINDS)])
def test_parameters_are_those_of_the_model(kind: str) -> None:
    """Within what is left out: norms, biases, embeddings of positions and gates."""
    fields, model = built(kind)
    counted = sum(parameter_counts(fields))
    assert counted == pytest.approx(sum(parameter.numel() for parameter in model.parameters()), rel=0.03)


@pytest.mark.parametrize(
    "kind",
    ["opt", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("arcee", "gemma3n_text", "persimmon"))],
)
def test_a_token_is_multiplied_by_every_matrix_once(kind: str) -> None:
    fields, model = built(kind)
    matrices = sum(one.weight.numel() for one in model.modules() if isinstance(one, torch.nn.Linear))
    assert cost_from_config(fields).a / 6 == pytest.approx(matrices, rel=0.03)


WINDOWED = (
    *("afmoe", "beam", "cohere2", "cohere2_moe", "cohere_compass_text", "cwm", "exaone4", "flint", "gemma2"),
    *("gemma3", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "gpt_oss", "granite_swa"),
    *("granitemoe_swa", "laguna", "mellum", "mimo_v2_flash", "ministral", "modernbert-decoder", "olmo3", "vaultgemma"),
)
OPT_IN = ("dots1", "qwen2", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "smollm3")
REFUSED = ("inkling_text", "llama4_text", "minimax", "olmo_hybrid", "qwen3_5_text", "qwen3_next")


def with_and_without_layer_types(kind: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config as transformers fills it in, and as older ones lie on the Hub: its pattern implied by its type."""
    try:
        config = transformers.AutoConfig.for_model(kind, **fields)
    except (KeyError, ValueError) as error:
        pytest.skip(f"this transformers makes no such {kind}: {error}")
    filled = dict(text_config(config.to_dict()))
    if filled.get("layer_types") is None:
        pytest.skip(f"this transformers lists no layer types of {kind}")
    return filled, {name: value for name, value in filled.items() if name != "layer_types"}


@pytest.mark.parametrize("layers", [None, 22, 23, 24, 25])
@pytest.mark.parametrize("kind", WINDOWED)
def test_the_type_implies_which_layers_have_windows(kind: str, layers: int | None) -> None:
    filled, raw = with_and_without_layer_types(kind, **({} if layers is None else {"num_hidden_layers": layers}))
    assert cost_from_config(raw) == cost_from_config(filled)


@pytest.mark.parametrize("kind", OPT_IN)
def test_windows_that_are_not_asked_for_do_not_count(kind: str) -> None:
    filled, raw = with_and_without_layer_types(kind)
    raw = {name: value for name, value in raw.items() if name != "use_sliding_window"} | {"sliding_window": 4096}
    assert cost_from_config(raw) == cost_from_config(filled)
    assert cost_from_config(raw | {"use_sliding_window": None}) == cost_from_config(filled)


def test_the_size_of_a_window_under_another_name_too_is_no_other_attention() -> None:
    """As in MiMo-V2-Flash's config on the Hub."""
    filled, raw = with_and_without_layer_types("mimo_v2_flash")
    assert cost_from_config(raw | {"attention_chunk_size": 128, "sliding_window_size": 128}) == cost_from_config(filled)


@pytest.mark.parametrize("first", [0, 10, 28])
def test_windows_that_are_asked_for_begin_at_a_layer(first: int) -> None:
    fields = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": first, "num_hidden_layers": 28}
    filled, raw = with_and_without_layer_types("qwen2", **fields)
    assert cost_from_config(raw) == cost_from_config(filled)


@pytest.mark.parametrize("kind", REFUSED)
def test_the_type_implies_layers_that_are_not_counted(kind: str) -> None:
    for config in with_and_without_layer_types(kind):
        with pytest.raises(PlanError, match="cost model does not know"):
            cost_from_config(config)
    whole = ["full_attention"] * config["num_hidden_layers"]
    assert cost_from_config(config | {"layer_types": whole}), "what is listed counts, not the type"
