from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_model import toy
from transformers import AutoConfig

from odc.errors import ConfigError
from odc.experiments.grpo.generator import Generator
from odc.experiments.grpo.samples import Sample, batch_of, token_log_probs
from odc.experiments.text.model import build_model

PROMPTS = [[9, 10, 11, 12], [30, 31]]  # of two lengths: the shorter is padded on the left
STOPS = range(8)


def test_responses_end_where_they_stop(tmp_path: Path) -> None:
    config = toy(tmp_path, group=6)
    made = Generator(config, Path(config.model), STOPS).respond(PROMPTS, 0)
    assert len(made) == 12
    for response in made:
        *before, last = response.tokens
        assert not set(before) & set(STOPS)
        assert last in STOPS or len(response.tokens) == config.response_tokens
        assert len(response.log_probs) == len(response.tokens) and response.reference is None
    assert len({len(response.tokens) for response in made}) > 2, "lengths vary"


def test_the_same_weights_and_step_draw_the_same(tmp_path: Path) -> None:
    config = toy(tmp_path)
    one, two = (Generator(config, Path(config.model), STOPS) for _ in range(2))
    assert one.respond(PROMPTS, 3) == two.respond(PROMPTS, 3) != one.respond(PROMPTS, 4)


def test_a_checkpoints_generation_config_changes_no_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities are those of the model, and so must be what is drawn."""
    config = toy(tmp_path)
    plain = Generator(config, Path(config.model), STOPS).respond(PROMPTS, 0)

    def published(*given: Any, **options: Any) -> Any:
        model = build_model(*given, **options)
        model.generation_config.repetition_penalty = 5.0
        return model

    monkeypatch.setattr("odc.experiments.grpo.generator.build_model", published)
    assert Generator(config, Path(config.model), STOPS).respond(PROMPTS, 0) == plain


@pytest.mark.parametrize("lengths", ["model", "drawn"])
def test_log_probabilities_are_those_that_training_finds(tmp_path: Path, lengths: str) -> None:
    """Decoding with a cache and left padding against packed rows, of the drawing and of the initial model."""
    config = toy(tmp_path, kl=0.1, lengths=lengths)
    generator = Generator(config, Path(config.model), STOPS)
    initial = build_model(Path(config.model), dtype=torch.float32, seed=config.seed)
    changed = generator.weights(["model.layers.0.mlp.up_proj.weight"])
    changed["model.layers.0.mlp.up_proj.weight"].mul_(3.0)
    trained = build_model(Path(config.model), dtype=torch.float32, seed=config.seed)
    trained.load_state_dict(generator.model.state_dict())
    samples = [
        Sample(i // config.group, PROMPTS[i // config.group], r.tokens, r.log_probs, r.reference, 0.0)
        for i, r in enumerate(generator.respond(PROMPTS, 0))
    ]
    batch = batch_of(samples, [float(i) for i in range(len(samples))])
    assert batch.reference is not None
    with torch.no_grad():
        for model, expected in ((trained, batch.log_probs), (initial, batch.reference)):
            logits = model(**batch.inputs.model_inputs(labels=False)).logits
            torch.testing.assert_close(token_log_probs(logits, batch.inputs.labels), expected, rtol=0, atol=2e-5)
    assert (batch.log_probs - batch.reference).abs().max() > 1e-3, "the two models differ"
    owners = [i for i, sample in enumerate(samples) for _ in sample.response]
    assert batch.advantages.tolist() == [float(i) for i in owners]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gemma2", {"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 0.5}),
        ("gpt_oss", {"head_dim": 8, "sliding_window": 5, "num_local_experts": 4}),
    ],
)
def test_rollouts_have_the_sinks_and_caps_of_training(tmp_path: Path, kind: str, more: dict[str, Any]) -> None:
    config = toy(tmp_path)
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 24}
    shape |= {"num_hidden_layers": 2, "vocab_size": 64, "layer_types": ["sliding_attention", "full_attention"]}
    AutoConfig.for_model(kind, **shape, **more).save_pretrained(tmp_path)
    (tmp_path / "config.json").rename(config.model)
    generator = Generator(config, Path(config.model), STOPS)
    trained = build_model(Path(config.model), dtype=torch.float32, seed=config.seed)
    draw = torch.Generator().manual_seed(0)
    for parameter in generator.model.parameters():  # so that attention matters
        parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
    trained.load_state_dict(generator.model.state_dict())
    made = generator.respond(PROMPTS, 0)
    samples = [Sample(0, PROMPTS[i // config.group], r.tokens, r.log_probs, None, 0.0) for i, r in enumerate(made)]
    batch = batch_of(samples, [0.0 for _ in samples])
    with torch.no_grad():
        logits = trained(**batch.inputs.model_inputs(labels=False)).logits
    torch.testing.assert_close(token_log_probs(logits, batch.inputs.labels), batch.log_probs, rtol=0, atol=2e-4)


def test_drawn_lengths_are_skewed_and_do_not_depend_on_the_model(tmp_path: Path) -> None:
    config = toy(tmp_path, lengths="drawn", response_tokens=100, max_tokens=200, group=40)
    generator = Generator(config, Path(config.model), STOPS)
    lengths = [len(response.tokens) for response in generator.respond(PROMPTS, 0)]
    generator.weights(["model.embed_tokens.weight"])["model.embed_tokens.weight"].mul_(0.5)
    assert [len(response.tokens) for response in generator.respond(PROMPTS, 0)] == lengths
    assert max(lengths) > 3 * sorted(lengths)[len(lengths) // 2] and min(lengths) >= 1


def test_a_stop_token_that_is_not_there(tmp_path: Path) -> None:
    config = toy(tmp_path)
    with pytest.raises(ConfigError, match="stop token 64"):
        Generator(config, Path(config.model), [64])
