"""Cost models: what one sample of a given length costs to train on, forward and backward.

A microbatch costs the sum over its samples, because attention is computed per document. `transformer_cost` counts
matrix products only (a multiply-add is two FLOPs, backward is twice the forward).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from odc.balance.model_sizes import sizes_of
from odc.errors import PlanError

_log = logging.getLogger(__name__)

Cost = Callable[[int], float]


def linear_cost(length: int) -> float:
    """One unit per token."""
    return float(length)


@dataclass(frozen=True)
class QuadraticCost:
    """`a * length + b * length**2`, in whatever unit a and b have."""

    a: float
    b: float

    def __call__(self, length: int) -> float:
        return self.a * length + self.b * length * length


def quadratic(a: float, b: float) -> QuadraticCost:
    """The cost `a * l + b * l * l`; both coefficients >= 0 and not both zero, or PlanError."""
    if not (a >= 0 and b >= 0 and a + b > 0):
        raise PlanError(f"quadratic cost needs a >= 0 and b >= 0, not both zero; got a={a!r}, b={b!r}")
    return QuadraticCost(float(a), float(b))


#: verl's weight of a sample of l tokens: attention and matrices of width 4096, in units of 6 * 4096 FLOPs.
VERL_WORKLOAD: Cost = quadratic(24576, 1)


@dataclass(frozen=True)
class WindowedCost:
    """`a * length + b * length**2`, plus layers whose attention sees only the last tokens."""

    a: float
    b: float  # of the layers that see the whole document
    windows: tuple[tuple[int, float], ...]  # for each window size: (tokens seen, b of the layers that see so many)

    def __call__(self, length: int) -> float:
        seen = self.b * length * length
        for window, b in self.windows:
            # Of the l^2 / 2 pairs of a causal document, those further apart than the window are never computed.
            seen += b * (length * length - max(0, length - window) ** 2)
        return self.a * length + seen


def transformer_cost(
    hidden: int,
    layers: int,
    intermediate: float,
    vocab: int,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    gated: bool = True,
    checkpointing: bool = False,
    windows: Sequence[int] = (),
    sparse_layers: int = 0,
    experts: int = 0,
    top_k: int = 0,
    expert_intermediate: float = 0,
    shared_intermediate: float = 0,
) -> QuadraticCost | WindowedCost:
    """FLOPs to train a decoder-only transformer on one document: causal attention inside the document.

    Args:
        intermediate: width of an MLP, the mean where layers differ.
        heads, kv_heads, head_dim: only needed for grouped-query attention and unusual head sizes.
        gated: three MLP matrices (SwiGLU) instead of two, in experts too.
        checkpointing: layers run forward a second time in backward.
        windows: for each layer with sliding-window attention the tokens that a token sees, itself included.
        sparse_layers: layers with experts in place of the MLP.
        experts, top_k: of such a layer, experts there are and experts a token goes to. The router is counted.
        expert_intermediate, shared_intermediate: width of one expert, and of what every token passes beside them.

    Raises PlanError where a size is no number or below 1, or more layers are windowed or sparse than there are.
    """
    heads = heads if heads is not None else 1
    sizes: dict[str, float] = {
        "hidden": hidden,
        "layers": layers,
        "intermediate": intermediate,
        "vocab": vocab,
        "heads": heads,
    }
    sizes |= {name: size for name, size in (("kv_heads", kv_heads), ("head_dim", head_dim)) if size is not None}
    if sparse_layers:
        sizes |= {"experts": experts, "top_k": top_k, "expert_intermediate": expert_intermediate}
    _check(sizes, windows, layers, sparse_layers, top_k, experts)
    kv_heads = kv_heads if kv_heads is not None else heads
    head_dim = head_dim if head_dim is not None else hidden // heads
    matrices, passes = 3 if gated else 2, 4 if checkpointing else 3
    projections = layers * hidden * head_dim * 2 * (heads + kv_heads)
    routed = hidden * experts + matrices * hidden * (top_k * expert_intermediate + shared_intermediate)
    mlps = (layers - sparse_layers) * matrices * hidden * intermediate + sparse_layers * routed
    a = float(passes * 2 * (projections + mlps) + 3 * 2 * hidden * vocab)
    # Scores and their product with the values: 2 matmuls of 2 * l^2 * width FLOPs, half of it masked away.
    attention = float(passes * 2 * heads * head_dim)
    counted = tuple((window, attention * list(windows).count(window)) for window in sorted(set(windows)))
    b = attention * (layers - len(windows))
    return WindowedCost(a, b, counted) if counted else QuadraticCost(a, b)


def _check(
    sizes: Mapping[str, float], windows: Sequence[int], layers: int, sparse_layers: int, top_k: int, experts: int
) -> None:
    for name, size in [*sizes.items(), *(("windows", window) for window in windows)]:
        if not isinstance(size, (int, float)) or not size >= 1:
            raise PlanError(f"transformer_cost needs {name} >= 1, got {size!r}")
    if len(windows) > layers or not 0 <= sparse_layers <= layers or top_k > experts:
        raise PlanError(
            f"{len(windows)} windowed and {sparse_layers} sparse layers of {layers}, {top_k} of {experts} experts"
        )


def cost_from_config(config: Mapping[str, Any], *, checkpointing: bool = False) -> QuadraticCost | WindowedCost:
    """`transformer_cost` of a Hugging Face config (its dict or parsed config.json): decoder-only language models.

    Understands grouped-query attention, sliding windows (`layer_types`, `sliding_window_pattern`, `max_window_layers`,
    and what a `model_type` such as Gemma 2's implies where none is given) and experts (the names of Mixtral, Qwen,
    DeepSeek and Ernie configs), and the names of GPT-2 and OPT. Of a multimodal config, its `text_config`.

    Raises PlanError naming a key that is missing or no number, and for layers that are none of these (latent, linear or
    chunked attention, state spaces, recurrence).
    """
    return transformer_cost(**vars(sizes_of(config)), checkpointing=checkpointing)


def cost_of(
    config: Mapping[str, Any],
    *,
    checkpointing: bool = False,
    otherwise: Cost = linear_cost,
    warn: Callable[[str], None] = _log.warning,
) -> Cost:
    """`cost_from_config`, or `otherwise`, with one line of warning, for a model whose FLOPs it cannot count."""
    try:
        return cost_from_config(config, checkpointing=checkpointing)
    except PlanError as error:
        by = "tokens alone" if otherwise is linear_cost else "another formula"
        warn(f"samples are balanced by {by}, not by FLOPs: {error}")
        return otherwise
