"""Cost models: what one sample of a given length costs to train on, forward and backward.

A microbatch costs the sum over its samples, because attention is computed per document. `transformer_cost` counts
matrix products only (a multiply-add is two FLOPs, backward is twice the forward).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        return self.a * length + self.b * length * length


def quadratic(a: float, b: float) -> QuadraticCost:
    """The cost `a * l + b * l * l`; both coefficients >= 0 and not both zero, or PlanError."""
    if not (a >= 0 and b >= 0 and a + b > 0):
        raise PlanError(f"quadratic cost needs a >= 0 and b >= 0, not both zero; got a={a!r}, b={b!r}")
    return QuadraticCost(float(a), float(b))


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


# Models whose MLP has two matrices although their config names the sizes like the gated ones.
_TWO_MATRICES = frozenset({"gpt_neox", "phi", "starcoder2", "nemotron", "opt", "gptj", "stablelm_alpha"})


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
    windows: Sequence[int] = (),
    sparse_layers: int = 0,
    experts: int = 0,
    top_k: int = 0,
    expert_intermediate: int = 0,
    shared_intermediate: int = 0,
) -> QuadraticCost | WindowedCost:
    """FLOPs to train a decoder-only transformer on one document: causal attention inside the document.

    Args:
        heads, kv_heads, head_dim: only needed for grouped-query attention and unusual head sizes.
        gated: three MLP matrices (SwiGLU) instead of two, in experts too.
        checkpointing: layers run forward a second time in backward.
        windows: for each layer with sliding-window attention the tokens that a token sees, itself included.
        sparse_layers: layers with experts in place of the MLP.
        experts, top_k: of such a layer, experts there are and experts a token goes to. The router is counted.
        expert_intermediate, shared_intermediate: width of one expert, and of what every token passes beside them.

    Raises PlanError where a size is below 1, or more layers are windowed or sparse than there are.
    """
    heads = heads if heads is not None else 1
    sizes = {"hidden": hidden, "layers": layers, "intermediate": intermediate, "vocab": vocab, "heads": heads}
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
    sizes: Mapping[str, int], windows: Sequence[int], layers: int, sparse_layers: int, top_k: int, experts: int
) -> None:
    for name, size in [*sizes.items(), *(("windows", window) for window in windows)]:
        if size < 1:
            raise PlanError(f"transformer_cost needs {name} >= 1, got {size!r}")
    if len(windows) > layers or not 0 <= sparse_layers <= layers or top_k > experts:
        raise PlanError(
            f"{len(windows)} windowed and {sparse_layers} sparse layers of {layers}, {top_k} of {experts} experts"
        )


def cost_from_config(config: Mapping[str, Any], *, checkpointing: bool = False) -> QuadraticCost | WindowedCost:
    """`transformer_cost` of a Hugging Face config (its dict or parsed config.json): decoder-only language models.

    Understands grouped-query attention, sliding windows (`layer_types`, `sliding_window_pattern`, `max_window_layers`)
    and experts (the names of Mixtral, Qwen and DeepSeek configs). Of a multimodal config, its `text_config`.

    Raises PlanError naming a missing key, and for attention that is none of these (latent, linear, chunked).
    """
    if "hidden_size" not in config and isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    if config.get("kv_lora_rank"):
        raise PlanError("cost_from_config does not know latent attention (kv_lora_rank); use transformer_cost or a fit")
    try:
        layers = config["num_hidden_layers"]
        return transformer_cost(
            hidden=config["hidden_size"],
            layers=layers,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            heads=config["num_attention_heads"],
            kv_heads=config.get("num_key_value_heads"),
            head_dim=config.get("head_dim"),
            gated=config.get("model_type") not in _TWO_MATRICES,
            checkpointing=checkpointing,
            windows=_windows(config, layers),
            **_experts(config, layers),
        )
    except KeyError as error:
        raise PlanError(f"the model's config has no {error.args[0]!r}, which the cost model needs") from error


def _windows(config: Mapping[str, Any], layers: int) -> list[int]:
    """The window of every layer that has one."""
    kinds = config.get("layer_types")
    if kinds is not None:
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown:
            raise PlanError(f"cost_from_config does not know layers of type {', '.join(sorted(unknown))}")
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return []
    if kinds is not None:
        count = list(kinds).count("sliding_attention")
    elif config.get("sliding_window_pattern"):
        count = layers - layers // int(config["sliding_window_pattern"])  # every so many-th sees all
    else:
        count = layers - int(config.get("max_window_layers", 0)) if config.get("use_sliding_window") else layers
    return [int(window)] * max(0, count)


def _experts(config: Mapping[str, Any], layers: int) -> dict[str, int]:
    """Arguments of `transformer_cost` for a mixture of experts; none for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(config[name]) for name in names if config.get(name)), 0)
    if not experts:
        return {}
    width = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = int(config.get("shared_expert_intermediate_size") or 0)
    shared += int(config.get("n_shared_experts") or 0) * width
    every, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
    first = int(config.get("first_k_dense_replace") or 0)
    sparse = [i for i in range(first, layers) if i not in dense and (i + 1) % every == 0]
    return {
        "sparse_layers": len(sparse),
        "experts": experts,
        "top_k": int(config["num_experts_per_tok"]),
        "expert_intermediate": width,
        "shared_intermediate": shared,
    }
