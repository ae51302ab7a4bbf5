"""A tiny transformer with awkward shapes, and one training loop for every arm that is compared.

Widths are odd (33, 5 rows over 4 ranks, one element over any), because sharding goes wrong in padding and empty chunks.
Both arms run the same lines below; only `fully_shard` and how microbatches are marked differ.
AdamW's eps is 1e-4: with less, attention's key biases (gradient zero but for rounding) would turn rounding into steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH, WIDTH, LAYERS = 61, 10, 33, 3

Idiom = Literal["each", "last_backward", "gradient_sync", "minibatch", "finish"]


@dataclass(frozen=True)
class Case:
    """What to train, how.

    Attributes:
        counts: microbatches by step (over again when steps outnumber it) and rank.
        idiom: how microbatches of a step are marked; "each" marks nothing: every backward ends a minibatch.
        low_precision: compute in bf16, reduce in fp32.
        frozen: the second layer, or all but the layers' narrow adapters and scales.
        skipped: layers that the first microbatch of all leaves out.
        norm: gradients are clipped to it.
    """

    counts: tuple[tuple[int, ...], ...]
    idiom: Idiom = "each"
    steps: int = 3
    layers: int = LAYERS
    low_precision: bool = False
    tied: bool = False
    frozen: Literal["", "layer", "base"] = ""
    checkpointing: Literal["", "wrapper", "function"] = ""
    compiled: bool = False
    fused: bool = False
    skipped: tuple[int, ...] = ()
    norm: float = 0.5

    def of(self, step: int) -> tuple[int, ...]:
        """Microbatches of a step by rank."""
        return self.counts[step % len(self.counts)]

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """FSDP2's."""
        return low_precision_policy() if self.low_precision else MixedPrecisionPolicy()


def reduced_exactly(case: Case) -> dict[str, MixedPrecisionPolicy]:
    """Options with which FSDP2 sums what is equal to the bit, after one rounding, to `Settings(reproducible=True)`."""
    return {"mp_policy": dataclasses.replace(case.policy, reduce_dtype=torch.float64)}


def low_precision_policy() -> MixedPrecisionPolicy:
    """bf16 compute, fp32 reduction."""
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """Attention, a feed-forward part, a narrow adapter and a one-element scale."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.wide = nn.Linear(width, 3 * width + 1)
        self.back = nn.Linear(3 * width + 1, width)
        self.down = nn.Linear(width, 5, bias=False)
        self.up = nn.Linear(5, width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        x = x + self.out(mixed) * self.scale
        x = x + self.back(F.gelu(self.wide(x)))
        return x + self.up(torch.tanh(self.down(x)))


class Tiny(nn.Module):
    """A causal language model."""

    def __init__(
        self, *, width: int = WIDTH, layers: int = LAYERS, tied: bool = False, recompute: bool = False
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, 3) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, skip: Sequence[int] = ()) -> torch.Tensor:
        h = self.embed(x)
        for i, layer in enumerate(self.layers):
            if i in skip:
                continue
            h = checkpoint(layer, h, use_reentrant=False) if self.recompute and self.training else layer(h)
        return self.head(self.norm(h))


def tokens(rank: int, step: int, microbatch: int, rows: int = 2) -> torch.Tensor:
    """int64 [rows, LENGTH], different for every rank, step and microbatch."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * microbatch + rank)
    return torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)


def next_token_loss(logits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Summed over tokens, in fp32."""
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), x[:, 1:].flatten(), reduction="sum")


def token_share(counts: Sequence[int], ranks: int, rows: int = 2) -> float:
    """Makes the average over ranks, which FSDP takes, of summed losses the mean over all tokens of the step."""
    return ranks / (max(sum(counts), 1) * rows * (LENGTH - 1))


def make(case: Case, **options: Any) -> Tiny:
    """The unsharded model, the same on every rank."""
    torch.manual_seed(0)
    recompute = case.checkpointing == "function"
    model = Tiny(layers=case.layers, tied=case.tied, recompute=recompute, **options)
    if case.frozen == "layer":
        model.layers[1].requires_grad_(False)
    if case.frozen == "base":
        model.requires_grad_(False)
        for layer in model.layers:
            for adapter in (layer.down, layer.up, layer.scale):
                adapter.requires_grad_(True)
    return model


def shard(fully_shard: Callable[..., Any], model: Tiny, case: Case, mesh: DeviceMesh | None, **options: Any) -> Any:
    """Wrap, compile and shard every block, then the root."""
    if case.checkpointing == "wrapper":
        for i, layer in enumerate(model.layers):
            model.layers[i] = checkpoint_wrapper(layer)
    options = {"mesh": mesh, "mp_policy": case.policy, **options}
    for layer in model.layers:
        if case.compiled:
            layer.compile(backend="aot_eager")
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def build(fully_shard: Callable[..., Any], case: Case, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    """The sharded model."""
    return shard(fully_shard, make(case), case, mesh, **options)


def adamw(model: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    """AdamW on all parameters, foreach unless fused."""
    kind = {"fused": True} if fused else {"foreach": True}
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4, **kind)


def mark(model: Any, idiom: Idiom, microbatches: Sequence[Callable[[], None]]) -> None:
    """Run the microbatches of one minibatch, marked as `idiom` says."""
    last = len(microbatches) - 1
    if idiom == "minibatch":
        with model.minibatch():
            for run in microbatches:
                run()
    elif idiom == "finish":
        model.set_is_last_backward(False)
        for run in microbatches:
            run()
        model.finish_minibatch()
        model.set_is_last_backward(True)
    else:
        for i, run in enumerate(microbatches):
            if idiom == "last_backward":
                model.set_is_last_backward(i == last)
            elif idiom == "gradient_sync":
                model.set_requires_gradient_sync(i == last)
            run()


@dataclass
class Run:
    """What one rank saw: losses by step and microbatch; norms by step; own shards of gradients and parameters."""

    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def own_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Own shard of every parameter's gradient, None where there is none."""
    return {
        name: None if p.grad is None else p.grad.to_local().detach().clone()  # type: ignore[attr-defined]
        for name, p in model.named_parameters()
    }


def own_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Own shard of every parameter; as in FSDP2, a state dict is what reshards the root after an evaluation."""
    return {name: p.to_local().clone() for name, p in model.state_dict().items()}


def clip(model: nn.Module, norm: float) -> float:
    """Clip gradients by their global norm, and return it. A collective, between minibatches."""
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
    return float(total.full_tensor() if hasattr(total, "full_tensor") else total)


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, case: Case, step: int, rank: int, ranks: int, run: Run, pad: bool
) -> None:
    """One optimizer step, noted in `run`."""
    counts = case.of(step)
    share, losses = token_share(counts, ranks), list[float]()

    def microbatch(i: int) -> None:
        x = tokens(rank, step, i)
        real = i < counts[rank]
        skip = case.skipped if (step, i) == (0, 0) else ()
        loss = next_token_loss(model(x, skip=skip), x) * (share if real else 0.0)
        loss.backward()
        if real:
            losses.append(loss.item())

    mine = max(counts) if pad else counts[rank]
    mark(model, "gradient_sync" if pad else case.idiom, [lambda i=i: microbatch(i) for i in range(mine)])  # type: ignore[misc]
    run.losses.append(losses)
    run.gradients.append(own_gradients(model))
    run.norms.append(clip(model, case.norm))
    optimizer.step()
    optimizer.zero_grad()


def train(
    fully_shard: Callable[..., Any],
    case: Case,
    rank: int,
    ranks: int,
    *,
    mesh: DeviceMesh | None = None,
    pad: bool = False,
    **options: Any,
) -> Run:
    """Train `case` with either `fully_shard`.

    Args:
        rank: among those that share the data; not global where a job has some ranks only.
        ranks: how many those are.
        pad: FSDP2's way with unequal counts: zero-weighted microbatches up to the most any rank has, gradients
            reduced at the last one.
        options: for `fully_shard`.
    """
    mesh = init_device_mesh("cpu", (ranks,)) if mesh is None else mesh
    model = build(fully_shard, case, mesh, **options)
    optimizer = adamw(model, fused=case.fused)
    run = Run()
    for step in range(case.steps):
        train_step(model, optimizer, case, step, rank, ranks, run, pad)
    run.parameters = own_parameters(model)
    return run
