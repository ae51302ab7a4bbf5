"""Run functions on rank processes: pools that live as long as the tests, and one-shot ranks that may be killed.

Chose to keep one pool of ranks a world size alive, its process group initialised once, over processes a test: most
tests need no more than a function run on every rank. A pool in which any rank failed is killed whole and rebuilt, so no
test sees what another left behind. Functions are module-level in a test module and take `(rank, world, *args)`; inside
them plain `assert` says nothing of its operands, so give it a message.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

_OUTPUT_SHOWN = 6000  # last characters of a rank's output shown in a failure
# A guard against hangs, below pytest's own so that a failure shows the ranks' stacks; a busy machine never reaches it.
_PATIENCE_S = 600.0
_GRACE_S = 10.0  # for the other ranks' words once one has failed

Environment = tuple[tuple[str, str], ...]  # variables and their values
INTERPRETED: Environment = (("TRITON_INTERPRET", "1"),)
# What ranks import when the collected tests have imported the key: the nursery does it once for all of them.
_ALSO_PRELOADED = {
    "transformers": ("transformers.models.auto.modeling_auto", "transformers.models.qwen2.modeling_qwen2"),
}


class RanksFailed(AssertionError):
    """One or more ranks raised, died or did not answer; the message has each one's traceback or output."""


@dataclass
class Outcome:
    """How one rank ended.

    Attributes:
        exit_code: of the process; negative a signal's number; None while it lives.
        value: what the function returned.
        error: name of the exception's type, None without one.
        message: of the exception.
        at: `time.monotonic()` when the exception had left the function; comparable between processes.
        told: what the rank passed to `tell`.
        output: its stdout and stderr.
    """

    rank: int
    pid: int
    exit_code: int | None = None
    value: Any = None
    error: str | None = None
    message: str = ""
    trace: str = ""
    at: float = 0.0
    told: list[Any] = field(default_factory=list)
    output: str = ""
    answered: bool = False

    def note(self, kind: str, value: Any) -> None:
        """Take in what the rank sent."""
        if kind == "told":
            self.told.append(value)
            return
        self.answered = True
        if kind == "returned":
            self.value = value
        else:
            self.error, self.message, self.trace, self.at = value

    def describe(self) -> str:
        """For a failure's message."""
        end = "still runs" if self.exit_code is None else f"exit code {self.exit_code}"
        what = self.trace or ("returned" if self.answered else "no answer")
        # What it printed, without the traceback that torch prints once more.
        lines = [line for line in self.output.splitlines() if not line.startswith(f"[rank{self.rank}]:")]
        return f"--- rank {self.rank} (pid {self.pid}, {end}): {what}\n" + "\n".join(lines)[-_OUTPUT_SHOWN:]


class Nursery:
    """The process that forks ranks (see `support.rank_worker`) and the store they meet at, for one `environment`."""

    def __init__(self, environment: Environment = ()) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker = Path(__file__).with_name("rank_worker.py")
        settings = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        interpreted = ("odc.runtime.movers.triton",) if "TRITON_INTERPRET" in dict(environment) else ()
        also = [name for key, names in _ALSO_PRELOADED.items() if key in sys.modules for name in names]
        self._process = subprocess.Popen(
            [sys.executable, str(worker), str(theirs.fileno()), str(os.getpid()), *(interpreted or also)],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **settings, "PYTHONPATH": os.pathsep.join(sys.path), **dict(environment)},
        )
        theirs.close()
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=_PATIENCE_S), wait_for_workers=False
        )
        self._jobs = 0
        self.exits: dict[int, int] = {}

    def fork(self, hello: dict[str, Any], output: IO[bytes]) -> tuple[int, Connection]:
        """Start one rank process; returns its pid and the channel to it, on which `hello` was sent."""
        ours, theirs = socket.socketpair()
        socket.send_fds(self._control, [b"fork"], [theirs.fileno(), output.fileno()])
        theirs.close()
        channel = Connection(ours.detach())
        try:
            while (pid := self._read(_PATIENCE_S).get("forked")) is None:
                pass
        except BaseException:
            channel.close()
            raise
        channel.send_bytes(pickle.dumps({**hello, "port": self._store.port, "path": sys.path}))
        return pid, channel

    def new_prefix(self) -> str:
        """For one job's keys in the store."""
        self._jobs += 1
        return f"job{self._jobs}"

    def poll(self) -> dict[int, int]:
        """Exit codes of all rank processes that have ended, by pid; never waits."""
        while select.select([self._control], [], [], 0)[0]:
            self._read(0)
        return self.exits

    def close(self) -> None:
        """End it and, by the kernel, whatever it has forked."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _read(self, timeout: float) -> dict[str, int]:
        self._control.settimeout(timeout)
        message = self._control.recv(256)
        if not message:
            raise RuntimeError(f"the nursery of rank processes has ended with code {self._process.wait()}")
        note: dict[str, int] = json.loads(message)
        if "exited" in note:
            self.exits[note["exited"]] = note["code"]
        return note


_nurseries: dict[Environment, Nursery] = {}


def nursery(environment: Environment = ()) -> Nursery:
    """The session's nursery with these variables set, started on first use."""
    if environment not in _nurseries:
        _nurseries[environment] = Nursery(environment)
    return _nurseries[environment]


def close_nurseries() -> None:
    """End the session's nurseries."""
    while _nurseries:
        _nurseries.popitem()[1].close()


def _task(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    code = function.__code__
    return pickle.dumps(
        {
            "module": function.__module__,
            "file": code.co_filename,
            "function": function.__qualname__,
            "args": pickle.dumps(args),
        }
    )


class RankProcesses:
    """Ranks that run one function once; made by `spawn_ranks`. Every wait has a timeout."""

    def __init__(self, world: int, *, once: bool, whole_end: bool = False, environment: Environment = ()) -> None:
        self.world, self._nursery = world, nursery(environment)
        self._outputs = [tempfile.TemporaryFile() for _ in range(world)]  # noqa: SIM115 (closed by close)
        self._channels: list[Connection] = []
        self.outcomes: list[Outcome] = []
        job = {"world": world, "prefix": self._nursery.new_prefix(), "once": once, "whole_end": whole_end}
        try:
            for rank in range(world):
                pid, channel = self._nursery.fork({"rank": rank, **job}, self._outputs[rank])
                self._channels.append(channel)
                self.outcomes.append(Outcome(rank, pid))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the ranks."""
        return [outcome.pid for outcome in self.outcomes]

    def send(self, message: bytes) -> None:
        """Give every rank its next task."""
        for outcome, channel in zip(self.outcomes, self._channels, strict=True):
            outcome.answered, outcome.error, outcome.value = False, None, None
            with contextlib.suppress(OSError):  # a dead rank: its exit code will say so
                channel.send_bytes(message)

    def receive(self, timeout: float) -> None:
        """Take in what ranks send until something came or `timeout` is over."""
        open_channels = [channel for channel in self._channels if not channel.closed]
        for channel in wait(open_channels, timeout):
            outcome = self.outcomes[self._channels.index(channel)]  # type: ignore[arg-type]
            try:
                outcome.note(*pickle.loads(channel.recv_bytes()))  # type: ignore[union-attr]
            except (EOFError, OSError):
                channel.close()  # type: ignore[union-attr]
        self._note_exits()

    def kill(self, rank: int) -> float:
        """`kill -9`; returns `time.monotonic()` from just before."""
        now = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.outcomes[rank].pid, signal.SIGKILL)
        return now

    def wait(self, timeout: float = _PATIENCE_S) -> list[Outcome]:
        """Wait until every rank's process has ended.

        Raises:
            RanksFailed: one still runs at the deadline; all are killed, and the message has their stacks.
        """
        deadline = time.monotonic() + timeout
        while any(outcome.exit_code is None for outcome in self.outcomes):
            self.receive(min(0.05, timeout))
            if time.monotonic() > deadline:
                self.fail(f"not all ranks have ended after {timeout:g} s")
        while not all(channel.closed for channel in self._channels):
            self.receive(1.0)
        self._read_outputs()
        return self.outcomes

    def until_told(self, count: int, timeout: float = _PATIENCE_S) -> None:
        """Wait until every rank has told at least `count` values."""
        deadline = time.monotonic() + timeout
        while any(len(outcome.told) < count for outcome in self.outcomes):
            self.receive(0.05)
            if time.monotonic() > deadline or any(o.exit_code is not None for o in self.outcomes):
                self.fail(f"not all ranks have told {count} values within {timeout:g} s")

    def fail(self, why: str) -> None:
        """Show where every living rank is, kill all, raise `RanksFailed`."""
        for outcome in self.outcomes:
            if outcome.exit_code is None and not outcome.answered:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(outcome.pid, signal.SIGUSR1)  # faulthandler writes the stacks of all threads
        time.sleep(0.5)
        self._note_exits()
        self._read_outputs()
        text = "\n".join(outcome.describe() for outcome in self.outcomes if outcome.error or not outcome.answered)
        self.close()
        raise RanksFailed(f"{why}\n{text}")

    def close(self) -> None:
        """Kill what still lives, wait for its end, close the files."""
        for outcome in self.outcomes:
            if outcome.exit_code is None:
                self.kill(outcome.rank)
        deadline = time.monotonic() + _PATIENCE_S
        while any(outcome.exit_code is None for outcome in self.outcomes) and time.monotonic() < deadline:
            time.sleep(0.01)
            self._note_exits()
        for channel in self._channels:
            channel.close()
        for output in self._outputs:
            output.close()

    def _note_exits(self) -> None:
        exits = self._nursery.poll()
        for outcome in self.outcomes:
            outcome.exit_code = exits.get(outcome.pid, outcome.exit_code)

    def _read_outputs(self) -> None:
        for outcome, output in zip(self.outcomes, self._outputs, strict=True):
            output.seek(0)
            outcome.output = output.read().decode("utf-8", "replace")


class RankPool:
    """Ranks that run one function after another, rebuilt after a failure; with variables of `environment` set."""

    def __init__(self, world: int, environment: Environment = ()) -> None:
        self.world, self._environment = world, environment
        self._ranks: RankProcesses | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = _PATIENCE_S) -> list[Any]:
        """Run `function(rank, world, *args)` on every rank and return the results by rank.

        Raises:
            RanksFailed: a rank raised, died or took longer than `timeout` seconds; the pool is gone then.
        """
        if self._ranks is None:
            self._ranks = RankProcesses(self.world, once=False, environment=self._environment)
        ranks = self._ranks
        ranks.send(_task(function, args))
        deadline = time.monotonic() + timeout
        failed = False
        while not all(outcome.answered for outcome in ranks.outcomes):
            ranks.receive(0.5)
            if not failed and any(outcome.error or outcome.exit_code is not None for outcome in ranks.outcomes):
                failed, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
            over = all(outcome.answered or outcome.exit_code is not None for outcome in ranks.outcomes)
            if (failed and over) or time.monotonic() > deadline:
                break
        if not all(outcome.answered and outcome.error is None for outcome in ranks.outcomes):
            self._ranks = None
            ranks.fail(f"{function.__qualname__}{args!r} failed on {self.world} ranks")
        return [outcome.value for outcome in ranks.outcomes]

    def close(self) -> list[Outcome]:
        """Tell the ranks to leave, in good order; returns how they ended."""
        if self._ranks is None:
            return []
        ranks, self._ranks = self._ranks, None
        ranks.send(b"")
        try:
            return ranks.wait()
        finally:
            ranks.close()


@contextlib.contextmanager
def spawn_ranks(
    world: int, function: Callable[..., Any], *args: Any, whole_end: bool = False
) -> Iterator[RankProcesses]:
    """Start `world` one-shot ranks that run `function(rank, world, *args)`; what still lives at the end is killed.

    Args:
        whole_end: let the interpreter end by itself, to the last module (see `support.rank_worker`).
    """
    ranks = RankProcesses(world, once=True, whole_end=whole_end)
    try:
        ranks.send(_task(function, args))
        yield ranks
    finally:
        ranks.close()
