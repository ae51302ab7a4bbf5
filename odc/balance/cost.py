"""Cost models: what one sample of a given length costs to train on, forward and backward.

Chose small callables on a length that add up over the samples of a microbatch, because attention is computed per
document: a microbatch costs the sum of its documents, not a function of its total. The price is that effects of the
whole microbatch (kernel launches, low use of the device on short ones) are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from odc.errors import PlanError

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
        """The cost of one sample of `length` tokens."""
        return self.a * length + self.b * length * length


def quadratic(a: float, b: float) -> QuadraticCost:
    """The cost `a * l + b * l * l`; both coefficients >= 0 and not both zero, or PlanError."""
    if not (a >= 0 and b >= 0 and a + b > 0):
        raise PlanError(f"quadratic cost needs a >= 0 and b >= 0, not both zero; got a={a!r}, b={b!r}")
    return QuadraticCost(float(a), float(b))


def transformer_cost(
    hidden: int,
    layers: int,
    intermediate: int,
    vocab: int,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    gated: bool = True,
    checkpointing: bool = False,
) -> QuadraticCost:
    """FLOPs to train a dense decoder-only transformer on one document: causal attention inside the document.

    Args:
        hidden, layers, intermediate, vocab: sizes of the model, as in its config.
        heads: attention heads, only needed for grouped-query attention and unusual head sizes.
        kv_heads: key and value heads; as many as `heads` unless given.
        head_dim: size of one head; hidden / heads unless given.
        gated: three MLP matrices (SwiGLU) instead of two.
        checkpointing: layers run forward a second time in backward.

    Returns the quadratic cost in FLOPs (multiply and add count as two). Backward counts as twice the forward. The head
    is counted, embedding lookup, norms, rotary embedding and softmax are not. Raises PlanError for sizes below 1.
    """
    heads = heads if heads is not None else 1
    sizes = {"hidden": hidden, "layers": layers, "intermediate": intermediate, "vocab": vocab, "heads": heads}
    for name, size in sizes.items():
        if size < 1:
            raise PlanError(f"transformer_cost needs {name} >= 1, got {size!r}")
    kv_heads = kv_heads if kv_heads is not None else heads
    head_dim = head_dim if head_dim is not None else hidden // heads
    query_width, kv_width = heads * head_dim, kv_heads * head_dim
    projections = hidden * (2 * query_width + 2 * kv_width) + (3 if gated else 2) * hidden * intermediate
    # Scores and their product with the values: 2 matmuls of 2 * l^2 * width FLOPs, half of it masked away.
    attention = 2 * query_width
    block_passes = 4 if checkpointing else 3
    return QuadraticCost(
        a=float(block_passes * layers * 2 * projections + 3 * 2 * hidden * vocab),
        b=float(block_passes * layers * attention),
    )


def cost_from_config(config: Mapping[str, Any], *, checkpointing: bool = False) -> QuadraticCost:
    """`transformer_cost` of a Hugging Face config (its dict or parsed config.json): dense decoder-only models.

    Raises PlanError naming the missing key, or refusing a mixture of experts.
    """
    if config.get("num_experts") or config.get("num_local_experts"):
        raise PlanError("cost_from_config knows dense models only; this config has experts")
    try:
        return transformer_cost(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            heads=config["num_attention_heads"],
            kv_heads=config.get("num_key_value_heads"),
            head_dim=config.get("head_dim"),
            checkpointing=checkpointing,
        )
    except KeyError as error:
        raise PlanError(f"the model's config has no {error.args[0]!r}, which the cost model needs") from error
