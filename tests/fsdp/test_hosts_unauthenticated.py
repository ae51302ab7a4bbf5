"""A peer that connects to a rank's listener without the job's secret gets no byte of a heap, and stops nothing."""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.host_ranks import HostRanks, spawn_on_hosts
from support.hosts import NETWORK, Host, Hosts, enter_namespaces, need_hosts
from support.rank_worker import report
from torch import nn

from odc import Settings, fully_shard
from odc.net.handshake import hello as hello_of
from odc.net.network import HostNetwork

HELLO = len(hello_of(0, ""))  # of the listener: its nonce and rank
NO_LINGER = struct.pack("ii", 1, 0)  # close by a reset, or 10,000 connections use up many ports


def train_until(rank: int, world: int, stop: str) -> tuple[int, float]:
    """Minibatches until the file `stop` is there; how many, and the sum of all weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    for layer in model:
        fully_shard(layer, settings=Settings(timeout_s=60.0))
    fully_shard(model, settings=Settings(timeout_s=60.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps, ended = 0, False
    while not ended:
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(steps * world + rank))
        with model.minibatch():
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps == 1:
            (network,) = [one for one in gc.get_objects() if isinstance(one, HostNetwork)]
            report(network.address)
        # All ranks must see the file before the same step: rank 0 decides.
        flag = torch.tensor([float(Path(stop).exists())])
        torch.distributed.broadcast(flag, 0)
        ended = bool(flag)
    return steps, float(sum(p.full_tensor().double().sum() for p in model.state_dict().values()))


def hello(draw: random.Random, purpose: str) -> bytes:
    """A hello like that of a rank, by one that does not know the secret."""
    return hello_of(draw.randrange(4), purpose)


PEERS: tuple[Callable[[random.Random], list[bytes]], ...] = (
    lambda draw: [],
    lambda draw: [draw.randbytes(draw.randrange(1, 400))],
    lambda draw: [draw.randbytes(HELLO), draw.randbytes(200)],
    lambda draw: [hello(draw, "read")[: draw.randrange(1, HELLO)]],
    lambda draw: [hello(draw, draw.choice(("read", "link", "")))],
    lambda draw: [hello(draw, "read"), draw.randbytes(32)],
    lambda draw: [hello(draw, "read"), bytes(32), b"read" + bytes(32)],
    lambda draw: [b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n"],
)


def connect(address: tuple[str, int], number: int, patient: bool) -> bytes:
    """One connection that sends something; what it receives, if it waits for that."""
    draw, received = random.Random(number), b""
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        peer.settimeout(60.0)
        with contextlib.suppress(ConnectionError):
            peer.connect(address)
            for sent in PEERS[number % len(PEERS)](draw):
                peer.sendall(sent)
            while patient and (more := peer.recv(4096)):
                received += more
    return received


def fuzz(host: Host, address: tuple[str, int], count: int, silent: int) -> list[bytes]:
    """What one peer of each kind receives; `count` others wait for nothing, and `silent` ones stay for long."""
    for number in range(count):
        connect(address, number, patient=False)
    with (
        contextlib.ExitStack() as stay,
        ThreadPoolExecutor(len(PEERS), initializer=enter_namespaces, initargs=(host.pid, NETWORK)) as threads,
    ):
        for _ in range(silent):
            stay.enter_context(socket.create_connection(address))
        return list(threads.map(lambda number: connect(address, number, patient=True), range(len(PEERS))))


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_peers_without_the_secret(tmp_path: Path, count: int) -> None:
    need_hosts()
    stop = tmp_path / "stop"
    with Hosts(2) as hosts, spawn_on_hosts(hosts, 1, train_until, str(stop)) as job:
        job.until_reported(1)
        (address,) = job.outcomes[0].reports
        received = hosts[1].within(lambda: fuzz(hosts[1], tuple(address), count, silent=200))
        stop.touch()
        outcomes = answers(job)
    assert max(len(one) for one in received) == HELLO, "a peer receives a nonce and a rank"
    assert not any(outcome.error for outcome in job.outcomes), [outcome.describe() for outcome in job.outcomes]
    assert outcomes[0] == outcomes[1], "both ranks have trained alike"
    assert outcomes[0][0] > 1


def answers(job: HostRanks) -> list[tuple[int, float]]:
    while any(not outcome.answered and outcome.exit_code is None for outcome in job.outcomes):
        job.receive(0.1)
    return [outcome.value for outcome in job.outcomes]
