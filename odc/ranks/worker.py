"""The processes behind `odc.ranks.processes`: a fork server that imports modules once, and the ranks it forks.

Importing torch costs seconds and a fork milliseconds. The server starts no thread, so that a fork loses none. It ends
with the process that started it, and its ranks end with it, by the kernel's parent-death signal. A rank ends as the
interpreter does, except for taking torch's modules apart, which costs 1.5 s of processor time.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import io
import json
import multiprocessing.spawn
import os
import pickle
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

_PR_SET_PDEATHSIG = 1
_reporter: Connection | None = None
_progressed = False  # whether the process that started this rank knows that it has done something


class Birth(NamedTuple):
    """What a forked rank starts from: file descriptors and the server's process id."""

    channel: int
    output: int
    errors: int
    parent: int


class Group(NamedTuple):
    """The process group that a rank joins before its first task."""

    world: int
    port: int  # of the store, on the loopback interface
    prefix: str
    device: str
    timeout_s: float


class Hello(NamedTuple):
    """The first message to a rank."""

    rank: int
    group: Group | None  # joined before the first task and left after the last one
    environment: dict[str, str]  # all variables
    once: bool  # end after the first task, without leaving the group
    whole_end: bool  # end as the interpreter does, to the last module
    quiet: bool  # write no traceback of a task that raises; the answer has it
    main: dict[str, Any]  # what `multiprocessing` passes to a spawned child of its parent's paths and main module


def report(value: Any) -> None:
    """Send a value that pickles to the process that started this rank, while a task runs."""
    assert _reporter is not None, "report() belongs in a rank process"
    _reporter.send_bytes(pickle.dumps(("report", value)))


def report_progress() -> None:
    """Let the process that started this rank know that it has done work that need not be done again.

    Sent once. No-op in a process that nothing started from a `ForkServer`, or whose parent has gone.
    """
    global _progressed
    if _reporter is not None and not _progressed:
        _progressed = True
        with contextlib.suppress(OSError):
            _reporter.send_bytes(pickle.dumps(("progress", True)))


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, however that ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def serve(control: socket.socket) -> Birth | None:
    """Forks a rank for every request and reports exits; returns in a forked rank, or None after the last request."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    parent, pidfds = os.getpid(), set[int]()
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                selector.unregister(key.fd)
                os.close(key.fd)
                pidfds.discard(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
                control.send(json.dumps({"exited": key.data, "code": code}).encode())
                continue
            message, fds, *_ = socket.recv_fds(control, 64, 3)
            if not message:
                return None
            pid = os.fork()
            if pid == 0:
                selector.close()
                control.close()
                for pidfd in pidfds:
                    os.close(pidfd)
                return Birth(fds[0], fds[1], fds[2], parent)
            for fd in fds:
                os.close(fd)
            pidfd = os.pidfd_open(pid)
            pidfds.add(pidfd)
            selector.register(pidfd, selectors.EVENT_READ, pid)
            control.send(json.dumps({"forked": pid}).encode())


def live(birth: Birth) -> None:
    """Is one rank, from the fork to the end of its process."""
    global _reporter
    die_with(birth.parent)
    os.setsid()  # all that this rank starts is found by its session, also when the rank is dead; no Ctrl-C gets here
    for target, fd in ((1, birth.output), (2, birth.errors)):
        os.dup2(fd, target)
        os.close(fd)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    channel = _reporter = Connection(birth.channel)
    hello = Hello(*pickle.loads(channel.recv_bytes()))
    if hello.whole_end:
        _work(channel, hello)
        return
    code = 0
    try:
        _work(channel, hello)
    except BaseException as error:
        sys.last_value = error
        with contextlib.redirect_stderr(io.StringIO()) if hello.quiet else contextlib.nullcontext():
            sys.excepthook(type(error), error, error.__traceback__)  # as the interpreter does
        code = _exit_code(error)
    _end(code)


def _exit_code(error: BaseException) -> int:
    """With which the interpreter ends for an uncaught error."""
    status = error.code if isinstance(error, SystemExit) else 1
    return 0 if status is None else status & 0xFF if isinstance(status, int) else 1


def _work(channel: Connection, hello: Hello) -> None:
    try:
        os.environ.clear()  # those of the moment when the server was started
        os.environ.update(hello.environment)
        multiprocessing.spawn.prepare(hello.main)
        if hello.group is not None:
            join(hello.rank, hello.group)
        while (message := channel.recv_bytes()) != b"":
            channel.send_bytes(pickle.dumps(("returned", _perform(*pickle.loads(message)))))
            if hello.once:
                return
    except BaseException as error:
        failure = (type(error).__name__, str(error), traceback.format_exc(), time.monotonic())
        with contextlib.suppress(OSError):
            channel.send_bytes(pickle.dumps(("raised", failure)))
        raise
    try:
        leave()
    except BaseException:
        if hello.quiet:  # this one was not announced
            traceback.print_exc()
        raise


def _perform(module: str, file: str, name: str, args: bytes) -> Any:
    """Calls a module-level function; `args` are unpickled once its module is there."""
    function = load(module, file, name)
    return function(*pickle.loads(args))


def load(module: str, file: str, name: str) -> Callable[..., Any]:
    """The function under the name that its module has where the task comes from, so that what it defines pickles."""
    if module not in sys.modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):  # another module that this one needs
                raise
            _import_file(module, file)
    found: Callable[..., Any] = getattr(sys.modules[module], name)
    return found


def _import_file(module: str, file: str) -> None:
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None and spec.loader is not None
    sys.modules[module] = loaded = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[module]
        raise


def _end(code: int) -> None:
    """Ends with everything that the interpreter does at its end that another process can see."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def join(rank: int, group: Group) -> None:
    """Enters the ranks' process group, computing on one thread; the store is hosted as torchrun's agent would.

    On CUDA ranks take the devices in turn. Several share one where there are fewer, which NCCL refuses: then there is
    gloo alone.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout, backend = timedelta(seconds=group.timeout_s), "gloo"
    if group.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if group.world <= torch.cuda.device_count():
            backend = "cpu:gloo,cuda:nccl"
    stores: Any = dist
    store = stores.TCPStore("127.0.0.1", group.port, is_master=False, timeout=timeout)
    dist.init_process_group(
        backend, store=stores.PrefixStore(group.prefix, store), rank=rank, world_size=group.world, timeout=timeout
    )


def leave() -> None:
    """Shuts down in good order, as a training script's last lines would."""
    import torch.distributed as dist

    if "odc" in sys.modules:
        sys.modules["odc"].shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def main(control: int, parent: int, preloaded: Sequence[str]) -> None:
    """Serves requests from the socket of descriptor `control` until no request can come any more; in a forked rank,
    lives.

    Imports `preloaded` first, without those that are not installed. `parent` is the process that started this one.
    """
    die_with(parent)
    gc.disable()  # imports leave next to no garbage
    for name in preloaded:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.enable()
    gc.freeze()  # a collection in a rank neither scans all this nor copies its pages
    birth = serve(socket.socket(fileno=control))
    if birth is not None:
        live(birth)
