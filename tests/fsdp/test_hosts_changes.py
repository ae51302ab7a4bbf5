"""`Settings(changes="on")` over hosts: whatever is done to a model, the bits are FSDP2's, and shards cross as changes.

Both arms add gradients up in fp64 and round each sum once, so no order of additions matters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.compare import differences
from support.host_ranks import HostPools
from support.models import Case, build, make, mark, next_token_loss, own_gradients, own_parameters, tokens
from support.programs import Result, backward
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import odc
from odc import Settings, fully_shard
from odc.errors import AbandonedMinibatchError
from odc.fsdp import root_of
from odc.hosts.changes import ShardReads
from odc.protocol import HeapLayout, Word
from odc.protocol.words import VersionWord

ON = Settings(timeout_s=60.0, changes="on", reproducible=True, check_protocol=True)
LR = 1e-4  # moves a fifth of the bf16 weights by one unit in the last place: all changes fit in their region
COUNTS = ((1, 3, 2, 1), (2, 1, 1, 3))  # microbatches by step and by rank, modulo four
BF16 = Case(counts=COUNTS, low_precision=True)


class Arm:
    """Makes models on the ranks of all hosts, by odc or by FSDP2, and keeps them. `folder` is for its checkpoints."""

    def __init__(self, row: Row, ours: bool, rank: int, world: int, hosts: int, folder: Path) -> None:
        self.ours, self.rank, self.world, self.folder, self.case = ours, rank, world, folder, row.case
        self.models: list[Any] = []
        replicated = row.sharding == "hybrid" or (ours and row.sharding == "world")
        shape, names = ((hosts, world // hosts), ("hosts", "ranks")) if replicated else ((world,), ("ranks",))
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        optimizer = "world" if row.sharding == "world" else "mesh"
        odc_shard = functools.partial(fully_shard, settings=row.settings, optimizer_sharding=optimizer)  # type: ignore[arg-type]
        self.shard: Callable[..., Any] = odc_shard if ours else _reducing_in_fp64

    def new(self) -> tuple[Any, torch.optim.Optimizer]:
        return self.keep(build(self.shard, self.case, self.mesh))

    def keep(self, model: Any, lr: float = LR) -> tuple[Any, torch.optim.Optimizer]:
        self.models.append(model)
        return model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, eps=1e-4)

    def step(self, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Result:
        """A minibatch, and a step of the optimizer. FSDP2 pads it to as many microbatches as any rank has."""
        counts, losses = self.case.of(number), list[torch.Tensor]()

        def microbatch(i: int) -> None:
            x = tokens(self.rank, number, i)
            real = i < counts[self.rank % 4]
            loss = next_token_loss(model(x), x) * (real / 18)
            loss.backward()
            losses.extend([loss.detach()] * real)

        many, idiom = (counts[self.rank % 4], "minibatch") if self.ours else (max(counts), "gradient_sync")
        mark(model, idiom, [functools.partial(microbatch, i) for i in range(many)])  # type: ignore[arg-type]
        gradients = own_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        seen = {f"loss {i}": loss for i, loss in enumerate(losses)} | gradients
        return {f"step {number}: {name}": value for name, value in seen.items()}

    def output(self, model: Any, number: int) -> Result:
        """Of an evaluation."""
        with torch.no_grad():
            return {f"output {number}": model(tokens(self.rank, 50, number)).clone()}

    def publish(self, model: Any) -> None:
        if self.ours:
            model.publish()


def _reducing_in_fp64(module: Any, mp_policy: MixedPrecisionPolicy, **options: Any) -> Any:
    return torch_fully_shard(module, mp_policy=dataclasses.replace(mp_policy, reduce_dtype=torch.float64), **options)


# what is done to a model; each ends with a step, after which no rank reads --------------------------------------------


def four_steps(arm: Arm, model: Any, optimizer: torch.optim.Optimizer) -> Result:
    seen: Result = {}
    for number in range(4):
        seen |= arm.step(model, optimizer, number)
    return {**seen, **own_parameters(model)}


def trained(arm: Arm) -> Result:
    return four_steps(arm, *arm.new())


def evaluated(arm: Arm) -> Result:
    """First, twice, and published anew in between, though nothing has changed."""
    model, optimizer = arm.new()
    seen: Result = {}
    for number in range(4):
        seen |= arm.output(model, 2 * number)
        if number == 2:
            arm.publish(model)
        seen |= arm.output(model, 2 * number + 1)
        seen |= arm.step(model, optimizer, number)
    return {**seen, **own_parameters(model)}


def several_roots(arm: Arm) -> Result:
    made = [arm.new() for _ in range(2)]
    seen: Result = {}
    for number in range(4):
        with odc.minibatch(*arm.models) if arm.ours else contextlib.nullcontext():
            for i, (model, _) in enumerate(made):
                seen[f"{number}.{i} loss"] = backward(model, arm.rank, number, i)
        for i, (model, optimizer) in enumerate(made):
            seen |= {f"{number}.{i} {name}": value for name, value in own_gradients(model).items()}
            optimizer.step()
            optimizer.zero_grad()
    return seen | {f"{i} {name}": p for i, (model, _) in enumerate(made) for name, p in own_parameters(model).items()}


def averaged(arm: Arm) -> Result:
    """A moving average of the weights takes their place for an evaluation after each step."""
    model, optimizer = arm.new()
    average = {name: p.to_local().detach().clone() for name, p in model.named_parameters()}
    seen: Result = {}
    for number in range(4):
        seen |= arm.step(model, optimizer, number)
        live = {name: p.to_local().detach().clone() for name, p in model.named_parameters()}
        for values in (average, live):
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.to_local().copy_(average[name].lerp_(live[name], 0.5) if values is average else live[name])
            arm.publish(model)
            seen |= arm.output(model, 2 * number + (values is live))
            model.reshard()
    return {**seen, **arm.step(model, optimizer, 4), **own_parameters(model)}


def pruned(arm: Arm) -> Result:
    """From the second step on, small weights are zeros."""
    model, optimizer = arm.new()
    seen: Result = {}
    for number in range(4):
        seen |= arm.step(model, optimizer, number)
        if number == 1:
            kept = {name: p.to_local().abs() > 0.05 for name, p in model.named_parameters() if p.dim() > 1}
        if number >= 1:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if name in kept:
                        p.to_local().mul_(kept[name])
    return {**seen, **arm.step(model, optimizer, 4), **own_parameters(model)}


def loaded(arm: Arm) -> Result:
    """A checkpoint of two steps before comes into the same objects while an evaluation is open."""
    model, optimizer = arm.new()
    seen: Result = {}
    for number in range(5):
        if number == 4:
            seen |= arm.output(model, number)
        if number in (2, 4):
            weights, states = get_state_dict(model, optimizer)
        if number == 2:
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=arm.folder)
        if number == 4:
            dcp.load({"model": weights, "optimizer": states}, checkpoint_id=arm.folder)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        seen |= arm.step(model, optimizer, number)
    return {**seen, **own_parameters(model)}


def abandoned(arm: Arm) -> Result:
    """The last rank gives up one minibatch, and two that follow each other; FSDP2 never begins them."""
    model, optimizer = arm.new()
    seen: Result = {}
    for number in range(4):
        for _ in range(number % 3 if arm.ours else 0):
            with pytest.raises(AbandonedMinibatchError, match="a sample cannot be read"):
                _give_up(model, arm.rank, arm.world)
        seen |= arm.step(model, optimizer, number)
    return {**seen, **own_parameters(model)}


def _give_up(model: Any, rank: int, world: int) -> None:
    with model.minibatch():
        backward(model, rank, 50)
        if rank == world - 1:
            model.abandon_minibatch("a sample cannot be read")


def of_many_dtypes(arm: Arm) -> Result:
    """A policy for each layer, and a frozen part in bf16. Smaller steps, as fp16 is finer than bf16."""
    model: Any = make(arm.case)
    model.layers[1].qkv.to(torch.bfloat16).requires_grad_(False)
    for layer, dtype in zip(model.layers, (torch.float32, torch.bfloat16, torch.float16), strict=True):
        policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=torch.bfloat16)
        arm.shard(layer, mesh=arm.mesh, mp_policy=policy)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    return four_steps(arm, *arm.keep(arm.shard(model, mesh=arm.mesh, mp_policy=policy), lr=1e-5))


class Row(NamedTuple):
    """A program, on which model, how it is sharded; `again`: epochs after the first in which a host reads whole shards,
    as it has skipped a version.
    """

    program: Callable[[Arm], Result]
    case: Case = BF16
    sharding: Literal["flat", "world", "hybrid"] = "flat"
    again: frozenset[int] = frozenset()
    settings: Settings = ON


ROWS = {
    "fp32": Row(trained, Case(counts=((1, 3, 2, 0), (2, 1, 0, 1)))),
    "bf16": Row(trained),
    "tied": Row(trained, dataclasses.replace(BF16, tied=True)),
    "frozen": Row(trained, dataclasses.replace(BF16, frozen="layer")),
    "adapters": Row(trained, dataclasses.replace(BF16, frozen="base")),
    "dtypes": Row(of_many_dtypes, Case(counts=COUNTS)),
    "world": Row(trained, sharding="world"),
    "hybrid": Row(trained, sharding="hybrid"),
    "idle": Row(trained, Case(counts=((1, 1, 1, 1), (2, 1, 1, 1), (0, 0, 2, 1), (1, 1, 1, 1))), again=frozenset({4})),
    "evaluated": Row(evaluated),
    "roots": Row(several_roots),
    "averaged": Row(averaged),
    "kept": Row(averaged, settings=dataclasses.replace(ON, second_buffer=True)),
    "pruned": Row(pruned),
    "loaded": Row(loaded),
    "abandoned": Row(abandoned),
}


class Crossed(NamedTuple):
    """How shards of other hosts came to this rank's, as far as this rank read them; units by name.

    Attributes:
        whole: epochs in which some were read whole.
        patched: units to whose shards changes were applied.
        unread: bytes of those shards, less what was read for them.
        saved: what `odc status` shows.
        trained: units with trained parameters.
        packed: units of which this rank's own changes could be read in the end.
    """

    whole: set[int]
    patched: set[str]
    unread: int
    saved: int
    trained: set[str]
    packed: set[str]


@contextlib.contextmanager
def noted_reads() -> Iterator[tuple[list[int], list[tuple[str, int]]]]:
    """Epochs of reads of whole shards; of each patch the unit, and the bytes by which it is less than the shard."""
    whole, patched, read, patch = list[int](), list[tuple[str, int]](), ShardReads._whole, HeapLayout.patch

    def read_whole(reads: Any, peer: Any, unit: Any, epoch: int, *others: Any) -> Any:
        whole.append(epoch)
        return read(reads, peer, unit, epoch, *others)

    def patch_shard(layout: Any, unit: Any, shard: torch.Tensor, packed: torch.Tensor) -> None:
        patch(layout, unit, shard, packed)
        patched.append((unit.name, unit.published_bytes - packed.numel()))

    with mock.patch.object(ShardReads, "_whole", read_whole), mock.patch.object(HeapLayout, "patch", patch_shard):
        yield whole, patched


def equal(rank: int, world: int, name: str, hosts: int, folder: Path) -> Crossed:
    row = ROWS[name]
    ours, theirs = (Arm(row, mine, rank, world, hosts, folder / str(mine)) for mine in (True, False))
    with noted_reads() as (whole, patched):
        found = row.program(ours)
    layouts = [root_of(model).layout for model in ours.models]
    units = [(layout.mine, unit) for layout in layouts for unit in layout.units]
    crossed = Crossed(
        set(whole),
        {unit for unit, _ in patched},
        sum(unread for _, unread in patched),
        sum(layout.mine.board.load(Word.SAVED) for layout in layouts),
        {unit.name for _, unit in units if any(param.trained for param in unit.params)},
        {unit.name for mine, unit in units if mine.versions(unit).load(VersionWord.PACKED) > 0},
    )
    wrong = differences(found, row.program(theirs), None)
    assert not wrong, "\n".join(wrong[:20])
    return crossed


SHAPES = [(name, 2, 2) for name in ROWS if name != "kept"] + [
    pytest.param(name, *shape, marks=pytest.mark.thorough)
    for shape, names in (
        ((2, 2), ("kept",)),
        ((3, 1), ("bf16", "world", "adapters", "averaged", "loaded", "roots")),
        ((2, 4), ("bf16", "world", "hybrid", "tied", "pruned", "abandoned")),
    )
    for name in names
]


@pytest.mark.parametrize(("name", "hosts", "per_host"), SHAPES)
def test_changes_cross_and_all_is_equal_to_fsdp2(
    host_ranks: HostPools, name: str, hosts: int, per_host: int, tmp_path: Path
) -> None:
    """Shards are read whole in a root's first epoch alone. Hybrid sharding reads none, but its changes are packed."""
    found = host_ranks(hosts, per_host).run(equal, name, hosts, tmp_path)
    across = ROWS[name].sharding != "hybrid"
    assert set().union(*(one.whole for one in found)) == ({1, *ROWS[name].again} if across else set())
    assert all(one.packed == one.trained for one in found)
    for first in range(0, hosts * per_host, per_host):
        ranks = found[first : first + per_host]
        patched, saved = set().union(*(one.patched for one in ranks)), sum(one.saved for one in ranks)
        assert patched == (found[0].trained if across else set())
        assert saved >= sum(one.unread for one in ranks) and (saved > 0) == across
