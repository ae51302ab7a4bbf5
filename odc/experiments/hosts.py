"""Several hosts run a job or the arms of a comparison together: one process on each launches that host's ranks.

These processes keep step by messages through a store, mostly torchrun's. Host 0 opens each run by sending the port of
the store at which its ranks meet; each host sends the others how its ranks ended, and host 0 what they measured and
their spans. So hosts share no folder.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from odc.errors import ConfigError, OdcError
from odc.experiments.launch import JobFailedError, LaunchSite, by_blame, launch
from odc.experiments.results import JobResult
from odc.net import Mailbox
from odc.net.store import store_of_hosts
from odc.trace import rank_file

_TIMEOUT_S = 600.0
_PREPARE_S = 6 * 3600.0  # that hosts may differ in reading their data, before the first run
_REFUSED_S = 30.0  # for a host that is refused to reach the store, and let the others know
_LATE_S = 5.0  # that other hosts have to send what they saw, once this host's ranks have failed
_MEASURED = ("rank", "host", "peak_bytes", "held_bytes", "baseline_bytes")  # what host 0 needs of other hosts' ranks


class HostTeam:
    """This host, `number` of `count`, among those of `task`; each starts `per_host` ranks.

    Enter it around the whole task: an error that ends it on one host then ends it on all, and a clean exit waits for
    the other hosts. `store` is torch's, `address` that of host 0. Waits end after `timeout_s`, before the first run
    after hours, and raise as a Mailbox's.
    """

    def __init__(
        self,
        number: int,
        count: int,
        per_host: int,
        address: str,
        store: Any,
        timeout_s: float = _TIMEOUT_S,
        task: str = "the comparison",
    ) -> None:
        self.number, self.count, self.per_host, self.address = number, count, per_host, address
        self._timeout_s = timeout_s
        self._mail = Mailbox(store, range(count), number, timeout_s, "odc/compare/", kind="host", task=task)
        self._task = task
        self._others = [host for host in range(count) if host != number]
        self._run_store: Any = None  # host 0: the store of the present run

    @classmethod
    def of_launcher(cls, task: str = "the comparison") -> HostTeam:
        """In a process with torchrun's variables. Raises ConfigError where hosts have unequally many ranks: on those
        whose number is not the mean; they end the others, which could not know.
        """
        names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
        number, count, per_host, world = (int(os.environ[name]) for name in names)
        join = functools.partial(cls, number, count, per_host, os.environ["MASTER_ADDR"], task=task)
        if world == count * per_host:
            return join(store=store_of_hosts(number, _TIMEOUT_S))
        error = ConfigError(
            f"{world} ranks on {count} hosts, {per_host} of them here: every host must start equally many "
            "(--nproc-per-node)"
        )
        with contextlib.suppress(Exception):  # the store's host may have been refused, too, and be gone
            join(store=store_of_hosts(number, _REFUSED_S))._mail.fail(error)
        raise error

    @property
    def leads(self) -> bool:
        """Whether this is host 0, which measures, draws and writes."""
        return self.number == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._mail.leave(f"the end of {self._task}")
        elif not isinstance(error, JobFailedError):  # of that every host knows
            with contextlib.suppress(OdcError):  # the store is gone too
                self._mail.fail(error)

    def launch(self, run: int, entry: Callable[..., Any], *args: Any) -> list[Any]:
        """As `odc.experiments.launch.launch`, for this host's ranks of run `run`; every host calls it.

        Raises JobFailedError with what the ranks of all hosts saw, as far as their hosts send it in time.
        """
        failed: JobFailedError | None = None
        site, values = self._open(run), list[Any]()
        try:
            values = launch(entry, *args, ranks=len(site.ranks), site=site)
        except JobFailedError as error:
            failed = error
        failures = self._all_failures(run, failed.failures if failed else [])
        if failures:
            raise JobFailedError(failures, failed.tracebacks if failed else {})
        return values

    def _open(self, run: int) -> LaunchSite:
        """Host 0 makes the store of a run once every host is ready for it; the others wait until it does.

        So no rank waits for a host that has ended, or for one that still reads data or measures the run before.
        """
        import torch.distributed as dist

        longest = self._timeout_s if run else _PREPARE_S
        if self.leads:
            for host in self._others:
                self._mail.receive(host, f"host {host} to be ready for run {run + 1}", longest)
            stores: Any = dist
            patience = timedelta(seconds=self._timeout_s)
            self._run_store = stores.TCPStore(self.address, 0, is_master=True, timeout=patience, wait_for_workers=False)
            port = int(self._run_store.port)
            for host in self._others:
                self._mail.send(host, str(port).encode(), "the port of a run")
        else:
            self._mail.send(0, b"", "that it is ready")
            port = int(self._mail.receive(0, f"host 0 to open run {run + 1}", longest))
        first = self.number * self.per_host
        ranks = range(first, first + self.per_host)
        return LaunchSite(ranks, self.per_host * self.count, self.address, port, self.number, self.count)

    def _all_failures(self, run: int, found: list[tuple[int, str]]) -> list[tuple[int, str]]:
        """Those of all hosts' ranks; `found` are those of this host's."""
        for host in self._others:
            self._mail.send(host, json.dumps(found).encode(), "how its ranks ended")
        found = [*found]
        for host in self._others:
            try:
                message = self._mail.receive(host, f"host {host} to end run {run + 1}", _LATE_S if found else None)
            except OdcError:
                if not found:
                    raise
                continue  # what this host's ranks saw is known
            found += [(int(rank), str(text)) for rank, text in json.loads(message)]
        return by_blame(found)

    def collect(self, run: int, results: list[Any], spans: Path) -> list[Any]:
        """On host 0 the results of all ranks, by rank, with all spans in its folder `spans`; elsewhere `results`.

        Every host calls it after `launch`. Of other hosts' ranks only what is measured a rank comes, and no steps.
        """
        what = f"what was measured in run {run + 1}"
        if not self.leads:
            measured = [{name: getattr(result, name) for name in _MEASURED} for result in results]
            self._mail.send(0, json.dumps(measured).encode(), what)
            for result in results:
                self._mail.send(0, gzip.compress(rank_file(spans, result.rank).read_bytes(), 1), what)
            return results
        for host in self._others:
            for one in json.loads(self._mail.receive(host, what)):
                results.append(JobResult(steps=[], **one))
            for result in results[-self.per_host :]:
                content = gzip.decompress(self._mail.receive(host, what))
                rank_file(spans, result.rank).write_bytes(content)
        return results
