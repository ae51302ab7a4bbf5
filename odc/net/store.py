"""The job's key-value store, with a deadline on every call.

torch's `TCPStore` may block for as long as its server is silent, whatever timeout it was given. A thread of this
process therefore makes the calls on a connection of its own, and the caller waits for the thread until its deadline.

While a call takes long, the caller also checks whether anything listens at the store's address: a new connection to a
store that is gone would be tried again until torch's timeout.
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from odc.deadlines import (
    STORE_CHECK_S,
    STORE_DEATH_POLL_S,
    STORE_DEATH_S,
    STORE_FIRST_PROBE_S,
    STORE_LONGEST_POLL_S,
    STORE_POLL_S,
    STORE_PROBE_S,
    Backoff,
    Deadline,
)
from odc.errors import OdcError, PeerLostError, WaitTimeoutError
from odc.memory import ProcessHandle
from odc.worker import Job, Worker

_NOTHING = secrets.token_hex(16)  # what no key has as its value


def _nothing() -> None:
    return


class _StoreConnection:
    """This process's own connection to a torch store, used by one thread; it lasts as long as the store.

    So a call after the death of the store's host does not begin with a new connection, for which torch would wait. It
    does not keep the store, which must end with its process group.
    """

    def __init__(self, store: Any) -> None:
        self.address, self.pid = store_address(store), os.getpid()
        self.worker = Worker("odc-store")
        self.processes: dict[int, ProcessHandle] = {}  # of global ranks, as far as they are known
        self.hosts: dict[int, str] = {}  # likewise
        self.elsewhere = set[int]()  # global ranks whose processes cannot be seen from here
        self._clones: list[Any] = []
        weakref.finalize(self, _close_all, self.processes).atexit = False

    def call(self, store: Any, name: str, arguments: tuple[Any, ...]) -> Any:
        """On the worker's thread: make a call of `store` on the connection."""
        if not self._clones:
            self._clones.append(clone_of(store))
        own = self._clones[0] or store
        if name == "multi_get" and not own.has_extended_api():  # such as a FileStore
            return [own.get(key) for key in arguments[0]]
        return getattr(own, name)(*arguments)


def clone_of(store: Any) -> Any:
    """A connection of its own; None to a store that cannot be cloned or whose server is gone, as calls will show."""
    try:
        socket.socket().close()  # raises where no descriptor is left, for which torch would try again and again
        return store.clone()
    except Exception:
        return None


def _close_all(processes: dict[int, ProcessHandle]) -> None:
    for process in processes.values():
        process.close()


_connections: weakref.WeakKeyDictionary[Any, _StoreConnection] = weakref.WeakKeyDictionary()
_connecting = threading.Lock()


def _connect(store: Any) -> _StoreConnection:
    with _connecting:
        found = _connections.get(store)
        if found is None or found.pid != os.getpid():
            found = _connections[store] = _StoreConnection(store)
        return found


class JobStore:
    """A `torch.distributed.Store` whose calls end. May be used from any thread, but not by a finalizer.

    Every method raises WaitTimeoutError if the store does not answer within `timeout_s`, and PeerLostError if it has
    gone with the process that hosts it. `store` may be a JobStore, whose connection is then shared, and whose prefix
    comes before `prefix`; `rank` is for messages; `watch`, called every 0.1 s while a call takes long, may raise to end
    the wait, and must not call the store. What `lasts` outlives a start of all ranks by torchrun.
    """

    def __init__(
        self,
        store: Any,
        timeout_s: float,
        rank: int | None = None,
        prefix: str = "",
        watch: Callable[[], object] = _nothing,
        *,
        lasts: bool = False,
    ) -> None:
        if isinstance(store, JobStore):
            prefix = store._prefix + prefix
        elif not lasts:
            prefix = attempt() + prefix
        self._store: Any = store._store if isinstance(store, JobStore) else store
        self._connection = _connect(self._store)
        self.timeout_s, self.rank, self._watch = timeout_s, rank, watch
        self._prefix: str = prefix

    @property
    def processes(self) -> dict[int, ProcessHandle]:
        """Processes of the job by global rank, as far as this process has looked; all users of the store share them."""
        return self._connection.processes

    @property
    def elsewhere(self) -> set[int]:
        """Global ranks whose processes cannot be seen from here, as far as this process has looked."""
        return self._connection.elsewhere

    @property
    def hosts(self) -> dict[int, str]:
        """As `processes`, the `host_identity` of each: it stays while the store is the same."""
        return self._connection.hosts

    def within(self, timeout_s: float) -> JobStore:
        """The same store with another deadline, and without `watch`."""
        return JobStore(self, timeout_s, self.rank)

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """The value of a key that is there and stays: for one that is not torch waits, and all calls with it."""
        value: bytes = self._call("get", self._prefix + key)
        return value

    def find(self, key: str) -> bytes | None:
        """The value of a key, None if it is not there; for keys that another rank may delete at any time."""
        value = self.compare_set(key, _NOTHING, _NOTHING)  # sets nothing; without the key it returns what was expected
        return None if value == _NOTHING.encode() else value

    def find_leading(self, keys: Sequence[str]) -> list[bytes]:
        """The values of `keys` up to the first that is not there; for keys that stay once they are set.

        The number of calls grows with the logarithm of the number of keys; it is one if the first is missing.
        """
        there, asked, growing = 0, 1, True
        while asked and there < len(keys):
            found = self.check(list(keys[there : there + asked]))
            there, growing = there + asked * found, growing and found
            asked = 2 * asked if growing else asked // 2
        if not there:
            return []
        values: list[bytes] = self._call("multi_get", [self._prefix + key for key in keys[:there]])
        return values

    def await_key(
        self,
        key: str,
        late: str,
        *,
        culprit: int | None = None,
        check: Callable[[], object] = _nothing,
        timeout_s: float | None = None,
    ) -> bytes:
        """The value of a key once another rank has set it.

        `check`, which may call the store, and the watch are called between two checks for the key, and may raise to end
        the wait. WaitTimeoutError, with the text `late` and the `culprit`, after `timeout_s`, which is the store's
        unless given.
        """
        deadline = Deadline(self.timeout_s if timeout_s is None else timeout_s)
        backoff = Backoff(STORE_POLL_S, STORE_LONGEST_POLL_S, growth=1.2)
        while (found := self.find(key)) is None:
            check()
            self._watch()
            if deadline.passed():
                raise WaitTimeoutError(late, culprit=culprit)
            backoff.sleep()
        return found

    def check(self, keys: list[str]) -> bool:
        return bool(self._call("check", [self._prefix + key for key in keys]))

    def add(self, key: str, number: int) -> int:
        """Add to a counter, which begins at 0; returns its new value."""
        return int(self._call("add", self._prefix + key, number))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a key if it has the expected value ("": is not there); returns the value that it has now."""
        found: bytes = self._call("compare_set", self._prefix + key, expected, value)
        return found

    def delete_key(self, key: str) -> None:
        """Delete a key, whether it is there or not."""
        self._call("delete_key", self._prefix + key)

    def _call(self, name: str, *arguments: Any) -> Any:
        job = Job(functools.partial(self._connection.call, self._store, name, arguments))
        self._connection.worker.submit(job)
        deadline, probe = Deadline(self.timeout_s), Deadline(STORE_FIRST_PROBE_S)
        try:
            while not job.over(min(STORE_CHECK_S, self.timeout_s)):
                self._watch()
                if probe.passed():
                    self._refuse_gone()
                    probe = Deadline(2 * probe.timeout_s)  # a store that is stopped accepts, but only so many
                if deadline.passed():
                    raise WaitTimeoutError(
                        f"{self._who()}the job's key-value store{self._where()} has not answered for "
                        f"{self.timeout_s:g} s; look at the process that hosts it ({_host()})",
                        culprit=_hosting_rank(),
                    )
        finally:
            job.drop()  # a call that its caller has given up is not made
        if job.error is not None:
            raise self._lost(job.error) from job.error
        return job.wait()

    def _refuse_gone(self) -> None:
        """Raise PeerLostError if nothing listens at the store's address any more."""
        try:
            if self._connection.address is not None:
                socket.create_connection(self._connection.address, STORE_PROBE_S).close()
        except ConnectionRefusedError as error:
            raise self._lost(error) from error
        except OSError:  # it may be slow, or cut off for a moment
            return

    def _lost(self, error: BaseException) -> OdcError:
        lines = str(error).strip().splitlines()
        text = f"{self._who()}the job's key-value store{self._where()} is gone ({lines[0] if lines else error!r})"
        dead = self._dead_within(STORE_DEATH_S)
        if dead is not None:
            return PeerLostError(f"{text}: the process of rank {dead} has ended", culprit=dead)
        return PeerLostError(f"{text}: the process that hosts it ({_host()}) has ended", culprit=_hosting_rank())

    def _dead_within(self, seconds: float) -> int | None:
        """The lowest rank whose process is known to have ended, waited for so long."""
        deadline, backoff = Deadline(seconds), Backoff(STORE_DEATH_POLL_S, STORE_DEATH_POLL_S)
        while True:
            for rank, process in sorted(self.processes.items()):
                if not process.alive():
                    return rank
            if deadline.passed() or not self.processes:
                return None
            backoff.sleep()

    def _who(self) -> str:
        return "" if self.rank is None else f"rank {self.rank}: "

    def _where(self) -> str:
        address = self._connection.address
        return "" if address is None else f" at {address[0]}:{address[1]}"


def underlying(store: Any) -> Any:
    """A torch store without its prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def store_address(store: Any) -> tuple[str, int] | None:
    """Host and port of a torch store; None of one that no process hosts, such as a FileStore."""
    store = underlying(store)
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return (str(host), int(port)) if host and port else None


def _hosting_rank() -> int | None:
    """Rank 0 hosts the store of a job that was not started by torch's launcher, which hosts it itself."""
    return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


def _host() -> str:
    return "the launcher" if _hosting_rank() is None else "rank 0, unless a launcher does"


def store_of_hosts(host: int, timeout_s: float) -> Any:
    """Torch's store of one process a host, by the launcher's variables: hosted by the launcher, else by that of host 0.
    What the launcher starts again does not find the keys of before.
    """
    import torch.distributed as dist

    stores: Any = dist
    port, hosting = int(os.environ["MASTER_PORT"]), _hosting_rank() is not None and host == 0
    options = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
    store = stores.TCPStore(os.environ["MASTER_ADDR"], port, is_master=hosting, **options)
    return stores.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


def attempt() -> str:
    """Begins the keys of what torchrun has started again: on one host its store stays, with what the ranks before have
    left in it. Over hosts it is empty, because each host's torchrun counts for itself.
    """
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return "" if count == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1" else f"attempt{count}/"
