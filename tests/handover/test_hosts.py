"""Readers on other hosts (namespaces of this machine) than the ranks whose weights they read."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.far_readers import Moved
from support.handover_jobs import Numbered, changed, read_a_trained_model, second_dimension_first
from support.host_ranks import spawn_on_hosts
from support.hosts import Hosts, Part, need_hosts
from support.models import Case, build, make, next_token_loss, shard, tokens
from support.on_ranks import on_hosts
from support.programs import backward
from support.rank_worker import report
from torch.distributed.device_mesh import init_device_mesh

from odc import Settings, fully_shard
from odc.errors import PeerLostError, UnsupportedError
from odc.fsdp import root_of
from odc.handover import Reader, version, weight_handle
from odc.handover.handle import WeightHandle
from odc.net.engines.connections import no_check
from odc.net.engines.nixl import EXTRA, installed
from odc.net.engines.server import DESCRIBE, REFUSED, request
from odc.net.handshake import READER, link_purpose
from odc.net.network import dial
from odc.protocol.words import VERSION_WORDS, VERSIONS_KEPT
from odc.runtime.linking import BOARD, READER_WORDS, board_name
from odc.settings import Changes

HostPools = Callable[[int, int], Any]
CASES = {
    "plain": (Case(counts=((1,),)), {}),
    "low precision": (Case(counts=((1,),), low_precision=True), {}),
    "second dimension": (Case(counts=((1,),)), {"shard_placement_fn": second_dimension_first}),
}


@pytest.mark.parametrize("name", ["plain", *(pytest.param(n, marks=pytest.mark.thorough) for n in list(CASES)[1:])])
def test_a_reader_gets_the_shards_of_other_hosts_too(host_ranks: HostPools, name: str) -> None:
    host_ranks(2, 2).run(read_a_trained_model, *CASES[name])


@on_hosts(2, 2)
def test_a_reader_that_is_not_admitted_learns_why(rank: int, world: int) -> None:
    models = [build(fully_shard, CASES["plain"][0], init_device_mesh("cpu", (world,))) for _ in range(2)]
    for model in models:
        model.publish()
    handle, another = (weight_handle(model) for model in models)
    with pytest.raises(PeerLostError, match=r"reader, .*: rank \d|reader, connecting to rank \d .* hung up"):
        Reader(changed(handle, secret=secrets.token_hex(32)))
    owners = json.loads(handle)["owners"]
    with pytest.raises(
        UnsupportedError, match=r"rank \d is on another host, .* set Settings\(address=...\) in its job"
    ):
        Reader(changed(handle, owners=[{**one, "listener": None} for one in owners]))
    with Reader(handle) as reader:  # its secret opens the weights of this root and nothing else
        engine = reader._engine
        assert engine is not None
        other, region = (rank + world // 2) % world, json.loads(another)["root"]
        with pytest.raises(PeerLostError, match="exposes no 8 bytes"):
            engine.sockets.read(other, region, 0, torch.zeros(8, dtype=torch.uint8))
        with pytest.raises(PeerLostError, match="does not answer"):
            engine.sockets.ask(other, f"{region}/board")
        first = json.loads(handle)["parameters"][0]["offset"]
        engine.sockets.read(other, json.loads(handle)["root"], first, torch.zeros(8, dtype=torch.uint8))
    dist.barrier()


def wrong_reads(region: range, published: range) -> list[tuple[int, int]]:
    """(offset, bytes) at both ends of a region, and across the ends of what may be read."""
    found = [(region.start, 8), (region.stop - 8, 8), (region.start, len(region))]
    return [*found, (published.start - 8, 16), (published.stop - 8, 16), (0, published.stop), (1 << 63, 8)]


def read_what_is_private(rank: int, world: int, engine: str) -> None:
    """Every rank reads from one on the other host, with a weight handle alone."""
    settings = Settings(timeout_s=60.0, queue_bytes=1 << 12, engine=engine)  # type: ignore[arg-type]
    model: Any = build(fully_shard, CASES["plain"][0], init_device_mesh("cpu", (world,)), settings=settings)
    with model.minibatch():
        for x in model.claim([{"x": tokens(rank, 0, n)} for n in range(2)]):
            (next_token_loss(model(x["x"]), x["x"]) / 18).backward()
    handle = WeightHandle.from_json(weight_handle(model))
    heap = root_of(model).layout.heap
    places = {one.name: range(*_place(heap.layout, one.name)) for one in heap.layout.requests}
    open_to_all = {
        name: place for name, place in places.items() if name.startswith(("published/", "changes/", "versions"))
    }
    published = range(min(one.start for one in open_to_all.values()), max(one.stop for one in open_to_all.values()))
    private = {name: place for name, place in places.items() if name not in open_to_all}
    assert {"published/0", "changes/0", "versions"} <= open_to_all.keys()
    assert private.keys() >= {"queue", "claimed", "board", "reason", "abandoned", "pushes", "arrived/0", "heap/layout"}
    assert private.keys() >= {"accumulator/0", "mirror/versions", "cache/0/0"}
    assert not [
        name for name, place in private.items() if place.start < published.stop and place.stop > published.start
    ]
    other = (rank + world // 2) % world
    with Reader(handle.to_json()) as reader:
        assert reader._engine is not None
        sockets = reader._engine.sockets
        for name, place in private.items():
            for offset, nbytes in wrong_reads(place, published):
                with pytest.raises(PeerLostError, match="exposes no"):
                    sockets.read(other, handle.root, offset, torch.zeros(nbytes, dtype=torch.uint8), what=name)
        for place in open_to_all.values():
            sockets.read(other, handle.root, place.start, torch.zeros(len(place), dtype=torch.uint8))
        for suffix in ("/claim", "/claims"):
            with pytest.raises(PeerLostError, match="does not answer"):
                sockets.ask(other, handle.root + suffix)
        answer = sockets.ask(other, board_name(handle.root))
        with sockets._connections.lend(other, "what would open more", no_check) as answers:
            assert answers.ask(request(DESCRIBE, handle.root), memoryview(b"")) == REFUSED
    assert len(answer) == BOARD.size and len(READER_WORDS) == 5, (
        "no more than readers need, and no text of a job that runs"
    )
    for purpose in ("read", "watch", link_purpose(handle.root)):
        with pytest.raises(PeerLostError, match="hung up"):
            dial(handle.owners[other].listener, bytes.fromhex(handle.secret), READER, other, purpose, 60.0)
    dist.barrier()


def _place(layout: Any, name: str) -> tuple[int, int]:
    return layout.offset(name), layout.offset(name) + layout.size(name)


@pytest.mark.parametrize(
    "engine",
    ["sockets", pytest.param("nixl", marks=pytest.mark.skipif(installed() is None, reason=f"needs NIXL: {EXTRA}"))],
)
def test_a_weight_handle_opens_the_published_shards_and_their_changes_and_no_other_byte(
    host_ranks: HostPools, engine: str
) -> None:
    host_ranks(2, 2).run(read_what_is_private, engine)


@on_hosts(2, 1)
def test_after_each_of_fifty_steps_a_reader_gets_the_state_dict_and_moves_a_fifth_of_it(rank: int, world: int) -> None:
    """Every rank reads the other's shards: after a step by AdamW, and without one, when nothing crosses."""
    case = Case(counts=((1,),), low_precision=True, frozen="layer", layers=3)
    model = shard(fully_shard, make(case, width=192), case, init_device_mesh("cpu", (world,)), settings=PACKING)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-5)
    model.publish()
    with Reader(weight_handle(model)) as reader:
        reader.read()
        moved, whole = Moved(reader), sum(one.nbytes for one in reader._handle.parameters)
        words = VERSIONS_KEPT * len(root_of(model).layout.units) * VERSION_WORDS * 8
        for step in range(50):
            with model.minibatch():
                backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
            model.publish()
            whole_weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
            number, tensors = reader.read(at_least=version(model))
            assert number == version(model) and tensors.keys() == whole_weights.keys()
            wrong = [name for name, one in whole_weights.items() if not torch.equal(tensors[name], one.bfloat16())]
            assert not wrong, (step, wrong)
            assert 0 < moved.taken() - words < 0.2 * whole
            if step % 10 == 0:
                model.publish()
                reader.read(at_least=version(model))
                assert moved.taken() == words
            dist.barrier()


PACKING = Settings(timeout_s=60.0, changes="on")


READ = """
import json, sys
from odc.errors import PeerLostError
from odc.handover import Reader

try:
    version = 0
    with Reader(open(sys.argv[1]).read(), tries=1000) as reader:
        while True:
            version, tensors = reader.read(at_least=version + 1)
            numbers = {float(one) for tensor in tensors.values() for one in tensor.unique()}
            assert numbers == {float(version)}, (version, numbers)
            print(version, flush=True)
except PeerLostError as error:
    print(error, flush=True)
"""


def publish_now_and_then(rank: int, world: int, settings: Settings) -> None:
    model = Numbered(16)
    for layer in (model.first, model.second):
        fully_shard(layer, settings=settings)
    sharded: Any = fully_shard(model, settings=settings)
    for number in range(1, 100_000):
        model.fill(number)
        sharded.publish()
        if number == 1 and rank == 0:
            report(weight_handle(sharded))
        time.sleep(0.05)


@pytest.mark.thorough
@pytest.mark.parametrize(("job_hosts", "changes"), [(1, "auto"), (1, "on"), (2, "auto")])
def test_a_process_on_a_host_without_ranks_reads_whole_versions_until_a_rank_dies(
    tmp_path: Path, job_hosts: int, changes: Changes
) -> None:
    """A job on one host listens as it has an address."""
    need_hosts()
    with Hosts(3) as hosts:
        settings = Settings(timeout_s=60.0, address="" if job_hosts > 1 else hosts[0].address, changes=changes)
        with spawn_on_hosts(Part(hosts, 0, job_hosts), 2, publish_now_and_then, settings) as job:
            job.until_reported(1, [0])
            (tmp_path / "handle").write_text(job.outcomes[0].reports[0])
            (tmp_path / "read.py").write_text(READ)
            with hosts[2].command(sys.executable, str(tmp_path / "read.py"), str(tmp_path / "handle")) as reader:
                assert reader.stdout is not None
                lines = [reader.stdout.readline().strip() for _ in range(20)]
                job.kill(1)
                begin = time.monotonic()
                lines += reader.stdout.read().splitlines()
    assert all(line.isdigit() for line in lines[:20]), "\n".join(lines)
    versions = [int(line) for line in lines[:20]]
    assert versions == sorted(set(versions)) and versions[0] > 0
    print(f"named {time.monotonic() - begin:.2f} s later: {lines[-1]}")
    assert lines[-1].startswith("reader, "), lines[-1]
