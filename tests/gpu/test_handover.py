"""Weights on a device, read by processes outside the job: mapped on its host, without the right to write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.device import own_device
from support.handover_jobs import end, numbered, publishing_job, read_for_ever, second_dimension_first
from support.models import Case, adamw, make, next_token_loss, shard, tokens
from support.rank_worker import report
from support.ranks import RankPool, spawn_ranks
from support.waiting import until
from torch.distributed.device_mesh import init_device_mesh

from odc import Settings, fully_shard
from odc.errors import PeerLostError, UnsupportedError
from odc.fsdp import root_of
from odc.handover import Reader, read_groups, version, weight_handle
from odc.handover.handle import WeightHandle
from odc.memory import driver_memory
from odc.memory.driver_calls import DriverError

Pools = Callable[[int], RankPool]
EMULATED = "libemulated_cuda" in os.environ.get("LD_PRELOAD", "")
TESTS = Path(__file__).parents[1]
READS = 100  # 40,000 have been read, too


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")
    return own_device(0)


# what is read --------------------------------------------------------------------------------------------------------


def trained(rank: int, case: Case, device: torch.device, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model that has been published on the device, and its whole state dict, on the CPU.

    It has been trained, but not in bf16: an emulated device uses torch's CPU kernels, whose layer norm takes one dtype.
    """
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
    whole = {}
    for name, value in model.state_dict().items():  # gloo gathers no DTensors of a device
        shards: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shards, value.to_local().cpu())
        whole[name] = torch.cat(shards, value.placements[0].dim)
    return model, whole


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
                assert all(one.device == where for one in group.values())
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
    ranks(2).run(reads_a_trained_model, *CASES[name], timeout=240)


def test_ranks_of_this_host_are_mapped_and_others_read_over_the_network(
    device: torch.device, request: pytest.FixtureRequest
) -> None:
    """Into the same tensors of a device; hosts exchange changes, and readers still read whole shards."""
    pools, settings = request.getfixturevalue("host_ranks"), Settings(timeout_s=120.0, changes="on")
    pools(2, 2).run(reads_a_trained_model, CASES["plain"][0], {"settings": settings}, timeout=240)


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
        published, accumulator = layout.readable_range, layout.heap.layout.offset("accumulator/0")
        assert len(published) < handle.device_bytes and accumulator not in published
        for offset, nbytes in ((accumulator, 8), (published.start, len(published) + 1), (0, handle.device_bytes)):
            with pytest.raises(PeerLostError, match="exposes no"):
                reader._engine.sockets.read(1 - rank, handle.root, offset, torch.zeros(nbytes, dtype=torch.uint8))
    dist.barrier()


def test_a_reader_without_a_gpu_reads_over_the_network(ranks: Pools) -> None:
    ranks(2).run(reads_over_the_network, timeout=240)


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
    assert ranks(1).run(publishes_in_the_midst, second, times, timeout=240) == [expected]


# what a reader may do, and what it leaves ----------------------------------------------------------------------------


WRITE = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import torch
from support.device import own_device
from odc.handover import Reader

own_device(0)
with Reader(sys.argv[1], tries=100_000) as reader:
    reader.read()
    print("read", flush=True)
    reader._sources[0]._data.fill_(1)
    torch.cuda.synchronize()
    print("written", flush=True)
"""


def test_a_write_through_a_readers_map_faults(device: torch.device, tmp_path: Path) -> None:
    """An emulated device ends the process, a real one every later use of CUDA in it. The job goes on."""
    with publishing_job(tmp_path, device="cuda") as (running, text), Reader(text, tries=100_000) as watch:
        writer = subprocess.run([sys.executable, "-c", WRITE, text], capture_output=True, text=True, timeout=240)
        assert writer.stdout == "read\n" and writer.returncode != 0, writer
        assert writer.returncode == -signal.SIGSEGV if EMULATED else "CUDA error" in writer.stderr, writer
        newest = watch.version
        number, tensors = watch.read(at_least=newest + 5)
        assert all(bool((one == number).all()) for one in tensors.values())
        end(running, tmp_path)


def descriptors(pid: int | str = "self") -> Counter[str]:
    """What the open descriptors of a process are of."""
    found = Counter[str]()
    for fd in list(Path(f"/proc/{pid}/fd").iterdir()):
        try:
            found[os.readlink(fd).split(":[")[0]] += 1
        except FileNotFoundError:  # closed meanwhile, as is that of the listing
            continue
    return found


def test_a_reader_holds_mappings_as_long_as_it_lives_and_no_descriptor_of_memory(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, calls = driver_memory.call, Counter[str]()

    def counted(function: str, *args: object) -> Any:
        calls[function] += 1
        return call(function, *args)

    with publishing_job(tmp_path, device="cuda") as (running, text):
        with Reader(text, tries=100_000) as reader:
            reader.read()  # what CUDA opens for good
        monkeypatch.setattr(driver_memory, "call", counted)
        before = descriptors()
        for times in range(1, 3):
            with Reader(text, tries=100_000) as reader:
                reader.read()
                held = descriptors() - before  # of the ranks' processes, and what a driver may keep
                assert held["anon_inode"] == 2 and not any("memfd:odc" in name for name in held), held
                assert (calls["cuMemMap"], calls["cuMemUnmap"]) == (2 * times, 2 * times - 2)
                rights = [
                    line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if "odc." in line
                ]
                assert rights == ["r--s"] * 2, "the words are mapped for reading alone"
                members = [*reader._sources]  # as a traceback may keep them
            assert members and descriptors() == before
            del members  # which keep the words
            assert calls["cuMemMap"] == calls["cuMemUnmap"] == calls["cuMemAddressFree"] == 2 * times
        end(running, tmp_path)


def test_memory_that_a_device_cannot_map_is_named(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(function: str, *args: object) -> None:
        raise DriverError(function, _Refusal(101))

    with publishing_job(tmp_path, device="cuda") as (running, text):
        before = descriptors()
        with monkeypatch.context() as patched:
            patched.setattr(driver_memory, "call", refusing)
            with pytest.raises(
                UnsupportedError, match=rf"rank 0: {device} cannot map its memory: .*odc doctor"
            ) as caught:
                Reader(text)
        assert caught.value.culprit == 0 and descriptors() == before
        end(running, tmp_path)


class _Refusal(int):
    name = "CUDA_ERROR_INVALID_DEVICE"


def read_without_pause(rank: int, world: int, text: str) -> None:
    own_device(0)
    with Reader(text, tries=10**9) as source:
        source.read()
        report("reading")
        read_for_ever(source)


def test_a_killed_reader_leaves_nothing_and_holds_up_no_rank(device: torch.device, tmp_path: Path) -> None:
    with publishing_job(tmp_path, device="cuda") as (running, text), Reader(text) as watch:
        before = [descriptors(pid) for pid in running.pids]
        with spawn_ranks(1, read_without_pause, text) as loop:
            loop.until_reported(1)
            os.kill(loop.pids[0], signal.SIGKILL)
            loop.wait()
        newest = watch.version
        until(lambda: watch.version >= newest + 20, "20 more versions", 300.0)
        until(lambda: [descriptors(pid) for pid in running.pids] == before, "the ranks' descriptors", 60.0)
        end(running, tmp_path)


def test_a_killed_trainer_is_named_while_it_is_read_from(device: torch.device, tmp_path: Path) -> None:
    with (
        publishing_job(tmp_path, device="cuda") as (running, text),
        Reader(text, tries=10**9, timeout_s=3600.0) as reader,
        ThreadPoolExecutor(1) as thread,
    ):
        reader.read()
        going = thread.submit(read_for_ever, reader)
        running.kill(1)
        error = going.exception(600.0)
        assert isinstance(error, PeerLostError) and error.culprit == 1 and "rank 1 died" in str(error), error


def test_a_process_that_does_not_map_gpus_is_refused_where_no_rank_listens(
    device: torch.device, tmp_path: Path
) -> None:
    with publishing_job(tmp_path, device="cuda") as (running, text):
        why = r"rank 0 has its weights on a GPU, which this process does not map .*; set Settings\(address=...\)"
        with pytest.raises(UnsupportedError, match=why):
            Reader(text, device="cpu")
        end(running, tmp_path)
