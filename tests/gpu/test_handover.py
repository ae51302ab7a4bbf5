"""Weights on a device, read by processes outside the job: whole, of one version, and in tensors of all kinds."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.device import EMULATED, own_device
from support.far_readers import Moved
from support.handover_jobs import end, numbered, publishing_job, second_dimension_first
from support.models import Case, adamw, make, next_token_loss, shard, tokens
from support.ranks import RankPool
from torch.distributed.device_mesh import init_device_mesh

from odc import Settings, fully_shard
from odc.errors import PeerLostError
from odc.fsdp import root_of
from odc.handover import Reader, read_groups, version, weight_handle
from odc.handover.handle import WeightHandle
from odc.protocol.words import VERSION_WORDS, VERSIONS_KEPT

Pools = Callable[[int], RankPool]
READS = 100  # 40,000 have been read, too


# what is read --------------------------------------------------------------------------------------------------------


def trained(rank: int, case: Case, device: torch.device, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model that has been published on the device, and its whole state dict, on the CPU.

    It has been trained, but not in bf16: an emulated device uses torch's CPU kernels, whose layer norm takes one dtype.
    Its shards have gone by the copy engine, as those of large models do.
    """
    options["settings"] = replace(options.get("settings", Settings()), copy_engine_bytes=1)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = shard(fully_shard, make(case, width=36).to(device), case, mesh, **options)
    optimizer = adamw(model)
    for step in range(0 if case.low_precision else 2):
        x = tokens(rank, step, 0).to(device)
        with model.minibatch():
            (next_token_loss(model(x), x) / 18).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.publish()
    return model, gathered(model)


def gathered(model: Any) -> dict[str, torch.Tensor]:
    """The whole state dict, on the CPU."""
    whole = {}
    for name, value in model.state_dict().items():  # gloo gathers no DTensors of a device
        shards: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shards, value.to_local().cpu())
        whole[name] = torch.cat(shards, value.placements[0].dim)
    return whole


def places(reader: Reader, device: torch.device) -> dict[str, torch.Tensor]:
    """Zeros on a device, of the shapes and dtypes of all parameters."""
    return {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in reader.shapes().items()}


def check_reads(reader: Reader, whole: dict[str, torch.Tensor], newest: int) -> None:
    """The reader gets `whole`, rounded to what is published, in tensors of all kinds, and halves of it."""
    device, kinds = reader.device, reader.shapes()
    expected = {name: value.to(kinds[name][1]) for name, value in whole.items()}

    def check(found: dict[str, torch.Tensor], of: dict[str, torch.Tensor] = expected) -> None:
        assert found.keys() == of.keys(), found.keys() ^ of.keys()
        wrong = [name for name, one in found.items() if not torch.equal(one.cpu().to(of[name].dtype), of[name])]
        assert not wrong, wrong

    number, made = reader.read(at_least=newest)
    assert number == newest and {one.device.type for one in made.values()} == {"cpu"}
    check(made)
    for where in (device, torch.device("cpu")):
        for dtype in (None, torch.float64):
            into = {name: torch.zeros(one.shape, dtype=dtype or one.dtype, device=where) for name, one in made.items()}
            assert all(one is into[name] for name, one in reader.read(into).tensors.items())
            check(into)
        strided = {name: torch.zeros(*one.shape, 2, dtype=one.dtype, device=where) for name, one in made.items()}
        reader.read({name: one[..., 0] for name, one in strided.items()})
        check({name: one[..., 0] for name, one in strided.items()})
        assert not any(one[..., 1].any() for one in strided.values()), "what lies between has changed"
        for dim in (0, -1):
            for half in range(2):
                cuts, parts = {}, {}
                for name, one in expected.items():
                    cut = (dim % one.dim(), one.shape[dim] * half // 2, one.shape[dim] * (half + 1) // 2)
                    cuts[name], parts[name] = cut, one.narrow(cut[0], cut[1], cut[2] - cut[1])
                into = {name: torch.zeros(one.shape, dtype=one.dtype, device=where) for name, one in parts.items()}
                reader.read(into, slices=cuts)
                check(into, parts)
    for where in (device, torch.device("cpu")):
        groups = list[dict[str, torch.Tensor]]()
        with torch.cuda.stream(torch.cuda.Stream(device)):  # which may come to a clone late
            for group in read_groups(reader, 4096, newest, device=where):
                assert all(one.device == where and one.is_pinned() == (where.type == "cpu") for one in group.values())
                groups.append({name: one.clone() for name, one in group.items()})
            torch.cuda.current_stream().synchronize()
        assert len(groups) > 2
        check({name: one for group in groups for name, one in group.items()})


def reads_a_trained_model(rank: int, world: int, case: Case, options: dict[str, Any]) -> None:
    device = own_device(int(os.environ.get("LOCAL_RANK", rank)))
    model, whole = trained(rank, case, device, **options)
    with Reader(weight_handle(model)) as reader:
        assert reader.device == device
        check_reads(reader, whole, version(model))
    dist.barrier()


CASES = {
    "plain": (Case(counts=((1,),)), {}),
    "tied": (Case(counts=((1,),), tied=True), {}),
    "low precision": (Case(counts=((1,),), low_precision=True), {"settings": Settings(second_buffer=True)}),
    "second dimension": (Case(counts=((1,),)), {"shard_placement_fn": second_dimension_first}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_reader_gets_the_whole_state_dict(ranks: Pools, name: str) -> None:
    ranks(2).run(reads_a_trained_model, *CASES[name], timeout=800)


def test_ranks_of_this_host_are_mapped_and_others_read_over_the_network(
    device: torch.device, request: pytest.FixtureRequest
) -> None:
    """Into the same tensors of a device; of others readers keep a copy, as hosts exchange changes."""
    pools, settings = request.getfixturevalue("host_ranks"), Settings(timeout_s=600.0, changes="on")
    pools(2, 2).run(reads_a_trained_model, CASES["plain"][0], {"settings": settings}, timeout=800)


def reads_over_the_network(rank: int, world: int) -> None:
    """As from another host: the peer serves its device's memory, and nothing of it but the published shards."""
    device, settings = own_device(rank), Settings(timeout_s=60.0, address="127.0.0.1", engine="sockets")
    model, whole = trained(rank, CASES["plain"][0], device, settings=settings)
    text = weight_handle(model)
    handle, layout = WeightHandle.from_json(text), root_of(model).layout
    with Reader(text, device="cpu") as reader:
        assert reader.device.type == "cpu" and reader._engine is not None
        into = places(reader, device)
        for found in (reader.read().tensors, reader.read(into).tensors):
            assert all(torch.equal(found[name].cpu(), value) for name, value in whole.items())
        published, accumulator = layout.readable[""], layout.heap.layout.offset("accumulator/0")
        assert len(published) < handle.device_bytes and accumulator not in published
        for offset, nbytes in ((accumulator, 8), (published.start, len(published) + 1), (0, handle.device_bytes)):
            with pytest.raises(PeerLostError, match="exposes no"):
                reader._engine.sockets.read(1 - rank, handle.root, offset, torch.zeros(nbytes, dtype=torch.uint8))
    dist.barrier()


def test_a_reader_without_a_gpu_reads_over_the_network(ranks: Pools) -> None:
    ranks(2).run(reads_over_the_network, timeout=800)


def reads_changes_over_the_network(rank: int, world: int) -> None:
    """A reader that reads every version, and one that skips some: after the first time only what has changed."""
    device = own_device(rank)
    settings = Settings(
        timeout_s=60.0, address="127.0.0.1", engine="sockets", changes="on", check_protocol=True, second_buffer=True
    )
    model, whole = trained(rank, CASES["plain"][0], device, settings=settings)
    text = weight_handle(model)
    words = VERSIONS_KEPT * len(root_of(model).layout.units) * VERSION_WORDS * 8 * world
    with Reader(text, device="cpu") as often, Reader(text, device="cpu") as seldom:
        readers, all_bytes = [(often, Moved(often), 1), (seldom, Moved(seldom), 3)], 0
        for step in range(4):
            for reader, moved, every in readers:
                if step % every:
                    continue
                number, found = reader.read(at_least=version(model))
                wrong = [name for name, one in whole.items() if not torch.equal(found[name], one.to(found[name].dtype))]
                assert number == version(model) and not wrong, (step, every, wrong)
                nbytes = moved.taken()
                all_bytes = all_bytes or nbytes
                assert nbytes == all_bytes if not step else words < nbytes < 0.2 * all_bytes + words
                assert reader.read().version == number and moved.taken() == words
            dist.barrier()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().view(-1)[step::97] *= 1.0079
            model.publish()
            whole = gathered(model)
    dist.barrier()


def test_a_reader_over_the_network_reads_what_has_changed_on_the_device(ranks: Pools) -> None:
    ranks(2).run(reads_changes_over_the_network, timeout=800)


# versions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [False, True])
def test_reading_while_the_job_publishes_without_pause(device: torch.device, tmp_path: Path, second: bool) -> None:
    versions = list[int]()
    with publishing_job(tmp_path, width=8, device="cuda", second_buffer=second) as (running, text):
        with Reader(text, tries=100_000) as reader:
            into = [places(reader, where) for where in (device, torch.device("cpu"))]
            while len(versions) < READS or versions[0] == versions[-1]:
                number, tensors = reader.read(into[len(versions) % 2])
                wrong = [name for name, tensor in tensors.items() if bool((tensor != number).any())]
                assert not wrong, f"version {number}: {wrong}"
                versions.append(number)
            print(f"{len(versions)} reads of versions {versions[0]} to {versions[-1]}, {reader.overtaken} overtaken")
        end(running, tmp_path)
    assert versions == sorted(versions)


def publishes_in_the_midst(rank: int, world: int, second: bool, times: int) -> tuple[int, int]:
    """As the first parameter is copied, the job publishes. Returns the version that is read and copies overtaken."""
    device = own_device(rank)
    model, sharded = numbered(16, device, Settings(timeout_s=60.0, second_buffer=second))
    model.fill(1)
    sharded.publish()
    with Reader(weight_handle(sharded)) as reader:
        source, numbers = reader._sources[0], list(range(2, 2 + times))
        copy = source.copy

        def copy_and_publish(offset: int, into: torch.Tensor) -> None:
            copy(offset, into)
            while numbers:
                model.fill(numbers.pop(0))
                sharded.publish()

        source.copy = copy_and_publish  # type: ignore[method-assign]
        into = places(reader, device)
        number, tensors = reader.read(into)
        assert all(bool((one == number).all()) for one in tensors.values()), (number, tensors)
        return number, reader.overtaken


@pytest.mark.parametrize(("second", "times", "expected"), [(False, 1, (2, 1)), (True, 1, (1, 0)), (True, 2, (3, 1))])
def test_a_copy_is_overtaken_by_what_overwrites_it(
    ranks: Pools, second: bool, times: int, expected: tuple[int, int]
) -> None:
    assert ranks(1).run(publishes_in_the_midst, second, times, timeout=800) == [expected]


def reads_behind_other_work(rank: int, world: int) -> None:
    """Into tensors whose stream is busy; what was read must not be what is published after `read` has returned."""
    device, size = own_device(rank), 1024 if EMULATED else 8192
    model, sharded = numbered(16, device, Settings(timeout_s=60.0))
    model.fill(1)
    sharded.publish()
    with Reader(weight_handle(sharded)) as reader:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            square = torch.ones(size, size, device=device)
            for _ in range(10):
                square = square @ square / size
            number, tensors = reader.read(places(reader, device))
        model.fill(2)
        sharded.publish()
        torch.cuda.synchronize()
        assert number == 1 and all(bool((one == 1).all()) for one in tensors.values()), (number, tensors)


def test_a_read_waits_for_its_stream_before_it_takes_a_copy_for_whole(ranks: Pools) -> None:
    ranks(1).run(reads_behind_other_work, timeout=800)
