"""Jobs to read from: members in this process behind real listeners, and rank processes that publish without pause."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from odc import Settings, fully_shard
from odc.errors import StaleVersionError
from odc.handover import Reader, version, weight_handle
from odc.handover.export import published_units
from odc.handover.handle import PublishedParameter, ShardOwner, WeightHandle
from odc.net import host_identity
from odc.protocol import Word
from odc.runtime import Daemon, reading_token
from support.device import own_device
from support.members import BF16, F32, HeapGroup, Layout
from support.models import Case, adamw, build, tokens
from support.programs import backward
from support.rank_worker import report
from support.ranks import RankProcesses, spawn_ranks

LAYOUT: Layout = [[("w", 8, F32), ("b", 3, BF16)], [("v", 5, F32)]]


def changed(handle: str, **fields: Any) -> str:
    """A weight handle with other fields."""
    return json.dumps({**json.loads(handle), **fields})


class Job:
    """A heap group with a daemon a member, with a weight handle; every parameter is one row of all shards."""

    def __init__(self, layout: Layout = LAYOUT, shards: int = 2, settings: Settings | None = None) -> None:
        self.group = HeapGroup(layout, shards, settings=settings or Settings(timeout_s=60.0))
        self.daemons = []
        for service in self.group.services:
            self.daemons.append(Daemon(service.rank))
            self.daemons[-1].serve(service)
        layout = self.group.layouts[0]
        offset = layout.heap.layout.offset
        self.parameters = tuple(
            PublishedParameter(
                names=(f"{unit.name}.{spec.name}",),
                shape=(spec.numel * shards - (1 if spec.numel > 1 else 0),),
                dtype=str(spec.dtype)[6:],
                shard_dim=0,
                shard_numel=spec.numel,
                offset=offset(f"published/{unit.index}") + spec.published_offset,
                buffer_bytes=layout.buffer_offset(unit, 1),
                unit=unit.index,
            )
            for unit in layout.units
            for spec in unit.params
        )
        self.owners = tuple(
            ShardOwner(service.rank, daemon.address, reading_token(service.token), host_identity())
            for service, daemon in zip(self.group.services, self.daemons, strict=True)
        )
        self.handle = WeightHandle(
            "group", self.owners, self.parameters, offset("board"), offset("reason"), layout.buffers,
            layout.heap.nbytes, layout.heap.digest, (), units=published_units(layout),
            versions=offset("versions") if layout.says_changes else 0, kernels=layout.heap.lanes.asynchronous,
        ).to_json()  # fmt: skip

    def publish(self, values: Sequence[float]) -> None:
        """Open every member's next epoch, each with its own value in every element."""
        for member, value in enumerate(values):
            self.group.publish(member, value)

    def publishing(self, member: int) -> Iterator[None]:
        """As `Endpoint.publish` with every element the epoch's number, stopping between any two writes."""
        layout, board = self.group.layouts[member], self.group.layouts[member].peer(member).board
        while True:
            epoch = board.load(Word.PUBLISHED) + 1
            boards = [self.group.layouts[m].peer(m).board for m in range(len(self.group.layouts))]
            while any(other.load(Word.PUBLISHED) < epoch - 1 for other in boards):
                yield
            board.store(Word.PUBLISHING, epoch)
            yield
            for unit in layout.units:
                for i, spec in enumerate(unit.params):
                    place = layout.peer(member).published(unit, i, epoch)
                    place[: spec.numel // 2].fill_(epoch)
                    yield
                    place[spec.numel // 2 :].fill_(epoch)
                    yield
            board.store(Word.PUBLISHED, epoch)
            yield

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *unused: object) -> None:
        for daemon in self.daemons:
            daemon.close()
        self.group.close()


class Numbered(nn.Module):
    """Parameters of awkward shapes; `fill` sets every element to one number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, 3 * width + 1)
        self.second = nn.Linear(3 * width + 1, width, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale

    @torch.no_grad()
    def fill(self, number: int) -> None:
        for parameter in self.parameters():
            parameter.fill_(number)


def numbered(width: int, device: torch.device, settings: Settings) -> tuple[Numbered, Any]:
    """The model on a device, and its root, which is the same object; its parameters keep their values."""
    model, mesh = Numbered(width).to(device), init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh, settings=settings)
    return model, fully_shard(model, mesh=mesh, settings=settings)


def publish_without_pause(rank: int, world: int, stop: str, width: int, settings: Settings, device: str) -> int:
    """Publish version after version, each with its number in every element, until the file `stop` is there.

    Rank 0 sends the weight handle, then every hundredth version; returns the number of the last, two later than
    rank 0 has found the file. No collective: one would fail in a survivor before odc names a killed rank.
    """
    model, sharded = numbered(width, own_device(rank) if device == "cuda" else torch.device(device), settings)
    model.fill(1)
    with sharded.minibatch():
        pass
    if rank == 0:
        report(weight_handle(sharded))
    number, ending = version(sharded), Path(f"{stop} at")
    while not (ending.exists() and ending.read_text() == str(number)):
        number += 1
        model.fill(number)
        sharded.publish()
        assert version(sharded) == number, "a version is a call of publish()"
        if number % 100 == 0 and rank == 0:
            report(number)
        if rank == 0 and Path(stop).exists() and not ending.exists():
            ending.write_text(str(number + 2))  # the other rank is at most one version ahead, and reads it in time
    return number


@contextmanager
def publishing_job(
    tmp_path: Path, *, width: int = 64, device: str = "cpu", **settings: Any
) -> Iterator[tuple[RankProcesses, str]]:
    """Two ranks that publish without pause, and their weight handle."""
    arguments = str(tmp_path / "stop"), width, Settings(**settings), device
    with spawn_ranks(2, publish_without_pause, *arguments) as running:
        running.until_reported(1, [0])
        yield running, running.outcomes[0].reports[0]


def end(running: RankProcesses, tmp_path: Path) -> None:
    """End such a job, in good order."""
    (tmp_path / "stop").touch()
    for outcome in running.wait():
        assert outcome.exit_code == 0 and outcome.error is None, outcome.describe()


def read_for_ever(source: Reader) -> None:
    while True:
        source.read()


def second_dimension_first(parameter: torch.nn.Parameter) -> Shard | None:
    """Shard [3 * width, width] and alike along dimension 1, where that divides evenly over 2 or 3 ranks."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 6 == 0 else None


def read_in_a_loop(
    reader: Reader, reads: int, check: Callable[[int, dict[str, torch.Tensor]], None]
) -> tuple[int, int]:
    """(consistent copies, given up); `check` asserts that a copy is of its version, to the last bit."""
    good = stale = 0
    for _ in range(reads):
        try:
            number, tensors = reader.read()
        except StaleVersionError:
            stale += 1
            continue
        good += 1
        check(number, tensors)
    return good, stale


def read_a_trained_model(rank: int, world: int, case: Case, options: dict[str, Any]) -> None:
    """Every rank reads from its own process; what it gets must be the whole state dict, to the bit."""
    model = build(fully_shard, case, init_device_mesh("cpu", (world,)), **options)
    optimizer = adamw(model)
    for step in range(2):
        with model.minibatch():
            backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    model.publish()
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    dtype = torch.bfloat16 if case.low_precision else torch.float32
    with Reader(weight_handle(model)) as source:
        number, tensors = source.read(at_least=version(model))
        assert number == version(model) == 3, number
        assert source.left_out == ()
        assert source.shapes() == {name: (tuple(value.shape), dtype) for name, value in whole.items()}
        assert list(tensors) and tensors.keys() == whole.keys(), tensors.keys() ^ whole.keys()
        wrong = [name for name, value in whole.items() if not torch.equal(tensors[name], value.to(dtype))]
        assert not wrong, wrong
        into = {name: torch.empty_like(value) for name, value in whole.items()}
        source.read(into)
        assert all(torch.equal(into[name], value.to(dtype).float()) for name, value in whole.items())
        for dim in (0, -1):  # as two tensor-parallel receivers read it
            for half in range(2):
                cuts = {
                    name: (dim % value.dim(), value.shape[dim] * half // 2, value.shape[dim] * (half + 1) // 2)
                    for name, value in whole.items()
                }
                halves = source.read(slices=cuts).tensors
                for name, (along, start, stop) in cuts.items():
                    assert torch.equal(halves[name], whole[name].to(dtype).narrow(along, start, stop - start)), name
        with torch.no_grad():  # a root whose parameters are gathered makes the same handle
            before = weight_handle(model)
            model(tokens(rank, 0, 0))
            assert weight_handle(model) == before
            dist.barrier()
