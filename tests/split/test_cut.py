"""Cuts: attention by blocks against torch's with a mask, and what a piece takes of tokens and labels."""

from __future__ import annotations

import importlib.util
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from odc.balance import quadratic
from odc.balance.slices import contiguous, zigzag
from odc.errors import PlanError
from odc.split import _torch_private, attention
from odc.split.cut import Cut, Sees, targets_of

HEADS, GROUPS, WIDTH, SCALE = 4, 2, 8, 0.3


def largest_error(cut: Cut, window: int | None, dtype: torch.dtype = torch.float64) -> float:
    """Of outputs and gradients of all pieces, against attention with a mask over the whole sample."""
    draw, length = torch.Generator().manual_seed(cut.length), cut.length
    shapes = [(HEADS,), (GROUPS,), (GROUPS,), (HEADS,)]
    q, k, v, grad = (torch.randn(1, *heads, length, WIDTH, generator=draw, dtype=dtype) for heads in shapes)
    far = torch.arange(length)[:, None] - torch.arange(length)
    mask = (far >= 0) & (far < (window or length))
    given = [tensor.requires_grad_() for tensor in (q, k, v)]
    whole = scaled_dot_product_attention(*given, attn_mask=mask, enable_gqa=True, scale=SCALE)
    dq, dk, dv = torch.autograd.grad(whole, given, grad)
    q, kv, whole = q.detach(), torch.cat([k, v]).detach(), whole.detach()
    total, errors = torch.zeros_like(kv), []
    for place in range(len(cut.slices)):
        at = cut.positions(place)
        parts = {owner: kv[:, :, cut.positions(owner)[: cut.seen[owner][place]]] for owner in cut.owners(place)}
        parts[place] = kv[:, :, at]
        blocks = cut.blocks(place, window)
        merged = attention.attend_blocks(q[:, :, at], parts, blocks, SCALE)
        mine = torch.zeros_like(q[:, :, at])
        dkv = attention.attend_blocks_backward(grad[:, :, at], q[:, :, at], parts, blocks, merged, SCALE, mine)
        errors += [(merged.out - whole[:, :, at]).abs().max(), (mine - dq[:, :, at]).abs().max()]
        for owner, found in dkv.items():
            total[:, :, cut.positions(owner)[: found.shape[2]]] += found
    return float(max([*errors, (total - torch.cat([dk, dv])).abs().max()]))


@given(
    st.integers(12, 100),
    st.integers(2, 5),
    st.none() | st.integers(1, 110),
    st.booleans(),
)
def test_blocks_are_attention_whatever_the_cut_and_the_window(length, pieces, window, one_slice):
    cut = Cut(contiguous(length, pieces, quadratic(9, 1)) if one_slice else zigzag(length, pieces))
    assert largest_error(cut, window) <= 1e-13


@pytest.mark.parametrize("window", [None, 7])
def test_where_torch_has_no_flash_attention(monkeypatch, window):
    monkeypatch.setattr(_torch_private, "has_flash", lambda query: False)
    monkeypatch.setattr(attention, "_ROWS", 5)
    assert largest_error(Cut(zigzag(41, 2)), window) <= 1e-13
    assert largest_error(Cut(zigzag(41, 2)), window, torch.float32) <= 1e-5


def test_without_flash_attention_autocast_changes_nothing(monkeypatch):
    """Scores, their log-sum-exp and gradients are in fp32 at least, whatever the dtype of the queries."""
    monkeypatch.setattr(_torch_private, "has_flash", lambda query: False)
    cut, draw = Cut(zigzag(41, 2)), torch.Generator().manual_seed(0)
    query, kv = (torch.randn(*shape, 20, WIDTH, generator=draw).bfloat16() for shape in ((1, HEADS), (2, GROUPS)))
    blocks = [block for block in cut.blocks(0, None) if block.owner == 0]

    def run():
        dq = torch.zeros_like(query, dtype=torch.float32)
        merged = attention.attend_blocks(query, {0: kv}, blocks, SCALE)
        return [*merged[:2], attention.attend_blocks_backward(query, query, {0: kv}, blocks, merged, SCALE, dq)[0], dq]

    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_on_a_gpu_flash_attention_gets_and_gives_what_is_expected(monkeypatch):
    """By shapes and dtypes alone (`meta`): nothing is computed, and nothing has run on a GPU."""
    monkeypatch.setattr(_torch_private, "has_flash", lambda query: True)
    cut = Cut(zigzag(64, 2))
    query = torch.empty(1, HEADS, 32, WIDTH, dtype=torch.bfloat16, device="meta")
    parts = {place: query.new_empty(2, GROUPS, 32, WIDTH) for place in range(2)}
    blocks = cut.blocks(0, None)
    merged = attention.attend_blocks(query, parts, blocks, SCALE)
    assert merged.out.shape == query.shape and merged.out.dtype == query.dtype and merged.out.is_meta
    assert merged.lse.shape == query.shape[:3] and merged.lse.dtype == torch.float32
    assert [len(rest) for rest in merged.rests] == [6] * len(blocks), "lengths and seeds for the backward"
    dq = torch.zeros_like(query, dtype=torch.float32)
    found = attention.attend_blocks_backward(query, query, parts, blocks, merged, SCALE, dq)
    assert {place: grad.shape for place, grad in found.items()} == {place: kv.shape for place, kv in parts.items()}


def import_again() -> None:
    """Run the file as a first import would, without touching the module that is in use."""
    spec = importlib.util.spec_from_file_location("private_again", _torch_private.__file__)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("name", list(_torch_private._OPERATORS))
def test_an_operator_that_is_gone_or_other_is_named_at_import(monkeypatch, name):
    import_again()
    schema = getattr(torch.ops.aten, name).default._schema
    for arguments, returns in (((), 1), (schema.arguments[1:], 3), (schema.arguments, 1)):
        other = SimpleNamespace(_schema=SimpleNamespace(arguments=list(arguments), returns=[None] * returns))
        monkeypatch.setattr(torch.ops.aten, name, SimpleNamespace(default=other))
        with pytest.raises(ImportError, match=f"^torch {re.escape(torch.__version__)} lacks .*{name}"):
            import_again()
    monkeypatch.setattr(torch.ops.aten, name, None)
    with pytest.raises(ImportError, match=name):
        import_again()


def test_two_zigzag_pieces_take_five_blocks_and_half_the_work_each():
    cut = Cut(zigzag(64, 2))
    blocks = [cut.blocks(place, None) for place in range(2)]
    assert [len(some) for some in blocks] == [4, 2]
    assert [[block.sees is Sees.EARLIER for block in some] for some in blocks] == [
        [True] * 2 + [False] * 2,
        [True, False],
    ]
    assert [block.owner for block in blocks[0]] == [0, 0, 0, 1], "others' keys last, for which it waits"
    work = [
        sum(
            (b.rows.stop - b.rows.start) * (b.keys.stop - b.keys.start) // (1 if b.sees is Sees.ALL else 2)
            for b in some
        )
        for some in blocks
    ]
    assert work == [64 * 64 // 4, 64 * 64 // 4]


def test_which_place_reads_which():
    cut = Cut(contiguous(30, 3, float))
    assert [cut.owners(place) for place in range(3)] == [[], [0], [0, 1]]
    assert [cut.readers(place) for place in range(3)] == [[1, 2], [2], []]
    both = Cut(zigzag(32, 2))
    assert both.seen == [[16, 8], [16, 16]], "the last piece sees nothing of the first one's second slice"


def test_labels_cross_the_borders_of_pieces():
    tokens = torch.arange(100, 116)
    cut, targets = Cut(zigzag(16, 2)), targets_of(tokens)
    assert cut.take(0, tokens).tolist() == [100, 101, 102, 103, 112, 113, 114, 115]
    assert cut.take(0, targets).tolist() == [101, 102, 103, 104, 113, 114, 115, -100]
    assert cut.take(1, targets).tolist() == list(range(105, 113))
    assert cut.positions(0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    with pytest.raises(PlanError, match="a sample of 16 tokens, but 15 were given"):
        cut.take(0, tokens[:-1])
