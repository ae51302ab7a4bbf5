"""Attention inside documents: a packed row equals its documents run alone, forward and backward."""

from __future__ import annotations

import pytest
import torch

from odc.errors import UnsupportedError
from odc.experiments.text import attention
from odc.experiments.text.attention import document_attention, register, window_mask

transformers = pytest.importorskip("transformers", reason="needs the train extra")

LENGTHS = (7, 1, 19, 2, 33)


def tiny(attention: str, **changes):
    config = transformers.Qwen2Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        **changes,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.double().train()  # gradients that nearly cancel are compared too


def packed(lengths: tuple[int, ...], seed: int = 1) -> dict:
    torch.manual_seed(seed)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return {
        "input_ids": torch.randint(0, 61, (1, sum(lengths))),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": starts,
    }


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def alone(model, inputs: dict, lengths: tuple[int, ...], weight: torch.Tensor) -> torch.Tensor:
    """Each document in a forward and backward of its own; returns the logits, leaves the summed gradients."""
    logits = []
    for ids, part in zip(inputs["input_ids"][0].split(lengths), weight.split(lengths, dim=1), strict=True):
        output = model(input_ids=ids[None], use_cache=False).logits
        (output * part).sum().backward()
        logits.append(output.detach())
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("checkpointing", [None, "transformers", "torch"])
def test_packed_equals_documents_alone(checkpointing: str | None):
    inputs, weight = packed(LENGTHS), torch.randn(1, sum(LENGTHS), 61)
    reference = tiny("eager")
    expected = alone(reference, inputs, LENGTHS, weight)
    model = tiny(register())
    if checkpointing == "transformers":
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable()
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    elif checkpointing == "torch":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        model.model.layers = torch.nn.ModuleList(checkpoint_wrapper(layer) for layer in model.model.layers)
    output = model(**inputs, use_cache=False).logits
    (output * weight).sum().backward()
    torch.testing.assert_close(output.detach(), expected, rtol=1e-5, atol=1e-6)
    grads = {name.replace("._checkpoint_wrapped_module", ""): grad for name, grad in gradients(model).items()}
    for name, grad in gradients(reference).items():
        torch.testing.assert_close(grads[name], grad, rtol=2e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_rows_without_lengths_are_one_document_each():
    ids = torch.randint(0, 61, (3, 11))
    expected = tiny("eager")(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(tiny(register())(input_ids=ids, use_cache=False).logits, expected, rtol=1e-5, atol=1e-6)


# Dynamo looks at `.grad` of every tensor it is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks_give_the_same():
    inputs = packed(LENGTHS)
    model = tiny(register())
    expected = model(**inputs, use_cache=False).logits
    for layer in model.model.layers:
        layer.compile(backend="eager")
    torch.testing.assert_close(model(**inputs, use_cache=False).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 4])
def test_generation_steps_one_token_at_a_time(window: int | None):
    ids = torch.randint(0, 61, (1, 6))
    changes = {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 0}
    mine, reference = tiny(register(), **changes).eval(), tiny("eager", **changes).eval()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(ids)
    assert torch.equal(
        mine.generate(ids, attention_mask=mask, **options), reference.generate(ids, attention_mask=mask, **options)
    )


def test_padding_is_refused():
    model, ids = tiny(register()), torch.randint(0, 61, (2, 5))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with pytest.raises(UnsupportedError, match="no padding"):
        model(input_ids=ids, attention_mask=mask, use_cache=False)


FORMS = [
    {"window": window, "softcap": softcap, "sinks": sinks}
    for window in (None, 1, 5, 20, 100)
    for softcap in (None, 2.0)
    for sinks in (False, True)
]


@pytest.mark.parametrize("scores", [1 << 26, 200])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_windows_caps_and_sinks(form: dict, scores: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "_BLOCK_SCORES", scores)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, sum(LENGTHS), 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if form["sinks"] else None
    weight = torch.randn(1, sum(LENGTHS), 4, 8, dtype=torch.float64)
    starts = packed(LENGTHS)["cu_seq_lens_q"]
    options = {"scaling": 0.3, "sliding_window": form["window"], "softcap": form["softcap"], "s_aux": sinks}
    output = document_attention(torch.nn.Identity(), q, k, v, cu_seq_lens_q=starts, **options)[0]
    expected = whole_matrix(q, k, v, **form | {"sinks": sinks})
    torch.testing.assert_close(output, expected)
    leaves = [q, k, v, *([] if sinks is None else [sinks])]
    grads = torch.autograd.grad((output * weight).sum(), leaves)
    torch.testing.assert_close(grads, torch.autograd.grad((expected * weight).sum(), leaves))


def whole_matrix(q, k, v, window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """The definition: all scores of the row at once."""
    scores = 0.3 * q @ k.repeat_interleave(2, 1).mT
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    own = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    behind = torch.arange(sum(LENGTHS))[:, None] - torch.arange(sum(LENGTHS))
    seen = (own[:, None] == own) & (behind >= 0) & (behind < (window or sum(LENGTHS)))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], dim=3)
    return (scores.softmax(3)[..., : sum(LENGTHS)] @ v.repeat_interleave(2, 1)).transpose(1, 2)


def test_a_window_that_only_the_mask_knows():
    q = torch.randn(1, 1, 9, 4, dtype=torch.float64)
    named = document_attention(torch.nn.Identity(), q, q, q, sliding_window=3)[0]
    mask = window_mask(q_length=9, kv_length=9, local_size=3)
    torch.testing.assert_close(document_attention(torch.nn.Identity(), q, q, q, mask)[0], named)
    assert not torch.allclose(document_attention(torch.nn.Identity(), q, q, q)[0], named)
    assert window_mask(q_length=9, kv_length=9, local_size=9) is None
    none = document_attention(torch.nn.Identity(), q, q, q, torch.empty(1, 1, 0, 0))[0]
    torch.testing.assert_close(none, document_attention(torch.nn.Identity(), q, q, q)[0])


@pytest.mark.parametrize("form", [{"sliding_window": 3}, {"softcap": 0.5}, {"s_aux": torch.tensor([0.7])}], ids=str)
def test_one_new_token_sees_what_the_last_of_a_row_sees(form: dict):
    """With a cache that holds more than the window, as static ones do."""
    q = torch.randn(1, 1, 9, 4)
    whole = document_attention(torch.nn.Identity(), q, q, q, **form)[0]
    one = document_attention(torch.nn.Identity(), q[:, :, -1:], q, q, **form)[0]
    torch.testing.assert_close(one, whole[:, -1:])


def test_windows_equal_transformers_own_masks():
    changes = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    inputs = packed(LENGTHS)
    starts = inputs.pop("cu_seq_lens_q")
    masked = tiny("eager", **changes)(**inputs, use_cache=False).logits
    mine = tiny(register(), **changes)(**inputs, cu_seq_lens_q=starts, use_cache=False).logits
    torch.testing.assert_close(mine, masked, rtol=1e-5, atol=1e-6)


def test_masks_that_are_no_windows_are_refused():
    for wrong in ({"use_vmap": True}, {"allow_is_bidirectional_skip": True}):
        with pytest.raises(UnsupportedError, match="the model's mask is not"):
            window_mask(q_length=9, kv_length=9, **wrong)
    chunked = transformers.Qwen2Config(attention_chunk_size=4)
    with pytest.raises(UnsupportedError, match="chunks of 4"):
        window_mask(q_length=9, kv_length=9, local_size=4, config=chunked)


def test_keywords_that_change_attention_are_refused_by_name():
    q = torch.zeros(1, 2, 6, 8)
    module = torch.nn.Identity()
    document_attention(module, q, q, q, position_bias=None, position_ids=torch.zeros(1, 6), max_length_k=6)
    with pytest.raises(UnsupportedError, match="does not know head_mask, position_bias of Identity"):
        document_attention(module, q, q, q, position_bias=q, head_mask=q)
    with pytest.raises(UnsupportedError, match="that of Identity is not"):
        document_attention(module, q, q, q, is_causal=False)
    module.is_causal = False
    with pytest.raises(UnsupportedError, match="that of Identity is not"):
        document_attention(module, q, q, q)


def test_bad_arguments():
    q, kv = torch.zeros(1, 4, 6, 8), torch.zeros(1, 2, 6, 8)
    module = torch.nn.Identity()
    with pytest.raises(UnsupportedError, match="do not fit"):
        document_attention(module, q, kv, kv, cu_seq_lens_q=torch.tensor([0, 5]))
    with pytest.raises(UnsupportedError, match="do not fit 2 row"):
        document_attention(module, *(t.repeat(2, 1, 1, 1) for t in (q, kv, kv)), cu_seq_lens_q=torch.tensor([0, 6]))
    with pytest.raises(UnsupportedError, match="no attention mask"):
        document_attention(module, q, kv, kv, torch.ones(1, 1, 6, 6))
    with pytest.raises(UnsupportedError, match="no cache"):
        document_attention(module, q[:, :, :3], kv, kv)
