"""The program of a rank of `bench.recovery`: trains, dies where it is to die, and notes when it did what.

    python -m bench.recovery_job FOLDER STEPS WAY KILLS       under a launcher

WAY is "checkpoints", or the `keep` of odc.Recovery. KILLS are steps with commas between them, in whose forward rank 1
dies once each. Notes are lines of FOLDER/RANK.jsonl, timed by the clock that all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()  # before anything that takes time is imported

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  (the first fully_shard does it otherwise, within what is timed)
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import odc  # noqa: E402
from odc import Recovery, fully_shard  # noqa: E402  (odc loads them when they are named; every way pays for both)

IMPORTED = time.monotonic()
WIDTH, LAYERS, TOKENS, BATCH = 256, 4, 64, 12
EVERY = 10  # steps between two checkpoints


class Notes:
    """What this process did, and when."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._lines = (folder / f"{rank}.jsonl").open("a")

    def add(self, what: str, step: int = -1, at: float | None = None, **more: Any) -> None:
        self._lines.write(json.dumps({"what": what, "step": step, "at": at or time.monotonic(), **more}) + "\n")
        self._lines.flush()

    @contextlib.contextmanager
    def during(self, step: int) -> Iterator[None]:
        """The begin of a step; at its end what this host has sent; or when another rank's end came to light in it."""
        self.add("begin", step)
        try:
            yield
        except BaseException:
            self.add("lost", step)
            raise
        self.add("end", step, sent=sent())


def sent() -> int:
    """Bytes that all devices of this host but the loopback have sent, as they count them, with all headers."""
    lines = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(numbers.split()[8]) for name, numbers in lines if name.strip() != "lo")


def model_of() -> nn.TransformerEncoder:
    """The same in every process."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)


class Job:
    """One rank's model, and its step."""

    def __init__(self, folder: Path, kills: list[int], notes: Notes, rank: int) -> None:
        self._folder, self._kills, self._notes, self._rank = folder, kills, notes, rank
        self.model = model_of()
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, number: int) -> None:
        loss = self.model(torch.randn(BATCH, TOKENS, WIDTH)).square().mean()
        killed = self._folder / f"killed.{number}"
        if self._rank == 1 and number in self._kills and not killed.exists():
            killed.touch()
            self._notes.add("killed", number)
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, done: int) -> None:
        """A checkpoint of this rank's shards; whole once every rank has its file."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "done": done}
        beside = self._folder / f"checkpoint.{self._rank}.partial"
        torch.save(state, beside)
        beside.rename(self._folder / f"checkpoint.{self._rank}.{done}")
        dist.barrier()

    def load(self) -> int:
        """The newest checkpoint that every rank has; returns the steps that are done."""
        found = [
            {int(path.suffix[1:]) for path in self._folder.glob(f"checkpoint.{rank}.*") if path.suffix[1:].isdigit()}
            for rank in range(dist.get_world_size())
        ]
        if not (common := set.intersection(*found)):
            return 0
        state = torch.load(self._folder / f"checkpoint.{self._rank}.{max(common)}", weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return max(common)


def train(folder: str, steps: int, way: Any, kills: list[int]) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    notes = Notes(Path(folder), rank)
    notes.add("began", at=BEGAN)
    notes.add("imported", at=IMPORTED)
    if way != "checkpoints":
        recovery = Recovery(rejoin_s=120, keep=way)
        job = Job(Path(folder), kills, notes, rank)
        recovery.protect(job.model, job.optimizer)
        notes.add("ready", recovery.step)
        for number in recovery.steps(steps):
            with recovery.attempt(), notes.during(number):
                job.step(number)
        return
    dist.init_process_group("gloo")
    job = Job(Path(folder), kills, notes, rank)
    first = job.load()
    notes.add("ready", first)
    for number in range(first, steps):
        with notes.during(number):
            job.step(number)
        if (number + 1) % EVERY == 0:
            job.save(number + 1)
    dist.barrier()
    odc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), sys.argv[3], [int(one) for one in sys.argv[4].split(",") if one])
