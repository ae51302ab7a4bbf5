"""Minibatches with split samples on the ranks of a pool, against the same samples run whole in one process."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from odc.balance import Plan, SplitSample, quadratic
from odc.balance.slices import Slices, contiguous, zigzag
from odc.split import Splitter, attend

LAYERS, VOCABULARY = 3, 101
LONGEST = 160
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2 * LONGEST,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 20},
    "gpt2": {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "own": {},
}


class OwnModel(nn.Module):
    """Two layers of attention over learned positions; its own, but for `attend` where there is a piece."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, 16), nn.Embedding(2 * LONGEST, 16)
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor, odc_piece: Any = None) -> Tensor:
        hidden = self.embed(input_ids) + self.position(position_ids)
        for layer, project in enumerate(self.qkv):
            q, k, v = project(hidden).unflatten(-1, (6, 8)).transpose(1, 2).split(2, dim=1)
            if odc_piece is None:
                out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                out = attend(q, k, v, odc_piece, layer)
            hidden = hidden + torch.tanh(out.transpose(1, 2).flatten(2))
        return self.head(hidden)


def model_of(kind: str, dtype: torch.dtype = torch.float32, *, checkpoint: bool = False, **more: Any) -> nn.Module:
    """The same weights wherever it is called, large enough that attention matters."""
    torch.manual_seed(0)
    if kind == "own":
        model: Any = OwnModel().to(dtype)
    else:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(kind, **{**_SIZES, **KINDS.get(kind, {}), **more})
        config._experts_implementation = "eager"  # grouped matrix products take no fp64
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    for name, parameter in model.named_parameters():
        scale = parameter.ndim == 1 and not name.endswith(
            "bias"
        )  # a bias of 1 on queries and keys drowns their content
        nn.init.normal_(parameter, 1.0 if scale else 0.0, 0.15)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


@contextlib.contextmanager
def stand_in_for(name: str, model: Any) -> Iterator[list[str]]:
    """Give the model an attention of this name without what transformers would import for it: SDPA runs in its place.

    Yields the names under which it was asked for, one for each layer that ran a whole sample.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    functions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    whole, asked = functions["sdpa"], list[str]()

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        assert mask is None, "flash attention takes no mask but that of padding"
        asked.append(module.config._attn_implementation)
        return whole(module, query, key, value, mask, **options)

    before = dict(functions), dict(masks)
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, masks["flash_attention_2"])
    model.config._attn_implementation = name
    try:
        yield asked
    finally:
        for mapping, old in zip((functions, masks), before, strict=True):
            mapping.clear()
            mapping.update(old)


def tokens_of(sample: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(sample))


def slices_of(cut: str, length: int, pieces: int) -> list[Slices]:
    """`zigzag`, `contiguous`, or `uneven`: contiguous without any regard to cost."""
    if cut == "zigzag":
        return zigzag(length, pieces)
    if cut == "contiguous":
        return contiguous(length, pieces, quadratic(40, 1))
    edges = [0, *(length * (place + 1) // (2 * pieces) for place in range(pieces - 1)), length]
    return [[edge] for edge in pairwise(edges)]


@dataclass
class Minibatch:
    """Samples by length: first those that are split, as (length, ranks, cut), then whole ones, as (length, rank)."""

    splits: list[tuple[int, list[int], str]]
    whole: list[tuple[int, int]] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        return [length for length, *_ in self.splits] + [length for length, _ in self.whole]

    def plan(self, world: int) -> Plan:
        splits = [
            SplitSample(sample, ranks, slices_of(cut, length, len(ranks)), [1.0] * len(ranks))
            for sample, (length, ranks, cut) in enumerate(self.splits)
        ]
        ranks: list[list[list[int]]] = [[] for _ in range(world)]
        for sample, (_, rank) in enumerate(self.whole, len(splits)):
            ranks[rank].append([sample])
        return Plan.of(ranks, self.lengths, splits=splits)


def loss_of(model: Any, inputs: dict[str, Any], targets: Tensor) -> Tensor:
    found = model(**inputs)
    logits = (found if isinstance(found, Tensor) else found.logits)[0]
    return cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="sum")


def losses_whole(model: nn.Module, minibatch: Minibatch, samples: Sequence[int]) -> Iterator[Tensor]:
    for sample in samples:
        tokens = tokens_of(sample, minibatch.lengths[sample])
        inputs = {"input_ids": tokens[None], "position_ids": torch.arange(len(tokens))[None]}
        if hasattr(model, "config"):
            inputs["use_cache"] = False
        yield loss_of(model, inputs, torch.cat([tokens[1:], torch.tensor([-100])]))


def losses_of(
    model: nn.Module, splitter: Splitter, minibatch: Minibatch, rank: int, world: int, delay: float = 0.0
) -> Iterator[Tensor]:
    """Losses of this rank's pieces, then of its whole samples; each is to be run backward before the next."""
    plan = minibatch.plan(world)
    for piece in splitter.pieces(plan):
        time.sleep(random.random() * delay)
        yield loss_of(model, *piece.of(tokens_of(piece.sample, minibatch.lengths[piece.sample])))
    yield from losses_whole(model, minibatch, [sample for microbatch in plan.ranks[rank] for sample in microbatch])


def step_of(
    model: nn.Module, splitter: Splitter, minibatch: Minibatch, rank: int, world: int, delay: float = 0.0
) -> float:
    """Run all of this rank's part backward; the sum of its losses."""
    total = 0.0
    for loss in losses_of(model, splitter, minibatch, rank, world, delay):
        loss.backward()
        total += loss.item()
    return total


def gradient_error(model: nn.Module, like: nn.Module) -> float:
    """How far all gradients, summed over ranks, are from those of `like`, as a share of their norm."""
    found, expected = (
        torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().double() for p in one.parameters()])
        for one in (model, like)
    )
    dist.all_reduce(found)
    return float((found - expected).norm() / expected.norm())


def add_whole(like: nn.Module, minibatch: Minibatch) -> None:
    """Run all samples of the minibatch forward and backward, whole."""
    for loss in losses_whole(like, minibatch, range(len(minibatch.lengths))):
        loss.backward()


def apart(model: nn.Module, minibatch: Minibatch, like: nn.Module, loss: float) -> tuple[float, float]:
    """How far gradients (the worst, by norm) and loss, summed over ranks, are from those of `like` run whole."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    flat = torch.cat([grad.flatten().double() for grad in grads] + [torch.tensor([loss], dtype=torch.float64)])
    dist.all_reduce(flat)
    like.zero_grad()
    expected = 0.0
    for one in losses_whole(like, minibatch, range(len(minibatch.lengths))):
        one.backward()
        expected += one.item()
    worst = 0.0
    for found, parameter in zip(flat[:-1].split([grad.numel() for grad in grads]), like.parameters(), strict=True):
        assert parameter.grad is not None
        grad = parameter.grad.flatten().double()
        worst = max(worst, float((found - grad).norm() / grad.norm().clamp_min(1e-20)))
    return worst, abs(float(flat[-1]) / expected - 1)
