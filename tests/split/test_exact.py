"""Gradients of samples that run as pieces on several ranks are those of the samples run whole in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.on_ranks import on_ranks
from support.split_jobs import (
    LAYERS,
    LONGEST,
    Minibatch,
    apart,
    loss_of,
    losses_whole,
    model_of,
    stand_in_for,
    step_of,
    tokens_of,
)

from odc.split import SamplePiece, Splitter

LIMITS = {"float64": 1e-12, "float32": 1e-5}
TWO = [
    Minibatch([(97, [0, 1], "zigzag")]),
    Minibatch([(96, [1, 0], "contiguous"), (61, [0, 1], "zigzag")], [(7, 0), (20, 1), (5, 1)]),
]
# Gangs that overlap, in three orders of their ranks; then one, none and three whole samples.
THREE = [
    Minibatch([(96, [0, 1], "zigzag"), (61, [1, 2], "contiguous"), (33, [2, 0, 1], "zigzag")], [(7, 0), (20, 2)]),
    Minibatch([(120, [0, 1, 2], "uneven"), (16, [1, 0], "zigzag")], [(9, 2), (31, 2), (2, 2)]),
]
FOUR = [Minibatch([(130, [0, 1, 2, 3], "zigzag"), (60, [2, 3], "contiguous"), (61, [1, 0], "zigzag")], [(30, 3)])]
MINIBATCHES = {2: TWO, 3: THREE, 4: FOUR}


def exact(rank: int, world: int, name: str, kind: str, dtype: str, checkpoint: bool, keep: bool) -> None:
    """The whole samples are run in fp64: the limit is for this run's rounding alone."""
    model = model_of(kind, getattr(torch, dtype), checkpoint=checkpoint)
    like = model_of(kind, torch.float64)
    with torch.no_grad():
        for one, other in zip(like.parameters(), model.parameters(), strict=True):
            one.copy_(other)
    layers = 2 if kind == "own" else None
    splitter = Splitter(model, LONGEST, piece_tokens=100, layers=layers, keep=keep, timeout_s=120.0, name=name)
    for minibatch in MINIBATCHES[world]:
        model.zero_grad()
        loss = step_of(model, splitter, minibatch, rank, world)
        gradients, losses = apart(model, minibatch, like, loss)
        assert max(gradients, losses) <= LIMITS[dtype], f"gradients {gradients:.1e}, loss {losses:.1e}"
    splitter.close()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gpt2", "mixtral", "own"])
def test_every_kind_of_model_in_fp64(ranks: Any, name: str, kind: str) -> None:
    ranks(2).run(exact, name, kind, "float64", False, True)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", "mixtral"])
@pytest.mark.parametrize(("checkpoint", "keep"), [(False, True), (True, True), (True, False), (False, False)])
def test_overlapping_gangs_of_three_ranks(ranks: Any, name: str, kind: str, checkpoint: bool, keep: bool) -> None:
    ranks(3).run(exact, name, kind, "float64", checkpoint, keep)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_four_ranks(ranks: Any, name: str, kind: str) -> None:
    ranks(4).run(exact, name, kind, "float64", True, True)


# The same code in another dtype: fp64 shows every kind above.
MORE = [pytest.param(kind, marks=pytest.mark.thorough) for kind in ("qwen3", "mistral", "gpt2", "mixtral")]


@pytest.mark.parametrize("kind", ["llama", *MORE])
@pytest.mark.parametrize(("checkpoint", "keep"), [(True, True), (True, False)])
def test_fp32(ranks: Any, name: str, kind: str, checkpoint: bool, keep: bool) -> None:
    ranks(2).run(exact, name, kind, "float32", checkpoint, keep)


@on_ranks(2)
def test_flash_attention(rank: int, world: int, name: str) -> None:
    """Something else stands in for the library: whole samples run in it, and pieces as with any other attention."""
    model, like = model_of("qwen2", torch.float64), model_of("qwen2", torch.float64)
    with stand_in_for("flash_attention_2", model) as asked:
        splitter = Splitter(model, LONGEST, piece_tokens=100, timeout_s=120.0, name=name)
        splitter.prepare()
        asked.clear()
        for minibatch in TWO:
            model.zero_grad()
            loss = step_of(model, splitter, minibatch, rank, world)
            gradients, losses = apart(model, minibatch, like, loss)
            assert max(gradients, losses) <= LIMITS["float64"], f"gradients {gradients:.1e}, loss {losses:.1e}"
        mine = sum(owner == rank for minibatch in TWO for _, owner in minibatch.whole)
        assert len(asked) == mine * LAYERS, "whole samples alone reach it"
    splitter.close()


@on_ranks(2)
def test_bf16_is_as_near_as_unsplit(rank: int, world: int, name: str) -> None:
    """Split is about as far from fp32 as unsplit is: the blocks are merged in fp32.

    Each distance is of random roundings, so their ratio changes by some tenths with the processor and the sample.
    """
    minibatch, exactly = TWO[1], model_of("llama", torch.float32)
    half, whole = model_of("llama", torch.bfloat16), model_of("llama", torch.bfloat16)
    splitter = Splitter(half, LONGEST, piece_tokens=100, timeout_s=120.0, name=name)
    with torch.no_grad():
        for one, other in zip(exactly.parameters(), half.parameters(), strict=True):
            one.copy_(other)
    split, _ = apart(half, minibatch, exactly, step_of(half, splitter, minibatch, rank, world))
    if rank == 0:
        for loss in losses_whole(whole, minibatch, range(len(minibatch.lengths))):
            loss.backward()
    unsplit, _ = apart(whole, minibatch, exactly, 0.0)
    assert split <= 2 * unsplit, f"split {split}, unsplit {unsplit}"
    splitter.close()


@on_ranks(2)
def test_what_is_wrong_shows(rank: int, world: int, name: str) -> None:
    """The comparison can fail: what a wrong split would do shows by far."""
    model, like = model_of("llama", torch.float64), model_of("llama", torch.float64)
    splitter = Splitter(model, LONGEST, timeout_s=120.0, name=name)
    splitter.prepare()

    class Wrong(SamplePiece):
        def settle(self, layer: int, own: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            mine = own.clone()
            super().settle(layer, own, kv)
            return mine

    total = 0.0
    for piece in splitter.pieces(TWO[0].plan(world)):
        wrong = Wrong(*(getattr(piece, name) for name in list(piece.__dataclass_fields__)[:7]))
        inputs, targets = wrong.of(tokens_of(0, 97))
        loss = loss_of(model, inputs, targets)
        loss.backward()
        total += loss.item()
        piece._settled = wrong._settled
    gradients, _ = apart(model, TWO[0], like, total)
    assert gradients > 1e-2, f"gradients of peers left out show as {gradients} only"
    splitter.close()
