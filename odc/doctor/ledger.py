"""What a rank of a model holds on its device: FSDP2's shards and optimizer, and beside them odc's heap.

The heap is laid out by the code that lays out a real one, `odc.protocol.regions`; nothing is allocated and no device is
needed. What comes and goes within a step is not counted: unsharded units, activations, gradients on their way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from odc.blocks import blocks_of
from odc.errors import ConfigError, OdcError, install
from odc.protocol import RankGrid, UnitSpec, accumulator_dtype
from odc.protocol.regions import DATA_ACCOUNTS, Regions
from odc.protocol.rounding import coarse_parameters
from odc.settings import Settings

if TYPE_CHECKING:
    from rich.table import Table

_ADAM = 2  # moments of a parameter, in its dtype
_COMPUTE = torch.bfloat16  # what parameters are converted to, by a mixed precision policy


@dataclass(frozen=True)
class MemoryLedger:
    """Bytes of rank 0, whose shards are never short, by purpose.

    `fsdp2` is what FSDP2 holds from step to step, with gradients and Adam's moments; `heap` what odc's heap takes on
    the device, `host` of the host's memory; `saved` what FSDP2 holds and odc does not, as it lies in the heap.
    """

    fsdp2: Mapping[str, int]
    heap: Mapping[str, int]
    host: int
    saved: int

    @property
    def added(self) -> int:
        """What odc takes more than FSDP2."""
        return sum(self.heap.values()) - self.saved

    @property
    def share(self) -> float:
        """What odc adds, as a share of what FSDP2 holds."""
        return self.added / sum(self.fsdp2.values())


def memory_ledger(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    ranks: int,
    hosts: int = 1,
    settings: Settings | None = None,
    on_device: bool = True,
) -> MemoryLedger:
    """The ledger of `model`, perhaps on the meta device, of whose `blocks` each is sharded, and at last itself.

    Args:
        ranks: of a 1-D mesh over all ranks.
        hosts: how many they run on, as many on each.
        on_device: False for ranks on the CPU.

    Raises ConfigError where the ranks do not divide into hosts.
    """
    settings = settings or Settings()
    account = regions_of(model, blocks, ranks, hosts, settings, on_device).ledger()
    heap = {name: nbytes for name, nbytes in account.items() if name in DATA_ACCOUNTS}
    shards = sum(_shard(one, ranks) * one.element_size() for one in model.parameters())
    gradients = sum(_shard(one, ranks) * one.element_size() for one in model.parameters() if one.requires_grad)
    fsdp2 = {"parameters": shards, "gradients": gradients, "moments": _ADAM * gradients}
    saved = gradients if settings.gradient_views else 0
    return MemoryLedger(fsdp2, heap, sum(account.values()) - sum(heap.values()), saved)


def regions_of(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    ranks: int,
    hosts: int,
    settings: Settings,
    on_device: bool,
) -> Regions:
    """What lies in the heap of rank 0; arguments as of `memory_ledger`."""
    if ranks < 1 or hosts < 1 or ranks % hosts:
        raise ConfigError(f"hosts: {ranks} ranks cannot be divided evenly over {hosts} hosts")
    places = tuple(rank // (ranks // hosts) for rank in range(ranks)) if hosts > 1 else ()
    grid, taken = RankGrid(tuple(range(ranks)), ranks, 0, places), set[int]()
    coarse = _coarse(model) if settings.sums_dtype == "int8" else frozenset()
    units = [_unit(i, block, ranks, settings, taken, coarse) for i, block in enumerate([*blocks, model])]
    return Regions(grid, [unit for unit in units if unit.params], settings, on_device)


def _coarse(model: nn.Module) -> frozenset[int]:
    """`id()` of the parameters whose sums may cross as int8."""
    params = list(model.parameters())
    embedded = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    flags = coarse_parameters([(one.shape, id(one) in embedded) for one in params])
    return frozenset(id(one) for one, may in zip(params, flags, strict=True) if may)


def _unit(
    index: int,
    module: nn.Module,
    shards: int,
    settings: Settings,
    taken: set[int],
    coarse: frozenset[int],
) -> UnitSpec:
    """What `module` holds beside the parameters that are `taken` by units before it; they are added to these.

    `coarse` are those whose sums cross as int8, by `id()`.
    """
    found = {name: one for name, one in module.named_parameters() if id(one) not in taken}
    taken.update(map(id, found.values()))
    frozen: Collection[str] = {name for name, one in found.items() if not one.requires_grad}
    params = [(name, _shard(one, shards), _COMPUTE) for name, one in found.items()]
    dtype, names = accumulator_dtype(settings.reproducible), {name for name, one in found.items() if id(one) in coarse}
    return UnitSpec.build(index, type(module).__name__, params, dtype, frozen, names)


def _shard(parameter: nn.Parameter, shards: int) -> int:
    """Elements of a padded shard, as FSDP2 pads it: of the first of torch's chunks."""
    return torch.chunk(parameter, shards)[0].numel()


def model_of(config: Mapping[str, Any]) -> nn.Module:
    """The causal language model of a Hugging Face config, without memory: its parameters are on the meta device.

    Raises ConfigError for a config of no such model, OdcError without transformers.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise OdcError(f"building a model from its config needs transformers: {install('train')}") from error
    known = {name: value for name, value in config.items() if name != "model_type"}
    try:
        made = AutoConfig.for_model(config.get("model_type", ""), **known)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    except Exception as error:  # of transformers' code for this config
        raise ConfigError(f"model: no causal language model can be built from this config: {error}") from error
    return model


def ledger_table(configs: Mapping[str, Mapping[str, Any]], ranks: int, hosts: int) -> Table:
    """A rich table in GB of 1e9 bytes a GPU (MB, if all models are small), with a column for each of `configs` by name:
    fp32 parameters, bf16 compute, AdamW. Raises OdcError and ConfigError as `model_of` and `memory_ledger`.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    plain, views, rounded = ledgers = list[MemoryLedger](), list[MemoryLedger](), list[MemoryLedger]()
    for config in configs.values():
        model = model_of(config)
        blocks = blocks_of(model)
        every = Settings(), Settings(gradient_views=True), Settings(sums_dtype="int8")
        for found, settings in zip(ledgers, every, strict=True):
            found.append(memory_ledger(model, blocks, ranks=ranks, hosts=hosts, settings=settings))
    unit, size = ("GB", 1e9) if max(sum(one.fsdp2.values()) for one in plain) >= 1e8 else ("MB", 1e6)
    where = "one host" if hosts == 1 else f"{hosts} hosts"
    table = Table(f"{unit} a GPU, {ranks} ranks on {where}", box=box.SIMPLE)
    for name in configs:
        table.add_column(Text(name), justify="right")

    def row(name: str, numbers: Iterable[float]) -> None:
        table.add_row(name, *(f"{number:.2f}" for number in numbers))

    row("FSDP2", [sum(one.fsdp2.values()) / size for one in plain])
    for part in plain[0].heap:
        row(part, [one.heap[part] / size for one in plain])
    row("odc adds", [one.added / size for one in plain])
    row("share of FSDP2", [one.share for one in plain])
    row("with gradient_views", [one.added / size for one in views])
    row("share of FSDP2", [one.share for one in views])
    if hosts > 1:
        row("with int8 sums", [one.added / size for one in rounded])
    return table
