"""Several hosts run the arms of a comparison together: one process on each launches that host's ranks.

These processes keep step through a store, mostly torchrun's. Host 0 opens each run by saying at which store its ranks
meet; each host says how its ranks ended, and sends host 0 what they measured and their spans. So hosts share no folder.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from odc.deadlines import Backoff, Deadline
from odc.errors import ConfigError, OdcError, WaitTimeoutError
from odc.experiments.launch import JobFailedError, LaunchSite, by_blame, launch
from odc.experiments.results import JobResult
from odc.net.store import JobStore
from odc.trace import rank_file

_CHUNK = 1 << 20  # bytes of one value; torch's store takes up to 8 MiB
_PREPARE_S = 6 * 3600.0  # that hosts may differ in reading their data, before the first run
_LATE_S = 5.0  # that other hosts have to say what they saw, once this host's ranks have failed
_MEASURED = ("rank", "host", "peak_bytes", "held_bytes", "baseline_bytes")  # what host 0 needs of other hosts' ranks


class HostTeam:
    """This host, `number` of `count`, among those of a comparison; each starts `per_host` ranks.

    Enter it around the whole comparison: an error that ends it on one host then ends it on all. `store` is torch's,
    `address` that of host 0. Waits raise WaitTimeoutError after `timeout_s`, before the first run after hours, and as a
    JobStore does.
    """

    def __init__(
        self, number: int, count: int, per_host: int, address: str, store: Any, timeout_s: float = 600.0
    ) -> None:
        self.number, self.count, self.per_host, self.address = number, count, per_host, address
        self._timeout_s = timeout_s
        self._store = JobStore(store, timeout_s, prefix="odc/compare/")
        self._meeting: Any = None  # host 0: the store of the present run

    @classmethod
    def of_torchrun(cls, timeout_s: float = 600.0) -> HostTeam:
        """In a process that torchrun has started. Raises ConfigError where hosts have unequally many ranks."""
        import torch.distributed as dist

        stores: Any = dist
        names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_PORT")
        number, count, per_host, world, port = (int(os.environ[name]) for name in names)
        if world != count * per_host:
            raise ConfigError(
                f"{world} ranks on {count} hosts, {per_host} of them here: every host must start equally many "
                "(--nproc-per-node)"
            )
        hosting = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and number == 0
        options = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
        store = stores.TCPStore(os.environ["MASTER_ADDR"], port, is_master=hosting, **options)
        attempt = stores.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        return cls(number, count, per_host, os.environ["MASTER_ADDR"], attempt, timeout_s)

    @property
    def leads(self) -> bool:
        """Whether this is host 0, which measures, draws and writes."""
        return self.number == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, JobFailedError):  # of that every host knows
            with contextlib.suppress(OdcError):  # the store is gone too
                self._store.within(_LATE_S).set(f"gone/{self.number}", f"{type(error).__name__}: {error}")

    def launch(self, run: int, entry: Callable[..., Any], *args: Any) -> list[Any]:
        """As `odc.experiments.launch.launch`, for this host's ranks of run `run`; every host calls it.

        Raises JobFailedError with what the ranks of all hosts saw, as far as their hosts say so in time.
        """
        failed: JobFailedError | None = None
        site, values = self._open(run), list[Any]()
        try:
            values = launch(entry, *args, ranks=len(site.ranks), site=site)
        except JobFailedError as error:
            failed = error
        self._store.set(f"{run}/ended/{self.number}", json.dumps(failed.failures if failed else []))
        failures = self._all_failures(run, failed)
        if failures:
            raise JobFailedError(failures, failed.tracebacks if failed else {})
        return values

    def _open(self, run: int) -> LaunchSite:
        """Host 0 makes the store of a run once every host is ready for it; the others wait until it does.

        So no rank waits for a host that has ended, or for one that still reads data or measures the run before.
        """
        import torch.distributed as dist

        key, patience = f"{run}/open", timedelta(seconds=self._timeout_s)
        longest = self._timeout_s if run else _PREPARE_S
        self._store.set(f"{run}/ready/{self.number}", "")
        for host in range(1, self.count) if self.leads else ():
            self._await(f"{run}/ready/{host}", host, f"to be ready for run {run + 1}", longest)
        if self.leads:
            stores: Any = dist
            self._meeting = stores.TCPStore(self.address, 0, is_master=True, timeout=patience, wait_for_workers=False)
            self._store.set(key, str(self._meeting.port))
        port = int(self._await(key, 0, f"to open run {run + 1}", longest))
        first = self.number * self.per_host
        ranks = range(first, first + self.per_host)
        return LaunchSite(ranks, self.per_host * self.count, self.address, port, self.number, self.count)

    def _all_failures(self, run: int, failed: JobFailedError | None) -> list[tuple[int, str]]:
        found = [] if failed is None else list(failed.failures)
        for host in (host for host in range(self.count) if host != self.number):
            what, patience = f"to end run {run + 1}", _LATE_S if found else self._timeout_s
            try:
                said = json.loads(self._await(f"{run}/ended/{host}", host, what, patience))
            except OdcError:
                if not found:
                    raise
                continue  # what this host's ranks saw is known
            found += [(int(rank), str(text)) for rank, text in said]
        return by_blame(found)

    def _await(self, key: str, host: int, what: str, timeout_s: float) -> bytes:
        deadline, backoff = Deadline(timeout_s), Backoff(0.01, 0.2)
        while not self._store.check([key]):
            gone = f"gone/{host}"
            if self._store.check([gone]):
                raise OdcError(f"host {host} has ended: {self._store.get(gone).decode()}")
            if deadline.passed():
                raise WaitTimeoutError(f"host {self.number} has waited {timeout_s:g} s for host {host} {what}")
            backoff.sleep()
        return self._store.get(key)

    def collect(self, run: int, results: list[Any], spans: Path) -> list[Any]:
        """On host 0 the results of all ranks, by rank, with all spans in its folder `spans`; elsewhere `results`.

        Every host calls it after `launch`. Of other hosts' ranks only what is measured a rank comes, and no steps.
        """
        if not self.leads:
            for result in results:
                self._send(f"{run}/spans/{result.rank}", rank_file(spans, result.rank).read_bytes())
            told = [{name: getattr(result, name) for name in _MEASURED} for result in results]
            self._store.set(f"{run}/measured/{self.number}", json.dumps(told))
            return results
        for host in range(1, self.count):
            key = f"{run}/measured/{host}"
            measured = json.loads(self._await(key, host, f"to send what it measured in run {run + 1}", self._timeout_s))
            self._store.delete_key(key)
            for one in measured:
                results.append(JobResult(steps=[], **(one | {"rank": int(one["rank"])})))
                rank_file(spans, results[-1].rank).write_bytes(self._receive(f"{run}/spans/{results[-1].rank}"))
        return results

    def _send(self, key: str, content: bytes) -> None:
        packed = gzip.compress(content, 1)
        chunks = [packed[at : at + _CHUNK] for at in range(0, len(packed), _CHUNK)]
        for number, chunk in enumerate(chunks):
            self._store.set(f"{key}/{number}", chunk)
        self._store.set(key, str(len(chunks)))

    def _receive(self, key: str) -> bytes:
        """What has been sent; takes it out of the store."""
        names = [f"{key}/{number}" for number in range(int(self._store.get(key)))]
        content = gzip.decompress(b"".join(map(self._store.get, names)))
        for name in (key, *names):
            self._store.delete_key(name)
        return content
