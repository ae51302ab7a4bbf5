"""A job's store whose server is silent for a while, as where its host is cut off or stopped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from odc.net.liveness import Loss
from odc.runtime import daemon, stop_daemon

PATIENCE_S = 120.0  # then a call fails, so that a test whose wait nothing ends fails too


class SilentStore:
    """A store of this process. While it is `silent`, no call of it ends; `asked` is set once one has begun.

    `waited` names the calls that have ended all the same, after a patience that no test waits for.
    """

    def __init__(self, *, silent: bool = True) -> None:
        made: Any = dist
        self.store, self.asked, self._answers = made.HashStore(), threading.Event(), threading.Event()
        self.silent, self.waited = silent, list[str]()

    @property
    def silent(self) -> bool:
        return not self._answers.is_set()

    @silent.setter
    def silent(self, silent: bool) -> None:
        if silent:
            self._answers.clear()
        else:
            self._answers.set()

    def clone(self) -> Any:
        raise NotImplementedError("a process has one connection to it")

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def call(*arguments: Any) -> Any:
            if self.silent:
                self.asked.set()
            if not self._answers.wait(PATIENCE_S):
                self.waited.append(name)
                raise RuntimeError(f"nothing has ended the wait for {name}{arguments}")
            return method(*arguments)

        return call


@contextmanager
def silent_once_a_rank_is_lost(rank: int = 0) -> Iterator[SilentStore]:
    """A silent store of `rank`, in a process whose daemon knows that rank 1 has died. Some error must end its calls."""
    store = SilentStore()
    stop_daemon()  # of an earlier test, perhaps of another rank
    daemon(rank).liveness.report(Loss(1, 1, "rank 1 died"))
    try:
        yield store
    finally:
        store.silent = False
        stop_daemon()
    assert not store.waited, "the wait for the store ends only with it"
