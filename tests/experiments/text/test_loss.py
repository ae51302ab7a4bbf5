"""The blocked loss against plain cross-entropy, in values, gradients and what it does to a model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from odc.errors import UnsupportedError
from odc.experiments.data.packing import IGNORED, Microbatch, padded_dummy
from odc.experiments.text.loss import loss_scale, token_loss_sum, use_document_loss

transformers = pytest.importorskip("transformers", reason="needs the train extra")

VOCAB, WIDTH, TOKENS = 37, 16, 23


def inputs(dtype: torch.dtype, *, bias: bool, seed: int = 0):
    torch.manual_seed(seed)
    hidden = torch.randn(1, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, VOCAB, (1, TOKENS))
    labels[0, ::4] = IGNORED
    return hidden, weight, labels, torch.randn(VOCAB, dtype=dtype, requires_grad=True) if bias else None


def reference(hidden, weight, labels, bias, cap=None):
    logits = linear(hidden, weight, bias).float()
    if cap is not None:
        logits = (logits / cap).tanh() * cap
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=IGNORED)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("block_logits", [1, VOCAB * 5, 1 << 24])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_equals_plain_cross_entropy(bias: bool, block_logits: int, cap: float | None):
    mine, plain = inputs(torch.float32, bias=bias), inputs(torch.float32, bias=bias)
    loss = token_loss_sum(*mine[:3], mine[3], cap=cap, block_logits=block_logits)
    expected = reference(*plain, cap)
    torch.testing.assert_close(loss, expected)
    (loss * 0.3).backward()
    (expected * 0.3).backward()
    for one, other in zip(mine, plain, strict=True):
        if one is not None and one.requires_grad:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_bf16_sums_the_heads_gradient_in_fp32():
    mine = inputs(torch.bfloat16, bias=False)
    exact = [t.detach().double().requires_grad_() if t is not None and t.is_floating_point() else t for t in mine]
    loss = token_loss_sum(*mine, block_logits=VOCAB)
    assert loss.dtype == torch.float32
    loss.backward()
    reference(*exact).backward()
    for one, other in zip(mine[:2], exact[:2], strict=True):
        assert one.grad.dtype == torch.bfloat16
        error = (one.grad.double() - other.grad).norm() / other.grad.norm()
        assert error < 1e-2


def test_backward_twice_over_a_kept_graph():
    hidden, weight, labels, _ = inputs(torch.float32, bias=False)
    loss = token_loss_sum(hidden, weight, labels)
    loss.backward(retain_graph=True)
    once = weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(weight.grad, 2 * once)


def test_frozen_head_and_no_grad():
    hidden, weight, labels, _ = inputs(torch.float32, bias=False)
    token_loss_sum(hidden, weight.detach(), labels).backward()
    assert hidden.grad is not None
    with torch.no_grad():
        assert not token_loss_sum(hidden, weight, labels).requires_grad


def tiny(**changes):
    config = transformers.Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **changes,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def microbatch() -> Microbatch:
    torch.manual_seed(3)
    ids = torch.randint(0, VOCAB, (1, 12))
    labels = ids.roll(-1, 1)
    labels[0, -1] = IGNORED
    return Microbatch(ids, torch.arange(12)[None], labels, (12,), 11)


def step(model, mb: Microbatch) -> torch.Tensor:
    loss = model(input_ids=mb.input_ids, position_ids=mb.position_ids, labels=mb.labels, use_cache=False)
    loss.backward()
    return loss.detach()


def test_model_with_and_without_labels():
    mb, plain = microbatch(), tiny()
    model = use_document_loss(copy.deepcopy(plain))
    logits = plain(input_ids=mb.input_ids, use_cache=False).logits
    expected = cross_entropy(logits[0].float(), mb.labels[0], reduction="sum", ignore_index=IGNORED)
    expected.backward()
    torch.testing.assert_close(step(model, mb), expected.detach())
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert torch.equal(model(input_ids=mb.input_ids, use_cache=False).logits, logits)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert type(model) is type(plain)


def test_dummy_microbatch_gives_zero_gradients_everywhere():
    model = use_document_loss(tiny())
    assert step(model, padded_dummy()).item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert (loss_scale(4, 0), loss_scale(3, 16)) == (0.0, 3 / 16), "without labels no division"


def test_unsuitable_heads_are_refused():
    model = tiny()
    model.config.logit_scale = 0.5
    with pytest.raises(UnsupportedError, match="logit_scale"):
        use_document_loss(model)
    model = tiny()
    model.base_model_prefix = "missing"
    with pytest.raises(UnsupportedError, match="has no base model"):
        use_document_loss(model)
    model = tiny()
    model.set_output_embeddings(torch.nn.Sequential(torch.nn.Linear(32, VOCAB)))
    with pytest.raises(UnsupportedError, match="not one linear layer"):
        use_document_loss(model)
