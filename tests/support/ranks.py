"""Run functions on rank processes: pools that live as long as the tests, and one-shot ranks that may be killed.

A pool keeps its processes and its process group from test to test. A pool in which any rank failed is killed whole and
rebuilt, so that no test sees what another left behind. Functions are module-level in a test module and take
`(rank, world, *args)`; inside them plain `assert` says nothing of its operands, so give it a message.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from odc.ranks import processes
from odc.ranks.processes import PATIENCE_S, Environment, RankOutcome, RanksFailed, fork_server, task
from support import rank_worker
from support.waiting import until

__all__ = ["INTERPRETED", "Pools", "RankOutcome", "RankPool", "RankProcesses", "RanksFailed", "spawn_ranks"]

_GRACE_S = 10.0  # for the other ranks' words once one has failed
INTERPRETED: Environment = (("TRITON_INTERPRET", "1"),)
_ONE_THREAD: Environment = (("OMP_NUM_THREADS", "1"), ("OPENBLAS_NUM_THREADS", "1"), ("GLOO_SOCKET_IFNAME", "lo"))
_PRELOADED = (
    "hypothesis",
    "numba",
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


@functools.cache  # what a test imports later makes no second server
def _also_preloaded(environment: Environment) -> tuple[str, ...]:
    """What ranks import beside that, as far as the tests collected here need it; the fork server does it once."""
    if "TRITON_INTERPRET" in dict(environment):
        return ("odc.movers.triton", "support.promises")
    found = list[str]()
    if "odc.experiments.launch" in sys.modules:
        found += ["odc.experiments.job", "odc.experiments.text.step"]
    if not {"transformers", "support.split_jobs"}.isdisjoint(sys.modules):
        found += ["transformers.models.auto.modeling_auto", "transformers.models.qwen2.modeling_qwen2"]
    return tuple(found)


def _server(environment: Environment = ()) -> processes.ForkServer:
    return fork_server(_ONE_THREAD + environment, (*_PRELOADED, *_also_preloaded(environment)))


def share_server() -> None:
    """Have jobs that tests start in this process fork from the server of `RankPool`: another loads all anew."""
    if "odc.experiments.launch" in sys.modules:  # some test that was collected starts one
        sys.modules["odc.experiments.launch"].fork_server = lambda *_: _server()  # type: ignore[attr-defined]


class RankProcesses(processes.RankProcesses):
    """Ranks in a process group of their own whose output is kept; with variables of `environment` set.

    With `own`, which gives variables to set in one rank alone, they join no group.
    """

    def __init__(
        self,
        world: int,
        *,
        once: bool,
        whole_end: bool = False,
        environment: Environment = (),
        own: Callable[[int], dict[str, str]] | None = None,
    ) -> None:
        self.world = world
        self._outputs = [tempfile.TemporaryFile() for _ in range(world)]  # noqa: SIM115 (closed by close)
        server = _server(environment)
        group = server.new_group(world, "cpu", PATIENCE_S) if own is None else None
        files, each = [output.fileno() for output in self._outputs], own or (lambda _: {})
        super().__init__(
            server, range(world), group=group, environment=each, outputs=files, once=once, whole_end=whole_end
        )

    @property
    def pids(self) -> list[int]:
        """Of the ranks."""
        return [outcome.pid for outcome in self.outcomes]

    def perform(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        """Have every rank run `function(rank, world, *args)`."""
        where = function.__module__, inspect.unwrap(function).__code__.co_filename, function.__qualname__
        message = pickle.dumps(args)
        self.send(*(task(rank_worker.perform, rank, self.world, where, message) for rank in range(self.world)))

    def wait(self, timeout: float = PATIENCE_S) -> list[RankOutcome]:
        """Wait until every rank's process has ended.

        Raises:
            RanksFailed: one still runs at the deadline; all are killed, and the message has their stacks.
        """
        if not self.ended(timeout):
            self.fail(f"not all ranks have ended after {timeout:g} s")
        self._read_outputs()
        return self.outcomes

    def until(self, holds: Callable[[], bool], what: str, timeout: float = PATIENCE_S) -> None:
        """Wait until `holds()`, which depends on what ranks send; a rank that fails meanwhile fails the test."""
        deadline = time.monotonic() + timeout
        while not holds():
            self.receive(0.05)
            if time.monotonic() > deadline or any(outcome.failed for outcome in self.outcomes):
                self.fail(f"waited for {what} for at most {timeout:g} s")

    def until_reported(self, count: int, ranks: Collection[int] | None = None) -> None:
        """Wait until these ranks, by default all, have sent at least `count` values by `report`."""
        of = range(self.world) if ranks is None else ranks
        self.until(
            lambda: all(len(self.outcomes[rank].reports) >= count for rank in of), f"{count} values of each rank"
        )

    def fail(self, why: str) -> None:
        """Show where every living rank is, kill all, raise `RanksFailed`."""
        for one in self._silent():
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGUSR1)  # it writes the stacks of its threads to its output
        time.sleep(0.5)
        with contextlib.suppress(AssertionError):  # one that is stopped shows nothing
            until(self._stacks_shown, "the stacks of ranks", 20.0)
        self._read_outputs()
        failed = [one for one in self.outcomes if one.error or not one.answered]
        failed.sort(key=lambda one: one.answered)  # first those that died: the others may only have missed them
        text = "\n".join(outcome.describe() for outcome in failed)
        self.close()
        raise RanksFailed(f"{why}\n{text}")

    def _stacks_shown(self) -> bool:
        self._note_exits()
        self._read_outputs()
        return all("most recent call first" in one.output for one in self._silent())

    def _silent(self) -> list[RankOutcome]:
        return [one for one in self.outcomes if one.exit_code is None and not one.answered]

    def close(self) -> None:
        """Kill what still lives, wait for its end, close the files."""
        super().close()
        for output in self._outputs:
            output.close()

    def _read_outputs(self) -> None:
        for outcome, output in zip(self.outcomes, self._outputs, strict=True):
            output.seek(0)
            outcome.output = output.read().decode("utf-8", "replace")


class RankPool:
    """Ranks that run one function after another, rebuilt after a failure; with variables of `environment` set."""

    def __init__(self, world: int, environment: Environment = ()) -> None:
        self.world, self._environment = world, environment
        self._ranks: RankProcesses | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = PATIENCE_S) -> list[Any]:
        """Run `function(rank, world, *args)` on every rank and return the results by rank.

        Raises:
            RanksFailed: a rank raised, died or took longer than `timeout` seconds; the pool is gone then.
        """
        if self._ranks is None:
            self._ranks = self._start()
        ranks = self._ranks
        ranks.perform(function, args)
        if not ranks.answers(timeout, _GRACE_S):
            self._ranks = None
            ranks.fail(f"{function.__qualname__}{args!r} failed on {self.world} ranks")
        return [outcome.value for outcome in ranks.outcomes]

    def _start(self) -> RankProcesses:
        return RankProcesses(self.world, once=False, environment=self._environment)

    def close(self) -> list[RankOutcome]:
        """Make the ranks shut down in good order; returns how they ended."""
        if self._ranks is None:
            return []
        ranks, self._ranks = self._ranks, None
        ranks.send(b"")
        try:
            return ranks.wait()
        finally:
            ranks.close()


Pools = Callable[[int], RankPool]  # the fixture `ranks`


@contextlib.contextmanager
def spawn_ranks(
    world: int, function: Callable[..., Any], *args: Any, whole_end: bool = False
) -> Iterator[RankProcesses]:
    """Start `world` one-shot ranks that run `function(rank, world, *args)`; what still lives at the end is killed.

    Args:
        whole_end: let the interpreter end by itself, to the last module (see `odc.ranks.worker`).
    """
    ranks = RankProcesses(world, once=True, whole_end=whole_end)
    try:
        ranks.perform(function, args)
        yield ranks
    finally:
        ranks.close()
