"""Whole jobs: what a reader outside of them gets, and what happens to either when the other ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.handover_jobs import end, publishing_job, read_a_trained_model, read_for_ever, second_dimension_first
from support.models import Case, build, make, shard
from support.rank_worker import report
from support.ranks import RankPool, spawn_ranks
from support.silent import SilentStore
from support.waiting import until
from torch.distributed.device_mesh import init_device_mesh

from odc import Settings, fully_shard
from odc.errors import PeerLostError, UnsupportedError
from odc.fsdp import root_of
from odc.handover import Reader, weight_handle
from odc.handover.handle import WeightHandle
from odc.net import JobStore

Pools = Callable[[int], RankPool]

# names, shapes and values --------------------------------------------------------------------------------------------


CASES = {
    "plain": (Case(counts=((1,),)), {}),
    "tied": (Case(counts=((1,),), tied=True), {}),
    "frozen and wrapped": (Case(counts=((1,),), frozen="layer", checkpointing="wrapper"), {}),
    "low precision": (Case(counts=((1,),), low_precision=True), {}),
    "second buffer": (Case(counts=((1,),)), {"settings": Settings(second_buffer=True)}),
    "second dimension": (Case(counts=((1,),)), {"shard_placement_fn": second_dimension_first}),
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_reader_gets_the_whole_state_dict(ranks: Pools, name: str, world: int) -> None:
    case, options = CASES[name]
    if options.get("shard_placement_fn"):
        assert second_dimension_first(torch.nn.Parameter(torch.empty(5, 12))) is not None
        options = {**options, "width": 36}
    ranks(world).run(read_one, case, options)


def read_one(rank: int, world: int, case: Case, options: dict[str, Any]) -> None:
    width = options.pop("width", None)
    if width is None:
        read_a_trained_model(rank, world, case, options)
        return

    model = shard(fully_shard, make(case, width=width), case, init_device_mesh("cpu", (world,)), **options)
    model.publish()
    dims = {placement.dim for p in model.parameters() for placement in p.placements}
    assert dims == {0, 1}, dims
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    with Reader(weight_handle(model)) as source:
        tensors = source.read().tensors
    assert all(torch.equal(tensors[name], value) for name, value in whole.items())
    dist.barrier()


def read_replicas(rank: int, world: int) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = build(fully_shard, Case(counts=((1,),)), mesh)
    model.publish()
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    with Reader(weight_handle(model)) as source:
        tensors = source.read().tensors
        read_from = [one.rank for one in source._sources]
    assert all(torch.equal(tensors[name], value) for name, value in whole.items())
    dist.barrier()
    return read_from


def test_hybrid_sharding_is_read_from_the_replica_of_the_rank_that_made_the_handle(ranks: Pools) -> None:
    assert ranks(4).run(read_replicas) == [[0, 1], [0, 1], [2, 3], [2, 3]]


# readers and jobs that come and go -----------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [False, True])
def test_reading_while_the_job_publishes_without_pause(tmp_path: Path, second: bool) -> None:
    with publishing_job(tmp_path, width=200, second_buffer=second) as (running, text):
        versions = []
        with Reader(text, tries=100_000) as source:
            assert source.left_out == ("steps",)
            # The ranks may get no core for a while: go on until they have published again.
            while len(versions) < 40 or versions[0] == versions[-1]:
                number, tensors = source.read()
                wrong = [name for name, tensor in tensors.items() if (tensor != number).any()]
                assert not wrong, f"version {number}: {wrong}"
                versions.append(number)
        assert versions == sorted(versions)
        end(running, tmp_path)


def read_without_pause(rank: int, world: int, text: str) -> None:
    """In a process outside the job, which starts as quickly as a rank does."""
    with Reader(text, tries=10**9) as source:
        source.read()
        report("reading")
        read_for_ever(source)


@pytest.mark.parametrize("how", [pytest.param(signal.SIGKILL, marks=pytest.mark.thorough), signal.SIGSTOP])
def test_a_dead_or_stopped_reader_holds_up_no_rank(tmp_path: Path, how: signal.Signals) -> None:
    with publishing_job(tmp_path) as (running, text), Reader(text) as watch:
        with spawn_ranks(1, read_without_pause, text) as loop:
            loop.until_reported(1)
            os.kill(loop.pids[0], how)
            if how is signal.SIGKILL:
                loop.wait()
            before = watch.version
            until(lambda: watch.version >= before + 50, "50 more versions", 300.0)
        end(running, tmp_path)


def test_a_killed_trainer_is_named_while_it_is_read_from_and_while_it_is_waited_for(tmp_path: Path) -> None:
    with publishing_job(tmp_path) as (running, text):
        sources = [Reader(text, tries=10**9, timeout_s=3600.0) for _ in range(2)]
        with sources[0], sources[1], ThreadPoolExecutor(2) as threads:
            sources[0].read()
            going = [threads.submit(read_for_ever, sources[0]), threads.submit(sources[1].read, at_least=10**9)]
            running.kill(1)
            for one in going:
                error = one.exception(600.0)
                assert isinstance(error, PeerLostError) and error.culprit == 1, error
                assert "rank 1 died" in str(error)


def test_a_job_that_ends(tmp_path: Path) -> None:
    with publishing_job(tmp_path) as (running, text), Reader(text, tries=10**9) as source:
        (tmp_path / "stop").touch()
        with pytest.raises(PeerLostError, match="has left the job"):
            read_for_ever(source)
        for outcome in running.wait():
            assert outcome.exit_code == 0 and outcome.error is None, outcome.describe()


def test_weights_in_nvshmems_memory_are_refused() -> None:
    root = mock.Mock()
    root.grid.rank, root.layout.exports = 3, False
    refused = pytest.raises(UnsupportedError, match="rank 3: weights in NVSHMEM's memory cannot be exported")
    with mock.patch("odc.fsdp.root_of", return_value=root), refused:
        weight_handle(object())


def ask_for_a_handle_once_the_job_has_ended(rank: int, world: int) -> None:
    settings = Settings(timeout_s=600.0, address="127.0.0.1")
    model = build(fully_shard, Case(counts=((1,),)), init_device_mesh("cpu", (world,)), settings=settings)
    model.publish()
    member, store = root_of(model).member, SilentStore()
    assert member.network is not None
    member.network.store = JobStore(store, 600.0, rank)
    member.protocol.abort("rank 1 died", 1)
    with pytest.raises(PeerLostError, match="waiting for rank 0 to listen.*rank 1 died"):
        weight_handle(model)
    assert store.asked.is_set()
    store.silent = False


def test_the_end_of_the_job_ends_a_wait_for_the_address_of_a_rank() -> None:
    """As where the host of the store is cut off: this rank knows that before any call of the store ends."""
    with spawn_ranks(1, ask_for_a_handle_once_the_job_has_ended) as ranks:
        (outcome,) = ranks.wait()
    assert outcome.exit_code == 0 and outcome.error is None, outcome.describe()


def publishes_after_a_model_that_nothing_reads(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    build(fully_shard, Case(counts=((1,),)), mesh, settings=Settings(prefetch=2)).publish()
    settings = Settings(address="127.0.0.1", engine="sockets")
    model = build(fully_shard, Case(counts=((1,),)), mesh, settings=settings)
    model.publish()
    (owner,) = WeightHandle.from_json(weight_handle(model)).owners
    assert owner.listener is not None and owner.listener[0] == "127.0.0.1"


def test_a_second_model_may_be_the_first_that_other_hosts_read() -> None:
    """As a policy made after its judge, whose settings named no place to listen at."""
    with spawn_ranks(1, publishes_after_a_model_that_nothing_reads) as ranks:
        (outcome,) = ranks.wait()
    assert outcome.exit_code == 0 and outcome.error is None, outcome.describe()
