"""A rank that ends before its peers' first minibatch, perhaps with the job's store, however the job was started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ports import free_ports

WORLD = 3
PATIENCE_S = 400.0

PROGRAM = """
import os, resource, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist, torch.multiprocessing as mp
from odc import Settings, fully_shard

HERE, START, FAULT, WORLD = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
LEFT = 2  # for torch, which imports modules late

def use_up_descriptors():
    hard, taken = resource.getrlimit(resource.RLIMIT_NOFILE)[1], []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        while True:
            taken.append(os.dup(1))
    except OSError:
        for fd in taken[:LEFT]:
            os.close(fd)

def train(rank):
    options = {"timeout": timedelta(seconds=600), "rank": rank, "world_size": WORLD}
    if START == "file":
        options["init_method"] = f"file://{HERE}/store"
    dist.init_process_group("gloo", **options)
    model = torch.nn.Linear(8, 8)
    if FAULT == "no descriptors" and rank == WORLD - 1:
        use_up_descriptors()
    fully_shard(model, settings=Settings(timeout_s=120.0))
    (HERE / f"ready{rank}").write_text("yes")
    while FAULT == "killed" and not (HERE / "go").exists():
        time.sleep(0.01)
    model(torch.ones(2, 8)).sum().backward()

def note(rank):
    (HERE / f"pid{rank}").write_text(str(os.getpid()))
    raised = open(HERE / f"error{rank}", "w")
    try:
        train(rank)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=raised, flush=True)
        raise

if __name__ == "__main__":
    if START == "spawn":
        for process in mp.spawn(note, args=(), nprocs=WORLD, join=False).processes:
            process.join()
    else:
        note(int(os.environ["RANK"]))
"""


class Started:
    """A job of `WORLD` ranks; what rank N has raised is in `errorN`."""

    def __init__(self, folder: Path, start: str, fault: str, open_: contextlib.ExitStack) -> None:
        self.folder = folder
        (folder / "program.py").write_text(PROGRAM)
        (port,) = free_ports(1)
        program = [str(folder / "program.py"), str(folder), start, fault, str(WORLD)]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD)}
        torchrun = ["-m", "torch.distributed.run", "--master-port", str(port), "--nproc-per-node", str(WORLD)]
        commands = {"torchrun": [torchrun + program], "spawn": [program]}.get(start, [program] * WORLD)
        self.processes = [
            open_.enter_context(
                subprocess.Popen(
                    [sys.executable, *command],
                    env={**os.environ, **where, "RANK": str(number)},
                    stdout=open_.enter_context((folder / f"output{number}").open("w")),
                    stderr=subprocess.STDOUT,
                )
            )
            for number, command in enumerate(commands)
        ]
        open_.callback(self.end)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for rank in range(WORLD):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self.folder / f"pid{rank}").read_text()), signal.SIGKILL)

    def text(self, name: str) -> str:
        """What is in a file of the job once something is."""
        deadline = time.monotonic() + PATIENCE_S
        while not ((path := self.folder / name).exists() and path.read_text()):
            assert time.monotonic() < deadline, self.outputs()
            time.sleep(0.05)
        return path.read_text()

    def outputs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("output*")))


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    "start", ["env", *(pytest.param(s, marks=pytest.mark.thorough) for s in ("spawn", "torchrun", "file"))]
)
def test_the_end_of_the_stores_host_before_the_first_minibatch_is_named(
    tmp_path: Path, opened: contextlib.ExitStack, start: str
) -> None:
    """Rank 0 hosts the store; under torchrun the launcher does, and a file needs no host."""
    job = Started(tmp_path, start, "killed", opened)
    for rank in range(WORLD):
        job.text(f"ready{rank}")
    os.kill(job.processes[0].pid if start == "torchrun" else int(job.text("pid0")), signal.SIGKILL)
    if start != "spawn":
        job.processes[0].wait()
    (tmp_path / "go").write_text("go")
    for rank in range(1, WORLD):
        message = job.text(f"error{rank}")
        assert message.startswith("PeerLostError: "), message
        who = {"torchrun": "the process that hosts it (the launcher)", "file": "rank 0"}.get(
            start, "the process that hosts it (rank 0, unless a launcher does)"
        )
        assert who in message, message


@pytest.mark.parametrize("start", ["env", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_a_rank_that_fails_in_its_first_fully_shard_is_announced_with_its_reason(
    tmp_path: Path, opened: contextlib.ExitStack, start: str
) -> None:
    job = Started(tmp_path, start, "no descriptors", opened)
    cure = "Too many open files); raise this process's limit of open files (ulimit -n)"
    for rank in range(WORLD):
        message = job.text(f"error{rank}")
        assert cure in message, message
        assert message.startswith("UnsupportedError: rank 2" if rank == 2 else "PeerLostError: "), message
        if rank != 2:  # under spawn, storing the error for the parent fails too, as it opens a file
            assert "aborted by rank 2: " in message, message
            assert "UnsupportedError: rank 2 cannot start its server daemon" in message, message
