"""Starts the ranks of a job on this machine and says which rank was to blame when it failed.

torch elastic's agent (one node, rendezvous on the loopback, no restarts) runs the ranks, as under `torchrun`: it stops
the others when one dies and keeps each rank's error, which `launch` turns into one `JobFailedError`. Ranks are forked
from Python's fork server, which has loaded what they need, so that a second launch starts in a second. The server ends
with this process, and a rank kills itself when this process dies.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from odc.errors import OdcError

_CONSEQUENCES = ("PeerLostError", "WaitTimeoutError", "DistBackendError", "DistNetworkError", "DistStoreError")


class JobFailedError(OdcError):
    """A rank of a job failed. `failures` has (rank, message) with the culprit first, `tracebacks` each rank's own."""

    def __init__(self, failures: list[tuple[int, str]], tracebacks: dict[int, str]) -> None:
        first, *others = failures
        more = "".join(f"\n  then rank {rank}: {_short(message)}" for rank, message in others)
        super().__init__(f"rank {first[0]} failed: {first[1]}{more}")
        self.failures = failures
        self.tracebacks = tracebacks


# What a rank loads before it can work; a package that is not installed is passed over.
_PRELOADED = ("odc.experiments.job", "odc.experiments.text.workload", "odc.fsdp", "transformers.modeling_utils")


def launch(entry: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
    """Runs `entry(*args)` in `ranks` new processes and returns what each returned, in rank order.

    `entry` must be a module-level function and `args` and results must pickle. In the ranks the environment holds
    what `torch.distributed.init_process_group` reads. Blocks until all ranks have ended; on return or raise none lives.
    Raises `JobFailedError` when a rank raises or dies; KeyboardInterrupt when this process is interrupted.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    start_server()
    # torch 2.11 has no such choice and gives ranks 30 seconds to end before it kills them.
    grace: Any = {"shutdown_timeout": 5} if "shutdown_timeout" in {one.name for one in fields(LaunchConfig)} else {}
    with tempfile.TemporaryDirectory(prefix="odc-ranks-") as logs, _quiet_agent(logs):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            **grace,
        )
        try:
            results = elastic_launch(config, _rank)(entry, args)
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            raise _blame(Path(logs), codes) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + int(error.sigval)) from None
    return [results[rank] for rank in range(ranks)]


def start_server() -> None:
    """Starts the fork server, if it does not run yet; `launch` does it. It loads in the background."""
    multiprocessing.set_forkserver_preload(list(_PRELOADED))
    forkserver.ensure_running()  # not while `launch` has moved the temporary folder: its socket must outlive that


def _rank(entry: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    # Not the kernel's parent-death signal: a rank's parent is the fork server, which lives as long as its ranks.
    threading.Thread(target=_die_with, args=(launcher.sentinel,), name="odc-launcher-watch", daemon=True).start()
    return entry(*args)


def _die_with(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _blame(logs: Path, codes: dict[int, int]) -> JobFailedError:
    """Orders the ranks' failures: deaths first, then own errors, then errors that only say that a peer is gone."""
    found: dict[int, tuple[tuple[int, float], str]] = {}
    tracebacks: dict[int, str] = {}
    for path in logs.glob("*/attempt_*/*/error.json"):
        rank = int(path.parent.name)
        entry = json.loads(path.read_text())["message"]
        if isinstance(entry, str):
            entry = {"message": entry, "extraInfo": {}}
        extra = entry.get("extraInfo", {})
        consequence = any(name in entry["message"] for name in _CONSEQUENCES)
        found[rank] = ((2 if consequence else 1, float(extra.get("timestamp", 0))), _plain(entry["message"]))
        tracebacks[rank] = str(extra.get("py_callstack", ""))
    for rank, code in codes.items():
        if rank in found:
            continue
        if code < 0:
            text = f"the process was killed by {signal.Signals(-code).name}"
        else:
            text = f"the process exited with code {code} and left no message"
        found[rank] = ((0, 0.0), text)
    ordered = sorted(found.items(), key=lambda item: (item[1][0], item[0]))
    return JobFailedError([(rank, text) for rank, (_, text) in ordered], tracebacks)


def _plain(message: str) -> str:
    """`odc.errors.DataError: x` as torch elastic writes it, without quoting that `repr` added."""
    return re.sub(r"^(\w+)\((['\"])(.*)\2\)$", r"\1: \3", message, flags=re.DOTALL)


def _short(message: str) -> str:
    line = message.strip().splitlines()[0] if message.strip() else "no message"
    return line if len(line) <= 200 else line[:197] + "..."


@contextmanager
def _quiet_agent(folder: str) -> Iterator[None]:
    """While the agent runs: its log, which repeats the ranks' errors as tracebacks, stays below CRITICAL, and the error
    files that torch's spawn leaves in the temporary folder go to `folder` instead.
    """
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn")]
    levels = [logger.level for logger in loggers]
    temporary = tempfile.tempdir
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    tempfile.tempdir = folder
    try:
        yield
    finally:
        tempfile.tempdir = temporary
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
