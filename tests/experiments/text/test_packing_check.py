"""Which of transformers' models train on packed documents, exactly, and that every other one is refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_job import tiny_job
from torch.nn.functional import cross_entropy

from odc.errors import ConfigError, UnsupportedError
from odc.experiments import job
from odc.experiments.config import GrpoConfig
from odc.experiments.data.documents import Document
from odc.experiments.data.packing import pack
from odc.experiments.grpo.step import GrpoWorkload
from odc.experiments.launch import JobFailedError
from odc.experiments.text.loss import use_document_loss
from odc.experiments.text.model import build_model
from odc.experiments.text.packing_check import PackingError, check_documents, packing_error
from odc.experiments.text.step import TextWorkload

transformers = pytest.importorskip("transformers", reason="needs the train extra")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MOE = {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
FEW_EXPERTS = {"num_local_experts": 4}
ONE_OF_EACH = {"layer_types": ["sliding_attention", "full_attention"]}
WINDOWED: dict[str, dict[str, Any]] = {
    "gpt_oss": {**FEW_EXPERTS, "head_dim": 8, "sliding_window": 7, **ONE_OF_EACH},
    "gemma2": {"head_dim": 8, "sliding_window": 7, **ONE_OF_EACH},
    "qwen2_moe": {
        **MOE,
        "shared_expert_intermediate_size": 16,
        "use_sliding_window": True,
        "sliding_window": 7,
        **ONE_OF_EACH,
    },
    "phimoe": {**FEW_EXPERTS, "sliding_window": 7, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "vaultgemma": {"head_dim": 8, "sliding_window": 7, **ONE_OF_EACH},
    "mistral": {"sliding_window": 7},
    "qwen3_moe": {**MOE, "head_dim": 8},
}
EXACT: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("llama", "qwen2", "qwen3", "gpt2", "gemma", "phi", "phi3", "olmo2", "olmo3", "granite")},
    **{kind: {} for kind in ("glm", "glm4", "smollm3", "starcoder2", "opt", "gpt_neox", "gpt_bigcode", "persimmon")},
    "helium": {"head_dim": 8},
    **{kind: {} for kind in ("seed_oss", "diffllama", "apertus", "arcee", "bitnet", "biogpt", "exaone4")},
    "gemma3_text": {"head_dim": 8, **ONE_OF_EACH},
    "cohere2": {"logit_scale": 1.0, **ONE_OF_EACH},
    "mixtral": FEW_EXPERTS,
    "olmoe": {"num_experts": 4},
}
REFUSED: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("nemotron", "bloom", "xglm", "jamba", "recurrent_gemma", "rwkv", "xlstm", "mpt")},
    "nemotron_h": {"n_routed_experts": 4, "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8},
    **{kind: {"rotary_dim": 8} for kind in ("gptj", "codegen")},
    **{kind: {} for kind in ("doge", "bert", "big_bird", "lfm3", "minimax")},
    "cohere": {},  # its logits are scaled
    "llama4_text": FEW_EXPERTS,
}


def config_of(kind: str, **changes: Any) -> Any:
    return transformers.AutoConfig.for_model(kind, **(SIZES | changes))


def cases(quick: dict[str, dict[str, Any]], thorough: dict[str, dict[str, Any]]) -> list[Any]:
    later = [pytest.param(kind, more, id=kind, marks=pytest.mark.thorough) for kind, more in thorough.items()]
    return [*(pytest.param(kind, more, id=kind) for kind, more in quick.items()), *later]


def moved(model: Any) -> Any:
    """Larger weights, so that attention matters; the same for models alike."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    return model


def gradient(model: Any) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def document(length: int, seed: int) -> Document:
    ids = np.random.default_rng(seed).integers(0, 101, length).astype(np.int32)
    return Document("", ids, np.ones(length, bool))


@pytest.mark.parametrize(("kind", "more"), cases(WINDOWED, {}))
def test_gradient_of_a_packed_row_is_that_of_its_documents(kind: str, more: dict[str, Any], tmp_path: Path):
    config = config_of(kind, **more)
    config.save_pretrained(tmp_path)
    model = moved(use_document_loss(build_model(tmp_path / "config.json", dtype=torch.float32)))
    plain = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    plain.load_state_dict(model.state_dict())
    documents = [document(23, 1), document(5, 2), document(17, 3)]  # of which two are longer than the window
    loss = model(**pack(documents).model_inputs())
    loss.backward()
    expected = 0.0
    for one in documents:
        ids = torch.from_numpy(one.tokens).long()
        alone = cross_entropy(plain(input_ids=ids[None], use_cache=False).logits[0, :-1], ids[1:], reduction="sum")
        alone.backward()
        expected += float(alone.detach())
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    right = gradient(plain)
    assert float((gradient(model) - right).norm() / right.norm()) < 1e-5


@pytest.mark.parametrize(("kind", "more"), cases({**WINDOWED, "llama": {}}, EXACT))
def test_models_that_train_on_packed_documents(kind: str, more: dict[str, Any]):
    config = config_of(kind, **more)
    found = packing_error(config)
    assert max(found.output, found.gradient) < 1e-5
    assert found.asked == found.layers
    check_documents(config, 64)


@pytest.mark.parametrize(("kind", "more"), cases({"stablelm": {}, "mamba": {}, "llama4_text": FEW_EXPERTS}, REFUSED))
def test_models_that_are_refused_by_name(kind: str, more: dict[str, Any]):
    with pytest.raises(UnsupportedError, match=rf"\b{kind} models.*OdcTrainer, which gives every document a row"):
        check_documents(config_of(kind, **more), 64)


def test_refusal_says_how_far_off_the_model_is_and_which_layers_asked():
    with pytest.raises(UnsupportedError, match=r"gradient of their loss by [1-9]\.\de-01 .*; 0 of its 2 layers hand"):
        check_documents(config_of("mamba"), 64)


def test_one_layer_of_many_that_mixes_documents_is_found():
    kinds = ["full_attention"] * 20
    assert packing_error(config_of("lfm2", num_hidden_layers=20, layer_types=kinds)).layers == 2
    kinds[13] = "conv"
    assert packing_error(config_of("lfm2", num_hidden_layers=20, layer_types=kinds)).gradient > 1e-2


def test_a_gradient_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch):
    from odc.experiments.text import packing_check

    monkeypatch.setattr(packing_check, "_verdicts", {})
    for found in ((1e-6, float("nan")), (float("nan"), 1e-6)):
        monkeypatch.setattr(packing_check, "packing_error", lambda config, found=found: PackingError(*found, 2, 2))
        with pytest.raises(UnsupportedError, match="documents of one row do not stay apart in llama models: .* nan"):
            check_documents(config_of("llama", vocab_size=100 + (found[0] < 1)), 64)


def test_windows_longer_than_the_checks_documents_are_checked(monkeypatch: pytest.MonkeyPatch):
    from odc.experiments.text import attention, packing_check

    config = config_of("phimoe", num_local_experts=4, sliding_window=4096)
    assert packing_error(config).gradient < 1e-5
    monkeypatch.setattr(packing_check, "window_mask", lambda *given, **options: None)  # what it was
    monkeypatch.setattr(attention, "window_mask", lambda *given, **options: None)
    assert packing_error(config).gradient > 1e-2
    assert config.sliding_window == 4096


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_configs_of_their_full_size_are_checked_by_small_copies(kind: str):
    found = packing_error(transformers.AutoConfig.for_model(kind))
    assert max(found.output, found.gradient) < 1e-5
    assert found.asked == found.layers == 2


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotary_embeddings_that_follow_the_longest_document_of_a_row(kind: str):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 50}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    config = config_of("llama", rope_parameters=rope, max_position_embeddings=50 if kind == "dynamic" else 100)
    check_documents(config, 50)
    with pytest.raises(UnsupportedError, match=rf"more than 50 tokens change the rotary embedding \({kind}\).*has 51"):
        check_documents(config, 51)


def job_of(folder: Path, kind: str, **more: Any) -> str:
    config_of(kind, **more, max_position_embeddings=512).save_pretrained(folder)
    return str(folder / "config.json")


@pytest.mark.parametrize("kind", ["stablelm", "mamba"])
def test_jobs_are_refused_before_their_first_step(tmp_path: Path, kind: str):
    model = job_of(tmp_path, kind)
    train = TextWorkload(tiny_job(tmp_path).with_(model=model, ranks=2, output=str(tmp_path / "run")))
    grpo = GrpoWorkload(GrpoConfig(model=model, ranks=2, steps=1, timeout_s=60.0))
    with pytest.raises(JobFailedError, match=f"do not stay apart in {kind} models"):
        job.run(train if kind == "stablelm" else grpo)
    assert not (tmp_path / "run" / "steps.jsonl").exists()


def test_train_with_windows_caps_and_validation(tmp_path: Path):
    config = tiny_job(tmp_path)
    config = config.with_(
        model=job_of(tmp_path, "gemma2", **WINDOWED["gemma2"]), valid=config.data, ranks=2, steps=1, minibatch_size=4
    )
    [result, _] = job.run(TextWorkload(config))
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["final_logit_softcapping"] is not None
    assert result.steps[0].valid_loss > 0


def test_models_that_only_have_attentions_of_their_own_are_config_errors(tmp_path: Path):
    with pytest.raises(ConfigError, match="gptj models cannot be built with attention per document"):
        build_model(Path(job_of(tmp_path, "gptj", rotary_dim=8)), dtype=torch.float32)
