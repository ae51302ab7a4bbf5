"""`Settings(memory="nvshmem")`: the drop-in over NVSHMEM's memory, on one host and over hosts, and how it fails.

`make test-emulated` runs it without a GPU: nvshmem4py is the real one then, over a stand-in for NVSHMEM's host library
that ends a process which breaks one of the library's rules (tests/emulated/nvshmem.cpp).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.compare import differences
from support.device import own_device
from support.exact import Exact, batch, train
from support.failing import until_ended
from support.host_ranks import HostPools, spawn_on_hosts
from support.hosts import Hosts, need_hosts
from support.rank_worker import report
from support.ranks import RankProcesses, spawn_ranks
from support.waiting import until
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import odc
from odc import Settings, fully_shard
from odc.errors import HeapMemoryError, OdcError, UnsupportedError, WaitTimeoutError
from odc.fsdp import live_roots
from odc.fsdp.root import root_of
from odc.handover import weight_handle
from odc.memory import nvshmem
from odc.memory.nvshmem_heap import NvshmemHeap
from odc.net.engines import Engine, staging
from odc.protocol import Word

pytest.importorskip("nvshmem.core", reason="needs nvshmem4py: pip install 'odc-fsdp[nvshmem]'")

Counts = tuple[tuple[int, ...], ...]
ROOM = 64 << 20  # of a pool's processes, in which many models run one after the other
COUNTS: dict[int, Counts] = {2: ((1, 1), (2, 1), (0, 2)), 4: ((1, 1, 1, 1), (2, 1, 3, 1), (0, 2, 0, 1))}


def over_nvshmem(**some: Any) -> Settings:
    """By the copy engine goes what goes by it where models are large."""
    return Settings(**{"timeout_s": 120.0, "nvshmem_bytes": ROOM, "copy_engine_bytes": 1} | some, memory="nvshmem")


OURS = over_nvshmem()
SETTINGS = {
    "server": OURS,
    "direct by torch": over_nvshmem(accumulate="direct", kernels="torch", prefetch=0),
    "gradient views": over_nvshmem(gradient_views=True, copy_engine_bytes=1 << 20),  # small pieces, by kernels
}
CHANGES = over_nvshmem(changes="on", check_protocol=True)


@pytest.fixture(scope="module")
def pools() -> Iterator[HostPools]:
    """Of this file alone: which engine a process reads by is decided with its first model."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")
    made = HostPools()
    yield made
    made.close()


def same(rank: int, world: int, counts: Counts, settings: Settings) -> dict[str, int]:
    """Asserts that odc gives FSDP2's numbers. Returns how many bytes came from other hosts' devices, and how, and how
    many did not have to.
    """
    own_device(int(os.environ.get("LOCAL_RANK", rank)))
    staging.CHUNK_BYTES = 512  # every shard takes several
    marks = "all" if world == 2 else "last"
    came = {"nvshmem": 0, "sockets": 0}
    get, begin = nvshmem.Library.get, Engine._begin

    def counting_get(self: nvshmem.Library, into: torch.Tensor, offset: int, rank: int) -> None:
        came["nvshmem"] += into.numel()
        get(self, into, offset, rank)

    def counting_begin(self: Engine, answers: Any, region: str, offset: int, into: torch.Tensor, *more: Any) -> Any:
        came["sockets"] += into.numel() if into.is_cuda else 0
        return begin(self, answers, region, offset, into, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvshmem.Library, "get", counting_get)
        patch.setattr(Engine, "_begin", counting_begin)
        ours = train(
            fully_shard, rank, counts, marks, device="cuda", gathered=False,
            mesh=init_device_mesh("cuda", (world,)), settings=settings,
        )  # fmt: skip
    assert all(isinstance(root.layout.heap, NvshmemHeap) for root in live_roots()), "another heap"
    came["saved"] = sum(root.layout.mine.board.load(Word.SAVED) for root in live_roots())
    for root in live_roots():
        root.shut_down()
    reference = init_device_mesh("cpu", (world,))
    wrong = differences(ours, train(torch_fully_shard, rank, counts, gathered=False, mesh=reference), None)
    assert not wrong, "\n".join(wrong)
    assert sum(int(one.count_nonzero()) for one in ours.values() if one is not None) > 1000, "hardly a number"
    return came


@pytest.mark.parametrize("settings", SETTINGS)
def test_one_host_equals_fsdp2(ranks: Callable[[int], Any], settings: str) -> None:
    found = ranks(2).run(same, COUNTS[2], SETTINGS[settings], timeout=240)
    assert found == [{"nvshmem": 0, "sockets": 0, "saved": 0}] * 2, "within a host memory is mapped"


@pytest.mark.parametrize(("per_host", "settings"), [(1, OURS), (2, OURS), (2, CHANGES)])
def test_hosts_equal_fsdp2(pools: HostPools, per_host: int, settings: Settings) -> None:
    """What lies on devices goes from slab to slab, and nothing else; changes do, too. With evaluations between."""
    world = 2 * per_host
    found = pools(2, per_host).run(same, COUNTS[world], settings, timeout=240)
    assert all(one["sockets"] == 0 for one in found)
    assert sum(one["nvshmem"] for one in found) > 10_000
    assert sum(one["saved"] for one in found) > 0, "what has not changed is read once"


def step(rank: int, world: int, settings: Settings, mesh: DeviceMesh | None = None) -> Exact:
    model = Exact().to("cuda")
    fully_shard(model, mesh=init_device_mesh("cuda", (world,)) if mesh is None else mesh, settings=settings)
    with model.minibatch():
        model(batch(rank, 0, 0).to("cuda")).sum().backward()
    return model


# places in the slab --------------------------------------------------------------------------------------------------


def models_in_other_orders(rank: int, world: int) -> list[tuple[int, tuple[int, ...], int]]:
    """Of each root: its offset in the slab, its ranks, its bytes."""
    own_device(rank)
    pairs = DeviceMesh("cuda", [[0, 2], [1, 3]], mesh_dim_names=("apart", "together"))["together"]
    everyone = init_device_mesh("cuda", (world,))
    models = [Exact().to("cuda") for _ in range(3)]
    for model, mesh in zip(models, (everyone, pairs, everyone), strict=True):
        fully_shard(model, mesh=mesh, settings=OURS)
    for i in range(3):
        root_of(models[(i + rank) % 3])  # type: ignore[arg-type]
    library, found = nvshmem.started(), []
    assert library is not None
    for root in live_roots():
        heap = root.layout.heap
        found.append((heap.whole(heap.me).data_ptr() - library.base, heap.ranks, heap.whole(heap.me).numel()))
        root.shut_down()
    return found


def test_models_run_first_in_other_orders_lie_at_equal_offsets(ranks: Callable[[int], Any]) -> None:
    found = ranks(4).run(models_in_other_orders, timeout=240)
    by_root: dict[tuple[int, ...], set[int]] = {}
    for one in found:
        taken = sorted((offset, offset + nbytes) for offset, _, nbytes in one)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken)), f"overlap: {taken}"
        for offset, members, _ in one:
            by_root.setdefault(members, set()).add(offset)
    assert len(by_root[0, 1, 2, 3]) == 2, "two models of all ranks: two offsets, whatever the rank"
    assert len(by_root[0, 2]) == len(by_root[1, 3]) == 1
    assert by_root[0, 2] == by_root[1, 3], "models that share no rank may share an offset"


def exported(rank: int, world: int) -> None:
    own_device(int(os.environ.get("LOCAL_RANK", rank)))
    model = step(rank, world, OURS)
    with pytest.raises(UnsupportedError, match=rf"rank {rank}: weights in NVSHMEM's memory cannot be exported"):
        weight_handle(model)
    for root in live_roots():
        root.shut_down()


def test_weights_are_not_exported(ranks: Callable[[int], Any]) -> None:
    ranks(2).run(exported, timeout=240)


def second_does_not_fit(rank: int, world: int) -> tuple[str, bool, bool]:
    """The refusal of a second model; whether NVSHMEM was started before `odc.shutdown`, and after it."""
    own_device(rank)
    small = Settings(timeout_s=60.0, memory="nvshmem")
    kept = step(rank, world, small)
    with pytest.raises(HeapMemoryError) as refusal:
        step(rank, world, small)
    before = nvshmem.started() is not None
    odc.shutdown()
    assert kept is not None
    return str(refusal.value), before, nvshmem.started() is not None


def test_a_model_that_does_not_fit_names_the_setting_and_nvshmem_ends_with_the_job() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")
    with spawn_ranks(2, second_does_not_fit) as job:
        outcomes = job.wait(240)
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == 0, outcome.describe()
        text, before, after = outcome.value
        assert text.startswith(f"rank {rank}: heap ") and "0.0 of 2.0 MiB are left" in text, text
        assert "Settings(nvshmem_bytes=...) of that to 4194304 or more" in text, text
        assert (before, after) == (True, False)
        assert "freed implicitly" not in outcome.describe(), "nvshmem4py says so of what it must give back by itself"


# ranks that are lost, or do not come ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")
    need_hosts()
    with Hosts(2) as hosts:
        yield hosts


def reads_of_a_dead_rank(rank: int, world: int, dead: str) -> tuple[str, float]:
    """Rank 0 asks NVSHMEM for what rank 1 has once that has been killed; its error, and the seconds until then."""
    own_device(0)
    get, asked = nvshmem.Library.get, list[float]()

    def get_of_the_dead(*arguments: Any) -> None:
        if rank == 0 and not asked:
            report("reads")
            until(lambda: os.path.exists(dead), "rank 1 to be killed")
        asked.append(time.monotonic())
        get(*arguments)

    nvshmem.Library.get = get_of_the_dead  # type: ignore[method-assign]
    with pytest.raises(OdcError) as lost:
        step(rank, world, Settings(timeout_s=20.0, memory="nvshmem"))
    return str(lost.value), time.monotonic() - asked[0]


def test_a_rank_that_dies_while_it_is_read_is_named(two: Hosts, tmp_path: Path) -> None:
    dead = tmp_path / "dead"
    with spawn_on_hosts(two, 1, reads_of_a_dead_rank, str(dead)) as job:
        job.until_reported(1, ranks=[0])
        job.kill(1)
        until_ended(job, [1])
        dead.touch()
        outcome = job.wait(120)[0]
    text, seconds = outcome.value
    assert "rank 1" in text and seconds < 20.0, outcome.describe()


def one_stays_away(rank: int, world: int) -> str:
    """Rank 1 runs no model; the error of rank 0, which runs its first."""
    own_device(rank)
    mesh = init_device_mesh("cuda", (world,))
    fully_shard(Exact().to("cuda"), mesh=mesh)
    if rank == 0:
        with pytest.raises(WaitTimeoutError) as late:
            step(rank, world, Settings(timeout_s=3.0, memory="nvshmem"), mesh)
        assert late.value.culprit == 1, "it is the late rank's fault"
    dist.barrier()
    return str(late.value) if rank == 0 else ""


def test_a_rank_that_runs_no_model_is_named(ranks: Callable[[int], Any]) -> None:
    with spawn_ranks(2, one_stays_away) as job:
        outcome = job.wait(120)[0]
    expected = "rank 0, waiting for all 2 ranks of the job to run their first model.*: rank 1 has not in 5 s"
    assert re.search(expected, str(outcome.value)), outcome.describe()


# what the stand-in refuses --------------------------------------------------------------------------------------------


def breaks_a_rule(rank: int, world: int, rule: str) -> None:
    device = own_device(rank)
    step(rank, world, Settings(timeout_s=60.0, memory="nvshmem"))
    library, stream = nvshmem.started(), torch.cuda.current_stream().cuda_stream
    assert library is not None
    bindings: Any = library._bindings
    outside = torch.zeros(64, dtype=torch.uint8, device=device)
    if rank == 1:
        dist.barrier()
    elif rule == "buffer":
        bindings.getmem_nbi_on_stream(outside.data_ptr(), library.base, 64, 1, stream)
    elif rule == "source":
        bindings.getmem_nbi_on_stream(library.base, outside.data_ptr(), 64, 1, stream)
    elif rule == "peer's pointer":
        bindings.getmem_nbi_on_stream(library.pointer(library.base, 1), library.base, 64, 1, stream)
    elif rule == "another host":
        library.pointer(library.base, 1)
    elif rule == "two at a time":
        threading.Thread(target=allocates, args=(device,), daemon=True).start()  # until rank 1 does, too
        time.sleep(1.0)
        library.pointer(library.base, 1)
    dist.barrier()


def allocates(device: torch.device) -> None:
    torch.zeros(1, device=device)
    host = ctypes.CDLL(None)  # its calls give Python's lock back
    host.nvshmem_malloc.argtypes = [ctypes.c_size_t]
    host.nvshmem_malloc(64)


RULES = {
    "buffer": "a get into memory that is not in its heap",
    "source": "a get from what is no symmetric address",
    "peer's pointer": "a get into memory that is not in its heap",
    "two at a time": "nvshmem_(malloc|ptr) .*while another thread is in a host call",
    "another host": "nvshmem_ptr of PE 1, which is on another host",
}


@pytest.mark.parametrize("rule", RULES)
def test_the_stand_in_ends_a_process_that_breaks_a_rule(request: pytest.FixtureRequest, rule: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")
    if "libemulated_nvshmem" not in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("about the stand-in, which tests/emulated/run.sh loads")
    job: contextlib.AbstractContextManager[RankProcesses] = spawn_ranks(2, breaks_a_rule, rule)
    if rule == "another host":
        job = spawn_on_hosts(request.getfixturevalue("two"), 1, breaks_a_rule, rule)
    with job as running:
        until_ended(running, [0])
        running.kill(1)
        outcome = running.wait(60)[0]
    assert outcome.exit_code == 70, outcome.describe()
    assert re.search(f"emulated NVSHMEM, PE 0: .*{RULES[rule]}", outcome.describe()), outcome.describe()
