"""Rank processes of this machine: started, given functions to run, listened to, ended.

`RankProcesses` forks ranks from a `ForkServer` (see `odc.ranks.worker`), which each process that starts ranks has once
for every environment. Ranks end with the process that started them, however it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.spawn import get_preparation_data
from typing import Any

from odc.errors import OdcError
from odc.ranks.worker import Group, Hello

#: A guard against hangs, which a busy machine never reaches.
PATIENCE_S = 600.0
_OUTPUT_SHOWN = 6000  # characters of a rank's output shown in a failure: the last ones, or those around a crash
_BEFORE_CRASH = 2000  # of them, before the line by which `faulthandler` begins: what C++ printed as it gave up
_PROGRAM = """
import json, sys
control, parent, sys.path[:], preloaded = json.loads(sys.argv[1])
from odc.ranks.worker import main
main(control, parent, preloaded)
"""

Environment = tuple[tuple[str, str], ...]  # variables and their values


class RanksFailed(OdcError):
    """One or more ranks raised, died or did not answer; the message has each one's traceback or output."""


def host_store() -> Any:
    """A store on the loopback interface by which ranks find each other; this process hosts it until it is dropped."""
    import torch.distributed as dist

    stores: Any = dist
    patience = timedelta(seconds=PATIENCE_S)
    return stores.TCPStore("127.0.0.1", 0, is_master=True, timeout=patience, wait_for_workers=False)


@dataclass
class RankOutcome:
    """How one rank ended, or how its last task did."""

    rank: int
    pid: int
    exit_code: int | None = None  # negative a signal's number; None while the process lives
    value: Any = None  # what the function returned
    error: str | None = None  # name of the exception's type
    message: str = ""
    trace: str = ""
    at: float = 0.0  # `time.monotonic()` when the exception had left the function, comparable between processes
    reports: list[Any] = field(default_factory=list)  # what the rank passed to `odc.ranks.worker.report`
    output: str = ""  # standard output and error, where they were kept
    answered: bool = False  # the function has returned or raised
    progressed: bool = False  # `odc.ranks.worker.report_progress` was called
    left_out: bool = False  # whoever started the ranks does without this one, however it has ended

    @property
    def failed(self) -> bool:
        """Whether the function raised, or the process ended before it had returned, and that matters."""
        ended = self.error is not None or (self.exit_code is not None and not self.answered)
        return ended and not self.left_out

    def note(self, kind: str, value: Any) -> None:
        """Take in what the rank sent."""
        if kind == "report":
            self.reports.append(value)
            return
        if kind == "progress":
            self.progressed = value
            return
        self.answered = True
        if kind == "returned":
            self.value = value
        else:
            self.error, self.message, self.trace, self.at = value

    def describe(self) -> str:
        """For a failure's message, without the traceback that torch prints once more.

        A rank that raised as it shut down, after its last answer, shows it in its output only.
        """
        end = "still runs" if self.exit_code is None else f"exit code {self.exit_code}"
        what = self.trace or ("returned" if self.answered else "no answer")
        lines = self.output.splitlines()
        if self.trace:
            lines = [line for line in lines if not line.startswith(f"[rank{self.rank}]:")]
        output = "\n".join(lines)
        crash = output.find("Fatal Python error")
        begin = max(0, crash - _BEFORE_CRASH if crash >= 0 else len(output) - _OUTPUT_SHOWN)
        return f"--- rank {self.rank} (pid {self.pid}, {end}): {what}\n{output[begin : begin + _OUTPUT_SHOWN]}"


class ForkServer:
    """The process that forks ranks, and the store by which they find each other.

    That process and its ranks have the variables of `environment` besides this process's own, ranks those of the moment
    when they are started. It imports the modules in `preloaded` while the caller goes on.
    """

    def __init__(self, environment: Environment, preloaded: Iterable[str]) -> None:
        self._environment = dict(environment)
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [one or os.getcwd() for one in sys.path]
        arguments = json.dumps([theirs.fileno(), os.getpid(), path, list(preloaded)])
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=self.variables(),
            start_new_session=True,  # an interrupt from the terminal is for the process that started the ranks
        )
        theirs.close()
        self._store: Any = None
        self._groups = 0
        self.exits: dict[int, int] = {}

    def variables(self) -> dict[str, str]:
        """All that it or a rank has if it is started now."""
        return {**os.environ, **self._environment}

    def fork(self, hello: Hello, output: int, errors: int) -> tuple[int, Connection]:
        """Starts a rank that writes to these descriptors; returns its pid and the channel on which `hello` was sent."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.control, [b"fork"], [theirs.fileno(), output, errors])
        channel = Connection(ours.detach())
        try:
            while (pid := self._read(PATIENCE_S).get("forked")) is None:
                pass
        except BaseException:
            channel.close()
            raise
        with contextlib.suppress(OSError):  # a rank that is dead already: its exit code shows it
            channel.send_bytes(pickle.dumps(tuple(hello)))
        return pid, channel

    def new_group(self, world: int, device: str, timeout_s: float) -> Group:
        """A new process group for `world` ranks; this process hosts the store."""
        if self._store is None:
            self._store = host_store()
        self._groups += 1
        return Group(world, self._store.port, f"group{self._groups}", device, timeout_s)

    def poll(self) -> dict[int, int]:
        """Exit codes of all ranks that have ended, by pid; never waits."""
        while select.select([self.control], [], [], 0)[0]:
            self._read(0)
        return self.exits

    def close(self) -> None:
        """Ends it and, by the kernel, whatever it has forked."""
        self.control.close()
        self.process.kill()
        self.process.wait()

    def _read(self, timeout: float) -> dict[str, int]:
        self.control.settimeout(timeout)
        message = self.control.recv(256)
        if not message:
            raise OdcError(f"the process that forks ranks has ended with code {self.process.wait()}")
        note: dict[str, int] = json.loads(message)
        if "exited" in note:
            self.exits[note["exited"]] = note["code"]
        else:
            self.exits.pop(note["forked"], None)  # of an earlier process with this number
        return note


_servers: dict[tuple[int, Environment, tuple[str, ...]], ForkServer] = {}


def fork_server(environment: Environment = (), preloaded: tuple[str, ...] = ("torch", "odc.fsdp")) -> ForkServer:
    """This process's fork server with these variables and modules, started on first use."""
    key = os.getpid(), environment, preloaded
    if key in _servers and _servers[key].process.poll() is not None:  # it ends with the thread that started it
        _servers.pop(key).close()
    if key not in _servers:
        _servers[key] = ForkServer(environment, preloaded)
        atexit.unregister(close_fork_servers)
        atexit.register(close_fork_servers)
    return _servers[key]


def close_fork_servers() -> None:
    """Ends the fork servers of this process and all their ranks; a forked child leaves its parent's alone."""
    for key in [key for key in _servers if key[0] == os.getpid()]:
        _servers.pop(key).close()


def task(function: Callable[..., Any], *args: Any) -> bytes:
    """A call of a module-level function, as ranks receive it."""
    where = function.__module__, function.__code__.co_filename, function.__qualname__
    return pickle.dumps((*where, pickle.dumps(args)))


def _main_module() -> dict[str, Any]:
    """What a spawned child receives of this process's folder, paths and main module, so that functions of the latter
    pickle.
    """
    kept = ("dir", "sys_", "init_")
    data = {key: value for key, value in get_preparation_data("rank").items() if key.startswith(kept)}
    if not os.path.exists(data.get("init_main_from_path", "")):  # a program from standard input
        data.pop("init_main_from_path", None)
    return data


def _give(outcome: RankOutcome, channel: Connection, message: bytes) -> None:
    outcome.answered, outcome.error, outcome.value = False, None, None
    with contextlib.suppress(OSError):  # a dead rank: its exit code shows it
        channel.send_bytes(message)


class RankProcesses:
    """Processes of some ranks. Every wait has a timeout.

    `environment` gives the variables to set in a rank. `outputs` are descriptors for each rank's standard output and
    error; None writes to this process's own. `group`, `once`, `whole_end` and `quiet` are as in `Hello`.
    """

    def __init__(
        self,
        server: ForkServer,
        ranks: Collection[int],
        *,
        group: Group | None = None,
        environment: Callable[[int], dict[str, str]] = lambda rank: {},
        outputs: Sequence[int] | None = None,
        once: bool = False,
        whole_end: bool = False,
        quiet: bool = False,
    ) -> None:
        self._server = server
        self._channels: list[Connection] = []
        self.outcomes: list[RankOutcome] = []
        main = _main_module()

        def start(i: int, rank: int) -> tuple[RankOutcome, Connection]:
            hello = Hello(rank, group, server.variables() | environment(rank), once, whole_end, quiet, main)
            out, err = (1, 2) if outputs is None else (outputs[i], outputs[i])
            pid, channel = server.fork(hello, out, err)
            return RankOutcome(rank, pid), channel

        self._start = start
        self._sent: tuple[bytes, ...] = ()  # the newest task of each rank
        try:
            for i, rank in enumerate(ranks):
                outcome, channel = start(i, rank)
                self._channels.append(channel)
                self.outcomes.append(outcome)
        except BaseException:
            self.close()
            raise

    def send(self, *messages: bytes) -> None:
        """Gives every rank its next task: its own message, or the only one."""
        self._sent = messages * len(self.outcomes) if len(messages) == 1 else messages
        for outcome, channel, message in zip(self.outcomes, self._channels, self._sent, strict=True):
            _give(outcome, channel, message)

    def replace(self, rank: int) -> None:
        """Starts a new process for a rank whose own has ended, and gives it the task that was sent last."""
        (i,) = (i for i, outcome in enumerate(self.outcomes) if outcome.rank == rank)
        self._channels[i].close()
        self.outcomes[i], self._channels[i] = self._start(i, rank)
        _give(self.outcomes[i], self._channels[i], self._sent[i])

    def receive(self, timeout: float) -> None:
        """Takes in what ranks send, and exits, until something came or `timeout` is over."""
        open_channels = {channel: i for i, channel in enumerate(self._channels) if not channel.closed}
        ready: list[Any] = wait([*open_channels, self._server.control], timeout)
        for channel in ready:
            if channel is self._server.control:
                continue
            self._take(open_channels[channel])
        self._note_exits()

    def _take(self, i: int) -> None:
        """Take in one message, which is there, or the end of the channel."""
        try:
            self.outcomes[i].note(*pickle.loads(self._channels[i].recv_bytes()))
        except (EOFError, OSError):
            self._channels[i].close()

    def answers(self, timeout: float, grace_s: float) -> bool:
        """Waits until every rank has answered or ended; False if one has failed or `timeout` is over.

        Once a rank has failed the others have `grace_s` left.
        """
        deadline, failed = time.monotonic() + timeout, False
        while not all(outcome.answered or outcome.exit_code is not None for outcome in self.outcomes):
            self.receive(max(0.0, min(0.5, deadline - time.monotonic())))
            if not failed and any(outcome.failed for outcome in self.outcomes):
                failed, deadline = True, min(deadline, time.monotonic() + grace_s)
            if time.monotonic() > deadline:
                break
        return all(one.left_out or (one.answered and one.error is None) for one in self.outcomes)

    def ended(self, timeout: float) -> bool:
        """Waits until every rank's process has ended and all it sent was taken in; False after `timeout`.

        A process that a rank has forked may outlive it, and is not waited for.
        """
        deadline = time.monotonic() + timeout
        while any(outcome.exit_code is None for outcome in self.outcomes):
            if time.monotonic() > deadline:
                return False
            self.receive(min(0.05, timeout))
        for channel in self._channels:  # what was sent on it was taken in before the exit was noted
            channel.close()
        return True

    def kill(self, rank: int) -> float:
        """`kill -9`; returns `time.monotonic()` from just before."""
        now = time.monotonic()
        (pid,) = (outcome.pid for outcome in self.outcomes if outcome.rank == rank)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return now

    def close(self) -> None:
        """Kills what still lives and waits for its end."""
        for outcome in self.outcomes:
            if outcome.exit_code is None:
                self.kill(outcome.rank)
        deadline = time.monotonic() + PATIENCE_S
        while any(outcome.exit_code is None for outcome in self.outcomes) and time.monotonic() < deadline:
            wait([self._server.control], 0.05)
            self._note_exits()
        for channel in self._channels:
            channel.close()

    def _note_exits(self) -> None:
        """After all that a rank had sent before its end: one that has answered and ended has not failed."""
        exits = self._server.poll()
        for i, (outcome, channel) in enumerate(zip(self.outcomes, self._channels, strict=True)):
            if outcome.pid in exits and outcome.exit_code is None:
                while not channel.closed and channel.poll():
                    self._take(i)
                outcome.exit_code = exits[outcome.pid]
