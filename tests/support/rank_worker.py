"""The processes behind `support.ranks`: a nursery that imports torch once, and the rank processes it forks.

Chose to fork ranks from a process that has imported torch and started no thread over starting an interpreter a rank:
the import costs seconds, a fork milliseconds, and tests that kill ranks need many. A rank ends as the interpreter
does, threads joined and atexit handlers run, but for taking torch's modules apart, which costs a second and a half of
processor time; tests of how a rank ends ask for that, too (`whole_end`).

Run as a script by `support.ranks`: `python rank_worker.py <control fd> <pid of pytest> <module to import>...`; the
modules are those that the collected tests need beside `_PRELOADED`.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import pickle
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

_PR_SET_PDEATHSIG = 1
_PATIENCE_S = 600.0  # as in `support.ranks`
_PRELOADED = (
    "hypothesis",
    "odc",
    "odc.fsdp",
    "odc.handover",
    "odc.dispatch",
    "odc.eval",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.data",
)
_teller: Connection | None = None


class Birth(NamedTuple):
    """What a forked rank starts from."""

    channel: int
    output: int
    parent: int


def tell(value: Any) -> None:
    """Send a plain value to the test while the rank runs; it turns up in `Outcome.told`, in order."""
    assert _teller is not None, "tell() belongs in a rank process"
    _teller.send_bytes(pickle.dumps(("told", value)))


def die(after_telling: Any = None) -> None:
    """End this rank as `kill -9` would, after telling when (`time.monotonic()`) and whatever else is given."""
    tell((time.monotonic(), after_telling))
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, however that ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def nurse(control: socket.socket) -> Birth | None:
    """Fork a rank for every request and report exits; returns in a forked rank, or None when pytest is gone."""
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
            message, fds, *_ = socket.recv_fds(control, 64, 2)
            if not message:
                return None
            pid = os.fork()
            if pid == 0:
                selector.close()
                control.close()
                for pidfd in pidfds:
                    os.close(pidfd)
                return Birth(fds[0], fds[1], parent)
            for fd in fds:
                os.close(fd)
            pidfd = os.pidfd_open(pid)
            pidfds.add(pidfd)
            selector.register(pidfd, selectors.EVENT_READ, pid)
            control.send(json.dumps({"forked": pid}).encode())


def load(name: str, file: str) -> ModuleType:
    """A test module, under the name it has in pytest, so that what it defines can be pickled both ways."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def perform(rank: int, world: int, task: dict[str, Any]) -> Any:
    """Run one task: a function of a test module, with a trace of its own."""
    if "odc.trace.recorder" in sys.modules:
        # A model that was dropped within a minibatch leaves its window open, which hides all later ones.
        sys.modules["odc.trace.recorder"]._process_recorder = None  # type: ignore[attr-defined]
    module = load(task["module"], task["file"])
    function = getattr(module, task["function"])
    return function(rank, world, *pickle.loads(task["args"]))


def live(birth: Birth) -> None:
    """Be one rank: join the process group, run tasks until told to leave."""
    global _teller
    die_with(birth.parent)
    os.setsid()  # all that this rank starts is found by its session, also when the rank is dead
    for fd in (1, 2):
        os.dup2(birth.output, fd)
    os.close(birth.output)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    channel = _teller = Connection(birth.channel)
    hello = pickle.loads(channel.recv_bytes())
    sys.path[:] = hello["path"]
    warnings.filterwarnings("error", module=r"odc(\.|$)")
    join(hello)
    if hello["whole_end"]:
        work(channel, hello)
        return
    code = 0
    try:
        work(channel, hello)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # as the interpreter does
        code = 1
    end(code)


def work(channel: Connection, hello: dict[str, Any]) -> None:
    """Run tasks until one raises or there are no more."""
    while (message := channel.recv_bytes()) != b"":
        task = pickle.loads(message)
        try:
            answer = ("returned", perform(hello["rank"], hello["world"], task))
        except BaseException as error:
            answer = ("raised", (type(error).__name__, str(error), traceback.format_exc(), time.monotonic()))
            channel.send_bytes(pickle.dumps(answer))
            raise
        channel.send_bytes(pickle.dumps(answer))
        if hello["once"]:
            return
    leave()


def end(code: int) -> None:
    """What the interpreter does at its end that anyone outside can see."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def join(hello: dict[str, Any]) -> None:
    """Enter the ranks' process group, whose store pytest hosts as torchrun's agent would."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", hello["port"], is_master=False, timeout=timedelta(seconds=_PATIENCE_S))
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(hello["prefix"], store),
        rank=hello["rank"],
        world_size=hello["world"],
        timeout=timedelta(seconds=_PATIENCE_S),
    )


def leave() -> None:
    """Leave in good order, as a training script's last lines would."""
    import torch.distributed as dist

    if "odc" in sys.modules and hasattr(sys.modules["odc"], "shutdown"):
        sys.modules["odc"].shutdown()
    dist.destroy_process_group()


def main() -> None:
    """Nurse until pytest is gone; in a forked rank, live."""
    control = socket.socket(fileno=int(sys.argv[1]))
    die_with(int(sys.argv[2]))
    gc.disable()  # imports leave next to no garbage
    for name in (*_PRELOADED, *sys.argv[3:]):
        importlib.import_module(name)
    gc.enable()
    gc.freeze()  # a collection in a rank neither looks at all this nor makes copies of its pages
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads after the imports: a fork would lose them"
    birth = nurse(control)
    if birth is not None:
        live(birth)


if __name__ == "__main__":
    # Tests import `tell` and `die` from this module: it must be the one that is running.
    sys.modules["support.rank_worker"] = sys.modules["__main__"]
    sys.path[0] = str(Path(__file__).parent.parent)
    main()
