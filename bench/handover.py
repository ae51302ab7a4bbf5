"""Reading all weights from outside the job: the rate against memcpy, and what a reader costs the job's steps.

`python -m bench.handover` makes two tables. Two ranks hold the model, and a third process, which is no rank, reads.

The rate compares a full `Reader.read` into existing tensors ("kept") and into new ones ("fresh") with a memcpy of the
same bytes, tensor by tensor, from that process's memory into the same kind of destination. Rounds alternate while
the job stands still. Target: 0.5 of memcpy.

The steps are minibatches whose compute is emulated (slept) and whose communication is real, in alternating rounds with
and without a reader that fetches in a loop. Target: within 3%.

`python -m bench.handover --far`, as root, makes a third table instead. The model of `bench.changes` is trained by two
ranks of one host, and a process on another host, a network namespace as well, reads its weights after every step, or
every third. Jobs with Settings(changes="off") and "on" take turns. "weights" are the bytes that leave the host in a
read.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from bench.script import Script
from bench.turns import in_turns
from odc.bench.ranks import RankPool, held

MIB = 1 << 20
_WIDTH = 1024  # of a unit: one fp32 matrix of 4 MiB
_SETTLE_S = 0.2  # after an order to the reader to start or stop


class Layer(nn.Module):
    """A unit of 4 MiB and two vectors, whose time is slept: a third in forward, two thirds in backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH, bias=False)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds / 3)
        y: torch.Tensor = self.norm(self.linear(x))
        if y.requires_grad:
            y.register_hook(lambda gradient: time.sleep(self.seconds * 2 / 3))
        return y


def build(units: int, seconds: float, second_buffer: bool) -> str:
    """Builds the model and publishes a first version; returns the weight handle. Every rank calls it."""
    from odc import Settings, fully_shard
    from odc.fsdp import live_roots
    from odc.handover import weight_handle

    for root in live_roots():
        root.shut_down()()
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Layer(seconds / units) for _ in range(units)))
    settings = Settings(second_buffer=second_buffer)
    for layer in model:
        fully_shard(layer, settings=settings)
    held.model = fully_shard(model, settings=settings)
    held.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    held.model.publish()
    return weight_handle(held.model)


def steps(count: int) -> list[float]:
    """Seconds of each of `count` minibatches of one microbatch, updates included. Every rank calls it."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        with held.model.minibatch():
            held.model(torch.ones(1, _WIDTH)).sum().backward()
        held.optimizer.step()
        held.optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    return times


def follow(pipe: Connection, handle: str) -> None:
    """Follows the orders of the pipe: ("rates", rounds), "start", "stop" or "end"."""
    from odc.errors import StaleVersionError
    from odc.handover import Reader

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with Reader(handle) as reader:
        into = reader.read().tensors
        while (order := pipe.recv()) != "end":
            if order != "start":
                pipe.send(rates(reader, into, order[1]))
                continue
            reads = stale = 0
            begin = time.perf_counter()
            while not pipe.poll():
                try:
                    reader.read(into)
                    reads += 1
                except StaleVersionError:
                    stale += 1
            pipe.recv()
            pipe.send({"reads": reads, "stale": stale, "seconds": time.perf_counter() - begin})


def rates(reader: Any, into: dict[str, torch.Tensor], rounds: int) -> list[dict[str, Any]]:
    """One row for kept and one for fresh destinations; fetch and memcpy alternate."""
    sources = {name: tensor.clone() for name, tensor in into.items()}
    nbytes = sum(tensor.nbytes for tensor in into.values())

    def memcpy(kept: bool) -> None:
        for name, source in sources.items():
            destination = into[name] if kept else torch.empty_like(source)
            ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.nbytes)
            if not kept:
                fresh.append(destination)

    rows, fresh = [], list[torch.Tensor]()
    for pages in ("kept", "fresh"):
        kept = pages == "kept"
        read = functools.partial(reader.read, into if kept else None)
        times = in_turns({"read": read, "memcpy": functools.partial(memcpy, kept)}, rounds, after=fresh.clear, warm=1)
        fetch, copy = median(times["read"]), median(times["memcpy"])
        rows.append({"pages": pages, "MiB": nbytes / MIB, "fetch_ms": fetch * 1e3, "memcpy_ms": copy * 1e3,
                     "ratio": copy / fetch, "fetch_GBps": nbytes / fetch / 1e9, "rounds": rounds})  # fmt: skip
    return rows


class Outsider:
    """The reading process: `function(pipe, *given)` follows orders until "end"."""

    def __init__(self, function: Callable[..., None], *given: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=function, args=(theirs, *given), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, order: Any) -> Any:
        self.pipe.send(order)
        return self.answer(order)

    def answer(self, order: Any, timeout_s: float = 600.0) -> Any:
        """What the process sends next, in answer to `order`."""
        if not self.pipe.poll(timeout_s):
            raise TimeoutError(f"the reader did not answer {order!r}")
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.send("end")
        self.process.join(30)


def rate_rows(pool: RankPool, mibs: list[int], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for mib in mibs:
        outsider = Outsider(follow, pool.each(build, mib // 4, 0.0, False)[0])
        rows += outsider.ask(("rates", rounds))
        outsider.end()
        print(f"{mib} MiB: {[round(row['ratio'], 2) for row in rows[-2:]]} of memcpy", file=sys.stderr)
    return rows


def step_row(pool: RankPool, mib: int, seconds: float, second_buffer: bool, pairs: int, count: int) -> dict[str, Any]:
    """Runs `pairs` rounds of `count` steps, each without and then with a reader."""
    outsider = Outsider(follow, pool.each(build, mib // 4, seconds, second_buffer)[0])
    pool.each(steps, 2)
    alone, read, loops = [], [], []
    for _ in range(pairs):
        alone += pool.each(steps, count)[0]
        outsider.pipe.send("start")
        time.sleep(_SETTLE_S)
        read += pool.each(steps, count)[0]
        loops.append(outsider.ask("stop"))
        time.sleep(_SETTLE_S)
    outsider.end()
    reads, spent = sum(loop["reads"] for loop in loops), sum(loop["seconds"] for loop in loops)
    return {
        "MiB": mib,
        "buffers": 1 + second_buffer,
        "slept_s": seconds,
        "alone_s": median(alone),
        "read_s": median(read),
        "read/alone": median(read) / median(alone),
        "reads a step": reads * median(read) / spent,
        "given up": sum(loop["stale"] for loop in loops),
        "steps": len(read),
    }


# a reader on another host ---------------------------------------------------------------------------------------------

FAR_ARMS = {"whole": 1, "changes": 1, "changes, every third": 3}  # steps between two reads
_far: dict[str, Any] = {}  # of this process, by arm: a model, or a reader and its tensors


def build_far(rank: int, world: int, arm: str, given: tuple[Any, ...], warmup: int) -> str:
    """On every rank: a model, trained at a high rate; returns its weight handle."""
    from bench.changes import HIGH_RATE, Trained
    from odc.handover import weight_handle

    made = _far[arm] = Trained(arm.split(",")[0], *given)
    for _ in range(warmup):
        made.step(HIGH_RATE, rank, world)
    made.model.publish()
    return weight_handle(made.model)


def train_far(rank: int, world: int, arm: str, rate: float, count: int) -> tuple[float, float]:
    """On every rank: as many steps; seconds of the last, and of publishing it, on this rank."""
    begin = published = 0.0
    for _ in range(count):
        begin = time.perf_counter()
        _far[arm].step(rate, rank, world)
        published = time.perf_counter()
        _far[arm].model.publish()
    return published - begin, time.perf_counter() - published


def read_far(rank: int, world: int, arm: str, handle: str) -> float:
    """In the reading process: seconds of a read into the tensors of the last."""
    from odc.handover import Reader

    if arm not in _far:
        reader = Reader(handle)
        _far[arm] = reader, reader.read().tensors
    reader, into = _far[arm]
    begin = time.perf_counter()
    reader.read(into)
    return time.perf_counter() - begin


def far_rows(warmup: int, repeats: int, link: str) -> list[dict[str, Any]]:
    """Every arm at every rate."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the hosts are those of the tests
    from support.host_ranks import HostPool
    from support.hosts import Hosts, Part

    from bench.changes import RATES, text

    rows, ids = list[dict[str, Any]](), text()
    with Hosts(2) as hosts:
        job, outside = HostPool(Part(hosts, 0, 1), 2), HostPool(Part(hosts, 1, 1), 1)
        given = ids, 32, hosts[0].address
        handles = {arm: job.run(build_far, arm, given, warmup)[0] for arm in FAR_ARMS}
        if link != "none":
            hosts.shape(link)
        for rate in RATES:
            found: dict[str, list[tuple[float, ...]]] = {arm: [] for arm in FAR_ARMS}
            for repeat in range(1 + repeats):
                for arm, every in FAR_ARMS.items():
                    step = job.run(train_far, arm, rate, every)[0]
                    before = hosts[0].counted()[0]
                    seconds = outside.run(read_far, arm, handles[arm])[0]
                    if repeat:
                        found[arm].append((hosts[0].counted()[0] - before, seconds, *step))
            rows += [_far_row(link, rate, arm, found) for arm in FAR_ARMS]
        outside.close()
        job.close()
    return rows


def _far_row(link: str, rate: float, arm: str, found: dict[str, list[tuple[float, ...]]]) -> dict[str, Any]:
    out, read, step, publish = (median(column) for column in zip(*found[arm], strict=True))
    row = {"link": link, "learning rate": rate, "arm": arm, "weights, MB": out / 1e6,
           "of whole": out / median(one for one, *_ in found["whole"]), "read, s": read,
           "step, s": step, "publish, s": publish}  # fmt: skip
    print(row, file=sys.stderr, flush=True)
    return row


def main() -> None:
    script = Script(
        __doc__,
        mib=([32, 128, 512], "sizes of models whose rate is taken"),
        rounds=(15, "of each rate"),
        seconds=(0.5, "slept in a step"),
        pairs=(6, "rounds with and without a reader"),
        steps=(8, "of one round"),
        far=(False, "measure a reader on another host instead"),
        warmup=(20, "steps at a high rate, of a far reader's job"),
        repeats=(5, "reads of each arm at each rate, by a far reader"),
        link=("1gbit", "of a far reader, as tc has it, or none"),
    )
    given = script.given
    if given.far:
        rows = far_rows(given.warmup, given.repeats, given.link)
        script.store("handover_far", "Weights for a reader on another host, whole or as their changes", rows)
        return
    with RankPool(2, timeout_s=1800) as pool:
        rates_ = rate_rows(pool, given.mib, given.rounds)
        loads = [
            step_row(pool, min(given.mib), given.seconds, second, given.pairs, given.steps) for second in (False, True)
        ]
    script.store("handover", "A full fetch from outside the job against memcpy of the same tensors", rates_)
    script.store("handover_steps", "The job's steps with a reader that fetches in a loop, compute emulated", loads)


if __name__ == "__main__":
    main()
