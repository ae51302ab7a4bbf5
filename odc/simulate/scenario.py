"""What to simulate, in one frozen object: data, model, machine, arms.

Fields have the same names in Python, in YAML and as command-line options. What has no field here goes through
`odc.simulate.simulate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import numpy as np

from odc.arms import arm_named
from odc.balance import Cost, cost_from_config
from odc.balance.inputs import MOST_TOKENS
from odc.balance.lb_split import floor_of
from odc.errors import ConfigError, install
from odc.simulate.catalog import config_named, kv_width, machine_named, parameter_counts, sizes_of_model
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
        for name, kind in get_type_hints(Scenario).items():
            _require(name, getattr(self, name), kind)
        if self.sigma is not None and not 0 < self.sigma <= _WIDEST:
            raise ConfigError(f"sigma must be above 0 and at most {_WIDEST:g}, not {self.sigma!r}")
        if not 1 <= self.packing_ratio < math.inf:
            raise ConfigError(
                f"packing_ratio must be 1 or more (the longest sample has to fit), not {self.packing_ratio}"
            )
        if not 0 < self.efficiency <= 1:
            raise ConfigError(f"efficiency is a share of peak FLOPs, above 0 and at most 1, not {self.efficiency!r}")
        if self.link_gbit is not None and (not 0 < self.link_gbit < math.inf or self.inter_bandwidth is not None):
            raise ConfigError(f"link_gbit must be above 0, and without inter_bandwidth, not {self.link_gbit!r}")
        object.__setattr__(self, "arms", _names(self.arms))
        object.__setattr__(self, "slow", _factors(self.slow))
        for name in self.arms:
            arm_named(name)
        self.cluster()

    def node_of(self, ranks: int) -> int:
        """Devices of one node, where there are so many in all."""
        own = machine_named(self.machine).ranks_per_node
        return min(ranks, own if self.ranks_per_node is None else self.ranks_per_node)

    def cluster(self) -> Cluster:
        machine, node = machine_named(self.machine), self.node_of(self.ranks)
        far = self.inter_bandwidth if self.link_gbit is None else self.link_gbit * 1e9 / 8 / node  # of one rank
        return Cluster(
            self.ranks,
            node,
            intra_bandwidth=machine.intra_bandwidth if self.intra_bandwidth is None else self.intra_bandwidth,
            inter_bandwidth=machine.inter_bandwidth if far is None else far,
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
        count = sizes_of_model(config).layers
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
        longest = min(self.max_length or source.longest, MOST_TOKENS)
        generator = np.random.default_rng(self.seed)
        count = self.samples_per_rank * self.ranks
        drawn = [source.draw(count, generator, longest).tolist() for _ in range(self.minibatches)]
        return drawn, int(min(longest * self.packing_ratio, float(MOST_TOKENS)))

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
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a mapping of names to values")
    known = {one.name for one in fields(Scenario)}
    unknown = [str(key) for key in found if key not in known]
    if unknown:
        raise ConfigError(f"{path}: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return {name: _typed(name, value, f"{path}: {name}") for name, value in found.items()}


_WIDEST = 5.0  # sigma up to which floats hold the mean of every named distribution
_SLOW = "RANK:FACTOR, several with commas"
_LEAST = {"samples_per_rank": 1, "minibatches": 1, "ranks": 1, "ranks_per_node": 1, "max_length": 16}
_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    int: ((Integral,), "a whole number"),
    float: ((Real,), "a number"),
    bool: ((bool,), "true or false"),
    str: ((str,), "a text"),
}


def _typed(name: str, value: Any, where: str) -> Any:
    """A value of a YAML file as the field's type: YAML has texts for 300e9, and for lists written as on a command line.

    Raises ConfigError.
    """
    if not isinstance(value, str):
        return value
    kind = str(next(one.type for one in fields(Scenario) if one.name == name))
    try:
        if name == "arms":
            return [arm.strip() for arm in value.split(",")]
        if name == "slow":
            return dict(one.split(":") for one in value.split(","))
        if kind.startswith("int"):
            return int(value)
        return float(value) if kind.startswith("float") else value
    except ValueError as error:
        raise ConfigError(f"{where} must be {_SLOW if name == 'slow' else 'a number'}, not {value!r}") from error


def _require(name: str, value: Any, hint: Any) -> None:
    """Raises ConfigError where `value` is not of the type that `hint` has for a field, or a whole number too small."""
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if options[0] not in _KINDS or (value is None and type(None) in options):
        return
    types, words = _KINDS[options[0]]
    least = _LEAST.get(name, 0)
    fits = isinstance(value, types) and (bool in types or not isinstance(value, bool))
    if not fits:
        raise ConfigError(f"{name} must be {words}, not {value!r}")
    if options[0] is int and value < least:
        raise ConfigError(f"{name} must be {words}, {least} or more, not {value!r}")


def _names(arms: Any) -> tuple[str, ...]:
    if not isinstance(arms, (list, tuple)) or not arms or not all(isinstance(arm, str) for arm in arms):
        raise ConfigError(f"arms: name at least one, with commas, not {arms!r}")
    if len(set(arms)) < len(arms):
        raise ConfigError(f"arms must be different arms, not {', '.join(arms)}")
    return tuple(arms)


def _factors(slow: Any) -> dict[int, float]:
    try:
        return {int(rank): float(factor) for rank, factor in slow.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"slow must be {_SLOW}, not {slow!r}") from error
