"""What to simulate, in one frozen object: data, model, machine, arms.

Fields have the same names in Python, in YAML and as command-line options. What has no field here goes through
`odc.simulate.simulate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from odc.arms import arm_named
from odc.balance import Cost, cost_from_config
from odc.balance.lb_split import floor_of
from odc.errors import ConfigError, install
from odc.simulate.catalog import config_named, kv_width, machine_named, parameter_counts
from odc.simulate.cluster import Algorithm, Cluster
from odc.simulate.lengths import Lognormal, lengths_named
from odc.simulate.workload import Model, even_model

#: Simulated by default; the first is the base.
_ARMS = (
    "fsdp2",
    "fsdp2-localsort",
    "fsdp2-equal-samples",
    "fsdp2-padded",
    "fsdp2-resident",
    "odc-localsort",
    "odc-equal-samples",
    "odc-equal",
    "odc",
    "odc-dynamic",
)


def _data(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text, "panel": "Data and model"})


def _device(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text, "panel": "Machine"})


@dataclass(frozen=True)
class Scenario:
    """Minibatches of one kind under several arms. The fields are described by their help text."""

    lengths: str = _data("longalign", "longalign, swe-smith, swe-smith-32k, aime, grpo, or a file or datasets folder.")
    sigma: float | None = _data(None, "Width of a named distribution, in place of its own.")
    max_length: int | None = _data(None, "Cut samples at so many tokens. (default: the distribution's longest)")
    packing_ratio: float = _data(1.0, "Tokens that fit into a microbatch, over the longest sample.")
    samples_per_rank: int = _data(4, "Samples of a rank in a minibatch, on average.")
    minibatches: int = _data(20, "Minibatches that are drawn and simulated.")
    model: str = _data("qwen2.5-1.5b", "qwen2.5-1.5b, -7b, -14b, -32b, or a Hugging Face config.")
    checkpointing: bool = _data(True, "Recompute activations in backward.")
    machine: str = _device("a100-roce", "a100-roce, a100, a100-free, h100 or mi300x.")
    ranks: int = _device(8, "Devices.")
    ranks_per_node: int | None = _device(None, "Devices of one node. (default: the machine's)")
    efficiency: float = _device(0.4, "Share of the machine's peak FLOPs that compute reaches.")
    intra_bandwidth: float | None = _device(None, "Bytes/s of one rank within a node. (default: the machine's)")
    inter_bandwidth: float | None = _device(None, "Bytes/s of one rank to other nodes. (default: the machine's)")
    link_gbit: float | None = _device(None, "Gbit/s of a node's link to others, in place of --inter-bandwidth.")
    link_ms: float | None = _device(None, "Milliseconds one way between nodes. (default: the machine's)")
    node_cache: bool = _device(False, "On demand, each shard and each sum of gradients crosses nodes once a minibatch.")
    changed: float = _device(1.0, "With --node-cache, share of the parameters' bytes that crosses nodes.")
    collective: Algorithm = field(default="ring", metadata={"help": "ring, tree or gloo.", "panel": "Machine"})
    prefetch: int = _device(1, "Units fetched or gathered ahead, 0 or 1.")
    owner_skew: float = _device(1.0, "Fullest owner's share over the mean.")
    jitter: float = _device(0.0, "Sigma of compute noise.")
    slow: Mapping[int, float] = field(default_factory=dict)  # compute time by rank, as a multiple of the others'
    arms: tuple[str, ...] = field(
        default=_ARMS,
        metadata={
            "help": "Which, with commas; the first is the base of speed-ups. (default: all but hybrid and split)"
        },
    )
    seed: int = _data(0, "Seeds lengths and jitter.")

    def __post_init__(self) -> None:
        for name in ("samples_per_rank", "minibatches", "ranks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a whole number, 1 or more, not {value!r}")
        if self.max_length is not None and self.max_length < 16:
            raise ConfigError(f"max_length must be 16 tokens or more, not {self.max_length!r}")
        if self.sigma is not None and not 0 < self.sigma < math.inf:
            raise ConfigError(f"sigma must be above 0, not {self.sigma!r}")
        if not 1 <= self.packing_ratio < math.inf:
            raise ConfigError(
                f"packing_ratio must be 1 or more (the longest sample has to fit), not {self.packing_ratio}"
            )
        if not 0 < self.efficiency <= 1:
            raise ConfigError(f"efficiency is a share of peak FLOPs, above 0 and at most 1, not {self.efficiency!r}")
        if self.link_gbit is not None and (not 0 < self.link_gbit < math.inf or self.inter_bandwidth is not None):
            raise ConfigError(f"link_gbit must be above 0, and without inter_bandwidth, not {self.link_gbit!r}")
        if self.collective not in get_args(Algorithm):
            raise ConfigError(f"collective must be one of {', '.join(get_args(Algorithm))}, not {self.collective!r}")
        if not self.arms:
            raise ConfigError("arms: name at least one")
        object.__setattr__(self, "arms", tuple(self.arms))
        object.__setattr__(self, "slow", {int(rank): float(factor) for rank, factor in self.slow.items()})
        for name in self.arms:
            arm_named(name)
        self.cluster()

    def cluster(self) -> Cluster:
        machine = machine_named(self.machine)
        node = min(self.ranks, self.ranks_per_node or machine.ranks_per_node)
        link = None if self.link_gbit is None else self.link_gbit * 1e9 / 8 / node  # of one rank
        return Cluster(
            self.ranks,
            node,
            intra_bandwidth=self.intra_bandwidth or machine.intra_bandwidth,
            inter_bandwidth=link or self.inter_bandwidth or machine.inter_bandwidth,
            intra_latency=machine.intra_latency,
            inter_latency=machine.inter_latency if self.link_ms is None else self.link_ms / 1000,
            call_seconds=machine.call_seconds,
            collective=self.collective,
            node_cache=self.node_cache,
            changed=self.changed,
            owner_skew=self.owner_skew,
            slow=self.slow,
            jitter=self.jitter,
        )

    def units(self) -> Model:
        """The model's layers and root, 2 bytes a parameter and a gradient, 4 of a summed gradient."""
        config = config_named(self.model)
        layers, root = parameter_counts(config)
        count = int(config.get("text_config", config)["num_hidden_layers"])
        model = even_model(count, 2 * layers, root_bytes=2 * root, checkpointing=self.checkpointing)
        return replace(model, accumulator=2.0)

    def cost(self) -> Cost:
        """FLOPs of one sample, forward and backward."""
        return cost_from_config(config_named(self.model), checkpointing=self.checkpointing)

    def seconds_per_flop(self) -> float:
        """At the machine's peak and the assumed efficiency."""
        return 1.0 / (machine_named(self.machine).flops * self.efficiency)

    def piece_floor(self) -> int:
        """Tokens of the shortest piece: below them its layers' parameters take longer to fetch than to compute with."""
        nbytes = 2.0**30
        seconds = self.cluster().transfer_seconds(nbytes, self.ranks)
        return floor_of(1.0 / self.seconds_per_flop(), nbytes / seconds if seconds else math.inf)

    def kv_bytes(self) -> float:
        """Bytes of one token's keys and values in one layer, 2 bytes a number."""
        return 2.0 * kv_width(config_named(self.model))

    def draw(self) -> tuple[list[list[int]], int]:
        """Lengths of every minibatch, and the tokens that fit into a microbatch."""
        source = lengths_named(self.lengths)
        if self.sigma is not None:
            if not isinstance(source, Lognormal):
                raise ConfigError(f"sigma is the width of a named distribution; {self.lengths} is none")
            source = replace(source, sigma=self.sigma)
        longest = self.max_length or source.longest
        generator = np.random.default_rng(self.seed)
        count = self.samples_per_rank * self.ranks
        drawn = [source.draw(count, generator, longest).tolist() for _ in range(self.minibatches)]
        return drawn, int(longest * self.packing_ratio)

    def with_(self, **changes: Any) -> Scenario:
        """A checked copy with some fields changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return asdict(self) | {"arms": list(self.arms), "slow": {str(rank): f for rank, f in self.slow.items()}}


def scenario_from_yaml(path: str | Path) -> dict[str, Any]:
    """Fields of a scenario from a YAML mapping; raises ConfigError naming an unknown key or a missing library."""
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(f"reading YAML needs pyyaml: {install('simulate')}") from error
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a mapping of names to values")
    known = {one.name for one in fields(Scenario)}
    unknown = [str(key) for key in found if key not in known]
    if unknown:
        raise ConfigError(f"{path}: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return dict(found)
